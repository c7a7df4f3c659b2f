//! An engine's own snapshot: what is read of it is what it says, and a live batch's lifetime never depends on its payload.

use bytes::Bytes;
use kvrouted::event::engine_snapshot::{AnswerReader, Answered, SnapshotContent, live_frames};
use kvrouted::event::msgpack::{decode_placement_header, decode_placements};
use kvrouted::ids::{DpRank, SnapshotProposal};
use kvrouted::limits::ENGINE_SNAPSHOT_BLOCKS_MAX;

const PROPOSALS: [SnapshotProposal; 2] = [SnapshotProposal::Vllm57789, SnapshotProposal::Sglang34407];
/// Frames and messages are cut out of the bytes, each with its length before it.
const FRAMES_MAX: usize = 64;

/// The first byte is the proposal, the second the number of frames of each message; then come frames, each behind a
/// length of two bytes.
pub(crate) fn engine_snapshot(data: &[u8]) {
    let [proposal, frames_each, rest @ ..] = data else { return };
    let proposal = PROPOSALS[usize::from(*proposal) % PROPOSALS.len()];
    let frames = frames(rest);
    if let Some((_, lifetime)) = live_frames(proposal, &frames) {
        let before = frames.last().expect("a batch has one");
        assert!(before.len() == 8 || (before.len() == 24 && lifetime.is_some()), "{} bytes", before.len());
    }
    for payload in &frames {
        let _ = decode_placement_header(payload);
        let mut placed = Vec::new();
        if decode_placements(payload, &mut placed).is_ok() {
            assert!(placed.len() <= payload.len() && placed.len() <= ENGINE_SNAPSHOT_BLOCKS_MAX);
        }
    }
    let (mut reader, mut bytes) = (AnswerReader::new(proposal, DpRank(0)), 0);
    for message in frames.chunks(usize::from(*frames_each).max(1)) {
        bytes += message.iter().map(Bytes::len).sum::<usize>();
        match reader.message(message.to_vec()) {
            Ok(Answered::Partly) => {}
            Ok(Answered::Wholly(snapshot)) => {
                match snapshot.content {
                    SnapshotContent::Batches(batches) => {
                        assert!(batches.iter().map(Bytes::len).sum::<usize>() <= bytes)
                    }
                    SnapshotContent::Placements(placed) => assert!(placed.len() <= bytes),
                }
                assert!(snapshot.cut.watermark.0 < u64::MAX, "the stream goes on behind it");
                return;
            }
            Err(_) => return,
        }
    }
}

fn frames(mut rest: &[u8]) -> Vec<Bytes> {
    let mut frames = Vec::new();
    while let [high, low, behind @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(behind.len());
        frames.push(Bytes::copy_from_slice(&behind[..length]));
        rest = &behind[length..];
        if frames.len() == FRAMES_MAX {
            break;
        }
    }
    frames
}
