//! How much memory the machine and the process's cgroup allow, how much the process has, how long its threads computed, and
//! on how many NUMA nodes its processors are.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// What bounds the memory of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllowedBy {
    /// The machine has no more.
    Machine,
    /// The process's cgroup, or one above it, has a limit.
    Cgroup,
}

impl AllowedBy {
    /// The name in logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Cgroup => "cgroup",
        }
    }
}

/// The memory that the process may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedMemory {
    /// Bytes.
    pub bytes: u64,
    /// What bounds them.
    pub by: AllowedBy,
}

/// Reads the memory of the machine, and the limits of the process's cgroups of either version. `root` = `/`, except in
/// tests. `None` = the system does not tell.
#[must_use]
pub fn allowed_memory(root: &Path) -> Option<AllowedMemory> {
    let machine = memory_of_machine(&fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    let cgroups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limit = cgroup_files(&cgroups).into_iter().filter_map(|file| limit_in(&root.join(file))).min();
    Some(match limit.filter(|limit| *limit < machine) {
        Some(bytes) => AllowedMemory { bytes, by: AllowedBy::Cgroup },
        None => AllowedMemory { bytes: machine, by: AllowedBy::Machine },
    })
}

/// `MemTotal` of `/proc/meminfo`, bytes.
fn memory_of_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The files with the limits of the cgroups that `/proc/self/cgroup` names, and of those above them. In a container the
/// path may be that of the host, of which only the last cgroup is mounted: the root of the mount is always among them.
fn cgroup_files(cgroups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, names): (_, &[_]) = match controllers {
            "" => ("sys/fs/cgroup", &["memory.max", "memory.high"]),
            "memory" => ("sys/fs/cgroup/memory", &["memory.limit_in_bytes"]),
            _ => continue,
        };
        let mut folder = PathBuf::from(path.trim_start_matches('/'));
        loop {
            files.extend(names.iter().map(|name| Path::new(mount).join(&folder).join(name)));
            if !folder.pop() {
                break;
            }
        }
    }
    files
}

/// The limit in a file of a cgroup; `None` = there is none.
fn limit_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok().filter(|limit| *limit > 0)
}

/// The NUMA nodes that these processors belong to, ascending. `root` = `/`, except in tests. Empty = the kernel does not
/// tell.
#[must_use]
pub fn numa_nodes(root: &Path, processors: &[usize]) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(root.join("sys/devices/system/node")) else { return Vec::new() };
    let node = |entry: fs::DirEntry| {
        let number: u32 = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
        let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
        processors.iter().any(|processor| is_listed(list.trim(), *processor)).then_some(number)
    };
    let mut nodes: Vec<u32> = entries.flatten().filter_map(node).collect();
    nodes.sort_unstable();
    nodes
}

/// Whether a list in the kernel's form, such as `0-3,8`, has a number.
fn is_listed(list: &str, number: usize) -> bool {
    let within = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((first.parse().ok()?..=last.parse().ok()?).contains(&number))
    };
    list.split(',').any(|range| within(range).unwrap_or(false))
}

/// The processor time of the calling thread.
#[must_use]
pub fn processor_time() -> Duration {
    // The clock cannot run backwards, and is never negative.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Reads the resident memory of this process. The file stays open, so that a thread that may open none can read it.
#[derive(Debug)]
pub struct ResidentMemory {
    file: File,
    /// Asked for in advance, because the first call may open a file.
    page_bytes: u64,
}

impl ResidentMemory {
    /// Opens the kernel's file; `None` = the kernel does not tell. Call it before the sandbox.
    #[must_use]
    pub fn open() -> Option<Self> {
        let page_bytes = rustix::param::page_size() as u64;
        File::open(statm()).ok().map(|file| Self { file, page_bytes })
    }

    /// The resident memory, bytes; `None` = the kernel does not tell. It takes no lock of the process.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        // Seven numbers.
        let mut text = [0; 160];
        let read = self.file.read_at(&mut text, 0).ok()?;
        resident_in(std::str::from_utf8(text.get(..read)?).ok()?, self.page_bytes)
    }
}

fn statm() -> PathBuf {
    // Tests of the whole process give it the memory that they need. Only builds with debug assertions have this.
    #[cfg(debug_assertions)]
    if let Some(path) = std::env::var_os("KVROUTED_STATM") {
        return path.into();
    }
    "/proc/self/statm".into()
}

/// The second number of `/proc/self/statm`: resident pages.
fn resident_in(statm: &str, page_bytes: u64) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(page_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:        1000 kB\nMemFree:          10 kB\n");

    #[test]
    fn the_lowest_limit_of_the_cgroups_counts_if_it_is_below_the_machine() {
        let by_cgroup = |bytes| Some(AllowedMemory { bytes, by: AllowedBy::Cgroup });
        let machine = Some(AllowedMemory { bytes: 1000 << 10, by: AllowedBy::Machine });
        let v2 = ("proc/self/cgroup", "0::/kube/pod/app\n");
        let v1 = ("proc/self/cgroup", "5:devices:/x\n4:memory:/docker/id\n0::/\n");
        type Files<'a> = &'a [(&'a str, &'a str)];
        let cases: [(Files<'_>, Option<AllowedMemory>); 8] = [
            (&[MEMINFO], machine),
            (&[MEMINFO, v2], machine),
            (&[MEMINFO, v2, ("sys/fs/cgroup/kube/pod/app/memory.max", "max\n")], machine),
            (&[MEMINFO, v2, ("sys/fs/cgroup/kube/pod/app/memory.max", "9000000000\n")], machine),
            (
                &[
                    MEMINFO,
                    v2,
                    ("sys/fs/cgroup/kube/pod/app/memory.max", "800000\n"),
                    ("sys/fs/cgroup/kube/memory.high", "700000\n"),
                ],
                by_cgroup(700_000),
            ),
            (&[MEMINFO, v1, ("sys/fs/cgroup/memory/docker/id/memory.limit_in_bytes", "600000\n")], by_cgroup(600_000)),
            (&[MEMINFO, v1, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n")], by_cgroup(500_000)),
            (&[MEMINFO, v1, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")], machine),
        ];
        for (files, allowed) in cases {
            assert_eq!(allowed_memory(root(files).path()), allowed, "{files:?}");
        }
        assert_eq!(allowed_memory(root(&[v2]).path()), None);
        assert_eq!(allowed_memory(root(&[("proc/meminfo", "MemTotal: many\n")]).path()), None);
    }

    #[test]
    fn the_nodes_of_the_processors_are_those_whose_lists_have_one() {
        let two = root(&[
            ("sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("sys/devices/system/node/node10/cpulist", "4-7,12\n"),
            ("sys/devices/system/node/node2/cpulist", "\n"),
            ("sys/devices/system/node/possible", "0-10\n"),
            ("sys/devices/system/node/node3/other", "0\n"),
        ]);
        let nodes = |processors: &[usize]| numa_nodes(two.path(), processors);
        assert_eq!(nodes(&[0, 1, 11]), [0]);
        assert_eq!(nodes(&[12, 3]), [0, 10]);
        assert_eq!((nodes(&[13]), nodes(&[])), (vec![], vec![]));
        assert!(numa_nodes(root(&[MEMINFO]).path(), &[0]).is_empty(), "a kernel without nodes");
        assert!(!is_listed("0-x,-3,", 0) && is_listed("x,3-2,0", 0), "what cannot be read lists nothing");
    }

    #[test]
    fn this_machine_tells_what_it_allows_and_what_is_resident() {
        let allowed = allowed_memory(Path::new("/")).expect("Linux tells");
        let resident = ResidentMemory::open().and_then(|file| file.bytes()).expect("Linux tells");
        assert!(resident > 1 << 20 && resident < allowed.bytes, "{resident} of {allowed:?}");
        assert_eq!((resident_in("9 7 1 1 0 2 0\n", 4096), resident_in("9", 4096)), (Some(7 * 4096), None));
    }
}
