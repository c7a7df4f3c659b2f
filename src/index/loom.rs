//! The publication protocol in miniature, under every order of accesses that the memory model allows (up to a
//! number of preemptions): the real lines, the real table and the real stack, with a reader that walks as
//! readers do and a model of the grace period (`seize` does not run under the model checker).
//!
//! `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release index::loom`
//!
//! Each model says which answers there may be, and that each of them occurs: a model in which the reader always comes
//! too late would prove nothing. Beside it stand mutants, the same protocol with one step wrong, that must be
//! caught.
#![expect(unsafe_code, reason = "the model's arena is what the model checker watches for races")]

mod grace;
mod order;
mod stack;

use super::header::{Header, LEAF, Line};
use super::sync::{Arc, AtomicU64, Ordering, fence};
use super::table::{Found, Head, Retired, Table, TableWriter};
use ::loom::cell::UnsafeCell;
use std::sync::atomic::AtomicU64 as Counter;

/// The parent of nodes without one.
const ROOT: u32 = 0;
/// Preemptions of most models.
const PREEMPTIONS: usize = 2;
/// Words of the arena.
const ARENA_WORDS: usize = 4;

/// What reader and writer share.
struct World {
    head: Arc<Head>,
    arena: [UnsafeCell<u64>; ARENA_WORDS],
    /// 1 while the reader is inside.
    inside: AtomicU64,
}

// SAFETY: the arena's words are plain memory that several threads look at; that none writes while another looks
// is what the model checker checks.
unsafe impl Sync for World {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for World {}

impl World {
    fn local(&self, at: u32) -> u64 {
        // SAFETY: the pointer is good while the closure runs; races are reported.
        self.arena[at as usize].with(|word| unsafe { *word })
    }

    /// As `seize` where it has no process-wide barrier, and with one to the same effect.
    fn enter(&self) {
        // Relaxed: the fence pairs with the one in `has_passed`.
        self.inside.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn leave(&self) {
        // Release: pairs with the load in `has_passed`.
        self.inside.store(0, Ordering::Release);
    }

    /// Whether nobody is inside who might have seen what was unlinked before this call.
    fn has_passed(&self) -> bool {
        fence(Ordering::SeqCst);
        // Acquire: pairs with the store in `leave`.
        self.inside.load(Ordering::Acquire) == 0
    }
}

/// The writer, and what it must keep until the reader is gone.
struct Writer {
    table: TableWriter,
    world: Arc<World>,
    retired: Vec<Retired>,
}

impl Writer {
    fn new() -> Self {
        let table = TableWriter::new(0, 1);
        let arena = std::array::from_fn(|_| UnsafeCell::new(0));
        let world = Arc::new(World { head: Arc::clone(table.head()), arena, inside: AtomicU64::new(0) });
        Self { table, world, retired: Vec::new() }
    }

    fn set_locals(&self, from: usize, locals: &[u64]) {
        for (at, local) in (from..).zip(locals) {
            // SAFETY: the pointer is good while the closure runs; races are reported.
            self.world.arena[at].with_mut(|word| unsafe { *word = *local });
        }
    }

    fn insert(&mut self, header: &Header) {
        let (_, retired) = self.table.insert(header);
        self.retired.extend(retired);
    }

    fn index(&self, parent: u32, first: u64) -> usize {
        self.table.find(parent, first, 0).expect("the model put it there")
    }

    fn update(&mut self, parent: u32, first: u64, change: impl FnOnce(&mut Header)) {
        let index = self.index(parent, first);
        let mut header = self.table.header(index);
        change(&mut header);
        self.table.update(index, &header);
    }

    fn remove(&mut self, parent: u32, first: u64) {
        let index = self.index(parent, first);
        self.table.remove(index);
    }
}

fn node(parent: u32, first: u64, id: u32, base: u32, len: u16) -> Header {
    Header { parent, first, id, base, len, flags: LEAF, ..Header::default() }
}

/// Follows `query` from the root: how many of its hashes it found, and the lines it went over.
/// `None`: it met a change.
fn hops<'a>(world: &World, table: Table<'a>, query: &[u64]) -> Option<(usize, Vec<(&'a Line, u32)>)> {
    let (mut parent, mut depth, mut lines) = (ROOT, 0, Vec::new());
    while depth < query.len() {
        let (line, version, header) = match table.find(parent, query[depth], 0) {
            Found::Here(line, version, header) => (line, version, header),
            Found::Missing => break,
            Found::Busy => return None,
        };
        lines.push((line, version));
        let locals = (header.base..header.base + u32::from(header.len)).map(|at| world.local(at));
        let equal = locals.zip(&query[depth..]).take_while(|(ours, theirs)| ours == *theirs).count();
        depth += equal;
        if equal < usize::from(header.len) {
            break;
        }
        parent = header.id;
    }
    Some((depth, lines))
}

/// One try of a lookup, as readers do it.
fn walk(world: &World, query: &[u64]) -> Option<usize> {
    world.enter();
    let generation = world.head.generation()?;
    // SAFETY: retired tables live until the reader has joined.
    let table = unsafe { world.head.table() };
    let answer = hops(world, table, query).filter(|(_, lines)| lines.iter().all(|(line, v)| line.version() == *v));
    let answer = answer.filter(|_| world.head.generation() == Some(generation));
    world.leave();
    answer.map(|(depth, _)| depth)
}

/// A mutant of [`walk`] that does not look at the versions again.
fn walk_once(world: &World, query: &[u64]) -> Option<usize> {
    world.enter();
    // SAFETY: retired tables live until the reader has joined.
    let table = unsafe { world.head.table() };
    let answer = hops(world, table, query);
    world.leave();
    answer.map(|(depth, _)| depth)
}

/// One writer, one reader, one lookup.
#[derive(Clone, Copy)]
struct Model {
    /// What is there before the reader begins.
    before: fn(&mut Writer),
    /// What happens beside it.
    change: fn(&mut Writer),
    query: &'static [u64],
    walk: fn(&World, &[u64]) -> Option<usize>,
    /// The answers there may be, as a set of bits.
    answers: u64,
    /// Times that a thread is stopped against its will, at most, in one run.
    preemptions: usize,
}

impl Model {
    fn check(self) {
        let seen = std::sync::Arc::new(Counter::new(0));
        let noted = std::sync::Arc::clone(&seen);
        explore(self.preemptions, move || {
            let mut writer = Writer::new();
            (self.before)(&mut writer);
            let world = Arc::clone(&writer.world);
            let reader = ::loom::thread::spawn(move || (self.walk)(&world, self.query));
            (self.change)(&mut writer);
            if let Some(answer) = reader.join().expect("the reader ended") {
                assert!(self.answers & 1 << answer != 0, "a middle state: {answer}");
                // Relaxed: one real thread runs all of the model.
                noted.fetch_or(1 << answer, Ordering::Relaxed);
            }
        });
        assert_eq!(seen.load(Ordering::Relaxed), self.answers, "every answer occurs");
    }
}

/// Runs `model` in every order with so many preemptions.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}
