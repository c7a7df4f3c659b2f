//! What deciding asks of a request beside its values.

use super::policy::Policy;
use crate::protocol::{Mode, Overrides, RouteRequest};

impl RouteRequest<'_> {
    /// Whether the request is only a question: it compares and explains several candidates, and books none.
    #[must_use]
    pub(super) const fn is_question(&self) -> bool {
        self.explain && self.book.is_none() && self.candidates_max != 1
    }

    /// The same request as a question about every worker of the space, eligible or not. Overrides mode `direct`, which
    /// needs a pin.
    #[must_use]
    pub(super) fn of_every_worker(&self, policy: &Policy) -> Self {
        let mode = if policy.mode == Mode::Direct { Some(Mode::Kv) } else { self.overrides.mode };
        Self { overrides: Overrides { mode, ..self.overrides }, ..self.as_question() }
    }
}
