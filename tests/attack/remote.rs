//! Strangers at the port for other hosts, and a principal that reaches for what another one has. The other client asks over
//! `kvrouted connect`.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::client::Reply;
use kvrouted::ids::CorrelationId;
use kvrouted::load::{BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingHandle, BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{FrameKind, decode_reply};
use rand::{RngExt as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustls::StreamOwned;

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::raw::{Raw, encoded, hello_frame, read_frame};
use crate::kit::remote::{Caller, STRANGER, Site, Tls, WEST, opened, opening, tcp_from, tls_client};
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, configure_serve, prompt, text, until_ok};
use crate::scene::{Scene, worker_table};
use crate::trial::Trial;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("knock_at_the_remote_port", knock_at_the_remote_port),
    ("leave_half_open", leave_half_open),
    ("begin_handshakes", begin_handshakes),
    ("reach_for_bookings", reach_for_bookings),
];

/// Addresses of each process that floods.
const ADDRESSES: u8 = 40;
/// The session of the principal that is attacked.
const SESSION: SessionToken = SessionToken { hi: 7, lo: 9 };

/// A daemon with a remote port, and the caller by which the other client asks.
fn scene() -> (Site, Caller, Scene) {
    let (site, engine) = (Site::new(), Engine::new());
    let config = configure_serve(site.folder.path(), "", &format!("{}{}", worker_table(&engine), site.port_table()));
    let daemon = Daemon::serve(Arc::clone(&site.folder), &["--config", text(&config)]);
    let east = site.caller("east", &[]);
    let scene = Scene::asked_at(&east.socket, daemon, engine);
    (site, east, scene)
}

/// Attackers learn the port and whom to trust.
fn attackers(site: &Site, trial: &Trial, role: &'static str, count: u64, more: &str) -> Attackers {
    let at = format!("{} {} {more}", site.address, text(&site.path("ca.pem")));
    Attackers::start(role, count, &at, trial.lasts())
}

/// The orders of an attacker.
struct Target {
    port: SocketAddr,
    authorities: PathBuf,
    /// Of the attacker.
    number: u8,
    more: Vec<u64>,
}

impl Target {
    fn of(orders: &Orders) -> Self {
        let mut words = orders.at.split_whitespace();
        let mut word = || words.next().expect("orders");
        let (port, authorities) = (word().parse().expect("an address"), word().into());
        Self {
            port,
            authorities,
            number: orders.number as u8,
            more: words.map(|word| word.parse().expect("a number")).collect(),
        }
    }

    /// A connection from one of the attacker's addresses, none of which is the other client's.
    fn connect(&self, address: u8) -> std::io::Result<TcpStream> {
        tcp_from(Ipv4Addr::new(127, 1, self.number, 1 + address), self.port)
    }

    fn tls(&self, stream: TcpStream) -> Tls {
        StreamOwned::new(tls_client(&self.authorities), stream)
    }
}

/// New connections of the host that is a caller's already, one after the other.
#[track_caller]
fn callers_get_in(east: &Caller, trial: &mut Trial) {
    let began = Instant::now();
    while began.elapsed() < trial.lasts() / 2 {
        let got_in = east.try_client();
        trial.must(got_in.is_ok(), || format!("a caller is kept out: {got_in:?}"));
        trial.count("connections of the caller meanwhile", 1);
        std::thread::sleep(Duration::from_millis(100));
    }
}

// ---- strangers --------------------------------------------------------------------------------------------------------

pub(crate) fn remote_strangers(trial: &mut Trial) {
    let (site, east, scene) = scene();
    let attackers = attackers(&site, trial, "knock_at_the_remote_port", 5, "");
    callers_get_in(&east, trial);
    attackers.end(trial);
    for refusal in ["token", "tls", "opening"] {
        let name = format!("remote_refused_{refusal}");
        trial.must_count(&name, scene.counter(&name), 1);
    }
    // A fast machine opens more than an address may.
    trial.count("remote_refused_frequent", scene.counter("remote_refused_frequent"));
    let log = scene.daemon.process.log();
    trial.must(!log.contains(STRANGER), || "a token is logged".to_owned());
    trial.must(scene.is_found("remote_refused"), || "no finding names the refusals".to_owned());
    scene.end(trial, 96);
    drop(east);
}

fn knock_at_the_remote_port(orders: &mut Orders) {
    let (target, mut random) = (Target::of(orders), Xoshiro256PlusPlus::seed_from_u64(orders.number));
    while orders.goes_on() {
        let Ok(mut stream) = target.connect(0) else { continue };
        orders.count("connections", 1);
        // The port may close at any moment.
        let _ = match orders.number {
            0 => {
                let mut tls = target.tls(stream);
                tls.write_all(&opening(STRANGER)).and_then(|()| tls.read_to_end(&mut Vec::new()))
            }
            1 => {
                let garbage: Vec<u8> = (0..random.random_range(1..4000)).map(|_| random.random()).collect();
                stream.write_all(&garbage).and_then(|()| stream.read_to_end(&mut Vec::new()))
            }
            2 => stream.write_all(&hello_frame(None)).and_then(|()| stream.read_to_end(&mut Vec::new())),
            3 => target.tls(stream).write(&opening(STRANGER)[..20]),
            _ => endless_keys(target.tls(stream), orders),
        };
    }
}

/// Announces a token and sends new keys of TLS in its place, again and again.
fn endless_keys(mut tls: Tls, orders: &Orders) -> std::io::Result<usize> {
    tls.write_all(&opening(STRANGER)[..8])?;
    while orders.goes_on() {
        tls.conn.refresh_traffic_keys().map_err(std::io::Error::other)?;
        tls.flush()?;
    }
    Ok(0)
}

// ---- half-open connections --------------------------------------------------------------------------------------------

pub(crate) fn remote_half_open(trial: &mut Trial) {
    let (site, east, scene) = scene();
    let attackers = attackers(&site, trial, "leave_half_open", 4, "");
    callers_get_in(&east, trial);
    attackers.end(trial);
    trial.must_count("remote_refused_displaced", scene.counter("remote_refused_displaced"), 500);
    scene.end(trial, 96);
    drop(east);
}

fn leave_half_open(orders: &mut Orders) {
    let target = Target::of(orders);
    let mut open: Vec<TcpStream> = (0..300).filter_map(|_| target.connect(0).ok()).collect();
    orders.count("connections", open.len() as u64);
    let mut greeting = greeting(&target).into_iter().cycle();
    while orders.number % 2 == 1 && orders.goes_on() {
        let byte = greeting.next().expect("it has no end");
        open.retain_mut(|stream| stream.write_all(&[byte]).is_ok());
        std::thread::sleep(Duration::from_millis(20));
    }
    orders.hold();
}

/// The first message of a TLS client: all that a server needs to do its part of a handshake.
fn greeting(target: &Target) -> Vec<u8> {
    let mut greeting = Vec::new();
    tls_client(&target.authorities).write_tls(&mut greeting).expect("written");
    greeting
}

// ---- a flood of handshakes --------------------------------------------------------------------------------------------

pub(crate) fn remote_handshakes(trial: &mut Trial) {
    let (site, east, scene) = scene();
    let began = Instant::now();
    let attackers = attackers(&site, trial, "begin_handshakes", 4, "");
    callers_get_in(&east, trial);
    attackers.end(trial);
    let (taken, elapsed) = (scene.counter("remote_strangers_us"), began.elapsed().as_micros() as u64);
    let refused = scene.counter("remote_refused_strangers");
    trial.count("remote_refused_strangers", refused);
    trial.count("remote_strangers_us", taken);
    // What they may take at once, and a tenth of the time. A busy machine may have had no time for more.
    let share = 500_000 + elapsed / 10;
    trial.must(refused > 0 || taken <= share, || format!("none is refused after {taken} of {elapsed} us"));
    // As much again for handshakes that had begun.
    trial.must(taken < 2 * share, || format!("strangers took {taken} of {elapsed} us"));
    // Another host gets in once they have gone.
    let tls = || site.tls_over(site.tcp_from(Ipv4Addr::new(127, 2, 0, 1)));
    until_ok("a new host gets in", || {
        let (mut tls, mut answer) = (tls(), [0; 8]);
        tls.write_all(&opening(WEST)).and_then(|()| tls.read_exact(&mut answer)).map_err(|error| error.to_string())
    });
    scene.end(trial, 96);
    drop(east);
}

fn begin_handshakes(orders: &mut Orders) {
    let target = Target::of(orders);
    let greeting = greeting(&target);
    for address in (0..ADDRESSES).cycle() {
        if !orders.goes_on() {
            return;
        }
        let Ok(mut stream) = target.connect(address) else { continue };
        orders.count("handshakes begun", 1);
        // The port may close at any moment.
        if stream.write_all(&greeting).and_then(|()| stream.read(&mut [0; 1])).is_ok_and(|bytes| bytes > 0) {
            orders.count("handshakes answered", 1);
        }
    }
}

// ---- a principal ------------------------------------------------------------------------------------------------------

pub(crate) fn remote_principal(trial: &mut Trial) {
    let (site, east, scene) = scene();
    let mut session = Raw::connect(&east.socket);
    session.hello(Some(SESSION)).expect("hello");
    let mut client = east.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 64);
    let book = Some(BookingRequest { request_id: "r1", attempt: 0 });
    let routed = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) });
    let booking = routed.expect("a decision").booking.expect("a booking");
    let handle = format!("{} {}", booking.slot, booking.generation);
    attackers(&site, trial, "reach_for_bookings", 1, &handle).end(trial);
    let reached = trial.counted("reports that reached a booking");
    trial.must(reached == 0, || "a booking of another principal was reached".to_owned());
    trial.must(trial.counted("sessions refused") > 0, || "it was given the session".to_owned());
    trial.must(trial.counted("reports") > 100, || "it reported hardly anything".to_owned());
    trial.must(scene.counter("bookings_live") == 1, || "the booking has gone".to_owned());
    let freed = client.free(&BookingRef::Handle(booking));
    trial.must(freed.as_ref().is_ok_and(|freed| *freed == BookingOutcome::Applied), || format!("freed: {freed:?}"));
    drop((session, client));
    scene.end(trial, 96);
    drop(east);
}

fn reach_for_bookings(orders: &mut Orders) {
    let target = Target::of(orders);
    let [slot, generation] = target.more[..] else { panic!("no handle") };
    let open = |session| {
        let mut tls = opened(target.tls(target.connect(0).expect("a connection")), WEST);
        tls.write_all(&hello_frame(session)).expect("sent");
        let (header, _) = read_frame(&mut tls).expect("an answer");
        (tls, header.kind == FrameKind::HelloReply as u8)
    };
    let (mut tls, is_greeted) = open(None);
    assert!(is_greeted, "it is a principal");
    let (mut refused, mut random) = (0, Xoshiro256PlusPlus::seed_from_u64(orders.number));
    while orders.goes_on() {
        refused += u64::from(!open(Some(SESSION)).1);
        let (mut frames, count) = (Vec::new(), 64);
        for at in 0..count {
            let near = BookingHandle { slot: slot ^ random.random_range(0..4), generation: generation + at % 3 };
            let booking = match at % 4 {
                0 => BookingRef::Request { request_id: "r1", attempt: 0 },
                1 => BookingRef::Handle(BookingHandle { slot, generation }),
                _ => BookingRef::Handle(near),
            };
            let id = CorrelationId(2 + at);
            frames.extend(encoded(|encoder, out| match at % 2 {
                0 => encoder.free(id, &booking, out),
                _ => encoder.prefill_complete(id, &booking, 0, out),
            }));
        }
        tls.write_all(&frames).expect("sent");
        for _ in 0..count {
            let (header, body) = read_frame(&mut tls).expect("an answer");
            let reply = decode_reply(header.kind, &body).expect("a reply");
            orders.count("reports", 1);
            if !matches!(reply, Reply::Free(BookingOutcome::Unknown) | Reply::PrefillComplete(BookingOutcome::Unknown))
            {
                orders.count("reports that reached a booking", 1);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    orders.count("sessions refused", refused);
}
