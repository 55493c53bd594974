//! Pods: what their annotations say goes into fields, and whoever wrote it is told so.

use serde_json::Value;
use skiff_api::core::pod_annotations;
use skiff_meta::Status;

use super::{Change, Hook};
use crate::Context;

pub struct Pods;

impl Hook for Pods {
    fn begin_create(&self, pod: &mut Value, context: &Context) -> Result<Change, Status> {
        for warning in pod_annotations::take_over(pod) {
            context.warn(warning);
        }
        Ok(Change::none())
    }
}
