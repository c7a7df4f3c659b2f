//! Traces of times and lengths only, as CSV: time, prompt tokens, output tokens.
//!
//! Times are dates (`2023-11-16 18:15:46.6805900`, as in the Azure traces) or plain seconds. The first line may be a
//! header.

use std::io::BufRead;

use super::lines::{TraceLines, output_tokens, prompt_tokens, seconds};
use super::{Arrivals, Session, Span, TraceError, Turn, Workload};

/// A time in the form in which the trace has it.
#[derive(Clone, Copy)]
enum Time {
    /// Seconds of the Unix epoch.
    Date(f64),
    /// Seconds.
    Seconds(f64),
}

/// Reads a trace. Each request is a session of one turn; its prompt and its output are contents of their own. Lines out
/// of order are sorted, and the first request arrives at 0.
///
/// # Errors
/// A line that is not such a triple, whose values are out of range, or whose time has another form than the first.
pub fn read(lines: impl BufRead) -> Result<Workload, TraceError> {
    let (mut lines, mut sessions) = (TraceLines::new(lines), Vec::new());
    let (mut is_first, mut has_dates) = (true, None);
    while let Some((line, text)) = lines.next()? {
        let may_be_header = std::mem::take(&mut is_first);
        let [time, prompt, output] = fields(line, text)?;
        let (start_s, is_date) = match time_of(time) {
            Some(Time::Date(start_s)) => (start_s, true),
            Some(Time::Seconds(start_s)) => (start_s, false),
            None if may_be_header && prompt.parse::<f64>().is_err() => continue,
            None => return Err(TraceError::new(line, format!("{time:?} is neither a date nor seconds"))),
        };
        if *has_dates.get_or_insert(is_date) != is_date {
            return Err(TraceError::new(line, "times must be all dates or all seconds"));
        }
        let start_s = seconds(line, "the time", start_s)?;
        let prompt_tokens = prompt_tokens(line, "the prompt's length", integer(line, prompt)?)?;
        let output_tokens = output_tokens(line, "the output's length", integer(line, output)?)?;
        let content = 2 * sessions.len() as u64;
        let prompt = vec![Span { content, from: 0, tokens: prompt_tokens }];
        let output = Span { content: content + 1, from: 0, tokens: output_tokens };
        sessions.push(Session { start_s, turns: vec![Turn { think_s: 0.0, prompt, output }] });
    }
    Ok(Workload::sorted(sessions, Arrivals::Timed))
}

fn fields(line: usize, text: &str) -> Result<[&str; 3], TraceError> {
    let mut fields = text.split(',').map(str::trim);
    match [fields.next(), fields.next(), fields.next(), fields.next()] {
        [Some(time), Some(prompt), Some(output), None] => Ok([time, prompt, output]),
        _ => Err(TraceError::new(line, "expected three fields: time, prompt tokens, output tokens")),
    }
}

fn integer(line: usize, text: &str) -> Result<u64, TraceError> {
    text.parse().map_err(|_| TraceError::new(line, format!("{text:?} is not a number of tokens")))
}

fn time_of(text: &str) -> Option<Time> {
    if let Ok(seconds) = text.parse() {
        return Some(Time::Seconds(seconds));
    }
    let (date, time) = text.split_once([' ', 'T'])?;
    let time = time.trim_end_matches('Z').trim_end_matches("+00:00");
    let mut date = date.splitn(3, '-').map(|field| field.parse::<u32>().ok());
    let days = days_of_epoch(date.next()??, date.next()??, date.next()??)?;
    let mut time = time.splitn(3, ':');
    let (hours, minutes) = (time.next()?.parse::<u32>().ok()?, time.next()?.parse::<u32>().ok()?);
    let seconds: f64 = time.next()?.parse().ok()?;
    let is_time = hours < 24 && minutes < 60 && (0.0..61.0).contains(&seconds);
    is_time.then(|| Time::Date(f64::from(days) * 86_400.0 + f64::from(hours * 3600 + minutes * 60) + seconds))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar; `None` if there is no such date, or it is before 1970 or
/// after 2199.
fn days_of_epoch(year: u32, month: u32, day: u32) -> Option<u32> {
    const BEFORE_MONTH: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    if !(1970..2200).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    let before_month = *BEFORE_MONTH.get(month.checked_sub(1)? as usize)?;
    let leap_days_to = |year: u32| year / 4 - year / 100 + year / 400;
    let is_leap = leap_days_to(year) > leap_days_to(year - 1);
    let leap_days = leap_days_to(year - 1) - leap_days_to(1969) + u32::from(is_leap && month > 2);
    Some((year - 1970) * 365 + leap_days + before_month + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds_of(text: &str) -> Option<f64> {
        time_of(text).map(|time| match time {
            Time::Date(seconds) | Time::Seconds(seconds) => seconds,
        })
    }

    #[test]
    fn dates_are_seconds_of_the_epoch() {
        assert_eq!(seconds_of("1970-01-01 00:00:00"), Some(0.0));
        assert_eq!(seconds_of("2000-02-29T00:00:00Z"), Some(951_782_400.0));
        assert_eq!(seconds_of("2023-11-16 18:15:46.5"), Some(1_700_158_546.5));
        assert_eq!(seconds_of("2024-03-01 00:00:00+00:00"), Some(1_709_251_200.0));
        for text in ["2023-13-01 00:00:00", "2023-00-01 00:00:00", "2023-11-16", "2023-11-16 24:00:00", "x", ""] {
            assert_eq!(seconds_of(text), None, "{text}");
        }
    }

    #[test]
    fn the_azure_format_is_read_and_begins_at_zero() {
        let text =
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5,374,44\r\n2023-11-17 00:00:01.0,396,0";
        let trace = read(text.as_bytes()).expect("two requests");
        let seen: Vec<_> = trace
            .sessions
            .iter()
            .map(|s| (s.start_s, s.turns[0].prompt_tokens(), s.turns[0].output.tokens, s.turns[0].prompt[0].content))
            .collect();
        assert_eq!(seen, [(0.0, 374, 44, 0), (1.5, 396, 1, 2)]);
    }

    #[test]
    fn plain_seconds_out_of_order_are_sorted() {
        let trace = read(&b"7.5,10,1\n5,20,2\n"[..]).expect("two requests");
        assert_eq!(trace.sessions[0].turns[0].prompt_tokens(), 20);
        assert!((trace.sessions[1].start_s - 2.5).abs() < 1e-9);
    }

    #[test]
    fn hostile_lines_are_refused_with_their_number() {
        let bad = "-1,5,5 nan,5,5 inf,5,5 1e300,5,5 1,0,5 1,-5,5 1,5,-5 1,5 \
                   1,5,5,5 ,5,5 x,y,z 1,5000000,5 1,5,2000000 1,5.5,5";
        for line in bad.split(' ') {
            let error = read(format!("0,5,5\n{line}").as_bytes()).expect_err(line);
            assert_eq!(error.line, 2, "{line}");
        }
        assert_eq!(read(&b"0,5,5\n2023-11-16 18:15:46,5,5"[..]).map_err(|error| error.line), Err(2));
        assert_eq!(read(&b"2023-99-16 18:15:46,5,5"[..]).map_err(|error| error.line), Err(1));
    }
}
