//! What plugins look up besides nodes and pods: services and controllers that select pods, labels of namespaces,
//! disruption budgets, claims, volumes and what storage says.
//!
//! It is filled by informers (see `handlers`). Of workloads only selectors are kept.

use crate::plugins::IMPLICIT_PREFIX;
use crate::pod::{Labels, Parts};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use parking_lot::RwLock;
use skiff_client::Key;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A copy of all objects of a kind, by name.
pub(crate) struct Objects<K>(RwLock<HashMap<Key, Arc<K>>>, AtomicU64);

impl<K> Default for Objects<K> {
    fn default() -> Self {
        Self(RwLock::default(), AtomicU64::new(0))
    }
}

impl<K> Objects<K> {
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.0.read().get(&Key::new(namespace, name)).cloned()
    }

    pub(crate) fn set(&self, key: Key, object: Arc<K>) -> Option<Arc<K>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.write().insert(key, object)
    }

    /// Changes with each object.
    fn version(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    pub(crate) fn remove(&self, key: &Key) -> Option<Arc<K>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.write().remove(key)
    }

    pub(crate) fn find<T>(&self, select: impl FnMut((&Key, &Arc<K>)) -> Option<T>) -> Vec<T> {
        self.0.read().iter().filter_map(select).collect()
    }
}

/// The pods of each PodGroup, waiting or placed, by their uids.
#[derive(Default)]
pub(crate) struct GroupMembers(RwLock<HashMap<Key, HashSet<Arc<str>>>>);

impl GroupMembers {
    /// True if the pod is new.
    pub(crate) fn add(&self, group: &Key, uid: &Arc<str>) -> bool {
        let mut groups = self.0.write();
        match groups.get_mut(group) {
            Some(members) => members.insert(Arc::clone(uid)),
            None => {
                groups.insert(group.clone(), HashSet::from([Arc::clone(uid)]));
                true
            }
        }
    }

    pub(crate) fn remove(&self, group: &Key, uid: &str) {
        let mut groups = self.0.write();
        if let Some(members) = groups.get_mut(group) {
            members.remove(uid);
            if members.is_empty() {
                groups.remove(group);
            }
        }
    }

    pub(crate) fn count(&self, group: &Key) -> usize {
        self.0.read().get(group).map_or(0, HashSet::len)
    }

    pub(crate) fn uids(&self, group: &Key) -> Vec<Arc<str>> {
        self.0.read().get(group).into_iter().flatten().cloned().collect()
    }
}

/// What selects pods in a namespace: services by name, controllers by kind and name.
#[derive(Default)]
struct Selectors {
    services: BTreeMap<String, Labels>,
    controllers: HashMap<(&'static str, String), LabelSelector>,
    version: u64,
}

#[derive(Default)]
struct Namespaces {
    labels: HashMap<String, Arc<Labels>>,
    version: u64,
}

#[derive(Default)]
pub(crate) struct Listers {
    selectors: RwLock<HashMap<String, Selectors>>,
    namespaces: RwLock<Namespaces>,
    pub(crate) budgets: Objects<PodDisruptionBudget>,
    pub(crate) claims: Objects<PersistentVolumeClaim>,
    pub(crate) volumes: Objects<PersistentVolume>,
    pub(crate) classes: Objects<StorageClass>,
    pub(crate) csi_nodes: Objects<CSINode>,
    pub(crate) csi_drivers: Objects<CSIDriver>,
    pub(crate) csi_capacities: Objects<CSIStorageCapacity>,
    pub(crate) attachments: Objects<VolumeAttachment>,
    pub(crate) resource_claims: Objects<ResourceClaim>,
    pub(crate) slices: Objects<ResourceSlice>,
    pub(crate) device_classes: Objects<DeviceClass>,
    pub(crate) pod_groups: Objects<PodGroup>,
    pub(crate) group_members: GroupMembers,
    /// The classes by the extended resource that they back, of that version of the classes.
    backing: RwLock<(u64, HashMap<String, Arc<DeviceClass>>)>,
}

impl Listers {
    pub(crate) fn budgets_version(&self) -> u64 {
        self.budgets.version()
    }

    /// The DeviceClass that backs an extended resource. Of several the newest does, then the one with the first name.
    pub(crate) fn class_backing(&self, resource: &str) -> Option<Arc<DeviceClass>> {
        if let Some(name) = resource.strip_prefix(IMPLICIT_PREFIX) {
            return self.device_classes.get("", name);
        }
        let version = self.device_classes.version();
        {
            let known = self.backing.read();
            if known.0 == version {
                return known.1.get(resource).cloned();
            }
        }
        let mut classes = self.device_classes.find(|(key, class)| {
            let resource = class.spec.extended_resource_name.clone()?;
            Some((key.name.clone(), resource, Arc::clone(class)))
        });
        let created = |class: &DeviceClass| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        classes.sort_by(|(name_a, _, a), (name_b, _, b)| (created(a), name_b).cmp(&(created(b), name_a)));
        let classes = classes.into_iter().map(|(_, resource, class)| (resource, class));
        let mut known = self.backing.write();
        *known = (version, classes.collect());
        known.1.get(resource).cloned()
    }

    pub(crate) fn set_service(&self, key: &Key, selector: Option<Labels>) {
        let mut all = self.selectors.write();
        let of_namespace = all.entry(key.namespace.clone()).or_default();
        of_namespace.version += 1;
        match selector.filter(|selector| !selector.is_empty()) {
            Some(selector) => {
                of_namespace.services.insert(key.name.clone(), selector);
            }
            None => {
                of_namespace.services.remove(&key.name);
            }
        }
    }

    pub(crate) fn set_controller(&self, kind: &'static str, key: &Key, selector: Option<LabelSelector>) {
        let mut all = self.selectors.write();
        let of_namespace = all.entry(key.namespace.clone()).or_default();
        of_namespace.version += 1;
        let name = (kind, key.name.clone());
        match selector {
            Some(selector) => {
                of_namespace.controllers.insert(name, selector);
            }
            None => {
                of_namespace.controllers.remove(&name);
            }
        }
    }

    /// Changes with any service or controller of the namespace.
    pub(crate) fn selectors_version(&self, namespace: &str) -> u64 {
        let all = self.selectors.read();
        all.get(namespace).map_or(0, |known| known.version)
    }

    /// The selector of upstream's default constraints: the services that select the pod and its controller, together.
    pub(crate) fn default_selector(&self, shape: &Parts) -> Option<LabelSelector> {
        let all = self.selectors.read();
        let known = all.get(&shape.namespace)?;
        let mut selector = LabelSelector::default();
        for service in known.services.values() {
            if skiff_pods::labels::matches_map(service, Some(&shape.labels)) {
                selector
                    .match_labels
                    .get_or_insert_default()
                    .extend(service.clone());
            }
        }
        if let Some((kind, name)) = &shape.owner {
            let kinds = ["ReplicationController", "ReplicaSet", "StatefulSet"];
            let kind = kinds.into_iter().find(|one| one == kind);
            let owner = kind.and_then(|kind| known.controllers.get(&(kind, name.clone())));
            if let Some(owner) = owner {
                let labels = owner.match_labels.clone().unwrap_or_default();
                selector.match_labels.get_or_insert_default().extend(labels);
                let expressions = owner.match_expressions.clone().unwrap_or_default();
                selector
                    .match_expressions
                    .get_or_insert_default()
                    .extend(expressions);
            }
        }
        (!skiff_pods::labels::is_empty(&selector)).then_some(selector)
    }

    /// Changes with the pod's default selector.
    pub(crate) fn default_selector_version(&self, shape: &Parts) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        let selector = self.default_selector(shape);
        let Some(selector) = selector else { return 1 };
        selector.match_labels.hash(&mut hasher);
        for one in selector.match_expressions.iter().flatten() {
            (&one.key, &one.operator, &one.values).hash(&mut hasher);
        }
        hasher.finish()
    }

    pub(crate) fn set_namespace(&self, name: &str, labels: Option<Labels>) {
        let mut namespaces = self.namespaces.write();
        let changed = match labels {
            Some(labels) => {
                let labels = Arc::new(labels);
                let before = namespaces.labels.insert(name.to_owned(), Arc::clone(&labels));
                before.as_ref() != Some(&labels)
            }
            None => namespaces.labels.remove(name).is_some(),
        };
        namespaces.version += u64::from(changed);
    }

    pub(crate) fn namespace_labels(&self, name: &str) -> Arc<Labels> {
        self.namespaces
            .read()
            .labels
            .get(name)
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn namespace_version(&self) -> u64 {
        self.namespaces.read().version
    }
}
