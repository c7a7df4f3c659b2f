//! Connections to servers that a test plays.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use mio::{Events, Poll, Token};

use super::link::LinkPlan;
use super::login::Login;
use super::{Link, LinkEvent, Next};
use crate::endpoint::NatsServer;
use crate::limits::{NATS_HEARTBEAT_MS, NATS_HEARTBEAT_TIMEOUT_MS, NATS_OPEN_MS_MAX, NATS_RECONNECT_MS_MAX};

const INFO: &str = "INFO {\"max_payload\":100}\r\n";
/// More turns than any connection on one machine takes.
const TURNS_MAX: u32 = 10_000;

/// A connection with its event loop, in virtual time.
struct Client {
    link: Link,
    poll: Poll,
    events: Events,
    now_ms: u64,
}

impl Client {
    fn of(listeners: &[&TcpListener]) -> Self {
        let poll = Poll::new().expect("an event loop");
        let registry = Arc::new(poll.registry().try_clone().expect("a copy"));
        let address = |of: &&TcpListener| format!("nats://{}", of.local_addr().expect("bound"));
        let servers = listeners.iter().map(address).map(|text| NatsServer::parse(&text).expect("a server")).collect();
        let plan = LinkPlan {
            servers,
            login: Arc::new(Login::Token("hush".into())),
            tls: None,
            name: "test".into(),
            headers: false,
            subjects: vec!["a.*".into()],
            payload_bytes_max: 10,
            waiting_bytes_max: 1 << 20,
        };
        Self { link: Link::open(plan, (registry, Token(0)), 0), poll, events: Events::with_capacity(8), now_ms: 0 }
    }

    /// What comes next: an event, or a message.
    fn turn(&mut self) -> Option<Result<LinkEvent, Next>> {
        self.poll.poll(&mut self.events, Some(Duration::from_millis(1))).expect("it waits");
        self.link.tick(self.now_ms);
        if let Some(event) = self.link.event() {
            return Some(Ok(event));
        }
        match self.link.next(self.now_ms) {
            Next::Drained | Next::Later => self.link.event().map(Ok),
            message => Some(Err(message)),
        }
    }

    #[track_caller]
    fn until<T>(&mut self, mut is_it: impl FnMut(Result<LinkEvent, Next>) -> Option<T>) -> T {
        (0..TURNS_MAX).find_map(|_| self.turn().and_then(&mut is_it)).expect("it comes")
    }

    #[track_caller]
    fn until_event(&mut self, wanted: &LinkEvent) {
        self.until(|come| (come.as_ref() == Ok(wanted)).then_some(()));
    }

    /// Goes on until the server of the test says that it has come so far. No time passes meanwhile.
    #[track_caller]
    fn until_told(&mut self, told: &Receiver<()>) {
        for _ in 0..TURNS_MAX {
            assert!(self.turn().is_none(), "nothing is due");
            match told.try_recv() {
                Ok(()) => return,
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => panic!("the server has ended"),
            }
        }
        panic!("the server does not come so far");
    }

    #[track_caller]
    fn refusal(&mut self) -> String {
        self.until(|come| if let Ok(LinkEvent::Refused(why)) = come { Some(why) } else { None })
    }
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a port")
}

/// A server's side of one connection, whose client was let in.
struct Accepted {
    lines: BufReader<TcpStream>,
    stream: TcpStream,
}

impl Accepted {
    fn of(listener: &TcpListener) -> Self {
        let mut accepted = Self::greeted(listener);
        assert!(accepted.line().starts_with("CONNECT {") && accepted.line() == "PING");
        accepted.say("PONG\r\n");
        accepted
    }

    fn greeted(listener: &TcpListener) -> Self {
        let (stream, _) = listener.accept().expect("a connection");
        let mut accepted = Self { lines: BufReader::new(stream.try_clone().expect("a copy")), stream };
        accepted.say(INFO);
        accepted
    }

    fn say(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).expect("sent");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }
}

#[test]
fn a_client_logs_in_subscribes_hears_and_publishes_and_skips_what_is_too_large() {
    let listener = listener();
    let mut client = Client::of(&[&listener]);
    let server = std::thread::spawn(move || {
        let mut accepted = Accepted::greeted(&listener);
        assert!(accepted.line().contains("\"auth_token\":\"hush\""));
        assert_eq!(accepted.line(), "PING");
        accepted.say("PONG\r\n");
        assert_eq!(accepted.line(), "SUB a.* 1");
        accepted.say("MSG a.b 1 12\r\n0123456789ab\r\nMSG a.c 1 2\r\nok\r\n");
        assert_eq!((accepted.line(), accepted.line()), ("PUB x y 2".into(), "hi".into()));
    });
    client.until_event(&LinkEvent::Up);
    let payloads = [(); 2].map(|()| {
        client.until(|come| if let Err(Next::Message(message)) = come { Some(message.payload) } else { None })
    });
    assert_eq!((payloads[0].as_deref(), payloads[1].as_deref()), (None, Some(&b"ok"[..])));
    assert!(!client.link.publish("x", None, &[0; 101]), "more than the server takes");
    assert!(client.link.publish("x", Some("y"), b"hi"));
    server.join().expect("the client does what is expected");
    client.until_event(&LinkEvent::Lost);
    assert!(!client.link.publish("x", None, b"hi"));
}

#[test]
fn a_server_that_is_none_refuses_or_does_not_speak_gives_way_to_the_next_one() {
    let [none, refuses, silent, good] = [(); 4].map(|()| listener());
    let mut client = Client::of(&[&none, &refuses, &silent, &good]);
    let (tell, told) = channel();
    let servers = std::thread::spawn(move || {
        let (mut stream, _) = none.accept().expect("a connection");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").expect("sent");
        let mut accepted = Accepted::greeted(&refuses);
        accepted.line();
        accepted.say("-ERR 'Authorization Violation'\r\n");
        let held = silent.accept().expect("a connection");
        tell.send(()).expect("the test waits");
        let mut accepted = Accepted::of(&good);
        accepted.line();
        drop(held);
        accepted
    });
    assert_eq!(client.refusal(), "a line has no verb of NATS");
    client.now_ms += NATS_RECONNECT_MS_MAX;
    client.until_event(&LinkEvent::Said("Authorization Violation".into()));
    assert_eq!(client.refusal(), "it refuses the login");
    client.now_ms += NATS_RECONNECT_MS_MAX;
    client.until_told(&told);
    client.now_ms += NATS_OPEN_MS_MAX;
    assert_eq!(client.turn(), None, "it was never up");
    client.now_ms += NATS_RECONNECT_MS_MAX;
    client.until_event(&LinkEvent::Up);
    servers.join().expect("all are tried");
}

#[test]
fn a_server_that_falls_silent_is_asked_for_a_sign_of_life_and_left() {
    let listener = listener();
    let mut client = Client::of(&[&listener]);
    let (tell, told) = channel();
    let server = std::thread::spawn(move || {
        let mut accepted = Accepted::of(&listener);
        assert_eq!((accepted.line(), accepted.line()), ("SUB a.* 1".into(), "PING".into()));
        accepted.say("PONG\r\nPING\r\n");
        for expected in ["PONG", "PING"] {
            assert_eq!(accepted.line(), expected);
            tell.send(()).expect("the test waits");
        }
        (accepted, Accepted::of(&listener))
    });
    client.until_event(&LinkEvent::Up);
    client.now_ms += NATS_HEARTBEAT_MS;
    client.until_told(&told);
    client.now_ms += NATS_HEARTBEAT_MS;
    client.until_told(&told);
    client.now_ms += NATS_HEARTBEAT_TIMEOUT_MS;
    client.until_event(&LinkEvent::Lost);
    client.now_ms += NATS_RECONNECT_MS_MAX;
    client.until_event(&LinkEvent::Up);
    server.join().expect("it is tried again");
}
