//! The receive buffer of a connection, the frames in it, and the budget that the buffers of a core share.
//!
//! The length of a frame bounds one buffer. A [`ReceiveBudget`] bounds all buffers of a core together, and those of one
//! user: a flood of connections with a large frame each, none of which ever ends, stays within it.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::budget::Gauge;
use crate::limits::{
    FRAME_HEADER_BYTES, RECEIVE_BUFFER_BYTES_FILLED, RECEIVE_BUFFER_BYTES_KEPT, RECEIVE_BUFFER_BYTES_MIN,
    RECEIVE_BUFFER_READS_KEPT,
};
use crate::metrics::{CoreCounter, CounterSet};
use crate::shares::share;
use crate::wire::{FrameHeader, HeaderFault};

/// The next item in the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A whole frame, with the range of its body.
    Frame(FrameHeader, Range<usize>),
    /// The header of a body above the limit. The body is skipped as it arrives.
    Oversized(FrameHeader),
    /// The header of a frame that the budget does not allow beside those of other connections. The rest of it is
    /// skipped.
    OverBudget(FrameHeader, OverBudget),
    /// No whole frame: read more.
    Incomplete,
    /// A header that does not tell where the next frame starts.
    Untrusted(HeaderFault),
}

/// Splits received bytes into frames.
///
/// Frames are multiples of 8 bytes, and compaction moves the rest to the front. So headers and bodies start 8-aligned,
/// as the buffer does. The buffer grows only with bytes that have arrived, to one frame of the largest size or to what
/// a socket holds, and shrinks again.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    /// Answered bytes at the front of the buffer.
    consumed: usize,
    /// Bytes of an oversized body that have not arrived.
    skip_bytes: u64,
    /// Bytes of the frame at the front, according to its header.
    wanted: usize,
    /// Reads since the buffer last needed its size.
    small_reads: u32,
    body_bytes_max: u32,
    /// The shared budget, and the bytes taken from it: the buffer's size above the minimum.
    budget: Rc<ReceiveBudget>,
    taken: usize,
    /// The user whose share they count against.
    uid: u32,
}

impl Drop for FrameReader {
    fn drop(&mut self) {
        self.budget.give_back(self.uid, self.taken);
    }
}

impl FrameReader {
    pub(super) fn new(body_bytes_max: u32, budget: Rc<ReceiveBudget>, uid: u32) -> Self {
        let (consumed, skip_bytes, wanted, small_reads, taken) = (0, 0, 0, 0, 0);
        Self { buffer: Vec::new(), consumed, skip_bytes, wanted, small_reads, body_bytes_max, budget, taken, uid }
    }

    pub(super) const fn body_bytes_max(&self) -> u32 {
        self.body_bytes_max
    }

    /// Whether part of a frame waits for the rest.
    pub(super) const fn is_mid_frame(&self) -> bool {
        self.buffer.len() > self.consumed || self.skip_bytes > 0
    }

    /// The buffer, to read into behind its contents. It has space.
    pub(super) fn take(&mut self) -> Vec<u8> {
        let filled = self.buffer.len();
        self.buffer.drain(..self.consumed);
        self.consumed = 0;
        self.resize(filled);
        std::mem::take(&mut self.buffer)
    }

    /// Takes the buffer back after a read.
    pub(super) fn give_back(&mut self, buffer: Vec<u8>) {
        self.buffer = buffer;
    }

    /// Grows the buffer for a frame that does not fit, and for longer reads where the last read filled it; `filled` is
    /// its length after that read. Shrinks it when large frames and long reads have become rare.
    fn resize(&mut self, filled: usize) {
        let (held, capacity) = (self.buffer.len(), self.buffer.capacity());
        if self.wanted > capacity || filled > RECEIVE_BUFFER_BYTES_MIN {
            self.small_reads = 0;
        } else {
            self.small_reads = self.small_reads.saturating_add(1);
        }
        if filled == capacity && (RECEIVE_BUFFER_BYTES_MIN..RECEIVE_BUFFER_BYTES_FILLED).contains(&capacity) {
            self.lengthen(held, (capacity * 2).min(RECEIVE_BUFFER_BYTES_FILLED));
        }
        if self.is_full(held) {
            self.buffer.reserve_exact(self.target(held) - held);
        } else if held == 0 && self.buffer.capacity() > RECEIVE_BUFFER_BYTES_MIN {
            let rare = self.small_reads >= RECEIVE_BUFFER_READS_KEPT || !self.budget.is_ample(self.uid);
            self.buffer.shrink_to(if rare { RECEIVE_BUFFER_BYTES_MIN } else { RECEIVE_BUFFER_BYTES_KEPT });
        }
        let given_back = self.taken.saturating_sub(self.buffer.capacity().saturating_sub(RECEIVE_BUFFER_BYTES_MIN));
        self.budget.give_back(self.uid, given_back);
        self.taken -= given_back;
    }

    /// Grows the buffer for longer reads, as far as the budget allows. Otherwise reads stay as long as they are.
    fn lengthen(&mut self, held: usize, bytes: usize) {
        let missing = (bytes - RECEIVE_BUFFER_BYTES_MIN).saturating_sub(self.taken);
        let may = self.budget.is_ample(self.uid) && self.budget.has(self.uid, missing);
        if may && self.budget.take(self.uid, missing).is_ok() {
            self.taken += missing;
            self.buffer.reserve_exact(bytes - held);
        }
    }

    /// Whether the buffer has to grow for the next read, with `held` bytes in it. It need not for the rest of a frame
    /// that fits: a large frame often arrives in two pieces.
    fn is_full(&self, held: usize) -> bool {
        let capacity = self.buffer.capacity();
        let fits = capacity >= RECEIVE_BUFFER_BYTES_MIN && self.wanted <= capacity;
        !fits && capacity.saturating_sub(held) < RECEIVE_BUFFER_BYTES_MIN / 2
    }

    /// The size to grow to: twice what has arrived, but not above the frame. A header alone reserves nothing.
    fn target(&self, held: usize) -> usize {
        self.wanted.min(held * 2).max(held + RECEIVE_BUFFER_BYTES_MIN / 2).max(RECEIVE_BUFFER_BYTES_MIN)
    }

    /// Takes budget for the next read of a frame of which `held` bytes have arrived. Without budget those bytes are
    /// dropped.
    fn take_budget(&mut self, held: usize) -> Result<(), OverBudget> {
        if !self.is_full(held) {
            return Ok(());
        }
        let missing = (self.target(held) - RECEIVE_BUFFER_BYTES_MIN).saturating_sub(self.taken);
        if let Err(why) = self.budget.take(self.uid, missing) {
            self.buffer = Vec::new();
            self.consumed = 0;
            self.budget.give_back(self.uid, std::mem::take(&mut self.taken));
            return Err(why);
        }
        self.taken += missing;
        Ok(())
    }

    /// The bytes at a range that [`FrameReader::next`] gave.
    pub(super) fn body(&self, range: Range<usize>) -> &[u8] {
        self.buffer.get(range).unwrap_or_default()
    }

    /// Takes the next frame.
    pub(super) fn next(&mut self) -> Next {
        let held = self.buffer.len() - self.consumed;
        // A body has at most 2^32 bytes, which a usize holds here: the minimum fits both.
        let skipped = self.skip_bytes.min(held as u64);
        self.skip_bytes -= skipped;
        self.consumed += skipped as usize;
        let Some(bytes) = self.buffer[self.consumed..].first_chunk::<FRAME_HEADER_BYTES>() else {
            self.wanted = FRAME_HEADER_BYTES;
            return Next::Incomplete;
        };
        let header = match FrameHeader::parse(bytes) {
            Ok(header) => header,
            Err(fault) => return Next::Untrusted(fault),
        };
        if header.body_bytes > self.body_bytes_max {
            self.consumed += FRAME_HEADER_BYTES;
            self.skip_bytes = u64::from(header.body_bytes);
            return Next::Oversized(header);
        }
        let frame_bytes = FRAME_HEADER_BYTES + header.body_bytes as usize;
        let held = self.buffer.len() - self.consumed;
        if held < frame_bytes {
            self.wanted = frame_bytes;
            let Err(why) = self.take_budget(held) else { return Next::Incomplete };
            self.wanted = 0;
            self.skip_bytes = (frame_bytes - held) as u64;
            return Next::OverBudget(header, why);
        }
        if frame_bytes > RECEIVE_BUFFER_BYTES_MIN {
            self.small_reads = 0;
        }
        let body = self.consumed + FRAME_HEADER_BYTES..self.consumed + frame_bytes;
        self.consumed = body.end;
        Next::Frame(header, body)
    }
}

/// The bytes that the receive buffers of one core may take above their minimum size.
#[derive(Debug)]
pub(super) struct ReceiveBudget {
    /// The whole budget.
    bytes: usize,
    left_bytes: Cell<usize>,
    /// The share of one user.
    user_bytes_max: usize,
    /// Bytes taken, by user; only users that have taken some.
    users: RefCell<FxHashMap<u32, usize>>,
    /// Counts refusals.
    counters: Option<Arc<CounterSet<CoreCounter>>>,
    /// Shows what is taken.
    gauge: Gauge,
}

/// The limit that refuses a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OverBudget {
    /// The frames of all users take the whole budget.
    Total,
    /// The frames of this user take its share.
    User,
}

impl Default for ReceiveBudget {
    /// A budget without limit, for a connection by itself.
    fn default() -> Self {
        let (bytes, users, gauge) = (usize::MAX, RefCell::default(), Gauge::default());
        Self { bytes, left_bytes: Cell::new(bytes), user_bytes_max: bytes, users, counters: None, gauge }
    }
}

impl ReceiveBudget {
    /// The budget of one core: `bytes_max`, and at least one frame of the largest size. One user may take
    /// `user_share_percent` of it, and at least one such frame. Refusals are counted, and the gauge shows what is taken.
    #[must_use]
    pub(super) fn new(
        (frame_body_bytes_max, user_share_percent): (u32, u8),
        (bytes_max, gauge): (usize, Gauge),
        counters: Arc<CounterSet<CoreCounter>>,
    ) -> Self {
        // Beside a frame's body there are its header and the space for the next read.
        let frame_bytes = 2 * frame_body_bytes_max as usize;
        let bytes = bytes_max.max(frame_bytes);
        let user_bytes_max = share(user_share_percent, bytes).max(frame_bytes);
        Self {
            bytes,
            left_bytes: Cell::new(bytes),
            user_bytes_max,
            users: RefCell::default(),
            counters: Some(counters),
            gauge,
        }
    }

    fn refusal(&self, uid: u32, bytes: usize) -> Option<OverBudget> {
        if self.left_bytes.get() < bytes {
            return Some(OverBudget::Total);
        }
        let held = self.users.borrow().get(&uid).copied().unwrap_or_default();
        (bytes > self.user_bytes_max - held).then_some(OverBudget::User)
    }

    /// Whether a user could take this many bytes. For uses that can do without.
    pub(super) fn has(&self, uid: u32, bytes: usize) -> bool {
        self.refusal(uid, bytes).is_none()
    }

    /// Whether enough is left, in all and for this user, for its idle connections to keep their buffers for their next
    /// large frame.
    pub(super) fn is_ample(&self, uid: u32) -> bool {
        let held = self.users.borrow().get(&uid).copied().unwrap_or_default();
        self.left_bytes.get() >= self.bytes / 2 && held <= self.user_bytes_max / 2
    }

    /// Takes this many bytes for a user.
    ///
    /// # Errors
    /// The limit that is reached; nothing is taken.
    pub(super) fn take(&self, uid: u32, bytes: usize) -> Result<(), OverBudget> {
        if let Some(refusal) = self.refusal(uid, bytes) {
            if let Some(counters) = &self.counters {
                counters.bump(match refusal {
                    OverBudget::Total => CoreCounter::FramesNoRoom,
                    OverBudget::User => CoreCounter::FramesNoRoomUser,
                });
            }
            return Err(refusal);
        }
        if bytes > 0 {
            self.left_bytes.set(self.left_bytes.get() - bytes);
            self.gauge.set((self.bytes - self.left_bytes.get()) as u64);
            *self.users.borrow_mut().entry(uid).or_default() += bytes;
        }
        Ok(())
    }

    /// Gives back bytes that a user had taken.
    pub(super) fn give_back(&self, uid: u32, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.left_bytes.set(self.left_bytes.get().saturating_add(bytes));
        self.gauge.set(self.bytes.saturating_sub(self.left_bytes.get()) as u64);
        let mut users = self.users.borrow_mut();
        if let Some(held) = users.get_mut(&uid) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                users.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::CorrelationId;
    use crate::limits::CORE_RECEIVE_BYTES_MAX;
    use crate::wire::FrameKind;

    const MAX: u32 = 4 << 20;

    fn frame(id: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = FrameHeader::new(FrameKind::Route, body.len() as u32, CorrelationId(id)).encode().to_vec();
        bytes.extend_from_slice(body);
        bytes
    }

    /// Feeds `bytes` as the sockets do, never more than the free space, and collects the frames.
    fn feed(reader: &mut FrameReader, mut bytes: &[u8], step: usize) -> Vec<(u64, Option<Vec<u8>>)> {
        let mut seen = Vec::new();
        while !bytes.is_empty() {
            let mut buffer = reader.take();
            let room = buffer.capacity() - buffer.len();
            assert!(room > 0, "there is always space to read");
            let (now, later) = bytes.split_at(bytes.len().min(step).min(room));
            buffer.extend_from_slice(now);
            bytes = later;
            reader.give_back(buffer);
            loop {
                match reader.next() {
                    Next::Frame(header, body) => seen.push((header.correlation_id.0, Some(reader.body(body).to_vec()))),
                    Next::Oversized(header) | Next::OverBudget(header, _) => seen.push((header.correlation_id.0, None)),
                    Next::Incomplete => break,
                    Next::Untrusted(fault) => panic!("{fault}"),
                }
            }
        }
        seen
    }

    #[test]
    fn an_oversized_body_is_skipped_without_buffering() {
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        let mut bytes = frame(1, &[1; 8]);
        bytes.extend(frame(2, &vec![2; MAX as usize + 8]));
        bytes.extend(frame(3, &[3; 8]));
        let seen = feed(&mut reader, &bytes, 50_000);
        assert_eq!(seen, [(1, Some(vec![1; 8])), (2, None), (3, Some(vec![3; 8]))]);
        assert_eq!(reader.buffer.capacity(), RECEIVE_BUFFER_BYTES_MIN);
        assert!(!reader.is_mid_frame());
    }

    #[test]
    fn a_header_alone_reserves_nothing_and_a_large_frame_is_given_back() {
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        let large = frame(1, &vec![7; MAX as usize]);
        assert_eq!(feed(&mut reader, &large[..16], 16), []);
        assert!(reader.take().capacity() <= RECEIVE_BUFFER_BYTES_MIN);
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        assert_eq!(feed(&mut reader, &large, 1 << 20).len(), 1);
        let buffer = reader.take();
        assert!(buffer.capacity() <= RECEIVE_BUFFER_BYTES_KEPT);
        reader.give_back(buffer);
        for id in 0..=u64::from(RECEIVE_BUFFER_READS_KEPT) {
            assert_eq!(feed(&mut reader, &frame(id, &[0; 8]), 64).len(), 1);
        }
        assert!(reader.take().capacity() <= RECEIVE_BUFFER_BYTES_MIN);
    }

    #[test]
    fn reads_that_fill_the_buffer_grow_it_while_they_come() {
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        let many: Vec<u8> = (0..40).flat_map(|id| frame(id, &[1; 48_000])).collect();
        // As much as fits each time: the sender is always ahead.
        assert_eq!(feed(&mut reader, &many, usize::MAX).len(), 40);
        assert_eq!(reader.buffer.capacity(), RECEIVE_BUFFER_BYTES_FILLED);
        for id in 0..=u64::from(RECEIVE_BUFFER_READS_KEPT) {
            assert_eq!(feed(&mut reader, &frame(id, &[1; 48_000]), usize::MAX).len(), 1);
        }
        assert_eq!(reader.take().capacity(), RECEIVE_BUFFER_BYTES_MIN, "one request at a time needs no more");
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        assert_eq!(feed(&mut reader, &many, 16 << 10).len(), 40);
        assert_eq!(reader.take().capacity(), RECEIVE_BUFFER_BYTES_MIN, "short reads stay short");
    }

    #[test]
    fn a_frame_that_fits_and_comes_in_pieces_moves_no_buffer() {
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        let frame = frame(1, &[7; 48_000]);
        feed(&mut reader, &frame, usize::MAX);
        let buffer = reader.take();
        let at = buffer.as_ptr();
        reader.give_back(buffer);
        for first in [FRAME_HEADER_BYTES / 2, FRAME_HEADER_BYTES, 40_000, 48_000] {
            assert_eq!(feed(&mut reader, &frame[..first], usize::MAX), []);
            assert_eq!(feed(&mut reader, &frame[first..], usize::MAX).len(), 1);
            assert_eq!(reader.buffer.as_ptr(), at, "{first}");
        }
    }

    #[test]
    fn the_buffer_grows_to_one_frame_at_most() {
        let mut reader = FrameReader::new(MAX, Rc::default(), 0);
        let large = frame(1, &vec![7; MAX as usize]);
        let mut peak = 0;
        for chunk in large.chunks(30_000) {
            feed(&mut reader, chunk, usize::MAX);
            peak = peak.max(reader.buffer.capacity());
        }
        assert!(peak <= large.len() + RECEIVE_BUFFER_BYTES_MIN, "{peak}");
    }

    #[test]
    fn a_frame_over_budget_is_skipped_and_the_next_is_read() {
        let budget = Rc::new(ReceiveBudget::default());
        let other = usize::MAX - (2 << 20);
        assert_eq!(budget.take(0, other), Ok(()));
        let mut reader = FrameReader::new(MAX, Rc::clone(&budget), 0);
        let mut bytes = frame(1, &vec![1; 1 << 20]);
        bytes.extend(frame(2, &vec![2; MAX as usize]));
        bytes.extend(frame(3, &[3; 8]));
        let seen = feed(&mut reader, &bytes, 50_000);
        assert_eq!(seen, [(1, Some(vec![1; 1 << 20])), (2, None), (3, Some(vec![3; 8]))]);
        assert_eq!(reader.taken, 0, "it takes no budget");
        budget.give_back(0, other);
        let half = &frame(4, &vec![4; MAX as usize])[..3 << 20];
        assert_eq!(feed(&mut reader, half, 50_000), []);
        assert!(reader.taken > 1 << 20 && budget.take(0, usize::MAX).is_err());
        drop(reader);
        assert_eq!(budget.take(0, usize::MAX), Ok(()), "a closed connection gives its budget back");
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            bodies in proptest::collection::vec((0_usize..40_000, any::<u8>()), 1..12), step in 1_usize..100_000,
        ) {
            let bodies: Vec<Vec<u8>> = bodies.into_iter().map(|(len, fill)| vec![fill; len.next_multiple_of(8)]).collect();
            let bytes: Vec<u8> = bodies.iter().zip(0..).flat_map(|(body, id)| frame(id, body)).collect();
            let mut reader = FrameReader::new(MAX, Rc::default(), 0);
            let seen = feed(&mut reader, &bytes, step.max(bytes.len() / 500));
            prop_assert_eq!(seen, bodies.into_iter().zip(0..).map(|(body, id)| (id, Some(body))).collect::<Vec<_>>());
            prop_assert!(!reader.is_mid_frame());
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut reader = FrameReader::new(64, Rc::default(), 0);
            let mut buffer = reader.take();
            buffer.extend_from_slice(&bytes);
            reader.give_back(buffer);
            while let Next::Frame(..) | Next::Oversized(_) | Next::OverBudget(..) = reader.next() {}
        }
    }

    const ALL: usize = CORE_RECEIVE_BYTES_MAX;

    fn of_core(frames_and_share: (u32, u8), counters: &Arc<CounterSet<CoreCounter>>) -> ReceiveBudget {
        ReceiveBudget::new(frames_and_share, (ALL, Gauge::default()), Arc::clone(counters))
    }

    #[test]
    fn a_refusal_takes_nothing_and_is_counted() {
        let counters: Arc<CounterSet<CoreCounter>> = Arc::default();
        let budget = of_core((8, 100), &counters);
        assert_eq!([budget.take(1, ALL - 1), budget.take(2, 1)], [Ok(()); 2]);
        assert_eq!([budget.take(1, 1), budget.take(1, 0)], [Err(OverBudget::Total), Ok(())]);
        assert_eq!(counters.get(CoreCounter::FramesNoRoom), 1);
        budget.give_back(1, 5);
        assert_eq!([budget.take(3, 5), budget.take(3, 1)], [Ok(()), Err(OverBudget::Total)]);
        let budget = of_core((u32::MAX, 1), &counters);
        assert_eq!(budget.take(1, u32::MAX as usize), Ok(()), "one largest frame always fits");
    }

    #[test]
    fn one_user_leaves_budget_for_others() {
        let counters: Arc<CounterSet<CoreCounter>> = Arc::default();
        let budget = of_core((8, 75), &counters);
        assert_eq!(budget.take(1, ALL / 4 * 3), Ok(()));
        assert_eq!((budget.take(1, 1), budget.has(1, 1), budget.has(2, 1)), (Err(OverBudget::User), false, true));
        assert_eq!([budget.take(2, ALL / 4), budget.take(2, 1)], [Ok(()), Err(OverBudget::Total)]);
        let refused = [CoreCounter::FramesNoRoomUser, CoreCounter::FramesNoRoom].map(|counter| counters.get(counter));
        assert_eq!(refused, [1, 1]);
        budget.give_back(1, ALL / 4 * 3);
        assert_eq!(budget.take(1, ALL / 2), Ok(()));
        assert_eq!([budget.is_ample(1), budget.is_ample(3)], [false; 2], "little is left in all");
        budget.give_back(2, ALL / 4);
        assert_eq!([budget.is_ample(1), budget.is_ample(3)], [false, true], "this user has most of its share");
        budget.give_back(1, ALL / 2);
        assert!(budget.users.borrow().is_empty(), "users that hold nothing leave no entry");
    }
}
