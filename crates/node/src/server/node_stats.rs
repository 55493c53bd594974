//! What `/stats/summary` tells of the node beside CPU and memory: its interfaces, the disk with the images, and how many
//! processes it has of how many.

use serde_json::{Map, Value, json};

use crate::kubelet::Kubelet;
use crate::machine;

/// The counters of the node's interfaces; the one of the default route is also shown by itself.
pub fn network(time: Value) -> Option<Value> {
    let devices = std::fs::read_to_string("/proc/net/dev").ok()?;
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    Some(network_of(&devices, &routes, time))
}

fn network_of(devices: &str, routes: &str, time: Value) -> Value {
    let interfaces: Vec<Map<String, Value>> = devices.lines().filter_map(interface).collect();
    let default = default_interface(routes);
    let first = interfaces.iter().find(|one| one["name"].as_str() == default);
    let mut shown = first.cloned().unwrap_or_default();
    shown.insert("time".to_owned(), time);
    shown.insert("interfaces".to_owned(), json!(interfaces));
    shown.into()
}

/// A line of `/proc/net/dev`; the loopback interface is left out, as upstream does.
fn interface(line: &str) -> Option<Map<String, Value>> {
    let (name, counters) = line.split_once(':')?;
    let name = name.trim();
    // COMPAT: cAdvisor's list of what is no interface of a machine.
    if name == "lo" || name.starts_with("veth") || name.starts_with("docker") {
        return None;
    }
    let counters: Vec<u64> = counters
        .split_whitespace()
        .map_while(|one| one.parse().ok())
        .collect();
    let shown = json!({
        "name": name,
        "rxBytes": counters.first()?,
        "rxErrors": counters.get(2)?,
        "txBytes": counters.get(8)?,
        "txErrors": counters.get(10)?,
    });
    shown.as_object().cloned()
}

/// That of the route to everywhere, in `/proc/net/route`.
fn default_interface(routes: &str) -> Option<&str> {
    routes.lines().skip(1).find_map(|line| {
        let mut columns = line.split_whitespace();
        let name = columns.next()?;
        (columns.next()? == "00000000").then_some(name)
    })
}

pub fn rlimit(time: Value) -> Option<Value> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    let tasks: i64 = load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()?;
    Some(json!({"time": time, "maxpid": machine::max_pids(), "curproc": tasks}))
}

impl Kubelet {
    /// The disk with the images, and what they and the containers take of it.
    pub(super) async fn runtime_disks(
        &self,
        disk: impl Fn(&std::path::Path) -> Option<Value>,
    ) -> Option<Value> {
        let found = self.runtime.image_filesystems().await.ok()?;
        let shown = |list: &[skiff_cri::v1::FilesystemUsage]| {
            let usage = list.first()?;
            let path = &usage.fs_id.as_ref()?.mountpoint;
            let mut shown = disk(std::path::Path::new(path))?;
            if let Some(used) = &usage.used_bytes {
                shown["usedBytes"] = json!(used.value);
            }
            if let Some(used) = &usage.inodes_used {
                shown["inodesUsed"] = json!(used.value);
            }
            Some(shown)
        };
        let images = shown(&found.image_filesystems)?;
        let containers = shown(&found.container_filesystems).unwrap_or_else(|| images.clone());
        Some(json!({"imageFs": images, "containerFs": containers}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces() {
        let devices = "Inter-|   Receive | Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs\n    \
            lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 100 2 3 0 0 0 0 0 200 4 5 0 0 0 0 0\nveth1: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n";
        let routes = "Iface\tDestination\tGateway\neth1\t0000A8C0\t0\neth0\t00000000\t0100A8C0\n";
        let shown = network_of(devices, routes, json!("now"));
        let eth0 = json!({"name": "eth0", "rxBytes": 100, "rxErrors": 3, "txBytes": 200, "txErrors": 5});
        assert_eq!(shown["interfaces"], json!([eth0]));
        assert_eq!((&shown["name"], &shown["txBytes"]), (&json!("eth0"), &json!(200)));
        let rlimit = rlimit(json!("now")).unwrap();
        assert!(
            rlimit["curproc"].as_i64() > Some(0) && rlimit["maxpid"].as_i64() >= rlimit["curproc"].as_i64()
        );
    }
}
