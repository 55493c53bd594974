//! What a driver gets to know with a request: how the volume is attached, about the pod, and the secrets it needs.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{SecretReference, ServiceAccountTokenProjection};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::Api;
use serde_json::json;

use super::client::map;
use super::data::Key;
use super::mount::Source;
use super::{Csi, log};
use crate::objects::error_message;
use crate::pods;
use crate::volumes::volume_type::Wanted;
use crate::volumes::{SetUpError, Volumes};

/// How long a pass waits for the attachment; the pod can be ended in between.
const ATTACH_PATIENCE: Duration = Duration::from_secs(5);
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

impl Csi {
    /// Whether volumes of this sort are the driver's business.
    pub(super) fn check_lifecycle(&self, driver: &str, mode: &str) -> Result<(), String> {
        let failed = |why: String| {
            Err(log(format!(
                "mounter.SetupAt failed to check volume lifecycle mode: volume mode {mode:?} not supported by driver {driver} ({why})"
            )))
        };
        match self.spec(driver) {
            None if mode == "Persistent" => Ok(()),
            None => failed("no CSIDriver object".to_owned()),
            Some(spec) => {
                let modes = spec.volume_lifecycle_modes.unwrap_or_default();
                if modes.iter().any(|one| one == mode) || (modes.is_empty() && mode == "Persistent") {
                    return Ok(());
                }
                failed(format!("only supports {modes:?}"))
            }
        }
    }

    /// Waits until the volume is attached, if its driver wants that. Returns what the driver needs to know of it.
    pub(super) async fn attached(
        &self,
        key: &Key,
        name: &str,
    ) -> Result<HashMap<String, String>, SetUpError> {
        if !self.attach_required(&key.driver) {
            return Ok(HashMap::new());
        }
        let unique = key.unique_name();
        let waited = tokio::time::timeout(ATTACH_PATIENCE, async {
            loop {
                let node = self.node.list();
                let status = node.first().and_then(|node| node.status.as_ref());
                // The controller must know that it is in use before it is used, or it might detach it.
                let in_use = status.and_then(|status| status.volumes_in_use.as_ref());
                let attached = status.and_then(|status| status.volumes_attached.as_ref());
                if in_use.is_some_and(|names| names.contains(&unique))
                    && attached.is_some_and(|volumes| volumes.iter().any(|volume| volume.name == unique))
                {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        if waited.await.is_err() {
            let message = "volume not attached according to node status".to_owned();
            return Err(SetUpError::step("MountVolume.WaitForAttach", name, message));
        }
        let step = |message| SetUpError::step("MountVolume.WaitForAttach", name, message);
        let id = key.attachment(&self.node_name);
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let attachment = api.get(&id).await.map_err(|error| {
            step(format!(
                "volume {} has GET error for volume attachment {id}: {}",
                key.handle,
                error_message(&error)
            ))
        })?;
        if attachment.metadata.deletion_timestamp.is_some() {
            return Err(step("volume attachment is being deleted".to_owned()));
        }
        let status = attachment.status.unwrap_or_default();
        if !status.attached {
            let why = status.attach_error.and_then(|error| error.message);
            return Err(step(why.unwrap_or_else(|| {
                format!("volume {} is not attached for volume attachment {id}", key.handle)
            })));
        }
        Ok(map(status.attachment_metadata.unwrap_or_default()))
    }

    /// What the driver is told about the volume and its pod, and the secrets it needs for that.
    pub(super) async fn attributes(
        &self,
        host: &Volumes,
        wanted: &Wanted<'_>,
        source: &Source<'_>,
    ) -> Result<(HashMap<String, String>, HashMap<String, String>), String> {
        let mut attributes = map(source.attributes());
        let mut secrets = match source.publish_secret(wanted.namespace()) {
            Some(reference) => credentials(host, &reference)
                .await
                .map_err(|error| fetching("NodePublishSecretRef", &reference, &error))?,
            None => HashMap::new(),
        };
        let Some(spec) = self.spec(&source.key(wanted).driver) else {
            return Ok((attributes, secrets));
        };
        let account = wanted
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.clone());
        if spec.pod_info_on_mount == Some(true) {
            let ephemeral = matches!(source, Source::Inline(_)).to_string();
            let info = [
                ("pod.name", pods::name(wanted.pod)),
                ("pod.namespace", wanted.namespace()),
                ("pod.uid", wanted.uid()),
                ("serviceAccount.name", account.as_deref().unwrap_or_default()),
                ("ephemeral", &ephemeral),
            ];
            attributes
                .extend(info.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_owned())));
        }
        let mut tokens = serde_json::Map::new();
        for request in spec.token_requests.unwrap_or_default() {
            let projection = ServiceAccountTokenProjection {
                audience: Some(request.audience.clone()),
                expiration_seconds: request.expiration_seconds,
                path: String::new(),
            };
            let made = host
                .tokens
                .get(host.objects.as_ref(), wanted.pod, &projection)
                .await;
            let made = made.map_err(|error| {
                log(format!(
                    "mounter.SetUpAt failed to get service accoount token attributes: {error}"
                ))
            })?;
            let expires = made.expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            tokens.insert(
                request.audience,
                json!({"token": made.token, "expirationTimestamp": expires}),
            );
        }
        if !tokens.is_empty() {
            let tokens = serde_json::Value::Object(tokens).to_string();
            let place = match spec.service_account_token_in_secrets {
                Some(true) => &mut secrets,
                _ => &mut attributes,
            };
            place.insert(TOKENS.to_owned(), tokens);
        }
        Ok((attributes, secrets))
    }
}

pub(super) fn fetching(which: &str, reference: &SecretReference, error: &str) -> String {
    let namespace = reference.namespace.as_deref().unwrap_or_default();
    let name = reference.name.as_deref().unwrap_or_default();
    format!("fetching {which} {namespace}/{name} failed: {error}")
}

/// The secret's values as texts, which is what the protocol has.
pub(super) async fn credentials(
    host: &Volumes,
    reference: &SecretReference,
) -> Result<HashMap<String, String>, String> {
    let namespace = reference.namespace.as_deref().unwrap_or_default();
    let name = reference.name.as_deref().unwrap_or_default();
    let failed = |error: &str| {
        log(format!(
            "failed to find the secret {name} in the namespace {namespace} with error: {error}"
        ))
    };
    match host.objects.secret(namespace, name).await {
        Ok(Some(secret)) => {
            let data = secret.data.iter().flatten();
            Ok(data
                .map(|(key, value)| (key.clone(), String::from_utf8_lossy(&value.0).into_owned()))
                .collect())
        }
        Ok(None) => Err(failed(&format!("secrets {name:?} not found"))),
        Err(error) => Err(failed(&error)),
    }
}
