//! Attacks on the gateway and the endpoint picker that run as processes, from other processes: each is bounded, and while
//! it goes on another caller must get right answers. `scripts/attack` prints what each cost.
//!
//! ```text
//! attack/scene.rs     a gateway or a picker, simulated engines, and the caller whose answers must be right
//! attack/http1.rs     HTTP/1.1 by hand
//! attack/http2.rs     HTTP/2 by hand, and floods of its frames
//! attack/callers.rs   callers of the gateway
//! attack/engines.rs   engines behind it
//! attack/picker.rs    clients of the picker that are no Envoy
//! ```
//!
//! What is measured, and the processes that attack, are those of the daemon's attacks (`tests/attack`). They use the
//! real `kvrouted` program, and are skipped with a message if it is not built.

#[path = "../../tests/attack/attackers.rs"]
mod attackers;
#[path = "attack/callers.rs"]
mod callers;
#[path = "attack/engines.rs"]
mod engines;
#[path = "attack/http1.rs"]
mod http1;
#[path = "attack/http2.rs"]
mod http2;
mod kit;
#[path = "attack/picker.rs"]
mod picker;
#[path = "epp/kit.rs"]
mod player;
#[path = "attack/scene.rs"]
mod scene;
#[path = "../../tests/attack/trial.rs"]
mod trial;

use attackers::Role;
use trial::{Attack, attacks};

attacks! { [
    callers::slow_chunks: "200 callers that send a byte of a chunked body every 100 ms";
    callers::slow_headers: "300 callers that send a byte of a header every 50 ms";
    callers::idle_connections: "600 connections to a gateway that may have 256";
    callers::smuggled_requests: "requests whose end can be read in two ways, and a second one behind them";
    callers::forged_headers: "headers of one connection, the gateway's own, too many, too long, with a zero byte";
    callers::hostile_bodies: "bodies of 8 MiB: nested, wide, long numbers, repeated keys, no UTF-8, compressed";
    callers::unread_streams: "64 callers of a stream without an end that read nothing";
    engines::hostile_replies: "10 engines: endless headers, events and interim replies, wrong lengths, bombs, silence";
    http2::proxy_rapid_resets: "streams that are opened and reset at once, by 2 processes";
    http2::proxy_settings: "SETTINGS frames, whose answers nobody reads, by 2 processes";
    http2::proxy_pings: "PING frames, whose answers nobody reads, by 2 processes";
    http2::proxy_continuations: "a header block that never ends, by 2 processes";
    http2::proxy_windows: "streams whose window is 0 or changes all the time, by 2 processes";
    http2::proxy_empty_data: "empty DATA frames and single bytes with padding, by 2 processes";
    http2::proxy_header_bombs: "header blocks that are 1000 times as long once decoded, by 2 processes";
    http2::picker_rapid_resets: "streams that are opened and reset at once, by 2 processes";
    http2::picker_settings: "SETTINGS frames, whose answers nobody reads, by 2 processes";
    http2::picker_pings: "PING frames, whose answers nobody reads, by 2 processes";
    http2::picker_continuations: "a header block that never ends, by 2 processes";
    http2::picker_windows: "streams whose window is 0 or changes all the time, by 2 processes";
    http2::picker_empty_data: "empty DATA frames and single bytes with padding, by 2 processes";
    http2::picker_header_bombs: "header blocks that are 1000 times as long once decoded, by 2 processes";
    picker::disorder: "messages in any order, on 200 streams at once";
    picker::small_pieces: "200 streams with bodies in pieces of 1 byte, each in a message of 64 KiB";
    picker::unfinished_messages: "20 streams with a message of 30 MiB without its end";
    picker::endless_bodies: "64 streams with bodies without an end";
    picker::huge_headers: "1000 streams with 200 KiB of headers each";
    picker::hostile_subsets: "subsets of 50,000 entries, of wrong types, and nested 1000 deep";
    picker::cancelled_streams: "streams that end anywhere, 4 processes";
    picker::silent_streams: "3000 streams that are opened and say nothing";
] slow [
    engines::renamed_models: "an engine that names another model each time it is asked, for two minutes";
] }

/// What attackers play.
fn roles() -> Vec<(&'static str, Role)> {
    [callers::ROLES, engines::ROLES, http2::ROLES, picker::ROLES].concat()
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
