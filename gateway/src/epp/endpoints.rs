//! Which worker answers at which address.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kvrouted::ids::{DpRank, Worker, WorkerId};

use super::subset::Subset;

/// One worker's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The worker: one data-parallel rank of an engine.
    pub worker: Worker,
    /// Where it answers HTTP, as Envoy knows it.
    pub address: SocketAddr,
}

/// All endpoints at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointTable {
    by_worker: HashMap<Worker, SocketAddr>,
    by_address: HashMap<SocketAddr, Worker>,
    /// The ports of each engine. One port serves all ranks of its engine.
    ports: HashMap<WorkerId, u32>,
}

/// Where a worker answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The address.
    pub address: SocketAddr,
    /// All ranks of the engine answer there, so a header must name the rank.
    pub is_shared: bool,
}

impl EndpointTable {
    /// A table of endpoints; also the endpoints left out because their worker or their address was already taken.
    #[must_use]
    pub fn of(endpoints: impl IntoIterator<Item = Endpoint>) -> (Self, Vec<Endpoint>) {
        let (mut table, mut refused) = (Self::default(), Vec::new());
        for endpoint in endpoints {
            if table.by_worker.contains_key(&endpoint.worker) || table.by_address.contains_key(&endpoint.address) {
                refused.push(endpoint);
            } else {
                table.by_worker.insert(endpoint.worker, endpoint.address);
                table.by_address.insert(endpoint.address, endpoint.worker);
                *table.ports.entry(endpoint.worker.id).or_default() += 1;
            }
        }
        (table, refused)
    }

    /// Where a worker answers. An engine with several ports has a rank at each; one with a single port has all ranks
    /// there.
    #[must_use]
    pub fn place(&self, worker: Worker) -> Option<Place> {
        let is_shared = self.ports.get(&worker.id) == Some(&1);
        let listed = if is_shared { Worker { rank: DpRank(0), ..worker } } else { worker };
        self.by_worker.get(&listed).map(|address| Place { address: *address, is_shared })
    }

    /// The worker at an address; the first rank of an engine with a single port.
    #[must_use]
    pub fn worker(&self, address: &SocketAddr) -> Option<Worker> {
        self.by_address.get(address).copied()
    }

    /// Selectors of the workers that a subset allows, or of all; in order. An engine with a single port is selected
    /// with every rank.
    #[must_use]
    pub fn workers(&self, subset: Option<&Subset>) -> Vec<Worker> {
        let allowed = |address| subset.is_none_or(|subset| subset.allows(address));
        let is_single = |worker: &Worker| self.ports.get(&worker.id) == Some(&1);
        let selector = |worker: &Worker| if is_single(worker) { Worker::every_rank(worker.id) } else { *worker };
        let listed = self.by_worker.iter().filter(|(_, address)| allowed(address));
        let mut workers: Vec<_> = listed.map(|(worker, _)| selector(worker)).collect();
        workers.sort_unstable();
        workers
    }

    /// The number of endpoints.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_worker.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_worker.is_empty()
    }
}

/// The present table. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Endpoints(Arc<ArcSwap<EndpointTable>>);

impl Endpoints {
    /// The table as it is now.
    #[must_use]
    pub fn now(&self) -> Arc<EndpointTable> {
        self.0.load_full()
    }

    /// Replaces the table. `false` = it is the same as before.
    pub fn replace(&self, table: EndpointTable) -> bool {
        let is_new = **self.0.load() != table;
        if is_new {
            self.0.store(Arc::new(table));
        }
        is_new
    }
}

/// An engine's endpoints as an operator writes them: `ID=HOST:PORT[,PORT…]`, with one port for each rank.
///
/// The host is an address, an IPv6 address in brackets, or a name.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointConfig {
    /// The engine's worker id in the daemon.
    pub worker: u64,
    /// An address without brackets, or a name of one engine. A name is looked up again and again.
    pub host: String,
    /// The port of rank 0, of rank 1 and so on.
    pub ports: Vec<u16>,
}

impl EndpointConfig {
    /// The endpoints, if this is the host's address.
    pub fn at(&self, host: IpAddr) -> impl Iterator<Item = Endpoint> + '_ {
        (0..).zip(&self.ports).map(move |(rank, port)| Endpoint {
            worker: Worker::new(self.worker, rank),
            address: SocketAddr::new(host, *port),
        })
    }

    /// The address, if the host is one.
    #[must_use]
    pub fn literal(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl fmt::Display for EndpointConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports = self.ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
        match self.host.contains(':') {
            true => write!(f, "{}=[{}]:{ports}", self.worker, self.host),
            false => write!(f, "{}={}:{ports}", self.worker, self.host),
        }
    }
}

/// Text that is not `ID=HOST:PORT[,PORT…]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an endpoint: {why}; write ID=HOST:PORT, with further ports after commas for further ranks")]
pub struct EndpointError {
    text: String,
    why: &'static str,
}

impl FromStr for EndpointConfig {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = |why| EndpointError { text: text.to_owned(), why };
        let (worker, rest) = text.split_once('=').ok_or_else(|| wrong("there is no ="))?;
        let worker = worker.trim().parse().map_err(|_| wrong("the worker's id is not a number"))?;
        let (host, ports) = rest.rsplit_once(':').ok_or_else(|| wrong("there is no port"))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| wrong("a bracket is open"))?,
            None if host.contains(':') => return Err(wrong("an IPv6 address needs brackets")),
            None => host,
        };
        if host.is_empty() {
            return Err(wrong("there is no host"));
        }
        let ports: Vec<u16> = ports
            .split(',')
            .map(|port| port.trim().parse().ok().filter(|port| *port != 0))
            .collect::<Option<_>>()
            .ok_or_else(|| wrong("a port is not a number from 1 to 65535"))?;
        Ok(Self { worker, host: host.to_owned(), ports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(id: u64, rank: u32, address: &str) -> Endpoint {
        Endpoint { worker: Worker::new(id, rank), address: address.parse().expect("an address") }
    }

    #[test]
    fn several_ports_are_ranks() {
        let config: EndpointConfig = "7=10.0.0.8:8000,8001".parse().expect("an endpoint");
        let host = config.literal().expect("an address");
        let expected = [endpoint(7, 0, "10.0.0.8:8000"), endpoint(7, 1, "10.0.0.8:8001")];
        assert_eq!(config.at(host).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for text in ["1=10.0.0.8:8000", "18446744073709551615=engine-1.example:80,81", "2=[fd00::1]:8000"] {
            assert_eq!(text.parse::<EndpointConfig>().expect(text).to_string(), text);
        }
        assert_eq!("2=engine-1:80".parse::<EndpointConfig>().expect("a name").literal(), None);
    }

    #[test]
    fn what_is_no_endpoint_is_refused_with_the_reason() {
        for (text, why) in [
            ("10.0.0.8:8000", "there is no ="),
            ("a=10.0.0.8:8000", "the worker's id is not a number"),
            ("1=10.0.0.8", "there is no port"),
            ("1=10.0.0.8:", "a port is not a number from 1 to 65535"),
            ("1=10.0.0.8:0", "a port is not a number from 1 to 65535"),
            ("1=10.0.0.8:80,", "a port is not a number from 1 to 65535"),
            ("1=10.0.0.8:65536", "a port is not a number from 1 to 65535"),
            ("1=:8000", "there is no host"),
            ("1=fd00::1:8000", "an IPv6 address needs brackets"),
            ("1=[fd00::1:8000", "a bracket is open"),
        ] {
            assert_eq!(text.parse::<EndpointConfig>().expect_err(text).why, why, "{text}");
        }
    }

    #[test]
    fn of_two_endpoints_with_one_worker_or_one_address_the_first_stays() {
        let first = endpoint(1, 0, "10.0.0.8:8000");
        let (table, refused) =
            EndpointTable::of([first, endpoint(1, 0, "10.0.0.9:8000"), endpoint(2, 0, "10.0.0.8:8000")]);
        assert_eq!(refused.len(), 2);
        assert_eq!(table.place(first.worker).map(|place| place.address), Some(first.address));
        assert_eq!(table.worker(&first.address), Some(first.worker));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn one_port_serves_all_ranks_and_several_ports_serve_one_each() {
        let (table, _) = EndpointTable::of([
            endpoint(1, 0, "10.0.0.8:8000"),
            endpoint(2, 0, "10.0.0.9:8000"),
            endpoint(2, 1, "10.0.0.9:8001"),
        ]);
        let place =
            |id, rank| table.place(Worker::new(id, rank)).map(|place| (place.address.to_string(), place.is_shared));
        assert_eq!(place(1, 3), Some(("10.0.0.8:8000".to_owned(), true)));
        assert_eq!(place(2, 1), Some(("10.0.0.9:8001".to_owned(), false)));
        assert_eq!((place(2, 2), place(3, 0)), (None, None));
        let selectors = [Worker::every_rank(WorkerId(1)), Worker::new(2, 0), Worker::new(2, 1)];
        assert_eq!(table.workers(None), selectors);
    }
}
