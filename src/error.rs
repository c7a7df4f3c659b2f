//! The one error type: what went wrong, which side has to act, whether a retry helps, and what to do.
//!
//! The codes are those of the wire (`schemas/README.md`), append-only. A [`Kind`] fixes side and retry, so that the
//! same failure reads the same in a log line, a reply and an exit message.

use std::fmt;

/// The side that has to act on an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Side {
    /// The gateway that sent the request.
    Gateway = 0,
    /// An engine or its event stream.
    Worker = 1,
    /// The operating system under the daemon.
    Kernel = 2,
    /// The operator's configuration.
    Config = 3,
    /// The daemon itself: temporarily (draining, overloaded) or because of a fault.
    Daemon = 4,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $side:ident, $retryable:literal;)*) => {
        /// What went wrong. The discriminant is the error code on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind { $($(#[$doc])* $variant = $code,)* }

        impl Kind {
            /// Every kind, by code.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in logs, metrics and JSON.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The side that has to act.
            #[must_use]
            pub const fn side(self) -> Side {
                match self { $(Self::$variant => Side::$side,)* }
            }

            /// Whether the same request, unchanged, may succeed later.
            #[must_use]
            pub const fn is_retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }
        }
    };
}

kinds! {
    /// The body does not verify as the table its header names.
    Malformed = 1, "malformed", Gateway, false;
    /// The body is larger than the daemon accepts.
    Oversized = 2, "oversized", Gateway, false;
    /// The daemon does not speak the header's protocol version.
    UnsupportedVersion = 3, "unsupported_version", Gateway, false;
    /// The daemon does not serve the message kind, a feature bit or a field.
    Unsupported = 4, "unsupported", Gateway, false;
    /// A request came before hello.
    HelloRequired = 5, "hello_required", Gateway, false;
    /// A field has an invalid value.
    InvalidArgument = 6, "invalid_argument", Gateway, false;
    /// There is no such space.
    UnknownSpace = 7, "unknown_space", Gateway, false;
    /// Block size or window differ from the space's.
    SchemeMismatch = 8, "scheme_mismatch", Gateway, false;
    /// Only the admin socket answers the request.
    AdminOnly = 9, "admin_only", Gateway, false;
    /// The session has reached its limit of bookings.
    TooManyBookings = 10, "too_many_bookings", Gateway, true;
    /// Another live attempt has booked the request id.
    BookingExists = 11, "booking_exists", Gateway, false;
    /// The daemon is draining.
    Draining = 12, "draining", Daemon, true;
    /// A table of fixed size is full.
    Overloaded = 13, "overloaded", Daemon, true;
    /// The peer's user may not do this.
    NotPermitted = 14, "not_permitted", Gateway, false;
    /// The configuration cannot be used.
    Config = 15, "config", Config, false;
    /// A system call failed.
    System = 16, "system", Kernel, false;
    /// An event message could not be decoded.
    Undecodable = 17, "undecodable", Worker, false;
    /// The peer closed the connection or sent invalid data.
    Connection = 18, "connection", Daemon, true;
    /// A fault of the daemon.
    Internal = 19, "internal", Daemon, false;
    /// The pinned worker is not on the request's allow-list.
    PinnedNotAllowed = 20, "pinned_not_allowed", Gateway, false;
    /// The pinned worker is beyond a busy threshold.
    PinnedBusy = 21, "pinned_busy", Worker, true;
    /// Every worker allowed for the request is beyond a busy threshold.
    AllBusy = 22, "all_busy", Worker, true;
    /// No worker meets the constraints of the request and the policy: allow-list, pin, labels, trust.
    AllFiltered = 23, "all_filtered", Gateway, false;
    /// The space has no workers, or all workers allowed for the request are draining, down or backing off.
    NobodyAvailable = 24, "nobody_available", Worker, true;
    /// Every worker is busy and the queue is full.
    QueueFull = 25, "queue_full", Daemon, true;
    /// The request waited for a worker until its deadline.
    DeadlinePassed = 26, "deadline_passed", Worker, true;
}

impl Kind {
    /// The kind with this code on the wire.
    #[must_use]
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as u16 == code)
    }
}

/// An error with a message and a remedy for people.
#[derive(Debug, thiserror::Error)]
pub struct Error {
    kind: Kind,
    message: String,
    remedy: String,
    retry_after_us: Option<u32>,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`, with what happened and what to do about it.
    #[must_use]
    pub fn new(kind: Kind, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { kind, message: message.into(), remedy: remedy.into(), retry_after_us: None, source: None }
    }

    /// Adds the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Adds another remedy, for one who cannot do the first: both are shown, with "or" between them.
    #[must_use]
    pub fn or(mut self, remedy: &str) -> Self {
        self.remedy.push_str(", or ");
        self.remedy.push_str(remedy);
        self
    }

    /// Adds the time after which a retry makes sense.
    #[must_use]
    pub const fn retry_after_us(mut self, us: u32) -> Self {
        self.retry_after_us = Some(us);
        self
    }

    /// The time after which a retry makes sense, microseconds; `None` = see its kind.
    #[must_use]
    pub const fn retry_after(&self) -> Option<u32> {
        self.retry_after_us
    }

    /// The kind of error.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The side that has to act.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.kind.side()
    }

    /// Whether the same request, unchanged, may succeed later.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        self.kind.is_retryable()
    }

    /// What happened, without the remedy.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &str {
        &self.remedy
    }
}

impl fmt::Display for Error {
    /// One line: kind, message, cause, remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        if !self.remedy.is_empty() {
            write!(f, " ({})", self.remedy)?;
        }
        Ok(())
    }
}

/// A count with its noun, for messages: `1 block`, `2 blocks`.
#[must_use]
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_from_one_and_round_trip() {
        for (at, kind) in Kind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, at + 1);
            assert_eq!(Kind::from_code(*kind as u16), Some(*kind));
        }
        assert_eq!(Kind::from_code(0), None);
    }

    #[test]
    fn one_is_singular() {
        assert_eq!([0, 1, 2].map(|n| counted(n, "worker")), ["0 workers", "1 worker", "2 workers"]);
    }

    #[test]
    fn display_is_one_line_with_the_remedy() {
        let error = Error::new(Kind::System, "cannot bind /x", "remove it").caused_by(std::io::Error::other("in use"));
        assert_eq!(error.to_string(), "system: cannot bind /x: in use (remove it)");
    }
}
