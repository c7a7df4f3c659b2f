//! ZeroMQ peers, byte by byte, that never end a message.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::WAIT_MAX;

/// Bytes that one hostile peer has to say.
const SAID_BYTES_MAX: usize = 1 << 30;

/// What a ZMTP 3.1 peer says first.
pub(crate) fn greeting() -> Vec<u8> {
    [&[0xff][..], &[0; 8], &[0x7f, 3, 1], b"NULL", &[0; 48]].concat()
}

/// The command that ends the handshake of a socket of this type.
pub(crate) fn ready(socket: &str) -> Vec<u8> {
    let body = [b"\x05READY\x0bSocket-Type\0\0\0".as_slice(), &[socket.len() as u8], socket.as_bytes()].concat();
    [&[4, body.len() as u8][..], &body].concat()
}

/// Endless parts, empty parts without number, a part and a command of 2^62 bytes.
pub(crate) fn endless() -> [(&'static str, Vec<u8>, Vec<u8>); 4] {
    let part = [&[3, 0, 0, 0, 0, 0, 0, 0xea, 0x60][..], &[7; 60_000]].concat();
    let long = |flags: u8| [&[flags, 0x40][..], &[0; 7]].concat();
    [
        ("parts", Vec::new(), part),
        ("empty parts", Vec::new(), [1, 0].repeat(30_000)),
        ("a part", long(2), vec![7; 60_000]),
        ("a command", long(6), vec![7; 60_000]),
    ]
}

/// Says a greeting, and then something without end, until it is cut or has said all.
pub(crate) fn say(mut stream: TcpStream, socket: &str, (first, then): (&[u8], &[u8]), said: &AtomicUsize) {
    let mut heard = [0; 4096];
    let shake = stream.write_all(&[greeting(), ready(socket)].concat()).and_then(|()| stream.read(&mut heard));
    let mut ends = shake.and_then(|_| stream.write_all(first)).is_err();
    while !ends && said.load(Ordering::Relaxed) < SAID_BYTES_MAX {
        ends = stream.write_all(then).is_err();
        said.fetch_add(then.len(), Ordering::Relaxed);
    }
}

/// A port whose peers hear something endless.
pub(crate) struct Hostile {
    pub(crate) port: u16,
    pub(crate) connections: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
}

impl Hostile {
    pub(crate) fn start(socket: &'static str, first: Vec<u8>, then: Vec<u8>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback interface");
        let port = listener.local_addr().expect("the loopback interface").port();
        let (connections, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, told) = (Arc::clone(&connections), Arc::clone(&ends));
        std::thread::spawn(move || {
            let said = AtomicUsize::new(0);
            for stream in listener.incoming().flatten() {
                if told.load(Ordering::Relaxed) {
                    return;
                }
                stream.set_write_timeout(Some(WAIT_MAX)).expect("the loopback interface");
                counted.fetch_add(1, Ordering::Relaxed);
                say(stream, socket, (&first, &then), &said);
            }
        });
        Self { port, connections, ends }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
    }
}
