//! `serve`: listeners, signals and the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::core::{Core, CoreOptions};
use super::{Failure, Routed};
use crate::config::Config;
use crate::descriptors;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::proxy::{
    Admin, CallerKeys, Choose, ConnectionBounds, LogSocket, PickServer, Proxy, ServerTls, Settings, Socket, read_log,
    serve,
};
use crate::router::DaemonStarter;

/// The files that a SIGHUP reads again.
struct Files {
    keys: Option<Arc<CallerKeys>>,
    tls: Option<Arc<ServerTls>>,
}

impl Files {
    fn read(config: &Config) -> Result<Self, Failure> {
        let keys = config.caller_keys.as_deref().map(CallerKeys::load).transpose().map_err(Failure::Usage)?;
        let tls = config.listen.tls.as_ref().map(ServerTls::load).transpose().map_err(Failure::Usage)?;
        Ok(Self { keys: keys.map(Arc::new), tls: tls.map(Arc::new) })
    }

    fn read_again(&self) {
        if let Some(keys) = &self.keys {
            match keys.reload() {
                Ok(count) => tracing::info!(count, "the caller keys were read again"),
                Err(why) => tracing::error!("{why}; the keys stay as they were"),
            }
        }
        if let Some(tls) = &self.tls {
            match tls.reload() {
                Ok(()) => tracing::info!("the certificate was read again"),
                Err(why) => tracing::error!("{why}; the certificate stays as it was"),
            }
        }
    }
}

/// Checks the files that a configuration names.
pub(super) fn check(config: &Config) -> Result<(), Failure> {
    Files::read(config)?;
    Memory::divide(&mut config.clone(), None).map_err(Failure::Usage)?;
    CoreOptions::of(config).map(|_| ())
}

/// Signals of the operator.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(super) fn take() -> Result<Self, Failure> {
        let take = |kind| signal(kind).map_err(|error| Failure::System(format!("signals cannot be taken: {error}")));
        // A write beyond the limit on a file's size then fails, as on a full disk, and does not end the gateway.
        drop(take(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
        Ok(Self {
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
            hang_up: take(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGTERM or SIGINT; `hang_up` is called for each SIGHUP before it.
    pub(super) async fn end(&mut self, mut hang_up: impl FnMut()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => hang_up(),
            }
        }
    }
}

/// Divides the open files and the memory, and lowers the bounds of the configuration to them. Call it before the
/// sandbox.
pub(super) fn divide(config: &mut Config) -> Result<Arc<Memory>, Failure> {
    descriptors::apply(&mut config.bounds).map_err(Failure::System)?;
    Memory::divide(config, None).map_err(Failure::Usage)
}

/// Runs the gateway until SIGTERM or SIGINT.
pub(super) async fn run(config: Config, memory: Arc<Memory>, starter: Option<DaemonStarter>) -> Result<(), Failure> {
    let files = Files::read(&config)?;
    let options = CoreOptions::of(&config)?.within(&memory).starting_on(starter);
    let mut signals = Signals::take()?;
    let sockets = Sockets::bind(&config, files.tls.clone()).await?;
    let (stop, stopping) = watch::channel(false);
    // /ready and /metrics are there to the end.
    let (end, ending) = watch::channel(false);
    let core = tokio::select! {
        core = Core::start(options, stopping.clone()) => Arc::new(core?),
        () = signals.end(|| {}) => return Ok(()),
    };
    let metrics = Arc::new(Metrics::new());
    let choose: Arc<dyn Choose> = Arc::new(Routed::new(Arc::clone(&core)));
    let proxy = Arc::new(Proxy::new(
        Settings { memory, ..Settings::of(&config) },
        Arc::clone(core.engines()),
        Arc::clone(&choose),
        files.keys.clone(),
        Arc::clone(&metrics),
    ));
    let admin = Arc::new(Admin::new(Arc::clone(core.engines()), choose, Arc::clone(&metrics), stopping.clone()));
    let (mut tasks, mut last_tasks) = sockets.serve(&config, proxy, admin, &metrics, &stopping, ending);
    signals
        .end(|| {
            files.read_again();
            core.read_again();
        })
        .await;
    tracing::info!(drain_ms = config.deadlines.drain.as_millis() as u64, "stopping: requests under way go on");
    // Without receivers all tasks have ended already.
    let _ = stop.send(true);
    let drained = async { while tasks.join_next().await.is_some() {} };
    tokio::select! {
        () = drained => {}
        () = signals.end(|| {}) => tracing::warn!("a second signal: requests under way are cut off"),
    }
    tasks.shutdown().await;
    core.stop().await;
    let _ = end.send(true);
    while last_tasks.join_next().await.is_some() {}
    Ok(())
}

/// Every socket of the gateway, bound before anything else starts.
struct Sockets {
    callers: Socket,
    admin: Option<Socket>,
    picks: Vec<Socket>,
    logs: Vec<LogSocket>,
}

impl Sockets {
    async fn bind(config: &Config, tls: Option<Arc<ServerTls>>) -> Result<Self, Failure> {
        let callers = tcp("listen.address", config.listen.address, tls).await?;
        let admin = match config.admin {
            Some(address) => Some(tcp("admin.address", address, None).await?),
            None => None,
        };
        let mut picks = Vec::new();
        if let Some(address) = config.pick.listen {
            picks.push(tcp("pick.address", address, None).await?);
        }
        if let Some(path) = &config.pick.socket {
            let bound = Socket::unix(path, config.pick.socket_mode).await;
            let failed = |error| Failure::System(format!("pick.socket: {} cannot be bound: {error}", path.display()));
            picks.push(bound.map_err(failed)?);
        }
        let mut logs = Vec::new();
        if let Some(address) = config.pick.log_listen {
            let failed = |error| Failure::System(format!("pick.log_address: {address} cannot be bound: {error}"));
            logs.push(LogSocket::udp(address).await.map_err(failed)?);
        }
        if let Some(path) = &config.pick.log_socket {
            let failed =
                |error| Failure::System(format!("pick.log_socket: {} cannot be bound: {error}", path.display()));
            logs.push(LogSocket::unix(path, config.pick.socket_mode).map_err(failed)?);
        }
        Ok(Self { callers, admin, picks, logs })
    }

    fn serve(
        self,
        config: &Config,
        proxy: Arc<Proxy>,
        admin: Arc<Admin>,
        metrics: &Arc<Metrics>,
        stopping: &watch::Receiver<bool>,
        ending: watch::Receiver<bool>,
    ) -> (JoinSet<()>, JoinSet<()>) {
        let (mut tasks, mut last_tasks) = (JoinSet::new(), JoinSet::new());
        let bounds = ConnectionBounds::of(&config.bounds, config.deadlines.header);
        let drain = config.deadlines.drain;
        let scheme = if config.listen.tls.is_some() { "https" } else { "http" };
        let address = self.callers.address().map_or_else(String::new, |address| address.to_string());
        tracing::info!("serving on {scheme}://{address}");
        if !self.picks.is_empty() {
            let picks = Arc::new(PickServer::new(Arc::clone(&proxy), config.pick.booking));
            tasks.spawn(Arc::clone(&picks).sweep(stopping.clone()));
            for socket in self.picks {
                tasks.spawn(serve(socket, Arc::clone(&picks), bounds, Arc::clone(metrics), stopping.clone(), drain));
            }
            for socket in self.logs {
                tasks.spawn(read_log(socket, Arc::clone(&picks), stopping.clone()));
            }
        }
        if let Some(socket) = self.admin {
            let drain = Duration::from_millis(1);
            last_tasks.spawn(serve(socket, admin, bounds, Arc::clone(metrics), ending, drain));
        }
        tasks.spawn(serve(self.callers, proxy, bounds, Arc::clone(metrics), stopping.clone(), drain));
        (tasks, last_tasks)
    }
}

pub(super) async fn tcp(field: &str, address: SocketAddr, tls: Option<Arc<ServerTls>>) -> Result<Socket, Failure> {
    let bound = Socket::tcp(address, tls).await;
    bound.map_err(|error| {
        Failure::System(format!("{field}: {address} cannot be bound: {error}; free it or write another"))
    })
}
