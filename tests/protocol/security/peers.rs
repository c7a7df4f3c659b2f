//! ZeroMQ peers that never end a message, against the daemon and the relay as processes. The kernel says how much
//! memory each took at most.

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvrouted::ids::Worker;

use crate::kit::endless::{Hostile, endless, greeting, ready, say};
use crate::kit::engine::Publisher;
use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, WAIT_MAX, folder, peak_kib, prompt, run, text, until};

/// What a daemon or relay with nothing to hold may take at its peak; the hostile offer a multiple of it.
const PEAK_KIB_MAX: u64 = 256 << 10;

#[test]
fn publishers_and_replays_that_never_end_a_message_are_cut_and_the_worker_beside_them_is_heard() {
    for (what, first, then) in endless() {
        let (hostile, mut honest) = (Hostile::start("PUB", first.clone(), then.clone()), Publisher::new());
        let (beside, replays) = (Publisher::new(), Hostile::start("ROUTER", first, then));
        let workers = [
            format!("id=1,endpoint={}", honest.endpoint()),
            format!("id=2,endpoint={}", hostile.endpoint()),
            format!("id=3,endpoint={},replay={}", beside.endpoint(), replays.endpoint()),
        ];
        let daemon = Daemon::start(&["--worker", &workers[0], "--worker", &workers[1], "--worker", &workers[2]]);
        honest.await_subscription();
        let tokens = prompt(1, 64);
        let cut = |worker| daemon.worker_counter(worker, "messages_unbounded") >= 2;
        until(what, || cut(1) && cut(2));
        honest.store(&tokens);
        until("the honest one is heard", || daemon.device(&tokens, Worker::new(1, 0)) == Some(4));
        let peak = peak_kib(daemon.process.id());
        assert!(peak < PEAK_KIB_MAX, "{what}: {} MiB", peak >> 10);
        // It ends with 1 where something severe is found.
        let found = run(&["doctor", "--json", "--socket", text(&daemon.socket())]).stdout;
        assert!(String::from_utf8_lossy(&found).contains("message_unbounded"), "{what}");
        assert!(hostile.connections.load(Ordering::Relaxed) >= 2, "it is tried again");
    }
}

#[test]
fn peers_that_never_end_a_message_or_never_read_are_cut_by_the_relay_and_its_stream_is_heard() {
    let (folder, mut engine) = (folder(), Publisher::new());
    let [events, replay, metrics] = [free_port(), free_port(), free_port()];
    let at = |port: u16| format!("tcp://127.0.0.1:{port}");
    let worker = format!("id=1,endpoint={}", engine.endpoint());
    let relay = Process::start(
        folder.path(),
        "relay",
        &[
            "relay",
            "--endpoint",
            &at(events),
            "--replay",
            &at(replay),
            "--worker",
            &worker,
            "--block-size",
            "16",
            "--metrics-port",
            &metrics.to_string(),
        ],
    );
    engine.await_subscription();
    let worker = format!("id=1,endpoint={},replay={}", at(events), at(replay));
    let router = Daemon::start(&["--worker", &worker]);
    let connect = |port| {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_write_timeout(Some(WAIT_MAX)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        stream
    };
    // It subscribes thousands of times and never reads.
    let mut deaf = connect(events);
    deaf.write_all(&[greeting(), ready("SUB")].concat()).unwrap();
    (0..50_000_u32).for_each(|n| deaf.write_all(&[&[0, 5, 1][..], &n.to_be_bytes()].concat()).unwrap());
    let mut attacks = 0;
    for (_, first, then) in endless() {
        for (port, socket) in [(events, "SUB"), (replay, "DEALER")] {
            say(connect(port), socket, (&first, &then), &AtomicUsize::new(0));
            attacks += 1;
        }
    }
    let tokens = prompt(1, 64);
    engine.store(&tokens);
    until("the stream is heard", || router.device(&tokens, Worker::new(1, 0)) == Some(4));
    let peak = peak_kib(relay.id());
    assert!(peak < PEAK_KIB_MAX, "{} MiB", peak >> 10);
    let page = scrape(metrics).1;
    let cut = page.lines().find_map(|line| line.strip_prefix("kvrouted_relay_peers_cut_total ")).expect("counted");
    assert_eq!(cut.parse::<u64>().unwrap(), attacks, "{page}");
}
