//! What clients get over `kvrouted connect`, and what each principal may do.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kvrouted::client::{Answer, Client, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::error::{Error, Kind};
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::load::{BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{LaneRequest, features};

use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::raw::{Raw, ask_for_lane};
use crate::kit::remote::{Caller, EAST, Site, WEST, replace_token};
use crate::kit::{WAIT_MAX, asked, prompt, run, skipped, text, until};

/// Routes a prompt and books it under a name.
fn book(client: &mut Client, name: &str) -> kvrouted::wire::RouteReply {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 64);
    let book = Some(BookingRequest { request_id: name, attempt: 0 });
    client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) }).expect("a decision")
}

fn steady(caller: &Caller, lane: LaneUse, timeout: Duration) -> SteadyClient {
    let options = SteadyOptions { name: "far".into(), timeout, lane, ..SteadyOptions::default() };
    SteadyClient::new(&caller.socket, options).expect("a client")
}

fn asked_for(client: &SteadyClient) -> Result<Answer, Error> {
    let tokens = prompt(1, 64);
    client.route(&RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens)))
}

/// Whether the daemon decides, and not the client alone.
fn is_decided(client: &SteadyClient) -> bool {
    matches!(asked_for(client), Ok(Answer::Daemon { .. }))
}

#[test]
fn a_client_of_another_host_routes_books_and_frees_as_a_local_one() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let mut client = east.client();
    let reply = book(&mut client, "r1");
    assert_eq!(reply.candidates[0].worker, Worker::new(1, 0));
    let booking = reply.booking.expect("a booking");
    assert_eq!(daemon.counter("bookings_live"), 1);
    assert_eq!(client.prefill_complete(&BookingRef::Handle(booking)).expect("reported"), BookingOutcome::Applied);
    assert_eq!(client.free(&BookingRef::Handle(booking)).expect("freed"), BookingOutcome::Applied);
    assert_eq!(daemon.counter("bookings_live"), 0);
    assert!(daemon.counter("remote_connections") > 0 && daemon.counter("remote_connections_open_east") > 0);
    assert!(daemon.process.log().contains("principal=east"), "the log names it");
    let output = run(&["query", "--socket", text(&east.socket), "--model", "m", "--tokens", "1,2,3"]);
    assert!(output.status.success(), "{output:?}");
    let status = run(&["status", "--socket", text(&east.socket)]);
    assert!(!status.status.success(), "administration does not come over the port");
    drop(client);
    until("the connection is closed", || daemon.counter("remote_connections_open") == 0);
}

/// Whether a command ends well. If not, reports `what` as skipped.
fn can(what: &str, command: &mut Command) -> bool {
    let why = match command.output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(error) => error.to_string(),
    };
    skipped(what, &why);
    false
}

#[test]
fn the_clients_in_python_and_c_work_unchanged() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let (clients, program) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("clients"), site.path("route"));
    let mut commands = Vec::new();
    let mut compile = Command::new("cc");
    compile.args(["-std=c99", "-O1", "-o", text(&program), text(&clients.join("c/route.c"))]);
    if can("the client in C over the socket of kvrouted connect", &mut compile) {
        let mut compiled = Command::new(&program);
        compiled.args([text(&east.socket), "m"]);
        commands.push(compiled);
    }
    let python = || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", clients.join("python"));
        python
    };
    let what = "the client in Python over the socket of kvrouted connect";
    if can(what, python().args(["-c", "import kvrouted"])) {
        let mut example = python();
        example.arg(clients.join("python/examples/route.py")).args([text(&east.socket), "m", "1,2,3"]);
        commands.push(example);
    }
    for mut command in commands {
        let freed = daemon.counter("bookings_freed");
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).starts_with("send the prompt to worker"), "{output:?}");
        assert_eq!(daemon.counter("bookings_freed"), freed + 1);
    }
}

#[test]
fn a_lane_is_refused_and_clients_go_on_without_one() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let mut raw = Raw::connect(&east.socket);
    let hello = raw.hello(None).expect("hello");
    assert_eq!(hello.features & features::LANES, 0, "none is offered");
    assert_eq!(hello.admin_socket, None, "a path of another host");
    let (reply, descriptors) = ask_for_lane(&mut raw.stream, LaneRequest::default());
    let kvrouted::client::Reply::Error(error) = reply else { panic!("a lane over TCP: {reply:?}") };
    assert_eq!((error.kind, descriptors.len()), (Some(Kind::Unsupported), 0));
    assert!(error.message.contains("another host") && !error.remedy.is_empty(), "{error:?}");
    assert_eq!((daemon.counter("lanes_refused_remote"), daemon.counter("lanes_open")), (1, 0));
    raw.assert_served();
    let client = steady(&east, LaneUse::Try, WAIT_MAX);
    assert!(is_decided(&client) && !client.has_lane());
}

#[test]
fn a_principal_can_do_nothing_with_the_session_and_the_bookings_of_another() {
    let site = Site::new();
    let daemon = site.plain_daemon();
    let (east, west) = (site.caller("east", &[]), site.caller("west", &[]));
    let session = SessionToken { hi: 7, lo: 9 };
    let mut owner = Raw::connect(&east.socket);
    owner.hello(Some(session)).expect("hello");
    assert_eq!(Raw::connect(&west.socket).hello(Some(session)), Err(Kind::NotPermitted), "another principal");
    assert_eq!(Raw::connect(&daemon.socket()).hello(Some(session)), Err(Kind::NotPermitted), "a local user");
    assert!(Raw::connect(&east.socket).hello(Some(session)).is_ok(), "the same principal, by another connection");
    let mut client = east.client();
    let booking = book(&mut client, "r1").booking.expect("a booking");
    for stranger in [&mut west.client(), &mut daemon.client()] {
        let freed = stranger.free(&BookingRef::Handle(booking)).expect("an answer");
        assert_eq!(freed, BookingOutcome::Unknown);
    }
    assert_eq!(daemon.counter("bookings_live"), 1);
    assert_eq!(client.free(&BookingRef::Handle(booking)).expect("freed"), BookingOutcome::Applied);
}

#[test]
fn the_connections_of_a_principal_leave_some_for_others_and_for_local_clients() {
    let site = Site::new();
    site.configure("", "connections_max = 4", "");
    let daemon = site.daemon();
    let (east, west) = (site.caller("east", &[]), site.caller("west", &[]));
    let greeted = |caller: &Caller| Raw::greeted(&caller.socket);
    let mut held: Vec<Raw> = (0..3).map(|_| greeted(&east)).collect();
    let refused = east.refusal();
    assert!(refused.kind() == Kind::Connection && refused.to_string().contains("principal"), "{refused}");
    held.push(greeted(&west));
    assert!(west.refusal().to_string().contains("too many connections"));
    assert_eq!((daemon.counter("remote_refused_share"), daemon.counter("remote_refused_full")), (1, 1));
    held.iter_mut().for_each(Raw::assert_served);
    Raw::greeted(&daemon.socket()).assert_served();
    drop(held);
    until("the places are given back", || east.try_client().is_ok());
}

#[test]
fn a_local_user_with_the_number_of_a_principal_is_refused() {
    use crate::security::identity::Someone;
    if !rustix::process::geteuid().is_root() {
        return skipped("a user with a principal's number", "only root can become one");
    }
    let site = Site::new();
    site.configure("socket_mode = \"0666\"", "", "");
    let daemon = site.daemon();
    std::fs::set_permissions(site.folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("opened");
    let with = |uid| Someone::without_groups(uid).greets(&daemon.socket(), None).map(drop);
    assert_eq!(with(1 << 31), Err(Kind::NotPermitted));
    assert_eq!(with((1 << 31) - 1), Ok(()));
}

#[test]
fn tokens_are_replaced_while_clients_are_served_and_a_token_that_has_gone_is_cut_off() {
    const NEW: &str = "east-new-456789abcdef0123456789abcdef";
    let site = Site::new();
    let daemon = site.plain_daemon();
    let (east, west) = (site.caller("east", &[]), site.caller("west", &[]));
    let (mut early, mut other) = (Raw::greeted(&east.socket), Raw::greeted(&west.socket));
    let reload = |lines: &str| {
        let reloads = daemon.counter("config_reloads");
        site.write_principals(lines);
        daemon.process.signal("-HUP");
        until("the principals are read", || daemon.counter("config_reloads") > reloads);
    };
    reload(&format!("east {EAST}\neast {NEW}\nwest {WEST}\n"));
    early.assert_served();
    replace_token(&site.path("east.token"), NEW);
    east.process.signal("-HUP");
    until("the token is read", || east.process.log().contains("are read again"));
    let mut late = Raw::greeted(&east.socket);
    reload(&format!("east {NEW}\nwest {WEST}\n"));
    assert!(early.is_at_end(), "its token has gone");
    [&mut late, &mut other].into_iter().for_each(Raw::assert_served);
    assert_eq!(daemon.counter("remote_revoked"), 1);
    // A file that cannot be used changes nothing.
    let refused = daemon.counter("config_reloads_refused");
    site.write_principals("east short\n");
    daemon.process.signal("-HUP");
    until("it is refused", || daemon.counter("config_reloads_refused") > refused);
    assert!(daemon.process.log().contains("line 1: the token has 5 bytes"));
    late.assert_served();
    Raw::greeted(&east.socket).assert_served();
}

#[test]
fn a_caller_without_a_daemon_closes_at_once_and_serves_when_there_is_one() {
    let site = Site::new();
    site.configure("", "", "");
    let metrics = free_port().to_string();
    let east = site.caller("east", &["--metrics-port", &metrics]);
    let refused = east.refusal();
    assert!(refused.kind() == Kind::Connection && refused.is_retryable(), "{refused}");
    assert!(refused.to_string().contains("cannot be reached"), "{refused}");
    let client = steady(&east, LaneUse::Off, WAIT_MAX);
    assert!(!is_decided(&client));
    let _daemon = site.daemon();
    until("the client finds it", || is_decided(&client));
    book(&mut east.client(), "r1");
    let (_, page) = scrape(metrics.parse().expect("a port"));
    assert!(page.contains("kvrouted_connect_failed_tcp_total") && page.contains("kvrouted_connect_connections_open"));
}

#[test]
fn a_client_decides_alone_when_the_daemon_dies_and_returns_to_the_next_one() {
    let site = Site::new();
    let mut daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let client = steady(&east, LaneUse::Off, WAIT_MAX);
    assert!(is_decided(&client));
    assert_eq!(daemon.process.end("-KILL"), None);
    until("it decides alone", || matches!(asked_for(&client), Ok(Answer::Fallback(_))));
    let alone = asked_for(&client).expect("an answer");
    assert_eq!(alone.best(), Some(Worker::new(1, 0)), "among the workers that it knows");
    let _next = site.daemon();
    until("the next one decides", || is_decided(&client));
}

#[test]
fn bookings_of_a_caller_that_dies_end_with_their_sessions() {
    let site = Site::new();
    site.configure("", "", "[booking]\nsession_grace_s = 0\n");
    let daemon = site.daemon();
    let mut east = site.caller("east", &[]);
    let mut client = east.client();
    book(&mut client, "r1");
    assert_eq!(daemon.counter("bookings_live"), 1);
    assert_eq!(east.process.end("-KILL"), None);
    until("the booking has ended", || daemon.counter("bookings_live") == 0);
    assert_eq!(daemon.counter("remote_connections_open"), 0);
}

#[test]
fn clients_that_connect_together_all_get_through_also_where_the_host_has_a_name() {
    let site = Site::new();
    let _daemon = site.plain_daemon();
    let east = site.caller("east", &["--to", &format!("localhost:{}", site.address.port())]);
    // It finds all of them waiting at once, as when its clients return after a restart.
    east.process.signal("-STOP");
    let clients: Vec<Raw> = (0..32).map(|_| Raw::connect(&east.socket)).collect();
    east.process.signal("-CONT");
    for mut client in clients {
        client.hello(None).expect("a connection");
    }
}

#[test]
fn a_peer_that_answers_nothing_costs_a_client_its_own_deadline_only() {
    let site = Site::new();
    // It accepts and says nothing.
    let _silent = TcpListener::bind(site.address).expect("a port");
    let east = site.caller("east", &[]);
    let client = steady(&east, LaneUse::Off, Duration::from_millis(200));
    assert!(!is_decided(&client), "after its own deadline");
    let refused = east.refusal();
    assert!(refused.to_string().contains("takes too long"), "{refused}");
}

#[test]
fn a_drained_daemon_answers_over_the_port_what_it_has_read() {
    let site = Site::new();
    let mut daemon = site.plain_daemon();
    let east = site.caller("east", &[]);
    let mut raw = Raw::greeted(&east.socket);
    raw.assert_served();
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    assert!(raw.is_at_end());
    let page = asked(&east.socket, &["query", "--model", "m", "--tokens", "1,2"]);
    assert!(page.is_err());
}
