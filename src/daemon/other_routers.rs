//! The other routers in status and metrics.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::statistics::Statistics;
use crate::routers::{Joining, LinkShown, OriginPhase, OriginStatus, RoutersShown};
use crate::wire::RouterStatus;

/// The rows of `kvrouted status`: this router, then the configured peers, then others that were heard; none if this router
/// shares no load.
pub(super) fn rows(shown: &RoutersShown) -> Vec<RouterStatus> {
    let Some(own) = &shown.own else { return Vec::new() };
    let own_row = RouterStatus {
        address: own.address.clone(),
        state: "self".into(),
        origin: own.sender.origin.0,
        incarnation: own.sender.incarnation.0,
        sequence: own.sequence,
        digest: own.digest.sum,
        workers: own.digest.count,
        requests: own.load.requests,
        prefill_tokens: own.load.prefill_tokens,
        decode_blocks: own.load.decode_blocks,
        ..RouterStatus::default()
    };
    let of = |link: &LinkShown| shown.origins.iter().find(|of| Some(of.origin) == link.link.origin);
    // The list of peers may name this router too.
    let others = shown.links.iter().filter(|of| of.link.origin != Some(own.sender.origin));
    let linked = others.map(|link| match of(link) {
        Some(origin) => RouterStatus { address: link.link.address.clone(), ..row(origin, problem(link, Some(origin))) },
        None => RouterStatus {
            address: link.link.address.clone(),
            state: if link.link.is_up { "unknown" } else { "unreached" }.into(),
            problem: problem(link, None),
            ..RouterStatus::default()
        },
    });
    let is_linked = |of: &&OriginStatus| shown.links.iter().any(|link| link.link.origin == Some(of.origin));
    let unlinked = shown.origins.iter().filter(|of| !is_linked(of)).map(|of| row(of, quarantine(of)));
    std::iter::once(own_row).chain(linked).chain(unlinked).collect()
}

fn row(of: &OriginStatus, problem: Option<String>) -> RouterStatus {
    let notices = of.notices.iter().map(|(notice, times)| (notice.name().to_owned(), *times));
    RouterStatus {
        address: String::new(),
        state: of.phase.name().into(),
        origin: of.origin.0,
        incarnation: of.incarnation.map_or(0, |incarnation| incarnation.0),
        sequence: of.sequence,
        digest: of.digest.sum,
        workers: of.digest.count,
        requests: of.load.requests,
        prefill_tokens: of.load.prefill_tokens,
        decode_blocks: of.load.decode_blocks,
        age_ms: of.age_ms,
        problem,
        counters: notices.collect(),
    }
}

/// Why a peer does not count, with the remedy.
fn problem(link: &LinkShown, origin: Option<&OriginStatus>) -> Option<String> {
    let refused = link.refused.map(|fault| format!("its messages are refused: {fault}; {}", fault.remedy()));
    refused.or_else(|| origin.and_then(quarantine))
}

fn quarantine(of: &OriginStatus) -> Option<String> {
    let OriginPhase::Quarantined(reason) = of.phase else { return None };
    Some(format!("{}; {}", reason.meaning(), reason.remedy()))
}

/// Whether the load of the others is known, by name; nothing if this router shares no load.
pub(super) fn figures(shown: &RoutersShown) -> Vec<(String, u64)> {
    if shown.own.is_none() {
        return Vec::new();
    }
    let (state, missing) = match shown.joining {
        Joining::Joined => (0, 0),
        Joining::Waiting { missing } => (1, missing),
        Joining::Overdue { missing } => (2, missing),
    };
    vec![("router_join_state".to_owned(), state), ("router_join_missing".to_owned(), missing as u64)]
}

/// Writes the metrics by router, and of the links.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result<(), fmt::Error> {
    let shown = statistics.routers.shown();
    let name = "kvrouted_router_state";
    let help = "1 for the present state of another router: unknown, asking, live, repairing, silent or quarantined.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for of in &shown.origins {
        let labels = [("origin", of.origin.to_string()), ("state", of.phase.name().to_owned())];
        family.encode_family(&labels.as_slice())?.encode_gauge(&1_i64)?;
    }
    type Pick = fn(&OriginStatus) -> f64;
    let gauges: [(&str, &str, Pick); 4] = [
        ("kvrouted_router_age_seconds", "Time since another router last said something that counts.", |of| {
            of.age_ms as f64 / 1e3
        }),
        ("kvrouted_router_workers", "Workers to which another router's bookings add something.", |of| {
            f64::from(of.digest.count)
        }),
        ("kvrouted_router_requests", "Requests in flight of another router.", |of| of.load.requests as f64),
        ("kvrouted_router_prefill_tokens", "Tokens to prefill of another router's requests.", |of| {
            of.load.prefill_tokens as f64
        }),
    ];
    for (name, help, pick) in gauges {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for of in &shown.origins {
            family.encode_family(&[("origin", of.origin.to_string())].as_slice())?.encode_gauge(&pick(of))?;
        }
    }
    let peers = || shown.links.iter().filter(|of| !of.link.is_broker);
    let up = peers().filter(|of| of.link.is_up).count();
    let figures = [
        ("kvrouted_router_peers", "Peers: configured, or heard over NATS.", peers().count()),
        ("kvrouted_router_peers_up", "Peers that are connected.", up),
        (
            "kvrouted_router_joining",
            "1 while the daemon is not ready because the load of other routers is not known.",
            usize::from(statistics.routers.is_joining()),
        ),
    ];
    for (name, help, value) in figures {
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&(value as i64))?;
    }
    Ok(())
}
