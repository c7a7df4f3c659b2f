//! `grpc.health.v1.Health`: Envoy and Kubernetes ask it whether the picker takes requests.
//!
//! | name | SERVING |
//! |---|---|
//! | `liveness` | always: the process answers |
//! | `readiness`, `envoy.service.ext_proc.v3.ExternalProcessor`, empty | while requests are served, see below |
//!
//! Requests are served while there are endpoints and a way to choose among them, and the picker is not shutting down.

use std::sync::Arc;

use futures_util::stream::{self, Stream};
use tokio::sync::watch;
use tonic::Status;

use super::messages::{EXTERNAL_PROCESSOR, HealthCheckResponse};
use crate::limits::EPP_HEALTH_WATCHES_MAX;

/// Whether the picker takes requests. Clones share one state.
#[derive(Clone, Debug)]
pub struct Health(Arc<watch::Sender<Readiness>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Readiness {
    is_ready: bool,
    is_ending: bool,
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl Health {
    /// Not ready yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Readiness { is_ready: false, is_ending: false })))
    }

    /// Says whether requests can be served. Without effect once the picker ends.
    pub fn set_ready(&self, is_ready: bool) {
        self.0.send_if_modified(|state| std::mem::replace(&mut state.is_ready, is_ready) != is_ready);
    }

    /// The picker is shutting down: it is never ready again.
    pub fn end(&self) {
        self.0.send_if_modified(|state| !std::mem::replace(&mut state.is_ending, true));
    }

    /// Whether requests are served.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.0.borrow().is_serving()
    }

    /// The status of a name.
    ///
    /// # Errors
    /// `NOT_FOUND` for a name that is not in the table.
    pub(super) fn check(&self, name: &str) -> Result<HealthCheckResponse, Status> {
        let status = status(name, *self.0.borrow());
        match status {
            HealthCheckResponse::SERVICE_UNKNOWN => Err(Status::not_found("this picker has no service of that name")),
            status => Ok(HealthCheckResponse { status }),
        }
    }

    /// The status of a name, now and after each change.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if there are as many watches as may be: nothing else ends one before its caller does.
    pub(super) fn watch(
        &self,
        name: String,
    ) -> Result<impl Stream<Item = Result<HealthCheckResponse, Status>> + Send + use<>, Status> {
        if self.0.receiver_count() >= EPP_HEALTH_WATCHES_MAX {
            return Err(Status::resource_exhausted("health is watched as often as it can be; check it instead"));
        }
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        Ok(stream::unfold((receiver, name, None), |(mut receiver, name, mut last)| async move {
            loop {
                receiver.changed().await.ok()?;
                let now = status(&name, *receiver.borrow_and_update());
                if last != Some(now) {
                    last = Some(now);
                    return Some((Ok(HealthCheckResponse { status: now }), (receiver, name, last)));
                }
            }
        }))
    }
}

impl Readiness {
    fn is_serving(self) -> bool {
        self.is_ready && !self.is_ending
    }
}

fn status(name: &str, state: Readiness) -> i32 {
    match name {
        "liveness" => HealthCheckResponse::SERVING,
        "" | "readiness" | EXTERNAL_PROCESSOR if state.is_serving() => HealthCheckResponse::SERVING,
        "" | "readiness" | EXTERNAL_PROCESSOR => HealthCheckResponse::NOT_SERVING,
        _ => HealthCheckResponse::SERVICE_UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_watched_so_often_and_again_when_a_watch_ends() {
        let health = Health::new();
        let watch = || health.watch(String::new());
        let mut watches: Vec<_> = (0..EPP_HEALTH_WATCHES_MAX).map(|_| watch().expect("there is room")).collect();
        assert!(watch().is_err_and(|status| status.code() == tonic::Code::ResourceExhausted));
        watches.pop();
        assert!(watch().is_ok());
    }
}
