//! The stack on which batches come back.

use super::{PREEMPTIONS, explore};
use crate::index::reclaim::{Node, Stack};
use crate::index::sync::Arc;
use ::loom::cell::UnsafeCell;

/// What a pusher wrote is the taker's to read, and each node comes back once.
#[test]
fn two_push_and_one_takes() {
    explore(PREEMPTIONS, || {
        let stack = Arc::new(Stack::new());
        let pushers: Vec<_> = (1..3_u32)
            .map(|item| {
                let stack = Arc::clone(&stack);
                ::loom::thread::spawn(move || {
                    let value = Box::new(UnsafeCell::new(0));
                    // SAFETY: the pointer is good while the closure runs.
                    value.with_mut(|word| unsafe { *word = item });
                    // SAFETY: fresh from `Box::into_raw`.
                    unsafe { stack.push(Box::into_raw(Box::new(Node::new(value)))) };
                })
            })
            .collect();
        let read = |value: Box<UnsafeCell<u32>>| {
            // SAFETY: the pointer is good while the closure runs; races are reported.
            value.with(|word| unsafe { *word })
        };
        let mut items: Vec<u32> = stack.take().map(read).collect();
        pushers.into_iter().for_each(|pusher| pusher.join().expect("the pusher ended"));
        items.extend(stack.take().map(read));
        items.sort_unstable();
        assert_eq!(items, [1, 2]);
    });
}
