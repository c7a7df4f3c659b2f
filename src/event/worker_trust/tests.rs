//! Every row of the table.

use super::*;
use TrustReason as R;

const ALL_FOUND: [Flaw; 19] = [
    Flaw::Undecodable,
    Flaw::UnknownEvents,
    Flaw::SchemeMismatch,
    Flaw::HashConflict,
    Flaw::AmbiguousStore,
    Flaw::FullReports,
    Flaw::UnknownRoot,
    Flaw::CapacityBound,
    Flaw::MemoryBound,
    Flaw::MemoryShort,
    Flaw::Hybrid,
    Flaw::UnknownMedium,
    Flaw::RankConflict,
    Flaw::IsolationUnknown,
    Flaw::LookaheadHash,
    Flaw::UnchainedHashes,
    Flaw::OffloadUnbound,
    Flaw::LowerTiersUnknown,
    Flaw::LastCopyRemovals,
];

fn after(inputs: &[TrustInput]) -> WorkerTrust {
    let mut trust = WorkerTrust::new(0);
    for input in inputs {
        trust.apply(*input, 0);
    }
    trust
}

#[test]
fn every_row_of_the_table() {
    use TrustInput::{
        Batch, ClearPublished, ClearReported, ClearedAllTiers, Disconnected, Duplicate, Gap, Joined, LoadFailed,
        Loading, Misframed, NoEventSource, NothingSent, Recovered, Recovering, Reset, Restarted, RestartedUnseen,
        Silent,
    };
    let at = EventSeq;
    let rows: &[(&[TrustInput], TrustLevel, &[R])] = &[
        (&[], TrustLevel::Unproven, &[R::Joining]),
        (&[NoEventSource], TrustLevel::None, &[R::NoEvents]),
        (&[Joined(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(4))], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(4)), Restarted(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Restarted(at(3))], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), RestartedUnseen], TrustLevel::Unproven, &[R::Joining]),
        (&[Joined(at(4)), RestartedUnseen, Recovering, NothingSent], TrustLevel::Exact, &[]),
        (&[RestartedUnseen, Recovering, Joined(at(3))], TrustLevel::Unproven, &[R::JoinedLate, R::Recovering]),
        (&[NothingSent], TrustLevel::Exact, &[]),
        (&[TrustInput::Flaw(Flaw::IsolationUnknown), NothingSent], TrustLevel::Unproven, &[R::IsolationUnknown]),
        (&[Joined(at(0)), Gap], TrustLevel::LowerBound, &[R::Gap]),
        (&[Joined(at(0)), Reset], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), Silent, Reset, Batch], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), Reset, ClearedAllTiers], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), ClearReported, Batch], TrustLevel::Unproven, &[R::ClearAwaited]),
        (&[Joined(at(0)), ClearReported, ClearPublished], TrustLevel::Exact, &[]),
        (&[Joined(at(4)), ClearReported, ClearPublished], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), ClearReported, Restarted(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Gap, Batch], TrustLevel::LowerBound, &[R::Gap]),
        (&[Joined(at(4)), Gap, ClearedAllTiers], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Gap, Restarted(at(0))], TrustLevel::Exact, &[]),
        (&[Disconnected], TrustLevel::Unproven, &[R::Disconnected]),
        (&[Joined(at(0)), Disconnected], TrustLevel::Unproven, &[R::Disconnected]),
        (&[Joined(at(0)), Disconnected, Joined(at(9))], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), Disconnected, Joined(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Gap, Disconnected, Joined(at(9))], TrustLevel::LowerBound, &[R::JoinedLate, R::Gap]),
        (&[Joined(at(0)), Silent], TrustLevel::Unproven, &[R::Silent]),
        (&[Joined(at(0)), Silent, Batch], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Silent, Duplicate], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Misframed], TrustLevel::Unproven, &[R::Misframed]),
        (&[Joined(at(0)), Misframed, Duplicate], TrustLevel::Unproven, &[R::Misframed]),
        (&[Joined(at(0)), Misframed, Batch], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Misframed, Gap], TrustLevel::LowerBound, &[R::Gap]),
        (&[Misframed, Joined(at(0))], TrustLevel::Exact, &[]),
        (&[Misframed, Joined(at(3))], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Joined(at(0)), Misframed, ClearedAllTiers], TrustLevel::Unproven, &[R::Misframed]),
        (&[Joined(at(0)), Loading], TrustLevel::Unproven, &[R::Recovering]),
        (&[Joined(at(0)), Loading, LoadFailed], TrustLevel::LowerBound, &[R::JoinedLate]),
        (&[Loading, LoadFailed], TrustLevel::Unproven, &[R::Joining, R::JoinedLate]),
        (&[Loading, LoadFailed, Joined(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), Recovering], TrustLevel::Unproven, &[R::Recovering]),
        (&[Joined(at(0)), Disconnected, Recovering, Recovered { known: true }], TrustLevel::Exact, &[]),
        (&[Recovering, Recovered { known: false }], TrustLevel::Unproven, &[R::Joining]),
        (&[Joined(at(0)), Disconnected, Recovering, Gap], TrustLevel::LowerBound, &[R::Gap]),
        (&[Joined(at(0)), Silent, Gap], TrustLevel::LowerBound, &[R::Gap]),
        (&[Joined(at(0)), Silent, Disconnected], TrustLevel::Unproven, &[R::Disconnected]),
        (&[Joined(at(0)), TrustInput::Flaw(Flaw::Hybrid), ClearedAllTiers], TrustLevel::Unproven, &[R::Hybrid]),
        (&[Joined(at(0)), TrustInput::Flaw(Flaw::Hybrid), Restarted(at(0))], TrustLevel::Exact, &[]),
        (&[Joined(at(0)), TrustInput::Flaw(Flaw::Hybrid), Restarted(at(1))], TrustLevel::LowerBound, &[R::JoinedLate]),
        (
            &[Joined(at(0)), TrustInput::Flaw(Flaw::IsolationUnknown), Restarted(at(0))],
            TrustLevel::Unproven,
            &[R::IsolationUnknown],
        ),
    ];
    for (inputs, level, reasons) in rows {
        let trust = after(inputs);
        assert_eq!(trust.level(), *level, "{inputs:?}");
        assert_eq!(trust.reasons(), reasons.iter().copied().collect(), "{inputs:?}");
    }
}

#[test]
fn every_flaw_lowers_trust_and_a_clear_takes_away_only_the_past() {
    for flaw in ALL_FOUND {
        let found = after(&[TrustInput::Joined(EventSeq(0)), TrustInput::Flaw(flaw)]);
        assert_eq!(found.reasons(), [flaw.reason()].into_iter().collect());
        assert!(found.level() < TrustLevel::Exact, "{flaw:?}");
        let mut cleared = found.clone();
        cleared.apply(TrustInput::ClearedAllTiers, 1);
        let of_the_past = matches!(
            flaw,
            Flaw::Undecodable
                | Flaw::UnknownEvents
                | Flaw::HashConflict
                | Flaw::AmbiguousStore
                | Flaw::FullReports
                | Flaw::UnknownRoot
                | Flaw::OffloadUnbound
                | Flaw::CapacityBound
                | Flaw::MemoryBound
                | Flaw::MemoryShort
                | Flaw::LastCopyRemovals
        );
        assert_eq!(cleared.reasons().is_empty(), of_the_past, "{flaw:?}");
    }
}

#[test]
fn a_relay_caps_our_trust() {
    let source = SourceTrust { level: TrustLevel::LowerBound, reasons: [R::JoinedLate, R::Gap].into_iter().collect() };
    let mut trust = after(&[TrustInput::Joined(EventSeq(0)), TrustInput::Source(source)]);
    assert_eq!((trust.level(), trust.reasons()), (TrustLevel::LowerBound, source.reasons));
    trust.apply(TrustInput::ClearedAllTiers, 0);
    assert_eq!(trust.level(), TrustLevel::LowerBound, "only the relay can take its word back");
    trust.apply(TrustInput::Source(SourceTrust { level: TrustLevel::Exact, reasons: TrustReasons::NONE }), 0);
    assert_eq!((trust.level(), trust.reasons()), (TrustLevel::Exact, TrustReasons::NONE));
}

#[test]
fn a_relay_of_another_version_is_not_believed_more_than_it_says() {
    for bit in 0..u64::BITS {
        for level in (0..5).filter_map(TrustLevel::from_u8) {
            let source = SourceTrust { level, reasons: TrustReasons::from_bits(1 << bit) };
            let trust = after(&[TrustInput::Joined(EventSeq(0)), TrustInput::Source(source)]);
            assert!(trust.level() <= level && trust.level() < TrustLevel::Exact, "{bit} {level}: {}", trust.level());
        }
    }
}

#[test]
fn a_dump_is_believed_as_it_was_where_it_was_taken() {
    let view = |level, reasons: &[R]| SourceTrust { level, reasons: reasons.iter().copied().collect() };
    let loaded = |view| {
        let trust = after(&[TrustInput::Joined(EventSeq(4)), TrustInput::Loading, TrustInput::Loaded(view)]);
        (trust.level(), trust.reasons().iter().collect::<Vec<_>>())
    };
    assert_eq!(loaded(view(TrustLevel::Exact, &[])), (TrustLevel::Exact, vec![]));
    let gap = view(TrustLevel::LowerBound, &[R::Gap]);
    assert_eq!(loaded(gap), (TrustLevel::LowerBound, vec![R::Gap]));
    let silent = after(&[TrustInput::Joined(EventSeq(0)), TrustInput::Gap, TrustInput::Silent]).view_of_blocks();
    assert_eq!(loaded(silent), (TrustLevel::LowerBound, vec![R::Gap]), "silence there is not silence here");
    let relayed = view(TrustLevel::LowerBound, &[]);
    assert_eq!(loaded(relayed), (TrustLevel::LowerBound, vec![]), "a relay's cap without a reason of its own");
    let mut trust = after(&[TrustInput::Loading, TrustInput::Loaded(gap)]);
    trust.apply(TrustInput::ClearedAllTiers, 1);
    assert_eq!(trust.level(), TrustLevel::Exact);
}

#[test]
fn a_relays_word_outlives_a_dump_and_every_connection_after_it() {
    use TrustInput::{Batch, Disconnected, Joined, Loaded, Loading, Recovered, Recovering, Source};
    for level in (0..5).filter_map(TrustLevel::from_u8) {
        for reasons in (0..u64::BITS).map(|bit| 1 << bit).chain([0]).map(TrustReasons::from_bits) {
            let there = after(&[Joined(EventSeq(0)), Source(SourceTrust { level, reasons })]);
            let loaded = [Loading, Loaded(there.view_of_blocks()), Disconnected, Recovering];
            let mut here = after(&[&loaded[..], &[Recovered { known: true }, Batch]].concat());
            assert!(here.level() <= there.level(), "{level} {reasons:?}: {}", here.level());
            here.apply(Source(SourceTrust { level: TrustLevel::Exact, reasons: TrustReasons::NONE }), 1);
            assert!(here.level() == TrustLevel::Exact || !here.own_reasons().is_empty(), "{level} {reasons:?}");
        }
    }
}

#[test]
fn since_moves_with_the_level_and_as_of_with_the_batch() {
    let mut trust = WorkerTrust::new(5);
    assert_eq!((trust.trust().since_unix_ms, trust.trust().as_of_seq), (5, None));
    assert!(!trust.apply(TrustInput::Joined(EventSeq(0)), 7), "it rose");
    trust.applied(EventSeq(0), 7);
    assert!(!trust.apply(TrustInput::Batch, 8));
    trust.applied(EventSeq(1), 8);
    let seen = trust.trust();
    assert_eq!((seen.since_unix_ms, seen.as_of_seq, seen.as_of_unix_ms), (7, Some(EventSeq(1)), 8));
    assert!(trust.apply(TrustInput::Gap, 9), "it fell");
    assert!(!trust.apply(TrustInput::Flaw(Flaw::UnknownRoot), 10), "same level, one more reason");
    assert_eq!(trust.trust().since_unix_ms, 9);
    assert_eq!(trust.trust().as_of_seq, Some(EventSeq(1)), "a gap applies nothing");
    trust.apply(TrustInput::RestartedUnseen, 11);
    assert_eq!(trust.trust().as_of_seq, None, "nothing of this incarnation has been applied");
}
