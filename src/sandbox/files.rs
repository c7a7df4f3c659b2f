//! Rules of Landlock: the files that a process, and each kind of its threads, may open.
//!
//! A rule is about a file or a folder as it was at the start, whatever its name becomes. So a file that is replaced by
//! renaming another one over it can be opened only if its folder is granted.

use std::path::{Component, Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, LandlockStatus, NetPort,
    PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _,
    RulesetError, RulesetStatus, Scope,
};

use super::kinds::Place;
use crate::error::{Error, Kind, Result};

/// The newest version of Landlock whose rights are used: 6 is in Linux 6.12. On an older one the rights that it lacks
/// are not restricted.
const NEWEST: ABI = ABI::V6;

/// Files of the C library's resolver.
const RESOLVER_FILES: [&str; 6] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services"];

/// A file or folder that threads may use, and for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// What it is to the program, which decides which kinds of threads get it.
    pub place: Place,
    /// The file or folder.
    pub path: PathBuf,
}

impl Grant {
    /// Grants `path` as `place`.
    #[must_use]
    pub fn new(place: Place, path: impl Into<PathBuf>) -> Self {
        Self { place, path: path.into() }
    }

    /// Grants the files of the C library's resolver.
    #[must_use]
    pub fn resolver() -> Vec<Self> {
        RESOLVER_FILES.iter().flat_map(|file| Self::replaceable(Place::Resolver, Path::new(file))).collect()
    }

    /// Grants the folder of a file.
    #[must_use]
    pub fn folder_of(place: Place, file: &Path) -> Option<Self> {
        Some(Self::new(place, std::path::absolute(file).ok()?.parent()?))
    }

    /// Grants a file that an operator may replace by renaming another one over it: its folder, and the folder of the
    /// file that it is a link to. A folder at the root of the file system, such as `/etc`, holds too much: of it only
    /// the file itself is granted.
    #[must_use]
    pub fn replaceable(place: Place, file: &Path) -> Vec<Self> {
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let linked = std::fs::canonicalize(&file).ok().filter(|linked| *linked != file);
        let of = |file: &PathBuf| match file.parent() {
            Some(folder) if !is_shared(folder) => Self::new(place, folder),
            _ => Self::new(place, file),
        };
        std::iter::once(&file).chain(&linked).map(of).collect()
    }
}

/// Whether a folder is at the root of the file system, where folders hold the files of many programs.
fn is_shared(folder: &Path) -> bool {
    folder.components().filter(|part| matches!(part, Component::Normal(_))).count() <= 1
}

/// What the rules of a process or of a kind of threads permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permits<'a> {
    pub(super) places: &'a [Place],
    /// TCP ports that may be bound.
    pub(super) bind_ports: &'a [u16],
    /// Whether TCP connections may be made, to any port.
    pub(super) connects: bool,
    /// Whether Unix sockets in the abstract namespace may be connected to.
    pub(super) abstract_sockets: bool,
}

fn rights(place: Place) -> BitFlags<AccessFs> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    match place {
        Place::Config | Place::Workers | Place::Resolver | Place::Accounts | Place::Process | Place::Keys => read,
        Place::Snapshots | Place::Journal => {
            read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::MakeReg | AccessFs::RemoveFile
        }
        Place::Sockets => AccessFs::RemoveFile.into(),
        Place::NewSockets => AccessFs::RemoveFile | AccessFs::MakeSock,
    }
}

/// Makes rules.
///
/// # Errors
/// [`Kind::System`] if the kernel refuses them. A file that is not there is left out.
pub(super) fn rules(grants: &[Grant], permits: Permits<'_>) -> Result<RulesetCreated> {
    made(grants, permits).map_err(|error| {
        Error::new(Kind::System, "the kernel refuses the rules for files", "see the cause").caused_by(error)
    })
}

fn made(grants: &[Grant], permits: Permits<'_>) -> std::result::Result<RulesetCreated, RulesetError> {
    let mut handled: BitFlags<AccessNet> = AccessNet::BindTcp.into();
    if !permits.connects {
        handled |= AccessNet::ConnectTcp;
    }
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(handled)?
        .scope(Scope::Signal)?;
    if !permits.abstract_sockets {
        ruleset = ruleset.scope(Scope::AbstractUnixSocket)?;
    }
    let mut created = ruleset.create()?;
    for grant in grants.iter().filter(|grant| permits.places.contains(&grant.place)) {
        let Ok(file) = PathFd::new(&grant.path) else {
            tracing::debug!(path = %grant.path.display(), "the file is not there and not granted");
            continue;
        };
        let mut rights = rights(grant.place);
        if !grant.path.is_dir() {
            rights &= AccessFs::from_file(NEWEST);
        }
        if !rights.is_empty() {
            created = created.add_rule(PathBeneath::new(file, rights))?;
        }
    }
    for port in permits.bind_ports {
        created = created.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
    }
    Ok(created)
}

/// Restricts this thread and those that it will start. Answers with the version of Landlock in use; 0 = there is none.
///
/// # Errors
/// [`Kind::System`] if the kernel refuses.
pub(super) fn restrict(rules: &RulesetCreated) -> Result<u8> {
    let refused = || Error::new(Kind::System, "the kernel does not apply the rules for files", "see the cause");
    let rules = rules.try_clone().map_err(|error| refused().caused_by(error))?;
    let RestrictionStatus { ruleset, landlock, .. } =
        rules.restrict_self().map_err(|error| refused().caused_by(error))?;
    Ok(match landlock {
        LandlockStatus::Available { effective_abi, .. } if ruleset != RulesetStatus::NotEnforced => effective_abi as u8,
        _ => 0,
    })
}
