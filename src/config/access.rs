//! Who may connect to a socket.

/// Which users may connect to a socket, beside what the mode of its file says. With both lists empty that mode decides
/// alone; else a peer has to be named in one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// Users, each a number or a name.
    pub uids: Vec<String>,
    /// Groups, each a number or a name; a peer is in its own group and in its supplementary ones.
    pub gids: Vec<String>,
}

/// `[admin]`: who may administer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdminConfig {
    /// Permission bits of the admin socket.
    pub socket_mode: u32,
    /// Who may administer, beside what those bits say.
    pub access: AccessConfig,
}
