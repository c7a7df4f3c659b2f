//! A daemon under attack, an engine that behaves, and another client whose every answer must name what that engine holds.

use std::path::Path;

use kvrouted::client::Client;
use kvrouted::ids::Worker;
use kvrouted::route::{Prompt, RouteRequest};

use crate::attackers::Attackers;
use crate::kit::engine::BLOCK_SIZE;
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, configure_serve, folder, open_descriptors, options, prompt, text, until, until_ok};
use crate::trial::{Answers, Bystander, Trial, Usage, Watch};

/// Descriptors that may have come by chance: a file of the log, a probe.
const DESCRIPTORS_MARGIN: usize = 4;
/// Tokens of the prompt that the other client asks for, which the engine that behaves holds.
const PROMPT_TOKENS: u32 = 8 * BLOCK_SIZE;

/// See the head of the file.
pub(crate) struct Scene {
    pub(crate) daemon: Daemon,
    pub(crate) engine: Engine,
    descriptors_before: usize,
    watch: Watch,
    bystander: Bystander,
}

impl Scene {
    /// A daemon with `serve` in its `[serve]` and with `tables` beside the engine that behaves, which is worker 1.
    pub(crate) fn configured(serve: &str, tables: &str) -> Self {
        let (folder, engine) = (folder(), Engine::new());
        // Attackers may be other users.
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("opened");
        let config = configure_serve(folder.path(), serve, &format!("{}{tables}", worker_table(&engine)));
        Self::of(Daemon::serve(folder, &["--config", text(&config)]), engine)
    }

    /// A daemon that runs already and has this engine as worker 1.
    pub(crate) fn of(daemon: Daemon, engine: Engine) -> Self {
        let socket = daemon.socket();
        Self::asked_at(&socket, daemon, engine)
    }

    /// The same, whose other client asks at a socket.
    pub(crate) fn asked_at(socket: &Path, daemon: Daemon, mut engine: Engine) -> Self {
        engine.await_subscription();
        engine.store(&prompt(1, PROMPT_TOKENS));
        until("the engine is heard", || daemon.device(&prompt(1, PROMPT_TOKENS), Worker::new(1, 0)) == Some(8));
        daemon.status();
        let process = daemon.process.id();
        let bystander = Bystander::begin(asks(socket));
        let (watch, descriptors_before) = (Watch::begin(process), open_descriptors(process));
        Self { daemon, engine, descriptors_before, watch, bystander }
    }

    /// Processes of a role come to the daemon's socket for the time of the trial.
    pub(crate) fn attacked_by(&self, trial: &Trial, role: &'static str, count: u64) -> Attackers {
        Attackers::start(role, count, text(&self.daemon.socket()), trial.lasts())
    }

    /// Makes a worker of each endpoint that the attackers offer, from 2 on, with these fields.
    pub(crate) fn workers_of(&self, attackers: &Attackers, fields: impl Fn(u64, &serde_json::Value) -> String) {
        let offers = attackers.offers();
        for (id, offer) in (2..).zip(offers.iter().flat_map(|list| list.as_array().expect("a list"))) {
            self.daemon.worker_ok(&["add", &format!("id={id},{}", fields(id, offer))]);
        }
    }

    /// A counter of the daemon.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.daemon.counter(name)
    }

    /// A counter of all workers but the one that behaves, in sum.
    pub(crate) fn counter_of_others(&self, name: &str) -> u64 {
        let workers = self.daemon.status().workers;
        let others = workers.iter().filter(|worker| worker.worker != Worker::new(1, 0));
        others.flat_map(|worker| &worker.counters).filter(|(of, _)| of == name).map(|(_, count)| count).sum()
    }

    /// Whether the daemon has a finding of this name.
    pub(crate) fn is_found(&self, name: &str) -> bool {
        self.daemon.status().findings.iter().any(|finding| finding.name == name)
    }

    /// The attack is over: the daemon has held if the other client's answers were right, its memory within the bound,
    /// and nothing of the attackers is left.
    #[track_caller]
    pub(crate) fn end(self, trial: &mut Trial, memory_mib_max: u64) {
        let Self { daemon, engine, descriptors_before, watch, bystander } = self;
        trial.answered(bystander.end());
        until_ok("what the attackers took is given back", || {
            let status = daemon.status();
            let counter = |name: &str| status.counters.iter().find(|(of, _)| of == name).map_or(0, |(_, count)| *count);
            let open = counter("connections").saturating_sub(counter("connections_closed"));
            let (bookings, descriptors) = (counter("bookings_live"), open_descriptors(daemon.process.id()));
            // The status request has had a connection itself.
            let is_back = open <= 1 && bookings == 0 && descriptors <= descriptors_before + DESCRIPTORS_MARGIN;
            let left =
                || format!("{open} open, {bookings} bookings, {descriptors} of {descriptors_before} descriptors");
            if is_back { Ok(()) } else { Err(left()) }
        });
        trial.used(watch.end(), memory_mib_max);
        let answer = asks(&daemon.socket())();
        trial.must(answer.is_ok(), || format!("after the attack: {answer:?}"));
        let log = daemon.process.log();
        trial.must(!log.contains("panicked"), || log.lines().filter(|line| line.contains("panicked")).collect());
        drop((daemon, engine));
    }

    /// The parts, for an attack that ends the daemon or starts it again.
    pub(crate) fn taken_apart(self) -> (Daemon, Engine, Usage, Answers) {
        let Self { daemon, engine, watch, bystander, .. } = self;
        (daemon, engine, watch.end(), bystander.end())
    }
}

/// An engine as worker 1 in a configuration.
pub(crate) fn worker_table(engine: &Engine) -> String {
    format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n", engine.publisher.endpoint())
}

/// The tables of a daemon that writes snapshots below a folder, with an engine as worker 1 that can replay.
pub(crate) fn snapshot_tables(folder: &Path, engine: &Engine) -> String {
    let (snapshots, replay) = (folder.join("snapshots"), &engine.replayer.endpoint);
    let table = format!("[snapshot]\ndir = \"{}\"\nevery_s = 1\n", snapshots.display());
    format!("{table}{}replay = \"{replay}\"\n", worker_table(engine))
}

/// Asks who should run a prompt; the answer must be worker 1 with all of the prompt's blocks.
pub(crate) fn asks(socket: &Path) -> impl FnMut() -> Result<(), String> + Send + use<> {
    let mut client = Client::connect(socket, &options()).expect("a connection");
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, PROMPT_TOKENS);
    move || {
        let question = RouteRequest { candidates_max: 1, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let reply = client.route(&question).map_err(|error| error.to_string())?;
        let best = reply.candidates.first().map(|best| (best.worker, best.overlap.device));
        if best == Some((Worker::new(1, 0), PROMPT_TOKENS / BLOCK_SIZE)) { Ok(()) } else { Err(format!("{reply:?}")) }
    }
}
