//! Which processors who may use. Where both sides spin each needs one of its own: put on the same one, either waits for
//! the other's time slice to end, and that is all that would be measured.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::failure::Failure;

/// The processors of this process: the last for a client that spins, the others for the server.
#[derive(Clone, Debug)]
pub(crate) struct Processors {
    all: Vec<usize>,
}

impl Processors {
    /// Those that this thread may use.
    ///
    /// # Errors
    /// The system does not say.
    pub(crate) fn of_this_thread() -> Result<Self, Failure> {
        let set = sched_getaffinity(None).map_err(|error| Failure::system("ask for processors")(error.into()))?;
        Ok(Self { all: (0..CpuSet::MAX_CPU).filter(|at| set.is_set(*at)).collect() })
    }

    /// How many there are.
    #[must_use]
    pub(crate) const fn count(&self) -> usize {
        self.all.len()
    }

    /// Those of a server beside a client that spins; all of them if there is only one.
    #[must_use]
    pub(crate) fn of_server(&self) -> &[usize] {
        self.all.split_last().map(|(_, rest)| rest).filter(|rest| !rest.is_empty()).unwrap_or(&self.all)
    }

    /// Keeps this thread on the client's for as long as what is returned lives.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn keep_client(&self) -> Result<Kept<'_>, Failure> {
        keep(self.all.last().map_or(&[], std::slice::from_ref))?;
        Ok(Kept(self))
    }
}

/// A thread on one processor.
pub(crate) struct Kept<'a>(&'a Processors);

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        // It was allowed to use all of these. If it no longer is, it stays where it is.
        let _ = keep(&self.0.all);
    }
}

/// Keeps this thread, and those that it starts from now on, on these processors; none = wherever it is.
///
/// # Errors
/// The system refuses.
pub(crate) fn keep(processors: &[usize]) -> Result<(), Failure> {
    if processors.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    processors.iter().for_each(|at| set.set(*at));
    sched_setaffinity(None, &set).map_err(|error| Failure::system("keep to processors")(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_spins_has_a_processor_of_its_own_and_gives_it_back() {
        let processors = Processors::of_this_thread().unwrap();
        let kept = processors.keep_client().unwrap();
        let client = Processors::of_this_thread().unwrap();
        assert_eq!(client.count(), 1);
        assert!(processors.count() == 1 || !processors.of_server().contains(&client.all[0]));
        drop(kept);
        assert_eq!(Processors::of_this_thread().unwrap().all, processors.all);
    }
}
