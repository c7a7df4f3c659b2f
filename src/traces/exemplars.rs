//! Exemplars: for each bucket of a histogram of the metrics page, the last traced request that fell into it.
//!
//! The exporting thread writes them and the thread of the metrics page reads them, so that no serving thread meets a
//! lock.

use std::fmt::Write as _;

use parking_lot::Mutex;

use crate::metrics::{LATENCY_BUCKETS, Latency};

/// A traced request in a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Exemplar {
    pub(crate) trace_id: u128,
    pub(crate) span_id: u64,
    /// The duration, seconds.
    pub(crate) seconds: f64,
    /// When it ended, nanoseconds of the Unix clock.
    pub(crate) at_unix_ns: u64,
}

/// The exemplars of one histogram, by bucket.
#[derive(Debug, Default)]
pub(crate) struct BucketExemplars(Mutex<[Option<Exemplar>; LATENCY_BUCKETS]>);

impl BucketExemplars {
    /// Notes a request that fell into the bucket of `units`, as [`Latency::record`] counts it.
    pub(crate) fn note(&self, units: u64, exemplar: Exemplar) {
        self.0.lock()[Latency::bucket_of(units)] = Some(exemplar);
    }

    /// Appends exemplars to the buckets of a histogram in the text of a page.
    fn add_to(&self, histogram: &str, text: &mut String) {
        let exemplars = *self.0.lock();
        if exemplars.iter().all(Option::is_none) {
            return;
        }
        let bucket = format!("{histogram}_bucket{{");
        let Some(begin) = text.find(&bucket) else { return };
        let lines = text[begin..].split_inclusive('\n').take_while(|line| line.starts_with(&bucket));
        let (mut end, mut with) = (begin, String::new());
        for (line, exemplar) in lines.zip(exemplars) {
            end += line.len();
            with.push_str(line.trim_end());
            if let Some(Exemplar { trace_id, span_id, seconds, at_unix_ns }) = exemplar {
                let (at_s, at_ms) = (at_unix_ns / 1_000_000_000, at_unix_ns / 1_000_000 % 1000);
                // Writing to a string does not fail.
                let _ = write!(
                    with,
                    " # {{trace_id=\"{trace_id:032x}\",span_id=\"{span_id:016x}\"}} {seconds:?} {at_s}.{at_ms:03}"
                );
            }
            with.push('\n');
        }
        text.replace_range(begin..end, &with);
    }
}

/// The exemplars of the metrics page.
#[derive(Debug, Default)]
pub(crate) struct Exemplars {
    /// Of the time to decide, whose histogram counts nanoseconds.
    pub(crate) decisions: BucketExemplars,
    /// Of the time in the queue, whose histogram counts microseconds.
    pub(crate) waits: BucketExemplars,
}

impl Exemplars {
    /// Appends exemplars to the text of a page, which is OpenMetrics.
    pub(crate) fn add_to(&self, text: &mut String) {
        self.decisions.add_to("kvrouted_decision_seconds", text);
        self.waits.add_to("kvrouted_queue_wait_seconds", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gets_its_last_exemplar_and_other_lines_stay() {
        let exemplars = Exemplars::default();
        let page = "kvrouted_queue_wait_seconds_bucket{le=\"1\"} 0\nkvrouted_decision_seconds_count 2\n\
                    kvrouted_decision_seconds_bucket{le=\"2.56e-7\"} 1\nkvrouted_decision_seconds_bucket{le=\"5.12e-7\"} 2\n# EOF\n";
        let mut text = page.to_owned();
        exemplars.add_to(&mut text);
        assert_eq!(text, page);
        let exemplar =
            |trace_id| Exemplar { trace_id, span_id: 7, seconds: 3e-7, at_unix_ns: 1_700_000_000_012_000_000 };
        exemplars.decisions.note(300, exemplar(1));
        exemplars.decisions.note(301, exemplar(0xab));
        exemplars.add_to(&mut text);
        let added =
            " # {trace_id=\"000000000000000000000000000000ab\",span_id=\"0000000000000007\"} 3e-7 1700000000.012";
        assert_eq!(text, page.replace("2\n# EOF", &format!("2{added}\n# EOF")));
    }
}
