//! The kernel's limits of connection tracking, as kube-proxy sets them: room for many connections, and no connection
//! that is forgotten while its ends still hold it.

use std::fs;

const MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
const ESTABLISHED: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
const CLOSE_WAIT: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";

/// Connections for each processor, and at least.
const MAX_PER_CORE: u64 = 32 << 10;
const MIN: u64 = 128 << 10;

const DAY: u64 = 24 * 60 * 60;
const HOUR: u64 = 60 * 60;

/// Sets them once. A machine that does not let itself be told, such as a container, keeps what it has.
pub(super) fn raise() {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let wanted = (cores * MAX_PER_CORE).max(MIN);
    if read(MAX).is_some_and(|now| now < wanted) {
        write(MAX, wanted);
    }
    for (path, seconds) in [(ESTABLISHED, DAY), (CLOSE_WAIT, HOUR)] {
        if read(path).is_some_and(|now| now != seconds) {
            write(path, seconds);
        }
    }
}

fn read(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn write(path: &str, value: u64) {
    if let Err(error) = fs::write(path, value.to_string()) {
        tracing::info!(%error, path, value, "cannot set a limit of connection tracking");
    }
}
