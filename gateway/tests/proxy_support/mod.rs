//! What the tests of the proxy share: engines and callers that speak bytes, and a router that chooses as it is told.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod caller;
pub(crate) mod choice;
pub(crate) mod engine;
pub(crate) mod gateway;

use std::future::Future;
use std::time::Duration;

/// Waits until something holds. A test that waits for ever is ended by this.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}: it never came to hold");
}

/// The result of something that must end.
pub(crate) async fn ends<T>(what: &str, future: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(Duration::from_secs(30), future).await;
    ended.unwrap_or_else(|_| panic!("{what}: it never ended"))
}
