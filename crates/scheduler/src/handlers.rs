//! Informers to cache, queue and listers: what changed, and which waiting pods it may help.

use crate::events::{ClusterEvent, fits_differ};
use crate::node::NodeMeta;
use crate::pod::PodInfo;
use crate::run::Scheduler;
use k8s_openapi::api::apps::v1::{ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{
    Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ReplicationController, Service,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::Resource;
use serde::de::DeserializeOwned;
use skiff_client::{Change, Informer, InformerFactory, Key};
use std::sync::Arc;

/// What is kept of a kind, and the event that a change of it makes.
type Keep<K> = fn(&Scheduler, &Change<K>) -> Option<ClusterEvent>;

/// Subscribes to everything and waits until it is there.
pub(crate) async fn follow(scheduler: &Arc<Scheduler>, factory: &InformerFactory) {
    let namespaces = subscribe::<Namespace>(scheduler, factory, |scheduler, change| {
        let meta = &change.object().metadata;
        let labels =
            matches!(change, Change::Applied { .. }).then(|| meta.labels.clone().unwrap_or_default());
        scheduler
            .listers
            .set_namespace(meta.name.as_deref().unwrap_or_default(), labels);
        None
    });
    let services = subscribe::<Service>(scheduler, factory, |scheduler, change| {
        let object = change.object();
        let selector = matches!(change, Change::Applied { .. })
            .then(|| object.spec.as_ref()?.selector.clone())
            .flatten();
        scheduler.listers.set_service(&Key::of(&**object), selector);
        None
    });
    let controllers = subscribe::<ReplicationController>(scheduler, factory, |scheduler, change| {
        let selector = change
            .object()
            .spec
            .as_ref()
            .and_then(|spec| spec.selector.clone());
        let selector = selector.map(|labels| LabelSelector {
            match_labels: Some(labels),
            match_expressions: None,
        });
        set_controller(scheduler, "ReplicationController", change, selector);
        None
    });
    let replica_sets = subscribe::<ReplicaSet>(scheduler, factory, |scheduler, change| {
        let selector = change.object().spec.as_ref().map(|spec| spec.selector.clone());
        set_controller(scheduler, "ReplicaSet", change, selector);
        None
    });
    let stateful_sets = subscribe::<StatefulSet>(scheduler, factory, |scheduler, change| {
        let selector = change.object().spec.as_ref().map(|spec| spec.selector.clone());
        set_controller(scheduler, "StatefulSet", change, selector);
        None
    });
    let budgets = subscribe::<PodDisruptionBudget>(scheduler, factory, |scheduler, change| {
        keep(&scheduler.listers.budgets, change);
        None
    });
    let classes = subscribe::<StorageClass>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.classes, change);
        Some(ClusterEvent::ClassChanged { old, new: new? })
    });
    let csi_nodes = subscribe::<CSINode>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.csi_nodes, change);
        Some(ClusterEvent::CsiNodeChanged { old, new: new? })
    });
    let csi_drivers = subscribe::<CSIDriver>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.csi_drivers, change);
        Some(ClusterEvent::CsiDriverChanged { old, new: new? })
    });
    let capacities = subscribe::<CSIStorageCapacity>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.csi_capacities, change);
        Some(ClusterEvent::CsiCapacityChanged { old, new: new? })
    });
    let attachments = subscribe::<VolumeAttachment>(scheduler, factory, |scheduler, change| {
        let (_, new) = keep(&scheduler.listers.attachments, change);
        new.is_none().then_some(ClusterEvent::VolumeAttachmentDeleted)
    });
    let volumes = subscribe::<PersistentVolume>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.volumes, change);
        Some(ClusterEvent::VolumeChanged { old, new: new? })
    });
    let claims = subscribe::<PersistentVolumeClaim>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.claims, change);
        Some(ClusterEvent::ClaimChanged { old, new: new? })
    });
    let resource_claims = subscribe::<ResourceClaim>(scheduler, factory, |scheduler, change| {
        let (old, new) = keep(&scheduler.listers.resource_claims, change);
        Some(ClusterEvent::ResourceClaimChanged { old, new })
    });
    let slices = subscribe::<ResourceSlice>(scheduler, factory, |scheduler, change| {
        keep(&scheduler.listers.slices, change);
        Some(ClusterEvent::DevicesChanged)
    });
    let device_classes = subscribe::<DeviceClass>(scheduler, factory, |scheduler, change| {
        keep(&scheduler.listers.device_classes, change);
        Some(ClusterEvent::DevicesChanged)
    });
    let serves_groups = scheduler.core.lock().cache.pod_groups;
    let pod_groups = serves_groups.then(|| subscribe::<PodGroup>(scheduler, factory, on_pod_group));
    let nodes = subscribe::<Node>(scheduler, factory, |scheduler, change| scheduler.on_node(change));
    // What pods refer to is there before the first of them is tried.
    tokio::join!(
        namespaces.synced(),
        services.synced(),
        controllers.synced(),
        replica_sets.synced(),
        stateful_sets.synced(),
        budgets.synced(),
        classes.synced(),
        csi_nodes.synced(),
        csi_drivers.synced(),
        capacities.synced(),
        attachments.synced(),
        volumes.synced(),
        claims.synced(),
        resource_claims.synced(),
        slices.synced(),
        device_classes.synced(),
        nodes.synced(),
    );
    if let Some(pod_groups) = &pod_groups {
        pod_groups.synced().await;
    }
    let pods = subscribe::<Pod>(scheduler, factory, |scheduler, change| scheduler.on_pod(change));
    pods.synced().await;
    // Once a scheduler.
    let _ = scheduler.objects.set((pods, nodes));
}

fn subscribe<K>(scheduler: &Arc<Scheduler>, factory: &InformerFactory, handle: Keep<K>) -> Informer<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
{
    let informer = factory.informer::<K>();
    let follower = Arc::clone(scheduler);
    informer.subscribe(move |change| {
        if let Some(event) = handle(&follower, change) {
            follower.queue.on_event(event);
        }
    });
    informer
}

fn keep<K: Resource>(
    objects: &crate::listers::Objects<K>,
    change: &Change<K>,
) -> (Option<Arc<K>>, Option<Arc<K>>) {
    let key = Key::of(&**change.object());
    match change {
        Change::Applied { new, .. } => (objects.set(key, Arc::clone(new)), Some(Arc::clone(new))),
        Change::Deleted { .. } => (objects.remove(&key), None),
    }
}

/// The policy of a group does not change; another group may have its name.
fn on_pod_group(scheduler: &Scheduler, change: &Change<PodGroup>) -> Option<ClusterEvent> {
    let key = Key::of(&**change.object());
    let (old, new) = keep(&scheduler.listers.pod_groups, change);
    let Some(new) = new else {
        scheduler.group_conditions.forget(&key);
        return None;
    };
    let known = old.is_some_and(|old| old.metadata.uid == new.metadata.uid);
    (!known).then_some(ClusterEvent::PodGroupAdded(key))
}

fn set_controller<K: Resource>(
    scheduler: &Scheduler,
    kind: &'static str,
    change: &Change<K>,
    selector: Option<LabelSelector>,
) {
    let selector = selector.filter(|_| matches!(change, Change::Applied { .. }));
    scheduler
        .listers
        .set_controller(kind, &Key::of(&**change.object()), selector);
}

impl Scheduler {
    pub(crate) fn on_node(&self, change: &Change<Node>) -> Option<ClusterEvent> {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let mut core = self.core.lock();
        let old = core.cache.by_name(&name).map(|node| Arc::clone(&node.meta));
        match change {
            Change::Applied { new, .. } => {
                let meta = NodeMeta::new(new);
                // A heartbeat changes nothing that matters here.
                if old.as_deref() == Some(&meta) {
                    return None;
                }
                core.cache.set_node(&name, meta);
                let new = Arc::clone(&core.cache.by_name(&name)?.meta);
                Some(match old {
                    None => ClusterEvent::NodeAdded(new),
                    Some(old) => ClusterEvent::NodeUpdated { old, new },
                })
            }
            Change::Deleted { .. } => {
                core.cache.remove_node(&name);
                old.map(ClusterEvent::NodeDeleted)
            }
        }
    }

    pub(crate) fn on_pod(&self, change: &Change<Pod>) -> Option<ClusterEvent> {
        let (object, gone) = match change {
            Change::Applied { new, .. } => (new, false),
            Change::Deleted { last } => (last, true),
        };
        let mut core = self.core.lock();
        let cache = &mut core.cache;
        let pod = cache.read(object);
        let is_new_member = self.count_member(&pod, gone);
        if gone || pod.ended {
            self.queue.remove(&pod.uid);
            self.waiting.answer(
                &pod.uid,
                Err(crate::framework::Rejection::unschedulable("removed")),
            );
            let nominated = cache.nomination(&pod.uid).is_some();
            cache.forget_nomination(&pod.uid);
            let removed = cache.remove_pod(&pod.uid);
            // Room that was kept for it is free too.
            return removed
                .or_else(|| nominated.then(|| Arc::clone(&pod)))
                .map(ClusterEvent::PodRemoved);
        }
        if !pod.node_name.is_empty() {
            self.queue.remove(&pod.uid);
            let assumed = cache.is_assumed(&pod.uid);
            let old = cache.placed_pod(&pod.uid).cloned();
            let node = pod.node_name.clone();
            cache.place(Arc::clone(&pod), &node);
            return match old {
                Some(old) if !assumed => {
                    fits_differ(&old, &pod).then_some(ClusterEvent::PodUpdated { old, new: pod })
                }
                _ => Some(ClusterEvent::PodPlaced(pod)),
            };
        }
        if pod.deleting {
            self.queue.remove(&pod.uid);
            let nominated = cache.nomination(&pod.uid).is_some();
            cache.forget_nomination(&pod.uid);
            return nominated.then_some(ClusterEvent::PodRemoved(pod));
        }
        if self.profiles.contains_key(&pod.shape.scheduler_name) {
            if !pod.nominated.is_empty() && cache.nomination(&pod.uid) != Some(&pod.nominated) {
                let node = pod.nominated.clone();
                cache.nominate(&pod, &node);
            }
            drop(core);
            self.queue.add(Arc::clone(&pod));
            return is_new_member.then_some(ClusterEvent::PodAdded(pod));
        }
        None
    }

    /// Keeps count of the pods of a PodGroup. True if this one is new and waits for a node.
    fn count_member(&self, pod: &PodInfo, gone: bool) -> bool {
        let Some(group) = pod.group_key() else {
            return false;
        };
        let waits = pod.node_name.is_empty();
        let members = &self.listers.group_members;
        if gone || pod.ended || (waits && pod.deleting) {
            members.remove(&group, &pod.uid);
            return false;
        }
        // Another scheduler's pods count once they have a node.
        if waits && !self.profiles.contains_key(&pod.shape.scheduler_name) {
            return false;
        }
        members.add(&group, &pod.uid) && waits
    }
}
