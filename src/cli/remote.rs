//! What the commands ask of a daemon, in terms of the client.

use std::path::Path;
use std::time::Duration;

use super::exit::{Exit, Failure};
use super::pipeline::{self, Exchange};
use super::potential::Loads;
use super::prompts::Question;
use super::ranking::{Answer, Ranking, Row};
use crate::client::{Client, ClientOptions, Reply};
use crate::error::{Error, Kind};
use crate::fleet::PoolRole;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::CANDIDATES_MAX;
use crate::route::{Mode, Overrides, Prompt, RouteRequest};
use crate::wire;

/// How long a person at a terminal waits for a daemon that says nothing.
const ANSWER_S_MAX: u64 = 10;

fn options() -> ClientOptions {
    let timeout = Some(Duration::from_secs(ANSWER_S_MAX));
    ClientOptions { name: "kvrouted command line".to_owned(), timeout, ..ClientOptions::default() }
}

/// Connection failures end with their own code, whatever went wrong underneath.
fn unavailable(socket: &Path, error: &Error) -> Failure {
    let exit = match Exit::of(error) {
        Exit::System => Exit::Unavailable,
        exit => exit,
    };
    let (shown, said) = (socket.display().to_string(), error.to_string());
    Failure::new(exit, if said.contains(&shown) { said } else { format!("{shown}: {said}") })
}

/// Asks a daemon every question, several at once, and hands over the answers in the order asked.
pub(super) fn ask(
    socket: &Path,
    pool: Pool<'_>,
    how: How<'_>,
    questions: &[Question],
    deliver: &mut dyn FnMut(usize, &Answer) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let client = Client::connect(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    let space = client.pool(pool.model, pool.namespace, pool.role)?.id;
    pipeline::run(&mut Asking { client, space, how, known: None }, questions, deliver)
}

/// Asks a daemon what every worker would have to do with each prompt, and hands over the answers in the order asked.
pub(super) fn potential_loads(
    socket: &Path,
    pool: Pool<'_>,
    questions: &[Question],
    deliver: &mut dyn FnMut(usize, &Loads) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut client = Client::connect(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    let space = client.pool(pool.model, pool.namespace, pool.role)?.id;
    for (place, question) in questions.iter().enumerate() {
        let loads = client.potential_loads(&request(space, How::default(), question));
        match &loads {
            // No daemon is none to ask the rest.
            Err(error) if error.kind() == Kind::Connection => return Err(unavailable(socket, error)),
            _ => deliver(place, &loads)?,
        }
    }
    Ok(())
}

/// Asks a daemon about every worker, and who names them. `socket` is its administration socket, or its routing socket, which then
/// says where the other is.
pub(super) fn status(socket: &Path) -> Result<wire::StatusPage, Failure> {
    examination(socket).map(|(_, page)| page)
}

/// As [`status`], with the spaces that the daemon says it has.
pub(super) fn examination(socket: &Path) -> Result<(Vec<wire::SpaceInfo>, wire::StatusPage), Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    let page = client.status_all()?;
    Ok((client.hello().spaces.clone(), page))
}

/// Asks a daemon to add, remove or change a worker. `socket` is as for [`status`].
pub(super) fn change_worker(socket: &Path, change: &wire::WorkerChange<'_>) -> Result<u32, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.change_worker(change)?)
}

/// Asks a daemon to forget the blocks of a worker, or of all. `socket` is as for [`workers`].
pub(super) fn reset(socket: &Path, order: wire::ResetOrder) -> Result<wire::ResetDone, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.reset(order)?)
}

/// Gives a daemon an order about its policy. `socket` is as for [`status`].
pub(super) fn set_policy(socket: &Path, order: &wire::PolicyOrder<'_>) -> Result<wire::PolicyDone, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.set_policy(order)?)
}

/// Whose workers are asked about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool<'a> {
    pub(super) model: &'a str,
    pub(super) namespace: Option<&'a str>,
    /// Needed where the model has several.
    pub(super) role: Option<PoolRole>,
}

/// What every question of a command has in common beside its space.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How<'a> {
    /// How the worker is chosen; `None` = as the space's policy says.
    pub(super) mode: Option<Mode>,
    /// The only worker that may be.
    pub(super) pin: Option<Worker>,
    /// The conversation that the prompts belong to.
    pub(super) session: Option<&'a str>,
    /// Whether a worker to prefill is wanted, too.
    pub(super) disaggregate: bool,
}

struct Asking<'a> {
    client: Client,
    space: SpaceId,
    how: How<'a>,
    /// The space's workers, once a reply has named one without saying more of it.
    known: Option<Vec<wire::WorkerInfo>>,
}

fn request<'a>(space: SpaceId, how: How<'a>, question: &'a Question) -> RouteRequest<'a> {
    RouteRequest {
        lora: question.lora.as_deref(),
        salt: question.salt.as_deref(),
        explain: true,
        pin: how.pin,
        affinity_session: how.session,
        disaggregate: how.disaggregate,
        overrides: Overrides { mode: how.mode, ..Overrides::NONE },
        candidates_max: CANDIDATES_MAX,
        ..RouteRequest::new(space, Prompt::Tokens(&question.tokens))
    }
}

impl Exchange for Asking<'_> {
    fn send(&mut self, question: &Question) -> Result<CorrelationId, Failure> {
        Ok(self.client.send_route(&request(self.space, self.how, question))?)
    }

    /// A route's reply only names the workers that were out of the running; what they hold is asked for apart.
    fn complete(&mut self, question: &Question, answer: &mut Answer) -> Result<(), Failure> {
        let Answer::Ranking(ranking) = answer else { return Ok(()) };
        if ranking.rows.iter().all(|row| row.trust.is_some()) {
            return Ok(());
        }
        let overlaps = match self.client.overlap(&request(self.space, self.how, question)) {
            Ok(overlaps) => overlaps,
            // An older daemon: the rows say "not known", as they do without it.
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
            _ => Err(Failure::new(Exit::Internal, format!("the daemon's answer to {id} is not one to a query"))),
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
        nobody: Kind::from_code(reply.nobody),
        prefill: reply.prefill.into_iter().map(candidate).collect(),
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
