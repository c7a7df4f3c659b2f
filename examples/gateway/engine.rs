//! A simulated engine: prompts go out, and what becomes of each comes back, over one Unix socket.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

const SUBMIT: u8 = 1;
const READY: u8 = 129;
const PREFILLED: u8 = 130;
const DONE: u8 = 131;

/// What an engine says of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The prompt is computed: the first token is there.
    Prefilled {
        /// Blocks of the prompt that were in the cache.
        cached_blocks: u32,
    },
    /// The output is complete.
    Done,
}

/// The engine has gone: it cannot be reached, or its connection ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone;

/// Who waits for which request; `None` once the engine has gone.
type Running = Arc<Mutex<Option<HashMap<u32, UnboundedSender<Event>>>>>;

/// A connection to an engine, shared by all requests.
pub(crate) struct Engine {
    running: Running,
    outbox: UnboundedSender<Vec<u8>>,
    next_id: AtomicU32,
}

impl Engine {
    /// Connects, and waits until the engine may be used.
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        let (reading, mut writing) = UnixStream::connect(path).await?.into_split();
        let mut reading = BufReader::new(reading);
        while frame(&mut reading).await?.0 != READY {}
        let running: Running = Arc::new(Mutex::new(Some(HashMap::new())));
        let (outbox, mut to_send) = unbounded_channel::<Vec<u8>>();
        tokio::spawn(hear(reading, Arc::clone(&running)));
        tokio::spawn(async move {
            while let Some(bytes) = to_send.recv().await {
                // That it failed is heard by the reading half.
                if writing.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { running, outbox, next_id: AtomicU32::new(0) })
    }

    /// Sends a prompt, with the output that a simulated engine cannot think of. What becomes of it comes through the
    /// receiver, which ends early where the engine goes.
    pub(crate) fn run(&self, prompt: &[u32], output: &[u32]) -> Result<UnboundedReceiver<Event>, Gone> {
        // A name among those in flight; nothing else hangs on it.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = unbounded_channel();
        lock(&self.running).as_mut().ok_or(Gone)?.insert(id, sender);
        let numbers = [id, prompt.len() as u32];
        let body: Vec<u8> =
            numbers.iter().chain(prompt).chain(output).flat_map(|number| number.to_le_bytes()).collect();
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(SUBMIT);
        bytes.extend(body);
        self.outbox.send(bytes).map_err(|_| Gone)?;
        Ok(receiver)
    }
}

/// Hands what the engine says to whom it concerns, until it goes; then nobody waits any longer.
async fn hear(mut reading: BufReader<OwnedReadHalf>, running: Running) {
    while let Ok((kind, body)) = frame(&mut reading).await {
        let number = |at: usize| body.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        let mut running = lock(&running);
        let Some(running) = running.as_mut() else { return };
        // Perhaps nobody waits for it any more: an engine cannot be told to stop.
        let (to, event) = match kind {
            PREFILLED => (running.get(&number(0)).cloned(), Event::Prefilled { cached_blocks: number(4) }),
            DONE => (running.remove(&number(0)), Event::Done),
            _ => continue,
        };
        if let Some(to) = to {
            let _ = to.send(event);
        }
    }
    *lock(&running) = None;
}

/// A frame: bytes of its body (u32, little endian), kind, body.
async fn frame(reading: &mut BufReader<OwnedReadHalf>) -> io::Result<(u8, Vec<u8>)> {
    let body_bytes = reading.read_u32_le().await?;
    let kind = reading.read_u8().await?;
    let mut body = vec![0; body_bytes as usize];
    reading.read_exact(&mut body).await?;
    Ok((kind, body))
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
