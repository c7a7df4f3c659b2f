//! How much an answer about a worker may be believed, and why.
//!
//! A level and a set of reasons; both travel with every candidate of every reply. What moves a worker
//! between levels is `event::trust`; this file is only the vocabulary.

use std::fmt;

use crate::finding::Harm;
use crate::reasons::reasons;

/// Belief in what the index holds for a worker. The order is the order of trust.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum TrustLevel {
    /// No event stream, and nothing guessed in its place.
    #[default]
    None = 0,
    /// Guessed from our own decisions; the engine says nothing.
    Predicted = 1,
    /// Something may be wrong either way; the reasons say what.
    Unproven = 2,
    /// Every block reported is held; more may be.
    LowerBound = 3,
    /// Exactly what the engine held at the sequence the answer names.
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

    /// What it costs that no more is believed.
    #[must_use]
    pub const fn consequence(self) -> &'static str {
        match self {
            Self::None => "nothing is known of the worker's cache: it is chosen by load alone",
            Self::Predicted => "what the worker holds is guessed: prompts may be sent where nothing of them is cached",
            Self::Unproven => {
                "what is said of the worker's cache may be too much or too little: prompts may be sent wrong"
            }
            Self::LowerBound => {
                "blocks that the worker holds may not be counted: prompts may be computed again elsewhere"
            }
            Self::Exact => "nothing",
        }
    }

    /// The level with this number, if there is one.
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
        /// The best level a worker with this reason can have.
        cap: TrustLevel;
        /// How much harm it does as long as it lasts.
        harm: Harm;
        /// What an operator can do about it.
        remedy: &'static str;
    }
    /// Nothing received from the worker yet.
    Joining(0) = "joining", TrustLevel::Unproven, Harm::Note, "if the worker is ready, it has published nothing yet: send it a prompt; otherwise start the engine with KV events enabled, or check the endpoint in the worker's record";
    /// The first batch seen was not the stream's first.
    JoinedLate(1) = "joined_late", TrustLevel::LowerBound, Harm::Warning, "clear the engine's prefix cache once (SGLang: POST /flush_cache, vLLM: POST /reset_prefix_cache) and send it one request, or restart the engine where it offloads, and start kvrouted before the engine";
    /// Sequences are missing and could not be fetched again; the worker was emptied.
    Gap(2) = "gap", TrustLevel::LowerBound, Harm::Warning, "raise `hwm`, and `buffer_steps` where the worker has a `replay`, in the engine's --kv-events-config, then clear its prefix cache once";
    /// The connection to the publisher broke; the worker was emptied, or is to be shown to go on by a replay.
    Disconnected(3) = "disconnected", TrustLevel::Unproven, Harm::Warning, "check that the engine runs and that its endpoint is reachable";
    /// A message could not be decoded and was skipped.
    Undecodable(4) = "undecodable", TrustLevel::LowerBound, Harm::Severe, "check that the engine's version is supported; the log names the first bad field";
    /// Blocks of another block size or window arrived and were refused.
    SchemeMismatch(5) = "scheme_mismatch", TrustLevel::LowerBound, Harm::Severe, "give the engine the space's block size, or the worker a space of its own";
    /// A stored event bound a held hash to another place and was refused.
    HashConflict(6) = "hash_conflict", TrustLevel::LowerBound, Harm::Warning, "check that one endpoint is not shared by two engines";
    /// A root chain was announced again and not counted: a second copy, or a full report, which look the same.
    AmbiguousStore(7) = "ambiguous_store", TrustLevel::LowerBound, Harm::Warning, "if no caller can send this engine kv_cache_report_mode=full, set full_reports = \"none\" in the worker's [[space]]: second copies are then counted; without it a prefix whose copy is evicted is not seen again until the engine's prefix cache is cleared";
    /// Blocks arrived whose chain, and so whose salt, is unknown; they were not bound.
    UnknownRoot(8) = "unknown_root", TrustLevel::LowerBound, Harm::Warning, "clear the engine's prefix cache once and send it one request, or restart the engine where it offloads, after what the worker's other reasons name is mended";
    /// A bound on this worker's blocks was reached; blocks were refused.
    CapacityBound(9) = "capacity_bound", TrustLevel::LowerBound, Harm::Warning, "raise the bound that the log names, or check the worker's capacity in blocks";
    /// The engine has KV groups that no rule covers yet.
    Hybrid(10) = "hybrid", TrustLevel::Unproven, Harm::Warning, "overlap of hybrid models is not proven yet; route by load or accept the risk";
    /// Blocks in a medium that maps to no tier were ignored.
    UnknownMedium(11) = "unknown_medium", TrustLevel::LowerBound, Harm::Warning, "report the medium's name; its blocks are not counted";
    /// Two live streams claim the worker, or its rank changed; the later one is refused.
    RankConflict(12) = "rank_conflict", TrustLevel::LowerBound, Harm::Severe, "give every data-parallel rank its own endpoint and dp_rank";
    /// No batch for longer than the configured silence.
    Silent(13) = "silent", TrustLevel::Unproven, Harm::Warning, "check the engine; raise ingest.silence_ms_max if it is merely idle";
    /// The worker publishes no events.
    NoEvents(14) = "no_events", TrustLevel::None, Harm::Note, "give the worker's record an events endpoint";
    /// The index moved under the query more often than it was willing to look again.
    ReadContended(15) = "read_contended", TrustLevel::Unproven, Harm::Warning, "retry; if it persists spread workers over more shards (ingest.shards)";
    /// Sequences are, or may be, missing and are being fetched.
    Recovering(16) = "recovering", TrustLevel::Unproven, Harm::Note, "wait; recovery is bounded in time";
    /// The engine's wire cannot say that a prompt was salted, or says salts in two forms.
    IsolationUnknown(17) = "isolation_unknown", TrustLevel::Unproven, Harm::Warning, "state in the space's record that no cache salts are used (salts = \"none\"), or update the engine; where some salts have the prefix dynamo-cache-salt: and some have not, use one form";
    /// Something was said that cannot be read, and it may have been a removal.
    UnknownEvents(18) = "unknown_events", TrustLevel::Unproven, Harm::Warning, "update kvrouted, or clear the engine's prefix cache once; the log names what was not understood";
    /// The engine's block hashes cover tokens after the block, or its connector moves chunks of several blocks, so a block may fit a prompt only in part.
    LookaheadHash(19) = "lookahead_hash", TrustLevel::Unproven, Harm::Note, "none needed; a match may be too long by the last block, or chunk of offloaded blocks, where the prompts part";
    /// A message without the frames of a batch came; only the next batch shows whether it was one.
    Misframed(20) = "misframed", TrustLevel::Unproven, Harm::Warning, "give the worker a topic of its own, or check what else publishes at its endpoint";
    /// The space's memory ceiling was reached; blocks were refused.
    MemoryBound(21) = "memory_bound", TrustLevel::LowerBound, Harm::Warning, "raise memory_bytes_max of the worker's space, or lower blocks_max of its workers";
    /// The worker publishes no events; what it holds is guessed from the decisions booked on it.
    OwnDecisions(22) = "own_decisions", TrustLevel::Predicted, Harm::Note, "give the worker's record an events endpoint";
    /// The engine's block hashes say nothing of what is before the block; none of its blocks is bound.
    UnchainedHashes(23) = "unchained_hashes", TrustLevel::LowerBound, Harm::Severe, "use SGLang 0.5.6 or later; until then the worker is routed to by load alone";
    /// A relay or a snapshot of another version gives a reason that this version does not know.
    UnknownReason(24) = "unknown_reason", TrustLevel::LowerBound, Harm::Warning, "update kvrouted here to the version of the worker's relay; the level is what the relay says, at most lower_bound";
    /// A caller reported that the engine's cache was cleared; the engine has not published the clear yet.
    ClearAwaited(25) = "clear_awaited", TrustLevel::Unproven, Harm::Note, "send the worker one request: engines publish a clear with their next step; if this reason stays, the clear was published before the report: clear once more and send one request";
    /// The engine announced more copies than it can hold, as full reports do, although the space rules these out; the worker was emptied.
    FullReports(26) = "full_reports", TrustLevel::LowerBound, Harm::Severe, "find the caller that sends the engine kv_cache_report_mode=full and strip the field there, or set full_reports = \"possible\" in the worker's [[space]]; then clear the engine's prefix cache once and send it one request";
    /// Offloaded blocks are known by their hashes only, and device memory has not said what they are; they were not bound.
    OffloadUnbound(27) = "offload_unbound", TrustLevel::LowerBound, Harm::Note, "none needed: it ends when the engine loads or drops those blocks; start kvrouted, or a relay, before the engine to have none";
    /// Part of what is held below device memory is not known: a clear did not say whether it went, or its store says too little.
    LowerTiersUnknown(28) = "lower_tiers_unknown", TrustLevel::LowerBound, Harm::Note, "none needed where device memory is what counts; otherwise restart the engine after kvrouted: a clear of its prefix cache does not speak of a connector's tiers";
    /// The ingest thread of the worker panicked; its shard of the index was discarded and is built anew.
    IngestFailed(29) = "ingest_failed", TrustLevel::None, Harm::Severe, "report the panic that the log has; a worker whose events make the thread panic again and again is left out: change its endpoint, or remove it and add it again";
    /// The engine announces one removal for all copies of a block, which were counted each; the worker was emptied.
    LastCopyRemovals(30) = "last_copy_removals", TrustLevel::LowerBound, Harm::Warning, "clear the engine's prefix cache once and send it one request; the daemon has noticed how this engine removes, and from now on takes each removal for all copies of a block";
}

/// A set of [`TrustReason`]s.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TrustReasons(u64);

impl TrustReasons {
    /// No reason at all.
    pub const NONE: Self = Self(0);

    /// The bits of every reason that this version knows.
    pub const KNOWN_BITS: u64 = (1 << TrustReason::ALL.len()) - 1;

    /// The set with these wire bits. Bits that this version does not know are kept, so that a newer peer's reasons
    /// survive a relay; they count as [`TrustReason::UnknownReason`].
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The wire bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Adds a reason.
    pub const fn insert(&mut self, reason: TrustReason) {
        self.0 |= 1 << reason as u8;
    }

    /// Takes a reason away.
    pub const fn remove(&mut self, reason: TrustReason) {
        self.0 &= !(1 << reason as u8);
    }

    /// The reasons of both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether a reason is in the set.
    #[must_use]
    pub const fn contains(self, reason: TrustReason) -> bool {
        self.0 & (1 << reason as u8) != 0
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set without the bits that this version does not know, which become [`TrustReason::UnknownReason`].
    #[must_use]
    pub const fn known(self) -> Self {
        let known = self.0 & Self::KNOWN_BITS;
        Self(if known == self.0 { known } else { known | 1 << TrustReason::UnknownReason as u8 })
    }

    /// The known reasons in the set, by bit number; unknown ones not even as [`TrustReason::UnknownReason`].
    pub fn iter(self) -> impl Iterator<Item = TrustReason> {
        TrustReason::ALL.iter().copied().filter(move |r| self.contains(*r))
    }

    /// The best level these reasons leave.
    #[must_use]
    pub fn cap(self) -> TrustLevel {
        self.known().iter().map(TrustReason::cap).min().unwrap_or(TrustLevel::Exact)
    }
}

/// The names, e.g. `{joined_late, gap}`; bits of a newer peer by number, as `bit_40`.
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

/// A worker's trust as a reader sees it, with what it is as of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// How much to believe.
    pub level: TrustLevel,
    /// Why not more.
    pub reasons: TrustReasons,
    /// When the level last changed, milliseconds of Unix time.
    pub since_unix_ms: u64,
    /// The last batch the index has applied; `None` before the first.
    pub as_of_seq: Option<crate::ids::EventSeq>,
    /// When that batch was applied, milliseconds of Unix time; 0 before the first.
    pub as_of_unix_ms: u64,
}

impl Trust {
    /// The trust in an answer that was read between this and `later`: no more than either.
    ///
    /// A level falls before what it speaks of can be read, and rises after, so the worse of the two holds for
    /// all that could be read in between. Where the level went away and came back meanwhile, what was read
    /// may be of any level, which counts as contended.
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
    fn what_was_read_between_two_trusts_is_worth_the_worse() {
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
        assert_eq!(exact.meet(trust(TrustLevel::Exact, 1, 12)), exact, "as of what was known before");
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
    fn a_reason_of_another_version_is_named_and_takes_exact_away() {
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
