//! Reads of files that a file system may hold up, each within a limit of time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::snapshot::Refusal;

/// Makes such reads, on threads beside the one that waits for them.
#[derive(Debug)]
pub(super) struct TimedReads<T> {
    /// Limits what is read, and in use, at once.
    places: Arc<Semaphore>,
    time_max: Duration,
    /// The read that was not over in time. Until it ends no other begins: the file system would hold up that one too. So
    /// no more than one thread hangs, and only one read in a row takes all of its time.
    overdue: Arc<Mutex<Option<JoinHandle<T>>>>,
}

impl<T> Clone for TimedReads<T> {
    fn clone(&self) -> Self {
        Self { places: Arc::clone(&self.places), time_max: self.time_max, overdue: Arc::clone(&self.overdue) }
    }
}

impl<T: Send + 'static> TimedReads<T> {
    /// At most `places` reads at once, and `time_max` for each.
    pub(super) fn new(places: usize, time_max: Duration) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), time_max, overdue: Arc::default() }
    }

    /// What `read` returns, and the place that it takes until this is dropped.
    ///
    /// # Errors
    /// `Late` if it did not return in time, if there was no place in time, or if an earlier one has not returned yet;
    /// `Unreadable` if it panicked.
    pub(super) async fn read(
        self,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(T, OwnedSemaphorePermit), Refusal> {
        if self.overdue.lock().as_ref().is_some_and(|reading| !reading.is_finished()) {
            return Err(Refusal::Late);
        }
        let mut begun = None;
        let in_place = async {
            // The semaphore is never closed.
            let place = Arc::clone(&self.places).acquire_owned().await.map_err(|_| Refusal::Late)?;
            let read = begun.insert(spawn_blocking(read)).await.map_err(|_| Refusal::Unreadable)?;
            Ok((read, place))
        };
        let in_time = timeout(self.time_max, in_place).await;
        in_time.unwrap_or_else(|_| {
            *self.overdue.lock() = begun;
            Err(Refusal::Late)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_read_that_hangs_is_late_once_and_others_are_made_again_when_it_has_ended() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let reads = TimedReads::<u8>::new(2, Duration::from_secs(3));
        let (end, ended) = mpsc::channel::<()>();
        let hang = move || {
            let _ = ended.recv();
            1
        };
        let read = |of: u8| reads.clone().read(move || of);
        runtime.block_on(async {
            let (read_before, place) = read(7).await.expect("in time");
            assert_eq!(read_before, 7);
            assert_eq!(reads.clone().read(hang).await.err(), Some(Refusal::Late));
            for _ in 0..100 {
                assert_eq!(read(2).await.err(), Some(Refusal::Late), "it would hang as well");
            }
            drop(end);
            let until = Instant::now() + Duration::from_secs(30);
            while read(3).await.is_err() {
                assert!(Instant::now() < until, "reads are made again");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let second = read(4).await.expect("there are two places");
            assert_eq!(read(5).await.err(), Some(Refusal::Late), "both are taken");
            drop(place);
            assert!(read(6).await.is_ok_and(|(read, _)| read == 6), "waiting for a place hangs no thread");
            drop(second);
        });
        assert_eq!(runtime.block_on(reads.clone().read(|| panic!("on purpose"))).err(), Some(Refusal::Unreadable));
    }
}
