//! Pods: what their annotations say goes into fields, and whoever wrote it is told so.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::core::pod_annotations;
use skiff_meta::Status;

use super::{Asked, Change, Hook};

pub struct Pods;

#[async_trait]
impl Hook for Pods {
    async fn begin_create(&self, pod: &mut Value, asked: &Asked<'_>) -> Result<Change, Status> {
        for warning in pod_annotations::take_over(pod) {
            asked.context.warn(warning);
        }
        Ok(Change::default())
    }
}
