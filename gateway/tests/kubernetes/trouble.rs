//! An API server that is away, refuses, is slow, or is none.

use super::api::Fault;
use super::*;

fn has_problem(words: &'static str) -> impl Fn(&Fleet) -> bool {
    move |fleet| fleet.problems.iter().any(|problem| problem.what.contains(words) || problem.remedy.contains(words))
}

fn is_well(fleet: &Fleet) -> bool {
    fleet.is_known && fleet.is_current && fleet.problems.is_empty()
}

#[tokio::test]
async fn while_the_server_is_away_the_pods_stay_and_then_what_changed_is_heard() {
    let mut api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "one pod", is(&[("1", READY)])).await;
    until_watched(&api, "endpointslices").await;
    api.stop().await;
    let fleet = until_fleet(&watch, "it is away", |fleet| !fleet.is_current).await;
    assert!(is(&[("1", READY)])(&fleet), "the pods stay: {fleet:?}");
    let problem = &fleet.problems[0];
    assert!(problem.what.contains("watch endpointslices") && problem.remedy.contains("stays in use"), "{problem:?}");
    put_slice(&api, &[ready("2", "10.0.0.2")]);
    api.start_again().await;
    until_fleet(&watch, "it is back", |fleet| is(&[("2", READY)])(fleet) && is_well(fleet)).await;
    assert_eq!(api.asked("list", "endpointslices").len(), 1);
}

#[tokio::test]
async fn the_first_list_is_waited_for() {
    let mut api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    api.stop().await;
    let watch = FleetWatch::start(access(&api), service());
    let fleet = until_fleet(&watch, "it is away", |fleet| !fleet.problems.is_empty()).await;
    assert!(!fleet.is_known && fleet.pods.is_empty(), "nothing is known, which is not the same as no pod");
    api.start_again().await;
    until_fleet(&watch, "it is there", |fleet| is(&[("1", READY)])(fleet) && is_well(fleet)).await;
}

#[tokio::test]
async fn a_missing_right_is_named_with_verb_and_resource() {
    let api = Api::start().await;
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000]));
    api.put("pods", pod(&ready("1", "10.0.0.1"), &[("app", "vllm-llama")]));
    api.set_rules(Vec::new());
    let watch = FleetWatch::start(access(&api), llama());
    let grant = "grant the verb \"list\" on the resource \"inferencepools\" of the API group \
                 \"inference.networking.k8s.io\" in the namespace \"serving\"";
    let fleet = until_fleet(&watch, "no right at all", has_problem(grant)).await;
    assert!(fleet.problems[0].what.contains("is forbidden: User"), "the server's own words: {:?}", fleet.problems);
    let rule = |resource: &str, group: &str, verbs: &[&str]| rbac::Rule {
        api_groups: vec![group.to_owned()],
        resources: vec![resource.to_owned()],
        resource_names: Vec::new(),
        verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
    };
    let pools = rule("inferencepools", "inference.networking.k8s.io", &["list", "watch"]);
    api.set_rules(vec![pools.clone()]);
    let grant = r#"grant the verb "list" on the resource "pods" of the API group "" in the namespace "serving""#;
    until_fleet(&watch, "no right to pods", has_problem(grant)).await;
    // Without the right to watch, changes are heard of by lists.
    api.set_rules(vec![pools.clone(), rule("pods", "", &["list"])]);
    let grant = r#"grant the verb "watch" on the resource "pods""#;
    until_fleet(&watch, "no right to watch", |fleet| is(&[("1", READY)])(fleet) && has_problem(grant)(fleet)).await;
    api.put("pods", pod(&ready("2", "10.0.0.2"), &[("app", "vllm-llama")]));
    until_fleet(&watch, "a list", is(&[("1", READY), ("2", READY)])).await;
    assert!(watch.figures().of(KubernetesKind::Pods).get(KubernetesFigure::Refused) >= 2);
    api.set_rules(vec![pools, rule("pods", "", &["list", "watch"])]);
    until_fleet(&watch, "all rights", is_well).await;
}

#[tokio::test]
async fn a_cluster_without_the_pools_api_is_told() {
    let api = Api::start().await;
    let missing = Fault::Reply(404, "text/plain; charset=utf-8", "404 page not found\n".to_owned());
    api.fault("list", "inferencepools", missing);
    let watch = FleetWatch::start(access(&api), llama());
    until_fleet(&watch, "no such API", has_problem("install that API, or name a service")).await;
}

#[tokio::test]
async fn tls_and_a_token_that_rotates() {
    let certified = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let api = Api::start_tls(&certified).await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    api.require_token("first");
    let folder = tempfile::tempdir().expect("a folder");
    let (token, ca) = (folder.path().join("token"), folder.path().join("ca.crt"));
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    std::fs::write(&ca, other.cert.pem()).expect("written");
    let access = ApiAccess { url: api.url.clone(), token_file: Some(token.clone()), ca_file: Some(ca.clone()) };
    let watch = FleetWatch::start(access, service());
    until_fleet(&watch, "there is no token", has_problem("token file")).await;
    std::fs::write(&token, "first\n").expect("written");
    until_fleet(&watch, "another authority", has_problem("certificate")).await;
    assert!(api.all_asked().is_empty(), "nothing was said to a server that is not trusted");
    std::fs::write(&ca, certified.cert.pem()).expect("written");
    until_fleet(&watch, "the right authority", |fleet| is(&[("1", READY)])(fleet) && is_well(fleet)).await;
    until_watched(&api, "endpointslices").await;
    // The server takes only the next token; the kubelet has not written it yet.
    api.require_token("second");
    api.end_watches();
    let fleet = until_fleet(&watch, "the old token", has_problem("does not accept the token (401)")).await;
    assert!(is(&[("1", READY)])(&fleet), "the pods stay");
    std::fs::write(&token, "second\n").expect("written");
    put_slice(&api, &[ready("2", "10.0.0.2")]);
    until_fleet(&watch, "the new token", |fleet| is(&[("2", READY)])(fleet) && is_well(fleet)).await;
}

#[tokio::test]
async fn an_answer_that_no_api_server_gives_changes_nothing() {
    let api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "one pod", is(&[("1", READY)])).await;
    let json = "application/json";
    let lists = [
        Fault::Reply(200, "text/html", "<html>Please log in</html>".to_owned()),
        Fault::Reply(200, json, "{}".to_owned()),
        Fault::Reply(200, json, "[]".to_owned()),
        Fault::Reply(200, json, r#"{"metadata": {"resourceVersion": ""}, "items": []}"#.to_owned()),
        Fault::Reply(200, json, r#"{"metadata": {"resourceVersion": 7}, "items": []}"#.to_owned()),
        Fault::Reply(200, json, "{\"metadata\": {\"resourceVersion\": \"7\"}, \"items\": [".to_owned()),
        Fault::Reply(302, "text/html", String::new()),
        Fault::Reply(204, "text/html", String::new()),
        Fault::Reply(500, json, "not JSON".to_owned()),
        Fault::Reply(503, json, r#"{"kind": "Status", "message": "etcd\u0007 is away", "code": 503}"#.to_owned()),
    ];
    let watches = [
        Fault::Reply(200, json, "[]\n".to_owned()),
        Fault::Reply(200, json, "{\"type\": \"ADDED\"}\n".to_owned()),
        Fault::Reply(200, json, "{\"type\": \"ADDED\", \"object\": 7}\n".to_owned()),
        Fault::Reply(200, json, "{\"type\": \"STOLEN\", \"object\": {}}\n".to_owned()),
        Fault::Reply(200, json, "\u{0}\u{0}\n".to_owned()),
    ];
    // Each wrong list comes after a wrong watch, which asks for a list.
    for (place, list) in lists.into_iter().enumerate() {
        let watch_fault = watches[place % watches.len()].clone();
        until_watched(&api, "endpointslices").await;
        let figures = watch.figures().of(KubernetesKind::EndpointSlices);
        // An event makes the pauses short again.
        let events = figures.get(KubernetesFigure::Event);
        api.bookmark("endpointslices");
        kit::until("a bookmark", async || figures.get(KubernetesFigure::Event) > events).await;
        let failed = figures.get(KubernetesFigure::Failed);
        let asked = api.asked("list", "endpointslices").len();
        api.fault("watch", "endpointslices", watch_fault.clone());
        api.fault("list", "endpointslices", list.clone());
        api.end_watches();
        kit::until("another good list", async || {
            api.asked("list", "endpointslices").len() >= asked + 2 && api.open_watches("endpointslices") == 1
        })
        .await;
        assert!(figures.get(KubernetesFigure::Failed) >= failed + 2, "{watch_fault:?}, {list:?}");
        let fleet = until_fleet(&watch, "it is well again", is_well).await;
        assert!(is(&[("1", READY)])(&fleet), "{watch_fault:?}, {list:?}: {fleet:?}");
    }
}

#[tokio::test]
async fn a_list_and_an_event_without_an_end_are_cut_off() {
    let api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    // Pages that always name another one.
    let page = r#"{"metadata": {"resourceVersion": "7", "continue": "again"}, "items": []}"#;
    let endless = || Fault::Reply(200, "application/json", page.to_owned());
    for _ in 0..20_000 {
        api.fault("list", "endpointslices", endless());
    }
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "the list has no end", has_problem("the list has more than")).await;
    // The rest of the pages is of no use: a service of another API server.
    let api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "one pod", is(&[("1", READY)])).await;
    until_watched(&api, "endpointslices").await;
    // The watch is begun again once the event is too long, so that the rest of it goes nowhere.
    let piece = "a".repeat(1 << 20);
    for _ in 0..6 {
        api.send("endpointslices", &piece);
    }
    until_fleet(&watch, "the event has no end", has_problem("an event has more than")).await;
    put_slice(&api, &[ready("2", "10.0.0.2")]);
    until_fleet(&watch, "it is well again", |fleet| is(&[("2", READY)])(fleet) && is_well(fleet)).await;
}

#[tokio::test]
async fn a_watch_may_come_in_pieces() {
    let api = Api::start().await;
    put_slice(&api, &[]);
    let mut object = slice("vllm-x7k2p", "vllm", &[("http", 8000)], &[ready("1", "10.0.0.1")]);
    object["metadata"]["resourceVersion"] = "2".into();
    let event = format!("{}\n", serde_json::json!({"type": "MODIFIED", "object": object}));
    let pieces = event.as_bytes().chunks(97).map(|piece| String::from_utf8_lossy(piece).into_owned()).collect();
    api.fault("watch", "endpointslices", Fault::Pieces(pieces));
    let watch = FleetWatch::start(access(&api), service());
    until_fleet(&watch, "the whole event", is(&[("1", READY)])).await;
}

#[tokio::test]
async fn an_object_that_cannot_be_read_does_not_take_the_others_with_it() {
    let api = Api::start().await;
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let mut broken = slice("broken", "vllm", &[("http", 8000)], &[ready("2", "10.0.0.2")]);
    broken["endpoints"][0]["addresses"] = 7.into();
    api.put("endpointslices", broken);
    let watch = FleetWatch::start(access(&api), service());
    let is_told = |fleet: &Fleet| is(&[("1", READY)])(fleet) && has_problem("cannot be read and are left out")(fleet);
    until_fleet(&watch, "the readable one", is_told).await;
    let mut foreign = slice("foreign", "vllm", &[("http", 8000)], &[ready("3", "10.0.0.3")]);
    foreign["endpoints"][0]["addresses"] = serde_json::json!(["0.0.0.0"]);
    api.put("endpointslices", foreign);
    until_fleet(&watch, "an address that nobody has", has_problem("without a usable address")).await;
    let mut names = slice("names", "vllm", &[("http", 8000)], &[ready("4", "10.0.0.4")]);
    names["addressType"] = "FQDN".into();
    api.put("endpointslices", names);
    until_fleet(&watch, "names", has_problem("has names in place of addresses")).await;
    for name in ["broken", "foreign", "names"] {
        api.delete("endpointslices", name);
    }
    until_fleet(&watch, "only the good one", |fleet| is(&[("1", READY)])(fleet) && is_well(fleet)).await;
}

#[tokio::test]
async fn a_pool_that_would_select_everything_selects_nothing() {
    let api = Api::start().await;
    api.put("pods", pod(&ready("1", "10.0.0.1"), &[("app", "vllm-llama")]));
    let mut everything = pool("llama", ("app", "vllm-llama"), &[8000]);
    everything["spec"]["selector"]["matchLabels"] = serde_json::json!({});
    api.put("inferencepools", everything);
    let watch = FleetWatch::start(access(&api), llama());
    let fleet = until_fleet(&watch, "no label", has_problem("selects pods by no label")).await;
    assert!(fleet.pods.is_empty() && api.asked("list", "pods").is_empty());
    api.put("inferencepools", pool("llama", ("app", "a,b=c&watch=true"), &[8000]));
    until_fleet(&watch, "a label that is none", has_problem("a label that no pod can have")).await;
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[]));
    until_fleet(&watch, "no port", has_problem("has no port")).await;
    api.put("inferencepools", pool("llama", ("app", "vllm-llama"), &[8000]));
    until_fleet(&watch, "a good pool", |fleet| is(&[("1", READY)])(fleet) && is_well(fleet)).await;
}

#[tokio::test]
async fn a_server_that_hangs_keeps_nothing_else_waiting() {
    let api = Api::start().await;
    api.fault("list", "endpointslices", Fault::Hang);
    put_slice(&api, &[ready("1", "10.0.0.1")]);
    let watch = FleetWatch::start(access(&api), service());
    assert!(!watch.known(Instant::now() + player::STILLNESS).await);
    // A watch that nobody needs any more ends, also while it waits.
    drop(watch);
    let other = FleetWatch::start(access(&api), service());
    until_fleet(&other, "another one", is(&[("1", READY)])).await;
}
