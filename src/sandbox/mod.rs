//! What the threads of a process may ask of the kernel, once it has started.
//!
//! Bytes of engines, gateways and web clients reach most threads. A mistake in their parsers must not give an attacker
//! a shell, another program's memory or the files of the machine. So a process gives up what it does not need:
//!
//! 1. [`start`], on the main thread before it starts others: privileges that a program could gain by `execve`,
//!    capabilities, all files but those granted ([Landlock]), and all system calls that no thread of the program needs.
//! 2. [`enter`], on each thread: all files and system calls that this kind of thread does not need.
//!
//! Both only ever take away. A thread starts with what the thread that starts it has, so the list of a kind includes
//! the lists of the kinds that its threads start ([`ThreadKind::children`](kinds)).
//!
//! A refused call fails with `EPERM`; it does not end the process. No exploit gets further by that, and a call that a
//! list lacks by mistake, on another kernel or C library, costs one function and not the daemon. [`refused`] counts the
//! calls by name, and [`RefusalLog`] logs them.
//!
//! Threads share their memory. An attacker who can run code on one thread can make another one call what its own list
//! permits; the list of the whole process still holds then.
//!
//! | file | subject |
//! |---|---|
//! | `kinds` | the kinds of threads, their system calls and files |
//! | `filter` | lists as seccomp filters |
//! | `files` | files as Landlock rules |
//! | `refusals` | counts refused calls |
//!
//! [Landlock]: https://docs.kernel.org/userspace-api/landlock.html

mod files;
mod filter;
mod kinds;
mod refusals;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use landlock::RulesetCreated;
use rustix::thread::{CapabilitySet, CapabilitySets, remove_capability_from_bounding_set};
use seccompiler::BpfProgram;

use crate::error::{Error, Kind, Result};
pub use files::Grant;
use files::Permits;
use filter::Refusal;
pub use kinds::{Place, Program, ThreadKind};
pub use refusals::{Refused, refused};

/// The exit code of a process that must be confined and has a thread that is not: a system call failed.
const UNCONFINED_EXIT: i32 = 71;

/// How much a process gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Nothing.
    #[default]
    Off,
    /// Nothing, but the kernel's audit log names every system call that `on` would refuse.
    Report,
    /// All that the kernel can take. The log names what it cannot.
    On,
    /// All; where the kernel cannot take it, the process does not start.
    Required,
}

impl Mode {
    /// The names used in the configuration, in the order of [`Mode::ALL`].
    pub const NAMES: [&'static str; 4] = ["off", "report", "on", "required"];
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Off, Self::Report, Self::On, Self::Required];

    /// The mode's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// What a process keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How much it gives up.
    pub mode: Mode,
    /// Whose kinds of threads it has.
    pub program: Program,
    /// The files that it needs from now on.
    pub grants: Vec<Grant>,
    /// The TCP ports that it will bind.
    pub bind_ports: Vec<u16>,
}

/// What is in force in a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// The configured mode.
    pub mode: Mode,
    /// Whether `execve` can grant no privileges.
    pub no_new_privileges: bool,
    /// Whether the capabilities are dropped.
    pub capabilities_dropped: bool,
    /// Whether calls that are in no list are refused.
    pub filters: bool,
    /// The version of Landlock that restricts files; 0 = none does.
    pub landlock: u8,
}

/// What the threads of this process enter.
struct Confinement {
    in_force: InForce,
    kinds: HashMap<ThreadKind, Confined>,
    /// Threads that could not be confined.
    unconfined: AtomicU64,
    /// Files that were granted without their folders.
    files: Vec<GrantedFile>,
    /// Keeps the kernel from forgetting the folder that a rule is about: it makes these folders on demand.
    _process: Option<File>,
}

/// What a thread of one kind enters.
struct Confined {
    filter: BpfProgram,
    /// `None` = in mode `report`, or without Landlock.
    rules: Option<RulesetCreated>,
}

/// A file that was granted without its folder: another file in its place is not granted.
struct GrantedFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

/// `None` = there is no sandbox, or it was not started yet.
static CONFINEMENT: OnceLock<Confinement> = OnceLock::new();

/// Confines this thread and all that it will start. A process calls it once, on its main thread, before it starts
/// others and after it has bound its sockets.
///
/// # Errors
/// [`Kind::System`] in mode `required`, if the kernel lacks a part.
pub fn start(plan: &Plan) -> Result<()> {
    if plan.mode == Mode::Off {
        return Ok(());
    }
    let confinement = Confinement::start(plan)?;
    let InForce { mode, no_new_privileges, capabilities_dropped, filters, landlock } = confinement.in_force.clone();
    tracing::info!(
        mode = mode.name(),
        no_new_privileges,
        capabilities_dropped,
        filters,
        landlock,
        "the sandbox is in force"
    );
    // A second call in one process, as tests may make, leaves the first sandbox as it is.
    let _ = CONFINEMENT.set(confinement);
    Ok(())
}

/// Forbids this thread, and the programs that it starts, what no program of kvrouted needs: other processes' memory,
/// the kernel's own, other namespaces. For the thread of a gateway that starts the daemon, which confines itself
/// further.
///
/// # Errors
/// [`Kind::System`] in mode `required`, if the kernel takes no filter.
pub fn forbid_to_programs(mode: Mode) -> Result<()> {
    let refusal = match mode {
        Mode::Off => return Ok(()),
        Mode::Report => Refusal::LoggedByKernel,
        Mode::On | Mode::Required => Refusal::Counted,
    };
    let forbidden = filter::of_forbidden_calls(kinds::FORBIDDEN_TO_PROGRAMS, refusal)?;
    seccompiler::apply_filter(&forbidden).map_err(not_installed).or_else(|error| lacking(mode, "filters", error))
}

/// Confines this thread to what its kind needs. Without a sandbox it does nothing.
pub fn enter(kind: ThreadKind) {
    let Some(confinement) = CONFINEMENT.get() else { return };
    refusals::count_as(kind);
    let Err(error) = confinement.enter(kind) else { return };
    // Relaxed: a count orders nothing.
    confinement.unconfined.fetch_add(1, Ordering::Relaxed);
    tracing::error!(thread = kind.name(), %error, "the thread is confined as the process is, and no further");
    if confinement.in_force.mode == Mode::Required {
        std::process::exit(UNCONFINED_EXIT);
    }
}

/// Counts the calls of this thread as those of `kind`: for threads that start with the list of their kind, from the
/// thread that starts them.
pub fn count_as(kind: ThreadKind) {
    refusals::count_as(kind);
}

/// What is in force in this process; `None` = there is no sandbox.
#[must_use]
pub fn in_force() -> Option<&'static InForce> {
    CONFINEMENT.get().map(|confinement| &confinement.in_force)
}

/// The names under which [`refused`] counts threads.
pub fn thread_names() -> impl Iterator<Item = &'static str> {
    ThreadKind::ALL.iter().map(|kind| kind.name()).chain([refusals::OTHER])
}

/// Threads that could not be confined as their kind should be.
#[must_use]
pub fn threads_unconfined() -> u64 {
    // Relaxed: a count orders nothing.
    CONFINEMENT.get().map_or(0, |confinement| confinement.unconfined.load(Ordering::Relaxed))
}

/// Files that were granted and have been replaced since, so that this process can no longer open them.
#[must_use]
pub fn files_replaced() -> Vec<&'static Path> {
    let is_other = |file: &&GrantedFile| identity(&file.path).is_some_and(|now| now != file.identity);
    let files = CONFINEMENT.get().filter(|confinement| confinement.in_force.landlock > 0);
    files.into_iter().flat_map(|confinement| &confinement.files).filter(is_other).map(|file| &*file.path).collect()
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl InForce {
    /// Each part with its name: 1 = in force, 0 = not; of `landlock`, its version.
    #[must_use]
    pub fn figures(&self) -> [(&'static str, u8); 4] {
        [
            ("no_new_privileges", self.no_new_privileges.into()),
            ("capabilities_dropped", self.capabilities_dropped.into()),
            ("filters", self.filters.into()),
            ("landlock", self.landlock),
        ]
    }

    /// Whether every part is in force that the mode asks for.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        let refuses = !matches!(self.mode, Mode::Off | Mode::Report);
        !refuses || (self.no_new_privileges && self.capabilities_dropped && self.filters && self.landlock > 0)
    }
}

impl Confinement {
    fn start(plan: &Plan) -> Result<Self> {
        let refuses = plan.mode != Mode::Report;
        let refusal = if refuses { Refusal::Counted } else { Refusal::LoggedByKernel };
        let lacking = |step, error| lacking(plan.mode, step, error);
        let mut in_force = InForce { mode: plan.mode, ..InForce::default() };
        match rustix::thread::set_no_new_privs(true) {
            Ok(()) => in_force.no_new_privileges = true,
            Err(cause) => lacking("no_new_privs", system("no_new_privs cannot be set", cause.into()))?,
        }
        if refuses {
            match drop_capabilities(plan.needs_low_ports()) {
                Ok(()) => in_force.capabilities_dropped = true,
                Err(cause) => lacking("capabilities", system("capabilities cannot be dropped", cause))?,
            }
        }
        let mut kinds = match plan.kinds(refusal) {
            Ok(kinds) => kinds,
            Err(error) => lacking("filters", error).map(|()| HashMap::new())?,
        };
        if refuses {
            in_force.landlock = files::restrict(&plan.rules(plan.program.permits(&plan.bind_ports))?)?;
            if in_force.landlock == 0 {
                let remedy = "use Linux 5.13 or newer with Landlock among its `lsm=`";
                lacking("files", Error::new(Kind::System, "the kernel has no Landlock", remedy))?;
                kinds.values_mut().for_each(|confined| confined.rules = None);
            }
        }
        match install(plan.program, refusal) {
            Ok(()) => in_force.filters = refuses,
            Err(error) => {
                lacking("filters", error)?;
                kinds.clear();
            }
        }
        let file = |grant: &Grant| Some(GrantedFile { path: grant.path.clone(), identity: identity(&grant.path)? });
        let files = plan.grants.iter().filter(|grant| !grant.path.is_dir()).filter_map(file).collect();
        Ok(Self { in_force, kinds, unconfined: AtomicU64::new(0), files, _process: File::open("/proc/self").ok() })
    }

    fn enter(&self, kind: ThreadKind) -> Result<()> {
        // A program's threads are of its own kinds; without filters there are none.
        let Some(confined) = self.kinds.get(&kind) else { return Ok(()) };
        if let Some(rules) = &confined.rules {
            files::restrict(rules)?;
        }
        seccompiler::apply_filter(&confined.filter).map_err(not_installed)
    }
}

impl Plan {
    /// Whether it binds a port that only a privileged process may bind.
    fn needs_low_ports(&self) -> bool {
        self.bind_ports.iter().any(|port| (1..1024).contains(port))
    }

    /// What the threads of each kind enter.
    fn kinds(&self, refusal: Refusal) -> Result<HashMap<ThreadKind, Confined>> {
        let confined = |kind: &ThreadKind| {
            let restricts = refusal == Refusal::Counted;
            let rules = restricts.then(|| self.rules(kind.permits())).transpose()?;
            Ok((*kind, Confined { filter: filter::of_kind(*kind, refusal)?, rules }))
        };
        self.program.kinds().iter().map(confined).collect()
    }

    fn rules(&self, permits: Permits<'_>) -> Result<RulesetCreated> {
        files::rules(&self.grants, permits)
    }
}

/// Installs the filters of the whole process.
fn install(program: Program, refusal: Refusal) -> Result<()> {
    refusals::listen()?;
    seccompiler::apply_filter(&filter::of_absent_calls()?).map_err(not_installed)?;
    seccompiler::apply_filter(&filter::of_calls(&program.calls(), refusal)?).map_err(not_installed)
}

fn not_installed(cause: seccompiler::Error) -> Error {
    let remedy = "check that the kernel has CONFIG_SECCOMP_FILTER and that the container permits seccomp";
    Error::new(Kind::System, "the kernel takes no filter of system calls", remedy).caused_by(cause)
}

fn system(what: &str, cause: std::io::Error) -> Error {
    Error::new(Kind::System, what, "check what the kernel and the container permit").caused_by(cause)
}

/// A step that could not be taken: an error only where the mode says so, otherwise a line of the log.
fn lacking(mode: Mode, step: &'static str, error: Error) -> Result<()> {
    if mode == Mode::Required {
        return Err(error.or("set sandbox.mode to \"on\" to go on without it"));
    }
    tracing::warn!(step, %error, "the sandbox lacks a part, and the process goes on without it");
    Ok(())
}

/// Drops all capabilities of this thread, for good; that to bind low ports only if they are all bound.
fn drop_capabilities(keeps_low_ports: bool) -> std::io::Result<()> {
    let kept = if keeps_low_ports { CapabilitySet::NET_BIND_SERVICE } else { CapabilitySet::empty() };
    let held = rustix::thread::capabilities(None)?;
    rustix::thread::clear_ambient_capability_set()?;
    // Only a privileged process can shrink this set, and only a program that it starts could profit from it.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for number in (0..64).filter(|number| !kept.contains(CapabilitySet::from_bits_retain(1 << number))) {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            match remove_capability_from_bounding_set(capability) {
                // The kernel knows no more.
                Err(rustix::io::Errno::INVAL) => break,
                done => done?,
            }
        }
    }
    let sets = CapabilitySets {
        effective: held.effective & kept,
        permitted: held.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Logs refused calls, each once and then whenever their number has doubled.
#[derive(Debug, Default)]
pub struct RefusalLog(HashMap<(&'static str, &'static str), u64>);

impl RefusalLog {
    /// Logs what was refused since the last call.
    pub fn note(&mut self) {
        if in_force().is_none() {
            return;
        }
        for Refused { thread, call, times } in refused() {
            let logged = self.0.entry((thread, call)).or_default();
            if times >= (*logged * 2).max(1) {
                *logged = times;
                tracing::error!(thread, call, times, "the sandbox refused a system call");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_names() {
        for (mode, name) in Mode::ALL.iter().zip(Mode::NAMES) {
            assert_eq!(mode.name(), name);
        }
    }

    #[test]
    fn what_is_lacking_ends_a_start_only_in_mode_required_which_names_the_other_mode() {
        for mode in Mode::ALL {
            let error = system("capabilities cannot be dropped", std::io::Error::other("refused"));
            assert!(!error.remedy().contains("sandbox.mode"), "{mode:?}: a log names no mode that may be set already");
            let outcome = lacking(mode, "capabilities", error);
            assert_eq!(outcome.is_err(), mode == Mode::Required, "{mode:?}");
            if let Err(error) = outcome {
                assert!(error.remedy().ends_with(", or set sandbox.mode to \"on\" to go on without it"), "{error}");
            }
        }
    }

    #[test]
    fn without_a_sandbox_a_thread_enters_nothing() {
        let plan = Plan { mode: Mode::Off, program: Program::Daemon, grants: Vec::new(), bind_ports: Vec::new() };
        start(&plan).expect("nothing to do");
        enter(ThreadKind::Serving);
        assert_eq!((in_force(), threads_unconfined()), (None, 0));
    }
}
