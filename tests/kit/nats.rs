//! A NATS server as a process, and a stranger who speaks to it without a client library.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;

use super::ports::free_port;
use super::{Process, folder, skipped, until};

/// A server at a port that stays the same when it is restarted.
pub(crate) struct NatsServer {
    program: PathBuf,
    port: u16,
    folder: Arc<TempDir>,
    process: Mutex<Process>,
}

impl NatsServer {
    /// Starts a server with further lines of its configuration; `None` = there is none on this machine, which is said.
    pub(crate) fn start(what: &str, options: &str) -> Option<Self> {
        let places = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
        // Debian installs it where only root's PATH leads.
        let places = places.unwrap_or_default().into_iter().chain(["/usr/sbin".into()]);
        let program = places.map(|place| place.join("nats-server")).find(|program| program.exists());
        let Some(program) = program else {
            skipped(what, "nats-server is not installed (Debian: apt-get install nats-server)");
            return None;
        };
        let (port, folder) = (free_port(), folder());
        // Options may name the folder.
        let options = options.replace("FOLDER", super::text(folder.path()));
        std::fs::write(folder.path().join("nats.conf"), format!("listen: 127.0.0.1:{port}\n{options}"))
            .expect("written");
        let process = Mutex::new(spawn(&program, port, &folder));
        Some(Self { program, port, folder, process })
    }

    /// Its address for clients.
    pub(crate) fn address(&self, scheme: &str) -> String {
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    pub(crate) fn kill(&self) {
        assert_eq!(self.process.lock().expect("whole").end("-KILL"), None);
    }

    /// Its own folder, where it may keep what it stores.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts it again after [`Self::kill`].
    pub(crate) fn start_again(&self) {
        *self.process.lock().expect("whole") = spawn(&self.program, self.port, &self.folder);
    }

    pub(crate) fn stranger(&self) -> Stranger {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let reader = BufReader::new(stream.try_clone().expect("a copy"));
        let mut stranger = Stranger { reader, stream, early: VecDeque::new() };
        assert!(stranger.line().starts_with("INFO "));
        stranger.send(b"CONNECT {\"verbose\":false,\"headers\":true}\r\n");
        stranger.settle();
        stranger
    }
}

fn spawn(program: &PathBuf, port: u16, folder: &Arc<TempDir>) -> Process {
    let mut command = Command::new(program);
    command.arg("-c").arg(folder.path().join("nats.conf"));
    let mut process = Process::spawn(folder.path(), "nats", command);
    until("the NATS server listens", || {
        assert!(process.is_running(), "{}", process.log());
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    process
}

/// Someone who may publish and subscribe, and has no secret of the routers.
pub(crate) struct Stranger {
    reader: BufReader<TcpStream>,
    stream: TcpStream,
    /// Messages that came while it waited for something else.
    early: VecDeque<(String, Vec<u8>)>,
}

impl Stranger {
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    pub(crate) fn publish(&mut self, subject: &str, reply: &str, payload: &[u8]) {
        self.send(&[format!("PUB {subject} {reply} {}\r\n", payload.len()).as_bytes(), payload, b"\r\n"].concat());
    }

    /// With a part for headers, whatever is in it.
    pub(crate) fn publish_with_headers(&mut self, subject: &str, headers: &[u8], payload: &[u8]) {
        let line = format!("HPUB {subject} {} {}\r\n", headers.len(), headers.len() + payload.len());
        self.send(&[line.as_bytes(), headers, payload, b"\r\n"].concat());
    }

    /// Waits until the server has taken everything.
    pub(crate) fn settle(&mut self) {
        self.send(b"PING\r\n");
        loop {
            let line = self.line();
            match line.trim_end() {
                "PONG" => return,
                "PING" => self.send(b"PONG\r\n"),
                line if line.starts_with("INFO ") => {}
                line => {
                    let message = self.message_after(line);
                    self.early.push_back(message.unwrap_or_else(|| panic!("{line}")));
                }
            }
        }
    }

    pub(crate) fn subscribe(&mut self, subject: &str) {
        self.send(format!("SUB {subject} 1\r\n").as_bytes());
        self.settle();
    }

    /// The next message of its subscription: its subject and its bytes.
    pub(crate) fn message(&mut self) -> (String, Vec<u8>) {
        if let Some(message) = self.early.pop_front() {
            return message;
        }
        loop {
            let line = self.line();
            if let Some(message) = self.message_after(&line) {
                return message;
            }
        }
    }

    /// The message that a line begins: its subject and its bytes; `None` = the line begins none.
    fn message_after(&mut self, line: &str) -> Option<(String, Vec<u8>)> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if !matches!(words.first(), Some(&"MSG" | &"HMSG")) {
            return None;
        }
        let bytes: usize = words.last().and_then(|bytes| bytes.parse().ok()).expect("a length");
        let mut payload = vec![0; bytes + 2];
        self.reader.read_exact(&mut payload).expect("a message");
        payload.truncate(bytes);
        // Its headers are none of the test's.
        let headers = if words[0] == "HMSG" { words[words.len() - 2].parse().expect("a length") } else { 0 };
        payload.drain(..headers);
        Some((words[1].to_owned(), payload))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("a line");
        assert!(!line.is_empty(), "the server has closed the connection");
        line
    }
}
