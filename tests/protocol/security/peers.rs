//! ZeroMQ peers that never end a message, against the daemon and the relay as processes. The kernel says how much
//! memory each took at most.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvrouted::ids::Worker;

use crate::kit::engine::Publisher;
use crate::kit::http::{free_port, scrape};
use crate::kit::{Daemon, Process, WAIT_MAX, folder, prompt, run, text, until};

/// What a daemon or relay with nothing to hold may take at its peak; the hostile offer a multiple of it.
const PEAK_BYTES_MAX: u64 = 256 << 20;
/// Bytes that one hostile peer has to say.
const SAID_BYTES_MAX: usize = 1 << 30;

fn greeting() -> Vec<u8> {
    [&[0xff][..], &[0; 8], &[0x7f, 3, 1], b"NULL", &[0; 48]].concat()
}

fn ready(socket: &str) -> Vec<u8> {
    let body = [b"\x05READY\x0bSocket-Type\0\0\0".as_slice(), &[socket.len() as u8], socket.as_bytes()].concat();
    [&[4, body.len() as u8][..], &body].concat()
}

/// Endless parts, empty parts without number, a part and a command of 2^62 bytes.
fn endless() -> [(&'static str, Vec<u8>, Vec<u8>); 4] {
    let part = [&[3, 0, 0, 0, 0, 0, 0, 0xea, 0x60][..], &[7; 60_000]].concat();
    let long = |flags: u8| [&[flags, 0x40][..], &[0; 7]].concat();
    [
        ("parts", Vec::new(), part),
        ("empty parts", Vec::new(), [1, 0].repeat(30_000)),
        ("a part", long(2), vec![7; 60_000]),
        ("a command", long(6), vec![7; 60_000]),
    ]
}

/// Says a greeting, and then something without end, until it is cut or has said all.
fn say(mut stream: TcpStream, socket: &str, (first, then): (&[u8], &[u8]), said: &AtomicUsize) {
    let mut heard = [0; 4096];
    let shake = stream.write_all(&[greeting(), ready(socket)].concat()).and_then(|()| stream.read(&mut heard));
    let mut ends = shake.and_then(|_| stream.write_all(first)).is_err();
    while !ends && said.load(Ordering::Relaxed) < SAID_BYTES_MAX {
        ends = stream.write_all(then).is_err();
        said.fetch_add(then.len(), Ordering::Relaxed);
    }
}

/// A port whose peers hear something endless.
struct Hostile {
    port: u16,
    connections: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
}

impl Hostile {
    fn start(socket: &'static str, first: Vec<u8>, then: Vec<u8>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (connections, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, told) = (Arc::clone(&connections), Arc::clone(&ends));
        std::thread::spawn(move || {
            let said = AtomicUsize::new(0);
            for stream in listener.incoming().flatten() {
                if told.load(Ordering::Relaxed) {
                    return;
                }
                stream.set_write_timeout(Some(WAIT_MAX)).unwrap();
                counted.fetch_add(1, Ordering::Relaxed);
                say(stream, socket, (&first, &then), &said);
            }
        });
        Self { port, connections, ends }
    }

    fn endpoint(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
    }
}

/// The most memory that a process has had so far.
fn peak_bytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the kernel says it");
    line.split_whitespace().nth(1).expect("a number").parse::<u64>().unwrap() << 10
}

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
        let peak = peak_bytes(daemon.process.id());
        assert!(peak < PEAK_BYTES_MAX, "{what}: {} MiB", peak >> 20);
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
    let peak = peak_bytes(relay.id());
    assert!(peak < PEAK_BYTES_MAX, "{} MiB", peak >> 20);
    let page = scrape(metrics).1;
    let cut = page.lines().find_map(|line| line.strip_prefix("kvrouted_relay_peers_cut_total ")).expect("counted");
    assert_eq!(cut.parse::<u64>().unwrap(), attacks, "{page}");
}
