//! What a lane speaks of: one of the tiers, or the windows of the device tier.

use crate::ids::Tier;

/// One set of blocks that a worker has. A block is in it while every group of the layer refers to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    Device,
    Host,
    Disk,
    External,
    /// Blocks of the device tier that sliding-window groups have. A prompt needs only the last of them.
    Windows,
}

impl Layer {
    /// How many layers there are.
    pub(super) const COUNT: usize = 5;
    /// How many sets of layers there are.
    pub(super) const SETS: usize = 1 << Self::COUNT;

    pub(super) const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk, Self::External, Self::Windows];

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

impl From<Tier> for Layer {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Device => Self::Device,
            Tier::Host => Self::Host,
            Tier::Disk => Self::Disk,
            Tier::External => Self::External,
        }
    }
}
