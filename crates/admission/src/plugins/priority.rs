//! Priority: turns the name of a priority class into the number that the scheduler compares.

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_api::node::{at, number, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const GROUP: &str = "scheduling.k8s.io";
const RESOURCE: &str = "priorityclasses";
/// The classes that every cluster has, also before they have been written.
const SYSTEM: [(&str, i64); 2] = [
    ("system-node-critical", 2_000_001_000),
    ("system-cluster-critical", 2_000_000_000),
];

pub struct Priority;

struct Established {
    name: String,
    value: i64,
    preemption_policy: String,
}

fn from_class(class: &Value) -> Established {
    let policy = match text(class, "preemptionPolicy") {
        "" => "PreemptLowerPriority",
        policy => policy,
    };
    Established {
        name: text(class, "metadata.name").to_owned(),
        value: number(class, "value"),
        preemption_policy: policy.to_owned(),
    }
}

/// The default of the cluster: of several the one with the smallest value.
async fn default_class(lister: &dyn Lister) -> Result<Option<Value>, Status> {
    let classes = lister.list(GROUP, RESOURCE, "").await?;
    let defaults = classes
        .into_iter()
        .filter(|c| at(c, "globalDefault").as_bool() == Some(true));
    Ok(defaults.min_by_key(|c| number(c, "value")))
}

async fn establish(a: &Attributes<'_>, lister: &dyn Lister) -> Result<Established, Status> {
    let name = a.text("spec.priorityClassName");
    let none = || Established {
        name: String::new(),
        value: 0,
        preemption_policy: "PreemptLowerPriority".to_owned(),
    };
    if name.is_empty() {
        return Ok(default_class(lister)
            .await?
            .as_ref()
            .map_or_else(none, from_class));
    }
    if let Some(class) = lister.get(GROUP, RESOURCE, "", name).await? {
        return Ok(from_class(&class));
    }
    match SYSTEM.iter().find(|(system, _)| *system == name) {
        Some((_, value)) => Ok(Established {
            name: name.to_owned(),
            value: *value,
            ..none()
        }),
        None => Err(a.forbidden(format_args!("no PriorityClass with name {name} was found"))),
    }
}

#[async_trait]
impl Plugin for Priority {
    fn name(&self) -> &'static str {
        "Priority"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "pods") || a.object.is_none() {
            return Ok(());
        }
        if a.operation == Operation::Update {
            let old = a.old_object;
            if let (Some(spec), Some(old)) = (a.object.as_deref_mut().and_then(|o| o.get_mut("spec")), old) {
                for name in ["priority", "preemptionPolicy"] {
                    if at(spec, name).is_null() {
                        walk::copy(spec, at(old, "spec"), name);
                    }
                }
            }
            return Ok(());
        }
        let found = establish(a, lister).await?;
        let spec = a.object.as_deref().map(|o| at(o, "spec"));
        if let Some(given) = spec
            .and_then(|s| at(s, "priority").as_i64())
            .filter(|p| *p != found.value)
        {
            return Err(a.forbidden(format_args!(
                "the integer value of priority ({given}) must not be provided in pod spec; priority admission controller computed {} from the given PriorityClass name",
                found.value
            )));
        }
        let given = spec.and_then(|spec| spec.get("preemptionPolicy")?.as_str());
        if let Some(given) = given
            && given != found.preemption_policy
        {
            return Err(a.forbidden(format_args!(
                "the string value of PreemptionPolicy ({given}) must not be provided in pod spec; priority admission controller computed {} from the given PriorityClass name",
                found.preemption_policy
            )));
        }
        if let Some(spec) = a.object.as_deref_mut().and_then(|o| walk::object(o, "spec")) {
            if !found.name.is_empty() {
                walk::put(spec, "priorityClassName", json!(found.name));
            }
            walk::put(spec, "priority", json!(found.value));
            walk::put(spec, "preemptionPolicy", json!(found.preemption_policy));
        }
        Ok(())
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is(GROUP, RESOURCE) {
            return Ok(());
        }
        let wants = a
            .object
            .as_deref()
            .is_some_and(|o| at(o, "globalDefault").as_bool() == Some(true));
        if wants && let Some(current) = default_class(lister).await? {
            let name = text(&current, "metadata.name");
            if a.operation == Operation::Create || name != a.text("metadata.name") {
                return Err(a.forbidden(format_args!(
                    "PriorityClass {name} is already marked as default. Only one default can exist"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    async fn check(spec: Value, expected: Result<Value, &str>) {
        let lister = Objects(vec![(
            RESOURCE,
            json!({"metadata": {"name": "high"}, "value": 1000, "preemptionPolicy": "Never"}),
        )]);
        let mut pod = json!({"metadata": {"name": "p"}, "spec": spec});
        match Priority
            .admit(&mut create("", "pods", "Pod", &mut pod), &lister)
            .await
        {
            Ok(()) => assert_eq!(Ok(pod["spec"].clone()), expected),
            Err(status) => assert_eq!(Err(status.message.as_str()), expected),
        }
    }

    #[tokio::test]
    async fn classes_become_numbers() {
        check(
            json!({}),
            Ok(json!({"priority": 0, "preemptionPolicy": "PreemptLowerPriority"})),
        )
        .await;
        check(
            json!({"priorityClassName": "high"}),
            Ok(json!({"priorityClassName": "high", "priority": 1000, "preemptionPolicy": "Never"})),
        )
        .await;
        check(
            json!({"priorityClassName": "none"}),
            Err("pods \"p\" is forbidden: no PriorityClass with name none was found"),
        )
        .await;
        check(
            json!({"priority": 5}),
            Err("pods \"p\" is forbidden: the integer value of priority (5) must not be provided in pod spec; priority admission controller computed 0 from the given PriorityClass name"),
        )
        .await;
    }

    #[tokio::test]
    async fn the_least_of_the_defaults_is_taken_and_there_is_one_default() {
        let class = |name: &str, value: i64| json!({"metadata": {"name": name}, "value": value, "globalDefault": true});
        let lister = Objects(vec![(RESOURCE, class("b", 7)), (RESOURCE, class("a", 5))]);
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {}});
        Priority
            .admit(&mut create("", "pods", "Pod", &mut pod), &lister)
            .await
            .unwrap();
        assert_eq!(
            pod["spec"],
            json!({"priorityClassName": "a", "priority": 5, "preemptionPolicy": "PreemptLowerPriority"})
        );
        let refused = async |operation: Operation, name: &str, default: bool| {
            let mut object = class(name, 1);
            object["globalDefault"] = json!(default);
            let mut a = create(GROUP, RESOURCE, "PriorityClass", &mut object);
            a.operation = operation;
            Priority
                .validate(&a, &lister)
                .await
                .err()
                .map(|status| status.message)
        };
        let why = |name: &str| {
            Some(format!(
                "priorityclasses.scheduling.k8s.io \"{name}\" is forbidden: PriorityClass a is already marked as default. Only one default can exist"
            ))
        };
        assert_eq!(refused(Operation::Create, "c", true).await, why("c"));
        assert_eq!(refused(Operation::Create, "a", true).await, why("a"));
        assert_eq!(refused(Operation::Update, "c", true).await, why("c"));
        assert_eq!(refused(Operation::Update, "a", true).await, None);
        assert_eq!(refused(Operation::Create, "c", false).await, None);
    }

    #[tokio::test]
    async fn an_update_keeps_what_it_does_not_name() {
        let old = json!({"spec": {"priority": 3, "preemptionPolicy": "Never"}});
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"priority": 4}});
        let mut a = create("", "pods", "Pod", &mut pod);
        (a.operation, a.old_object) = (Operation::Update, Some(&old));
        Priority.admit(&mut a, &Objects::default()).await.unwrap();
        assert_eq!(pod["spec"], json!({"priority": 4, "preemptionPolicy": "Never"}));
        check(
            json!({"preemptionPolicy": "Never"}),
            Err("pods \"p\" is forbidden: the string value of PreemptionPolicy (Never) must not be provided in pod spec; priority admission controller computed PreemptLowerPriority from the given PriorityClass name"),
        )
        .await;
        check(
            json!({"priorityClassName": "system-node-critical"}),
            Ok(json!({"priorityClassName": "system-node-critical", "priority": 2_000_001_000, "preemptionPolicy": "PreemptLowerPriority"})),
        )
        .await;
    }
}
