//! NamespaceLifecycle: nothing is created in a namespace that is missing or on its way out, and the
//! namespaces of the system itself stay.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use skiff_api::node::text;
use skiff_meta::status::Cause;
use skiff_meta::{GroupResource, Status};

use crate::{Attributes, Lister, Operation, Plugin};

const IMMORTAL: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
/// How long a cache that still says Active is not believed after a delete.
const DOUBT: Duration = Duration::from_secs(30);
const DOUBTED_MAX: usize = 100;

#[derive(Default)]
pub struct NamespaceLifecycle {
    /// Namespaces whose deletion passed here a moment ago.
    doubted: Mutex<VecDeque<(Instant, String)>>,
}

impl NamespaceLifecycle {
    fn doubt(&self, name: &str) {
        let mut doubted = self.doubted.lock();
        doubted.push_back((Instant::now(), name.to_owned()));
        while doubted.len() > DOUBTED_MAX {
            doubted.pop_front();
        }
    }

    fn is_doubted(&self, name: &str) -> bool {
        let mut doubted = self.doubted.lock();
        while doubted.front().is_some_and(|(at, _)| at.elapsed() > DOUBT) {
            doubted.pop_front();
        }
        doubted.iter().any(|(_, n)| n == name)
    }
}

#[async_trait]
impl Plugin for NamespaceLifecycle {
    fn name(&self) -> &'static str {
        "NamespaceLifecycle"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if a.kind_group.is_empty() && a.kind == "Namespace" {
            if a.operation == Operation::Delete {
                if IMMORTAL.contains(&a.name) {
                    let why = "this namespace may not be deleted";
                    return Err(Status::forbidden(&a.group_resource(), a.name, why));
                }
                self.doubt(a.name);
            }
            return Ok(());
        }
        let review = a.group == "authorization.k8s.io" && a.resource == "localsubjectaccessreviews";
        if a.namespace.is_empty() || a.operation == Operation::Delete || review {
            return Ok(());
        }
        let mut namespace = lister.get("", "namespaces", "", a.namespace).await?;
        let active = namespace
            .as_ref()
            .is_some_and(|n| text(n, "status.phase") != "Terminating");
        if namespace.is_none() || (active && self.is_doubted(a.namespace)) {
            namespace = lister.get_latest("", "namespaces", "", a.namespace).await?;
        }
        let Some(namespace) = namespace else {
            return Err(Status::not_found(
                &GroupResource::new("", "namespaces"),
                a.namespace,
            ));
        };
        if a.operation == Operation::Create && text(&namespace, "status.phase") == "Terminating" {
            let mut status = a.forbidden(format_args!(
                "unable to create new content in namespace {} because it is being terminated",
                a.namespace
            ));
            if let Some(details) = &mut status.details {
                details.causes.push(Cause {
                    reason: "NamespaceTerminating".to_owned(),
                    message: format!("namespace {} is being terminated", a.namespace),
                    field: "metadata.namespace".to_owned(),
                });
            }
            return Err(status);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::json;

    async fn check(phase: Option<&str>, expected: Option<&str>) {
        let objects = phase.map(|p| {
            (
                "namespaces",
                json!({"metadata": {"name": "ns"}, "status": {"phase": p}}),
            )
        });
        let lister = Objects(objects.into_iter().collect());
        let mut pod = json!({"metadata": {"name": "p"}});
        let result = NamespaceLifecycle::default()
            .admit(&mut create("", "pods", "Pod", &mut pod), &lister)
            .await;
        assert_eq!(result.err().map(|s| s.message).as_deref(), expected);
    }

    #[tokio::test]
    async fn creation_needs_a_living_namespace() {
        check(Some("Active"), None).await;
        check(None, Some("namespaces \"ns\" not found")).await;
        check(
            Some("Terminating"),
            Some("pods \"p\" is forbidden: unable to create new content in namespace ns because it is being terminated"),
        )
        .await;
    }

    #[tokio::test]
    async fn the_systems_namespaces_stay() {
        let lister = Objects::default();
        let mut object = json!({});
        let mut a = create("", "namespaces", "Namespace", &mut object);
        a.operation = Operation::Delete;
        a.name = "kube-system";
        let error = NamespaceLifecycle::default()
            .admit(&mut a, &lister)
            .await
            .unwrap_err();
        assert_eq!(
            error.message,
            "namespaces \"kube-system\" is forbidden: this namespace may not be deleted"
        );
        a.name = "other";
        assert!(NamespaceLifecycle::default().admit(&mut a, &lister).await.is_ok());
    }
}
