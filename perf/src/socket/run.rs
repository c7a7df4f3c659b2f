//! The servers in turns: each size of requests, each way to ask.

use std::os::fd::OwnedFd;
use std::time::Duration;

use kvrouted::ids::SpaceId;

use super::beside::Beside;
use super::contents::{Engines, SIZES, Size, size_named};
use super::dialect::{Dialect, Frames, Http};
use super::floor::ReplyBytes;
use super::known::{Holders, catch_up, fill, framed, held_by_peer, held_by_us};
use super::load::{Pace, Wire, run as ask};
use super::processors::Processors;
use super::report::Report;
use super::rows::{Key, Rows, Sample};
use super::server::Server;
use crate::args::{Io, ServedBy, SocketArgs};
use crate::failure::Failure;

/// Connections, and requests in flight on each.
const WAYS: [(u32, u32); 3] = [(1, 1), (1, 32), (8, 1)];

/// A size of requests, and how it is put.
pub(crate) struct Asked {
    /// Which.
    pub(crate) size: Size,
    /// In our frames.
    pub(crate) frames: Frames,
    /// As the peer takes it.
    pub(crate) http: Http,
}

impl Asked {
    /// The sizes that are asked about.
    ///
    /// # Errors
    /// They cannot be encoded.
    pub(crate) fn all(names: &[String]) -> Result<Vec<Self>, Failure> {
        let chosen: Vec<Size> = match names {
            [] => SIZES.to_vec(),
            names => names.iter().filter_map(|name| size_named(name)).collect(),
        };
        let asked = |size| Ok(Self { size, frames: Frames::new(size, SpaceId(0))?, http: Http::new(size)? });
        chosen.into_iter().map(asked).collect()
    }

    /// Bodies of the daemon's last replies.
    #[must_use]
    pub(crate) fn reply_bytes(&self) -> ReplyBytes {
        let [route, free] = self.frames.reply_bytes.get();
        ReplyBytes { route, free }
    }
}

/// A server's turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    side: ServedBy,
    io: Option<Io>,
    /// Whether the client never sleeps, and the server does not either, where it has the choice. Each then has
    /// processors of its own.
    spins: bool,
    /// Whether engines publish meanwhile.
    ingest: bool,
}

/// Who has a turn in a round.
fn turns(args: &SocketArgs) -> Vec<Turn> {
    let mut turns = Vec::new();
    let with_ingest: &[bool] = if args.ingest_rate > 0.0 { &[false, true] } else { &[false] };
    for spins in [false, true].into_iter().filter(|spins| *spins || !args.spinning) {
        let with_and_without = |side, io| with_ingest.iter().map(move |&ingest| Turn { side, io, spins, ingest });
        // The daemon spins on epoll only.
        for io in args.io.iter().copied().filter(|io| !spins || *io == Io::Epoll).map(Some) {
            turns.push(Turn { side: ServedBy::Floor, io, spins, ingest: false });
            turns.extend(with_and_without(ServedBy::Kvrouted, io));
        }
        if !args.no_peer {
            turns.extend(with_and_without(ServedBy::Peer, None));
        }
    }
    turns
}

/// Measures everything.
///
/// # Errors
/// A server does not start, refuses a request, or holds other blocks than it was told.
pub(crate) fn run(args: &SocketArgs) -> Result<Report, Failure> {
    let (asked, processors) = (Asked::all(&args.sizes)?, Processors::of_this_thread()?);
    learn_replies(args, &asked)?;
    let mut rows = Rows::default();
    for round in 0..args.repeat {
        let mut turns = turns(args);
        if round % 2 == 1 {
            turns.reverse();
        }
        for turn in turns {
            take(turn, args, &processors, &asked, &mut rows)?;
        }
    }
    Ok(Report::new(args.clone(), processors.count(), &asked, &rows))
}

/// Asks a daemon a little of each size, so that the floor's replies are as long as the daemon's.
///
/// # Errors
/// As [`run`].
pub(crate) fn learn_replies(args: &SocketArgs, asked: &[Asked]) -> Result<(), Failure> {
    let mut engines = Engines::start(args.workers)?;
    let server = Server::kvrouted(&engines, (Io::Epoll, 1), &[&args.serve], &[])?;
    fill(&mut engines, |tokens| held_by_us(&server, tokens))?;
    for asked in asked {
        let mut wires = [Wire::new(framed(&server.socket())?, Box::new(asked.frames.clone()), 1)];
        ask(&mut wires, Pace::Closed, false, Duration::from_millis(20), &mut 0)?;
    }
    Ok(())
}

fn take(
    turn: Turn,
    args: &SocketArgs,
    processors: &Processors,
    asked: &[Asked],
    rows: &mut Rows,
) -> Result<(), Failure> {
    let on = if turn.spins { processors.of_server() } else { &[] };
    let io = turn.io.unwrap_or(Io::Epoll);
    let every_way = |server: &Server, size, rows: &mut Rows, connect: &dyn Fn() -> Result<Connected, Failure>| {
        let _kept = turn.spins.then(|| processors.keep_client()).transpose()?;
        every_way(server, args, (turn, size), rows, connect)
    };
    let every_size = |server: &Server, rows: &mut Rows| {
        for (size, asked) in asked.iter().enumerate() {
            every_way(server, size, rows, &|| connect(server, turn.side, asked))?;
        }
        Ok(())
    };
    match turn.side {
        ServedBy::Floor => {
            for (size, asked) in asked.iter().enumerate() {
                let server = Server::floor(asked.reply_bytes(), io, (turn.spins, 1), on)?;
                every_way(&server, size, rows, &|| connect(&server, turn.side, asked))?;
            }
            Ok(())
        }
        ServedBy::Kvrouted => {
            let engines = Engines::start(args.workers)?;
            let spinning: &[String] = if turn.spins { &args.serve_spinning } else { &[] };
            let server = Server::kvrouted(&engines, (io, 1), &[&args.serve, spinning], on)?;
            beside(turn, args, engines, rows, |tokens| held_by_us(&server, tokens), |rows| every_size(&server, rows))
        }
        ServedBy::Peer => {
            let engines = Engines::start(args.workers)?;
            let server = Server::peer(&engines, on)?;
            beside(turn, args, engines, rows, |tokens| held_by_peer(&server, tokens), |rows| every_size(&server, rows))
        }
    }
}

/// A connection and how to ask on it.
type Connected = (OwnedFd, Box<dyn Dialect>);

fn connect(server: &Server, side: ServedBy, asked: &Asked) -> Result<Connected, Failure> {
    if side == ServedBy::Peer {
        let stream = server.connect_peer()?;
        stream.set_nonblocking(true).map_err(Failure::system("make a socket non-blocking"))?;
        return Ok((stream.into(), Box::new(asked.http.clone())));
    }
    Ok((framed(&server.socket())?, Box::new(asked.frames.clone())))
}

/// Measures once the server holds what the engines told, with what they say meanwhile.
fn beside(
    turn: Turn,
    args: &SocketArgs,
    mut engines: Engines,
    rows: &mut Rows,
    known: impl Fn(&[u32]) -> Result<Holders, Failure>,
    measure: impl FnOnce(&mut Rows) -> Result<(), Failure>,
) -> Result<(), Failure> {
    fill(&mut engines, &known)?;
    if !turn.ingest {
        return measure(rows);
    }
    let beside = Beside::start(engines, args.ingest_rate);
    measure(rows)?;
    rows.caught(turn.side, catch_up(beside, known)?);
    Ok(())
}

/// Closed and open loop, all [`WAYS`].
fn every_way(
    server: &Server,
    args: &SocketArgs,
    (turn, size): (Turn, usize),
    rows: &mut Rows,
    connect: &dyn Fn() -> Result<Connected, Failure>,
) -> Result<(), Failure> {
    let (time, mut number) = (Duration::from_secs_f64(args.seconds), 0);
    let is_asked = |way: &(u32, u32)| args.ways.is_empty() || args.ways.contains(&format!("{}x{}", way.0, way.1));
    for way in WAYS.into_iter().filter(is_asked) {
        for is_open in [false, true].into_iter().filter(|is_open| !(*is_open && args.closed)) {
            let pace = if is_open { Pace::Open(args.rate) } else { Pace::Closed };
            let open = |_| connect().map(|(fd, dialect)| Wire::new(fd, dialect, way.1));
            let mut wires = (0..way.0).map(open).collect::<Result<Vec<_>, _>>()?;
            ask(&mut wires, pace, turn.spins, time / 5, &mut number)?;
            let before_ns = server.cpu_ns()?;
            let measured = ask(&mut wires, pace, turn.spins, time, &mut number)?;
            let cpu_ns = server.cpu_ns()? - before_ns;
            let (side, io, ingest, client_spins) = (turn.side, turn.io, turn.ingest, turn.spins);
            rows.add(Key { size, side, io, ingest, client_spins, way, is_open }, Sample::new(&measured, cpu_ns));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn turns_of(line: &str) -> Vec<(ServedBy, Option<Io>, bool, bool)> {
        let Command::Socket(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("not socket") };
        turns(&args).into_iter().map(|turn| (turn.side, turn.io, turn.spins, turn.ingest)).collect()
    }

    #[test]
    fn whoever_is_compared_has_a_turn_asleep_and_spinning_with_ingest_and_without() {
        let all = turns_of("perf socket");
        for spins in [false, true] {
            assert!(all.contains(&(ServedBy::Floor, Some(Io::Epoll), spins, false)));
            for ingest in [false, true] {
                assert!(all.contains(&(ServedBy::Kvrouted, Some(Io::Epoll), spins, ingest)));
                assert!(all.contains(&(ServedBy::Peer, None, spins, ingest)));
            }
        }
        assert_eq!(all.len(), 10);
        let engines = turns_of("perf socket --io epoll,uring --no-peer --ingest-rate 0");
        assert!(engines.contains(&(ServedBy::Floor, Some(Io::Uring), false, false)), "each engine has its floor");
        assert!(!engines.iter().any(|(side, io, spins, ingest)| {
            *side == ServedBy::Peer || *ingest || (*spins && *io == Some(Io::Uring))
        }));
        assert_eq!(engines.len(), 6);
        assert!(turns_of("perf socket --spinning").iter().all(|(_, _, spins, _)| *spins));
    }
}
