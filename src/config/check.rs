//! The second step: checks a draft, whose fields are each valid, as a whole, and makes a [`Config`] of it.
//!
//! The lower half does so for workers, from the configuration and from other sources alike.

use std::collections::HashMap;
use std::ffi::OsString;
use std::hash::Hash;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::document::{Draft, TableDraft};
use super::fields::{ADMIN_SOCKET_MODE_PRESET, WorkerDraft, nats_fault, peer_fault};
use super::problem::{Location, Problem, nearest};
use super::{
    AccessConfig, Config, HostRule, HttpConfig, IoSetting, MetricsConfig, NamedWorkers, PolicyConfig, ProcessConfig,
    RemoteConfig, RoutersConfig, ServeConfig, ServerConfig, ShadowConfig, SpaceConfig, WorkerConfig, policy_with,
};
use crate::endpoint::{Endpoint, NatsServer};
use crate::fleet::{DeviceClass, EventSource, SnapshotSource, WorkerState};
use crate::ids::{SnapshotProposal, SpaceId, Worker};
use crate::limits;
use crate::load::PrefillFigures;
use crate::route::{Mode, Policy};

const NATS_MIXES_TLS: &str = "has servers with TLS and without: the login would go to one of them in the clear";
const NATS_NOT_BUILT: &str =
    "is a NATS server, which this build does not speak to: build kvrouted with --features nats";

/// The admin socket of a daemon whose configuration names none: the path of its socket with `.admin` appended.
fn admin_socket_beside(socket: &Path) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(".admin");
    PathBuf::from(path)
}

/// Makes a configuration of a draft. The result is valid only if the call added no problem.
pub(super) fn check(draft: &Draft, problems: &mut Vec<Problem>) -> Config {
    check_spaces(&draft.spaces, problems);
    check_memory(&draft.spaces, draft.ingest.value.shards, problems);
    check_budget(&draft.process, problems);
    check_approximate(&draft.spaces, problems);
    events_over_nats(draft, problems);
    let NamedWorkers { workers, servers } = workers(&draft.workers, &draft.spaces, problems);
    Config {
        serve: serve(&draft.serve, problems),
        admin: draft.admin.value.clone(),
        metrics: metrics(draft, problems),
        http: http(draft, problems),
        remote: remote(&draft.remote, problems),
        log: draft.log.value.clone(),
        process: draft.process.value.clone(),
        sandbox: draft.sandbox.value.clone(),
        ingest: draft.ingest.value.clone(),
        booking: draft.booking.value.clone(),
        snapshot: draft.snapshot.value.clone(),
        journal: draft.journal.value.clone(),
        shadow: shadow(draft, problems),
        traces: draft.traces.value.clone(),
        policy: policy(draft, problems),
        spaces: draft.spaces.iter().map(|entry| entry.value.clone()).collect(),
        discovery: draft.discovery.value.clone(),
        routers: routers(&draft.routers, problems),
        relay: draft.relay.value.clone(),
        workers,
        servers,
        written: Vec::new(),
        overrides: Vec::new(),
    }
}

fn serve(entry: &TableDraft<ServeConfig>, problems: &mut Vec<Problem>) -> ServeConfig {
    let mut serve = entry.value.clone();
    if entry.written("admin_socket").is_none() {
        serve.admin_socket = admin_socket_beside(&serve.socket);
        let bytes = serve.admin_socket.as_os_str().len();
        if bytes > limits::SOCKET_PATH_BYTES_MAX && !entry.is_refused("socket") {
            let message = format!(
                "the path has {bytes} bytes with `.admin` appended, but a Unix socket's path has at most {}; shorten it or \
                 set admin_socket",
                limits::SOCKET_PATH_BYTES_MAX
            );
            problems.push(entry.problem("socket", message));
        }
    } else if serve.admin_socket == serve.socket && !entry.is_refused("admin_socket") {
        problems.push(entry.problem("admin_socket", "is the same path as socket; use two different paths"));
    }
    if serve.io == IoSetting::Uring && serve.spin_us_max > 0 {
        let message = "threads on io_uring cannot busy-poll; set io to auto or epoll, or spin_us_max to 0";
        problems.push(entry.problem("spin_us_max", message));
    }
    serve
}

/// Without `administer`, the address decides who may administer by HTTP, so that other machines never may by accident.
/// If the sockets are restricted, `administer` is required: the port does not apply those restrictions.
fn http(draft: &Draft, problems: &mut Vec<Problem>) -> HttpConfig {
    let (entry, mut http) = (&draft.http, draft.http.value.clone());
    let is_said = entry.written("administer").is_some();
    let restricts = restriction(draft);
    if !is_said {
        http.administer = http.listen.is_loopback() && restricts.is_none();
    }
    if let Some(field) = restricts.filter(|_| http.port != 0 && !is_said && http.listen.is_loopback()) {
        let message = format!(
            "is required with {field}, which the HTTP port does not apply: set it to true if every process of this machine may \
             register and remove workers by HTTP, else to false"
        );
        problems.push(entry.problem("administer", message));
    }
    if http.port != 0 && !is_said && !http.listen.is_loopback() && !entry.is_refused("listen") {
        let message = "is not the loopback interface, and the port asks for no credentials: set administer to true if \
                       everyone who can reach the port may register and remove workers, else to false";
        problems.push(entry.problem("listen", message));
    }
    if let Some(problem) = names(&mut http.hosts) {
        problems.push(entry.problem("hosts", problem));
    }
    if let Some(host) = http.worker_hosts.iter().find(|host| HostRule::parse(host).is_none()) {
        let message =
            format!("`{host}` is not a host name, an IP address, a network, ipc or *; leave out scheme and port");
        problems.push(entry.problem("worker_hosts", message));
    }
    let metrics = &draft.metrics.value;
    if http.port != 0 && http.port == metrics.port && overlap(http.listen, metrics.listen) {
        let message =
            "is also metrics.port; remove metrics.port, as the HTTP port serves /metrics too, or choose another port";
        problems.push(entry.problem("port", message));
    }
    http
}

/// Whether no two sockets can have one port at these addresses.
fn overlap(one: IpAddr, other: IpAddr) -> bool {
    one == other || one.is_unspecified() || other.is_unspecified() || (one.is_loopback() && other.is_loopback())
}

/// A router that tells others its load must prove who it is, and one that does not cannot hear others.
fn routers(entry: &TableDraft<RoutersConfig>, problems: &mut Vec<Problem>) -> RoutersConfig {
    let routers = &entry.value;
    if routers.listen.is_some() && routers.secret_file.is_none() && !entry.is_refused("secret_file") {
        problems.push(entry.problem("listen", "needs secret_file, so that no other process can pass for a router"));
    }
    let has_peers = names_peers(routers);
    if routers.listen.is_none() && has_peers && !entry.is_refused("listen") {
        problems.push(entry.problem("peers", "needs listen: a router hears others only if they can hear it"));
    }
    if let Some(fault) = peer_fault(&routers.peers) {
        problems.push(entry.problem("peers", fault.message).suggest(fault.nearest.as_deref()));
    }
    nats(entry, problems);
    routers.clone()
}

fn names_peers(routers: &RoutersConfig) -> bool {
    !routers.peers.is_empty() || routers.peers_dns.is_some() || routers.peers_file.is_some()
}

/// NATS takes the place of a port of this router's own, and shows one login.
fn nats(entry: &TableDraft<RoutersConfig>, problems: &mut Vec<Problem>) {
    let routers = &entry.value;
    let settings = ["nats_user", "nats_secret_file", "nats_credentials_file", "nats_ca_file"];
    if routers.nats.is_empty() {
        for field in settings.into_iter().filter(|field| entry.written(field).is_some()) {
            problems.push(entry.problem(field, "needs nats: without servers it has no use"));
        }
        return;
    }
    let mut refuse = |message: &str| problems.push(entry.problem("nats", message));
    if !cfg!(feature = "nats") {
        refuse("is not in this build: build kvrouted with --features nats, or use listen and peers");
    }
    if let Some(fault) = nats_fault(&routers.nats) {
        refuse(&fault.message);
    }
    if routers.secret_file.is_none() && !entry.is_refused("secret_file") {
        refuse("needs secret_file, so that no other process can pass for a router");
    }
    if routers.listen.is_some() || names_peers(routers) {
        refuse("takes the place of listen, peers, peers_dns and peers_file: remove either");
    }
    let servers = routers.nats_servers();
    if mixes_tls(&servers) {
        refuse(NATS_MIXES_TLS);
    }
    if has_tls(&servers) && routers.nats_ca_file.is_none() && !entry.is_refused("nats_ca_file") {
        refuse("needs nats_ca_file with tls://, such as /etc/ssl/certs/ca-certificates.crt");
    }
    nats_login(entry, problems);
}

fn has_tls(servers: &[NatsServer]) -> bool {
    servers.iter().any(|server| server.is_tls)
}

fn mixes_tls(servers: &[NatsServer]) -> bool {
    has_tls(servers) && !servers.iter().all(|server| server.is_tls)
}

/// A login is either a secret, with or without a user, or credentials.
fn nats_login<T>(entry: &TableDraft<T>, problems: &mut Vec<Problem>) {
    let is_set = |field| entry.written(field).is_some();
    if is_set("nats_user") && !is_set("nats_secret_file") {
        problems.push(entry.problem("nats_user", "needs nats_secret_file, with the password"));
    }
    if is_set("nats_credentials_file") && is_set("nats_secret_file") {
        problems.push(entry.problem("nats_credentials_file", "takes the place of nats_secret_file: remove either"));
    }
}

/// Events of workers over NATS: what a relay writes to, and what TLS needs.
fn events_over_nats(draft: &Draft, problems: &mut Vec<Problem>) {
    let (ingest, relay) = (&draft.ingest, &draft.relay);
    nats_login(ingest, problems);
    let servers = relay.value.nats_servers();
    if !relay.value.nats.is_empty() && !cfg!(feature = "nats") {
        problems.push(relay.problem("nats", NATS_NOT_BUILT));
    }
    if let Some(fault) = nats_fault(&relay.value.nats) {
        problems.push(relay.problem("nats", fault.message));
    }
    if mixes_tls(&servers) {
        problems.push(relay.problem("nats", NATS_MIXES_TLS));
    }
    if ingest.written("nats_ca_file").is_some() {
        return;
    }
    let message = "needs nats_ca_file in [ingest] with tls://, such as /etc/ssl/certs/ca-certificates.crt";
    if has_tls(&servers) {
        problems.push(relay.problem("nats", message));
    }
    for worker in &draft.workers {
        let server = worker.value.endpoint.as_ref().and_then(Endpoint::nats_server);
        if server.is_some_and(|server| server.is_tls) {
            problems.push(worker.problem("endpoint", message));
        }
    }
}

/// A port needs its files.
fn remote(entry: &TableDraft<RemoteConfig>, problems: &mut Vec<Problem>) -> RemoteConfig {
    let files = ["certificate_file", "key_file", "principals_file"];
    if entry.value.listen.is_some() {
        for field in files.into_iter().filter(|field| entry.written(field).is_none()) {
            problems.push(entry.problem(field, "is required with listen"));
        }
    }
    entry.value.clone()
}

fn metrics(draft: &Draft, problems: &mut Vec<Problem>) -> MetricsConfig {
    let (entry, mut metrics) = (&draft.metrics, draft.metrics.value.clone());
    if let Some(problem) = names(&mut metrics.hosts) {
        problems.push(entry.problem("hosts", problem));
    }
    metrics
}

/// Converts host names to lower case, for comparisons. Returns the problem of the first invalid one.
fn names(hosts: &mut [String]) -> Option<String> {
    hosts.iter_mut().for_each(|host| host.make_ascii_lowercase());
    let is_name = |host: &str| host == "*" || host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    let host = hosts.iter().find(|host| !is_name(host))?;
    Some(format!("`{host}` is not a host name; leave out scheme and port"))
}

/// The fields that restrict access to the sockets further than the defaults, if any do.
fn restriction(draft: &Draft) -> Option<&'static str> {
    let (admin, serve) = (&draft.admin.value, &draft.serve.value);
    let is_listed = |access: &AccessConfig| !access.uids.is_empty() || !access.gids.is_empty();
    if is_listed(&admin.access) {
        Some("admin.allow_uids and admin.allow_gids")
    } else if is_listed(&serve.access) {
        Some("serve.allow_uids and serve.allow_gids")
    } else {
        (admin.socket_mode != ADMIN_SOCKET_MODE_PRESET).then_some("admin.socket_mode")
    }
}

fn check_spaces(spaces: &[TableDraft<SpaceConfig>], problems: &mut Vec<Problem>) {
    // A space that could not be read is already in the list.
    let misread = |problem: &Problem| {
        problem.path.is_empty() || problem.path == "space" || problem.nearest.as_deref() == Some("space")
    };
    if spaces.is_empty() && !problems.iter().any(misread) {
        let message = "is missing: add at least one [[space]] with model = \"...\", or without a file set --model";
        problems.push(Problem::new(Location::Document, "space", message));
    }
    too_many(spaces, limits::SPACES_MAX, problems);
    let mut seen = FirstUse::default();
    for entry in spaces {
        if entry.value.model.is_empty() || ["namespace", "role"].iter().any(|field| entry.is_refused(field)) {
            continue;
        }
        let space = &entry.value;
        let location = entry.location("model");
        if let Some(first) = seen.repeats((&space.model, &space.namespace, space.role), &location) {
            let message = format!("space {} is already defined at {first}", describe(space));
            problems.push(entry.problem("model", message));
        }
    }
}

fn check_memory(spaces: &[TableDraft<SpaceConfig>], shards: u16, problems: &mut Vec<Problem>) {
    let min = limits::SHARD_MEMORY_BYTES_MIN * u64::from(shards.max(1));
    for entry in spaces {
        let ceiling = entry.value.memory_bytes_max;
        if (1..min).contains(&ceiling) && !entry.is_refused("memory_bytes_max") {
            let message = format!(
                "is too small for a single block: set at least {min} with ingest.shards = {shards}, or 0 for no limit"
            );
            problems.push(entry.problem("memory_bytes_max", message));
        }
    }
}

/// Whether the parts of the daemon fit a budget that is configured shows at the start, where the rest is known.
fn check_budget(entry: &TableDraft<ProcessConfig>, problems: &mut Vec<Problem>) {
    let (bytes, min) = (entry.value.memory_bytes_max, limits::MEMORY_BYTES_MIN);
    if (1..min).contains(&bytes) && !entry.is_refused("memory_bytes_max") {
        let message =
            format!("is too small for any daemon: set at least {min}, or 0 for a share of the machine's memory");
        problems.push(entry.problem("memory_bytes_max", message));
    }
}

/// `[policy]`, and the policy of each space.
fn policy(draft: &Draft, problems: &mut Vec<Problem>) -> PolicyConfig {
    let general = &draft.policy.value;
    let mut spaces = Vec::new();
    for (at, space) in draft.spaces.iter().enumerate() {
        // A space made by flags has no [space.policy].
        let own = draft.space_policies.get(at).map_or(&draft.policy, |own| own);
        if own.value.weights.mode == Mode::Approximate && !space.value.approximate && !space.is_refused("approximate") {
            let message = "must be true if the policy's mode is approximate; without it nothing is predicted";
            problems.push(space.problem("approximate", message));
        }
        spaces.push(own.value.weights);
    }
    PolicyConfig { spaces, ..general.clone() }
}

/// `[shadow]`, whose settings must be valid for any policy.
fn shadow(draft: &Draft, problems: &mut Vec<Problem>) -> ShadowConfig {
    let entry = &draft.shadow;
    if let Err(refused) = policy_with(&Policy::default(), "shadow", &entry.value.policy) {
        problems.extend(refused.list.into_iter().map(|problem| {
            let Problem { location, path, message, nearest } = problem;
            entry.problem("policy", format!("{location}: {path}: {message}")).suggest(nearest.as_deref())
        }));
    }
    entry.value.clone()
}

fn check_approximate(spaces: &[TableDraft<SpaceConfig>], problems: &mut Vec<Problem>) {
    for entry in spaces.iter().filter(|entry| entry.value.approximate) {
        if entry.value.block_size == 0 && !entry.is_refused("block_size") {
            let message = "needs block_size, because workers without events do not show theirs; set it";
            problems.push(entry.problem("approximate", message));
        }
    }
}

fn too_many<T>(entries: &[TableDraft<T>], max: usize, problems: &mut Vec<Problem>) {
    if let Some(entry) = entries.get(max) {
        let message = format!("there are {}, at most {max} are allowed", entries.len());
        problems.push(Problem::new(entry.head.clone(), entry.path.clone(), message));
    }
}

/// The space that a worker's model, namespace and role select. The error is empty if another problem, already listed,
/// prevents the search.
fn find_space(entry: &TableDraft<WorkerDraft>, spaces: &[TableDraft<SpaceConfig>]) -> Result<SpaceId, Option<Problem>> {
    let draft = &entry.value;
    let unclear = ["model", "namespace", "role"].iter().any(|field| entry.is_refused(field))
        || spaces.iter().any(|space| space.value.model.is_empty());
    if unclear || spaces.is_empty() {
        return Err(None);
    }
    let says = |space: &SpaceConfig| {
        draft.model.as_ref().is_none_or(|model| *model == space.model)
            && draft.namespace.as_ref().is_none_or(|namespace| *namespace == space.namespace)
            && draft.role.is_none_or(|role| role == space.role)
    };
    let meant: Vec<_> = spaces.iter().enumerate().filter(|(_, space)| says(&space.value)).collect();
    match meant.as_slice() {
        [(at, _)] => Ok(SpaceId(*at as u32)),
        [] => Err(Some(no_such_space(entry, spaces))),
        [(at, first), rest @ ..] if rest.iter().all(|(_, other)| describe(&other.value) == describe(&first.value)) => {
            // The same space is defined twice. The list already has that problem.
            Ok(SpaceId(*at as u32))
        }
        several => {
            let listed: Vec<_> = several.iter().map(|(_, space)| describe(&space.value)).collect();
            let field = if draft.model.is_none() { "model" } else { "namespace" };
            let message = format!(
                "the worker's space is ambiguous, it could be {}; set model, namespace or role",
                listed.join(" or ")
            );
            Err(Some(entry.problem(field, message)))
        }
    }
}

fn no_such_space(entry: &TableDraft<WorkerDraft>, spaces: &[TableDraft<SpaceConfig>]) -> Problem {
    let draft = &entry.value;
    if let Some(model) = &draft.model
        && spaces.iter().all(|space| space.value.model != *model)
    {
        let near = nearest(model, spaces.iter().map(|space| space.value.model.as_str()));
        return entry.problem("model", format!("no [[space]] has model `{model}`")).suggest(near);
    }
    let same_model = |space: &&TableDraft<SpaceConfig>| draft.model.as_ref().is_none_or(|m| *m == space.value.model);
    if let Some(namespace) = &draft.namespace {
        let namespaces = || spaces.iter().filter(same_model).map(|space| space.value.namespace.as_str());
        if namespaces().all(|other| other != namespace) {
            let near = nearest(namespace, namespaces());
            return entry
                .problem("namespace", format!("no [[space]] of that model has namespace `{namespace}`"))
                .suggest(near);
        }
    }
    let role = draft.role.unwrap_or_default().name();
    entry.problem("role", format!("no [[space]] of that model and namespace has role `{role}`"))
}

fn describe(space: &SpaceConfig) -> String {
    let namespace =
        if space.namespace.is_empty() { "the default namespace".into() } else { format!("`{}`", space.namespace) };
    format!("`{}` in {namespace}, role {}", space.model, space.role.name())
}

/// Where each value was written first.
struct FirstUse<K>(HashMap<K, Location>);

impl<K> Default for FirstUse<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Hash + Eq> FirstUse<K> {
    /// The earlier location of `key`, if there is one. Else notes `location` as its first.
    fn repeats(&mut self, key: K, location: &Location) -> Option<Location> {
        if let Some(first) = self.0.get(&key) {
            return Some(first.clone());
        }
        self.0.insert(key, location.clone());
        None
    }
}

/// The default weight of a GPU worker. A CPU worker's is 1.
const GPU_WEIGHT_DEFAULT: f64 = 8.0;

/// The workers of these records. The result is valid only if the call added no problem.
pub(super) fn workers(
    entries: &[TableDraft<WorkerDraft>],
    spaces: &[TableDraft<SpaceConfig>],
    problems: &mut Vec<Problem>,
) -> NamedWorkers {
    too_many(entries, limits::WORKERS_MAX, problems);
    let mut checks = Checks::default();
    let mut named = NamedWorkers::default();
    for entry in entries {
        checks.record(entry, problems);
        let worker = worker(entry, spaces, problems);
        match &entry.value.url {
            Some(url) => {
                checks.url(entry, url, problems);
                named.servers.push(ServerConfig { url: url.clone(), worker });
            }
            None => checks.ranks(entry, &worker, &mut named.workers, problems),
        }
    }
    if named.workers.len() > limits::WORKERS_MAX && entries.len() <= limits::WORKERS_MAX {
        let message = format!(
            "there are {} workers with all ranks, at most {} are allowed",
            named.workers.len(),
            limits::WORKERS_MAX
        );
        problems.extend(entries.last().map(|last| Problem::new(last.head.clone(), last.path.clone(), message)));
    }
    named
}

/// Identities and endpoints, of which no two records may share one.
#[derive(Default)]
struct Checks {
    identities: FirstUse<Worker>,
    endpoints: FirstUse<String>,
}

impl Checks {
    /// Checks the fields of one record against each other.
    fn record(&self, entry: &TableDraft<WorkerDraft>, problems: &mut Vec<Problem>) {
        let draft = &entry.value;
        let told_by_url = draft.url.is_some();
        if told_by_url && draft.load.is_some() {
            problems.push(entry.problem("load", "cannot be set with url, because the engine at url gives it"));
        }
        if entry.written("endpoint").is_none() || told_by_url {
            let set = [
                ("endpoint", draft.endpoint.is_some()),
                ("replay", draft.replay.is_some()),
                ("topic", !draft.topic.is_empty()),
                ("engine_snapshots", draft.engine_snapshots.is_some()),
                ("snapshot_endpoint", draft.snapshot_endpoint.is_some()),
                ("ranks", told_by_url && draft.ranks != 1),
            ];
            let message = if told_by_url {
                "cannot be set with url, because the engine at url gives it"
            } else {
                "has no effect without endpoint; set endpoint or remove this field"
            };
            for (field, _) in set.iter().filter(|(_, is_set)| *is_set) {
                problems.push(entry.problem(field, message));
            }
        }
        match (draft.engine_snapshots, &draft.snapshot_endpoint) {
            (Some(_), None) if draft.endpoint.is_some() && !entry.is_refused("snapshot_endpoint") => {
                problems.push(
                    entry.problem("engine_snapshots", "needs snapshot_endpoint, because engines do not announce it"),
                );
            }
            (None, Some(_)) if draft.endpoint.is_some() && !entry.is_refused("engine_snapshots") => {
                let message = "has no effect while engine_snapshots is off; set that or remove this field";
                problems.push(entry.problem("snapshot_endpoint", message));
            }
            _ => {}
        }
        if draft.endpoint.as_ref().and_then(Endpoint::nats_server).is_some() {
            if !cfg!(feature = "nats") {
                problems.push(entry.problem("endpoint", NATS_NOT_BUILT));
            }
            let useless = ["replay", "topic", "engine_snapshots", "snapshot_endpoint"];
            for field in useless.into_iter().filter(|field| entry.written(field).is_some()) {
                problems.push(entry.problem(field, "has no use beside a NATS server, which also replays; remove it"));
            }
        }
        if !entry.is_refused("blocks_max") {
            let beyond = beyond_blocks_max(draft.capacity_blocks, draft.blocks_max);
            problems.extend(beyond.map(|message| entry.problem("capacity_blocks", message)));
        }
    }

    fn url(&mut self, entry: &TableDraft<WorkerDraft>, url: &str, problems: &mut Vec<Problem>) {
        self.identity(entry, Worker::new(entry.value.id, entry.value.dp_rank), problems);
        self.endpoint(entry, "url", url, problems);
    }

    /// Adds a worker for each rank.
    fn ranks(
        &mut self,
        entry: &TableDraft<WorkerDraft>,
        first: &WorkerConfig,
        into: &mut Vec<WorkerConfig>,
        problems: &mut Vec<Problem>,
    ) {
        for rank in 0..entry.value.ranks.min(limits::WORKERS_MAX as u32) {
            let Some(worker) = of_rank(first, rank) else {
                let message = "needs tcp ports up to 65535 and dp_ranks that count up; write one [[worker]] for each rank instead";
                problems.push(entry.problem("ranks", message));
                return;
            };
            self.identity(entry, worker.worker, problems);
            // Subjects tell workers apart whose events come from one NATS server.
            if let Some(events) = worker.events.as_ref().filter(|events| events.endpoint.nats_server().is_none()) {
                self.endpoint(entry, "endpoint", &events.endpoint, problems);
                if let Some(replay) = &events.replay {
                    self.endpoint(entry, "replay", replay, problems);
                }
                if let Some(snapshots) = &events.snapshots {
                    self.endpoint(entry, "snapshot_endpoint", &snapshots.endpoint, problems);
                }
            }
            if let Some(load) = &worker.load {
                self.endpoint(entry, "load", load, problems);
            }
            into.push(worker);
        }
    }

    fn identity(&mut self, entry: &TableDraft<WorkerDraft>, worker: Worker, problems: &mut Vec<Problem>) {
        if entry.written("id").is_none() || entry.is_refused("id") || entry.is_refused("dp_rank") {
            return;
        }
        if let Some(first) = self.identities.repeats(worker, &entry.location("id")) {
            let message = format!("worker {} with dp_rank {} is already defined at {first}", worker.id, worker.rank);
            problems.push(entry.problem("id", message));
        }
    }

    fn endpoint(&mut self, entry: &TableDraft<WorkerDraft>, field: &str, value: &str, problems: &mut Vec<Problem>) {
        if let Some(first) = self.endpoints.repeats(value.to_ascii_lowercase(), &entry.location(field)) {
            let message = format!("`{value}` is already used at {first}; every rank needs sockets of its own");
            problems.push(entry.problem(field, message));
        }
    }
}

/// The worker `rank` ranks after `first`; `None` if there is no such rank or port.
pub(crate) fn of_rank(first: &WorkerConfig, rank: u32) -> Option<WorkerConfig> {
    let dp_rank = first.worker.rank.0.checked_add(rank).filter(|rank| *rank < u32::MAX)?;
    let events = match &first.events {
        Some(events) => Some(events.of_rank(rank)?),
        None => None,
    };
    let load = match &first.load {
        Some(load) => Some(load.of_rank(rank)?),
        None => None,
    };
    let worker = Worker::new(first.worker.id.0, dp_rank);
    let name = if rank == 0 {
        first.name.clone()
    } else if first.name == preset_name(first.worker) {
        preset_name(worker)
    } else {
        format!("{}.{dp_rank}", first.name)
    };
    Some(WorkerConfig { worker, name, events, load, ..first.clone() })
}

/// The name of a worker whose record has none.
fn preset_name(worker: Worker) -> String {
    match worker.rank.0 {
        0 => format!("w{}", worker.id),
        rank => format!("w{}.{rank}", worker.id),
    }
}

fn worker(
    entry: &TableDraft<WorkerDraft>,
    spaces: &[TableDraft<SpaceConfig>],
    problems: &mut Vec<Problem>,
) -> WorkerConfig {
    let draft = &entry.value;
    let space = match find_space(entry, spaces) {
        Ok(space) => space,
        Err(problem) => {
            problems.extend(problem);
            SpaceId(0)
        }
    };
    let worker = Worker::new(draft.id, draft.dp_rank);
    let events = draft.endpoint.clone().map(|endpoint| EventSource {
        // A NATS server also replays.
        replay: endpoint.nats_server().map_or_else(|| draft.replay.clone(), |_| Some(endpoint.clone())),
        endpoint,
        topic: draft.topic.clone(),
        snapshots: draft.engine_snapshots.zip(draft.snapshot_endpoint.clone()).map(snapshots),
    });
    WorkerConfig {
        worker,
        space,
        name: draft.name.clone().unwrap_or_else(|| preset_name(worker)),
        events,
        load: draft.load.clone(),
        capacity_blocks: draft.capacity_blocks,
        blocks_max: draft.blocks_max,
        batched_tokens_max: draft.batched_tokens_max,
        prefill: prefill(draft),
        engine_class: draft.engine_class.clone().unwrap_or_else(|| {
            let model = spaces.get(space.0 as usize).map_or("", |space| &space.value.model);
            format!("{model} {}", draft.device.name())
        }),
        engine_preset: draft.engine_preset,
        device_class: draft.device,
        weight: weight(draft),
        taints: draft.taints.clone(),
        loras: draft.loras.clone(),
        state: state(draft),
    }
}

/// Why a worker cannot have this capacity, if so.
pub(super) fn beyond_blocks_max(capacity_blocks: u64, blocks_max: u64) -> Option<String> {
    let message =
        || format!("is more than blocks_max = {blocks_max}, beyond which blocks are refused; raise blocks_max");
    (capacity_blocks > blocks_max).then(message)
}

fn snapshots((proposal, endpoint): (SnapshotProposal, Endpoint)) -> SnapshotSource {
    SnapshotSource { proposal, endpoint }
}

pub(super) fn weight(draft: &WorkerDraft) -> f64 {
    draft.weight.unwrap_or(match draft.device {
        DeviceClass::Gpu => GPU_WEIGHT_DEFAULT,
        DeviceClass::Cpu => 1.0,
    })
}

pub(super) fn prefill(draft: &WorkerDraft) -> PrefillFigures {
    PrefillFigures {
        base_ns: draft.prefill_base_us.map(|us| us * 1000),
        token_ns: draft.prefill_token_ns,
        cached_token_ns: draft.prefill_cached_token_ns,
    }
}

pub(super) const fn state(draft: &WorkerDraft) -> WorkerState {
    if draft.draining { WorkerState::Draining } else { WorkerState::Joining }
}
