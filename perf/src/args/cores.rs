//! Arguments of `cores`.

use clap::Args;

use super::{OutputArgs, TapeArgs};

/// Arguments of `cores`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CoresArgs {
    /// What decides the tape.
    #[command(flatten)]
    pub(crate) tape: TapeArgs,
    /// Numbers of serving threads. One thread is always measured: the model needs it.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) threads: Vec<u16>,
    /// Numbers of shards. One shard is always measured: speed-ups need it.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,2,4",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) shards: Vec<u16>,
    /// Seconds of each measurement of decisions.
    #[arg(long, default_value_t = 1.0, value_parser = super::parse_seconds)]
    pub(crate) seconds: f64,
    /// Times everything is measured; medians are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Requests in flight, over all threads; each thread has at least one.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) in_flight: u32,
    /// What becomes of the report.
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl CoresArgs {
    /// Numbers of serving threads, ascending, each once, one thread first.
    #[must_use]
    pub(crate) fn ascending_threads(&self) -> Vec<u16> {
        ascending_from_one(&self.threads)
    }

    /// Numbers of shards, ascending, each once, one shard first.
    #[must_use]
    pub(crate) fn ascending_shards(&self) -> Vec<u16> {
        ascending_from_one(&self.shards)
    }
}

fn ascending_from_one(numbers: &[u16]) -> Vec<u16> {
    let mut ascending: Vec<u16> = numbers.iter().copied().chain([1]).collect();
    ascending.sort_unstable();
    ascending.dedup();
    ascending
}

#[cfg(test)]
mod tests {
    use super::ascending_from_one;

    #[test]
    fn one_is_always_first() {
        assert_eq!(ascending_from_one(&[8, 2, 2]), [1, 2, 8]);
        assert_eq!(ascending_from_one(&[4, 1]), [1, 4]);
    }
}
