//! What is counted of the HTTP port.

use super::CounterName;

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
