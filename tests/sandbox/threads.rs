//! Each kind of threads in a process of its own: the calls that an attacker would want are refused, and the calls that
//! the kind needs pass.

#![expect(unsafe_code, reason = "the refused calls have no safe function")]

use std::ffi::CStr;
use std::fs;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixListener;
use std::path::Path;

use kvrouted::sandbox::{self, Grant, Mode, Place, Plan, Program, ThreadKind};
use syscalls::{Errno, Sysno, syscall};

use crate::kit::{folder, test_of_this_binary, text};

/// Names the kind to the child process.
const KIND: &str = "KVROUTED_TEST_THREAD_KIND";
const FOLDER: &str = "KVROUTED_TEST_FOLDER";

/// A call with arguments that would succeed or do no harm, and its name in a fault.
type Attempt = (&'static str, Sysno, [usize; 6]);

const PAGE: usize = 4096;
/// `AT_FDCWD`, and other numbers below zero, as arguments.
const HERE: usize = libc::AT_FDCWD as usize;
const NONE: usize = usize::MAX;
const EXEC: usize = libc::PROT_EXEC as usize;
const ANONYMOUS: usize = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
const CHILD: usize = libc::SIGCHLD as usize;
const NEW_USER: usize = libc::CLONE_NEWUSER as usize;

/// What no thread of the daemon or of a relay needs. A filter refuses before the kernel looks at a pointer, so null does
/// for them.
fn forbidden() -> Vec<Attempt> {
    let own = std::process::id() as usize;
    vec![
        // Another program, another process.
        ("execve", Sysno::execve, [0; 6]),
        ("execveat", Sysno::execveat, [HERE, 0, 0, 0, 0, 0]),
        ("fork", Sysno::clone, [CHILD, 0, 0, 0, 0, 0]),
        ("clone into a user namespace", Sysno::clone, [NEW_USER | CHILD, 0, 0, 0, 0, 0]),
        ("unshare", Sysno::unshare, [NEW_USER, 0, 0, 0, 0, 0]),
        ("setns", Sysno::setns, [0; 6]),
        ("ptrace", Sysno::ptrace, [libc::PTRACE_ATTACH as usize, 1, 0, 0, 0, 0]),
        ("process_vm_readv", Sysno::process_vm_readv, [own, 0, 0, 0, 0, 0]),
        ("process_vm_writev", Sysno::process_vm_writev, [own, 0, 0, 0, 0, 0]),
        ("pidfd_open", Sysno::pidfd_open, [own, 0, 0, 0, 0, 0]),
        ("kill", Sysno::kill, [own, 0, 0, 0, 0, 0]),
        ("tgkill of another process", Sysno::tgkill, [1, 1, 0, 0, 0, 0]),
        // The kernel.
        ("mount", Sysno::mount, [0; 6]),
        ("umount2", Sysno::umount2, [0; 6]),
        ("pivot_root", Sysno::pivot_root, [0; 6]),
        ("chroot", Sysno::chroot, [0; 6]),
        ("kexec_load", Sysno::kexec_load, [0; 6]),
        ("init_module", Sysno::init_module, [0; 6]),
        ("bpf", Sysno::bpf, [0; 6]),
        ("perf_event_open", Sysno::perf_event_open, [0, 0, NONE, NONE, 0, 0]),
        ("userfaultfd", Sysno::userfaultfd, [1, 0, 0, 0, 0, 0]),
        ("io_uring_setup", Sysno::io_uring_setup, [1, 0, 0, 0, 0, 0]),
        ("keyctl", Sysno::keyctl, [0; 6]),
        ("personality", Sysno::personality, [0xffff_ffff, 0, 0, 0, 0, 0]),
        ("setuid", Sysno::setuid, [0; 6]),
        ("capset", Sysno::capset, [0; 6]),
        ("prctl of another option", Sysno::prctl, [libc::PR_SET_DUMPABLE as usize, 1, 0, 0, 0, 0]),
        ("rt_sigaction of SIGSYS", Sysno::rt_sigaction, [libc::SIGSYS as usize, 0, 0, 8, 0, 0]),
        // Code.
        ("mmap of code", Sysno::mmap, [0, PAGE, EXEC, ANONYMOUS, NONE, 0]),
        ("mprotect to code", Sysno::mprotect, [0, PAGE, libc::PROT_READ as usize | EXEC, 0, 0, 0]),
        ("pkey_mprotect", Sysno::pkey_mprotect, [0, PAGE, EXEC, 0, 0, 0]),
        // The network and other devices.
        ("socket of packets", Sysno::socket, [libc::AF_PACKET as usize, libc::SOCK_RAW as usize, 0, 0, 0, 0]),
        ("socket of VMs", Sysno::socket, [libc::AF_VSOCK as usize, libc::SOCK_STREAM as usize, 0, 0, 0, 0]),
        ("socket of crypto", Sysno::socket, [libc::AF_ALG as usize, libc::SOCK_SEQPACKET as usize, 0, 0, 0, 0]),
        ("listen", Sysno::listen, [0, 1, 0, 0, 0, 0]),
        // Files.
        ("open_by_handle_at", Sysno::open_by_handle_at, [HERE, 0, 0, 0, 0, 0]),
        ("chmod", Sysno::fchmodat, [HERE, 0, 0o777, 0, 0, 0]),
        ("chown", Sysno::fchownat, [HERE, 0, 0, 0, 0, 0]),
        ("link", Sysno::linkat, [HERE, 0, HERE, 0, 0, 0]),
        ("mknod", Sysno::mknodat, [HERE, 0, libc::S_IFCHR as usize, 0, 0, 0]),
    ]
}

/// Makes a call. A process that comes of it ends at once.
fn call(number: Sysno, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the callers pass no pointers but null and paths that end in a zero byte, and no call here changes memory
    // of this process.
    let result = unsafe { syscall!(number, a, b, c, d, e, f) };
    if matches!(number, Sysno::clone) && result == Ok(0) {
        // SAFETY: it ends this process, which should not exist.
        unsafe { libc::_exit(1) };
    }
    result
}

fn open(path: &CStr, flags: i32) -> Result<usize, Errno> {
    call(Sysno::openat, [HERE, path.as_ptr().addr(), flags as usize, 0o600, 0, 0])
}

fn program_of(kind: ThreadKind) -> Program {
    match kind {
        ThreadKind::RelayControl | ThreadKind::RelayPort | ThreadKind::RelayForward => Program::Relay,
        ThreadKind::Connect => Program::Connect,
        ThreadKind::Gateway => Program::Gateway,
        _ => Program::Daemon,
    }
}

/// What a thread of a kind finds, one line for each fault.
fn faults_of(kind: ThreadKind, folder: &Path, listeners: &Listeners) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |holds: bool, what: String| {
        if !holds {
            faults.push(what);
        }
    };
    let total = || sandbox::refused().iter().map(|refused| refused.times).sum::<u64>();
    for (name, number, arguments) in forbidden() {
        // A gateway ends its child, listens, and makes folders and socket files.
        let is_gateways = matches!(name, "kill" | "listen" | "chmod" | "rt_sigaction of SIGSYS");
        if kind == ThreadKind::Gateway && is_gateways {
            continue;
        }
        let before = total();
        let result = call(number, arguments);
        expect(result == Err(Errno::EPERM), format!("{name} gives {result:?}"));
        expect(total() == before + 1, format!("{name} is not counted"));
    }
    // A netlink socket: no kind gets one, and those that look names up get an answer that is no refusal.
    let netlink = call(Sysno::socket, [libc::AF_NETLINK as usize, libc::SOCK_RAW as usize, 0, 0, 0, 0]);
    expect(matches!(netlink, Err(Errno::EPERM | Errno::ENOSYS)), format!("netlink gives {netlink:?}"));
    // Files that are not the program's.
    for path in [c"/etc/shadow", c"/etc/hostname", c"/proc/1/environ", c"/usr/bin/env"] {
        let result = open(path, libc::O_RDONLY);
        expect(matches!(result, Err(Errno::EPERM | Errno::EACCES | Errno::ENOENT)), format!("{path:?}: {result:?}"));
    }
    let made = open(c"/tmp/kvrouted-test-sandbox", libc::O_CREAT | libc::O_WRONLY);
    expect(matches!(made, Err(Errno::EPERM | Errno::EACCES)), format!("a file in /tmp: {made:?}"));
    let own_memory = open(c"/proc/self/mem", libc::O_RDWR);
    expect(matches!(own_memory, Err(Errno::EPERM | Errno::EACCES)), format!("its own memory: {own_memory:?}"));
    needs(kind, folder, listeners, &mut expect);
    faults
}

struct Listeners {
    address: std::net::SocketAddr,
    _tcp: TcpListener,
    unix: std::path::PathBuf,
    _unix: UnixListener,
}

/// What the kind needs passes, and what its neighbours need does not.
fn needs(kind: ThreadKind, folder: &Path, listeners: &Listeners, expect: &mut impl FnMut(bool, String)) {
    use ThreadKind as T;
    let address = listeners.address;
    let connects = matches!(
        kind,
        T::Control
            | T::Ingest
            | T::Loads
            | T::Routers
            | T::Names
            | T::Asking
            | T::Traces
            | T::Connect
            | T::Gateway
            | T::RelayForward
    );
    let connected = TcpStream::connect(address);
    expect(connected.is_ok() == connects, format!("a TCP connection: {connected:?}"));
    let connected = std::os::unix::net::UnixStream::connect(&listeners.unix);
    let may = connects || kind == T::Takeover;
    expect(connected.is_ok() == may, format!("a connection to a Unix socket: {connected:?}"));
    let datagrams = matches!(kind, T::Control | T::Names | T::Asking | T::Traces | T::Connect | T::Gateway);
    let datagram = UdpSocket::bind("127.0.0.1:0");
    expect(datagram.is_ok() == datagrams, format!("a UDP socket: {datagram:?}"));
    let bound = TcpListener::bind("127.0.0.1:0");
    expect(bound.is_err(), format!("a TCP port: {bound:?}"));
    let writes = [
        ("snapshots", matches!(kind, T::Control | T::Snapshots | T::Gateway)),
        ("journal", matches!(kind, T::Control | T::Journal | T::Gateway)),
        ("config", false),
        ("elsewhere", false),
    ];
    for (name, may) in writes {
        let path = folder.join(name).join("new");
        let written = fs::File::create(&path).and_then(|mut file| file.write_all(b"x")).and_then(|()| {
            fs::rename(&path, path.with_extension("renamed"))?;
            fs::remove_file(path.with_extension("renamed"))
        });
        expect(written.is_ok() == may, format!("a file in {name}: {written:?}"));
    }
    let reads = [
        ("config", matches!(kind, T::Control | T::Files | T::Gateway)),
        ("workers", matches!(kind, T::Control | T::Files | T::Gateway)),
        ("snapshots", matches!(kind, T::Control | T::Files | T::Snapshots | T::SnapshotLoads | T::Gateway)),
        ("elsewhere", false),
    ];
    let statm = fs::read("/proc/self/statm");
    let may = matches!(kind, T::Control | T::Files | T::Gateway);
    expect(statm.is_ok() == may, format!("reading its own memory's size: {statm:?}"));
    for (name, may) in reads {
        let read = fs::read(folder.join(name).join("file"));
        expect(read.is_ok() == may, format!("reading a file in {name}: {read:?}"));
    }
    if matches!(kind, T::Control | T::Names | T::Asking | T::Traces | T::Connect | T::Gateway) {
        let found = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1));
        expect(found.is_ok(), format!("localhost: {found:?}"));
    }
    if matches!(kind, T::Serving | T::ServingUring) {
        let lane = kvrouted::lane::LaneSizes::requested(4096, 4096, 4096).and_then(kvrouted::lane::LaneMemory::make);
        expect(lane.is_ok(), format!("a lane: {lane:?}"));
    }
    // Memory, locks and clocks: whatever the kind.
    let memory = vec![1_u8; 8 << 20];
    expect(memory.iter().map(|byte| usize::from(*byte)).sum::<usize>() == 8 << 20, "memory".to_owned());
    std::thread::sleep(std::time::Duration::from_millis(1));
}

/// Tells the test that started this process.
fn say(text: &str) {
    writeln!(std::io::stdout().lock(), "{text}").expect("said");
}

/// Runs as a process of its own, for `every_kind_is_refused_what_it_does_not_need`.
#[test]
#[ignore = "another test runs it as a process of its own"]
fn confined() {
    let Ok(name) = std::env::var(KIND) else { return };
    let folder = std::path::PathBuf::from(std::env::var(FOLDER).expect("a folder"));
    let kind = *ThreadKind::ALL.iter().find(|kind| kind.name() == name).expect("a kind");
    let unix = folder.join("listener");
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listeners = Listeners {
        address: tcp.local_addr().expect("an address"),
        _tcp: tcp,
        _unix: UnixListener::bind(&unix).expect("a socket"),
        unix,
    };
    let mut grants = Grant::resolver();
    let places = [
        (Place::Config, "config"),
        (Place::Workers, "workers"),
        (Place::Snapshots, "snapshots"),
        (Place::Journal, "journal"),
    ];
    grants.push(Grant::new(Place::Process, "/proc/self"));
    grants.extend(places.map(|(place, name)| Grant::new(place, folder.join(name))));
    let plan = Plan { mode: Mode::Required, program: program_of(kind), grants, bind_ports: Vec::new() };
    if let Err(error) = sandbox::start(&plan) {
        say(&format!("fault: {error}"));
        return;
    }
    let confined = move || {
        sandbox::enter(kind);
        faults_of(kind, &folder, &listeners)
    };
    let faults = std::thread::spawn(confined).join().expect("it ends");
    let lines: Vec<String> = faults.iter().map(|fault| format!("fault: {fault}")).collect();
    assert_eq!(sandbox::threads_unconfined(), 0);
    say(&format!("{}\ndone", lines.join("\n")));
}

#[test]
fn every_kind_is_refused_what_it_does_not_need() {
    if !crate::kernel_has_all("the kinds of threads") {
        return;
    }
    for kind in ThreadKind::ALL {
        let folder = folder();
        for name in ["config", "workers", "snapshots", "journal", "elsewhere"] {
            fs::create_dir(folder.path().join(name)).expect("made");
            fs::write(folder.path().join(name).join("file"), name).expect("written");
        }
        let mut command = test_of_this_binary("threads::confined");
        let output = command.env(KIND, kind.name()).env(FOLDER, text(folder.path())).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout);
        let faults: Vec<&str> = said.lines().filter(|line| line.contains("fault: ")).collect();
        assert!(faults.is_empty(), "{}: {faults:#?}", kind.name());
        assert!(said.contains("done"), "{}: {said}\n{}", kind.name(), String::from_utf8_lossy(&output.stderr));
    }
}
