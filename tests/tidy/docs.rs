//! The documents: links resolve, the README leads to every page, commands exist, code is that of tested files, and the
//! words are those of the glossary.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{CommandFactory as _, Parser as _};
use kvrouted::cli::Cli;

use crate::kit::{Daemon, skipped, text};
use crate::retired::retired;
use crate::{report, root};

/// The README is an introduction: it has at most this many lines.
const README_LINES_MAX: usize = 200;
struct Document {
    /// From the root.
    path: String,
    text: String,
}

/// A fenced block of a document.
struct Block {
    language: String,
    /// The last text before it.
    before: String,
    lines: Vec<String>,
}

impl Document {
    fn read(path: &str) -> Self {
        let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self { path: path.to_owned(), text }
    }

    /// The fenced blocks, and all else line by line; empty where a block is.
    fn parts(&self) -> (Vec<Block>, Vec<String>) {
        let (mut blocks, mut prose): (Vec<Block>, Vec<String>) = (Vec::new(), Vec::new());
        let mut open: Option<Block> = None;
        for line in self.text.lines() {
            let fence = line.trim_start().strip_prefix("```");
            prose.push(if fence.is_none() && open.is_none() { line.to_owned() } else { String::new() });
            open = match (open, fence) {
                (None, Some(language)) => {
                    let before = prose.iter().rev().find(|line| !line.is_empty()).cloned().unwrap_or_default();
                    Some(Block { language: language.to_owned(), before, lines: Vec::new() })
                }
                (Some(block), Some(_)) => {
                    blocks.push(block);
                    None
                }
                (Some(mut block), None) => {
                    block.lines.push(line.to_owned());
                    Some(block)
                }
                (None, None) => None,
            };
        }
        assert!(open.is_none(), "{}: a block is not closed", self.path);
        (blocks, prose)
    }

    /// Where links lead, with the number of their line. Code in backticks has none.
    fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (at, line) in self.parts().1.iter().enumerate() {
            for (start, _) in line.match_indices("](") {
                let target: String = line[start + 2..].chars().take_while(|c| *c != ')').collect();
                links.push((at + 1, target));
            }
        }
        links
    }

    /// The anchors that its headings have.
    fn anchors(&self) -> BTreeSet<String> {
        let heading = |line: &String| line.starts_with('#').then(|| line.trim_start_matches('#').trim().to_owned());
        self.parts().1.iter().filter_map(heading).map(|heading| anchor(&heading)).collect()
    }

    fn folder(&self) -> PathBuf {
        Path::new(&self.path).parent().map_or_else(PathBuf::new, Path::to_path_buf)
    }
}

/// The anchor of a heading: lower case, without punctuation, spaces as hyphens.
fn anchor(heading: &str) -> String {
    let kept = |c: char| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    heading.chars().filter_map(kept).collect()
}

/// The path from the root without `..`.
fn normal(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in path.components() {
        match part.as_os_str().to_string_lossy().as_ref() {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part.to_owned()),
        }
    }
    parts.join("/")
}

fn pages() -> Vec<String> {
    let names = std::fs::read_dir(root().join("docs")).expect("docs/").flatten();
    let mut pages: Vec<String> = names.map(|entry| format!("docs/{}", entry.file_name().to_string_lossy())).collect();
    pages.sort();
    pages
}

/// What users read: the README, its neighbours and `docs/`.
fn guides() -> Vec<Document> {
    let top = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(str::to_owned);
    top.into_iter().chain(pages()).map(|path| Document::read(&path)).collect()
}

fn references() -> Vec<Document> {
    let paths = [
        "schemas/README.md",
        "perf/README.md",
        "perf/results/README.md",
        "clients/python/README.md",
        "clients/c/README.md",
        "scripts/engines/RESULTS.md",
        "tests/fixtures/events/README.md",
    ];
    paths.into_iter().map(Document::read).collect()
}

#[track_caller]
#[test]
fn links_resolve() {
    let mut problems = Vec::new();
    for document in guides().iter().chain(&references()) {
        for (line, target) in document.links().into_iter().filter(|(_, target)| !target.contains("://")) {
            let (path, wanted) = target.split_once('#').unwrap_or((&target, ""));
            let path = if path.is_empty() { document.path.clone() } else { normal(&document.folder().join(path)) };
            if !root().join(&path).exists() {
                problems.push(format!("{}:{line}: there is no {path}", document.path));
            } else if !wanted.is_empty() && !Document::read(&path).anchors().contains(wanted) {
                problems.push(format!("{}:{line}: {path} has no heading #{wanted}", document.path));
            }
        }
    }
    report(&problems);
}

#[test]
fn the_readme_is_short_and_leads_to_every_page() {
    let readme = Document::read("README.md");
    let lines = readme.text.lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines of {README_LINES_MAX}");
    let linked: BTreeSet<String> = readme.links().into_iter().map(|(_, target)| target).collect();
    let missing: Vec<String> = pages().into_iter().filter(|page| !linked.contains(page)).collect();
    assert!(missing.is_empty(), "README.md does not link to {missing:?}");
    assert!(linked.contains("schemas/README.md"));
}

/// The words of a command line, up to a pipe, a redirection or a comment.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut is_begun = false;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, is_begun) = (Some(c), true),
            (None, '|' | '>' | '#') if word.is_empty() => break,
            (None, ' ') if word.is_empty() && !is_begun => {}
            (None, ' ') => {
                words.push(std::mem::take(&mut word));
                is_begun = false;
            }
            (None, c) => word.push(c),
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    words
}

/// The commands of a document's sessions, lines that go on joined.
fn commands(document: &Document) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    for block in document.parts().0.iter().filter(|block| block.language == "console") {
        let mut goes_on = false;
        for line in block.lines.iter().map(|line| line.trim()) {
            match (goes_on, line.strip_prefix("$ ")) {
                (true, _) => commands.last_mut().expect("its beginning").push_str(line.trim_end_matches('\\')),
                (false, Some(command)) => commands.push(command.trim_end_matches('\\').to_owned()),
                (false, None) => continue,
            }
            goes_on = line.ends_with('\\');
        }
    }
    commands
}

/// What is wrong with a command, if something is.
fn fault(command: &str) -> Option<String> {
    let mut words = words(command);
    // Settings of the environment come before a command.
    words.retain({
        let mut is_leading = true;
        move |word| {
            is_leading &= word.contains('=') && word.starts_with(|c: char| c.is_ascii_uppercase());
            !is_leading
        }
    });
    let value_of = |option: &str| words.iter().position(|word| word == option).and_then(|at| words.get(at + 1));
    match words.first()?.as_str() {
        "kvrouted" => Cli::try_parse_from(&words).err().map(|error| error.to_string()),
        "cargo" if value_of("--manifest-path").is_some() => {
            (!root().join(value_of("--manifest-path")?).exists()).then(|| "no such manifest".to_owned())
        }
        "cargo" if value_of("--example").is_some() => {
            let name = value_of("--example")?;
            let paths = [format!("examples/{name}.rs"), format!("examples/{name}/main.rs")];
            (!paths.iter().any(|path| root().join(path).exists())).then(|| "no such example".to_owned())
        }
        "cargo" if words.iter().any(|word| word == "--test") => {
            let tests = words.windows(2).filter(|pair| pair[0] == "--test").map(|pair| &pair[1]);
            let exists =
                |name: &&String| ["", "/main"].iter().any(|end| root().join(format!("tests/{name}{end}.rs")).exists());
            tests.into_iter().find(|name| !exists(name)).map(|name| format!("no test {name}"))
        }
        "cargo" if words.get(1)? == "run" => {
            let own = words.iter().position(|word| word == "--")?;
            let words = std::iter::once("kvrouted".to_owned()).chain(words[own + 1..].iter().cloned());
            Cli::try_parse_from(words).err().map(|error| error.to_string())
        }
        script if script.starts_with("scripts/") => {
            (!root().join(script).exists()).then(|| format!("there is no {script}"))
        }
        _ => None,
    }
}

#[test]
fn commands_are_those_of_the_program() {
    let mut problems = Vec::new();
    let mut seen = 0;
    for document in guides().iter().chain(&references()) {
        for command in commands(document) {
            seen += 1;
            problems.extend(fault(&command).map(|fault| format!("{}: $ {command}\n{fault}", document.path)));
        }
    }
    report(&problems);
    assert!(seen > 60, "only {seen} commands were found");
}

/// Code in backticks, line by line.
fn spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn options_in_the_text_exist() {
    let program = Cli::command();
    let knows = |name: &str, option: &str| {
        let command = program.get_subcommands().find(|command| command.get_name() == name);
        let parts = command.into_iter().flat_map(|command| std::iter::once(command).chain(command.get_subcommands()));
        parts.flat_map(clap::Command::get_arguments).any(|argument| argument.get_long() == Some(option))
    };
    let mut problems = Vec::new();
    for document in guides() {
        for (at, line) in document.parts().1.iter().enumerate() {
            for span in spans(line).filter(|span| span.starts_with("kvrouted ")) {
                let mut words = span.split_whitespace().skip(1);
                let is_name = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
                let Some(name) = words.next().filter(is_name) else { continue };
                if !program.get_subcommands().any(|command| command.get_name() == name) {
                    problems.push(format!("{}:{}: no command `{span}`", document.path, at + 1));
                }
                for option in words.filter_map(|word| word.strip_prefix("--")).filter(|option| *option != "help") {
                    if !knows(name, option) {
                        problems.push(format!("{}:{}: no --{option} in `{span}`", document.path, at + 1));
                    }
                }
            }
        }
    }
    report(&problems);
}

#[test]
fn code_in_the_readme_is_that_of_its_files() {
    let readme = Document::read("README.md");
    let mut compared = 0;
    for block in readme.parts().0.iter().filter(|block| ["rust", "python", "c"].contains(&block.language.as_str())) {
        let path = spans(&block.before).last().unwrap_or_else(|| panic!("no file is named before {:?}", block.lines));
        let source = Document::read(path).text;
        let lines: Vec<&str> = source.lines().collect();
        let first = block.lines.first().expect("a line");
        let is_there = |at: usize| {
            let indent = lines[at].strip_suffix(first.as_str()).filter(|indent| indent.trim().is_empty());
            let shown = |line: &String| indent.map(|indent| format!("{indent}{line}"));
            let wanted: Option<Vec<String>> = block.lines.iter().map(shown).collect();
            wanted.is_some_and(|wanted| lines[at..].iter().take(wanted.len()).eq(wanted.iter()))
        };
        assert!(
            (0..lines.len()).any(is_there),
            "README.md shows code that is not in {path}:\n{}",
            block.lines.join("\n")
        );
        compared += 1;
    }
    assert_eq!(compared, 3, "Rust, Python and C");
}

#[test]
fn the_words_are_plain() {
    let mut problems = Vec::new();
    for document in guides().iter().chain([&Document::read("schemas/README.md")]) {
        let (_, prose) = document.parts();
        let glossary_end = prose.iter().position(|line| line == "## Retired words").unwrap_or(prose.len());
        for (at, line) in prose.iter().enumerate().take(glossary_end) {
            // Rows of a reference repeat the program's own texts, which have rules of their own.
            let is_row = document.path.starts_with("schemas/") && line.starts_with('|');
            let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join("");
            for word in retired(&text).into_iter().filter(|_| !is_row) {
                problems.push(format!("{}:{}: '{word}': see docs/glossary.md", document.path, at + 1));
            }
        }
    }
    report(&problems);
}

#[test]
fn the_first_request_of_the_readme_is_answered() {
    let example = Path::new(env!("CARGO_BIN_EXE_kvrouted")).parent().expect("its folder").join("examples/route");
    if !example.exists() {
        return skipped("the README's request in Rust", "it is not built: cargo build --example route");
    }
    let daemon = Daemon::start(&["--worker", "id=1"]);
    let output = Command::new(example).args([text(&daemon.socket()), "m", "1,2,3"]).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "send the prompt to worker 1/0\n");
    assert_eq!(daemon.counter("bookings_freed"), 1);
}

#[test]
fn what_the_checks_read_is_what_is_written() {
    assert_eq!(anchor("Who may route, and who may administer"), "who-may-route-and-who-may-administer");
    assert_eq!(normal(Path::new("docs/../perf/./results")), "perf/results");
    assert_eq!(
        words("kvrouted query --set 'a b' \"\" x=1   # why | not"),
        ["kvrouted", "query", "--set", "a b", "", "x=1"]
    );
    assert_eq!(words("a | head -7"), ["a"]);
    assert!(fault("kvrouted query --no-such-option").is_some() && fault("kvrouted status").is_none());
    assert!(fault("cargo test --test no_such_test").is_some() && fault("A=1 cargo test --test tidy").is_none());
    assert!(fault("scripts/no-such-script").is_some() && fault("curl -s http://x").is_none());
}
