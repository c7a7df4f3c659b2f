//! The sequence gate beside its table, for any run of batches, replays and breaks.

use std::collections::BTreeMap;

use kvrouted::event::sequence_gate::{SequenceGate, Verdict};
use kvrouted::ids::EventSeq;
use kvrouted::limits::{GATE_PAYLOADS_REMEMBERED, GATE_REPLAYED_REMEMBERED_MAX};

/// Two bytes each: what happens, and to which number.
pub(crate) fn gate(data: &[u8]) {
    let (mut gate, mut model) = (SequenceGate::default(), Model::default());
    for step in data.chunks_exact(2) {
        take(&mut gate, &mut model, step[0], step[1]);
        assert_eq!(gate.last().map(|seq| seq.0), model.last());
        let remembered: BTreeMap<u64, u64> = gate.remembered().into_iter().map(|(seq, hash)| (seq.0, hash)).collect();
        assert_eq!(remembered, model.window());
    }
}

fn take(gate: &mut SequenceGate, model: &mut Model, what: u8, which: u8) {
    let base = model.last().unwrap_or(0);
    let seq = match what >> 4 {
        0..=5 => base.wrapping_add(u64::from(which % 4)),
        6..=8 => base.saturating_sub(u64::from(which)),
        9 => base.saturating_add(u64::from(which)),
        10 => u64::MAX - u64::from(which % 3),
        11 => base.saturating_add(u64::from(which) << 8),
        _ => u64::from(which),
    };
    // Mostly what a number's payload always is.
    let hash = if what & 8 == 0 { seq } else { u64::from(which & 1) };
    match what & 7 {
        0..=3 => {
            let expected = model.judge(seq, hash);
            assert_eq!(gate.judge(EventSeq(seq), hash), expected);
            assert_eq!(gate.batch(EventSeq(seq), hash), expected);
            model.batch(seq, hash, expected);
            model.forget_replayed_up_to(seq);
        }
        4 => {
            let expected = model.judge(seq, hash);
            assert_eq!(gate.replayed(EventSeq(seq), hash), expected);
            model.batch(seq, hash, expected);
            if expected != Verdict::Duplicate {
                model.note_replayed(seq, hash);
            }
        }
        5 if which < 128 => {
            gate.disconnected();
            model.disconnected();
        }
        5 => {
            gate.forget_replayed();
            model.replayed.clear();
        }
        6 => {
            gate.go_on_before(EventSeq(seq));
            *model = Model { live: seq.checked_sub(1), ..Model::default() };
        }
        _ => resume(gate, model),
    }
    let known = gate.payload_hash(EventSeq(seq));
    assert_eq!(known, model.last().filter(|last| seq <= *last).and_then(|_| model.remembers(seq)));
}

/// As when a dump is loaded somewhere else.
fn resume(gate: &mut SequenceGate, model: &mut Model) {
    let Some(last) = gate.last() else { return };
    let remembered = gate.remembered();
    *gate = SequenceGate::default();
    gate.resume(last, &remembered);
    *model = Model { live: Some(last.0), received: model.window(), ..Model::default() };
}

/// The table of `event::sequence_gate`, with everything received kept.
#[derive(Default)]
struct Model {
    live: Option<u64>,
    before: Option<u64>,
    broken: bool,
    received: BTreeMap<u64, u64>,
    /// A run without holes.
    replayed: BTreeMap<u64, u64>,
}

impl Model {
    fn last(&self) -> Option<u64> {
        self.live.filter(|_| !self.broken)
    }

    /// What is remembered of what came, other than by replay alone.
    fn window(&self) -> BTreeMap<u64, u64> {
        let Some(last) = self.last() else { return BTreeMap::new() };
        let oldest = last.saturating_sub(GATE_PAYLOADS_REMEMBERED as u64 - 1);
        self.received.range(oldest..=last).map(|(seq, hash)| (*seq, *hash)).collect()
    }

    fn remembers(&self, seq: u64) -> Option<u64> {
        self.window().get(&seq).or_else(|| self.replayed.get(&seq)).copied()
    }

    fn judge(&self, seq: u64, hash: u64) -> Verdict {
        let Some(last) = self.last() else {
            return Verdict::First { seq: EventSeq(seq), before: self.before.map(EventSeq) };
        };
        if seq <= last {
            let is_known = self.remembers(seq) == Some(hash);
            let restart = Verdict::Restart { seq: EventSeq(seq), before: EventSeq(last) };
            return if is_known { Verdict::Duplicate } else { restart };
        }
        match seq - last - 1 {
            0 => Verdict::InOrder,
            missed => Verdict::Gap { expected: EventSeq(last + 1), got: EventSeq(seq), missed },
        }
    }

    fn batch(&mut self, seq: u64, hash: u64, verdict: Verdict) {
        match verdict {
            Verdict::Duplicate => return,
            Verdict::First { .. } | Verdict::Restart { .. } => *self = Self::default(),
            Verdict::InOrder | Verdict::Gap { .. } => {}
        }
        self.live = Some(seq);
        self.received.insert(seq, hash);
    }

    fn note_replayed(&mut self, seq: u64, hash: u64) {
        if self.replayed.last_key_value().is_some_and(|(last, _)| last.checked_add(1) != Some(seq)) {
            self.replayed.clear();
        }
        self.replayed.insert(seq, hash);
        if self.replayed.len() > GATE_REPLAYED_REMEMBERED_MAX {
            self.replayed.pop_first();
        }
    }

    fn forget_replayed_up_to(&mut self, seq: u64) {
        self.replayed.retain(|of, _| *of > seq);
    }

    fn disconnected(&mut self) {
        if let Some(last) = self.last() {
            (self.before, self.broken) = (Some(last), true);
        }
    }
}
