//! `kvrouted top`: a running daemon at a glance, drawn again and again.
//!
//! ```text
//! admin socket ─▶ sample (two status pages ─▶ rates) ─▶ screen (order, filter, keys) ─▶ draw (a frame of text)
//! ```
//!
//! All but this file is pure: status pages, time and keys are arguments.

mod draw;
mod sample;
mod screen;

use std::collections::VecDeque;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::text::Line;

use self::draw::draw;
use self::sample::{HISTORY_SAMPLES_MAX, Point, Sample};
use self::screen::{Column, Done, Screen};
use super::admin;
use super::exit::{Exit, Failure};
use crate::client::Client;
use crate::config::socket_default;

/// Shows a running daemon and its workers, live.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    pub every: f64,
    /// The column that orders the workers
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = Column::Worker)]
    pub sort: Column,
    /// Only workers whose line contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub filter: String,
    /// Print one frame as text, after two looks, and end
    #[arg(long)]
    pub once: bool,
    /// The size of that frame, in columns and rows
    #[arg(long, value_name = "COLUMNSxROWS", default_value = "80x24", value_parser = size, requires = "once")]
    pub size: (u16, u16),
    /// Do without colours; so does a set variable NO_COLOR
    #[arg(long)]
    pub no_color: bool,
}

/// Shortest and longest time between two looks, seconds.
const EVERY_S: std::ops::RangeInclusive<f64> = 0.2..=60.0;
/// The least that a frame takes, columns and rows.
const SIZE_MIN: (u16, u16) = (40, 10);

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| EVERY_S.contains(seconds));
    seconds.ok_or_else(|| format!("a number from {} to {}", EVERY_S.start(), EVERY_S.end()))
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once('x').and_then(|(columns, rows)| Some((columns.parse().ok()?, rows.parse().ok()?)));
    let fits = |(columns, rows): &(u16, u16)| (SIZE_MIN.0..=500).contains(columns) && (SIZE_MIN.1..=500).contains(rows);
    parsed.filter(fits).ok_or_else(|| "columns and rows, such as 80x24; from 40x10 to 500x500".to_owned())
}

impl TopArgs {
    /// Shows the daemon until a person ends it, or once.
    ///
    /// # Errors
    /// A daemon that does not answer at the start, a terminal that cannot be used, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let mut looks = Looks::begin(self)?;
        let has_colours = !self.no_color && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut screen = Screen::new(self.sort, &self.filter, has_colours);
        if self.once {
            std::thread::sleep(self.every());
            looks.look();
            let text = as_text(&screen, &looks, self.size)?;
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(text.as_bytes())?;
            stdout.flush()?;
            // If the second look failed, the text shows the first one.
            return looks.problem.map_or(Ok(Exit::Done), |problem| Err(Failure::new(Exit::Unavailable, problem)));
        }
        // It gives the terminal back, also after a panic.
        let mut terminal = ratatui::try_init()?;
        let done = show(&mut terminal, &mut screen, &mut looks, self.every());
        ratatui::try_restore()?;
        done.map(|()| Exit::Done)
    }

    fn every(&self) -> Duration {
        Duration::from_secs_f64(self.every)
    }
}

/// Draws, reads keys and looks again, until a key ends it.
fn show(
    terminal: &mut ratatui::DefaultTerminal,
    screen: &mut Screen,
    looks: &mut Looks,
    every: Duration,
) -> Result<(), Failure> {
    let mut next = Instant::now() + every;
    loop {
        terminal.draw(|frame| draw(frame, screen, looks))?;
        let left = next.saturating_duration_since(Instant::now());
        if event::poll(left)? {
            if let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && screen.press(key, &looks.sample) == Done::Yes
            {
                return Ok(());
            }
            continue;
        }
        looks.look();
        next = Instant::now() + every;
    }
}

/// A frame of this size as lines of text.
fn as_text(screen: &Screen, looks: &Looks, (columns, rows): (u16, u16)) -> Result<String, Failure> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).map_err(never)?;
    terminal.draw(|frame| draw(frame, screen, looks)).map_err(never)?;
    Ok(lines(terminal.backend().buffer()))
}

fn never(error: std::convert::Infallible) -> Failure {
    match error {}
}

fn lines(buffer: &Buffer) -> String {
    let mut text = String::new();
    for row in buffer.content().chunks(usize::from(buffer.area.width).max(1)) {
        let (mut line, mut hidden) = (String::new(), 0);
        for cell in row {
            if hidden == 0 {
                line.push_str(cell.symbol());
                // A wide character hides the cell after it.
                hidden = Line::raw(cell.symbol()).width().saturating_sub(1);
            } else {
                hidden -= 1;
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// What was seen of the daemon.
struct Looks {
    socket: PathBuf,
    /// `None` = the last look failed.
    client: Option<Client>,
    began: Instant,
    sample: Sample,
    /// The oldest first.
    history: VecDeque<Point>,
    /// Why the last look failed.
    problem: Option<String>,
}

impl Looks {
    fn begin(args: &TopArgs) -> Result<Self, Failure> {
        let socket = args.admin_socket.as_ref().unwrap_or(&args.socket).clone();
        let mut client = admin::connect(&socket)?;
        let page = client.status_all()?;
        let sample = Sample::first(page, Duration::ZERO);
        let (began, history) = (Instant::now(), VecDeque::new());
        Ok(Self { socket, client: Some(client), began, sample, history, problem: None })
    }

    /// Looks once more. While the daemon does not answer, what was seen last stays.
    fn look(&mut self) {
        let page = match &mut self.client {
            Some(client) => client.status_all().map_err(Failure::from),
            None => admin::connect(&self.socket).and_then(|mut client| {
                let page = client.status_all()?;
                self.client = Some(client);
                Ok(page)
            }),
        };
        match page {
            Ok(page) => {
                self.sample = self.sample.next(page, self.began.elapsed());
                self.history.extend(self.sample.point());
                let surplus = self.history.len().saturating_sub(HISTORY_SAMPLES_MAX);
                self.history.drain(..surplus);
                self.problem = None;
            }
            Err(failure) => (self.client, self.problem) = (None, Some(failure.message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sample::tests::{fleet, page};
    use super::*;
    use crate::finding::Symptom;

    /// A frame after two looks, ten seconds apart.
    fn frame(pages: [crate::wire::StatusPage; 2], args: (Column, &str), size: (u16, u16)) -> String {
        let [first, second] = pages;
        let sample = Sample::first(first, Duration::ZERO).next(second, Duration::from_secs(10));
        let history = sample.point().into_iter().collect();
        let looks =
            Looks { socket: PathBuf::new(), client: None, began: Instant::now(), sample, history, problem: None };
        as_text(&Screen::new(args.0, args.1, false), &looks, size).expect("a frame")
    }

    #[test]
    fn a_small_fleet_fits_80_columns_and_24_rows() {
        let text = frame(fleet(3), (Column::Worker, ""), (80, 24));
        let rows: Vec<&str> = text.lines().collect();
        assert!(rows.len() == 24 && rows.iter().all(|row| Line::raw(*row).width() <= 80), "{text}");
        assert!(rows[0].contains("kvrouted 0.1.0") && rows[0].contains("3 workers"), "{text}");
        // 5000 routes more in ten seconds, of which 99 in 100 within 2 µs.
        assert!(text.contains("routes/s 500") && text.contains("p50 2 us"), "{text}");
        assert!(text.contains("hit 75 %"), "{text}");
        let line = rows.iter().find(|row| row.contains("2/0")).expect("its line");
        for part in ["w2", "ready", "exact", "2.0k", "20"] {
            assert!(line.contains(part), "{part} in {line}");
        }
        assert!(text.contains("q quit"), "{text}");
    }

    #[test]
    fn workers_are_ordered_filtered_and_counted_if_they_do_not_fit() {
        let text = frame(fleet(300), (Column::Blocks, ""), (80, 24));
        let shown: Vec<&str> = text.lines().filter(|row| row.contains("/0 ")).collect();
        assert!(shown[0].contains("300/0") && shown[1].contains("299/0"), "the most blocks first: {text}");
        assert!(text.contains("of 300"), "{text}");
        let text = frame(fleet(300), (Column::Worker, "w77"), (80, 24));
        let shown: Vec<&str> = text.lines().filter(|row| row.contains("/0 ")).collect();
        assert!(shown.len() == 1 && shown[0].contains("77/0"), "{text}");
    }

    #[test]
    fn findings_and_an_empty_fleet_are_said() {
        let mut pages = [page(0, 0), page(0, 0)];
        pages[1].findings = vec![Symptom::EventsOff.finding()];
        let text = frame(pages, (Column::Worker, ""), (80, 24));
        assert!(text.contains("severe") && text.contains("events_off"), "{text}");
        assert!(text.contains("no workers"), "{text}");
    }

    #[test]
    fn sizes_and_times_are_checked() {
        assert_eq!(size("100x30"), Ok((100, 30)));
        assert!(["", "80", "80x", "x24", "10x24", "80x5", "9999x24"].iter().all(|text| size(text).is_err()));
        assert!(seconds("0.5").is_ok() && ["0", "-1", "nan", "3600"].iter().all(|text| seconds(text).is_err()));
    }
}
