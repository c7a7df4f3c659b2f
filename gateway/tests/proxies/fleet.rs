//! A real proxy in front of simulated engines, with a gateway and a daemon as processes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::BodyExt as _;
use kvrouted_gateway::demo::SimulatedEngines;
use serde_json::{Value, json};

use crate::kit::ports::free_address;
use crate::kit::{Caller, Figures, Gateway, chat, kvrouted_or_skip};
use crate::process::{Kind, Process};

const CHAT_PATH: &str = "/v1/chat/completions";

pub(crate) struct Fleet {
    kvrouted: PathBuf,
    engines: SimulatedEngines,
    gateway: Option<Gateway>,
    figures: Option<Figures>,
    pick: SocketAddr,
    log: SocketAddr,
    /// Calls the proxy.
    pub(crate) caller: Caller,
    _process: Process,
}

impl Fleet {
    /// `None` where the proxy is not installed, or the daemon is not built.
    pub(crate) async fn start(kind: Kind) -> Option<Self> {
        let program = kind.program_or_skip()?;
        let kvrouted = kvrouted_or_skip("a proxy and simulated engines")?;
        let engines = SimulatedEngines::start(&kvrouted, 3).await.expect("engines");
        let addresses: Vec<_> = engines.faces.iter().map(kvrouted_gateway::demo::Face::address).collect();
        let (pick, log) = (free_address(), free_address());
        let process = Process::start(kind, &program, &addresses, pick, log).await;
        let caller = Caller::of(&format!("http://{}", process.callers));
        let mut fleet = Self { kvrouted, engines, gateway: None, figures: None, pick, log, caller, _process: process };
        fleet.start_gateway().await;
        Some(fleet)
    }

    /// Starts the gateway where the proxy looks for it.
    pub(crate) async fn start_gateway(&mut self) {
        // Costs of this mode do not depend on the time that simulated engines and a busy machine take.
        let mode = "daemon.mode = \"kv\"\n";
        let tables = format!("{mode}pick.address = \"{}\"\npick.log_address = \"{}\"\n", self.pick, self.log);
        let (kvrouted, urls) = (self.kvrouted.clone(), self.engines.urls());
        let starting = tokio::task::spawn_blocking(move || {
            let mut gateway = Gateway::start_with(&kvrouted, &tables, &urls, &[]);
            let (_, socket) = gateway.daemon();
            (gateway, socket)
        });
        let (gateway, socket) = starting.await.expect("a gateway");
        (self.gateway, self.figures) = (Some(gateway), Some(Figures::of(&socket, "demo")));
    }

    /// Waits until every worker is exact: until an engine has published something, nothing is known of it.
    pub(crate) async fn until_exact(&self) {
        for face in &self.engines.faces {
            let prompt = json!({"role": "user", "content": "A first prompt that fills more than a block."});
            let answer = Caller::of(&face.url()).chat(&[prompt]).await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
        }
        self.figures().until_exact(self.engines.faces.len()).await;
    }

    /// Ends the gateway as SIGKILL does.
    pub(crate) async fn kill_gateway(&mut self) {
        let gateway = self.gateway.take();
        self.figures = None;
        tokio::task::spawn_blocking(move || gateway.expect("a gateway").kill()).await.expect("its end");
    }

    fn figures(&self) -> &Figures {
        self.figures.as_ref().expect("a gateway that runs")
    }

    /// Conversations whose next turn finds its last one in the engine's cache.
    pub(crate) async fn converse(&self, names: [char; 4]) {
        for name in names {
            let mut messages = vec![system(name), user("What is a prefix?")];
            for turn in 0..4 {
                let answer = match turn % 2 {
                    0 => self.caller.chat(&messages).await,
                    _ => self.caller.stream(&messages).await,
                };
                assert!(answer.status == 200 && answer.is_done, "{:?}", answer.body);
                let (prompt, cached) = (answer.prompt_tokens().expect("usage"), answer.cached_tokens().expect("usage"));
                if turn > 0 {
                    assert!(cached * 2 > prompt, "turn {turn} of {name}: {cached} of {prompt} tokens were cached");
                }
                messages.push(json!({"role": "assistant", "content": answer.text}));
                // An engine does not compute the last token of its output.
                let held = (prompt + answer.completion_tokens().expect("usage") - 1) / 16;
                let body = json!({"messages": messages, "add_generation_prompt": false});
                let tokens = Caller::of(&self.engines.faces[0].url()).post("/tokenize", &body).await;
                let tokens: Vec<u32> = serde_json::from_value(tokens.body["tokens"].clone()).expect("tokens");
                self.figures().until_held(&tokens, u32::try_from(held).expect("a short chat")).await;
                messages.push(user("Go on."));
            }
        }
        self.figures().until_bookings(0).await;
    }

    /// 50 requests at once, each with the engine's own answer.
    pub(crate) async fn fifty_at_once(&self) {
        let direct = Caller::of(&self.engines.faces[0].url());
        let mut running = tokio::task::JoinSet::new();
        for number in 0..50 {
            let (caller, direct) = (self.caller.clone(), direct.clone());
            running.spawn(async move {
                let messages = [system('e'), user(&format!("Number {number}"))];
                let answer = match number % 2 {
                    0 => caller.chat(&messages).await,
                    _ => caller.stream(&messages).await,
                };
                assert!(answer.status == 200 && answer.is_done, "{:?}", answer.body);
                assert_eq!(answer.text, direct.chat(&messages).await.text);
            });
        }
        while let Some(ended) = running.join_next().await {
            ended.expect("a good answer");
        }
        self.figures().until_bookings(0).await;
    }

    /// Callers go on while an engine is killed: none gets an error instead of a reply's beginning.
    pub(crate) async fn an_engine_dies_under_load(&self) {
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = tokio::task::JoinSet::new();
        for number in 0..12 {
            let (caller, stop) = (self.caller.clone(), Arc::clone(&stop));
            running.spawn(async move {
                let (mut whole, mut broken, mut turn) = (0, 0, 0);
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    let messages = [system('k'), user(&format!("Number {number}, turn {turn}"))];
                    let body = chat(&messages, turn % 2 == 0);
                    let response = caller.send(CHAT_PATH, &body, &[]).await.expect("the beginning of a reply");
                    assert_eq!(response.status(), 200, "caller {number}, turn {turn}");
                    match response.into_body().collect().await {
                        Ok(_) => whole += 1,
                        Err(_) => broken += 1,
                    }
                }
                (whole, broken)
            });
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        self.engines.faces[1].stop().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        stop.store(true, Ordering::Relaxed);
        let (mut whole, mut broken) = (0, 0);
        while let Some(ended) = running.join_next().await {
            let (more_whole, more_broken) = ended.expect("no error before the first byte");
            whole += more_whole;
            broken += more_broken;
        }
        // Only answers that had begun break off: at most one of each caller.
        assert!(whole > 24 && broken <= 12, "{whole} whole, {broken} broken");
        self.figures().until_bookings(0).await;
    }
}

/// A system prompt of several blocks, which differs by its first byte.
fn system(name: char) -> Value {
    let text = format!("{name}: {}", "You answer briefly, in plain words, and you never guess. ".repeat(6));
    json!({"role": "system", "content": text})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}
