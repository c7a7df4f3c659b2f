//! The recovery of lost batches: applies to the worker what [`Recovery`](crate::event::recovery::Recovery) decides.
//!
//! | event | the worker | trust |
//! |---|---|---|
//! | connected, or loaded on a connection | its messages wait | recovering |
//! | a live gap | the same, and it is not emptied | recovering |
//! | a live restart, not from 0 | emptied, and its messages wait | joining, recovering |
//! | another incarnation shown by a replay | emptied, and its messages wait | joining, recovering |
//! | a replay from 0 | | exact, but recovering |
//! | recovered | the messages that wait are applied | as before |
//! | a replay from 0 shows that the publisher has sent nothing | holds nothing | exact |
//! | lost batches cannot be fetched | emptied, goes on behind them | gap, or joined_late if nothing was known |
//! | they can be fetched after all | emptied, and its messages wait | exact, but recovering |
//! | disconnected | the messages that wait are dropped | disconnected, until it is recovered on the next connection |
//! | the publisher can no longer replay | emptied, and the messages that wait are dropped | disconnected, until the next first batch |
//!
//! Once messages that waited are applied, the gate compares them with the replayed batches: it remembers both. Messages
//! beyond the limit are dropped, the oldest first, because a replay goes up to the publisher's present.

use xxhash_rust::xxh3::xxh3_64;

use super::hold::{HeldBytes, Message, StreamState};
use super::{Now, Scratch, Stream};
use crate::event::recovery::{Aim, Ended, Recovery, Replayed};
use crate::event::sequence_gate::{SequenceGate, Verdict};
use crate::event::worker_trust::TrustInput;
use crate::ids::EventSeq;
use crate::ingest::dump::AbortReason;
use crate::ingest::space_shard::SpaceShard;
use crate::metrics::WorkerCounter;
use crate::trust::{TrustLevel, TrustReason};

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingest) enum ReplayEnd {
    /// Its end marker came.
    Marker,
    /// It did not come, or did not go on, in time; or its socket failed.
    Missing,
    /// It brought more bytes than one replay may.
    TooLarge,
}

impl Stream {
    /// Whether the publisher can replay lost batches.
    pub(in crate::ingest) const fn can_recover(&self) -> bool {
        self.recovery.is_some()
    }

    pub(in crate::ingest) const fn is_recovering(&self) -> bool {
        self.state.is_recovering()
    }

    /// Counts the messages that wait together with those of the other streams of a shard.
    pub(in crate::ingest) fn share_held_bytes(&mut self, of_shard: &HeldBytes) {
        self.held_of_shard = of_shard.clone();
    }

    /// Sets whether its publisher can replay. A recovery of a publisher that no longer can ends: nothing would end it
    /// later. [`Stream::disconnected`] has to follow, which empties the worker.
    pub(in crate::ingest) fn set_replays(&mut self, replays: bool, now: Now) {
        if replays {
            self.recovery.get_or_insert_default();
        } else if self.recovery.is_some() {
            self.wait_for_connection();
            self.recovery = None;
            self.input(TrustInput::Recovered { known: self.gate.last().is_some() }, now);
        }
    }

    /// Whether something will end the state Recovering and the reason of that name: a replay that is wanted or asked
    /// for, or the end of a load.
    pub(super) fn recovery_will_end(&self) -> bool {
        let proves = self.recovery.as_ref().is_some_and(Recovery::is_proving);
        let is_loading = matches!(self.state, StreamState::Loading { .. });
        let has_reason = self.trust.own_reasons().contains(TrustReason::Recovering);
        // With a publisher that can replay, the next connection begins a recovery.
        (proves || !self.is_recovering()) && (self.can_recover() || is_loading || !has_reason)
    }

    /// How many messages wait.
    pub(in crate::ingest) fn waiting(&self) -> usize {
        self.state.waiting_len()
    }

    /// Handles a new connection, of which no message has been taken.
    pub(in crate::ingest) fn connected(&mut self, space: &mut SpaceShard, now: Now) {
        self.changed = true;
        if let Some(recovery) = &mut self.recovery {
            recovery.connected(now.uptime_ms);
            self.hold_for_recovery(SequenceGate::default(), now);
        } else if self.gate.last().is_some() {
            // A load came before the connection, and nothing can show that this connection goes on where the load ends.
            tracing::info!(worker = %self.worker, "loaded blocks cannot be proven without a replay endpoint; the worker is emptied");
            self.gate.disconnected();
            self.empty(space, TrustInput::Disconnected, now);
        }
    }

    /// Forgets lost batches: the worker holds all that its engine does, whatever was lost before.
    pub(super) fn forget_losses(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.forget_losses();
        }
    }

    /// Cancels probes and renewals: a dump or load begins, and nothing else is to change the worker.
    pub(super) fn cancel_optional(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.cancel_optional();
        }
    }

    /// Asks for a replay after a load: batches behind the dump may have been lost.
    pub(super) fn prove_loaded(&mut self, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.begin(now.uptime_ms);
        }
    }

    /// Applies the messages that wait, unless lost batches are to be fetched first.
    pub(super) fn release_or_recover(&mut self, now: Now) {
        if self.state.is_live() {
            return;
        }
        let proves = self.recovery.as_ref().is_some_and(|recovery| recovery.is_proving());
        if proves && !self.state.is_releasing() {
            self.state.recover(SequenceGate::default(), &self.held_of_shard);
            self.changed = true;
            self.input(TrustInput::Recovering, now);
        } else {
            self.state.release();
        }
    }

    /// Holds messages until lost batches have been fetched. A dump or load that runs ends first.
    pub(super) fn hold_for_recovery(&mut self, ahead: SequenceGate, now: Now) {
        self.input(TrustInput::Recovering, now);
        if !matches!(self.state, StreamState::Dumping { .. } | StreamState::Loading { .. }) {
            self.state.recover(ahead, &self.held_of_shard);
        }
    }

    /// Holds a live batch if batches before it are missing, and returns whether it did.
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
                tracing::warn!(worker = %self.worker, %expected, %got, missed, "gap in the event stream; the daemon asks for a replay");
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
        if let Some(waiting) = self.state.waiting_mut() {
            waiting.put_back(Message::Batch { seq, payload_hash, payload: payload.into() });
            self.count(WorkerCounter::MessagesHeld, 1);
        }
        true
    }

    /// Holds a message while lost batches are fetched.
    pub(super) fn wait_for_recovery(&mut self, space: &mut SpaceShard, message: Message, now: Now) {
        if let (StreamState::Recovering { ahead, waiting }, Message::Batch { seq, payload_hash, .. }) =
            (&mut self.state, &message)
        {
            match ahead.batch(*seq, *payload_hash) {
                Verdict::Duplicate => return self.count(WorkerCounter::Duplicates, 1),
                Verdict::Restart { seq, .. } => {
                    // The messages that wait belong to the earlier incarnation.
                    waiting.clear();
                    self.last_dropped = None;
                    if let Some(recovery) = &mut self.recovery {
                        recovery.begin(now.uptime_ms);
                    }
                    self.another_incarnation(space, seq, now);
                    self.input(TrustInput::Recovering, now);
                }
                Verdict::First { .. } | Verdict::InOrder | Verdict::Gap { .. } => {}
            }
        }
        let Some(waiting) = self.state.waiting_mut() else { return };
        waiting.push(message);
        let (mut dropped, mut last) = (0, self.last_dropped);
        while waiting.is_over() {
            if let Some(Message::Batch { seq, .. }) = waiting.pop() {
                last = Some(seq);
            }
            dropped += 1;
        }
        self.last_dropped = last;
        self.count(WorkerCounter::MessagesHeld, 1);
        self.drop_for_bound(dropped);
        self.settle_if_nothing_is_missing(now);
    }

    /// Drops the batches before `seq` that wait: a replay went on at `seq` with nothing known before it. They can be
    /// neither applied nor compared any more, and would look like batches of another incarnation.
    fn drop_passed_over(&mut self, seq: EventSeq) {
        let dropped = self.state.waiting_mut().map_or(0, |waiting| waiting.drop_before(seq));
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
                remedy = "check why the engine's replay socket is slow; raise its buffer_steps, so that it still has these batches",
                "more live messages wait for a recovery than may; the oldest are dropped, and the replay has to bring them"
            );
        }
    }

    /// Ends the recovery of a stream of which nothing is known if its very first batch waits: nothing is missing. A
    /// snapshot that has begun goes on: what has come of it must not be counted once more from the first batch on.
    fn settle_if_nothing_is_missing(&mut self, now: Now) {
        let is_unknown = self.gate.last().is_none() && self.last_dropped.is_none() && !self.is_taking_snapshot();
        if is_unknown && self.state.first_seq() == Some(EventSeq(0)) {
            if let Some(recovery) = &mut self.recovery {
                recovery.settled();
            }
            self.recovered(now);
        }
    }

    /// Restarts the worker for an incarnation of which nothing has been applied yet. A replay has to bring it from 0
    /// on.
    pub(super) fn another_incarnation(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        tracing::info!(worker = %self.worker, before = ?self.gate.last(), %seq, "the publisher restarted; the worker is emptied, and the daemon asks for all batches since");
        self.restart(space, TrustInput::RestartedUnseen, now);
        self.own_snapshots.forget_lifetime();
        self.gate = SequenceGate::default();
    }

    /// Drops the messages that wait for a recovery: the connection broke, and the next one has to show that the stream
    /// goes on there.
    pub(super) fn wait_for_connection(&mut self) {
        if let Some(recovery) = &mut self.recovery {
            recovery.disconnected();
        }
        self.gate.forget_replayed();
        self.last_dropped = None;
        let is_recovery =
            matches!(self.state, StreamState::Recovering { .. } | StreamState::Releasing { after_recovery: true, .. });
        let waiting = if is_recovery { self.state.take_waiting() } else { None };
        let messages = waiting.map_or(0, |mut waiting| waiting.clear());
        self.count(WorkerCounter::MessagesDroppedBroken, messages as u64);
    }

    /// The aim of the replay to ask for now, if any.
    pub(in crate::ingest) fn wants_replay(&self, now: Now) -> Option<Aim> {
        // A dump or load comes first, and then the messages that waited for it.
        let free = self.state.is_live() || self.state.is_recovering();
        self.recovery.as_ref().filter(|_| free)?.wants(now.uptime_ms)
    }

    /// Notes that the shard asks for a replay. Returns the sequence number to begin at.
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

    /// Whether the stream waits for the answer to a replay.
    pub(in crate::ingest) fn awaits_replay(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.is_asking())
    }

    /// Restarts the deadline of a replay: its answer cannot be taken now, which is not the publisher's fault.
    pub(in crate::ingest) fn excuse_replay(&mut self, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            recovery.excuse(now.uptime_ms);
        }
    }

    /// Whether the deadline of the replay has passed.
    pub(in crate::ingest) fn replay_has_timed_out(&self, now: Now) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.has_timed_out(now.uptime_ms))
    }

    /// Probes a worker that was quiet for `probe_after_ms`, 0 = never, and renews one that has lost batches for good.
    pub(in crate::ingest) fn probe(&mut self, probe_after_ms: u64, now: Now) {
        if let Some(recovery) = &mut self.recovery {
            if self.shown.level == TrustLevel::Exact {
                recovery.forget_losses();
            }
            recovery.tick(probe_after_ms, now.uptime_ms);
        }
    }

    /// Applies a batch of a replay.
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
                tracing::info!(worker = %self.worker, first = %seq, remedy = FORGOTTEN_REMEDY, "the publisher no longer has the beginning of its stream; the lost batches stay lost");
                return self.count(WorkerCounter::ReplaysLate, 1);
            }
            Replayed::AnotherIncarnation => return self.restarted_unseen(space, seq, now),
            Replayed::GivenUp => return self.unrecovered(space, now),
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
            // The stream's first batch removes every reason, and more batches may follow.
            self.input(TrustInput::Recovering, now);
        }
    }

    /// Handles the end of a replay.
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
        if end == ReplayEnd::TooLarge && recovery.broken_off(now.uptime_ms) {
            return self.asks_again(WorkerCounter::ReplaysLate, now);
        }
        let first = self.state.first_seq();
        let needs = first.or(self.last_dropped.and_then(|seq| seq.0.checked_add(1)).map(EventSeq));
        let ended = recovery.ended(&self.gate, needs, end == ReplayEnd::Marker, now.uptime_ms);
        let outcome =
            if end == ReplayEnd::Marker { WorkerCounter::ReplaysAnswered } else { WorkerCounter::ReplaysTimedOut };
        self.count(outcome, u64::from(ended != Ended::Unasked));
        match ended {
            Ended::Recovered if was_probing && has_advanced => {
                tracing::warn!(worker = %self.worker, last = ?self.gate.last(), "the last batches of a quiet publisher were lost; a probe has fetched them");
                self.changed = true;
                self.count(WorkerCounter::TailsFound, 1);
            }
            // The publisher is quiet and the probe brought nothing new, so the live stream will not repeat replayed
            // batches.
            Ended::Recovered if was_probing => self.gate.forget_replayed(),
            Ended::Recovered => self.recovered(now),
            Ended::NothingSent => self.nothing_sent(space, now),
            Ended::AnotherIncarnation => self.restarted_unseen(space, EventSeq(0), now),
            Ended::Short => self.asks_again(WorkerCounter::ReplaysLate, now),
            Ended::TimedOut => self.hold_on_for_recovery(now),
            Ended::GivenUp => self.unrecovered(space, now),
            Ended::ProbeUnanswered => tracing::info!(
                worker = %self.worker, remedy = REPLAY_REMEDY, "a quiet publisher does not answer a probe at its replay endpoint"
            ),
            Ended::RenewalUnanswered => tracing::debug!(
                worker = %self.worker, remedy = REPLAY_REMEDY, "the publisher did not answer when asked for lost batches once more"
            ),
            Ended::Unasked => {}
        }
    }

    /// Restarts the worker because a replay showed another incarnation.
    fn restarted_unseen(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        self.another_incarnation(space, seq, now);
        self.hold_on_for_recovery(now);
    }

    fn asks_again(&mut self, counter: WorkerCounter, now: Now) {
        self.count(counter, 1);
        let times = self.view.counters.get(counter);
        if times.is_power_of_two() {
            let (reason, last) = (crate::metrics::CounterName::name(counter), self.gate.last());
            tracing::info!(worker = %self.worker, reason, ?last, times, "a replay was incomplete; the daemon asks again");
        }
        self.hold_on_for_recovery(now);
    }

    /// Holds messages further, or from now on if a probe showed that batches are missing.
    pub(super) fn hold_on_for_recovery(&mut self, now: Now) {
        self.changed = true;
        if self.state.is_live() {
            self.hold_for_recovery(self.gate.clone(), now);
        } else {
            self.input(TrustInput::Recovering, now);
        }
    }

    /// Empties the worker: the publisher has sent nothing, so it holds nothing, and its batches will be seen from 0 on.
    fn nothing_sent(&mut self, space: &mut SpaceShard, now: Now) {
        self.changed = true;
        self.last_dropped = None;
        self.count(WorkerCounter::Recoveries, 1);
        tracing::info!(worker = %self.worker, "the publisher has sent nothing yet");
        self.empty(space, TrustInput::NothingSent, now);
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    /// Ends a recovery: nothing is missing, and the messages that wait may be applied.
    fn recovered(&mut self, now: Now) {
        self.changed = true;
        self.last_dropped = None;
        self.count(WorkerCounter::Recoveries, 1);
        tracing::info!(worker = %self.worker, last = ?self.gate.last(), "recovered: no batch of the event stream is missing");
        self.input(TrustInput::Recovered { known: self.gate.last().is_some() }, now);
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    /// Forgets lost batches if a stream begins at 0: those of the earlier stream no longer matter, and this one lacks
    /// none.
    pub(super) fn note_beginning(&mut self, seq: EventSeq) {
        if let Some(recovery) = self.recovery.as_mut().filter(|_| seq == EventSeq(0)) {
            recovery.forget_losses();
        }
    }

    /// Begins the worker anew: its publisher can replay its whole stream after all, including the batches that it sent
    /// live.
    fn renew(&mut self, space: &mut SpaceShard, now: Now) {
        tracing::info!(worker = %self.worker, last = ?self.gate.last(), "the publisher can replay lost batches after all; the worker begins anew");
        self.changed = true;
        self.count(WorkerCounter::Renewed, 1);
        self.last_dropped = self.last_dropped.max(self.gate.last());
        let ahead = std::mem::take(&mut self.gate);
        self.begin_anew(space, TrustInput::Recovering, now);
        self.hold_for_recovery(ahead, now);
    }

    /// Goes on at a batch of a replay, because the batches missing before it cannot be fetched.
    fn unfillable(&mut self, space: &mut SpaceShard, seq: EventSeq, now: Now) {
        self.lose(space, seq, now);
        self.gate.go_on_before(seq);
    }

    /// Goes on with the messages that wait, or with the next ones, because the missing batches cannot be fetched at
    /// all.
    fn unrecovered(&mut self, space: &mut SpaceShard, now: Now) {
        let first = self.state.first_seq();
        let known = self.gate.last().is_some();
        if known {
            self.lose(space, first.unwrap_or_default(), now);
        } else {
            tracing::warn!(worker = %self.worker, remedy = REPLAY_REMEDY, "no replay from the beginning; the worker joins late");
            self.input(TrustInput::Recovered { known }, now);
        }
        match first.filter(|_| known) {
            Some(first) => self.gate.go_on_before(first),
            None => self.gate = SequenceGate::default(),
        }
        self.last_dropped = None;
        self.changed = true;
        if self.is_recovering() {
            self.release_or_recover(now);
        }
    }

    fn lose(&mut self, space: &mut SpaceShard, next: EventSeq, now: Now) {
        let last = self.gate.last().unwrap_or_default();
        let missed = next.0.saturating_sub(last.0).saturating_sub(1);
        tracing::warn!(
            worker = %self.worker, %last, missed, remedy = TrustReason::Gap.remedy(),
            "lost batches cannot be fetched; the worker is emptied"
        );
        self.count(WorkerCounter::ReplaysUnfillable, 1);
        self.count(WorkerCounter::BatchesMissed, missed);
        self.begin_anew(space, TrustInput::Gap, now);
    }
}

/// The remedy if a publisher does not replay.
const REPLAY_REMEDY: &str = "check the worker's replay endpoint, and that the engine was started with one";
/// The remedy if a publisher's replay buffer is too short.
const FORGOTTEN_REMEDY: &str =
    "raise the engine's buffer_steps, or put a relay beside it; restart it to be exact again";
