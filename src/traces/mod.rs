//! Traces: what sampled requests went through, as spans for an OpenTelemetry collector.
//!
//! ```text
//! serving threads ─ decisions ─┐
//!                              ├─▶ bounded queues ─ one thread: SpanMaker ─▶ Delivery ─▶ collector, by OTLP/HTTP
//! ends of bookings (`load`) ───┘                        └─▶ exemplars of the metrics page
//! ```
//!
//! A serving thread copies the facts of a sampled decision into a queue, and does nothing else: ids, attributes and bytes
//! are the business of the exporting thread. Without room the facts are lost and counted. Nothing of a prompt and no name that
//! a gateway gave is among them.
//!
//! The collector's calls are made in `daemon`; this module is pure but for its random numbers.

mod delivery;
mod exemplars;
mod otlp;
mod sampling;
mod spans;
mod traced_decision;

pub(crate) use delivery::{Answer, Delivery};
pub(crate) use otlp::{Sender, rejected_spans};
pub use sampling::TracedRequest;
pub(crate) use sampling::{Tracer, Traces};
pub(crate) use spans::{SpanMaker, UnixClock};
pub(crate) use traced_decision::{TracedDecision, TracedOutcome, TracedWorker};
