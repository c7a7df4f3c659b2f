//! Gateways that write anything into a shm lane: they lose the lane and their connection, and no other client notices.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouted::error::Kind;
use kvrouted::ids::CorrelationId;
use kvrouted::lane::ring;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, FrameKind, LaneRequest, Reply};

use super::raw::{DAEMON_WAITS, REPLY_HEAD, REQUEST_TAIL, REQUESTS, Raw, ask, hello, route};
use super::{WORKERS, serving, space, with_lane};
use crate::kit::{Daemon, prompt, skipped, until};

/// Whether others are served.
fn serves(daemon: &Daemon) {
    let tokens = prompt(5, 64);
    for mut client in [daemon.client(), with_lane(daemon)] {
        let question = RouteRequest::new(space(&client), Prompt::of_tokens(&tokens));
        assert_eq!(client.route(&question).expect("a decision").candidates.len(), 3);
    }
}

/// One lane is closed, for this reason and no other.
#[track_caller]
fn closed_for(daemon: &Daemon, counter: &str, harm: impl FnOnce(&mut Raw)) {
    let before = daemon.counter(counter);
    let mut raw = Raw::open(daemon);
    raw.send(&route(1, &prompt(1, 64)));
    assert!(matches!(raw.reply(), (CorrelationId(1), Reply::Route(_))));
    harm(&mut raw);
    raw.closed();
    until("it is counted", || daemon.counter(counter) == before + 1);
}

#[test]
fn positions_that_cannot_be_close_the_lane_and_its_connection() {
    let daemon = Daemon::start(WORKERS);
    let ring_words = 4096 / 8;
    closed_for(&daemon, "lanes_closed_positions", |raw| raw.poke(REQUEST_TAIL, u64::MAX));
    closed_for(&daemon, "lanes_closed_positions", |raw| raw.poke(REQUEST_TAIL, 0));
    closed_for(&daemon, "lanes_closed_positions", |raw| {
        let tail = raw.word(REQUEST_TAIL).load(Ordering::Relaxed);
        raw.poke(REQUEST_TAIL, tail + ring_words + 1);
    });
    for head in [u64::MAX, 1 << 40] {
        closed_for(&daemon, "lanes_closed_positions", |raw| {
            raw.word(REPLY_HEAD).store(head, Ordering::Relaxed);
            // Several, so that the daemon has to look where there is room.
            for id in 0..9 {
                raw.send(&route(id, &prompt(1, 64)));
            }
        });
    }
    serves(&daemon);
    until("none is left", || daemon.counter("lanes_open") == 0);
}

#[test]
fn what_is_no_frame_closes_the_lane_and_what_is_no_request_is_answered() {
    let daemon = Daemon::start(WORKERS);
    closed_for(&daemon, "lanes_closed_header", |raw| assert_eq!(raw.send(&[0; 16]), 16));
    closed_for(&daemon, "lanes_closed_header", |raw| {
        // The whole ring is said to be written, and is what was never written.
        (0..512).for_each(|at| raw.word(REQUESTS + at).store(u64::MAX, Ordering::Relaxed));
        let tail = raw.word(REQUEST_TAIL).load(Ordering::Relaxed);
        raw.poke(REQUEST_TAIL, tail + 512);
    });
    let mut raw = Raw::open(&daemon);
    let mut bytes = FrameHeader::new(FrameKind::Route, 64, CorrelationId(7)).encode().to_vec();
    bytes.extend([0xff; 64]);
    raw.send(&bytes);
    match raw.reply() {
        (CorrelationId(7), Reply::Error(error)) => assert_eq!(error.kind, Some(Kind::Malformed)),
        other => panic!("{other:?}"),
    }
    // Beyond what is answered: refused, and skipped as it comes.
    let length = 16 << 20;
    raw.send(&FrameHeader::new(FrameKind::Route, length, CorrelationId(8)).encode());
    match raw.reply() {
        (CorrelationId(8), Reply::Error(error)) => assert_eq!(error.kind, Some(Kind::Oversized)),
        other => panic!("{other:?}"),
    }
    raw.is_open();
    drop(raw);
    serves(&daemon);
}

#[test]
fn words_that_change_while_they_are_read_are_read_once() {
    let daemon = Daemon::start(WORKERS);
    let mut raw = Raw::open(&daemon);
    let done = AtomicBool::new(false);
    let good = route(3, &prompt(9, 128));
    let words: Vec<u64> = good.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().expect("words"))).collect();
    let Raw { end, memory, bell, .. } = &mut raw;
    std::thread::scope(|scope| {
        let (memory, words, done) = (memory.words(), &words, &done);
        scope.spawn(move || {
            // The header and the offsets behind it, right and wrong by turns, in every copy that lies in the ring.
            for at in (0..u64::MAX).take_while(|_| !done.load(Ordering::Relaxed)) {
                let lie = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                for (word, right) in memory[REQUESTS..REQUESTS + 8].iter().zip(words) {
                    word.store(if at % 2 == 0 { *right } else { lie }, Ordering::Relaxed);
                }
            }
        });
        let mut out = Vec::new();
        for _ in 0..20_000 {
            if end.send(&good).is_err() || end.receive(usize::MAX, &mut out).is_err() {
                break;
            }
            out.clear();
            ring(bell);
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(raw);
    serves(&daemon);
    until("none is left", || daemon.counter("lanes_open") == 0);
    let log = daemon.process.log();
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn lies_about_sleep_harm_who_tells_them() {
    let daemon = Daemon::start(WORKERS);
    let mut raw = Raw::open(&daemon);
    // Everything is awaited: rung in vain. Nothing is: served once it is rung.
    for lie in [u64::MAX, 0, 3] {
        raw.word(DAEMON_WAITS).store(lie, Ordering::SeqCst);
        raw.word(DAEMON_WAITS - 16).store(lie, Ordering::SeqCst);
        raw.send(&route(lie, &prompt(1, 64)));
        assert_eq!(raw.reply().0, CorrelationId(lie));
    }
    (0..100_000).for_each(|_| ring(&raw.bell));
    serves(&daemon);
    raw.send(&route(9, &prompt(1, 64)));
    assert_eq!(raw.reply().0, CorrelationId(9));
    // Who lets go of the bell has no lane any more, and goes on by the socket.
    let closed = || daemon.counter("lanes_closed_with_connection");
    let (before, mut without) = (closed(), Raw::open(&daemon));
    drop(std::mem::replace(&mut without.bell, UnixStream::pair().expect("a pair").0));
    until("the lane has ended", || closed() == before + 1);
    without.is_open();
    raw.is_open();
}

#[test]
fn a_ring_of_replies_that_is_full_holds_its_requests_back() {
    // No time limit: on a busy machine this side may stand still, too.
    let daemon = serving("unread_ms_max = 0");
    let mut raw = Raw::open(&daemon);
    let request = route(1, &prompt(1, 16));
    // As many as the daemon takes: those in its ring, and what it has read before it noticed.
    let (mut sent, mut idle) = (0, 0);
    while idle < 200 {
        if raw.end.room_bytes().expect("room") >= request.len() {
            assert_eq!(raw.send(&request), request.len());
            (sent, idle) = (sent + 1, 0);
        } else {
            std::thread::sleep(std::time::Duration::from_millis(1));
            idle += 1;
        }
    }
    assert!((10..20_000).contains(&sent), "{sent}");
    serves(&daemon);
    (0..sent).for_each(|_| assert!(matches!(raw.reply(), (CorrelationId(1), Reply::Route(_)))));
    raw.send(&request);
    assert!(matches!(raw.reply(), (CorrelationId(1), Reply::Route(_))), "it goes on where it stood");
}

#[test]
fn who_never_reads_its_ring_of_replies_is_closed_as_on_a_socket() {
    let daemon = serving("unread_ms_max = 300");
    let mut raw = Raw::open(&daemon);
    let request = route(1, &prompt(1, 16));
    while raw.end.room_bytes().is_ok_and(|room| room >= request.len()) {
        raw.send(&request);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    raw.closed();
    until("it is counted", || daemon.counter("lanes_closed_unread") == 1);
}

#[test]
fn what_cannot_be_had_is_refused_by_name() {
    let daemon = Daemon::start(WORKERS);
    let mut socket = hello(&daemon);
    for bytes in [1, 4095, 5000, 2 << 20, u32::MAX] {
        let (reply, descriptors) = ask(&mut socket, LaneRequest { request_ring_bytes: bytes, reply_ring_bytes: 0 });
        let Reply::Error(error) = reply else { panic!("{reply:?}") };
        assert_eq!((error.kind, descriptors.len()), (Some(Kind::InvalidArgument), 0), "{error:?}");
    }
    let mut raw = Raw::open(&daemon);
    let (reply, descriptors) = ask(&mut raw.socket, LaneRequest::default());
    let Reply::Error(error) = reply else { panic!("{reply:?}") };
    assert_eq!((error.kind, descriptors.len()), (Some(Kind::InvalidArgument), 0));
    // Nor does a lane open another, nor say hello again.
    let mut out = Vec::new();
    kvrouted::wire::RequestEncoder::default().open_lane(CorrelationId(4), LaneRequest::default(), &mut out);
    kvrouted::wire::RequestEncoder::default().hello(CorrelationId(5), "again", None, &mut out);
    raw.send(&out);
    for id in [4, 5] {
        match raw.reply() {
            (of, Reply::Error(error)) => {
                assert_eq!((of, error.kind), (CorrelationId(id), Some(Kind::InvalidArgument)), "{error:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(["lanes_refused_sizes", "lanes_refused_second"].map(|name| daemon.counter(name)), [5, 2]);
}

/// Writes to the file on its standard input from a page that never comes, says `stalled` once the write waits for it,
/// and sleeps.
const STALL: &str = r#"
import ctypes, fcntl, mmap, os, platform, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 323, "aarch64": 282}.get(platform.machine())
uffd = libc.syscall(number, os.O_CLOEXEC) if number else -1
if uffd < 0:
    sys.exit("no userfaultfd: " + os.strerror(ctypes.get_errno()))
fcntl.ioctl(uffd, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(uffd, 0xC020AA00, bytearray(struct.pack("QQQQ", address, 4096, 1, 0)))
write = lambda: libc.write(0, ctypes.c_void_p(address), ctypes.c_size_t(64))
threading.Thread(target=write, daemon=True).start()
os.read(uffd, 32)
print("stalled", flush=True)
time.sleep(600)
"#;

/// A process that stands in a `write()` to a file, and so has its inode locked. Dropped, it ends.
struct Stalled(Child);

impl Stalled {
    /// `None`, with a report, where this machine does not allow a stalled write.
    fn begin(file: OwnedFd) -> Option<Self> {
        let python = Command::new("python3").args(["-c", STALL]).stdin(file).stdout(Stdio::piped()).spawn();
        let begun = python.map(Self).map_err(|error| error.to_string()).and_then(|mut child| {
            let said = BufReader::new(child.0.stdout.take().expect("its output")).lines().next();
            match said {
                Some(Ok(line)) if line == "stalled" => Ok(child),
                _ => Err("no userfaultfd for this user".to_owned()),
            }
        });
        begun.map_err(|why: String| skipped("a gateway that stalls a write to its lane's file", &why)).ok()
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A lane as its gateway gets it, and nothing mapped.
fn lane_of(daemon: &Daemon) -> (UnixStream, OwnedFd, OwnedFd) {
    let mut socket = hello(daemon);
    let (reply, descriptors) = ask(&mut socket, LaneRequest { request_ring_bytes: 4096, reply_ring_bytes: 4096 });
    assert!(matches!(reply, Reply::OpenLane(_)), "{reply:?}");
    let [memory, bell] = <[OwnedFd; 2]>::try_from(descriptors).expect("memory and bell");
    (socket, memory, bell)
}

#[test]
fn a_gateway_that_keeps_its_lanes_file_locked_holds_no_thread_of_the_daemon() {
    let mut daemon = Daemon::start(WORKERS);
    let mut stalled = Vec::new();
    for closed in 1..=3 {
        let (socket, memory, bell) = lane_of(&daemon);
        let Some(peer) = Stalled::begin(memory) else { return };
        stalled.push(peer);
        drop((socket, bell));
        until("the lane has ended", || daemon.counter("lanes_closed_with_connection") == closed);
    }
    // Another lane comes and goes meanwhile.
    drop(Raw::open(&daemon));
    until("it has ended", || daemon.counter("lanes_closed_with_connection") == 4);
    until("it has its memory given back", || daemon.counter("lanes_open") == 3);
    assert_eq!(waiting_for_the_kernel(&daemon), [""; 0], "threads that cannot be killed");
    assert_eq!(daemon.process.end("-KILL"), None, "it ends at once");
    drop(stalled);
}

/// The names of the daemon's threads that wait where no signal reaches them, at each of many looks.
fn waiting_for_the_kernel(daemon: &Daemon) -> Vec<String> {
    let threads = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.process.id())).expect("its threads");
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
        stats.filter(|stat| stat.rsplit(") ").next().is_some_and(|state| state.starts_with('D'))).collect::<Vec<_>>()
    };
    let mut stay = threads();
    for _ in 0..50 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        let now = threads();
        stay.retain(|stat| now.contains(stat));
    }
    stay
}

#[test]
fn a_lane_whose_memory_its_gateway_keeps_keeps_its_place() {
    let daemon = serving("lanes_max = 2\nuser_share_percent = 100");
    let kept = [lane_of(&daemon), lane_of(&daemon)];
    let files = kept.map(|(_, memory, _)| memory);
    until("both have ended", || daemon.counter("lanes_ended_held") == 2);
    let mut socket = hello(&daemon);
    let (reply, _) = ask(&mut socket, LaneRequest::default());
    let Reply::Error(error) = reply else { panic!("{reply:?}") };
    assert!(error.kind == Some(Kind::Overloaded) && error.message.contains("still held"), "{error:?}");
    // A second descriptor of the same file keeps it as well.
    let [file, other] = files;
    let again = file.as_fd().try_clone_to_owned().expect("a descriptor");
    drop((file, other));
    until("one is free", || daemon.counter("lanes_open") == 1);
    drop(again);
    until("both are free", || daemon.counter("lanes_open") == 0);
    drop(Raw::open(&daemon));
}
