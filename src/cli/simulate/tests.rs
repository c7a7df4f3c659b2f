//! The command as its callers see it.

use clap::Parser;
use serde_json::{Value, json};

use super::*;
use crate::simulate::bounds::{HINDSIGHT, POOLED};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: SimulateArgs,
}

fn args(line: &str) -> SimulateArgs {
    Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).expect(line).args
}

fn run(line: &str) -> Result<String, Failure> {
    let mut out = Vec::new();
    args(line).run(&mut out).map(|_| String::from_utf8(out).expect("text"))
}

/// A trace of lengths in a file of its own.
fn trace(name: &str, gzips: bool) -> PathBuf {
    let file = std::env::temp_dir().join(format!("simulate-{}-{name}", std::process::id()));
    let text: String = (0..300).map(|at| format!("{},{},{}\n", at, 800 + at * 7 % 900, 40 + at % 60)).collect();
    if gzips {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        to.write_all(text.as_bytes()).expect("memory");
        std::fs::write(&file, to.finish().expect("memory")).expect("written");
    } else {
        std::fs::write(&file, text).expect("written");
    }
    file
}

#[test]
fn json_is_one_object_and_the_same_on_any_number_of_threads() {
    let file = trace("json", false);
    let line = format!("--trace {} --format csv --workers 2 --seeds 3 --policy kv,lpwl --json", file.display());
    let text = run(&format!("{line} --threads 1")).expect("a result");
    assert_eq!(text, run(&format!("{line} --threads 3")).expect("a result"));
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["policies"].as_array().map(Vec::len), Some(2));
    assert_eq!(value["seeds"], json!([1, 2, 3]));
    assert!(value["policies"][0]["ttft_s"]["mean"].as_f64().is_some_and(|mean_s| mean_s > 0.0));
}

#[test]
fn a_compressed_trace_is_read_as_the_plain_one() {
    let (plain, packed) = (trace("plain", false), trace("packed", true));
    let of = |file: &Path| run(&format!("--trace {} --format csv --workers 2 --policy lpwl", file.display()));
    assert_eq!(of(&plain), of(&packed));
    assert!(of(&plain).is_ok());
}

#[test]
fn a_load_is_a_share_of_the_best_peers_capacity() {
    let file = trace("load", false);
    let line = format!("--trace {} --format csv --workers 1 --load 0.5 --policy lpwl --json", file.display());
    let value: Value = serde_json::from_str(&run(&line).expect("a result")).expect("JSON");
    let of = |key: &str| value["settings"][key].as_f64().unwrap_or(0.0);
    assert!(of("load") > 0.0 && (of("load") / of("best_peer_capacity") - 0.5).abs() < 1e-9, "{value}");
}

#[test]
fn what_cannot_be_used_is_refused_in_a_sentence() {
    let file = trace("refused", false);
    let with = |more: &str| format!("--trace {} --format csv {more}", file.display());
    for (line, says) in [
        (with("--policy lpwl,best"), "there is no policy \"best\""),
        (with("--rate 0"), "--rate must be above 0"),
        (with("--engine 9000b"), "neither a preset (8b-tp1"),
        (with("--report x.png"), ".svg or .html"),
        (with("--cache-tokens 3"), "at least one block"),
        (with("--live 4"), "--live is for sessions in closed loop"),
        ("--generate agents --rate 2".into(), "--rate is for requests with times"),
        ("--generate agents --live 0".into(), "--live must be at least 1"),
        ("--generate agents:live_sessions=0".into(), "live_sessions=0: must be at least 1"),
        ("--generate chat:requests=0".into(), "requests=0: must be from 1 to 20000000"),
        ("--generate chat:requests=99999999999".into(), "must be from 1 to 20000000"),
        ("--suite --case w1-8 --traces /nonexistent".into(), "w1-8 is left out: its trace is not in /nonexistent"),
        ("--generate chatter".into(), "--generate: there is no generator \"chatter\""),
        (with("--router-age-ms 70000"), "--router-age-ms must be from 0 to 60000"),
        (with("--fleet /nonexistent"), "cannot read /nonexistent"),
        ("--trace /nonexistent".into(), "cannot read /nonexistent"),
        (format!("--trace {}", file.display()), "line 1"),
    ] {
        let failure = run(&line).expect_err(&line);
        assert_eq!(failure.exit, Exit::Usage, "{line}");
        assert!(failure.message.contains(says), "{line}: {}", failure.message);
    }
    assert!(Line::try_parse_from(["x"]).is_err(), "a trace, a generator or the suite is needed");
    for line in ["--trace a --generate chat", "--trace a --fleet b --workers 3", "--trace a --requests 9"] {
        assert!(Line::try_parse_from(["x"].into_iter().chain(line.split(' '))).is_err(), "{line}");
    }
}

#[test]
fn a_report_that_cannot_be_written_does_not_lose_the_table() {
    let file = trace("report", false);
    let line = format!("--trace {} --format csv --workers 1 --policy lpwl --report /nonexistent/r.svg", file.display());
    let mut out = Vec::new();
    let failure = args(&line).run(&mut out).expect_err("no such folder");
    assert!(failure.exit == Exit::Output && failure.message.contains("cannot write"), "{}", failure.message);
    assert!(String::from_utf8_lossy(&out).contains("lpwl"));
}

/// The block of a fleet in the documents.
fn documented_fleet() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/tuning.md");
    let text = std::fs::read_to_string(page).expect("the page");
    let block = text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    block.into_iter().find(|block| block.contains("[[engines]]")).expect("a fleet").to_owned()
}

fn fleet_file(name: &str, text: &str) -> PathBuf {
    let file = std::env::temp_dir().join(format!("simulate-{}-{name}.toml", std::process::id()));
    std::fs::write(&file, text).expect("written");
    file
}

#[test]
fn the_fleet_of_the_documents_runs() {
    let file = fleet_file("documented", &documented_fleet());
    let line = format!(
        "--fleet {} --generate few-shot --requests 300 --policy latency,lpwl --bounds 0 --json",
        file.display()
    );
    let value: Value = serde_json::from_str(&run(&line).expect("a result")).expect("JSON");
    let settings = &value["settings"];
    assert_eq!(settings["engine"], "4 70b-tp4 (prefill), 4 70b-tp4 (decode)");
    assert_eq!((&settings["routers"], &settings["router_age_ms"]), (&json!(4), &json!(50.0)));
    for policy in value["policies"].as_array().expect("three") {
        assert_eq!((&policy["requests"], &policy["refused"]), (&json!(300.0), &json!(0.0)), "{policy}");
    }
}

/// The figures of mode latency on the fleet of a file.
fn on_fleet(name: &str, text: &str) -> Value {
    let file = fleet_file(name, text);
    let line = format!("--fleet {} --generate few-shot --requests 300 --policy latency --json", file.display());
    let value: Value = serde_json::from_str(&run(&line).expect("a result")).expect("JSON");
    let figures = value["policies"][0].clone();
    assert_eq!((&figures["requests"], &figures["refused"]), (&json!(300.0), &json!(0.0)), "{name}: {figures}");
    figures
}

#[test]
fn what_a_file_says_of_engines_stores_and_faults_is_felt() {
    let two = "[[engines]]\npreset = \"8b-tp1\"\ncount = 2\nkv_tokens = 20_000\n";
    let mean_s = |figures: &Value| figures["ttft_s"]["mean"].as_f64().expect("a time");
    let plain = on_fleet("plain", two);
    // Requests arrive for 30 s.
    for (name, more) in [
        ("dies", "[[change]]\nat_s = 10\nworker = 1\nwhat = \"dies\"\n"),
        ("joins", "[[change]]\nat_s = 20\nworker = 1\nwhat = \"joins\"\n"),
        ("slows", "[[change]]\nat_s = 0\nworker = 1\nwhat = \"slows\"\nfactor = 2\n"),
    ] {
        let figures = on_fleet(name, &format!("{two}{more}"));
        assert!(mean_s(&figures) > 1.1 * mean_s(&plain), "{name}: {figures} for {plain}");
    }
    let mixed = format!("{}[[engines]]\npreset = \"70b-tp4\"\n", two.replace("count = 2", "count = 1"));
    assert!(mean_s(&on_fleet("mixed", &mixed)) > 1.1 * mean_s(&plain), "one of the two is slower");
    let stored = on_fleet("stored", &format!("{two}host_tokens = 1_000_000\nhost_gb_s = 50\n"));
    assert!(mean_s(&stored) < 0.9 * mean_s(&plain), "what the devices evict is found again: {stored} for {plain}");
}

#[test]
fn a_router_may_count_costs_as_equal_that_others_may_have_changed_unseen() {
    let mean_s = |policy: &str, routers: &str| {
        let line = format!("--generate few-shot:sessions_per_s=40 --requests 1500 --workers 8 {routers} --json");
        let value = run(&format!("{line} --policy {policy}")).expect("a result");
        let value: Value = serde_json::from_str(&value).expect("JSON");
        value["policies"][0]["ttft_s"]["mean"].as_f64().expect("a time")
    };
    let routers = "--routers 8 --router-age-ms 500";
    let (one, many) = (mean_s("latency", ""), mean_s("latency:unseen=0", routers));
    let own_order = mean_s("latency", routers);
    assert!(one < own_order && own_order < many, "{one} with one router, {own_order} of {many} with eight");
    assert_eq!(one, mean_s("latency:unseen=0", ""), "one router has no work that it does not see");
}

#[test]
fn the_example_fleet_has_every_field_and_is_one() {
    let text = run("--example-fleet").expect("text");
    // Required fields have an example; optional ones are comments. The worker of the example is the only one.
    let file = fleet_file("example", &text.replace("# preset", "preset"));
    let value = run(&format!("--fleet {} --generate few-shot --requests 20 --policy kv --json", file.display()));
    let value: Value = serde_json::from_str(&value.expect("a result")).expect("JSON");
    assert_eq!(value["settings"]["workers"], 1);
}

#[test]
fn a_wrong_fleet_is_refused_with_its_lines() {
    let file = fleet_file("wrong", "[fleet]\nblock_sise = 16\n[[engines]]\npreset = \"70b\"\n");
    let failure = run(&format!("--fleet {} --generate chat", file.display())).expect_err("two problems");
    assert_eq!(failure.exit, Exit::Usage);
    assert!(failure.message.contains(":2:1: fleet.block_sise: unknown field; did you mean `block_size`?"));
    assert!(failure.message.contains(":4:10: engines[0].preset: `70b` is none of"), "{}", failure.message);
}

#[test]
fn generated_requests_are_those_of_the_seed() {
    let of =
        |more: &str| run(&format!("--generate chat:sessions_per_s=9 --requests 200 --workers 2 --policy lpwl {more}"));
    assert_eq!(of(""), of(""));
    let value: Value = serde_json::from_str(&of("--seeds 2 --json").expect("a result")).expect("JSON");
    assert_eq!(
        (&value["settings"]["requests"], &value["settings"]["generate"]),
        (&json!(200), &json!("chat:sessions_per_s=9"))
    );
}

#[test]
fn it_matters_whether_sessions_stick_to_a_router() {
    let figures = |more: &str| {
        let routers = "--workers 4 --routers 4 --router-age-ms 2000";
        let line = format!("--generate chat:sessions_per_s=9 --requests 400 --policy lpwl {routers} --json {more}");
        let mut value: Value = serde_json::from_str(&run(&line).expect("a result")).expect("JSON");
        value["policies"].take()
    };
    assert_eq!(figures(""), figures(""));
    assert_ne!(figures(""), figures("--sessions-stick"), "a router knows more of its own sessions");
}

#[test]
fn bounds_are_the_pooled_one_and_hindsight() {
    let line = "--generate few-shot --requests 150 --workers 2 --policy lpwl --json";
    let names = |more: &str| -> Vec<String> {
        let value: Value = serde_json::from_str(&run(&format!("{line} {more}")).expect("a result")).expect("JSON");
        value["policies"]
            .as_array()
            .expect("rows")
            .iter()
            .map(|row| row["policy"].as_str().unwrap_or_default().into())
            .collect()
    };
    assert_eq!(names("--bounds 0"), ["lpwl", POOLED]);
    assert_eq!(names("--bounds 3"), ["lpwl", POOLED, "lpwl, first 150 requests", HINDSIGHT]);
}
