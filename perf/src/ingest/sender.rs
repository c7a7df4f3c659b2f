//! The engine's side: a process of its own that publishes prepared messages, and says when.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::frames::{Shape, recorded};
use super::threads::{clock_ns, nap, nap_exactly};
use crate::args::SendArgs;
use crate::failure::Failure;

/// The shortest nap of the sender. Messages that become due meanwhile leave together: a nap before each of 200 000
/// messages a second would take a processor from the threads that are measured.
const NAP_MIN: Duration = Duration::from_micros(100);
/// How long the child waits for a subscription, milliseconds.
const SUBSCRIPTION_MS_MAX: i32 = 30_000;

/// What the sender says at the end.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Sent {
    /// From the first message to the last.
    pub(crate) seconds: f64,
    /// When the first message of each conversation was about to be sent, nanoseconds of the monotonic clock.
    pub(crate) began_ns: Vec<u64>,
}

/// A sender, from where its receiver is.
pub(crate) struct Sender {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Where it publishes.
    pub(crate) endpoint: String,
}

impl Sender {
    /// Starts a sender and waits until its messages are prepared. `rate` 0 = as fast as it can.
    ///
    /// # Errors
    /// The child does not start.
    pub(crate) fn start(shape: &Shape, rate: f64, capture: Option<&std::path::Path>) -> Result<Self, Failure> {
        let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
        let mut command = Command::new(own);
        command.args(["ingest-send", "--wire", shape.wire.name(), "--blocks", &shape.blocks.to_string()]);
        command.args(["--messages", &shape.messages.to_string(), "--rate", &rate.to_string()]);
        if let Some(capture) = capture {
            command.arg("--capture").arg(capture);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::system("start a child process"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Child("has no pipes".to_owned()));
        };
        let mut sender = Self { child, input, output: BufReader::new(output), endpoint: String::new() };
        sender.endpoint = sender.line()?;
        Ok(sender)
    }

    /// Waits until somebody has subscribed, then lets it send.
    ///
    /// # Errors
    /// The child has ended.
    pub(crate) fn go(&mut self) -> Result<(), Failure> {
        self.line()?;
        self.input
            .write_all(b"go\n")
            .and_then(|()| self.input.flush())
            .map_err(Failure::system("tell a child to begin"))
    }

    /// Waits until everything is sent.
    ///
    /// # Errors
    /// The child has ended.
    pub(crate) fn sent(&mut self) -> Result<Sent, Failure> {
        let line = self.line()?;
        serde_json::from_str(&line).map_err(|error| Failure::Child(error.to_string()))
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(Failure::system("read from a child process"))?;
        if line.is_empty() {
            return Err(Failure::Child("ended early".to_owned()));
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // It has nothing to save. That it is gone already is no fault.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child's part.
///
/// # Errors
/// There is no socket, nobody subscribes, or the parent is gone.
pub(crate) fn serve(args: &SendArgs) -> Result<(), Failure> {
    let shape = args.shape();
    let payloads: Vec<Vec<u8>> = match &args.capture {
        Some(file) => {
            let recording = recorded(&std::fs::read(file).map_err(Failure::file(file))?);
            recording.iter().cycle().take(shape.messages as usize).cloned().collect()
        }
        None => shape.payloads().collect(),
    };
    let context = zmq::Context::new();
    // XPUB, to know when the subscription has arrived.
    let socket = context.socket(zmq::XPUB).map_err(Failure::zmq)?;
    // Nothing is dropped here: what the receiver does not take waits.
    socket.set_sndhwm(0).and_then(|()| socket.set_rcvtimeo(SUBSCRIPTION_MS_MAX)).map_err(Failure::zmq)?;
    socket.bind("tcp://127.0.0.1:*").map_err(Failure::zmq)?;
    let endpoint = socket.get_last_endpoint().map_err(Failure::zmq)?;
    say(&endpoint.map_err(|_| Failure::Child("an endpoint is no text".to_owned()))?)?;
    socket.recv_bytes(0).map_err(Failure::zmq)?;
    say("subscribed")?;
    wait()?;
    let sent = send(&socket, &shape, &payloads, args.rate)?;
    say(&serde_json::to_string(&sent).map_err(|error| Failure::Child(error.to_string()))?)?;
    // Until the parent has what it waits for.
    wait()
}

fn send(socket: &zmq::Socket, shape: &Shape, payloads: &[Vec<u8>], rate: f64) -> Result<Sent, Failure> {
    let mut began_ns = Vec::with_capacity(payloads.len());
    nap_exactly();
    let start = Instant::now();
    for (seq, payload) in payloads.iter().enumerate() {
        if rate > 0.0 {
            wait_until(start + Duration::from_secs_f64(seq as f64 / rate));
        }
        if (seq as u64).is_multiple_of(shape.conversation_messages()) {
            began_ns.push(clock_ns());
        }
        socket.send(&b""[..], zmq::SNDMORE).map_err(Failure::zmq)?;
        socket.send(&(seq as u64).to_be_bytes()[..], zmq::SNDMORE).map_err(Failure::zmq)?;
        socket.send(&payload[..], 0).map_err(Failure::zmq)?;
    }
    Ok(Sent { seconds: start.elapsed().as_secs_f64(), began_ns })
}

fn wait_until(due: Instant) {
    let left = due.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        nap(left.max(NAP_MIN));
    }
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Failure::system("write to the parent process"))
}

fn wait() -> Result<(), Failure> {
    std::io::stdin().read_line(&mut String::new()).map(drop).map_err(Failure::system("read from the parent process"))
}
