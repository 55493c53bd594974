//! `configMap`: the keys of a ConfigMap as files.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::ConfigMapVolumeSource;

use super::atomic_writer::Payload;
use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes, keyed};

pub(super) struct ConfigMaps;

#[async_trait]
impl VolumeType for ConfigMaps {
    fn name(&self) -> &'static str {
        "configmap"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::Files)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.config_map.is_some()
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let Some(source) = &wanted.volume.config_map else {
            return Err(wanted.set_up_error("no configMap"));
        };
        let payload = payload(host, wanted, source).await;
        let payload = payload.map_err(|error| wanted.set_up_error(error))?;
        host.write_files(wanted, self.name(), payload, false).await
    }
}

async fn payload(
    host: &Volumes,
    wanted: &Wanted<'_>,
    source: &ConfigMapVolumeSource,
) -> Result<Payload, String> {
    let optional = source.optional == Some(true);
    let map = host.objects.config_map(wanted.namespace(), &source.name).await?;
    if map.is_none() && !optional {
        return Err(format!("configmap {:?} not found", source.name));
    }
    keyed::config_map_payload(
        map.as_deref(),
        source.items.as_ref(),
        source.default_mode.unwrap_or(0o644),
        optional,
    )
}
