//! The task behind an async client: makes the connection, carries bytes both ways, and makes it again when it breaks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::carrying::{Ended, carry};
use super::connecting::connect;
use super::lane::Lane;
use super::options::SteadyOptions;
use crate::client::connection::LaneUse;
use crate::client::conversation::{Conversation, Phase, Told, Waiter};
use crate::client::fallback::Fleet;
use crate::client::handed::distrust;
use crate::error::{Error, Kind, Result};
use crate::protocol::SessionToken;

/// A task that waits for its reply, and its place among those in flight, which is free when the reply has come.
pub(super) struct Caller {
    pub(super) reply: oneshot::Sender<Result<Told>>,
    pub(super) _place: OwnedSemaphorePermit,
}

impl Waiter for Caller {
    fn hand(self, told: Result<Told>) -> Option<Told> {
        self.reply.send(told).err().and_then(Result::ok)
    }
}

/// What an async client's handles and its task share.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    pub(super) options: SteadyOptions,
    pub(super) session: SessionToken,
    pub(super) conversation: Mutex<Conversation<Caller>>,
    /// The lane of the connection, if it has one. Locked after the conversation where both are.
    pub(super) lane: Mutex<Option<Lane>>,
    /// There is something to be sent, or a reply to be looked for.
    pub(super) wake: Notify,
    pub(super) places: Arc<Semaphore>,
    pub(super) phases: watch::Sender<Phase>,
    pub(super) fleets: watch::Sender<Arc<Fleet>>,
}

impl Shared {
    /// A number from 0 up to 1.
    pub(super) fn chance() -> f64 {
        rand::random()
    }

    /// Has what was put sent: by a lane at once as far as there is room, and else by the task.
    pub(super) fn put(&self, mut conversation: MutexGuard<'_, Conversation<Caller>>) {
        let mut lane = self.lane.lock();
        let is_looking = !self.options.spin.is_zero();
        if let Some(lane) = &mut *lane {
            // The task meets the same fault, and ends the connection.
            let went = lane.send(&mut conversation.unsent);
            if went.is_ok() && conversation.unsent.is_empty() && !is_looking {
                return;
            }
            // It is about to be woken, and need not be so by the daemon too.
            lane.settle();
        }
        drop((conversation, lane));
        self.wake.notify_one();
    }

    /// Tells those who wait for it what the conversation has come to.
    pub(super) fn publish(&self) {
        let conversation = self.conversation.lock();
        let (phase, fleet) = (conversation.phase, Arc::clone(&conversation.fleet));
        drop(conversation);
        self.phases.send_if_modified(|last| std::mem::replace(last, phase) != phase);
        self.fleets.send_if_modified(|last| {
            let is_new = !Arc::ptr_eq(last, &fleet);
            *last = fleet;
            is_new
        });
    }
}

/// Connects and carries, until the task is ended.
pub(super) async fn drive(shared: Arc<Shared>) {
    let mut wanted = shared.options.lane;
    loop {
        match timeout(shared.options.timeout, connect(&shared, wanted)).await {
            Ok(Ok(way)) => {
                shared.publish();
                let began = Instant::now();
                // Those who wait are told that it ended; nobody asks why.
                let ended = carry(&shared, &way).await;
                let is_stable = began.elapsed() >= shared.options.back_off.first;
                drop(shared.lane.lock().take());
                let mut conversation = shared.conversation.lock();
                conversation.ended(is_stable, Instant::now(), Shared::chance());
                wanted = match ended {
                    // Another lane may be no better; the connection after the next one asks for one again.
                    Ended::Lane(fault) if wanted == LaneUse::Try && !is_stable => {
                        conversation.refuse_lane(&distrust(&fault));
                        LaneUse::Off
                    }
                    _ => shared.options.lane,
                };
            }
            Ok(Err(error)) => shared.conversation.lock().failed(&error, Instant::now(), Shared::chance()),
            Err(_) => {
                let what = format!("no connection to {} within the timeout", shared.path.display());
                let error = Error::new(Kind::Connection, what, "check the daemon, or raise the timeout");
                shared.conversation.lock().failed(&error, Instant::now(), Shared::chance());
            }
        }
        shared.publish();
        let resting = shared.conversation.lock().silence.rests_until(Instant::now());
        if let Some(until) = resting {
            tokio::time::sleep_until(until.into()).await;
            let mut conversation = shared.conversation.lock();
            let is_first = conversation.silence.since().is_none();
            conversation.phase = Phase::Connecting { is_first };
            drop(conversation);
            // Those who found it due wait for what comes next, which may be another rest.
            shared.publish();
        }
    }
}

/// Waits until everything said has been answered, no longer than `patience`; whether it has.
pub(super) async fn settle(shared: &Shared, patience: Duration) -> bool {
    const LOOK_EVERY: Duration = Duration::from_millis(1);
    let settled = async {
        while !shared.conversation.lock().is_settled() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    timeout(patience, settled).await.is_ok()
}
