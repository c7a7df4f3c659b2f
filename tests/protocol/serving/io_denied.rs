//! Kernels that deny io_uring, as in containers: a test of this binary runs again under a seccomp filter, and the
//! serving threads must come up on epoll without a hang or a panic.

use std::io::Write;
use std::process::Command;

/// Installs a filter that answers system call `argv[1]` with error `argv[2]`, then becomes `argv[3..]`.
const DENY: &str = r"
import ctypes, os, struct, sys
call, error = int(sys.argv[1]), int(sys.argv[2])
load_number = struct.pack('HBBI', 0x20, 0, 0, 0)
skip_unless_call = struct.pack('HBBI', 0x15, 0, 1, call)
deny = struct.pack('HBBI', 0x06, 0, 0, 0x00050000 | error)
allow = struct.pack('HBBI', 0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(load_number + skip_unless_call + deny + allow)
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]
program = Program(4, ctypes.addressof(code))
libc = ctypes.CDLL(None)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(program)):
    sys.exit(99)
os.execv(sys.argv[3], sys.argv[3:])
";

const IO_URING_SETUP: &str = "425";
const IO_URING_ENTER: &str = "426";
const EPERM: &str = "1";
/// What the script says when it may not filter.
const CANNOT_FILTER: i32 = 99;

#[test]
fn cores_run_on_epoll_where_io_uring_is_denied() {
    for (call, name) in [(IO_URING_SETUP, "io_uring_setup"), (IO_URING_ENTER, "io_uring_enter")] {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new("python3");
        command
            .args(["-c", DENY, call, EPERM])
            .arg(this)
            .args(["--exact", "serving::frames::a_half_closed_peer_gets_its_replies"]);
        let skip = match command.output() {
            Err(error) => Some(format!("python3 cannot be run: {error}")),
            Ok(done) if done.status.code() == Some(CANNOT_FILTER) => {
                Some("seccomp filters are not allowed here".to_owned())
            }
            Ok(done) => {
                let said = String::from_utf8_lossy(&done.stdout);
                assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
                assert!(said.contains("1 passed"), "{said}");
                // Set-up may be denied here anyway: then that is what is named.
                assert!(said.contains(name) || said.contains("io_uring_setup"), "{said}");
                None
            }
        };
        if let Some(why) = skip {
            writeln!(std::io::stdout().lock(), "SKIPPED with {name} denied: {why}").unwrap();
        }
    }
}
