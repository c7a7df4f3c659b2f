//! Misbehaving clients, each in a thread of its own, over and over. Their replies are ignored, except that no client
//! may free another client's booking.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvrouted::client::{Client, ClientOptions, LaneUse};
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::CONNECTIONS_MAX;
use kvrouted::load::{BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::serve::admin_path;
use kvrouted::wire::{FrameHeader, FrameKind, RequestEncoder};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustix::process::{Gid, Uid};

use super::gateway::Truth;
use crate::kit::raw::{encoded, hello_frame, read_frame};
use crate::kit::{WAIT_MAX, skipped, test_of_this_binary};

/// The test that is the process to be killed, and where it finds its daemon.
const VICTIM: &str = "soak::a_victim";
const VICTIM_SOCKET: &str = "KVROUTED_SOAK_VICTIM_SOCKET";
/// A user id that no account has here.
const ANOTHER_USER: u32 = 61_020;
/// How many connections one user may have, with what [`super::USER_SHARE_PERCENT`] says.
const CONNECTIONS_OF_USER_MAX: usize = (CONNECTIONS_MAX * super::USER_SHARE_PERCENT).div_ceil(100);

/// What there is of bad behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vice {
    /// Connects and leaves, many at once.
    Storm,
    /// Dies in the middle of a frame.
    Dies,
    /// Sends a frame byte by byte.
    Loris,
    /// Reads a byte now and then.
    SlowReader,
    /// Asks and asks, and never reads.
    NeverReads,
    /// Sends anything.
    Garbage,
    /// Books and does not free.
    Leaker,
    /// Comes back as the session it was, and tries to be another.
    Switcher,
    /// Waits for busy workers, and leaves.
    Parker,
    /// Watches the fleet and asks for status without an end.
    Onlooker,
    /// Is killed while it asks and books by a lane.
    Killed,
    /// As another user, takes more connections than one user may have.
    Greedy,
}

impl Vice {
    pub(crate) const ALL: [Self; 12] = [
        Self::Storm,
        Self::Dies,
        Self::Loris,
        Self::SlowReader,
        Self::NeverReads,
        Self::Garbage,
        Self::Leaker,
        Self::Switcher,
        Self::Parker,
        Self::Onlooker,
        Self::Killed,
        Self::Greedy,
    ];
}

/// A client of one vice.
pub(crate) struct Villain<'a> {
    vice: Vice,
    socket: PathBuf,
    truth: &'a Truth,
    random: Xoshiro256PlusPlus,
    rounds: &'a AtomicU64,
}

impl<'a> Villain<'a> {
    pub(crate) fn new(vice: Vice, socket: &Path, truth: &'a Truth, seed: u64, rounds: &'a AtomicU64) -> Self {
        let random = Xoshiro256PlusPlus::seed_from_u64(seed ^ (vice as u64) << 32);
        Self { vice, socket: socket.to_owned(), truth, random, rounds }
    }

    pub(crate) fn run(mut self, stop: &AtomicBool) {
        if self.vice == Vice::Greedy && !become_another() {
            // It is said that it was skipped: it is not idle.
            self.rounds.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // Relaxed: it is only to end some time, and a count.
        while !stop.load(Ordering::Relaxed) {
            // The daemon may refuse and close: that is how it should be.
            let _ = self.once();
            self.rounds.fetch_add(1, Ordering::Relaxed);
            self.rest_ms(5..100);
        }
    }

    fn once(&mut self) -> std::io::Result<()> {
        match self.vice {
            Vice::Storm => self.storm(),
            Vice::Dies => self.die(),
            Vice::Loris => self.send_slowly(),
            Vice::SlowReader => self.read_slowly(),
            Vice::NeverReads => self.never_read(),
            Vice::Garbage => self.send_garbage(),
            Vice::Leaker => self.leak(),
            Vice::Switcher => self.switch_sessions(),
            Vice::Parker => self.park(),
            Vice::Onlooker => self.look_on(),
            Vice::Killed => self.be_killed(),
            Vice::Greedy => self.take_all(),
        }
    }

    fn rest_ms(&mut self, range: std::ops::Range<u64>) {
        std::thread::sleep(Duration::from_millis(self.random.random_range(range)));
    }

    fn connect(&self) -> std::io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        Ok(stream)
    }

    fn greeted(&self) -> std::io::Result<UnixStream> {
        let mut stream = self.connect()?;
        stream.write_all(&hello_frame(None))?;
        read_frame(&mut stream)?;
        Ok(stream)
    }

    fn storm(&mut self) -> std::io::Result<()> {
        let mut held = Vec::new();
        for at in 0..64 {
            let mut stream = self.connect()?;
            if at % 2 == 0 {
                stream.write_all(&hello_frame(None))?;
            }
            held.push(stream);
        }
        self.rest_ms(0..20);
        Ok(())
    }

    fn die(&mut self) -> std::io::Result<()> {
        for _ in 0..16 {
            let mut stream = self.greeted()?;
            let frame = route(3, SpaceId(0), 2000, Some("dies"));
            let cut = self.random.random_range(0..=frame.len());
            stream.write_all(&frame[..cut])?;
            if cut % 2 == 0 {
                stream.shutdown(Shutdown::Write)?;
            }
        }
        Ok(())
    }

    fn send_slowly(&mut self) -> std::io::Result<()> {
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(self.greeted()?);
        }
        // Longer than may be: the daemon closes them.
        for byte in route(3, SpaceId(0), 64, None) {
            self.rest_ms(10..30);
            for stream in &mut held {
                stream.write_all(&[byte])?;
            }
        }
        Ok(())
    }

    fn read_slowly(&mut self) -> std::io::Result<()> {
        let mut stream = self.greeted()?;
        for id in 0..200 {
            stream.write_all(&route(id, SpaceId(0), 400, None))?;
        }
        for _ in 0..200 {
            stream.read_exact(&mut [0; 16])?;
            self.rest_ms(1..10);
        }
        Ok(())
    }

    fn never_read(&mut self) -> std::io::Result<()> {
        let mut stream = self.greeted()?;
        stream.set_write_timeout(Some(Duration::from_millis(500)))?;
        let frames: Vec<u8> = (0..64).flat_map(|id| route(id, SpaceId(0), 200, None)).collect();
        // Until neither side takes any more.
        while stream.write_all(&frames).is_ok() {}
        self.rest_ms(500..3000);
        Ok(())
    }

    fn send_garbage(&mut self) -> std::io::Result<()> {
        for _ in 0..16 {
            let mut stream = if self.random.random() { self.greeted()? } else { self.connect()? };
            let mut bytes: Vec<u8> = (0..self.random.random_range(8..20_000)).map(|_| self.random.random()).collect();
            if self.random.random() {
                let (kind, body) = (self.random.random_range(1..40), bytes.len() as u32 / 8 * 8);
                let header = FrameHeader::new(FrameKind::Route, body, CorrelationId(1));
                bytes.splice(0..0, FrameHeader { kind, ..header }.encode());
            }
            let _ = stream.write_all(&bytes);
            stream.shutdown(Shutdown::Write)?;
            let _ = stream.read_to_end(&mut Vec::new());
        }
        Ok(())
    }

    fn leak(&mut self) -> std::io::Result<()> {
        let mut stream = self.greeted()?;
        let seed: u32 = self.random.random();
        for id in 0..100 {
            stream.write_all(&route(id, SpaceId(0), 300, Some(&format!("leak-{seed}-{id}"))))?;
            read_frame(&mut stream)?;
        }
        // Now and then it stays, so that its bookings end by their age.
        if self.random.random_range(0..4) == 0 {
            self.rest_ms(2000..8000);
        }
        Ok(())
    }

    fn switch_sessions(&mut self) -> std::io::Result<()> {
        let token = SessionToken { hi: self.random.random(), lo: self.random.random::<u64>() | 1 };
        let options = |session| ClientOptions {
            name: "switcher".into(),
            session: Some(session),
            timeout: Some(WAIT_MAX),
            ..ClientOptions::default()
        };
        let as_session = |session| Client::connect(&self.socket, &options(session)).map_err(std::io::Error::other);
        let mut first = as_session(token)?;
        let (tokens, space) = ([9; 256], SpaceId(0));
        let book = Some(BookingRequest { request_id: "switched", attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let reply = first.route(&request).map_err(std::io::Error::other)?;
        let Some(handle) = reply.booking else { return Ok(()) };
        drop(first);
        let mut other = as_session(SessionToken { hi: token.hi, lo: token.lo ^ 2 })?;
        for booking in [BookingRef::Handle(handle), BookingRef::Request { request_id: "switched", attempt: 0 }] {
            let outcome = other.free(&booking).map_err(std::io::Error::other)?;
            if outcome == BookingOutcome::Applied {
                self.truth.wrong(format!("another session's booking was freed: {booking:?}"));
            }
        }
        let mut again = as_session(token)?;
        // Its grace may be over by now, where the machine is slow.
        again.free(&BookingRef::Handle(handle)).map_err(std::io::Error::other)?;
        Ok(())
    }

    fn park(&mut self) -> std::io::Result<()> {
        let mut stream = self.greeted()?;
        for id in 0..40 {
            stream.write_all(&route(id, SpaceId(1), 600, Some(&format!("park-{id}"))))?;
        }
        self.rest_ms(0..400);
        Ok(())
    }

    fn look_on(&mut self) -> std::io::Result<()> {
        let mut encoder = RequestEncoder::default();
        let mut watcher = self.greeted()?;
        let mut frames = Vec::new();
        encoder.watch(CorrelationId(1), None, (0, 0), &mut frames);
        watcher.write_all(&frames)?;
        let mut admin = UnixStream::connect(admin_path(&self.socket))?;
        admin.write_all(&hello_frame(None))?;
        read_frame(&mut admin)?;
        frames.clear();
        (0..20).for_each(|id| {
            encoder.admin(CorrelationId(id), &kvrouted::wire::AdminRequest::Status { cursor: 0, limit: 0 }, &mut frames)
        });
        admin.write_all(&frames)?;
        for _ in 0..10 {
            read_frame(&mut admin)?;
        }
        Ok(())
    }
}

impl Villain<'_> {
    /// A process of its own, as only that can be killed: [`be_a_victim`].
    fn be_killed(&mut self) -> std::io::Result<()> {
        let mut command = test_of_this_binary(VICTIM);
        command.env(VICTIM_SOCKET, &self.socket).stdout(Stdio::null()).stderr(Stdio::null());
        let mut victim = command.spawn()?;
        self.rest_ms(200..1500);
        victim.kill()?;
        let ended = victim.wait()?;
        if ended.success() {
            self.truth.wrong("who was to be killed had ended".to_owned());
        }
        Ok(())
    }

    fn take_all(&mut self) -> std::io::Result<()> {
        let (mut held, mut refused) = (Vec::new(), 0);
        for _ in 0..CONNECTIONS_OF_USER_MAX + 10 {
            let mut stream = self.connect()?;
            // A refused client gets an error, or finds the connection closed.
            let is_told = stream.write_all(&hello_frame(None)).and_then(|()| read_frame(&mut stream));
            if matches!(is_told, Ok((header, _)) if header.kind == FrameKind::HelloReply as u8) {
                held.push(stream);
            } else {
                refused += 1;
            }
        }
        if held.len() > CONNECTIONS_OF_USER_MAX || refused == 0 {
            self.truth.wrong(format!("one user had {} connections, and {refused} were refused", held.len()));
        }
        self.rest_ms(0..500);
        drop(held);
        // Until the daemon has seen them end.
        self.rest_ms(2000..4000);
        Ok(())
    }
}

/// Makes this thread another user's. Whether that can be done here.
fn become_another() -> bool {
    if !rustix::process::geteuid().is_root() {
        skipped("a greedy user among the clients", "only root can become another");
        return false;
    }
    let (uid, gid) = (Uid::from_raw(ANOTHER_USER), Gid::from_raw(ANOTHER_USER));
    rustix::thread::set_thread_groups(&[]).expect("root may");
    rustix::thread::set_thread_res_gid(gid, gid, gid).expect("root may");
    rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root may");
    true
}

/// Asks, books and watches by a lane until it is killed.
pub(crate) fn be_a_victim() {
    let Some(socket) = std::env::var_os(VICTIM_SOCKET) else { return };
    let options = || ClientOptions {
        name: "victim".into(),
        timeout: Some(WAIT_MAX),
        lane: LaneUse::Require,
        ..ClientOptions::default()
    };
    let Ok(mut client) = Client::connect(Path::new(&socket), &options()) else { return wait_to_be_killed() };
    let tokens = [11; 640];
    for at in 0.. {
        let name = format!("victim-{}-{at}", std::process::id());
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(SpaceId(at % 2), Prompt::of_tokens(&tokens)) };
        // Replies are left in the ring now and then.
        let asked = client.send_route(&request).and_then(|_| client.flush());
        let told = if at % 8 < 6 { asked.and_then(|()| client.recv().map(drop)) } else { asked };
        if told.is_err() {
            return wait_to_be_killed();
        }
    }
}

/// The daemon may refuse a lane, or drain: being killed is all that is left.
fn wait_to_be_killed() {
    std::thread::sleep(Duration::from_secs(3600));
}

fn route(id: u64, space: SpaceId, tokens: usize, book: Option<&str>) -> Vec<u8> {
    let tokens = vec![3; tokens];
    let book = book.map(|request_id| BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    encoded(|encoder, out| encoder.route(CorrelationId(id), &request, out).expect("encoded"))
}
