//! `kvrouted tune`: searches for a policy under which the requests of a recorded load feel better, lets a running daemon
//! try it as a shadow policy, and promotes it.

use std::io::Write;
use std::path::PathBuf;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::{Map, Value, json};

use super::admin;
use super::exit::{Exit, Failure};
use super::policy_tables::{
    OverLoads, curve_json, curve_loads, curve_table, difference_json, difference_table, load_unit, write_report,
};
use super::simulate::progress;
use super::simulated_load::{LoadArgs, SimulatedLoad};
use crate::config::socket_default;
use crate::route::Policy;
use crate::simulate::Slo;
use crate::simulate::policy_search::{Candidate, Searched, search, settings_of};
use crate::simulate::policy_trials::{Pair, Stretch, WARM_UP_SHARE};
use crate::simulate::recorded::Agreement;
use crate::wire::{PolicyDone, PolicyOrder};

/// The columns of the tables.
const NAMES: [&str; 2] = ["recorded", "best"];
/// Candidates that a table shows.
const CANDIDATES_SHOWN: usize = 10;

/// Searches for a policy under which the requests of a recorded load feel better, and lets a running daemon try it.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["files", "promote", "end_shadow"]))]
pub struct TuneArgs {
    /// The load and the fleet
    #[command(flatten)]
    pub load: LoadArgs,
    /// Number of policies to try, each in a run of half of the load
    #[arg(long, value_name = "NUMBER", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub trials: u32,
    /// Seed of the random weights; the same seed gives the same result
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Write the best policy to this file, as part of a configuration
    #[arg(long, value_name = "PATH")]
    pub write: Option<PathBuf>,
    /// Let a running daemon judge this share of its decisions by the best policy, as a shadow policy
    #[arg(long, value_name = "SHARE", num_args = 0..=1, default_missing_value = "1.0", requires = "files", value_parser = share)]
    pub shadow: Option<f64>,
    /// Make a running daemon decide by its shadow policy
    #[arg(long, conflicts_with_all = ["files", "end_shadow"])]
    pub promote: bool,
    /// End the shadow policy of a running daemon
    #[arg(long, conflicts_with = "files")]
    pub end_shadow: bool,
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH", default_value_os_t = socket_default())]
    pub socket: PathBuf,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// What was found.
struct Found {
    searched: Searched,
    /// On the half that the search did not see: the recorded policy and the best one.
    held_out: Pair,
    curves: Vec<OverLoads>,
    agreement: Option<Agreement>,
    load: f64,
    unit: &'static str,
    /// The best policy if it is better on the held-out half too; the recorded one otherwise.
    kept: Policy,
}

impl TuneArgs {
    /// Searches and writes the result to `out`, or changes the daemon's shadow policy.
    ///
    /// # Errors
    /// A file that cannot be read or used, a file or standard output that cannot be written, a daemon that does not answer
    /// or refuses.
    pub fn run(&self, out: &mut impl Write) -> Result<Exit, Failure> {
        if self.promote {
            let PolicyDone { policy_version, .. } = self.order(&PolicyOrder::Promote)?;
            return self.print(out, &json!({"policy_version": policy_version}), || {
                format!(
                    "the daemon now decides by the former shadow policy, version {policy_version}\nThe configuration file is \
                     unchanged, and the next start or SIGHUP will apply it. Add the new weights to it."
                )
            });
        }
        if self.end_shadow {
            self.order(&PolicyOrder::EndShadow)?;
            return self.print(out, &json!({}), || "the shadow policy has ended".into());
        }
        self.load.check()?;
        let subject = self.load.read()?;
        let found = self.find(&subject);
        // The search may have taken long: its result is printed also if a file cannot be written, or no daemon answers.
        let kept = self.keep(&found);
        let has_ordered = self.shadow.is_some() && kept.is_ok();
        self.print(out, &self.json(&subject, &found), || self.text(&subject, &found, has_ordered))?;
        kept.map(|()| Exit::Done)
    }

    /// Writes the files that the command line names, and lets the daemon judge by the policy.
    fn keep(&self, found: &Found) -> Result<(), Failure> {
        if let Some(path) = &self.write {
            std::fs::write(path, found.fragment(&self.load.slo()))
                .map_err(|error| Failure::new(Exit::System, format!("{}: {error}", path.display())))?;
        }
        if let Some(file) = &self.load.report {
            let title = "The recorded policy and the best one";
            write_report(file, (title, found.unit), NAMES, &found.held_out, &found.curves)?;
        }
        if let Some(share) = self.shadow {
            self.order(&PolicyOrder::Shadow { settings: &settings_of(&found.kept), share })?;
        }
        Ok(())
    }

    fn print(&self, out: &mut impl Write, json: &Value, text: impl FnOnce() -> String) -> Result<Exit, Failure> {
        let output = if self.load.json { json.to_string() } else { text() };
        writeln!(out, "{output}")?;
        out.flush()?;
        Ok(Exit::Done)
    }

    fn order(&self, order: &PolicyOrder<'_>) -> Result<PolicyDone, Failure> {
        Ok(admin::connect(self.admin_socket.as_ref().unwrap_or(&self.socket))?.set_policy(order)?)
    }

    /// Searches on one half of the load, and compares what it found with the recorded policy on the other.
    fn find(&self, subject: &SimulatedLoad) -> Found {
        let (first, second) =
            (Stretch::of(&subject.workload, WARM_UP_SHARE, 0.5), Stretch::of(&subject.workload, 0.5, 1.0));
        let (load, seeds) = (self.load.load_of(&second), self.load.seeds);
        let loads = curve_loads(&second, load);
        let bar = progress(u64::from(self.trials) + 2 * (seeds + loads.len() as u64), self.load.json);
        let tick = || bar.inc(1);
        let trials = self.load.trials(subject, &first, &tick);
        let searched = search(&trials, &subject.policy, self.load.load_of(&first), (self.seed, self.trials as usize));
        let best = searched.candidates[searched.best].policy;
        let trials = self.load.trials(subject, &second, &tick);
        let policies = [&subject.policy, &best];
        let held_out = trials.pair(policies, load, seeds);
        let agreement = subject.agreement(&second, held_out.felt);
        let curves = trials.over_loads(&policies, &loads);
        bar.finish_and_clear();
        let [before, after] = held_out.medians();
        let [recorded, found] =
            [(subject.policy, before), (best, after)].map(|(policy, figures)| Candidate { policy, figures });
        let kept = if found.is_better_than(&recorded) { best } else { subject.policy };
        Found { searched, held_out, curves, agreement, load, unit: load_unit(&second), kept }
    }

    fn text(&self, subject: &SimulatedLoad, found: &Found, has_ordered: bool) -> String {
        let Slo { ttft_s, ttft_token_s, tpot_s } = self.load.slo();
        let mut parts = subject.head(found.agreement);
        parts.push(format!(
            "\n{} policies tried on the first half of the load. The best has the highest goodput (TTFT at most {:.0} ms and {:.0} µs \
             a prompt token, TPOT at most {:.0} ms; half a percent counts as equal), then the least mean E2E.\n{}",
            found.searched.candidates.len(),
            ttft_s * 1e3,
            ttft_token_s * 1e6,
            tpot_s * 1e3,
            candidate_table(&found.searched)
        ));
        parts.push(format!(
            "\nOn the second half, at {:.2} {}, medians over {} seeds\n{}",
            found.load,
            found.unit,
            self.load.seeds,
            difference_table(NAMES, &found.held_out)
        ));
        parts.push(curve_table(found.unit, NAMES, &found.curves));
        parts.push(match (found.is_recorded_kept(), has_ordered) {
            (true, false) => "\nNo policy was better on both halves: keep the recorded one.".into(),
            (true, true) => {
                "\nNo policy was better on both halves: the daemon's shadow policy is now the recorded one.".into()
            }
            (false, true) => {
                "\nThe daemon now judges by the best policy as its shadow policy. See `kvrouted status`, then \
                 `kvrouted tune --promote`."
                    .into()
            }
            (false, false) => format!("\nFor the configuration:\n{}", found.fragment(&self.load.slo())),
        });
        parts.join("\n")
    }

    fn json(&self, subject: &SimulatedLoad, found: &Found) -> Value {
        let candidate = |candidate: &Candidate| {
            let figures = &candidate.figures;
            json!({
                "settings": settings_json(&candidate.policy),
                "goodput": figures.goodput, "ttft_s": figures.ttft_s, "tpot_s": figures.tpot_s, "e2e_s": figures.e2e_s,
                "hit_rate": figures.hit_rate,
            })
        };
        let candidates = &found.searched.candidates;
        json!({
            "remarks": subject.remarks,
            "requests": subject.workload.requests(),
            "fleet": subject.fitted.as_ref().map(|fitted| fitted.json()),
            "agreement": found.agreement.map(|agreement| agreement.json()),
            "trials": candidates.len(),
            "recorded": candidate(&candidates[0]),
            "best": candidate(&candidates[found.searched.best]),
            "candidates": candidates.iter().map(candidate).collect::<Vec<_>>(),
            "held_out": difference_json(&found.held_out),
            "load": found.load,
            "load_unit": found.unit,
            "curve": curve_json(&found.curves),
            "is_recorded_kept": found.is_recorded_kept(),
            "kept": settings_json(&found.kept),
        })
    }
}

impl Found {
    fn is_recorded_kept(&self) -> bool {
        self.kept == self.searched.candidates[0].policy
    }

    /// The kept policy as part of a configuration.
    fn fragment(&self, slo: &Slo) -> String {
        let [before, after] = self.held_out.medians().map(|run| run.goodput * 100.0);
        let verdict = match self.is_recorded_kept() {
            true => "no policy was better than the recorded one.".into(),
            false => format!(
                "in simulation {after:.1} % of the requests meet {:.0} ms and {:.0} ms, {before:.1} % before.",
                slo.ttft_s * 1e3,
                slo.tpot_s * 1e3
            ),
        };
        let head = format!("# kvrouted tune: {} policies tried; {verdict}\n[policy]\n", self.searched.candidates.len());
        let line = |(name, value): (String, String)| match name.as_str() {
            "mode" => format!("mode = \"{value}\"\n"),
            _ => format!("{name} = {value}\n"),
        };
        head + &settings_of(&self.kept).into_iter().map(line).collect::<String>()
    }
}

fn settings_json(policy: &Policy) -> Value {
    let value = |(name, value): (String, String)| {
        let number = value.parse::<f64>().map(Value::from);
        (name, number.unwrap_or(Value::String(value)))
    };
    Value::Object(settings_of(policy).into_iter().map(value).collect::<Map<_, _>>())
}

/// A policy in a line.
fn in_a_line(policy: &Policy) -> String {
    settings_of(policy).iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// The recorded policy and the best candidates.
fn candidate_table(searched: &Searched) -> String {
    let mut places: Vec<usize> = (1..searched.candidates.len()).collect();
    let candidate = |place: &usize| &searched.candidates[*place];
    places.sort_by(|a, b| {
        match (candidate(a).is_better_than(candidate(b)), candidate(b).is_better_than(candidate(a))) {
            (true, _) => std::cmp::Ordering::Less,
            (_, true) => std::cmp::Ordering::Greater,
            _ => a.cmp(b),
        }
    });
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header([
        "policy",
        "goodput",
        "E2E mean s",
        "TTFT mean s",
        "TTFT p99 s",
        "TPOT p99 ms",
        "hits",
    ]);
    for (at, place) in std::iter::once(0).chain(places).take(CANDIDATES_SHOWN + 1).enumerate() {
        let Candidate { policy, figures } = &searched.candidates[place];
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let name = if at == 0 { format!("{} (recorded)", in_a_line(policy)) } else { in_a_line(policy) };
        table.add_row([
            Cell::new(name),
            right(format!("{:.1} %", figures.goodput * 100.0)),
            right(format!("{:.3}", figures.e2e_s.mean)),
            right(format!("{:.3}", figures.ttft_s.mean)),
            right(format!("{:.3}", figures.ttft_s.p99)),
            right(format!("{:.1}", figures.tpot_s.p99 * 1e3)),
            right(format!("{:.1} %", figures.hit_rate * 100.0)),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TuneArgs,
    }

    #[test]
    fn a_policy_for_a_trace_is_found_and_written() {
        let [trace, fragment, picture] =
            ["csv", "toml", "svg"].map(|kind| std::env::temp_dir().join(format!("tune-{}.{kind}", std::process::id())));
        let line = |at: u32| format!("{},{},{}\n", f64::from(at) * 0.2, 800 + at * 71 % 4000, 10 + at % 40);
        let text: String = (0..240).map(line).collect();
        std::fs::write(&trace, text).expect("written");
        let line = format!(
            "x {} --format csv --workers 2 --base mode=random --trials 6 --seeds 2 --ttft-ms 400 --write {} --report {}",
            trace.display(),
            fragment.display(),
            picture.display()
        );
        let args = Line::try_parse_from(line.split_whitespace()).expect("arguments").args;
        let mut out = Vec::new();
        args.run(&mut out).expect("a result");
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("mode=random (recorded)") && text.contains("6 policies tried"), "{text}");
        let written = std::fs::read_to_string(&fragment).expect("a fragment");
        assert!(written.starts_with("# kvrouted tune: 6 policies tried; in simulation"), "{written}");
        assert!(text.contains(&written) && !written.contains("random"), "{written}");
        assert!(std::fs::read_to_string(&picture).expect("a picture").contains("goodput"));
        // What was found is printed although it cannot be written, and no daemon judges by it.
        let line =
            line.replace(&*fragment.to_string_lossy(), "/nonexistent/tuned.toml") + " --shadow --socket /nonexistent/s";
        let (args, mut out) = (Line::try_parse_from(line.split_whitespace()).expect("arguments").args, Vec::new());
        let failure = args.run(&mut out).expect_err("a file that cannot be written");
        assert!(failure.exit == Exit::System && failure.message.contains("/nonexistent/tuned.toml"), "{failure:?}");
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains(&written) && !text.contains("The daemon now"), "{text}");
    }
}
