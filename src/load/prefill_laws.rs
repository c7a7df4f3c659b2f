//! How long prefills take on each worker, learnt from what gateways report: when they booked, and when the first token
//! came.
//!
//! Workers of one class share a law; a worker's *slowness* is its factor to it. The two are learnt from different
//! samples:
//!
//! * **The law** from prefills that began on a worker without another prefill: their time is their own (`law_estimate`).
//! * **The slowness** from busy stretches: the time from the first prefill's start until the worker has none left, over
//!   the sum of the predictions. How an engine batches the prompts in between does not matter.
//!
//! Prefills that other routers have on a worker spoil both: a prefill beside them did not begin alone, and what they took
//! of a stretch is not known. So while others have prefills there, a single prefill takes the place of a stretch: the
//! time from its booking to its first token, over its prediction. That counts what all routers had queued before it; what
//! they book later runs behind it. Of prefills that overlap, one counts.
//!
//! A report may be late, early or forged. Each sample is cut off at a few times the usual error, and each constant stays
//! within a bound of its prior, so that one report moves a law by a bounded step.
//!
//! Decisions compare workers of a class, so these get a new law at the same time: what is learnt from a report stays in
//! the estimate until the class is published.

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use super::law_estimate::{CONSTANT_FACTOR_MAX, Estimate, LawRefusal, LearntClass, learnt_last};
use crate::engine_law::PrefillLaw;
use crate::ids::{Worker, WorkerIndex};
use crate::limits::{PREFILL_CLASSES_MAX, PREFILL_SAMPLES_MIN, WORKERS_MAX};

/// A worker is at most this many times as slow or as fast as its class.
pub(super) const SLOWNESS_MAX: f64 = 4.0;
/// The weight of a busy stretch in a worker's slowness.
const SLOWNESS_WEIGHT: f64 = 0.2;
/// A busy stretch is cut into samples of about this much predicted time, seconds.
const STRETCH_S: f64 = 2.0;
/// Half of what is known of a worker's slowness is forgotten in this time without busy stretches, seconds.
const SLOWNESS_HALF_LIFE_S: f64 = 86_400.0;
/// A law is published when a constant has moved by more than this part.
const PUBLISHED_CHANGE_MIN: f64 = 0.02;

/// What is known of a class of workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrefillClass {
    /// Its name.
    pub name: String,
    /// The law as learnt so far.
    pub law: PrefillLaw,
    /// Samples since the start that it was learnt from.
    pub samples: u64,
    /// Samples of earlier runs of the daemon that it was learnt from.
    pub samples_restored: u64,
    /// Times to the first token that were predicted and observed.
    pub predictions: u64,
    /// Mean of |predicted − observed| / observed over the recent ones.
    pub error_mean: f64,
    /// Sums over all of them, seconds.
    pub predicted_s: f64,
    /// As `predicted_s`.
    pub observed_s: f64,
}

/// What was learnt of all classes and workers, as a restart keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearntLaws {
    /// The classes.
    pub classes: Vec<LearntClass>,
    /// The workers that are not as fast as their class.
    pub workers: Vec<LearntWorker>,
}

/// What was learnt of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearntWorker {
    /// The engine's number.
    pub id: u64,
    /// The data-parallel rank.
    pub rank: u32,
    /// The place of its class in [`LearntLaws::classes`].
    pub class: usize,
    /// Its time for a prefill over that of its class.
    pub slowness: f64,
    /// When it was learnt, milliseconds of Unix time.
    pub learnt_unix_ms: u64,
}

/// What a worker's class brought from before the restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LawRestored {
    /// The law, learnt from this many samples.
    Law {
        /// Samples.
        samples: u64,
    },
    /// A law that is not used.
    Refused(LawRefusal),
}

#[derive(Clone, Debug, PartialEq)]
struct Class {
    estimate: Estimate,
    /// The law that its workers have, and the samples that it was learnt from.
    published: PrefillLaw,
    published_samples: u64,
    /// Whether the last publication changed it.
    is_new: bool,
    members: u32,
    told: PrefillClass,
    learnt: Learnt,
}

/// When something was learnt: as saved by an earlier run, milliseconds of Unix time, and in this one, nanoseconds of the
/// bookings' clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Learnt {
    saved_unix_ms: u64,
    here_ns: Option<u64>,
}

impl Learnt {
    fn unix_ms(&self, zero_unix_ms: u64) -> u64 {
        self.here_ns.map_or(self.saved_unix_ms, |at_ns| zero_unix_ms.saturating_add(at_ns / 1_000_000))
    }
}

/// A worker's place in its class.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Member {
    index: WorkerIndex,
    worker: Worker,
    /// The place of its class; classes are never removed.
    class: usize,
    /// The logarithm of its slowness.
    log_slowness: f64,
    learnt: Learnt,
    busy: Busy,
}

/// What the slowness of a busy worker is learnt from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Busy {
    /// Nothing: it is not known since when the worker is busy.
    Unknown,
    /// The busy stretch so far, of this router's prefills alone.
    Own(Stretch),
    /// Single prefills that were booked at this time or later: other routers have prefills there too.
    Shared(u64),
}

/// A busy stretch: since when, and the predictions of its prefills that are done.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    since_ns: u64,
    predicted_s: f64,
}

impl Stretch {
    const fn at(since_ns: u64) -> Self {
        Self { since_ns, predicted_s: 0.0 }
    }
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
    /// How long it took by the gateway's clock, if the report says so.
    pub(super) said_ns: Option<u64>,
    /// Its prediction: alone, and with the prefills before it.
    pub(super) work_ns: u64,
    pub(super) predicted_ns: u64,
    /// Whether the worker had no other prefill, of any router, when it was booked.
    pub(super) began_alone: bool,
    /// Whether the worker has no other prefill of this router now.
    pub(super) ended_alone: bool,
    /// Whether it has prefills of other routers now.
    pub(super) beside_others: bool,
}

/// What an earlier run of the daemon learnt, for classes and workers that have not joined yet.
#[derive(Debug, Default)]
struct Saved {
    /// When it was read, milliseconds of Unix time.
    read_unix_ms: u64,
    classes: HashMap<String, LearntClass>,
    /// With the names of their classes.
    workers: HashMap<Worker, (LearntWorker, String)>,
}

/// The laws of all workers, under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct PrefillLaws {
    classes: Vec<Class>,
    /// By the worker's place; `None` = a worker of no class.
    members: Vec<Option<Member>>,
    saved: Saved,
    /// Unix time at 0 of the bookings' clock, milliseconds, as of its first use.
    zero_unix_ms: Option<u64>,
}

/// Nanoseconds in seconds.
const fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

/// The time since then, seconds; 0 if the clock was set back.
const fn age_s(then_unix_ms: u64, now_unix_ms: u64) -> f64 {
    now_unix_ms.saturating_sub(then_unix_ms) as f64 * 1e-3
}

impl PrefillLaws {
    /// Takes what an earlier run learnt, for the classes and workers that join from now on. Returns the names of classes
    /// whose constants are beyond the bounds of learning; they are left out, with their workers.
    pub(super) fn restore(&mut self, learnt: &LearntLaws, now_unix_ms: u64) -> Vec<String> {
        let (good, refused): (Vec<_>, Vec<_>) = learnt.classes.iter().partition(|class| class.is_plausible());
        let refused = refused.into_iter().map(|class| class.name.clone()).collect();
        self.saved.read_unix_ms = now_unix_ms;
        self.saved.classes = good.into_iter().map(|class| (class.name.clone(), class.clone())).collect();
        let bounds = 1.0 / SLOWNESS_MAX..=SLOWNESS_MAX;
        for worker in learnt.workers.iter().filter(|worker| bounds.contains(&worker.slowness)) {
            let class = learnt.classes.get(worker.class).filter(|class| class.is_plausible());
            if let Some(class) = class {
                self.saved.workers.insert(Worker::new(worker.id, worker.rank), (*worker, class.name.clone()));
            }
        }
        refused
    }

    /// What is learnt so far, for the next run. Classes and workers of an earlier run that have not joined are part of it
    /// while they are younger than `keep_ms`; of these, the last learnt ones, as many as can join.
    pub(super) fn save(&mut self, now_ns: u64, now_unix_ms: u64, keep_ms: u64) -> LearntLaws {
        // The same at every call, so that what has not changed is saved with the same time.
        let zero_unix_ms = *self.zero_unix_ms.get_or_insert(now_unix_ms.saturating_sub(now_ns / 1_000_000));
        let is_young = |learnt_unix_ms: u64| now_unix_ms.saturating_sub(learnt_unix_ms) <= keep_ms;
        let own = self.classes.iter().filter(|class| class.told.samples_all() > 0).map(|class| {
            class.estimate.save(&class.told.name, class.told.samples_all(), class.learnt.unix_ms(zero_unix_ms))
        });
        let absent = self.saved.classes.values().filter(|class| is_young(class.learnt_unix_ms));
        let absent = learnt_last(absent, |class| class.learnt_unix_ms, PREFILL_CLASSES_MAX);
        let classes: Vec<LearntClass> = own.chain(absent.cloned()).collect();
        let members = self.members.iter().flatten().filter(|member| member.log_slowness != 0.0).map(|member| {
            let learnt_unix_ms = member.learnt.unix_ms(zero_unix_ms);
            let slowness = libm::exp(member.log_slowness);
            (member.worker, self.classes[member.class].told.name.as_str(), slowness, learnt_unix_ms)
        });
        let places: HashMap<String, usize> =
            classes.iter().zip(0..).map(|(class, at)| (class.name.clone(), at)).collect();
        let absent = self.saved.workers.iter();
        let absent = absent.filter(|(_, (of, class))| is_young(of.learnt_unix_ms) && places.contains_key(class));
        let absent = learnt_last(absent, |(_, (of, _))| of.learnt_unix_ms, WORKERS_MAX);
        let absent = absent.map(|(worker, (of, class))| (*worker, class.as_str(), of.slowness, of.learnt_unix_ms));
        let workers = members.chain(absent).filter_map(|(worker, class, slowness, learnt_unix_ms)| {
            let (id, rank, class) = (worker.id.0, worker.rank.0, *places.get(class)?);
            Some(LearntWorker { id, rank, class, slowness, learnt_unix_ms })
        });
        LearntLaws { classes, workers: workers.collect() }
    }

    /// Puts a worker into a class. The first worker of a class gives its prior. A class beyond
    /// [`PREFILL_CLASSES_MAX`] is the last one. Returns what a new class has from an earlier run.
    pub(super) fn set_class(
        &mut self,
        index: WorkerIndex,
        worker: Worker,
        name: &str,
        prior: Option<PrefillLaw>,
    ) -> Option<LawRestored> {
        if self.find(index).is_some_and(|(_, class)| class.told.name == name) {
            return None;
        }
        self.forget(index);
        let mut restored = None;
        let class = match self.classes.iter().position(|class| class.told.name == name) {
            Some(class) => class,
            None if self.classes.len() >= PREFILL_CLASSES_MAX => self.classes.len() - 1,
            None => {
                let (class, of_earlier) = self.new_class(name, prior);
                restored = of_earlier;
                self.classes.push(class);
                self.classes.len() - 1
            }
        };
        self.classes[class].members += 1;
        if self.members.len() <= index.place() {
            self.members.resize(index.place() + 1, None);
        }
        let saved =
            self.saved.workers.remove(&worker).filter(|(_, of_class)| self.classes[class].told.name == *of_class);
        let (log_slowness, learnt) = saved.map_or((0.0, Learnt::default()), |(saved, _)| {
            let age_s = age_s(saved.learnt_unix_ms, self.saved.read_unix_ms);
            let learnt = Learnt { saved_unix_ms: self.saved.read_unix_ms, here_ns: None };
            (libm::log(saved.slowness) * libm::exp2(-age_s / SLOWNESS_HALF_LIFE_S), learnt)
        });
        let member = Member { index, worker, class, log_slowness, learnt, busy: Busy::Unknown };
        self.members[index.place()] = Some(member);
        restored
    }

    /// A class without workers, with what an earlier run learnt of it.
    fn new_class(&mut self, name: &str, prior: Option<PrefillLaw>) -> (Class, Option<LawRestored>) {
        let (mut told, mut learnt) =
            (PrefillClass { name: name.to_owned(), ..PrefillClass::default() }, Learnt::default());
        let (mut estimate, mut restored) = (Estimate::new(prior), None);
        if let Some(saved) = self.saved.classes.remove(name) {
            let read_unix_ms = self.saved.read_unix_ms;
            restored = Some(match Estimate::restore(&saved, prior, age_s(saved.learnt_unix_ms, read_unix_ms)) {
                Ok(aged) => {
                    (estimate, told.samples_restored, learnt.saved_unix_ms) = (aged, saved.samples, read_unix_ms);
                    LawRestored::Law { samples: saved.samples }
                }
                Err(refusal) => LawRestored::Refused(refusal),
            });
        }
        told.law = estimate.law();
        let (published, published_samples) = (told.law, told.samples_restored);
        let (is_new, members) = (false, 0);
        (Class { estimate, published, published_samples, is_new, members, told, learnt }, restored)
    }

    /// Takes a worker out of its class.
    pub(super) fn forget(&mut self, index: WorkerIndex) {
        if let Some(place) = self.members.get_mut(index.place())
            && let Some(member) = place.take_if(|member| member.index == index)
        {
            self.classes[member.class].members -= 1;
        }
    }

    fn find(&mut self, index: WorkerIndex) -> Option<(&mut Member, &mut Class)> {
        let member = self.members.get_mut(index.place())?.as_mut().filter(|member| member.index == index)?;
        let class = &mut self.classes[member.class];
        Some((member, class))
    }

    fn get(&self, index: WorkerIndex) -> Option<(&Member, &Class)> {
        let member = self.members.get(index.place())?.as_ref().filter(|member| member.index == index)?;
        Some((member, &self.classes[member.class]))
    }

    /// The law of a worker, as published.
    pub(super) fn law_of(&self, index: WorkerIndex) -> PrefillLaw {
        let of_member = |(member, class): (&Member, &Class)| class.published.slowed(libm::exp(member.log_slowness));
        self.get(index).map_or_else(PrefillLaw::default, of_member)
    }

    /// Whether the law of a worker is more than a guess.
    pub(super) fn is_known(&self, index: WorkerIndex) -> bool {
        let is_learnt = |class: &Class| class.published_samples >= PREFILL_SAMPLES_MIN;
        self.get(index).is_some_and(|(_, class)| class.estimate.is_preset() || is_learnt(class))
    }

    /// The place of a worker's class among all; 0 for a worker of no class.
    pub(super) fn class_of(&self, index: WorkerIndex) -> u32 {
        self.get(index).map_or(0, |(member, _)| member.class as u32)
    }

    /// The names of all classes, those without workers among them.
    pub(super) fn class_names(&self) -> impl Iterator<Item = &str> {
        self.classes.iter().map(|class| class.told.name.as_str())
    }

    /// What is known of each class that has workers.
    pub(super) fn classes(&self) -> impl Iterator<Item = &PrefillClass> {
        self.classes.iter().filter(|class| class.members > 0).map(|class| &class.told)
    }

    /// Learns from a prefill.
    pub(super) fn learn(&mut self, index: WorkerIndex, done: &DonePrefill) {
        let Some((member, class)) = self.find(index) else { return };
        class.told.note(seconds(done.predicted_ns), seconds(done.now_ns.saturating_sub(done.booked_ns)));
        let slowness = libm::exp(member.log_slowness);
        if done.began_alone {
            member.busy = Busy::Own(Stretch::at(done.since_ns));
            // A report may have been under way for long.
            let took_ns = done.now_ns.saturating_sub(done.since_ns);
            let took_s = seconds(done.said_ns.map_or(took_ns, |said_ns| said_ns.min(took_ns)));
            let [uncached, cached] = done.tokens.map(|tokens| tokens as f64);
            if class.estimate.take(uncached, cached, took_s / slowness) {
                class.told.law = class.estimate.law();
                class.told.samples += 1;
                class.learnt.here_ns = Some(done.now_ns);
            }
        }
        if done.beside_others {
            member.share();
        }
        // The next stretch begins here, unless this one goes on.
        let next = Busy::Own(Stretch::at(done.now_ns));
        let (ended, next) = match member.busy {
            Busy::Unknown => (None, next),
            Busy::Own(mut stretch) => {
                stretch.predicted_s += seconds(done.work_ns);
                let has_ended = done.ended_alone || stretch.predicted_s > STRETCH_S;
                if has_ended { (Some(stretch), next) } else { (None, Busy::Own(stretch)) }
            }
            Busy::Shared(from_ns) => {
                let of_one = Stretch { since_ns: done.booked_ns, predicted_s: seconds(done.predicted_ns) };
                let ended = (done.booked_ns >= from_ns).then_some(of_one);
                let from_ns = if ended.is_some() { done.now_ns } else { from_ns };
                (ended, if done.beside_others { Busy::Shared(from_ns) } else { next })
            }
        };
        member.busy = next;
        // A class of one worker has no slowness beside its law.
        if let Some(stretch) = ended.filter(|_| class.members > 1) {
            member.take_stretch(&stretch, done.now_ns);
            member.learnt.here_ns = Some(done.now_ns);
        }
    }

    /// Notes that another router has prefills on a worker.
    pub(super) fn share_stretch(&mut self, index: WorkerIndex) {
        if let Some((member, _)) = self.find(index) {
            member.share();
        }
    }

    /// Publishes the laws that have changed. Their workers have them from now on; [`PrefillLaws::with_new_law`] names
    /// these. `false`: there is none.
    pub(super) fn publish(&mut self) -> bool {
        for class in &mut self.classes {
            class.is_new = class.told.law.differs(&class.published);
            class.published_samples = class.told.samples_all();
            if class.is_new {
                class.published = class.told.law;
            }
        }
        self.classes.iter().any(|class| class.is_new)
    }

    /// The workers whose law was published last, among those at these places.
    pub(super) fn with_new_law(&self, places: std::ops::Range<usize>) -> impl Iterator<Item = WorkerIndex> {
        let to = places.end.min(self.members.len());
        let members = self.members[places.start.min(to)..to].iter().flatten();
        members.filter(|member| self.classes[member.class].is_new).map(|member| member.index)
    }

    /// All workers are at places below this.
    pub(super) fn places(&self) -> usize {
        self.members.len()
    }
}

impl Member {
    /// Other routers have prefills there from now on.
    const fn share(&mut self) {
        match self.busy {
            Busy::Unknown => self.busy = Busy::Shared(0),
            Busy::Own(stretch) => self.busy = Busy::Shared(stretch.since_ns),
            Busy::Shared(_) => {}
        }
    }

    /// Learns from a busy stretch that has ended.
    fn take_stretch(&mut self, stretch: &Stretch, now_ns: u64) {
        let (took_s, predicted_s) = (seconds(now_ns.saturating_sub(stretch.since_ns)), stretch.predicted_s);
        if predicted_s <= 0.0 || took_s <= 0.0 {
            return;
        }
        let off = libm::log(took_s / predicted_s).clamp(-1.0, 1.0);
        // A short stretch is mostly waiting for the step before it.
        let weight = SLOWNESS_WEIGHT * (predicted_s / STRETCH_S).min(1.0);
        let slowness_max = libm::log(SLOWNESS_MAX);
        self.log_slowness = (self.log_slowness + weight * off).clamp(-slowness_max, slowness_max);
    }
}

impl PrefillClass {
    /// Samples of all runs.
    const fn samples_all(&self) -> u64 {
        self.samples.saturating_add(self.samples_restored)
    }

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
        let moved = |(a, b): (f64, f64)| (a - b).abs() > PUBLISHED_CHANGE_MIN * b;
        self.constants().into_iter().zip(other.constants()).any(moved)
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

    /// A prefill that was never beside another.
    fn alone(tokens: [u64; 2]) -> DonePrefill {
        let (since_ns, booked_ns, now_ns, said_ns, work_ns, predicted_ns) = (0, 0, 10_000_000, None, 0, 1);
        let (began_alone, ended_alone, beside_others) = (true, true, false);
        DonePrefill {
            tokens,
            since_ns,
            booked_ns,
            now_ns,
            said_ns,
            work_ns,
            predicted_ns,
            began_alone,
            ended_alone,
            beside_others,
        }
    }

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
            laws.set_class(W, Worker::new(3, 0), "c", prior);
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
            self.laws.learn(worker, &DonePrefill { since_ns, booked_ns: since_ns, now_ns, work_ns, ..alone(tokens) });
            self.laws.publish();
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
        bench.laws.set_class(V, Worker::new(5, 0), "c", None);
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
            let mut forged = Bench { laws: clone_of(&bench.laws), ..Bench::new(None, 0.1) };
            let tokens = forged.tokens();
            forged.done(W, tokens, took_s);
            assert!(forged.error(W, 1.0).0 < before.0 + 0.15, "one of {took_s} s: {:?}", forged.error(W, 1.0));
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
        PrefillLaws { classes: laws.classes.clone(), members: laws.members.clone(), ..PrefillLaws::default() }
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
    fn all_workers_of_a_class_get_its_law_at_once() {
        let mut bench = Bench::new(None, 0.0);
        bench.laws.set_class(V, Worker::new(5, 0), "c", None);
        bench.laws.set_class(WorkerIndex(9), Worker::new(9, 0), "another", None);
        bench.laws.learn(W, &alone([1000, 0]));
        assert_eq!(bench.laws.law_of(W), PrefillLaw::default(), "it is not published yet");
        assert!(bench.laws.publish() && bench.laws.law_of(W) == bench.laws.law_of(V));
        assert_ne!(bench.laws.law_of(W), PrefillLaw::default());
        let named = |laws: &PrefillLaws, places| laws.with_new_law(places).collect::<Vec<_>>();
        assert_eq!((named(&bench.laws, 0..10), named(&bench.laws, 4..99)), (vec![W, V], vec![V]));
        assert!(!bench.laws.publish() && named(&bench.laws, 0..10).is_empty(), "nothing was learnt since");
        bench.laws.forget(V);
        assert_eq!(bench.laws.law_of(V), PrefillLaw::default());
        assert_eq!(PrefillLaws::default().law_of(WorkerIndex(0)), PrefillLaw::default());
        bench.laws.learn(V, &alone([1000, 0]));
        bench.laws.set_class(W, Worker::new(3, 0), "c", None);
        assert_eq!(bench.laws.classes().map(|class| class.samples).collect::<Vec<_>>(), [1, 0], "it stays as it was");
    }

    #[test]
    fn a_report_that_came_late_says_how_long_the_prefill_took() {
        let of = |said_ns| {
            let mut bench = Bench::new(None, 0.0);
            bench.laws.learn(W, &DonePrefill { said_ns, ..alone([1000, 0]) });
            bench.laws.publish();
            bench.laws.law_of(W).prefill_s(1000.0, 0.0)
        };
        assert!(of(Some(5_000_000)) < of(None));
        assert_eq!(of(Some(50_000_000)), of(None), "it did not take longer than since its booking");
    }

    const DAY_MS: u64 = 86_400_000;

    /// A class with two workers, one of which is slow, and what an earlier run keeps of it at 10 days.
    fn earlier() -> (Bench, LearntLaws) {
        let mut bench = Bench::new(None, 0.0);
        bench.laws.set_class(V, Worker::new(5, 0), "c", None);
        for _ in 0..300 {
            bench.run(W, 1.0);
            bench.run(V, 2.0);
        }
        let saved = bench.laws.save(bench.now_ns, 10 * DAY_MS, DAY_MS);
        (bench, saved)
    }

    #[test]
    fn a_restart_keeps_laws_and_slowness() {
        let (before, saved) = earlier();
        assert_eq!(saved.classes.iter().map(|class| class.name.as_str()).collect::<Vec<_>>(), ["c"]);
        let mut bench = Bench { laws: PrefillLaws::default(), ..Bench::new(None, 0.0) };
        assert!(bench.laws.restore(&saved, 10 * DAY_MS).is_empty());
        let restored = bench.laws.set_class(WorkerIndex(7), Worker::new(5, 0), "c", None);
        assert_eq!(restored, Some(LawRestored::Law { samples: 600 }));
        assert_eq!(bench.laws.set_class(WorkerIndex(1), Worker::new(3, 0), "c", None), None, "the class is there");
        // But for what has moved since the last publication.
        let same = |one: PrefillLaw, other: PrefillLaw| {
            let close = |(one, other): (f64, f64)| (one / other - 1.0).abs() < 0.03;
            assert!(one.constants().into_iter().zip(other.constants()).all(close), "{one:?} {other:?}");
        };
        // They are matched by their ids: their places are others.
        same(bench.laws.law_of(WorkerIndex(7)), before.laws.law_of(V));
        same(bench.laws.law_of(WorkerIndex(1)), before.laws.law_of(W));
        assert!(bench.laws.is_known(WorkerIndex(1)));
        let told = bench.laws.classes().next().unwrap();
        assert_eq!((told.samples, told.samples_restored, told.predictions), (0, 600, 0));
        let again = bench.laws.save(0, 10 * DAY_MS, DAY_MS);
        assert_eq!((again.classes[0].samples, again.workers.len()), (600, saved.workers.len()));
    }

    #[test]
    fn what_has_not_joined_is_kept_for_a_while() {
        let (_, saved) = earlier();
        let mut laws = PrefillLaws::default();
        laws.restore(&saved, 10 * DAY_MS + DAY_MS / 2);
        let sorted = |mut laws: LearntLaws| {
            laws.workers.sort_by_key(|worker| worker.id);
            laws
        };
        let soon_ms = 10 * DAY_MS + DAY_MS / 2;
        assert_eq!(sorted(laws.save(5, soon_ms, DAY_MS)), sorted(saved.clone()), "as it was, not aged twice");
        assert_eq!(laws.save(5, 11 * DAY_MS + 1, DAY_MS), LearntLaws::default());
        // A worker that is in another class now begins anew.
        laws.set_class(V, Worker::new(5, 0), "other", None);
        assert_eq!(laws.law_of(V), PrefillLaw::default());
        assert!(laws.save(5, soon_ms, DAY_MS).workers.iter().all(|worker| worker.id != 5));
    }

    #[test]
    fn a_slowness_is_forgotten_with_time() {
        let (_, saved) = earlier();
        let slowness_after = |days: u64| {
            let mut laws = PrefillLaws::default();
            laws.restore(&saved, (10 + days) * DAY_MS);
            laws.set_class(V, Worker::new(5, 0), "c", None);
            laws.law_of(V).base_s / laws.classes().next().unwrap().law.base_s
        };
        assert!(
            (1.3..2.1).contains(&slowness_after(0)) && slowness_after(1) < slowness_after(0),
            "{}",
            slowness_after(0)
        );
        assert!((slowness_after(30) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn absurd_laws_are_named_and_left_out_with_their_workers() {
        let (_, mut saved) = earlier();
        saved.classes[0].factors[1] = 1e9;
        let mut laws = PrefillLaws::default();
        assert_eq!(laws.restore(&saved, 10 * DAY_MS), ["c"]);
        assert_eq!(laws.set_class(V, Worker::new(5, 0), "c", None), None);
        assert_eq!(laws.law_of(V), PrefillLaw::default());
        let (_, mut saved) = earlier();
        saved.workers.iter_mut().for_each(|worker| worker.slowness = f64::NAN);
        saved.workers.extend(saved.workers.first().map(|worker| LearntWorker { class: 9, slowness: 2.0, ..*worker }));
        let mut laws = PrefillLaws::default();
        assert!(laws.restore(&saved, 10 * DAY_MS).is_empty());
        laws.set_class(V, Worker::new(5, 0), "c", None);
        assert_eq!(laws.law_of(V), laws.classes().next().unwrap().law);
        // Another preset than before, for an engine that is much faster.
        let (_, saved) = earlier();
        let mut laws = PrefillLaws::default();
        laws.restore(&saved, 10 * DAY_MS);
        let prior = engine_preset("8b-tp1").map(|preset| preset.law.prefill.slowed(0.2));
        let restored = laws.set_class(V, Worker::new(5, 0), "c", prior);
        assert_eq!(
            (restored, laws.law_of(W)),
            (Some(LawRestored::Refused(LawRefusal::PresetDiffers)), PrefillLaw::default())
        );
        assert_eq!(laws.classes().next().map(|class| class.law), prior);
    }

    #[test]
    fn classes_beyond_the_bound_share_the_last_one() {
        let mut laws = PrefillLaws::default();
        for at in 0..PREFILL_CLASSES_MAX as u32 + 3 {
            laws.set_class(WorkerIndex(at), Worker::new(u64::from(at), 0), &format!("class {at}"), None);
        }
        assert_eq!(laws.classes().count(), PREFILL_CLASSES_MAX);
        assert_eq!(laws.classes[PREFILL_CLASSES_MAX - 1].members, 4);
    }
}
