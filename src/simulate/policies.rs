//! The policies that a simulation compares, by name.

use super::figures::Slo;
use super::kv_tuned::KV_TUNED;
use super::peer_rules::{self as rules, PrefillTimes, Rule, TermWeights};
use super::router::Decider;
use super::run::Settings;
use crate::route::Policy;

/// The names of all policies, ours first.
pub const NAMES: [&str; 17] = [
    "latency",
    "kv",
    "kv-tuned",
    "two-tier",
    "lpwl",
    "lmetric",
    "llm-d",
    "llm-d-legacy",
    "mooncake",
    "preble",
    "dualmap",
    "smg",
    "aibrix",
    "vllm-dp",
    "least-loaded",
    "round-robin",
    TRIED_TERMS,
];

/// The name of the policy that is there to measure single terms.
pub const TRIED_TERMS: &str = "tried-terms";

/// A policy by name, with the weights of its terms if it has any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedPolicy {
    /// One of [`NAMES`].
    pub name: &'static str,
    /// Of `tried-terms`; of `latency` the delays alone.
    pub weights: TermWeights,
    /// Of `latency`: the costs that count as equal, seconds.
    pub near_cost_s: f64,
    /// Of our policies: the standard deviations of other routers' unseen work by which costs differ that count as equal.
    pub unseen_weight: f64,
}

impl SimulatedPolicy {
    /// The policy of this name, with its usual weights.
    pub(super) fn named(name: &'static str) -> Self {
        Self { name, weights: TermWeights::default(), near_cost_s: 0.0, unseen_weight: 1.0 }
    }

    /// Reads `NAME` or `NAME:WEIGHT=VALUE;…`.
    ///
    /// # Errors
    /// What is wrong, as a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let Some(name) = NAMES.into_iter().find(|known| *known == name) else {
            return Err(format!("there is no policy {name:?}; there are {}", NAMES.join(", ")));
        };
        let mut policy = Self::named(name);
        for setting in settings.split(';').filter(|setting| !setting.is_empty()) {
            let known = match name {
                "latency" => &["delay", "later_delay", "output_delay", "near_s", "unseen"][..],
                TRIED_TERMS => &TermWeights::NAMES[..],
                _ => return Err(format!("{name} has no weights to set")),
            };
            let parsed = setting.split_once('=').and_then(|(weight, value)| Some((weight, value.parse().ok()?)));
            let parsed = parsed.filter(|(weight, value): &(&str, f64)| known.contains(weight) && value.is_finite());
            let Some((weight, value)) = parsed else {
                return Err(format!("{setting:?} sets none of {}", known.join(", ")));
            };
            match weight {
                "near_s" => policy.near_cost_s = value,
                "unseen" => policy.unseen_weight = value,
                _ => {
                    policy.weights.set(weight, value);
                }
            }
        }
        Ok(policy)
    }
}

/// Who decides under a policy, by pool: about whole requests, or about the decode half and the prefill half. `None`: the
/// fleet has no engine.
///
/// Rules for pairs: `kv` and `kv-tuned` are Dynamo's router, whose rule for pairs is ours; `mooncake` and `aibrix` decode
/// where the load is least; llm-d has a profile of scorers and SMG a policy for each half, which are the same by default.
/// The others have none, and choose each half by their rule.
pub(super) fn deciders(policy: &SimulatedPolicy, settings: &Settings) -> Option<Vec<Decider>> {
    if !settings.has_pools() {
        return Some(vec![decider(policy, settings)?]);
    }
    let decodes: Option<Box<dyn Rule>> = match policy.name {
        "mooncake" => Some(Box::new(rules::MooncakeDecode::new(prefill_times(settings)?))),
        "aibrix" => Some(Box::new(rules::LeastLoaded)),
        _ => None,
    };
    let serves = match decodes {
        Some(rule) => Decider::Peer(rule),
        None => decider(policy, settings)?,
    };
    Some(vec![serves, decider(policy, settings)?])
}

/// The prefill times that operators measured before. `None`: the fleet has no engine.
fn prefill_times(settings: &Settings) -> Option<PrefillTimes> {
    let step_tokens_max = f64::from(settings.engines.first()?.step_tokens_max);
    Some(PrefillTimes { laws: settings.engines.iter().map(|engine| engine.law).collect(), step_tokens_max })
}

fn decider(of: &SimulatedPolicy, settings: &Settings) -> Option<Decider> {
    let times = prefill_times(settings)?;
    let peak_tokens_per_s = times.peak_tokens_per_s();
    let product = |policy: Policy| {
        let disaggregation = settings.disaggregation;
        let (policy, unseen_weight) = (Box::new(Policy { disaggregation, ..policy }), of.unseen_weight);
        Some(Decider::Product { policy, unseen_weight })
    };
    let rule: Box<dyn Rule> = match of.name {
        "latency" => {
            let TermWeights { delay, later_delay, output_delay, .. } = of.weights;
            return product(Policy {
                delay_weight: delay,
                later_delay_weight: later_delay,
                output_delay_weight: output_delay,
                near_cost_s: of.near_cost_s,
                ..Policy::default()
            });
        }
        TRIED_TERMS => Box::new(rules::TriedTerms::new(of.weights, times)),
        "kv" => return product(Policy::kv()),
        "kv-tuned" => return product(KV_TUNED.policy()),
        "two-tier" => Box::new(rules::TwoTier),
        "lpwl" => Box::new(rules::Lpwl::default()),
        "lmetric" => Box::new(rules::Lmetric),
        "llm-d" => Box::new(rules::LlmD { peak_tokens_per_s }),
        "llm-d-legacy" => Box::new(rules::LlmDLegacy::default()),
        "mooncake" => Box::new(rules::Mooncake::new(times)),
        "preble" => Box::new(rules::Preble::new(times)),
        "dualmap" => Box::new(rules::DualMap::new(peak_tokens_per_s, Slo::default())),
        "smg" => Box::new(rules::Smg::default()),
        "aibrix" => Box::new(rules::Aibrix),
        "vllm-dp" => Box::new(rules::VllmDp),
        "least-loaded" => Box::new(rules::LeastLoaded),
        "round-robin" => Box::new(rules::RoundRobin::default()),
        _ => return None,
    };
    Some(Decider::Peer(rule))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_law::{EngineLaw, EnginePreset};
    use crate::fleet::PoolRole;
    use crate::simulate::workload::{Arrivals, Session, Span, Turn, Workload};
    use crate::simulate::{EngineSpec, Outcome, simulate};

    /// 400 prompts of 30 conversations on 4 workers, faster than these can keep up with for a while.
    fn run(name: &str) -> Option<Vec<Outcome>> {
        run_on(name, [PoolRole::Both; 4], true)
    }

    /// The same on engines of these roles, with gateways that report first tokens or none.
    fn run_on(name: &str, roles: [PoolRole; 4], reports_first_tokens: bool) -> Option<Vec<Outcome>> {
        let turn = |at: u64| Turn {
            think_s: 0.0,
            prompt: vec![
                Span { content: at * at % 30, from: 0, tokens: 500 + (at % 7) as u32 * 200 },
                Span { content: 1000 + at, from: 0, tokens: 100 },
            ],
            output: Span { content: 5000 + at, from: 0, tokens: 20 + (at % 5) as u32 },
        };
        let session = |at: u64| Session { start_s: at as f64 * 0.02, turns: vec![turn(at)] };
        let workload = Workload { sessions: (0..400).map(session).collect(), arrivals: Arrivals::Timed };
        let law = EngineLaw::of([5e-3, 5e-5, 1e-9], [1e-2, 3e-5, 3e-8]);
        let preset = EnginePreset { name: "test", law, kv_tokens: 40_000, kv_token_bytes: 1000 };
        let engine = EngineSpec { step_tokens_max: 2048, sequences_max: 64, ..EngineSpec::of(&preset, 16) };
        let engines = roles.map(|role| EngineSpec { role, ..engine.clone() }).to_vec();
        let settings = Settings { prior_factor: None, reports_first_tokens, ..Settings::of(engines, 3) };
        simulate(&workload, &settings, &SimulatedPolicy::parse(name).ok()?)
    }

    #[test]
    fn every_policy_serves_all_requests_and_two_runs_of_it_are_equal() {
        for name in NAMES {
            let [first, second] = [(), ()].map(|()| run(name).expect("the policy has a decider"));
            assert_eq!(first.len(), 400, "{name}");
            assert!(first.iter().all(|outcome| !outcome.is_refused && outcome.end_ns > 0), "{name}");
            let placed = |outcomes: &[Outcome]| -> Vec<_> {
                outcomes.iter().map(|outcome| (outcome.worker, outcome.first_ns, outcome.end_ns)).collect()
            };
            assert_eq!(placed(&first), placed(&second), "{name}");
            assert!((0..4).all(|worker| first.iter().any(|outcome| outcome.worker == worker)), "{name}");
        }
    }

    #[test]
    fn every_policy_chooses_pairs_on_a_fleet_with_pools() {
        let roles = [PoolRole::Prefill, PoolRole::Decode, PoolRole::Prefill, PoolRole::Decode];
        for name in NAMES {
            let outcomes = run_on(name, roles, true).expect("the policy has a decider");
            assert!(outcomes.iter().all(|outcome| outcome.end_ns > outcome.first_ns && outcome.first_ns > 0), "{name}");
            let on = |worker: u32| outcomes.iter().filter(|outcome| outcome.worker == worker).count();
            assert!(on(0) > 40 && on(2) > 40 && on(0) + on(2) == 400, "{name}: {} and {}", on(0), on(2));
        }
    }

    #[test]
    fn a_policy_is_read_with_its_weights() {
        let parsed = SimulatedPolicy::parse("tried-terms:decode=0.1;guard_s=2").unwrap();
        assert_eq!((parsed.name, parsed.weights.decode, parsed.weights.guard_s), ("tried-terms", 0.1, 2.0));
        let ours = SimulatedPolicy::parse("latency:delay=0.5;near_s=0.3;unseen=0").unwrap();
        assert_eq!((ours.weights.delay, ours.near_cost_s, ours.unseen_weight), (0.5, 0.3, 0.0));
        assert_eq!(SimulatedPolicy::parse("kv"), Ok(SimulatedPolicy::named("kv")));
        for wrong in ["kv_tuned", "latency:decode=1", "lpwl:delay=1", "tried-terms:decode", "tried-terms:decode=NaN"] {
            assert!(SimulatedPolicy::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gateway_that_only_books_and_frees_is_served_no_worse_than_by_kv() {
        // Nothing is learnt, and the engines are not those that the daemon guesses.
        let [ours, kv] = ["latency", "kv"].map(|name| run_on(name, [PoolRole::Both; 4], false).unwrap());
        let mean = |outcomes: &[Outcome], of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / 400.0;
        assert!(mean(&ours, Outcome::ttft_s) < 1.05 * mean(&kv, Outcome::ttft_s));
        assert!(mean(&ours, Outcome::e2e_s) < 1.05 * mean(&kv, Outcome::e2e_s));
    }

    #[test]
    fn the_mode_does_as_well_as_the_terms_that_it_has() {
        // Its constants are learnt, so that decisions differ, but not by much in what requests feel.
        let [mode, terms] = ["latency", "tried-terms"].map(|name| run(name).unwrap());
        let mean = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::ttft_s).sum::<f64>() / outcomes.len() as f64;
        assert!((mean(&mode) / mean(&terms) - 1.0).abs() < 0.15, "{} {}", mean(&mode), mean(&terms));
    }
}
