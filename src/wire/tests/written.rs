//! Hot replies, which are written in one pass, against the same ones made by flatbuffers' builder.

use super::*;
use crate::fleet::WorkerRecord;
use crate::ids::WorkerSlot;
use crate::limits::FRAME_ALIGN_BYTES;
use crate::wire::table;

/// What readers of every language see of a body: all fields, those that are absent included.
fn seen<'a, T>(body: &'a [u8]) -> String
where
    T: flatbuffers::Follow<'a> + flatbuffers::Verifiable + 'a,
    T::Inner: std::fmt::Debug,
{
    format!("{:?}", table::root::<T>(body, 1 << 12).expect("a body that the verifier accepts"))
}

fn record(index: WorkerIndex, name: String) -> WorkerRecord {
    WorkerRecord { name, ..WorkerRecord::new(index, Worker::new(u64::from(index.0), 0), WorkerSlot(0)) }
}

fn scored() -> impl Strategy<Value = Scored> {
    let worker = (0..8_u32, any::<u64>(), any::<u32>(), 0..4_usize);
    let overlap = any::<[u32; 4]>();
    let trust = (0..=4_u8, any::<u64>(), any::<u64>(), proptest::option::of(0..u64::MAX), any::<u64>());
    let terms = any::<[i32; 4]>();
    (worker, overlap, trust, terms).prop_map(|((index, id, rank, state), overlap, trust, terms)| {
        let [device, host, disk, external] = overlap;
        let [request_blocks, prefill, taint_factor, cost] = terms.map(f64::from);
        Scored {
            index: WorkerIndex(index),
            worker: Worker::new(id, rank),
            overlap: TierBlocks { device, host, disk, external },
            trust: Trust {
                level: TrustLevel::from_u8(trust.0).unwrap_or_default(),
                reasons: crate::trust::TrustReasons::from_bits(trust.1),
                since_unix_ms: trust.2,
                as_of_seq: trust.3.map(EventSeq),
                as_of_unix_ms: trust.4,
            },
            state: [WorkerState::Joining, WorkerState::Ready, WorkerState::Draining, WorkerState::Down][state],
            terms: CostTerms { request_blocks, prefill, taint_factor, cost, ..CostTerms::default() },
        }
    })
}

fn other() -> impl Strategy<Value = OtherLoad> {
    (any::<[u64; 5]>(), any::<u32>(), any::<u32>()).prop_map(
        |([id, origin, age_ms, prefill_tokens, decode_blocks], rank, requests)| OtherLoad {
            worker: Worker::new(id, rank),
            origin,
            age_ms,
            requests,
            prefill_tokens,
            decode_blocks,
        },
    )
}

fn decided() -> impl Strategy<Value = Decision> {
    let candidates = proptest::collection::vec(scored(), 0..5);
    let removed = proptest::collection::vec((prop::sample::select(Rule::ALL), any::<u64>(), any::<u32>()), 0..6);
    let kind =
        proptest::option::of(prop::sample::select(&[Kind::AllBusy, Kind::NobodyAvailable, Kind::AllFiltered][..]));
    let booking = proptest::option::of(any::<(u64, u64)>());
    (candidates, removed, kind, booking, any::<[u32; 3]>(), any::<[u64; 4]>(), any::<bool>()).prop_map(
        |(candidates, removed, no_worker, booking, [eligible, ties, request_blocks], wide, is_matched)| Decision {
            candidates,
            eligible,
            ties,
            matched: if is_matched { MatchStatus::Matched } else { MatchStatus::Unmatchable },
            notes: ReplyNotes(wide[0]),
            request_blocks,
            policy_version: wide[1],
            fleet_version: wide[2],
            index_epoch: wide[3],
            booking: booking.map(|(slot, generation)| BookingHandle { slot, generation }),
            removed: removed.into_iter().map(|(rule, id, rank)| (rule, Worker::new(id, rank))).collect(),
            mode: if is_matched { Mode::Kv } else { Mode::Lmetric },
            no_worker,
            ..Decision::default()
        },
    )
}

/// Structs lie where compilers of other languages look for them.
fn assert_aligned(body: &[u8]) {
    let at = |address: *const u8| address.addr() - body.as_ptr().addr();
    let reply = table::root::<fb::RouteReply<'_>>(body, 1 << 12).unwrap();
    for candidate in reply.candidates().iter().chain(reply.prefill().iter().flatten()) {
        let trust = candidate.trust().map(|trust| at(trust.0.as_ptr()));
        assert!(trust.is_some_and(|at| at.is_multiple_of(8)));
    }
    assert!(reply.booking().is_none_or(|handle| at(handle.0.as_ptr()).is_multiple_of(8)));
    assert!(reply.others().is_none_or(|others| at(others.bytes().as_ptr()).is_multiple_of(8)));
    for removal in reply.removed().iter().flatten() {
        assert!(at(removal.workers().bytes().as_ptr()).is_multiple_of(8));
    }
}

proptest! {
    #[test]
    fn a_route_reply_equals_the_builders(
        mut decision in decided(), prefill in proptest::option::of(decided()), explain: bool, known in 0..8_u32, name in "\\PC{0,9}", before in 0..3_usize,
        others in proptest::collection::vec(other(), 0..4),
    ) {
        decision.prefill = prefill.map(Box::new);
        if explain {
            decision.others = others;
        }
        // Some of the candidates have just left.
        let workers = (0..known).map(|index| record(WorkerIndex(index), name.clone())).collect();
        let fleet = FleetTable { version: 2, spaces: Vec::new(), workers };
        let mut out = vec![0; before * FRAME_ALIGN_BYTES];
        ReplyEncoder::default().route(ID, &decision, explain, &fleet, &mut out);
        let (_, body) = split(&out[before * FRAME_ALIGN_BYTES..]);
        let built = built::route(&decision, explain, &fleet);
        prop_assert_eq!(seen::<fb::RouteReply<'_>>(body), seen::<fb::RouteReply<'_>>(&built));
        assert_aligned(body);
        // The gateway reads either the same, by either way.
        let hot = !explain && !decision.candidates.is_empty();
        prop_assert_eq!(hot::is_hot(FrameKind::RouteReply, body), hot);
        prop_assert_eq!(hot::is_hot(FrameKind::RouteReply, &built), hot);
    }

    #[test]
    fn lies_in_a_route_reply_do_not_get_past_the_reader(
        mut decision in decided(), prefill in proptest::option::of(decided()), known in 0..8_u32,
        lies in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), 0_u8..48]), 1..4),
    ) {
        decision.prefill = prefill.map(Box::new);
        let workers = (0..known).map(|index| record(WorkerIndex(index), "name".to_owned())).collect();
        let fleet = FleetTable { version: 2, spaces: Vec::new(), workers };
        let mut body = built::route(&decision, false, &fleet);
        for (at, value) in lies {
            let at = at.index(body.len());
            body[at] = value;
        }
        hot::is_hot(FrameKind::RouteReply, &body);
    }

    #[test]
    fn an_overlap_reply_equals_the_builders(decision in decided()) {
        let mut out = Vec::new();
        ReplyEncoder::default().overlap(ID, &decision, &mut out);
        let built = built::overlap(&decision);
        prop_assert_eq!(seen::<fb::OverlapReply<'_>>(split(&out).1), seen::<fb::OverlapReply<'_>>(&built));
    }

    #[test]
    fn an_outcome_reply_equals_the_builders(outcome in 0..4_usize, instance_id: u64) {
        use BookingOutcome::{AlreadyApplied, Applied, Superseded, Unknown};
        let outcome = [Applied, AlreadyApplied, Unknown, Superseded][outcome];
        let built = built::outcome(outcome, instance_id);
        type Encode = fn(&mut ReplyEncoder, CorrelationId, BookingOutcome, u64, &mut Vec<u8>);
        let encoders: [Encode; 4] =
            [ReplyEncoder::prefill_complete, ReplyEncoder::free, ReplyEncoder::output_progress, ReplyEncoder::served];
        for encode in encoders {
            let mut out = Vec::new();
            encode(&mut ReplyEncoder::default(), ID, outcome, instance_id, &mut out);
            prop_assert_eq!(seen::<fb::FreeReply<'_>>(split(&out).1), seen::<fb::FreeReply<'_>>(&built));
        }
    }
}
