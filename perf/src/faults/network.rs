//! The network between the places: it loses, delays and cuts. One thread for each place reads its packets, one delivers.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use tun_rs::SyncDevice;

use super::namespace::place_of;

/// The largest packet.
const PACKET_BYTES_MAX: usize = 65_536;
/// Where an IPv4 packet has its destination.
const DESTINATION: std::ops::Range<usize> = 16..20;

/// What the network does to packets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Weather {
    /// The share of packets that is lost.
    pub(super) loss: f64,
    /// How long each takes.
    pub(super) delay: Duration,
    /// How much longer chance may make it. Packets of one pair of places stay in order.
    pub(super) spread: Duration,
    /// Pairs of places between which nothing passes, the lower one first.
    pub(super) cut: BTreeSet<(u8, u8)>,
}

impl Weather {
    /// When a packet arrives that leaves now; `None` = it is lost.
    fn arrival(&self, (from, to): (u8, u8), now: Instant, random: &mut impl Rng) -> Option<Instant> {
        if self.cut.contains(&(from.min(to), from.max(to))) || random.random_bool(self.loss) {
            return None;
        }
        Some(now + self.delay + self.spread.mul_f64(random.random_range(0.0..1.0)))
    }
}

/// Packets so far.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Packets {
    /// Delivered.
    pub(super) delivered: u64,
    /// Lost by chance or by a cut.
    pub(super) lost: u64,
}

/// A packet on its way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    arrives: Instant,
    /// Packets that arrive at the same moment keep their order.
    number: u64,
    to: u8,
    bytes: Vec<u8>,
}

/// The network. Its threads end with the process: a device cannot be told to stop reading.
pub(super) struct Network {
    weather: Arc<RwLock<Weather>>,
    delivered: Arc<AtomicU64>,
    lost: Arc<AtomicU64>,
}

impl Network {
    /// Carries packets between these devices, of place 0, 1 and so on.
    pub(super) fn start(devices: Vec<SyncDevice>, weather: Weather, seed: u64) -> Self {
        let devices: Arc<[SyncDevice]> = devices.into();
        let (sender, receiver) = mpsc::channel();
        let network = Self { weather: Arc::new(RwLock::new(weather)), delivered: Arc::default(), lost: Arc::default() };
        for place in 0..devices.len() as u8 {
            let reader = Reader {
                place,
                devices: Arc::clone(&devices),
                weather: Arc::clone(&network.weather),
                lost: Arc::clone(&network.lost),
                random: Xoshiro256PlusPlus::seed_from_u64(seed ^ u64::from(place)),
                last_arrivals: vec![None; devices.len()],
                sender: sender.clone(),
            };
            thread::spawn(move || reader.read());
        }
        let delivered = Arc::clone(&network.delivered);
        thread::spawn(move || deliver(&devices, &receiver, &delivered));
        network
    }

    /// Changes what the network does.
    pub(super) fn set(&self, weather: Weather) {
        *self.weather.write().unwrap_or_else(PoisonError::into_inner) = weather;
    }

    /// Packets so far.
    pub(super) fn packets(&self) -> Packets {
        // Relaxed: pairs with the additions; figures only.
        Packets { delivered: self.delivered.load(Ordering::Relaxed), lost: self.lost.load(Ordering::Relaxed) }
    }
}

/// What reads the packets of one place.
struct Reader {
    place: u8,
    devices: Arc<[SyncDevice]>,
    weather: Arc<RwLock<Weather>>,
    lost: Arc<AtomicU64>,
    random: Xoshiro256PlusPlus,
    /// When the last packet to each place arrives.
    last_arrivals: Vec<Option<Instant>>,
    sender: Sender<Packet>,
}

impl Reader {
    fn read(mut self) {
        let (mut bytes, mut number) = (vec![0; PACKET_BYTES_MAX], 0);
        let devices = Arc::clone(&self.devices);
        // A device that fails has been removed with its namespace.
        while let Ok(read) = devices[usize::from(self.place)].recv(&mut bytes) {
            // Other packets than IPv4 are those by which interfaces look for routers.
            let Some(to) = destination(&bytes[..read]).filter(|to| usize::from(*to) < devices.len()) else { continue };
            let now = Instant::now();
            let weather = self.weather.read().unwrap_or_else(PoisonError::into_inner);
            let arrival = weather.arrival((self.place, to), now, &mut self.random);
            drop(weather);
            let Some(arrives) = arrival else {
                // Relaxed: pairs with `packets`; a figure only.
                self.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let last = &mut self.last_arrivals[usize::from(to)];
            let arrives = last.map_or(arrives, |last| last.max(arrives));
            *last = Some(arrives);
            number += 1;
            if self.sender.send(Packet { arrives, number, to, bytes: bytes[..read].to_vec() }).is_err() {
                return;
            }
        }
    }
}

fn destination(packet: &[u8]) -> Option<u8> {
    let is_ipv4 = packet.first().is_some_and(|first| first >> 4 == 4);
    let address = packet.get(DESTINATION).filter(|_| is_ipv4)?;
    place_of(address.try_into().ok()?)
}

fn deliver(devices: &[SyncDevice], receiver: &Receiver<Packet>, delivered: &AtomicU64) {
    let mut on_their_way = BinaryHeap::new();
    loop {
        let next: Option<&Reverse<Packet>> = on_their_way.peek();
        let wait = next.map_or(Duration::MAX, |next| next.0.arrives.saturating_duration_since(Instant::now()));
        match receiver.recv_timeout(wait) {
            Ok(packet) => on_their_way.push(Reverse(packet)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        while let Some(Reverse(packet)) = on_their_way.pop() {
            if packet.arrives > now {
                on_their_way.push(Reverse(packet));
                break;
            }
            // A full interface drops packets, as a full switch does.
            if devices[usize::from(packet.to)].send(&packet.bytes).is_ok() {
                // Relaxed: pairs with `packets`; a figure only.
                delivered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weather() -> Weather {
        Weather {
            loss: 0.0,
            delay: Duration::from_millis(5),
            spread: Duration::from_millis(1),
            cut: BTreeSet::from([(1, 4)]),
        }
    }

    #[test]
    fn a_cut_stops_packets_in_both_directions_and_no_others() {
        let (mut random, now) = (Xoshiro256PlusPlus::seed_from_u64(1), Instant::now());
        for pair in [(1, 4), (4, 1)] {
            assert_eq!(weather().arrival(pair, now, &mut random), None);
        }
        let arrives = weather().arrival((0, 4), now, &mut random).expect("it passes");
        assert!((Duration::from_millis(5)..=Duration::from_millis(6)).contains(&(arrives - now)));
    }

    #[test]
    fn about_the_wanted_share_is_lost() {
        let (mut random, now) = (Xoshiro256PlusPlus::seed_from_u64(1), Instant::now());
        let weather = Weather { loss: 0.1, ..weather() };
        let lost = (0..10_000).filter(|_| weather.arrival((0, 2), now, &mut random).is_none()).count();
        assert!((900..1100).contains(&lost), "{lost} of 10000");
    }

    #[test]
    fn only_whole_ipv4_headers_have_a_destination() {
        let mut packet = [0; 20];
        packet[0] = 0x45;
        packet[DESTINATION].copy_from_slice(&[10, 213, 0, 3]);
        assert_eq!(destination(&packet), Some(2));
        assert_eq!(destination(&packet[..19]), None);
        packet[0] = 0x60;
        assert_eq!(destination(&packet), None);
        assert_eq!(destination(&[]), None);
    }
}
