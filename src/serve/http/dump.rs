//! `/dump`: every block of every worker, as the events that would store them, in the format that Dynamo's indexers take
//! from each other. The dump is written while it is read, so that only a few pieces of its text are in memory. Beside
//! them are the hashes of the present worker, 20 to 40 bytes for each block, because a child is written only after its
//! parent.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::Frame;
use rustc_hash::FxHashMap;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::App;
use super::reader_time::ReaderTime;
use super::registry::group_of;
use super::reply::Refusal;
use crate::error::{Error, Kind};
use crate::fleet::WorkerRecord;
use crate::ids::Tier;
use crate::index::StoreBlocks;
use crate::limits::{HTTP_DUMP_BYTES_PER_S_MIN, HTTP_DUMP_CHUNK_BYTES, HTTP_DUMP_CHUNKS_MAX, HTTP_DUMP_LAG_MS_MAX};
use crate::metrics::HttpCounter;

/// Starts a dump. One dump runs at a time.
pub(super) async fn dump(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    // Administration, because a worker's events wait while its blocks are read.
    app.administering()?;
    let Ok(place) = Arc::clone(&app.dumps).try_acquire_owned() else {
        app.counters.bump(HttpCounter::DumpsRefused);
        return Err(Error::new(Kind::Overloaded, "a dump is in progress", "ask again once it has ended").into());
    };
    app.counters.bump(HttpCounter::Dumps);
    let (send, pieces) = mpsc::channel(HTTP_DUMP_CHUNKS_MAX);
    let is_cut = Arc::<AtomicBool>::default();
    let time = ReaderTime::new(Duration::from_millis(HTTP_DUMP_LAG_MS_MAX), HTTP_DUMP_BYTES_PER_S_MIN);
    let reader = Reader { pieces: send, time, runtime: Handle::current(), is_cut: Arc::clone(&is_cut) };
    let writing = Writing { app, reader: Some(reader), out: Vec::new(), is_whole: true, events: 0, _place: place };
    // On a thread of its own, because the index hands its blocks over by blocking calls.
    drop(tokio::task::spawn_blocking(move || writing.run()));
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::new(Pieces { pieces, is_cut })).into_response())
}

/// The written part of a dump that has not been read.
struct Pieces {
    pieces: mpsc::Receiver<Bytes>,
    /// Whether the dump ends before its end.
    is_cut: Arc<AtomicBool>,
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        // Relaxed: the flag orders nothing; pieces written before it are dropped.
        if self.is_cut.load(Ordering::Relaxed) {
            return Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into())));
        }
        self.pieces.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// The way to the reader of a dump.
struct Reader {
    pieces: mpsc::Sender<Bytes>,
    time: ReaderTime,
    runtime: Handle,
    is_cut: Arc<AtomicBool>,
}

/// Why the rest is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unread {
    /// The reader has gone.
    Gone,
    /// It is too slow.
    Slow,
}

impl Reader {
    /// Waits until the reader takes a piece; a reader may lag for a bounded time. Blocks the calling thread.
    fn give(&mut self, piece: Bytes) -> Result<(), Unread> {
        let (bytes, began) = (piece.len(), Instant::now());
        let sent = match self.pieces.try_send(piece) {
            Ok(()) => Ok(Ok(())),
            Err(TrySendError::Closed(_)) => return Err(Unread::Gone),
            Err(TrySendError::Full(piece)) => {
                let sending = async { tokio::time::timeout(self.time.left(), self.pieces.send(piece)).await };
                self.runtime.block_on(sending)
            }
        };
        self.time.took(bytes, began.elapsed());
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Unread::Gone),
            Err(_) => {
                // Relaxed: see `Pieces`.
                self.is_cut.store(true, Ordering::Relaxed);
                Err(Unread::Slow)
            }
        }
    }
}

struct Writing {
    app: Arc<App>,
    /// `None` = the reader has gone, or is too slow.
    reader: Option<Reader>,
    out: Vec<u8>,
    /// Whether no block was left out.
    is_whole: bool,
    events: u64,
    _place: OwnedSemaphorePermit,
}

/// The workers of one model and routing group.
#[derive(Default)]
struct Partition {
    block_size: Option<u32>,
    workers: Vec<WorkerRecord>,
}

/// A worker whose blocks, or some of them, are left out.
struct LeftOut {
    worker_id: u64,
    dp_rank: u32,
    reason: &'static str,
}

/// Why blocks of a worker are left out, if any are. A deadline that passed comes before other reasons.
fn left_out_for(dumped: Result<(), &'static str>, is_late: bool, has_dormant: bool) -> Option<&'static str> {
    match dumped {
        Err(_) if is_late => Some("deadline_passed"),
        Err(reason) => Some(reason),
        Ok(()) => has_dormant.then_some("blocks_without_parent"),
    }
}

impl Writing {
    fn run(mut self) {
        let mut is_first = true;
        self.out.push(b'{');
        for (name, partition) in self.partitions() {
            if !std::mem::take(&mut is_first) {
                self.out.push(b',');
            }
            self.partition(&name, &partition);
        }
        self.out.extend_from_slice(b"}");
        self.flush();
        if self.reader.is_none() || !self.is_whole {
            self.app.counters.bump(HttpCounter::DumpsIncomplete);
        }
    }

    /// The pools of one model and routing group are one partition: their workers differ.
    fn partitions(&self) -> BTreeMap<String, Partition> {
        let fleet = self.app.backend.fleet();
        let mut partitions: BTreeMap<String, Partition> = BTreeMap::new();
        for space in &fleet.spaces {
            let workers: Vec<_> = fleet.workers_of(space.id).cloned().collect();
            if workers.is_empty() {
                continue;
            }
            let partition = partitions.entry(format!("{}:{}", space.model, group_of(space))).or_default();
            let registered = self.app.records.lock().block_size_of(space.id);
            let known = space.scheme.get().map(|scheme| scheme.block_size).or(registered);
            partition.block_size = partition.block_size.or(known);
            partition.workers.extend(workers);
        }
        partitions
    }

    fn partition(&mut self, name: &str, partition: &Partition) {
        self.text(name);
        let block_size = partition.block_size.unwrap_or(0);
        self.write(format_args!(":{{\"block_size\":{block_size},\"events\":["));
        self.events = 0;
        let mut left_out = Vec::new();
        for record in &partition.workers {
            let (worker_id, dp_rank) = (record.worker.id.0, record.worker.rank.0);
            left_out.extend(self.worker(record).map(|reason| LeftOut { worker_id, dp_rank, reason }));
        }
        self.out.extend_from_slice(b"],\"left_out\":[");
        for (at, LeftOut { worker_id, dp_rank, reason }) in left_out.iter().enumerate() {
            self.is_whole = false;
            let comma = if at > 0 { "," } else { "" };
            self.write(format_args!(
                "{comma}{{\"worker_id\":{worker_id},\"dp_rank\":{dp_rank},\"reason\":\"{reason}\"}}"
            ));
        }
        self.out.extend_from_slice(b"]}");
    }

    /// Writes a worker's blocks. Returns the reason if some are left out. The worker's events wait meanwhile, so a
    /// deadline stops a reader that is slow but never lags too far.
    fn worker(&mut self, record: &WorkerRecord) -> Option<&'static str> {
        if record.events.is_none() || self.reader.is_none() {
            return None;
        }
        let app = Arc::clone(&self.app);
        // The tiers in which each block has been written.
        let mut written: FxHashMap<u64, u8> = FxHashMap::default();
        let (mut has_dormant, mut is_late) = (false, false);
        let deadline = Instant::now() + app.dump_worker;
        let dumped = app.backend.dump(record, &mut |store| {
            let bit = 1_u8 << store.tier.index();
            let is_news = store.hashes.iter().any(|hash| written.get(&hash.0).is_none_or(|tiers| tiers & bit == 0));
            if store.parent.is_some_and(|parent| !written.contains_key(&parent.0)) {
                // Without its parent it does not count here, and Dynamo could not store it.
                has_dormant = true;
            } else if is_news {
                store.hashes.iter().for_each(|hash| *written.entry(hash.0).or_default() |= bit);
                self.event(record, store);
            }
            is_late = Instant::now() >= deadline;
            self.reader.is_some() && !is_late
        });
        left_out_for(dumped, is_late && self.reader.is_some(), has_dormant)
    }

    fn event(&mut self, record: &WorkerRecord, store: &StoreBlocks<'_>) {
        let (worker_id, dp_rank, event_id) = (record.worker.id.0, record.worker.rank.0, self.events);
        let comma = if event_id > 0 { "," } else { "" };
        let tier = match store.tier {
            Tier::Device => "device",
            Tier::Host => "host_pinned",
            Tier::Disk => "disk",
            Tier::External => "external",
        };
        self.write(format_args!(
            "{comma}{{\"worker_id\":{worker_id},\"storage_tier\":\"{tier}\",\"event\":{{\"event_id\":{event_id},\
             \"data\":{{\"stored\":{{\"parent_hash\":"
        ));
        match store.parent {
            Some(parent) => self.write(format_args!("{}", parent.0)),
            None => self.out.extend_from_slice(b"null"),
        }
        self.out.extend_from_slice(b",\"start_position\":null,\"blocks\":[");
        for (at, (hash, local)) in store.hashes.iter().zip(store.locals).enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let (hash, local) = (hash.0, local.0);
            self.write(format_args!("{comma}{{\"block_hash\":{hash},\"tokens_hash\":{local},\"mm_extra_info\":null}}"));
        }
        self.write(format_args!("]}}}},\"dp_rank\":{dp_rank}}}}}"));
        self.events += 1;
        if self.out.len() >= HTTP_DUMP_CHUNK_BYTES {
            self.flush();
        }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to memory does not fail.
        let _ = self.out.write_fmt(text);
    }

    fn text(&mut self, text: &str) {
        let _ = serde_json::to_writer(&mut self.out, text);
    }

    fn flush(&mut self) {
        let piece = std::mem::take(&mut self.out);
        let Some(reader) = &mut self.reader else { return };
        let Err(unread) = reader.give(piece.into()) else { return };
        if unread == Unread::Slow {
            self.app.counters.bump(HttpCounter::DumpsSlow);
        }
        self.reader = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_left_out_blocks_is_what_ended_the_dump() {
        assert_eq!(left_out_for(Err("not_read"), true, false), Some("deadline_passed"));
        assert_eq!(left_out_for(Err("not_read"), false, true), Some("not_read"));
        assert_eq!(left_out_for(Ok(()), true, true), Some("blocks_without_parent"), "the last block came in time");
        assert_eq!(left_out_for(Ok(()), false, false), None);
    }
}
