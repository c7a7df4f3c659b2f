//! The fleet of one service or one pool, kept up to date.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;

use super::access::ApiAccess;
use super::figures::KubernetesFigures;
use super::fleet::{Fleet, Problem, label_selector, of_pool, of_slices};
use super::objects::{InferencePool, Pod};
use super::ports::PortName;
use super::reflector::{Observed, Reflector, Selection};

/// Whose pods are the engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodSource {
    /// The pods behind a service, by its EndpointSlices.
    Service {
        /// The service's namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The port of each rank; empty = the service's only one.
        ports: Vec<PortName>,
    },
    /// The pods of an InferencePool.
    Pool {
        /// The pool's namespace, which is that of its pods.
        namespace: String,
        /// Its name.
        name: String,
    },
}

/// The fleet as it is now. The watch ends with the last clone and the last receiver.
#[derive(Clone, Debug)]
pub struct FleetWatch {
    fleets: watch::Receiver<Arc<Fleet>>,
    figures: Arc<KubernetesFigures>,
}

impl FleetWatch {
    /// Starts to watch. Call it within the tokio runtime.
    #[must_use]
    pub fn start(access: ApiAccess, source: PodSource) -> Self {
        let figures = Arc::new(KubernetesFigures::default());
        let (sender, fleets) = watch::channel(Arc::default());
        let follow = Follow { access: Arc::new(access), figures: Arc::clone(&figures), fleets: sender };
        match source {
            PodSource::Service { namespace, name, ports } => {
                tokio::spawn(async move { follow.service(&namespace, &name, &ports).await });
            }
            PodSource::Pool { namespace, name } => {
                tokio::spawn(async move { follow.pool(&namespace, &name).await });
            }
        }
        Self { fleets, figures }
    }

    /// The fleet as it is now.
    #[must_use]
    pub fn now(&self) -> Arc<Fleet> {
        Arc::clone(&self.fleets.borrow())
    }

    /// Each further fleet.
    #[must_use]
    pub fn fleets(&self) -> watch::Receiver<Arc<Fleet>> {
        self.fleets.clone()
    }

    /// What was asked of the API server, and what came.
    #[must_use]
    pub fn figures(&self) -> &KubernetesFigures {
        &self.figures
    }

    /// Waits until the API server has said which pods there are. `false` = it has not by `deadline`.
    pub async fn known(&self, deadline: Instant) -> bool {
        let mut fleets = self.fleets.clone();
        let known = fleets.wait_for(|fleet| fleet.is_known);
        tokio::time::timeout_at(deadline.into(), known).await.is_ok_and(|known| known.is_ok())
    }
}

/// What the task of a watch has.
struct Follow {
    access: Arc<ApiAccess>,
    figures: Arc<KubernetesFigures>,
    fleets: watch::Sender<Arc<Fleet>>,
}

/// A reflector of the pods that a selector matches.
struct PodsOf {
    selector: String,
    observed: watch::Receiver<Observed<Pod>>,
}

impl Follow {
    async fn service(self, namespace: &str, name: &str, ports: &[PortName]) {
        // The label by which the EndpointSlice controller names the service of a slice.
        let selector = ("labelSelector", format!("kubernetes.io/service-name={name}"));
        let selection = Selection { namespace: namespace.to_owned(), selector };
        let (access, figures) = (Arc::clone(&self.access), Arc::clone(&self.figures));
        let mut slices = Reflector::start(access, selection, figures, Observed::default());
        loop {
            let fleet = {
                let observed = slices.borrow_and_update();
                let mut fleet = of_slices(observed.objects.values(), ports, observed.is_listed);
                if observed.is_listed && observed.objects.is_empty() {
                    let what = format!("the service {namespace}/{name} has no EndpointSlice");
                    let remedy = "create the service, with a selector, or correct --kubernetes-service".to_owned();
                    fleet.problems.push(Problem { what, remedy });
                }
                add_problems(&mut fleet, &*observed);
                fleet
            };
            self.publish(fleet);
            tokio::select! {
                changed = slices.changed() => if changed.is_err() { return },
                () = self.fleets.closed() => return,
            }
        }
    }

    async fn pool(self, namespace: &str, name: &str) {
        // A rule with `resourceNames` covers this selector.
        let selector = ("fieldSelector", format!("metadata.name={name}"));
        let selection = Selection { namespace: namespace.to_owned(), selector };
        let (access, figures) = (Arc::clone(&self.access), Arc::clone(&self.figures));
        let mut pools = Reflector::<InferencePool>::start(access, selection, figures, Observed::default());
        let mut pods: Option<PodsOf> = None;
        loop {
            let fleet = {
                let observed = pools.borrow_and_update();
                let pool = observed.objects.get(name).map(Arc::as_ref);
                pods = self.pods_of(namespace, pool, pods);
                let mut fleet = match &mut pods {
                    Some(pods) => {
                        let listed = pods.observed.borrow_and_update();
                        let mut fleet = of_pool(name, pool, listed.objects.values(), listed.is_listed);
                        add_problems(&mut fleet, &*listed);
                        fleet
                    }
                    None => of_pool(name, pool, std::iter::empty(), observed.is_listed),
                };
                add_problems(&mut fleet, &*observed);
                fleet
            };
            self.publish(fleet);
            tokio::select! {
                changed = pools.changed() => if changed.is_err() { return },
                () = next(&mut pods) => {}
                () = self.fleets.closed() => return,
            }
        }
    }

    /// Follows the pods of the pool's present selector. Those of an earlier one stay until the first list.
    fn pods_of(&self, namespace: &str, pool: Option<&InferencePool>, known: Option<PodsOf>) -> Option<PodsOf> {
        let selector = label_selector(pool?).ok()?;
        if let Some(known) = known.as_ref().filter(|known| known.selector != selector) {
            tracing::info!(from = known.selector, to = selector, "the pool selects other pods");
        }
        let start = |known: Observed<Pod>| {
            let selection =
                Selection { namespace: namespace.to_owned(), selector: ("labelSelector", selector.clone()) };
            let (access, figures) = (Arc::clone(&self.access), Arc::clone(&self.figures));
            PodsOf { selector: selector.clone(), observed: Reflector::start(access, selection, figures, known) }
        };
        Some(match known {
            Some(known) if known.selector == selector => known,
            Some(known) => start(known.observed.borrow().clone()),
            None => start(Observed::default()),
        })
    }

    fn publish(&self, fleet: Fleet) {
        self.fleets.send_if_modified(|known| {
            let is_new = **known != fleet;
            if is_new {
                *known = Arc::new(fleet);
            }
            is_new
        });
    }
}

/// Waits for a change of the pods; for ever if none are followed.
async fn next(pods: &mut Option<PodsOf>) {
    let is_change = match pods {
        Some(pods) => pods.observed.changed().await.is_ok(),
        None => false,
    };
    if !is_change {
        // The reflector runs as long as its receiver: an error would be its panic, which the log has.
        std::future::pending().await
    }
}

/// Adds what a reflector could not do.
fn add_problems<T>(fleet: &mut Fleet, observed: &Observed<T>) {
    fleet.is_current &= observed.problem.is_none();
    fleet.problems.extend(observed.problem.clone());
    if !observed.unreadable.is_empty() {
        let names: Vec<&str> = observed.unreadable.iter().map(String::as_str).take(8).collect();
        let (count, names) = (observed.unreadable.len(), names.join(", "));
        let what = format!("{count} objects of the Kubernetes API cannot be read and are left out, among them {names}");
        let remedy = "see what wrote them, and whether the API server is one".to_owned();
        fleet.problems.push(Problem { what, remedy });
    }
}
