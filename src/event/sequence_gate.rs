//! The sequence gate: judges a batch by its sequence number and its bytes.
//!
//! A state machine for each publisher's stream, without I/O or clock. `ingest` decides what a verdict does to the
//! worker.
//!
//! | state | input | verdict | next state |
//! |---|---|---|---|
//! | Waiting | batch `n` | First{`n`, the last sequence number of the previous connection} | Live at `n`, remembers only `n` |
//! | Waiting | disconnected | – | Waiting |
//! | Live at `l` | batch `l+1` | InOrder | Live at `l+1` |
//! | Live at `l` | batch `n > l+1` | Gap{expected `l+1`, got `n`, missed `n-l-1`} | Live at `n` |
//! | Live at `l` | batch `n <= l`, remembered with the same bytes | Duplicate | unchanged |
//! | Live at `l` | batch `n <= l`, remembered with other bytes, or not remembered | Restart{`n`, `l`} | Live at `n`, remembers only `n` |
//! | Live at `l` | disconnected | – | Waiting, after `l` |
//! | any | resumed at `w` | – | Live at `w`, remembers what the previous gate remembered |
//! | any | the caller sets `n` as the next number | – | Live at `n-1`, remembers nothing |
//!
//! The gate remembers a received batch while its number is among the last [`GATE_PAYLOADS_REMEMBERED`] up to `l`. It
//! also remembers replayed batches ([`SequenceGate::replayed`]) until the live stream, which can lag behind a replay,
//! has passed their numbers or cannot contain them. After a restart, a batch with the same number has different bytes:
//! every format contains a time stamp or a generation.
//!
//! If the first batch after a restart is numbered `l+1`, the gate cannot detect the restart by itself. The caller must
//! therefore report [`SequenceGate::disconnected`] before the first batch of each new connection.

use std::collections::VecDeque;

use crate::ids::EventSeq;
use crate::limits::{GATE_PAYLOADS_REMEMBERED, GATE_REPLAYED_REMEMBERED_MAX};

/// How a batch relates to the batches that the gate has received before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first batch since the stream was opened or its connection broke. The number 0 is the stream's very first
    /// batch; any other number means that batches were sent before.
    First {
        /// Its sequence number.
        seq: EventSeq,
        /// The last sequence number of the previous connection, if that carried a batch.
        before: Option<EventSeq>,
    },
    /// The next batch. Apply it.
    InOrder,
    /// Applied before, byte for byte. Ignore it.
    Duplicate,
    /// Batches are missing before this one.
    Gap {
        /// The sequence number that should have come.
        expected: EventSeq,
        /// The sequence number that came.
        got: EventSeq,
        /// The number of missing batches.
        missed: u64,
    },
    /// A batch of another incarnation of the publisher: all earlier events are void.
    Restart {
        /// Its first sequence number received. With 0 no batch of it was missed.
        seq: EventSeq,
        /// The last sequence number of the previous incarnation.
        before: EventSeq,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing received since the stream was opened or its connection broke.
    Waiting { before: Option<EventSeq> },
    /// Received up to and including `last`.
    Live { last: EventSeq },
}

/// The gate of one stream. About 1 KiB, and 8 bytes for each batch of a replay that is still remembered.
#[derive(Clone, Debug)]
pub struct SequenceGate {
    state: State,
    remembered: Remembered,
    replayed: ReplayedRun,
}

impl Default for SequenceGate {
    fn default() -> Self {
        Self {
            state: State::Waiting { before: None },
            remembered: Remembered::default(),
            replayed: ReplayedRun::default(),
        }
    }
}

impl SequenceGate {
    /// Judges a batch by its sequence number and a 64-bit hash of its payload, and moves on to it.
    pub fn batch(&mut self, seq: EventSeq, payload_hash: u64) -> Verdict {
        let verdict = self.step(seq, payload_hash);
        // Live batches ascend, so the live stream has passed replayed batches up to this one.
        self.replayed.forget_up_to(seq);
        verdict
    }

    /// As [`SequenceGate::batch`], for a batch of a replay: the live stream may bring it once more, however much later.
    pub fn replayed(&mut self, seq: EventSeq, payload_hash: u64) -> Verdict {
        let verdict = self.step(seq, payload_hash);
        if verdict != Verdict::Duplicate {
            self.replayed.push(seq, payload_hash);
        }
        verdict
    }

    fn step(&mut self, seq: EventSeq, payload_hash: u64) -> Verdict {
        let verdict = self.judge(seq, payload_hash);
        match verdict {
            Verdict::Duplicate => return verdict,
            Verdict::First { .. } | Verdict::Restart { .. } => {
                self.remembered = Remembered::default();
                self.replayed = ReplayedRun::default();
            }
            Verdict::InOrder | Verdict::Gap { .. } => {}
        }
        self.remembered.insert(seq, payload_hash);
        self.state = State::Live { last: seq };
        verdict
    }

    /// The verdict that [`SequenceGate::batch`] would give, without a change of state.
    #[must_use]
    pub fn judge(&self, seq: EventSeq, payload_hash: u64) -> Verdict {
        match self.state {
            State::Waiting { before } => Verdict::First { seq, before },
            State::Live { last } if seq <= last => match self.remembers(seq, last) {
                Some(hash) if hash == payload_hash => Verdict::Duplicate,
                _ => Verdict::Restart { seq, before: last },
            },
            State::Live { last } => {
                // `seq > last`, so `last + 1` exists.
                let expected = EventSeq(last.0 + 1);
                match seq.0 - expected.0 {
                    0 => Verdict::InOrder,
                    missed => Verdict::Gap { expected, got: seq, missed },
                }
            }
        }
    }

    /// Handles a broken connection: the next batch may be of another incarnation, and batches may be lost.
    pub fn disconnected(&mut self) {
        if let State::Live { last } = self.state {
            self.state = State::Waiting { before: Some(last) };
        }
    }

    /// Goes on where another gate of the same incarnation stood: at `last`, with the hashes that it remembered.
    pub fn resume(&mut self, last: EventSeq, remembered: &[(EventSeq, u64)]) {
        *self = Self { state: State::Live { last }, ..Self::default() };
        remembered.iter().for_each(|(seq, payload_hash)| self.remembered.insert(*seq, *payload_hash));
    }

    /// Takes the batch `seq` next, whatever was missed before it, and forgets all received batches.
    pub fn go_on_before(&mut self, seq: EventSeq) {
        *self = Self::default();
        if let Some(last) = seq.0.checked_sub(1) {
            self.state = State::Live { last: EventSeq(last) };
        }
    }

    /// Forgets replayed batches: the live stream will not bring them again.
    pub fn forget_replayed(&mut self) {
        self.replayed = ReplayedRun::default();
    }

    /// The hashes for [`SequenceGate::resume`], by ascending sequence number.
    #[must_use]
    pub fn remembered(&self) -> Vec<(EventSeq, u64)> {
        let Some(last) = self.last() else { return Vec::new() };
        let oldest = last.0.saturating_sub(GATE_PAYLOADS_REMEMBERED as u64 - 1);
        let held = |seq| self.remembered.get(EventSeq(seq), last).map(|hash| (EventSeq(seq), hash));
        (oldest..=last.0).filter_map(held).collect()
    }

    /// The payload hash of a sequence number, while the gate remembers it.
    #[must_use]
    pub fn payload_hash(&self, seq: EventSeq) -> Option<u64> {
        self.last().filter(|last| seq <= *last).and_then(|last| self.remembers(seq, last))
    }

    fn remembers(&self, seq: EventSeq, last: EventSeq) -> Option<u64> {
        self.remembered.get(seq, last).or_else(|| self.replayed.get(seq))
    }

    /// The last sequence number of the live connection; `None` before its first batch.
    #[must_use]
    pub fn last(&self) -> Option<EventSeq> {
        match self.state {
            State::Waiting { .. } => None,
            State::Live { last } => Some(last),
        }
    }
}

/// Payload hashes of consecutive batches of a replay.
#[derive(Clone, Debug, Default)]
struct ReplayedRun {
    first: u64,
    hashes: VecDeque<u64>,
}

impl ReplayedRun {
    fn push(&mut self, seq: EventSeq, payload_hash: u64) {
        if self.first.checked_add(self.hashes.len() as u64) != Some(seq.0) {
            *self = Self { first: seq.0, hashes: VecDeque::new() };
        }
        self.hashes.push_back(payload_hash);
        if self.hashes.len() > GATE_REPLAYED_REMEMBERED_MAX {
            self.hashes.pop_front();
            self.first += 1;
        }
    }

    fn get(&self, seq: EventSeq) -> Option<u64> {
        let at = usize::try_from(seq.0.checked_sub(self.first)?).ok()?;
        self.hashes.get(at).copied()
    }

    fn forget_up_to(&mut self, seq: EventSeq) {
        if self.hashes.is_empty() {
            return;
        }
        let passed = seq.0.saturating_add(1).saturating_sub(self.first).min(self.hashes.len() as u64);
        self.hashes.drain(..passed as usize);
        self.first += passed;
        if self.hashes.is_empty() {
            *self = Self::default();
        }
    }
}

/// Payload hashes by sequence number, each at its number modulo the capacity.
#[derive(Clone, Debug)]
struct Remembered([Option<(EventSeq, u64)>; GATE_PAYLOADS_REMEMBERED]);

impl Default for Remembered {
    fn default() -> Self {
        Self([None; GATE_PAYLOADS_REMEMBERED])
    }
}

impl Remembered {
    fn place(seq: EventSeq) -> usize {
        (seq.0 % GATE_PAYLOADS_REMEMBERED as u64) as usize
    }

    fn insert(&mut self, seq: EventSeq, payload_hash: u64) {
        self.0[Self::place(seq)] = Some((seq, payload_hash));
    }

    /// The payload hash of `seq`. A place may still hold a number from before a gap, hence the check of the window.
    fn get(&self, seq: EventSeq, last: EventSeq) -> Option<u64> {
        let (held, hash) = self.0[Self::place(seq)]?;
        (held == seq && last.0 - seq.0 < GATE_PAYLOADS_REMEMBERED as u64).then_some(hash)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn gate_at(seqs: impl IntoIterator<Item = u64>) -> SequenceGate {
        let mut gate = SequenceGate::default();
        for seq in seqs {
            gate.batch(EventSeq(seq), seq);
        }
        gate
    }

    #[test]
    fn every_row_of_the_table() {
        let seq = EventSeq;
        let waiting = SequenceGate::default();
        let mut broken = gate_at(5..=9);
        broken.disconnected();
        let rows: &[(&str, &SequenceGate, u64, u64, Verdict, u64)] = &[
            ("from the start", &waiting, 0, 0, Verdict::First { seq: seq(0), before: None }, 0),
            ("late", &waiting, 7, 0, Verdict::First { seq: seq(7), before: None }, 7),
            ("next", &gate_at(0..=4), 5, 5, Verdict::InOrder, 5),
            ("hole", &gate_at(0..=4), 9, 9, Verdict::Gap { expected: seq(5), got: seq(9), missed: 4 }, 9),
            ("again", &gate_at(0..=4), 4, 4, Verdict::Duplicate, 4),
            ("again, older", &gate_at(0..=4), 0, 0, Verdict::Duplicate, 4),
            ("other bytes at the last", &gate_at(0..=4), 4, 99, Verdict::Restart { seq: seq(4), before: seq(4) }, 4),
            ("other bytes at 0", &gate_at(0..=4), 0, 99, Verdict::Restart { seq: seq(0), before: seq(4) }, 0),
            ("before we joined", &gate_at(5..=9), 3, 3, Verdict::Restart { seq: seq(3), before: seq(9) }, 3),
            ("within a gap", &gate_at([0, 1, 9]), 5, 5, Verdict::Restart { seq: seq(5), before: seq(9) }, 5),
            ("forgotten", &gate_at(0..=64), 0, 0, Verdict::Restart { seq: seq(0), before: seq(64) }, 0),
            ("oldest remembered", &gate_at(0..=64), 1, 1, Verdict::Duplicate, 64),
            ("too old after a gap", &gate_at([0, 1, 200]), 1, 1, Verdict::Restart { seq: seq(1), before: seq(200) }, 1),
            ("after a break, next", &broken, 10, 10, Verdict::First { seq: seq(10), before: Some(seq(9)) }, 10),
            ("after a break, 0", &broken, 0, 0, Verdict::First { seq: seq(0), before: Some(seq(9)) }, 0),
            ("the last number", &gate_at([u64::MAX]), 0, 1, Verdict::Restart { seq: seq(0), before: seq(u64::MAX) }, 0),
        ];
        for (name, gate, seq, hash, verdict, last) in rows {
            let mut gate = SequenceGate::clone(gate);
            assert_eq!(gate.batch(EventSeq(*seq), *hash), *verdict, "{name}");
            assert_eq!(gate.last(), Some(EventSeq(*last)), "{name}");
        }
    }

    #[test]
    fn a_new_incarnation_forgets_the_bytes_of_the_old_one() {
        let mut gate = gate_at(0..=9);
        assert_eq!(gate.batch(EventSeq(3), 99), Verdict::Restart { seq: EventSeq(3), before: EventSeq(9) });
        assert_eq!(gate.batch(EventSeq(2), 2), Verdict::Restart { seq: EventSeq(2), before: EventSeq(3) });
        gate.disconnected();
        assert_eq!(gate.last(), None);
        gate.batch(EventSeq(7), 7);
        assert_eq!(gate.batch(EventSeq(2), 2), Verdict::Restart { seq: EventSeq(2), before: EventSeq(7) });
    }

    #[test]
    fn two_breaks_keep_the_last_sequence_number() {
        let mut gate = gate_at(0..=3);
        gate.disconnected();
        gate.disconnected();
        assert_eq!(gate.batch(EventSeq(1), 5), Verdict::First { seq: EventSeq(1), before: Some(EventSeq(3)) });
    }

    #[test]
    fn a_gate_that_resumes_judges_as_the_one_it_follows() {
        for seqs in [0..=9, 40..=200, 0..=0] {
            let followed = gate_at(seqs.clone());
            let mut gate = gate_at(500..=501);
            let last = followed.last().expect("live");
            gate.resume(last, &followed.remembered());
            for (seq, hash) in [(last.0 + 1, 1), (last.0, last.0), (last.0, 7), (last.0 - last.0 % 8, 7), (0, 0)] {
                let judged = SequenceGate::clone(&gate).batch(EventSeq(seq), hash);
                assert_eq!(judged, SequenceGate::clone(&followed).batch(EventSeq(seq), hash), "{seqs:?} {seq}");
            }
            assert_eq!(gate.payload_hash(last), Some(last.0));
            assert_eq!(gate.payload_hash(EventSeq(last.0 + 1)), None);
        }
        assert!(SequenceGate::default().remembered().is_empty());
        assert_eq!(SequenceGate::default().payload_hash(EventSeq(0)), None);
    }

    #[test]
    fn replayed_batches_are_remembered_until_the_live_stream_has_passed_them() {
        let mut gate = gate_at(0..=4);
        assert_eq!(gate.replayed(EventSeq(4), 4), Verdict::Duplicate);
        (5..=904).for_each(|seq| assert_eq!(gate.replayed(EventSeq(seq), seq), Verdict::InOrder));
        assert_eq!(gate.judge(EventSeq(6), 6), Verdict::Duplicate);
        assert_eq!(gate.judge(EventSeq(6), 7), Verdict::Restart { seq: EventSeq(6), before: EventSeq(904) });
        (5..=600).for_each(|seq| assert_eq!(gate.batch(EventSeq(seq), seq), Verdict::Duplicate));
        assert_eq!(gate.judge(EventSeq(600), 600), Verdict::Restart { seq: EventSeq(600), before: EventSeq(904) });
        assert_eq!(gate.judge(EventSeq(601), 601), Verdict::Duplicate);
        gate.forget_replayed();
        assert_eq!(gate.judge(EventSeq(601), 601), Verdict::Restart { seq: EventSeq(601), before: EventSeq(904) });
        assert_eq!(gate.batch(EventSeq(905), 905), Verdict::InOrder);
    }

    #[test]
    fn going_on_before_a_batch_takes_it_and_forgets_the_earlier_ones() {
        let mut gate = gate_at(0..=4);
        gate.go_on_before(EventSeq(9));
        assert_eq!(gate.payload_hash(EventSeq(4)), None);
        assert_eq!(gate.batch(EventSeq(9), 9), Verdict::InOrder);
        gate.go_on_before(EventSeq(0));
        assert_eq!(gate.batch(EventSeq(0), 0), Verdict::First { seq: EventSeq(0), before: None });
    }

    /// The table of the module's docs with a map in place of a ring.
    #[derive(Default)]
    struct Model {
        received: BTreeMap<u64, u64>,
        last: Option<u64>,
        before: Option<u64>,
    }

    impl Model {
        fn batch(&mut self, seq: u64, hash: u64) -> Verdict {
            let verdict = match self.last {
                None => Verdict::First { seq: EventSeq(seq), before: self.before.map(EventSeq) },
                Some(last) if seq == last + 1 => Verdict::InOrder,
                Some(last) if seq > last => {
                    Verdict::Gap { expected: EventSeq(last + 1), got: EventSeq(seq), missed: seq - last - 1 }
                }
                Some(last) => {
                    let oldest = (last + 1).saturating_sub(GATE_PAYLOADS_REMEMBERED as u64);
                    if seq >= oldest && self.received.get(&seq) == Some(&hash) {
                        return Verdict::Duplicate;
                    }
                    Verdict::Restart { seq: EventSeq(seq), before: EventSeq(last) }
                }
            };
            if matches!(verdict, Verdict::First { .. } | Verdict::Restart { .. }) {
                self.received.clear();
            }
            self.received.insert(seq, hash);
            self.last = Some(seq);
            verdict
        }

        fn disconnected(&mut self) {
            self.before = self.last.take().or(self.before);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Next,
        Jump(u64),
        Back(u64, bool),
        Disconnect,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => Just(Step::Next),
            1 => (0_u64..200).prop_map(Step::Jump),
            3 => (0_u64..100, any::<bool>()).prop_map(|(by, other)| Step::Back(by, other)),
            1 => Just(Step::Disconnect),
        ]
    }

    proptest! {
        #[test]
        fn the_gate_is_the_model(first in 0_u64..100, steps in prop::collection::vec(step(), 0..400)) {
            let (mut gate, mut model) = (SequenceGate::default(), Model::default());
            let mut at = first;
            for step in steps {
                let (seq, hash) = match step {
                    Step::Next => (at + 1, (at + 1) * 3),
                    Step::Jump(by) => (at + by, (at + by) * 3),
                    Step::Back(by, other) => {
                        let seq = at.saturating_sub(by);
                        (seq, seq * 3 + u64::from(other))
                    }
                    Step::Disconnect => {
                        gate.disconnected();
                        model.disconnected();
                        continue;
                    }
                };
                at = seq;
                prop_assert_eq!(gate.batch(EventSeq(seq), hash), model.batch(seq, hash));
                prop_assert_eq!(gate.last(), model.last.map(EventSeq));
            }
        }
    }
}
