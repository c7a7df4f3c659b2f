//! What moves a worker between levels of trust: a pure state machine over [`TrustReason`]s.
//!
//! The level is the worst that any reason allows ([`TrustReason::cap`]), so only the set changes here:
//!
//! | input | adds | takes away |
//! |---|---|---|
//! | (at first) | joining | |
//! | no event source | no_events | joining |
//! | joined, or restarted, at sequence 0 | | everything but no_events and isolation_unknown; a relay's word |
//! | joined at a later sequence | joined_late | joining, disconnected, silent, misframed, ingest_failed |
//! | restarted at a later sequence | joined_late | what a restart at 0 takes away |
//! | restarted, and nothing of it is known yet | joining | the same |
//! | asked from 0 on, the publisher has sent nothing | | the same |
//! | gap | gap | recovering, disconnected, silent, misframed, ingest_failed |
//! | disconnected | disconnected | joining, silent, misframed |
//! | lost batches are fetched again | recovering | |
//! | none is missing any more, or none was ever sent | (joining, where none was ever sent) | recovering, disconnected, silent, misframed, ingest_failed |
//! | a message without the frames of a batch | misframed | |
//! | batch in its place: nothing is missing before it | | silent, misframed |
//! | batch seen before | | silent |
//! | undecodable | undecodable | |
//! | an event of an unknown kind | unknown_events | |
//! | a store refused, ambiguous or unbound; a bound reached | the reason named | |
//! | another rank, another scheme, an unknown medium, a group without a rule | the reason named | |
//! | a wire without a place for salts, hashes that cover more than the block or nothing before it | the reason named | |
//! | offloaded blocks known by hash only; tiers that are not known in full | the reason named | |
//! | every offloaded block is known | | offload_unbound |
//! | silent | silent | |
//! | a relay's word about its own view | (its reasons, its level as a cap; what is unknown here caps at lower_bound) | (what it said before) |
//! | a dump is being loaded | recovering | |
//! | the dump is loaded | the reasons it was taken with | everything but no_events and isolation_unknown; a relay's word |
//! | the dump could not be loaded, and the worker was emptied | joined_late | recovering |
//! | emptied because somebody asked for it | joined_late | |
//! | emptied because its ingest thread panicked | ingest_failed | |
//! | the index has blocks wait for their places | (capacity_bound, beside one that was found) | |
//! | none waits any more | | (that one, not one that was found) |
//! | somebody says that the engine's cache was cleared | clear_awaited | |
//! | the engine publishes a clear of its device | | clear_awaited |
//! | cleared, all tiers | | joined_late, gap, undecodable, hash_conflict, ambiguous_store, full_reports, unknown_root, capacity_bound, memory_bound, unknown_events, offload_unbound, last_copy_removals |
//!
//! Why a clear takes away those and no others: after it the engine holds nothing, so whatever we missed
//! or refused before is gone there too. What speaks of the engine and not of its past (scheme_mismatch,
//! hybrid, unknown_medium, rank_conflict, isolation_unknown, lookahead_hash, unchained_hashes, lower_tiers_unknown) would be true again with the next block, so it stays until
//! another incarnation of the engine has spoken from its first batch on.
//!
//! A batch that is not decoded, like one that a gap skipped, may have held removals. The worker is then
//! `lower_bound` only because whoever reports it here also empties the worker (see `ingest`).

use super::SourceTrust;
use crate::ids::EventSeq;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// What was learnt about a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrustInput {
    /// Its record names no event source.
    NoEventSource,
    /// The first batch of a connection, with its sequence.
    Joined(EventSeq),
    /// The first batch of another incarnation, with its sequence.
    Restarted(EventSeq),
    /// Another incarnation speaks, of which nothing has been applied.
    RestartedUnheard,
    /// Asked for everything from sequence 0 on, the publisher answered that it has sent nothing.
    NothingSent,
    /// Batches are missing and the worker was emptied.
    Gap,
    /// A batch in its place.
    Batch,
    /// A batch that was seen before.
    Duplicate,
    /// A message without the frames of a batch, and so without a sequence.
    Misframed,
    /// The connection broke, and the worker was emptied or is to be proven on the next one.
    Disconnected,
    /// Batches are, or may be, missing and are fetched again.
    Recovering,
    /// Everything that was sent has been applied.
    Recovered {
        /// Whether anything was.
        known: bool,
    },
    /// Something arrived that lowers trust for the reason named, until what the table says takes it away.
    Found(Flaw),
    /// A relay says what it believes of the view it publishes.
    Source(SourceTrust),
    /// No batch for longer than is configured.
    Silent,
    /// The engine dropped everything, and every tier was emptied.
    ClearedAllTiers,
    /// No offloaded block waits for device memory to say what it is.
    OffloadBound,
    /// The worker was emptied, and a dump is being loaded into it.
    Loading,
    /// A dump was loaded in full, taken from a view that was believed so.
    Loaded(SourceTrust),
    /// A dump was not loaded in full and the worker was emptied.
    LoadFailed,
    /// The worker was emptied because somebody asked for it.
    Reset,
    /// Somebody says that the engine's device cache was cleared; what was sent before that may still be on its way.
    ClearTold,
    /// The engine says that it has cleared its device cache.
    ClearPublished,
    /// The thread that took its events in panicked, and the worker was emptied.
    IngestFailed,
    /// Blocks of the worker wait for their places in the index.
    Deferred,
    /// All of them have their places, or the worker was emptied.
    DeferralEnded,
}

/// What a batch or one of its events can show that lowers trust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// A batch could not be decoded, and the worker was emptied.
    Undecodable,
    /// An event of an unknown kind: it may have been a removal.
    UnknownEvents,
    /// A store in another block size or window.
    SchemeMismatch,
    /// A store that binds a held hash elsewhere.
    HashConflict,
    /// A root chain announced again.
    AmbiguousStore,
    /// More copies than can be, as full reports announce them.
    FullReports,
    /// A store that cannot be bound to a chain.
    UnknownRoot,
    /// A bound on the worker's blocks.
    CapacityBound,
    /// The bound on the memory of the worker's space.
    MemoryBound,
    /// A KV group without a rule.
    Hybrid,
    /// A medium that maps to no tier.
    UnknownMedium,
    /// A batch of another rank.
    RankConflict,
    /// An engine whose wire cannot say that a prompt was salted.
    IsolationUnknown,
    /// An engine whose block hashes cover tokens after the block, or whose connector moves chunks of several blocks.
    LookaheadHash,
    /// An engine whose block hashes say nothing of what is before the block.
    UnchainedHashes,
    /// Offloaded blocks of which only the hashes are known.
    OffloadUnbound,
    /// Tiers below device memory that are not known in full.
    LowerTiersUnknown,
    /// Removals that speak of all copies of a block.
    LastCopyRemovals,
}

impl Flaw {
    /// The reason it gives.
    #[must_use]
    pub const fn reason(self) -> TrustReason {
        match self {
            Self::Undecodable => TrustReason::Undecodable,
            Self::UnknownEvents => TrustReason::UnknownEvents,
            Self::SchemeMismatch => TrustReason::SchemeMismatch,
            Self::HashConflict => TrustReason::HashConflict,
            Self::AmbiguousStore => TrustReason::AmbiguousStore,
            Self::FullReports => TrustReason::FullReports,
            Self::UnknownRoot => TrustReason::UnknownRoot,
            Self::CapacityBound => TrustReason::CapacityBound,
            Self::MemoryBound => TrustReason::MemoryBound,
            Self::Hybrid => TrustReason::Hybrid,
            Self::UnknownMedium => TrustReason::UnknownMedium,
            Self::RankConflict => TrustReason::RankConflict,
            Self::IsolationUnknown => TrustReason::IsolationUnknown,
            Self::LookaheadHash => TrustReason::LookaheadHash,
            Self::UnchainedHashes => TrustReason::UnchainedHashes,
            Self::OffloadUnbound => TrustReason::OffloadUnbound,
            Self::LowerTiersUnknown => TrustReason::LowerTiersUnknown,
            Self::LastCopyRemovals => TrustReason::LastCopyRemovals,
        }
    }
}

/// Reasons that only the record or the wire's format can take away.
const LASTING: [TrustReason; 2] = [TrustReason::NoEvents, TrustReason::IsolationUnknown];
/// Reasons that any batch of a connection takes away.
const UNTIL_A_BATCH: [TrustReason; 5] = [
    TrustReason::Joining,
    TrustReason::Disconnected,
    TrustReason::Silent,
    TrustReason::Misframed,
    TrustReason::IngestFailed,
];
/// Reasons that are moot once nothing is missing, or what is missing is given up.
const UNTIL_WHOLE: [TrustReason; 5] = [
    TrustReason::Recovering,
    TrustReason::Disconnected,
    TrustReason::Silent,
    TrustReason::Misframed,
    TrustReason::IngestFailed,
];
/// Reasons that speak of what the engine held, moot once it holds nothing.
const UNTIL_CLEARED: [TrustReason; 12] = [
    TrustReason::JoinedLate,
    TrustReason::Gap,
    TrustReason::Undecodable,
    TrustReason::HashConflict,
    TrustReason::AmbiguousStore,
    TrustReason::FullReports,
    TrustReason::UnknownRoot,
    TrustReason::CapacityBound,
    TrustReason::MemoryBound,
    TrustReason::UnknownEvents,
    TrustReason::OffloadUnbound,
    TrustReason::LastCopyRemovals,
];
/// Reasons by which events were not applied.
const MISSED_EVENTS: [TrustReason; 4] =
    [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable, TrustReason::UnknownEvents];
/// Reasons that speak of a connection or of a load, not of what is held: a dump does not carry them over.
const NOT_OF_A_DUMP: [TrustReason; 7] = [
    TrustReason::Joining,
    TrustReason::IngestFailed,
    TrustReason::Disconnected,
    TrustReason::Silent,
    TrustReason::Misframed,
    TrustReason::ReadContended,
    TrustReason::Recovering,
];

/// The trust of one worker.
#[derive(Clone, Debug)]
pub struct WorkerTrust {
    reasons: TrustReasons,
    /// Blocks wait for their places in the index.
    is_deferring: bool,
    source: Option<SourceTrust>,
    since_unix_ms: u64,
    as_of: Option<(EventSeq, u64)>,
}

impl WorkerTrust {
    /// Joining, since now (milliseconds of Unix time).
    #[must_use]
    pub fn new(now_unix_ms: u64) -> Self {
        let reasons = [TrustReason::Joining].into_iter().collect();
        Self { reasons, is_deferring: false, source: None, since_unix_ms: now_unix_ms, as_of: None }
    }

    /// Takes an input at a time (milliseconds of Unix time). Answers whether the level fell.
    pub fn apply(&mut self, input: TrustInput, now_unix_ms: u64) -> bool {
        let before = self.level();
        self.change(input);
        let after = self.level();
        if after != before {
            self.since_unix_ms = now_unix_ms;
        }
        after < before
    }

    fn change(&mut self, input: TrustInput) {
        match input {
            TrustInput::NoEventSource => {
                self.take(&[TrustReason::Joining]);
                self.reasons.insert(TrustReason::NoEvents);
            }
            TrustInput::Joined(EventSeq(0)) | TrustInput::Restarted(EventSeq(0)) | TrustInput::NothingSent => {
                self.keep(&LASTING);
            }
            TrustInput::RestartedUnheard => {
                self.keep(&LASTING);
                self.reasons.insert(TrustReason::Joining);
                self.as_of = None;
            }
            TrustInput::Joined(_) => {
                self.take(&UNTIL_A_BATCH);
                self.reasons.insert(TrustReason::JoinedLate);
            }
            TrustInput::Restarted(_) => {
                self.keep(&LASTING);
                self.reasons.insert(TrustReason::JoinedLate);
            }
            TrustInput::Gap => {
                self.take(&UNTIL_WHOLE);
                self.reasons.insert(TrustReason::Gap);
            }
            TrustInput::Batch => self.take(&[TrustReason::Silent, TrustReason::Misframed]),
            TrustInput::Duplicate => self.take(&[TrustReason::Silent]),
            TrustInput::Misframed => self.reasons.insert(TrustReason::Misframed),
            TrustInput::Disconnected => {
                self.take(&[TrustReason::Joining, TrustReason::Silent, TrustReason::Misframed]);
                self.reasons.insert(TrustReason::Disconnected);
            }
            TrustInput::Recovering => self.reasons.insert(TrustReason::Recovering),
            TrustInput::Recovered { known } => {
                self.take(&UNTIL_WHOLE);
                if !known {
                    self.reasons.insert(TrustReason::Joining);
                }
            }
            TrustInput::Flaw(flaw) => self.reasons.insert(flaw.reason()),
            TrustInput::Source(source) => self.source = Some(source),
            TrustInput::Silent => self.reasons.insert(TrustReason::Silent),
            TrustInput::ClearedAllTiers => self.take(&UNTIL_CLEARED),
            TrustInput::OffloadBound => self.take(&[TrustReason::OffloadUnbound]),
            TrustInput::Loading => self.reasons.insert(TrustReason::Recovering),
            TrustInput::Loaded(view) => self.take_over(view),
            TrustInput::LoadFailed => {
                self.take(&[TrustReason::Recovering]);
                self.reasons.insert(TrustReason::JoinedLate);
            }
            TrustInput::Reset => self.reasons.insert(TrustReason::JoinedLate),
            TrustInput::ClearTold => self.reasons.insert(TrustReason::ClearAwaited),
            TrustInput::ClearPublished => self.take(&[TrustReason::ClearAwaited]),
            TrustInput::IngestFailed => self.reasons.insert(TrustReason::IngestFailed),
            TrustInput::Deferred => self.is_deferring = true,
            TrustInput::DeferralEnded => self.is_deferring = false,
        }
    }

    /// Believes what a dump holds as it was believed where it was taken.
    fn take_over(&mut self, view: SourceTrust) {
        self.keep(&LASTING);
        self.reasons = self.reasons.union(view.reasons);
        self.take(&NOT_OF_A_DUMP);
        // Less than its reasons explain: that was a relay's word, which holds until the relay speaks again.
        let less = view.level < view.reasons.cap();
        self.source = less.then_some(SourceTrust { level: view.level, reasons: TrustReasons::NONE });
    }

    fn take(&mut self, reasons: &[TrustReason]) {
        for reason in reasons {
            self.reasons.remove(*reason);
        }
    }

    /// Forgets everything but these: another incarnation is speaking.
    fn keep(&mut self, reasons: &[TrustReason]) {
        self.reasons = self.reasons.iter().filter(|held| reasons.contains(held)).collect();
        self.source = None;
    }

    /// The index has applied everything up to a batch, at a time (milliseconds of Unix time).
    pub fn applied(&mut self, seq: EventSeq, now_unix_ms: u64) {
        self.as_of = Some((seq, now_unix_ms));
    }

    /// How much its blocks are to be believed elsewhere: without what speaks only of the connection that they came by.
    /// What a relay says of its own connection takes no reason along but its level, which a connection to the relay
    /// cannot mend.
    #[must_use]
    pub fn view_of_blocks(&self) -> SourceTrust {
        let mut of_blocks = Self { reasons: self.reasons(), is_deferring: false, ..self.clone() };
        of_blocks.take(&NOT_OF_A_DUMP);
        let mut own = self.clone();
        own.take(&NOT_OF_A_DUMP);
        SourceTrust { level: own.level(), reasons: of_blocks.reasons }
    }

    /// Whether events were missed, so that tiers which were never heard of may hold blocks.
    #[must_use]
    pub fn has_missed_events(&self) -> bool {
        MISSED_EVENTS.iter().any(|reason| self.reasons.contains(*reason))
    }

    /// The level its reasons allow.
    #[must_use]
    pub fn level(&self) -> TrustLevel {
        let own = self.own_reasons().cap();
        self.source.map_or(own, |source| own.min(source.level).min(source.reasons.cap()))
    }

    /// Whether the engine may hold blocks that are not counted: for it a chain may be repeated of which only a part is
    /// held here.
    #[must_use]
    pub fn may_miss_blocks(&self) -> bool {
        let reasons = self.reasons();
        let refused = [TrustReason::SchemeMismatch, TrustReason::RankConflict, TrustReason::UnchainedHashes];
        UNTIL_CLEARED.iter().chain(&refused).any(|reason| reasons.contains(*reason))
    }

    /// Why not more, but for what a relay says of itself.
    #[must_use]
    pub const fn own_reasons(&self) -> TrustReasons {
        let mut reasons = self.reasons;
        if self.is_deferring {
            reasons.insert(TrustReason::CapacityBound);
        }
        reasons
    }

    /// Whether blocks wait for their places in the index.
    #[must_use]
    pub const fn is_deferring(&self) -> bool {
        self.is_deferring
    }

    /// Why not more.
    #[must_use]
    pub const fn reasons(&self) -> TrustReasons {
        match self.source {
            Some(source) => self.own_reasons().union(source.reasons),
            None => self.own_reasons(),
        }
    }

    /// What readers are to see.
    #[must_use]
    pub fn trust(&self) -> Trust {
        Trust {
            level: self.level(),
            reasons: self.reasons(),
            since_unix_ms: self.since_unix_ms,
            as_of_seq: self.as_of.map(|(seq, _)| seq),
            as_of_unix_ms: self.as_of.map_or(0, |(_, at)| at),
        }
    }
}

#[cfg(test)]
mod tests;
