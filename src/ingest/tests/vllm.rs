//! Batches as vLLM 0.24 and later puts them on the wire, for tests: `[ts, [event map…], rank]`.
//!
//! Also compiled into `tests/ingest`.

/// One engine's events, built up and taken as payloads.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    events: Vec<Vec<u8>>,
    rank: Option<u32>,
    stamp: f64,
}

/// Tokens per block of every store.
pub(crate) const BLOCK_SIZE: usize = 4;

/// The tokens of a chain of blocks whose contents are named by one number each.
pub(crate) fn tokens(contents: &[u32]) -> Vec<u32> {
    contents.iter().flat_map(|content| (0..BLOCK_SIZE as u32).map(move |at| content * 100 + at)).collect()
}

impl Batch {
    /// No events yet; `stamp` makes the bytes of two batches differ.
    pub(crate) fn new(stamp: u32) -> Self {
        Self { events: Vec::new(), rank: Some(0), stamp: f64::from(stamp) }
    }

    /// States another rank, or none.
    pub(crate) fn rank(mut self, rank: Option<u32>) -> Self {
        self.rank = rank;
        self
    }

    /// Stores a chain in device memory: engine hashes, and the content of each block.
    pub(crate) fn stored(self, parent: Option<u64>, hashes: &[u64], contents: &[u32]) -> Self {
        self.stored_with(parent, hashes, &tokens(contents), BLOCK_SIZE, Some("GPU"), &[])
    }

    /// Stores with every field stated, and more keys with string values.
    pub(crate) fn stored_with(
        mut self,
        parent: Option<u64>,
        hashes: &[u64],
        tokens: &[u32],
        block_size: usize,
        medium: Option<&str>,
        more: &[(&str, &str)],
    ) -> Self {
        let mut event = map(7 + 1 + more.iter().filter(|(key, _)| *key != "lora_name").count());
        pair(&mut event, "type", |out| text(out, "BlockStored"));
        pair(&mut event, "block_hashes", |out| numbers(out, hashes.iter().copied()));
        pair(&mut event, "parent_block_hash", |out| or_nil(out, parent, number));
        pair(&mut event, "token_ids", |out| numbers(out, tokens.iter().map(|token| u64::from(*token))));
        pair(&mut event, "block_size", |out| number(out, block_size as u64));
        pair(&mut event, "lora_id", |out| out.push(0xc0));
        pair(&mut event, "medium", |out| or_nil(out, medium, text));
        let lora = more.iter().find(|(key, _)| *key == "lora_name").map(|(_, name)| *name);
        pair(&mut event, "lora_name", |out| or_nil(out, lora, text));
        for (key, value) in more.iter().filter(|(key, _)| *key != "lora_name") {
            pair(&mut event, key, |out| text(out, value));
        }
        self.events.push(event);
        self
    }

    /// Removes blocks from device memory.
    pub(crate) fn removed(self, hashes: &[u64]) -> Self {
        self.removed_from(hashes, Some("GPU"))
    }

    /// Removes blocks from a medium.
    pub(crate) fn removed_from(mut self, hashes: &[u64], medium: Option<&str>) -> Self {
        let mut event = map(3);
        pair(&mut event, "type", |out| text(out, "BlockRemoved"));
        pair(&mut event, "block_hashes", |out| numbers(out, hashes.iter().copied()));
        pair(&mut event, "medium", |out| or_nil(out, medium, text));
        self.events.push(event);
        self
    }

    /// An event as bytes.
    #[allow(dead_code, reason = "not every test that includes this file sends such events")]
    pub(crate) fn raw(mut self, event: Vec<u8>) -> Self {
        self.events.push(event);
        self
    }

    /// Clears everything.
    pub(crate) fn cleared(self) -> Self {
        self.other("AllBlocksCleared")
    }

    /// An event that is nothing but its kind.
    pub(crate) fn other(mut self, kind: &str) -> Self {
        let mut event = map(1);
        pair(&mut event, "type", |out| text(out, kind));
        self.events.push(event);
        self
    }

    /// The payload.
    pub(crate) fn payload(&self) -> Vec<u8> {
        let mut out = vec![0x93, 0xcb];
        out.extend(self.stamp.to_be_bytes());
        array(&mut out, self.events.len());
        out.extend(self.events.iter().flatten());
        or_nil(&mut out, self.rank.map(u64::from), number);
        out
    }
}

fn map(pairs: usize) -> Vec<u8> {
    assert!(pairs < 16);
    vec![0x80 | pairs as u8]
}

fn pair(out: &mut Vec<u8>, key: &str, value: impl FnOnce(&mut Vec<u8>)) {
    text(out, key);
    value(out);
}

fn or_nil<V>(out: &mut Vec<u8>, value: Option<V>, write: impl FnOnce(&mut Vec<u8>, V)) {
    match value {
        Some(value) => write(out, value),
        None => out.push(0xc0),
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend([0xd9, u8::try_from(text.len()).expect("a short text")]);
    out.extend(text.as_bytes());
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.push(0xcf);
    out.extend(number.to_be_bytes());
}

fn array(out: &mut Vec<u8>, len: usize) {
    out.push(0xdd);
    out.extend(u32::try_from(len).expect("a short array").to_be_bytes());
}

fn numbers(out: &mut Vec<u8>, values: impl ExactSizeIterator<Item = u64>) {
    array(out, values.len());
    values.for_each(|value| number(out, value));
}
