//! Which places of the fleet's tables are free, and who comes next to each.

use std::collections::BTreeSet;

use crate::ids::WorkerIndex;
use crate::limits::WORKERS_MAX;

/// The places of all workers, up to `WORKERS_MAX`. A place is given again under the next generation, so that
/// whatever still names its last owner names nobody; a place whose generations are used up stays empty.
#[derive(Debug, Default)]
pub struct PlaceAllocator {
    /// The next generation of every place ever given.
    generations: Vec<u32>,
    free: BTreeSet<u16>,
}

impl PlaceAllocator {
    /// The lowest place that is free; `None` when all are taken.
    pub fn take(&mut self) -> Option<WorkerIndex> {
        let place = match self.free.pop_first() {
            Some(place) => place,
            None if self.generations.len() < WORKERS_MAX => {
                self.generations.push(0);
                (self.generations.len() - 1) as u16
            }
            None => return None,
        };
        Some(WorkerIndex::at(place, self.generations[usize::from(place)]))
    }

    /// Frees the place of `index`, once nothing can act in its name any more.
    pub fn give_back(&mut self, index: WorkerIndex) {
        let Some(next) = self.generations.get_mut(index.place()) else { return };
        if *next != index.generation() {
            return;
        }
        *next += 1;
        if *next < WorkerIndex::GENERATIONS {
            self.free.insert(index.place() as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_given_again_names_another() {
        let mut places = PlaceAllocator::default();
        let [a, b, c] = std::array::from_fn(|_| places.take().unwrap());
        assert_eq!([a, b, c], [WorkerIndex(0), WorkerIndex(1), WorkerIndex(2)]);
        places.give_back(b);
        places.give_back(b);
        let again = places.take().unwrap();
        assert_eq!((again.place(), again.generation()), (1, 1));
        assert_ne!(again, b);
        places.give_back(b);
        assert_eq!(places.take(), Some(WorkerIndex(3)), "who has left cannot free the place of who came after");
    }

    #[test]
    fn places_end_and_so_do_generations() {
        let mut places = PlaceAllocator::default();
        let all: Vec<_> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(all.len(), WORKERS_MAX);
        let last = WorkerIndex::at(7, WorkerIndex::GENERATIONS - 1);
        places.generations[7] = last.generation();
        places.give_back(last);
        assert_eq!(places.take(), None, "no number would come twice");
    }
}
