//! The rings alone: bytes leave as they entered, and invalid positions are found.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvError, TryRecvError};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::limits::{LANE_PUBLISHED_BYTES, LANE_RING_BYTES_CEILING};

const WORDS: usize = 64;

struct Shared {
    tail: AtomicU64,
    head: AtomicU64,
    words: Vec<AtomicU64>,
}

impl Shared {
    fn new() -> Self {
        let words = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { tail: AtomicU64::new(0), head: AtomicU64::new(0), words }
    }

    fn ring(&self) -> Ring<'_, AtomicU64> {
        Ring { tail: &self.tail, head: &self.head, words: &self.words }
    }
}

fn ends() -> (LaneEnd, LaneEnd) {
    let sizes = LaneSizes::requested(4096, 4096, LANE_RING_BYTES_CEILING).expect("a lane");
    let mut made = LaneMemory::make(sizes).expect("a lane");
    let mapped = LaneMemory::map(&made.share().expect("a lane"), sizes).expect("a lane");
    (LaneEnd::new(mapped, LaneSide::Gateway), LaneEnd::new(made, LaneSide::Daemon))
}

proptest! {
    #[test]
    fn bytes_come_out_as_they_went_in_however_they_wrap(
        frames in proptest::collection::vec((1_usize..200, any::<u64>()), 1..60), reads in proptest::collection::vec(1_usize..100, 1..20),
    ) {
        let shared = Shared::new();
        let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
        let sent: Vec<u8> = frames.iter().flat_map(|(words, fill)| {
            (0..*words as u64).flat_map(move |at| fill.wrapping_add(at).to_ne_bytes())
        }).collect();
        let (mut rest, mut received) = (sent.as_slice(), Vec::new());
        let mut reads = reads.iter().cycle();
        while received.len() < sent.len() {
            let taken = producer.push(&shared.ring(), rest).unwrap();
            rest = &rest[taken..];
            producer.own_ahead(&shared.ring());
            prop_assert!(producer.room(&shared.ring()).unwrap() <= WORDS);
            let ready = consumer.ready(&shared.ring()).unwrap();
            let count = consumer.pop(&shared.ring(), *reads.next().unwrap(), &mut received).unwrap();
            prop_assert!(count > 0 && count <= ready * 8);
        }
        prop_assert_eq!(received, sent);
        prop_assert_eq!(producer.room(&shared.ring()).unwrap(), WORDS);
    }

    #[test]
    fn no_word_of_a_peer_makes_a_reader_or_writer_go_beyond_the_ring(
        lies in proptest::collection::vec((0_u8..4, any::<u64>(), 0_u64..200), 1..60),
    ) {
        let shared = Shared::new();
        let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
        let mut out = Vec::new();
        for (what, anything, near) in lies {
            match what {
                0 => shared.tail.store(anything, Ordering::Relaxed),
                1 => shared.tail.store(near, Ordering::Relaxed),
                2 => shared.head.store(anything, Ordering::Relaxed),
                _ => shared.head.store(near, Ordering::Relaxed),
            }
            out.clear();
            if let Ok(bytes) = consumer.pop(&shared.ring(), usize::MAX, &mut out) {
                prop_assert!(bytes <= WORDS * 8 && bytes == out.len());
            }
            if let Ok(room) = producer.room(&shared.ring()) {
                prop_assert!(room <= WORDS);
            }
        }
    }
}

#[test]
fn positions_that_cannot_be_are_named() {
    let shared = Shared::new();
    let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
    assert_eq!(producer.push(&shared.ring(), &[7; 80]), Ok(80));
    assert_eq!(consumer.pop(&shared.ring(), 5, &mut Vec::new()), Ok(40));
    let tail = |at| shared.tail.store(at, Ordering::Relaxed);
    let head = |at| shared.head.store(at, Ordering::Relaxed);
    tail(9);
    assert_eq!(consumer.ready(&shared.ring()), Err(LaneFault::TailBackwards));
    tail(5 + WORDS as u64 + 1);
    assert_eq!(consumer.ready(&shared.ring()), Err(LaneFault::TailBeyond));
    tail(u64::MAX);
    assert_eq!(consumer.ready(&shared.ring()), Err(LaneFault::TailBeyond));
    tail(5 + WORDS as u64);
    assert_eq!(consumer.ready(&shared.ring()), Ok(WORDS), "a full ring is no lie");
    assert_eq!(producer.room(&shared.ring()), Ok(WORDS - 5));
    head(4);
    assert_eq!(producer.room(&shared.ring()), Err(LaneFault::HeadBackwards));
    head(11);
    assert_eq!(producer.room(&shared.ring()), Err(LaneFault::HeadBeyond));
    head(10);
    assert_eq!(producer.room(&shared.ring()), Ok(WORDS));
}

#[test]
fn a_writer_that_owns_lines_ahead_stores_to_free_words_only_and_each_line_once() {
    let shared = Shared::new();
    let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
    let marked = || shared.words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    let stored = || (0..WORDS).filter(|at| shared.words[*at].load(Ordering::Relaxed) == 0).collect::<Vec<_>>();
    let polls = |producer: &mut Producer, polls| (0..polls).filter(|_| producer.own_ahead(&shared.ring())).count();
    marked();
    assert_eq!(polls(&mut producer, 100), 1);
    assert_eq!(stored(), [0, 8, 16, 24], "half the ring");
    assert_eq!(producer.push(&shared.ring(), &[7; 60 * 8]), Ok(60 * 8));
    marked();
    assert_eq!(polls(&mut producer, 100), 0);
    assert_eq!(stored(), [] as [usize; 0], "the free words are on the line of the last ones");
    assert_eq!(consumer.pop(&shared.ring(), 30, &mut Vec::new()), Ok(30 * 8));
    assert_eq!(polls(&mut producer, 100), 1);
    assert_eq!(stored(), [0, 8, 16, 24], "up to the first unread word");
    shared.head.store(61, Ordering::Relaxed);
    marked();
    assert_eq!(polls(&mut producer, 100), 0);
    assert_eq!(stored(), [] as [usize; 0], "an impossible head frees nothing");
    assert_eq!(producer.push(&shared.ring(), &[7; 40 * 8]), Err(LaneFault::HeadBeyond));
}

#[test]
fn copied_words_do_not_change_with_the_ring() {
    let shared = Shared::new();
    let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
    producer.push(&shared.ring(), &[1; 16]).unwrap();
    let mut out = Vec::new();
    consumer.pop(&shared.ring(), usize::MAX, &mut out).unwrap();
    shared.words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    assert_eq!(out, [1; 16]);
}

/// A word whose every store lets another thread run, and whose every load may be followed by a false value.
#[derive(Default)]
struct Stepped {
    value: AtomicU64,
    steps: Option<std::sync::Barrier>,
    after_load: Option<u64>,
}

impl Stepped {
    fn step(&self) {
        if let Some(steps) = &self.steps {
            steps.wait();
        }
    }
}

impl Word for Stepped {
    fn load(&self, order: Ordering) -> u64 {
        let value = Word::load(&self.value, order);
        self.after_load.into_iter().for_each(|lie| self.value.store(lie, Ordering::Relaxed));
        value
    }

    fn store(&self, value: u64, order: Ordering) {
        Word::store(&self.value, value, order);
        self.step();
        self.step();
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        Word::swap(&self.value, value, order)
    }

    fn set(&self, bits: u64, order: Ordering) {
        Word::set(&self.value, bits, order);
    }

    fn clear(&self, bits: u64, order: Ordering) {
        Word::clear(&self.value, bits, order);
    }

    fn fence() {
        AtomicU64::fence();
    }
}

#[test]
fn the_beginning_of_a_long_frame_is_read_while_the_rest_is_being_written() {
    const WORDS_AT_ONCE: usize = LANE_PUBLISHED_BYTES / 8;
    let tail = Stepped { steps: Some(std::sync::Barrier::new(2)), ..Stepped::default() };
    let (head, words) = (Stepped::default(), (0..4 * WORDS_AT_ONCE).map(|_| Stepped::default()).collect::<Vec<_>>());
    let ring = Ring { tail: &tail, head: &head, words: &words };
    let frame: Vec<u8> = (0..2 * LANE_PUBLISHED_BYTES + 40).map(|at| (at % 251) as u8).collect();
    let (mut received, mut parts) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(Producer::default().push(&ring, &frame), Ok(frame.len())));
        let mut consumer = Consumer::default();
        while received.len() < frame.len() {
            // The writer is in the middle of its one call until the second wait.
            tail.step();
            parts.push(consumer.pop(&ring, usize::MAX, &mut received).expect("an honest writer"));
            tail.step();
        }
    });
    assert_eq!(parts, [LANE_PUBLISHED_BYTES, LANE_PUBLISHED_BYTES, 40]);
    assert!(received == frame);
}

#[test]
fn words_copied_before_a_fault_are_returned_first() {
    // The memory is emptied between the first read of the tail and the second.
    let tail = Stepped { value: AtomicU64::new(3), after_load: Some(0), ..Stepped::default() };
    let (head, words) =
        (Stepped::default(), [(); 4].map(|()| Stepped { value: AtomicU64::new(7), ..Stepped::default() }));
    let ring = Ring { tail: &tail, head: &head, words: &words };
    let (mut consumer, mut out) = (Consumer::default(), Vec::new());
    assert_eq!(consumer.pop(&ring, usize::MAX, &mut out), Ok(24));
    assert_eq!(out, 7_u64.to_ne_bytes().repeat(3));
    assert_eq!(consumer.pop(&ring, usize::MAX, &mut out), Err(LaneFault::TailBackwards));
    assert_eq!(out.len(), 24);
}

#[test]
fn two_mappings_see_each_other_and_ring_only_for_a_sleeping_side() {
    let (mut gateway, mut daemon) = ends();
    assert_eq!(gateway.send(&[3; 24]), Ok(Moved { bytes: 24, rings: false }));
    let mut out = vec![9];
    assert_eq!(daemon.receive(17, &mut out), Ok(Moved { bytes: 16, rings: false }), "whole words");
    daemon.announce(Awaited::ROOM);
    assert_eq!(gateway.send(&[3; 8]), Ok(Moved { bytes: 8, rings: false }), "it waits for room, not for data");
    daemon.announce(Awaited::DATA);
    assert_eq!(gateway.send(&[3; 8]), Ok(Moved { bytes: 8, rings: true }));
    assert_eq!(gateway.send(&[3; 8]), Ok(Moved { bytes: 8, rings: false }), "once");
    daemon.announce(Awaited::DATA);
    daemon.settle(Awaited::DATA);
    assert_eq!(gateway.send(&[3; 8]), Ok(Moved { bytes: 8, rings: false }));
    assert_eq!(daemon.incoming_bytes(), Ok(40));
    assert_eq!(gateway.room_bytes(), Ok(4096 - 40));
    gateway.announce(Awaited::BOTH);
    assert!(daemon.receive(usize::MAX, &mut out).unwrap().rings, "there is room again");
    assert_eq!((out.len(), daemon.received_bytes()), (57, 56));
}

#[test]
fn long_frames_come_whole_from_another_thread() {
    const FRAMES: usize = 200;
    let sizes = LaneSizes::requested(1 << 16, 1 << 16, LANE_RING_BYTES_CEILING).expect("a lane");
    let mut made = LaneMemory::make(sizes).expect("a lane");
    let mapped = LaneMemory::map(&made.share().expect("a lane"), sizes).expect("a lane");
    let (mut gateway, mut daemon) = (LaneEnd::new(mapped, LaneSide::Gateway), LaneEnd::new(made, LaneSide::Daemon));
    // Of many pieces that are published one after the other, and not of whole pieces.
    let frame: Vec<u8> = (0..48_008_u32).map(|at| (at % 251) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..FRAMES {
                let mut rest = frame.as_slice();
                while !rest.is_empty() {
                    let moved = gateway.send(rest).expect("an honest reader");
                    rest = &rest[moved.bytes..];
                }
            }
        });
        let mut received = Vec::new();
        for _ in 0..FRAMES {
            while received.len() < frame.len() {
                let left = frame.len() - received.len();
                daemon.receive(left, &mut received).expect("an honest writer");
            }
            assert!(received == frame);
            received.clear();
        }
    });
}

#[test]
fn memory_that_could_shrink_or_is_of_another_size_is_not_mapped() {
    let sizes = LaneSizes::requested(4096, 4096, LANE_RING_BYTES_CEILING).unwrap();
    let larger = LaneSizes::requested(8192, 4096, LANE_RING_BYTES_CEILING).unwrap();
    let mut made = LaneMemory::make(sizes).unwrap();
    let shared = made.share().unwrap();
    assert!(LaneMemory::map(&shared, larger).unwrap_err().to_string().contains("another size"));
    for bytes in [0, 4096, 1 << 20] {
        assert!(rustix::fs::ftruncate(&shared, bytes).is_err(), "no process can change its size");
    }
    assert!(rustix::fs::fcntl_add_seals(&shared, rustix::fs::SealFlags::WRITE).is_err());
    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&loose, sizes.memory_bytes() as u64).unwrap();
    assert!(LaneMemory::map(&loose, sizes).unwrap_err().to_string().contains("not sealed"));
    let file = std::os::fd::OwnedFd::from(tempfile::tempfile().unwrap());
    assert!(LaneMemory::map(&file, sizes).is_err());
}

#[test]
fn the_memory_of_a_lane_that_has_ended_is_given_back_once_its_gateway_lets_go_of_it() {
    let sizes = LaneSizes::requested(0, 0, LANE_RING_BYTES_CEILING).unwrap();
    let mut made = LaneMemory::make(sizes).unwrap();
    let kept = made.share().unwrap();
    assert!(made.share().is_err(), "there is one for the other side");
    let mapped = LaneMemory::map(&kept, sizes).unwrap();
    made.words().iter().for_each(|word| word.store(1, Ordering::Relaxed));
    let (reclaimer, (held, given_back)) = (Arc::new(Reclaimer::default()), std::sync::mpsc::channel::<()>());
    made.reclaimed_by(&reclaimer, held);
    drop(made);
    // Whatever the other side has it by: a descriptor, a mapping, one that only reads.
    let path = format!("/proc/self/fd/{}", kept.as_raw_fd());
    let (read_only, by_path) = (std::fs::File::open(&path).unwrap(), by_path(&path));
    let keeps = |what: &str| {
        // Tried several times by then.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((reclaimer.waiting(), given_back.try_recv()), (1, Err(TryRecvError::Empty)), "{what}");
    };
    keeps("a descriptor");
    drop(kept);
    keeps("a mapping");
    drop(mapped);
    keeps("a descriptor that reads");
    assert!(rustix::fs::fstat(&by_path).unwrap().st_blocks > 0);
    drop(read_only);
    assert_eq!(given_back.recv(), Err(RecvError), "what it held ends with it");
    assert_eq!(rustix::fs::fstat(&by_path).unwrap().st_blocks, 0, "a path alone keeps no pages");
}

fn by_path(path: &str) -> std::os::fd::OwnedFd {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("it is there")
}

#[test]
fn a_bell_never_waits_and_notices_a_closed_end() {
    let (ours, theirs) = bell_pair().unwrap();
    assert_eq!(hear(&ours), Heard::Quiet);
    // Far more than a socket holds, on one that would wait.
    (0..100_000).for_each(|_| ring(&theirs));
    assert_eq!(hear(&ours), Heard::Quiet);
    drop(theirs);
    let last = (0..100_000).map(|_| hear(&ours)).find(|heard| *heard == Heard::Gone);
    assert_eq!(last, Some(Heard::Gone));
    ring(&ours);
}
