//! The flags and configuration fields of the CPU, memory and topology managers. Options that upstream v1.36 has off by
//! default are refused by name. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use skiff_meta::quantity::Quantity;

use super::cpu_set::{self, CpuSet};
use super::hints::Policy;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("unknown policy: {0:?}")]
    Policy(String),
    #[error("{0:?} must be one of: [\"none\" \"best-effort\" \"restricted\" \"single-numa-node\"]")]
    TopologyPolicy(String),
    #[error("{0:?} must be one of: \"container\", or \"pod\"")]
    Scope(String),
    #[error("unknown CPU Manager Policy option: {0:?}")]
    CpuOption(String),
    #[error("CPU Manager Policy Alpha-level Options not enabled, but option {0:?} provided")]
    AlphaOption(String),
    #[error("unknown Topology Manager Policy option: {0:?}")]
    TopologyOption(String),
    #[error("bad value for option {name:?}: {value:?}")]
    Value { name: String, value: String },
    #[error("the minimum value of {MAX_NODES:?} should not be less than {DEFAULT_MAX_NODES}")]
    MaxNodes,
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Together(&'static str, &'static str),
    #[error("None policy: received unsupported options")]
    OptionsOfNone,
    #[error(transparent)]
    Cpus(#[from] cpu_set::ParseError),
    #[error(
        "the reserved memory has incorrect format, expected numaNodeID:type=quantity[,type=quantity...], got {0}"
    )]
    Reservation(String),
    #[error(
        "the limit type {resource:?} for NUMA node {node} is not supported, only [memory hugepages-<HugePageSize>] is accepted"
    )]
    ReservedType { node: u32, resource: String },
    #[error("reserved memory may not be zero for NUMA node {node} and resource {resource:?}")]
    ReservedZero { node: u32, resource: String },
    #[error("the reserved memory has a duplicate value for NUMA node {node} and resource {resource:?}")]
    ReservedTwice { node: u32, resource: String },
}

const FULL_CORES: &str = "full-pcpus-only";
const DISTRIBUTE: &str = "distribute-cpus-across-numa";
const STRICT: &str = "strict-cpu-reservation";
const UNCORE: &str = "prefer-align-cpus-by-uncorecache";
/// Off in v1.36: they need a feature gate.
const ALPHA: [&str; 2] = ["align-by-socket", "distribute-cpus-across-cores"];
const CLOSEST: &str = "prefer-closest-numa-nodes";
const MAX_NODES: &str = "max-allowable-numa-nodes";
const DEFAULT_MAX_NODES: usize = 8;

/// Of the static policy for CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Whole cores only: no core is shared between containers.
    pub full_cores: bool,
    /// Evenly over NUMA nodes, where one is not enough.
    pub distribute: bool,
    /// Reserved CPUs run no pods at all.
    pub strict_reservation: bool,
    /// CPUs of one last-level cache, where possible.
    pub prefer_uncore: bool,
}

impl CpuOptions {
    /// Those that are on, by their names.
    pub fn to_map(self) -> BTreeMap<&'static str, String> {
        let all = [
            (FULL_CORES, self.full_cores),
            (DISTRIBUTE, self.distribute),
            (STRICT, self.strict_reservation),
            (UNCORE, self.prefer_uncore),
        ];
        let on = all.into_iter().filter(|(_, on)| *on);
        on.map(|(name, on)| (name, on.to_string())).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyOptions {
    /// Of as many NUMA nodes, those that are closest to each other.
    pub prefer_closest: bool,
    /// On a machine with more, the kubelet does not start.
    pub max_nodes: usize,
}

impl TopologyOptions {
    /// Those that differ from the default, by their names.
    pub fn to_map(self) -> BTreeMap<&'static str, String> {
        let closest = self.prefer_closest.then(|| (CLOSEST, true.to_string()));
        let nodes = (self.max_nodes != DEFAULT_MAX_NODES).then(|| (MAX_NODES, self.max_nodes.to_string()));
        closest.into_iter().chain(nodes).collect()
    }
}

impl Default for TopologyOptions {
    fn default() -> Self {
        TopologyOptions {
            prefer_closest: false,
            max_nodes: DEFAULT_MAX_NODES,
        }
    }
}

/// Of the CPU and of the memory manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    #[default]
    None,
    Static,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    #[default]
    Container,
    Pod,
}

/// By resource: bytes of `memory` or `hugepages-…`.
pub type Reserved = BTreeMap<String, u64>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagersConfig {
    pub cpu_policy: Pinning,
    pub cpu_options: CpuOptions,
    pub reconcile_period: Duration,
    /// These, instead of as many as the reservation of CPU says.
    pub reserved_cpus: CpuSet,
    pub memory_policy: Pinning,
    /// By NUMA node.
    pub reserved_memory: BTreeMap<u32, Reserved>,
    pub topology_policy: Policy,
    pub scope: Scope,
    pub topology_options: TopologyOptions,
}

impl Default for ManagersConfig {
    fn default() -> Self {
        ManagersConfig {
            cpu_policy: Pinning::None,
            cpu_options: CpuOptions::default(),
            reconcile_period: Duration::from_secs(10),
            reserved_cpus: CpuSet::default(),
            memory_policy: Pinning::None,
            reserved_memory: BTreeMap::new(),
            topology_policy: Policy::None,
            scope: Scope::Container,
            topology_options: TopologyOptions::default(),
        }
    }
}

impl ManagersConfig {
    /// Whether the parts go together, once the file and the flags have been read.
    pub fn check(&self) -> Result<(), Wrong> {
        if self.cpu_policy == Pinning::None && self.cpu_options != CpuOptions::default() {
            return Err(("cpuManagerPolicyOptions", Error::OptionsOfNone));
        }
        Ok(())
    }
}

/// The same as text: flags, or fields of a KubeletConfiguration. What is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManagerFlags {
    pub cpu_policy: Option<String>,
    pub cpu_options: BTreeMap<String, String>,
    pub reconcile_period: Option<Duration>,
    pub reserved_cpus: Option<String>,
    pub memory_policy: Option<String>,
    /// NUMA node, resource, amount.
    pub reserved_memory: Vec<(u32, String, String)>,
    pub topology_policy: Option<String>,
    pub topology_scope: Option<String>,
    pub topology_options: BTreeMap<String, String>,
}

/// A field of the configuration, and what is wrong with it.
pub type Wrong = (&'static str, Error);

impl ManagerFlags {
    /// Puts what is said into the configuration.
    pub fn apply(&self, config: &mut ManagersConfig) -> Result<(), Wrong> {
        let at = |field| move |error| (field, error);
        if let Some(policy) = &self.cpu_policy {
            config.cpu_policy = pinning(policy, "none", "static").map_err(at("cpuManagerPolicy"))?;
        }
        if !self.cpu_options.is_empty() {
            config.cpu_options = cpu_options(&self.cpu_options).map_err(at("cpuManagerPolicyOptions"))?;
        }
        config.reconcile_period = self.reconcile_period.unwrap_or(config.reconcile_period);
        if let Some(cpus) = &self.reserved_cpus {
            let parsed = cpus.parse().map_err(Error::from);
            config.reserved_cpus = parsed.map_err(at("reservedSystemCPUs"))?;
        }
        if let Some(policy) = &self.memory_policy {
            config.memory_policy = pinning(policy, "None", "Static").map_err(at("memoryManagerPolicy"))?;
        }
        if !self.reserved_memory.is_empty() {
            config.reserved_memory = reserved_memory(&self.reserved_memory).map_err(at("reservedMemory"))?;
        }
        if let Some(policy) = &self.topology_policy {
            let known = Policy::ALL.into_iter().find(|known| known.as_str() == policy);
            let known = known.ok_or_else(|| Error::TopologyPolicy(policy.clone()));
            config.topology_policy = known.map_err(at("topologyManagerPolicy"))?;
        }
        if let Some(scope) = &self.topology_scope {
            config.scope = match scope.as_str() {
                "container" => Scope::Container,
                "pod" => Scope::Pod,
                _ => return Err(("topologyManagerScope", Error::Scope(scope.clone()))),
            };
        }
        if !self.topology_options.is_empty() {
            config.topology_options =
                topology_options(&self.topology_options).map_err(at("topologyManagerPolicyOptions"))?;
        }
        Ok(())
    }
}

fn pinning(policy: &str, none: &str, pinned: &str) -> Result<Pinning, Error> {
    match policy {
        _ if policy == none => Ok(Pinning::None),
        _ if policy == pinned => Ok(Pinning::Static),
        _ => Err(Error::Policy(policy.to_owned())),
    }
}

/// COMPAT: what Go takes for a boolean.
fn boolean(name: &str, value: &str) -> Result<bool, Error> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(wrong_value(name, value)),
    }
}

fn wrong_value(name: &str, value: &str) -> Error {
    Error::Value {
        name: name.to_owned(),
        value: value.to_owned(),
    }
}

fn cpu_options(given: &BTreeMap<String, String>) -> Result<CpuOptions, Error> {
    let mut options = CpuOptions::default();
    for (name, value) in given {
        let option = match name.as_str() {
            FULL_CORES => &mut options.full_cores,
            DISTRIBUTE => &mut options.distribute,
            STRICT => &mut options.strict_reservation,
            UNCORE => &mut options.prefer_uncore,
            alpha if ALPHA.contains(&alpha) => return Err(Error::AlphaOption(name.clone())),
            _ => return Err(Error::CpuOption(name.clone())),
        };
        *option = boolean(name, value)?;
    }
    if options.prefer_uncore && options.distribute {
        return Err(Error::Together(UNCORE, DISTRIBUTE));
    }
    Ok(options)
}

fn topology_options(given: &BTreeMap<String, String>) -> Result<TopologyOptions, Error> {
    let mut options = TopologyOptions::default();
    for (name, value) in given {
        match name.as_str() {
            CLOSEST => options.prefer_closest = boolean(name, value)?,
            MAX_NODES => {
                let number: i64 = value.parse().map_err(|_| wrong_value(name, value))?;
                let number = usize::try_from(number).map_err(|_| Error::MaxNodes)?;
                if number < DEFAULT_MAX_NODES {
                    return Err(Error::MaxNodes);
                }
                options.max_nodes = number;
            }
            _ => return Err(Error::TopologyOption(name.clone())),
        }
    }
    Ok(options)
}

/// One `--reserved-memory`: `0:memory=1Gi,hugepages-2Mi=4Mi`, several nodes with semicolons between them.
pub fn parse_reserved_memory(text: &str) -> Result<Vec<(u32, String, String)>, Error> {
    let mut all = Vec::new();
    for of_node in text.split(';') {
        let wrong = || Error::Reservation(of_node.to_owned());
        let (node, limits) = of_node.split_once(':').ok_or_else(wrong)?;
        let node: u32 = node.parse().map_err(|_| wrong())?;
        for limit in limits.split(',') {
            let (resource, amount) = limit.split_once('=').ok_or_else(wrong)?;
            all.push((node, resource.to_owned(), amount.to_owned()));
        }
    }
    Ok(all)
}

fn reserved_memory(given: &[(u32, String, String)]) -> Result<BTreeMap<u32, Reserved>, Error> {
    let mut reserved: BTreeMap<u32, Reserved> = BTreeMap::new();
    for (node, resource, amount) in given {
        let (node, resource) = (*node, resource.clone());
        if resource != "memory" && !resource.starts_with("hugepages-") {
            return Err(Error::ReservedType { node, resource });
        }
        let parsed = Quantity::parse(amount).map_err(|_| wrong_value(&resource, amount))?;
        let Ok(bytes @ 1..) = u64::try_from(parsed.value()) else {
            return Err(Error::ReservedZero { node, resource });
        };
        let of_node = reserved.entry(node).or_default();
        if of_node.insert(resource.clone(), bytes).is_some() {
            return Err(Error::ReservedTwice { node, resource });
        }
    }
    Ok(reserved)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        list.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn applied(flags: &ManagerFlags) -> Result<ManagersConfig, String> {
        let mut config = ManagersConfig::default();
        let applied = flags.apply(&mut config).and_then(|()| config.check());
        applied
            .map(|()| config)
            .map_err(|(field, error)| format!("{field}: {error}"))
    }

    #[test]
    fn options_of_the_cpu_manager() {
        let with = |list: &[(&str, &str)]| {
            applied(&ManagerFlags {
                cpu_policy: Some("static".to_owned()),
                cpu_options: options(list),
                ..ManagerFlags::default()
            })
            .map(|config| config.cpu_options)
        };
        let full = with(&[(FULL_CORES, "true"), (STRICT, "T")]).unwrap();
        assert!(full.full_cores && full.strict_reservation && !full.distribute);
        let check = |list: &[(&str, &str)], expected: &str| {
            assert_eq!(
                with(list).unwrap_err(),
                format!("cpuManagerPolicyOptions: {expected}")
            );
        };
        check(
            &[("align-by-socket", "true")],
            "CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided",
        );
        check(
            &[("distribute-cpus-across-cores", "true")],
            "CPU Manager Policy Alpha-level Options not enabled, but option \"distribute-cpus-across-cores\" provided",
        );
        check(
            &[("faster", "true")],
            "unknown CPU Manager Policy option: \"faster\"",
        );
        check(
            &[(FULL_CORES, "yes")],
            "bad value for option \"full-pcpus-only\": \"yes\"",
        );
        check(
            &[(UNCORE, "true"), (DISTRIBUTE, "true")],
            "static policy options prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa can not be used at the same time",
        );
        let none = applied(&ManagerFlags {
            cpu_options: options(&[(FULL_CORES, "true")]),
            ..ManagerFlags::default()
        });
        assert_eq!(
            none.unwrap_err(),
            "cpuManagerPolicyOptions: None policy: received unsupported options"
        );
    }

    #[test]
    fn policies() {
        let config = applied(&ManagerFlags {
            memory_policy: Some("Static".to_owned()),
            topology_policy: Some("single-numa-node".to_owned()),
            topology_scope: Some("pod".to_owned()),
            topology_options: options(&[(CLOSEST, "1"), (MAX_NODES, "16")]),
            reserved_cpus: Some("0,2-3".to_owned()),
            reserved_memory: parse_reserved_memory("0:memory=1Gi,hugepages-2Mi=4Mi").unwrap(),
            ..ManagerFlags::default()
        })
        .unwrap();
        assert_eq!(config.memory_policy, Pinning::Static);
        assert_eq!(
            (config.topology_policy, config.scope),
            (Policy::SingleNumaNode, Scope::Pod)
        );
        assert_eq!(config.topology_options.max_nodes, 16);
        assert_eq!(config.reserved_cpus.len(), 3);
        assert_eq!(config.reserved_memory[&0]["hugepages-2Mi"], 4 << 20);
        let refused = |flags: ManagerFlags, expected: &str| {
            assert_eq!(applied(&flags).unwrap_err(), expected);
        };
        let default = ManagerFlags::default;
        refused(
            ManagerFlags {
                memory_policy: Some("static".to_owned()),
                ..default()
            },
            "memoryManagerPolicy: unknown policy: \"static\"",
        );
        refused(
            ManagerFlags {
                topology_policy: Some("best".to_owned()),
                ..default()
            },
            "topologyManagerPolicy: \"best\" must be one of: [\"none\" \"best-effort\" \"restricted\" \"single-numa-node\"]",
        );
        refused(
            ManagerFlags {
                topology_options: options(&[(MAX_NODES, "7")]),
                ..default()
            },
            "topologyManagerPolicyOptions: the minimum value of \"max-allowable-numa-nodes\" should not be less than 8",
        );
        refused(
            ManagerFlags {
                reserved_memory: vec![(0, "cpu".to_owned(), "1".to_owned())],
                ..default()
            },
            "reservedMemory: the limit type \"cpu\" for NUMA node 0 is not supported, only [memory hugepages-<HugePageSize>] is accepted",
        );
        refused(
            ManagerFlags {
                reserved_memory: parse_reserved_memory("1:memory=1Gi;1:memory=2Gi").unwrap(),
                ..default()
            },
            "reservedMemory: the reserved memory has a duplicate value for NUMA node 1 and resource \"memory\"",
        );
        for bad in ["memory=1Gi", "a:memory=1Gi", "0:memory", "0"] {
            assert!(parse_reserved_memory(bad).is_err(), "{bad}");
        }
    }
}
