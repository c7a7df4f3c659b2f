//! A gateway whose daemon is on another host, over `kvrouted connect`: TCP, TLS 1.3 and a token.
//!
//! The tests use the real `kvrouted` program, and are skipped with a message if it is not built.

mod kit;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use kit::ports::free_address;
use kit::{Caller, Connect, Daemon, Figures, Gateway, kvrouted_or_skip, until};
use kvrouted_gateway::demo::{Face, SimulatedEngines};
use serde_json::json;

const TOKEN: &str = "gateway-a-0123456789abcdef0123456789abcdef";
/// The name in the daemon's certificate.
const NAME: &str = "router.test";

struct Fixture {
    _engines: SimulatedEngines,
    daemon: Daemon,
    connect: Connect,
    gateway: Gateway,
    caller: Caller,
    _files: tempfile::TempDir,
}

/// Writes a file that only its owner may read.
fn secret(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).expect("a file");
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("closed");
    path
}

/// Two engines behind a gateway whose daemon is reached over its remote port; `None` = the daemon is not built.
async fn start(what: &str) -> Option<Fixture> {
    let kvrouted = kvrouted_or_skip(what)?;
    let engines = SimulatedEngines::start(&kvrouted, 2).await.expect("engines");
    let urls = engines.urls();
    // Simulated engines answer once a daemon has subscribed to them.
    let worker = |(id, face): (u64, &Face)| format!("[[worker]]\nid = {id}\nendpoint = \"{}\"\n", face.events());
    let workers: String = (1..).zip(&engines.faces).map(worker).collect();
    let starting = tokio::task::spawn_blocking(move || {
        let (files, port) = (tempfile::tempdir().expect("a folder"), free_address());
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()]).expect("a certificate");
        let write = |name, content: &str| secret(files.path(), name, content);
        let (certificate, key) =
            (write("tls.crt", &made.cert.pem()), write("tls.key", &made.signing_key.serialize_pem()));
        let (principals, token) = (write("principals", &format!("gateway-a {TOKEN}\n")), write("token", TOKEN));
        let tables = format!(
            "[remote]\nlisten = \"{port}\"\ncertificate_file = {certificate:?}\nkey_file = {key:?}\n\
             principals_file = {principals:?}\n[[space]]\nmodel = \"demo\"\nblock_size = 16\n{workers}"
        );
        let daemon = Daemon::start(&kvrouted, &tables);
        let connect = Connect::start(&kvrouted, (&port.to_string(), NAME), &token, &certificate);
        let socket = connect.socket().display().to_string();
        let gateway = Gateway::start(&kvrouted, &urls, &["--socket", &socket]);
        (daemon, connect, gateway, files)
    });
    let (daemon, connect, gateway, _files) = starting.await.expect("processes");
    let caller = Caller::of(gateway.url());
    Some(Fixture { _engines: engines, daemon, connect, gateway, caller, _files })
}

impl Fixture {
    /// Requests that were routed, by who decided.
    async fn decided(&self, by: &str) -> u64 {
        let text = Caller::of(self.gateway.admin()).text("/metrics").await;
        let label = format!("decided_by=\"{by}\"");
        let lines = text.lines().filter(|line| line.starts_with("kvrouted_gateway_decided") && line.contains(&label));
        lines.map(|line| line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok()).expect("a count")).sum()
    }

    /// Sends a request, which must be answered by an engine.
    async fn ask(&self, number: u64) {
        let messages = [json!({"role": "user", "content": format!("Number {number}, and some more words.")})];
        let answer = if number.is_multiple_of(2) {
            self.caller.chat(&messages).await
        } else {
            self.caller.stream(&messages).await
        };
        assert!(answer.status == 200 && answer.engine().is_some(), "{:?}", answer.body);
    }

    /// Asks until this decides again.
    async fn until_decided(&self, by: &str) {
        let (before, mut number) = (self.decided(by).await, 0);
        until(&format!("{by} decides"), async || {
            number += 1;
            self.ask(number).await;
            self.decided(by).await > before
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_uses_a_daemon_of_another_host_and_does_without_it_while_it_is_gone() {
    let Some(mut fixture) = start("a gateway with a daemon on another host").await else { return };
    fixture.until_decided("daemon").await;
    let (daemon, alone) = (fixture.decided("daemon").await, fixture.decided("fallback").await);
    for number in 0..10 {
        fixture.ask(number).await;
    }
    assert_eq!(fixture.decided("daemon").await, daemon + 10);
    assert_eq!(fixture.decided("fallback").await, alone, "the daemon decides each");
    let figures = Figures::of(fixture.connect.socket(), "demo");
    figures.until_bookings(0).await;
    for _ in 0..2 {
        fixture.daemon.kill();
        fixture.until_decided("fallback").await;
        for number in 0..10 {
            fixture.ask(number).await;
        }
        let mut daemon = fixture.daemon;
        let starting = tokio::task::spawn_blocking(move || {
            daemon.start_again();
            daemon
        });
        fixture.daemon = starting.await.expect("it starts");
        fixture.until_decided("daemon").await;
    }
    figures.until_bookings(0).await;
}
