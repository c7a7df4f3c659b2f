//! What a reading means, and when there should have been one: pure.

use crate::event::msgpack::LoadStat;
use crate::ids::Scheme;
use crate::limits::{LOAD_REPORT_SILENT_MS, NOMINAL_BLOCK_SIZE_TOKENS};
use crate::load::EngineLoad;

/// A reading as loads have it. Without a scheme a block is as large as decisions take it to be then.
pub(super) fn engine_load(stat: &LoadStat, scheme: Option<Scheme>) -> EngineLoad {
    let block_size = scheme.map_or(NOMINAL_BLOCK_SIZE_TOKENS, |scheme| scheme.block_size);
    let millionths = u128::from(stat.used_tokens) * 1_000_000;
    // An engine that does not know its room says 0.
    let usage = millionths.checked_div(u128::from(stat.capacity_tokens)).unwrap_or(0);
    EngineLoad {
        prefill_tokens: stat.waiting_uncached_tokens,
        decode_blocks: stat.used_tokens.div_ceil(u64::from(block_size.max(1))),
        running: stat.running,
        waiting: stat.waiting,
        kv_usage_millionths: u32::try_from(usage).unwrap_or(u32::MAX),
    }
}

/// Whether an engine is heard. It says at least each second what it is busy with, also if that is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hearing {
    /// Not for so long that it would be wrong to call it silent; since then, milliseconds.
    Waiting { since_ms: u64 },
    /// Its last reading came then.
    Heard { at_ms: u64 },
    /// For too long not; said once.
    Silent,
}

impl Hearing {
    /// A reading has come; `true` = it was silent before.
    pub(super) fn hear(&mut self, now_ms: u64) -> bool {
        std::mem::replace(self, Self::Heard { at_ms: now_ms }) == Self::Silent
    }

    /// Time has passed; `true` = it is silent from now on.
    pub(super) fn tick(&mut self, now_ms: u64) -> bool {
        let (Self::Waiting { since_ms: last_ms } | Self::Heard { at_ms: last_ms }) = *self else { return false };
        let silent = now_ms.saturating_sub(last_ms) >= LOAD_REPORT_SILENT_MS;
        if silent {
            *self = Self::Silent;
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Window;

    #[test]
    fn tokens_become_blocks_and_a_share() {
        let stat = LoadStat {
            running: 3,
            waiting: 2,
            used_tokens: 70_001,
            capacity_tokens: 400_000,
            waiting_uncached_tokens: 9_000,
        };
        let scheme = Some(Scheme { block_size: 64, window: Window::Plain });
        let load = EngineLoad {
            prefill_tokens: 9_000,
            decode_blocks: 1_094,
            running: 3,
            waiting: 2,
            kv_usage_millionths: 175_002,
        };
        assert_eq!(engine_load(&stat, scheme), load);
        assert_eq!(engine_load(&stat, None).decode_blocks, 4_376);
        let vast = LoadStat { used_tokens: u64::MAX, capacity_tokens: 1, ..stat };
        assert_eq!(engine_load(&vast, scheme).kv_usage_millionths, u32::MAX);
        let unknown = LoadStat { capacity_tokens: 0, ..stat };
        assert_eq!(engine_load(&unknown, scheme).kv_usage_millionths, 0);
    }

    #[test]
    fn silence_is_said_once_and_so_is_its_end() {
        let mut hearing = Hearing::Waiting { since_ms: 5 };
        assert!(!hearing.tick(LOAD_REPORT_SILENT_MS + 4));
        assert!(hearing.tick(LOAD_REPORT_SILENT_MS + 5));
        assert!(!hearing.tick(u64::MAX));
        assert!(hearing.hear(90_000));
        assert!(!hearing.hear(91_000));
        assert!(!hearing.tick(91_000 + LOAD_REPORT_SILENT_MS - 1));
        assert!(hearing.tick(91_000 + LOAD_REPORT_SILENT_MS));
    }
}
