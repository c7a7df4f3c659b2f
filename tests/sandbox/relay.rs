//! A relay in its sandbox, and a daemon in another behind it.

use std::sync::Arc;

use crate::kernel_has_all;
use crate::kit::engine::Publisher;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, folder, prompt, text, until};
use kvrouted::ids::Worker;

#[test]
fn a_relay_does_all_its_work_inside() {
    if !kernel_has_all("a relay in its sandbox") {
        return;
    }
    let (folder, mut engine, metrics) = (folder(), Publisher::new(), free_port().to_string());
    let path = |name: &str| format!("ipc://{}", text(&folder.path().join(name)));
    let worker = format!("id=1,endpoint={}", engine.endpoint().replace("127.0.0.1", "localhost"));
    let (endpoint, replay) = (path("events"), path("replay"));
    let arguments = ["--endpoint", &endpoint, "--replay", &replay, "--metrics-port", &metrics];
    let arguments = [&["relay", "--worker", &worker, "--block-size", "16", "--sandbox", "required"], &arguments[..]];
    let mut relay = Process::start(folder.path(), "relay", &arguments.concat());
    engine.await_subscription();
    engine.store(&prompt(1, 64));
    let worker = format!("id=1,endpoint={endpoint},replay={replay}");
    let daemon = Daemon::start_in(Arc::clone(&folder), &["--worker", &worker, "--sandbox", "required"]);
    // It connects late, and gets the first batch by a replay.
    until("the daemon holds it", || daemon.device(&prompt(1, 64), Worker::new(1, 0)) == Some(4));
    engine.store(&prompt(2, 64));
    until("the daemon holds more", || daemon.device(&prompt(2, 64), Worker::new(1, 0)) == Some(4));
    let (_, page) = scrape(metrics.parse().expect("a port"));
    assert!(page.contains("kvrouted_sandbox{part=\"filters\"} 1"), "{page}");
    assert!(!relay.log().contains("refused a system call"), "{}", relay.log());
    assert_eq!(relay.end("-TERM"), Some(0));
    assert!(!folder.path().join("events").exists(), "its socket files are removed");
}
