//! How large the rings of a lane are, and where they lie.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::limits::{LANE_CONTROL_BYTES, LANE_RING_BYTES_CEILING, LANE_RING_BYTES_DEFAULT, LANE_RING_BYTES_MIN};

/// The version of what is described here; a gateway that does not know it must not map the memory.
pub const LANE_LAYOUT: u16 = 1;
/// Words before the rings.
const CONTROL_WORDS: usize = LANE_CONTROL_BYTES / 8;
/// Words between two that are written by different sides: two cache lines, as they are fetched in pairs.
const APART_WORDS: usize = 16;

/// The sizes of a lane's two rings, bytes. Powers of two, within bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSizes {
    request_bytes: u32,
    reply_bytes: u32,
}

/// The words of a lane's memory, in this order, each [`APART_WORDS`] from the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    RequestTail,
    RequestHead,
    ReplyTail,
    ReplyHead,
    GatewayWaits,
    DaemonWaits,
}

impl Place {
    pub(super) const fn word(self) -> usize {
        self as usize * APART_WORDS
    }
}

impl LaneSizes {
    /// What a gateway asks for, 0 = whatever is usual, where no ring may be larger than `bytes_max`.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] with the sizes that can be had.
    pub fn asked(request_bytes: u32, reply_bytes: u32, bytes_max: u32) -> Result<Self> {
        let usual = |bytes: u32| if bytes == 0 { LANE_RING_BYTES_DEFAULT.min(bytes_max) } else { bytes };
        let (request_bytes, reply_bytes) = (usual(request_bytes), usual(reply_bytes));
        for bytes in [request_bytes, reply_bytes] {
            if !bytes.is_power_of_two() || !(LANE_RING_BYTES_MIN..=bytes_max).contains(&bytes) {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!("a ring of {bytes} bytes"),
                    format!("ask for a power of two from {LANE_RING_BYTES_MIN} to {bytes_max}, or for 0"),
                ));
            }
        }
        Ok(Self { request_bytes, reply_bytes })
    }

    /// What a daemon says that a lane has.
    ///
    /// # Errors
    /// As [`LaneSizes::asked`].
    pub fn told(request_bytes: u32, reply_bytes: u32) -> Result<Self> {
        Self::asked(request_bytes, reply_bytes, LANE_RING_BYTES_CEILING)
    }

    /// Bytes of the ring by which requests come.
    #[must_use]
    pub const fn request_bytes(self) -> u32 {
        self.request_bytes
    }

    /// Bytes of the ring by which replies go.
    #[must_use]
    pub const fn reply_bytes(self) -> u32 {
        self.reply_bytes
    }

    /// Bytes of the lane's memory.
    #[must_use]
    pub const fn memory_bytes(self) -> usize {
        LANE_CONTROL_BYTES + self.request_bytes as usize + self.reply_bytes as usize
    }

    pub(super) const fn request_words(self) -> Range<usize> {
        CONTROL_WORDS..CONTROL_WORDS + self.request_bytes as usize / 8
    }

    pub(super) const fn reply_words(self) -> Range<usize> {
        let start = self.request_words().end;
        start..start + self.reply_bytes as usize / 8
    }
}

const _: () = assert!(Place::DaemonWaits.word() + APART_WORDS <= CONTROL_WORDS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_within_bounds_and_rings_do_not_overlap() {
        let usual = LaneSizes::asked(0, 0, LANE_RING_BYTES_CEILING).unwrap();
        assert_eq!([usual.request_bytes(), usual.reply_bytes()], [LANE_RING_BYTES_DEFAULT; 2]);
        assert_eq!(LaneSizes::asked(0, 0, 8192).unwrap().request_bytes(), 8192, "no more than is allowed");
        for refused in [1, 4095, 4097, 6000, 2 * 8192, u32::MAX, 1 << 31] {
            assert_eq!(LaneSizes::asked(refused, 0, 8192).unwrap_err().kind(), Kind::InvalidArgument);
            assert_eq!(LaneSizes::asked(0, refused, 8192).unwrap_err().kind(), Kind::InvalidArgument);
        }
        let sizes = LaneSizes::asked(4096, 8192, 8192).unwrap();
        assert_eq!((sizes.request_words().len() * 8, sizes.reply_words().len() * 8), (4096, 8192));
        assert_eq!(sizes.reply_words().end * 8, sizes.memory_bytes());
        assert_eq!(sizes.request_words().end, sizes.reply_words().start);
    }
}
