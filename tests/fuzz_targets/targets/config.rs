//! Configuration files: accepted values are within their bounds, a refusal says where.

use std::collections::BTreeSet;

use kvrouted::config::{self, Config, Flags};
use kvrouted::limits;

/// Text as the file, and again as a worker on the command line.
pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    check(config::parse("fuzz.toml", text, &Flags::default()), text);
    let first = text.lines().next().unwrap_or_default();
    let flags = Flags { settings: Vec::new(), workers: vec![first.to_owned()] };
    check(config::parse("fuzz.toml", "", &flags), "");
}

fn check(outcome: Result<Config, config::Problems>, text: &str) {
    match outcome {
        Ok(config) => is_within_bounds(&config),
        Err(problems) => {
            assert!(!problems.list.is_empty() && !problems.to_string().is_empty());
            let lines = text.lines().count() as u32 + 1;
            for problem in &problems.list {
                assert!(problem.line().is_none_or(|line| (1..=lines).contains(&line)), "{problem:?} of {lines} lines");
                assert!(!problem.message.is_empty());
            }
        }
    }
}

fn is_within_bounds(config: &Config) {
    assert!((1..=limits::SPACES_MAX).contains(&config.spaces.len()) && config.workers.len() <= limits::WORKERS_MAX);
    assert!((1..=limits::SHARDS_MAX).contains(&usize::from(config.ingest.shards)));
    assert!(usize::from(config.serve.cores) <= limits::CORES_MAX);
    assert!(config.serve.frame_body_bytes_max <= limits::FRAME_BODY_BYTES_CEILING);
    assert!(config.serve.drain_ms_max <= limits::DRAIN_MS_CEILING);
    assert!(config.ingest.silence_ms_max <= limits::EVENTS_MS_CEILING);
    assert!(config.spaces.iter().all(|space| space.block_size <= limits::BLOCK_SIZE_TOKENS_MAX));
    assert!(config.spaces.iter().all(|space| space.memory_bytes_max <= limits::SPACE_MEMORY_BYTES_CEILING));
    let workers: BTreeSet<_> = config.workers.iter().map(|worker| (worker.worker.id, worker.worker.rank)).collect();
    assert_eq!(workers.len(), config.workers.len(), "every worker is there once");
    for worker in &config.workers {
        assert!((worker.space.0 as usize) < config.spaces.len(), "{worker:?}");
        assert!(worker.blocks_max <= limits::WORKER_BLOCKS_CEILING && worker.taints.len() <= limits::TAINTS_MAX);
        assert!(worker.weight.is_finite() && worker.weight > 0.0, "{worker:?}");
    }
}
