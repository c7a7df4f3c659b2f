//! What a serving core counts.

use super::CounterName;

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
