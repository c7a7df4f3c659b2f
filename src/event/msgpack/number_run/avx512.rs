//! [`fill`](super::fill) with AVX-512, whose instructions move single bytes across a whole register.
//!
//! For each of 59 bytes, `next` says where a number would end that began there. Applied to itself, it says where two
//! numbers end, then four, and so on. With these tables each element of a register goes to its own
//! number: element 5 goes one number on, then four. None of this waits for the window before, except the first start, and
//! that takes one look-up in the table of sixteen numbers. So the processor works on several windows at once.
//!
//! A byte that begins no number, and each byte behind the 59, is its own end. So a walk stays there, and the tables need no
//! bounds.

use fearless_simd::prelude::*;
use fearless_simd::{kernel, u8x64, u32x16};
use std::arch::x86_64::{
    __m512i, _mm_cvtsi128_si64, _mm512_add_epi8, _mm512_castsi512_si128, _mm512_cmpge_epu8_mask,
    _mm512_cmpgt_epu8_mask, _mm512_cmpneq_epi8_mask, _mm512_mask_add_epi8, _mm512_mask_mov_epi8,
    _mm512_mask_permutexvar_epi8, _mm512_maskz_permutexvar_epi8, _mm512_maskz_shuffle_epi8, _mm512_min_epu8,
    _mm512_movepi8_mask, _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_sub_epi8,
};

use super::NEVER;

/// Bytes of a register.
const LINE: usize = 64;
/// Bytes of the longest number with its marker.
const NUMBER_BYTES_MAX: usize = 5;
/// Bytes at which the numbers of one window begin: the end of each is a position in the same register.
const STARTS: usize = LINE - NUMBER_BYTES_MAX;
/// Those bytes.
const STARTS_MASK: u64 = (1 << STARTS) - 1;
/// Numbers that a register holds. If more begin in a window, the next window begins with the first of the rest.
const AT_ONCE: usize = 16;
/// The marker of the shortest number with one.
const FIRST_MARKER: u8 = 0xcc;
/// The elements of [`AT_ONCE`] whose number has a bit, for each bit.
const WITH_BIT: [u64; 4] = [0xaaaa, 0xcccc, 0xf0f0, 0xff00];

/// For each element of a register, its own position.
const POSITIONS: [u8; LINE] = divided_by(1);
/// For each byte of [`AT_ONCE`] numbers, its number.
const NUMBER: [u8; LINE] = divided_by(4);
/// The length of a number with the marker 0xcc, 0xcd and 0xce; 0 for any other byte.
const LENGTHS: [u8; LINE] = repeated([2, 3, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
/// How far before a number's end each of its bytes is, the lowest first.
const BEFORE_END: [u8; LINE] = repeated([1, 2, 3, 4]);
/// The length, with its marker, from which on a number has this byte.
const HAS_BYTE: [u8; LINE] = repeated([0, 3, 5, 5]);

/// The position of each element, divided.
const fn divided_by(divisor: u8) -> [u8; LINE] {
    let (mut all, mut at) = ([0; LINE], 0);
    while at < LINE {
        all[at] = at as u8 / divisor;
        at += 1;
    }
    all
}

/// The same bytes again and again.
const fn repeated<const BYTES: usize>(bytes: [u8; BYTES]) -> [u8; LINE] {
    let (mut all, mut at) = ([0; LINE], 0);
    while at < LINE {
        all[at] = bytes[at % BYTES];
        at += 1;
    }
    all
}

kernel! {
    /// As [`super::fill`].
    pub(super) fn fill(avx512: Avx512, bytes: &[u8], at: usize, out: &mut [u32]) -> (usize, usize) {
        let line = |bytes: &[u8; LINE]| -> __m512i { u8x64::from_slice(avx512, bytes).into() };
        let each = |byte: u8| _mm512_set1_epi8(byte.cast_signed());
        let look_up = |positions: __m512i, table: __m512i| _mm512_permutexvar_epi8(positions, table);
        let (positions, number, lengths) = (line(&POSITIONS), line(&NUMBER), line(&LENGTHS));
        let (before_end, has_byte) = (line(&BEFORE_END), line(&HAS_BYTE));
        // Where the window begins, and in it the first number.
        let (mut window_at, mut first, mut filled) = (at, 0, 0);
        loop {
            let rest = bytes.get(window_at..).unwrap_or_default();
            let mut padded = [NEVER; LINE];
            let view = rest.first_chunk::<LINE>().unwrap_or_else(|| {
                padded[..rest.len()].copy_from_slice(rest);
                &padded
            });
            let window = line(view);
            let marker = _mm512_min_epu8(_mm512_sub_epi8(window, each(FIRST_MARKER)), each(15));
            let marked = _mm512_add_epi8(positions, _mm512_maskz_shuffle_epi8(STARTS_MASK, lengths, marker));
            let single = !_mm512_movepi8_mask(window) & STARTS_MASK;
            let mut next = _mm512_mask_add_epi8(marked, single, positions, each(1));
            if rest.len() < LINE {
                // A number that is not whole is none.
                next = _mm512_mask_mov_epi8(next, _mm512_cmpgt_epu8_mask(next, each(rest.len() as u8)), positions);
            }
            let two = look_up(next, next);
            let four = look_up(two, two);
            let eight = look_up(four, four);
            // Where sixteen numbers end: one byte for each of the first eight starts.
            let ends_of_all = _mm_cvtsi128_si64(_mm512_castsi512_si128(look_up(eight, eight))).cast_unsigned();
            let mut starts = each(first);
            for (table, elements) in [next, two, four, eight].into_iter().zip(WITH_BIT) {
                starts = _mm512_mask_permutexvar_epi8(starts, elements, starts, table);
            }
            let ends = look_up(starts, next);
            let whole = (_mm512_cmpneq_epi8_mask(starts, ends) as u16).count_ones() as usize;
            let (start, end) = (look_up(number, starts), look_up(number, ends));
            let has = _mm512_cmpge_epu8_mask(_mm512_sub_epi8(end, start), has_byte);
            let numbers = _mm512_maskz_permutexvar_epi8(has, _mm512_sub_epi8(end, before_end), window);
            let numbers: u32x16<_> = numbers.simd_into(avx512);
            let room = &mut out[filled..];
            match room.first_chunk_mut::<AT_ONCE>() {
                Some(room) => numbers.store_slice(room),
                None => room.copy_from_slice(&<[u32; AT_ONCE]>::from(numbers)[..room.len()]),
            }
            let mut end = (ends_of_all >> (8 * first)) as u8;
            if whole > room.len() {
                let starts: u8x64<_> = starts.simd_into(avx512);
                end = <[u8; LINE]>::from(starts)[room.len()];
            }
            filled += whole.min(room.len());
            if usize::from(end) >= STARTS && filled < out.len() {
                (window_at, first) = (window_at + STARTS, end - STARTS as u8);
            } else if whole == AT_ONCE && filled < out.len() {
                (window_at, first) = (window_at + usize::from(end), 0);
            } else {
                return (filled, window_at + usize::from(end));
            }
        }
    }
}
