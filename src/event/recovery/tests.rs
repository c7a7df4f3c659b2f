//! Every row of the module's table, and its limits. `ingest` tests the effect on a worker.

use super::*;
use crate::limits::{RENEWAL_AFTER_MS_MIN, RENEWAL_DOUBLINGS_MAX, REPLAY_SILENT_MS_MAX, REPLAY_UNANSWERED_MS_MAX};

fn gate(last: u64) -> SequenceGate {
    let mut gate = SequenceGate::default();
    (0..=last).for_each(|seq| assert_ne!(gate.batch(EventSeq(seq), seq), Verdict::Duplicate));
    gate
}

/// A name, the gate, the sequence numbers and hashes of an answer, the verdict on the last of them, and whether the
/// recovery waits for more.
type BatchRow<'a> = (&'a str, &'a SequenceGate, &'a [(u64, u64)], Replayed, bool);
/// A name, the gate, the sequences of an answer, the live one that waits, whether the end marker came, and the verdict.
type EndRow<'a> = (&'a str, &'a SequenceGate, &'a [u64], Option<u64>, bool, Ended);

/// A recovery that has asked for a replay from the gate's last sequence number on.
fn asked(gate: &SequenceGate) -> Recovery {
    let mut recovery = Recovery::default();
    recovery.connected(0);
    assert_eq!(recovery.wants(0), Some(Aim::Prove));
    assert_eq!(recovery.ask(gate, 0), gate.last().unwrap_or_default());
    assert!(recovery.is_asking() && recovery.is_proving() && recovery.wants(u64::MAX).is_none());
    recovery
}

#[test]
fn batches_of_an_answer() {
    let (known, unknown) = (gate(9), SequenceGate::default());
    let rows: &[BatchRow<'_>] = &[
        ("the last, again", &known, &[(9, 9)], Replayed::Skip, true),
        ("the next", &known, &[(9, 9), (10, 10)], Replayed::Apply, true),
        ("the next, and nothing proven", &known, &[(10, 10)], Replayed::Late, false),
        ("a later one, and nothing proven", &known, &[(12, 12)], Replayed::Late, false),
        ("behind a hole", &known, &[(9, 9), (12, 12)], Replayed::Hole, false),
        ("other bytes", &known, &[(9, 8)], Replayed::AnotherIncarnation, false),
        ("other bytes at 0", &known, &[(0, 8)], Replayed::Apply, true),
        ("from 0", &unknown, &[(0, 5)], Replayed::Apply, true),
        ("late", &unknown, &[(3, 5)], Replayed::Late, false),
    ];
    for (name, gate, batches, answer, goes_on) in rows {
        let mut recovery = asked(gate);
        let answers = batches.iter().map(|(seq, hash)| recovery.replayed(gate, EventSeq(*seq), *hash, 1));
        assert_eq!(answers.last(), Some(*answer), "{name}");
        assert_eq!(recovery.is_asking(), *goes_on, "{name}");
        assert!(recovery.is_proving(), "{name}");
    }
    assert_eq!(Recovery::default().replayed(&known, EventSeq(9), 9, 1), Replayed::Unasked);
}

#[test]
fn ends_of_an_answer() {
    let (known, unknown) = (gate(9), SequenceGate::default());
    let rows: &[EndRow<'_>] = &[
        ("whole", &known, &[9], None, true, Ended::Recovered),
        ("the live stream follows", &known, &[9], Some(10), true, Ended::Recovered),
        ("the live stream does not follow", &known, &[9], Some(11), true, Ended::Short),
        ("no marker, and the live stream follows", &known, &[9], Some(10), false, Ended::Recovered),
        ("no marker, and nothing waits", &known, &[9], None, false, Ended::Short),
        ("marker alone", &known, &[], None, true, Ended::AnotherIncarnation),
        ("nothing", &known, &[], None, false, Ended::TimedOut),
        ("nothing was ever sent", &unknown, &[], None, true, Ended::NothingSent),
        ("nothing was sent before the first live batch", &unknown, &[], Some(0), true, Ended::Recovered),
        ("nothing was ever sent, they say", &unknown, &[], Some(4), true, Ended::Short),
        ("nothing, of an unknown one", &unknown, &[], None, false, Ended::TimedOut),
    ];
    for (name, gate, batches, needs, marker, ended) in rows {
        let mut recovery = asked(gate);
        for seq in *batches {
            recovery.replayed(gate, EventSeq(*seq), *seq, 1);
        }
        assert_eq!(recovery.ended(gate, needs.map(EventSeq), *marker, 1), *ended, "{name}");
        assert_eq!(recovery.is_proving(), !matches!(ended, Ended::Recovered | Ended::NothingSent), "{name}");
    }
    assert_eq!(Recovery::default().ended(&known, None, true, 1), Ended::Unasked);
}

#[test]
fn an_empty_answer_proves_nothing_after_one_that_was_wrong() {
    let unknown = SequenceGate::default();
    let mut recovery = asked(&unknown);
    assert_eq!(recovery.ended(&unknown, Some(EventSeq(4)), true, 1), Ended::Short, "batch 4 came, so 0 to 3 were sent");
    recovery.connected(2);
    recovery.ask(&unknown, 2);
    assert_eq!(recovery.ended(&unknown, None, true, 2), Ended::Recovered);
    recovery.connected(3);
    recovery.ask(&unknown, 3);
    assert_eq!(recovery.replayed(&unknown, EventSeq(0), 0, 3), Replayed::Apply, "it has a buffer after all");
    recovery.connected(4);
    recovery.ask(&unknown, 4);
    assert_eq!(recovery.ended(&unknown, None, true, 4), Ended::NothingSent);
}

#[test]
fn tries_are_bounded_and_further_apart_and_begin_anew_with_progress() {
    let gate = gate(9);
    let mut recovery = asked(&gate);
    let (mut now_ms, mut waits) = (0, Vec::new());
    while recovery.ended(&gate, None, false, now_ms) == Ended::TimedOut {
        let due = (now_ms..).find(|at| recovery.wants(*at).is_some()).expect("asked again");
        waits.push(due - now_ms);
        now_ms = due;
        recovery.ask(&gate, now_ms);
    }
    assert!(recovery.gave_up());
    assert_eq!(waits.len() + 1, REPLAY_TRIES_MAX as usize);
    assert!(waits.windows(2).all(|pair| pair[0] < pair[1]), "{waits:?}");

    let mut recovery = asked(&gate);
    let (mut at, mut replays) = (gate, 1);
    loop {
        let last = at.last().expect("known");
        let hash = at.payload_hash(last).expect("remembered");
        assert_eq!(recovery.replayed(&at, last, hash, 0), Replayed::Skip);
        let next = EventSeq(last.0 + 1);
        assert_eq!(recovery.replayed(&at, next, next.0, 0), Replayed::Apply);
        at.replayed(next, next.0);
        match recovery.replayed(&at, EventSeq(next.0 + 5), 0, 0) {
            Replayed::Hole => {}
            other => break assert_eq!(other, Replayed::Unfillable),
        }
        assert!(recovery.wants(u64::MAX).is_some());
        recovery.ask(&at, 0);
        replays += 1;
    }
    assert_eq!(replays, REPLAYS_PER_RECOVERY_MAX);
}

#[test]
fn a_publisher_that_contradicts_itself_is_asked_so_often_and_no_more() {
    let known = gate(9);
    let other_bytes = |recovery: &mut Recovery| recovery.replayed(&known, EventSeq(9), 8, 0) == Replayed::GivenUp;
    let marker_alone = |recovery: &mut Recovery| recovery.ended(&known, None, true, 0) == Ended::GivenUp;
    for (name, answer) in
        [("other bytes", &other_bytes as &dyn Fn(&mut Recovery) -> bool), ("marker alone", &marker_alone)]
    {
        let mut recovery = asked(&known);
        let mut replays = 1;
        while !answer(&mut recovery) {
            assert_eq!(recovery.wants(0), Some(Aim::Prove), "{name}");
            recovery.ask(&known, 0);
            replays += 1;
        }
        assert_eq!(replays, REPLAYS_PER_RECOVERY_MAX, "{name}");
        assert!(recovery.gave_up() && !recovery.is_proving(), "{name}");
    }
}

#[test]
fn an_answer_times_out_sooner_once_it_has_begun() {
    let gate = gate(9);
    let mut recovery = asked(&gate);
    assert!(!recovery.has_timed_out(REPLAY_FIRST_MS_MAX - 1) && recovery.has_timed_out(REPLAY_FIRST_MS_MAX));
    recovery.excuse(50);
    assert!(!recovery.has_timed_out(REPLAY_FIRST_MS_MAX));
    recovery.replayed(&gate, EventSeq(9), 9, 100);
    assert!(!recovery.has_timed_out(99 + REPLAY_NEXT_MS_MAX) && recovery.has_timed_out(100 + REPLAY_NEXT_MS_MAX));
}

#[test]
fn probes_come_when_it_is_quiet_and_become_proofs_when_batches_are_missing() {
    let gate = gate(9);
    let mut recovery = asked(&gate);
    recovery.settled();
    recovery.tick(0, u64::MAX);
    assert_eq!(recovery.wants(u64::MAX), None, "never");
    recovery.live(1_000);
    recovery.tick(500, 1_499);
    assert_eq!(recovery.wants(u64::MAX), None);
    recovery.tick(500, 1_500);
    assert_eq!((recovery.wants(1_500), recovery.is_proving()), (Some(Aim::Probe), false));
    recovery.live(1_600);
    assert_eq!(recovery.wants(u64::MAX), None, "it is not quiet");

    recovery.tick(500, 2_100);
    recovery.ask(&gate, 2_100);
    assert_eq!(recovery.ended(&gate, None, false, 6_000), Ended::ProbeUnanswered);
    recovery.tick(500, 6_900);
    assert_eq!(recovery.wants(u64::MAX), None, "twice as long after one that found nothing");
    recovery.tick(500, 7_000);
    recovery.ask(&gate, 7_000);
    assert_eq!(recovery.replayed(&gate, EventSeq(9), 9, 7_000), Replayed::Skip);
    assert_eq!(recovery.replayed(&gate, EventSeq(12), 12, 7_000), Replayed::Hole);
    assert!(recovery.is_proving());
    recovery.disconnected();
    recovery.begin(8_000);
    recovery.tick(500, 80_000);
    assert_eq!(recovery.wants(u64::MAX), None, "the publisher is disconnected");
}

#[test]
fn batches_lost_for_good_are_asked_for_again_further_apart_until_the_beginning_is_gone() {
    let gate = gate(9);
    let mut recovery = asked(&gate);
    let mut now_ms = 0;
    while !recovery.gave_up() {
        now_ms += 60_000;
        if recovery.wants(now_ms).is_some() {
            recovery.ask(&gate, now_ms);
        }
        recovery.ended(&gate, None, false, now_ms);
    }
    let mut waits = Vec::new();
    for _ in 0..9 {
        let due_ms = (now_ms..).step_by(1_000).find(|at| {
            recovery.tick(0, *at);
            recovery.wants(*at) == Some(Aim::Renew)
        });
        waits.push((due_ms.expect("asked again") - now_ms) / RENEWAL_AFTER_MS_MIN);
        now_ms = due_ms.expect("asked again");
        assert_eq!(recovery.ask(&gate, now_ms), EventSeq(0));
        assert!(!recovery.is_proving(), "live batches go on");
        assert_eq!(recovery.ended(&gate, None, false, now_ms), Ended::RenewalUnanswered);
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64, 64]);

    for _ in 0..REPLAY_LATE_TRIES_MAX {
        now_ms += RENEWAL_AFTER_MS_MIN << RENEWAL_DOUBLINGS_MAX;
        recovery.tick(0, now_ms);
        recovery.ask(&gate, now_ms);
        assert_eq!(recovery.replayed(&gate, EventSeq(1), 1, now_ms), Replayed::Forgotten);
        assert!(!recovery.is_asking());
    }
    recovery.tick(0, u64::MAX);
    assert_eq!(recovery.wants(u64::MAX), None);
}

#[test]
fn a_renewal_begins_anew_with_batch_0_and_then_proves() {
    let known = gate(9);
    let mut recovery = asked(&known);
    (0..REPLAY_TRIES_MAX).for_each(|_| {
        recovery.ended(&known, None, false, 0);
        recovery.ask(&known, u64::MAX / 2);
    });
    assert!(recovery.gave_up());
    recovery.tick(0, u64::MAX);
    recovery.ask(&known, 1_000);
    assert_eq!(recovery.replayed(&known, EventSeq(0), 7, 1_000), Replayed::Renewed);
    assert!(recovery.is_proving() && recovery.is_asking() && !recovery.gave_up());
    let anew = gate(3);
    assert_eq!(recovery.replayed(&anew, EventSeq(6), 6, 1_000), Replayed::Hole);
    recovery.forget_losses();
    recovery.settled();
    recovery.tick(0, u64::MAX);
    assert_eq!(recovery.wants(u64::MAX), None, "nothing is lost any more");
}

/// How long a worker waits for a publisher that does not answer, in steps of one millisecond.
fn unanswered_ms(gate: &SequenceGate, recovery: &mut Recovery) -> u64 {
    recovery.begin(0);
    (0..)
        .find(|now_ms| {
            if recovery.wants(*now_ms).is_some() {
                recovery.ask(gate, *now_ms);
            }
            if recovery.has_timed_out(*now_ms) {
                recovery.ended(gate, None, false, *now_ms);
            }
            recovery.gave_up()
        })
        .expect("it is given up")
}

#[test]
fn a_publisher_that_never_answered_is_given_up_sooner() {
    let nothing = SequenceGate::default();
    let mut recovery = Recovery::default();
    recovery.connected(0);
    assert_eq!(unanswered_ms(&nothing, &mut recovery), REPLAY_SILENT_MS_MAX);
    assert_eq!(unanswered_ms(&gate(9), &mut recovery), REPLAY_UNANSWERED_MS_MAX, "there is something to lose");
    // It has an answer once, if only the end of one.
    recovery.begin(0);
    recovery.ask(&nothing, 0);
    recovery.ended(&nothing, None, true, 0);
    assert_eq!(unanswered_ms(&nothing, &mut recovery), REPLAY_UNANSWERED_MS_MAX);
}
