//! Objects as an API server of Kubernetes 1.33 writes them: with the fields that its controllers fill in, `null` for
//! empty lists, and `managedFields`.
//!
//! Sources: `pkg/controller/endpointslice` and `k8s.io/endpointslice` (slices), `k8s.io/api/core/v1/types.go` and the
//! kubelet's status manager (pods), `api/v1/inferencepool_types.go` of the Gateway API Inference Extension 1.0.

use serde_json::{Value, json};

/// The namespace of all objects.
pub(crate) const NAMESPACE: &str = "serving";

/// How a pod is, and where.
#[derive(Clone, Debug)]
pub(crate) struct PodFacts {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) ip: String,
    pub(crate) is_ready: bool,
    pub(crate) is_terminating: bool,
}

/// A ready pod; its UID has its name in it.
pub(crate) fn ready(name: &str, ip: &str) -> PodFacts {
    let uid = format!("3f0c6f52-4f4e-4d0c-9d5c-{name:0>12}");
    PodFacts { name: name.to_owned(), uid, ip: ip.to_owned(), is_ready: true, is_terminating: false }
}

impl PodFacts {
    pub(crate) fn not_ready(self) -> Self {
        Self { is_ready: false, ..self }
    }

    pub(crate) fn terminating(self) -> Self {
        Self { is_terminating: true, is_ready: false, ..self }
    }

    fn endpoint(&self) -> Value {
        json!({
            "addresses": [self.ip],
            "conditions": {"ready": self.is_ready, "serving": self.is_ready || self.is_terminating,
                "terminating": self.is_terminating},
            "nodeName": "node-1",
            "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": self.name, "uid": self.uid},
            "zone": "zone-a",
        })
    }
}

fn managed(manager: &str, version: &str) -> Value {
    json!([{
        "manager": manager, "operation": "Update", "apiVersion": version, "time": "2026-09-01T10:00:00Z",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {"f:labels": {".": {}, "f:app": {}}}},
    }])
}

/// A slice of a service with TCP ports of these names and numbers.
pub(crate) fn slice(name: &str, service: &str, ports: &[(&str, u16)], pods: &[PodFacts]) -> Value {
    let ports: Vec<Value> =
        ports.iter().map(|(name, port)| json!({"name": name, "port": port, "protocol": "TCP"})).collect();
    let endpoints: Vec<Value> = pods.iter().map(PodFacts::endpoint).collect();
    let family = if pods.iter().any(|pod| pod.ip.contains(':')) { "IPv6" } else { "IPv4" };
    json!({
        "metadata": {
            "name": name, "generateName": format!("{service}-"), "namespace": NAMESPACE,
            "uid": format!("9b6e1f3a-{name}"), "generation": 2, "creationTimestamp": "2026-09-01T10:00:00Z",
            "labels": {
                "app": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": service,
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-09-01T10:00:00Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service,
                "uid": "70b2b2ac-0000-4000-8000-000000000001", "controller": true, "blockOwnerDeletion": true}],
            "managedFields": managed("kube-controller-manager", "discovery.k8s.io/v1"),
        },
        "addressType": family,
        "endpoints": if endpoints.is_empty() { Value::Null } else { endpoints.into() },
        "ports": ports,
    })
}

/// A pod with labels.
pub(crate) fn pod(facts: &PodFacts, labels: &[(&str, &str)]) -> Value {
    let condition = |kind: &str, is_true: bool| {
        let status = if is_true { "True" } else { "False" };
        json!({"type": kind, "status": status, "observedGeneration": 1, "lastProbeTime": null,
            "lastTransitionTime": "2026-09-01T10:00:00Z"})
    };
    let labels: serde_json::Map<String, Value> =
        labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
    let mut metadata = json!({
        "name": facts.name, "generateName": "vllm-7d9c6b7f4d-", "namespace": NAMESPACE, "uid": facts.uid,
        "generation": 1, "creationTimestamp": "2026-09-01T10:00:00Z", "labels": labels,
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-7d9c6b7f4d",
            "uid": "70b2b2ac-0000-4000-8000-000000000002", "controller": true, "blockOwnerDeletion": true}],
        "managedFields": managed("kubelet", "v1"),
    });
    if facts.is_terminating {
        metadata["deletionTimestamp"] = "2026-09-01T11:00:00Z".into();
        metadata["deletionGracePeriodSeconds"] = 30.into();
    }
    json!({
        "metadata": metadata,
        "spec": {
            "containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.11.0",
                "args": ["--model", "demo", "--kv-events-config", "{\"enable_kv_cache_events\": true}"],
                "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
                "resources": {"limits": {"nvidia.com/gpu": "1"}}, "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "File", "imagePullPolicy": "IfNotPresent"}],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
            "nodeName": "node-1", "securityContext": {}, "schedulerName": "default-scheduler",
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                "tolerationSeconds": 300}],
        },
        "status": {
            "phase": if facts.ip.is_empty() { "Pending" } else { "Running" },
            "conditions": [
                condition("PodReadyToStartContainers", true), condition("Initialized", true),
                condition("Ready", facts.is_ready), condition("ContainersReady", facts.is_ready),
                condition("PodScheduled", true),
            ],
            "hostIP": "192.168.0.11", "hostIPs": [{"ip": "192.168.0.11"}],
            "podIP": facts.ip, "podIPs": [{"ip": facts.ip}], "startTime": "2026-09-01T10:00:00Z",
            "qosClass": "Burstable",
        },
    })
}

/// A pool of the pods with a label.
pub(crate) fn pool(name: &str, label: (&str, &str), ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "metadata": {
            "name": name, "namespace": NAMESPACE, "uid": format!("1c9d2b44-{name}"), "generation": 1,
            "creationTimestamp": "2026-09-01T10:00:00Z",
            "managedFields": managed("kubectl-client-side-apply", "inference.networking.k8s.io/v1"),
        },
        "spec": {
            "selector": {"matchLabels": {label.0: label.1}},
            "targetPorts": ports,
            "endpointPickerRef": {"group": "", "kind": "Service", "name": "kvrouted", "port": {"number": 9002},
                "failureMode": "FailClose"},
        },
        "status": {"parents": [{"parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "inference"},
            "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
                "lastTransitionTime": "2026-09-01T10:00:00Z", "observedGeneration": 1}]}]},
    })
}
