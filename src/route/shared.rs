//! What a cache shared by all workers holds of a prompt, as its gateway says.

use crate::error::{Error, Kind, Result};

/// Ranges of blocks in order, none touching another, with how many blocks lie in each and behind it.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedHits {
    /// Start, end, and blocks from the start of this range to the end of the last.
    ranges: Vec<(u32, u32, u32)>,
}

impl SharedHits {
    /// Takes half-open ranges in any order, which may overlap; what lies beyond `whole_blocks` is left out.
    ///
    /// # Errors
    /// `InvalidArgument` if a range ends before it starts.
    pub(super) fn set(&mut self, ranges: &[(u32, u32)], whole_blocks: u32) -> Result<()> {
        self.ranges.clear();
        if let Some((start, end)) = ranges.iter().find(|(start, end)| start > end) {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!("a range of shared_hits starts at {start} and ends at {end}"),
                "give ranges as [start, end)",
            ));
        }
        let within = |&(start, end): &(u32, u32)| (start, end.min(whole_blocks), 0);
        self.ranges.extend(ranges.iter().map(within).filter(|(start, end, _)| start < end));
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, before| {
            let touches = next.0 <= before.1;
            if touches {
                before.1 = before.1.max(next.1);
            }
            touches
        });
        let mut behind = 0;
        for (start, end, blocks) in self.ranges.iter_mut().rev() {
            behind += *end - *start;
            *blocks = behind;
        }
        Ok(())
    }

    /// Blocks in the ranges that are not among the first `depth` of the prompt.
    pub(super) fn beyond(&self, depth: u32) -> u32 {
        let from = self.ranges.partition_point(|(_, end, _)| *end <= depth);
        self.ranges.get(from).map_or(0, |(start, _, blocks)| blocks - depth.saturating_sub(*start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_are_counted_as_one_by_one(
            ranges in proptest::collection::vec((0_u32..40, 0_u32..12), 0..6),
            whole_blocks in 0_u32..40,
        ) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, blocks)| (start, start + blocks)).collect();
            let mut hits = SharedHits::default();
            hits.set(&ranges, whole_blocks).unwrap();
            for depth in 0..45 {
                let held = |block: &u32| ranges.iter().any(|(start, end)| (start..end).contains(&block));
                prop_assert_eq!(hits.beyond(depth) as usize, (depth..whole_blocks).filter(held).count());
            }
        }
    }

    #[test]
    fn a_range_that_ends_before_it_starts_is_refused() {
        assert_eq!(SharedHits::default().set(&[(0, 1), (3, 2)], 9).unwrap_err().kind(), Kind::InvalidArgument);
    }
}
