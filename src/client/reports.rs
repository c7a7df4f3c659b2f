//! What a gateway reports while a booked request runs.

use super::{Client, unexpected};
use crate::error::Result;
use crate::ids::Worker;
use crate::load::{BookingOutcome, BookingRef};
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
}
