//! Every fuzz target of the gateway over its seeds and some thousand mutations of them, the same ones in each run.
//!
//! `KVROUTED_MUTATIONS` sets their number (3000). libFuzzer goes further (`scripts/fuzz`); it begins with the seeds that a
//! test writes to `KVROUTED_SEEDS_FOLDER`.

#[path = "../../tests/fuzz_targets/mutator.rs"]
mod mutator;
#[path = "epp/kit.rs"]
mod player;
#[path = "fuzz_targets/seeds.rs"]
mod seeds;
#[path = "fuzz_targets/targets/mod.rs"]
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use mutator::Mutator;

const MUTATIONS: u64 = 3000;

fn run(target: targets::Target, data: &[u8], what: &str) {
    // What is wrong has been said by then; this says with what.
    if catch_unwind(AssertUnwindSafe(|| target(data))).is_err() {
        panic!("{what}, {} bytes: {}", data.len(), data.escape_ascii());
    }
}

fn fuzz(name: &str) {
    let (_, target) = targets::ALL.iter().find(|(of, _)| *of == name).expect("a target");
    let seeds = seeds::of(name);
    for (at, seed) in seeds.iter().enumerate() {
        run(*target, seed, &format!("{name}: seed {at}"));
    }
    let set = std::env::var("KVROUTED_MUTATIONS").ok();
    let mutations = set.map_or(MUTATIONS, |number| number.parse().expect("KVROUTED_MUTATIONS is a number"));
    let mut mutator = Mutator::new(&seeds, 1);
    for at in 0..mutations {
        run(*target, &mutator.next(), &format!("{name}: mutation {at}"));
    }
}

macro_rules! fuzzed {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        #[test]
        fn no_target_is_left_out() {
            let names: Vec<_> = targets::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

fuzzed!(openai_body openai_reply engine_replies renders watch ext_proc chat_template log_line gateway_config);

#[test]
fn seeds() {
    let folder = std::env::var_os("KVROUTED_SEEDS_FOLDER").map(PathBuf::from);
    for (name, _) in targets::ALL {
        let seeds = seeds::of(name);
        assert!(seeds.len() >= 4 && seeds.iter().all(|seed| !seed.is_empty()), "{name}: {} seeds", seeds.len());
        let Some(folder) = folder.as_deref().map(|folder| folder.join(name)) else { continue };
        std::fs::create_dir_all(&folder).expect("a folder for seeds");
        for (at, seed) in seeds.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{at:03}")), seed).expect("a seed is written");
        }
    }
}
