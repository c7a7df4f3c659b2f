//! References of one worker beyond the first that a lane has to a block.

use super::lanes::Lane;
use crate::ids::EngineHash;
use hashbrown::HashMap;
use smallvec::SmallVec;

/// The counts, apart for each lane: a clear drops those of its lanes at once, however many there are.
#[derive(Debug, Default)]
pub(super) struct Extras {
    lanes: SmallVec<[(Lane, HashMap<EngineHash, u32>); 1]>,
}

impl Extras {
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|(_, counts)| counts.is_empty())
    }

    /// References beyond the first that a lane has to a block.
    pub(super) fn get(&self, name: EngineHash, lane: Lane) -> u32 {
        let counts = self.lanes.iter().find(|(of, _)| *of == lane);
        counts.and_then(|(_, counts)| counts.get(&name)).copied().unwrap_or(0)
    }

    /// Sets a count; returns what it was.
    pub(super) fn set(&mut self, name: EngineHash, lane: Lane, count: u32) -> u32 {
        let at = match self.lanes.iter().position(|(of, _)| *of == lane) {
            Some(at) => at,
            None if count == 0 => return 0,
            None => {
                self.lanes.push((lane, HashMap::default()));
                self.lanes.len() - 1
            }
        };
        let counts = &mut self.lanes[at].1;
        let before = if count == 0 { counts.remove(&name) } else { counts.insert(name, count) };
        before.unwrap_or(0)
    }

    /// Drops all counts of these lanes.
    pub(super) fn forget(&mut self, lanes: &[Lane]) {
        self.lanes.retain(|(of, _)| !lanes.contains(of));
    }

    pub(super) fn bytes(&self) -> usize {
        let entry = size_of::<(EngineHash, u32)>();
        self.lanes.iter().map(|(_, counts)| counts.capacity() * entry).sum()
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> impl Iterator<Item = (EngineHash, Lane)> + '_ {
        self.lanes.iter().flat_map(|(lane, counts)| counts.keys().map(|name| (*name, *lane)))
    }
}
