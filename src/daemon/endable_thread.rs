//! A thread of the daemon that does one thing beside the requests until it is asked to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::limits::ENDED_LOOK_EVERY_MS;

/// Such a thread, running.
#[derive(Debug)]
pub(super) struct EndableThread {
    /// What it is called in messages.
    subject: &'static str,
    thread: JoinHandle<()>,
    ending: Ending,
}

/// Whether the thread shall end.
#[derive(Clone, Debug, Default)]
pub(super) struct Ending(Arc<AtomicBool>);

impl Ending {
    /// The thread looks at it in each round of its loop.
    pub(super) fn is_asked_for(&self) -> bool {
        // Acquire: pairs with the Release in `EndableThread::ask_to_end`.
        self.0.load(Ordering::Acquire)
    }
}

impl EndableThread {
    /// Starts a thread of this name for the system. `run` returns soon after its argument asks for it.
    ///
    /// # Errors
    /// `System` if the thread cannot be started.
    pub(super) fn start(
        name: &'static str,
        subject: &'static str,
        run: impl FnOnce(&Ending) + Send + 'static,
    ) -> Result<Self> {
        let ending = Ending::default();
        let asked = ending.clone();
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || run(&asked));
        let thread = spawned.map_err(|error| {
            Error::new(Kind::System, format!("cannot start {subject}"), "raise the limit of threads").caused_by(error)
        })?;
        Ok(Self { subject, thread, ending })
    }

    /// What it is called in messages.
    pub(super) const fn subject(&self) -> &'static str {
        self.subject
    }

    /// To wake it by.
    pub(super) fn thread(&self) -> &Thread {
        self.thread.thread()
    }

    /// Whether it runs. It ends by itself only by a panic.
    pub(super) fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Ends it and waits for it.
    ///
    /// # Errors
    /// `Internal` if it panicked.
    pub(super) fn stop(self) -> Result<()> {
        self.ask_to_end();
        self.join()
    }

    /// Ends it, and waits for it until `deadline`. `false` = it has not ended by then, and ends with the process.
    ///
    /// # Errors
    /// `Internal` if it panicked.
    pub(super) fn stop_by(self, deadline: Instant) -> Result<bool> {
        self.ask_to_end();
        while self.is_running() {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(ENDED_LOOK_EVERY_MS));
        }
        self.join().map(|()| true)
    }

    fn ask_to_end(&self) {
        // Release: pairs with the Acquire in `Ending::is_asked_for`.
        self.ending.0.store(true, Ordering::Release);
        self.thread.thread().unpark();
    }

    fn join(self) -> Result<()> {
        self.thread.join().map_err(|_| {
            Error::new(Kind::Internal, format!("{} panicked", self.subject), "report it with the log around it")
        })
    }
}
