//! Several origins: places, and messages that nothing proves.

use super::super::protocol::{Fault, MAJOR, Refusal};
use super::super::{Notice, OriginPhase, OriginSettings, Origins, QuarantineReason};
use super::*;
use crate::limits::ORIGINS_MAX;

/// Makes an origin live, with one gauge of worker 1.
fn join(origins: &mut Origins, origin: u64, now_ms: u64) -> Vec<Effect> {
    let mut effects = Vec::new();
    let mut nonces = || Nonce(origin);
    let rows = [row(1, origin as u32)];
    let digest = digest_of(&rows);
    let message = |content| Message { sender: sender(origin, 1), minor: 0, content };
    let heartbeat = Heartbeat { beat: now_ms, sequence: 1, digest };
    origins.receive(&message(Content::Heartbeat(heartbeat)), now_ms, &mut nonces, &mut effects);
    let (nonce, gauges) = (Nonce(origin), rows.to_vec());
    let section = SnapshotSection { nonce, sequence: 1, parts: 1, digest, gauges, ..SnapshotSection::default() };
    origins.receive(&message(Content::Section(section)), now_ms, &mut nonces, &mut effects);
    effects
}

fn phases(origins: &Origins) -> Vec<(u64, OriginPhase)> {
    origins.statuses(0).map(|status| (status.origin.0, status.phase)).collect()
}

#[test]
fn a_new_worker_gets_what_all_origins_said_of_it() {
    let mut origins = Origins::new(sender(100, 1), OriginSettings::default());
    join(&mut origins, 1, 10);
    join(&mut origins, 2, 20);
    let gauges: Vec<_> = origins.gauges_of(worker(1), 50).collect();
    assert_eq!(gauges, [(0, gauge(1), 40), (1, gauge(2), 30)]);
    assert_eq!(origins.gauges_of(worker(2), 50).count(), 0);
}

#[test]
fn a_place_goes_to_another_origin_only_if_its_own_does_not_count() {
    let mut origins = Origins::new(sender(1000, 1), OriginSettings::default());
    for origin in 0..ORIGINS_MAX as u64 {
        join(&mut origins, origin + 1, 1000 + origin);
    }
    let effects = join(&mut origins, 500, 2000);
    let no_place = Effect::Noticed { origin: OriginId(500), notice: Notice::NoPlace };
    assert_eq!(effects, [no_place.clone(), no_place]);
    assert_eq!(origins.notices().get(&Notice::NoPlace), Some(&2));
    // The first two become silent.
    let mut effects = Vec::new();
    origins.tick(1000 + 3001 + 1, &mut counting(), &mut effects);
    assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::DropGauges { .. })).count(), 2);
    let effects = join(&mut origins, 500, 5000);
    assert!(effects.contains(&Effect::SetGauge { place: 0, worker: worker(1), gauge: gauge(500), age_ms: 0 }));
}

#[test]
fn what_nothing_proves_affects_no_origin() {
    let mut origins = Origins::new(sender(100, 1), OriginSettings::default());
    join(&mut origins, 1, 10);
    let before = origins.statuses(10).collect::<Vec<_>>();
    for fault in [Fault::WrongMac, Fault::NoEnvelope, Fault::TooLarge] {
        let mut effects = Vec::new();
        let origin = (fault == Fault::WrongMac).then_some(OriginId(1));
        origins.refuse(&Refusal { origin, fault }, 10, &mut counting(), &mut effects);
        assert!(matches!(effects[..], [Effect::Noticed { .. }]), "{effects:?}");
    }
    assert_eq!(origins.statuses(10).collect::<Vec<_>>(), before);
    assert_eq!(origins.notices().get(&Notice::WrongMac), Some(&1));
    assert_eq!(origins.notices().get(&Notice::Unreadable), Some(&2));
}

#[test]
fn another_major_version_quarantines_an_origin_that_does_not_count() {
    let mut origins = Origins::new(sender(100, 1), OriginSettings::default());
    let newer = |origin| Refusal { origin: Some(OriginId(origin)), fault: Fault::Major(MAJOR + 1) };
    join(&mut origins, 1, 10);
    let mut effects = Vec::new();
    origins.refuse(&newer(1), 500, &mut counting(), &mut effects);
    origins.refuse(&newer(2), 500, &mut counting(), &mut effects);
    let quarantined = OriginPhase::Quarantined(QuarantineReason::Version);
    // The first one counts: the message may be a recording, so it is asked.
    assert_eq!(phases(&origins), [(1, OriginPhase::Repairing), (2, quarantined)]);
    // It does not answer this version, and it is silent in it.
    origins.tick(10 + 3001, &mut counting(), &mut effects);
    origins.refuse(&newer(1), 4000, &mut counting(), &mut effects);
    assert_eq!(phases(&origins), [(1, quarantined), (2, quarantined)]);
    assert_eq!(origins.gauges_of(worker(1), 4000).count(), 0);
}

#[test]
fn another_router_with_this_routers_number_is_noticed() {
    let mut origins = Origins::new(sender(100, 1), OriginSettings::default());
    let own = |incarnation| {
        let content = Content::Heartbeat(Heartbeat::default());
        Message { sender: sender(100, incarnation), minor: 0, content }
    };
    let mut effects = Vec::new();
    origins.receive(&own(1), 5, &mut counting(), &mut effects);
    assert!(effects.is_empty(), "a carrier may bring back what was sent");
    origins.receive(&own(2), 5, &mut counting(), &mut effects);
    assert_eq!(effects, [Effect::Noticed { origin: OriginId(100), notice: Notice::OwnId }]);
    assert_eq!(origins.statuses(5).count(), 0);
}
