//! The costs that the peer tells nobody but its log.

use std::fmt::Debug;
use std::sync::Arc;

use crossbeam::atomic::AtomicCell;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// A cost that was logged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Logged {
    /// As it is.
    Whole(f64),
    /// To three places after the point.
    Rounded(f64),
}

/// Keeps the cost of the peer's last selection on this thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<AtomicCell<Option<Logged>>>);

impl Log {
    /// What was logged since it was last taken.
    #[must_use]
    pub(crate) fn take(&self) -> Option<Logged> {
        self.0.take()
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == Level::INFO && metadata.target().contains("selector")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Reader(self));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Reader<'a>(&'a Log);

impl Visit for Reader<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "logit" {
            self.0.0.store(Some(Logged::Whole(value)));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message"
            && let Some((_, rest)) = format!("{value:?}").split_once("logit: ")
            && let Some(cost) = rest.split(',').next().and_then(|text| text.parse().ok())
        {
            self.0.0.store(Some(Logged::Rounded(cost)));
        }
    }
}
