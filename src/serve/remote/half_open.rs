//! Half-open connections: accepted, and not yet admitted. They are bounded; a further one displaces another.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::strangers::network_of;
use crate::limits::REMOTE_HALF_OPEN_MAX;

/// The half-open connections of a port.
#[derive(Debug, Default)]
pub(super) struct HalfOpen(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// The oldest first.
    entries: Vec<Entry>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    /// As [`network_of`] has it.
    network: IpAddr,
    displaced: Arc<Notify>,
}

impl Table {
    /// The entry that gives way: the oldest one of the address that has the most.
    fn victim(&self) -> Option<usize> {
        let mut counts: FxHashMap<IpAddr, usize> = FxHashMap::default();
        for entry in &self.entries {
            *counts.entry(entry.network).or_default() += 1;
        }
        let most = counts.values().max()?;
        self.entries.iter().position(|entry| counts.get(&entry.network) == Some(most))
    }
}

/// The place of one half-open connection, given back on drop.
#[derive(Debug)]
pub(super) struct Place {
    table: Arc<HalfOpen>,
    number: u64,
    displaced: Arc<Notify>,
}

impl HalfOpen {
    /// Takes a place for a connection from this address. If none is free, another connection loses its own.
    pub(super) fn enter(table: &Arc<Self>, address: IpAddr) -> Place {
        let displaced = Arc::<Notify>::default();
        let mut entries = table.0.lock();
        if entries.entries.len() >= REMOTE_HALF_OPEN_MAX
            && let Some(victim) = entries.victim()
        {
            entries.entries.remove(victim).displaced.notify_one();
        }
        let number = entries.next;
        entries.next += 1;
        entries.entries.push(Entry { number, network: network_of(address), displaced: Arc::clone(&displaced) });
        Place { table: Arc::clone(table), number, displaced }
    }
}

impl Place {
    /// Returns once another connection has taken the place.
    pub(super) async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.table.0.lock().entries.retain(|entry| entry.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_displaced(place: &Place) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(std::time::Duration::ZERO, place.displaced()).await.is_ok() })
    }

    #[test]
    fn a_flood_displaces_its_own() {
        let table = Arc::<HalfOpen>::default();
        let [honest, flooding]: [IpAddr; 2] = ["192.0.2.1", "192.0.2.2"].map(|text| text.parse().unwrap());
        let first = HalfOpen::enter(&table, honest);
        let mut flood: Vec<Place> = (1..REMOTE_HALF_OPEN_MAX).map(|_| HalfOpen::enter(&table, flooding)).collect();
        flood.extend((0..10).map(|_| HalfOpen::enter(&table, flooding)));
        let displaced: Vec<bool> = flood.iter().map(is_displaced).collect();
        assert_eq!(displaced.iter().filter(|displaced| **displaced).count(), 10);
        assert!(displaced[..10].iter().all(|displaced| *displaced) && !is_displaced(&first), "the oldest of the flood");
        let second = HalfOpen::enter(&table, honest);
        assert!(is_displaced(&flood[10]) && !is_displaced(&second));
        assert_eq!(table.0.lock().entries.len(), REMOTE_HALF_OPEN_MAX);
        drop((first, second, flood));
        assert!(table.0.lock().entries.is_empty());
    }
}
