//! Filters of system calls: the list of a thread's kind becomes a program that the kernel runs before each call.
//!
//! A call that the filter refuses fails with `EPERM`, and `refusals` counts it. The kernel remembers which numbers a
//! filter always permits, so such a call costs one look at a bitmap; only calls whose arguments are checked run the
//! program.

use std::collections::BTreeMap;
use std::str::FromStr as _;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use syscalls::Sysno;

use super::kinds::{Call, Check, ThreadKind};
use crate::error::{Error, Kind, Result};

/// What the kernel does with a call that is in no list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It fails, and the signal handler of `refusals` counts it.
    Counted,
    /// It is carried out, and the kernel writes it to its audit log.
    LoggedByKernel,
}

/// The rules by number of a call. An empty list permits the call with any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The filter of a kind of threads, and of the threads that they start.
///
/// # Errors
/// `Internal` for a list that is no filter, `System` for a processor that has none.
pub(super) fn of_kind(kind: ThreadKind, refusal: Refusal) -> Result<BpfProgram> {
    of_calls(&kind.calls_with_children(), refusal)
}

/// The filter of a list of calls.
pub(super) fn of_calls(calls: &[Call], refusal: Refusal) -> Result<BpfProgram> {
    let mut rules = Rules::new();
    for call in calls {
        add(&mut rules, call)?;
    }
    let otherwise = match refusal {
        Refusal::Counted => SeccompAction::Trap,
        Refusal::LoggedByKernel => SeccompAction::Log,
    };
    program(rules, otherwise, SeccompAction::Allow)
}

/// The filter of calls that a C library tries first and does without: they fail as on an older kernel, uncounted.
///
/// `clone3` has its flags in memory, where no filter sees them; the library then calls `clone`. glibc's resolver asks
/// by a netlink socket which addresses the machine has; without it, it takes IPv4 and IPv6 to be there.
pub(super) fn of_absent_calls() -> Result<BpfProgram> {
    let mut rules = Rules::new();
    add(&mut rules, &Call::any("clone3"))?;
    add(&mut rules, &Call::checked("socket", &[(0, Check::Is(libc::AF_NETLINK as u64))]))?;
    program(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))
}

/// The filter of a process that starts programs: it permits everything but the calls that no program here needs.
pub(super) fn of_forbidden_calls(names: &[&'static str], refusal: Refusal) -> Result<BpfProgram> {
    let mut rules = Rules::new();
    for name in names {
        add(&mut rules, &Call::any(name))?;
    }
    let forbidden = match refusal {
        Refusal::Counted => SeccompAction::Errno(libc::EPERM as u32),
        Refusal::LoggedByKernel => SeccompAction::Log,
    };
    program(rules, SeccompAction::Allow, forbidden)
}

fn program(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Result<BpfProgram> {
    // Only for these does `refusals` know the registers.
    let known = ["x86_64", "aarch64"].contains(&std::env::consts::ARCH);
    let arch = TargetArch::try_from(std::env::consts::ARCH).ok().filter(|_| known).ok_or_else(|| {
        let remedy = "set sandbox.mode to \"off\" on this processor";
        Error::new(Kind::System, "there are no filters of system calls for this processor", remedy)
    })?;
    let filter = SeccompFilter::new(rules, otherwise, matched, arch).map_err(no_filter)?;
    BpfProgram::try_from(filter).map_err(no_filter)
}

fn add(rules: &mut Rules, call: &Call) -> Result<()> {
    // Newer processors lack the oldest calls.
    let Some(number) = number(call.name) else { return Ok(()) };
    if call.checks.is_empty() {
        rules.insert(number, Vec::new());
        return Ok(());
    }
    let conditions = call.checks.iter().map(|(argument, check)| condition(*argument, *check));
    let rule = SeccompRule::new(conditions.collect::<Result<_>>()?).map_err(no_filter)?;
    match rules.entry(number) {
        std::collections::btree_map::Entry::Vacant(none) => drop(none.insert(vec![rule])),
        // Any arguments are permitted already.
        std::collections::btree_map::Entry::Occupied(any) if any.get().is_empty() => {}
        std::collections::btree_map::Entry::Occupied(some) => some.into_mut().push(rule),
    }
    Ok(())
}

fn condition(argument: u8, check: Check) -> Result<SeccompCondition> {
    // Of numbers the kernel ignores the upper half, which a caller may leave as it is.
    let (length, op, value) = match check {
        Check::Is(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value),
        Check::Masked { mask, value } => (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), value),
        Check::IsNull => (SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0),
        Check::IsOwnProcess => (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, u64::from(std::process::id())),
    };
    SeccompCondition::new(argument, length, op, value).map_err(no_filter)
}

fn no_filter(error: seccompiler::BackendError) -> Error {
    Error::new(Kind::Internal, "a list of system calls is no filter", "report it with the version").caused_by(error)
}

/// The number of a call on this processor; `None` = it has no such call.
pub(super) fn number(name: &str) -> Option<i64> {
    Sysno::from_str(name).ok().map(|call| i64::from(call.id()))
}

/// The name of a call by its number.
pub(super) fn name(number: usize) -> &'static str {
    Sysno::new(number).map_or("unknown", |call| call.name())
}

#[cfg(test)]
mod tests {
    use super::super::kinds::FORBIDDEN_TO_PROGRAMS;
    use super::*;

    /// Calls of x86_64 alone, in place of which other processors have newer ones.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_listed_call_exists() {
        for kind in ThreadKind::ALL {
            for call in kind.calls_with_children() {
                assert!(number(call.name).is_some(), "{}: {}", kind.name(), call.name);
            }
        }
    }

    #[test]
    fn every_kind_has_a_filter() {
        for kind in ThreadKind::ALL {
            for refusal in [Refusal::Counted, Refusal::LoggedByKernel] {
                let steps = of_kind(*kind, refusal).map(|program| program.len());
                assert!(steps.as_ref().is_ok_and(|steps| *steps < 4096), "{}: {steps:?}", kind.name());
            }
        }
        assert!(of_absent_calls().is_ok());
    }

    #[test]
    fn no_list_has_a_call_that_is_forbidden_even_to_programs() {
        for kind in ThreadKind::ALL {
            for call in kind.calls_with_children() {
                assert!(!FORBIDDEN_TO_PROGRAMS.contains(&call.name), "{}: {}", kind.name(), call.name);
            }
        }
        #[cfg(target_arch = "x86_64")]
        assert!(FORBIDDEN_TO_PROGRAMS.iter().all(|name| number(name).is_some()));
    }

    #[test]
    fn numbers_have_names() {
        assert_eq!(number("read").map(|number| name(number as usize)), Some("read"));
        assert_eq!((number("no_such_call"), name(60_000)), (None, "unknown"));
    }

    #[test]
    fn a_call_with_any_arguments_stays_so_beside_checked_ones() {
        let (any, checked) = (Call::any("fcntl"), Call::checked("fcntl", &[(1, Check::Is(1))]));
        for order in [[any, checked], [checked, any]] {
            let mut rules = Rules::new();
            order.iter().for_each(|call| add(&mut rules, call).expect("a rule"));
            assert!(rules.values().all(Vec::is_empty));
        }
    }
}
