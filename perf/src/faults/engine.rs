//! A simulated engine in its place: a thread that computes at a steady rate, and notes what it holds.

use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::namespace::Namespace;
use super::truth::Truth;
use crate::failure::Failure;
use crate::ingest::nap;
use crate::large_fleet::contents::{Owner, Step};
use crate::large_fleet::engine::{Rank, Sockets};

/// Where an engine publishes.
pub(super) const EVENTS_PORT: u16 = 5557;
/// Where it answers questions for past batches.
pub(super) const REPLAY_PORT: u16 = 5657;
/// The pause between two looks at the sockets.
const PAUSE: Duration = Duration::from_millis(1);

/// An order to an engine.
enum Order {
    /// End with all sockets, and begin anew after a while.
    Die(Duration),
    /// Drop this share of the batches.
    Drop(f64),
    /// Compute no more, and go on answering.
    Rest,
}

/// An engine. It ends with this.
pub(super) struct Engine {
    orders: Sender<Order>,
    truth: Arc<Mutex<Truth>>,
    /// Nothing once it has started, then why it ended.
    reports: Receiver<Result<(), Failure>>,
}

/// What stays the same over the lives of an engine.
struct Life {
    worker: u32,
    address: std::net::Ipv4Addr,
    cache_blocks: u32,
    batches_per_s: f64,
}

impl Engine {
    /// Starts the engine of a worker with a full cache.
    ///
    /// # Errors
    /// It does not start.
    pub(super) fn start(
        place: &Arc<Namespace>,
        worker: u32,
        cache_blocks: u32,
        batches_per_s: f64,
    ) -> Result<Self, Failure> {
        let (orders, received) = mpsc::channel();
        let (reporter, reports) = mpsc::channel();
        let (truth, place) = (Arc::new(Mutex::new(Truth::default())), Arc::clone(place));
        let life = Life { worker, address: place.address(), cache_blocks, batches_per_s };
        let noted = Arc::clone(&truth);
        thread::spawn(move || {
            let lived = place.enter().and_then(|()| live(&life, &received, &noted, &reporter));
            // Nobody hears it if the run is over.
            let _ = reporter.send(lived);
        });
        reports.recv().map_err(|_| Failure::Contract("an engine's thread panicked".to_owned()))??;
        Ok(Self { orders, truth, reports })
    }

    /// What it held.
    pub(super) fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it, and begins it anew after a while.
    pub(super) fn die(&self, pause: Duration) {
        self.tell(Order::Die(pause));
    }

    /// Drops this share of its batches from now on.
    pub(super) fn drop_batches(&self, share: f64) {
        self.tell(Order::Drop(share));
    }

    /// Computes no more.
    pub(super) fn rest(&self) {
        self.tell(Order::Rest);
    }

    /// Whether it lives.
    ///
    /// # Errors
    /// Why it does not.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.reports.try_recv() {
            Err(TryRecvError::Empty) => Ok(()),
            Ok(Err(failure)) => Err(failure),
            Ok(Ok(())) | Err(TryRecvError::Disconnected) => {
                Err(Failure::Contract("an engine's thread ended".to_owned()))
            }
        }
    }

    fn tell(&self, order: Order) {
        // An engine that has ended is found by `check`.
        let _ = self.orders.send(order);
    }
}

/// One life after the other, until the process ends.
fn live(
    life: &Life,
    orders: &Receiver<Order>,
    truth: &Mutex<Truth>,
    reporter: &Sender<Result<(), Failure>>,
) -> Result<(), Failure> {
    for number in 0.. {
        let mut rank = life.begin(number, truth)?;
        // Only the first life is waited for.
        if number == 0 {
            let _ = reporter.send(Ok(()));
        }
        let Some(pause) = life.run(&mut rank, orders, truth)? else { break };
        drop(rank);
        thread::sleep(pause);
    }
    Ok(())
}

/// Computes a step. What it changes is noted under the same lock: a daemon may know the batch as soon as it is published.
fn step(rank: &mut Rank, loss: f64, truth: &Mutex<Truth>) {
    let mut truth = truth.lock().unwrap_or_else(PoisonError::into_inner);
    let (seq, Step { stored, removed }) = rank.step(loss);
    for range in [Some(stored), removed].into_iter().flatten() {
        truth.note(seq, range.prompt, rank.depth(range.prompt));
    }
}

impl Life {
    fn begin(&self, number: u64, truth: &Mutex<Truth>) -> Result<Rank, Failure> {
        let sockets = Sockets {
            events: format!("tcp://{}:{EVENTS_PORT}", self.address),
            replays: format!("tcp://{}:{REPLAY_PORT}", self.address),
        };
        let mut rank = Rank::bound(Owner { worker: self.worker, rank: 0 }, self.cache_blocks, &sockets, number)?;
        truth.lock().unwrap_or_else(PoisonError::into_inner).begin(Instant::now());
        while !rank.is_full() {
            step(&mut rank, 0.0, truth);
        }
        Ok(rank)
    }

    /// Computes until it dies, and for how long it is dead then; `None` = the process ends.
    fn run(
        &self,
        rank: &mut Rank,
        orders: &Receiver<Order>,
        truth: &Mutex<Truth>,
    ) -> Result<Option<Duration>, Failure> {
        let (began, mut loss, mut per_s) = (Instant::now(), 0.0, self.batches_per_s);
        let (mut computed, mut received) = (0, Vec::new());
        loop {
            match orders.try_recv() {
                Ok(Order::Die(pause)) => return Ok(Some(pause)),
                Ok(Order::Drop(share)) => loss = share,
                Ok(Order::Rest) => per_s = 0.0,
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) => {}
            }
            let due = (began.elapsed().as_secs_f64() * per_s) as u64;
            while computed < due {
                step(rank, loss, truth);
                computed += 1;
            }
            rank.attend(began.elapsed().as_millis() as u64, &mut received)
                .map_err(Failure::system("serve the sockets of an engine"))?;
            if !rank.answer() {
                nap(PAUSE);
            }
        }
    }
}
