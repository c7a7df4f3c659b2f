//! Attacks on the gateway and the endpoint picker as processes, from other processes. Each attack is bounded, and another
//! caller must get right answers during it. `scripts/attack` prints what each attack cost.
//!
//! ```text
//! attack/scene.rs     a gateway or a picker, simulated engines, and the caller whose answers must be right
//! attack/http1.rs     HTTP/1.1 by hand, as caller and as engine
//! attack/http2.rs     HTTP/2 by hand, and floods of its frames
//! attack/callers.rs   callers of the gateway
//! attack/engines.rs   engines behind it
//! attack/picker.rs    clients of the picker that do not behave as Envoy does
//! ```
//!
//! `tests/attack/trial.rs` measures, and `tests/attack/attackers.rs` starts the attackers, as for the daemon. The tests run
//! the real `kvrouted` program. Without it they are skipped with a message.

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

use trial::attacks;

attacks! { roles [callers engines http2 picker] attacks [
    callers::slow_chunks: "200 callers send a byte of a chunked body every 100 ms";
    callers::slow_headers: "300 callers send a byte of a header every 50 ms";
    callers::idle_connections: "a process opens 600 connections to a gateway that may have 256";
    callers::smuggled_requests: "a process sends requests whose end has two readings, with a second request behind them";
    callers::forged_headers: "a process sends the gateway's own headers, those of one connection, too many, too long, with a zero byte";
    callers::hostile_bodies: "2 processes send bodies of 8 MiB: nested, wide, with long numbers, with repeated keys, not UTF-8, or compressed";
    callers::wide_prompts: "a process sends bodies of 24 MiB with millions of prompts or adapters";
    callers::unread_streams: "64 callers ask for a stream that never ends and read nothing";
    engines::hostile_replies: "10 engines send endless headers, events and interim replies, wrong lengths, bombs, or nothing";
    http2::proxy_rapid_resets: "2 processes open streams and reset each of them at once";
    http2::proxy_settings: "2 processes send SETTINGS frames and never read the acknowledgements";
    http2::proxy_pings: "2 processes send PING frames and never read the acknowledgements";
    http2::proxy_continuations: "2 processes send header blocks that never end";
    http2::proxy_windows: "2 processes open streams with a window of 0 and change the window again and again";
    http2::proxy_empty_data: "2 processes send empty DATA frames, and padded ones of a single byte";
    http2::proxy_header_bombs: "2 processes send header blocks that are 1000 times as long once decoded";
    http2::picker_rapid_resets: "2 processes open streams and reset each of them at once";
    http2::picker_settings: "2 processes send SETTINGS frames and never read the acknowledgements";
    http2::picker_pings: "2 processes send PING frames and never read the acknowledgements";
    http2::picker_continuations: "2 processes send header blocks that never end";
    http2::picker_windows: "2 processes open streams with a window of 0 and change the window again and again";
    http2::picker_empty_data: "2 processes send empty DATA frames, and padded ones of a single byte";
    http2::picker_header_bombs: "2 processes send header blocks that are 1000 times as long once decoded";
    picker::disorder: "2 processes send messages in any order, on 200 streams at once";
    picker::small_pieces: "a process sends bodies on 200 streams in pieces of 1 byte, each in a message of 64 KiB";
    picker::unfinished_messages: "a process sends a message of 30 MiB without its end on each of 20 streams";
    picker::endless_bodies: "a process sends bodies that never end on 64 streams";
    picker::huge_headers: "a process sends 200 KiB of headers on each of 1000 streams, and up to a million empty ones on each of 6";
    picker::hostile_subsets: "a process sends subsets of 50,000 entries, of wrong types, and nested 1000 deep";
    picker::cancelled_streams: "4 processes end streams at any point";
    picker::silent_streams: "a process opens 3000 streams and sends nothing";
] slow [
    engines::renamed_models: "an engine names another model each time it is asked, for two minutes";
] }
