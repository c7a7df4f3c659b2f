//! A warm serving thread allocates nothing. The daemon runs on threads of this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use kvrouted::client::Client;
use kvrouted::config;
use kvrouted::hash;
use kvrouted::ids::LocalHash;
use kvrouted::load::{BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

use crate::kit::engine::{Publisher, SCHEME};
use crate::kit::{configure_serve, folder, options, prompt, serving_threads, until, until_ok};

/// A daemon on threads of this process, and the kernel's id of its one serving thread. It stays until the process ends.
fn daemon_within(serve: &str, workers: &str) -> (PathBuf, i32) {
    let before = serving_threads("self");
    let folder = folder();
    let file = configure_serve(folder.path(), serve, workers);
    let config =
        config::load(Some(&file), &config::Environment::default(), &config::Flags::default()).expect("a configuration");
    let socket = folder.path().join("s");
    thread::spawn(move || {
        let _folder = folder;
        kvrouted::daemon::run(&config, Arc::new(|| unreachable!("no test sends SIGHUP"))).expect("it runs");
    });
    until("the daemon serves", || Client::connect(&socket, &options()).is_ok());
    let serving = *serving_threads("self").difference(&before).next().expect("a serving thread");
    (socket, serving)
}

/// What a gateway does with a request.
struct Gateway<'a> {
    client: Client,
    prompts: Vec<Prompt<'a>>,
    asked: u64,
}

impl Gateway<'_> {
    /// Asks for every prompt in turn; with `books` it books, reports and frees, by handle and by name.
    fn ask(&mut self, requests: usize, books: bool) {
        let space = self.client.space("m", None).expect("the space").id;
        for _ in 0..requests {
            self.asked += 1;
            let prompt = self.prompts[self.asked as usize % self.prompts.len()];
            let request_id = format!("request-of-a-gateway-{:010}", self.asked);
            let named = BookingRequest { request_id: &request_id, attempt: 0 };
            let request = RouteRequest { book: books.then_some(named), ..RouteRequest::new(space, prompt) };
            let reply = self.client.route(&request).expect("a decision");
            let Some(handle) = reply.booking else { continue };
            let booking = match self.asked.is_multiple_of(2) {
                true => BookingRef::Handle(handle),
                false => BookingRef::Request { request_id: &request_id, attempt: 0 },
            };
            assert_eq!(self.client.prefill_complete(&booking).expect("told"), BookingOutcome::Applied);
            assert_eq!(self.client.free(&booking).expect("freed"), BookingOutcome::Applied);
        }
    }

    /// How often the core asks for memory meanwhile.
    fn allocations(&mut self, core: i32, requests: usize, books: bool) -> u64 {
        crate::allocations(core, || self.ask(requests, books))
    }
}

/// Requests until everything has the size that it stays at.
const WARM_REQUESTS: usize = 3000;
/// Requests that are counted.
const COUNTED_REQUESTS: usize = 500;
/// Rounds of that many requests until one asks for no memory.
const ROUNDS_MAX: usize = 3;
/// Records that may wait for the journal's thread.
const BUFFERS: usize = 4;

#[test]
fn a_core_answers_without_asking_for_memory_once_it_is_warm() {
    let _alone = crate::ONE_AT_A_TIME.lock();
    let tokens: Vec<Vec<u32>> = (0..24).map(|seed| prompt(seed, 1600 + seed)).collect();
    let hashes: Vec<Vec<u8>> = tokens.iter().map(|tokens| local_hashes(tokens)).collect();
    let mut publisher = Publisher::new();
    // A name that is longer than most, which replies write in another way.
    let name = "n".repeat(100);
    let workers =
        format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n[[worker]]\nid = 2\nname = \"{name}\"\n", publisher.endpoint());
    let engines = match kvrouted::serve::probe_uring() {
        Ok(()) => ["epoll", "uring"].as_slice(),
        Err(_) => &["epoll"],
    };
    for engine in engines {
        let (socket, core) = daemon_within(&format!("io = \"{engine}\"\ncores = 1"), &workers);
        publisher.await_subscription();
        tokens.iter().step_by(2).for_each(|tokens| publisher.store(&tokens[..800]));
        let mut client = Client::connect(&socket, &options()).expect("a connection");
        let space = client.space("m", None).expect("the space").id;
        until_ok("the blocks are there", || {
            let reply =
                client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens[22]))).map_err(|e| e.to_string())?;
            let held = reply.candidates.iter().find(|of| of.worker.id.0 == 1).map_or(0, |of| of.overlap.device);
            if held == 50 { Ok(()) } else { Err(format!("{held} blocks")) }
        });
        let prompts = tokens.iter().zip(&hashes).flat_map(|(tokens, hashes)| {
            let token_count = tokens.len() as u32;
            [Prompt::of_tokens(tokens), Prompt::LocalHashes { hashes, scheme: SCHEME, token_count }]
        });
        let mut gateway = Gateway { client, prompts: prompts.collect(), asked: 0 };
        gateway.ask(WARM_REQUESTS, true);
        gateway.ask(COUNTED_REQUESTS, false);
        for books in [false, true] {
            // What grows with what other threads do beside the core may do so once more. A request that asks for memory
            // shows in each round.
            let mut rounds = (0..ROUNDS_MAX).map(|_| gateway.allocations(core, COUNTED_REQUESTS, books));
            assert!(rounds.any(|allocations| allocations == 0), "{engine}, books = {books}: it asked in each round");
        }
    }
}

#[test]
fn a_core_that_records_for_the_journal_asks_for_no_memory_either() {
    let _alone = crate::ONE_AT_A_TIME.lock();
    let journal = folder();
    // With few buffers all of them are in use soon; decisions without one are lost and counted.
    let tables = format!(
        "[[worker]]\nid = 1\n[[worker]]\nid = 2\n[journal]\ndir = \"{}\"\nring_records_max = {BUFFERS}\n",
        journal.path().join("journal").display()
    );
    let (socket, core) = daemon_within("cores = 1", &tables);
    let client = Client::connect(&socket, &options()).expect("a connection");
    let tokens: Vec<Vec<u32>> = (0..24).map(|seed| prompt(seed, 1600 + seed)).collect();
    let prompts = tokens.iter().map(|tokens| Prompt::of_tokens(tokens)).collect();
    let mut gateway = Gateway { client, prompts, asked: 0 };
    gateway.ask(WARM_REQUESTS, true);
    // A buffer grows when it is first used, and may once more, for a larger decision. How many are in use at once hangs on
    // the thread that writes.
    let mut rounds = (0..=2 * BUFFERS).map(|_| gateway.allocations(core, COUNTED_REQUESTS, true));
    assert!(rounds.any(|allocations| allocations == 0), "it asked for memory in each round");
    let bytes = || {
        let files = std::fs::read_dir(journal.path().join("journal")).expect("its folder").flatten();
        files.filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>()
    };
    until("decisions and ends were written", || bytes() > 100_000);
}

fn local_hashes(tokens: &[u32]) -> Vec<u8> {
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(tokens), &[], &mut locals);
    locals.iter().flat_map(|LocalHash(hash)| hash.to_le_bytes()).collect()
}
