//! A daemon with few descriptors: it names the number it needs and does not start, or it refuses clients by name. It
//! never crashes.

use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::CONNECTIONS_MIN;
use kvrouted::wire::LaneRequest;

use crate::kit::raw::{Raw, encoded};
use crate::kit::{Daemon, Process, folder, replace, text, until};

/// Workers of the configuration, and workers that are added later. No engine is at their endpoints.
const WORKERS: usize = 8;
/// See [`WORKERS`].
const LATER: usize = 64;

fn endpoint(worker: usize) -> String {
    format!("tcp://127.0.0.1:{}", worker + 1)
}

/// Connects and asks for a lane until no more is let in.
fn flood(daemon: &Daemon) -> Vec<Raw> {
    let (mut held, mut refused) = (Vec::new(), 0);
    let asked = LaneRequest { request_ring_bytes: 4096, reply_ring_bytes: 4096 };
    while refused < 50 {
        let mut raw = Raw::connect(&daemon.socket());
        match raw.hello(None) {
            Ok(_) => {
                // Its reply stays unread, with the descriptors in it.
                raw.send(&encoded(|encoder, out| encoder.open_lane(CorrelationId(5), asked, out)));
                held.push(raw);
            }
            Err(kind) => {
                assert_eq!(kind, Kind::Overloaded);
                refused += 1;
            }
        }
    }
    held
}

#[test]
fn a_daemon_with_few_descriptors_starts_not_at_all_or_is_never_ended_by_them() {
    for open_files in [64, 256, 1024, 4096] {
        let folder = folder();
        let (config, socket) = (folder.path().join("kvrouted.toml"), folder.path().join("s"));
        let workers: String =
            (1..=WORKERS).map(|id| format!("[[worker]]\nid = {id}\nendpoint = \"{}\"\n", endpoint(id))).collect();
        let serve = "lanes_max = 4096\nuser_share_percent = 100\ncores = 1";
        let space = "[[space]]\nmodel = \"m\"\nblock_size = 16\n";
        replace(&config, &format!("[serve]\nsocket = \"{}\"\n{serve}\n{space}{workers}", socket.display()));
        let flags = ["serve", "--config", text(&config)];
        let mut process = Process::start_limited(folder.path(), "daemon", open_files, &flags);
        if open_files < 1024 {
            assert_eq!(process.ended(), Some(71), "{open_files}: a system error");
            let log = process.log();
            assert!(log.contains("open files are too few") && log.contains("LimitNOFILE"), "{log}");
            continue;
        }
        let daemon = Daemon::served_by(process, folder);
        let mut held = flood(&daemon);
        assert!(held.len() >= CONNECTIONS_MIN, "{open_files}: {}", held.len());
        // Who administers asks on this socket where the other one is.
        held.truncate(held.len() - 2);
        until("there is room to ask", || Raw::connect(&daemon.socket()).hello(None).is_ok());
        // The daemon kept room for workers that are added now. Workers beyond that room get no events, and the status
        // says so.
        for id in WORKERS + 1..=WORKERS + LATER {
            daemon.worker_ok(&["add", &format!("id={id},endpoint={}", endpoint(id))]);
        }
        // A request to add a worker is answered before the worker is there.
        until("every worker is there", || daemon.status().workers.len() == WORKERS + LATER);
        if open_files == 1024 {
            assert!(daemon.counter("workers_unheard") > 0 && daemon.counter("lanes_refused_full") > 0);
        }
        drop(held);
        until("there is room again", || Raw::connect(&daemon.socket()).hello(None).is_ok());
        let mut daemon = daemon;
        assert_eq!(daemon.process.end("-TERM"), Some(0), "{open_files}");
        let log = daemon.process.log();
        assert!(!log.contains("Too many open files") && !log.contains("panicked"), "{log}");
    }
}
