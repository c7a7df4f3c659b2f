//! The thread that exchanges load with the other routers of the fleet, beside the requests.
//!
//! The socket is bound and the secrets are read before the sandbox. The thread begins once the tables are there.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt;
use xxhash_rust::xxh3::xxh3_64;

use super::endable_thread::EndableThread;
use super::resources::Resources;
use crate::config::{Config, RoutersConfig, SpaceConfig};
use crate::endpoint::{BoundEndpoint, Endpoint};
use crate::error::{Error, Kind, Result};
use crate::limits::{LOAD_HEARTBEAT_MS, ROUTER_SECRET_BYTES_CEILING, TURN_LOOK_EVERY_MS};
#[cfg(feature = "nats")]
use crate::nats::{Access, AccessFiles};
use crate::requests::{OthersLoads, RequestTables};
use crate::routers::{
    Carrier, Exchange, ExchangeSettings, Fingerprint, Incarnation, Keys, Nonce, OriginId, OriginSettings,
    PublisherSettings, RoutersView, Sender, SharedTables, WantedPeers, ZeroMq, opening,
};
#[cfg(feature = "nats")]
use crate::routers::{Nats, NatsPlan};
use crate::sandbox::{self, ThreadKind};
use crate::serve::{ListeningSockets, Turn, Turns};
use crate::watchdog::Activity;
use crate::zmtp::Server;

/// What the thread needs of the system.
#[derive(Debug)]
pub(super) struct RoutersPort {
    way: Way,
    turns: Turns,
    keys: Keys,
    own: Sender,
}

/// How the others are reached.
#[derive(Debug)]
enum Way {
    ZeroMq {
        server: Box<Server>,
    },
    #[cfg(feature = "nats")]
    Nats(NatsPlan),
}

impl RoutersPort {
    /// Binds the socket, if there is one, and reads the secrets; `None` = the configuration shares no load.
    ///
    /// # Errors
    /// `Config` if an endpoint cannot be bound, or a secret cannot be read or is too short.
    pub(super) fn open(config: &Config, sockets: &mut ListeningSockets) -> Result<Option<Self>> {
        let routers = &config.routers;
        let (place, way) = match &routers.listen {
            Some(listen) => {
                let remedy = "correct it in [routers]";
                let invalid = |fault| Error::new(Kind::Config, "an address of a router", remedy).caused_by(fault);
                let bound = BoundEndpoint::parse(listen).map_err(invalid)?;
                let name = format!("routers {listen}");
                let server = match sockets.take(&name) {
                    Some(socket) => ZeroMq::received(&bound, socket)?,
                    None => ZeroMq::bind(&bound)?,
                };
                sockets.note(name, server.descriptor())?;
                (listen, Way::ZeroMq { server: Box::new(server) })
            }
            #[cfg(feature = "nats")]
            None if !routers.nats.is_empty() => (&routers.nats_prefix, Way::Nats(nats_plan(routers)?)),
            None => return Ok(None),
        };
        let keys = keys(routers)?;
        let own = Sender {
            origin: origin(routers, place),
            incarnation: Incarnation(rand::rng().random_range(1..=u64::MAX)),
            fingerprint: fingerprint(&config.spaces),
        };
        Ok(Some(Self { way, turns: sockets.turns().clone(), keys, own }))
    }

    /// The secret of the hashes of affinity sessions, the same at all routers.
    pub(super) const fn affinity_secret(&self) -> u64 {
        self.keys.affinity_secret()
    }
}

/// The peers as the configuration and their file name them, on their way to the thread: only the newest lists count.
#[derive(Debug, Default)]
pub(super) struct NamedPeers(Mutex<PeerLists>);

#[derive(Debug, Default)]
struct PeerLists {
    configured: Vec<Endpoint>,
    /// The path of the file, if there is one, and what it lists; `None` = it could not be read yet.
    file: Option<(String, Option<Vec<Endpoint>>)>,
    named: Option<(String, u16)>,
    is_new: bool,
}

impl NamedPeers {
    fn new(routers: &RoutersConfig) -> Self {
        Self(Mutex::new(PeerLists {
            configured: routers.peer_endpoints(),
            file: routers.peers_file.as_ref().map(|path| (path.display().to_string(), None)),
            named: routers.peers_dns.clone(),
            is_new: true,
        }))
    }

    /// Replaces the list of the configuration.
    pub(super) fn set_configured(&self, configured: Vec<Endpoint>) {
        let mut lists = self.0.lock();
        (lists.configured, lists.is_new) = (configured, true);
    }

    /// Replaces the list of the file.
    pub(super) fn set_filed(&self, filed: Vec<Endpoint>) {
        let mut lists = self.0.lock();
        lists.is_new = true;
        if let Some((_, listed)) = &mut lists.file {
            *listed = Some(filed);
        }
    }

    /// The peers, if they have changed since they were taken last.
    fn take(&self) -> Option<WantedPeers> {
        let mut lists = self.0.lock();
        std::mem::take(&mut lists.is_new).then(|| {
            let (awaited, filed) = match &lists.file {
                Some((path, None)) => (Some(path.clone()), &[][..]),
                Some((_, Some(filed))) => (None, &filed[..]),
                None => (None, &[][..]),
            };
            let listed = lists.configured.iter().chain(filed).cloned().collect();
            WantedPeers { listed, awaited, named: lists.named.clone() }
        })
    }
}

/// Starts the thread, if there is a port.
///
/// # Errors
/// `System` if it cannot be started.
pub(super) fn start(
    config: &Config,
    port: Option<RoutersPort>,
    tables: &RequestTables,
    resources: &Resources,
) -> Result<(Option<EndableThread>, Arc<RoutersView>, Arc<NamedPeers>)> {
    let Some(RoutersPort { way, turns, keys, own }) = port else {
        return Ok((None, Arc::default(), Arc::default()));
    };
    let (view, now_ns) = (Arc::new(RoutersView::joining()), tables.clock());
    let named = Arc::new(NamedPeers::new(&config.routers));
    let (opening, now_ms) = (opening(&own, &keys), now_ns() / 1_000_000);
    let tables = (config, tables, resources);
    tracing::info!(origin = %own.origin, fingerprint = %own.fingerprint, peers = config.routers.peers.len(), "this router shares its load");
    let thread = match way {
        Way::ZeroMq { server } => {
            let peers = named.take().unwrap_or_default();
            let carrier = ZeroMq::connect(*server, peers, &opening, now_ms)?;
            let newest_peers = Arc::clone(&named);
            let before_round = move |carrier: &mut ZeroMq, now_ms| {
                if let Some(peers) = newest_peers.take() {
                    carrier.follow(peers, now_ms);
                }
            };
            run((carrier, keys), own, tables, (&view, turns), (before_round, ZeroMq::leave_file))
        }
        #[cfg(feature = "nats")]
        Way::Nats(plan) => {
            // Who the others are is not configured.
            let carrier = Nats::connect(plan, own.origin, opening, now_ms)?;
            run((carrier, keys), own, tables, (&view, turns), (|_: &mut Nats, _| {}, |_: &mut Nats| {}))
        }
    }?;
    Ok((Some(thread), view, named))
}

/// Starts the thread over a carrier. It calls `before_round` with the carrier and the time, milliseconds, and `leave` if
/// another daemon speaks for this router when it ends.
fn run<C: Carrier + Send + 'static>(
    carrier: (C, Keys),
    own: Sender,
    (config, tables, resources): (&Config, &RequestTables, &Resources),
    (view, turns): (&Arc<RoutersView>, Turns),
    (before_round, leave): (impl Fn(&mut C, u64) + Send + 'static, impl Fn(&mut C) + Send + 'static),
) -> Result<EndableThread> {
    let (routers, now_ns) = (&config.routers, tables.clock());
    let settings = ExchangeSettings {
        publisher: PublisherSettings { batch_ms: routers.batch_ms, heartbeat_ms: LOAD_HEARTBEAT_MS },
        origins: OriginSettings { silent_ms_max: routers.silent_ms_max, origins_max: routers.origins_max() },
        join_ms_max: routers.join_ms_max,
    };
    let shared = SharedTables {
        loads: &tables.loads,
        others: &OthersLoads::new(Arc::clone(&tables.loads), Arc::clone(&tables.queue)),
        fleet: &tables.fleet,
        affinities: &tables.affinities,
        policies: &tables.policies,
    };
    let nonces = Box::new(|| Nonce(rand::rng().random()));
    let mut exchange = Exchange::new(carrier, own, settings, shared, (view, now_ns()), nonces);
    let mark = resources.watchlist.add("routers", false);
    EndableThread::start("kvrouted-routers", "the thread of the other routers", move |ending| {
        sandbox::enter(ThreadKind::Routers);
        // Until then the daemon before this one speaks for this router.
        while turns.turn() == Turn::Theirs && !ending.is_asked_for() {
            std::thread::park_timeout(Duration::from_millis(TURN_LOOK_EVERY_MS));
        }
        while !ending.is_asked_for() && turns.turn() != Turn::Over {
            // It waits in a round for less than a stall takes.
            mark.begin_round(Activity::SharingLoad);
            before_round(exchange.carrier_mut(), now_ns() / 1_000_000);
            if let Err(error) = exchange.round(&now_ns) {
                tracing::error!(%error, "the event loop of the other routers failed; it is tried again");
                std::thread::sleep(Duration::from_millis(LOAD_HEARTBEAT_MS / 2));
            }
        }
        if !turns.is_ours() {
            leave(exchange.carrier_mut());
        }
        mark.wait();
    })
}

#[cfg(feature = "nats")]
fn nats_plan(routers: &RoutersConfig) -> Result<NatsPlan> {
    let files = AccessFiles {
        user: routers.nats_user.as_deref(),
        secret: routers.nats_secret_file.as_deref(),
        credentials: routers.nats_credentials_file.as_deref(),
        authorities: routers.nats_ca_file.as_deref(),
    };
    Ok(NatsPlan::new(routers.nats_servers(), Access::read(&routers.nats_prefix, &files)?))
}

fn keys(routers: &RoutersConfig) -> Result<Keys> {
    let signing = routers.secret_file.as_deref().map_or_else(|| Ok(Vec::new()), secret)?;
    let accepted = routers.accepted_secret_file.as_deref().map(secret).transpose()?;
    Keys::new(&signing, accepted.as_deref()).map_err(|fault| {
        let what = "a secret of [routers] is too short";
        Error::new(Kind::Config, what, "make one: head -c 32 /dev/urandom | base64").caused_by(fault)
    })
}

/// The secret in a file, without white space at its end.
fn secret(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |cause: std::io::Error| {
        let what = format!("cannot read the secret of the routers in {}", path.display());
        Error::new(Kind::Config, what, "name a file that the daemon's user can read").caused_by(cause)
    };
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if bytes > ROUTER_SECRET_BYTES_CEILING {
        let what = format!("the secret of the routers in {} has {bytes} bytes", path.display());
        return Err(Error::new(Kind::Config, what, "make one: head -c 32 /dev/urandom | base64"));
    }
    let secret = std::fs::read(path).map_err(unreadable)?;
    Ok(secret.trim_ascii_end().to_vec())
}

/// The number of this router, which it has after a restart too.
fn origin(routers: &RoutersConfig, place: &str) -> OriginId {
    let host = || format!("{} {place}", rustix::system::uname().nodename().to_string_lossy());
    let name = routers.name.clone().unwrap_or_else(host);
    OriginId(xxh3_64(name.as_bytes()))
}

/// A hash of what routers of one fleet have in common.
pub(super) fn fingerprint(spaces: &[SpaceConfig]) -> Fingerprint {
    let mut text = String::new();
    for space in spaces {
        let SpaceConfig { model, namespace, role, block_size, window, .. } = space;
        // Lengths, so that no two lists make one text.
        let (model_bytes, namespace_bytes) = (model.len(), namespace.len());
        text +=
            &format!("{model_bytes} {model} {namespace_bytes} {namespace} {} {block_size} {window:?};", role.name());
    }
    Fingerprint(xxh3_64(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, parse};

    fn config(text: &str) -> Config {
        parse("t", text, &Flags::default()).expect("valid")
    }

    #[test]
    fn only_what_all_routers_have_in_common_is_in_the_fingerprint() {
        let of = |text: &str| fingerprint(&config(text).spaces);
        let plain = of("[[space]]\nmodel = \"m\"\nblock_size = 16\n");
        assert_eq!(plain, of("[serve]\ncores = 3\n[[space]]\nmodel = \"m\"\nblock_size = 16\nmemory_bytes_max = 0\n"));
        for other in [
            "[[space]]\nmodel = \"n\"\nblock_size = 16\n",
            "[[space]]\nmodel = \"m\"\nblock_size = 32\n",
            "[[space]]\nmodel = \"m\"\nnamespace = \"n\"\nblock_size = 16\n",
            "[[space]]\nmodel = \"m\"\nblock_size = 16\nrole = \"decode\"\n",
            "[[space]]\nmodel = \"m\"\nblock_size = 16\n[[space]]\nmodel = \"n\"\n",
        ] {
            assert_ne!(plain, of(other), "{other}");
        }
    }

    #[test]
    fn a_router_keeps_its_number_and_another_name_has_another() {
        let named = |name: &str| RoutersConfig { name: Some(name.into()), ..RoutersConfig::default() };
        assert_eq!(origin(&named("a"), "tcp://*:1"), origin(&named("a"), "tcp://*:2"));
        assert_ne!(origin(&named("a"), "tcp://*:1"), origin(&named("b"), "tcp://*:1"));
        let unnamed = RoutersConfig::default();
        assert_ne!(origin(&unnamed, "tcp://*:1"), origin(&unnamed, "tcp://*:2"));
    }

    #[test]
    fn secrets_that_are_missing_short_or_huge_are_refused_with_the_file_and_a_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let routers = RoutersConfig { secret_file: Some(path.clone()), ..RoutersConfig::default() };
        let refused = |routers: &RoutersConfig| keys(routers).expect_err("refused").to_string();
        assert!(refused(&routers).contains("secret"));
        std::fs::write(&path, "short").expect("written");
        assert!(refused(&routers).contains("too short"));
        std::fs::write(&path, vec![b'x'; 1 + ROUTER_SECRET_BYTES_CEILING as usize]).expect("written");
        assert!(refused(&routers).contains("bytes"));
        std::fs::write(&path, "0123456789abcdef0123456789abcdef\n").expect("written");
        assert!(keys(&routers).is_ok());
        let rotating = RoutersConfig { accepted_secret_file: Some(folder.path().join("other")), ..routers };
        assert!(refused(&rotating).contains("other"));
    }
}
