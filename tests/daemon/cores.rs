//! Serving threads: what they ask of the allocator, where they run, and when they do not sleep.

#![cfg(feature = "daemon")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kvrouted::client::{Client, ClientOptions, LaneUse};
use kvrouted::config;
use kvrouted::hash;
use kvrouted::ids::LocalHash;
use kvrouted::load::{BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::wire::Candidate;

mod process;
use process::publisher::{Publisher, SCHEME};
use process::{Daemon, folder, options, prompt, replace, text, until, until_ok};

/// Counts what one thread asks for.
struct Counting;

/// Whose requests for memory are counted; 0 = nobody's. Relaxed, as is the count: whoever reads one has made the other
/// thread answer a request since, and sockets order that.
static COUNTED_THREAD: AtomicI32 = AtomicI32::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

impl Counting {
    fn count() {
        let counted = COUNTED_THREAD.load(Ordering::Relaxed);
        if counted != 0 && rustix::thread::gettid().as_raw_nonzero().get() == counted {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[expect(unsafe_code, reason = "an allocator is unsafe to make")]
// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::count();
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time counts.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The serving threads of a process, by their kernel ids.
fn serving_threads(process: &str) -> BTreeSet<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("threads").flatten();
    let is_serving = |path: &Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim_end().starts_with("kvrouted-core-"))
    };
    let serving = tasks.filter(|task| is_serving(&task.path()));
    serving.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// A configuration of a space `m` with blocks of 16 tokens.
fn configuration(folder: &Path, serve: &str, workers: &str) -> PathBuf {
    let (file, socket) = (folder.join("kvrouted.toml"), folder.join("s"));
    let space = "[[space]]\nmodel = \"m\"\nblock_size = 16\n";
    replace(&file, &format!("[serve]\nsocket = \"{}\"\n{serve}\n{space}{workers}", socket.display()));
    file
}

/// A daemon on threads of this process, and the kernel's id of its one serving thread. It stays until the process ends.
fn daemon_within(serve: &str, workers: &str) -> (PathBuf, i32) {
    let before = serving_threads("self");
    let folder = folder();
    let file = configuration(folder.path(), serve, workers);
    let config = config::load(Some(&file), &config::Flags::default()).expect("a configuration");
    let socket = folder.path().join("s");
    thread::spawn(move || {
        let _folder = folder;
        kvrouted::daemon::run(&config, &|| unreachable!("nobody sends SIGHUP")).expect("it runs");
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
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        COUNTED_THREAD.store(core, Ordering::Relaxed);
        self.ask(requests, books);
        COUNTED_THREAD.store(0, Ordering::Relaxed);
        ALLOCATIONS.load(Ordering::Relaxed) - before
    }
}

/// Requests until everything has the size that it stays at.
const WARM_REQUESTS: usize = 3000;
/// Requests that are counted.
const COUNTED_REQUESTS: usize = 500;

#[test]
fn a_core_answers_without_asking_for_memory_once_it_is_warm() {
    let _alone = ONE_AT_A_TIME.lock();
    let tokens: Vec<Vec<u32>> = (0..24).map(|seed| prompt(seed, 1600 + seed)).collect();
    let hashes: Vec<Vec<u8>> = tokens.iter().map(|tokens| local_hashes(tokens)).collect();
    let mut publisher = Publisher::new();
    let workers = format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n[[worker]]\nid = 2\n", publisher.endpoint());
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
        let asking = gateway.allocations(core, COUNTED_REQUESTS, false);
        let booking = gateway.allocations(core, COUNTED_REQUESTS, true);
        assert_eq!((asking, booking), (0, 0), "{engine}");
    }
}

fn local_hashes(tokens: &[u32]) -> Vec<u8> {
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(tokens), &[], &mut locals);
    locals.iter().flat_map(|LocalHash(hash)| hash.to_le_bytes()).collect()
}

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
        let file = configuration(folder.path(), "io = \"epoll\"\ncores = 1", "[[worker]]\nid = 1\n");
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
    let workers = "[[worker]]\nid = 1\n[[worker]]\nid = 2\ntaints = [\"a\"]\n";
    let daemons = [0, 20_000].map(|spin_us_max| {
        let folder = folder();
        let file = configuration(folder.path(), &format!("cores = 1\nspin_us_max = {spin_us_max}"), workers);
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
