//! Everything measured, in turns.

use super::frames::{Shape, recorded};
use super::report::{Report, Row};
use super::sender::Sender;
use super::{decode, floor, ours, peer, seen};
use crate::args::{IngestArgs, Wire};
use crate::compare::machine;
use crate::failure::Failure;

/// Blocks that each message stores.
const MESSAGE_BLOCKS: [u32; 3] = [1, 16, 256];
/// Messages of one run, by their blocks: about as many seconds each.
const MESSAGES: [(u32, u64); 3] = [(1, 600_000), (16, 150_000), (256, 20_000)];
/// Messages of one second of waiting for what was sent, at most this many seconds.
const SEEN_SECONDS: f64 = 4.0;

/// Measures everything.
///
/// # Errors
/// A side fails, or a child does.
pub(crate) fn run(args: &IngestArgs) -> Result<Report, Failure> {
    let mut rows = Vec::new();
    for wire in Wire::ALL {
        for blocks in MESSAGE_BLOCKS.into_iter().filter(|blocks| args.blocks.is_none_or(|only| only == *blocks)) {
            rows.push(row(args, wire, blocks)?);
        }
    }
    if let Some(file) = &args.capture {
        rows.push(captured(args, file)?);
    }
    Ok(Report { machine: machine(), repeat: args.repeat, scale: args.scale, rows })
}

/// The figures of one size in one format.
fn row(args: &IngestArgs, wire: Wire, blocks: u32) -> Result<Row, Failure> {
    let of_size = MESSAGES.iter().find(|(of, _)| *of == blocks).map_or(0, |(_, messages)| *messages);
    let shape = Shape { wire, blocks, messages: ((of_size as f64 * args.scale) as u64).max(1000) };
    let mut row = Row::new(wire.name(), blocks, shape.messages);
    for turn in 0..args.repeat {
        speeds(&mut row, &shape, None, turn)?;
    }
    row.block_ns = Some(decode::measure(wire, blocks)?);
    let half = row.ours().per_s / 2.0;
    for _ in 0..args.repeat {
        let messages = ((half * SEEN_SECONDS * args.scale.min(1.0)) as u64).clamp(500, 2 * shape.messages);
        let shape = Shape { messages, ..shape };
        row.seen.push(seen::measure(&shape, half)?);
        row.seen_floor.push(seen::measure_floor(&shape, half)?);
    }
    Ok(row)
}

/// One turn of all sides; who goes first changes.
fn speeds(row: &mut Row, shape: &Shape, capture: Option<&std::path::Path>, turn: u32) -> Result<(), Failure> {
    let sender = || Sender::start(shape, 0.0, capture);
    for at in 0..3 {
        match (at + turn) % 3 {
            0 => {
                let (taken, seconds) = floor::measure(sender()?, shape.messages)?;
                row.floor.push(taken);
                row.sender_per_s.push(shape.messages as f64 / seconds.max(1e-9));
            }
            1 => row.ours.push(ours::measure(sender()?, shape.messages)?),
            _ if shape.wire == Wire::Msgpack && capture.is_none() => {
                row.peer.push(peer::measure(sender()?, shape.messages)?);
            }
            _ => {}
        }
    }
    Ok(())
}

/// A recording, sent again and again. Its blocks are stored again and again too, so nothing is looked for.
fn captured(args: &IngestArgs, file: &std::path::Path) -> Result<Row, Failure> {
    let recording = recorded(&std::fs::read(file).map_err(Failure::file(file))?);
    if recording.is_empty() {
        return Err(Failure::Contract(format!("{}: no recorded message", file.display())));
    }
    let messages = (200_000.0 * args.scale) as u64;
    let shape = Shape { wire: Wire::Msgpack, blocks: 1, messages: messages.max(1000) };
    let mut row = Row::new("recorded", 0, shape.messages);
    for turn in 0..args.repeat {
        speeds(&mut row, &shape, Some(file), turn)?;
    }
    Ok(row)
}
