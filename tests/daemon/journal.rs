//! The journal of a daemon: one process writes it, another decides again and compares.

use std::path::{Path, PathBuf};

use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde_json::Value;

use crate::kit::engine::Publisher;
use crate::kit::{self, Daemon, prompt, run, text, until};

/// Decisions of a run.
const DECISIONS: u32 = 300;

struct Run {
    _folder: std::sync::Arc<tempfile::TempDir>,
    journal: PathBuf,
    lost: u64,
}

/// Two workers, one of which holds the beginning of some prompts; every other decision is booked.
fn run_of_a_daemon(section: &str) -> Run {
    let folder = kit::folder();
    let journal = folder.path().join("journal");
    let mut publisher = Publisher::new();
    let config = format!(
        "[[worker]]\nid = 1\nendpoint = \"{1}\"\n[[worker]]\nid = 2\n[policy]\nseed = 7\n\
         [journal]\ndir = \"{0}\"\n{section}\n",
        text(&journal),
        publisher.endpoint()
    );
    let mut daemon = Daemon::configured(&config);
    publisher.await_subscription();
    for seed in 0..4 {
        publisher.store(&prompt(seed, 64));
    }
    until("the blocks are there", || daemon.said(&["status"])["workers"][0]["last_seq"].as_u64() == Some(3));
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    for at in 0..DECISIONS {
        let (tokens, name) = (prompt(at % 6, 16 + at % 90), format!("r{at}"));
        let book = (at % 2 == 0).then_some(BookingRequest { request_id: &name, attempt: 0 });
        let question = RouteRequest::new(space, Prompt::of_tokens(&tokens));
        // The model has no worker that only prefills: the reply says so, beside the decision.
        let reply = client.route(&RouteRequest { book, disaggregate: at % 5 == 0, ..question });
        let booking = reply.expect("a decision").booking;
        if let Some(booking) = booking.filter(|_| at % 3 == 0) {
            client.free(&BookingRef::Handle(booking)).expect("freed");
        }
    }
    let lost = daemon.counter("journal_lost");
    drop(client);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    Run { _folder: folder, journal, lost }
}

fn replayed(journal: &Path) -> (Option<i32>, Value) {
    let output = run(&["replay", text(journal), "--json"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = serde_json::from_str(&said).unwrap_or_else(|error| {
        panic!("{error}: {said}{}", String::from_utf8_lossy(&output.stderr));
    });
    (output.status.code(), said)
}

#[test]
fn every_decision_of_a_daemon_is_judged_again_to_the_same_bits() {
    let run = run_of_a_daemon("");
    let (code, said) = replayed(&run.journal);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!((&said["decisions"], &said["equal"]), (&Value::from(DECISIONS), &Value::from(DECISIONS)), "{said}");
    assert_eq!(said["files"][0]["ending"], "closed");
    assert_eq!(run.lost, 0);
}

#[test]
fn a_torn_journal_is_used_up_to_where_it_is_torn() {
    let run = run_of_a_daemon("file_bytes_max = 16384");
    let files = std::fs::read_dir(&run.journal).expect("a folder").map(|entry| entry.expect("a file").path());
    // Beside the journal lies what keeps other daemons away from it.
    let mut files: Vec<_> = files.filter(|file| !file.ends_with("lock")).collect();
    files.sort();
    assert!(files.len() > 1, "{files:?}");
    let last = files.pop().expect("a file");
    let bytes = std::fs::read(&last).expect("read");
    std::fs::write(&last, &bytes[..bytes.len() - 400]).expect("written");
    let (code, said) = replayed(&run.journal);
    assert_eq!((code, &said["files"][files.len()]["ending"]), (Some(0), &Value::from("torn")), "{said}");
    let decisions = said["decisions"].as_u64().expect("a number");
    assert!(
        (u64::from(DECISIONS) - 6..u64::from(DECISIONS)).contains(&decisions) && said["equal"] == decisions,
        "{said}"
    );

    let output = kit::run(&["replay", text(&last.with_file_name("none"))]);
    assert_eq!(output.status.code(), Some(64));
}

#[test]
fn a_sample_is_a_share_and_no_directory_is_no_journal() {
    let run = run_of_a_daemon("sample = 0.5");
    let (code, said) = replayed(&run.journal);
    let decisions = said["decisions"].as_u64().expect("a number");
    assert!(code == Some(0) && (90..210).contains(&decisions), "{said}");
    let output = kit::run(&["replay", text(run.journal.parent().expect("a folder"))]);
    assert_eq!(output.status.code(), Some(64), "a folder without a journal");
}

fn said(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number: {value}"))
}

#[test]
fn other_weights_are_tried_on_what_was_recorded() {
    let run = run_of_a_daemon("");
    let journal = text(&run.journal);
    let same = said(&["what-if", journal, "--set", "active_request_weight=0"]);
    assert_eq!((&same["decisions"], &same["changed"]), (&Value::from(DECISIONS), &Value::from(0)), "{same}");
    assert_eq!(same["recorded"], same["what_if"]);
    let other = said(&["what-if", journal, "--set", "device_credit=0", "--set", "mode=least-loaded"]);
    assert!(number(&other["changed"]) > 0.0, "{other}");
    assert!(number(&other["what_if"]["hit_rate"]) < number(&other["recorded"]["hit_rate"]), "{other}");
    assert!(number(&other["prefill_tokens_saved"]) < 0.0, "{other}");
    let table = kit::run(&["what-if", journal, "--set", "mode=round-robin"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(
        table.contains("tokens to prefill") && table.contains('█') && table.contains("This is an estimate"),
        "{table}"
    );
    for wrong in ["device_credits=1", "mode=fastest", "mode=approximate", "x"] {
        let output = kit::run(&["what-if", journal, "--set", wrong]);
        assert_eq!(output.status.code(), Some(64), "{wrong}");
    }
}

#[test]
fn weights_that_are_found_are_tried_as_a_shadow_and_promoted() {
    let recorded = run_of_a_daemon("");
    let journal = text(&recorded.journal);
    let fragment = recorded.journal.with_file_name("fragment.toml");
    let found = said(&["tune", journal, "--trials", "40", "--seed", "3", "--write", text(&fragment)]);
    assert_eq!((&found["trials"], &found["decisions"]), (&Value::from(40), &Value::from(DECISIONS)), "{found}");
    assert!(number(&found["best"]["tokens"]) <= number(&found["before"]["tokens"]), "{found}");
    assert_eq!(said(&["tune", journal, "--trials", "40", "--seed", "3"]), found, "the same seed finds the same");

    let daemon = Daemon::configured(&format!(
        "[[worker]]\nid = 1\n[[worker]]\nid = 2\n{}",
        std::fs::read_to_string(&fragment).expect("a fragment of a configuration")
    ));
    let socket = daemon.socket();
    let tune = |arguments: &[&str]| kit::run(&[&["tune", "--socket", text(&socket)], arguments].concat());
    assert_eq!(tune(&["--promote"]).status.code(), Some(1), "there is none to promote");
    assert!(tune(&[journal, "--trials", "5", "--shadow", "1"]).status.success());
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 100);
    let request = RouteRequest::new(space, Prompt::of_tokens(&tokens));
    let version = client.route(&request).expect("a decision").policy_version;
    until("the shadow has judged it", || daemon.counter("shadow_decisions") == 1);
    assert_eq!(daemon.said(&["status"])["shadow"]["decisions"], 1);
    assert!(tune(&["--promote"]).status.success());
    let after = client.route(&request).expect("a decision").policy_version;
    assert_eq!(after, version + 1, "it decides now");
    assert_eq!(tune(&["--end-shadow"]).status.code(), Some(0));
    assert_eq!(daemon.counter("shadow_decisions"), 0, "and judges no more");
    assert_eq!(tune(&[]).status.code(), Some(64));
}

#[test]
fn a_shadow_policy_of_the_configuration_is_held_to_what_was_chosen() {
    let daemon = Daemon::configured(
        "[[worker]]\nid = 1\n[[worker]]\nid = 2\n[shadow]\nshare = 1.0\npolicy = [\"mode=round-robin\"]\n",
    );
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    for at in 0..20 {
        let (tokens, name) = (prompt(at, 100), format!("r{at}"));
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        client
            .route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) })
            .expect("a decision");
    }
    until("the shadow has judged them", || daemon.counter("shadow_decisions") == 20);
    let (agreements, disagreements) = (daemon.counter("shadow_agreements"), daemon.counter("shadow_disagreements"));
    assert_eq!(agreements + disagreements, 20);
    assert_eq!(daemon.counter("shadow_blocks_saved") + daemon.counter("shadow_blocks_lost"), 0);
    let line = kit::run(&["status", "--socket", text(&daemon.socket())]);
    let line = String::from_utf8_lossy(&line.stdout).into_owned();
    assert!(line.contains("of 20 decisions; where it differs, its workers held 0 prompt blocks more"), "{line}");
}
