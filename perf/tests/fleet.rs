//! `perf fleet` on a small fleet: no overlap is wrong, no booking is left, and all daemons agree.

use std::process::Command;

use serde_json::Value;

fn fleet(arguments: &str) -> Value {
    let small = "fleet --json --workers 20 --ranks 2 --cache-blocks 512 --seconds 2 --hold-s 0.2 --gateways 8";
    let arguments = small.split_whitespace().chain(arguments.split_whitespace());
    let output = Command::new(env!("CARGO_BIN_EXE_perf")).args(arguments).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Every comparison was made, and found nothing wrong.
#[track_caller]
fn assert_right(verified: &Value, ranks: u64) {
    for of_daemon in verified.as_array().expect("one for each daemon") {
        assert_eq!(of_daemon["wrong"], 0, "{of_daemon}");
        assert_eq!(of_daemon["inexact"], 0, "{of_daemon}");
        assert!(of_daemon["compared"].as_u64().expect("a number") >= 256 * ranks, "{of_daemon}");
    }
}

#[track_caller]
fn assert_sound(report: &Value) {
    assert_right(&report["start"]["verified"], 40);
    for row in report["rows"].as_array().expect("rows") {
        assert_right(&row["verified"], 40);
        assert!(row["answered_routes_per_s"].as_f64().expect("a number") > 0.0, "{row}");
        assert!(row["published_batches_per_s"].as_f64().expect("a number") > 0.0, "{row}");
    }
    let left = report["end"]["bookings_live"].as_array().expect("one for each daemon");
    assert!(left.iter().all(|bookings| *bookings == 0), "{left:?}");
    assert_eq!(report["end"]["digests_equal"], true);
    assert_eq!(report["end"]["subscribers_cut"], 0);
}

#[test]
fn a_fleet_whose_workers_are_replaced_is_known_exactly_by_every_daemon() {
    let report = fleet("--routers 2 --batches-per-s 400,2000 --routes-per-s 200 --replaced-per-s 2");
    assert_sound(&report);
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(2), "one for each rate of batches");
    assert!(report["rows"][0]["replaced"].as_u64().expect("a number") > 0);
}

#[test]
fn lost_batches_and_a_partition_are_made_up_for_by_replays() {
    let report = fleet("--batches-per-s 2000 --routes-per-s 200 --replaced-per-s 0 --loss 0.01 --partition-s 1");
    assert_sound(&report);
    assert!(report["rows"][0]["counters"]["worker_gaps"].as_u64().expect("a number") > 0);
    let partition = &report["partition"];
    assert!(partition["counters"]["worker_batches_replayed"].as_u64().expect("a number") > 0, "{partition}");
    assert_right(&partition["verified"], 40);
}
