//! `downwardAPI`: fields of the pod as files.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, Pod};

use super::atomic_writer::{File, Payload};
use super::usage::Measure;
use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes};
use crate::field_ref::{NodeFacts, field_value, resource_value};

pub(super) struct DownwardApi;

#[async_trait]
impl VolumeType for DownwardApi {
    fn name(&self) -> &'static str {
        "downward-api"
    }

    fn measure(&self) -> Option<Measure> {
        Some(Measure::Files)
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.downward_api.is_some()
    }

    async fn set_up(&self, host: &Volumes, wanted: &Wanted<'_>) -> Result<Ready, SetUpError> {
        let Some(source) = &wanted.volume.downward_api else {
            return Err(wanted.set_up_error("no downwardAPI"));
        };
        let items = source.items.as_deref().unwrap_or_default();
        let mode = source.default_mode.unwrap_or(0o644);
        let payload = payload(wanted.pod, items, mode, wanted.facts);
        let payload = payload.map_err(|error| wanted.set_up_error(error))?;
        host.write_files(wanted, self.name(), payload, true).await
    }
}

/// Pure.
pub fn payload(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    default_mode: i32,
    facts: &NodeFacts,
) -> Result<Payload, String> {
    let mut payload = Payload::new();
    for item in items {
        let text = if let Some(field) = &item.field_ref {
            field_value(pod, &field.field_path, facts)
        } else if let Some(selector) = &item.resource_field_ref {
            resource_value(pod, selector, None, facts)
        } else {
            continue;
        };
        let file = File {
            data: text.map_err(|e| e.to_string())?.into_bytes(),
            mode: u32::try_from(item.mode.unwrap_or(default_mode)).unwrap_or(0o644) & 0o7777,
            owner: None,
        };
        payload.insert(item.path.clone(), file);
    }
    Ok(payload)
}
