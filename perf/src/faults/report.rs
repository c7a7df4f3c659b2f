//! What a run showed.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::check::Compared;
use super::gateways::Seen;
use super::network::Packets;
use crate::args::FaultsArgs;
use crate::failure::Failure;

/// What a run showed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(super) machine: String,
    pub(super) args: FaultsArgs,
    pub(super) load_average: f64,
    /// From the first fault to the end of the last one, seconds.
    pub(super) faults_s: f64,
    /// How often each fault came.
    pub(super) faults: BTreeMap<&'static str, u32>,
    pub(super) packets: Packets,
    pub(super) seen: Seen,
    /// Overlaps while there were faults.
    pub(super) during: Compared,
    /// Overlaps after the last batch.
    pub(super) after: Compared,
    pub(super) first_wrong: Vec<String>,
    pub(super) agreement: Agreement,
    /// Seconds from the last batch until every router had applied all, and trusted every engine; `None` = not in time.
    pub(super) exact_s: Option<f64>,
    /// Open files and resident MiB of each router before the first fault, and at the end.
    pub(super) resources: Vec<[(usize, u64); 2]>,
    /// Counters of interest, summed over the routers as they ran at the end.
    pub(super) counters: BTreeMap<String, u64>,
}

/// How routers agreed after the last fault.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Agreement {
    /// Seconds until each held what each other one had booked, by their digests; `None` = not in time.
    pub(super) digests_equal_s: Option<f64>,
    /// Bookings live in all routers then.
    pub(super) bookings_live: u64,
    /// Seconds from the moment at which gateways had freed everything and left until digests were equal again; `None` = not in
    /// time.
    pub(super) known_s: Option<f64>,
    /// Bookings live in all routers then: those that were freed just before a router was killed, and that its image
    /// brought back.
    pub(super) bookings_kept: u64,
    /// Seconds until none was live any more; `None` = not in time.
    pub(super) none_s: Option<f64>,
    /// Bookings that were left in routers after all gateways had gone.
    pub(super) bookings_left: u64,
    /// Requests that routers still counted for others at the end.
    pub(super) phantoms: u64,
}

impl Report {
    /// Whether everything was as it must be.
    ///
    /// # Errors
    /// What was not.
    pub(crate) fn verdict(&self) -> Result<(), Failure> {
        let mut faults = Vec::new();
        if self.during.wrong + self.after.wrong > 0 {
            faults.push("overlaps were wrong");
        }
        if self.agreement.digests_equal_s.is_none() {
            faults.push("the digests of routers did not become equal");
        }
        if self.agreement.known_s.is_none() || self.agreement.phantoms + self.agreement.bookings_left > 0 {
            faults.push("bookings were left");
        }
        if self.exact_s.is_none() {
            faults.push("not every overlap became exact");
        }
        match faults.is_empty() {
            true => Ok(()),
            false => Err(Failure::Contract(faults.join("; "))),
        }
    }

    /// The report as text.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let FaultsArgs { routers, engines, gateways, batches_per_s, routes_per_s, seed, nats, .. } = &self.args;
        let carrier = if *nats { "NATS" } else { "ZeroMQ" };
        let mut text = String::new();
        let mut line = |of: std::fmt::Arguments<'_>| {
            let _ = writeln!(text, "{of}");
        };
        line(format_args!(
            "{routers} routers over {carrier} x {engines} engines x {gateways} gateways, {batches_per_s} batches/s, {routes_per_s} routes/s, \
             seed {seed}; {}; load average {:.1}",
            self.machine, self.load_average
        ));
        line(format_args!("faults in {:.0} s:", self.faults_s));
        for (name, times) in &self.faults {
            line(format_args!("  {times:>4} x {name}"));
        }
        let Packets { delivered, lost } = self.packets;
        line(format_args!("packets: {delivered} delivered, {lost} lost"));
        let Seen { routed, fallback, refused, applied, unknown, kept, reports_refused, undelivered } = self.seen;
        line(format_args!(
            "gateways: {routed} requests routed, {fallback} decided without a daemon, {refused} refused; {applied} reports \
             applied, {kept} kept for later, {unknown} about unknown bookings, {reports_refused} refused; {undelivered} clients \
             with reports left at the end"
        ));
        let compared = |of: &Compared| {
            let Compared { exact, wrong, inexact, unanswered } = of;
            format!("{wrong} wrong of {exact} exact overlaps, {inexact} not exact, {unanswered} questions not answered")
        };
        line(format_args!("during faults: {}", compared(&self.during)));
        line(format_args!("after them: {}", compared(&self.after)));
        for wrong in &self.first_wrong {
            line(format_args!("  {wrong}"));
        }
        let seconds = |of: Option<f64>| of.map_or("not in time".to_owned(), |of| format!("{of:.2} s"));
        let Agreement { digests_equal_s, bookings_live, known_s, bookings_kept, none_s, bookings_left, phantoms } =
            self.agreement;
        line(format_args!(
            "after the last fault: digests of all pairs equal after {}, with {bookings_live} bookings live; all exact {} after \
             the last batch",
            seconds(digests_equal_s),
            seconds(self.exact_s)
        ));
        line(format_args!(
            "after gateways had freed everything and left: digests equal after {}; {bookings_kept} \
             bookings that images had brought back, none after {}; {bookings_left} bookings left, \
             {phantoms} phantom requests",
            seconds(known_s),
            seconds(none_s)
        ));
        for (router, [before, after]) in self.resources.iter().enumerate() {
            line(format_args!(
                "router {router}: {} then {} open files, {} then {} MiB resident",
                before.0, after.0, before.1, after.1
            ));
        }
        line(format_args!("counters at the end: {:?}", self.counters));
        text
    }
}
