//! A simulated engine: the daemon's own `kvrouted demo-engine` as a child, and the connection over which it gets
//! prompts.
//!
//! The engine has no model. It has a prefix cache like vLLM's, publishes events as vLLM does, takes time for prefill
//! and decode, and gets the output along with the prompt. Frames are `{body_bytes: u32, kind: u8}` and the body, all
//! little endian; the body of a prompt, and of an answer about one, begins with a time in nanoseconds of the machine's
//! monotonic clock. The engine publishes nothing before the daemon has subscribed, and it serves one connection.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};

use crate::limits::DEMO_CAPACITY_BLOCKS;

/// Tokens in a block of a simulated engine.
pub(super) const BLOCK_TOKENS: usize = 16;

const SUBMIT: u8 = 1;
const READY: u8 = 129;
const PREFILLED: u8 = 130;
const DONE: u8 = 131;
/// The largest body of a frame from the engine: its messages have at most a time and two numbers.
const REPLY_BODY_BYTES_MAX: u32 = 64;

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The prompt is computed: the first token is there.
    Prefilled {
        /// Whole blocks of the prompt that were in the cache.
        cached_blocks: u32,
    },
    /// The output is complete.
    Done,
}

/// The engine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the simulated engine has ended")]
pub(super) struct Ended;

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// The daemon has not subscribed yet.
    Waiting,
    /// Prompts may come.
    Ready,
    /// The engine has ended.
    Ended,
}

#[derive(Default)]
struct Running {
    next_id: u32,
    requests: HashMap<u32, mpsc::UnboundedSender<Progress>>,
}

/// A simulated engine and its process.
pub(super) struct SimulatedEngine {
    endpoint: String,
    child: Mutex<Child>,
    running: Arc<Mutex<Running>>,
    outbox: mpsc::UnboundedSender<Vec<u8>>,
    link: watch::Receiver<Link>,
}

impl SimulatedEngine {
    /// Starts the process, with its socket in `folder`. It ends when this value is dropped, and also when this process
    /// is killed, because its standard input then ends.
    ///
    /// # Errors
    /// The program cannot be started, or ended at once.
    pub(super) async fn start(kvrouted: &Path, folder: &Path, name: &str) -> io::Result<Self> {
        let socket = folder.join(format!("{name}.sock"));
        let mut command = Command::new(kvrouted);
        command.arg("demo-engine").arg("--link").arg(&socket).args(["--log", "/dev/null"]);
        command.args(["--capacity-blocks", &DEMO_CAPACITY_BLOCKS.to_string()]);
        command.args(["--time-factor", &TIME_FACTOR.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("its output is not a pipe"))?;
        let mut endpoint = String::new();
        // The socket is bound before the endpoint is printed.
        BufReader::new(stdout).read_line(&mut endpoint).await?;
        let stream = UnixStream::connect(&socket).await?;
        let (reading, writing) = stream.into_split();
        let running: Arc<Mutex<Running>> = Arc::default();
        let (outbox, to_send) = mpsc::unbounded_channel();
        let (state, link) = watch::channel(Link::Waiting);
        tokio::spawn(send_all(writing, to_send));
        tokio::spawn(receive_all(BufReader::new(reading), Arc::clone(&running), state));
        Ok(Self { endpoint: endpoint.trim().to_owned(), child: Mutex::new(child), running, outbox, link })
    }

    /// Where it publishes its events.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Waits until prompts may come. `false` = they may not by `deadline`.
    pub(super) async fn ready(&self, deadline: Instant) -> bool {
        let mut link = self.link.clone();
        let decided = tokio::time::timeout_at(deadline.into(), link.wait_for(|link| *link != Link::Waiting)).await;
        matches!(decided, Ok(Ok(link)) if *link == Link::Ready)
    }

    /// Runs a prompt, with the output that the engine cannot think of. The receiver ends early if the engine ends.
    pub(super) fn run(&self, prompt: &[u32], output: &[u32]) -> Result<mpsc::UnboundedReceiver<Progress>, Ended> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let id = {
            let mut running = self.running.lock();
            if *self.link.borrow() != Link::Ready {
                return Err(Ended);
            }
            let id = running.next_id;
            running.next_id = id.wrapping_add(1);
            running.requests.insert(id, sender);
            id
        };
        self.outbox.send(submit(id, monotonic_ns(), prompt, output)).map_err(|_| Ended)?;
        Ok(receiver)
    }

    /// Ends the process as SIGKILL does.
    pub(super) fn kill(&self) {
        // An error means that it has ended already.
        let _ = self.child.lock().start_kill();
    }
}

/// The monotonic clock that all processes of the machine share, nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The frame of a prompt that is sent at `sent_ns`.
fn submit(id: u32, sent_ns: u64, prompt: &[u32], output: &[u32]) -> Vec<u8> {
    let count = |tokens: &[u32]| u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let body_bytes = 16 + 4 * count(prompt) + 4 * count(output);
    let mut frame = body_bytes.to_le_bytes().to_vec();
    frame.push(SUBMIT);
    frame.extend(sent_ns.to_le_bytes());
    let numbers = [id, count(prompt)];
    frame.extend(numbers.iter().chain(prompt).chain(output).flat_map(|number| number.to_le_bytes()));
    frame
}

async fn send_all(mut writing: OwnedWriteHalf, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        // The reading half sees the end too.
        if writing.write_all(&frame).await.is_err() {
            return;
        }
    }
}

async fn receive_all(mut reading: BufReader<OwnedReadHalf>, running: Arc<Mutex<Running>>, state: watch::Sender<Link>) {
    while let Ok((kind, numbers)) = frame(&mut reading).await {
        let mut running = running.lock();
        match kind {
            READY => drop(state.send_replace(Link::Ready)),
            PREFILLED => {
                if let Some(to) = running.requests.get(&numbers[0]) {
                    // The caller may have hung up; an engine of the demo cannot be told to stop.
                    let _ = to.send(Progress::Prefilled { cached_blocks: numbers[1] });
                }
            }
            DONE => {
                if let Some(to) = running.requests.remove(&numbers[0]) {
                    let _ = to.send(Progress::Done);
                }
            }
            _ => {}
        }
    }
    let mut running = running.lock();
    state.send_replace(Link::Ended);
    running.requests.clear();
}

/// A frame's kind, and the first two numbers of its body after the time; 0 where it has fewer.
async fn frame(reading: &mut BufReader<OwnedReadHalf>) -> io::Result<(u8, [u32; 2])> {
    let body_bytes = reading.read_u32_le().await?;
    let kind = reading.read_u8().await?;
    if body_bytes > REPLY_BODY_BYTES_MAX {
        return Err(io::Error::other("the engine's frame is too large"));
    }
    let mut body = vec![0; body_bytes as usize];
    reading.read_exact(&mut body).await?;
    let numbers = body.get(8..).unwrap_or_default().chunks_exact(4);
    let mut numbers = numbers.map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    Ok((kind, [numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)]))
}

/// Seconds of an engine's time in a second: it takes about a quarter of a millisecond for a token.
const TIME_FACTOR: u16 = 64;
/// How long a simulated engine takes for a block of output.
pub(super) const DECODE_BLOCK: Duration = Duration::from_millis(4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompts_frame_has_its_length_its_number_and_its_tokens() {
        let frame = submit(7, 1 << 40, &[1, 2], &[3]);
        assert_eq!(frame[5..13], (1_u64 << 40).to_le_bytes());
        let numbers: Vec<u32> =
            frame[13..].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!((frame[4], frame.len()), (SUBMIT, 5 + 28));
        assert_eq!((&frame[..4], numbers.as_slice()), (&28_u32.to_le_bytes()[..], &[7, 2, 1, 2, 3][..]));
    }
}
