//! How a core looks at lanes that are silent, where it looks at all.
//!
//! A look at a lane is a load from memory, so that many of them cost less than one turn of the runtime, which asks the
//! kernel about sockets. Between two turns the lanes of a core share a bounded number of looks, so that its sockets wait
//! little for them. A lane is looked at only for a while after its last request.

use std::cell::Cell;
use std::hint;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::limits::LANE_LOOKS_PER_TURN;
use crate::serve::spin::Spin;

/// What the lanes of a core share.
#[derive(Debug)]
pub(super) struct Looks {
    spin: Rc<Spin>,
    /// How long one lane is looked at.
    time_max: Duration,
    /// Lanes that are being looked at.
    looking: Cell<u32>,
}

impl Looks {
    pub(super) fn new(spin: &Rc<Spin>, us_max: u32) -> Rc<Self> {
        let time_max = Duration::from_micros(u64::from(us_max));
        Rc::new(Self { spin: Rc::clone(spin), time_max, looking: Cell::new(0) })
    }

    /// Begins to look at one more lane.
    pub(super) fn begin(&self) -> Looking<'_> {
        self.looking.set(self.looking.get() + 1);
        let until = self.spin.is_looking().then(|| Instant::now() + self.time_max);
        Looking { looks: self, until }
    }
}

/// A lane that is being looked at.
pub(super) struct Looking<'a> {
    looks: &'a Looks,
    /// `None` = it is not to be.
    until: Option<Instant>,
}

impl Looking<'_> {
    /// Whether to look once more, for a turn.
    pub(super) fn goes_on(&self) -> bool {
        self.until.is_some_and(|until| self.looks.spin.is_looking() && Instant::now() < until)
    }

    /// The looks of one turn, until `come` gives something.
    pub(super) fn turn<C, E>(&self, mut come: impl FnMut() -> Result<Option<C>, E>) -> Result<Option<C>, E> {
        for _ in 0..(LANE_LOOKS_PER_TURN / self.looks.looking.get().max(1)).max(1) {
            if let Some(come) = come()? {
                return Ok(Some(come));
            }
            hint::spin_loop();
        }
        Ok(None)
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.looks.looking.set(self.looks.looking.get() - 1);
    }
}
