//! The sandbox: what each kind of threads may not do, and that a process does all its work inside.
#![cfg(feature = "daemon")]

mod daemon;
#[path = "../kit/mod.rs"]
mod kit;
mod relay;
mod remote;
mod threads;

use std::sync::OnceLock;

use serde_json::Value;

/// Whether this kernel has every part of a sandbox. If not, reports `what` as skipped.
fn kernel_has_all(what: &str) -> bool {
    static LACKS: OnceLock<Option<String>> = OnceLock::new();
    let lacks = LACKS.get_or_init(|| {
        let daemon = kit::Daemon::start(&["--sandbox", "on", "--cores", "1"]);
        let status = daemon.said(&["status"]);
        let lacks = ["no_new_privileges", "capabilities_dropped", "filters", "landlock"].into_iter();
        let lacks: Vec<&str> = lacks.filter(|part| status["sandbox"][part].as_u64() == Some(0)).collect();
        (!lacks.is_empty()).then(|| format!("this kernel lacks {}", lacks.join(" and ")))
    });
    if let Some(why) = lacks {
        kit::skipped(what, why);
    }
    lacks.is_none()
}

/// What `kvrouted status` says of a daemon's sandbox.
fn sandbox_of(daemon: &kit::Daemon) -> Value {
    daemon.said(&["status"])["sandbox"].clone()
}
