//! Engines that attack: publishers, replay sockets and HTTP servers. Each is a worker of the daemon, beside one engine
//! that behaves and whose blocks must count all the while.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, KvEvent};
use kvrouted::ids::EngineHash;
use kvrouted::limits::{EVENT_MESSAGE_BYTES_MAX, ZMQ_PARTS_MAX};
use kvrouted::zmtp;
use serde_json::json;

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::endless::{endless, greeting, ready};
use crate::kit::engine::{BLOCK_SIZE, SCHEME, engine_hashes, stored};
use crate::kit::{WAIT_MAX, prompt, until};
use crate::mutator::Mutator;
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("publish_junk", publish_junk),
    ("publish_many_unfinished", publish_many_unfinished),
    ("publish_without_end", publish_without_end),
    ("greet_hugely", greet_hugely),
    ("publish_mutants", publish_mutants),
    ("publish_odd_parts", publish_odd_parts),
    ("publish_single_bytes", publish_single_bytes),
    ("hang_up_always", hang_up_always),
    ("replay_without_end", replay_without_end),
    ("report_copies", report_copies),
    ("store_without_end", store_without_end),
    ("serve_hostile_info", serve_hostile_info),
];

// ---- how an attacker publishes --------------------------------------------------------------------------------------

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback interface");
    let port = listener.local_addr().expect("an address").port();
    (listener, format!("tcp://127.0.0.1:{port}"))
}

/// The next connection of the daemon, after its handshake. It may have gone by then.
fn subscriber(listener: &TcpListener, socket: &str) -> std::io::Result<TcpStream> {
    let (mut stream, _) = listener.accept()?;
    stream.set_write_timeout(Some(Duration::from_millis(500)))?;
    stream.set_read_timeout(Some(WAIT_MAX))?;
    stream.write_all(&[greeting(), ready(socket)].concat())?;
    // Its greeting, its READY, and what it subscribes to or asks for.
    let mut heard = [0; 4096];
    for _ in 0..3 {
        let read = stream.read(&mut heard)?;
        if read == 0 || heard[..read].windows(9).any(|word| word == b"SUBSCRIBE") {
            break;
        }
    }
    Ok(stream)
}

/// Offers an endpoint, and publishes to each connection until the time is over.
fn publish(orders: &mut Orders, mut with: impl FnMut(&mut Orders, &mut TcpStream) -> std::io::Result<()>) {
    let (listener, endpoint) = listener();
    orders.offer(&json!([endpoint]));
    while orders.goes_on() {
        let Ok(mut stream) = subscriber(&listener, "PUB") else { continue };
        orders.count("connections", 1);
        // The daemon cuts the connection when it will not have more.
        let _ = with(orders, &mut stream);
    }
}

fn batch(seq: u64, payload: &[u8]) -> Vec<u8> {
    zmtp::message(&[b"", &seq.to_be_bytes()], payload).to_vec()
}

/// Waits until the daemon has met the attackers' publishers, and then until they have ended.
fn attack(trial: &mut Trial, scene: &Scene, role: &'static str, count: u64) {
    let attackers = Attackers::start(role, count, "", trial.lasts());
    scene.workers_of(&attackers, |_, endpoint| format!("endpoint={}", endpoint.as_str().expect("an endpoint")));
    attackers.end(trial);
}

// ---- the attacks ------------------------------------------------------------------------------------------------------

pub(crate) fn junk_messages(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_junk", 1);
    trial.must_count("batches_undecodable", scene.counter_of_others("batches_undecodable"), 1);
    scene.end(trial, 320);
}

fn publish_junk(orders: &mut Orders) {
    let mut payload = vec![0xdd; 63 << 20];
    let beginnings: [&[u8]; 6] = [
        b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb",
        b"KVE1",
        &[0; 8],
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb\0\0\0\0\0\0\0\0\xdd",
    ];
    publish(orders, |orders, stream| {
        stream.set_write_timeout(Some(WAIT_MAX))?;
        for (seq, beginning) in (0..).zip(beginnings.iter().cycle()) {
            payload[..beginning.len()].copy_from_slice(beginning);
            stream.write_all(&batch(seq, &payload))?;
            orders.count("MiB sent", 63);
            if !orders.goes_on() {
                break;
            }
        }
        Ok(())
    });
}

/// Engines that each leave a message of 120 MiB without its end.
const UNFINISHED: usize = 12;

pub(crate) fn unfinished_messages(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_many_unfinished", 1);
    scene.end(trial, 768);
}

fn publish_many_unfinished(orders: &mut Orders) {
    let listeners: Vec<_> = (0..UNFINISHED).map(|_| listener()).collect();
    orders.offer(&listeners.iter().map(|(_, endpoint)| endpoint.clone()).collect::<Vec<_>>().into());
    let part = vec![7; 1 << 20];
    let mut streams: Vec<TcpStream> = Vec::new();
    for (listener, _) in &listeners {
        let mut stream = subscriber(listener, "PUB").expect("the daemon subscribes");
        stream.set_write_timeout(Some(WAIT_MAX)).expect("set");
        let begun = [&[2_u8][..], &(120_u64 << 20).to_be_bytes()].concat();
        let mut sent = stream.write_all(&begun);
        for _ in 0..119 {
            sent = sent.and_then(|()| stream.write_all(&part));
            orders.count("MiB sent", u64::from(sent.is_ok()));
        }
        streams.push(stream);
    }
    orders.hold();
}

pub(crate) fn messages_without_end(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_without_end", endless().len() as u64);
    trial.must_count("messages_unbounded", scene.counter_of_others("messages_unbounded"), 4);
    let is_found = scene.is_found("message_unbounded");
    trial.must(is_found, || "no finding names the messages without an end".to_owned());
    scene.end(trial, 448);
}

fn publish_without_end(orders: &mut Orders) {
    let (_, first, then) = endless()[orders.number as usize].clone();
    publish(orders, |orders, stream| {
        stream.write_all(&first)?;
        while orders.goes_on() {
            stream.write_all(&then)?;
            orders.count("KiB sent", then.len() as u64 >> 10);
        }
        Ok(())
    });
}

pub(crate) fn huge_greetings(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "greet_hugely", 6);
    // A command that is too long cuts the connection, and the next attempt waits for the longest pause.
    trial.must_count("handshakes_failed", scene.counter_of_others("handshakes_failed"), 3);
    scene.end(trial, 96);
}

fn greet_hugely(orders: &mut Orders) {
    let (listener, endpoint) = listener();
    orders.offer(&json!([endpoint]));
    let long = |flags: u8, bytes: u64| [&[flags][..], &bytes.to_be_bytes()].concat();
    let property = b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB";
    let (first, then): (Vec<u8>, Vec<u8>) = match orders.number {
        // A READY of 4 GiB, one whose property is longer than itself, and endless properties.
        0 => ([greeting(), long(6, 1 << 32)].concat(), vec![7; 60_000]),
        1 => ([greeting(), vec![4, property.len() as u8], property.to_vec()].concat(), ready("PUB")),
        2 => ([greeting(), long(6, 60_000)].concat(), b"\x01a\0\0\0\x01b".repeat(8000)),
        // A greeting without an end, one of another version and mechanism, and commands before READY.
        3 => (vec![0xff], vec![0; 60_000]),
        4 => ([&[0xff][..], &[0; 8], &[0x7f, 9, 9], b"CURVE", &[0; 47]].concat(), ready("PUB")),
        _ => (greeting(), [&[4, 10][..], b"\x04PING\0\0xyz"].concat().repeat(1000)),
    };
    while orders.goes_on() {
        let Ok((mut stream, _)) = listener.accept() else { continue };
        orders.count("connections", 1);
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("set");
        let mut sent = stream.write_all(&first);
        for _ in 0..200 {
            sent = sent.and_then(|()| stream.write_all(&then));
        }
        // Until the daemon has had enough of it.
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
        while sent.is_ok() && orders.goes_on() && stream.read(&mut [0; 512]).is_ok_and(|read| read > 0) {}
    }
}

pub(crate) fn lying_events(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_mutants", 2);
    let (batches, refused) = (scene.counter_of_others("batches"), scene.counter_of_others("batches_undecodable"));
    trial.must_count("batches", batches, 50);
    trial.must_count("batches_undecodable", refused, 20);
    scene.end(trial, 192);
}

/// Mutants of batches of both formats, whose offsets and counts lie.
fn publish_mutants(orders: &mut Orders) {
    let mut encoder = Encoder::new();
    let tokens = prompt(orders.number as u32 + 7, 40 * BLOCK_SIZE);
    let hashes = engine_hashes(&tokens);
    let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
    let mut seeds: Vec<Vec<u8>> = (1..40)
        .map(|blocks| {
            let event = stored(&hashes[..blocks], &tokens[..blocks * BLOCK_SIZE as usize], BLOCK_SIZE);
            encoder.encode(&info, [event]).to_vec()
        })
        .collect();
    seeds.extend(std::fs::read_dir("tests/fixtures/events").expect("recordings").flatten().filter_map(|entry| {
        let is_recording = entry.path().extension().is_some_and(|extension| extension == "bin");
        is_recording.then(|| std::fs::read(entry.path()).expect("a recording"))
    }));
    let mut mutator = Mutator::new(&seeds, orders.number);
    publish(orders, |orders, stream| {
        for seq in 0.. {
            stream.write_all(&batch(seq, &mutator.next()))?;
            orders.count("batches sent", 1);
            if !orders.goes_on() {
                break;
            }
            if seq % 32 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    });
}

pub(crate) fn odd_parts(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_odd_parts", 1);
    for counter in ["messages_misframed", "messages_unbounded"] {
        trial.must_count(counter, scene.counter_of_others(counter), 1);
    }
    trial.must_count("messages_oversized", scene.counter_of_others("messages_oversized"), 1);
    // The largest message, in a block that has doubled, beside what is not given back yet: 344 to 408 MiB were measured.
    scene.end(trial, 448);
}

fn publish_odd_parts(orders: &mut Orders) {
    // As large as may be, a byte more, and a message whose first part is larger than all others together may be.
    let mut odd: Vec<Vec<u8>> = [0, 1].map(|more| batch(5, &vec![0; EVENT_MESSAGE_BYTES_MAX + more])).into();
    odd.push(zmtp::message(&[&vec![0; 2 * EVENT_MESSAGE_BYTES_MAX - 64], &[0; 8]], &[0; 8]).to_vec());
    let numbers: [&[u8]; 4] = [&[], &[0; 7], &[0; 9], &[0xff; 8]];
    odd.extend(numbers.map(|number| zmtp::message(&[b"", number], b"").to_vec()));
    // The last of them has a part too many, and cuts the connection.
    odd.extend([1, 2, 3, ZMQ_PARTS_MAX - 1, ZMQ_PARTS_MAX].map(|parts| [[1_u8, 0].repeat(parts), vec![0, 0]].concat()));
    publish(orders, |orders, stream| {
        stream.set_write_timeout(Some(WAIT_MAX))?;
        for message in &odd {
            stream.write_all(message)?;
            orders.count("messages sent", 1);
        }
        Ok(())
    });
}

pub(crate) fn single_bytes(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "publish_single_bytes", 1);
    let met = scene.counter_of_others("batches_undecodable") + scene.counter_of_others("messages_misframed");
    trial.must_count("messages that are no batch", met, 1000);
    scene.end(trial, 96);
}

/// Messages of one byte at line rate: with a number, and bare.
fn publish_single_bytes(orders: &mut Orders) {
    let bare = [0_u8, 1, 7].repeat(2000);
    publish(orders, |orders, stream| {
        let mut seq = 0;
        while orders.goes_on() {
            let numbered: Vec<u8> = (seq..seq + 2000).flat_map(|seq| batch(seq, &[seq as u8])).collect();
            seq += 2000;
            stream.write_all(&[&numbered[..], &bare].concat())?;
            orders.count("messages sent", 4000);
        }
        Ok(())
    });
}

pub(crate) fn publisher_reconnects(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "hang_up_always", 1);
    // Each is tried again after a pause of 100 ms at least.
    let most = (trial.lasts().as_secs_f64() * 10.0) as u64 * RECONNECTING as u64 + 4 * RECONNECTING as u64;
    let connections = trial.counted("connections");
    trial.must(connections <= most, || format!("{connections} connections, not {most} at most"));
    let ended = scene.counter_of_others("disconnects") + scene.counter_of_others("handshakes_failed");
    trial.must_count("connections ended, in the handshake or after it", ended, RECONNECTING as u64);
    scene.end(trial, 160);
}

/// Engines that end each connection after its first batch.
const RECONNECTING: usize = 64;

fn hang_up_always(orders: &mut Orders) {
    let listeners: Vec<_> = (0..RECONNECTING).map(|_| listener()).collect();
    orders.offer(&listeners.iter().map(|(_, endpoint)| endpoint.clone()).collect::<Vec<_>>().into());
    listeners.iter().for_each(|(listener, _)| listener.set_nonblocking(true).expect("set"));
    while orders.goes_on() {
        for (listener, _) in &listeners {
            // Half of them end the connection within the handshake.
            let Ok((mut stream, _)) = listener.accept() else { continue };
            orders.count("connections", 1);
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(Duration::from_millis(100))).expect("set");
            let _ = stream.write_all(&[greeting(), ready("PUB")].concat());
            let _ = stream.read(&mut [0; 512]).and_then(|_| stream.write_all(&batch(0, b"")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn endless_replays(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    let attackers = Attackers::start("replay_without_end", 1, "", trial.lasts());
    let offers = attackers.offers();
    let [events, replay] = [0, 1].map(|at| offers[0][at].as_str().expect("an endpoint").to_owned());
    scene.daemon.worker_ok(&["add", &format!("id=2,endpoint={events},replay={replay}")]);
    attackers.end(trial);
    trial.must_count("replays_asked", scene.counter_of_others("replays_asked"), 1);
    trial.must_count("batches_replayed", scene.counter_of_others("batches_replayed"), 100);
    scene.end(trial, 448);
}

/// A publisher with a gap, whose replay socket goes on for ever.
fn replay_without_end(orders: &mut Orders) {
    let ((events, events_at), (replays, replays_at)) = (listener(), listener());
    orders.offer(&json!([events_at, replays_at]));
    std::thread::spawn(move || {
        while let Ok(mut stream) = subscriber(&events, "PUB") {
            // A number far beyond what comes next, again and again.
            for seq in (0..).map(|round| round * 1_000_000) {
                if stream.write_all(&batch(seq, &[0x93])).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    });
    let mut encoder = Encoder::new();
    let tokens = prompt(77, 64 * BLOCK_SIZE);
    let hashes = engine_hashes(&tokens);
    let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
    let payload = encoder.encode(&info, [stored(&hashes, &tokens, BLOCK_SIZE)]).to_vec();
    replays.set_nonblocking(true).expect("set");
    while orders.goes_on() {
        let Ok((stream, _)) = replays.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        stream.set_nonblocking(false).expect("set");
        let Ok(mut stream) = shaken(stream, "ROUTER") else { continue };
        orders.count("replays begun", 1);
        for seq in 0.. {
            let part = zmtp::message(&[b"", &u64::to_be_bytes(seq)], &payload);
            if !orders.goes_on() || stream.write_all(&part).is_err() {
                break;
            }
        }
    }
}

/// As [`subscriber`], of a connection that is there.
fn shaken(mut stream: TcpStream, socket: &str) -> std::io::Result<TcpStream> {
    stream.set_write_timeout(Some(Duration::from_millis(500)))?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    stream.write_all(&[greeting(), ready(socket)].concat())?;
    let mut heard = [0; 4096];
    let _ = stream.read(&mut heard)?;
    Ok(stream)
}

pub(crate) fn copies_and_reports(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    attack(trial, &scene, "report_copies", 1);
    trial.must_count("blocks_stored", scene.counter_of_others("blocks_stored"), 32);
    scene.end(trial, 192);
}

/// The same blocks again and again: under the same names, under others, after other parents, and removed now and then.
fn report_copies(orders: &mut Orders) {
    let mut encoder = Encoder::new();
    let tokens = prompt(5, 32 * BLOCK_SIZE);
    let hashes = engine_hashes(&tokens);
    let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
    publish(orders, |orders, stream| {
        for seq in 0_u64.. {
            let renamed: Vec<EngineHash> = hashes.iter().map(|hash| EngineHash(hash.0 ^ (seq % 1000))).collect();
            let names = if seq % 2 == 0 { &hashes } else { &renamed };
            let mut event = stored(names, &tokens, BLOCK_SIZE);
            if let KvEvent::Stored(stored) = &mut event {
                stored.parent = (seq % 3 == 0).then(|| EngineHash(hashes[31].0 ^ (seq % 77)));
            }
            stream.write_all(&batch(seq, encoder.encode(&info, [event])))?;
            orders.count("batches sent", 1);
            if !orders.goes_on() {
                break;
            }
            if seq % 64 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    });
}

/// Blocks that the storing engine may have.
const BLOCKS_MAX: u64 = 50_000;

pub(crate) fn blocks_without_end(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    let attackers = Attackers::start("store_without_end", 1, "", trial.lasts());
    scene.workers_of(&attackers, |_, endpoint| {
        format!("endpoint={},blocks_max={BLOCKS_MAX}", endpoint.as_str().expect("an endpoint"))
    });
    attackers.end(trial);
    until("the bound is met", || scene.counter_of_others("stores_bounded") > 0);
    trial.must_count("stores_bounded", scene.counter_of_others("stores_bounded"), 1);
    scene.end(trial, 192);
}

fn store_without_end(orders: &mut Orders) {
    let mut encoder = Encoder::new();
    let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
    publish(orders, |orders, stream| {
        for seq in 0_u64.. {
            let tokens = prompt(seq as u32 + 1000, 256 * BLOCK_SIZE);
            let hashes = engine_hashes(&tokens);
            stream.write_all(&batch(seq, encoder.encode(&info, [stored(&hashes, &tokens, BLOCK_SIZE)])))?;
            orders.count("blocks sent", hashes.len() as u64);
            if !orders.goes_on() && seq > 400 {
                break;
            }
        }
        Ok(())
    });
}

pub(crate) fn server_info(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    let attackers = Attackers::start("serve_hostile_info", 6, "", trial.lasts());
    scene.workers_of(&attackers, |_, url| format!("url={}", url.as_str().expect("a URL")));
    attackers.end(trial);
    let is_found = scene.is_found("source_unusable");
    trial.must(is_found, || "no finding names the engines whose replies cannot be used".to_owned());
    scene.end(trial, 160);
}

/// HTTP replies that never end, lie about their length, or lead elsewhere.
fn serve_hostile_info(orders: &mut Orders) {
    let (listener, endpoint) = listener();
    orders.offer(&json!([endpoint.replace("tcp", "http")]));
    listener.set_nonblocking(true).expect("set");
    let ok = b"HTTP/1.1 200 OK\r\n";
    let chunked = [&ok[..], b"Transfer-Encoding: chunked\r\n\r\n"].concat();
    let (first, then): (Vec<u8>, Vec<u8>) = match orders.number {
        0 => (ok.to_vec(), b"X-More: and more\r\n".repeat(500)),
        1 => (chunked, [b"2000\r\n", &[b' '; 0x2000][..], b"\r\n"].concat()),
        2 => ([&ok[..], b"Content-Length: 18446744073709551615\r\n\r\n"].concat(), vec![b'['; 8192]),
        3 => (b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100), b"HTTP/1.1 100 Continue\r\n\r\n".repeat(400)),
        4 => (
            format!("HTTP/1.1 302 Found\r\nLocation: {endpoint}/\r\nContent-Length: 0\r\n\r\n").into_bytes(),
            Vec::new(),
        ),
        _ => ([&ok[..], b"Content-Length: 100000\r\n\r\n{"].concat(), Vec::new()),
    };
    while orders.goes_on() {
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        orders.count("requests", 1);
        stream.set_nonblocking(false).expect("set");
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("set");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
        let _ = stream.read(&mut [0; 2048]);
        let mut sent = stream.write_all(&first);
        while !then.is_empty() && sent.is_ok() && orders.goes_on() {
            sent = stream.write_all(&then);
        }
        // A reply that only waits is as long as the daemon lets it.
        while then.is_empty() && sent.is_ok() && orders.goes_on() && orders.number > 4 {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
