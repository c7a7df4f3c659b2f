//! Routers that share their load over a carrier that loses, repeats, reorders and delays messages, and is partitioned;
//! they are killed and restarted, their clocks differ by hours, a recorder plays old messages again, one router lies,
//! one has another secret, and one serves another fleet. All in virtual time.
//!
//! `KVROUTED_SEEDS` is the number of seeds, `KVROUTED_SEED` runs a single one.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::super::protocol::{decode, encode};
use super::super::{Notice, OriginPhase, OriginSettings, Origins, Publisher, PublisherSettings};
use super::*;

/// Seeds of `cargo test`.
const SEEDS: u64 = 100;
/// Virtual time of one step, milliseconds.
const STEP_MS: u64 = 10;
/// How often what must always hold is checked, milliseconds.
const CHECK_EVERY_MS: u64 = 100;
/// How long load changes and things fail, milliseconds.
const FAULTS_MS: u64 = 5_000;
/// How long old messages are still played after that, milliseconds.
const REPLAYS_MS: u64 = 2_000;
/// By then everything must be well, milliseconds: silence, the longest back-off, and two heartbeats.
const SETTLED_MS: u64 = FAULTS_MS + REPLAYS_MS + 3_000 + 5_000 + 2 * 1_000;
const WORKERS: u64 = 12;
const SESSIONS: u64 = 8;
/// Messages that the recorder remembers.
const RECORDED_MAX: usize = 400;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Honest,
    /// It has the secret and lies about its sequence and its gauges.
    Liar,
    /// It names an honest router's number and does not have the secret.
    Outsider,
    /// It has the secret and another fingerprint.
    OtherFleet,
}

struct Router {
    kind: Kind,
    id: u64,
    keys: Keys,
    /// What its monotonic clock is ahead of the others'.
    clock_ms: u64,
    is_alive: bool,
    publisher: Publisher,
    origins: Origins,
    own: BTreeMap<Worker, Gauge>,
    known: BTreeSet<Worker>,
    /// What its load table holds of others.
    applied: BTreeMap<(u8, Worker), Gauge>,
    /// The worker of each session, and when the session was used on this router's clock.
    sessions: BTreeMap<SessionName, (Worker, u64)>,
}

struct Packet {
    to: usize,
    bytes: Vec<u8>,
}

struct World {
    rng: Xoshiro256PlusPlus,
    now_ms: u64,
    routers: Vec<Router>,
    flying: BTreeMap<(u64, u64), Packet>,
    packets: u64,
    last_arrival_ms: BTreeMap<(usize, usize), u64>,
    partitions: BTreeSet<(usize, usize)>,
    recorded: Vec<Vec<u8>>,
    /// Everything that an incarnation has said of a worker.
    said: HashSet<(u64, u64, Worker, u32)>,
    /// The incarnations of each router, in their order.
    runs: BTreeMap<u64, Vec<u64>>,
    /// The latest incarnation that a router has believed of another one.
    believed: BTreeMap<(usize, u64), usize>,
    loss: f64,
    repeats: f64,
    delay_ms_max: u64,
    reorders: bool,
}

fn fresh(kind: Kind, own: Sender, clock_ms: u64, now_ms: u64, known: BTreeSet<Worker>) -> Router {
    let id = own.origin.0;
    let sender = match kind {
        Kind::Honest | Kind::Liar => own,
        Kind::Outsider => Sender { origin: OriginId(1), ..own },
        Kind::OtherFleet => Sender { fingerprint: Fingerprint(8), ..own },
    };
    let secret = if kind == Kind::Outsider { OTHER_SECRET } else { SECRET };
    let settings = PublisherSettings { batch_ms: 5, heartbeat_ms: 1000 };
    Router {
        kind,
        id,
        keys: Keys::new(secret, None).expect("long enough"),
        clock_ms,
        is_alive: true,
        publisher: Publisher::new(sender, settings, clock_ms + now_ms),
        origins: Origins::new(sender, OriginSettings { silent_ms_max: 3000, ..OriginSettings::default() }),
        own: BTreeMap::new(),
        known,
        applied: BTreeMap::new(),
        sessions: BTreeMap::new(),
    }
}

fn own_session(router: &Router) -> SessionName {
    SessionName(1000 + u128::from(router.id))
}

impl Router {
    fn use_session(&mut self, binding: &Binding, now_ms: u64) {
        let used_ms = now_ms.saturating_sub(binding.unused_ms);
        let known = self.sessions.get(&binding.session);
        if known.is_none_or(|(_, known_ms)| *known_ms < used_ms) {
            self.sessions.insert(binding.session, (binding.worker, used_ms));
        }
    }

    /// Applies effects as the load table would. Answers with the requests to send.
    fn apply(&mut self, effects: Vec<Effect>, now_ms: u64) -> Vec<SnapshotRequest> {
        let mut requests = Vec::new();
        for effect in effects {
            match effect {
                Effect::SetGauge { place, worker, gauge, .. } if self.known.contains(&worker) => {
                    if gauge.is_zero() {
                        self.applied.remove(&(place, worker));
                    } else {
                        self.applied.insert((place, worker), gauge);
                    }
                }
                Effect::DropGauges { place } => self.applied.retain(|(of, _), _| *of != place),
                Effect::Bind(binding) => self.use_session(&binding, now_ms),
                Effect::Ask(request) => requests.push(request),
                Effect::SetGauge { .. } | Effect::Noticed { .. } => {}
            }
        }
        requests
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut kinds = vec![Kind::Honest; rng.random_range(2..=5)];
        for (kind, chance) in [(Kind::Liar, 0.4), (Kind::Outsider, 0.4), (Kind::OtherFleet, 0.3)] {
            if rng.random_bool(chance) {
                kinds.push(kind);
            }
        }
        let mut world = Self {
            loss: [0.0, 0.02, 0.3][rng.random_range(0..3)],
            repeats: [0.0, 0.1][rng.random_range(0..2)],
            delay_ms_max: [1, 20, 300][rng.random_range(0..3)],
            reorders: rng.random(),
            rng,
            now_ms: 0,
            routers: Vec::new(),
            flying: BTreeMap::new(),
            packets: 0,
            last_arrival_ms: BTreeMap::new(),
            partitions: BTreeSet::new(),
            recorded: Vec::new(),
            said: HashSet::new(),
            runs: BTreeMap::new(),
            believed: BTreeMap::new(),
        };
        for (at, kind) in kinds.into_iter().enumerate() {
            let router = world.start(kind, at as u64 + 1);
            world.routers.push(router);
        }
        world
    }

    /// A router with a clock of its own, up to two hours from the others', that knows some of the workers.
    fn start(&mut self, kind: Kind, id: u64) -> Router {
        let (incarnation, clock_ms) = (self.rng.random(), self.rng.random_range(0..7_200_000));
        let known = (0..WORKERS).filter(|_| self.rng.random_bool(0.7)).map(worker).collect();
        self.runs.entry(id).or_default().push(incarnation);
        fresh(kind, sender(id, incarnation), clock_ms, self.now_ms, known)
    }

    fn clock(&self, at: usize) -> u64 {
        self.routers[at].clock_ms + self.now_ms
    }

    fn send(&mut self, from: usize, to: usize, bytes: &[u8]) {
        if self.recorded.len() < RECORDED_MAX {
            self.recorded.push(bytes.to_vec());
        } else {
            let at = self.rng.random_range(0..RECORDED_MAX);
            self.recorded[at] = bytes.to_vec();
        }
        if self.partitions.contains(&(from, to)) || self.rng.random_bool(self.loss) {
            return;
        }
        let copies = 1 + usize::from(self.rng.random_bool(self.repeats));
        for _ in 0..copies {
            self.fly(from, to, bytes.to_vec());
        }
    }

    fn fly(&mut self, from: usize, to: usize, bytes: Vec<u8>) {
        let mut arrival_ms = self.now_ms + self.rng.random_range(0..=self.delay_ms_max);
        let last_ms = self.last_arrival_ms.entry((from, to)).or_default();
        if !self.reorders {
            arrival_ms = arrival_ms.max(*last_ms);
        }
        *last_ms = arrival_ms;
        self.packets += 1;
        self.flying.insert((arrival_ms, self.packets), Packet { to, bytes });
    }

    fn broadcast(&mut self, from: usize, content: &Content) {
        let router = &self.routers[from];
        let bytes = encode(router.publisher.sender(), content, &router.keys);
        (0..self.routers.len()).filter(|to| *to != from).for_each(|to| self.send(from, to, &bytes));
    }

    // ---- what routers do ----

    fn work(&mut self, at: usize) {
        let now_ms = self.clock(at);
        let router = &mut self.routers[at];
        if self.rng.random_bool(0.3) {
            let worker = worker(self.rng.random_range(0..WORKERS));
            let number = if self.rng.random_bool(0.4) { 0 } else { self.rng.random_range(1..40) };
            router.own.insert(worker, gauge(number));
            router.publisher.note_changed(worker);
        }
        if self.rng.random_bool(0.05) {
            let session = SessionName(self.rng.random_range(0..SESSIONS).into());
            let worker = worker(self.rng.random_range(0..WORKERS));
            let binding = Binding { session, worker, unused_ms: 0, ended: false };
            router.use_session(&binding, now_ms);
            router.publisher.note_binding(binding, now_ms);
        }
        if self.rng.random_bool(0.02) {
            let worker = worker(self.rng.random_range(0..WORKERS));
            if router.known.remove(&worker) {
                router.applied.retain(|(_, of), _| *of != worker);
            } else {
                router.known.insert(worker);
                let gauges = router.origins.gauges_of(worker, now_ms);
                router.applied.extend(gauges.map(|(place, gauge, _)| ((place, worker), gauge)));
            }
        }
    }

    fn speak(&mut self, at: usize) {
        let now_ms = self.clock(at);
        loop {
            let Router { publisher, own, id, .. } = &mut self.routers[at];
            let gauge_of = |worker| own.get(&worker).copied().unwrap_or_default();
            let Some(mut content) = publisher.next_message(now_ms, gauge_of) else { break };
            let (id, incarnation) = (*id, publisher.sender().incarnation.0);
            if let Content::Batch(batch) = &content {
                self.said.extend(batch.gauges.iter().map(|row| (id, incarnation, row.worker, row.gauge.requests)));
            }
            if self.routers[at].kind == Kind::Liar && self.rng.random_bool(0.2) {
                self.lie(&mut content);
            }
            self.broadcast(at, &content);
        }
        let (mut effects, rng) = (Vec::new(), &mut self.rng);
        let router = &mut self.routers[at];
        router.origins.tick(now_ms, &mut || Nonce(rng.random()), &mut effects);
        let requests = router.apply(effects, now_ms);
        self.ask(at, requests);
    }

    fn lie(&mut self, content: &mut Content) {
        let number = [1, 7, 1 << 40, u64::MAX - 1][self.rng.random_range(0..4)];
        match content {
            Content::Batch(batch) if self.rng.random() => batch.sequence = number,
            Content::Batch(batch) => batch.gauges.push(row(number, 3)),
            Content::Heartbeat(heartbeat) if self.rng.random() => heartbeat.sequence = number,
            Content::Heartbeat(heartbeat) => heartbeat.digest.sum = number,
            Content::Section(section) if self.rng.random() => section.sequence = number,
            Content::Section(section) => section.digest.count += 1,
            Content::Request(_) => {}
        }
    }

    fn ask(&mut self, at: usize, requests: Vec<SnapshotRequest>) {
        for request in requests {
            let Some(to) = self.routers.iter().position(|router| router.id == request.origin.0) else { continue };
            let bytes = encode(self.routers[at].publisher.sender(), &Content::Request(request), &self.routers[at].keys);
            self.send(at, to, &bytes);
        }
    }

    fn hear(&mut self, at: usize, bytes: &[u8]) {
        let now_ms = self.clock(at);
        let (mut effects, rng) = (Vec::new(), &mut self.rng);
        let mut nonces = || Nonce(rng.random());
        let router = &mut self.routers[at];
        let asked = match decode(bytes, &router.keys) {
            Ok(Message { sender, content: Content::Request(request), .. }) => Some((sender, request)),
            Ok(message) => {
                router.origins.receive(&message, now_ms, &mut nonces, &mut effects);
                None
            }
            Err(refusal) => {
                router.origins.refuse(&refusal, now_ms, &mut nonces, &mut effects);
                None
            }
        };
        let requests = router.apply(effects, now_ms);
        self.ask(at, requests);
        if let Some((sender, request)) = asked {
            self.answer(at, &sender, &request);
        }
    }

    fn answer(&mut self, at: usize, asking: &Sender, request: &SnapshotRequest) {
        let now_ms = self.clock(at);
        let router = &mut self.routers[at];
        let binding = |(session, (worker, used_ms)): (&SessionName, &(Worker, u64))| Binding {
            session: *session,
            worker: *worker,
            unused_ms: now_ms - used_ms,
            ended: false,
        };
        let bindings = router.sessions.iter().map(binding);
        let Ok(sections) = router.publisher.answer(asking, request, bindings, now_ms) else { return };
        let Some(to) = self.routers.iter().position(|router| router.id == asking.origin.0) else { return };
        for section in sections {
            let mut content = Content::Section(section);
            if self.routers[at].kind == Kind::Liar && self.rng.random_bool(0.2) {
                self.lie(&mut content);
            }
            let router = &self.routers[at];
            let bytes = encode(router.publisher.sender(), &content, &router.keys);
            self.send(at, to, &bytes);
        }
    }

    /// Every router uses a session of its own once more, of which all others must hear.
    fn bind_own_sessions(&mut self) {
        let now_ms = self.now_ms;
        for router in self.routers.iter_mut().filter(|router| router.is_alive) {
            let binding = Binding { session: own_session(router), worker: worker(3), unused_ms: 0, ended: false };
            router.use_session(&binding, now_ms + router.clock_ms);
            router.publisher.note_binding(binding, now_ms + router.clock_ms);
        }
    }

    // ---- what fails ----

    fn fail(&mut self) {
        let at = self.rng.random_range(0..self.routers.len());
        if self.rng.random_bool(0.004) {
            self.routers[at].is_alive = false;
        }
        if self.rng.random_bool(0.01) {
            self.restart(at);
        }
        if self.rng.random_bool(0.01) {
            let to = self.rng.random_range(0..self.routers.len());
            self.partitions.insert((at, to));
        }
        if self.rng.random_bool(0.01) {
            self.partitions.clear();
        }
    }

    /// A new run, which knows nothing of the one before. Its snapshots and recordings of it may still be under way.
    fn restart(&mut self, at: usize) {
        let (kind, id) = (self.routers[at].kind, self.routers[at].id);
        self.routers[at] = self.start(kind, id);
        self.believed.retain(|(observer, _), _| *observer != at);
    }

    fn replay(&mut self) {
        if !self.recorded.is_empty() && self.rng.random_bool(0.2) {
            let bytes = self.recorded[self.rng.random_range(0..self.recorded.len())].clone();
            let to = self.rng.random_range(0..self.routers.len());
            self.hear_if_alive(to, &bytes);
        }
    }

    fn hear_if_alive(&mut self, to: usize, bytes: &[u8]) {
        if self.routers[to].is_alive {
            self.hear(to, bytes);
        }
    }

    fn step(&mut self) {
        self.now_ms += STEP_MS;
        let has_faults = self.now_ms < FAULTS_MS;
        if has_faults {
            self.fail();
        }
        if self.now_ms < FAULTS_MS + REPLAYS_MS {
            self.replay();
        }
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= self.now_ms
        {
            let packet = entry.remove();
            self.hear_if_alive(packet.to, &packet.bytes);
        }
        for at in 0..self.routers.len() {
            if self.routers[at].is_alive {
                if has_faults {
                    self.work(at);
                }
                self.speak(at);
            }
        }
        if self.now_ms.is_multiple_of(CHECK_EVERY_MS) {
            self.check();
        }
    }

    // ---- what must hold ----

    /// While things fail, too: nothing counts that its origin has not said in the run that counts, runs are never believed
    /// again once a later one was, and no honest router is blamed.
    fn check(&mut self) {
        for (at, router) in self.routers.iter().enumerate().filter(|(_, router)| router.kind == Kind::Honest) {
            for status in router.origins.statuses(self.now_ms + router.clock_ms) {
                let Some(other) = self.routers.iter().find(|other| other.id == status.origin.0) else {
                    panic!("{} is no router", status.origin);
                };
                if other.kind != Kind::Honest {
                    continue;
                }
                let blame = |notice: &Notice| {
                    matches!(notice, Notice::Quarantined(_) | Notice::DigestDiffers | Notice::SnapshotTorn)
                };
                assert!(!status.notices.keys().any(blame), "router {} blames {status:?}", router.id);
                let Some(run) = status.incarnation else { continue };
                let place = self.runs[&other.id].iter().position(|known| *known == run.0).expect("a run of it");
                let believed = self.believed.entry((at, other.id)).or_default();
                assert!(*believed <= place, "router {} believes run {place} after {believed}", router.id);
                *believed = place;
                let of_place =
                    router.applied.range((status.place, worker(0))..=(status.place, Worker::new(u64::MAX, 0)));
                for ((_, worker), gauge) in of_place {
                    let said = (other.id, run.0, *worker, gauge.requests);
                    assert!(
                        self.said.contains(&said),
                        "router {} holds a phantom of {}: {gauge:?}",
                        router.id,
                        other.id
                    );
                }
            }
        }
    }

    /// Why not every honest router agrees with every other one.
    fn disagreement(&self) -> Option<String> {
        let is_honest = |router: &&Router| router.kind == Kind::Honest;
        for router in self.routers.iter().filter(is_honest).filter(|router| router.is_alive) {
            let mut expected = BTreeMap::new();
            for status in router.origins.statuses(self.now_ms + router.clock_ms) {
                let other = self.routers.iter().find(|other| other.id == status.origin.0).expect("a router");
                let who = format!("router {} of {}: {status:?}", router.id, other.id);
                let counts = status.incarnation.is_some();
                match (other.kind, other.is_alive) {
                    (Kind::Honest, true) => {
                        let (digest, sequence) = (other.publisher.digest(), other.publisher.sequence());
                        if status.phase != OriginPhase::Live || (status.digest, status.sequence) != (digest, sequence) {
                            return Some(format!("{who}, which is at {sequence} with {digest:?}"));
                        }
                        let own = other
                            .own
                            .iter()
                            .filter(|(worker, gauge)| !gauge.is_zero() && router.known.contains(worker));
                        expected.extend(own.map(|(worker, gauge)| ((status.place, *worker), *gauge)));
                    }
                    (Kind::Honest, false) | (Kind::OtherFleet, _) if counts => return Some(format!("{who} counts")),
                    (Kind::Liar, _) => {
                        let lied = router.applied.iter().filter(|((place, _), _)| *place == status.place);
                        expected.extend(lied.map(|(key, gauge)| (*key, *gauge)));
                    }
                    (Kind::Honest | Kind::OtherFleet | Kind::Outsider, _) => {}
                }
            }
            let heard = router.origins.statuses(0).filter(|status| status.phase == OriginPhase::Live);
            let live: BTreeSet<_> = heard.map(|status| status.origin.0).collect();
            let missing = |other: &&Router| other.is_alive && other.id != router.id && !live.contains(&other.id);
            if let Some(other) = self.routers.iter().filter(is_honest).find(missing) {
                return Some(format!("router {} does not hear {}", router.id, other.id));
            }
            let lacks = |other: &&Router| other.is_alive && !router.sessions.contains_key(&own_session(other));
            if let Some(other) = self.routers.iter().filter(is_honest).find(lacks) {
                return Some(format!("router {} lacks the session of {}", router.id, other.id));
            }
            if router.applied != expected {
                return Some(format!("router {}: {:?} is not {expected:?}", router.id, router.applied));
            }
        }
        None
    }

    fn run(mut self) -> u64 {
        while self.now_ms < FAULTS_MS {
            self.step();
        }
        (self.loss, self.repeats, self.partitions) = (0.0, 0.0, BTreeSet::new());
        self.bind_own_sessions();
        while self.now_ms < FAULTS_MS + REPLAYS_MS {
            self.step();
        }
        while let Some(why) = self.disagreement() {
            assert!(self.now_ms < SETTLED_MS, "{why}");
            self.step();
        }
        // It stays so, and every digest has been compared once more.
        for at in 0..2_500 / STEP_MS {
            self.step();
            if at % 10 == 0 {
                assert_eq!(self.disagreement(), None);
            }
        }
        self.now_ms
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not '{text}'")))
}

#[test]
fn routers_agree_after_the_last_fault() {
    let seeds = number("KVROUTED_SEED").map_or(1..=number("KVROUTED_SEEDS").unwrap_or(SEEDS), |seed| seed..=seed);
    for seed in seeds {
        let result = std::panic::catch_unwind(|| World::new(seed).run());
        assert!(
            result.is_ok(),
            "to repeat this seed:\n  KVROUTED_SEED={seed} cargo test --lib {}::routers_agree_after_the_last_fault",
            module_path!().split_once("::").map_or("", |(_, path)| path)
        );
    }
}
