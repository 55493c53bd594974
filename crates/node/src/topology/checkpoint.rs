//! The files in which upstream's kubelet keeps what its CPU and memory managers have assigned, with its checksums: a node
//! can change between that kubelet and this one. Reads and writes files, decides nothing.
//!
//! COMPAT: the checksum is FNV-1a over Go's names and values of the structure (upstream's `dump.ForHash`).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::cpu_set::{self, CpuSet};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "could not restore state from checkpoint: {why}, please drain this node and delete the {manager} manager checkpoint file {path:?} before restarting Kubelet"
    )]
    Restore {
        manager: &'static str,
        path: PathBuf,
        why: Box<Why>,
    },
    #[error("failed to write checkpoint file {path:?}: {source}")]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum Why {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("checkpoint is corrupted")]
    Checksum,
    #[error("configured policy {configured:?} differs from state checkpoint policy {found:?}")]
    Policy { configured: String, found: String },
    #[error("could not parse default cpu set {0:?}: {1}")]
    DefaultSet(String, cpu_set::ParseError),
    #[error("could not parse cpuset {0:?} for container {1:?} in pod {2:?}: {3}")]
    ContainerSet(String, String, String, cpu_set::ParseError),
}

/// By pod's uid and container.
pub type ByContainer<T> = BTreeMap<String, BTreeMap<String, T>>;

/// One of the two files.
pub trait Checkpoint: Serialize + DeserializeOwned {
    const MANAGER: &'static str;
    const FILE: &'static str;

    fn policy(&self) -> &str;
    fn checksum(&mut self) -> &mut u64;
    /// As Go prints it with its types, the checksum being zero.
    fn dump(&self) -> String;
}

fn fnv1a(text: &str) -> u64 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(16_777_619);
    text.bytes().fold(2_166_136_261, step).into()
}

/// `None` if there is no such file yet.
pub fn load<C: Checkpoint>(root: &Path, policy: &str) -> Result<Option<C>, Error> {
    let path = root.join(C::FILE);
    let wrong = |why: Why| Error::Restore {
        manager: C::MANAGER,
        path: path.clone(),
        why: Box::new(why),
    };
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(error.into())),
    };
    let mut checkpoint: C = serde_json::from_slice(&bytes).map_err(|error| wrong(error.into()))?;
    let expected = *checkpoint.checksum();
    // COMPAT: no checksum is accepted.
    if expected != 0 && expected != fnv1a(&checkpoint.dump()) {
        return Err(wrong(Why::Checksum));
    }
    if checkpoint.policy() != policy {
        return Err(wrong(Why::Policy {
            configured: policy.to_owned(),
            found: checkpoint.policy().to_owned(),
        }));
    }
    Ok(Some(checkpoint))
}

/// On disk when it returns.
pub fn save<C: Checkpoint>(root: &Path, mut checkpoint: C) -> Result<(), Error> {
    let path = root.join(C::FILE);
    *checkpoint.checksum() = fnv1a(&checkpoint.dump());
    let written = serde_json::to_vec(&checkpoint)
        .map_err(io::Error::from)
        .and_then(|bytes| skiff_fs::write_durably(&path, &bytes, 0o600));
    written.map_err(|source| Error::Write { path, source })
}

/// Go's `map[a:b c:d]`.
fn dump_map<K: std::fmt::Display, V>(map: &BTreeMap<K, V>, value: impl Fn(&V) -> String) -> String {
    let entries: Vec<String> = map
        .iter()
        .map(|(key, one)| format!("{key}:{}", value(one)))
        .collect();
    format!("map[{}]", entries.join(" "))
}

fn dump_ids(ids: &[u32]) -> String {
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("([]int)[{}]", ids.join(" "))
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuCheckpoint {
    pub policy_name: String,
    #[serde(default)]
    pub default_cpu_set: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub entries: ByContainer<String>,
    #[serde(default)]
    checksum: u64,
}

impl CpuCheckpoint {
    pub fn new(policy: &str, default: &CpuSet, entries: &ByContainer<CpuSet>) -> Self {
        let text = |(name, cpus): (&String, &CpuSet)| (name.clone(), cpus.to_string());
        let of_pod = |(uid, containers): (&String, &BTreeMap<String, CpuSet>)| {
            (uid.clone(), containers.iter().map(text).collect())
        };
        CpuCheckpoint {
            policy_name: policy.to_owned(),
            default_cpu_set: default.to_string(),
            entries: entries.iter().map(of_pod).collect(),
            checksum: 0,
        }
    }

    /// The shared pool and what containers have.
    pub fn sets(&self) -> Result<(CpuSet, ByContainer<CpuSet>), Why> {
        let default = &self.default_cpu_set;
        let pool = default
            .parse()
            .map_err(|error| Why::DefaultSet(default.clone(), error))?;
        let mut entries: ByContainer<CpuSet> = BTreeMap::new();
        for (uid, containers) in &self.entries {
            for (name, text) in containers {
                let cpus = text
                    .parse()
                    .map_err(|error| Why::ContainerSet(text.clone(), name.clone(), uid.clone(), error))?;
                entries.entry(uid.clone()).or_default().insert(name.clone(), cpus);
            }
        }
        Ok((pool, entries))
    }
}

impl Checkpoint for CpuCheckpoint {
    const MANAGER: &'static str = "CPU";
    const FILE: &'static str = "cpu_manager_state";

    fn policy(&self) -> &str {
        &self.policy_name
    }

    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }

    fn dump(&self) -> String {
        let entries = dump_map(&self.entries, |containers| dump_map(containers, String::clone));
        format!(
            "(*state.CPUManagerCheckpoint){{PolicyName:(string){} DefaultCPUSet:(string){} \
             Entries:(map[string]map[string]string){entries} Checksum:(checksum.Checksum)0}}",
            self.policy_name, self.default_cpu_set
        )
    }
}

/// Bytes of one resource on one NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryTable {
    pub total: u64,
    pub system_reserved: u64,
    pub allocatable: u64,
    pub reserved: u64,
    pub free: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// Blocks that use the node.
    pub number_of_assignments: i64,
    /// By resource.
    pub memory_map: BTreeMap<String, MemoryTable>,
    /// The node, and those that blocks use together with it.
    pub cells: Vec<u32>,
}

/// Memory of one resource that a container has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Block {
    pub numa_affinity: Vec<u32>,
    #[serde(rename = "type")]
    pub resource: String,
    pub size: u64,
}

/// By NUMA node.
pub type MachineMemory = BTreeMap<u32, NodeMemory>;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryCheckpoint {
    pub policy_name: String,
    #[serde(default)]
    pub machine_state: MachineMemory,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub entries: ByContainer<Vec<Block>>,
    #[serde(default)]
    checksum: u64,
}

impl MemoryCheckpoint {
    pub fn new(policy: &str, machine_state: MachineMemory, entries: ByContainer<Vec<Block>>) -> Self {
        MemoryCheckpoint {
            policy_name: policy.to_owned(),
            machine_state,
            entries,
            checksum: 0,
        }
    }
}

impl Checkpoint for MemoryCheckpoint {
    const MANAGER: &'static str = "memory";
    const FILE: &'static str = "memory_manager_state";

    fn policy(&self) -> &str {
        &self.policy_name
    }

    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }

    fn dump(&self) -> String {
        let table = |table: &MemoryTable| {
            format!(
                "<*>{{TotalMemSize:(uint64){} SystemReserved:(uint64){} Allocatable:(uint64){} \
                 Reserved:(uint64){} Free:(uint64){}}}",
                table.total, table.system_reserved, table.allocatable, table.reserved, table.free
            )
        };
        let node = |node: &NodeMemory| {
            format!(
                "<*>{{NumberOfAssignments:(int){} MemoryMap:(map[v1.ResourceName]*state.MemoryTable){} Cells:{}}}",
                node.number_of_assignments,
                dump_map(&node.memory_map, table),
                dump_ids(&node.cells)
            )
        };
        let blocks = |blocks: &Vec<Block>| {
            let mut text = String::from("[");
            for (place, block) in blocks.iter().enumerate() {
                let space = if place > 0 { " " } else { "" };
                // Writing into a string does not fail.
                let _ = write!(
                    text,
                    "{space}{{NUMAAffinity:{} Type:(v1.ResourceName){} Size:(uint64){}}}",
                    dump_ids(&block.numa_affinity),
                    block.resource,
                    block.size
                );
            }
            text + "]"
        };
        format!(
            "(*state.MemoryManagerCheckpoint){{PolicyName:(string){} MachineState:(state.NUMANodeMap){} \
             Entries:(state.ContainerMemoryAssignments){} Checksum:(checksum.Checksum)0}}",
            self.policy_name,
            dump_map(&self.machine_state, node),
            dump_map(&self.entries, |containers| dump_map(containers, blocks))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What upstream's own tests have.
    #[test]
    fn checksums_are_upstreams() {
        let mut cpus: CpuCheckpoint = serde_json::from_str(
            r#"{"policyName": "none", "defaultCpuSet": "1-3",
                "entries": {"pod": {"container1": "4-6", "container2": "1-3"}}, "checksum": 3610638499}"#,
        )
        .unwrap();
        assert_eq!(fnv1a(&cpus.dump()), *cpus.checksum());
        let mut pool: CpuCheckpoint = serde_json::from_str(
            r#"{"policyName": "none", "defaultCpuSet": "4-6", "entries": {}, "checksum": 354655845}"#,
        )
        .unwrap();
        assert_eq!(fnv1a(&pool.dump()), *pool.checksum());
        let mut memory: MemoryCheckpoint = serde_json::from_str(
            r#"{"policyName":"static",
                "machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":2048,"systemReserved":512,
                "allocatable":1536,"reserved":512,"free":1024}},"cells":[]}},
                "entries":{"pod":{"container1":[{"numaAffinity":[0],"type":"memory","size":512}]}},
                "checksum": 4215593881}"#,
        )
        .unwrap();
        assert_eq!(fnv1a(&memory.dump()), *memory.checksum());
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(load::<CpuCheckpoint>(dir.path(), "static").unwrap(), None);
        let entries: ByContainer<CpuSet> = [("u".to_owned(), [("c".to_owned(), set("1"))].into())].into();
        save(dir.path(), CpuCheckpoint::new("static", &set("0,2-3"), &entries)).unwrap();
        let text = std::fs::read_to_string(dir.path().join("cpu_manager_state")).unwrap();
        assert!(
            text.starts_with(
                r#"{"policyName":"static","defaultCpuSet":"0,2-3","entries":{"u":{"c":"1"}},"checksum":"#
            ),
            "{text}"
        );
        let loaded = load::<CpuCheckpoint>(dir.path(), "static").unwrap().unwrap();
        assert_eq!(loaded.sets().unwrap(), (set("0,2-3"), entries));
        let refused = |expected: &str| {
            let error = load::<CpuCheckpoint>(dir.path(), "none").unwrap_err().to_string();
            let path = dir.path().join("cpu_manager_state");
            assert_eq!(
                error,
                format!(
                    "could not restore state from checkpoint: {expected}, please drain this node and delete the CPU manager checkpoint file {path:?} before restarting Kubelet"
                )
            );
        };
        refused("configured policy \"none\" differs from state checkpoint policy \"static\"");
        std::fs::write(
            dir.path().join("cpu_manager_state"),
            text.replace(":\"1\"", ":\"2\""),
        )
        .unwrap();
        refused("checkpoint is corrupted");
    }
}
