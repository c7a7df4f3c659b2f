//! Learnt prefill times outlast the daemon. A file of them that cannot be used is named and ignored.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvrouted::load::{BookingRef, LearntLaws};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::snapshot::{decode_laws, encode_laws};
use tempfile::TempDir;

use crate::kit::http::scrape;
use crate::kit::ports::free_port;
use crate::kit::{Daemon, configure, folder, prompt, text, until, until_ok};

/// A folder whose daemons have two workers without events, of one class.
struct Site {
    folder: Arc<TempDir>,
    port: u16,
}

impl Site {
    fn new() -> Self {
        Self { folder: folder(), port: free_port() }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("snapshots/prefill-laws")
    }

    /// A daemon whose workers have these fields, with more flags.
    fn start(&self, fields: &str, flags: &[&str]) -> Daemon {
        let tables = format!(
            "[log]\nlevel = \"info\"\n[metrics]\nport = {}\n[snapshot]\ndir = {:?}\nevery_s = 1\n\
             [[worker]]\nid = 1\nengine_class = \"c\"\n{fields}\n[[worker]]\nid = 2\nengine_class = \"c\"\n{fields}\n",
            self.port,
            self.folder.path().join("snapshots"),
        );
        let config = configure(self.folder.path(), &tables);
        Daemon::serve(Arc::clone(&self.folder), &[&["--config", text(&config)], flags].concat())
    }

    /// The class's time for a token, as the daemon has learnt it from this many prefills since its start.
    fn token_s(&self, samples: u64) -> f64 {
        let sample = |page: &str, name: &str| -> f64 {
            let prefix = format!("kvrouted_prefill_{name}{{class=\"c\"}} ");
            let value = page.lines().find_map(|line| line.strip_prefix(&prefix));
            value.expect("a sample").parse().expect("a number")
        };
        // The daemon serves a page more than once.
        until_ok("the page shows it", || {
            let (_, page) = scrape(self.port);
            let shown = sample(&page, "samples_total");
            if shown == samples as f64 { Ok(sample(&page, "token_seconds")) } else { Err(format!("{shown} samples")) }
        })
    }

    /// Counters of samples: since the start, and before it.
    fn samples(daemon: &Daemon) -> [u64; 2] {
        ["prefill_samples", "prefill_samples_restored"].map(|name| daemon.counter(name))
    }
}

/// Runs prompts one after the other, each of which is computed much faster than by the guess that the daemon begins with.
fn teach(daemon: &Daemon, prompts: u32) {
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    for at in 0..prompts {
        let (tokens, request_id) = (prompt(at, 1600), format!("r{at}"));
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let booking = client.route(&request).expect("a reply").booking.map(BookingRef::Handle).expect("a booking");
        std::thread::sleep(Duration::from_millis(1));
        client.prefill_complete(&booking).expect("a reply");
        client.free(&booking).expect("a reply");
    }
}

/// A file's numbers are those that were written, but for the last digit.
#[track_caller]
fn assert_near(one: f64, other: f64) {
    assert!((one / other - 1.0).abs() < 1e-12, "{one} {other}");
}

fn learnt(site: &Site) -> LearntLaws {
    decode_laws(&std::fs::read(site.file()).expect("a file")).expect("laws")
}

#[test]
fn what_was_learnt_outlasts_a_stop_and_a_kill() {
    let site = Site::new();
    let mut daemon = site.start("", &[]);
    let guess_s = site.token_s(0);
    assert_eq!(Site::samples(&daemon), [0, 0]);
    teach(&daemon, 20);
    let learnt_s = site.token_s(20);
    assert!(learnt_s < guess_s / 2.0, "{learnt_s} {guess_s}");
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    assert_eq!(learnt(&site).classes[0].samples, 20);

    let mut daemon = site.start("", &[]);
    assert_eq!(Site::samples(&daemon), [0, 20]);
    assert_near(site.token_s(0), learnt_s);
    assert!(daemon.process.log().contains("learnt prefill times are restored"), "{}", daemon.process.log());
    teach(&daemon, 3);
    assert_eq!(Site::samples(&daemon), [3, 20]);
    until("it is written", || learnt(&site).classes[0].samples == 23);
    let learnt_s = site.token_s(3);
    assert_eq!(daemon.process.end("-KILL"), None);

    let mut daemon = site.start("", &[]);
    assert_eq!(Site::samples(&daemon), [0, 23]);
    assert_near(site.token_s(0), learnt_s);
    let reset = crate::kit::run(&["reset", "--socket", text(&daemon.socket())]);
    assert!(reset.status.success() && site.file().exists(), "a reset is about blocks");
    assert_eq!(daemon.process.end("-TERM"), Some(0));

    let daemon = site.start("", &["--fresh"]);
    assert_eq!((Site::samples(&daemon), site.file().exists()), ([0, 0], false));
    assert_near(site.token_s(0), guess_s);
}

/// Writes a file, starts a daemon on it and expects that it begins with nothing learnt, for this reason.
fn expect_refused(site: &Site, bytes: &[u8], reason: &str) {
    std::fs::write(site.file(), bytes).expect("written");
    let mut daemon = site.start("", &[]);
    assert_eq!((Site::samples(&daemon), daemon.counter(&format!("snapshot_{reason}"))), ([0, 0], 1), "{reason}");
    let log = daemon.process.log();
    // The daemons of a folder share a log.
    let line = log.lines().rfind(|line| line.contains("learnt prefill times are not used"));
    assert!(line.is_some_and(|line| line.contains(reason) && line.contains("remedy")), "{reason}: {log}");
    teach(&daemon, 1);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    assert_eq!(learnt(site).classes[0].samples, 1, "{reason}: it is replaced");
}

#[test]
fn a_file_that_cannot_be_used_is_named_and_replaced() {
    let site = Site::new();
    let mut daemon = site.start("", &[]);
    teach(&daemon, 5);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let bytes = std::fs::read(site.file()).expect("a file");

    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        bytes
    };
    expect_refused(&site, &with(bytes.len() / 2, b'\0'), "checksum");
    expect_refused(&site, &with(8, 2), "other_version");
    expect_refused(&site, &bytes[..bytes.len() - 1], "truncated");
    expect_refused(&site, b"{}", "truncated");
    expect_refused(&site, &[b'x'; 64], "not_a_snapshot");
    // Right bytes, and constants that no report could have taught.
    let mut laws = decode_laws(&bytes).expect("laws");
    laws.classes[0].factors[1] = 1e6;
    expect_refused(&site, &encode_laws(&laws).expect("bytes"), "implausible");
}

#[test]
fn a_preset_that_was_changed_wins_over_a_law_that_differs_from_it() {
    let site = Site::new();
    let mut daemon = site.start("", &[]);
    teach(&daemon, 20);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let mut daemon = site.start("engine_preset = \"32b-tp2\"", &[]);
    assert_eq!(Site::samples(&daemon), [0, 0]);
    assert_near(site.token_s(0), 47.7e-6);
    let log = daemon.process.log();
    assert!(log.contains("engine_preset was changed"), "{log}");
    teach(&daemon, 20);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    // It differs just as much from the preset that it was learnt from.
    let daemon = site.start("engine_preset = \"32b-tp2\"", &[]);
    assert_eq!(Site::samples(&daemon), [0, 20]);
}
