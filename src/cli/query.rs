//! `kvrouted query`: asks, prints, books nothing.

use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};

use super::exit::{Exit, Failure};
use super::potential::{self, Loads};
use super::prompts::{self, Question};
use super::ranking::{self, Answer};
use super::worker::worker;
use super::{remote, terms};
use crate::config::socket_default;
use crate::fleet::PoolRole;
use crate::ids::Worker;
use crate::route::Mode;

/// Prints which worker should run a prompt, and why.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("prompt").required(true).args(["tokens", "tokens_file", "batch"]))]
pub struct QueryArgs {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The model
    #[arg(long, value_name = "NAME")]
    pub model: String,
    /// The namespace of the model's space [default: the default namespace]
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// The pool of the model's workers, where it has several: prefill, decode or both [default: decode if --disaggregate]
    #[arg(long, value_name = "ROLE", value_parser = role)]
    pub role: Option<PoolRole>,
    /// The prompt's token ids, with commas between
    #[arg(long, value_name = "1,2,3")]
    pub tokens: Option<String>,
    /// A file with the prompt's token ids: a JSON array, or integers between whitespace; - = standard input
    #[arg(long, value_name = "FILE")]
    pub tokens_file: Option<PathBuf>,
    /// A file with many prompts, {"tokens":[...],"lora":...,"salt":...} a line; - = standard input
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["lora", "salt"])]
    pub batch: Option<PathBuf>,
    /// The prompt's LoRA adapter
    #[arg(long, value_name = "NAME")]
    pub lora: Option<String>,
    /// The prompt's cache salt
    #[arg(long, value_name = "SALT")]
    pub salt: Option<String>,
    /// How the worker is chosen [default: as the space's policy says]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub mode: Option<Mode>,
    /// The only worker that may be chosen: its id for any rank, or id/rank
    #[arg(long, value_name = "ID[/RANK]", value_parser = worker)]
    pub pin: Option<Worker>,
    /// The session that the prompt belongs to: whether a worker is kept for it depends on `affinity` in [policy]
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// Choose a worker of the model's prefill pool too, and one of its decode pool
    #[arg(long)]
    pub disaggregate: bool,
    /// Print what every cost was made of, term by term
    #[arg(long, conflicts_with = "json")]
    pub explain: bool,
    /// Print what every worker would have to do if it took the prompt, instead of who is chosen
    #[arg(long, conflicts_with_all = ["explain", "mode", "pin", "session", "disaggregate"])]
    pub potential_loads: bool,
    /// Print one JSON object a prompt instead of a table
    #[arg(long)]
    pub json: bool,
}

impl QueryArgs {
    /// Asks everything and prints the answers in the order of the questions.
    ///
    /// # Errors
    /// Input that cannot be read, a daemon that does not answer, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let questions = self.questions()?;
        // Flushed when the last answer is out: `Stdout` itself flushes at every line.
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        let mut refused = 0;
        let role = self.role.or(self.disaggregate.then_some(PoolRole::Decode));
        let pool = remote::Pool { model: &self.model, namespace: self.namespace.as_deref(), role };
        if self.potential_loads {
            remote::potential_loads(&self.socket, pool, &questions, &mut |place, loads| {
                refused += usize::from(loads.is_err());
                self.print_loads(&mut out, place, &questions[place], loads)
            })?;
            return self.end(out, refused, questions.len());
        }
        let session = self.session.as_deref();
        let how = remote::How { mode: self.mode, pin: self.pin, session, disaggregate: self.disaggregate };
        remote::ask(&self.socket, pool, how, &questions, &mut |place, answer| {
            refused += usize::from(matches!(answer, Answer::Refused(_)));
            self.print(&mut out, place, &questions[place], answer)
        })?;
        self.end(out, refused, questions.len())
    }

    fn end(&self, mut out: impl Write, refused: usize, asked: usize) -> Result<Exit, Failure> {
        out.flush()?;
        drop(out);
        match refused {
            0 => Ok(Exit::Done),
            _ => Err(Failure::new(Exit::Refused, format!("{refused} of {asked} queries were refused"))),
        }
    }

    fn print_loads(
        &self,
        out: &mut dyn Write,
        place: usize,
        question: &Question,
        loads: &Loads,
    ) -> Result<(), Failure> {
        if self.json {
            writeln!(out, "{}", potential::json(loads)?)?;
            return Ok(());
        }
        self.print_place(out, place)?;
        out.write_all(potential::text(loads, question.token_count()).as_bytes())?;
        Ok(())
    }

    /// Says which prompt of many comes next.
    fn print_place(&self, out: &mut dyn Write, place: usize) -> Result<(), Failure> {
        if self.batch.is_some() {
            writeln!(out, "{}query {}:", if place == 0 { "" } else { "\n" }, place + 1)?;
        }
        Ok(())
    }

    fn print(&self, out: &mut dyn Write, place: usize, question: &Question, answer: &Answer) -> Result<(), Failure> {
        if self.json {
            let line = ranking::json(answer).map_err(|error| Failure::new(Exit::Internal, error.to_string()))?;
            writeln!(out, "{line}")?;
            return Ok(());
        }
        self.print_place(out, place)?;
        out.write_all(ranking::text(answer, question.token_count()).as_bytes())?;
        if let (Answer::Ranking(ranking), true) = (answer, self.explain) {
            out.write_all(terms::text(ranking).as_bytes())?;
        }
        Ok(())
    }

    fn questions(&self) -> Result<Vec<Question>, Failure> {
        let usage = |source: &str, complaint: &str| {
            let lines: Vec<_> = complaint.lines().map(|line| format!("{source}: {line}")).collect();
            Failure::new(Exit::Usage, lines.join("\n"))
        };
        if let Some(path) = &self.batch {
            return prompts::batch(&read(path)?).map_err(|complaint| usage(&path.to_string_lossy(), &complaint));
        }
        let (source, text) = match (&self.tokens_file, &self.tokens) {
            (Some(path), _) => (path.to_string_lossy().into_owned(), read(path)?),
            (None, tokens) => ("--tokens".to_owned(), tokens.clone().unwrap_or_default()),
        };
        let tokens = prompts::tokens(&text).map_err(|complaint| usage(&source, &complaint))?;
        Ok(vec![Question { lora: self.lora.clone(), salt: self.salt.clone(), ..Question::of(&tokens) }])
    }
}

fn mode(text: &str) -> Result<Mode, String> {
    let named = Mode::ALL.into_iter().find(|mode| mode.name() == text);
    named.ok_or_else(|| format!("`{text}` is none of {}", Mode::NAMES.join(", ")))
}

fn role(text: &str) -> Result<PoolRole, String> {
    let roles = [PoolRole::Both, PoolRole::Prefill, PoolRole::Decode];
    let named = roles.into_iter().find(|role| role.name() == text);
    named.ok_or_else(|| format!("`{text}` is none of {}", roles.map(PoolRole::name).join(", ")))
}

fn read(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().read_to_string(&mut text).map(|_| ())
    } else {
        std::fs::read_to_string(path).map(|content| text = content)
    };
    read.map_err(|error| Failure::new(Exit::Usage, format!("{}: cannot be read: {error}", path.display())))?;
    Ok(text)
}
