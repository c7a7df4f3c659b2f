//! The journal of a daemon: one process writes it, others decide again and compare, or run its load on a simulated fleet.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvrouted::hash;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde_json::Value;

use crate::kit::engine::{Publisher, SCHEME};
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
    let files = journal_files(&run.journal);
    assert!(files.len() > 1, "{files:?}");
    let cut = |file: usize, left: fn(usize) -> usize| {
        let bytes = std::fs::read(&files[file]).expect("read");
        std::fs::write(&files[file], &bytes[..left(bytes.len())]).expect("written");
        let (code, said) = replayed(&run.journal);
        assert!(code == Some(0) && said["decisions"] == said["equal"], "{said}");
        said
    };
    let last = files.len() - 1;
    let said = cut(last, |bytes| bytes - 3);
    assert_eq!((&said["decisions"], &said["files"][last]["ending"]), (&DECISIONS.into(), &"torn".into()), "{said}");
    // Each file is full of decisions. Where it is cut, a record may happen to end.
    let said = cut(0, |bytes| bytes / 2);
    assert!(said["decisions"].as_u64() < Some(DECISIONS.into()) && said["files"][0]["ending"] != "closed", "{said}");

    let output = kit::run(&["replay", text(&files[last].with_file_name("none"))]);
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

/// Conversations of a load, and their turns.
const CONVERSATIONS: u32 = 41;
const TURNS: u32 = 3;
/// Tokens that a turn adds to its conversation.
const TURN_TOKENS: u32 = 64;

/// A gateway's load: conversations, each of whose turns continues the one before, on two workers whose prefills take as
/// long as they have tokens to compute.
fn run_of_conversations(section: &str) -> Run {
    let folder = kit::folder();
    let journal = folder.path().join("journal");
    let mut publishers = [Publisher::new(), Publisher::new()];
    let config = format!(
        "[[worker]]\nid = 1\nendpoint = \"{}\"\n[[worker]]\nid = 2\nendpoint = \"{}\"\n[policy]\nmode = \"kv\"\nseed = 7\n\
         [journal]\ndir = \"{}\"\n{section}\n",
        publishers[0].endpoint(),
        publishers[1].endpoint(),
        text(&journal),
    );
    let mut daemon = Daemon::configured(&config);
    publishers.iter().for_each(Publisher::await_subscription);
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let mut held = [[0_u32; CONVERSATIONS as usize]; 2];
    for turn in 0..TURNS {
        for conversation in 0..CONVERSATIONS {
            let tokens = prompt(conversation, 256 + turn * TURN_TOKENS);
            let (name, session) = (format!("r{turn}-{conversation}"), format!("conversation {conversation}"));
            let request = RouteRequest {
                book: Some(BookingRequest { request_id: &name, attempt: 0 }),
                affinity_session: Some(&session),
                ..RouteRequest::new(space, Prompt::of_tokens(&tokens))
            };
            let reply = client.route(&request).expect("a decision");
            let worker = reply.candidates[0].worker.id.0 as usize - 1;
            let booking = BookingRef::Handle(reply.booking.expect("a booking"));
            let held = &mut held[worker][conversation as usize];
            let uncached = tokens.len() as u32 - std::mem::replace(held, tokens.len() as u32);
            std::thread::sleep(Duration::from_micros(u64::from(400 + 4 * uncached)));
            publishers[worker].store(&tokens);
            client.prefill_complete(&booking).expect("told");
            std::thread::sleep(Duration::from_micros(600));
            client.output_progress(&booking, 20 + conversation).expect("told");
            client.free(&booking).expect("freed");
        }
    }
    let lost = daemon.counter("journal_lost") + daemon.counter("journal_ends_lost");
    drop(client);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    Run { _folder: folder, journal, lost }
}

fn hits(policy: &Value) -> f64 {
    number(&policy["hit_rate"])
}

#[test]
fn a_recorded_load_runs_on_a_simulated_fleet() {
    let run = run_of_conversations("");
    let (requests, journal) = (CONVERSATIONS * TURNS, text(&run.journal));
    assert_eq!(run.lost, 0);
    assert_eq!(replayed(&run.journal).1["equal"], requests, "identities change no decision");

    let simulated = said(&[
        "simulate",
        "--format",
        "journal",
        "--trace",
        journal,
        "--engine",
        "fitted",
        "--policy",
        "kv,round-robin",
    ]);
    let policies = simulated["policies"].as_array().expect("two");
    assert_eq!(
        (number(&policies[0]["requests"]), number(&policies[1]["requests"])),
        (f64::from(requests), f64::from(requests))
    );
    assert!(hits(&policies[0]) > hits(&policies[1]) + 0.1, "shared prefixes are found again: {simulated}");

    let report = run.journal.with_file_name("report.html");
    let found = said(&["what-if", journal, "--set", "mode=round-robin", "--seeds", "2", "--report", text(&report)]);
    assert_eq!(found["requests"], requests, "{found}");
    let figure = |name: &str, of: &str| number(&found["figures"][name][of]);
    assert!(figure("hits", "after") < figure("hits", "before") - 10.0, "more tokens are computed: {found}");
    assert!(figure("goodput", "before") > 0.0 && figure("TTFT mean", "before") > 0.0);
    let fleet = &found["fleet"][0];
    assert!(number(&fleet["prefill"]["samples"]) > 50.0 && number(&fleet["decode"]["samples"]) > 50.0, "{found}");
    assert_eq!((&fleet["class"], &fleet["workers"]), (&Value::from("m gpu"), &Value::from(2)));
    let recorded = &found["agreement"]["recorded"];
    assert!(number(&recorded["ttft_s"]["p50"]) > 4e-4 && number(&recorded["hit_rate"]) > 0.2, "{found}");
    assert_eq!(found["curve"].as_array().map(Vec::len), Some(7));
    assert!(std::fs::read_to_string(&report).expect("a page").contains("<svg"));
    let table = kit::run(&["what-if", journal, "--set", "mode=round-robin", "--seeds", "1"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for part in ["TTFT p90", "The fleet, as fitted", "95 % interval", "goodput", "123 of them in sessions"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    for wrong in ["device_credits=1", "mode=fastest", "mode=approximate", "mode=direct", "x"] {
        let output = kit::run(&["what-if", journal, "--set", wrong]);
        assert_eq!(output.status.code(), Some(64), "{wrong}");
    }
}

#[test]
fn a_journal_holds_no_hash_of_a_block() {
    let run = run_of_conversations("");
    let mut bytes = Vec::new();
    for file in journal_files(&run.journal) {
        bytes.extend(std::fs::read(file).expect("read"));
    }
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&prompt(1, 256)), &[], &mut locals);
    let mut sequence = Vec::new();
    hash::sequence_hashes(&locals, &mut sequence);
    let words = locals.iter().map(|local| local.0).chain(sequence.iter().map(|hash| hash.0));
    for word in words {
        assert!(!bytes.windows(8).any(|window| window == word.to_le_bytes()), "{word:x}");
    }
    assert!(!bytes.windows(12).any(|window| window == b"conversation"), "no session's name");

    let without = run_of_conversations("prefix_tokens = 0");
    let found = said(&["what-if", text(&without.journal), "--set", "mode=round-robin", "--seeds", "1"]);
    let remarks = found["remarks"].to_string();
    assert!(remarks.contains("no identity of their prefix"), "{found}");
    assert_eq!(number(&found["figures"]["hits"]["before"]), 0.0, "{found}");
}

#[test]
fn sessions_are_sampled_as_a_whole() {
    let run = run_of_conversations("sample = 0.5");
    let found = said(&["what-if", text(&run.journal), "--set", "mode=round-robin", "--seeds", "1"]);
    let remark = found["remarks"][0].as_str().expect("a remark");
    let recorded = remark.split(' ').next().and_then(|count| count.parse::<u64>().ok()).expect("a number");
    assert!((1..u64::from(CONVERSATIONS * TURNS)).contains(&recorded), "{found}");
    assert!(recorded.is_multiple_of(u64::from(TURNS)) && remark.contains("a sample of 0.5"), "{found}");
    assert_eq!(found["requests"], 2 * recorded, "each session stands for two");
}

#[test]
fn journals_that_are_cut_or_changed_are_used_as_far_as_they_can_be() {
    let run = run_of_conversations("");
    let files = journal_files(&run.journal);
    let bytes = std::fs::read(&files[0]).expect("read");
    let what_if = |bytes: &[u8]| {
        let file = run.journal.with_file_name("changed.kvrj");
        std::fs::write(&file, bytes).expect("written");
        kit::run(&["what-if", text(&file), "--set", "mode=round-robin", "--seeds", "1", "--json"])
    };
    let whole: Value = serde_json::from_slice(&what_if(&bytes).stdout).expect("JSON");
    // One of two lengths may be the end of a record.
    let cuts = [0, 1].map(|less| -> Value {
        serde_json::from_slice(&what_if(&bytes[..bytes.len() * 2 / 3 - less]).stdout).expect("JSON")
    });
    for cut in &cuts {
        assert!(number(&cut["requests"]) < number(&whole["requests"]) && number(&cut["requests"]) > 40.0);
    }
    assert!(cuts.iter().any(|cut| cut["remarks"].to_string().contains("cut off within a record")), "{cuts:?}");
    // One of two bytes may be of the four of a record's length, which then leads beyond the end.
    let remarks = [0, 6].map(|further| {
        let mut changed = bytes.clone();
        changed[bytes.len() / 2 + further] ^= 0x40;
        let used: Value = serde_json::from_slice(&what_if(&changed).stdout).expect("JSON");
        used["remarks"].to_string()
    });
    let is_said = |remark: &String| remark.contains("damaged at byte") || remark.contains("cut off within a record");
    assert!(remarks.iter().all(is_said), "{remarks:?}");
    assert!(remarks.iter().any(|remark| remark.contains("damaged at byte")), "{remarks:?}");
    for useless in [&b""[..], b"KVRDJRNL", &bytes[..40]] {
        assert_eq!(what_if(useless).status.code(), Some(64));
    }
}

/// The journal files of a folder. Beside them lies what keeps other daemons away from it.
fn journal_files(journal: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(journal).expect("a folder").map(|entry| entry.expect("a file").path());
    let mut files: Vec<_> = files.filter(|file| !file.ends_with("lock")).collect();
    files.sort();
    files
}

#[test]
fn a_policy_that_is_found_is_tried_as_a_shadow_and_promoted() {
    let recorded = run_of_conversations("");
    let journal = text(&recorded.journal);
    let [fragment, engine] = ["fragment.toml", "engine.json"].map(|name| recorded.journal.with_file_name(name));
    let arguments = ["tune", journal, "--trials", "12", "--seed", "3", "--seeds", "2"];
    let found = said(&[&arguments[..], &["--write", text(&fragment), "--write-engine", text(&engine)]].concat());
    assert_eq!(
        (&found["trials"], &found["requests"]),
        (&Value::from(12), &Value::from(CONVERSATIONS * TURNS)),
        "{found}"
    );
    assert!(number(&found["best"]["goodput"]) >= number(&found["recorded"]["goodput"]) - 0.01, "{found}");
    assert_eq!(said(&arguments), found, "the same seed finds the same");
    let again =
        said(&["simulate", "--format", "journal", "--trace", journal, "--engine", text(&engine), "--policy", "kv"]);
    assert_eq!(number(&again["policies"][0]["refused"]), 0.0, "{again}");

    let daemon = Daemon::configured(&format!(
        "[[worker]]\nid = 1\n[[worker]]\nid = 2\n{}",
        std::fs::read_to_string(&fragment).expect("a fragment of a configuration")
    ));
    let socket = daemon.socket();
    let tune = |arguments: &[&str]| kit::run(&[&["tune", "--socket", text(&socket)], arguments].concat());
    assert_eq!(tune(&["--promote"]).status.code(), Some(1), "there is none to promote");
    assert!(tune(&[journal, "--trials", "5", "--seeds", "1", "--shadow", "1"]).status.success());
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
