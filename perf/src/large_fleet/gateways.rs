//! Gateways that ask every daemon over many connections, all from one thread.

use std::path::PathBuf;
use std::time::Duration;

use kvrouted::ids::SpaceId;
use rustix::time::{ClockId, clock_gettime};

use super::contents::{SHARED_PROMPTS, shared_prompt};
use crate::failure::Failure;
use crate::socket::{Frames, Measured, Pace, Wire, ask_wires, framed};

/// The gateways of one measurement.
#[derive(Clone, Debug)]
pub(super) struct Gateways {
    /// The daemons' sockets, over which the connections are spread.
    pub(super) sockets: Vec<PathBuf>,
    /// Connections.
    pub(super) connections: u32,
    /// Routes a second.
    pub(super) routes_per_s: f64,
    /// How long they ask.
    pub(super) time: Duration,
    /// How long a booking is held.
    pub(super) hold: Duration,
    /// The number of the first request. No other request of the run has it.
    pub(super) first: u64,
}

/// What they measured.
pub(super) struct Asked {
    pub(super) measured: Measured,
    /// Processor time of their thread, nanoseconds.
    pub(super) cpu_ns: u64,
}

impl Gateways {
    /// Asks, and frees every booking.
    ///
    /// # Errors
    /// A daemon refuses, or does not answer.
    pub(super) fn ask(&self) -> Result<Asked, Failure> {
        let prompts: Vec<_> = (0..SHARED_PROMPTS).map(shared_prompt).collect();
        let frames = Frames::of_hashes(&prompts, SpaceId(0))?;
        // As many as are held at the wanted rate, and half as many for those that are answered late.
        let held = self.routes_per_s * self.hold.as_secs_f64() / f64::from(self.connections);
        let depth = (1.5 * held) as u32 + 8;
        let mut wires = Vec::new();
        for connection in 0..self.connections as usize {
            let socket = framed(&self.sockets[connection % self.sockets.len()])?;
            wires.push(Wire::new(socket, Box::new(frames.clone()), depth).holding(self.hold));
        }
        let mut number = self.first;
        let measured = ask_wires(&mut wires, Pace::Open(self.routes_per_s), false, self.time, &mut number)?;
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Ok(Asked { measured, cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64 })
    }
}
