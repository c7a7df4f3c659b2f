//! Connections and serving threads from start to end.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kvrouted::client::Client;
use kvrouted::error::{Error, Kind};
use kvrouted::ids::CorrelationId;
use kvrouted::limits::{ADMIN_CONNECTIONS_MAX, CONNECTIONS_MAX};
use kvrouted::metrics::{CoreCounter, DaemonCounter};
use kvrouted::route::RouteRequest;
use kvrouted::serve::{BoundSocket, Core, CoreOptions, IoBackend, admin_path};

use super::daemon::{Daemon, on_every_engine};
use super::service::{FakeService, PANIC_TOKENS};
use crate::kit::raw::{Raw, encoded, question, route_frame};
use crate::kit::{WAIT_MAX, options, until};

#[test]
fn a_peer_that_does_not_read_is_held_back_and_then_gets_everything() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        let (requests, answered) = (3000_u64, Arc::new(AtomicU64::new(0)));
        let mut writer = raw.stream.try_clone().unwrap();
        let writing = thread::spawn(move || {
            let request = RouteRequest { candidates_max: 64, explain: true, ..question(&[0; 16]) };
            for id in 0..requests {
                writer
                    .write_all(&encoded(|encoder, out| encoder.route(CorrelationId(id), &request, out).unwrap()))
                    .unwrap();
            }
        });
        let mut other = daemon.greeted();
        other.assert_decided(8);
        for id in 0..requests {
            assert_eq!(raw.reply().0, id);
            answered.fetch_add(1, Ordering::Relaxed);
        }
        writing.join().unwrap();
        assert_eq!(answered.load(Ordering::Relaxed), requests);
    });
}

#[test]
fn a_client_killed_mid_request_leaves_the_others_served() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut other = daemon.greeted();
        for cut in [1, 15, 16, 17, 60] {
            let mut raw = daemon.greeted();
            raw.send(&route_frame(1, 100)[..cut]);
            drop(raw);
            other.assert_decided(cut + 20);
        }
        let mut unread = daemon.greeted();
        for id in 0..200 {
            unread.send(&route_frame(id, 50));
        }
        drop(unread);
        other.assert_decided(4);
        until("sessions of the dead are closed", || daemon.sessions_open.load(Ordering::SeqCst) == 1);
        until("connections are counted out", || daemon.counters.get(CoreCounter::ConnectionsClosed) == 6);
    });
}

#[test]
fn a_panic_ends_one_connection() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let (mut raw, mut other) = (daemon.greeted(), daemon.greeted());
        raw.send(&route_frame(1, PANIC_TOKENS));
        assert!(raw.is_at_end());
        other.assert_decided(4);
        until("its session is closed", || daemon.sessions_open.load(Ordering::SeqCst) == 1);
        assert_eq!(daemon.counters.get(CoreCounter::ConnectionsFailed), 1);
    });
}

#[test]
fn connections_are_spread_and_bounded() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 2, 4);
        let mut held: Vec<_> = (0..4).map(|_| daemon.client()).collect();
        let spread: Vec<_> = daemon.cores.iter().map(|core| core.handle().connections()).collect();
        assert_eq!(spread, [2, 2]);
        let refused = Client::connect(&daemon.path, &options()).unwrap_err();
        assert_eq!(refused.kind(), Kind::Overloaded, "{refused}");
        assert_eq!(daemon.refused.get(DaemonCounter::ConnectionsRefused), 1);
        held.pop();
        until("the place is free again", || {
            daemon.cores.iter().map(|core| core.handle().connections()).sum::<usize>() == 3
        });
        daemon.client();
    });
}

#[test]
fn a_drain_answers_what_was_sent_and_removes_the_sockets() {
    on_every_engine(|engine| {
        let mut daemon = Daemon::start(engine, 2, CONNECTIONS_MAX);
        let mut raws: Vec<_> = (0..6).map(|_| daemon.greeted()).collect();
        for raw in &mut raws {
            raw.send(&[route_frame(1, 4), route_frame(2, 5), route_frame(3, 6)[..20].to_vec()].concat());
        }
        let sockets = [daemon.path.clone(), admin_path(&daemon.path)];
        assert!(sockets.iter().all(|path| path.exists()));
        daemon.stop(WAIT_MAX);
        for raw in &mut raws {
            assert_eq!((raw.reply().0, raw.reply().0), (1, 2));
            assert!(raw.is_at_end());
        }
        assert!(sockets.iter().all(|path| !path.exists()));
        assert_eq!(daemon.sessions_open.load(Ordering::SeqCst), 0);
        assert_eq!(Client::connect(&daemon.path, &options()).unwrap_err().kind(), Kind::Connection);
    });
}

#[test]
fn a_drain_does_not_wait_for_a_peer_that_never_reads() {
    on_every_engine(|engine| {
        let mut daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let raw = daemon.greeted();
        let mut writer = raw.stream.try_clone().unwrap();
        let writing = thread::spawn(move || {
            let request = RouteRequest { candidates_max: 64, explain: true, ..question(&[0; 16]) };
            let bytes = encoded(|encoder, out| encoder.route(CorrelationId(1), &request, out).unwrap());
            // Until the drain cuts it.
            while writer.write_all(&bytes).is_ok() {}
        });
        // More than a socket takes of them: the next turn's replies wait.
        let stuck = || {
            let before = daemon.counters.get(CoreCounter::Routes);
            thread::sleep(Duration::from_millis(20));
            before > 4 && daemon.counters.get(CoreCounter::Routes) == before
        };
        until("replies pile up", stuck);
        daemon.stop(Duration::from_millis(50));
        writing.join().unwrap();
        assert_eq!(daemon.sessions_open.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_stale_routing_socket_is_taken_over_and_a_live_one_is_not() {
    let daemon = Daemon::start(IoBackend::Epoll, 1, CONNECTIONS_MAX);
    assert_eq!(BoundSocket::bind(&daemon.path, 0o660).unwrap_err().kind(), Kind::Config);
    daemon.client();
    let directory = tempfile::tempdir().unwrap();
    let stale = directory.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    assert!(BoundSocket::bind(&stale, 0o660).is_ok());
}

#[test]
fn a_core_whose_service_cannot_be_built_says_why() {
    on_every_engine(|engine| {
        let options = CoreOptions::new(0, engine);
        let fails = || Err::<FakeService, _>(Error::new(Kind::Overloaded, "no slot", "wait"));
        let error = Core::start(options, Arc::default(), fails).err().unwrap();
        assert_eq!(error.message(), "no slot");
    });
}

#[test]
fn an_admin_connection_too_many_is_told_so() {
    let daemon = Daemon::start(IoBackend::Epoll, 1, 10);
    let admin = admin_path(&daemon.path);
    let mut open: Vec<_> = (0..ADMIN_CONNECTIONS_MAX).map(|_| Raw::connect(&admin)).collect();
    open.iter_mut().for_each(|raw| drop(raw.hello(None).unwrap()));
    let mut refused = Raw::connect(&admin);
    assert_eq!(refused.error(0), Kind::Overloaded);
    assert!(refused.is_at_end());
    assert_eq!(daemon.refused.get(DaemonCounter::AdminConnectionsRefused), 1);
    open.pop();
    until("a place is free again", || Client::connect(&admin, &options()).is_ok());
}
