//! A real nats-server in its place, over which routers hear each other. It is killed and started again.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use super::namespace::Namespace;
use crate::failure::Failure;

/// Where it listens.
pub(super) const NATS_PORT: u16 = 4222;
/// Where Debian installs it.
const PROGRAM: &str = "/usr/sbin/nats-server";

/// A nats-server. It ends with this.
pub(super) struct Broker {
    place: Arc<Namespace>,
    child: Option<Child>,
}

impl Broker {
    /// Starts it in a place.
    ///
    /// # Errors
    /// It is not installed.
    pub(super) fn start(place: &Arc<Namespace>) -> Result<Self, Failure> {
        let mut broker = Self { place: Arc::clone(place), child: None };
        broker.start_again()?;
        Ok(broker)
    }

    /// Starts it again.
    ///
    /// # Errors
    /// It is not installed.
    pub(super) fn start_again(&mut self) -> Result<(), Failure> {
        let mut command = Command::new(PROGRAM);
        command.args(["--addr", &self.place.address().to_string(), "--port", &NATS_PORT.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let spawn = || command.spawn().map_err(Failure::system("start nats-server, of Debian's package of this name"));
        self.child = Some(self.place.inside(spawn)?);
        Ok(())
    }

    /// Kills it.
    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // That it is gone already shows at the routers.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}
