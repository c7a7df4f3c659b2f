//! The manifests of the picker in `ops/kubernetes`, and their rules as the API server's RBAC authorizer applies them
//! (`plugin/pkg/auth/authorizer/rbac` and `pkg/apis/rbac/v1/evaluation_helpers.go` of Kubernetes 1.33).

use std::path::Path;

use serde::Deserialize as _;
use serde_json::Value;

use super::api::Asked;

/// `PolicyRule`
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Rule {
    pub(crate) api_groups: Vec<String>,
    pub(crate) resources: Vec<String>,
    #[serde(default)]
    pub(crate) resource_names: Vec<String>,
    pub(crate) verbs: Vec<String>,
}

impl Rule {
    /// Whether the rule allows a request. A rule with names allows a list or a watch of that one name only.
    pub(crate) fn allows(&self, asked: &Asked) -> bool {
        let named = asked.query.get("fieldSelector").and_then(|field| field.strip_prefix("metadata.name="));
        self.verbs.iter().any(|verb| verb == asked.verb)
            && self.api_groups.contains(&asked.group)
            && self.resources.contains(&asked.resource)
            && (self.resource_names.is_empty()
                || named.is_some_and(|name| self.resource_names.iter().any(|allowed| allowed == name)))
    }
}

/// The files of the base and of the overlay for an InferencePool.
const FILES: [&str; 6] = [
    "base/account.yaml",
    "base/rights.yaml",
    "base/deployment.yaml",
    "base/service.yaml",
    "base/disruption.yaml",
    "overlays/pool/pool.yaml",
];

/// The documents of a file in `ops/kubernetes`.
pub(crate) fn documents(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ops/kubernetes").join(file);
    let text = std::fs::read_to_string(path).expect("a manifest");
    let documents = serde_norway::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).expect("YAML")).collect()
}

/// The objects of the picker.
pub(crate) fn manifest() -> Vec<Value> {
    FILES.iter().flat_map(|file| documents(file)).collect()
}

/// The only object of a kind.
pub(crate) fn object<'a>(manifest: &'a [Value], kind: &str) -> &'a Value {
    let mut found = manifest.iter().filter(|object| object["kind"] == kind);
    let object = found.next().unwrap_or_else(|| panic!("the manifest has no {kind}"));
    assert!(found.next().is_none(), "the manifest has several of {kind}");
    object
}

/// The rules of the manifest's role.
pub(crate) fn rules() -> Vec<Rule> {
    let manifest = manifest();
    serde_json::from_value(object(&manifest, "Role")["rules"].clone()).expect("rules")
}
