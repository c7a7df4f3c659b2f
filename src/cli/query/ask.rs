//! Questions to a daemon over one connection: several in flight at once, answers delivered in the order of the
//! questions.
//!
//! A bound on questions and bytes in flight means that neither side holds a whole batch. A question larger than the
//! bound is sent alone.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::Question;
use super::print::{Answer, Loads, Ranking, Row};
use crate::cli::admin::{client_options, unavailable};
use crate::cli::exit::{Exit, Failure};
use crate::client::{Client, Reply};
use crate::error::{Error, Kind};
use crate::fleet::PoolRole;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::CANDIDATES_MAX;
use crate::route::{Mode, Overrides, Prompt, RouteRequest};
use crate::wire;

/// Asks a daemon every question, several at once, and delivers the answers in the order of the questions.
pub(super) fn ask(
    socket: &Path,
    name: SpaceName<'_>,
    options: RequestOptions<'_>,
    questions: &[Question],
    deliver: &mut dyn FnMut(usize, &Answer) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let client = Client::connect(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    let space = client.pool(name.model, name.namespace, name.role)?.id;
    run(&mut DaemonExchange { client, space, options, known: None }, questions, deliver)
}

/// Asks a daemon for the load of every worker with each prompt, and delivers the answers in the order of the prompts.
pub(super) fn potential_loads(
    socket: &Path,
    name: SpaceName<'_>,
    questions: &[Question],
    deliver: &mut dyn FnMut(usize, &Loads) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut client = Client::connect(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    let space = client.pool(name.model, name.namespace, name.role)?.id;
    for (place, question) in questions.iter().enumerate() {
        let loads = client.potential_loads(&request(space, RequestOptions::default(), question));
        match &loads {
            // Without a daemon the remaining questions cannot be asked.
            Err(error) if error.kind() == Kind::Connection => return Err(unavailable(socket, error)),
            _ => deliver(place, &loads)?,
        }
    }
    Ok(())
}

/// The space of the questions.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceName<'a> {
    pub(super) model: &'a str,
    pub(super) namespace: Option<&'a str>,
    /// Required if the model has several roles.
    pub(super) role: Option<PoolRole>,
}

/// What all questions of a command have in common, besides their space.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestOptions<'a> {
    /// The mode; `None` = that of the space's policy.
    pub(super) mode: Option<Mode>,
    /// The only worker that may be chosen.
    pub(super) pin: Option<Worker>,
    /// The affinity session of the prompts.
    pub(super) session: Option<&'a str>,
    /// Whether to choose a prefill worker too.
    pub(super) disaggregate: bool,
}

struct DaemonExchange<'a> {
    client: Client,
    space: SpaceId,
    options: RequestOptions<'a>,
    /// The space's workers, once a reply has named one without its details.
    known: Option<Vec<wire::WorkerInfo>>,
}

fn request<'a>(space: SpaceId, options: RequestOptions<'a>, question: &'a Question) -> RouteRequest<'a> {
    RouteRequest {
        lora: question.lora.as_deref(),
        salt: question.salt.as_deref(),
        explain: true,
        pin: options.pin,
        affinity_session: options.session,
        disaggregate: options.disaggregate,
        overrides: Overrides { mode: options.mode, ..Overrides::NONE },
        candidates_max: CANDIDATES_MAX,
        ..RouteRequest::new(space, Prompt::Tokens(&question.tokens))
    }
}

impl Exchange for DaemonExchange<'_> {
    fn send(&mut self, question: &Question) -> Result<CorrelationId, Failure> {
        Ok(self.client.send_route(&request(self.space, self.options, question))?)
    }

    /// A reply only names the workers that were not eligible, so a second request asks for their overlap.
    fn complete(&mut self, question: &Question, answer: &mut Answer) -> Result<(), Failure> {
        let Answer::Ranking(ranking) = answer else { return Ok(()) };
        if ranking.rows.iter().all(|row| row.trust.is_some()) {
            return Ok(());
        }
        let overlaps = match self.client.overlap(&request(self.space, self.options, question)) {
            Ok(overlaps) => overlaps,
            // An older daemon: the rows stay without details.
            Err(error) if error.kind() == Kind::Unsupported => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let known = match self.known.take() {
            Some(known) => known,
            None => self.client.workers(Some(self.space))?,
        };
        for row in ranking.rows.iter_mut().filter(|row| row.trust.is_none()) {
            if let Some(entry) = overlaps.workers.iter().find(|entry| entry.worker == row.worker) {
                (row.overlap, row.trust) = (entry.overlap, Some(entry.trust));
            }
            if let Some(info) = known.iter().find(|info| info.worker == row.worker) {
                row.name.clone_from(&info.name);
                row.state = Some(info.state);
            }
        }
        self.known = Some(known);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        Ok(self.client.flush()?)
    }

    fn receive(&mut self) -> Result<(CorrelationId, Answer), Failure> {
        let (id, reply) = self.client.recv()?;
        match reply {
            Reply::Route(reply) => Ok((id, Answer::Ranking(ranking(reply)))),
            Reply::Error(error) => Ok((id, Answer::Refused(Error::from(error).to_string()))),
            _ => Err(Failure::new(
                Exit::Internal,
                format!("the daemon answered request {id} with another kind of reply than a query has"),
            )),
        }
    }
}

fn ranking(reply: wire::RouteReply) -> Ranking {
    let mut rows: Vec<Row> = reply.candidates.into_iter().map(candidate).collect();
    for (rule, workers) in reply.removed {
        rows.extend(workers.into_iter().map(|worker| Row {
            worker,
            name: String::new(),
            state: None,
            trust: None,
            overlap: Default::default(),
            cost: None,
            terms: None,
            removed_by: Some(rule.clone()),
        }));
    }
    Ranking {
        matched: reply.matched,
        notes: reply.notes,
        request_blocks: reply.request_blocks,
        ties: reply.ties,
        mode: reply.mode,
        no_worker: Kind::from_code(reply.nobody),
        prefill: reply.prefill.into_iter().map(candidate).collect(),
        others: reply.others,
        rows,
    }
}

fn candidate(candidate: wire::Candidate) -> Row {
    Row {
        worker: candidate.worker,
        name: candidate.name,
        state: Some(candidate.state),
        trust: Some(candidate.trust),
        overlap: candidate.overlap,
        cost: Some(candidate.cost),
        terms: candidate.terms,
        removed_by: None,
    }
}

/// Most questions sent and not yet delivered.
const QUESTIONS_IN_FLIGHT_MAX: usize = 64;
/// Most bytes of questions that the daemon has not answered.
const BYTES_IN_FLIGHT_MAX: usize = 1 << 20;
/// Most bytes of a question besides its tokens and names.
const QUESTION_OVERHEAD_BYTES: usize = 256;

/// A connection as the pipeline sees it.
trait Exchange {
    /// Queues one question.
    fn send(&mut self, question: &Question) -> Result<CorrelationId, Failure>;
    /// Writes everything queued.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Waits for the next answer, in any order.
    fn receive(&mut self) -> Result<(CorrelationId, Answer), Failure>;
    /// Asks for details that an answer lacks.
    fn complete(&mut self, question: &Question, answer: &mut Answer) -> Result<(), Failure>;
}

fn bytes_of(question: &Question) -> usize {
    let names = question.lora.as_ref().map_or(0, String::len) + question.salt.as_ref().map_or(0, String::len);
    question.tokens.len() + names + QUESTION_OVERHEAD_BYTES
}

/// Asks every question and passes each answer, with its question's index, to `deliver` in order.
fn run(
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
            let fits = bytes + bytes_of(question) <= BYTES_IN_FLIGHT_MAX && sent - delivered < QUESTIONS_IN_FLIGHT_MAX;
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
            return Err(Failure::new(Exit::Internal, format!("the daemon answered request {id}, which was not sent")));
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

    /// Answers the newest question first, and counts.
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
            assert!(self.flushed, "the request was never written");
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
    fn answers_arrive_in_any_order_and_are_delivered_in_the_order_of_the_questions() {
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
        assert!(exchange.most > 1 && exchange.most <= QUESTIONS_IN_FLIGHT_MAX, "{}", exchange.most);
    }

    #[test]
    fn bytes_in_flight_are_bounded_and_a_larger_question_goes_alone() {
        let questions: Vec<_> = (0..40).map(|at| question(at, if at % 10 == 0 { 300_000 } else { 30_000 })).collect();
        let mut exchange = Backwards::default();
        let mut count = 0;
        run(&mut exchange, &questions, &mut |_, _| {
            count += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(count, 40);
        assert!(exchange.most_bytes > 0 && exchange.most_bytes <= BYTES_IN_FLIGHT_MAX, "{}", exchange.most_bytes);
    }

    #[test]
    fn a_closed_output_ends_the_questions() {
        let questions: Vec<_> = (0..10).map(|at| question(at, 1)).collect();
        let stop = run(&mut Backwards::default(), &questions, &mut |_, _| Err(Failure::new(Exit::Done, "")));
        assert_eq!(stop, Err(Failure::new(Exit::Done, "")));
    }
}
