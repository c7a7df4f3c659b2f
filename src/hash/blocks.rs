//! The position of each block in the bytes of a prompt.

use super::{TOKEN_BYTES, block_count};
use crate::ids::{Scheme, Window};

/// `count` blocks of `window` bytes, each `stride` bytes after the one before. All of them lie in `bytes`.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    bytes: &'a [u8],
    stride: usize,
    window: usize,
    count: usize,
}

impl<'a> Blocks<'a> {
    /// The whole blocks of a prompt. Blocks of a bigram scheme overlap by one token.
    pub(super) fn of_tokens(scheme: Scheme, tokens_le: &'a [u8]) -> Self {
        let count = block_count(tokens_le.len() / TOKEN_BYTES, scheme);
        let stride = scheme.block_size as usize * TOKEN_BYTES;
        let window = match scheme.window {
            Window::Plain => stride,
            Window::Bigram => stride + TOKEN_BYTES,
        };
        Self::new(tokens_le, stride, window, count)
    }

    /// The whole blocks in `bytes`, one after the other; `window` is at least 1.
    pub(super) fn side_by_side(bytes: &'a [u8], window: usize) -> Self {
        Self::new(bytes, window, window, bytes.len() / window)
    }

    /// Panics if the last block would end after `bytes`: the vector implementations read without another check.
    pub(super) fn new(bytes: &'a [u8], stride: usize, window: usize, count: usize) -> Self {
        if let Some(before_last) = count.checked_sub(1) {
            let end = before_last.checked_mul(stride).and_then(|start| start.checked_add(window));
            assert!(
                end.is_some_and(|end| end <= bytes.len()),
                "{count} blocks of {window} bytes end after their bytes"
            );
        }
        Self { bytes, stride, window, count }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn window(&self) -> usize {
        self.window
    }

    #[inline(always)]
    pub(super) fn at(&self, block: usize) -> &'a [u8] {
        &self.bytes[block * self.stride..][..self.window]
    }

    /// The first byte of a block. `window` bytes are readable there if `block` is below the count.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn start(&self, block: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(block * self.stride)
    }

    /// All blocks, if they have `WINDOW` bytes each and lie one after the other.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn lines<const WINDOW: usize>(&self) -> Option<&'a [[u8; WINDOW]]> {
        let (lines, _) = self.bytes.as_chunks::<WINDOW>();
        (self.window == WINDOW && self.stride == WINDOW).then(|| &lines[..self.count])
    }

    /// The blocks in `from..to`; both are at most the count.
    pub(super) fn part(&self, from: usize, to: usize) -> Self {
        assert!(from <= to && to <= self.count, "a part lies within");
        let bytes = if from == to { &[] } else { &self.bytes[from * self.stride..] };
        Self { bytes, count: to - from, ..*self }
    }
}
