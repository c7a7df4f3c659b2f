//! ZeroMQ contexts: each has room for so many publishers.

use crate::limits::PUBLISHERS_PER_CONTEXT_MAX;

/// The contexts of one thread, made as they are needed.
#[derive(Default)]
pub(super) struct Contexts {
    contexts: Vec<(zmq::Context, usize)>,
    /// Publishers ever opened: the number of the next is not another's.
    opened: usize,
}

/// A publisher's part of a context.
pub(super) struct Berth {
    /// Which context, for [`Contexts::give_back`].
    pub(super) context: usize,
    /// Unique within all of them.
    pub(super) number: usize,
}

impl Contexts {
    /// Room for one more publisher.
    pub(super) fn take(&mut self) -> (Berth, &zmq::Context) {
        let context = self.contexts.iter().position(|(_, taken)| *taken < PUBLISHERS_PER_CONTEXT_MAX);
        let context = context.unwrap_or_else(|| {
            self.contexts.push((zmq::Context::new(), 0));
            self.contexts.len() - 1
        });
        self.opened += 1;
        let (made, taken) = &mut self.contexts[context];
        *taken += 1;
        (Berth { context, number: self.opened }, made)
    }

    /// The publisher has closed its sockets.
    pub(super) fn give_back(&mut self, context: usize) {
        if let Some((_, taken)) = self.contexts.get_mut(context) {
            *taken -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_filled_before_another_is_made() {
        let mut contexts = Contexts::default();
        let berths: Vec<_> = (0..=PUBLISHERS_PER_CONTEXT_MAX).map(|_| contexts.take().0).collect();
        assert!(berths[..PUBLISHERS_PER_CONTEXT_MAX].iter().all(|berth| berth.context == 0));
        assert_eq!(berths[PUBLISHERS_PER_CONTEXT_MAX].context, 1);
        contexts.give_back(0);
        let next = contexts.take().0;
        assert_eq!(next.context, 0);
        assert!(berths.iter().all(|berth| berth.number != next.number));
    }
}
