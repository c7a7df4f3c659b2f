//! The endpoint picker under a real Envoy, with the recipes' configurations.
//!
//! `scripts/gateways/fetch` installs the Envoys. Without them these tests say so and check nothing.

#![allow(clippy::print_stderr, reason = "a test that checks nothing must say so")]

#[path = "envoy/bench.rs"]
mod bench;
#[path = "epp/kit.rs"]
mod kit;
#[path = "../../tests/kit/ports.rs"]
mod ports;
#[path = "envoy/process.rs"]
mod process;
#[path = "envoy/upstream.rs"]
mod upstream;

use bench::{Bench, json};
use bytes::Bytes;
use futures_util::future::join_all;
use hyper::StatusCode;
use kit::Heard;
use process::Recipe;
use xxhash_rust::xxh3::xxh3_64;

const OLDEST: &str = "1.36.4";
const NEWEST: &str = "1.40.0";

/// Runs a check with a bench of its own for each installed Envoy.
macro_rules! checks {
    ($($(#[$doc:meta])* $name:ident: $recipe:ident;)*) => {
        $(mod $name {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn oldest() {
                if let Some(bench) = super::Bench::start(super::OLDEST, super::Recipe::$recipe).await {
                    super::$name(bench).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn newest() {
                if let Some(bench) = super::Bench::start(super::NEWEST, super::Recipe::$recipe).await {
                    super::$name(bench).await;
                }
            }
        })*
    };
}

checks! {
    requests_follow_the_list: Pool;
    large_bodies_pass_side_by_side: Pool;
    subsets_are_strict_and_trailers_pass: Extras;
    refusals_reach_the_caller: Pool;
    answers_stream_and_end: Pool;
    a_killed_picker_cuts_answers_and_a_new_one_serves: Pool;
    without_a_picker_requests_pass_whole_if_they_may: FailOpen;
    an_observed_answer_survives_its_picker: Observed;
    one_endpoint_is_followed_without_a_list_of_endpoints: OriginalDst;
}

async fn requests_follow_the_list(mut bench: Bench) {
    for name in ["a", "b", "c"] {
        let reply = bench.chat(json(name)).await;
        assert_eq!((reply.status, reply.upstream()), (StatusCode::OK, Some(name)), "{reply:?}");
        let seen = bench.upstream(name).last();
        assert_eq!(seen.body, json(name), "the body has changed");
        assert_eq!(seen.headers["x-gateway-destination-endpoint"].to_str().ok(), Some(&*bench.list(name)));
        let served = bench.upstream(name).address;
        bench.picker().hears(&Heard::Complete).await;
        let heard = bench.picker().heard();
        let is_right = |heard: &Heard| matches!(heard, Heard::Answered(start) if start.served == Some(served));
        assert!(heard.iter().any(is_right), "{name} served: {heard:?}");
    }
    // A caller that names its request itself, whatever it says of its address.
    for forwarded in ["10.0.0.1", "127.0.0.1, 10.0.0.1"] {
        bench.post(&[("x-request-id", "of-another"), ("x-forwarded-for", forwarded)], json("a")).await;
        assert_ne!(bench.upstream("a").last().headers["x-request-id"], "of-another", "{forwarded}");
    }
    // A caller that names an endpoint itself, once and twice.
    let spoofed = bench.upstream("c").address.to_string();
    for times in [1, 2] {
        let headers = vec![("x-gateway-destination-endpoint", spoofed.as_str()); times];
        let reply = bench.post(&headers, json("a")).await;
        assert_eq!(reply.upstream(), Some("a"), "{reply:?}");
        let seen = bench.upstream("a").last();
        let named: Vec<_> = seen.headers.get_all("x-gateway-destination-endpoint").iter().collect();
        assert_eq!(named, [&*bench.list("a")]);
    }
    let reply = bench.get("/v1/models").await;
    assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
    // Bodies come out as they went in.
    for length in [0, 1, 61_999, 62_001, 1_100_000, 6_000_000] {
        let body = sized("b", length);
        let reply = bench.chat(body.clone()).await;
        assert_eq!(reply.upstream(), Some("b"), "{length} bytes: {reply:?}");
        assert!(bench.upstream("b").last().body == body, "a body of {length} bytes has changed");
    }
    // The first endpoint refuses connections: the second one serves, large bodies too.
    bench.stop_upstream("a").await;
    for length in [10, 6_000_000] {
        let body = sized("a", length);
        let before = bench.picker().heard().len();
        let reply = bench.chat(body.clone()).await;
        assert_eq!(reply.upstream(), Some("b"), "{length} bytes: {reply:?}");
        assert!(bench.upstream("b").last().body == body, "a body of {length} bytes has changed");
        let served = bench.upstream("b").address;
        let heard = bench.picker().heard().split_off(before);
        let is_right = |heard: &Heard| matches!(heard, Heard::Answered(start) if start.served == Some(served));
        assert!(heard.iter().any(is_right), "b served: {heard:?}");
    }
}

async fn large_bodies_pass_side_by_side(bench: Bench) {
    for _ in 0..3 {
        let bodies = (0..8).map(|place| {
            let body = sized(["a", "b", "c"][place % 3], 1_200_000 + place * 50_001);
            let hash = format!("{:016x}", xxh3_64(&body));
            let bench = &bench;
            async move { (bench.chat(body).await, hash) }
        });
        for (reply, hash) in join_all(bodies).await {
            assert_eq!(
                (reply.status, reply.header("x-test-hash")),
                (StatusCode::OK, Some(&*hash)),
                "a body has changed"
            );
        }
    }
}

async fn subsets_are_strict_and_trailers_pass(bench: Bench) {
    let address = |name: &str| bench.upstream(name).address.to_string();
    let both = format!("{}, {}", address("b"), address("c"));
    for (subset, model, expected) in [
        (both.as_str(), "a", Some("b")), // the first of the list that is allowed
        (both.as_str(), "c", Some("c")),
        ("127.0.0.1", "a", Some("a")), // a host: all its ports
        ("10.0.0.1:8000", "a", None),
        ("nonsense", "a", None),
    ] {
        let reply = bench.post(&[("x-test-subset", subset)], json(model)).await;
        assert_eq!(reply.upstream(), expected, "{subset} {model}: {reply:?}");
        if expected.is_none() {
            assert_eq!((reply.status.as_u16(), reply.header("retry-after")), (503, Some("1")));
        }
    }
    let body = sized("b", 150_000);
    let pieces = body.chunks(40_000).map(Bytes::copy_from_slice).collect();
    let reply = bench.chat_with_trailer(pieces).await;
    assert_eq!(reply.upstream(), Some("b"), "{reply:?}");
    assert!(bench.upstream("b").last().body == body, "a body with trailers has changed");
}

/// A chat body of at least this many bytes.
fn sized(model: &str, length: usize) -> Bytes {
    let text: String = (0..length).map(|at| char::from(b'a' + (at * 7 % 26) as u8)).collect();
    Bytes::from(format!(r#"{{"model": "{model}", "text": "{text}"}}"#))
}

async fn refusals_reach_the_caller(bench: Bench) {
    for (model, status, code, retry_after) in [
        ("shed", 429, "all_busy", Some("7")),
        ("nobody", 503, "no_endpoint", Some("1")),
        ("unknown", 404, "model_not_found", None),
        ("malformed", 400, "malformed_json", None),
        ("hang", 504, "decision_timeout", None),
    ] {
        let reply = bench.chat(json(model)).await;
        assert_eq!(reply.status.as_u16(), status, "{model}: {reply:?}");
        assert_eq!(reply.header("retry-after"), retry_after, "{model}");
        assert_eq!(reply.header("content-type"), Some("application/json"), "{model}");
        assert_eq!(reply.json()["error"]["code"], code, "{model}");
    }
    let reply = bench.chat(sized("a", bench::BODY_BYTES_MAX)).await;
    assert_eq!((reply.status.as_u16(), reply.json()["error"]["code"].as_str()), (413, Some("body_too_large")));
    let asked: usize = ["a", "b", "c"].iter().map(|name| bench.upstream(name).count()).sum();
    assert_eq!(asked, 0, "a refused request reached an endpoint");
    // A shed request whose caller is still sending.
    let reply = bench.chat(sized("shed", 4_000_000)).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
}

async fn answers_stream_and_end(bench: Bench) {
    // The upstream sends each event only once the caller has the one before.
    let mut reply = bench.stream("a").await;
    for number in 0..5 {
        bench.upstream("a").send_event();
        assert_eq!(reply.event().await, Some(format!("data: a {number}\n\n")));
    }
    bench.upstream("a").end_events();
    assert_eq!(reply.event().await, None);
    bench.picker().hears(&Heard::Complete).await;
    assert!(!bench.picker().heard().contains(&Heard::GivenUp));
    assert_eq!(bench.picker().heard().iter().filter(|heard| matches!(heard, Heard::Output(_))).count(), 5);
    // A caller who leaves.
    let mut reply = bench.stream("a").await;
    bench.upstream("a").send_event();
    assert!(reply.event().await.is_some());
    drop(reply);
    bench.picker().hears(&Heard::GivenUp).await;
    bench.upstream("a").end_events();
}

async fn a_killed_picker_cuts_answers_and_a_new_one_serves(mut bench: Bench) {
    let mut reply = bench.stream("a").await;
    bench.upstream("a").send_event();
    assert!(reply.event().await.is_some());
    bench.kill_picker();
    assert_eq!(reply.error().await, "cut", "an answer that looks whole");
    bench.upstream("a").end_events();
    let refused = bench.chat(json("b")).await;
    assert!(refused.status.is_server_error(), "no picker, and no fail-open: {refused:?}");
    bench.start_picker().await;
    bench.serves("b").await;
}

async fn without_a_picker_requests_pass_whole_if_they_may(mut bench: Bench) {
    bench.serves("b").await;
    for _ in 0..2 {
        bench.kill_picker();
        bench.misses_the_picker().await;
        for length in [0, 100, 1_300_000, 0, 100, 1_300_000] {
            let body = sized("b", length);
            let hash = format!("{:016x}", xxh3_64(&body));
            let reply = bench.chat(body).await;
            assert_eq!((reply.status, reply.header("x-test-hash")), (StatusCode::OK, Some(&*hash)), "{reply:?}");
        }
        assert_eq!(bench.get("/v1/models").await.status, StatusCode::OK);
        bench.start_picker().await;
        bench.picks_again().await;
    }
}

async fn an_observed_answer_survives_its_picker(mut bench: Bench) {
    let mut reply = bench.stream("a").await;
    bench.upstream("a").send_event();
    assert!(reply.event().await.is_some());
    // The picker's own stream is over from 1.37 on; the booking is not.
    let heard = bench.picker().heard();
    assert!(matches!(heard[..], [Heard::Answered(_)]), "{heard:?}");
    bench.upstream("a").end_events();
    assert_eq!(reply.event().await, None);
    bench.picker().gives_up(1).await; // the end of the second stream does not say whether the answer was whole
    // A caller who leaves.
    let mut reply = bench.stream("a").await;
    bench.upstream("a").send_event();
    assert!(reply.event().await.is_some());
    drop(reply);
    bench.picker().gives_up(2).await;
    bench.upstream("a").end_events();
    if bench.version == OLDEST {
        return; // this release keeps the picker's stream open, and cuts the answer with it
    }
    let mut reply = bench.stream("b").await;
    bench.upstream("b").send_event();
    assert!(reply.event().await.is_some());
    bench.kill_picker();
    for number in 1..4 {
        bench.upstream("b").send_event();
        assert_eq!(reply.event().await, Some(format!("data: b {number}\n\n")));
    }
    bench.upstream("b").end_events();
    assert_eq!(reply.event().await, None);
}

async fn one_endpoint_is_followed_without_a_list_of_endpoints(bench: Bench) {
    for name in ["a", "b", "c"] {
        let spoofed = bench.upstream("c").address.to_string();
        let reply = bench.post(&[("x-gateway-destination-endpoint", &spoofed)], json(name)).await;
        assert_eq!(reply.upstream(), Some(name), "{reply:?}");
        let served = bench.upstream(name).address;
        bench.picker().hears(&Heard::Complete).await;
        let heard = bench.picker().heard();
        let is_right = |heard: &Heard| matches!(heard, Heard::Answered(start) if start.served == Some(served));
        assert!(heard.iter().any(is_right), "{name} served: {heard:?}");
    }
    // Such a cluster takes no list: the option for one endpoint is needed.
    let reply = bench.chat(json("list")).await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE, "{reply:?}");
}
