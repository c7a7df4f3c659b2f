//! `kvrouted query`: asks a daemon which worker should run a prompt, and prints the answer. Books nothing.

mod ask;
mod print;

use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::print::{Answer, Loads};
use super::exit::{Exit, Failure};
use super::worker::worker;
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
    /// The role of the space, if the model has several: prefill, decode or both [default: decode if --disaggregate]
    #[arg(long, value_name = "ROLE", value_parser = role)]
    pub role: Option<PoolRole>,
    /// The prompt's token ids, separated by commas
    #[arg(long, value_name = "1,2,3")]
    pub tokens: Option<String>,
    /// A file with the prompt's token ids: a JSON array, or integers separated by whitespace; - = standard input
    #[arg(long, value_name = "FILE")]
    pub tokens_file: Option<PathBuf>,
    /// A file with many prompts, each line {"tokens":[...],"lora":...,"salt":...}; - = standard input
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["lora", "salt"])]
    pub batch: Option<PathBuf>,
    /// The prompt's LoRA adapter
    #[arg(long, value_name = "NAME")]
    pub lora: Option<String>,
    /// The prompt's cache salt
    #[arg(long, value_name = "SALT")]
    pub salt: Option<String>,
    /// The mode of the decision [default: that of the space's policy]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub mode: Option<Mode>,
    /// The only worker that may be chosen: its id for any rank, or id/rank
    #[arg(long, value_name = "ID[/RANK]", value_parser = worker)]
    pub pin: Option<Worker>,
    /// The prompt's session, for `affinity` in [policy]
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// Choose a prefill worker and a decode worker
    #[arg(long)]
    pub disaggregate: bool,
    /// Print every cost, term by term
    #[arg(long, conflicts_with = "json")]
    pub explain: bool,
    /// Print the load of every worker if it took the prompt, instead of a decision
    #[arg(long, conflicts_with_all = ["explain", "mode", "pin", "session", "disaggregate"])]
    pub potential_loads: bool,
    /// Print one JSON object for each prompt instead of a table
    #[arg(long)]
    pub json: bool,
}

impl QueryArgs {
    /// Asks about every prompt and prints the answers in the same order.
    ///
    /// # Errors
    /// Input that cannot be read, a daemon that does not answer, a closed standard output.
    pub fn run(&self) -> Result<Exit, Failure> {
        let questions = self.questions()?;
        // Buffered until the last answer, because `Stdout` flushes at every line.
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        let mut refused = 0;
        let role = self.role.or(self.disaggregate.then_some(PoolRole::Decode));
        let name = ask::SpaceName { model: &self.model, namespace: self.namespace.as_deref(), role };
        if self.potential_loads {
            ask::potential_loads(&self.socket, name, &questions, &mut |place, loads| {
                refused += usize::from(loads.is_err());
                self.print_loads(&mut out, place, &questions[place], loads)
            })?;
            return self.end(out, refused, questions.len());
        }
        let session = self.session.as_deref();
        let options = ask::RequestOptions { mode: self.mode, pin: self.pin, session, disaggregate: self.disaggregate };
        ask::ask(&self.socket, name, options, &questions, &mut |place, answer| {
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
            writeln!(out, "{}", print::loads_json(loads)?)?;
            return Ok(());
        }
        self.print_place(out, place)?;
        out.write_all(print::loads_text(loads, question.token_count()).as_bytes())?;
        Ok(())
    }

    /// Prints the number of the next prompt, if there are many.
    fn print_place(&self, out: &mut dyn Write, place: usize) -> Result<(), Failure> {
        if self.batch.is_some() {
            writeln!(out, "{}query {}:", if place == 0 { "" } else { "\n" }, place + 1)?;
        }
        Ok(())
    }

    fn print(&self, out: &mut dyn Write, place: usize, question: &Question, answer: &Answer) -> Result<(), Failure> {
        if self.json {
            let line = print::answer_json(answer).map_err(|error| Failure::new(Exit::Internal, error.to_string()))?;
            writeln!(out, "{line}")?;
            return Ok(());
        }
        self.print_place(out, place)?;
        out.write_all(print::answer_text(answer, question.token_count()).as_bytes())?;
        if let (Answer::Ranking(ranking), true) = (answer, self.explain) {
            out.write_all(print::terms_text(ranking).as_bytes())?;
        }
        Ok(())
    }

    fn questions(&self) -> Result<Vec<Question>, Failure> {
        let usage = |source: &str, complaint: &str| {
            let lines: Vec<_> = complaint.lines().map(|line| format!("{source}: {line}")).collect();
            Failure::new(Exit::Usage, lines.join("\n"))
        };
        if let Some(path) = &self.batch {
            return parse_batch(&read(path)?).map_err(|complaint| usage(&path.to_string_lossy(), &complaint));
        }
        let (source, text) = match (&self.tokens_file, &self.tokens) {
            (Some(path), _) => (path.to_string_lossy().into_owned(), read(path)?),
            (None, tokens) => ("--tokens".to_owned(), tokens.clone().unwrap_or_default()),
        };
        let tokens = parse_tokens(&text).map_err(|complaint| usage(&source, &complaint))?;
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

/// One prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Question {
    /// Token ids, each a little-endian u32.
    tokens: Vec<u8>,
    /// LoRA adapter; `None` = none.
    lora: Option<String>,
    /// Cache salt; `None` = none.
    salt: Option<String>,
}

impl Question {
    fn of(tokens: &[u32]) -> Self {
        Self { tokens: tokens.iter().flat_map(|token| token.to_le_bytes()).collect(), ..Self::default() }
    }

    const fn token_count(&self) -> usize {
        self.tokens.len() / 4
    }
}

/// Reads token ids: a JSON array, or integers separated by whitespace or commas.
///
/// # Errors
/// A message that names the first entry that is not a token id.
fn parse_tokens(text: &str) -> Result<Vec<u32>, String> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).map_err(|error| format!("not a JSON array of token ids: {error}"));
    }
    if text.trim_start().starts_with('{') {
        return Err(
            "expected a list of token ids, found a JSON object; for prompts as JSON objects, one in each line, use --batch"
                .to_owned(),
        );
    }
    let mut tokens = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for word in line.split([',', ' ', '\t', '\r']).filter(|word| !word.is_empty()) {
            let token = word.parse().map_err(|_| {
                format!("line {}: `{word}`, entry {}, is not a token id (0 to 4294967295)", at + 1, tokens.len() + 1)
            })?;
            tokens.push(token);
        }
    }
    Ok(tokens)
}

/// One line of a batch file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchLine {
    tokens: Vec<u32>,
    #[serde(default)]
    lora: Option<String>,
    #[serde(default)]
    salt: Option<String>,
}

/// Reads a batch: each line `{"tokens":[...],"lora":...,"salt":...}`; lora and salt may be absent or null. Skips empty
/// lines.
///
/// # Errors
/// A message that names every line that cannot be read.
fn parse_batch(text: &str) -> Result<Vec<Question>, String> {
    let mut questions = Vec::new();
    let mut complaints = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str::<BatchLine>(line) {
            Ok(line) => questions.push(Question { lora: line.lora, salt: line.salt, ..Question::of(&line.tokens) }),
            // serde_json sees one line at a time and calls it line 1.
            Err(error) => {
                complaints.push(format!("line {}: {}", at + 1, error.to_string().replace(" at line 1 ", " at ")))
            }
        }
    }
    if complaints.is_empty() { Ok(questions) } else { Err(complaints.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_ids_are_json_or_separated_integers() {
        assert_eq!(parse_tokens("1,2,3").unwrap(), [1, 2, 3]);
        assert_eq!(parse_tokens(" [1, 2,\n 4294967295]\n").unwrap(), [1, 2, u32::MAX]);
        assert_eq!(parse_tokens("1 2\r\n\t3\n").unwrap(), [1, 2, 3]);
        assert_eq!(parse_tokens("").unwrap(), [0_u32; 0]);
        assert_eq!(Question::of(&[1, 0x0102]).tokens, [1, 0, 0, 0, 2, 1, 0, 0]);
        assert_eq!(Question::of(&[7, 7]).token_count(), 2);
    }

    #[test]
    fn an_invalid_token_id_is_named() {
        assert!(parse_tokens("1 2\n3 x").unwrap_err().contains("line 2: `x`, entry 4"));
        assert!(parse_tokens("1,-2").unwrap_err().contains("`-2`"));
        assert!(parse_tokens("4294967296").unwrap_err().contains("0 to 4294967295"));
        assert!(parse_tokens("[1, 2.5]").unwrap_err().contains("JSON array"));
        assert!(parse_tokens("[1").is_err());
        assert!(parse_tokens("\n{\"tokens\":[1]}").unwrap_err().contains("--batch"));
    }

    #[test]
    fn each_line_of_a_batch_is_a_question() {
        let read = parse_batch(
            "{\"tokens\":[1]}\n\n{\"tokens\":[2],\"lora\":\"l\",\"salt\":null}\n{\"salt\":\"s\",\"tokens\":[]}",
        )
        .unwrap();
        assert_eq!(read[0], Question::of(&[1]));
        assert_eq!(read[1], Question { lora: Some("l".into()), ..Question::of(&[2]) });
        assert_eq!(read[2], Question { salt: Some("s".into()), ..Question::of(&[]) });
        assert_eq!(read.len(), 3);
    }

    #[test]
    fn every_bad_line_of_a_batch_is_named() {
        let complaints = parse_batch(
            "{\"tokens\":[1]}\nnonsense\n{\"tokens\":[-1]}\n{\"lora\":\"x\"}\n{\"tokens\":[1],\"slat\":\"s\"}\n",
        )
        .unwrap_err();
        let lines: Vec<_> = complaints.lines().collect();
        assert_eq!(lines.len(), 4, "{complaints}");
        for (line, words) in
            lines.iter().zip(["line 2: ", "line 3: ", "line 4: missing field `tokens`", "line 5: unknown field `slat`"])
        {
            assert!(line.starts_with(words), "{line}");
        }
        assert!(!complaints.contains("line 1"), "{complaints}");
    }
}
