//! The prefill backlog of a worker: booked tokens, minus those that the prefill model counts as done.
//!
//! A worker prefills one prompt after another, in the order of their bookings; the first is the anchor. If the duration
//! of a prefill is known, the backlog falls while the anchor runs. If all durations are known, it keeps falling when
//! the anchor should have ended. The rules are those of the prefill load model of Dynamo 1.6.1's router.

use hashbrown::HashMap;

use super::gauge::Gauge;
use super::load_cells::PrefillWork;
use super::others::OthersLoad;
use super::prefill_laws::{DonePrefill, PrefillLaws};
use crate::engine_law::PrefillLaw;
use crate::ids::WorkerIndex;
use crate::limits::PREFILL_WORK_NS_MAX;
use crate::prefetch::prefetch_value_to_write;

/// The model of the duration of a prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillModel {
    /// Unknown: a prefill counts in full until it is reported done.
    #[default]
    Off,
    /// The same on every worker: a constant, plus a time per computed and per cached token.
    Fixed {
        /// Nanoseconds of every prefill.
        base_ns: u64,
        /// Nanoseconds of a token that is not cached.
        token_ns: u64,
        /// Nanoseconds of a token that is cached.
        cached_token_ns: u64,
    },
    /// By the law that was learnt for the worker; unknown until there is one.
    Learnt,
}

/// Prefill figures of one worker, which replace those of the fixed model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillFigures {
    /// Nanoseconds of every prefill.
    pub base_ns: Option<u64>,
    /// Nanoseconds of a token that is not cached.
    pub token_ns: Option<u64>,
    /// Nanoseconds of a token that is cached.
    pub cached_token_ns: Option<u64>,
}

/// A prefill in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefill {
    /// Tokens to compute, at least 1.
    pub(super) tokens: u64,
    /// Its duration by the model, nanoseconds; `None` = unknown.
    pub(super) duration_ns: Option<u64>,
    /// Tokens before them, in the cache.
    pub(super) cached_tokens: u64,
    /// Its duration by the law of its worker, nanoseconds.
    pub(super) work_ns: u64,
}

/// A worker's prefills in progress, as far as the backlog at a time depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backlog {
    /// Tokens of all prefills.
    pub(super) tokens: u64,
    /// Tokens of the anchor; 0 = none.
    pub(super) anchor_tokens: u64,
    /// Duration of the anchor, nanoseconds; `None` = unknown.
    pub(super) anchor_ns: Option<u64>,
    /// When it became the anchor.
    pub(super) since_ns: u64,
    /// Whether all durations are known.
    pub(super) all_modelled: bool,
}

impl Backlog {
    /// Tokens left at a time.
    pub(super) fn at(&self, now_ns: u64) -> u64 {
        let elapsed_ns = now_ns.saturating_sub(self.since_ns);
        let (tokens, anchor) = (self.tokens, u128::from(self.anchor_tokens));
        match self.anchor_ns {
            None => tokens,
            Some(0) => tokens.saturating_sub(self.anchor_tokens),
            Some(anchor_ns) if self.all_modelled => {
                // Beyond the end of the anchor: the next prefill runs already, and only the report is late.
                let done = anchor * u128::from(elapsed_ns) / u128::from(anchor_ns);
                tokens.saturating_sub(u64::try_from(done).unwrap_or(u64::MAX))
            }
            Some(anchor_ns) => {
                let left_ns = u128::from(anchor_ns.saturating_sub(elapsed_ns));
                let left = (anchor * left_ns).div_ceil(u128::from(anchor_ns));
                tokens.saturating_sub(self.anchor_tokens).saturating_add(left as u64)
            }
        }
    }
}

/// The part of a worker's load that its prefills in progress make.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PrefillLoad {
    pub(super) backlog: Backlog,
    pub(super) work: PrefillWork,
    pub(super) law: PrefillLaw,
    /// When an anchor ended last; 0 = never. Only the prefills of other routers need it, so cells do not hold it.
    pub(super) ended_ns: u64,
}

/// The slot of a prefill in progress. Invalid once it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefillId(u32);

/// A slot for a prefill, linked with the others of its worker.
#[derive(Clone, Copy, Debug)]
struct PrefillSlot {
    prefill: Prefill,
    /// Its work, and what was left of the prefills before it: the predicted time to the first token, nanoseconds.
    predicted_ns: u64,
    booked_ns: u64,
    began_alone: bool,
    /// Whether an earlier run booked it: how long it took is not known well enough to learn from it.
    is_restored: bool,
    /// The neighbours in the worker's list; in a free slot, `after` is the next free one.
    before: Option<PrefillId>,
    after: Option<PrefillId>,
}

/// The prefills of one worker, in order of arrival.
#[derive(Debug, Default)]
struct WorkerPrefills {
    /// The worker that last had a prefill at this place.
    worker: WorkerIndex,
    anchor: Option<PrefillId>,
    last: Option<PrefillId>,
    tokens: u64,
    unmodelled: usize,
    /// By the law of the worker, nanoseconds.
    work_ns: u64,
    since_ns: u64,
    /// When an anchor ended last; 0 = never.
    ended_ns: u64,
    /// Prefills in the list.
    prefills: u32,
    /// The time, by the law of the worker, of the prefills that have ended, microseconds, modulo 2³².
    done_us: u32,
}

/// The prefills of all workers, under the bookings' lock.
#[derive(Debug, Default)]
pub(super) struct Prefills {
    model: PrefillModel,
    /// By the worker's place.
    queues: Vec<WorkerPrefills>,
    /// The slots of all prefills, and the first free one.
    places: Vec<PrefillSlot>,
    free: Option<PrefillId>,
    /// For workers that have some.
    figures: HashMap<WorkerIndex, PrefillFigures>,
    pub(super) laws: PrefillLaws,
}

impl Prefills {
    pub(super) fn new(model: PrefillModel) -> Self {
        Self { model, ..Self::default() }
    }

    /// Prefetches what the begin of a prefill of a worker changes, or the end of this one.
    #[inline]
    pub(super) fn prefetch_to_write(&self, worker: WorkerIndex, ending: Option<PrefillId>) {
        if let Some(queue) = self.queues.get(worker.place()) {
            prefetch_value_to_write(queue);
        }
        if let Some(place) = ending.or(self.free).and_then(|id| self.places.get(id.0 as usize)) {
            prefetch_value_to_write(place);
        }
    }

    /// Adds a prefill of `tokens` after `cached_tokens` behind those of its worker, also those that other routers have
    /// there. Returns its slot.
    pub(super) fn begin(
        &mut self,
        worker: WorkerIndex,
        [tokens, cached_tokens]: [u64; 2],
        others: &OthersLoad,
        now_ns: u64,
    ) -> PrefillId {
        let work_s = self.laws.law_of(worker).prefill_s(tokens as f64, cached_tokens as f64);
        let work_ns = ((work_s * 1e9) as u64).min(PREFILL_WORK_NS_MAX);
        let duration_ns = self.duration_ns(worker, [tokens, cached_tokens], work_ns);
        self.add(worker, Prefill { tokens, duration_ns, cached_tokens, work_ns }, others, now_ns)
    }

    /// The duration by the model of a prefill of these tokens, computed and cached, which takes `work_ns` by the law.
    fn duration_ns(&self, worker: WorkerIndex, [tokens, cached]: [u64; 2], work_ns: u64) -> Option<u64> {
        match self.model {
            PrefillModel::Off => None,
            PrefillModel::Fixed { base_ns, token_ns, cached_token_ns } => {
                let own = self.figures.get(&worker).copied().unwrap_or_default();
                let of_tokens = own.token_ns.unwrap_or(token_ns).saturating_mul(tokens);
                let of_cached = own.cached_token_ns.unwrap_or(cached_token_ns).saturating_mul(cached);
                Some(own.base_ns.unwrap_or(base_ns).saturating_add(of_tokens).saturating_add(of_cached))
            }
            PrefillModel::Learnt => self.laws.is_known(worker).then_some(work_ns),
        }
    }

    /// As [`Prefills::begin`].
    fn add(&mut self, worker: WorkerIndex, prefill: Prefill, others: &OthersLoad, now_ns: u64) -> PrefillId {
        let ahead_s = others.work_beside(self.work(worker), self.ended_ns(worker)).left_s(now_ns);
        if worker.place() >= self.queues.len() {
            self.queues.resize_with(worker.place() + 1, WorkerPrefills::default);
        }
        let queue = &mut self.queues[worker.place()];
        if queue.worker != worker {
            // No reader is left for the backlog of a removed worker; its prefills belong to no list.
            *queue = WorkerPrefills { worker, ..WorkerPrefills::default() };
        }
        let place = PrefillSlot {
            prefill,
            predicted_ns: prefill.work_ns + (ahead_s * 1e9) as u64,
            booked_ns: now_ns,
            began_alone: queue.last.is_none() && !others.has_prefills(),
            is_restored: false,
            before: queue.last,
            after: None,
        };
        let id = match self.free {
            Some(id) => {
                self.free = self.places[id.0 as usize].after;
                self.places[id.0 as usize] = place;
                id
            }
            None => {
                self.places.push(place);
                PrefillId(self.places.len() as u32 - 1)
            }
        };
        match queue.last.replace(id) {
            Some(last) => self.places[last.0 as usize].after = Some(id),
            None => (queue.anchor, queue.since_ns) = (Some(id), now_ns),
        }
        queue.prefills += 1;
        queue.tokens += prefill.tokens;
        queue.work_ns += prefill.work_ns;
        queue.unmodelled += usize::from(prefill.duration_ns.is_none());
        id
    }

    /// Ends a prefill, for whatever reason.
    pub(super) fn end(&mut self, worker: WorkerIndex, id: PrefillId, now_ns: u64) {
        let PrefillSlot { prefill, before, after, .. } = self.places[id.0 as usize];
        self.places[id.0 as usize].after = self.free.replace(id);
        let Some(queue) = self.queues.get_mut(worker.place()).filter(|queue| queue.worker == worker) else { return };
        match before {
            Some(before) => self.places[before.0 as usize].after = after,
            None => queue.anchor = after,
        }
        match after {
            Some(after) => self.places[after.0 as usize].before = before,
            None => queue.last = before,
        }
        queue.prefills -= 1;
        queue.tokens -= prefill.tokens;
        queue.work_ns -= prefill.work_ns;
        queue.done_us = queue.done_us.wrapping_add((prefill.work_ns / 1000) as u32);
        queue.unmodelled -= usize::from(prefill.duration_ns.is_none());
        if before.is_none() {
            (queue.since_ns, queue.ended_ns) = (now_ns, now_ns);
        } else if let Some(duration_ns) = prefill.duration_ns {
            // The worker was busy with this prefill meanwhile, not with the anchor.
            queue.since_ns = now_ns.min(queue.since_ns.saturating_add(duration_ns));
        }
    }

    /// The prefills of a worker, if it has had any.
    fn queue(&self, worker: WorkerIndex) -> Option<&WorkerPrefills> {
        self.queues.get(worker.place()).filter(|queue| queue.worker == worker)
    }

    /// The time of a worker's prefills that have ended, by its law, microseconds, modulo 2³².
    pub(super) fn done_us(&self, worker: WorkerIndex) -> u32 {
        self.queue(worker).map_or(0, |queue| queue.done_us)
    }

    /// When an anchor of a worker ended last; 0 = never.
    pub(super) fn ended_ns(&self, worker: WorkerIndex) -> u64 {
        self.queue(worker).map_or(0, |queue| queue.ended_ns)
    }

    /// What a worker's prefills in progress add to the gauge of this router.
    pub(super) fn gauge(&self, worker: WorkerIndex, now_ns: u64) -> Gauge {
        let Some(queue) = self.queue(worker).filter(|queue| queue.prefills > 0) else { return Gauge::default() };
        let PrefillWork { queued_ns, running_ns, since_ns } = self.work(worker);
        Gauge {
            prefills: queue.prefills,
            prefill_tokens: queue.tokens,
            queued_ns,
            running_ns,
            elapsed_ns: now_ns.saturating_sub(since_ns),
            ..Gauge::default()
        }
    }

    /// Whether a prefill was booked at this time, on a worker without another prefill. Call it before [`Prefills::end`].
    pub(super) fn began_alone_at(&self, id: PrefillId, booked_ns: u64) -> bool {
        let slot = self.places[id.0 as usize];
        slot.began_alone && slot.booked_ns == booked_ns
    }

    /// Learns from a prefill that was reported done, in `took_us` microseconds by the gateway's clock (0 = unknown).
    /// `beside_others`: another router has prefills on the worker. Call it before [`Prefills::end`].
    pub(super) fn learn(
        &mut self,
        (worker, beside_others): (WorkerIndex, bool),
        id: PrefillId,
        took_us: u64,
        now_ns: u64,
    ) {
        let slot = self.places[id.0 as usize];
        let Some(queue) = self.queue(worker).filter(|_| !slot.is_restored) else { return };
        let done = DonePrefill {
            tokens: [slot.prefill.tokens, slot.prefill.cached_tokens],
            since_ns: queue.since_ns.max(slot.booked_ns),
            booked_ns: slot.booked_ns,
            now_ns,
            said_ns: (took_us > 0).then(|| took_us.saturating_mul(1000)),
            work_ns: slot.prefill.work_ns,
            predicted_ns: slot.predicted_ns,
            began_alone: slot.began_alone,
            ended_alone: queue.anchor == queue.last,
            beside_others,
        };
        self.laws.learn(worker, &done);
    }

    /// Notes that an earlier run booked a prefill.
    pub(super) fn note_restored(&mut self, id: PrefillId) {
        self.places[id.0 as usize].is_restored = true;
    }

    /// Notes since when the first prefill of a worker has been running, if an earlier run booked it.
    pub(super) fn run_since(&mut self, worker: WorkerIndex, since_ns: u64) {
        if let Some(queue) = self.queues.get_mut(worker.place()).filter(|queue| queue.worker == worker)
            && queue.anchor.is_some_and(|anchor| self.places[anchor.0 as usize].is_restored)
        {
            queue.since_ns = since_ns;
        }
    }

    /// Sets a worker's figures for later prefills.
    pub(super) fn set_figures(&mut self, worker: WorkerIndex, figures: PrefillFigures) {
        if figures == PrefillFigures::default() {
            self.figures.remove(&worker);
        } else {
            self.figures.insert(worker, figures);
        }
    }

    /// Forgets a worker's class and figures.
    pub(super) fn forget(&mut self, worker: WorkerIndex) {
        self.laws.forget(worker);
        self.figures.remove(&worker);
    }

    /// The predicted time of a prefill in progress, nanoseconds; 0 = there is none.
    pub(super) fn work_ns(&self, id: Option<PrefillId>) -> u64 {
        id.and_then(|id| self.places.get(id.0 as usize)).map_or(0, |slot| slot.prefill.work_ns)
    }

    /// What a worker's prefills add to its load.
    pub(super) fn load_of(&self, worker: WorkerIndex) -> PrefillLoad {
        PrefillLoad {
            backlog: self.backlog(worker),
            work: self.work(worker),
            law: self.laws.law_of(worker),
            ended_ns: self.ended_ns(worker),
        }
    }

    /// A worker's backlog.
    fn backlog(&self, worker: WorkerIndex) -> Backlog {
        let Some((queue, anchor)) = self.queue(worker).and_then(|queue| Some((queue, queue.anchor?))) else {
            return Backlog::default();
        };
        let anchor = self.places[anchor.0 as usize].prefill;
        Backlog {
            tokens: queue.tokens,
            anchor_tokens: anchor.tokens,
            anchor_ns: anchor.duration_ns,
            since_ns: queue.since_ns,
            all_modelled: queue.unmodelled == 0,
        }
    }

    /// The predicted time of a worker's prefills in progress.
    fn work(&self, worker: WorkerIndex) -> PrefillWork {
        let Some((queue, anchor)) = self.queue(worker).and_then(|queue| Some((queue, queue.anchor?))) else {
            return PrefillWork::default();
        };
        let running_ns = self.places[anchor.0 as usize].prefill.work_ns;
        PrefillWork { queued_ns: queue.work_ns, running_ns, since_ns: queue.since_ns }
    }

    /// Whether no prefill is in progress.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.anchor.is_none())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::Worker;
    use crate::limits::PREFILL_SAMPLES_MIN;

    const W: WorkerIndex = WorkerIndex(3);
    const V: WorkerIndex = WorkerIndex(4);

    /// The documented rules over a plain list.
    #[derive(Default)]
    struct ReferenceBacklog {
        /// Slot, tokens, duration.
        active: Vec<(PrefillId, u64, Option<u64>)>,
        since: u64,
    }

    impl ReferenceBacklog {
        fn add(&mut self, id: PrefillId, tokens: u64, duration: Option<u64>, now: u64) {
            if self.active.is_empty() {
                self.since = now;
            }
            self.active.push((id, tokens, duration));
        }

        fn end(&mut self, at: usize, now: u64) -> PrefillId {
            let (id, _, duration) = self.active.remove(at);
            match duration {
                _ if at == 0 => self.since = now,
                Some(duration) => self.since = now.min(self.since + duration),
                None => {}
            }
            id
        }

        fn at(&self, now: u64) -> u64 {
            let full: u64 = self.active.iter().map(|(_, tokens, _)| tokens).sum();
            let Some(&(_, tokens, duration)) = self.active.first() else { return 0 };
            let elapsed = now.saturating_sub(self.since);
            if self.active.iter().all(|(.., duration)| duration.is_some()) {
                let duration = duration.unwrap_or(0);
                let done = (tokens * elapsed).checked_div(duration).unwrap_or(tokens);
                return full.saturating_sub(done);
            }
            let left = match duration {
                None => tokens,
                Some(0) => 0,
                Some(duration) if elapsed >= duration => 0,
                Some(duration) => (tokens * (duration - elapsed)).div_ceil(duration),
            };
            full - tokens + left
        }
    }

    /// Lets time pass, then adds a prefill with tokens and duration, or ends the nth.
    fn step() -> impl Strategy<Value = (Option<(u64, Option<u64>)>, usize, u64)> {
        let duration = prop_oneof![2 => (0..5000_u64).prop_map(Some), 1 => Just(None)];
        (prop::option::of((1..4000_u64, duration)), any::<usize>(), 0..3000_u64)
    }

    proptest! {
        #[test]
        fn a_backlog_follows_the_documented_rules(steps in prop::collection::vec(step(), 1..80)) {
            let (mut prefills, mut plain, mut now) = (Prefills::default(), ReferenceBacklog::default(), 0);
            for (add, nth, passes) in steps {
                now += passes;
                match add {
                    Some((tokens, duration_ns)) => {
                        let prefill = Prefill { tokens, duration_ns, cached_tokens: 0, work_ns: 0 };
                        let id = prefills.add(W, prefill, &OthersLoad::default(), now);
                        plain.add(id, tokens, duration_ns, now);
                    }
                    None if plain.active.is_empty() => {}
                    None => prefills.end(W, plain.end(nth % plain.active.len(), now), now),
                }
                for later in [0, 1, 700, 9000] {
                    prop_assert_eq!(prefills.backlog(W).at(now + later), plain.at(now + later));
                }
            }
            while !plain.active.is_empty() {
                prefills.end(W, plain.end(0, now), now);
            }
            prop_assert!(prefills.is_idle());
            prop_assert_eq!(prefills.backlog(W), Backlog::default());
        }
    }

    #[test]
    fn prefills_of_the_previous_owner_of_a_place_do_not_count() {
        let (left, here) = (WorkerIndex::at(3, 0), WorkerIndex::at(3, 1));
        let prefill = Prefill { tokens: 10, duration_ns: None, cached_tokens: 0, work_ns: 0 };
        let mut prefills = Prefills::default();
        let of_left = [0, 1, 2].map(|now| prefills.add(left, prefill, &OthersLoad::default(), now));
        prefills.end(left, of_left[0], 3);
        assert_eq!((prefills.backlog(left).tokens, prefills.backlog(here)), (20, Backlog::default()));
        let of_here = [4, 5].map(|now| prefills.add(here, prefill, &OthersLoad::default(), now));
        // The other worker's remaining prefills end, and their slots are reused.
        prefills.end(left, of_left[2], 6);
        let again = prefills.add(here, prefill, &OthersLoad::default(), 7);
        prefills.end(left, of_left[1], 8);
        assert_eq!((prefills.backlog(here).tokens, prefills.backlog(here).since_ns), (30, 4));
        assert_eq!(prefills.backlog(left), Backlog::default());
        [of_here[1], again, of_here[0]].into_iter().for_each(|id| prefills.end(here, id, 9));
        assert!(prefills.is_idle());
    }

    #[test]
    fn a_fixed_prefill_takes_what_its_tokens_take() {
        let model = PrefillModel::Fixed { base_ns: 5, token_ns: 10, cached_token_ns: 1 };
        assert_eq!(Prefills::new(model).duration_ns(W, [100, 7], 0), Some(1012));
        // One worker has figures of its own.
        let mut prefills = Prefills::new(model);
        prefills.set_figures(W, PrefillFigures { token_ns: Some(20), ..PrefillFigures::default() });
        assert_eq!(prefills.duration_ns(W, [100, 7], 0), Some(2012));
        assert_eq!(prefills.duration_ns(V, [100, 7], 0), Some(1012));
        let all = PrefillFigures { base_ns: Some(0), token_ns: Some(1), cached_token_ns: Some(2) };
        prefills.set_figures(W, all);
        assert_eq!(prefills.duration_ns(W, [100, 7], 0), Some(114));
        prefills.forget(W);
        assert_eq!(prefills.duration_ns(W, [100, 7], 0), Some(1012), "its successor in the place has none");
        assert_eq!(Prefills::new(PrefillModel::Off).duration_ns(W, [100, 7], 1), None);
    }

    #[test]
    fn a_learnt_prefill_takes_what_the_law_of_its_worker_says() {
        let duration = |prefills: &Prefills, id: PrefillId| prefills.places[id.0 as usize].prefill.duration_ns;
        let mut prefills = Prefills::new(PrefillModel::Learnt);
        prefills.laws.set_class(W, Worker::new(1, 0), "c", None);
        let mut now = 0;
        for done in 0..20 {
            let id = prefills.begin(W, [4000, 0], &OthersLoad::default(), now);
            assert_eq!(duration(&prefills, id).is_some(), done >= PREFILL_SAMPLES_MIN, "after {done}");
            now += 4000 * 20_000;
            prefills.learn((W, false), id, 0, now);
            prefills.end(W, id, now);
            prefills.laws.publish();
        }
        let id = prefills.begin(W, [4000, 0], &OthersLoad::default(), now);
        let ns = duration(&prefills, id).expect("it was learnt");
        assert!((76_000_000..84_000_000).contains(&ns), "{ns}");
        assert_eq!(prefills.work(W).running_ns, ns, "one law");
        prefills.laws.set_class(V, Worker::new(2, 0), "of a preset", Some(PrefillLaw::default()));
        let id = prefills.begin(V, [4000, 0], &OthersLoad::default(), now);
        assert!(duration(&prefills, id).is_some(), "a preset is believed at once");
        prefills.forget(W);
        let id = prefills.begin(W, [4000, 0], &OthersLoad::default(), now);
        assert_eq!(duration(&prefills, id), None);
    }
}
