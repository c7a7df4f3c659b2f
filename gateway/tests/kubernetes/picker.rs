//! The endpoint picker's program with engines from Kubernetes, a daemon of its own and simulated engines.
//!
//! It uses the real `kvrouted` program, and is skipped with a message if it is not built.

use std::net::SocketAddr;

use kvrouted::ids::Worker;
use kvrouted_gateway::demo::SimulatedEngines;
use serde_json::json;
use tokio::net::TcpStream;

use super::player::{self, Connection, Stream, opening, request_body, response_body, response_headers};
use super::*;
use crate::kit::{Figures, Gateway, chat, kvrouted_or_skip};

const POST: [(&str, &str); 2] = [(":method", "POST"), (":path", "/v1/chat/completions")];

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
    let url = api.url.clone();
    let starting = tokio::task::spawn_blocking(move || {
        let token = token.display().to_string();
        let flags = ["--plaintext", "--kubernetes-service", "serving/vllm", "--kubernetes-url", &url];
        let flags = [&flags[..], &["--kubernetes-token-file", &token]].concat();
        let gateway = Gateway::start_picker(&kvrouted, &[], &flags);
        let picker: SocketAddr = gateway.url().parse().expect("an address");
        (gateway, picker)
    });
    let (mut gateway, picker) = starting.await.expect("a picker");
    let mut fixture = Fixture { api, picker, pods, addresses };
    assert!(!fixture.is_ready().await, "there is no pod yet");
    // A pod is added, and is not ready.
    fixture.put(0, &[fixture.pods[0].clone().not_ready()]);
    assert_eq!(fixture.refusal("Hello.").await, 503);
    // It becomes ready.
    fixture.put(0, &fixture.pods[..1]);
    kit::until("the picker is ready", async || fixture.is_ready().await).await;
    let asking = tokio::task::spawn_blocking(move || {
        let daemon = gateway.daemon();
        (gateway, daemon)
    });
    let (gateway, (_, socket)) = asking.await.expect("a daemon");
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
    // The API server is away: the picker goes on with what it knows.
    fixture.api.stop().await;
    let mut stream = fixture.stream().await;
    assert_eq!(fixture.list(&mut stream, "Is anybody there?").await, [fixture.addresses[1]]);
    drop(gateway);
}
