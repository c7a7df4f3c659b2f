//! Attacks on a daemon that runs as a process, from other processes: each is bounded, and while it goes on another
//! client must get right answers. `scripts/attack` prints what each cost.
//!
//! ```text
//! trial.rs        an attack, what is measured meanwhile, and what is reported
//! attackers.rs    this binary again, as the processes that attack
//! scene.rs        the daemon, an engine that behaves, and the client whose answers must be right
//! connections.rs  clients of the routing and the admin socket
//! engines.rs      publishers, replay sockets and HTTP servers of engines
//! http.rs         callers of the HTTP and the metrics port
//! files.rs        files, disks and descriptors
//! system.rs       signals, the clock, and memory that runs out
//! ```
#![cfg(feature = "daemon")]
#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

mod attackers;
mod connections;
mod engines;
mod files;
mod http;
#[path = "../kit/mod.rs"]
mod kit;
#[path = "../fuzz_targets/mutator.rs"]
mod mutator;
mod scene;
mod system;
mod trial;

use attackers::Role;
use trial::{Attack, attacks};

attacks! { [
    connections::many_connections: "5000 connections by 3 processes of one user, held";
    connections::garbage: "3000 connections of garbage by 2 processes";
    connections::half_frames: "2000 connections by 4 processes that are killed in the middle of a frame";
    connections::unread_replies: "64 connections that ask and never read";
    connections::unread_admin_replies: "40 connections to the admin socket that ask and never read";
    connections::large_frames: "64 frames of 8 MiB without their last bytes";
    connections::byte_by_byte: "200 connections that send a byte of a frame now and then";
    connections::forged_reports: "another user's reports of failure and load, on all 10 workers, again and again";
    connections::lane_files: "100 shm lanes by 2 processes that cut and lock the files, and are killed";
    engines::junk_messages: "messages of 63 MiB of junk by 1 engine";
    engines::unfinished_messages: "12 engines, each with a message of 120 MiB without its end";
    engines::messages_without_end: "4 engines: endless parts, empty parts, a part and a command of 2^62 bytes";
    engines::huge_greetings: "6 engines with handshakes of up to 4 GiB, or that lie about their lengths";
    engines::lying_events: "mutants of real batches by 2 engines";
    engines::odd_parts: "no parts, 65 parts, numbers of 7 and 9 bytes, parts of 64 and 128 MiB";
    engines::single_bytes: "messages of one byte at line rate";
    engines::publisher_reconnects: "64 engines that end each connection";
    engines::endless_replays: "a gap in each batch, and replays without an end";
    engines::copies_and_reports: "the same blocks again and again, under many names and parents";
    engines::blocks_without_end: "new blocks without an end by an engine that may have 50,000";
    engines::server_info: "6 engines whose HTTP replies never end, lie, or lead elsewhere";
    http::json_bombs: "bodies of 8 MiB: nested, wide, long numbers, repeated keys, no UTF-8";
    http::slow_heads: "400 connections to each port that send a byte now and then";
    http::unread_pages: "480 requests for long pages that nobody reads, on both ports";
    http::smuggled_requests: "12 requests whose length can be read in two ways";
    files::few_descriptors: "starts with 4 to 48 descriptors";
    files::full_disk: "a disk of 4 MiB, full, with snapshots, the journal and the log";
    files::file_size_limit: "files of at most 32 KiB: snapshots, the journal and the log";
    files::log_reader_stops: "100 reloads while the log's pipe is full";
    files::log_reader_leaves: "100 reloads while the log's pipe is broken";
    files::worker_files: "pipes, looping links, devices, 1 TiB, 200 files that change, torn files";
    files::absurd_workers: "20 endpoints that cannot be, as endpoint, replay and load";
    system::hangups: "300 SIGHUPs, 100 with a file that is refused, under garbage";
    system::stands_still: "3 stops, while the engine goes on";
    system::clock_jumps: "the wall clock jumps by up to 270 years, every 50 ms";
    system::killed_in_a_snapshot: "3 SIGKILLs while a snapshot of 120,000 blocks is written";
    system::terminated_in_a_snapshot: "3 SIGTERMs while a snapshot of 120,000 blocks is written";
    system::memory_runs_out: "frames of 512 MiB against a limit of 160 MiB";
] slow [] }

/// What attackers play.
fn roles() -> Vec<(&'static str, Role)> {
    [connections::ROLES, engines::ROLES, http::ROLES, files::ROLES].concat()
}

#[test]
#[ignore = "a process that an attack starts"]
fn attacker() {
    attackers::play(&roles());
}

#[test]
#[ignore = "scripts/attack runs it"]
fn all() {
    trial::all(ATTACKS);
}
