//! The HTTP port: what clients of Dynamo 1.6.1's standalone indexer and selection service ask, with the shapes and
//! statuses they know, and what watches a daemon: `/metrics`, `/health`, `/ready`.
//!
//! ```text
//! TcpListener ─ hyper ─▶ axum ─▶ Bodies (JSON in bounds) ─▶ handlers ─┬─▶ Desk ─ frames ─▶ RoutingResponder ─▶ Service
//!                                                                     └─▶ HttpBackend (workers, dumps, metrics)
//! ```
//!
//! It has a thread and a runtime of its own, so that no serving core ever waits for it. To the rest of the daemon it is one
//! more gateway: a request becomes a frame of the routing protocol and is answered by the code that answers sockets,
//! with its queue, its bookings and its counters. All bookings made here belong to one session, which ends with the
//! daemon; a client that goes does not end them, as it does not there.

mod app;
mod body;
mod desk;
mod dump;
mod fields;
mod indexer;
pub(super) mod listener;
mod materials;
mod orders;
pub(super) mod pages;
mod places;
mod progress;
mod questions;
mod records;
mod refusal;
mod replies;
mod selection;
mod selections;
mod space;
mod workers;

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::thread;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{delete, get, patch, post};
use tokio::sync::watch;

pub use app::HttpBackend;
pub use orders::WorkerOrder;

use crate::config::HttpConfig;
use crate::error::{Error, Kind, Result};
use crate::limits::{HTTP_CONNECTIONS_MAX, HTTP_CONNECTIONS_RESERVED};
use crate::metrics::{CoreCounter, CounterSet, HttpCounter};
use crate::serve::Service;
use app::App;
use desk::Desk;
use listener::{Patience, Terms};

/// A port that is bound, and serves nobody yet.
#[derive(Debug)]
pub struct HttpPort {
    listener: std::net::TcpListener,
    config: HttpConfig,
}

/// What an HTTP port counts.
#[derive(Clone, Debug, Default)]
pub struct HttpMetrics {
    /// Of HTTP.
    pub http: Arc<CounterSet<HttpCounter>>,
    /// Of the requests that came of it, as every core counts them.
    pub core: Arc<CounterSet<CoreCounter>>,
}

impl HttpPort {
    /// Binds the configured port; `None` = there is to be none.
    ///
    /// # Errors
    /// [`Kind::System`] if it is taken or may not be bound.
    pub fn bind(config: &HttpConfig) -> Result<Option<Self>> {
        if config.port == 0 {
            return Ok(None);
        }
        let address = SocketAddr::from((config.listen, config.port));
        let bound = std::net::TcpListener::bind(address)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|cause| {
                let message = format!("cannot bind the HTTP port {address}");
                Error::new(Kind::System, message, "choose another http.port or http.listen").caused_by(cause)
            })?;
        if !config.listen.is_loopback() {
            tracing::warn!(%address, administer = config.administer, "the HTTP port can be reached from other machines, and asks for no credentials");
        }
        Ok(Some(Self { listener: bound, config: config.clone() }))
    }

    /// Serves it by a thread of its own, as core number `core` of the waiting room. Returns once it does.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread or its runtime cannot be had; why `service` opens no session.
    pub fn start<S: Service + Send + 'static>(
        self,
        service: S,
        core: usize,
        metrics: HttpMetrics,
        backend: Arc<dyn HttpBackend>,
    ) -> Result<HttpThread> {
        let (end, ending) = watch::channel(false);
        let (send, started) = mpsc::sync_channel(1);
        let body = move || {
            let Self { listener, config } = self;
            let HttpMetrics { http, core: core_counters } = metrics;
            let prepared = prepare(listener).and_then(|(runtime, listener)| {
                let desk = Desk::open(service, core, core_counters, Arc::clone(&http))?;
                Ok((runtime, listener, Arc::new(App::new(desk, backend, Arc::clone(&http), config))))
            });
            match prepared {
                // The receiver waits for exactly this.
                Err(error) => drop(send.send(Err(error))),
                Ok((runtime, listener, app)) => {
                    drop(send.send(Ok(())));
                    runtime.block_on(run(listener, app, http, ending));
                    // A dump that nobody reads to its end ends by itself.
                    runtime.shutdown_background();
                }
            }
        };
        let unavailable = |cause: std::io::Error| {
            Error::new(Kind::System, "cannot start the thread of the HTTP port", "raise the limit of processes")
                .caused_by(cause)
        };
        let thread = thread::Builder::new().name("kvrouted-http".into()).spawn(body).map_err(unavailable)?;
        started.recv().map_err(|_| panicked())??;
        Ok(HttpThread { end, thread })
    }
}

/// A running HTTP port.
#[derive(Debug)]
pub struct HttpThread {
    end: watch::Sender<bool>,
    thread: thread::JoinHandle<()>,
}

impl HttpThread {
    /// Whether it still serves.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Ends it: what is being answered is answered, for a moment.
    ///
    /// # Errors
    /// [`Kind::Internal`] if it panicked.
    pub fn stop(self) -> Result<()> {
        // Gone only with the thread.
        let _ = self.end.send(true);
        self.thread.join().map_err(|_| panicked())
    }
}

fn panicked() -> Error {
    Error::new(Kind::Internal, "the HTTP port ended by a panic", "report it with the log's last lines")
}

fn prepare(listener: std::net::TcpListener) -> Result<(tokio::runtime::Runtime, tokio::net::TcpListener)> {
    let failed = |cause: std::io::Error| {
        Error::new(Kind::System, "cannot serve the HTTP port", "see the cause").caused_by(cause)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(failed)?
    };
    Ok((runtime, listener))
}

async fn run(
    listener: tokio::net::TcpListener,
    app: Arc<App>,
    counters: Arc<CounterSet<HttpCounter>>,
    ending: watch::Receiver<bool>,
) {
    let terms = Terms {
        patience: Patience::default(),
        connections_max: HTTP_CONNECTIONS_MAX,
        reserved: (HTTP_CONNECTIONS_RESERVED, reserve_router(Arc::clone(&app))),
    };
    let serving = listener::serve(listener, router(Arc::clone(&app)), terms, counters, ending);
    tokio::select! {
        () = serving => {}
        () = app.desk.serve_late() => {}
    }
    app.desk.drain();
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/register", post(indexer::register))
        .route("/unregister", post(indexer::unregister))
        .route("/query", post(indexer::query))
        .route("/query_by_hash", post(indexer::query_by_hash))
        .route("/register_peer", post(indexer::no_peers))
        .route("/deregister_peer", post(indexer::no_peers))
        .route("/peers", get(indexer::peers))
        .route("/reopen_logs", post(indexer::reopen_logs))
        .route("/replica_sync/register_peer", post(indexer::no_peers))
        .route("/replica_sync/deregister_peer", post(indexer::no_peers))
        .route("/replica_sync/peers", get(indexer::peers))
        .route("/dump", get(dump::dump))
        .route("/workers", get(workers::list).post(workers::create))
        .route("/workers/{worker_id}", patch(workers::patch).delete(workers::delete))
        .route("/select", post(selection::select))
        .route("/select_and_reserve", post(selection::select_and_reserve))
        .route("/reservations", post(selection::reserve))
        .route("/reservations/{selection_id}", delete(selection::free))
        .route("/reservations/{selection_id}/prefill_complete", post(selection::prefill_complete))
        .route("/reservations/{selection_id}/output_block", post(selection::output_block))
        .route("/loads", get(questions::loads))
        .route("/potential_loads", post(questions::potential_loads))
        .route("/overlap_scores", post(questions::overlap_scores))
        .route("/ready", get(questions::ready))
        .layer(from_fn_with_state(Arc::clone(&app), replies::bound))
        .merge(watching())
        .fallback(questions::not_found)
        .method_not_allowed_fallback(questions::method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), pages::refuse))
        .layer(from_fn_with_state(Arc::clone(&app), count))
        .with_state(app)
}

/// What watches a daemon. Readiness lists workers, and is bound as every other reply is; the metrics page is bound where
/// it is made.
fn watching() -> Router<Arc<App>> {
    Router::new().route("/health", get(questions::health)).route("/metrics", get(questions::metrics))
}

/// What is answered while the daemon works for all other connections.
fn reserve_router(app: Arc<App>) -> Router {
    watching()
        .fallback(questions::crowded)
        .method_not_allowed_fallback(questions::method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), pages::refuse))
        .layer(from_fn_with_state(Arc::clone(&app), count))
        .with_state(app)
}

/// Counts a request by what came of it.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let status = response.status();
    app.counters.bump(HttpCounter::Requests);
    if status.is_client_error() {
        app.counters.bump(HttpCounter::Refused);
    } else if status.is_server_error() {
        app.counters.bump(HttpCounter::Failed);
    }
    response
}
