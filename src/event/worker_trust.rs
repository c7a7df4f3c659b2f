//! The trust of one worker, as its events change it: a pure state machine over [`TrustReason`]s. `crate::trust` defines
//! the levels and the reasons.
//!
//! The level is the lowest that any reason allows ([`TrustReason::cap`]), so only the set of reasons changes here:
//!
//! | input | adds | removes |
//! |---|---|---|
//! | (at first) | joining | |
//! | no event source | no_events | joining |
//! | joined, or restarted, at sequence number 0 | | everything but no_events and isolation_unknown; a relay's own trust |
//! | joined at a later sequence number | joined_late | joining, disconnected, silent, misframed, ingest_failed |
//! | restarted at a later sequence number | joined_late | as a restart at 0 |
//! | restarted, and no batch of the new incarnation has been applied | joining | as a restart at 0 |
//! | a replay from 0 shows that the publisher has sent nothing | | as a restart at 0 |
//! | gap | gap | recovering, disconnected, silent, misframed, ingest_failed |
//! | disconnected | disconnected | joining, silent, misframed |
//! | lost batches are being fetched | recovering | |
//! | no batch is missing any more, or none was ever sent | (joining, if none was ever sent) | recovering, disconnected, silent, misframed, ingest_failed |
//! | a message without the frames of a batch | misframed | |
//! | the next batch: none is missing before it | | silent, misframed |
//! | a batch that was applied before | | silent |
//! | undecodable | undecodable | |
//! | an event of an unknown kind | unknown_events | |
//! | a store refused, ambiguous or unbound; a limit reached | the flaw's reason | |
//! | another rank, another scheme, an unknown medium, a group without a rule | the flaw's reason | |
//! | a format without a place for salts; hashes that cover more than the block, or only its tokens | the flaw's reason | |
//! | offloaded blocks known by hash only; tiers that are not known in full | the flaw's reason | |
//! | every offloaded block is known | | offload_unbound |
//! | silent | silent | |
//! | a relay states its own trust | (its reasons, and its level as a cap; an unknown reason caps at lower_bound) | (its earlier statement) |
//! | a dump is being loaded | recovering | |
//! | the dump is loaded | the reasons of the dump | everything but no_events and isolation_unknown; a relay's own trust |
//! | the dump could not be loaded, and the worker was emptied | joined_late | recovering |
//! | emptied by a reset | joined_late | |
//! | emptied because its ingest thread panicked | ingest_failed | |
//! | the index places blocks later | (capacity_bound, kept apart from the flaw) | |
//! | the index has placed all blocks | | (that capacity_bound, not the flaw's) |
//! | a caller reports that the engine's cache was cleared | clear_awaited | |
//! | the engine publishes a clear of its device tier | | clear_awaited |
//! | cleared, all tiers | | joined_late, gap, undecodable, hash_conflict, ambiguous_store, full_reports, unknown_root, capacity_bound, memory_bound, memory_short, unknown_events, offload_unbound, last_copy_removals |
//!
//! A clear removes those reasons and no others. After it the engine holds no block, so a block that was missed or
//! refused is gone there too. Reasons that concern the engine and not its past (scheme_mismatch, hybrid,
//! unknown_medium, rank_conflict, isolation_unknown, lookahead_hash, unchained_hashes, lower_tiers_unknown) would come
//! back with the next block. They stay until another incarnation of the engine is seen from its first batch on.
//!
//! A batch that cannot be decoded, like one that a gap skipped, may have held removals. The worker is then
//! `lower_bound` only because `ingest` also empties the worker.

use super::SourceTrust;
use crate::ids::EventSeq;
use crate::trust::{Trust, TrustLevel, TrustReason, TrustReasons};

/// A fact about a worker that changes its trust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrustInput {
    /// Its record names no event source.
    NoEventSource,
    /// The first batch of a connection, with its sequence number.
    Joined(EventSeq),
    /// The first batch of another incarnation, with its sequence number.
    Restarted(EventSeq),
    /// Another incarnation publishes, and none of its batches has been applied.
    RestartedUnseen,
    /// A replay from sequence number 0 on shows that the publisher has sent nothing.
    NothingSent,
    /// Batches are missing and the worker was emptied.
    Gap,
    /// The next batch.
    Batch,
    /// A batch that was applied before.
    Duplicate,
    /// A message without the frames of a batch, and so without a sequence number.
    Misframed,
    /// The connection broke. The worker was emptied, or a replay on the next connection has to prove it.
    Disconnected,
    /// Batches are, or may be, missing and are being fetched.
    Recovering,
    /// Every batch that was sent has been applied.
    Recovered {
        /// Whether a batch was sent.
        known: bool,
    },
    /// A flaw that lowers trust, until an input of the table removes its reason.
    Flaw(Flaw),
    /// A relay states its trust in the view that it publishes.
    Source(SourceTrust),
    /// No message for longer than the publisher may be silent.
    Silent,
    /// The engine dropped everything, and every tier was emptied.
    ClearedAllTiers,
    /// No offloaded block waits until device memory defines it.
    OffloadBound,
    /// The worker was emptied, and a dump is being loaded into it.
    Loading,
    /// A dump was loaded in full, from a view with this trust.
    Loaded(SourceTrust),
    /// A dump was not loaded in full and the worker was emptied.
    LoadFailed,
    /// A reset emptied the worker.
    Reset,
    /// A caller reports that the engine's device cache was cleared. Batches from before may still be on their way.
    ClearReported,
    /// The engine has published a clear of its device cache.
    ClearPublished,
    /// The worker's ingest thread panicked, and the worker was emptied.
    IngestFailed,
    /// The index places blocks of the worker later.
    Deferred,
    /// The index has placed all of them, or the worker was emptied.
    DeferralEnded,
}

/// A flaw that a batch or one of its events shows, and that lowers trust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A batch could not be decoded, and the worker was emptied.
    Undecodable,
    /// An event of an unknown kind: it may have been a removal.
    UnknownEvents,
    /// A store in another block size or window.
    SchemeMismatch,
    /// A store that binds a held hash to another place.
    HashConflict,
    /// A root chain announced again.
    AmbiguousStore,
    /// More copies than are possible, as full reports announce them.
    FullReports,
    /// A store that cannot be bound to a chain.
    UnknownRoot,
    /// The limit on the worker's blocks was reached.
    CapacityBound,
    /// The limit on the memory of the worker's space was reached.
    MemoryBound,
    /// The daemon's memory budget is nearly used.
    MemoryShort,
    /// A KV group without a rule.
    Hybrid,
    /// A medium that maps to no tier.
    UnknownMedium,
    /// A batch of another rank.
    RankConflict,
    /// An engine whose events cannot state a salt, or salts in two forms.
    IsolationUnknown,
    /// An engine whose block hashes cover tokens after the block, or whose connector moves chunks of several blocks.
    LookaheadHash,
    /// An engine whose block hashes do not depend on the blocks before.
    UnchainedHashes,
    /// Offloaded blocks of which only the hashes are known.
    OffloadUnbound,
    /// Tiers below device memory that are not known in full.
    LowerTiersUnknown,
    /// Removals that stand for all copies of a block.
    LastCopyRemovals,
}

impl Flaw {
    /// The reason for the lower trust.
    #[must_use]
    pub(crate) const fn reason(self) -> TrustReason {
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
            Self::MemoryShort => TrustReason::MemoryShort,
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

/// Reasons that only the worker's record or the engine's format can remove.
const LASTING: [TrustReason; 2] = [TrustReason::NoEvents, TrustReason::IsolationUnknown];
/// Reasons that any first batch of a connection removes.
const UNTIL_A_BATCH: [TrustReason; 5] = [
    TrustReason::Joining,
    TrustReason::Disconnected,
    TrustReason::Silent,
    TrustReason::Misframed,
    TrustReason::IngestFailed,
];
/// Reasons that the next batch removes.
const UNTIL_THE_NEXT: [TrustReason; 2] = [TrustReason::Silent, TrustReason::Misframed];
/// Reasons that end once no batch is missing, or the missing ones are given up.
const UNTIL_WHOLE: [TrustReason; 5] = [
    TrustReason::Recovering,
    TrustReason::Disconnected,
    TrustReason::Silent,
    TrustReason::Misframed,
    TrustReason::IngestFailed,
];
/// Reasons that concern blocks that the engine held. They end once it holds none.
const UNTIL_CLEARED: [TrustReason; 13] = [
    TrustReason::JoinedLate,
    TrustReason::Gap,
    TrustReason::Undecodable,
    TrustReason::HashConflict,
    TrustReason::AmbiguousStore,
    TrustReason::FullReports,
    TrustReason::UnknownRoot,
    TrustReason::CapacityBound,
    TrustReason::MemoryBound,
    TrustReason::MemoryShort,
    TrustReason::UnknownEvents,
    TrustReason::OffloadUnbound,
    TrustReason::LastCopyRemovals,
];
/// Reasons that mean that events were not applied.
const MISSED_EVENTS: [TrustReason; 4] =
    [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable, TrustReason::UnknownEvents];
/// Reasons that concern a connection or a load, not the blocks: a dump does not carry them over.
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
pub(crate) struct WorkerTrust {
    reasons: TrustReasons,
    /// The index places blocks later.
    is_deferring: bool,
    source: Option<SourceTrust>,
    since_unix_ms: u64,
    as_of: Option<(EventSeq, u64)>,
}

impl WorkerTrust {
    /// A worker that joins now (milliseconds of Unix time).
    #[must_use]
    pub(crate) fn new(now_unix_ms: u64) -> Self {
        let reasons = [TrustReason::Joining].into_iter().collect();
        Self { reasons, is_deferring: false, source: None, since_unix_ms: now_unix_ms, as_of: None }
    }

    /// Applies an input at a time (milliseconds of Unix time). Returns whether the level fell.
    pub(crate) fn apply(&mut self, input: TrustInput, now_unix_ms: u64) -> bool {
        // Nearly every input is the next batch, or what a relay has said before, and changes nothing.
        let changes_nothing = match input {
            TrustInput::Batch => !UNTIL_THE_NEXT.iter().any(|reason| self.reasons.contains(*reason)),
            TrustInput::Source(source) => self.source == Some(source),
            _ => false,
        };
        if changes_nothing {
            return false;
        }
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
            TrustInput::RestartedUnseen => {
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
            TrustInput::Batch => self.take(&UNTIL_THE_NEXT),
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
            TrustInput::ClearReported => self.reasons.insert(TrustReason::ClearAwaited),
            TrustInput::ClearPublished => self.take(&[TrustReason::ClearAwaited]),
            TrustInput::IngestFailed => self.reasons.insert(TrustReason::IngestFailed),
            TrustInput::Deferred => self.is_deferring = true,
            TrustInput::DeferralEnded => self.is_deferring = false,
        }
    }

    /// Takes over the trust of a loaded dump.
    fn take_over(&mut self, view: SourceTrust) {
        self.keep(&LASTING);
        self.reasons = self.reasons.union(view.reasons);
        self.take(&NOT_OF_A_DUMP);
        // A level below what the reasons explain came from a relay. It holds until the relay states its trust again.
        let less = view.level < view.reasons.cap();
        self.source = less.then_some(SourceTrust { level: view.level, reasons: TrustReasons::NONE });
    }

    fn take(&mut self, reasons: &[TrustReason]) {
        for reason in reasons {
            self.reasons.remove(*reason);
        }
    }

    /// Drops all other reasons and a relay's own trust, because another incarnation publishes.
    fn keep(&mut self, reasons: &[TrustReason]) {
        self.reasons = self.reasons.iter().filter(|held| reasons.contains(held)).collect();
        self.source = None;
    }

    /// Notes that the index has applied all batches up to this one, at a time (milliseconds of Unix time).
    pub(crate) fn applied(&mut self, seq: EventSeq, now_unix_ms: u64) {
        self.as_of = Some((seq, now_unix_ms));
    }

    /// The trust that its blocks have wherever they are loaded: without reasons that concern only the connection. If a
    /// relay states reasons about its own connection to the engine, only its level remains, which a connection to the
    /// relay cannot raise.
    #[must_use]
    pub(crate) fn view_of_blocks(&self) -> SourceTrust {
        let mut of_blocks = Self { reasons: self.reasons(), is_deferring: false, ..self.clone() };
        of_blocks.take(&NOT_OF_A_DUMP);
        let mut own = self.clone();
        own.take(&NOT_OF_A_DUMP);
        SourceTrust { level: own.level(), reasons: of_blocks.reasons }
    }

    /// Whether events were missed, so that tiers without any event may hold blocks.
    #[must_use]
    pub(crate) fn has_missed_events(&self) -> bool {
        MISSED_EVENTS.iter().any(|reason| self.reasons.contains(*reason))
    }

    /// The level that its reasons allow.
    #[must_use]
    pub(crate) fn level(&self) -> TrustLevel {
        let own = self.own_reasons().cap();
        self.source.map_or(own, |source| own.min(source.level).min(source.reasons.cap()))
    }

    /// Whether the engine may hold blocks that are not counted. Then a repeated chain of the engine may be only partly
    /// held here.
    #[must_use]
    pub(crate) fn may_miss_blocks(&self) -> bool {
        let reasons = self.reasons();
        let refused = [TrustReason::SchemeMismatch, TrustReason::RankConflict, TrustReason::UnchainedHashes];
        UNTIL_CLEARED.iter().chain(&refused).any(|reason| reasons.contains(*reason))
    }

    /// The reasons, without those that a relay states.
    #[must_use]
    pub(crate) const fn own_reasons(&self) -> TrustReasons {
        let mut reasons = self.reasons;
        if self.is_deferring {
            reasons.insert(TrustReason::CapacityBound);
        }
        reasons
    }

    /// Whether the index places blocks later.
    #[must_use]
    pub(crate) const fn is_deferring(&self) -> bool {
        self.is_deferring
    }

    /// All reasons why the level is not higher.
    #[must_use]
    pub(crate) const fn reasons(&self) -> TrustReasons {
        match self.source {
            Some(source) => self.own_reasons().union(source.reasons),
            None => self.own_reasons(),
        }
    }

    /// The trust for readers.
    #[must_use]
    pub(crate) fn trust(&self) -> Trust {
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
