//! All other routers that this one hears.

use std::collections::BTreeMap;

use super::digest::Digest;
use super::effects::{Effect, Notice, QuarantineReason};
use super::origin::{Origin, OriginPhase, Step};
use super::protocol::{Content, Fault, Message, Refusal};
use super::values::{Gauge, Incarnation, Nonce, OriginId, Sender};
use crate::ids::Worker;
use crate::limits::{LOAD_SILENT_MS_MAX_DEFAULT, ORIGINS_MAX};

/// How long origins may be silent, and how many are heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginSettings {
    /// Silence after which an origin's load is dropped, milliseconds.
    pub silent_ms_max: u64,
    /// Origins that are heard, at most [`ORIGINS_MAX`].
    pub origins_max: usize,
}

impl Default for OriginSettings {
    fn default() -> Self {
        Self { silent_ms_max: LOAD_SILENT_MS_MAX_DEFAULT, origins_max: ORIGINS_MAX }
    }
}

/// An origin as `status` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct OriginStatus {
    /// Its number.
    pub origin: OriginId,
    /// Its place in effects.
    pub place: u8,
    /// How far it is believed.
    pub phase: OriginPhase,
    /// The incarnation that counts.
    pub incarnation: Option<Incarnation>,
    /// The last batch that counts; 0 = none.
    pub sequence: u64,
    /// Of the gauges that count.
    pub digest: Digest,
    /// Time since the last new message of the incarnation that counts, or since any message if none counts,
    /// milliseconds.
    pub age_ms: u64,
    /// What its gauges that count add to all workers together, also to those that this router does not know.
    pub load: OriginLoad,
    /// How often each notice was given.
    pub notices: BTreeMap<Notice, u64>,
}

/// What an origin adds to all workers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OriginLoad {
    /// Requests in flight.
    pub requests: u64,
    /// Tokens to prefill.
    pub prefill_tokens: u64,
    /// Decode blocks.
    pub decode_blocks: u64,
}

impl OriginLoad {
    pub(super) fn with(self, gauge: &Gauge) -> Self {
        Self {
            requests: self.requests + u64::from(gauge.requests),
            prefill_tokens: self.prefill_tokens.saturating_add(gauge.prefill_tokens),
            decode_blocks: self.decode_blocks.saturating_add(gauge.decode_blocks()),
        }
    }
}

/// The state machines of all other routers. An origin cannot change what another one added.
#[derive(Clone, Debug)]
pub struct Origins {
    own: Sender,
    settings: OriginSettings,
    places: Vec<Option<Origin>>,
    /// Notices about messages that no origin at a place sent.
    notices: BTreeMap<Notice, u64>,
}

impl Origins {
    /// None yet. `own` is this router.
    #[must_use]
    pub fn new(own: Sender, settings: OriginSettings) -> Self {
        Self { own, settings, places: vec![None; settings.origins_max.min(ORIGINS_MAX)], notices: BTreeMap::new() }
    }

    /// Handles a message other than a request, which [`Publisher::answer`](super::Publisher::answer) answers.
    pub fn receive(
        &mut self,
        message: &Message,
        now_ms: u64,
        nonces: &mut dyn FnMut() -> Nonce,
        effects: &mut Vec<Effect>,
    ) {
        let sender = &message.sender;
        if matches!(message.content, Content::Request(_)) {
            return;
        }
        if sender.origin == self.own.origin {
            // A carrier may bring back what this router sent.
            if sender.incarnation != self.own.incarnation {
                self.notice(sender.origin, Notice::OwnId, effects);
            }
            return;
        }
        self.step(sender.origin, now_ms, nonces, effects, |origin, step| origin.receive(message, step));
    }

    /// Handles a message that could not be read. Only what is proven affects the origin that it names.
    pub fn refuse(
        &mut self,
        refusal: &Refusal,
        now_ms: u64,
        nonces: &mut dyn FnMut() -> Nonce,
        effects: &mut Vec<Effect>,
    ) {
        let named = refusal.origin.unwrap_or_default();
        match refusal.fault {
            Fault::Major(_) if named != self.own.origin => {
                let reason = QuarantineReason::Version;
                self.step(named, now_ms, nonces, effects, |origin, step| origin.incompatible(None, reason, step));
            }
            Fault::Major(_) => self.notice(named, Notice::OwnId, effects),
            Fault::WrongMac => self.notice(named, Notice::WrongMac, effects),
            Fault::Unknown => self.notice(named, Notice::NotUnderstood, effects),
            Fault::TooLarge | Fault::NoEnvelope | Fault::Malformed | Fault::OutOfRange => {
                self.notice(named, Notice::Unreadable, effects);
            }
        }
    }

    /// Lets time pass: asks again, and drops origins that are silent. Call it some ten times a second.
    pub fn tick(&mut self, now_ms: u64, nonces: &mut dyn FnMut() -> Nonce, effects: &mut Vec<Effect>) {
        let (own_fingerprint, settings) = (self.own.fingerprint, &self.settings);
        let mut step = Step { now_ms, own_fingerprint, settings, nonces, effects };
        self.places.iter_mut().flatten().for_each(|origin| origin.tick(&mut step));
    }

    /// What each origin that counts adds to a worker, by the origin's place, and the gauge's age in milliseconds. For a
    /// worker that this router did not know before.
    pub fn gauges_of(&self, worker: Worker, now_ms: u64) -> impl Iterator<Item = (u8, Gauge, u64)> {
        self.places.iter().enumerate().filter_map(move |(place, origin)| {
            let held = origin.as_ref()?.gauges()?.get(worker)?;
            let age_ms = now_ms.saturating_sub(held.sent_ms);
            (!held.gauge.is_zero()).then_some((place as u8, held.gauge, age_ms))
        })
    }

    /// The origin at a place.
    #[must_use]
    pub fn id_at(&self, place: u8) -> Option<OriginId> {
        self.places.get(usize::from(place))?.as_ref().map(Origin::id)
    }

    /// Whether no origin that was heard is still being asked for its first snapshot.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.places.iter().flatten().all(|origin| origin.phase() != OriginPhase::Asking)
    }

    /// All origins.
    pub fn statuses(&self, now_ms: u64) -> impl Iterator<Item = OriginStatus> {
        self.places.iter().enumerate().filter_map(move |(place, origin)| {
            let origin = origin.as_ref()?;
            let gauges = origin.gauges();
            let since_ms = if gauges.is_some() { origin.alive_ms() } else { origin.heard_ms() };
            Some(OriginStatus {
                origin: origin.id(),
                place: place as u8,
                phase: origin.phase(),
                incarnation: gauges.map(|gauges| gauges.incarnation),
                sequence: gauges.map_or(0, |gauges| gauges.last()),
                digest: gauges.map_or_else(Digest::default, |gauges| gauges.digest()),
                age_ms: now_ms.saturating_sub(since_ms),
                load: gauges.map_or_else(OriginLoad::default, |gauges| {
                    gauges.iter().fold(OriginLoad::default(), |sum, (_, held)| sum.with(&held.gauge))
                }),
                notices: origin.notices().clone(),
            })
        })
    }

    /// How often each notice was given about messages of no known origin.
    #[must_use]
    pub const fn notices(&self) -> &BTreeMap<Notice, u64> {
        &self.notices
    }

    fn step(
        &mut self,
        id: OriginId,
        now_ms: u64,
        nonces: &mut dyn FnMut() -> Nonce,
        effects: &mut Vec<Effect>,
        act: impl FnOnce(&mut Origin, &mut Step<'_>),
    ) {
        let Some(place) = self.place_of(id, now_ms) else { return self.notice(id, Notice::NoPlace, effects) };
        let origin = self.places[place].get_or_insert_with(|| Origin::new(id, place as u8, now_ms));
        let (own_fingerprint, settings) = (self.own.fingerprint, &self.settings);
        act(origin, &mut Step { now_ms, own_fingerprint, settings, nonces, effects });
    }

    /// The place of an origin: its own, or a free one, or that of the origin that was heard longest ago and does not
    /// count.
    fn place_of(&mut self, id: OriginId, now_ms: u64) -> Option<usize> {
        let held_by = |origin: &Option<Origin>| origin.as_ref().is_some_and(|origin| origin.id() == id);
        if let Some(place) = self.places.iter().position(held_by) {
            return Some(place);
        }
        if let Some(place) = self.places.iter().position(Option::is_none) {
            return Some(place);
        }
        let replaceable = |(place, origin): (usize, &Option<Origin>)| {
            let origin = origin.as_ref().filter(|origin| origin.may_be_replaced(now_ms))?;
            Some((origin.heard_ms(), place))
        };
        let (_, place) = self.places.iter().enumerate().filter_map(replaceable).min()?;
        self.places[place] = None;
        Some(place)
    }

    fn notice(&mut self, origin: OriginId, notice: Notice, effects: &mut Vec<Effect>) {
        match self.places.iter_mut().flatten().find(|known| known.id() == origin) {
            // Nothing proves that the origin sent a message with a wrong MAC.
            Some(known) if notice != Notice::WrongMac => known.count(notice),
            _ => *self.notices.entry(notice).or_default() += 1,
        }
        effects.push(Effect::Noticed { origin, notice });
    }
}
