//! What the kernel counts of one cgroup, for `/stats/summary` and `/metrics/cadvisor`, by the files of either version. What a
//! kernel does not tell is left out. Reads only.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The directories of one cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupFiles {
    /// By controller.
    V1(HashMap<String, PathBuf>),
    V2(PathBuf),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuCounters {
    pub usage_nanos: u64,
    pub user_nanos: Option<u64>,
    pub system_nanos: Option<u64>,
    /// Where there is a quota: periods, those that were throttled, and for how long.
    pub throttling: Option<(u64, u64, u64)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounters {
    pub usage: u64,
    pub working_set: u64,
    /// `None`: there is none.
    pub limit: Option<u64>,
    pub rss: u64,
    pub cache: u64,
    pub mapped_file: u64,
    pub swap: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub max_usage: Option<u64>,
    pub limit_hits: Option<u64>,
    pub oom_kills: Option<u64>,
}

/// What was read from and written to one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceIo {
    pub device: String,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub reads: u64,
    pub writes: u64,
}

/// How long processes waited for something: some of them, and all at once. Microseconds, and percentages of the last 10, 60
/// and 300 seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub some: PressureLine,
    pub full: PressureLine,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PressureLine {
    pub total_micros: u64,
    pub averages: [f64; 3],
}

impl Pressure {
    /// `what` is `cpu`, `memory` or `io`; `None` where the kernel does not tell.
    pub fn of_machine(what: &str) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(Path::new("/proc/pressure").join(what)).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let line = |name: &str| -> Option<PressureLine> {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
            let field = |name: &str| {
                let mut fields = line.split_whitespace().filter_map(|one| one.split_once('='));
                fields.find(|(key, _)| *key == name).map(|(_, value)| value)
            };
            let average = |name: &str| field(name)?.parse().ok();
            Some(PressureLine {
                total_micros: field("total")?.parse().ok()?,
                averages: [average("avg10")?, average("avg60")?, average("avg300")?],
            })
        };
        Some(Pressure {
            some: line("some")?,
            // Older kernels do not have it of the CPU.
            full: line("full").unwrap_or_default(),
        })
    }
}

impl CgroupFiles {
    /// The cgroup with this name below, in all hierarchies that have one.
    pub fn below(&self, name: &str) -> Option<Self> {
        let find = |folder: &Path| -> Option<PathBuf> {
            let direct = folder.join(name);
            if direct.is_dir() {
                return Some(direct);
            }
            // CRI-O puts its own name before it.
            let prefixed = folder.join(format!("crio-{name}"));
            prefixed.is_dir().then_some(prefixed)
        };
        match self {
            CgroupFiles::V1(folders) => {
                let found = folders.iter();
                let found: HashMap<String, PathBuf> = found
                    .filter_map(|(controller, folder)| Some((controller.clone(), find(folder)?)))
                    .collect();
                (!found.is_empty()).then_some(CgroupFiles::V1(found))
            }
            CgroupFiles::V2(folder) => find(folder).map(CgroupFiles::V2),
        }
    }

    /// Unix nanoseconds.
    pub fn made_at(&self) -> Option<i64> {
        let made = std::fs::metadata(self.folder("memory").or_else(|| self.folder("cpu"))?).ok()?;
        let made = made.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        i64::try_from(made.as_nanos()).ok()
    }

    fn folder(&self, controller: &str) -> Option<&Path> {
        match self {
            CgroupFiles::V1(folders) => folders.get(controller).map(PathBuf::as_path),
            CgroupFiles::V2(folder) => Some(folder),
        }
    }

    fn read(&self, controller: &str, file: &str) -> Option<String> {
        std::fs::read_to_string(self.folder(controller)?.join(file)).ok()
    }

    fn number(&self, controller: &str, file: &str) -> Option<u64> {
        self.read(controller, file)?.trim().parse().ok()
    }

    pub fn cpu(&self) -> Option<CpuCounters> {
        match self {
            CgroupFiles::V1(_) => {
                // In ticks, of which there are a hundred a second.
                let split = self.read("cpuacct", "cpuacct.stat").unwrap_or_default();
                let nanos = |name: &str| field(&split, name).map(|ticks| ticks.saturating_mul(10_000_000));
                let stat = self.read("cpu", "cpu.stat").unwrap_or_default();
                let quota = self
                    .read("cpu", "cpu.cfs_quota_us")
                    .and_then(|text| text.trim().parse().ok());
                Some(CpuCounters {
                    usage_nanos: self.number("cpuacct", "cpuacct.usage")?,
                    user_nanos: nanos("user"),
                    system_nanos: nanos("system"),
                    throttling: quota.filter(|quota: &i64| *quota > 0).and_then(|_| {
                        let throttled = field(&stat, "throttled_time")?;
                        Some((
                            field(&stat, "nr_periods")?,
                            field(&stat, "nr_throttled")?,
                            throttled,
                        ))
                    }),
                })
            }
            CgroupFiles::V2(_) => {
                let stat = self.read("cpu", "cpu.stat")?;
                let nanos = |name: &str| field(&stat, name).map(|micros| micros.saturating_mul(1000));
                let limited = self
                    .read("cpu", "cpu.max")
                    .is_some_and(|max| !max.starts_with("max"));
                Some(CpuCounters {
                    usage_nanos: nanos("usage_usec")?,
                    user_nanos: nanos("user_usec"),
                    system_nanos: nanos("system_usec"),
                    throttling: limited.then_some(()).and_then(|()| {
                        let throttled = nanos("throttled_usec")?;
                        Some((
                            field(&stat, "nr_periods")?,
                            field(&stat, "nr_throttled")?,
                            throttled,
                        ))
                    }),
                })
            }
        }
    }

    pub fn memory(&self) -> Option<MemoryCounters> {
        let stat = self.read("memory", "memory.stat").unwrap_or_default();
        let of = |name: &str| field(&stat, name).unwrap_or(0);
        let counters = match self {
            CgroupFiles::V1(_) => {
                let usage = self.number("memory", "memory.usage_in_bytes")?;
                let oom = self.read("memory", "memory.oom_control").unwrap_or_default();
                MemoryCounters {
                    usage,
                    working_set: usage.saturating_sub(of("total_inactive_file")),
                    // What says that there is no limit is a number near the largest.
                    limit: self
                        .number("memory", "memory.limit_in_bytes")
                        .filter(|limit| *limit < 1 << 62),
                    rss: of("total_rss"),
                    cache: of("total_cache"),
                    mapped_file: of("total_mapped_file"),
                    swap: of("total_swap"),
                    page_faults: of("total_pgfault"),
                    major_page_faults: of("total_pgmajfault"),
                    max_usage: self.number("memory", "memory.max_usage_in_bytes"),
                    limit_hits: self.number("memory", "memory.failcnt"),
                    oom_kills: field(&oom, "oom_kill"),
                }
            }
            CgroupFiles::V2(_) => {
                let usage = self.number("memory", "memory.current")?;
                let events = self.read("memory", "memory.events").unwrap_or_default();
                MemoryCounters {
                    usage,
                    working_set: usage.saturating_sub(of("inactive_file")),
                    limit: self.number("memory", "memory.max"),
                    rss: of("anon"),
                    cache: of("file"),
                    mapped_file: of("file_mapped"),
                    swap: self.number("memory", "memory.swap.current").unwrap_or(0),
                    page_faults: of("pgfault"),
                    major_page_faults: of("pgmajfault"),
                    max_usage: self.number("memory", "memory.peak"),
                    limit_hits: field(&events, "max"),
                    oom_kills: field(&events, "oom_kill"),
                }
            }
        };
        Some(counters)
    }

    /// By device; empty where the kernel does not tell.
    pub fn io(&self) -> Vec<DeviceIo> {
        let mut found: BTreeMap<String, DeviceIo> = BTreeMap::new();
        let mut add = |device: &str, operation: &str, amount: u64| {
            let one = found.entry(device.to_owned()).or_default();
            match operation {
                "rbytes" => one.read_bytes = amount,
                "wbytes" => one.written_bytes = amount,
                "rios" => one.reads = amount,
                "wios" => one.writes = amount,
                _ => {}
            }
        };
        match self {
            CgroupFiles::V1(_) => {
                for (file, read, write) in [
                    ("blkio.throttle.io_service_bytes", "rbytes", "wbytes"),
                    ("blkio.throttle.io_serviced", "rios", "wios"),
                ] {
                    let recursive = self.read("blkio", &format!("{file}_recursive"));
                    let text = recursive.or_else(|| self.read("blkio", file)).unwrap_or_default();
                    for line in text.lines() {
                        let words: Vec<&str> = line.split_whitespace().collect();
                        if let [device, operation, amount] = words.as_slice()
                            && let Ok(amount) = amount.parse()
                        {
                            match *operation {
                                "Read" => add(device, read, amount),
                                "Write" => add(device, write, amount),
                                _ => {}
                            }
                        }
                    }
                }
            }
            CgroupFiles::V2(_) => {
                for line in self.read("io", "io.stat").unwrap_or_default().lines() {
                    let mut words = line.split_whitespace();
                    let Some(device) = words.next() else { continue };
                    for (name, amount) in words.filter_map(|word| word.split_once('=')) {
                        if let Ok(amount) = amount.parse() {
                            add(device, name, amount);
                        }
                    }
                }
            }
        }
        let named = found.into_iter().map(|(number, io)| DeviceIo {
            device: device_name(&number),
            ..io
        });
        named.collect()
    }

    /// On v2, where the kernel was built with it.
    pub fn pressure(&self, what: &str) -> Option<Pressure> {
        match self {
            CgroupFiles::V1(_) => None,
            CgroupFiles::V2(_) => Pressure::parse(&self.read(what, &format!("{what}.pressure"))?),
        }
    }

    pub fn threads(&self) -> Option<u64> {
        self.number("pids", "pids.current")
    }

    /// `None`: there is no limit.
    pub fn max_threads(&self) -> Option<u64> {
        self.number("pids", "pids.max")
    }

    /// Shares, and the quota with its period in microseconds. COMPAT: on v2 the shares that the weight stands for.
    pub fn cpu_limits(&self) -> Option<(u64, Option<(u64, u64)>)> {
        match self {
            CgroupFiles::V1(_) => {
                let quota = self.number("cpu", "cpu.cfs_quota_us");
                let period = self.number("cpu", "cpu.cfs_period_us")?;
                Some((
                    self.number("cpu", "cpu.shares")?,
                    quota.map(|quota| (quota, period)),
                ))
            }
            CgroupFiles::V2(_) => {
                let weight = self.number("cpu", "cpu.weight")?;
                let max = self.read("cpu", "cpu.max").unwrap_or_default();
                let quota = max
                    .split_once(' ')
                    .and_then(|(quota, period)| Some((quota.parse().ok()?, period.trim().parse().ok()?)));
                Some((2 + (weight.saturating_sub(1) * 262_142) / 9999, quota))
            }
        }
    }
}

/// `/dev/sda` for `8:0`, as cAdvisor calls it; the number where the kernel has no name for it.
fn device_name(number: &str) -> String {
    let link = std::fs::read_link(Path::new("/sys/dev/block").join(number));
    let name = link
        .ok()
        .and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    name.map_or_else(|| number.to_owned(), |name| format!("/dev/{name}"))
}

/// A line `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(key, _)| *key == name)?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in list {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn version_1() {
        let dir = files(&[
            ("cpuacct.usage", "5000000000\n"),
            ("cpuacct.stat", "user 300\nsystem 100\n"),
            ("cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 700\n"),
            ("cpu.cfs_quota_us", "50000\n"),
            ("cpu.cfs_period_us", "100000\n"),
            ("cpu.shares", "512\n"),
            ("memory.usage_in_bytes", "1000\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            (
                "memory.stat",
                "total_inactive_file 400\ntotal_rss 300\ntotal_cache 600\n",
            ),
            (
                "memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            ),
            ("memory.failcnt", "7\n"),
            ("pids.current", "5\n"),
            ("pids.max", "max\n"),
            (
                "blkio.throttle.io_service_bytes",
                "0:0 Read 10\n0:0 Write 20\n0:0 Sync 5\nTotal 30\n",
            ),
            ("blkio.throttle.io_serviced", "0:0 Read 1\n0:0 Write 2\n"),
        ]);
        let controllers = ["cpu", "cpuacct", "memory", "pids", "blkio"];
        let group = CgroupFiles::V1(
            controllers
                .map(|name| (name.to_owned(), dir.path().to_owned()))
                .into(),
        );
        let cpu = group.cpu().unwrap();
        assert_eq!(
            (cpu.usage_nanos, cpu.user_nanos),
            (5_000_000_000, Some(3_000_000_000))
        );
        assert_eq!(cpu.throttling, Some((10, 4, 700)));
        let memory = group.memory().unwrap();
        assert_eq!(
            (memory.working_set, memory.limit, memory.rss, memory.cache),
            (600, None, 300, 600)
        );
        assert_eq!((memory.oom_kills, memory.limit_hits), (Some(2), Some(7)));
        assert_eq!((group.threads(), group.max_threads()), (Some(5), None));
        assert_eq!(group.cpu_limits(), Some((512, Some((50_000, 100_000)))));
        let io = group.io();
        assert_eq!(
            (
                io.len(),
                io[0].read_bytes,
                io[0].written_bytes,
                io[0].reads,
                io[0].writes
            ),
            (1, 10, 20, 1, 2)
        );
        assert_eq!(group.pressure("cpu"), None);
        std::fs::write(dir.path().join("cpu.cfs_quota_us"), "-1\n").unwrap();
        assert_eq!(group.cpu().unwrap().throttling, None);
        assert_eq!(group.cpu_limits(), Some((512, None)));
    }

    #[test]
    fn version_2() {
        let dir = files(&[
            (
                "cpu.stat",
                "usage_usec 5\nuser_usec 3\nsystem_usec 2\nnr_periods 0\n",
            ),
            ("cpu.max", "max 100000\n"),
            ("cpu.weight", "100\n"),
            ("memory.current", "1000\n"),
            ("memory.max", "4096\n"),
            ("memory.stat", "inactive_file 400\nanon 300\nfile 600\n"),
            ("memory.events", "low 0\nmax 3\noom 1\noom_kill 1\n"),
            (
                "io.stat",
                "0:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n",
            ),
            (
                "io.pressure",
                "some avg10=0.50 avg60=0.10 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=34\n",
            ),
        ]);
        let group = CgroupFiles::V2(dir.path().to_owned());
        let cpu = group.cpu().unwrap();
        assert_eq!(
            (cpu.usage_nanos, cpu.system_nanos, cpu.throttling),
            (5000, Some(2000), None)
        );
        let memory = group.memory().unwrap();
        assert_eq!(
            (memory.limit, memory.oom_kills, memory.limit_hits),
            (Some(4096), Some(1), Some(3))
        );
        assert_eq!(group.io()[0].written_bytes, 20);
        let pressure = group.pressure("io").unwrap();
        assert_eq!(
            (pressure.some.total_micros, pressure.some.averages[0]),
            (1234, 0.5)
        );
        assert_eq!(pressure.full.total_micros, 34);
        assert_eq!(group.pressure("memory"), None);
        assert_eq!(group.cpu_limits(), Some((2597, None)));
        std::fs::create_dir(dir.path().join("abc")).unwrap();
        assert_eq!(group.below("abc"), Some(CgroupFiles::V2(dir.path().join("abc"))));
        assert_eq!(group.below("none"), None);
    }
}
