//! `epp`: the endpoint picker's listener, its endpoints, signals and the end.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvrouted::ids::Worker;
use tokio::sync::watch;

use super::core::{Core, CoreOptions};
use super::picked::{CoreChooser, PickRules};
use super::proxy::{Signals, tcp};
use super::routed::counter;
use super::{Failure, Routed};
use crate::api::ApiError;
use crate::config::Config;
use crate::descriptors;
use crate::engines::{Engine, EngineSet};
use crate::epp::{
    ConfiguredEndpoints, EndpointConfig, Endpoints, EppCounters, EppOptions, EppServer, Health, Services, follow,
};
use crate::limits::{EPP_READINESS_INTERVAL, EPP_STREAMS_MAX};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::proxy::{Admin, Asked, BoxFuture, Choice, Choose, ConnectionBounds, Finding, serve};
use crate::router::DaemonStarter;

/// Divides the memory, and lowers the bounds of the configuration to it. Call it before the sandbox.
pub(super) fn divide(config: &mut Config, options: &EppOptions) -> Result<Arc<Memory>, Failure> {
    descriptors::raise();
    config.bounds.body_bytes_max = options.body_bytes_max;
    config.bounds.bodies_bytes_max = options.bodies_bytes_max.max(options.body_bytes_max);
    Memory::divide(config, Some(EPP_STREAMS_MAX)).map_err(Failure::Usage)
}

/// Runs the picker until SIGTERM or SIGINT.
pub(super) async fn run(
    config: Config,
    options: &EppOptions,
    memory: Arc<Memory>,
    starter: Option<DaemonStarter>,
) -> Result<(), Failure> {
    options.check().map_err(|error| Failure::Usage(error.to_string()))?;
    if config.kubernetes.is_some() && (!options.endpoints.is_empty() || options.endpoints_file.is_some()) {
        let why = "--endpoint and --endpoints name addresses that Kubernetes names already; leave them out";
        return Err(Failure::Usage(why.to_owned()));
    }
    let core_options = CoreOptions::of(&config)?.within(&memory).starting_on(starter);
    let mut signals = Signals::take()?;
    let server = EppServer::bind(&options.listen, options.certificate()).await;
    let server = server.map_err(|error| Failure::System(error.to_string()))?;
    let admin = match config.admin {
        Some(address) => Some(tcp("admin.address", address, None).await?),
        None => None,
    };
    let (stop, stopping) = watch::channel(false);
    let (end, ending) = watch::channel(false);
    let core = Arc::new(Core::start(core_options, stopping.clone()).await?);
    let picker = Picker::new(&core, options, &config);
    let admin = admin.map(|socket| {
        let facts = Arc::new(Facts { routed: Routed::new(Arc::clone(&core)), counters: picker.services.counters() });
        let metrics = Arc::new(Metrics::new());
        let operator = Admin::new(Arc::clone(core.engines()), facts, Arc::clone(&metrics), stopping.clone());
        let bounds = ConnectionBounds::of(&config.bounds, config.deadlines.header);
        tokio::spawn(serve(socket, Arc::new(operator), bounds, metrics, ending, Duration::from_millis(1)))
    });
    let place = server.address().map_or_else(|| format!("{:?}", options.listen), |address| address.to_string());
    tracing::info!(tls = options.certificate().is_some(), "serving on {place}");
    let drain = options.drain();
    let mut running = std::pin::pin!(picker.run(server, stopping, drain));
    tokio::select! {
        () = &mut running => {}
        () = signals.end(|| core.read_again()) => {
            tracing::info!(drain_ms = drain.as_millis() as u64, "stopping: answers under way go on");
            // Without receivers the picker has ended already.
            let _ = stop.send(true);
            tokio::select! {
                () = &mut running => {}
                () = signals.end(|| {}) => tracing::warn!("a second signal: answers under way are cut"),
            }
        }
    }
    core.stop().await;
    let _ = end.send(true); // the operator's port is gone already
    if let Some(admin) = admin {
        let _ = admin.await; // it ended with a panic, which the log has
    }
    Ok(())
}

/// What serves.
struct Picker {
    core: Arc<Core>,
    services: Services<CoreChooser>,
    health: Health,
    endpoints: Endpoints,
    configured: Vec<EndpointConfig>,
    file: Option<PathBuf>,
}

impl Picker {
    fn new(core: &Arc<Core>, options: &EppOptions, config: &Config) -> Self {
        let (health, endpoints) = (Health::new(), Endpoints::default());
        let rules = PickRules {
            objectives: config.objectives.clone(),
            list_length: options.list_length(),
            tells_worker: config.forward.tells_worker,
        };
        let chooser = CoreChooser::new(Arc::clone(core), rules, endpoints.clone());
        let configured = match options.endpoints.is_empty() && options.endpoints_file.is_none() {
            true => of_engines(core.engines()),
            false => options.endpoints.clone(),
        };
        let services = Services::within(chooser, health.clone(), options.limits(), core.memory());
        let file = options.endpoints_file.clone();
        Self { core: Arc::clone(core), services, health, endpoints, configured, file }
    }

    /// Serves until `stopping` says so and answers under way are over, or have taken longer than `drain`.
    async fn run(self, server: EppServer, mut stopping: watch::Receiver<bool>, drain: Duration) {
        let Self { core, services, health, endpoints, configured, file } = self;
        let source = async {
            match core.pods() {
                Some(pods) => follow(pods.endpoints(), endpoints.clone()).await,
                None => follow(ConfiguredEndpoints::new(configured, file), endpoints.clone()).await,
            }
        };
        let readiness = async {
            loop {
                health.set_ready(core.router().is_ready() && !endpoints.now().is_empty());
                tokio::time::sleep(EPP_READINESS_INTERVAL).await;
            }
        };
        let stopped = async {
            let _ = stopping.wait_for(|stops| *stops).await; // without a sender too
        };
        tokio::select! {
            () = server.serve(services, health.clone(), stopped, drain) => {}
            () = source => {}
            () = readiness => {}
        }
    }
}

/// What the operator's port says: the core's facts and the picker's counts.
struct Facts {
    routed: Routed,
    counters: Arc<EppCounters>,
}

impl Choose for Facts {
    fn choose<'a>(&'a self, asked: Asked<'a>) -> BoxFuture<'a, Result<Choice, ApiError>> {
        self.routed.choose(asked)
    }

    fn report_failure(&self, worker: Worker, model: &str, why: &str) {
        self.routed.report_failure(worker, model, why);
    }

    fn is_ready(&self) -> bool {
        self.routed.is_ready()
    }

    fn findings(&self) -> Vec<Finding> {
        self.routed.findings()
    }

    fn metrics(&self) -> String {
        let mut text = self.routed.metrics();
        let EppCounters {
            asked,
            chosen,
            refused,
            memory_short,
            abandoned,
            completed,
            cut,
            observed,
            broken,
            streams_open,
        } = &*self.counters;
        let requests = [
            ("asked", asked),
            ("chosen", chosen),
            ("refused", refused),
            ("memory_short", memory_short),
            ("abandoned", abandoned),
            ("completed", completed),
            ("cut", cut),
            ("observed", observed),
            ("broken", broken),
        ];
        let counts = requests.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        counter(&mut text, "epp_requests", "Requests of Envoy, by what became of them", "event", counts);
        let name = "kvrouted_gateway_epp_streams_open";
        let open = streams_open.load(Ordering::Relaxed);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} Streams of Envoy that are open.\n# TYPE {name} gauge\n{name} {open}");
        text
    }
}

/// Each engine at the host and port of its URL.
fn of_engines(engines: &EngineSet) -> Vec<EndpointConfig> {
    let endpoint = |engine: Arc<Engine>| {
        let base = engine.base();
        let port = base.port_u16().unwrap_or(if base.scheme_str() == Some("https") { 443 } else { 80 });
        let host = base.host()?.trim_start_matches('[').trim_end_matches(']').to_owned();
        Some(EndpointConfig { worker: engine.worker(), host, ports: vec![port] })
    };
    engines.iter().filter_map(endpoint).collect()
}
