//! The exchange of load with the other routers: what [`Publisher`] says goes to a carrier, and what the carrier brings
//! goes to [`Origins`], whose effects change the loads.
//!
//! One thread calls [`Exchange::round`] again and again. A round waits for messages for at most the time between two
//! batches, since changes of the loads wake no thread; for somewhat longer while there is no load.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::carrier::{Arrived, Asker, Carrier, Link, Source};
use super::effects::{Effect, Notice};
use super::mac::Keys;
use super::origin::OriginPhase;
use super::origins::{OriginSettings, Origins};
use super::protocol::{Content, Fault, Heartbeat, Message, Refusal, SnapshotRequest, decode, encode, unsigned};
use super::publisher::{Publisher, PublisherSettings};
use super::shared_bindings::SharedBindings;
use super::shared_loads::SharedLoads;
use super::values::{Nonce, OriginId, Sender};
use super::view::{Joining, LinkShown, OwnShown, RoutersShown, RoutersView};
use crate::fleet::Fleet;
use crate::limits::{
    LOAD_BATCH_MS_CEILING, LOAD_IDLE_MS, LOAD_SHOWN_EVERY_MS, LOAD_TICK_MS, ORIGINS_MAX, ROUTER_NOTICED_MS,
};
use crate::load::Loads;
use crate::log_quota::LogQuota;
use crate::metrics::RouterCounter;
use crate::requests::OthersLoads;
use crate::route::{AffinityTable, PolicyTable};

/// Things noticed of routers that are remembered.
const NOTICED_MAX: usize = 8 * ORIGINS_MAX;

/// How a router exchanges load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeSettings {
    /// How often it speaks.
    pub publisher: PublisherSettings,
    /// How long others may be silent.
    pub origins: OriginSettings,
    /// How long it may be not ready because the load of some peers is not known, milliseconds.
    pub join_ms_max: u64,
}

/// The tables of a daemon that others add to, and that it tells them of.
#[derive(Clone, Copy, Debug)]
pub struct SharedTables<'a> {
    /// The loads.
    pub loads: &'a Arc<Loads>,
    /// The way into them.
    pub others: &'a OthersLoads,
    /// The workers.
    pub fleet: &'a Arc<Fleet>,
    /// The bindings of affinity sessions, by hashes with [`Keys::affinity_secret`].
    pub affinities: &'a Arc<AffinityTable>,
    /// How long bindings hold.
    pub policies: &'a Arc<ArcSwap<PolicyTable>>,
}

/// The exchange of one run of this router over a carrier.
pub struct Exchange<C> {
    carrier: C,
    keys: Keys,
    settings: ExchangeSettings,
    publisher: Publisher,
    origins: Origins,
    table: SharedLoads,
    bindings: SharedBindings,
    view: Arc<RoutersView>,
    /// The random numbers of requests.
    nonces: Box<dyn FnMut() -> Nonce + Send>,
    joining: Joining,
    join_until_ms: u64,
    /// By its place at the carrier: who listens to this router.
    listeners: BTreeMap<usize, (Asker, OriginId)>,
    /// By link: why its latest message was refused.
    refused: BTreeMap<usize, Fault>,
    /// Of the lines about them: one link may bring good messages and bad ones by turns.
    refusals: LogQuota,
    /// When something was noticed of a router last.
    noticed: BTreeMap<(OriginId, Notice), u64>,
    /// When the load changed last, here or elsewhere.
    changed_ms: u64,
    next_tick_ms: u64,
    next_shown_ms: u64,
    /// Reused memory.
    arrived: Vec<Arrived>,
    effects: Vec<Effect>,
}

impl<C: fmt::Debug> fmt::Debug for Exchange<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("carrier", &self.carrier).finish_non_exhaustive()
    }
}

/// What a router says first on each connection, which proves that it is one.
#[must_use]
pub fn opening(own: &Sender, keys: &Keys) -> Vec<u8> {
    // It is no sign of life: heartbeats begin with 1.
    encode(own, &Content::Heartbeat(Heartbeat::default()), keys)
}

impl<C: Carrier> Exchange<C> {
    /// The exchange of a router that begins at `now_ns`.
    pub fn new(
        (carrier, keys): (C, Keys),
        own: Sender,
        settings: ExchangeSettings,
        shared: SharedTables<'_>,
        (view, now_ns): (&Arc<RoutersView>, u64),
        nonces: Box<dyn FnMut() -> Nonce + Send>,
    ) -> Self {
        let now_ms = now_ns / 1_000_000;
        let mut exchange = Self {
            carrier,
            keys,
            settings,
            publisher: Publisher::new(own, settings.publisher, now_ms),
            origins: Origins::new(own, settings.origins),
            table: SharedLoads::new(shared.loads, shared.others, shared.fleet),
            bindings: SharedBindings::new(shared.affinities, shared.policies, now_ns),
            view: Arc::clone(view),
            nonces,
            joining: Joining::Joined,
            join_until_ms: now_ms + settings.join_ms_max,
            listeners: BTreeMap::new(),
            refused: BTreeMap::new(),
            refusals: LogQuota::default(),
            noticed: BTreeMap::new(),
            changed_ms: now_ms,
            next_tick_ms: now_ms,
            next_shown_ms: now_ms,
            arrived: Vec::new(),
            effects: Vec::new(),
        };
        exchange.joining = Joining::Waiting { missing: exchange.carrier.links().len() };
        exchange.join(now_ms);
        exchange.show(now_ms);
        exchange
    }

    /// Waits for messages, handles them, and says what is due. `now_ns` is the clock of bookings.
    ///
    /// # Errors
    /// The carrier has failed for good.
    pub fn round(&mut self, now_ns: impl Fn() -> u64) -> io::Result<()> {
        let is_idle = (now_ns() / 1_000_000).saturating_sub(self.changed_ms) > LOAD_IDLE_MS;
        let wait_ms = if is_idle { LOAD_BATCH_MS_CEILING } else { self.settings.publisher.batch_ms };
        let wait = Duration::from_millis(wait_ms);
        let mut arrived = std::mem::take(&mut self.arrived);
        self.carrier.receive(wait, now_ns() / 1_000_000, &mut arrived)?;
        let now_ns = now_ns();
        let now_ms = now_ns / 1_000_000;
        for Arrived { from, bytes } in arrived.drain(..) {
            self.count(RouterCounter::MessagesReceived, 1);
            match (from, decode(&bytes, &self.keys)) {
                (Source::Link(link), Ok(message)) => self.hear(link, &message, now_ms),
                (Source::Asker(asker), Ok(message)) => self.attend(asker, &message, now_ns),
                (source, Err(refusal)) => self.refuse(source, refusal, now_ms),
            }
            self.apply(now_ns);
        }
        self.arrived = arrived;
        self.follow_fleet(now_ns);
        self.speak(now_ns);
        if now_ms >= self.next_tick_ms {
            self.next_tick_ms = now_ms + LOAD_TICK_MS;
            self.origins.tick(now_ms, &mut self.nonces, &mut self.effects);
            self.apply(now_ns);
            self.join(now_ms);
        }
        if now_ms >= self.next_shown_ms {
            self.show(now_ms);
        }
        Ok(())
    }

    /// The carrier, to change its peers.
    pub const fn carrier_mut(&mut self) -> &mut C {
        &mut self.carrier
    }

    // ---- what others say ----

    /// Handles a message of a router that this one listens to.
    fn hear(&mut self, link: usize, message: &Message, now_ms: u64) {
        self.refused.remove(&link);
        self.carrier.identify(link, message.sender.origin);
        self.origins.receive(message, now_ms, &mut self.nonces, &mut self.effects);
    }

    /// Handles a message of a router that listens to this one.
    fn attend(&mut self, asker: Asker, message: &Message, now_ns: u64) {
        let (own, now_ms) = (*self.publisher.sender(), now_ns / 1_000_000);
        if message.sender.origin == own.origin {
            // Either it is this router itself, or another one uses its number.
            self.origins.receive(message, now_ms, &mut self.nonces, &mut self.effects);
        }
        match &message.content {
            Content::Heartbeat(_) => {
                self.greet(asker, true);
                // This router knows what it says itself.
                if message.sender.fingerprint == own.fingerprint && message.sender.origin != own.origin {
                    self.carrier.admit(asker);
                    self.publisher.note_listener(now_ms);
                    self.listeners.insert(asker.place, (asker, message.sender.origin));
                }
            }
            Content::Request(request) => self.answer(asker, &message.sender, request, now_ns),
            Content::Batch(_) | Content::Section(_) => {}
        }
    }

    /// Answers the first message of a router that has connected, also one that is refused: it learns at once whose
    /// connection it is, and what they do not have in common. A stranger gets no signed message:
    /// see [`unsigned`].
    fn greet(&mut self, asker: Asker, is_proven: bool) {
        let own = self.publisher.sender();
        let message = if is_proven { opening(own, &self.keys) } else { unsigned(own.origin) };
        if !self.carrier.answer(asker, &message) {
            tracing::debug!(?asker, "a router that connected is gone");
        }
    }

    fn answer(&mut self, asker: Asker, asking: &Sender, request: &SnapshotRequest, now_ns: u64) {
        // Read only for an answer: recordings of requests get none, and may come without end.
        let bindings = std::iter::once_with(|| self.bindings.all(now_ns)).flatten();
        match self.publisher.answer(asking, request, bindings, now_ns / 1_000_000) {
            Ok(sections) => {
                self.count(RouterCounter::SnapshotsSent, 1);
                let own = *self.publisher.sender();
                for section in sections {
                    let message = encode(&own, &Content::Section(section), &self.keys);
                    if !self.carrier.answer(asker, &message) {
                        // It asks again, if it is still there.
                        return;
                    }
                }
            }
            Err(refusal) => {
                self.count(RouterCounter::SnapshotsRefused, 1);
                tracing::debug!(origin = %asking.origin, %refusal, "another router gets no snapshot");
            }
        }
    }

    /// Handles a message that could not be read.
    fn refuse(&mut self, source: Source, refusal: Refusal, now_ms: u64) {
        if let Source::Link(link) = source
            && refusal.fault != Fault::Unknown
            && self.refused.insert(link, refusal.fault) != Some(refusal.fault)
            && let Some(withheld) = self.refusals.take(Instant::now())
        {
            let address = self.carrier.links().into_iter().find(|(at, _)| *at == link).map(|(_, link)| link.address);
            tracing::warn!(?address, %refusal, remedy = refusal.fault.remedy(), withheld, "messages of another router are refused");
        }
        if let (Source::Asker(asker), Some(_)) = (source, refusal.origin) {
            self.greet(asker, refusal.is_proven());
        }
        self.origins.refuse(&refusal, now_ms, &mut self.nonces, &mut self.effects);
    }

    /// Carries out what the origins want.
    fn apply(&mut self, now_ns: u64) {
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::SetGauge { place, worker, gauge, age_ms } => {
                    let at_ns = now_ns.saturating_sub(age_ms.saturating_mul(1_000_000));
                    let of = self.origins.id_at(place).unwrap_or_default();
                    let is_known = self.table.set((place, of), worker, gauge, at_ns);
                    let counter = if is_known { RouterCounter::GaugesSet } else { RouterCounter::GaugesUnknownWorker };
                    self.count(counter, 1);
                }
                Effect::DropGauges { place } => self.table.drop_all(place),
                Effect::Bind(binding) => {
                    self.count(RouterCounter::BindingsHeard, 1);
                    if !binding.ended {
                        self.bindings.hear(&binding, now_ns);
                    }
                }
                Effect::Ask(request) => {
                    let message = encode(self.publisher.sender(), &Content::Request(request), &self.keys);
                    self.count(RouterCounter::SnapshotsAsked, 1);
                    if !self.carrier.ask(request.origin, &message) {
                        tracing::debug!(origin = %request.origin, "another router cannot be asked now");
                    }
                }
                Effect::Noticed { origin, notice } => {
                    let counter = RouterCounter::of(notice);
                    self.count(counter, 1);
                    log(origin, notice, self.view.counters.get(counter));
                    // Anyone may name any router in a message without a proper signature.
                    let proven = if notice.is_proven() { origin } else { OriginId::default() };
                    if notice.is_change() {
                        self.next_shown_ms = now_ns / 1_000_000;
                    }
                    if notice.is_worth_a_finding() && self.noticed.len() < NOTICED_MAX {
                        self.noticed.insert((proven, notice), now_ns / 1_000_000);
                    }
                }
            }
        }
        self.effects = effects;
    }

    /// Gives workers that joined what others add to them, and notes those whose own part changed.
    fn follow_fleet(&mut self, now_ns: u64) {
        let change = self.table.follow();
        for worker in &change.joined {
            for (place, gauge, age_ms) in self.origins.gauges_of(*worker, now_ns / 1_000_000) {
                let at_ns = now_ns.saturating_sub(age_ms.saturating_mul(1_000_000));
                let of = self.origins.id_at(place).unwrap_or_default();
                self.table.set((place, of), *worker, gauge, at_ns);
            }
        }
        change.joined.into_iter().chain(change.left).for_each(|worker| self.publisher.note_changed(worker));
        let publisher = &mut self.publisher;
        let (changed_ms, now_ms) = (&mut self.changed_ms, now_ns / 1_000_000);
        self.table.changed(|worker| {
            publisher.note_changed(worker);
            *changed_ms = now_ms;
        });
        self.bindings.changed(now_ns, |binding| publisher.note_binding(binding, now_ms));
    }

    // ---- what this router says ----

    fn speak(&mut self, now_ns: u64) {
        let now_ms = now_ns / 1_000_000;
        loop {
            let table = &self.table;
            let Some(content) = self.publisher.next_message(now_ms, |worker| table.own_gauge(worker, now_ns)) else {
                return;
            };
            match &content {
                Content::Batch(batch) => {
                    self.count(RouterCounter::Batches, 1);
                    self.count(RouterCounter::GaugesSent, batch.gauges.len() as u64);
                }
                _ => self.count(RouterCounter::Heartbeats, 1),
            }
            let message = encode(self.publisher.sender(), &content, &self.keys);
            self.count(RouterCounter::MessageBytes, message.len() as u64);
            self.carrier.publish(&message);
        }
    }

    // ---- what is shown ----

    /// Looks whether the load of all peers is known.
    fn join(&mut self, now_ms: u64) {
        if !matches!(self.joining, Joining::Waiting { .. }) {
            return;
        }
        let own = self.publisher.sender().origin;
        let statuses: Vec<_> = self.origins.statuses(now_ms).collect();
        let is_live = |phase| matches!(phase, OriginPhase::Live | OriginPhase::Repairing);
        let is_known = |origin| origin == own || statuses.iter().any(|of| of.origin == origin && is_live(of.phase));
        let missing = self.carrier.links().iter().filter(|(_, link)| !link.origin.is_some_and(is_known)).count();
        self.joining = match missing {
            0 => Joining::Joined,
            _ if now_ms >= self.join_until_ms => Joining::Overdue { missing },
            _ => Joining::Waiting { missing },
        };
        match self.joining {
            Joining::Waiting { .. } => return,
            Joining::Joined => tracing::info!("the load of all peers is known"),
            Joining::Overdue { missing } => {
                tracing::warn!(missing, "the load of some peers is not known; the daemon is ready without it")
            }
        }
        self.show(now_ms);
    }

    fn show(&mut self, now_ms: u64) {
        self.next_shown_ms = now_ms + LOAD_SHOWN_EVERY_MS;
        let counts = self.carrier.counts();
        self.count(RouterCounter::MessagesDropped, counts.messages_dropped);
        self.count(RouterCounter::ConnectionsCut, counts.connections_cut);
        self.count(RouterCounter::LinksLost, counts.links_lost);
        self.noticed.retain(|_, at_ms| now_ms.saturating_sub(*at_ms) < ROUTER_NOTICED_MS);
        let links = self.carrier.links();
        let unlisted = self.unlisted(&links);
        let own = OwnShown {
            sender: *self.publisher.sender(),
            address: self.carrier.address().to_owned(),
            sequence: self.publisher.sequence(),
            digest: self.publisher.digest(),
            load: self.publisher.load(),
        };
        self.view.show(RoutersShown {
            own: Some(own),
            joining: self.joining,
            links: links
                .into_iter()
                .map(|(at, link)| LinkShown { link, refused: self.refused.get(&at).copied() })
                .collect(),
            origins: self.origins.statuses(now_ms).collect(),
            unlisted,
            recent: self.noticed.keys().copied().collect(),
        });
    }

    /// The routers that listen to this one, but to which no link of this one leads. Empty while any link has not yet identified
    /// its router, because that link may lead to the listener.
    fn unlisted(&mut self, links: &[(usize, Link)]) -> Vec<OriginId> {
        let carrier = &self.carrier;
        self.listeners.retain(|_, (asker, _)| carrier.is_admitted(*asker));
        if links.iter().any(|(_, link)| link.origin.is_none()) {
            return Vec::new();
        }
        let is_heard = |origin| links.iter().any(|(_, link)| link.origin == Some(origin));
        let unlisted: BTreeSet<_> = self.listeners.values().map(|(_, of)| *of).filter(|of| !is_heard(*of)).collect();
        unlisted.into_iter().collect()
    }

    fn count(&self, counter: RouterCounter, times: u64) {
        self.view.counters.add(counter, times);
    }
}

/// Logs what is noteworthy: what changes an origin each time, what comes with messages ever more rarely.
fn log(origin: OriginId, notice: Notice, times: u64) {
    match notice {
        Notice::Live => tracing::info!(%origin, "the load of another router is known, and counts"),
        Notice::Restarted => {
            tracing::info!(%origin, "another router was restarted; what it had booked no longer counts")
        }
        Notice::Silent => tracing::warn!(%origin, "another router is silent; what it had booked no longer counts"),
        Notice::Quarantined(reason) => {
            tracing::warn!(%origin, ?reason, remedy = reason.remedy(), "another router is ignored");
        }
        Notice::DigestDiffers
        | Notice::WentBack
        | Notice::SnapshotTorn
        | Notice::OwnId
        | Notice::NoPlace
        | Notice::WrongMac
        | Notice::Unreadable
        | Notice::BindingsDropped
            if times.is_power_of_two() =>
        {
            tracing::warn!(%origin, ?notice, times, "a message of another router");
        }
        _ => tracing::debug!(%origin, ?notice, times, "a message of another router"),
    }
}

impl RouterCounter {
    /// The counter of a notice.
    const fn of(notice: Notice) -> Self {
        match notice {
            Notice::Live => Self::Joins,
            Notice::Gap => Self::Gaps,
            Notice::DigestDiffers => Self::DigestsDiffer,
            Notice::WentBack => Self::WentBack,
            Notice::OtherIncarnation => Self::OtherIncarnations,
            Notice::Replayed => Self::Recordings,
            Notice::Restarted => Self::Restarts,
            Notice::Silent => Self::Silences,
            Notice::Quarantined(_) => Self::Quarantines,
            Notice::Stale => Self::MessagesStale,
            Notice::Ignored => Self::MessagesIgnored,
            Notice::NotAsked => Self::SectionsNotAsked,
            Notice::SnapshotTorn => Self::SnapshotsTorn,
            Notice::BindingsDropped => Self::BindingsDropped,
            Notice::OwnId => Self::OwnNumbers,
            Notice::NoPlace => Self::NoPlaces,
            Notice::WrongMac => Self::MessagesWrongMac,
            Notice::Unreadable => Self::MessagesUnreadable,
            Notice::NotUnderstood => Self::MessagesNotUnderstood,
        }
    }
}
