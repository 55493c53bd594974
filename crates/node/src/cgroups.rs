//! The cgroups of pods: `<root>/kubepods/{burstable,besteffort}/pod<uid>` on v1 and v2, with the pod's own
//! shares and limits. Containers' cgroups below are the runtime's business.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use skiff_pods::requests::spec_requests;

use crate::cgroup_stats::CgroupFiles;
use crate::cgroup_usage::CgroupMemory;
use crate::configuration::Reserved;
use crate::machine::{self, Machine, huge_page_file_name, huge_page_name};
use crate::pods;
use crate::resources::{
    CgroupResources, MIN_SHARES, QUOTA_PERIOD, QosClass, milli_cpu_to_shares, pod_cgroup_resources, qos_class,
};
use crate::swap::SwapAccounting;
use crate::topology::Managers;

/// Where the hierarchies are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchies {
    /// Pods get no cgroups of their own.
    None,
    V1 {
        /// Controller to mount point.
        controllers: HashMap<String, PathBuf>,
        /// Every mount point, also of hierarchies without a controller (`name=systemd`) and of v2 beside v1:
        /// runtimes make cgroups in all of them.
        mounts: Vec<PathBuf>,
    },
    V2(PathBuf),
}

impl Hierarchies {
    /// Reads the mounts of this process. A v2 mount without controllers beside v1 ones is v1.
    pub fn detect() -> io::Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        Ok(Self::from_mountinfo(&mounts))
    }

    fn from_mountinfo(mounts: &str) -> Self {
        let mut v1 = HashMap::new();
        let mut v2 = None;
        let mut all = Vec::new();
        for line in mounts.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let Some(point) = left.split(' ').nth(4) else {
                continue;
            };
            let mut right = right.split(' ');
            let kind = right.next();
            if matches!(kind, Some("cgroup" | "cgroup2")) && !all.contains(&PathBuf::from(point)) {
                all.push(PathBuf::from(point));
            }
            match kind {
                Some("cgroup2") => v2 = v2.or_else(|| Some(PathBuf::from(point))),
                Some("cgroup") => {
                    let options = right.nth(1).unwrap_or_default();
                    for option in options.split(',') {
                        if CONTROLLERS.contains(&option) {
                            v1.entry(option.to_owned())
                                .or_insert_with(|| PathBuf::from(point));
                        }
                    }
                }
                _ => {}
            }
        }
        match v2 {
            Some(point) if v1.is_empty() => Hierarchies::V2(point),
            _ => Hierarchies::V1 {
                controllers: v1,
                mounts: all,
            },
        }
    }
}

const CONTROLLERS: [&str; 12] = [
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "pids",
    "blkio",
    "devices",
    "freezer",
    "hugetlb",
    "net_cls",
    "net_prio",
    "perf_event",
];
/// On v1 these get a pod directory from us; the runtime makes what it needs in the others.
const MANAGED_V1: [&str; 3] = ["cpu", "memory", "pids"];

/// The kernel counts memory limits in pages.
const PAGE: i64 = 4096;
/// What v1 shows where there is no limit is the largest number of whole pages.
const UNLIMITED_V1: i64 = i64::MAX / PAGE * PAGE;

/// A pod's cgroup as it is and as it shall be. On v2 `cpu_shares` are weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodConfig {
    pub current: CgroupResources,
    pub wanted: CgroupResources,
}

impl PodConfig {
    /// A limit that is not asked for is left as it is.
    pub fn differs(&self) -> bool {
        let (current, wanted) = (&self.current, &self.wanted);
        let limit = |wanted: Option<i64>, current: Option<i64>| wanted.is_some() && wanted != current;
        wanted.cpu_shares != current.cpu_shares
            || limit(wanted.cpu_quota, current.cpu_quota)
            || limit(wanted.memory_limit, current.memory_limit)
    }
}

/// What of a pod's cgroup is changed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Memory,
    Quota,
    Shares,
}

pub struct Cgroups {
    hierarchies: Hierarchies,
    root: String,
    pod_max_pids: Option<i64>,
    /// The sizes of huge pages, in KiB.
    page_sizes: Vec<u64>,
    /// Whether limits of CPU are enforced.
    has_quota: bool,
    /// Knows which pods have CPUs of their own.
    managers: Option<Arc<Managers>>,
    /// CPU requests of burstable pods, whose sum is the weight of their common parent.
    burstable: Mutex<HashMap<String, i64>>,
}

impl Cgroups {
    pub fn new(root: &str, per_qos: bool) -> io::Result<Self> {
        let hierarchies = if per_qos {
            Hierarchies::detect()?
        } else {
            Hierarchies::None
        };
        Ok(Self::with_hierarchies(root, hierarchies))
    }

    fn with_hierarchies(root: &str, hierarchies: Hierarchies) -> Self {
        Cgroups {
            hierarchies,
            root: root.trim_matches('/').to_owned(),
            pod_max_pids: None,
            page_sizes: Vec::new(),
            has_quota: true,
            managers: None,
            burstable: Mutex::default(),
        }
    }

    /// Limits that all pods get when their cgroups are made.
    pub fn with_limits(self, pod_max_pids: Option<i64>, page_sizes: Vec<u64>) -> Self {
        Cgroups {
            pod_max_pids,
            page_sizes,
            ..self
        }
    }

    pub fn with_quota(self, has_quota: bool) -> Self {
        Cgroups { has_quota, ..self }
    }

    pub fn with_managers(self, managers: Arc<Managers>) -> Self {
        Cgroups {
            managers: Some(managers),
            ..self
        }
    }

    /// Whether containers can be put on certain CPUs. Where pods have no cgroups of ours, that is the runtime's business.
    pub fn has_cpuset(&self) -> bool {
        match &self.hierarchies {
            Hierarchies::None => true,
            Hierarchies::V1 { controllers, .. } => controllers.contains_key("cpuset"),
            Hierarchies::V2(mount) => {
                let all = std::fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
                all.split_whitespace().any(|controller| controller == "cpuset")
            }
        }
    }

    /// How the kernel counts the swap of pods, whose cgroups are below ours or wherever the runtime puts them.
    pub fn swap_accounting(&self) -> SwapAccounting {
        let of = |hierarchies: &Hierarchies, v2_path: &str| match hierarchies {
            Hierarchies::V1 { controllers, .. } => {
                let memory = controllers.get("memory");
                memory.map_or(SwapAccounting::None, |memory| SwapAccounting::v1(memory))
            }
            Hierarchies::V2(mount) => SwapAccounting::v2(&join(mount, v2_path)),
            Hierarchies::None => SwapAccounting::None,
        };
        if self.hierarchies != Hierarchies::None {
            return of(&self.hierarchies, &self.class_path(QosClass::Guaranteed));
        }
        // COMPAT: as upstream, by this process' own cgroup.
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::"));
        let hierarchies = Hierarchies::detect().unwrap_or(Hierarchies::None);
        of(&hierarchies, own.unwrap_or_default())
    }

    /// What the pod's cgroup shall have. COMPAT: no quota, if a container has CPUs of its own.
    pub fn pod_resources(&self, pod: &Pod) -> CgroupResources {
        let mut wanted = pod_cgroup_resources(pod);
        let managers = self.managers.as_ref();
        let is_exclusive = managers.is_some_and(|managers| managers.cpus.has_exclusive(pods::uid(pod)));
        if is_exclusive || !self.has_quota {
            wanted.cpu_quota = None;
        }
        wanted
    }

    fn class_path(&self, class: QosClass) -> String {
        match class {
            QosClass::Guaranteed => format!("/{}/kubepods", self.root),
            QosClass::Burstable => format!("/{}/kubepods/burstable", self.root),
            QosClass::BestEffort => format!("/{}/kubepods/besteffort", self.root),
        }
    }

    /// Where the kernel tells how much memory all pods together use; `None` where they have no cgroup.
    pub fn memory_of_pods(&self) -> Option<CgroupMemory> {
        let (mount, is_v2) = match &self.hierarchies {
            Hierarchies::None => return None,
            Hierarchies::V1 { controllers, .. } => (controllers.get("memory")?, false),
            Hierarchies::V2(mount) => (mount, true),
        };
        Some(CgroupMemory {
            is_v2,
            folder: join(mount, &self.class_path(QosClass::Guaranteed)),
        })
    }

    /// Where the kernel counts for one cgroup; `None` where pods have none.
    fn files(&self, path: &str) -> Option<CgroupFiles> {
        match &self.hierarchies {
            Hierarchies::None => None,
            Hierarchies::V1 { controllers, .. } => {
                let folders = controllers.iter();
                let folders = folders.map(|(name, mount)| (name.clone(), join(mount, path)));
                Some(CgroupFiles::V1(folders.collect()))
            }
            Hierarchies::V2(mount) => Some(CgroupFiles::V2(join(mount, path))),
        }
    }

    /// Those of all pods together.
    pub fn files_of_pods(&self) -> Option<CgroupFiles> {
        self.files(&self.class_path(QosClass::Guaranteed))
    }

    /// Those of the processes that the embedded runtime starts for pods; `None` where another runtime serves.
    pub fn files_of_shims(&self) -> Option<CgroupFiles> {
        self.files(&format!("/{}/shims", self.root))
    }

    pub fn pod_files(&self, pod: &Pod) -> Option<CgroupFiles> {
        self.files(&self.pod_path(pod))
    }

    /// The pod's cgroup as the runtime is told: its containers go below.
    pub fn pod_path(&self, pod: &Pod) -> String {
        if self.hierarchies == Hierarchies::None {
            return String::new();
        }
        format!("{}/pod{}", self.class_path(qos_class(pod)), pods::uid(pod))
    }

    /// Makes the parents of all pods.
    pub fn set_up(&self) -> io::Result<()> {
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let shares = (class != QosClass::Guaranteed).then_some(MIN_SHARES);
            self.make(&self.class_path(class), shares, None, None)?;
        }
        Ok(())
    }

    /// Keeps all pods together to what is not reserved, so that they cannot take it from the system.
    pub fn confine(&self, reserved: &Reserved, machine: &Machine) -> io::Result<()> {
        let shares = milli_cpu_to_shares((machine.cpus * 1000 - reserved.cpu_milli).max(0));
        let path = self.class_path(QosClass::Guaranteed);
        self.make(&path, Some(shares), None, None)?;
        let left = |all: i64, kept: i64| (kept > 0).then(|| (all - kept).max(PAGE).to_string());
        let memory = left(machine.memory, reserved.memory);
        let pids = left(machine::max_pids(), reserved.pids);
        match &self.hierarchies {
            Hierarchies::None => Ok(()),
            Hierarchies::V1 { controllers, .. } => {
                let write = |controller: &str, file: &str, value: &str| match controllers.get(controller) {
                    Some(mount) => write_value(&join(mount, &path).join(file), value),
                    None => Ok(()),
                };
                // One of an earlier life may have been smaller.
                write(
                    "memory",
                    "memory.limit_in_bytes",
                    memory.as_deref().unwrap_or("-1"),
                )?;
                write("pids", "pids.max", pids.as_deref().unwrap_or("max"))
            }
            Hierarchies::V2(mount) => {
                let directory = join(mount, &path);
                write_value(&directory.join("memory.max"), memory.as_deref().unwrap_or("max"))?;
                write_value(&directory.join("pids.max"), pids.as_deref().unwrap_or("max"))
            }
        }
    }

    /// Makes the pod's cgroup with its shares and limits. One that is there keeps what it has: to change that is a
    /// resize, whose order matters. Returns whether it was made.
    pub fn create_pod(&self, pod: &Pod) -> io::Result<bool> {
        let path = self.pod_path(pod);
        let is_new = !self.exists(&path);
        if is_new {
            let wanted = self.pod_resources(pod);
            self.make(
                &path,
                Some(wanted.cpu_shares),
                wanted.cpu_quota,
                wanted.memory_limit,
            )?;
            self.limit_the_rest(pod, &path)?;
        }
        if qos_class(pod) == QosClass::Burstable {
            let requested = pod.spec.as_ref().map_or(0, |spec| spec_requests(spec).milli_cpu);
            let total = {
                let mut burstable = self.burstable.lock();
                let before = burstable.insert(pods::uid(pod).to_owned(), requested);
                (before != Some(requested)).then(|| burstable.values().sum())
            };
            if let Some(total) = total {
                self.weigh_burstable(total);
            }
        }
        Ok(is_new)
    }

    /// What cannot be changed while the pod lives: processes and huge pages.
    fn limit_the_rest(&self, pod: &Pod, path: &str) -> io::Result<()> {
        let requests = pod.spec.as_ref().map(spec_requests).unwrap_or_default();
        let huge = self.page_sizes.iter().map(|kib| {
            let amount = requests.get(&format!("hugepages-{}", huge_page_name(*kib)));
            (huge_page_file_name(*kib), amount)
        });
        let directory = |controller: &str| match &self.hierarchies {
            Hierarchies::None => None,
            Hierarchies::V1 { controllers, .. } => controllers.get(controller).map(|mount| join(mount, path)),
            Hierarchies::V2(mount) => Some(join(mount, path)),
        };
        if let (Some(limit), Some(directory)) = (self.pod_max_pids, directory("pids")) {
            write_value(&directory.join("pids.max"), &limit.to_string())?;
        }
        let v2 = matches!(self.hierarchies, Hierarchies::V2(_));
        let Some(directory) = directory("hugetlb") else {
            return Ok(());
        };
        if !v2 {
            std::fs::create_dir_all(&directory)?;
        }
        let end = if v2 { "max" } else { "limit_in_bytes" };
        for (size, amount) in huge {
            let file = directory.join(format!("hugetlb.{size}.{end}"));
            // On v2 the controller may not have been handed down.
            if !v2 || file.exists() {
                write_value(&file, &amount.to_string())?;
            }
        }
        Ok(())
    }

    fn exists(&self, path: &str) -> bool {
        match &self.hierarchies {
            Hierarchies::None => true,
            Hierarchies::V1 { controllers, .. } => MANAGED_V1
                .iter()
                .filter_map(|controller| controllers.get(*controller))
                .all(|mount| join(mount, path).is_dir()),
            Hierarchies::V2(mount) => join(mount, path).is_dir(),
        }
    }

    /// What the pod's cgroup has, and what it shall have, both as the kernel counts. `None` where pods have no cgroups.
    pub fn pod_config(&self, pod: &Pod) -> io::Result<Option<PodConfig>> {
        let path = self.pod_path(pod);
        let wanted = self.pod_resources(pod);
        let in_pages = |limit: i64| limit / PAGE * PAGE;
        let (current, shares) = match &self.hierarchies {
            Hierarchies::None => return Ok(None),
            Hierarchies::V1 { controllers, .. } => {
                let read = |controller: &str, file: &str| match controllers.get(controller) {
                    Some(mount) => read_number(&join(mount, &path).join(file)).map(Some),
                    None => Ok(None),
                };
                let current = CgroupResources {
                    cpu_shares: read("cpu", "cpu.shares")?.unwrap_or(wanted.cpu_shares),
                    cpu_quota: read("cpu", "cpu.cfs_quota_us")?.filter(|quota| *quota > 0),
                    memory_limit: read("memory", "memory.limit_in_bytes")?
                        .filter(|limit| *limit < UNLIMITED_V1),
                };
                (current, wanted.cpu_shares)
            }
            Hierarchies::V2(mount) => {
                let directory = join(mount, &path);
                let quota = std::fs::read_to_string(directory.join("cpu.max"))?;
                let memory = std::fs::read_to_string(directory.join("memory.max"))?;
                let current = CgroupResources {
                    cpu_shares: read_number(&directory.join("cpu.weight"))?,
                    cpu_quota: quota
                        .split_whitespace()
                        .next()
                        .and_then(|quota| quota.parse().ok()),
                    memory_limit: memory.trim().parse().ok(),
                };
                (current, shares_to_weight(wanted.cpu_shares))
            }
        };
        Ok(Some(PodConfig {
            current,
            wanted: CgroupResources {
                cpu_shares: shares,
                cpu_quota: wanted.cpu_quota,
                memory_limit: wanted.memory_limit.map(in_pages),
            },
        }))
    }

    /// Gives the pod's cgroup one part of what the pod asks for.
    pub fn set_pod(&self, pod: &Pod, part: Part) -> io::Result<()> {
        let path = self.pod_path(pod);
        let wanted = self.pod_resources(pod);
        match part {
            Part::Memory => self.make(&path, None, None, wanted.memory_limit),
            Part::Quota => self.make(&path, None, wanted.cpu_quota, None),
            Part::Shares => self.make(&path, Some(wanted.cpu_shares), None, None),
        }
    }

    /// The memory that all of the pod uses, page cache included.
    pub fn pod_memory(&self, pod: &Pod) -> io::Result<i64> {
        let path = self.pod_path(pod);
        match &self.hierarchies {
            Hierarchies::None => Err(io::Error::other("pods have no cgroups")),
            Hierarchies::V1 { controllers, .. } => match controllers.get("memory") {
                Some(mount) => read_number(&join(mount, &path).join("memory.usage_in_bytes")),
                None => Err(io::Error::other("there is no memory controller")),
            },
            Hierarchies::V2(mount) => read_number(&join(mount, &path).join("memory.current")),
        }
    }

    fn weigh_burstable(&self, total_milli: i64) {
        let path = self.class_path(QosClass::Burstable);
        if let Err(error) = self.make(&path, Some(milli_cpu_to_shares(total_milli)), None, None) {
            tracing::warn!(%error, "cannot set the weight of burstable pods");
        }
    }

    /// Removes the pod's cgroup and whatever is left below it, in every hierarchy. For a pod whose containers have
    /// ended: a process that is still in there belongs to nobody, and is killed before the next attempt.
    pub fn remove_pod(&self, uid: &str) -> io::Result<()> {
        let total = {
            let mut burstable = self.burstable.lock();
            burstable.remove(uid).map(|_| burstable.values().sum())
        };
        if let Some(total) = total {
            self.weigh_burstable(total);
        }
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let relative = format!("{}/pod{uid}", self.class_path(class));
            for mount in self.mounts() {
                let directory = join(mount, &relative);
                if let Err(error) = remove_tree(&directory) {
                    kill_processes(&directory);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The pods that have a cgroup.
    pub fn pods(&self) -> Vec<String> {
        let mut found = Vec::new();
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            for mount in self.mounts() {
                let directory = join(mount, &self.class_path(class));
                let names = std::fs::read_dir(directory)
                    .into_iter()
                    .flatten()
                    .filter_map(|e| e.ok()?.file_name().into_string().ok());
                found.extend(names.filter_map(|name| name.strip_prefix("pod").map(str::to_owned)));
            }
        }
        found.sort();
        found.dedup();
        found
    }

    /// Every distinct mount point.
    fn mounts(&self) -> &[PathBuf] {
        match &self.hierarchies {
            Hierarchies::None => &[],
            Hierarchies::V2(mount) => std::slice::from_ref(mount),
            Hierarchies::V1 { mounts, .. } => mounts,
        }
    }

    fn make(
        &self,
        path: &str,
        shares: Option<i64>,
        quota: Option<i64>,
        memory: Option<i64>,
    ) -> io::Result<()> {
        match &self.hierarchies {
            Hierarchies::None => {}
            Hierarchies::V1 { controllers: map, .. } => {
                for controller in MANAGED_V1 {
                    if let Some(mount) = map.get(controller) {
                        std::fs::create_dir_all(join(mount, path))?;
                    }
                }
                let write = |controller: &str, file: &str, value: i64| match map.get(controller) {
                    Some(mount) => write_value(&join(mount, path).join(file), &value.to_string()),
                    None => Ok(()),
                };
                if let Some(shares) = shares {
                    write("cpu", "cpu.shares", shares)?;
                }
                if let Some(quota) = quota {
                    write("cpu", "cpu.cfs_period_us", QUOTA_PERIOD)?;
                    write("cpu", "cpu.cfs_quota_us", quota)?;
                }
                if let Some(limit) = memory {
                    write("memory", "memory.limit_in_bytes", limit)?;
                }
            }
            Hierarchies::V2(mount) => {
                let directory = make_v2(mount, path)?;
                if let Some(shares) = shares {
                    write_value(
                        &directory.join("cpu.weight"),
                        &shares_to_weight(shares).to_string(),
                    )?;
                }
                if let Some(quota) = quota {
                    write_value(&directory.join("cpu.max"), &format!("{quota} {QUOTA_PERIOD}"))?;
                }
                if let Some(limit) = memory {
                    write_value(&directory.join("memory.max"), &limit.to_string())?;
                }
            }
        }
        Ok(())
    }
}

fn join(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

fn read_number(file: &Path) -> io::Result<i64> {
    let text = std::fs::read_to_string(file)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
    // A counter may be larger than what is signed.
    let number = text
        .trim()
        .parse::<u64>()
        .map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    number
        .or_else(|_| text.trim().parse::<i64>())
        .map_err(|e| io::Error::other(format!("{}: {e}", file.display())))
}

fn write_value(file: &Path, value: &str) -> io::Result<()> {
    std::fs::write(file, value).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))
}

/// Makes each level and hands the controllers down to it.
fn make_v2(mount: &Path, path: &str) -> io::Result<PathBuf> {
    let mut directory = mount.to_path_buf();
    for part in path.split('/').filter(|p| !p.is_empty()) {
        for controller in ["+cpu", "+memory", "+pids", "+cpuset", "+io", "+hugetlb"] {
            // One that the kernel lacks must not keep the others away.
            let _ = std::fs::write(directory.join("cgroup.subtree_control"), controller);
        }
        directory.push(part);
        match std::fs::create_dir(&directory) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    for controller in ["+cpu", "+memory", "+pids", "+cpuset", "+io", "+hugetlb"] {
        let _ = std::fs::write(directory.join("cgroup.subtree_control"), controller);
    }
    Ok(directory)
}

/// The kernel's range of `cpu.shares` onto that of `cpu.weight`, as runtimes do it.
fn shares_to_weight(shares: i64) -> i64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// SIGKILL to every process in a cgroup and below.
fn kill_processes(directory: &Path) {
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let mut listed = Vec::new();
    processes(directory, &mut listed);
    let handles: Vec<_> = listed
        .into_iter()
        .filter_map(|pid| Some((pid, pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?)))
        .collect();
    // Listed once more: a process that ended before its handle was opened may have left its number to another one,
    // which is not in this cgroup.
    let mut still = Vec::new();
    processes(directory, &mut still);
    for (pid, handle) in handles.iter().filter(|(pid, _)| still.contains(pid)) {
        tracing::warn!(pid, cgroup = %directory.display(), "killing a process that an ended pod left behind");
        if let Err(error) = pidfd_send_signal(handle, Signal::KILL) {
            tracing::debug!(pid, %error, "cannot kill a process of a cgroup");
        }
    }
}

fn processes(directory: &Path, pids: &mut Vec<i32>) {
    let listed = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    pids.extend(listed.lines().filter_map(|line| line.parse::<i32>().ok()));
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            processes(&entry.path(), pids);
        }
    }
}

/// A cgroup directory cannot be emptied, only removed from its leaves up.
fn remove_tree(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match std::fs::remove_dir(directory) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(io::Error::new(e.kind(), format!("{}: {e}", directory.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn detection() {
        let v1 = "30 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n31 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n33 24 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n32 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        match Hierarchies::from_mountinfo(v1) {
            Hierarchies::V1 { controllers, mounts } => {
                assert_eq!(controllers["cpu"], Path::new("/sys/fs/cgroup/cpu,cpuacct"));
                assert_eq!(controllers["memory"], Path::new("/sys/fs/cgroup/memory"));
                let expected = ["cpu,cpuacct", "memory", "systemd", "unified"];
                assert_eq!(
                    mounts,
                    expected.map(|name| Path::new("/sys/fs/cgroup").join(name))
                );
            }
            other => panic!("{other:?}"),
        }
        let v2 = "30 24 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            Hierarchies::from_mountinfo(v2),
            Hierarchies::V2("/sys/fs/cgroup".into())
        );
    }

    #[test]
    fn whether_cpus_can_be_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let v2 = Cgroups::with_hierarchies("t", Hierarchies::V2(dir.path().into()));
        assert!(!v2.has_cpuset());
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu cpuset memory\n").unwrap();
        assert!(v2.has_cpuset());
        for (controller, expected) in [("cpu", false), ("cpuset", true)] {
            let v1 = Hierarchies::V1 {
                controllers: [(controller.to_owned(), PathBuf::new())].into(),
                mounts: Vec::new(),
            };
            assert_eq!(Cgroups::with_hierarchies("t", v1).has_cpuset(), expected);
        }
    }

    #[test]
    fn pods_on_v1() {
        let dir = tempfile::tempdir().unwrap();
        let map = ["cpu", "memory"].map(|c| (c.to_owned(), dir.path().join(c)));
        let hierarchies = Hierarchies::V1 {
            controllers: HashMap::from(map),
            mounts: ["cpu", "memory", "systemd"].map(|c| dir.path().join(c)).into(),
        };
        let cgroups = Cgroups::with_hierarchies("skiff-t", hierarchies);
        cgroups.set_up().unwrap();
        let pod: Pod = serde_json::from_value(json!({"metadata": {"uid": "u1"}, "spec": {"containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}}]}})).unwrap();
        assert_eq!(cgroups.pod_path(&pod), "/skiff-t/kubepods/burstable/podu1");
        cgroups.create_pod(&pod).unwrap();
        let read = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(read("cpu/skiff-t/kubepods/burstable/podu1/cpu.shares"), "512");
        assert_eq!(
            read("cpu/skiff-t/kubepods/burstable/podu1/cpu.cfs_quota_us"),
            "100000"
        );
        assert_eq!(
            read("memory/skiff-t/kubepods/burstable/podu1/memory.limit_in_bytes"),
            "67108864"
        );
        assert_eq!(read("cpu/skiff-t/kubepods/burstable/cpu.shares"), "512");
        assert_eq!(cgroups.pods(), ["u1"]);
        // What a runtime made where we make nothing.
        let named = dir.path().join("systemd/skiff-t/kubepods/besteffort/podu2");
        std::fs::create_dir_all(named.join("c1")).unwrap();
        assert_eq!(cgroups.pods(), ["u1", "u2"]);
        cgroups.remove_pod("u2").unwrap();
        assert!(!named.exists());
    }

    #[test]
    fn a_cgroup_keeps_what_it_has_until_it_is_resized() {
        let dir = tempfile::tempdir().unwrap();
        let map = ["cpu", "memory", "pids", "hugetlb"].map(|c| (c.to_owned(), dir.path().join(c)));
        let mounts = map.iter().map(|(_, mount)| mount.clone()).collect();
        let hierarchies = Hierarchies::V1 {
            controllers: HashMap::from(map),
            mounts,
        };
        let cgroups = Cgroups::with_hierarchies("t", hierarchies).with_limits(Some(77), vec![2048, 1 << 20]);
        let pod = |cpu: &str, memory: &str| -> Pod {
            serde_json::from_value(
                json!({"metadata": {"uid": "u1"}, "status": {"qosClass": "Guaranteed"},
                "spec": {"containers": [{"name": "a", "resources": {
                    "requests": {"cpu": cpu, "memory": memory, "hugepages-2Mi": "4Mi"},
                    "limits": {"cpu": cpu, "memory": memory, "hugepages-2Mi": "4Mi"}}}]}}),
            )
            .unwrap()
        };
        cgroups.create_pod(&pod("1", "64Mi")).unwrap();
        let read = |file: &str| std::fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(read("pids/t/kubepods/podu1/pids.max"), "77");
        assert_eq!(
            read("hugetlb/t/kubepods/podu1/hugetlb.2MB.limit_in_bytes"),
            "4194304"
        );
        assert_eq!(read("hugetlb/t/kubepods/podu1/hugetlb.1GB.limit_in_bytes"), "0");
        assert!(!cgroups.pod_config(&pod("1", "64Mi")).unwrap().unwrap().differs());
        let wanted = pod("2", "128Mi");
        cgroups.create_pod(&wanted).unwrap();
        let config = cgroups.pod_config(&wanted).unwrap().unwrap();
        assert!(config.differs());
        assert_eq!(
            (config.current.cpu_shares, config.wanted.cpu_shares),
            (1024, 2048)
        );
        assert_eq!(
            (config.current.memory_limit, config.wanted.memory_limit),
            (Some(64 << 20), Some(128 << 20))
        );
        for part in [Part::Memory, Part::Quota, Part::Shares] {
            cgroups.set_pod(&wanted, part).unwrap();
        }
        let config = cgroups.pod_config(&wanted).unwrap().unwrap();
        assert!(!config.differs(), "{config:?}");
        assert_eq!(config.current.cpu_quota, Some(200_000));
    }

    #[test]
    fn a_process_left_behind_does_not_keep_the_cgroup() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let root = format!("skiff-test-{}", std::process::id());
        let cgroups = Cgroups::new(&root, true).unwrap();
        cgroups.set_up().unwrap();
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"uid": "u1"}, "spec": {"containers": [{"name": "a"}]}}),
        )
        .unwrap();
        cgroups.create_pod(&pod).unwrap();
        let mut left = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let directories: Vec<PathBuf> = cgroups
            .mounts()
            .iter()
            .map(|mount| join(mount, &cgroups.pod_path(&pod)))
            .filter(|directory| directory.exists())
            .collect();
        assert!(!directories.is_empty());
        for directory in &directories {
            std::fs::create_dir(directory.join("c1")).unwrap();
            std::fs::write(directory.join("c1/cgroup.procs"), left.id().to_string()).unwrap();
        }
        let mut removed = Err(io::Error::other("not tried"));
        for _ in 0..2000 {
            removed = cgroups.remove_pod("u1");
            // A zombie is in its cgroup until somebody waits for it.
            if removed.is_ok() && left.try_wait().unwrap().is_some() {
                break;
            }
            let _ = left.try_wait();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let ended = left.try_wait().unwrap();
        let _ = left.kill();
        let _ = left.wait();
        for mount in cgroups.mounts() {
            let _ = remove_tree(&join(mount, &root));
        }
        removed.unwrap();
        assert!(ended.is_some());
    }

    #[test]
    fn weights() {
        assert_eq!(shares_to_weight(2), 1);
        assert_eq!(shares_to_weight(1024), 39);
        assert_eq!(shares_to_weight(262_144), 10_000);
    }
}
