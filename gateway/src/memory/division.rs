//! The division of the budget among the parts: pure.
//!
//! Each part has a row: what it reserves, what it takes at most, and its share of what is left once every part has its
//! reserve. The sum of all bounds never exceeds the budget.

use crate::config::Config;
use crate::limits::{
    CONNECTION_USUAL_BYTES, CONNECTIONS_LEAST, KUBERNETES_BYTES, KUBERNETES_PAGE_BYTES_MAX, PICK_OPEN_BYTES,
    PICKS_OPEN_MAX, PROCESS_BYTES, REPLIES_BYTES_LEAST, REPLIES_BYTES_MAX, REQUEST_USUAL_BYTES, REQUESTS_LEAST,
    STREAM_USUAL_BYTES, STREAMS_LEAST,
};

/// A part of the process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryPart {
    /// Code, threads, engines and their facts.
    Process,
    /// Pods and services of a cluster.
    Kubernetes,
    /// Connections of callers.
    Connections,
    /// Requests under way, with the parts of replies that wait for their callers.
    Requests,
    /// Bodies of requests.
    Bodies,
    /// Replies that are read whole: rendered prompts, prefills, and what engines say about themselves.
    Replies,
    /// Rendered prompts.
    TokenCache,
    /// Picks of other proxies.
    Picks,
    /// Streams of Envoy.
    Streams,
}

const PARTS: usize = 9;

impl MemoryPart {
    pub(crate) const ALL: [Self; PARTS] = [
        Self::Process,
        Self::Kubernetes,
        Self::Connections,
        Self::Requests,
        Self::Bodies,
        Self::Replies,
        Self::TokenCache,
        Self::Picks,
        Self::Streams,
    ];

    /// The name in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Kubernetes => "kubernetes",
            Self::Connections => "connections",
            Self::Requests => "requests",
            Self::Bodies => "bodies",
            Self::Replies => "replies",
            Self::TokenCache => "token_cache",
            Self::Picks => "picks",
            Self::Streams => "streams",
        }
    }
}

/// The numbers of everything that takes memory, as the configuration has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demands {
    /// Whether pods are the engines.
    pub(crate) has_pods: bool,
    pub(crate) connections_max: u64,
    pub(crate) requests_max: u64,
    pub(crate) body_bytes_max: u64,
    pub(crate) bodies_bytes_max: u64,
    pub(crate) token_cache_bytes_max: u64,
    /// Whether there is a pick port.
    pub(crate) has_picks: bool,
    /// The streams of the endpoint picker; `None` = it is the proxy.
    pub(crate) streams_max: Option<u64>,
}

/// What a part may take.
#[derive(Clone, Copy, Debug)]
struct Row {
    part: MemoryPart,
    reserve: u64,
    most: u64,
    share_percent: u64,
}

impl Demands {
    pub(crate) fn of(config: &Config, streams_max: Option<usize>) -> Self {
        let bounds = &config.bounds;
        Self {
            has_pods: config.kubernetes.is_some(),
            connections_max: bounds.connections_max as u64,
            requests_max: if streams_max.is_some() { 0 } else { bounds.requests_max as u64 },
            body_bytes_max: bounds.body_bytes_max as u64,
            bodies_bytes_max: bounds.bodies_bytes_max as u64,
            token_cache_bytes_max: config.tokens.cache_bytes_max,
            has_picks: config.pick.socket.is_some() || config.pick.listen.is_some(),
            streams_max: streams_max.map(|streams| streams as u64),
        }
    }

    fn rows(&self) -> [Row; PARTS] {
        let row = |part, reserve: u64, most: u64, share_percent| Row {
            part,
            reserve,
            most: most.max(reserve),
            share_percent,
        };
        let of = |objects: u64, least: u64, bytes: u64| (objects.min(least) * bytes, objects * bytes);
        let connections = of(self.connections_max, CONNECTIONS_LEAST, CONNECTION_USUAL_BYTES);
        let requests = of(self.requests_max, REQUESTS_LEAST, REQUEST_USUAL_BYTES);
        let picks = if self.has_picks { PICKS_OPEN_MAX as u64 * PICK_OPEN_BYTES } else { 0 };
        let streams = of(self.streams_max.unwrap_or(0), STREAMS_LEAST, STREAM_USUAL_BYTES);
        let pods = if self.has_pods { KUBERNETES_BYTES } else { 0 };
        // One page of a list is read whole.
        let replies = REPLIES_BYTES_LEAST + if self.has_pods { KUBERNETES_PAGE_BYTES_MAX as u64 } else { 0 };
        [
            row(MemoryPart::Process, PROCESS_BYTES, PROCESS_BYTES, 0),
            row(MemoryPart::Kubernetes, pods, pods, 0),
            row(MemoryPart::Connections, connections.0, connections.1, 10),
            row(MemoryPart::Requests, requests.0, requests.1, 15),
            row(MemoryPart::Bodies, self.body_bytes_max, self.bodies_bytes_max, 30),
            row(MemoryPart::Replies, replies, REPLIES_BYTES_MAX, 15),
            row(MemoryPart::TokenCache, 0, self.token_cache_bytes_max, 5),
            row(MemoryPart::Picks, 0, picks, 2),
            row(MemoryPart::Streams, streams.0, streams.1, 20),
        ]
    }

    /// What all parts reserve together, bytes.
    pub(crate) fn reserves(&self) -> u64 {
        self.rows().iter().map(|row| row.reserve).sum()
    }
}

/// The bound of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    bytes_max: u64,
    bounds: [u64; PARTS],
}

impl Division {
    /// Divides a budget.
    ///
    /// # Errors
    /// The reserves exceed it, with their sum and the remedy.
    pub(crate) fn of(bytes_max: u64, demands: &Demands) -> Result<Self, String> {
        let reserves = demands.reserves();
        let Some(left) = bytes_max.checked_sub(reserves) else {
            return Err(format!(
                "a memory budget of {bytes_max} bytes is too small: what must be there takes {reserves} bytes; set \
                 bounds.memory_bytes_max to at least that, or lower bounds.body_bytes_max"
            ));
        };
        let mut bounds = [0; PARTS];
        for row in demands.rows() {
            bounds[row.part as usize] = row.most.min(row.reserve + left / 100 * row.share_percent);
        }
        Ok(Self { bytes_max, bounds })
    }

    /// Without a budget each part has only its own bounds.
    pub(crate) const fn unlimited() -> Self {
        Self::undivided(u64::MAX)
    }

    /// A budget that bounds no part by itself.
    pub(crate) const fn undivided(bytes_max: u64) -> Self {
        Self { bytes_max, bounds: [u64::MAX; PARTS] }
    }

    /// The whole budget, bytes.
    pub(crate) const fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The most that a part may take, bytes.
    pub(crate) const fn bound(&self, part: MemoryPart) -> u64 {
        self.bounds[part as usize]
    }

    /// The same as a number of objects of `bytes` each.
    pub(crate) fn objects(&self, part: MemoryPart, bytes: u64) -> usize {
        match self.bound(part) {
            u64::MAX => usize::MAX,
            bound => usize::try_from(bound / bytes).unwrap_or(usize::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn demands() -> impl Strategy<Value = Demands> {
        let numbers = (1..100_000_u64, 1..100_000_u64, 1024..(2_u64 << 30), 0..(1_u64 << 32));
        (numbers, any::<bool>(), any::<bool>(), proptest::option::of(1..100_000_u64)).prop_map(
            |((connections_max, requests_max, body_bytes_max, more), has_pods, has_picks, streams_max)| Demands {
                has_pods,
                connections_max,
                requests_max,
                body_bytes_max,
                bodies_bytes_max: body_bytes_max + more,
                token_cache_bytes_max: more,
                has_picks,
                streams_max,
            },
        )
    }

    proptest! {
        #[test]
        fn the_bounds_of_all_parts_never_exceed_the_budget(demands in demands(), bytes_max in 0..(1_u64 << 42)) {
            match Division::of(bytes_max, &demands) {
                Ok(division) => {
                    let sum: u64 = MemoryPart::ALL.iter().map(|part| division.bound(*part)).sum();
                    prop_assert!(sum <= bytes_max);
                    prop_assert!(demands.rows().iter().all(|row| division.bound(row.part) >= row.reserve));
                    prop_assert!(division.objects(MemoryPart::Bodies, 1) as u64 >= demands.body_bytes_max, "one fits");
                }
                Err(why) => {
                    prop_assert!(bytes_max < demands.reserves());
                    prop_assert!(why.contains(&demands.reserves().to_string()));
                }
            }
        }
    }
}
