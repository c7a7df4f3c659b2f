//! Load reports of SGLang's own publisher, and their effect.

use kvrouted::route::{Prompt, RouteRequest};

use super::BLOCK_SIZE;
use super::publisher::{Engine, environment, skip};
use crate::kit::ports::free_port;
use crate::kit::{self, Daemon, until};

#[test]
fn sglang_says_how_busy_it_is_and_is_left_alone_for_it() {
    let python = match environment("sglang") {
        Ok(python) => python,
        Err(reason) => return skip("sglang", &reason),
    };
    let folder = kit::folder();
    let [events, load] = [free_port(), free_port()];
    // It says of its cache, which fills up, how much is in use. What is booked is nothing.
    let config = kit::configure(
        folder.path(),
        &format!(
            "[policy]\nbusy_decode_blocks_share = 0.5\n\
             [[worker]]\nid = 1\nendpoint = \"tcp://127.0.0.1:{events}\"\nload = \"tcp://127.0.0.1:{load}\"\n\
             [[worker]]\nid = 2\n"
        ),
    );
    let daemon = Daemon::serve(std::sync::Arc::clone(&folder), &["--config", kit::text(&config)]);
    let [events, load] = [events, load].map(|port| format!("tcp://*:{port}"));
    let options = [
        "--endpoint",
        &events,
        "--replay-endpoint",
        "",
        "--load-endpoint",
        &load,
        "--block-size",
        BLOCK_SIZE,
        "--wait-conns",
        "1",
    ];
    let engine = Engine::start(folder.path(), &python, "sglang", &options);
    assert_eq!(engine.next_stage()["stage"], "listening", "{}", engine.log());
    assert_eq!(engine.next_stage()["stage"], "published", "{}", engine.log());
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = kit::prompt(1, 64);
    let mut chosen = || {
        let reply = client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens))).expect("a decision");
        reply.candidates.iter().map(|candidate| candidate.worker.id.0).collect::<Vec<_>>()
    };
    until("who is full is out of the running", || chosen() == [2]);
    assert!(daemon.counter("load_reports") > 0);
    let refused = ["load_reports_undecodable", "load_reports_misframed", "load_sources_refused"];
    assert_eq!(refused.map(|counter| daemon.counter(counter)), [0; 3]);
    // What it said is forgotten once it is too old, and bookings alone tell.
    engine.pause();
    until("what it said is forgotten", || chosen().len() == 2);
}
