//! What `gateway` found, as JSON and as a table.

use std::collections::BTreeMap;

use comfy_table::{Table, presets};
use serde::Serialize;

use super::load::Measured;
use super::proxies::processors;
use crate::args::{Asked, GatewayArgs, Way};
use crate::measure::median;

/// A way to ask for one kind of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Which requests.
    pub(crate) asked: Asked,
    /// Connections, each with one request in flight.
    pub(crate) connections: u32,
    /// Which way.
    pub(crate) way: Way,
}

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    requests_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: BTreeMap<String, f64>,
}

impl Sample {
    /// Of what was measured, with the processor time of the way's processes in nanoseconds.
    #[must_use]
    pub(crate) fn new(measured: &Measured, cpu_ns: BTreeMap<String, u64>) -> Self {
        let us = |quantile| measured.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
        let requests = measured.requests.max(1) as f64;
        Self {
            requests_per_s: measured.requests as f64 / measured.seconds.max(1e-9),
            p50_us: us(0.5),
            p99_us: us(0.99),
            cpu_us: cpu_ns.into_iter().map(|(name, ns)| (name, ns as f64 / 1e3 / requests)).collect(),
        }
    }
}

/// Everything that was measured.
#[derive(Debug, Default)]
pub(crate) struct Rows(BTreeMap<Key, Vec<Sample>>);

impl Rows {
    /// One measurement more.
    pub(crate) fn add(&mut self, key: Key, sample: Sample) {
        self.0.entry(key).or_default().push(sample);
    }
}

/// A proxy that ran.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Running {
    /// Which way.
    pub(crate) way: Way,
    /// What it says of its version.
    pub(crate) version: Option<String>,
    /// How it was started.
    pub(crate) commands: Vec<String>,
    /// Who decided and by which tokens, over the whole run: lines of our own metrics.
    pub(crate) decided: Vec<String>,
}

/// What was not measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Skipped {
    /// Which way.
    pub(crate) way: Way,
    /// Which requests; `None` = all.
    pub(crate) request: Option<Asked>,
    /// Why.
    pub(crate) reason: String,
}

/// A figure of two quantiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Pair {
    /// Of the medians.
    pub(crate) p50: f64,
    /// Of the 99th of 100.
    pub(crate) p99: f64,
}

/// Figures of one way to ask, each the median over repeats.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    request: Asked,
    way: Way,
    connections: u32,
    requests_per_s: f64,
    p50_us: f64,
    /// The lowest and the highest median of a repeat.
    p50_us_range: [f64; 2],
    p99_us: f64,
    /// Latency beyond that of the direct way.
    added_us: Option<Pair>,
    /// Latency beyond nginx's.
    over_nginx_us: Option<Pair>,
    /// Processor time of the way's processes for each request.
    cpu_us: f64,
    /// The same by process.
    cpu_us_by_process: BTreeMap<String, f64>,
    /// Requests for each second of that time.
    requests_per_core_s: Option<f64>,
}

/// What is wanted of the gateway, for a chat.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Summary {
    /// p50 over nginx with one connection, microseconds; wanted: at most 150.
    pub(crate) gateway_over_nginx_us: Option<f64>,
    /// Requests a core second, of `sglang-router`'s, with many connections; wanted: more than 1.
    pub(crate) gateway_to_sglang_router: Option<f64>,
    /// The same of the Rust router of the vLLM project.
    pub(crate) gateway_to_vllm_router: Option<f64>,
    /// The same of production-stack's router; wanted: at least 3.
    pub(crate) gateway_to_production_stack: Option<f64>,
    /// p50 that the picker adds to Envoy alone with one connection, microseconds.
    pub(crate) picker_over_envoy_us: Option<f64>,
    /// Processor time that the picker adds to a request through Envoy, with many connections, microseconds.
    pub(crate) picker_cpu_us: Option<f64>,
}

/// The machine.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// Processors that this process may use.
    processors: usize,
    model: String,
    kernel: String,
    /// Tasks that ran or waited to, when it ended: the mean over the last minute, its own included.
    load_average: f64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// As it was called.
    pub(crate) args: GatewayArgs,
    /// Where.
    pub(crate) machine: Machine,
    /// What ran.
    pub(crate) ways: Vec<Running>,
    /// What did not.
    pub(crate) skipped: Vec<Skipped>,
    /// Every way to ask.
    pub(crate) rows: Vec<Row>,
    /// What is wanted, reached or not.
    #[serde(flatten)]
    pub(crate) summary: Summary,
}

impl Row {
    fn of(key: Key, samples: &[Sample]) -> Self {
        let all = |field: fn(&Sample) -> f64| samples.iter().map(field).collect::<Vec<_>>();
        let of = |field| median(all(field));
        let p50s = all(|sample| sample.p50_us);
        let mut names: Vec<_> = samples.iter().flat_map(|sample| sample.cpu_us.keys().cloned()).collect();
        names.sort_unstable();
        names.dedup();
        let cpu =
            |name: &String| median(samples.iter().map(|it| it.cpu_us.get(name).copied().unwrap_or(0.0)).collect());
        let cpu_us = of(|sample| sample.cpu_us.values().sum());
        Self {
            request: key.asked,
            way: key.way,
            connections: key.connections,
            requests_per_s: of(|sample| sample.requests_per_s),
            p50_us: of(|sample| sample.p50_us),
            p50_us_range: [
                p50s.iter().copied().reduce(f64::min).unwrap_or(0.0),
                p50s.iter().copied().reduce(f64::max).unwrap_or(0.0),
            ],
            p99_us: of(|sample| sample.p99_us),
            added_us: None,
            over_nginx_us: None,
            cpu_us,
            cpu_us_by_process: names.into_iter().map(|name| (name.clone(), cpu(&name))).collect(),
            requests_per_core_s: (cpu_us > 0.0).then(|| 1e6 / cpu_us),
        }
    }

    fn beyond(&self, other: &Self) -> Pair {
        Pair { p50: self.p50_us - other.p50_us, p99: self.p99_us - other.p99_us }
    }
}

impl Report {
    /// Of everything that was measured.
    #[must_use]
    pub(crate) fn new(args: GatewayArgs, ways: Vec<Running>, skipped: Vec<Skipped>, rows: &Rows) -> Self {
        let mut rows: Vec<_> = rows.0.iter().map(|(key, samples)| Row::of(*key, samples)).collect();
        let all = rows.clone();
        for row in &mut rows {
            let of = |way| find(&all, row.request, row.connections, way);
            let added = of(Way::Direct).filter(|_| row.way != Way::Direct).map(|floor| row.beyond(floor));
            let over = of(Way::Nginx).filter(|_| row.way > Way::Nginx).map(|nginx| row.beyond(nginx));
            (row.added_us, row.over_nginx_us) = (added, over);
        }
        let summary = Summary::of(&rows, args.connections);
        Self { machine: Machine::here(), ways, skipped, rows, summary, args }
    }

    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        let header = "request|way|connections|req/s|p50 us|p99 us|added p50|added p99|over nginx p50|over nginx p99|\
                      CPU us|req/core s";
        table.set_header(header.split('|'));
        for row in &self.rows {
            let part =
                |pair: Option<Pair>, of: fn(Pair) -> f64| pair.map_or_else(String::new, |it| format!("{:.0}", of(it)));
            table.add_row([
                row.request.name().to_owned(),
                row.way.name().to_owned(),
                row.connections.to_string(),
                format!("{:.0}", row.requests_per_s),
                format!("{:.0}", row.p50_us),
                format!("{:.0}", row.p99_us),
                part(row.added_us, |it| it.p50),
                part(row.added_us, |it| it.p99),
                part(row.over_nginx_us, |it| it.p50),
                part(row.over_nginx_us, |it| it.p99),
                format!("{:.1}", row.cpu_us),
                row.requests_per_core_s.map_or_else(String::new, |per_s| format!("{per_s:.0}")),
            ]);
        }
        let Machine { processors, model, kernel, load_average } = &self.machine;
        let mut text = format!(
            "medians of {} repeats of {} s; {processors} processors ({model}), Linux {kernel}, load average \
             {load_average:.1}\n{table}",
            self.args.repeat, self.args.seconds
        );
        for Running { way, version, commands, decided } in &self.ways {
            let version = version.as_deref().map_or_else(String::new, |version| format!(" ({version})"));
            text.push_str(&format!("\n{}{version}: {}", way.name(), commands.join("; ")));
            decided.iter().for_each(|line| text.push_str(&format!("\n  {line}")));
        }
        for Skipped { way, request, reason } in &self.skipped {
            let request = request.map_or_else(String::new, |request| format!(", {}", request.name()));
            text.push_str(&format!("\nskipped: {}{request}: {reason}", way.name()));
        }
        text.push_str(&self.summary.text());
        text
    }
}

impl Summary {
    fn of(rows: &[Row], many: u32) -> Self {
        let single = |way| find(rows, Asked::Chat, 1, way);
        let loaded = |way| find(rows, Asked::Chat, many, way);
        let per_core = |way| loaded(way).and_then(|row| row.requests_per_core_s);
        let ratio = |way| Some(per_core(Way::Gateway)? / per_core(way)?);
        let beyond = |way, other| Some(single(way)?.p50_us - single(other)?.p50_us);
        let cpu = |way| loaded(way).map(|row| row.cpu_us);
        Self {
            gateway_over_nginx_us: beyond(Way::Gateway, Way::Nginx),
            gateway_to_sglang_router: ratio(Way::SglangRouter),
            gateway_to_vllm_router: ratio(Way::VllmRouter),
            gateway_to_production_stack: ratio(Way::ProductionStack),
            picker_over_envoy_us: beyond(Way::EnvoyPicker, Way::Envoy),
            picker_cpu_us: cpu(Way::EnvoyPicker).zip(cpu(Way::Envoy)).map(|(with, alone)| with - alone),
        }
    }

    fn text(&self) -> String {
        let lines = [
            ("the gateway's p50 over nginx, us (wanted: at most 150)", self.gateway_over_nginx_us),
            ("requests a core, of sglang-router's (wanted: more than 1)", self.gateway_to_sglang_router),
            ("requests a core, of vllm-router's", self.gateway_to_vllm_router),
            ("requests a core, of production-stack's router (wanted: at least 3)", self.gateway_to_production_stack),
            ("the picker's p50 over Envoy alone, us", self.picker_over_envoy_us),
            ("the picker's processor time beyond Envoy alone, us", self.picker_cpu_us),
        ];
        let line = |(what, figure): (&str, Option<f64>)| {
            format!("\nchat: {what}: {}", figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.2}")))
        };
        lines.into_iter().map(line).collect()
    }
}

impl Machine {
    fn here() -> Self {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
        let model = read("/proc/cpuinfo").lines().find_map(|line| {
            let (name, model) = line.split_once(':')?;
            (name.trim() == "model name").then(|| model.trim().to_owned())
        });
        Self {
            processors: processors(),
            model: model.unwrap_or_default(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_average: read("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0),
        }
    }
}

fn find(rows: &[Row], request: Asked, connections: u32, way: Way) -> Option<&Row> {
    rows.iter().find(|row| (row.request, row.connections, row.way) == (request, connections, way))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn sample(p50_us: f64, cpu_us: f64) -> Sample {
        let cpu_us = BTreeMap::from([("a".to_owned(), cpu_us / 2.0), ("b".to_owned(), cpu_us / 2.0)]);
        Sample { requests_per_s: 1e6 / p50_us, p50_us, p99_us: 2.0 * p50_us, cpu_us }
    }

    #[test]
    fn ways_are_compared_by_medians_of_the_same_requests() {
        let mut rows = Rows::default();
        let mut add = |asked, connections, way, all: &[(f64, f64)]| {
            all.iter().for_each(|(p50, cpu)| rows.add(Key { asked, connections, way }, sample(*p50, *cpu)));
        };
        for asked in Asked::ALL {
            let more = if asked == Asked::Chat { 0.0 } else { 1000.0 };
            for connections in [1, 32] {
                add(asked, connections, Way::Direct, &[(100.0, 0.0)]);
                add(asked, connections, Way::Nginx, &[(150.0 + more, 20.0)]);
                add(asked, connections, Way::Gateway, &[(200.0, 40.0), (250.0 + more, 50.0), (900.0 + more, 90.0)]);
                add(asked, connections, Way::SglangRouter, &[(400.0, 100.0 + more)]);
            }
        }
        let line = "perf gateway --connections 32";
        let Command::Gateway(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("not gateway") };
        let missing = Skipped { way: Way::ProductionStack, request: None, reason: "it is not there".to_owned() };
        let report = Report::new(args, Vec::new(), vec![missing], &rows);
        let gateway = find(&report.rows, Asked::Chat, 1, Way::Gateway).expect("a row");
        assert_eq!(gateway.added_us, Some(Pair { p50: 150.0, p99: 300.0 }));
        assert_eq!(gateway.over_nginx_us, Some(Pair { p50: 100.0, p99: 200.0 }));
        assert_eq!((gateway.cpu_us, gateway.requests_per_core_s), (50.0, Some(20_000.0)));
        assert_eq!(gateway.cpu_us_by_process.values().sum::<f64>(), 50.0);
        let floor = find(&report.rows, Asked::Chat, 1, Way::Direct).expect("a row");
        assert_eq!((floor.added_us, floor.over_nginx_us, floor.requests_per_core_s), (None, None, None));
        assert_eq!(report.summary.gateway_over_nginx_us, Some(100.0));
        assert_eq!(report.summary.gateway_to_sglang_router, Some(2.0));
        assert_eq!(report.summary.gateway_to_production_stack, None);
        let table = report.table();
        assert!(table.contains("skipped: production-stack: it is not there"), "{table}");
        assert!(table.contains("production-stack's router (wanted: at least 3): -"), "{table}");
    }
}
