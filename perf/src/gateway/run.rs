//! Takes the ways in turns.

use std::time::{Duration, Instant};

use super::load::{Call, Client};
use super::programs::Programs;
use super::proxies::{self, Proxy};
use super::report::{Key, Report, Rows, Running, Sample, Skipped};
use crate::args::{Asked, GatewayArgs, Way};
use crate::failure::Failure;

/// How long a proxy may take until the first whole reply: routers in Python wait for their workers first.
const START_MAX: Duration = Duration::from_secs(60);
/// How long it may take until it answers another kind of requests.
const FURTHER_MAX: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);

/// All ways.
const WAYS: [Way; 8] = [
    Way::Direct,
    Way::Nginx,
    Way::Envoy,
    Way::Gateway,
    Way::EnvoyPicker,
    Way::SglangRouter,
    Way::VllmRouter,
    Way::ProductionStack,
];

/// A way with what it answers.
struct Able {
    proxy: Proxy,
    asked: Vec<Asked>,
}

/// Measures all ways that can be had.
///
/// # Errors
/// The upstream does not start or does not answer. A proxy that fails is skipped, with its reason.
pub(crate) fn run(args: &GatewayArgs) -> Result<Report, Failure> {
    let (client, programs) = (Client::new()?, Programs::of(args));
    let asked = if args.requests.is_empty() { Asked::ALL.to_vec() } else { args.requests.clone() };
    let calls: Vec<_> = asked.iter().map(|asked| (*asked, Call::of(*asked))).collect();
    let upstream = proxies::upstream()?;
    let mut skipped = Vec::new();
    let mut able = Vec::new();
    for way in WAYS.into_iter().filter(|way| *way == Way::Direct || args.ways.is_empty() || args.ways.contains(way)) {
        match proxies::start(way, &programs, upstream.port) {
            Ok(proxy) => able.push(tried(proxy, &client, &calls, &mut skipped)),
            Err(reason) => skipped.push(Skipped { way, request: None, reason }),
        }
    }
    able.retain(|able| !able.asked.is_empty());
    if able.first().is_none_or(|able| able.proxy.way != Way::Direct) {
        return Err(Failure::Child(skipped.first().map_or_else(String::new, |skipped| skipped.reason.clone())));
    }
    let mut rows = Rows::default();
    for round in 0..args.repeat {
        for (asked, call) in &calls {
            for connections in [1, args.connections] {
                take_turns(&mut able, (*asked, call), (&client, connections, round), args.seconds, |key, measured| {
                    match measured {
                        Ok(sample) => rows.add(key, sample),
                        Err(reason) => skipped.push(Skipped { way: key.way, request: Some(key.asked), reason }),
                    }
                });
            }
        }
    }
    let running = able.iter().map(|able| Running {
        way: able.proxy.way,
        version: able.proxy.version.clone(),
        commands: able.proxy.commands.clone(),
        decided: able.proxy.admin.map(|admin| decided(&client, admin)).unwrap_or_default(),
    });
    Ok(Report::new(args.clone(), running.collect(), skipped, &rows))
}

/// One measurement of each way that answers these requests, each second round backwards. A way that fails is not asked
/// for them again.
fn take_turns(
    able: &mut [Able],
    (asked, call): (Asked, &Call),
    (client, connections, round): (&Client, u32, u32),
    seconds: f64,
    mut found: impl FnMut(Key, Result<Sample, String>),
) {
    let mut order: Vec<_> = able.iter_mut().filter(|able| able.asked.contains(&asked)).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    for Able { proxy, asked: answered } in order {
        let measured = client.load(proxy.port, call, (connections, seconds), || proxy.spent());
        if measured.is_err() {
            answered.retain(|other| *other != asked);
        }
        let sample = measured.map(|(measured, before, after)| Sample::new(&measured, after.since(&before)));
        found(Key { asked, connections, way: proxy.way }, sample);
    }
}

/// Which requests a way answers. Each body is asked, so that what can be known of it is known.
fn tried(proxy: Proxy, client: &Client, calls: &[(Asked, Call)], skipped: &mut Vec<Skipped>) -> Able {
    let mut able = Able { proxy, asked: Vec::new() };
    let began = Instant::now();
    let port = able.proxy.port;
    let answers = |(_, call): &(Asked, Call)| client.try_all(port, call).is_ok();
    while !calls.iter().any(answers) && !able.proxy.has_ended() && began.elapsed() < START_MAX {
        std::thread::sleep(PAUSE);
    }
    for (asked, call) in calls {
        let until = Instant::now() + FURTHER_MAX;
        let reason = loop {
            match client.try_all(port, call) {
                Ok(()) => break None,
                Err(reason) if Instant::now() >= until => break Some(reason),
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        match reason {
            None => able.asked.push(*asked),
            Some(reason) => {
                let line = able.proxy.last_line().map(|line| format!("; its log ends with: {line}"));
                let reason = format!("{reason}{}", line.unwrap_or_default());
                skipped.push(Skipped { way: able.proxy.way, request: Some(*asked), reason });
            }
        }
    }
    able
}

/// Who decided and by which tokens, as our own metrics say.
fn decided(client: &Client, admin: u16) -> Vec<String> {
    let text = client.get(admin, "/metrics").unwrap_or_default();
    text.lines().filter(|line| line.contains("decided_total{")).map(str::to_owned).collect()
}
