//! The workloads of the suite: one table.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::run::Settings;
use super::workload::agent_sessions::{self, Starts};
use super::workload::generators::{Chat, Retrieval};
use super::workload::{Workload, mooncake};
use crate::engine_law::engine_preset;
use crate::simulated_engine::EngineSpec;

/// The grain of the conversation trace's times, seconds.
const CONVERSATION_GRAIN_S: f64 = 3.0;
/// Agents' longest pause, seconds: longer ones were users who had left.
const THINK_S_MAX: f64 = 60.0;
/// Agent sessions of one run.
const AGENT_SESSIONS: usize = 200;
/// Turns of an agent session. Without a bound, the few longest sessions would run alone for most of the run.
const AGENT_TURNS: usize = 30;
/// Requests of one generated run.
const GENERATED_REQUESTS: usize = 5000;

/// A workload on a fleet.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its short name: in files and tables.
    pub name: &'static str,
    /// The workload of the verdict that it belongs to. Cases of one group count by their mean.
    pub group: &'static str,
    /// What it is.
    pub title: &'static str,
    /// Engines.
    pub workers: usize,
    /// The engines' preset.
    pub engine: &'static str,
    /// Tokens of a KV block.
    pub block_size: u32,
    /// Where a search for capacity begins: a factor of the rate, or live sessions.
    pub first_load: f64,
    /// Whether loads are live sessions.
    pub is_closed: bool,
    source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    /// The second half of the conversation trace.
    Conversation,
    AgentSessions,
    Retrieval,
    Chat,
}

/// The table. Rates of 64 workers are those of 8 times 8.
#[must_use]
pub fn cases() -> Vec<Case> {
    let conversation = |name, title, workers: usize| Case {
        name,
        group: "W1",
        title,
        workers,
        engine: "70b-tp4",
        block_size: 64,
        first_load: 0.16 * workers as f64,
        is_closed: false,
        source: Source::Conversation,
    };
    let mut cases = vec![
        conversation("w1-8", "conversation, second half, on 8 workers", 8),
        conversation("w1-16", "conversation, second half, on 16 workers", 16),
        conversation("w1-64", "conversation, second half, on 64 workers", 64),
    ];
    let on = |name, group, title, (workers, engine), first_load, source| Case {
        name,
        group,
        title,
        workers,
        engine,
        block_size: 64,
        first_load,
        is_closed: source == Source::AgentSessions,
        source,
    };
    let (agents, rag, chat) = ("agent sessions in closed loop", "questions about documents", "chat");
    cases.extend([
        on("w2", "W2", agents, (8, "70b-fp8-tp4"), 40.0, Source::AgentSessions),
        on("w3", "W3", rag, (8, "70b-tp4"), 3.0, Source::Retrieval),
        on("w4", "W4", chat, (8, "70b-tp4"), 8.0, Source::Chat),
    ]);
    cases
}

impl Case {
    /// The fleet, with the engines' true constants known at the start.
    #[must_use]
    pub fn settings(&self, seed: u64) -> Option<Settings> {
        let engine = EngineSpec::of(engine_preset(self.engine)?, self.block_size);
        Some(Settings::of(vec![engine; self.workers], seed))
    }
}

/// The traces that the suite reads, each once.
#[derive(Clone, Debug, Default)]
pub struct Traces {
    conversation: Option<Workload>,
    agents: Option<Workload>,
}

impl Traces {
    /// Reads `mooncake_conversation.jsonl` and `agentic_sessions.jsonl`, plain or with the ending `.gz`, from a folder.
    /// Cases whose trace is not there are left out of the suite.
    ///
    /// # Errors
    /// A sentence that names the file that cannot be read, and why.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let conversation = find(folder, "mooncake_conversation.jsonl")?.map(|(name, lines)| {
            let whole = mooncake::read(lines).map_err(|error| format!("{name}: {error}"))?;
            let sessions = whole.sessions.len();
            Ok::<_, String>(whole.take(sessions / 2..sessions))
        });
        let agents = find(folder, "agentic_sessions.jsonl")?.map(|(name, lines)| {
            agent_sessions::read(lines, THINK_S_MAX, Starts::Live(1)).map_err(|error| format!("{name}: {error}"))
        });
        Ok(Self { conversation: conversation.transpose()?, agents: agents.transpose()? })
    }

    /// The workload of a case for a seed; `None` if its trace is not there. Seeds move arrivals within the grain of the
    /// trace, choose and order sessions, or draw the whole workload.
    #[must_use]
    pub fn workload(&self, case: &Case, seed: u64) -> Option<Workload> {
        match case.source {
            Source::Conversation => {
                let mut half = self.conversation.clone()?;
                mooncake::jitter(&mut half, CONVERSATION_GRAIN_S, seed);
                Some(half)
            }
            Source::AgentSessions => {
                let mut chosen = self.agents.clone()?.shuffled(seed);
                chosen.sessions.truncate(AGENT_SESSIONS);
                chosen.sessions.iter_mut().for_each(|session| session.turns.truncate(AGENT_TURNS));
                Some(chosen)
            }
            Source::Retrieval => {
                // Other parameters than the defaults, on which knobs may be tuned.
                let retrieval = Retrieval {
                    requests: GENERATED_REQUESTS,
                    documents: 3000,
                    document_exponent: 0.9,
                    ..Retrieval::default()
                };
                Some(retrieval.generate(seed))
            }
            Source::Chat => {
                let chat = Chat {
                    requests: GENERATED_REQUESTS,
                    applications: 24,
                    application_exponent: 0.8,
                    ..Chat::default()
                };
                Some(chat.generate(seed))
            }
        }
    }
}

/// The lines of a trace.
pub type Lines = Box<dyn BufRead>;

/// Opens a trace, plain or compressed, and names it. `None`: there is none of this name.
fn find(folder: &Path, name: &str) -> Result<Option<(String, Lines)>, String> {
    for name in [name.to_owned(), format!("{name}.gz")] {
        let path = folder.join(&name);
        if path.exists() {
            return Ok(Some((path.display().to_string(), open(&path)?)));
        }
    }
    Ok(None)
}

/// Opens a file of lines; `-` is standard input. What begins as gzip does is decompressed, whatever the name says: all
/// members of it, as files that were compressed apart and then joined have several.
///
/// # Errors
/// A sentence that names the file that cannot be read, and why.
pub fn open(path: &Path) -> Result<Lines, String> {
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let mut lines: Lines = if path == Path::new("-") {
        Box::new(BufReader::new(std::io::stdin()))
    } else {
        Box::new(BufReader::with_capacity(1 << 18, File::open(path).map_err(cannot)?))
    };
    let is_gzip = lines.fill_buf().map_err(cannot)?.starts_with(&[0x1f, 0x8b]);
    Ok(if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(lines))) } else { lines })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn every_case_has_an_engine_and_a_name_of_its_own() {
        let cases = cases();
        assert!(cases.iter().all(|case| case.settings(1).is_some_and(|s| s.engines.len() == case.workers)));
        assert!(cases.iter().all(|case| cases.iter().filter(|other| other.name == case.name).count() == 1));
    }

    #[test]
    fn files_that_were_compressed_apart_and_joined_are_read_to_the_end() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let member = |text: &str| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(text.as_bytes()).expect("bytes");
            encoder.finish().expect("a member")
        };
        std::fs::write(file.path(), [member("1\n2\n"), member("3\n")].concat()).expect("written");
        let lines: Vec<String> = open(file.path()).expect("lines").lines().map(|line| line.expect("a line")).collect();
        assert_eq!(lines, ["1", "2", "3"]);
        std::fs::write(file.path(), [&member("1\n")[..], b"no gzip"].concat()).expect("written");
        assert!(open(file.path()).expect("lines").lines().any(|line| line.is_err()), "what is no member is no end");
    }

    #[test]
    fn a_case_whose_trace_is_not_there_has_no_workload() {
        let traces = Traces::read(Path::new("/nonexistent")).expect("no trace is no error");
        let found: Vec<&str> =
            cases().iter().filter(|case| traces.workload(case, 1).is_some()).map(|case| case.name).collect();
        assert_eq!(found, ["w3", "w4"]);
    }
}
