//! The bytes of NATS's client protocol: what a server sends, and what a client sends to it. Pure.
//!
//! Who does not ask for headers gets none: the server leaves them out, whatever a publisher puts there. Of those that come,
//! only the number is read that a server puts into its first line. Others are skipped unread, so that none can be wrong.

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::Deserialize;

use crate::limits::NATS_LINE_BYTES_MAX;

const LINE_END: &[u8] = b"\r\n";

/// Something that a server sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// What it tells of itself, first on each connection and when that changes.
    Info(ServerInfo),
    /// A message of a subscription.
    Message(Delivery),
    /// It wants a sign of life.
    Ping,
    /// It gives one.
    Pong,
    /// It refuses something.
    Refused(String),
}

/// What a client needs to know of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct ServerInfo {
    /// The largest message that it takes, bytes.
    pub(crate) max_payload: u64,
    /// Whether it speaks only TLS.
    pub(crate) tls_required: bool,
    /// Whether it also speaks TLS.
    pub(crate) tls_available: bool,
    /// What a client signs to prove that it has a key.
    pub(crate) nonce: Option<String>,
}

/// A message of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// The number of the subscription.
    pub(crate) subscription: u64,
    /// Where it was published.
    pub(crate) subject: String,
    /// Where an answer is wanted.
    pub(crate) reply: Option<String>,
    /// The number in the first line of its headers, by which a server says that there is no message.
    pub(crate) status: Option<u16>,
    /// Its bytes; `None` = they were more than the limit, and have been skipped.
    pub(crate) payload: Option<Bytes>,
}

/// A server sent what NATS does not know, or a line beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) &'static str);

#[derive(Debug, Default)]
enum State {
    #[default]
    Line,
    /// The bytes of a message, of which the first are headers, and the end of their line.
    Payload { of: Delivery, headers: usize, bytes: usize },
    /// As many bytes of a message that is too large are still to come, the end of their line included.
    Skipping { of: Delivery, bytes: u64 },
}

/// What was received, until it is whole. It holds at most a line or a message, and one read.
#[derive(Debug)]
pub(crate) struct Decoder {
    payload_bytes_max: usize,
    received: BytesMut,
    /// Bytes at the front in which no line ends.
    searched: usize,
    state: State,
}

impl Decoder {
    pub(crate) fn new(payload_bytes_max: usize) -> Self {
        Self { payload_bytes_max, received: BytesMut::new(), searched: 0, state: State::Line }
    }

    /// Where bytes that were received are appended.
    pub(crate) const fn received(&mut self) -> &mut BytesMut {
        &mut self.received
    }

    /// Whether everything received has been taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.received.is_empty() && matches!(self.state, State::Line)
    }

    /// The next item; `None` = more bytes must come first.
    ///
    /// # Errors
    /// The server breaks the protocol. The connection is of no further use.
    pub(crate) fn next(&mut self) -> Result<Option<Item>, Violation> {
        loop {
            match std::mem::take(&mut self.state) {
                State::Line => {
                    let Some(line) = self.line()? else { return Ok(None) };
                    if let Some(item) = self.item(&line)? {
                        return Ok(Some(item));
                    }
                }
                State::Payload { of, headers, bytes } => {
                    if self.received.len() < bytes + LINE_END.len() {
                        self.state = State::Payload { of, headers, bytes };
                        return Ok(None);
                    }
                    let status = status(&self.received[..headers]);
                    // A copy, so that a small message does not hold the memory of a read.
                    let payload = Bytes::copy_from_slice(&self.received[headers..bytes]);
                    let end = self.received.split_to(bytes + LINE_END.len());
                    if &end[bytes..] != LINE_END {
                        return Err(Violation("a message is longer than its line says"));
                    }
                    return Ok(Some(Item::Message(Delivery { status, payload: Some(payload), ..of })));
                }
                State::Skipping { of, bytes } => {
                    let here =
                        usize::try_from(bytes).map_or(self.received.len(), |bytes| bytes.min(self.received.len()));
                    drop(self.received.split_to(here));
                    match bytes - here as u64 {
                        0 => return Ok(Some(Item::Message(of))),
                        bytes => {
                            self.state = State::Skipping { of, bytes };
                            return Ok(None);
                        }
                    }
                }
            }
        }
    }

    /// The next line, without its end.
    fn line(&mut self) -> Result<Option<BytesMut>, Violation> {
        let found = self.received[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(found) = found else {
            self.searched = self.received.len();
            let is_long = self.searched > NATS_LINE_BYTES_MAX;
            return if is_long { Err(Violation("a line is too long")) } else { Ok(None) };
        };
        let mut line = self.received.split_to(self.searched + found + 1);
        self.searched = 0;
        if line.len() > NATS_LINE_BYTES_MAX {
            return Err(Violation("a line is too long"));
        }
        line.truncate(line.len() - 1);
        if line.ends_with(b"\r") {
            line.truncate(line.len() - 1);
        }
        Ok(Some(line))
    }

    /// What a line says; `None` = it begins a message, or says nothing.
    fn item(&mut self, line: &[u8]) -> Result<Option<Item>, Violation> {
        // A subject may have any bytes. Ours are text, which stays as it is.
        let line = &*String::from_utf8_lossy(line);
        let (verb, rest) = line.split_once([' ', '\t']).unwrap_or((line, ""));
        Ok(match verb {
            "MSG" | "HMSG" => {
                self.state = self.message(rest, verb == "HMSG")?;
                None
            }
            "+OK" => None,
            "PING" => Some(Item::Ping),
            "PONG" => Some(Item::Pong),
            "-ERR" => Some(Item::Refused(rest.trim().trim_matches('\'').to_owned())),
            "INFO" => {
                let info = serde_json::from_str(rest).map_err(|_| Violation("what it tells of itself is no JSON"))?;
                Some(Item::Info(info))
            }
            _ => return Err(Violation("a line has no verb of NATS")),
        })
    }

    fn message(&self, arguments: &str, has_headers: bool) -> Result<State, Violation> {
        let wrong = Violation("the line of a message is malformed");
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong);
        // Servers separate words only by these. Other white space may be part of a subject.
        let mut words: Vec<&str> = arguments.split([' ', '\t']).filter(|word| !word.is_empty()).take(6).collect();
        let bytes = number(words.pop().ok_or(wrong)?)?;
        let headers = if has_headers { number(words.pop().ok_or(wrong)?)? } else { 0 };
        let (subject, subscription, reply) = match words[..] {
            [subject, subscription] => (subject, subscription, None),
            [subject, subscription, reply] => (subject, subscription, Some(reply.to_owned())),
            _ => return Err(wrong),
        };
        let subscription = number(subscription)?;
        if headers > bytes {
            return Err(wrong);
        }
        let of = Delivery { subscription, subject: subject.to_owned(), reply, status: None, payload: None };
        match (usize::try_from(headers), usize::try_from(bytes)) {
            (Ok(headers), Ok(bytes)) if bytes <= self.payload_bytes_max => Ok(State::Payload { of, headers, bytes }),
            _ => Ok(State::Skipping { of, bytes: bytes.checked_add(LINE_END.len() as u64).ok_or(wrong)? }),
        }
    }
}

/// The number in the first line of headers, such as 404; `None` = there is none, as in a message.
fn status(headers: &[u8]) -> Option<u16> {
    let digits = headers.strip_prefix(b"NATS/1.0 ")?.get(..3)?;
    std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?.parse().ok()
}

// ---- what a client sends ----

pub(crate) const PING: Bytes = Bytes::from_static(b"PING\r\n");
pub(crate) const PONG: Bytes = Bytes::from_static(b"PONG\r\n");

/// The first line of a client. It does not ask for what it publishes itself.
pub(crate) fn connect(name: &str, login: serde_json::Map<String, serde_json::Value>, headers: bool) -> Bytes {
    let mut options = login;
    for (option, value) in [
        ("name", name.into()),
        ("lang", "rust".into()),
        ("version", env!("CARGO_PKG_VERSION").into()),
        ("protocol", 1.into()),
        ("verbose", false.into()),
        ("pedantic", false.into()),
        ("headers", headers.into()),
        ("echo", false.into()),
    ] {
        options.insert(option.to_owned(), value);
    }
    Bytes::from(format!("CONNECT {}\r\n", serde_json::Value::Object(options)))
}

pub(crate) fn subscribe(subject: &str, number: u64) -> Bytes {
    Bytes::from(format!("SUB {subject} {number}\r\n"))
}

pub(crate) fn publish(subject: &str, reply: Option<&str>, payload: &[u8]) -> Bytes {
    let line = match reply {
        Some(reply) => format!("PUB {subject} {reply} {}\r\n", payload.len()),
        None => format!("PUB {subject} {}\r\n", payload.len()),
    };
    joined(&line, payload)
}

/// As [`publish`], with a name of the message: a stream takes no two messages of the same name within its window.
pub(crate) fn publish_named(subject: &str, reply: &str, name: &str, payload: &[u8]) -> Bytes {
    let headers = format!("NATS/1.0\r\nNats-Msg-Id: {name}\r\n\r\n");
    let line = format!("HPUB {subject} {reply} {} {}\r\n{headers}", headers.len(), headers.len() + payload.len());
    joined(&line, payload)
}

fn joined(head: &str, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(head.len() + payload.len() + LINE_END.len());
    bytes.put_slice(head.as_bytes());
    bytes.put_slice(payload);
    bytes.put_slice(LINE_END);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAYLOAD_BYTES_MAX: usize = 100;

    fn items(pieces: &[&[u8]]) -> Result<Vec<Item>, Violation> {
        let (mut decoder, mut items) = (Decoder::new(PAYLOAD_BYTES_MAX), Vec::new());
        for piece in pieces {
            decoder.received().extend_from_slice(piece);
            while let Some(item) = decoder.next()? {
                items.push(item);
            }
        }
        assert!(decoder.received.len() <= NATS_LINE_BYTES_MAX);
        Ok(items)
    }

    fn delivery(subject: &str, reply: Option<&str>, payload: Option<&'static [u8]>) -> Item {
        let (subject, reply) = (subject.to_owned(), reply.map(str::to_owned));
        Item::Message(Delivery {
            subscription: 7,
            subject,
            reply,
            status: None,
            payload: payload.map(Bytes::from_static),
        })
    }

    fn with_status(item: Item, status: u16) -> Item {
        let Item::Message(delivery) = item else { panic!("no message") };
        Item::Message(Delivery { status: Some(status), ..delivery })
    }

    const SAID: &[u8] =
        b"INFO {\"max_payload\":1048576,\"nonce\":\"n\",\"new\":[1]} \r\n+OK\r\nPING\r\nMSG a.b 7 5\r\nx\r\nyz\r\n\
        MSG a 7 c.d 0\r\n\r\nHMSG a.b 7 12 14\r\nNATS/1.0\r\n\r\nhi\r\nHMSG a 7 c.d 27 27\r\nNATS/1.0 404 No Message\r\n\r\n\r\n-ERR 'Authorization Violation'\r\nPONG\r\n-ERR\r\n";

    fn said() -> Vec<Item> {
        let info = ServerInfo { max_payload: 1 << 20, nonce: Some("n".into()), ..ServerInfo::default() };
        vec![
            Item::Info(info),
            Item::Ping,
            delivery("a.b", None, Some(b"x\r\nyz")),
            delivery("a", Some("c.d"), Some(b"")),
            delivery("a.b", None, Some(b"hi")),
            with_status(delivery("a", Some("c.d"), Some(b"")), 404),
            Item::Refused("Authorization Violation".into()),
            Item::Pong,
            Item::Refused(String::new()),
        ]
    }

    #[test]
    fn what_a_server_says_is_read_however_it_is_cut() {
        assert_eq!(items(&[SAID]), Ok(said()));
        let bytes: Vec<&[u8]> = SAID.chunks(1).collect();
        assert_eq!(items(&bytes), Ok(said()));
    }

    #[test]
    fn a_message_that_is_too_large_is_skipped_and_the_next_one_is_read() {
        let large = [b"MSG a 7 500\r\n".to_vec(), vec![b'\n'; 500], b"\r\nMSG b 7 1\r\n1\r\n".to_vec()].concat();
        let expected = vec![delivery("a", None, None), delivery("b", None, Some(b"1"))];
        assert_eq!(items(&[&large]), Ok(expected.clone()));
        assert_eq!(items(&large.chunks(3).collect::<Vec<_>>()), Ok(expected));
    }

    #[test]
    fn subjects_of_any_bytes_are_read() {
        let said = b"MSG a.\xff 7 1\r\n1\r\nMSG a.\x0cb 7 c\x0b\x0c\xfe\t 1\r\n2\r\nMSG  a\xc2\xa0b  7 1\r\n3\r\n";
        let expected = vec![
            delivery("a.\u{fffd}", None, Some(b"1")),
            delivery("a.\u{c}b", Some("c\u{b}\u{c}\u{fffd}"), Some(b"2")),
            delivery("a\u{a0}b", None, Some(b"3")),
        ];
        assert_eq!(items(&[said]), Ok(expected));
    }

    #[test]
    fn what_no_server_says_ends_the_connection() {
        let endless = vec![b'x'; NATS_LINE_BYTES_MAX + 1];
        for wrong in [
            &b"HMSG a 7 13 12\r\n"[..],
            b"HMSG a 7 12\r\n",
            b"HMSG a 7 b c 1 1\r\n",
            b"HMSG a 7 x 12\r\n",
            b"HMSG a 7 18446744073709551616 12\r\n",
            b"MSG a 7\r\n",
            b"MSG a 7 b 1 1\r\n",
            b"MSG a x 1\r\n",
            b"MSG a 7 -1\r\n",
            b"MSG a 7 18446744073709551615\r\n",
            b"MSG a 7 18446744073709551616\r\n",
            b"MSG a 7 1\r\nlonger\r\n",
            b"INFO {\r\n",
            b"HTTP/1.1 400\r\n",
            b"\r\n",
            &endless,
        ] {
            assert!(items(&[wrong]).is_err(), "{:?}", String::from_utf8_lossy(wrong));
        }
    }

    #[test]
    fn a_client_says_what_a_server_reads() {
        assert_eq!(publish("a.b", None, b"12"), &b"PUB a.b 2\r\n12\r\n"[..]);
        assert_eq!(publish("a.b", Some("c"), b""), &b"PUB a.b c 0\r\n\r\n"[..]);
        assert_eq!(subscribe("a.*", 2), &b"SUB a.* 2\r\n"[..]);
        let named = &b"HPUB a b 29 31\r\nNATS/1.0\r\nNats-Msg-Id: n1\r\n\r\nhi\r\n"[..];
        assert_eq!(publish_named("a", "b", "n1", b"hi"), named);
        let line = connect("router \"1\"", serde_json::Map::new(), false);
        let json = line.strip_prefix(b"CONNECT ").and_then(|rest| rest.strip_suffix(b"\r\n")).expect("a line");
        let options: serde_json::Value = serde_json::from_slice(json).expect("JSON");
        assert_eq!(
            (&options["name"], &options["echo"], &options["headers"]),
            (&"router \"1\"".into(), &false.into(), &false.into())
        );
    }

    #[test]
    fn headers_that_no_program_can_read_cost_nothing() {
        for headers in [&b"NATS/1.0 9"[..], b"NATS/1.0 +04 x\r\n\r\n", b"\xff\xff\r\n\r\n", b"HTTP/1.1 404 a\r\n", b""]
        {
            let line = format!("HMSG a 7 {} {}\r\n", headers.len(), headers.len() + 2);
            let message = [line.as_bytes(), headers, b"hi\r\nPING\r\n"].concat();
            assert_eq!(items(&[&message]), Ok(vec![delivery("a", None, Some(b"hi")), Item::Ping]), "{headers:?}");
        }
        let large = [b"HMSG a 7 90 500\r\n".to_vec(), vec![b'\n'; 500], b"\r\nMSG b 7 1\r\n1\r\n".to_vec()].concat();
        assert_eq!(items(&[&large]), Ok(vec![delivery("a", None, None), delivery("b", None, Some(b"1"))]));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20)) {
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let _ = items(&pieces);
        }

        #[test]
        fn what_is_cut_anywhere_is_read_alike(at in prop::collection::vec(0..SAID.len(), 0..6)) {
            let mut cuts = [vec![0, SAID.len()], at].concat();
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &SAID[cut[0]..cut[1]]).collect();
            prop_assert_eq!(items(&pieces), Ok(said()));
        }
    }
}
