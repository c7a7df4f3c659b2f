//! Trust: how far an answer about a worker's cache may be believed, and why not further.
//!
//! Every candidate of every reply carries a level and a set of reasons. This file only defines them;
//! `event::worker_trust` decides when a worker's trust changes.

use std::fmt;

use crate::finding::Harm;
use crate::reasons::reasons;

/// How far the index's blocks of a worker may be believed, lowest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum TrustLevel {
    /// No event stream, and no predictions instead.
    #[default]
    None = 0,
    /// Predicted from the daemon's own decisions; the engine publishes nothing.
    Predicted = 1,
    /// The overlap may be too high or too low; the reasons say why.
    Unproven = 2,
    /// Every block counted is held; the worker may hold more.
    LowerBound = 3,
    /// Exactly what the engine held at the sequence number in the answer.
    Exact = 4,
}

impl TrustLevel {
    /// The name used in JSON, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Predicted => "predicted",
            Self::Unproven => "unproven",
            Self::LowerBound => "lower_bound",
            Self::Exact => "exact",
        }
    }

    /// What the level costs an operator.
    #[must_use]
    pub const fn consequence(self) -> &'static str {
        match self {
            Self::None => "nothing is known about the worker's cache: it is chosen by load alone",
            Self::Predicted => {
                "the worker's blocks are predicted: prompts may go to a worker that holds none of their blocks"
            }
            Self::Unproven => "the worker's overlaps may be too high or too low: prompts may go to the wrong worker",
            Self::LowerBound => "some of the worker's blocks may not count: prompts may be computed again elsewhere",
            Self::Exact => "nothing",
        }
    }

    /// The level with this number on the wire, if there is one.
    #[must_use]
    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::None,
            1 => Self::Predicted,
            2 => Self::Unproven,
            3 => Self::LowerBound,
            4 => Self::Exact,
            _ => return None,
        })
    }
}

impl fmt::Display for TrustLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

reasons! {
    /// Why a worker's trust is not `exact`. The discriminant is the bit's number on the wire; append only.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    TrustReason {
        /// The highest level of a worker with this reason.
        cap: TrustLevel;
        /// How much harm it does while it lasts.
        harm: Harm;
        /// What an operator can do about it.
        remedy: &'static str;
    }
    /// The worker has published nothing yet.
    Joining(0) = "joining", TrustLevel::Unproven, Harm::Note, "if the worker is ready, send it a prompt; otherwise start the engine with KV events enabled, or check the endpoint in the worker's record";
    /// The first batch received was not the first of the stream.
    JoinedLate(1) = "joined_late", TrustLevel::LowerBound, Harm::Warning, "clear the engine's prefix cache once (SGLang: POST /flush_cache, vLLM: POST /reset_prefix_cache) and send it one request, or restart the engine if it offloads blocks; in future start kvrouted before the engine";
    /// Batches are missing and could not be fetched again; the worker's blocks were dropped.
    Gap(2) = "gap", TrustLevel::LowerBound, Harm::Warning, "raise `hwm` in the engine's --kv-events-config, and `buffer_steps` if the worker has a `replay`; then clear its prefix cache once";
    /// The connection to the publisher broke; the worker's blocks were dropped, or a replay has yet to show that nothing was lost.
    Disconnected(3) = "disconnected", TrustLevel::Unproven, Harm::Warning, "check that the engine runs and that its endpoint is reachable";
    /// A message could not be decoded and was skipped.
    Undecodable(4) = "undecodable", TrustLevel::LowerBound, Harm::Severe, "check that the engine's version is supported; the log names the first bad field";
    /// Blocks of another block size or window arrived and were refused.
    SchemeMismatch(5) = "scheme_mismatch", TrustLevel::LowerBound, Harm::Severe, "start the engine with the space's block size, or put the worker into a space of its own";
    /// A store event bound a known hash to other content and was refused.
    HashConflict(6) = "hash_conflict", TrustLevel::LowerBound, Harm::Warning, "check that no two engines share one endpoint";
    /// A root chain was announced again and not counted: a second copy and a full report look the same.
    AmbiguousStore(7) = "ambiguous_store", TrustLevel::LowerBound, Harm::Warning, "if no caller can send this engine kv_cache_report_mode=full, set full_reports = \"none\" in the worker's [[space]], so that second copies are counted; without it a prefix of which one copy was evicted is not counted again until the engine's prefix cache is cleared";
    /// Blocks arrived whose chain, and so whose salt, is unknown; they were left out.
    UnknownRoot(8) = "unknown_root", TrustLevel::LowerBound, Harm::Warning, "first mend what the worker's other reasons name; then clear the engine's prefix cache once and send it one request, or restart the engine if it offloads blocks";
    /// A limit on this worker's blocks was reached; further blocks were refused.
    CapacityBound(9) = "capacity_bound", TrustLevel::LowerBound, Harm::Warning, "raise the limit that the log names, or check capacity_blocks in the worker's record";
    /// The engine has KV groups that no rule covers yet.
    Hybrid(10) = "hybrid", TrustLevel::Unproven, Harm::Warning, "route by load, or accept the risk: overlaps of this hybrid model are not proven yet";
    /// Blocks in a medium that maps to no tier were ignored.
    UnknownMedium(11) = "unknown_medium", TrustLevel::LowerBound, Harm::Warning, "report the medium's name, so that its blocks can be counted";
    /// Two live streams claim to be the worker, or its rank changed; the later one is refused.
    RankConflict(12) = "rank_conflict", TrustLevel::LowerBound, Harm::Severe, "give every data-parallel rank an endpoint and a dp_rank of its own";
    /// The worker sent no batch for longer than ingest.silence_ms_max.
    Silent(13) = "silent", TrustLevel::Unproven, Harm::Warning, "check the engine; if it is only idle, raise ingest.silence_ms_max";
    /// The worker publishes no events.
    NoEvents(14) = "no_events", TrustLevel::None, Harm::Note, "add an endpoint to the worker's record";
    /// The index changed under the lookup more often than the lookup retries.
    ReadContended(15) = "read_contended", TrustLevel::Unproven, Harm::Warning, "retry; if it persists, spread the workers over more shards (ingest.shards)";
    /// Batches are, or may be, missing and are being fetched.
    Recovering(16) = "recovering", TrustLevel::Unproven, Harm::Note, "wait; recovery is bounded in time";
    /// The engine's events cannot show that a prompt was salted, or show salts in two forms.
    IsolationUnknown(17) = "isolation_unknown", TrustLevel::Unproven, Harm::Warning, "if no prompt carries a cache salt, set salts = \"none\" in the worker's [[space]]; otherwise update the engine; if only some salts have the prefix dynamo-cache-salt: use one form for all";
    /// Part of a batch could not be understood, and it may have been a removal.
    UnknownEvents(18) = "unknown_events", TrustLevel::Unproven, Harm::Warning, "update kvrouted, or clear the engine's prefix cache once; the log names what was not understood";
    /// The engine's block hashes cover tokens after the block, or its connector moves chunks of several blocks, so that a block may fit a prompt only in part.
    LookaheadHash(19) = "lookahead_hash", TrustLevel::Unproven, Harm::Note, "nothing to do: a match may be too long by the last block, or by the last chunk of offloaded blocks, before prompts diverge";
    /// A message without the frames of a batch arrived; only the next batch shows whether it was one.
    Misframed(20) = "misframed", TrustLevel::Unproven, Harm::Warning, "give the worker a topic of its own, or check what else publishes at its endpoint";
    /// The space's memory limit was reached; further blocks were refused.
    MemoryBound(21) = "memory_bound", TrustLevel::LowerBound, Harm::Warning, "raise memory_bytes_max of the worker's space, or lower blocks_max of its workers";
    /// The worker publishes no events; its blocks are predicted from the bookings on it.
    OwnDecisions(22) = "own_decisions", TrustLevel::Predicted, Harm::Note, "add an endpoint to the worker's record";
    /// The engine's block hashes do not depend on the blocks before them; all its blocks are left out.
    UnchainedHashes(23) = "unchained_hashes", TrustLevel::LowerBound, Harm::Severe, "use SGLang 0.5.6 or later; until then the worker gets requests by load alone";
    /// A relay or a snapshot of another version gives a reason that this version does not know.
    UnknownReason(24) = "unknown_reason", TrustLevel::LowerBound, Harm::Warning, "update this kvrouted to the version of the worker's relay; until then the relay's level holds, at most lower_bound";
    /// A caller reported that the engine's cache was cleared; the engine has not published the clear yet.
    ClearAwaited(25) = "clear_awaited", TrustLevel::Unproven, Harm::Note, "send the worker one request, because engines publish a clear with their next step; if this reason stays, the clear was published before the report: clear once more and send one request";
    /// The engine announced more copies than it can hold, as full reports do, although the space rules these out; the worker's blocks were dropped.
    FullReports(26) = "full_reports", TrustLevel::LowerBound, Harm::Severe, "find the caller that sends the engine kv_cache_report_mode=full and strip the field there, or set full_reports = \"possible\" in the worker's [[space]]; then clear the engine's prefix cache once and send it one request";
    /// Offloaded blocks are known only by their hashes, and device memory has not shown their content; they were left out.
    OffloadUnbound(27) = "offload_unbound", TrustLevel::LowerBound, Harm::Note, "nothing to do: it ends when the engine loads or drops those blocks; to avoid it, start kvrouted, or a relay, before the engine";
    /// Part of what the worker holds below device memory is unknown: a clear did not say whether it included that part, or its store announces too little.
    LowerTiersUnknown(28) = "lower_tiers_unknown", TrustLevel::LowerBound, Harm::Note, "nothing to do if only device memory matters; otherwise restart the engine after kvrouted, because a clear of its prefix cache does not cover a connector's tiers";
    /// The worker's ingest thread panicked; its shard of the index was discarded and is being rebuilt.
    IngestFailed(29) = "ingest_failed", TrustLevel::None, Harm::Severe, "report the panic from the log; a worker whose events cause the panic again and again is left out: change its endpoint, or remove it and add it again";
    /// The engine announces one removal for all copies of a block, but the copies were counted one by one; the worker's blocks were dropped.
    LastCopyRemovals(30) = "last_copy_removals", TrustLevel::LowerBound, Harm::Warning, "clear the engine's prefix cache once and send it one request; from now on the daemon takes each removal of this engine for all copies of the block";
    /// The daemon's memory budget is nearly used, and the worker has more blocks than others or found no memory; its new blocks were refused.
    MemoryShort(31) = "memory_short", TrustLevel::LowerBound, Harm::Warning, "raise memory_bytes_max in [process], or lower blocks_max of the largest workers; then clear the engine's prefix cache once and send it one request";
}

/// A set of [`TrustReason`]s.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TrustReasons(u64);

impl TrustReasons {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The bits of all reasons of this version.
    pub const KNOWN_BITS: u64 = (1 << TrustReason::ALL.len()) - 1;

    /// The set with these wire bits. It keeps bits that this version does not know, so that a newer peer's reasons pass
    /// through a relay. Unknown bits count as [`TrustReason::UnknownReason`].
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits on the wire.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Adds a reason.
    pub const fn insert(&mut self, reason: TrustReason) {
        self.0 |= 1 << reason as u8;
    }

    /// Removes a reason.
    pub const fn remove(&mut self, reason: TrustReason) {
        self.0 &= !(1 << reason as u8);
    }

    /// The reasons of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the set contains a reason.
    #[must_use]
    pub const fn contains(self, reason: TrustReason) -> bool {
        self.0 & (1 << reason as u8) != 0
    }

    /// Whether the set has no reason.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set with [`TrustReason::UnknownReason`] in place of bits that this version does not know.
    #[must_use]
    pub const fn known(self) -> Self {
        let known = self.0 & Self::KNOWN_BITS;
        Self(if known == self.0 { known } else { known | 1 << TrustReason::UnknownReason as u8 })
    }

    /// The reasons of this version in the set, by bit number. Skips unknown bits.
    pub fn iter(self) -> impl Iterator<Item = TrustReason> {
        let mut bits = self.0 & Self::KNOWN_BITS;
        std::iter::from_fn(move || {
            let reason = TrustReason::ALL.get(bits.trailing_zeros() as usize).copied()?;
            bits &= bits - 1;
            Some(reason)
        })
    }

    /// The highest level that these reasons allow.
    #[must_use]
    pub fn cap(self) -> TrustLevel {
        self.known().iter().map(TrustReason::cap).min().unwrap_or(TrustLevel::Exact)
    }
}

/// Names, such as `{joined_late, gap}`, and numbers of unknown bits, such as `bit_40`.
impl fmt::Debug for TrustReasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut set = f.debug_set();
        for bit in (0..u64::BITS).filter(|bit| self.0 & (1 << bit) != 0) {
            match TrustReason::ALL.get(bit as usize) {
                Some(reason) => set.entry(&format_args!("{}", reason.name())),
                None => set.entry(&format_args!("bit_{bit}")),
            };
        }
        set.finish()
    }
}

impl FromIterator<TrustReason> for TrustReasons {
    fn from_iter<I: IntoIterator<Item = TrustReason>>(reasons: I) -> Self {
        let mut set = Self::NONE;
        for reason in reasons {
            set.insert(reason);
        }
        set
    }
}

/// A worker's trust as a reader sees it, and the batch up to which it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// The level.
    pub level: TrustLevel,
    /// Why the level is not `exact`.
    pub reasons: TrustReasons,
    /// When the level last changed, milliseconds of Unix time.
    pub since_unix_ms: u64,
    /// The sequence number of the last batch applied to the index; `None` before the first.
    pub as_of_seq: Option<crate::ids::EventSeq>,
    /// When that batch was applied, milliseconds of Unix time; 0 before the first.
    pub as_of_unix_ms: u64,
}

impl Trust {
    /// The trust in an answer that was read between `self` and `later`: no higher than either.
    ///
    /// The level falls before readers can see the doubtful state, and rises only after that state is gone. So the lower
    /// of the two levels holds for everything read in between. If the level fell and rose again meanwhile, the answer
    /// may be from any level, and counts as contended.
    #[must_use]
    pub fn meet(self, later: Self) -> Self {
        let mut reasons = self.reasons.union(later.reasons);
        let mut level = self.level.min(later.level);
        if self.level == later.level && self.since_unix_ms != later.since_unix_ms {
            reasons.insert(TrustReason::ReadContended);
            level = level.min(TrustLevel::Unproven);
        }
        let since_unix_ms = if later.level <= self.level { later.since_unix_ms } else { self.since_unix_ms };
        Self { level, reasons, since_unix_ms, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_capped_by_its_worst_reason() {
        assert_eq!(TrustReasons::NONE.cap(), TrustLevel::Exact);
        let late: TrustReasons = [TrustReason::JoinedLate].into_iter().collect();
        assert_eq!(late.cap(), TrustLevel::LowerBound);
        let both: TrustReasons = [TrustReason::JoinedLate, TrustReason::Hybrid].into_iter().collect();
        assert_eq!(both.cap(), TrustLevel::Unproven);
        assert_eq!(both.iter().map(TrustReason::name).collect::<Vec<_>>(), ["joined_late", "hybrid"]);
    }

    #[test]
    fn an_answer_read_between_two_trusts_has_the_lower_one() {
        let trust = |level, since_unix_ms, seq| Trust {
            level,
            reasons: if level == TrustLevel::Exact {
                TrustReasons::NONE
            } else {
                [TrustReason::Gap].into_iter().collect()
            },
            since_unix_ms,
            as_of_seq: Some(crate::ids::EventSeq(seq)),
            as_of_unix_ms: seq,
        };
        let (exact, fallen) = (trust(TrustLevel::Exact, 1, 10), trust(TrustLevel::LowerBound, 2, 11));
        assert_eq!(exact.meet(trust(TrustLevel::Exact, 1, 12)), exact, "as of the earlier batch");
        assert_eq!(exact.meet(fallen), Trust { as_of_seq: exact.as_of_seq, as_of_unix_ms: 10, ..fallen });
        assert_eq!(fallen.meet(trust(TrustLevel::Exact, 3, 12)), fallen);
        let back = exact.meet(trust(TrustLevel::Exact, 3, 12));
        assert_eq!(back.level, TrustLevel::Unproven);
        assert!(back.reasons.contains(TrustReason::ReadContended));
    }

    #[test]
    fn debug_names_the_reasons_and_numbers_the_unknown() {
        let mut reasons: TrustReasons = [TrustReason::Gap, TrustReason::JoinedLate].into_iter().collect();
        assert_eq!(format!("{reasons:?}"), "{joined_late, gap}");
        reasons = TrustReasons::from_bits(reasons.bits() | 1 << 40);
        assert_eq!(format!("{reasons:?}"), "{joined_late, gap, bit_40}");
        assert_eq!(format!("{:?}", TrustReasons::NONE), "{}");
    }

    #[test]
    fn an_unknown_reason_is_reported_and_prevents_exact() {
        for bit in TrustReason::ALL.len() as u32..u64::BITS {
            let reasons = TrustReasons::from_bits(1 << bit | 1 << TrustReason::Gap as u8);
            assert_eq!(reasons.known(), [TrustReason::Gap, TrustReason::UnknownReason].into_iter().collect(), "{bit}");
            assert_eq!(TrustReasons::from_bits(1 << bit).cap(), TrustLevel::LowerBound, "{bit}");
        }
        let known: TrustReasons = TrustReason::ALL.iter().copied().collect();
        assert_eq!((known.known(), known.bits()), (known, TrustReasons::KNOWN_BITS));
    }

    #[test]
    fn bits_are_dense_and_names_unique() {
        for (bit, reason) in TrustReason::ALL.iter().enumerate() {
            assert_eq!(bit, *reason as usize);
        }
        let mut names: Vec<_> = TrustReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TrustReason::ALL.len());
    }
}
