//! The metrics page: readiness, the address that it is served at, and its size for a large fleet.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use kvrouted::route::{Prompt, RouteRequest};

use crate::kit::http::{get, scrape};
use crate::kit::ports::free_port;
use crate::kit::{Daemon, prompt, run, text, until};

/// The status line and the page at an address.
fn scrape_at(address: &str, host: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes()).ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page)
}

#[track_caller]
fn sample(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).parse().expect("a number")
}

#[test]
fn readiness_is_a_metric_that_agrees_with_the_http_port() {
    let (port, http) = (free_port(), free_port());
    let tables = |workers: &str| format!("[metrics]\nport = {port}\n[http]\nport = {http}\n{workers}");
    let daemon = Daemon::configured(&tables(""));
    let agrees = |ready: bool| {
        let (head, _) = get(http, "/ready");
        (sample(&scrape(port).1, "kvrouted_ready") > 0.5) == ready && head.contains(" 200 ") == ready
    };
    until("a daemon without workers is not ready", || agrees(false));
    daemon.reconfigure(&tables("[[worker]]\nid = 1\n"));
    until("with a worker it is", || agrees(true));
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("with a worker that drains it is not", || agrees(false));
}

#[test]
fn the_time_of_decisions_is_a_histogram() {
    let port = free_port();
    let daemon = Daemon::configured(&format!("[metrics]\nport = {port}\n[[worker]]\nid = 1\n"));
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    client.route(&RouteRequest::new(space, Prompt::of_tokens(&prompt(1, 64)))).expect("a decision");
    until("the decision is counted", || {
        let (_, page) = scrape(port);
        assert!(page.contains("# TYPE kvrouted_decision_seconds histogram\n"), "{page}");
        let buckets: Vec<f64> = page
            .lines()
            .filter_map(|line| line.strip_prefix("kvrouted_decision_seconds_bucket{le=\"")?.split_once("\"} "))
            .map(|(_, count)| count.parse().expect("a number"))
            .collect();
        assert!(buckets.len() > 10 && buckets.is_sorted(), "they are cumulative: {buckets:?}");
        let (count, sum) =
            (sample(&page, "kvrouted_decision_seconds_count"), sample(&page, "kvrouted_decision_seconds_sum"));
        count == 1.0 && buckets.last() == Some(&1.0) && sum > 0.0
    });
}

#[test]
fn the_page_is_served_where_the_configuration_says_and_the_doctor_finds_it() {
    let port = free_port();
    let tables = format!(
        "[metrics]\nport = {port}\nlisten = \"127.0.0.2\"\nhosts = [\"scraper.example\"]\n[[worker]]\nid = 1\n"
    );
    let daemon = Daemon::configured(&tables);
    let address = format!("127.0.0.2:{port}");
    assert!(scrape_at(&address, "127.0.0.2").expect("a page").contains("kvrouted_ready "));
    assert!(scrape_at(&address, "scraper.example").expect("a page").starts_with("HTTP/1.1 200 "));
    assert!(scrape_at(&address, "evil.example").expect("a refusal").starts_with("HTTP/1.1 403 "));
    assert_eq!(scrape_at(&format!("127.0.0.1:{port}"), "127.0.0.1"), None, "no other address is bound");
    assert_eq!(daemon.status().metrics_port, 0, "the port that it names is that of 127.0.0.1");
    let config = daemon.folder.path().join("kvrouted.toml");
    let found = run(&["doctor", "--config", text(&config)]);
    assert!(!String::from_utf8_lossy(&found.stdout).contains("metrics_unreachable"), "{found:?}");

    let port = free_port();
    let daemon = Daemon::configured(&format!("[metrics]\nport = {port}\nlisten = \"0.0.0.0\"\n"));
    assert_eq!(daemon.status().metrics_port, port);
    assert!(scrape(port).0.contains(" 200 "));
}

/// The number of metrics of workers on a page.
fn worker_metrics(page: &str) -> usize {
    page.lines().filter(|line| line.starts_with("# TYPE kvrouted_worker_")).count()
}

#[test]
fn the_page_of_a_large_fleet_keeps_what_is_watched_and_counts_the_rest() {
    let port = free_port();
    let tables = |workers: u32| {
        let workers: String = (1..=workers).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
        format!("[metrics]\nport = {port}\ndetailed_workers_max = 2\n{workers}")
    };
    let daemon = Daemon::configured(&tables(2));
    let whole = scrape(port).1;
    assert_eq!(sample(&whole, "kvrouted_metrics_left_out"), 0.0);
    assert!(whole.contains("kvrouted_worker_unknown_tags_total{"));
    daemon.reconfigure(&tables(3));
    until("the third worker is there", || scrape(port).1.contains("kvrouted_worker_state{worker_id=\"3\""));
    let page = scrape(port).1;
    let left_out = sample(&page, "kvrouted_metrics_left_out");
    assert_eq!(worker_metrics(&page) + left_out as usize, worker_metrics(&whole));
    assert!(left_out > 20.0 && !page.contains("kvrouted_worker_unknown_tags_total"), "{left_out}");
    for watched in ["trust", "gaps_total", "active_requests", "trust_reason"] {
        assert!(page.contains(&format!("kvrouted_worker_{watched}{{worker_id=\"3\"")), "{watched}");
    }
}

/// Prints what docs/operating.md says of large pages. Scrapes are far enough apart that each gets a page of its own.
#[test]
#[ignore = "it measures"]
fn the_page_of_a_thousand_engines_with_four_ranks() {
    for detailed in [1024, 4096] {
        let port = free_port();
        let engines: String = (0..1000)
            .map(|id| format!("[[worker]]\nid = {id}\nranks = 4\nendpoint = \"tcp://127.0.0.1:{}\"\n", 20_000 + id * 4))
            .collect();
        let _daemon =
            Daemon::configured(&format!("[metrics]\nport = {port}\ndetailed_workers_max = {detailed}\n{engines}"));
        until("all workers are there", || sample(&scrape(port).1, "kvrouted_open_files{for=\"publishers\"}") >= 8000.0);
        let mut times: Vec<f64> = (0..7)
            .map(|_| {
                std::thread::sleep(std::time::Duration::from_secs(11));
                let began = Instant::now();
                scrape(port);
                began.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        println!("in order: {times:.0?} ms");
        times.sort_by(f64::total_cmp);
        let page = scrape(port).1;
        let samples = page.lines().filter(|line| !line.starts_with('#')).count();
        let (bytes, left_out) = (page.len(), sample(&page, "kvrouted_metrics_left_out"));
        println!(
            "detailed_workers_max = {detailed}: {bytes} bytes, {samples} samples, {left_out} metrics left out; scrape: median {:.0} ms, {:.0} to {:.0} ms",
            times[3], times[0], times[6]
        );
    }
}
