//! What an async client asks and reports beside a request's life.

use super::asking;
use super::asynchronous::AsyncClient;
use super::prompt::Question;
use super::{no_progress, unexpected};
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::protocol::{EngineLoad, PotentialLoads, RouteRequest};
use crate::wire::{OverlapReply, Reply, RequestEncoder, WorkerInfo, WorkersPage};

impl AsyncClient {
    /// Asks who holds how much of a prompt; only what says which prompt in which space matters.
    ///
    /// # Errors
    /// The daemon's refusals; [`Kind::Connection`](crate::error::Kind::Connection) where it does not answer.
    pub async fn overlap(&self, request: &RouteRequest<'_>) -> Result<OverlapReply> {
        match self.ask_prompt(Question::Overlap, request).await?.reply {
            Reply::Overlap(reply) => Ok(reply),
            other => Err(unexpected("overlap", &other)),
        }
    }

    /// Asks what every worker would have to do if it took a prompt, for a choice of one's own.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`]; [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::POTENTIAL_LOADS`](crate::wire::features::POTENTIAL_LOADS).
    pub async fn potential_loads(&self, request: &RouteRequest<'_>) -> Result<PotentialLoads> {
        match self.ask_prompt(Question::PotentialLoads, request).await?.reply {
            Reply::PotentialLoads(loads) => Ok(loads),
            other => Err(unexpected("potential_loads", &other)),
        }
    }

    /// Every worker's record, of one space or of all, as the daemon has it now.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn workers(&self, space: Option<SpaceId>) -> Result<Vec<WorkerInfo>> {
        let (mut all, mut cursor) = (Vec::new(), 0);
        let deadline = self.deadline();
        loop {
            let put = || {
                let theirs = space.map(|space| self.theirs(space)).transpose()?;
                Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                    encoder.workers(id, theirs, cursor, 0, out);
                    Ok(())
                })
            };
            let WorkersPage { workers, next_cursor, .. } = match asking::ask(self.shared(), deadline, put).await?.reply
            {
                Reply::Workers(page) => page,
                other => return Err(unexpected("workers", &other)),
            };
            let conversation = self.shared().conversation.lock();
            all.extend(workers.into_iter().filter_map(|info| {
                let space = conversation.spaces.ours(info.space)?;
                Some(WorkerInfo { space, ..info })
            }));
            match next_cursor {
                Some(next) if next > cursor => cursor = next,
                Some(_) => return Err(no_progress()),
                None => return Ok(all),
            }
        }
    }

    /// Reports how busy a worker says it is. `false` = the worker has just left, or reports of this user
    /// are in force for as many workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn report_load(&self, space: SpaceId, worker: Worker, load: &EngineLoad) -> Result<bool> {
        let put = || {
            let of = (self.theirs(space)?, worker);
            Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                encoder.report_load(id, of, load, out);
                Ok(())
            })
        };
        match asking::ask(self.shared(), self.deadline(), put).await?.reply {
            Reply::ReportLoad(accepted) => Ok(accepted),
            other => Err(unexpected("report_load", &other)),
        }
    }

    /// Reports that a worker failed a request, rank 2³² - 1 = every rank of it. Answers with how long it is left alone
    /// while others can run requests, milliseconds; 0 where reports of this user keep requests away from as many workers as
    /// `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// As [`AsyncClient::overlap`].
    pub async fn report_failure(&self, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let put = || {
            let of = (self.theirs(space)?, worker);
            Ok(move |encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>| {
                encoder.report_failure(id, of, reason, out);
                Ok(())
            })
        };
        match asking::ask(self.shared(), self.deadline(), put).await?.reply {
            Reply::ReportFailure(back_off_ms) => Ok(back_off_ms),
            other => Err(unexpected("report_failure", &other)),
        }
    }

    /// What the daemon calls a space.
    fn theirs(&self, space: SpaceId) -> Result<SpaceId> {
        self.shared().conversation.lock().spaces.theirs(space)
    }
}
