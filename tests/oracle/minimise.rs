//! Reduces a failing list of events to a short one.

use super::event::{Event, Stored};
use kvrouted::ids::{GroupId, Seed, Tier};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Time limit of the search for a shorter list.
const SHORTEN_FOR: Duration = Duration::from_secs(60);

thread_local! {
    /// Whether a panic of this thread is expected, and not worth a message.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

fn be_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                loud(panic);
            }
        }));
    });
}

/// How a run failed.
pub(crate) struct Failure {
    pub(crate) message: String,
    /// The events that had begun.
    pub(crate) reached: usize,
}

/// The failure of `body`, if it panics. `body` counts the events that it has begun.
pub(crate) fn failure(body: impl FnOnce(&mut usize)) -> Option<Failure> {
    be_quiet();
    let mut reached = 0;
    QUIET.set(true);
    let caught = catch_unwind(AssertUnwindSafe(|| body(&mut reached)));
    QUIET.set(false);
    caught.err().map(|panic| Failure { message: message(&*panic), reached })
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_else(|| "a panic".to_string())
}

/// The shortest list found for which `fails` still gives a failure, and that failure. `None` if the whole list does not
/// fail.
pub(crate) fn shortest(events: &[Event], fails: impl Fn(&[Event]) -> Option<Failure>) -> Option<(Vec<Event>, Failure)> {
    let mut failure = fails(events)?;
    let mut events = events[..failure.reached].to_vec();
    if let Some(of_less) = fails(&events) {
        failure = of_less;
    }
    let until = Instant::now() + SHORTEN_FOR;
    loop {
        let before = events.clone();
        drop_events(&mut events, &mut failure, &fails, until);
        simplify_events(&mut events, &mut failure, &fails, until);
        if events == before || Instant::now() >= until {
            return Some((events, failure));
        }
    }
}

/// Leaves out runs of events, long ones first.
fn drop_events(
    events: &mut Vec<Event>,
    failure: &mut Failure,
    fails: &impl Fn(&[Event]) -> Option<Failure>,
    until: Instant,
) {
    let mut length = events.len().div_ceil(2);
    while length > 0 {
        let mut from = 0;
        while from < events.len() && Instant::now() < until {
            let to = events.len().min(from + length);
            let fewer = [&events[..from], &events[to..]].concat();
            match fails(&fewer) {
                Some(of_fewer) => (*events, *failure) = (fewer, of_fewer),
                None => from = to,
            }
        }
        length /= 2;
    }
}

/// Replaces events by simpler ones.
fn simplify_events(
    events: &mut Vec<Event>,
    failure: &mut Failure,
    fails: &impl Fn(&[Event]) -> Option<Failure>,
    until: Instant,
) {
    for at in 0..events.len() {
        let mut again = true;
        while again && Instant::now() < until {
            again = false;
            for simpler in simpler(&events[at]) {
                let mut changed = events.clone();
                changed[at] = simpler;
                if let Some(of_changed) = fails(&changed) {
                    (*events, *failure, again) = (changed, of_changed, true);
                    break;
                }
            }
        }
    }
}

/// Events that are a step simpler.
fn simpler(event: &Event) -> Vec<Event> {
    match event {
        Event::Store(stored) => simpler_stores(stored).into_iter().map(Event::Store).collect(),
        Event::Remove { worker, tier, group, hashes } if hashes.len() > 1 => {
            let without = |at: usize| {
                let mut hashes = hashes.clone();
                hashes.remove(at);
                Event::Remove { worker: *worker, tier: *tier, group: *group, hashes }
            };
            (0..hashes.len()).map(without).collect()
        }
        Event::Sweep { budget_blocks } if *budget_blocks > 1 => vec![Event::Sweep { budget_blocks: 1 }],
        _ => Vec::new(),
    }
}

fn simpler_stores(stored: &Stored) -> Vec<Stored> {
    let mut simpler = Vec::new();
    if stored.hashes.len() > 1 {
        let half = stored.hashes.len().div_ceil(2);
        for blocks in [half, stored.hashes.len() - 1] {
            let (hashes, locals) = (stored.hashes[..blocks].to_vec(), stored.locals[..blocks].to_vec());
            simpler.push(Stored { hashes, locals, ..stored.clone() });
        }
        let (parent, hashes, locals) =
            (Some(stored.hashes[0]), stored.hashes[1..].to_vec(), stored.locals[1..].to_vec());
        simpler.push(Stored { parent, hashes, locals, ..stored.clone() });
    }
    if stored.tier != Tier::Device {
        simpler.push(Stored { tier: Tier::Device, ..stored.clone() });
    }
    if stored.group != GroupId(0) {
        simpler.push(Stored { group: GroupId(0), ..stored.clone() });
    }
    if stored.seed != Seed(0) {
        simpler.push(Stored { seed: Seed(0), ..stored.clone() });
    }
    simpler
}
