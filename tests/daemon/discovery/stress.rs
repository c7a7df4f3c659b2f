//! Hundreds of workers are added, changed and removed while others get queries and bookings: answers about those never
//! change.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::{WorkerChange, WorkerOp};

use super::daemon::workers;
use crate::kit::engine::Publisher;
use crate::kit::{Daemon, prompt, until};

const STAYS: Worker = Worker::new(1, 0);
const ROUNDS: u64 = 60;

fn fields(said: &[(&str, String)]) -> Vec<(String, String)> {
    said.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

/// Adds, changes and removes three workers, one of which publishes, over and over.
fn churn(mut admin: Client, endpoint: &str) {
    for round in 0..ROUNDS {
        for id in 2..5_u64 {
            let mut said = vec![("id", id.to_string())];
            if id == 2 {
                said.push(("endpoint", endpoint.to_owned()));
            }
            let said = fields(&said);
            admin.change_worker(&WorkerChange { op: WorkerOp::Add, worker: None, fields: &said }).expect("added");
        }
        let weight = fields(&[("weight", (round + 1).to_string()), ("draining", (round % 2 == 0).to_string())]);
        for id in 2..5_u64 {
            let worker = Some(Worker::new(id, u32::MAX));
            admin.change_worker(&WorkerChange { op: WorkerOp::Set, worker, fields: &weight }).expect("set");
        }
        if round % 3 == 0 {
            std::thread::sleep(std::time::Duration::from_millis(round % 20));
        }
        for id in 2..5_u64 {
            let worker = Some(Worker::new(id, 0));
            admin.change_worker(&WorkerChange { op: WorkerOp::Remove, worker, fields: &[] }).expect("removed");
        }
    }
}

/// Asks and books until told to stop; what is booked is freed. Answers with how often.
fn ask(mut client: Client, space: SpaceId, stay: &[u32], other: &[u32], stop: &AtomicBool) -> u64 {
    let mut asked = 0;
    while !stop.load(Ordering::Relaxed) {
        for (tokens, of_stay) in [(stay, 6), (other, 0)] {
            let name = format!("r{asked}");
            let book = Some(BookingRequest { request_id: &name, attempt: 0 });
            let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
            let reply = client.route(&request).expect("a decision");
            for candidate in &reply.candidates {
                let device = candidate.overlap.device;
                if candidate.worker == STAYS {
                    assert_eq!(device, of_stay, "what stays is answered for as ever");
                } else if of_stay > 0 {
                    assert_eq!(device, 0, "{} never held a block of it", candidate.worker);
                }
            }
            let listed = reply.candidates.iter().any(|candidate| candidate.worker == STAYS);
            assert!(listed || reply.candidates.len() == 8, "who stays is in the running");
            if let Some(handle) = reply.booking {
                match client.free(&BookingRef::Handle(handle)) {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), Kind::Overloaded, "{error}"),
                }
            }
            asked += 1;
        }
    }
    asked
}

#[test]
fn what_stays_is_never_answered_for_otherwise() {
    let (mut stays, mut churned) = (Publisher::new(), Publisher::new());
    let daemon = Daemon::configured(&format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n", stays.endpoint()));
    stays.await_subscription();
    let (stay, other) = (prompt(1, 100), prompt(2, 64));
    stays.store(&stay);
    until("it is heard", || daemon.device(&stay, STAYS) == Some(6));
    let (stop, asked, endpoint) = (AtomicBool::new(false), AtomicU64::new(0), churned.endpoint());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let client = daemon.client();
                let space = client.space("m", None).expect("the space").id;
                asked.fetch_add(ask(client, space, &stay, &other, &stop), Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                churned.store(&other);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let churned = scope.spawn(|| churn(daemon.admin(), &endpoint)).join();
        stop.store(true, Ordering::Relaxed);
        churned.expect("every change is taken");
    });
    until("only who stays is left", || workers(&daemon) == ["1/0 ready config"]);
    assert_eq!(daemon.device(&stay, STAYS), Some(6));
    assert!(asked.load(Ordering::Relaxed) > 0);
    let [added, removed] = [daemon.counter("workers_added"), daemon.counter("workers_removed")];
    assert!(added > 0 && added == removed, "{added} came, {removed} went");
    let status = daemon.status();
    let load = |name: &str| status.workers[0].counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value);
    assert_eq!((load("active_requests"), load("active_decode_blocks")), (Some(0), Some(0)));
}
