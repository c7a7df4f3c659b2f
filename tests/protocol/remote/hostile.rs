//! Peers of the remote port that are no callers, and daemons that a caller does not trust.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};

use kvrouted::client::Reply;
use kvrouted::error::Kind;
use kvrouted::limits::{FRAME_HEADER_BYTES, REMOTE_ADDRESS_CONNECTIONS_AT_ONCE, REMOTE_HALF_OPEN_MAX};
use kvrouted::wire::{FrameHeader, decode_reply};
use rand::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::kit::raw::{Raw, garbage, hello_frame, route_frame};
use crate::kit::remote::{EAST, STRANGER, Site, Tls, opening};
use crate::kit::{Daemon, run, text, until};

/// Waits until a counter of refusals stands at a number, and checks that local and remote clients are served.
#[track_caller]
fn assert_refused(daemon: &Daemon, counter: &str, times: u64) {
    until(counter, || daemon.counter(counter) == times);
    Raw::greeted(&daemon.socket()).assert_served();
}

/// The kind of the one error of a refused connection, and its words.
fn refusal(tls: &mut Tls) -> (Kind, String) {
    let mut answer = Vec::new();
    tls.read_to_end(&mut answer).expect("an answer and an end");
    let frame = answer.strip_prefix(b"KVRR\x01\0\x01\0").expect("refused");
    let (head, body) = frame.split_first_chunk::<FRAME_HEADER_BYTES>().expect("a header");
    let header = FrameHeader::parse(head).expect("a header");
    let Reply::Error(error) = decode_reply(header.kind, body).expect("a reply") else { panic!("no error") };
    assert!(!error.remedy.is_empty() && header.correlation_id.0 == 0);
    (error.kind.expect("a known kind"), error.message)
}

fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    // The port may send a TLS alert, or reset a connection whose bytes it has not read.
    stream.read_to_end(&mut rest).is_ok() || stream.write_all(&[0]).is_err()
}

#[test]
fn what_is_no_tls_is_refused_and_counted() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut garbage = vec![0; 4000];
    random.fill_bytes(&mut garbage);
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), hello_frame(None), opening(EAST), garbage] {
        let mut stream = site.tcp();
        let _ = stream.write_all(&bytes);
        assert!(is_closed(&mut stream));
    }
    // One that only connects and leaves, as a port scan does.
    drop(site.tcp());
    assert_refused(&daemon, "remote_refused_tls", 5);
}

#[test]
fn a_token_that_nobody_has_is_refused_in_words() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let stranger = site.caller("stranger", &[]);
    let refused = stranger.refusal();
    assert!(
        refused.kind() == Kind::Connection && refused.to_string().contains("no principal has this token"),
        "{refused}"
    );
    assert!(refused.remedy().contains("principals_file"), "{refused}");
    let mut tls = site.tls();
    tls.write_all(&opening(STRANGER)).expect("sent");
    assert_eq!(refusal(&mut tls).0, Kind::NotPermitted);
    // The token of a principal with one more character, or one less, is another token.
    for token in [&EAST[1..], &format!("{EAST}x")] {
        let mut tls = site.tls();
        tls.write_all(&opening(token)).expect("sent");
        assert_eq!(refusal(&mut tls).0, Kind::NotPermitted);
    }
    assert_refused(&daemon, "remote_refused_token", 4);
    assert!(!daemon.process.log().contains(STRANGER) && !daemon.process.log().contains(EAST), "no token is logged");
}

#[test]
fn an_opening_that_is_too_long_or_of_another_kind_is_refused_before_it_is_read() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let long = [b"KVRR\x01\0\xff\xff".as_slice(), &[b'x'; 4096]].concat();
    let other_version = [b"KVRR\x02\0\x28\0".as_slice(), EAST.as_bytes()].concat();
    for (bytes, kind, word) in [
        (long, Kind::Malformed, "65535 bytes"),
        (b"KVRR\x01\0\0\0".to_vec(), Kind::Malformed, "0 bytes"),
        (hello_frame(None), Kind::Malformed, "no opening"),
        (other_version, Kind::UnsupportedVersion, "version 2"),
    ] {
        let mut tls = site.tls();
        tls.write_all(&bytes).expect("sent");
        let (refused, words) = refusal(&mut tls);
        assert!(refused == kind && words.contains(word), "{words}");
    }
    assert_refused(&daemon, "remote_refused_opening", 4);
}

#[test]
fn a_slow_handshake_is_given_up() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let (mut silent, mut slow, mut tls) = (site.tcp(), site.tcp(), site.tls());
    // The beginning of a TLS record, a byte at a time; and a token that does not come whole.
    let _trickle = std::thread::spawn(move || {
        for byte in [22, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(0)) {
            if slow.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    tls.write_all(&opening(EAST)[..20]).expect("sent");
    assert!(is_closed(&mut silent));
    assert_refused(&daemon, "remote_refused_slow", 3);
}

#[test]
fn half_open_connections_make_room_for_callers() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let mut early = Raw::greeted(&east.socket);
    let more = 20;
    let flood: Vec<TcpStream> = (0..REMOTE_HALF_OPEN_MAX + more).map(|_| site.tcp()).collect();
    until("the oldest are displaced", || daemon.counter("remote_refused_displaced") >= more as u64);
    // Each displaces one of the flood, which is from one address, as the caller is here.
    Raw::greeted(&east.socket).assert_served();
    early.assert_served();
    Raw::greeted(&daemon.socket()).assert_served();
    drop(flood);
    until("the rest is given up", || {
        let refused = ["displaced", "tls", "slow"].map(|name| daemon.counter(&format!("remote_refused_{name}")));
        refused.iter().sum::<u64>() >= (REMOTE_HALF_OPEN_MAX + more) as u64
    });
}

#[test]
fn an_address_that_begins_too_many_connections_is_closed_at_once() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let flooding = Ipv4Addr::new(127, 0, 0, 2);
    until("its connections are closed at once", || {
        (0..100).for_each(|_| drop(site.tcp_from(flooding)));
        daemon.counter("remote_refused_frequent") > 0
    });
    assert!(daemon.counter("remote_refused_tls") >= u64::from(REMOTE_ADDRESS_CONNECTIONS_AT_ONCE) / 2);
    assert!(is_closed(&mut site.tcp_from(flooding)));
    // Others do not notice.
    drop(site.opened(EAST));
}

#[test]
fn a_greeting_without_end_is_cut() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let mut stream = site.tcp();
    // A first record of 16 KiB, and a message in it that announces more records.
    let record = [&[22, 3, 1, 0x40, 0][..], &[1, 0, 0xf0, 0], &[0; (16 << 10) - 4]].concat();
    let _ = stream.write_all(&record.repeat(2));
    assert!(is_closed(&mut stream));
    assert_refused(&daemon, "remote_refused_tls", 1);
}

#[test]
fn a_caller_trusts_only_the_certificate_that_it_should() {
    let site = Site::new();
    let _daemon = site.plain_daemon();
    let other = site.path("other-ca.pem");
    let stranger = site.caller("east", &["--ca-file", text(&other)]);
    let refused = stranger.refusal();
    assert!(refused.kind() == Kind::Connection && refused.to_string().contains("TLS handshake"), "{refused}");
    assert!(refused.remedy().contains("--ca-file"), "{refused}");
    let misnamed = site.caller("west", &["--server-name", "other.test"]);
    assert!(misnamed.refusal().to_string().contains("TLS handshake"));
}

#[test]
fn garbage_of_a_principal_ends_its_own_connection() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
    for round in 0..20 {
        let mut tls = site.opened(EAST);
        let _ = tls.write_all(&garbage(&mut random, round));
        let _ = tls.sock.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _ = tls.read_to_end(&mut rest);
    }
    until("all are closed", || daemon.counter("remote_connections_open") == 0);
    assert_eq!(daemon.counter("bookings_live"), 0);
    Raw::greeted(&daemon.socket()).assert_served();
}

#[test]
fn a_flood_of_one_principal_leaves_others_and_local_clients_served() {
    let site = Site::new();
    site.configure("", "connections_max = 8", "");
    let daemon = site.daemon();
    let west = site.caller("west", &[]);
    let stops = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let mut tls = site.opened(EAST);
                tls.sock.set_write_timeout(Some(std::time::Duration::from_millis(100))).expect("set");
                tls.write_all(&hello_frame(None)).expect("sent");
                let frames: Vec<u8> = (2..66).flat_map(|id| route_frame(id, 20_000)).collect();
                // It reads nothing: its replies fill up, and then it can send no more.
                while !stops.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = tls.write(&frames);
                }
            });
        }
        let (mut far, mut near) = (Raw::greeted(&west.socket), Raw::greeted(&daemon.socket()));
        for _ in 0..200 {
            far.assert_served();
            near.assert_served();
        }
        Raw::greeted(&west.socket).assert_served();
        stops.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    use std::os::unix::fs::PermissionsExt as _;
    let site = Site::new();
    let config = site.configure("", "", "");
    let refused = || {
        let [said, checked] =
            [&["serve", "--config", text(&config)][..], &["serve", "--config", text(&config), "--check"]].map(
                |arguments| {
                    let output = run(arguments);
                    assert_eq!(output.status.code(), Some(64), "{output:?}");
                    String::from_utf8_lossy(&output.stderr).into_owned()
                },
            );
        assert!(said.ends_with(&checked), "{said}{checked}");
        checked
    };
    let principals = std::fs::read_to_string(site.path("principals")).expect("a file");
    let open = |name| std::fs::set_permissions(site.path(name), std::fs::Permissions::from_mode(0o644)).expect("set");
    open("principals");
    assert!(refused().contains("chmod o="));
    site.write_principals(&format!("{principals}east {STRANGER}\neast {STRANGER}y\n"));
    assert!(refused().contains("more than 2 tokens"));
    site.write_principals(&principals);
    open("router.key");
    assert!(refused().contains("router.key"));
    site.write("router.key", "no key");
    assert!(refused().contains("router.key"));
    std::fs::remove_file(site.path("router.crt")).expect("removed");
    assert!(refused().contains("router.crt"));
}
