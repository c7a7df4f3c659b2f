//! The decoder over every split of its bytes, each refusal, and both ends against libzmq and hostile peers.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mio::{Events, Poll, Token};
use proptest::prelude::*;

use super::*;
use crate::budget::Gauge;
use crate::endpoint::BoundEndpoint;
use crate::limits::{
    RELAY_PEER_QUANTUM_BYTES_MAX, RELAY_PEER_QUANTUM_MESSAGES_MAX, RELAY_PEERS_MAX, RELAY_PEERS_PER_ADDRESS_MAX,
    RELAY_SUBSCRIBER_LAG_FACTOR_MAX, ZMQ_MESSAGE_BYTES_FREE, ZMQ_READ_BYTES,
};

const BOUNDS: Bounds = Bounds { message_bytes_max: 2 << 20, parts_max: 8, command_bytes_max: 512, keeps_parts: false };
/// Far beyond what anything here takes: reached only by a failure.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Everything that the decoder makes of the bytes, given in pieces of these lengths, over and over.
fn items(role: Role, bytes: &[u8], lengths: &[usize]) -> (Vec<Item>, Option<Refusal>) {
    let (mut decoder, mut items, mut input) = (Decoder::new(role, BOUNDS), Vec::new(), Vec::new());
    let (mut rest, mut lengths) = (bytes, lengths.iter().cycle());
    loop {
        let mut front = Bytes::from(std::mem::take(&mut input));
        loop {
            match decoder.next(&mut front) {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break,
                Err(refusal) => return (items, Some(refusal)),
            }
        }
        input = front.to_vec();
        if rest.is_empty() {
            return (items, None);
        }
        let (next, behind) = rest.split_at(lengths.next().map_or(rest.len(), |length| *length).clamp(1, rest.len()));
        input.extend_from_slice(next);
        rest = behind;
    }
}

fn frame(flags: u8, length: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![flags];
    if flags & 2 == 0 {
        bytes.push(length as u8)
    } else {
        bytes.extend(length.to_be_bytes())
    }
    bytes.extend_from_slice(body);
    bytes
}

fn command(name: &str, body: &[u8]) -> Vec<u8> {
    let inside = [&[name.len() as u8], name.as_bytes(), body].concat();
    frame(4, inside.len() as u64, &inside)
}

fn ready_as(socket: &str) -> Vec<u8> {
    let length = (socket.len() as u32).to_be_bytes();
    command("READY", &[b"\x0bSocket-Type".as_slice(), &length, socket.as_bytes(), b"\x08Identity\0\0\0\0"].concat())
}

/// A greeting and READY of a publisher.
fn publisher() -> Vec<u8> {
    [&greeting()[..], &ready_as("PUB")].concat()
}

fn part() -> impl Strategy<Value = (bool, Vec<u8>)> {
    (
        any::<bool>(),
        prop_oneof![prop::collection::vec(any::<u8>(), 0..12), prop::collection::vec(any::<u8>(), 200..600)],
    )
}

proptest! {
    #[test]
    fn any_split_of_the_bytes_gives_the_same_messages(
        messages in prop::collection::vec((prop::collection::vec(part(), 1..6), any::<bool>()), 0..12),
        lengths in prop::collection::vec(1_usize..700, 1..20),
    ) {
        let mut bytes = publisher();
        let mut expected = vec![Item::Greeted, Item::Ready];
        for (parts, pings) in &messages {
            let before = bytes.len();
            for (at, (long, body)) in parts.iter().enumerate() {
                let flags = u8::from(at + 1 < parts.len()) | if *long || body.len() > 255 { 2 } else { 0 };
                bytes.extend(frame(flags, body.len() as u64, body));
                if *pings && at + 1 < parts.len() {
                    // libzmq sends heartbeats between the parts of a message, too.
                    bytes.extend(command("PING", b"\0\0ctx"));
                    expected.push(Item::Ping(Bytes::from_static(b"ctx")));
                }
            }
            let last = Bytes::from(parts[parts.len() - 1].1.clone());
            let before_last = parts.len().checked_sub(2).and_then(|at| parts[at].1.as_slice().try_into().ok());
            let (parts, bytes, earlier) = (parts.len(), bytes.len() - before, Vec::new());
            expected.push(Item::Message(Message { parts, bytes, before_last, last, earlier }));
        }
        prop_assert_eq!(items(Role::Subscriber, &bytes, &lengths), (expected, None));
    }

    #[test]
    fn no_bytes_make_it_panic_and_none_more_than_they_are(
        tail in prop::collection::vec(any::<u8>(), 0..300),
        lengths in prop::collection::vec(1_usize..40, 1..5),
    ) {
        for bytes in [tail.clone(), [publisher(), tail].concat()] {
            let split = items(Role::Subscriber, &bytes, &lengths);
            prop_assert_eq!(items(Role::Subscriber, &bytes, &[bytes.len().max(1)]), split.clone());
            prop_assert!(split.0.len() <= bytes.len());
        }
    }
}

#[test]
fn parts_are_kept_only_where_the_bounds_say_so() {
    let said = [publisher(), frame(1, 2, b"ab"), frame(1, 0, b""), frame(0, 3, b"cde")].concat();
    for keeps_parts in [false, true] {
        let mut decoder = Decoder::new(Role::Subscriber, Bounds { keeps_parts, ..BOUNDS });
        let mut input = Bytes::from(said.clone());
        let mut messages = Vec::new();
        while let Ok(Some(item)) = decoder.next(&mut input) {
            if let Item::Message(message) = item {
                messages.push(message);
            }
        }
        let earlier: Vec<&[u8]> = messages[0].earlier.iter().map(|part| &part[..]).collect();
        assert_eq!(earlier, if keeps_parts { vec![&b"ab"[..], b""] } else { vec![] });
        assert_eq!((messages.len(), messages[0].parts, &messages[0].last[..]), (1, 3, &b"cde"[..]));
    }
}

#[test]
fn every_refusal_comes_with_the_header_that_earns_it() {
    let mut old = greeting().to_vec();
    old[10] = 1;
    let mut curve = greeting().to_vec();
    curve[12..17].copy_from_slice(b"CURVE");
    let greeted = |then: Vec<u8>| [greeting().to_vec(), then].concat();
    let up = |then: Vec<u8>| [publisher(), then].concat();
    let endless = (0..).flat_map(|_| frame(1, 0, b"")).take(2 * BOUNDS.parts_max + 2).collect();
    for (bytes, refusal) in [
        (b"G".to_vec(), Refusal::NotZmtp),
        (old[..11].to_vec(), Refusal::Version(1)),
        (curve, Refusal::Mechanism),
        (greeted(ready_as("PULL")), Refusal::SocketType),
        (greeted(command("ERROR", b"\x02no")), Refusal::PeerError),
        (greeted(frame(0, 1, b"x")), Refusal::NotReady),
        (greeted(command("PING", b"\0\0")), Refusal::NotReady),
        (greeted(command("READY", b"")), Refusal::CommandMalformed),
        (greeted(command("READY", b"\x0bSocket-Type\xff\xff\xff\xffPUB")), Refusal::CommandMalformed),
        (greeted(frame(6, 1 << 40, b"")), Refusal::CommandTooLong(1 << 40)),
        (up(frame(8, 0, b"")), Refusal::Flags(8)),
        (up(frame(5, 0, b"")), Refusal::Flags(5)),
        (up(frame(4, 3, b"\x09ab")), Refusal::CommandMalformed),
        (up(frame(2, 1 << 63, b"")), Refusal::MessageTooLong(1 << 63)),
        (up(frame(3, u64::MAX, b"")), Refusal::MessageTooLong(u64::MAX)),
        (up([frame(1, 1, b"x"), frame(2, 2 << 20, b"")].concat()), Refusal::MessageTooLong((2 << 20) + 1)),
        (up(endless), Refusal::TooManyParts(BOUNDS.parts_max)),
        (up(frame(6, 513, b"")), Refusal::CommandTooLong(513)),
    ] {
        let (_, refused) = items(Role::Subscriber, &bytes, &[1]);
        assert_eq!(refused, Some(refusal), "{bytes:x?}");
        assert!(!refusal.to_string().is_empty());
    }
    let tests_of_router = [("DEALER", true), ("REQ", true), ("SUB", false)];
    for (socket, talks) in tests_of_router {
        let (_, refused) = items(Role::Router, &greeted(ready_as(socket)), &[64]);
        assert_eq!(refused.is_none(), talks, "{socket}");
    }
}

#[test]
fn subscriptions_come_as_commands_and_as_messages() {
    let mut old = publisher();
    old[11] = 0;
    for (bytes, said) in [(publisher(), &b"\x04\x0b\x09SUBSCRIBEt"[..]), (old, b"\0\x02\x01t")] {
        let mut decoder = Decoder::new(Role::Subscriber, BOUNDS);
        let mut input = Bytes::from(bytes);
        while decoder.next(&mut input).expect("well formed").is_some() {}
        assert_eq!(decoder.subscription(b"t"), said);
    }
    let said = [greeting().to_vec(), ready_as("SUB"), command("SUBSCRIBE", b"t"), command("CANCEL", b"t")].concat();
    let (mut found, refused) = items(Role::Publisher, &said, &[7]);
    let topic = Bytes::from_static(b"t");
    assert_eq!((found.split_off(2), refused), (vec![Item::Subscribe(topic.clone()), Item::Cancel(topic)], None));
}

/// A connecting end with its event loop.
struct Client {
    poll: Poll,
    started: Instant,
    peer: Peer,
}

impl Client {
    fn open(endpoint: &str, role: Role, opening: Opening) -> Self {
        let poll = Poll::new().expect("an event loop");
        let registry = Arc::new(poll.registry().try_clone().expect("a descriptor"));
        let plan = PeerPlan { role, bounds: BOUNDS, opening, pace: Pace::ENGINE };
        let peer =
            Peer::open(&endpoint.parse().expect("an endpoint"), plan, (registry, Token(0)), 0).expect("well formed");
        Self { poll, started: Instant::now(), peer }
    }

    fn subscribe(endpoint: &str) -> Self {
        Self::open(endpoint, Role::Subscriber, Opening::Subscribe(Bytes::new()))
    }

    /// What comes next: a message, or what the connection did.
    fn next(&mut self) -> Result<Message, LinkEvent> {
        let mut events = Events::with_capacity(8);
        loop {
            let now_ms = self.started.elapsed().as_millis() as u64;
            assert!(self.started.elapsed() < TIMEOUT, "nothing came");
            self.peer.tick(now_ms);
            match self.peer.next(now_ms) {
                Next::Message(message) => return Ok(message),
                Next::Later => match self.peer.link_event() {
                    Some(event) => return Err(event),
                    None => continue,
                },
                Next::Drained => {}
            }
            self.poll.poll(&mut events, Some(Duration::from_millis(20))).expect("an event loop");
        }
    }
}

/// A port that sends these bytes to every peer, and then the others this many times, as far as the peer reads.
fn says(first: Vec<u8>, then: Vec<u8>, times: usize) -> (String, std::thread::JoinHandle<usize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"));
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_write_timeout(Some(TIMEOUT)).expect("a time limit");
        drop(stream.write_all(&first));
        let taken = (0..times).take_while(|_| stream.write_all(&then).is_ok()).count();
        // Until it is cut.
        let mut heard = [0; 512];
        while stream.read(&mut heard).is_ok_and(|read| read > 0) {}
        taken * then.len()
    });
    (endpoint, thread)
}

#[test]
fn a_message_that_breaks_a_bound_as_it_comes_ends_its_connection() {
    let endless_parts = frame(1, 200, &[7; 200]).repeat(1000);
    let empty_parts = frame(1, 0, b"").repeat(10_000);
    let endless_command = [frame(6, 1 << 62, b""), vec![7; 1 << 20]].concat();
    for (bytes, refusal) in [
        (endless_parts, Refusal::TooManyParts(BOUNDS.parts_max)),
        (empty_parts, Refusal::TooManyParts(BOUNDS.parts_max)),
        (frame(2, 1 << 63, &[7; 1 << 16]), Refusal::MessageTooLong(1 << 63)),
        (endless_command, Refusal::CommandTooLong(1 << 62)),
    ] {
        // 2 GiB in all, were it taken.
        let times = (2 << 30) / bytes.len();
        let (endpoint, hostile) = says(publisher(), bytes, times);
        let mut client = Client::subscribe(&endpoint);
        assert_eq!(client.next(), Err(LinkEvent::Handshake));
        assert_eq!(client.next(), Err(LinkEvent::Refused(refusal)));
        assert_eq!(client.next(), Err(LinkEvent::Disconnected));
        let taken = hostile.join().expect("ended");
        assert!(taken < 64 << 20, "{taken} bytes were taken, which the buffers of both kernels explain");
    }
}

#[test]
fn large_messages_of_all_peers_share_the_memory_of_their_thread_until_they_are_dropped() {
    const LARGE: usize = 1200 << 10;
    let messages = Gauge::default();
    // Each may take a quarter.
    bound_messages(4 * (1400 << 10), messages.clone());
    let said = |bytes: usize| says([publisher(), frame(2, bytes as u64, &vec![7; bytes])].concat(), Vec::new(), 0);
    // It has no room beside four of them, except in its connection's own memory.
    let own = ZMQ_MESSAGE_BYTES_FREE - ZMQ_READ_BYTES / 2;
    let ends = [LARGE, LARGE, LARGE, LARGE, LARGE, LARGE, 1900 << 10, own].map(said);
    let mut clients: Vec<Client> = ends.iter().map(|(endpoint, _)| Client::subscribe(endpoint)).collect();
    for client in &mut clients {
        assert_eq!(client.next(), Err(LinkEvent::Handshake));
    }
    assert_eq!(clients[6].next(), Err(LinkEvent::Refused(Refusal::NoRoom)), "more than a quarter");
    let mut held: Vec<_> =
        clients[..4].iter_mut().map(|client| client.next().expect("there is room for four")).collect();
    assert!(messages.get() >= 4 * LARGE as u64, "{} bytes", messages.get());
    assert_eq!(clients[4].next(), Err(LinkEvent::Refused(Refusal::NoRoom)));
    assert!(clients[7].next().is_ok(), "every connection has memory of its own");
    held.pop();
    assert!(clients[5].next().is_ok(), "there is room again");
    drop(held);
    drop(clients);
    assert!(messages.get() < ZMQ_READ_BYTES as u64, "{} bytes", messages.get());
    for (_, thread) in ends {
        thread.join().expect("ended");
    }
}

#[test]
fn a_peer_that_does_not_speak_zmtp_or_ends_the_handshake_is_not_a_publisher() {
    for bytes in [b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(10), [greeting().to_vec(), ready_as("PULL")].concat()] {
        let (endpoint, hostile) = says(bytes, Vec::new(), 0);
        assert_eq!(Client::subscribe(&endpoint).next(), Err(LinkEvent::HandshakeFailed));
        hostile.join().expect("ended");
    }
}

const QUICK: Pace = Pace {
    connect_ms_max: 1_000,
    handshake_ms_max: 2_000,
    reconnect_ms_max: 200,
    heartbeat_ms: 1_000,
    heartbeat_timeout_ms: 500,
};

impl Client {
    /// A subscriber whose clock the test moves.
    fn quick(listener: &TcpListener) -> Self {
        let endpoint = format!("tcp://{}", listener.local_addr().expect("bound"));
        let plan =
            PeerPlan { role: Role::Subscriber, bounds: BOUNDS, opening: Opening::Subscribe(Bytes::new()), pace: QUICK };
        let (poll, started) = (Poll::new().expect("an event loop"), Instant::now());
        let registry = Arc::new(poll.registry().try_clone().expect("a descriptor"));
        let peer =
            Peer::open(&endpoint.parse().expect("an endpoint"), plan, (registry, Token(0)), 0).expect("well formed");
        Self { poll, started, peer }
    }

    /// The next event while the clock stands at `now_ms`.
    fn event_at(&mut self, now_ms: u64) -> LinkEvent {
        let mut events = Events::with_capacity(8);
        loop {
            assert!(self.started.elapsed() < TIMEOUT, "nothing came");
            self.peer.tick(now_ms);
            assert!(!matches!(self.peer.next(now_ms), Next::Message(_)), "nothing is said");
            if let Some(event) = self.peer.link_event() {
                return event;
            }
            self.poll.poll(&mut events, Some(Duration::from_millis(5))).expect("an event loop");
        }
    }
}

#[test]
fn a_peer_that_falls_silent_gets_a_ping_and_is_connected_to_anew() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let mut client = Client::quick(&listener);
    let server = std::thread::spawn(move || {
        let accept = || {
            let (mut stream, _) = listener.accept().expect("a connection");
            stream.write_all(&publisher()).expect("sent");
            stream
        };
        let (mut silent, mut heard) = (accept(), Vec::new());
        // Its kernel takes what comes: it ends only because the other end closes.
        silent.read_to_end(&mut heard).expect("closed");
        (heard, accept())
    });
    assert_eq!(client.event_at(100), LinkEvent::Handshake);
    let pinged_ms = 100 + QUICK.heartbeat_ms;
    for now_ms in [pinged_ms - 1, pinged_ms, pinged_ms + QUICK.heartbeat_timeout_ms - 1] {
        assert!(!client.peer.tick(now_ms) && client.peer.next(now_ms) == Next::Drained, "{now_ms}");
    }
    let cut_ms = pinged_ms + QUICK.heartbeat_timeout_ms;
    assert_eq!(client.event_at(cut_ms), LinkEvent::Disconnected);
    assert_eq!(client.event_at(cut_ms + QUICK.reconnect_ms_max), LinkEvent::Handshake);
    let (heard, _again) = server.join().expect("both are accepted");
    assert!(heard.windows(4).any(|part| part == b"PING"));
}

#[test]
fn an_address_that_does_not_answer_is_tried_again_soon() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    // One connection waits to be accepted; the kernel drops further ones, as a network does that is cut.
    rustix::net::listen(&listener, 0).expect("listens");
    let waiting = TcpStream::connect(listener.local_addr().expect("bound")).expect("the first one waits");
    let mut client = Client::quick(&listener);
    for now_ms in [0, QUICK.connect_ms_max - 1] {
        assert!(!client.peer.tick(now_ms) && client.peer.next(now_ms) == Next::Drained, "{now_ms}");
        assert!(!client.peer.is_backing_off(), "{now_ms}");
    }
    client.peer.tick(QUICK.connect_ms_max);
    assert!(client.peer.is_backing_off());
    drop((listener.accept().expect("the first one"), waiting));
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.write_all(&publisher()).expect("sent");
        stream
    });
    let tried_ms = QUICK.connect_ms_max + QUICK.reconnect_ms_max;
    assert_eq!(client.event_at(tried_ms), LinkEvent::Handshake);
    drop(server.join().expect("accepted"));
}

/// A bound end that is served by a thread until it is dropped.
fn serve(plan: ServerPlan, mut each: impl FnMut(&mut Server, Vec<(PeerId, super::Message)>) -> bool) -> ServerCounts {
    let mut server =
        Server::bind(&BoundEndpoint::parse("tcp://127.0.0.1:0").expect("an endpoint"), plan).expect("a free port");
    let (started, mut received) = (Instant::now(), Vec::new());
    while each(&mut server, std::mem::take(&mut received)) {
        assert!(started.elapsed() < TIMEOUT, "it never came to its end");
        let now_ms = started.elapsed().as_millis() as u64;
        server.serve_peers(Duration::from_millis(5), now_ms, &mut received).expect("an event loop");
    }
    server.counts()
}

const PLAN: ServerPlan = ServerPlan {
    role: Role::Publisher,
    bounds: Bounds { message_bytes_max: 64, parts_max: 2, command_bytes_max: 512, keeps_parts: false },
    peers_max: RELAY_PEERS_MAX,
    peers_per_address_max: RELAY_PEERS_PER_ADDRESS_MAX,
    waiting_bytes_max: 1 << 20,
    waiting_messages_max: 1 << 10,
};

#[test]
fn libzmq_subscribes_and_asks_and_is_answered() {
    let context = zmq::Context::new();
    let sub = context.socket(zmq::SUB).expect("a socket");
    sub.set_subscribe(b"").expect("subscribed");
    sub.set_subscribe(b"other").expect("subscribed");
    let mut connected = false;
    let mut heard = 0;
    serve(PLAN, |server, _| {
        if !std::mem::replace(&mut connected, true) {
            sub.connect(server.endpoint()).expect("well formed");
        }
        server.publish(&message(&[b"", &7_u64.to_be_bytes()], &[9; 3000]));
        while let Ok(frames) = sub.recv_multipart(zmq::DONTWAIT) {
            assert_eq!(frames, [vec![], 7_u64.to_be_bytes().to_vec(), vec![9; 3000]]);
            heard += 1;
        }
        heard < 10
    });
    let dealer = context.socket(zmq::DEALER).expect("a socket");
    let (mut asked, mut answers) = (false, 0);
    serve(ServerPlan { role: Role::Router, ..PLAN }, |server, questions| {
        if !std::mem::replace(&mut asked, true) {
            dealer.connect(server.endpoint()).expect("well formed");
            dealer.send_multipart([&b""[..], &5_u64.to_be_bytes()], 0).expect("sent");
        }
        for (peer, question) in questions {
            assert_eq!((question.parts, &question.last[..]), (2, &5_u64.to_be_bytes()[..]));
            let pieces = [Bytes::from(head(&[b"", b"topic"], 4)), Bytes::from_static(b"last")];
            assert_eq!(server.send(peer, pieces), Sent::Yes);
        }
        answers += usize::from(dealer.recv_multipart(zmq::DONTWAIT).is_ok_and(|frames| frames[2] == b"last"));
        answers < 1
    });
}

#[test]
fn hostile_peers_are_cut_and_one_that_never_reads_holds_no_more_than_its_bound() {
    let subscriber = || [greeting().to_vec(), ready_as("SUB"), command("SUBSCRIBE", b"")].concat();
    let hostile: [Vec<u8>; 5] = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        [subscriber(), frame(1, 1, b"x").repeat(100)].concat(),
        [subscriber(), frame(2, 1 << 63, b"")].concat(),
        [subscriber(), frame(6, 1 << 62, b"")].concat(),
        [greeting().to_vec(), ready_as("PUB")].concat(),
    ];
    let (mut streams, mut sent) = (Vec::new(), 0_u64);
    let big = message(&[b"", &[0; 8]], &vec![1; 1 << 18]);
    let context = zmq::Context::new();
    let sub = context.socket(zmq::SUB).expect("a socket");
    sub.set_subscribe(b"").expect("subscribed");
    let mut heard = 0_u64;
    let counts = serve(PLAN, |server, _| {
        if streams.is_empty() {
            for bytes in &hostile {
                let address = server.endpoint().strip_prefix("tcp://").expect("a port");
                let mut stream = TcpStream::connect(address).expect("connected");
                stream.write_all(bytes).expect("sent");
                streams.push(stream);
            }
            // Takes thousands of subscriptions to say nothing, and reads nothing.
            let mut deaf = TcpStream::connect(server.endpoint().strip_prefix("tcp://").expect("a port")).expect("one");
            deaf.write_all(&subscriber()).expect("sent");
            (0..2000_u32).for_each(|n| deaf.write_all(&command("SUBSCRIBE", &n.to_be_bytes())).expect("sent"));
            streams.push(deaf);
            sub.connect(server.endpoint()).expect("well formed");
        }
        // The deaf one is disconnected once it is too far behind.
        let peers = server.peers() as u64 + server.counts().peers_stalled;
        if server.counts().peers_cut == hostile.len() as u64 && peers == 2 {
            server.publish(&big);
            sent += 1;
        }
        while let Ok(frames) = sub.recv_multipart(zmq::DONTWAIT) {
            assert_eq!(frames[2].len(), 1 << 18);
            heard += 1;
        }
        heard < 100
    });
    assert_eq!(counts.peers_cut, hostile.len() as u64);
    assert!(counts.messages_dropped > 0, "what the deaf one does not read is not kept: {counts:?}, {sent} sent");
}

#[test]
fn peers_from_one_address_leave_room_for_others() {
    let mut streams = Vec::new();
    let counts = serve(PLAN, |server, _| {
        let address = server.endpoint().strip_prefix("tcp://").expect("a port").to_owned();
        if streams.len() < RELAY_PEERS_PER_ADDRESS_MAX + 3 {
            streams.push(TcpStream::connect(address).expect("connected"));
        }
        server.counts().peers_refused < 3
    });
    assert_eq!(counts.peers_refused, 3);
}

/// Sends as many of these bytes, over and over, as the kernel takes now; `done` counts them over all calls.
fn fill(stream: &mut TcpStream, bytes: &[u8], done: &mut usize) {
    stream.set_nonblocking(true).expect("a socket");
    while let Ok(sent) = stream.write(&bytes[*done % bytes.len()..]) {
        *done += sent;
    }
}

#[test]
fn a_peer_that_never_pauses_gets_one_turn_at_a_time() {
    let (mut flooding, mut sent, mut rounds, mut most_bytes) = (None, 0, 0, 0);
    // Unknown commands: they take none of the room for messages.
    let flood = [command("NOTHING", &[7; 200]).repeat(100), frame(0, 8, &[9; 8])].concat();
    let mut read_bytes = Vec::new();
    serve(ServerPlan { role: Role::Router, ..PLAN }, |server, questions| {
        let stream = flooding.get_or_insert_with(|| {
            let address = server.endpoint().strip_prefix("tcp://").expect("a port");
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.write_all(&[greeting().to_vec(), ready_as("DEALER")].concat()).expect("sent");
            stream
        });
        fill(stream, &flood, &mut sent);
        if !questions.is_empty() {
            rounds += 1;
            read_bytes.push(questions.len() * flood.len());
            most_bytes = most_bytes.max(questions.len() * flood.len());
        }
        rounds < 20
    });
    // The budget is used up by a read that began within it; a question's bytes may have come in the round before.
    let round_bytes_max = RELAY_PEER_QUANTUM_BYTES_MAX + ZMQ_READ_BYTES + flood.len();
    assert!(most_bytes <= round_bytes_max, "{most_bytes} bytes of one peer in a round: {read_bytes:?}");
}

#[test]
fn a_peer_s_messages_in_one_turn_are_bounded_however_short_they_are() {
    let (mut flooding, mut sent, mut heard, mut most) = (None, 0, 0, 0);
    serve(ServerPlan { role: Role::Router, ..PLAN }, |server, questions| {
        let stream = flooding.get_or_insert_with(|| {
            let address = server.endpoint().strip_prefix("tcp://").expect("a port");
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.write_all(&[greeting().to_vec(), ready_as("DEALER")].concat()).expect("sent");
            stream
        });
        fill(stream, &frame(0, 0, b""), &mut sent);
        heard += questions.len();
        most = most.max(questions.len());
        heard < 40 * RELAY_PEER_QUANTUM_MESSAGES_MAX
    });
    assert!(most <= RELAY_PEER_QUANTUM_MESSAGES_MAX, "{most} messages of one peer in one round");
}

/// Bytes of a message, counted until the last holder drops them.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

#[test]
fn subscribers_that_do_not_read_hold_one_stretch_of_the_stream_together_whenever_they_came() {
    const DEAF: usize = 12;
    let held_bytes = Arc::new(AtomicUsize::new(0));
    let mut streams: Vec<TcpStream> = Vec::new();
    let (mut most_bytes, mut calls) = (0, 0);
    let part = message(&[b"", &[0; 8]], &vec![1; 1 << 17]);
    let counts = serve(PLAN, |server, _| {
        // Between two of them the stream brings more than kernel and server keep for one.
        if calls % 6 == 0 {
            let address = server.endpoint().strip_prefix("tcp://").expect("a port");
            let mut stream = TcpStream::connect(address).expect("connected");
            let subscriber = [greeting().to_vec(), ready_as("SUB"), command("SUBSCRIBE", b"")].concat();
            stream.write_all(&subscriber).expect("sent");
            streams.push(stream);
        }
        calls += 1;
        for _ in 0..24 {
            held_bytes.fetch_add(part.len(), Ordering::Relaxed);
            server.publish(&Bytes::from_owner(Counted(part.to_vec(), Arc::clone(&held_bytes))));
            most_bytes = most_bytes.max(held_bytes.load(Ordering::Relaxed));
        }
        streams.len() <= DEAF
    });
    let bytes_max = RELAY_SUBSCRIBER_LAG_FACTOR_MAX as usize * PLAN.waiting_bytes_max + 2 * part.len();
    assert!(most_bytes <= bytes_max, "{most_bytes} bytes are held, of {} subscribers: {counts:?}", streams.len());
    assert!(counts.peers_stalled > 0, "{counts:?}");
}
