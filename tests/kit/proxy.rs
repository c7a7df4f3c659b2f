//! A TCP proxy that loses, repeats and delays whole ZeroMQ messages, and breaks connections.
//!
//! It knows just enough ZMTP to find the end of a message: a greeting of 64 bytes, then frames of flags, length and
//! body. Commands pass, and so does everything in the other direction.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What becomes of messages: shares of 1, and how long one is held back at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    pub(crate) lost: f64,
    pub(crate) repeated: f64,
    pub(crate) delay_ms_max: u64,
}

pub(crate) const FINE: Weather = Weather { lost: 0.0, repeated: 0.0, delay_ms_max: 0 };

/// What it did so far.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) lost: AtomicU64,
    pub(crate) repeated: AtomicU64,
    pub(crate) cut: AtomicU64,
}

struct Shared {
    upstream: String,
    seed: u64,
    weather: Mutex<Weather>,
    /// Both ends of every connection.
    open: Mutex<Vec<[TcpStream; 2]>>,
    is_parted: AtomicBool,
    ends: AtomicBool,
    done: Done,
}

/// A running proxy. Dropping it breaks what it has open.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// In front of a `tcp://` endpoint.
    pub(crate) fn start(endpoint: &str, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            upstream: endpoint.strip_prefix("tcp://").expect("a port").to_owned(),
            seed,
            weather: Mutex::new(FINE),
            open: Mutex::default(),
            is_parted: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            done: Done::default(),
        });
        let shared_there = Arc::clone(&shared);
        std::thread::spawn(move || accept(&listener, &shared_there));
        Self { port, shared }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }

    pub(crate) fn set_weather(&self, weather: Weather) {
        *self.shared.weather.lock().expect("whole") = weather;
    }

    /// Breaks every connection, in the middle of a message or not.
    pub(crate) fn cut(&self) {
        for ends in self.shared.open.lock().expect("whole").drain(..) {
            self.shared.done.cut.fetch_add(1, Ordering::Relaxed);
            ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
        }
    }

    /// As long as it is parted, what connects is turned away. What is connected is not cut by that.
    pub(crate) fn part(&self, is_parted: bool) {
        self.shared.is_parted.store(is_parted, Ordering::Relaxed);
    }

    pub(crate) fn done(&self) -> &Done {
        &self.shared.done
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.cut();
        // This wakes the thread that waits for the next connection.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for (at, below) in (0_u64..).zip(listener.incoming()) {
        if shared.ends.load(Ordering::Relaxed) {
            return;
        }
        let Ok(below) = below else { continue };
        if !shared.is_parted.load(Ordering::Relaxed) {
            // The side that connected tries again.
            drop(join(below, shared, at));
        }
    }
}

/// Passes on what both ends say, each in a thread of its own.
fn join(below: TcpStream, shared: &Arc<Shared>, at: u64) -> io::Result<()> {
    let above = TcpStream::connect(&shared.upstream)?;
    below.set_nodelay(true)?;
    shared.open.lock().expect("whole").push([below.try_clone()?, above.try_clone()?]);
    let ends = [below.try_clone()?, above.try_clone()?];
    let up = (below.try_clone()?, above.try_clone()?);
    std::thread::spawn(move || {
        let (mut from, mut to) = up;
        drop(io::copy(&mut from, &mut to));
        ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
    });
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        drop(down(&above, &below, &shared, at));
        [above, below].iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
    });
    Ok(())
}

fn down(mut from: &TcpStream, mut to: &TcpStream, shared: &Shared, at: u64) -> io::Result<()> {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(shared.seed.wrapping_add(at << 32));
    // Each side waits for the beginning of the other's greeting before it says the rest.
    let (mut greeting, mut left) = ([0; GREETING_BYTES], GREETING_BYTES);
    while left > 0 {
        let read = from.read(&mut greeting[..left])?;
        if read == 0 {
            return Ok(());
        }
        to.write_all(&greeting[..read])?;
        left -= read;
    }
    loop {
        let (bytes, is_command) = message(from)?;
        let weather = if is_command { FINE } else { *shared.weather.lock().expect("whole") };
        if weather.delay_ms_max > 0 {
            std::thread::sleep(Duration::from_millis(chance.random_range(0..=weather.delay_ms_max)));
        }
        if chance.random_bool(weather.lost) {
            shared.done.lost.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        to.write_all(&bytes)?;
        if chance.random_bool(weather.repeated) {
            shared.done.repeated.fetch_add(1, Ordering::Relaxed);
            to.write_all(&bytes)?;
        }
    }
}

/// One whole message, or a command, as its bytes, and whether it is a command.
fn message(mut from: &TcpStream) -> io::Result<(Vec<u8>, bool)> {
    let mut bytes = Vec::new();
    loop {
        let begin = bytes.len();
        let mut read = |count: usize| {
            let at = bytes.len();
            bytes.resize(at + count, 0);
            from.read_exact(&mut bytes[at..])
                .map(|()| bytes[at..].iter().fold(0, |sum, byte| sum << 8 | *byte as usize))
        };
        let flags = read(1)? as u8;
        let length = read(if flags & LONG == 0 { 1 } else { 8 })?;
        read(length)?;
        if flags & MORE == 0 {
            return Ok((bytes, flags & COMMAND != 0 && begin == 0));
        }
    }
}
