//! PodGroupWorkloadExists: the template that a new PodGroup says it was made from must exist.

use async_trait::async_trait;
use skiff_api::node::{at, list, text};
use skiff_meta::{Status, field};

use crate::{Attributes, Lister, Operation, Plugin};

const GROUP: &str = "scheduling.k8s.io";

pub struct PodGroupWorkloadExists;

#[async_trait]
impl Plugin for PodGroupWorkloadExists {
    fn name(&self) -> &'static str {
        "PodGroupWorkloadExists"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is(GROUP, "podgroups") {
            return Ok(());
        }
        let Some(object) = a.object.as_deref() else {
            return Ok(());
        };
        let reference = at(object, "spec.podGroupTemplateRef.workload");
        if reference.is_null() {
            return Ok(());
        }
        let (name, template) = (
            text(reference, "workloadName"),
            text(reference, "podGroupTemplateName"),
        );
        let quoted = field::quote(name);
        let Some(workload) = lister.get(GROUP, "workloads", a.namespace, name).await? else {
            return Err(a.forbidden(format_args!("PodGroup rejected: Workload {quoted} not found")));
        };
        if !at(&workload, "metadata.deletionTimestamp").is_null() {
            return Err(a.forbidden(format_args!(
                "PodGroup rejected: Workload {quoted} is being deleted"
            )));
        }
        let templates = list(&workload, "spec.podGroupTemplates");
        if templates.iter().any(|one| text(one, "name") == template) {
            return Ok(());
        }
        Err(a.forbidden(format_args!(
            "PodGroup rejected: PodGroupTemplate {} not found in Workload {quoted}",
            field::quote(template)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::{Value, json};

    #[tokio::test]
    async fn the_template_must_exist() {
        let workload = |name: &str, metadata: Value| {
            let mut metadata = metadata;
            metadata["name"] = json!(name);
            metadata["namespace"] = json!("ns");
            let object = json!({"metadata": metadata, "spec": {"podGroupTemplates": [{"name": "t"}]}});
            ("workloads", object)
        };
        let objects = Objects(vec![
            workload("w", json!({})),
            workload("going", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})),
        ]);
        for (reference, expected) in [
            (json!(null), ""),
            (json!({"workloadName": "w", "podGroupTemplateName": "t"}), ""),
            (
                json!({"workloadName": "x", "podGroupTemplateName": "t"}),
                "PodGroup rejected: Workload \"x\" not found",
            ),
            (
                json!({"workloadName": "going", "podGroupTemplateName": "t"}),
                "PodGroup rejected: Workload \"going\" is being deleted",
            ),
            (
                json!({"workloadName": "w", "podGroupTemplateName": "u"}),
                "PodGroup rejected: PodGroupTemplate \"u\" not found in Workload \"w\"",
            ),
        ] {
            let mut object =
                json!({"metadata": {"name": "g"}, "spec": {"podGroupTemplateRef": {"workload": reference}}});
            let a = create(GROUP, "podgroups", "PodGroup", &mut object);
            match PodGroupWorkloadExists.validate(&a, &objects).await {
                Ok(()) => assert_eq!(expected, ""),
                Err(status) => assert!(status.message.ends_with(expected), "{}", status.message),
            }
        }
    }
}
