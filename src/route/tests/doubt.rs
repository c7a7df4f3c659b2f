//! What is believed of an answer during which trust fell or rose, or the index moved.

use super::*;
use crate::ids::EventSeq;
use crate::route::kept::SpaceCache;
use crate::trust::{TrustLevel, TrustReason};

const BEFORE: EventSeq = EventSeq(7);

fn trust(level: TrustLevel, reasons: &[TrustReason], since_unix_ms: u64) -> Trust {
    let reasons = reasons.iter().copied().collect();
    Trust { level, reasons, since_unix_ms, as_of_seq: Some(BEFORE), as_of_unix_ms: 70 }
}

/// A space whose workers are believed so much.
fn believed(trusts: &[Trust]) -> World {
    let world = World::new(trusts.len() as u32, Some(SCHEME));
    world.fleet.workers.iter().zip(trusts).for_each(|(record, trust)| record.trust.store(*trust));
    world
}

/// What is found when a decision begins.
fn refresh(cache: &mut SpaceCache, world: &World) {
    let World { fleet, indexes, predictions, loads, policy, .. } = world;
    let affinities = &AffinityTable::new(8, 0);
    cache.refresh(
        &View { fleet, indexes, predictions, loads, policy, round_robin_counters: &[], affinities, now_ns: 0 },
        SpaceId(0),
    );
}

fn found(cache: &mut SpaceCache) -> Vec<Trust> {
    cache.materialize();
    cache.observation.workers.iter().map(|facts| facts.trust).collect()
}

/// Whether all workers are taken to be believed at least so much: by the rule that removes, and by what credits.
fn passes(cache: &SpaceCache, level: TrustLevel) -> bool {
    let stay = cache.admits_all(&Policy { trust_min: level, ..Policy::default() });
    assert_eq!(stay, cache.cover_credits(&Policy { credit_trust_min: level, ..Policy::default() }));
    stay
}

#[test]
fn a_fall_while_the_index_was_read_holds_and_a_rise_does_not() {
    let (exact, low) = (trust(TrustLevel::Exact, &[], 1), trust(TrustLevel::LowerBound, &[TrustReason::Gap], 1));
    let (world, mut cache) = (believed(&[exact, exact, low]), SpaceCache::default());
    refresh(&mut cache, &world);
    assert!(passes(&cache, TrustLevel::LowerBound) && !passes(&cache, TrustLevel::Exact));
    assert!(!cache.mark_contended(false), "nothing changed");
    assert_eq!(found(&mut cache), [exact, exact, low]);

    let later = |trust| Trust { since_unix_ms: 2, as_of_seq: Some(EventSeq(8)), as_of_unix_ms: 80, ..trust };
    let fallen = trust(TrustLevel::Unproven, &[TrustReason::Recovering], 1);
    world.fleet.workers[1].trust.store(later(fallen));
    world.fleet.workers[2].trust.store(later(exact));
    assert!(!cache.mark_contended(false), "the lower of two holds for all states between them: none are mixed");
    let met = Trust { since_unix_ms: 2, ..fallen };
    assert_eq!(found(&mut cache), [exact, met, low], "and as of what was known before");
    assert!(!passes(&cache, TrustLevel::LowerBound));
    refresh(&mut cache, &world);
    assert_eq!(found(&mut cache), [exact, later(fallen), later(exact)]);
    assert!(passes(&cache, TrustLevel::Unproven) && !passes(&cache, TrustLevel::LowerBound));
}

#[test]
fn a_fall_and_a_rise_while_the_index_was_read_are_noticed() {
    let exact = trust(TrustLevel::Exact, &[], 1);
    let (world, mut cache) = (believed(&[exact, exact]), SpaceCache::default());
    refresh(&mut cache, &world);
    let again = Trust { since_unix_ms: 3, ..exact };
    world.fleet.workers[1].trust.store(trust(TrustLevel::LowerBound, &[TrustReason::Gap], 2));
    world.fleet.workers[1].trust.store(again);
    assert!(cache.mark_contended(false));
    let contended = trust(TrustLevel::Unproven, &[TrustReason::ReadContended], 3);
    assert_eq!(found(&mut cache), [exact, contended]);
    assert!(!passes(&cache, TrustLevel::LowerBound));
    refresh(&mut cache, &world);
    assert_eq!(found(&mut cache), [exact, again]);
    assert!(passes(&cache, TrustLevel::Exact) && !cache.mark_contended(false));
}

#[test]
fn a_contended_look_up_proves_nothing_of_anybody_and_only_that_one() {
    let none = trust(TrustLevel::None, &[TrustReason::NoEvents], 1);
    for lowest in [trust(TrustLevel::Exact, &[], 1), none] {
        let trusts = [trust(TrustLevel::Exact, &[], 1), trust(TrustLevel::LowerBound, &[TrustReason::Gap], 1), lowest];
        let (world, mut cache) = (believed(&trusts), SpaceCache::default());
        refresh(&mut cache, &world);
        let passed = passes(&cache, TrustLevel::LowerBound);
        assert_eq!(passed, lowest.level >= TrustLevel::LowerBound);
        assert!(cache.mark_contended(true));
        let contended = trusts.map(|trust| {
            let mut reasons = trust.reasons;
            reasons.insert(TrustReason::ReadContended);
            Trust { level: trust.level.min(TrustLevel::Unproven), reasons, ..trust }
        });
        assert_eq!(found(&mut cache), contended);
        assert!(!passes(&cache, TrustLevel::LowerBound));
        refresh(&mut cache, &world);
        assert_eq!(found(&mut cache), trusts, "nothing of it is cache");
        assert_eq!(passes(&cache, TrustLevel::LowerBound), passed);
    }
}
