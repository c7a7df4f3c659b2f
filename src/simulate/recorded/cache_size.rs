//! How much a worker's cache holds, from what it still had when a prefix came again.
//!
//! An engine evicts the least recently used blocks. So a prefix survives on the worker that used it last until that
//! worker has taken about as many new tokens as its cache holds. Every recorded decision tells how much of its prompt each
//! worker held: each prefix that comes again is one observation of the new tokens in between, and of whether it survived.

use super::prefixes::{Prefix, Prefixes};

/// A prefix that came again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reuse {
    /// The place of the worker that used it last.
    pub(super) worker: usize,
    /// New tokens on that worker since then.
    pub(super) tokens: f64,
    pub(super) survived: bool,
}

/// The tokens that caches hold, by what survived.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CacheSize {
    /// Tokens; 0 = no prefix came again.
    pub(super) tokens: f64,
    /// Prefixes that came again.
    pub(super) reused: usize,
    /// Those of them that were gone. Without any, the cache holds at least `tokens`.
    pub(super) evicted: usize,
}

/// Follows prefixes over the decisions of a journal.
#[derive(Clone, Debug, Default)]
pub(super) struct ReuseProbe {
    /// By worker: the new tokens that it has taken so far.
    taken: Vec<f64>,
    /// By prefix: the worker that used it last, and what that worker had taken then.
    last: Vec<Option<(u32, f64)>>,
    pub(super) reuses: Vec<Reuse>,
}

impl ReuseProbe {
    /// A worker takes new tokens: an output, or the uncached part of a prompt.
    pub(super) fn take(&mut self, worker: usize, tokens: f64) {
        if self.taken.len() <= worker {
            self.taken.resize(worker + 1, 0.0);
        }
        self.taken[worker] += tokens;
    }

    /// A prompt with this prefix goes to `worker`. `held` gives the tokens of the prompt that a worker holds, if that is
    /// known.
    pub(super) fn prompt(
        &mut self,
        prefixes: &Prefixes,
        (prefix, tokens_each): (Prefix, u32),
        worker: usize,
        held: impl Fn(usize) -> Option<u32>,
    ) {
        if self.last.len() < prefixes.len() {
            self.last.resize(prefixes.len(), None);
        }
        let used = |prefix: &Prefix| Prefixes::place(*prefix).and_then(|place| self.last[place]);
        let known = prefixes.ancestors(prefix).find_map(|prefix| Some((prefix, used(&prefix)?)));
        if let Some((known, (before, taken))) = known
            && let Some(held) = held(before as usize)
        {
            let expected = prefixes.depth(known).saturating_mul(tokens_each);
            let tokens = self.taken.get(before as usize).copied().unwrap_or(0.0) - taken;
            // The end of a chain is evicted first: one that is partly gone tells no more than that it is at the edge.
            let (survived, is_gone) = (held.saturating_add(tokens_each) > expected, held < expected / 2);
            if survived || is_gone {
                self.reuses.push(Reuse { worker: before as usize, tokens, survived });
            }
        }
        let taken = self.taken.get(worker).copied().unwrap_or(0.0);
        for prefix in prefixes.ancestors(prefix) {
            if let Some(place) = Prefixes::place(prefix) {
                self.last[place] = Some((worker as u32, taken));
            }
        }
    }
}

impl CacheSize {
    /// The size that contradicts the fewest observations. `sample` is the share of the load that was recorded: on the
    /// worker, as much more came in between.
    pub(super) fn of(reuses: impl Iterator<Item = Reuse>, sample: f64) -> Self {
        let mut reuses: Vec<(f64, bool)> = reuses.map(|reuse| (reuse.tokens / sample, reuse.survived)).collect();
        reuses.sort_by(|a, b| a.0.total_cmp(&b.0));
        let evicted = reuses.iter().filter(|(_, survived)| !survived).count();
        // With a size below all observations, every survivor contradicts it.
        let mut contradictions = reuses.len() - evicted;
        let (mut least, mut tokens) = (contradictions, 0.0);
        for (at, (distance, survived)) in reuses.iter().enumerate() {
            contradictions = if *survived { contradictions - 1 } else { contradictions + 1 };
            if contradictions < least {
                let next = reuses.get(at + 1).map_or(*distance, |next| next.0);
                (least, tokens) = (contradictions, f64::midpoint(*distance, next));
            }
        }
        Self { tokens, reused: reuses.len(), evicted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reuse(tokens: f64, survived: bool) -> Reuse {
        Reuse { worker: 0, tokens, survived }
    }

    #[test]
    fn the_size_lies_between_what_survived_and_what_did_not() {
        let clear = [reuse(100.0, true), reuse(900.0, true), reuse(1100.0, false), reuse(5000.0, false)];
        let size = CacheSize::of(clear.into_iter(), 1.0);
        assert_eq!(size, CacheSize { tokens: 1000.0, reused: 4, evicted: 2 });
        let of_sample = CacheSize::of(clear.into_iter(), 0.1);
        assert_eq!(of_sample.tokens, 10_000.0);
        let noisy = [clear.as_slice(), &[reuse(50.0, false), reuse(3000.0, true)]].concat();
        assert_eq!(CacheSize::of(noisy.into_iter(), 1.0).tokens, 1000.0);
    }

    #[test]
    fn without_evictions_the_size_is_a_lower_bound() {
        let size = CacheSize::of([reuse(70.0, true), reuse(400.0, true)].into_iter(), 1.0);
        assert_eq!(size, CacheSize { tokens: 400.0, reused: 2, evicted: 0 });
        assert_eq!(CacheSize::of(std::iter::empty(), 1.0), CacheSize::default());
    }

    #[test]
    fn a_prefix_is_looked_for_on_the_worker_that_used_it_last() {
        let (mut prefixes, mut probe) = (Prefixes::new(100), ReuseProbe::default());
        let mut prompt = |identities: &[u64], worker: usize, held: [u32; 2]| {
            let prefix = prefixes.insert(identities);
            probe.prompt(&prefixes, (prefix, 10), worker, |worker| Some(held[worker]));
            probe.take(worker, 10.0 * identities.len() as f64);
        };
        prompt(&[1, 2, 3], 1, [0, 0]);
        prompt(&[7], 1, [0, 0]);
        prompt(&[1, 2, 4], 0, [0, 20]);
        prompt(&[1, 2, 3], 0, [0, 0]);
        assert_eq!(
            probe.reuses,
            [Reuse { worker: 1, tokens: 40.0, survived: true }, Reuse { worker: 1, tokens: 40.0, survived: false }]
        );
    }
}
