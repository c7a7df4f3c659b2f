//! The engine's ZeroMQ socket, and vLLM 0.33's event messages byte by byte.
//!
//! A message is three frames: topic (empty), sequence number (8 bytes, big endian), and a msgpack array
//! `[ts, [event…], data_parallel_rank]` whose events are maps with their tag under `type`. Keys are in the
//! order in which vLLM declares them.

use std::path::Path;

use super::BLOCK_TOKENS;
use crate::demo::run_records::{BatchRecord, EventRecord, RecordWriter, monotonic_ns, unix_s};
use crate::error::{Error, Kind};
use crate::limits::ZMQ_RECEIVE_MESSAGES_MAX;

/// Numbers batches, sends and records them.
///
/// XPUB instead of vLLM's PUB: the same on the wire, but it reports subscriptions, so that the engine publishes nothing
/// before the daemon listens.
pub(super) struct Publisher {
    socket: zmq::Socket,
    log: RecordWriter,
    seq_next: u64,
}

impl Publisher {
    /// Binds a free port of the loopback interface and creates the log.
    ///
    /// # Errors
    /// `system` if either fails.
    pub(super) fn bind(log: &Path) -> Result<Self, Error> {
        let socket = zmq::Context::new().socket(zmq::XPUB).map_err(failed)?;
        socket.set_sndhwm(ZMQ_RECEIVE_MESSAGES_MAX).map_err(failed)?;
        socket.set_linger(0).map_err(failed)?;
        socket.bind("tcp://127.0.0.1:*").map_err(failed)?;
        Ok(Self { socket, log: RecordWriter::create(log)?, seq_next: 0 })
    }

    /// The endpoint for subscribers.
    ///
    /// # Errors
    /// `system` if the socket fails.
    pub(super) fn endpoint(&self) -> Result<String, Error> {
        let endpoint = self.socket.get_last_endpoint().map_err(failed)?;
        endpoint.map_err(|_| failed(zmq::Error::EINVAL))
    }

    /// Waits for the first subscription.
    ///
    /// # Errors
    /// `system` if the socket fails.
    pub(super) fn wait_for_subscription(&self) -> Result<(), Error> {
        // XPUB delivers subscriptions as 1 and cancellations as 0, each followed by the prefix.
        while self.socket.recv_bytes(0).map_err(failed)?.first() != Some(&1) {}
        Ok(())
    }

    /// Sends and records one batch. Returns its sequence number.
    ///
    /// # Errors
    /// `system` if it cannot be sent or recorded.
    pub(super) fn publish(&mut self, events: &[CacheEvent<'_>]) -> Result<u64, Error> {
        let seq = self.seq_next;
        self.seq_next += 1;
        let payload = encode_batch(unix_s(), events.iter().copied());
        // Taken before the send, so no reader can know the batch earlier.
        let sent_ns = monotonic_ns();
        self.socket.send_multipart([&[][..], &seq.to_be_bytes(), &payload], 0).map_err(failed)?;
        self.log.write(&BatchRecord { seq, sent_ns, events: events.iter().map(record).collect() })?;
        Ok(seq)
    }

    /// Completes the log and returns the number of batches.
    ///
    /// # Errors
    /// `system` if it cannot be written.
    pub(super) fn finish(&mut self) -> Result<u64, Error> {
        self.log.flush()?;
        Ok(self.seq_next)
    }
}

fn record(event: &CacheEvent<'_>) -> EventRecord {
    match event {
        CacheEvent::Stored { names, .. } => EventRecord::Stored(names.to_vec()),
        CacheEvent::Removed { name } => EventRecord::Removed(vec![*name]),
        CacheEvent::Cleared => EventRecord::Cleared,
    }
}

fn failed(error: zmq::Error) -> Error {
    Error::new(Kind::System, "the engine's ZeroMQ socket cannot be used", "check the limits on files and ports")
        .caused_by(error)
}

/// One event of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheEvent<'a> {
    /// A chain of blocks is now held.
    Stored {
        /// The block before the first, `None` at the root.
        parent: Option<u64>,
        /// The blocks' names, nearest the root first.
        names: &'a [u64],
        /// Their tokens.
        tokens: &'a [u32],
    },
    /// A block is gone. vLLM sends one event for each.
    Removed {
        /// The block's name.
        name: u64,
    },
    /// No block is held any more.
    Cleared,
}

/// The payload frame of one batch.
pub(crate) fn encode_batch<'a>(unix_s: f64, events: impl ExactSizeIterator<Item = CacheEvent<'a>>) -> Vec<u8> {
    let mut out = Vec::with_capacity(1024);
    array(&mut out, 3);
    out.push(0xcb);
    out.extend_from_slice(&unix_s.to_be_bytes());
    array(&mut out, events.len());
    for event in events {
        encode_event(&mut out, event);
    }
    uint(&mut out, 0);
    out
}

fn encode_event(out: &mut Vec<u8>, event: CacheEvent<'_>) {
    match event {
        CacheEvent::Stored { parent, names, tokens } => {
            out.push(0x80 | 11);
            tag(out, "BlockStored");
            text(out, "block_hashes");
            uints(out, names.iter().copied());
            text(out, "parent_block_hash");
            match parent {
                Some(parent) => uint(out, parent),
                None => out.push(NIL),
            }
            text(out, "token_ids");
            uints(out, tokens.iter().map(|token| u64::from(*token)));
            text(out, "block_size");
            uint(out, BLOCK_TOKENS as u64);
            nil_at(out, "lora_id");
            text(out, "medium");
            text(out, "GPU");
            nil_at(out, "lora_name");
            text(out, "extra_keys");
            array(out, names.len());
            out.resize(out.len() + names.len(), NIL);
            text(out, "group_idx");
            uint(out, 0);
            text(out, "kv_cache_spec_kind");
            text(out, "full_attention");
        }
        CacheEvent::Removed { name } => {
            out.push(0x80 | 4);
            tag(out, "BlockRemoved");
            text(out, "block_hashes");
            uints(out, std::iter::once(name));
            text(out, "medium");
            text(out, "GPU");
            text(out, "group_idx");
            uint(out, 0);
        }
        CacheEvent::Cleared => {
            out.push(0x80 | 1);
            tag(out, "AllBlocksCleared");
        }
    }
}

const NIL: u8 = 0xc0;

fn tag(out: &mut Vec<u8>, name: &str) {
    text(out, "type");
    text(out, name);
}

fn nil_at(out: &mut Vec<u8>, key: &str) {
    text(out, key);
    out.push(NIL);
}

/// A short string, below 32 bytes.
fn text(out: &mut Vec<u8>, text: &str) {
    debug_assert!(text.len() < 32);
    out.push(0xa0 | text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn array(out: &mut Vec<u8>, len: usize) {
    match len {
        0..=15 => out.push(0x90 | len as u8),
        16..=0xffff => {
            out.push(0xdc);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdd);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

fn uints(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = u64>) {
    array(out, values.len());
    for value in values {
        uint(out, value);
    }
}

/// An integer in its shortest form, as msgspec writes it.
fn uint(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend_from_slice(&[0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn removals_and_clears_have_known_bytes() {
        let events = [CacheEvent::Removed { name: u64::MAX }, CacheEvent::Cleared];
        let payload = encode_batch(1.0, events.into_iter());
        let expected = [
            "93cb3ff0000000000000", // [1.0,
            "92",                   // two events
            "84a474797065ac426c6f636b52656d6f766564",
            "ac626c6f636b5f68617368657391cfffffffffffffffff",
            "a66d656469756da3475055",
            "a967726f75705f69647800",
            "81a474797065b0416c6c426c6f636b73436c6561726564",
            "00", // rank
        ];
        assert_eq!(hex(&payload), expected.concat());
    }

    #[test]
    fn a_store_carries_every_key_and_the_shortest_integers() {
        let tokens: Vec<u32> = (0..16).map(|i| i * 20_000).collect();
        let payload =
            encode_batch(0.5, [CacheEvent::Stored { parent: Some(5), names: &[300], tokens: &tokens }].into_iter());
        let text = hex(&payload);
        assert!(text.starts_with("93cb3fe0000000000000918ba474797065ab426c6f636b53746f726564"));
        assert!(text.contains("ac626c6f636b5f68617368657391cd012c"));
        assert!(text.contains("b1706172656e745f626c6f636b5f6861736805"));
        assert!(text.contains("a9746f6b656e5f696473dc001000cd4e20cd9c40cdea60ce00013880"));
        assert!(
            text.ends_with(
                "a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
            )
        );
        let root = encode_batch(0.5, [CacheEvent::Stored { parent: None, names: &[300], tokens: &tokens }].into_iter());
        assert!(hex(&root).contains("b1706172656e745f626c6f636b5f68617368c0"));
    }

    #[test]
    fn the_daemon_decodes_every_event() {
        use crate::event::{Content, EventBatch, KvEvent, Medium, Removed, msgpack};
        use crate::ids::{DpRank, EngineHash, GroupId, Tier};

        let tokens: Vec<u32> = (100_000..100_320).collect();
        let names: Vec<u64> = (0..20).map(|i| u64::MAX - i).collect();
        let sent = [
            CacheEvent::Removed { name: 7 },
            CacheEvent::Stored { parent: Some(1 << 33), names: &names, tokens: &tokens },
            CacheEvent::Cleared,
        ];
        let mut batch = EventBatch::new();
        msgpack::decode(&encode_batch(12.5, sent.into_iter()), &mut batch).unwrap();
        assert_eq!(batch.info().dp_rank, Some(DpRank(0)));
        assert!(batch.info().warnings.is_empty());
        let events: Vec<KvEvent<'_>> = batch.events().collect();
        let device = Medium::Tier(Tier::Device);
        assert_eq!(
            events[0],
            KvEvent::Removed(Removed { hashes: &[EngineHash(7)], medium: device, group: GroupId(0) })
        );
        let KvEvent::Stored(stored) = events[1] else { panic!("{:?}", events[1]) };
        assert_eq!((stored.parent, stored.block_size, stored.medium), (Some(EngineHash(1 << 33)), 16, device));
        assert_eq!(stored.hashes.iter().map(|hash| hash.0).collect::<Vec<_>>(), names);
        assert_eq!(stored.content, Content::Tokens { tokens: &tokens, bigram: false });
        assert!(matches!(events[2], KvEvent::Cleared(cleared) if cleared.tier.is_none()));
    }
}
