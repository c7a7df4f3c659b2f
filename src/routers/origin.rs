//! The state machine of one other router. See [`OriginPhase`] for its table.

use std::collections::BTreeMap;

use super::assembly::{Assembly, Progress};
use super::backoff::BackOff;
use super::effects::{Effect, Notice, QuarantineReason};
use super::gauges::{HeldGauge, OriginGauges, TooManyWorkers};
use super::origins::OriginSettings;
use super::protocol::{Batch, Content, Heartbeat, MAJOR, Message, SnapshotRequest, SnapshotSection};
use super::values::{Binding, Fingerprint, Gauge, Incarnation, Nonce, OriginId, WorkerGauge};
use crate::ids::Worker;
use crate::limits::{
    LOAD_ASK_MS_MAX, LOAD_ASK_MS_MIN, LOAD_QUARANTINE_MS_MAX, LOAD_QUARANTINE_MS_MIN, LOAD_REPAIRS_MAX,
    ORIGIN_BINDINGS_MAX, ORIGIN_BINDINGS_WINDOW_MS,
};

/// How far an origin is believed.
///
/// | phase | input | next phase, and what it does |
/// |---|---|---|
/// | Unknown, Silent | a batch or heartbeat | Asking: asks for a snapshot with a fresh nonce |
/// | Unknown, Silent | another version or fleet | Quarantined |
/// | Asking | a batch or heartbeat | unchanged; held, and not believed |
/// | Asking | another version or fleet | unchanged; it may be a recording |
/// | Asking | the whole snapshot with the nonce | Live, or Repairing if later batches are missing; sets all gauges |
/// | Live | the next batch | Live; sets its gauges |
/// | Live, Repairing | a batch or heartbeat that is not above those before | unchanged; ignored |
/// | Live | a batch is missing, or a heartbeat names a later one | Repairing: asks for a snapshot |
/// | Live | a heartbeat with another digest, or behind the last batch | Repairing: asks; after some times in a row Quarantined |
/// | Live | another incarnation; or another version or fleet | Repairing: asks which one lives |
/// | Repairing | a batch | sets its gauges |
/// | Repairing | the whole snapshot of this incarnation | Live; sets the gauges that differ |
/// | Repairing | the whole snapshot of another incarnation | drops the gauges; Live with those of the snapshot |
/// | Repairing | missing batches arrive after all, or the digest is equal again | Live |
/// | Asking, Repairing | a snapshot older than a batch that was heard before the request | Quarantined |
/// | Asking, Repairing | a snapshot that does not add up | asks again; after some times in a row Quarantined |
/// | Asking, Repairing | no answer in time | asks again, each time after twice the time |
/// | Live, Repairing | silence for `silent_ms_max` | Silent; drops the gauges |
/// | Asking | silence for `silent_ms_max` | Silent |
/// | Live, Repairing | too many workers; another fleet in this incarnation | Quarantined |
/// | Quarantined | anything | ignored; Unknown once the time is over, or once a recording may have caused it |
///
/// Quarantined drops the gauges. Only new messages of the live incarnation, and answers with the nonce, end a silence.
/// A message of another incarnation drops nothing by itself, since it may be a recording: the answer decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OriginPhase {
    /// Nothing acceptable was received.
    Unknown,
    /// It was asked for its first snapshot. It does not count yet.
    Asking,
    /// It counts, and this router holds all that it sent.
    Live,
    /// It counts, and something may be missing until a snapshot arrives.
    Repairing,
    /// It was silent for too long and does not count.
    Silent,
    /// It does not count, for this reason.
    Quarantined(QuarantineReason),
}

impl OriginPhase {
    /// The name used in status and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Asking => "asking",
            Self::Live => "live",
            Self::Repairing => "repairing",
            Self::Silent => "silent",
            Self::Quarantined(_) => "quarantined",
        }
    }
}

/// Why a live origin is asked for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Gap,
    Digest,
    WentBack,
    OtherIncarnation,
}

impl Cause {
    const fn notice(self) -> Notice {
        match self {
            Self::Gap => Notice::Gap,
            Self::Digest => Notice::DigestDiffers,
            Self::WentBack => Notice::WentBack,
            Self::OtherIncarnation => Notice::OtherIncarnation,
        }
    }
}

/// A request for a snapshot.
#[derive(Clone, Debug, Default)]
struct Ask {
    /// `None` until it is sent, and after a snapshot that was refused.
    nonce: Option<Nonce>,
    /// The highest sequence number that an incarnation had named when it was sent.
    heard: Option<(Incarnation, u64)>,
    assembly: Option<Assembly>,
}

#[derive(Clone, Debug)]
enum State {
    Unknown,
    Asking { ask: Ask, unproven: Option<OriginGauges> },
    Live { gauges: OriginGauges },
    Repairing { cause: Cause, ask: Ask, gauges: OriginGauges },
    Silent,
    Quarantined { reason: QuarantineReason, until_ms: u64 },
}

/// What a step depends on besides the message, and what it does.
pub(super) struct Step<'a> {
    pub(super) now_ms: u64,
    pub(super) own_fingerprint: Fingerprint,
    pub(super) settings: &'a OriginSettings,
    pub(super) nonces: &'a mut dyn FnMut() -> Nonce,
    pub(super) effects: &'a mut Vec<Effect>,
}

/// One other router.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    id: OriginId,
    place: u8,
    state: State,
    /// Between two requests for a snapshot.
    asks: BackOff,
    /// Between two requests because of another incarnation, so that recordings cannot cause requests without end.
    probes: BackOff,
    quarantines: BackOff,
    /// Snapshots in a row that did not help.
    repairs: u32,
    /// The last message with a valid MAC.
    heard_ms: u64,
    /// The last new message of the live incarnation.
    alive_ms: u64,
    /// The beginning of the window in which bindings are counted, and their number.
    bindings: (u64, usize),
    notices: BTreeMap<Notice, u64>,
}

impl Origin {
    pub(super) fn new(id: OriginId, place: u8, now_ms: u64) -> Self {
        Self {
            id,
            place,
            state: State::Unknown,
            asks: BackOff::default(),
            probes: BackOff::default(),
            quarantines: BackOff::default(),
            repairs: 0,
            heard_ms: now_ms,
            alive_ms: now_ms,
            bindings: (now_ms, 0),
            notices: BTreeMap::new(),
        }
    }

    pub(super) const fn id(&self) -> OriginId {
        self.id
    }

    pub(super) const fn phase(&self) -> OriginPhase {
        match self.state {
            State::Unknown => OriginPhase::Unknown,
            State::Asking { .. } => OriginPhase::Asking,
            State::Live { .. } => OriginPhase::Live,
            State::Repairing { .. } => OriginPhase::Repairing,
            State::Silent => OriginPhase::Silent,
            State::Quarantined { reason, .. } => OriginPhase::Quarantined(reason),
        }
    }

    /// Whether another origin may have its place.
    pub(super) const fn may_be_replaced(&self, now_ms: u64) -> bool {
        match self.state {
            State::Unknown | State::Silent | State::Asking { .. } => true,
            State::Live { .. } | State::Repairing { .. } => false,
            State::Quarantined { until_ms, .. } => now_ms >= until_ms,
        }
    }

    pub(super) const fn heard_ms(&self) -> u64 {
        self.heard_ms
    }

    /// The last new message of the live incarnation.
    pub(super) const fn alive_ms(&self) -> u64 {
        self.alive_ms
    }

    pub(super) const fn notices(&self) -> &BTreeMap<Notice, u64> {
        &self.notices
    }

    /// The gauges that count.
    pub(super) const fn gauges(&self) -> Option<&OriginGauges> {
        match &self.state {
            State::Live { gauges } | State::Repairing { gauges, .. } => Some(gauges),
            State::Unknown | State::Asking { .. } | State::Silent | State::Quarantined { .. } => None,
        }
    }

    pub(super) fn receive(&mut self, message: &Message, step: &mut Step<'_>) {
        self.heard_ms = step.now_ms;
        match &message.content {
            Content::Batch(_) | Content::Heartbeat(_) => self.stream(message, step),
            Content::Section(section) => self.section(message, section, step),
            // The publisher answers it.
            Content::Request(_) => {}
        }
    }

    /// Handles a message of another version (`None` = of an unknown incarnation) or of another fleet.
    pub(super) fn incompatible(
        &mut self,
        incarnation: Option<Incarnation>,
        reason: QuarantineReason,
        step: &mut Step<'_>,
    ) {
        self.heard_ms = step.now_ms;
        match &self.state {
            State::Unknown | State::Silent => self.quarantine(reason, step),
            State::Live { gauges } | State::Repairing { gauges, .. } if incarnation == Some(gauges.incarnation) => {
                self.quarantine(reason, step);
            }
            State::Live { .. } => self.probe(step),
            State::Asking { .. } | State::Repairing { .. } | State::Quarantined { .. } => {
                self.notice(Notice::Ignored, step);
            }
        }
    }

    /// Lets time pass.
    pub(super) fn tick(&mut self, step: &mut Step<'_>) {
        let is_silent = |since_ms: u64| step.now_ms.saturating_sub(since_ms) > step.settings.silent_ms_max;
        match self.state {
            State::Live { .. } | State::Repairing { .. } if is_silent(self.alive_ms) => {
                self.drop_gauges(step);
                self.notice(Notice::Silent, step);
                self.fall_silent();
            }
            State::Asking { .. } if is_silent(self.heard_ms) => self.fall_silent(),
            _ => self.ask(step),
        }
    }

    /// Requests without an answer say nothing of the time after a silence: the next ones begin with a short pause.
    fn fall_silent(&mut self) {
        (self.state, self.asks) = (State::Silent, BackOff::default());
    }

    // ---- the stream ----

    fn stream(&mut self, message: &Message, step: &mut Step<'_>) {
        let is_compatible = message.sender.fingerprint == step.own_fingerprint;
        if let State::Quarantined { reason, until_ms } = self.state {
            if !is_compatible || !reason.ends_when_compatible() && step.now_ms < until_ms {
                return self.notice(Notice::Ignored, step);
            }
            self.state = State::Unknown;
        }
        if !is_compatible {
            return self.incompatible(Some(message.sender.incarnation), QuarantineReason::Fingerprint, step);
        }
        match std::mem::replace(&mut self.state, State::Unknown) {
            State::Unknown | State::Silent | State::Quarantined { .. } => {
                self.state = State::Asking { ask: Ask::default(), unproven: hold(None, message, step.now_ms) };
                self.ask(step);
            }
            State::Asking { ask, unproven } => {
                self.state = State::Asking { ask, unproven: hold(unproven, message, step.now_ms) };
            }
            state @ (State::Live { .. } | State::Repairing { .. }) => {
                self.state = state;
                self.follow(message, step);
            }
        }
    }

    /// Handles a message while the origin counts.
    fn follow(&mut self, message: &Message, step: &mut Step<'_>) {
        let (is_live, own) = match &self.state {
            State::Live { gauges } => (true, gauges.incarnation),
            State::Repairing { gauges, .. } => (false, gauges.incarnation),
            State::Unknown | State::Asking { .. } | State::Silent | State::Quarantined { .. } => return,
        };
        match &message.content {
            _ if message.sender.incarnation != own && is_live => self.probe(step),
            _ if message.sender.incarnation != own => self.notice(Notice::OtherIncarnation, step),
            Content::Batch(batch) => self.batch(batch, step),
            Content::Heartbeat(heartbeat) => self.heartbeat(heartbeat, step),
            Content::Request(_) | Content::Section(_) => {}
        }
    }

    /// Asks which incarnation lives, if that was not asked just now.
    fn probe(&mut self, step: &mut Step<'_>) {
        if self.probes.is_over(step.now_ms) {
            self.probes.begin(step.now_ms, LOAD_ASK_MS_MIN, LOAD_ASK_MS_MAX);
            self.repair(Cause::OtherIncarnation, step);
        } else {
            self.notice(Notice::OtherIncarnation, step);
        }
    }

    fn batch(&mut self, batch: &Batch, step: &mut Step<'_>) {
        let is_live = matches!(self.state, State::Live { .. });
        let (State::Live { gauges } | State::Repairing { gauges, .. }) = &mut self.state else { return };
        if !gauges.is_next(batch.sequence) {
            return self.notice(Notice::Stale, step);
        }
        if gauges.apply(batch, step.now_ms, !is_live) == Err(TooManyWorkers) {
            return self.quarantine(QuarantineReason::TooManyWorkers, step);
        }
        let is_whole = gauges.is_whole();
        self.alive_ms = step.now_ms;
        batch.gauges.iter().for_each(|row| self.set(row, step));
        self.bind(&batch.bindings, step);
        match is_whole {
            false if is_live => self.repair(Cause::Gap, step),
            true => self.recover(Cause::Gap),
            false => {}
        }
    }

    fn heartbeat(&mut self, heartbeat: &Heartbeat, step: &mut Step<'_>) {
        let is_live = matches!(self.state, State::Live { .. });
        let (State::Live { gauges } | State::Repairing { gauges, .. }) = &mut self.state else { return };
        if !gauges.hear(heartbeat) {
            return self.notice(Notice::Stale, step);
        }
        self.alive_ms = step.now_ms;
        let cause = if heartbeat.sequence < gauges.last() {
            Some(Cause::WentBack)
        } else if !gauges.is_whole() {
            Some(Cause::Gap)
        } else if heartbeat.digest != gauges.digest() {
            Some(Cause::Digest)
        } else {
            None
        };
        match cause {
            None => {
                self.asks.succeed();
                self.repairs = 0;
                self.recover(Cause::Digest);
                self.recover(Cause::WentBack);
            }
            Some(cause) if is_live => {
                self.repairs += u32::from(cause == Cause::Digest);
                if self.repairs > LOAD_REPAIRS_MAX {
                    self.notice(cause.notice(), step);
                    return self.quarantine(QuarantineReason::DigestDiffers, step);
                }
                self.repair(cause, step);
            }
            Some(_) => {}
        }
    }

    fn set(&self, row: &WorkerGauge, step: &mut Step<'_>) {
        let (worker, gauge, age_ms) = (row.worker, row.gauge, row.age_ms.into());
        step.effects.push(Effect::SetGauge { place: self.place, worker, gauge, age_ms });
    }

    fn bind(&mut self, bindings: &[Binding], step: &mut Step<'_>) {
        if step.now_ms.saturating_sub(self.bindings.0) >= ORIGIN_BINDINGS_WINDOW_MS {
            self.bindings = (step.now_ms, 0);
        }
        let accepted = bindings.len().min(ORIGIN_BINDINGS_MAX - self.bindings.1);
        self.bindings.1 += accepted;
        step.effects.extend(bindings[..accepted].iter().map(|binding| Effect::Bind(*binding)));
        if accepted < bindings.len() {
            self.notice(Notice::BindingsDropped, step);
        }
    }

    // ---- snapshots ----

    /// Leaves `Live` to take the origin anew.
    fn repair(&mut self, cause: Cause, step: &mut Step<'_>) {
        if let State::Live { gauges } = std::mem::replace(&mut self.state, State::Unknown) {
            self.state = State::Repairing { cause, ask: Ask::default(), gauges };
            self.notice(cause.notice(), step);
            self.ask(step);
        }
    }

    /// Goes back to `Live` if this was the cause of the repair, which is gone without a snapshot.
    fn recover(&mut self, of: Cause) {
        self.state = match std::mem::replace(&mut self.state, State::Unknown) {
            State::Repairing { cause, gauges, .. } if cause == of => State::Live { gauges: without_zeros(gauges) },
            state => state,
        };
    }

    /// Sends a request for a snapshot if one is wanted and the last one is long enough ago.
    fn ask(&mut self, step: &mut Step<'_>) {
        let (ask, held) = match &mut self.state {
            State::Asking { ask, unproven } => (ask, unproven.as_ref()),
            State::Repairing { ask, gauges, .. } => (ask, Some(&*gauges)),
            State::Unknown | State::Live { .. } | State::Silent | State::Quarantined { .. } => return,
        };
        if !self.asks.is_over(step.now_ms) {
            return;
        }
        let nonce = (step.nonces)();
        let heard = held.map(|gauges| (gauges.incarnation, gauges.heard()));
        *ask = Ask { nonce: Some(nonce), heard, assembly: None };
        self.asks.begin(step.now_ms, LOAD_ASK_MS_MIN, LOAD_ASK_MS_MAX);
        let (major_min, major_max) = (MAJOR, MAJOR);
        step.effects.push(Effect::Ask(SnapshotRequest { origin: self.id, nonce, major_min, major_max }));
    }

    fn section(&mut self, message: &Message, section: &SnapshotSection, step: &mut Step<'_>) {
        let incarnation = message.sender.incarnation;
        let ask = match &mut self.state {
            State::Asking { ask, .. } | State::Repairing { ask, .. } if ask.nonce == Some(section.nonce) => ask,
            _ => return self.notice(Notice::NotAsked, step),
        };
        if message.sender.fingerprint != step.own_fingerprint {
            return self.quarantine(QuarantineReason::Fingerprint, step);
        }
        let is_newer = |held: &Assembly| held.incarnation() != incarnation || held.sequence() < section.sequence;
        let assembly = match &mut ask.assembly {
            Some(held) if held.contains(incarnation, section) => held,
            Some(held) if !is_newer(held) => return self.notice(Notice::Stale, step),
            other => other.insert(Assembly::new(incarnation, section)),
        };
        match assembly.take(section) {
            Progress::Incomplete => self.bind(&section.bindings, step),
            Progress::Torn => {
                (ask.nonce, ask.assembly) = (None, None);
                self.notice(Notice::SnapshotTorn, step);
                self.repairs += 1;
                if self.repairs > LOAD_REPAIRS_MAX {
                    self.quarantine(QuarantineReason::DigestDiffers, step);
                }
            }
            Progress::Complete => {
                let ask = std::mem::take(ask);
                self.bind(&section.bindings, step);
                if let Some(snapshot) = ask.assembly {
                    self.settle(&snapshot, ask.heard, step);
                }
            }
        }
    }

    /// Takes a whole snapshot, which proves that its incarnation lives.
    fn settle(&mut self, snapshot: &Assembly, heard: Option<(Incarnation, u64)>, step: &mut Step<'_>) {
        // The origin made the snapshot after it had sent all that this router had heard.
        if heard.is_some_and(|(of, heard)| of == snapshot.incarnation() && snapshot.sequence() < heard) {
            return self.quarantine(QuarantineReason::SequenceLied, step);
        }
        let (held, cause) = match std::mem::replace(&mut self.state, State::Unknown) {
            State::Asking { unproven, .. } => (unproven, None),
            State::Repairing { cause, gauges, .. } => (Some(gauges), Some(cause)),
            State::Unknown | State::Live { .. } | State::Silent | State::Quarantined { .. } => return,
        };
        let (was_live, is_same) = (cause.is_some(), |held: &OriginGauges| held.incarnation == snapshot.incarnation());
        let mut gauges = match held {
            Some(held) if is_same(&held) => {
                if cause == Some(Cause::OtherIncarnation) {
                    self.notice(Notice::Replayed, step);
                }
                held
            }
            _ => {
                if was_live {
                    step.effects.push(Effect::DropGauges { place: self.place });
                    self.notice(Notice::Restarted, step);
                    (self.probes, self.repairs) = (BackOff::default(), 0);
                }
                OriginGauges::new(snapshot.incarnation())
            }
        };
        let is_first = !was_live || gauges.last() == 0;
        let Ok(changed) = gauges.merge(snapshot, step.now_ms) else {
            self.state = State::Live { gauges };
            return self.quarantine(QuarantineReason::TooManyWorkers, step);
        };
        self.alive_ms = step.now_ms;
        let changed = if is_first { gauges.iter().map(|(worker, _)| worker).collect() } else { changed };
        for worker in changed {
            self.set(&held_row(worker, gauges.get(worker), step.now_ms), step);
        }
        let is_whole = gauges.is_whole();
        self.state = State::Live { gauges: if is_whole { without_zeros(gauges) } else { gauges } };
        if !was_live {
            self.notice(Notice::Live, step);
        }
        if !is_whole {
            self.repair(Cause::Gap, step);
        }
    }

    // ---- endings ----

    fn quarantine(&mut self, reason: QuarantineReason, step: &mut Step<'_>) {
        self.drop_gauges(step);
        self.quarantines.begin(step.now_ms, LOAD_QUARANTINE_MS_MIN, LOAD_QUARANTINE_MS_MAX);
        self.repairs = 0;
        self.state = State::Quarantined { reason, until_ms: self.quarantines.next_ms() };
        self.notice(Notice::Quarantined(reason), step);
    }

    fn drop_gauges(&self, step: &mut Step<'_>) {
        if self.gauges().is_some() {
            step.effects.push(Effect::DropGauges { place: self.place });
        }
    }

    fn notice(&mut self, notice: Notice, step: &mut Step<'_>) {
        self.count(notice);
        step.effects.push(Effect::Noticed { origin: self.id, notice });
    }

    /// Counts what the caller reports.
    pub(super) fn count(&mut self, notice: Notice) {
        *self.notices.entry(notice).or_default() += 1;
    }
}

/// A gauge as it is held; one of zeros if it is not.
fn held_row(worker: Worker, held: Option<&HeldGauge>, now_ms: u64) -> WorkerGauge {
    let Some(held) = held else { return WorkerGauge { worker, gauge: Gauge::default(), age_ms: 0 } };
    let age_ms = u32::try_from(now_ms.saturating_sub(held.sent_ms)).unwrap_or(u32::MAX);
    WorkerGauge { worker, gauge: held.gauge, age_ms }
}

fn without_zeros(mut gauges: OriginGauges) -> OriginGauges {
    gauges.forget_zeros();
    gauges
}

/// Keeps a message of an origin that has proven nothing yet. Only one incarnation's are kept: if another one speaks,
/// one of them is a recording, and then the snapshot has to do without them.
fn hold(held: Option<OriginGauges>, message: &Message, now_ms: u64) -> Option<OriginGauges> {
    let incarnation = message.sender.incarnation;
    let is_same = |held: &OriginGauges| held.incarnation == incarnation;
    let mut gauges = held.filter(is_same).unwrap_or_else(|| OriginGauges::new(incarnation));
    match &message.content {
        Content::Batch(batch) if gauges.is_next(batch.sequence) => {
            gauges.apply(batch, now_ms, true).ok()?;
            if !batch.bindings.is_empty() {
                // They are not kept. A snapshot that contains the batch has them.
                gauges.forget_part_of(batch.sequence);
            }
        }
        Content::Heartbeat(heartbeat) => drop(gauges.hear(heartbeat)),
        Content::Batch(_) | Content::Request(_) | Content::Section(_) => {}
    }
    Some(gauges)
}
