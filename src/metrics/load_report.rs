//! What is counted of the loads that engines report.

use super::CounterName;

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
