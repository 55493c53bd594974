//! RuntimeClass: a pod takes over the overhead and the scheduling rules of its runtime class.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::node::{at, list, same};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

pub struct RuntimeClass;

async fn class(a: &Attributes<'_>, lister: &dyn Lister) -> Result<Option<Value>, Status> {
    let name = a.text("spec.runtimeClassName");
    if name.is_empty() {
        return Ok(None);
    }
    let complaints = skiff_meta::names::path_segment(name, false);
    if !complaints.is_empty() {
        let (name, why) = (skiff_meta::field::quote(name), complaints.join(" "));
        return Err(Status::failure(
            500,
            "",
            format!("invalid resource name {name}: [{why}]"),
        ));
    }
    match lister.get("node.k8s.io", "runtimeclasses", "", name).await? {
        Some(class) => Ok(Some(class)),
        None => match lister
            .get_latest("node.k8s.io", "runtimeclasses", "", name)
            .await?
        {
            Some(class) => Ok(Some(class)),
            None => Err(a.forbidden(format_args!(
                "pod rejected: RuntimeClass {} not found",
                skiff_meta::field::quote(name)
            ))),
        },
    }
}

#[async_trait]
impl Plugin for RuntimeClass {
    fn name(&self) -> &'static str {
        "RuntimeClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "pods") {
            return Ok(());
        }
        let Some(class) = class(a, lister).await? else {
            return Ok(());
        };
        let overhead = at(&class, "overhead.podFixed");
        let spec = a.object.as_deref().map(|o| at(o, "spec"));
        if let Some(given) = spec.map(|s| at(s, "overhead")).filter(|o| !o.is_null())
            && !same(given, overhead)
        {
            return Err(
                a.forbidden("pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead")
            );
        }
        let wanted = at(&class, "scheduling.nodeSelector")
            .as_object()
            .cloned()
            .unwrap_or_default();
        let given = spec.map_or(&Value::Null, |s| at(s, "nodeSelector"));
        if wanted.iter().any(|(k, v)| given.get(k).is_some_and(|g| g != v)) {
            return Err(a.forbidden(
                "conflict: runtimeClass.scheduling.nodeSelector conflicts with pod.spec.nodeSelector",
            ));
        }
        let Some(spec) = a.object.as_deref_mut().and_then(|o| walk::object(o, "spec")) else {
            return Ok(());
        };
        if !overhead.is_null() {
            walk::put(spec, "overhead", overhead.clone());
        }
        if !wanted.is_empty()
            && let Some(selector) = walk::object(spec, "nodeSelector")
        {
            wanted.into_iter().for_each(|(k, v)| walk::put(selector, &k, v));
        }
        let mut tolerations = list(spec, "tolerations").to_vec();
        let given = tolerations.len();
        for toleration in list(&class, "scheduling.tolerations") {
            if !tolerations.contains(toleration) {
                tolerations.push(toleration.clone());
            }
        }
        if tolerations.len() > given {
            walk::put(spec, "tolerations", Value::Array(tolerations));
        }
        Ok(())
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "pods") {
            return Ok(());
        }
        let given = a
            .object
            .as_deref()
            .map_or(&Value::Null, |o| at(o, "spec.overhead"));
        match class(a, lister).await? {
            Some(class) if !same(given, at(&class, "overhead.podFixed")) => {
                Err(a.forbidden("pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead"))
            }
            None if !given.is_null() && !same(given, &Value::Null) => Err(a.forbidden(
                "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead",
            )),
            _ => Ok(()),
        }
    }
}
