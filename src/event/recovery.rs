//! The recovery of one stream's lost batches: when to ask the publisher for a replay, and what its answer means.
//!
//! A pure state machine beside the [`SequenceGate`], which it reads and never changes. Time is an argument, and the
//! caller owns the socket. A replay begins at the last sequence number applied, so that the first payload of the answer
//! shows which incarnation answers, or at 0 if nothing is known. Until then nothing is proven.
//!
//! | state | input | answer | next state |
//! |---|---|---|---|
//! | any | connected | | Wanted to prove, now |
//! | any | disconnected | | Gone |
//! | any but Gone | a live gap or restart | | Wanted to prove, now |
//! | Idle | quiet for long enough | | Wanted to probe |
//! | Wanted or Asked to probe | a live batch in its place, or a dump or load begins | | Idle |
//! | Wanted or Asked to renew | a dump or load begins | | Idle |
//! | Wanted | asked | the sequence to begin at | Asked, unproven |
//! | Asked | the last batch known, same bytes | Skip | Asked, proven |
//! | Asked | batch 0, or the next one of what is proven | Apply | Asked, proven |
//! | Asked | a batch known, other bytes | AnotherIncarnation, or after [`REPLAYS_PER_RECOVERY_MAX`] GivenUp; at 0: Apply | Wanted, from 0, or Idle; Asked, proven |
//! | Asked, unproven | any later batch: the publisher no longer has the batch asked for | Late, or after [`REPLAY_LATE_TRIES_MAX`] Unfillable | Wanted; Asked, proven |
//! | Asked, proven | a batch behind a hole | Hole, or after [`REPLAY_TRIES_MAX`] Unfillable | Wanted; Asked, proven |
//! | Asked, proven | end marker, and the live stream follows | Recovered | Idle |
//! | Asked, proven | end marker, and batches are missing before the live stream | Short, or GivenUp | Wanted; Idle |
//! | Asked, proven | no more and no end marker, and live batches follow | Recovered | Idle |
//! | Asked, proven | the same, and none waits | Short, or after [`REPLAY_TRIES_MAX`] Recovered | Wanted; Idle |
//! | Asked, unproven | end marker alone: the batch is not there | AnotherIncarnation, or after [`REPLAYS_PER_RECOVERY_MAX`] GivenUp | Wanted, from 0, or Idle |
//! | Asked from 0, nothing known | end marker alone, and no live batch waits | NothingSent, or Recovered after an empty answer that was wrong | Idle |
//! | Asked, unproven | nothing | TimedOut, or GivenUp | Wanted; Idle |
//! | Asked to probe | nothing | ProbeUnanswered | Idle |
//! | Idle, or Wanted to probe | long enough since batches were lost for good | | Wanted to renew |
//! | Asked to renew | batch 0 | Renewed | Asked, proven |
//! | Asked to renew | a later batch | Forgotten | Idle; after [`REPLAY_LATE_TRIES_MAX`] never again |
//! | Asked to renew | nothing, or the end marker | RenewalUnanswered | Idle |
//! | Asked | a part of a relay's snapshot | | Asked to prove |
//! | Asked | the snapshot is taken | | Asked, proven |
//! | Asked | the snapshot is not whole | | Wanted, or after [`REPLAY_TRIES_MAX`] Asked |
//!
//! Tries are counted in a row. They begin anew when the stream makes progress and with another incarnation; all replays
//! of a recovery together are at most [`REPLAYS_PER_RECOVERY_MAX`]. A publisher that has never answered, and of which
//! nothing is known, is given up sooner ([`REPLAY_SILENT_TRIES_MAX`]). Each further try waits longer. A probe that
//! shows missing batches becomes a proof. Batches lost for good leave a worker that can only be under-counted. While
//! the publisher may still have all of them, it is asked now and then from 0 on, with growing pauses, and the worker
//! goes on meanwhile.

mod renewal;

use self::renewal::Renewal;
use super::sequence_gate::{SequenceGate, Verdict};
use crate::ids::EventSeq;
use crate::limits::{
    PROBE_DOUBLINGS_MAX, REPLAY_BACK_OFF_MS_MIN, REPLAY_FIRST_MS_MAX, REPLAY_LATE_TRIES_MAX, REPLAY_NEXT_MS_MAX,
    REPLAY_SILENT_TRIES_MAX, REPLAY_TRIES_MAX, REPLAYS_PER_RECOVERY_MAX,
};

/// What a replay is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aim {
    /// To show that no batch is missing, or to fetch missing ones. Live batches wait meanwhile.
    Prove,
    /// To check whether a quiet publisher's last batches were lost. No message waits meanwhile.
    Probe,
    /// To begin a worker anew that has lost batches for good. No message waits until batch 0 has come.
    Renew,
}

/// What is to be done with a batch of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// It is the next one to apply.
    Apply,
    /// It was applied before.
    Skip,
    /// The batches before it cannot be fetched: empty the worker and go on from here.
    Unfillable,
    /// Empty the worker, forget the stream, and drop the rest of the answer: a replay from 0 is wanted.
    AnotherIncarnation,
    /// Batches are missing before it. Drop the rest of the answer: it is asked for again.
    Hole,
    /// The answer begins too late. Drop the rest of it: it is asked for again.
    Late,
    /// The publisher still has all of it: empty the worker, apply this batch 0 as the first, and let live batches wait.
    Renewed,
    /// The publisher no longer has the beginning of the stream: drop the rest of the answer.
    Forgotten,
    /// Yet another incarnation, after as many replays as one recovery may ask for: drop the rest of the answer, empty
    /// the worker, and go on with what comes next.
    GivenUp,
    /// Nothing was asked for.
    Unasked,
}

/// What the end of a replay, or of the wait for it, means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Nothing is missing.
    Recovered,
    /// Nothing is missing: the publisher has sent nothing, and the stream will be seen from 0.
    NothingSent,
    /// Empty the worker and forget the stream: a replay from 0 is wanted.
    AnotherIncarnation,
    /// It ended too early; it is asked for again.
    Short,
    /// It did not come; it is asked for again.
    TimedOut,
    /// The missing batches cannot be fetched: empty the worker and go on with the next batch.
    GivenUp,
    /// The probe was not answered, which shows nothing.
    ProbeUnanswered,
    /// The replay from 0 did not come. The worker stays as it is.
    RenewalUnanswered,
    /// Nothing was asked for.
    Unasked,
}

/// The answer to a replay so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Answer {
    /// A message came.
    begun: bool,
    /// It belongs to the known stream, or no stream is known.
    proven: bool,
    /// It brought the stream further.
    advanced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Gone,
    Idle,
    Wanted { aim: Aim, due_ms: u64 },
    Asked { aim: Aim, heard_ms: u64, answer: Answer },
}

/// The recovery of one stream. Times are milliseconds of one monotonic clock.
#[derive(Clone, Debug)]
pub struct Recovery {
    state: State,
    /// Replays in a row that brought nothing.
    tries: u32,
    /// Replays since the recovery began.
    asked: u32,
    quiet_since_ms: u64,
    /// Probes in a row that found nothing.
    probes: u32,
    gave_up: bool,
    /// The publisher has answered a replay before, so it is worth waiting for.
    answers: bool,
    /// An empty answer came although batches had been sent: a publisher without a buffer answers like that.
    answers_empty: bool,
    renewal: Renewal,
}

impl Default for Recovery {
    fn default() -> Self {
        Self {
            state: State::Gone,
            tries: 0,
            asked: 0,
            quiet_since_ms: 0,
            probes: 0,
            gave_up: false,
            answers: false,
            answers_empty: false,
            renewal: Renewal::default(),
        }
    }
}

impl Recovery {
    /// Handles a new connection, or a loaded stream that replaced the known one.
    pub fn connected(&mut self, now_ms: u64) {
        self.quiet_since_ms = now_ms;
        self.want(now_ms);
    }

    /// Handles a broken connection.
    pub fn disconnected(&mut self) {
        self.state = State::Gone;
    }

    /// Wants a replay, because batches are missing. Without a connection it waits for one.
    pub fn begin(&mut self, now_ms: u64) {
        if self.state != State::Gone {
            self.want(now_ms);
        }
    }

    fn want(&mut self, now_ms: u64) {
        (self.tries, self.asked, self.gave_up, self.probes) = (0, 0, false, 0);
        self.state = State::Wanted { aim: Aim::Prove, due_ms: now_ms };
    }

    /// Notes a live batch that can be applied at once or was applied before: the publisher is not quiet.
    pub fn live(&mut self, now_ms: u64) {
        (self.quiet_since_ms, self.probes) = (now_ms, 0);
        self.cancel(Aim::Probe);
    }

    /// Cancels a probe or a renewal: its batches must not be applied now.
    pub fn cancel_optional(&mut self) {
        self.cancel(Aim::Probe);
        self.cancel(Aim::Renew);
    }

    fn cancel(&mut self, cancelled: Aim) {
        if matches!(self.state, State::Wanted { aim, .. } | State::Asked { aim, .. } if aim == cancelled) {
            self.state = State::Idle;
        }
    }

    /// Forgets lost batches: the worker holds all of the stream, from its beginning or after a clear.
    pub const fn forget_losses(&mut self) {
        self.renewal.forget();
    }

    /// Ends a recovery because the live stream itself shows that no batch is missing.
    pub fn settled(&mut self) {
        if self.is_proving() {
            self.state = State::Idle;
        }
    }

    /// Checks the time: probes a worker that was quiet for `probe_after_ms`, 0 = never, and renews one with losses.
    pub fn tick(&mut self, probe_after_ms: u64, now_ms: u64) {
        let is_free = matches!(self.state, State::Idle | State::Wanted { aim: Aim::Probe, .. });
        if is_free && self.renewal.is_due(now_ms) {
            (self.tries, self.asked) = (0, 0);
            self.state = State::Wanted { aim: Aim::Renew, due_ms: now_ms };
        }
        let after_ms = probe_after_ms << self.probes.min(PROBE_DOUBLINGS_MAX);
        let quiet_ms = now_ms.saturating_sub(self.quiet_since_ms);
        if self.state == State::Idle && probe_after_ms > 0 && quiet_ms >= after_ms {
            (self.tries, self.asked) = (0, 0);
            self.state = State::Wanted { aim: Aim::Probe, due_ms: now_ms };
        }
    }

    /// The aim of the replay to ask for now.
    #[must_use]
    pub const fn wants(&self, now_ms: u64) -> Option<Aim> {
        match self.state {
            State::Wanted { aim, due_ms } if due_ms <= now_ms => Some(aim),
            _ => None,
        }
    }

    /// Notes that a replay is asked for. Returns the sequence number to begin at.
    pub fn ask(&mut self, gate: &SequenceGate, now_ms: u64) -> EventSeq {
        if let State::Wanted { aim, .. } = self.state {
            self.asked += 1;
            let answer = Answer { proven: gate.last().is_none(), ..Answer::default() };
            self.state = State::Asked { aim, heard_ms: now_ms, answer };
            if aim == Aim::Renew {
                self.renewal.asked(now_ms);
                return EventSeq(0);
            }
        }
        gate.last().unwrap_or(EventSeq(0))
    }

    /// Whether a replay was asked for and has not ended.
    #[must_use]
    pub const fn is_asking(&self) -> bool {
        matches!(self.state, State::Asked { .. })
    }

    /// Whether live batches wait until it is over.
    #[must_use]
    pub const fn is_proving(&self) -> bool {
        matches!(self.state, State::Wanted { aim: Aim::Prove, .. } | State::Asked { aim: Aim::Prove, .. })
    }

    /// Whether the missing batches were given up, so that the next batch counts as the first.
    #[must_use]
    pub const fn gave_up(&self) -> bool {
        self.gave_up
    }

    /// Whether the answer has brought the stream further.
    #[must_use]
    pub const fn has_advanced(&self) -> bool {
        matches!(self.state, State::Asked { answer: Answer { advanced: true, .. }, .. })
    }

    /// Restarts the deadline: the answer could not be read until now, which is not the publisher's fault.
    pub const fn excuse(&mut self, now_ms: u64) {
        if let State::Asked { heard_ms, .. } = &mut self.state {
            *heard_ms = now_ms;
        }
    }

    /// Whether the wait for the answer, or for more of it, has timed out.
    #[must_use]
    pub const fn has_timed_out(&self, now_ms: u64) -> bool {
        match self.state {
            State::Asked { heard_ms, answer, .. } => {
                let timeout_ms = if answer.begun { REPLAY_NEXT_MS_MAX } else { REPLAY_FIRST_MS_MAX };
                now_ms.saturating_sub(heard_ms) >= timeout_ms
            }
            _ => false,
        }
    }

    /// Judges a batch of the answer.
    pub fn replayed(&mut self, gate: &SequenceGate, seq: EventSeq, payload_hash: u64, now_ms: u64) -> Replayed {
        let State::Asked { aim, mut answer, .. } = self.state else { return Replayed::Unasked };
        if aim == Aim::Renew {
            return self.renewed(seq, now_ms);
        }
        answer.begun = true;
        self.answers_empty = false;
        let known = gate.payload_hash(seq).is_some();
        let replayed = match gate.judge(seq, payload_hash) {
            Verdict::Duplicate => Replayed::Skip,
            Verdict::Restart { seq: EventSeq(0), .. } if known => Replayed::Apply,
            Verdict::Restart { .. } if known => {
                let is_asked_again = self.begin_from_0(now_ms);
                return if is_asked_again { Replayed::AnotherIncarnation } else { Replayed::GivenUp };
            }
            // Older than the remembered batches, and not asked for.
            Verdict::Restart { .. } => {
                self.state = State::Asked { aim, heard_ms: now_ms, answer };
                return Replayed::Skip;
            }
            Verdict::First { seq: EventSeq(0), .. } => Replayed::Apply,
            Verdict::First { .. } if self.again(answer.advanced, REPLAY_LATE_TRIES_MAX, now_ms) => {
                return Replayed::Late;
            }
            // No batch is known yet, so the worker joins late and holds nothing that would have to be emptied.
            Verdict::First { .. } => Replayed::Apply,
            Verdict::InOrder if answer.proven => Replayed::Apply,
            Verdict::Gap { .. } if answer.proven => {
                if self.again(answer.advanced, REPLAY_TRIES_MAX, now_ms) {
                    return Replayed::Hole;
                }
                Replayed::Unfillable
            }
            Verdict::InOrder | Verdict::Gap { .. } => {
                if self.again(answer.advanced, REPLAY_LATE_TRIES_MAX, now_ms) {
                    return Replayed::Late;
                }
                Replayed::Unfillable
            }
        };
        let is_late = seq != EventSeq(0) && gate.last().is_none();
        if replayed == Replayed::Unfillable || (replayed == Replayed::Apply && is_late) {
            self.renewal.lost(now_ms);
        }
        answer.proven = true;
        answer.advanced |= replayed != Replayed::Skip;
        self.state = State::Asked { aim, heard_ms: now_ms, answer };
        replayed
    }

    /// Judges the first batch of an answer from 0.
    const fn renewed(&mut self, seq: EventSeq, now_ms: u64) -> Replayed {
        if seq.0 != 0 {
            self.renewal.began_late();
            self.state = State::Idle;
            return Replayed::Forgotten;
        }
        self.gave_up = false;
        let answer = Answer { begun: true, proven: true, advanced: true };
        self.state = State::Asked { aim: Aim::Prove, heard_ms: now_ms, answer };
        Replayed::Renewed
    }

    /// Judges the end of the answer: by its end marker, or because no more has come. `needs` = the live batch that
    /// waits for the batches before it.
    pub fn ended(&mut self, gate: &SequenceGate, needs: Option<EventSeq>, marker: bool, now_ms: u64) -> Ended {
        let State::Asked { aim, answer, .. } = self.state else { return Ended::Unasked };
        self.answers |= answer.begun || marker;
        if aim == Aim::Probe && !answer.begun && !marker {
            self.rest(now_ms);
            return Ended::ProbeUnanswered;
        }
        if aim == Aim::Renew {
            self.state = State::Idle;
            return Ended::RenewalUnanswered;
        }
        if !answer.proven && !answer.begun && marker {
            return if self.begin_from_0(now_ms) { Ended::AnotherIncarnation } else { Ended::GivenUp };
        }
        let is_empty = marker && !answer.begun && gate.last().is_none();
        self.answers_empty |= is_empty && needs.is_some_and(|needs| needs != EventSeq(0));
        if is_empty && needs.is_none() && !self.answers_empty {
            self.rest(now_ms);
            return Ended::NothingSent;
        }
        // The last number has none after it, and so nothing can be missing.
        let next = gate.last().map_or(Some(0), |last| last.0.checked_add(1));
        let follows = needs.is_none_or(|needs| next.is_none_or(|next| needs.0 <= next));
        let answered = answer.proven && (answer.begun || marker);
        if answered && follows && (marker || needs.is_some()) {
            self.rest(now_ms);
            return Ended::Recovered;
        }
        let tries_max = if self.answers || gate.last().is_some() { REPLAY_TRIES_MAX } else { REPLAY_SILENT_TRIES_MAX };
        if self.again(answer.advanced, tries_max, now_ms) {
            return if answer.begun || marker { Ended::Short } else { Ended::TimedOut };
        }
        if answered && follows {
            self.rest(now_ms);
            return Ended::Recovered;
        }
        self.give_up(now_ms);
        Ended::GivenUp
    }

    /// Breaks off an answer that is too large, and wants the rest of it.
    pub fn broken_off(&mut self, now_ms: u64) -> bool {
        let advanced = self.has_advanced();
        self.is_asking() && self.again(advanced, REPLAY_TRIES_MAX, now_ms)
    }

    /// Notes a part of a snapshot, which replaces batches that the relay no longer has. Live batches wait from now on.
    pub const fn snapshot_part(&mut self, now_ms: u64) {
        if let State::Asked { aim, heard_ms, answer } = &mut self.state {
            (*aim, *heard_ms, answer.begun) = (Aim::Prove, now_ms, true);
        }
    }

    /// Notes that a whole snapshot was applied. The batch after its watermark is the next one to apply.
    pub const fn snapshot_taken(&mut self, now_ms: u64) {
        if let State::Asked { heard_ms, answer, .. } = &mut self.state {
            *heard_ms = now_ms;
            *answer = Answer { begun: true, proven: true, advanced: true };
            self.renewal.forget();
        }
    }

    /// Notes a failed snapshot and wants it again, unless it has failed too often.
    pub fn snapshot_failed(&mut self, now_ms: u64) {
        if let State::Asked { answer, .. } = &mut self.state {
            *answer = Answer { begun: true, ..Answer::default() };
            self.again(false, REPLAY_TRIES_MAX, now_ms);
        }
    }

    /// Asks from 0 on, unless a publisher that contradicts itself was asked often enough. Tries for the incarnation
    /// before say nothing of this one; replays of all of them are counted together.
    fn begin_from_0(&mut self, now_ms: u64) -> bool {
        self.tries = 0;
        if self.asked >= REPLAYS_PER_RECOVERY_MAX {
            self.give_up(now_ms);
            return false;
        }
        self.state = State::Wanted { aim: Aim::Prove, due_ms: now_ms };
        true
    }

    fn give_up(&mut self, now_ms: u64) {
        self.rest(now_ms);
        self.gave_up = true;
        self.renewal.lost(now_ms);
    }

    fn rest(&mut self, now_ms: u64) {
        self.state = State::Idle;
        (self.quiet_since_ms, self.probes) = (now_ms, self.probes.saturating_add(1));
    }

    /// Wants the replay again, unless it was asked for too often.
    fn again(&mut self, advanced: bool, tries_max: u32, now_ms: u64) -> bool {
        self.tries = if advanced { 0 } else { self.tries + 1 };
        if self.tries >= tries_max || self.asked >= REPLAYS_PER_RECOVERY_MAX {
            // If the answer goes on all the same, batches missing further on are counted anew.
            self.tries = 0;
            return false;
        }
        let back_off_ms = REPLAY_BACK_OFF_MS_MIN << (2 * self.tries);
        self.state = State::Wanted { aim: Aim::Prove, due_ms: now_ms.saturating_add(back_off_ms) };
        true
    }
}

#[cfg(test)]
mod tests;
