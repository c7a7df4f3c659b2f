//! Modes, rules and policies through a real socket, and a reload by SIGHUP.

use std::sync::mpsc;

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::fleet::WorkerState;
use kvrouted::ids::Worker;
use kvrouted::route::{BookingRequest, Mode, Names, Overrides, Preferences, Prompt, RouteRequest};
use kvrouted::wire::{RouteReply, WatchReply, features};

use crate::kit::{Daemon, WAIT_MAX, prompt, until};

/// Three workers of which one is a CPU, one has labels and an adapter.
const WORKERS: &str = "[[worker]]\nid = 1\ntaints = [\"a\", \"b\"]\nloras = [\"poet\"]\n\
                       [[worker]]\nid = 2\ntaints = [\"b\"]\ncapacity_blocks = 100\n\
                       [[worker]]\nid = 3\ndevice = \"cpu\"\n";

struct Gateway {
    client: Client,
    tokens: &'static [u32],
    booked: u32,
}

impl Gateway {
    fn new(daemon: &Daemon) -> Self {
        Self { client: daemon.client(), tokens: prompt(1, 64).leak(), booked: 0 }
    }

    #[track_caller]
    fn ask<'a>(&mut self, change: impl FnOnce(&mut RouteRequest<'a>)) -> RouteReply {
        let space = self.client.space("m", None).expect("the space").id;
        let mut request = RouteRequest::new(space, Prompt::of_tokens(self.tokens));
        change(&mut request);
        self.client.route(&request).expect("a decision")
    }

    /// Who is chosen in a mode; booked, so that it counts.
    #[track_caller]
    fn book(&mut self, mode: Mode) -> u64 {
        self.booked += 1;
        let request_id = format!("r{}", self.booked);
        let reply = self.ask(|request| {
            request.overrides.mode = Some(mode);
            request.book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        });
        assert_eq!(reply.mode, Some(mode));
        reply.chosen().expect("a worker").worker.id.0
    }
}

fn ids(reply: &RouteReply) -> Vec<u64> {
    let mut ids: Vec<_> = reply.candidates.iter().map(|candidate| candidate.worker.id.0).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn a_request_may_pin_require_prefer_and_override() {
    let daemon = Daemon::configured(WORKERS);
    let mut gateway = Gateway::new(&daemon);
    assert_eq!(gateway.client.hello().features & features::CONSTRAINTS, features::CONSTRAINTS);
    let pinned = gateway.ask(|request| request.pin = Some(Worker::new(2, u32::MAX)));
    assert_eq!(ids(&pinned), [2]);
    assert_eq!(ids(&gateway.ask(|request| request.required_taints = Names::Listed(&["b"]))), [1, 2]);
    assert_eq!(ids(&gateway.ask(|request| request.lora = Some("poet"))), [1], "who has it");
    assert_eq!(ids(&gateway.ask(|request| request.lora = Some("bard"))), [1, 2, 3], "no worker has it loaded");
    for _ in 0..8 {
        let preferred = Preferences { names: Names::Listed(&["a", "b"]), weights: &[-1.0, 0.5] };
        let reply = gateway.ask(|request| {
            request.preferred_taints = preferred;
            request.explain = true;
        });
        assert_eq!(reply.chosen().expect("a worker").worker.id.0, 2);
        let factors: Vec<_> = reply.candidates.iter().map(|it| it.terms.expect("terms").taint_factor).collect();
        assert!(factors[0] < 1.0 && factors[1] == 1.0 && factors[2] > 1.0, "{factors:?}");
    }
    let shared = gateway.ask(|request| {
        (request.shared_hits, request.explain) = (&[(1, 3)], true);
        request.overrides = Overrides { shared_multiplier: Some(0.5), ..Overrides::NONE };
    });
    assert!(shared.candidates.iter().all(|it| it.terms.expect("terms").shared_credit == 1.0), "two blocks of four");
    let error = gateway.client.space("m", None).map(|space| space.id).and_then(|space| {
        let overrides = Overrides { mode: Some(Mode::Direct), ..Overrides::NONE };
        gateway.client.route(&RouteRequest { overrides, ..RouteRequest::new(space, Prompt::of_tokens(&[1])) })
    });
    assert_eq!(error.expect_err("no pin").kind(), Kind::InvalidArgument);
}

#[test]
fn modes_choose_by_what_they_say() {
    let daemon = Daemon::configured(WORKERS);
    let mut gateway = Gateway::new(&daemon);
    let turns: Vec<_> = (0..6).map(|_| gateway.book(Mode::RoundRobin)).collect();
    assert_eq!(turns, [1, 2, 3, 1, 2, 3]);
    let explained = gateway.ask(|request| {
        (request.overrides.mode, request.explain) = (Some(Mode::RoundRobin), true);
    });
    assert_eq!(explained.candidates[0].worker.id.0, 1, "a question does not advance the counter");
    assert_eq!(gateway.book(Mode::RoundRobin), 1);
    // Workers 1 to 3 have 3, 2 and 2 requests in flight: the two GPUs have less for their weight than the CPU.
    assert_eq!(gateway.book(Mode::DeviceAwareWeighted), 2);
    assert_eq!(gateway.book(Mode::LeastLoaded), 3);
    assert!([1, 2, 3].contains(&gateway.book(Mode::Random)));
    let two = gateway.book(Mode::PowerOfTwo);
    assert!([1, 2, 3].contains(&two));
}

#[test]
fn where_nobody_is_eligible_the_answer_says_why_and_is_counted() {
    let daemon = Daemon::configured(&format!("{WORKERS}[policy]\nbusy_decode_blocks_share = 0.01\n"));
    let mut gateway = Gateway::new(&daemon);
    let only: &'static [Worker] = vec![Worker::new(2, 0)].leak();
    let reply = gateway.ask(|request| request.book = Some(BookingRequest { request_id: "a", attempt: 0 }));
    let _ = reply.chosen().expect("all are idle");
    let reply = gateway.ask(|request| {
        request.allow = Some(only);
        request.book = Some(BookingRequest { request_id: "b", attempt: 0 });
    });
    // It may have been chosen before: then it is busy already.
    assert!(reply.chosen().map_or_else(|error| error.kind() == Kind::AllBusy, |chosen| chosen.worker == only[0]));
    let why = |gateway: &mut Gateway, change: &dyn Fn(&mut RouteRequest<'static>)| {
        let reply = gateway.ask(change);
        let error = reply.chosen().expect_err("no worker");
        (error.kind(), error.is_retryable(), reply.retry_after_us, reply.removed)
    };
    let (kind, retryable, after_us, removed) = why(&mut gateway, &|request| request.allow = Some(only));
    assert_eq!((kind, retryable, after_us), (Kind::AllBusy, true, 10_000));
    let others = ("not_allowed".to_owned(), vec![Worker::new(1, 0), Worker::new(3, 0)]);
    assert_eq!(removed, [others, ("busy".to_owned(), only.to_vec())]);
    assert_eq!(why(&mut gateway, &|request| request.pin = Some(only[0])).0, Kind::PinnedBusy);
    let elsewhere = |request: &mut RouteRequest<'static>| {
        (request.allow, request.pin) = (Some(only), Some(Worker::new(1, 0)));
    };
    assert_eq!(why(&mut gateway, &elsewhere).0, Kind::PinnedNotAllowed);
    let (kind, retryable, ..) = why(&mut gateway, &|request| request.required_taints = Names::Listed(&["c"]));
    assert_eq!((kind, retryable), (Kind::AllFiltered, false));
    daemon.worker_ok(&["set", "1", "draining=true"]);
    until("worker 1 drains", || gateway.ask(|request| request.pin = Some(Worker::new(1, 0))).candidates.is_empty());
    assert_eq!(why(&mut gateway, &|request| request.pin = Some(Worker::new(1, 0))).0, Kind::NobodyAvailable);
    for (counter, at_least) in [("routes_all_busy", 1), ("routes_pinned_busy", 1), ("routes_nobody_available", 1)] {
        assert!(daemon.counter(counter) >= at_least, "{counter}");
    }
    assert_eq!((daemon.counter("routes_pinned_not_allowed"), daemon.counter("routes_all_filtered")), (1, 1));
}

#[test]
fn policies_are_replaced_by_sighup_under_the_next_version_or_not_at_all() {
    let daemon = Daemon::configured(&format!("[space.policy]\nmode = \"round-robin\"\n{WORKERS}"));
    let mut gateway = Gateway::new(&daemon);
    let seen = |gateway: &mut Gateway| {
        let reply = gateway.ask(|request| request.explain = true);
        (reply.policy_version, reply.mode.expect("a mode"))
    };
    assert_eq!(seen(&mut gateway), (1, Mode::RoundRobin));
    daemon.reconfigure(&format!("[space.policy]\nmode = \"nobody-knows\"\n{WORKERS}"));
    until("the file is refused", || daemon.counter("config_reloads_refused") == 1);
    assert_eq!(seen(&mut gateway), (1, Mode::RoundRobin));
    daemon.reconfigure(&format!("[policy]\nmode = \"least-loaded\"\n{WORKERS}"));
    until("the policies are replaced", || seen(&mut gateway) == (2, Mode::LeastLoaded));
    // What says the same is no other version.
    daemon.reconfigure(&format!("[policy]\nmode = \"least-loaded\"\n{WORKERS}[[worker]]\nid = 4\n"));
    until("the file is read", || daemon.counter("config_reloads") == 2);
    assert_eq!((seen(&mut gateway), daemon.counter("policies_replaced")), ((2, Mode::LeastLoaded), 1));
}

#[test]
fn what_a_reload_cannot_take_over_is_told_field_by_field_until_it_is_taken_back() {
    let daemon = Daemon::configured(WORKERS);
    let found = || {
        let findings = daemon.status().findings;
        findings.into_iter().find(|finding| finding.name == "restart_pending").map(|finding| finding.what)
    };
    assert_eq!(found(), None);
    let dir = daemon.folder.path().join("journal");
    let tables = format!("[journal]\ndir = \"{}\"\nsample = 0.5\n[booking]\nage_s_max = 60\n{WORKERS}", dir.display());
    daemon.reconfigure(&tables);
    until("it is reported", || found().is_some());
    let what = found().expect("told");
    for field in ["booking.age_s_max", "journal.dir", "journal.sample"] {
        assert!(what.contains(field), "{field}: {what}");
    }
    assert!(!dir.exists() && !what.contains("journal.files_max"), "{what}");
    let told = Daemon::said(&daemon, &["status"]).to_string();
    assert!(told.contains("restart_pending"), "{told}");
    daemon.reconfigure(WORKERS);
    until("it is taken back", || found().is_none());
}

#[test]
fn a_shadow_policy_comes_and_goes_with_sighup() {
    let daemon = Daemon::configured(WORKERS);
    let mut gateway = Gateway::new(&daemon);
    daemon.reconfigure(&format!("[shadow]\nshare = 1.0\npolicy = [\"mode=least-loaded\"]\n{WORKERS}"));
    until("it judges", || {
        gateway.ask(|_| {});
        daemon.counter("shadow_decisions") > 0
    });
    daemon.reconfigure(&format!("[shadow]\nshare = 1.0\npolicy = [\"mode=nobody-knows\"]\n{WORKERS}"));
    until("the file is refused", || daemon.counter("config_reloads_refused") == 1);
    assert!(daemon.counter("shadow_decisions") > 0, "it judges as before");
    daemon.reconfigure(WORKERS);
    until("it has ended", || daemon.counter("shadow_decisions") == 0);
    gateway.ask(|_| {});
    assert!(daemon.status().findings.iter().all(|finding| finding.name != "restart_pending"));
}

#[test]
fn a_gateway_that_chooses_by_itself_is_told_what_every_worker_would_have_to_do() {
    let daemon = Daemon::configured(&format!("[space.policy]\nmode = \"round-robin\"\n{WORKERS}"));
    let mut gateway = Gateway::new(&daemon);
    assert_eq!(gateway.client.hello().features & features::POTENTIAL_LOADS, features::POTENTIAL_LOADS);
    let space = gateway.client.space("m", None).expect("the space").id;
    let question = RouteRequest::new(space, Prompt::of_tokens(gateway.tokens));
    let asked = |gateway: &mut Gateway| {
        let loads = gateway.client.potential_loads(&question).expect("loads");
        assert_eq!(loads.request_blocks, 4);
        let values = loads.workers.iter();
        values.map(|it| (it.worker.id.0, it.active_requests, it.prefill_tokens, it.decode_blocks)).collect::<Vec<_>>()
    };
    assert_eq!(asked(&mut gateway), [(1, 0, 64, 4), (2, 0, 64, 4), (3, 0, 64, 4)]);
    assert_eq!(gateway.book(Mode::RoundRobin), 1, "a question takes no turn");
    daemon.worker_ok(&["set", "3", "draining=true"]);
    until("worker 3 drains", || gateway.ask(|request| request.pin = Some(Worker::new(3, 0))).candidates.is_empty());
    // The first runs the prompt already: its blocks are there, its tokens are still to be computed. Who drains is
    // listed.
    let loads = [(1, 1, 128, 4), (2, 0, 64, 4), (3, 0, 64, 4)];
    assert_eq!(asked(&mut gateway), loads);
    let tokens = gateway.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let said = daemon.said(&["query", "--model", "m", "--tokens", &tokens, "--potential-loads"]);
    let line = |at: usize, name: &str| said["workers"][at][name].as_u64().expect("a number");
    for (at, (worker, requests, prefill, decode)) in loads.into_iter().enumerate() {
        assert_eq!((line(at, "worker_id"), line(at, "active_requests")), (worker, requests));
        assert_eq!((line(at, "prefill_tokens"), line(at, "decode_blocks")), (prefill, decode));
    }
    let unknown = RouteRequest { space: kvrouted::ids::SpaceId(9), ..question };
    assert_eq!(gateway.client.potential_loads(&unknown).expect_err("no space").kind(), Kind::UnknownSpace);
}

#[test]
fn loads_can_be_asked_for_where_only_pinned_requests_are_decided() {
    let daemon = Daemon::configured(&format!("[space.policy]\nmode = \"direct\"\n{WORKERS}"));
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 64);
    let loads = client.potential_loads(&RouteRequest::new(space, Prompt::of_tokens(&tokens))).expect("loads");
    assert_eq!(loads.workers.len(), 3);
}

/// A watch of a space whose replies wait to be taken, each at most for as long as anything here.
fn watch(client: Client) -> impl FnMut() -> Option<WatchReply> {
    let space = client.space("m", None).expect("the space").id;
    let watch = client.watch(Some(space)).expect("a watch");
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || watch.map_while(Result::ok).try_for_each(|reply| tell.send(reply)));
    move || match told.recv_timeout(WAIT_MAX) {
        Ok(reply) => Some(reply),
        Err(mpsc::RecvTimeoutError::Disconnected) => None,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("waited in vain for the fleet to change"),
    }
}

#[test]
fn a_watch_tells_of_the_fleet_at_once_and_after_each_change_until_the_daemon_ends() {
    let mut daemon = Daemon::configured(WORKERS);
    assert_eq!(daemon.client().hello().features & features::WATCH, features::WATCH);
    let mut watches = [watch(daemon.client()), watch(daemon.client())];
    let drains = |reply: &WatchReply, id: u64| {
        reply.workers.iter().any(|info| info.worker.id.0 == id && info.state == WorkerState::Draining)
    };
    let mut versions = [0; 2];
    for (next, version) in watches.iter_mut().zip(&mut versions) {
        let first = next().expect("the fleet");
        let ids: Vec<_> = first.workers.iter().map(|info| info.worker.id.0).collect();
        assert_eq!((ids, drains(&first, 2)), (vec![1, 2, 3], false));
        *version = first.fleet_version;
    }
    daemon.worker_ok(&["set", "2", "draining=true"]);
    for (next, version) in watches.iter_mut().zip(&mut versions) {
        loop {
            let reply = next().expect("the fleet");
            assert!(reply.fleet_version > *version, "no version comes twice");
            *version = reply.fleet_version;
            if drains(&reply, 2) {
                break;
            }
        }
    }
    // The first has left; the other is still told.
    let [_, mut other] = watches;
    daemon.worker_ok(&["set", "3", "draining=true"]);
    while !drains(&other().expect("the fleet"), 3) {}
    assert!(daemon.counter("watches_told") >= 3);
    let mut client = daemon.client();
    let space = Some(kvrouted::ids::SpaceId(9));
    assert_eq!(daemon.client().watch(space).expect_err("no such space").kind(), Kind::UnknownSpace);
    assert_eq!(client.workers(None).expect("workers").len(), 3);
    drop(client);
    assert_eq!(daemon.process.end("-TERM"), Some(0), "who watches keeps no daemon from ending");
    while other().is_some() {}
}
