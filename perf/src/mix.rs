//! Names for blocks: 64-bit values that look like hashes and follow from their arguments.

/// Odd, with about as many ones as zeros.
const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;
const OFFSET: u64 = 0x5851_f42d_4c95_7f2d;

/// Spreads two values over 64 bits: both halves of a full product.
#[must_use]
pub(crate) const fn mix(a: u64, b: u64) -> u64 {
    let once = (a ^ OFFSET) as u128 * FACTOR as u128;
    let folded = once as u64 ^ (once >> 64) as u64;
    let twice = (folded ^ b.rotate_left(32)) as u128 * (FACTOR ^ OFFSET | 1) as u128;
    let name = twice as u64 ^ (twice >> 64) as u64 ^ b;
    // 0 is nobody's name: some tables read it as "empty".
    if name == 0 { FACTOR } else { name }
}

#[cfg(test)]
mod tests {
    use super::mix;
    use std::collections::HashSet;

    #[test]
    fn neighbours_get_different_names() {
        let names: HashSet<u64> = (0..300).flat_map(|a| (0..300).map(move |b| mix(a, b))).collect();
        assert_eq!(names.len(), 300 * 300);
        let ones: u32 = names.iter().map(|name| name.count_ones()).sum();
        let mean = f64::from(ones) / names.len() as f64;
        assert!((31.5..32.5).contains(&mean), "{mean} bits are set on average");
    }
}
