//! Snapshots that engines send themselves, by two open proposals. Neither is part of a release, so each may change.
//!
//! | | [`SnapshotProposal::Vllm57789`] | [`SnapshotProposal::Sglang34407`] |
//! |---|---|---|
//! | a batch's lifetime | 16 bytes behind its 8-byte sequence number, in one frame | the text behind `\0sgl-kv-epoch=` in its topic frame |
//! | the question | `"", "snapshot"` | `"", "snapshot-v1"` |
//! | the answer | one message: `"", cut, lifetime, batch…` | messages: `"", "header", …`, then `"", "chunk", …` each, then `"", "end", ""`; or `"", "error", text` |
//! | where it ends | `cut`: the last sequence number that it contains, 8 bytes with a sign; -1: nothing was sent; less: there is no snapshot | `barrier_seq`; the stream goes on with `resume_seq` |
//! | its content | event batches, to be applied to an empty worker in order | hashes with the hash before each, without tokens |
//!
//! This file reads them, and knows no socket.

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_128;

use super::msgpack::{Placed, decode_placement_header, decode_placements};
use crate::ids::{DpRank, EventSeq, Lifetime, SnapshotProposal};

/// Bytes of a sequence number.
const SEQ_BYTES: usize = 8;
/// Before the lifetime in SGLang's topic frame. The next zero byte, or the frame's end, ends it.
const EPOCH_MARKER: &[u8] = b"\0sgl-kv-epoch=";
/// The version of SGLang's proposal that is read.
const PLACEMENT_VERSION: u64 = 1;

/// Why an answer is no snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFault {
    /// The engine says that it has none.
    Unavailable,
    /// It is not what the proposal describes, or of another rank.
    Malformed,
}

/// Where a snapshot ends, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The lifetime of its publisher.
    pub lifetime: Lifetime,
    /// The last batch that it contains. The live stream goes on with the next one.
    pub watermark: EventSeq,
}

/// The question for a snapshot, without the empty frame before it.
#[must_use]
pub const fn question(proposal: SnapshotProposal) -> &'static [u8] {
    match proposal {
        SnapshotProposal::Vllm57789 => b"snapshot",
        SnapshotProposal::Sglang34407 => b"snapshot-v1",
    }
}

/// The sequence number and the lifetime of a live batch, from the frames before its payload. Without a lifetime, the
/// engine's snapshots are off. `None` = it is no batch.
#[must_use]
pub fn live_frames(proposal: SnapshotProposal, before: &[Bytes]) -> Option<(EventSeq, Option<Lifetime>)> {
    let (seq, rest) = before.last()?.split_first_chunk::<SEQ_BYTES>()?;
    let seq = EventSeq(u64::from_be_bytes(*seq));
    match proposal {
        _ if rest.is_empty() => {
            let topic = before.first().filter(|_| proposal == SnapshotProposal::Sglang34407);
            Some((seq, topic.and_then(|topic| lifetime_of_topic(topic))))
        }
        SnapshotProposal::Vllm57789 => Some((seq, Some(Lifetime(rest.try_into().ok()?)))),
        SnapshotProposal::Sglang34407 => None,
    }
}

fn lifetime_of_topic(topic: &[u8]) -> Option<Lifetime> {
    let marker = topic.windows(EPOCH_MARKER.len()).position(|window| window == EPOCH_MARKER)?;
    let epoch = topic[marker + EPOCH_MARKER.len()..].split(|byte| *byte == 0).next()?;
    Some(lifetime_of_text(epoch))
}

/// The lifetime that a text names: any text is allowed, so its hash stands for it.
fn lifetime_of_text(text: &[u8]) -> Lifetime {
    Lifetime(xxh3_128(text).to_be_bytes())
}

/// The state of an answer after one more message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answered {
    /// More messages follow.
    Partly,
    /// The whole snapshot.
    Wholly(EngineSnapshot),
}

/// A whole snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSnapshot {
    /// Where it ends.
    pub cut: Cut,
    /// What it contains.
    pub content: SnapshotContent,
}

/// The content of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotContent {
    /// Event batches, not yet decoded. Applied to an empty worker in order they leave what the engine holds.
    Batches(Vec<Bytes>),
    /// The blocks that the engine holds, by their hashes alone.
    Placements(Vec<Placed>),
}

/// Reads the messages of one answer.
#[derive(Clone, Debug)]
pub struct AnswerReader {
    proposal: SnapshotProposal,
    rank: DpRank,
    /// SGLang's header: where the snapshot ends, and its number of records.
    header: Option<(Cut, u64)>,
    records: u64,
    placed: Vec<Placed>,
}

impl AnswerReader {
    /// A reader for the answer of the publisher of this rank.
    #[must_use]
    pub const fn new(proposal: SnapshotProposal, rank: DpRank) -> Self {
        Self { proposal, rank, header: None, records: 0, placed: Vec::new() }
    }

    /// Takes the next message: its frames, from the empty one on.
    ///
    /// # Errors
    /// The answer is no snapshot. No further message helps.
    pub fn message(&mut self, frames: Vec<Bytes>) -> Result<Answered, AnswerFault> {
        match self.proposal {
            SnapshotProposal::Vllm57789 => vllm(frames).map(Answered::Wholly),
            SnapshotProposal::Sglang34407 => self.placement(&frames),
        }
    }

    fn placement(&mut self, frames: &[Bytes]) -> Result<Answered, AnswerFault> {
        let [delimiter, kind, payload] = frames else { return Err(AnswerFault::Malformed) };
        let malformed = |_| AnswerFault::Malformed;
        match (&kind[..], self.header) {
            _ if !delimiter.is_empty() => Err(AnswerFault::Malformed),
            (b"error", _) => Err(AnswerFault::Unavailable),
            (b"header", None) => {
                let header = decode_placement_header(payload).map_err(malformed)?;
                let is_of_rank = header.replica_rank == u64::from(self.rank.0);
                let goes_on = header.barrier_seq.checked_add(1) == Some(header.resume_seq);
                if header.version != PLACEMENT_VERSION || !is_of_rank || !goes_on {
                    return Err(AnswerFault::Malformed);
                }
                let lifetime = lifetime_of_text(header.epoch);
                let cut = Cut { lifetime, watermark: EventSeq(header.barrier_seq) };
                self.header = Some((cut, header.record_count));
                Ok(Answered::Partly)
            }
            (b"chunk", Some((_, records))) => {
                self.records += decode_placements(payload, &mut self.placed).map_err(malformed)?;
                if self.records > records { Err(AnswerFault::Malformed) } else { Ok(Answered::Partly) }
            }
            (b"end", Some((cut, records))) if payload.is_empty() && self.records == records => {
                let content = SnapshotContent::Placements(std::mem::take(&mut self.placed));
                Ok(Answered::Wholly(EngineSnapshot { cut, content }))
            }
            _ => Err(AnswerFault::Malformed),
        }
    }
}

/// vLLM's answer, which is one message.
fn vllm(mut frames: Vec<Bytes>) -> Result<EngineSnapshot, AnswerFault> {
    let [delimiter, cut, lifetime, ..] = &frames[..] else { return Err(AnswerFault::Malformed) };
    let (Ok(cut), Ok(lifetime), true) =
        (<[u8; SEQ_BYTES]>::try_from(&cut[..]), <[u8; 16]>::try_from(&lifetime[..]), delimiter.is_empty())
    else {
        return Err(AnswerFault::Malformed);
    };
    let lifetime = Lifetime(lifetime);
    // -1 = nothing was sent. A worker that wants a snapshot has received a batch, so such a snapshot is not of its stream.
    let watermark = u64::try_from(i64::from_be_bytes(cut)).map_err(|_| AnswerFault::Unavailable)?;
    let content = SnapshotContent::Batches(frames.split_off(3));
    Ok(EngineSnapshot { cut: Cut { lifetime, watermark: EventSeq(watermark) }, content })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::event::msgpack::tests::packed;

    fn frames(frames: &[&[u8]]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
    }

    const VLLM: SnapshotProposal = SnapshotProposal::Vllm57789;
    const SGLANG: SnapshotProposal = SnapshotProposal::Sglang34407;

    #[test]
    fn a_live_batch_names_the_lifetime_of_its_publisher() {
        let seq = 7_u64.to_be_bytes();
        let long = [&seq[..], &[9; 16]].concat();
        let of = |proposal, said: &[&[u8]]| live_frames(proposal, &frames(said));
        assert_eq!(of(VLLM, &[b"kv", &long]), Some((EventSeq(7), Some(Lifetime([9; 16])))));
        assert_eq!(of(VLLM, &[b"kv", &seq]), Some((EventSeq(7), None)), "its snapshots are off");
        assert_eq!(of(VLLM, &[b"kv", &long[..20]]), None);
        assert_eq!((of(VLLM, &[b"kv", &seq[..7]]), of(VLLM, &[])), (None, None));
        let named = of(SGLANG, &[b"kv\0sgl-kv-epoch=abc", &seq]).expect("a batch");
        assert_eq!(named, (EventSeq(7), Some(lifetime_of_text(b"abc"))));
        assert_eq!(of(SGLANG, &[b"kv\0sgl-kv-epoch=abc\0sgl-kv-snapshot=x", &seq]), Some(named), "a barrier too");
        assert_ne!(of(SGLANG, &[b"kv\0sgl-kv-epoch=abd", &seq]), Some(named));
        assert_eq!(of(SGLANG, &[b"kv", &seq]), Some((EventSeq(7), None)));
        assert_eq!(of(SGLANG, &[b"kv", &long]), None);
    }

    #[test]
    fn an_answer_of_vllm_is_one_message() {
        let read = |said: &[&[u8]]| AnswerReader::new(VLLM, DpRank(0)).message(frames(said));
        let (cut, lifetime) = (5_i64.to_be_bytes(), [3; 16]);
        let whole = read(&[b"", &cut, &lifetime, b"one", b"two"]);
        let content = SnapshotContent::Batches(frames(&[b"one", b"two"]));
        let cut_at = Cut { lifetime: Lifetime(lifetime), watermark: EventSeq(5) };
        assert_eq!(whole, Ok(Answered::Wholly(EngineSnapshot { cut: cut_at, content })));
        for none in [-1_i64, -2, i64::MIN] {
            assert_eq!(read(&[b"", &none.to_be_bytes(), &lifetime]), Err(AnswerFault::Unavailable), "{none}");
        }
        let empty: &[u8] = b"";
        let torn: [&[&[u8]]; 5] = [
            &[],
            &[empty, &cut],
            &[empty, &cut[1..], &lifetime],
            &[empty, &cut, &lifetime[1..]],
            &[&cut, &cut, &lifetime],
        ];
        for torn in torn {
            assert_eq!(read(torn), Err(AnswerFault::Malformed), "{torn:?}");
        }
    }

    fn header(rank: u64, resume: u64, records: u64) -> Vec<u8> {
        packed(&json!([1, "abc", rank, resume, 7, "b", records]))
    }

    #[test]
    fn an_answer_of_sglang_is_whole_at_its_end() {
        let mut reader = AnswerReader::new(SGLANG, DpRank(2));
        let chunk = packed(&json!([[null, [1]], [1, [2]]]));
        let mut say = |kind: &[u8], payload: &[u8]| reader.message(frames(&[b"", kind, payload]));
        assert_eq!(say(b"header", &header(2, 8, 2)), Ok(Answered::Partly));
        assert_eq!(say(b"chunk", &chunk), Ok(Answered::Partly));
        let Ok(Answered::Wholly(snapshot)) = say(b"end", b"") else { panic!("it is whole") };
        assert_eq!(snapshot.cut, Cut { lifetime: lifetime_of_text(b"abc"), watermark: EventSeq(7) });
        let SnapshotContent::Placements(placed) = snapshot.content else { panic!("blocks by their hashes") };
        assert_eq!(placed.len(), 2);
    }

    /// A name, the kinds and payloads of the messages, and what the last of them is refused as.
    type Torn<'a> = (&'a str, &'a [(&'a [u8], &'a [u8])], AnswerFault);

    #[test]
    fn a_torn_or_foreign_answer_of_sglang_is_refused() {
        let chunk = packed(&json!([[null, [1]]]));
        let one = header(0, 8, 1);
        let rows: [Torn<'_>; 9] = [
            ("busy", &[(b"error", b"snapshot provider busy")], AnswerFault::Unavailable),
            ("no header", &[(b"chunk", &chunk)], AnswerFault::Malformed),
            ("two headers", &[(b"header", &one), (b"header", &one)], AnswerFault::Malformed),
            ("records are missing", &[(b"header", &one), (b"end", b"")], AnswerFault::Malformed),
            ("too many", &[(b"header", &one), (b"chunk", &chunk), (b"chunk", &chunk)], AnswerFault::Malformed),
            ("another rank", &[(b"header", &header(1, 8, 1))], AnswerFault::Malformed),
            ("it does not go on", &[(b"header", &header(0, 9, 1))], AnswerFault::Malformed),
            ("an end with more", &[(b"header", &one), (b"chunk", &chunk), (b"end", b"x")], AnswerFault::Malformed),
            ("another kind", &[(b"header", &one), (b"more", b"")], AnswerFault::Malformed),
        ];
        for (name, said, fault) in rows {
            let mut reader = AnswerReader::new(SGLANG, DpRank(0));
            let answers: Vec<_> = said.iter().map(|(kind, with)| reader.message(frames(&[b"", kind, with]))).collect();
            assert_eq!(answers.last(), Some(&Err(fault)), "{name}");
            assert!(answers[..answers.len() - 1].iter().all(|answer| *answer == Ok(Answered::Partly)), "{name}");
        }
    }
}
