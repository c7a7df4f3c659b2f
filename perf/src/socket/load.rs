//! One thread that asks over several connections, with several requests in flight on each: a request is a route that
//! books, and once it is answered the free of that booking.

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
        Self { fd, dialect, out, sent: 0, received, slots, idle }
    }

    fn ask(&mut self, slot: u32, number: u64, due: Option<Instant>) {
        self.dialect.ask(slot, number, &mut self.out);
        self.slots[slot as usize] = Slot { number, since: due.unwrap_or_else(Instant::now) };
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
                    self.dialect.release(reply.slot, slot.number, &mut self.out);
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
            // As many as one round trip leaves behind, whatever the pace.
            kept_up.get_or_insert(begun - requests <= 1 + begun / 100);
            if begun == requests {
                break;
            }
        } else {
            while let Some(due) = due(pace, began, begun, now) {
                let free =
                    (0..wires.len()).map(|step| (turn + step) % wires.len()).find(|at| !wires[*at].idle.is_empty());
                let Some(wire) = free else { break };
                turn = wire + 1;
                let Some(slot) = wires[wire].idle.pop() else { break };
                *number += 1;
                begun += 1;
                wires[wire].ask(slot, *number, due);
            }
        }
        wires.iter_mut().try_for_each(Wire::flush)?;
        let done = if spins {
            wires.iter_mut().try_fold(0, |done, wire| Ok::<_, Failure>(done + wire.take(&mut latency_ns)?))?
        } else {
            wait_and_take(wires, next_wait(pace, began, begun, time), &mut latency_ns)?
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

/// How long nothing is to be done unless something comes.
fn next_wait(pace: Pace, began: Instant, begun: u64, time: Duration) -> Duration {
    let next = match pace {
        Pace::Closed => began + time,
        Pace::Open(per_second) => began + Duration::from_secs_f64(begun as f64 / per_second).min(time),
    };
    let left = next.saturating_duration_since(Instant::now());
    // What is late waits for room, or for the last replies.
    if left.is_zero() { Duration::from_millis(100) } else { left }
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
