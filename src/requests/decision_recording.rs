//! Recording of decisions, for the journal and for the shadow policy. Each serving thread puts decisions into a queue
//! of its own; one thread takes them from all queues, writes the journal, and has the shadow policy judge.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::budget::{Division, MemoryPart};
use crate::config::{Config, Problems, policy_with};
use crate::error::{Error, Kind, Result};
use crate::fleet::Space;
use crate::ids::SpaceId;
use crate::journal::{
    DecisionQueue, DecisionRecord, DecisionRecorder, FilesPlan, IdentityHasher, Judge, Origin, SampleShares,
    SpaceLabel, WriterPlan, WriterThread,
};
use crate::limits::JOURNAL_WORKER_BYTES;
use crate::load::Loads;
use crate::metrics::{CounterSet, JournalCounter};
use crate::route::Policy;
use crate::shadow::{PolicyComparison, ShadowTally};
use crate::watchdog::ThreadMark;

/// The queues of all serving threads, and the shadow policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct DecisionRecording {
    shares: Arc<SampleShares>,
    /// By serving thread.
    queues: Vec<Arc<DecisionQueue>>,
    hasher: IdentityHasher,
    pub(crate) counters: Arc<CounterSet<JournalCounter>>,
    pub(crate) shadow: ShadowPolicy,
}

impl DecisionRecording {
    /// A queue for each of `cores` threads, within the journal's part of the memory. Nothing is recorded yet.
    pub(super) fn new(config: &Config, cores: usize, division: &Division) -> Self {
        let workers_max = division.of_each(MemoryPart::Journal, cores) / JOURNAL_WORKER_BYTES as usize;
        let queue = |_| Arc::new(DecisionQueue::new(config.journal.ring_records_max, workers_max));
        let hasher = IdentityHasher::new(config.journal.prefix_tokens);
        Self { queues: (0..cores).map(queue).collect(), hasher, ..Self::default() }
    }

    /// Has a shadow policy judge a share of the decisions from now on, 0 to 1. Its counts begin at 0.
    ///
    /// # Errors
    /// `InvalidArgument` with every problem of the settings; nothing changes then.
    pub(crate) fn set_shadow(&self, settings: &[String], share: f64) -> Result<()> {
        self.shadow.replace(settings)?;
        self.shares.set_shadow(share);
        Ok(())
    }

    /// The settings in which the shadow policy differs, if one judges.
    pub(crate) fn shadow_settings(&self) -> Option<Vec<String>> {
        (self.shadow_share() > 0.0).then(|| self.shadow.settings())
    }

    /// The share of decisions that the shadow policy judges, 0 to 1.
    pub(crate) fn shadow_share(&self) -> f64 {
        self.shares.shadow()
    }

    /// Memory of the decisions that wait, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.queues.iter().map(|queue| queue.bytes()).sum()
    }

    /// The recorder of one serving thread.
    pub(super) fn recorder(&self, core: usize) -> DecisionRecorder {
        let queue = self.queues.get(core).map_or_else(|| Arc::new(DecisionQueue::new(1, 0)), Arc::clone);
        DecisionRecorder::new(queue, Arc::clone(&self.shares), self.hasher.clone())
    }

    /// Starts the thread that writes what serving threads record from now on, and what becomes of the bookings in `loads`.
    ///
    /// # Errors
    /// `System` if the directory is not usable or the thread cannot be started.
    pub(crate) fn start(
        &self,
        config: &Config,
        (instance_id, started_unix_ms): (u64, u64),
        (spaces, loads): (&[Space], &Arc<Loads>),
        mark: Arc<ThreadMark>,
    ) -> Result<WriterThread> {
        let journal = &config.journal;
        let label = |space: &Space| SpaceLabel {
            model: space.model.clone(),
            namespace: space.namespace.clone(),
            role: space.role.name().to_owned(),
        };
        let origin = Origin {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            instance_id,
            started_unix_ms,
            sample: journal.sample,
            spaces: spaces.iter().map(label).collect(),
            classes: Vec::new(),
        };
        let files = journal.dir.clone().map(|dir| FilesPlan {
            dir,
            file_bytes_max: journal.file_bytes_max,
            files_max: journal.files_max,
        });
        let has_files = files.is_some();
        let (queues, counters) = (self.queues.clone(), Arc::clone(&self.counters));
        self.set_shadow(&config.shadow.policy, config.shadow.share)?;
        let judge = Box::new(self.shadow.clone());
        let (loads, hasher) = (Arc::clone(loads), self.hasher.clone());
        let plan = WriterPlan { origin, files, queues, loads, hasher, judge, counters, mark };
        let shares = Arc::clone(&self.shares);
        let thread = WriterThread::start(plan, move || shares.is_off())?;
        if has_files {
            self.shares.set_journal(journal.sample);
        }
        Ok(thread)
    }
}

/// The shadow policy and its counts. The thread that judges, and threads that read the counts, hold the lock for one
/// decision or one copy. Serving threads never do.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShadowPolicy(Arc<Mutex<ShadowState>>);

#[derive(Debug, Default)]
struct ShadowState {
    /// The fields in which it differs from each space's policy: `field=value`.
    settings: Vec<String>,
    spaces: Vec<SpaceShadow>,
    comparison: PolicyComparison,
}

#[derive(Debug, Default)]
struct SpaceShadow {
    /// The policy that the one below was made from.
    base: Option<Policy>,
    policy: Policy,
    tally: ShadowTally,
}

impl ShadowPolicy {
    /// Judges by each space's policy with these settings from now on, with all counts at 0. Settings that one policy
    /// refuses, all policies refuse.
    ///
    /// # Errors
    /// `InvalidArgument` with every problem of the settings; nothing changes then.
    fn replace(&self, settings: &[String]) -> Result<()> {
        policy_with(&Policy::default(), "the shadow policy", settings).map_err(|problems| refused(&problems))?;
        *self.0.lock() = ShadowState { settings: settings.to_vec(), ..ShadowState::default() };
        Ok(())
    }

    fn settings(&self) -> Vec<String> {
        self.0.lock().settings.clone()
    }

    /// The counts by space, for spaces in which a decision was judged.
    pub(crate) fn tallies(&self) -> Vec<(SpaceId, ShadowTally)> {
        let state = self.0.lock();
        let judged = state.spaces.iter().enumerate().filter(|(_, of)| of.tally.decisions > 0);
        judged.map(|(at, of)| (SpaceId(at as u32), of.tally)).collect()
    }

    /// The counts of all spaces together.
    pub(crate) fn total(&self) -> ShadowTally {
        let mut total = ShadowTally::default();
        self.tallies().iter().for_each(|(_, tally)| total.merge(tally));
        total
    }
}

/// A policy with settings that were accepted before. Each field is checked by itself, so that settings which one policy
/// accepts, every policy accepts.
pub(crate) fn policy_with_settings(policy: &Policy, settings: &[String]) -> Policy {
    policy_with(policy, "the shadow policy", settings).unwrap_or(*policy)
}

fn refused(problems: &Problems) -> Error {
    let what = problems.to_string().lines().collect::<Vec<_>>().join("; ");
    Error::new(Kind::InvalidArgument, what, "name fields of [policy] as field=value")
}

impl Judge for ShadowPolicy {
    fn judge(&mut self, record: &mut DecisionRecord) {
        let state = &mut *self.0.lock();
        let space = record.space.0 as usize;
        if state.spaces.len() <= space {
            state.spaces.resize_with(space + 1, SpaceShadow::default);
        }
        let of = &mut state.spaces[space];
        if of.base != Some(record.policy) {
            of.base = Some(record.policy);
            of.policy = policy_with_settings(&record.policy, &state.settings);
        }
        let (chosen, seed) = (record.outcome.chosen(), record.outcome.seed);
        let compare = state.comparison.compare(&of.policy, &mut record.observation, seed, chosen);
        of.tally.add(compare);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_settings_change_nothing() {
        let shadow = ShadowPolicy::default();
        shadow.replace(&["device_credit=0.5".into()]).unwrap();
        let mut judge = shadow.clone();
        judge.judge(&mut DecisionRecord { space: SpaceId(1), ..DecisionRecord::default() });
        let error = shadow.replace(&["device_credits=0.5".into(), "x".into()]).unwrap_err();
        assert!(error.kind() == Kind::InvalidArgument && error.message().contains("device_credit"), "{error}");
        let tallies = shadow.tallies();
        assert_eq!((tallies.len(), tallies[0].0, tallies[0].1.agreements), (1, SpaceId(1), 1));
        assert_eq!(shadow.total().decisions, 1);
        shadow.replace(&[]).unwrap();
        assert!(shadow.tallies().is_empty(), "the counts begin at 0");
    }
}
