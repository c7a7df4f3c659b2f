//! The picker and the proxy with engines from Kubernetes, a daemon of their own and simulated engines.
//!
//! They use the real `kvrouted` program, and are skipped with a message if it is not built.

use std::net::SocketAddr;
use std::path::PathBuf;

use http_body_util::BodyExt as _;
use kvrouted::ids::Worker;
use kvrouted_gateway::demo::SimulatedEngines;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::player::{self, Connection, Stream, opening, request_body, response_body, response_headers};
use super::*;
use crate::kit::ports::free_address;
use crate::kit::{Caller, Figures, Gateway, chat, compare_metrics, kvrouted_or_skip};

const POST: [(&str, &str); 2] = [(":method", "POST"), (":path", "/v1/chat/completions")];

/// What the operator's port says at a path.
async fn operator(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("the operator's port");
    let request = format!("GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read");
    text
}

struct Fixture {
    api: Api,
    picker: SocketAddr,
    pods: Vec<PodFacts>,
    addresses: Vec<SocketAddr>,
}

impl Fixture {
    /// Sets a pod's slice. Each pod has one of its own: the simulated engines have one address and several ports, as
    /// pods have whose ports are named.
    fn put(&self, place: usize, pods: &[PodFacts]) {
        let port = self.addresses[place].port();
        self.api.put("endpointslices", slice(&format!("vllm-{place}"), "vllm", &[("http", port)], pods));
    }

    async fn stream(&self) -> Stream {
        let stream = TcpStream::connect(self.picker).await.expect("the picker accepts");
        Connection::over(stream).await.stream().await
    }

    /// The list for a chat.
    async fn list(&self, stream: &mut Stream, text: &str) -> Vec<SocketAddr> {
        stream.send(opening(&POST, false)).await;
        let body = chat(&[json!({"role": "user", "content": text})], true);
        stream.send(request_body(body.to_string(), true)).await;
        let list = stream.chosen().await;
        stream.request_body().await;
        list.split(',').map(player::address).collect()
    }

    /// The status with which a chat is refused.
    async fn refusal(&self, text: &str) -> i32 {
        let mut stream = self.stream().await;
        stream.send(opening(&POST, false)).await;
        let body = chat(&[json!({"role": "user", "content": text})], true);
        stream.send(request_body(body.to_string(), true)).await;
        stream.refusal().await.status
    }

    async fn is_ready(&self) -> bool {
        let stream = TcpStream::connect(self.picker).await.expect("the picker accepts");
        Connection::over(stream).await.health("readiness").await == Ok(1)
    }
}

/// A picker that takes its engines from the API server at `url`, and its address.
async fn start_picker(kvrouted: PathBuf, url: String, token: PathBuf, admin: SocketAddr) -> (Gateway, SocketAddr) {
    let starting = tokio::task::spawn_blocking(move || {
        let (token, admin) = (token.display().to_string(), admin.to_string());
        let flags = ["--plaintext", "--kubernetes-service", "serving/vllm", "--kubernetes-url", &url];
        let flags = [&flags[..], &["--kubernetes-token-file", &token, "--admin", &admin]].concat();
        let gateway = Gateway::start_picker(&kvrouted, &[], &flags);
        let picker = gateway.url().parse().expect("an address");
        (gateway, picker)
    });
    starting.await.expect("a picker")
}

/// The gateway, once its daemon answers, and the daemon's socket.
async fn with_daemon(mut gateway: Gateway) -> (Gateway, PathBuf) {
    let asking = tokio::task::spawn_blocking(move || {
        let (_, socket) = gateway.daemon();
        (gateway, socket)
    });
    asking.await.expect("a daemon")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_picked_once_it_is_ready_and_no_more_once_it_ends() {
    let Some(kvrouted) = kvrouted_or_skip("the endpoint picker with pods of Kubernetes") else { return };
    let engines = SimulatedEngines::start(&kvrouted, 2).await.expect("engines");
    let addresses: Vec<SocketAddr> =
        engines.urls().iter().map(|url| player::address(url.trim_start_matches("http://"))).collect();
    let api = Api::start().await;
    api.set_rules(rbac::rules());
    api.require_token("the token");
    let folder = tempfile::tempdir().expect("a folder");
    let token = folder.path().join("token");
    std::fs::write(&token, "the token").expect("written");
    let pods = vec![ready("1", "127.0.0.1"), ready("2", "127.0.0.1")];
    let workers: Vec<Worker> = pods.iter().map(|pod| Worker::new(worker_id(&pod.uid), 0)).collect();
    let admin = free_address();
    let (gateway, picker) = start_picker(kvrouted, api.url.clone(), token, admin).await;
    let fixture = Fixture { api, picker, pods, addresses };
    assert!(!fixture.is_ready().await, "there is no pod yet");
    // A pod is added, and is not ready.
    fixture.put(0, &[fixture.pods[0].clone().not_ready()]);
    assert_eq!(fixture.refusal("Hello.").await, 503);
    // It becomes ready.
    fixture.put(0, &fixture.pods[..1]);
    kit::until("the picker is ready", async || fixture.is_ready().await).await;
    let (gateway, socket) = with_daemon(gateway).await;
    let figures = Figures::of(&socket, "demo");
    kit::until("the daemon has the pod's worker", async || {
        figures.in_flight().await.is_some_and(|workers_now| workers_now == [(workers[0], 0)])
    })
    .await;
    let mut running = fixture.stream().await;
    assert_eq!(fixture.list(&mut running, "A first request.").await, [fixture.addresses[0]]);
    figures.until_bookings(1).await;
    // Another one comes, and both are picked.
    fixture.put(1, &fixture.pods[1..]);
    kit::until("both are picked", async || {
        let mut stream = fixture.stream().await;
        fixture.list(&mut stream, "Who is there?").await.len() == 2
    })
    .await;
    // The first one terminates: it is picked no more, and its running request goes on.
    fixture.put(0, &[fixture.pods[0].clone().terminating()]);
    kit::until("one is picked", async || {
        let mut stream = fixture.stream().await;
        fixture.list(&mut stream, "Who is there now?").await == [fixture.addresses[1]]
    })
    .await;
    for text in ["a", "b", "c", "d"] {
        let mut stream = fixture.stream().await;
        assert_eq!(fixture.list(&mut stream, text).await, [fixture.addresses[1]]);
    }
    kit::until("its request is still booked", async || {
        figures.in_flight().await.is_some_and(|all| all.contains(&(workers[0], 1)))
    })
    .await;
    running.send(response_headers(&[(":status", "200"), ("content-type", "text/event-stream")], false)).await;
    running.answer().await;
    running.send(response_body("data: [DONE]\n\n", true)).await;
    running.answer().await;
    figures.until_bookings(0).await;
    // It is gone, and its worker with it.
    fixture.api.delete("endpointslices", "vllm-0");
    kit::until("the daemon has one worker", async || {
        figures.in_flight().await.is_some_and(|all| all == [(workers[1], 0)])
    })
    .await;
    goes_on_alone(fixture, admin).await;
    drop(gateway);
}

/// The API server is away: the picker goes on with what it knows, one pod.
async fn goes_on_alone(mut fixture: Fixture, admin: SocketAddr) {
    let metrics = operator(admin, "/metrics").await;
    for line in [
        "kubernetes_current 1\n",
        "kubernetes_pods{state=\"ready\"} 1\n",
        "resource=\"endpointslices\",event=\"listed\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let names = compare_metrics(metrics.split_once("\r\n\r\n").expect("a body").1);
    for part in ["kubernetes_pods", "kubernetes_requests", "epp_requests", "epp_streams_open"] {
        assert!(names.contains(&format!("kvrouted_gateway_{part}")), "{part}: {names:?}");
    }
    fixture.api.stop().await;
    kit::until("a finding", async || {
        let findings = operator(admin, "/findings").await;
        findings.contains("watch endpointslices in serving") && findings.contains("stays in use")
    })
    .await;
    assert!(operator(admin, "/metrics").await.contains("kubernetes_current 0\n"));
    let mut stream = fixture.stream().await;
    assert_eq!(fixture.list(&mut stream, "Is anybody there?").await, [fixture.addresses[1]]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_proxy_follows_the_pods_too() {
    let Some(kvrouted) = kvrouted_or_skip("the proxy with pods of Kubernetes") else { return };
    let engines = SimulatedEngines::start(&kvrouted, 2).await.expect("engines");
    let ports: Vec<u16> = engines.faces.iter().map(|face| face.address().port()).collect();
    let pods = [ready("1", "127.0.0.1"), ready("2", "127.0.0.1")];
    let ids = pods.clone().map(|pod| worker_id(&pod.uid));
    let api = Api::start().await;
    let put = |place: usize, pod: PodFacts| {
        api.put("endpointslices", slice(&format!("vllm-{place}"), "vllm", &[("http", ports[place])], &[pod]));
    };
    put(0, pods[0].clone());
    let url = api.url.clone();
    let starting = tokio::task::spawn_blocking(move || {
        Gateway::start(&kvrouted, &[], &["--kubernetes-service", "serving/vllm", "--kubernetes-url", &url])
    });
    let gateway = starting.await.expect("a proxy");
    let caller = Caller::of(gateway.url());
    let ask = async || caller.chat(&[json!({"role": "user", "content": "Hello."})]).await;
    let answer = ask().await;
    assert_eq!((answer.status, answer.engine()), (200, Some(ids[0])), "{:?}", answer.body);
    // A request is under way when its pod ends, and another pod has come.
    let body = chat(&[json!({"role": "user", "content": "Go on and on."})], true);
    let running = caller.send("/v1/chat/completions", &body, &[]).await.expect("a reply");
    assert_eq!(running.headers()["x-kvrouted-worker"], format!("{}/0", ids[0]));
    put(1, pods[1].clone());
    put(0, pods[0].clone().terminating());
    kit::until("the other pod answers", async || ask().await.engine() == Some(ids[1])).await;
    for _ in 0..5 {
        let answer = ask().await;
        assert_eq!((answer.status, answer.engine()), (200, Some(ids[1])), "{:?}", answer.body);
    }
    let whole = running.into_body().collect().await.expect("the reply goes on").to_bytes();
    assert!(whole.ends_with(b"data: [DONE]\n\n"), "{:?}", String::from_utf8_lossy(&whole));
    // The last pod ends too.
    put(1, pods[1].clone().terminating());
    kit::until("no pod is left", async || ask().await.status == 503).await;
}
