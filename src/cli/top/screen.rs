//! What a person has chosen to see: order, filter, the selected worker. Keys change it.

use std::cmp::Ordering;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::sample::{Sample, WorkerLine};
use crate::ids::Worker;

/// The columns by which workers can be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Column {
    /// By id and rank.
    Worker,
    /// By name.
    Name,
    /// The least trusted first.
    Trust,
    /// The most blocks first.
    Blocks,
    /// The most requests in flight first.
    Requests,
    /// The most tokens to prefill first.
    Prefill,
    /// The lowest hit rate first.
    Hit,
    /// The most batches of events a second first.
    Batches,
    /// The most gaps since the last look first.
    Gaps,
}

impl Column {
    const ALL: [Self; 9] = [
        Self::Worker,
        Self::Name,
        Self::Trust,
        Self::Blocks,
        Self::Requests,
        Self::Prefill,
        Self::Hit,
        Self::Batches,
        Self::Gaps,
    ];

    /// The column after it, in a circle.
    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|of| *of == self).map_or(0, |at| at + 1);
        Self::ALL[at % Self::ALL.len()]
    }

    fn order(self, one: &WorkerLine, other: &WorkerLine) -> Ordering {
        let number = |one: Option<f64>, other: Option<f64>| {
            // Workers without the figure come last.
            let last = |of: Option<f64>| of.unwrap_or(f64::INFINITY);
            last(one).total_cmp(&last(other))
        };
        let least = |of: Option<f64>| of.map(|value| -value);
        match self {
            Self::Worker => Ordering::Equal,
            Self::Name => one.name.cmp(&other.name),
            Self::Trust => one.trust.level.cmp(&other.trust.level),
            Self::Blocks => other.blocks.cmp(&one.blocks),
            Self::Requests => other.requests.cmp(&one.requests),
            Self::Prefill => other.prefill_tokens.cmp(&one.prefill_tokens),
            Self::Hit => number(one.hit, other.hit),
            Self::Batches => number(least(one.batches_per_s), least(other.batches_per_s)),
            Self::Gaps => other.gaps.cmp(&one.gaps),
        }
    }
}

/// Whether a key ended the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Yes,
    No,
}

/// What keys do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They move, order, and end.
    List,
    /// They write the filter.
    Filter,
    /// The selected worker is shown with all that is known of it.
    Detail,
}

/// What a person has chosen to see.
#[derive(Clone, Debug)]
pub(super) struct Screen {
    pub(super) column: Column,
    pub(super) is_reversed: bool,
    pub(super) filter: String,
    pub(super) mode: Mode,
    /// The worker itself: lines move when their figures change.
    pub(super) selected: Option<Worker>,
    pub(super) has_colours: bool,
}

/// Longest filter, characters.
const FILTER_CHARS_MAX: usize = 60;
/// Lines that one key moves by.
const PAGE_LINES: isize = 10;

impl Screen {
    pub(super) fn new(column: Column, filter: &str, has_colours: bool) -> Self {
        let filter = filter.chars().take(FILTER_CHARS_MAX).collect();
        Self { column, is_reversed: false, filter, mode: Mode::List, selected: None, has_colours }
    }

    /// The workers to show, in order.
    pub(super) fn lines<'a>(&self, sample: &'a Sample) -> Vec<&'a WorkerLine> {
        let wanted = self.filter.to_lowercase();
        let is_wanted = |line: &&WorkerLine| {
            let WorkerLine { worker, name, model, state, trust, .. } = line;
            let reasons: Vec<&str> = trust.reasons.iter().map(|reason| reason.name()).collect();
            let text = format!("{worker} {name} {model} {state} {} {}", trust.level.name(), reasons.join(" "));
            wanted.is_empty() || text.to_lowercase().contains(&wanted)
        };
        let mut lines: Vec<&WorkerLine> = sample.workers.iter().filter(is_wanted).collect();
        lines.sort_by(|one, other| {
            let order = self.column.order(one, other).then(one.worker.cmp(&other.worker));
            if self.is_reversed { order.reverse() } else { order }
        });
        lines
    }

    /// The place of the selected worker among the shown ones.
    pub(super) fn selected_at(&self, lines: &[&WorkerLine]) -> Option<usize> {
        lines.iter().position(|line| Some(line.worker) == self.selected)
    }

    /// Acts on a key.
    pub(super) fn press(&mut self, key: KeyEvent, sample: &Sample) -> Done {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Done::Yes;
        }
        match self.mode {
            Mode::Filter => self.press_in_filter(key.code),
            Mode::Detail => match key.code {
                KeyCode::Char('q') => return Done::Yes,
                KeyCode::Esc | KeyCode::Enter => self.mode = Mode::List,
                code => self.step(code, sample),
            },
            Mode::List => match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Done::Yes,
                KeyCode::Char('s') => self.column = self.column.next(),
                KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
                KeyCode::Char('/') => self.mode = Mode::Filter,
                KeyCode::Enter if self.selected_at(&self.lines(sample)).is_some() => self.mode = Mode::Detail,
                code => self.step(code, sample),
            },
        }
        Done::No
    }

    fn press_in_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(character) if self.filter.chars().count() < FILTER_CHARS_MAX => self.filter.push(character),
            _ => {}
        }
    }

    /// Selects another line, if the key moves.
    fn step(&mut self, code: KeyCode, sample: &Sample) {
        let by = match code {
            KeyCode::Down | KeyCode::Char('j') => 1,
            KeyCode::Up | KeyCode::Char('k') => -1,
            KeyCode::PageDown => PAGE_LINES,
            KeyCode::PageUp => -PAGE_LINES,
            KeyCode::Home => isize::MIN,
            KeyCode::End => isize::MAX,
            _ => return,
        };
        let lines = self.lines(sample);
        let last = lines.len().saturating_sub(1);
        let next = match self.selected_at(&lines) {
            Some(at) => at.saturating_add_signed(by).min(last),
            None if by == isize::MAX => last,
            None => 0,
        };
        self.selected = lines.get(next).map(|line| line.worker);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::sample::tests::fleet;
    use super::*;

    fn sample() -> Sample {
        let [first, mut second] = fleet(30);
        second.workers[4].counters[1].1 = 9;
        Sample::first(first, Duration::ZERO).next(second, Duration::from_secs(10))
    }

    fn press(screen: &mut Screen, keys: &[KeyCode], sample: &Sample) -> Done {
        keys.iter().map(|code| screen.press(KeyEvent::new(*code, KeyModifiers::NONE), sample)).last().expect("a key")
    }

    #[test]
    fn every_column_orders_and_the_circle_has_all_of_them() {
        let (sample, mut screen) = (sample(), Screen::new(Column::Worker, "", false));
        let first = |screen: &Screen| screen.lines(&sample)[0].worker.id.0;
        let mut seen = Vec::new();
        for _ in Column::ALL {
            seen.push((screen.column, first(&screen)));
            press(&mut screen, &[KeyCode::Char('s')], &sample);
        }
        assert_eq!(screen.column, Column::Worker);
        let of = |column| seen.iter().find(|(of, _)| *of == column).expect("seen").1;
        assert_eq!([of(Column::Worker), of(Column::Blocks), of(Column::Requests)], [1, 30, 30]);
        assert_eq!([of(Column::Batches), of(Column::Gaps), of(Column::Name)], [30, 5, 1]);
        press(&mut screen, &[KeyCode::Char('r')], &sample);
        assert_eq!(first(&screen), 30);
    }

    #[test]
    fn a_filter_is_written_and_taken_back() {
        let (sample, mut screen) = (sample(), Screen::new(Column::Worker, "", false));
        press(&mut screen, &[KeyCode::Char('/'), KeyCode::Char('W'), KeyCode::Char('2'), KeyCode::Char('q')], &sample);
        assert!(screen.lines(&sample).is_empty(), "q is a letter here");
        press(&mut screen, &[KeyCode::Backspace, KeyCode::Enter], &sample);
        assert_eq!((screen.lines(&sample).len(), screen.mode), (11, Mode::List));
        press(&mut screen, &[KeyCode::Char('/'), KeyCode::Esc], &sample);
        assert_eq!(screen.lines(&sample).len(), 30);
    }

    #[test]
    fn the_selection_is_a_worker_and_not_a_line() {
        let (sample, mut screen) = (sample(), Screen::new(Column::Worker, "", false));
        press(&mut screen, &[KeyCode::Enter], &sample);
        assert_eq!(screen.mode, Mode::List, "nothing is selected");
        press(&mut screen, &[KeyCode::Down, KeyCode::Down, KeyCode::Char('r')], &sample);
        assert_eq!(screen.selected, Some(Worker::new(2, 0)));
        assert_eq!(screen.selected_at(&screen.lines(&sample)), Some(28));
        press(&mut screen, &[KeyCode::End, KeyCode::PageDown], &sample);
        assert_eq!(screen.selected, Some(Worker::new(1, 0)));
        press(&mut screen, &[KeyCode::Home, KeyCode::PageUp, KeyCode::Enter], &sample);
        assert_eq!((screen.selected, screen.mode), (Some(Worker::new(30, 0)), Mode::Detail));
        assert_eq!(press(&mut screen, &[KeyCode::Esc], &sample), Done::No);
        assert_eq!(press(&mut screen, &[KeyCode::Esc], &sample), Done::Yes);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        screen.mode = Mode::Filter;
        assert_eq!(screen.press(interrupt, &sample), Done::Yes);
    }
}
