//! How the daemon ends where a thread panics whose state cannot be rebuilt.
//!
//! | thread | what its panic costs |
//! |---|---|
//! | ingest | its shard's index, which is rebuilt (`ingest::rebuild`); the daemon lives |
//! | control | the daemon drains as on SIGTERM, and ends with the code of an internal error (70) |
//! | a serving core, the predictor, snapshots, the journal's writer, loads, the HTTP port | the same, within half a second |
//! | a task that reads a file of workers or asks an engine | that reading or answer; it is repeated |
//!
//! To drain is to take no new connections, to answer what has been read, and to write the last snapshots. So a panic
//! must never leave the control thread: unwinding beyond it would end the process with everything undone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;

/// What the control thread's future comes to: an error with its name where it panicked. It is not polled again then.
pub(super) async fn caught<T>(future: impl Future<Output = Result<T, &'static str>>) -> Result<T, &'static str> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        // What the future shares with the drain is cells and channels, each whole after every call.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(polled) => polled,
            Err(_) => std::task::Poll::Ready(Err("the control thread")),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_answer_and_goes_no_further() {
        assert_eq!(caught(async { Ok(7) }).await, Ok(7));
        let late = async {
            tokio::task::yield_now().await;
            panic!("on purpose");
        };
        assert_eq!(caught::<u8>(late).await, Err("the control thread"));
    }
}
