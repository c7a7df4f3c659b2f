//! What a look-up finds, by worker.

use crate::ids::{WORKER_PLACE_BITS, WorkerIndex};

/// How far each worker already runs a prompt, in blocks. Kept from one look-up to the next.
#[derive(Debug, Default)]
pub struct ActiveDepths {
    /// By place: the worker and its depth; 0 = it runs nothing of the prompt.
    by_place: Vec<(u32, u32)>,
    /// Places with a depth.
    noted: Vec<u32>,
}

impl ActiveDepths {
    /// Leading blocks of the prompt that a worker already runs.
    #[must_use]
    pub fn of(&self, worker: WorkerIndex) -> u32 {
        self.by_place.get(worker.place()).filter(|(whose, _)| *whose == worker.0).map_or(0, |(_, depth)| *depth)
    }

    /// The workers that run some of the prompt, and how many leading blocks of it.
    pub fn iter(&self) -> impl Iterator<Item = (WorkerIndex, u32)> {
        let entries = self.noted.iter().map(|place| self.by_place[*place as usize]);
        entries.map(|(worker, depth)| (WorkerIndex(worker), depth))
    }

    /// Forgets what was found.
    pub fn clear(&mut self) {
        for place in self.noted.drain(..) {
            self.by_place[place as usize].1 = 0;
        }
    }

    /// A worker runs so many leading blocks; later calls say more. Of two that had a place one after the other, the
    /// later counts: the other has left.
    #[inline]
    pub(super) fn note(&mut self, worker: u32, depth: u32) {
        let place = WorkerIndex(worker).place();
        if place >= self.by_place.len() {
            self.by_place.resize((place + 1).next_power_of_two().min(1 << WORKER_PLACE_BITS), (0, 0));
        }
        let entry = &mut self.by_place[place];
        if entry.1 == 0 {
            self.noted.push(place as u32);
        }
        if entry.1 == 0 || worker >= entry.0 {
            *entry = (worker, depth);
        }
    }
}
