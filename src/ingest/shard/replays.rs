//! The replays of a shard: who is asked next, and what is over.

use mio::Token;

use super::{Now, Shard};
use crate::ingest::held::HeldBytes;
use crate::ingest::replay::{Places, Replay, ReplayClient, Wanting, asked_now, reckoned_bytes};
use crate::ingest::stream::ReplayEnd;
use crate::limits::REPLAY_RECEIVE_EVERY_MS;

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
        let mut places = Places::default();
        self.members.iter().filter_map(|member| member.replay.as_ref()).for_each(|replay| {
            places.take(replay.under_way_bytes());
        });
        let waiting = self.members.iter().enumerate().filter(|(_, member)| member.replay.is_none() && !member.broken);
        let wanting = waiting.filter_map(|(at, member)| {
            let reckoned_bytes = reckoned_bytes(member.replayed_bytes);
            Some(Wanting { urgency: member.urgency(now)?, at, reckoned_bytes })
        });
        for asked in asked_now(places, wanting.collect()) {
            self.ask_replay(asked.at, asked.reckoned_bytes, now);
        }
    }

    fn ask_replay(&mut self, at: usize, reckoned_bytes: usize, now: Now) {
        let member = &mut self.members[at];
        // Only a worker with a replay endpoint is asked.
        let Some(endpoint) = member.replay_endpoint.clone() else { return };
        let Some(from) = member.stream.ask_replay(now) else { return };
        self.hand = Some(member.index);
        match ReplayClient::ask(&endpoint, from, (&self.registry, Token(at)), now.uptime_ms) {
            Ok(client) => {
                tracing::debug!(worker = %member.stream.worker, %endpoint, %from, "replay asked for");
                member.replay = Some(Replay { client, bytes: 0, reckoned_bytes, asked_ms: now.uptime_ms });
                self.replays.open += 1;
                self.enqueue(at);
            }
            Err(error) => {
                tracing::warn!(
                    worker = %member.stream.worker, %endpoint, %error,
                    remedy = "correct the replay endpoint, or raise the limit of open files",
                    "a replay cannot be asked for"
                );
                let home = &mut self.homes[member.home];
                member.stream.replay_ended(home, ReplayEnd::Missing, now);
                member.stream.show(home);
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
        let replays = self.members.iter_mut().filter_map(|member| member.replay.as_mut());
        replays.for_each(|replay| replay.client.receive_ahead(now_ms));
    }

    /// Ends a replay that is overdue, or that would never end.
    pub(super) fn see_overdue(&mut self, at: usize, now: Now) {
        let Some(member) = self.members.get_mut(at) else { return };
        if member.replay.as_mut().is_some_and(|replay| replay.client.tick(now.uptime_ms)) {
            self.enqueue(at);
        }
        let Some(member) = self.members.get_mut(at) else { return };
        let is_over = |replay: &Replay| replay.is_endless(now.uptime_ms) || member.stream.replay_is_overdue(now);
        if member.replay.as_ref().is_some_and(is_over) {
            let home = &mut self.homes[member.home];
            member.stream.replay_ended(home, ReplayEnd::Missing, now);
            member.stream.show(home);
            self.close_replay(at);
            // What waited may be applied now.
            self.enqueue(at);
        }
    }

    /// Closes the socket of a replay of which nothing more is waited for.
    pub(super) fn close_replay(&mut self, at: usize) {
        let Some(member) = self.members.get_mut(at) else { return };
        if member.stream.awaits_replay() {
            return;
        }
        let Some(replay) = member.replay.take() else { return };
        self.replays.open -= 1;
        // A probe brings next to nothing, and what follows it may bring everything.
        let before = member.replayed_bytes.unwrap_or_default();
        member.replayed_bytes = Some(replay.bytes.max(before / 2));
        self.replays.look = true;
    }
}
