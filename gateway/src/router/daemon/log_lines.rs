//! The child's log lines as lines of this process's log.

use serde_json::{Map, Value};

/// A line of the child's log: one JSON object, or plain text from before its log begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    level: tracing::Level,
    text: String,
}

impl LogLine {
    /// Reads a line.
    pub(super) fn read(line: &str) -> Self {
        let Ok(Value::Object(mut fields)) = serde_json::from_str(line) else {
            return Self { level: tracing::Level::WARN, text: line.to_owned() };
        };
        let take = |fields: &mut Map<String, Value>, name| match fields.remove(name) {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let level = take(&mut fields, "level").parse().unwrap_or(tracing::Level::INFO);
        let mut text = take(&mut fields, "message");
        // This process's log has a time of its own, and one target for all of the child's lines.
        drop((fields.remove("time"), fields.remove("target")));
        for (name, value) in &fields {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            text.push_str(&format!(" {name}={value}"));
        }
        Self { level, text }
    }

    /// The line for people.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Logs it under the target `kvrouted`.
    pub(super) fn log(&self) {
        let text = &self.text;
        match self.level {
            tracing::Level::ERROR => tracing::error!(target: "kvrouted", "{text}"),
            tracing::Level::WARN => tracing::warn!(target: "kvrouted", "{text}"),
            tracing::Level::INFO => tracing::info!(target: "kvrouted", "{text}"),
            tracing::Level::DEBUG => tracing::debug!(target: "kvrouted", "{text}"),
            tracing::Level::TRACE => tracing::trace!(target: "kvrouted", "{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_keeps_its_level_its_message_and_its_fields() {
        let line = LogLine::read(
            r#"{"level":"warn","message":"worker down","worker":"1/0","for_ms":5000,"target":"t","time":"now"}"#,
        );
        assert_eq!(line, LogLine { level: tracing::Level::WARN, text: "worker down for_ms=5000 worker=1/0".into() });
    }

    #[test]
    fn text_that_is_no_object_is_a_warning() {
        for text in ["kvrouted: the configuration cannot be used", "", "{", "7"] {
            assert_eq!(LogLine::read(text), LogLine { level: tracing::Level::WARN, text: text.into() });
        }
        assert_eq!(LogLine::read("{}").level, tracing::Level::INFO);
    }
}
