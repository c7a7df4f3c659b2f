//! House rules that neither the compiler nor clippy checks. Each failure names file, line and rule.

use std::collections::BTreeSet;
use std::process::Command;

use crate::retired::retired;
use crate::{report, root};

/// Lines of a source file. A file may have more where its subject needs them: then it is in [`LONG_FILES`].
const FILE_LINES: usize = 800;
/// Longer files, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];
/// Lines of a function, signature and braces included.
const FUNCTION_LINES_MAX: usize = 70;
/// Modules from the bottom up. A module may use those of lower layers; in the first layer also each other.
const LAYERS: &[&[&str]] = &[
    &[
        "audit",
        "budget",
        "ids",
        "limits",
        "endpoint",
        "engine_law",
        "error",
        "framed_file",
        "owned_directory",
        "log_quota",
        "log_writer",
        "machine",
        "masking",
        "trust",
        "finding",
        "metrics",
        "nats",
        "reasons",
        "recycling_queue",
        "remote",
        "sandbox",
        "schema_generated",
        "shares",
        "prefetch",
        "simd",
        "sync",
        "watchdog",
        "zmtp",
    ],
    &["hash"],
    &["protocol"],
    &["columns", "simulated_engine"],
    &["fleet", "load", "index", "event", "queue", "lane"],
    &["predict"],
    &["route"],
    &["wire", "config", "shadow", "journal", "traces"],
    &["requests"],
    &["routers"],
    &["serve", "ingest", "client", "discovery"],
    &["snapshot"],
    &["connect", "daemon", "demo", "relay", "simulate"],
    &["cli"],
];
/// What a gateway builds that takes the feature `client` alone. All other dependencies are optional.
const CLIENT_DEPENDENCIES: &[&str] = &[
    "bytemuck",
    "bytes",
    "crc32fast",
    "flatbuffers",
    "libc",
    "parking_lot",
    "rand",
    "rustc-hash",
    "rustix",
    "thiserror",
    "tokio",
    "tracing",
    "xxhash-rust",
];
/// Where unsafe code may be. (The memory of a lane is mapped by the daemon and by its client: by what lies below both.
/// A refused system call is counted in a signal handler. The index and the bookings prefetch cache lines.)
const UNSAFE_ALLOWED: &[&str] =
    &["src/index/", "src/hash/", "src/prefetch.rs", "src/serve/", "src/lane/memory.rs", "src/sandbox/refusals.rs"];

struct Source {
    path: String,
    text: String,
}

impl Source {
    fn is_generated(&self) -> bool {
        self.path.starts_with("src/schema_generated/")
    }

    /// A source file of the crate that people write.
    fn is_ours(&self) -> bool {
        self.path.starts_with("src/") && self.path.ends_with(".rs") && !self.is_generated()
    }

    /// Numbered lines, without comments; empty lines are kept.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let line_comment = |line: &str| line.trim_start().starts_with("//");
        self.text.lines().enumerate().map(move |(at, line)| (at + 1, if line_comment(line) { "" } else { line }))
    }

    /// As `code`, up to the unit tests, which may use anything.
    fn code_before_tests(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code().take_while(|(_, line)| !line.trim_start().starts_with("#[cfg(test)]"))
    }
}

/// The project's text files: what git knows and does not ignore, or, without git, the folders of sources.
fn sources() -> Vec<Source> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .ok()
        .filter(|output| output.status.success() && !output.stdout.is_empty())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let mut paths: BTreeSet<String> = BTreeSet::new();
    match listed {
        Some(list) => paths.extend(list.split('\0').filter(|path| !path.is_empty()).map(str::to_string)),
        None => ["src", "tests", "scripts", "schemas", "benches"].iter().for_each(|folder| walk(folder, &mut paths)),
    }
    let read = |path: String| Some(Source { text: std::fs::read_to_string(root().join(&path)).ok()?, path });
    let sources: Vec<Source> = paths.into_iter().filter_map(read).collect();
    assert!(sources.iter().any(|source| source.path == "src/lib.rs"), "the sources were not found");
    sources
}

fn walk(folder: &str, paths: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(root().join(folder)).into_iter().flatten().flatten() {
        let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&path, paths),
            Ok(kind) if kind.is_file() => drop(paths.insert(path)),
            _ => {}
        }
    }
}

#[track_caller]
#[test]
fn files_are_short() {
    let mut problems = Vec::new();
    let sources = sources();
    for source in sources.iter().filter(|source| source.is_ours()) {
        let lines = source.text.lines().count();
        let reason = LONG_FILES.iter().find(|(path, _)| *path == source.path);
        if lines > FILE_LINES && reason.is_none() {
            let rule = format!("more than {FILE_LINES} lines: split it by subject, or give its reason in LONG_FILES");
            problems.push(format!("{}:{lines}: {rule}", source.path));
        }
    }
    for (path, _) in LONG_FILES {
        let lines = sources.iter().find(|source| source.path == *path).map_or(0, |source| source.text.lines().count());
        if lines <= FILE_LINES {
            problems.push(format!("{path}:{lines}: it is not long: remove it from LONG_FILES"));
        }
    }
    report(&problems);
}

#[test]
fn sources_use_the_words_of_the_glossary() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| source.is_ours()) {
        for (at, line) in source.text.lines().enumerate() {
            for word in retired(line) {
                problems.push(format!("{}:{}: '{word}': see docs/glossary.md", source.path, at + 1));
            }
        }
    }
    report(&problems);
}

/// Whether a formatted line begins a function.
fn begins_function(line: &str) -> bool {
    let mut words = line.split_whitespace();
    loop {
        match words.next() {
            Some("fn") => return true,
            Some("const" | "async" | "unsafe" | "extern" | "\"C\"" | "default") => {}
            Some(word) if word == "pub" || word.starts_with("pub(") || word.ends_with(')') => {}
            _ => return false,
        }
    }
}

/// Lines of the function that begins at `lines[at]`; rustfmt closes it with a brace at its own indentation.
fn function_lines(lines: &[&str], at: usize) -> usize {
    let indent: String = lines[at].chars().take_while(|c| *c == ' ').collect();
    if lines[at].ends_with(';') || lines[at].ends_with('}') {
        return 1;
    }
    let close = format!("{indent}}}");
    for (length, line) in lines[at..].iter().enumerate() {
        let signature_only = line.starts_with(&format!("{indent})")) && line.ends_with(';');
        if *line == close || signature_only {
            return length + 1;
        }
    }
    1
}

#[test]
fn functions_are_short() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| source.path.ends_with(".rs") && !source.is_generated()) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| begins_function(line)) {
            let length = function_lines(&lines, at);
            if length > FUNCTION_LINES_MAX {
                let rule = format!("a function has at most {FUNCTION_LINES_MAX} lines, this one {length}");
                problems.push(format!("{}:{}: {rule}", source.path, at + 1));
            }
        }
    }
    report(&problems);
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// The modules that follow `crate::` in `text`, with their lines: `crate::a::b` and `crate::{a, b::{c, d}}`.
fn used_modules(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (start, _) in text.match_indices("crate::") {
        if text[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let line = text[..start].matches('\n').count() + 1;
        let rest = &text[start + "crate::".len()..];
        let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        let Some(group) = rest.strip_prefix('{') else {
            found.push((line, name(rest)));
            continue;
        };
        let (mut depth, mut expects_name) = (1, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => expects_name = true,
                c if depth == 1 && expects_name && c.is_alphabetic() => {
                    found.push((line + group[..at].matches('\n').count(), name(&group[at..])));
                    expects_name = false;
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    found
}

#[test]
fn modules_use_only_lower_layers() {
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| source.is_ours()) {
        let inside = source.path.trim_start_matches("src/");
        let module = inside.split('/').next().unwrap_or_default().trim_end_matches(".rs");
        if matches!(module, "main" | "lib") || inside.ends_with("tests.rs") || inside.contains("/tests/") {
            continue;
        }
        let Some(own) = layer(module) else {
            problems.push(format!(
                "{}:1: module '{module}' has no layer: place it in LAYERS of tests/tidy/rules.rs",
                source.path
            ));
            continue;
        };
        let text: String = source.code_before_tests().map(|(_, line)| format!("{line}\n")).collect();
        for (line, used) in used_modules(&text).into_iter().filter(|(_, used)| used != module) {
            let Some(other) = layer(&used) else { continue }; // a macro or an item of the crate's root
            if other > own || (other == own && own > 0) {
                problems
                    .push(format!("{}:{line}: '{module}' may not use '{used}', which is not below it", source.path));
            }
        }
    }
    report(&problems);
}

#[test]
fn unsafe_code_stays_where_it_is_allowed() {
    let mut problems = Vec::new();
    let allowed = |path: &str| UNSAFE_ALLOWED.iter().any(|folder| path.starts_with(folder));
    for source in sources().iter().filter(|source| source.is_ours() && !allowed(&source.path)) {
        for (line, code) in source.code() {
            if code.contains("(unsafe_code")
                || ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|word| code.contains(word))
            {
                problems.push(format!("{}:{line}: unsafe code is only in {}", source.path, UNSAFE_ALLOWED.join(", ")));
            }
        }
    }
    report(&problems);
}

#[test]
fn nothing_is_left_unfinished() {
    let macros = ["todo", "unimplemented", "dbg"].map(|name| format!("{name}!("));
    let mut problems = Vec::new();
    for source in sources().iter().filter(|source| source.path.ends_with(".rs") && !source.is_generated()) {
        for (line, code) in source.code() {
            for name in macros.iter().filter(|name| code.contains(name.as_str())) {
                problems.push(format!("{}:{line}: no {name}…)", source.path));
            }
        }
    }
    report(&problems);
}

#[test]
fn no_path_of_one_machine() {
    let folders = ["home", "root", "work"].map(|name| format!("/{name}/"));
    let mut problems = Vec::new();
    for source in sources().iter() {
        for (at, line) in source.text.lines().enumerate() {
            for folder in &folders {
                let absolute = |(start, _): (usize, &str)| {
                    !line[..start].ends_with(|c: char| c.is_alphanumeric() || "_-.)}*]".contains(c))
                };
                if line.match_indices(folder.as_str()).any(absolute) {
                    problems.push(format!("{}:{}: names a folder of one machine, {folder}", source.path, at + 1));
                }
            }
        }
    }
    report(&problems);
}

/// The crates that a file's `use` lines begin with, other than the standard library and the crate itself.
fn used_crates(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    let own = ["std", "core", "alloc", "crate", "self", "super"];
    let first = |line: &str| line.len() - line.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
    source.code().filter_map(move |(at, line)| {
        let path = line.trim_start().strip_prefix("use ")?;
        let (name, rest) = path.split_at(first(path));
        (rest.starts_with("::") && !own.contains(&name)).then_some((at, name))
    })
}

/// `cargo test` compiles the targets with the crate's own dependencies, libFuzzer compiles them with those of `fuzz`.
#[test]
fn fuzz_targets_use_only_what_the_fuzz_package_depends_on() {
    let manifest = std::fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("the manifest of the fuzz package");
    let (_, dependencies) = manifest.split_once("[dependencies]").expect("dependencies");
    let (dependencies, _) = dependencies.split_once("\n[").expect("targets");
    let (mut problems, mut seen) = (Vec::new(), 0);
    for source in sources().iter().filter(|source| source.path.starts_with("tests/fuzz_targets/targets/")) {
        for (at, name) in used_crates(source) {
            seen += 1;
            let is_listed = |line: &str| line.split(' ').next() == Some(&name.replace('_', "-"));
            if !dependencies.lines().any(is_listed) {
                problems.push(format!("{}:{at}: `{name}` is no dependency of fuzz/Cargo.toml", source.path));
            }
        }
    }
    report(&problems);
    assert!(seen > 0, "no target uses any crate");
}

#[cfg(unix)]
#[test]
fn every_script_answers_help() {
    use std::os::unix::fs::PermissionsExt;
    let mut problems = Vec::new();
    let mut asked = 0;
    for source in sources().iter().filter(|source| source.path.starts_with("scripts/")) {
        let path = root().join(&source.path);
        let mode = std::fs::metadata(&path).map_or(0, |metadata| metadata.permissions().mode());
        if mode & 0o111 == 0 {
            continue;
        }
        // A script that does not know --help must not be run to find out.
        if !source.text.contains("--help") && !source.text.contains("argparse") {
            problems.push(format!("{}:1: a script explains itself with --help", source.path));
            continue;
        }
        match Command::new(&path).arg("--help").output() {
            Ok(output) if output.status.success() && !output.stdout.is_empty() => asked += 1,
            Ok(output) if output.status.code() == Some(127) => {} // its interpreter is not on this machine
            Ok(output) => problems.push(format!("{}:1: --help ends with {}", source.path, output.status)),
            Err(error) => problems.push(format!("{}:1: --help does not run: {error}", source.path)),
        }
    }
    report(&problems);
    assert!(asked > 0, "no script was asked");
}

#[test]
fn the_rules_see_what_they_should() {
    let text = "use crate::{ids::{A, B}, limits, hash};\nlet x = crate::route::cost();\nlet y = $crate::event;\n";
    let names: Vec<_> = used_modules(text).into_iter().map(|(line, name)| format!("{line} {name}")).collect();
    assert_eq!(names, ["1 ids", "1 limits", "1 hash", "2 route"]);
    assert!(
        layer("index") == layer("load")
            && layer("index") > layer("hash")
            && layer("route") > layer("index")
            && layer("serve") > layer("wire")
    );
    assert!(begins_function("    pub(crate) const unsafe fn f(") && begins_function("fn g() {"));
    assert!(!begins_function("    let fn_name = 1;") && !begins_function("// fn g()"));
    let lines = ["    fn f(", "        a: u8,", "    ) {", "        a;", "    }", "}"];
    assert_eq!(function_lines(&lines, 0), 5);
    assert_eq!(function_lines(&["fn f(", "    a: u8,", ") -> u8;", "}"], 0), 3);
}

#[test]
fn the_client_needs_no_other_dependencies() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let manifest: toml_edit::DocumentMut = manifest.parse().expect("TOML");
    let dependencies = manifest["dependencies"].as_table().expect("a table");
    let is_optional = |value: &toml_edit::Item| value.get("optional").and_then(toml_edit::Item::as_bool) == Some(true);
    let needed = dependencies.iter().filter(|(_, value)| !is_optional(value)).map(|(name, _)| name);
    assert_eq!(needed.collect::<BTreeSet<_>>(), CLIENT_DEPENDENCIES.iter().copied().collect());
}
