//! Attacks on a daemon that runs as a process, from other processes. Each attack is bounded, and another client must get
//! right answers during it. `scripts/attack` prints what each attack cost.
//!
//! ```text
//! trial.rs        an attack, what is measured meanwhile, and what is reported
//! attackers.rs    this binary again, as the processes that attack
//! scene.rs        the daemon, an engine that behaves, and the client whose answers must be right
//! connections.rs  clients of the routing and the admin socket
//! engines.rs      publishers, replay sockets and HTTP servers of engines
//! http.rs         callers of the HTTP and the metrics port
//! routers.rs      strangers at the port for other routers, and a router that lies
//! remote.rs       strangers at the port for other hosts, and a principal that reaches for another's bookings
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
mod remote;
mod routers;
mod scene;
mod system;
mod trial;

use trial::attacks;

attacks! { roles [connections engines http remote routers files] attacks [
    connections::many_connections: "3 processes of one user open 5000 connections and hold them";
    connections::garbage: "2 processes send garbage on 3000 connections";
    connections::half_frames: "4 processes with 2000 connections are killed in the middle of a frame";
    connections::unread_replies: "2 processes send requests on 64 connections and never read the replies";
    connections::unread_admin_replies: "a process sends requests on 40 connections to the admin socket and never reads the replies";
    connections::large_frames: "2 processes send 64 frames of 8 MiB and hold back the last bytes";
    connections::byte_by_byte: "2 processes send frames byte by byte on 200 connections";
    connections::forged_reports: "a process of another user reports failures and load of all 10 workers again and again";
    connections::lane_files: "2 processes try to truncate the files of 100 shm lanes, lock them, and are killed";
    engines::junk_messages: "an engine sends messages of 63 MiB of junk";
    engines::unfinished_messages: "each of 12 engines sends a message of 120 MiB without its end";
    engines::messages_without_end: "4 engines send endless parts, empty parts, and a part and a command of 2^62 bytes";
    engines::huge_greetings: "6 engines send handshakes of up to 4 GiB, or with wrong lengths";
    engines::lying_events: "2 engines send real batches with random changes";
    engines::odd_parts: "an engine sends messages of 0 and 65 parts, with numbers of 7 and 9 bytes, and with parts of 64 and 128 MiB";
    engines::single_bytes: "an engine sends messages of one byte as fast as it can";
    engines::publisher_reconnects: "64 engines end each connection at once";
    engines::endless_replays: "an engine leaves a gap before each batch and sends replays that never end";
    engines::copies_and_reports: "an engine stores the same blocks again and again, under many names and parents";
    engines::blocks_without_end: "an engine that may have 50,000 blocks stores new ones without end";
    engines::server_info: "6 engines send HTTP replies that never end, have wrong lengths, or redirect";
    http::json_bombs: "2 processes send bodies of 8 MiB: nested, wide, with long numbers, with repeated keys, or not UTF-8";
    http::slow_heads: "2 processes send headers and bodies byte by byte, on 400 connections to each port";
    http::unread_pages: "2 processes ask both ports for 480 long pages and never read them";
    http::smuggled_requests: "a process sends 12 requests whose length has two readings";
    remote::remote_strangers: "5 processes send other tokens, garbage or frames in place of TLS, handshakes without a token, and new TLS keys without end to the remote port";
    remote::remote_half_open: "4 processes leave 1200 connections to the remote port half open, silent or byte by byte";
    remote::remote_handshakes: "4 processes with 160 addresses flood the remote port with the beginnings of handshakes";
    remote::remote_principal: "a principal frees and reports another principal's bookings, and claims its session";
    routers::router_strangers: "4 processes send other secrets, junk and parts without end to the port for other routers, or hold 100 connections";
    routers::lying_router: "a router with the secret lies about its load, its sequence and its digest";
    files::few_descriptors: "the daemon starts with limits of 4 to 48 descriptors";
    files::full_disk: "a disk of 4 MiB with snapshots, the journal and the log is full";
    files::file_size_limit: "the system limits files to 32 KiB: snapshots, the journal and the log";
    files::log_reader_stops: "the reader of the log stops reading, and 100 reloads write to the full pipe";
    files::log_reader_leaves: "the reader of the log ends, and 100 reloads write to the broken pipe";
    files::worker_files: "the folder of workers has pipes, links in a loop, devices, a file of 1 TiB, and 200 files that change";
    files::absurd_workers: "an operator names 20 impossible addresses as endpoint, replay and load endpoint";
    system::hangups: "an operator sends 300 SIGHUPs, 100 with an invalid file, while a process sends garbage";
    system::stands_still: "SIGSTOP halts the daemon 3 times while the engine publishes";
    system::clock_jumps: "the wall clock jumps by up to 270 years every 50 ms";
    system::killed_in_a_snapshot: "SIGKILL ends the daemon 3 times while it writes a snapshot of 120,000 blocks";
    system::terminated_in_a_snapshot: "SIGTERM ends the daemon 3 times while it writes a snapshot of 120,000 blocks";
    system::memory_runs_out: "2 processes send frames of 512 MiB together to a daemon that may have 160 MiB";
] slow [] }
