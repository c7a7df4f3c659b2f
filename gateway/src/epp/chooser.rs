//! What the picker asks of the rest of the gateway.

use std::future::Future;

use super::exchange::{Decision, Question, ResponseStart};
use crate::api::ApiError;

/// Chooses endpoints for requests.
pub trait Chooser: Send + Sync + 'static {
    /// The booking of a request, and all that is reported about it.
    type Lease: Lease;

    /// Chooses endpoints. The future is dropped if the request ends or its deadline passes; it must free what it
    /// booked.
    ///
    /// # Errors
    /// The error that the caller gets.
    fn choose(&self, question: Question) -> impl Future<Output = Result<Choice<Self::Lease>, ApiError>> + Send;
}

/// The endpoints of a request, and its booking.
#[derive(Debug)]
pub struct Choice<L> {
    /// What Envoy hears.
    pub decision: Decision,
    /// The booking.
    pub lease: L,
}

/// A request that runs. Dropping it without [`Lease::complete`] says that the request ended early.
///
/// Each method is called on the stream's task, so none may block.
pub trait Lease: Send + 'static {
    /// The response has begun. May be called twice, by two filters of one Envoy.
    fn answered(&mut self, start: &ResponseStart);

    /// Headers that the response gets, by name and value. Asked for after [`Lease::answered`].
    fn response_headers(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// A piece of the response's body passed.
    fn output(&mut self, piece: &[u8]);

    /// The response is complete.
    fn complete(self);
}
