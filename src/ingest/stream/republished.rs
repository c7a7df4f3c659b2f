//! A stream whose worker is relayed: what is done to it is said once more.

use super::{Home, Now, Stream};
use crate::ingest::republish::Republisher;

impl Stream {
    /// Says what is done to the worker from now on; the first batch says what is believed of it.
    pub(in crate::ingest) fn republish(&mut self, republisher: Republisher, home: &Home, now: Now) {
        self.republisher = Some(Box::new(republisher));
        self.said(|republisher| republisher.at(now));
        self.say(home);
    }

    /// Tells a republisher, if there is one.
    pub(in crate::ingest) fn said(&mut self, say: impl FnOnce(&mut Republisher)) {
        if let Some(republisher) = &mut self.republisher {
            say(republisher);
        }
    }

    /// Sends what was done, as one batch.
    pub(in crate::ingest) fn say(&mut self, home: &Home) {
        let trust = self.trust();
        if let Some(republisher) = &mut self.republisher {
            republisher.flush(trust, home.scheme.get());
        }
    }
}
