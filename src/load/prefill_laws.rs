//! How long prefills take on each worker, learnt from what gateways report: when they booked, and when the first token
//! came.
//!
//! Workers of one class share a law; a worker's *slowness* is its factor to it. The two are learnt from different
//! samples:
//!
//! * **The law** from prefills that began on a worker without another prefill: their time is their own. Recursive least
//!   squares over the three constants, each as a multiple of its prior, on relative errors, with forgetting.
//! * **The slowness** from busy stretches: the time from the first prefill's start until the worker has none left, over
//!   the sum of the predictions. How an engine batches the prompts in between does not matter.
//!
//! A report may be late, early or forged. Each sample is cut off at a few times the usual error, and each constant stays
//! within [`CONSTANT_FACTOR_MAX`] of its prior, so that one report moves a law by a bounded step.

use crate::engine_law::PrefillLaw;
use crate::ids::WorkerIndex;
use crate::limits::PREFILL_CLASSES_MAX;

/// The weight of the past at each sample of a class.
const FORGETTING: f64 = 0.99;
/// The variance of a constant's multiple before the first sample, in variances of a sample: of a given prior, and of none.
const VARIANCE_OF_PRIOR: f64 = 12.0;
const VARIANCE_OF_GUESS: f64 = 400.0;
/// The sum of variances above which nothing is forgotten, because samples do not tell the constants apart.
const VARIANCE_MAX: f64 = 1200.0;
/// A sample counts up to this many times the usual error.
const SURPRISE_MAX: f64 = 3.0;
/// The usual relative error before the first sample, and the least.
const ERROR_AT_FIRST: f64 = 1.0;
const ERROR_MIN: f64 = 0.05;
/// The weight of a new sample in the usual error.
const ERROR_WEIGHT: f64 = 0.05;
/// A constant is at most this many times its prior, and at least one part in as many of it.
pub(super) const CONSTANT_FACTOR_MAX: f64 = 64.0;
/// A worker is at most this many times as slow or as fast as its class.
pub(super) const SLOWNESS_MAX: f64 = 4.0;
/// The weight of a busy stretch in a worker's slowness.
const SLOWNESS_WEIGHT: f64 = 0.2;
/// A busy stretch is cut into samples of about this much predicted time, seconds.
const STRETCH_S: f64 = 2.0;
/// A law is published to idle workers of its class when a constant has moved by more than this part.
const PUBLISHED_CHANGE_MIN: f64 = 0.02;

/// What is known of a class of workers.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillClass {
    /// Its name.
    pub name: String,
    /// The law as learnt so far.
    pub law: PrefillLaw,
    /// Samples that it was learnt from.
    pub samples: u64,
    /// Times to the first token that were predicted and observed.
    pub predictions: u64,
    /// Mean of |predicted − observed| / observed over the recent ones.
    pub error_mean: f64,
    /// Sums over all of them, seconds.
    pub predicted_s: f64,
    /// As `predicted_s`.
    pub observed_s: f64,
}

/// A law under estimation: `factors` times the prior.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Estimate {
    prior: PrefillLaw,
    factors: [f64; 3],
    /// Their covariance.
    variance: [[f64; 3]; 3],
    /// The usual relative error of a sample.
    error: f64,
    samples: u64,
}

impl Estimate {
    fn new(prior: Option<PrefillLaw>) -> Self {
        let of_factor = if prior.is_some() { VARIANCE_OF_PRIOR } else { VARIANCE_OF_GUESS };
        let mut variance = [[0.0; 3]; 3];
        (0..3).for_each(|at| variance[at][at] = of_factor);
        Self { prior: prior.unwrap_or_default(), factors: [1.0; 3], variance, error: ERROR_AT_FIRST, samples: 0 }
    }

    fn law(&self) -> PrefillLaw {
        let [base, token, attention] = self.factors;
        PrefillLaw {
            base_s: self.prior.base_s * base,
            token_s: self.prior.token_s * token,
            attention_s: self.prior.attention_s * attention,
        }
    }

    /// Takes a prefill of `uncached` tokens behind `cached` ones that took `took_s` alone.
    fn take(&mut self, uncached: f64, cached: f64, took_s: f64) {
        let by_prior_s = self.prior.prefill_s(uncached, cached);
        let by_law_s = self.law().prefill_s(uncached, cached);
        // Relative to the prediction, so that a long prompt does not outweigh a hundred short ones.
        let parts = [
            self.prior.base_s / by_law_s,
            self.prior.token_s * uncached / by_law_s,
            self.prior.attention_s * uncached * (cached + 0.5 * uncached) / by_law_s,
        ];
        let surprise = took_s / by_law_s - 1.0;
        if !(by_prior_s > 0.0 && by_law_s > 0.0 && surprise.is_finite()) {
            return;
        }
        let surprise_max = SURPRISE_MAX * self.error;
        let surprise_used = surprise.clamp(-surprise_max, surprise_max);
        let gains = std::array::from_fn::<f64, 3, _>(|row| (0..3).map(|at| self.variance[row][at] * parts[at]).sum());
        let certainty = FORGETTING + (0..3).map(|at| parts[at] * gains[at]).sum::<f64>();
        for (factor, gain) in self.factors.iter_mut().zip(gains) {
            let moved = *factor + gain / certainty * surprise_used;
            *factor = moved.clamp(1.0 / CONSTANT_FACTOR_MAX, CONSTANT_FACTOR_MAX);
        }
        for row in 0..3 {
            for at in 0..3 {
                self.variance[row][at] -= gains[row] * gains[at] / certainty;
            }
        }
        if (0..3).map(|at| self.variance[at][at]).sum::<f64>() < VARIANCE_MAX {
            self.variance.iter_mut().flatten().for_each(|value| *value /= FORGETTING);
        }
        self.error += ERROR_WEIGHT * (surprise_used.abs() - self.error);
        self.error = self.error.max(ERROR_MIN);
        self.samples += 1;
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Class {
    estimate: Estimate,
    /// The law that idle workers of the class were given last.
    published: PrefillLaw,
    members: Vec<WorkerIndex>,
    told: PrefillClass,
}

/// A class, by its place among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClassIndex(usize);

/// A worker's place in its class.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Member {
    worker: WorkerIndex,
    /// The place of its class; classes are never removed.
    class: usize,
    /// The logarithm of its slowness.
    log_slowness: f64,
    /// The busy stretch so far: since when, and the predictions of its prefills that are done.
    stretch_since_ns: u64,
    stretch_predicted_s: f64,
}

/// A prefill that was reported done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DonePrefill {
    /// Tokens to compute, and those before them.
    pub(super) tokens: [u64; 2],
    /// Since when it ran, as far as the order of bookings tells, and since when it was booked.
    pub(super) since_ns: u64,
    pub(super) booked_ns: u64,
    pub(super) now_ns: u64,
    /// Its prediction: alone, and with the prefills before it.
    pub(super) work_ns: u64,
    pub(super) predicted_ns: u64,
    /// Whether the worker had no other prefill when it was booked.
    pub(super) began_alone: bool,
    /// Whether the worker has no other prefill now.
    pub(super) ended_alone: bool,
}

/// The laws of all workers, under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct PrefillLaws {
    classes: Vec<Class>,
    /// By the worker's place; `None` = a worker of no class.
    members: Vec<Option<Member>>,
}

/// Nanoseconds in seconds.
const fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

impl PrefillLaws {
    /// Puts a worker into a class. The first worker of a class gives its prior. A class beyond
    /// [`PREFILL_CLASSES_MAX`] is the last one.
    pub(super) fn set_class(&mut self, worker: WorkerIndex, name: &str, prior: Option<PrefillLaw>) {
        if self.find(worker).is_some_and(|(_, class)| class.told.name == name) {
            return;
        }
        self.forget(worker);
        let class = match self.classes.iter().position(|class| class.told.name == name) {
            Some(class) => class,
            None if self.classes.len() >= PREFILL_CLASSES_MAX => self.classes.len() - 1,
            None => {
                let estimate = Estimate::new(prior);
                let law = estimate.law();
                let (samples, predictions, error_mean, predicted_s, observed_s) = (0, 0, 0.0, 0.0, 0.0);
                let name = name.to_owned();
                let told = PrefillClass { name, law, samples, predictions, error_mean, predicted_s, observed_s };
                self.classes.push(Class { estimate, published: law, members: Vec::new(), told });
                self.classes.len() - 1
            }
        };
        self.classes[class].members.push(worker);
        if self.members.len() <= worker.place() {
            self.members.resize(worker.place() + 1, None);
        }
        let (log_slowness, stretch_since_ns, stretch_predicted_s) = (0.0, 0, 0.0);
        let member = Member { worker, class, log_slowness, stretch_since_ns, stretch_predicted_s };
        self.members[worker.place()] = Some(member);
    }

    /// Takes a worker out of its class.
    pub(super) fn forget(&mut self, worker: WorkerIndex) {
        if let Some(place) = self.members.get_mut(worker.place())
            && let Some(member) = place.take_if(|member| member.worker == worker)
        {
            self.classes[member.class].members.retain(|other| *other != worker);
        }
    }

    fn find(&mut self, worker: WorkerIndex) -> Option<(&mut Member, &mut Class)> {
        let member = self.members.get_mut(worker.place())?.as_mut().filter(|member| member.worker == worker)?;
        let class = &mut self.classes[member.class];
        Some((member, class))
    }

    fn member(&self, worker: WorkerIndex) -> Option<Member> {
        self.members.get(worker.place()).copied().flatten().filter(|member| member.worker == worker)
    }

    /// The place of a worker's class among all; 0 for a worker of no class.
    pub(super) fn class_of(&self, worker: WorkerIndex) -> u32 {
        self.member(worker).map_or(0, |member| member.class as u32)
    }

    /// The names of all classes, those without workers among them.
    pub(super) fn class_names(&self) -> impl Iterator<Item = &str> {
        self.classes.iter().map(|class| class.told.name.as_str())
    }

    /// The law of a worker.
    pub(super) fn law_of(&self, worker: WorkerIndex) -> PrefillLaw {
        self.member(worker).map_or_else(PrefillLaw::default, |member| {
            self.classes[member.class].estimate.law().slowed(libm::exp(member.log_slowness))
        })
    }

    /// What is known of each class that has workers.
    pub(super) fn classes(&self) -> impl Iterator<Item = &PrefillClass> {
        self.classes.iter().filter(|class| !class.members.is_empty()).map(|class| &class.told)
    }

    /// Learns from a prefill. Returns the class if its law has changed so far that its other workers, all
    /// [`PrefillLaws::members_of`] it, are to be given it.
    pub(super) fn learn(&mut self, worker: WorkerIndex, done: &DonePrefill) -> Option<ClassIndex> {
        let (member, class) = self.find(worker)?;
        class.told.note(seconds(done.predicted_ns), seconds(done.now_ns.saturating_sub(done.booked_ns)));
        let slowness = libm::exp(member.log_slowness);
        if done.began_alone {
            (member.stretch_since_ns, member.stretch_predicted_s) = (done.since_ns, 0.0);
            let took_s = seconds(done.now_ns.saturating_sub(done.since_ns));
            let [uncached, cached] = done.tokens.map(|tokens| tokens as f64);
            class.estimate.take(uncached, cached, took_s / slowness);
            (class.told.law, class.told.samples) = (class.estimate.law(), class.estimate.samples);
        }
        member.stretch_predicted_s += seconds(done.work_ns);
        if done.ended_alone || member.stretch_predicted_s > STRETCH_S {
            // A class of one worker has no slowness beside its law.
            if class.members.len() > 1 {
                member.take_stretch(seconds(done.now_ns.saturating_sub(member.stretch_since_ns)));
            }
            (member.stretch_since_ns, member.stretch_predicted_s) = (done.now_ns, 0.0);
        }
        if class.told.law.differs(&class.published) {
            class.published = class.told.law;
            return Some(ClassIndex(member.class));
        }
        None
    }

    /// The workers of a class.
    pub(super) fn members_of(&self, class: ClassIndex) -> &[WorkerIndex] {
        self.classes.get(class.0).map_or(&[], |class| &class.members)
    }
}

impl Member {
    fn take_stretch(&mut self, took_s: f64) {
        if self.stretch_predicted_s <= 0.0 || took_s <= 0.0 {
            return;
        }
        let off = libm::log(took_s / self.stretch_predicted_s).clamp(-1.0, 1.0);
        // A short stretch is mostly waiting for the step before it.
        let weight = SLOWNESS_WEIGHT * (self.stretch_predicted_s / STRETCH_S).min(1.0);
        let slowness_max = libm::log(SLOWNESS_MAX);
        self.log_slowness = (self.log_slowness + weight * off).clamp(-slowness_max, slowness_max);
    }
}

impl PrefillClass {
    /// Notes a prediction beside what came.
    fn note(&mut self, predicted_s: f64, observed_s: f64) {
        /// The weight of a new prediction in the mean error, once there are many.
        const WEIGHT_MIN: f64 = 0.01;
        let error = ((predicted_s - observed_s) / observed_s.max(1e-6)).abs().min(CONSTANT_FACTOR_MAX);
        self.predictions += 1;
        self.error_mean += (1.0 / self.predictions as f64).max(WEIGHT_MIN) * (error - self.error_mean);
        self.predicted_s += predicted_s;
        self.observed_s += observed_s;
    }
}

impl PrefillLaw {
    fn differs(&self, other: &Self) -> bool {
        let moved = |a: f64, b: f64| (a - b).abs() > PUBLISHED_CHANGE_MIN * b;
        moved(self.base_s, other.base_s)
            || moved(self.token_s, other.token_s)
            || moved(self.attention_s, other.attention_s)
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::engine_law::{ENGINE_PRESETS, engine_preset};

    const W: WorkerIndex = WorkerIndex(3);
    const V: WorkerIndex = WorkerIndex(5);

    /// Runs prefills one after the other on a worker, each with a random prompt, `slowness` times as slow as `law`, with
    /// this much noise.
    struct Bench {
        laws: PrefillLaws,
        law: PrefillLaw,
        rng: Xoshiro256PlusPlus,
        noise: f64,
        now_ns: u64,
    }

    impl Bench {
        fn new(prior: Option<PrefillLaw>, noise: f64) -> Self {
            let mut laws = PrefillLaws::default();
            laws.set_class(W, "c", prior);
            let law = engine_preset("32b-tp2").unwrap().law.prefill;
            Self { laws, law, rng: Xoshiro256PlusPlus::seed_from_u64(1), noise, now_ns: 0 }
        }

        fn tokens(&mut self) -> [u64; 2] {
            let uncached = self.rng.random_range(16.0_f64.ln()..30_000.0_f64.ln()).exp();
            let cached = if self.rng.random() { self.rng.random_range(0..60_000) } else { 0 };
            [uncached as u64, cached]
        }

        fn run(&mut self, worker: WorkerIndex, slowness: f64) {
            let tokens = self.tokens();
            let noise = 1.0 + self.noise * self.rng.random_range(-1.0..1.0);
            let took_s = self.law.prefill_s(tokens[0] as f64, tokens[1] as f64) * slowness * noise;
            self.done(worker, tokens, took_s);
        }

        fn done(&mut self, worker: WorkerIndex, tokens: [u64; 2], took_s: f64) {
            let since_ns = self.now_ns;
            self.now_ns += (took_s * 1e9) as u64;
            let by_law = self.laws.law_of(worker).prefill_s(tokens[0] as f64, tokens[1] as f64);
            let (work_ns, now_ns) = ((by_law * 1e9) as u64, self.now_ns);
            let (began_alone, ended_alone, booked_ns, predicted_ns) = (true, true, since_ns, work_ns);
            let done =
                DonePrefill { tokens, since_ns, booked_ns, now_ns, work_ns, predicted_ns, began_alone, ended_alone };
            self.laws.learn(worker, &done);
        }

        /// The largest and the mean error of a worker's law over prompts of many sizes.
        fn error(&self, worker: WorkerIndex, slowness: f64) -> (f64, f64) {
            let (mut worst, mut sum, mut count) = (0.0_f64, 0.0, 0.0);
            for uncached in [50.0, 500.0, 5000.0, 30_000.0] {
                for cached in [0.0, 8000.0, 60_000.0] {
                    let expected = self.law.prefill_s(uncached, cached) * slowness;
                    let error = (self.laws.law_of(worker).prefill_s(uncached, cached) / expected - 1.0).abs();
                    (worst, sum, count) = (worst.max(error), sum + error, count + 1.0);
                }
            }
            (worst, sum / count)
        }
    }

    #[test]
    fn a_law_is_learnt_from_any_beginning() {
        let right = engine_preset("32b-tp2").map(|preset| preset.law.prefill);
        let mut priors = vec![None, right, right.map(|law| law.slowed(0.5)), right.map(|law| law.slowed(2.0))];
        priors.extend(ENGINE_PRESETS.map(|preset| Some(preset.law.prefill)));
        for prior in priors {
            let mut bench = Bench::new(prior, 0.0);
            (0..60).for_each(|_| bench.run(W, 1.0));
            assert!(bench.error(W, 1.0).1 < 0.05, "{prior:?}: {:?}", bench.error(W, 1.0));
            let mut bench = Bench::new(prior, 0.3);
            (0..500).for_each(|_| bench.run(W, 1.0));
            assert!(bench.error(W, 1.0).1 < 0.05, "{prior:?} with noise: {:?}", bench.error(W, 1.0));
        }
    }

    #[test]
    fn a_slow_worker_is_found_and_its_class_is_not_misjudged() {
        let mut bench = Bench::new(engine_preset("32b-tp2").map(|preset| preset.law.prefill), 0.1);
        bench.laws.set_class(V, "c", None);
        (0..300).for_each(|_| bench.run(W, 1.0));
        for _ in 0..60 {
            bench.run(W, 1.0);
            bench.run(V, 2.0);
        }
        let (of_slow, of_other) = (bench.error(V, 2.0).1, bench.error(W, 1.0).1);
        assert!(of_slow < 0.2 && of_other < 0.15, "{of_slow} {of_other}");
    }

    #[test]
    fn a_change_of_speed_is_followed() {
        let mut bench = Bench::new(None, 0.1);
        (0..300).for_each(|_| bench.run(W, 1.0));
        (0..400).for_each(|_| bench.run(W, 3.0));
        assert!(bench.error(W, 3.0).1 < 0.1, "{:?}", bench.error(W, 3.0));
    }

    #[test]
    fn forged_reports_move_a_law_by_a_bounded_step() {
        let mut bench = Bench::new(None, 0.1);
        (0..500).for_each(|_| bench.run(W, 1.0));
        let before = bench.error(W, 1.0);
        for took_s in [0.0, 1e-9, 86_400.0] {
            let mut laws = Bench { laws: clone_of(&bench.laws), ..Bench::new(None, 0.1) };
            let tokens = laws.tokens();
            laws.done(W, tokens, took_s);
            assert!(laws.error(W, 1.0).0 < before.0 + 0.15, "one of {took_s} s: {:?}", laws.error(W, 1.0));
        }
        // One report in twenty is forged.
        for at in 0..1000 {
            if at % 20 == 0 {
                let tokens = bench.tokens();
                bench.done(W, tokens, 86_400.0);
            } else {
                bench.run(W, 1.0);
            }
        }
        assert!(bench.error(W, 1.0).1 < 0.3, "{:?}", bench.error(W, 1.0));
    }

    fn clone_of(laws: &PrefillLaws) -> PrefillLaws {
        PrefillLaws { classes: laws.classes.clone(), members: laws.members.clone() }
    }

    #[test]
    fn equal_prompts_teach_what_they_can_for_ever() {
        let mut bench = Bench::new(None, 0.0);
        for _ in 0..200_000 {
            let took_s = bench.law.prefill_s(1000.0, 0.0);
            bench.done(W, [1000, 0], took_s);
        }
        let law = bench.laws.law_of(W);
        assert!((law.prefill_s(1000.0, 0.0) / bench.law.prefill_s(1000.0, 0.0) - 1.0).abs() < 0.01);
        (0..200).for_each(|_| bench.run(W, 1.0));
        assert!(bench.error(W, 1.0).1 < 0.05, "it still learns: {:?}", bench.error(W, 1.0));
    }

    #[test]
    fn idle_workers_of_a_class_get_its_law() {
        let mut bench = Bench::new(None, 0.0);
        bench.laws.set_class(V, "c", None);
        bench.laws.set_class(WorkerIndex(9), "another", None);
        let done = DonePrefill {
            tokens: [1000, 0],
            since_ns: 0,
            booked_ns: 0,
            now_ns: 10_000_000,
            work_ns: 1,
            predicted_ns: 1,
            began_alone: true,
            ended_alone: true,
        };
        let class = bench.laws.learn(W, &done).unwrap();
        assert_eq!(bench.laws.members_of(class), [W, V]);
        bench.laws.forget(V);
        assert_eq!(bench.laws.law_of(V), PrefillLaw::default());
        assert_eq!(PrefillLaws::default().law_of(WorkerIndex(0)), PrefillLaw::default());
        assert_eq!(bench.laws.learn(V, &done), None);
        bench.laws.set_class(W, "c", None);
        assert_eq!(bench.laws.classes().map(|class| class.samples).collect::<Vec<_>>(), [1, 0], "it stays as it was");
    }

    #[test]
    fn classes_beyond_the_bound_share_the_last_one() {
        let mut laws = PrefillLaws::default();
        for at in 0..PREFILL_CLASSES_MAX as u32 + 3 {
            laws.set_class(WorkerIndex(at), &format!("class {at}"), None);
        }
        assert_eq!(laws.classes().count(), PREFILL_CLASSES_MAX);
        assert_eq!(laws.classes[PREFILL_CLASSES_MAX - 1].members.len(), 4);
    }
}
