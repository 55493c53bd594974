//! What the cluster learns of a node's drivers: the node's id and topology in the Node, and the CSINode object.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use skiff_client::ErrorExt;
use skiff_csi::v1::NodeGetInfoResponse;

use super::Csi;
use crate::objects::error_message;

const NODE_ID: &str = "csi.volume.kubernetes.io/nodeid";
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// Upstream's in-tree volumes that drivers have taken over.
const MIGRATED_PLUGINS: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";
const ATTEMPTS: usize = 4;

impl Csi {
    pub(super) async fn install_driver(&self, name: &str, info: &NodeGetInfoResponse) -> Result<(), String> {
        if info.node_id.is_empty() {
            return Err("error adding CSI driver node info: driverNodeID must not be empty".to_owned());
        }
        let _one = self.node_info.lock().await;
        let topology: BTreeMap<String, String> = info
            .accessible_topology
            .iter()
            .flat_map(|topology| topology.segments.clone())
            .collect();
        self.label_node(name, &info.node_id, &topology)
            .await
            .map_err(|error| format!("error updating Node object with CSI driver node info: {error}"))?;
        let driver = CSINodeDriver {
            name: name.to_owned(),
            node_id: info.node_id.clone(),
            topology_keys: (!topology.is_empty()).then(|| topology.keys().cloned().collect()),
            allocatable: (info.max_volumes_per_node > 0).then(|| VolumeNodeResources {
                count: Some(i32::try_from(info.max_volumes_per_node).unwrap_or(i32::MAX)),
            }),
        };
        self.change_drivers(|drivers| with_driver(drivers, driver.clone()))
            .await
            .map_err(|error| format!("error updating CSINode object with CSI driver node info: {error}"))
    }

    pub(super) async fn uninstall(&self, name: &str) -> Result<(), String> {
        let _one = self.node_info.lock().await;
        self.change_drivers(|drivers| {
            let mut rest = drivers.to_vec();
            rest.retain(|driver| driver.name != name);
            (rest.len() != drivers.len()).then_some(rest)
        })
        .await?;
        let node = self.read_node().await?;
        let mut ids = node_ids(&node)?;
        if ids.remove(name).is_none() {
            return Ok(());
        }
        let value = (!ids.is_empty()).then(|| json!(ids).to_string());
        self.patch_node(json!({"metadata": {"annotations": {NODE_ID: value}}}))
            .await
    }

    pub(super) async fn ensure_csi_node(&self) -> Result<(), String> {
        let _one = self.node_info.lock().await;
        self.csi_node().await.map(|_| ())
    }

    async fn read_node(&self) -> Result<Node, String> {
        let api: Api<Node> = Api::all(self.client.clone());
        api.get(&self.node_name).await.map_err(|e| error_message(&e))
    }

    async fn patch_node(&self, patch: serde_json::Value) -> Result<(), String> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patched = api
            .patch(&self.node_name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.map(|_| ()).map_err(|e| error_message(&e))
    }

    async fn label_node(
        &self,
        name: &str,
        id: &str,
        topology: &BTreeMap<String, String>,
    ) -> Result<(), String> {
        let node = self.read_node().await?;
        let mut ids = node_ids(&node)?;
        let labels = node.metadata.labels.as_ref();
        let mut missing = BTreeMap::new();
        for (key, value) in topology {
            match labels.and_then(|labels| labels.get(key)) {
                Some(present) if present != value => {
                    return Err(format!(
                        "detected topology value collision: driver reported {key:?}:{value:?} but existing label is {key:?}:{present:?}"
                    ));
                }
                Some(_) => {}
                None => {
                    missing.insert(key.clone(), value.clone());
                }
            }
        }
        let known = ids.insert(name.to_owned(), id.to_owned()).as_deref() == Some(id);
        if known && missing.is_empty() {
            return Ok(());
        }
        let ids = json!(ids).to_string();
        self.patch_node(json!({"metadata": {"annotations": {NODE_ID: ids}, "labels": missing}}))
            .await
    }

    /// The CSINode of this node; one of an earlier Node of the same name is replaced.
    async fn csi_node(&self) -> Result<CSINode, String> {
        let api: Api<CSINode> = Api::all(self.client.clone());
        let uid = self.read_node().await?.metadata.uid.unwrap_or_default();
        match api.get_opt(&self.node_name).await {
            Ok(Some(found)) => {
                let mut owners = found.metadata.owner_references.iter().flatten();
                if owners.any(|owner| owner.kind == "Node" && owner.uid == uid) {
                    return Ok(found);
                }
                api.delete(&self.node_name, &DeleteParams::default())
                    .await
                    .map_err(|e| error_message(&e))?;
            }
            Ok(None) => {}
            Err(error) => return Err(error_message(&error)),
        }
        let made = CSINode {
            metadata: ObjectMeta {
                name: Some(self.node_name.clone()),
                annotations: Some([(MIGRATED.to_owned(), MIGRATED_PLUGINS.to_owned())].into()),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Node".to_owned(),
                    name: self.node_name.clone(),
                    uid,
                    ..Default::default()
                }]),
                ..Default::default()
            },
            spec: CSINodeSpec { drivers: Vec::new() },
        };
        let created = api.create(&PostParams::default(), &made).await;
        created.map_err(|e| error_message(&e))
    }

    /// Writes what `change` makes of the drivers, unless that is nothing.
    async fn change_drivers(
        &self,
        change: impl Fn(&[CSINodeDriver]) -> Option<Vec<CSINodeDriver>>,
    ) -> Result<(), String> {
        let api: Api<CSINode> = Api::all(self.client.clone());
        let mut attempt = 0;
        loop {
            attempt += 1;
            let mut csi_node = self.csi_node().await?;
            let Some(drivers) = change(&csi_node.spec.drivers) else {
                return Ok(());
            };
            csi_node.spec.drivers = drivers;
            match api
                .replace(&self.node_name, &PostParams::default(), &csi_node)
                .await
            {
                Ok(_) => return Ok(()),
                Err(error) if error.is_conflict() && attempt < ATTEMPTS => {}
                Err(error) => return Err(error_message(&error)),
            }
        }
    }
}

/// The drivers with this one in its place; `None` if nothing changes.
fn with_driver(drivers: &[CSINodeDriver], driver: CSINodeDriver) -> Option<Vec<CSINodeDriver>> {
    if drivers.contains(&driver) {
        return None;
    }
    let mut all = drivers.to_vec();
    all.retain(|other| other.name != driver.name);
    all.push(driver);
    Some(all)
}

fn node_ids(node: &Node) -> Result<BTreeMap<String, String>, String> {
    let annotations = node.metadata.annotations.as_ref();
    match annotations.and_then(|annotations| annotations.get(NODE_ID)) {
        None => Ok(BTreeMap::new()),
        Some(text) if text.is_empty() => Ok(BTreeMap::new()),
        Some(text) => serde_json::from_str(text).map_err(|error| {
            format!("failed to parse node's {NODE_ID:?} annotation value ({text:?}) err={error}")
        }),
    }
}
