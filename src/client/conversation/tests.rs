//! A conversation with a scripted daemon, which may also be hostile. Only bytes pass.

use super::*;
use crate::client::daemon_script::{self, error, fleet_page, free_reply, lane_opened, unknown_kind};
use crate::limits::FRAME_HEADER_BYTES;

/// Every waiter is a number.
type Talk = Conversation<u32>;

fn begun(lane: LaneUse) -> Talk {
    let mut talk = Talk::default();
    talk.begin("test", Some(SessionToken { hi: 1, lo: 2 }), lane);
    assert_eq!(said(&mut talk), ["hello"]);
    talk
}

/// A conversation that is open, without a lane.
fn open() -> Talk {
    let mut talk = begun(LaneUse::Off);
    let opened = opening(&mut talk, &hello()).expect("accepted").expect("open");
    assert!(opened.lane.is_none() && opened.lane_refusal.is_none());
    talk
}

fn hello() -> Vec<u8> {
    daemon_script::hello(PROTOCOL_VERSION, 7, features::SERVED)
}

fn said(talk: &mut Talk) -> Vec<String> {
    daemon_script::said(&mut talk.unsent).into_iter().map(|(_, words)| words).collect()
}

/// Receives bytes while the connection begins. A lane is mapped to its layout.
fn opening(talk: &mut Talk, bytes: &[u8]) -> Result<Option<Opened<u16>>, Rejection> {
    talk.room(Channel::Socket).extend_from_slice(bytes);
    talk.opening(|opened| Ok(opened.layout))
}

fn ask(talk: &mut Talk, waiter: u32) -> CorrelationId {
    let id = talk.ask(waiter, |encoder, id, out| {
        encoder.workers(id, None, 0, 0, out);
        Ok(())
    });
    assert_eq!(said(talk), ["question"]);
    id.expect("encoded")
}

/// Receives bytes, and returns all frames in words.
fn heard(talk: &mut Talk, channel: Channel, bytes: &[u8]) -> Vec<String> {
    talk.room(channel).extend_from_slice(bytes);
    let mut heard = Vec::new();
    while let Some(incoming) = talk.next().expect("valid frames") {
        heard.push(match incoming {
            Incoming::Reply { waiter, reply: Ok(Reply::Error(error)), .. } => format!("{waiter}: {:?}", error.kind),
            Incoming::Reply { waiter, reply: Ok(_), .. } => format!("{waiter}: reply"),
            Incoming::Reply { waiter, reply: Err(error), .. } => format!("{waiter}: {}", error.kind().name()),
            Incoming::Closing(error) => format!("closing: {:?}", error.kind),
            Incoming::Fleet(fleet) => format!("fleet {}", fleet.fleet_version),
            Incoming::WatchEnded(_) => "watch ended".to_owned(),
            Incoming::Other => "other".to_owned(),
        });
    }
    heard
}

#[test]
fn hello_may_arrive_byte_by_byte_and_what_follows_it_is_not_lost() {
    let mut talk = begun(LaneUse::Off);
    let frame = hello();
    let (last, first) = frame.split_last().expect("bytes");
    for byte in first {
        assert!(opening(&mut talk, &[*byte]).expect("no fault").is_none() && !talk.is_greeted());
    }
    let id = ask(&mut talk, 5);
    let opened = opening(&mut talk, &[&[*last], free_reply(id).as_slice()].concat()).expect("accepted").expect("open");
    assert_eq!((opened.hello.instance_id, opened.hello.version), (7, PROTOCOL_VERSION));
    assert!(talk.is_greeted());
    assert_eq!(heard(&mut talk, Channel::Socket, &[]), ["5: reply"]);
}

#[test]
fn a_daemon_of_another_version_or_with_another_protocol_is_left() {
    let mut other_frame = hello();
    other_frame[6..8].copy_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
    let mut other_protocol = hello();
    other_protocol[..FRAME_HEADER_BYTES].copy_from_slice(b"HTTP/1.1 400 Bad");
    let other_reply = daemon_script::hello(PROTOCOL_VERSION + 1, 7, features::SERVED);
    for bytes in
        [other_frame, other_protocol, other_reply, free_reply(CorrelationId(1)), unknown_kind(CorrelationId(1))]
    {
        let mut talk = begun(LaneUse::Try);
        let why = opening(&mut talk, &bytes).expect_err("refused");
        assert!(!why.is_final && !talk.is_greeted(), "another daemon may listen there soon: {why:?}");
        assert!(matches!(why.error.kind(), Kind::Malformed | Kind::Unsupported), "{why:?}");
        assert_eq!(said(&mut talk), [] as [&str; 0], "nothing more is sent");
    }
}

#[test]
fn a_refused_hello_is_final_unless_a_retry_may_succeed() {
    for (kind, is_final) in [(Kind::NotPermitted, true), (Kind::Draining, false)] {
        let why = opening(&mut begun(LaneUse::Require), &error(CorrelationId(0), kind)).expect_err("refused");
        assert_eq!((why.error.kind(), why.error.remedy(), why.is_final), (kind, "ask", is_final));
    }
}

#[test]
fn a_lane_is_asked_for_only_if_wanted_and_offered() {
    let without = daemon_script::hello(PROTOCOL_VERSION, 7, features::SERVED & !features::LANES);
    let mut talk = begun(LaneUse::Try);
    let opened = opening(&mut talk, &without).expect("accepted").expect("open");
    assert_eq!((opened.lane, opened.lane_refusal.map(|error| error.kind())), (None, Some(Kind::Unsupported)));
    let why = opening(&mut begun(LaneUse::Require), &without).expect_err("refused");
    assert!(why.is_final && why.error.kind() == Kind::Unsupported, "{why:?}");

    for wanted in [LaneUse::Try, LaneUse::Require] {
        let mut talk = begun(wanted);
        assert!(opening(&mut talk, &hello()).expect("accepted").is_none() && talk.is_greeted());
        let asked = daemon_script::said(&mut talk.unsent);
        assert_eq!(asked[0].1, "open_lane");
        let opened = opening(&mut talk, &lane_opened(asked[0].0)).expect("accepted").expect("open");
        assert_eq!((opened.hello.instance_id, opened.lane), (7, Some(1)));
    }
}

/// The end of an opening whose request for a lane gets this reply, by its id.
fn lane_reply(wanted: LaneUse, reply: impl FnOnce(CorrelationId) -> Vec<u8>) -> Result<Opened<u16>, Rejection> {
    let mut talk = begun(wanted);
    assert!(opening(&mut talk, &hello()).expect("accepted").is_none());
    let id = daemon_script::said(&mut talk.unsent)[0].0;
    opening(&mut talk, &reply(id)).map(|opened| opened.expect("open"))
}

/// A reply to the request for a lane, by its id.
type LaneReply = fn(CorrelationId) -> Vec<u8>;

#[test]
fn a_refused_lane_is_final_only_for_a_client_that_requires_one() {
    let hostile = |id: CorrelationId| lane_opened(CorrelationId(id.0 + 1));
    let replies: [(LaneReply, Kind); 4] = [
        (|id| error(id, Kind::NotPermitted), Kind::NotPermitted),
        (|_| error(CorrelationId(0), Kind::Overloaded), Kind::Overloaded),
        (hostile, Kind::Malformed),
        (free_reply, Kind::Malformed),
    ];
    for (reply, kind) in replies {
        let opened = lane_reply(LaneUse::Try, reply).expect("it goes on without");
        assert_eq!((opened.lane, opened.lane_refusal.map(|error| error.kind())), (None, Some(kind)));
        let why = lane_reply(LaneUse::Require, reply).expect_err("refused");
        assert_eq!((why.error.kind(), why.is_final), (kind, !kind.is_retryable()));
    }
}

#[test]
fn a_lane_that_cannot_be_mapped_is_one_refused_and_a_lost_connection_is_lost() {
    for (kind, goes_on) in [(Kind::System, true), (Kind::Connection, false)] {
        let mut talk = begun(LaneUse::Try);
        assert!(opening(&mut talk, &hello()).expect("accepted").is_none());
        let id = daemon_script::said(&mut talk.unsent)[0].0;
        talk.room(Channel::Socket).extend_from_slice(&lane_opened(id));
        match talk.opening(|_| Err::<u16, _>(Error::new(kind, "no", ""))) {
            Ok(opened) => assert!(goes_on && opened.expect("open").lane_refusal.expect("why").kind() == kind),
            Err(why) => assert!(!goes_on && !why.is_final && why.error.kind() == kind),
        }
    }
}

#[test]
fn replies_find_their_requests_in_any_order_and_in_pieces_of_any_length() {
    for piece in 1..=64 {
        let mut talk = open();
        let ids = [1, 2, 3].map(|waiter| ask(&mut talk, waiter));
        let bytes = [free_reply(ids[2]), error(ids[0], Kind::Draining), unknown_kind(ids[1])].concat();
        let mut all = Vec::new();
        for piece in bytes.chunks(piece) {
            all.extend(heard(&mut talk, Channel::Socket, piece));
        }
        assert_eq!(all, ["3: reply", "1: Some(Draining)", "2: unsupported"], "pieces of {piece} bytes");
        assert!(!talk.is_waiting());
    }
}

#[test]
fn stray_frames_reach_no_call_and_are_not_kept() {
    let mut talk = open();
    let id = ask(&mut talk, 1);
    let strays: Vec<u8> = (0..10_000).flat_map(|stray| free_reply(CorrelationId(id.0 + 1 + stray))).collect();
    assert!(heard(&mut talk, Channel::Socket, &strays).iter().all(|words| words == "other"));
    assert!(talk.room(Channel::Socket).is_empty(), "taken frames are dropped");
    let strays = [free_reply(CorrelationId(0)), unknown_kind(CorrelationId(0)), fleet_page(CorrelationId(0), 1, 0)];
    assert_eq!(heard(&mut talk, Channel::Socket, &strays.concat()), ["other"; 3]);
    assert_eq!(heard(&mut talk, Channel::Socket, &free_reply(id).repeat(2)), ["1: reply", "other"], "one reply each");
    assert_eq!(
        heard(&mut talk, Channel::Socket, &error(CorrelationId(0), Kind::Draining)),
        ["closing: Some(Draining)"]
    );
}

#[test]
fn a_frame_without_a_valid_header_ends_the_conversation() {
    let with = |at: usize, byte: u8| {
        let mut frame = free_reply(CorrelationId(3));
        frame[at] = byte;
        frame
    };
    // A body that is too long, a kind of zero, unknown flags, another version.
    for bytes in [with(3, 0xFF), with(4, 0), with(5, 1), with(6, 0xFF)] {
        let mut talk = open();
        talk.room(Channel::Socket).extend_from_slice(&bytes[..FRAME_HEADER_BYTES]);
        for _ in 0..2 {
            assert_eq!(talk.next().expect_err("invalid").kind(), Kind::Malformed);
        }
    }
}

#[test]
fn cut_frames_of_the_lane_and_of_the_socket_are_not_mixed() {
    let mut talk = open();
    let ids = [1, 2].map(|waiter| ask(&mut talk, waiter));
    let (over_lane, over_socket) = (free_reply(ids[0]), free_reply(ids[1]));
    assert_eq!(heard(&mut talk, Channel::Lane, &over_lane[..20]), [] as [&str; 0]);
    assert_eq!(heard(&mut talk, Channel::Socket, &over_socket[..9]), [] as [&str; 0]);
    talk.room(Channel::Socket).extend_from_slice(&over_socket[9..]);
    assert_eq!(heard(&mut talk, Channel::Lane, &over_lane[20..]), ["1: reply", "2: reply"], "the lane's come first");
}

#[test]
fn pages_become_fleets_until_the_watch_ends() {
    let mut talk = open();
    talk.watch(None);
    let id = daemon_script::said(&mut talk.unsent)[0].0;
    assert!(!talk.is_waiting(), "a fleet may never change");
    let pages = [fleet_page(id, 3, 1), fleet_page(id, 3, 0), fleet_page(id, 4, 9), fleet_page(id, 5, 0)].concat();
    assert_eq!(heard(&mut talk, Channel::Socket, &pages), ["other", "fleet 3", "other", "fleet 5"]);
    assert_eq!(heard(&mut talk, Channel::Socket, &error(id, Kind::Overloaded)), ["watch ended"]);
    assert_eq!(heard(&mut talk, Channel::Socket, &fleet_page(id, 6, 0)), ["other"], "the watch is over");
}

#[test]
fn pages_that_do_not_advance_are_not_asked_for_without_end() {
    assert_eq!((next_page(0, Some(256)).unwrap(), next_page(256, None).unwrap()), (Some(256), None));
    for next in [0, 255, 256] {
        assert_eq!(next_page(256, Some(next)).expect_err("no progress").kind(), Kind::Malformed);
    }
}

#[test]
fn an_ended_conversation_returns_its_requests_and_begins_anew() {
    let mut talk = open();
    let ids = [4, 5, 6].map(|waiter| ask(&mut talk, waiter));
    talk.watch(None);
    assert_eq!(heard(&mut talk, Channel::Socket, &free_reply(ids[1])), ["5: reply"]);
    talk.room(Channel::Lane).extend_from_slice(&free_reply(ids[0])[..9]);
    assert_eq!(talk.end(), [4, 6], "in their order");
    assert!(talk.unsent.is_empty() && !talk.is_waiting());
    talk.begin("test", None, LaneUse::Off);
    assert_eq!(said(&mut talk), ["hello"]);
    assert!(opening(&mut talk, &hello()).expect("accepted").is_some(), "half a frame of the last one is gone");
    let late = [free_reply(ids[0]), free_reply(ids[2])].concat();
    assert_eq!(heard(&mut talk, Channel::Lane, &late), ["other"; 2], "the last connection's ids are not used again");
}

#[test]
fn a_request_that_fits_in_no_frame_is_not_sent_and_waits_for_nothing() {
    let mut talk = open();
    let refused = talk.ask(1, |_, _, _| Err(Error::new(Kind::InvalidArgument, "too long", "")));
    assert_eq!(refused.expect_err("refused").kind(), Kind::InvalidArgument);
    assert!(talk.unsent.is_empty() && !talk.is_waiting());
}
