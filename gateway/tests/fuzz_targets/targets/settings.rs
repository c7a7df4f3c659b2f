//! Lines of other proxies' access logs, and the texts that operators write.

use kvrouted_gateway::config::{Flags, read};
use kvrouted_gateway::epp::EndpointConfig;
use kvrouted_gateway::proxy::read_log_line;

/// A line of an access log. What it gives is a part of it, without spaces.
pub(crate) fn log_line(data: &[u8]) {
    let line = String::from_utf8_lossy(data);
    let Some((id, values)) = read_log_line(&line) else { return };
    for value in values.into_iter().chain([id]) {
        assert!(!value.is_empty() && line.contains(value), "{value:?}");
        assert!(!value.chars().any(|c| c.is_whitespace() || matches!(c, ',' | ';' | '"')), "{value:?}");
    }
}

/// The text of a configuration, and an endpoint on the command line. A problem names its field and the remedy, and an
/// endpoint that was read is read again from how it is written.
pub(crate) fn gateway_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Err(problems) = read("fuzz", &text, &Flags::default()) {
        assert!(!problems.list.is_empty(), "refused without a reason");
        assert!(problems.list.iter().all(|problem| !problem.message.is_empty()), "{problems}");
    }
    for line in text.lines().take(4) {
        if let Ok(endpoint) = line.parse::<EndpointConfig>() {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint), "{line:?}");
        }
    }
}
