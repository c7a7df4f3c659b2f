//! The audit lines of a real daemon: one for each change by the admin socket, the HTTP port, a reload or a file of workers.

use kvrouted::wire::{PolicyOrder, ResetOrder};

use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, configure, folder, replace, text, until};

/// The audit lines of a daemon, without time and level.
fn audited(daemon: &Daemon) -> Vec<String> {
    let log = daemon.process.log();
    let lines = log.lines().filter_map(|line| line.split_once(" audit: ").map(|(_, rest)| rest.to_owned()));
    lines.collect()
}

/// Waits for the next audit line after `seen`, and expects it to be the only one, with these words.
#[track_caller]
fn next_line(daemon: &Daemon, seen: &mut usize, words: &[&str]) {
    until("the change is in the audit log", || audited(daemon).len() > *seen);
    let lines = audited(daemon);
    assert_eq!(lines.len(), *seen + 1, "{lines:?}");
    for word in words {
        assert!(lines[*seen].contains(word), "{word}: {}", lines[*seen]);
    }
    *seen += 1;
}

#[test]
fn changes_on_the_admin_socket_say_who_what_before_and_after() {
    let daemon = Daemon::configured("[[worker]]\nid = 1\n");
    let mut seen = 0;
    assert!(audited(&daemon).is_empty());
    daemon.worker_ok(&["add", "id=7,endpoint=tcp://127.0.0.1:1"]);
    let added =
        ["what=\"worker added\" object=7/0 before=\"absent\"", "endpoint=\\\"tcp://127.0.0.1:1\\\"", "who=uid="];
    next_line(&daemon, &mut seen, &added);
    daemon.worker_ok(&["set", "1/0", "draining=true"]);
    next_line(
        &daemon,
        &mut seen,
        &["what=\"worker set\" object=1/0 before=\"draining=false\" after=\"draining=true\""],
    );
    daemon.worker_ok(&["add", "id=7,endpoint=tcp://127.0.0.1:1,weight=3"]);
    next_line(&daemon, &mut seen, &["what=\"worker replaced\" object=7/0", "weight=8.0", "weight=3.0"]);
    daemon.worker_ok(&["remove", "7"]);
    next_line(&daemon, &mut seen, &["what=\"worker removed\" object=7/0", "after=\"absent\""]);
    // A refused change is none.
    assert!(!daemon.worker(&["remove", "9"]).status.success());

    // These come from this process.
    let own = format!("pid={} ", std::process::id());
    daemon.admin().reset(ResetOrder::default()).expect("reset");
    next_line(&daemon, &mut seen, &[&own, "what=\"reset\" object=every worker before=\"blocks=0\" after=\"blocks=0\""]);
    let settings = [("temperature".to_owned(), "0.5".to_owned())];
    let order = PolicyOrder::Shadow { settings: &settings, share: 0.25 };
    daemon.admin().set_policy(&order).expect("set");
    let shadow = "before=\"share=0 policy=[]\" after=\"share=0.25 policy=[temperature=0.5]\"";
    next_line(&daemon, &mut seen, &[&own, "what=\"shadow policy set\"", shadow]);
    daemon.admin().set_policy(&PolicyOrder::Promote).expect("promoted");
    let promoted = "before=\"version=1 policy.temperature=0.0\" after=\"version=2 policy.temperature=0.5\"";
    next_line(&daemon, &mut seen, &[&own, "what=\"shadow policy promoted\"", promoted]);
    daemon.admin().set_policy(&PolicyOrder::EndShadow).expect("ended");
    next_line(&daemon, &mut seen, &[&own, "what=\"shadow policy ended\""]);
}

#[test]
fn a_reload_is_one_line_with_all_that_it_changed() {
    let daemon = Daemon::configured("[policy]\ntemperature = 1.0\n[[worker]]\nid = 1\n");
    let mut seen = 0;
    daemon.reconfigure("[policy]\ntemperature = 0.5\n");
    let object = format!("object={}", daemon.folder.path().join("kvrouted.toml").display());
    let before = "before=\"workers_removed=0 policy.temperature=1.0 worker 1/0=present\"";
    let after = "after=\"workers_removed=1 policy.temperature=0.5 worker 1/0=absent\"";
    next_line(&daemon, &mut seen, &["who=signal=SIGHUP what=\"reload\"", &object, before, after]);
    daemon.reconfigure("[policy]\ntemperature = 0.5\n");
    next_line(&daemon, &mut seen, &["before=\"\" after=\"\""]);
    // The seed needs a restart: the order of workers that follows from it stays, too.
    daemon.reconfigure("[policy]\ntemperature = 0.5\nseed = 5\n");
    next_line(&daemon, &mut seen, &["before=\"\" after=\"\""]);
    assert_eq!(daemon.counter("policies_replaced"), 1);
    assert!(daemon.process.log().contains("policy.seed"), "{}", daemon.process.log());
}

#[test]
fn a_file_of_workers_that_changes_has_a_line_for_each_worker_and_its_first_reading_has_none() {
    let files = folder();
    let file = files.path().join("a.json");
    replace(&file, r#"[{"id": 2}]"#);
    let discovery = format!("[discovery]\npath = \"{}\"\ngrace_ms = 0\nrescan_ms = 100\n", files.path().display());
    let daemon = Daemon::configured(&discovery);
    until("it is read", || daemon.counter("discovery_files_read") == 1);
    assert!(audited(&daemon).is_empty());
    let (mut seen, who) = (0, format!("who=file {} ", file.display()));
    replace(&file, r#"[{"id": 2, "weight": 3}]"#);
    next_line(&daemon, &mut seen, &[&who, "what=\"worker replaced\" object=2/0", "weight=8.0", "weight=3.0"]);
    std::fs::remove_file(&file).expect("removed");
    next_line(&daemon, &mut seen, &[&who, "what=\"worker removed\" object=2/0", "after=\"absent\""]);
}

#[test]
fn changes_by_http_name_the_client() {
    let port = free_port();
    let daemon = Daemon::configured(&format!("[http]\nport = {port}\n"));
    let url = format!("http://127.0.0.1:{port}/workers");
    let body = r#"{"worker_id": 5, "model_name": "m", "endpoint": "http://w:1", "kv_events_endpoint": "tcp://127.0.0.1:1",
        "block_size": 16}"#;
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let answer = agent.post(&url).header("Content-Type", "application/json").send(body).expect("an answer");
    assert_eq!(answer.status(), 201);
    let lines = |wanted: usize| {
        until("the change is in the audit log", || audited(&daemon).len() >= wanted);
        let lines = audited(&daemon);
        assert_eq!(lines.len(), wanted, "{lines:?}");
        assert!(lines.iter().all(|line| line.contains("who=http=127.0.0.1:")), "{lines:?}");
        lines
    };
    let added = lines(2);
    assert!(added[0].contains("what=\"worker added\" object=5/0 before=\"absent\""), "{added:?}");
    assert!(added[1].contains("what=\"registration\" object=5 before=\"absent\""), "{added:?}");
    // What the fleet does not have is changed in the registration alone.
    let url = format!("{url}/5");
    let other = r#"{"endpoint": "http://w:2"}"#;
    let answer = agent.patch(&url).header("Content-Type", "application/json").send(other).expect("an answer");
    assert_eq!(answer.status(), 200);
    let changed = lines(3);
    assert!(changed[2].contains("http://w:1") && changed[2].contains("http://w:2"), "{changed:?}");
    assert_eq!(agent.delete(&url).call().expect("an answer").status(), 200);
    let removed = lines(5);
    assert!(removed[3].contains("what=\"worker removed\" object=5/0"), "{removed:?}");
    assert!(
        removed[4].contains("what=\"registration\" object=5") && removed[4].contains("after=\"absent\""),
        "{removed:?}"
    );
}

#[test]
fn audit_lines_outlast_a_quiet_level_and_are_objects_in_json() {
    let folder = folder();
    let config = configure(folder.path(), "[log]\nlevel = \"error\"\nformat = \"json\"\n[[worker]]\nid = 1\n");
    let process = Process::start(folder.path(), "daemon", &["serve", "--config", text(&config)]);
    let daemon = Daemon::served_by(process, folder);
    daemon.worker_ok(&["set", "1", "weight=2"]);
    until("the change is in the log", || daemon.process.log().contains("\"target\":\"audit\""));
    let log = daemon.process.log();
    assert_eq!(log.lines().count(), 1, "{log}");
    let line: serde_json::Value = serde_json::from_str(log.lines().next().expect("a line")).expect("JSON");
    let uid = own_uid();
    assert!(line["who"].as_str().is_some_and(|who| who.starts_with(&format!("uid={uid} pid="))), "{line}");
    assert_eq!(
        (&line["object"], &line["before"], &line["after"]),
        (&"1/0".into(), &"weight=8.0".into(), &"weight=2.0".into())
    );
}

/// The user of this process.
fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}
