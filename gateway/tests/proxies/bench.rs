//! A real proxy between callers that speak bytes, three engines that behave as told, and a pick port whose choice is
//! fixed.

use std::net::SocketAddr;
use std::sync::Arc;

use kvrouted_gateway::engines::RankSource;
use kvrouted_gateway::proxy::{LogSocket, read_log};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::process::{Kind, Process};
use crate::proxy_support::caller::{Reply, exchange};
use crate::proxy_support::choice::FixedChoice;
use crate::proxy_support::engine::{Behaviour, COMPLETION, EngineDouble, json};
use crate::proxy_support::gateway::{Gateway, config};
use crate::proxy_support::until;

pub(crate) struct Bench {
    pub(crate) kind: Kind,
    /// Engines 1 to 3; `None` = ended.
    engines: Vec<Option<EngineDouble>>,
    pub(crate) gateway: Gateway,
    pub(crate) proxy: SocketAddr,
    _process: Process,
    _log: watch::Sender<bool>,
}

impl Bench {
    /// `None` where the proxy is not installed.
    pub(crate) async fn start(kind: Kind) -> Option<Self> {
        Self::with_ranks(kind, &[1, 1, 1]).await
    }

    /// With this many ranks of each engine.
    pub(crate) async fn with_ranks(kind: Kind, ranks: &[u32]) -> Option<Self> {
        let program = kind.program_or_skip()?;
        let mut engines = Vec::new();
        for _ in 0..3 {
            engines.push(Some(EngineDouble::start(Behaviour::Answer(json(200, COMPLETION))).await));
        }
        let addresses: Vec<_> = engines.iter().flatten().map(|engine| engine.address).collect();
        let urls: Vec<_> = engines.iter().flatten().map(EngineDouble::url).collect();
        let gateway = Gateway::of(&config(&urls), FixedChoice::of(&[1, 2, 3]), |engine| {
            let source = |rank| RankSource { rank, endpoint: None, replay: None, topic: String::new() };
            engine.named.ranks = (0..ranks[engine.worker as usize - 1]).map(source).collect();
        })
        .await;
        let socket = LogSocket::udp(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a socket");
        let log = socket.address().expect("its address");
        let (stop, stopping) = watch::channel(false);
        tokio::spawn(read_log(socket, Arc::clone(&gateway.picks), stopping));
        let process = Process::start(kind, &program, &addresses, gateway.pick, log).await;
        Some(Self { kind, engines, proxy: process.callers, gateway, _process: process, _log: stop })
    }

    /// Engine 1, 2 or 3.
    pub(crate) fn engine(&self, id: usize) -> &EngineDouble {
        self.engines[id - 1].as_ref().expect("an engine that runs")
    }

    /// Ends an engine: its port refuses connections.
    pub(crate) fn end(&mut self, id: usize) {
        self.engines[id - 1] = None;
    }

    /// Names the engines in this order.
    pub(crate) fn order(&self, ids: &[u64]) {
        self.gateway.choice.order(&ids.iter().map(|id| (*id, 0)).collect::<Vec<_>>());
    }

    /// How many requests each engine had.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.as_ref().map_or(0, |engine| engine.seen().len())).collect()
    }

    /// Sends a request and reads the reply to its end.
    pub(crate) async fn ask(&self, request: &[u8]) -> Reply {
        exchange(self.proxy, request).await
    }

    /// Sends a request, and leaves the reply to the test.
    pub(crate) async fn begin(&self, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.proxy).await.expect("a connection");
        stream.write_all(request).await.expect("sent");
        stream
    }

    /// Waits until every pick has ended.
    pub(crate) async fn settles(&self) {
        until("bookings go back to zero", || {
            self.gateway.choice.open() == 0 && self.gateway.metrics.text("").contains("kvrouted_gateway_picks_open 0\n")
        })
        .await;
    }
}
