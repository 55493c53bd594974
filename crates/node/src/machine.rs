//! The machine as the node reports it: capacity, identity, versions.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::{NodeSwapStatus, NodeSystemInfo};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::configuration::Reserved;
use crate::pressure::{Signal, Thresholds};

#[derive(Clone, Debug, Default)]
pub struct Machine {
    pub cpus: i64,
    /// Bytes.
    pub memory: i64,
    pub swap: i64,
    pub ephemeral_storage: i64,
    /// Page size in KiB to bytes of such pages.
    pub huge_pages: Vec<(u64, i64)>,
    /// Whether the kernel enforces AppArmor profiles.
    pub app_armor: bool,
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

impl Machine {
    pub fn detect(data_dir: &Path) -> Self {
        let cpus = count_cpus(&read("/sys/devices/system/cpu/online"))
            .or_else(|| {
                std::thread::available_parallelism()
                    .ok()
                    .and_then(|n| i64::try_from(n.get()).ok())
            })
            .unwrap_or(1);
        let ephemeral_storage = rustix::fs::statvfs(data_dir)
            .ok()
            .and_then(|s| i64::try_from(s.f_blocks.saturating_mul(s.f_frsize)).ok())
            .unwrap_or(0);
        let meminfo = read("/proc/meminfo");
        Machine {
            cpus,
            memory: meminfo_bytes(&meminfo, "MemTotal:"),
            swap: meminfo_bytes(&meminfo, "SwapTotal:"),
            ephemeral_storage,
            huge_pages: huge_pages(),
            app_armor: Path::new("/sys/kernel/security/apparmor").exists()
                && read("/sys/module/apparmor/parameters/enabled").starts_with('Y'),
        }
    }

    /// The sizes of huge pages, in KiB.
    pub fn page_sizes(&self) -> Vec<u64> {
        self.huge_pages.iter().map(|(size, _)| *size).collect()
    }

    pub fn capacity(&self, max_pods: u32) -> BTreeMap<String, Quantity> {
        let kib = |bytes: i64| Quantity(format!("{}Ki", bytes / 1024));
        let mut list = BTreeMap::from([
            ("cpu".to_owned(), Quantity(self.cpus.to_string())),
            ("memory".to_owned(), kib(self.memory)),
            ("ephemeral-storage".to_owned(), kib(self.ephemeral_storage)),
            ("pods".to_owned(), Quantity(max_pods.to_string())),
        ]);
        for (size, bytes) in &self.huge_pages {
            let amount = if *bytes == 0 {
                "0".to_owned()
            } else {
                format!("{}Ki", bytes / 1024)
            };
            list.insert(format!("hugepages-{}", huge_page_name(*size)), Quantity(amount));
        }
        list
    }

    /// What is left for pods.
    pub fn allocatable(
        &self,
        max_pods: u32,
        reserved: &Reserved,
        thresholds: &Thresholds,
    ) -> BTreeMap<String, Quantity> {
        let mut list = self.capacity(max_pods);
        if reserved.cpu_milli > 0 {
            list.insert(
                "cpu".to_owned(),
                Quantity(format!("{}m", (self.cpus * 1000 - reserved.cpu_milli).max(0))),
            );
        }
        let huge: i64 = self.huge_pages.iter().map(|(_, bytes)| bytes).sum();
        let kept = thresholds.kept_back(Signal::Memory, self.memory);
        let memory = (self.memory - reserved.memory - huge - kept).max(0);
        list.insert("memory".to_owned(), Quantity(format!("{}Ki", memory / 1024)));
        let kept = thresholds.kept_back(Signal::NodeFs, self.ephemeral_storage);
        let kept = kept + reserved.ephemeral_storage;
        if kept > 0 {
            let left = (self.ephemeral_storage - kept).max(0);
            list.insert("ephemeral-storage".to_owned(), Quantity(left.to_string()));
        }
        list
    }
}

/// `0-3,6` is five.
fn count_cpus(online: &str) -> Option<i64> {
    let mut count = 0;
    for range in online.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        count += last.trim().parse::<i64>().ok()? - first.trim().parse::<i64>().ok()? + 1;
    }
    Some(count)
}

fn meminfo_bytes(meminfo: &str, name: &str) -> i64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<i64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// Memory that processes could still have, for the summary.
pub fn memory_available() -> i64 {
    meminfo_bytes(&read("/proc/meminfo"), "MemAvailable:")
}

/// How many processes and threads the kernel allows.
pub fn max_pids() -> i64 {
    let number = |path: &str| read(path).parse().unwrap_or(i64::MAX);
    let most: i64 = number("/proc/sys/kernel/pid_max");
    most.min(number("/proc/sys/kernel/threads-max"))
}

fn huge_pages() -> Vec<(u64, i64)> {
    let entries = std::fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .flatten();
    let mut pages: Vec<(u64, i64)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let size: u64 = name
                .strip_prefix("hugepages-")?
                .strip_suffix("kB")?
                .parse()
                .ok()?;
            let count: i64 = std::fs::read_to_string(entry.path().join("nr_hugepages"))
                .ok()?
                .trim()
                .parse()
                .ok()?;
            Some((size, count * i64::try_from(size).ok()? * 1024))
        })
        .collect();
    pages.sort_unstable();
    pages
}

/// As the kernel names the files of its cgroups: `2MB`.
pub fn huge_page_file_name(kib: u64) -> String {
    huge_page_name(kib).replace('i', "B")
}

pub fn huge_page_name(kib: u64) -> String {
    if kib >= 1 << 20 {
        format!("{}Gi", kib >> 20)
    } else if kib >= 1 << 10 {
        format!("{}Mi", kib >> 10)
    } else {
        format!("{kib}Ki")
    }
}

pub fn system_info(runtime_version: String, kubelet_version: &str, swap: i64) -> NodeSystemInfo {
    let os_release = read("/etc/os-release");
    let os_image = os_release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or_else(|| "Linux".to_owned(), |name| name.trim_matches('"').to_owned());
    let uname = rustix::system::uname();
    NodeSystemInfo {
        architecture: architecture().to_owned(),
        boot_id: read("/proc/sys/kernel/random/boot_id"),
        container_runtime_version: runtime_version,
        kernel_version: uname.release().to_string_lossy().into_owned(),
        kubelet_version: kubelet_version.to_owned(),
        kube_proxy_version: String::new(),
        machine_id: read("/etc/machine-id"),
        operating_system: "linux".to_owned(),
        os_image,
        swap: (swap != 0).then_some(NodeSwapStatus { capacity: Some(swap) }),
        system_uuid: Some(read("/sys/class/dmi/id/product_uuid"))
            .filter(|u| !u.is_empty())
            .unwrap_or_else(|| read("/etc/machine-id")),
    }
}

/// Go's name of the architecture, which images are tagged by.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing() {
        assert_eq!(count_cpus("0-3,6"), Some(5));
        assert_eq!(count_cpus("0"), Some(1));
        assert_eq!(count_cpus(""), None);
        assert_eq!(
            meminfo_bytes("MemTotal:       16384256 kB\nMemFree: 1 kB\n", "MemTotal:"),
            16_384_256 * 1024
        );
        assert_eq!(huge_page_name(2048), "2Mi");
        assert_eq!(huge_page_name(1 << 20), "1Gi");
    }

    #[test]
    fn what_is_left() {
        let machine = Machine {
            app_armor: false,
            cpus: 2,
            memory: 1 << 30,
            swap: 0,
            ephemeral_storage: 1 << 40,
            huge_pages: vec![],
        };
        assert_eq!(machine.capacity(110)["memory"].0, "1048576Ki");
        let none = Thresholds {
            list: Vec::new(),
            ..Thresholds::default()
        };
        let left = machine.allocatable(
            110,
            &Reserved {
                cpu_milli: 500,
                memory: 1 << 20,
                ..Reserved::default()
            },
            &none,
        );
        assert_eq!(
            (left["cpu"].0.as_str(), left["memory"].0.as_str()),
            ("1500m", "1047552Ki")
        );
        // What would be taken back at once is not given away.
        let left = machine.allocatable(110, &Reserved::default(), &Thresholds::default());
        assert_eq!(left["memory"].0, "946176Ki");
        assert_eq!(left["ephemeral-storage"].0, "1044536046388");
    }
}
