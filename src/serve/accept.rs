//! The one acceptor: several on one Unix listener would not balance.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use rustix::net::SendFlags;
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};

use super::core::CoreHandle;
use super::log_quota::LogQuota;
use super::socket_file::BoundSocket;
use crate::config::{AccessConfig, Config};
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::limits::{ACCEPT_REST_MS, PEER_GROUPS_MAX};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::shares::{Scarce, share};
use crate::wire::ReplyEncoder;

/// Accepts on the routing socket and hands every connection to the core that has fewest.
pub struct Acceptor {
    listener: UnixListener,
    cores: Vec<CoreHandle>,
    connections_max: usize,
    admission: Arc<ArcSwap<Admission>>,
    users: Arc<Users>,
    counters: Arc<CounterSet<DaemonCounter>>,
    encoder: ReplyEncoder,
    log_quota: LogQuota,
    // Last: the file goes once nobody listens.
    _socket: BoundSocket,
}

impl Acceptor {
    /// An acceptor on `socket` for `cores`. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`Kind::System`] if the socket cannot be waited on.
    pub fn new(
        socket: BoundSocket,
        cores: Vec<CoreHandle>,
        connections_max: usize,
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> crate::error::Result<Self> {
        let listener = socket.listen_async()?;
        let (encoder, log_quota) = (ReplyEncoder::default(), LogQuota::default());
        let admission = Arc::new(ArcSwap::from_pointee(Admission::by_mode("serve")));
        let users = Arc::default();
        Ok(Self { listener, cores, connections_max, admission, users, counters, encoder, log_quota, _socket: socket })
    }

    /// The same for those whom `admission` admits at the time.
    #[must_use]
    pub fn admitting(mut self, admission: Arc<ArcSwap<Admission>>) -> Self {
        self.admission = admission;
        self
    }

    /// The same with so much of the connections for each user as `users` say.
    #[must_use]
    pub fn shared_by(mut self, users: Arc<Users>) -> Self {
        self.users = users;
        self
    }

    /// Accepts until dropped, at any await. Dropping the acceptor closes the socket and removes its file.
    pub async fn run(&mut self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => self.place(stream),
                Err(error) => {
                    // Out of descriptors, most likely: the connection keeps waiting, and asking again at
                    // once would only burn the processor.
                    if let Some(withheld) = self.log_quota.take(Instant::now()) {
                        tracing::error!(%error, withheld, "cannot accept connections; they wait");
                    }
                    tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
                }
            }
        }
    }

    fn place(&mut self, stream: UnixStream) {
        let (credentials, stream) = match stream.peer_cred().and_then(|peer| Ok((peer, stream.into_std()?))) {
            Ok(taken) => taken,
            Err(error) => {
                self.counters.bump(DaemonCounter::ConnectionsRefused);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(%error, withheld, "a connection whose user cannot be told is refused");
                }
                return;
            }
        };
        let uid = credentials.uid();
        if let Err(error) = self.admission.load().admit(&stream, &credentials) {
            self.counters.bump(DaemonCounter::ConnectionsNotPermitted);
            if let Some(withheld) = self.log_quota.take(Instant::now()) {
                tracing::warn!(uid, gid = credentials.gid(), pid = credentials.pid(), %error, withheld, "a connection is refused");
            }
            turn_away(&stream, &error, &mut self.encoder);
            return;
        }
        if let Err((stream, counter, why)) = self.hand_over(stream, uid) {
            self.refuse(&stream, counter, why, uid);
        }
    }

    /// Hands a connection to the core that has fewest; else gives it back with what is to be counted and said.
    fn hand_over(&self, stream: StdStream, uid: u32) -> Result<(), (StdStream, DaemonCounter, &'static str)> {
        let alive = || self.cores.iter().filter(|core| core.is_alive());
        let open: usize = alive().map(CoreHandle::connections).sum();
        let Some(least) = alive().min_by_key(|core| core.connections()) else {
            return Err((stream, DaemonCounter::ConnectionsRefused, "no core is serving"));
        };
        if open >= self.connections_max {
            return Err((stream, DaemonCounter::ConnectionsRefused, "too many connections are open"));
        }
        let Some(place) = self.users.take(uid, Scarce::Connections, 1, self.connections_max) else {
            let why = "too many connections of this user are open";
            return Err((stream, DaemonCounter::ConnectionsRefusedUser, why));
        };
        let handed = least.hand_over(stream, uid, place);
        handed.map_err(|stream| (stream, DaemonCounter::MailboxFull, "the core's mailbox is full"))
    }

    /// Tells the peer why, if it can be done without waiting, and closes.
    fn refuse(&mut self, stream: &StdStream, counter: DaemonCounter, why: &str, uid: u32) {
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(uid, why, withheld, "a connection is refused");
        }
        let error =
            Error::new(Kind::Overloaded, why, "share connections: any number of requests may be in flight on one");
        turn_away(stream, &error, &mut self.encoder);
    }
}

/// Tells a peer that is not admitted why, if it can be done without waiting.
pub(super) fn turn_away(stream: impl AsFd, error: &Error, encoder: &mut ReplyEncoder) {
    let mut out = Vec::new();
    // Nothing was asked yet: the answer is to nobody in particular.
    encoder.error(CorrelationId(0), error, &mut out);
    if let Err(error) = rustix::net::send(stream, &out, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        tracing::debug!(%error, "the refused peer was gone already");
    }
}

// Who may connect to a socket, beside what the mode of its file says: lists of users and groups, held against what the
// kernel noted of the peer's process when it connected.

/// Where the names of users are.
const USERS: &str = "/etc/passwd";
/// Where the names of groups are.
const GROUPS: &str = "/etc/group";
/// Groups of a peer that are asked for at first.
const PEER_GROUPS_USUAL: usize = 64;

/// Who may connect to one socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The table of the configuration that says so.
    table: &'static str,
    rule: Rule,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Whoever can open the file.
    ByMode,
    /// Of those, whose user or one of whose groups is listed. Both are sorted.
    Listed { uids: Box<[u32]>, gids: Box<[u32]> },
}

impl Admission {
    /// Of the socket of `table`, for whoever can open its file.
    #[must_use]
    pub const fn by_mode(table: &'static str) -> Self {
        Self { table, rule: Rule::ByMode }
    }

    /// Looks up what `access`, of `table`, names.
    ///
    /// # Errors
    /// [`Kind::Config`] if there is no such user or group, [`Kind::System`] if it cannot be told.
    pub fn resolve(table: &'static str, access: &AccessConfig) -> Result<Self> {
        if *access == AccessConfig::default() {
            return Ok(Self::by_mode(table));
        }
        let uids = numbers(&Accounts { table, field: "allow_uids", what: "user", file: USERS }, &access.uids)?;
        let gids = numbers(&Accounts { table, field: "allow_gids", what: "group", file: GROUPS }, &access.gids)?;
        Ok(Self { table, rule: Rule::Listed { uids, gids } })
    }

    fn is_listed(&self, uid: u32, gids: impl FnOnce() -> io::Result<Vec<u32>>) -> io::Result<bool> {
        let Rule::Listed { uids, gids: listed } = &self.rule else { return Ok(true) };
        if uids.binary_search(&uid).is_ok() {
            return Ok(true);
        }
        Ok(!listed.is_empty() && gids()?.iter().any(|gid| listed.binary_search(gid).is_ok()))
    }

    /// Looks whether the peer at the other end of `stream`, who has `credentials`, may be there.
    ///
    /// # Errors
    /// [`Kind::NotPermitted`] if not, [`Kind::System`] if the kernel does not say which groups it is in.
    pub(super) fn admit(&self, stream: impl AsFd, credentials: &UCred) -> Result<()> {
        let table = self.table;
        let groups = || {
            let mut groups = supplementary_groups(stream)?;
            groups.push(credentials.gid());
            Ok(groups)
        };
        match self.is_listed(credentials.uid(), groups) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::new(
                Kind::NotPermitted,
                format!("user {} may not connect to this socket", credentials.uid()),
                format!("name the user in {table}.allow_uids, or a group of it in {table}.allow_gids, and send SIGHUP"),
            )),
            Err(error) => {
                let remedy = format!("name the user in {table}.allow_uids: a group cannot be told here");
                Err(Error::new(Kind::System, "the groups of the peer cannot be told", remedy).caused_by(error))
            }
        }
    }
}

/// What a list of accounts is of.
struct Accounts {
    table: &'static str,
    field: &'static str,
    what: &'static str,
    /// Where their names are: the third field of a line is the number of the first.
    file: &'static str,
}

impl Accounts {
    fn refuse(&self, kind: Kind, problem: &str) -> Error {
        let Self { table, field, what, file } = self;
        let remedy = format!("give the {what}'s number, or a name of {file}");
        Error::new(kind, format!("{table}.{field}: {problem}"), remedy)
    }

    /// The number of an account. What consists of digits is a number, whether there is such an account or not.
    fn number(&self, name: &str) -> Result<u32> {
        if name.bytes().all(|byte| byte.is_ascii_digit()) {
            let problem = || format!("{name} is beyond every {}'s number", self.what);
            return name.parse().map_err(|_| self.refuse(Kind::Config, &problem()));
        }
        let accounts = std::fs::read(self.file).map_err(|error| {
            self.refuse(Kind::System, &format!("{} cannot be read to look up {name:?}", self.file)).caused_by(error)
        })?;
        let found = number_in(&accounts, name);
        found.ok_or_else(|| self.refuse(Kind::Config, &format!("there is no {} {name:?}", self.what)))
    }
}

/// The number that a file of accounts gives a name.
fn number_in(accounts: &[u8], name: &str) -> Option<u32> {
    accounts.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        fields.next().filter(|first| *first == name.as_bytes())?;
        str::from_utf8(fields.nth(1)?).ok()?.parse().ok()
    })
}

/// The numbers of accounts, sorted.
fn numbers(accounts: &Accounts, written: &[String]) -> Result<Box<[u32]>> {
    let mut numbers = written.iter().map(|name| accounts.number(name)).collect::<Result<Vec<u32>>>()?;
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers.into())
}

/// The groups a peer's process was in when it connected, beside its own one.
#[expect(unsafe_code, reason = "a socket option that no crate in use here wraps")]
fn supplementary_groups(stream: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; PEER_GROUPS_USUAL];
    loop {
        let mut bytes = size_of_val(groups.as_slice()) as libc::socklen_t;
        let (socket, into) = (stream.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: the descriptor is open as long as `stream` lives; the kernel writes at most `bytes` bytes at `into`,
        // where `groups` has as many, and a group's number is a u32, of which any bits are a value.
        let asked = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERGROUPS, into, &raw mut bytes) };
        let count = bytes as usize / size_of::<u32>();
        if asked == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        let is_too_small = error.raw_os_error() == Some(libc::ERANGE) && groups.len() < count;
        if !is_too_small || count > PEER_GROUPS_MAX {
            return Err(error);
        }
        // The kernel has said how many there are.
        groups.resize(count, 0);
    }
}

/// Who may connect to the two sockets; replaced when the configuration is read again.
#[derive(Clone, Debug)]
pub struct Admissions {
    /// To route.
    pub routing: Arc<ArcSwap<Admission>>,
    /// To administer.
    pub admin: Arc<ArcSwap<Admission>>,
}

impl Admissions {
    /// As a configuration says.
    ///
    /// # Errors
    /// As [`Admission::resolve`].
    pub fn resolve(config: &Config) -> Result<Self> {
        let [routing, admin] = both(config)?;
        Ok(Self { routing: Arc::new(ArcSwap::from_pointee(routing)), admin: Arc::new(ArcSwap::from_pointee(admin)) })
    }

    /// Replaces both by what a configuration says, or neither. Answers whether anything is different then.
    ///
    /// # Errors
    /// As [`Admission::resolve`].
    pub fn replace(&self, config: &Config) -> Result<bool> {
        let [routing, admin] = both(config)?;
        let is_changed = **self.routing.load() != routing || **self.admin.load() != admin;
        self.routing.store(Arc::new(routing));
        self.admin.store(Arc::new(admin));
        Ok(is_changed)
    }
}

fn both(config: &Config) -> Result<[Admission; 2]> {
    Ok([Admission::resolve("serve", &config.serve.access)?, Admission::resolve("admin", &config.admin.access)?])
}

// What the processes of each user have of what there is for all gateways, so that none can take everything.

/// How many sorts there are of what is scarce.
const SORTS: usize = Scarce::ALL.len();

/// What every user has, and how much that may be. Locked only where a connection, a lane or a wait begins or ends.
#[derive(Debug)]
pub struct Users {
    share_percent: u8,
    /// By user; only of those who have something.
    held: Mutex<FxHashMap<u32, [usize; SORTS]>>,
}

impl Default for Users {
    /// Any user may have all.
    fn default() -> Self {
        Self::new(100)
    }
}

impl Users {
    /// Users of whom each may have so much of all there is, percent.
    #[must_use]
    pub fn new(share_percent: u8) -> Self {
        Self { share_percent, held: Mutex::default() }
    }

    /// How much of `all` one user may have; at least one.
    pub(super) const fn share_of(&self, all: usize) -> usize {
        share(self.share_percent, all)
    }

    /// Takes so much for a user of something of which there is `all`; `None` = the user would have more than may be.
    pub(super) fn take(self: &Arc<Self>, uid: u32, what: Scarce, amount: usize, all: usize) -> Option<UserPlace> {
        let mut held = self.held.lock();
        let of_user = held.get(&uid).map_or(0, |held| held[what as usize]);
        let wanted = of_user.checked_add(amount).filter(|wanted| *wanted <= self.share_of(all))?;
        held.entry(uid).or_default()[what as usize] = wanted;
        Some(UserPlace { users: Arc::clone(self), uid, what, amount })
    }
}

/// What a user has taken, given back when it is dropped.
#[derive(Debug)]
pub(super) struct UserPlace {
    users: Arc<Users>,
    uid: u32,
    what: Scarce,
    amount: usize,
}

impl Drop for UserPlace {
    fn drop(&mut self) {
        let mut held = self.users.held.lock();
        if let Some(of_user) = held.get_mut(&self.uid) {
            of_user[self.what as usize] = of_user[self.what as usize].saturating_sub(self.amount);
            if *of_user == [0; SORTS] {
                held.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(uids: &[&str], gids: &[&str]) -> AccessConfig {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        AccessConfig { uids: owned(uids), gids: owned(gids) }
    }

    fn admits(access: &AccessConfig, uid: u32, gids: &[u32]) -> bool {
        Admission::resolve("serve", access).unwrap().is_listed(uid, || Ok(gids.to_vec())).unwrap()
    }

    #[test]
    fn nobody_listed_is_everybody_and_one_list_is_enough() {
        assert!(admits(&access(&[], &[]), 7, &[]));
        for (uid, gids, admitted) in
            [(7, &[][..], true), (8, &[5, 9][..], true), (8, &[5][..], false), (0, &[0], false)]
        {
            assert_eq!(admits(&access(&["7", "3"], &["9"]), uid, gids), admitted, "{uid} {gids:?}");
        }
        assert!(!admits(&access(&["7"], &[]), 8, &[7]), "a group is no user");
    }

    #[test]
    fn names_are_looked_up_and_what_is_nobody_is_named() {
        assert!(admits(&access(&["root"], &[]), 0, &[]));
        assert!(admits(&access(&[], &["root"]), 1, &[0]));
        let accounts = b"root:x:0:0::/:/bin/sh\nbroken\ngw:x:7:8::/:/bin/sh\ngwen:x:9:8::/:/bin/sh";
        assert_eq!(
            ["gw", "gwen", "broken", "g", "x"].map(|name| number_in(accounts, name)),
            [Some(7), Some(9), None, None, None]
        );
        for (access, word) in [
            (access(&["no such user"], &[]), "admin.allow_uids: there is no user"),
            (access(&[], &["no such group"]), "admin.allow_gids: there is no group"),
            (access(&["4294967296"], &[]), "beyond every user's number"),
        ] {
            let refused = Admission::resolve("admin", &access).unwrap_err();
            assert!(refused.kind() == Kind::Config && refused.to_string().contains(word), "{refused}");
        }
    }

    #[test]
    fn groups_are_only_asked_for_where_some_are_listed() {
        let only_users = Admission::resolve("serve", &access(&["7"], &[])).unwrap();
        assert!(!only_users.is_listed(8, || Err(io::ErrorKind::Unsupported.into())).unwrap());
        let groups = Admission::resolve("serve", &access(&[], &["7"])).unwrap();
        assert!(groups.is_listed(8, || Err(io::ErrorKind::Unsupported.into())).is_err());
    }

    #[test]
    fn the_kernel_says_the_groups_of_a_peer() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut said: Vec<u32> = supplementary_groups(&ours).unwrap();
        let mut own: Vec<u32> = rustix::process::getgroups().unwrap().into_iter().map(|gid| gid.as_raw()).collect();
        said.sort_unstable();
        own.sort_unstable();
        assert_eq!(said, own);
    }

    #[test]
    fn a_user_has_its_share_of_each_thing_and_no_more_and_gives_it_back() {
        let users = Arc::new(Users::new(75));
        let take = |uid, what, amount| users.take(uid, what, amount, 8);
        let first = take(7, Scarce::Connections, 4).expect("room");
        let second = take(7, Scarce::Connections, 2).expect("6 of 8 are 75 %");
        assert!(take(7, Scarce::Connections, 1).is_none());
        let other = [take(8, Scarce::Connections, 6), take(7, Scarce::Lanes, 6)];
        assert!(other.iter().all(Option::is_some), "other users, and other things");
        drop(first);
        assert!(take(7, Scarce::Connections, 5).is_none() && take(7, Scarce::Connections, 4).is_some());
        drop((second, other));
        assert!(users.held.lock().is_empty(), "nothing is remembered of those who have nothing");
        assert!(take(7, Scarce::WaitingBytes, usize::MAX).is_none());
    }

    #[test]
    fn a_share_is_rounded_up_so_that_nobody_is_left_without() {
        assert_eq!([1, 2, 3, 4, 100].map(|all| Users::new(75).share_of(all)), [1, 2, 3, 3, 75]);
        assert_eq!((Users::new(1).share_of(1), Users::default().share_of(usize::MAX)), (1, usize::MAX));
    }
}
