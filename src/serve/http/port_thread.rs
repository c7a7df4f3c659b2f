//! A thread that serves one TCP port in a runtime of its own: the HTTP port's, and the metrics port's.

use std::sync::{Arc, mpsc};
use std::thread;

use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::watch;

use crate::error::{Error, Kind, Result};
use crate::sandbox::{self, ThreadKind};
use crate::serve::turns::Turns;
use crate::watchdog::{Activity, ThreadMark, watched};

/// Registers a bound port with the runtime of the calling thread.
///
/// # Errors
/// [`Kind::System`] if the runtime cannot watch it.
pub(in crate::serve) fn register(listener: std::net::TcpListener, port: &str) -> Result<TcpListener> {
    TcpListener::from_std(listener).map_err(|cause| cannot_serve(port, cause))
}

/// A running thread that serves a port until [`PortThread::stop`].
#[derive(Debug)]
pub(crate) struct PortThread {
    end: watch::Sender<bool>,
    thread: thread::JoinHandle<()>,
    port: &'static str,
}

impl PortThread {
    /// Starts the thread `name`, of this kind. It calls `prepare` inside its runtime, and runs the future that `prepare`
    /// returns. The argument of `prepare` becomes true when the future shall end. This returns once `prepare` has
    /// returned. `port` names the port in errors. Each poll of the future is a round of the thread, with this activity.
    ///
    /// In a daemon that takes over from another one, `prepare` is called only when its turn begins.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread or its runtime cannot be started; the error of `prepare`.
    pub(in crate::serve) fn start<F: Future<Output = ()>>(
        (name, kind): (&str, ThreadKind),
        (port, turns): (&'static str, &Turns),
        (mark, activity): (Arc<ThreadMark>, Activity),
        prepare: impl FnOnce(watch::Receiver<bool>) -> Result<F> + Send + 'static,
    ) -> Result<Self> {
        let (end, ending) = watch::channel(false);
        let (send, started) = mpsc::sync_channel(1);
        let (turns, is_ours) = (turns.clone(), turns.is_ours());
        let body = move || {
            let member = turns.join();
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                // The receiver waits for this message, here and below.
                Err(cause) => return drop(send.send(Err(cannot_serve(port, cause)))),
            };
            if !is_ours {
                sandbox::enter(kind);
                drop(send.send(Ok(())));
                if !runtime.block_on(comes(&turns, ending.clone())) {
                    return;
                }
            }
            let prepared = {
                let _inside = runtime.enter();
                prepare(ending)
            };
            if is_ours {
                sandbox::enter(kind);
            }
            match prepared {
                Err(error) if is_ours => drop(send.send(Err(error))),
                Err(error) => tracing::error!(%error, "a port cannot be served"),
                Ok(serving) => {
                    // No caller waits if the turn was another daemon's.
                    drop(send.try_send(Ok(())));
                    let serving = async {
                        tokio::select! { () = serving => {}, () = member.stand_by() => {} }
                    };
                    runtime.block_on(watched(mark, activity, serving));
                    // A dump whose reader stalls ends by itself.
                    runtime.shutdown_background();
                }
            }
        };
        let unavailable = |cause: std::io::Error| {
            let message = format!("cannot start the thread of the {port}");
            Error::new(Kind::System, message, "raise the limit of processes").caused_by(cause)
        };
        let thread = thread::Builder::new().name(name.into()).spawn(body).map_err(unavailable)?;
        started.recv().map_err(|_| panicked(port))??;
        Ok(Self { end, thread, port })
    }

    /// The port's name in errors.
    #[must_use]
    pub(crate) const fn port(&self) -> &'static str {
        self.port
    }

    /// Whether the thread still runs.
    #[must_use]
    pub(crate) fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Ends it. Requests in progress get a moment to finish.
    ///
    /// # Errors
    /// [`Kind::Internal`] if it panicked.
    pub(crate) fn stop(self) -> Result<()> {
        // The receiver is gone only if the thread has ended.
        let _ = self.end.send(true);
        self.thread.join().map_err(|_| panicked(self.port))
    }
}

/// Waits for the daemon's turn. `false` = the thread shall end before.
async fn comes(turns: &Turns, mut ending: watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = turns.opened() => true,
        _ = ending.wait_for(|ending| *ending) => false,
    }
}

fn cannot_serve(port: &str, cause: std::io::Error) -> Error {
    Error::new(Kind::System, format!("cannot serve the {port}"), "see the cause").caused_by(cause)
}

fn panicked(port: &str) -> Error {
    let message = format!("the thread of the {port} ended by a panic");
    Error::new(Kind::Internal, message, "report it with the log's last lines")
}
