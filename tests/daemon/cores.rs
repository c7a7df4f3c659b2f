//! Serving threads: where they run, and when they sleep.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use kvrouted::client::{Client, ClientOptions, LaneUse};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::Candidate;

use crate::kit::{Daemon, configure_serve, folder, options, prompt, serving_threads, text, until};

#[test]
fn a_pinned_core_runs_on_one_processor_and_others_on_any() {
    let processors = |daemon: &Daemon| -> Vec<String> {
        let process = daemon.process.id().to_string();
        let serving = serving_threads(&process);
        let allowed = |thread: i32| {
            let status = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).expect("a thread");
            let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.expect("its processors").trim().to_owned()
        };
        serving.into_iter().map(allowed).collect()
    };
    let own = rustix::thread::sched_getaffinity(None).expect("the processors of this process");
    let pinned = processors(&Daemon::start(&["--cores", "3", "--pin"]));
    assert_eq!(pinned.len(), 3);
    let numbers: BTreeSet<usize> = pinned.iter().map(|list| list.parse().expect("one processor")).collect();
    assert_eq!(numbers.len(), 3.min(own.count() as usize), "spread over the processors there are: {pinned:?}");
    assert!(numbers.iter().all(|processor| own.is_set(*processor)));
    let free = processors(&Daemon::start(&["--cores", "2"]));
    assert!(own.count() == 1 || free.iter().all(|list| list.parse::<usize>().is_err()), "{free:?}");
}

/// How often the one serving thread of a daemon has gone to sleep.
fn sleeps(daemon: &Daemon) -> u64 {
    let process = daemon.process.id().to_string();
    let core = serving_threads(&process).pop_first().expect("a serving thread");
    let status = std::fs::read_to_string(format!("/proc/{process}/task/{core}/status")).expect("a thread");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).expect("how often it gave its processor up")
}

#[test]
fn a_core_that_sleeps_wakes_once_for_a_request() {
    const REQUESTS: u64 = 400;
    // Timers, and who asks for its counters.
    const OTHERS: u64 = REQUESTS / 4;
    let daemon = {
        let folder = folder();
        let file = configure_serve(folder.path(), "io = \"epoll\"\ncores = 1", "[[worker]]\nid = 1\n");
        Daemon::serve(folder, &["--config", text(&file)])
    };
    for lane in [LaneUse::Off, LaneUse::Require] {
        let mut client = Client::connect(&daemon.socket(), &ClientOptions { lane, ..options() }).expect("a connection");
        let space = client.space("m", None).expect("the space").id;
        let before = sleeps(&daemon);
        for request in 0..REQUESTS {
            client.send_route(&RouteRequest::new(space, Prompt::of_tokens(&[1; 16]))).expect("it is sent");
            client.flush().expect("it is sent");
            if request % 2 == 0 {
                // The core sleeps again by the time its reply is taken.
                thread::sleep(Duration::from_millis(1));
            }
            client.recv().expect("a decision");
        }
        let slept = sleeps(&daemon) - before;
        assert!(slept <= REQUESTS + OTHERS, "{lane:?}: {slept} times for {REQUESTS} requests");
    }
}

#[test]
fn a_core_that_does_not_sleep_answers_the_same_and_counts_what_that_paid() {
    // Costs of this mode do not depend on the time.
    let workers = "[policy]\nmode = \"kv\"\n[[worker]]\nid = 1\n[[worker]]\nid = 2\ntaints = [\"a\"]\n";
    let daemons = [0, 20_000].map(|spin_us_max| {
        let folder = folder();
        let file = configure_serve(folder.path(), &format!("cores = 1\nspin_us_max = {spin_us_max}"), workers);
        Daemon::serve(folder, &["--config", text(&file)])
    });
    let mut clients = daemons.each_ref().map(Daemon::client);
    let space = clients[0].space("m", None).expect("the space").id;
    for round in 0..200_u32 {
        let tokens = prompt(round, 16 * (round % 40 + 1));
        let request_id = format!("r{round}");
        let pin = Some(kvrouted::ids::Worker::new(u64::from(round % 2) + 1, 0));
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        let request = RouteRequest { book, pin, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let replies = clients.each_mut().map(|client| client.route(&request).expect("a decision"));
        let [sleeping, looking] = replies.map(|reply| {
            let of = |one: &Candidate| (one.worker, one.overlap, one.trust.level, one.cost);
            (reply.candidates.iter().map(of).collect::<Vec<_>>(), reply.matched, reply.booking.is_some())
        });
        assert_eq!(sleeping, looking);
    }
    assert_eq!(["spins_paid", "spins_in_vain"].map(|name| daemons[0].counter(name)), [0, 0]);
    until("looking has paid", || {
        clients[1].route(&RouteRequest::new(space, Prompt::of_tokens(&[1; 16]))).expect("a decision");
        daemons[1].counter("spins_paid") > 0
    });
    until("it has given up looking, too", || {
        // Asking is work for it as well.
        thread::sleep(Duration::from_millis(100));
        daemons[1].counter("spins_in_vain") > 0
    });
}
