//! What an operator asks of a daemon, on its admin socket.

use super::{Client, no_progress, unexpected};
use crate::error::Result;
use crate::wire::{PolicyDone, PolicyOrder, Reply, ResetDone, ResetOrder, StatusPage, WorkerChange, WorkerStatus};

impl Client {
    /// Every worker's status. Only on the admin socket: see [`Client::connect_admin`].
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn status(&mut self) -> Result<Vec<WorkerStatus>> {
        self.status_all().map(|page| page.workers)
    }

    /// All pages of status as one, with the daemon's own counters as the last page had them.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn status_all(&mut self) -> Result<StatusPage> {
        let (mut workers, mut sources, mut cursor) = (Vec::new(), Vec::new(), 0);
        loop {
            let mut page = self.status_page(cursor, 0)?;
            workers.append(&mut page.workers);
            sources.append(&mut page.sources);
            match page.next_cursor {
                Some(next) if next > cursor => cursor = next,
                Some(_) => return Err(no_progress()),
                None => return Ok(StatusPage { workers, sources, ..page }),
            }
        }
    }

    /// One page of status; `limit` 0 = as many workers as the daemon gives.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn status_page(&mut self, cursor: u32, limit: u32) -> Result<StatusPage> {
        let id = self.take_id();
        self.encoder.status(id, cursor, limit, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::Status(page) => Ok(page),
            other => Err(unexpected("status", &other)),
        }
    }

    /// Adds, removes or changes a worker; answers with how many. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn change_worker(&mut self, change: &WorkerChange<'_>) -> Result<u32> {
        let id = self.take_id();
        self.encoder.change_worker(id, change, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::ChangeWorker(workers) => Ok(workers),
            other => Err(unexpected("change_worker", &other)),
        }
    }

    /// Lets the daemon forget the blocks of a worker, or of every worker. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn reset(&mut self, order: ResetOrder) -> Result<ResetDone> {
        let id = self.take_id();
        self.encoder.reset(id, order, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::Reset(done) => Ok(done),
            other => Err(unexpected("reset", &other)),
        }
    }

    /// Sets, promotes or ends a shadow policy. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn set_policy(&mut self, order: &PolicyOrder<'_>) -> Result<PolicyDone> {
        let id = self.take_id();
        self.encoder.set_policy(id, order, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::SetPolicy(done) => Ok(done),
            other => Err(unexpected("set_policy", &other)),
        }
    }
}
