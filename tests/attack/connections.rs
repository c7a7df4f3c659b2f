//! Clients of the routing and the admin socket: too many, half gone, too slow, too large, or lying.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvrouted::client::Client;
use kvrouted::ids::{CorrelationId, SpaceId, Worker};
use kvrouted::limits::{CONNECTIONS_MAX, FRAME_BODY_BYTES_MAX_DEFAULT};
use kvrouted::load::EngineLoad;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::serve::admin_path;
use kvrouted::wire::{AdminRequest, FrameKind, LaneRequest, RequestEncoder};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use rustix::process::{Gid, Resource, Rlimit, Uid, geteuid, getrlimit, setrlimit};

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::raw::{self, encoded, header, hello_frame, read_frame, route_frame};
use crate::kit::{WAIT_MAX, options, skipped, text, until, until_ok};
use crate::scene::Scene;
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("connect_many", connect_many),
    ("send_garbage", send_garbage),
    ("send_half_frames", send_half_frames),
    ("never_read", never_read),
    ("never_read_admin", never_read_admin),
    ("send_large_frames", send_large_frames),
    ("send_byte_by_byte", send_byte_by_byte),
    ("forge_reports", forge_reports),
    ("spoil_lanes", spoil_lanes),
];

const MANY: u64 = 5000;
const MANY_PROCESSES: u64 = 3;

pub(crate) fn many_connections(trial: &mut Trial) {
    let room = getrlimit(Resource::Nofile);
    if room.maximum.is_some_and(|maximum| maximum < 3 * CONNECTIONS_MAX as u64) {
        return skipped("a flood of connections", "the limit of open files cannot be raised far enough");
    }
    let scene = Scene::configured("cores = 2", "");
    let attackers = scene.attacked_by(trial, "connect_many", MANY_PROCESSES);
    attackers.end(trial);
    // A user may have three quarters of all connections, each with a receive buffer of 64 KiB.
    let (refused, share) = (trial.counted("connections refused"), CONNECTIONS_MAX as u64 * 3 / 4);
    trial.must_count("connections_refused_user", scene.counter("connections_refused_user"), refused.max(1));
    scene.end(trial, 320);
    let most = trial.descriptors_more();
    trial.must((share - 64..=share + 8).contains(&most), || format!("{most} connections, {share} allowed"));
}

/// Raises this process's limit on open files as far as it goes.
fn raise_open_files() {
    let room = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: room.maximum, ..room }).expect("raised");
}

/// A connection that answers in time or not at all.
fn connect(at: &str) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(at)?;
    stream.set_read_timeout(Some(WAIT_MAX))?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    Ok(stream)
}

/// A connection that has said hello; an error if the daemon refuses it.
fn greeted(at: &str) -> std::io::Result<UnixStream> {
    let mut stream = connect(at)?;
    stream.write_all(&hello_frame(None))?;
    let (header, _) = read_frame(&mut stream)?;
    if header.kind == FrameKind::HelloReply as u8 { Ok(stream) } else { Err(std::io::Error::other("refused")) }
}

fn connect_many(orders: &mut Orders) {
    raise_open_files();
    let mut held = Vec::new();
    for _ in 0..MANY.div_ceil(MANY_PROCESSES) {
        match greeted(&orders.at) {
            Ok(stream) => held.push(stream),
            Err(_) => orders.count("connections refused", 1),
        }
    }
    orders.count("connections held", held.len() as u64);
    orders.hold();
}

pub(crate) fn garbage(trial: &mut Trial) {
    let scene = Scene::configured("frame_timeout_ms = 1000", "");
    scene.attacked_by(trial, "send_garbage", 2).end(trial);
    trial.must_count("connections_untrusted", scene.counter("connections_untrusted"), 500);
    scene.end(trial, 96);
}

fn send_garbage(orders: &mut Orders) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(orders.number);
    for round in 0..1500 {
        let stream = if round % 2 == 0 { greeted(&orders.at) } else { connect(&orders.at) };
        let Ok(mut stream) = stream else { continue };
        orders.count("connections", 1);
        // The daemon closes the connection as soon as it knows.
        let _ = stream.write_all(&raw::garbage(&mut random, round));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

pub(crate) fn half_frames(trial: &mut Trial) {
    let scene = Scene::configured("frame_timeout_ms = 1000", "[booking]\nsession_grace_s = 0");
    for _ in 0..2 {
        let mut attackers = scene.attacked_by(trial, "send_half_frames", 2);
        attackers.offers();
        attackers.kill();
        trial.count("processes killed", 2);
    }
    // Each of a thousand connections had a receive buffer of 64 KiB.
    scene.end(trial, 192);
}

fn send_half_frames(orders: &mut Orders) {
    raise_open_files();
    let (question, mut held) = (route_frame(3, 4000), Vec::new());
    for at in 0..500_usize {
        let Ok(mut stream) = greeted(&orders.at) else { continue };
        let cut = (at * 7919 + 1) % question.len();
        stream.write_all(&[&route_frame(1, 40)[..], &question[..cut]].concat()).expect("sent");
        held.push(stream);
    }
    orders.offer(&held.len().into());
    // Until this process is killed.
    std::thread::sleep(WAIT_MAX);
}

pub(crate) fn unread_replies(trial: &mut Trial) {
    let scene = Scene::configured("unread_ms_max = 1000", "");
    scene.attacked_by(trial, "never_read", 2).end(trial);
    trial.must_count("connections_unread", scene.counter("connections_unread"), 64);
    scene.end(trial, 128);
}

fn never_read(orders: &mut Orders) {
    ask_and_never_read(orders, 32, &(0..64).flat_map(|id| route_frame(id, 400)).collect::<Vec<u8>>());
}

/// Asks by connections that it never reads, until the daemon has closed all of them. Their ends cannot be seen without
/// reading, but writing then fails in another way.
fn ask_and_never_read(orders: &mut Orders, connections: usize, frames: &[u8]) {
    let mut streams: Vec<(UnixStream, usize)> =
        (0..connections).filter_map(|_| Some((greeted(&orders.at).ok()?, 0))).collect();
    orders.count("connections", streams.len() as u64);
    streams.iter().for_each(|(stream, _)| stream.set_nonblocking(true).expect("set"));
    until("the daemon has closed them", || {
        streams.retain_mut(|(stream, at)| is_taken_or_waits(stream, frames, at));
        streams.is_empty()
    });
}

/// Writes the frames round and round, from `at` on, as long as the daemon takes them. Whether the connection is open.
fn is_taken_or_waits(stream: &mut UnixStream, frames: &[u8], at: &mut usize) -> bool {
    loop {
        match stream.write(&frames[*at..]) {
            Ok(written) => *at = (*at + written) % frames.len(),
            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

pub(crate) fn unread_admin_replies(trial: &mut Trial) {
    let scene = Scene::configured("frame_timeout_ms = 1000", "");
    let admin = admin_path(&scene.daemon.socket());
    Attackers::start("never_read_admin", 1, text(&admin), trial.lasts()).end(trial);
    let overdue = until_ok("they are closed", || match scene.counter("admin_connections_overdue") {
        overdue @ 40.. => Ok(overdue),
        overdue => Err(format!("{overdue} are")),
    });
    trial.must_count("admin_connections_overdue", overdue, 40);
    scene.end(trial, 128);
}

fn never_read_admin(orders: &mut Orders) {
    let status = encoded(|encoder, out| {
        encoder.admin(CorrelationId(3), &AdminRequest::Status { cursor: 0, limit: 0 }, out);
    });
    ask_and_never_read(orders, 40, &status);
}

pub(crate) fn large_frames(trial: &mut Trial) {
    let scene = Scene::configured("cores = 1\nframe_timeout_ms = 3000", "");
    scene.attacked_by(trial, "send_large_frames", 2).end(trial);
    let refused = scene.counter("frames_no_room") + scene.counter("frames_no_room_user");
    trial.must_count("frames refused for want of room", refused, 16);
    // The receive buffers of one thread, and half as much again for the allocator.
    scene.end(trial, 384 + 64);
}

fn send_large_frames(orders: &mut Orders) {
    let part = vec![0; FRAME_BODY_BYTES_MAX_DEFAULT as usize - 64];
    let mut held: Vec<UnixStream> = (0..32).filter_map(|_| greeted(&orders.at).ok()).collect();
    for stream in &mut held {
        stream.set_write_timeout(Some(WAIT_MAX)).expect("set");
        let begun = stream.write_all(&header(FrameKind::Route, FRAME_BODY_BYTES_MAX_DEFAULT, 7).encode());
        // A frame without room is skipped as it comes.
        orders.count("frames", u64::from(begun.and_then(|()| stream.write_all(&part)).is_ok()));
    }
    orders.hold();
}

pub(crate) fn byte_by_byte(trial: &mut Trial) {
    let scene = Scene::configured("frame_timeout_ms = 1000", "");
    scene.attacked_by(trial, "send_byte_by_byte", 2).end(trial);
    trial.must_count("connections_frame_overdue", scene.counter("connections_frame_overdue"), 190);
    scene.end(trial, 96);
}

fn send_byte_by_byte(orders: &mut Orders) {
    let frame = route_frame(9, 400);
    let mut slow: Vec<UnixStream> = (0..100).filter_map(|_| greeted(&orders.at).ok()).collect();
    for byte in &frame[..frame.len() - 1] {
        slow.retain_mut(|stream| stream.write_all(&[*byte]).is_ok());
        if slow.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Workers beside the one that behaves, which is worker 1.
const REPORTED_WORKERS: u64 = 10;

pub(crate) fn forged_reports(trial: &mut Trial) {
    if !geteuid().is_root() {
        return skipped("another user's forged reports", "only root can become another user");
    }
    let workers: String = (2..=REPORTED_WORKERS).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let booking = "[booking]\nback_off_ms = 60000\nback_off_ms_max = 60000\nreported_load_ms_max = 60000\n";
    let policy = "[policy]\nbusy_prefill_tokens = 1000\n";
    let serve = "socket_mode = \"0666\"\nuser_share_percent = 10";
    let scene = Scene::configured(serve, &format!("{workers}{booking}{policy}"));
    scene.attacked_by(trial, "forge_reports", 1).end(trial);
    // One worker of ten is what a tenth allows, and it may be the one that behaves: it is reported on last.
    let mut client = Client::connect(&scene.daemon.socket(), &options()).expect("a connection");
    let space = client.space("m", None).expect("the space").id;
    let question = RouteRequest::new(space, Prompt::of_tokens(&[9; 64]));
    let eligible = client.route(&question).expect("an answer").candidates.len() as u64;
    trial.must(eligible + 2 >= REPORTED_WORKERS, || format!("{eligible} workers of {REPORTED_WORKERS} are eligible"));
    for counter in ["failure_reports_refused_user", "load_reports_refused_user"] {
        trial.must_count(counter, scene.counter(counter), 100);
    }
    drop(client);
    scene.end(trial, 96);
}

fn forge_reports(orders: &mut Orders) {
    let (uid, gid) = (Uid::from_raw(61_030), Gid::from_raw(61_030));
    rustix::thread::set_thread_groups(&[]).expect("root may");
    rustix::thread::set_thread_res_gid(gid, gid, gid).expect("root may");
    rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root may");
    let mut stream = greeted(&orders.at).expect("any user may route");
    let load = EngineLoad { prefill_tokens: 1 << 20, ..EngineLoad::default() };
    while orders.goes_on() {
        let (mut encoder, mut frames) = (RequestEncoder::default(), Vec::new());
        for id in (1..=REPORTED_WORKERS).rev() {
            let worker = (SpaceId(0), Worker::new(id, 0));
            encoder.report_failure(CorrelationId(1), worker, "a lie", &mut frames);
            encoder.report_load(CorrelationId(2), worker, &load, &mut frames);
        }
        stream.write_all(&frames).expect("sent");
        for _ in 0..2 * REPORTED_WORKERS {
            read_frame(&mut stream).expect("a reply");
            orders.count("reports", 1);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn lane_files(trial: &mut Trial) {
    let scene = Scene::configured("lanes_max = 4096", "");
    let mut attackers = scene.attacked_by(trial, "spoil_lanes", 2);
    for offer in attackers.offers() {
        trial.must(offer["cut"] == 0, || format!("files of lanes could be cut: {offer}"));
        trial.count("lanes", offer["lanes"].as_u64().unwrap_or_default());
        trial.count("locks", offer["locked"].as_u64().unwrap_or_default());
    }
    attackers.kill();
    let closed = || scene.counter("lanes_closed_with_connection") + scene.counter("lanes_closed_positions");
    until("the lanes have ended", || closed() + scene.counter("lanes_closed_header") >= 100);
    until("their memory is given back", || scene.counter("lanes_open") == 0);
    scene.end(trial, 160);
}

fn spoil_lanes(orders: &mut Orders) {
    let (mut held, mut cut, mut locked) = (Vec::new(), 0, 0);
    for _ in 0..50 {
        let mut stream = greeted(&orders.at).expect("a connection");
        let asked = LaneRequest { request_ring_bytes: 4096, reply_ring_bytes: 4096 };
        let (_, descriptors) = raw::ask_for_lane(&mut stream, asked);
        let [memory, bell] = <[OwnedFd; 2]>::try_from(descriptors).expect("memory and bell");
        let mut memory = File::from(memory);
        for length in [0, 1, 1 << 30] {
            cut += u64::from(memory.set_len(length).is_ok());
        }
        // Anything where requests are, and locked until this process is killed.
        memory.write_all(&[0xff; 4096]).expect("the rings are there");
        locked += u64::from(memory.lock().is_ok());
        held.push((stream, memory, bell));
    }
    orders.offer(&serde_json::json!({"lanes": held.len(), "cut": cut, "locked": locked}));
    std::thread::sleep(WAIT_MAX);
}
