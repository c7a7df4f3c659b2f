//! The routers of a simulated fleet. Requests are spread over them; each has bookings of its own, and learns what the
//! others did after a delay.

use std::collections::VecDeque;
use std::rc::Rc;

use super::fleet_index::FleetIndex;
use super::prompt_blocks::mix;
use super::router::{Asked, BookingId, Chance, Chosen, Decider, Report, Router};
use super::run::Settings;
use crate::simulated_engine::{Block, KvEvent, RequestId};

/// How many routers decide, and what they know of each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSettings {
    /// Routers, at least 1.
    pub count: usize,
    /// Seconds after which a router learns of the others' bookings, first tokens and ends; `None` = never.
    pub age_s: Option<f64>,
    /// Whether all requests of a session go to one router. Otherwise each request goes to a random one.
    pub sessions_stick: bool,
}

impl Default for RouterSettings {
    fn default() -> Self {
        Self { count: 1, age_s: Some(0.0), sessions_stick: false }
    }
}

/// A request that was sent to a worker, or to a pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    id: RequestId,
    router: usize,
    /// The worker that runs the request, or decodes it.
    pub(super) worker: usize,
    /// The worker that computes the prompt, if that is another one.
    pub(super) prefills: Option<usize>,
    /// Tokens of the prompt that the index says the worker that computes it holds.
    pub(super) held_tokens: u32,
    /// Predicted time to the first token; NaN = not predicted.
    pub(super) predicted_ttft_s: f64,
}

impl Sent {
    /// The worker that computes the prompt.
    pub(super) fn computes(&self) -> usize {
        self.prefills.unwrap_or(self.worker)
    }
}

pub(super) struct Routers {
    index: FleetIndex,
    routers: Vec<Router>,
    settings: RouterSettings,
    seed: u64,
    chance: Chance,
    /// Reports on their way, in order, with the routers that wrote them.
    on_their_way: VecDeque<(usize, Report)>,
    /// Reports that were sent off since the last call of [`Routers::take_sent_off`].
    sent_off: usize,
}

impl Routers {
    /// The routers of a fleet. `deciders` makes those of one router, by space. `None`: it makes none.
    pub(super) fn new(settings: &Settings, mut deciders: impl FnMut() -> Option<Vec<Decider>>) -> Option<Self> {
        let router = |at: usize| Some(Router::new(at as u64, settings, deciders()?));
        Some(Self {
            index: FleetIndex::new(&settings.engines),
            routers: (0..settings.routers.count.max(1)).map(router).collect::<Option<_>>()?,
            settings: settings.routers,
            seed: settings.seed,
            chance: Chance::new(settings.seed),
            on_their_way: VecDeque::new(),
            sent_off: 0,
        })
    }

    /// Seconds for which a report is on its way.
    pub(super) fn age_s(&self) -> f64 {
        self.settings.age_s.unwrap_or(0.0)
    }

    /// Reports that were sent off since the last call. Each is to be heard [`Routers::age_s`] later.
    pub(super) fn take_sent_off(&mut self) -> usize {
        std::mem::take(&mut self.sent_off)
    }

    /// Lets a router choose the workers of a request of `session` and book it. `None`: no worker may run it.
    pub(super) fn send(
        &mut self,
        (id, session): (RequestId, u32),
        blocks: &Rc<[Block]>,
        prompt_tokens: u32,
        now_ns: u64,
    ) -> Option<Sent> {
        let router = self.router_of(id, session);
        let asked = Asked { id, blocks, prompt_tokens, now_ns };
        let Chosen { serves, prefills } = self.routers[router].choose(&self.index, &asked, &mut self.chance)?;
        let (worker, pair) = (serves.worker, prefills.as_ref().map(|prefills| prefills.worker));
        let computes = prefills.as_ref().unwrap_or(&serves);
        let (held_tokens, predicted_ttft_s) = (computes.held_tokens, computes.predicted_ttft_s);
        for booking in prefills.into_iter().chain([serves]) {
            if !self.report(router, Report::Booked(booking), now_ns) {
                return None;
            }
        }
        Some(Sent { id, router, worker, prefills: pair, held_tokens, predicted_ttft_s })
    }

    fn router_of(&self, id: RequestId, session: u32) -> usize {
        let spread_by = if self.settings.sessions_stick { session } else { id.0 };
        (mix(self.seed, u64::from(spread_by)) % self.routers.len() as u64) as usize
    }

    /// The first token of a request came, and the half that only prefills has ended.
    pub(super) fn first_token(&mut self, sent: &Sent, now_ns: u64) {
        let id = BookingId::of(sent.id, sent.prefills.is_some());
        self.report(sent.router, Report::FirstToken(id), now_ns);
        if sent.prefills.is_some() {
            self.report(sent.router, Report::Ended(id), now_ns);
        }
    }

    /// A request has ended, or is lost.
    pub(super) fn end(&mut self, sent: &Sent, now_ns: u64) {
        if sent.prefills.is_some() {
            self.report(sent.router, Report::Ended(BookingId::of(sent.id, true)), now_ns);
        }
        self.report(sent.router, Report::Ended(BookingId::of(sent.id, false)), now_ns);
    }

    /// The other routers hear the oldest report that is on its way.
    pub(super) fn hear(&mut self, now_ns: u64) {
        if let Some((from, report)) = self.on_their_way.pop_front() {
            self.tell_others(from, &report, now_ns);
        }
    }

    /// Applies a batch of a worker's events to the index.
    pub(super) fn apply(&mut self, worker: usize, events: &[KvEvent]) {
        self.index.apply(worker, events);
    }

    /// A worker leaves the fleet, and what it held is gone; or it is back, cold.
    pub(super) fn set_present(&mut self, worker: usize, is_present: bool) {
        self.index.set_present(worker, is_present);
    }

    /// A router notes what it did, and tells the others. `false`: a booking found no room.
    fn report(&mut self, from: usize, report: Report, now_ns: u64) -> bool {
        if !self.routers[from].note(&self.index, &report, now_ns) {
            return false;
        }
        match self.settings.age_s {
            _ if self.routers.len() == 1 => {}
            None => {}
            Some(age_s) if age_s > 0.0 => {
                self.on_their_way.push_back((from, report));
                self.sent_off += 1;
            }
            Some(_) => self.tell_others(from, &report, now_ns),
        }
        true
    }

    fn tell_others(&mut self, from: usize, report: &Report, now_ns: u64) {
        for (_, router) in self.routers.iter_mut().enumerate().filter(|(at, _)| *at != from) {
            router.hear(&self.index, report, now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::fleet;
    use super::*;

    fn routers(count: usize, sessions_stick: bool) -> Routers {
        let routers = RouterSettings { count, sessions_stick, ..RouterSettings::default() };
        let product = || Decider::Product { policy: Box::default(), unseen_weight: 1.0 };
        Routers::new(&Settings { routers, ..fleet(2) }, || Some(vec![product()])).expect("deciders")
    }

    #[test]
    fn requests_are_spread_evenly_and_sessions_stick_if_they_are_to() {
        let spread = |stick: bool| {
            let (routers, mut counts) = (routers(4, stick), [0; 4]);
            (0..4000).for_each(|id| counts[routers.router_of(RequestId(id), id / 10)] += 1);
            let sticks = |session: u32| {
                let of = |at: u32| routers.router_of(RequestId(10 * session + at), session);
                (1..10).all(|at| of(at) == of(0))
            };
            (counts, (0..400).filter(|session| sticks(*session)).count())
        };
        let ((at_random, stuck_by_chance), (by_session, stuck)) = (spread(false), spread(true));
        assert!(at_random.iter().all(|count| (900..1100).contains(count)), "{at_random:?}");
        assert!(by_session.iter().all(|count| (700..1300).contains(count)), "{by_session:?}");
        assert_eq!((stuck_by_chance, stuck), (0, 400));
    }

    #[test]
    fn a_report_is_heard_by_the_others_after_its_way() {
        let routers = |age_s| {
            let settings = RouterSettings { count: 3, age_s, sessions_stick: false };
            Routers { settings, ..routers(3, false) }
        };
        let blocks: Rc<[Block]> = Rc::new([]);
        for (age_s, on_their_way) in [(Some(0.0), 0), (Some(0.02), 1), (None, 0)] {
            let mut routers = routers(age_s);
            assert!(routers.send((RequestId(1), 1), &blocks, 30, 5).is_some());
            assert_eq!(routers.take_sent_off(), on_their_way);
            routers.hear(6);
            let knows = routers.routers.iter().filter(|router| router.live_bookings() == 1).count();
            assert_eq!(knows, if age_s.is_some() { 3 } else { 1 });
        }
    }
}
