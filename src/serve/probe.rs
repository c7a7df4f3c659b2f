//! Which io engine: epoll, unless io_uring is asked for and really works.
//!
//! Where a core has a processor to itself, a request over tokio-uring costs it 13 to 46 % more time than over epoll
//! (perf/results); it costs less only where a gateway with several connections shares the processor. So epoll is the
//! default. Beside a ring driven by hand, epoll by hand came out the same or better, so that there is no third engine.
//!
//! Containers often deny io_uring, some its set-up and some only its use. A runtime on a ring that
//! cannot be entered would hang and then panic, so a plain ring with the real flags must first complete
//! an operation, on a thread that can be left behind if it never returns.

use std::fmt;
use std::str::FromStr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode};

use crate::error::{Error, Kind, Result};
use crate::limits::{IO_PROBE_MS_MAX, URING_ENTRIES};

/// What the operator asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoChoice {
    /// What costs least: epoll.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// epoll.
    Epoll,
}

impl FromStr for IoChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "epoll" => Ok(Self::Epoll),
            other => {
                Err(Error::new(Kind::Config, format!("no io engine is called {other}"), "use auto, uring or epoll"))
            }
        }
    }
}

/// What the cores run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// tokio-uring.
    Uring,
    /// Plain tokio.
    Epoll,
}

impl Engine {
    /// The name used in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Epoll => "epoll",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Decides for all cores, once, at start. Cores that are to look for work instead of sleeping (`spins`) do so on epoll:
/// tokio-uring gives its operations to the kernel only when its thread goes to sleep.
///
/// # Errors
/// [`Kind::System`] with the probe's reason if io_uring is asked for and refused, [`Kind::Config`] if it is asked for and
/// cores are to look.
pub fn choose_engine(choice: IoChoice, spins: bool) -> Result<Engine> {
    match choice {
        IoChoice::Auto | IoChoice::Epoll => {
            tracing::info!(io = %Engine::Epoll, "io engine");
            Ok(Engine::Epoll)
        }
        IoChoice::Uring if spins => {
            let remedy = "use io auto or epoll, or spin_us_max 0";
            Err(Error::new(Kind::Config, "cores on io_uring cannot look for work instead of sleeping", remedy))
        }
        IoChoice::Uring => {
            probe_uring()?;
            tracing::info!(io = %Engine::Uring, "io engine, as asked for");
            Ok(Engine::Uring)
        }
    }
}

/// Whether a ring with the flags of the real ones completes an operation in time.
///
/// # Errors
/// [`Kind::System`] with what was refused.
pub fn probe_uring() -> Result<()> {
    let (send, receive) = mpsc::sync_channel(1);
    let probe = move || {
        // Nobody listens any more if this comes after the deadline.
        let _ = send.send(complete_one_nop());
    };
    thread::Builder::new()
        .name("kvrouted-io-probe".to_owned())
        .spawn(probe)
        .map_err(|error| refused("no probe thread", error))?;
    match receive.recv_timeout(Duration::from_millis(IO_PROBE_MS_MAX * 2)) {
        Ok(outcome) => outcome,
        Err(_) => Err(refused("the io_uring probe", std::io::ErrorKind::TimedOut.into())),
    }
}

#[expect(unsafe_code, reason = "io-uring takes queue entries by an unsafe call")]
fn complete_one_nop() -> Result<()> {
    let mut ring: IoUring = IoUring::builder()
        .setup_coop_taskrun()
        .setup_single_issuer()
        .build(URING_ENTRIES)
        .map_err(|error| refused("io_uring_setup", error))?;
    let entry = opcode::Nop::new().build().user_data(1);
    // SAFETY: a no-op refers to no memory.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(|_| refused("the ring's queue", std::io::ErrorKind::StorageFull.into()))?;
    ring.submit().map_err(|error| refused("io_uring_enter", error))?;
    let deadline = Instant::now() + Duration::from_millis(IO_PROBE_MS_MAX);
    while Instant::now() < deadline {
        if ring.completion().next().is_some() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err(refused("an io_uring no-op", std::io::ErrorKind::TimedOut.into()))
}

fn refused(what: &str, error: std::io::Error) -> Error {
    let remedy =
        "use --io auto or epoll, or allow io_uring (kernel.io_uring_disabled, the container's seccomp profile)";
    Error::new(Kind::System, format!("io_uring does not work here: {what} failed"), remedy).caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_always_finds_an_engine_and_uring_says_why_not() {
        assert!(matches!(choose_engine(IoChoice::Epoll, false), Ok(Engine::Epoll)));
        assert!(matches!(choose_engine(IoChoice::Auto, false), Ok(Engine::Epoll)));
        match choose_engine(IoChoice::Uring, false) {
            Ok(engine) => assert_eq!(engine, Engine::Uring),
            Err(error) => assert!(error.to_string().contains("--io"), "{error}"),
        }
    }

    #[test]
    fn cores_that_look_are_on_epoll() {
        assert!(matches!(choose_engine(IoChoice::Auto, true), Ok(Engine::Epoll)));
        assert!(matches!(choose_engine(IoChoice::Epoll, true), Ok(Engine::Epoll)));
        assert_eq!(choose_engine(IoChoice::Uring, true).unwrap_err().kind(), Kind::Config);
    }

    #[test]
    fn choices_are_named() {
        assert_eq!("uring".parse::<IoChoice>().unwrap(), IoChoice::Uring);
        assert!("kqueue".parse::<IoChoice>().is_err());
    }
}
