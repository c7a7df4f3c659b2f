//! The differences between two configurations, field by field, and which of them a running daemon takes over by a reload.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::catalog;
use super::document;
use super::field::{listed, quoted};
use super::fields;
use super::written::WrittenTable;
use super::{Config, ServerConfig, WorkerConfig};
use crate::fleet::{EventSource, SnapshotSource, WorkerState};
use crate::load::PrefillFigures;

/// One field that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldDifference {
    /// The field with its table, `serve.cores` or `space[0].policy.mode`; for a worker only the field, `endpoint`.
    pub field: String,
    /// Its value before, in TOML; `None` = it has none.
    pub before: Option<String>,
    /// Its value after, in TOML; `None` = it has none.
    pub after: Option<String>,
    /// Whether only a restart takes it over.
    pub needs_restart: bool,
}

/// A worker of both configurations whose fields differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerDifference {
    /// The worker, `3/1`, or the URL of its engine.
    pub worker: String,
    /// The fields.
    pub fields: Vec<FieldDifference>,
}

/// What differs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Fields of tables other than `[[worker]]`, in the order of the example file.
    pub fields: Vec<FieldDifference>,
    /// Workers that only the later configuration names, `3/1` or the URL of an engine.
    pub added: Vec<String>,
    /// Workers that only the earlier one names.
    pub removed: Vec<String>,
    /// Workers of both.
    pub changed: Vec<WorkerDifference>,
    /// Whether a daemon refuses the reload because the spaces differ: workers name their space by its position.
    pub is_refused: bool,
}

impl Difference {
    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Config {
    /// The changes from this configuration to `next`, without [relay], which no daemon reads.
    #[must_use]
    pub fn difference(&self, next: &Self) -> Difference {
        let mut difference = Difference { is_refused: self.spaces != next.spaces, ..Difference::default() };
        fields_of_tables(self, next, &mut difference);
        let (before, after) = (workers(self), workers(next));
        for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
            match (before.get(name), after.get(name)) {
                (None, Some(_)) => difference.added.push(name.to_string()),
                (Some(_), None) => difference.removed.push(name.to_string()),
                (Some(before), Some(after)) if before != after => {
                    let fields = before.iter().zip(after).filter(|(before, after)| before != after);
                    let fields = fields.map(|((field, before), (_, after))| FieldDifference {
                        field: (*field).to_owned(),
                        before: before.clone(),
                        after: after.clone(),
                        needs_restart: false,
                    });
                    let worker = name.to_string();
                    difference.changed.push(WorkerDifference { worker, fields: fields.collect() });
                }
                _ => {}
            }
        }
        difference
    }
}

/// The paths of the tables to compare: each table that is not repeated, and each space of either configuration.
fn paths<'a>(one: &'a Config, other: &'a Config) -> impl Iterator<Item = String> + use<'a> {
    let spaces = one.spaces.len().max(other.spaces.len());
    let single = document::sections().into_iter().map(|(name, _)| name.to_owned());
    let others = [fields::SPACE.name, fields::WORKER.name, fields::RELAY.name];
    let single = single.filter(move |name| !others.contains(&name.as_str()));
    single.chain((0..spaces).flat_map(|at| [format!("space[{at}]"), format!("space[{at}].policy")]))
}

fn fields_of_tables(was: &Config, is: &Config, difference: &mut Difference) {
    let waiting = was.waiting_for_restart(is);
    let tables = (Tables::of(was), Tables::of(is));
    for path in paths(was, is) {
        let Some(table) = catalog::table(&path) else { continue };
        for field in &table.fields {
            let name = format!("{path}.{}", field.name);
            let (before, after) =
                (tables.0.effective(was, &path, field.name), tables.1.effective(is, &path, field.name));
            // A field that needs a restart differs only if its value does: another notation of it needs no restart.
            let differs = if path.starts_with("space[") {
                before != after && (path.ends_with(".policy") || difference.is_refused)
            } else {
                (field.is_live && before != after) || waiting.contains(&name.as_str())
            };
            if differs {
                let needs_restart = !field.is_live;
                difference.fields.push(FieldDifference { field: name, before, after, needs_restart });
            }
        }
    }
}

/// The written tables of a configuration by their paths: a map, because there may be thousands.
struct Tables<'a>(HashMap<&'a str, &'a WrittenTable>);

impl<'a> Tables<'a> {
    fn of(config: &'a Config) -> Self {
        Self(config.written.iter().map(|table| (&table.path[..], table)).collect())
    }

    /// The value of a field in TOML, as written or by default. A space's own policy has only the fields in which it
    /// differs from [policy].
    fn effective(&self, config: &Config, path: &str, field: &str) -> Option<String> {
        let written = |path: &str| self.0.get(path).and_then(|table| table.value(field)).map(str::to_owned);
        let default = || catalog::table(path).and_then(|table| table.field(field)?.default.clone());
        if path.ends_with(".policy") {
            let general = written(fields::POLICY.name).or_else(default);
            return written(path).filter(|own| general.as_ref() != Some(own));
        }
        let is_there = self.0.contains_key(path) || !path.starts_with("space[");
        written(path).or_else(|| is_there.then(default).flatten()).or_else(|| match (path, field) {
            // Defaults that follow from other fields.
            ("serve", "admin_socket") => config.serve.admin_socket.to_str().map(quoted),
            ("http", "administer") => Some(config.http.administer.to_string()),
            _ => None,
        })
    }
}

/// A worker's fields with their values in TOML; `None` = it has none.
pub(crate) type WorkerFields = Vec<(&'static str, Option<String>)>;

/// Every worker by its id and rank, or by its engine's URL.
fn workers(config: &Config) -> BTreeMap<WorkerName, WorkerFields> {
    let named = config
        .workers
        .iter()
        .map(|worker| (WorkerName::Rank(worker.worker.id.0, worker.worker.rank.0), fields_of_worker(worker)));
    let servers = config.servers.iter().map(|ServerConfig { url, worker }| {
        let mut fields = fields_of_worker(worker);
        fields.push(("id", Some(worker.worker.to_string())));
        (WorkerName::Url(url.clone()), fields)
    });
    named.chain(servers).collect()
}

/// The name of a worker, in the order of a listing.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum WorkerName {
    Rank(u64, u32),
    Url(String),
}

impl std::fmt::Display for WorkerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rank(id, rank) => write!(f, "{id}/{rank}"),
            Self::Url(url) => f.write_str(url),
        }
    }
}

/// The fields of a worker, always the same ones in the same order.
pub(crate) fn fields_of_worker(config: &WorkerConfig) -> WorkerFields {
    // By name, so that a new field is not forgotten here.
    let WorkerConfig { worker: _, space, name, events, load, capacity_blocks, blocks_max, .. } = config;
    let WorkerConfig { batched_tokens_max, prefill, engine_class, engine_preset, device_class, .. } = config;
    let WorkerConfig { weight, taints, loras, state, .. } = config;
    let PrefillFigures { base_ns, token_ns, cached_token_ns } = prefill;
    let text = |text: &dyn std::fmt::Display| Some(quoted(&text.to_string()));
    let number = |value: &u64| Some(value.to_string());
    let of_events = |of: fn(&EventSource) -> Option<String>| events.as_ref().and_then(of);
    let of_snapshots = |of: fn(&SnapshotSource) -> String| {
        events.as_ref().and_then(|events| events.snapshots.as_ref()).map(|source| quoted(&of(source)))
    };
    vec![
        ("space", Some(format!("space[{}]", space.0))),
        ("name", text(name)),
        ("endpoint", of_events(|events| Some(quoted(&events.endpoint)))),
        ("replay", of_events(|events| events.replay.as_deref().map(quoted))),
        ("topic", of_events(|events| Some(quoted(&events.topic)))),
        ("engine_snapshots", of_snapshots(|source| fields::snapshot_name(source.proposal).to_owned())),
        ("snapshot_endpoint", of_snapshots(|source| source.endpoint.to_string())),
        ("load", load.as_deref().map(quoted)),
        ("capacity_blocks", number(capacity_blocks)),
        ("blocks_max", number(blocks_max)),
        ("batched_tokens_max", number(batched_tokens_max)),
        ("prefill_base_us", base_ns.map(|ns| (ns / 1000).to_string())),
        ("prefill_token_ns", token_ns.as_ref().and_then(number)),
        ("prefill_cached_token_ns", cached_token_ns.as_ref().and_then(number)),
        ("engine_class", text(engine_class)),
        ("engine_preset", engine_preset.and_then(|preset| text(&preset.name))),
        ("device", text(&device_class.name())),
        ("weight", Some(format!("{weight:?}"))),
        ("taints", Some(listed(taints.iter().map(String::as_str)))),
        ("loras", Some(listed(loras.iter().map(String::as_str)))),
        ("draining", Some((*state == WorkerState::Draining).to_string())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, Flags, Problems, parse_as, parse_over};

    fn read(text: &str) -> Config {
        parse_over("t", text, &Environment::default(), &Flags::default())
            .unwrap_or_else(|problems| panic!("{problems}"))
    }

    fn listed_fields(difference: &Difference) -> Vec<(String, String, String, bool)> {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_owned());
        let of = |field: &FieldDifference| {
            (field.field.clone(), value(&field.before), value(&field.after), field.needs_restart)
        };
        difference.fields.iter().map(of).collect()
    }

    const PLAIN: &str = "[[space]]\nmodel = \"m\"\n";

    #[test]
    fn each_changed_field_is_named_with_both_values() {
        let is = |field: &str, before: &str, after: &str, needs_restart| {
            vec![(field.to_owned(), before.to_owned(), after.to_owned(), needs_restart)]
        };
        for (lines, wanted) in [
            ("[policy]\ntemperature = 1\n", is("policy.temperature", "0.0", "1.0", false)),
            ("[policy]\nbusy_prefill_tokens = 9\n", is("policy.busy_prefill_tokens", "absent", "9", false)),
            ("[serve]\ncores = 3\n", is("serve.cores", "0", "3", true)),
            ("[serve]\nallow_gids = [\"a\"]\n", is("serve.allow_gids", "[]", "[\"a\"]", false)),
            ("[snapshot]\ndir = \"/x\"\n", is("snapshot.dir", "absent", "\"/x\"", true)),
            // Another notation of the same value, a default, and tables without effect.
            ("[serve]\nsocket_mode = \"660\"\ncores = 0\n[policy]\ntemperature = 0\n", vec![]),
            ("[http]\nlisten = \"::1\"\n[relay]\nheartbeat_ms = 500\n", vec![]),
        ] {
            let difference = read(PLAIN).difference(&read(&format!("{PLAIN}{lines}")));
            assert_eq!(listed_fields(&difference), wanted, "{lines}");
            assert_eq!(difference.is_empty(), wanted.is_empty());
        }
    }

    #[test]
    fn a_path_that_follows_from_another_is_named_too() {
        let difference = read(PLAIN).difference(&read(&format!("{PLAIN}[serve]\nsocket = \"/x\"\n")));
        let fields = listed_fields(&difference);
        assert_eq!(fields.len(), 2, "{fields:?}");
        assert_eq!((fields[1].0.as_str(), fields[1].2.as_str()), ("serve.admin_socket", "\"/x.admin\""));
    }

    #[test]
    fn the_policy_of_a_space_counts_where_it_differs_from_the_general_one() {
        let with = |own: &str, general: &str| read(&format!("{PLAIN}[space.policy]\n{own}\n[policy]\n{general}\n"));
        let difference = with("", "").difference(&with("mode = \"kv\"", ""));
        assert_eq!(listed_fields(&difference)[0].0, "space[0].policy.mode");
        assert!(with("", "").difference(&with("temperature = 0.0", "")).is_empty());
    }

    #[test]
    fn other_spaces_are_a_refused_reload() {
        let difference = read(PLAIN).difference(&read(&format!("{PLAIN}[[space]]\nmodel = \"n\"\nblock_size = 8\n")));
        assert!(difference.is_refused);
        let fields = listed_fields(&difference);
        let row = |field: &str| fields.iter().find(|row| row.0 == field).map(|row| (row.1.as_str(), row.2.as_str()));
        assert_eq!(row("space[1].model"), Some(("absent", "\"n\"")));
        assert_eq!(row("space[1].block_size"), Some(("absent", "8")));
        assert!(fields.iter().all(|row| row.3));
    }

    #[test]
    fn workers_are_added_removed_and_changed() {
        let text = |workers: &str| read(&format!("{PLAIN}{workers}"));
        let was = text("[[worker]]\nid = 1\nranks = 2\n[[worker]]\nid = 2\n[[worker]]\nid = 10\n");
        let is = text(
            "[[worker]]\nid = 10\nweight = 2\ndraining = true\n[[worker]]\nid = 1\n[[worker]]\nid = 4\nurl = \"http://h:1\"\n",
        );
        let difference = was.difference(&is);
        assert_eq!(
            (difference.added, difference.removed),
            (vec!["http://h:1".into()], vec!["1/1".into(), "2/0".into()])
        );
        let [changed] = difference.changed.as_slice() else { panic!("{:?}", difference.changed) };
        let fields: Vec<_> = changed.fields.iter().map(|field| field.field.as_str()).collect();
        assert_eq!((changed.worker.as_str(), fields), ("10/0", vec!["weight", "draining"]));
    }

    #[test]
    fn what_a_daemon_tells_is_its_configuration_again() {
        let text = format!(
            "{PLAIN}namespace = \"a \\\"b\\\"\"\n[space.policy]\ntemperature = 1e300\n[[space]]\nmodel = \"n\"\n\
             [serve]\nsocket = \"/x\"\nallow_uids = [\"1\", \"b+c\"]\n[policy]\nseed = \"18446744073709551615\"\n\
             [[worker]]\nid = 1\nmodel = \"n\"\nendpoint = \"tcp://h:1\"\ntaints = [\"x\"]\nranks = 2\n"
        );
        let config = read(&text);
        assert_eq!(Config::told("t", config.written.clone()), Ok(config.clone()));
        assert!(Config::told("t", config.written.clone()).is_ok_and(|told| told.difference(&config).is_empty()));
        let mut newer = config.written;
        newer[0].fields.push(("of_a_later_release".to_owned(), "1".to_owned()));
        let refused: Problems = Config::told("a daemon", newer).expect_err("a field of a later release");
        assert!(refused.to_string().starts_with("a daemon: serve.of_a_later_release: unknown field"), "{refused}");
    }

    #[test]
    fn a_reload_changes_what_it_may_and_nothing_else() {
        let was =
            read(&format!("{PLAIN}[serve]\ncores = 2\n[policy]\nseed = 7\ntemperature = 1\n[[worker]]\nid = 1\n"));
        let text = format!(
            "{PLAIN}[space.policy]\nmode = \"kv\"\n[policy]\nseed = 8\n[serve]\nallow_uids = [\"0\"]\n[[worker]]\nid = 2\n"
        );
        let next = read(&text);
        let running = was.reloaded(&next);
        let left: Vec<_> = running.difference(&next).fields.into_iter().map(|field| field.field).collect();
        assert_eq!(left, ["serve.cores", "policy.seed"]);
        assert!(running.difference(&next).added.is_empty() && running.policy.spaces == next.policy.spaces);
        assert_eq!(Config::told("t", running.written.clone()).map(|told| told.workers), Ok(next.workers.clone()));
        // What an order set is what the next reload takes back.
        let ordered = next.clone().with_policy_settings(&["mode=least-loaded".into(), "temperature = 2".into()]);
        let fields = listed_fields(&ordered.difference(&next));
        let names: Vec<_> = fields.iter().map(|row| row.0.as_str()).collect();
        assert_eq!(names, ["policy.mode", "policy.temperature", "space[0].policy.mode"]);
    }

    #[test]
    fn a_text_is_read_as_the_daemon_would_read_it() {
        let environment = Environment::of(&[("KVROUTED_CONFIG__SERVE__CORES", "5"), ("HOME", "/")]);
        let flags = Flags::default();
        let here = parse_over("t", PLAIN, &environment, &flags).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!((here.serve.cores, here.overrides.len()), (5, 1));
        assert_eq!(parse_as("t", PLAIN, &here.overrides), Ok(here));
    }
}
