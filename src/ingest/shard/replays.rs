//! The replays of a shard: which publishers are asked for lost batches, and when a replay is over.
//!
//! [`crate::event::recovery`] decides when to ask and what an answer means; this file decides which worker comes first.
//! A replay holds one of a few slots of its shard from the question to its end. An engine drops, in the middle and
//! without an error, what its ROUTER socket cannot hand over at once. So the shard receives everything that is there
//! between the quanta of two live streams, up to a bound for each replay, and applies only a slice of it.
//!
//! A replay is expected to bring as many bytes as the worker's last one brought, or as many as this one has brought
//! already. No replay begins while the expected bytes of those under way are at the budget. A replay that brings too
//! much is broken off and asked for again from where it stands.

use mio::Token;

use super::{Now, Shard};
use crate::event::recovery::Aim;
use crate::ingest::publisher_socket::ReplayClient;
use crate::ingest::stream::{HeldBytes, ReplayEnd};
use crate::limits::{
    REPLAY_BYTES_GUESSED, REPLAY_RECEIVE_EVERY_MS, REPLAY_SNAPSHOT_BYTES_MAX, REPLAY_WHOLE_MS_MAX, REPLAYS_AT_ONCE_MAX,
    REPLAYS_UNDER_WAY_BYTES_MAX,
};

/// One replay that is under way.
pub(super) struct Replay {
    pub(super) client: ReplayClient,
    /// Payload bytes received.
    pub(super) bytes: usize,
    /// Payload bytes expected.
    pub(super) expected_bytes: usize,
    /// When the shard asked for it, milliseconds.
    pub(super) asked_ms: u64,
}

impl Replay {
    /// Whether it is longer or larger than any honest replay: it would hold its slot for ever.
    pub(super) const fn is_endless(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.asked_ms) >= REPLAY_WHOLE_MS_MAX || self.bytes > REPLAY_SNAPSHOT_BYTES_MAX
    }

    /// Payload bytes that it counts for against the budget.
    pub(super) fn under_way_bytes(&self) -> usize {
        self.bytes.max(self.expected_bytes)
    }
}

/// The order in which workers get their replays. Fields are compared from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Urgency {
    /// Batches that are missing come before batches that may be missing.
    pub(super) aim: Aim,
    /// Workers with requests in flight come first.
    pub(super) is_idle: bool,
    /// Then workers with the fewest messages that wait: their recovery ends soonest.
    pub(super) waiting: usize,
}

/// The replay slots of a shard that are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplaySlots {
    taken: usize,
    bytes: usize,
}

impl ReplaySlots {
    /// Takes a slot for a replay of `bytes`.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.taken += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Whether there is a slot for a replay that is expected to bring `bytes`. A replay alone always has a slot.
    pub(super) const fn fits(&self, bytes: usize) -> bool {
        self.taken == 0
            || (self.taken < REPLAYS_AT_ONCE_MAX && self.bytes.saturating_add(bytes) <= REPLAYS_UNDER_WAY_BYTES_MAX)
    }
}

/// A worker that is to be asked for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WantedReplay {
    pub(super) urgency: Urgency,
    /// The number of its publisher in the shard.
    pub(super) at: usize,
    /// Payload bytes expected.
    pub(super) expected_bytes: usize,
}

/// The replays to ask for now, while `slots` are taken: the most urgent first, up to one that does not fit. That one
/// stays next even if smaller ones would fit. Otherwise there might never be room for it.
pub(super) fn next_replays(mut slots: ReplaySlots, mut wanted: Vec<WantedReplay>) -> Vec<WantedReplay> {
    wanted.sort_unstable();
    let mut takes = |wanted: &&WantedReplay| {
        let fits = slots.fits(wanted.expected_bytes);
        slots.take(wanted.expected_bytes);
        fits
    };
    let asked = wanted.iter().take_while(&mut takes).count();
    wanted.truncate(asked);
    wanted
}

/// Payload bytes that a replay is expected to bring. `last` = what the worker's last one brought.
pub(super) fn expected_bytes(last: Option<usize>) -> usize {
    last.unwrap_or(REPLAY_BYTES_GUESSED)
}

/// The state that the replays of a shard share.
#[derive(Default)]
pub(super) struct Replays {
    pub(super) held_bytes: HeldBytes,
    /// How many are under way.
    pub(super) open: usize,
    /// When the shard last received replays between two quanta, milliseconds.
    received_ms: u64,
    /// Whether a worker may want a replay that did not want one at the last check.
    pub(super) check: bool,
}

impl Shard {
    /// Asks for as many replays as there are slots for, the most urgent first.
    pub(super) fn ask_replays(&mut self, now: Now) {
        if !std::mem::take(&mut self.replays.check) {
            return;
        }
        let mut slots = ReplaySlots::default();
        self.publishers.iter().filter_map(|publisher| publisher.replay.as_ref()).for_each(|replay| {
            slots.take(replay.under_way_bytes());
        });
        let numbered = self.publishers.iter().enumerate();
        let free = numbered.filter(|(_, publisher)| publisher.replay.is_none() && !publisher.broken);
        let wanted = free.filter_map(|(at, publisher)| {
            let expected_bytes = expected_bytes(publisher.replayed_bytes);
            Some(WantedReplay { urgency: publisher.urgency(now)?, at, expected_bytes })
        });
        for replay in next_replays(slots, wanted.collect()) {
            self.ask_replay(replay.at, replay.expected_bytes, now);
        }
    }

    fn ask_replay(&mut self, at: usize, expected_bytes: usize, now: Now) {
        let publisher = &mut self.publishers[at];
        // A worker without a replay endpoint wants no replay.
        let Some(endpoint) = publisher.replay_endpoint.clone() else { return };
        let Some(from) = publisher.stream.ask_replay(now) else { return };
        self.current_worker = Some(publisher.index);
        let of = (&self.config.brokers, publisher.stream.worker);
        match ReplayClient::ask((&endpoint, from), of, (&self.registry, Token(at)), now.uptime_ms) {
            Ok(client) => {
                let client = client.holding(self.memory.replay_bytes_max);
                tracing::debug!(worker = %publisher.stream.worker, %endpoint, %from, "replay asked for");
                publisher.replay = Some(Replay { client, bytes: 0, expected_bytes, asked_ms: now.uptime_ms });
                self.replays.open += 1;
                self.enqueue(at);
            }
            Err(error) => {
                tracing::warn!(
                    worker = %publisher.stream.worker, %endpoint, %error,
                    remedy = "correct the replay endpoint, or raise the limit of open files",
                    "cannot ask for a replay of lost batches"
                );
                let space = &mut self.spaces[publisher.space];
                publisher.stream.replay_ended(space, ReplayEnd::Missing, now);
                publisher.stream.show(space);
                self.enqueue(at);
            }
        }
    }

    /// Receives what has arrived of replays, between the quanta of publishers: an engine drops what its socket cannot
    /// take.
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

    /// Ends a replay that is late, or that would never end.
    pub(super) fn end_overdue_replay(&mut self, at: usize, now: Now) {
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        if publisher.replay.as_mut().is_some_and(|replay| replay.client.tick(now.uptime_ms)) {
            self.enqueue(at);
        }
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        let is_over = |replay: &Replay| replay.is_endless(now.uptime_ms) || publisher.stream.replay_has_timed_out(now);
        if publisher.replay.as_ref().is_some_and(is_over) {
            let space = &mut self.spaces[publisher.space];
            publisher.stream.replay_ended(space, ReplayEnd::Missing, now);
            publisher.stream.show(space);
            self.close_replay(at);
            // The messages that waited may be applied now.
            self.enqueue(at);
        }
    }

    /// Closes the socket of a replay that the stream no longer waits for.
    pub(super) fn close_replay(&mut self, at: usize) {
        let Some(publisher) = self.publishers.get_mut(at) else { return };
        if publisher.stream.awaits_replay() {
            return;
        }
        let Some(replay) = publisher.replay.take() else { return };
        self.replays.open -= 1;
        // A probe brings next to nothing, and the replay after it may bring the whole stream.
        let before = publisher.replayed_bytes.unwrap_or_default();
        publisher.replayed_bytes = Some(replay.bytes.max(before / 2));
        self.replays.check = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::REPLAY_BYTES_MAX;

    #[test]
    fn slots_are_few_and_their_bytes_bounded() {
        let mut slots = ReplaySlots::default();
        assert!(slots.fits(usize::MAX), "one alone");
        for _ in 0..REPLAYS_AT_ONCE_MAX {
            assert!(slots.fits(1));
            slots.take(1);
        }
        assert!(!slots.fits(0));
        let mut large = ReplaySlots::default();
        large.take(REPLAYS_UNDER_WAY_BYTES_MAX);
        assert!(large.fits(0) && !large.fits(1));
    }

    #[test]
    fn missing_batches_come_before_probes_busy_before_idle_and_quiet_before_loud() {
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
    fn a_large_replay_at_the_front_is_not_overtaken() {
        let urgency = |waiting| Urgency { aim: Aim::Prove, is_idle: true, waiting };
        let of = |at, expected_bytes| WantedReplay { urgency: urgency(at), at, expected_bytes };
        let mut slots = ReplaySlots::default();
        slots.take(REPLAY_BYTES_GUESSED);
        let wanted = vec![of(2, 1), of(1, REPLAYS_UNDER_WAY_BYTES_MAX), of(0, 1)];
        assert_eq!(next_replays(slots, wanted.clone()), [of(0, 1)]);
        assert_eq!(next_replays(ReplaySlots::default(), wanted[..2].to_vec()), [wanted[1]], "alone it has a slot");
    }

    /// A worker that wants a replay: its urgency, the bytes of its last replay, and the bytes of this one.
    fn worker() -> impl Strategy<Value = (Urgency, Option<usize>, usize)> {
        let aim = prop_oneof![4 => Just(Aim::Prove), 1 => Just(Aim::Probe)];
        let urgency =
            (aim, any::<bool>(), 0_usize..4).prop_map(|(aim, is_idle, waiting)| Urgency { aim, is_idle, waiting });
        (urgency, prop::option::of(0..=REPLAY_BYTES_MAX), 0..=REPLAY_BYTES_MAX)
    }

    /// The slots that replays under way take.
    fn slots_of(under_way: &[(usize, usize, usize)]) -> ReplaySlots {
        let mut slots = ReplaySlots::default();
        under_way.iter().for_each(|(_, expected, brought)| slots.take(*expected.max(brought)));
        slots
    }

    proptest! {
        /// For any number and size of replays, and any order in which they end.
        #[test]
        fn replays_of_a_fleet_keep_both_limits_and_the_order_and_all_are_asked_for(
            workers in prop::collection::vec(worker(), 1..80),
            ends in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..400),
        ) {
            let of = |at: usize| {
                let (urgency, last, _) = workers[at];
                WantedReplay { urgency, at, expected_bytes: expected_bytes(last) }
            };
            let mut wanted: Vec<WantedReplay> = (0..workers.len()).map(of).collect();
            let mut under_way: Vec<(usize, usize, usize)> = Vec::new();
            let mut ends = ends.into_iter();
            let mut asked_in_all = 0;
            while !wanted.is_empty() {
                let before = slots_of(&under_way);
                let asked = next_replays(before, wanted.clone());
                wanted.retain(|waits| asked.iter().all(|asked| asked.at != waits.at));
                under_way.extend(asked.iter().map(|asked| (asked.at, asked.expected_bytes, 0)));
                let slots = slots_of(&under_way);
                prop_assert!(slots.taken <= REPLAYS_AT_ONCE_MAX);
                if !asked.is_empty() {
                    prop_assert!(slots.taken == 1 || slots.bytes <= REPLAYS_UNDER_WAY_BYTES_MAX, "{slots:?}");
                }
                prop_assert!(before.taken > 0 || !asked.is_empty(), "no replay is under way, and none is asked for");
                let (last, next) = (asked.last(), wanted.iter().min());
                prop_assert!(last.zip(next).is_none_or(|(last, next)| last <= next), "{last:?} before {next:?}");
                asked_in_all += asked.len();
                // One replay brings its bytes, or ends. Once no more ends are drawn, all end.
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
