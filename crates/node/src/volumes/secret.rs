//! `secret`: the keys of a Secret as files, in memory.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::SecretVolumeSource;

use super::atomic_writer::Payload;
use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, keyed};

pub(super) struct Secrets;

#[async_trait]
impl VolumeType for Secrets {
    fn name(&self) -> &'static str {
        "secret"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::Files)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.secret.is_some()
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let Some(source) = &wanted.volume.secret else {
            return Err(wanted.set_up_error("no secret"));
        };
        let payload = payload(host, wanted, source).await;
        let payload = payload.map_err(|error| wanted.set_up_error(error))?;
        host.write_files(wanted, self.name(), payload, true).await
    }
}

async fn payload(
    host: &Volumes,
    wanted: &Wanted<'_>,
    source: &SecretVolumeSource,
) -> Result<Payload, String> {
    let name = source.secret_name.as_deref().unwrap_or_default();
    let optional = source.optional == Some(true);
    let secret = host.objects.secret(wanted.namespace(), name).await?;
    if secret.is_none() && !optional {
        return Err(format!("secret {name:?} not found"));
    }
    keyed::secret_payload(
        secret.as_deref(),
        source.items.as_ref(),
        source.default_mode.unwrap_or(0o644),
        optional,
    )
}
