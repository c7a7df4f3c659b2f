//! The file that describes a simulated fleet: `kvrouted simulate --fleet`. It is read as the configuration is, by tables
//! of fields, and every problem is listed.

use super::document::{self, TableDraft};
use super::fields::{CHANGE, ENGINES, FLEET, FLEET_ROUTERS, POOLS};
use super::problem::{Location, Problem, Problems};
use crate::engine_law::{EngineLaw, EnginePreset};
use crate::fleet::PoolRole;
use crate::ids::Tier;
use crate::limits::SIMULATED_ENGINES_MAX;
use crate::route::{Bypass, DisaggregationPolicy};

/// A simulated fleet, as a file describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetFile {
    /// Tokens of a KV block.
    pub block_size: u32,
    /// The delay of KV events, seconds.
    pub event_lag_s: f64,
    /// The routers.
    pub routers: FleetRouters,
    /// When our policies bypass the pool that prefills.
    pub disaggregation: DisaggregationPolicy,
    /// The engines, group by group; all of role `both`, or at least one of each other role.
    pub engines: Vec<EngineGroup>,
    /// What happens, in order of time. Workers are numbered from 0 through all groups.
    pub changes: Vec<WorkerChange>,
}

/// The routers of a simulated fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FleetRouters {
    /// How many there are.
    pub count: usize,
    /// Seconds after which a router learns what another did; `None` = never.
    pub age_s: Option<f64>,
    /// Whether all requests of a session go to one router.
    pub sessions_stick: bool,
    /// The engines' true constants times this are what the routers begin with; `None` = they know nothing of them.
    pub constants_factor: Option<f64>,
}

/// Engines that are alike.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineGroup {
    /// How many there are.
    pub count: usize,
    /// The name of their class.
    pub class: String,
    /// The part of requests that they run.
    pub role: PoolRole,
    /// The time of a step.
    pub law: EngineLaw,
    /// Tokens that the KV memory holds.
    pub kv_tokens: u64,
    /// Tokens of one step.
    pub step_tokens_max: u32,
    /// Requests of one batch.
    pub sequences_max: u32,
    /// Stores below the device, from the fastest to the slowest: tokens, and seconds to bring one token to the device.
    pub stores: Vec<(Tier, u64, f64)>,
    /// Seconds to receive the KV of one token from another engine.
    pub receive_token_s: f64,
}

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerChange {
    /// Seconds from the beginning.
    pub at_s: f64,
    /// The worker.
    pub worker: usize,
    /// What happens.
    pub what: FleetChangeName,
    /// Of a worker that slows: how many times as long its steps take from then on.
    pub factor: f64,
}

/// The names of what may happen to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FleetChangeName {
    /// It loses its cache and its requests.
    #[default]
    Dies,
    /// It comes with an empty cache.
    Joins,
    /// Its steps take longer.
    Slows,
}

/// `[fleet]` as written.
#[derive(Clone, Debug, Default)]
pub(super) struct FleetDraft {
    pub(super) block_size: u32,
    pub(super) event_lag_ms: f64,
}

/// `[routers]` as written.
#[derive(Clone, Debug, Default)]
pub(super) struct RoutersDraft {
    pub(super) count: usize,
    pub(super) age_ms: f64,
    pub(super) share_bookings: bool,
    pub(super) sessions_stick: bool,
    pub(super) constants_known: bool,
    pub(super) constants_factor: f64,
}

/// One `[[engines]]` as written.
#[derive(Clone, Debug, Default)]
pub(super) struct EnginesDraft {
    pub(super) count: usize,
    pub(super) role: PoolRole,
    pub(super) preset: Option<&'static EnginePreset>,
    pub(super) class: Option<String>,
    pub(super) kv_tokens: Option<u64>,
    pub(super) kv_token_bytes: Option<u32>,
    pub(super) step_tokens_max: u32,
    pub(super) sequences_max: u32,
    /// In the order and the units of [`CONSTANTS`].
    pub(super) constants: [Option<f64>; 6],
    /// Host, disk and external.
    pub(super) stores: [StoreDraft; 3],
    pub(super) receive_gb_s: Option<f64>,
}

/// A store below the device, as written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StoreDraft {
    pub(super) tokens: Option<u64>,
    pub(super) gb_s: Option<f64>,
}

/// One `[[change]]` as written.
#[derive(Clone, Debug, Default)]
pub(super) struct FleetChangeDraft {
    pub(super) at_s: f64,
    pub(super) worker: usize,
    pub(super) what: FleetChangeName,
    pub(super) factor: Option<f64>,
}

/// The constants of an engine, and the seconds of their units.
const CONSTANTS: [(&str, f64); 6] = [
    ("base_ms", 1e-3),
    ("token_us", 1e-6),
    ("attention_ns", 1e-9),
    ("step_ms", 1e-3),
    ("request_us", 1e-6),
    ("kv_token_ns", 1e-9),
];
/// The stores below the device, and the names of their fields.
const STORES: [(Tier, &str, &str); 3] = [
    (Tier::Host, "host_tokens", "host_gb_s"),
    (Tier::Disk, "disk_tokens", "disk_gb_s"),
    (Tier::External, "external_tokens", "external_gb_s"),
];
/// The bandwidth between engines, unless a file says otherwise: one link of 400 Gb/s.
const RECEIVE_GB_S: f64 = 50.0;
/// How many times as long the steps of a worker take that slows, unless a file says otherwise.
const SLOW_FACTOR: f64 = 2.0;

/// The whole file: every field at its accepted value or its default.
struct FileDraft {
    fleet: TableDraft<FleetDraft>,
    routers: TableDraft<RoutersDraft>,
    pools: TableDraft<DisaggregationPolicy>,
    engines: Vec<TableDraft<EnginesDraft>>,
    changes: Vec<TableDraft<FleetChangeDraft>>,
}

/// Reads the text of a file. `source` names it in problems.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn parse_fleet(source: &str, text: &str) -> Result<FleetFile, Problems> {
    let mut problems = Vec::new();
    let sections = vec![
        document::names_of(&FLEET),
        document::names_of(&FLEET_ROUTERS),
        document::names_of(&POOLS),
        document::names_of(&ENGINES),
        document::names_of(&CHANGE),
    ];
    let draft = document::read_tables(text, sections, &mut problems, |reader, root| {
        let mut draft = FileDraft {
            fleet: document::preset(&FLEET),
            routers: document::preset(&FLEET_ROUTERS),
            pools: document::preset(&POOLS),
            engines: Vec::new(),
            changes: Vec::new(),
        };
        reader.each_table(root, |reader, name, item, location| match name {
            "fleet" => reader.single(&FLEET, item, location, &mut draft.fleet),
            "routers" => reader.single(&FLEET_ROUTERS, item, location, &mut draft.routers),
            "pools" => reader.single(&POOLS, item, location, &mut draft.pools),
            "engines" => draft.engines = reader.repeated(&ENGINES, item, location),
            "change" => draft.changes = reader.repeated(&CHANGE, item, location),
            _ => reader.unknown_section(name, item, location),
        });
        draft
    });
    let fleet = draft.map(|draft| checked(&draft, &mut problems));
    match fleet {
        Some(fleet) if problems.is_empty() => Ok(fleet),
        _ => {
            problems.sort_by(|a, b| a.location.cmp(&b.location));
            Err(Problems { source: source.to_owned(), list: problems })
        }
    }
}

/// Checks the file as a whole.
fn checked(draft: &FileDraft, problems: &mut Vec<Problem>) -> FleetFile {
    let (fleet, routers) = (&draft.fleet.value, &draft.routers.value);
    let group = |entry: (usize, &TableDraft<EnginesDraft>)| group_of(entry, fleet.block_size, problems);
    let engines: Vec<EngineGroup> = draft.engines.iter().enumerate().map(group).collect();
    check_engines(draft, &engines, problems);
    FleetFile {
        block_size: fleet.block_size,
        event_lag_s: fleet.event_lag_ms * 1e-3,
        routers: FleetRouters {
            count: routers.count,
            age_s: routers.share_bookings.then_some(routers.age_ms * 1e-3),
            sessions_stick: routers.sessions_stick,
            constants_factor: routers.constants_known.then_some(routers.constants_factor),
        },
        disaggregation: draft.pools.value,
        changes: changes(draft, &engines, problems),
        engines,
    }
}

/// The engines of one group.
fn group_of(
    (at, entry): (usize, &TableDraft<EnginesDraft>),
    block_size: u32,
    problems: &mut Vec<Problem>,
) -> EngineGroup {
    let draft = &entry.value;
    let preset = draft.preset;
    let kv_tokens = or_preset(entry, "kv_tokens", draft.kv_tokens, |preset| preset.kv_tokens, problems);
    if kv_tokens < u64::from(block_size) && draft.kv_tokens.is_some() {
        let message = format!("must hold at least one block, and block_size in [fleet] is {block_size}");
        problems.push(entry.problem("kv_tokens", message));
    }
    let moves_kv = draft.role == PoolRole::Decode || draft.stores.iter().any(|store| store.tokens.is_some());
    let token_bytes = match moves_kv {
        true => or_preset(entry, "kv_token_bytes", draft.kv_token_bytes, |preset| preset.kv_token_bytes, problems),
        false => 0,
    };
    let token_s = |gb_s: f64| f64::from(token_bytes) / (gb_s * 1e9);
    let class = || preset.map_or_else(|| format!("engines[{at}]"), |preset| preset.name.to_owned());
    EngineGroup {
        count: draft.count,
        class: draft.class.clone().unwrap_or_else(class),
        role: draft.role,
        law: law(entry, problems),
        kv_tokens,
        step_tokens_max: draft.step_tokens_max,
        sequences_max: draft.sequences_max,
        stores: stores(entry, token_s, problems),
        receive_token_s: token_s(draft.receive_gb_s.unwrap_or(RECEIVE_GB_S)),
    }
}

/// The value of a field, or that of the preset. Without either, a problem and the default.
fn or_preset<T: Default>(
    entry: &TableDraft<EnginesDraft>,
    name: &str,
    written: Option<T>,
    of_preset: impl Fn(&EnginePreset) -> T,
    problems: &mut Vec<Problem>,
) -> T {
    let found = written.or(entry.value.preset.map(of_preset));
    if found.is_none() && !entry.is_refused("preset") && !entry.is_refused(name) {
        problems.push(entry.problem(name, "is missing; set it, or a preset such as preset = \"70b-tp4\""));
    }
    found.unwrap_or_default()
}

/// The time of a step.
fn law(entry: &TableDraft<EnginesDraft>, problems: &mut Vec<Problem>) -> EngineLaw {
    let of_preset = |preset: &EnginePreset| {
        let (prefill, decode) = (preset.law.prefill, preset.law.decode);
        let of_prefill = [prefill.base_s, prefill.token_s, prefill.attention_s];
        [of_prefill, [decode.step_s, decode.request_s, decode.kv_token_s]]
    };
    let mut seconds = [[0.0; 3]; 2];
    for (at, (name, unit_s)) in CONSTANTS.into_iter().enumerate() {
        let written = entry.value.constants[at].map(|value| value * unit_s);
        let (part, place) = (at / 3, at % 3);
        seconds[part][place] = or_preset(entry, name, written, |preset| of_preset(preset)[part][place], problems);
        if written == Some(0.0) && ["token_us", "step_ms"].contains(&name) {
            problems.push(entry.problem(name, "must be above 0: every token and every step takes time"));
        }
    }
    EngineLaw::of(seconds[0], seconds[1])
}

/// The stores below the device.
fn stores(
    entry: &TableDraft<EnginesDraft>,
    token_s: impl Fn(f64) -> f64,
    problems: &mut Vec<Problem>,
) -> Vec<(Tier, u64, f64)> {
    let mut stores = Vec::new();
    for ((tier, tokens_name, bandwidth_name), store) in STORES.into_iter().zip(entry.value.stores) {
        match (store.tokens, store.gb_s) {
            (Some(tokens), Some(gb_s)) => stores.push((tier, tokens, token_s(gb_s))),
            (Some(_), None) if !entry.is_refused(bandwidth_name) => {
                let message = format!("is missing; {tokens_name} needs it, e.g. {bandwidth_name} = 50");
                problems.push(entry.problem(bandwidth_name, message));
            }
            (None, Some(_)) if !entry.is_refused(tokens_name) => {
                let message = format!("is missing; {bandwidth_name} needs it, e.g. {tokens_name} = 1000000");
                problems.push(entry.problem(tokens_name, message));
            }
            _ => {}
        }
    }
    stores
}

/// Checks the engines of all groups together.
fn check_engines(draft: &FileDraft, engines: &[EngineGroup], problems: &mut Vec<Problem>) {
    let count: usize = engines.iter().map(|group| group.count).sum();
    let of = |role: PoolRole| draft.engines.iter().find(|entry| entry.value.role == role);
    let (both, prefill, decode) = (of(PoolRole::Both), of(PoolRole::Prefill), of(PoolRole::Decode));
    if engines.is_empty() {
        let message = "is missing: the fleet has no engine; add [[engines]] with preset = \"70b-tp4\"";
        problems.push(Problem::new(Location::Document, "engines", message));
    } else if count > SIMULATED_ENGINES_MAX {
        let message =
            format!("the groups have {count} engines together, at most {SIMULATED_ENGINES_MAX} are simulated");
        problems.push(Problem::new(Location::Document, "engines", message));
    }
    match (both, prefill.or(decode), prefill.zip(decode)) {
        (Some(both), Some(_), _) => {
            let message =
                "is both, but other groups are pools, through which every request passes; use prefill or decode";
            problems.push(both.problem("role", message));
        }
        (None, Some(pool), None) => {
            let other = if prefill.is_some() { "decode" } else { "prefill" };
            let message = format!("needs the other pool: add [[engines]] with role = \"{other}\"");
            problems.push(pool.problem("role", message));
        }
        _ => {}
    }
    if draft.pools.value.bypass != Bypass::Off && prefill.is_none() {
        let message = "needs pools: no group of engines has role = \"prefill\"";
        problems.push(draft.pools.problem("prefill_bypass", message));
    }
}

/// What happens to the workers, in order of time.
fn changes(draft: &FileDraft, engines: &[EngineGroup], problems: &mut Vec<Problem>) -> Vec<WorkerChange> {
    let workers: usize = engines.iter().map(|group| group.count).sum();
    let mut entries: Vec<&TableDraft<FleetChangeDraft>> = draft.changes.iter().collect();
    entries.sort_by(|a, b| a.value.at_s.total_cmp(&b.value.at_s));
    let mut are_present: Vec<Option<bool>> = vec![None; workers];
    let mut changes = Vec::with_capacity(entries.len());
    for entry in entries {
        let FleetChangeDraft { at_s, worker, what, factor } = entry.value;
        let Some(is_present) = are_present.get_mut(worker) else {
            if workers > 0 && !entry.is_refused("worker") {
                let message =
                    format!("there is no worker {worker}: the fleet has {workers}, from 0 to {}", workers - 1);
                problems.push(entry.problem("worker", message));
            }
            continue;
        };
        // A worker whose first change is to join is not there before.
        let was_present = is_present.unwrap_or(what != FleetChangeName::Joins);
        match what {
            FleetChangeName::Joins if was_present => {
                problems.push(entry.problem("what", format!("worker {worker} is there already at {at_s} s")));
            }
            FleetChangeName::Dies if !was_present => {
                problems.push(entry.problem("what", format!("worker {worker} is not there at {at_s} s")));
            }
            _ => {}
        }
        *is_present = Some(match what {
            FleetChangeName::Joins => true,
            FleetChangeName::Dies => false,
            FleetChangeName::Slows => was_present,
        });
        if factor.is_some() && what != FleetChangeName::Slows {
            problems.push(entry.problem("factor", "goes only with what = \"slows\""));
        }
        changes.push(WorkerChange { at_s, worker, what, factor: factor.unwrap_or(SLOW_FACTOR) });
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_law::engine_preset;

    fn parsed(text: &str) -> FleetFile {
        parse_fleet("f.toml", text).unwrap_or_else(|problems| panic!("{problems}"))
    }

    #[test]
    fn every_field_has_a_default_but_the_engines() {
        let fleet = parsed("[[engines]]\npreset = \"8b-tp1\"\n");
        let preset = engine_preset("8b-tp1").expect("a preset");
        let FleetFile { block_size, event_lag_s, routers, disaggregation, engines, changes } = fleet;
        assert_eq!((block_size, event_lag_s, changes.len()), (64, 0.005, 0));
        let one = FleetRouters { count: 1, age_s: Some(0.0), sessions_stick: false, constants_factor: Some(1.0) };
        assert_eq!((routers, disaggregation), (one, DisaggregationPolicy::default()));
        let [group] = &engines[..] else { panic!("{engines:?}") };
        assert_eq!((group.count, group.class.as_str(), group.role), (1, "8b-tp1", PoolRole::Both));
        assert_eq!((group.law, group.kv_tokens), (preset.law, preset.kv_tokens));
        assert_eq!((group.step_tokens_max, group.sequences_max, group.stores.len()), (8192, 256, 0));
    }

    #[test]
    fn what_is_written_is_what_is_simulated() {
        let fleet = parsed(
            r#"
            [fleet]
            block_size = 16
            event_lag_ms = 50
            [routers]
            count = 4
            age_ms = 20
            sessions_stick = true
            constants_factor = 2
            [pools]
            prefill_bypass = "isl_bounding"
            [[engines]]
            count = 2
            role = "prefill"
            preset = "70b-tp4"
            host_tokens = 1_000_000
            host_gb_s = 50
            [[engines]]
            count = 3
            role = "decode"
            class = "mine"
            base_ms = 1
            token_us = 2
            attention_ns = 3
            step_ms = 4
            request_us = 5
            kv_token_ns = 6
            kv_tokens = 1000
            kv_token_bytes = 100_000
            receive_gb_s = 10
            [[change]]
            at_s = 9
            worker = 4
            what = "joins"
            [[change]]
            at_s = 1.5
            worker = 0
            what = "slows"
            factor = 3
            "#,
        );
        assert_eq!((fleet.block_size, fleet.event_lag_s), (16, 0.05));
        let routers = FleetRouters { count: 4, age_s: Some(0.02), sessions_stick: true, constants_factor: Some(2.0) };
        assert_eq!((fleet.routers, fleet.disaggregation.bypass), (routers, Bypass::IslBounding));
        let [prefills, decodes] = &fleet.engines[..] else { panic!("{fleet:?}") };
        // 80 layers of keys and values of 8 heads of 128 numbers of 16 bits, at 50 GB/s.
        let host_token_s = 80.0 * 2.0 * 8.0 * 128.0 * 2.0 / 50e9;
        assert_eq!((prefills.count, &prefills.stores[..]), (2, &[(Tier::Host, 1_000_000, host_token_s)][..]));
        let law = EngineLaw::of([1.0 * 1e-3, 2.0 * 1e-6, 3.0 * 1e-9], [4.0 * 1e-3, 5.0 * 1e-6, 6.0 * 1e-9]);
        assert_eq!((decodes.role, decodes.class.as_str(), decodes.law), (PoolRole::Decode, "mine", law));
        assert_eq!((decodes.kv_tokens, decodes.receive_token_s), (1000, 1e5 / 1e10));
        let slows = WorkerChange { at_s: 1.5, worker: 0, what: FleetChangeName::Slows, factor: 3.0 };
        let joins = WorkerChange { at_s: 9.0, worker: 4, what: FleetChangeName::Joins, factor: 2.0 };
        assert_eq!(fleet.changes, [slows, joins], "in order of time");
    }

    #[test]
    fn routers_may_know_nothing_of_each_other_and_of_the_engines() {
        let fleet = parsed(
            "[routers]\ncount = 2\nshare_bookings = false\nconstants_known = false\n[[engines]]\npreset = \"8b-tp1\"\n",
        );
        assert_eq!((fleet.routers.age_s, fleet.routers.constants_factor), (None, None));
    }

    /// Every problem of a fleet of two engines and this.
    fn problems(more: &str) -> String {
        let text = format!("[[engines]]\npreset = \"70b-tp4\"\ncount = 2\n{more}");
        parse_fleet("f.toml", &text).expect_err(more).to_string()
    }

    #[test]
    fn a_problem_says_where_what_and_what_to_write() {
        for (more, says) in [
            ("counts = 3", "f.toml:4:1: engines[0].counts: unknown field; did you mean `count`?"),
            ("block_size = 16", "engines[0].block_size: unknown field here; `block_size` belongs to [fleet]"),
            ("class = 7", "expected a string, found an integer"),
            ("role = \"decoder\"", "is none of both, prefill, decode; did you mean `decode`?"),
            ("role = \"decode\"", "needs the other pool: add [[engines]] with role = \"prefill\""),
            ("[router]\ncount = 2", "f.toml:4:2: router: unknown table; did you mean `routers`?"),
            ("[routers]\nage_ms = -1", "routers.age_ms: out of range, must be 0 to 60000"),
            ("kv_tokens = 63", "must hold at least one block, and block_size in [fleet] is 64"),
            ("token_us = 0", "engines[0].token_us: must be above 0"),
            ("host_tokens = 1000", "host_gb_s: is missing; host_tokens needs it, e.g. host_gb_s = 50"),
            ("disk_gb_s = 5", "disk_tokens: is missing; disk_gb_s needs it"),
            ("[[engines]]", "engines[1].base_ms: is missing; set it, or a preset such as preset = \"70b-tp4\""),
            ("[[engines]]\npreset = \"8b-tp1\"\nrole = \"prefill\"", "role: is both, but other groups are pools"),
            ("[[engines]]\npreset = \"8b-tp1\"\ncount = 1024", "1026 engines together, at most 1024"),
            ("[pools]\nprefill_bypass = \"isl_or_load\"", "pools.prefill_bypass: needs pools"),
            ("[[change]]\nat_s = 1\nwhat = \"dies\"", "change[0].worker: is missing, e.g. worker = 0"),
            ("[[change]]\nat_s = 1\nworker = 2\nwhat = \"dies\"", "there is no worker 2: the fleet has 2, from 0 to 1"),
            ("[[change]]\nat_s = 1\nworker = 0\nwhat = \"dies\"\nfactor = 2", "goes only with what = \"slows\""),
            (
                "[[change]]\nat_s = 1\nworker = 0\nwhat = \"dies\"\n[[change]]\nat_s = 2\nworker = 0\nwhat = \"dies\"",
                "worker 0 is not there at 2 s",
            ),
            (
                "[[change]]\nat_s = 1\nworker = 0\nwhat = \"slows\"\n[[change]]\nat_s = 2\nworker = 0\nwhat = \"joins\"",
                "worker 0 is there already at 2 s",
            ),
            ("[[[", "syntax"),
        ] {
            let found = problems(more);
            assert!(found.contains(says), "{more}\n{found}");
        }
        let none = parse_fleet("f.toml", "").expect_err("no engine").to_string();
        assert_eq!(
            none,
            "f.toml: engines: is missing: the fleet has no engine; add [[engines]] with preset = \"70b-tp4\""
        );
    }

    #[test]
    fn all_problems_are_listed_in_the_order_of_their_lines() {
        let found =
            problems("sequences_max = 0\n[fleet]\nblock_sizes = 1\n[[change]]\nat_s = -1\nworker = 0\nwhat = \"x\"");
        let lines: Vec<&str> = found.lines().map(|line| line.split(": ").nth(1).unwrap_or_default()).collect();
        assert_eq!(lines, ["engines[0].sequences_max", "fleet.block_sizes", "change[0].at_s", "change[0].what"]);
    }
}
