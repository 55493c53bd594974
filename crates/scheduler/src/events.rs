//! Changes in the cluster that can make a rejected pod fit, with what queueing hints read of them.

use crate::node::NodeMeta;
use crate::pod::PodInfo;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use skiff_client::Key;
use std::sync::Arc;

#[derive(Debug, Clone)]
pub(crate) enum ClusterEvent {
    NodeAdded(Arc<NodeMeta>),
    NodeUpdated {
        old: Arc<NodeMeta>,
        new: Arc<NodeMeta>,
    },
    NodeDeleted(Arc<NodeMeta>),
    /// A pod of a PodGroup that waits for a node appeared.
    PodAdded(Arc<PodInfo>),
    PodGroupAdded(Key),
    /// A pod was placed: its place may satisfy an affinity.
    PodPlaced(Arc<PodInfo>),
    /// A placed pod changed.
    PodUpdated {
        old: Arc<PodInfo>,
        new: Arc<PodInfo>,
    },
    /// A placed pod ended or was deleted.
    PodRemoved(Arc<PodInfo>),
    /// The waiting pod itself changed.
    OwnPodUpdated {
        old: Arc<PodInfo>,
        new: Arc<PodInfo>,
    },
    ClaimChanged {
        old: Option<Arc<PersistentVolumeClaim>>,
        new: Arc<PersistentVolumeClaim>,
    },
    VolumeChanged {
        old: Option<Arc<PersistentVolume>>,
        new: Arc<PersistentVolume>,
    },
    ClassChanged {
        old: Option<Arc<StorageClass>>,
        new: Arc<StorageClass>,
    },
    CsiNodeChanged {
        old: Option<Arc<CSINode>>,
        new: Arc<CSINode>,
    },
    CsiDriverChanged {
        old: Option<Arc<CSIDriver>>,
        new: Arc<CSIDriver>,
    },
    CsiCapacityChanged {
        old: Option<Arc<CSIStorageCapacity>>,
        new: Arc<CSIStorageCapacity>,
    },
    VolumeAttachmentDeleted,
    /// `new` is absent if the claim was deleted.
    ResourceClaimChanged {
        old: Option<Arc<ResourceClaim>>,
        new: Option<Arc<ResourceClaim>>,
    },
    /// A ResourceSlice or a DeviceClass changed.
    DevicesChanged,
}

impl ClusterEvent {
    /// The node as it is after it was added or updated.
    pub(crate) fn node(&self) -> Option<&Arc<NodeMeta>> {
        match self {
            ClusterEvent::NodeAdded(new) | ClusterEvent::NodeUpdated { new, .. } => Some(new),
            _ => None,
        }
    }

    /// The pod's own update, if it is one.
    pub(crate) fn own(&self) -> Option<(&PodInfo, &PodInfo)> {
        match self {
            ClusterEvent::OwnPodUpdated { old, new } => Some((old, new)),
            _ => None,
        }
    }
}

/// What of a pod can change whether it fits. Its status changes too, by the condition that we write, and must not wake it.
pub(crate) fn fits_differ(old: &PodInfo, new: &PodInfo) -> bool {
    !Arc::ptr_eq(&old.shape, &new.shape)
        || old.volumes != new.volumes
        || old.resource_claims != new.resource_claims
        || old.deleting != new.deleting
}
