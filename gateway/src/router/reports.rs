//! Reports to the daemon about bookings and engines. One task sends them in order, so that no request waits for a
//! report and a guard can be dropped anywhere.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kvrouted::client::{AsyncClient, Booking, BookingOutcome};
use kvrouted::ids::{SpaceId, Worker};
use tokio::sync::{mpsc, oneshot};

use super::figures::figures;
use crate::limits::{REPORTS_IN_FLIGHT_MAX, REPORTS_WAITING_MAX};

figures! {
    /// How a report ended.
    ReportFigure,
    /// How the reports to the daemon ended, by [`ReportFigure`].
    ReportFigures {
        /// The daemon applied it.
        Applied = "applied",
        /// It is sent once the daemon can be reached again.
        Stored = "stored",
        /// The daemon has no such booking: it restarted, or the booking was too old.
        UnknownBooking = "unknown_booking",
        /// The daemon refused it.
        Refused = "refused",
        /// It was dropped because too many reports waited. The daemon ends such bookings by their age.
        Lost = "lost",
    }
}

/// One report.
#[derive(Debug)]
pub(super) enum Report {
    PrefillComplete {
        booking: Booking,
        prefill_us: u64,
    },
    OutputProgress {
        booking: Booking,
        tokens: u32,
    },
    Served {
        booking: Booking,
        worker: Worker,
    },
    Free {
        booking: Booking,
    },
    Failure {
        space: SpaceId,
        worker: Worker,
        why: String,
    },
    /// Answered after all earlier reports have ended.
    Flush(oneshot::Sender<()>),
}

/// The way to the task.
#[derive(Debug)]
pub(super) struct Reports {
    sender: mpsc::Sender<Report>,
    figures: Arc<ReportFigures>,
}

impl Reports {
    /// Starts the task on the present runtime. It ends after the last clone of the sender is dropped and all reports
    /// ended.
    pub(super) fn start(client: AsyncClient) -> Self {
        let (sender, receiver) = mpsc::channel(REPORTS_WAITING_MAX);
        let figures = Arc::new(ReportFigures::default());
        tokio::spawn(send_all(client, receiver, Arc::clone(&figures)));
        Self { sender, figures }
    }

    /// Hands a report over without waiting.
    pub(super) fn send(&self, report: Report) {
        if self.sender.try_send(report).is_err() {
            self.figures.count(ReportFigure::Lost);
        }
    }

    /// Waits until all reports that were handed over before have ended.
    pub(super) async fn flush(&self) {
        let (done, ended) = oneshot::channel();
        if self.sender.send(Report::Flush(done)).await.is_ok() {
            // An error means that the task has ended, and with it every report.
            let _ = ended.await;
        }
    }

    pub(super) const fn figures(&self) -> &Arc<ReportFigures> {
        &self.figures
    }
}

type Sending = Pin<Box<dyn Future<Output = ReportFigure> + Send>>;

async fn send_all(client: AsyncClient, mut reports: mpsc::Receiver<Report>, figures: Arc<ReportFigures>) {
    let mut in_flight: FuturesUnordered<Sending> = FuturesUnordered::new();
    loop {
        let report = tokio::select! {
            Some(ended) = in_flight.next(), if !in_flight.is_empty() => {
                figures.count(ended);
                continue;
            }
            report = reports.recv(), if in_flight.len() < REPORTS_IN_FLIGHT_MAX => report,
        };
        match report {
            None => break,
            Some(Report::Flush(done)) => {
                while let Some(ended) = in_flight.next().await {
                    figures.count(ended);
                }
                // The one who asked may have stopped waiting.
                let _ = done.send(());
            }
            Some(report) => {
                let mut sending: Sending = Box::pin(send(client.clone(), report));
                // The first poll puts the report on the connection, so that reports leave in order.
                match std::future::poll_fn(|context| Poll::Ready(sending.as_mut().poll(context))).await {
                    Poll::Ready(ended) => figures.count(ended),
                    Poll::Pending => in_flight.push(sending),
                }
            }
        }
    }
    while let Some(ended) = in_flight.next().await {
        figures.count(ended);
    }
}

async fn send(client: AsyncClient, report: Report) -> ReportFigure {
    let outcome = match report {
        Report::PrefillComplete { booking, prefill_us } => client.prefill_complete(booking, prefill_us).await,
        Report::OutputProgress { booking, tokens } => client.output_progress(booking, tokens).await,
        Report::Served { booking, worker } => client.served(booking, worker).await,
        Report::Free { booking } => client.free(booking).await,
        Report::Failure { space, worker, why } => {
            let backed_off = client.report_failure(space, worker, &why).await;
            backed_off.map(|_back_off_ms| Some(BookingOutcome::Applied))
        }
        Report::Flush(_) => Ok(None),
    };
    match outcome {
        Ok(Some(BookingOutcome::Applied | BookingOutcome::AlreadyApplied)) => ReportFigure::Applied,
        // No other attempt has the name of a booking of ours, so a superseded one is one that is gone.
        Ok(Some(BookingOutcome::Unknown | BookingOutcome::Superseded)) => ReportFigure::UnknownBooking,
        Ok(None) => ReportFigure::Stored,
        Err(error) => {
            tracing::debug!(%error, "the daemon refused a report");
            ReportFigure::Refused
        }
    }
}
