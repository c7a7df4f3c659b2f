//! The journal as the daemon keeps it: a ring for every core, and one thread that writes.

use std::sync::Arc;

use super::shadowing::Shadowing;
use crate::config::Config;
use crate::error::Result;
use crate::fleet::Space;
use crate::journal::{DecisionQueue, FilesPlan, Origin, Recorder, SampleShares, SpaceLabel, WriterPlan, WriterThread};
use crate::metrics::{CounterSet, JournalCounter};

/// What cores note decisions in.
#[derive(Clone, Debug, Default)]
pub(super) struct Recording {
    shares: Arc<SampleShares>,
    /// By core.
    rings: Vec<Arc<DecisionQueue>>,
    pub(super) counters: Arc<CounterSet<JournalCounter>>,
    pub(super) shadowing: Shadowing,
}

impl Recording {
    /// A ring for each of `cores`, into which nothing is noted yet.
    pub(super) fn new(config: &Config, cores: usize) -> Self {
        let ring = |_| Arc::new(DecisionQueue::new(config.journal.ring_records_max));
        Self { rings: (0..cores).map(ring).collect(), ..Self::default() }
    }

    /// Has a shadow policy judge a share of the decisions from now on, 0 to 1; what was counted of another is
    /// forgotten.
    ///
    /// # Errors
    /// `InvalidArgument` with everything that is wrong with the settings; nothing changes then.
    pub(super) fn shadow(&self, settings: &[String], share: f64) -> Result<()> {
        self.shadowing.replace(settings)?;
        self.shares.set_shadow(share);
        Ok(())
    }

    /// What the shadow policy sets otherwise, where one judges.
    pub(super) fn shadow_settings(&self) -> Option<Vec<String>> {
        (self.shadow_share() > 0.0).then(|| self.shadowing.settings())
    }

    /// The share of decisions that a shadow policy judges, 0 to 1.
    pub(super) fn shadow_share(&self) -> f64 {
        self.shares.shadow()
    }

    /// A core's end.
    pub(super) fn recorder(&self, core: usize) -> Recorder {
        let ring = self.rings.get(core).map_or_else(|| Arc::new(DecisionQueue::new(1)), Arc::clone);
        Recorder::new(ring, Arc::clone(&self.shares))
    }

    /// Starts to write what cores note from now on.
    ///
    /// # Errors
    /// `System` if the directory or the thread cannot be had.
    pub(super) fn start(
        &self,
        config: &Config,
        (instance_id, started_unix_ms): (u64, u64),
        spaces: &[Space],
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
        };
        let files = journal.dir.clone().map(|dir| FilesPlan {
            dir,
            file_bytes_max: journal.file_bytes_max,
            files_max: journal.files_max,
        });
        let is_kept = files.is_some();
        let (rings, counters) = (self.rings.clone(), Arc::clone(&self.counters));
        self.shadow(&config.shadow.policy, config.shadow.share)?;
        let judge = Box::new(self.shadowing.clone());
        let plan = WriterPlan { origin, files, queues: rings, judge, counters };
        let shares = Arc::clone(&self.shares);
        let thread = WriterThread::start(plan, move || shares.is_off())?;
        if is_kept {
            self.shares.set_journal(journal.sample);
        }
        Ok(thread)
    }
}
