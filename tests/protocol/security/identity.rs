//! Access by the user and group that the kernel reports of a peer. With real other users if the tests run as root: a
//! thread can become one.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kvrouted::error::Kind;
use kvrouted::limits::LOG_LINES_PER_WINDOW_MAX;
use kvrouted::load::SessionToken;
use kvrouted::serve::admin_path;
use rustix::process::{Gid, Uid, geteuid};

use super::besieged::{Besieged, configure};
use crate::kit::raw::Raw;
use crate::kit::{run, skipped, text, until};

/// A user without an account here.
#[derive(Clone, Copy)]
pub(crate) struct Someone {
    uid: u32,
    gid: u32,
    groups: &'static [u32],
}

pub(crate) const GATEWAY: Someone = Someone { uid: 61_001, gid: 61_001, groups: &[] };
pub(crate) const MEMBER: Someone = Someone { uid: 61_002, gid: 61_002, groups: &[61_000, 61_010] };
const STRANGER: Someone = Someone { uid: 61_003, gid: 61_003, groups: &[61_011] };

impl Someone {
    pub(crate) const fn without_groups(uid: u32) -> Self {
        Self { uid, gid: uid, groups: &[] }
    }

    /// Does something as this user, in a thread of its own that ends with it.
    fn does<T: Send>(self, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let become_and_act = move || {
                let groups: Vec<Gid> = self.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
                rustix::thread::set_thread_groups(&groups).expect("root may");
                let (gid, uid) = (Gid::from_raw(self.gid), Uid::from_raw(self.uid));
                rustix::thread::set_thread_res_gid(gid, gid, gid).expect("root may");
                rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root may");
                act()
            };
            scope.spawn(become_and_act).join().expect("it acts")
        })
    }

    /// What comes of a hello.
    pub(crate) fn greets(self, socket: &Path, session: Option<SessionToken>) -> Result<Raw, Kind> {
        let connected = self.does(|| std::os::unix::net::UnixStream::connect(socket));
        let mut raw = Raw::over(connected.map_err(|_| Kind::System)?);
        raw.hello(session).map(|_| raw)
    }
}

/// A daemon whose folder any user may enter; `None` where the test cannot become another user.
pub(crate) fn daemon(serve: &str, tables: &str) -> Option<(Besieged, PathBuf)> {
    if !geteuid().is_root() {
        skipped("other users", "only root can become one");
        return None;
    }
    let daemon = Besieged::configured(serve, tables);
    open_folder(&daemon);
    let socket = daemon.socket();
    Some((daemon, socket))
}

fn open_folder(daemon: &Besieged) {
    std::fs::set_permissions(daemon.folder.path(), std::fs::Permissions::from_mode(0o755)).expect("opened");
}

#[test]
fn the_modes_of_the_files_decide_where_nobody_is_listed() {
    let Some((daemon, socket)) = daemon(OPEN, "") else { return };
    assert!(GATEWAY.greets(&socket, None).is_ok(), "any user who can open the file");
    assert!(
        matches!(GATEWAY.greets(&admin_path(&socket), None), Err(Kind::System)),
        "the admin socket is closed to others"
    );
    daemon.assert_recovered();
}

/// Any user can open the file.
const OPEN: &str = "socket_mode = \"0666\"";
/// Root is on the lists too, as the tests are it.
const LISTED: &str = "socket_mode = \"0666\"\nallow_uids = [\"61001\", \"root\"]\nallow_gids = [\"61010\"]\n";

#[test]
fn who_is_not_listed_is_told_so_on_either_socket() {
    let Some((daemon, socket)) = daemon(LISTED, "[admin]\nsocket_mode = \"0666\"\nallow_uids = [\"0\"]") else {
        return;
    };
    assert!(GATEWAY.greets(&socket, None).is_ok(), "by user");
    assert!(MEMBER.greets(&socket, None).is_ok(), "by a supplementary group");
    let own_group = Someone { uid: 61_004, gid: 61_010, groups: &[] };
    assert!(own_group.greets(&socket, None).is_ok(), "by its own group");
    assert!(matches!(STRANGER.greets(&socket, None), Err(Kind::NotPermitted)));
    for someone in [GATEWAY, MEMBER, STRANGER] {
        assert!(matches!(someone.greets(&admin_path(&socket), None), Err(Kind::NotPermitted)), "routing is not admin");
    }
    assert_eq!(
        (daemon.counter("connections_not_permitted"), daemon.counter("admin_connections_not_permitted")),
        (1, 3)
    );
    for _ in 0..50 {
        assert!(matches!(STRANGER.greets(&socket, None), Err(Kind::NotPermitted)));
    }
    let lines = daemon.process.log().lines().filter(|line| line.contains("uid=61003")).count();
    // A quota each for the acceptor and for administration.
    assert!(lines <= 2 * LOG_LINES_PER_WINDOW_MAX as usize, "{lines} lines for one who knocks again and again");
    daemon.assert_recovered();
}

#[test]
fn the_lists_are_read_again_and_a_list_that_is_wrong_changes_nothing() {
    let Some((daemon, socket)) = daemon(OPEN, "") else { return };
    let listed = |extra: &str| daemon.reconfigure(&format!("{OPEN}\nallow_uids = [\"root\"{extra}]"), "");
    let is_refused = || matches!(GATEWAY.greets(&socket, None), Err(Kind::NotPermitted));
    let mut early = GATEWAY.greets(&socket, None).expect("no user is listed yet");
    listed("");
    until("the list holds", is_refused);
    early.assert_served();
    let refused = daemon.counter("config_reloads_refused");
    listed(", \"no such user\"");
    until("the configuration is refused", || daemon.counter("config_reloads_refused") > refused);
    assert!(is_refused());
    listed(", \"61001\"");
    until("the list holds", || GATEWAY.greets(&socket, None).is_ok());
    drop(early);
    daemon.assert_recovered();
}

#[test]
fn a_name_that_nobody_has_is_found_by_check_and_at_the_start() {
    let folder = crate::kit::folder();
    let config = configure(folder.path(), "", "[admin]\nallow_gids = [\"no such group\"]");
    for flags in [&["serve", "--config", text(&config), "--check"][..], &["serve", "--config", text(&config)]] {
        let output = run(flags);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains("admin.allow_gids") && said.contains("no such group"), "{said}");
    }
}

#[test]
fn a_token_is_worth_nothing_to_another_user() {
    let Some((daemon, socket)) = daemon(OPEN, "") else { return };
    let token = Some(SessionToken { hi: 5, lo: 6 });
    let mut owner = GATEWAY.greets(&socket, token).expect("hello");
    assert!(matches!(STRANGER.greets(&socket, token), Err(Kind::NotPermitted)));
    assert!(matches!(MEMBER.greets(&socket, token), Err(Kind::NotPermitted)));
    assert!(GATEWAY.greets(&socket, token).is_ok(), "the same user's other connections");
    owner.assert_served();
    drop(owner);
    daemon.assert_recovered();
}
