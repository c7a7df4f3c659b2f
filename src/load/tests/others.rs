//! Gauges of other routers beside own bookings: against loads that never heard of another router, and against one router
//! with the bookings of two.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::*;
use super::{MS, NOTHING, by_id};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{GAUGES_DROPPED_PER_LOCK_MAX, ORIGINS_MAX, WORKERS_MAX};

const SPACE: SpaceId = SpaceId(0);
const PLACES: u16 = 3;
const ORIGINS: u8 = 3;
const AGE_MS: u64 = 4000;
const SECOND_NS: u64 = 1_000_000_000;

/// One thing that happens; requests are named by a small number, and workers by their places.
#[derive(Clone, Debug)]
enum Step {
    Book {
        request: u8,
        attempt: u32,
        place: u16,
        blocks: Vec<u64>,
        shared: bool,
        tokens: u64,
    },
    FirstToken {
        request: u8,
        attempt: u32,
    },
    Progress {
        request: u8,
        attempt: u32,
        tokens: u32,
    },
    Served {
        request: u8,
        attempt: u32,
        place: u16,
    },
    Free {
        request: u8,
        attempt: u32,
    },
    Fail {
        place: u16,
    },
    Set {
        origin: u8,
        place: u16,
        gauge: Gauge,
    },
    Drop {
        origin: u8,
    },
    /// The worker at a place leaves, and another comes.
    Replace {
        place: u16,
    },
    Pass {
        ms: u64,
    },
}

fn gauge() -> impl Strategy<Value = Gauge> {
    let counts = (0..20_u32, 0..3_u32, 0..100_000_u64, 0..1_u64 << 24);
    let times = (0..5 * SECOND_NS, 0..5 * SECOND_NS, 0..3 * SECOND_NS);
    let share = prop_oneof![Just(0.0_f32), 0.0..1.0_f32];
    let usual =
        (counts, times, share).prop_map(|((requests, prefills, prefill_tokens, decode_parts), times, share)| {
            let (queued_ns, running_ns, elapsed_ns) = times;
            let recent_share = share;
            Gauge { requests, prefills, prefill_tokens, decode_parts, queued_ns, running_ns, elapsed_ns, recent_share }
        });
    let most = Gauge {
        requests: u32::MAX,
        prefills: u32::MAX,
        prefill_tokens: u64::MAX,
        decode_parts: u64::MAX,
        queued_ns: u64::MAX,
        running_ns: u64::MAX,
        elapsed_ns: u64::MAX,
        recent_share: f32::INFINITY,
    };
    let hostile = prop_oneof![Just(most), Just(Gauge { recent_share: f32::NAN, ..most })];
    prop_oneof![8 => usual, 1 => Just(Gauge::default()), 1 => hostile]
}

fn step() -> impl Strategy<Value = Step> {
    let named = || (0..10_u8, 0..3_u32);
    let blocks = prop::collection::vec((0..2_u64, 1..6_usize), 0..4);
    let blocks = blocks.prop_map(|runs| runs.into_iter().flat_map(|(block, len)| vec![block; len]).collect());
    let book = (named(), 0..PLACES, blocks, any::<bool>(), 0..20_000_u64);
    prop_oneof![
        8 => book.prop_map(|((request, attempt), place, blocks, shared, tokens)| {
            Step::Book { request, attempt, place, blocks, shared, tokens }
        }),
        3 => named().prop_map(|(request, attempt)| Step::FirstToken { request, attempt }),
        2 => (named(), 0..300_u32).prop_map(|((request, attempt), tokens)| Step::Progress { request, attempt, tokens }),
        2 => (named(), 0..PLACES).prop_map(|((request, attempt), place)| Step::Served { request, attempt, place }),
        3 => named().prop_map(|(request, attempt)| Step::Free { request, attempt }),
        1 => (0..PLACES).prop_map(|place| Step::Fail { place }),
        8 => (0..ORIGINS, 0..PLACES, gauge()).prop_map(|(origin, place, gauge)| Step::Set { origin, place, gauge }),
        1 => (0..ORIGINS).prop_map(|origin| Step::Drop { origin }),
        1 => (0..PLACES).prop_map(|place| Step::Replace { place }),
        3 => (0..400_u64).prop_map(|ms| Step::Pass { ms }),
    ]
}

fn config(model: PrefillModel) -> LoadsConfig {
    LoadsConfig { age_ms_max: AGE_MS, prefill: model, track_output_blocks: true, ..LoadsConfig::default() }
}

/// Loads with others' gauges, and loads with the same bookings that never hear of another router.
struct Model {
    loads: Loads,
    unaware: Loads,
    sessions: [SessionId; 2],
    workers: Vec<WorkerIndex>,
    /// By origin and place, with the time when it was set.
    gauges: BTreeMap<(u8, u16), (Gauge, u64)>,
    now_ns: u64,
}

impl Model {
    fn new(model: PrefillModel) -> Self {
        let [loads, unaware] = [0, 1].map(|_| Loads::new(usize::from(PLACES), config(model)));
        let sessions = [&loads, &unaware].map(|loads| loads.open_session(None, 7).expect("room"));
        let workers = (0..PLACES).map(|place| WorkerIndex::at(place, 0)).collect();
        Self { loads, unaware, sessions, workers, gauges: BTreeMap::new(), now_ns: 10 * SECOND_NS }
    }

    /// Does the same to both, and compares the outcomes.
    fn both<T: PartialEq + std::fmt::Debug>(&self, act: impl Fn(&Loads, SessionId) -> T) -> T {
        let [of_loads, of_unaware] =
            [(&self.loads, 0), (&self.unaware, 1)].map(|(loads, at)| act(loads, self.sessions[at]));
        assert_eq!(of_loads, of_unaware, "others change nothing but loads");
        of_loads
    }

    fn apply(&mut self, step: &Step) {
        let now_ns = self.now_ns;
        let name = |request: u8| format!("r{request}");
        match step {
            Step::Book { request, attempt, place, blocks, shared, tokens } => {
                let locals: Vec<LocalHash> = blocks.iter().map(|block| LocalHash(*block)).collect();
                let alone = PromptBlocks::Alone(blocks.len() as u64);
                let demand = Demand {
                    prefill_tokens: *tokens,
                    cached_tokens: 3,
                    blocks: if *shared { PromptBlocks::Shared(&locals) } else { alone },
                    expected_output_tokens: if tokens.is_multiple_of(2) { 100 } else { 0 },
                    ..NOTHING
                };
                let worker = self.workers[usize::from(*place)];
                self.both(|loads, session| {
                    let booked = loads.book(session, &name(*request), *attempt, worker, demand, now_ns);
                    booked.map_err(|error| error.kind())
                })
                .ok();
            }
            Step::FirstToken { request, attempt } => {
                self.both(|loads, session| {
                    loads.prefill_complete(session, by_id(&name(*request), *attempt), 0, now_ns)
                });
            }
            Step::Progress { request, attempt, tokens } => {
                self.both(|loads, session| loads.output_progress(session, by_id(&name(*request), *attempt), *tokens));
            }
            Step::Served { request, attempt, place } => {
                let to = (SPACE, self.workers[usize::from(*place)]);
                self.both(|loads, session| {
                    loads.served(session, by_id(&name(*request), *attempt), to, now_ns).map_err(|error| error.kind())
                })
                .ok();
            }
            Step::Free { request, attempt } => {
                self.both(|loads, session| loads.free(session, by_id(&name(*request), *attempt), now_ns));
            }
            Step::Fail { place } => {
                let worker = self.workers[usize::from(*place)];
                self.both(|loads, session| {
                    loads.report_failure(Reporter { session, space: SPACE, workers: 3 }, worker, now_ns)
                })
                .ok();
            }
            Step::Set { origin, place, gauge } => self.set(*origin, *place, *gauge),
            Step::Drop { origin } => self.drop_gauges(*origin),
            Step::Replace { place } => self.replace(*place),
            Step::Pass { ms } => {
                self.now_ns += ms * MS;
                let now_ns = self.now_ns;
                while self.both(|loads, _| loads.expire(now_ns, 2).bookings()) > 0 {}
            }
        }
    }

    fn set(&mut self, origin: u8, place: u16, gauge: Gauge) {
        let worker = self.workers[usize::from(place)];
        assert_ne!(self.loads.set_gauge(OriginPlace(origin), worker, gauge, self.now_ns), GaugeEffect::Refused);
        let gauge = gauge.bounded();
        if gauge.is_zero() {
            self.gauges.remove(&(origin, place));
        } else {
            self.gauges.insert((origin, place), (gauge, self.now_ns));
        }
    }

    fn drop_gauges(&mut self, origin: u8) {
        let had_any = self.gauges.iter().any(|((of, _), gauge)| *of == origin && gauge.0.requests > 0);
        let effect = self.loads.drop_gauges(OriginPlace(origin));
        assert!(!had_any || effect == GaugeEffect::MadeRoom);
        self.gauges.retain(|(of, _), _| *of != origin);
    }

    fn replace(&mut self, place: u16) {
        let leaver = self.workers[usize::from(place)];
        let next = WorkerIndex::at(place, leaver.generation() + 1);
        self.both(|loads, _| {
            loads.leave(leaver);
            loads.admit(next);
            let mut from = Some(0);
            while let Some(at) = from {
                from = loads.end_of(leaver, at, 3).next;
            }
        });
        let late = Gauge { requests: 1, ..Gauge::default() };
        assert_eq!(self.loads.set_gauge(OriginPlace(0), leaver, late, self.now_ns), GaugeEffect::Refused);
        self.gauges.retain(|(_, of), _| *of != place);
        self.workers[usize::from(place)] = next;
    }

    fn check(&self) {
        for (worker, place) in self.workers.iter().zip(0..) {
            let told: Vec<_> = self.gauges.iter().filter(|((_, of), _)| *of == place).collect();
            let mut listed = self.loads.gauges_of(*worker);
            listed.sort_by_key(|(origin, ..)| *origin);
            let expected: Vec<_> =
                told.iter().map(|((origin, _), (gauge, at))| (OriginPlace(*origin), *gauge, *at)).collect();
            assert_eq!(listed, expected);
            let gauges: Vec<(Gauge, u64)> = told.into_iter().map(|(_, told)| *told).collect();
            self.check_worker(*worker, &gauges);
        }
        assert_eq!(self.loads.live(), self.unaware.live());
    }

    fn check_worker(&self, worker: WorkerIndex, gauges: &[(Gauge, u64)]) {
        let own = self.both(|loads, _| loads.own_gauge(worker, self.now_ns));
        let (load, alone) = (self.loads.read(worker), self.unaware.read(worker));
        let sum = |of: fn(&Gauge) -> u64| gauges.iter().map(|(gauge, _)| of(gauge)).sum::<u64>();
        assert_eq!(load.requests, alone.requests + sum(|gauge| u64::from(gauge.requests)));
        assert_eq!(load.prefill_tokens, alone.prefill_tokens + sum(|gauge| gauge.prefill_tokens));
        assert_eq!(self.loads.decode_parts(worker), own.decode_parts + sum(|gauge| gauge.decode_parts));
        assert_eq!((own.requests.into(), own.prefill_tokens), (alone.requests, alone.prefill_tokens));
        assert_eq!(self.unaware.decode_parts(worker), own.decode_parts);
        assert_eq!((load.law, load.back_off_until_ns, load.engine), (alone.law, alone.back_off_until_ns, alone.engine));
        assert_eq!((load.recent.decode_s, load.recent.decodes), (alone.recent.decode_s, alone.recent.decodes));
        self.check_work(&load.work, &alone.work, gauges);
        self.check_share(&load.recent, &alone.recent, gauges);
        let later_ns = self.now_ns + SECOND_NS;
        let [tokens, own_tokens] = [&self.loads, &self.unaware].map(|of| of.read_at(worker, later_ns).prefill_tokens);
        assert!(tokens >= own_tokens + sum(|gauge| gauge.prefill_tokens), "those of others count in full");
    }

    /// A newcomer waits at least as long as by any one router's bookings, and at most for all that is queued.
    fn check_work(&self, work: &PrefillWork, own: &PrefillWork, gauges: &[(Gauge, u64)]) {
        assert_eq!(work.queued_ns, own.queued_ns + gauges.iter().map(|(gauge, _)| gauge.queued_ns).sum::<u64>());
        let others = gauges.iter().map(|(gauge, at_ns)| PrefillWork {
            queued_ns: gauge.queued_ns,
            running_ns: gauge.running_ns,
            since_ns: at_ns.saturating_sub(gauge.elapsed_ns),
        });
        let works: Vec<PrefillWork> = others.chain([*own]).collect();
        for later_ns in [0, 1, 300 * MS, 3 * SECOND_NS, 100 * SECOND_NS] {
            let at_ns = self.now_ns + later_ns;
            let longest_s = works.iter().map(|work| work.left_s(at_ns)).fold(0.0, f64::max);
            let left_s = work.left_s(at_ns);
            assert!(left_s >= longest_s && left_s <= work.queued_ns as f64 * 1e-9, "{work:?} of {works:?}");
        }
        let runs = works.iter().any(|of| of.running_ns == work.running_ns && of.since_ns <= work.since_ns);
        assert!(runs, "one of those that run: {work:?} of {works:?}");
    }

    /// Shares add up. They are forgotten a little sooner where one is counted on from the time of another.
    fn check_share(&self, recent: &RecentWork, own: &RecentWork, gauges: &[(Gauge, u64)]) {
        let now_ms = recent_ms(self.now_ns);
        let others = gauges.iter().map(|(gauge, at_ns)| RecentWork {
            prefill_share: gauge.recent_share,
            at_ms: recent_ms(*at_ns),
            ..RecentWork::default()
        });
        let shares: Vec<f64> = others.chain([*own]).map(|of| of.prefill_share_at(now_ms)).collect();
        let (sum, share): (f64, f64) = (shares.iter().sum(), recent.prefill_share_at(now_ms));
        let is_near = share <= sum * 1.0001 && share >= 0.6 * sum.min(1.0);
        assert!(is_near, "{share} instead of {sum}");
    }

    /// Without other routers nothing is left of them.
    fn end(&mut self) {
        (0..ORIGINS).for_each(|origin| self.drop_gauges(origin));
        for worker in &self.workers {
            let load = |loads: &Loads| Load { version: 0, ..loads.read(*worker) };
            self.both(|loads, _| load(loads));
            let later_ns = self.now_ns + SECOND_NS;
            self.both(|loads, _| Load { version: 0, ..loads.read_at(*worker, later_ns) });
            self.both(|loads, _| loads.decode_parts(*worker));
        }
    }
}

proptest! {
    #[test]
    fn a_load_is_the_sum_of_own_bookings_and_of_what_others_said(
        steps in prop::collection::vec(step(), 1..150), model in 0..3_usize,
    ) {
        let fixed = PrefillModel::Fixed { base_ns: 1000, token_ns: 100_000, cached_token_ns: 10 };
        let mut model = Model::new([PrefillModel::Off, fixed, PrefillModel::Learnt][model]);
        for step in &steps {
            model.apply(step);
            model.check();
        }
        model.end();
    }

    #[test]
    fn two_routers_that_tell_each_other_know_what_one_would(
        steps in prop::collection::vec((0..2_usize, 0..4_u8, 0..8_usize, 1..20_000_u64, 0..400_u64), 1..100),
    ) {
        let mut routers = TwoRouters::new();
        for (router, kind, nth, tokens, ms) in steps {
            routers.now_ns += ms * MS;
            match kind {
                0 | 1 => routers.book(router, tokens),
                2 => routers.first_token(nth),
                _ => routers.free(nth),
            }
            let most_s = routers.running_s_max();
            for (left_s, one_s) in routers.left_s() {
                prop_assert!((left_s - one_s).abs() <= most_s + 1e-9, "{left_s} instead of {one_s}, of {most_s}");
            }
        }
    }

    /// Prompts of one length, each prefill in the order of the bookings and long enough to be told apart: the routers know
    /// exactly what one router would.
    #[test]
    fn two_routers_know_when_the_running_prefill_began(
        steps in prop::collection::vec((0..2_usize, any::<bool>(), 51..400_u64), 1..100),
    ) {
        let mut routers = TwoRouters::new();
        for (router, books, ms) in steps {
            routers.now_ns += ms * MS;
            if books { routers.book(router, 8000) } else { routers.first_token(0) }
            for (left_s, one_s) in routers.left_s() {
                prop_assert!((left_s - one_s).abs() < 1e-9, "{left_s} instead of {one_s}");
            }
        }
    }
}

/// Two routers that tell each other of a worker at once, and one that has the bookings of both.
struct TwoRouters {
    routers: [Loads; 2],
    one: Loads,
    sessions: [SessionId; 3],
    /// Those in flight, in order: the router, the name, and whether it prefills.
    live: Vec<(usize, String, bool)>,
    names: usize,
    now_ns: u64,
}

const W: WorkerIndex = WorkerIndex(0);

impl TwoRouters {
    fn new() -> Self {
        let [first, second, one] = [0; 3].map(|_| Loads::new(1, LoadsConfig::default()));
        let sessions = [&first, &second, &one].map(|loads| loads.open_session(None, 7).expect("room"));
        Self { routers: [first, second], one, sessions, live: Vec::new(), names: 0, now_ns: 100 * SECOND_NS }
    }

    /// The router, its session, and those of the one router.
    fn of(&self, router: usize) -> [(&Loads, SessionId); 2] {
        [(&self.routers[router], self.sessions[router]), (&self.one, self.sessions[2])]
    }

    fn tell(&self, router: usize) {
        let gauge = self.routers[router].own_gauge(W, self.now_ns);
        assert_ne!(self.routers[1 - router].set_gauge(OriginPlace(0), W, gauge, self.now_ns), GaugeEffect::Refused);
        let [one, first, second] = [&self.one, &self.routers[0], &self.routers[1]].map(|loads| {
            let load = loads.read(W);
            (load.requests, load.prefill_tokens, load.decode_blocks, load.work.queued_ns)
        });
        assert_eq!((first, second), (one, one));
    }

    fn book(&mut self, router: usize, tokens: u64) {
        self.names += 1;
        let name = format!("r{}", self.names);
        let demand = Demand { prefill_tokens: tokens, blocks: PromptBlocks::Alone(tokens / 16), ..NOTHING };
        for (loads, session) in self.of(router) {
            loads.book(session, &name, 0, W, demand, self.now_ns).expect("room");
        }
        self.live.push((router, name, true));
        self.tell(router);
    }

    /// The first token of the nth request in flight that prefills.
    fn first_token(&mut self, nth: usize) {
        let now_ns = self.now_ns;
        let Some((router, name, prefills)) = self.live.iter_mut().filter(|live| live.2).nth(nth) else { return };
        *prefills = false;
        let (router, name) = (*router, name.clone());
        for (loads, session) in self.of(router) {
            assert_eq!(loads.prefill_complete(session, by_id(&name, 0), 0, now_ns), BookingOutcome::Applied);
        }
        self.tell(router);
    }

    fn free(&mut self, nth: usize) {
        if nth >= self.live.len() {
            return;
        }
        let (router, name, _) = self.live.remove(nth);
        for (loads, session) in self.of(router) {
            assert_eq!(loads.free(session, by_id(&name, 0), self.now_ns), BookingOutcome::Applied);
        }
        self.tell(router);
    }

    fn running_s_max(&self) -> f64 {
        let of = |loads: &Loads| loads.own_gauge(W, self.now_ns).running_ns as f64 * 1e-9;
        self.routers.iter().map(of).fold(0.0, f64::max)
    }

    /// What is left by each router at some times, and by the one router.
    fn left_s(&self) -> impl Iterator<Item = (f64, f64)> {
        let later_ns = [0, 10 * MS, 200 * MS, 2 * SECOND_NS];
        later_ns.into_iter().flat_map(move |later_ns| {
            let left_s = move |loads: &Loads| loads.read(W).work.left_s(self.now_ns + later_ns);
            self.routers.iter().map(move |router| (left_s(router), left_s(&self.one)))
        })
    }
}

/// Loads with two workers of one class, and a session.
fn class_of_two() -> (Loads, SessionId) {
    let loads = Loads::new(2, LoadsConfig::default());
    for worker in 0..2 {
        loads.set_prefill_class(WorkerIndex(worker), Worker::new(u64::from(worker) + 1, 0), "c", None);
    }
    let session = loads.open_session(None, 7).expect("room");
    (loads, session)
}

#[test]
fn no_law_is_learnt_from_prefills_that_began_beside_those_of_others() {
    let other = Gauge { requests: 1, prefills: 1, prefill_tokens: 10, queued_ns: 5, running_ns: 5, ..Gauge::default() };
    let idle = Gauge { requests: 1, ..Gauge::default() };
    // Each prefill takes much longer than predicted, for the other router's runs before it.
    let learn = |before: Gauge, meanwhile: Gauge| {
        let (loads, session) = class_of_two();
        let mut now_ns = SECOND_NS;
        for at in 0..20 {
            set(&loads, OriginPlace(1), W, before, now_ns);
            // The second begins behind the first; their stretch ends with it.
            for name in ["a", "b"] {
                loads.book(session, name, at, W, Demand { prefill_tokens: 4000, ..NOTHING }, now_ns).expect("room");
            }
            now_ns += SECOND_NS;
            set(&loads, OriginPlace(1), W, meanwhile, now_ns);
            for name in ["a", "b"] {
                now_ns += SECOND_NS;
                loads.prefill_complete(session, by_id(name, at), 0, now_ns);
                loads.free(session, by_id(name, at), now_ns);
            }
        }
        (loads.prefill_classes()[0].samples, loads.read(W).law != loads.read(WorkerIndex(1)).law)
    };
    assert_eq!(learn(idle, idle), (20, true), "without others' prefills: the law and the slowness");
    assert_eq!(learn(other, other), (0, true), "the slowness, from the predictions of single prefills");
    assert_eq!(learn(idle, other), (20, true), "it began alone");
    assert_eq!(learn(other, idle).0, 0, "it did not begin alone");
}

#[test]
fn a_prediction_counts_what_others_have_queued() {
    let (loads, session) = class_of_two();
    let queued_ns = 3 * SECOND_NS;
    let gauge = Gauge { requests: 2, prefills: 2, prefill_tokens: 9000, queued_ns, ..Gauge::default() };
    set(&loads, OriginPlace(0), W, gauge, SECOND_NS);
    loads.book(session, "r", 0, W, Demand { prefill_tokens: 4000, ..NOTHING }, SECOND_NS).expect("room");
    let own_s = loads.own_gauge(W, SECOND_NS).queued_ns as f64 * 1e-9;
    loads.prefill_complete(session, by_id("r", 0), 0, 5 * SECOND_NS);
    assert!((loads.prefill_classes()[0].predicted_s - 3.0 - own_s).abs() < 1e-6);
}

#[test]
fn a_gauge_that_comes_again_changes_nothing_and_a_change_is_logged() {
    let loads = Loads::new(2, LoadsConfig::default());
    let (mut seen, mut places) = (loads.changes_seen(), Vec::new());
    let gauge = Gauge { requests: 3, recent_share: 0.5, ..Gauge::default() };
    assert_eq!(loads.set_gauge(OriginPlace(0), WorkerIndex(1), gauge, SECOND_NS), GaugeEffect::Counted);
    assert!(loads.changed_since(&mut seen, &mut places));
    assert_eq!(places, [1]);
    assert_eq!(
        loads.set_gauge(OriginPlace(0), WorkerIndex(1), gauge, SECOND_NS),
        GaugeEffect::Counted,
        "it comes again"
    );
    assert_eq!(loads.drop_gauges(OriginPlace(1)), GaugeEffect::Counted, "of a router that said nothing");
    assert!(loads.changed_since(&mut seen, &mut places));
    assert_eq!(places, [1]);
    assert_eq!(loads.drop_gauges(OriginPlace(0)), GaugeEffect::MadeRoom);
    assert!(loads.changed_since(&mut seen, &mut places));
    assert_eq!((places, loads.read(WorkerIndex(1)).requests), (vec![1, 1], 0));
}

#[test]
fn a_router_is_dropped_wholly_however_many_workers_it_has() {
    let workers = 2 * GAUGES_DROPPED_PER_LOCK_MAX as u32 + 1;
    let loads = Loads::new(workers as usize, LoadsConfig::default());
    let gauge = Gauge { requests: 3, ..Gauge::default() };
    for origin in [0, 1] {
        (0..workers).for_each(|worker| set(&loads, OriginPlace(origin), WorkerIndex(worker), gauge, SECOND_NS));
    }
    assert_eq!(loads.drop_gauges(OriginPlace(0)), GaugeEffect::MadeRoom);
    set(&loads, OriginPlace(0), WorkerIndex(workers - 1), gauge, SECOND_NS);
    let requests: Vec<u64> = (0..workers).map(|worker| loads.read(WorkerIndex(worker)).requests).collect();
    assert!(requests[..requests.len() - 1].iter().all(|requests| *requests == 3), "of the other router: {requests:?}");
    assert_eq!(requests.last(), Some(&6), "what it says anew counts");
}

#[test]
fn a_gauge_of_no_place_or_no_worker_is_refused() {
    let (loads, gauge) = (Loads::new(1, LoadsConfig::default()), Gauge { requests: 1, ..Gauge::default() });
    let beyond = OriginPlace(ORIGINS_MAX as u8);
    assert_eq!(loads.set_gauge(beyond, W, gauge, 0), GaugeEffect::Refused);
    assert_eq!(loads.set_gauge(OriginPlace(0), WorkerIndex(1), gauge, 0), GaugeEffect::Refused);
    assert_eq!(loads.drop_gauges(beyond), GaugeEffect::Counted);
    (0..ORIGINS_MAX as u8).for_each(|origin| set(&loads, OriginPlace(origin), W, gauge, 0));
    assert_eq!(loads.read(W).requests, ORIGINS_MAX as u64);
    loads.leave(W);
    assert!(loads.gauges_of(W).is_empty() && loads.own_gauge(W, 0).is_zero());
    loads.admit(W);
    assert_eq!((loads.read(W).requests, loads.gauges_of(W)), (0, Vec::new()));
}

#[test]
fn a_slow_worker_is_found_although_another_router_always_prefills_there() {
    let routers = [class_of_two(), class_of_two()];
    let tell = |from: usize, now_ns: u64| {
        let gauge = routers[from].0.own_gauge(W, now_ns);
        set(&routers[1 - from].0, OriginPlace(0), W, gauge, now_ns);
    };
    let name = |at: u32| format!("r{at}");
    let prefill_s = |loads: &Loads, worker: u32| loads.read(WorkerIndex(worker)).law.prefill_s(4000.0, 0.0);
    // The engine prefills in the order of the bookings, and takes twice as long as predicted at first. It always has
    // three prompts, and never those of one router alone.
    let (took_ns, mut now_ns) = ((2e9 * prefill_s(&routers[0].0, 0)) as u64, SECOND_NS);
    for at in 0..1000_u32 {
        if let Some(done) = at.checked_sub(3) {
            now_ns += took_ns;
            let (loads, session) = &routers[done as usize % 2];
            assert_eq!(loads.prefill_complete(*session, by_id(&name(done), 0), 0, now_ns), BookingOutcome::Applied);
            loads.free(*session, by_id(&name(done), 0), now_ns);
            tell(done as usize % 2, now_ns);
        }
        let (loads, session) = &routers[at as usize % 2];
        loads.book(*session, &name(at), 0, W, Demand { prefill_tokens: 4000, ..NOTHING }, now_ns).expect("room");
        tell(at as usize % 2, now_ns);
    }
    for (loads, _) in &routers {
        let slowness = prefill_s(loads, 0) / prefill_s(loads, 1);
        assert!((1.8..2.2).contains(&slowness), "{slowness}");
    }
}

#[test]
fn a_worker_that_was_idle_for_weeks_has_no_recent_prefills() {
    let (loads, session) = class_of_two();
    loads.book(session, "r", 0, W, Demand { prefill_tokens: 50_000, ..NOTHING }, SECOND_NS).expect("room");
    loads.free(session, by_id("r", 0), 2 * SECOND_NS);
    let share = |now_ns: u64| loads.read(W).recent.prefill_share_at(recent_ms(now_ns));
    assert!(share(2 * SECOND_NS) > 0.01);
    loads.expire(600 * SECOND_NS, 1);
    assert!(loads.read(W).recent.prefill_share > 0.01, "it still fades");
    // The daemon looks every second, at some workers each time.
    let mut changes = loads.changes_seen();
    for second in 0..WORKERS_MAX as u64 {
        loads.expire((3602 + second) * SECOND_NS, 1);
    }
    let mut places = Vec::new();
    assert!(loads.changed_since(&mut changes, &mut places));
    assert_eq!(places, [0], "the other worker had none");
    for day in [10, 25, 30, 49, 50, 60] {
        assert_eq!(share(day * 86_400 * SECOND_NS), 0.0, "after {day} days");
    }
}

/// Sets a gauge that counts.
fn set(loads: &Loads, origin: OriginPlace, worker: WorkerIndex, gauge: Gauge, now_ns: u64) {
    assert_ne!(loads.set_gauge(origin, worker, gauge, now_ns), GaugeEffect::Refused);
}
