//! What can be wrong with a fleet and its daemon, as an operator is to hear it.
//!
//! A finding is named by a [`TrustReason`](crate::trust::TrustReason) or by a [`Symptom`]: something that no batch by
//! itself shows. When one is found is for `daemon::doctor` and `cli::doctor`; this file is only the vocabulary.

use crate::ids::Worker;
use crate::reasons::reasons;

/// How much harm a finding does. The order is the order of harm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Harm {
    /// Good to know; nothing has to be done.
    #[default]
    Note = 0,
    /// Decisions are worse than they could be.
    Warning = 1,
    /// A worker, a gateway or the daemon does not do what it is there for.
    Severe = 2,
}

impl Harm {
    /// The name used in JSON and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Severe => "severe",
        }
    }

    /// The harm with this number; a number of a newer peer counts as the worst.
    #[must_use]
    pub const fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Note,
            1 => Self::Warning,
            _ => Self::Severe,
        }
    }
}

/// Something that is wrong, with what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// The reason's or symptom's name.
    pub name: String,
    /// How bad it is.
    pub harm: Harm,
    /// Since when it is known, milliseconds of Unix time.
    pub since_unix_ms: u64,
    /// The workers it is about, or the first of them; none = the daemon itself.
    pub workers: Vec<Worker>,
    /// How many workers it is about.
    pub workers_total: u32,
    /// What was found.
    pub what: String,
    /// What it costs.
    pub why: String,
    /// What to do: a command, or a line of the configuration.
    pub remedy: String,
}

reasons! {
    /// What is found by looking at more than one batch. Names are never used for something else. In the order of the
    /// table in `schemas/README.md`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    Symptom {
        /// How much harm it does.
        harm: Harm;
        /// What it costs.
        why: &'static str;
        /// What an operator can do about it.
        remedy: &'static str;
    }
    /// The worker's publisher cannot be reached.
    WorkerDown = "worker_down", Harm::Severe, "the worker gets no requests while others can", "start the engine, or correct `endpoint` of the [[worker]]; from this host: nc -zv HOST PORT";
    /// What answers at the worker's endpoint is no event publisher.
    NoPublisher = "no_publisher", Harm::Severe, "nothing is known of the worker's cache", "set `endpoint` of the [[worker]] to the `endpoint` of the engine's --kv-events-config, not to its replay or HTTP port";
    /// A message of the worker's publisher broke the bound on bytes or parts, and its connection was cut.
    MessageUnbounded = "message_unbounded", Harm::Severe, "the worker's events are lost each time, and it is emptied or recovered", "see what listens at the `endpoint` and `replay` of the [[worker]] (ss -tlnp): an engine sends three or four parts of at most 64 MiB; if it is the engine, report it with a capture";
    /// The worker's events endpoint could not be opened.
    EventsRefused = "events_refused", Harm::Severe, "nothing is known of the worker's cache", "read the daemon's log for the cause; if open files are short, raise the limit (ulimit -n, LimitNOFILE=) and restart";
    /// Requests are sent to a connected worker that has never published a batch.
    EventsOff = "events_off", Harm::Severe, "the worker's cache is never counted, and nobody notices", "start the engine with KV events: vLLM --enable-prefix-caching --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", ...}', SGLang --kv-events-config '{\"publisher\": \"zmq\", ...}'";
    /// Requests are sent to a connected worker of whose batches none passed its topic.
    TopicFiltersAll = "topic_filters_all", Harm::Severe, "the worker's cache is never counted, and nobody notices", "set topic = \"\" in the [[worker]], or the `topic` of the engine's --kv-events-config; if that changes nothing, its KV events are off";
    /// Prompts that were sent to the worker before are never found in what it says it holds.
    ForeignHashes = "foreign_hashes", Harm::Severe, "no prompt ever matches: every decision is by load alone, and every cache hit is by chance", "compare the token ids that the gateway sends with the engine's (kvrouted query --tokens-file), then LoRA names, cache salts and, where a gateway or relay sends local hashes, its block size and seed";
    /// Events wait because the index cannot free what it gave up.
    EventsChoked = "events_choked", Harm::Severe, "what is known of the worker is older every moment", "find the core thread that stands still (a stopped or starved process: ps -L), or restart the daemon";
    /// The publisher restarts, or its connection breaks, again and again.
    RestartLoop = "restart_loop", Harm::Severe, "the worker is emptied, or recovered, each time, so that nothing of it is ever counted for long", "read the engine's log for why it restarts; if it does not, two publishers share the worker's endpoint: give each its own";
    /// Gateways send local hashes of another block size or window than the space's, which are refused.
    GatewayScheme = "gateway_scheme", Harm::Severe, "those requests get an error instead of a decision", "hash by the scheme of the hello reply, or send tokens";
    /// Decisions are made with nobody eligible, or among workers that are all down.
    NobodyEligible = "nobody_eligible", Harm::Severe, "requests go nowhere, or to workers that may be gone", "kvrouted status says which worker is down and why";
    /// Workers that a source names are not taken, or what it says cannot be used.
    SourceUnusable = "source_unusable", Harm::Severe, "they get no requests, or what was said before holds", "correct the file or the URL, and name every worker and endpoint in one place only (kvrouted worker list)";
    /// Connections of gateways are refused.
    ConnectionsRefused = "connections_refused", Harm::Severe, "those gateways route without this daemon", "let gateways share connections, or raise `cores` in [serve]";
    /// Batches or root chains that were seen before come far more often than a reconnect explains.
    DuplicateStorm = "duplicate_storm", Harm::Warning, "the same is read again and again, and what the worker holds stays in doubt", "see that a single route leads from the publisher to `endpoint`: no relay, proxy or second publisher beside it";
    /// Decisions are made before the space's block size is known.
    SchemeUnknown = "scheme_unknown", Harm::Warning, "decisions of the space are by load alone", "set block_size in the [[space]] (kvrouted serve --block-size) to the engine's: vLLM --block-size, SGLang --page-size";
    /// Messages of the worker wait behind a dump, load or recovery and are near their bound.
    MessagesWait = "messages_wait", Harm::Warning, "what is known of the worker is older every moment; beyond the bound the dump or load is given up, and a recovery drops the oldest", "give whoever receives the dump more room, or take it when the fleet is quieter; in a recovery, see why the engine's replay socket is slow";
    /// The ingest thread of the worker panicked lately; its shard of the index was built anew.
    IngestPanicked = "ingest_panicked", Harm::Severe, "the workers of the shard were not believed until their events were heard again, and what they published before counts only where they replay it", "report the panic that the log has, with the lines before it";
    /// The worker's replay endpoint does not answer.
    ReplaySilent = "replay_silent", Harm::Warning, "events that get lost cannot be fetched again, and the worker is emptied then", "set `replay` of the [[worker]] to the `replay_endpoint` of the engine's --kv-events-config, or leave it out";
    /// Lost batches could not be fetched again, more than once.
    RecoveryFails = "recovery_fails", Harm::Warning, "the worker is emptied each time", "raise `buffer_steps` in the engine's --kv-events-config, so that it still has them, and `hwm`, so that fewer are lost";
    /// Bookings are not predicted from because too many wait for the predictor.
    PredictionsDropped = "predictions_dropped", Harm::Warning, "workers without events are taken to hold less than they do", "give the daemon more processors, or take `approximate = true` out of the busiest [[space]]";
    /// Bookings end by their age instead of by their gateway.
    BookingsLeak = "bookings_leak", Harm::Warning, "workers look busier than they are until the booking ends", "free each booking when its request has ended, however it ended; raise booking.age_s_max if requests take longer";
    /// Snapshots could not be written.
    SnapshotsFail = "snapshots_fail", Harm::Warning, "the next start of the daemon finds older snapshots, or none", "see that `dir` in [snapshot] is on a disk with room that the daemon may write to; the log has the cause";
    /// The daemon has few open files left.
    OpenFilesLow = "open_files_low", Harm::Warning, "gateways and publishers will be refused", "raise the limit (ulimit -n, LimitNOFILE= of the unit) and restart the daemon";
    /// The host's clock was set while the daemon ran.
    ClockStepped = "clock_stepped", Harm::Note, "times before and after do not compare; decisions and bookings go by another clock", "none needed; see that the clock is slewed, not set (chronyc tracking)";
    /// Changes of the configuration wait for the next start.
    RestartPending = "restart_pending", Harm::Note, "the daemon runs by what those fields said before", "restart it when that suits, or take the changes back and send SIGHUP; `kvrouted serve --example-config` marks what is reloaded";
    /// No daemon answers on its socket.
    SocketUnreachable = "socket_unreachable", Harm::Severe, "gateways on this host route without it", "start it (kvrouted serve), or name its socket with --socket";
    /// The daemon's socket may not be used by this user.
    SocketDenied = "socket_denied", Harm::Severe, "a gateway of the same user and group is refused too", "run as a user of the socket's group, or set socket_mode in [serve]";
    /// The daemon's administration socket does not answer.
    AdminUnreachable = "admin_unreachable", Harm::Severe, "nothing can be asked about its workers", "run as the user of the daemon, or name the socket with --admin-socket";
    /// Every user of the host may use the daemon's socket.
    SocketOpen = "socket_open", Harm::Warning, "anybody on the host can book workers and see which prompts are cached", "set socket_mode = \"660\" in [serve]";
    /// The metrics port does not serve the daemon's metrics.
    MetricsUnreachable = "metrics_unreachable", Harm::Warning, "nobody is alarmed when something goes wrong", "see what else listens on the port (ss -ltnp); choose another `port` in [metrics]";
    /// The daemon and this command are of different releases.
    VersionDiffers = "version_differs", Harm::Note, "findings may be missing or worded otherwise", "restart the daemon with the release that is installed";
    /// The configuration file cannot be used.
    ConfigInvalid = "config_invalid", Harm::Severe, "the daemon would not start again", "correct the line; kvrouted serve --config FILE --check says whether all is well";
    /// The daemon does not run on what the configuration file says.
    ConfigDiffers = "config_differs", Harm::Warning, "what was meant to change has not", "where only workers differ, have it read the file again (SIGHUP); else restart it with this file";
    /// The configuration file has more publishers than open files allow.
    OpenFilesShort = "open_files_short", Harm::Warning, "the publishers beyond would be refused", "raise the hard limit (ulimit -Hn, LimitNOFILE= of the unit)";
}

impl Symptom {
    /// A finding of it, said in general terms.
    #[must_use]
    pub fn finding(self) -> Finding {
        Finding {
            name: self.name().to_owned(),
            harm: self.harm(),
            what: self.meaning().to_owned(),
            why: self.why().to_owned(),
            remedy: self.remedy().to_owned(),
            ..Finding::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::TrustReason;

    #[test]
    fn names_are_unique_and_everything_is_said() {
        let mut names: Vec<_> = Symptom::ALL.iter().map(|symptom| symptom.name()).collect();
        names.extend(TrustReason::ALL.iter().map(|reason| reason.name()));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a symptom is named like another or like a reason");
        for finding in Symptom::ALL.iter().map(|symptom| symptom.finding()) {
            assert!(
                finding.what.ends_with('.') && !finding.why.is_empty() && !finding.remedy.is_empty(),
                "{finding:?}"
            );
        }
        for reason in TrustReason::ALL {
            assert!(reason.meaning().ends_with('.') && !reason.remedy().is_empty(), "{reason:?}");
        }
    }

    #[test]
    fn harm_is_ordered_and_a_newer_one_counts_as_the_worst() {
        assert!(Harm::Note < Harm::Warning && Harm::Warning < Harm::Severe);
        for harm in [Harm::Note, Harm::Warning, Harm::Severe] {
            assert_eq!(Harm::from_u8(harm as u8), harm);
        }
        assert_eq!(Harm::from_u8(9), Harm::Severe);
    }
}
