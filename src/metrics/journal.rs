//! What the journal counts.

use super::CounterName;

counters! {
    /// Once per daemon, counted by the journal's writer.
    JournalCounter {
        Records = "journal_records", "Decisions written to the journal.";
        Bytes = "journal_bytes", "Bytes written to the journal.";
        Files = "journal_files", "Files of the journal begun.";
        FilesRemoved = "journal_files_removed", "Files of the journal removed because there were too many.";
        Gaps = "journal_gaps", "Places in the journal where decisions are missing because too many waited to be written.";
        WritesFailed = "journal_writes_failed", "Times the journal could not be written: the file system refused.";
        Unwritten = "journal_unwritten", "Decisions left out of the journal because it could not be written.";
    }
}
