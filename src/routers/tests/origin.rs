//! The rows of the table of [`OriginPhase`], one by one.

use super::super::{Notice, OriginPhase, OriginSettings, OriginStatus, Origins, QuarantineReason};
use super::*;
use crate::limits::{
    LOAD_ASK_MS_MAX, LOAD_ASK_MS_MIN, LOAD_MESSAGE_BINDINGS_MAX, LOAD_MESSAGE_GAUGES_MAX, LOAD_QUARANTINE_MS_MIN,
    LOAD_REPAIRS_MAX, ORIGIN_BINDINGS_MAX, ORIGIN_WORKERS_MAX,
};

/// The run of the origin, and one before or after it.
const RUN: u64 = 40;
const OTHER_RUN: u64 = 50;
const SILENT_MS: u64 = 3000;

/// This router, and what it does about origin 1.
struct Receiver {
    origins: Origins,
    now_ms: u64,
    nonce: u64,
}

impl Receiver {
    fn new() -> Self {
        let origins =
            Origins::new(sender(100, 1), OriginSettings { silent_ms_max: SILENT_MS, ..OriginSettings::default() });
        Self { origins, now_ms: 1_000_000, nonce: 0 }
    }

    /// A receiver that holds `rows` as of batch 4.
    fn live(rows: &[WorkerGauge]) -> Self {
        let mut receiver = Self::new();
        receiver.heartbeat(RUN, 1, 4, digest_of(rows));
        let effects = receiver.snapshot(RUN, 4, rows);
        assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::SetGauge { .. })).count(), rows.len());
        assert_eq!(receiver.phase(), OriginPhase::Live);
        receiver
    }

    fn get(&mut self, from: Sender, content: Content) -> Vec<Effect> {
        let (mut effects, nonce) = (Vec::new(), &mut self.nonce);
        let mut nonces = || {
            *nonce += 1;
            Nonce(*nonce)
        };
        let message = Message { sender: from, minor: 0, content };
        self.origins.receive(&message, self.now_ms, &mut nonces, &mut effects);
        effects
    }

    fn batch(&mut self, run: u64, sequence: u64, rows: &[WorkerGauge]) -> Vec<Effect> {
        let batch = Batch { sequence, gauges: rows.to_vec(), bindings: Vec::new() };
        self.get(sender(1, run), Content::Batch(batch))
    }

    fn heartbeat(&mut self, run: u64, beat: u64, sequence: u64, digest: Digest) -> Vec<Effect> {
        self.get(sender(1, run), Content::Heartbeat(Heartbeat { beat, sequence, digest }))
    }

    fn section(&self, sequence: u64, rows: &[WorkerGauge]) -> SnapshotSection {
        let (nonce, digest) = (Nonce(self.nonce), digest_of(rows));
        SnapshotSection { nonce, sequence, parts: 1, digest, gauges: rows.to_vec(), ..SnapshotSection::default() }
    }

    /// A whole snapshot that answers the last request.
    fn snapshot(&mut self, run: u64, sequence: u64, rows: &[WorkerGauge]) -> Vec<Effect> {
        let section = self.section(sequence, rows);
        self.get(sender(1, run), Content::Section(section))
    }

    fn wait(&mut self, ms: u64) -> Vec<Effect> {
        self.now_ms += ms;
        let (mut effects, nonce) = (Vec::new(), &mut self.nonce);
        let mut nonces = || {
            *nonce += 1;
            Nonce(*nonce)
        };
        self.origins.tick(self.now_ms, &mut nonces, &mut effects);
        effects
    }

    fn status(&self) -> OriginStatus {
        self.origins.statuses(self.now_ms).next().expect("the origin")
    }

    fn phase(&self) -> OriginPhase {
        self.status().phase
    }

    fn noticed(&self, notice: Notice) -> u64 {
        self.status().notices.get(&notice).copied().unwrap_or(0)
    }

    /// What counts.
    fn holds(&self, rows: &[WorkerGauge]) {
        assert_eq!(self.status().digest, digest_of(rows));
    }
}

fn asks(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Ask(request) if request.origin == OriginId(1))).count()
}

fn drops(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| **effect == Effect::DropGauges { place: 0 }).count()
}

fn sets(effects: &[Effect]) -> Vec<WorkerGauge> {
    let set = |effect: &Effect| match effect {
        Effect::SetGauge { worker, gauge, age_ms, place: 0 } => {
            Some(WorkerGauge { worker: *worker, gauge: *gauge, age_ms: *age_ms as u32 })
        }
        _ => None,
    };
    effects.iter().filter_map(set).collect()
}

#[test]
fn an_origin_counts_only_after_it_has_answered_a_fresh_nonce() {
    let mut receiver = Receiver::new();
    let effects = receiver.batch(RUN, 7, &[row(1, 3)]);
    assert!(asks(&effects) == 1 && sets(&effects).is_empty() && receiver.phase() == OriginPhase::Asking);
    assert!(!receiver.origins.is_settled());
    // An answer to another nonce, such as a recorded one.
    let recorded = SnapshotSection { nonce: Nonce(99), ..receiver.section(7, &[row(1, 3)]) };
    assert!(sets(&receiver.get(sender(1, RUN), Content::Section(recorded))).is_empty());
    assert_eq!((receiver.phase(), receiver.noticed(Notice::NotAsked)), (OriginPhase::Asking, 1));
    let effects = receiver.snapshot(RUN, 7, &[row(1, 3), row(2, 4)]);
    assert_eq!(sets(&effects), [row(1, 3), row(2, 4)]);
    assert!(receiver.phase() == OriginPhase::Live && receiver.origins.is_settled());
}

#[test]
fn batches_that_come_before_the_snapshot_are_not_lost() {
    let mut receiver = Receiver::new();
    receiver.batch(RUN, 7, &[row(1, 3)]);
    receiver.batch(RUN, 8, &[row(2, 0), row(3, 5)]);
    receiver.batch(RUN, 9, &[row(1, 0)]);
    let effects = receiver.snapshot(RUN, 7, &[row(1, 3), row(2, 4)]);
    assert_eq!(sets(&effects), [row(3, 5)], "batches 8 and 9 are later than the snapshot");
    assert_eq!((receiver.phase(), receiver.status().sequence), (OriginPhase::Live, 9));
    receiver.holds(&[row(3, 5)]);
}

#[test]
fn a_snapshot_that_lacks_batches_which_were_missed_is_asked_for_again() {
    let mut receiver = Receiver::new();
    receiver.batch(RUN, 7, &[row(1, 3)]);
    receiver.batch(RUN, 10, &[row(1, 4)]);
    let effects = receiver.snapshot(RUN, 8, &[row(1, 9), row(2, 4)]);
    assert_eq!(sets(&effects), [row(1, 4), row(2, 4)]);
    assert_eq!((receiver.phase(), receiver.noticed(Notice::Gap)), (OriginPhase::Repairing, 1));
    assert_eq!(asks(&receiver.wait(LOAD_ASK_MS_MIN)), 1);
    assert_eq!(sets(&receiver.snapshot(RUN, 10, &[row(1, 4)])), [row(2, 0)]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
}

#[test]
fn a_gap_is_repaired_by_a_snapshot_and_batches_go_on_meanwhile() {
    let mut receiver = Receiver::live(&[row(1, 3), row(2, 4)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    let effects = receiver.batch(RUN, 6, &[row(1, 5)]);
    assert!(sets(&effects) == [row(1, 5)] && asks(&effects) == 1 && receiver.phase() == OriginPhase::Repairing);
    assert_eq!(sets(&receiver.batch(RUN, 7, &[row(2, 0)])), [row(2, 0)]);
    // The snapshot is older than batch 7, which took worker 2 away: it must not come back.
    let effects = receiver.snapshot(RUN, 6, &[row(1, 5), row(2, 4), row(3, 1)]);
    assert_eq!(sets(&effects), [row(3, 1)]);
    assert_eq!((receiver.phase(), receiver.status().sequence), (OriginPhase::Live, 7));
    receiver.holds(&[row(1, 5), row(3, 1)]);
}

#[test]
fn a_heartbeat_that_names_a_later_batch_shows_a_gap_and_the_batch_may_still_come() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    let digest = digest_of(&[row(1, 5)]);
    assert_eq!(asks(&receiver.heartbeat(RUN, 2, 5, digest)), 1);
    assert_eq!(receiver.phase(), OriginPhase::Repairing);
    receiver.batch(RUN, 5, &[row(1, 5)]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
    receiver.heartbeat(RUN, 3, 5, digest);
    assert_eq!((receiver.phase(), receiver.noticed(Notice::DigestDiffers)), (OriginPhase::Live, 0));
}

#[test]
fn old_and_repeated_messages_change_nothing() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.batch(RUN, 5, &[row(1, 5)]);
    for sequence in 1..=5 {
        let effects = receiver.batch(RUN, sequence, &[row(1, 9)]);
        assert!(sets(&effects).is_empty() && asks(&effects) == 0);
    }
    assert_eq!((receiver.phase(), receiver.noticed(Notice::Stale)), (OriginPhase::Live, 5));
    receiver.holds(&[row(1, 5)]);
}

#[test]
fn old_messages_are_no_sign_of_life() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.wait(SILENT_MS);
    receiver.batch(RUN, 4, &[row(1, 9)]);
    receiver.heartbeat(RUN, 1, 4, digest_of(&[row(1, 3)]));
    assert_eq!(drops(&receiver.wait(1)), 1);
    assert_eq!((receiver.phase(), receiver.noticed(Notice::Silent)), (OriginPhase::Silent, 1));
    // A heartbeat is one.
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.wait(SILENT_MS);
    receiver.heartbeat(RUN, 2, 4, digest_of(&[row(1, 3)]));
    assert!(receiver.wait(1).is_empty());
}

#[test]
fn a_silent_origin_that_speaks_again_is_taken_anew() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    assert_eq!(drops(&receiver.wait(SILENT_MS + 1)), 1);
    receiver.holds(&[]);
    assert_eq!(asks(&receiver.batch(RUN, 9, &[row(1, 5)])), 1);
    assert_eq!(sets(&receiver.snapshot(RUN, 9, &[row(1, 5)])), [row(1, 5)]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
    let mut receiver = Receiver::new();
    receiver.batch(RUN, 9, &[row(1, 5)]);
    receiver.wait(SILENT_MS + 1);
    assert_eq!(receiver.phase(), OriginPhase::Silent, "it never answered");
}

#[test]
fn requests_in_vain_before_a_silence_do_not_delay_those_after_it() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.batch(RUN, 6, &[row(1, 5)]);
    assert_eq!(receiver.phase(), OriginPhase::Repairing);
    let in_vain: usize = (0..SILENT_MS / 50).map(|_| asks(&receiver.wait(50))).sum();
    assert!(in_vain > 3, "{in_vain}");
    receiver.wait(50);
    assert_eq!(receiver.phase(), OriginPhase::Silent);
    assert_eq!(asks(&receiver.batch(RUN, 9, &[row(1, 5)])), 1);
    assert_eq!(asks(&receiver.wait(LOAD_ASK_MS_MIN)), 1, "the first pause is a short one again");
}

#[test]
fn another_digest_is_noticed_and_the_origin_taken_anew() {
    let mut receiver = Receiver::live(&[row(1, 3), row(2, 2)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    assert_eq!(asks(&receiver.heartbeat(RUN, 2, 4, digest_of(&[row(1, 4)]))), 1);
    assert_eq!((receiver.phase(), receiver.noticed(Notice::DigestDiffers)), (OriginPhase::Repairing, 1));
    assert_eq!(sets(&receiver.snapshot(RUN, 4, &[row(1, 4)])), [row(2, 0), row(1, 4)]);
    receiver.holds(&[row(1, 4)]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
}

#[test]
fn an_origin_that_differs_after_each_snapshot_is_quarantined() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    let (mut beat, mut answered) = (1, receiver.nonce);
    while !matches!(receiver.phase(), OriginPhase::Quarantined(_)) {
        beat += 1;
        assert!(beat < 100, "{:?}", receiver.status());
        receiver.wait(500);
        receiver.heartbeat(RUN, beat, 4, digest_of(&[row(1, 4)]));
        if receiver.nonce > answered {
            answered = receiver.nonce;
            receiver.snapshot(RUN, 4, &[row(1, 3)]);
        }
    }
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::DigestDiffers));
    receiver.holds(&[]);
    assert_eq!(receiver.noticed(Notice::DigestDiffers), u64::from(LOAD_REPAIRS_MAX) + 1);
}

#[test]
fn a_recording_of_another_incarnation_drops_nothing() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    let effects = receiver.batch(OTHER_RUN, 900, &[row(1, 9)]);
    assert!(drops(&effects) == 0 && sets(&effects).is_empty() && asks(&effects) == 1);
    receiver.holds(&[row(1, 3)]);
    assert_eq!(sets(&receiver.batch(RUN, 5, &[row(1, 4)])), [row(1, 4)], "its own messages go on");
    receiver.snapshot(RUN, 5, &[row(1, 4)]);
    assert_eq!((receiver.phase(), receiver.noticed(Notice::Replayed)), (OriginPhase::Live, 1));
    // More recordings cause no more requests for a while.
    let effects: Vec<_> = (0..1000).flat_map(|at| receiver.batch(OTHER_RUN, 901 + at, &[row(1, 9)])).collect();
    assert!(asks(&effects) <= 1, "{} requests", asks(&effects));
    receiver.holds(&[row(1, 4)]);
}

#[test]
fn recordings_cannot_keep_an_origin_alive_that_has_ended() {
    let mut receiver = Receiver::live(&[row(1, 3)]);
    for at in 0..SILENT_MS / 100 {
        receiver.wait(100);
        receiver.batch(OTHER_RUN, 900 + at, &[row(1, 9)]);
        receiver.batch(RUN, 3, &[row(1, 9)]);
    }
    assert_eq!(drops(&receiver.wait(1)), 1);
    assert_eq!(receiver.phase(), OriginPhase::Silent);
}

#[test]
fn a_restarted_origin_is_dropped_whole_once_it_has_answered() {
    let mut receiver = Receiver::live(&[row(1, 3), row(2, 4)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    assert_eq!(asks(&receiver.heartbeat(OTHER_RUN, 1, 0, Digest::default())), 1);
    let effects = receiver.snapshot(OTHER_RUN, 1, &[row(2, 1)]);
    let at = |wanted: &Effect| effects.iter().position(|effect| effect == wanted);
    assert!(
        at(&Effect::DropGauges { place: 0 })
            < effects.iter().position(|effect| matches!(effect, Effect::SetGauge { .. }))
    );
    assert_eq!((drops(&effects), sets(&effects)), (1, vec![row(2, 1)]));
    assert_eq!((receiver.phase(), receiver.noticed(Notice::Restarted)), (OriginPhase::Live, 1));
    receiver.holds(&[row(2, 1)]);
    assert!(sets(&receiver.batch(RUN, 5, &[row(1, 9)])).is_empty(), "the run before it is over");
}

#[test]
fn requests_without_an_answer_are_repeated_with_back_off_and_new_nonces() {
    let mut receiver = Receiver::new();
    receiver.batch(RUN, 1, &[row(1, 1)]);
    let mut asked_ms = vec![0];
    for ms in 1..20_000 {
        if ms % 1000 == 0 {
            receiver.heartbeat(RUN, ms, 1, Digest::default());
        }
        let nonce = receiver.nonce;
        if asks(&receiver.wait(1)) > 0 {
            assert_eq!(receiver.nonce, nonce + 1);
            asked_ms.push(ms);
        }
    }
    let pauses: Vec<u64> = asked_ms.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses[..4], [LOAD_ASK_MS_MIN, 2 * LOAD_ASK_MS_MIN, 4 * LOAD_ASK_MS_MIN, 8 * LOAD_ASK_MS_MIN]);
    assert!(pauses.iter().all(|pause| *pause <= LOAD_ASK_MS_MAX) && pauses.contains(&LOAD_ASK_MS_MAX), "{pauses:?}");
}

#[test]
fn an_origin_that_lies_about_its_sequence_is_quarantined() {
    for lie in [5000, u64::MAX - 1] {
        let mut receiver = Receiver::live(&[row(1, 3)]);
        receiver.wait(LOAD_ASK_MS_MIN);
        assert_eq!(asks(&receiver.batch(RUN, lie, &[row(1, 4)])), 1);
        let effects = receiver.snapshot(RUN, 6, &[row(1, 4)]);
        assert_eq!(drops(&effects), 1);
        assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::SequenceLied));
        receiver.batch(RUN, 7, &[row(1, 4)]);
        assert_eq!(receiver.noticed(Notice::Ignored), 1);
        receiver.wait(LOAD_QUARANTINE_MS_MIN);
        receiver.batch(RUN, 8, &[row(1, 4)]);
        assert_eq!(receiver.phase(), OriginPhase::Asking, "it gets another chance");
    }
    let mut receiver = Receiver::live(&[row(1, 3)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    assert_eq!(asks(&receiver.heartbeat(RUN, 2, 3, digest_of(&[row(1, 3)]))), 1, "behind the last batch");
    receiver.snapshot(RUN, 3, &[row(1, 3)]);
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::SequenceLied));
}

#[test]
fn a_snapshot_that_does_not_add_up_is_not_used() {
    let mut receiver = Receiver::new();
    receiver.batch(RUN, 1, &[row(1, 1)]);
    let mut refused = 0;
    while receiver.phase() == OriginPhase::Asking {
        let torn = SnapshotSection { digest: Digest { sum: 1, count: 1 }, ..receiver.section(1, &[row(1, 1)]) };
        assert!(sets(&receiver.get(sender(1, RUN), Content::Section(torn))).is_empty());
        refused += 1;
        let asked = receiver.nonce;
        while receiver.phase() == OriginPhase::Asking && receiver.nonce == asked {
            receiver.wait(100);
            receiver.heartbeat(RUN, receiver.now_ms, 1, Digest::default());
        }
    }
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::DigestDiffers));
    assert_eq!(refused, LOAD_REPAIRS_MAX + 1);
}

#[test]
fn parts_of_a_snapshot_may_come_twice_and_in_any_order() {
    let rows: Vec<_> = (0..6).map(|id| row(id, 3)).collect();
    let mut receiver = Receiver::new();
    receiver.heartbeat(RUN, 1, 4, digest_of(&rows));
    let whole = receiver.section(4, &rows);
    let part = |part: u32| SnapshotSection {
        part,
        parts: 3,
        gauges: rows[2 * part as usize..][..2].to_vec(),
        ..whole.clone()
    };
    for number in [2, 2, 0, 2] {
        assert!(sets(&receiver.get(sender(1, RUN), Content::Section(part(number)))).is_empty());
    }
    assert_eq!(sets(&receiver.get(sender(1, RUN), Content::Section(part(1)))), rows);
    assert_eq!(receiver.phase(), OriginPhase::Live);
}

#[test]
fn a_request_that_arrives_twice_gets_two_snapshots_and_the_newer_one_counts() {
    let mut receiver = Receiver::new();
    receiver.heartbeat(RUN, 1, 4, Digest::default());
    let rows = [row(1, 1), row(2, 2)];
    let halves = |sequence, rows: &[WorkerGauge], receiver: &Receiver| {
        let whole = receiver.section(sequence, rows);
        [0, 1].map(|part| SnapshotSection { part, parts: 2, gauges: vec![rows[part as usize]], ..whole.clone() })
    };
    let [old_0, old_1] = halves(4, &rows, &receiver);
    let [new_0, new_1] = halves(5, &[row(1, 7), row(2, 2)], &receiver);
    for section in [old_0, new_0, old_1, new_1] {
        receiver.get(sender(1, RUN), Content::Section(section));
    }
    receiver.holds(&[row(1, 7), row(2, 2)]);
}

#[test]
fn a_router_of_another_fleet_is_quarantined_until_it_is_of_this_one() {
    let foreign = |run| Sender { fingerprint: Fingerprint(8), ..sender(1, run) };
    let batch = |sequence| Content::Batch(Batch { sequence, gauges: vec![row(1, 9)], bindings: vec![] });
    let mut receiver = Receiver::new();
    assert_eq!(asks(&receiver.get(foreign(RUN), batch(1))), 0);
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::Fingerprint));
    receiver.get(foreign(RUN), batch(2));
    assert_eq!(receiver.noticed(Notice::Ignored), 1);
    receiver.batch(OTHER_RUN, 1, &[row(1, 1)]);
    assert_eq!(receiver.phase(), OriginPhase::Asking, "it was reconfigured");
    // A recording from before that does not hold it up, nor does one once it is live.
    receiver.get(foreign(RUN), batch(3));
    assert_eq!(receiver.phase(), OriginPhase::Asking);
    receiver.snapshot(OTHER_RUN, 1, &[row(1, 1)]);
    receiver.wait(LOAD_ASK_MS_MIN);
    assert_eq!((drops(&receiver.get(foreign(RUN), batch(4))), receiver.phase()), (0, OriginPhase::Repairing));
    receiver.snapshot(OTHER_RUN, 1, &[row(1, 1)]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
    // No recording says this.
    assert_eq!(drops(&receiver.get(foreign(OTHER_RUN), batch(2))), 1);
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::Fingerprint));
}

#[test]
fn an_origin_with_too_many_workers_is_quarantined() {
    let mut receiver = Receiver::live(&[]);
    let rows: Vec<_> = (0..=ORIGIN_WORKERS_MAX as u64).map(|id| row(id, 1)).collect();
    for (at, rows) in rows.chunks(LOAD_MESSAGE_GAUGES_MAX).enumerate() {
        receiver.batch(RUN, 5 + at as u64, rows);
    }
    assert_eq!(receiver.phase(), OriginPhase::Quarantined(QuarantineReason::TooManyWorkers));
    // As many as are allowed.
    let mut receiver = Receiver::live(&[]);
    for (at, rows) in rows[1..].chunks(LOAD_MESSAGE_GAUGES_MAX).enumerate() {
        receiver.batch(RUN, 5 + at as u64, rows);
    }
    assert_eq!(receiver.phase(), OriginPhase::Live);
}

#[test]
fn bindings_pass_within_their_budget() {
    let mut receiver = Receiver::live(&[]);
    let bindings = vec![Binding::default(); LOAD_MESSAGE_BINDINGS_MAX];
    let mut bound = 0;
    for sequence in 5..5 + (ORIGIN_BINDINGS_MAX / LOAD_MESSAGE_BINDINGS_MAX) as u64 + 2 {
        let batch = Batch { sequence, gauges: vec![], bindings: bindings.clone() };
        let effects = receiver.get(sender(1, RUN), Content::Batch(batch));
        bound += effects.iter().filter(|effect| matches!(effect, Effect::Bind(_))).count();
    }
    assert_eq!((bound, receiver.noticed(Notice::BindingsDropped)), (ORIGIN_BINDINGS_MAX, 2));
}

#[test]
fn bindings_that_came_before_the_snapshot_are_asked_for_again() {
    let mut receiver = Receiver::new();
    let bindings = vec![Binding::default()];
    let batch = |sequence| Content::Batch(Batch { sequence, gauges: vec![], bindings: bindings.clone() });
    receiver.get(sender(1, RUN), batch(5));
    receiver.get(sender(1, RUN), batch(6));
    receiver.snapshot(RUN, 5, &[]);
    assert_eq!(receiver.phase(), OriginPhase::Repairing, "the snapshot lacks the bindings of batch 6");
    receiver.wait(LOAD_ASK_MS_MIN);
    receiver.snapshot(RUN, 6, &[]);
    assert_eq!(receiver.phase(), OriginPhase::Live);
}
