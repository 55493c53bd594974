//! Plugins that are off unless somebody wants them: AlwaysDeny, AlwaysPullImages, DenyServiceExternalIPs.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{list, text};
use skiff_meta::Status;
use skiff_meta::field::{Error, Path};

use crate::{Attributes, Lister, Operation, Plugin};

/// AlwaysDeny: nothing is written.
pub struct AlwaysDeny;

#[async_trait]
impl Plugin for AlwaysDeny {
    fn name(&self) -> &'static str {
        "AlwaysDeny"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        Err(refused(a))
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        Err(refused(a))
    }
}

fn refused(a: &Attributes<'_>) -> Status {
    Status::forbidden(
        &a.group_resource(),
        a.name,
        "admission control is denying all modifications",
    )
}

const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// AlwaysPullImages: who may use an image is asked for every pod, and not only for the first on a node.
pub struct AlwaysPullImages;

#[async_trait]
impl Plugin for AlwaysPullImages {
    fn name(&self) -> &'static str {
        "AlwaysPullImages"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        // Ephemeral containers come by a subresource.
        a.group.is_empty()
            && a.resource == "pods"
            && matches!(a.subresource, "" | "ephemeralcontainers" | "resize")
    }

    async fn admit(&self, a: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let old = a.old_object;
        let Some(pod) = a.object.as_deref_mut() else {
            return Ok(());
        };
        // An update that brings no new image is left alone.
        if let Some(old) = old
            && !brings_images(pod, old)
        {
            return Ok(());
        }
        for sort in CONTAINERS {
            let containers = pod
                .pointer_mut(&format!("/spec/{sort}"))
                .and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten() {
                container["imagePullPolicy"] = json!("Always");
            }
        }
        Ok(())
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let Some(pod) = a.object.as_deref() else {
            return Ok(());
        };
        if a.old_object.is_some_and(|old| !brings_images(pod, old)) {
            return Ok(());
        }
        for sort in CONTAINERS {
            for (at, container) in list(pod, &format!("spec.{sort}")).iter().enumerate() {
                let policy = text(container, "imagePullPolicy");
                if policy != "Always" {
                    let path = Path::new("spec").child(sort).index(at).child("imagePullPolicy");
                    let why = Error::not_supported(&path, policy, &["Always"]);
                    return Err(Status::forbidden(&a.group_resource(), a.name, why.to_string()));
                }
            }
        }
        Ok(())
    }
}

/// Whether a pod has an image that it did not have.
fn brings_images(new: &Value, old: &Value) -> bool {
    let images = |pod: &Value| -> Vec<String> {
        let sorts = CONTAINERS.iter().map(|sort| format!("spec.{sort}"));
        sorts
            .flat_map(|path| {
                list(pod, &path)
                    .iter()
                    .map(|c| text(c, "image").to_owned())
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let old = images(old);
    images(new).iter().any(|image| !old.contains(image))
}

/// DenyServiceExternalIPs: nobody takes over addresses that are somebody else's.
pub struct DenyServiceExternalIPs;

#[async_trait]
impl Plugin for DenyServiceExternalIPs {
    fn name(&self) -> &'static str {
        "DenyServiceExternalIPs"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        a.group.is_empty() && a.resource == "services" && a.subresource.is_empty()
    }

    async fn validate(&self, a: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let Some(service) = a.object.as_deref() else {
            return Ok(());
        };
        // Those that are there may stay.
        let old = a
            .old_object
            .map(|old| list(old, "spec.externalIPs"))
            .unwrap_or_default();
        if list(service, "spec.externalIPs")
            .iter()
            .all(|address| old.contains(address))
        {
            return Ok(());
        }
        let why = "Use of external IPs is denied by admission control.";
        Err(Status::forbidden(&a.group_resource(), a.name, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    #[tokio::test]
    async fn what_is_wanted_is_done() {
        let mut pod =
            json!({"spec": {"containers": [{"name": "a", "image": "i", "imagePullPolicy": "Never"}]}});
        let mut a = create("", "pods", "Pod", &mut pod);
        assert!(AlwaysPullImages.validate(&a, &Objects::default()).await.is_err());
        AlwaysPullImages.admit(&mut a, &Objects::default()).await.unwrap();
        AlwaysPullImages.validate(&a, &Objects::default()).await.unwrap();
        assert_eq!(
            AlwaysDeny
                .validate(&a, &Objects::default())
                .await
                .unwrap_err()
                .code,
            403
        );
        assert_eq!(pod["spec"]["containers"][0]["imagePullPolicy"], "Always");

        let old = json!({"spec": {"externalIPs": ["192.0.2.1"]}});
        let mut service = json!({"spec": {"externalIPs": ["192.0.2.1"]}});
        let mut a = create("", "services", "Service", &mut service);
        let refused = DenyServiceExternalIPs
            .validate(&a, &Objects::default())
            .await
            .unwrap_err();
        assert!(
            refused
                .message
                .ends_with("Use of external IPs is denied by admission control.")
        );
        a.old_object = Some(&old);
        DenyServiceExternalIPs
            .validate(&a, &Objects::default())
            .await
            .unwrap();
    }
}
