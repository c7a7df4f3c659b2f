//! A gateway in front of doubles.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted_gateway::config::{Config, Flags, load};
use kvrouted_gateway::engines::{ClientTls, EngineConfig, EngineSet};
use kvrouted_gateway::memory::Memory;
use kvrouted_gateway::metrics::Metrics;
use kvrouted_gateway::proxy::{
    Admin, CallerKeys, ConnectionBounds, PickServer, Proxy, ServerTls, Settings, Socket, serve,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::choice::FixedChoice;
use super::ends;
use super::engine::EngineDouble;

/// The memory budget of a gateway. Only its tests say how much of it is used.
pub(crate) const MEMORY_BYTES: u64 = 1000;

pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) pick: SocketAddr,
    pub(crate) picks: Arc<PickServer>,
    pub(crate) choice: FixedChoice,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) callers: JoinHandle<()>,
    _end: watch::Sender<bool>,
}

/// A configuration for engines, with short deadlines where a test waits for them.
pub(crate) fn config(urls: &[String]) -> Config {
    load(None, &Flags { engines: urls.to_vec(), ..Flags::default() }).expect("a good configuration")
}

impl Gateway {
    pub(crate) async fn start(engines: &[&EngineDouble]) -> Self {
        Self::with(engines, |_| {}).await
    }

    /// A gateway with a changed configuration.
    pub(crate) async fn with(engines: &[&EngineDouble], change: impl FnOnce(&mut Config)) -> Self {
        let urls: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
        let ids: Vec<u64> = (1..=urls.len() as u64).collect();
        let mut config = config(&urls);
        change(&mut config);
        Self::of(&config, FixedChoice::of(&ids), |_| {}).await
    }

    pub(crate) async fn of(config: &Config, choice: FixedChoice, change: impl Fn(&mut EngineConfig)) -> Self {
        let configs = config.engines.iter().map(|entry| {
            let mut engine = EngineConfig::new(entry.worker, &entry.url);
            change(&mut engine);
            engine
        });
        let engines = EngineSet::of(configs.collect(), &ClientTls::default()).expect("good engines");
        let engines = Arc::new(engines);
        engines.learn_all(Instant::now() + Duration::from_secs(10)).await;
        let keys = config.caller_keys.as_deref().map(|path| Arc::new(CallerKeys::load(path).expect("good keys")));
        let tls = config.listen.tls.as_ref().map(|files| Arc::new(ServerTls::load(files).expect("good TLS files")));
        let metrics = Arc::new(Metrics::new());
        let choose = Arc::new(choice.clone());
        let memory = Arc::new(Memory::undivided(MEMORY_BYTES));
        let settings = Settings { memory: Arc::clone(&memory), ..Settings::of(config) };
        let proxy = Proxy::new(settings, Arc::clone(&engines), Arc::clone(&choose) as _, keys, Arc::clone(&metrics));
        let proxy = Arc::new(proxy);
        let picks = Arc::new(PickServer::new(Arc::clone(&proxy), config.pick.booking));
        let (stop, stopping) = watch::channel(false);
        let admin = Arc::new(Admin::new(engines, choose, Arc::clone(&metrics), stopping.clone()));
        let bounds = ConnectionBounds::of(&config.bounds, config.deadlines.header);
        let drain = config.deadlines.drain;
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = Socket::tcp(local, tls).await.expect("a port");
        let address = socket.address().expect("its address");
        let callers = tokio::spawn(serve(socket, proxy, bounds, Arc::clone(&metrics), stopping.clone(), drain));
        let socket = Socket::tcp(local, None).await.expect("a port");
        let admin_address = socket.address().expect("its address");
        let (end, ending) = watch::channel(false);
        tokio::spawn(serve(socket, admin, bounds, Arc::clone(&metrics), ending, drain));
        let socket = Socket::tcp(local, None).await.expect("a port");
        let pick = socket.address().expect("its address");
        tokio::spawn(serve(socket, Arc::clone(&picks), bounds, Arc::clone(&metrics), stopping, drain));
        Self { address, admin: admin_address, pick, picks, choice, metrics, memory, stop, callers, _end: end }
    }

    /// Waits until nothing is booked and nothing is under way.
    pub(crate) async fn settles(&self) {
        super::until("bookings and requests go back to zero", || {
            self.choice.open() == 0 && self.metrics.text("").contains("kvrouted_gateway_requests_in_flight 0\n")
        })
        .await;
    }

    /// Stops, and waits until the callers are served.
    pub(crate) async fn stops(self) {
        let _ = self.stop.send(true);
        ends("the gateway's end", self.callers).await.expect("no panic");
    }
}
