//! The objects of the Kubernetes API, as far as they are read: unknown fields are passed over, and absent ones, also
//! those that are written as `null`, are empty.
//!
//! Sources: `k8s.io/api/discovery/v1/types.go` (EndpointSlice), `k8s.io/api/core/v1/types.go` (Pod),
//! `k8s.io/apimachinery/pkg/apis/meta/v1/types.go` (ListMeta, ObjectMeta, Status, WatchEvent) of Kubernetes 1.33, and
//! `api/v1/inferencepool_types.go` of the Gateway API Inference Extension 1.0.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::figures::KubernetesKind;
use crate::limits::KUBERNETES_NAME_BYTES_MAX;

/// An object that can be listed and watched.
pub(super) trait Resource: DeserializeOwned + Send + Sync + 'static {
    /// The kind, whose label is the name in URLs.
    const KIND: KubernetesKind;
    /// The group; empty = the core.
    const GROUP: &'static str;
    /// The version of the group.
    const VERSION: &'static str;

    fn metadata(&self) -> &ObjectMeta;
}

/// `null` is as good as an absent field: Go writes empty slices and maps so.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}

/// `ObjectMeta`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ObjectMeta {
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) namespace: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) uid: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) resource_version: String,
    pub(super) deletion_timestamp: Option<String>,
}

impl ObjectMeta {
    /// Whether names and ids are as long as Kubernetes allows, and free of control characters.
    fn is_usable(&self) -> bool {
        let fits = |text: &String| is_name(text);
        !self.name.is_empty() && [&self.name, &self.namespace, &self.uid].into_iter().all(fits)
    }
}

/// Whether a text can be a name: short, of visible ASCII. Kubernetes' own names are narrower.
pub(super) fn is_name(text: &str) -> bool {
    text.len() <= KUBERNETES_NAME_BYTES_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A page of a list. The items stay text, so that one that cannot be read does not take the others with it.
#[derive(Debug, Deserialize)]
pub(super) struct Page<'a> {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    #[serde(borrow, default)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

/// `ListMeta`
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListMeta {
    #[serde(deserialize_with = "or_default")]
    pub(super) resource_version: String,
    /// Where the next page begins; empty = this is the last one.
    #[serde(rename = "continue", deserialize_with = "or_default")]
    pub(super) next: String,
}

/// `WatchEvent`
#[derive(Debug, Deserialize)]
pub(super) struct WatchEvent<'a> {
    #[serde(rename = "type")]
    pub(super) kind: EventKind,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

/// What an event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventKind {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

/// `Status`, as far as it says why a request failed.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: Option<u16>,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
}

/// Only the metadata of an object of any kind.
#[derive(Debug, Default, Deserialize)]
pub(super) struct OnlyMeta {
    #[serde(default)]
    pub(super) metadata: ObjectMeta,
}

pub(super) fn read_status(body: &[u8]) -> Option<Status> {
    serde_json::from_slice(body).ok()
}

/// An object with usable metadata; `None` = it cannot be read.
pub(super) fn read_object<T: Resource>(raw: &RawValue) -> Option<T> {
    let object: T = serde_json::from_str(raw.get()).ok()?;
    object.metadata().is_usable().then_some(object)
}

/// `EndpointSlice` of `discovery.k8s.io/v1`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct EndpointSlice {
    pub(super) metadata: ObjectMeta,
    /// `IPv4`, `IPv6` or `FQDN`
    #[serde(deserialize_with = "or_default")]
    pub(super) address_type: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) endpoints: Vec<SliceEndpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<SlicePort>,
}

/// `Endpoint`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SliceEndpoint {
    #[serde(deserialize_with = "or_default")]
    pub(super) addresses: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) conditions: SliceConditions,
    pub(super) target_ref: Option<TargetRef>,
}

/// `EndpointConditions`. An absent `ready` means ready, and an absent `terminating` that it is not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct SliceConditions {
    pub(super) ready: Option<bool>,
    pub(super) terminating: Option<bool>,
}

/// `ObjectReference`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct TargetRef {
    #[serde(deserialize_with = "or_default")]
    pub(super) kind: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) namespace: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) uid: String,
}

/// `EndpointPort`. An absent port means all ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct SlicePort {
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    pub(super) port: Option<u16>,
    /// Absent = TCP.
    pub(super) protocol: Option<String>,
}

impl Resource for EndpointSlice {
    const KIND: KubernetesKind = KubernetesKind::EndpointSlices;
    const GROUP: &'static str = "discovery.k8s.io";
    const VERSION: &'static str = "v1";

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }
}

/// `Pod` of `v1`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: ObjectMeta,
    #[serde(deserialize_with = "or_default")]
    pub(super) status: PodStatus,
}

/// `PodStatus`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodStatus {
    #[serde(deserialize_with = "or_default")]
    pub(super) phase: String,
    #[serde(rename = "podIP")]
    pub(super) pod_ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) conditions: Vec<PodCondition>,
}

/// `PodCondition`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodCondition {
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
    /// `True`, `False` or `Unknown`
    #[serde(deserialize_with = "or_default")]
    pub(super) status: String,
}

impl Resource for Pod {
    const KIND: KubernetesKind = KubernetesKind::Pods;
    const GROUP: &'static str = "";
    const VERSION: &'static str = "v1";

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }
}

/// `InferencePool` of `inference.networking.k8s.io/v1`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct InferencePool {
    pub(super) metadata: ObjectMeta,
    #[serde(deserialize_with = "or_default")]
    pub(super) spec: PoolSpec,
}

/// `InferencePoolSpec`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PoolSpec {
    #[serde(deserialize_with = "or_default")]
    pub(super) selector: PoolSelector,
    #[serde(deserialize_with = "or_default")]
    pub(super) target_ports: Vec<PoolPort>,
}

/// `LabelSelector` of that group, which has labels alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PoolSelector {
    #[serde(deserialize_with = "or_default")]
    pub(super) match_labels: BTreeMap<String, String>,
}

/// `Port` of that group
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct PoolPort {
    pub(super) number: u16,
}

impl Resource for InferencePool {
    const KIND: KubernetesKind = KubernetesKind::InferencePools;
    const GROUP: &'static str = "inference.networking.k8s.io";
    const VERSION: &'static str = "v1";

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn null_is_as_good_as_absent() {
        // The object of a bookmark, as the API server of 1.33 writes it.
        let text = r#"{"type":"BOOKMARK","object":{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":
            {"resourceVersion":"12746","creationTimestamp":null},"addressType":"","endpoints":null,"ports":null}}"#;
        let event: WatchEvent<'_> = serde_json::from_str(text).expect("an event");
        assert_eq!(event.kind, EventKind::Bookmark);
        let slice: EndpointSlice = serde_json::from_str(event.object.get()).expect("a slice");
        assert_eq!((slice.metadata.resource_version.as_str(), slice.endpoints.len()), ("12746", 0));
        let page: Page<'_> =
            serde_json::from_str(r#"{"metadata":{"resourceVersion":"7"},"items":null}"#).expect("a page");
        assert!(page.items.is_none() && page.metadata.next.is_empty());
    }

    #[test]
    fn an_object_without_a_usable_name_is_none() {
        let long = format!(r#"{{"metadata":{{"name":"{}"}}}}"#, "a".repeat(KUBERNETES_NAME_BYTES_MAX + 1));
        for text in ["{}", "[]", "7", r#"{"metadata":{"name":"a b"}}"#, r#"{"metadata":{"name":"a\u0000"}}"#, &long] {
            let raw = RawValue::from_string(text.to_owned()).expect("JSON");
            assert_eq!(read_object::<Pod>(&raw), None, "{text}");
        }
        let raw = RawValue::from_string(r#"{"metadata":{"name":"a"},"status":{"conditions":7}}"#.into()).expect("JSON");
        assert_eq!(read_object::<Pod>(&raw), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "\\PC{0,80}", number in any::<i64>()) {
            let _ = (serde_json::from_str::<Page<'_>>(&text).is_ok(), read_status(text.as_bytes()).is_some());
            let object = format!(r#"{{"metadata":{{"name":{text:?}}},"spec":{{"targetPorts":[{{"number":{number}}}]}}}}"#);
            if let Ok(raw) = RawValue::from_string(object) {
                let _ = read_object::<InferencePool>(&raw);
            }
        }
    }
}
