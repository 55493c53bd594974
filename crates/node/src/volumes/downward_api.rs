//! `downwardAPI`: fields of the pod as files. Pure.

use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, Pod};

use super::atomic_writer::{File, Payload};
use crate::field_ref::{NodeFacts, field_value, resource_value};

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
