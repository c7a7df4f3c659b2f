//! A worker's events in a JetStream stream: subjects, messages, and what is asked of a server. Pure.
//!
//! | subject | stored | who publishes there | messages |
//! |---|---|---|---|
//! | `PREFIX.events.ID.RANK` | yes | the worker's relay | [`Kind::Batch`], in the order of their numbers |
//! | `PREFIX.snapshot.ID.RANK` | yes | the same | [`Kind::Part`], the parts of snapshots |
//! | `PREFIX.start.ID.RANK` | yes | the same | [`Kind::Start`], once a snapshot is stored whole |
//! | `PREFIX.alive.ID.RANK` | no | the same | [`Kind::Heartbeat`], while all batches are stored |
//!
//! One stream holds all workers of a prefix. A reader hears a worker's batches and heartbeats by a plain subscription and
//! reads from the stream only what it missed, so a live batch waits for no store. The last [`Start`] says where a reader
//! begins that knows nothing. Numbers of messages in the stream are those of JetStream; numbers of batches are the relay's
//! own.
//!
//! Nothing here is believed: a message can be anything, and so can what a server says.

use bytes::{BufMut as _, Bytes, BytesMut};
use data_encoding::BASE64;
use serde::Deserialize;
use serde_json::json;

use crate::ids::{EventSeq, Worker};
use crate::limits::{NATS_CONSUMER_IDLE_S, NATS_STREAM_BYTES_MAX, NATS_STREAM_SUBJECT_MESSAGES_MAX, NATS_TWICE_S_MAX};

/// What every message begins with; another layout gets another one.
const MAGIC: &[u8; 4] = b"KVE1";
const HEAD_BYTES: usize = MAGIC.len() + 1 + 8;
const START_BYTES: usize = 4 * 8;
const NS_PER_S: u64 = 1_000_000_000;

/// JetStream's number of the error that a message is not there.
const NO_MESSAGE: u64 = 10_037;
/// JetStream's number of the error that a stream of this name has other settings: its operator chose them.
const OTHER_SETTINGS: u64 = 10_058;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A batch of the relay's stream.
    Batch = 1,
    /// A part of a snapshot. It has no number.
    Part = 2,
    /// Where a reader begins; its number is that of the first batch behind.
    Start = 3,
    /// A heartbeat of the relay. It has no number.
    Heartbeat = 4,
}

/// A message of a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) seq: EventSeq,
    pub(crate) payload: Bytes,
}

impl Frame {
    /// As bytes.
    pub(crate) fn encode(kind: Kind, seq: EventSeq, payload: &[u8]) -> Bytes {
        let mut bytes = BytesMut::with_capacity(HEAD_BYTES + payload.len());
        bytes.put_slice(MAGIC);
        bytes.put_u8(kind as u8);
        bytes.put_u64(seq.0);
        bytes.put_slice(payload);
        bytes.freeze()
    }

    /// Of bytes; `None` = no relay sends them.
    pub(crate) fn decode(bytes: &Bytes) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (&kind, rest) = rest.split_first()?;
        let (seq, _) = rest.split_first_chunk()?;
        let kind = [Kind::Batch, Kind::Part, Kind::Start, Kind::Heartbeat].into_iter().find(|of| *of as u8 == kind)?;
        (magic == MAGIC).then(|| Self {
            kind,
            seq: EventSeq(u64::from_be_bytes(*seq)),
            payload: bytes.slice(HEAD_BYTES..),
        })
    }
}

/// Where a reader begins. Numbers are JetStream's, except `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    /// Drawn by the relay at its start.
    pub(crate) run: u64,
    /// The first part of the snapshot; 0 = there is none, and the batches begin at 0.
    pub(crate) begins: u64,
    /// Its last part.
    pub(crate) ends: u64,
    /// No batch from `first` on is before this message.
    pub(crate) batches: u64,
    /// The first batch that the snapshot does not contain.
    pub(crate) first: EventSeq,
}

impl Start {
    /// The oldest message that a reader may need.
    pub(crate) fn oldest(&self) -> u64 {
        if self.begins == 0 { self.batches } else { self.begins.min(self.batches) }
    }

    /// As the message that says so.
    pub(crate) fn encode(&self) -> Bytes {
        let numbers = [self.run, self.begins, self.ends, self.batches];
        Frame::encode(Kind::Start, self.first, &numbers.map(u64::to_be_bytes).concat())
    }

    fn decode(frame: &Frame) -> Option<Self> {
        let payload = <&[u8; START_BYTES]>::try_from(&frame.payload[..]).ok().filter(|_| frame.kind == Kind::Start)?;
        let (numbers, _) = payload.as_chunks::<8>();
        let [run, begins, ends, batches] = [0, 1, 2, 3].map(|at| u64::from_be_bytes(numbers[at]));
        let this = Self { run, begins, ends, batches, first: frame.seq };
        // A snapshot has parts, and what begins without one begins with the first batch.
        let is_sound = if begins == 0 { ends == 0 && frame.seq == EventSeq(0) } else { begins <= ends };
        (is_sound && batches > 0).then_some(this)
    }
}

/// The names of one worker's events.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    prefix: String,
    /// The stream.
    pub(crate) stream: String,
    pub(crate) events: String,
    pub(crate) snapshot: String,
    pub(crate) start: String,
    pub(crate) alive: String,
}

impl Names {
    pub(crate) fn new(prefix: &str, worker: Worker) -> Self {
        let subject = |what: &str| format!("{prefix}.{what}.{}.{}", worker.id, worker.rank);
        Self {
            prefix: prefix.to_owned(),
            // The name of a stream has no dot.
            stream: format!("{}_events", prefix.replace('.', "_")),
            events: subject("events"),
            snapshot: subject("snapshot"),
            start: subject("start"),
            alive: subject("alive"),
        }
    }

    /// All subjects of the worker.
    fn all(&self) -> String {
        self.events.replacen(".events.", ".*.", 1)
    }
}

/// What is asked of JetStream: a subject, and the question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) subject: String,
    pub(crate) body: String,
}

impl Question {
    fn new(call: &str, names: &Names, body: &serde_json::Value) -> Self {
        Self { subject: format!("$JS.API.{call}.{}", names.stream), body: body.to_string() }
    }

    /// Makes the stream, unless it is there.
    pub(crate) fn create(names: &Names) -> Self {
        let subjects = ["events", "snapshot", "start"].map(|what| format!("{}.{what}.*.*", names.prefix));
        let settings = json!({
            "name": names.stream, "subjects": subjects, "retention": "limits", "discard": "old", "storage": "file",
            "num_replicas": 1, "max_consumers": -1, "max_msgs": -1, "max_msg_size": -1, "max_age": 0,
            "max_bytes": NATS_STREAM_BYTES_MAX, "max_msgs_per_subject": NATS_STREAM_SUBJECT_MESSAGES_MAX,
            "duplicate_window": NATS_TWICE_S_MAX * NS_PER_S,
        });
        Self::new("STREAM.CREATE", names, &settings)
    }

    /// Wants the last start of the worker.
    pub(crate) fn start(names: &Names) -> Self {
        Self::new("STREAM.MSG.GET", names, &json!({ "last_by_subj": names.start }))
    }

    /// Wants the message of this number.
    pub(crate) fn message(names: &Names, number: u64) -> Self {
        Self::new("STREAM.MSG.GET", names, &json!({ "seq": number }))
    }

    /// Drops the worker's messages before the one of this number; `None` = there can be none. (Without a number above 1 a
    /// server would drop all.)
    pub(crate) fn purge(names: &Names, before: u64) -> Option<Self> {
        (before > 1).then(|| Self::new("STREAM.PURGE", names, &json!({ "filter": names.all(), "seq": before })))
    }

    /// Wants a consumer of one of the worker's subjects, from the message of this number on.
    pub(crate) fn consumer(names: &Names, subject: &str, from: u64) -> Self {
        let settings = json!({
            "deliver_policy": "by_start_sequence", "opt_start_seq": from, "filter_subject": subject,
            "ack_policy": "none", "replay_policy": "instant", "mem_storage": true, "num_replicas": 1,
            "inactive_threshold": NATS_CONSUMER_IDLE_S * NS_PER_S,
        });
        Self::new("CONSUMER.CREATE", names, &json!({ "stream_name": names.stream, "config": settings }))
    }

    /// Wants the next messages of a consumer that are there.
    pub(crate) fn next(names: &Names, consumer: &str, messages: u32) -> Self {
        let Self { subject, body } =
            Self::new("CONSUMER.MSG.NEXT", names, &json!({ "batch": messages, "no_wait": true }));
        Self { subject: format!("{subject}.{consumer}"), body }
    }
}

/// Why JetStream does not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The message is not there.
    NoMessage,
    /// The stream is there, with settings of its operator.
    OtherSettings,
    /// Something else.
    Other(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer<T> {
    Error { error: Fault },
    Answer(T),
}

#[derive(Deserialize)]
struct Fault {
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

fn answer<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refused> {
    match serde_json::from_slice(body) {
        Ok(Answer::Answer(answer)) => Ok(answer),
        Ok(Answer::Error { error: Fault { err_code: NO_MESSAGE, .. } }) => Err(Refused::NoMessage),
        Ok(Answer::Error { error: Fault { err_code: OTHER_SETTINGS, .. } }) => Err(Refused::OtherSettings),
        Ok(Answer::Error { error }) => Err(Refused::Other(error.description)),
        Err(_) => Err(Refused::Other("it answers what JetStream does not".to_owned())),
    }
}

/// The number that the stream gave a message.
pub(crate) fn stored(body: &[u8]) -> Result<u64, Refused> {
    #[derive(Deserialize)]
    struct Stored {
        seq: u64,
    }
    answer(body).map(|Stored { seq }| seq)
}

/// Whether a question was answered without a refusal.
pub(crate) fn done(body: &[u8]) -> Result<(), Refused> {
    answer::<serde::de::IgnoredAny>(body).map(drop)
}

/// The start that a stored message says.
pub(crate) fn started(body: &[u8]) -> Result<Start, Refused> {
    #[derive(Deserialize)]
    struct Got<'a> {
        #[serde(borrow)]
        message: Stored<'a>,
    }
    #[derive(Deserialize)]
    struct Stored<'a> {
        #[serde(default)]
        data: &'a str,
    }
    let Got { message } = answer(body)?;
    let bytes = BASE64.decode(message.data.as_bytes()).ok().map(Bytes::from);
    let start = bytes.as_ref().and_then(Frame::decode).and_then(|frame| Start::decode(&frame));
    start.ok_or_else(|| Refused::Other("the last message on the worker's subject of starts is no relay's".to_owned()))
}

/// The name of a consumer that was made, and how many messages it will bring.
pub(crate) fn consumer(body: &[u8]) -> Result<(String, u64), Refused> {
    #[derive(Deserialize)]
    struct Made {
        name: String,
        #[serde(default)]
        num_pending: u64,
    }
    let Made { name, num_pending } = answer(body)?;
    let is_word = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && !b".*>".contains(&byte));
    if is_word { Ok((name, num_pending)) } else { Err(Refused::Other("a consumer has no name".to_owned())) }
}

/// Where a message stands in its stream, as the subject for its acknowledgement says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its number.
    pub(crate) number: u64,
    /// How many messages the consumer will still bring.
    pub(crate) pending: u64,
}

impl Place {
    /// With the name of the consumer, of `$JS.ACK.STREAM.CONSUMER.TIMES.NUMBER.COUNT.TIME.PENDING`. Newer servers put a domain
    /// and an account before the stream.
    pub(crate) fn of(reply: &str) -> Option<(&str, Self)> {
        let words: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').take(11).collect();
        let (consumer, number, pending) = match words[..] {
            [_, consumer, _, number, _, _, pending] | [_, _, _, consumer, _, number, _, _, pending, ..] => {
                (consumer, number, pending)
            }
            _ => return None,
        };
        Some((consumer, Self { number: number.parse().ok()?, pending: pending.parse().ok()? }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names() -> Names {
        Names::new("a.b", Worker::new(7, 1))
    }

    #[test]
    fn a_frame_is_read_as_it_was_written_and_nothing_else_is_one() {
        let bytes = Frame::encode(Kind::Batch, EventSeq(5), b"payload");
        let frame = Frame { kind: Kind::Batch, seq: EventSeq(5), payload: Bytes::from_static(b"payload") };
        assert_eq!(Frame::decode(&bytes), Some(frame));
        for wrong in [
            &b""[..],
            b"KVE1",
            b"KVE1\x01\0\0\0\0\0\0\0",
            b"KVE2\x01\0\0\0\0\0\0\0\x05p",
            b"KVE1\x09\0\0\0\0\0\0\0\x05",
        ] {
            assert_eq!(Frame::decode(&Bytes::from_static(wrong)), None, "{wrong:?}");
        }
    }

    #[test]
    fn subjects_name_the_worker_and_the_stream_has_no_dot() {
        let names = names();
        assert_eq!((names.events.as_str(), names.alive.as_str()), ("a.b.events.7.1", "a.b.alive.7.1"));
        assert_eq!((names.stream.as_str(), names.all().as_str()), ("a_b_events", "a.b.*.7.1"));
        let question = Question::next(&names, "c", 9);
        assert_eq!(question.subject, "$JS.API.CONSUMER.MSG.NEXT.a_b_events.c");
        assert_eq!((Question::purge(&names, 0), Question::purge(&names, 1)), (None, None));
        assert!(Question::purge(&names, 2).expect("a question").body.contains("\"seq\":2"));
        assert!(Question::create(&names).body.contains("\"a.b.snapshot.*.*\""));
    }

    #[test]
    fn a_start_is_read_only_if_it_can_be_one() {
        let said =
            |start: &Start| format!("{{\"message\":{{\"seq\":9,\"data\":\"{}\"}}}}", BASE64.encode(&start.encode()));
        let start = Start { run: 1, begins: 5, ends: 8, batches: 3, first: EventSeq(4) };
        assert_eq!(started(said(&start).as_bytes()), Ok(start));
        assert_eq!(start.oldest(), 3);
        let without = Start { begins: 0, ends: 0, first: EventSeq(0), ..start };
        assert_eq!(started(said(&without).as_bytes()), Ok(without));
        for wrong in [
            Start { ends: 4, ..start },
            Start { batches: 0, ..start },
            Start { ends: 8, ..without },
            Start { first: EventSeq(1), ..without },
        ] {
            assert!(matches!(started(said(&wrong).as_bytes()), Err(Refused::Other(_))), "{wrong:?}");
        }
        let none = b"{\"error\":{\"code\":404,\"err_code\":10037,\"description\":\"no message found\"}}";
        assert_eq!(started(none), Err(Refused::NoMessage));
        for wrong in [
            &b"{}"[..],
            b"",
            b"{\"message\":{}}",
            b"{\"message\":{\"data\":\"!\"}}",
            b"{\"message\":{\"data\":\"S1ZF\"}}",
        ] {
            assert!(matches!(started(wrong), Err(Refused::Other(_))), "{wrong:?}");
        }
    }

    #[test]
    fn what_jetstream_answers_is_read() {
        assert_eq!(stored(b"{\"stream\":\"kv_events\", \"seq\":3,\"duplicate\": true}"), Ok(3));
        let full =
            b"{\"error\":{\"code\":400,\"err_code\":10077,\"description\":\"maximum bytes exceeded\"},\"seq\":0}";
        assert_eq!(stored(full), Err(Refused::Other("maximum bytes exceeded".into())));
        let other = b"{\"type\":\"x\",\"error\":{\"code\":400,\"err_code\":10058,\"description\":\"stream name\"}}";
        assert_eq!(done(other), Err(Refused::OtherSettings));
        assert_eq!(done(b"{\"type\":\"x\",\"config\":{}}"), Ok(()));
        assert_eq!(consumer(b"{\"name\":\"F5l3FFSA\",\"num_pending\":2}"), Ok(("F5l3FFSA".into(), 2)));
        assert!(consumer(b"{\"name\":\"a.b\"}").is_err() && consumer(b"{\"name\":\"\"}").is_err());
        let place = Some(("F5l3FFSA", Place { number: 31, pending: 4 }));
        assert_eq!(Place::of("$JS.ACK.kv_events.F5l3FFSA.1.31.2.1795925513860061022.4"), place);
        assert_eq!(Place::of("$JS.ACK.hub.ACC.kv_events.F5l3FFSA.1.31.2.1795925513860061022.4.rand"), place);
        assert_eq!(Place::of("$JS.ACK.hub.ACC.kv_events.F5l3FFSA.1.31.2.1795925513860061022.4"), place);
        for wrong in ["", "$JS.ACK.", "$JS.ACK.a.b.1.x.2.3.4", "$JS.ACK.a.b.1.31.2.3", "_INBOX.a"] {
            assert_eq!(Place::of(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn whatever_a_server_answers_is_read_or_refused(
            body in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200),
                "\\{\"(message|error|name|seq)\":[\\{\"a-z0-9:,\\}]{0,40}".prop_map(String::into_bytes),
            ],
            reply in "(\\$JS\\.ACK\\.)?[a-z0-9.]{0,60}",
        ) {
            let _ = (stored(&body), done(&body), started(&body), consumer(&body), Place::of(&reply));
            let _ = Frame::decode(&Bytes::from(body));
        }

        /// A message of a relay of which bytes were changed is another message or none, and never more than was there.
        #[test]
        fn a_changed_frame_is_read_or_refused(
            payload in prop::collection::vec(any::<u8>(), 0..40),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            length in any::<prop::sample::Index>(),
        ) {
            let mut bytes = Frame::encode(Kind::Start, EventSeq(3), &payload).to_vec();
            changes.iter().for_each(|(at, byte)| { let at = at.index(bytes.len()); bytes[at] = *byte; });
            bytes.truncate(length.index(bytes.len() + 1));
            let frame = Frame::decode(&Bytes::from(bytes));
            prop_assert!(frame.as_ref().is_none_or(|frame| frame.payload.len() <= payload.len()));
            let _ = frame.map(|frame| Start::decode(&frame));
        }
    }
}
