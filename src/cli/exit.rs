//! How a command ends: exit codes, and failures with a code and a message.

use std::io;
use std::process::ExitCode;

use crate::error::{Error, Kind};

/// The exit code of a command. Codes from 64 are those of `sysexits.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Success, also if the reader of standard output closed it early.
    Done = 0,
    /// The daemon refused the request, or `doctor` found something wrong.
    Refused = 1,
    /// The command line, the configuration or an input file cannot be used.
    Usage = 64,
    /// No daemon answers, or the connection to it was lost.
    Unavailable = 69,
    /// A fault of this program.
    Internal = 70,
    /// A system call failed.
    System = 71,
    /// Standard output cannot be written.
    Output = 74,
}

impl Exit {
    /// The code for this kind of error.
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
    /// The message for standard error; empty = none.
    pub message: String,
}

impl Failure {
    /// A failure with a code and a message.
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
    /// An error of standard output. A reader that closed it early is no failure.
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
    fn kinds_of_errors_map_to_exit_codes() {
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
