//! Live batches and answers of engines that send snapshots themselves.

use crate::vllm::Batch;

/// Seeds of the target `engine_snapshot`.
pub(crate) fn answers() -> Vec<Vec<u8>> {
    let batch = Batch::new(0).stored(None, &[1, 2], &[1, 2]).payload();
    let lifetime = [7; 16];
    let seq = 5_u64.to_be_bytes();
    let header: &[u8] = b"\x97\x01\xa4abcd\x00\x06\x05\xa1b\x02";
    let chunk: &[u8] = b"\x92\x92\xc0\x91\x01\x92\x01\x91\x02";
    vec![
        of(0, 2, &[b"kv", &[&seq[..], &lifetime].concat()]),
        of(1, 2, &[b"kv\0sgl-kv-epoch=abcd\0sgl-kv-snapshot=b", &seq]),
        of(0, 5, &[b"", &seq, &lifetime, &batch, &batch]),
        of(0, 3, &[b"", &(-2_i64).to_be_bytes(), &lifetime]),
        of(1, 3, &[b"", b"header", header, b"", b"chunk", chunk, b"", b"end", b""]),
        of(1, 3, &[b"", b"error", b"snapshot provider busy"]),
    ]
}

fn of(proposal: u8, frames_each: u8, frames: &[&[u8]]) -> Vec<u8> {
    let framed = frames.iter().flat_map(|frame| {
        let length = (frame.len() as u16).to_be_bytes();
        length.into_iter().chain(frame.iter().copied()).collect::<Vec<u8>>()
    });
    [proposal, frames_each].into_iter().chain(framed).collect()
}
