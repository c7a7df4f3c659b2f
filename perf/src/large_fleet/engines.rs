//! A process of simulated engines: one thread that publishes for all of its ranks in turns, and carries out orders.

use std::io::{BufRead, Write};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use kvrouted::ingest::descriptors;
use kvrouted::zmtp::{Message, PeerId};
use rustix::time::{ClockId, clock_gettime};

use super::contents::Owner;
use super::engine::Rank;
use super::orders::{Order, Reply};
use crate::args::FleetEnginesArgs;
use crate::failure::Failure;
use crate::ingest::{nap, nap_exactly};

/// Batches published before other work goes on.
const PUBLISH_BATCHES_MAX: u64 = 512;
/// How often each rank's sockets are attended while batches are published, and while none are.
const ATTEND_EVERY: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(20)];
/// The pause if nothing is to be done.
const PAUSE: Duration = Duration::from_micros(500);

/// The engines of this process.
struct Engines {
    ranks: Vec<Rank>,
    ranks_per_worker: u32,
    cache_blocks: u32,
    loss: f64,
    /// Batches a second, since when, and those published since then.
    per_s: f64,
    since: Instant,
    published: u64,
    /// Batches since the caches were filled.
    batches: u64,
    /// The rank that publishes next, and the one that is attended next.
    turn: usize,
    attended: usize,
    last_attended: Instant,
    is_cut_off: bool,
}

/// Serves until the measuring process is gone.
///
/// # Errors
/// No port or no descriptor is left, or an event loop failed.
pub(crate) fn serve(args: &FleetEnginesArgs) -> Result<(), Failure> {
    // A limit that is too low shows as a socket that cannot be bound.
    let _ = descriptors::raise();
    let mut engines = Engines::new(args)?;
    let endpoints = engines.ranks.iter().map(Rank::endpoints).collect();
    say(&Reply::Endpoints(endpoints))?;
    nap_exactly();
    let (orders, began, mut received) = (orders(), Instant::now(), Vec::new());
    loop {
        match orders.try_recv() {
            Ok(order) => say(&engines.obey(order)?)?,
            Err(TryRecvError::Disconnected) => return Ok(()),
            Err(TryRecvError::Empty) => {}
        }
        let is_busy = engines.publish();
        let now_ms = began.elapsed().as_millis() as u64;
        engines.attend(now_ms, &mut received).map_err(Failure::system("serve the sockets of engines"))?;
        if !engines.answer() && !is_busy {
            nap(PAUSE);
        }
    }
}

/// The orders, read by a thread.
fn orders() -> Receiver<Order> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { return };
            if sender.send(order).is_err() {
                return;
            }
        }
    });
    receiver
}

fn say(reply: &Reply) -> Result<(), Failure> {
    let line = serde_json::to_string(reply).map_err(|error| Failure::Child(error.to_string()))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Failure::system("write to the parent process"))
}

fn new_ranks(worker: u32, ranks: u32, cache_blocks: u32) -> Result<Vec<Rank>, Failure> {
    (0..ranks).map(|rank| Rank::new(Owner { worker, rank }, cache_blocks)).collect()
}

impl Engines {
    fn new(args: &FleetEnginesArgs) -> Result<Self, Failure> {
        let mut ranks = Vec::new();
        for worker in &args.workers {
            ranks.extend(new_ranks(*worker, args.ranks, args.cache_blocks)?);
        }
        Ok(Self {
            ranks,
            ranks_per_worker: args.ranks,
            cache_blocks: args.cache_blocks,
            loss: args.loss,
            per_s: 0.0,
            since: Instant::now(),
            published: 0,
            batches: 0,
            turn: 0,
            attended: 0,
            last_attended: Instant::now(),
            is_cut_off: false,
        })
    }

    fn obey(&mut self, order: Order) -> Result<Reply, Failure> {
        match order {
            Order::Fill => self.ranks.iter_mut().for_each(Rank::fill),
            Order::Publish { per_s } => (self.per_s, self.since, self.published) = (per_s, Instant::now(), 0),
            Order::CutOff { begins } => self.is_cut_off = begins,
            Order::State => return Ok(Reply::State(self.ranks.iter().map(Rank::state).collect())),
            Order::Replace { worker, by } => {
                let Some(place) = self.ranks.iter().position(|rank| rank.worker() == worker) else {
                    return Err(Failure::Child(format!("there is no worker {worker}")));
                };
                let ranks = new_ranks(by, self.ranks_per_worker, self.cache_blocks)?;
                let endpoints = ranks.iter().map(Rank::endpoints).collect();
                self.ranks.splice(place..place + self.ranks_per_worker as usize, ranks);
                return Ok(Reply::Endpoints(endpoints));
            }
        }
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Ok(Reply::Done { batches: self.batches, cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64 })
    }

    /// Publishes what is due, or some of it; `true` = more is due.
    fn publish(&mut self) -> bool {
        let due = (self.since.elapsed().as_secs_f64() * self.per_s) as u64;
        let now = due.saturating_sub(self.published).min(PUBLISH_BATCHES_MAX);
        let loss = if self.is_cut_off { 1.0 } else { self.loss };
        for _ in 0..now {
            self.turn = (self.turn + 1) % self.ranks.len();
            self.ranks[self.turn].step(loss);
        }
        self.published += now;
        self.batches += now;
        self.published < due
    }

    /// Attends as many ranks as are due, and those whose replays go on: a recovery is not to wait for its turn.
    fn attend(&mut self, now_ms: u64, received: &mut Vec<(PeerId, Message)>) -> std::io::Result<()> {
        if self.is_cut_off {
            return Ok(());
        }
        let every = ATTEND_EVERY[usize::from(self.per_s == 0.0)].as_secs_f64();
        let share = self.last_attended.elapsed().as_secs_f64() / every;
        let due = ((share * self.ranks.len() as f64) as usize).min(self.ranks.len());
        if due == 0 {
            return Ok(());
        }
        self.last_attended = Instant::now();
        for _ in 0..due {
            self.attended = (self.attended + 1) % self.ranks.len();
            self.ranks[self.attended].attend(now_ms, received)?;
        }
        for rank in self.ranks.iter_mut().filter(|rank| rank.has_requester()) {
            rank.attend(now_ms, received)?;
        }
        Ok(())
    }

    /// Goes on with answers; `true` = there is more.
    fn answer(&mut self) -> bool {
        !self.is_cut_off && self.ranks.iter_mut().fold(false, |more, rank| rank.answer() | more)
    }
}
