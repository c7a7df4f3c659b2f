//! Who may connect, and where a new connection goes.
//!
//! * The [`Acceptor`] accepts on the routing socket, for all cores: several acceptors on one Unix listener would not
//!   balance. It also takes the connections that the remote port has opened, so that one thread hands over all.
//! * An [`Admission`] lists the users and groups that may connect to a socket, beside the mode of its file. It is
//!   compared with the user and groups that the kernel recorded for the peer's process when it connected.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rustix::net::SendFlags;
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::connection::TransportKind;
use super::core::{CoreHandle, HandedConnection};
use super::remote::RemoteConnection;
use super::socket_file::BoundSocket;
use crate::budget::{Shed, ShedFlags};
use crate::config::{AccessConfig, Config};
use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::limits::{ACCEPT_PAUSE_MS, PEER_GROUPS_MAX};
use crate::log_quota::LogQuota;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::shares::{PRINCIPALS_FROM, SharedResource, UserQuotas};
use crate::wire::ReplyEncoder;

/// Accepts on the routing socket, and gives every connection to the core with the fewest.
pub struct Acceptor {
    listener: UnixListener,
    cores: Vec<CoreHandle>,
    connections_max: usize,
    admission: Arc<ArcSwap<Admission>>,
    users: Arc<UserQuotas>,
    flags: ShedFlags,
    counters: Arc<CounterSet<DaemonCounter>>,
    /// From the remote port; `None` = there is no such port.
    remote: Option<mpsc::Receiver<RemoteConnection>>,
    encoder: ReplyEncoder,
    log_quota: LogQuota,
    // Last: the file goes after the listener.
    _socket: BoundSocket,
}

impl Acceptor {
    /// An acceptor on `socket` for `cores`. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`Kind::System`] if the runtime cannot watch the socket.
    pub fn new(
        socket: BoundSocket,
        cores: Vec<CoreHandle>,
        connections_max: usize,
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> crate::error::Result<Self> {
        let listener = socket.listen_async()?;
        let (encoder, log_quota) = (ReplyEncoder::default(), LogQuota::default());
        let admission = Arc::new(ArcSwap::from_pointee(Admission::by_mode("serve")));
        let (users, flags) = (Arc::default(), ShedFlags::default());
        Ok(Self {
            listener,
            cores,
            connections_max,
            admission,
            users,
            flags,
            counters,
            remote: None,
            encoder,
            log_quota,
            _socket: socket,
        })
    }

    /// The same for the users that `admission` lists at the time of each connection.
    #[must_use]
    pub fn admitting(mut self, admission: Arc<ArcSwap<Admission>>) -> Self {
        self.admission = admission;
        self
    }

    /// The same with the users' quotas of connections.
    #[must_use]
    pub fn shared_by(mut self, users: Arc<UserQuotas>) -> Self {
        self.users = users;
        self
    }

    /// The same, refusing new connections while memory is short.
    #[must_use]
    pub fn shedding(mut self, flags: ShedFlags) -> Self {
        self.flags = flags;
        self
    }

    /// The same also for connections from other hosts.
    #[must_use]
    pub(crate) fn receiving(mut self, remote: Option<mpsc::Receiver<RemoteConnection>>) -> Self {
        self.remote = remote;
        self
    }

    /// Accepts until dropped, at any await. Dropping the acceptor closes the socket and removes its file.
    pub async fn run(&mut self) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                remote = next_of(&mut self.remote) => {
                    self.assign_remote(remote);
                    continue;
                }
            };
            match accepted {
                Ok((stream, _)) => self.assign(stream),
                Err(error) => {
                    // Out of descriptors, most likely. The connection keeps waiting, and a retry at once would only
                    // burn the processor.
                    if let Some(withheld) = self.log_quota.take(Instant::now()) {
                        tracing::error!(%error, withheld, "cannot accept connections; they wait");
                    }
                    tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
                }
            }
        }
    }

    fn assign(&mut self, stream: UnixStream) {
        let (credentials, stream) = match stream.peer_cred().and_then(|peer| Ok((peer, stream.into_std()?))) {
            Ok(taken) => taken,
            Err(error) => {
                self.counters.bump(DaemonCounter::ConnectionsRefused);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(%error, withheld, "a connection is refused: the kernel does not report its user");
                }
                return;
            }
        };
        let uid = credentials.uid();
        let admitted = self.admission.load().admit(&stream, &credentials);
        if let Err(error) = admitted.and_then(|()| self.refuse_principals(uid)) {
            self.counters.bump(DaemonCounter::ConnectionsNotPermitted);
            if let Some(withheld) = self.log_quota.take(Instant::now()) {
                tracing::warn!(uid, gid = credentials.gid(), pid = credentials.pid(), %error, withheld, "a connection is refused");
            }
            turn_away(&stream, &error, &mut self.encoder);
            return;
        }
        if let Err((stream, counter, why)) = self.hand_over(stream, uid, TransportKind::Socket) {
            self.refuse(&stream, counter, why, (uid, None));
        }
    }

    /// Its principal was admitted by the remote port. What is refused here, the port carries back.
    fn assign_remote(&mut self, connection: RemoteConnection) {
        let RemoteConnection { stream, principal } = connection;
        if let Err((stream, counter, why)) = self.hand_over(stream, principal.user, TransportKind::Remote) {
            self.refuse(&stream, counter, why, (principal.user, Some(&principal.name)));
        }
    }

    /// Refuses a process whose user has a number of principals, so that it cannot pass as one of them.
    fn refuse_principals(&self, uid: u32) -> Result<()> {
        if self.remote.is_none() || uid < PRINCIPALS_FROM {
            return Ok(());
        }
        let what = format!("user {uid} may not connect to this socket: the number is one of principals");
        Err(Error::new(Kind::NotPermitted, what, format!("run the process as a user below {PRINCIPALS_FROM}")))
    }

    /// Gives a connection to the core with the fewest. On failure returns it with the counter and the reason.
    fn hand_over(
        &self,
        stream: StdStream,
        uid: u32,
        transport: TransportKind,
    ) -> Result<(), (StdStream, DaemonCounter, &'static str)> {
        if self.flags.has(Shed::Connections) {
            let why = "the daemon's memory budget is nearly used";
            return Err((stream, DaemonCounter::ConnectionsRefusedMemory, why));
        }
        let alive = || self.cores.iter().filter(|core| core.is_alive());
        let open: usize = alive().map(CoreHandle::connections).sum();
        let Some(least) = alive().min_by_key(|core| core.connections()) else {
            return Err((stream, DaemonCounter::ConnectionsRefused, "no serving thread runs"));
        };
        if open >= self.connections_max {
            return Err((stream, DaemonCounter::ConnectionsRefused, "too many connections are open"));
        }
        let Some(reservation) = self.users.reserve(uid, SharedResource::Connections, 1, self.connections_max) else {
            let why = "too many connections of this user are open";
            return Err((stream, DaemonCounter::ConnectionsRefusedUser, why));
        };
        let handed = least.hand_over(HandedConnection { stream, uid, transport, reservation });
        handed.map_err(|stream| (stream, DaemonCounter::MailboxFull, "the mailbox of the serving thread is full"))
    }

    /// Sends the peer the reason if that needs no wait, and closes.
    fn refuse(&mut self, stream: &StdStream, counter: DaemonCounter, why: &str, (uid, principal): (u32, Option<&str>)) {
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(uid, principal, why, withheld, "a connection is refused");
        }
        let remedy = match counter {
            DaemonCounter::ConnectionsRefusedMemory => "try again later, or raise memory_bytes_max in [process]",
            _ => "share connections: one connection takes any number of requests in flight",
        };
        let error = Error::new(Kind::Overloaded, why, remedy);
        turn_away(stream, &error, &mut self.encoder);
    }
}

/// The next connection from another host; without a remote port never.
async fn next_of(remote: &mut Option<mpsc::Receiver<RemoteConnection>>) -> RemoteConnection {
    if let Some(receiver) = remote
        && let Some(connection) = receiver.recv().await
    {
        return connection;
    }
    // There is no port, or its thread has ended, which ends the daemon.
    std::future::pending().await
}

/// Sends a peer that is not admitted the reason, if that needs no wait.
pub(crate) fn turn_away(stream: impl AsFd, error: &Error, encoder: &mut ReplyEncoder) {
    let mut out = Vec::new();
    // No request was sent yet, so that this answers none.
    encoder.error(CorrelationId(0), error, &mut out);
    if let Err(error) = rustix::net::send(stream, &out, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        tracing::debug!(%error, "a refused peer has gone already");
    }
}

/// The file with the names of users.
const USERS: &str = "/etc/passwd";
/// The file with the names of groups.
const GROUPS: &str = "/etc/group";
/// Groups of a peer for which the first call has space.
const PEER_GROUPS_USUAL: usize = 64;

/// The users that may connect to one socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    lists: Lists,
    rule: Rule,
}

/// Where an operator lists users and groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lists {
    /// In this table of the configuration.
    Table(&'static str),
    /// By flags of a command.
    Flags,
}

impl Lists {
    fn of_users(self) -> String {
        match self {
            Self::Table(table) => format!("{table}.allow_uids"),
            Self::Flags => "--allow-uid".to_owned(),
        }
    }

    fn of_groups(self) -> String {
        match self {
            Self::Table(table) => format!("{table}.allow_gids"),
            Self::Flags => "--allow-gid".to_owned(),
        }
    }

    /// What makes a change take effect.
    const fn then(self) -> &'static str {
        match self {
            Self::Table(_) => "send SIGHUP",
            Self::Flags => "start the command again",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// Every user that can open the socket file.
    ByMode,
    /// Of those, the listed users and the members of the listed groups. Both lists are sorted.
    Listed { uids: Box<[u32]>, gids: Box<[u32]> },
}

impl Admission {
    /// For the socket of `table`: every user that can open its file.
    #[must_use]
    pub const fn by_mode(table: &'static str) -> Self {
        Self { lists: Lists::Table(table), rule: Rule::ByMode }
    }

    /// Those of the lists that flags of a command state.
    ///
    /// # Errors
    /// As [`Admission::resolve`].
    pub fn resolve_flags(access: &AccessConfig) -> Result<Self> {
        Self::resolve_lists(Lists::Flags, access)
    }

    /// Looks up the names in `access` of `table`.
    ///
    /// # Errors
    /// [`Kind::Config`] if there is no such user or group, [`Kind::System`] if the names cannot be looked up.
    pub fn resolve(table: &'static str, access: &AccessConfig) -> Result<Self> {
        Self::resolve_lists(Lists::Table(table), access)
    }

    fn resolve_lists(lists: Lists, access: &AccessConfig) -> Result<Self> {
        if *access == AccessConfig::default() {
            return Ok(Self { lists, rule: Rule::ByMode });
        }
        let uids = numbers(&Accounts { list: lists.of_users(), what: "user", file: USERS }, &access.uids)?;
        let gids = numbers(&Accounts { list: lists.of_groups(), what: "group", file: GROUPS }, &access.gids)?;
        Ok(Self { lists, rule: Rule::Listed { uids, gids } })
    }

    fn is_listed(&self, uid: u32, gids: impl FnOnce() -> io::Result<Vec<u32>>) -> io::Result<bool> {
        let Rule::Listed { uids, gids: listed } = &self.rule else { return Ok(true) };
        if uids.binary_search(&uid).is_ok() {
            return Ok(true);
        }
        Ok(!listed.is_empty() && gids()?.iter().any(|gid| listed.binary_search(gid).is_ok()))
    }

    /// Checks the peer at the other end of `stream`, whose process has `credentials`.
    ///
    /// # Errors
    /// [`Kind::NotPermitted`] if it is not listed, [`Kind::System`] if the kernel does not report its groups.
    pub(crate) fn admit(&self, stream: impl AsFd, credentials: &UCred) -> Result<()> {
        let lists = self.lists;
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
                format!(
                    "list the user in {}, or one of its groups in {}, and {}",
                    lists.of_users(),
                    lists.of_groups(),
                    lists.then()
                ),
            )),
            Err(error) => {
                let remedy = format!("list the user in {}: groups cannot be checked here", lists.of_users());
                Err(Error::new(Kind::System, "cannot read the groups of the peer", remedy).caused_by(error))
            }
        }
    }
}

/// The kind of accounts in a list: users or groups.
struct Accounts {
    /// The list's name in messages.
    list: String,
    what: &'static str,
    /// The file with their names. The third field of a line is the number of the first.
    file: &'static str,
}

impl Accounts {
    fn refuse(&self, kind: Kind, problem: &str) -> Error {
        let Self { list, what, file } = self;
        let remedy = format!("give the number of the {what}, or a name in {file}");
        Error::new(kind, format!("{list}: {problem}"), remedy)
    }

    /// The number of an account. A name of digits only is a number, whether there is such an account or not.
    fn number(&self, name: &str) -> Result<u32> {
        if name.bytes().all(|byte| byte.is_ascii_digit()) {
            let problem = || format!("{name} is above the highest number of a {}", self.what);
            return name.parse().map_err(|_| self.refuse(Kind::Config, &problem()));
        }
        let accounts = std::fs::read(self.file).map_err(|error| {
            self.refuse(Kind::System, &format!("cannot read {} to look up {name:?}", self.file)).caused_by(error)
        })?;
        let found = number_in(&accounts, name);
        found.ok_or_else(|| self.refuse(Kind::Config, &format!("there is no {} {name:?}", self.what)))
    }
}

/// The number of a name in a file of accounts.
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

/// The supplementary groups of a peer's process when it connected.
#[expect(unsafe_code, reason = "a socket option that no crate in use here wraps")]
fn supplementary_groups(stream: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; PEER_GROUPS_USUAL];
    loop {
        let mut bytes = size_of_val(groups.as_slice()) as libc::socklen_t;
        let (socket, into) = (stream.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: the descriptor is open as long as `stream` lives. The kernel writes at most `bytes` bytes at `into`,
        // where `groups` has as many. A group's number is a u32, for which all bits are valid.
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
        // The kernel has stated the number of groups.
        groups.resize(count, 0);
    }
}

/// The admissions of the two sockets. A reload of the configuration replaces them.
#[derive(Clone, Debug)]
pub struct Admissions {
    /// For the routing socket.
    pub routing: Arc<ArcSwap<Admission>>,
    /// For the admin socket.
    pub admin: Arc<ArcSwap<Admission>>,
}

impl Admissions {
    /// The admissions of a configuration. It reads the system's users and groups, which takes what time the system
    /// takes.
    ///
    /// # Errors
    /// As [`Admission::resolve`].
    pub fn resolve(config: &Config) -> Result<Self> {
        let routing = Admission::resolve("serve", &config.serve.access)?;
        let admin = Admission::resolve("admin", &config.admin.access)?;
        Ok(Self { routing: Arc::new(ArcSwap::from_pointee(routing)), admin: Arc::new(ArcSwap::from_pointee(admin)) })
    }

    /// Replaces both by those of another value. `true` = one of them has changed.
    pub fn replace(&self, next: &Self) -> bool {
        let (routing, admin) = (next.routing.load_full(), next.admin.load_full());
        let is_changed = **self.routing.load() != *routing || **self.admin.load() != *admin;
        self.routing.store(routing);
        self.admin.store(admin);
        is_changed
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
    fn empty_lists_admit_all_users_and_one_match_is_enough() {
        assert!(admits(&access(&[], &[]), 7, &[]));
        for (uid, gids, admitted) in
            [(7, &[][..], true), (8, &[5, 9][..], true), (8, &[5][..], false), (0, &[0], false)]
        {
            assert_eq!(admits(&access(&["7", "3"], &["9"]), uid, gids), admitted, "{uid} {gids:?}");
        }
        assert!(!admits(&access(&["7"], &[]), 8, &[7]), "a user is not in a group of the same number");
    }

    #[test]
    fn names_are_looked_up_and_unknown_names_are_refused() {
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
            (access(&["4294967296"], &[]), "above the highest number of a user"),
        ] {
            let refused = Admission::resolve("admin", &access).unwrap_err();
            assert!(refused.kind() == Kind::Config && refused.to_string().contains(word), "{refused}");
        }
    }

    #[test]
    fn groups_are_read_only_if_some_are_listed() {
        let only_users = Admission::resolve("serve", &access(&["7"], &[])).unwrap();
        assert!(!only_users.is_listed(8, || Err(io::ErrorKind::Unsupported.into())).unwrap());
        let groups = Admission::resolve("serve", &access(&[], &["7"])).unwrap();
        assert!(groups.is_listed(8, || Err(io::ErrorKind::Unsupported.into())).is_err());
    }

    #[test]
    fn the_kernel_reports_the_groups_of_a_peer() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut said: Vec<u32> = supplementary_groups(&ours).unwrap();
        let mut own: Vec<u32> = rustix::process::getgroups().unwrap().into_iter().map(|gid| gid.as_raw()).collect();
        said.sort_unstable();
        own.sort_unstable();
        assert_eq!(said, own);
    }
}
