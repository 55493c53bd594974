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

const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];
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

    #[tokio::test]
    async fn what_is_there_can_change_and_go_in_a_namespace_that_goes() {
        let lister = Objects(vec![(
            "namespaces",
            json!({"metadata": {"name": "ns"}, "status": {"phase": "Terminating"}}),
        )]);
        for operation in [Operation::Update, Operation::Delete] {
            let mut pod = json!({"metadata": {"name": "p"}});
            let mut a = create("", "pods", "Pod", &mut pod);
            a.operation = operation;
            assert!(NamespaceLifecycle::default().admit(&mut a, &lister).await.is_ok());
        }
        // Objects of a namespace that is gone can be deleted, and who may do what can be asked.
        let none = Objects::default();
        let mut object = json!({"metadata": {"name": "p"}});
        let mut a = create("", "pods", "Pod", &mut object);
        a.operation = Operation::Delete;
        assert!(NamespaceLifecycle::default().admit(&mut a, &none).await.is_ok());
        let mut a = create(
            "authorization.k8s.io",
            "localsubjectaccessreviews",
            "LocalSubjectAccessReview",
            &mut object,
        );
        assert!(NamespaceLifecycle::default().admit(&mut a, &none).await.is_ok());
    }

    /// A cache that has not heard of the deletion yet.
    struct Behind;

    #[async_trait]
    impl Lister for Behind {
        async fn get(
            &self,
            _: &str,
            _: &str,
            _: &str,
            name: &str,
        ) -> Result<Option<serde_json::Value>, Status> {
            Ok(Some(
                json!({"metadata": {"name": name}, "status": {"phase": "Active"}}),
            ))
        }

        async fn get_latest(
            &self,
            _: &str,
            _: &str,
            _: &str,
            name: &str,
        ) -> Result<Option<serde_json::Value>, Status> {
            Ok(Some(
                json!({"metadata": {"name": name}, "status": {"phase": "Terminating"}}),
            ))
        }

        async fn list(&self, _: &str, _: &str, _: &str) -> Result<Vec<serde_json::Value>, Status> {
            Ok(Vec::new())
        }
    }

    #[tokio::test]
    async fn a_cache_is_not_believed_just_after_a_deletion() {
        let plugin = NamespaceLifecycle::default();
        let mut object = json!({"metadata": {"name": "p"}});
        let mut a = create("", "pods", "Pod", &mut object);
        assert!(plugin.admit(&mut a, &Behind).await.is_ok());
        let mut gone = json!({});
        let mut deletion = create("", "namespaces", "Namespace", &mut gone);
        (deletion.operation, deletion.name) = (Operation::Delete, "ns");
        plugin.admit(&mut deletion, &Behind).await.unwrap();
        assert!(plugin.admit(&mut a, &Behind).await.is_err());
    }
}
