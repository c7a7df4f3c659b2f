//! What a reply tells of itself as it passes: the usage and the output events, and the extra usage chunk that the
//! gateway asked for and the caller did not. The bytes may be split anywhere; memory is bounded.

use bytes::{Bytes, BytesMut};
use serde::Deserialize;

use super::ApiPath;
use crate::limits::{EVENT_LINE_BYTES_MAX, FILTER_EVENT_BYTES_MAX, USAGE_BYTES_MAX};

/// The tokens of a reply, as its engine counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that the engine had cached; `None` = the engine did not say.
    pub cached_tokens: Option<u32>,
    /// Tokens generated.
    pub completion_tokens: u32,
}

/// The usage object in the dialects of all paths.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct RawUsage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    input_tokens: Option<u32>,
    output_tokens: Option<u32>,
    cache_read_input_tokens: Option<u32>,
    cache_creation_input_tokens: Option<u32>,
    prompt_tokens_details: Option<RawDetails>,
    input_tokens_details: Option<RawDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct RawDetails {
    cached_tokens: Option<u32>,
}

impl RawUsage {
    /// Takes over what `later` says. Anthropic's streams tell the input first and the output at the end.
    fn update(&mut self, later: Self) {
        let Self { prompt_tokens, completion_tokens, cached_tokens, input_tokens, output_tokens, .. } = later;
        self.prompt_tokens = prompt_tokens.or(self.prompt_tokens);
        self.completion_tokens = completion_tokens.or(self.completion_tokens);
        self.cached_tokens = cached_tokens.or(self.cached_tokens);
        self.input_tokens = input_tokens.or(self.input_tokens);
        self.output_tokens = output_tokens.or(self.output_tokens);
        self.cache_read_input_tokens = later.cache_read_input_tokens.or(self.cache_read_input_tokens);
        self.cache_creation_input_tokens = later.cache_creation_input_tokens.or(self.cache_creation_input_tokens);
        self.prompt_tokens_details = later.prompt_tokens_details.or(self.prompt_tokens_details);
        self.input_tokens_details = later.input_tokens_details.or(self.input_tokens_details);
    }

    fn usage(&self, path: ApiPath) -> Option<Usage> {
        if path == ApiPath::Messages {
            // Anthropic counts the cached tokens beside the others.
            let (read, made) = (self.cache_read_input_tokens, self.cache_creation_input_tokens);
            let prompt = self.input_tokens?.saturating_add(read.unwrap_or(0)).saturating_add(made.unwrap_or(0));
            let completion_tokens = self.output_tokens.unwrap_or(0);
            return Some(Usage { prompt_tokens: prompt, cached_tokens: read, completion_tokens });
        }
        let details = self.prompt_tokens_details.or(self.input_tokens_details);
        Some(Usage {
            prompt_tokens: self.prompt_tokens.or(self.input_tokens)?,
            cached_tokens: details.and_then(|details| details.cached_tokens).or(self.cached_tokens),
            completion_tokens: self.completion_tokens.or(self.output_tokens).unwrap_or(0),
        })
    }
}

/// Where the scanner stands in the JSON text.
#[derive(Debug)]
enum Scan {
    /// So many bytes of the key, with its quotes, have matched.
    Key(usize),
    /// The key has matched; spaces, the colon and the object's brace follow.
    Value { colon: bool },
    /// Within the object.
    Object { depth: u32, in_string: bool, escaped: bool },
}

/// Finds the objects under one key in JSON text, without reading the rest. In a JSON string the key's quotes are
/// escaped, so that no text of a model can be taken for it.
#[derive(Debug)]
struct ObjectScanner {
    key: &'static [u8],
    scan: Scan,
    object: Vec<u8>,
}

impl ObjectScanner {
    fn new(path: ApiPath) -> Self {
        let key: &[u8] = if path == ApiPath::SglangGenerate { b"\"meta_info\"" } else { b"\"usage\"" };
        Self { key, scan: Scan::Key(0), object: Vec::new() }
    }

    fn feed(&mut self, bytes: &[u8], mut found: impl FnMut(&[u8])) {
        let mut at = 0;
        while at < bytes.len() {
            if matches!(self.scan, Scan::Key(0)) {
                match memchr::memchr(b'"', &bytes[at..]) {
                    Some(next) => at += next,
                    None => return,
                }
            }
            self.step(bytes[at], &mut found);
            at += 1;
        }
    }

    fn step(&mut self, byte: u8, found: &mut impl FnMut(&[u8])) {
        self.scan = match self.scan {
            Scan::Key(matched) if byte == self.key[matched] => {
                if matched + 1 == self.key.len() {
                    Scan::Value { colon: false }
                } else {
                    Scan::Key(matched + 1)
                }
            }
            Scan::Key(_) => self.restart(byte),
            Scan::Value { colon } if byte.is_ascii_whitespace() => Scan::Value { colon },
            Scan::Value { colon: false } if byte == b':' => Scan::Value { colon: true },
            Scan::Value { colon: true } if byte == b'{' => {
                self.object.clear();
                self.object.push(byte);
                Scan::Object { depth: 1, in_string: false, escaped: false }
            }
            Scan::Value { .. } => self.restart(byte),
            Scan::Object { depth, in_string, escaped } => self.within(byte, depth, in_string, escaped, found),
        };
    }

    fn restart(&self, byte: u8) -> Scan {
        Scan::Key(usize::from(byte == self.key[0]))
    }

    fn within(&mut self, byte: u8, depth: u32, in_string: bool, escaped: bool, found: &mut impl FnMut(&[u8])) -> Scan {
        if self.object.len() == USAGE_BYTES_MAX {
            self.object.clear();
            return Scan::Key(0);
        }
        self.object.push(byte);
        if in_string {
            let closes = byte == b'"' && !escaped;
            return Scan::Object { depth, in_string: !closes, escaped: byte == b'\\' && !escaped };
        }
        let depth = match byte {
            b'{' => depth + 1,
            b'}' => depth - 1,
            _ => depth,
        };
        if depth == 0 {
            found(&self.object);
            return Scan::Key(0);
        }
        Scan::Object { depth, in_string: byte == b'"', escaped: false }
    }
}

/// Counts the events of a stream that carry output. Only the start of each line is looked at.
#[derive(Debug)]
struct EventCounter {
    path: ApiPath,
    line: Vec<u8>,
    events: u32,
}

impl EventCounter {
    fn feed(&mut self, mut bytes: &[u8]) {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            self.keep(&bytes[..end]);
            if self.is_output() {
                self.events = self.events.saturating_add(1);
            }
            self.line.clear();
            bytes = &bytes[end + 1..];
        }
        self.keep(bytes);
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = EVENT_LINE_BYTES_MAX - self.line.len();
        self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn is_output(&self) -> bool {
        let line = self.line.trim_ascii_end();
        match self.path {
            // These paths announce their kind before the data, and begin with events that come before any output.
            ApiPath::Responses | ApiPath::Messages => line.starts_with(b"event:") && line.ends_with(b"delta"),
            _ => {
                let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii_start) else { return false };
                data != b"[DONE]" && !data.starts_with(b"{\"error\"") && !has_no_choices(data)
            }
        }
    }
}

/// Whether the start of a chunk has an empty `choices`: a usage chunk.
fn has_no_choices(data: &[u8]) -> bool {
    let Some(at) = memchr::memmem::find(data, b"\"choices\"") else { return false };
    let mut rest = data[at + b"\"choices\"".len()..].iter().filter(|byte| !byte.is_ascii_whitespace());
    rest.next() == Some(&b':') && rest.next() == Some(&b'[') && rest.next() == Some(&b']')
}

/// Reads a reply's bytes as they pass.
#[derive(Debug)]
pub struct UsageReader {
    path: ApiPath,
    scanner: ObjectScanner,
    found: RawUsage,
    /// `None` for a reply that is no stream.
    events: Option<EventCounter>,
    has_bytes: bool,
}

impl UsageReader {
    /// A reader of one reply.
    #[must_use]
    pub fn new(path: ApiPath, streamed: bool) -> Self {
        let events = streamed.then(|| EventCounter { path, line: Vec::new(), events: 0 });
        Self { path, scanner: ObjectScanner::new(path), found: RawUsage::default(), events, has_bytes: false }
    }

    /// Reads the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.has_bytes |= !bytes.is_empty();
        let found = &mut self.found;
        self.scanner.feed(bytes, |object| {
            if let Ok(usage) = serde_json::from_slice(object) {
                found.update(usage);
            }
        });
        if let Some(events) = &mut self.events {
            events.feed(bytes);
        }
    }

    /// The events with output so far. A reply that is no stream is one event, which its first byte begins.
    #[must_use]
    pub fn output_events(&self) -> u32 {
        self.events.as_ref().map_or(u32::from(self.has_bytes), |events| events.events)
    }

    /// The usage, if the reply had one.
    #[must_use]
    pub fn finish(self) -> Option<Usage> {
        self.found.usage(self.path)
    }
}

/// Takes the usage chunk out of a stream whose caller did not ask for it: the event with an empty `choices` and a
/// usage. Holds back at most one event, which ends with an empty line.
#[derive(Debug, Default)]
pub struct SseFilter {
    event: BytesMut,
    /// Whether the event was too long to be held back, and passes.
    is_passing: bool,
    /// Bytes since the last line feed, in an event that passes; carriage returns not counted.
    line_bytes: usize,
}

impl SseFilter {
    /// A filter for one stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and gives those that may go on.
    pub fn feed(&mut self, bytes: &[u8]) -> Bytes {
        let mut out = BytesMut::with_capacity(bytes.len() + self.event.len());
        let mut rest = bytes;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let line;
            (line, rest) = rest.split_at(end + 1);
            self.line(line, true, &mut out);
        }
        self.line(rest, false, &mut out);
        out.freeze()
    }

    /// The bytes that were held back when the stream ended.
    #[must_use]
    pub fn finish(self) -> Bytes {
        if is_usage_chunk(&self.event) { Bytes::new() } else { self.event.freeze() }
    }

    fn line(&mut self, bytes: &[u8], is_whole: bool, out: &mut BytesMut) {
        self.line_bytes += bytes.iter().filter(|byte| !matches!(byte, b'\r' | b'\n')).count();
        if self.is_passing {
            out.extend_from_slice(bytes);
        } else {
            self.event.extend_from_slice(bytes);
        }
        let ends_event = is_whole && self.line_bytes == 0;
        if is_whole {
            self.line_bytes = 0;
        }
        if ends_event {
            // The length decides first, so that the result is the same however the bytes were split.
            if self.event.len() > FILTER_EVENT_BYTES_MAX || !is_usage_chunk(&self.event) {
                out.extend_from_slice(&self.event);
            }
            self.event.clear();
            self.is_passing = false;
        } else if self.event.len() > FILTER_EVENT_BYTES_MAX {
            out.extend_from_slice(&self.event);
            self.event.clear();
            self.is_passing = true;
        }
    }
}

/// Whether an event is the usage chunk.
fn is_usage_chunk(event: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<serde::de::IgnoredAny>,
        usage: Option<serde::de::IgnoredAny>,
    }
    if memchr::memmem::find(event, b"\"usage\"").is_none() {
        return false;
    }
    let mut data = event.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
    let (Some(only), None) = (data.next(), data.next()) else { return false };
    serde_json::from_slice::<Chunk>(only).is_ok_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHAT: &str = "data: {\"id\":\"1\",\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\": {\"}}]}\n\n\
        : ping\n\n\
        data: {\"id\":\"1\",\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\r\n\r\n\
        data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"total_tokens\":12,\"completion_tokens\":3,\
        \"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n\
        data: [DONE]\n\n";

    fn read(path: ApiPath, streamed: bool, parts: &[&[u8]]) -> (u32, Option<Usage>) {
        let mut reader = UsageReader::new(path, streamed);
        for part in parts {
            reader.feed(part);
        }
        (reader.output_events(), reader.finish())
    }

    fn filtered(parts: &[&[u8]]) -> Vec<u8> {
        let mut filter = SseFilter::new();
        let mut out: Vec<u8> = parts.iter().flat_map(|part| filter.feed(part)).collect();
        out.extend_from_slice(&filter.finish());
        out
    }

    #[test]
    fn a_stream_tells_its_usage_and_loses_only_the_extra_chunk() {
        let usage = Usage { prompt_tokens: 9, cached_tokens: Some(8), completion_tokens: 3 };
        assert_eq!(read(ApiPath::ChatCompletions, true, &[CHAT.as_bytes()]), (2, Some(usage)));
        let (start, end) = (CHAT.find("data: {\"id\":\"1\",\"choices\":[],"), CHAT.find("data: [DONE]"));
        let expected = format!("{}{}", &CHAT[..start.expect("there")], &CHAT[end.expect("there")..]);
        assert_eq!(filtered(&[CHAT.as_bytes()]), expected.as_bytes());
    }

    #[test]
    fn whole_replies_of_each_dialect_tell_their_usage() {
        let responses =
            br#"{"output":[],"usage":{"input_tokens":5,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}"#;
        let usage = Usage { prompt_tokens: 5, cached_tokens: Some(4), completion_tokens: 2 };
        assert_eq!(read(ApiPath::Responses, false, &[responses]), (1, Some(usage)));
        let generate =
            br#"{"text":"a","meta_info":{"prompt_tokens":5,"cached_tokens":4,"completion_tokens":2,"x":{"y":1}}}"#;
        assert_eq!(read(ApiPath::SglangGenerate, false, &[generate]), (1, Some(usage)));
        let plain = br#"{"choices":[{"text":"usage"}],"usage" : {"prompt_tokens":5,"prompt_tokens_details":null}}"#;
        let usage = Usage { prompt_tokens: 5, cached_tokens: None, completion_tokens: 0 };
        assert_eq!(read(ApiPath::Completions, false, &[plain]), (1, Some(usage)));
        assert_eq!(read(ApiPath::Completions, false, &[b"{}"]), (1, None));
        assert_eq!(read(ApiPath::Completions, false, &[]), (0, None));
    }

    #[test]
    fn messages_count_cached_tokens_beside_the_others() {
        let stream = b"event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":0,\
            \"cache_read_input_tokens\":16}}}\n\nevent: content_block_delta\ndata: {}\n\n\
            event: message_delta\ndata: {\"usage\":{\"output_tokens\":7}}\n\n";
        let usage = Usage { prompt_tokens: 19, cached_tokens: Some(16), completion_tokens: 7 };
        assert_eq!(read(ApiPath::Messages, true, &[stream]), (2, Some(usage)));
    }

    #[test]
    fn long_events_pass_and_take_no_memory() {
        let mut stream = b"data: {\"choices\":[],\"usage\":{\"a\":\"".to_vec();
        stream.resize(FILTER_EVENT_BYTES_MAX * 3, b'x');
        stream.extend_from_slice(b"\"}}\n\n");
        let long = stream.len();
        stream.extend_from_slice(CHAT.as_bytes());
        let mut filter = SseFilter::new();
        let mut passed = 0;
        for part in stream[..long].chunks(1000) {
            passed += filter.feed(part).len();
            assert!(filter.event.len() <= FILTER_EVENT_BYTES_MAX + 1000);
        }
        assert_eq!(passed, long);
        assert!(filter.feed(CHAT.as_bytes()).len() < CHAT.len());
    }

    /// The same bytes in parts.
    fn parts<'a>(bytes: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        cuts.sort_unstable();
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain(std::iter::once(bytes.len()));
        starts.zip(ends).map(|(start, end)| &bytes[start..end]).collect()
    }

    /// Streams made of pieces that matter to the readers.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let pieces = prop_oneof![
            Just(CHAT.to_owned()),
            Just("data: ".to_owned()),
            Just("\"usage\"".to_owned()),
            Just("{\"choices\":[],\"usage\":{\"prompt_tokens\":1}}".to_owned()),
            Just("\n".to_owned()),
            Just("\r\n".to_owned()),
            Just("\r".to_owned()),
            Just("\\\"".to_owned()),
            Just("x".repeat(FILTER_EVENT_BYTES_MAX)),
            "[a-z\"{}:\\\\]{0,12}",
        ];
        prop::collection::vec(pieces, 0..24).prop_map(|pieces| pieces.concat().into_bytes())
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_split(
            bytes in stream(),
            cuts in prop::collection::vec(any::<usize>(), 0..20),
            path in prop_oneof![Just(ApiPath::ChatCompletions), Just(ApiPath::Messages), Just(ApiPath::SglangGenerate)],
            streamed in any::<bool>(),
        ) {
            let parts = parts(&bytes, &cuts);
            prop_assert_eq!(read(path, streamed, &parts), read(path, streamed, &[&bytes]));
            prop_assert_eq!(filtered(&parts), filtered(&[&bytes]));
        }

        #[test]
        fn each_byte_alone_gives_the_same(bytes in stream()) {
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            prop_assert_eq!(filtered(&single), filtered(&[&bytes]));
            let path = ApiPath::ChatCompletions;
            prop_assert_eq!(read(path, true, &single), read(path, true, &[&bytes]));
        }
    }
}
