//! Questions that decide nothing.

use super::{Client, unexpected};
use crate::error::Result;
use crate::protocol::{PotentialLoads, RouteRequest};
use crate::wire::Reply;

impl Client {
    /// Asks what every worker would have to do if it took a prompt, for a choice of one's own; only what says which
    /// prompt in which space matters.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::POTENTIAL_LOADS`](crate::wire::features::POTENTIAL_LOADS).
    pub fn potential_loads(&mut self, request: &RouteRequest<'_>) -> Result<PotentialLoads> {
        let id = self.take_id();
        self.encoder.potential_loads(id, request, &mut self.unsent)?;
        match self.reply_to(id)? {
            Reply::PotentialLoads(loads) => Ok(loads),
            other => Err(unexpected("potential_loads", &other)),
        }
    }
}
