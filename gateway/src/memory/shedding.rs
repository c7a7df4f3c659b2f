//! What is given up while the resident memory is near the budget: pure, one look after another.
//!
//! | at this share of the budget | is given up | until below, for some looks in a row |
//! |---|---|---|
//! | 85 % | the cache of rendered prompts | 80 % |
//! | 92 % | new requests: 503 with `Retry-After` | 87 % |

use crate::limits::{MEMORY_RESUME_BELOW_PERCENT, MEMORY_RESUME_LOOKS, MEMORY_SHED_AT_PERCENT};

/// Something that is given up, in the order in which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shed {
    TokenCache,
    Requests,
}

impl Shed {
    pub(crate) const ALL: [Self; 2] = [Self::TokenCache, Self::Requests];

    /// The name in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::TokenCache => "token_cache",
            Self::Requests => "requests",
        }
    }

    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::TokenCache => "the cache of rendered prompts is kept empty",
            Self::Requests => "new requests are refused",
        }
    }
}

/// How much is given up now.
#[derive(Debug, Default)]
pub(crate) struct Shedding {
    level: usize,
    calm_looks: u32,
}

impl Shedding {
    /// Takes a look. What begins (`true`) or ends then, at most one thing.
    pub(crate) fn look(&mut self, used: u64, bytes_max: u64) -> Option<(Shed, bool)> {
        let share = (u128::from(used) * 100 / u128::from(bytes_max.max(1))) as u64;
        if let Some(next) = Shed::ALL.get(self.level)
            && share >= MEMORY_SHED_AT_PERCENT[self.level]
        {
            (self.level, self.calm_looks) = (self.level + 1, 0);
            return Some((*next, true));
        }
        let last = self.level.checked_sub(1)?;
        if share >= MEMORY_RESUME_BELOW_PERCENT[last] {
            self.calm_looks = 0;
            return None;
        }
        self.calm_looks += 1;
        if self.calm_looks < MEMORY_RESUME_LOOKS {
            return None;
        }
        (self.level, self.calm_looks) = (last, 0);
        Some((Shed::ALL[last], false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_goes_first_and_comes_back_last() {
        let mut shedding = Shedding::default();
        let mut look = |used| shedding.look(used, 100);
        assert_eq!([look(84), look(85), look(85), look(91)], [None, Some((Shed::TokenCache, true)), None, None]);
        assert_eq!([look(92), look(99), look(88)], [Some((Shed::Requests, true)), None, None]);
        for _ in 1..MEMORY_RESUME_LOOKS {
            assert_eq!(look(86), None);
        }
        assert_eq!(look(87), None, "not in a row");
        let mut calm = |used| (0..MEMORY_RESUME_LOOKS).filter_map(|_| look(used)).collect::<Vec<_>>();
        assert_eq!(calm(86), [(Shed::Requests, false)]);
        assert_eq!(calm(80), []);
        assert_eq!(calm(79), [(Shed::TokenCache, false)]);
        assert_eq!(calm(0), []);
    }
}
