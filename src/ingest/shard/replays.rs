//! The replays of a shard: which publishers are asked for lost batches, and when a replay is over.
//!
//! [`crate::event::recovery`] decides when to ask and what an answer means; this file decides which worker comes first.
//! A replay holds one of a few places of its shard from the question to its end. An engine drops, in the middle and
//! without an error, what its ROUTER socket cannot hand over at once. So the shard receives everything that is there
//! between the quanta of two live streams, up to a bound for each replay, and applies only a slice of it.
//!
//! A replay is expected to bring as many bytes as the worker's last one brought, or as many as this one has brought
//! already. No replay begins while the expected bytes of those under way are at the budget. A replay that brings too much
//! is broken off and asked for again from where it stands.

use mio::Token;

use super::{Now, Shard};
use crate::event::recovery::Aim;
use crate::ingest::publisher_socket::ReplayClient;
use crate::ingest::stream::{HeldBytes, ReplayEnd};
use crate::limits::{
    REPLAY_BYTES_GUESSED, REPLAY_RECEIVE_EVERY_MS, REPLAY_SNAPSHOT_BYTES_MAX, REPLAY_WHOLE_MS_MAX, REPLAYS_AT_ONCE_MAX,
    REPLAYS_UNDER_WAY_BYTES_MAX,
};

/// One replay that was asked for.
pub(super) struct Replay {
    pub(super) client: ReplayClient,
    /// Payload bytes received.
    pub(super) bytes: usize,
    /// Payload bytes expected.
    pub(super) expected_bytes: usize,
    /// When it was asked for, milliseconds.
    pub(super) asked_ms: u64,
}

impl Replay {
    /// Whether it has gone on for longer than any honest one: it would keep its place for ever.
    pub(super) const fn is_endless(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.asked_ms) >= REPLAY_WHOLE_MS_MAX || self.bytes > REPLAY_SNAPSHOT_BYTES_MAX
    }

    /// What it counts for.
    pub(super) fn under_way_bytes(&self) -> usize {
        self.bytes.max(self.expected_bytes)
    }
}

/// Why a worker is served before another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Urgency {
    /// What is missing before what may be.
    pub(super) aim: Aim,
    /// Workers with requests in flight first.
    pub(super) is_idle: bool,
    /// Then those that are done soonest.
    pub(super) waiting: usize,
}

/// The places of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplaySlots {
    taken: usize,
    bytes: usize,
}

impl ReplaySlots {
    /// Takes a place for a replay of so many bytes.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.taken += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Whether there is a place for a replay reckoned at so many bytes. One alone always has a place.
    pub(super) const fn fits(&self, bytes: usize) -> bool {
        self.taken == 0
            || (self.taken < REPLAYS_AT_ONCE_MAX && self.bytes.saturating_add(bytes) <= REPLAYS_UNDER_WAY_BYTES_MAX)
    }
}

/// A worker that is to be asked for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WantedReplay {
    pub(super) urgency: Urgency,
    /// Whose, by the shard's count.
    pub(super) at: usize,
    /// Payload bytes expected.
    pub(super) expected_bytes: usize,
}

/// Who is asked now, while `places` are taken: the most urgent first, up to one that does not fit. That one is the next,
/// however many smaller ones would fit: else there might never be room for it.
pub(super) fn next_replays(mut places: ReplaySlots, mut wanting: Vec<WantedReplay>) -> Vec<WantedReplay> {
    wanting.sort_unstable();
    let mut takes = |wanting: &&WantedReplay| {
        let fits = places.fits(wanting.expected_bytes);
        places.take(wanting.expected_bytes);
        fits
    };
    let asked = wanting.iter().take_while(&mut takes).count();
    wanting.truncate(asked);
    wanting
}

/// What a replay is reckoned at, by what the worker's last one brought.
pub(super) fn expected_bytes(last: Option<usize>) -> usize {
    last.unwrap_or(REPLAY_BYTES_GUESSED)
}

/// What the replays of a shard share.
#[derive(Default)]
pub(super) struct Replays {
    pub(super) held_bytes: HeldBytes,
    /// How many are under way.
    pub(super) open: usize,
    /// When replays were last received between two turns, milliseconds.
    received_ms: u64,
    /// Whether somebody may have to be asked who was not when it was last looked.
    pub(super) look: bool,
}

impl Shard {
    /// Asks for as many replays as there are places for, the most urgent first.
    pub(super) fn ask_replays(&mut self, now: Now) {
        if !std::mem::take(&mut self.replays.look) {
            return;
        }
        let mut places = ReplaySlots::default();
        self.publishers.iter().filter_map(|publisher| publisher.replay.as_ref()).for_each(|replay| {
            places.take(replay.under_way_bytes());
        });
        let waiting = self.publishers.iter().enumerate().filter(|(_, publisher)| publisher.replay.is_none() && !publisher.broken);
        let wanting = waiting.filter_map(|(at, publisher)| {
            let expected_bytes = expected_bytes(publisher.replayed_bytes);
            Some(WantedReplay { urgency: publisher.urgency(now)?, at, expected_bytes })
        });
        for asked in next_replays(places, wanting.collect()) {
            self.ask_replay(asked.at, asked.expected_bytes, now);
        }
    }

    fn ask_replay(&mut self, at: usize, expected_bytes: usize, now: Now) {
        let publisher = &mut self.publishers[at];
        // Only a worker with a replay endpoint is asked.
        let Some(endpoint) = publisher.replay_endpoint.clone() else { return };
        let Some(from) = publisher.stream.ask_replay(now) else { return };
        self.current_worker = Some(publisher.index);
        match ReplayClient::ask(&endpoint, from, (&self.registry, Token(at)), now.uptime_ms) {
            Ok(client) => {
                tracing::debug!(worker = %publisher.stream.worker, %endpoint, %from, "replay asked for");
                publisher.replay = Some(Replay { client, bytes: 0, expected_bytes, asked_ms: now.uptime_ms });
                self.replays.open += 1;
                self.enqueue(at);
            }
            Err(error) => {
                tracing::warn!(
                    worker = %publisher.stream.worker, %endpoint, %error,
                    remedy = "correct the replay endpoint, or raise the limit of open files",
                    "a replay cannot be asked for"
                );
                let space = &mut self.spaces[publisher.space];
                publisher.stream.replay_ended(space, ReplayEnd::Missing, now);
                publisher.stream.show(space);
                self.enqueue(at);
            }
        }
    }

    /// Receives what replays have, between the turns of publishers: an engine drops what its socket cannot take.
    pub(super) fn receive_replays(&mut self) {
        if self.replays.open == 0 {
            return;
        }
        let now_ms = self.clock.now().uptime_ms;
        if now_ms < self.replays.received_ms + REPLAY_RECEIVE_EVERY_MS {
            return;
        }
        self.replays.received_ms = now_ms;
        let replays = self.publishers.iter_mut().filter_map(|publisher| publisher.replay.as_mut());
        replays.for_each(|replay| replay.client.receive_ahead(now_ms));
    }

    /// Ends a replay that is overdue, or that would never end.
    pub(super) fn end_overdue_replay(&mut self, at: usize, now: Now) {
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        if publisher.replay.as_mut().is_some_and(|replay| replay.client.tick(now.uptime_ms)) {
            self.enqueue(at);
        }
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        let is_over = |replay: &Replay| replay.is_endless(now.uptime_ms) || publisher.stream.replay_is_overdue(now);
        if publisher.replay.as_ref().is_some_and(is_over) {
            let space = &mut self.spaces[publisher.space];
            publisher.stream.replay_ended(space, ReplayEnd::Missing, now);
            publisher.stream.show(space);
            self.close_replay(at);
            // What waited may be applied now.
            self.enqueue(at);
        }
    }

    /// Closes the socket of a replay of which nothing more is waited for.
    pub(super) fn close_replay(&mut self, at: usize) {
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        if publisher.stream.awaits_replay() {
            return;
        }
        let Some(replay) = publisher.replay.take() else { return };
        self.replays.open -= 1;
        // A probe brings next to nothing, and what follows it may bring everything.
        let before = publisher.replayed_bytes.unwrap_or_default();
        publisher.replayed_bytes = Some(replay.bytes.max(before / 2));
        self.replays.look = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::REPLAY_BYTES_MAX;

    #[test]
    fn places_are_few_and_their_bytes_bounded() {
        let mut places = ReplaySlots::default();
        assert!(places.fits(usize::MAX), "one alone");
        for _ in 0..REPLAYS_AT_ONCE_MAX {
            assert!(places.fits(1));
            places.take(1);
        }
        assert!(!places.fits(0));
        let mut large = ReplaySlots::default();
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
        let of = |at, expected_bytes| WantedReplay { urgency: urgency(at), at, expected_bytes };
        let mut places = ReplaySlots::default();
        places.take(REPLAY_BYTES_GUESSED);
        let wanting = vec![of(2, 1), of(1, REPLAYS_UNDER_WAY_BYTES_MAX), of(0, 1)];
        assert_eq!(next_replays(places, wanting.clone()), [of(0, 1)]);
        assert_eq!(next_replays(ReplaySlots::default(), wanting[..2].to_vec()), [wanting[1]], "alone it has a place");
    }

    /// A worker that wants a replay: how urgent that is, what its last one brought, and what this one will bring.
    fn worker() -> impl Strategy<Value = (Urgency, Option<usize>, usize)> {
        let aim = prop_oneof![4 => Just(Aim::Prove), 1 => Just(Aim::Probe)];
        let urgency =
            (aim, any::<bool>(), 0_usize..4).prop_map(|(aim, is_idle, waiting)| Urgency { aim, is_idle, waiting });
        (urgency, prop::option::of(0..=REPLAY_BYTES_MAX), 0..=REPLAY_BYTES_MAX)
    }

    /// What a shard's replays under way take.
    fn places_of(under_way: &[(usize, usize, usize)]) -> ReplaySlots {
        let mut places = ReplaySlots::default();
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
                WantedReplay { urgency, at, expected_bytes: expected_bytes(last) }
            };
            let mut wanting: Vec<WantedReplay> = (0..workers.len()).map(of).collect();
            let mut under_way: Vec<(usize, usize, usize)> = Vec::new();
            let mut ends = ends.into_iter();
            let mut asked_in_all = 0;
            while !wanting.is_empty() {
                let before = places_of(&under_way);
                let asked = next_replays(before, wanting.clone());
                wanting.retain(|waits| asked.iter().all(|asked| asked.at != waits.at));
                under_way.extend(asked.iter().map(|asked| (asked.at, asked.expected_bytes, 0)));
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
}
