//! Strangers at the port for other routers, and a router that has the secret and lies.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use kvrouted::ids::Worker;
use kvrouted::load::Gauge;
use kvrouted::routers::protocol::{
    Batch, Content, ENVELOPE_BYTES, Heartbeat, Message, SnapshotRequest, SnapshotSection, decode, encode, seal,
};
use kvrouted::routers::{Digest, Fingerprint, Incarnation, Keys, OriginId, Sender, WorkerGauge};
use kvrouted::zmtp;
use rand::{RngExt as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::json;

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::endless::{greeting, ready};
use crate::kit::{until, until_ok};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] =
    &[("knock_at_the_routers_port", knock_at_the_routers_port), ("route_and_lie", route_and_lie)];

const SECRET: &str = "a secret of at least thirty-two bytes";
const OTHER_SECRET: &str = "another secret, just as long as that";
/// The answer of the lying router that says for certain that it never sent what the daemon has heard.
const LYING_ANSWER: u32 = 3;

fn keys(secret: &str) -> Keys {
    Keys::new(secret.as_bytes(), None).expect("long enough")
}

/// A daemon that shares its load, and the address at which other routers hear it.
fn scene(peers: &[String]) -> (Scene, String) {
    let secret = std::env::temp_dir().join(format!("kvrouted-attack-{}-{}", std::process::id(), peers.len()));
    std::fs::write(&secret, SECRET).expect("written");
    let tables = format!(
        "[routers]\nlisten = \"tcp://127.0.0.1:0\"\npeers = {peers:?}\njoin_ms_max = 0\nsecret_file = {secret:?}\n"
    );
    let scene = Scene::configured("", &tables);
    std::fs::remove_file(secret).expect("removed");
    let own = scene.daemon.status().routers.swap_remove(0);
    (scene, own.address)
}

// ---- strangers --------------------------------------------------------------------------------------------------------

pub(crate) fn router_strangers(trial: &mut Trial) {
    let (scene, address) = scene(&[]);
    let address = address.strip_prefix("tcp://").expect("a port");
    Attackers::start("knock_at_the_routers_port", 4, address, trial.lasts()).end(trial);
    trial.must_count("router_messages_wrong_mac", scene.counter("router_messages_wrong_mac"), 100);
    trial.must_count("router_messages_unreadable", scene.counter("router_messages_unreadable"), 1);
    trial.must_count("router_connections_cut", scene.counter("router_connections_cut"), 10);
    trial.must(scene.is_found("router_secret"), || "no finding names messages with another secret".into());
    scene.end(trial, 96);
}

/// Messages with another secret, messages that are none, parts without end, and connections that only stay.
fn knock_at_the_routers_port(orders: &mut Orders) {
    let hello = [greeting(), ready("DEALER")].concat();
    let stranger = Sender { origin: OriginId(1), incarnation: Incarnation(2), fingerprint: Fingerprint(3) };
    let forged = encode(&stranger, &Content::Heartbeat(Heartbeat::default()), &keys(OTHER_SECRET));
    let forged = zmtp::message(&[], &forged).repeat(200);
    let junk = zmtp::message(&[], b"no message of a router").repeat(200);
    let part = [&[1_u8, 200][..], &[7; 200]].concat().repeat(100);
    let mut held = Vec::new();
    while orders.goes_on() {
        let Ok(mut stream) = TcpStream::connect(&orders.at) else { continue };
        orders.count("connections", 1);
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("set");
        stream.set_read_timeout(Some(Duration::from_millis(1))).expect("set");
        let what = match orders.number {
            0 => &forged,
            1 => &junk,
            2 => &part,
            _ => {
                held.push(stream);
                if held.len() > 100 {
                    held.clear();
                }
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
        };
        let mut sent = stream.write_all(&hello);
        // It reads hardly any answer.
        while sent.is_ok() && orders.goes_on() {
            sent = stream.write_all(what);
            orders.count("KiB sent", what.len() as u64 / 1024);
            let _ = stream.read(&mut [0; 64]);
        }
    }
}

// ---- a router that lies -----------------------------------------------------------------------------------------------

pub(crate) fn lying_router(trial: &mut Trial) {
    let attackers = Attackers::start("route_and_lie", 1, "", trial.lasts());
    let offers = attackers.offers();
    let (scene, _) = scene(&[offers[0][0].as_str().expect("an address").to_owned()]);
    attackers.end(trial);
    until("its lies are found", || scene.counter("router_quarantines") > 0);
    trial.must_count("router_messages_received", scene.counter("router_messages_received"), 100);
    trial.must_count("router_quarantines", scene.counter("router_quarantines"), 1);
    trial.must_count("router_joins", scene.counter("router_joins"), 1);
    let repaired = scene.counter("router_gaps") + scene.counter("router_digests_differ");
    trial.must_count("gaps and other digests", repaired, 1);
    until_ok("what it said is gone", || {
        let of_worker = scene.daemon.status().workers.swap_remove(0).counters;
        match of_worker.iter().find(|(name, _)| name == "others_requests") {
            None | Some((_, 0)) => Ok(()),
            Some(left) => Err(format!("{left:?}")),
        }
    });
    until("its connection has ended", || scene.daemon.status().routers[1].state != "live");
    scene.end(trial, 160);
}

/// Speaks as a router of the fleet, whose hash it learns from what the daemon says first.
fn route_and_lie(orders: &mut Orders) {
    let context = zmq::Context::new();
    let socket = context.socket(zmq::ROUTER).expect("a socket");
    socket.bind("tcp://127.0.0.1:*").expect("a port");
    socket.set_rcvtimeo(1).expect("set");
    socket.set_sndhwm(10_000).expect("set");
    orders.offer(&json!([socket.get_last_endpoint().expect("bound").expect("text")]));
    let (keys, mut rng) = (keys(SECRET), Xoshiro256PlusPlus::seed_from_u64(orders.number));
    let (mut daemon, mut sequence, mut beat, mut answers) = (None, 0, 0, 0);
    // However slow the machine is, it ends no sooner than it has told its worst lie.
    while orders.goes_on() || answers < LYING_ANSWER {
        if let Ok(parts) = socket.recv_multipart(0) {
            let [identity, message] = &parts[..] else { continue };
            let Ok(Message { sender, content, .. }) = decode(message, &keys) else { continue };
            let own = Sender { origin: OriginId(77), incarnation: Incarnation(1), ..sender };
            daemon = Some((identity.clone(), own));
            if let Content::Request(request) = content {
                answers += 1;
                // At first it says the truth: that it has no load. Later it denies what it has sent before.
                let denies = answers == LYING_ANSWER || answers > LYING_ANSWER && rng.random_bool(0.2);
                let answer =
                    if answers == 1 || denies { empty(&request) } else { answer(&mut rng, &request, sequence) };
                orders.count("answers", 1);
                let _ = socket.send_multipart([identity, &encode(&own, &answer, &keys)], zmq::DONTWAIT);
            }
        }
        let Some((identity, own)) = &daemon else { continue };
        let is_believed = answers > 0;
        for _ in 0..4 {
            let content = if is_believed { lie(&mut rng, &mut sequence, &mut beat) } else { alive(&mut beat) };
            let mut message = encode(own, &content, &keys);
            if is_believed && rng.random_bool(0.1) {
                // Signed, and not what it says it is.
                let at = rng.random_range(ENVELOPE_BYTES..message.len());
                message[at] ^= 1 << rng.random_range(0..8);
                message = seal((1, 0), own.origin, &message[ENVELOPE_BYTES..], &keys);
            }
            orders.count("messages", 1);
            let _ = socket.send_multipart([identity, &message], zmq::DONTWAIT);
        }
    }
}

fn gauges(rng: &mut Xoshiro256PlusPlus) -> Vec<WorkerGauge> {
    let mut number = |most: u64| if rng.random_bool(0.1) { most } else { rng.random_range(0..1 << 20) };
    let gauge = Gauge {
        requests: number(u32::MAX.into()) as u32,
        prefills: number(u32::MAX.into()) as u32,
        prefill_tokens: number(u64::MAX),
        decode_parts: number(u64::MAX),
        queued_ns: number(u64::MAX),
        running_ns: number(u64::MAX),
        elapsed_ns: number(u64::MAX),
        recent_share: number(1 << 60) as f32,
    };
    let ids = (0..rng.random_range(0..600)).map(|_| rng.random_range(1..10_000)).collect::<Vec<u64>>();
    ids.into_iter().chain([1]).map(|id| WorkerGauge { worker: Worker::new(id, 0), gauge, age_ms: 0 }).collect()
}

fn alive(beat: &mut u64) -> Content {
    *beat += 1;
    Content::Heartbeat(Heartbeat { beat: *beat, ..Heartbeat::default() })
}

fn empty(request: &SnapshotRequest) -> Content {
    Content::Section(SnapshotSection { nonce: request.nonce, parts: 1, ..SnapshotSection::default() })
}

fn answer(rng: &mut Xoshiro256PlusPlus, request: &SnapshotRequest, sequence: u64) -> Content {
    let gauges = if rng.random_bool(0.3) { gauges(rng) } else { Vec::new() };
    let digest = Digest { sum: 0, count: gauges.len() as u32 };
    let (part, parts) = (0, if rng.random_bool(0.2) { 128 } else { 1 });
    Content::Section(SnapshotSection { nonce: request.nonce, sequence, part, parts, digest, gauges, bindings: vec![] })
}

fn lie(rng: &mut Xoshiro256PlusPlus, sequence: &mut u64, beat: &mut u64) -> Content {
    *sequence += u64::from(rng.random_bool(0.9)) + if rng.random_bool(0.05) { 1 << 20 } else { 0 };
    if rng.random_bool(0.2) {
        *beat += 1;
        let digest = Digest { sum: rng.random_range(0..2), count: rng.random_range(0..2) };
        return Content::Heartbeat(Heartbeat { beat: *beat, sequence: *sequence, digest });
    }
    Content::Batch(Batch { sequence: (*sequence).max(1), gauges: gauges(rng), bindings: Vec::new() })
}
