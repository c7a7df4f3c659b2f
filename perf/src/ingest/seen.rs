//! How long after a message is about to be sent the first lookup finds what it stores.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use kvrouted::ids::LocalHash;
use kvrouted::index::Depths;
use serde::Serialize;

use super::floor::{Taken, receive, subscribe};
use super::frames::Shape;
use super::ours::{Ours, SHARD};
use super::sender::{Sender, Sent};
use super::threads::{clock_ns, nap, nap_exactly};
use crate::failure::Failure;

/// Longest delay that is told from longer ones.
const DELAY_NS_MAX: u64 = 60_000_000_000;
/// How long the looking thread naps between two lookups: the delays are this much too long at most, on both sides
/// alike.
const CHECK_EVERY: Duration = Duration::from_micros(50);
/// Conversations before the first that counts.
const WARM_UP: usize = 20;
/// The length of the windows of which the middle one is reported. The host may take the processor away for a fifth of a
/// second: that decides the quantiles of the whole time, and of one or two windows.
const WINDOW_NS: u64 = 250_000_000;
/// Messages that a window must have to count: the last one is cut off by the end.
const WINDOW_SAMPLES_MIN: u64 = 200;

/// Delays, microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Seen {
    /// Messages a second that were sent.
    pub(crate) messages_per_s: f64,
    /// Messages that were waited for.
    pub(crate) samples: u64,
    /// The median.
    pub(crate) p50_us: f64,
    /// 99 of 100 are at most this.
    pub(crate) p99_us: f64,
    /// 999 of 1000 are at most this.
    pub(crate) p999_us: f64,
    /// 99 of 100 are at most this in the middle one of the time's windows, in the order of this figure.
    pub(crate) window_p99_us: f64,
    /// Messages that were missed.
    pub(crate) missed: u64,
}

/// Sends at `rate` messages a second and asks for every conversation's first block until it is there.
///
/// # Errors
/// Those of the sender, or nothing is seen.
pub(crate) fn measure(shape: &Shape, rate: f64) -> Result<Seen, Failure> {
    let mut sender = Sender::start(shape, rate, None)?;
    let ours = Ours::start(&sender.endpoint)?;
    let firsts: Vec<LocalHash> =
        (0..conversations(shape)).map(|conversation| shape.first_block(conversation)).collect();
    let (reader, slot, mut depths) = (ours.reader.clone(), ours.slot, Depths::new());
    let is_there = move |conversation: usize| {
        reader.lookup(std::slice::from_ref(&firsts[conversation]), &mut depths);
        depths.device(SHARD, slot) > 0
    };
    waited_for(shape, is_there, || {
        let sent = sender.go().and_then(|()| sender.sent())?;
        Ok((sent, ours.wait_for(shape.messages)))
    })
}

/// The same for a socket whose messages are only counted: what is left of the time without ingest and index.
///
/// # Errors
/// Those of the sender and of libzmq.
pub(crate) fn measure_floor(shape: &Shape, rate: f64) -> Result<Seen, Failure> {
    let mut sender = Sender::start(shape, rate, None)?;
    let context = zmq::Context::new();
    let socket = subscribe(&context, &sender.endpoint)?;
    let (begun, of_conversation) = (AtomicUsize::new(0), shape.conversation_messages());
    // Relaxed, here and below: the number is all there is.
    let is_there = |conversation: usize| begun.load(Ordering::Relaxed) > conversation;
    waited_for(shape, is_there, || {
        sender.go()?;
        let taken = receive(&socket, shape.messages, |seq, _| {
            begun.store((seq / of_conversation) as usize + 1, Ordering::Relaxed);
            Ok(())
        })?;
        Ok((sender.sent()?, taken))
    })
}

fn conversations(shape: &Shape) -> u64 {
    shape.messages.div_ceil(shape.conversation_messages())
}

/// Another thread asks for one conversation after the other until it is there, while `run` lets them be sent.
fn waited_for(
    shape: &Shape,
    mut is_there: impl FnMut(usize) -> bool + Send,
    run: impl FnOnce() -> Result<(Sent, Taken), Failure>,
) -> Result<Seen, Failure> {
    let count = conversations(shape) as usize;
    let over = AtomicBool::new(false);
    let (found_ns, ran) = std::thread::scope(|threads| {
        let over = &over;
        let looks = threads.spawn(move || {
            nap_exactly();
            let mut found_ns = Vec::with_capacity(count);
            for conversation in 0..count {
                while !is_there(conversation) {
                    // Relaxed: it orders nothing, it only ends the search.
                    if over.load(Ordering::Relaxed) {
                        return found_ns;
                    }
                    nap(CHECK_EVERY);
                }
                found_ns.push(clock_ns());
            }
            found_ns
        });
        let ran = run();
        over.store(true, Ordering::Relaxed);
        (looks.join(), ran)
    });
    let found_ns = found_ns.map_err(|_| Failure::Contract("a lookup panicked".to_owned()))?;
    let (sent, taken) = ran?;
    let histogram =
        || Histogram::<u64>::new_with_max(DELAY_NS_MAX, 3).map_err(|error| Failure::Contract(error.to_string()));
    let (mut delays, mut windows) = (histogram()?, BTreeMap::new());
    let first_ns = sent.began_ns.first().copied().unwrap_or(0);
    for (began, found) in sent.began_ns.iter().zip(&found_ns).skip(WARM_UP) {
        let delay = found.saturating_sub(*began);
        delays.saturating_record(delay);
        match windows.entry(began.saturating_sub(first_ns) / WINDOW_NS) {
            Entry::Vacant(window) => window.insert(histogram()?),
            Entry::Occupied(window) => window.into_mut(),
        }
        .saturating_record(delay);
    }
    let whole = windows.values().filter(|window| window.len() >= WINDOW_SAMPLES_MIN);
    let mut windows_p99_ns: Vec<u64> = whole.map(|window| window.value_at_quantile(0.99)).collect();
    windows_p99_ns.sort_unstable();
    let us = |quantile| delays.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Seen {
        messages_per_s: shape.messages as f64 / sent.seconds.max(1e-9),
        samples: delays.len(),
        p50_us: us(0.5),
        p99_us: us(0.99),
        p999_us: us(0.999),
        window_p99_us: windows_p99_ns.get(windows_p99_ns.len() / 2).map_or(0.0, |ns| *ns as f64 / 1e3),
        missed: taken.missed,
    })
}
