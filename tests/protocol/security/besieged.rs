//! A daemon under attack: its memory and descriptors before, and that it has no more after.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use crate::kit::raw::Raw;
use crate::kit::{Daemon, configure_serve, folder, open_descriptors, resident_kib, text, until_ok};

/// How much more memory than before the attack is no leak: what the allocator keeps for the next time.
const RSS_KIB_MARGIN: u64 = 48 << 10;
/// Descriptors that may have come by chance: a file of the log, a probe.
const DESCRIPTORS_MARGIN: usize = 4;

/// What a process has of the system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footprint {
    pub(crate) rss_kib: u64,
    pub(crate) descriptors: usize,
}

impl Footprint {
    pub(crate) fn of(pid: u32) -> Self {
        Self { rss_kib: resident_kib(pid), descriptors: open_descriptors(pid) }
    }
}

/// Writes the configuration of a daemon with one worker at the socket of a folder.
pub(crate) fn configure(folder: &Path, serve: &str, tables: &str) -> PathBuf {
    configure_serve(folder, serve, &format!("[[worker]]\nid = 1\n{tables}\n"))
}

/// A daemon whose footprint before the attack is known.
pub(crate) struct Besieged {
    daemon: Daemon,
    before: Footprint,
}

impl Deref for Besieged {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl Besieged {
    /// One with a worker, `serve` in its `[serve]`, and with what `tables` say.
    pub(crate) fn configured(serve: &str, tables: &str) -> Self {
        let folder = folder();
        let config = configure(folder.path(), serve, tables);
        Self::on(Daemon::serve(folder, &["--config", text(&config)]))
    }

    /// Makes the daemon read another configuration.
    pub(crate) fn reconfigure(&self, serve: &str, tables: &str) {
        configure(self.folder.path(), serve, tables);
        self.process.signal("-HUP");
    }

    fn on(daemon: Daemon) -> Self {
        // Once around, so that what is made at the first use is there.
        for _ in 0..32 {
            Raw::greeted(&daemon.socket()).assert_served();
        }
        daemon.status();
        let before = Footprint::of(daemon.process.id());
        Self { daemon, before }
    }

    pub(crate) fn footprint(&self) -> Footprint {
        Footprint::of(self.process.id())
    }

    /// Of one connection that is there and has said hello.
    pub(crate) fn greeted(&self) -> Raw {
        Raw::greeted(&self.socket())
    }

    /// Connections to the routing socket that are open, and bookings. The status request has had a connection, to learn
    /// where the other socket is.
    pub(crate) fn open(&self) -> (u64, u64) {
        let counters: HashMap<String, u64> = self.status().counters.into_iter().collect();
        let opened = counters["connections"].saturating_sub(counters["connections_closed"]);
        (opened, counters["bookings_live"])
    }

    /// The attackers have gone: all that they held is given back, and everybody is answered.
    #[track_caller]
    pub(crate) fn assert_recovered(&self) {
        until_ok("what the attack took is given back", || {
            let ((open, live), now) = (self.open(), self.footprint());
            let is_back = open <= 1
                && live == 0
                && now.descriptors <= self.before.descriptors + DESCRIPTORS_MARGIN
                && now.rss_kib <= self.before.rss_kib + RSS_KIB_MARGIN;
            let told = || format!("{open} open, {live} bookings, {now:?} after {:?}", self.before);
            if is_back { Ok(()) } else { Err(told()) }
        });
        self.greeted().assert_served();
        assert_eq!(self.status().workers.len(), 1);
    }
}
