//! A collector of traces: an HTTP server that takes OTLP as protobuf. It reads bytes by the rules of protobuf alone, and
//! shares nothing with the code that writes them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How a collector answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// It takes each batch.
    Takes,
    /// It answers with this status, and this header.
    Status(u16, &'static str),
    /// It reads and never answers.
    Hangs,
    /// It answers 200, with a body that never ends.
    Endless,
    /// It answers one byte at a time, and never ends its head.
    Drips,
    /// It takes each batch, and says that it rejects spans.
    Rejects,
}

/// A span that was received. Ids are in hexadecimal; an attribute is its text, or its number as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty = none.
    pub(crate) parent: String,
    pub(crate) name: String,
    /// 2 = server, 1 = internal.
    pub(crate) kind: u64,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) attributes: BTreeMap<String, String>,
    /// Names and times.
    pub(crate) events: Vec<(String, u64)>,
    /// 2 = error.
    pub(crate) status: u64,
    /// The attributes of who sent it.
    pub(crate) resource: BTreeMap<String, String>,
}

#[derive(Default)]
struct Received {
    spans: Vec<Span>,
    bytes: Vec<u8>,
    heads: Vec<String>,
    requests: u64,
}

/// A running collector. It ends with the test's process.
#[derive(Clone)]
pub(crate) struct Collector {
    port: u16,
    received: Arc<Mutex<Received>>,
    manner: Arc<Mutex<Manner>>,
}

impl Collector {
    pub(crate) fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let collector = Self { port, received: Arc::default(), manner: Arc::new(Mutex::new(manner)) };
        let accepting = collector.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serving = accepting.clone();
                std::thread::spawn(move || while serving.answer(&stream).is_some() {});
            }
        });
        collector
    }

    /// The URL for `[traces]`, without the path that is the default.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Answers otherwise from now on.
    pub(crate) fn answers(&self, manner: Manner) {
        *self.manner.lock().expect("no panic") = manner;
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.received.lock().expect("no panic").spans.clone()
    }

    /// The spans of a trace, by name.
    pub(crate) fn trace(&self, trace: &str) -> BTreeMap<String, Span> {
        let spans = self.spans().into_iter().filter(|span| span.trace == trace);
        spans.map(|span| (span.name.clone(), span)).collect()
    }

    /// All bodies, one after another.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.received.lock().expect("no panic").bytes.clone()
    }

    /// The head of the last request.
    pub(crate) fn head(&self) -> String {
        self.received.lock().expect("no panic").heads.last().cloned().unwrap_or_default()
    }

    /// Requests that were read whole.
    pub(crate) fn requests(&self) -> u64 {
        self.received.lock().expect("no panic").requests
    }

    /// Answers one request; `None` = the connection ends.
    fn answer(&self, mut stream: &TcpStream) -> Option<()> {
        let (head, body) = read_request(stream)?;
        let manner = *self.manner.lock().expect("no panic");
        {
            let mut received = self.received.lock().expect("no panic");
            received.requests += 1;
            received.heads.push(head);
            if matches!(manner, Manner::Takes | Manner::Rejects | Manner::Endless) {
                received.spans.extend(spans_of(&body));
                received.bytes.extend(body);
            }
        }
        let reply = |status: &str, header: &str, body: &[u8]| {
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{header}\r\n", body.len());
            [head.as_bytes(), body].concat()
        };
        let mut write = |bytes: &[u8]| stream.write_all(bytes).ok();
        match manner {
            Manner::Takes => write(&reply("200 OK", "", &[])),
            Manner::Rejects => write(&reply("200 OK", "", &[0x0a, 6, 0x08, 1, 0x12, 2, b'n', b'o'])),
            Manner::Status(status, header) => write(&reply(&format!("{status} So"), header, b"<html>")),
            Manner::Hangs => {
                std::thread::park();
                None
            }
            Manner::Endless => {
                write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
                while write(&[0x0a; 4096]).is_some() {}
                None
            }
            Manner::Drips => {
                write(b"HTTP/1.1 200 OK\r\nX-Drips: ")?;
                while write(b"x").is_some() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                None
            }
        }
    }
}

fn read_request(mut stream: impl Read) -> Option<(String, Vec<u8>)> {
    let (mut head, mut byte) = (Vec::new(), [0_u8]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).ok()?;
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.expect("the length of the body")];
    stream.read_exact(&mut body).ok()?;
    Some((head, body))
}

/// A field of a message: its number, and its bytes or its number.
enum Field<'a> {
    Bytes(&'a [u8]),
    Number(u64),
}

/// The fields of a message.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Number(u64::from_le_bytes(take(&mut bytes, 8).try_into().expect("8 bytes"))),
            2 => {
                let length = varint(&mut bytes) as usize;
                Field::Bytes(take(&mut bytes, length))
            }
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for at in 0..10 {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return value;
        }
    }
    panic!("a number of more than 64 bits");
}

/// The messages in a field of a message.
fn inner(bytes: &[u8], number: u64) -> Vec<&[u8]> {
    let of_number = |(of, field)| match field {
        Field::Bytes(bytes) if of == number => Some(bytes),
        _ => None,
    };
    fields(bytes).into_iter().filter_map(of_number).collect()
}

fn attributes(listed: &[&[u8]]) -> BTreeMap<String, String> {
    let attribute = |bytes: &&[u8]| {
        let key = String::from_utf8(inner(bytes, 1)[0].to_vec()).expect("text");
        let value = match fields(inner(bytes, 2)[0]).into_iter().next() {
            Some((1, Field::Bytes(text))) => String::from_utf8(text.to_vec()).expect("text"),
            Some((3, Field::Number(number))) => (number as i64).to_string(),
            _ => panic!("{key} has a value of another type"),
        };
        (key, value)
    };
    listed.iter().map(attribute).collect()
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans_of(body: &[u8]) -> Vec<Span> {
    let mut spans = Vec::new();
    for of_resource in inner(body, 1) {
        let resource = attributes(&inner(inner(of_resource, 1)[0], 1));
        for of_scope in inner(of_resource, 2) {
            for bytes in inner(of_scope, 2) {
                spans.push(Span { resource: resource.clone(), ..span_of(bytes) });
            }
        }
    }
    spans
}

fn span_of(bytes: &[u8]) -> Span {
    let hexadecimal = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let mut span = Span { attributes: attributes(&inner(bytes, 9)), ..Span::default() };
    for (number, field) in fields(bytes) {
        match (number, field) {
            (1, Field::Bytes(id)) => span.trace = hexadecimal(id),
            (2, Field::Bytes(id)) => span.id = hexadecimal(id),
            (4, Field::Bytes(id)) => span.parent = hexadecimal(id),
            (5, Field::Bytes(name)) => span.name = text(name),
            (6, Field::Number(kind)) => span.kind = kind,
            (7, Field::Number(ns)) => span.start_ns = ns,
            (8, Field::Number(ns)) => span.end_ns = ns,
            (9, Field::Bytes(_)) => {}
            (11, Field::Bytes(event)) => {
                let at = fields(event).into_iter().find_map(|(number, field)| match field {
                    Field::Number(ns) if number == 1 => Some(ns),
                    _ => None,
                });
                span.events.push((text(inner(event, 2)[0]), at.expect("a time")));
            }
            (15, Field::Bytes(status)) => {
                let code = fields(status).into_iter().find_map(|(number, field)| match field {
                    Field::Number(code) if number == 3 => Some(code),
                    _ => None,
                });
                span.status = code.unwrap_or(0);
            }
            (number, _) => panic!("field {number} of a span"),
        }
    }
    span
}
