//! The recovery state machine with any publisher: it ends, and it applies batches only in order.

use kvrouted::event::recovery::{Aim, Ended, Recovery, Replayed};
use kvrouted::event::sequence_gate::{SequenceGate, Verdict};
use kvrouted::ids::EventSeq;
use kvrouted::limits::REPLAYS_PER_RECOVERY_MAX;

/// Two bytes each: what happens, and to which number or after which time.
pub(crate) fn recovery(data: &[u8]) {
    let mut rig = Rig::default();
    for step in data.chunks_exact(2) {
        rig.step(step[0], step[1]);
        assert!(!(rig.recovery.wants(u64::MAX).is_some() && rig.recovery.is_asking()), "asks while it waits");
        assert!(rig.asked <= REPLAYS_PER_RECOVERY_MAX, "{} replays of one recovery", rig.asked);
    }
}

#[derive(Default)]
struct Rig {
    recovery: Recovery,
    gate: SequenceGate,
    now_ms: u64,
    connected: bool,
    /// Replays since the recovery began, as its caller counts them.
    asked: u32,
}

impl Rig {
    fn step(&mut self, what: u8, which: u8) {
        let last = self.gate.last().map_or(0, |last| last.0);
        let seq = match which >> 6 {
            0 => last.saturating_add(1),
            1 => last.saturating_add(u64::from(which & 7)),
            2 => last.saturating_sub(u64::from(which & 7)),
            _ => u64::from(which & 63),
        };
        let hash = if what & 0x40 == 0 { seq } else { !seq };
        self.now_ms += u64::from(which) * if what & 0x20 == 0 { 1 } else { 100 };
        match what % 16 {
            0 => self.connect(),
            1 => {
                self.connected = false;
                self.recovery.disconnected();
                self.gate.forget_replayed();
            }
            2 | 3 => self.live(EventSeq(seq), hash),
            4 => self.recovery.tick(u64::from(which), self.now_ms),
            5..=7 => self.ask(),
            8..=12 => self.replayed(EventSeq(seq), hash),
            13 => self.ended(true, (which & 1 == 0).then_some(EventSeq(seq))),
            14 => {
                if self.recovery.has_timed_out(self.now_ms) {
                    self.ended(false, None);
                }
            }
            _ => {
                let was_asking = self.recovery.is_asking();
                let again = self.recovery.broken_off(self.now_ms);
                assert!(was_asking || !again);
            }
        }
    }

    fn connect(&mut self) {
        self.connected = true;
        self.asked = 0;
        self.recovery.connected(self.now_ms);
        assert_eq!(self.recovery.wants(self.now_ms), Some(Aim::Prove), "a connection has to be proven at once");
    }

    fn live(&mut self, seq: EventSeq, hash: u64) {
        if !self.connected || self.recovery.is_proving() {
            return;
        }
        match self.gate.judge(seq, hash) {
            Verdict::InOrder | Verdict::Duplicate => {
                self.gate.batch(seq, hash);
                self.recovery.live(self.now_ms);
            }
            Verdict::First { .. } | Verdict::Gap { .. } | Verdict::Restart { .. } => {
                self.asked = 0;
                self.recovery.begin(self.now_ms);
                assert!(self.recovery.is_proving());
            }
        }
    }

    fn ask(&mut self) {
        let Some(aim) = self.recovery.wants(self.now_ms) else { return };
        assert!(self.connected, "no publisher is connected");
        if aim != Aim::Prove {
            self.asked = 0;
        }
        self.asked += 1;
        let from = self.recovery.ask(&self.gate, self.now_ms);
        let known = if aim == Aim::Renew { None } else { self.gate.last() };
        assert_eq!(from, known.unwrap_or_default());
        assert!(self.recovery.is_asking());
    }

    fn replayed(&mut self, seq: EventSeq, hash: u64) {
        let (asked, verdict) = (self.recovery.is_asking(), self.gate.judge(seq, hash));
        let replayed = self.recovery.replayed(&self.gate, seq, hash, self.now_ms);
        assert_eq!(replayed == Replayed::Unasked, !asked);
        match replayed {
            Replayed::Apply => {
                let fits = matches!(verdict, Verdict::InOrder | Verdict::First { .. })
                    || matches!(verdict, Verdict::Restart { seq: EventSeq(0), .. });
                assert!(fits, "{verdict:?} is applied");
                self.gate.replayed(seq, hash);
            }
            Replayed::Unfillable => {
                self.gate.go_on_before(seq);
                self.gate.replayed(seq, hash);
            }
            Replayed::AnotherIncarnation => {
                assert!(!matches!(verdict, Verdict::InOrder | Verdict::Duplicate));
                self.gate = SequenceGate::default();
            }
            Replayed::GivenUp => {
                assert!(self.recovery.gave_up() && !self.recovery.is_proving());
                self.gate = SequenceGate::default();
            }
            Replayed::Skip => assert!(matches!(verdict, Verdict::Duplicate | Verdict::Restart { .. })),
            Replayed::Renewed => {
                assert!(seq == EventSeq(0) && self.recovery.is_proving());
                self.gate = SequenceGate::default();
                self.gate.replayed(seq, hash);
                self.recovery.forget_losses();
            }
            Replayed::Forgotten => assert!(seq != EventSeq(0) && !self.recovery.is_asking()),
            Replayed::Hole | Replayed::Late => assert!(!self.recovery.is_asking(), "it is asked for again"),
            Replayed::Unasked => {}
        }
    }

    fn ended(&mut self, marker: bool, needs: Option<EventSeq>) {
        let asked = self.recovery.is_asking();
        let ended = self.recovery.ended(&self.gate, needs, marker, self.now_ms);
        assert_eq!(ended == Ended::Unasked, !asked);
        match ended {
            Ended::AnotherIncarnation => self.gate = SequenceGate::default(),
            Ended::GivenUp => {
                assert!(self.recovery.gave_up() && !self.recovery.is_proving());
                match needs {
                    Some(needs) if self.gate.last().is_some() => self.gate.go_on_before(needs),
                    _ => self.gate = SequenceGate::default(),
                }
            }
            Ended::NothingSent => assert!(needs.is_none() && self.gate.last().is_none()),
            Ended::Recovered | Ended::ProbeUnanswered | Ended::RenewalUnanswered => {
                assert!(!self.recovery.is_proving())
            }
            Ended::Short | Ended::TimedOut => assert!(self.recovery.is_proving() && !self.recovery.is_asking()),
            Ended::Unasked => {}
        }
    }
}
