//! The demo's gateway: replays the workload through the daemon's socket, once under each policy, and runs every request
//! on the worker that the daemon chose. It also reads the daemon's decision times from `/metrics`.

mod engines;
mod pacer;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;

use self::engines::EngineLink;
use self::pacer::Pacer;
use super::args::GatewayArgs;
use super::engine::{BLOCK_TOKENS, TIME_FACTOR, block_names};
use super::report::{GatewayMessage, LatencyQuantiles, PhaseTotals, UserTimes};
use super::run_records::{self, CandidateRecord, RecordWriter, ReplyRecord};
use super::workload::Workload;
use super::{MODEL, load_workload, processes};
use crate::client::{Client, ClientOptions};
use crate::error::{Error, Kind};
use crate::ids::SpaceId;
use crate::load::{BookingOutcome, BookingRef};
use crate::route::{BookingRequest, Mode, Overrides, Prompt, RouteRequest};
use crate::trust::TrustLevel;
use crate::wire::RouteReply;

/// Timeout of the daemon's answers.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the daemon to apply published batches.
const APPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// Requests between two reports of progress.
const PROGRESS_REQUESTS: usize = 10;

/// Runs every phase and prints `GatewayMessage`s, one in each line.
///
/// # Errors
/// Failures of the daemon, an engine or a file.
pub fn run(args: &GatewayArgs) -> Result<(), Error> {
    processes::end_with_stdin()?;
    let workload = load_workload(args.seed, args.requests, args.trace.as_deref())?;
    let engines: Vec<EngineLink> =
        args.engines.iter().map(|(id, path)| EngineLink::connect(*id, path)).collect::<Result<_, _>>()?;
    let gateway = Gateway { workload: &workload, engines: &engines, log: Mutex::new(RecordWriter::create(&args.log)?) };
    engines.iter().try_for_each(EngineLink::ready)?;
    // Connect before the first arrival and keep the connections, as gateways do: connecting while requests arrive would
    // distort the times of every policy.
    let mut daemons: Vec<Daemon> =
        (0..args.in_flight.max(1)).map(|_| Daemon::connect(&args.socket)).collect::<Result<_, _>>()?;
    for (place, policy) in args.policies.iter().enumerate() {
        gateway.clear_caches(&mut daemons[0])?;
        // Read just before the phase, because clearing the caches also asked the daemon.
        let before = args.metrics_port.and_then(Decisions::read);
        let mut totals = gateway.run((place, *policy), &mut daemons)?;
        let after = args.metrics_port.and_then(Decisions::read);
        totals.daemon_mean_us = after.zip(before).and_then(|(after, before)| after.mean_us_since(before));
        print(&GatewayMessage::Over(place, totals))?;
    }
    gateway.log.lock().flush()?;
    let batches = engines.iter().map(|engine| Ok((engine.worker, engine.finish()?))).collect::<Result<_, Error>>()?;
    print(&GatewayMessage::Finished(batches))
}

/// A policy and its index.
type Phase = (usize, Mode);

/// The state that all requests share.
struct Gateway<'a> {
    workload: &'a Workload,
    engines: &'a [EngineLink],
    log: Mutex<RecordWriter>,
}

/// The totals of a phase.
struct Counts {
    totals: PhaseTotals,
    round_trip_ns: Histogram<u64>,
    ttft_us: Histogram<u64>,
    tpot_us: Histogram<u64>,
    e2e_us: Histogram<u64>,
}

/// When a request passed its stages, nanoseconds: on the machine's clock until it was sent to its engine, on the engine's
/// from then on.
struct Stages {
    asked_ns: u64,
    replied_ns: u64,
    sent_ns: u64,
    first_ns: u64,
    end_ns: u64,
}

impl Gateway<'_> {
    /// Empties every engine's cache and waits until the daemon has applied it.
    fn clear_caches(&self, daemon: &mut Daemon) -> Result<(), Error> {
        let cleared: Vec<u64> = self.engines.iter().map(EngineLink::clear).collect::<Result<_, _>>()?;
        let deadline = run_records::monotonic_ns() + APPLY_TIMEOUT.as_nanos() as u64;
        loop {
            let reply = daemon.route(&[0; 4 * BLOCK_TOKENS], self.engines.len(), 0, (Mode::Kv, None))?;
            let applied = |engine: &EngineLink| {
                let of = reply.candidates.iter().find(|candidate| candidate.worker.id.0 == engine.worker);
                of.and_then(|candidate| candidate.trust.as_of_seq).map(|seq| seq.0)
            };
            let Some(late) = self.engines.iter().zip(&cleared).find(|(engine, seq)| applied(engine) < Some(**seq))
            else {
                return Ok(());
            };
            if run_records::monotonic_ns() > deadline {
                return Err(Error::new(
                    Kind::Connection,
                    format!("the daemon has not applied batch {} of engine {}", late.1, late.0.worker),
                    "see the daemon's log in the folder given by --keep",
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Replays the whole workload with at most one request in flight on each connection.
    fn run(&self, phase: Phase, daemons: &mut [Daemon]) -> Result<PhaseTotals, Error> {
        let counts = Mutex::new(Counts::new(self.engines.len())?);
        let pacer = Pacer::new(&self.workload.requests);
        let results: Vec<Result<(), Error>> = std::thread::scope(|scope| {
            let (pacer, counts) = (&pacer, &counts);
            let threads: Vec<_> = daemons
                .iter_mut()
                .map(|daemon| {
                    scope.spawn(move || {
                        let result = self.run_slot(phase, pacer, daemon, counts);
                        if result.is_err() {
                            pacer.close();
                        }
                        result
                    })
                })
                .collect();
            let broken = || Err(Error::new(Kind::Internal, "a thread of the gateway panicked", "report it"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| broken())).collect()
        });
        results.into_iter().collect::<Result<(), Error>>()?;
        Ok(counts.into_inner().finish())
    }

    /// Runs one request after another until none is left.
    fn run_slot(&self, phase: Phase, pacer: &Pacer, daemon: &mut Daemon, counts: &Mutex<Counts>) -> Result<(), Error> {
        while let Some(index) = pacer.enter() {
            let end_ns = self.run_request(phase, index, daemon, counts)?;
            let done = pacer.leave(index, end_ns);
            if done.is_multiple_of(PROGRESS_REQUESTS) {
                print(&GatewayMessage::Progress(phase.0, done))?;
            }
        }
        Ok(())
    }

    /// Runs a request. Returns when it was complete, by the engine's clock.
    fn run_request(
        &self,
        phase: Phase,
        index: usize,
        daemon: &mut Daemon,
        counts: &Mutex<Counts>,
    ) -> Result<u64, Error> {
        let (prompt, output) = (self.workload.prompt(index), self.workload.output(index));
        let tokens = [prompt.len(), output.len()];
        let request_id = format!("demo-{index}");
        let book = BookingRequest { request_id: &request_id, attempt: 0 };
        let prompt_bytes: Vec<u8> = prompt.iter().flat_map(|token| token.to_le_bytes()).collect();
        // Only the client's call lies between the two stamps; the gateway's own work is no latency.
        let asked_ns = run_records::monotonic_ns();
        let reply = daemon.route(&prompt_bytes, self.engines.len(), output.len() as u32, (phase.1, Some(book)))?;
        let replied_ns = run_records::monotonic_ns();
        self.record_reply((phase.0, index), (asked_ns, replied_ns), &prompt, &reply)?;

        let chosen = self.chosen(&reply)?;
        let sent_ns = run_records::monotonic_ns();
        let answers = self.engines[chosen].submit(index as u32, sent_ns, prompt, output)?;
        let (cached_blocks, first_ns) = answers.prefilled()?;
        let booking = reply.booking.map(BookingRef::Handle);
        if let Some(booking) = &booking {
            applied(daemon.client.prefill_complete(booking)?, index)?;
        }
        let end_ns = answers.done()?;
        if let Some(booking) = &booking {
            applied(daemon.client.free(booking)?, index)?;
        }
        let stages = Stages { asked_ns, replied_ns, sent_ns, first_ns, end_ns };
        counts.lock().add(chosen, tokens, u64::from(cached_blocks), &stages);
        Ok(end_ns)
    }

    /// The index of the engine that the daemon chose.
    fn chosen(&self, reply: &RouteReply) -> Result<usize, Error> {
        let first = reply.candidates.first().map(|candidate| candidate.worker.id.0);
        let place = first.and_then(|id| self.engines.iter().position(|engine| engine.worker == id));
        match place {
            Some(place) if reply.booking.is_some() => Ok(place),
            _ => Err(Error::new(
                Kind::Internal,
                format!("the daemon chose worker {first:?} with booking {:?}", reply.booking),
                "see the daemon's log in the folder given by --keep",
            )),
        }
    }

    /// Records the daemon's reply for the comparison at the end.
    fn record_reply(
        &self,
        (phase, request): (usize, usize),
        (left_ns, replied_ns): (u64, u64),
        prompt: &[u32],
        reply: &RouteReply,
    ) -> Result<(), Error> {
        let candidates: Vec<CandidateRecord> = reply
            .candidates
            .iter()
            .map(|candidate| CandidateRecord {
                worker: candidate.worker.id.0,
                device: candidate.overlap.device,
                lower: candidate.overlap.total() - candidate.overlap.device,
                as_of_seq: candidate.trust.as_of_seq.map(|seq| seq.0),
                exact: candidate.trust.level == TrustLevel::Exact,
            })
            .collect();
        if candidates.len() != self.engines.len() {
            return Err(Error::new(
                Kind::Internal,
                format!("the daemon listed {} of {} engines", candidates.len(), self.engines.len()),
                "see the daemon's log in the folder given by --keep",
            ));
        }
        let record = ReplyRecord { phase, request, left_ns, replied_ns, chain: block_names(prompt), candidates };
        let line = run_records::line_of(&record)?;
        self.log.lock().write_line(&line)
    }
}

/// One connection to the daemon.
struct Daemon {
    client: Client,
    space: SpaceId,
}

impl Daemon {
    fn connect(socket: &Path) -> Result<Self, Error> {
        let options =
            ClientOptions { name: "demo-gateway".to_owned(), timeout: Some(REPLY_TIMEOUT), ..ClientOptions::default() };
        let client = Client::connect(socket, &options)?;
        let space = client.space(MODEL, None)?.id;
        Ok(Self { client, space })
    }

    /// Asks where to run a prompt, given as token ids of 4 bytes each, little-endian. Books it if `book` says so.
    fn route(
        &mut self,
        prompt: &[u8],
        candidates_max: usize,
        expected_output_tokens: u32,
        (policy, book): (Mode, Option<BookingRequest<'_>>),
    ) -> Result<RouteReply, Error> {
        let overrides = Overrides { mode: Some(policy), ..Overrides::NONE };
        let plain = RouteRequest::new(self.space, Prompt::Tokens(prompt));
        self.client.route(&RouteRequest { book, candidates_max, expected_output_tokens, overrides, ..plain })
    }
}

impl Counts {
    fn new(engines: usize) -> Result<Self, Error> {
        let totals = PhaseTotals { prefill_tokens: vec![0; engines], ..PhaseTotals::default() };
        // Up to a minute, and up to ten of the engines' time, three digits.
        let round_trip_ns = Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(histogram_failed)?;
        let ttft_us = Histogram::new_with_bounds(1, 600_000_000, 3).map_err(histogram_failed)?;
        let (tpot_us, e2e_us) = (ttft_us.clone(), ttft_us.clone());
        Ok(Self { totals, round_trip_ns, ttft_us, tpot_us, e2e_us })
    }

    /// Adds a request of these prompt and output tokens.
    fn add(&mut self, chosen: usize, [prompt, output]: [usize; 2], cached_blocks: u64, stages: &Stages) {
        let Stages { asked_ns, replied_ns, sent_ns, first_ns, end_ns } = *stages;
        let round_trip_ns = replied_ns - asked_ns;
        self.round_trip_ns.saturating_record(round_trip_ns);
        // The daemon's answer takes its real time.
        let felt_us =
            |until_ns: u64| (round_trip_ns + u64::from(TIME_FACTOR) * until_ns.saturating_sub(sent_ns)) / 1000;
        self.ttft_us.saturating_record(felt_us(first_ns));
        self.e2e_us.saturating_record(felt_us(end_ns));
        if output > 1 {
            let between_ns = u64::from(TIME_FACTOR) * end_ns.saturating_sub(first_ns) / (output - 1) as u64;
            self.tpot_us.saturating_record(between_ns / 1000);
        }
        self.totals.prompt_blocks += (prompt / BLOCK_TOKENS) as u64;
        self.totals.cached_blocks += cached_blocks;
        self.totals.prefill_tokens[chosen] += prompt as u64 - cached_blocks * BLOCK_TOKENS as u64;
    }

    fn finish(mut self) -> PhaseTotals {
        let us = |quantile| self.round_trip_ns.value_at_quantile(quantile) as f64 / 1000.0;
        self.totals.round_trip_us = LatencyQuantiles { p50: us(0.5), p99: us(0.99), p999: us(0.999) };
        let times = |of: &Histogram<u64>| {
            let s = |quantile| of.value_at_quantile(quantile) as f64 * 1e-6;
            UserTimes { mean: of.mean() * 1e-6, p50: s(0.5), p99: s(0.99) }
        };
        (self.totals.ttft_s, self.totals.tpot_s) = (times(&self.ttft_us), times(&self.tpot_us));
        self.totals.e2e_s = times(&self.e2e_us);
        self.totals
    }
}

/// Fails if the daemon does not know the booking: it would no longer count that load.
fn applied(outcome: BookingOutcome, request: usize) -> Result<(), Error> {
    if outcome == BookingOutcome::Applied {
        return Ok(());
    }
    let what = format!("the daemon answers {outcome:?} about the booking of request {request}");
    Err(Error::new(Kind::Internal, what, "see the daemon's log in the folder given by --keep"))
}

fn histogram_failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(Kind::Internal, "latencies cannot be counted", "report it").caused_by(error)
}

fn print(message: &GatewayMessage) -> Result<(), Error> {
    let failed = || Error::new(Kind::System, "the demo has closed the gateway's output", "start the demo again");
    let line = serde_json::to_string(message).map_err(|error| failed().caused_by(error))?;
    writeln!(std::io::stdout().lock(), "{line}").map_err(|error| failed().caused_by(error))
}

/// Timeout of connecting, and of each read and write.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest response read, in bytes.
const SCRAPE_BYTES_MAX: u64 = 16 << 20;

/// The daemon's decisions so far, from its metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Decisions {
    /// Time of all decisions, in seconds.
    seconds_sum: f64,
    /// Number of decisions.
    count: f64,
}

impl Decisions {
    /// Reads the metrics on `port` of the loopback interface. `None` if that fails: the demo then shows that the time
    /// is not known.
    fn read(port: u16) -> Option<Self> {
        let mut stream =
            TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SCRAPE_TIMEOUT).ok()?;
        stream.set_read_timeout(Some(SCRAPE_TIMEOUT)).ok()?;
        stream.set_write_timeout(Some(SCRAPE_TIMEOUT)).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut response = String::new();
        stream.take(SCRAPE_BYTES_MAX).read_to_string(&mut response).ok()?;
        Self::parse(&response)
    }

    /// Finds the sums in an HTTP response in Prometheus' text format.
    fn parse(response: &str) -> Option<Self> {
        let (head, body) = response.split_once("\r\n\r\n")?;
        if head.split(' ').nth(1) != Some("200") {
            return None;
        }
        let value = |name: &str| body.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        Some(Self {
            seconds_sum: value("kvrouted_decision_seconds_sum ")?,
            count: value("kvrouted_decision_seconds_count ")?,
        })
    }

    /// Mean time of the decisions made since `before`, in microseconds; `None` if there were none.
    fn mean_us_since(self, before: Self) -> Option<f64> {
        let count = self.count - before.count;
        (count > 0.0).then(|| (self.seconds_sum - before.seconds_sum) * 1e6 / count)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const BODY: &str = "# TYPE kvrouted_decision_seconds histogram\n\
                        kvrouted_decision_seconds_sum 0.006\n\
                        kvrouted_decision_seconds_count 1200\n\
                        kvrouted_decision_seconds_bucket{le=\"0.1\"} 1200\n# EOF\n";

    fn response(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[test]
    fn the_mean_covers_the_decisions_since() {
        let after = Decisions::parse(&response("200 OK", BODY)).unwrap();
        let before = Decisions { seconds_sum: 0.002, count: 200.0 };
        assert!((after.mean_us_since(before).unwrap() - 4.0).abs() < 1e-9);
        assert_eq!(after.mean_us_since(after), None);
    }

    #[test]
    fn responses_without_the_figures_are_not_known() {
        assert_eq!(Decisions::parse(&response("503 Service Unavailable", BODY)), None);
        assert_eq!(Decisions::parse(&response("200 OK", "kvrouted_decision_seconds_sum 0.1\n")), None);
        assert_eq!(Decisions::parse("HTTP/1.1 200 OK\r\n"), None);
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        assert_eq!(Decisions::read(free), None, "no process listens");
    }

    #[test]
    fn decisions_are_read_over_a_socket() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(response("200 OK", BODY).as_bytes()).unwrap();
            String::from_utf8(request).unwrap()
        });
        assert_eq!(Decisions::read(port), Some(Decisions { seconds_sum: 0.006, count: 1200.0 }));
        assert!(served.join().unwrap().starts_with("GET /metrics HTTP/1.1\r\n"));
    }
}
