//! `kvrouted top --once` as its operators see it: no workers, a few, and more than fit; and a daemon that is not there.

use crate::kit::{Daemon, run, text};

fn frame(of: &Daemon, more: &[&str]) -> String {
    let socket = of.socket();
    let output = run(&[&["top", "--once", "--every", "0.2", "--socket", text(&socket)], more].concat());
    assert!(output.status.success(), "{output:?}");
    let shown = String::from_utf8(output.stdout).expect("text");
    assert!(!shown.contains('\u{1b}'), "it is text, without colours and movements: {shown}");
    shown
}

fn workers(count: u64) -> String {
    (1..=count).map(|id| format!("[[worker]]\nid = {id}\nname = \"engine-{id}\"\n")).collect()
}

#[test]
fn a_daemon_without_workers_says_so() {
    let shown = frame(&Daemon::configured(""), &[]);
    assert_eq!(shown.lines().count(), 24);
    assert!(shown.contains("no workers") && shown.contains("kvrouted "), "{shown}");
}

#[test]
fn a_few_workers_are_lines_with_what_is_wrong_below() {
    let daemon = Daemon::configured(&(workers(3) + "endpoint = \"ipc:///nowhere\"\n"));
    let shown = frame(&daemon, &["--size", "120x40"]);
    assert_eq!(shown.lines().count(), 40);
    for part in ["1/0", "engine-3", "3 of 3", "routes/s", "q quit"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn a_large_fleet_shows_what_fits_in_the_wanted_order() {
    let daemon = Daemon::configured(&workers(300));
    let shown = frame(&daemon, &[]);
    assert!(shown.contains("1/0") && shown.contains("of 300"), "{shown}");
    let shown = frame(&daemon, &["--filter", "engine-29"]);
    assert!(shown.contains("299/0") && !shown.contains(" 30/0") && shown.contains("filtered from 300"), "{shown}");
}

#[test]
fn a_daemon_that_is_not_there_is_said_at_once() {
    let output = run(&["top", "--once", "--socket", "/nowhere/s"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(69) && said.contains("/nowhere/s"), "{said}");
}
