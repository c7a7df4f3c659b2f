//! How a request is put: in our frames, or over HTTP as the peer takes it. Both are made beforehand, and only what
//! names a request is written into them later, so that making them is in no time.

use std::collections::VecDeque;

use dynamo_kv_router::protocols::{BlockHashOptions, compute_block_hash_for_seq, compute_seq_hash_for_block};
use kvrouted::hash;
use kvrouted::ids::{CorrelationId, LocalHash, SpaceId};
use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, FrameKind, RequestEncoder, decode_reply};
use serde_json::json;

use super::contents::{Given, PROMPTS, Size, prompt_hashes, prompt_tokens, tokens_of};
use crate::failure::Failure;
use crate::ingest::{BLOCK_SIZE, SCHEME};

/// Stands where a request's name comes.
const NAME: &str = "################";
/// Where a frame's correlation id lies.
const CORRELATION: std::ops::Range<usize> = 8..16;

/// What was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A route.
    Route,
    /// A free.
    Free,
}

/// A reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    /// Its length.
    pub(crate) bytes: usize,
    /// Which request of the connection it answers.
    pub(crate) slot: u32,
    /// Which part of it.
    pub(crate) step: Step,
}

/// A way to ask, on one connection.
pub(crate) trait Dialect {
    /// Appends a route that books as `number`.
    fn ask(&mut self, slot: u32, number: u64, out: &mut Vec<u8>);
    /// Appends the free of that booking.
    fn release(&mut self, slot: u32, number: u64, out: &mut Vec<u8>);
    /// The reply that `received` begins with, if it is whole.
    ///
    /// # Errors
    /// It is a refusal.
    fn reply(&mut self, received: &[u8]) -> Result<Option<Answered>, Failure>;
}

/// A request with a place for its name.
#[derive(Clone)]
struct Form {
    bytes: Vec<u8>,
    name_at: usize,
}

impl Form {
    fn new(bytes: Vec<u8>) -> Result<Self, Failure> {
        let found = bytes.windows(NAME.len()).position(|window| window == NAME.as_bytes());
        let name_at = found.ok_or_else(|| Failure::Contract("a request has no name".to_owned()))?;
        Ok(Self { bytes, name_at })
    }

    /// Appends it under a name; answers with where it begins.
    fn append(&self, number: u64, out: &mut Vec<u8>) -> usize {
        let start = out.len();
        out.extend_from_slice(&self.bytes);
        let name = start + self.name_at;
        for (digit, to) in out[name..name + NAME.len()].iter_mut().enumerate() {
            *to = b"0123456789abcdef"[(number >> (60 - 4 * digit)) as usize & 15];
        }
        start
    }
}

fn route_by_hashes(space: SpaceId, prompt: &[LocalHash]) -> Result<Form, Failure> {
    let hashes: Vec<u8> = prompt.iter().flat_map(|local| local.0.to_le_bytes()).collect();
    let token_count = tokens_of(prompt.len() as u64) as u32;
    route_form(space, Prompt::LocalHashes { hashes: &hashes, scheme: SCHEME, token_count })
}

fn route_form(space: SpaceId, prompt: Prompt<'_>) -> Result<Form, Failure> {
    let book = Some(BookingRequest { request_id: NAME, attempt: 0 });
    let (request, mut out) = (RouteRequest { book, ..RouteRequest::new(space, prompt) }, Vec::new());
    let encoded = RequestEncoder::default().route(CorrelationId(0), &request, &mut out);
    encoded.map_err(|error| Failure::Contract(error.to_string()))?;
    Form::new(out)
}

/// kvrouted's frames.
#[derive(Clone)]
pub(crate) struct Frames {
    routes: Vec<Form>,
    free: Form,
    /// Bodies of the last replies, bytes: to a route and to a free.
    pub(crate) reply_bytes: std::rc::Rc<std::cell::Cell<[u32; 2]>>,
}

impl Frames {
    /// Requests of a size.
    ///
    /// # Errors
    /// They cannot be encoded.
    pub(crate) fn new(size: Size, space: SpaceId) -> Result<Self, Failure> {
        let route = |prompt: u64| {
            let tokens = prompt_tokens(prompt, size.blocks);
            match size.given {
                Given::Tokens => route_form(space, Prompt::Tokens(hash::token_bytes(&tokens))),
                Given::Hashes => route_by_hashes(space, &prompt_hashes(prompt, size.blocks)),
            }
        };
        Self::of_routes((0..PROMPTS).map(route).collect::<Result<_, _>>()?)
    }

    /// Requests about these prompts, in turns.
    ///
    /// # Errors
    /// They cannot be encoded.
    pub(crate) fn of_hashes(prompts: &[Vec<LocalHash>], space: SpaceId) -> Result<Self, Failure> {
        Self::of_routes(prompts.iter().map(|prompt| route_by_hashes(space, prompt)).collect::<Result<_, _>>()?)
    }

    fn of_routes(routes: Vec<Form>) -> Result<Self, Failure> {
        let (booking, mut free) = (BookingRef::Request { request_id: NAME, attempt: 0 }, Vec::new());
        RequestEncoder::default().free(CorrelationId(0), &booking, &mut free);
        Ok(Self { routes, free: Form::new(free)?, reply_bytes: std::rc::Rc::default() })
    }

    /// Bytes of a route.
    #[must_use]
    pub(crate) fn request_bytes(&self) -> usize {
        self.routes.first().map_or(0, |form| form.bytes.len())
    }
}

impl Dialect for Frames {
    fn ask(&mut self, slot: u32, number: u64, out: &mut Vec<u8>) {
        let start = self.routes[(number % self.routes.len() as u64) as usize].append(number, out);
        out[start..][CORRELATION].copy_from_slice(&u64::from(slot + 1).to_le_bytes());
    }

    fn release(&mut self, slot: u32, number: u64, out: &mut Vec<u8>) {
        let start = self.free.append(number, out);
        out[start..][CORRELATION].copy_from_slice(&u64::from(slot + 1).to_le_bytes());
    }

    fn reply(&mut self, received: &[u8]) -> Result<Option<Answered>, Failure> {
        let Some(header) = received.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
        let header = FrameHeader::parse(header).map_err(|fault| Failure::Contract(fault.to_string()))?;
        let bytes = FRAME_HEADER_BYTES + header.body_bytes as usize;
        let Some(body) = received.get(FRAME_HEADER_BYTES..bytes) else { return Ok(None) };
        let [of_route, of_free] = self.reply_bytes.get();
        let step = match FrameKind::from_u8(header.kind) {
            Some(FrameKind::RouteReply) => {
                self.reply_bytes.set([header.body_bytes, of_free]);
                Step::Route
            }
            Some(FrameKind::FreeReply) => {
                self.reply_bytes.set([of_route, header.body_bytes]);
                Step::Free
            }
            _ => return Err(Failure::Contract(format!("answered {:?}", decode_reply(header.kind, body)))),
        };
        Ok(Some(Answered { bytes, slot: (header.correlation_id.0 - 1) as u32, step }))
    }
}

/// The peer's HTTP interface. Replies come in the order of requests.
#[derive(Clone)]
pub(crate) struct Http {
    routes: Vec<Form>,
    free: Form,
    asked: VecDeque<(u32, Step)>,
}

impl Http {
    /// Requests of a size.
    ///
    /// # Errors
    /// They cannot be encoded.
    pub(crate) fn new(size: Size) -> Result<Self, Failure> {
        let route = |prompt: u64| {
            let tokens = prompt_tokens(prompt, size.blocks);
            let body = match size.given {
                Given::Tokens => json!({ "selection_id": NAME, "token_ids": tokens }),
                Given::Hashes => {
                    let locals = compute_block_hash_for_seq(&tokens, BLOCK_SIZE, BlockHashOptions::default());
                    let blocks: Vec<i64> = locals.iter().map(|local| local.0 as i64).collect();
                    let sequence = compute_seq_hash_for_block(&locals);
                    let sequence: Vec<i64> = sequence.iter().map(|hash| *hash as i64).collect();
                    json!({ "selection_id": NAME, "block_hashes": blocks, "sequence_hashes": sequence,
                            "isl_tokens": tokens_of(size.blocks) })
                }
            };
            Form::new(post("/select_and_reserve", &body.to_string()))
        };
        let routes = (0..PROMPTS).map(route).collect::<Result<_, _>>()?;
        let free = format!("DELETE /reservations/{NAME} HTTP/1.1\r\nhost: peer\r\n\r\n");
        Ok(Self { routes, free: Form::new(free.into_bytes())?, asked: VecDeque::new() })
    }

    /// Bytes of a route.
    #[must_use]
    pub(crate) fn request_bytes(&self) -> usize {
        self.routes.first().map_or(0, |form| form.bytes.len())
    }
}

/// A request with a JSON body.
#[must_use]
pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: peer\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    head.into_bytes()
}

/// The length of head and body of the reply that `received` begins with, if it is whole.
///
/// # Errors
/// It is a refusal, or no reply.
pub(crate) fn whole(received: &[u8]) -> Result<Option<(usize, usize)>, Failure> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(&received[..end]);
    let length = head.split("\r\n").find_map(|line| line.strip_prefix("content-length: "));
    let body: usize = length.and_then(|length| length.parse().ok()).unwrap_or(0);
    let (head_bytes, bytes) = (end + 4, end + 4 + body);
    if received.len() < bytes {
        return Ok(None);
    }
    if !head.starts_with("HTTP/1.1 2") {
        return Err(Failure::Peer(String::from_utf8_lossy(&received[..bytes]).into_owned()));
    }
    Ok(Some((head_bytes, body)))
}

impl Dialect for Http {
    fn ask(&mut self, slot: u32, number: u64, out: &mut Vec<u8>) {
        self.routes[(number % PROMPTS) as usize].append(number, out);
        self.asked.push_back((slot, Step::Route));
    }

    fn release(&mut self, slot: u32, number: u64, out: &mut Vec<u8>) {
        self.free.append(number, out);
        self.asked.push_back((slot, Step::Free));
    }

    fn reply(&mut self, received: &[u8]) -> Result<Option<Answered>, Failure> {
        let Some((head, body)) = whole(received)? else { return Ok(None) };
        let next = self.asked.pop_front();
        let (slot, step) = next.ok_or_else(|| Failure::Peer("answers what was not asked".to_owned()))?;
        Ok(Some(Answered { bytes: head + body, slot, step }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::contents::SIZES;
    use super::*;

    #[test]
    fn a_request_carries_the_name_it_is_given_and_nothing_else_changes() {
        let form = Form::new(format!("before {NAME} after").into_bytes()).unwrap();
        let mut out = b"x".to_vec();
        assert_eq!(form.append(0xabc, &mut out), 1);
        assert_eq!(out, b"xbefore 0000000000000abc after");
    }

    #[test]
    fn the_sizes_are_what_they_are_said_to_be() {
        let bytes = SIZES.map(|size| Frames::new(size, SpaceId(0)).unwrap().request_bytes());
        assert!((200..400).contains(&bytes[0]), "{bytes:?}");
        assert!((5_760..6_144).contains(&bytes[1]), "{bytes:?}");
        assert!((48_000..48_500).contains(&bytes[2]), "{bytes:?}");
    }

    #[test]
    fn a_reply_over_http_is_cut_where_it_ends_and_a_refusal_is_an_error() {
        let reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP";
        let bytes = reply.len() - 4;
        assert_eq!(whole(reply).unwrap(), Some((bytes - 2, 2)));
        assert_eq!(whole(&reply[..bytes - 1]).unwrap(), None);
        assert!(whole(b"HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n").is_err());
    }
}
