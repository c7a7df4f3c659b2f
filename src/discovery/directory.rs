//! The directory: what every source says, and who there is when all of it is put together.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use super::server_info::ServerInfo;
use super::source::Source;
use crate::config::{NamedWorkers, WorkerConfig, WorkerPatch};
use crate::ids::Worker;
use crate::limits::WORKERS_MAX;

/// Why a worker that a source names is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// Another source names it.
    Owned(Source),
    /// Its endpoint is this worker's, by another source.
    EndpointTaken(Worker, Source),
    /// There are as many workers as there may be.
    Full,
}

/// A worker that a source names and that is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The worker.
    pub worker: Worker,
    /// Who names it.
    pub source: Source,
    /// Why it is not taken.
    pub reason: RefusalReason,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {} of {} is refused: ", self.worker, self.source)?;
        match &self.reason {
            RefusalReason::Owned(owner) => write!(f, "it is named by {owner}; remove one of them"),
            RefusalReason::EndpointTaken(worker, owner) => {
                write!(f, "its endpoint is that of worker {worker} of {owner}; every rank has sockets of its own")
            }
            RefusalReason::Full => write!(f, "there are {WORKERS_MAX} workers; run a second daemon"),
        }
    }
}

/// Who there is, and who is not taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// Every worker, with its owner.
    pub workers: BTreeMap<Worker, (Source, WorkerConfig)>,
    /// In the order of the sources.
    pub refused: Vec<Refusal>,
}

/// Everything that sources say.
#[derive(Clone, Debug, Default)]
pub struct Directory {
    said: BTreeMap<Source, NamedWorkers>,
    /// By URL.
    answers: HashMap<String, ServerInfo>,
    /// What requests set of a worker, until its owner lets go of it.
    patches: BTreeMap<Worker, WorkerPatch>,
    merged: Merged,
}

impl Directory {
    /// Takes what a source says now in place of what it said before; nothing = it names nobody any more.
    pub fn say(&mut self, source: Source, named: NamedWorkers) {
        if named == NamedWorkers::default() {
            self.said.remove(&source);
        } else {
            self.said.insert(source, named);
        }
        self.merge();
    }

    /// What a source says now.
    #[must_use]
    pub fn said_by(&self, source: &Source) -> NamedWorkers {
        self.said.get(source).cloned().unwrap_or_default()
    }

    /// An engine said where its ranks publish.
    pub fn answered(&mut self, url: &str, answer: &ServerInfo) {
        if self.answers.get(url) != Some(answer) {
            self.answers.insert(url.to_owned(), answer.clone());
            self.merge();
        }
    }

    /// The engines named by URL that have not answered.
    #[must_use]
    pub fn unanswered(&self) -> Vec<String> {
        let urls = self.said.values().flat_map(|named| &named.servers).map(|server| &server.url);
        urls.filter(|url| !self.answers.contains_key(*url)).cloned().collect()
    }

    /// The engines named by URL that have answered.
    #[must_use]
    pub fn answered_urls(&self) -> Vec<String> {
        self.answers.keys().cloned().collect()
    }

    /// Whether an engine is named by this URL and has answered.
    #[must_use]
    pub fn has_answered(&self, url: &str) -> bool {
        self.answers.contains_key(url)
    }

    /// The workers that an engine named by this URL is.
    #[must_use]
    pub fn workers_of_url(&self, url: &str) -> Vec<Worker> {
        let Some(answer) = self.answers.get(url) else { return Vec::new() };
        let of_source = |(source, named): (&Source, &NamedWorkers)| {
            let servers = named.servers.iter().filter(|server| server.url == url);
            let workers = servers.flat_map(|server| answer.workers(&server.worker)).map(|config| config.worker);
            let is_owner = |worker: &Worker| self.merged.workers.get(worker).is_some_and(|(owner, _)| owner == source);
            workers.filter(is_owner).collect::<Vec<_>>()
        };
        self.said.iter().flat_map(of_source).collect()
    }

    /// Whether some source names an engine by this URL.
    #[must_use]
    pub fn names_url(&self, url: &str) -> bool {
        self.said.values().any(|named| named.servers.iter().any(|server| server.url == url))
    }

    /// Sets fields of a worker over what its owner says; `false` if there is no such worker.
    pub fn set(&mut self, worker: Worker, patch: &WorkerPatch) -> bool {
        if !self.merged.workers.contains_key(&worker) {
            return false;
        }
        self.patches.entry(worker).or_default().add(patch);
        self.merge();
        true
    }

    /// Who there is.
    #[must_use]
    pub const fn merged(&self) -> &Merged {
        &self.merged
    }

    /// Puts everything together. Who owned a worker keeps it; then the order of the sources counts.
    fn merge(&mut self) {
        let before = std::mem::take(&mut self.merged.workers);
        let mut claims: Vec<(&Source, WorkerConfig)> = Vec::new();
        for (source, named) in &self.said {
            let asked = named.servers.iter().filter_map(|server| Some((server, self.answers.get(&server.url)?)));
            let asked = asked.flat_map(|(server, answer)| answer.workers(&server.worker));
            claims.extend(named.workers.iter().cloned().chain(asked).map(|worker| (source, worker)));
        }
        let kept = |claim: &(&Source, WorkerConfig)| {
            before.get(&claim.1.worker).is_some_and(|(owner, was)| {
                let endpoint = |config: &WorkerConfig| config.events.as_ref().map(|events| events.endpoint.clone());
                owner == claim.0 && endpoint(was) == endpoint(&claim.1)
            })
        };
        // Stable: within each half the sources stay in their order.
        claims.sort_by_key(|claim| !kept(claim));
        let mut merged = Merged::default();
        let mut endpoints: HashMap<String, Worker> = HashMap::new();
        for (source, config) in claims {
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
        let said = &self.said;
        self.answers.retain(|url, _| said.values().any(|named| named.servers.iter().any(|server| server.url == *url)));
        self.merged = merged;
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

    /// `id:source` of every worker, and `id:source` of every refusal.
    fn who(directory: &Directory) -> (Vec<String>, Vec<String>) {
        let merged = directory.merged();
        let workers = merged.workers.iter().map(|(worker, (source, _))| format!("{} {source}", worker.id)).collect();
        let refused =
            merged.refused.iter().map(|refusal| format!("{} {}", refusal.worker.id, refusal.source)).collect();
        (workers, refused)
    }

    #[test]
    fn sources_are_merged_and_each_worker_has_one_owner() {
        use Source::{Admin, Config};
        // Each row: what one source says next, then who there is and who is refused.
        type Row = (Source, &'static str, &'static [&'static str], &'static [&'static str]);
        let rows: [Row; 9] = [
            (Admin, r#"[{"id": 3}]"#, &["3 admin"], &[]),
            (Config, r#"[{"id": 1, "endpoint": "tcp://h:1"}, {"id": 3}]"#, &["1 config", "3 admin"], &["3 config"]),
            (file("a"), r#"[{"id": 2}, {"id": 1}]"#, &["1 config", "2 file a", "3 admin"], &["3 config", "1 file a"]),
            (file("b"), r#"[{"id": 2}]"#, &["1 config", "2 file a", "3 admin"], &["3 config", "1 file a", "2 file b"]),
            // An endpoint belongs to one worker, however it is written.
            (
                file("b"),
                r#"[{"id": 9, "endpoint": "tcp://H:1"}]"#,
                &["1 config", "2 file a", "3 admin"],
                &["3 config", "1 file a", "9 file b"],
            ),
            // Who owns nothing any more makes room for who comes next.
            (Admin, "[]", &["1 config", "2 file a", "3 config"], &["1 file a", "9 file b"]),
            (Config, r#"[{"id": 3}]"#, &["1 file a", "2 file a", "3 config", "9 file b"], &[]),
            // Coming back does not take over.
            (Config, r#"[{"id": 3}, {"id": 1}]"#, &["1 file a", "2 file a", "3 config", "9 file b"], &["1 config"]),
            (file("a"), "[]", &["1 config", "3 config", "9 file b"], &[]),
        ];
        let mut directory = Directory::default();
        for (at, (source, json, workers, refused)) in rows.into_iter().enumerate() {
            directory.say(source, named(json));
            let (is, not) = who(&directory);
            assert_eq!(
                (is, not),
                (workers.iter().map(ToString::to_string).collect(), refused.iter().map(ToString::to_string).collect()),
                "row {at}"
            );
        }
    }

    #[test]
    fn what_is_set_holds_until_the_owner_lets_go() {
        let mut directory = Directory::default();
        let state = |directory: &Directory| directory.merged().workers.values().next().map(|(_, config)| config.state);
        let patch = WorkerPatch::parse("t", &[("draining".into(), "true".into())]).expect("valid");
        assert!(!directory.set(Worker::new(1, 0), &patch), "nobody there");
        directory.say(Source::Config, named(r#"[{"id": 1}]"#));
        assert!(directory.set(Worker::new(1, 0), &patch));
        assert_eq!(state(&directory), Some(WorkerState::Draining));
        directory.say(Source::Config, named(r#"[{"id": 1, "weight": 2}]"#));
        assert_eq!(state(&directory), Some(WorkerState::Draining), "a reload does not take it back");
        directory.say(Source::Config, NamedWorkers::default());
        directory.say(Source::Config, named(r#"[{"id": 1}]"#));
        assert_eq!(state(&directory), Some(WorkerState::Joining));
    }

    #[test]
    fn an_engine_is_a_worker_for_each_rank_once_it_answers() {
        let mut directory = Directory::default();
        directory.say(Source::Config, named(r#"[{"id": 1, "url": "http://10.0.0.9:30000", "taints": ["x"]}]"#));
        assert_eq!((who(&directory).0.len(), directory.unanswered()), (0, vec!["http://10.0.0.9:30000".to_owned()]));
        let answer = |dp_size: u32| {
            let json = format!(
                r#"{{"kv_events": {{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "t",
                "block_size": 16, "dp_size": {dp_size}}}}}"#
            );
            let answer = ServerInfo::of_sglang("http://10.0.0.9:30000", json.as_bytes()).expect("an answer");
            answer.expect("events")
        };
        directory.answered("http://10.0.0.9:30000", &answer(2));
        let endpoint =
            |(_, config): &(Source, WorkerConfig)| config.events.clone().expect("a stream").endpoint.to_string();
        let endpoints: Vec<_> = directory.merged().workers.values().map(endpoint).collect();
        assert_eq!(endpoints, ["tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558"]);
        assert!(directory.unanswered().is_empty());
        directory.answered("http://10.0.0.9:30000", &answer(1));
        assert_eq!(directory.merged().workers.len(), 1);
        directory.say(Source::Config, NamedWorkers::default());
        assert_eq!((directory.merged().workers.len(), directory.answers.len()), (0, 0));
    }

    #[test]
    fn there_are_no_more_than_there_may_be() {
        let list = |ids: std::ops::Range<usize>| {
            let list: Vec<_> = ids.map(|id| format!(r#"{{"id": {id}}}"#)).collect();
            named(&format!("[{}]", list.join(",")))
        };
        let mut directory = Directory::default();
        directory.say(file("a"), list(0..WORKERS_MAX));
        directory.say(Source::Admin, list(WORKERS_MAX..WORKERS_MAX + 1));
        assert_eq!(directory.merged().workers.len(), WORKERS_MAX);
        assert_eq!(directory.merged().refused.last().map(|refusal| &refusal.reason), Some(&RefusalReason::Full));
    }
}
