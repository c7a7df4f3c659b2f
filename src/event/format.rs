//! The encoding of a payload.

/// The encodings of an event payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `schemas/kv_events.fbs`.
    Flatbuffer,
    /// The format of vLLM, SGLang and TensorRT-LLM.
    Msgpack,
}

/// The flatbuffer file identifier of `kv_events.fbs`, in bytes 4..8 of a payload.
pub const FLATBUFFER_IDENTIFIER: &[u8; 4] = b"KVEV";

/// Detects the encoding by the first bytes: the flatbuffer identifier first, otherwise any msgpack array marker.
#[must_use]
pub fn detect(payload: &[u8]) -> Option<Format> {
    if payload.get(4..8) == Some(FLATBUFFER_IDENTIFIER) {
        return Some(Format::Flatbuffer);
    }
    match payload.first()? {
        0x90..=0x9f | 0xdc | 0xdd => Some(Format::Msgpack),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identifier_wins_over_a_marker_that_looks_like_an_array() {
        assert_eq!(detect(b"\x90\0\0\0KVEV"), Some(Format::Flatbuffer));
        assert_eq!(detect(b"\x93\xcb"), Some(Format::Msgpack));
        assert_eq!(detect(b"\xdc\x00\x02"), Some(Format::Msgpack));
        assert_eq!(detect(b"\x83\xa4type"), None);
        assert_eq!(detect(b""), None);
    }
}
