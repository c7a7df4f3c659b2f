//! What makes gateways' handles, tokens and names valid for one daemon run, or for several if a restart keeps bookings.

use rand::RngExt;

/// Numbers that a daemon draws when it starts, unless it continues with the bookings of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Names the daemon to gateways; never 0. While it is the same, their bookings live on.
    pub instance_id: u64,
    /// The secret of the hashes of request ids and prompts, and of handles.
    pub secret: u64,
    /// The secret of the hashes of affinity sessions.
    pub affinity_secret: u64,
    /// The version of the first fleet table. Gateways compare versions of one instance.
    pub fleet_version: u64,
}

impl Identity {
    /// The identity of a run that continues no other.
    #[must_use]
    pub fn random() -> Self {
        let mut rng = rand::rng();
        Self {
            instance_id: rng.random_range(1..=u64::MAX),
            secret: rng.random(),
            affinity_secret: rng.random(),
            fleet_version: 1,
        }
    }
}
