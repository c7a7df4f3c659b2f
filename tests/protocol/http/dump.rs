//! Slow readers of a dump: the daemon cuts them off, and they do not delay other readers.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::Served;
use crate::kit::engine::Publisher;
use crate::kit::{WAIT_MAX, prompt, until};

/// Blocks of the worker that is dumped: of their text, some 100 bytes each, sockets and the daemon hold less than all.
const BLOCKS: u32 = 100_000;
const BLOCKS_PER_STORE: u32 = 1_000;

/// A daemon with a worker of many blocks, and a time limit for its dumps.
fn daemon(dump_worker_ms_max: u64) -> (Served, Publisher) {
    let served = Served::configured(&format!("dump_worker_ms_max = {dump_worker_ms_max}"), "");
    let mut publisher = Publisher::new();
    let registration =
        json!({"instance_id": 1, "endpoint": publisher.endpoint(), "model_name": "m", "block_size": 16, "dp_rank": 0});
    assert_eq!(served.post("/register", &registration).0, 201);
    publisher.await_subscription();
    for seed in 0..BLOCKS / BLOCKS_PER_STORE {
        publisher.store(&prompt(seed + 1, BLOCKS_PER_STORE * 16));
    }
    until("it holds all blocks", || served.daemon.status().workers[0].blocks_held == u64::from(BLOCKS));
    (served, publisher)
}

impl Served {
    /// Begins to ask for a dump; its first byte has come.
    fn dumping(&self) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the port");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("set");
        stream.write_all(b"GET /dump HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("sent");
        let mut first = [0];
        stream.read_exact(&mut first).expect("a response");
        stream
    }
}

/// The JSON in a chunked response whose first byte is read.
fn body(response: &[u8]) -> Value {
    let text = String::from_utf8_lossy(response);
    let (_, mut rest) = text.split_once("\r\n\r\n").expect("a head");
    let mut body = String::new();
    loop {
        let (length, after) = rest.split_once("\r\n").expect("a chunk");
        let length = usize::from_str_radix(length, 16).expect("a length");
        if length == 0 {
            return serde_json::from_str(&body).expect("JSON");
        }
        body.push_str(&after[..length]);
        rest = &after[length + 2..];
    }
}

#[test]
fn who_reads_a_dump_late_is_told_whose_blocks_are_missing() {
    let worker_ms_max = 200;
    let (served, _publisher) = daemon(worker_ms_max);
    let mut stream = served.dumping();
    // The blocks that no buffer holds wait for the reader, longer than the worker's events may.
    std::thread::sleep(Duration::from_millis(3 * worker_ms_max));
    let mut response = Vec::new();
    stream.read_to_end(&mut response).expect("a response");
    let dump = body(&response);
    let missing = json!([{"worker_id": 1, "dp_rank": 0, "reason": "deadline_passed"}]);
    assert_eq!(dump["m:default"]["left_out"], missing);
    let events = dump["m:default"]["events"].as_array().expect("events").len();
    assert!(0 < events && events < (BLOCKS / BLOCKS_PER_STORE) as usize, "{events}");
    let counters = ["http_dumps", "http_dumps_incomplete", "http_dumps_slow"].map(|name| served.daemon.counter(name));
    assert_eq!(counters, [1, 1, 0]);
}

#[test]
fn who_reads_a_dump_byte_by_byte_soon_makes_way_for_others() {
    // Longer than the test: only its reader ends the dump.
    let (served, _publisher) = daemon(600_000);
    let mut slow = served.dumping();
    let (status, refused) = served.get("/dump");
    assert_eq!((status, &refused["code"]), (503, &"overloaded".into()), "there is one place");
    until("it is ended", || {
        // Never long without a byte: no bound on silence ends it.
        let _ = slow.read_exact(&mut [0]);
        served.daemon.counter("http_dumps_slow") == 1
    });
    let mut rest = Vec::new();
    // Reset, or without its end: no whole dump in any case.
    let _ = slow.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"0\r\n\r\n"));
    assert_eq!(served.get("/dump").0, 200);
    let counters = ["http_dumps_refused", "http_connections_stalled"].map(|name| served.daemon.counter(name));
    assert_eq!(counters, [1, 0]);
}
