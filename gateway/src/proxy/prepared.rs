//! A request whose body was read: what it asks for, and the question to the router.

use std::time::Instant;

use bytes::Bytes;

use super::choose::Asked;
use super::headers::Hints;
use crate::api::{ApiPath, RequestFacts};
use crate::engines::ServedModel;

/// A body that was read, and where it should go.
pub(super) struct Prepared {
    pub(super) facts: RequestFacts,
    pub(super) model: ServedModel,
    pub(super) hints: Hints,
    /// The booking's name. The gateway makes it, so that no caller can end another one's booking.
    pub(super) booking_id: String,
}

impl Prepared {
    /// The question to the router: which engine should run it?
    pub(super) fn asked<'a>(
        &'a self,
        path: ApiPath,
        body: &'a Bytes,
        exclude: &'a [u64],
        deadline: Instant,
    ) -> Asked<'a> {
        let Self { facts, model, hints, booking_id } = self;
        Asked {
            path,
            facts,
            body,
            model,
            booking_id,
            priority: hints.priority,
            session: hints.session.as_deref(),
            tenant: hints.tenant.as_deref(),
            trace: hints.trace,
            exclude,
            deadline,
            disaggregate: false,
        }
    }
}
