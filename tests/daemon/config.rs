//! The configuration file: the meaning of good ones. For a bad one every problem is listed at once, with its line, its
//! field and the name that was probably meant.

use kvrouted::config::{self, Config, Environment, Flags, IoSetting, Location, LogFormat, Problems, Salts, Setting};
use kvrouted::fleet::{DeviceClass, PoolRole, WorkerState};
use kvrouted::ids::{Scheme, SpaceId, Window, Worker};
use kvrouted::limits;
use kvrouted::route::{BusyThresholds, Mode, Policy};
use kvrouted::trust::TrustLevel;

fn good(text: &str) -> Config {
    config::parse("test.toml", text, &Flags::default()).unwrap_or_else(|problems| panic!("{problems}"))
}

fn bad(text: &str) -> Problems {
    config::parse("test.toml", text, &Flags::default()).expect_err("the file is bad")
}

/// Every problem as (line, field, a word of the message, suggestion); there must be no other.
#[track_caller]
fn expect(text: &str, wanted: &[(u32, &str, &str, Option<&str>)]) {
    let problems = bad(text);
    assert_eq!(problems.list.len(), wanted.len(), "{problems}");
    for (problem, (line, path, word, nearest)) in problems.list.iter().zip(wanted) {
        assert_eq!(problem.line(), Some(*line), "{problem:?}");
        assert_eq!(problem.path, *path, "{problem:?}");
        assert!(problem.message.contains(word), "{word}: {problem:?}");
        assert_eq!(problem.nearest.as_deref(), *nearest, "{problem:?}");
    }
}

#[test]
fn the_example_says_the_defaults() {
    let bare = good("[[space]]\nmodel = \"example-model\"\n[[worker]]\nid = 1\n");
    assert_eq!(good(&config::example()), bare);
    assert_eq!(bare.serve.socket.to_str(), Some("/run/kvrouted/kvrouted.sock"));
    assert_eq!(bare.serve.admin_socket.to_str(), Some("/run/kvrouted/kvrouted.sock.admin"));
    assert_eq!((bare.serve.socket_mode, bare.serve.io, bare.serve.cores), (0o660, IoSetting::Auto, 0));
    assert_eq!(bare.serve.frame_body_bytes_max, limits::FRAME_BODY_BYTES_MAX_DEFAULT);
    assert_eq!((bare.log.level, bare.log.format, bare.metrics.port), ("info", LogFormat::Text, 0));
    assert_eq!(bare.ingest.receive_messages_max, limits::ZMQ_RECEIVE_MESSAGES_MAX);
    assert_eq!((bare.ingest.shards, bare.ingest.down_after_ms, bare.ingest.silence_ms_max), (1, 5000, 0));
    assert_eq!(bare.ingest.probe_after_ms, 5000);
    assert_eq!((bare.booking.age_s_max, bare.booking.session_grace_s), (300, 10));
    let policy = &bare.policy;
    assert_eq!(
        (policy.weights.device_credit, policy.weights.host_hit_weight, policy.weights.disk_hit_weight),
        (1.0, 0.75, 0.25)
    );
    assert!(policy.weights.track_prefill_tokens && policy.weights.track_active_blocks);
    assert_eq!((bare.spaces[0].scheme(), bare.spaces[0].memory_bytes_max), (None, 0));
    let worker = &bare.workers[0];
    assert_eq!((worker.worker, worker.space, worker.name.as_str()), (Worker::new(1, 0), SpaceId(0), "w1"));
    assert_eq!((worker.blocks_max, worker.batched_tokens_max), (limits::WORKER_BLOCKS_MAX_DEFAULT, 8192));
    assert_eq!((worker.weight, worker.state, worker.events.is_none()), (8.0, WorkerState::Joining, true));
}

#[test]
fn the_example_says_once_when_changes_take_effect() {
    assert_eq!(config::example().matches("takes effect at the next start").count(), 1);
}

#[test]
fn without_administer_the_address_decides_who_may_administer_by_http() {
    let http = |lines: &str| good(&format!("[[space]]\nmodel = \"a\"\n[http]\n{lines}")).http;
    let bare = http("");
    assert_eq!((bare.port, bare.listen.is_loopback(), bare.administer), (0, true, true));
    assert_eq!(bare.body_bytes_max, limits::HTTP_BODY_BYTES_MAX_DEFAULT);
    assert!(!http("port = 1\nadminister = false").administer);
    assert!(http("port = 1\nlisten = \"0.0.0.0\"\nadminister = true").administer);
    let bad = |lines: &str, wanted| expect(&format!("[[space]]\nmodel = \"a\"\n[http]\n{lines}"), &[wanted]);
    bad("port = 1\nlisten = \"::\"", (5, "http.listen", "administer", None));
    for restricts in
        ["[admin]\nsocket_mode = \"0660\"", "[admin]\nallow_uids = [\"7\"]", "[serve]\nallow_gids = [\"7\"]"]
    {
        bad(&format!("port = 1\n{restricts}"), (3, "http.administer", "is required with", None));
        assert!(http(&format!("port = 1\nadminister = true\n{restricts}")).administer);
        assert!(!http(restricts).administer, "{restricts}");
    }
    assert!(http("port = 1\n[admin]\nsocket_mode = \"0600\"").administer);
    assert_eq!(http("hosts = [\"Router.example\", \"*\"]").hosts, ["router.example", "*"]);
    bad("hosts = [\"router:80\"]", (4, "http.hosts", "not a host name", None));
    bad("port = 1\nlisten = \"here\"", (5, "http.listen", "no IP address", None));
    bad("port = 1\n[metrics]\nport = 1", (4, "http.port", "metrics.port", None));
}

#[test]
fn a_space_may_override_the_policy() {
    // [policy] follows the spaces: the order of tables does not matter.
    let text = "[[space]]\nmodel = \"a\"\n[space.policy]\nmode = \"least-loaded\"\nbusy_prefill_tokens = 9\n\
                [[space]]\nmodel = \"b\"\n[policy]\ndevice_credit = 0.5\ntrust_min = \"lower_bound\"\n";
    let config = good(text);
    assert_eq!(config.policy.spaces[1], config.policy.weights);
    assert_eq!((config.policy.weights.device_credit, config.policy.weights.trust_min), (0.5, TrustLevel::LowerBound));
    let weights = &config.policy.weights;
    let busy = BusyThresholds { prefill_tokens: Some(9), ..weights.busy };
    assert_eq!(config.policy.spaces[0], Policy { mode: Mode::LeastLoaded, busy, ..*weights });
    assert_eq!(good("space = [{ model = \"a\", policy = { temperature = 1 } }]").policy.spaces[0].temperature, 1.0);
    for (text, words) in [
        ("[[space]]\nmodel = \"a\"\n[space.policy]\nmdoe = \"kv\"\n", "did you mean"),
        ("[[space]]\nmodel = \"a\"\npolicy = 3\n", "expected a table"),
        ("[[space]]\nmodel = \"a\"\n[space.policy]\nseed = 3\n", "set it in [policy]"),
        ("[policy]\nmode = \"approximate\"\n[[space]]\nmodel = \"a\"\n", "must be true if"),
        ("[policy]\nmode = \"kvv\"\n[[space]]\nmodel = \"a\"\n", "kv, load-aware"),
    ] {
        let problems = config::parse("t", text, &Flags::default()).expect_err(text).to_string();
        assert!(problems.contains(words), "{text}: {problems}");
    }
}

#[test]
fn the_example_with_its_commented_fields_is_valid_too() {
    let text = config::example().replace("# admin_socket", "admin_socket").replace("# endpoint", "endpoint");
    let text = text.replace("# replay =", "replay =").replace("# weight =", "weight =").replace("# name =", "name =");
    let text = text.replace("# model =", "model =").replace("# role =", "role =").replace("# namespace", "namespace");
    let config = good(&text);
    let events = config.workers[0].events.as_ref().expect("an endpoint");
    assert_eq!(events.endpoint, "tcp://127.0.0.1:5557");
    assert_eq!(events.replay.as_deref(), Some("tcp://127.0.0.1:5657"));
    assert!(!text.contains("# admin_socket"));
}

#[test]
fn a_full_file_is_read_in_full() {
    let config = good(
        r#"
        [serve]
        socket = "/tmp/k.sock"
        socket_mode = "0600"
        io = "epoll"
        cores = 3
        [policy]
        device_credit = 2
        seed = "18446744073709551615"
        [[space]]
        model = "m"
        block_size = 16
        window = "bigram"
        salts = "none"
        [[space]]
        model = "m"
        namespace = "blue"
        role = "decode"
        [[worker]]
        id = "18446744073709551615"
        dp_rank = 3
        namespace = "blue"
        taints = ["a", "b"]
        device = "cpu"
        draining = true
        [[worker]]
        id = 2
        namespace = ""
        endpoint = "ipc:///run/engine"
        topic = "kv"
        "#,
    );
    assert_eq!((config.serve.socket_mode, config.serve.io, config.serve.cores), (0o600, IoSetting::Epoll, 3));
    assert_eq!((config.policy.weights.device_credit, config.policy.seed), (2.0, u64::MAX));
    assert_eq!(config.spaces[0].scheme(), Some(Scheme { block_size: 16, window: Window::Bigram }));
    assert_eq!((config.spaces[0].salts, config.spaces[1].role), (Salts::None, PoolRole::Decode));
    let [first, second] = config.workers.as_slice() else { panic!("two workers") };
    assert_eq!((first.worker, first.space), (Worker::new(u64::MAX, 3), SpaceId(1)));
    assert_eq!((first.name.as_str(), first.weight), ("w18446744073709551615.3", 1.0));
    assert_eq!((first.device_class, first.state), (DeviceClass::Cpu, WorkerState::Draining));
    assert_eq!(first.taints, ["a", "b"]);
    assert_eq!((second.space, second.events.as_ref().map(|e| e.topic.as_str())), (SpaceId(0), Some("kv")));
}

#[test]
fn inline_tables_and_dotted_keys_are_the_same_document() {
    let config = good(
        "serve.cores = 2\nspace = [{ model = \"m\" }]\nworker = [{ id = 1 }, { id = 2, dp_rank = 1 }]\nlog = { level = \
         \"debug\" }\n",
    );
    assert_eq!((config.serve.cores, config.log.level, config.workers.len()), (2, "debug", 2));
}

#[test]
fn unknown_names_of_every_level_are_listed_with_the_nearest() {
    expect(
        "[serve]\nsokcet = \"/tmp/a\"\ndrain_max_ms = 1\nshards = 2\n[polcy]\nseed = 1\n[[space]]\nmodel = \"m\"\n\
         blocksize = 16\n[[worker]]\nid = 1\nend_point = \"tcp://h:1\"\nqqqqqqqqqqqq = 1\n",
        &[
            (2, "serve.sokcet", "unknown field", Some("socket")),
            (3, "serve.drain_max_ms", "unknown field", Some("drain_ms_max")),
            (4, "serve.shards", "belongs to [ingest]", None),
            (5, "polcy", "unknown table", Some("policy")),
            (9, "space[0].blocksize", "unknown field", Some("block_size")),
            (12, "worker[0].end_point", "unknown field", Some("endpoint")),
            (13, "worker[0].qqqqqqqqqqqq", "unknown field", None),
        ],
    );
}

#[test]
fn wrong_types_and_ranges_are_listed_together() {
    expect(
        "[serve]\nsocket = 5\nsocket_mode = \"rw\"\nio = \"urning\"\ncores = \"two\"\npin = \"true\"\n\
         frame_body_bytes_max = 1\n[metrics]\nport = 65536\n[ingest]\nshards = 0\n[policy]\ndevice_credit = -0.5\n\
         host_hit_weight = 1.5\ndisk_hit_weight = nan\nprefill_load_scale = inf\nseed = -1\n[[space]]\nmodel = \"\"\n\
         block_size = 70000\nrole = \"prefil\"\n[[worker]]\nid = 1.5\ntaints = \"a\"\nweight = 0\ndevice = \"GPU\"\n",
        &[
            (2, "serve.socket", "found an integer", None),
            (3, "serve.socket_mode", "octal", None),
            (4, "serve.io", "none of auto, uring, epoll", Some("uring")),
            (5, "serve.cores", "expected an integer, found a string", None),
            (6, "serve.pin", "found a string", Some("true")),
            (7, "serve.frame_body_bytes_max", "4096 to 268435456", None),
            (9, "metrics.port", "0 to 65535", None),
            (11, "ingest.shards", "1 to 64", None),
            (13, "policy.device_credit", "at least 0", None),
            (14, "policy.host_hit_weight", "0 to 1", None),
            (15, "policy.disk_hit_weight", "0 to 1", None),
            (16, "policy.prefill_load_scale", "at least 0", None),
            (17, "policy.seed", "out of range", None),
            (19, "space[0].model", "must not be empty", None),
            (20, "space[0].block_size", "0 to 65536", None),
            (21, "space[0].role", "none of both, prefill, decode", Some("prefill")),
            (23, "worker[0].id", "found a number", None),
            (24, "worker[0].taints", "expected a list of strings", None),
            (25, "worker[0].weight", "out of range", None),
            (26, "worker[0].device", "none of gpu, cpu", Some("gpu")),
        ],
    );
}

#[test]
fn duplicates_name_the_first_location() {
    expect(
        "[[space]]\nmodel = \"m\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\nendpoint = \"tcp://h:1\"\n\
         [[worker]]\nid = 1\ndp_rank = 1\nendpoint = \"tcp://H:1\"\n[[worker]]\nid = 1\nreplay = \"tcp://h:2\"\n",
        &[
            (4, "space[1].model", "already defined at line 2", None),
            (11, "worker[1].endpoint", "already used at line 7", None),
            (13, "worker[2].id", "already defined at line 6", None),
            (14, "worker[2].replay", "has no effect without endpoint", None),
        ],
    );
}

#[test]
fn references_to_spaces_are_checked() {
    expect(
        "[[space]]\nmodel = \"llama\"\n[[space]]\nmodel = \"qwen\"\nnamespace = \"blue\"\n[[space]]\nmodel = \"qwen\"\n\
         namespace = \"green\"\n[[worker]]\nid = 1\nmodel = \"lama\"\n[[worker]]\nid = 2\n[[worker]]\nid = 3\n\
         model = \"qwen\"\n[[worker]]\nid = 4\nmodel = \"qwen\"\nnamespace = \"grene\"\n[[worker]]\nid = 5\n\
         model = \"llama\"\nrole = \"decode\"\n",
        &[
            (11, "worker[0].model", "no [[space]] has model `lama`", Some("llama")),
            (12, "worker[1].model", "ambiguous", None),
            (14, "worker[2].namespace", "`qwen` in `blue`, role both or `qwen` in `green`", None),
            (20, "worker[3].namespace", "no [[space]] of that model has namespace", Some("green")),
            (24, "worker[4].role", "has role `decode`", None),
        ],
    );
}

#[test]
fn endpoints_paths_and_relations_are_checked() {
    let long = format!("/tmp/{}", "s".repeat(limits::SOCKET_PATH_BYTES_MAX));
    let nearly = format!("/tmp/{}", "s".repeat(limits::SOCKET_PATH_BYTES_MAX - 8));
    let text = format!(
        "[serve]\nsocket = \"{nearly}\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\nendpoint = \"tcp://*:5557\"\n\
         replay = \"tpc://h:1\"\n[[worker]]\nid = 2\nendpoint = \"tcp://h:70000\"\n[[worker]]\nid = 3\n\
         endpoint = \"h:5557\"\ncapacity_blocks = 10\nblocks_max = 9\n[[worker]]\nname = \"x\"\n"
    );
    expect(
        &text,
        &[
            (2, "serve.socket", "with `.admin` appended", None),
            (7, "worker[0].endpoint", "where an engine binds", Some("tcp://127.0.0.1:5557")),
            (8, "worker[0].replay", "transport `tpc`", Some("tcp")),
            (11, "worker[1].endpoint", "1 to 65535", None),
            (14, "worker[2].endpoint", "neither tcp://host:port", None),
            (15, "worker[2].capacity_blocks", "more than blocks_max", None),
            (17, "worker[3].id", "is missing, e.g. id = 1", None),
        ],
    );
    let space = "[[space]]\nmodel = \"m\"\n";
    expect(&format!("{space}[serve]\nsocket = \"{long}\"\n"), &[(4, "serve.socket", "112 bytes", None)]);
    expect(
        &format!("{space}[serve]\nsocket = \"/tmp/a\"\nadmin_socket = \"/tmp/a\"\n"),
        &[(5, "serve.admin_socket", "same path", None)],
    );
}

#[test]
fn syntax_errors_have_a_location_and_do_not_hide_other_problems() {
    let problems = bad(
        "[serve]\nsocket = /tmp/a\ncores = 1\ncores = 2\nsokcet = \"x\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = \n",
    );
    let found: Vec<_> = problems.list.iter().map(|p| (p.line(), p.path.as_str(), p.nearest.as_deref())).collect();
    assert_eq!(
        found,
        [(Some(2), "", None), (Some(4), "", None), (Some(5), "serve.sokcet", Some("socket")), (Some(9), "", None)],
        "{problems}"
    );
    assert!(problems.list[1].message.contains("duplicate key"), "{problems}");
    let Location::Line { line: 2, column } = problems.list[0].location else { panic!("{problems}") };
    assert_eq!(column, 10, "{problems}");
}

#[test]
fn a_broken_header_does_not_hide_the_other_tables() {
    let problems =
        bad("[serve]\ncores = -1\n[[worker]\nid = 1\nendpont = 3\n[serve]\nx = 1\n[log]\nlevle = \"info\"\n");
    let found: Vec<_> = problems.list.iter().map(|p| (p.line(), p.path.as_str(), p.nearest.as_deref())).collect();
    assert_eq!(
        found,
        [
            (Some(2), "serve.cores", None),
            (Some(3), "", None),
            (Some(6), "", None),
            (Some(9), "log.levle", Some("level"))
        ],
        "{problems}"
    );
}

#[test]
fn hopelessly_broken_documents_still_give_a_location() {
    for (text, line) in [
        ("[serve\nsocket = \"/tmp/a\"\n", 1),
        ("[[space]]\nmodel = \"\"\"\nnever closed\n", 2),
        ("[[space]]\nmodel = \"m\"\n[[worker]]\nid = [1,\n", 4),
        ("\u{0}\u{1}\u{2}", 1),
        ("= = =\n[[[\n\"", 1),
        ("[serve]\n\n[serve]\n", 3),
    ] {
        let problems = bad(text);
        assert!(problems.list.iter().any(|p| p.line() >= Some(line)), "{text:?}: {problems}");
        assert!(problems.list.iter().all(|p| p.line().is_some()), "{text:?}: {problems}");
    }
}

#[test]
fn tables_of_the_wrong_shape_say_how_they_are_written() {
    expect(
        "serve = 1\nsocket = \"/tmp/a\"\nsoket = 1\n[space]\nmodel = \"m\"\n[[log]]\nlevel = \"info\"\n",
        &[
            (1, "serve", "the header [serve], found an integer", None),
            (2, "socket", "under [serve]", None),
            (3, "soket", "unknown field outside every table", Some("socket")),
            (4, "space", "the header [[space]], found a table", None),
            (6, "log", "the header [log], found a list of tables", None),
        ],
    );
    let problems = bad("");
    assert_eq!(problems.list.len(), 1);
    assert_eq!((problems.list[0].path.as_str(), &problems.list[0].location), ("space", &Location::Document));
}

#[test]
fn a_file_that_cannot_be_read_is_one_problem() {
    let dir = tempfile::tempdir().expect("a folder");
    let missing = config::load(Some(&dir.path().join("none.toml")), &Environment::default(), &Flags::default())
        .expect_err("no such file");
    assert!(missing.to_string().contains("none.toml: cannot be read"), "{missing}");
    let path = dir.path().join("latin.toml");
    std::fs::write(&path, b"[serve]\n# \xe9\n").expect("written");
    let latin = config::load(Some(&path), &Environment::default(), &Flags::default()).expect_err("not UTF-8");
    assert_eq!((latin.list[0].line(), latin.list.len()), (Some(2), 1));
}

#[test]
fn flags_win_over_the_file_and_are_checked_like_it() {
    let flags = Flags {
        settings: vec![
            Setting { flag: "--cores", section: "serve", field: "cores", text: "4".into() },
            Setting { flag: "--io", section: "serve", field: "io", text: "epoll".into() },
        ],
        workers: vec!["id=2,endpoint=tcp://127.0.0.1:5557,taints=a+b,weight=2.5,device=cpu".into()],
    };
    let text = "[serve]\ncores = 2\nio = \"quick\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\n";
    let problems = config::parse("k.toml", text, &flags).expect_err("the file's io is still bad");
    assert_eq!(problems.list.len(), 1, "{problems}");
    assert_eq!(problems.list[0].line(), Some(3));
    let config = config::parse("k.toml", &text.replace("quick", "uring"), &flags).expect("a good file");
    assert_eq!((config.serve.cores, config.serve.io), (4, IoSetting::Epoll));
    let added = &config.workers[1];
    assert_eq!((added.worker, added.weight, added.device_class), (Worker::new(2, 0), 2.5, DeviceClass::Cpu));
    assert_eq!(added.taints, ["a", "b"]);

    let flags = Flags {
        settings: vec![
            Setting { flag: "--socket", section: "serve", field: "socket", text: String::new() },
            Setting { flag: "--model", section: "space", field: "model", text: "m".into() },
            Setting { flag: "--block-size", section: "space", field: "block_size", text: "x".into() },
        ],
        workers: vec!["id=1,endpont=tcp://h:1".into(), "endpoint=tcp://*:1,id=1,id=2,loose".into()],
    };
    let problems = config::load(None, &Environment::default(), &flags).expect_err("everything is wrong");
    let found: Vec<_> = problems.list.iter().map(|p| (p.path.as_str(), p.nearest.as_deref())).collect();
    for wanted in [
        ("serve.socket", None),
        ("space[0].block_size", None),
        ("worker[0].endpont", Some("endpoint")),
        ("worker[1].endpoint", Some("tcp://127.0.0.1:1")),
        ("worker[1].id", None),
        ("worker[1].loose", None),
    ] {
        assert!(found.contains(&wanted), "{wanted:?} in {problems}");
    }
    assert!(problems.list.iter().all(|problem| matches!(problem.location, Location::Flag(_))), "{problems}");
}

#[test]
fn the_number_of_serving_threads_follows_the_machine() {
    let mut serve = good("[[space]]\nmodel = \"m\"\n").serve;
    for (cpus, shards, cores) in [(1, 1, 1), (2, 1, 1), (4, 1, 3), (4, 2, 2), (64, 1, 8)] {
        assert_eq!(serve.core_count(cpus, shards), cores, "{cpus} processors, {shards} shards");
    }
    serve.cores = 5;
    assert_eq!(serve.core_count(1, 1), 5);
}

#[test]
fn a_memory_ceiling_leaves_room_in_every_shard() {
    let text = |bytes: u64, shards: u16| {
        format!("[ingest]\nshards = {shards}\n[[space]]\nmodel = \"m\"\nmemory_bytes_max = {bytes}\n")
    };
    let min = limits::SHARD_MEMORY_BYTES_MIN;
    assert_eq!(good(&text(3 * min, 3)).spaces[0].memory_bytes_max, 3 * min);
    assert_eq!(good(&text(0, 3)).spaces[0].memory_bytes_max, 0);
    expect(&text(3 * min - 1, 3), &[(5, "space[0].memory_bytes_max", "with ingest.shards = 3", None)]);
    let beyond = limits::SPACE_MEMORY_BYTES_CEILING + 1;
    expect(&text(beyond, 1), &[(5, "space[0].memory_bytes_max", "70368744177664", None)]);
}

#[test]
fn nats_takes_the_place_of_a_port_and_needs_what_its_servers_need() {
    let text = |lines: &str| format!("[[space]]\nmodel = \"m\"\n[routers]\n{lines}");
    expect(&text("nats_user = \"u\"\n"), &[(4, "routers.nats_user", "needs nats", None)]);
    let plain = text("nats = [\"nats://a\", \"nats://b:1\"]\nsecret_file = \"s\"\n");
    if !cfg!(feature = "nats") {
        return expect(&plain, &[(4, "routers.nats", "--features nats", None)]);
    }
    let servers: Vec<String> = good(&plain).routers.nats_servers().iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["nats://a:4222", "nats://b:1"]);
    for (servers, more, field, word) in [
        ("nats://a", "", "nats", "secret_file"),
        ("ws://a", "secret_file = \"s\"", "nats", "neither nats://host:port nor tls"),
        ("nats://a", "secret_file = \"s\"\nlisten = \"tcp://*:1\"", "nats", "takes the place of listen"),
        ("tls://a", "secret_file = \"s\"", "nats", "nats_ca_file"),
        ("tls://a\", \"nats://b", "secret_file = \"s\"\nnats_ca_file = \"c\"", "nats", "in the clear"),
    ] {
        let lines = text(&format!("nats = [\"{servers}\"]\n{more}\n"));
        expect(&lines, &[(4, &format!("routers.{field}"), word, None)]);
    }
    for (line, field, word) in [
        ("nats_user = \"u\"", "nats_user", "the password"),
        ("nats_credentials_file = \"c\"\nnats_secret_file = \"p\"", "nats_credentials_file", "remove either"),
        ("nats_prefix = \"a.*\"", "nats_prefix", "dots between words"),
    ] {
        expect(&format!("{plain}{line}\n"), &[(6, &format!("routers.{field}"), word, None)]);
    }
}

#[test]
fn events_from_nats_need_an_address_and_what_its_server_needs() {
    let text = |more: &str| format!("[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\n{more}");
    let plain = text("endpoint = \"nats://a\"\n");
    if !cfg!(feature = "nats") {
        expect(&plain, &[(5, "worker[0].endpoint", "--features nats", None)]);
        return expect(&text("[relay]\nnats = [\"nats://a\"]\n"), &[(6, "relay.nats", "--features nats", None)]);
    }
    let events = good(&format!("{plain}[[worker]]\nid = 2\nranks = 2\nendpoint = \"nats://a\"\n")).workers;
    assert_eq!(events.len(), 3, "one server serves all workers");
    let events = events[2].events.as_ref().expect("a source");
    assert_eq!((events.endpoint.as_str(), events.replay.as_deref()), ("nats://a:4222", Some("nats://a:4222")));
    for (more, line, path, word) in [
        ("endpoint = \"nats://a\"\nreplay = \"tcp://a:1\"\n", 6, "worker[0].replay", "also replays"),
        ("endpoint = \"nats://a\"\ntopic = \"t\"\n", 6, "worker[0].topic", "also replays"),
        ("endpoint = \"nats://u:p@a\"\n", 5, "worker[0].endpoint", "nats_secret_file"),
        ("replay = \"nats://a\"\nendpoint = \"tcp://a:1\"\n", 5, "worker[0].replay", "only tcp and ipc"),
        ("endpoint = \"tls://a\"\n", 5, "worker[0].endpoint", "nats_ca_file"),
        ("[relay]\nnats = [\"ws://a\"]\n", 6, "relay.nats", "neither nats://host:port nor tls"),
        ("[relay]\nnats = [\"tls://a\"]\n", 6, "relay.nats", "nats_ca_file"),
        (
            "[relay]\nnats = [\"tls://a\", \"nats://b\"]\n[ingest]\nnats_ca_file = \"c\"\n",
            6,
            "relay.nats",
            "in the clear",
        ),
        ("[ingest]\nnats_user = \"u\"\n", 6, "ingest.nats_user", "the password"),
        ("[ingest]\nnats_prefix = \"a.*\"\n", 6, "ingest.nats_prefix", "dots between words"),
    ] {
        expect(&text(more), &[(line, path, word, None)]);
    }
}
