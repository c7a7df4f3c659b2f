//! Engines by their URL, against doubles of their HTTP servers: what is learnt, what hostile replies do, and how
//! requests are sent.

mod double;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use double::{Double, Reply, models, vllm};
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};
use kvrouted_gateway::engines::{
    ClientTls, Dialect, EngineConfig, EngineError, EngineSet, HealthState, LearnError, NamedFacts, RankSource,
    RenderPath, Secret, ServedModel, body_of, expand_addresses, keep_learning,
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn set(urls: &[&str]) -> EngineSet {
    let configs = urls.iter().zip(1..).map(|(url, worker)| EngineConfig::new(worker, *url)).collect();
    EngineSet::of(configs, &ClientTls::default()).expect("good URLs")
}

async fn learnt(urls: &[&str]) -> EngineSet {
    let set = set(urls);
    let failed = set.learn_all(soon()).await;
    assert!(failed.is_empty(), "{failed:?}");
    set
}

fn request(path: &str) -> Request<kvrouted_gateway::engines::BoxBody> {
    Request::post(path).header("host", "gateway").body(body_of(Bytes::from_static(b"{}"))).expect("a request")
}

fn base(name: &str) -> ServedModel {
    ServedModel { base: name.to_owned(), lora: None }
}

#[tokio::test]
async fn a_vllm_server_is_known_by_its_url() {
    let double = Double::start(vllm()).await;
    let set = learnt(&[&double.url]).await;
    let facts = set.get(1).expect("engine 1").facts();
    assert_eq!((facts.dialect, facts.version.as_deref()), (Dialect::Vllm, Some("0.32.0")));
    assert_eq!((facts.block_size, facts.models.len()), (Some(16), 1));
    assert_eq!(facts.models[0].tokens_max, Some(4096));
    let expected = RankSource {
        rank: 0,
        endpoint: Some("tcp://127.0.0.1:5557".into()),
        replay: Some("tcp://127.0.0.1:5558".into()),
        topic: "kv".into(),
    };
    assert_eq!(facts.ranks, [expected]);
    assert!(RenderPath::ALL.into_iter().all(|path| facts.renders.has(path)));
    assert_eq!(facts.problems, Vec::<String>::new());
}

#[tokio::test]
async fn a_sglang_server_is_known_by_its_url() {
    let info = r#"{"version": "0.5.23", "page_size": 64, "kv_events": {"publisher": "zmq", "endpoint_host": "*",
        "endpoint_port_base": 5557, "replay_endpoint_port_base": 5657, "topic": "", "block_size": 64, "dp_size": 2}}"#;
    let double =
        Double::start([("/v1/models", Reply::ok(models("sglang", &["m"], &["a"]))), ("/server_info", Reply::ok(info))])
            .await;
    let set = learnt(&[&double.url]).await;
    let facts = set.get(1).expect("engine 1").facts();
    assert_eq!((facts.dialect, facts.block_size, facts.ranks.len()), (Dialect::Sglang, Some(64), 2));
    assert_eq!(facts.ranks[1].endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
    assert!(facts.renders.is_none());
    assert_eq!(facts.problems, Vec::<String>::new());
    assert_eq!(set.model(Some("a")), Ok(ServedModel { base: "m".into(), lora: Some("a".into()) }));
}

#[tokio::test]
async fn the_owner_of_a_model_may_be_anybody() {
    let own = || ("/v1/models", Reply::ok(models("our company", &["m"], &[])));
    let sglang = Double::start([own(), ("/get_model_info", Reply::ok(r#"{"model_path": "m"}"#))]).await;
    let vllm = Double::start([own(), ("/version", Reply::ok(r#"{"version": "0.32.0"}"#))]).await;
    let neither = Double::start([own()]).await;
    let set = set(&[&sglang.url, &vllm.url, &neither.url]);
    let failed = set.learn_all(soon()).await;
    assert!(matches!(failed.as_slice(), [(3, LearnError::UnknownServer)]), "{failed:?}");
    let dialects: Vec<_> = set.iter().take(2).map(|engine| engine.facts().dialect).collect();
    assert_eq!(dialects, [Dialect::Sglang, Dialect::Vllm]);
}

#[tokio::test]
async fn what_an_older_vllm_does_not_tell_is_named_by_hand() {
    let double = Double::start([
        ("/v1/models", Reply::ok(models("vllm", &["m"], &[]))),
        ("/v1/chat/completions/render", Reply::Json(403, "{}".into())),
    ])
    .await;
    let set = learnt(&[&double.url]).await;
    let facts = set.get(1).expect("engine 1").facts();
    assert_eq!((facts.block_size, facts.ranks.len(), facts.renders.is_none()), (None, 0, true));
    for words in ["name endpoint and replay_endpoint", "name block_size", "--enable-scale-out"] {
        assert_eq!(facts.problems.iter().filter(|problem| problem.contains(words)).count(), 1, "{:?}", facts.problems);
    }
    let rank = RankSource { rank: 0, endpoint: Some("tcp://h:1".into()), replay: None, topic: String::new() };
    let named = NamedFacts { block_size: Some(32), ranks: vec![rank.clone()], bootstrap_port: None };
    let config = EngineConfig { named, ..EngineConfig::new(1, &double.url) };
    let set = EngineSet::of(vec![config], &ClientTls::default()).expect("a good URL");
    assert!(set.learn_all(soon()).await.is_empty());
    let facts = set.get(1).expect("engine 1").facts();
    assert_eq!((facts.block_size, facts.ranks.as_slice()), (Some(32), &[rank][..]));
    assert_eq!(facts.problems.len(), 1, "only the renderer is missing: {:?}", facts.problems);
}

#[tokio::test]
async fn setups_that_lose_the_cache_are_problems() {
    for (path, reply, words) in [
        ("/kv_event_sources", Reply::ok("{}"), "publishes no KV events"),
        ("/kv_event_sources", Reply::ok(r#"{"0": {"publisher": "null"}}"#), "publishes no KV events"),
        ("/kv_event_sources", Reply::ok(r#"{"0": {"endpoint": "tcp://*:1"}}"#), "replay_endpoint"),
        ("/kv_event_sources", Reply::ok(r#"{"0": {"endpoint": 7}}"#), "names no usable endpoint"),
        (
            "/metrics",
            Reply::ok("vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\"} 1"),
            "caching is off",
        ),
        (
            "/metrics",
            Reply::ok("vllm:cache_config_info{block_size=\"1\"} 1\nvllm:cache_config_info{block_size=\"2\"} 1"),
            "different sizes",
        ),
        ("/metrics", Reply::ok("nonsense"), "name block_size"),
        ("/v1/chat/completions/render", Reply::Json(404, "{}".into()), "--enable-scale-out"),
    ] {
        let double = Double::start(vllm()).await;
        double.set(path, reply);
        let set = learnt(&[&double.url]).await;
        let problems = set.get(1).expect("engine 1").facts().problems.clone();
        assert!(matches!(problems.as_slice(), [problem] if problem.contains(words)), "{words}: {problems:?}");
    }
}

#[tokio::test]
async fn a_hostile_server_is_not_an_engine() {
    for (reply, expected) in [
        (Reply::ok("<html>"), "is not JSON"),
        (Reply::ok("[]"), "is not a JSON object"),
        (Reply::ok(r#"{"data": "many"}"#), "has no list"),
        (Reply::ok(r#"{"data": [{"id": 7}]}"#), "lists no model"),
        (Reply::ok(format!("{{\"data\": {}", "[".repeat(200_000))), "is not JSON"),
        (Reply::Redirect("http://127.0.0.1:1/v1/models".into()), "redirect"),
        (Reply::Json(401, "{}".into()), "API key"),
        (Reply::Json(500, "{}".into()), "status 500"),
        (Reply::Json(404, "{}".into()), "status 404"),
        (Reply::Endless, "more than"),
        (Reply::Long(u64::MAX >> 1), "more than"),
        (Reply::Cut, "fails"),
    ] {
        let double = Double::start([("/v1/models", reply.clone())]).await;
        let set = set(&[&double.url]);
        let failed = set.learn_all(soon()).await;
        let [(1, error)] = failed.as_slice() else { panic!("{reply:?}: {failed:?}") };
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert_eq!(set.model(Some("m")).expect_err("nothing is known").status, StatusCode::SERVICE_UNAVAILABLE);
    }
}

#[tokio::test]
async fn a_server_that_hangs_is_left_at_the_deadline() {
    for reply in [Reply::Hang, Reply::Stall("{\"data\": [".into())] {
        let double = Double::start([("/v1/models", reply)]).await;
        let set = set(&[&double.url]);
        let failed = set.learn_all(Instant::now() + Duration::from_millis(200)).await;
        assert!(matches!(failed.as_slice(), [(1, LearnError::TimedOut { path: "/v1/models" })]), "{failed:?}");
        assert!(set.get(1).expect("engine 1").is_usable(Instant::now()), "a slow answer is no failure of the engine");
    }
}

#[tokio::test]
async fn one_bad_reply_does_not_hide_the_others_and_keeps_what_was_known() {
    let double = Double::start(vllm()).await;
    let set = learnt(&[&double.url]).await;
    let engine = set.get(1).expect("engine 1");
    let before = engine.facts();
    for (path, reply) in [("/metrics", Reply::Endless), ("/kv_event_sources", Reply::Cut), ("/version", Reply::Cut)] {
        double.set(path, reply);
    }
    assert!(set.learn_all(soon()).await.is_empty());
    let facts = engine.facts();
    assert_eq!((facts.block_size, &facts.ranks, facts.renders), (Some(16), &before.ranks, before.renders));
    double.set("/v1/models", Reply::ok("nonsense"));
    assert_eq!(set.learn_all(soon()).await.len(), 1);
    assert_eq!(engine.facts(), facts);
}

#[tokio::test]
async fn the_engines_key_is_sent_and_never_shown() {
    let double = Double::start(vllm()).await;
    let config = EngineConfig { api_key: Some(Secret::new("the-key")), ..EngineConfig::new(1, &double.url) };
    let set = EngineSet::of(vec![config], &ClientTls::default()).expect("a good URL");
    assert!(set.learn_all(soon()).await.is_empty());
    let engine = set.get(1).expect("engine 1");
    let mut request = request("/v1/chat/completions?a=b");
    request.headers_mut().insert("authorization", "Bearer callers-key".parse().expect("a header"));
    let reply = engine.send(request, soon()).await.expect("a reply");
    assert_eq!(reply.status(), StatusCode::NOT_FOUND);
    let asked = double.asked("/v1/chat/completions?a=b");
    assert_eq!(asked[0].headers["authorization"], "Bearer the-key");
    assert_eq!(asked[0].headers["host"], format!("127.0.0.1:{}", double.port));
    assert_eq!(double.asked("/v1/models")[0].headers["authorization"], "Bearer the-key");
    assert!(!format!("{engine:?}").contains("the-key"));
    let bad = EngineConfig { api_key: Some(Secret::new("a\nb")), ..EngineConfig::new(1, &double.url) };
    let error = EngineSet::of(vec![bad], &ClientTls::default()).expect_err("no header value");
    assert!(matches!(error, EngineError::BadKey { worker: 1 }));
}

#[tokio::test]
async fn connections_are_kept_and_redirects_are_passed_on() {
    let double = Double::start([("/a", Reply::Redirect("http://127.0.0.1:1/b".into()))]).await;
    let set = set(&[&double.url]);
    let engine = set.get(1).expect("engine 1");
    for _ in 0..5 {
        let reply = engine.send(request("/a"), soon()).await.expect("a reply");
        assert_eq!(reply.status(), StatusCode::TEMPORARY_REDIRECT);
        reply.into_body().collect().await.expect("a body");
    }
    assert_eq!((double.asked("/a").len(), double.connections()), (5, 1));
}

#[tokio::test]
async fn failures_of_sending_say_whether_the_engine_may_have_begun() {
    let double = Double::start([("/hang", Reply::Hang), ("/cut", Reply::Cut)]).await;
    let dead = {
        let gone = Double::start([]).await;
        gone.url.clone()
    };
    let set = set(&[&double.url, &dead]);
    let engine = set.get(1).expect("engine 1");
    let error = engine.send(request("/hang"), Instant::now() + Duration::from_millis(50)).await.expect_err("hangs");
    assert!(matches!(error, EngineError::TimedOut) && !error.is_unsent());
    assert_eq!(error.api_error().status, StatusCode::GATEWAY_TIMEOUT);
    let error = engine.send(request("/cut"), soon()).await.expect_err("is cut");
    assert!(matches!(error, EngineError::Broken { .. }) && !error.is_unsent(), "{error}");
    let engine = set.get(2).expect("engine 2");
    let error = engine.send(request("/a"), soon()).await.expect_err("is dead");
    assert!(error.is_unsent(), "{error}");
    assert_eq!(error.api_error().status, StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn a_failed_engine_backs_off_and_is_probed_once() {
    let double = Double::start([("/a", Reply::ok("{}"))]).await;
    let set = set(&[&double.url]);
    let engine = set.get(1).expect("engine 1");
    let rest = engine.failed(Instant::now(), "a test");
    assert!(!engine.is_usable(Instant::now()));
    assert!(engine.is_usable(Instant::now() + rest));
    tokio::time::sleep(rest).await;
    engine.send(request("/a"), soon()).await.expect("a reply");
    assert!(matches!(engine.health().state(), HealthState::Probing { failures: 1, .. }));
    assert!(!engine.is_usable(Instant::now()), "others wait for the probe");
    engine.succeeded();
    assert!(engine.is_usable(Instant::now()));
}

#[tokio::test]
async fn requests_are_counted_until_they_end() {
    let set = set(&["http://127.0.0.1:1"]);
    let engine = set.get(1).expect("engine 1");
    let first = engine.enter();
    let second = engine.enter();
    assert_eq!(engine.inflight(), 2);
    drop(first);
    drop(second);
    assert_eq!(engine.inflight(), 0);
}

#[tokio::test]
async fn models_are_found_by_every_name() {
    let first = Double::start(vllm()).await;
    first.set("/v1/models", Reply::ok(models("vllm", &["m", "alias"], &["sql"])));
    let second = Double::start(vllm()).await;
    second.set("/v1/models", Reply::ok(models("vllm", &["m"], &[])));
    let set = learnt(&[&first.url, &second.url]).await;
    let sql = ServedModel { base: "m".into(), lora: Some("sql".into()) };
    assert_eq!(set.model(Some("m")), Ok(base("m")));
    assert_eq!(set.model(Some("alias")), Ok(base("m")));
    assert_eq!(set.model(Some("sql")), Ok(sql.clone()));
    assert_eq!(set.model(None), Ok(base("m")));
    assert_eq!(set.model(Some("")), Ok(base("m")));
    let error = set.model(Some("gpt")).expect_err("unknown");
    assert_eq!((error.status, error.code), (StatusCode::NOT_FOUND, "model_not_found"));
    let workers = |model: &ServedModel| set.serving(model).map(|engine| engine.worker()).collect::<Vec<_>>();
    assert_eq!((workers(&base("m")), workers(&sql)), (vec![1, 2], vec![1]));
    assert_eq!(set.block_size(&base("m")), Some(16));
    let merged: serde_json::Value = serde_json::from_str(&set.merged_models_json()).expect("JSON");
    let ids: Vec<_> = merged["data"].as_array().expect("a list").iter().map(|card| card["id"].as_str()).collect();
    assert_eq!(ids, [Some("m"), Some("alias"), Some("sql")]);
    assert_eq!((&merged["data"][2]["parent"], &merged["data"][0]["max_model_len"]), (&"m".into(), &4096.into()));
}

#[tokio::test]
async fn of_several_models_one_must_be_named() {
    let first = Double::start(vllm()).await;
    let second = Double::start(vllm()).await;
    second.set("/v1/models", Reply::ok(models("vllm", &["n"], &[])));
    second.set("/metrics", Reply::ok("vllm:cache_config_info{block_size=\"32\"} 1"));
    let set = learnt(&[&first.url, &second.url]).await;
    assert_eq!(set.model(None).expect_err("two models").code, "model_required");
    assert_eq!((set.block_size(&base("m")), set.block_size(&base("n"))), (Some(16), Some(32)));
}

#[tokio::test]
async fn models_that_come_and_go_are_noticed() {
    let double = Double::start(vllm()).await;
    let set = Arc::new(learnt(&[&double.url]).await);
    let mut changes = set.changes();
    let learner = tokio::spawn(keep_learning(set.clone(), Duration::from_millis(10)));
    assert!(set.model(Some("sql")).is_err());
    double.set("/v1/models", Reply::ok(models("vllm", &["m"], &["sql"])));
    changes.changed().await.expect("a change");
    assert!(set.model(Some("sql")).is_ok());
    double.set("/v1/models", Reply::ok(models("vllm", &["m"], &[])));
    changes.changed().await.expect("a change");
    assert!(set.model(Some("sql")).is_err());
    learner.abort();
}

#[tokio::test]
async fn a_model_made_just_now_is_no_change() {
    let double = Double::start(vllm()).await;
    let set = learnt(&[&double.url]).await;
    let before = set.get(1).expect("engine 1").facts();
    let mut changes = set.changes();
    changes.mark_unchanged();
    let later = models("vllm", &["m"], &[]).replace("\"created\":5", "\"created\":6");
    assert!(later.contains("\"created\":6"));
    double.set("/v1/models", Reply::ok(later));
    assert!(set.learn_all(soon()).await.is_empty());
    assert!(!changes.has_changed().expect("the set is there"));
    assert_eq!(set.get(1).expect("engine 1").facts(), before);
}

#[tokio::test]
async fn an_engine_that_starts_late_is_learnt() {
    let double = Double::start([]).await;
    let set = Arc::new(set(&[&double.url]));
    assert_eq!(set.learn_all(soon()).await.len(), 1);
    assert!(set.get(1).is_some_and(|engine| !engine.has_answered() && engine.facts().models.is_empty()));
    let mut changes = set.changes();
    let learner = tokio::spawn(keep_learning(set.clone(), Duration::from_millis(10)));
    vllm().into_iter().for_each(|(path, reply)| double.set(path, reply));
    changes.changed().await.expect("a change");
    assert_eq!(set.model(None), Ok(base("m")));
    learner.abort();
}

#[tokio::test]
async fn bad_configurations_are_refused() {
    let of = |configs| EngineSet::of(configs, &ClientTls::default());
    let url = "http://127.0.0.1:1";
    let twice = vec![EngineConfig::new(3, url), EngineConfig::new(3, url)];
    assert!(matches!(of(twice), Err(EngineError::SameWorker { worker: 3 })));
    assert!(matches!(of(vec![EngineConfig::new(1, "http://h/v1")]), Err(EngineError::BadUrl { .. })));
    let tls = ClientTls { ca_file: Some("/nonexistent/ca.pem".into()) };
    let secure = || vec![EngineConfig::new(1, "https://127.0.0.1:1")];
    assert!(matches!(EngineSet::of(secure(), &tls), Err(EngineError::BadTls { .. })));
    let empty = tempfile::NamedTempFile::new().expect("a file");
    let tls = ClientTls { ca_file: Some(empty.path().to_owned()) };
    assert!(EngineSet::of(secure(), &tls).expect_err("no certificate").to_string().contains("has no certificate"));
}

#[tokio::test]
async fn certificates_are_checked_against_the_file_and_the_name() {
    let certified = rcgen::generate_simple_self_signed(["engine.test".to_owned()]).expect("a certificate");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), certified.cert.pem()).expect("written");
    let key = rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("a server");
    let double = Double::start_with(vllm(), Some(Arc::new(server).into())).await;
    let tls = ClientTls { ca_file: Some(file.path().to_owned()) };
    let named = |name: &str| EngineConfig { tls_name: Some(name.to_owned()), ..EngineConfig::new(1, &double.url) };
    let set = EngineSet::of(vec![named("engine.test")], &tls).expect("a good configuration");
    assert!(set.learn_all(soon()).await.is_empty());
    set.reload_tls(&tls).expect("the same file");
    assert!(set.learn_all(soon()).await.is_empty());
    let set = EngineSet::of(vec![named("other.test")], &tls).expect("a good configuration");
    let failed = set.learn_all(soon()).await;
    assert!(matches!(failed.as_slice(), [(1, LearnError::Unreachable { .. })]), "{failed:?}");
}

#[tokio::test]
async fn a_name_becomes_several_engines_only_where_asked() {
    let plain = EngineConfig::new(4, "http://localhost:8000");
    assert_eq!(expand_addresses(plain.clone()).await.expect("as it is"), [plain]);
    let found = expand_addresses(EngineConfig::new(4, "dns+http://localhost:8000")).await.expect("addresses");
    assert!(!found.is_empty());
    for (engine, worker) in found.iter().zip(4..) {
        assert_eq!((engine.worker, engine.tls_name.as_deref()), (worker, Some("localhost")));
        assert!(["http://127.0.0.1:8000", "http://[::1]:8000"].contains(&engine.url.as_str()), "{}", engine.url);
    }
    assert!(expand_addresses(EngineConfig::new(4, "dns+http://does-not-exist.invalid:1")).await.is_err());
}

/// An engine with a server for each rank, at one address.
fn of_ranks(servers: &[&Double]) -> EngineSet {
    let rank_ports = servers[1..].iter().map(|server| server.port).collect();
    let config = EngineConfig { rank_ports, ..EngineConfig::new(1, &servers[0].url) };
    EngineSet::of(vec![config], &ClientTls::default()).expect("a good URL")
}

#[tokio::test]
async fn where_each_rank_has_a_server_each_is_asked_where_it_publishes() {
    let sources = |rank: u32, port: u16| {
        Reply::ok(format!(r#"{{"{rank}": {{"publisher": "zmq", "endpoint": "tcp://*:{port}", "topic": ""}}}}"#))
    };
    let servers = [Double::start(vllm()).await, Double::start(vllm()).await, Double::start(vllm()).await];
    // The ranks of the second pod of a group are counted on: 8, 9 and 10.
    servers[0].set("/kv_event_sources", sources(8, 5557));
    servers[1].set("/kv_event_sources", sources(9, 5558));
    servers[2].remove("/kv_event_sources");
    let set = of_ranks(&[&servers[0], &servers[1], &servers[2]]);
    assert!(set.learn_all(soon()).await.is_empty());
    let engine = set.get(1).expect("engine 1");
    let ranks: Vec<_> = engine.facts().ranks.iter().map(|it| (it.rank, it.endpoint.clone())).collect();
    let expected = [(0, Some("tcp://127.0.0.1:5557")), (1, Some("tcp://127.0.0.1:5558")), (2, None)];
    assert_eq!(ranks, expected.map(|(rank, endpoint)| (rank, endpoint.map(str::to_owned))));
    // A request names its rank by the port.
    for (rank, server) in servers.iter().enumerate() {
        let request = Request::get("/v1/anything").header("x-data-parallel-rank", rank);
        let request = request.body(body_of(Bytes::new())).expect("a request");
        engine.send(request, soon()).await.expect("an answer");
        let asked = server.asked("/v1/anything");
        assert!(asked.len() == 1 && !asked[0].headers.contains_key("x-data-parallel-rank"), "rank {rank}: {asked:?}");
    }
    // A server that is away for a moment changes nothing.
    servers[1].set("/kv_event_sources", Reply::Cut);
    set.learn_all(soon()).await;
    assert_eq!(engine.facts().ranks.len(), 3);
    assert_eq!(engine.facts().ranks[1].endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
}
