//! Several daemons that share their load: what one books counts at the others, and no more once it has ended there.

use std::io::Write as _;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvrouted::client::{Client, OtherLoad};
use kvrouted::ids::Worker;
use kvrouted::load::{BookingHandle, BookingRef};

use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{RouterStatus, StatusPage};
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use crate::kit::nats::NatsServer;
use crate::kit::proxy::{FINE, Proxy, Weather};
use crate::kit::{Daemon, configure, folder, prompt, text, until, until_ok};

/// NATS alone: the server goes away, strangers publish, logins.
#[cfg(feature = "nats")]
mod nats;

const SECRET: &str = "0123456789abcdef0123456789abcdef";
const OTHER_SECRET: &str = "fedcba9876543210fedcba9876543210";
const WORKERS: &str = "[[worker]]\nid = 1\n[[worker]]\nid = 2\n";
/// Longer than any test waits: what ends earlier did not end because of it.
const NEVER_MS: u64 = 600_000;

/// How the routers of a test reach each other.
#[derive(Clone)]
enum Way {
    ZeroMq,
    Nats(Arc<NatsServer>),
}

/// Those by which every behaviour is tested.
fn ways() -> Vec<Way> {
    let nats = if cfg!(feature = "nats") { over_nats() } else { None };
    std::iter::once(Way::ZeroMq).chain(nats).collect()
}

/// Over a NATS server; `None` = there is none here.
fn over_nats() -> Option<Way> {
    NatsServer::start("routers over NATS", "").map(|server| Way::Nats(Arc::new(server)))
}

/// A router's folder and its settings.
struct Site {
    folder: Arc<TempDir>,
    name: &'static str,
    way: Way,
    /// Where it listens; `None` = at a socket in its folder.
    listen: Option<String>,
    peers: Vec<String>,
    named: Option<String>,
    /// A file with the addresses of peers.
    peers_file: Option<String>,
    secret: &'static str,
    join_ms_max: u64,
    silent_ms_max: u64,
    /// Further tables.
    tables: String,
}

impl Site {
    fn new(name: &'static str) -> Self {
        Self::over(&Way::ZeroMq, name)
    }

    fn over(way: &Way, name: &'static str) -> Self {
        Self {
            folder: folder(),
            name,
            way: way.clone(),
            listen: None,
            peers: Vec::new(),
            named: None,
            peers_file: None,
            secret: SECRET,
            join_ms_max: 0,
            silent_ms_max: 3000,
            tables: WORKERS.to_owned(),
        }
    }

    /// The address at which others hear it.
    fn address(&self) -> String {
        if let Way::Nats(_) = &self.way {
            return format!("nats:kvrouted.load.{:016x}", xxh3_64(self.name.as_bytes()));
        }
        self.listen.clone().unwrap_or_else(|| format!("ipc://{}/routers", self.folder.path().display()))
    }

    fn config(&self) -> PathBuf {
        let secret = self.folder.path().join("secret");
        std::fs::write(&secret, self.secret).expect("written");
        let Self { name, peers, join_ms_max, silent_ms_max, tables, .. } = self;
        let of = |field: &str, value: &Option<String>| {
            value.as_ref().map_or_else(String::new, |value| format!("{field} = {value:?}\n"))
        };
        let lists = of("peers_dns", &self.named) + &of("peers_file", &self.peers_file);
        let way = match &self.way {
            Way::ZeroMq => format!("listen = \"{}\"\npeers = {peers:?}\n{lists}", self.address()),
            Way::Nats(server) => format!("nats = [\"{}\"]\n", server.address("nats")),
        };
        let tables = format!(
            "[log]\nlevel = \"debug\"\n[routers]\nname = \"{name}\"\n{way}secret_file = {secret:?}\n\
             join_ms_max = {join_ms_max}\nsilent_ms_max = {silent_ms_max}\n{tables}"
        );
        configure(self.folder.path(), &tables)
    }

    fn start(&self) -> Daemon {
        Daemon::serve(Arc::clone(&self.folder), &["--config", text(&self.config())])
    }
}

/// Routers that know each other.
fn fleet<const N: usize>(way: &Way, names: [&'static str; N]) -> [Site; N] {
    let mut sites = names.map(|name| Site::over(way, name));
    let addresses: Vec<String> = sites.iter().map(Site::address).collect();
    // The list is the same at all of them, so each finds its own address in it.
    sites.iter_mut().for_each(|site| site.peers.clone_from(&addresses));
    sites
}

fn row(page: &StatusPage, address: &str) -> Option<RouterStatus> {
    page.routers.iter().find(|of| of.address == address).cloned()
}

/// What a router says of itself.
fn own(of: &Daemon) -> RouterStatus {
    let page = of.status();
    page.routers.into_iter().find(|of| of.state == "self").expect("its own row")
}

fn until_live(at: &Daemon, address: &str) {
    until_ok("the other router's load is known", || {
        let row = row(&at.status(), address);
        row.as_ref().is_some_and(|of| of.state == "live").then_some(()).ok_or(format!("{row:?}"))
    });
}

/// Waits until one router holds what another one has, by their digests.
fn until_equal(at: &Daemon, address: &str, of: &Daemon) {
    until_ok("both hold the same", || {
        let (held, own) = (row(&at.status(), address), own(of));
        let is_equal = held.as_ref().is_some_and(|held| {
            (held.digest, held.sequence, held.workers) == (own.digest, own.sequence, own.workers)
                && held.state == "live"
        });
        is_equal.then_some(()).ok_or(format!("{held:?}, {own:?}"))
    });
}

/// A counter of a worker; `None` if it is not shown.
fn counter(of: &Daemon, worker: u64, name: &str) -> Option<u64> {
    let page = of.status();
    let status = page.workers.iter().find(|status| status.worker == Worker::new(worker, 0)).expect("the worker");
    status.counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value)
}

fn others_requests(of: &Daemon, worker: u64) -> u64 {
    counter(of, worker, "others_requests").unwrap_or(0)
}

fn route(client: &mut Client, request_id: &str, pin: Option<u64>) -> (Worker, BookingHandle) {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(request_id.len() as u32, 3200);
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let pin = pin.map(|worker| Worker::new(worker, 0));
    let reply = client.route(&RouteRequest { book, pin, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) });
    let reply = reply.expect("a reply");
    (reply.candidates[0].worker, reply.booking.expect("a booking"))
}

/// What the router says that others add to the candidates of a request.
fn others(client: &mut Client, explain: bool) -> Vec<OtherLoad> {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(9, 3200);
    let request = RouteRequest { explain, candidates_max: 8, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a reply").others
}

fn free(client: &mut Client, booking: BookingHandle) {
    client.free(&BookingRef::Handle(booking)).expect("freed");
}

#[track_caller]
fn findings(of: &Daemon) -> Vec<String> {
    of.status().findings.into_iter().map(|finding| finding.name).collect()
}

#[test]
fn a_booking_counts_at_the_other_router_until_it_is_freed() {
    for way in &ways() {
        let [mut a, mut b] = fleet(way, ["a", "b"]);
        // In this mode a prompt counts until its prefill is reported, however long that takes here.
        for site in [&mut a, &mut b] {
            site.tables.push_str("[policy]\nmode = \"kv\"\n");
        }
        let (at_a, at_b) = (a.start(), b.start());
        until_live(&at_a, &b.address());
        until_live(&at_b, &a.address());
        let (mut of_a, mut of_b) = (at_a.client(), at_b.client());
        let (worker, booking) = route(&mut of_a, "a", Some(1));
        assert_eq!(worker, Worker::new(1, 0));
        until("the booking counts", || others_requests(&at_b, 1) == 1);
        assert_eq!(counter(&at_b, 1, "active_requests"), Some(1), "it is part of the load");
        assert!(counter(&at_b, 1, "others_prefill_tokens") == Some(3200) && others_requests(&at_b, 2) == 0);
        assert_eq!(others_requests(&at_a, 1), 0, "it is no other router's at the router that booked it");
        let [explained, unexplained] = [true, false].map(|explain| others(&mut of_b, explain));
        let [said] = &explained[..] else { panic!("one router adds to one worker: {explained:?}") };
        let by_a = (Worker::new(1, 0), own(&at_a).origin, 1, 3200);
        assert_eq!((said.worker, said.origin, said.requests, said.prefill_tokens), by_a);
        assert!(unexplained.is_empty() && others(&mut of_a, true).is_empty());
        until("its own row says so", || (own(&at_a).requests, own(&at_a).prefill_tokens) == (1, 3200));
        for _ in 0..5 {
            let (worker, booking) = route(&mut of_b, "b", None);
            assert_eq!(worker, Worker::new(2, 0), "the other router's worker is busy");
            free(&mut of_b, booking);
        }
        until_equal(&at_b, &a.address(), &at_a);
        free(&mut of_a, booking);
        until("it no longer counts", || others_requests(&at_b, 1) == 0);
        until_equal(&at_b, &a.address(), &at_a);
        until_equal(&at_a, &b.address(), &at_b);
        let text =
            String::from_utf8(crate::kit::run(&["status", "--socket", text(&at_b.socket())]).stdout).expect("text");
        assert!(text.contains("heard at") && text.contains(&a.address()), "{text}");
        assert_eq!(at_b.said(&["status"])["routers"][0]["state"], "self");
    }
}

#[test]
fn a_router_that_was_killed_no_longer_counts_and_none_of_three_holds_a_phantom() {
    for way in &ways() {
        let [a, b, c] = fleet(way, ["a", "b", "c"]);
        let (mut at_a, at_b, at_c) = (a.start(), b.start(), c.start());
        for at in [&at_b, &at_c] {
            until_live(at, &a.address());
        }
        until_live(&at_c, &b.address());
        let (mut of_a, mut of_b) = (at_a.client(), at_b.client());
        let (_, _kept) = route(&mut of_a, "a", Some(1));
        let (_, of_b_booking) = route(&mut of_b, "b", Some(1));
        until("both count", || others_requests(&at_c, 1) == 2 && others_requests(&at_b, 1) == 1);
        assert_eq!(at_a.process.end("-KILL"), None);
        until("the killed router's booking no longer counts", || {
            others_requests(&at_c, 1) == 1 && others_requests(&at_b, 1) == 0
        });
        until_ok("its row says so", || {
            let row = row(&at_c.status(), &a.address()).expect("its row");
            (row.state == "silent" && row.requests == 0).then_some(()).ok_or(format!("{row:?}"))
        });
        until("a finding names it", || findings(&at_c).contains(&"router_missing".to_owned()));
        free(&mut of_b, of_b_booking);
        until("nothing is left", || others_requests(&at_c, 1) == 0);
        until_equal(&at_c, &b.address(), &at_b);
    }
}

#[test]
fn a_router_that_is_heard_by_one_it_does_not_hear_says_so_until_its_list_is_mended() {
    let [mut a, b] = fleet(&Way::ZeroMq, ["a", "b"]);
    a.peers = vec![a.address()];
    let (at_a, at_b) = (a.start(), b.start());
    until_live(&at_b, &a.address());
    until("a finding names the router", || findings(&at_a).contains(&"router_unlisted".to_owned()));
    assert!(!findings(&at_b).contains(&"router_unlisted".to_owned()));
    a.peers = b.peers.clone();
    a.config();
    at_a.process.signal("-HUP");
    until_live(&at_a, &b.address());
    until("the finding is gone", || !findings(&at_a).contains(&"router_unlisted".to_owned()));
}

#[test]
fn a_router_that_was_restarted_is_taken_anew_at_once() {
    for way in &ways() {
        let [mut a, mut b] = fleet(way, ["a", "b"]);
        (a.silent_ms_max, b.silent_ms_max) = (NEVER_MS, NEVER_MS);
        let (mut at_a, at_b) = (a.start(), b.start());
        until_live(&at_b, &a.address());
        let (_, _lost) = route(&mut at_a.client(), "a", Some(1));
        until("the booking counts", || others_requests(&at_b, 1) == 1);
        let before = row(&at_b.status(), &a.address()).expect("its row");
        assert_eq!(at_a.process.end("-KILL"), None);
        let at_a = a.start();
        until_ok("the new run counts", || {
            let row = row(&at_b.status(), &a.address()).expect("its row");
            (row.incarnation != before.incarnation && row.state == "live").then_some(()).ok_or(format!("{row:?}"))
        });
        assert_eq!(row(&at_b.status(), &a.address()).expect("its row").origin, before.origin, "the same router");
        until("what the run before had booked no longer counts", || others_requests(&at_b, 1) == 0);
        let (_, booking) = route(&mut at_a.client(), "b", Some(2));
        until("the new run's booking counts", || others_requests(&at_b, 2) == 1);
        free(&mut at_a.client(), booking);
        until_equal(&at_b, &a.address(), &at_a);
    }
}

#[test]
fn routers_with_another_secret_or_fleet_and_strangers_are_refused_counted_and_named() {
    let [mut a, mut secret, mut fleet] = ["a", "secret", "fleet"].map(Site::new);
    a.listen = Some("tcp://127.0.0.1:0".to_owned());
    a.peers = vec![secret.address(), fleet.address()];
    secret.secret = OTHER_SECRET;
    fleet.tables = format!("[[space]]\nmodel = \"n\"\n{}", WORKERS.replace("]]\n", "]]\nmodel = \"m\"\n"));
    let at_a = a.start();
    let bound = own(&at_a).address;
    (secret.peers, fleet.peers) = (vec![bound.clone()], vec![bound.clone()]);
    let (at_secret, at_fleet) = (secret.start(), fleet.start());
    for at in [&at_secret, &at_fleet] {
        let (_, _booked) = route(&mut at.client(), "a", Some(1));
    }
    until_ok("both are named", || {
        let page = at_a.status();
        let rows = [secret.address(), fleet.address()].map(|address| row(&page, &address).expect("a row"));
        let problems = rows.map(|row| row.problem.unwrap_or_default());
        let is_named = problems[0].contains("not signed with a secret") && problems[1].contains("serves another fleet");
        is_named.then_some(()).ok_or(format!("{problems:?}"))
    });
    until("a finding names them", || findings(&at_a).iter().filter(|name| *name == "router_refused").count() == 2);
    assert!(at_a.counter("router_messages_wrong_mac") > 0 && at_a.counter("router_quarantines") > 0);
    assert_eq!(others_requests(&at_a, 1), 0);
    // Neither do they count this router's bookings: the one without its secret, and the one that gets nothing from it.
    let (_, booking) = route(&mut at_a.client(), "b", Some(2));

    // A stranger that sends what no ZeroMQ peer sends, one that sends what no router sends, and one that sends too much.
    let host = bound.strip_prefix("tcp://").expect("a port");
    TcpStream::connect(host).expect("a connection").write_all(&[0x41; 4096]).expect("sent");
    let context = zmq::Context::new();
    let stranger = context.socket(zmq::DEALER).expect("a socket");
    stranger.connect(&bound).expect("connects");
    stranger.send("KVLM and more", 0).expect("sent");
    until("the stranger's message is refused", || at_a.counter("router_messages_unreadable") > 0);
    let flood = context.socket(zmq::DEALER).expect("a socket");
    flood.connect(&bound).expect("connects");
    flood.send(vec![0_u8; 4 << 20], 0).expect("sent");
    until("both are cut", || at_a.counter("router_connections_cut") >= 2);
    assert_eq!((others_requests(&at_secret, 2), others_requests(&at_fleet, 2)), (0, 0));
    free(&mut at_a.client(), booking);
}

#[test]
fn a_stranger_gets_nothing_of_one_router_with_which_it_passes_for_it_at_another() {
    let [mut a, mut b] = ["a", "b"].map(Site::new);
    (a.listen, b.listen) = (Some("tcp://127.0.0.1:0".to_owned()), Some("tcp://127.0.0.1:0".to_owned()));
    let (at_a, at_b) = (a.start(), b.start());
    let context = zmq::Context::new();
    let [of_a, of_b] = [&at_a, &at_b].map(|at| {
        let stranger = context.socket(zmq::DEALER).expect("a socket");
        stranger.connect(&own(at).address).expect("connects");
        stranger
    });
    // No key made its MAC.
    of_a.send([&b"KVLM\x01\0\0\0"[..], &[7; 60]].concat(), 0).expect("sent");
    of_b.send(of_a.recv_bytes(0).expect("an answer"), 0).expect("sent");
    until("the other one does not take it for a router", || at_b.counter("router_messages_wrong_mac") > 0);
    of_b.recv_bytes(0).expect("its own answer");
    let heartbeats = at_b.counter("router_heartbeats");
    until("it has spoken to routers", || at_b.counter("router_heartbeats") > heartbeats + 1);
    assert!(of_b.recv_bytes(zmq::DONTWAIT).is_err(), "nothing of it came here");
}

#[test]
fn what_a_link_loses_and_repeats_is_repaired() {
    let (mut a, mut b) = (Site::new("a"), Site::new("b"));
    a.listen = Some("tcp://127.0.0.1:0".to_owned());
    let at_a = a.start();
    let proxy = Proxy::start(&own(&at_a).address, 7);
    b.peers = vec![proxy.endpoint()];
    let at_b = b.start();
    until_live(&at_b, &proxy.endpoint());
    let (mut client, mut booked) = (at_a.client(), 0);
    for weather in
        [Weather { lost: 0.3, repeated: 0.0, delay_ms_max: 0 }, Weather { lost: 0.1, repeated: 0.3, delay_ms_max: 5 }]
    {
        proxy.set_weather(weather);
        let lost_before = proxy.done().lost.load(Ordering::Relaxed);
        let mut bookings = Vec::new();
        until("messages were lost", || {
            booked += 1;
            bookings.push(route(&mut client, &format!("request {booked}"), None).1);
            if bookings.len() > 8 {
                free(&mut client, bookings.remove(0));
            }
            proxy.done().lost.load(Ordering::Relaxed) > lost_before + 5
        });
        bookings.into_iter().for_each(|booking| free(&mut client, booking));
        proxy.set_weather(FINE);
        until("nothing is left, and no phantom", || (others_requests(&at_b, 1), others_requests(&at_b, 2)) == (0, 0));
        until_equal(&at_b, &proxy.endpoint(), &at_a);
    }
    assert!(at_b.counter("router_gaps") > 0 && at_b.counter("router_snapshots_asked") > 1);
    proxy.part(true);
    proxy.cut();
    let (_, booking) = route(&mut client, "while parted", Some(1));
    until("the silent router no longer counts", || {
        row(&at_b.status(), &proxy.endpoint()).is_some_and(|row| row.state == "silent")
    });
    proxy.part(false);
    until("it counts again", || others_requests(&at_b, 1) == 1);
    free(&mut client, booking);
    until_equal(&at_b, &proxy.endpoint(), &at_a);
}

#[test]
fn a_daemon_is_ready_once_it_knows_the_load_of_its_peers_or_was_not_to_wait_longer() {
    let [mut a, mut b] = fleet(&Way::ZeroMq, ["a", "b"]);
    (a.join_ms_max, b.join_ms_max) = (NEVER_MS, 0);
    let at_a = a.start();
    let said = at_a.said(&["status"]);
    assert_eq!(said["ready"], false, "{said}");
    assert!(findings(&at_a).contains(&"routers_joining".to_owned()));
    let (_, booking) = route(&mut at_a.client(), "a", None);
    let at_b = b.start();
    until("the first one is ready", || at_a.said(&["status"])["ready"] == true);
    assert_eq!((at_a.counter("router_join_state"), at_b.said(&["status"])["ready"].as_bool()), (0, Some(true)));
    free(&mut at_a.client(), booking);
    let mut alone = Site::new("alone");
    alone.peers = vec![format!("ipc://{}/nobody", alone.folder.path().display())];
    let at_alone = alone.start();
    until("it says that it does not know its peer's load", || at_alone.counter("router_join_state") == 2);
    assert_eq!(
        (at_alone.counter("router_join_missing"), at_alone.said(&["status"])["ready"].as_bool()),
        (1, Some(true))
    );
    assert_eq!(row(&at_alone.status(), &alone.peers[0]).expect("a row").state, "unreached");
}

#[test]
fn the_load_of_a_worker_that_joins_later_is_there_when_it_joins() {
    for way in &ways() {
        let [mut a, b] = fleet(way, ["a", "b"]);
        a.tables.push_str("[[worker]]\nid = 3\n");
        let (at_a, at_b) = (a.start(), b.start());
        until_live(&at_b, &a.address());
        let (_, booking) = route(&mut at_a.client(), "a", Some(3));
        until_equal(&at_b, &a.address(), &at_a);
        at_b.worker_ok(&["add", "id=3"]);
        until("the worker has joined with the other router's load", || {
            at_b.status().workers.len() == 3 && others_requests(&at_b, 3) == 1
        });
        free(&mut at_a.client(), booking);
        until("it no longer counts", || others_requests(&at_b, 3) == 0);
    }
}

#[test]
fn peers_come_and_go_with_the_configuration_and_with_the_addresses_of_a_name() {
    let [mut a, b] = fleet(&Way::ZeroMq, ["a", "b"]);
    let c = Site::new("c");
    let (at_a, at_b, at_c) = (a.start(), b.start(), c.start());
    until_live(&at_a, &b.address());
    let bookings = [&at_b, &at_c].map(|at| route(&mut at.client(), "a", Some(1)).1);
    until("the first peer's booking counts", || others_requests(&at_a, 1) == 1);
    // Another peer in place of the first one. What that one booked counts until it is silent for too long.
    a.peers = vec![c.address()];
    a.config();
    at_a.process.signal("-HUP");
    until_live(&at_a, &c.address());
    until("the peer that is gone no longer counts", || others_requests(&at_a, 1) == 1);
    assert!(row(&at_a.status(), &b.address()).is_none());
    assert!(!findings(&at_a).contains(&"restart_pending".to_owned()), "it needs no restart");
    free(&mut at_c.client(), bookings[1]);
    until("nothing is left", || others_requests(&at_a, 1) == 0);

    let mut named = Site::new("named");
    named.listen = Some("tcp://127.0.0.1:0".to_owned());
    let at_named = named.start();
    let bound = own(&at_named).address;
    let port = bound.rsplit(':').next().expect("a port");
    let mut by_name = Site::new("by name");
    by_name.named = Some(format!("localhost:{port}"));
    let at = by_name.start();
    until_live(&at, &bound);
}

#[test]
fn peers_come_and_go_with_a_file_that_is_replaced_and_a_bad_one_changes_nothing() {
    let [b, c] = ["b", "c"].map(Site::new);
    let (at_b, at_c) = (b.start(), c.start());
    let mut a = Site::new("a");
    let (list, next) = (a.folder.path().join("peers"), a.folder.path().join("peers.next"));
    a.peers_file = Some(text(&list).to_owned());
    a.join_ms_max = NEVER_MS;
    let replace = |lines: &str| {
        std::fs::write(&next, lines).expect("written");
        std::fs::rename(&next, &list).expect("renamed");
    };
    let at_a = a.start();
    // Until the file is there, it is not known who the others are.
    until("a file that is missing is named", || findings(&at_a).contains(&"source_unusable".to_owned()));
    assert_eq!(at_a.said(&["status"])["ready"], false);
    replace(&format!("# the others\n{}\n", b.address()));
    until_live(&at_a, &b.address());
    until("it is ready", || at_a.said(&["status"])["ready"] == true);
    until("the file is usable", || !findings(&at_a).contains(&"source_unusable".to_owned()));
    replace(&format!("{}\nno address\n", c.address()));
    until("a bad line is named", || findings(&at_a).contains(&"source_unusable".to_owned()));
    assert!(row(&at_a.status(), &c.address()).is_none(), "a list is used whole or not at all");
    until_live(&at_a, &b.address());
    replace(&format!("{}\n", c.address()));
    until_live(&at_a, &c.address());
    until("the other one is gone", || row(&at_a.status(), &b.address()).is_none());
    drop((at_b, at_c));
}

#[test]
fn a_request_waits_for_what_another_router_booked_and_goes_on_when_that_is_freed() {
    for way in &ways() {
        let [mut a, mut b] = fleet(way, ["a", "b"]);
        for site in [&mut a, &mut b] {
            let worker = "[[worker]]\nid = 1\nbatched_tokens_max = 100\n";
            site.tables = format!("[policy]\nmode = \"kv\"\nqueue_threshold = 0.5\n{worker}");
        }
        let (at_a, at_b) = (a.start(), b.start());
        until_live(&at_b, &a.address());
        let mut of_a = at_a.client();
        let (_, booking) = route(&mut of_a, "a", None);
        until("the worker is busy", || others_requests(&at_b, 1) == 1);
        let waits = std::thread::spawn({
            let mut of_b = at_b.client();
            move || route(&mut of_b, "b", None).0
        });
        until("the request waits", || at_b.counter("queue_waiting") == 1);
        free(&mut of_a, booking);
        assert_eq!(waits.join().expect("it ends"), Worker::new(1, 0));
        assert_eq!(at_b.counter("queue_expired"), 0);
    }
}

#[test]
fn two_routers_of_one_name_are_named() {
    for way in &ways() {
        let [a, mut b] = fleet(way, ["a", "b"]);
        b.name = "a";
        let (at_a, _at_b) = (a.start(), b.start());
        until("a finding says so", || findings(&at_a).contains(&"router_name_shared".to_owned()));
    }
}
