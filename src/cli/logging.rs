//! The log on standard error, as text or as one JSON object in each line.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::audit::TARGET as AUDIT_TARGET;
use crate::config::{LogConfig, LogFormat};
use crate::log_writer::LogWriter;

/// Starts the log of this process. A valid `RUST_LOG` in the environment wins over the configured level. If a log was
/// started before, it stays.
pub fn init(config: &LogConfig) {
    let (filter, complaint) = filter(std::env::var("RUST_LOG").ok().as_deref(), config.level);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| LogWriter);
    let started = match config.format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.event_format(JsonLines).try_init(),
    };
    if let Err(error) = started {
        let _ = writeln!(std::io::stderr().lock(), "kvrouted: the log is already running: {error}");
    }
    if let Some(complaint) = complaint {
        tracing::warn!("{complaint}");
    }
}

fn filter(environment: Option<&str>, level: &str) -> (EnvFilter, Option<String>) {
    match environment.filter(|text| !text.is_empty()).map(EnvFilter::try_new) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (
            EnvFilter::new(with_audit(level)),
            Some(format!("RUST_LOG is invalid and ignored; log.level is used instead: {error}")),
        ),
        None => (EnvFilter::new(with_audit(level)), None),
    }
}

/// The directives of a configured level. Audit lines are logged at every level but `off`.
fn with_audit(level: &str) -> String {
    match level {
        "error" | "warn" => format!("{level},{AUDIT_TARGET}=info"),
        other => other.to_owned(),
    }
}

/// Writes an event as one JSON object: `time`, `level`, `target`, `message` and its fields.
struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields(Map::new());
        fields.0.insert("time".into(), time.into());
        fields.0.insert("level".into(), event.metadata().level().as_str().to_lowercase().into());
        fields.0.insert("target".into(), event.metadata().target().into());
        event.record(&mut fields);
        writeln!(writer, "{}", Value::Object(fields.0))
    }
}

struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().map_err(|_| io::Error::other("poisoned"))?.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_json_line_is_one_object_with_the_fields() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt().event_format(JsonLines).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(worker = 7_u64, cause = "a \"gap\"", "emptied\nnow");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["level"], &line["worker"], &line["cause"]), (&"warn".into(), &7.into(), &"a \"gap\"".into()));
        assert_eq!(line["message"], "emptied\nnow");
        assert!(line["time"].as_str().is_some_and(|time| time.starts_with("20")), "{text}");
    }

    #[test]
    fn a_valid_environment_variable_wins() {
        assert_eq!(filter(None, "info").0.to_string(), "info");
        assert_eq!(filter(None, "off").0.to_string(), "off");
        let quiet = filter(None, "warn").0.to_string();
        assert!(quiet.contains("audit=info") && quiet.ends_with("warn"), "{quiet}");
        assert_eq!(filter(Some("debug"), "warn").0.to_string(), "debug");
        let (kept, complaint) = filter(Some("a=b=c=d"), "warn");
        assert_eq!(kept.to_string(), quiet);
        assert!(complaint.is_some_and(|text| text.contains("RUST_LOG")));
    }
}
