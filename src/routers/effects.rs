//! What the state machines of other routers make their caller do.

use super::protocol::SnapshotRequest;
use super::values::{Binding, Gauge, OriginId};
use crate::ids::Worker;

/// What the caller has to do, in the order of the list.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Set what the origin at this place adds to a worker; a gauge of zeros takes it away. Workers that this router
    /// does not know are skipped; when one joins, [`gauges_of`](super::Origins::gauges_of) has its gauges.
    SetGauge {
        /// The origin's place, below [`ORIGINS_MAX`](crate::limits::ORIGINS_MAX).
        place: u8,
        /// The worker.
        worker: Worker,
        /// What the origin's bookings added to it, `age_ms` ago.
        gauge: Gauge,
        /// The gauge's age, milliseconds.
        age_ms: u64,
    },
    /// Take away all that the origin at this place adds to any worker, before the next effect: its gauges may come anew, and
    /// another origin may get the place. [`OthersLoads::drop_all`](crate::requests::OthersLoads::drop_all) is over when it
    /// returns.
    DropGauges {
        /// The origin's place.
        place: u8,
    },
    /// Bind or unbind a session, unless it was used later elsewhere.
    Bind(Binding),
    /// Send an origin this request.
    Ask(SnapshotRequest),
    /// Something noteworthy, for counters, the log and findings.
    Noticed {
        /// The origin that it is about; for a message that nothing proves, the one that it names.
        origin: OriginId,
        /// What.
        notice: Notice,
    },
}

/// Something noteworthy about an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Notice {
    /// Its gauges are held and count.
    Live,
    /// Messages are missing. It is asked for a snapshot.
    Gap,
    /// It holds other gauges than this router has of it. It is asked for a snapshot.
    DigestDiffers,
    /// It said less than it had said before: a heartbeat behind the last batch. It is asked for a snapshot.
    WentBack,
    /// A message of another incarnation came. Whether it restarted, or the message is a recording, is asked.
    OtherIncarnation,
    /// The live incarnation answered: the message of the other one was a recording.
    Replayed,
    /// Another incarnation answered. What the one before had sent was dropped.
    Restarted,
    /// It was silent for too long. What it had sent was dropped.
    Silent,
    /// It is quarantined.
    Quarantined(QuarantineReason),
    /// A message was ignored because its number is not above those before it.
    Stale,
    /// A message was ignored because its origin is quarantined.
    Ignored,
    /// A part of a snapshot was ignored because nothing asked for it.
    NotAsked,
    /// A snapshot was refused because its parts do not add up to its digest.
    SnapshotTorn,
    /// Bindings beyond the origin's budget were dropped.
    BindingsDropped,
    /// Another router uses this router's number.
    OwnId,
    /// There is no place for another origin.
    NoPlace,
    /// A message was signed with another secret. Nothing proves whose it is.
    WrongMac,
    /// A message could not be read.
    Unreadable,
    /// A newer router said something that this version does not know. It was ignored.
    NotUnderstood,
}

impl Notice {
    /// The name of its counter in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Live => "joins",
            Self::Gap => "gaps",
            Self::DigestDiffers => "digests_differ",
            Self::WentBack => "went_back",
            Self::OtherIncarnation => "other_incarnations",
            Self::Replayed => "recordings",
            Self::Restarted => "restarts",
            Self::Silent => "silences",
            Self::Quarantined(reason) => reason.name(),
            Self::Stale => "stale",
            Self::Ignored => "ignored",
            Self::NotAsked => "not_asked",
            Self::SnapshotTorn => "snapshots_torn",
            Self::BindingsDropped => "bindings_dropped",
            Self::OwnId => "own_numbers",
            Self::NoPlace => "no_places",
            Self::WrongMac => "wrong_macs",
            Self::Unreadable => "unreadable",
            Self::NotUnderstood => "not_understood",
        }
    }

    /// Whether the named origin, or a router with the same secret, caused it.
    #[must_use]
    pub(super) const fn is_proven(self) -> bool {
        !matches!(self, Self::WrongMac | Self::Unreadable)
    }

    /// Whether the origin's phase changed with it.
    #[must_use]
    pub(super) const fn is_change(self) -> bool {
        matches!(self, Self::Live | Self::Restarted | Self::Silent | Self::Quarantined(_))
    }

    /// Whether an operator should hear of it for a while.
    #[must_use]
    pub(super) const fn is_worth_a_finding(self) -> bool {
        matches!(
            self,
            Self::DigestDiffers | Self::WentBack | Self::SnapshotTorn | Self::OwnId | Self::NoPlace | Self::WrongMac
        )
    }
}

/// Why an origin is quarantined: its messages are ignored, and what it had sent is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuarantineReason {
    /// It has another major version.
    Version,
    /// It serves another fleet.
    Fingerprint,
    /// Its snapshot is older than a batch that it had sent before.
    SequenceLied,
    /// Its digest differed after each of several snapshots.
    DigestDiffers,
    /// It has gauges of more than [`ORIGIN_WORKERS_MAX`](crate::limits::ORIGIN_WORKERS_MAX) workers.
    TooManyWorkers,
}

impl QuarantineReason {
    /// Whether an acceptable message ends the quarantine: nothing but a recording may have caused it.
    #[must_use]
    pub(super) const fn ends_when_compatible(self) -> bool {
        matches!(self, Self::Version | Self::Fingerprint)
    }

    /// The name of its counter in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Version => "quarantined_version",
            Self::Fingerprint => "quarantined_fleet",
            Self::SequenceLied => "quarantined_sequence",
            Self::DigestDiffers => "quarantined_digest",
            Self::TooManyWorkers => "quarantined_workers",
        }
    }

    /// The reason in words.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Version => "it has another major version",
            Self::Fingerprint => "it serves another fleet",
            Self::SequenceLied => "its snapshot was older than what it had sent before",
            Self::DigestDiffers => "its digest differed after each of several snapshots",
            Self::TooManyWorkers => "it has gauges of too many workers",
        }
    }

    /// What an operator can do about it.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Version => "upgrade the routers one version after the other",
            Self::Fingerprint => {
                "give all routers of a fleet the same [[space]] sections, or separate fleets separate secrets"
            }
            Self::SequenceLied => "restart that router, and make sure that no other one uses its number",
            Self::DigestDiffers => "restart that router; if it goes on, report the versions of both",
            Self::TooManyWorkers => "remove workers from that router, or split the fleet",
        }
    }
}
