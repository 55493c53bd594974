//! A pod as the scheduler keeps it: compact, with what plugins read and nothing else.
//!
//! What pods of one template have in common is a [`Shape`], kept once for all of them. What differs from pod to pod
//! (its name, its claims, where it is) is in [`PodInfo`].

use crate::plugins::extended_resources::{self, ContainerDemand};
use k8s_openapi::api::core::v1::{
    NodeSelector, Pod, PodAffinityTerm, PodCondition, PodSpec, PreferredSchedulingTerm, Toleration,
    TopologySpreadConstraint,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use skiff_client::{Cause, Key};
use skiff_pods::requests::Resources;
use skiff_pods::{affinity, requests, state};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) type Labels = BTreeMap<String, String>;

/// (protocol, host address, port)
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct HostPort {
    pub(crate) protocol: String,
    pub(crate) address: String,
    pub(crate) port: i32,
}

/// A term of pod affinity or anti-affinity, with its match label keys merged into the selector.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AffinityTerm {
    /// Empty together with no namespace selector cannot be: then it is the pod's own namespace.
    pub(crate) namespaces: Vec<String>,
    pub(crate) namespace_selector: Option<LabelSelector>,
    /// `None` matches no pod.
    pub(crate) selector: Option<LabelSelector>,
    pub(crate) topology_key: Arc<str>,
}

impl AffinityTerm {
    fn new(term: &PodAffinityTerm, namespace: &str, labels: &Labels) -> Self {
        let mut namespaces = term.namespaces.clone().unwrap_or_default();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.push(namespace.to_owned());
        }
        // The API server merges the keys into the selector of new pods; this is for pods that are older.
        let mut selector = term.label_selector.clone();
        if let Some(selector) = &mut selector {
            merge_keys(selector, term.match_label_keys.as_deref(), labels, "In");
            merge_keys(selector, term.mismatch_label_keys.as_deref(), labels, "NotIn");
        }
        Self {
            namespaces,
            namespace_selector: term.namespace_selector.clone(),
            selector,
            topology_key: term.topology_key.as_str().into(),
        }
    }

    /// True if a pod of these labels in this namespace is what the term speaks of.
    pub(crate) fn matches(&self, namespace: &str, namespace_labels: &Labels, labels: &Labels) -> bool {
        let here = self.namespaces.iter().any(|one| one == namespace)
            || self
                .namespace_selector
                .as_ref()
                .is_some_and(|selector| skiff_pods::labels::matches(selector, Some(namespace_labels)));
        here && self
            .selector
            .as_ref()
            .is_some_and(|selector| skiff_pods::labels::matches(selector, Some(labels)))
    }
}

/// Adds `key In (value)` or `key NotIn (value)` for each key that the pod has, once.
pub(crate) fn merge_keys(
    selector: &mut LabelSelector,
    keys: Option<&[String]>,
    labels: &Labels,
    operator: &str,
) {
    for key in keys.unwrap_or_default() {
        let Some(value) = labels.get(key) else { continue };
        let requirement = LabelSelectorRequirement {
            key: key.clone(),
            operator: operator.to_owned(),
            values: Some(vec![value.clone()]),
        };
        let expressions = selector.match_expressions.get_or_insert_default();
        if !expressions.contains(&requirement) {
            expressions.push(requirement);
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WeightedTerm {
    pub(crate) weight: i64,
    pub(crate) term: AffinityTerm,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct PodAffinity {
    pub(crate) required: Vec<AffinityTerm>,
    pub(crate) required_anti: Vec<AffinityTerm>,
    pub(crate) preferred: Vec<WeightedTerm>,
    pub(crate) preferred_anti: Vec<WeightedTerm>,
}

impl PodAffinity {
    pub(crate) fn is_empty(&self) -> bool {
        self.required.is_empty()
            && self.required_anti.is_empty()
            && self.preferred.is_empty()
            && self.preferred_anti.is_empty()
    }

    fn new(spec: &PodSpec, namespace: &str, labels: &Labels) -> Self {
        let mut read = Self::default();
        let Some(affinity) = &spec.affinity else {
            return read;
        };
        let term = |term: &PodAffinityTerm| AffinityTerm::new(term, namespace, labels);
        if let Some(towards) = &affinity.pod_affinity {
            let required = towards.required_during_scheduling_ignored_during_execution.iter();
            read.required = required.flatten().map(term).collect();
            let preferred = towards
                .preferred_during_scheduling_ignored_during_execution
                .iter();
            read.preferred = preferred
                .flatten()
                .map(|one| WeightedTerm {
                    weight: one.weight.into(),
                    term: term(&one.pod_affinity_term),
                })
                .collect();
        }
        if let Some(away) = &affinity.pod_anti_affinity {
            let required = away.required_during_scheduling_ignored_during_execution.iter();
            read.required_anti = required.flatten().map(term).collect();
            let preferred = away.preferred_during_scheduling_ignored_during_execution.iter();
            read.preferred_anti = preferred
                .flatten()
                .map(|one| WeightedTerm {
                    weight: one.weight.into(),
                    term: term(&one.pod_affinity_term),
                })
                .collect();
        }
        read
    }
}

/// What plugins read of a pod and all pods of a template share. Two shapes that are equal are one: compare pointers.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) parts: Parts,
    /// How many pods of it were tried: the class cache is for shapes that come again.
    pub(crate) attempts: AtomicU32,
}

impl std::ops::Deref for Shape {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Parts {
    pub(crate) scheduler_name: String,
    pub(crate) namespace: String,
    pub(crate) labels: Labels,
    pub(crate) priority: i32,
    pub(crate) never_preempts: bool,
    pub(crate) requests: Resources,
    /// CPU and memory as counted for scoring.
    pub(crate) scoring: (i64, i64),
    pub(crate) host_ports: Vec<HostPort>,
    pub(crate) tolerations: Vec<Toleration>,
    pub(crate) node_selector: BTreeMap<String, String>,
    pub(crate) required_nodes: Option<NodeSelector>,
    pub(crate) preferred_nodes: Vec<PreferredSchedulingTerm>,
    pub(crate) affinity: PodAffinity,
    pub(crate) spread: Vec<TopologySpreadConstraint>,
    /// Of all containers, init containers included.
    pub(crate) images: Vec<String>,
    /// All containers, init containers included.
    pub(crate) containers: usize,
    pub(crate) gates: Vec<String>,
    /// (kind, name) of the controller.
    pub(crate) owner: Option<(String, String)>,
    /// Features that its node must declare.
    pub(crate) features: Vec<&'static str>,
    /// Containers that ask for resources which a DeviceClass may back.
    pub(crate) extended: Vec<ContainerDemand>,
}

impl Parts {
    fn new(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let Some(spec) = spec else {
            return Self {
                namespace,
                labels,
                ..Self::default()
            };
        };
        let containers = || {
            spec.containers
                .iter()
                .chain(spec.init_containers.iter().flatten())
        };
        let mut owners = pod.metadata.owner_references.iter().flatten();
        let owner = owners.find(|owner| owner.controller == Some(true));
        Self {
            scheduler_name: scheduler_name(spec),
            priority: state::priority(pod),
            never_preempts: spec.preemption_policy.as_deref() == Some("Never"),
            requests: requests::pod_requests(pod),
            scoring: requests::scoring_requests(pod),
            host_ports: host_ports(spec),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            node_selector: spec.node_selector.clone().unwrap_or_default(),
            required_nodes: affinity::required(spec).cloned(),
            preferred_nodes: affinity::preferred(spec).to_vec(),
            affinity: PodAffinity::new(spec, &namespace, &labels),
            spread: spec.topology_spread_constraints.clone().unwrap_or_default(),
            images: images(spec),
            containers: containers().count(),
            gates: spec
                .scheduling_gates
                .iter()
                .flatten()
                .map(|gate| gate.name.clone())
                .collect(),
            owner: owner.map(|owner| (owner.kind.clone(), owner.name.clone())),
            features: crate::plugins::node_declared_features::required(pod),
            extended: extended_resources::demands(spec),
            namespace,
            labels,
        }
    }

    /// Of what mostly differs; equality decides.
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.namespace.hash(&mut hasher);
        self.labels.hash(&mut hasher);
        self.priority.hash(&mut hasher);
        self.requests.hash(&mut hasher);
        self.images.hash(&mut hasher);
        self.node_selector.hash(&mut hasher);
        self.gates.hash(&mut hasher);
        if let Some(required) = &self.required_nodes {
            // Pods of a DaemonSet differ in the name of their node only.
            for term in &required.node_selector_terms {
                for field in term.match_fields.iter().flatten() {
                    field.values.hash(&mut hasher);
                }
            }
        }
        hasher.finish()
    }
}

fn scheduler_name(spec: &PodSpec) -> String {
    let name = spec.scheduler_name.clone().filter(|name| !name.is_empty());
    name.unwrap_or_else(|| crate::config::DEFAULT_SCHEDULER.to_owned())
}

/// With the tag `latest` where none is given, as nodes report them. Image volumes count too.
fn images(spec: &PodSpec) -> Vec<String> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let volumes = spec
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| volume.image.as_ref());
    let names = containers.filter_map(|container| container.image.as_deref());
    let names = names.chain(volumes.filter_map(|image| image.reference.as_deref()));
    names
        .map(|name| match (name.rfind(':'), name.rfind('/')) {
            (Some(colon), slash) if slash.is_none_or(|slash| colon > slash) => name.to_owned(),
            _ => format!("{name}:latest"),
        })
        .collect()
}

fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    // COMPAT: as upstream, ports of sidecars count, those of other init containers do not.
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let ports = spec
        .containers
        .iter()
        .chain(sidecars)
        .flat_map(|c| c.ports.iter().flatten());
    ports
        .filter_map(|port| {
            let number = port.host_port.filter(|number| *number > 0)?;
            let address = port.host_ip.clone().filter(|ip| !ip.is_empty());
            let protocol = port.protocol.clone().filter(|protocol| !protocol.is_empty());
            Some(HostPort {
                protocol: protocol.unwrap_or_else(|| "TCP".to_owned()),
                address: address.unwrap_or_else(|| "0.0.0.0".to_owned()),
                port: number,
            })
        })
        .collect()
}

/// A volume that has a say in where the pod can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VolumeUse {
    /// A claim by name; `generated` for a generic ephemeral volume.
    Claim { name: String, generated: bool },
    /// A disk of a cloud or a network that only one node, or only readers, may have: kind, identity, read-only.
    Disk {
        kind: DiskKind,
        ids: Vec<String>,
        read_only: bool,
    },
    /// An inline CSI volume.
    InlineCsi { driver: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskKind {
    GcePersistentDisk,
    AwsElasticBlockStore,
    Iscsi,
    Rbd,
}

fn volumes(pod: &Pod) -> Box<[VolumeUse]> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let read = volumes.filter_map(|volume| {
        if let Some(claim) = &volume.persistent_volume_claim {
            return Some(VolumeUse::Claim {
                name: claim.claim_name.clone(),
                generated: false,
            });
        }
        if volume.ephemeral.is_some() {
            return Some(VolumeUse::Claim {
                name: format!("{name}-{}", volume.name),
                generated: true,
            });
        }
        if let Some(csi) = &volume.csi {
            return Some(VolumeUse::InlineCsi {
                driver: csi.driver.clone(),
            });
        }
        let (kind, ids, read_only) = if let Some(disk) = &volume.gce_persistent_disk {
            (
                DiskKind::GcePersistentDisk,
                vec![disk.pd_name.clone()],
                disk.read_only,
            )
        } else if let Some(disk) = &volume.aws_elastic_block_store {
            // COMPAT: upstream lets no two pods of a node share it, be they readers or not.
            (DiskKind::AwsElasticBlockStore, vec![disk.volume_id.clone()], None)
        } else if let Some(disk) = &volume.iscsi {
            (DiskKind::Iscsi, vec![disk.iqn.clone()], disk.read_only)
        } else if let Some(disk) = &volume.rbd {
            let pool = disk.pool.clone().unwrap_or_else(|| "rbd".to_owned());
            let mut ids = vec![pool, disk.image.clone()];
            ids.extend(disk.monitors.iter().cloned());
            (DiskKind::Rbd, ids, disk.read_only)
        } else {
            return None;
        };
        Some(VolumeUse::Disk {
            kind,
            ids,
            read_only: read_only.unwrap_or(false),
        })
    });
    read.collect()
}

/// A pod, placed or waiting.
#[derive(Debug, Clone)]
pub(crate) struct PodInfo {
    pub(crate) key: Key,
    pub(crate) uid: Arc<str>,
    pub(crate) version: String,
    pub(crate) generation: Option<i64>,
    pub(crate) shape: Arc<Shape>,
    pub(crate) volumes: Box<[VolumeUse]>,
    pub(crate) resource_claims: Box<[ClaimUse]>,
    /// The PodGroup of its namespace that it belongs to. Pods of one shape may belong to several.
    pub(crate) pod_group: Option<Arc<str>>,
    pub(crate) node_name: String,
    pub(crate) nominated: String,
    pub(crate) ended: bool,
    pub(crate) deleting: bool,
    /// Being deleted because a scheduler preempted it.
    pub(crate) preempted: bool,
    /// In microseconds since the epoch; of pods that were not started, the latest there is.
    pub(crate) started: i64,
    pub(crate) scheduled_condition: Option<Box<PodCondition>>,
}

impl PodInfo {
    pub(crate) fn new(pod: &Pod, shapes: &mut Shapes) -> Self {
        let status = pod.status.as_ref();
        let disrupted = state::condition(pod, "DisruptionTarget").is_some_and(|condition| {
            condition.status == "True" && condition.reason.as_deref() == Some("PreemptionByScheduler")
        });
        let deleting = pod.metadata.deletion_timestamp.is_some();
        let node_name = state::node_name(pod).to_owned();
        let started = status
            .and_then(|s| s.start_time.as_ref())
            .map(|time| time.0.as_microsecond());
        let waiting = node_name.is_empty();
        Self {
            key: Key::of(pod),
            uid: pod.metadata.uid.as_deref().unwrap_or_default().into(),
            version: pod.metadata.resource_version.clone().unwrap_or_default(),
            generation: pod.metadata.generation,
            shape: shapes.intern(Parts::new(pod)),
            volumes: volumes(pod),
            resource_claims: resource_claims(pod),
            pod_group: pod_group(pod),
            nominated: status
                .and_then(|s| s.nominated_node_name.clone())
                .unwrap_or_default(),
            ended: state::is_terminal(pod),
            deleting,
            preempted: deleting && disrupted,
            started: started.unwrap_or(i64::MAX),
            scheduled_condition: waiting
                .then(|| state::condition(pod, "PodScheduled").cloned().map(Box::new))
                .flatten(),
            node_name,
        }
    }

    pub(crate) fn cause(&self) -> Cause {
        Cause {
            resource: "pods".to_owned(),
            namespace: self.key.namespace.clone(),
            name: self.key.name.clone(),
            version: self.version.clone(),
        }
    }

    /// The PodGroup that it belongs to.
    pub(crate) fn group_key(&self) -> Option<Key> {
        let name = self.pod_group.as_deref()?;
        Some(Key::new(self.key.namespace.as_str(), name))
    }

    pub(crate) fn priority(&self) -> i32 {
        self.shape.priority
    }

    /// True if this pod has something to say that others of its shape have not.
    pub(crate) fn is_special(&self) -> bool {
        !self.volumes.is_empty() || !self.resource_claims.is_empty()
    }

    /// The pods of upstream's `MoreImportantPod` first: higher priority, then the one that started earlier.
    pub(crate) fn importance(&self) -> (std::cmp::Reverse<i32>, i64) {
        (std::cmp::Reverse(self.shape.priority), self.started)
    }
}

fn pod_group(pod: &Pod) -> Option<Arc<str>> {
    let group = pod.spec.as_ref()?.scheduling_group.as_ref()?;
    group.pod_group_name.as_deref().map(Arc::from)
}

/// A resource claim of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimUse {
    /// In `spec.resourceClaims`.
    pub(crate) name: String,
    /// The claim's own name; `None` until it was made from its template.
    pub(crate) claim: Option<String>,
    /// Made from a template, for this pod alone.
    pub(crate) generated: bool,
}

fn resource_claims(pod: &Pod) -> Box<[ClaimUse]> {
    let statuses = pod
        .status
        .iter()
        .flat_map(|s| s.resource_claim_statuses.iter().flatten());
    let made: HashMap<&str, &Option<String>> = statuses
        .map(|status| (status.name.as_str(), &status.resource_claim_name))
        .collect();
    let claims = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let used = claims.filter_map(|claim| {
        let (name, generated) = match (&claim.resource_claim_name, made.get(claim.name.as_str())) {
            (Some(name), _) => (Some(name.clone()), false),
            // The controller found that no claim is needed.
            (None, Some(None)) => return None,
            (None, Some(Some(name))) => (Some(name.clone()), true),
            (None, None) => (None, true),
        };
        Some(ClaimUse {
            name: claim.name.clone(),
            claim: name,
            generated,
        })
    });
    used.collect()
}

/// All shapes that some pod has.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    by_digest: HashMap<u64, Vec<Arc<Shape>>>,
    count: usize,
    swept_at: usize,
}

impl Shapes {
    fn intern(&mut self, parts: Parts) -> Arc<Shape> {
        let digest = parts.digest();
        if let Some(known) = self.by_digest.get(&digest)
            && let Some(same) = known.iter().find(|shape| shape.parts == parts)
        {
            return Arc::clone(same);
        }
        let shape = Arc::new(Shape {
            parts,
            attempts: AtomicU32::new(0),
        });
        self.by_digest.entry(digest).or_default().push(Arc::clone(&shape));
        self.count += 1;
        // What no pod has any more is dropped each time the table has doubled.
        if self.count > 2 * self.swept_at.max(512) {
            self.by_digest.retain(|_, shapes| {
                shapes.retain(|shape| Arc::strong_count(shape) > 1);
                !shapes.is_empty()
            });
            self.count = self.by_digest.values().map(Vec::len).sum();
            self.swept_at = self.count;
        }
        shape
    }
}

impl Shape {
    /// Counts an attempt and tells how many there were before.
    pub(crate) fn count_attempt(&self) -> u32 {
        self.attempts.fetch_add(1, Ordering::Relaxed)
    }
}
