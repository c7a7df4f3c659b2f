//! A stream whose publisher replays lost batches: what [`Recovery`] decides, done to the worker.
//!
//! | what happened | the worker | trust |
//! |---|---|---|
//! | connected, or loaded on a connection | its messages wait | recovering |
//! | a live gap | the same, and it is not emptied | recovering |
//! | a live restart, not from 0 | emptied, and its messages wait | joining, recovering |
//! | another incarnation shown by a replay | emptied, and its messages wait | joining, recovering |
//! | a replay from 0 | | exact, but recovering |
//! | recovered | goes on with what waits | as before |
//! | a replay from 0 shows that nothing was sent | holds nothing | exact |
//! | batches cannot be had | emptied, goes on behind them | gap, or joined_late where nothing was known |
//! | they can be had after all | emptied, and its messages wait | exact, but recovering |
//! | disconnected | what waits is dropped | disconnected, until it is recovered on the next connection |
//!
//! Messages that wait are compared with what was replayed once they are applied: the gate remembers both. Those that
//! are one too many are dropped from the oldest on, since a replay goes up to the publisher's present.

use xxhash_rust::xxh3::xxh3_64;

use super::hold::{Held, HeldBytes, Message, Purpose};
use super::{SpaceShard, Now, Scratch, Stream};
use crate::event::gate::{SequenceGate, Verdict};
use crate::event::recovery::{Aim, Ended, Replayed};
use crate::event::trust::TrustInput;
use crate::ids::EventSeq;
use crate::ingest::dump::AbortReason;
use crate::metrics::WorkerCounter;
use crate::trust::{TrustLevel, TrustReason};

/// Why there is no more of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum ReplayEnd {
    /// Its end marker came.
    Marker,
    /// It did not come, or not further, in time; or its socket failed.
    Missing,
    /// It brought more than one replay may.
    TooLarge,
}

impl Stream {
    /// Whether lost batches can be fetched again.
    pub(in crate::ingest) const fn can_recover(&self) -> bool {
        self.recovery.is_some()
    }

    /// Whether messages wait for lost ones.
    pub(in crate::ingest) fn is_recovering(&self) -> bool {
        self.held.as_ref().is_some_and(|held| matches!(held.purpose, Purpose::Recovery(_)) && !held.is_releasing())
    }

    /// Counts what waits together with the other streams of a shard.
    pub(in crate::ingest) fn share_held_bytes(&mut self, of_shard: &HeldBytes) {
        self.held_of_shard = of_shard.clone();
    }

    /// Whether its publisher replays from now on.
    pub(in crate::ingest) fn set_replays(&mut self, replays: bool) {
        self.recovery = replays.then(|| self.recovery.take().unwrap_or_default());
    }

    /// How many messages wait.
    pub(in crate::ingest) fn waiting(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.len())
    }

    /// The publisher is connected, and nothing of this connection has been taken.
    pub(in crate::ingest) fn connected(&mut self, space: &mut SpaceShard, now: Now) {
        self.changed = true;
        if let Some(recovery) = &mut self.recovery {
            recovery.connected(now.uptime_ms);
            self.hold_for_recovery(SequenceGate::default(), now);
        } else if self.gate.last().is_some() {
            // Loaded before there was a connection, and nothing can show that this one goes on there.
            tracing::info!(worker = %self.worker, "what was loaded cannot be proven without a replay endpoint; the worker is emptied");
            self.gate.disconnected();
            self.empty(space, TrustInput::Disconnected, now);
        }
    }

    /// A dump or load begins: nothing else is to change the worker.
    pub(super) fn cancel_optional(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.cancel_optional();
        }
    }

    /// A dump was loaded: what followed it may have been lost.
    pub(super) fn prove_loaded(&mut self, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
        }
    }

    /// What waits may be applied, unless lost batches are to be fetched first.
    pub(super) fn release_or_recover(&mut self, now: Now) {
        let proves = self.recovery.as_ref().is_some_and(|recovery| recovery.is_proving());
        let Some(held) = &mut self.held else { return };
        if proves && !held.is_releasing() {
            held.hold_on(Purpose::Recovery(Box::default()));
            self.changed = true;
            self.input(TrustInput::Recovering, now);
        } else {
            held.release();
        }
    }

    /// Lets messages wait from now on. A dump or load that runs comes first.
    pub(super) fn hold_for_recovery(&mut self, ahead: SequenceGate, now: Now) {
        self.input(TrustInput::Recovering, now);
        let purpose = Purpose::Recovery(Box::new(ahead));
        match &mut self.held {
            None => self.held = Some(Box::new(Held::new(purpose, self.held_of_shard.clone()))),
            Some(held) if held.is_releasing() || matches!(held.purpose, Purpose::Recovery(_)) => held.hold_on(purpose),
            Some(_) => {}
        }
    }

    /// Whether a live batch is to wait because of what is missing before it.
    pub(super) fn holds_for_lost(
        &mut self,
        space: &mut SpaceShard,
        (seq, payload_hash): (EventSeq, u64),
        payload: &[u8],
        now: Now,
    ) -> bool {
        let Some(recovery) = &mut self.recovery else { return false };
        match self.gate.judge(seq, payload_hash) {
            Verdict::InOrder | Verdict::Duplicate | Verdict::First { seq: EventSeq(0), .. } => {
                recovery.live(now.uptime_ms);
                return false;
            }
            Verdict::First { .. } if recovery.gave_up() => return false,
            Verdict::Restart { seq: EventSeq(0), .. } => {
                recovery.live(now.uptime_ms);
                return false;
            }
            Verdict::First { .. } => recovery.begin(now.uptime_ms),
            Verdict::Gap { expected, got, missed } => {
                recovery.begin(now.uptime_ms);
                tracing::warn!(worker = %self.worker, %expected, %got, missed, "gap in the event stream; what is missing is asked for");
                self.count(WorkerCounter::Gaps, 1);
            }
            Verdict::Restart { .. } => {
                recovery.begin(now.uptime_ms);
                self.another_incarnation(space, seq, now);
            }
        }
        self.changed = true;
        let mut ahead = self.gate.clone();
        ahead.batch(seq, payload_hash);
        self.hold_for_recovery(ahead, now);
        if let Some(held) = &mut self.held {
            held.put_back(Message::Batch { seq, payload_hash, payload: payload.into() });
            self.count(WorkerCounter::MessagesHeld, 1);
        }
        true
    }

    /// Lets a message wait for lost ones.
    pub(super) fn wait_for_recovery(&mut self, space: &mut SpaceShard, message: Message, now: Now) {
        let Some(held) = self.held.as_deref_mut() else { return };
        if let (Purpose::Recovery(ahead), Message::Batch { seq, payload_hash, .. }) = (&mut held.purpose, &message) {
            match ahead.batch(*seq, *payload_hash) {
                Verdict::Duplicate => return self.count(WorkerCounter::Duplicates, 1),
                Verdict::Restart { seq, .. } => {
                    // What waits is of the incarnation before.
                    held.clear();
                    self.dropped = None;
                    if let Some(recovery) = &mut self.recovery {
                        recovery.begin(now.uptime_ms);
                    }
                    self.another_incarnation(space, seq, now);
                    self.input(TrustInput::Recovering, now);
                }
                Verdict::First { .. } | Verdict::InOrder | Verdict::Gap { .. } => {}
            }
        }
        let Some(held) = self.held.as_deref_mut() else { return };
        held.push(message);
        let (mut dropped, mut last) = (0, self.dropped);
        while held.is_over() {
            if let Some(Message::Batch { seq, .. }) = held.pop() {
                last = Some(seq);
            }
            dropped += 1;
        }
        self.dropped = last;
        self.count(WorkerCounter::MessagesHeld, 1);
        self.drop_for_bound(dropped);
        self.settle_if_nothing_is_missing(now);
    }

    /// A replay went on at `seq` with nothing known before it. Batches before it that wait can be neither applied nor
    /// compared any more, and would look like another incarnation's.
    fn drop_passed_over(&mut self, seq: EventSeq) {
        let dropped = self.held.as_mut().map_or(0, |held| held.drop_before(seq));
        self.count(WorkerCounter::MessagesPassedOver, dropped as u64);
    }

    fn drop_for_bound(&self, messages: u64) {
        if messages == 0 {
            return;
        }
        let before = self.view.counters.get(WorkerCounter::MessagesDropped);
        self.count(WorkerCounter::MessagesDropped, messages);
        if before == 0 || (before + messages).ilog2() > before.ilog2() {
            tracing::warn!(
                worker = %self.worker, times = before + messages,
                remedy = "check why the engine's replay socket is slow; raise its buffer_steps, so that it still has them",
                "more live messages than may wait for a recovery; the oldest are dropped and have to be replayed"
            );
        }
    }

    /// A stream of which nothing is known and whose very first batch waits needs no replay.
    fn settle_if_nothing_is_missing(&mut self, now: Now) {
        let first = self.held.as_ref().and_then(|held| held.first_seq());
        if self.gate.last().is_none() && self.dropped.is_none() && first == Some(EventSeq(0)) {
            if let Some(recovery) = &mut self.recovery {
                recovery.settled();
            }
            self.recovered(now);
        }
    }

    /// Empties the worker, of which everything known was another incarnation's.
    pub(super) fn another_incarnation(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        tracing::info!(worker = %self.worker, before = ?self.gate.last(), %seq, "the publisher restarted; the worker is emptied, and what it sent since is asked for");
        self.changed = true;
        self.count(WorkerCounter::Restarts, 1);
        self.forget_incarnation();
        self.empty(space, TrustInput::RestartedUnheard, now);
        self.gate = SequenceGate::default();
    }

    /// The connection broke: what waits is of it, and the next one has to show that it goes on there.
    pub(super) fn wait_for_connection(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.disconnected();
        }
        self.gate.forget_replayed();
        self.dropped = None;
        let waits = self.held.take_if(|held| matches!(held.purpose, Purpose::Recovery(_)));
        let messages = waits.map_or(0, |mut held| held.clear());
        self.count(WorkerCounter::MessagesDroppedBroken, messages as u64);
    }

    /// What a replay is to be asked for now, if one is.
    pub(in crate::ingest) fn wants_replay(&self, now: Now) -> Option<Aim> {
        // A dump or load comes first; and what it let wait, before anything more is asked.
        let free = self.held.is_none() || self.is_recovering();
        self.recovery.as_ref().filter(|_| free)?.wants(now.uptime_ms)
    }

    /// A replay is being asked for; answers from which sequence.
    pub(in crate::ingest) fn ask_replay(&mut self, now: Now) -> Option<EventSeq> {
        let recovery = self.recovery.as_mut()?;
        match recovery.wants(now.uptime_ms) {
            Some(Aim::Probe) => self.view.counters.bump(WorkerCounter::Probes),
            Some(Aim::Renew) => self.view.counters.bump(WorkerCounter::Renewals),
            Some(Aim::Prove) | None => {}
        }
        let from = recovery.ask(&self.gate, now.uptime_ms);
        self.count(WorkerCounter::ReplaysAsked, 1);
        Some(from)
    }

    /// Whether a replay's answer is waited for.
    pub(in crate::ingest) fn awaits_replay(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.is_asking())
    }

    /// Nothing of a replay can be taken now, which is not the publisher's fault.
    pub(in crate::ingest) fn excuse_replay(&mut self, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.excuse(now.uptime_ms);
        }
    }

    /// Whether the replay that is waited for is overdue.
    pub(in crate::ingest) fn replay_is_overdue(&self, now: Now) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.is_overdue(now.uptime_ms))
    }

    /// Probes a worker that was quiet for so long, 0 = never, and renews one that has lost batches for good.
    pub(in crate::ingest) fn probe(&mut self, probe_after_ms: u64, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            if self.shown.level == TrustLevel::Exact {
                recovery.forget_losses();
            }
            recovery.tick(probe_after_ms, now.uptime_ms);
        }
    }

    /// Takes a batch of a replay.
    pub(in crate::ingest) fn replayed(
        &mut self,
        space: &mut SpaceShard,
        scratch: &mut Scratch,
        seq: EventSeq,
        payload: &[u8],
        now: Now,
    ) {
        if self.is_taking_snapshot() && self.awaits_replay() {
            return self.fail_snapshot(space, AbortReason::Corrupt, now);
        }
        let Some(recovery) = &mut self.recovery else { return };
        let payload_hash = xxh3_64(payload);
        let was_proving = recovery.is_proving();
        let replayed = recovery.replayed(&self.gate, seq, payload_hash, now.uptime_ms);
        match replayed {
            Replayed::Skip | Replayed::Unasked => return,
            Replayed::Apply => {}
            Replayed::Unfillable => self.unfillable(space, seq, now),
            Replayed::Renewed => self.renew(space, now),
            Replayed::Forgotten => {
                tracing::info!(worker = %self.worker, first = %seq, remedy = FORGOTTEN_REMEDY, "the publisher has the beginning of its stream no more; what was lost stays lost");
                return self.count(WorkerCounter::ReplaysLate, 1);
            }
            Replayed::AnotherIncarnation => return self.restarted_unseen(space, seq, now),
            Replayed::Hole => return self.asks_again(WorkerCounter::ReplayHoles, now),
            Replayed::Late => return self.asks_again(WorkerCounter::ReplaysLate, now),
        }
        let verdict = self.gate.replayed(seq, payload_hash);
        if replayed == Replayed::Unfillable || matches!(verdict, Verdict::First { .. }) {
            self.drop_passed_over(seq);
        }
        self.count(WorkerCounter::BatchesReplayed, 1);
        self.apply_judged(space, scratch, (verdict, seq), payload, now);
        if was_proving || replayed == Replayed::Renewed {
            // The first batch of all takes every reason away, and there may be more to come.
            self.input(TrustInput::Recovering, now);
        }
    }

    /// There is no more of a replay.
    pub(in crate::ingest) fn replay_ended(&mut self, space: &mut SpaceShard, end: ReplayEnd, now: Now) {
        if self.is_taking_snapshot() && end != ReplayEnd::TooLarge {
            self.end_within_snapshot(space, end, now);
            if !self.awaits_replay() {
                return;
            }
        }
        let Some(recovery) = &mut self.recovery else { return };
        let was_probing = recovery.is_asking() && !recovery.is_proving();
        let has_advanced = recovery.has_advanced();
        if end == ReplayEnd::TooLarge && recovery.abort_reason(now.uptime_ms) {
            return self.asks_again(WorkerCounter::ReplaysLate, now);
        }
        let first = self.held.as_ref().and_then(|held| held.first_seq());
        let needs = first.or(self.dropped.and_then(|seq| seq.0.checked_add(1)).map(EventSeq));
        let ended = recovery.ended(&self.gate, needs, end == ReplayEnd::Marker, now.uptime_ms);
        let outcome =
            if end == ReplayEnd::Marker { WorkerCounter::ReplaysAnswered } else { WorkerCounter::ReplaysTimedOut };
        self.count(outcome, u64::from(ended != Ended::Unasked));
        match ended {
            Ended::Recovered if was_probing && has_advanced => {
                tracing::warn!(worker = %self.worker, last = ?self.gate.last(), "the last batches of a quiet publisher had been lost; a probe brought them");
                self.changed = true;
                self.count(WorkerCounter::TailsFound, 1);
            }
            // Quiet, and nothing new: the live stream has no more of what was replayed.
            Ended::Recovered if was_probing => self.gate.forget_replayed(),
            Ended::Recovered => self.recovered(now),
            Ended::NothingSent => self.nothing_sent(space, now),
            Ended::AnotherIncarnation => self.restarted_unseen(space, EventSeq(0), now),
            Ended::Short => self.asks_again(WorkerCounter::ReplaysLate, now),
            Ended::TimedOut => self.hold_on_for_recovery(now),
            Ended::GivenUp => self.unrecovered(space, now),
            Ended::ProbeUnanswered => tracing::info!(
                worker = %self.worker, remedy = REPLAY_REMEDY, "a quiet publisher does not answer at its replay endpoint"
            ),
            Ended::RenewalUnanswered => tracing::debug!(
                worker = %self.worker, remedy = REPLAY_REMEDY, "what was lost was asked for once more, without an answer"
            ),
            Ended::Unasked => {}
        }
    }

    /// A replay showed that another incarnation speaks.
    fn restarted_unseen(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        self.another_incarnation(space, seq, now);
        self.hold_on_for_recovery(now);
    }

    fn asks_again(&mut self, counter: WorkerCounter, now: Now) {
        self.count(counter, 1);
        let times = self.view.counters.get(counter);
        if times.is_power_of_two() {
            let (reason, last) = (crate::metrics::CounterName::name(counter), self.gate.last());
            tracing::info!(worker = %self.worker, reason, ?last, times, "a replay was not whole; it is asked for again");
        }
        self.hold_on_for_recovery(now);
    }

    /// Lets messages wait on; a probe that shows something missing makes them wait from now on.
    pub(super) fn hold_on_for_recovery(&mut self, now: Now) {
        self.changed = true;
        if self.held.is_none() {
            self.hold_for_recovery(self.gate.clone(), now);
        } else {
            self.input(TrustInput::Recovering, now);
        }
    }

    /// The publisher has sent nothing, so it holds nothing, and whatever it sends will be seen from 0.
    fn nothing_sent(&mut self, space: &mut SpaceShard, now: Now) {
        self.changed = true;
        self.dropped = None;
        self.count(WorkerCounter::Recoveries, 1);
        tracing::info!(worker = %self.worker, "the publisher has sent nothing yet");
        self.empty(space, TrustInput::NothingSent, now);
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    /// Nothing is missing: what waits may be applied.
    fn recovered(&mut self, now: Now) {
        self.changed = true;
        self.dropped = None;
        self.count(WorkerCounter::Recoveries, 1);
        tracing::info!(worker = %self.worker, last = ?self.gate.last(), "nothing is missing in the event stream");
        self.input(TrustInput::Recovered { known: self.gate.last().is_some() }, now);
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    /// A stream begins here: what was lost of the one before is of no account, and of this one nothing is from 0 on.
    pub(super) fn note_beginning(&mut self, seq: EventSeq) {
        if let Some(recovery) = self.recovery.as_mut().filter(|_| seq == EventSeq(0)) {
            recovery.forget_losses();
        }
    }

    /// Begins the worker anew: its publisher has all of its life after all, and what it sent live is in it.
    pub(super) fn renew(&mut self, space: &mut SpaceShard, now: Now) {
        tracing::info!(worker = %self.worker, last = ?self.gate.last(), "a publisher that batches were lost of can replay all of them; the worker begins anew");
        self.changed = true;
        self.count(WorkerCounter::Renewed, 1);
        self.dropped = self.dropped.max(self.gate.last());
        let ahead = std::mem::take(&mut self.gate);
        self.forget_incarnation();
        self.empty(space, TrustInput::Recovering, now);
        self.hold_for_recovery(ahead, now);
    }

    /// What is missing before a batch of a replay cannot be had.
    pub(super) fn unfillable(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        self.lose(space, seq, now);
        self.gate.go_on_before(seq);
    }

    /// What is missing cannot be had at all: the worker goes on with what waits, or with what comes.
    pub(super) fn unrecovered(&mut self, space: &mut SpaceShard, now: Now) {
        let first = self.held.as_ref().and_then(|held| held.first_seq());
        let known = self.gate.last().is_some();
        if known {
            self.lose(space, first.unwrap_or_default(), now);
        } else {
            tracing::warn!(worker = %self.worker, remedy = REPLAY_REMEDY, "no replay from the beginning; the worker is joined as it is");
            self.input(TrustInput::Recovered { known }, now);
        }
        match first.filter(|_| known) {
            Some(first) => self.gate.go_on_before(first),
            None => self.gate = SequenceGate::default(),
        }
        self.dropped = None;
        self.changed = true;
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    pub(super) fn lose(&mut self, space: &mut SpaceShard, next: EventSeq, now: Now) {
        let last = self.gate.last().unwrap_or_default();
        let missed = next.0.saturating_sub(last.0).saturating_sub(1);
        tracing::warn!(
            worker = %self.worker, %last, missed, remedy = TrustReason::Gap.remedy(),
            "lost batches cannot be fetched again; the worker is emptied"
        );
        self.count(WorkerCounter::ReplaysUnfillable, 1);
        self.count(WorkerCounter::BatchesMissed, missed);
        self.forget_incarnation();
        self.empty(space, TrustInput::Gap, now);
    }
}

/// What an operator can do where a publisher does not replay.
const REPLAY_REMEDY: &str = "check the worker's replay endpoint, and that the engine was started with one";
/// What an operator can do where a publisher's buffer is too short.
const FORGOTTEN_REMEDY: &str =
    "raise the engine's buffer_steps, or put a relay beside it; restart it to be exact again";
