//! The rules about other routers.

use super::findings::{Cause, FoundSymptom};
use crate::finding::Symptom;
use crate::limits::ROUTER_MISSING_MS_MIN;
use crate::routers::{Joining, LinkShown, Notice, OriginId, OriginPhase, OriginStatus, RoutersShown};

/// All symptoms of the exchange with other routers.
pub(super) fn symptoms(shown: &RoutersShown) -> Vec<FoundSymptom> {
    let Some(own) = &shown.own else { return Vec::new() };
    let of = |link: &LinkShown| shown.origins.iter().find(|of| Some(of.origin) == link.link.origin);
    let others = shown.links.iter().filter(|link| link.link.origin != Some(own.sender.origin));
    let mut symptoms: Vec<_> = others.filter_map(|link| of_link(link, of(link))).collect();
    symptoms.extend(shown.origins.iter().filter_map(quarantined));
    symptoms.extend(shown.unlisted.iter().map(unlisted));
    symptoms.extend(shown.recent.iter().filter_map(|(origin, notice)| recent(&origin.to_string(), *notice)));
    if let Joining::Waiting { missing } = shown.joining {
        let detail = format!("the load of {missing} peers is not known yet");
        symptoms.push(about(Symptom::RoutersJoining, detail));
    }
    symptoms
}

fn about(symptom: Symptom, detail: impl Into<String>) -> FoundSymptom {
    FoundSymptom::new(Cause::Symptom(symptom), None).saying(detail)
}

/// A peer that is not heard, or whose messages are refused.
fn of_link(link: &LinkShown, origin: Option<&OriginStatus>) -> Option<FoundSymptom> {
    let address = &link.link.address;
    if let Some(fault) = link.refused {
        let refused = about(Symptom::RouterRefused, format!("{address}: {fault}"));
        return Some(FoundSymptom { remedy: Some(fault.remedy().to_owned()), ..refused });
    }
    let phase = origin.map_or(OriginPhase::Unknown, |of| of.phase);
    let is_missing = matches!(phase, OriginPhase::Unknown | OriginPhase::Asking | OriginPhase::Silent);
    let state = if link.link.is_up { phase.name() } else { "unreached" };
    let missing = || about(Symptom::RouterMissing, format!("{address} is {state}"));
    is_missing.then(|| FoundSymptom { lasting_ms_min: ROUTER_MISSING_MS_MIN, ..missing() })
}

fn unlisted(origin: &OriginId) -> FoundSymptom {
    let detail = format!("router {origin} listens to this one, which does not listen to it");
    FoundSymptom { lasting_ms_min: ROUTER_MISSING_MS_MIN, ..about(Symptom::RouterUnlisted, detail) }
}

fn quarantined(of: &OriginStatus) -> Option<FoundSymptom> {
    let OriginPhase::Quarantined(reason) = of.phase else { return None };
    let refused = about(Symptom::RouterRefused, format!("router {}: {}", of.origin, reason.meaning()));
    Some(FoundSymptom { remedy: Some(reason.remedy().to_owned()), ..refused })
}

/// What was noticed not long ago.
fn recent(origin: &str, notice: Notice) -> Option<FoundSymptom> {
    match notice {
        Notice::OwnId => Some(about(Symptom::RouterNameShared, "")),
        Notice::NoPlace => Some(about(Symptom::RoutersTooMany, "")),
        Notice::DigestDiffers | Notice::WentBack | Notice::SnapshotTorn => {
            Some(about(Symptom::RouterDiffers, format!("router {origin}")))
        }
        Notice::WrongMac => Some(about(Symptom::RouterSecret, "")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::routers::protocol::Fault;
    use crate::routers::{Digest, Link, OriginLoad, OwnShown, QuarantineReason, Sender};

    fn own() -> OwnShown {
        let sender = Sender { origin: OriginId(1), ..Sender::default() };
        let (address, load) = ("tcp://0.0.0.0:1".into(), OriginLoad::default());
        OwnShown { sender, address, sequence: 0, digest: Digest::default(), load }
    }

    fn link(is_up: bool, origin: Option<u64>, refused: Option<Fault>) -> LinkShown {
        let (address, origin) = ("tcp://b:1".into(), origin.map(OriginId));
        LinkShown { link: Link { address, is_up, origin, is_broker: false }, refused }
    }

    fn origin(phase: OriginPhase) -> OriginStatus {
        OriginStatus {
            origin: OriginId(2),
            place: 0,
            phase,
            incarnation: None,
            sequence: 0,
            digest: Digest::default(),
            age_ms: 0,
            load: OriginLoad::default(),
            notices: BTreeMap::new(),
        }
    }

    fn found(links: Vec<LinkShown>, origins: Vec<OriginStatus>) -> Vec<(Cause, String)> {
        let shown = RoutersShown { own: Some(own()), links, origins, ..RoutersShown::default() };
        symptoms(&shown).into_iter().map(|found| (found.cause, found.detail)).collect()
    }

    #[test]
    fn every_state_of_a_peer_that_does_not_count_is_named() {
        let live = origin(OriginPhase::Live);
        assert_eq!(found(vec![link(true, Some(2), None), link(true, Some(1), None)], vec![live.clone()]), []);
        let cases = [
            (link(false, None, None), None, Symptom::RouterMissing, "tcp://b:1 is unreached"),
            (link(true, None, None), None, Symptom::RouterMissing, "tcp://b:1 is unknown"),
            (link(true, Some(2), None), Some(OriginPhase::Asking), Symptom::RouterMissing, "tcp://b:1 is asking"),
            (link(true, Some(2), None), Some(OriginPhase::Silent), Symptom::RouterMissing, "tcp://b:1 is silent"),
        ];
        for (link, phase, symptom, detail) in cases {
            let expected = (Cause::Symptom(symptom), detail.to_owned());
            assert_eq!(found(vec![link], phase.map(origin).into_iter().collect()), [expected]);
        }
        let refused = found(vec![link(true, None, Some(Fault::WrongMac))], Vec::new());
        assert!(
            matches!(&refused[..], [(Cause::Symptom(Symptom::RouterRefused), detail)] if detail.contains("secret"))
        );
        let quarantined = origin(OriginPhase::Quarantined(QuarantineReason::Fingerprint));
        let refused = found(vec![link(true, Some(2), None)], vec![quarantined]);
        assert!(matches!(&refused[..], [(Cause::Symptom(Symptom::RouterRefused), detail)] if detail.contains("fleet")));
    }
}
