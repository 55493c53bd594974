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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};
    use serde_json::json;

    fn classes() -> Objects {
        Objects(vec![
            (
                "runtimeclasses",
                json!({"metadata": {"name": "sandbox"}, "overhead": {"podFixed": {"cpu": "250m"}}, "scheduling": {
                    "nodeSelector": {"kind": "sandbox"},
                    "tolerations": [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}]}}),
            ),
            ("runtimeclasses", json!({"metadata": {"name": "plain"}})),
        ])
    }

    async fn check(spec: Value, expected: Result<Value, &str>) {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": spec});
        let mut a = create("", "pods", "Pod", &mut pod);
        let mut result = RuntimeClass.admit(&mut a, &classes()).await;
        if result.is_ok() {
            result = RuntimeClass.validate(&a, &classes()).await;
        }
        match result {
            Ok(()) => assert_eq!(Ok(pod["spec"].clone()), expected),
            Err(status) => assert_eq!(Err(status.message.as_str()), expected),
        }
    }

    #[tokio::test]
    async fn a_pod_takes_over_what_its_class_says() {
        check(json!({}), Ok(json!({}))).await;
        let plain = json!({"runtimeClassName": "plain"});
        check(plain.clone(), Ok(plain)).await;
        check(
            json!({"runtimeClassName": "sandbox", "nodeSelector": {"x": "y"}, "tolerations": [{"key": "b", "operator": "Exists"}]}),
            Ok(json!({"runtimeClassName": "sandbox", "nodeSelector": {"x": "y", "kind": "sandbox"},
                "tolerations": [{"key": "b", "operator": "Exists"}, {"key": "a", "operator": "Exists"}],
                "overhead": {"cpu": "250m"}})),
        )
        .await;
        // The same amount in other words.
        let given = json!({"runtimeClassName": "sandbox", "overhead": {"cpu": "250m"}});
        let mut taken = given.clone();
        taken["nodeSelector"] = json!({"kind": "sandbox"});
        taken["tolerations"] =
            json!([{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}]);
        check(given, Ok(taken)).await;
    }

    #[tokio::test]
    async fn a_pod_does_not_contradict_its_class() {
        let differs = "pods \"p\" is forbidden: pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";
        check(
            json!({"runtimeClassName": "sandbox", "overhead": {"cpu": "1"}}),
            Err(differs),
        )
        .await;
        check(
            json!({"runtimeClassName": "plain", "overhead": {"cpu": "1"}}),
            Err(differs),
        )
        .await;
        check(
            json!({"overhead": {"cpu": "1"}}),
            Err("pods \"p\" is forbidden: pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"),
        )
        .await;
        check(
            json!({"runtimeClassName": "sandbox", "nodeSelector": {"kind": "other"}}),
            Err("pods \"p\" is forbidden: conflict: runtimeClass.scheduling.nodeSelector conflicts with pod.spec.nodeSelector"),
        )
        .await;
        check(
            json!({"runtimeClassName": "none"}),
            Err("pods \"p\" is forbidden: pod rejected: RuntimeClass \"none\" not found"),
        )
        .await;
        check(
            json!({"runtimeClassName": "a/b"}),
            Err("invalid resource name \"a/b\": [may not contain '/']"),
        )
        .await;
    }
}
