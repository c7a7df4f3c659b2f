//! Counters and histograms. Each thread counts into a set of its own; a scrape or a status request adds them up.
//!
//! Every drop, refusal and loss of trust has a counter here, with the reason in its name. The names do not change
//! (`tests/fixtures/frozen/metrics.txt`).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::ids::WorkerIndex;

/// A fixed list of counters.
pub trait CounterName: Copy + 'static {
    /// Every counter of the list, in the order of [`CounterName::index`].
    const ALL: &'static [Self];
    /// Whether one thread alone counts into a set of the list, so that no addition has to be atomic.
    const ONE_WRITER: bool;
    /// The position of the counter in [`CounterName::ALL`].
    fn index(self) -> usize;
    /// The name in `kvrouted status` and, with the prefix `kvrouted_`, in Prometheus.
    fn name(self) -> &'static str;
    /// The help text: what the counter counts, in one sentence.
    fn help(self) -> &'static str;
}

macro_rules! counters {
    ($(#[$doc:meta])* $list:ident { $($variants:tt)* }) => {
        counters! { $(#[$doc])* $list (one writer: false) { $($variants)* } }
    };
    ($(#[$doc:meta])* $list:ident (one writer: $one_writer:literal) {
        $($variant:ident = $name:literal, $help:literal;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $list { $(#[doc = $help] $variant,)* }

        impl CounterName for $list {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];
            const ONE_WRITER: bool = $one_writer;
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

/// The metrics of each worker that the alerts and dashboards in `ops` use, without `kvrouted_worker_` before and `_total`
/// after. The page of a large fleet has no others (`metrics.detailed_workers_max`). A test compares the list with `ops`.
pub const WATCHED_WORKER_METRICS: &[&str] = &[
    "active_decode_blocks",
    "active_prefill_tokens",
    "active_requests",
    "batches",
    "blocks_held",
    "blocks_removed",
    "blocks_stored",
    "cleared",
    "decisions",
    "disconnects",
    "duplicates",
    "emptied",
    "gaps",
    "handshakes_failed",
    "messages_dropped",
    "messages_dropped_broken",
    "messages_no_room",
    "messages_oversized",
    "messages_passed_over",
    "messages_waiting",
    "others_requests",
    "overlaps_found",
    "rebuilds",
    "repeats_missed",
    "replays_answered",
    "replays_asked",
    "replays_timed_out",
    "replays_unfillable",
    "resets",
    "restarts",
    "state",
    "trust",
    "trust_reason",
    "undecodable",
];

counters! {
    /// Per worker, counted by its ingest thread: its event stream.
    WorkerCounter {
        Batches = "batches", "Event batches applied.";
        BlocksStored = "blocks_stored", "References to blocks that events stored. A reference is one worker holding one block in one tier.";
        BlocksRemoved = "blocks_removed", "References to blocks that events removed.";
        Cleared = "cleared", "Clears of the whole cache applied.";
        Duplicates = "duplicates", "Batches ignored because they had been applied before.";
        Gaps = "gaps", "Gaps in the sequence numbers of batches.";
        BatchesMissed = "batches_missed", "Batches that gaps skipped.";
        Restarts = "restarts", "Restarts of the publisher.";
        Disconnects = "disconnects", "Times the connection to the publisher broke.";
        HandshakesFailed = "handshakes_failed", "Handshakes that failed because the peer at the worker's endpoint is no event publisher.";
        Emptied = "emptied", "Times the daemon dropped all blocks of the worker because it could no longer trust them.";
        MessagesOversized = "messages_oversized", "Messages skipped because they were larger than the limit.";
        MessagesUnbounded = "messages_unbounded", "Connections to the publisher cut because an arriving message exceeded the limit on bytes or parts.";
        MessagesNoRoom = "messages_no_room", "Connections to the publisher cut because the messages of all publishers took too much memory.";
        ProtocolErrors = "protocol_errors", "Connections to the publisher cut because its bytes were not ZMTP.";
        MessagesMisframed = "messages_misframed", "Messages skipped because they were not a topic, an 8-byte sequence number and a payload.";
        BatchesUndecodable = "batches_undecodable", "Batches skipped because they could not be decoded.";
        UnknownTags = "unknown_tags", "Events skipped because their kind is unknown.";
        UnknownKeys = "unknown_keys", "Unknown keys of known events, ignored.";
        TrailingElements = "trailing_elements", "Elements after the last known one of an event, ignored.";
        StoresSchemeMismatch = "stores_scheme_mismatch", "Store events refused because their block size or window differs from the space's.";
        StoresUnusable = "stores_unusable", "Store events whose tokens could not be assigned to their blocks, and whose blocks were not all held elsewhere.";
        BlocksResolved = "blocks_resolved", "Blocks stored without usable tokens and matched to known content by their hash.";
        BlocksUnresolved = "blocks_unresolved", "Blocks stored without usable tokens and left out because their hash is unknown.";
        BlocksPartial = "blocks_partial", "Blocks stored before they were full and left out, because no prompt can match them.";
        StoresUnchained = "stores_unchained", "Store events left out because their hashes do not depend on the blocks before them.";
        StoresUnknownRoot = "stores_unknown_root", "Store events left out because the seed of their chain is unknown.";
        StoresHashConflict = "stores_hash_conflict", "Store events refused because a hash is already bound to other content.";
        StoresAmbiguous = "stores_ambiguous", "Root chains announced again and not counted as another copy.";
        StoresCopied = "stores_copied", "Root chains announced again and counted as another copy.";
        FullReports = "full_reports", "Times the events showed a full report although the space's full_reports is \"none\".";
        LastCopyRemovals = "last_copy_removals", "Times the events showed that the engine announces one removal for all copies of a block.";
        StoresBounded = "stores_bounded", "Store events refused because a limit on blocks was reached.";
        StoresMemoryBound = "stores_memory_bound", "Store events refused because the space's memory limit was reached.";
        StoresMemoryShort = "stores_memory_short", "Store events with new blocks refused because the daemon's memory budget was nearly used.";
        StoresSchemeUnknown = "stores_scheme_unknown", "Store events left out because the space's block size was not known yet.";
        BlocksDormant = "blocks_dormant", "Blocks stored under a parent that the worker does not hold.";
        RemovesUnknown = "removes_unknown", "Removals of blocks that the worker did not hold.";
        EventsOtherGroup = "events_other_group", "Events left out because they are about a KV group other than main attention.";
        EventsUnknownMedium = "events_unknown_medium", "Events ignored because their medium maps to no tier.";
        EventsNeverRemoved = "events_never_removed", "Events left out because their store never announces removals.";
        BlocksRebound = "blocks_rebound", "Blocks of lower tiers bound again because device memory showed other content for their hash.";
        EventsRemote = "events_remote", "Events ignored because they are about blocks on other machines.";
        RankConflicts = "rank_conflicts", "Batches refused because they name another rank than the stream's.";
        Chokes = "chokes", "Times the worker's events had to wait until the index could free memory it had given up.";
        MessagesHeld = "messages_held", "Messages that waited for the end of a dump, load or recovery of the worker.";
        MessagesDropped = "messages_dropped", "Live messages dropped in a recovery because too many waited. A replay brings them again.";
        MessagesPassedOver = "messages_passed_over", "Live messages dropped because the engine's replay buffer no longer held the lost batches and the replay resumed after these messages.";
        MessagesDroppedBroken = "messages_dropped_broken", "Live messages dropped because their connection broke. A replay brings them again.";
        Recoveries = "recoveries", "Recoveries that fetched every missing batch, or found that none was missing.";
        ReplaysAsked = "replays_asked", "Replays requested.";
        ReplaysAnswered = "replays_answered", "Replays answered to their end.";
        ReplaysTimedOut = "replays_timed_out", "Replays that did not begin, or stopped before their end.";
        BatchesReplayed = "batches_replayed", "Batches applied from replays.";
        ReplayHoles = "replay_holes", "Replays in which batches were missing.";
        ReplaysLate = "replays_late", "Replays that began after the requested batch, or ended before the live stream.";
        ReplaysUnfillable = "replays_unfillable", "Times the daemon could not fetch missing batches and dropped all blocks of the worker.";
        ReplayFramesUnknown = "replay_frames_unknown", "Replay messages skipped because they were not a sequence number and a payload.";
        Probes = "probes", "Replays requested because the worker was quiet.";
        Renewals = "renewals", "Replays requested from the first batch because batches had been lost for good.";
        Renewed = "renewed", "Renewals that succeeded: the replay began at the first batch and the daemon rebuilt the worker from it.";
        TailsFound = "tails_found", "Probes that found batches the live stream had lost.";
        Heartbeats = "heartbeats", "Heartbeats received from a relay.";
        MessagesUnnumbered = "messages_unnumbered", "Messages skipped because they are outside a relay's sequence and no heartbeat.";
        SnapshotsTaken = "snapshots_taken", "Snapshots from a relay that replaced the worker's blocks.";
        SnapshotsFailed = "snapshots_failed", "Snapshots from a relay that were incomplete or did not fit. The worker was left without blocks.";
        EngineSnapshotsAsked = "engine_snapshots_asked", "Snapshots requested from the engine itself.";
        EngineSnapshotsLoaded = "engine_snapshots_loaded", "Snapshots of the engine itself that replaced the worker's blocks.";
        EngineSnapshotsFailed = "engine_snapshots_failed", "Snapshots of the engine itself that did not come, were refused, or did not join the stream. transfers_aborted has the reasons.";
        Resyncs = "resyncs", "Full resynchronisations requested because the relay trusted the worker more than this daemon did.";
        Dumps = "dumps", "Dumps of the worker that completed.";
        Loads = "loads", "Loads of a dump into the worker that completed.";
        Resets = "resets", "Times the daemon dropped all blocks of the worker because a client asked for it.";
        Rebuilds = "rebuilds", "Times the daemon dropped all blocks of the worker because its ingest thread panicked.";
    }
}

counters! {
    /// Per serving thread: connections, requests, decisions and bookings.
    CoreCounter (one writer: true) {
        Connections = "connections", "Connections accepted.";
        ConnectionsClosed = "connections_closed", "Connections that ended, for any reason.";
        ConnectionsUntrusted = "connections_untrusted", "Connections closed because of an invalid frame header.";
        ConnectionsHelloOverdue = "connections_hello_overdue", "Connections closed because hello did not arrive within serve.frame_timeout_ms.";
        ConnectionsFrameOverdue = "connections_frame_overdue", "Connections closed because the rest of a frame did not arrive within serve.frame_timeout_ms.";
        ConnectionsFailed = "connections_failed", "Connections that ended with a socket error.";
        ConnectionsUnreadMemory = "connections_unread_memory", "Connections closed because unread replies took too much memory, and this one had the most.";
        ConnectionsUnread = "connections_unread", "Connections closed because the peer did not read its replies.";
        SpinsPaid = "spins_paid", "Busy-polls that found work.";
        SpinsInVain = "spins_in_vain", "Busy-polls that ended without work.";
        Requests = "requests", "Requests answered, errors included.";
        TurnsEndedByWork = "turns_ended_by_work", "Fairness quanta of a connection that ended because of the work of its requests, before the limits on requests and bytes.";
        FramesNoRoom = "frames_no_room", "Large frames refused because large frames of all connections had used up their shared memory.";
        FramesNoRoomUser = "frames_no_room_user", "Large frames refused because one user's large frames had used up that user's share of the memory.";
        Errors = "errors", "Requests answered with an error.";
        Routes = "routes", "Decisions made.";
        RoutesNobody = "routes_nobody", "Decisions that found no eligible worker.";
        RoutesPinnedNotAllowed = "routes_pinned_not_allowed", "Decisions without an eligible worker because the pinned worker is not on the allow-list.";
        RoutesPinnedBusy = "routes_pinned_busy", "Decisions without an eligible worker because the pinned worker is busy.";
        RoutesAllBusy = "routes_all_busy", "Decisions without an eligible worker because every worker is busy.";
        RoutesAllFiltered = "routes_all_filtered", "Decisions without an eligible worker because no worker meets the constraints of the request and the policy.";
        RoutesNobodyAvailable = "routes_nobody_available", "Decisions without an eligible worker because there is none, or all are draining, down or backing off.";
        RoutesUnmatchable = "routes_unmatchable", "Decisions whose prompt could not be compared with cached blocks reliably.";
        RoutesSchemeUnknown = "routes_scheme_unknown", "Decisions by load alone because the space's block size is not known yet.";
        RoutesAllDown = "routes_all_down", "Decisions among workers that were all down.";
        RequestsSchemeMismatch = "requests_scheme_mismatch", "Requests refused because their block hashes have another block size or window than the space.";
        RoutesContended = "routes_contended", "Decisions whose index lookup was contended.";
        RoutesDecidedAgain = "routes_decided_again", "Decisions repeated because the chosen worker's load changed meanwhile.";
        Bookings = "bookings", "Bookings made.";
        BookingsSuperseded = "bookings_superseded", "Bookings replaced by a later attempt of the same request.";
        BookingsUnshared = "bookings_unshared", "Bookings counted in full because their blocks had no place among those shared with other requests.";
        ActiveReadsLocked = "active_reads_locked", "Decisions that had to take the lock of the bookings because bookings changed too fast to read beside them.";
        BookingsMoved = "bookings_moved", "Bookings that a gateway moved to another worker.";
        LoadsReported = "loads_reported", "Worker loads that gateways reported.";
        FailuresReported = "failures_reported", "Worker failures that gateways reported.";
        FailureReportsRefusedUser = "failure_reports_refused_user", "Failure reports that excluded no worker, or not every rank, because the same user's reports already excluded its share of the space's workers while other users had sessions.";
        LoadReportsRefusedUser = "load_reports_refused_user", "Load reports ignored because the same user's reports already applied to its share of the space's workers while other users had sessions.";
        WatchesTold = "watches_told", "Fleet changes sent to watching connections.";
        WatchPages = "watch_pages", "Further pages of the fleet sent to watching connections, after the first page.";
        BookingsFreed = "bookings_freed", "Bookings freed by their gateway.";
        PrefillsReported = "prefills_reported", "Bookings whose first token a gateway reported.";
        BookingsUnknown = "bookings_unknown", "Reports about bookings that do not exist.";
        TraceContextsInvalid = "trace_contexts_invalid", "Trace contexts of requests ignored because one of their ids is 0.";
        PredictionsDropped = "predictions_dropped", "Bookings without predictions because too many waited for the predictor.";
        JournalLost = "journal_lost", "Decisions left out of the journal, and not judged by the shadow policy, because too many waited.";
        AffinityNew = "affinity_new", "Bookings that bound an unbound session to a worker.";
        AffinityKept = "affinity_kept", "Bookings of a session on the worker to which it was bound.";
        AffinityMovedIneligible = "affinity_moved_ineligible", "Bookings that rebound a session because its worker was not eligible.";
        AffinityMovedOverloaded = "affinity_moved_overloaded", "Bookings that rebound a session because its worker had too many requests in flight.";
        AffinityMovedOutweighed = "affinity_moved_outweighed", "Bookings that rebound a session because another worker was cheaper in spite of affinity_factor.";
        AffinityMovedPinned = "affinity_moved_pinned", "Bookings that rebound a session because the request was pinned to another worker.";
        AffinityEvicted = "affinity_evicted", "Bindings of sessions evicted because the table was full.";
        AffinitySkipped = "affinity_skipped", "Bookings that left the binding of their session unchanged because other threads were changing bindings.";
        Pairs = "pairs", "Decisions that chose a prefill worker and a decode worker.";
        PairsLocal = "pairs_local", "Decisions for a pair in which the policy let one worker do prefill and decode.";
        PairsNobody = "pairs_nobody", "Decisions for a pair that found no eligible prefill worker.";
        RequestBlocks = "request_blocks", "Prompt blocks looked up.";
        ChosenOverlapBlocks = "chosen_overlap_blocks", "Prompt blocks that the chosen workers held, over all tiers.";
    }
}

counters! {
    /// Once per daemon, counted by the thread of the HTTP port.
    HttpCounter {
        Connections = "http_connections", "Connections accepted on the HTTP port.";
        ConnectionsFailed = "http_connections_failed", "Connections to the HTTP port that broke, sent no valid HTTP, or sent no request in time.";
        ConnectionsStalled = "http_connections_stalled", "Connections to the HTTP port closed because the client read the response too slowly or not at all.";
        ConnectionsDisplaced = "http_connections_displaced", "Connections to the HTTP port closed while they waited for their client, to make room for new ones.";
        Requests = "http_requests", "Requests answered on the HTTP port, with any status.";
        Refused = "http_refused", "Requests answered on the HTTP port with a status from 400 to 499.";
        Failed = "http_failed", "Requests answered on the HTTP port with a status from 500 to 599.";
        RepliesCrowded = "http_replies_crowded", "Responses refused because unread responses of other clients had used up the memory for responses.";
        EndpointsRefused = "http_endpoints_refused", "Requests to register workers refused because http.worker_hosts does not allow an endpoint's host.";
        BodiesOversized = "http_bodies_oversized", "Requests refused because their body was larger than http.body_bytes_max.";
        BodiesLate = "http_bodies_late", "Requests refused because their body did not arrive in time.";
        BodiesCrowded = "http_bodies_crowded", "Requests refused because bodies of other requests had used up the memory for bodies.";
        BodiesUnusable = "http_bodies_unusable", "Requests refused because their body was not the expected JSON.";
        AdministrationRefused = "http_administration_refused", "Requests to change or dump workers refused because http.administer is false.";
        PagesRefused = "http_pages_refused", "Requests refused because a web page sent them, or because their Host is a name that http.hosts does not list.";
        SelectionsEvicted = "http_selections_evicted", "Selections forgotten before they were booked because the table was full.";
        SelectionsExpired = "http_selections_expired", "Selections forgotten because they were not booked in time.";
        Unwanted = "http_unwanted", "Requests whose client disconnected before the decision.";
        Dumps = "http_dumps", "Dumps started.";
        DumpsIncomplete = "http_dumps_incomplete", "Dumps that left out blocks of a worker, or that the client did not read to the end.";
        DumpsSlow = "http_dumps_slow", "Dumps ended, with their connection, because the client read too slowly.";
        DumpsRefused = "http_dumps_refused", "Dumps refused because another was running.";
    }
}

counters! {
    /// Once per daemon, counted by the journal's writer.
    JournalCounter {
        Records = "journal_records", "Decisions written to the journal.";
        Ends = "journal_ends", "Ends of recorded requests written to the journal.";
        EndsLost = "journal_ends_lost", "Ends of recorded requests left out of the journal because too many waited, or it could not be written.";
        Bytes = "journal_bytes", "Bytes written to the journal.";
        Files = "journal_files", "Journal files started.";
        FilesRemoved = "journal_files_removed", "Journal files removed because journal.files_max was reached.";
        Gaps = "journal_gaps", "Places in the journal where decisions are missing because too many waited to be written.";
        WritesFailed = "journal_writes_failed", "Writes to the journal that the file system refused.";
        Unwritten = "journal_unwritten", "Decisions left out of the journal because it could not be written.";
    }
}

counters! {
    /// Once per daemon: traced requests and their spans.
    TraceCounter {
        Requests = "traced_requests", "Requests traced: their decisions were handed to the thread that exports spans.";
        RecordsLost = "trace_records_lost", "Traced decisions and ends of traced bookings that got no span because too many waited.";
        BookingsUntracked = "trace_bookings_untracked", "Bookings of traced requests that got no span because too many were open.";
        SpansSent = "trace_spans_sent", "Spans that the collector took.";
        SpansDropped = "trace_spans_dropped", "Spans dropped because too many waited for the collector.";
        SpansGivenUp = "trace_spans_given_up", "Spans dropped because the collector did not take them after several attempts, or before the daemon ended.";
        SpansRefused = "trace_spans_refused", "Spans that the collector refused.";
        Exports = "trace_exports", "Batches of spans that the collector took.";
        ExportsFailed = "trace_exports_failed", "Attempts to send a batch of spans that failed.";
    }
}

counters! {
    /// Once per daemon, counted by any serving thread: shared-memory lanes.
    LaneCounter {
        Opened = "lanes_opened", "Shared-memory lanes opened.";
        BellsHeard = "lane_bells_heard", "Times a lane's bell woke a sleeping serving thread.";
        RefusedOff = "lanes_refused_off", "Lanes refused because serve.lanes_max is 0.";
        RefusedFull = "lanes_refused_full", "Lanes refused because serve.lanes_max was reached.";
        RefusedUser = "lanes_refused_user", "Lanes refused because their user had reached its share.";
        RefusedSizes = "lanes_refused_sizes", "Lanes refused because rings of the requested sizes are not allowed.";
        RefusedRemote = "lanes_refused_remote", "Lanes refused because the connection comes from another host.";
        RefusedSecond = "lanes_refused_second", "Lanes refused because the connection already has one, or is one.";
        RefusedSystem = "lanes_refused_system", "Lanes refused, or closed before they were used, because the kernel gave no memory, descriptors or leases.";
        ClosedWithConnection = "lanes_closed_with_connection", "Lanes closed because their connection ended, or because the gateway closed its end of the bell.";
        ClosedPositions = "lanes_closed_positions", "Lanes closed, with their connection, because a ring position was invalid.";
        ClosedHeader = "lanes_closed_header", "Lanes closed, with their connection, because of an invalid frame header.";
        ClosedUnread = "lanes_closed_unread", "Lanes closed, with their connection, because the gateway did not read its replies.";
        ClosedPanic = "lanes_closed_panic", "Lanes closed, with their connection, because the answer to a request panicked.";
    }
}

counters! {
    /// Once per daemon, counted by the thread that receives engines' load reports.
    LoadReportCounter {
        Reports = "load_reports", "Load reports of engines that were used.";
        ReportsOvertaken = "load_reports_overtaken", "Load reports of engines ignored because a newer one had arrived.";
        ReportsUndecodable = "load_reports_undecodable", "Load reports of engines that could not be decoded.";
        ReportsMisframed = "load_reports_misframed", "Messages on a load socket skipped because they were not an 8-byte sequence number and a payload.";
        ReportsUnknownWorker = "load_reports_unknown_worker", "Load reports about a worker that had just been removed.";
        SourcesSilent = "load_sources_silent", "Times an engine stopped reporting its load. Until it reports again, only bookings count.";
        SourcesRefused = "load_sources_refused", "Load sockets that could not be opened.";
        ConnectionsCut = "load_connections_cut", "Connections to load sockets cut because their bytes were not ZMTP or exceeded a limit.";
    }
}

counters! {
    /// Once per daemon: the exchange of load with other routers.
    RouterCounter {
        Batches = "router_batches", "Batches of own load sent to other routers.";
        Heartbeats = "router_heartbeats", "Heartbeats sent to other routers.";
        GaugesSent = "router_gauges_sent", "Gauges in the batches sent. A gauge is what this router's bookings add to one worker.";
        MessageBytes = "router_message_bytes", "Bytes of the batches and heartbeats sent.";
        MessagesReceived = "router_messages_received", "Messages received from other routers, refused ones included.";
        GaugesSet = "router_gauges_set", "Gauges of other routers that changed the load of a worker.";
        GaugesUnknownWorker = "router_gauges_unknown_worker", "Gauges of other routers kept for workers that this router does not know.";
        BindingsHeard = "router_bindings_heard", "Bindings of affinity sessions received from other routers.";
        BindingsDropped = "router_bindings_dropped", "Messages of which bindings were dropped because their router sent too many.";
        SnapshotsAsked = "router_snapshots_asked", "Requests for a snapshot of another router's load.";
        SnapshotsSent = "router_snapshots_sent", "Snapshots of own load sent to routers that asked.";
        SnapshotsRefused = "router_snapshots_refused", "Requests for a snapshot refused: of another fleet or version, for another router, or too soon after the one before.";
        SnapshotsTorn = "router_snapshots_torn", "Snapshots refused because their parts did not add up to their digest.";
        SectionsNotAsked = "router_sections_not_asked", "Parts of snapshots ignored because nothing had asked for them.";
        Joins = "router_joins", "Times the load of another router became known and counted.";
        Gaps = "router_gaps", "Times batches of another router were missing, and its load was taken anew.";
        DigestsDiffer = "router_digests_differ", "Times another router held other gauges than this one had of it, and its load was taken anew.";
        WentBack = "router_went_back", "Times another router said less than before, and its load was taken anew.";
        OtherIncarnations = "router_other_incarnations", "Messages of another run of a router than the one that counts.";
        Recordings = "router_recordings", "Messages of another run that proved to be recordings of old messages.";
        Restarts = "router_restarts", "Restarts of other routers.";
        Silences = "router_silences", "Times another router was silent for routers.silent_ms_max, and its load was dropped.";
        Quarantines = "router_quarantines", "Times the load of another router was dropped and its messages ignored.";
        MessagesStale = "router_messages_stale", "Messages of other routers ignored because their numbers were not above those before.";
        MessagesIgnored = "router_messages_ignored", "Messages ignored because their router is quarantined.";
        MessagesWrongMac = "router_messages_wrong_mac", "Messages refused because they were signed with another secret.";
        MessagesUnreadable = "router_messages_unreadable", "Messages refused because they were not those of a router, or broke a limit.";
        MessagesNotUnderstood = "router_messages_not_understood", "Messages of newer routers ignored because this version does not know their content.";
        OwnNumbers = "router_own_numbers", "Messages ignored because another router has this router's name.";
        NoPlaces = "router_no_places", "Messages ignored because too many routers are heard.";
        MessagesDropped = "router_messages_dropped", "Messages that another router missed because it read too slowly.";
        ConnectionsCut = "router_connections_cut", "Connections with other routers refused or cut: too many, too slow, or bytes that no router sends.";
        LinksLost = "router_links_lost", "Connections to peers that ended.";
    }
}

counters! {
    /// Once per process: the metrics page, on the metrics port and on the HTTP port.
    PageCounter {
        Scrapes = "metrics_scrapes", "Requests for the metrics page.";
        Pages = "metrics_pages", "Metrics pages made. Simultaneous scrapes share one.";
        PagesStale = "metrics_pages_stale", "Times the last metrics page was served again because slow readers held the maximum number of pages.";
        ScrapesCrowded = "metrics_scrapes_crowded", "Requests for the metrics page refused because too many waited, or because slow readers held all pages.";
        ScrapesRefused = "metrics_scrapes_refused", "Requests to the metrics port refused because a web page sent them, or because metrics.hosts does not list their Host.";
    }
}

counters! {
    /// Once per daemon, counted by any thread: the queue of requests that wait for a worker.
    QueueCounter {
        Queued = "queue_queued", "Requests that found every worker busy and were queued.";
        Woken = "queue_woken", "Queued requests answered with a decision or with an error of the decision.";
        FoundByLook = "queue_found_by_look", "Queued requests dispatched by the recheck every 100 ms, because no report announced the free capacity.";
        PutBack = "queue_put_back", "Times a queued request was tried, found every worker busy again and stayed queued.";
        Expired = "queue_expired", "Queued requests given up at their deadline because no worker had become free.";
        Cancelled = "queue_cancelled", "Queued requests dropped because their connection ended.";
        Undelivered = "queue_undelivered", "Decisions for queued requests whose connection had just ended. Their bookings were freed.";
        Drained = "queue_drained", "Queued requests refused because the daemon began to drain.";
        RefusedRequests = "queue_refused_requests", "Requests refused because every worker was busy and policy.queue_requests_max was reached.";
        RefusedMemory = "queue_refused_memory", "Requests refused because every worker was busy and the queue had reached its memory limit.";
        RefusedSets = "queue_refused_sets", "Requests refused because every worker was busy and the queue held too many different sets of workers.";
        RefusedUser = "queue_refused_user", "Requests refused because every worker was busy and their user had reached its share of the queue.";
        RepliesUnread = "queue_replies_unread", "Connections closed because they left too many replies to queued requests unread.";
    }
}

counters! {
    /// Once per daemon, counted by the thread of the remote port.
    RemoteCounter {
        Connections = "remote_connections", "Connections from other hosts opened.";
        RefusedTls = "remote_refused_tls", "Connections from other hosts refused because their peer completed no TLS handshake.";
        RefusedSlow = "remote_refused_slow", "Connections from other hosts refused because TLS handshake and token took too long.";
        RefusedDisplaced = "remote_refused_displaced", "Connections from other hosts closed before their token had come, to make room for newer ones.";
        RefusedFrequent = "remote_refused_frequent", "Connections from other hosts closed at once because their address had begun too many.";
        RefusedStrangers = "remote_refused_strangers", "Connections from other hosts refused because handshakes of strangers had taken their share of a processor.";
        StrangersUs = "remote_strangers_us", "Processor time for handshakes and tokens of strangers, microseconds.";
        RefusedOpening = "remote_refused_opening", "Connections from other hosts refused because their first bytes were no opening, one of another version, or a token of a wrong length.";
        RefusedToken = "remote_refused_token", "Connections from other hosts refused because no principal has their token.";
        RefusedFull = "remote_refused_full", "Connections from other hosts refused because remote.connections_max was reached, or too many were being opened.";
        RefusedShare = "remote_refused_share", "Connections from other hosts refused because their principal had reached its share of the port's connections.";
        RefusedSystem = "remote_refused_system", "Connections from other hosts refused because the kernel gave no descriptors.";
        RefusedDraining = "remote_refused_draining", "Connections from other hosts refused because the daemon drains.";
        Revoked = "remote_revoked", "Connections from other hosts closed because their token is no longer listed.";
        Broken = "remote_broken", "Open connections from other hosts that ended with an error, or whose peer did not read.";
    }
}

counters! {
    /// Once per process of `kvrouted connect`.
    ConnectCounter {
        Connections = "connect_connections", "Connections of local clients carried to the remote daemon.";
        RefusedUser = "connect_refused_user", "Connections of local clients refused because their user is not listed.";
        RefusedFull = "connect_refused_full", "Connections of local clients refused because too many were open.";
        FailedLookup = "connect_failed_lookup", "Connections of local clients closed because the remote daemon's host name has no address.";
        FailedTcp = "connect_failed_tcp", "Connections of local clients closed because no TCP connection to the remote daemon could be made.";
        FailedTls = "connect_failed_tls", "Connections of local clients closed because of the TLS handshake, as when the certificate is not trusted.";
        FailedOpening = "connect_failed_opening", "Connections of local clients closed because the remote peer is no daemon of this protocol, or ended early.";
        FailedSlow = "connect_failed_slow", "Connections of local clients closed because the remote daemon took too long.";
        Refused = "connect_refused", "Connections of local clients closed because the remote daemon refused this host.";
        Broken = "connect_broken", "Carried connections that ended with an error, or whose peer did not read.";
        Reloads = "connect_reloads", "Times token and authorities were read again.";
        ReloadsFailed = "connect_reloads_failed", "Times token or authorities could not be read again. Those read before stay in use.";
    }
}

counters! {
    /// Once per relay.
    RelayCounter {
        Batches = "relay_batches", "Batches published.";
        BatchBytes = "relay_batch_bytes", "Payload bytes of the batches published.";
        Heartbeats = "relay_heartbeats", "Heartbeats published.";
        SendsFailed = "relay_sends_failed", "Batches and heartbeats that reached no subscriber because too many waited for the sending thread.";
        MessagesDropped = "relay_messages_dropped", "Messages dropped for one subscriber because too many bytes waited for it. The subscriber requests a replay.";
        PeersRefused = "relay_peers_refused", "Connections refused because too many were open, in total or from one address.";
        PeersCut = "relay_peers_cut", "Connections cut because of invalid bytes, or because the handshake took too long.";
        PeersStalled = "relay_peers_stalled", "Connections cut because the peer read nothing for too long, or fell too far behind the stream.";
        Generations = "relay_generations", "Times the relay began a new generation of its stream because no batch could express the change.";
        BatchesForgotten = "relay_batches_forgotten", "Batches dropped from the replay buffer because it was full.";
        Questions = "relay_questions", "Replays requested.";
        QuestionsMisframed = "relay_questions_misframed", "Messages to the replay socket ignored because they are no replay request.";
        QuestionsRefused = "relay_questions_refused", "Replay requests not answered because too many answers were running.";
        Answers = "relay_answers", "Replay requests answered to the end.";
        AnswersStalled = "relay_answers_stalled", "Answers to replay requests given up because the peer read nothing for too long, or too slowly while others waited.";
        AnswersUnreachable = "relay_answers_unreachable", "Answers to replay requests given up because the peer had disconnected.";
        AnswersWithoutSnapshot = "relay_answers_without_snapshot", "Answers to replay requests given up because their snapshot failed.";
        Snapshots = "relay_snapshots", "Snapshots completed.";
        SnapshotsFailed = "relay_snapshots_failed", "Snapshots that failed. The log has the reason.";
        NatsMessages = "relay_nats_messages", "Batches and parts of snapshots that the NATS stream has stored.";
        NatsRepeated = "relay_nats_repeated", "Messages sent to the NATS stream again because no answer came, or after a new connection.";
        NatsRefused = "relay_nats_refused", "Messages and questions that JetStream refused. The log has the reason.";
        NatsStarts = "relay_nats_starts", "Beginnings for readers stored in the NATS stream: a snapshot, or the first batch.";
        NatsAnew = "relay_nats_anew", "Times the relay began anew in the NATS stream: refused, too far behind, or what readers begin with was gone.";
        NatsOthers = "relay_nats_others", "Times another relay had stored a beginning for the same worker in the NATS stream.";
        NatsLost = "relay_nats_lost", "Connections to a NATS server that ended.";
    }
}

counters! {
    /// Once per daemon, counted by the threads that write and load snapshots.
    SnapshotCounter {
        SnapshotsWritten = "snapshots_written", "Snapshots of a worker written and put in place.";
        SnapshotsUnchanged = "snapshots_unchanged", "Snapshots not written again because the worker had published nothing since.";
        SnapshotsFailed = "snapshots_failed", "Snapshots that the file system did not let the daemon write, or read in time for an added worker.";
        SnapshotsBrokenOff = "snapshots_broken_off", "Snapshots given up because the dump of the worker was aborted.";
        SnapshotsOvertaken = "snapshots_overtaken", "Snapshots given up because the worker was reset before they were in place.";
        SnapshotsLate = "snapshots_late", "Snapshots that the daemon did not wait for when it stopped.";
        SnapshotsLoaded = "snapshots_loaded", "Snapshots loaded into their workers.";
        SnapshotsExpired = "snapshots_expired", "Snapshots removed because their worker had been gone for snapshot.keep_s.";
        SnapshotsReset = "snapshots_reset", "Snapshots removed by kvrouted reset.";
        SnapshotWrittenBytes = "snapshot_written_bytes", "Bytes of the snapshots written.";
        SnapshotLoadedBytes = "snapshot_loaded_bytes", "Bytes of the snapshots loaded.";
        SnapshotReferencesWritten = "snapshot_references_written", "Block references in the snapshots written.";
        BookingImagesWritten = "booking_images_written", "Images of the bookings written for a restart.";
        BookingImagesFailed = "booking_images_failed", "Images of the bookings that could not be written. The log has the reason.";
        BookingImageBytes = "booking_image_bytes", "Bytes of the images of the bookings.";
        BookingsRestored = "bookings_restored", "Bookings of the run before that went on after the start.";
        BookingsRestoredAbsent = "bookings_restored_absent", "Of these, bookings whose worker was not there yet.";
        BookingsNotRestored = "bookings_not_restored", "Bookings of the run before that ended at the start: too old, of another space than their worker, replaced, or beyond a limit.";
        SessionsRestored = "sessions_restored", "Sessions of gateways that the start took over from the run before.";
        BindingsRestored = "affinity_bindings_restored", "Bindings of affinity sessions that the start took over from the run before.";
    }
}

counters! {
    /// Per worker and serving thread: what decisions show about the worker.
    RouteCounter {
        Decisions = "decisions", "Decisions that chose the worker for a prompt of at least one block.";
        OverlapsFound = "overlaps_found", "Decisions that chose the worker and found blocks of the prompt on it, and repeated prompts found on it again.";
        PromptBlocks = "prompt_blocks", "Blocks of the prompts of the decisions that chose the worker.";
        PromptBlocksHeld = "prompt_blocks_held", "Of these, blocks that the worker held, in any tier.";
        RepeatsMissed = "repeats_missed", "Repeated prompts that had been sent to the worker seconds before and had no block there.";
    }
}

counters! {
    /// Once per daemon, counted by the control thread.
    DaemonCounter {
        ConnectionsRefused = "connections_refused", "Connections refused because too many were open.";
        ConnectionsRefusedUser = "connections_refused_user", "Connections refused because their user had reached its share of connections.";
        ConnectionsRefusedMemory = "connections_refused_memory", "Connections refused because the memory budget was nearly used.";
        DumpsRefusedMemory = "dumps_refused_memory", "Dumps of a worker refused because the memory budget was nearly used.";
        MemoryShedConnections = "memory_shed_connections", "Times the daemon began to refuse new connections because the memory budget was nearly used.";
        MemoryShedDumps = "memory_shed_dumps", "Times it began to refuse dumps.";
        MemoryShedPredictions = "memory_shed_predictions", "Times it dropped all predictions.";
        MemoryShedStores = "memory_shed_stores", "Times it began to refuse new blocks of a worker.";
        ThreadStalls = "threads_stalled", "Times a thread stayed in one round of its loop for process.stalled_ms_max.";
        ConnectionsNotPermitted = "connections_not_permitted", "Connections refused because neither serve.allow_uids nor serve.allow_gids lists the peer.";
        MailboxFull = "mailbox_full", "Connections refused because a serving thread's mailbox was full.";
        AdminConnectionsRefused = "admin_connections_refused", "Connections to the admin socket refused because too many were open.";
        AdminConnectionsNotPermitted = "admin_connections_not_permitted", "Connections to the admin socket refused because neither admin.allow_uids nor admin.allow_gids lists the peer.";
        AdminConnectionsOverdue = "admin_connections_overdue", "Connections to the admin socket closed because hello, the rest of a frame, or room for a reply did not come in time.";
        BookingsExpiredAge = "bookings_expired_age", "Bookings dropped because they reached booking.age_s_max.";
        WorkersAdded = "workers_added", "Workers added while the daemon ran.";
        WorkersRemoved = "workers_removed", "Workers removed while the daemon ran.";
        WorkersChanged = "workers_changed", "Workers whose record changed while the daemon ran.";
        WorkersEmptied = "workers_emptied", "Workers whose blocks were dropped because their events now come from another endpoint.";
        WorkersUnheard = "workers_unheard", "Workers added or changed whose events cannot be received.";
        WorkersRefusedConflict = "workers_refused_conflict", "Workers of a source refused because another source names the same worker or endpoint.";
        WorkersRefusedFull = "workers_refused_full", "Workers refused because the fleet is full.";
        WorkersRefusedRequest = "workers_refused_request", "Requests to add, change or remove a worker that were refused.";
        DiscoveryFilesUnusable = "discovery_files_unusable", "Times a file of workers could not be read or had errors. Its last valid content stays in force.";
        DiscoveryFilesRead = "discovery_files_read", "Times a changed file of workers was read.";
        DiscoveryFilesGone = "discovery_files_gone", "Files of workers that disappeared, and whose workers were removed.";
        ServerLooksFailed = "server_looks_failed", "Checks of an engine named by its URL that got no answer.";
        ServerInfoFailed = "server_info_failed", "Requests to an engine named by its URL that did not yield its event endpoints.";
        ConfigReloads = "config_reloads", "Times the configuration was reloaded.";
        ConfigReloadsRefused = "config_reloads_refused", "Times a reload of the configuration failed.";
        PoliciesReplaced = "policies_replaced", "Times the policies were replaced.";
        BookingsEndedWorkerRemoved = "bookings_ended_worker_removed", "Bookings dropped because their worker was removed.";
        BookingsExpiredSession = "bookings_expired_session", "Bookings dropped because their session had no connection for booking.session_grace_s.";
        TakeoversRefused = "takeovers_refused", "Daemons that wanted to take over from this one and were refused: their user, version or spaces.";
        TakeoversFailed = "takeovers_failed", "Takeovers by another daemon that failed after it was admitted. This one went on.";
        TakeoverPauses = "takeover_pauses", "Times that no daemon decided while another one took up the bookings.";
    }
}

counters! {
    /// Once per daemon, counted by the predictor.
    PredictorCounter {
        Bookings = "predicted_bookings", "Bookings from which blocks were predicted.";
        BlocksPredicted = "predicted_blocks_added", "Blocks newly predicted for a worker.";
        BlocksRenewed = "predicted_blocks_renewed", "Blocks booked again that were already predicted.";
        BlocksExpired = "predicted_blocks_expired", "Predicted blocks dropped because they were not booked again within approximate_ttl_s.";
        BlocksEvicted = "predicted_blocks_evicted", "Predicted blocks dropped because their worker had reached its limit.";
        BlocksEvictedMemory = "predicted_blocks_evicted_memory", "Predicted blocks dropped because the space's predictions had reached their memory limit.";
        BlocksForgotten = "predicted_blocks_forgotten", "Predicted blocks dropped because their worker went down, was removed or now publishes events.";
        BookingsOfOthers = "predicted_bookings_of_others", "Bookings that arrived after predictions for their worker had ended.";
        BookingsMemoryBound = "predicted_bookings_memory_bound", "Bookings whose new blocks exceeded the memory limit of the space's predictions.";
        BookingsShed = "predicted_bookings_shed", "Bookings from which nothing was predicted because the memory budget was nearly used.";
        BookingsRefused = "predicted_bookings_refused", "Bookings whose new blocks the index of predictions refused for another reason.";
        WorkersNotAdmitted = "predicted_workers_not_admitted", "Workers without predictions because the index of predictions has no room for more workers.";
    }
}

/// One thread's counters of one list. Aligned so that two threads' sets share no cache line.
#[derive(Debug)]
#[repr(align(128))]
pub struct CounterSet<L: CounterName> {
    values: Box<[AtomicU64]>,
    list: std::marker::PhantomData<fn() -> L>,
}

/// Adds to a number that no other thread writes. An atomic addition would take as long as twenty of these.
#[inline]
fn add_alone(value: &AtomicU64, n: u64) {
    // Relaxed: a count orders nothing.
    value.store(value.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl<L: CounterName> Default for CounterSet<L> {
    fn default() -> Self {
        Self { values: L::ALL.iter().map(|_| AtomicU64::new(0)).collect(), list: std::marker::PhantomData }
    }
}

impl<L: CounterName> CounterSet<L> {
    /// Adds `n`. Only the thread that owns the set may call this, if its list is of [one writer](CounterName::ONE_WRITER).
    #[inline]
    pub fn add(&self, counter: L, n: u64) {
        let value = &self.values[counter.index()];
        if L::ONE_WRITER {
            add_alone(value, n);
        } else if n > 0 {
            // Relaxed: a count orders nothing. Not for 0: an atomic addition waits for every store before it.
            value.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Adds 1 to a counter.
    pub fn bump(&self, counter: L) {
        self.add(counter, 1);
    }

    /// The current value of a counter.
    #[must_use]
    pub fn get(&self, counter: L) -> u64 {
        // Relaxed: see `add`.
        self.values[counter.index()].load(Ordering::Relaxed)
    }
}

/// One thread's counters of one list for every worker, by place in the fleet table. A worker that takes over a place
/// begins at 0.
#[derive(Debug)]
#[repr(align(128))]
pub struct CounterTable<L: CounterName> {
    values: Box<[AtomicU64]>,
    /// The [`WorkerIndex`] whose values stand at each place.
    owners: Box<[AtomicU32]>,
    list: std::marker::PhantomData<fn() -> L>,
}

impl<L: CounterName> CounterTable<L> {
    /// A table for up to `workers` places.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        let values = (0..workers * L::ALL.len()).map(|_| AtomicU64::new(0)).collect();
        // The index of a place's first worker is the place itself.
        let owners = (0..workers as u32).map(AtomicU32::new).collect();
        Self { values, owners, list: std::marker::PhantomData }
    }

    fn values(&self, worker: WorkerIndex) -> &[AtomicU64] {
        &self.values[worker.place() * L::ALL.len()..][..L::ALL.len()]
    }

    /// Adds 1. As [`CounterTable::add`].
    pub fn bump(&self, worker: WorkerIndex, counter: L) {
        self.add(worker, counter, 1);
    }

    /// Adds to a counter. Only the thread that owns the table may call this: nothing is locked. A worker without a place in
    /// the table is not counted, nor is a worker whose place another has taken over.
    pub fn add(&self, worker: WorkerIndex, counter: L, number: u64) {
        self.add_each(worker, [(counter, number)]);
    }

    /// Adds to several counters of a worker, as [`CounterTable::add`].
    #[inline]
    pub fn add_each<const N: usize>(&self, worker: WorkerIndex, numbers: [(L, u64); N]) {
        let Some(owner) = self.owners.get(worker.place()) else { return };
        // Relaxed: only this thread writes it.
        let owned_by = WorkerIndex(owner.load(Ordering::Relaxed));
        if owned_by.generation() > worker.generation() {
            return;
        }
        let values = self.values(worker);
        if owned_by != worker {
            // Relaxed: the Release store of the owner publishes them.
            values.iter().for_each(|value| value.store(0, Ordering::Relaxed));
            // Release: pairs with the Acquire in `get`, which then sees no value of the previous worker.
            owner.store(worker.0, Ordering::Release);
        }
        numbers.into_iter().for_each(|(counter, number)| add_alone(&values[counter.index()], number));
    }

    /// The current value. 0 for a worker without a place in the table, and for a worker that is not the latest one
    /// counted at its place.
    #[must_use]
    pub fn get(&self, worker: WorkerIndex, counter: L) -> u64 {
        // Acquire: pairs with the Release in `add`.
        let is_owner = self.owners.get(worker.place()).is_some_and(|owner| owner.load(Ordering::Acquire) == worker.0);
        // Relaxed: see `add`. While a place changes hands, this may return the next worker's first counts.
        if is_owner { self.values(worker)[counter.index()].load(Ordering::Relaxed) } else { 0 }
    }
}

/// Upper bounds of [`Latency`]'s buckets: 2^8 ns (256 ns) doubling to 2^26 ns (67 ms), then the rest.
const LATENCY_BUCKET_BITS: std::ops::RangeInclusive<u32> = 8..=26;

/// Buckets of [`Latency`].
pub(crate) const LATENCY_BUCKETS: usize = (*LATENCY_BUCKET_BITS.end() - *LATENCY_BUCKET_BITS.start() + 2) as usize;

/// In a status page, the number of decisions in a bucket of [`Latency`]: its upper bound in nanoseconds follows.
pub const LATENCY_COUNTER_PREFIX: &str = "decision_ns_max_";

/// A histogram of durations in buckets that double. Each thread has its own; a scrape merges them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Latency {
    buckets: [AtomicU64; LATENCY_BUCKETS],
    sum_ns: AtomicU64,
}

impl Latency {
    /// The place of a duration's bucket.
    #[inline]
    pub(crate) fn bucket_of(ns: u64) -> usize {
        let bits = 64 - ns.saturating_sub(1).leading_zeros();
        let bucket = bits.clamp(*LATENCY_BUCKET_BITS.start(), *LATENCY_BUCKET_BITS.end() + 1);
        (bucket - LATENCY_BUCKET_BITS.start()) as usize
    }

    /// Counts one duration, in nanoseconds. The caller owns the histogram or holds a lock: nothing is locked here.
    pub fn record(&self, ns: u64) {
        add_alone(&self.buckets[Self::bucket_of(ns)], 1);
        add_alone(&self.sum_ns, ns);
    }

    /// The number of durations in each bucket, by its upper bound in nanoseconds; that of the last bucket is the largest number.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let bounds = LATENCY_BUCKET_BITS.map(|bits| 1_u64 << bits).chain([u64::MAX]);
        bounds.zip(self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)))
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
    fn a_list_that_several_threads_count_loses_no_count() {
        const EACH: u64 = 20_000;
        const { assert!(!QueueCounter::ONE_WRITER && CoreCounter::ONE_WRITER) };
        let counters = CounterSet::<QueueCounter>::default();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..EACH).for_each(|_| counters.bump(QueueCounter::Queued)));
            }
        });
        assert_eq!(counters.get(QueueCounter::Queued), 2 * EACH);
    }

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
        check::<RouterCounter>();
        check::<TraceCounter>();
    }

    #[test]
    fn a_table_counts_per_worker_and_ignores_workers_without_a_place() {
        let table = CounterTable::new(2);
        table.bump(WorkerIndex(1), RouteCounter::RepeatsMissed);
        table.bump(WorkerIndex(1), RouteCounter::RepeatsMissed);
        table.bump(WorkerIndex(2), RouteCounter::Decisions);
        assert_eq!(table.get(WorkerIndex(1), RouteCounter::RepeatsMissed), 2);
        assert_eq!(table.get(WorkerIndex(0), RouteCounter::RepeatsMissed), 0);
        assert_eq!(table.get(WorkerIndex(2), RouteCounter::Decisions), 0);
    }

    #[test]
    fn a_worker_that_takes_over_a_place_begins_at_zero_and_its_predecessor_is_no_longer_counted() {
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
