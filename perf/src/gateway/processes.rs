//! Processes with their children: what they use of the processors, and their end.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long a process may take to end.
const END_MAX: Duration = Duration::from_secs(5);

/// Processor time of each thread, nanoseconds, with the name of its process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spent(HashMap<u32, (String, u64)>);

impl Spent {
    /// What the processes of these children and all their descendants have used so far.
    #[must_use]
    pub(crate) fn of(children: &[Child]) -> Self {
        let mut spent = HashMap::new();
        for process in tree(children) {
            let name = name(process);
            let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else { continue };
            for task in tasks.flatten() {
                // A thread may end while it is asked about.
                let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
                let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok());
                let id = task.file_name().to_string_lossy().parse().ok();
                if let (Some(id), Some(ns)) = (id, ns) {
                    spent.insert(id, (name.clone(), ns));
                }
            }
        }
        Self(spent)
    }

    /// What was used since, by the names of the processes. What a thread that has ended used last is not known.
    #[must_use]
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<String, u64> {
        let mut by_name = BTreeMap::new();
        for (id, (name, ns)) in &self.0 {
            let earlier = before.0.get(id).map_or(0, |(_, ns)| *ns);
            *by_name.entry(name.clone()).or_default() += ns.saturating_sub(earlier);
        }
        by_name
    }
}

/// Ends these and their descendants.
pub(crate) fn end(children: &mut [Child]) {
    let all = tree(children);
    for child in &mut *children {
        // One that is gone already has ended.
        let _ = Pid::from_raw(child.id().cast_signed()).map(|id| kill_process(id, Signal::TERM));
    }
    let until = Instant::now() + END_MAX;
    for child in &mut *children {
        while !matches!(child.try_wait(), Ok(Some(_)) | Err(_)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
    // Those that outlived their parents.
    for process in all.into_iter().filter(|process| children.iter().all(|child| child.id() != *process)) {
        let _ = Pid::from_raw(process.cast_signed()).map(|id| kill_process(id, Signal::KILL));
    }
}

/// The processes of these children and of all their descendants.
fn tree(children: &[Child]) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(text) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        if let Some(parent) = parent(&text) {
            parents.push((process, parent));
        }
    }
    let mut all: Vec<u32> = children.iter().map(Child::id).collect();
    let mut at = 0;
    while let Some(parent) = all.get(at).copied() {
        all.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(process, _)| *process));
        at += 1;
    }
    all
}

/// The parent of a process, by its line in `stat`. Its name is in brackets and may hold anything.
fn parent(stat: &str) -> Option<u32> {
    let (_, after) = stat.rsplit_once(')')?;
    after.split_whitespace().nth(1)?.parse().ok()
}

/// The name of a process, from its command line.
fn name(process: u32) -> String {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    name_in(&String::from_utf8_lossy(&line))
}

fn name_in(line: &str) -> String {
    let first = line.split(['\0', ' ']).next().unwrap_or_default().trim_end_matches(':');
    Path::new(first).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_proc_are_read() {
        assert_eq!(parent("12 (a (b) c) S 7 12 12 0"), Some(7));
        assert_eq!(parent("nonsense"), None);
        assert_eq!(name_in("/usr/sbin/envoy\0-c\0x"), "envoy");
        assert_eq!(name_in("nginx: worker process"), "nginx");
    }

    #[test]
    fn time_is_added_up_by_process() {
        let spent = |all: &[(u32, &str, u64)]| {
            Spent(all.iter().map(|(id, name, ns)| (*id, ((*name).to_owned(), *ns))).collect())
        };
        let before = spent(&[(1, "a", 10), (2, "a", 20), (3, "b", 5)]);
        let after = spent(&[(1, "a", 15), (2, "a", 20), (4, "b", 7)]);
        let expected = [("a".to_owned(), 5), ("b".to_owned(), 7)];
        assert_eq!(after.since(&before), BTreeMap::from(expected));
    }
}
