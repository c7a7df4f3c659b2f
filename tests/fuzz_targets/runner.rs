//! Runs fuzz targets over their seeds and over mutations of them, the same ones in each run. The gateway's fuzz targets
//! share this file.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use crate::mutator::Mutator;

/// Mutations of each target, unless `KVROUTED_MUTATIONS` sets their number.
const MUTATIONS: u64 = 3000;
/// A target has at least this many seeds.
const SEEDS_MIN: usize = 4;

/// A function of any bytes, by its name.
type Named = (&'static str, fn(&[u8]));

/// Makes a test of each target, a test that no target of `targets::ALL` is left out, and a test of the seeds. The function
/// `$seeds` gives the seeds of a target by its name.
macro_rules! fuzzed {
    ($seeds:path; $($name:ident)*) => {
        $(#[test]
        fn $name() {
            $crate::runner::fuzz(targets::ALL, stringify!($name), &$seeds(stringify!($name)));
        })*

        #[test]
        fn no_target_is_left_out() {
            let names: Vec<_> = targets::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }

        #[test]
        fn seeds() {
            targets::ALL.iter().for_each(|(name, _)| $crate::runner::write_seeds(name, &$seeds(name)));
        }
    };
}

pub(crate) use fuzzed;

/// Runs the target of a name over its seeds and their mutations.
pub(crate) fn fuzz(targets: &[Named], name: &str, seeds: &[Vec<u8>]) {
    let (_, target) = targets.iter().find(|(of, _)| *of == name).expect("a target");
    for (at, seed) in seeds.iter().enumerate() {
        run(*target, seed, &format!("{name}: seed {at}"));
    }
    let set = std::env::var("KVROUTED_MUTATIONS").ok();
    let mutations = set.map_or(MUTATIONS, |number| number.parse().expect("KVROUTED_MUTATIONS is a number"));
    let mut mutator = Mutator::new(seeds, 1);
    for at in 0..mutations {
        run(*target, &mutator.next(), &format!("{name}: mutation {at}"));
    }
}

fn run(target: fn(&[u8]), data: &[u8], what: &str) {
    // The panic has printed its message by then. This one adds the bytes, as a byte string of Rust.
    if catch_unwind(AssertUnwindSafe(|| target(data))).is_err() {
        panic!("{what}, {} bytes: b\"{}\"", data.len(), data.escape_ascii());
    }
}

/// Checks the seeds of a target, and writes them to `KVROUTED_SEEDS_FOLDER` if it is set.
pub(crate) fn write_seeds(name: &str, seeds: &[Vec<u8>]) {
    assert!(seeds.len() >= SEEDS_MIN && seeds.iter().all(|seed| !seed.is_empty()), "{name}: {} seeds", seeds.len());
    let Some(folder) = std::env::var_os("KVROUTED_SEEDS_FOLDER") else { return };
    let folder = PathBuf::from(folder).join(name);
    std::fs::create_dir_all(&folder).expect("a folder for seeds");
    for (at, seed) in seeds.iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{at:03}")), seed).expect("a seed is written");
    }
}
