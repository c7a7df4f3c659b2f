//! What the workers hold, and what is asked: the same for every side.

use kvrouted::hash;
use kvrouted::ids::{EngineHash, LocalHash};
use serde::Serialize;

use crate::failure::Failure;
use crate::ingest::{BLOCK_SIZE, SCHEME, name, stored, tokens};

/// Prompts that are asked about, in turns.
pub(crate) const PROMPTS: u64 = 16;
/// Blocks of a prompt that its holders hold.
pub(crate) const BLOCKS: u64 = 750;
/// How long a subscription may take, milliseconds.
const SUBSCRIPTION_MS_MAX: i32 = 30_000;

/// What a request says of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Given {
    /// A hash for each block.
    Hashes,
    /// The tokens, to be hashed by the server.
    Tokens,
}

/// A size of requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Size {
    /// Its name in reports.
    pub(crate) name: &'static str,
    /// Blocks of the prompt.
    pub(crate) blocks: u64,
    /// What the request says of them.
    pub(crate) given: Given,
}

/// What is measured: our frames of about 256 B, 6 KB and 48 KB.
pub(crate) const SIZES: [Size; 3] = [
    Size { name: "14 hashes", blocks: 14, given: Given::Hashes },
    Size { name: "720 hashes", blocks: 720, given: Given::Hashes },
    Size { name: "12000 tokens", blocks: 750, given: Given::Tokens },
];

/// The size that `name` is, as the command line spells it.
#[must_use]
pub(crate) fn size_named(name: &str) -> Option<Size> {
    SIZES.into_iter().find(|size| size.name.replace(' ', "-") == name)
}

/// The first `blocks` blocks of a prompt, as tokens.
#[must_use]
pub(crate) fn prompt_tokens(prompt: u64, blocks: u64) -> Vec<u32> {
    tokens(prompt * BLOCKS, blocks)
}

/// The same as our hashes.
#[must_use]
pub(crate) fn prompt_hashes(prompt: u64, blocks: u64) -> Vec<LocalHash> {
    let (tokens, mut locals) = (prompt_tokens(prompt, blocks), Vec::new());
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
    locals
}

/// Blocks of a prompt that a worker holds, from its first: all, half or none.
#[must_use]
pub(crate) const fn held(worker: u64, prompt: u64) -> u64 {
    match (worker + prompt) % 3 {
        0 => BLOCKS,
        1 => BLOCKS / 2,
        _ => 0,
    }
}

/// The engines: a publishing socket for each worker.
pub(crate) struct Engines {
    /// By worker: where it publishes from, and the number of its next message.
    pub(super) publishers: Vec<Publisher>,
    /// Where they publish, by worker.
    pub(crate) endpoints: Vec<String>,
    _context: zmq::Context,
}

/// A worker's publishing socket.
pub(super) struct Publisher {
    socket: zmq::Socket,
    seq: u64,
}

impl Publisher {
    /// Publishes the next message.
    ///
    /// # Errors
    /// Those of libzmq.
    pub(super) fn send(&mut self, payload: &[u8]) -> Result<(), Failure> {
        self.socket.send(&b""[..], zmq::SNDMORE).map_err(Failure::zmq)?;
        self.socket.send(&self.seq.to_be_bytes()[..], zmq::SNDMORE).map_err(Failure::zmq)?;
        self.socket.send(payload, 0).map_err(Failure::zmq)?;
        self.seq += 1;
        Ok(())
    }
}

impl Engines {
    /// Binds the sockets of so many workers.
    ///
    /// # Errors
    /// Those of libzmq.
    pub(crate) fn start(workers: u64) -> Result<Self, Failure> {
        let context = zmq::Context::new();
        let (mut publishers, mut endpoints) = (Vec::new(), Vec::new());
        for _ in 0..workers {
            // XPUB, to know when the subscription has arrived. Nothing is dropped.
            let socket = context.socket(zmq::XPUB).map_err(Failure::zmq)?;
            socket.set_sndhwm(0).and_then(|()| socket.set_linger(0)).map_err(Failure::zmq)?;
            socket.set_rcvtimeo(SUBSCRIPTION_MS_MAX).map_err(Failure::zmq)?;
            socket.bind("tcp://127.0.0.1:*").map_err(Failure::zmq)?;
            let endpoint = socket.get_last_endpoint().map_err(Failure::zmq)?;
            endpoints.push(endpoint.map_err(|_| Failure::Child("an endpoint is no text".to_owned()))?);
            publishers.push(Publisher { socket, seq: 0 });
        }
        Ok(Self { publishers, endpoints, _context: context })
    }

    /// Says what every worker holds, once somebody listens.
    ///
    /// # Errors
    /// Nobody subscribes, or those of libzmq.
    pub(crate) fn publish(&mut self) -> Result<(), Failure> {
        for (worker, publisher) in (0..).zip(&mut self.publishers) {
            publisher.socket.recv_bytes(0).map_err(Failure::zmq)?;
            for prompt in 0..PROMPTS {
                let blocks = held(worker, prompt);
                if blocks == 0 {
                    continue;
                }
                let first = prompt * BLOCKS;
                let hashes: Vec<EngineHash> = (first..first + blocks).map(name).collect();
                publisher.send(&stored(publisher.seq, hashes, prompt_tokens(prompt, blocks)))?;
            }
        }
        Ok(())
    }
}

/// Tokens of so many blocks.
#[must_use]
pub(crate) const fn tokens_of(blocks: u64) -> u64 {
    blocks * BLOCK_SIZE as u64
}
