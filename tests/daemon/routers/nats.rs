use std::fmt::Write as _;
use std::path::Path;

use data_encoding::BASE32_NOPAD;
use kvrouted::routers::protocol::{Content, Heartbeat, encode};
use kvrouted::routers::{Fingerprint, Incarnation, Keys, OriginId, Sender};

use super::*;
use crate::kit::remote::Authority;
use crate::kit::write_secret;

fn server(options: &str) -> Option<NatsServer> {
    NatsServer::start("routers over NATS", options)
}

fn of(way: &Way) -> Arc<NatsServer> {
    let Way::Nats(server) = way else { panic!("another way") };
    Arc::clone(server)
}

#[test]
fn while_the_server_is_away_decisions_go_on_and_later_nothing_is_missing_and_no_phantom_is_left() {
    let Some(way) = over_nats() else { return };
    let (server, [a, b, c]) = (of(&way), fleet(&way, ["a", "b", "c"]));
    let (at_a, at_b, at_c) = (a.start(), b.start(), c.start());
    for (at, address) in [(&at_a, b.address()), (&at_b, a.address()), (&at_c, a.address()), (&at_c, b.address())] {
        until_live(at, &address);
    }
    let (mut of_a, mut of_b) = (at_a.client(), at_b.client());
    let (_, ends_meanwhile) = route(&mut of_a, "a", Some(1));
    let (_, stays) = route(&mut of_b, "b", Some(1));
    until("both count", || others_requests(&at_c, 1) == 2);
    server.kill();
    until("what others booked no longer counts", || others_requests(&at_c, 1) == 0 && others_requests(&at_b, 1) == 0);
    until("a finding says that the server is away", || findings(&at_c).contains(&"router_missing".to_owned()));
    assert_eq!(row(&at_c.status(), &server.address("nats")).expect("its row").state, "unreached");
    free(&mut of_a, ends_meanwhile);
    let (_, booked_meanwhile) = route(&mut of_a, "c", Some(2));
    server.start_again();
    until("what is booked counts", || {
        (others_requests(&at_c, 1), others_requests(&at_c, 2), others_requests(&at_b, 2)) == (1, 1, 1)
    });
    until_equal(&at_c, &a.address(), &at_a);
    until_equal(&at_c, &b.address(), &at_b);
    until_equal(&at_b, &a.address(), &at_a);
    until("the finding is gone", || !findings(&at_c).contains(&"router_missing".to_owned()));
    free(&mut of_b, stays);
    free(&mut of_a, booked_meanwhile);
    until("no phantom is left", || {
        [&at_a, &at_b, &at_c].iter().all(|at| (1..3).all(|id| others_requests(at, id) == 0))
    });
}

#[test]
fn a_server_that_is_restarted_at_once_costs_at_most_a_gap() {
    let Some(way) = over_nats() else { return };
    let (server, [mut a, mut b]) = (of(&way), fleet(&way, ["a", "b"]));
    (a.silent_ms_max, b.silent_ms_max) = (NEVER_MS, NEVER_MS);
    let (at_a, at_b) = (a.start(), b.start());
    until_live(&at_b, &a.address());
    until_live(&at_a, &b.address());
    let mut of_a = at_a.client();
    for round in 0..3 {
        let mut bookings: Vec<_> = (0..20).map(|at| route(&mut of_a, &format!("{round} {at}"), None).1).collect();
        bookings.drain(..10).for_each(|booking| free(&mut of_a, booking));
        server.kill();
        bookings.drain(..5).for_each(|booking| free(&mut of_a, booking));
        server.start_again();
        until_equal(&at_b, &a.address(), &at_a);
        // Both may have been equal before the last batch.
        until("five count", || others_requests(&at_b, 1) + others_requests(&at_b, 2) == 5);
        bookings.into_iter().for_each(|booking| free(&mut of_a, booking));
        until_equal(&at_b, &a.address(), &at_a);
    }
    until("none counts", || others_requests(&at_b, 1) + others_requests(&at_b, 2) == 0);
    // It is shown a few times a second.
    until("three lost connections are counted", || at_b.counter("router_links_lost") >= 3);
}

#[test]
fn a_daemon_is_ready_once_it_has_greeted_the_others_or_was_not_to_wait_longer() {
    let Some(way) = over_nats() else { return };
    let (server, [mut a, b]) = (of(&way), fleet(&way, ["a", "b"]));
    let at_b = b.start();
    let (_, booking) = route(&mut at_b.client(), "b", Some(1));
    server.kill();
    let mut alone = Site::over(&way, "alone");
    alone.join_ms_max = 1;
    let at_alone = alone.start();
    until("it says that it does not know others' load", || at_alone.counter("router_join_state") == 2);
    assert_eq!(at_alone.said(&["status"])["ready"], true);
    a.join_ms_max = NEVER_MS;
    let at_a = a.start();
    assert_eq!(at_a.said(&["status"])["ready"], false);
    assert!(findings(&at_a).contains(&"routers_joining".to_owned()));
    server.start_again();
    until("it is ready", || at_a.said(&["status"])["ready"] == true);
    until("it counts what the other one has booked", || others_requests(&at_a, 1) == 1);
    free(&mut at_b.client(), booking);
    until("it no longer counts", || others_requests(&at_a, 1) == 0);
}

#[test]
fn strangers_who_publish_anything_change_nothing_and_are_counted() {
    let Some(way) = over_nats() else { return };
    let (server, [a, b]) = (of(&way), fleet(&way, ["a", "b"]));
    let (at_a, at_b) = (a.start(), b.start());
    until_live(&at_b, &a.address());
    until_live(&at_a, &b.address());
    let mut client = at_a.client();
    let (_, booking) = route(&mut client, "a", Some(1));
    until("the booking counts", || others_requests(&at_b, 1) == 1);
    let number = a.address().rsplit('.').next().expect("a number").to_owned();
    let (load, ask) = (format!("kvrouted.load.{number}"), format!("kvrouted.ask.{number}"));
    let forger = Sender { origin: OriginId(77), incarnation: Incarnation(2), fingerprint: Fingerprint(3) };
    let of_a = Sender { origin: OriginId(u64::from_str_radix(&number, 16).expect("a number")), ..forger };
    let keys = Keys::new(OTHER_SECRET.as_bytes(), None).expect("long enough");
    let forged = [forger, of_a].map(|sender| encode(&sender, &Content::Heartbeat(Heartbeat::default()), &keys));

    let (mut listener, mut stranger) = (server.stranger(), server.stranger());
    listener.subscribe("kvrouted.load.*");
    let (_, genuine) =
        std::iter::repeat_with(|| listener.message()).find(|(subject, _)| *subject == load).expect("one");
    for round in 0..50_u64 {
        let unknown = format!("kvrouted.load.{round:016x}");
        for message in [&b"junk"[..], b"", &forged[0], &forged[1], &genuine, &genuine[..genuine.len() - 1]] {
            for subject in [&load[..], &unknown, "kvrouted.load.x", "kvrouted.hello", &ask] {
                stranger.publish(subject, "", message);
                stranger.publish(subject, "kvrouted.load.0000000000000001", message);
                stranger.publish(subject, &format!("kvrouted.to.{round:016x}"), message);
                stranger.publish(&format!("kvrouted.to.{number}.{round:016x}"), "", message);
            }
        }
    }
    // Subjects that are no text, and bytes that pass for white space elsewhere.
    for word in [&b"\xff\xfe"[..], b"a\x0cb", b"\xc2\xa0\x0b"] {
        stranger.send(&[b"PUB kvrouted.load.", word, b" 2\r\nhi\r\n"].concat());
        stranger.send(&[b"PUB kvrouted.hello ", word, b" 2\r\nhi\r\n"].concat());
    }
    // Headers that no program can read, and what is larger than any message of a router.
    for headers in
        [&b"NATS/1.0\r\nbroken\r\n\r\n"[..], b"NATS/1.0 999999\r\n\r\n", b"\xff\xff\r\n\r\n", b"HTTP/1.1\r\n\r\n"]
    {
        stranger.publish_with_headers(&load, headers, &genuine);
    }
    stranger.publish(&load, "", &vec![b'\n'; 1 << 20]);
    stranger.settle();
    until("they are counted", || {
        at_b.counter("router_messages_wrong_mac") > 100 && at_b.counter("router_messages_unreadable") > 100
    });
    until("a finding names another secret", || findings(&at_b).contains(&"router_secret".to_owned()));
    until("greetings that want their answers elsewhere are dropped", || at_b.counter("router_messages_dropped") > 100);
    until_equal(&at_b, &a.address(), &at_a);
    assert_eq!((others_requests(&at_b, 1), at_b.counter("router_links_lost")), (1, 0), "no connection was cut");
    until("no stranger is shown as a router", || at_b.status().routers.len() == 2);
    free(&mut client, booking);
    until("it no longer counts", || others_requests(&at_b, 1) == 0);
}

#[test]
fn what_floods_the_subjects_delays_others_and_loses_nothing_for_good() {
    let Some(way) = over_nats() else { return };
    let (server, [a, b]) = (of(&way), fleet(&way, ["a", "b"]));
    let (at_a, at_b) = (a.start(), b.start());
    until_live(&at_b, &a.address());
    let number = a.address().rsplit('.').next().expect("a number").to_owned();
    let ends = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flood = std::thread::spawn({
        let (mut stranger, ends) = (server.stranger(), Arc::clone(&ends));
        let subjects = [format!("kvrouted.load.{number}"), "kvrouted.hello".to_owned()];
        let message = [&b"KVLM\x01\0\0\0"[..], &[7; 4000]].concat();
        move || {
            while !ends.load(Ordering::Relaxed) {
                for subject in &subjects {
                    stranger.publish(subject, "kvrouted.to.0000000000000009", &message);
                }
            }
        }
    });
    let mut of_a = at_a.client();
    let unreadable = |at: &Daemon| at.counter("router_messages_wrong_mac") + at.counter("router_messages_unreadable");
    until("the flood has come", || unreadable(&at_b) > 2_000);
    let (_, booking) = route(&mut of_a, "a", Some(1));
    until("a booking counts all the same", || others_requests(&at_b, 1) == 1);
    ends.store(true, Ordering::Relaxed);
    flood.join().expect("it ends");
    free(&mut of_a, booking);
    until("it no longer counts", || others_requests(&at_b, 1) == 0);
    until_equal(&at_b, &a.address(), &at_a);
}

// ---- logins -----------------------------------------------------------------------------------------------------------

/// The row of the server at a router with these lines in its `[routers]`, and the router.
fn alone(address: &str, lines: &str) -> (Daemon, Site) {
    let site = Site::new("alone");
    let secret = site.folder.path().join("secret");
    write_secret(&secret, SECRET);
    let tables =
        format!("[routers]\nnats = [{address:?}]\nsecret_file = {secret:?}\njoin_ms_max = 0\n{lines}{WORKERS}");
    let config = configure(site.folder.path(), &tables);
    (Daemon::serve(Arc::clone(&site.folder), &["--config", text(&config)]), site)
}

/// Waits until the server has accepted the login: then status shows no row for it.
#[track_caller]
fn until_accepted(at: &Daemon) {
    until_ok("the server accepts the login", || {
        let rows = at.status().routers;
        if rows.len() == 1 && at.counter("router_join_state") != 1 { Ok(()) } else { Err(at.process.log()) }
    });
}

#[test]
fn a_user_a_token_and_a_key_are_accepted_and_a_wrong_password_is_refused_and_said() {
    let folder = folder();
    let path = folder.path().join("hush");
    write_secret(&path, "hush\n");
    let login = format!("nats_secret_file = {path:?}\n");
    let Some(server) = server("authorization { user: kvrouted, password: hush }\n") else { return };
    let (at, _site) = alone(&server.address("nats"), &format!("nats_user = \"kvrouted\"\n{login}"));
    until_accepted(&at);
    let (at, _site) = alone(&server.address("nats"), &format!("nats_user = \"other\"\n{login}"));
    until("the refusal is said", || at.process.log().contains("Authorization Violation"));
    assert!(!at.process.log().contains("hush"), "{}", at.process.log());
    until("status says so", || {
        row(&at.status(), &server.address("nats")).is_some_and(|of| of.state == "unreached")
            && at.counter("router_connections_cut") > 0
    });

    let server = self::server("authorization { token: hush }\n").expect("as before");
    until_accepted(&alone(&server.address("nats"), &login).0);

    let (seed, public) = key([7; 32]);
    let credentials = folder.path().join("key");
    write_secret(&credentials, &seed);
    let server = self::server(&format!("authorization {{ users = [ {{ nkey: {public} }} ] }}\n")).expect("as before");
    until_accepted(&alone(&server.address("nats"), &format!("nats_credentials_file = {credentials:?}\n")).0);
}

/// A user's seed and public key as NATS writes them.
fn key(seed: [u8; 32]) -> (String, String) {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};
    let crc = |bytes: &[u8]| {
        bytes.iter().fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| (crc << 1) ^ if crc >> 15 == 1 { 0x1021 } else { 0 })
        })
    };
    let text = |kind: &[u8], key: &[u8]| {
        let bytes = [kind, key].concat();
        BASE32_NOPAD.encode(&[&bytes[..], &crc(&bytes).to_le_bytes()].concat())
    };
    let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed");
    (text(&[0x95, 0], &seed), text(&[0xa0], pair.public_key().as_ref()))
}

#[test]
fn with_tls_only_a_server_with_a_known_authority_and_its_own_name_is_used() {
    let (folder, authority) = (folder(), Authority::new());
    let (certificate, key) = authority.certify("localhost");
    let mut lines = "tls {\n".to_owned();
    for (name, option, content) in [("crt", "cert_file", &certificate), ("key", "key_file", &key)] {
        let path = folder.path().join(name);
        write_secret(&path, content);
        writeln!(lines, "  {option}: {path:?}").expect("written");
    }
    let Some(server) = server(&format!("{lines}}}\n")) else { return };
    let [known, other] = ["known", "other"].map(|name| folder.path().join(name));
    write_secret(&known, &authority.certificate);
    write_secret(&other, &Authority::new().certificate);
    let trusting = |path: &Path| format!("nats_ca_file = {path:?}\n");
    let by_name = server.address("tls").replace("127.0.0.1", "localhost");
    until_accepted(&alone(&by_name, &trusting(&known)).0);
    for (address, lines, said) in [
        (by_name.clone(), trusting(&other), "TLS: "),
        (server.address("tls"), trusting(&known), "TLS: "),
        (server.address("nats"), String::new(), "the server wants TLS"),
    ] {
        let (at, _site) = alone(&address, &lines);
        until("the refusal is said", || at.process.log().contains(said));
        assert_eq!(row(&at.status(), &address).expect("its row").state, "unreached");
    }
    let plain = self::server("").expect("as before");
    let (at, _site) = alone(&plain.address("tls"), &trusting(&known));
    until("the refusal is said", || at.process.log().contains("the server has no TLS"));
}
