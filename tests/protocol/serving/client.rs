//! The blocking client against the serving half of a daemon.

use std::time::Duration;

use kvrouted::client::{Client, ClientOptions, Reply};
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, SpaceId, Worker};
use kvrouted::limits::{CONNECTIONS_MAX, WORKERS_PAGE_MAX};
use kvrouted::load::{BookingOutcome, BookingRef, EngineLoad};
use kvrouted::metrics::CoreCounter;
use kvrouted::route::{BookingRequest, RouteRequest};
use kvrouted::serve::{IoBackend, admin_path};
use kvrouted::wire::{PolicyDone, PolicyOrder, ResetDone, ResetOrder};

use super::daemon::{Daemon, on_every_engine};
use super::service::WORKERS;
use crate::kit::options;
use crate::kit::raw::{Raw, encoded, question};

#[test]
fn requests_pipeline_in_order() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 2, CONNECTIONS_MAX);
        let mut client = daemon.client();
        let tokens = vec![0; 4 * 300];
        let mut sent = Vec::new();
        for n in 0..20_000_usize {
            // Replies come to far more than the sockets hold: the client must read while it sends.
            let request = RouteRequest { candidates_max: 4, ..question(&tokens[..n % 300 / 13 * 13 * 4 + 4]) };
            sent.push((client.send_route(&request).unwrap(), request.prompt.token_count() as u64));
        }
        client.flush().unwrap();
        for (id, count) in sent {
            let (got, reply) = client.recv().unwrap();
            let Reply::Route(reply) = reply else { panic!("{reply:?}") };
            assert_eq!((got, reply.candidates[0].worker.id.0, reply.candidates.len()), (id, count, 4));
        }
    });
}

#[test]
fn the_client_asks_books_and_reports() {
    on_every_engine(|engine| {
        let daemon = Daemon::start(engine, 1, CONNECTIONS_MAX);
        let mut client = daemon.client();
        assert_eq!(client.space("llama", Some("other")).unwrap().id, SpaceId(1));
        assert!(client.space("llama", None).unwrap_err().to_string().contains("other"), "two spaces fit");
        let unknown = client.space("gpt", None).unwrap_err();
        assert!(unknown.kind() == Kind::UnknownSpace && unknown.remedy().contains("llama"), "{unknown}");
        let tokens = [0; 16];
        let book = Some(BookingRequest { request_id: "r", attempt: 1 });
        let queued = client.send_route(&question(&tokens)).unwrap();
        let reply = client.route(&RouteRequest { book, explain: true, ..question(&tokens) }).unwrap();
        assert_eq!(reply.candidates[0].name, "worker-7");
        assert_eq!(reply.candidates[0].terms.unwrap().cost, 2.5);
        let handle = BookingRef::Handle(reply.booking.unwrap());
        assert_eq!(client.prefill_complete(&handle).unwrap(), BookingOutcome::Applied);
        let load = EngineLoad { running: 1, kv_usage_millionths: 333_333, ..EngineLoad::default() };
        assert!(client.report_load(SpaceId(1), Worker::new(8, 1), &load).unwrap());
        assert_eq!(client.report_failure(SpaceId(1), Worker::new(8, 1), "gone").unwrap(), 5);
        assert_eq!(client.output_progress(&handle, 0).unwrap(), BookingOutcome::AlreadyApplied);
        assert_eq!(client.output_progress(&handle, 9).unwrap(), BookingOutcome::Applied);
        assert_eq!(client.served(&handle, Worker::new(0, 0)).unwrap(), BookingOutcome::AlreadyApplied);
        assert_eq!(client.served(&handle, Worker::new(8, 1)).unwrap(), BookingOutcome::Applied);
        assert_eq!(client.free(&handle).unwrap(), BookingOutcome::Applied);
        let by_name = BookingRef::Request { request_id: "r", attempt: 0 };
        assert_eq!(client.free(&by_name).unwrap(), BookingOutcome::Superseded);
        let stranger = BookingRef::Request { request_id: "s", attempt: 1 };
        assert_eq!(client.prefill_complete(&stranger).unwrap(), BookingOutcome::Unknown);
        assert_eq!(client.recv().unwrap().0, queued, "what came early is kept");
        assert_eq!(client.overlap(&question(&tokens)).unwrap().workers.len(), 64);
        let all = client.workers(None).unwrap();
        assert_eq!(
            all.iter().map(|info| info.worker.id.0).collect::<Vec<_>>(),
            (0..u64::from(WORKERS)).collect::<Vec<_>>()
        );
        assert_eq!(client.workers(Some(SpaceId(1))).unwrap().len(), WORKERS as usize / 2);
        let error = client.route(&RouteRequest { space: SpaceId(8), ..question(&tokens) }).unwrap_err();
        assert_eq!((error.kind(), error.remedy()), (Kind::UnknownSpace, "ask hello"));
        let counted = |counter| daemon.counters.get(counter);
        assert_eq!((counted(CoreCounter::Routes), counted(CoreCounter::Bookings)), (2, 1));
        assert_eq!((counted(CoreCounter::BookingsFreed), counted(CoreCounter::BookingsUnknown)), (1, 1));
    });
}

#[test]
fn status_is_found_from_either_socket_and_merged() {
    let daemon = Daemon::start(IoBackend::Epoll, 1, CONNECTIONS_MAX);
    assert!(WORKERS as usize > 2 * WORKERS_PAGE_MAX, "more than two pages");
    for path in [daemon.path.clone(), admin_path(&daemon.path)] {
        let mut client = Client::connect_admin(&path, &options()).unwrap();
        let all = client.status().unwrap();
        assert_eq!(
            all.iter().map(|one| one.worker.id.0).collect::<Vec<_>>(),
            (0..u64::from(WORKERS)).collect::<Vec<_>>()
        );
        assert_eq!(all[599].counters[0], ("gaps".to_owned(), 599));
        assert_eq!(client.status_page(0, 7).unwrap().workers.len(), 7);
        assert_eq!(client.route(&question(&[])).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(client.reset(ResetOrder::default()).unwrap(), ResetDone { workers: WORKERS, snapshots: 1 });
        assert_eq!(
            client.reset(ResetOrder { worker: Some(Worker::new(3, 0)), engine_cleared: true }).unwrap().workers,
            1
        );
        let shadow = PolicyOrder::Shadow { settings: &[], share: 0.25 };
        assert_eq!(client.set_policy(&shadow).unwrap(), PolicyDone { policy_version: 1, shadow_share: 0.25 });
        assert_eq!(client.set_policy(&PolicyOrder::EndShadow).unwrap_err().kind(), Kind::InvalidArgument);
    }
    let mut raw = Raw::connect(&admin_path(&daemon.path));
    raw.send(&encoded(|encoder, out| {
        encoder.admin(CorrelationId(7), &kvrouted::wire::AdminRequest::Status { cursor: 0, limit: 0 }, out)
    }));
    assert_eq!(raw.error(7), Kind::HelloRequired);
    raw.send(&[0; 16]);
    assert!(raw.is_at_end());
}

#[test]
fn the_client_gives_up_on_a_silent_daemon_and_says_so_of_an_absent_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mute");
    let _mute = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let impatient = ClientOptions { timeout: Some(Duration::from_millis(20)), ..options() };
    let error = Client::connect(&path, &impatient).unwrap_err();
    assert!(error.kind() == Kind::Connection && error.message().contains("within 20 ms"), "{error}");
    let error = Client::connect(&directory.path().join("absent"), &impatient).unwrap_err();
    assert!(error.kind() == Kind::Connection && error.message().contains("cannot connect"), "{error}");
}
