//! What is counted. Each thread counts into a set of its own; a scrape or a status request merges them.
//!
//! Every drop, refusal and downgrade has a counter here with the reason in its name.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::ids::WorkerIndex;

/// A fixed list of counters.
pub trait CounterName: Copy + 'static {
    /// Every counter of the list, in the order of [`CounterName::index`].
    const ALL: &'static [Self];
    /// Its place in the list.
    fn index(self) -> usize;
    /// Its name in status, JSON and (with a prefix) Prometheus.
    fn name(self) -> &'static str;
    /// What it counts, in one sentence.
    fn help(self) -> &'static str;
}

macro_rules! counters {
    ($(#[$doc:meta])* $list:ident { $($variant:ident = $name:literal, $help:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $list { $(#[doc = $help] $variant,)* }

        impl CounterName for $list {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];
            fn index(self) -> usize {
                self as usize
            }
            fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
            fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)* }
            }
        }
    };
}

counters! {
    /// Per worker, counted by its ingest thread.
    WorkerCounter {
        Batches = "batches", "Event batches applied.";
        BlocksStored = "blocks_stored", "Block references stored.";
        BlocksRemoved = "blocks_removed", "Block references removed.";
        Cleared = "cleared", "Clears applied.";
        Duplicates = "duplicates", "Batches seen before and ignored.";
        Gaps = "gaps", "Gaps in the sequence.";
        BatchesMissed = "batches_missed", "Batches a gap skipped.";
        Restarts = "restarts", "Restarts of the publisher.";
        Disconnects = "disconnects", "Times the publisher's connection broke.";
        HandshakesFailed = "handshakes_failed", "Times what answers at the worker's endpoint was no event publisher.";
        Emptied = "emptied", "Times everything held for the worker was dropped because it could not be trusted.";
        MessagesOversized = "messages_oversized", "Messages larger than the bound, skipped.";
        MessagesUnbounded = "messages_unbounded", "Times the publisher's connection was cut because a message broke the bound on bytes or parts as it arrived.";
        ProtocolErrors = "protocol_errors", "Times the publisher's connection was cut because what came over it was not ZMTP.";
        MessagesMisframed = "messages_misframed", "Messages without a topic, an 8-byte sequence and a payload, skipped.";
        BatchesUndecodable = "batches_undecodable", "Batches that could not be decoded, skipped.";
        UnknownTags = "unknown_tags", "Events of an unknown kind, skipped.";
        UnknownKeys = "unknown_keys", "Unknown keys of known events, ignored.";
        TrailingElements = "trailing_elements", "Elements past the known ones, ignored.";
        StoresSchemeMismatch = "stores_scheme_mismatch", "Stored events of another block size or window, refused.";
        StoresUnusable = "stores_unusable", "Stored events whose tokens cannot be assigned to their blocks, and of which not all blocks were held elsewhere.";
        BlocksResolved = "blocks_resolved", "Blocks stored without usable tokens, taken for what is held under their hashes.";
        BlocksUnresolved = "blocks_unresolved", "Blocks stored without usable tokens whose hashes are not held, not bound.";
        BlocksPartial = "blocks_partial", "Blocks stored before they were full, which no prompt can match; not bound.";
        StoresUnchained = "stores_unchained", "Stored events whose hashes do not tell where their blocks are, not bound.";
        StoresUnknownRoot = "stores_unknown_root", "Stored events whose chain's seed is unknown, not bound.";
        StoresHashConflict = "stores_hash_conflict", "Stored events that bind a held hash elsewhere, refused.";
        StoresAmbiguous = "stores_ambiguous", "Root chains announced again, not counted again.";
        StoresCopied = "stores_copied", "Root chains announced again, counted as one more copy.";
        FullReports = "full_reports", "Times that announcements showed a full report where full_reports is none.";
        LastCopyRemovals = "last_copy_removals", "Times that events showed one removal for all copies of a block.";
        StoresBounded = "stores_bounded", "Stored events refused because a bound was reached.";
        StoresMemoryBound = "stores_memory_bound", "Stored events refused because the space's memory ceiling was reached.";
        StoresSchemeUnknown = "stores_scheme_unknown", "Stored events before the space's hash scheme was known, not bound.";
        BlocksDormant = "blocks_dormant", "Blocks stored under a parent that is not held.";
        RemovesUnknown = "removes_unknown", "Removals of blocks that were not held.";
        EventsOtherGroup = "events_other_group", "Events of KV groups other than main attention, not counted.";
        EventsUnknownMedium = "events_unknown_medium", "Events in a medium that maps to no tier, ignored.";
        EventsNeverRemoved = "events_never_removed", "Events of stores that never say when a block is gone, not counted.";
        BlocksRebound = "blocks_rebound", "Blocks of lower tiers that were bound again because device memory said something else of their hashes.";
        EventsRemote = "events_remote", "Events about blocks on other machines, ignored.";
        RankConflicts = "rank_conflicts", "Batches of another rank than the stream's, refused.";
        Chokes = "chokes", "Times the worker's events had to wait because memory given up by the index was not yet free.";
        MessagesHeld = "messages_held", "Messages that waited while the worker was dumped, loaded or recovered.";
        MessagesDropped = "messages_dropped", "Live messages dropped while the worker was recovered because too many waited.";
        MessagesPassedOver = "messages_passed_over", "Live messages dropped because a replay, from a buffer that no longer held what was lost, went on behind them.";
        MessagesDroppedBroken = "messages_dropped_broken", "Live messages dropped because their connection broke; a replay has them.";
        Recoveries = "recoveries", "Times lost batches were fetched again, or shown not to be missing, to the last.";
        ReplaysAsked = "replays_asked", "Replays asked for.";
        ReplaysAnswered = "replays_answered", "Replays that were answered up to their end.";
        ReplaysTimedOut = "replays_timed_out", "Replays that did not begin or stopped before their end.";
        BatchesReplayed = "batches_replayed", "Batches that replays brought and that were applied.";
        ReplayHoles = "replay_holes", "Replays in which batches were missing.";
        ReplaysLate = "replays_late", "Replays that began behind what was asked for, or ended before the live stream.";
        ReplaysUnfillable = "replays_unfillable", "Times missing batches could not be had and the worker was emptied.";
        ReplayFramesUnknown = "replay_frames_unknown", "Messages of replays without a sequence and a payload, skipped.";
        Probes = "probes", "Replays asked for because the worker was quiet.";
        Renewals = "renewals", "Replays from the beginning asked for after batches had been lost for good.";
        Renewed = "renewed", "Replays that brought the beginning after batches had been lost for good: the worker began anew.";
        TailsFound = "tails_found", "Probes that found batches which the live stream had lost.";
        Heartbeats = "heartbeats", "Heartbeats of a relay.";
        MessagesUnnumbered = "messages_unnumbered", "Messages outside of a relay's sequence that are no heartbeat, skipped.";
        SnapshotsTaken = "snapshots_taken", "Snapshots of a relay put in place of what was known of the worker.";
        SnapshotsFailed = "snapshots_failed", "Snapshots of a relay that were not whole or did not fit; the worker was left empty.";
        Resyncs = "resyncs", "Times everything was asked for because the relay believed the worker more than was believed here.";
        Dumps = "dumps", "Dumps of the worker that reached their end.";
        Loads = "loads", "Dumps loaded into the worker to their end.";
        Resets = "resets", "Times the worker was emptied because somebody asked for it.";
        Rebuilds = "rebuilds", "Times the worker was emptied because the thread that takes its events in panicked.";
    }
}

counters! {
    /// Per serving core.
    CoreCounter {
        Connections = "connections", "Connections accepted.";
        ConnectionsClosed = "connections_closed", "Connections that ended, for whatever reason.";
        ConnectionsUntrusted = "connections_untrusted", "Connections closed because a frame header could not be trusted.";
        ConnectionsHelloOverdue = "connections_hello_overdue", "Connections closed because hello did not come in time.";
        ConnectionsFrameOverdue = "connections_frame_overdue", "Connections closed because the rest of a frame did not come in time.";
        ConnectionsFailed = "connections_failed", "Connections that ended by an error of the socket.";
        ConnectionsUnread = "connections_unread", "Connections closed because their peer left its replies unread.";
        SpinsPaid = "spins_paid", "Times a core found work because it looked for it instead of sleeping.";
        SpinsInVain = "spins_in_vain", "Times a core looked for work for as long as it may, and none came.";
        Requests = "requests", "Requests answered, errors included.";
        TurnsEndedByWork = "turns_ended_by_work", "Turns of a connection that ended, before it had answered as many requests or bytes as it may, because of how much work they were.";
        FramesNoRoom = "frames_no_room", "Large frames refused because those of other connections took all the memory there is for them.";
        FramesNoRoomUser = "frames_no_room_user", "Large frames refused because those of the same user took as much of the memory there is for them as one user may.";
        Errors = "errors", "Requests answered with an error.";
        Routes = "routes", "Decisions made.";
        RoutesNobody = "routes_nobody", "Decisions with nobody eligible.";
        RoutesPinnedNotAllowed = "routes_pinned_not_allowed", "Decisions with nobody eligible because the pinned worker is not on the allow-list.";
        RoutesPinnedBusy = "routes_pinned_busy", "Decisions with nobody eligible because the pinned worker is busy.";
        RoutesAllBusy = "routes_all_busy", "Decisions with nobody eligible because everybody is busy.";
        RoutesAllFiltered = "routes_all_filtered", "Decisions with nobody eligible because nobody is what the request or the policy wants.";
        RoutesNobodyAvailable = "routes_nobody_available", "Decisions with nobody eligible because nobody is there, or those who are drain, are down or back off.";
        RoutesUnmatchable = "routes_unmatchable", "Decisions whose prompt could not be matched soundly.";
        RoutesSchemeUnknown = "routes_scheme_unknown", "Decisions made by load alone because the space's hash scheme is unknown.";
        RoutesAllDown = "routes_all_down", "Decisions among workers that were all down.";
        RequestsSchemeMismatch = "requests_scheme_mismatch", "Requests refused because their local hashes are of another block size or window than the space's.";
        RoutesContended = "routes_contended", "Decisions whose index read was contended.";
        RoutesDecidedAgain = "routes_decided_again", "Decisions made once more because the chosen worker's load had moved.";
        Bookings = "bookings", "Bookings made.";
        BookingsSuperseded = "bookings_superseded", "Bookings taken over by a later attempt.";
        BookingsUnshared = "bookings_unshared", "Bookings whose blocks were counted in full, as there was no room to share them with those of other requests.";
        ActiveReadsLocked = "active_reads_locked", "Decisions that waited for bookings, which came too fast to read beside them what workers run.";
        BookingsMoved = "bookings_moved", "Bookings moved to another worker, which their gateway had chosen.";
        LoadsReported = "loads_reported", "Loads that were reported of workers.";
        FailuresReported = "failures_reported", "Failures that gateways reported of workers.";
        FailureReportsRefusedUser = "failure_reports_refused_user", "Reports of failure that did not take a worker, or not every rank of it, out of the running, because those of the same user did so to as many workers of the space as one user may while others have sessions.";
        LoadReportsRefusedUser = "load_reports_refused_user", "Reported loads that were not taken because those of the same user were in force for as many workers of the space as one user may have while others have sessions.";
        WatchesTold = "watches_told", "Changes of the fleet that watching connections were told.";
        WatchPages = "watch_pages", "Pages of the fleet that watching connections were sent behind the first.";
        BookingsFreed = "bookings_freed", "Bookings freed by their gateway.";
        BookingsUnknown = "bookings_unknown", "Reports about bookings nobody holds.";
        PredictionsDropped = "predictions_dropped", "Bookings from which nothing is predicted because too many waited for the predictor.";
        JournalLost = "journal_lost", "Decisions left out of the journal, and not judged by the shadow policy, because too many waited.";
        AffinityNew = "affinity_new", "Bookings that bound a session which was bound to nobody.";
        AffinityKept = "affinity_kept", "Bookings for a session on the worker that it was bound to.";
        AffinityMovedIneligible = "affinity_moved_ineligible", "Bookings that bound a session elsewhere because its worker could not be chosen.";
        AffinityMovedOverloaded = "affinity_moved_overloaded", "Bookings that bound a session elsewhere because its worker had too many requests in flight.";
        AffinityMovedOutweighed = "affinity_moved_outweighed", "Bookings that bound a session elsewhere because another worker was cheaper in spite of the factor.";
        AffinityMovedPinned = "affinity_moved_pinned", "Bookings that bound a session elsewhere because the request was pinned to another worker.";
        AffinityEvicted = "affinity_evicted", "Sessions that lost their binding to another because there was no room for more.";
        AffinitySkipped = "affinity_skipped", "Bookings whose session stayed bound as it was because others were binding theirs.";
        Pairs = "pairs", "Decisions that chose a worker to prefill and one to decode.";
        PairsLocal = "pairs_local", "Decisions that were to choose a pair and had one worker do both, as the policy wants.";
        PairsNobody = "pairs_nobody", "Decisions that were to choose a pair and found nobody to prefill.";
        RequestBlocks = "request_blocks", "Prompt blocks looked up.";
        ChosenOverlapBlocks = "chosen_overlap_blocks", "Prompt blocks the chosen workers held, every tier.";
    }
}

counters! {
    /// Once per daemon, counted by the thread of the HTTP port.
    HttpCounter {
        Connections = "http_connections", "Connections to the HTTP port accepted.";
        ConnectionsFailed = "http_connections_failed", "Connections to the HTTP port that broke, or whose request was no HTTP or not there in time.";
        ConnectionsStalled = "http_connections_stalled", "Connections to the HTTP port closed because the response was not read, or too slowly.";
        ConnectionsDisplaced = "http_connections_displaced", "Connections to the HTTP port closed in favour of new ones: the port was full, and they waited for their peer.";
        Requests = "http_requests", "Requests answered on the HTTP port, whatever the answer.";
        Refused = "http_refused", "Requests answered on the HTTP port with a status of 400 to 499.";
        Failed = "http_failed", "Requests answered on the HTTP port with a status of 500 to 599.";
        RepliesCrowded = "http_replies_crowded", "Replies refused because replies that others do not read took all the memory there is for them.";
        EndpointsRefused = "http_endpoints_refused", "Requests to register workers refused because http.worker_hosts does not allow the host of an endpoint.";
        BodiesOversized = "http_bodies_oversized", "Requests refused because their body was larger than the bound.";
        BodiesLate = "http_bodies_late", "Requests refused because their body did not come in time.";
        BodiesCrowded = "http_bodies_crowded", "Requests refused because the bodies of others took all the memory there is for them.";
        BodiesUnusable = "http_bodies_unusable", "Requests refused because their body was not the JSON that was expected.";
        AdministrationRefused = "http_administration_refused", "Requests to change or dump workers refused because http.administer is false.";
        PagesRefused = "http_pages_refused", "Requests refused because a web page sent them, or because their Host is a name that could lead a page here and that http.hosts does not say.";
        SelectionsEvicted = "http_selections_evicted", "Selections forgotten before anybody booked them, for want of room.";
        SelectionsExpired = "http_selections_expired", "Selections forgotten because nobody booked them in time.";
        Unwanted = "http_unwanted", "Requests whose client had gone before they were decided.";
        Dumps = "http_dumps", "Dumps begun.";
        DumpsIncomplete = "http_dumps_incomplete", "Dumps in which blocks of a worker were left out, or that nobody read to the end.";
        DumpsSlow = "http_dumps_slow", "Dumps ended, with their connection, because they were read too slowly.";
        DumpsRefused = "http_dumps_refused", "Dumps refused because another was under way.";
    }
}

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

counters! {
    /// Once per daemon, counted by whichever core it happens on: lanes.
    LaneCounter {
        Opened = "lanes_opened", "Lanes opened.";
        BellsHeard = "lane_bells_heard", "Times a core slept for a lane and was woken by its bell.";
        RefusedOff = "lanes_refused_off", "Lanes refused because there are to be none.";
        RefusedFull = "lanes_refused_full", "Lanes refused because as many are open as may be.";
        RefusedUser = "lanes_refused_user", "Lanes refused because their user has as many open as one user may have.";
        RefusedSizes = "lanes_refused_sizes", "Lanes refused because rings of their sizes cannot be had.";
        RefusedSecond = "lanes_refused_second", "Lanes refused because the connection has one, or is one.";
        RefusedSystem = "lanes_refused_system", "Lanes refused, or closed before they began, because the kernel gave no memory or descriptors.";
        ClosedWithConnection = "lanes_closed_with_connection", "Lanes closed with their connection, whoever ended that, or because the gateway let go of the bell.";
        ClosedPositions = "lanes_closed_positions", "Lanes closed, with their connection, because a position in a ring cannot be.";
        ClosedHeader = "lanes_closed_header", "Lanes closed, with their connection, because a frame header could not be trusted.";
        ClosedUnread = "lanes_closed_unread", "Lanes closed, with their connection, because replies were left unread.";
        ClosedPanic = "lanes_closed_panic", "Lanes closed, with their connection, because answering a request panicked.";
    }
}

counters! {
    /// Once per daemon, counted by the thread that hears what engines say of their load.
    LoadReportCounter {
        Reports = "load_reports", "Readings of an engine's load that were taken.";
        ReportsOvertaken = "load_reports_overtaken", "Readings of an engine's load not used because a newer one was there.";
        ReportsUndecodable = "load_reports_undecodable", "Readings of an engine's load that could not be decoded.";
        ReportsMisframed = "load_reports_misframed", "Messages on a load socket without an 8-byte sequence and a payload, skipped.";
        ReportsUnknownWorker = "load_reports_unknown_worker", "Readings of the load of a worker that has just left.";
        SourcesSilent = "load_sources_silent", "Times an engine had not said how busy it is for too long; bookings alone told.";
        SourcesRefused = "load_sources_refused", "Load sockets that could not be opened.";
        ConnectionsCut = "load_connections_cut", "Connections to load sockets cut because what came over them was not ZMTP or broke a bound.";
    }
}

counters! {
    /// Once per process, whichever port was asked.
    PageCounter {
        Scrapes = "metrics_scrapes", "Requests for the metrics page.";
        Pages = "metrics_pages", "Metrics pages made. Scrapes that come together share one.";
        PagesStale = "metrics_pages_stale", "Times the last metrics page was served once more because slow readers held as many pages as there may be.";
        ScrapesCrowded = "metrics_scrapes_crowded", "Requests for the metrics page refused because too many waited, or slow readers held all pages.";
        ScrapesRefused = "metrics_scrapes_refused", "Requests to the metrics port refused because a web page sent them, or because metrics.hosts does not name their Host.";
    }
}

counters! {
    /// Once per daemon, counted by whichever thread it happens on: requests that waited for a worker.
    QueueCounter {
        Queued = "queue_queued", "Requests that found every worker busy and began to wait.";
        Woken = "queue_woken", "Requests that had waited and were answered: by a decision, or by an error of deciding.";
        FoundByLook = "queue_found_by_look", "Requests that had waited and were decided at the look once in 100 ms: of their room nobody had told, as of a prefill reckoned done.";
        PutBack = "queue_put_back", "Times a request was to be decided, found every worker busy again and waited on.";
        Expired = "queue_expired", "Requests given up because no worker had room by their deadline.";
        Cancelled = "queue_cancelled", "Requests that waited when their connection ended.";
        Undelivered = "queue_undelivered", "Decisions about requests that had waited whose connection had just ended; what they booked was freed.";
        Drained = "queue_drained", "Requests that waited when the daemon began to drain, and were told so.";
        RefusedRequests = "queue_refused_requests", "Requests refused because every worker was busy and as many waited as may.";
        RefusedMemory = "queue_refused_memory", "Requests refused because every worker was busy and those that waited took as much memory as they may.";
        RefusedSets = "queue_refused_sets", "Requests refused because every worker was busy and requests waited for too many different sets of workers.";
        RefusedUser = "queue_refused_user", "Requests refused because every worker was busy and those of the same user that waited were as many, took as much memory, or waited for as many different sets of workers, as those of one user may.";
        RepliesUnread = "queue_replies_unread", "Connections closed because they left too many replies to requests that had waited unread.";
    }
}

counters! {
    /// Once per relay.
    RelayCounter {
        Batches = "relay_batches", "Batches sent.";
        BatchBytes = "relay_batch_bytes", "Bytes of their payloads.";
        Heartbeats = "relay_heartbeats", "Heartbeats sent.";
        SendsFailed = "relay_sends_failed", "Batches and heartbeats not sent to anybody because too many waited for the sending thread.";
        MessagesDropped = "relay_messages_dropped", "Messages that one subscriber did not get because too much waited for it; it asks for them.";
        PeersRefused = "relay_peers_refused", "Connections refused because too many were open, over all or from one address.";
        PeersCut = "relay_peers_cut", "Connections cut because of what came over them, or because the handshake took too long.";
        PeersStalled = "relay_peers_stalled", "Connections cut because their peer read nothing for too long, or fell too far behind the stream.";
        Generations = "relay_generations", "Times a new generation began because no batch could say what changed.";
        BatchesForgotten = "relay_batches_forgotten", "Batches dropped from the replay buffer because it was full.";
        Questions = "relay_questions", "Replays asked for.";
        QuestionsMisframed = "relay_questions_misframed", "Messages to the replay socket that are no question, ignored.";
        QuestionsRefused = "relay_questions_refused", "Replays not answered because too many were being answered.";
        Answers = "relay_answers", "Replays answered to the end.";
        AnswersStalled = "relay_answers_stalled", "Replays given up because whoever asked took nothing for too long.";
        AnswersUnreachable = "relay_answers_unreachable", "Replays given up because whoever asked was gone.";
        AnswersWithoutSnapshot = "relay_answers_without_snapshot", "Replays given up because the snapshot they needed failed.";
        Snapshots = "relay_snapshots", "Snapshots taken to the end.";
        SnapshotsFailed = "relay_snapshots_failed", "Snapshots that came to no end; the log names the reason.";
    }
}

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

counters! {
    /// Per worker and serving core: what decisions show of the worker.
    RouteCounter {
        Decisions = "decisions", "Decisions that chose the worker, for prompts of at least a block.";
        OverlapsFound = "overlaps_found", "Decisions that chose the worker and found some of the prompt on it, and prompts sent there before that were found again.";
        RepeatsMissed = "repeats_missed", "Prompts that were sent to the worker seconds before and of which nothing was found there.";
    }
}

counters! {
    /// Once per daemon, counted by the control thread.
    DaemonCounter {
        ConnectionsRefused = "connections_refused", "Connections refused because too many were open.";
        ConnectionsRefusedUser = "connections_refused_user", "Connections refused because their user had as many open as one user may have.";
        ConnectionsNotPermitted = "connections_not_permitted", "Connections refused because neither serve.allow_uids nor serve.allow_gids names the peer.";
        MailboxFull = "mailbox_full", "Connections refused because a core's mailbox was full.";
        AdminConnectionsRefused = "admin_connections_refused", "Connections to the admin socket refused because too many were open.";
        AdminConnectionsNotPermitted = "admin_connections_not_permitted", "Connections to the admin socket refused because neither admin.allow_uids nor admin.allow_gids names the peer.";
        AdminConnectionsOverdue = "admin_connections_overdue", "Connections to the admin socket closed because hello, the rest of a frame, or room for a reply did not come in time.";
        BookingsExpiredAge = "bookings_expired_age", "Bookings dropped because they were too old.";
        WorkersAdded = "workers_added", "Workers that came while the daemon ran.";
        WorkersRemoved = "workers_removed", "Workers that left while the daemon ran.";
        WorkersChanged = "workers_changed", "Workers whose record changed while the daemon ran.";
        WorkersEmptied = "workers_emptied", "Workers emptied because their events come from elsewhere now.";
        WorkersUnheard = "workers_unheard", "Workers that came or changed, and whose events cannot be received.";
        WorkersRefusedConflict = "workers_refused_conflict", "Workers not taken from a source: another names the same worker or endpoint.";
        WorkersRefusedFull = "workers_refused_full", "Workers not taken because there is no room for more.";
        WorkersRefusedRequest = "workers_refused_request", "Requests to add, change or remove a worker that were refused.";
        DiscoveryFilesUnusable = "discovery_files_unusable", "Times a file of workers was found unreadable or wrong; what it said before holds.";
        DiscoveryFilesRead = "discovery_files_read", "Times a file of workers was read after a change.";
        DiscoveryFilesGone = "discovery_files_gone", "Files of workers whose workers were removed because the file had gone.";
        ServerLooksFailed = "server_looks_failed", "Times an engine named by its URL did not answer a look.";
        ServerInfoFailed = "server_info_failed", "Times an engine named by its URL did not say where it publishes.";
        ConfigReloads = "config_reloads", "Times the configuration was read again and used.";
        ConfigReloadsRefused = "config_reloads_refused", "Times the configuration was read again and could not be used.";
        PoliciesReplaced = "policies_replaced", "Times the policies were replaced by others.";
        BookingsEndedWorkerRemoved = "bookings_ended_worker_removed", "Bookings dropped because their worker was removed.";
        BookingsExpiredSession = "bookings_expired_session", "Bookings dropped because their session's last connection had gone.";
    }
}

counters! {
    /// Once per daemon, counted by the predictor.
    PredictorCounter {
        Bookings = "predicted_bookings", "Bookings from which blocks were predicted.";
        BlocksPredicted = "predicted_blocks_added", "Blocks that became predicted for a worker.";
        BlocksRenewed = "predicted_blocks_renewed", "Blocks that were predicted already when they were booked again.";
        BlocksExpired = "predicted_blocks_expired", "Predicted blocks dropped because they were not booked again for too long.";
        BlocksEvicted = "predicted_blocks_evicted", "Predicted blocks dropped because their worker had more than its bound.";
        BlocksEvictedMemory = "predicted_blocks_evicted_memory", "Predicted blocks dropped because the space's predictions reached their memory ceiling.";
        BlocksForgotten = "predicted_blocks_forgotten", "Predicted blocks dropped because their worker was down, gone or got events.";
        BookingsOfOthers = "predicted_bookings_of_others", "Bookings that came when nothing was predicted for their worker any more.";
        BookingsMemoryBound = "predicted_bookings_memory_bound", "Bookings whose new blocks did not fit the memory ceiling of the space's predictions.";
        BookingsRefused = "predicted_bookings_refused", "Bookings whose new blocks the index of predictions refused for another reason.";
        WorkersNotAdmitted = "predicted_workers_not_admitted", "Workers for which nothing is predicted because the index of predictions is full of workers.";
    }
}

/// One thread's values of one list. Padded, so that two threads' sets share no cache line.
#[derive(Debug)]
#[repr(align(128))]
pub struct CounterSet<L: CounterName> {
    values: Box<[AtomicU64]>,
    list: std::marker::PhantomData<fn() -> L>,
}

impl<L: CounterName> Default for CounterSet<L> {
    fn default() -> Self {
        Self { values: L::ALL.iter().map(|_| AtomicU64::new(0)).collect(), list: std::marker::PhantomData }
    }
}

impl<L: CounterName> CounterSet<L> {
    /// Adds `n`.
    pub fn add(&self, counter: L, n: u64) {
        // Relaxed: a count orders nothing.
        self.values[counter.index()].fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn bump(&self, counter: L) {
        self.add(counter, 1);
    }

    /// The value now.
    #[must_use]
    pub fn get(&self, counter: L) -> u64 {
        // Relaxed: see `add`.
        self.values[counter.index()].load(Ordering::Relaxed)
    }
}

/// One thread's values of one list for every worker, by its place. Who comes next to a place begins at 0.
#[derive(Debug)]
#[repr(align(128))]
pub struct CounterTable<L: CounterName> {
    values: Box<[AtomicU64]>,
    /// Of each place, the [`WorkerIndex`] whose values are there.
    owners: Box<[AtomicU32]>,
    list: std::marker::PhantomData<fn() -> L>,
}

impl<L: CounterName> CounterTable<L> {
    /// A table with room for so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        let values = (0..workers * L::ALL.len()).map(|_| AtomicU64::new(0)).collect();
        // The first of a place has the place as its number.
        let owners = (0..workers as u32).map(AtomicU32::new).collect();
        Self { values, owners, list: std::marker::PhantomData }
    }

    fn values(&self, worker: WorkerIndex) -> &[AtomicU64] {
        &self.values[worker.place() * L::ALL.len()..][..L::ALL.len()]
    }

    /// Adds one. Only the thread whose table it is may: nothing is locked. A worker beyond the room is not counted,
    /// nor is one that another has followed in its place.
    pub fn bump(&self, worker: WorkerIndex, counter: L) {
        let Some(owner) = self.owners.get(worker.place()) else { return };
        // Relaxed: nobody else writes it.
        let owned_by = WorkerIndex(owner.load(Ordering::Relaxed));
        if owned_by.generation() > worker.generation() {
            return;
        }
        let values = self.values(worker);
        if owned_by != worker {
            // Relaxed: the owner's store shows them.
            values.iter().for_each(|value| value.store(0, Ordering::Relaxed));
            // Release: pairs with the Acquire in `get`, which then sees nothing of who was there before.
            owner.store(worker.0, Ordering::Release);
        }
        let value = &values[counter.index()];
        // Relaxed: a count orders nothing, and nobody else writes it.
        value.store(value.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The value now; 0 for a worker beyond the room, and for one that is not the last of its place that was counted.
    #[must_use]
    pub fn get(&self, worker: WorkerIndex, counter: L) -> u64 {
        // Acquire: pairs with the Release in `bump`.
        let is_owner = self.owners.get(worker.place()).is_some_and(|owner| owner.load(Ordering::Acquire) == worker.0);
        // Relaxed: see `bump`. A worker that is followed right now may be told its follower's first counts.
        if is_owner { self.values(worker)[counter.index()].load(Ordering::Relaxed) } else { 0 }
    }
}

/// Upper bounds of [`Latency`]'s buckets: 2^8 ns (256 ns) doubling to 2^26 ns (67 ms), then the rest.
const LATENCY_BUCKET_BITS: std::ops::RangeInclusive<u32> = 8..=26;

/// How long something took, in buckets that double. One thread's own, merged on scrape.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Latency {
    buckets: [AtomicU64; (*LATENCY_BUCKET_BITS.end() - *LATENCY_BUCKET_BITS.start() + 2) as usize],
    sum_ns: AtomicU64,
}

impl Latency {
    /// Counts one duration.
    pub fn record(&self, ns: u64) {
        let bits = 64 - ns.saturating_sub(1).leading_zeros();
        let bucket = bits.clamp(*LATENCY_BUCKET_BITS.start(), *LATENCY_BUCKET_BITS.end() + 1);
        // Relaxed: a count orders nothing.
        self.buckets[(bucket - LATENCY_BUCKET_BITS.start()) as usize].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The sum in seconds, and (upper bound in seconds, count) of each bucket; the last bound is infinite.
    #[must_use]
    pub fn read(&self) -> (f64, Vec<(f64, u64)>) {
        let bounds = LATENCY_BUCKET_BITS.map(|bits| (1_u64 << bits) as f64 * 1e-9).chain([f64::INFINITY]);
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        (self.sum_ns.load(Ordering::Relaxed) as f64 * 1e-9, bounds.zip(counts).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_indexes_dense() {
        fn check<L: CounterName>() {
            let mut names: Vec<_> = L::ALL.iter().map(|counter| counter.name()).collect();
            assert!(L::ALL.iter().enumerate().all(|(at, counter)| counter.index() == at));
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), L::ALL.len());
        }
        check::<WorkerCounter>();
        check::<CoreCounter>();
        check::<DaemonCounter>();
        check::<LoadReportCounter>();
        check::<PredictorCounter>();
        check::<RelayCounter>();
        check::<SnapshotCounter>();
        check::<RouteCounter>();
        check::<QueueCounter>();
        check::<LaneCounter>();
        check::<HttpCounter>();
        check::<PageCounter>();
    }

    #[test]
    fn a_table_counts_per_worker_and_leaves_out_who_has_no_room() {
        let table = CounterTable::new(2);
        table.bump(WorkerIndex(1), RouteCounter::RepeatsMissed);
        table.bump(WorkerIndex(1), RouteCounter::RepeatsMissed);
        table.bump(WorkerIndex(2), RouteCounter::Decisions);
        assert_eq!(table.get(WorkerIndex(1), RouteCounter::RepeatsMissed), 2);
        assert_eq!(table.get(WorkerIndex(0), RouteCounter::RepeatsMissed), 0);
        assert_eq!(table.get(WorkerIndex(2), RouteCounter::Decisions), 0);
    }

    #[test]
    fn who_follows_in_a_place_begins_at_zero_and_who_left_is_not_counted() {
        let table = CounterTable::new(2);
        let (left, here) = (WorkerIndex::at(1, 0), WorkerIndex::at(1, 1));
        table.bump(left, RouteCounter::RepeatsMissed);
        assert_eq!(table.get(here, RouteCounter::RepeatsMissed), 0);
        table.bump(here, RouteCounter::Decisions);
        table.bump(left, RouteCounter::Decisions);
        let of = |worker| [RouteCounter::Decisions, RouteCounter::RepeatsMissed].map(|of| table.get(worker, of));
        assert_eq!((of(here), of(left)), ([1, 0], [0, 0]));
    }

    #[test]
    fn a_duration_lands_in_the_bucket_that_bounds_it() {
        let latency = Latency::default();
        for ns in [0, 256, 257, 1 << 26, (1 << 26) + 1, u64::MAX >> 1] {
            latency.record(ns);
        }
        let (_, buckets) = latency.read();
        let counts: Vec<_> = buckets.iter().map(|(_, count)| *count).collect();
        assert_eq!((counts[0], counts[1], counts[18], counts[19]), (2, 1, 1, 2));
        assert_eq!(counts.iter().sum::<u64>(), 6);
        assert!((buckets[0].0 - 256e-9).abs() < 1e-15);
    }
}
