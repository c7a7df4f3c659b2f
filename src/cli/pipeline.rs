//! Many questions over one connection: several under way at once, answers delivered in the order asked.
//!
//! What is under way is bounded in questions and in bytes, so that neither side has to hold a whole batch; a
//! question beyond the bound goes out alone.

use std::collections::{BTreeMap, HashMap};

use super::exit::{Exit, Failure};
use super::prompts::Question;
use super::ranking::Answer;
use crate::ids::CorrelationId;

/// Questions sent whose answers have not been delivered.
const QUESTIONS_UNDER_WAY_MAX: usize = 64;
/// Bytes of questions that the daemon has not answered.
const BYTES_UNDER_WAY_MAX: usize = 1 << 20;
/// What a question takes beside its tokens and names, at most.
const QUESTION_OVERHEAD_BYTES: usize = 256;

/// A connection as the pipeline sees it.
pub(super) trait Exchange {
    /// Queues one question.
    fn send(&mut self, question: &Question) -> Result<CorrelationId, Failure>;
    /// Writes everything queued.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Waits for the next answer, in whatever order the daemon gives them.
    fn receive(&mut self) -> Result<(CorrelationId, Answer), Failure>;
    /// Asks for what an answer left open.
    fn complete(&mut self, question: &Question, answer: &mut Answer) -> Result<(), Failure>;
}

fn bytes_of(question: &Question) -> usize {
    let names = question.lora.as_ref().map_or(0, String::len) + question.salt.as_ref().map_or(0, String::len);
    question.tokens.len() + names + QUESTION_OVERHEAD_BYTES
}

/// Asks every question and hands each answer, with its question's place, to `deliver` in the order asked.
pub(super) fn run(
    exchange: &mut dyn Exchange,
    questions: &[Question],
    deliver: &mut dyn FnMut(usize, &Answer) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut asked: HashMap<CorrelationId, usize> = HashMap::new();
    let mut answered: BTreeMap<usize, Answer> = BTreeMap::new();
    let (mut sent, mut delivered, mut bytes) = (0, 0, 0);
    while delivered < questions.len() {
        let first_unsent = sent;
        while let Some(question) = questions.get(sent) {
            let fits = bytes + bytes_of(question) <= BYTES_UNDER_WAY_MAX && sent - delivered < QUESTIONS_UNDER_WAY_MAX;
            if !(asked.is_empty() || fits) {
                break;
            }
            asked.insert(exchange.send(question)?, sent);
            bytes += bytes_of(question);
            sent += 1;
        }
        if sent > first_unsent {
            exchange.flush()?;
        }
        let (id, mut answer) = exchange.receive()?;
        let Some(place) = asked.remove(&id) else {
            return Err(Failure::new(Exit::Internal, format!("the daemon answered {id}, which was not asked")));
        };
        bytes -= bytes_of(&questions[place]);
        exchange.complete(&questions[place], &mut answer)?;
        answered.insert(place, answer);
        while let Some(answer) = answered.remove(&delivered) {
            deliver(delivered, &answer)?;
            delivered += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers the newest question first, and keeps count.
    #[derive(Default)]
    struct Backwards {
        next: u64,
        waiting: Vec<(CorrelationId, String, usize)>,
        flushed: bool,
        most: usize,
        most_bytes: usize,
    }

    impl Exchange for Backwards {
        fn send(&mut self, question: &Question) -> Result<CorrelationId, Failure> {
            self.next += 1;
            let id = CorrelationId(self.next);
            self.waiting.push((id, question.salt.clone().unwrap_or_default(), bytes_of(question)));
            self.flushed = false;
            self.most = self.most.max(self.waiting.len());
            if self.waiting.len() > 1 {
                self.most_bytes = self.most_bytes.max(self.waiting.iter().map(|(_, _, bytes)| bytes).sum());
            }
            Ok(id)
        }

        fn flush(&mut self) -> Result<(), Failure> {
            self.flushed = true;
            Ok(())
        }

        fn receive(&mut self) -> Result<(CorrelationId, Answer), Failure> {
            assert!(self.flushed, "waits for what was never written");
            let (id, salt, _) = self.waiting.pop().ok_or_else(|| Failure::new(Exit::Internal, "nothing was asked"))?;
            Ok((id, Answer::Refused(salt)))
        }

        fn complete(&mut self, question: &Question, answer: &mut Answer) -> Result<(), Failure> {
            assert_eq!(
                *answer,
                Answer::Refused(question.salt.clone().unwrap_or_default()),
                "another question's answer"
            );
            Ok(())
        }
    }

    fn question(name: usize, tokens: usize) -> Question {
        Question { salt: Some(name.to_string()), ..Question::of(&vec![1; tokens]) }
    }

    #[test]
    fn answers_are_delivered_in_the_order_asked_whatever_the_daemon_does() {
        let questions: Vec<_> = (0..1000).map(|at| question(at, at % 50)).collect();
        let mut exchange = Backwards::default();
        let mut got = Vec::new();
        run(&mut exchange, &questions, &mut |place, answer| {
            let Answer::Refused(name) = answer else { panic!("{answer:?}") };
            got.push((place, name.clone()));
            Ok(())
        })
        .unwrap();
        assert_eq!(got, (0..1000).map(|at| (at, at.to_string())).collect::<Vec<_>>());
        assert!(exchange.most > 1 && exchange.most <= QUESTIONS_UNDER_WAY_MAX, "{}", exchange.most);
    }

    #[test]
    fn what_is_under_way_is_bounded_in_bytes_and_a_larger_question_goes_alone() {
        let questions: Vec<_> = (0..40).map(|at| question(at, if at % 10 == 0 { 300_000 } else { 30_000 })).collect();
        let mut exchange = Backwards::default();
        let mut count = 0;
        run(&mut exchange, &questions, &mut |_, _| {
            count += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(count, 40);
        assert!(exchange.most_bytes > 0 && exchange.most_bytes <= BYTES_UNDER_WAY_MAX, "{}", exchange.most_bytes);
    }

    #[test]
    fn a_reader_that_has_gone_ends_the_asking() {
        let questions: Vec<_> = (0..10).map(|at| question(at, 1)).collect();
        let stop = run(&mut Backwards::default(), &questions, &mut |_, _| Err(Failure::new(Exit::Done, "")));
        assert_eq!(stop, Err(Failure::new(Exit::Done, "")));
    }
}
