//! What is counted of requests that wait for a worker.

use super::CounterName;

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
