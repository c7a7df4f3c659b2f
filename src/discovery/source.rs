//! Who can name workers.

use std::fmt;
use std::path::PathBuf;

/// One source of workers, in the order in which they are asked when none owns a worker yet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The configuration, its file or the command line.
    Config,
    /// A file of workers.
    File(PathBuf),
    /// Requests on the admin socket; what they said is forgotten when the daemon ends.
    Admin,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config => f.write_str("config"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Admin => f.write_str("admin"),
        }
    }
}
