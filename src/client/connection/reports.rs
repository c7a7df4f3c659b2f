//! What a gateway reports while a booked request runs, and of workers.

use super::{Client, unexpected};
use crate::error::Result;
use crate::ids::{SpaceId, Worker};
use crate::protocol::{BookingOutcome, BookingRef, EngineLoad};
use crate::wire::Reply;

impl Client {
    /// Reports how many tokens a booked request has put out so far, all of them.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn output_progress(&mut self, booking: &BookingRef<'_>, output_tokens: u32) -> Result<BookingOutcome> {
        let id = self.take_id();
        self.encoder.output_progress(id, booking, output_tokens, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::OutputProgress(outcome) => Ok(outcome),
            other => Err(unexpected("output_progress", &other)),
        }
    }

    /// Reports that a booked request runs on another worker of its space than the one it was booked on.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn served(&mut self, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        let id = self.take_id();
        self.encoder.served(id, booking, worker, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::Served(outcome) => Ok(outcome),
            other => Err(unexpected("served", &other)),
        }
    }

    /// Reports how busy a worker says it is. `false` = the worker has just left, or reports of this user
    /// are in force for as many workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_load(&mut self, space: SpaceId, worker: Worker, load: &EngineLoad) -> Result<bool> {
        let id = self.take_id();
        self.encoder.report_load(id, (space, worker), load, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::ReportLoad(accepted) => Ok(accepted),
            other => Err(unexpected("report_load", &other)),
        }
    }

    /// Reports that a worker failed a request, rank 2³² - 1 = every rank of it. Answers with how long it is left alone
    /// while others can run requests, milliseconds; 0 where reports of this user keep requests away from as many workers as
    /// `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_failure(&mut self, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let id = self.take_id();
        self.encoder.report_failure(id, (space, worker), reason, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::ReportFailure(back_off_ms) => Ok(back_off_ms),
            other => Err(unexpected("report_failure", &other)),
        }
    }
}
