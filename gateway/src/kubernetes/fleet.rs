//! The engines of a cluster, from its objects. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::objects::{EndpointSlice, InferencePool, Pod, SliceEndpoint, TargetRef, is_name};
use super::ports::{PortName, slice_ports};
use crate::limits::{KUBERNETES_LABELS_MAX, KUBERNETES_PODS_MAX, KUBERNETES_PORTS_MAX};

/// The worker id of a pod: XXH3 (64 bits, seed 0) of its UID as the API writes it.
///
/// A UID is one pod's for ever. All pickers, and the daemons that they run, compute the same id, and a pod that takes
/// the name of another gets an id of its own: it has none of the other's cache. In a shell: `printf %s UID | xxhsum
/// -H3`.
#[must_use]
pub fn worker_id(uid: &str) -> u64 {
    xxh3_64(uid.as_bytes())
}

/// What keeps the fleet from being known or used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// Whether a pod takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodState {
    /// It is not ready: it starts, or its readiness probe fails. It gets no new requests.
    NotReady,
    /// It takes requests.
    Ready,
    /// It is being deleted: it gets no new requests and finishes its own.
    Terminating,
}

impl PodState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::NotReady, Self::Ready, Self::Terminating];

    /// The name in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Ready => "ready",
            Self::Terminating => "terminating",
        }
    }
}

/// One pod: one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetPod {
    /// Its worker id.
    pub worker: u64,
    /// Its namespace and name, for people.
    pub name: String,
    /// Its address.
    pub address: IpAddr,
    /// The port of each rank, from rank 0 on; never empty.
    pub ports: Vec<u16>,
    /// Whether it takes requests.
    pub state: PodState,
}

/// All pods of a service or a pool at one moment, in the order of their worker ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// Whether the API server has said which pods there are. Before, nothing is known.
    pub is_known: bool,
    /// Whether changes are heard of. While the API server is away, the pods are those that were known last.
    pub is_current: bool,
    /// The pods.
    pub pods: Vec<FleetPod>,
    /// What is wrong, each with a remedy.
    pub problems: Vec<Problem>,
}

/// Collects pods by their identity.
#[derive(Default)]
struct Builder {
    pods: BTreeMap<String, FleetPod>,
    problems: BTreeMap<String, String>,
}

impl Builder {
    fn problem(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.insert(what.into(), remedy.into());
    }

    /// Adds a pod, or what else is said of one. A pod can be in two slices for a moment, and has one for each family of
    /// addresses: it terminates if either says so, is ready if either says so, and IPv4 goes first.
    fn add(&mut self, identity: String, pod: FleetPod) {
        match self.pods.get_mut(&identity) {
            None => drop(self.pods.insert(identity, pod)),
            Some(known) => {
                let state = known.state.max(pod.state);
                if (pod.address.is_ipv4(), pod.state) > (known.address.is_ipv4(), known.state) {
                    *known = pod;
                }
                known.state = state;
            }
        }
    }

    fn fleet(mut self, is_known: bool) -> Fleet {
        let mut pods: Vec<FleetPod> = std::mem::take(&mut self.pods).into_values().collect();
        if pods.len() > KUBERNETES_PODS_MAX {
            self.problem(
                format!("there are {} pods, and only {KUBERNETES_PODS_MAX} of them are used", pods.len()),
                "divide them among several services or pools",
            );
        }
        pods.sort_by(|one, other| (one.worker, &one.name).cmp(&(other.worker, &other.name)));
        pods.truncate(KUBERNETES_PODS_MAX);
        let problems = self.problems.into_iter().map(|(what, remedy)| Problem { what, remedy }).collect();
        Fleet { is_known, is_current: true, pods, problems }
    }
}

/// The pods behind a service. With several ports, `ports` names those of the ranks.
pub(super) fn of_slices<'a>(
    slices: impl Iterator<Item = &'a Arc<EndpointSlice>>,
    ports: &[PortName],
    is_known: bool,
) -> Fleet {
    let mut builder = Builder::default();
    for slice in slices {
        if slice.endpoints.is_empty() {
            continue;
        }
        if !matches!(slice.address_type.as_str(), "IPv4" | "IPv6") {
            let what = format!("the EndpointSlice {} has names in place of addresses", slice.metadata.name);
            builder.problem(what, "name the engines with --engine");
            continue;
        }
        let ports = match slice_ports(&slice.ports, ports) {
            Ok(ports) => ports,
            Err((what, remedy)) => {
                builder.problem(format!("the EndpointSlice {} {what}", slice.metadata.name), remedy);
                continue;
            }
        };
        for endpoint in &slice.endpoints {
            // Kubernetes says: the first address, and that the others are copies of it.
            let address = endpoint.addresses.first().and_then(|address| usable(address));
            let Some(address) = address else {
                let what =
                    format!("the EndpointSlice {} has an endpoint without a usable address", slice.metadata.name);
                builder.problem(what, "see what wrote it; the endpoint is left out");
                continue;
            };
            let (identity, name) = identity(endpoint.target_ref.as_ref(), address);
            let (worker, state) = (worker_id(&identity), slice_state(endpoint));
            builder.add(identity, FleetPod { worker, name, address, ports: ports.clone(), state });
        }
    }
    builder.fleet(is_known)
}

/// A pool's pods.
pub(super) fn of_pool<'a>(
    name: &str,
    pool: Option<&InferencePool>,
    pods: impl Iterator<Item = &'a Arc<Pod>>,
    is_known: bool,
) -> Fleet {
    let mut builder = Builder::default();
    let Some(pool) = pool else {
        if is_known {
            let what = format!("the InferencePool {name} does not exist");
            builder.problem(what, "create it, or correct --kubernetes-pool");
        }
        return builder.fleet(is_known);
    };
    if let Err(why) = label_selector(pool) {
        builder.problem(format!("the InferencePool {name} {why}"), "correct its spec.selector.matchLabels");
        return builder.fleet(is_known);
    }
    let mut seen = BTreeSet::new();
    let numbers = pool.spec.target_ports.iter().map(|port| port.number);
    let ports: Vec<u16> = numbers.filter(|port| *port != 0 && seen.insert(*port)).take(KUBERNETES_PORTS_MAX).collect();
    if ports.is_empty() {
        builder.problem(format!("the InferencePool {name} has no port"), "name one in its spec.targetPorts");
        return builder.fleet(is_known);
    }
    for pod in pods {
        // A pod that has ended has no server, and one without an address none yet.
        if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            continue;
        }
        let Some(text) = pod.status.pod_ip.as_deref().filter(|address| !address.is_empty()) else { continue };
        let Some(address) = usable(text) else {
            builder.problem(format!("the pod {} has an unusable address", pod.metadata.name), "it is left out");
            continue;
        };
        let meta = &pod.metadata;
        let reference = TargetRef {
            kind: "Pod".into(),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            uid: meta.uid.clone(),
        };
        let (identity, name) = identity(Some(&reference), address);
        let (worker, state) = (worker_id(&identity), pod_state(pod));
        builder.add(identity, FleetPod { worker, name, address, ports: ports.clone(), state });
    }
    builder.fleet(is_known)
}

/// The selector of a pool's pods as a query has it.
///
/// # Errors
/// Why it cannot be used. An empty one would select every pod of the namespace.
pub(super) fn label_selector(pool: &InferencePool) -> Result<String, &'static str> {
    let labels = &pool.spec.selector.match_labels;
    // Names with other characters would change the meaning of the query.
    let is_plain = |text: &String| {
        is_name(text) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte))
    };
    match labels.len() {
        0 => Err("selects pods by no label"),
        count if count > KUBERNETES_LABELS_MAX => Err("selects pods by too many labels"),
        _ if !labels.iter().all(|(key, value)| !key.is_empty() && is_plain(key) && is_plain(value)) => {
            Err("selects pods by a label that no pod can have")
        }
        _ => Ok(labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")),
    }
}

/// What identifies a pod, and its name for people. An endpoint without a pod, as somebody wrote it by hand, is known by
/// its address.
fn identity(target: Option<&TargetRef>, address: IpAddr) -> (String, String) {
    let pod =
        target.filter(|target| target.kind == "Pod" && [&target.namespace, &target.name].iter().all(|it| is_name(it)));
    match pod {
        Some(pod) if !pod.uid.is_empty() && is_name(&pod.uid) => {
            (pod.uid.clone(), format!("{}/{}", pod.namespace, pod.name))
        }
        Some(pod) if !pod.name.is_empty() => {
            let name = format!("{}/{}", pod.namespace, pod.name);
            (name.clone(), name)
        }
        _ => (address.to_string(), address.to_string()),
    }
}

/// `ready` is also true for a pod that terminates, if the service publishes addresses that are not ready.
fn slice_state(endpoint: &SliceEndpoint) -> PodState {
    match (endpoint.conditions.terminating.unwrap_or(false), endpoint.conditions.ready.unwrap_or(true)) {
        (true, _) => PodState::Terminating,
        (false, true) => PodState::Ready,
        (false, false) => PodState::NotReady,
    }
}

fn pod_state(pod: &Pod) -> PodState {
    let is_ready = pod.status.conditions.iter().any(|it| it.kind == "Ready" && it.status == "True");
    match (pod.metadata.deletion_timestamp.is_some(), is_ready) {
        (true, _) => PodState::Terminating,
        (false, true) => PodState::Ready,
        (false, false) => PodState::NotReady,
    }
}

/// An address that a server can have.
fn usable(text: &str) -> Option<IpAddr> {
    text.parse().ok().filter(|address: &IpAddr| !address.is_unspecified() && !address.is_multicast())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn slices(objects: &[Value]) -> Vec<Arc<EndpointSlice>> {
        let read = |object: &Value| Arc::new(serde_json::from_value(object.clone()).expect("a slice"));
        objects.iter().map(read).collect()
    }

    fn slice(name: &str, endpoints: &Value) -> Value {
        let family = if endpoints.to_string().contains("::") { "IPv6" } else { "IPv4" };
        json!({"metadata": {"name": name}, "addressType": family, "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]})
    }

    fn endpoint(uid: &str, address: &str, conditions: &Value) -> Value {
        json!({"addresses": [address], "conditions": conditions,
            "targetRef": {"kind": "Pod", "namespace": "n", "name": uid, "uid": uid}})
    }

    fn shown(objects: &[Value]) -> Vec<(String, String, PodState)> {
        let fleet = of_slices(slices(objects).iter(), &[], true);
        let mut pods: Vec<_> =
            fleet.pods.into_iter().map(|pod| (pod.name, pod.address.to_string(), pod.state)).collect();
        pods.sort();
        pods
    }

    #[test]
    fn an_id_is_the_published_hash_of_the_uid() {
        // XXH3's own test vector for no input, and the example of docs/gateway.md.
        assert_eq!(worker_id(""), 0x2d06_8005_38d3_94c2);
        assert_eq!(worker_id("5b5e1c1c-0c1e-4c0a-9f57-1f2a3b4c5d6e"), EXAMPLE);
    }

    const EXAMPLE: u64 = 12_929_037_466_321_537_094;

    #[test]
    fn conditions_decide_whether_a_pod_takes_requests() {
        use PodState::{NotReady, Ready, Terminating};
        for (conditions, state) in [
            (json!({"ready": true, "serving": true, "terminating": false}), Ready),
            (json!({"ready": false, "serving": false, "terminating": false}), NotReady),
            (json!({"ready": false, "serving": true, "terminating": true}), Terminating),
            // The service publishes addresses that are not ready.
            (json!({"ready": true, "serving": true, "terminating": true}), Terminating),
            // Kubernetes: absent means ready.
            (json!({}), Ready),
            (json!(null), Ready),
            (json!({"ready": null, "terminating": null}), Ready),
        ] {
            let found = shown(&[slice("s", &json!([endpoint("a", "10.0.0.1", &conditions)]))]);
            assert_eq!(found, [("n/a".to_owned(), "10.0.0.1".to_owned(), state)], "{conditions}");
        }
    }

    #[test]
    fn a_pod_of_several_slices_is_one_engine() {
        let on = json!({"ready": true});
        let off = json!({"ready": false, "terminating": true});
        // Both families of addresses, in either order.
        let pair = [
            slice("s6", &json!([endpoint("a", "fd00::1", &on)])),
            slice("s4", &json!([endpoint("a", "10.0.0.1", &on)])),
        ];
        let expected = [("n/a".to_owned(), "10.0.0.1".to_owned(), PodState::Ready)];
        assert_eq!(shown(&pair), expected);
        assert_eq!(shown(&[pair[1].clone(), pair[0].clone()]), expected);
        // One slice has heard already that it ends.
        let moved = [
            slice("s1", &json!([endpoint("a", "10.0.0.1", &on)])),
            slice("s2", &json!([endpoint("a", "10.0.0.1", &off)])),
        ];
        assert_eq!(shown(&moved)[0].2, PodState::Terminating);
        assert_eq!(shown(&[moved[1].clone(), moved[0].clone()])[0].2, PodState::Terminating);
    }

    #[test]
    fn an_endpoint_without_a_pod_is_known_by_its_address() {
        let by_hand = json!([{"addresses": ["10.0.0.7"]}, {"addresses": ["10.0.0.8"],
            "targetRef": {"kind": "Node", "name": "node-1", "uid": "u"}}]);
        let fleet = of_slices(slices(&[slice("s", &by_hand)]).iter(), &[], true);
        let mut ids: Vec<u64> = fleet.pods.iter().map(|pod| pod.worker).collect();
        let mut expected = vec![worker_id("10.0.0.7"), worker_id("10.0.0.8")];
        ids.sort_unstable();
        expected.sort_unstable();
        assert_eq!(ids, expected);
    }

    #[test]
    fn a_pool_uses_each_of_its_ports_once_and_pods_that_run() {
        let pool: InferencePool = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "selector": {"matchLabels": {"app": "a", "tier": ""}},
            "targetPorts": [{"number": 8000}, {"number": 8000}, {"number": 8001}]}}))
        .expect("a pool");
        assert_eq!(label_selector(&pool).as_deref(), Ok("app=a,tier="));
        let pod = |name: &str, status: Value| -> Arc<Pod> {
            let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "status": status});
            Arc::new(serde_json::from_value(object).expect("a pod"))
        };
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let pods = [
            pod("runs", json!({"phase": "Running", "podIP": "10.0.0.1", "conditions": ready})),
            pod("done", json!({"phase": "Succeeded", "podIP": "10.0.0.2", "conditions": ready})),
            pod("pending", json!({"phase": "Pending"})),
            pod(
                "unknown",
                json!({"phase": "Running", "podIP": "10.0.0.3",
                "conditions": [{"type": "Ready", "status": "Unknown"}]}),
            ),
        ];
        let fleet = of_pool("p", Some(&pool), pods.iter(), true);
        let mut found: Vec<_> = fleet.pods.iter().map(|pod| (pod.name.as_str(), pod.state)).collect();
        found.sort_unstable();
        assert_eq!(found, [("n/runs", PodState::Ready), ("n/unknown", PodState::NotReady)]);
        assert!(fleet.pods.iter().all(|pod| pod.ports == [8000, 8001]));
    }

    #[test]
    fn more_pods_than_can_be_used_are_told_and_all_pickers_use_the_same() {
        let endpoints: Vec<Value> = (0..KUBERNETES_PODS_MAX + 5)
            .map(|number| endpoint(&number.to_string(), &format!("10.0.{}.{}", number >> 8, number & 255), &json!({})))
            .collect();
        let fleet = of_slices(slices(&[slice("s", &endpoints.into())]).iter(), &[], true);
        assert_eq!((fleet.pods.len(), fleet.problems.len()), (KUBERNETES_PODS_MAX, 1));
        assert!(fleet.pods.is_sorted_by_key(|pod| pod.worker));
    }

    proptest! {
        #[test]
        fn any_object_gives_pods_with_an_address_and_a_port(
            address in "[0-9a-f.:]{0,16}|\\PC{0,8}",
            family in "IPv4|IPv6|FQDN|",
            port in proptest::option::of(any::<u16>()),
            uid in "\\PC{0,8}",
        ) {
            let object = json!({"metadata": {"name": "s"}, "addressType": family, "ports": [{"port": port}],
                "endpoints": [{"addresses": [address], "targetRef": {"kind": "Pod", "uid": uid}}, {"addresses": null}]});
            let fleet = of_slices(slices(&[object]).iter(), &[], true);
            for pod in fleet.pods {
                prop_assert!(pod.ports.iter().all(|port| *port != 0) && !pod.ports.is_empty());
                prop_assert!(!pod.address.is_unspecified());
            }
        }
    }
}
