//! Judging: from an observation to a decision. Nothing is read here but arguments: the same observation, policy and
//! draws give the same bits.

use super::bound::{Favour, factor};
use super::columns::Columns;
use super::cost::{Among, CostTerms, cost};
use super::decision::{Decision, Scored};
use super::draws::Draws;
use super::kept::Kept;
use super::observation::{Asked, Observation, Observed};
use super::policy::Policy;
use super::rule::{admit, nobody};
use super::select::choose;

/// Filters, costs and selects; the record goes into `decision`, whose buffers are reused. `policy` is the space's: what
/// the request sets in place of it is in the observation.
pub fn judge(policy: &Policy, observation: &Observation, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&observation.asked.overrides);
    decision.begin(policy, observation);
    admit(policy, observation, decision);
    let judging = Judging::of(policy, observation, decision);
    judging.price_each(observation, decision);
    judging.select(observation, draws, decision);
    judging.list(observation, decision);
}

/// As [`judge`], of what is kept, whose rows are made whole only where somebody looks at them: to the same bits.
pub(super) fn judge_kept(policy: &Policy, kept: &mut Kept, draws: Draws, decision: &mut Decision) {
    let policy = &policy.under(&kept.observation.asked.overrides);
    decision.begin(policy, &kept.observation);
    match kept.all_stay(policy) {
        true => decision.running.extend(0..kept.observation.workers.len() as u32),
        false => admit(policy, &kept.observation, decision),
    }
    let is_plain = kept.say_credits(policy) && Columns::say_costs(policy, &kept.observation.asked);
    if !is_plain {
        kept.complete();
    }
    let judging = Judging::of(policy, &kept.observation, decision);
    match is_plain {
        true => judging.price_all(&kept.columns, &kept.observation.asked, decision),
        false => judging.price_each(&kept.observation, decision),
    }
    judging.select(&kept.observation, draws, decision);
    let listed = decision.priced.iter().filter_map(|priced| decision.running.get(priced.place as usize));
    kept.complete_rows(listed.copied());
    judging.list(&kept.observation, decision);
}

/// Whom to choose from, once it is known who is in the running.
#[derive(Clone, Copy)]
struct Judging<'a> {
    policy: &'a Policy,
    favour: Favour,
    among: Among,
}

impl<'a> Judging<'a> {
    fn of(policy: &'a Policy, observation: &Observation, decision: &mut Decision) -> Self {
        decision.nobody = nobody(observation, decision);
        let favour = Favour::of(policy, observation, decision);
        favour.apply(observation, decision);
        let running = decision.running.iter().map(|place| &observation.workers[*place as usize]);
        let among = Among::of(policy, observation.asked.turn, running);
        Self { policy, favour, among }
    }

    /// What it costs to run what is asked on the worker at a place of those in the running.
    #[inline(always)]
    fn terms(&self, asked: &Asked, place: u32, row: u32, observed: &Observed) -> CostTerms {
        let terms = cost(self.policy, asked, observed, &self.among, place);
        self.favour.lessened(self.policy, row, terms)
    }

    /// Notes what each of those in the running costs.
    fn price_each(&self, observation: &Observation, decision: &mut Decision) {
        let Observation { asked, workers, .. } = observation;
        let price = |(row, place): (&u32, u32)| self.terms(asked, place, *row, &workers[*row as usize]).cost;
        decision.costs.extend(decision.running.iter().zip(0_u32..).map(price));
    }

    /// The same by columns.
    fn price_all(&self, columns: &Columns, asked: &Asked, decision: &mut Decision) {
        columns.costs(self.policy, asked, &mut decision.costs);
        if decision.running.len() < decision.costs.len() {
            // In ascending order, so that none is overwritten before it is moved.
            for (place, row) in decision.running.iter().enumerate() {
                decision.costs[place] = decision.costs[*row as usize];
            }
            decision.costs.truncate(decision.running.len());
        }
        if let Some(row) = self.favour.cheaper()
            && let Ok(place) = decision.running.binary_search(&row)
        {
            decision.costs[place] *= factor(&self.policy.affinity, decision.costs[place]);
        }
    }

    /// Chooses, and who is listed behind the chosen one.
    fn select(&self, observation: &Observation, draws: Draws, decision: &mut Decision) {
        decision.seed = draws.seed();
        decision.eligible = decision.running.len() as u32;
        let pick = self.policy.mode.pick(self.policy.temperature);
        let requests = |place: usize| observation.workers[decision.running[place] as usize].load.requests as f64;
        let listed = observation.asked.candidates_max as usize;
        let drawing = &mut draws.begin();
        decision.ties = choose(&decision.costs, requests, listed, pick, drawing, &mut decision.priced);
    }

    /// Lists those who were selected with all that there is to say of them.
    fn list(&self, observation: &Observation, decision: &mut Decision) {
        for priced in &decision.priced {
            let Some(row) = decision.running.get(priced.place as usize) else { continue };
            let observed = &observation.workers[*row as usize];
            let terms = self.terms(&observation.asked, priced.place, *row, observed);
            decision.candidates.push(Scored::of(observed, terms));
        }
        let chosen = decision.candidates.first().map(|chosen| chosen.worker);
        decision.affinity = self.favour.outcome(observation, chosen);
    }
}
