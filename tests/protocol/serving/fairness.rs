//! Fairness between the connections of one serving thread.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use kvrouted::ids::CorrelationId;
use kvrouted::limits::{
    CONNECTIONS_MAX, FRAMES_PER_QUANTUM_MAX, RECEIVE_BUFFER_BYTES_MIN, REPLY_BYTES_PER_QUANTUM_MAX,
    REQUEST_BYTES_PER_QUANTUM_MAX,
};
use kvrouted::metrics::CoreCounter;
use kvrouted::route::RouteRequest;
use kvrouted::serve::{Connection, CoreOptions, Flow, IoBackend, RoutingResponder};
use kvrouted::wire::RequestEncoder;

use super::daemon::{Daemon, on_every_engine};
use super::service::{FakeService, GATE_TOKENS, HEAVY_TOKENS, fleet};
use crate::kit::raw::{Raw, encoded, question, route_frame};
use crate::kit::until;

const BIG_TOKENS: usize = 12_000;
const SMALL_TOKENS: usize = 4;
/// Requests of the small connection: many turns of it, and no more than the kernel holds.
const SMALL_COUNT: usize = 8 * FRAMES_PER_QUANTUM_MAX as usize;
/// Bytes in flight of a peer that does not read: the two sockets' buffers, which the kernel charges for more than is in
/// them, the receive buffer, and the replies of one turn.
const UNREAD_BYTES_MAX: usize = 2 << 20;

/// Writes one frame again and again until the peer has gone; counts the bytes.
fn write_for_ever(mut stream: UnixStream, frame: &[u8], written: &AtomicUsize) {
    while let Ok(bytes) = stream.write(&frame[written.load(Ordering::Relaxed) % frame.len()..]) {
        written.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Reads until the peer has gone.
fn read_for_ever(mut stream: UnixStream) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(1..) = stream.read(&mut buffer) {}
}

/// What a connection that never ends to ask left to a small one beside it, on one core.
struct Beside {
    /// How many requests of the greedy one were decided between two of the small one, at most.
    between_max: usize,
    turns_ended_by_work: u64,
}

/// Lets one connection ask for ever for prompts of `greedy_tokens`, and a small one ask beside it. Both begin once the
/// greedy one has sent `sent_bytes`.
fn beside(engine: IoBackend, greedy_tokens: usize, sent_bytes: usize) -> Beside {
    let mut daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
    let (greedy, mut small, mut gate) = (daemon.greeted(), daemon.greeted(), daemon.greeted());
    // The core stands still until both have sent more than a turn of theirs.
    gate.send(&route_frame(1, GATE_TOKENS));
    let written = Arc::new(AtomicUsize::new(0));
    let (to, from) = (greedy.stream.try_clone().unwrap(), greedy.stream.try_clone().unwrap());
    let (frame, count) = (route_frame(2, greedy_tokens), Arc::clone(&written));
    let writing = thread::spawn(move || write_for_ever(to, &frame, &count));
    let reading = thread::spawn(move || read_for_ever(from));
    small.send(&(0..SMALL_COUNT as u64).flat_map(|id| route_frame(id, SMALL_TOKENS)).collect::<Vec<_>>());
    until("both have asked", || written.load(Ordering::Relaxed) >= sent_bytes);
    daemon.stage.open();
    for id in 0..SMALL_COUNT as u64 {
        assert_eq!(small.reply().0, id, "replies of one connection come in the order of its requests");
    }
    let decided = daemon.stage.decided.lock().unwrap().clone();
    assert!(decided.contains(&greedy_tokens), "the greedy one is not starved either");
    let first = decided.iter().position(|tokens| *tokens == SMALL_TOKENS).unwrap();
    let last = decided.iter().rposition(|tokens| *tokens == SMALL_TOKENS).unwrap();
    let between = decided[first..=last].split(|tokens| *tokens == SMALL_TOKENS).map(<[usize]>::len);
    let between_max = between.max().unwrap();
    let turns_ended_by_work = daemon.counters.get(CoreCounter::TurnsEndedByWork);
    daemon.stop(Duration::from_millis(50));
    drop(greedy);
    writing.join().unwrap();
    reading.join().unwrap();
    Beside { between_max, turns_ended_by_work }
}

#[test]
fn a_small_connection_has_its_turn_after_each_of_a_large_one() {
    on_every_engine(|engine| {
        let frame_bytes = route_frame(2, BIG_TOKENS).len();
        let Beside { between_max, turns_ended_by_work } = beside(engine, BIG_TOKENS, 3 * frame_bytes);
        // Twice: the small one may just have missed its turn.
        let turn = REQUEST_BYTES_PER_QUANTUM_MAX.div_ceil(frame_bytes - 16);
        assert!(between_max <= 2 * turn, "{between_max} of {turn}");
        assert_eq!(turns_ended_by_work, 0);
    });
}

#[test]
fn a_small_connection_has_its_turn_after_a_few_requests_that_are_much_work() {
    on_every_engine(|engine| {
        let frame_bytes = route_frame(2, HEAVY_TOKENS).len();
        let sent_bytes = 2 * FRAMES_PER_QUANTUM_MAX as usize * frame_bytes;
        let Beside { between_max, turns_ended_by_work } = beside(engine, HEAVY_TOKENS, sent_bytes);
        // A quarter of a turn's work each. A ring lets the small one wait for its read and its write, a turn each.
        let turn = 4;
        assert!((turn..=4 * turn).contains(&between_max), "{between_max}");
        const { assert!(4 * 4 < FRAMES_PER_QUANTUM_MAX, "by count alone it would be more") };
        assert!(turns_ended_by_work > 0);
    });
}

/// Asks without reading until no more is taken; how many requests were, and what is left of the last one's frame.
fn ask_until_full(raw: &mut Raw) -> (u64, Vec<u8>) {
    let request = RouteRequest { candidates_max: 64, explain: true, ..question(&[0; 16]) };
    raw.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    for id in 0.. {
        let frame = encoded(|encoder, out| encoder.route(CorrelationId(id), &request, out).unwrap());
        let mut sent = 0;
        while sent < frame.len() {
            match raw.stream.write(&frame[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(_) => return (id + 1, frame[sent..].to_vec()),
            }
        }
        assert!((id as usize + 1) * frame.len() < UNREAD_BYTES_MAX, "it takes requests without end");
    }
    unreachable!()
}

#[test]
fn what_is_in_flight_is_bounded_and_nothing_of_it_is_lost() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let (mut raw, mut other) = (daemon.greeted(), daemon.greeted());
        let (asked, rest) = ask_until_full(&mut raw);
        let answered = daemon.counters.get(CoreCounter::Routes);
        assert!(answered < asked, "{answered} of {asked}");
        other.assert_decided(8);
        let mut writer = raw.stream.try_clone().unwrap();
        writer.set_write_timeout(None).unwrap();
        let writing = thread::spawn(move || writer.write_all(&rest).unwrap());
        for id in 0..asked {
            assert_eq!(raw.reply().0, id);
        }
        writing.join().unwrap();
        raw.assert_decided(8);
        assert_eq!(daemon.counters.get(CoreCounter::ConnectionsUnread), 0);
    });
}

#[test]
fn a_peer_that_does_not_read_is_closed_and_counted_and_the_others_are_served() {
    on_every_engine(|engine| {
        let impatient = |options| CoreOptions { unread_ms_max: 400, ..options };
        let daemon = Daemon::start_as(engine, 1, CONNECTIONS_MAX, impatient);
        let (mut raw, mut other) = (daemon.greeted(), daemon.greeted());
        let (asked, unsent) = ask_until_full(&mut raw);
        other.assert_decided(8);
        until("it is closed", || daemon.counters.get(CoreCounter::ConnectionsUnread) == 1);
        until("its session is closed", || daemon.sessions_open.load(Ordering::SeqCst) == 1);
        assert!(daemon.counters.get(CoreCounter::Routes) <= asked);
        assert_eq!(daemon.counters.get(CoreCounter::ConnectionsFailed), 0, "it is not one of those that failed");
        assert!(raw.stream.write_all(&unsent).is_err(), "the connection is closed");
        other.assert_decided(9);
    });
}

#[test]
fn a_reply_of_the_whole_fleet_fills_a_turn_by_itself() {
    let service = FakeService {
        fleet: fleet(),
        admin: "admin".into(),
        sessions_open: Arc::default(),
        last_session: 0,
        stage: Arc::default(),
    };
    let mut responder = RoutingResponder::new(service, Arc::default(), 1 << 20);
    let mut connection = Connection::new(0, 1 << 20);
    let mut encoder = RequestEncoder::default();
    let mut buffer = connection.take_buffer();
    encoder.hello(CorrelationId(0), "greedy", None, &mut buffer);
    let watches = 40;
    (0..watches).for_each(|id| encoder.watch(CorrelationId(id), None, (0, 0), &mut buffer));
    assert!(buffer.len() < RECEIVE_BUFFER_BYTES_MIN, "all of it is there at once");
    connection.give_back(buffer);
    let (mut turns, mut bytes) = (0, 0);
    loop {
        let mut out = Vec::new();
        let flow = connection.on_bytes(&mut responder, &mut out);
        bytes += out.len();
        match flow {
            Flow::Yield => turns += 1,
            Flow::Write => {}
            Flow::Continue | Flow::Close { .. } => break,
        }
    }
    let each = bytes / watches as usize;
    assert!(each < REPLY_BYTES_PER_QUANTUM_MAX, "{each}");
    let expected = watches as usize / REPLY_BYTES_PER_QUANTUM_MAX.div_ceil(each);
    assert!(turns >= expected && turns > 1, "{turns} turns of replies of {each} bytes");
}
