//! Findings: what can be wrong with a fleet or its daemon, with its harm and a remedy.
//!
//! The name of a finding is that of a [`TrustReason`](crate::trust::TrustReason) or of a [`Symptom`], which no single
//! batch shows. This file only defines them; `daemon::doctor` and `cli::doctor` decide when to raise one.

use crate::ids::Worker;
use crate::reasons::reasons;

/// How much harm a finding does, least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Harm {
    /// Information; nothing needs to be done.
    #[default]
    Note = 0,
    /// Decisions are worse than they could be.
    Warning = 1,
    /// A worker, a gateway or the daemon does not do its work.
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

    /// The harm with this number on the wire. A newer peer's unknown number counts as [`Harm::Severe`].
    #[must_use]
    pub const fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Note,
            1 => Self::Warning,
            _ => Self::Severe,
        }
    }
}

/// Something wrong, and what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// The reason's or symptom's name.
    pub name: String,
    /// How much harm it does.
    pub harm: Harm,
    /// When it was first found, milliseconds of Unix time.
    pub since_unix_ms: u64,
    /// The affected workers, or the first of them; empty = the daemon itself.
    pub workers: Vec<Worker>,
    /// The number of affected workers.
    pub workers_total: u32,
    /// What is wrong.
    pub what: String,
    /// What it costs.
    pub why: String,
    /// What to do: a command, or a line of the configuration.
    pub remedy: String,
}

reasons! {
    /// Findings that are no trust reason. No name gets another meaning. In the order of the table in
    /// `schemas/README.md`.
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
    WorkerDown = "worker_down", Harm::Severe, "the worker gets no requests while others can take them", "start the engine, or correct `endpoint` of the [[worker]]; test from this host: nc -zv HOST PORT";
    /// The peer at the worker's endpoint is no event publisher.
    NoPublisher = "no_publisher", Harm::Severe, "nothing is known about the worker's cache", "set `endpoint` of the [[worker]] to the `endpoint` of the engine's --kv-events-config, not to its replay or HTTP port";
    /// A message of the worker's publisher exceeded the limit on bytes or parts, and its connection was cut.
    MessageUnbounded = "message_unbounded", Harm::Severe, "the worker's events are lost each time, and its blocks are dropped or recovered", "check what listens at the `endpoint` and `replay` of the [[worker]] (ss -tlnp): an engine sends three or four parts of at most 64 MiB; if it is the engine, report it with a capture";
    /// The daemon could not open a connection to the worker's events.
    EventsRefused = "events_refused", Harm::Severe, "nothing is known about the worker's cache", "find the cause in the daemon's log; if open files are short, raise the limit (ulimit -n, LimitNOFILE=) and restart the daemon";
    /// The worker is connected and gets requests, but has never published a batch.
    EventsOff = "events_off", Harm::Severe, "the worker's cached blocks never count, and no reply shows it", "start the engine with KV events: vLLM --enable-prefix-caching --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", ...}', SGLang --kv-events-config '{\"publisher\": \"zmq\", ...}'";
    /// The worker is connected and gets requests, but none of its batches has the configured topic.
    TopicFiltersAll = "topic_filters_all", Harm::Severe, "the worker's cached blocks never count, and no reply shows it", "set topic = \"\" in the [[worker]], or set it to the `topic` of the engine's --kv-events-config; if that changes nothing, the engine's KV events are off";
    /// Repeated prompts are never found among the worker's blocks, although the worker ran them before.
    ForeignHashes = "foreign_hashes", Harm::Severe, "no prompt ever matches: every decision is by load alone, and every cache hit is by chance", "compare the token ids that the gateway sends with the engine's (kvrouted query --tokens-file), then LoRA names and cache salts; if a gateway or relay sends local hashes, also its block size and seed";
    /// Events wait because the index cannot free the memory it gave up.
    EventsChoked = "events_choked", Harm::Severe, "the daemon's view of the worker grows older", "find the serving thread that stands still (a stopped or starved process: ps -L), or restart the daemon";
    /// The publisher restarts, or its connection breaks, again and again.
    RestartLoop = "restart_loop", Harm::Severe, "the worker's blocks are dropped or recovered each time, so they never count for long", "find in the engine's log why it restarts; if it does not, two publishers share the worker's endpoint: give each its own";
    /// Gateways send local hashes of another block size or window than the space's, and get an error.
    GatewayScheme = "gateway_scheme", Harm::Severe, "those requests get an error instead of a decision", "hash with the scheme of the hello reply, or send tokens";
    /// Decisions find no eligible worker, or only workers that are down.
    NobodyEligible = "nobody_eligible", Harm::Severe, "requests go nowhere, or to workers that may be gone", "kvrouted status shows which worker is down and why";
    /// A source names workers that were refused, or its content cannot be used.
    SourceUnusable = "source_unusable", Harm::Severe, "those workers get no requests, or the source's earlier content stays in force", "correct the file or the URL, and name every worker and endpoint in one source only (kvrouted worker list)";
    /// The daemon refuses connections of gateways.
    ConnectionsRefused = "connections_refused", Harm::Severe, "those gateways route without this daemon", "let gateways share connections, or raise `cores` in [serve]";
    /// The remote port refuses callers.
    RemoteRefused = "remote_refused", Harm::Warning, "the gateways behind them route without this daemon", "the log names each peer and why: give its kvrouted connect a token of principals_file, let its clients share connections, or raise connections_max in [remote]; let hosts that should not call no longer reach the port";
    /// Far more batches or root chains arrive twice than a reconnect explains.
    DuplicateStorm = "duplicate_storm", Harm::Warning, "the daemon reads everything again and again, and the worker's blocks stay in doubt", "make sure that only one path leads from the publisher to `endpoint`: no relay, proxy or second publisher beside it";
    /// Decisions are made before the space's block size is known.
    SchemeUnknown = "scheme_unknown", Harm::Warning, "decisions of the space are by load alone", "set block_size in the [[space]] (kvrouted serve --block-size) to the engine's: vLLM --block-size, SGLang --page-size";
    /// Messages of the worker wait for the end of a dump, load or recovery, and are near their limit.
    MessagesWait = "messages_wait", Harm::Warning, "the daemon's view of the worker grows older; at the limit a dump or load is aborted, and a recovery drops the oldest messages", "give the receiver of the dump more capacity, or take the dump when the fleet is quieter; in a recovery, find out why the engine's replay socket is slow";
    /// The worker's ingest thread panicked recently; its shard of the index was rebuilt.
    IngestPanicked = "ingest_panicked", Harm::Severe, "the shard's workers were not trusted until new events arrived, and their earlier blocks count only if they can replay them", "report the panic from the log, with the lines before it";
    /// The worker's replay endpoint does not answer.
    ReplaySilent = "replay_silent", Harm::Warning, "lost events cannot be fetched again, and then the worker's blocks are dropped", "set `replay` of the [[worker]] to the `replay_endpoint` of the engine's --kv-events-config, or remove it; for a worker over NATS, see whether its relay runs and whether the server has JetStream and lets this daemon read the stream";
    /// Lost batches could not be fetched again, more than once.
    RecoveryFails = "recovery_fails", Harm::Warning, "the worker's blocks are dropped each time", "in the engine's --kv-events-config raise `buffer_steps`, so that it still has the batches, and `hwm`, so that fewer are lost";
    /// The engine's own snapshots do not come, or cannot be used.
    EngineSnapshotsFail = "engine_snapshots_fail", Harm::Warning, "the worker's blocks that the daemon missed do not count, as its other findings say", "the log, and the reasons of kvrouted_worker_transfers_aborted_total, say why: check `engine_snapshots` and `snapshot_endpoint` of the [[worker]] and the engine's snapshot settings; set engine_snapshots = \"off\" for an engine that follows another proposal";
    /// Too many bookings wait for the predictor, and some get no predictions.
    PredictionsDropped = "predictions_dropped", Harm::Warning, "workers without events seem to hold less than they do", "give the daemon more processors, or remove `approximate = true` from the busiest [[space]]";
    /// Bookings end by their age instead of being freed by their gateway.
    BookingsLeak = "bookings_leak", Harm::Warning, "workers look busier than they are until those bookings end", "free each booking when its request ends, however it ends; if requests take longer, raise booking.age_s_max";
    /// Mode latency decides, and gateways free bookings without reporting first tokens.
    FirstTokensMissing = "first_tokens_missing", Harm::Warning, "a prompt counts as work of its worker until its booking ends, and the daemon learns no prefill times", "report prefill_complete at the first token of each request, also of one that is not streamed";
    /// Times to the first token differ from the predicted ones.
    TtftMispredicted = "ttft_mispredicted", Harm::Warning, "mode latency weighs workers by wrong times", "report prefill_complete at the first token of each request; give workers of different speed an `engine_class` of their own in [[worker]]; without either, use mode kv";
    /// Snapshots could not be written, or not be read for a worker that was added.
    SnapshotsFail = "snapshots_fail", Harm::Warning, "added workers begin empty, and the next start of the daemon finds older snapshots, or none", "check that `dir` in [snapshot] is on a disk that responds, with free space and writable by the daemon; the log has the cause";
    /// The collector does not take the daemon's spans.
    TracesUndelivered = "traces_undelivered", Harm::Warning, "traces of requests lack the daemon's spans; requests are answered as always", "start the collector, or correct `endpoint` of [traces]: the log has what it answered, and from this host nc -zv HOST PORT tests the port";
    /// Too many traced requests, or their spans, wait, and some get no span.
    TracesLost = "traces_lost", Harm::Warning, "traces of some requests lack the daemon's spans; requests are answered as always", "lower `sample_ratio` of [traces], or the share that callers sample; or raise `queue_max` of [traces]";
    /// The daemon has few open files left.
    OpenFilesLow = "open_files_low", Harm::Warning, "it will refuse gateways and publishers", "raise the limit (ulimit -n, LimitNOFILE= of the unit) and restart the daemon";
    /// The memory budget is nearly used, and the daemon refuses things that take more.
    MemoryShed = "memory_shed", Harm::Severe, "gateways, dumps or new blocks are refused until there is memory again", "raise memory_bytes_max in [process] and the memory of the machine or container, or lower blocks_max of the largest workers; kvrouted status shows what each part takes";
    /// A thread that decides, receives events or administers stands still.
    ThreadStalled = "thread_stalled", Harm::Severe, "requests or events wait for that thread, and the daemon is not ready", "find out what it waits for (its activity is named here; ps -L shows whether it runs): a starved processor, a blocked log, or a fault; report a fault with the log around it";
    /// A thread stood still recently, or one that only assists stands still now.
    ThreadSlow = "thread_slow", Harm::Warning, "requests or events waited for a while, or snapshots, the journal or metrics wait now", "give the daemon more processors, and check the disks of [snapshot] and [journal]; the metric kvrouted_thread_longest_stall_seconds names the thread";
    /// The sandbox refused system calls of the daemon.
    SandboxRefused = "sandbox_refused", Harm::Severe, "what needs those calls fails; or an attacker tries them", "if the log shows no attack, report the call and the thread with the versions of kernel and C library; until then set `mode` in [sandbox] to \"report\" and restart the daemon";
    /// A part of the sandbox is not in force.
    SandboxPartial = "sandbox_partial", Harm::Warning, "an attacker who can run code in the daemon may do more", "find the missing part in the log of the start; use a kernel that has it, or let the container permit it";
    /// A file that the sandbox permits was replaced.
    SandboxFileReplaced = "sandbox_file_replaced", Harm::Warning, "the daemon can no longer read the file", "restart the daemon; a file in a folder of its own can be replaced at any time";
    /// Messages of another router are refused.
    RouterRefused = "router_refused", Harm::Severe, "what that router books does not count here, so that both may choose the same worker", "give all routers of a fleet the same secret, the same [[space]] tables and versions that understand each other";
    /// Another router has this router's name.
    RouterNameShared = "router_name_shared", Harm::Severe, "the two ignore each other, and others take them for one that restarts again and again", "give each router a `name` of its own in [routers]";
    /// A configured peer is not heard.
    RouterMissing = "router_missing", Harm::Warning, "what that router books does not count here", "start that router, or correct its address in `peers`, or the server's in `nats`, of [routers]; test from this host: nc -zv HOST PORT";
    /// A router listens to this one, which does not listen to it.
    RouterUnlisted = "router_unlisted", Harm::Warning, "what that router books does not count here", "add its address to `peers` of [routers], or correct `peers_file` or `peers_dns`: the list may be the same at all routers";
    /// A router or a stranger signs its messages with another secret.
    RouterSecret = "router_secret", Harm::Warning, "its messages are ignored", "give all routers the same secret file, or find out who connects to the `listen` address of [routers]";
    /// The load of another router was not as it had told, and was taken anew.
    RouterDiffers = "router_differs", Harm::Warning, "for a moment this router counted another load than that router had", "if it comes again, report the versions of both routers";
    /// More routers are heard than this one has places for.
    RoutersTooMany = "routers_too_many", Harm::Warning, "what some of them book does not count here", "split the fleet, or remove addresses from `peers` of [routers]";
    /// The load of other routers is not known yet.
    RoutersJoining = "routers_joining", Harm::Note, "the daemon is not ready until it is, or for join_ms_max at most", "nothing to do, if it goes away; else see the peers in kvrouted status";
    /// The host's clock was set while the daemon ran.
    ClockStepped = "clock_stepped", Harm::Note, "times before and after cannot be compared; decisions and bookings use another clock", "nothing to do; make sure that the clock is slewed, not set (chronyc tracking)";
    /// The daemon's processors belong to several NUMA nodes.
    NumaNodes = "numa_nodes", Harm::Note, "threads read parts of the index from the memory of another node, which takes longer", "give the daemon the processors and the memory of one node: CPUAffinity=, NUMAPolicy=bind and NUMAMask= of the unit, or numactl --cpunodebind=0 --membind=0";
    /// Changes of the configuration wait for the next start.
    RestartPending = "restart_pending", Harm::Note, "the daemon still uses the earlier values of those fields", "restart the daemon when convenient, or revert the changes and send SIGHUP; `kvrouted serve --example-config` shows which fields reload";
    /// No daemon answers on its socket.
    SocketUnreachable = "socket_unreachable", Harm::Severe, "gateways on this host route without it", "start it (kvrouted serve), or name its socket with --socket";
    /// This user may not use the daemon's socket.
    SocketDenied = "socket_denied", Harm::Severe, "a gateway of the same user and group is refused too", "run as a user of the socket's group, or set socket_mode in [serve]";
    /// The daemon's admin socket does not answer.
    AdminUnreachable = "admin_unreachable", Harm::Severe, "nothing can be asked about its workers", "run as the user of the daemon, or name the socket with --admin-socket";
    /// Every user of the host may use the daemon's socket.
    SocketOpen = "socket_open", Harm::Warning, "every user can book workers and see which prompts are cached", "set socket_mode = \"660\" in [serve]";
    /// The metrics port does not serve the daemon's metrics.
    MetricsUnreachable = "metrics_unreachable", Harm::Warning, "alerts stay silent when something goes wrong", "check what else listens on the port (ss -ltnp); choose another `port` in [metrics]";
    /// The daemon and this command are of different releases.
    VersionDiffers = "version_differs", Harm::Note, "findings may be missing or worded otherwise", "restart the daemon with the installed release";
    /// The configuration file cannot be used.
    ConfigInvalid = "config_invalid", Harm::Severe, "the daemon would not start again", "correct the line; kvrouted serve --config FILE --check shows whether the file is valid";
    /// The daemon does not run with this configuration file.
    ConfigDiffers = "config_differs", Harm::Warning, "changes in the file have had no effect", "if only workers differ, make the daemon reload the file (SIGHUP); otherwise restart it with this file";
    /// The configuration names more publishers than the open-files limit allows.
    OpenFilesShort = "open_files_short", Harm::Warning, "the daemon would refuse the publishers beyond the limit", "raise the hard limit (ulimit -Hn, LimitNOFILE= of the unit)";
    /// A gateway's own finding.
    GatewayFinding = "gateway_finding", Harm::Warning, "requests may be routed by load alone, or by caches that were predicted wrongly", "follow the finding's own advice; the gateway's log has its beginning";
    /// The gateway's /findings cannot be read.
    GatewayUnreachable = "gateway_unreachable", Harm::Warning, "what the gateway noticed is not shown here", "start the gateway, or name its [admin] address with --gateway";
}

impl Symptom {
    /// A finding with the symptom's general description.
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
    fn names_are_unique_and_every_text_is_there() {
        let mut names: Vec<_> = Symptom::ALL.iter().map(|symptom| symptom.name()).collect();
        names.extend(TrustReason::ALL.iter().map(|reason| reason.name()));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a symptom has the name of another symptom or of a reason");
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
    fn harm_is_ordered_and_an_unknown_number_is_severe() {
        assert!(Harm::Note < Harm::Warning && Harm::Warning < Harm::Severe);
        for harm in [Harm::Note, Harm::Warning, Harm::Severe] {
            assert_eq!(Harm::from_u8(harm as u8), harm);
        }
        assert_eq!(Harm::from_u8(9), Harm::Severe);
    }
}
