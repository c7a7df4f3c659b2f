//! `kvrouted what-if`: runs a recorded load on a simulated fleet under the recorded policy and under another one.

use std::io::Write;

use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::policy_tables::{
    OverLoads, curve_json, curve_loads, curve_table, difference_json, difference_table, load_unit, write_report,
};
use super::simulate::{progress, usage};
use super::simulated_load::{LoadArgs, SimulatedLoad};
use crate::config::policy_with;
use crate::route::Policy;
use crate::simulate::policy_trials::{Pair, Stretch, WARM_UP_SHARE, unsimulated};
use crate::simulate::recorded::Agreement;

/// The columns of the tables.
const NAMES: [&str; 2] = ["recorded", "what if"];

/// Runs a recorded load on a simulated fleet under the recorded policy and under another one, and shows what requests
/// would have felt.
#[derive(Clone, Debug, clap::Args)]
pub struct WhatIfArgs {
    /// The load and the fleet
    #[command(flatten)]
    pub load: LoadArgs,
    /// A field of [policy] and its value; repeatable. Other fields keep their recorded values
    #[arg(long, value_name = "FIELD=VALUE", required = true)]
    pub set: Vec<String>,
}

/// What was found.
struct Found {
    pair: Pair,
    curves: Vec<OverLoads>,
    agreement: Option<Agreement>,
    load: f64,
    unit: &'static str,
}

impl WhatIfArgs {
    /// Simulates, compares and writes the result to `out`.
    ///
    /// # Errors
    /// A file that cannot be read or used, an invalid setting, a file or standard output that cannot be written.
    pub fn run(&self, out: &mut impl Write) -> Result<Exit, Failure> {
        self.load.check()?;
        // Before the journal is read, which takes longer.
        changed(&Policy::default(), &self.set)?;
        let subject = self.load.read()?;
        let policy = changed(&subject.policy, &self.set)?;
        let found = self.compare(&subject, &policy);
        let title = format!("What if {}", self.set.join(", "));
        let report = |file| write_report(file, (&title, found.unit), NAMES, &found.pair, &found.curves);
        // What was found is printed also if the file cannot be written.
        let reported = self.load.report.as_deref().map_or(Ok(()), report);
        let text = if self.load.json { self.json(&subject, &found).to_string() } else { self.text(&subject, &found) };
        writeln!(out, "{text}")?;
        out.flush()?;
        reported.map(|()| Exit::Done)
    }

    fn compare(&self, subject: &SimulatedLoad, policy: &Policy) -> Found {
        let stretch = Stretch::of(&subject.workload, WARM_UP_SHARE, 1.0);
        let (load, seeds) = (self.load.load_of(&stretch), self.load.seeds);
        let loads = curve_loads(&stretch, load);
        let bar = progress(2 * (seeds + loads.len() as u64), self.load.json);
        let tick = || bar.inc(1);
        let trials = self.load.trials(subject, &stretch, &tick);
        let policies = [&subject.policy, policy];
        let pair = trials.pair(policies, load, seeds);
        let agreement = subject.agreement(&stretch, pair.felt);
        let curves = trials.over_loads(&policies, &loads);
        bar.finish_and_clear();
        Found { pair, curves, agreement, load, unit: load_unit(&stretch) }
    }

    fn text(&self, subject: &SimulatedLoad, found: &Found) -> String {
        let mut parts = subject.head(found.agreement);
        parts.push(format!(
            "\nWhat if {}: at {:.2} {}, medians over {} seeds\n{}",
            self.set.join(", "),
            found.load,
            found.unit,
            self.load.seeds,
            difference_table(NAMES, &found.pair)
        ));
        parts.push(curve_table(found.unit, NAMES, &found.curves));
        parts.join("\n")
    }

    fn json(&self, subject: &SimulatedLoad, found: &Found) -> Value {
        json!({
            "set": self.set,
            "remarks": subject.remarks,
            "requests": subject.workload.requests(),
            "fleet": subject.fitted.as_ref().map(|fitted| fitted.json()),
            "agreement": found.agreement.map(|agreement| agreement.json()),
            "load": found.load,
            "load_unit": found.unit,
            "seeds": self.load.seeds,
            "figures": difference_json(&found.pair),
            "curve": curve_json(&found.curves),
        })
    }
}

/// A policy with settings, if a simulation has what it needs.
fn changed(policy: &Policy, settings: &[String]) -> Result<Policy, Failure> {
    let changed = policy_with(policy, "--set", settings).map_err(|problems| usage(problems.to_string()))?;
    match unsimulated(&changed) {
        None => Ok(changed),
        Some(why) => Err(usage(why)),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: WhatIfArgs,
    }

    fn run(line: &str) -> Result<String, Failure> {
        let args = Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).expect(line).args;
        let mut out = Vec::new();
        args.run(&mut out).map(|_| String::from_utf8(out).expect("text"))
    }

    /// The command with a trace of prompts that come faster than one engine computes them.
    fn with_trace(more: &str) -> String {
        let file = std::env::temp_dir().join(format!("what-if-{}.csv", std::process::id()));
        let line = |at: u32| format!("{},{},{}\n", f64::from(at) * 0.12, 800 + at * 71 % 4000, 10 + at % 40);
        let text: String = (0..150).map(line).collect();
        std::fs::write(&file, text).expect("written");
        format!("{} --format csv --workers 2 --seeds 3 {more}", file.display())
    }

    #[test]
    fn a_trace_runs_under_two_policies() {
        let line = with_trace("--base mode=random --set mode=latency --json");
        let text = run(&format!("{line} --threads 1")).expect("a result");
        assert_eq!(text, run(&format!("{line} --threads 2")).expect("a result"));
        let found: Value = serde_json::from_str(&text).expect("JSON");
        let figure = |of: &str| found["figures"]["TTFT mean"][of].as_f64().expect("a number");
        assert!(figure("after") < figure("before") && figure("high") < 0.0, "{found}");
        assert_eq!((found["requests"].as_u64(), found["curve"].as_array().map(Vec::len)), (Some(150), Some(7)));
        assert!(found["agreement"].is_null() && found["fleet"].is_null());
        let (line, mut out) = (with_trace("--set mode=lmetric --report /nonexistent/x.svg"), Vec::new());
        let args = Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).expect("arguments").args;
        assert_eq!(args.run(&mut out).expect_err("no such folder").exit, Exit::Output);
        assert!(String::from_utf8(out).expect("text").contains("TTFT mean"), "what was found is printed");
        let text = run(&with_trace("--set mode=lmetric")).expect("a result");
        assert!(
            text.contains("TTFT mean") && text.contains("95 % interval") && text.contains("times the recorded rate")
        );
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_a_sentence() {
        for (line, says) in [
            ("--set mode=kv".into(), "name the files or the folder of a journal"),
            (with_trace("--set mode=fastest"), "mode"),
            (with_trace("--set mode=direct"), "follows the pins"),
            (with_trace("--set mode=kv --base mode=direct"), "cannot be simulated"),
            (with_trace("--set mode=kv --rate 0"), "--rate must be from"),
            (with_trace("--set mode=kv --ttft-ms=-1"), "--ttft-ms must be from"),
            (with_trace("--set mode=kv --report x.png"), ".svg or .html"),
            (with_trace("--set mode=kv --write-engine x.json"), "fitted to a journal"),
            (with_trace("--set mode=kv --engine 9b"), "neither a preset"),
            (format!("{} x.csv", with_trace("--set mode=kv")), "name one trace"),
            ("/nonexistent.kvrj --set mode=kv".into(), "/nonexistent.kvrj"),
            ("/nonexistent.kvrj --set mode=kv --base mode=kv".into(), "--base is for traces"),
        ] {
            let failure = run(&line).expect_err(&line);
            assert_eq!(failure.exit, Exit::Usage, "{line}");
            assert!(failure.message.contains(says), "{line}: {}", failure.message);
        }
    }
}
