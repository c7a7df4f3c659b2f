//! The suite: every policy on every workload, with the verdict.

use std::time::Instant;

use serde_json::{Value, json};

use super::{SimulateArgs, SuiteForm, progress, usage, write};
use crate::cli::exit::{Exit, Failure};
use crate::simulate::Slo;
use crate::simulate::cells::Cells;
use crate::simulate::experiment::{self, OURS, silent};
use crate::simulate::picture::{self, Section};
use crate::simulate::report;
use crate::simulate::suite::{self, Shape, Suite};
use crate::simulate::suite_workloads::{Case, Traces, cases};
use crate::simulate::verdict::verdict;

impl SimulateArgs {
    pub(super) fn run_suite(&self, form: SuiteForm) -> Result<String, Failure> {
        let traces = Traces::read(&self.traces).map_err(usage)?;
        let mut chosen = cases();
        if let Some(unknown) = self.cases.iter().find(|name| !chosen.iter().any(|case| case.name == name.as_str())) {
            let names: Vec<&str> = chosen.iter().map(|case| case.name).collect();
            return Err(usage(format!("there is no workload {unknown:?}; the workloads are {}", names.join(", "))));
        }
        let mut note = String::new();
        chosen.retain(|case| {
            let is_asked = self.cases.is_empty() || self.cases.iter().any(|name| name == case.name);
            let has_trace = traces.workload(case, 1).is_some();
            if is_asked && !has_trace {
                note += &format!("{} is left out: its trace is not in {}\n", case.name, self.traces.display());
            }
            is_asked && has_trace
        });
        if chosen.is_empty() {
            return Err(usage(format!("{note}no workload is left: name the folder of the traces with --traces")));
        }
        let shape = if form == SuiteForm::Full { Shape::FULL } else { Shape::QUICK };
        let cells = match &self.out {
            Some(folder) => {
                let cannot =
                    |error: std::io::Error| usage(format!("cannot make the folder {}: {error}", folder.display()));
                std::fs::create_dir_all(folder).map_err(cannot)?;
                Cells::open(&folder.join("cells.jsonl")).map_err(usage)?
            }
            None => Cells::default(),
        };
        let bar = progress(0, self.plan);
        let tick = |jobs: usize, stage: &str| {
            if bar.length() != Some(jobs as u64) || bar.message() != stage {
                bar.reset();
                bar.set_length(jobs as u64);
                bar.set_message(stage.to_owned());
            }
            bar.inc(1);
        };
        let (threads, slo) = (self.threads(), Slo::default());
        let suite = Suite { cases: chosen, traces: &traces, shape, slo, threads, cells: &cells, tick: &tick };
        if self.plan {
            return Ok(note + &suite.plan(&run_times(&suite)));
        }
        let results = suite.run().map_err(|message| Failure::new(Exit::Output, message))?;
        bar.finish_and_clear();
        self.suite_result(&suite, &results, &note)
    }

    fn suite_result(&self, suite: &Suite, results: &[suite::CaseResults], note: &str) -> Result<String, Failure> {
        let lines = verdict(&suite.cases, results);
        let sections: Vec<Section> =
            suite.cases.iter().zip(results).map(|(case, of_case)| suite::section(case, of_case)).collect();
        let verdict_text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        if let Some(folder) = &self.out {
            let mut page = vec![Section { title: "Verdict".into(), text: verdict_text.clone(), ..Section::default() }];
            page.extend(sections.iter().cloned());
            write(&folder.join("suite.html"), &picture::html("The suite of policies", &page, OURS))?;
            for (case, section) in suite.cases.iter().zip(&sections) {
                let svg = picture::svg(&section.title, &section.panels, OURS);
                write(&folder.join(format!("{}.svg", case.name)), &svg)?;
            }
        }
        if self.json {
            let shape = suite.shape;
            let of_case = |(case, section): (&Case, &Section)| {
                let settings = json!({ "workload": case.name, "workers": case.workers, "engine": case.engine,
                    "load_share": suite::VERDICT_SHARE });
                report::json(&section.rows, &settings, &(1..=shape.seeds_all).collect::<Vec<_>>())
            };
            let cases: Vec<Value> = suite.cases.iter().zip(&sections).map(of_case).collect();
            let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
            return Ok(json!({ "cases": cases, "verdict": lines }).to_string() + "\n");
        }
        let table =
            |section: &Section| format!("{}\n{}\n{}\n\n", section.title, section.text, report::table(&section.rows));
        Ok(note.to_owned() + &sections.iter().map(table).collect::<String>() + &verdict_text)
    }
}

/// Seconds of a run of each case here, by one run of LPWL near its capacity.
fn run_times(suite: &Suite) -> Vec<f64> {
    let run_s = |case: &Case| {
        let (Some(workload), Some(settings)) = (suite.traces.workload(case, 1), case.settings(1)) else { return 0.0 };
        let begun = Instant::now();
        let _ = experiment::measure(&workload, case.first_load, &settings, &suite.slo, "lpwl", &silent);
        begun.elapsed().as_secs_f64()
    };
    suite.cases.iter().map(run_s).collect()
}
