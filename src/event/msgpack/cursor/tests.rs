//! Runs of numbers are read as numbers one after the other are.

use proptest::prelude::*;

use super::*;

/// The next numbers, at most `count`, and their end.
fn singly(bytes: &[u8], at: usize, count: usize) -> (Vec<u32>, usize) {
    let (mut cursor, mut out) = (Cursor { bytes, at }, vec![7; count]);
    let filled = cursor.fill_u32_singly(&mut out);
    out.truncate(filled);
    (out, cursor.at)
}

fn in_runs(bytes: &[u8], at: usize, count: usize) -> (Vec<u32>, usize) {
    let (mut cursor, mut out) = (Cursor { bytes, at }, vec![7; count]);
    let filled = cursor.fill_u32(&mut out);
    out.truncate(filled);
    (out, cursor.at)
}

/// A number as engines write it: a marker of their choice, and its bytes.
fn number() -> impl Strategy<Value = Vec<u8>> {
    let marked = |marker: u8, bytes: usize| {
        prop::collection::vec(any::<u8>(), bytes).prop_map(move |number| [vec![marker], number].concat())
    };
    prop_oneof![
        3 => (0_u8..0x80).prop_map(|marker| vec![marker]),
        2 => marked(0xcc, 1),
        6 => marked(0xcd, 2),
        6 => marked(0xce, 4),
    ]
}

/// The same with bytes in it that look like markers.
fn treacherous() -> impl Strategy<Value = Vec<u8>> {
    let byte = || prop::sample::select(vec![0x00, 0x7f, 0x80, 0xcc, 0xcd, 0xce, 0xcf, 0xff]);
    let marked = move |marker: u8, bytes: usize| {
        prop::collection::vec(byte(), bytes).prop_map(move |number| [vec![marker], number].concat())
    };
    prop_oneof![Just(vec![0]), Just(vec![0x7f]), marked(0xcc, 1), marked(0xcd, 2), marked(0xce, 4)]
}

fn list(of: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(of, 0..200).prop_map(|numbers| numbers.concat())
}

proptest! {
    #[test]
    fn runs_are_the_numbers_one_by_one(
        lead in prop::collection::vec(any::<u8>(), 0..10),
        numbers in prop_oneof![list(number()), list(treacherous()), prop::collection::vec(any::<u8>(), 0..400)],
        count in 0_usize..220,
        cut in 0_usize..8,
        behind in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let at = lead.len();
        let whole = [lead, numbers, behind].concat();
        let bytes = &whole[..whole.len().saturating_sub(cut).max(at)];
        prop_assert_eq!(in_runs(bytes, at, count), singly(bytes, at, count));
    }

    #[test]
    fn long_lists_of_wide_numbers_end_where_another_value_comes(
        hashes in prop::collection::vec(any::<u64>(), 0..40),
        other in prop::collection::vec(any::<u8>(), 0..20),
        count in 0_usize..50,
    ) {
        let mut bytes: Vec<u8> = hashes.iter().flat_map(|hash| [vec![0xcf], hash.to_be_bytes().to_vec()].concat()).collect();
        bytes.extend(other);
        let mut cursor = Cursor::new(&bytes);
        let taken: Vec<u64> = cursor.wide_u64s(count).collect();
        let mut reference = Cursor::new(&bytes);
        let mut expected = Vec::new();
        while expected.len() < count && reference.marker().is_ok_and(|marker| marker == 0xcf) {
            let Ok((hash, _)) = reference.int() else { break };
            expected.push(hash);
        }
        prop_assert_eq!((taken.len(), cursor.at), (expected.len(), expected.len() * 9));
        prop_assert_eq!(taken, expected);
    }
}

#[test]
fn every_marker_ends_a_run_as_it_ends_numbers_one_by_one() {
    for marker in 0..=u8::MAX {
        for before in 0..70 {
            let mut bytes: Vec<u8> = (0..before).flat_map(|_| [0xcd, 0xce, 0xcd]).collect();
            bytes.push(marker);
            bytes.extend([0xce; 9]);
            for cut in 0..9 {
                let bytes = &bytes[..bytes.len() - cut];
                assert_eq!(in_runs(bytes, 0, 100), singly(bytes, 0, 100), "{marker:#x} behind {before}, {cut} cut off");
            }
        }
    }
}
