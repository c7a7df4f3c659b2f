//! What is counted of snapshots.

use super::CounterName;

counters! {
    /// Once per daemon, counted by the threads that write and load snapshots.
    SnapshotCounter {
        SnapshotsWritten = "snapshots_written", "Snapshots of a worker written and put in place.";
        SnapshotsUnchanged = "snapshots_unchanged", "Snapshots not written again because nothing had come of the worker since.";
        SnapshotsFailed = "snapshots_failed", "Snapshots that could not be written: the file system refused.";
        SnapshotsBrokenOff = "snapshots_broken_off", "Snapshots given up because the dump of the worker was broken off.";
        SnapshotsOvertaken = "snapshots_overtaken", "Snapshots given up because a reset came before they were in place.";
        SnapshotsLate = "snapshots_late", "Snapshots that a stop of the daemon did not wait for.";
        SnapshotsLoaded = "snapshots_loaded", "Snapshots loaded into their workers.";
        SnapshotsExpired = "snapshots_expired", "Snapshots removed because their worker had long been gone.";
        SnapshotsReset = "snapshots_reset", "Snapshots removed because somebody asked for it.";
        SnapshotWrittenBytes = "snapshot_written_bytes", "Bytes of the snapshots written.";
        SnapshotLoadedBytes = "snapshot_loaded_bytes", "Bytes of the snapshots loaded.";
        SnapshotReferencesWritten = "snapshot_references_written", "Block references in the snapshots written.";
    }
}
