//! Traces of a daemon: real requests, and a collector that decodes the bytes by itself.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use kvrouted::client::{Client, TraceContext};
use kvrouted::load::{BookingHandle, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

use crate::kit::collector::{Collector, Manner, Span};
use crate::kit::engine::Publisher;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, configure_serve, prompt, serving_threads, text, until};

const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const PARENT: u64 = 0x00f0_67aa_0ba9_02b7;

const fn context(trace_id: u128, flags: u8) -> Option<TraceContext> {
    Some(TraceContext { trace_id, span_id: PARENT, flags })
}

fn name(trace_id: u128) -> String {
    format!("{trace_id:032x}")
}

/// A daemon with one worker that publishes nothing, and these tables too.
fn daemon(collector_url: &str, traces: &str, tables: &str) -> Daemon {
    Daemon::configured(&format!("[traces]\nendpoint = \"{collector_url}\"\n{traces}\n[[worker]]\nid = 1\n{tables}"))
}

/// Asks for a worker with this context, and books it if there is a name.
fn route(client: &mut Client, trace: Option<TraceContext>, book: Option<&str>) -> Option<BookingHandle> {
    let (tokens, space) = (prompt(1, 64), client.space("m", None).expect("the space").id);
    let book = book.map(|request_id| BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { trace, book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a decision").booking
}

#[test]
fn a_request_of_a_traced_caller_gets_spans_in_its_trace() {
    let (collector, mut publisher) = (Collector::start(Manner::Takes), Publisher::new());
    let worker = format!("[[worker]]\nid = 7\nendpoint = \"{}\"\n", publisher.endpoint());
    let traces = "sample_ratio = 0.0\nservice_name = \"router\"\ninstance = \"router-1\"\n";
    let tables = format!("[traces]\nendpoint = \"{}\"\n{traces}{worker}", collector.url());
    let mut daemon = Daemon::configured(&tables);
    publisher.await_subscription();
    publisher.store(&prompt(1, 32));
    until("the blocks are there", || daemon.said(&["status"])["workers"][0]["last_seq"].as_u64() == Some(0));
    let mut client = daemon.client();
    let booking = route(&mut client, context(TRACE, 1), Some("a-name-of-the-gateway")).expect("a booking");
    client.prefill_complete(&BookingRef::Handle(booking)).expect("reported");
    client.output_progress(&BookingRef::Handle(booking), 21).expect("reported");
    client.free(&BookingRef::Handle(booking)).expect("freed");
    until("both spans have come", || collector.trace(&name(TRACE)).len() == 2);
    let spans = collector.trace(&name(TRACE));
    let (route, booking) = (&spans["route"], &spans["booking"]);
    assert_eq!((&*route.parent, route.kind, route.status), ("00f067aa0ba902b7", 2, 0));
    assert_eq!((&booking.parent, booking.kind, booking.status), (&route.id, 1, 0));
    let of = |span: &Span, key: &str| span.attributes.get(key).cloned().unwrap_or_else(|| panic!("no {key}: {span:?}"));
    let expected = [
        ("kvrouted.worker", "7/0"),
        ("kvrouted.outcome", "booked"),
        ("kvrouted.model", "m"),
        ("kvrouted.mode", "latency"),
        ("kvrouted.prompt_tokens", "64"),
        ("kvrouted.prompt_blocks", "4"),
        ("kvrouted.overlap_blocks", "2"),
        ("kvrouted.overlap_device_blocks", "2"),
        ("kvrouted.trust", "exact"),
        ("kvrouted.eligible_workers", "1"),
    ];
    expected.iter().for_each(|(key, value)| assert_eq!(of(route, key), *value, "{key}"));
    let expected = [
        ("kvrouted.worker", "7/0"),
        ("kvrouted.end", "freed"),
        ("kvrouted.prefill_tokens", "32"),
        ("kvrouted.cached_tokens", "32"),
        ("kvrouted.output_tokens", "21"),
    ];
    expected.iter().for_each(|(key, value)| assert_eq!(of(booking, key), *value, "{key}"));
    assert!(route.start_ns <= route.end_ns && route.start_ns == booking.start_ns, "{route:?} {booking:?}");
    let (event, at_ns) = &booking.events[0];
    assert!(event == "prefill_complete" && (booking.start_ns..=booking.end_ns).contains(at_ns), "{booking:?}");
    let of_sender: Vec<_> = route.resource.iter().map(|(key, value)| (&**key, &**value)).collect();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        of_sender,
        [("service.instance.id", "router-1"), ("service.name", "router"), ("service.version", version)]
    );
    let head = collector.head().to_ascii_lowercase();
    assert!(head.starts_with("post /v1/traces http/1.1") && head.contains("application/x-protobuf"), "{head}");
    let said = collector.bytes();
    let text = String::from_utf8_lossy(&said);
    assert!(!text.contains("a-name-of-the-gateway"), "no names that gateways give");
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

#[test]
fn the_caller_decides_what_is_traced_and_a_share_of_the_rest_is() {
    let collector = Collector::start(Manner::Takes);
    let daemon = daemon(&collector.url(), "sample_ratio = 0.0", "");
    let mut client = daemon.client();
    // The callers that do not record, those without a context, and those whose context is not valid.
    for context in [context(1, 0), None, context(0, 1), Some(TraceContext { trace_id: 2, span_id: 0, flags: 1 })] {
        route(&mut client, context, None);
    }
    route(&mut client, context(3, 1), None);
    until("the last request is traced", || !collector.trace(&name(3)).is_empty());
    assert_eq!(collector.spans().len(), 1, "{:?}", collector.spans());
    assert_eq!(collector.spans()[0].attributes["kvrouted.outcome"], "chosen", "it asked for no booking");
    assert_eq!((daemon.counter("traced_requests"), daemon.counter("trace_contexts_invalid")), (1, 2));

    let collector = Collector::start(Manner::Takes);
    let daemon = self::daemon(&collector.url(), "sample_ratio = 1.0", "");
    let mut client = daemon.client();
    // A caller that records nothing is heard even so. A context that is not valid starts a trace anew.
    for context in [context(1, 0), None, context(0, 1)] {
        route(&mut client, context, None);
    }
    until("two traces begin", || collector.spans().len() == 2);
    let spans = collector.spans();
    assert!(spans.iter().all(|span| span.parent.is_empty() && span.trace != name(1)), "{spans:?}");
    assert!(spans[0].trace != spans[1].trace && spans.iter().all(|span| span.trace != name(0)));
}

#[test]
fn bookings_whose_ends_were_lost_keep_no_span_from_later_ones() {
    const LATER: u128 = 1 << 64;
    let collector = Collector::start(Manner::Takes);
    // 4 ends may wait, and 32 bookings be open.
    let daemon = daemon(&collector.url(), "sample_ratio = 0.0\nqueue_max = 4", "");
    let mut client = daemon.client();
    let mut asked = 0..;
    let mut book = |client: &mut Client| {
        let number: u128 = asked.next().expect("numbers");
        route(client, context(1000 + number, 1), Some(&number.to_string())).expect("a booking")
    };
    while daemon.counter("trace_records_lost") < 96 {
        let mut handles = Vec::new();
        for _ in 0..8 {
            handles.extend((0..4).map(|_| book(&mut client)));
            // The exporting thread takes what waits every 50 ms.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        for handle in handles {
            client.free(&BookingRef::Handle(handle)).expect("freed");
        }
    }
    let mut later = LATER..;
    until("a booking has its span again", || {
        let trace = later.next().expect("numbers");
        let handle = route(&mut client, context(trace, 1), Some(&trace.to_string())).expect("a booking");
        client.free(&BookingRef::Handle(handle)).expect("freed");
        std::thread::sleep(std::time::Duration::from_millis(100));
        collector.spans().iter().any(|span| span.name == "booking" && span.trace >= name(LATER))
    });
}

#[test]
fn a_request_that_waits_has_a_span_for_its_wait_and_one_that_waits_in_vain_an_error() {
    let collector = Collector::start(Manner::Takes);
    let policy = "batched_tokens_max = 100\n[policy]\nmode = \"kv\"\nqueue_threshold = 0.5\n";
    let daemon = daemon(&collector.url(), "", policy);
    let mut client = daemon.client();
    let first = route(&mut client, None, Some("first")).expect("a booking");
    let waiting = |trace_id, deadline_us: u32| {
        let mut client = daemon.client();
        std::thread::spawn(move || {
            let (tokens, space) = (prompt(2, 64), client.space("m", None).expect("the space").id);
            let book = Some(BookingRequest { request_id: "second", attempt: 0 });
            let plain = RouteRequest::new(space, Prompt::of_tokens(&tokens));
            client.route(&RouteRequest { trace: context(trace_id, 1), book, deadline_us, ..plain }).map(drop)
        })
    };
    let in_vain = waiting(5, 1000).join().expect("no panic");
    assert!(in_vain.is_err(), "its deadline passes");
    let waits = waiting(6, 60_000_000);
    until("it waits", || daemon.counter("queue_queued") == 2);
    client.free(&BookingRef::Handle(first)).expect("freed");
    waits.join().expect("no panic").expect("a decision");
    until("their spans have come", || collector.trace(&name(6)).len() >= 2 && !collector.trace(&name(5)).is_empty());
    let spans = collector.trace(&name(6));
    let (route, queue) = (&spans["route"], &spans["queue"]);
    assert_eq!((&queue.parent, queue.start_ns), (&route.id, route.start_ns));
    assert!(queue.end_ns > queue.start_ns && queue.end_ns <= route.end_ns, "{queue:?} {route:?}");
    let refused = &collector.trace(&name(5))["route"];
    assert_eq!((refused.status, &*refused.attributes["error.type"]), (2, "deadline_passed"));
    // The deadline counts from the decision, the span from when the request entered the queue.
    assert!(refused.end_ns > refused.start_ns, "{refused:?}");
}

/// The daemon's findings about traces.
fn finds(daemon: &Daemon) -> Vec<String> {
    let status = daemon.said(&["status"]);
    let names = status["findings"].as_array().expect("findings").iter().filter_map(|found| found["finding"].as_str());
    names.filter(|name| name.starts_with("traces_")).map(str::to_owned).collect()
}

/// Requests to a daemon whose collector does not do its work.
const REQUESTS: u64 = 1500;

/// The daemon answers every request of a traced caller, and accounts for every span, whatever its collector does.
fn answers_all(collector_url: &str, timeout_ms: u64) -> Daemon {
    let daemon = daemon(collector_url, &format!("timeout_ms = {timeout_ms}\nqueue_max = 64"), "");
    let mut client = daemon.client();
    for number in 0..REQUESTS {
        let booking = route(&mut client, context(1 + u128::from(number), 1), Some(&number.to_string()));
        client.free(&BookingRef::Handle(booking.expect("a booking"))).expect("freed");
    }
    assert_eq!(daemon.counter("routes"), REQUESTS);
    daemon
}

/// Waits until each decision and each end of a booking has become a span that went somewhere.
fn accounts_for_all(daemon: &Daemon) {
    until("every span is accounted for", || {
        let counter = |name| daemon.counter(name);
        let ended = ["trace_spans_sent", "trace_spans_dropped", "trace_spans_given_up", "trace_spans_refused"];
        let ended: u64 = ended.map(counter).iter().sum();
        // Of a decision without room, the booking has no span, and its end is not counted.
        let lost = counter("trace_records_lost") + counter("trace_bookings_untracked");
        ended + lost <= 2 * REQUESTS && ended + 2 * lost >= 2 * REQUESTS
    });
}

#[test]
fn a_collector_that_refuses_hangs_or_never_ends_costs_spans_and_no_request() {
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
    let manners = [
        Manner::Hangs,
        Manner::Drips,
        Manner::Status(429, "Retry-After: 999999999\r\n"),
        Manner::Status(500, ""),
        Manner::Status(307, "Location: http://127.0.0.1:1/\r\n"),
    ];
    let collectors = manners.map(|manner| (format!("{manner:?}"), Collector::start(manner).url()));
    let closed = ("a closed port".to_owned(), format!("http://127.0.0.1:{closed}"));
    for (what, url) in collectors.into_iter().chain([closed]) {
        let mut daemon = answers_all(&url, 50);
        until(&format!("{what}: failures are counted"), || daemon.counter("trace_exports_failed") > 0);
        assert_eq!(daemon.counter("trace_spans_sent"), 0, "{what}");
        until(&format!("{what}: spans are counted"), || {
            let names = ["trace_records_lost", "trace_spans_dropped", "trace_spans_given_up", "trace_spans_refused"];
            names.iter().any(|name| daemon.counter(name) > 0)
        });
        let warnings = daemon.process.log().matches("the collector does not take traces").count();
        assert_eq!(warnings, 1, "{what}: it is said once");
        until(&format!("{what}: it is a finding"), || finds(&daemon) == ["traces_undelivered"]);
        assert_eq!(daemon.process.end("-TERM"), Some(0), "{what}: it ends all the same");
    }
}

#[test]
fn a_collector_whose_reply_never_ends_has_taken_the_spans() {
    let collector = Collector::start(Manner::Endless);
    // The end of its reply is not waited for, however long that is allowed.
    let daemon = answers_all(&collector.url(), 30_000);
    until("it has taken a batch", || daemon.counter("trace_exports") > 0);
    accounts_for_all(&daemon);
    until("what it has taken counts as sent", || daemon.counter("trace_spans_sent") == collector.spans().len() as u64);
}

#[test]
fn a_collector_that_comes_back_gets_what_still_waits_and_rejections_are_counted() {
    let collector = Collector::start(Manner::Status(503, ""));
    let mut daemon = daemon(&collector.url(), "sample_ratio = 0.0", "");
    let mut client = daemon.client();
    route(&mut client, context(TRACE, 1), None);
    until("the collector is busy", || daemon.counter("trace_exports_failed") > 0);
    collector.answers(Manner::Takes);
    until("it has taken the span", || collector.trace(&name(TRACE)).len() == 1);
    until("that is counted", || daemon.counter("trace_spans_sent") == 1);
    assert!(daemon.process.log().contains("the collector takes traces again"));
    until("a pause of the collector is no finding", || finds(&daemon).is_empty());
    collector.answers(Manner::Rejects);
    route(&mut client, context(9, 1), None);
    until("a rejection is counted", || daemon.counter("trace_spans_refused") == 1);
    until("it is a finding", || finds(&daemon) == ["traces_undelivered"]);
    assert_eq!(daemon.counter("trace_spans_sent"), 1);
    // The last span is sent although its batch is not due.
    collector.answers(Manner::Takes);
    route(&mut client, context(10, 1), None);
    drop(client);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    assert_eq!(collector.trace(&name(10)).len(), 1);
}

#[test]
fn bookings_without_room_for_their_spans_are_counted_and_a_finding() {
    let collector = Collector::start(Manner::Takes);
    let daemon = daemon(&collector.url(), "sample_ratio = 1.0\nqueue_max = 2", "");
    let mut client = daemon.client();
    let bookings = 4 * kvrouted::limits::TRACE_BOOKINGS_PER_RECORD;
    for number in 0..bookings {
        route(&mut client, None, Some(&number.to_string())).expect("a booking");
    }
    until("some have no room", || {
        daemon.counter("trace_bookings_untracked") + daemon.counter("trace_records_lost") > 0
    });
    until("it is a finding", || finds(&daemon) == ["traces_lost"]);
    assert_eq!(daemon.counter("trace_exports_failed"), 0);
}

/// The metrics page for a scraper that accepts this.
fn page(port: u16, accept: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the port");
    let request = format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asked");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("answered");
    page
}

#[test]
fn the_histogram_of_decisions_has_exemplars_for_who_accepts_openmetrics() {
    let (collector, port) = (Collector::start(Manner::Takes), free_port());
    let daemon = daemon(&collector.url(), "sample_ratio = 0.0", &format!("[metrics]\nport = {port}\n"));
    let mut client = daemon.client();
    let scraped = || page(port, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
    route(&mut client, None, None);
    assert!(!scraped().contains(" # {"), "no request is traced yet");
    route(&mut client, context(TRACE, 1), None);
    until("the bucket has an exemplar", || scraped().contains(" # {"));
    let page = scraped();
    let line = page.lines().find(|line| line.contains(" # {")).expect("an exemplar");
    let (sample, exemplar) = line.split_once(" # ").expect("an exemplar");
    assert!(exemplar.starts_with(&format!("{{trace_id=\"{}\",span_id=\"", name(TRACE))), "{line}");
    let bound = sample.strip_prefix("kvrouted_decision_seconds_bucket{le=\"").and_then(|rest| rest.split('"').next());
    let bound: f64 = bound.expect("a bucket").parse().unwrap_or(f64::INFINITY);
    let value: f64 = exemplar
        .split("} ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .expect("a value")
        .parse()
        .expect("a number");
    assert!(value > 0.0 && value <= bound, "{line}");
    assert!(!self::page(port, "text/plain").contains(" # {"), "not for others");
    assert!(page.ends_with("# EOF\n"));
}

#[test]
fn a_selection_over_http_joins_the_trace_of_its_header() {
    let (collector, port) = (Collector::start(Manner::Takes), free_port());
    let _daemon = daemon(&collector.url(), "sample_ratio = 0.0", &format!("[http]\nport = {port}\n"));
    let select = |traceparent: &str| {
        let body = "{\"model_name\":\"m\",\"token_ids\":[1,2,3],\"selection_id\":\"s\"}";
        let head = format!("POST /select HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n", body.len());
        let more = format!("Content-Type: application/json\r\nConnection: close\r\ntraceparent: {traceparent}\r\n\r\n");
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the port");
        stream.write_all(format!("{head}{more}{body}").as_bytes()).expect("asked");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("answered");
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    };
    select("00-1-2-01");
    select(&TraceContext { trace_id: TRACE, span_id: PARENT, flags: 1 }.to_string());
    until("its span has come", || !collector.spans().is_empty());
    assert_eq!(collector.trace(&name(TRACE))["route"].parent, "00f067aa0ba902b7");
    assert_eq!(collector.spans().len(), 1);
}

/// Requests to each daemon in a turn, and turns.
const MEASURED: u64 = 2000;
const TURNS: usize = 15;

/// Processor time of the serving thread of a daemon, nanoseconds.
fn serving_ns(daemon: &Daemon) -> u64 {
    let process = daemon.process.id().to_string();
    let thread = *serving_threads(&process).first().expect("a serving thread");
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/schedstat")).expect("its figures");
    text.split(' ').next().and_then(|ns| ns.parse().ok()).expect("a number")
}

/// Prints what traces add to a booked route, in processor time of the serving thread. It asserts no time: run it on a quiet
/// machine, in release.
#[test]
#[ignore = "a measurement: cargo test --release --test daemon -- --ignored --nocapture the_cost_of_traces"]
fn the_cost_of_traces() {
    let collector = Collector::start(Manner::Takes);
    let of_ratio = |ratio: &str| format!("[traces]\nendpoint = \"{}\"\nsample_ratio = {ratio}\n", collector.url());
    let kinds =
        [("off", String::new()), ("off again", String::new()), ("1 %", of_ratio("0.01")), ("all", of_ratio("1.0"))];
    let daemons = kinds.map(|(kind, traces)| {
        // Nothing else may use the serving thread.
        let folder = crate::kit::folder();
        let config = configure_serve(folder.path(), "cores = 1\n", &format!("[[worker]]\nid = 1\n{traces}"));
        (kind, Daemon::serve(folder.clone(), &["--config", text(&config)]), Vec::new())
    });
    let mut daemons = Vec::from(daemons);
    for _ in 0..TURNS {
        for (_, daemon, times) in &mut daemons {
            let mut client = daemon.client();
            route(&mut client, None, None);
            let before = serving_ns(daemon);
            for number in 0..MEASURED {
                let booking = route(&mut client, None, Some(&number.to_string())).expect("a booking");
                client.free(&BookingRef::Handle(booking)).expect("freed");
            }
            times.push((serving_ns(daemon) - before) / MEASURED);
        }
    }
    for (kind, daemon, mut times) in daemons {
        times.sort_unstable();
        let (median, traced) = (times[TURNS / 2], daemon.counter("traced_requests"));
        println!("traces {kind}: {median} ns of the serving thread for a route and its end, {traced} requests traced");
    }
}
