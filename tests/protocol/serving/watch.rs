//! Watches of the fleet: in one reply, or a page at a time.

use std::collections::BTreeSet;

use kvrouted::client::Reply;
use kvrouted::fleet::{Fleet, WorkerState};
use kvrouted::ids::{CorrelationId, SpaceId, WorkerIndex};
use kvrouted::limits::CONNECTIONS_MAX;
use kvrouted::metrics::CoreCounter;
use kvrouted::wire::WatchReply;

use super::daemon::{Daemon, on_every_engine};
use super::service::WORKERS;
use crate::kit::raw::{Raw, encoded, route_frame};
use crate::kit::until;

const WATCH: u64 = 5;
const ROUTE: u64 = 6;

fn watch_frame(id: u64, space: Option<SpaceId>, page_limit: u32) -> Vec<u8> {
    encoded(|encoder, out| encoder.watch(CorrelationId(id), space, (0, page_limit), out))
}

fn page(raw: &mut Raw, id: u64) -> WatchReply {
    match raw.reply() {
        (got, Reply::Watch(page)) if got == id => page,
        other => panic!("no page on {id}: {other:?}"),
    }
}

fn ids(pages: &[WatchReply]) -> BTreeSet<u64> {
    pages.iter().flat_map(|page| &page.workers).map(|worker| worker.worker.id.0).collect()
}

/// Names whose length lets a socket hold only a small part of the fleet.
fn lengthen_names(fleet: &Fleet) {
    fleet.update(|table| {
        table.workers.iter_mut().for_each(|record| record.name = "n".repeat(4 << 10));
        true
    });
}

fn leave(fleet: &Fleet, place: u32) {
    assert!(fleet.update(|table| table.take(WorkerIndex(place)).is_some()), "{place} was there");
}

/// The pages of one telling.
fn telling(raw: &mut Raw, mut after_page: impl FnMut(usize)) -> Vec<WatchReply> {
    let mut pages: Vec<WatchReply> = Vec::new();
    while pages.last().is_none_or(|page| page.next_cursor != 0) {
        pages.push(page(raw, WATCH));
        after_page(pages.len());
    }
    assert!(pages.iter().all(|page| page.fleet_version == pages[0].fleet_version));
    pages
}

#[test]
fn who_knows_of_no_pages_is_told_the_fleet_in_one_reply() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        raw.send(&watch_frame(WATCH, None, 0));
        let whole = page(&mut raw, WATCH);
        assert_eq!((whole.workers.len(), whole.next_cursor), (WORKERS as usize, 0));
        raw.assert_decided(4);
        assert_eq!(daemon.counters.get(CoreCounter::WatchPages), 0);
        let fleet = daemon.client().watch(None).expect("a watch").next().expect("a fleet").expect("a fleet");
        assert_eq!(fleet, whole, "the client puts its pages together");
        assert!(daemon.counters.get(CoreCounter::WatchPages) > 0);
    });
}

#[test]
fn a_fleet_is_told_in_pages_and_who_asks_meanwhile_is_answered_between_them() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut raw = daemon.greeted();
        raw.send(&[watch_frame(WATCH, Some(SpaceId(1)), 50), route_frame(ROUTE, 4)].concat());
        let (mut pages, mut asked_after) = (Vec::new(), None);
        while pages.last().is_none_or(|page: &WatchReply| page.next_cursor != 0) {
            match raw.reply() {
                (WATCH, Reply::Watch(page)) => pages.push(page),
                (ROUTE, Reply::Route(_)) => asked_after = Some(pages.len()),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(asked_after, Some(1), "the first page fills a turn, and no more of them");
        assert_eq!(pages.len(), 300 / 50);
        assert!(pages.iter().all(|page| page.workers.len() == 50 && page.fleet_version == pages[0].fleet_version));
        assert_eq!(ids(&pages), (0..u64::from(WORKERS)).filter(|id| id % 2 == 1).collect());
        assert_eq!(daemon.counters.get(CoreCounter::WatchPages), pages.len() as u64 - 1);
    });
}

#[test]
fn watches_one_after_the_other_cost_a_page_each_and_the_last_one_is_told_all() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let (mut raw, mut other) = (daemon.greeted(), daemon.greeted());
        let count = 200;
        // A page is at most as large as the daemon wants it.
        raw.send(&(0..count).flat_map(|id| watch_frame(id, None, u32::MAX)).collect::<Vec<_>>());
        other.assert_decided(4);
        let mut pages: Vec<(u64, WatchReply)> = Vec::new();
        while pages.last().is_none_or(|(id, page)| *id != count - 1 || page.next_cursor != 0) {
            match raw.reply() {
                (id, Reply::Watch(page)) => pages.push((id, page)),
                other => panic!("{other:?}"),
            }
        }
        for id in 0..count {
            assert!(pages.iter().any(|(of, _)| *of == id), "each has its first page: {id}");
        }
        let last: Vec<WatchReply> =
            pages.into_iter().filter(|(id, _)| *id == count - 1).map(|(_, page)| page).collect();
        assert_eq!(ids(&last), (0..u64::from(WORKERS)).collect());
        assert!(last.len() > 1);
    });
}

#[test]
fn a_watcher_that_does_not_read_keeps_nobody_who_leaves() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        lengthen_names(&daemon.fleet);
        let mut raw = daemon.greeted();
        raw.send(&watch_frame(WATCH, None, 1));
        until("it is sent pages", || daemon.counters.get(CoreCounter::WatchPages) > 0);
        let last = WORKERS - 1;
        leave(&daemon.fleet, last);
        until("no table is held that has who left", || daemon.fleet.oldest_in_use() == daemon.fleet.load().version);
        assert!(daemon.counters.get(CoreCounter::WatchPages) < u64::from(last), "it is not sent what it does not read");
        let everybody_left: BTreeSet<_> = (0..u64::from(last)).collect();
        assert_eq!(ids(&telling(&mut raw, |_| {})), everybody_left, "whose page was not made is in none");
        let newest = telling(&mut raw, |_| {});
        assert_eq!((ids(&newest), newest[0].fleet_version), (everybody_left, daemon.fleet.load().version));
    });
}

#[test]
fn a_fleet_that_changes_with_every_page_is_told_to_its_end_and_then_as_it_is() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        lengthen_names(&daemon.fleet);
        let begun = daemon.fleet.load().version;
        let mut raw = daemon.greeted();
        raw.send(&watch_frame(WATCH, None, 10));
        // With each page one of the listed workers leaves: those behind it get other positions, and none is skipped.
        let pages = telling(&mut raw, |page| {
            leave(&daemon.fleet, page as u32 - 1);
            assert!(daemon.fleet.set_state(WorkerIndex(300 + page as u32), WorkerState::Draining));
        });
        let told = pages.len() as u64;
        assert_eq!((told, pages[0].fleet_version), (u64::from(WORKERS) / 10, begun));
        let in_order = pages.iter().flat_map(|page| &page.workers).map(|worker| worker.worker.id.0);
        assert_eq!(in_order.collect::<Vec<_>>(), (0..u64::from(WORKERS)).collect::<Vec<_>>());
        let newest_version = daemon.fleet.load().version;
        let newest = std::iter::repeat_with(|| telling(&mut raw, |_| {}))
            .find(|pages| pages[0].fleet_version == newest_version)
            .expect("the newest is sent");
        assert_eq!(ids(&newest), (told..u64::from(WORKERS)).collect());
        let workers = newest.iter().flat_map(|page| &page.workers);
        let draining = workers.filter(|worker| worker.state == WorkerState::Draining).count() as u64;
        assert_eq!(draining, told);
    });
}
