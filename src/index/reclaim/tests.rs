use super::garbage::{BATCH_BYTES, BATCH_ITEMS};
use super::stack::{Node, Stack};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;

/// Counts how often it is dropped; a second drop of the same is seen by its flag.
struct Counted {
    drops: Arc<AtomicUsize>,
    alive: Box<bool>,
}

impl Counted {
    fn new(drops: &Arc<AtomicUsize>) -> Self {
        Self { drops: Arc::clone(drops), alive: Box::new(true) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert!(std::mem::take(&mut *self.alive));
        // Relaxed: the thread that looks has joined or dropped what did this.
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

fn collected<T: Send + 'static>(garbage: &mut Garbage<T>) -> Vec<T> {
    let mut items = Vec::new();
    garbage.collect(|item| items.push(item));
    items
}

#[test]
fn with_nobody_inside_everything_comes_back_at_once() {
    let mut garbage = Garbage::new(&Reclaimer::new());
    (0..10_u32).for_each(|item| garbage.push(item, 100));
    garbage.flush();
    assert_eq!((collected(&mut garbage), garbage.waiting_bytes()), (vec![], 1000));
    garbage.flush_now();
    assert_eq!(garbage.waiting_items(), 10);
    assert_eq!(collected(&mut garbage), (0..10).collect::<Vec<_>>());
    assert_eq!((garbage.waiting_bytes(), garbage.waiting_items()), (0, 0));
    garbage.flush_now();
    assert!(collected(&mut garbage).is_empty());
}

#[test]
fn batches_are_flushed_by_items_or_bytes() {
    let mut garbage = Garbage::new(&Reclaimer::new());
    for item in 1..=BATCH_ITEMS {
        garbage.push(item, 1);
        garbage.flush();
        assert_eq!(collected(&mut garbage).len(), if item == BATCH_ITEMS { BATCH_ITEMS } else { 0 });
    }
    garbage.push(0, BATCH_BYTES);
    garbage.flush();
    assert_eq!(collected(&mut garbage), [0]);
}

#[test]
fn a_guard_keeps_what_is_flushed_while_it_lives() {
    let reclaimer = Reclaimer::new();
    let mut garbage = Garbage::new(&reclaimer);
    let reader = reclaimer.reader();
    let (outer, inner) = (reader.enter(), reader.enter());
    assert!(outer.is_of(&reclaimer) && !outer.is_of(&Reclaimer::new()));
    for item in 0..3 {
        garbage.push(item, 8);
        garbage.flush_now();
    }
    assert!(collected(&mut garbage).is_empty());
    drop(outer);
    assert!(collected(&mut garbage).is_empty(), "the same thread is inside twice");
    drop(inner);
    let mut items = collected(&mut garbage);
    items.sort_unstable();
    assert_eq!(items, [0, 1, 2]);
}

#[test]
fn a_guard_of_another_thread_counts_and_one_entered_later_does_not() {
    let reclaimer = Reclaimer::new();
    let mut garbage = Garbage::new(&reclaimer);
    let (leave, left) = (Barrier::new(2), Barrier::new(2));
    let entered = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let reader = reclaimer.reader();
            let guard = reader.enter();
            entered.wait();
            leave.wait();
            drop(guard);
            left.wait();
        });
        entered.wait();
        garbage.push('a', 1);
        garbage.flush_now();
        assert!(collected(&mut garbage).is_empty());
        let reader = reclaimer.reader();
        let late = reader.enter();
        leave.wait();
        left.wait();
        assert_eq!(collected(&mut garbage), ['a'], "who enters after the flush does not hold it up");
        drop(late);
    });
}

/// `threads` of them are inside while one item is flushed; does it come back when they have left?
fn comes_back_beside(threads: usize) -> bool {
    let reclaimer = Reclaimer::new();
    let mut garbage = Garbage::new(&reclaimer);
    let (entered, leave) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let reader = reclaimer.reader();
                let guard = reader.enter();
                entered.wait();
                leave.wait();
                drop(guard);
            });
        }
        entered.wait();
        garbage.push(1, 1);
        garbage.flush_now();
        assert!(collected(&mut garbage).is_empty());
        leave.wait();
    });
    let first = collected(&mut garbage).len() == 1;
    garbage.push(2, 1);
    garbage.flush_now();
    assert_eq!(collected(&mut garbage).len(), if first { 1 } else { 2 }, "the next flush takes the rest along");
    assert_eq!(garbage.waiting_bytes(), 0);
    first
}

#[test]
fn one_item_comes_back_beside_as_many_guards_as_are_allowed() {
    assert!(comes_back_beside(GUARDS_MAX));
    assert!(!comes_back_beside(GUARDS_MAX + 1), "more are allowed than the docs say");
}

#[test]
fn the_writer_goes_first() {
    let drops = Arc::new(AtomicUsize::new(0));
    let reclaimer = Reclaimer::new();
    let reader = reclaimer.reader();
    let guard = reader.enter();
    let mut garbage = Garbage::new(&reclaimer);
    for _ in 0..100 {
        garbage.push(Counted::new(&drops), 1);
        garbage.flush();
    }
    drop((garbage, reclaimer));
    // Relaxed, here and below: one thread.
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(guard);
    drop(reader);
    assert_eq!(drops.load(Ordering::Relaxed), 100);
}

#[test]
fn a_reader_that_leaves_last_frees_nothing_of_a_writer_that_is_gone() {
    let drops = Arc::new(AtomicUsize::new(0));
    let reclaimer = Reclaimer::new();
    let reader = reclaimer.reader();
    let guard = reader.enter();
    let mut garbage = Garbage::new(&reclaimer);
    for _ in 0..200 {
        garbage.push(Counted::new(&drops), 1);
        garbage.flush();
    }
    drop(garbage);
    let mut next: Garbage<u8> = Garbage::new(&reclaimer);
    next.collect(drop);
    drop(guard);
    // Relaxed, here and below: one thread.
    assert_eq!(drops.load(Ordering::Relaxed), 0, "freed where a reader left");
    // The writer after it does it.
    next.collect(drop);
    assert_eq!(drops.load(Ordering::Relaxed), 200);
    assert!(!reclaimer.orphans.any.load(Ordering::Relaxed));
}

#[test]
fn the_readers_go_first() {
    let drops = Arc::new(AtomicUsize::new(0));
    let mut garbage = {
        let reclaimer = Reclaimer::new();
        let reader = reclaimer.reader();
        drop(reader.enter());
        Garbage::new(&reclaimer)
    };
    (0..70).for_each(|_| garbage.push(Counted::new(&drops), 1));
    garbage.flush();
    garbage.push(Counted::new(&drops), 1);
    drop(garbage);
    // Relaxed: one thread.
    assert_eq!(drops.load(Ordering::Relaxed), 71);
}

#[test]
fn readers_never_see_what_came_back() {
    const ROUNDS: usize = 3_000;
    let drops = Arc::new(AtomicUsize::new(0));
    let reclaimer = Reclaimer::new();
    let boxed = |value: usize| Box::into_raw(Box::new(AtomicUsize::new(value)));
    let current = std::sync::atomic::AtomicPtr::new(boxed(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let reader = reclaimer.reader();
                let mut last = 0;
                // Relaxed: only ends the loop.
                while !done.load(Ordering::Relaxed) {
                    let _guard = reader.enter();
                    // SeqCst: as the loads of the index; pairs with the exchange below.
                    let value = current.load(Ordering::SeqCst);
                    for _ in 0..20 {
                        // SAFETY: loaded under the guard, and freed only after its grace period. Relaxed: a probe.
                        let seen = unsafe { &*value }.load(Ordering::Relaxed);
                        assert!(seen != usize::MAX && seen >= last);
                        last = seen;
                    }
                }
            });
        }
        let mut garbage: Garbage<(usize, Counted)> = Garbage::new(&reclaimer);
        for round in 1..=ROUNDS {
            // AcqRel: pairs with the readers' load.
            let old = current.swap(boxed(round), Ordering::AcqRel);
            garbage.push((old as usize, Counted::new(&drops)), 8);
            garbage.flush();
            garbage.collect(|(address, _counted)| {
                let old = std::ptr::with_exposed_provenance_mut::<AtomicUsize>(address);
                // SAFETY: it has passed its grace period. Relaxed: nobody looks, and who did would fail.
                unsafe { (*old).store(usize::MAX, Ordering::Relaxed) };
                // SAFETY: as above; it came from `Box::into_raw`, and comes back once.
                drop(unsafe { Box::from_raw(old) });
            });
        }
        // Relaxed: only ends the loops.
        done.store(true, Ordering::Relaxed);
    });
    drop(reclaimer);
    assert_eq!(drops.load(Ordering::Relaxed), ROUNDS);
}

#[test]
fn a_stack_loses_and_doubles_nothing() {
    let stack = Stack::new();
    let (send, receive) = mpsc::channel::<()>();
    thread::scope(|scope| {
        for pusher in 0..4_u32 {
            let (stack, send) = (&stack, send.clone());
            scope.spawn(move || {
                for item in 0..2_000 {
                    let node = Box::into_raw(Box::new(Node::new(pusher << 16 | item)));
                    // SAFETY: fresh from `Box::into_raw`.
                    unsafe { stack.push(node) };
                }
                drop(send);
            });
        }
        drop(send);
        let mut seen = std::collections::BTreeSet::new();
        let mut is_over = false;
        while !is_over {
            is_over = matches!(receive.try_recv(), Err(mpsc::TryRecvError::Disconnected));
            stack.take().for_each(|item| assert!(seen.insert(item)));
        }
        assert_eq!(seen.len(), 8_000);
    });
    // SAFETY: fresh from `Box::into_raw`; dropped with the stack.
    unsafe { stack.push(Box::into_raw(Box::new(Node::new(1)))) };
}
