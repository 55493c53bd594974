//! Deployments.

use serde_json::{Value, json};

use super::rolling::{
    amount, at_most, at_most_100_percent, int_or_percent, not_decremented, required_selector,
};
use crate::core::{pod_defaults, pod_spec, pod_warnings};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, number, text};
use crate::{row, strategy, walk};

pub static DEPLOYMENT: Kind = Kind {
    group: "apps",
    kind: "Deployment",
    pod_spec: "spec.template.spec",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::pointer(spec, "replicas", 1);
        if let Some(strategy) = walk::object(spec, "strategy") {
            walk::string(strategy, "type", "RollingUpdate");
            if text(strategy, "type") == "RollingUpdate"
                && let Some(rolling) = walk::object(strategy, "rollingUpdate")
            {
                walk::pointer(rolling, "maxUnavailable", "25%");
                walk::pointer(rolling, "maxSurge", "25%");
            }
        }
        walk::pointer(spec, "revisionHistoryLimit", 10);
        walk::pointer(spec, "progressDeadlineSeconds", 600);
        walk::made(spec, "template.spec", &mut pod_defaults::pod_spec);
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: |new, old| {
        walk::copy(new, old, "status");
        // Annotations are copied to the replica sets, so they count as a change too.
        strategy::bump_generation_if(new, old, &["spec", "metadata.annotations"]);
    },
    prepare_status_update: strategy::status_only_keep_labels,
    validate: |object| {
        let mut errors = Errors::new();
        spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        spec(&root.field("spec"), &mut errors);
        errors.immutable(&root.field("spec.selector"), at(old, "spec.selector"));
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let status = root.field("status");
        for name in [
            "observedGeneration",
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "terminatingReplicas",
            "collisionCount",
        ] {
            errors.non_negative(&status.field(name));
        }
        let counters = ["updatedReplicas", "readyReplicas", "availableReplicas"];
        at_most(&status, &counters, "replicas", "status.replicas", &mut errors);
        at_most(
            &status,
            &["availableReplicas"],
            "readyReplicas",
            "readyReplicas",
            &mut errors,
        );
        not_decremented(&status, old, "collisionCount", &mut errors);
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Ready"),
        column("Up-to-date"),
        column("Available"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: deployment_row,
    has_status: true,
    warnings: |new, old| pod_warnings::template(new, old, "spec.template"),
    update_again: Again::Change,
    reset_fields: &[("status", &[&["spec"], &["metadata", "labels"]])],
    never_written: super::no_replicas,
    ..BASE
};

fn spec(spec: &Node, errors: &mut Errors) {
    errors.non_negative(&spec.field("replicas"));
    let selector = spec.field("selector");
    required_selector(&selector, "deployment", errors);
    let template = spec.field("template");
    if pod_spec::usable_selector(&selector, "invalid label selector", errors) {
        pod_spec::selected_template(&template, selector.value, errors);
        pod_spec::always_restart(&template, "ReplicaSet", errors);
    }
    strategy_rules(&spec.field("strategy"), errors);
    errors.non_negative(&spec.field("minReadySeconds"));
    errors.non_negative(&spec.field("revisionHistoryLimit"));
    let deadline = spec.field("progressDeadlineSeconds");
    errors.non_negative(&deadline);
    if deadline
        .int()
        .is_some_and(|n| n <= spec.field("minReadySeconds").int().unwrap_or(0))
    {
        errors.invalid(&deadline, "must be greater than minReadySeconds");
    }
}

fn strategy_rules(strategy: &Node, errors: &mut Errors) {
    let rolling = strategy.field("rollingUpdate");
    match strategy.field("type").str() {
        "Recreate" => {
            if rolling.is_set() {
                errors.forbidden(
                    &rolling,
                    "may not be specified when strategy `type` is 'Recreate'",
                );
            }
        }
        "RollingUpdate" => {
            if !rolling.is_set() {
                return errors.required(&rolling, "this should be defaulted and never be nil");
            }
            let (unavailable, surge) = (rolling.field("maxUnavailable"), rolling.field("maxSurge"));
            int_or_percent(&unavailable, errors);
            int_or_percent(&surge, errors);
            if amount(unavailable.value) == 0 && amount(surge.value) == 0 {
                errors.invalid(&unavailable, "may not be 0 when `maxSurge` is 0");
            }
            at_most_100_percent(&unavailable, errors);
        }
        _ => errors.not_supported(strategy, &["Recreate", "RollingUpdate"]),
    }
}

fn deployment_row(object: &Value, now: i64) -> Vec<Value> {
    let [names, images] = row::containers(object, "spec.template.spec");
    vec![
        row::name(object),
        json!(format!(
            "{}/{}",
            number(object, "status.readyReplicas"),
            number(object, "spec.replicas")
        )),
        json!(number(object, "status.updatedReplicas")),
        json!(number(object, "status.availableReplicas")),
        row::age(object, now),
        names,
        images,
        row::selector(object, "spec.selector"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(spec: Value) -> Value {
        let mut object =
            json!({"metadata": {"name": "web", "namespace": "d", "resourceVersion": "1"}, "spec": spec});
        (DEPLOYMENT.default)("v1", &mut object);
        DEPLOYMENT.begin_create(&mut object);
        object
    }

    fn good() -> Value {
        json!({"selector": {"matchLabels": {"app": "web"}}, "template": {
            "metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}})
    }

    fn check(spec: Value, expected: &[&str]) {
        let found: Vec<String> = DEPLOYMENT
            .check_create(&deployment(spec), true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn defaults() {
        let spec = &deployment(good())["spec"];
        assert_eq!(spec["replicas"], 1);
        assert_eq!(
            spec["strategy"],
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}})
        );
        assert_eq!(
            spec["template"]["spec"]["containers"][0]["imagePullPolicy"],
            "IfNotPresent"
        );
        assert_eq!(spec["template"]["spec"].get("enableServiceLinks"), None);
    }

    #[test]
    fn rules() {
        check(good(), &[]);
        let mut spec = good();
        spec["selector"] = json!({"matchLabels": {"app": "other"}});
        check(
            spec,
            &[
                "spec.template.metadata.labels: Invalid value: {\"app\":\"web\"}: `selector` does not match template `labels`",
            ],
        );
        let mut spec = good();
        spec["selector"] = Value::Null;
        check(
            spec,
            &[
                "spec.selector: Required value",
                "spec.template.metadata.labels: Invalid value: {\"app\":\"web\"}: `selector` does not match template `labels`",
            ],
        );
        let mut spec = good();
        spec["replicas"] = json!(-1);
        check(
            spec,
            &["spec.replicas: Invalid value: -1: must be greater than or equal to 0"],
        );
        let mut spec = good();
        spec["strategy"] = json!({"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 0}});
        check(
            spec,
            &[
                "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: 0: may not be 0 when `maxSurge` is 0",
            ],
        );
        let mut spec = good();
        spec["template"]["spec"]["restartPolicy"] = json!("Never");
        check(
            spec,
            &["spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\""],
        );
    }

    #[test]
    fn the_selector_stays() {
        let old = deployment(good());
        let mut new = old.clone();
        new["spec"]["selector"]["matchLabels"] = json!({"app": "x"});
        new["spec"]["template"]["metadata"]["labels"] = json!({"app": "x"});
        DEPLOYMENT.begin_update(&mut new, &old);
        assert_eq!(new["metadata"]["generation"], 2);
        let found: Vec<String> = DEPLOYMENT
            .check_update(&new, &old, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["spec.selector: Invalid value: {\"matchLabels\":{\"app\":\"x\"}}: field is immutable"]
        );
    }

    #[test]
    fn a_row() {
        let mut object = deployment(good());
        object["status"] = json!({"readyReplicas": 1, "updatedReplicas": 1, "availableReplicas": 1});
        object["metadata"]["creationTimestamp"] = json!("2023-11-14T22:13:20Z");
        assert_eq!(
            Value::Array(deployment_row(&object, 1_700_000_090)),
            json!(["web", "1/1", 1, 1, "90s", "c", "i:1", "app=web"])
        );
    }
}
