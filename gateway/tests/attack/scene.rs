//! A gateway or a picker under attack, simulated engines, and another caller whose every answer must be the engines'.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use kvrouted_gateway::demo::{MODEL, SimulatedEngines};
use tokio::runtime::Runtime;

use crate::attackers::Attackers;
use crate::http1::{ask, chat, connect, posted};
use crate::kit::ports::free_address;
use crate::kit::{Figures, Gateway, PATIENCE, kvrouted_or_skip, open_descriptors};
use crate::player::{self, CHAT, Connection, opening, request_body, response_body, response_headers};
use crate::trial::{Bystander, Trial, Watch};

/// Connections to engines and to the daemon that come and go.
const DESCRIPTORS_MARGIN: usize = 24;
/// Simulated engines.
const ENGINES: usize = 2;

/// What is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Proxy,
    Picker,
}

/// See the head of the file.
pub(crate) struct Scene {
    kind: Kind,
    pub(crate) gateway: Gateway,
    /// Where its metrics are.
    pub(crate) admin: String,
    figures: Figures,
    descriptors_before: usize,
    watch: Watch,
    bystander: Bystander,
    engines: SimulatedEngines,
    runtime: Runtime,
}

impl Scene {
    /// A gateway with `tables` in its configuration, in front of two simulated engines and of others. `None`, with a
    /// message, if the daemon is not built.
    pub(crate) fn proxy(tables: &str, others: &[String]) -> Option<Self> {
        let (kvrouted, runtime, engines) = engines()?;
        let urls = [engines.urls(), others.to_vec()].concat();
        let gateway = runtime.block_on(async { Gateway::start_with(&kvrouted, tables, &urls, &[]) });
        let admin = gateway.admin().to_owned();
        Some(Self::begin(Kind::Proxy, runtime, engines, gateway, admin))
    }

    /// A picker with these flags.
    pub(crate) fn picker(flags: &[&str]) -> Option<Self> {
        let (kvrouted, runtime, engines) = engines()?;
        let admin = free_address().to_string();
        let flags = [&["--plaintext", "--admin", admin.as_str()], flags].concat();
        let gateway = Gateway::start_picker(&kvrouted, &engines.urls(), &flags);
        Some(Self::begin(Kind::Picker, runtime, engines, gateway, admin))
    }

    fn begin(kind: Kind, runtime: Runtime, engines: SimulatedEngines, mut gateway: Gateway, admin: String) -> Self {
        let (_, socket) = gateway.daemon();
        let figures = {
            let _inside = runtime.enter();
            Figures::of(&socket, MODEL)
        };
        let mut asks: Box<dyn FnMut() -> Result<(), String> + Send> = match kind {
            Kind::Proxy => Box::new(asks_proxy(gateway.url())),
            Kind::Picker => Box::new(asks_picker(gateway.url(), &engines.urls())),
        };
        // Until the engines are known, there is nothing to attack.
        let by = Instant::now() + PATIENCE;
        while let Err(why) = asks() {
            assert!(Instant::now() < by, "the first answer: {why}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let bystander = Bystander::begin(asks);
        let (watch, descriptors_before) = (Watch::begin(gateway.pid()), open_descriptors(gateway.pid()));
        Self { kind, gateway, admin, figures, descriptors_before, watch, bystander, engines, runtime }
    }

    /// `host:port` of the callers' or Envoy's side.
    pub(crate) fn at(&self) -> String {
        self.gateway.url().trim_start_matches("http://").to_owned()
    }

    /// Processes of a role come for the time of the trial.
    pub(crate) fn attacked_by(&self, trial: &Trial, role: &'static str, count: u64) -> Attackers {
        Attackers::start(role, count, &self.at(), trial.lasts())
    }

    /// The same, with more in their orders after a `#`.
    pub(crate) fn attacked_with(&self, trial: &Trial, role: &'static str, count: u64, with: &str) -> Attackers {
        Attackers::start(role, count, &format!("{}#{with}", self.at()), trial.lasts())
    }

    /// The attack is over: the gateway has held if the other caller's answers were right, its memory within the bound,
    /// no booking of the attackers is left, and its descriptors are back.
    #[track_caller]
    pub(crate) fn end(self, trial: &mut Trial, memory_mib_max: u64) {
        let Self { kind, gateway, figures, descriptors_before, watch, bystander, engines, runtime, .. } = self;
        trial.answered(bystander.end());
        let by = Instant::now() + Duration::from_secs(60);
        loop {
            let (bookings, open) = (runtime.block_on(figures.bookings()), open_descriptors(gateway.pid()));
            if bookings == Some(0) && open <= descriptors_before + DESCRIPTORS_MARGIN {
                break;
            }
            assert!(Instant::now() < by, "{bookings:?} bookings, {open} of {descriptors_before} descriptors are left");
            std::thread::sleep(Duration::from_millis(50));
        }
        trial.used(watch.end(), memory_mib_max);
        let answer = match kind {
            Kind::Proxy => asks_proxy(gateway.url())(),
            Kind::Picker => asks_picker(gateway.url(), &engines.urls())(),
        };
        trial.must(answer.is_ok(), || format!("after the attack: {answer:?}"));
        let panics: Vec<String> = gateway.log().into_iter().filter(|line| line.contains("panicked")).collect();
        trial.must(panics.is_empty(), || format!("{panics:?}"));
        drop((gateway, figures, engines, runtime));
    }
}

fn engines() -> Option<(std::path::PathBuf, Runtime, SimulatedEngines)> {
    let kvrouted = kvrouted_or_skip("an attack on the gateway")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let engines = runtime.block_on(SimulatedEngines::start(&kvrouted, ENGINES)).expect("engines");
    Some((kvrouted, runtime, engines))
}

/// Asks for a chat, over one connection; the answer must be what a simulated engine says.
fn asks_proxy(url: &str) -> impl FnMut() -> Result<(), String> + Send + use<> {
    let (url, mut stream) = (url.to_owned(), None);
    let request = posted("/v1/chat/completions", chat(MODEL, "Who is there?", false).to_string().as_bytes());
    move || {
        let open = stream.take().map_or_else(|| connect(&url, Duration::from_secs(60)), Ok);
        let mut open = open.map_err(|error| format!("no connection: {error}"))?;
        let reply = ask(&mut open, &request).map_err(|error| format!("no reply: {error}"))?;
        let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap_or_default();
        let text = body["choices"][0]["message"]["content"].as_str().unwrap_or_default();
        let read = format!("has read {} tokens and says: ", body["usage"]["prompt_tokens"]);
        if reply.status == 200 && text.contains(&read) {
            stream = Some(open);
            return Ok(());
        }
        Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)))
    }
}

/// Plays an Envoy for one request at a time, over one connection; the list must name the engines.
fn asks_picker(at: &str, engines: &[String]) -> impl FnMut() -> Result<(), String> + Send + use<> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (at, mut connection): (SocketAddr, Option<Connection>) = (at.parse().expect("an address"), None);
    let engines: Vec<String> = engines.iter().map(|url| url.trim_start_matches("http://").to_owned()).collect();
    let body = chat(MODEL, "Who is there?", false).to_string();
    move || {
        let asked = AssertUnwindSafe(|| {
            runtime.block_on(async {
                let open = match connection.take() {
                    Some(open) => open,
                    None => Connection::over(tokio::net::TcpStream::connect(at).await.expect("accepted")).await,
                };
                let mut stream = open.stream().await;
                stream.send(opening(&CHAT, false)).await;
                stream.send(request_body(body.clone(), true)).await;
                let list = stream.chosen().await;
                let back = stream.request_body().await.0;
                assert_eq!(back, body.as_bytes(), "the body has changed");
                stream.send(response_headers(&[(":status", "200")], false)).await;
                stream.answer().await;
                stream.send(response_body("{}", true)).await;
                stream.answer().await;
                stream.half_close().await;
                stream.is_over().await;
                connection = Some(open);
                list
            })
        });
        // The player panics where an answer is wrong, and says how.
        let list = catch_unwind(asked).map_err(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            said.or(panic.downcast_ref::<&str>().map(|said| (*said).to_owned())).unwrap_or_default()
        })?;
        let is_known = list.split(',').all(|endpoint| engines.iter().any(|engine| engine == endpoint));
        if is_known && player::address(list.split(',').next().unwrap_or_default()).port() > 0 {
            return Ok(());
        }
        Err(format!("the list is {list}"))
    }
}
