//! Messages between the gateway and a simulated engine over a Unix socket: the part of an inference API that the demo
//! needs.
//!
//! A frame is `{body_bytes: u32, kind: u8}` and the body, all little-endian.

use std::io::{self, Read, Write};

/// Largest body read, in bytes.
const BODY_BYTES_MAX: usize = 64 << 20;
const FRAME_BYTES: usize = 5;

/// From the gateway to an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToEngine {
    /// Run a prompt.
    Submit {
        /// The gateway's number of the request.
        id: u32,
        /// CLOCK_MONOTONIC when it was sent, in nanoseconds.
        sent_ns: u64,
        /// The prompt.
        prompt: Vec<u32>,
        /// The output to generate: a simulated engine has no model.
        output: Vec<u32>,
    },
    /// Empty the cache; only while nothing runs.
    Clear,
    /// Complete the log.
    Finish,
}

/// From an engine to the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FromEngine {
    /// The daemon has subscribed; requests may come.
    Ready,
    /// The prompt is computed.
    Prefilled {
        /// The request.
        id: u32,
        /// Whole blocks of the prompt that were in the cache.
        cached_blocks: u32,
        /// When the first token came, by the engine's clock, in nanoseconds of CLOCK_MONOTONIC.
        at_ns: u64,
    },
    /// The output is complete.
    Done {
        /// The request.
        id: u32,
        /// When the last token came, as in `Prefilled`.
        at_ns: u64,
    },
    /// The cache is empty.
    Cleared {
        /// Sequence number of the batch with the clear.
        seq: u64,
    },
    /// The log is complete.
    Finished {
        /// Batches published.
        batches: u64,
    },
}

impl ToEngine {
    /// Writes the message as one frame.
    ///
    /// # Errors
    /// Any error of the writer `to`, and `InvalidInput` for a body of 4 GiB or more.
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Submit { id, sent_ns, prompt, output } => {
                let mut body = Vec::with_capacity(16 + 4 * (prompt.len() + output.len()));
                body.extend_from_slice(&sent_ns.to_le_bytes());
                body.extend_from_slice(&id.to_le_bytes());
                body.extend_from_slice(&(prompt.len() as u32).to_le_bytes());
                for token in prompt.iter().chain(output) {
                    body.extend_from_slice(&token.to_le_bytes());
                }
                write_frame(to, 1, &body)
            }
            Self::Clear => write_frame(to, 2, &[]),
            Self::Finish => write_frame(to, 3, &[]),
        }
    }

    /// Reads one frame; `None` at the end of the stream.
    ///
    /// # Errors
    /// Any error of the reader `from`, and `InvalidData` for an invalid frame.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let Some((kind, body)) = read_frame(from)? else { return Ok(None) };
        match (kind, body.len()) {
            (1, 16..) => {
                let sent_ns = u64_at(&body, 0)?;
                let (id, prompt_tokens) = (u32_at(&body, 8)?, u32_at(&body, 12)? as usize);
                let mut tokens = body[16..].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let prompt: Vec<u32> = tokens.by_ref().take(prompt_tokens).collect();
                Ok(Some(Self::Submit { id, sent_ns, prompt, output: tokens.collect() }))
            }
            (2, 0) => Ok(Some(Self::Clear)),
            (3, 0) => Ok(Some(Self::Finish)),
            _ => Err(invalid(kind)),
        }
    }
}

impl FromEngine {
    /// Writes the message as one frame.
    ///
    /// # Errors
    /// Any error of the writer `to`.
    pub(crate) fn write(self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Ready => write_frame(to, 129, &[]),
            Self::Prefilled { id, cached_blocks, at_ns } => {
                let words = [id.to_le_bytes(), cached_blocks.to_le_bytes()].concat();
                write_frame(to, 130, &[at_ns.to_le_bytes().as_slice(), &words].concat())
            }
            Self::Done { id, at_ns } => write_frame(to, 131, &[&at_ns.to_le_bytes()[..], &id.to_le_bytes()].concat()),
            Self::Cleared { seq } => write_frame(to, 132, &seq.to_le_bytes()),
            Self::Finished { batches } => write_frame(to, 133, &batches.to_le_bytes()),
        }
    }

    /// Reads one frame; `None` at the end of the stream.
    ///
    /// # Errors
    /// Any error of the reader `from`, and `InvalidData` for an invalid frame.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let Some((kind, body)) = read_frame(from)? else { return Ok(None) };
        Ok(Some(match (kind, body.len()) {
            (129, 0) => Self::Ready,
            (130, 16) => {
                Self::Prefilled { id: u32_at(&body, 8)?, cached_blocks: u32_at(&body, 12)?, at_ns: u64_at(&body, 0)? }
            }
            (131, 12) => Self::Done { id: u32_at(&body, 8)?, at_ns: u64_at(&body, 0)? },
            (132, 8) => Self::Cleared { seq: u64_at(&body, 0)? },
            (133, 8) => Self::Finished { batches: u64_at(&body, 0)? },
            _ => return Err(invalid(kind)),
        }))
    }
}

fn write_frame(to: &mut impl Write, kind: u8, body: &[u8]) -> io::Result<()> {
    let bytes = u32::try_from(body.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut frame = Vec::with_capacity(FRAME_BYTES + body.len());
    frame.extend_from_slice(&bytes.to_le_bytes());
    frame.push(kind);
    frame.extend_from_slice(body);
    to.write_all(&frame)
}

fn read_frame(from: &mut impl Read) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut header = [0_u8; FRAME_BYTES];
    if from.read(&mut header[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[1..])?;
    let bytes = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if bytes > BODY_BYTES_MAX {
        return Err(invalid(header[4]));
    }
    let mut body = vec![0; bytes];
    from.read_exact(&mut body)?;
    Ok(Some((header[4], body)))
}

fn u32_at(body: &[u8], at: usize) -> io::Result<u32> {
    let bytes = body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_le_bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn u64_at(body: &[u8], at: usize) -> io::Result<u64> {
    let bytes = body.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn invalid(kind: u8) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("kind {kind} with a body that does not fit it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_both_directions_survive_a_round_trip() {
        let requests = [
            ToEngine::Submit { id: 3, sent_ns: u64::MAX, prompt: vec![1, u32::MAX, 5], output: vec![9] },
            ToEngine::Submit { id: 4, sent_ns: 0, prompt: vec![], output: vec![] },
            ToEngine::Clear,
            ToEngine::Finish,
        ];
        let mut wire = Vec::new();
        requests.iter().for_each(|request| request.write(&mut wire).unwrap());
        let mut from = wire.as_slice();
        for request in requests {
            assert_eq!(ToEngine::read(&mut from).unwrap(), Some(request));
        }
        assert_eq!(ToEngine::read(&mut from).unwrap(), None);

        let replies = [
            FromEngine::Ready,
            FromEngine::Prefilled { id: 3, cached_blocks: 17, at_ns: 1 << 50 },
            FromEngine::Done { id: 3, at_ns: u64::MAX },
            FromEngine::Cleared { seq: 1 << 40 },
            FromEngine::Finished { batches: 12 },
        ];
        let mut wire = Vec::new();
        replies.iter().for_each(|reply| reply.write(&mut wire).unwrap());
        let mut from = wire.as_slice();
        for reply in replies {
            assert_eq!(FromEngine::read(&mut from).unwrap(), Some(reply));
        }
    }

    #[test]
    fn invalid_and_incomplete_frames_are_errors() {
        assert!(ToEngine::read(&mut [0, 0, 0, 0, 77].as_slice()).is_err());
        assert!(ToEngine::read(&mut [255, 255, 255, 255, 1].as_slice()).is_err());
        assert!(FromEngine::read(&mut [8, 0, 0, 0, 130, 1].as_slice()).is_err());
    }
}
