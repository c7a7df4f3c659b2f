//! A gateway under callers that misbehave, in front of engines that die and come back. `scripts/gateways/soak` runs it as long
//! as one likes; `cargo test` leaves it out.
//!
//! ```text
//! soak/callers.rs   those who behave, and those who hang up, send too much, send nonsense or do not read
//! soak/fleet.rs     simulated engines, and who kills them
//! soak/report.rs    memory and descriptors over time, tallies, and what must hold
//! ```

#[path = "soak/callers.rs"]
mod callers;
#[path = "soak/fleet.rs"]
mod fleet;
mod kit;
#[path = "soak/report.rs"]
mod report;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use callers::{Plan, Vice};
use fleet::Fleet;
use kit::{Caller, Figures, Gateway, kvrouted_or_skip};
use report::{Report, Tally, Watched};
use serde_json::json;

/// Engines; the first one never dies.
const ENGINES: usize = 3;
/// Callers who behave.
const WELL_BEHAVED: u64 = 4;
const SECONDS_DEFAULT: u64 = 20;
/// For how long the last requests and their bookings may go on.
const LAST_REQUESTS: Duration = Duration::from_secs(30);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse::<f64>().ok()).map_or(default, |value| value as u64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "scripts/gateways/soak runs it"]
async fn as_long_as_asked() {
    let Some(kvrouted) = kvrouted_or_skip("the gateway's soak") else { return };
    let seed = number("KVROUTED_SOAK_SEED", 1);
    let lasts = Duration::from_secs(number("KVROUTED_SOAK_SECONDS", SECONDS_DEFAULT).max(3));
    let report = soak(&kvrouted, seed, lasts).await;
    if let Some(out) = std::env::var_os("KVROUTED_SOAK_OUT").map(PathBuf::from) {
        std::fs::write(out.with_extension("json"), report.json().to_string()).expect("a file");
        std::fs::write(out.with_extension("txt"), report.text()).expect("a file");
    }
    let faults = report.faults();
    assert!(faults.is_empty(), "{}\n{}", report.text(), faults.join("\n"));
}

async fn soak(kvrouted: &Path, seed: u64, lasts: Duration) -> Report {
    let mut fleet = Fleet::start(kvrouted, ENGINES).await;
    let (program, urls) = (kvrouted.to_owned(), fleet.urls());
    let starting = tokio::task::spawn_blocking(move || {
        let mut gateway = Gateway::start(&program, &urls, &["--log-level", "info"]);
        let daemon = gateway.daemon();
        (gateway, daemon)
    });
    let (gateway, (daemon, socket)) = starting.await.expect("a gateway");
    let figures = Figures::of(&socket, "demo");
    let (caller, tally) = (Caller::of(gateway.url()), Arc::new(Tally::default()));
    let first = caller.chat(&[json!({"role": "user", "content": "The first of all."})]).await;
    assert_eq!(first.status, 200, "{:?}", first.body);
    let mut watched = [Watched::of("gateway", gateway.pid()), Watched::of("daemon", daemon)];

    let begun = Instant::now();
    let plan = Plan { url: gateway.url().to_owned(), seed, until: begun + lasts, tally: Arc::clone(&tally) };
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..WELL_BEHAVED {
        tasks.spawn(callers::well_behaved(plan.clone(), number));
    }
    for vice in Vice::ALL {
        tasks.spawn(callers::misbehave(plan.clone(), vice));
    }
    let killing = tokio::spawn(async move {
        let deaths = fleet.kill_now_and_then(seed, begun + lasts).await;
        (fleet, deaths)
    });
    while Instant::now() < begun + lasts {
        tokio::time::sleep(Duration::from_secs(1)).await;
        watched.iter_mut().for_each(Watched::look);
    }
    let (_fleet, deaths) = killing.await.expect("engines");
    let stuck =
        tokio::time::timeout(LAST_REQUESTS, async { while tasks.join_next().await.is_some() {} }).await.is_err();
    let bookings = bookings_left(&figures).await;
    let last = caller.chat(&[json!({"role": "user", "content": "The last of all."})]).await;
    tally.must(last.status == 200, || format!("the last request got {}", last.status));
    drop(caller);
    watched.iter_mut().for_each(Watched::look);
    Report { seed, lasted: begun.elapsed(), deaths, stuck, bookings, watched, tally }
}

/// Bookings in the daemon when all callers have left.
async fn bookings_left(figures: &Figures) -> Option<u64> {
    let by = Instant::now() + LAST_REQUESTS;
    loop {
        let bookings = figures.bookings().await;
        if bookings == Some(0) || Instant::now() > by {
            return bookings;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
