//! A store, the quick way: runs of blocks at a time.
//!
//! The quick way is for what engines do nearly always. Whatever it cannot tell apart at a glance (a name
//! known elsewhere, a block whose parent is not there, a second group, a place with two names) it leaves,
//! without having changed anything, to the careful way in [`super::careful`].
//!
//! Readers see all of a store at once: what hangs below is shown before what it hangs on. Splits in the
//! course of it show nothing new.

use super::bits::Run;
use super::fresh::Fresh;
use super::grow::{Homonyms, Odd, Told};
use super::lanes::{Lane, LaneState};
use super::layer::Layer;
use super::node::{Column, NodeId, Place};
use super::tree::Tree;
use super::worker::{GroupLane, Worker, digest_of};
use super::{ShardLimits, StoreBlocks, StoreOutcome, words};
use crate::ids::{EngineHash, GroupId};
use smallvec::SmallVec;

/// Blocks of a store that are on a node already.
#[derive(Clone, Copy, Debug)]
struct Found {
    node: NodeId,
    from: u16,
    to: u16,
    /// The first of them in the store.
    at: usize,
    naming: Naming,
    /// The lane was at the node before.
    known: bool,
}

/// How the worker's names come to be at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// All of them are in a column.
    Same(u16),
    /// From a block on they are to be added to a column that ends there.
    Extend(u16, u16),
    /// They are to be a column of their own.
    New,
}

type Path = SmallVec<[Found; 8]>;

/// Where in a tier a store goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Goal {
    pub(super) tier: Layer,
    pub(super) group: GroupId,
    pub(super) lane: Lane,
}

impl Worker {
    /// Takes a store, or says that it is not for the quick way.
    pub(super) fn store_quickly(
        &mut self,
        tree: &mut Tree,
        limits: &ShardLimits,
        store: &StoreBlocks<'_>,
    ) -> Result<StoreOutcome, Odd> {
        let blocks = store.hashes.len();
        let told = Told { locals: store.locals, names: store.hashes, seed: store.seed };
        let usual = self.waiting.is_empty() && !self.forked && blocks > 0 && blocks == store.locals.len();
        let countable = self.extras_most < u32::MAX;
        let fits = self.bound() + blocks as u64 <= self.blocks_max && self.bytes_with(tree, blocks) <= self.bytes_max;
        if !usual || !countable || !fits {
            return Err(Odd::Unusual);
        }
        let tier = self.layer(store.tier, store.group);
        let known = self.sole_lane(tier, store.group);
        if tier == Layer::Windows || (known.is_none() && !self.tiers[tier.index()].groups.is_empty()) {
            return Err(Odd::Unusual);
        }
        let (path, place) = self.follow(tree, store.parent, told)?;
        let on_path = path.last().map_or(0, |last| last.at + usize::from(last.to - last.from));
        let is_repeated = store.parent.is_none() && on_path == blocks;
        if is_repeated && !limits.counts_copies && self.is_ambiguous(tree, known, store, &path) {
            return Ok(StoreOutcome { ambiguous: true, already: blocks as u32, ..StoreOutcome::default() });
        }
        let lane = match known {
            Some(lane) => lane,
            None => tree.lanes.give(self.slot, self.life, tier, LaneState::Shown).ok_or(Odd::Unusual)?,
        };
        let goal = Goal { tier, group: store.group, lane };
        if known.is_none() {
            self.kin.push(lane);
        }
        let taken = self.take(tree, goal, told, path, place);
        if taken.is_err() && known.is_none() {
            self.kin.pop();
            tree.lanes.set_state(lane, LaneState::Free);
        }
        let already = taken?;
        self.tiers[goal.tier.index()].references += blocks as u64;
        Ok(StoreOutcome { stored: blocks as u32, already, ..StoreOutcome::default() })
    }

    /// A tier's first group is there from now on.
    fn announce(&mut self, tree: &mut Tree, goal: Goal) {
        let tier = &mut self.tiers[goal.tier.index()];
        tier.groups.push(GroupLane { group: goal.group, lane: goal.lane, fresh: Fresh::default() });
        tier.shown = goal.lane;
        tree.publish_lanes();
    }

    /// Follows a store along what is there: the runs it finds, and where it leaves them.
    fn follow(&self, tree: &Tree, parent: Option<EngineHash>, told: Told<'_>) -> Result<(Path, Place), Odd> {
        let mut place = match parent {
            None => Place::ROOT,
            Some(parent) => {
                let place = self.find_last(tree, parent).ok_or(Odd::Unusual)?;
                Place { at: place.at + 1, ..place }
            }
        };
        let mut path = Path::new();
        let mut at = 0;
        while at < told.len() {
            let node = &tree.nodes[place.node];
            if place.at == node.len {
                if !node.has_children() {
                    break;
                }
                match tree.child(place.node, told.locals[at], 0) {
                    Some(child) if tree.nodes[child].forks > 0 => return Err(Odd::Unusual),
                    Some(child) => place = Place { node: child, at: 0 },
                    None => break,
                }
                continue;
            }
            let rest = told.from(at);
            let run =
                super::compare::common_prefix(&tree.locals(place.node)[usize::from(place.at)..], rest.local_words());
            if run == 0 {
                break;
            }
            let to = place.at + run as u16;
            let naming = self.naming(tree, place, rest.first(run))?;
            path.push(Found { node: place.node, from: place.at, to, at, naming, known: false });
            (place.at, at) = (to, at + run);
        }
        Ok((path, place))
    }

    /// How a run's names are, or come to be, at a node.
    fn naming(&self, tree: &Tree, place: Place, run: Told<'_>) -> Result<Naming, Odd> {
        let node = &tree.nodes[place.node];
        if !tree.homonyms.is_empty() && run.names.iter().any(|name| tree.homonyms.contains_key(name)) {
            return Err(Odd::Unusual);
        }
        let fits = |at: u16, column: &Column| {
            let known = tree.names(column).get(usize::from(place.at)..).ok_or(Odd::Unusual)?;
            let known = &known[..known.len().min(run.len())];
            if column.seed != run.seed || known != &run.name_words()[..known.len()] {
                return Err(Odd::Unusual);
            }
            let to = place.at + run.len() as u16;
            Ok(if column.len >= to { Naming::Same(at) } else { Naming::Extend(at, column.len) })
        };
        match self.column_of(node) {
            Some(at) => fits(at, &node.columns[usize::from(at)]),
            None if place.at > 0 => Err(Odd::Unusual),
            None => {
                let same =
                    |column: &Column| column.seed == run.seed && tree.names(column).first() == run.name_words().first();
                match node.columns.iter().position(same) {
                    Some(at) => fits(at as u16, &node.columns[at]),
                    None => Ok(Naming::New),
                }
            }
        }
    }

    /// Whether a store at the root says only what its lane held before the batch began.
    fn is_ambiguous(&mut self, tree: &Tree, lane: Option<Lane>, store: &StoreBlocks<'_>, path: &Path) -> bool {
        let Some(lane) = lane else { return false };
        let held = path.iter().all(|found| {
            let entry = tree.nodes[found.node].entry(lane);
            entry.is_some_and(|entry| (found.from..found.to).all(|at| entry.covers(at)))
        });
        held && !self.is_fresh(store.tier.into(), store.group, store.hashes)
    }

    /// Whether one of some held blocks came to be referred to in this batch.
    pub(super) fn is_fresh(&mut self, tier: Layer, group: GroupId, names: &[EngineHash]) -> bool {
        let batch = self.batch;
        let mut groups = self.tiers[tier.index()].groups.iter_mut();
        groups.find(|lane| lane.group == group).is_some_and(|lane| lane.fresh.has_any(batch, names))
    }

    /// Applies a store that has been followed; returns how many blocks had a reference already.
    fn take(
        &mut self,
        tree: &mut Tree,
        goal: Goal,
        told: Told<'_>,
        mut path: Path,
        mut place: Place,
    ) -> Result<u32, Odd> {
        let on_path = path.last().map_or(0, Found::end);
        let tail = told.from(on_path);
        if tail.len() > 0 && place.at < tree.nodes[place.node].len {
            let prefix = tree.split(place.node, place.at);
            if let Some(last) = path.last_mut().filter(|last| last.node == place.node) {
                last.node = prefix;
                last.naming = self.naming(tree, Place { node: prefix, at: last.from }, last.of(told))?;
            }
            place.node = prefix;
        }
        self.name_path(tree, goal.lane, told, &mut path)?;
        let grown = match grow(tree, goal, tail, place) {
            Ok(grown) => grown,
            Err(odd) => {
                undo_naming(tree, goal.lane, &path);
                return Err(odd);
            }
        };
        if self.tiers[goal.tier.index()].groups.is_empty() {
            self.announce(tree, goal);
        }
        Ok(self.show(tree, goal, told, &path, &grown))
    }

    /// Writes the names that are not there yet, and enters the lane at every node of the path.
    fn name_path(&self, tree: &mut Tree, lane: Lane, told: Told<'_>, path: &mut Path) -> Result<(), Odd> {
        for step in 0..path.len() {
            let found = &mut path[step];
            found.known = tree.nodes[found.node].entry(lane).is_some();
            let run = found.of(told);
            let named = match found.naming {
                Naming::Same(column) => Ok(column),
                Naming::Extend(column, from) => tree
                    .extend_column(found.node, column, run.from(usize::from(from - found.from)), Homonyms::Refused)
                    .map(|()| column),
                Naming::New => tree.new_column(found.node, run, Homonyms::Refused),
            };
            match named {
                Ok(column) => {
                    tree.enter(found.node, lane, column);
                }
                Err(odd) => {
                    undo_naming(tree, lane, &path[..step]);
                    return Err(odd);
                }
            }
        }
        Ok(())
    }

    /// Shows readers what has been prepared, what is farthest from the root first.
    fn show(&mut self, tree: &mut Tree, goal: Goal, told: Told<'_>, path: &Path, grown: &Grown) -> u32 {
        grown.nodes.iter().rev().for_each(|id| tree.insert(*id));
        let tail = told.from(path.last().map_or(0, Found::end));
        self.gain(goal, tail.names);
        self.population[1 << goal.tier.index()] += tail.len() as u64;
        let mut shown = grown.at;
        let mut changed = grown.appended > 0 || (grown.first_child && !grown.nodes.is_empty());
        let mut already = 0;
        for found in path.iter().rev() {
            if found.node != shown && changed {
                tree.publish(shown);
                changed = false;
            }
            shown = found.node;
            let node = &mut tree.nodes[found.node];
            let Ok(entry) = node.find(goal.lane) else { continue };
            let newly = node.entries[entry].add(found.from, found.to);
            self.count(node, goal.tier, goal.lane, &newly, false);
            changed |= !newly.is_empty();
            already += self.refer(goal, *found, told, &newly);
        }
        if changed {
            tree.publish(shown);
        }
        if let Some(last) = told.names.last() {
            self.last = (*last, grown.last(tree, path));
        }
        already
    }

    /// Counts the references of a run of which some blocks are newly covered; returns how many were not.
    fn refer(&mut self, goal: Goal, found: Found, told: Told<'_>, newly: &[Run]) -> u32 {
        let names = found.of(told).names;
        let mut again = found.from;
        let mut already = 0;
        for run in newly.iter().copied().chain([Run::new(found.to, found.to)]) {
            for at in again..run.from {
                self.refer_again(names[usize::from(at - found.from)], goal.lane);
                already += 1;
            }
            self.gain(goal, &names[usize::from(run.from - found.from)..usize::from(run.to - found.from)]);
            again = run.to;
        }
        already
    }

    /// Blocks that the tier's only group refers to, and so the tier holds, from now on.
    fn gain(&mut self, goal: Goal, names: &[EngineHash]) {
        let tier = &mut self.tiers[goal.tier.index()];
        tier.held += names.len() as u64;
        tier.digest = tier.digest.wrapping_add(digest_of(words::of_names(names)));
        self.note_fresh(goal.tier, 0, names);
    }
}

impl Found {
    const fn end(&self) -> usize {
        self.at + (self.to - self.from) as usize
    }

    fn of<'a>(&self, told: Told<'a>) -> Told<'a> {
        told.from(self.at).first(usize::from(self.to - self.from))
    }
}

/// What was made of the blocks that were nowhere.
struct Grown {
    /// Where they hang.
    at: NodeId,
    /// Nothing hung there before.
    first_child: bool,
    /// Blocks put at its end.
    appended: usize,
    /// Nodes below it.
    nodes: SmallVec<[NodeId; 4]>,
}

impl Grown {
    /// Where the last block of the store is.
    fn last(&self, tree: &Tree, path: &Path) -> Place {
        let node = match (self.nodes.last(), path.last()) {
            (Some(node), _) => *node,
            (None, Some(found)) if self.appended == 0 => return Place { node: found.node, at: found.to - 1 },
            _ => self.at,
        };
        Place { node, at: tree.nodes[node].len - 1 }
    }
}

/// Puts the blocks that are nowhere yet below the place where the store leaves what is there.
fn grow(tree: &mut Tree, goal: Goal, tail: Told<'_>, place: Place) -> Result<Grown, Odd> {
    let mut grown = Grown { at: place.node, first_child: false, appended: 0, nodes: SmallVec::new() };
    if tail.len() == 0 {
        return Ok(grown);
    }
    let len = tree.nodes[place.node].len;
    if tree.may_append(place.node, goal.lane, tail.seed) {
        grown.appended = tree.append(place.node, tail, Homonyms::Refused)?;
    }
    grown.first_child = !tree.nodes[place.node].has_children();
    match tree.chain(place.node, goal.lane, tail.from(grown.appended)) {
        Ok(nodes) => grown.nodes = nodes,
        Err(odd) => {
            tree.unappend(place.node, len);
            return Err(odd);
        }
    }
    Ok(grown)
}

/// Takes back what [`Worker::name_path`] did for some nodes.
fn undo_naming(tree: &mut Tree, lane: Lane, path: &[Found]) {
    for found in path {
        if let Naming::Extend(column, from) = found.naming {
            tree.truncate_column(found.node, column, from);
        }
        if let Ok(entry) = tree.nodes[found.node].find(lane)
            && !found.known
        {
            tree.remove_entry(found.node, entry);
        }
    }
}
