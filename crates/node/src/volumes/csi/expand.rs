//! Expansion on the node: a volume that was made larger is made larger where it is mounted, and its claim says so. The resizer
//! beside the driver notes in the claim how far it got (`allocatedResourceStatuses`), and the node goes on from there.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use skiff_csi::{Code, v1};

use super::client::{CallError, Capabilities, Driver, text};
use super::mount::Source;
use super::request::credentials;
use super::{Csi, GLOBAL_MOUNT};
use crate::objects::error_message;
use crate::pods;
use crate::resources::value;
use crate::volumes::volume_type::{Persistent, Wanted};
use crate::volumes::{SetUpError, Volumes};

const STEP: &str = "NodeExpandVolume.NodeExpandVolume";
const IN_PROGRESS: &str = "NodeResizeInProgress";
/// The driver has nothing to do on nodes.
const NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";
/// The conditions of a claim that are about its size.
const CONDITIONS: [&str; 4] = [
    "Resizing",
    "FileSystemResizePending",
    "ControllerResizeError",
    "NodeResizeError",
];

/// What the claim is told of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// How far it got: the resizer looks there when the expansion fails.
    Progress,
    /// Its new size: an older resizer made the volume larger.
    Size,
    /// Nothing: another node has told it.
    Nothing,
}

/// The size that the volume shall have on this node. `mounted` is the one that it had when it was mounted, in bytes.
fn pending(claimed: &Persistent, mounted: Option<i64>) -> Option<(Quantity, Report)> {
    let wanted = claimed.spec()?.capacity.as_ref()?.get("storage")?;
    let status = claimed.claim.status.as_ref()?;
    let known = status.capacity.as_ref()?.get("storage")?;
    let progress = status.allocated_resource_statuses.as_ref();
    let progress = progress
        .and_then(|statuses| statuses.get("storage"))
        .map(String::as_str);
    let allocated = status
        .allocated_resources
        .as_ref()
        .and_then(|all| all.get("storage"));
    if value(known) < value(wanted) {
        return match (progress, allocated) {
            (None, None) => Some((wanted.clone(), Report::Size)),
            (Some("NodeResizePending" | IN_PROGRESS), Some(size)) => Some((size.clone(), Report::Progress)),
            // The resizer is not done, or it is for the controller to decide after a failure.
            _ => None,
        };
    }
    let spec = claimed.claim.spec.as_ref();
    let modes = spec
        .and_then(|spec| spec.access_modes.as_deref())
        .unwrap_or_default();
    let annotations = claimed.claim.metadata.annotations.as_ref();
    let on_every_node = modes.iter().any(|mode| mode == "ReadWriteMany")
        && !annotations.is_some_and(|annotations| annotations.contains_key(NOT_REQUIRED));
    let grew = mounted.is_some_and(|mounted| mounted < value(wanted));
    (grew && on_every_node && progress.is_none()).then(|| (wanted.clone(), Report::Nothing))
}

impl Csi {
    /// Has the driver grow what is mounted, if the volume is larger than its claim says.
    pub(super) async fn expand_if_needed(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
    ) -> Result<(), SetUpError> {
        let Source::Persistent(claimed, _) = source else {
            return Ok(());
        };
        let key = source.key(wanted);
        let size_of_volume = claimed
            .spec()
            .and_then(|spec| spec.capacity.as_ref()?.get("storage").map(value));
        let mounted = {
            let mut held = self.held.lock();
            if held.expansion_refused.contains(&key) {
                return Ok(());
            }
            match size_of_volume {
                Some(size) => *held.sizes.entry(key.clone()).or_insert(size),
                None => return Ok(()),
            }
        };
        let Some((size, report)) = pending(claimed, Some(mounted)) else {
            return Ok(());
        };
        let step = |message: String| SetUpError::step(STEP, &claimed.name, message);
        if claimed.read_only {
            let message = format!(
                "MountVolume.NodeExpandVolume failed for volume {:?} requested read-only file system",
                claimed.name
            );
            host.warn(wanted.pod, "FileSystemResizeFailed", message);
            return Ok(());
        }
        let driver = self.driver(&key.driver).map_err(step)?;
        let capabilities = driver.capabilities().await.map_err(|e| step(e.to_string()))?;
        if !capabilities.expand {
            // Then the resizer tells the claim its size.
            return Ok(());
        }
        let mut claim = claimed.claim.clone();
        if report == Report::Progress {
            let status = json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}});
            claim = self.patch_claim(&claim, status).await.map_err(|error| {
                step(format!(
                    "MountVolume.NodeExpandVolume failed to mark node expansion in progress: {error}"
                ))
            })?;
        }
        let expanded = self
            .expand(host, wanted, source, &driver, capabilities, &size)
            .await
            .map_err(step)?;
        if let Err(error) = expanded {
            if report == Report::Progress {
                self.tell_failed(&claim, &error).await;
            }
            let message = format!("{STEP} failed for volume {:?} : {error}", claimed.name);
            if error.code == Code::FailedPrecondition {
                // It cannot grow while it is in use here; that is no reason not to use it.
                host.warn(wanted.pod, "VolumeResizeFailed", message);
                self.held.lock().expansion_refused.insert(key);
                return Ok(());
            }
            host.warn(wanted.pod, "VolumeResizeFailed", message);
            return Err(step(format!(
                "Expander.NodeExpand failed to expand the volume : {error}"
            )));
        }
        if report != Report::Nothing {
            self.tell_done(&claim, &size).await.map_err(step)?;
        }
        self.held.lock().sizes.insert(key, value(&size));
        if let Some(recorder) = &host.recorder {
            let message = format!(
                "MountVolume.NodeExpandVolume succeeded for volume {:?} {}",
                claimed.name, self.node_name
            );
            for about in [pods::reference(wanted.pod), claim_reference(&claim)] {
                recorder.event(&about, "Normal", "FileSystemResizeSuccessful", message.clone());
            }
        }
        Ok(())
    }

    /// Asks the driver. The outer error is one of ours, the inner one the driver's.
    async fn expand(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
        driver: &Driver,
        capabilities: Capabilities,
        size: &Quantity,
    ) -> Result<Result<(), CallError>, String> {
        let Source::Persistent(claimed, csi) = source else {
            return Ok(Ok(()));
        };
        let key = source.key(wanted);
        let _turn = self.turn(&key).await;
        let secrets = match &csi.node_expand_secret_ref {
            Some(reference) => credentials(host, reference).await?,
            None => Default::default(),
        };
        let (path, staging) = match claimed.block {
            true => (
                self.layout.device_publish(&claimed.name, wanted.uid()),
                self.layout.device_staging(&claimed.name),
            ),
            false => (
                host.volume_dir(wanted.uid(), "csi", wanted.name()).join("mount"),
                self.layout.global(&key).join(GLOBAL_MOUNT),
            ),
        };
        let staging = capabilities.stage.then(|| text(&staging));
        let mut access = source.access(wanted.pod);
        access.group = None;
        let request = v1::NodeExpandVolumeRequest {
            volume_id: key.handle.clone(),
            volume_path: text(&path),
            capacity_range: Some(v1::CapacityRange {
                required_bytes: value(size),
                limit_bytes: 0,
            }),
            staging_target_path: staging.unwrap_or_default(),
            volume_capability: Some(access.capability(capabilities)),
            secrets,
        };
        Ok(driver.expand(request).await)
    }

    async fn patch_claim(
        &self,
        claim: &PersistentVolumeClaim,
        status: Value,
    ) -> Result<PersistentVolumeClaim, String> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let patch =
            json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status});
        let patched = api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.map_err(|error| error_message(&error))
    }

    async fn tell_done(&self, claim: &PersistentVolumeClaim, size: &Quantity) -> Result<(), String> {
        let status = json!({
            "capacity": {"storage": size},
            "conditions": other_conditions(claim, &CONDITIONS),
            "allocatedResourceStatuses": {"storage": null},
        });
        self.patch_claim(claim, status).await.map(|_| ())
    }

    /// A failure that the driver is done with. The resizer decides what comes next.
    async fn tell_failed(&self, claim: &PersistentVolumeClaim, error: &CallError) {
        if !error.is_final() {
            return;
        }
        let now = k8s_openapi::jiff::Timestamp::now();
        let mut conditions = other_conditions(claim, &["NodeResizeError"]);
        conditions.push(json!({
            "type": "NodeResizeError",
            "status": "True",
            "message": format!("failed to expand volume with {error}"),
            "lastTransitionTime": skiff_meta::time::format_seconds(now),
        }));
        let mut status = json!({"conditions": conditions});
        if matches!(
            error.code,
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound
        ) {
            status["allocatedResourceStatuses"] = json!({"storage": "NodeResizeInfeasible"});
        }
        if let Err(error) = self.patch_claim(claim, status).await {
            tracing::debug!(error, "cannot note that a claim cannot grow");
        }
    }
}

fn claim_reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        name: claim.metadata.name.clone(),
        namespace: claim.metadata.namespace.clone(),
        uid: claim.metadata.uid.clone(),
        resource_version: claim.metadata.resource_version.clone(),
        field_path: None,
    }
}

fn other_conditions(claim: &PersistentVolumeClaim, without: &[&str]) -> Vec<Value> {
    let conditions = claim
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .filter(|condition| !without.contains(&condition.type_.as_str()))
        .map(|condition| json!(condition))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimed(volume: &str, modes: &[&str], status: Value) -> Persistent {
        let from = |value| serde_json::from_value(value).unwrap();
        Persistent {
            name: "pv".to_owned(),
            pv: serde_json::from_value(json!({"spec": {"capacity": {"storage": volume}}})).unwrap(),
            claim: from(json!({"spec": {"accessModes": modes}, "status": status})),
            read_only: false,
            block: false,
            options: Vec::new(),
            for_one_pod: false,
        }
    }

    #[test]
    fn what_is_left_for_the_node() {
        let check = |status: Value, expected: Option<(&str, Report)>| {
            let found = pending(&claimed("2Gi", &["ReadWriteOnce"], status), Some(1 << 30));
            let expected = expected.map(|(size, report)| (Quantity(size.to_owned()), report));
            assert_eq!(found, expected);
        };
        let capacity = json!({"storage": "1Gi"});
        let allocated = json!({"storage": "2Gi"});
        check(json!({"capacity": capacity}), Some(("2Gi", Report::Size)));
        for (progress, expected) in [
            ("ControllerResizeInProgress", None),
            ("NodeResizePending", Some(("2Gi", Report::Progress))),
            ("NodeResizeInProgress", Some(("2Gi", Report::Progress))),
            ("NodeResizeInfeasible", None),
        ] {
            let status = json!({"capacity": capacity, "allocatedResources": allocated,
                "allocatedResourceStatuses": {"storage": progress}});
            check(status, expected);
        }
        // The resizer is done without the node.
        check(
            json!({"capacity": capacity, "allocatedResources": allocated}),
            None,
        );
        check(json!({"capacity": {"storage": "2Gi"}}), None);
    }

    /// Another node was first, and has told the claim.
    #[test]
    fn a_volume_of_several_nodes_grows_on_each() {
        let status = json!({"capacity": {"storage": "2Gi"}});
        let mut many = claimed("2Gi", &["ReadWriteMany"], status);
        assert_eq!(pending(&many, Some(2 << 30)), None);
        assert_eq!(pending(&many, None), None);
        let size = Quantity("2Gi".to_owned());
        assert_eq!(pending(&many, Some(1 << 30)), Some((size, Report::Nothing)));
        many.claim.metadata.annotations = Some([(NOT_REQUIRED.to_owned(), "true".to_owned())].into());
        assert_eq!(pending(&many, Some(1 << 30)), None);
    }
}
