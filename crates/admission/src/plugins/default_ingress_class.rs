//! DefaultIngressClass: an ingress that names no class gets the cluster's default.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{at, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

pub struct DefaultIngressClass;

#[async_trait]
impl Plugin for DefaultIngressClass {
    fn name(&self) -> &'static str {
        "DefaultIngressClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("networking.k8s.io", "ingresses") {
            return Ok(());
        }
        let Some(ingress) = a.object.as_deref_mut() else {
            return Ok(());
        };
        let annotated = at(ingress, "metadata.annotations")
            .get("kubernetes.io/ingress.class")
            .is_some();
        if annotated || !at(ingress, "spec.ingressClassName").is_null() {
            return Ok(());
        }
        let marked = |class: &Value| {
            let mark = at(class, "metadata.annotations").get("ingressclass.kubernetes.io/is-default-class");
            mark.and_then(Value::as_str) == Some("true")
        };
        let classes = lister.list("networking.k8s.io", "ingressclasses", "").await?;
        let newest = classes.iter().filter(|c| marked(c)).max_by(|x, y| {
            let born = |c: &Value| text(c, "metadata.creationTimestamp").to_owned();
            born(x)
                .cmp(&born(y))
                .then_with(|| text(y, "metadata.name").cmp(text(x, "metadata.name")))
        });
        if let (Some(class), Some(spec)) = (newest, walk::object(ingress, "spec")) {
            walk::put(spec, "ingressClassName", json!(text(class, "metadata.name")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    async fn check(mut ingress: Value, expected: Value) {
        let class = |name: &str, born: &str, default: &str| json!({"metadata": {"name": name, "creationTimestamp": born, "annotations": {"ingressclass.kubernetes.io/is-default-class": default}}});
        let lister = Objects(vec![
            ("ingressclasses", class("old", "2025-01-01T00:00:00Z", "true")),
            ("ingressclasses", class("new-b", "2026-01-01T00:00:00Z", "true")),
            ("ingressclasses", class("new-a", "2026-01-01T00:00:00Z", "true")),
            ("ingressclasses", class("newest", "2027-01-01T00:00:00Z", "false")),
        ]);
        let mut a = create("networking.k8s.io", "ingresses", "Ingress", &mut ingress);
        DefaultIngressClass.admit(&mut a, &lister).await.unwrap();
        assert_eq!(at(&ingress, "spec.ingressClassName"), &expected);
    }

    #[tokio::test]
    async fn the_newest_default_is_taken_where_none_is_named() {
        check(json!({"spec": {}}), json!("new-a")).await;
        check(json!({"spec": {"ingressClassName": "mine"}}), json!("mine")).await;
        let annotations = json!({"kubernetes.io/ingress.class": "mine"});
        check(
            json!({"metadata": {"annotations": annotations}, "spec": {}}),
            Value::Null,
        )
        .await;
    }
}
