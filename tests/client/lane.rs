//! The reconnecting clients over a shm lane: the same replies as over the socket, and what happens when a lane fails.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvrouted::client::{Answer, AsyncClient, BackOff, ClientCounter, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::error::Kind;
use kvrouted::lane::{LANE_LAYOUT, LaneMemory, LaneSizes, bell_pair};
use kvrouted::limits::LANE_RING_BYTES_CEILING;
use kvrouted::load::BookingOutcome;
use kvrouted::wire::{FrameHeader, FrameKind, LaneOpened, ReplyEncoder, RouteReply};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::kit::raw::{frame, read_frame};
use crate::kit::{self, Daemon, prompt, until};
use crate::{WORKERS, booked, bookings, options, question, runtime, space, until_daemon, until_holds};

fn lane(wanted: LaneUse) -> SteadyOptions {
    SteadyOptions { lane: wanted, ..options() }
}

/// A daemon with at most `lanes_max` shm lanes.
fn with_lanes(lanes_max: u32) -> Daemon {
    let folder = kit::folder();
    let (serve, workers) = (format!("lanes_max = {lanes_max}"), "[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    let config = kit::configure_serve(folder.path(), &serve, workers);
    Daemon::serve(folder, &["--config", kit::text(&config)])
}

/// What of a decision does not depend on chance.
fn told(answer: Answer) -> (Vec<String>, u32, u64) {
    let Answer::Daemon { reply, .. } = answer else { panic!("decided alone: {answer:?}") };
    let RouteReply { candidates, request_blocks, policy_version, .. } = *reply;
    let mut candidates: Vec<_> = candidates.iter().map(|candidate| format!("{candidate:?}")).collect();
    candidates.sort();
    (candidates, request_blocks, policy_version)
}

#[test]
fn what_goes_by_a_lane_is_what_goes_by_the_socket_however_long() {
    let daemon = Daemon::start(&WORKERS);
    runtime().block_on(async {
        let spin = Duration::from_micros(200);
        let by_lane = AsyncClient::new(daemon.socket(), SteadyOptions { spin, ..lane(LaneUse::Require) });
        let by_socket = AsyncClient::new(daemon.socket(), options());
        let space = space(&by_lane).await;
        by_socket.connected().await.expect("a connection");
        assert!(by_lane.has_lane() && !by_socket.has_lane() && daemon.counter("lanes_open") == 1);
        // The last is twice the size of a ring.
        for tokens in [0, 16, 65, 11_520, 131_072] {
            let tokens = prompt(tokens, tokens);
            let question = question(space, &tokens);
            let answers = [by_lane.route(&question).await, by_socket.route(&question).await];
            let [by_lane, by_socket] = answers.map(|answer| told(answer.expect("an answer")));
            assert_eq!(by_lane, by_socket);
        }
        // More at once than both rings hold.
        let asked = (0..200_u32).map(|seed| {
            let client = by_lane.clone();
            tokio::spawn(async move { client.route(&question(space, &prompt(seed, 12_000))).await })
        });
        for answer in asked.collect::<Vec<_>>() {
            assert!(!answer.await.expect("it ran").expect("an answer").is_fallback());
        }
        assert!(by_lane.close().await, "everything was answered");
    });
    until("the lane is gone", || daemon.counter("lanes_open") == 0);
}

#[test]
fn a_lane_is_opened_again_with_the_next_daemon() {
    let mut daemon = Daemon::start(&WORKERS);
    let client = SteadyClient::new(daemon.socket(), lane(LaneUse::Try)).expect("a client");
    client.connected().expect("a connection");
    let space = client.space("m", None, None).expect("the space").id;
    let tokens = prompt(1, 100);
    assert!(client.has_lane() && client.lane_refusal().is_none());
    let before = client.route(&booked(space, &tokens, "r")).expect("an answer").booking().expect("booked");
    daemon.process.end("-KILL");
    assert!(client.route(&question(space, &tokens)).expect("an answer").is_fallback() && !client.has_lane());
    assert_eq!(client.free(before).expect("kept"), None);
    let daemon = Daemon::start_in(Arc::clone(&daemon.folder), &WORKERS);
    until("it is found again", || !client.route(&question(space, &tokens)).expect("an answer").is_fallback());
    assert!(client.has_lane());
    assert_eq!([ClientCounter::Connected, ClientCounter::LanesOpened].map(|one| client.counter(one)), [2, 2]);
    assert_eq!(client.counter(ClientCounter::LanesRefused), 0);
    let booking = client.route(&booked(space, &tokens, "r")).expect("an answer").booking().expect("booked");
    assert_eq!(client.free(booking).expect("told"), Some(BookingOutcome::Applied));
    assert_eq!((bookings(&daemon), daemon.counter("lanes_opened")), (0, 1));
    assert!(client.close());
}

#[test]
fn who_is_given_no_lane_goes_by_the_socket_or_not_at_all_and_says_why() {
    let (daemon, without) = (with_lanes(1), with_lanes(0));
    runtime().block_on(async {
        let first = AsyncClient::new(daemon.socket(), lane(LaneUse::Require));
        let space = space(&first).await;
        let second = AsyncClient::new(daemon.socket(), lane(LaneUse::Try));
        second.connected().await.expect("a connection");
        assert!(!second.has_lane() && second.lane_refusal().is_some_and(|why| why.kind() == Kind::Overloaded));
        assert_eq!(second.counter(ClientCounter::LanesRefused), 1);
        let tokens = prompt(1, 100);
        assert!(!second.route(&question(space, &tokens)).await.expect("an answer").is_fallback());
        // There may be one again: it is asked for as a daemon that takes no connections for now.
        let third = AsyncClient::new(daemon.socket(), lane(LaneUse::Require));
        let error = third.connected().await.unwrap_err();
        assert!(error.kind() == Kind::Connection && error.message().contains("lane"), "{error}");
        first.close().await;
        until_holds("it has the lane", || third.has_lane()).await;
        until_daemon(&third, space, &tokens).await;

        let never = AsyncClient::new(without.socket(), lane(LaneUse::Require));
        assert_eq!(never.connected().await.unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(never.route(&question(space, &tokens)).await.unwrap_err().kind(), Kind::Unsupported);
        let trying = AsyncClient::new(without.socket(), lane(LaneUse::Try));
        trying.connected().await.expect("a connection");
        assert!(trying.lane_refusal().is_some_and(|why| why.kind() == Kind::Unsupported));
    });
}

/// Hands over a lane that says of itself what cannot be.
fn hand_over_nonsense(client: &UnixStream, asked: FrameHeader) -> LaneMemory {
    let sizes = LaneSizes::requested(0, 0, LANE_RING_BYTES_CEILING).expect("sizes");
    let mut memory = LaneMemory::make(sizes).expect("a lane");
    // The end of the replies, far beyond their ring. Relaxed: the frame below comes after it.
    memory.words()[32].store(u64::MAX, Ordering::Relaxed);
    let (file, bell) = (memory.share().expect("its file"), bell_pair().expect("a bell").0);
    let opened = LaneOpened {
        layout: LANE_LAYOUT,
        request_ring_bytes: sizes.request_bytes(),
        reply_ring_bytes: sizes.reply_bytes(),
    };
    let mut out = Vec::new();
    ReplyEncoder::default().lane_opened(asked.correlation_id, opened, &mut out);
    let descriptors = [file.as_fd(), bell.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(client, &[IoSlice::new(&out)], &mut control, SendFlags::NOSIGNAL).expect("handed over");
    memory
}

/// A daemon whose lanes are broken: passes everything on to a real one but the request for a lane.
fn of_broken_lanes(real: &Path) -> (PathBuf, Arc<tempfile::TempDir>) {
    let (folder, real) = (kit::folder(), real.to_owned());
    let path = folder.path().join("broken");
    let listener = UnixListener::bind(&path).expect("bound");
    let pass_on = |mut from: UnixStream, mut to: UnixStream| {
        std::thread::spawn(move || {
            drop(std::io::copy(&mut from, &mut to));
            drop(to.shutdown(std::net::Shutdown::Both));
        })
    };
    let serve = move |mut client: UnixStream| -> Option<()> {
        let mut daemon = UnixStream::connect(&real).expect("the daemon");
        let read = |from: &mut UnixStream| read_frame(from).ok();
        let pass =
            |(header, body): (FrameHeader, Vec<u8>), to: &mut UnixStream| to.write_all(&frame(header, &body)).ok();
        pass(read(&mut client)?, &mut daemon)?;
        pass(read(&mut daemon)?, &mut client)?;
        let (header, body) = read(&mut client)?;
        if header.kind == FrameKind::OpenLane as u8 {
            let memory = hand_over_nonsense(&client, header);
            while read(&mut client).is_some() {}
            drop(memory);
            return None;
        }
        pass((header, body), &mut daemon)?;
        pass_on(client.try_clone().ok()?, daemon.try_clone().ok()?);
        pass_on(daemon, client);
        None
    };
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(client));
        }
    });
    (path, folder)
}

#[test]
fn a_lane_that_is_broken_is_not_had_again_at_once() {
    let daemon = Daemon::start(&WORKERS);
    let (path, _folder) = of_broken_lanes(&daemon.socket());
    runtime().block_on(async {
        let back_off = BackOff { first: Duration::from_secs(1), most: Duration::from_secs(1) };
        let client = AsyncClient::new(path, SteadyOptions { back_off, ..lane(LaneUse::Try) });
        until_holds("it goes on without", || client.counter(ClientCounter::Connected) == 2).await;
        let space = space(&client).await;
        assert!(!client.route(&question(space, &prompt(1, 64))).await.expect("an answer").is_fallback());
        assert!(!client.has_lane());
        let why = client.lane_refusal().expect("why");
        assert!(why.message().contains("cannot be trusted"), "{why}");
        let counted = [ClientCounter::LanesOpened, ClientCounter::LanesRefused, ClientCounter::ConnectionsLost];
        assert_eq!(counted.map(|one| client.counter(one)), [1, 1, 1]);
    });
}
