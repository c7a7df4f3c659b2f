use super::*;
use crate::index::header::LEAF;
use crate::index::reclaim::{Garbage, Reclaimer};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

type Key = (u32, u64, u8);

fn node((parent, first, variant): Key, id: u32) -> Header {
    Header { parent, first, variant, id, len: 1, flags: LEAF, mask: u64::from(id) << 8, ..Header::default() }
}

/// Random numbers that are the same each time.
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// What readers find equals what the writer finds.
fn found(writer: &TableWriter, (parent, first, variant): Key) -> Option<Header> {
    let by_writer = writer.find(parent, first, variant).map(|index| writer.header(index));
    let by_reader = match writer.head.find(writer.table(), parent, first, variant) {
        Found::Here(line, version, header) => {
            assert_eq!(line.version(), version);
            Some(header)
        }
        Found::Missing => None,
        Found::Busy => panic!("nothing is being changed"),
    };
    assert_eq!(by_reader, by_writer);
    by_reader
}

#[test]
fn a_new_table_is_aligned_empty_and_small() {
    let writer = TableWriter::new(0, 1);
    assert_eq!((writer.len(), writer.lines(), writer.bytes()), (0, LINES_MIN, 512 + 64));
    assert!(writer.is_empty() && writer.headers().next().is_none());
    assert_eq!(writer.table().lines().as_ptr().addr() % 64, 0);
    assert!(found(&writer, (1, 2, 3)).is_none());
}

#[test]
fn a_table_equals_a_map() {
    for secret in 0..8_u64 {
        let (mut seed, mut model) = (secret + 1, BTreeMap::new());
        let mut writer = TableWriter::new(0, secret);
        for step in 0..6_000_u32 {
            // Waves, so that the table fills, empties and is cleaned.
            let bound = if step / 1_000 % 2 == 0 { 400 } else { 40 };
            let random = next(&mut seed);
            let key = (random as u32 % 3, random >> 32 & 127, (random >> 8) as u8 % 2);
            let (parent, first, variant) = key;
            match writer.find(parent, first, variant) {
                Some(index) if model.len() > bound || random & 1 << 20 == 0 => {
                    writer.remove(index);
                    model.remove(&key);
                }
                Some(index) => {
                    writer.update(index, &node(key, step));
                    model.insert(key, node(key, step));
                }
                None if model.len() <= bound => {
                    let (index, retired) = writer.insert(&node(key, step));
                    assert_eq!(writer.header(index), node(key, step));
                    drop(retired);
                    model.insert(key, node(key, step));
                }
                None => {}
            }
            assert_eq!(found(&writer, key), model.get(&key).copied());
            assert_eq!(writer.len(), model.len());
            assert!((writer.used + writer.parts[0].tombstones) * LOAD_LINES <= writer.lines() * LOAD_USED_MAX);
        }
        let mut all: Vec<Header> = writer.headers().map(|(_, header)| header).collect();
        all.sort_unstable_by_key(|header| (header.parent, header.first, header.variant));
        assert_eq!(all, model.values().copied().collect::<Vec<_>>());
        assert!(model.iter().all(|(key, header)| found(&writer, *key) == Some(*header)));
        let tombstones = writer.table().lines().iter().filter(|line| line.parent() == PARENT_TOMBSTONE).count();
        assert_eq!(writer.parts[0].tombstones, tombstones);
    }
}

#[test]
fn an_emptied_table_has_no_tombstones() {
    for forwards in [true, false] {
        let mut writer = TableWriter::new(1_000, 7);
        (0..1_000).for_each(|first| assert!(writer.insert(&node((1, first, 0), 1)).1.is_none()));
        let order = |step: u64| if forwards { step } else { 999 - step };
        for step in 0..1_000 {
            let index = writer.find(1, order(step), 0);
            writer.remove(index.unwrap());
        }
        // A tombstone has a node behind it on its path, so an empty table has none.
        assert_eq!((writer.len(), writer.parts[0].tombstones), (0, 0));
        assert!(writer.table().lines().iter().all(|line| line.parent() == PARENT_EMPTY));
    }
}

#[test]
fn tombstones_are_cleaned_without_growing() {
    let mut writer = TableWriter::new(100, 3);
    let lines = writer.lines();
    (0..100).for_each(|first| drop(writer.insert(&node((1, first, 0), 1))));
    for first in 100..20_000_u64 {
        let index = writer.find(1, first - 100, 0);
        writer.remove(index.unwrap());
        drop(writer.insert(&node((1, first, 0), 1)));
        assert!(writer.lines() <= 2 * lines);
    }
    assert!((19_900..20_000).all(|first| found(&writer, (1, first, 0)).is_some()));
    assert_eq!(writer.len(), 100);
}

#[test]
fn reserved_room_suffices() {
    let mut writer = TableWriter::new(0, 3);
    for more in [1, 5, 100, 3] {
        let (expected, generation) = (writer.growth_bytes(more), writer.generation());
        let before = writer.bytes();
        match writer.reserve(more) {
            Some(retired) => {
                assert_eq!((retired.bytes(), writer.bytes()), (before, expected));
                assert_eq!(writer.generation(), generation + 1);
            }
            None => assert_eq!((expected, writer.generation()), (0, generation)),
        }
        let from = writer.len() as u64;
        let indexes: Vec<usize> = (from..from + more as u64)
            .map(|first| {
                let (index, retired) = writer.insert(&node((1, first, 0), first as u32));
                assert!(retired.is_none());
                index
            })
            .collect();
        for (first, index) in (from..).zip(indexes) {
            assert_eq!(writer.header(index), node((1, first, 0), first as u32));
        }
    }
}

#[test]
fn an_open_node_is_busy_and_its_neighbours_are_not() {
    let mut writer = TableWriter::new(50, 11);
    (0..50).for_each(|first| drop(writer.insert(&node((1, first, 0), 1))));
    let index = writer.find(1, 7, 0).unwrap();
    writer.open(index);
    for first in 0..60 {
        match writer.head.find(writer.table(), 1, first, 0) {
            Found::Busy => assert_eq!(first, 7),
            Found::Here(..) => assert!(first < 50 && first != 7),
            Found::Missing => assert!(first >= 50),
        }
    }
    // An open node stays open when the table is replaced.
    let _retired = writer.reserve(1_000).unwrap();
    let index = writer.find(1, 7, 0).unwrap();
    assert!(matches!(writer.head.find(writer.table(), 1, 7, 0), Found::Busy));
    writer.write(index, &node((1, 7, 0), 2));
    writer.close(index);
    assert_eq!(found(&writer, (1, 7, 0)), Some(node((1, 7, 0), 2)));
}

#[test]
fn the_secret_decides_where_nodes_go() {
    let path =
        |secret, first| TableWriter::new(1 << 16, secret).table().path(Keys::new(secret).hash(3, first, 0)).next();
    assert!((0..20).any(|first| path(1, first) != path(2, first)));
    assert_eq!(path(1, 5), path(1, 5));
}

/// Lines that a search visits, on average, at the greatest load.
fn probes_mean(key: impl Fn(u64) -> Key) -> f64 {
    let writer = TableWriter::new((1 << 13) * LOAD_USED_MAX / LOAD_LINES, 99);
    let table = writer.table();
    assert_eq!(table.lines().len(), 1 << 14);
    let nodes = (1 << 14) * LOAD_USED_MAX / LOAD_LINES;
    let mut probes = 0;
    for (parent, first, variant) in (0..nodes as u64).map(key) {
        let hash = writer.hash(parent, first, variant);
        let at = vacancy(table, hash).expect("it is never full");
        probes += 1 + table.path(hash).position(|other| other == at).expect("it is on the path");
        table.line(at).publish(&node((parent, first, variant), 1));
    }
    probes as f64 / nodes as f64
}

#[test]
fn keys_spread_whatever_their_structure() {
    // Linear probing over random homes needs (1 + 1 / (1 - load)) / 2 = 1.75 lines.
    let mut seed = 5;
    let random: Vec<u64> = (0..1 << 14).map(|_| next(&mut seed)).collect();
    let shapes: [(&str, f64); 6] = [
        ("random", probes_mean(|n| (1, random[n as usize], 0))),
        ("counted firsts", probes_mean(|n| (1, n, 0))),
        ("counted parents", probes_mean(|n| (n as u32, 77, 0))),
        ("both counted", probes_mean(|n| (n as u32, n, 0))),
        ("high bits only", probes_mean(|n| (1, n << 48, 0))),
        ("few of each", probes_mean(|n| ((n >> 8) as u32, n & 63, (n >> 6) as u8 & 3))),
    ];
    for (shape, probes) in shapes {
        assert!(probes < 2.3, "{shape}: {probes}");
    }
}

#[test]
fn an_insert_moves_the_lines_of_one_segment_at_most() {
    const NODES: u64 = 200_000;
    let mut writer = TableWriter::segmented(SEGMENT_BITS, 0, 3, Rows::new());
    let empty_bytes = writer.bytes();
    for first in 0..NODES {
        let generation = writer.generation();
        drop(writer.insert(&node((1, first, 0), first as u32)));
        assert!(writer.generation() <= generation + 1);
    }
    assert!(writer.moved_most <= (4 * NODES as usize) >> SEGMENT_BITS, "{} lines were moved", writer.moved_most);
    assert!(writer.bytes() <= 7 * 64 * NODES, "{} bytes for {NODES} nodes", writer.bytes());
    assert!((0..NODES).all(|first| writer.find(1, first, 0).is_some_and(|at| writer.id(at) == first as u32)));
    // An emptied table frees its lines, a segment at a time.
    for first in 0..NODES {
        let index = writer.find(1, first, 0);
        writer.remove(index.unwrap());
    }
    while let Some(retired) = writer.shrink() {
        drop(retired);
    }
    assert_eq!((writer.len(), writer.bytes()), (0, empty_bytes));
}

/// One thread grows, fills and empties the table; others walk two hops in it. A child is there whenever its
/// parent says so, and a node's header is whole.
#[test]
fn readers_find_what_is_there_while_the_table_changes() {
    const TREES: u64 = 40;
    let reclaimer = Reclaimer::new();
    let mut writer = TableWriter::new(0, 5);
    // SAFETY: all retired tables go to garbage of this reclaimer, below.
    let view = unsafe { TableView::new(Arc::clone(writer.head()), reclaimer.clone()) };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader_seed in 1..=2 {
            let (view, done, reader) = (view.clone(), &done, reclaimer.reader());
            scope.spawn(move || {
                let mut seed = reader_seed;
                // Relaxed: only ends the loop.
                while !done.load(Ordering::Relaxed) {
                    let tree = next(&mut seed) % TREES;
                    let guard = reader.enter();
                    let Some(generation) = view.generation() else { continue };
                    let table = view.load(&guard);
                    let Found::Here(line, version, above) = table.find(0, tree, 0) else { continue };
                    assert_eq!(above.mask, u64::from(above.id) << 8);
                    let below = table.find(above.id, tree, 0);
                    let is_same = table.version(line) == version && view.generation() == Some(generation);
                    match below {
                        Found::Here(_, _, header) if is_same => assert_eq!(header.base, above.id),
                        Found::Missing => assert!(!is_same || above.has(LEAF)),
                        _ => {}
                    }
                }
            });
        }
        // A failed assertion there must also end the readers.
        let written = std::panic::catch_unwind(AssertUnwindSafe(|| write_trees(&mut writer, &reclaimer, TREES)));
        done.store(true, Ordering::Relaxed);
        written.unwrap();
    });
}

/// Adds trees of two nodes, deepest first, and takes them away, nearest the root first. Others come and go between,
/// so that the table is replaced.
fn write_trees(writer: &mut TableWriter, reclaimer: &Reclaimer, trees: u64) {
    let mut garbage: Garbage<Retired> = Garbage::new(reclaimer);
    let (mut seed, mut id) = (9, 1);
    for step in 0..30_000_u64 {
        let tree = next(&mut seed) % trees;
        if let Some(index) = writer.find(0, tree, 0) {
            let above = writer.header(index);
            writer.remove(index);
            let index = writer.find(above.id, tree, 0).expect("trees have two nodes");
            writer.remove(index);
        } else {
            id += 1;
            for header in
                [Header { base: id, ..node((id, tree, 0), id) }, Header { flags: 0, ..node((0, tree, 0), id) }]
            {
                let (_, retired) = writer.insert(&header);
                if let Some(retired) = retired {
                    let bytes = retired.bytes();
                    garbage.push(retired, bytes);
                    garbage.flush_now();
                }
            }
        }
        if step % 500 == 0 {
            let retired = writer.reserve(100 + step as usize / 4);
            retired.into_iter().for_each(|retired| garbage.push(retired, 64));
            garbage.flush_now();
            garbage.collect(drop);
        }
    }
    assert!(writer.generation() > 3);
}
