//! Block hashes in words that other threads write or read meanwhile: stored, and compared. All accesses are Relaxed.
//!
//! Compilers make no vectors of atomic accesses, so those of x86-64 are written as instructions, which the compiler does not
//! look into. The forms without them are the reference, and give the same results.

#[cfg(not(all(target_arch = "x86_64", not(miri), not(kvrouted_loom))))]
use self::{equal_lines_each as equal_lines, store_lines_each as store_lines};
use crate::ids::LocalHash;
use crate::prefetch::prefetch;
#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
use crate::simd::SimdLevel;
use crate::sync::{AtomicU64, Ordering};

/// Words of a cache line, which are compared, or stored, at once.
const LINE_WORDS: usize = 8;
/// Lines that are prefetched before they are written. What had them before ended some time ago, so they have left the
/// caches.
const LINES_AHEAD: usize = 16;

/// Stores hashes into as many words, Relaxed and in any order.
#[inline]
pub(crate) fn store(words: &[AtomicU64], hashes: &[LocalHash]) {
    debug_assert_eq!(words.len(), hashes.len(), "one word for each hash");
    let ((lines, words), (of_lines, hashes)) = (words.as_chunks(), hashes.as_chunks());
    store_lines(lines, of_lines);
    words.iter().zip(hashes).for_each(|(word, hash)| word.store(hash.0, Ordering::Relaxed));
}

#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
#[inline]
fn store_lines(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) {
    match SimdLevel::here() {
        SimdLevel::Scalar => store_lines_each(words, hashes),
        // SAFETY: every other level is only that of processors with AVX2.
        _ => unsafe { store_lines_avx2(words, hashes) },
    }
}

/// The reference of `store_lines`.
fn store_lines_each(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) {
    words.iter().take(LINES_AHEAD).for_each(|line| prefetch(line.as_ptr().cast()));
    for (at, (line, hashes)) in words.iter().zip(hashes).enumerate() {
        prefetch(words.as_ptr().wrapping_add(at + LINES_AHEAD).cast());
        line.iter().zip(hashes).for_each(|(word, hash)| word.store(hash.0, Ordering::Relaxed));
    }
}

/// Without prefetches: with two stores for each line, the processor takes enough lines at a time.
#[cfg(all(target_arch = "x86_64", not(miri), not(kvrouted_loom)))]
#[target_feature(enable = "avx2")]
fn store_lines_avx2(words: &[[AtomicU64; LINE_WORDS]], hashes: &[[LocalHash; LINE_WORDS]]) {
    for (words, hashes) in words.iter().zip(hashes) {
        // SAFETY: both pointers are to 64 bytes, in any alignment. The words may be written through a shared reference, and
        // an instruction that the compiler does not look into may store them as Relaxed stores would: who reads one that was
        // written in part sees another sequence, and reads again. Neither the stack nor a flag changes.
        unsafe {
            std::arch::asm!(
                "vmovdqu {low}, [{hashes}]",
                "vmovdqu {high}, [{hashes} + 32]",
                "vmovdqu [{words}], {low}",
                "vmovdqu [{words} + 32], {high}",
                words = in(reg) words.as_ptr(),
                hashes = in(reg) hashes.as_ptr(),
                low = out(ymm_reg) _,
                high = out(ymm_reg) _,
                options(nostack, preserves_flags)
            );
        }
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
        // that the compiler does not look into may load them as Relaxed loads would: who loads one that was written in part
        // sees another sequence, and reads again. The stack is not used.
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
        let are_stored = |words: &[AtomicU64], stored: usize| {
            let expected = |at: usize| if at < stored { at as u64 + 1 } else { 0 };
            words.iter().enumerate().all(|(at, word)| word.load(Ordering::Relaxed) == expected(at))
        };
        let zeros = || (0..=200).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        for len in [0, 1, 7, 8, 9, 63, 64, 65, 100, 200] {
            let words = zeros();
            store(&words[..len], &hashes[..len]);
            assert!(are_stored(&words, len), "{len}");
            for stores in [store_lines_each, store_lines] {
                let words = zeros();
                stores(words[..len].as_chunks().0, hashes[..len].as_chunks().0);
                assert!(are_stored(&words, len / LINE_WORDS * LINE_WORDS), "{len}");
            }
        }
    }
}
