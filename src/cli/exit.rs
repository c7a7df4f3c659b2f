//! How a command ends: exit codes, and the error that leads to one.

use std::io;
use std::process::ExitCode;

use crate::error::{Error, Kind};

/// The exit code of a command. From 64 on they are those of `sysexits.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done, also where the reader of standard output has gone.
    Done = 0,
    /// The daemon answered, and the answer is a refusal; or `doctor` found something wrong.
    Refused = 1,
    /// The command line, the configuration or an input file cannot be used.
    Usage = 64,
    /// No daemon answers, or it went away.
    Unavailable = 69,
    /// Something here is broken.
    Internal = 70,
    /// A system call failed.
    System = 71,
    /// Standard output cannot be written.
    Output = 74,
}

impl Exit {
    /// The code that tells a script what kind of error this is.
    #[must_use]
    pub const fn of(error: &Error) -> Self {
        match error.kind() {
            Kind::Config => Self::Usage,
            Kind::Connection => Self::Unavailable,
            Kind::System => Self::System,
            Kind::Internal => Self::Internal,
            _ => Self::Refused,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command ends early.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code to exit with.
    pub exit: Exit,
    /// What to say on standard error; empty = nothing.
    pub message: String,
}

impl Failure {
    /// A failure in words.
    #[must_use]
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(Exit::of(&error), error.to_string())
    }
}

impl From<io::Error> for Failure {
    /// Of standard output: a reader that has had enough is no failure.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::new(Exit::Done, ""),
            _ => Self::new(Exit::Output, format!("standard output: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_a_code_of_its_own_sense() {
        let exit = |kind| Exit::of(&Error::new(kind, "x", ""));
        assert_eq!(exit(Kind::Config), Exit::Usage);
        assert_eq!(exit(Kind::UnknownSpace), Exit::Refused);
        assert_eq!(exit(Kind::Connection), Exit::Unavailable);
        assert_eq!(Exit::Usage as u8, 64);
        assert_eq!(Exit::Unavailable as u8, 69);
    }

    #[test]
    fn a_closed_pipe_is_a_quiet_end() {
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)), Failure::new(Exit::Done, ""));
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)).exit, Exit::Output);
    }
}
