//! Dumps are written and read back; damaged and foreign bytes are refused.

use proptest::prelude::*;

use super::format::{FOOTER_BYTES, SECTION_HEAD_BYTES, VERSION};
use super::*;
use crate::event::SourceTrust;
use crate::fleet::PoolRole;
use crate::framed_file::PREAMBLE_BYTES;
use crate::ids::{EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, Tier, Window, Worker};
use crate::index::StoreBlocks;
use crate::ingest::{DumpBegin, DumpChunk, References};
use crate::limits::{
    GATE_PAYLOADS_REMEMBERED, NAME_BYTES_MAX, SNAPSHOT_SECTION_BLOCKS_MAX, SNAPSHOT_SECTION_BYTES_MAX,
};
use crate::trust::{Trust, TrustLevel, TrustReasons};

/// One store, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Store {
    parent: Option<u64>,
    blocks: Vec<(u64, u64)>,
    tier: Tier,
    group: u32,
    seed: u64,
}

fn chunk(stores: &[Store]) -> DumpChunk {
    let mut chunk = DumpChunk::default();
    for store in stores {
        let hashes: Vec<_> = store.blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect();
        let locals: Vec<_> = store.blocks.iter().map(|(_, local)| LocalHash(*local)).collect();
        chunk.push(&StoreBlocks {
            parent: store.parent.map(EngineHash),
            hashes: &hashes,
            locals: &locals,
            tier: store.tier,
            group: GroupId(store.group),
            seed: Seed(store.seed),
        });
    }
    chunk
}

/// Every block of some chunks with its parent, in order. The division into runs and chunks does not matter.
fn blocks(chunks: &[DumpChunk]) -> Vec<(Option<EngineHash>, EngineHash, LocalHash, Tier, GroupId, Seed)> {
    let mut blocks = Vec::new();
    for store in chunks.iter().flat_map(|chunk| (0..chunk.stores()).filter_map(|at| chunk.store(at))) {
        let mut parent = store.parent;
        for (hash, local) in store.hashes.iter().zip(store.locals) {
            blocks.push((parent, *hash, *local, store.tier, store.group, store.seed));
            parent = Some(*hash);
        }
    }
    blocks
}

fn references(chunks: &[DumpChunk]) -> References {
    let mut references = References::default();
    let stores = chunks.iter().flat_map(|chunk| (0..chunk.stores()).filter_map(|at| chunk.store(at)));
    stores.for_each(|store| references.add(&store));
    references
}

fn encode(header: &Header, chunks: &[DumpChunk]) -> Vec<u8> {
    let mut encoder = Encoder::begin(Vec::new(), header).expect("memory");
    chunks.iter().for_each(|chunk| encoder.chunk(chunk).expect("memory"));
    let (bytes, written) = encoder.end(references(chunks)).expect("memory");
    assert_eq!(bytes.len() as u64, written);
    bytes
}

fn small() -> (Header, Vec<DumpChunk>) {
    let begin = DumpBegin {
        watermark: Some(EventSeq(9)),
        remembered: vec![(EventSeq(8), 80), (EventSeq(9), 90)],
        scheme: Some(Scheme { block_size: 16, window: Window::Plain }),
        groups: vec![(Tier::Device, GroupId(0))],
        trust: Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(9)), ..Trust::default() },
        view: SourceTrust { level: TrustLevel::Exact, ..SourceTrust::default() },
        lifetime: None,
        republished: None,
    };
    let space = SpaceName { model: "m".into(), namespace: "n".into(), role: PoolRole::Decode };
    let store = Store { parent: None, blocks: vec![(1, 11), (2, 22)], tier: Tier::Device, group: 0, seed: 1337 };
    (Header { worker: Worker::new(7, 1), space, taken_unix_ms: 5, begin }, vec![chunk(&[store])])
}

fn expected() -> Expected {
    let (header, _) = small();
    Expected { worker: header.worker, space: header.space, scheme: header.begin.scheme, is_provable: true }
}

#[test]
fn every_flipped_bit_is_refused() {
    let (header, chunks) = small();
    let bytes = encode(&header, &chunks);
    assert_eq!(expected().check(bytes.as_slice()).map(|(_, end)| end.blocks), Ok(2));
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let fault = decode(&bytes).expect_err("a flipped bit");
            assert!(fault.offset <= bytes.len() as u64, "{fault}");
            let known = match at {
                0..8 => fault.refusal == Refusal::NotASnapshot,
                8..12 => fault.refusal == Refusal::OtherVersion,
                12..PREAMBLE_BYTES => fault.refusal == Refusal::Malformed,
                _ => matches!(fault.refusal, Refusal::Checksum | Refusal::Malformed | Refusal::Truncated),
            };
            assert!(known, "byte {at}, bit {bit}: {fault}");
        }
    }
}

#[test]
fn every_cut_and_any_byte_after_the_end_is_refused() {
    let (header, chunks) = small();
    let bytes = encode(&header, &chunks);
    for len in 0..bytes.len() {
        let fault = decode(&bytes[..len]).expect_err("a cut");
        assert_eq!((fault.refusal, fault.offset), (Refusal::Truncated, len as u64));
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert_eq!(decode(&longer).map_err(|fault| fault.refusal), Err(Refusal::Malformed));
}

#[test]
fn whole_sections_in_other_places_are_refused() {
    let (header, chunks) = small();
    let [one, other] = [chunks.clone(), [chunks.clone(), chunks].concat()].map(|chunks| encode(&header, &chunks));
    let section = |bytes: &[u8], from: usize| {
        let body_bytes = u32::from_le_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]]) as usize;
        from..from + SECTION_HEAD_BYTES + body_bytes
    };
    let begin = section(&one, PREAMBLE_BYTES);
    let chunk = section(&one, begin.end);
    let end = section(&one, chunk.end);
    assert_eq!(end.end + FOOTER_BYTES, one.len());
    let refusal = |parts: &[&[u8]]| decode(&parts.concat()).map_err(|fault| fault.refusal);
    let (head, tail) = (&one[..begin.end], &one[chunk.end..]);
    assert_eq!(refusal(&[head, tail]), Err(Refusal::Checksum), "without the blocks");
    assert_eq!(refusal(&[head, &one[chunk.clone()], &one[chunk.clone()], tail]), Err(Refusal::Checksum), "twice");
    assert_eq!(refusal(&[&one[..chunk.start], &one[begin.clone()], tail]), Err(Refusal::Malformed), "a second begin");
    assert_eq!(refusal(&[&one[..PREAMBLE_BYTES], &one[chunk.start..]]), Err(Refusal::Malformed), "no begin");
    let swapped = [&other[..other.len() - FOOTER_BYTES], &one[one.len() - FOOTER_BYTES..]];
    assert_eq!(refusal(&swapped), Err(Refusal::Checksum), "another file's footer");
}

#[test]
fn an_end_that_does_not_agree_with_the_blocks_is_refused() {
    let (header, chunks) = small();
    for wrong in [References::default(), References { digest: 1, ..references(&chunks) }] {
        let mut encoder = Encoder::begin(Vec::new(), &header).expect("memory");
        encoder.chunk(&chunks[0]).expect("memory");
        let (bytes, _) = encoder.end(wrong).expect("memory");
        assert_eq!(decode(&bytes).map_err(|fault| fault.refusal), Err(Refusal::Malformed));
    }
}

#[test]
fn a_length_takes_no_memory_before_its_bytes_arrive() {
    let (header, chunks) = small();
    let mut bytes = encode(&header, &chunks);
    for (length, refusal) in [
        (SNAPSHOT_SECTION_BYTES_MAX as u32, Refusal::Truncated),
        (SNAPSHOT_SECTION_BYTES_MAX as u32 + 1, Refusal::Malformed),
        (u32::MAX, Refusal::Malformed),
    ] {
        bytes[PREAMBLE_BYTES..PREAMBLE_BYTES + 4].copy_from_slice(&length.to_le_bytes());
        assert_eq!(decode(&bytes).map_err(|fault| fault.refusal), Err(refusal));
    }
}

#[test]
fn a_snapshot_of_another_worker_space_or_scheme_is_refused() {
    let (header, chunks) = small();
    let bytes = encode(&header, &chunks);
    let refusal = |change: &dyn Fn(&mut Expected)| {
        let mut expected = expected();
        change(&mut expected);
        expected.check(bytes.as_slice()).map(|_| ()).map_err(|fault| fault.refusal)
    };
    assert_eq!(refusal(&|_| {}), Ok(()));
    assert_eq!(refusal(&|e| e.scheme = None), Ok(()), "a scheme that is not known yet");
    assert_eq!(refusal(&|e| e.worker.rank.0 = 2), Err(Refusal::OtherWorker));
    assert_eq!(refusal(&|e| e.space.namespace.clear()), Err(Refusal::OtherSpace));
    assert_eq!(refusal(&|e| e.space.role = PoolRole::Both), Err(Refusal::OtherSpace));
    let bigram = Scheme { block_size: 16, window: Window::Bigram };
    assert_eq!(refusal(&|e| e.scheme = Some(bigram)), Err(Refusal::OtherScheme));
    assert_eq!(refusal(&|e| e.is_provable = false), Err(Refusal::Unprovable));
    let mut newer = bytes.clone();
    newer[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    assert_eq!(decode(&newer).map_err(|fault| fault.refusal), Err(Refusal::OtherVersion));
    assert_eq!(decode(b"[package]\nname = \"kvrouted\"").map_err(|fault| fault.refusal), Err(Refusal::NotASnapshot));
}

#[test]
fn runs_longer_than_a_section_continue_in_the_next() {
    let (header, _) = small();
    let long = SNAPSHOT_SECTION_BLOCKS_MAX as u64 * 5 / 2;
    let run = |from: u64| Store {
        parent: Some(from),
        blocks: (from..from + long).map(|at| (at, !at)).collect(),
        tier: Tier::Host,
        group: 3,
        seed: 4,
    };
    let empty = Store { blocks: Vec::new(), ..run(0) };
    let dumped = [chunk(&[run(1), empty, run(1 << 40)]), chunk(&[run(1 << 50)])];
    let bytes = encode(&header, &dumped);
    let (_, chunks, end) = decode(&bytes).expect("whole");
    assert_eq!((blocks(&chunks), end), (blocks(&dumped), references(&dumped)));
    assert!(chunks.iter().all(|chunk| chunk.blocks() <= SNAPSHOT_SECTION_BLOCKS_MAX) && chunks.len() == 8);
}

fn store() -> impl Strategy<Value = Store> {
    let tier = prop::sample::select(Tier::ALL.to_vec());
    let blocks = prop::collection::vec(any::<(u64, u64)>(), 0..40);
    (any::<Option<u64>>(), blocks, tier, any::<u32>(), any::<u64>())
        .prop_map(|(parent, blocks, tier, group, seed)| Store { parent, blocks, tier, group, seed })
}

fn header() -> impl Strategy<Value = Header> {
    let remembered = prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..=GATE_PAYLOADS_REMEMBERED);
    let tier = prop::sample::select(Tier::ALL.to_vec());
    let groups = prop::collection::vec((tier, any::<u32>().prop_map(GroupId)), 0..4);
    let scheme = prop::option::of((1_u32..=1024, any::<bool>()).prop_map(|(block_size, bigram)| Scheme {
        block_size,
        window: if bigram { Window::Bigram } else { Window::Plain },
    }));
    let trust =
        (0_u8..=4, any::<u64>(), any::<u64>(), any::<Option<u64>>()).prop_map(|(level, reasons, at, seq)| Trust {
            level: TrustLevel::from_u8(level).expect("a level"),
            reasons: TrustReasons::from_bits(reasons),
            since_unix_ms: at,
            as_of_seq: seq.map(EventSeq),
            as_of_unix_ms: !at,
        });
    let role = prop::sample::select(vec![PoolRole::Both, PoolRole::Prefill, PoolRole::Decode]);
    let who = (any::<(u64, u32, u64)>(), ".{0,30}", ".{0,30}", role);
    (who, remembered, any::<bool>(), groups, scheme, trust).prop_map(
        |(((id, rank, taken_unix_ms), model, namespace, role), remembered, begun, groups, scheme, trust)| {
            let remembered: Vec<_> = remembered.into_iter().map(|(seq, hash)| (EventSeq(seq), hash)).collect();
            let watermark = remembered.last().map(|(seq, _)| *seq).or(begun.then_some(EventSeq(3)));
            let view = SourceTrust { level: trust.level, reasons: trust.reasons };
            let begin =
                DumpBegin { watermark, remembered, scheme, groups, trust, view, lifetime: None, republished: None };
            Header { worker: Worker::new(id, rank), space: SpaceName { model, namespace, role }, taken_unix_ms, begin }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn any_dump_is_read_as_it_was_written(
        header in header(),
        stores in prop::collection::vec(prop::collection::vec(store(), 0..12), 0..6),
    ) {
        prop_assume!(header.space.model.len() <= NAME_BYTES_MAX && header.space.namespace.len() <= NAME_BYTES_MAX);
        let dumped: Vec<_> = stores.iter().map(|stores| chunk(stores)).collect();
        let bytes = encode(&header, &dumped);
        let (read, chunks, end) = decode(&bytes).expect("whole");
        prop_assert_eq!(read, header);
        prop_assert_eq!(blocks(&chunks), blocks(&dumped));
        prop_assert_eq!(end, references(&dumped));
    }

    #[test]
    fn any_bytes_are_refused_without_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), is_framed in any::<bool>()) {
        // Only a preamble and right checksums let the bytes reach the checks of the tables.
        if is_framed {
            let body = std::mem::take(&mut bytes);
            bytes.extend(b"KVRDSNAP");
            bytes.extend([VERSION.to_le_bytes(), [0; 4]].concat());
            for kind in [format::SectionKind::Begin, format::SectionKind::Chunk] {
                bytes.extend((body.len() as u32).to_le_bytes());
                bytes.extend((kind as u32).to_le_bytes());
                bytes.extend(format::section_checksum(kind, &body).to_le_bytes());
                bytes.extend(&body);
            }
        }
        prop_assert!(decode(&bytes).is_err());
    }

    #[test]
    fn changed_tables_under_right_checksums_do_no_harm(at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let (header, chunks) = small();
        let mut bytes = encode(&header, &chunks);
        let at = at.index(bytes.len() - PREAMBLE_BYTES) + PREAMBLE_BYTES;
        bytes[at] = value;
        // A faulty writer would have written it so: every checksum is right again.
        let mut from = PREAMBLE_BYTES;
        for kind in [format::SectionKind::Begin, format::SectionKind::Chunk, format::SectionKind::End] {
            let Some(length) = bytes.get(from..from + 4) else { return Ok(()) };
            let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
            let body = from + SECTION_HEAD_BYTES;
            let Some(bytes_of_body) = bytes.get(body..body.saturating_add(length)) else { return Ok(()) };
            let checksum = format::section_checksum(kind, bytes_of_body);
            bytes[from + 8..body].copy_from_slice(&checksum.to_le_bytes());
            from = body + length;
        }
        let whole = xxhash_rust::xxh3::xxh3_128(&bytes[..from]);
        bytes.truncate(from);
        bytes.extend(whole.to_le_bytes());
        if let Ok((_, chunks, end)) = decode(&bytes) {
            prop_assert_eq!(references(&chunks), end);
        }
    }
}
