//! Engine hashes whose stores contradicted each other.

use rustc_hash::FxHashSet;

use crate::ids::EngineHash;
use crate::limits::CONFLICTED_HASHES_MAX;

/// Engine hashes that are no identity, as far as they are remembered.
#[derive(Debug, Default)]
pub(in crate::ingest) struct Conflicted {
    hashes: FxHashSet<EngineHash>,
    /// There are more than can be remembered: any hash may be one.
    all: bool,
}

impl Conflicted {
    /// Any hash may be one.
    pub(in crate::ingest) fn any() -> Self {
        Self { hashes: FxHashSet::default(), all: true }
    }

    pub(in crate::ingest) fn contains(&self, hash: EngineHash) -> bool {
        self.all || self.hashes.contains(&hash)
    }

    pub(in crate::ingest) fn extend(&mut self, hashes: &[EngineHash]) {
        if self.all || self.hashes.len() + hashes.len() > CONFLICTED_HASHES_MAX {
            *self = Self::any();
        } else {
            self.hashes.extend(hashes);
        }
    }
}
