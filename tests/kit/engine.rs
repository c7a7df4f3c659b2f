//! A simulated engine: the publisher of one rank, over a real socket. It sends batches in kvrouted's own format, or any
//! bytes.

use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, Stored};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, Scheme, Tier, Window};

use super::{WAIT_MAX, until_ok};

pub(crate) const BLOCK_SIZE: u32 = 16;
pub(crate) const SCHEME: Scheme = Scheme { block_size: BLOCK_SIZE, window: Window::Plain };

/// An engine's publisher. XPUB, to know when a subscription has arrived.
pub(crate) struct Publisher {
    socket: zmq::Socket,
    endpoint: String,
    encoder: Encoder,
    /// Sequence number of the next batch.
    pub(crate) seq: u64,
}

impl Publisher {
    pub(crate) fn new() -> Self {
        Self::bind("tcp://127.0.0.1:*").expect("a free port")
    }

    pub(crate) fn bind(endpoint: &str) -> zmq::Result<Self> {
        let socket = zmq::Context::new().socket(zmq::XPUB)?;
        socket.set_linger(0)?;
        // As engines do: a daemon that has no processor for a while loses nothing.
        socket.set_sndhwm(100_000)?;
        socket.set_rcvtimeo(WAIT_MAX.as_millis() as i32)?;
        // Each subscription is reported, also a second one to the same topic: a subscriber that was killed may still
        // count as subscribed when the next one comes.
        socket.set_xpub_verbose(true)?;
        socket.bind(endpoint)?;
        let endpoint = socket.get_last_endpoint()?.expect("of text");
        Ok(Self { socket, endpoint, encoder: Encoder::new(), seq: 0 })
    }

    /// Binds an endpoint that another publisher may have had until now.
    pub(crate) fn start(endpoint: &str) -> Self {
        until_ok("the endpoint is free", || Self::bind(endpoint).map_err(|error| error.to_string()))
    }

    pub(crate) fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    pub(crate) fn await_subscription(&self) {
        while self.socket.recv_bytes(0).expect("a subscription").first() != Some(&1) {}
    }

    /// Drops the reports of earlier subscriptions: the next one that is awaited comes from now on.
    pub(crate) fn forget_subscriptions(&self) {
        while self.socket.recv_bytes(zmq::DONTWAIT).is_ok() {}
    }

    /// The same publisher once it has a subscription.
    pub(crate) fn subscribed(self) -> Self {
        self.await_subscription();
        self
    }

    /// Stores the whole blocks of `tokens` as a chain from the first token, with engine hashes of their content.
    pub(crate) fn store(&mut self, tokens: &[u32]) {
        let hashes = engine_hashes(tokens);
        self.store_as(&hashes, &tokens[..hashes.len() * BLOCK_SIZE as usize], BLOCK_SIZE);
    }

    /// The same with other engine hashes and another block size.
    pub(crate) fn store_as(&mut self, hashes: &[EngineHash], tokens: &[u32], block_size: u32) {
        let scheme = Scheme { block_size, ..SCHEME };
        self.send(scheme, stored(hashes, tokens, block_size));
    }

    /// Removes the last blocks of `tokens`.
    pub(crate) fn remove_last(&mut self, tokens: &[u32], blocks: usize) {
        let hashes = engine_hashes(tokens);
        let removed = &hashes[hashes.len() - blocks..];
        let removed = Removed { hashes: removed, medium: Medium::Tier(Tier::Device), group: GroupId(0) };
        self.send(SCHEME, KvEvent::Removed(removed));
    }

    /// Clears every tier.
    pub(crate) fn clear(&mut self) {
        self.send(SCHEME, KvEvent::Cleared(Cleared { tier: None }));
    }

    fn send(&mut self, scheme: Scheme, event: KvEvent<'_>) {
        let info = BatchInfo { scheme: Some(scheme), ..BatchInfo::default() };
        let payload = self.encoder.encode(&info, [event]).to_vec();
        self.send_payload(&payload);
    }

    pub(crate) fn send_payload(&mut self, payload: &[u8]) {
        self.send_batch(self.seq, payload);
        self.seq += 1;
    }

    /// Sends a batch with the frames that engines use.
    pub(crate) fn send_batch(&self, seq: u64, payload: &[u8]) {
        self.send_frames(&[b"", &seq.to_be_bytes(), payload]);
    }

    pub(crate) fn send_frames(&self, frames: &[&[u8]]) {
        self.socket.send_multipart(frames, 0).expect("sent");
    }
}

/// An event: blocks stored in device memory, from the first token.
pub(crate) fn stored<'a>(hashes: &'a [EngineHash], tokens: &'a [u32], block_size: u32) -> KvEvent<'a> {
    KvEvent::Stored(Stored {
        hashes,
        parent: None,
        content: Content::Tokens { tokens, bigram: false },
        block_size,
        medium: Medium::Tier(Tier::Device),
        group: GroupId(0),
        group_kind: GroupKind::Main,
        lora: None,
        salt: Salt::Inherited,
        media: &[],
    })
}

/// The engine hashes that the simulated engine gives to the whole blocks of `tokens`.
pub(crate) fn engine_hashes(tokens: &[u32]) -> Vec<EngineHash> {
    let (mut locals, mut chain) = (Vec::new(), Vec::new());
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(tokens), &[], &mut locals);
    hash::sequence_hashes(&locals, &mut chain);
    chain.into_iter().map(|sequence| EngineHash(!sequence.0)).collect()
}
