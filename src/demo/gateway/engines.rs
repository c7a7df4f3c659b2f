//! The gateway's connections to the engines: one for each engine, shared by all requests in flight.

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::super::engine_messages::{FromEngine, ToEngine};
use crate::error::{Error, Kind};

type Waiting = Mutex<Option<FxHashMap<u32, mpsc::Sender<FromEngine>>>>;

/// One engine.
pub(super) struct EngineLink {
    /// Its worker id.
    pub(super) worker: u64,
    writing: Mutex<UnixStream>,
    /// The receivers of requests in flight; `None` once the engine has ended.
    waiting: Arc<Waiting>,
    /// Messages that are not about a request.
    control: Mutex<mpsc::Receiver<FromEngine>>,
}

impl EngineLink {
    /// Connects to the engine and starts the thread that receives its messages.
    ///
    /// # Errors
    /// `connection` if it does not listen.
    pub(super) fn connect(worker: u64, path: &Path) -> Result<Self, Error> {
        let writing = UnixStream::connect(path).map_err(|error| gone(worker).caused_by(error))?;
        let reading = writing.try_clone().map_err(|error| gone(worker).caused_by(error))?;
        let waiting = Arc::new(Mutex::new(Some(FxHashMap::default())));
        let (controls, control) = mpsc::channel();
        let shared = Arc::clone(&waiting);
        std::thread::Builder::new()
            .name(format!("engine-{worker}"))
            .spawn(move || receive(reading, &shared, &controls))
            .map_err(|error| gone(worker).caused_by(error))?;
        Ok(Self { worker, writing: Mutex::new(writing), waiting, control: Mutex::new(control) })
    }

    /// Sends a prompt at `sent_ns`, which is now. The result delivers the engine's messages about it.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn submit(&self, id: u32, sent_ns: u64, prompt: Vec<u32>, output: Vec<u32>) -> Result<Answers, Error> {
        let (sender, receiver) = mpsc::channel();
        match self.waiting.lock().as_mut() {
            Some(waiting) => waiting.insert(id, sender),
            None => return Err(gone(self.worker)),
        };
        self.send(&ToEngine::Submit { id, sent_ns, prompt, output })?;
        Ok(Answers { worker: self.worker, receiver })
    }

    /// Waits until the engine is ready.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn ready(&self) -> Result<(), Error> {
        match self.next_control()? {
            FromEngine::Ready => Ok(()),
            other => Err(unexpected(self.worker, other)),
        }
    }

    /// Clears the cache. Returns the sequence number of the batch with the clear.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn clear(&self) -> Result<u64, Error> {
        self.send(&ToEngine::Clear)?;
        match self.next_control()? {
            FromEngine::Cleared { seq } => Ok(seq),
            other => Err(unexpected(self.worker, other)),
        }
    }

    /// Makes the engine complete its log. Returns the number of batches in it.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn finish(&self) -> Result<u64, Error> {
        self.send(&ToEngine::Finish)?;
        match self.next_control()? {
            FromEngine::Finished { batches } => Ok(batches),
            other => Err(unexpected(self.worker, other)),
        }
    }

    fn send(&self, request: &ToEngine) -> Result<(), Error> {
        request.write(&mut *self.writing.lock()).map_err(|error| gone(self.worker).caused_by(error))
    }

    fn next_control(&self) -> Result<FromEngine, Error> {
        self.control.lock().recv().map_err(|_| gone(self.worker))
    }
}

/// The engine's messages about one request.
pub(super) struct Answers {
    worker: u64,
    receiver: mpsc::Receiver<FromEngine>,
}

impl Answers {
    /// Waits until the prompt is computed. Returns the number of blocks that were in the cache, and when the first token
    /// came by the engine's clock.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn prefilled(&self) -> Result<(u32, u64), Error> {
        match self.next()? {
            FromEngine::Prefilled { cached_blocks, at_ns, .. } => Ok((cached_blocks, at_ns)),
            other => Err(unexpected(self.worker, other)),
        }
    }

    /// Waits until the output is complete. Returns when it was, by the engine's clock.
    ///
    /// # Errors
    /// `connection` if the engine has ended.
    pub(super) fn done(&self) -> Result<u64, Error> {
        match self.next()? {
            FromEngine::Done { at_ns, .. } => Ok(at_ns),
            other => Err(unexpected(self.worker, other)),
        }
    }

    fn next(&self) -> Result<FromEngine, Error> {
        self.receiver.recv().map_err(|_| gone(self.worker))
    }
}

/// Delivers the engine's messages until it ends; then all waits end.
fn receive(stream: UnixStream, waiting: &Waiting, control: &mpsc::Sender<FromEngine>) {
    let mut from = BufReader::new(stream);
    while let Ok(Some(message)) = FromEngine::read(&mut from) {
        let mut waiting = waiting.lock();
        let Some(waiting) = waiting.as_mut() else { break };
        // A closed receiver has given up on the request.
        match message {
            FromEngine::Prefilled { id, .. } => drop(waiting.get(&id).map(|sender| sender.send(message))),
            FromEngine::Done { id, .. } => drop(waiting.remove(&id).map(|sender| sender.send(message))),
            FromEngine::Ready | FromEngine::Cleared { .. } | FromEngine::Finished { .. } => {
                let _ = control.send(message);
            }
        }
    }
    *waiting.lock() = None;
}

fn gone(worker: u64) -> Error {
    Error::new(Kind::Connection, format!("engine {worker} has ended"), "see its log in the folder given by --keep")
}

fn unexpected(worker: u64, message: FromEngine) -> Error {
    Error::new(Kind::Internal, format!("engine {worker} sent {message:?} unexpectedly"), "report it")
}
