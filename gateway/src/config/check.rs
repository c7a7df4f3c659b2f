//! Raw fields become a [`Config`], or a list of problems.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvrouted::client;
use kvrouted::sandbox::Mode;

use super::raw::{
    RawBounds, RawConfig, RawDaemon, RawDeadlines, RawEngine, RawForward, RawListen, RawLocal, RawPick, RawRank,
    RawRetry, RawTokens,
};
use super::{
    Bounds, Config, Deadlines, Flags, Forward, Listen, PickPort, Problem, Questions, ReportMode, Retry, TlsFiles,
    Tokens, kubernetes,
};
use crate::engines::RankSource;
use crate::limits::{DAEMON_TIMEOUT_DEFAULT, LOCAL_FOLDERS_MAX, PICKS_OPEN_MAX, RENDER_MAX, TOKEN_CACHE_BYTES};
use crate::tokens::LocalFolder;

/// One engine of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineEntry {
    /// The daemon's worker id.
    pub worker: u64,
    /// `http(s)://host:port`
    pub url: String,
    /// A file with the engine's API key.
    pub api_key_file: Option<PathBuf>,
    /// `any`, `prefill` or `decode`.
    pub role: String,
    /// The name in its certificate, if it is not the URL's host.
    pub tls_name: Option<String>,
    /// Tokens in a block, if the engine does not tell.
    pub block_size: Option<u32>,
    /// Where its ranks publish, if the engine does not tell.
    pub ranks: Vec<RankSource>,
    /// The port of SGLang's bootstrap server, if the engine does not tell.
    pub bootstrap_port: Option<u16>,
}

/// Collects problems, so that one run of `--check` lists all of them.
pub(super) struct Checker(Vec<Problem>);

impl Checker {
    pub(super) fn problem(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem { field: field.into(), message: message.into() });
    }

    fn number(&mut self, field: &str, value: Option<u64>, default: u64, min: u64, max: u64) -> u64 {
        let value = value.unwrap_or(default);
        if !(min..=max).contains(&value) {
            self.problem(field, format!("{value} is out of bounds; write a number from {min} to {max}"));
        }
        value
    }

    fn size(&mut self, field: &str, value: Option<u64>, default: u64, min: u64, max: u64) -> usize {
        usize::try_from(self.number(field, value, default, min, max)).unwrap_or(usize::MAX)
    }

    fn time(&mut self, field: &str, value: Option<u64>, default: u64) -> Duration {
        const DAY_MS: u64 = 24 * 60 * 60 * 1000;
        Duration::from_millis(self.number(field, value, default, 1, DAY_MS))
    }

    fn address(&mut self, field: &str, text: &str) -> Option<SocketAddr> {
        match text.parse() {
            Ok(address) => Some(address),
            Err(_) => {
                self.problem(field, format!("`{text}` is no address; write IP:PORT, such as 127.0.0.1:8080"));
                None
            }
        }
    }

    fn loopback(&mut self, field: &str, text: &str) -> Option<SocketAddr> {
        let address = self.address(field, text)?;
        if !address.ip().is_loopback() {
            let remedy = "anybody who reaches this port could use it; write a loopback address, such as 127.0.0.1:9464";
            self.problem(field, format!("`{text}` is not on the loopback interface: {remedy}"));
        }
        Some(address)
    }

    fn choice<T: Copy>(&mut self, field: &str, text: Option<&str>, choices: &[(&str, T)]) -> T {
        let Some(text) = text else { return choices[0].1 };
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
            return *value;
        }
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        self.problem(field, format!("`{text}` is not known; write {}", names.join(" or ")));
        choices[0].1
    }
}

/// How the daemon that the gateway runs may choose workers; the first is the default.
const DAEMON_MODES: [client::Mode; 2] = [client::Mode::Latency, client::Mode::Kv];

/// Checks everything.
pub(super) fn check(raw: RawConfig, flags: &Flags) -> Result<Config, Vec<Problem>> {
    let mut checker = Checker(Vec::new());
    let listen = listen(&mut checker, &raw.listen, flags);
    let admin = match flags.admin.as_deref().or(raw.admin.address.as_deref()).unwrap_or("127.0.0.1:9464") {
        "" => None,
        text => checker.loopback("admin.address", text),
    };
    let default_key = flags.api_key_file.clone().or(raw.engines.api_key_file);
    let kubernetes = kubernetes::check(&mut checker, raw.kubernetes, &flags.kubernetes);
    let engines = engines(&mut checker, &raw.engine, &flags.engines, default_key.as_ref(), kubernetes.is_some());
    let bounds = bounds(&mut checker, raw.bounds);
    let retry = retry(&mut checker, raw.retry, &bounds);
    let deadlines = deadlines(&mut checker, raw.deadlines);
    let forward = forward(&mut checker, raw.forward);
    let pick = pick(&mut checker, raw.pick);
    let log_level = flags.log_level.clone().or(raw.log.level).unwrap_or_else(|| "info".into());
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    if !levels.contains(&log_level.as_str()) {
        checker.problem("log.level", format!("`{log_level}` is no level; write one of {}", levels.join(", ")));
    }
    let modes = Mode::ALL.map(|mode| (mode.name(), mode));
    let sandbox = flags.sandbox.as_deref().or(raw.sandbox.mode.as_deref());
    let sandbox = checker.choice("sandbox.mode", sandbox, &modes);
    let modes = DAEMON_MODES.map(|mode| (mode.name(), mode));
    let daemon_mode = checker.choice("daemon.mode", raw.daemon.mode.as_deref(), &modes);
    let (questions, tokens) = (questions(&mut checker, &raw.daemon), tokens(&mut checker, raw.tokens));
    // A flag for one of the two replaces both fields of the file.
    let (socket, daemon_program) = match (&flags.socket, &flags.program) {
        (None, None) => (raw.daemon.socket, raw.daemon.program),
        (socket, program) => (socket.clone(), program.clone()),
    };
    if socket.is_some() && daemon_program.is_some() {
        let message = "a daemon of the gateway's own is run only without daemon.socket; remove one of the two";
        checker.problem("daemon.program", message);
    }
    let config = Config {
        listen,
        admin,
        socket,
        daemon_program,
        daemon_metrics_port: raw.daemon.metrics_port.unwrap_or(0),
        daemon_memory_bytes_max: 0,
        daemon_mode,
        questions,
        tokens,
        engines,
        kubernetes,
        engines_key_file: default_key,
        engines_ca: raw.engines.ca_file,
        bounds,
        deadlines,
        retry,
        forward,
        caller_keys: raw.callers.keys_file,
        objectives: raw.objectives,
        pick,
        sandbox,
        log_level,
    };
    if checker.0.is_empty() { Ok(config) } else { Err(checker.0) }
}

fn listen(checker: &mut Checker, raw: &RawListen, flags: &Flags) -> Listen {
    let text = flags.listen.as_deref().or(raw.address.as_deref()).unwrap_or("127.0.0.1:8080");
    let address = checker.address("listen.address", text).unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
    let tls = match (&raw.tls_cert, &raw.tls_key) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert: cert.clone(), key: key.clone() }),
        (None, None) => None,
        (Some(_), None) => {
            checker.problem("listen.tls_key", "missing; tls_cert needs the private key that belongs to it");
            None
        }
        (None, Some(_)) => {
            checker.problem("listen.tls_cert", "missing; tls_key needs the certificate that belongs to it");
            None
        }
    };
    Listen { address, tls }
}

/// The engines of the flags, or those of the file. Engine k is worker k, from 1, unless it names its id.
fn engines(
    checker: &mut Checker,
    raw: &[RawEngine],
    flags: &[String],
    default_key: Option<&PathBuf>,
    are_pods: bool,
) -> Vec<EngineEntry> {
    let listed: Vec<RawEngine> = match flags {
        [] => raw.to_vec(),
        flags => flags.iter().map(|text| engine_flag(text)).collect(),
    };
    match (listed.is_empty(), are_pods) {
        (true, false) => {
            checker.problem("engine", "no engine is named; add --engine http://HOST:PORT or an [[engine]] with a url");
        }
        (false, true) => checker.problem("engine", "the engines are pods of [kubernetes]; remove one of the two"),
        _ => {}
    }
    let mut seen = BTreeSet::new();
    let mut entries = Vec::with_capacity(listed.len());
    for (at, engine) in listed.into_iter().enumerate() {
        let field = format!("engine[{at}]");
        let worker = engine.id.unwrap_or(at as u64 + 1);
        if !seen.insert(worker) {
            checker.problem(format!("{field}.id"), format!("{worker} is the id of another engine; write another one"));
        }
        let url = engine.url.as_deref().unwrap_or_default().trim_end_matches('/').to_owned();
        if let Err(why) = engine_url(&url) {
            checker.problem(format!("{field}.url"), format!("`{url}` {why}; write http://HOST:PORT"));
        }
        let roles = [("any", "any"), ("prefill", "prefill"), ("decode", "decode")];
        let role = checker.choice(&format!("{field}.role"), engine.role.as_deref(), &roles).to_owned();
        let api_key_file = engine.api_key_file.or_else(|| default_key.cloned());
        if engine.block_size == Some(0) {
            checker.problem(format!("{field}.block_size"), "a block has at least one token; write the engine's size");
        }
        if engine.bootstrap_port == Some(0) {
            let message = "0 is no port; write SGLang's --disaggregation-bootstrap-port";
            checker.problem(format!("{field}.bootstrap_port"), message);
        }
        let ranks = ranks(checker, &field, engine.rank);
        let RawEngine { tls_name, block_size, bootstrap_port, .. } = engine;
        entries.push(EngineEntry { worker, url, api_key_file, role, tls_name, block_size, ranks, bootstrap_port });
    }
    entries
}

fn ranks(checker: &mut Checker, field: &str, raw: Vec<RawRank>) -> Vec<RankSource> {
    let mut ranks: Vec<RankSource> = Vec::with_capacity(raw.len());
    for RawRank { rank, endpoint, replay, topic } in raw {
        for (name, text) in [("endpoint", Some(&endpoint)), ("replay", replay.as_ref())] {
            if text.is_some_and(|text| !text.starts_with("tcp://") && !text.starts_with("ipc://")) {
                checker.problem(format!("{field}.rank.{name}"), "no ZeroMQ endpoint; write tcp://HOST:PORT");
            }
        }
        if ranks.iter().any(|other| other.rank == rank) {
            checker.problem(format!("{field}.rank.rank"), format!("rank {rank} is there twice; remove one"));
        }
        ranks.push(RankSource { rank, endpoint: Some(endpoint), replay, topic });
    }
    ranks
}

fn questions(checker: &mut Checker, raw: &RawDaemon) -> Questions {
    let timeout = DAEMON_TIMEOUT_DEFAULT.as_millis() as u64;
    Questions {
        namespace: raw.namespace.clone(),
        timeout: checker.time("daemon.timeout_ms", raw.timeout_ms, timeout),
        hash_locally: raw.hash_locally.unwrap_or(false),
    }
}

fn tokens(checker: &mut Checker, raw: RawTokens) -> Tokens {
    for url in &raw.renderers {
        if let Err(why) = engine_url(url) {
            checker.problem("tokens.renderers", format!("`{url}` {why}; write http://HOST:PORT"));
        }
    }
    Tokens {
        renderers: raw.renderers,
        uses_renderer: raw.render.unwrap_or(true),
        uses_tokenize: raw.tokenize.unwrap_or(true),
        timeout: checker.time("tokens.timeout_ms", raw.timeout_ms, RENDER_MAX.as_millis() as u64),
        cache_bytes_max: checker.number(
            "tokens.cache_bytes_max",
            raw.cache_bytes_max,
            TOKEN_CACHE_BYTES,
            1 << 20,
            1 << 40,
        ),
        local: local(checker, raw.local),
    }
}

fn local(checker: &mut Checker, raw: Vec<RawLocal>) -> Vec<LocalFolder> {
    if raw.len() > LOCAL_FOLDERS_MAX {
        let message = format!("{} folders are too many; name at most {LOCAL_FOLDERS_MAX}", raw.len());
        checker.problem("tokens.local", message);
    }
    let mut folders: Vec<LocalFolder> = Vec::with_capacity(raw.len());
    for (at, RawLocal { model, folder, prefer }) in raw.into_iter().enumerate() {
        let (model, folder) = (model.unwrap_or_default(), folder.unwrap_or_default());
        let field = |name: &str| format!("tokens.local[{at}].{name}");
        if model.is_empty() {
            checker.problem(field("model"), "missing; write the base model's name, as /v1/models of the engine has it");
        }
        if folders.iter().any(|other| other.model == model) {
            checker.problem(field("model"), format!("`{model}` has a folder already; remove one"));
        }
        if folder.as_os_str().is_empty() {
            checker.problem(field("folder"), "missing; write the folder that has the model's tokenizer.json");
        }
        folders.push(LocalFolder { model, folder, prefer: prefer.unwrap_or(false) });
    }
    folders
}

/// `URL` or `ID=URL`.
fn engine_flag(text: &str) -> RawEngine {
    let named = text.split_once('=').and_then(|(id, url)| Some((id.parse::<u64>().ok()?, url)));
    let (id, url) = named.map_or((None, text), |(id, url)| (Some(id), url));
    RawEngine { url: Some(url.to_owned()), id, ..RawEngine::default() }
}

fn engine_url(url: &str) -> Result<(), &'static str> {
    // One engine for each address of a name.
    let url = url.strip_prefix("dns+").unwrap_or(url);
    let url: hyper::Uri = url.parse().map_err(|_| "is no URL")?;
    match url.scheme_str() {
        Some("http" | "https") => {}
        _ => return Err("is no http:// or https:// URL"),
    }
    if url.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("must have no user name: API keys come from api_key_file");
    }
    if url.path() != "/" || url.query().is_some() {
        return Err("must have no path");
    }
    Ok(())
}

fn bounds(checker: &mut Checker, raw: RawBounds) -> Bounds {
    const GIB: u64 = 1 << 30;
    let body_bytes_max = checker.size("bounds.body_bytes_max", raw.body_bytes_max, 32 << 20, 1024, 2 * GIB);
    let bodies_bytes_max = checker.size("bounds.bodies_bytes_max", raw.bodies_bytes_max, GIB, 1024, 1024 * GIB);
    if bodies_bytes_max < body_bytes_max {
        checker.problem("bounds.bodies_bytes_max", "less than body_bytes_max; write at least as much");
    }
    Bounds {
        memory_bytes_max: checker.number("bounds.memory_bytes_max", raw.memory_bytes_max, 0, 0, 1 << 50),
        picks_max: PICKS_OPEN_MAX,
        connections_max: checker.size("bounds.connections_max", raw.connections_max, 8192, 1, 1 << 20),
        requests_max: checker.size("bounds.requests_max", raw.requests_max, 4096, 1, 1 << 20),
        body_bytes_max,
        bodies_bytes_max,
        header_bytes_max: checker.size("bounds.header_bytes_max", raw.header_bytes_max, 64 << 10, 8192, 1 << 20),
        headers_max: checker.size("bounds.headers_max", raw.headers_max, 100, 16, 4096),
    }
}

fn retry(checker: &mut Checker, raw: RawRetry, bounds: &Bounds) -> Retry {
    let body_max = bounds.body_bytes_max as u64;
    Retry {
        attempts_max: checker.size("retry.attempts_max", raw.attempts_max, 3, 1, 16),
        body_bytes_max: checker.size("retry.body_bytes_max", raw.body_bytes_max, body_max, 0, 2 << 30),
    }
}

fn deadlines(checker: &mut Checker, raw: RawDeadlines) -> Deadlines {
    let deadlines = Deadlines {
        header: checker.time("deadlines.header_ms", raw.header_ms, 60_000),
        body: checker.time("deadlines.body_ms", raw.body_ms, 60_000),
        first_byte: checker.time("deadlines.first_byte_ms", raw.first_byte_ms, 600_000),
        total: checker.time("deadlines.total_ms", raw.total_ms, 3_600_000),
        stall: checker.time("deadlines.stall_ms", raw.stall_ms, 60_000),
        drain: checker.time("deadlines.drain_ms", raw.drain_ms, 60_000),
    };
    if deadlines.first_byte > deadlines.total {
        checker.problem("deadlines.first_byte_ms", "more than total_ms, which ends the request first; write less");
    }
    deadlines
}

fn forward(checker: &mut Checker, raw: RawForward) -> Forward {
    for prefix in &raw.passed_prefixes {
        if !prefix.starts_with('/') {
            checker.problem("forward.passed_prefixes", format!("`{prefix}` does not begin with /"));
        }
    }
    let unknown = [("refuse", false), ("pass", true)];
    let modes = [("strip", ReportMode::Strip), ("pass", ReportMode::Pass), ("refuse", ReportMode::Refuse)];
    let mode = raw.kv_cache_report_mode.as_deref();
    Forward {
        passes_unknown_paths: checker.choice("forward.unknown_paths", raw.unknown_paths.as_deref(), &unknown),
        passed_prefixes: raw.passed_prefixes,
        asks_usage: raw.include_usage.unwrap_or(false),
        report_mode: checker.choice("forward.kv_cache_report_mode", Some(mode.unwrap_or("pass")), &modes),
        sends_token_ids: raw.token_ids.unwrap_or(false),
        tells_worker: raw.worker_headers.unwrap_or(false),
    }
}

fn pick(checker: &mut Checker, raw: RawPick) -> PickPort {
    let listen = raw.address.as_deref().and_then(|text| checker.loopback("pick.address", text));
    let log_listen = raw.log_address.as_deref().and_then(|text| checker.loopback("pick.log_address", text));
    let logs = [("pick.log_socket", raw.log_socket.is_some()), ("pick.log_address", raw.log_address.is_some())];
    for (field, is_set) in logs {
        if is_set && raw.socket.is_none() && raw.address.is_none() {
            let message = "access logs end picks, but no pick port is set; set pick.socket or pick.address too";
            checker.problem(field, message);
        }
    }
    let booking = checker.time("pick.booking_ms_max", raw.booking_ms_max, 600_000);
    let mode = raw.socket_mode.as_deref().unwrap_or("660");
    let socket_mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o777).unwrap_or_else(|| {
        checker.problem("pick.socket_mode", format!("`{mode}` is no mode; write octal digits, such as \"660\""));
        0
    });
    PickPort { socket: raw.socket, socket_mode, listen, log_socket: raw.log_socket, log_listen, booking }
}

#[cfg(test)]
mod tests {
    use super::super::raw;
    use super::*;

    fn flags(engines: &[&str]) -> Flags {
        Flags { engines: engines.iter().map(|text| (*text).to_owned()).collect(), ..Flags::default() }
    }

    fn problems(text: &str) -> Vec<Problem> {
        check(raw::parse(text).expect("TOML"), &Flags::default()).expect_err("problems")
    }

    #[test]
    fn engines_alone_are_enough() {
        let config = check(RawConfig::default(), &flags(&["http://10.0.0.8:8000", "7=http://10.0.0.9:8000/"]));
        let config = config.expect("a good configuration");
        let ids: Vec<(u64, &str)> = config.engines.iter().map(|it| (it.worker, it.url.as_str())).collect();
        assert_eq!(ids, [(1, "http://10.0.0.8:8000"), (7, "http://10.0.0.9:8000")]);
        assert_eq!(config.listen.address.to_string(), "127.0.0.1:8080");
        assert_eq!(config.forward.report_mode, ReportMode::Pass);
        assert!(!config.forward.passes_unknown_paths);
    }

    #[test]
    fn problems_name_the_field() {
        let text = "[listen]\naddress = \"here\"\ntls_cert = \"c\"\n[admin]\naddress = \"0.0.0.0:1\"\n\
            [[engine]]\nurl = \"ftp://a\"\n[[engine]]\nid = 1\nurl = \"http://a:1/v1\"\nrole = \"both\"\n\
            [[tokens.local]]\nmodel = \"m\"\nfolder = \"/m\"\n[[tokens.local]]\nmodel = \"m\"\n\
            [bounds]\nbody_bytes_max = 0\n[forward]\nunknown_paths = \"maybe\"\n[log]\nlevel = \"loud\"";
        let fields: Vec<String> = problems(text).into_iter().map(|problem| problem.field).collect();
        for field in [
            "listen.address",
            "listen.tls_key",
            "admin.address",
            "engine[0].url",
            "engine[1].id",
            "engine[1].url",
            "engine[1].role",
            "tokens.local[1].model",
            "tokens.local[1].folder",
            "bounds.body_bytes_max",
            "forward.unknown_paths",
            "log.level",
        ] {
            assert!(fields.iter().any(|it| it == field), "{field} is missing in {fields:?}");
        }
    }

    #[test]
    fn local_tokenizers_are_read() {
        let text = "[[engine]]\nurl = \"http://a:1\"\n[[tokens.local]]\nmodel = \"m\"\nfolder = \"/m\"\nprefer = true";
        let config = check(raw::parse(text).expect("TOML"), &Flags::default()).expect("good");
        let expected = LocalFolder { model: "m".into(), folder: "/m".into(), prefer: true };
        assert_eq!(config.tokens.local, [expected]);
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        let error = raw::parse("[listen]\nadress = \"127.0.0.1:1\"").expect_err("unknown");
        assert!(error.contains("adress") && error.contains("address"), "{error}");
    }

    #[test]
    fn nothing_is_bound_without_an_engine() {
        assert_eq!(problems("")[0].field, "engine");
    }
}
