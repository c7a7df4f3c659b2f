//! Messages of another router, signed with the right secret: whatever they say, what the effects add up to is what the
//! origin holds, and what is read can be written again.

use std::collections::BTreeMap;

use kvrouted::ids::Worker;
use kvrouted::limits::{LOAD_MESSAGE_BINDINGS_MAX, LOAD_MESSAGE_GAUGES_MAX};
use kvrouted::routers::protocol::{Content, MAJOR, MINOR, Message, decode, encode, seal};
use kvrouted::routers::{
    Digest, Effect, Fingerprint, Gauge, Incarnation, Keys, Nonce, OriginId, OriginSettings, Origins, Sender,
};

/// The fleet of both routers.
pub(crate) const FLEET: Fingerprint = Fingerprint(7);
const SECRET: &[u8] = b"a secret of at least thirty-two bytes";
/// The time that an empty message stands for, milliseconds.
const PAUSE_MS: u64 = 700;

/// The keys of both routers.
pub(crate) fn keys() -> Keys {
    Keys::new(SECRET, None).expect("a long secret")
}

/// What the target reads: each body behind its length.
pub(crate) fn stream(bodies: &[Vec<u8>]) -> Vec<u8> {
    let framed = |body: &Vec<u8>| [&(body.len() as u16).to_le_bytes()[..], body].concat();
    bodies.iter().flat_map(framed).collect()
}

/// Bodies, each behind its length. An empty one lets time pass. Nonces are 1, 2, 3, …
pub(crate) fn load_events(mut data: &[u8]) {
    let keys = keys();
    let own = Sender { origin: OriginId(100), incarnation: Incarnation(1), fingerprint: FLEET };
    let mut origins = Origins::new(own, OriginSettings::default());
    let (mut now_ms, mut nonce, mut held) = (1_000, 0, BTreeMap::new());
    assert!(decode(data, &keys).is_err(), "the bytes are not signed");
    while let Some((bytes, rest)) = data.split_first_chunk() {
        let (body, rest) = rest.split_at(rest.len().min(u16::from_le_bytes(*bytes).into()));
        data = rest;
        let mut nonces = || {
            nonce += 1;
            Nonce(nonce)
        };
        let mut effects = Vec::new();
        match decode(&seal((MAJOR, MINOR), OriginId(1), body, &keys), &keys) {
            _ if body.is_empty() => {
                now_ms += PAUSE_MS;
                origins.tick(now_ms, &mut nonces, &mut effects);
            }
            Ok(message) => {
                check_message(&message, &keys);
                origins.receive(&message, now_ms, &mut nonces, &mut effects);
            }
            Err(refusal) => origins.refuse(&refusal, now_ms, &mut nonces, &mut effects),
        }
        effects.iter().for_each(|effect| apply(&mut held, effect));
        check_gauges(&origins, &held);
    }
}

fn check_message(message: &Message, keys: &Keys) {
    let again = decode(&encode(&message.sender, &message.content, keys), keys).expect("what is written can be read");
    assert_eq!(again, *message);
    if let Content::Batch(batch) = &message.content {
        assert!(batch.gauges.len() <= LOAD_MESSAGE_GAUGES_MAX && batch.bindings.len() <= LOAD_MESSAGE_BINDINGS_MAX);
    }
}

fn apply(held: &mut BTreeMap<Worker, Gauge>, effect: &Effect) {
    match effect {
        Effect::SetGauge { place: 0, worker, gauge, .. } if gauge.is_zero() => drop(held.remove(worker)),
        Effect::SetGauge { place: 0, worker, gauge, .. } => drop(held.insert(*worker, *gauge)),
        Effect::SetGauge { place, .. } => panic!("one origin is at place {place}"),
        Effect::DropGauges { .. } => held.clear(),
        Effect::Bind(_) | Effect::Ask(_) | Effect::Noticed { .. } => {}
    }
}

fn check_gauges(origins: &Origins, held: &BTreeMap<Worker, Gauge>) {
    let mut digest = Digest::default();
    held.iter().for_each(|(worker, gauge)| digest.add(*worker, gauge));
    let stated = origins.statuses(0).next().map_or_else(Digest::default, |status| status.digest);
    assert_eq!(stated, digest);
}
