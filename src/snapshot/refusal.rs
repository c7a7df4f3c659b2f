//! Why a snapshot is not used.

use std::fmt;

use crate::reasons::reasons;

reasons! {
    /// Why a snapshot is not used. Its worker then starts empty, as without one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Refusal {
        /// What an operator can do about it.
        remedy: &'static str;
    }
    /// The file cannot be read.
    Unreadable = "unreadable", "check the disk and the directory's owner; the next snapshot replaces the file";
    /// The file does not begin as a snapshot does.
    NotASnapshot = "not_a_snapshot", "give the snapshots a directory of their own";
    /// The file is of another version of the format.
    OtherVersion = "other_version", "none needed; the next snapshot is of this version";
    /// The file ends before its end.
    Truncated = "truncated", "check the disk; the next snapshot replaces the file";
    /// The bytes are not those that were written.
    Checksum = "checksum", "check the disk; the next snapshot replaces the file";
    /// The checksums fit, and what they cover means nothing.
    Malformed = "malformed", "report it with the file; the next snapshot replaces it";
    /// The file is of another worker than its name says.
    OtherWorker = "other_worker", "give each daemon a directory of its own, and rename no file in it";
    /// The file is of another model, namespace or role than the worker's.
    OtherSpace = "other_space", "none needed if the worker's record was changed; otherwise give each daemon a directory of its own";
    /// The blocks are cut or hashed otherwise than the space's.
    OtherScheme = "other_scheme", "none needed if the space's block size was changed; otherwise correct it";
    /// The worker has no replay endpoint, so nothing can show that its stream went on from the snapshot.
    Unprovable = "unprovable", "give the worker's record the engine's replay endpoint";
    /// Every check passed, and the worker did not take the blocks; its log line says why.
    LoadFailed = "load_failed", "see the log line of the load before this one";
}

/// What is wrong with a snapshot, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Why it is not used.
    pub refusal: Refusal,
    /// Bytes of the file that were read before that showed.
    pub offset: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.refusal.name(), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_dense_and_their_names_unique() {
        let mut names: Vec<_> = Refusal::ALL.iter().map(|refusal| refusal.name()).collect();
        assert!(Refusal::ALL.iter().enumerate().all(|(at, refusal)| at == *refusal as usize));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Refusal::ALL.len());
    }
}
