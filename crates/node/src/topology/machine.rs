//! The machine's CPUs, cores, sockets, caches and NUMA nodes, as the kernel shows them below `/sys/devices/system`. Reads
//! files once and nothing else; what is decided by a [`Topology`] is decided elsewhere, without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::cpu_set::CpuSet;

/// Where the kernel shows it.
pub const SYSTEM: &str = "/sys/devices/system";
/// Masks of NUMA nodes have this many bits.
pub const MAX_NUMA_NODES: u32 = 64;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot read {path}: {text:?} is not what the kernel writes there")]
    Syntax { path: PathBuf, text: String },
    #[error("could not detect number of cpus")]
    NoCpus,
    #[error("NUMA node {0} is beyond the {MAX_NUMA_NODES} that are supported")]
    TooManyNodes(u32),
}

/// Where a CPU (a hardware thread) is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// The lowest CPU of the core: unlike the kernel's `core_id`, unique on the machine.
    pub core: u32,
    pub socket: u32,
    pub numa: u32,
    /// The last-level cache, where it is not shared by a whole NUMA node; else the socket.
    pub uncore: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// Bytes.
    pub memory: u64,
    /// Bytes of huge pages, by the page size in KiB.
    pub huge_pages: BTreeMap<u64, u64>,
    /// To each node of the machine, in the order of their ids; empty if the kernel does not tell.
    pub distances: Vec<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    pub cpus: BTreeMap<u32, Cpu>,
    /// By id. One may have no CPUs.
    pub nodes: BTreeMap<u32, NumaNode>,
}

impl Topology {
    pub fn all_cpus(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    /// The CPUs for which this holds.
    pub fn cpus_where(&self, holds: impl Fn(&Cpu) -> bool) -> CpuSet {
        let found = self.cpus.iter().filter(|(_, cpu)| holds(cpu));
        found.map(|(id, _)| *id).collect()
    }

    /// How many different values the CPUs have.
    pub fn count(&self, pick: impl Fn(&Cpu) -> u32) -> usize {
        self.cpus.values().map(pick).collect::<BTreeSet<u32>>().len()
    }

    /// Hardware threads of a core, on average.
    pub fn cpus_per_core(&self) -> usize {
        self.cpus.len() / self.count(|cpu| cpu.core).max(1)
    }

    pub fn cpus_per_uncore(&self) -> usize {
        self.cpus.len() / self.count(|cpu| cpu.uncore).max(1)
    }

    /// The nodes that have CPUs.
    pub fn nodes_with_cpus(&self) -> Vec<u32> {
        let nodes: BTreeSet<u32> = self.cpus.values().map(|cpu| cpu.numa).collect();
        nodes.into_iter().collect()
    }

    pub fn node_ids(&self) -> Vec<u32> {
        self.nodes.keys().copied().collect()
    }

    /// Reads the files below `root`, which is [`SYSTEM`] but in tests.
    pub fn read(root: &Path) -> Result<Self, Error> {
        let online = list(&root.join("cpu/online"))?;
        if online.is_empty() {
            return Err(Error::NoCpus);
        }
        let mut topology = Topology::default();
        for (id, directory) in numbered(&root.join("node"), "node") {
            if id >= MAX_NUMA_NODES {
                return Err(Error::TooManyNodes(id));
            }
            let cpus = list(&directory.join("cpulist"))?.intersection(&online);
            topology.add_cpus(root, id, &cpus)?;
            topology.nodes.insert(id, read_node(&directory)?);
        }
        if topology.nodes.is_empty() {
            // A kernel without NUMA: each socket counts as a node.
            let mut sockets: BTreeMap<u32, CpuSet> = BTreeMap::new();
            for cpu in online.iter() {
                let socket = physical_package(root, cpu)?;
                sockets.entry(socket).or_default().extend([cpu]);
            }
            for (socket, cpus) in sockets {
                topology.add_cpus(root, socket, &cpus)?;
                topology.nodes.insert(socket, NumaNode::default());
            }
        }
        match topology.cpus.is_empty() {
            true => Err(Error::NoCpus),
            false => Ok(topology),
        }
    }

    fn add_cpus(&mut self, root: &Path, numa: u32, cpus: &CpuSet) -> Result<(), Error> {
        let mut cores: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        for id in cpus.iter() {
            let socket = physical_package(root, id)?;
            let core_id = number(&root.join(format!("cpu/cpu{id}/topology/core_id")))?;
            // Ascending ids: the first one seen is the lowest.
            let core = *cores.entry((socket, core_id)).or_insert(id);
            let uncore = uncore_cache(root, id, cpus).unwrap_or(socket);
            let cpu = Cpu {
                core,
                socket,
                numa,
                uncore,
            };
            self.cpus.insert(id, cpu);
        }
        Ok(())
    }
}

fn text(path: &Path) -> Result<String, Error> {
    let read = std::fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(read.trim().to_owned())
}

fn parsed<T: std::str::FromStr>(path: &Path) -> Result<T, Error> {
    let text = text(path)?;
    text.parse().map_err(|_| Error::Syntax {
        path: path.to_owned(),
        text,
    })
}

fn list(path: &Path) -> Result<CpuSet, Error> {
    parsed(path)
}

/// Some virtual machines write -1: there is one of it then.
fn number(path: &Path) -> Result<u32, Error> {
    let number: i64 = parsed(path)?;
    Ok(u32::try_from(number).unwrap_or(0))
}

fn physical_package(root: &Path, cpu: u32) -> Result<u32, Error> {
    number(&root.join(format!("cpu/cpu{cpu}/topology/physical_package_id")))
}

/// The cache above level 2 that some CPUs of the node share. `None` if all do, or if the kernel does not tell.
fn uncore_cache(root: &Path, cpu: u32, of_node: &CpuSet) -> Option<u32> {
    let caches = numbered(&root.join(format!("cpu/cpu{cpu}/cache")), "index");
    caches.into_iter().find_map(|(_, cache)| {
        let level = number(&cache.join("level")).ok()?;
        let shared = list(&cache.join("shared_cpu_list")).ok()?;
        (level > 2 && shared.len() != of_node.len()).then(|| number(&cache.join("id")).ok())?
    })
}

/// `prefix0`, `prefix1`, … in this folder.
fn numbered(folder: &Path, prefix: &str) -> BTreeMap<u32, PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((name.strip_prefix(prefix)?.parse().ok()?, entry.path()))
    });
    named.collect()
}

fn read_node(directory: &Path) -> Result<NumaNode, Error> {
    let meminfo = text(&directory.join("meminfo"))?;
    // Node 0 MemTotal:       12282076 kB
    let total = meminfo
        .lines()
        .find_map(|line| line.split_once("MemTotal:")?.1.split_whitespace().next());
    let kib: u64 = total
        .and_then(|kib| kib.parse().ok())
        .ok_or_else(|| Error::Syntax {
            path: directory.join("meminfo"),
            text: meminfo.chars().take(80).collect(),
        })?;
    let entries = std::fs::read_dir(directory.join("hugepages"));
    let huge_pages = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let size: u64 = name
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
        let count: u64 = parsed(&entry.path().join("nr_hugepages")).ok()?;
        Some((size, count.saturating_mul(size).saturating_mul(1024)))
    });
    let distances = text(&directory.join("distance")).unwrap_or_default();
    let distances = distances.split_whitespace().map(str::parse);
    Ok(NumaNode {
        memory: kib.saturating_mul(1024),
        huge_pages: huge_pages.collect(),
        distances: distances.collect::<Result<_, _>>().unwrap_or_default(),
    })
}

#[cfg(test)]
pub mod made_up {
    //! Machines for tests.

    use super::*;

    /// So many sockets, NUMA nodes in each, cores in each of these, and threads in each core. CPUs are numbered as the
    /// kernel does on x86: first one thread of every core, then the others. A GiB of memory on each node.
    pub fn machine(sockets: u32, nodes: u32, cores: u32, threads: u32) -> Topology {
        let all_cores = sockets * nodes * cores;
        let all_nodes = sockets * nodes;
        let mut topology = Topology::default();
        for thread in 0..threads {
            for core in 0..all_cores {
                let socket = core / (nodes * cores);
                let cpu = Cpu {
                    core,
                    socket,
                    numa: core / cores,
                    uncore: socket,
                };
                topology.cpus.insert(thread * all_cores + core, cpu);
            }
        }
        for node in 0..all_nodes {
            let distance = |other| match (node == other, node / nodes == other / nodes) {
                (true, _) => 10,
                (_, true) => 12,
                _ => 32,
            };
            let node_info = NumaNode {
                memory: 1 << 30,
                huge_pages: BTreeMap::new(),
                distances: (0..all_nodes).map(distance).collect(),
            };
            topology.nodes.insert(node, node_info);
        }
        topology
    }

    /// The same with a last-level cache for each group of cores.
    pub fn with_caches(mut topology: Topology, cores_per_cache: u32) -> Topology {
        for cpu in topology.cpus.values_mut() {
            cpu.uncore = cpu.core / cores_per_cache;
        }
        topology
    }

    /// Writes the files that the kernel would show.
    pub fn write(topology: &Topology, root: &Path) {
        let put = |path: String, text: String| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text + "\n").unwrap();
        };
        put("cpu/online".into(), topology.all_cpus().to_string());
        let mut cores_of: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for cpu in topology.cpus.values() {
            cores_of.entry(cpu.socket).or_default().insert(cpu.core);
        }
        for (id, cpu) in &topology.cpus {
            // The kernel counts cores anew in each socket.
            let core_id = cores_of[&cpu.socket].range(..cpu.core).count();
            put(format!("cpu/cpu{id}/topology/core_id"), core_id.to_string());
            put(
                format!("cpu/cpu{id}/topology/physical_package_id"),
                cpu.socket.to_string(),
            );
            let shared =
                topology.cpus_where(|other| other.uncore == cpu.uncore && other.socket == cpu.socket);
            put(format!("cpu/cpu{id}/cache/index2/level"), "2".into());
            put(format!("cpu/cpu{id}/cache/index2/id"), cpu.core.to_string());
            put(
                format!("cpu/cpu{id}/cache/index2/shared_cpu_list"),
                topology.cpus_where(|other| other.core == cpu.core).to_string(),
            );
            put(format!("cpu/cpu{id}/cache/index3/level"), "3".into());
            put(format!("cpu/cpu{id}/cache/index3/id"), cpu.uncore.to_string());
            put(
                format!("cpu/cpu{id}/cache/index3/shared_cpu_list"),
                shared.to_string(),
            );
        }
        for (id, node) in &topology.nodes {
            let cpus = topology.cpus_where(|cpu| cpu.numa == *id);
            put(format!("node/node{id}/cpulist"), cpus.to_string());
            put(
                format!("node/node{id}/meminfo"),
                format!(
                    "Node {id} MemTotal:       {} kB\nNode {id} MemFree: 1 kB",
                    node.memory / 1024
                ),
            );
            let distances: Vec<String> = node.distances.iter().map(u64::to_string).collect();
            put(format!("node/node{id}/distance"), distances.join(" "));
            for (size, bytes) in &node.huge_pages {
                let count = bytes / (size * 1024);
                put(
                    format!("node/node{id}/hugepages/hugepages-{size}kB/nr_hugepages"),
                    count.to_string(),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{machine, with_caches, write};
    use super::*;

    #[test]
    fn what_the_kernel_shows_is_read() {
        let mut large = machine(2, 2, 2, 2);
        large.nodes.get_mut(&1).unwrap().huge_pages.insert(2048, 4 << 20);
        for topology in [
            large,
            machine(1, 1, 2, 1),
            machine(2, 1, 4, 2),
            with_caches(machine(1, 1, 8, 2), 4),
        ] {
            let dir = tempfile::tempdir().unwrap();
            write(&topology, dir.path());
            let read = Topology::read(dir.path()).unwrap();
            assert_eq!(read.nodes, topology.nodes);
            assert_eq!(read.cpus, topology.cpus);
        }
    }

    #[test]
    fn parts_may_be_missing() {
        let topology = machine(2, 1, 2, 1);
        let dir = tempfile::tempdir().unwrap();
        write(&topology, dir.path());
        // Taken off line: it is in the node's list no more, or still.
        std::fs::write(dir.path().join("cpu/online"), "0,2-3\n").unwrap();
        let read = Topology::read(dir.path()).unwrap();
        assert_eq!(read.all_cpus().to_string(), "0,2-3");
        // A kernel without NUMA.
        std::fs::remove_dir_all(dir.path().join("node")).unwrap();
        let read = Topology::read(dir.path()).unwrap();
        assert_eq!(read.node_ids(), [0, 1]);
        assert_eq!(read.cpus_where(|cpu| cpu.numa == 1).to_string(), "2-3");
        std::fs::write(dir.path().join("cpu/online"), "some\n").unwrap();
        assert!(matches!(Topology::read(dir.path()), Err(Error::Syntax { .. })));
        std::fs::remove_file(dir.path().join("cpu/online")).unwrap();
        assert!(matches!(Topology::read(dir.path()), Err(Error::Read { .. })));
    }

    #[test]
    fn this_machine() {
        let read = Topology::read(Path::new(SYSTEM)).unwrap();
        assert!(!read.cpus.is_empty() && read.cpus_per_core() >= 1);
    }
}
