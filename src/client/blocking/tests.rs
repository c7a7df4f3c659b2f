//! The blocking client against a scripted daemon.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use super::*;
use crate::client::daemon_script::{self, error, free_reply, unknown_kind};
use crate::protocol::BookingHandle;
use crate::wire::{FrameHeader, FrameKind, PROTOCOL_VERSION, features};

const BOOKING: BookingRef<'static> = BookingRef::Handle(BookingHandle { slot: 1, generation: 1 });

/// A client of a daemon that waits for this many requests, sends `replies` to their ids, and closes the connection.
fn client(
    requests: usize,
    replies: impl FnOnce(&[CorrelationId]) -> Vec<u8> + Send + 'static,
) -> (Client, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("bound");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let read = |requests: usize| {
            let (mut ids, mut bytes) = (Vec::new(), [0; 4096]);
            while ids.len() < requests {
                let mut received = (&stream).read(&mut bytes).map(|read| bytes[..read].to_vec()).expect("requests");
                ids.extend(daemon_script::said(&mut received).into_iter().map(|(id, _)| id));
            }
            ids
        };
        read(1);
        (&stream).write_all(&daemon_script::hello(PROTOCOL_VERSION, 1, features::SERVED)).expect("hello");
        let ids = read(requests);
        stream.write_all(&replies(&ids)).expect("replies");
    });
    let timeout = Some(Duration::from_secs(60));
    (Client::connect(&path, &ClientOptions { timeout, ..ClientOptions::default() }).expect("a connection"), folder)
}

#[test]
fn a_call_fails_with_the_reason_that_the_daemon_gives_before_it_closes_the_connection() {
    let (mut client, _folder) = client(1, |ids| {
        let stray = free_reply(CorrelationId(ids[0].0 + 1));
        [stray, error(CorrelationId(0), Kind::Draining), free_reply(ids[0])].concat()
    });
    assert_eq!(client.free(&BOOKING).expect_err("closed").kind(), Kind::Draining);
    assert!(matches!(client.recv(), Ok((_, Reply::Free(BookingOutcome::Applied)))), "what came after it is not lost");
    let ended = client.recv().expect_err("the end");
    assert!(ended.kind() == Kind::Connection && ended.message().contains("closed"), "{ended}");
}

#[test]
fn a_reply_that_cannot_be_read_fails_its_own_request_only() {
    let (mut client, _folder) = client(2, |ids| [unknown_kind(ids[0]), free_reply(ids[1])].concat());
    client.send_free(&BOOKING).expect("queued");
    assert_eq!(client.free(&BOOKING).expect("its own reply"), BookingOutcome::Applied);
    assert_eq!(client.recv().expect_err("a newer daemon's reply").kind(), Kind::Unsupported);
}

#[test]
fn requests_without_a_reply_end_with_the_connection() {
    let (mut client, _folder) = client(1, |ids| free_reply(ids[0])[..20].to_vec());
    assert_eq!(client.free(&BOOKING).expect_err("half a frame").kind(), Kind::Connection);
}

/// A client with a short timeout, of a daemon that sends the first bytes once it has a request, and then the others again and
/// again.
fn hurried(first: Vec<u8>, others: Vec<u8>) -> (Client, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("bound");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = stream.read(&mut [0; 4096]).expect("hello");
        stream.write_all(&daemon_script::hello(PROTOCOL_VERSION, 1, features::SERVED)).expect("said");
        let _ = stream.read(&mut [0; 4096]).expect("a request");
        stream.write_all(&first).expect("said");
        // Until the client has gone.
        while stream.write_all(&others).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let timeout = Some(Duration::from_millis(300));
    (Client::connect(&path, &ClientOptions { timeout, ..ClientOptions::default() }).expect("a connection"), folder)
}

#[test]
fn a_call_ends_by_its_timeout_whatever_the_daemon_sends() {
    // A frame that comes byte by byte, and replies to no request.
    let header = FrameHeader::new(FrameKind::FreeReply, 1 << 20, CorrelationId(2)).encode().to_vec();
    for (first, others) in [(header, vec![0]), (Vec::new(), free_reply(CorrelationId(1 << 40)))] {
        let (mut client, _folder) = hurried(first, others);
        let ended = client.free(&BOOKING).expect_err("no reply");
        assert!(ended.kind() == Kind::Connection && ended.message().contains("300 ms"), "{ended}");
    }
}
