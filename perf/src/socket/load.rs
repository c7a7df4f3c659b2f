//! One thread that asks over several connections, with several requests in flight on each: a request is a route that
//! books, and once it is answered, and held for a while if wanted, the free of that booking.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::time::Timespec;

use super::dialect::{Dialect, Step};
use crate::failure::Failure;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;
/// Longest latency that is told from longer ones.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// How long a reply is waited for before everything is looked at again.
const REPLY_WAIT: Duration = Duration::from_millis(100);
/// How long the server may say nothing while something is in flight.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// When the next request begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// When there is room for it.
    Closed,
    /// So many a second, answered or not. What is late counts from when it was due.
    Open(f64),
}

/// What was measured.
pub(crate) struct Measured {
    /// From a route's begin to its reply, nanoseconds.
    pub(crate) latency_ns: Histogram<u64>,
    /// Routes that were answered and freed.
    pub(crate) requests: u64,
    /// How long it took.
    pub(crate) seconds: f64,
    /// Open loop: when time was up, nothing but what had just begun was left.
    pub(crate) kept_up: bool,
}

/// A connection.
pub(crate) struct Wire {
    fd: OwnedFd,
    dialect: Box<dyn Dialect>,
    out: Vec<u8>,
    sent: usize,
    received: Vec<u8>,
    slots: Vec<Slot>,
    idle: Vec<u32>,
    /// How long a booking is held before it is freed.
    hold: Duration,
    /// The bookings that are held, by the time of their free.
    held: VecDeque<(Instant, u32)>,
}

#[derive(Clone, Copy)]
struct Slot {
    number: u64,
    since: Instant,
}

impl Wire {
    /// Of a connected socket that never blocks.
    #[must_use]
    pub(crate) fn new(fd: OwnedFd, dialect: Box<dyn Dialect>, depth: u32) -> Self {
        let slots = vec![Slot { number: 0, since: Instant::now() }; depth as usize];
        let (out, received, idle) = (Vec::new(), Vec::new(), (0..depth).collect());
        let (hold, held) = (Duration::ZERO, VecDeque::new());
        Self { fd, dialect, out, sent: 0, received, slots, idle, hold, held }
    }

    /// The same with bookings that are held for this long before they are freed.
    #[must_use]
    pub(crate) fn holding(self, hold: Duration) -> Self {
        Self { hold, ..self }
    }

    /// Asks for the frees that are due; the time of the next one.
    fn release_due(&mut self, now: Instant) -> Option<Instant> {
        while let Some((due, slot)) = self.held.front().copied() {
            if due > now {
                return Some(due);
            }
            self.held.pop_front();
            self.release(slot);
        }
        None
    }

    fn release(&mut self, slot: u32) {
        self.dialect.release(slot, self.slots[slot as usize].number, &mut self.out);
    }

    fn ask(&mut self, slot: u32, number: u64, due: Option<Instant>) {
        self.forget_sent();
        self.dialect.ask(slot, number, &mut self.out);
        self.slots[slot as usize] = Slot { number, since: due.unwrap_or_else(Instant::now) };
    }

    /// Gives up what is sent once it is half of what is held. A server that is slower than this client never lets
    /// `out` run empty: it would grow for as long as is measured, and growing by copying counts as latency.
    fn forget_sent(&mut self) {
        if self.sent >= self.out.len() - self.sent {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
    }

    fn has_room(&self) -> bool {
        !self.idle.is_empty()
    }

    fn is_sent(&self) -> bool {
        self.sent == self.out.len()
    }

    fn flush(&mut self) -> Result<(), Failure> {
        while !self.is_sent() {
            match send(&self.fd, &self.out[self.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => self.sent += sent,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::system("send a request")(error.into())),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Takes what has come; answers with how many requests are done.
    fn take(&mut self, latency_ns: &mut Histogram<u64>) -> Result<u64, Failure> {
        self.received.reserve(READ_BYTES);
        match recv(&self.fd, spare_capacity(&mut self.received), RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Failure::Child("has closed a connection".to_owned())),
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(0),
            Err(error) => return Err(Failure::system("receive a reply")(error.into())),
        }
        let now = Instant::now();
        let (mut at, mut done) = (0, 0);
        while let Some(reply) = self.dialect.reply(&self.received[at..])? {
            at += reply.bytes;
            let slot = self.slots[reply.slot as usize];
            match reply.step {
                Step::Route => {
                    latency_ns.saturating_record((now - slot.since).as_nanos() as u64);
                    if self.hold.is_zero() {
                        self.release(reply.slot);
                    } else {
                        self.held.push_back((now + self.hold, reply.slot));
                    }
                }
                Step::Free => {
                    self.idle.push(reply.slot);
                    done += 1;
                }
            }
        }
        self.received.drain(..at);
        Ok(done)
    }
}

/// Asks for `time`, then waits for what is in flight. `number` counts the requests of a server, and is not used twice.
///
/// # Errors
/// A reply is a refusal, or none comes.
pub(crate) fn run(
    wires: &mut [Wire],
    pace: Pace,
    spins: bool,
    time: Duration,
    number: &mut u64,
) -> Result<Measured, Failure> {
    let contract = |error: hdrhistogram::CreationError| Failure::Contract(error.to_string());
    let mut latency_ns = Histogram::new_with_max(LATENCY_NS_MAX, 3).map_err(contract)?;
    let (began, mut begun, mut requests, mut kept_up, mut turn) = (Instant::now(), 0_u64, 0, None, 0);
    let mut heard = began;
    loop {
        let now = Instant::now();
        let is_over = now - began >= time;
        if is_over {
            // As many as one round trip leaves behind, whatever the pace. Held bookings were answered.
            let held = wires.iter().map(|wire| wire.held.len() as u64).sum::<u64>();
            kept_up.get_or_insert(begun - requests - held <= 1 + begun / 100 && is_on_time(pace, begun, time));
            if begun == requests {
                break;
            }
        } else {
            while let Some(due) = due(pace, began, begun, now) {
                let free = (0..wires.len()).map(|step| (turn + step) % wires.len()).find(|at| wires[*at].has_room());
                let Some(wire) = free else { break };
                turn = wire + 1;
                let Some(slot) = wires[wire].idle.pop() else { break };
                *number += 1;
                begun += 1;
                wires[wire].ask(slot, *number, due);
            }
        }
        let next_release = wires.iter_mut().filter_map(|wire| wire.release_due(now)).min();
        wires.iter_mut().try_for_each(Wire::flush)?;
        let done = if spins {
            wires.iter_mut().try_fold(0, |done, wire| Ok::<_, Failure>(done + wire.take(&mut latency_ns)?))?
        } else {
            let has_room = !is_over && wires.iter().any(Wire::has_room);
            let wait = next_wait(pace, began.elapsed(), begun, time, has_room);
            let wait = next_release.map_or(wait, |due| wait.min(due.saturating_duration_since(now)));
            wait_and_take(wires, wait, &mut latency_ns)?
        };
        requests += done;
        if done > 0 || begun == requests {
            heard = now;
        } else if now - heard > SILENCE_MAX {
            return Err(Failure::Child("does not answer".to_owned()));
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    Ok(Measured { latency_ns, requests, seconds, kept_up: kept_up.unwrap_or(false) })
}

/// Whether another request begins now, and when it was due: `Some(None)` = just now.
fn due(pace: Pace, began: Instant, begun: u64, now: Instant) -> Option<Option<Instant>> {
    match pace {
        Pace::Closed => Some(None),
        Pace::Open(per_second) => {
            let due = began + Duration::from_secs_f64(begun as f64 / per_second);
            (due <= now).then_some(Some(due))
        }
    }
}

/// Whether hardly a request is yet to begin that was due within `time`.
fn is_on_time(pace: Pace, begun: u64, time: Duration) -> bool {
    match pace {
        Pace::Closed => true,
        Pace::Open(per_second) => begun as f64 >= 0.98 * (per_second * time.as_secs_f64()).floor(),
    }
}

/// How long nothing is to be done unless something comes. `has_room` = a request that is due can begin.
fn next_wait(pace: Pace, elapsed: Duration, begun: u64, time: Duration, has_room: bool) -> Duration {
    let next = match pace {
        Pace::Closed => time,
        Pace::Open(per_second) => Duration::from_secs_f64(begun as f64 / per_second).min(time),
    };
    let left = next.saturating_sub(elapsed);
    // What is late waits for room, or for the last replies.
    if left.is_zero() && !has_room { REPLY_WAIT } else { left }
}

fn wait_and_take(wires: &mut [Wire], wait: Duration, latency_ns: &mut Histogram<u64>) -> Result<u64, Failure> {
    let flags = |wire: &Wire| if wire.is_sent() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
    let mut fds: Vec<PollFd<'_>> = wires.iter().map(|wire| PollFd::new(&wire.fd, flags(wire))).collect();
    let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(Failure::system("wait for replies")(error.into())),
    }
    let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().intersects(!PollFlags::OUT)).collect();
    let mut done = 0;
    for (wire, _) in wires.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
        done += wire.take(latency_ns)?;
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::super::dialect::Answered;
    use super::*;

    const REQUEST_BYTES: usize = 48_000;
    const DEPTH: u32 = 32;

    /// Requests of a fixed length whose first byte is their slot, each answered once by that byte.
    struct Plain;

    impl Dialect for Plain {
        fn ask(&mut self, slot: u32, _: u64, out: &mut Vec<u8>) {
            let start = out.len();
            out.resize(start + REQUEST_BYTES, 0);
            out[start] = slot as u8;
        }

        fn release(&mut self, _: u32, _: u64, _: &mut Vec<u8>) {}

        fn reply(&mut self, received: &[u8]) -> Result<Option<Answered>, Failure> {
            Ok(received.first().map(|slot| Answered { bytes: 1, slot: u32::from(*slot), step: Step::Free }))
        }
    }

    #[test]
    fn a_server_slower_than_the_client_is_not_waited_for_by_an_ever_longer_buffer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut wire = Wire::new(ours.into(), Box::new(Plain), DEPTH);
        let (mut latency_ns, mut done, mut request) = (Histogram::new(3).unwrap(), 0, vec![0; REQUEST_BYTES]);
        while done < 10 * u64::from(DEPTH) {
            while let Some(slot) = wire.idle.pop() {
                wire.ask(slot, done, None);
            }
            wire.flush().unwrap();
            assert!(!wire.is_sent(), "one request is answered at a time: something is always left to be sent");
            theirs.read_exact(&mut request).unwrap();
            theirs.write_all(&request[..1]).unwrap();
            done += wire.take(&mut latency_ns).unwrap();
            assert!(wire.out.len() <= 2 * (DEPTH as usize + 1) * REQUEST_BYTES, "{} bytes held", wire.out.len());
        }
    }

    /// A route is one byte, its slot; the free of it has the highest bit set. The reply is the same byte.
    struct Echoed;

    const FREE: u8 = 0x80;

    impl Dialect for Echoed {
        fn ask(&mut self, slot: u32, _: u64, out: &mut Vec<u8>) {
            out.push(slot as u8);
        }

        fn release(&mut self, slot: u32, _: u64, out: &mut Vec<u8>) {
            out.push(slot as u8 | FREE);
        }

        fn reply(&mut self, received: &[u8]) -> Result<Option<Answered>, Failure> {
            let step = |byte: u8| if byte & FREE == 0 { Step::Route } else { Step::Free };
            let answered = |byte: &u8| Answered { bytes: 1, slot: u32::from(byte & !FREE), step: step(*byte) };
            Ok(received.first().map(answered))
        }
    }

    #[test]
    fn a_booking_is_freed_once_it_was_held_for_its_time() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut wire = Wire::new(ours.into(), Box::new(Echoed), 1).holding(Duration::from_secs(60));
        let mut latency_ns = Histogram::new(3).unwrap();
        let slot = wire.idle.pop().unwrap();
        wire.ask(slot, 0, None);
        wire.flush().unwrap();
        theirs.write_all(&[slot as u8]).unwrap();
        assert_eq!((wire.take(&mut latency_ns).unwrap(), latency_ns.len()), (0, 1), "answered, and held");
        let due = wire.release_due(Instant::now()).unwrap();
        assert!(wire.is_sent() && !wire.has_room());
        assert_eq!((wire.release_due(due), &wire.out[..]), (None, &[slot as u8 | FREE][..]));
        wire.flush().unwrap();
        theirs.write_all(&[slot as u8 | FREE]).unwrap();
        assert_eq!((wire.take(&mut latency_ns).unwrap(), wire.has_room()), (1, true));
    }

    #[test]
    fn a_request_that_is_due_and_has_room_is_not_slept_over() {
        let (pace, second) = (Pace::Open(1000.0), Duration::from_secs(1));
        let at = Duration::from_millis;
        assert_eq!(next_wait(pace, at(4), 5, second, true), at(1), "the next is due in a millisecond");
        assert_eq!(next_wait(pace, at(6), 5, second, true), Duration::ZERO, "it became due while others were served");
        assert_eq!(next_wait(pace, at(6), 5, second, false), REPLY_WAIT, "no room for it");
        assert_eq!(next_wait(pace, at(1001), 1000, second, false), REPLY_WAIT, "time is up");
        assert_eq!(next_wait(Pace::Closed, at(400), 5, second, false), at(600));
    }
}
