//! Engines that are pods: the set of engines and the picker's endpoints follow what the API server says.
//!
//! A pod becomes an engine when it is ready. From then on it stays one until it is deleted: while it is not ready, or
//! ends, it gets no new requests, but the daemon keeps its bookings and what is known of its cache. While nothing is
//! heard of the API server, everything stays as it is.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvrouted::ids::Worker;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Failure;
use crate::config::KubernetesConfig;
use crate::engines::{EngineConfig, EngineSet, Secret, WantedEngine};
use crate::epp::{Endpoint, EndpointSource};
use crate::kubernetes::{
    ApiAccess, Fleet, FleetPod, FleetWatch, KubernetesFigure, KubernetesKind, PodSource, PodState,
    SERVICE_ACCOUNT_FOLDER,
};
use crate::limits::KUBERNETES_FIRST_LIST_MAX;
use crate::proxy::Finding;

/// Which pods are the engines, and how they are found.
#[derive(Clone, Debug)]
pub(super) struct KubernetesOptions {
    access: ApiAccess,
    source: PodSource,
    api_key: Option<Secret>,
}

impl KubernetesOptions {
    /// Those of a configuration. In a pod the service account's files are read.
    pub(super) fn of(config: &KubernetesConfig, api_key: Option<Secret>) -> Result<Self, Failure> {
        let (access, own) = match &config.access {
            Some(access) => (access.clone(), "default".to_owned()),
            None => {
                let variable = |name: &str| std::env::var(name).ok();
                ApiAccess::in_cluster(variable, Path::new(SERVICE_ACCOUNT_FOLDER))
                    .map_err(|error| Failure::Usage(error.to_string()))?
            }
        };
        let (namespace, name) = (config.namespace.clone().unwrap_or(own), config.name.clone());
        let source = match config.is_pool {
            true => PodSource::Pool { namespace, name },
            false => PodSource::Service { namespace, name, ports: config.ports.clone() },
        };
        Ok(Self { access, source, api_key })
    }

    /// Starts to watch the pods alone. Call it within the tokio runtime.
    pub(super) fn watch(self) -> FleetWatch {
        FleetWatch::start(self.access, self.source)
    }
}

/// The pods of a running gateway.
pub(super) struct Pods {
    watch: FleetWatch,
    api_key: Option<Secret>,
    /// Why pods are no engines, as it was last said.
    left_out: Mutex<Vec<String>>,
}

impl Pods {
    /// Starts to watch, and takes the pods of the first list, if it comes soon.
    pub(super) async fn start(options: KubernetesOptions, engines: &EngineSet) -> Arc<Self> {
        let KubernetesOptions { access, source, api_key } = options;
        let pods = Self { watch: FleetWatch::start(access, source), api_key, left_out: Mutex::default() };
        if !pods.watch.known(Instant::now() + KUBERNETES_FIRST_LIST_MAX).await {
            tracing::warn!("Kubernetes has not said yet which pods there are; the gateway waits for it");
        }
        pods.apply(engines);
        Arc::new(pods)
    }

    /// Keeps the engines equal to the pods until `stop` says so.
    pub(super) async fn follow(self: Arc<Self>, engines: Arc<EngineSet>, mut stop: watch::Receiver<bool>) {
        let mut fleets = self.watch.fleets();
        fleets.mark_changed(); // one may have come since the start
        loop {
            tokio::select! {
                changed = fleets.changed() => match changed {
                    Ok(()) => self.apply(&engines),
                    Err(_) => return tracing::error!("the pods are no longer watched: the watch has ended"),
                },
                _ = stop.wait_for(|stops| *stops) => return,
            }
        }
    }

    fn apply(&self, engines: &EngineSet) {
        let fleet = self.watch.now();
        if !fleet.is_known {
            return;
        }
        let known: BTreeSet<u64> = engines.iter().map(|engine| engine.worker()).collect();
        let is_engine = |pod: &&FleetPod| pod.state == PodState::Ready || known.contains(&pod.worker);
        let wanted: Vec<WantedEngine> = fleet.pods.iter().filter(is_engine).map(|pod| self.wanted(pod)).collect();
        for pod in fleet.pods.iter().filter(|pod| pod.state == PodState::Ready && !known.contains(&pod.worker)) {
            tracing::info!(worker = pod.worker, pod = pod.name, address = %pod.address, "a pod is ready");
        }
        for engine in engines.iter().filter(|engine| !fleet.pods.iter().any(|pod| pod.worker == engine.worker())) {
            tracing::info!(worker = engine.worker(), url = %engine.base(), "a pod is gone");
        }
        let problems: Vec<String> = engines.replace(wanted).iter().map(ToString::to_string).collect();
        let mut left_out = self.left_out.lock();
        if *left_out != problems {
            problems.iter().for_each(|problem| tracing::warn!("a pod is left out: {problem}"));
            *left_out = problems;
        }
    }

    fn wanted(&self, pod: &FleetPod) -> WantedEngine {
        let first = SocketAddr::new(pod.address, pod.ports.first().copied().unwrap_or_default());
        let rank_ports = pod.ports.get(1..).unwrap_or_default().to_vec();
        let api_key = self.api_key.clone();
        let config = EngineConfig { api_key, rank_ports, ..EngineConfig::new(pod.worker, format!("http://{first}")) };
        WantedEngine { config, takes_requests: pod.state == PodState::Ready }
    }

    /// The picker's endpoints.
    pub(super) fn endpoints(&self) -> PodEndpoints {
        let mut fleets = self.watch.fleets();
        fleets.mark_changed();
        PodEndpoints { fleets, given: None }
    }

    /// What the operator should know.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let fleet = self.watch.now();
        let problems = fleet.problems.iter();
        let mut findings: Vec<Finding> =
            problems.map(|it| Finding { what: it.what.clone(), remedy: it.remedy.clone() }).collect();
        let left_out = self.left_out.lock();
        let of_pod = |what: &String| Finding { what: format!("a pod is left out: {what}"), remedy: String::new() };
        findings.extend(left_out.iter().map(of_pod));
        findings
    }

    /// Metrics, in the text format of OpenMetrics.
    pub(super) fn metrics(&self, text: &mut String) {
        let fleet = self.watch.now();
        let figures = self.watch.figures();
        let name = "kvrouted_gateway_kubernetes_requests";
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} Questions to the Kubernetes API, and what came.\n# TYPE {name} counter");
        for kind in KubernetesKind::ALL {
            for figure in KubernetesFigure::ALL {
                let (resource, event, count) = (kind.label(), figure.label(), figures.of(kind).get(figure));
                let _ = writeln!(text, "{name}_total{{resource=\"{resource}\",event=\"{event}\"}} {count}");
            }
        }
        let name = "kvrouted_gateway_kubernetes_current";
        let help = "Whether changes of the pods are heard of: 0 = the pods are those that were known last";
        let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} gauge\n{name} {}", u8::from(fleet.is_current));
        let name = "kvrouted_gateway_kubernetes_pods";
        let _ = writeln!(text, "# HELP {name} Pods of the service or the pool.\n# TYPE {name} gauge");
        for state in PodState::ALL {
            let count = fleet.pods.iter().filter(|pod| pod.state == state).count();
            let _ = writeln!(text, "{name}{{state=\"{}\"}} {count}", state.label());
        }
    }
}

/// The endpoints of ready pods, as the picker takes them.
pub(super) struct PodEndpoints {
    fleets: watch::Receiver<Arc<Fleet>>,
    given: Option<Vec<Endpoint>>,
}

impl EndpointSource for PodEndpoints {
    async fn next(&mut self) -> Vec<Endpoint> {
        loop {
            if self.fleets.changed().await.is_err() {
                // The end of the watch is logged where the engines follow it.
                return std::future::pending().await;
            }
            let fleet = Arc::clone(&self.fleets.borrow_and_update());
            let endpoints = endpoints(&fleet);
            if fleet.is_known && self.given.as_ref() != Some(&endpoints) {
                self.given = Some(endpoints.clone());
                return endpoints;
            }
        }
    }
}

fn endpoints(fleet: &Fleet) -> Vec<Endpoint> {
    let of_pod = |pod: &FleetPod| {
        let (worker, address) = (pod.worker, pod.address);
        let ranked = (0_u32..).zip(pod.ports.clone());
        ranked.map(move |(rank, port)| Endpoint {
            worker: Worker::new(worker, rank),
            address: SocketAddr::new(address, port),
        })
    };
    fleet.pods.iter().filter(|pod| pod.state == PodState::Ready).flat_map(of_pod).collect()
}
