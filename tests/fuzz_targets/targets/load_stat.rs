//! An engine's load reports: each accepted figure is the one in its place, the rest is refused.

use kvrouted::event::msgpack::{LoadStat, decode_load_stat};

/// A payload of a load socket.
pub(crate) fn load_stat(data: &[u8]) {
    let Ok(stat) = decode_load_stat(data) else { return };
    // What was read, said again in the fewest places that hold it, is read as the same.
    let LoadStat { running, waiting, used_tokens, capacity_tokens, waiting_uncached_tokens } = stat;
    let wide = |number: u64| [&[0xcf][..], &number.to_be_bytes()].concat();
    let first = [u64::from(running), u64::from(waiting), used_tokens, capacity_tokens].map(wide).concat();
    let said = [&[0x97, 0xa8][..], b"LoadStat", &first, &[0xc0], &wide(waiting_uncached_tokens)].concat();
    assert_eq!(decode_load_stat(&said), Ok(stat));
}
