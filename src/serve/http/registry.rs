//! The workers that HTTP clients register, with the fields of Dynamo 1.6.1's selection service. The daemon needs only
//! some of the fields; it returns the others in listings, and forgets them when it ends. Also the spaces that a model
//! and a routing group name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};

use super::prompt::{GROUP_DEFAULT, MODEL_DEFAULT};
use super::reply::Refusal;
use crate::error::{Error, Kind};
use crate::fleet::{FleetTable, PoolRole, Space};
use crate::ids::{Scheme, SpaceId, Window};
use crate::limits::{HTTP_RECORDS_MAX, NOMINAL_BLOCK_SIZE_TOKENS};

/// A worker's lifecycle in replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Lifecycle {
    /// Fields are missing, so that it gets no requests.
    Incomplete,
    /// It may be chosen.
    Schedulable,
    /// It takes no new requests.
    Draining,
    /// It cannot take requests.
    Unschedulable,
}

/// Whether caches must stay within their transfer domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Enforcement {
    Required,
    Preferred,
}

/// The fields of a registration. `None` = not sent.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct WorkerFields {
    #[serde(skip_serializing)]
    pub(super) worker_id: Option<u64>,
    #[serde(skip_serializing)]
    pub(super) model_name: Option<String>,
    #[serde(skip_serializing)]
    pub(super) routing_group: Option<String>,
    pub(super) endpoint: Option<String>,
    pub(super) kv_events_endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kv_events_endpoints: Option<BTreeMap<u32, String>>,
    pub(super) replay_endpoint: Option<String>,
    pub(super) block_size: Option<u32>,
    pub(super) data_parallel_start_rank: Option<u32>,
    pub(super) data_parallel_size: Option<u32>,
    pub(super) max_num_batched_tokens: Option<u64>,
    pub(super) total_kv_blocks: Option<u64>,
    pub(super) stable_routing_id: Option<String>,
    pub(super) is_eagle: Option<bool>,
    pub(super) taints: Option<BTreeSet<String>>,
    pub(super) topology_domains: Option<BTreeMap<String, String>>,
    pub(super) kv_transfer_domain: Option<String>,
    pub(super) kv_transfer_enforcement: Option<Enforcement>,
    pub(super) kv_transfer_preferred_weight: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) router_hint_worker_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) router_hint_source_control_endpoints: Option<BTreeMap<u32, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kv_event_source_mode: Option<String>,
}

/// Replaces the fields that a patch has.
macro_rules! take {
    ($from:ident into $into:ident: $($field:ident),* $(,)?) => {
        $(if $from.$field.is_some() { $into.$field = $from.$field; })*
    };
}

/// A worker that an HTTP client registered.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RegisteredWorker {
    pub(super) worker_id: u64,
    pub(super) model_name: String,
    pub(super) routing_group: String,
    pub(super) lifecycle: Lifecycle,
    #[serde(flatten)]
    pub(super) fields: WorkerFields,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) not_schedulable_reasons: Vec<String>,
}

impl RegisteredWorker {
    /// A worker with these fields that is not in the fleet yet.
    pub(super) fn new(worker_id: u64, mut fields: WorkerFields) -> Self {
        fields.taints.get_or_insert_default();
        fields.topology_domains.get_or_insert_default();
        Self {
            worker_id,
            model_name: fields.model_name.take().unwrap_or_else(|| MODEL_DEFAULT.to_owned()),
            routing_group: fields.routing_group.take().unwrap_or_else(|| GROUP_DEFAULT.to_owned()),
            lifecycle: Lifecycle::Incomplete,
            fields,
            not_schedulable_reasons: Vec::new(),
        }
    }

    /// The worker with the fields of a patch. A patch cannot remove a field.
    pub(super) fn patched(mut self, patch: WorkerFields) -> Self {
        let fields = &mut self.fields;
        take!(patch into fields: endpoint, kv_events_endpoint, kv_events_endpoints, replay_endpoint, block_size,
            data_parallel_start_rank, data_parallel_size, max_num_batched_tokens, total_kv_blocks, stable_routing_id,
            is_eagle, taints, topology_domains, kv_transfer_domain, kv_transfer_enforcement,
            kv_transfer_preferred_weight, router_hint_worker_type, router_hint_source_control_endpoints,
            kv_event_source_mode);
        self
    }

    /// Its size as JSON: its memory but for the overhead of lists and names.
    pub(super) fn bytes(&self) -> usize {
        // A worker that cannot be written as JSON cannot be listed, and is refused as too large.
        serde_json::to_vec(self).map_or(usize::MAX, |json| json.len())
    }

    /// Its first rank and the number of its ranks.
    pub(super) fn ranks(&self) -> (u32, u32) {
        (self.fields.data_parallel_start_rank.unwrap_or(0), self.fields.data_parallel_size.unwrap_or(1))
    }

    /// The events endpoint of a rank.
    pub(super) fn events_of(&self, rank: u32) -> Option<&str> {
        let endpoint = match &self.fields.kv_events_endpoints {
            Some(endpoints) if !endpoints.is_empty() => endpoints.get(&rank).map(String::as_str),
            _ if self.ranks().1 == 1 => self.fields.kv_events_endpoint.as_deref(),
            _ => None,
        };
        endpoint.filter(|endpoint| !endpoint.is_empty())
    }

    /// The fields that are missing before it can be chosen in any space. `needs_events` = it must publish events.
    pub(super) fn missing(&self, needs_events: bool) -> Vec<String> {
        let (start, size) = self.ranks();
        let mut missing = Vec::new();
        if self.fields.endpoint.as_deref().is_none_or(str::is_empty) {
            missing.push("endpoint is required".to_owned());
        }
        if self.fields.block_size.is_none_or(|block_size| block_size == 0) {
            missing.push("block_size must be greater than 0".to_owned());
        }
        if size == 0 {
            missing.push("data_parallel_size must be greater than 0".to_owned());
        }
        if needs_events {
            let silent = (start..start.saturating_add(size)).filter(|rank| self.events_of(*rank).is_none());
            missing.extend(silent.map(|rank| format!("kv_events endpoint is required for dp_rank {rank}")));
        }
        if size > 1 && self.fields.replay_endpoint.is_some() {
            missing.push("replay_endpoint is supported only for data_parallel_size 1".to_owned());
        }
        missing
    }

    /// A rank's fields of a `[[worker]]`, as in a request to add it.
    pub(super) fn worker_fields(&self, rank: u32, (namespace, role): (&str, &str)) -> Vec<(String, String)> {
        let fields = &self.fields;
        let taints =
            fields.taints.as_ref().map(|taints| taints.iter().map(String::as_str).collect::<Vec<_>>().join("+"));
        let events = self.events_of(rank).map(str::to_owned);
        let said = [
            ("id", Some(self.worker_id.to_string())),
            ("dp_rank", Some(rank.to_string())),
            ("model", Some(self.model_name.clone())),
            ("namespace", Some(namespace.to_owned())),
            ("role", Some(role.to_owned())),
            ("replay", fields.replay_endpoint.clone().filter(|_| events.is_some())),
            ("endpoint", events),
            ("capacity_blocks", fields.total_kv_blocks.map(|blocks| blocks.to_string())),
            ("batched_tokens_max", fields.max_num_batched_tokens.map(|tokens| tokens.to_string())),
            ("taints", taints.filter(|taints| !taints.is_empty())),
        ];
        said.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

/// All workers that HTTP clients registered.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_worker: BTreeMap<u64, RegisteredWorker>,
    /// Tokens per block that a space's workers were first registered with. Used until the space's scheme is known.
    block_sizes: HashMap<SpaceId, u32>,
}

impl Registry {
    pub(super) fn get(&self, worker_id: u64) -> Option<&RegisteredWorker> {
        self.by_worker.get(&worker_id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &RegisteredWorker> {
        self.by_worker.values()
    }

    /// Whether another worker fits.
    pub(super) fn has_room(&self, worker_id: u64) -> bool {
        self.by_worker.len() < HTTP_RECORDS_MAX || self.by_worker.contains_key(&worker_id)
    }

    pub(super) fn put(&mut self, record: RegisteredWorker) {
        self.by_worker.insert(record.worker_id, record);
    }

    pub(super) fn remove(&mut self, worker_id: u64) -> Option<RegisteredWorker> {
        self.by_worker.remove(&worker_id)
    }

    /// The endpoint at which a worker takes requests.
    pub(super) fn endpoint_of(&self, worker_id: u64) -> Option<String> {
        self.get(worker_id)?.fields.endpoint.clone()
    }

    /// Tokens per block that the workers of a space were registered with.
    pub(super) fn block_size_of(&self, space: SpaceId) -> Option<u32> {
        self.block_sizes.get(&space).copied()
    }

    /// Forgets the block sizes of spaces that are not served.
    pub(super) fn keep_block_sizes(&mut self, is_served: impl Fn(SpaceId) -> bool) {
        self.block_sizes.retain(|space, _| is_served(*space));
    }

    pub(super) fn set_block_size(&mut self, space: SpaceId, block_size: u32) {
        self.block_sizes.insert(space, block_size);
    }
}

/// The routing group of a space. The empty namespace is called `default`.
pub(super) fn group_of(space: &Space) -> &str {
    if space.namespace.is_empty() { GROUP_DEFAULT } else { &space.namespace }
}

/// The space of a model and a routing group. Of several pools, the one with role `both`, else the one that decodes.
fn find_space<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Option<&'a Space> {
    let rank = |space: &&Space| match space.role {
        PoolRole::Both => 0,
        PoolRole::Decode => 1,
        PoolRole::Prefill => 2,
    };
    fleet.spaces.iter().filter(|space| space.model == model && group_of(space) == group).min_by_key(rank)
}

/// The space of a model and a routing group.
pub(super) fn space_named<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Result<&'a Space, Error> {
    find_space(fleet, model, group).ok_or_else(|| {
        let message = format!("there is no space for model={model} routing_group={group}");
        let remedy = "add a [[space]] with that model and the group as its namespace to the configuration, and restart";
        Error::new(Kind::UnknownSpace, message, remedy)
    })
}

/// The space for a selection. Without a space no worker is available, so the status is 503, as in Dynamo. There it may be
/// retried, because a worker's registration makes the space; here the configuration has to, which the error's kind says.
pub(super) fn space_to_select<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Result<&'a Space, Refusal> {
    space_named(fleet, model, group).map_err(|error| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error))
}

/// A space's scheme. While it is unknown, that of its registered workers.
pub(super) fn scheme_of(space: &Space, registered: Option<u32>) -> Scheme {
    let block_size = registered.unwrap_or(NOMINAL_BLOCK_SIZE_TOKENS);
    space.scheme.get().unwrap_or(Scheme { block_size, window: Window::Plain })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(json: &serde_json::Value) -> RegisteredWorker {
        let mut fields: WorkerFields = serde_json::from_str(&json.to_string()).unwrap();
        RegisteredWorker::new(fields.worker_id.take().unwrap_or_default(), fields)
    }

    #[test]
    fn missing_fields_are_listed_rank_by_rank() {
        let nothing = record(&serde_json::json!({"worker_id": 1}));
        assert_eq!((nothing.model_name.as_str(), nothing.routing_group.as_str()), ("default", "default"));
        let rank = |rank: u32| format!("kv_events endpoint is required for dp_rank {rank}");
        let general = ["endpoint is required".to_owned(), "block_size must be greater than 0".to_owned()];
        assert_eq!(nothing.missing(true), [general.as_slice(), &[rank(0)]].concat());
        let ranks = record(&serde_json::json!({
            "worker_id": 2, "endpoint": "http://h:1", "block_size": 16, "data_parallel_start_rank": 1, "data_parallel_size": 3,
            "kv_events_endpoint": "tcp://h:9", "kv_events_endpoints": {"1": "tcp://h:1", "3": "tcp://h:3"}
        }));
        assert_eq!(ranks.missing(true), [rank(2)]);
        assert_eq!(ranks.missing(false), Vec::<String>::new());
        assert_eq!([1, 2, 3].map(|rank| ranks.events_of(rank)), [Some("tcp://h:1"), None, Some("tcp://h:3")]);
    }

    #[test]
    fn a_patch_replaces_fields_and_removes_none() {
        let one =
            record(&serde_json::json!({"worker_id": 1, "endpoint": "http://h:1", "taints": ["a"], "block_size": 16}));
        let patch =
            serde_json::from_str(r#"{"endpoint": null, "taints": ["b", "c"], "worker_id": 9, "model_name": "x"}"#);
        let patched = one.patched(patch.unwrap());
        let fields = patched.worker_fields(0, ("", "both"));
        let of = |name: &str| fields.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str());
        assert_eq!(
            (of("id"), of("model"), of("taints"), of("endpoint")),
            (Some("1"), Some("default"), Some("b+c"), None)
        );
        assert_eq!(patched.fields.endpoint.as_deref(), Some("http://h:1"));
    }

    #[test]
    fn a_registered_worker_has_the_fields_of_dynamos_reply() {
        let listed = serde_json::to_value(record(&serde_json::json!({"worker_id": 7, "endpoint": "e"}))).unwrap();
        let names: Vec<_> = listed.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = [
            "block_size",
            "data_parallel_size",
            "data_parallel_start_rank",
            "endpoint",
            "is_eagle",
            "kv_events_endpoint",
            "kv_transfer_domain",
            "kv_transfer_enforcement",
            "kv_transfer_preferred_weight",
            "lifecycle",
            "max_num_batched_tokens",
            "model_name",
            "replay_endpoint",
            "routing_group",
            "stable_routing_id",
            "taints",
            "topology_domains",
            "total_kv_blocks",
            "worker_id",
        ];
        assert_eq!(names, expected);
        assert_eq!((&listed["lifecycle"], &listed["block_size"]), (&"incomplete".into(), &serde_json::Value::Null));
    }
}
