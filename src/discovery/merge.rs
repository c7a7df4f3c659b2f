//! The merge of all sources of workers: one owner for each worker, and refusals of the others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use super::server_info::{ServerInfo, publishes_elsewhere};
use crate::config::{NamedWorkers, WorkerConfig, WorkerPatch};
use crate::ids::Worker;
use crate::limits::{RANKS_ASKED_MAX, WORKERS_MAX};

/// A source of workers. The order decides between sources that name a worker without an owner.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Source {
    /// The configuration: its file or the command line.
    Config,
    /// A file of workers.
    File(PathBuf),
    /// Requests on the admin socket or the HTTP port. Their workers are forgotten when the daemon ends.
    Admin,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config => f.write_str("config"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Admin => f.write_str("admin"),
        }
    }
}

/// Why a worker of a source is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RefusalReason {
    /// Another source owns it.
    Owned(Source),
    /// Its endpoint belongs to this worker of another source.
    EndpointTaken(Worker, Source),
    /// The fleet is full.
    Full,
}

/// A worker that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Refusal {
    /// The worker.
    pub worker: Worker,
    /// The source that names it.
    pub source: Source,
    /// Why it is refused.
    pub reason: RefusalReason,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {} of {} is refused: ", self.worker, self.source)?;
        match &self.reason {
            RefusalReason::Owned(owner) => write!(f, "{owner} names it too; remove it from one of the two"),
            RefusalReason::EndpointTaken(worker, owner) => {
                write!(f, "worker {worker} of {owner} has the same endpoint; every rank needs sockets of its own")
            }
            RefusalReason::Full => write!(f, "there are already {WORKERS_MAX} workers; run a second daemon"),
        }
    }
}

/// The result of the merge.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Merged {
    /// Every worker with its owner.
    pub workers: BTreeMap<Worker, (Source, WorkerConfig)>,
    /// Refused workers, in the order of the sources.
    pub refused: Vec<Refusal>,
}

/// The workers of every source, the answers of engines, and the fields set by requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourceMerge {
    sources: BTreeMap<Source, NamedWorkers>,
    /// Answers of engines, by URL.
    answers: HashMap<String, ServerInfo>,
    /// Fields that requests set, until the worker's owner no longer names it.
    patches: BTreeMap<Worker, WorkerPatch>,
    merged: Merged,
}

impl SourceMerge {
    /// Replaces the workers of a source. An empty list = the source names no worker any more.
    pub(crate) fn replace(&mut self, source: Source, named: NamedWorkers) {
        self.replace_all([(source, named)]);
    }

    /// Replaces the workers of several sources. All together cost as much as one.
    pub(crate) fn replace_all(&mut self, sources: impl IntoIterator<Item = (Source, NamedWorkers)>) {
        for (source, named) in sources {
            if named == NamedWorkers::default() {
                self.sources.remove(&source);
            } else {
                self.sources.insert(source, named);
            }
        }
        self.merge();
    }

    /// The workers and engines that a source names.
    #[must_use]
    pub(crate) fn entries_of(&self, source: &Source) -> usize {
        self.sources.get(source).map_or(0, NamedWorkers::len)
    }

    /// The workers and engines that all files name.
    #[must_use]
    pub(crate) fn file_entries(&self) -> usize {
        let files = self.sources.iter().filter(|(source, _)| matches!(source, Source::File(_)));
        files.map(|(_, named)| named.len()).sum()
    }

    /// The workers of a source.
    #[must_use]
    pub(crate) fn workers_of(&self, source: &Source) -> NamedWorkers {
        self.sources.get(source).cloned().unwrap_or_default()
    }

    /// Notes an engine's answer about where its ranks publish.
    pub(crate) fn set_answer(&mut self, url: &str, answer: &ServerInfo) {
        if self.answers.get(url) != Some(answer) {
            self.answers.insert(url.to_owned(), answer.clone());
            self.merge();
        }
    }

    /// The URLs of engines that have not answered.
    #[must_use]
    pub(crate) fn unanswered(&self) -> Vec<String> {
        let urls = self.sources.values().flat_map(|named| &named.servers).map(|server| &server.url);
        urls.filter(|url| !self.answers.contains_key(*url)).cloned().collect()
    }

    /// The URLs of engines that have answered.
    #[must_use]
    pub(crate) fn answered_urls(&self) -> Vec<String> {
        self.answers.keys().cloned().collect()
    }

    /// Whether the engine with this URL has answered.
    #[must_use]
    pub(crate) fn has_answered(&self, url: &str) -> bool {
        self.answers.contains_key(url)
    }

    /// The workers of the engine with this URL.
    #[must_use]
    pub(crate) fn workers_of_url(&self, url: &str) -> Vec<Worker> {
        let Some(answer) = self.answers.get(url) else { return Vec::new() };
        let of_source = |(source, named): (&Source, &NamedWorkers)| {
            let servers = named.servers.iter().filter(|server| server.url == url);
            let workers = servers.flat_map(|server| answer.workers(&server.worker)).map(|config| config.worker);
            let is_owner = |worker: &Worker| self.merged.workers.get(worker).is_some_and(|(owner, _)| owner == source);
            workers.filter(is_owner).collect::<Vec<_>>()
        };
        self.sources.iter().flat_map(of_source).collect()
    }

    /// Whether any source names an engine with this URL.
    #[must_use]
    pub(crate) fn names_url(&self, url: &str) -> bool {
        self.sources.values().any(|named| named.servers.iter().any(|server| server.url == url))
    }

    /// The URLs of engines that any source names.
    #[must_use]
    pub(crate) fn urls(&self) -> HashSet<&str> {
        self.sources.values().flat_map(|named| &named.servers).map(|server| server.url.as_str()).collect()
    }

    /// Sets fields of workers over those of their owners; `false` if there is none of the workers.
    pub(crate) fn set(&mut self, workers: &[Worker], patch: &WorkerPatch) -> bool {
        let merged = &self.merged.workers;
        let there: Vec<Worker> = workers.iter().copied().filter(|worker| merged.contains_key(worker)).collect();
        for worker in &there {
            self.patches.entry(*worker).or_default().add(patch);
        }
        if !there.is_empty() {
            self.merge();
        }
        !there.is_empty()
    }

    /// The result of the merge.
    #[must_use]
    pub(crate) const fn merged(&self) -> &Merged {
        &self.merged
    }

    /// Merges all sources. An owner keeps its workers; for other workers the order of the sources counts. An engine that
    /// says that it publishes on another host comes last: it gets no endpoint that another worker has.
    fn merge(&mut self) {
        let before = std::mem::take(&mut self.merged.workers);
        let (mut claims, mut merged) = self.claims();
        let kept = |(source, config): (&Source, &WorkerConfig)| {
            before.get(&config.worker).is_some_and(|(owner, was)| {
                let endpoint = |config: &WorkerConfig| config.events.as_ref().map(|events| events.endpoint.clone());
                owner == source && endpoint(was) == endpoint(config)
            })
        };
        // A stable sort: within each part the sources stay in order.
        claims.sort_by_key(|(source, config, is_elsewhere)| (*is_elsewhere, !kept((source, config))));
        let mut endpoints: HashMap<String, Worker> = HashMap::new();
        for (source, config, _) in claims {
            let worker = config.worker;
            match refusal(&merged, &endpoints, &config) {
                Some(reason) => merged.refused.push(Refusal { worker, source: source.clone(), reason }),
                None => {
                    endpoints.extend(config.events.iter().map(|events| (events.endpoint.to_ascii_lowercase(), worker)));
                    merged.workers.insert(worker, (source.clone(), config));
                }
            }
        }
        merged.refused.sort_by(|a, b| (&a.source, a.worker).cmp(&(&b.source, b.worker)));
        self.patches.retain(|worker, _| merged.workers.contains_key(worker));
        for (worker, patch) in &self.patches {
            if let Some((_, config)) = merged.workers.get_mut(worker) {
                patch.apply(config);
            }
        }
        let servers = self.sources.values().flat_map(|named| &named.servers);
        let urls: HashSet<&str> = servers.map(|server| server.url.as_str()).collect();
        self.answers.retain(|url, _| urls.contains(url.as_str()));
        self.merged = merged;
    }

    /// The workers that each source names, each with whether it publishes on another host than its engine's URL has; and
    /// the refusals of engines whose ranks are too many for all sources.
    fn claims(&self) -> (Vec<(&Source, WorkerConfig, bool)>, Merged) {
        let (mut claims, mut merged, mut ranks) = (Vec::new(), Merged::default(), 0);
        for (source, named) in &self.sources {
            claims.extend(named.workers.iter().cloned().map(|worker| (source, worker, false)));
            for server in &named.servers {
                let Some(answer) = self.answers.get(&server.url) else { continue };
                if ranks + answer.ranks.len() > RANKS_ASKED_MAX {
                    let (worker, source) = (server.worker.worker, source.clone());
                    merged.refused.push(Refusal { worker, source, reason: RefusalReason::Full });
                    continue;
                }
                ranks += answer.ranks.len();
                claims.extend(answer.workers(&server.worker).into_iter().map(|worker| {
                    let is_elsewhere = publishes_elsewhere(&server.url, &worker);
                    (source, worker, is_elsewhere)
                }));
            }
        }
        (claims, merged)
    }
}

fn refusal(merged: &Merged, endpoints: &HashMap<String, Worker>, config: &WorkerConfig) -> Option<RefusalReason> {
    let owner = |worker: &Worker| merged.workers.get(worker).map(|(owner, _)| owner.clone());
    if let Some(owner) = owner(&config.worker) {
        return Some(RefusalReason::Owned(owner));
    }
    let taken = config.events.as_ref().and_then(|events| endpoints.get(&events.endpoint.to_ascii_lowercase()));
    if let Some((worker, owner)) = taken.and_then(|worker| Some((*worker, owner(worker)?))) {
        return Some(RefusalReason::EndpointTaken(worker, owner));
    }
    (merged.workers.len() >= WORKERS_MAX).then_some(RefusalReason::Full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FileFormat, SpaceConfig, parse_workers};
    use crate::fleet::WorkerState;

    fn named(json: &str) -> NamedWorkers {
        let spaces = [SpaceConfig { model: "m".into(), ..SpaceConfig::default() }];
        parse_workers("t", json, FileFormat::Json, &spaces).expect("valid")
    }

    fn file(name: &str) -> Source {
        Source::File(name.into())
    }

    /// `id source` of every worker, and of every refusal.
    fn who(merge: &SourceMerge) -> (Vec<String>, Vec<String>) {
        let merged = merge.merged();
        let workers = merged.workers.iter().map(|(worker, (source, _))| format!("{} {source}", worker.id)).collect();
        let refused =
            merged.refused.iter().map(|refusal| format!("{} {}", refusal.worker.id, refusal.source)).collect();
        (workers, refused)
    }

    #[test]
    fn sources_are_merged_and_each_worker_has_one_owner() {
        use Source::{Admin, Config};
        // Each row: the next workers of one source, then all workers and all refusals.
        type Row = (Source, &'static str, &'static [&'static str], &'static [&'static str]);
        let rows: [Row; 9] = [
            (Admin, r#"[{"id": 3}]"#, &["3 admin"], &[]),
            (Config, r#"[{"id": 1, "endpoint": "tcp://h:1"}, {"id": 3}]"#, &["1 config", "3 admin"], &["3 config"]),
            (file("a"), r#"[{"id": 2}, {"id": 1}]"#, &["1 config", "2 file a", "3 admin"], &["3 config", "1 file a"]),
            (file("b"), r#"[{"id": 2}]"#, &["1 config", "2 file a", "3 admin"], &["3 config", "1 file a", "2 file b"]),
            // An endpoint belongs to one worker, in upper or lower case.
            (
                file("b"),
                r#"[{"id": 9, "endpoint": "tcp://H:1"}]"#,
                &["1 config", "2 file a", "3 admin"],
                &["3 config", "1 file a", "9 file b"],
            ),
            // When an owner names a worker no longer, another source takes over.
            (Admin, "[]", &["1 config", "2 file a", "3 config"], &["1 file a", "9 file b"]),
            (Config, r#"[{"id": 3}]"#, &["1 file a", "2 file a", "3 config", "9 file b"], &[]),
            // A former owner that returns does not take over.
            (Config, r#"[{"id": 3}, {"id": 1}]"#, &["1 file a", "2 file a", "3 config", "9 file b"], &["1 config"]),
            (file("a"), "[]", &["1 config", "3 config", "9 file b"], &[]),
        ];
        let mut merge = SourceMerge::default();
        for (at, (source, json, workers, refused)) in rows.into_iter().enumerate() {
            merge.replace(source, named(json));
            let (is, not) = who(&merge);
            assert_eq!(
                (is, not),
                (workers.iter().map(ToString::to_string).collect(), refused.iter().map(ToString::to_string).collect()),
                "row {at}"
            );
        }
    }

    #[test]
    fn fields_set_by_requests_last_until_the_owner_removes_the_worker() {
        let mut merge = SourceMerge::default();
        let state = |merge: &SourceMerge| merge.merged().workers.values().next().map(|(_, config)| config.state);
        let patch = WorkerPatch::parse("t", &[("draining".into(), "true".into())]).expect("valid");
        assert!(!merge.set(&[Worker::new(1, 0)], &patch), "there is no such worker");
        merge.replace(Source::Config, named(r#"[{"id": 1}]"#));
        assert!(merge.set(&[Worker::new(1, 0), Worker::new(2, 0)], &patch));
        assert_eq!(state(&merge), Some(WorkerState::Draining));
        merge.replace(Source::Config, named(r#"[{"id": 1, "weight": 2}]"#));
        assert_eq!(state(&merge), Some(WorkerState::Draining), "a reload does not undo it");
        merge.replace(Source::Config, NamedWorkers::default());
        merge.replace(Source::Config, named(r#"[{"id": 1}]"#));
        assert_eq!(state(&merge), Some(WorkerState::Joining));
    }

    #[test]
    fn an_engine_becomes_a_worker_for_each_rank_once_it_answers() {
        let mut merge = SourceMerge::default();
        merge.replace(Source::Config, named(r#"[{"id": 1, "url": "http://10.0.0.9:30000", "taints": ["x"]}]"#));
        assert_eq!((who(&merge).0.len(), merge.unanswered()), (0, vec!["http://10.0.0.9:30000".to_owned()]));
        let answer = |dp_size: u32| {
            let json = format!(
                r#"{{"kv_events": {{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "t",
                "block_size": 16, "dp_size": {dp_size}}}}}"#
            );
            let answer = ServerInfo::of_sglang("http://10.0.0.9:30000", json.as_bytes()).expect("an answer");
            answer.expect("events")
        };
        merge.set_answer("http://10.0.0.9:30000", &answer(2));
        let endpoint =
            |(_, config): &(Source, WorkerConfig)| config.events.clone().expect("a stream").endpoint.to_string();
        let endpoints: Vec<_> = merge.merged().workers.values().map(endpoint).collect();
        assert_eq!(endpoints, ["tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558"]);
        assert!(merge.unanswered().is_empty());
        merge.set_answer("http://10.0.0.9:30000", &answer(1));
        assert_eq!(merge.merged().workers.len(), 1);
        merge.replace(Source::Config, NamedWorkers::default());
        assert_eq!((merge.merged().workers.len(), merge.answers.len()), (0, 0));
    }

    /// Six engines answer, each with a fifth of the ranks that all engines together may have.
    #[test]
    fn the_ranks_of_all_engines_are_limited_and_a_worker_keeps_its_owner() {
        let url = |at: usize| format!("http://10.0.0.{at}:30000");
        let records: Vec<_> = (1..=6).map(|at| format!(r#"{{"id": {at}, "url": "{}"}}"#, url(at))).collect();
        let mut merge = SourceMerge::default();
        merge.replace(file("b"), named(r#"[{"id": 99}]"#));
        merge.replace(file("a"), named(&format!("[{}]", records.join(","))));
        for at in 1..=6 {
            let json = format!(
                r#"{{"kv_events": {{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
                "block_size": 16, "dp_size": {}}}}}"#,
                RANKS_ASKED_MAX / 5
            );
            let answer = ServerInfo::of_sglang(&url(at), json.as_bytes()).expect("an answer");
            merge.set_answer(&url(at), &answer.expect("events"));
        }
        let refused = |id: u64| merge.merged().refused.iter().filter(|refusal| refusal.worker.id.0 == id).count();
        assert_eq!(refused(6), 1, "the sixth engine as a whole");
        assert_eq!(merge.merged().workers.len(), WORKERS_MAX);
        assert!(merge.merged().workers.contains_key(&Worker::new(99, 0)));
    }

    #[test]
    fn an_engine_gets_no_endpoint_of_another_one_whichever_answers_first() {
        let [thief, victim] = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"];
        let mut merge = SourceMerge::default();
        merge.replace(
            Source::Config,
            named(&format!(r#"[{{"id": 1, "url": "{thief}"}}, {{"id": 2, "url": "{victim}"}}]"#)),
        );
        let answer = |url: &str, host: &str| {
            let json = format!(r#"{{"kv_events": {{"endpoint_host": "{host}", "endpoint_port_base": 5557}}}}"#);
            ServerInfo::of_sglang(url, json.as_bytes()).expect("an answer").expect("events")
        };
        let owner_of = |merge: &SourceMerge, host: &str| {
            let at = format!("tcp://{host}:5557");
            let mut workers = merge.merged().workers.values();
            workers
                .find(|(_, config)| config.events.as_ref().is_some_and(|events| events.endpoint.as_str() == at))
                .map(|(_, config)| config.worker.id.0)
        };
        merge.set_answer(thief, &answer(thief, "10.0.0.2"));
        assert_eq!(owner_of(&merge, "10.0.0.2"), Some(1), "a server of several ranks may publish elsewhere");
        merge.set_answer(victim, &answer(victim, "*"));
        assert_eq!(owner_of(&merge, "10.0.0.2"), Some(2));
        assert!(matches!(merge.merged().refused[..], [Refusal { reason: RefusalReason::EndpointTaken(..), .. }]));
    }

    #[test]
    fn the_number_of_workers_is_limited() {
        let list = |ids: std::ops::Range<usize>| {
            let list: Vec<_> = ids.map(|id| format!(r#"{{"id": {id}}}"#)).collect();
            named(&format!("[{}]", list.join(",")))
        };
        let mut merge = SourceMerge::default();
        merge.replace(file("a"), list(0..WORKERS_MAX));
        merge.replace(Source::Admin, list(WORKERS_MAX..WORKERS_MAX + 1));
        assert_eq!(merge.merged().workers.len(), WORKERS_MAX);
        assert_eq!(merge.merged().refused.last().map(|refusal| &refusal.reason), Some(&RefusalReason::Full));
    }
}
