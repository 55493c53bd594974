//! The restart rule `RestartAllContainers`: a container that ends with the right exit code has all containers of its pod
//! removed and started again, init containers first, in the same sandbox. Pure; `sync.rs` removes them.

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, Pod, PodSpec, PodStatus};

use crate::observed::{ContainerState, ObservedContainer, ObservedPod};

/// The condition of a pod whose containers are being removed.
pub const CONDITION: &str = "AllContainersRestarting";
/// The reason of a container that was removed for it.
pub const REASON: &str = "RestartingAllContainers";
pub const MESSAGE: &str = "The container is removed because RestartAllContainers in place";
const ACTION: &str = "RestartAllContainers";

/// A container to be removed before all start again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reset {
    pub id: String,
    pub name: String,
    /// It has not ended by itself.
    pub kill: bool,
}

/// The first rule that applies to the exit code.
pub fn matching_rule(container: &Container, exit_code: i32) -> Option<&ContainerRestartRule> {
    let mut rules = container.restart_policy_rules.iter().flatten();
    rules.find(|rule| {
        rule.exit_codes.as_ref().is_some_and(|codes| {
            let listed = codes.values.iter().flatten().any(|value| *value == exit_code);
            match codes.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                _ => false,
            }
        })
    })
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

/// Whether a rule of the pod has this action.
pub fn is_possible(spec: &PodSpec) -> bool {
    containers(spec)
        .flat_map(|container| container.restart_policy_rules.iter().flatten())
        .any(|rule| rule.action == ACTION)
}

fn triggers(container: &Container, exit_code: i32) -> bool {
    matching_rule(container, exit_code).is_some_and(|rule| rule.action == ACTION)
}

/// Whether all containers are to be restarted: that has begun, or one of them has ended so.
pub fn is_due(spec: &PodSpec, observed: &ObservedPod, previous: &PodStatus) -> bool {
    if !is_possible(spec) {
        return false;
    }
    let begun = |condition: &k8s_openapi::api::core::v1::PodCondition| {
        condition.type_ == CONDITION && condition.status == "True"
    };
    if previous.conditions.iter().flatten().any(begun) {
        return true;
    }
    let statuses = previous.init_container_statuses.iter().flatten();
    let statuses: Vec<_> = statuses
        .chain(previous.container_statuses.iter().flatten())
        .collect();
    containers(spec).any(|container| {
        // COMPAT: what was reported counts only of a container that the runtime shows as ended.
        let Some(found) = observed.container(&container.name) else {
            return false;
        };
        if found.state != ContainerState::Exited {
            return false;
        }
        let reported = statuses
            .iter()
            .find(|status| status.name == container.name)
            .and_then(|status| status.state.as_ref()?.terminated.as_ref());
        triggers(container, found.exit_code)
            || reported.is_some_and(|reported| triggers(container, reported.exit_code))
    })
}

/// Whether nothing is left to be removed.
pub fn is_cleaned_up(spec: &PodSpec, observed: &ObservedPod) -> bool {
    containers(spec).all(|container| observed.container(&container.name).is_none())
}

/// What is to be removed, in this order. Those that asked for it go last: if this is cut off, they are still there to
/// tell.
pub fn to_reset(pod: &Pod, observed: &ObservedPod) -> Vec<Reset> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let of = |list: &[Container], sources: bool| -> Vec<Reset> {
        let instances = list.iter().flat_map(|container| {
            let found = observed
                .containers
                .iter()
                .filter(|one| one.name == container.name);
            found.map(move |one| (container, one))
        });
        instances
            .filter(|(container, one)| is_source(container, one) == sources)
            .map(|(_, one)| Reset {
                id: one.id.clone(),
                name: one.name.clone(),
                kill: one.state != ContainerState::Exited,
            })
            .collect()
    };
    let init = spec.init_containers.as_deref().unwrap_or_default();
    [
        of(&spec.containers, false),
        of(init, false),
        of(&spec.containers, true),
        of(init, true),
    ]
    .concat()
}

fn is_source(container: &Container, one: &ObservedContainer) -> bool {
    one.state == ContainerState::Exited && triggers(container, one.exit_code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        let rules =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        serde_json::from_value(json!({"spec": {"restartPolicy": "Never",
            "initContainers": [{"name": "init", "image": "i"}],
            "containers": [
                {"name": "source", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules},
                {"name": "other", "image": "i"}]}}))
        .unwrap()
    }

    fn container(name: &str, state: ContainerState, exit_code: i32) -> ObservedContainer {
        ObservedContainer {
            id: format!("{name}-{exit_code}"),
            name: name.to_owned(),
            state,
            exit_code,
            ..Default::default()
        }
    }

    #[test]
    fn the_source_goes_last() {
        let pod = pod();
        let spec = pod.spec.as_ref().unwrap();
        let exited = ContainerState::Exited;
        let mut observed = ObservedPod {
            containers: vec![
                container("source", exited, 42),
                container("other", ContainerState::Running, 0),
                container("init", exited, 0),
            ],
            ..Default::default()
        };
        let none = PodStatus::default();
        assert!(is_due(spec, &observed, &none));
        let order: Vec<_> = to_reset(&pod, &observed)
            .into_iter()
            .map(|r| (r.name, r.kill))
            .collect();
        let expected = [("other", true), ("init", false), ("source", false)];
        assert_eq!(order, expected.map(|(name, kill)| (name.to_owned(), kill)));
        // Begun, though the source is gone already.
        observed.containers.remove(0);
        assert!(!is_due(spec, &observed, &none) && !is_cleaned_up(spec, &observed));
        let begun: PodStatus = serde_json::from_value(json!({"conditions": [
            {"type": "AllContainersRestarting", "status": "True"}]}))
        .unwrap();
        assert!(is_due(spec, &observed, &begun));
        assert!(is_cleaned_up(spec, &ObservedPod::default()));
        // Another exit code is none of the rule's business.
        observed.containers = vec![container("source", exited, 1)];
        assert!(!is_due(spec, &observed, &none));
    }
}
