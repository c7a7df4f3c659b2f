//! Envoy's messages to the picker, in any order and with any bytes.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kvrouted_gateway::epp::messages::{ProcessingRequest, ResponsePart};
use kvrouted_gateway::epp::{Action, BodyBudget, Decision, Exchange, ExchangeLimits, Subset};
use prost::Message as _;

const BUDGET_BYTES: usize = 4096;
const LIMITS: ExchangeLimits = ExchangeLimits {
    body_bytes_max: 2048,
    bodies_bytes_max: BUDGET_BYTES,
    body_timeout: Duration::from_secs(60),
    decision_timeout: Duration::from_secs(10),
};

/// Steps: a decision, the end of a time, or the length of a message that follows. The request is answered once, the
/// body comes back as it was, and the budget is given back.
pub(crate) fn ext_proc(mut data: &[u8]) {
    let (budget, now) = (BodyBudget::new(BUDGET_BYTES), Instant::now());
    let mut exchange = Exchange::new(LIMITS, &budget);
    let (mut answered, mut refused, mut asked, mut ended, mut sent) = (0, 0, 0, 0, Vec::new());
    let mut question: Option<Bytes> = None;
    while let [step, rest @ ..] = data {
        let mut actions = Vec::new();
        data = rest;
        match step {
            0 => {
                let endpoints = vec!["10.0.0.8:8000".parse().expect("an address")];
                exchange.decided(Ok(Decision { endpoints, headers: Vec::new() }), &mut actions);
            }
            1 => exchange.time_is_up(now + Duration::from_secs(3600), &mut actions),
            2 => exchange.decided(Ok(Decision::default()), &mut actions),
            length => {
                let (message, rest) = data.split_at(usize::from(*length).saturating_mul(4).min(data.len()));
                data = rest;
                let Ok(message) = ProcessingRequest::decode(message) else { continue };
                let _ = Subset::of(&message).map(|subset| subset.unreadable());
                exchange.receive(message, now, &mut actions);
            }
        }
        for action in actions {
            match action {
                Action::Choose(of) => {
                    asked += 1;
                    question = Some(of.body);
                }
                Action::ResponseEnded => ended += 1,
                Action::Send(message) => match message.part {
                    Some(ResponsePart::RequestHeaders(_)) => answered += 1,
                    Some(ResponsePart::ImmediateResponse(_)) => refused += 1,
                    Some(ResponsePart::RequestBody(answer)) => {
                        let mutation = answer.response.and_then(|response| response.body_mutation);
                        let piece = mutation.and_then(|mutation| mutation.streamed_response).expect("a piece");
                        sent.extend_from_slice(&piece.body);
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        assert!(budget.left() <= BUDGET_BYTES, "more was given back than taken");
    }
    assert!(answered + refused <= 1 && asked <= 1 && answered <= asked, "{answered} answers, {refused} refusals");
    assert!(ended <= 1 || question.is_none(), "a response ended {ended} times");
    if answered == 1 {
        assert_eq!(Some(Bytes::from(sent)), question, "the body has changed");
    }
    drop(exchange);
    assert_eq!(budget.left(), BUDGET_BYTES, "the budget is not given back");
}
