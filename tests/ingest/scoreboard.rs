//! The scoreboard's scenarios of the newest engines against this build's daemon and, on request, half a minute of
//! chaos.
//!
//! Both drive the engines' own publishers (`scripts/engines/scoreboard`, `scripts/chaos`). If those are missing, the
//! tests report it and pass, unless KVROUTED_REQUIRE_ENGINES=1. With KVROUTED_SKIP_ENGINES=1 they do not try. Older
//! versions and longer chaos are run by hand: `scripts/engines/RESULTS.md`.

// clippy.toml allows it in #[test] functions; all of this file is test.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::kit::skipped_without_engines;

/// What the scripts exit with where there is no engine.
const UNAVAILABLE: i32 = 69;

#[test]
fn no_answer_about_the_newest_engines_is_wrong() {
    let Some(lines) = run("scripts/engines/scoreboard", &["--newest", "--json"]) else { return };
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!rows.is_empty());
    for row in &rows {
        assert_eq!(row["passed"], true, "{row}");
        assert_eq!(row["exact_and_wrong"], 0, "{row}");
        // Only an answer that is called unproven may say too much, and only of blocks below device memory.
        let is_lower_tier = row["trust"] == serde_json::json!(["unproven"]) && row["wrong_on_device"] == 0;
        assert!(is_lower_tier || row["over"] == 0, "{row}");
    }
}

#[test]
#[ignore = "what comes of failures hangs on time: run it on a machine that has some, with --test-threads=1"]
fn no_answer_says_too_much_while_everything_fails() {
    chaos(&["--minutes", "0.5", "--seed", "1", "--json"]);
}

#[test]
#[ignore = "what comes of failures hangs on time: run it on a machine that has some, with --test-threads=1"]
fn no_answer_says_too_much_while_everything_fails_and_snapshots_are_loaded() {
    chaos(&["--minutes", "0.5", "--seed", "2", "--snapshots", "--json"]);
}

fn chaos(options: &[&str]) {
    let Some(line) = run("scripts/chaos", options) else { return };
    let result: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(result["over_counts"], 0, "{result}");
    assert_eq!(result["wrong"], Value::Array(Vec::new()), "{result}");
    assert!(result["answers"].as_u64() > Some(0), "nothing was compared: {result}");
}

/// What a script prints, or nothing where it cannot run here. Its exit says whether anything was wrong.
fn run(script: &str, options: &[&str]) -> Option<String> {
    if std::env::var("KVROUTED_SKIP_ENGINES").is_ok_and(|value| value == "1") {
        skipped_without_engines(script, "KVROUTED_SKIP_ENGINES is set");
        return None;
    }
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script))
        .args(options)
        .env("KVROUTED_BIN", env!("CARGO_BIN_EXE_kvrouted"))
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            skipped_without_engines(script, &error.to_string());
            return None;
        }
    };
    let words = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(UNAVAILABLE) {
        skipped_without_engines(script, words.lines().last().unwrap_or("no reason given"));
        return None;
    }
    for line in words.lines().filter_map(|line| line.strip_prefix("skipped: ")) {
        skipped_without_engines(script, line);
    }
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{script} ended with {}:\n{words}\n{printed}", output.status);
    Some(printed)
}
