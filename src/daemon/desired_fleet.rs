//! The desired fleet: the workers that all sources name, and the requests that change them. Used by the control thread
//! alone.

use std::cell::{Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Display;
use std::sync::Arc;

use tokio::sync::watch;

use super::audit_texts;
use crate::audit;
use crate::config::{NamedWorkers, Problems, SpaceConfig, WorkerConfig, WorkerPatch, parse_worker};
use crate::discovery::{Refusal, RefusalReason, ServerInfo, Source, SourceMerge};
use crate::error::{Error, Kind, Result};
use crate::ids::{RankSelection, Worker};
use crate::limits::WORKERS_MAX;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::serve::WorkerChangeOrder;
use crate::wire::{SourceStatus, WorkerChange, WorkerOp};

/// The workers that the daemon should have.
pub(super) struct DesiredFleet {
    merge: RefCell<SourceMerge>,
    /// Counts changes, and wakes the tasks that act on them.
    version: watch::Sender<u64>,
    /// The problem of each source or engine that cannot be used, by its name.
    problems: RefCell<BTreeMap<String, String>>,
    /// Changed fields of the configuration that need a restart.
    pending: RefCell<Vec<&'static str>>,
    spaces: Vec<SpaceConfig>,
    counters: Arc<CounterSet<DaemonCounter>>,
}

impl DesiredFleet {
    /// The workers that the configuration names.
    pub(super) fn new(named: NamedWorkers, spaces: Vec<SpaceConfig>, counters: Arc<CounterSet<DaemonCounter>>) -> Self {
        let desired = Self {
            merge: RefCell::default(),
            version: watch::channel(0).0,
            problems: RefCell::default(),
            pending: RefCell::default(),
            spaces,
            counters,
        };
        desired.set_source(Source::Config, named);
        desired
    }

    pub(super) fn counters(&self) -> &CounterSet<DaemonCounter> {
        &self.counters
    }

    /// The spaces that workers may serve.
    pub(super) fn spaces(&self) -> &[SpaceConfig] {
        &self.spaces
    }

    /// Wakes on every change.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// What each source names. Do not hold it across an await.
    pub(super) fn merge(&self) -> Ref<'_, SourceMerge> {
        self.merge.borrow()
    }

    /// Replaces what a source names.
    pub(super) fn set_source(&self, source: Source, named: NamedWorkers) {
        self.set_sources([(source, named)]);
    }

    /// Replaces what several sources name. All together cost as much as one.
    pub(super) fn set_sources(&self, sources: impl IntoIterator<Item = (Source, NamedWorkers)>) {
        self.change_sources(|merge| merge.replace_all(sources));
    }

    /// As [`set_sources`](Self::set_sources), for files that changed: an audit line tells each change of a worker.
    pub(super) fn set_changed_files(&self, sources: Vec<(Source, NamedWorkers)>) {
        let before: Vec<(Source, NamedWorkers)> = {
            let merge = self.merge.borrow();
            sources.iter().map(|(source, _)| (source.clone(), merge.workers_of(source))).collect()
        };
        self.set_sources(sources);
        for (source, before) in &before {
            self.audit(source, source, before);
        }
    }

    /// Sets an engine's answer about where it publishes.
    pub(super) fn set_answer(&self, url: &str, info: &ServerInfo) {
        self.problems.borrow_mut().remove(url);
        self.change_sources(|merge| merge.set_answer(url, info));
    }

    /// Notes why the source or engine `name` cannot be used; `None` = it can. Returns whether that is new.
    pub(super) fn note(&self, name: &str, problem: Option<String>) -> bool {
        let mut problems = self.problems.borrow_mut();
        match problem {
            Some(problem) => problems.insert(name.to_owned(), problem.clone()) != Some(problem),
            None => problems.remove(name).is_some(),
        }
    }

    /// Notes all changed fields of the configuration that need a restart.
    pub(super) fn note_pending(&self, fields: Vec<&'static str>) {
        *self.pending.borrow_mut() = fields;
    }

    /// The fields noted last.
    pub(super) fn pending(&self) -> Vec<&'static str> {
        self.pending.borrow().clone()
    }

    /// Changes what sources name. Logs and counts each worker that is refused now and was not before.
    fn change_sources(&self, change: impl FnOnce(&mut SourceMerge)) {
        let mut merge = self.merge.borrow_mut();
        let before: HashSet<Refusal> = merge.merged().refused.iter().cloned().collect();
        change(&mut merge);
        for refusal in merge.merged().refused.iter().filter(|refusal| !before.contains(refusal)) {
            tracing::error!("{refusal}");
            self.counters.bump(match refusal.reason {
                RefusalReason::Owned(_) | RefusalReason::EndpointTaken(..) => DaemonCounter::WorkersRefusedConflict,
                RefusalReason::Full => DaemonCounter::WorkersRefusedFull,
            });
        }
        // An engine that no source names any more has no problem.
        let urls = merge.urls();
        self.problems.borrow_mut().retain(|name, _| !name.starts_with("http://") || urls.contains(name.as_str()));
        self.version.send_modify(|version| *version += 1);
    }

    /// The source that names a worker.
    pub(super) fn source_of(&self, worker: Worker) -> String {
        let merge = self.merge.borrow();
        merge.merged().workers.get(&worker).map(|(source, _)| source.to_string()).unwrap_or_default()
    }

    /// Every source with its problem, if it has one.
    pub(super) fn sources(&self) -> Vec<SourceStatus> {
        let merge = self.merge.borrow();
        let mut sources: BTreeMap<String, SourceStatus> = BTreeMap::new();
        for (source, _) in merge.merged().workers.values() {
            sources.entry(source.to_string()).or_default().workers += 1;
        }
        for refusal in &merge.merged().refused {
            sources.entry(refusal.source.to_string()).or_default().problem.get_or_insert_with(|| refusal.to_string());
        }
        for (name, problem) in &*self.problems.borrow() {
            sources.entry(name.clone()).or_default().problem = Some(problem.clone());
        }
        sources.into_iter().map(|(name, status)| SourceStatus { name, ..status }).collect()
    }

    /// Makes the change of a request of `who`.
    pub(super) fn change(&self, who: &dyn Display, change: &WorkerChange<'_>) -> Result<u32> {
        let done = match change.op {
            WorkerOp::Add => self.add(who, change.fields),
            WorkerOp::Remove => self.remove(who, named_by(change)?),
            WorkerOp::Set => self.set(who, named_by(change)?, change.fields),
        };
        if let Err(error) = &done {
            self.counters.bump(DaemonCounter::WorkersRefusedRequest);
            tracing::warn!(%who, op = ?change.op, worker = change.worker.map(|worker| worker.to_string()), %error, "a request to change a worker is refused");
        }
        done
    }

    /// Adds and removes workers as requests of `who` order, all or none of them. All together cost as much as one change.
    pub(super) fn change_together(&self, who: &dyn Display, orders: &[WorkerChangeOrder]) -> Result<u32> {
        let before = self.merge.borrow().workers_of(&Source::Admin);
        let mut named = before.clone();
        let (mut added, mut count) = (Vec::new(), 0);
        let mut put = |named: &mut NamedWorkers, order: &WorkerChangeOrder| match order {
            WorkerChangeOrder::Add(fields) => self.add_to(named, fields, &mut added),
            WorkerChangeOrder::Remove(worker) => self.remove_from(named, *worker),
        };
        let put = orders.iter().try_for_each(|order| put(&mut named, order).map(|changed| count += changed));
        let done = put.and_then(|()| self.set_if_accepted(named, &added)).map(|()| count);
        match &done {
            Ok(_) => self.audit(who, &Source::Admin, &before),
            Err(error) => {
                self.counters.bump(DaemonCounter::WorkersRefusedRequest);
                tracing::warn!(%who, orders = orders.len(), %error, "a request to change workers is refused");
            }
        }
        done
    }

    fn add(&self, who: &dyn Display, fields: &[(String, String)]) -> Result<u32> {
        let (before, mut added) = (self.merge.borrow().workers_of(&Source::Admin), Vec::new());
        let mut named = before.clone();
        let count = self.add_to(&mut named, fields, &mut added)?;
        self.set_if_accepted(named, &added)?;
        self.audit(who, &Source::Admin, &before);
        Ok(count)
    }

    /// Logs how the workers that a source names differ from `before`, a line for each.
    fn audit(&self, who: &dyn Display, source: &Source, before: &NamedWorkers) {
        let after = self.merge.borrow().workers_of(source);
        let (before, after) = (by_name(before), by_name(&after));
        for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
            let (was, is) = (before.get(name).copied(), after.get(name).copied());
            let what = match (was, is) {
                (None, _) => "worker added",
                (_, None) => "worker removed",
                (Some(was), Some(is)) if was == is => continue,
                _ => "worker replaced",
            };
            audit::changed(who, what, name, (&audit_texts::worker(was), &audit_texts::worker(is)));
        }
    }

    /// Adds a worker, or an engine, to those that requests named. It replaces one of the same identity.
    fn add_to(&self, named: &mut NamedWorkers, fields: &[(String, String)], added: &mut Vec<Worker>) -> Result<u32> {
        let new = parse_worker("the request", fields, &self.spaces).map_err(|problems| invalid(&problems))?;
        let replaced = |worker: Worker| new.identities().any(|identity| identity == worker);
        named.workers.retain(|worker| !replaced(worker.worker));
        named.servers.retain(|server| !replaced(server.worker.worker));
        added.extend(new.identities());
        let count = new.workers.len().max(new.servers.len());
        named.workers.extend(new.workers);
        named.servers.extend(new.servers);
        if named.workers.len() + named.servers.len() > WORKERS_MAX {
            let message = format!("requests have added {WORKERS_MAX} workers, the most that one daemon has");
            return Err(Error::new(Kind::Overloaded, message, "remove some, or run a second daemon"));
        }
        Ok(count as u32)
    }

    /// Sets what requests name from now on, unless one of the added workers is refused.
    fn set_if_accepted(&self, named: NamedWorkers, added: &[Worker]) -> Result<()> {
        // Tried on a copy: a refused change leaves nothing behind.
        let mut tried = self.merge.borrow().clone();
        tried.replace(Source::Admin, named.clone());
        let refused = |refusal: &&Refusal| refusal.source == Source::Admin && added.contains(&refusal.worker);
        if let Some(refusal) = tried.merged().refused.iter().find(refused) {
            let remedy = "`kvrouted worker list` shows the source that names it";
            return Err(Error::new(Kind::InvalidArgument, refusal.to_string(), remedy));
        }
        self.set_source(Source::Admin, named);
        Ok(())
    }

    fn remove(&self, who: &dyn Display, worker: Worker) -> Result<u32> {
        let before = self.merge.borrow().workers_of(&Source::Admin);
        let mut named = before.clone();
        let removed = self.remove_from(&mut named, worker)?;
        self.set_source(Source::Admin, named);
        self.audit(who, &Source::Admin, &before);
        Ok(removed)
    }

    /// Removes a worker, or all of its ranks, from those that requests named.
    fn remove_from(&self, named: &mut NamedWorkers, worker: Worker) -> Result<u32> {
        let is_meant = |is: Worker| worker.selects(is);
        let before = named.workers.len() + named.servers.len();
        named.workers.retain(|worker| !is_meant(worker.worker));
        named.servers.retain(|server| server.worker.worker.id != worker.id || worker.ranks() != RankSelection::Every);
        let removed = before - named.workers.len() - named.servers.len();
        if removed > 0 {
            return Ok(removed as u32);
        }
        let merge = self.merge.borrow();
        let owner = merge.merged().workers.iter().find(|(is, _)| is_meant(**is)).map(|(_, (source, _))| source);
        Err(match owner {
            Some(Source::Admin) => Error::new(
                Kind::InvalidArgument,
                format!("worker {worker} is one rank of an engine that was added by its URL"),
                format!("remove all of its ranks: {}", worker.id),
            ),
            Some(source) => Error::new(
                Kind::InvalidArgument,
                format!("worker {} is named by {source}", worker.id),
                format!("remove it there ({source}), or set draining=true"),
            ),
            None => unknown_worker(worker),
        })
    }

    fn set(&self, who: &dyn Display, worker: Worker, fields: &[(String, String)]) -> Result<u32> {
        let patch = WorkerPatch::parse("the request", fields).map_err(|problems| invalid(&problems))?;
        let configs = || -> BTreeMap<Worker, WorkerConfig> {
            let merge = self.merge.borrow();
            let meant = merge.merged().workers.iter().filter(|(is, _)| worker.selects(**is));
            meant.map(|(is, (_, config))| (*is, config.clone())).collect()
        };
        let before = configs();
        if before.is_empty() {
            return Err(unknown_worker(worker));
        }
        before
            .values()
            .try_for_each(|config| patch.check("the request", config))
            .map_err(|problems| invalid(&problems))?;
        let meant: Vec<Worker> = before.keys().copied().collect();
        self.change_sources(|merge| {
            merge.set(&meant, &patch);
        });
        for (worker, after) in configs() {
            let Some(before) = before.get(&worker) else { continue };
            let (before, after) = audit_texts::worker_fields(before, &after);
            audit::changed(who, "worker set", &worker, (&before, &after));
        }
        Ok(meant.len() as u32)
    }
}

/// Workers by their id and rank, or by the URL of their engine.
fn by_name(named: &NamedWorkers) -> BTreeMap<String, &WorkerConfig> {
    let workers = named.workers.iter().map(|config| (config.worker.to_string(), config));
    workers.chain(named.servers.iter().map(|server| (server.url.clone(), &server.worker))).collect()
}

fn named_by(change: &WorkerChange<'_>) -> Result<Worker> {
    let unnamed = || Error::new(Kind::InvalidArgument, "the request names no worker", "name it by its id and rank");
    change.worker.ok_or_else(unnamed)
}

fn unknown_worker(worker: Worker) -> Error {
    Error::new(Kind::InvalidArgument, format!("there is no worker {}", worker.id), "see `kvrouted worker list`")
}

fn invalid(problems: &Problems) -> Error {
    let remedy = "correct the fields; `kvrouted serve --example-config` lists them under [[worker]]";
    Error::new(Kind::InvalidArgument, problems.to_string().trim().to_owned(), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(id: u64, more: &[(&str, &str)]) -> WorkerChangeOrder {
        let id = id.to_string();
        let fields = [("id", id.as_str()), ("model", "m")];
        WorkerChangeOrder::Add(
            fields.iter().chain(more).map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        )
    }

    #[test]
    fn ordered_changes_are_made_together_or_not_at_all() {
        let spaces = vec![SpaceConfig { model: "m".into(), ..SpaceConfig::default() }];
        let desired = DesiredFleet::new(NamedWorkers::default(), spaces, Arc::default());
        let (changes, there) = (desired.changes(), || desired.merge().merged().workers.len());
        let version = *changes.borrow();
        let orders: Vec<_> = (0..256).map(|id| add(id, &[])).collect();
        assert_eq!(desired.change_together(&"test", &orders).unwrap(), 256);
        assert_eq!((there(), *changes.borrow() - version), (256, 1), "one change wakes each task once");
        let remove = WorkerChangeOrder::Remove(Worker::new(0, 0));
        for bad in [WorkerChangeOrder::Remove(Worker::new(999, 0)), add(999, &[("endpoint", "nowhere")])] {
            assert!(desired.change_together(&"test", &[remove.clone(), add(300, &[]), bad]).is_err());
            assert_eq!((there(), *changes.borrow() - version), (256, 1), "no part of it is made");
        }
        assert_eq!(desired.change_together(&"test", &[remove, add(300, &[])]).unwrap(), 2);
        assert_eq!((there(), *changes.borrow() - version), (256, 2));
    }
}
