//! Expansion on the node: a volume that was made larger is made larger where it is mounted, and its claim says so.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use skiff_csi::v1;

use super::client::{CallError, text};
use super::mount::Source;
use super::request::credentials;
use super::{Csi, GLOBAL_MOUNT};
use crate::objects::error_message;
use crate::pods;
use crate::resources::value;
use crate::volumes::volume_type::{Persistent, Wanted};
use crate::volumes::{SetUpError, Volumes};

const STEP: &str = "NodeExpandVolume.NodeExpandVolume";
/// The conditions of a claim that are about its size.
const CONDITIONS: [&str; 4] = [
    "Resizing",
    "FileSystemResizePending",
    "ControllerResizeError",
    "NodeResizeError",
];

/// The size that the volume has and its claim does not know of yet.
fn pending(claimed: &Persistent) -> Option<Quantity> {
    let wanted = claimed.spec()?.capacity.as_ref()?.get("storage")?;
    let status = claimed.claim.status.as_ref()?;
    let known = status.capacity.as_ref()?.get("storage")?;
    (value(known) < value(wanted)).then(|| wanted.clone())
}

impl Csi {
    /// Has the driver grow what is mounted, if the volume is larger than its claim says.
    pub(super) async fn expand_if_needed(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
    ) -> Result<(), SetUpError> {
        let Source::Persistent(claimed, csi) = source else {
            return Ok(());
        };
        let Some(size) = pending(claimed).filter(|_| !claimed.read_only) else {
            return Ok(());
        };
        let step = |message: String| SetUpError::step(STEP, &claimed.name, message);
        let key = source.key(wanted);
        let driver = self.driver(&key.driver).map_err(step)?;
        let capabilities = driver.capabilities().await.map_err(|e| step(e.to_string()))?;
        if capabilities.expand {
            let _turn = self.turn(&key).await;
            let secrets = match &csi.node_expand_secret_ref {
                Some(reference) => credentials(host, reference).await.map_err(step)?,
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
                    required_bytes: value(&size),
                    limit_bytes: 0,
                }),
                staging_target_path: staging.unwrap_or_default(),
                volume_capability: Some(access.capability(capabilities)),
                secrets,
            };
            if let Err(error) = driver.expand(request).await {
                self.tell_failed(host, wanted, claimed, &error).await;
                return Err(step(format!(
                    "Expander.NodeExpand failed to expand the volume : {error}"
                )));
            }
        }
        self.tell_done(claimed, &size).await.map_err(step)?;
        if let Some(recorder) = &host.recorder {
            let message = format!(
                "MountVolume.NodeExpandVolume succeeded for volume {:?} {}",
                claimed.name, self.node_name
            );
            recorder.event(
                &pods::reference(wanted.pod),
                "Normal",
                "FileSystemResizeSuccessful",
                message,
            );
        }
        Ok(())
    }

    async fn patch_claim(&self, claim: &PersistentVolumeClaim, status: Value) -> Result<(), String> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let patch =
            json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status});
        let patched = api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.map(|_| ()).map_err(|error| error_message(&error))
    }

    async fn tell_done(&self, claimed: &Persistent, size: &Quantity) -> Result<(), String> {
        let status = claimed.claim.status.clone().unwrap_or_default();
        let mut conditions = status.conditions.unwrap_or_default();
        conditions.retain(|condition| !CONDITIONS.contains(&condition.type_.as_str()));
        let status = json!({
            "capacity": {"storage": size},
            "conditions": conditions,
            "allocatedResourceStatuses": {"storage": null},
        });
        self.patch_claim(&claimed.claim, status).await
    }

    async fn tell_failed(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        claimed: &Persistent,
        error: &CallError,
    ) {
        use skiff_csi::Code;
        let message = format!("{STEP} failed for volume {:?} : {error}", claimed.name);
        host.warn(wanted.pod, "VolumeResizeFailed", message);
        if matches!(
            error.code,
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound
        ) {
            let status = json!({"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}});
            if let Err(error) = self.patch_claim(&claimed.claim, status).await {
                tracing::debug!(error, "cannot note that a claim cannot grow");
            }
        }
    }
}
