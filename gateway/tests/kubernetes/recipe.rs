//! The manifests of the picker in `ops/kubernetes` have what it needs, and no more.

use std::collections::BTreeSet;

use clap::Parser as _;
use kvrouted_gateway::serve::{Cli, Command};

use super::rbac::{documents, manifest, object, rules};
use super::*;

#[tokio::test]
async fn the_manifests_rules_cover_every_request_and_no_other() {
    let api = Api::start().await;
    api.set_rules(rules());
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    api.put("pods", pod(&ready("1", "10.0.0.1"), &[("app", "vllm-llama")]));
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000]));
    for source in [service(), llama()] {
        let watch = FleetWatch::start(access(&api), source);
        let fleet = until_fleet(&watch, "the pod", is(&[("1", READY)])).await;
        assert!(fleet.problems.is_empty(), "{:?}", fleet.problems);
        kit::until("all is watched", async || {
            KubernetesKind::ALL.iter().all(|kind| {
                let counts = watch.figures().of(*kind);
                counts.get(KubernetesFigure::Listed) == counts.get(KubernetesFigure::Watched)
            })
        })
        .await;
    }
    let asked = api.all_asked();
    let used: BTreeSet<_> =
        asked.iter().map(|it| (it.group.clone(), it.resource.clone(), it.verb.to_owned())).collect();
    let granted: BTreeSet<_> = rules()
        .iter()
        .flat_map(|rule| {
            let verbs =
                rule.verbs.iter().map(|verb| (rule.api_groups[0].clone(), rule.resources[0].clone(), verb.clone()));
            verbs.collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(used, granted);
}

#[test]
fn the_manifest_fits_together_and_its_command_line_is_one() {
    let manifest = manifest();
    assert_eq!(documents("overlays/pool/kustomization.yaml")[0]["namespace"], NAMESPACE);
    assert!(manifest.iter().all(|object| object["metadata"]["namespace"].is_null()), "the overlay names it for all");
    let deployment = &object(&manifest, "Deployment")["spec"]["template"];
    let container = &deployment["spec"]["containers"][0];
    let words = |field: &str| -> Vec<String> { serde_json::from_value(container[field].clone()).expect("words") };
    let line = [words("command"), words("args")].concat();
    let Some(Command::Epp(args)) = Cli::try_parse_from(&line).expect("a command line").command else {
        panic!("{line:?} is not the picker's")
    };
    let pool = object(&manifest, "InferencePool");
    assert_eq!(args.flags().kubernetes.pool.as_deref(), pool["metadata"]["name"].as_str());
    let account = object(&manifest, "ServiceAccount");
    assert_eq!(deployment["spec"]["serviceAccountName"], account["metadata"]["name"]);
    let binding = object(&manifest, "RoleBinding");
    assert_eq!(binding["subjects"][0]["name"], account["metadata"]["name"]);
    assert_eq!(binding["roleRef"]["name"], object(&manifest, "Role")["metadata"]["name"]);
    let service = object(&manifest, "Service");
    assert_eq!(service["spec"]["selector"], deployment["metadata"]["labels"]);
    let picker = &pool["spec"]["endpointPickerRef"];
    assert_eq!(picker["name"], service["metadata"]["name"]);
    let port = &picker["port"]["number"];
    assert_eq!((port, port), (&service["spec"]["ports"][0]["port"], &container["ports"][0]["containerPort"]));
    let grace = deployment["spec"]["terminationGracePeriodSeconds"].as_u64().expect("seconds");
    assert!(grace * 1000 > args.picker.drain_ms, "Kubernetes would kill the picker while answers are under way");
}
