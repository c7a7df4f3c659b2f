//! Bodies come out as they went in, however they are cut; and the exchange's times and bounds, without I/O.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kvrouted_gateway::epp::messages::*;
use kvrouted_gateway::epp::{Action, BodyBudget, Decision, Exchange, ExchangeLimits};
use proptest::prelude::*;

use crate::kit::*;

/// How the end of a body is said.
#[derive(Clone, Copy, Debug)]
enum Ending {
    OnTheLastPiece,
    OnAnEmptyPiece,
    /// Twice, as some releases do.
    Twice,
    Trailers,
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![Just(Ending::OnTheLastPiece), Just(Ending::OnAnEmptyPiece), Just(Ending::Twice), Just(Ending::Trailers)]
}

/// A body and the places where it is cut.
fn body() -> impl Strategy<Value = (Vec<u8>, Vec<usize>)> {
    (0..200_000_usize).prop_flat_map(|length| {
        let cuts = prop::collection::vec(0..=length, 0..12);
        (Just((0..length).map(|at| (at * 31 % 251) as u8).collect::<Vec<u8>>()), cuts)
    })
}

fn cut(body: &[u8], mut cuts: Vec<usize>) -> Vec<Bytes> {
    cuts.push(body.len());
    cuts.sort_unstable();
    let mut start = 0;
    cuts.into_iter().map(|end| Bytes::copy_from_slice(&body[std::mem::replace(&mut start, end)..end])).collect()
}

/// What the headers of a chat take of the budget.
fn chat_bytes() -> usize {
    let Some(RequestPart::RequestHeaders(headers)) = opening(&CHAT, false).part else { panic!("no headers") };
    headers.headers.expect("headers").held_bytes()
}

fn sent(actions: &mut Vec<Action>) -> Vec<ResponsePart> {
    actions
        .drain(..)
        .filter_map(|action| match action {
            Action::Send(message) => message.part,
            _ => None,
        })
        .collect()
}

fn decision() -> Decision {
    Decision { endpoints: vec![address("10.0.0.8:8000")], headers: Vec::new() }
}

fn exchange(limits: ExchangeLimits) -> (Exchange, Vec<Action>, Instant) {
    let (mut exchange, mut actions, now) =
        (Exchange::new(limits, &BodyBudget::new(1 << 30)), Vec::new(), Instant::now());
    exchange.receive(opening(&CHAT, false), now, &mut actions);
    (exchange, actions, now)
}

/// Puts the pieces of one side together and checks that the end comes once, and last.
fn together(parts: &[ResponsePart], ends: bool) -> Vec<u8> {
    let mut body = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let (ResponsePart::RequestBody(answer) | ResponsePart::ResponseBody(answer)) = part else {
            panic!("not a piece: {part:?}");
        };
        let piece = piece(answer.clone());
        assert!(piece.body.len() <= 62_000);
        assert_eq!(piece.end_of_stream, ends && number + 1 == parts.len(), "the end, at piece {number}");
        body.extend_from_slice(&piece.body);
    }
    assert!(!ends || !parts.is_empty(), "the end is missing");
    body
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_request_body_comes_out_unchanged_however_it_is_cut((body, cuts) in body(), ending in ending()) {
        let (mut exchange, mut actions, now) = exchange(LIMITS);
        let pieces = cut(&body, cuts);
        let last = pieces.len() - 1;
        for (number, piece) in pieces.into_iter().enumerate() {
            let ends = number == last && matches!(ending, Ending::OnTheLastPiece | Ending::Twice);
            exchange.receive(request_body(piece, ends), now, &mut actions);
        }
        match ending {
            Ending::OnTheLastPiece => {}
            Ending::OnAnEmptyPiece | Ending::Twice => exchange.receive(request_body("", true), now, &mut actions),
            Ending::Trailers => exchange.receive(request_trailers(), now, &mut actions),
        }
        let asked: Vec<_> = actions.iter().filter_map(|action| match action {
            Action::Choose(question) => Some(question.body.clone()),
            _ => None,
        }).collect();
        prop_assert_eq!(asked.len(), 1);
        prop_assert!(asked[0] == body, "the question's body has changed");
        prop_assert!(sent(&mut actions).is_empty(), "nothing is answered before the decision");
        exchange.decided(Ok(decision()), &mut actions);
        let mut answers = sent(&mut actions);
        prop_assert!(matches!(answers.remove(0), ResponsePart::RequestHeaders(_)));
        let has_trailers = matches!(ending, Ending::Trailers);
        if has_trailers {
            prop_assert!(matches!(answers.pop(), Some(ResponsePart::RequestTrailers(_))));
        }
        prop_assert!(together(&answers, !has_trailers) == body, "the body has changed");
    }

    #[test]
    fn a_response_body_comes_out_unchanged_however_it_is_cut((body, cuts) in body()) {
        let (mut exchange, mut actions, now) = (Exchange::new(LIMITS, &BodyBudget::new(chat_bytes())), Vec::new(), Instant::now());
        exchange.receive(opening(&CHAT, true), now, &mut actions);
        exchange.decided(Ok(decision()), &mut actions);
        exchange.receive(response_headers(&[(":status", "200")], false), now, &mut actions);
        actions.clear();
        let pieces = cut(&body, cuts);
        let last = pieces.len() - 1;
        let (mut answers, mut passed, mut ended) = (Vec::new(), Vec::new(), 0);
        for (number, piece) in pieces.into_iter().enumerate() {
            exchange.receive(response_body(piece, number == last), now, &mut actions);
            for action in &actions {
                match action {
                    Action::ResponseBody(piece) => passed.extend_from_slice(piece),
                    Action::ResponseEnded => ended += 1,
                    _ => {}
                }
            }
            answers.extend(sent(&mut actions));
        }
        prop_assert!(together(&answers, true) == body, "the response has changed");
        prop_assert!(passed == body, "what is reported is not what passed");
        prop_assert_eq!(ended, 1);
    }

    #[test]
    fn no_order_of_messages_panics_or_answers_twice(order in prop::collection::vec(0..11_u8, 0..24)) {
        let (mut exchange, now) = (Exchange::new(LIMITS, &BodyBudget::new(chat_bytes() + 100)), Instant::now());
        let mut actions = Vec::new();
        let (mut headers, mut refusals, mut choices, mut ends) = (0, 0, 0, 0);
        for step in order {
            match step {
                0 => exchange.receive(opening(&CHAT, false), now, &mut actions),
                1 => exchange.receive(opening(&CHAT, true), now, &mut actions),
                2 => exchange.receive(request_body(vec![b'x'; 60], false), now, &mut actions),
                3 => exchange.receive(request_body("{}", true), now, &mut actions),
                4 => exchange.receive(request_trailers(), now, &mut actions),
                5 => exchange.receive(response_headers(&[], false), now, &mut actions),
                6 => exchange.receive(response_body("x", true), now, &mut actions),
                7 => exchange.receive(response_trailers(), now, &mut actions),
                8 => exchange.receive(ProcessingRequest::default(), now, &mut actions),
                9 => exchange.decided(Ok(decision()), &mut actions),
                _ => exchange.time_is_up(now + Duration::from_secs(3600), &mut actions),
            }
            for action in actions.drain(..) {
                match action {
                    Action::Choose(_) => choices += 1,
                    Action::ResponseEnded => ends += 1,
                    Action::Send(message) => match message.part {
                        Some(ResponsePart::RequestHeaders(_)) => headers += 1,
                        Some(ResponsePart::ImmediateResponse(_)) => refusals += 1,
                        _ => {}
                    },
                    _ => {}
                }
            }
        }
        prop_assert!(headers + refusals <= 1 && choices <= 1 && ends <= 1);
        prop_assert!(headers <= choices);
    }
}

#[test]
fn each_piece_of_body_gives_the_caller_more_time_and_an_empty_one_does_not() {
    let (mut exchange, mut actions, start) = exchange(LIMITS);
    assert_eq!(exchange.deadline(), Some(start + LIMITS.body_timeout));
    let later = start + Duration::from_secs(5);
    exchange.receive(request_body("{", false), later, &mut actions);
    assert_eq!(exchange.deadline(), Some(later + LIMITS.body_timeout));
    exchange.receive(request_body("", false), later + Duration::from_secs(1), &mut actions);
    assert_eq!(exchange.deadline(), Some(later + LIMITS.body_timeout));
    exchange.time_is_up(later, &mut actions);
    assert!(actions.is_empty(), "too early");
    exchange.time_is_up(later + LIMITS.body_timeout, &mut actions);
    assert!(matches!(&sent(&mut actions)[..], [ResponsePart::ImmediateResponse(_)]));
    assert_eq!(exchange.deadline(), None);
}

#[test]
fn the_decisions_time_begins_with_the_end_of_the_body() {
    let (mut exchange, mut actions, start) = exchange(LIMITS);
    let later = start + Duration::from_secs(9);
    exchange.receive(request_body("{}", true), later, &mut actions);
    assert_eq!(exchange.deadline(), Some(later + LIMITS.decision_timeout));
    let Some(Action::Choose(question)) = actions.pop() else { panic!("no question") };
    assert_eq!(question.deadline, later + LIMITS.decision_timeout);
    exchange.time_is_up(question.deadline, &mut actions);
    assert!(matches!(actions[..], [Action::Abandon, Action::Send(_)]), "{actions:?}");
    actions.clear();
    exchange.decided(Ok(decision()), &mut actions);
    assert!(actions.is_empty(), "a late decision changes nothing");
}

#[test]
fn streams_share_a_budget_of_bytes_and_give_it_back() {
    // The headers of two requests, and 100 bytes.
    let (all, now) = (2 * chat_bytes() + 100, Instant::now());
    let budget = BodyBudget::new(all);
    let stream = |actions: &mut Vec<Action>, bytes: usize| {
        let mut exchange = Exchange::new(LIMITS, &budget);
        exchange.receive(opening(&CHAT, false), now, actions);
        exchange.receive(request_body(vec![b'x'; bytes], true), now, actions);
        exchange
    };
    let mut actions = Vec::new();
    let mut first = stream(&mut actions, 70);
    assert!(matches!(actions[..], [Action::Choose(_)]));
    actions.clear();
    let refused = stream(&mut actions, 31);
    let [ResponsePart::ImmediateResponse(answer)] = &sent(&mut actions)[..] else { panic!("no refusal") };
    let refusal = Refusal::of(answer);
    assert_eq!((refusal.status, refusal.code.as_str()), (503, "bodies_too_large"));
    drop(refused);
    first.decided(Ok(decision()), &mut actions);
    assert_eq!(budget.left(), all - chat_bytes() - 70, "the body waits to be sent");
    first.all_sent();
    assert_eq!(budget.left(), all, "given back once Envoy has it");
    let third = stream(&mut actions, 100 + chat_bytes());
    assert_eq!(budget.left(), 0);
    drop(third);
    assert_eq!(budget.left(), all, "given back when the stream ends");
}

#[test]
fn headers_count_by_the_memory_that_they_take() {
    let (budget, now, mut actions) = (BodyBudget::new(1 << 30), Instant::now(), Vec::new());
    let empty = |count: usize| {
        let headers = Some(HeaderMap { headers: vec![HeaderValue::default(); count] });
        let part = RequestPart::RequestHeaders(HttpHeaders { headers, end_of_stream: false });
        ProcessingRequest { part: Some(part), ..opening(&CHAT, false) }
    };
    let mut exchange = Exchange::new(LIMITS, &budget);
    exchange.receive(empty(5000), now, &mut actions);
    assert!(actions.is_empty());
    assert!((1 << 30) - budget.left() >= 5000 * size_of::<HeaderValue>(), "{} are left", budget.left());
    drop(exchange);
    Exchange::new(LIMITS, &budget).receive(empty(500_000), now, &mut actions);
    let [ResponsePart::ImmediateResponse(answer)] = &sent(&mut actions)[..] else { panic!("no refusal") };
    let refusal = Refusal::of(answer);
    assert_eq!((refusal.status, refusal.code.as_str()), (431, "headers_too_large"));
    assert_eq!(budget.left(), 1 << 30);
}
