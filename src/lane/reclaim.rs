//! Gives back the memory of lanes that have ended, once their gateways have let go of it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::memory::EndedMemory;
use crate::limits::{LANE_RECLAIM_REST_MS_MAX, LANE_RECLAIM_REST_MS_MIN};

/// The lanes that have ended and whose memory is not given back yet. A thread looks after them while there are some.
#[derive(Default)]
pub struct Reclaimer {
    ended: Mutex<Ended>,
    /// Rings when one comes.
    came: Condvar,
}

#[derive(Default)]
struct Ended {
    memories: Vec<EndedMemory>,
    /// Those that the thread has in hand.
    in_hand: usize,
    is_running: bool,
}

impl std::fmt::Debug for Reclaimer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").field("waiting", &self.waiting()).finish()
    }
}

impl Reclaimer {
    /// Lanes that have ended and whose memory their gateways still hold.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let ended = self.ended.lock();
        ended.memories.len() + ended.in_hand
    }

    /// Takes over the memory of a lane that has ended. Never waits.
    pub(super) fn take_over(self: &Arc<Self>, memory: EndedMemory) {
        let mut ended = self.ended.lock();
        ended.memories.push(memory);
        self.came.notify_one();
        if ended.is_running {
            return;
        }
        let reclaimer = Arc::clone(self);
        // A thread of its own: to give back the pages of large rings takes longer than a core may be away.
        match std::thread::Builder::new().name("kvrouted-lane-end".into()).spawn(move || reclaimer.run()) {
            Ok(_) => ended.is_running = true,
            Err(error) => {
                tracing::warn!(%error, "the memory of ended lanes is given back when the next lane ends");
            }
        }
    }

    /// Tries until nothing is left, with growing rests while nothing new comes.
    fn run(&self) {
        let mut rest_ms = LANE_RECLAIM_REST_MS_MIN;
        loop {
            let memories = {
                let mut ended = self.ended.lock();
                ended.in_hand = ended.memories.len();
                std::mem::take(&mut ended.memories)
            };
            let held: Vec<EndedMemory> = memories.into_iter().filter_map(EndedMemory::give_back).collect();
            let mut ended = self.ended.lock();
            let has_new = !ended.memories.is_empty();
            ended.in_hand = 0;
            ended.memories.extend(held);
            if ended.memories.is_empty() {
                ended.is_running = false;
                return;
            }
            let came = has_new || !self.came.wait_for(&mut ended, Duration::from_millis(rest_ms)).timed_out();
            rest_ms = if came { LANE_RECLAIM_REST_MS_MIN } else { (rest_ms * 2).min(LANE_RECLAIM_REST_MS_MAX) };
        }
    }
}
