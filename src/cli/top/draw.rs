//! A frame: the daemon in three lines, its history, its workers, what is wrong, and what keys do.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, TableState, Wrap};

use super::Looks;
use super::sample::{Point, Rates, Sample, WorkerLine};
use super::screen::{Column, Mode, Screen};
use crate::finding::{Finding, Harm};
use crate::trust::TrustLevel;

/// The most trusted first.
const LEVELS: [TrustLevel; 5] =
    [TrustLevel::Exact, TrustLevel::LowerBound, TrustLevel::Unproven, TrustLevel::Predicted, TrustLevel::None];
/// Findings that are shown at once.
const FINDINGS_SHOWN_MAX: usize = 4;
/// Columns of a history's name and present value.
const HISTORY_NAME_COLUMNS: u16 = 18;

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen, looks: &Looks) {
    let sample = &looks.sample;
    let findings = findings(screen, sample);
    let rows = [
        Constraint::Length(3),
        Constraint::Length(2),
        Constraint::Min(4),
        Constraint::Length(findings.len() as u16),
        Constraint::Length(1),
    ];
    let [head, histories, body, below, foot] = Layout::vertical(rows).areas(frame.area());
    frame.render_widget(Paragraph::new(daemon_lines(screen, looks)), head);
    draw_histories(frame, looks, histories);
    let lines = screen.lines(sample);
    let selected = screen.selected_at(&lines);
    match (screen.mode, selected.and_then(|at| lines.get(at))) {
        (Mode::Detail, Some(line)) => draw_worker(frame, screen, line, body),
        _ => draw_workers(frame, screen, (&lines, selected, sample.workers.len()), body),
    }
    frame.render_widget(Paragraph::new(findings), below);
    frame.render_widget(Paragraph::new(keys(screen)), foot);
}

// ---- the daemon -------------------------------------------------------------------------------------------------------

fn daemon_lines(screen: &Screen, looks: &Looks) -> Vec<Line<'static>> {
    let (sample, bold) = (&looks.sample, Style::new().add_modifier(Modifier::BOLD));
    let page = &sample.page;
    let of_level = |level: TrustLevel| page.workers.iter().filter(|of| of.trust.level == level).count();
    let trusted = LEVELS.map(|level| (level.name(), of_level(level))).into_iter();
    let trusted: Vec<String> =
        trusted.filter(|(_, count)| *count > 0).map(|(name, count)| format!("{count} {name}")).collect();
    let version = if page.daemon_version.is_empty() { "" } else { &page.daemon_version };
    let mut first = vec![
        Span::styled(format!("kvrouted {version}"), bold),
        Span::raw(format!(" up {}, {} workers", time(page.uptime_ms), page.workers.len())),
    ];
    if !trusted.is_empty() {
        first.push(Span::raw(format!(": {}", trusted.join(", "))));
    }
    if let Some(problem) = &looks.problem {
        first = vec![Span::styled(format!("the daemon does not answer: {problem}"), screen.colour(Color::Red))];
    }
    let percent = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
    let Rates { no_worker_per_s, gaps, hit, decision_us, .. } = sample.rates.clone().unwrap_or_default();
    let time = match decision_us {
        Some([half, most]) => format!("p50 {} p99 {}", microseconds(half), microseconds(most)),
        None => "p50 - p99 -".to_owned(),
    };
    let second = format!(
        "hit {}  decision {time}  bookings {}  queue {}  no worker/s {}",
        percent(hit),
        short(sample.figure("bookings_live") as f64),
        short(sample.figure("queue_waiting") as f64),
        short(no_worker_per_s),
    );
    let others = page.routers.iter().filter(|of| of.state != "self").count();
    let silent = page.routers.iter().filter(|of| !matches!(of.state.as_str(), "self" | "live")).count();
    let third = format!(
        "gaps {gaps}  memory {}  open files {}  other routers {others}, not live {silent}",
        bytes(sample.figure("memory_used_bytes")),
        sample.figure("open_files_now"),
    );
    vec![Line::from(first), Line::raw(second), Line::raw(third)]
}

/// Routes and batches of events a second: now, and as far back as the line is long.
fn draw_histories(frame: &mut Frame<'_>, looks: &Looks, area: Rect) {
    let [first, second] = Layout::vertical([Constraint::Length(1); 2]).areas(area);
    let now = looks.sample.point();
    let mut draw = |name: &str, pick: fn(&Point) -> f64, area: Rect| {
        let [label, line] =
            Layout::horizontal([Constraint::Length(HISTORY_NAME_COLUMNS), Constraint::Min(1)]).areas(area);
        let value = now.as_ref().map_or("-".to_owned(), |point| short(pick(point)));
        frame.render_widget(Paragraph::new(format!("{name} {value}")), label);
        let from = looks.history.len().saturating_sub(usize::from(line.width));
        // Thousandths, so that small rates have a shape too.
        let values: Vec<u64> = looks.history.iter().skip(from).map(|point| (1e3 * pick(point)) as u64).collect();
        frame.render_widget(Sparkline::default().data(values), line);
    };
    draw("routes/s", |point| point.routes_per_s, first);
    draw("batches/s", |point| point.batches_per_s, second);
}

// ---- the workers ------------------------------------------------------------------------------------------------------

type Show = fn(&WorkerLine) -> String;
/// Title, width, alignment, the order that it shows, and what stands in it.
const COLUMNS: [(&str, u16, Alignment, Column, Show); 10] = [
    ("worker", 8, Alignment::Left, Column::Worker, |line| line.worker.to_string()),
    ("name", 9, Alignment::Left, Column::Name, |line| line.name.clone()),
    ("state", 8, Alignment::Left, Column::Worker, |line| line.state.to_owned()),
    ("trust", 11, Alignment::Left, Column::Trust, |line| line.trust.level.name().to_owned()),
    ("blocks", 7, Alignment::Right, Column::Blocks, |line| short(line.blocks as f64)),
    ("reqs", 5, Alignment::Right, Column::Requests, |line| short(line.requests as f64)),
    ("prefill", 8, Alignment::Right, Column::Prefill, |line| short(line.prefill_tokens as f64)),
    ("hit%", 5, Alignment::Right, Column::Hit, |line| or_dash(line.hit.map(|hit| format!("{:.0}", 100.0 * hit)))),
    ("bat/s", 6, Alignment::Right, Column::Batches, |line| or_dash(line.batches_per_s.map(short))),
    ("gaps", 5, Alignment::Right, Column::Gaps, |line| or_dash(line.gaps.map(|gaps| short(gaps as f64)))),
];

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn draw_workers(
    frame: &mut Frame<'_>,
    screen: &Screen,
    (lines, selected, all): (&[&WorkerLine], Option<usize>, usize),
    area: Rect,
) {
    let cell = |text: String, alignment| Cell::new(Line::raw(text).alignment(alignment));
    let row = |line: &&WorkerLine| {
        let cells = COLUMNS.map(|(_, _, alignment, _, show)| cell(show(line), alignment));
        Row::new(cells).style(screen.colour(of_trust(line.trust.level)))
    };
    let ordered = |title: &str, column: Column, at: usize| {
        let is_first = COLUMNS.iter().position(|(.., of, _)| *of == column) == Some(at);
        let mark = if screen.is_reversed { "▲" } else { "▼" };
        if is_first && column == screen.column { format!("{title}{mark}") } else { title.to_owned() }
    };
    let titles = COLUMNS.iter().enumerate();
    let titles = titles.map(|(at, (title, _, alignment, column, _))| cell(ordered(title, *column, at), *alignment));
    let head = Row::new(titles).style(Style::new().add_modifier(Modifier::REVERSED));
    let rows_shown = usize::from(area.height.saturating_sub(2)).min(lines.len());
    let caption = match (lines.len(), all) {
        (_, 0) => "no workers".to_owned(),
        (0, all) => format!("none of {all} workers has '{}' in its line", screen.filter),
        (some, all) if some < all => format!("{rows_shown} of {some}, filtered from {all}"),
        (some, _) => format!("{rows_shown} of {some}"),
    };
    let widths = COLUMNS.map(|(_, width, ..)| Constraint::Length(width));
    let [above, below] = Layout::vertical([Constraint::Min(2), Constraint::Length(1)]).areas(area);
    let table = Table::new(lines.iter().map(row), widths).header(head).column_spacing(1);
    let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, above, &mut TableState::new().with_selected(selected));
    frame.render_widget(Paragraph::new(caption), below);
}

/// All that is known of one worker.
fn draw_worker(frame: &mut Frame<'_>, screen: &Screen, line: &WorkerLine, area: Rect) {
    let WorkerLine { worker, name, model, state, trust, .. } = line;
    let reasons: Vec<&str> = trust.reasons.iter().map(|reason| reason.name()).collect();
    let mut text = vec![Line::raw(format!("model {model}, {state}, {}", trust.level.name()))];
    if !reasons.is_empty() {
        text.push(Line::styled(reasons.join(", "), screen.colour(of_trust(trust.level))));
    }
    text.extend(line.remedy.iter().map(|remedy| Line::raw(format!("to do: {remedy}"))));
    let counted: Vec<String> =
        line.counters.iter().filter(|(_, value)| *value > 0).map(|(of, value)| format!("{of} {value}")).collect();
    text.push(Line::raw(counted.join("  ")));
    let block = Block::new().borders(Borders::TOP).title(format!(" {worker} {name} "));
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }).block(block), area);
}

const fn of_trust(level: TrustLevel) -> Color {
    match level {
        TrustLevel::Exact | TrustLevel::Predicted => Color::Reset,
        TrustLevel::LowerBound => Color::Yellow,
        TrustLevel::Unproven | TrustLevel::None => Color::Red,
    }
}

// ---- what is wrong, and keys ------------------------------------------------------------------------------------------

fn findings(screen: &Screen, sample: &Sample) -> Vec<Line<'static>> {
    let all = &sample.page.findings;
    let line = |of: &Finding| {
        let colour = if of.harm == Harm::Note { Color::Reset } else { Color::Yellow };
        let workers = match of.workers_total {
            0 => String::new(),
            some => format!(" ({some} workers)"),
        };
        Line::styled(format!("{} {}{workers}: {}", of.harm.name(), of.name, of.what), screen.colour(colour))
    };
    let mut lines: Vec<Line<'static>> = all.iter().take(FINDINGS_SHOWN_MAX).map(line).collect();
    let hidden = all.len().saturating_sub(FINDINGS_SHOWN_MAX);
    if hidden > 0 {
        lines.push(Line::raw(format!("and {hidden} more findings: kvrouted doctor")));
    }
    lines
}

fn keys(screen: &Screen) -> Line<'static> {
    match screen.mode {
        Mode::Filter => Line::raw(format!("filter: {}_   Enter keep  Esc none", screen.filter)),
        Mode::Detail => Line::raw("q quit  Esc back  arrows next worker"),
        Mode::List if screen.filter.is_empty() => {
            Line::raw("q quit  s order by  r reverse  / filter  arrows select  Enter detail")
        }
        Mode::List => Line::raw(format!(
            "q quit  s order by  r reverse  / filter '{}'  arrows select  Enter detail",
            screen.filter
        )),
    }
}

impl Screen {
    /// A colour, on a terminal that has them.
    const fn colour(&self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }
}

// ---- numbers for people -----------------------------------------------------------------------------------------------

/// At most five characters.
fn short(number: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let (mut scaled, mut unit) = (number, 0);
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        (scaled, unit) = (scaled / 1e3, unit + 1);
    }
    let is_whole = unit == 0 && scaled.fract() == 0.0;
    match scaled {
        0.0..9.95 if !is_whole => format!("{scaled:.1}{}", UNITS[unit]),
        _ => format!("{scaled:.0}{}", UNITS[unit]),
    }
}

fn bytes(number: u64) -> String {
    match number {
        0 => "-".to_owned(),
        number => format!("{:.0} MiB", number as f64 / f64::from(1 << 20)),
    }
}

fn microseconds(us: f64) -> String {
    match us {
        0.0..1e3 => format!("{} us", short(us)),
        1e3..1e7 => format!("{:.1} ms", us / 1e3),
        // The last bucket of the daemon's histogram has no bound.
        _ => "long".to_owned(),
    }
}

fn time(ms: u64) -> String {
    let (minutes, seconds) = (ms / 60_000, ms / 1000 % 60);
    match minutes {
        0 => format!("{seconds} s"),
        1..60 => format!("{minutes} min"),
        60..2880 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} days", minutes / 1440),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> =
            [0.0, 0.25, 7.0, 99.6, 999.0, 1234.0, 99_960.0, 1e6, 2.5e12, 1e18].into_iter().map(short).collect();
        assert_eq!(shown, ["0", "0.2", "7", "100", "999", "1.2k", "100k", "1.0M", "2.5T", "1000000T"]);
        assert_eq!([bytes(0), bytes(5 << 20), time(59_000), time(3_600_000)], ["-", "5 MiB", "59 s", "1 h 0 min"]);
        assert_eq!([microseconds(2.0), microseconds(65.5), microseconds(4000.0)], ["2 us", "66 us", "4.0 ms"]);
    }
}
