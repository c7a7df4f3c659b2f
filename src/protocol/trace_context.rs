//! The W3C trace context of a request: which trace it belongs to, and whether its caller records that trace.

use std::fmt;

/// The flag of a trace that its caller records.
const SAMPLED: u8 = 1;

/// A trace context, as the header `traceparent` carries it (W3C Trace Context, level 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// The trace; 0 = invalid.
    pub trace_id: u128,
    /// The caller's span, parent of the daemon's; 0 = invalid.
    pub span_id: u64,
    /// The trace flags; bit 0 = the caller records the trace.
    pub flags: u8,
}

impl TraceContext {
    /// Reads a `traceparent`: `00-`, 32 hexadecimal digits, `-`, 16 digits, `-` and 2 digits, all in lower case. A later
    /// version may have more behind them. `None` = it is invalid, and a receiver starts a trace of its own.
    #[must_use]
    pub fn parse(traceparent: &str) -> Option<Self> {
        const BYTES: usize = 55;
        let head = traceparent.as_bytes().get(..BYTES)?;
        let is_separated = [2, 35, 52].iter().all(|at| head[*at] == b'-');
        let text = std::str::from_utf8(head).ok().filter(|_| is_separated)?;
        let version = hexadecimal(&text[..2])?;
        let rest = &traceparent.as_bytes()[BYTES..];
        let is_known = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.is_empty() || rest[0] == b'-',
        };
        let context = Self {
            trace_id: hexadecimal(&text[3..35])?,
            span_id: hexadecimal(&text[36..52])? as u64,
            flags: hexadecimal(&text[53..])? as u8,
        };
        Some(context).filter(|context| is_known && context.is_valid())
    }

    /// Whether both ids are set. An invalid context counts as none.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.trace_id != 0 && self.span_id != 0
    }

    /// Whether the caller records the trace.
    #[must_use]
    pub const fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }
}

/// As a `traceparent` of version 00.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

/// Digits in lower case only, without a sign.
fn hexadecimal(digits: &str) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if !digits.bytes().all(is_digit) {
        return None;
    }
    u128::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let context = TraceContext::parse(GOOD).unwrap();
        assert_eq!(
            (context.trace_id, context.span_id),
            (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0xf0_67aa_0ba9_02b7)
        );
        assert!(context.is_sampled() && context.is_valid());
        assert_eq!(context.to_string(), GOOD);
        assert!(!TraceContext::parse(&GOOD.replace("-01", "-02")).unwrap().is_sampled(), "another flag");
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        for later in ["cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", &format!("01{}-more", &GOOD[2..])] {
            assert_eq!(TraceContext::parse(later), TraceContext::parse(GOOD), "{later}");
        }
        assert_eq!(TraceContext::parse(&format!("01{}.more", &GOOD[2..])), None);
    }

    #[test]
    fn an_invalid_traceparent_is_none() {
        let upper = GOOD.to_uppercase();
        let (longer, shorter) = (format!("{GOOD}-"), &GOOD[..GOOD.len() - 1]);
        let no_trace = GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32));
        let no_span = GOOD.replace("00f067aa0ba902b7", &"0".repeat(16));
        let (signed, split) = (GOOD.replace("-00f0", "-+0f0"), GOOD.replace("4bf9", "é4b"));
        let (version, separator) = (format!("ff{}", &GOOD[2..]), GOOD.replace("-01", "_01"));
        for wrong in ["", "00", shorter, &upper, &longer, &no_trace, &no_span, &signed, &split, &version, &separator] {
            assert_eq!(TraceContext::parse(wrong), None, "{wrong}");
        }
    }
}
