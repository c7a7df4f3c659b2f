//! `kvrouted-gateway peers`: the pods of a service as the file that routers follow.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;

/// The program while it runs.
struct Peers(Child);

impl Peers {
    fn start(api: &Api, out: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvrouted-gateway"));
        command.args(["peers", "--service", "serving/vllm", "--port", "routers", "--url", &api.url, "--out"]);
        Self(command.arg(out).stderr(Stdio::null()).spawn().expect("it starts"))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn put(api: &Api, pods: &[PodFacts]) {
    api.put("endpointslices", slice("vllm-x7k2p", "vllm", &[("http", 8000), ("routers", 5571)], pods));
}

async fn until_lists(out: &Path, what: &str, wanted: &[&str]) {
    kit::until(what, async || {
        let text = std::fs::read_to_string(out).unwrap_or_default();
        text.lines().filter(|line| !line.starts_with('#')).eq(wanted.iter().copied()) && text.starts_with('#')
    })
    .await;
}

#[tokio::test]
async fn the_routers_of_a_service_are_a_file_that_stays_while_the_server_is_away() {
    let mut api = Api::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("peers");
    std::fs::write(&out, "tcp://10.9.9.9:1\n").expect("written");
    api.stop().await;
    let mut peers = Peers::start(&api, &out);
    // A router that starts is not ready until it has heard the others, and one that ends still has bookings.
    put(&api, &[ready("2", "10.0.0.2").not_ready(), ready("1", "10.0.0.1"), ready("3", "10.0.0.3").terminating()]);
    assert_eq!(std::fs::read_to_string(&out).expect("the file"), "tcp://10.9.9.9:1\n", "nothing is known yet");
    api.start_again().await;
    let all = ["tcp://10.0.0.1:5571", "tcp://10.0.0.2:5571", "tcp://10.0.0.3:5571"];
    until_lists(&out, "three routers", &all).await;
    until_watched(&api, "endpointslices").await;
    put(&api, &[ready("2", "10.0.0.2"), ready("1", "fd00::1")]);
    until_lists(&out, "others", &["tcp://10.0.0.2:5571", "tcp://[fd00::1]:5571"]).await;
    api.stop().await;
    put(&api, &[]);
    api.start_again().await;
    until_lists(&out, "none", &[]).await;
    assert!(peers.0.try_wait().expect("a child").is_none(), "it goes on");
    kit::signal(peers.0.id(), rustix::process::Signal::TERM);
    assert!(peers.0.wait().expect("a child").success());
}

#[test]
fn a_file_that_cannot_be_written_and_a_service_that_is_none_end_it() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvrouted-gateway")).arg("peers").args(arguments).output();
        let output = output.expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run(&["--service", "A/b", "--url", "http://127.0.0.1:1", "--out", "/nowhere/peers"]);
    assert!(code == Some(64) && said.contains("kubernetes.service"), "{code:?} {said}");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let api = runtime.block_on(Api::start());
    put(&api, &[ready("1", "10.0.0.1")]);
    let (code, said) =
        run(&["--service", "serving/vllm", "--port", "routers", "--url", &api.url, "--out", "/nowhere/peers"]);
    assert!(code == Some(71) && said.contains("/nowhere/peers cannot be written"), "{code:?} {said}");
}
