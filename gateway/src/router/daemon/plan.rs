//! The daemon's spaces and workers, from what the engines say. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::engines::{EngineFacts, EngineRole, RankSource};

/// What is known of one engine.
#[derive(Clone, Debug)]
pub(super) struct PlannedEngine {
    pub(super) worker: u64,
    pub(super) role: EngineRole,
    /// Host and port, for people.
    pub(super) name: String,
    /// The base model by the first of its names; `None` = the engine has not said.
    pub(super) base: Option<String>,
    pub(super) facts: Arc<EngineFacts>,
}

/// A space: one model and one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedSpace {
    pub(super) model: String,
    pub(super) role: &'static str,
    /// 0 = learnt from the first events.
    pub(super) block_size: u32,
}

/// A worker: one rank of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedWorker {
    pub(super) id: u64,
    pub(super) rank: u32,
    pub(super) name: String,
    pub(super) model: String,
    pub(super) role: &'static str,
    pub(super) endpoint: Option<String>,
    pub(super) replay: Option<String>,
    pub(super) topic: String,
    pub(super) loras: Vec<String>,
}

/// The daemon's fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FleetPlan {
    pub(super) spaces: Vec<PlannedSpace>,
    pub(super) workers: Vec<PlannedWorker>,
    /// What does not fit, each a sentence with the remedy.
    pub(super) problems: Vec<String>,
}

impl FleetPlan {
    /// Plans the fleet. An engine that has named no model yet is left out until it does. Most engines of a model decide
    /// the size of its blocks, and an endpoint belongs to the engine on its host, else to the first worker that names it:
    /// the daemon would refuse the others.
    pub(super) fn of(engines: &[PlannedEngine]) -> Self {
        let mut plan = Self::default();
        let sizes = block_sizes(engines);
        let mut endpoints = endpoints_at_home(engines);
        let mut ids = BTreeSet::new();
        for engine in engines {
            let Some(base) = engine.base.clone() else { continue };
            if !ids.insert(engine.worker) {
                plan.problems.push(format!(
                    "engine {}: another engine is worker {} too: give each a number of its own, as in ID=URL",
                    engine.name, engine.worker
                ));
                continue;
            }
            let role = role_name(engine.role);
            let size = sizes.get(&(base.clone(), role)).copied().unwrap_or(0);
            let own = engine.facts.block_size.unwrap_or(0);
            let fits = own == 0 || own == size;
            if !fits {
                plan.problems.push(format!(
                    "engine {}: its blocks have {own} tokens, those of other engines of {base:?} have {size}: it gets \
                     requests by load alone; start it with --block-size {size}",
                    engine.name
                ));
            }
            plan.add_workers(engine, &base, role, fits, &mut endpoints);
        }
        let space = |((model, role), block_size)| PlannedSpace { model, role, block_size };
        plan.spaces = sizes.into_iter().map(space).collect();
        plan
    }

    /// Logs the problems that an earlier plan did not have.
    pub(super) fn log_problems_beside(&self, earlier: &Self) {
        for problem in self.problems.iter().filter(|problem| !earlier.problems.contains(problem)) {
            tracing::warn!("{problem}");
        }
    }

    /// Whether a daemon with this plan's spaces can serve the workers of another plan. A space that is no longer needed
    /// does no harm.
    pub(super) fn has_spaces_of(&self, other: &Self) -> bool {
        let fits = |wanted: &PlannedSpace| {
            self.spaces.iter().any(|own| {
                let is_same = (&own.model, own.role) == (&wanted.model, wanted.role);
                is_same && (wanted.block_size == 0 || own.block_size == wanted.block_size)
            })
        };
        other.spaces.iter().all(fits)
    }

    fn add_workers(
        &mut self,
        engine: &PlannedEngine,
        base: &str,
        role: &'static str,
        has_events: bool,
        endpoints: &mut BTreeMap<String, String>,
    ) {
        let adapters = engine.facts.models.iter().filter(|model| model.parent.is_some());
        let loras: Vec<String> = adapters.map(|model| model.id.clone()).collect();
        let only = [RankSource { rank: 0, endpoint: None, replay: None, topic: String::new() }];
        let ranks = if engine.facts.ranks.is_empty() { &only[..] } else { &engine.facts.ranks };
        for source in ranks {
            let name = rank_name(engine, source.rank);
            let mut endpoint = source.endpoint.clone().filter(|_| has_events);
            if let Some(wanted) = &endpoint {
                let owner = endpoints.entry(wanted.clone()).or_insert_with(|| name.clone());
                if *owner != name {
                    self.problems.push(format!(
                        "engine {name}: {owner} publishes at {wanted} too: it gets requests by load alone; give each \
                         engine an `endpoint` of its own in --kv-events-config"
                    ));
                    endpoint = None;
                }
            }
            self.workers.push(PlannedWorker {
                id: engine.worker,
                rank: source.rank,
                name,
                model: base.to_owned(),
                role,
                replay: source.replay.clone().filter(|_| endpoint.is_some()),
                topic: source.topic.clone(),
                endpoint,
                loras: loras.clone(),
            });
        }
    }
}

/// The name of a rank, for people.
fn rank_name(engine: &PlannedEngine, rank: u32) -> String {
    match rank {
        0 => engine.name.clone(),
        rank => format!("{}.{rank}", engine.name),
    }
}

/// The tokens in a block of each model: what most of its engines say, of equally many the first. One engine alone must not
/// take the events from all others.
fn block_sizes(engines: &[PlannedEngine]) -> BTreeMap<(String, &'static str), u32> {
    let mut said: BTreeMap<(String, &'static str), Vec<u32>> = BTreeMap::new();
    for engine in engines {
        let Some(base) = &engine.base else { continue };
        said.entry((base.clone(), role_name(engine.role))).or_default().extend(engine.facts.block_size);
    }
    let most = |sizes: &[u32]| {
        let votes = |size: u32| sizes.iter().filter(|other| **other == size).count();
        // The last of equals is the greatest: so the first comes last.
        sizes.iter().rev().copied().max_by_key(|size| votes(*size)).unwrap_or(0)
    };
    said.into_iter().map(|(space, sizes)| (space, most(&sizes))).collect()
}

/// Endpoints that an engine names on its own host, by the rank that owns them. Another engine that names one would get the events of the one that
/// owns it.
fn endpoints_at_home(engines: &[PlannedEngine]) -> BTreeMap<String, String> {
    let mut owners = BTreeMap::new();
    for engine in engines.iter().filter(|engine| engine.base.is_some()) {
        let home = format!("tcp://{}:", engine.name.rsplit_once(':').map_or(engine.name.as_str(), |(host, _)| host));
        for source in &engine.facts.ranks {
            if let Some(endpoint) = source.endpoint.as_ref().filter(|endpoint| endpoint.starts_with(&home)) {
                owners.entry(endpoint.clone()).or_insert_with(|| rank_name(engine, source.rank));
            }
        }
    }
    owners
}

const fn role_name(role: EngineRole) -> &'static str {
    match role {
        EngineRole::Any => "both",
        EngineRole::Prefill => "prefill",
        EngineRole::Decode => "decode",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engines::{Dialect, ModelFacts, RenderSupport};

    fn model(id: &str, parent: Option<&str>) -> ModelFacts {
        let parent = parent.map(str::to_owned);
        ModelFacts { id: id.to_owned(), parent, root: None, tokens_max: None, created: 0, owned_by: None }
    }

    /// An engine of the model `m` whose ranks publish at these ports.
    pub(in crate::router::daemon) fn engine(worker: u64, ports: &[u16]) -> PlannedEngine {
        let source = |(rank, port): (usize, &u16)| RankSource {
            rank: u32::try_from(rank).expect("few ranks"),
            endpoint: Some(format!("tcp://10.0.0.{worker}:{port}")),
            replay: Some(format!("tcp://10.0.0.{worker}:{}", port + 100)),
            topic: "kv".to_owned(),
        };
        let facts = EngineFacts {
            dialect: Dialect::Vllm,
            version: None,
            models: vec![model("m", None), model("tuned", Some("m"))],
            block_size: Some(16),
            ranks: ports.iter().enumerate().map(source).collect(),
            renders: RenderSupport::default(),
            bootstrap_port: None,
            problems: Vec::new(),
        };
        let name = format!("10.0.0.{worker}:8000");
        PlannedEngine { worker, role: EngineRole::Any, name, base: Some("m".to_owned()), facts: Arc::new(facts) }
    }

    /// The engine with another base model.
    pub(in crate::router::daemon) fn of_model(engine: PlannedEngine, name: &str) -> PlannedEngine {
        PlannedEngine { base: Some(name.to_owned()), ..changed(engine, |facts| facts.models[0].id = name.to_owned()) }
    }

    fn changed(engine: PlannedEngine, change: impl FnOnce(&mut EngineFacts)) -> PlannedEngine {
        let mut facts = EngineFacts::clone(&engine.facts);
        change(&mut facts);
        PlannedEngine { facts: Arc::new(facts), ..engine }
    }

    #[test]
    fn each_rank_is_a_worker_of_its_models_space() {
        let plan = FleetPlan::of(&[engine(1, &[5557, 5558]), engine(2, &[])]);
        assert_eq!(plan.spaces, [PlannedSpace { model: "m".into(), role: "both", block_size: 16 }]);
        let shown: Vec<_> =
            plan.workers.iter().map(|worker| (worker.id, worker.rank, worker.endpoint.as_deref())).collect();
        let [first, second] = ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"];
        assert_eq!(shown, [(1, 0, Some(first)), (1, 1, Some(second)), (2, 0, None)], "by load alone without events");
        assert_eq!(
            (plan.workers[1].name.as_str(), plan.workers[1].loras.as_slice()),
            ("10.0.0.1:8000.1", &["tuned".to_owned()][..])
        );
        assert_eq!((plan.workers[0].topic.as_str(), plan.problems.len()), ("kv", 0));
    }

    #[test]
    fn pools_are_spaces_of_their_own_and_an_engine_without_a_model_waits() {
        let prefill = PlannedEngine { role: EngineRole::Prefill, ..engine(1, &[1]) };
        let decode = PlannedEngine { role: EngineRole::Decode, ..engine(2, &[1]) };
        let unknown = PlannedEngine { base: None, ..engine(3, &[1]) };
        let plan = FleetPlan::of(&[prefill, decode, unknown]);
        assert_eq!(plan.spaces.iter().map(|space| space.role).collect::<Vec<_>>(), ["decode", "prefill"]);
        assert_eq!(plan.workers.len(), 2);
    }

    #[test]
    fn what_the_daemon_would_refuse_is_left_out_and_said() {
        let same = changed(engine(2, &[5557]), |facts| {
            facts.ranks[0].endpoint = Some("tcp://10.0.0.1:5557".to_owned());
        });
        let other_size = changed(engine(3, &[5557]), |facts| facts.block_size = Some(32));
        let plan = FleetPlan::of(&[engine(1, &[5557]), same, other_size, engine(1, &[9])]);
        let has_endpoint: Vec<_> = plan.workers.iter().map(|worker| worker.endpoint.is_some()).collect();
        assert_eq!(has_endpoint, [true, false, false], "the second worker 1 is left out");
        assert!(plan.workers[1].replay.is_none());
        for (problem, part) in plan.problems.iter().zip(["publishes at", "have 32 tokens", "worker 1 too"]) {
            assert!(problem.contains(part), "{problem}");
        }
        assert_eq!(plan.problems.len(), 3);
    }

    #[test]
    fn only_a_new_model_or_another_block_size_needs_other_spaces() {
        let plan = |engines: &[PlannedEngine]| FleetPlan::of(engines);
        let one = plan(&[engine(1, &[1])]);
        assert!(one.has_spaces_of(&plan(&[engine(1, &[1, 2]), engine(2, &[])])), "more workers");
        assert!(one.has_spaces_of(&plan(&[])), "fewer");
        let silent = changed(engine(1, &[1]), |facts| facts.block_size = None);
        let silent = plan(&[silent]);
        assert!(one.has_spaces_of(&silent) && !silent.has_spaces_of(&one));
        let other = of_model(engine(2, &[1]), "other");
        assert!(!one.has_spaces_of(&plan(&[engine(1, &[1]), other])));
    }

    #[test]
    fn an_engine_that_knows_its_block_size_decides_for_those_that_do_not() {
        let silent = changed(engine(1, &[1]), |facts| facts.block_size = None);
        let plan = FleetPlan::of(&[silent, engine(2, &[1])]);
        assert_eq!((plan.spaces[0].block_size, plan.problems.len()), (16, 0));
    }

    #[test]
    fn one_engine_takes_neither_the_events_of_another_nor_the_blocks_of_a_model() {
        let thief = changed(engine(1, &[5557]), |facts| {
            facts.block_size = Some(1024);
            facts.ranks[0].endpoint = Some("tcp://10.0.0.2:5557".to_owned());
        });
        let plan = FleetPlan::of(&[thief, engine(2, &[5557]), engine(3, &[5557])]);
        assert_eq!(plan.spaces[0].block_size, 16, "what most engines say");
        let endpoints: Vec<_> = plan.workers.iter().map(|worker| worker.endpoint.as_deref()).collect();
        assert_eq!(endpoints, [None, Some("tcp://10.0.0.2:5557"), Some("tcp://10.0.0.3:5557")]);
        let same_size = changed(engine(1, &[5557]), |facts| {
            facts.ranks[0].endpoint = Some("tcp://10.0.0.2:5557".to_owned());
        });
        let plan = FleetPlan::of(&[same_size, engine(2, &[5557])]);
        assert_eq!(plan.workers[1].endpoint.as_deref(), Some("tcp://10.0.0.2:5557"), "on its own host");
        assert!(
            plan.workers[0].endpoint.is_none() && plan.problems[0].contains("10.0.0.1:8000"),
            "{:?}",
            plan.problems
        );
    }
}
