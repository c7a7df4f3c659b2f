//! The relay as a process: started, watched, and ended by a signal.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::{Relay, RelayPlan};
use crate::error::{Error, Kind, Result};
use crate::limits::{RELAY_REPORT_EVERY_S, THREADS_WATCH_EVERY_MS};
use crate::metrics::{CounterName as _, RelayCounter};
use crate::serve::{MetricsPort, MetricsThread};

/// Runs a relay until SIGTERM or SIGINT.
///
/// # Errors
/// What kept it from starting, or that a thread of it ended by itself.
pub fn run(plan: &RelayPlan) -> Result<()> {
    let system = |cause| Error::new(Kind::System, "cannot start the relay", "see the cause").caused_by(cause);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(system)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(system)?;
        let port = MetricsPort::bind(plan.metrics_port, &plan.metrics_hosts)?;
        let relay = Relay::start(plan)?;
        let metrics = port.map(|port| start_metrics(port, &relay)).transpose()?;
        let ended = tokio::select! {
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            what = watch(&relay, metrics.as_ref()) => Err(ended(what)),
        };
        report(&relay);
        metrics.map_or(Ok(()), MetricsThread::stop).and(ended)
    })
}

fn start_metrics(port: MetricsPort, relay: &Relay) -> Result<MetricsThread> {
    let sources = relay.sources.clone();
    MetricsThread::start(Some(port), Arc::clone(&sources.pages), move |text| sources.render(text))
}

fn ended(what: &str) -> Error {
    let what = format!("{what} ended by itself");
    Error::new(Kind::Internal, what, "start the relay again, and report it with the log's last lines")
}

/// Returns the name of a thread that has ended though nobody asked it to; logs every now and then what was counted.
async fn watch(relay: &Relay, metrics: Option<&MetricsThread>) -> &'static str {
    let mut every = tokio::time::interval(Duration::from_millis(THREADS_WATCH_EVERY_MS));
    let ticks_per_report = RELAY_REPORT_EVERY_S * 1000 / THREADS_WATCH_EVERY_MS;
    let mut ticks = 0_u64;
    loop {
        if !relay.is_running() {
            return "a thread of the relay";
        }
        if metrics.is_some_and(|metrics| !metrics.is_running()) {
            return "the metrics page";
        }
        every.tick().await;
        ticks += 1;
        if ticks.is_multiple_of(ticks_per_report) {
            report(relay);
        }
    }
}

fn report(relay: &Relay) {
    let count = |counter: &RelayCounter| (counter.name(), relay.counters().get(*counter));
    let counted: Vec<_> = RelayCounter::ALL.iter().map(count).filter(|(_, times)| *times > 0).collect();
    let (trust, blocks) = (relay.view().trust.load(), relay.view().gauges.bound());
    tracing::info!(?counted, blocks, level = ?trust.level, reasons = ?trust.reasons, "relay");
}
