//! Pods of a cluster: the module against a double of the API server, and the endpoint picker's program with it.

#[path = "kubernetes/api.rs"]
mod api;
mod kit;
#[path = "kubernetes/objects.rs"]
mod objects;
#[path = "kubernetes/peers.rs"]
mod peers;
#[path = "kubernetes/picker.rs"]
mod picker;
#[path = "epp/kit.rs"]
mod player;
#[path = "kubernetes/rbac.rs"]
mod rbac;
#[path = "kubernetes/recipe.rs"]
mod recipe;
#[path = "kubernetes/trouble.rs"]
mod trouble;

use std::sync::Arc;
use std::time::Instant;

use api::Api;
use kit::PATIENCE;
use kvrouted_gateway::kubernetes::{
    ApiAccess, Fleet, FleetWatch, KubernetesFigure, KubernetesKind, PodSource, PodState, PortName, worker_id,
};
use objects::{NAMESPACE, PodFacts, pod, pool, ready, slice};

fn access(api: &Api) -> ApiAccess {
    ApiAccess { url: api.url.clone(), token_file: None, ca_file: None }
}

fn service_of(ports: &[PortName]) -> PodSource {
    PodSource::Service { namespace: NAMESPACE.to_owned(), name: "vllm".to_owned(), ports: ports.to_vec() }
}

fn service() -> PodSource {
    service_of(&[])
}

fn llama() -> PodSource {
    PodSource::Pool { namespace: NAMESPACE.to_owned(), name: "llama".to_owned() }
}

/// Waits for a fleet that holds.
async fn until_fleet(watch: &FleetWatch, what: &str, holds: impl Fn(&Fleet) -> bool) -> Arc<Fleet> {
    let mut fleets = watch.fleets();
    let found = tokio::time::timeout(PATIENCE, fleets.wait_for(|fleet| holds(fleet)))
        .await
        .map(|it| it.map(|it| Arc::clone(&it)));
    match found {
        Ok(found) => found.expect("the watch runs"),
        Err(_) => panic!("{what}: not within {PATIENCE:?}: {:?}", watch.now()),
    }
}

fn is(states: &[(&str, PodState)]) -> impl Fn(&Fleet) -> bool {
    let mut wanted: Vec<_> = states.iter().map(|(name, state)| (format!("{NAMESPACE}/{name}"), *state)).collect();
    wanted.sort();
    move |fleet| {
        let mut found: Vec<_> = fleet.pods.iter().map(|pod| (pod.name.clone(), pod.state)).collect();
        found.sort();
        fleet.is_known && found == wanted
    }
}

const READY: PodState = PodState::Ready;

fn put_slice(api: &Api, pods: &[PodFacts]) {
    api.put("endpointslices", slice("vllm-x7k2p", "vllm", &[("http", 8000)], pods));
}

async fn until_watched(api: &Api, resource: &str) {
    kit::until(&format!("{resource} are watched"), async || api.open_watches(resource) == 1).await;
}

#[tokio::test]
async fn the_pods_of_a_service_are_followed_from_start_to_end() {
    let api = Api::start().await;
    put_slice(&api, &[]);
    api.put("endpointslices", slice("other-1", "other", &[("http", 8000)], &[ready("stranger", "10.0.0.99")]));
    let watch = FleetWatch::start(access(&api), service());
    assert!(watch.known(Instant::now() + PATIENCE).await);
    assert!(watch.now().pods.is_empty(), "another service's pods are none of its");
    let [one, two] = [ready("1", "10.0.0.1"), ready("2", "10.0.0.2")];
    put_slice(&api, &[one.clone().not_ready()]);
    until_fleet(&watch, "it starts", is(&[("1", PodState::NotReady)])).await;
    put_slice(&api, &[one.clone(), two.clone()]);
    let fleet = until_fleet(&watch, "both are ready", is(&[("1", READY), ("2", READY)])).await;
    assert!(fleet.is_current && fleet.problems.is_empty(), "{:?}", fleet.problems);
    let found = fleet.pods.iter().find(|pod| pod.name == "serving/1").expect("it is ready");
    assert_eq!(
        (found.worker, found.address.to_string(), found.ports.clone()),
        (worker_id(&one.uid), one.ip.clone(), vec![8000])
    );
    put_slice(&api, &[one.clone().terminating(), two.clone()]);
    until_fleet(&watch, "it ends", is(&[("1", PodState::Terminating), ("2", READY)])).await;
    put_slice(&api, &[two]);
    until_fleet(&watch, "it is gone", is(&[("2", READY)])).await;
    api.delete("endpointslices", "vllm-x7k2p");
    let fleet = until_fleet(&watch, "the slice is gone", is(&[])).await;
    assert!(fleet.problems[0].what.contains("no EndpointSlice"), "{:?}", fleet.problems);
    assert_eq!(api.asked("list", "endpointslices").len(), 1, "all of it was watched");
}

#[tokio::test]
async fn the_pods_of_a_pool_follow_its_selector_and_its_ports() {
    let api = Api::start().await;
    let watch = FleetWatch::start(access(&api), llama());
    let fleet = until_fleet(&watch, "there is no pool", |fleet| fleet.is_known).await;
    assert!(fleet.problems[0].what.contains("llama does not exist"), "{:?}", fleet.problems);
    let [one, two] = [ready("1", "10.0.0.1"), ready("2", "10.0.0.2")];
    api.put("pods", pod(&one, &[("app", "vllm-llama")]));
    api.put("pods", pod(&two, &[("app", "vllm-llama"), ("canary", "yes")]));
    api.put("pods", pod(&ready("3", "10.0.0.3"), &[("app", "database")]));
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000, 8001]));
    let fleet = until_fleet(&watch, "the pool's pods", is(&[("1", READY), ("2", READY)])).await;
    assert!(fleet.problems.is_empty() && fleet.pods.iter().all(|pod| pod.ports == [8000, 8001]), "{fleet:?}");
    // A pod that is created, gets an address, becomes ready, is deleted, and is gone.
    let four = ready("4", "10.0.0.4");
    api.put("pods", pod(&PodFacts { ip: String::new(), ..four.clone().not_ready() }, &[("app", "vllm-llama")]));
    api.put("pods", pod(&four.clone().not_ready(), &[("app", "vllm-llama")]));
    let starts = [("1", READY), ("2", READY), ("4", PodState::NotReady)];
    until_fleet(&watch, "it starts", is(&starts)).await;
    api.put("pods", pod(&four, &[("app", "vllm-llama")]));
    until_fleet(&watch, "it is ready", is(&[("1", READY), ("2", READY), ("4", READY)])).await;
    api.put("pods", pod(&PodFacts { is_terminating: true, ..four }, &[("app", "vllm-llama")]));
    let ends = [("1", READY), ("2", READY), ("4", PodState::Terminating)];
    until_fleet(&watch, "it ends, and its server still answers", is(&ends)).await;
    api.delete("pods", "4");
    until_fleet(&watch, "it is gone", is(&[("1", READY), ("2", READY)])).await;
    // A label goes: the pod leaves the selection, which the watch says as a deletion.
    api.put("pods", pod(&one, &[("app", "retired")]));
    until_fleet(&watch, "it is no longer selected", is(&[("2", READY)])).await;
    // Another selector, another port.
    api.put("inferencepools", pool("llama", ("app", "retired"), &[9000]));
    let fleet = until_fleet(&watch, "another selector", is(&[("1", READY)])).await;
    assert_eq!(fleet.pods[0].ports, [9000]);
    // Two reflectors for each of the two selectors: the first one has ended.
    kit::until("the first watch has ended", async || api.open_watches("pods") == 1).await;
    api.delete("inferencepools", "llama");
    until_fleet(&watch, "the pool is gone", is(&[])).await;
}

#[tokio::test]
async fn a_long_list_comes_in_pages_and_a_page_that_is_too_old_begins_it_again() {
    let api = Api::start().await;
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000]));
    for number in 0..1_100_u32 {
        let address = format!("10.1.{}.{}", number >> 8, number & 0xff);
        api.put("pods", pod(&ready(&number.to_string(), &address), &[("app", "vllm-llama")]));
    }
    let watch = FleetWatch::start(access(&api), llama());
    until_fleet(&watch, "all pods", |fleet| fleet.pods.len() == 1_100).await;
    let lists = api.asked("list", "pods");
    let limits: Vec<_> = lists.iter().map(|asked| asked.query.get("limit").map(String::as_str)).collect();
    assert_eq!(limits, [Some("500"); 3]);
    assert!(
        !lists[0].query.contains_key("continue") && lists[1..].iter().all(|asked| asked.query.contains_key("continue"))
    );
    // The second page of the next list is refused: the list begins again.
    api.expire_next_page();
    let again = FleetWatch::start(access(&api), llama());
    until_fleet(&again, "all pods", |fleet| fleet.pods.len() == 1_100).await;
    assert_eq!(again.figures().of(KubernetesKind::Pods).get(KubernetesFigure::Expired), 1);
    assert_eq!(api.asked("list", "pods").len(), 3 + 2 + 3);
}

#[tokio::test]
async fn a_watch_that_ends_is_begun_again_where_it_ended() {
    let api = Api::start().await;
    let pods = [ready("1", "10.0.0.1"), ready("2", "10.0.0.2"), ready("3", "10.0.0.3")];
    put_slice(&api, &pods[..1]);
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "one pod", is(&[("1", READY)])).await;
    until_watched(&api, "endpointslices").await;
    // While nobody watches, a pod comes.
    api.end_watches();
    put_slice(&api, &pods[..2]);
    until_fleet(&watch, "two pods", is(&[("1", READY), ("2", READY)])).await;
    until_watched(&api, "endpointslices").await;
    api.break_watches();
    put_slice(&api, &pods);
    until_fleet(&watch, "three pods", is(&[("1", READY), ("2", READY), ("3", READY)])).await;
    assert_eq!(api.asked("list", "endpointslices").len(), 1);
    for asked in api.asked("watch", "endpointslices") {
        assert_eq!(asked.query.get("allowWatchBookmarks").map(String::as_str), Some("true"));
        let seconds: u64 = asked.query["timeoutSeconds"].parse().expect("seconds");
        assert!((300..600).contains(&seconds), "{seconds}");
    }
    assert!(watch.now().problems.is_empty(), "a watch that ends is nothing unusual: {:?}", watch.now().problems);
}

#[tokio::test]
async fn a_bookmark_spares_a_list_and_without_one_the_objects_are_listed_again() {
    let api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let watch = FleetWatch::start(access(&api), service());
    let figures = watch.figures().of(KubernetesKind::EndpointSlices);
    until_fleet(&watch, "one pod", is(&[("1", READY)])).await;
    until_watched(&api, "endpointslices").await;
    // Other resources change, and the history of this one is forgotten.
    api.bookmark("endpointslices");
    kit::until("the bookmark has come", async || figures.get(KubernetesFigure::Event) == 1).await;
    api.compact();
    api.end_watches();
    until_watched(&api, "endpointslices").await;
    assert_eq!((api.asked("list", "endpointslices").len(), figures.get(KubernetesFigure::Expired)), (1, 0));
    // Now without a bookmark: the watch's version is too old, said by an event.
    api.end_watches();
    put_slice(&api, &[ready("2", "10.0.0.2")]);
    api.compact();
    until_fleet(&watch, "the other pod", is(&[("2", READY)])).await;
    assert!(api.asked("list", "endpointslices").len() >= 2);
    // And said by a status.
    until_watched(&api, "endpointslices").await;
    let (lists, expired) = (api.asked("list", "endpointslices").len(), figures.get(KubernetesFigure::Expired));
    api.fault("watch", "endpointslices", api::Fault::Gone);
    api.end_watches();
    kit::until("a list after 410", async || api.asked("list", "endpointslices").len() > lists).await;
    assert!(figures.get(KubernetesFigure::Expired) > expired);
    until_watched(&api, "endpointslices").await;
    assert!(watch.now().problems.is_empty(), "{:?}", watch.now().problems);
}

#[tokio::test]
async fn all_pickers_give_a_pod_one_id_and_a_pod_that_takes_its_name_another() {
    let api = Api::start().await;
    let [first, second] = [ready("vllm-0", "10.0.0.1"), ready("vllm-0", "10.0.0.2")];
    let second = PodFacts { uid: "another".to_owned(), ..second };
    put_slice(&api, std::slice::from_ref(&first));
    api.put("pods", pod(&first, &[("app", "vllm-llama")]));
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000]));
    let mut ids = Vec::new();
    for source in [service(), service(), llama()] {
        let watch = FleetWatch::start(access(&api), source);
        ids.push(until_fleet(&watch, "one pod", is(&[("vllm-0", READY)])).await.pods[0].worker);
    }
    assert_eq!(ids, [worker_id(&first.uid); 3]);
    put_slice(&api, std::slice::from_ref(&second));
    let watch = FleetWatch::start(access(&api), service());
    let fleet = until_fleet(&watch, "its successor", is(&[("vllm-0", READY)])).await;
    assert_eq!(fleet.pods[0].worker, worker_id("another"));
}

#[tokio::test]
async fn several_ports_of_a_service_are_named_and_are_ranks() {
    let api = Api::start().await;
    let ports = [("metrics", 9090), ("rank-0", 8000), ("rank-1", 8001)];
    api.put("endpointslices", slice("vllm-1", "vllm", &ports, &[ready("1", "10.0.0.1")]));
    let port = |text: &str| text.parse::<PortName>().expect("a port");
    let watch = FleetWatch::start(access(&api), service());
    let fleet = until_fleet(&watch, "the ports are not named", |fleet| !fleet.problems.is_empty()).await;
    assert!(fleet.problems[0].what.contains("several ports (metrics, rank-0, rank-1)"), "{:?}", fleet.problems);
    for (named, expected) in
        [(vec![port("rank-0"), port("rank-1")], vec![8000, 8001]), (vec![port("8001")], vec![8001])]
    {
        let watch = FleetWatch::start(access(&api), service_of(&named));
        let fleet = until_fleet(&watch, "the ports are named", |fleet| !fleet.pods.is_empty()).await;
        assert_eq!(fleet.pods[0].ports, expected);
    }
    let watch = FleetWatch::start(access(&api), service_of(&[port("http")]));
    let fleet = until_fleet(&watch, "another name", |fleet| !fleet.problems.is_empty()).await;
    assert!(fleet.problems[0].what.contains("no port http"), "{:?}", fleet.problems);
}
