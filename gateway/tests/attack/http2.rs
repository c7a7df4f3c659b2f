//! HTTP/2 by hand, and floods of its frames, against the callers' port of the gateway and the port of the picker.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::attackers::{Orders, Role};
use crate::http1::connect;
use crate::picker::PROCESS;
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[("flood", flood)];

/// The most memory that a flood may bring a gateway to, MiB.
const MEMORY_MIB_MAX: u64 = 256;
/// Connections of each attacker.
const CONNECTIONS: usize = 4;

// ---- frames -----------------------------------------------------------------------------------------------------------

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header as a literal that no table keeps.
fn literal(name: &str, value: &str) -> Vec<u8> {
    assert!(name.len() < 127 && value.len() < 127, "longer lengths take more bytes");
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

/// The header block of a request of either port.
fn block(path: &str) -> Vec<u8> {
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", path),
        ("content-type", if path.starts_with("/v1") { "application/json" } else { "application/grpc" }),
        ("te", "trailers"),
    ];
    headers.iter().flat_map(|(name, value)| literal(name, value)).collect()
}

fn settings(pairs: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> =
        pairs.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
    frame(SETTINGS, 0, 0, &payload)
}

fn window(stream: u32, more: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
}

/// A connection after its preface and settings.
fn begin(at: &str, own: &[(u16, u32)]) -> std::io::Result<TcpStream> {
    let mut stream = connect(at, Duration::from_secs(2))?;
    stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings(own)[..]].concat())?;
    let mut first = [0; 512];
    let _ = stream.read(&mut first)?;
    stream.write_all(&frame(SETTINGS, 1, 0, &[]))?;
    Ok(stream)
}

// ---- floods -----------------------------------------------------------------------------------------------------------

/// What the order says after the address: the flood, and the path of requests.
fn flood(orders: &mut Orders) {
    let order = orders.at.clone();
    let mut parts = order.split('#');
    let (at, kind, path) =
        (parts.next().unwrap_or_default(), parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let mut streams: Vec<(TcpStream, u32)> = Vec::new();
    while orders.goes_on() {
        while streams.len() < CONNECTIONS {
            let own: &[(u16, u32)] = if kind == "windows" { &[(4, 0)] } else { &[] };
            // A server that has had enough closes; it must go on accepting.
            let Ok(stream) = begin(at, own) else { break };
            orders.count("connections", 1);
            streams.push((stream, 1));
        }
        let before = streams.len();
        streams.retain_mut(|(stream, next)| {
            let burst = burst(kind, path, next);
            // A server may also stop reading, which holds the flood back: another connection is tried then.
            stream.write_all(&burst).is_ok()
        });
        orders.count("closed or held back", (before - streams.len()) as u64);
        orders.count("bursts", 1);
    }
}

/// A thousand frames or so; `next` is the next stream of the connection.
fn burst(kind: &str, path: &str, next: &mut u32) -> Vec<u8> {
    let (block, first) = (block(path), *next);
    let mut stream = || {
        let stream = *next;
        *next += 2;
        stream
    };
    let mut burst = Vec::new();
    match kind {
        "rapid_resets" => (0..500).for_each(|_| {
            let stream = stream();
            burst.extend(frame(HEADERS, END_HEADERS, stream, &block));
            burst.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
        }),
        "settings" => (0..1000).for_each(|at| burst.extend(settings(&[(4, 65_535 + at), (3, 100), (1, at)]))),
        "pings" => (0..1000).for_each(|at: u64| burst.extend(frame(PING, 0, 0, &at.to_be_bytes()))),
        "continuations" => {
            if first == 1 {
                burst.extend(frame(HEADERS, 0, stream(), &block));
            }
            let more = literal("x-more", "and more").repeat(400);
            (0..50).for_each(|_| burst.extend(frame(CONTINUATION, 0, 1, &more)));
            (0..500).for_each(|_| burst.extend(frame(CONTINUATION, 0, 1, &[])));
        }
        "windows" => {
            (0..50).for_each(|_| burst.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream(), &block)));
            let last = first + 100;
            (0..200).for_each(|at| burst.extend(settings(&[(4, if at % 2 == 0 { 0 } else { 0x7fff_ffff })])));
            burst.extend(settings(&[(4, 0)]));
            // One byte for each stream of the last bursts.
            (last.saturating_sub(200)..last).filter(|id| id % 2 == 1).for_each(|id| burst.extend(window(id, 1)));
        }
        "empty_data" => {
            let stream = stream();
            burst.extend(frame(HEADERS, END_HEADERS, stream, &block));
            (0..1000).for_each(|_| burst.extend(frame(DATA, 0, stream, &[])));
            let padded = [&[255, b'{'][..], &[0; 255]].concat();
            (0..50).for_each(|_| burst.extend(frame(DATA, PADDED, stream, &padded)));
        }
        "header_bombs" => {
            // One long header in the table, and a thousand places that mean it.
            let long = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'b'; 4000]].concat();
            burst.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream(), &[&block[..], &long].concat()));
            let bomb = [&block[..], &[0xbe; 4000]].concat();
            (0..20).for_each(|_| burst.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream(), &bomb)));
        }
        _ => panic!("no flood {kind}"),
    }
    burst
}

/// The flood on the callers' port.
fn on_proxy(trial: &mut Trial, kind: &str) {
    let Some(scene) = Scene::proxy("", &[]) else { return };
    scene.attacked_with(trial, "flood", 2, &format!("{kind}#/v1/chat/completions")).end(trial);
    scene.end(trial, MEMORY_MIB_MAX);
}

/// The flood on the picker's port.
fn on_picker(trial: &mut Trial, kind: &str) {
    let Some(scene) = Scene::picker(&[]) else { return };
    scene.attacked_with(trial, "flood", 2, &format!("{kind}#{PROCESS}")).end(trial);
    scene.end(trial, MEMORY_MIB_MAX);
}

macro_rules! floods {
    ($($proxy:ident $picker:ident $kind:literal)*) => {
        $(
            pub(crate) fn $proxy(trial: &mut Trial) {
                on_proxy(trial, $kind);
            }

            pub(crate) fn $picker(trial: &mut Trial) {
                on_picker(trial, $kind);
            }
        )*
    };
}

floods! {
    proxy_rapid_resets picker_rapid_resets "rapid_resets"
    proxy_settings picker_settings "settings"
    proxy_pings picker_pings "pings"
    proxy_continuations picker_continuations "continuations"
    proxy_windows picker_windows "windows"
    proxy_empty_data picker_empty_data "empty_data"
    proxy_header_bombs picker_header_bombs "header_bombs"
}
