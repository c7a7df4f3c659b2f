//! Lines of another proxy's access log, as `name=value` words. No I/O.
//!
//! ```text
//! id=ID [failed=HOST:PORT]... [status=CODE]     the request has ended; the engines of `failed` could not take it
//! prefilled=ID [worker=ID/RANK]                 the first byte of its reply has come, from this worker
//! ```
//!
//! nginx writes the first with `log_format`, HAProxy with `log-format`; other words mean nothing. The first word of the
//! two names decides, so that what a caller can put into a line must stand after it.

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LogLine<'a> {
    /// The request has ended.
    Ended {
        /// The request's id.
        id: &'a str,
        /// Endpoints of engines that could not take it, in turn.
        failed: Vec<&'a str>,
        /// Whether the status was one of success.
        is_success: bool,
    },
    /// The first byte of the reply has come.
    Prefilled {
        /// The request's id.
        id: &'a str,
        /// The worker that sent it; `None` = the first of the list.
        worker: Option<&'a str>,
    },
}

impl<'a> LogLine<'a> {
    /// Reads a line. `None` = it names no request.
    pub(super) fn read(line: &'a str) -> Option<Self> {
        let words = || line.split(|c: char| c.is_whitespace() || matches!(c, ',' | ';' | '"'));
        let values = |name: &'static str| {
            let value = move |word: &'a str| word.strip_prefix(name)?.strip_prefix('=');
            words().filter_map(value).filter(|value| !value.is_empty())
        };
        let named = |word: &&str| {
            ["id=", "prefilled="].iter().any(|name| word.strip_prefix(name).is_some_and(|id| !id.is_empty()))
        };
        let (name, id) = words().find(named)?.split_once('=')?;
        if name == "prefilled" {
            return Some(Self::Prefilled { id, worker: values("worker").next() });
        }
        let is_success = values("status").next().is_some_and(|status| status.len() == 3 && status.starts_with('2'));
        Some(Self::Ended { id, failed: values("failed").collect(), is_success })
    }
}

/// The id and the other values of a line, for the fuzz target.
#[doc(hidden)]
#[must_use]
pub fn read_log_line(line: &str) -> Option<(&str, Vec<&str>)> {
    match LogLine::read(line)? {
        LogLine::Ended { id, failed, .. } => Some((id, failed)),
        LogLine::Prefilled { id, worker } => Some((id, worker.into_iter().collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_of_nginx_and_haproxy_name_the_request() {
        let ended = |line| match LogLine::read(line) {
            Some(LogLine::Ended { id, failed, is_success }) => Some((id, failed, is_success)),
            Some(LogLine::Prefilled { .. }) | None => None,
        };
        let nginx = "<190>Nov 23 11:54:34 kvrouted: id=abc failed=10.0.0.8:80 failed=[::1]:81 status=200 bytes=5";
        assert_eq!(ended(nginx), Some(("abc", vec!["10.0.0.8:80", "[::1]:81"], true)));
        assert_eq!(ended("<134>done id=x-1 server=1 status=503"), Some(("x-1", vec![], false)));
        assert_eq!(ended("{\"log\":\"id=7\",\"grid=4\"}"), Some(("7", vec![], false)));
        assert_eq!(ended("nothing grid=4 id="), None);
        assert_eq!(ended("id=a prefilled=b"), Some(("a", vec![], false)));
    }

    #[test]
    fn a_first_byte_names_its_worker_or_means_the_first() {
        let first = LogLine::Prefilled { id: "a", worker: None };
        assert_eq!(LogLine::read("prefilled=a"), Some(first));
        let other = LogLine::Prefilled { id: "a", worker: Some("2/1") };
        assert_eq!(LogLine::read("prefilled=a worker=2/1 id=b"), Some(other));
    }

    proptest! {
        #[test]
        fn no_line_is_too_odd(line in ".{0,200}", id in "[a-z0-9-]{1,40}") {
            let _ = LogLine::read(&line);
            let own = format!("id={id} {line}");
            let is_read = matches!(LogLine::read(&own), Some(LogLine::Ended { id: read, .. }) if read == id);
            prop_assert!(is_read);
        }
    }
}
