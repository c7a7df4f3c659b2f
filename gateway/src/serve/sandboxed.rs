//! What the gateway keeps of its privileges and files once it has started: see [`kvrouted::sandbox`].
//!
//! All threads of the gateway are of one kind, because tokio's threads do any work. The sandbox is entered before they
//! start, so the process may still bind the ports and sockets of its configuration.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use kvrouted::sandbox::{self, Grant, Mode, Place, Plan, Program, RefusalLog, Refused};

use super::Failure;
use crate::config::Config;
use crate::epp::{EppOptions, Listen};
use crate::kubernetes::SERVICE_ACCOUNT_FOLDER;
use crate::limits::SANDBOX_WATCH_INTERVAL;
use crate::proxy::Finding;
use crate::router::DaemonStarter;

/// Where operating systems keep the certificates of authorities.
const AUTHORITIES: [&str; 7] = [
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/var/lib/ca-certificates",
];
/// Variables that name other places for them.
const AUTHORITIES_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];
/// Tells how many log lines a socket keeps.
const QUEUE_LENGTH: &str = "/proc/sys/net/unix/max_dgram_qlen";

/// Starts the thread that will start the daemon, if the gateway runs one, and confines the process. Call it before any
/// other thread starts.
///
/// # Errors
/// In mode `required`, the part that the kernel lacks.
pub(super) fn start(config: &Config, picker: Option<&EppOptions>) -> Result<Option<DaemonStarter>, Failure> {
    if config.sandbox == Mode::Off {
        return Ok(None);
    }
    let starter = config.socket.is_none().then(|| DaemonStarter::new(config.sandbox)).transpose();
    let starter = starter.map_err(|error| Failure::Unavailable(error.to_string()))?;
    let (mut grants, mut bind_ports) = (grants(config), Vec::new());
    match picker {
        None => {
            bind_ports.push(config.listen.address.port());
            bind_ports.extend(config.pick.listen.map(|address| address.port()));
            let sockets = [&config.pick.socket, &config.pick.log_socket].into_iter().flatten();
            grants.extend(sockets.filter_map(|path| Grant::folder_of(Place::NewSockets, path)));
        }
        Some(options) => {
            match &options.listen {
                Listen::Tcp(address) => bind_ports.push(address.port()),
                Listen::Unix(path) => grants.extend(Grant::folder_of(Place::NewSockets, path)),
            }
            let files = [&options.tls_cert, &options.tls_key].into_iter().flatten();
            grants.extend(files.flat_map(|file| Grant::replaceable(Place::Keys, file)));
            let endpoints = options.endpoints_file.iter();
            grants.extend(endpoints.flat_map(|file| Grant::replaceable(Place::Workers, file)));
        }
    }
    bind_ports.extend(config.admin.map(|address| address.port()));
    let plan = Plan { mode: config.sandbox, program: Program::Gateway, grants, bind_ports };
    sandbox::start(&plan).map_err(|error| Failure::System(error.to_string()))?;
    Ok(starter)
}

/// The files that any command may read again while it runs.
fn grants(config: &Config) -> Vec<Grant> {
    let mut files: Vec<&Path> = Vec::new();
    if let Some(tls) = &config.listen.tls {
        files.extend([tls.cert.as_path(), &tls.key]);
    }
    files.extend(config.caller_keys.as_deref());
    files.extend(config.engines_ca.as_deref());
    files.extend(config.engines_key_file.as_deref());
    files.extend(config.engines.iter().filter_map(|engine| engine.api_key_file.as_deref()));
    if let Some(access) = config.kubernetes.as_ref().and_then(|kubernetes| kubernetes.access.as_ref()) {
        files.extend(access.token_file.as_deref());
        files.extend(access.ca_file.as_deref());
    }
    let mut grants: Vec<Grant> = files.into_iter().flat_map(|file| Grant::replaceable(Place::Keys, file)).collect();
    let named = AUTHORITIES_VARIABLES.into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let folders = AUTHORITIES.into_iter().map(PathBuf::from).chain(named);
    let folders = folders.chain([PathBuf::from(SERVICE_ACCOUNT_FOLDER)]);
    let folders = folders.chain(config.tokens.local.iter().map(|local| local.folder.clone()));
    grants.extend(folders.map(|path| Grant::new(Place::Keys, path)));
    grants.extend(Grant::resolver());
    grants.push(Grant::new(Place::Process, QUEUE_LENGTH));
    grants
}

/// Logs what the sandbox refuses, for ever.
pub(super) async fn watch() {
    let (mut refusals, mut every) = (RefusalLog::default(), tokio::time::interval(SANDBOX_WATCH_INTERVAL));
    loop {
        every.tick().await;
        refusals.note();
    }
}

/// What the operator should know.
pub(super) fn findings() -> Vec<Finding> {
    let Some(in_force) = sandbox::in_force() else { return Vec::new() };
    let mut findings = Vec::new();
    let refused = sandbox::refused();
    if !refused.is_empty() {
        let calls: Vec<_> = refused.iter().map(|Refused { call, times, .. }| format!("{call} ({times})")).collect();
        findings.push(Finding {
            what: format!("the sandbox refused system calls: {}", calls.join(", ")),
            remedy: "if the log shows no attack, report the calls with the versions of kernel and C library; until \
                     then set sandbox.mode to \"report\" and restart the gateway"
                .to_owned(),
        });
    }
    if !in_force.is_whole() {
        findings.push(Finding {
            what: "a part of the sandbox is not in force".to_owned(),
            remedy: "find the missing part in the log of the start".to_owned(),
        });
    }
    let replaced = sandbox::files_replaced();
    if !replaced.is_empty() {
        let names: Vec<_> = replaced.iter().map(|path| path.display().to_string()).collect();
        findings.push(Finding {
            what: format!("the sandbox keeps the gateway from reading replaced files: {}", names.join(", ")),
            remedy: "restart the gateway; a file in a folder of its own can be replaced at any time".to_owned(),
        });
    }
    findings
}

/// Metrics, in the text format of OpenMetrics.
pub(super) fn metrics(text: &mut String) {
    let name = "kvrouted_gateway_sandbox";
    let help = "1 for each part of the sandbox that is in force, 0 for each that is not; of landlock, its version";
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} gauge");
    for (part, value) in sandbox::in_force().cloned().unwrap_or_default().figures() {
        let _ = writeln!(text, "{name}{{part=\"{part}\"}} {value}");
    }
    let refused: u64 = sandbox::refused().iter().map(|refused| refused.times).sum();
    let name = "kvrouted_gateway_sandbox_refused";
    let help = "System calls that the sandbox refused; the log names them";
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} counter\n{name}_total {refused}");
}
