//! Why a run ends early.

use std::path::PathBuf;

/// Why a run ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A line of the trace is no request.
    #[error("line {line} of the trace: {what}")]
    Trace {
        /// From 1; 0 for the trace as a whole.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The terminal, the clock or a child process.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A child process did not say what it measured.
    #[error("a child process: {0}")]
    Child(String),
    /// The peer's interface failed.
    #[error("the peer: {0}")]
    Peer(String),
    /// ZeroMQ failed.
    #[error("ZeroMQ: {0}")]
    Zmq(zmq::Error),
    /// kvrouted's index did not do what its contract says.
    #[error("kvrouted: {0}")]
    Contract(String),
}

/// An error of the daemon, or of a client of it.
impl From<kvrouted::error::Error> for Failure {
    fn from(error: kvrouted::error::Error) -> Self {
        Self::Contract(error.to_string())
    }
}

impl Failure {
    /// A file that cannot be read or written.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::File { path: path.into(), source }
    }

    /// A call of libzmq that failed.
    pub(crate) const fn zmq(error: zmq::Error) -> Self {
        Self::Zmq(error)
    }

    /// A system call that failed.
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
