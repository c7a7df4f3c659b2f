//! The memory of the process: one budget, what each part may take of it, and what is given up while it is nearly used.
//!
//! ```text
//! machine or cgroup ─ budget ─ divide (at the start) ─▶ a bound for each part ─▶ the part refuses what exceeds it
//! resident memory, once a second ──────────────────────▶ Shedding ─▶ the cache is emptied, new requests are refused
//! ```
//!
//! The parts are counted in usual objects: a connection, a request, a stream of Envoy. What an unusual one takes beyond
//! that shows in the resident memory, which is looked at every second.

mod division;
mod replies;
mod shedding;

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hyper::StatusCode;
use kvrouted::machine::{AllowedBy, ResidentMemory, allowed_memory};
use parking_lot::Mutex;

pub(crate) use division::{Demands, Division, MemoryPart};
pub(crate) use replies::HeldReply;
pub(crate) use shedding::{Shed, Shedding};

use crate::api::ApiError;
use crate::config::Config;
use crate::limits::{
    CONNECTION_USUAL_BYTES, DAEMON_AND_GATEWAY_SHARE_PERCENT, DAEMON_BYTES_LEAST, MEMORY_LOOK_EVERY, PICK_OPEN_BYTES,
    REQUEST_USUAL_BYTES, STREAM_USUAL_BYTES, gateway_share_percent,
};

/// The error for a request while memory is short: 503, to be tried again.
pub(crate) fn memory_short() -> ApiError {
    let message = "the gateway's memory is nearly used (bounds.memory_bytes_max); try again";
    ApiError::gateway(StatusCode::SERVICE_UNAVAILABLE, "memory_short", message).retry_after(1)
}

/// Reads what a part takes, bytes.
type Source = Box<dyn Fn() -> u64 + Send + Sync>;

/// The memory of a running gateway.
pub struct Memory {
    division: Division,
    sources: Mutex<Vec<(MemoryPart, Source)>>,
    /// Opened at the start: a gateway in its sandbox opens no such file.
    resident_file: Option<ResidentMemory>,
    resident: AtomicU64,
    shedding: Mutex<Shedding>,
    /// By [`Shed`].
    shed: [AtomicBool; Shed::ALL.len()],
    counts: [AtomicU64; Shed::ALL.len()],
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("division", &self.division).finish_non_exhaustive()
    }
}

impl Default for Memory {
    /// Without a budget.
    fn default() -> Self {
        Self::of(Division::unlimited())
    }
}

impl Memory {
    fn of(division: Division) -> Self {
        Self {
            division,
            sources: Mutex::default(),
            resident_file: ResidentMemory::open(),
            resident: AtomicU64::new(0),
            shedding: Mutex::default(),
            shed: Default::default(),
            counts: Default::default(),
        }
    }

    /// A budget that bounds no part by itself: only the resident memory is compared with it.
    #[must_use]
    pub fn undivided(bytes_max: u64) -> Self {
        Self::of(Division::undivided(bytes_max))
    }

    /// Divides the budget of a configuration, and lowers the bounds of the configuration to what their parts may take.
    /// Call it before the sandbox: it reads what the machine and the cgroup have. `streams` = it is for the endpoint
    /// picker, which may have this many streams.
    ///
    /// # Errors
    /// The budget is below the sum of what must be there, with that sum and the remedy.
    pub fn divide(config: &mut Config, streams: Option<usize>) -> Result<Arc<Self>, String> {
        let demands = Demands::of(config, streams);
        let allowed = allowed_memory(Path::new("/"));
        let has_daemon = config.socket.is_none();
        let bytes_max = match (config.bounds.memory_bytes_max, allowed) {
            (0, None) => {
                tracing::warn!("the system does not tell how much memory there is; set bounds.memory_bytes_max");
                return Ok(Arc::default());
            }
            (0, Some(allowed)) => {
                let percent = gateway_share_percent(has_daemon, allowed.by == AllowedBy::Cgroup);
                // A small machine or container runs a small gateway, if it can run one at all.
                (allowed.bytes / 100 * percent).max(demands.reserves().min(allowed.bytes))
            }
            (configured, _) => configured,
        };
        let division = Division::of(bytes_max, &demands)?;
        if let Some(allowed) = allowed.filter(|_| has_daemon) {
            let both = allowed.bytes / 100 * DAEMON_AND_GATEWAY_SHARE_PERCENT;
            config.daemon_memory_bytes_max = match both.saturating_sub(bytes_max) {
                bytes if bytes >= DAEMON_BYTES_LEAST => bytes,
                bytes => {
                    tracing::warn!(
                        bytes,
                        "little memory is left for the daemon: it plans with its own default, as if it were alone"
                    );
                    0
                }
            };
        }
        let bounds = &mut config.bounds;
        let objects = |part, usual: u64| division.objects(part, usual);
        for (name, bound, most) in [
            ("connections_max", &mut bounds.connections_max, objects(MemoryPart::Connections, CONNECTION_USUAL_BYTES)),
            ("requests_max", &mut bounds.requests_max, objects(MemoryPart::Requests, REQUEST_USUAL_BYTES)),
            ("bodies_bytes_max", &mut bounds.bodies_bytes_max, objects(MemoryPart::Bodies, 1)),
            ("picks_max", &mut bounds.picks_max, objects(MemoryPart::Picks, PICK_OPEN_BYTES)),
        ] {
            if most < *bound {
                tracing::warn!(
                    name,
                    configured = *bound,
                    most,
                    "the memory budget allows less; see bounds.memory_bytes_max"
                );
                *bound = most;
            }
        }
        config.tokens.cache_bytes_max = config.tokens.cache_bytes_max.min(division.bound(MemoryPart::TokenCache));
        replies::bound(division.bound(MemoryPart::Replies));
        tracing::info!(bytes_max, daemon_bytes_max = config.daemon_memory_bytes_max, "memory budget");
        let this = Self::of(division);
        this.watch(MemoryPart::Replies, replies::held);
        Ok(Arc::new(this))
    }

    /// Streams that the endpoint picker may have.
    #[must_use]
    pub fn streams_max(&self) -> usize {
        self.division.objects(MemoryPart::Streams, STREAM_USUAL_BYTES)
    }

    /// Bytes of request bodies that may be held.
    #[must_use]
    pub fn bodies_bytes_max(&self) -> usize {
        self.division.objects(MemoryPart::Bodies, 1)
    }

    /// Reads a part's memory by `read`, when metrics are asked for.
    pub(crate) fn watch(&self, part: MemoryPart, read: impl Fn() -> u64 + Send + Sync + 'static) {
        self.sources.lock().push((part, Box::new(read)));
    }

    /// Whether new requests are refused, because the resident memory is near the budget.
    #[must_use]
    pub fn refuses_requests(&self) -> bool {
        self.has_shed(Shed::Requests)
    }

    fn has_shed(&self, shed: Shed) -> bool {
        // Relaxed, here and below: a flag and figures, which order nothing.
        self.shed[shed as usize].load(Ordering::Relaxed)
    }

    /// Looks at the resident memory once a second, for ever. `empty_cache` is called while the cache is given up.
    pub async fn watch_resident(self: Arc<Self>, empty_cache: impl Fn() + Send) {
        let mut every = tokio::time::interval(MEMORY_LOOK_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            if let Some(resident) = self.resident_file.as_ref().and_then(ResidentMemory::bytes) {
                self.look(resident);
            }
            if self.has_shed(Shed::TokenCache) {
                empty_cache();
            }
        }
    }

    /// Takes a look at the resident memory, bytes: something may be given up from now on, or be taken up again.
    pub fn look(&self, resident: u64) {
        self.resident.store(resident, Ordering::Relaxed);
        let bytes_max = self.division.bytes_max();
        let Some((shed, begins)) = self.shedding.lock().look(resident, bytes_max) else { return };
        self.shed[shed as usize].store(begins, Ordering::Relaxed);
        self.counts[shed as usize].fetch_add(u64::from(begins), Ordering::Relaxed);
        let what = shed.meaning();
        match begins {
            true => tracing::warn!(resident, bytes_max, what, "memory is short"),
            false => tracing::warn!(resident, bytes_max, what, "there is memory again, and this has ended"),
        }
    }

    /// What is given up now, as findings say it.
    pub(crate) fn findings(&self) -> impl Iterator<Item = &'static str> + '_ {
        Shed::ALL.into_iter().filter(|shed| self.has_shed(*shed)).map(Shed::meaning)
    }

    /// Writes the metrics, in the text format of OpenMetrics.
    pub(crate) fn metrics(&self, text: &mut String) {
        // Writing to a string cannot fail, here and below.
        let mut family = |name: &str, help: &str, rows: &mut dyn Iterator<Item = (&'static str, u64)>| {
            let _ = writeln!(text, "# HELP kvrouted_gateway_{name} {help}.\n# TYPE kvrouted_gateway_{name} gauge");
            for (part, value) in rows {
                let _ = writeln!(text, "kvrouted_gateway_{name}{{part=\"{part}\"}} {value}");
            }
        };
        let is_bounded = self.division.bytes_max() < u64::MAX;
        let mut most =
            MemoryPart::ALL.into_iter().filter(|_| is_bounded).map(|part| (part.name(), self.division.bound(part)));
        family("memory_bytes_max", "The most memory of a part of the process", &mut most);
        let sources = self.sources.lock();
        let of = |part| sources.iter().filter(|(of, _)| *of == part).map(|(_, read)| read()).sum::<u64>();
        let counted = MemoryPart::ALL.into_iter().filter(|part| sources.iter().any(|(of, _)| of == part));
        family(
            "memory_bytes",
            "The memory of a part, in usual objects",
            &mut counted.map(|part| (part.name(), of(part))),
        );
        let budget = if is_bounded { self.division.bytes_max() } else { 0 };
        for (name, help, value) in [
            ("memory_budget_bytes", "The memory budget of the process; 0 = none", budget),
            ("memory_resident_bytes", "Resident memory of the process", self.resident.load(Ordering::Relaxed)),
        ] {
            let _ = writeln!(text, "# HELP kvrouted_gateway_{name} {help}.\n# TYPE kvrouted_gateway_{name} gauge");
            let _ = writeln!(text, "kvrouted_gateway_{name} {value}");
        }
        let name = "kvrouted_gateway_memory_sheds";
        let help = "Times that something was given up because the memory budget was nearly used";
        let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} counter");
        for shed in Shed::ALL {
            let count = self.counts[shed as usize].load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_total{{what=\"{}\"}} {count}", shed.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_name_each_part_with_what_it_takes_and_may_take() {
        let demands =
            Demands { connections_max: 100, body_bytes_max: 1 << 20, bodies_bytes_max: 1 << 25, ..Demands::default() };
        let memory = Memory::of(Division::of(1 << 30, &demands).expect("enough"));
        memory.watch(MemoryPart::Bodies, || 5);
        memory.watch(MemoryPart::Bodies, || 6);
        let mut text = String::new();
        memory.metrics(&mut text);
        for line in [
            "kvrouted_gateway_memory_bytes{part=\"bodies\"} 11",
            "kvrouted_gateway_memory_budget_bytes 1073741824",
            "kvrouted_gateway_memory_bytes_max{part=\"bodies\"} 33554432",
            "kvrouted_gateway_memory_sheds_total{what=\"requests\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(!memory.refuses_requests() && memory.findings().next().is_none());
        (0..2).for_each(|_| memory.look(1 << 30));
        assert!(memory.refuses_requests() && memory.findings().count() == 2);
        assert_eq!(Memory::default().streams_max(), usize::MAX);
    }
}
