use proptest::prelude::*;

use super::*;
use crate::limits::REPLAY_BYTES_MAX;

#[test]
fn places_are_few_and_their_bytes_bounded() {
    let mut places = Places::default();
    assert!(places.fits(usize::MAX), "one alone");
    for _ in 0..REPLAYS_AT_ONCE_MAX {
        assert!(places.fits(1));
        places.take(1);
    }
    assert!(!places.fits(0));
    let mut large = Places::default();
    large.take(REPLAYS_UNDER_WAY_BYTES_MAX);
    assert!(large.fits(0) && !large.fits(1));
}

#[test]
fn what_is_missing_comes_before_probes_busy_before_idle_and_quiet_before_loud() {
    let of = |aim, is_idle, waiting| Urgency { aim, is_idle, waiting };
    let mut all =
        [of(Aim::Probe, false, 0), of(Aim::Prove, true, 0), of(Aim::Prove, false, 9), of(Aim::Prove, false, 2)];
    all.sort();
    assert_eq!(
        all,
        [of(Aim::Prove, false, 2), of(Aim::Prove, false, 9), of(Aim::Prove, true, 0), of(Aim::Probe, false, 0)]
    );
}

#[test]
fn a_large_one_whose_turn_it_is_is_not_passed_by() {
    let urgency = |waiting| Urgency { aim: Aim::Prove, is_idle: true, waiting };
    let of = |at, reckoned_bytes| Wanting { urgency: urgency(at), at, reckoned_bytes };
    let mut places = Places::default();
    places.take(REPLAY_BYTES_GUESSED);
    let wanting = vec![of(2, 1), of(1, REPLAYS_UNDER_WAY_BYTES_MAX), of(0, 1)];
    assert_eq!(asked_now(places, wanting.clone()), [of(0, 1)]);
    assert_eq!(asked_now(Places::default(), wanting[..2].to_vec()), [wanting[1]], "alone it has a place");
}

/// A worker that wants a replay: how urgent that is, what its last one brought, and what this one will bring.
fn worker() -> impl Strategy<Value = (Urgency, Option<usize>, usize)> {
    let aim = prop_oneof![4 => Just(Aim::Prove), 1 => Just(Aim::Probe)];
    let urgency =
        (aim, any::<bool>(), 0_usize..4).prop_map(|(aim, is_idle, waiting)| Urgency { aim, is_idle, waiting });
    (urgency, prop::option::of(0..=REPLAY_BYTES_MAX), 0..=REPLAY_BYTES_MAX)
}

/// What a shard's replays under way take.
fn places_of(under_way: &[(usize, usize, usize)]) -> Places {
    let mut places = Places::default();
    under_way.iter().for_each(|(_, reckoned, brought)| places.take(*reckoned.max(brought)));
    places
}

proptest! {
    /// However many want one at once, of whatever size, and in whatever order they end.
    #[test]
    fn a_fleet_of_replays_keeps_to_both_bounds_and_to_the_order_and_all_of_it_is_asked(
        workers in prop::collection::vec(worker(), 1..80),
        ends in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..400),
    ) {
        let of = |at: usize| {
            let (urgency, last, _) = workers[at];
            Wanting { urgency, at, reckoned_bytes: reckoned_bytes(last) }
        };
        let mut wanting: Vec<Wanting> = (0..workers.len()).map(of).collect();
        let mut under_way: Vec<(usize, usize, usize)> = Vec::new();
        let mut ends = ends.into_iter();
        let mut asked_in_all = 0;
        while !wanting.is_empty() {
            let before = places_of(&under_way);
            let asked = asked_now(before, wanting.clone());
            wanting.retain(|waits| asked.iter().all(|asked| asked.at != waits.at));
            under_way.extend(asked.iter().map(|asked| (asked.at, asked.reckoned_bytes, 0)));
            let places = places_of(&under_way);
            prop_assert!(places.taken <= REPLAYS_AT_ONCE_MAX);
            if !asked.is_empty() {
                prop_assert!(places.taken == 1 || places.bytes <= REPLAYS_UNDER_WAY_BYTES_MAX, "{places:?}");
            }
            prop_assert!(before.taken > 0 || !asked.is_empty(), "nobody is under way, and nobody is asked");
            let (last, next) = (asked.last(), wanting.iter().min());
            prop_assert!(last.zip(next).is_none_or(|(last, next)| last <= next), "{last:?} before {next:?}");
            asked_in_all += asked.len();
            // One brings what it has, or ends; where nothing more is drawn, all end.
            let drawn = ends.next().filter(|_| !under_way.is_empty());
            match drawn.map(|(index, brings)| (index.index(under_way.len()), brings)) {
                Some((which, true)) => under_way[which].2 = workers[under_way[which].0].2,
                Some((which, false)) => drop(under_way.swap_remove(which)),
                None => under_way.clear(),
            }
        }
        prop_assert_eq!(asked_in_all, workers.len());
    }
}
