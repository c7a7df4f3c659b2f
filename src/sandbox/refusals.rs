//! Counts the system calls that a filter refuses, by the kind of the thread and the call.
//!
//! The kernel raises SIGSYS on the thread in place of the call. The handler counts and lets the call return `EPERM`, as
//! if the kernel had refused it. It touches only static memory and the saved registers, so it may run at any point of
//! any thread.

#![expect(unsafe_code, reason = "a signal handler sets the result of the call in the saved registers")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use super::filter;
use super::kinds::ThreadKind;
use crate::error::{Error, Kind, Result};

/// Threads that a confined thread started and that have not said their kind.
pub(super) const OTHER: &str = "other";
/// Numbers of calls that are counted apart. The kernel has fewer than 480; a larger one counts as the last.
const CALLS: usize = 512;
/// The first row counts [`OTHER`].
const KINDS: usize = ThreadKind::ALL.len() + 1;

/// Relaxed everywhere: a count orders nothing.
static REFUSED: [[AtomicU32; CALLS]; KINDS] = [const { [const { AtomicU32::new(0) }; CALLS] }; KINDS];

thread_local! {
    /// The row of this thread in `REFUSED`. Without a destructor and set when compiled, so a signal handler may read it.
    static ROW: Cell<usize> = const { Cell::new(0) };
}

/// A refused call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The kind of the thread, or `other` for a thread that another one started.
    pub thread: &'static str,
    /// The call's name.
    pub call: &'static str,
    /// How often it was refused.
    pub times: u64,
}

/// All calls that were refused so far.
#[must_use]
pub fn refused() -> Vec<Refused> {
    let mut all = Vec::new();
    for (row, calls) in REFUSED.iter().enumerate() {
        for (call, times) in calls.iter().enumerate() {
            let times = u64::from(times.load(Ordering::Relaxed));
            if times > 0 {
                let thread = row.checked_sub(1).map_or(OTHER, |at| ThreadKind::ALL[at].name());
                all.push(Refused { thread, call: filter::name(call), times });
            }
        }
    }
    all
}

/// From now on the calls of this thread count as those of `kind`.
pub(super) fn count_as(kind: ThreadKind) {
    ROW.set(kind as usize + 1);
}

/// Handles SIGSYS for the whole process.
///
/// # Errors
/// [`Kind::System`] if the kernel refuses.
pub(super) fn listen() -> Result<()> {
    // SAFETY: all bytes zero are a valid `sigaction`: no flags, an empty mask and the default handler.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = refuse;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_NODEFER;
    // SAFETY: `action` is initialised, and its handler is a function of the kind that SA_SIGINFO asks for.
    if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } != 0 {
        let cause = std::io::Error::last_os_error();
        return Err(
            Error::new(Kind::System, "refused system calls cannot be counted", "see the cause").caused_by(cause)
        );
    }
    Ok(())
}

extern "C" fn refuse(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes the thread's saved state, which this handler alone uses now.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let call = take_call(context);
    // A thread that ends has no row any more.
    let row = ROW.try_with(Cell::get).unwrap_or(0);
    if let Some(count) = REFUSED.get(row).and_then(|calls| calls.get(call.min(CALLS - 1))) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The number of the refused call, whose result becomes `EPERM`.
#[cfg(target_arch = "x86_64")]
fn take_call(context: &mut libc::ucontext_t) -> usize {
    let result = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    usize::try_from(std::mem::replace(result, i64::from(-libc::EPERM))).unwrap_or(CALLS)
}

/// The number of the refused call, whose result becomes `EPERM`.
#[cfg(target_arch = "aarch64")]
fn take_call(context: &mut libc::ucontext_t) -> usize {
    let registers = &mut context.uc_mcontext.regs;
    registers[0] = i64::from(-libc::EPERM) as u64;
    usize::try_from(registers[8]).unwrap_or(CALLS)
}

/// Other processors get no filter that raises the signal.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn take_call(_: &mut libc::ucontext_t) -> usize {
    CALLS
}
