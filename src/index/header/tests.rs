use super::*;
use std::sync::atomic::AtomicBool;

fn full() -> Header {
    Header {
        parent: PARENT_MAX,
        variant: 0xfe,
        first: 0x0123_4567_89ab_cdef,
        id: 0xdead_beef,
        len: 1024,
        base: 0xfeed_f00d,
        flags: FORKED | LEAF | 1 << 7,
        mask: 0x8000_0000_0000_0001,
        pairs: [(1, 2), (u16::MAX, 1023), (64, u16::MAX), (0, 0)].map(|(lane, cut)| Pair { lane, cut }),
        pairs_len: 3,
        more: 0xffff_8000_1234_5678,
    }
}

#[test]
fn a_line_is_a_cache_line() {
    assert_eq!((size_of::<Line>(), align_of::<Line>()), (64, 64));
}

#[test]
fn what_is_written_is_read() {
    let line = Line::new();
    assert_eq!((line.key(), line.parent(), line.version()), (None, PARENT_EMPTY, 0));
    for header in [full(), Header::default(), full()] {
        line.publish(&header);
        assert_eq!(line.read(), Some((line.version(), header)));
        assert_eq!(line.header(), header);
        assert_eq!(line.key(), Some((header.parent, header.first, header.variant)));
        assert!(line.is_at(header.parent, header.first, header.variant));
    }
    assert_eq!(line.version(), 6);
    assert_eq!(full().pairs(), &full().pairs[..3]);
    assert!(full().has(FORKED) && full().has(LEAF) && !Header::default().has(LEAF));
}

#[test]
fn a_line_that_nobody_covers_any_more_says_all_else() {
    let line = Line::new();
    line.publish(&full());
    let version = line.version();
    line.uncover();
    assert_eq!(line.read(), Some((version + 2, Header { mask: 0, pairs_len: 0, more: 0, ..full() })));
}

#[test]
fn every_field_has_bits_of_its_own() {
    let zero = Header::default().pack();
    let mut seen = [0_u64; 7];
    let ones: [fn(&mut Header); 10] = [
        |header| header.variant = u8::MAX,
        |header| header.first = u64::MAX,
        |header| header.id = u32::MAX,
        |header| header.len = u16::MAX,
        |header| header.base = u32::MAX,
        |header| header.flags = u8::MAX,
        |header| header.mask = u64::MAX,
        |header| header.pairs = [Pair { lane: u16::MAX, cut: u16::MAX }; PAIRS],
        |header| header.pairs_len = u8::MAX,
        |header| header.more = u64::MAX,
    ];
    for set in ones {
        let mut header = Header::default();
        set(&mut header);
        assert_eq!(Header::unpack(0, header.pack()), header);
        for (at, word) in header.pack().into_iter().enumerate() {
            assert_eq!(word & seen[at], zero[at], "two fields in the same bits");
            seen[at] |= word;
        }
    }
}

#[test]
fn an_open_line_is_not_read_but_known() {
    let line = Line::new();
    let header = full();
    let find = |first| line.probe(header.parent, first, header.variant);
    assert!(matches!(find(header.first), Probe::Empty));
    line.publish(&header);
    assert!(matches!(find(header.first), Probe::Here(2, found) if found == header));
    line.open();
    assert!(line.is_open() && line.read().is_none() && line.key().is_none() && line.version() == 3);
    assert!(matches!(find(header.first), Probe::Busy));
    assert!(matches!(find(1), Probe::Other));
    assert!(matches!(line.probe(7, header.first, header.variant), Probe::Other));
    line.write(&Header { len: 7, ..header });
    line.close();
    assert!(matches!(find(header.first), Probe::Here(4, found) if found.len == 7));
    assert!(matches!(line.probe(header.parent, header.first, 0), Probe::Other));
}

#[test]
fn a_line_used_again_goes_on_counting() {
    let line = Line::new();
    line.publish(&full());
    line.vacate(PARENT_TOMBSTONE);
    assert_eq!((line.version(), line.parent(), line.key()), (4, PARENT_TOMBSTONE, None));
    assert!(matches!(line.probe(full().parent, full().first, full().variant), Probe::Other));
    line.publish(&full());
    line.open();
    line.vacate(PARENT_EMPTY);
    assert_eq!((line.version(), line.parent()), (8, PARENT_EMPTY));
    let copy = Line::new();
    line.publish(&full());
    line.open();
    copy.copy_from(&line);
    assert!(copy.is_open() && copy.version() == line.version() && copy.header() == full());
}

#[test]
fn versions_wrap_without_touching_the_parent() {
    let line = Line([u64::MAX, 0, 0, 0, 0, 0, 0, 0].map(AtomicU64::new));
    line.0[0].store(word_0(u32::MAX - 1, 5), Ordering::Relaxed);
    line.publish(&Header { parent: 5, ..full() });
    assert_eq!((line.version(), line.parent()), (0, 5));
}

#[test]
fn concurrent_reads_are_whole() {
    let line = Line::new();
    // Every field follows from one number.
    let of = |n: u32| Header {
        parent: 1,
        variant: 0,
        first: 9,
        id: n,
        len: n as u16,
        base: !n,
        flags: n as u8,
        mask: u64::from(n) * 3,
        pairs: [Pair { lane: n as u16, cut: !n as u16 }; PAIRS],
        pairs_len: (n % 5) as u8,
        more: u64::from(n) << 20,
    };
    line.publish(&of(0));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = || {
            let (mut reads, mut last) = (0_u64, 0);
            // Relaxed: only ends the loop.
            while !done.load(Ordering::Relaxed) || reads == 0 {
                let Some((version, header)) = line.read() else { continue };
                assert_eq!(header, of(header.id));
                assert!(header.id >= last && version % 2 == 0);
                (last, reads) = (header.id, reads + 1);
            }
        };
        scope.spawn(reader);
        scope.spawn(reader);
        (1..100_000).for_each(|n| line.publish(&of(n)));
        done.store(true, Ordering::Relaxed);
    });
}
