//! Nothing the demo starts outlives it, however it ends.
//!
//! Engines and gateway hold the reading end of a pipe whose other end only the demo has: when the demo dies,
//! by whatever signal, their standard input ends and so do they. The daemon knows nothing of this; it is
//! started through [`run_daemon`], which asks the kernel for a signal instead.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::args::DaemonArgs;
use crate::error::{Error, Kind};

/// Ends this process when its standard input does.
///
/// # Errors
/// `system` if no thread can be started.
pub(crate) fn end_with_stdin() -> Result<(), Error> {
    let watch = || {
        let (mut stdin, mut ignored) = (std::io::stdin().lock(), [0_u8; 256]);
        while !matches!(stdin.read(&mut ignored), Ok(0) | Err(_)) {}
        std::process::exit(0);
    };
    std::thread::Builder::new().name("lifetime".to_owned()).spawn(watch).map(drop).map_err(|error| {
        Error::new(Kind::System, "no thread can be started", "raise the limit on processes").caused_by(error)
    })
}

/// Becomes the daemon, to be terminated by the kernel when the demo's process dies. Returns only on failure.
#[must_use]
pub fn run_daemon(args: &DaemonArgs) -> Error {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return unusable("the kernel refuses a parent-death signal").caused_by(error);
    }
    // The demo may have died before the kernel was asked.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(args.parent) {
        return unusable("the demo that wanted a daemon is gone");
    }
    match std::env::current_exe() {
        Ok(program) => {
            unusable("the daemon cannot be started").caused_by(Command::new(program).args(&args.command).exec())
        }
        Err(error) => unusable("this program's own file cannot be found").caused_by(error),
    }
}

fn unusable(what: &str) -> Error {
    Error::new(Kind::System, what, "start the demo again")
}
