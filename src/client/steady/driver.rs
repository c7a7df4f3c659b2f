//! The task behind an async client: makes the connection, carries bytes both ways, and makes it again when it breaks.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::options::SteadyOptions;
use crate::client::conversation::{Conversation, Phase, Told, Waiter};
use crate::client::fallback::Fleet;
use crate::error::{Error, Kind, Result};
use crate::load::SessionToken;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// A task that waits for its reply, and its place among those in flight, which is free when the reply has come.
pub(super) struct Caller {
    pub(super) reply: oneshot::Sender<Result<Told>>,
    pub(super) _place: OwnedSemaphorePermit,
}

impl Waiter for Caller {
    fn hand(self, told: Result<Told>) -> Option<Told> {
        self.reply.send(told).err().and_then(Result::ok)
    }
}

/// What an async client's handles and its task share.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    pub(super) options: SteadyOptions,
    pub(super) session: SessionToken,
    pub(super) conversation: Mutex<Conversation<Caller>>,
    /// There is something to be sent.
    pub(super) wake: Notify,
    pub(super) places: Arc<Semaphore>,
    pub(super) phases: watch::Sender<Phase>,
    pub(super) fleets: watch::Sender<Arc<Fleet>>,
}

impl Shared {
    /// A number from 0 up to 1.
    pub(super) fn chance() -> f64 {
        rand::random()
    }

    /// Tells those who wait for it what the conversation has come to.
    fn publish(&self) {
        let conversation = self.conversation.lock();
        let (phase, fleet) = (conversation.phase, Arc::clone(&conversation.fleet));
        drop(conversation);
        self.phases.send_if_modified(|last| std::mem::replace(last, phase) != phase);
        self.fleets.send_if_modified(|last| {
            let is_new = !Arc::ptr_eq(last, &fleet);
            *last = fleet;
            is_new
        });
    }
}

/// Connects and carries, until the task is ended.
pub(super) async fn drive(shared: Arc<Shared>) {
    loop {
        match timeout(shared.options.timeout, connect(&shared)).await {
            Ok(Ok(stream)) => {
                shared.publish();
                let began = Instant::now();
                // Why it ended is told to those who wait; nobody else asks.
                drop(carry(&shared, &stream).await);
                let is_stable = began.elapsed() >= shared.options.back_off.first;
                shared.conversation.lock().ended(is_stable, Instant::now(), Shared::chance());
            }
            Ok(Err(_)) | Err(_) => shared.conversation.lock().failed(Instant::now(), Shared::chance()),
        }
        shared.publish();
        let resting = shared.conversation.lock().silence.rests_until(Instant::now());
        if let Some(until) = resting {
            tokio::time::sleep_until(until.into()).await;
            let mut conversation = shared.conversation.lock();
            let is_first = conversation.silence.since().is_none();
            conversation.phase = Phase::Connecting { is_first };
            drop(conversation);
            // Those who found it due wait for what comes next, which may be another rest.
            shared.publish();
        }
    }
}

/// Connects and says hello.
async fn connect(shared: &Shared) -> Result<UnixStream> {
    let cannot = |error: io::Error| {
        Error::new(Kind::Connection, format!("cannot connect to {}", shared.path.display()), "start the daemon")
            .caused_by(error)
    };
    let stream = UnixStream::connect(&shared.path).await.map_err(cannot)?;
    shared.conversation.lock().greet(&shared.options.name, shared.session);
    let mut buffer = vec![0; READ_BYTES];
    loop {
        send(shared, &stream).map_err(cannot)?;
        let ready = stream.ready(interest(shared)).await.map_err(cannot)?;
        if !ready.is_readable() {
            continue;
        }
        let came = read(&stream, &mut buffer).map_err(cannot)?;
        let mut conversation = shared.conversation.lock();
        if let Some(reply) = conversation.hear_hello(&buffer[..came], Instant::now())? {
            conversation.greeted(reply, shared.options.fallback)?;
            return Ok(stream);
        }
    }
}

/// Carries bytes both ways until the connection ends.
async fn carry(shared: &Shared, stream: &UnixStream) -> Result<()> {
    let ended = |error: io::Error| crate::client::conversation::lost().caused_by(error);
    let mut buffer = vec![0; READ_BYTES];
    let mut fleet = Arc::clone(&shared.conversation.lock().fleet);
    // What came with the hello.
    shared.conversation.lock().hear(&[], Instant::now())?;
    loop {
        send(shared, stream).map_err(ended)?;
        tokio::select! {
            ready = stream.ready(interest(shared)) => {
                if !ready.map_err(ended)?.is_readable() {
                    continue;
                }
                let came = read(stream, &mut buffer).map_err(ended)?;
                let mut conversation = shared.conversation.lock();
                conversation.hear(&buffer[..came], Instant::now())?;
                if Arc::ptr_eq(&fleet, &conversation.fleet) {
                    continue;
                }
                fleet = Arc::clone(&conversation.fleet);
                drop(conversation);
                shared.publish();
            }
            () = shared.wake.notified() => {}
        }
    }
}

fn interest(shared: &Shared) -> Interest {
    match shared.conversation.lock().unsent.is_empty() {
        true => Interest::READABLE,
        false => Interest::READABLE | Interest::WRITABLE,
    }
}

/// Sends what the socket takes of what is to be sent.
fn send(shared: &Shared, stream: &UnixStream) -> io::Result<()> {
    let mut conversation = shared.conversation.lock();
    let mut sent = 0;
    let ended = loop {
        match conversation.unsent.get(sent..) {
            None | Some([]) => break Ok(()),
            Some(rest) => match stream.try_write(rest) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                // The daemon takes no more, but may have said why: what it said is read, and then the end.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    sent = conversation.unsent.len();
                    break Ok(());
                }
                Err(error) => break Err(error),
            },
        }
    };
    conversation.unsent.drain(..sent);
    ended
}

/// Reads what there is; 0 = nothing after all.
///
/// # Errors
/// The end of the stream is one.
fn read(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<usize> {
    match stream.try_read(buffer) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

/// Waits until everything said has been answered, no longer than `patience`; whether it has.
pub(super) async fn settle(shared: &Shared, patience: Duration) -> bool {
    const LOOK_EVERY: Duration = Duration::from_millis(1);
    let settled = async {
        while !shared.conversation.lock().is_settled() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    timeout(patience, settled).await.is_ok()
}
