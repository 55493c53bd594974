//! Control groups, v1 and v2, by files alone. A `Cgroup` is a path below the hierarchy's root; the
//! module knows nothing of pods. Hybrid machines (v1 controllers, v2 for systemd) count as v1.

mod devices;
mod stats;

pub use devices::{DeviceRule, default_rules};

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The machine's cgroup mounts.
#[derive(Debug, Clone)]
pub enum Hierarchy {
    /// Controller to mount point, e.g. `memory` to `/sys/fs/cgroup/memory`.
    V1(BTreeMap<String, PathBuf>),
    V2(PathBuf),
}

/// Looked up once: it does not change while a machine runs.
pub fn hierarchy() -> &'static Hierarchy {
    static HIERARCHY: OnceLock<Hierarchy> = OnceLock::new();
    HIERARCHY
        .get_or_init(|| parse_mounts(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()))
}

fn parse_mounts(mountinfo: &str) -> Hierarchy {
    let mut controllers = BTreeMap::new();
    let mut unified = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let Some(mountpoint) = left.split(' ').nth(4) else {
            continue;
        };
        let mut right = right.split(' ');
        match (right.next(), right.nth(1)) {
            (Some("cgroup2"), _) => unified = unified.or(Some(PathBuf::from(mountpoint))),
            (Some("cgroup"), Some(options)) => {
                for option in options.split(',') {
                    if V1_CONTROLLERS.contains(&option) {
                        controllers
                            .entry(option.to_owned())
                            .or_insert_with(|| PathBuf::from(mountpoint));
                    } else if option == "name=systemd" {
                        controllers
                            .entry("systemd".to_owned())
                            .or_insert_with(|| PathBuf::from(mountpoint));
                    }
                }
            }
            _ => {}
        }
    }
    match unified {
        Some(path) if !controllers.contains_key("memory") => Hierarchy::V2(path),
        _ => Hierarchy::V1(controllers),
    }
}

const V1_CONTROLLERS: &[&str] = &[
    "blkio",
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "net_cls",
    "net_prio",
    "perf_event",
    "pids",
];

/// What a container may use; `None` leaves a limit as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Resources {
    pub cpu_shares: Option<u64>,
    pub cpu_quota: Option<i64>,
    pub cpu_period: Option<u64>,
    pub cpuset_cpus: Option<String>,
    pub cpuset_mems: Option<String>,
    pub memory_limit: Option<i64>,
    pub memory_swap_limit: Option<i64>,
    pub pids_limit: Option<i64>,
    /// Bytes of huge pages, by their size as the kernel names it: `2MB`.
    pub huge_pages: Vec<(String, u64)>,
    /// Files of v2, written as they are.
    pub unified: BTreeMap<String, String>,
}

#[derive(Debug, Clone)]
pub struct Cgroup {
    /// Relative to the hierarchy's root, without a leading slash.
    path: PathBuf,
}

impl Cgroup {
    /// `path` as the kubelet writes it (`/kubepods/burstable/pod…`); `..` is refused.
    pub fn new(path: &str) -> io::Result<Cgroup> {
        let relative = PathBuf::from(path.trim_start_matches('/'));
        let plain = relative
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        if !plain || relative.as_os_str().is_empty() {
            return Err(io::Error::other(format!("{path:?} is not a cgroup path")));
        }
        Ok(Cgroup { path: relative })
    }

    pub fn child(&self, name: &str) -> Cgroup {
        Cgroup {
            path: self.path.join(name),
        }
    }

    /// Its directories with the name of the mount each is in (empty for v2). Controllers mounted
    /// together are one directory.
    pub fn directories(&self) -> Vec<(String, PathBuf)> {
        match hierarchy() {
            Hierarchy::V2(root) => vec![(String::new(), root.join(&self.path))],
            Hierarchy::V1(controllers) => {
                let mut seen = Vec::new();
                for mount in controllers.values() {
                    if !seen
                        .iter()
                        .any(|(_, path): &(String, PathBuf)| path.starts_with(mount))
                    {
                        let name = mount.file_name().map(|name| name.to_string_lossy().into_owned());
                        seen.push((name.unwrap_or_default(), mount.join(&self.path)));
                    }
                }
                seen
            }
        }
    }

    /// The directory with a controller's files; `None` where the machine has no such controller.
    fn controller(&self, name: &str) -> Option<PathBuf> {
        match hierarchy() {
            Hierarchy::V2(root) => Some(root.join(&self.path)),
            Hierarchy::V1(controllers) => Some(controllers.get(name)?.join(&self.path)),
        }
    }

    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.directories()
            .into_iter()
            .map(|(_, path)| path.join("cgroup.procs"))
            .collect()
    }

    /// One file that lists every process of the group.
    pub fn main_procs_file(&self) -> Option<PathBuf> {
        let name = match hierarchy() {
            Hierarchy::V2(_) => "",
            Hierarchy::V1(controllers) => ["pids", "memory", "cpu", "freezer"]
                .into_iter()
                .find(|name| controllers.contains_key(*name))?,
        };
        Some(self.controller(name)?.join("cgroup.procs"))
    }

    pub fn oom_file(&self) -> Option<PathBuf> {
        let directory = self.controller("memory")?;
        Some(match hierarchy() {
            Hierarchy::V1(_) => directory.join("memory.oom_control"),
            Hierarchy::V2(_) => directory.join("memory.events"),
        })
    }

    /// Makes the group in every hierarchy, with the controllers on along the way.
    pub fn create(&self) -> io::Result<()> {
        match hierarchy() {
            Hierarchy::V2(root) => {
                let mut at = root.clone();
                for part in self.path.components() {
                    enable_controllers(&at);
                    at.push(part);
                    make_directory(&at)?;
                }
                Ok(())
            }
            Hierarchy::V1(controllers) => {
                for (name, mount) in controllers {
                    let mut at = mount.clone();
                    for part in self.path.components() {
                        let parent = at.clone();
                        at.push(part);
                        make_directory(&at)?;
                        if name == "cpuset" {
                            // A new cpuset is empty, and an empty one takes no process.
                            inherit(&parent, &at, "cpuset.cpus")?;
                            inherit(&parent, &at, "cpuset.mems")?;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    pub fn apply(&self, resources: &Resources) -> io::Result<()> {
        match hierarchy() {
            Hierarchy::V1(_) => self.apply_v1(resources),
            Hierarchy::V2(_) => self.apply_v2(resources),
        }
    }

    fn write(&self, controller: &str, file: &str, value: &str) -> io::Result<()> {
        let Some(directory) = self.controller(controller) else {
            return Ok(());
        };
        let path = directory.join(file);
        std::fs::write(&path, value).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("write {value:?} to {}: {error}", path.display()),
            )
        })
    }

    /// A kernel that does not count swap has no files to limit it.
    fn write_if_there(&self, controller: &str, file: &str, value: &str) -> io::Result<()> {
        let directory = self.controller(controller);
        if directory.is_none_or(|directory| !directory.join(file).exists()) {
            return Ok(());
        }
        self.write(controller, file, value)
    }

    /// Memory first: of all limits it is the one that the kernel may refuse, and then nothing has changed.
    fn apply_v1(&self, resources: &Resources) -> io::Result<()> {
        if let Some(limit) = resources.memory_limit {
            // Memory plus swap may never be below memory: a smaller limit of both is in the way.
            let both = self.read_number("memory", "memory.memsw.limit_in_bytes");
            if both.is_some_and(|both| both < limit) {
                self.write("memory", "memory.memsw.limit_in_bytes", "-1")?;
            }
            self.write("memory", "memory.limit_in_bytes", &limit.to_string())?;
        }
        if let Some(limit) = resources.memory_swap_limit {
            self.write_if_there("memory", "memory.memsw.limit_in_bytes", &limit.to_string())?;
        }
        if let Some(shares) = resources.cpu_shares {
            self.write("cpu", "cpu.shares", &shares.max(2).to_string())?;
        }
        if let Some(period) = resources.cpu_period {
            self.write("cpu", "cpu.cfs_period_us", &period.to_string())?;
        }
        if let Some(quota) = resources.cpu_quota {
            self.write("cpu", "cpu.cfs_quota_us", &quota.to_string())?;
        }
        if let Some(cpus) = &resources.cpuset_cpus {
            self.write("cpuset", "cpuset.cpus", cpus)?;
        }
        if let Some(mems) = &resources.cpuset_mems {
            self.write("cpuset", "cpuset.mems", mems)?;
        }
        if let Some(limit) = resources.pids_limit {
            self.write("pids", "pids.max", &limit_or_max(limit))?;
        }
        self.limit_huge_pages(resources, "limit_in_bytes")
    }

    /// A size that the kernel does not count has no file, and no pages.
    fn limit_huge_pages(&self, resources: &Resources, end: &str) -> io::Result<()> {
        for (size, limit) in &resources.huge_pages {
            let file = format!("hugetlb.{size}.{end}");
            let is_counted = self
                .controller("hugetlb")
                .is_some_and(|directory| !file.contains('/') && directory.join(&file).exists());
            if is_counted {
                self.write("hugetlb", &file, &limit.to_string())?;
            } else if *limit > 0 {
                return Err(io::Error::other(format!(
                    "the kernel does not limit huge pages of {size}"
                )));
            }
        }
        Ok(())
    }

    fn read_number(&self, controller: &str, file: &str) -> Option<i64> {
        let text = std::fs::read_to_string(self.controller(controller)?.join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// Whether processes of the group use more memory than a limit would allow them. v2 takes every limit and kills
    /// what is above it; v1 refuses by itself what it cannot reclaim.
    pub fn uses_more_than(&self, limit: i64) -> Option<i64> {
        match hierarchy() {
            Hierarchy::V1(_) => None,
            Hierarchy::V2(_) => self
                .read_number("memory", "memory.current")
                .filter(|used| *used > limit),
        }
    }

    fn apply_v2(&self, resources: &Resources) -> io::Result<()> {
        if let Some(shares) = resources.cpu_shares {
            self.write("cpu", "cpu.weight", &weight(shares).to_string())?;
        }
        if resources.cpu_quota.is_some() || resources.cpu_period.is_some() {
            let quota = resources.cpu_quota.map_or_else(|| "max".into(), limit_or_max);
            let period = resources
                .cpu_period
                .filter(|period| *period > 0)
                .unwrap_or(100_000);
            self.write("cpu", "cpu.max", &format!("{quota} {period}"))?;
        }
        if let Some(cpus) = &resources.cpuset_cpus {
            self.write("cpuset", "cpuset.cpus", cpus)?;
        }
        if let Some(mems) = &resources.cpuset_mems {
            self.write("cpuset", "cpuset.mems", mems)?;
        }
        if let Some(limit) = resources.memory_limit {
            self.write("memory", "memory.max", &limit_or_max(limit))?;
        }
        if let (Some(both), Some(memory)) = (resources.memory_swap_limit, resources.memory_limit)
            && both >= memory
        {
            // v2 counts swap by itself, v1's number is memory and swap together.
            self.write_if_there("memory", "memory.swap.max", &(both - memory).to_string())?;
        }
        if let Some(limit) = resources.pids_limit {
            self.write("pids", "pids.max", &limit_or_max(limit))?;
        }
        self.limit_huge_pages(resources, "max")?;
        for (file, value) in &resources.unified {
            if file.contains('/') {
                return Err(io::Error::other(format!("{file:?} is not a cgroup file")));
            }
            self.write("", file, value)?;
        }
        Ok(())
    }

    pub fn restrict_devices(&self, rules: &[DeviceRule]) -> io::Result<()> {
        match (hierarchy(), self.controller("devices")) {
            (Hierarchy::V1(_), Some(directory)) => devices::apply_v1(&directory, rules),
            (Hierarchy::V2(_), Some(directory)) => devices::attach_v2(&directory, rules),
            (_, None) => Ok(()),
        }
    }

    pub fn processes(&self) -> Vec<i32> {
        let Some(file) = self.main_procs_file() else {
            return Vec::new();
        };
        let mut pids = Vec::new();
        collect_processes(file.parent().unwrap_or(Path::new("/")), &mut pids);
        pids
    }

    /// SIGKILL to every process in it and below. True when none was left.
    pub fn kill(&self) -> bool {
        if let Hierarchy::V2(root) = hierarchy()
            && !self.processes().contains(&(std::process::id() as i32))
            && std::fs::write(root.join(&self.path).join("cgroup.kill"), "1").is_ok()
        {
            return self.processes().is_empty();
        }
        // Whoever cleans up may have been put into the group itself.
        use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
        let own = std::process::id() as i32;
        let others = || self.processes().into_iter().filter(move |pid| *pid != own);
        let handles: Vec<_> = others()
            .filter_map(|pid| Some((pid, pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?)))
            .collect();
        // Listed once more: a process that ended before its handle was opened may have left its number to
        // another one, which is not in this group.
        let still: Vec<i32> = others().collect();
        for (pid, handle) in handles.iter().filter(|(pid, _)| still.contains(pid)) {
            if let Err(error) = pidfd_send_signal(handle, Signal::KILL) {
                tracing::debug!(pid, %error, "cannot kill a process of a cgroup");
            }
        }
        still.is_empty()
    }

    /// Removes the group and all below it; processes must be gone. Missing is fine.
    pub fn remove(&self) -> io::Result<()> {
        let mut result = Ok(());
        for (_, directory) in self.directories() {
            if let Err(error) = remove_tree(&directory) {
                result = Err(io::Error::new(
                    error.kind(),
                    format!("remove {}: {error}", directory.display()),
                ));
            }
        }
        result
    }
}

fn collect_processes(directory: &Path, pids: &mut Vec<i32>) {
    let procs = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    pids.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_processes(&entry.path(), pids);
        }
    }
}

fn remove_tree(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    match std::fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io::Error::new(
            error.kind(),
            format!("make cgroup {}: {error}", path.display()),
        )),
        _ => Ok(()),
    }
}

fn inherit(parent: &Path, child: &Path, file: &str) -> io::Result<()> {
    let own = std::fs::read_to_string(child.join(file)).unwrap_or_default();
    if own.trim().is_empty() {
        let value = std::fs::read_to_string(parent.join(file))?;
        std::fs::write(child.join(file), value.trim())?;
    }
    Ok(())
}

fn enable_controllers(directory: &Path) {
    let available = std::fs::read_to_string(directory.join("cgroup.controllers")).unwrap_or_default();
    for controller in available.split_whitespace() {
        // One at a time: a controller that cannot be had must not take the others along.
        let _ = std::fs::write(directory.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

fn limit_or_max(limit: i64) -> String {
    if limit <= 0 {
        "max".into()
    } else {
        limit.to_string()
    }
}

/// v1's shares (2 to 262144) on v2's scale (1 to 10000).
fn weight(shares: u64) -> u64 {
    let shares = shares.clamp(2, 262_144);
    1 + (shares - 2) * 9999 / 262_142
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts() {
        let v1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                  35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                  41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let Hierarchy::V1(controllers) = parse_mounts(v1) else {
            panic!("v1 expected")
        };
        assert_eq!(
            controllers["cpuacct"],
            PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")
        );
        assert_eq!(controllers.len(), 3);
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert!(matches!(parse_mounts(v2), Hierarchy::V2(path) if path == Path::new("/sys/fs/cgroup")));
    }

    #[test]
    fn weights() {
        let check = |shares, expected| assert_eq!(weight(shares), expected, "{shares}");
        check(0, 1);
        check(2, 1);
        check(1024, 39);
        check(262_144, 10_000);
        check(u64::MAX, 10_000);
    }

    /// Memory and swap together never have more than memory, also when that grows and shrinks.
    #[test]
    fn swap_follows_memory_on_v1() {
        let Hierarchy::V1(controllers) = hierarchy() else {
            return;
        };
        let has_swap = |mount: &PathBuf| mount.join("memory.memsw.limit_in_bytes").exists();
        if !controllers.get("memory").is_some_and(has_swap) {
            return;
        }
        let cgroup = Cgroup::new(&format!("skiff-test-swap-{}", std::process::id())).unwrap();
        cgroup.create().unwrap();
        let limits = [64_i64 << 20, 128 << 20, 32 << 20].map(|limit| {
            let resources = Resources {
                memory_limit: Some(limit),
                memory_swap_limit: Some(limit),
                ..Default::default()
            };
            let applied = cgroup.apply(&resources);
            let both = cgroup.read_number("memory", "memory.memsw.limit_in_bytes");
            (applied.is_ok(), both == Some(limit))
        });
        // Less of both than of memory alone is an error, not a container without a limit of swap.
        let wrong = cgroup.apply(&Resources {
            memory_swap_limit: Some(16 << 20),
            ..Default::default()
        });
        cgroup.remove().unwrap();
        assert_eq!(limits, [(true, true); 3]);
        assert!(wrong.is_err());
    }

    #[test]
    fn paths() {
        assert!(Cgroup::new("/kubepods/pod1").is_ok());
        assert!(Cgroup::new("/").is_err());
        assert!(Cgroup::new("/a/../b").is_err());
    }
}
