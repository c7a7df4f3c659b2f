//! More serving cores, asked from as many client processes: one connection each, many requests in flight.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use super::contents::Engines;
use super::known::{fill, framed, held_by_us};
use super::load::{Pace, Wire, run as ask_wires};
use super::processors::Processors;
use super::report::load_average;
use super::run::{Asked, learn_replies};
use super::server::Server;
use crate::args::{Io, ServedBy, SocketArgs, SocketAskArgs};
use crate::failure::Failure;
use crate::measure::median;

/// Requests in flight of each client.
const IN_FLIGHT: u32 = 32;
/// What is asked, unless something is named.
const SIZE: &str = "720-hashes";

/// What a client says at its end.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Answered {
    requests: u64,
    requests_per_s: f64,
    p50_us: f64,
    p99_us: f64,
}

/// So many cores, asked by as many clients: medians over repeats.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Point {
    server: ServedBy,
    cores: u16,
    clients: u16,
    /// Of all clients together.
    requests_per_s: f64,
    /// The slowest client's.
    p50_us: f64,
    /// The slowest client's.
    p99_us: f64,
    /// Processor time of the server's process for each route and its free, microseconds.
    server_cpu_us: f64,
    /// Requests a second, of those of the first number of cores.
    speedup: f64,
}

/// Requests a second by cores.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Curve {
    args: SocketArgs,
    /// Which requests.
    size: String,
    /// Processors that this process may use.
    processors: usize,
    /// Tasks that ran or waited to, when it ended.
    load_average: f64,
    /// The most cores that have a processor each, their clients too; what is beyond shares, and says nothing of how
    /// the server scales.
    cores_with_processors: usize,
    points: Vec<Point>,
}

impl Curve {
    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header("server|cores|clients|req/s|speedup|p50 us|p99 us|server CPU us|processors".split('|'));
        for point in &self.points {
            let shared = usize::from(point.cores) > self.cores_with_processors;
            table.add_row([
                point.server.name().to_owned(),
                point.cores.to_string(),
                point.clients.to_string(),
                format!("{:.0}", point.requests_per_s),
                format!("{:.2}", point.speedup),
                format!("{:.1}", point.p50_us),
                format!("{:.1}", point.p99_us),
                format!("{:.2}", point.server_cpu_us),
                if shared { "shared" } else { "enough" }.to_owned(),
            ]);
        }
        format!(
            "{}, {IN_FLIGHT} in flight on a connection of each client, medians of {} repeats of {} s; {} processors, load average \
             {:.1}\n{table}",
            self.size, self.args.repeat, self.args.seconds, self.processors, self.load_average
        )
    }
}

/// Measures floor and daemon at each number of cores, in turns.
///
/// # Errors
/// A server or a client does not start, or a request is refused.
pub(crate) fn run(args: &SocketArgs) -> Result<Curve, Failure> {
    let size = args.sizes.first().map_or(SIZE, String::as_str).to_owned();
    let asked = Asked::all(std::slice::from_ref(&size))?;
    learn_replies(args, &asked)?;
    let Some(asked) = asked.first() else { return Err(Failure::Contract("there is no such size".to_owned())) };
    let io = args.io.first().copied().unwrap_or(Io::Epoll);
    let sides = [ServedBy::Floor, ServedBy::Kvrouted];
    let mut measured: Vec<(ServedBy, u16, Vec<[f64; 4]>)> =
        sides.iter().flat_map(|side| args.cores.iter().map(|cores| (*side, *cores, Vec::new()))).collect();
    for _ in 0..args.repeat {
        for (side, cores, samples) in &mut measured {
            let sample = if *side == ServedBy::Floor {
                let server = Server::floor(asked.reply_bytes(), io, (false, *cores), &[])?;
                ask_together(&server, args, &size, *cores)?
            } else {
                let mut engines = Engines::start(args.workers)?;
                let server = Server::kvrouted(&engines, (io, *cores), &[&args.serve], &[])?;
                fill(&mut engines, |tokens| held_by_us(&server, tokens))?;
                ask_together(&server, args, &size, *cores)?
            };
            samples.push(sample);
        }
    }
    let mut points: Vec<Point> = Vec::new();
    for (server, cores, samples) in measured {
        let of = |at: usize| median(samples.iter().map(|sample| sample[at]).collect());
        let first = points.iter().find(|point| point.server == server).map_or(of(0), |point| point.requests_per_s);
        points.push(Point {
            server,
            cores,
            clients: cores,
            requests_per_s: of(0),
            p50_us: of(1),
            p99_us: of(2),
            server_cpu_us: of(3),
            speedup: of(0) / first,
        });
    }
    let processors = Processors::of_this_thread()?.count();
    let (cores_with_processors, load_average) = (processors / 2, load_average());
    Ok(Curve { args: args.clone(), size, processors, load_average, cores_with_processors, points })
}

/// Requests a second of all clients, p50 and p99 of the slowest, the server's processor time for a request.
fn ask_together(server: &Server, args: &SocketArgs, size: &str, clients: u16) -> Result<[f64; 4], Failure> {
    let mut asking = (0..clients).map(|at| Asking::start(server, args, size, at)).collect::<Result<Vec<_>, _>>()?;
    asking.iter_mut().try_for_each(|client| client.line().map(drop))?;
    let before_ns = server.cpu_ns()?;
    asking.iter_mut().try_for_each(Asking::go)?;
    let lines = asking.iter_mut().map(Asking::line).collect::<Result<Vec<_>, _>>()?;
    let cpu_ns = server.cpu_ns()? - before_ns;
    let said = lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<Vec<Answered>, _>>();
    let said = said.map_err(|error| Failure::Child(error.to_string()))?;
    let slowest = |of: fn(&Answered) -> f64| said.iter().map(of).fold(0.0, f64::max);
    let requests: u64 = said.iter().map(|client| client.requests).sum();
    Ok([
        said.iter().map(|client| client.requests_per_s).sum(),
        slowest(|client| client.p50_us),
        slowest(|client| client.p99_us),
        cpu_ns as f64 / 1e3 / requests.max(1) as f64,
    ])
}

/// A client, from where it is started.
struct Asking {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Asking {
    fn start(server: &Server, args: &SocketArgs, size: &str, at: u16) -> Result<Self, Failure> {
        let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
        let mut command = Command::new(own);
        command.args(["socket-ask", "--size", size, "--in-flight", &IN_FLIGHT.to_string()]);
        command.args(["--seconds", &args.seconds.to_string(), "--after", &(u64::from(at) << 40).to_string()]);
        command.arg("--path").arg(server.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(Failure::system("start a child process"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Child("has no pipes".to_owned()));
        };
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    fn go(&mut self) -> Result<(), Failure> {
        self.input.write_all(b"go\n").map_err(Failure::system("tell a child to begin"))
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(Failure::system("read from a child process"))?;
        if line.is_empty() { Err(Failure::Child("ended early".to_owned())) } else { Ok(line) }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // It has nothing to save. That it is gone already is no fault.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The client's part: warms up, says so, and asks once it is told to.
///
/// # Errors
/// The server is not there or refuses, or the parent is gone.
pub(crate) fn ask(args: &SocketAskArgs) -> Result<(), Failure> {
    let asked = Asked::all(std::slice::from_ref(&args.size))?;
    let Some(asked) = asked.first() else { return Err(Failure::Contract("there is no such size".to_owned())) };
    let (time, mut number) = (Duration::from_secs_f64(args.seconds), args.after);
    let mut wires = [Wire::new(framed(&args.path)?, Box::new(asked.frames.clone()), args.in_flight)];
    ask_wires(&mut wires, Pace::Closed, false, time / 5, &mut number)?;
    say("ready")?;
    std::io::stdin().read_line(&mut String::new()).map_err(Failure::system("read from the parent process"))?;
    let measured = ask_wires(&mut wires, Pace::Closed, false, time, &mut number)?;
    let us = |quantile| measured.latency_ns.value_at_quantile(quantile) as f64 / 1e3;
    let answered = Answered {
        requests: measured.requests,
        requests_per_s: measured.requests as f64 / measured.seconds.max(1e-9),
        p50_us: us(0.5),
        p99_us: us(0.99),
    };
    say(&serde_json::to_string(&answered).map_err(|error| Failure::Child(error.to_string()))?)
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Failure::system("write to the parent process"))
}
