//! What the two daemons say to each other. Pure: bytes in, bytes out.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

/// The new daemon asks, or says how far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "says", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Request {
    /// The first message.
    Hello {
        /// The version of the messages.
        format: u32,
        /// What the spaces of both have to have in common.
        spaces: String,
    },
    /// Which workers are there, and how far is each?
    Workers,
    /// The blocks of a worker.
    Dump {
        /// The engine.
        id: u64,
        /// Its data-parallel rank.
        rank: u32,
    },
    /// The bookings. From now on neither daemon decides.
    Switch,
    /// Some worker is not as far as at the old daemon, so it goes on.
    Behind,
    /// The bookings are taken up.
    Taken,
    /// From now on the new daemon decides.
    Serving,
    /// The new daemon ends.
    GiveUp {
        /// For the log.
        why: String,
    },
}

/// The old daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "says", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answer {
    /// The answer to `Hello`. Its descriptors: the sockets, the locks, the memory files, the image, the learnt laws.
    Welcome {
        /// The names of the sockets.
        sockets: Vec<String>,
        /// How many locks follow.
        locks: usize,
        /// How many memory files of the service manager follow.
        memory: usize,
    },
    /// A file with the list of workers.
    Workers,
    /// A file with a worker's blocks.
    Dumped,
    /// There are none now.
    NotDumped {
        /// For the log.
        why: String,
    },
    /// The image of the bookings, and the list of workers, each in a file.
    Image,
    /// The old daemon decides again.
    Resumed,
    /// The new daemon may decide.
    Yours,
    /// The old daemon goes on, and this conversation is over.
    Refused {
        /// What was wrong.
        why: String,
        /// What to do.
        remedy: String,
    },
}

/// The bytes of a message.
pub(super) fn encode(message: &impl Serialize) -> Vec<u8> {
    // No type here fails to encode: there are no maps, and no numbers beyond JSON's.
    serde_json::to_vec(message).unwrap_or_default()
}

/// The message of these bytes.
///
/// # Errors
/// `Connection` if there is none.
pub(super) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|cause| {
        let remedy = "use a kvrouted on both sides that speaks the same version";
        Error::new(Kind::Connection, "the other daemon sent no message of a takeover", remedy).caused_by(cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::TAKEOVER_MESSAGE_BYTES_MAX;

    #[test]
    fn messages_are_read_as_they_were_written_and_nothing_else_is() {
        let requests = [
            Request::Hello { format: 1, spaces: "00ff".into() },
            Request::Workers,
            Request::Dump { id: u64::MAX, rank: u32::MAX },
            Request::Switch,
            Request::Behind,
            Request::Taken,
            Request::Serving,
            Request::GiveUp { why: "a \"reason\"".into() },
        ];
        for request in requests {
            assert_eq!(decode::<Request>(&encode(&request)).expect("a request"), request);
        }
        let answer = Answer::Welcome { sockets: vec!["unix /s".into()], locks: 2, memory: 2 };
        let bytes = encode(&answer);
        assert!(bytes.len() < TAKEOVER_MESSAGE_BYTES_MAX);
        assert_eq!(decode::<Answer>(&bytes).expect("an answer"), answer);
        for length in 0..bytes.len() {
            assert!(decode::<Answer>(&bytes[..length]).is_err(), "{length}");
        }
        let more = br#"{"says":"dump","id":1,"rank":0,"more":1}"#;
        for nonsense in [&b""[..], b"\xff", b"{}", b"[]", more, br#"{"says":"hello"}"#] {
            assert!(decode::<Request>(nonsense).is_err(), "{nonsense:?}");
        }
    }
}
