//! What procfs says of this process, under the names that every Prometheus client uses.

use crate::Registry;

/// Linux reports ticks of 1/100 s to user space on x86-64.
const TICKS: f64 = 100.0;

/// Registers the `process_*` families. Components that share a process show the same values.
pub fn register(registry: &Registry) {
    registry.read_gauges(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        &[],
        || one(|stat| Some(boot_time()? + stat.number(19)? / TICKS)),
    );
    registry.read_counters(
        "process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.",
        &[],
        || one(|stat| Some((stat.number(11)? + stat.number(12)?) / TICKS)),
    );
    registry.read_gauges(
        "process_virtual_memory_bytes",
        "Virtual memory size in bytes.",
        &[],
        || one(|stat| stat.number(20)),
    );
    registry.read_gauges(
        "process_resident_memory_bytes",
        "Resident memory size in bytes.",
        &[],
        // Pages of 4 KiB on x86-64.
        || one(|stat| Some(stat.number(21)? * 4096.0)),
    );
    registry.read_gauges(
        "process_open_fds",
        "Number of open file descriptors.",
        &[],
        || {
            let open = std::fs::read_dir("/proc/self/fd").map(|all| all.count() as f64);
            open.map(|count| (vec![], count)).into_iter().collect()
        },
    );
    registry.read_gauges(
        "process_max_fds",
        "Maximum number of open file descriptors.",
        &[],
        || max_open_files().map(|most| (vec![], most)).into_iter().collect(),
    );
}

/// The version, as every component of Kubernetes tells it.
pub fn build_info(registry: &Registry, git_version: &str) {
    let version = git_version.to_owned();
    let mut parts = git_version.trim_start_matches('v').split('.').map(str::to_owned);
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    registry.read_gauges(
        "kubernetes_build_info",
        "A metric with a constant '1' value labeled by major, minor, git version.",
        &["git_version", "major", "minor"],
        move || vec![(vec![version.clone(), major.clone(), minor.clone()], 1.0)],
    );
}

fn one(value: impl Fn(&Stat) -> Option<f64>) -> Vec<(Vec<String>, f64)> {
    let value = Stat::read().and_then(|stat| value(&stat));
    value.map(|value| (vec![], value)).into_iter().collect()
}

/// When the machine started, in seconds since the Unix epoch.
fn boot_time() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

fn max_open_files() -> Option<f64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The fields of `/proc/self/stat` behind the command name, which may hold spaces.
struct Stat(String);

impl Stat {
    fn read() -> Option<Stat> {
        let text = std::fs::read_to_string("/proc/self/stat").ok()?;
        text.rsplit_once(')').map(|(_, rest)| Stat(rest.to_owned()))
    }

    fn number(&self, index: usize) -> Option<f64> {
        self.0.split_whitespace().nth(index)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_figures() {
        let registry = Registry::new();
        register(&registry);
        let text = registry.text();
        for name in [
            "process_cpu_seconds_total ",
            "process_max_fds ",
            "process_open_fds ",
            "process_resident_memory_bytes ",
            "process_start_time_seconds ",
            "process_virtual_memory_bytes ",
        ] {
            assert!(text.contains(&format!("\n{name}")), "{name}{text}");
        }
    }
}
