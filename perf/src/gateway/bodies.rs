//! What is asked and what is answered: fixed bytes, so that every way carries the same.

use std::fmt::Write;

use crate::args::Asked;

/// The only model.
pub(crate) const MODEL: &str = "m";
/// Bytes of each request's body.
pub(crate) const BODY_BYTES: usize = 4096;
/// Different bodies of each kind. All of them are asked before anything is measured, so that their tokens are known.
pub(crate) const BODIES: usize = 16;
/// Tokens in a block, as the upstream says.
pub(crate) const BLOCK_SIZE: usize = 16;
/// Events of a stream before `[DONE]`.
pub(crate) const EVENTS: usize = 32;
/// What makes a body ask for a stream.
pub(crate) const STREAM: &[u8] = br#""stream":true"#;
/// Bytes of a chat for each of the tokens that the upstream's renderer answers.
const BYTES_PER_TOKEN: usize = 4;
/// The least token id: all ids have five digits.
const ID_MIN: usize = 10_000;
const IDS: usize = 89_999;

impl Asked {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Ids, Self::Chat, Self::Stream];

    /// Where it is sent.
    #[must_use]
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Ids => "/v1/completions",
            Self::Chat | Self::Stream => "/v1/chat/completions",
        }
    }

    /// The bodies, each of [`BODY_BYTES`] bytes.
    #[must_use]
    pub(crate) fn bodies(self) -> Vec<Vec<u8>> {
        (0..BODIES).map(|number| self.body(number)).collect()
    }

    fn body(self, number: usize) -> Vec<u8> {
        let (head, tail) = match self {
            Self::Ids => (format!(r#"{{"model":"{MODEL}","max_tokens":16,"user":"{number:02}","prompt":["#), "]}"),
            Self::Chat => (chat(number), r#""}],"max_tokens":16,"stream":false}"#),
            Self::Stream => (chat(number), r#""}],"max_tokens":16,"stream":true}"#),
        };
        let room = BODY_BYTES - head.len() - tail.len();
        let middle = if self == Self::Ids { ids(number, room) } else { words(number, room) };
        [head.as_bytes(), middle.as_bytes(), tail.as_bytes()].concat()
    }

    /// The whole reply to any of them, or all events of one.
    #[must_use]
    pub(crate) fn reply(self) -> Vec<u8> {
        match self {
            Self::Ids => {
                // Three commas are between the fields; one fewer than ids is between the ids.
                let prompt = self.body(0).iter().filter(|byte| **byte == b',').count() - 3 + 1;
                let text = r#"{"index":0,"text":" It is a fixed answer.","logprobs":null,"finish_reason":"length"}"#;
                answer("text_completion", text, prompt)
            }
            Self::Chat => {
                let text = r#"{"index":0,"message":{"role":"assistant","content":"It is a fixed answer."},"finish_reason":"length"}"#;
                answer("chat.completion", text, BODY_BYTES / BYTES_PER_TOKEN)
            }
            Self::Stream => (0..=EVENTS).flat_map(event).collect(),
        }
    }
}

/// One event of a stream; the last one ends it.
#[must_use]
pub(crate) fn event(number: usize) -> Vec<u8> {
    if number >= EVENTS {
        return b"data: [DONE]\n\n".to_vec();
    }
    let choice = format!(r#"{{"index":0,"delta":{{"content":" token{number:02}"}},"finish_reason":null}}"#);
    let begin = r#"{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"#;
    format!("data: {begin}\"{MODEL}\",\"choices\":[{choice}]}}\n\n").into_bytes()
}

/// What the upstream's renderer answers for a chat.
#[must_use]
pub(crate) fn rendered(body: &[u8]) -> Vec<u8> {
    let ids = body.chunks(BYTES_PER_TOKEN).map(|bytes| bytes.iter().fold(0, |sum, byte| sum * 31 + usize::from(*byte)));
    let ids: Vec<_> = ids.map(|sum| (ID_MIN + sum % IDS).to_string()).collect();
    format!(r#"{{"request_id":"r","token_ids":[{}]}}"#, ids.join(",")).into_bytes()
}

fn answer(object: &str, choice: &str, prompt: usize) -> Vec<u8> {
    let details = r#""prompt_tokens_details":{"cached_tokens":0}"#;
    let usage =
        format!(r#"{{"prompt_tokens":{prompt},"completion_tokens":16,"total_tokens":{},{details}}}"#, prompt + 16);
    let id = "cmpl-0123456789abcdef";
    format!(
        r#"{{"id":"{id}","object":"{object}","created":1700000000,"model":"{MODEL}","choices":[{choice}],"usage":{usage}}}"#
    )
    .into_bytes()
}

fn chat(number: usize) -> String {
    let system = r#"{"role":"system","content":"You answer in one sentence."}"#;
    format!(r#"{{"model":"{MODEL}","messages":[{system},{{"role":"user","content":"Question {number:02}: "#)
}

/// Ids with commas between, padded with spaces.
fn ids(number: usize, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes);
    for place in 0..(bytes + 1) / 6 {
        let comma = if place == 0 { "" } else { "," };
        // A String takes everything.
        let _ = write!(text, "{comma}{}", ID_MIN + (number * 7919 + place * 104_729) % IDS);
    }
    text.extend(std::iter::repeat_n(' ', bytes - text.len()));
    text
}

fn words(number: usize, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 8);
    for place in 0.. {
        if text.len() >= bytes {
            break;
        }
        // A String takes everything.
        let _ = write!(text, "word{} ", (number * 7919 + place * 104_729) % 9973);
    }
    text.truncate(bytes);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn bodies_are_json_of_the_same_size_and_differ() {
        for asked in Asked::ALL {
            let bodies = asked.bodies();
            for body in &bodies {
                assert_eq!(body.len(), BODY_BYTES);
                let read: Value = serde_json::from_slice(body).expect("JSON");
                assert_eq!(read["model"], MODEL);
                assert_eq!(body.windows(STREAM.len()).any(|bytes| bytes == STREAM), asked == Asked::Stream);
            }
            assert!(bodies.iter().enumerate().all(|(at, body)| !bodies[..at].contains(body)));
        }
    }

    #[test]
    fn replies_count_the_tokens_of_the_prompts() {
        let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).expect("JSON");
        let ids = read(&Asked::Ids.body(3));
        let prompt = ids["prompt"].as_array().expect("a list");
        assert!(prompt.iter().all(|id| id.as_u64().is_some_and(|id| (10_000..100_000).contains(&id))));
        assert_eq!(read(&Asked::Ids.reply())["usage"]["prompt_tokens"], prompt.len());
        let rendered = read(&rendered(&Asked::Chat.body(3)));
        let tokens = rendered["token_ids"].as_array().expect("a list").len();
        assert_eq!(read(&Asked::Chat.reply())["usage"]["prompt_tokens"], tokens);
    }

    #[test]
    fn a_stream_is_events_of_json_and_an_end() {
        let reply = String::from_utf8(Asked::Stream.reply()).expect("text");
        let events: Vec<_> = reply.split_terminator("\n\n").collect();
        assert_eq!((events.len(), events.last()), (EVENTS + 1, Some(&"data: [DONE]")));
        for event in &events[..EVENTS] {
            let json = event.strip_prefix("data: ").expect("an event");
            assert_eq!(serde_json::from_str::<Value>(json).expect("JSON")["model"], MODEL);
        }
    }
}
