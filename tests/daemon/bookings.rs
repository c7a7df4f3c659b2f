//! Bookings outlast the daemon: a stop, a kill, and whatever lies where they were.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::ids::Worker;
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use rustix::io::IoSliceMut;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;

use crate::kit::{Daemon, Process, WAIT_MAX, configure, folder, options, prompt, text, until};

const GATEWAY: SessionToken = SessionToken { hi: 3, lo: 4 };
/// The line of shell that becomes the daemon.
const EXEC: &str = "exec \"$0\" \"$@\"";

/// A folder whose daemons have two workers without events.
struct Site {
    folder: Arc<TempDir>,
}

impl Site {
    /// Images are written this often, to the folder of snapshots if there is one.
    fn new(image_ms: u64, has_folder: bool) -> Self {
        let folder = folder();
        let dir = folder.path().join("snapshots");
        let dir = if has_folder { format!("dir = {dir:?}\n") } else { String::new() };
        let tables = format!(
            "[log]\nlevel = \"info\"\n[snapshot]\n{dir}bookings_image_ms = {image_ms}\n\
             [[worker]]\nid = 1\n[[worker]]\nid = 2\n"
        );
        configure(folder.path(), &tables);
        Self { folder }
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("kvrouted.toml")
    }

    fn start(&self, flags: &[&str]) -> Daemon {
        Daemon::serve(Arc::clone(&self.folder), &[&["--config", text(&self.config())], flags].concat())
    }

    /// Starts the daemon by a line of shell.
    fn start_by(&self, line: &str) -> Daemon {
        let config = self.config();
        let arguments = ["serve", "--config", text(&config)];
        let process = Process::start_by(self.folder.path(), "daemon", line, &arguments);
        Daemon::served_by(process, Arc::clone(&self.folder))
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("snapshots/bookings")
    }
}

/// A connection of the gateway.
fn gateway(daemon: &Daemon) -> Client {
    let options = ClientOptions { session: Some(GATEWAY), ..options() };
    Client::connect(&daemon.socket(), &options).expect("a connection")
}

fn book(client: &mut Client, request_id: &str, seed: u32) -> BookingHandle {
    book_on(client, request_id, seed, None)
}

fn book_on(client: &mut Client, request_id: &str, seed: u32, pin: Option<Worker>) -> BookingHandle {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(seed, 320);
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { book, pin, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a reply").booking.expect("a booking")
}

fn free(client: &mut Client, booking: BookingHandle) -> BookingOutcome {
    client.free(&BookingRef::Handle(booking)).expect("a reply")
}

fn free_named(client: &mut Client, request_id: &str) -> BookingOutcome {
    client.free(&BookingRef::Request { request_id, attempt: 0 }).expect("a reply")
}

/// Prefill tokens, decode blocks and requests of both workers.
fn loads(daemon: &Daemon) -> Vec<[u64; 3]> {
    let of = |worker| {
        ["active_prefill_tokens", "active_decode_blocks", "active_requests"]
            .map(|name| daemon.worker_counter(worker, name))
    };
    (0..2).map(of).collect()
}

/// Waits for two more images: the second one began after this call. Without a change there is none, so a request named
/// `nudge` comes and goes.
fn wait_for_image(daemon: &Daemon, client: &mut Client) {
    let before = daemon.counter("booking_images_written");
    until("an image is written", || {
        let booking = book(client, "nudge", 9);
        assert_eq!(free(client, booking), BookingOutcome::Applied);
        daemon.counter("booking_images_written") >= before + 2
    });
}

#[test]
fn a_stop_keeps_loads_handles_names_and_the_instance() {
    let site = Site::new(0, true);
    let mut daemon = site.start(&[]);
    let mut client = gateway(&daemon);
    let instance = client.hello().instance_id;
    let [first, second, third, ended] =
        [("a", 1), ("b", 1), ("c", 2), ("ended", 3)].map(|(name, seed)| book(&mut client, name, seed));
    client.prefill_complete(&BookingRef::Handle(first)).expect("a reply");
    assert_eq!(free(&mut client, ended), BookingOutcome::Applied);
    let before = loads(&daemon);
    assert_eq!(before.iter().map(|load| load[2]).sum::<u64>(), 3);
    assert_eq!(daemon.process.end("-TERM"), Some(0));

    let mut daemon = site.start(&[]);
    assert_eq!(loads(&daemon), before);
    assert_eq!((daemon.counter("bookings_restored"), daemon.counter("sessions_restored")), (3, 1));
    let mut stranger = daemon.client();
    assert_eq!(stranger.hello().instance_id, instance);
    assert_eq!(free(&mut stranger, first), BookingOutcome::Unknown, "another session's");
    // Once more, before the gateway comes back.
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let mut daemon = site.start(&[]);
    assert_eq!(loads(&daemon), before);
    let mut client = gateway(&daemon);
    assert_eq!(client.hello().instance_id, instance);
    assert_eq!(client.prefill_complete(&BookingRef::Handle(second)).expect("a reply"), BookingOutcome::Applied);
    assert_eq!(free(&mut client, first), BookingOutcome::Applied);
    assert_eq!(free(&mut client, second), BookingOutcome::Applied);
    assert_eq!(free_named(&mut client, "c"), BookingOutcome::Applied);
    assert_eq!(free(&mut client, third), BookingOutcome::AlreadyApplied);
    assert_eq!(free(&mut client, ended), BookingOutcome::AlreadyApplied);
    assert_eq!(loads(&daemon), [[0; 3]; 2]);
    let next = book(&mut client, "next", 9);
    assert!(next.generation > third.generation + (1 << 40));

    // A fresh start knows none of it.
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let daemon = site.start(&["--fresh"]);
    let mut client = gateway(&daemon);
    assert_ne!(client.hello().instance_id, instance);
    assert_eq!((free(&mut client, next), daemon.counter("bookings_live")), (BookingOutcome::Unknown, 0));
}

#[test]
fn a_kill_costs_what_came_after_the_last_image() {
    // No image is due while the test runs.
    let site = Site::new(3_600_000, true);
    let mut daemon = site.start(&[]);
    let kept = book(&mut gateway(&daemon), "kept", 1);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let mut daemon = site.start(&[]);
    let mut client = gateway(&daemon);
    let instance = client.hello().instance_id;
    let lost = book(&mut client, "lost", 2);
    assert_eq!(daemon.process.end("-KILL"), None);
    let daemon = site.start(&[]);
    let mut client = gateway(&daemon);
    assert_eq!(client.hello().instance_id, instance);
    // Both have the slot, and only one is the other.
    let next = book(&mut client, "next", 3);
    assert_eq!(next.slot as u32, lost.slot as u32);
    assert_eq!(free_named(&mut client, "lost"), BookingOutcome::Unknown);
    assert_eq!(free(&mut client, lost), BookingOutcome::Unknown);
    assert_eq!(daemon.counter("bookings_live"), 2);
    assert_eq!(free(&mut client, kept), BookingOutcome::Applied);
    assert_eq!(free(&mut client, next), BookingOutcome::Applied);
    assert_eq!(loads(&daemon), [[0; 3]; 2]);
}

#[test]
fn twenty_kills_under_load_lose_nothing_that_an_image_has() {
    let site = Site::new(10, true);
    let mut daemon = site.start(&[]);
    let instance = gateway(&daemon).hello().instance_id;
    for round in 0..20 {
        let ends = AtomicBool::new(false);
        let mut client = gateway(&daemon);
        let names = |of: &str| (0..5).map(|at| format!("{of}-{round}-{at}")).collect::<Vec<_>>();
        let (sure, late) = (names("sure"), names("late"));
        let of_load = |at: usize| format!("load-{round}-{}", at % 7);
        let (kept, others) = std::thread::scope(|scope| {
            let mut other = gateway(&daemon);
            let ends = &ends;
            scope.spawn(move || {
                for at in 0_usize.. {
                    let space = other.space("m", None).expect("the space").id;
                    let (tokens, name) = (prompt(at as u32 % 5, 160), of_load(at));
                    let book = Some(BookingRequest { request_id: &name, attempt: 0 });
                    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
                    // The last of them fails, when the daemon is killed.
                    if other.route(&request).is_err() || ends.load(Ordering::Relaxed) {
                        break;
                    }
                    let named = BookingRef::Request { request_id: &name, attempt: 0 };
                    if other.free(&named).is_err() {
                        break;
                    }
                }
            });
            let kept: Vec<_> = sure.iter().map(|name| book(&mut client, name, 1)).collect();
            wait_for_image(&daemon, &mut client);
            let others: Vec<_> = late.iter().map(|name| book(&mut client, name, 2)).collect();
            assert_eq!(daemon.process.end("-KILL"), None);
            ends.store(true, Ordering::Relaxed);
            (kept, others)
        });
        daemon = site.start(&[]);
        let mut client = gateway(&daemon);
        assert_eq!(client.hello().instance_id, instance, "round {round}");
        let outcomes: Vec<_> = kept.iter().map(|booking| free(&mut client, *booking)).collect();
        assert_eq!(outcomes, [BookingOutcome::Applied; 5], "round {round}");
        for (name, booking) in late.iter().zip(others) {
            let outcome = free(&mut client, booking);
            assert!(
                [BookingOutcome::Applied, BookingOutcome::Unknown].contains(&outcome),
                "round {round}: {outcome:?}"
            );
            assert_ne!(free_named(&mut client, name), BookingOutcome::Applied, "round {round}");
        }
        (0..7).map(of_load).chain(["nudge".into()]).for_each(|name| {
            free_named(&mut client, &name);
        });
        assert_eq!((daemon.counter("bookings_live"), loads(&daemon)), (0, vec![[0; 3]; 2]), "round {round}");
    }
}

#[test]
fn bookings_wait_for_a_worker_that_is_added_later() {
    let site = Site::new(0, true);
    let mut daemon = site.start(&[]);
    let add = ["add", "id=3,model=m"];
    daemon.worker_ok(&add);
    until("there are three workers", || daemon.status().workers.len() == 3);
    let booking = book_on(&mut gateway(&daemon), "a", 1, Some(Worker::new(3, 0)));
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let daemon = site.start(&[]);
    assert_eq!((daemon.counter("bookings_restored"), daemon.counter("bookings_restored_absent")), (1, 1));
    assert_eq!(loads(&daemon), [[0; 3]; 2], "it is on none of the others");
    daemon.worker_ok(&add);
    until("its worker has it", || {
        daemon.status().workers.len() == 3 && daemon.worker_counter(2, "active_requests") == 1
    });
    assert_eq!(free(&mut gateway(&daemon), booking), BookingOutcome::Applied);
    assert_eq!(daemon.worker_counter(2, "active_requests"), 0);
}

#[test]
fn what_ends_while_its_worker_is_away_stays_ended_after_a_kill() {
    let site = Site::new(10, true);
    let mut daemon = site.start(&[]);
    daemon.worker_ok(&["add", "id=3,model=m"]);
    until("there are three workers", || daemon.status().workers.len() == 3);
    let booking = book_on(&mut gateway(&daemon), "a", 1, Some(Worker::new(3, 0)));
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let mut daemon = site.start(&[]);
    assert_eq!(daemon.counter("bookings_restored_absent"), 1);
    let before = daemon.counter("booking_images_written");
    assert_eq!(free(&mut gateway(&daemon), booking), BookingOutcome::Applied);
    until("an image is written", || daemon.counter("booking_images_written") > before);
    assert_eq!(daemon.process.end("-KILL"), None);
    assert_eq!(site.start(&[]).counter("bookings_live"), 0);
}

#[test]
fn an_image_that_is_broken_or_of_another_kind_costs_only_its_bookings() {
    let site = Site::new(0, true);
    let mut daemon = site.start(&[]);
    let instance = gateway(&daemon).hello().instance_id;
    book(&mut gateway(&daemon), "a", 1);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let good = std::fs::read(site.image()).expect("an image");
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let cases = [
        (&flipped[..], "snapshot_checksum"),
        (&good[..good.len() - 3], "snapshot_truncated"),
        (b"no image at all, but some text", "snapshot_not_a_snapshot"),
    ];
    for (bytes, counter) in cases {
        std::fs::write(site.image(), bytes).expect("written");
        let mut daemon = site.start(&[]);
        assert_eq!((daemon.counter(counter), daemon.counter("bookings_live")), (1, 0), "{counter}");
        let mut client = gateway(&daemon);
        assert_ne!(client.hello().instance_id, instance, "{counter}");
        let booking = book(&mut client, "a", 1);
        assert_eq!(free(&mut client, booking), BookingOutcome::Applied, "{counter}");
        assert_eq!(daemon.process.end("-TERM"), Some(0));
    }
    std::fs::write(site.image(), good).expect("written");
    assert_eq!(site.start(&[]).counter("bookings_restored"), 1);
}

/// Receives a notification as the service manager does: its text, and the descriptors to store.
fn stored(manager: &UnixDatagram) -> (String, Vec<OwnedFd>) {
    let mut bytes = [0; 512];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(manager, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let received = received.expect("a notification");
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    (String::from_utf8_lossy(&bytes[..received.bytes]).into_owned(), files.flatten().collect())
}

#[test]
fn without_a_socket_to_the_service_manager_images_go_to_the_folder() {
    let site = Site::new(10, true);
    let mut daemon = site.start_by(&format!("export FDSTORE=2; unset NOTIFY_SOCKET; {EXEC}"));
    let mut client = gateway(&daemon);
    let kept = book(&mut client, "kept", 1);
    wait_for_image(&daemon, &mut client);
    assert_eq!(daemon.process.end("-KILL"), None);
    let daemon = site.start(&[]);
    assert_eq!(free(&mut gateway(&daemon), kept), BookingOutcome::Applied);
}

#[test]
fn a_store_whose_files_cannot_be_read_is_filled_anew() {
    let site = Site::new(10, false);
    let path = site.folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("bound");
    manager.set_read_timeout(Some(WAIT_MAX)).expect("set");
    let listen = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=kvrouted-bookings";
    let line = format!("exec 3<>/dev/null; export FDSTORE=2 NOTIFY_SOCKET={} {listen}; {EXEC}", path.display());
    let _daemon = site.start_by(&line);
    assert_eq!(stored(&manager).0, "FDSTOREREMOVE=1\nFDNAME=kvrouted-bookings\n");
    let (said, files) = stored(&manager);
    assert!(said.starts_with("FDSTORE=1\n") && files.len() == 2, "{said}");
}

#[test]
fn the_service_manager_keeps_bookings_through_a_kill() {
    let site = Site::new(10, false);
    let path = site.folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("bound");
    manager.set_read_timeout(Some(WAIT_MAX)).expect("set");
    let mut daemon = site.start_by(&format!("export FDSTORE=2 NOTIFY_SOCKET={}; {EXEC}", path.display()));
    let (said, files) = stored(&manager);
    assert_eq!((said.as_str(), files.len()), ("FDSTORE=1\nFDNAME=kvrouted-bookings\nFDPOLL=0\n", 2));
    let mut client = gateway(&daemon);
    let (instance, mut bookings) = (client.hello().instance_id, Vec::new());
    let this = std::process::id();
    let passes: String =
        files.iter().zip(3..).map(|(file, at)| format!("exec {at}<>/proc/{this}/fd/{}; ", file.as_raw_fd())).collect();
    let names = "LISTEN_FDNAMES=kvrouted-bookings:kvrouted-bookings";
    let line = format!(
        "{passes} export FDSTORE=2 NOTIFY_SOCKET={} LISTEN_PID=$$ LISTEN_FDS=2 {names}; {EXEC}",
        path.display()
    );
    for round in 0..3 {
        bookings.push(book(&mut client, &format!("r{round}"), round));
        wait_for_image(&daemon, &mut client);
        assert_eq!(daemon.process.end("-KILL"), None);
        daemon = site.start_by(&line);
        client = gateway(&daemon);
        free_named(&mut client, "nudge");
        assert_eq!(client.hello().instance_id, instance);
        assert_eq!(daemon.counter("bookings_live"), bookings.len() as u64);
    }
    assert!(bookings.iter().all(|booking| free(&mut client, *booking) == BookingOutcome::Applied));
    manager.set_nonblocking(true).expect("set");
    let mut said = [0; 64];
    while let Ok(length) = manager.recv(&mut said) {
        assert!(!said[..length].starts_with(b"FDSTORE=1"), "what is stored is not stored again");
    }
    // A stop leaves them there too.
    let last = book(&mut client, "last", 9);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let daemon = site.start_by(&line);
    assert_eq!(free(&mut gateway(&daemon), last), BookingOutcome::Applied);
}
