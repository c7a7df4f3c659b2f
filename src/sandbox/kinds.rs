//! The kinds of threads, the system calls that each of them needs, and its files.
//!
//! The lists were made by tracing the whole suite of tests, on Linux 6.18 with glibc 2.36, and completed with what
//! other C libraries and older kernels call in the same places. `tests/sandbox` runs each kind, and a daemon with all.

use std::collections::BTreeSet;

use super::files::Permits;

/// A system call of a list, if its arguments pass the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Call {
    pub(super) name: &'static str,
    /// By the argument's place, from 0. All of them have to hold.
    pub(super) checks: &'static [(u8, Check)],
}

/// A check of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Check {
    /// It is this number.
    Is(u64),
    /// The bits of `mask` are `value`.
    Masked {
        /// The bits that are compared.
        mask: u64,
        /// What they have to be.
        value: u64,
    },
    /// It is a null pointer.
    IsNull,
    /// It is the id of this process.
    IsOwnProcess,
}

impl Call {
    pub(super) const fn any(name: &'static str) -> Self {
        Self { name, checks: &[] }
    }

    pub(super) const fn checked(name: &'static str, checks: &'static [(u8, Check)]) -> Self {
        Self { name, checks }
    }
}

/// Makes a list of names, and of calls with checks after a semicolon.
macro_rules! calls {
    ($($name:literal),* $(,)?) => { &[$(Call::any($name)),*] };
    ($($name:literal),*; $($checked:expr),* $(,)?) => { &[$(Call::any($name),)* $($checked),*] };
}

const fn is(call: &'static str, checks: &'static [(u8, Check)]) -> Call {
    Call::checked(call, checks)
}

const fn clear(mask: i32) -> Check {
    Check::Masked { mask: mask as u64, value: 0 }
}

const fn flag(value: i32) -> Check {
    Check::Is(value as u32 as u64)
}

/// A request of `ioctl`. C libraries give its number different types.
const fn request(number: libc::Ioctl) -> Check {
    Check::Is(number as u32 as u64)
}

/// Flags of `clone` that make a namespace.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWCGROUP;
/// Flags of `open` that change a file or make one.
const WRITES: i32 = libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
/// `prctl(PR_SET_VMA)` names a mapping; libc lacks it.
const PR_SET_VMA: i32 = 0x5356_4d41;

/// Memory, clocks, locks, the log (which asks by `poll` whether it may write), signals, and the end of a thread.
const EVERY_THREAD: &[Call] = calls![
    "access", "brk", "clock_gettime", "clock_nanosleep", "close", "exit", "exit_group", "futex", "getcpu", "getpid",
    "getrandom", "gettid", "gettimeofday", "madvise", "membarrier", "mremap", "munmap", "nanosleep", "poll", "ppoll",
    "read", "restart_syscall", "rseq", "rt_sigprocmask", "rt_sigreturn", "sched_getaffinity", "sched_yield",
    "set_robust_list", "sigaltstack", "write", "writev";
    is("mmap", &[(2, clear(libc::PROT_EXEC))]),
    is("mprotect", &[(2, clear(libc::PROT_EXEC))]),
    is("prctl", &[(0, flag(libc::PR_SET_NAME))]),
    is("prctl", &[(0, flag(PR_SET_VMA))]),
    is("tgkill", &[(0, Check::IsOwnProcess)]),
    // A build with debug assertions checks that a descriptor is open before it closes it.
    is("fcntl", &[(1, flag(libc::F_GETFD))]),
];

/// Starts threads. `clone3` hides its flags from filters; `filter` answers it as an older kernel does.
const THREADS: &[Call] = calls![
    "clone3";
    is("clone", &[(0, Check::Masked { mask: (libc::CLONE_THREAD | NAMESPACES) as u64, value: libc::CLONE_THREAD as u64 })]),
];

/// Confines a thread further.
const ENTERING: &[Call] = calls![
    "landlock_restrict_self", "seccomp";
    is("fcntl", &[(1, flag(libc::F_DUPFD_CLOEXEC))]),
    is("prctl", &[(0, flag(libc::PR_SET_NO_NEW_PRIVS))]),
    is("prctl", &[(0, flag(libc::PR_GET_NO_NEW_PRIVS))]),
];

/// Waits for descriptors.
const EVENTS: &[Call] = calls!["epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd2"];

/// A runtime of its own, made on the thread.
const RUNTIME: &[Call] = calls!["epoll_create1", "socketpair"; is("fcntl", &[(1, flag(libc::F_DUPFD_CLOEXEC))])];

/// Connected sockets.
const STREAMS: &[Call] = calls![
    "getpeername", "getsockname", "getsockopt", "readv", "recvfrom", "recvmsg", "sendmsg", "sendto", "setsockopt",
    "shutdown";
    is("fcntl", &[(1, flag(libc::F_DUPFD_CLOEXEC))]),
    is("fcntl", &[(1, flag(libc::F_SETFD))]),
    is("fcntl", &[(1, flag(libc::F_GETFL))]),
    is("fcntl", &[(1, flag(libc::F_SETFL))]),
    is("ioctl", &[(1, request(libc::FIONBIO))]),
];

/// Listening sockets.
const LISTENERS: &[Call] = calls!["accept4"];

/// Pairs of connected sockets.
const PAIRS: &[Call] = calls![; is("socketpair", &[(0, flag(libc::AF_UNIX))])];

/// Connections that the thread makes itself, to engines.
const CONNECTIONS: &[Call] = calls![
    "connect", "pipe2";
    is("socket", &[(0, flag(libc::AF_UNIX))]),
    is("socket", &[(0, flag(libc::AF_INET)), (1, STREAM)]),
    is("socket", &[(0, flag(libc::AF_INET6)), (1, STREAM)]),
];

/// `SOCK_STREAM`, whatever flags are beside it.
const STREAM: Check = Check::Masked { mask: 0xf, value: libc::SOCK_STREAM as u64 };

/// Files that are only read.
const READING: &[Call] = calls![
    "fstat", "getdents64", "lseek", "lstat", "newfstatat", "pread64", "readlink", "readlinkat", "stat", "statx";
    is("openat", &[(2, clear(WRITES))]),
    is("open", &[(1, clear(WRITES))]),
];

/// Files that are made, written, renamed and removed.
const WRITING: &[Call] = calls![
    "fdatasync",
    "flock",
    "fsync",
    "ftruncate",
    "open",
    "openat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
];

/// A file of figures that is open.
const MEASURING: &[Call] = calls!["pread64"];

/// Files that are removed.
const REMOVING: &[Call] = calls!["fsync", "unlink", "unlinkat"];

/// The resolver of the C library.
const RESOLVER: &[Call] = calls![
    "access", "bind", "connect", "faccessat", "getsockname", "ioctl", "recvfrom", "recvmsg", "sendmmsg",
    "sendmsg", "sendto", "setsockopt", "uname";
    is("fcntl", &[(1, flag(libc::F_GETFL))]),
    is("fcntl", &[(1, flag(libc::F_SETFL))]),
    is("socket", &[(0, flag(libc::AF_UNIX))]),
    is("socket", &[(0, flag(libc::AF_INET))]),
    is("socket", &[(0, flag(libc::AF_INET6))]),
    // `filter` answers it as a kernel without netlink does.
    is("socket", &[(0, flag(libc::AF_NETLINK))]),
];

/// The memory of shm lanes.
const LANES: &[Call] = calls![
    "fallocate", "fstat", "ftruncate", "memfd_create", "openat", "statx", "newfstatat";
    is("socketpair", &[(0, flag(libc::AF_UNIX))]),
    is("fcntl", &[(1, flag(libc::F_ADD_SEALS))]),
    is("fcntl", &[(1, flag(libc::F_GET_SEALS))]),
    is("fcntl", &[(1, flag(libc::F_SETLEASE))]),
    // F_SETSIG, which libc lacks.
    is("fcntl", &[(1, Check::Is(10))]),
];

/// Memory files for another daemon, and the service manager's socket.
const PASSING: &[Call] = calls![
    "connect", "fstat", "ftruncate", "geteuid", "lseek", "memfd_create", "newfstatat", "statx";
    is("socket", &[(0, flag(libc::AF_UNIX))]),
];

/// A ring that is there already.
const RING: &[Call] = calls!["io_uring_enter"];

/// What a part of the file system is to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The configuration file, and that of other routers. Read.
    Config,
    /// Files of workers, or of endpoints. Read.
    Workers,
    /// The resolver's configuration. Read.
    Resolver,
    /// Names of users and groups. Read.
    Accounts,
    /// What the kernel tells of this process. Read.
    Process,
    /// Certificates, keys and tokenizers. Read.
    Keys,
    /// Snapshots. Read, written and removed.
    Snapshots,
    /// The journal. Read, written and removed.
    Journal,
    /// The folders of sockets that are bound. Files are removed from them.
    Sockets,
    /// The folders of sockets that will be bound. Sockets are made in them and removed.
    NewSockets,
}

impl Place {
    const ALL: [Self; 10] = [
        Self::Config,
        Self::Workers,
        Self::Resolver,
        Self::Accounts,
        Self::Process,
        Self::Keys,
        Self::Snapshots,
        Self::Journal,
        Self::Sockets,
        Self::NewSockets,
    ];
}

/// The programs that confine themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `kvrouted serve`.
    Daemon,
    /// `kvrouted relay`.
    Relay,
    /// `kvrouted connect`.
    Connect,
    /// `kvrouted-gateway`, as a proxy and as an endpoint picker.
    Gateway,
}

/// The kinds of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// The main thread of the daemon.
    Control,
    /// Answers gateways, on epoll.
    Serving,
    /// Answers gateways, on io_uring. What its ring does passes no filter; Landlock's rules hold for it.
    ServingUring,
    /// Receives the events of engines.
    Ingest,
    /// Receives the loads of engines.
    Loads,
    /// Exchanges load with other routers.
    Routers,
    /// Hands the daemon's work to another one, or takes over from one.
    Takeover,
    /// Resolves the host names of endpoints.
    Names,
    /// Asks engines by HTTP, and for snapshots of their blocks.
    Asking,
    /// Reads files of workers and the configuration, checks and removes snapshots, and diagnoses, beside the control
    /// thread.
    Files,
    /// Answers HTTP callers.
    HttpPort,
    /// Carries the connections of other hosts.
    RemotePort,
    /// Serves the metrics page.
    MetricsPage,
    /// Writes snapshots.
    Snapshots,
    /// Feeds snapshots to an ingest thread.
    SnapshotLoads,
    /// Writes the journal.
    Journal,
    /// Sends spans to a collector.
    Traces,
    /// Predicts the caches of workers without events.
    Predictor,
    /// Touches memory before an ingest thread needs it.
    IndexPages,
    /// Compares the memory of the process with its budget.
    Memory,
    /// Watches the other threads.
    Watchdog,
    /// The main thread of a relay.
    RelayControl,
    /// Sends a relay's events, and answers its requests.
    RelayPort,
    /// Stores a relay's events at a NATS server.
    RelayForward,
    /// Any thread of `kvrouted connect`, besides that of its metrics page.
    Connect,
    /// Any thread of a gateway.
    Gateway,
}

use ThreadKind as T;

impl ThreadKind {
    /// All kinds, in the order of their declaration.
    pub const ALL: &'static [Self] = &[
        T::Control,
        T::Serving,
        T::ServingUring,
        T::Ingest,
        T::Loads,
        T::Routers,
        T::Takeover,
        T::Names,
        T::Asking,
        T::Files,
        T::HttpPort,
        T::RemotePort,
        T::MetricsPage,
        T::Snapshots,
        T::SnapshotLoads,
        T::Journal,
        T::Traces,
        T::Predictor,
        T::IndexPages,
        T::Memory,
        T::Watchdog,
        T::RelayControl,
        T::RelayPort,
        T::RelayForward,
        T::Connect,
        T::Gateway,
    ];

    /// The name in the log, in metrics and in the documents.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            T::Control => "control",
            T::Serving => "serving",
            T::ServingUring => "serving_uring",
            T::Ingest => "ingest",
            T::Loads => "loads",
            T::Routers => "routers",
            T::Takeover => "takeover",
            T::Names => "names",
            T::Asking => "asking",
            T::Files => "files",
            T::HttpPort => "http",
            T::RemotePort => "remote",
            T::MetricsPage => "metrics",
            T::Snapshots => "snapshots",
            T::SnapshotLoads => "snapshot_loads",
            T::Journal => "journal",
            T::Traces => "traces",
            T::Predictor => "predictor",
            T::IndexPages => "index_pages",
            T::Memory => "memory",
            T::Watchdog => "watchdog",
            T::RelayControl => "relay_control",
            T::RelayPort => "relay_port",
            T::RelayForward => "relay_forward",
            T::Connect => "connect",
            T::Gateway => "gateway",
        }
    }

    /// The lists of calls of the kind itself, beside those of every thread.
    const fn lists(self) -> &'static [&'static [Call]] {
        match self {
            T::Control => &[EVENTS, STREAMS, LISTENERS, READING, WRITING, THREADS, CONTROL],
            T::Serving => &[EVENTS, STREAMS, LANES, THREADS],
            T::ServingUring => &[EVENTS, STREAMS, LANES, THREADS, RING],
            // A thread that panics starts the next one.
            T::Ingest => &[EVENTS, STREAMS, CONNECTIONS, THREADS, INGEST],
            T::Loads => &[EVENTS, STREAMS, CONNECTIONS],
            T::Routers => &[EVENTS, STREAMS, LISTENERS, CONNECTIONS, REMOVING],
            T::Takeover => &[STREAMS, LISTENERS, PASSING, REMOVING],
            T::Names => &[READING, RESOLVER, THREADS],
            T::Asking => &[EVENTS, STREAMS, CONNECTIONS, READING, RESOLVER, THREADS, ASKING],
            T::Files => &[EVENTS, READING, REMOVING, THREADS, WATCHING],
            T::HttpPort => &[EVENTS, STREAMS, LISTENERS, THREADS],
            T::RemotePort => &[EVENTS, STREAMS, LISTENERS, PAIRS],
            T::MetricsPage => &[EVENTS, STREAMS, LISTENERS, THREADS],
            T::Snapshots | T::Journal => &[READING, WRITING],
            T::SnapshotLoads => &[READING],
            // Names are looked up on a thread of its own, so that the lookup has a time limit too.
            T::Traces => &[STREAMS, CONNECTIONS, READING, RESOLVER, THREADS],
            T::Memory => &[MEASURING],
            T::Predictor | T::IndexPages | T::Watchdog => &[],
            T::RelayControl => &[EVENTS, STREAMS, THREADS, WRITING, READING],
            T::RelayPort => &[EVENTS, STREAMS, LISTENERS, WRITING, READING],
            T::RelayForward => &[EVENTS, STREAMS, CONNECTIONS],
            T::Connect => {
                &[EVENTS, STREAMS, LISTENERS, CONNECTIONS, READING, REMOVING, RESOLVER, THREADS, FIRST_THREAD]
            }
            T::Gateway => {
                &[EVENTS, STREAMS, LISTENERS, CONNECTIONS, READING, WRITING, RESOLVER, THREADS, RUNTIME, GATEWAY]
            }
        }
    }

    /// The kinds that threads of this kind start once they have entered it.
    const fn children(self) -> &'static [Self] {
        match self {
            T::Control => &[T::Files, T::Asking, T::SnapshotLoads],
            _ => &[],
        }
    }

    /// The places whose files the kind needs, those of its children included.
    const fn places(self) -> &'static [Place] {
        match self {
            T::Control | T::Gateway => &Place::ALL,
            T::Names | T::Asking | T::Traces => &[Place::Resolver],
            T::Files => {
                &[Place::Config, Place::Keys, Place::Accounts, Place::Workers, Place::Process, Place::Snapshots]
            }
            T::Connect => &[Place::Resolver, Place::Keys, Place::Sockets],
            T::Snapshots | T::SnapshotLoads => &[Place::Snapshots],
            T::Journal => &[Place::Journal],
            T::Routers | T::Takeover | T::RelayControl | T::RelayPort => &[Place::Sockets],
            _ => &[],
        }
    }

    /// Whether it makes connections.
    const fn connects(self) -> bool {
        matches!(
            self,
            T::Control
                | T::Ingest
                | T::Loads
                | T::Routers
                | T::Takeover
                | T::Names
                | T::Asking
                | T::Traces
                | T::RelayForward
                | T::Connect
                | T::Gateway
        )
    }

    pub(super) const fn permits(self) -> Permits<'static> {
        let connects = self.connects();
        Permits { places: self.places(), bind_ports: &[], connects, abstract_sockets: connects }
    }

    /// All calls of the kind and of the threads that it starts.
    pub(super) fn calls_with_children(self) -> Vec<Call> {
        let mut calls: BTreeSet<Call> = EVERY_THREAD.iter().copied().collect();
        calls.extend(self.lists().iter().copied().flatten());
        for child in self.children() {
            calls.extend(child.calls_with_children());
            calls.extend(ENTERING);
        }
        calls.into_iter().collect()
    }
}

/// What the control thread needs of its own.
const CONTROL: &[Call] = calls![
    "flock";
    is("prlimit64", &[(2, Check::IsNull)]),
];

/// An event loop for each question.
const ASKING: &[Call] = calls!["epoll_create1"];

/// An event loop of its own, and pauses that end on time.
const INGEST: &[Call] = calls!["epoll_create1"; is("prctl", &[(0, flag(libc::PR_SET_TIMERSLACK))])];

/// Watches folders, on a thread of its own.
const WATCHING: &[Call] = calls![
    "epoll_create1", "inotify_add_watch", "inotify_init1", "inotify_rm_watch";
    is("fcntl", &[(1, flag(libc::F_DUPFD_CLOEXEC))]),
    is("ioctl", &[(1, request(libc::FIONREAD))]),
    is("prlimit64", &[(2, Check::IsNull)]),
];

/// What a gateway needs of its own.
const GATEWAY: &[Call] = calls![
    "listen", "mkdir", "mkdirat", "chmod", "fchmod", "fchmodat", "rt_sigaction", "rmdir";
    is("kill", &[]),
];

impl Program {
    /// The kinds of its threads.
    pub(super) const fn kinds(self) -> &'static [ThreadKind] {
        match self {
            Self::Daemon => &[
                T::Control,
                T::Serving,
                T::ServingUring,
                T::Ingest,
                T::Loads,
                T::Routers,
                T::Takeover,
                T::Names,
                T::Asking,
                T::Files,
                T::HttpPort,
                T::RemotePort,
                T::MetricsPage,
                T::Snapshots,
                T::SnapshotLoads,
                T::Journal,
                T::Traces,
                T::Predictor,
                T::IndexPages,
                T::Memory,
                T::Watchdog,
            ],
            Self::Relay => {
                &[T::RelayControl, T::RelayPort, T::RelayForward, T::Ingest, T::Names, T::MetricsPage, T::IndexPages]
            }
            Self::Connect => &[T::Connect, T::MetricsPage],
            Self::Gateway => &[T::Gateway],
        }
    }

    /// All calls of its threads, and those with which they enter their kinds.
    pub(super) fn calls(self) -> Vec<Call> {
        let mut calls: BTreeSet<Call> = [ENTERING, STARTING, FIRST_THREAD].into_iter().flatten().copied().collect();
        for kind in self.kinds() {
            calls.extend(kind.calls_with_children());
        }
        calls.into_iter().collect()
    }

    /// All files of its threads.
    pub(super) const fn permits(self, bind_ports: &[u16]) -> Permits<'_> {
        Permits { places: &Place::ALL, bind_ports, connects: true, abstract_sockets: true }
    }
}

/// What threads call until they enter their kinds.
const STARTING: &[Call] = calls![
    "epoll_create1",
    "io_uring_register",
    "io_uring_setup",
    "mkdir",
    "mkdirat",
    "sched_setaffinity",
    "socketpair",
];

/// With the first thread glibc handles its signal for threads.
const FIRST_THREAD: &[Call] = calls![; is("rt_sigaction", &[(0, Check::Is(33))])];

/// Calls that a thread that starts programs, and the programs, may not make.
pub(super) const FORBIDDEN_TO_PROGRAMS: &[&str] = &[
    "acct",
    "add_key",
    "bpf",
    "clock_settime",
    "delete_module",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "init_module",
    "ioperm",
    "iopl",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "personality",
    "pivot_root",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "umount2",
    "unshare",
    "userfaultfd",
];
