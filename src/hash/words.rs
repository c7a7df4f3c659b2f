//! Block hashes in words that other threads write or read meanwhile: stored, and compared. All accesses are Relaxed.
//!
//! Compilers make no vectors of atomic accesses, so those of x86-64 are written as instructions, which the compiler does not
//! look into. The forms without them are the reference, and give the same results.

#[cfg(not(all(target_arch = "x86_64", not(miri), not(kvrouted_loom))))]
use self::{equal_lines_each as equal_lines, store_each as store_many};
use crate::ids::LocalHash;
use crate::prefetch::prefetch;
#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
use crate::simd::SimdLevel;
use crate::sync::{AtomicU64, Ordering};

/// From this many hashes on, the processor's own copy takes less time than a store for each.
const MANY_MIN: usize = 64;
/// Words of a cache line, which are compared at once.
const LINE_WORDS: usize = 8;
/// Lines that are prefetched before they are written. What had them before ended some time ago, so they have left the
/// caches.
const LINES_AHEAD: usize = 16;

/// Stores hashes into as many words, Relaxed and in any order.
#[inline]
pub(crate) fn store(to: &[AtomicU64], from: &[LocalHash]) {
    debug_assert_eq!(to.len(), from.len(), "one word for each hash");
    if to.len().min(from.len()) < MANY_MIN { store_each(to, from) } else { store_many(to, from) }
}

/// The reference of [`store`], a line at a time.
fn store_each(to: &[AtomicU64], from: &[LocalHash]) {
    let store = |(word, hash): (&AtomicU64, &LocalHash)| word.store(hash.0, Ordering::Relaxed);
    let ((to, to_rest), (from, from_rest)) = (to.as_chunks::<LINE_WORDS>(), from.as_chunks::<LINE_WORDS>());
    to.iter().take(LINES_AHEAD).for_each(|line| prefetch(line.as_ptr().cast()));
    for (at, (line, hashes)) in to.iter().zip(from).enumerate() {
        prefetch(to.as_ptr().wrapping_add(at + LINES_AHEAD).cast());
        line.iter().zip(hashes).for_each(store);
    }
    to_rest.iter().zip(from_rest).for_each(store);
}

/// The same by one instruction, which writes whole lines. It is not reordered with other stores, only its own are among
/// each other.
#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
fn store_many(to: &[AtomicU64], from: &[LocalHash]) {
    let words = to.len().min(from.len());
    // SAFETY: both slices have this many words, of eight bytes each. Those of `to` may be written through a shared reference,
    // and an instruction that the compiler does not look into may store them as Relaxed stores would. The calling convention
    // keeps the direction flag clear. Neither the stack nor a flag changes.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            inout("rcx") words => _,
            inout("rdi") to.as_ptr() => _,
            inout("rsi") from.as_ptr() => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Leading hashes that equal those in words.
pub(crate) fn common_prefix(words: &[AtomicU64], hashes: &[LocalHash]) -> usize {
    let from = equal_lines(words.as_chunks().0, hashes.as_chunks().0) * LINE_WORDS;
    let rest = words[from..].iter().zip(&hashes[from..]);
    from + rest.take_while(|(word, hash)| word.load(Ordering::Relaxed) == hash.0).count()
}

/// Leading lines whose words equal the hashes.
#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
#[inline]
fn equal_lines(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) -> usize {
    match SimdLevel::here() {
        SimdLevel::Scalar => equal_lines_each(words, hashes),
        // SAFETY: every other level is only that of processors with AVX2.
        _ => unsafe { equal_lines_avx2(words, hashes) },
    }
}

/// The reference of `equal_lines`: one branch for a line.
fn equal_lines_each(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) -> usize {
    let differ = |(word, hash): (&AtomicU64, &LocalHash)| word.load(Ordering::Relaxed) ^ hash.0;
    let are_equal = |(words, hashes): &(&[AtomicU64; LINE_WORDS], &[LocalHash; LINE_WORDS])| {
        words.iter().zip(*hashes).map(differ).fold(0, |all, one| all | one) == 0
    };
    words.iter().zip(hashes).take_while(are_equal).count()
}

#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
#[target_feature(enable = "avx2")]
fn equal_lines_avx2(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) -> usize {
    let mut equal = 0;
    for (words, hashes) in words.iter().zip(hashes) {
        let are_equal: u8;
        // SAFETY: both pointers are to 64 readable bytes, in any alignment. Words may be written meanwhile, and an instruction
        // that the compiler does not look into may load them as Relaxed loads would. The stack is not used.
        unsafe {
            std::arch::asm!(
                "vmovdqu {low}, [{words}]",
                "vmovdqu {high}, [{words} + 32]",
                "vpxor {low}, {low}, [{hashes}]",
                "vpxor {high}, {high}, [{hashes} + 32]",
                "vpor {low}, {low}, {high}",
                "vptest {low}, {low}",
                "setz {are_equal}",
                words = in(reg) words.as_ptr(),
                hashes = in(reg) hashes.as_ptr(),
                low = out(ymm_reg) _,
                high = out(ymm_reg) _,
                are_equal = out(reg_byte) are_equal,
                options(nostack, readonly)
            );
        }
        if are_equal == 0 {
            break;
        }
        equal += 1;
    }
    equal
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_equal_up_to_the_first_that_differs() {
        let hashes: Vec<LocalHash> = (1..=40).map(LocalHash).collect();
        for (len, asked) in [(0, 3), (3, 0), (8, 8), (16, 15), (15, 16), (33, 40)] {
            for differs in 0..=len {
                let word = |at: usize| AtomicU64::new(if at == differs { 1 << 63 } else { at as u64 + 1 });
                let words: Vec<AtomicU64> = (0..len).map(word).collect();
                let (expected, hashes) = (differs.min(len).min(asked), &hashes[..asked]);
                assert_eq!(common_prefix(&words, hashes), expected, "{len}, {asked}");
                let (lines, hashes) = (words.as_chunks().0, hashes.as_chunks().0);
                assert_eq!(equal_lines_each(lines, hashes), expected / LINE_WORDS);
                assert_eq!(equal_lines(lines, hashes), expected / LINE_WORDS);
            }
        }
    }

    #[test]
    fn every_hash_is_stored_and_no_other_word_changes() {
        let hashes: Vec<LocalHash> = (1..=200).map(LocalHash).collect();
        for len in [0, 1, 9, 63, 64, 65, 100, 200] {
            for (way, stores) in [store as fn(&[AtomicU64], &[LocalHash]), store_each, store_many].iter().enumerate() {
                let words: Vec<AtomicU64> = (0..=len).map(|_| AtomicU64::new(0)).collect();
                stores(&words[..len], &hashes[..len]);
                let expected = |at: usize| if at < len { at as u64 + 1 } else { 0 };
                let is_stored = |(at, word): (usize, &AtomicU64)| word.load(Ordering::Relaxed) == expected(at);
                assert!(words.iter().enumerate().all(is_stored), "{way}: {len}");
            }
        }
    }
}
