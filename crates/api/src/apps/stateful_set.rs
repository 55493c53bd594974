//! StatefulSets.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::rolling::{
    amount, at_most, at_most_100_percent, int_or_percent, not_decremented, required_selector,
};
use crate::core::{claim, pod_defaults, pod_spec, pod_warnings};
use crate::errors::Errors;
use crate::internal;
use crate::kind::{AGE, Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, list, number, text};
use crate::{object_meta, row, strategy, walk};

pub static STATEFUL_SET: Kind = Kind {
    group: "apps",
    kind: "StatefulSet",
    pod_spec: "spec.template.spec",
    default,
    prepare_create: |object| {
        strategy::create_with_generation(object);
        drop_disabled(object, &Value::Null);
    },
    prepare_update: |new, old| {
        drop_disabled(new, old);
        strategy::update_spec(new, old);
    },
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let spec = root.field("spec");
        rules(&spec, true, &mut errors);
        errors.into_vec()
    },
    validate_update,
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let status = root.field("status");
        for name in [
            "replicas",
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
            "observedGeneration",
            "collisionCount",
        ] {
            errors.non_negative(&status.field(name));
        }
        let counters = [
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
        ];
        at_most(&status, &counters, "replicas", "status.replicas", &mut errors);
        at_most(
            &status,
            &["availableReplicas"],
            "readyReplicas",
            "status.readyReplicas",
            &mut errors,
        );
        not_decremented(&status, old, "collisionCount", &mut errors);
        errors.into_vec()
    },
    columns: &[NAME, column("Ready"), AGE, wide("Containers"), wide("Images")],
    row: |object, now| {
        let [names, images] = row::containers(object, "spec.template.spec");
        let ready = format!(
            "{}/{}",
            number(object, "status.readyReplicas"),
            number(object, "spec.replicas")
        );
        vec![
            row::name(object),
            json!(ready),
            row::age(object, now),
            names,
            images,
        ]
    },
    has_status: true,
    name_rule: object_meta::dns_label,
    warnings: |new, old| {
        let mut warnings = pod_warnings::template(new, old, "spec.template");
        for (i, template) in list(new, "spec.volumeClaimTemplates").iter().enumerate() {
            // COMPAT: upstream's path is without the template's `spec`, or has it as the inner type does.
            let inner = if old.is_some() { ".Spec" } else { "" };
            let path = format!("spec.volumeClaimTemplates[{i}]{inner}");
            claim::fractions(at(template, "spec"), &path, &mut warnings);
        }
        if number(new, "spec.revisionHistoryLimit") < 0 {
            warnings.push("spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= 0 is recommended".to_owned());
        }
        warnings
    },
    update_again: Again::Change,
    never_written: super::no_replicas,
    ..BASE
};

/// More than one unavailable pod at a time is off by default, and so is its field; templates of claims are
/// claims whatever they say.
fn drop_disabled(object: &mut Value, old: &Value) {
    if at(old, "spec.updateStrategy.rollingUpdate.maxUnavailable").is_null() {
        walk::each(object, "spec.updateStrategy.rollingUpdate", &mut |rolling| {
            walk::remove(rolling, "maxUnavailable")
        });
    }
}

fn default(_: &str, object: &mut Value) {
    let Some(spec) = walk::object(object, "spec") else {
        return;
    };
    walk::string(spec, "podManagementPolicy", "OrderedReady");
    if let Some(update) = walk::object(spec, "updateStrategy") {
        if text(update, "type").is_empty() {
            walk::put(update, "type", json!("RollingUpdate"));
            walk::pointer(update, "rollingUpdate", json!({}));
        }
        if text(update, "type") == "RollingUpdate" {
            walk::each(update, "rollingUpdate", &mut |rolling| {
                walk::pointer(rolling, "partition", 0)
            });
        }
    }
    if let Some(retention) = walk::object(spec, "persistentVolumeClaimRetentionPolicy") {
        walk::string(retention, "whenDeleted", "Retain");
        walk::string(retention, "whenScaled", "Retain");
    }
    walk::pointer(spec, "replicas", 1);
    walk::pointer(spec, "revisionHistoryLimit", 10);
    walk::made(spec, "template.spec", &mut pod_defaults::pod_spec);
    walk::each(spec, "volumeClaimTemplates[]", &mut |template| {
        // COMPAT: upstream completes these like objects of their own.
        walk::put(template, "apiVersion", json!("v1"));
        walk::put(template, "kind", json!("PersistentVolumeClaim"));
        if let Some(spec) = walk::object(template, "spec") {
            pod_defaults::claim_spec(spec);
        }
        if let Some(status) = walk::object(template, "status") {
            walk::string(status, "phase", "Pending");
        }
    });
}

fn rules(spec: &Node, creating: bool, errors: &mut Errors) {
    let policy = spec.field("podManagementPolicy");
    match policy.str() {
        "OrderedReady" | "Parallel" => {}
        "" => errors.required(&policy, ""),
        _ => errors.invalid(&policy, "must be 'OrderedReady' or 'Parallel'"),
    }
    update_strategy(&spec.field("updateStrategy"), errors);
    let retention = spec.field("persistentVolumeClaimRetentionPolicy");
    if retention.is_set() {
        for name in ["whenDeleted", "whenScaled"] {
            errors.one_of(&retention.field(name), &["Retain", "Delete"]);
        }
    }
    let templates = spec.field("volumeClaimTemplates");
    if creating {
        for template in templates.items() {
            claim::spec(&template.field("spec"), errors);
        }
    }
    errors.non_negative(&spec.field("replicas"));
    errors.non_negative(&spec.field("minReadySeconds"));
    errors.non_negative(&spec.field("ordinals.start"));
    let service = spec.field("serviceName");
    if creating && !service.is_empty() {
        errors.rule(&service, names::dns1123_label(service.str()));
    }
    let selector = spec.field("selector");
    required_selector(&selector, "statefulset", errors);
    let template = spec.field("template");
    let completed = with_claim_volumes(spec.value);
    if pod_spec::usable_selector(&selector, "", errors) {
        pod_spec::selected_template(&template.with(&completed), selector.value, errors);
        if creating {
            // COMPAT: upstream looks at them once more.
            pod_spec::template_metadata(&template, errors);
        }
    }
    pod_spec::always_restart(&template, "StatefulSet", errors);
}

/// The template as the controller will use it: with the claims as volumes and without the names it sets.
fn with_claim_volumes(spec: &Value) -> Value {
    let mut template = at(spec, "template").clone();
    let claims = list(spec, "volumeClaimTemplates");
    if let Some(pod) = template.get_mut("spec") {
        walk::remove(pod, "subdomain");
        walk::remove(pod, "hostname");
        if !claims.is_empty() {
            let name = |claim: &Value| text(claim, "metadata.name").to_owned();
            let claimed: BTreeSet<String> = claims.iter().map(name).collect();
            let mut volumes: Vec<Value> = claimed
                .iter()
                .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
                .collect();
            volumes.extend(
                list(pod, "volumes")
                    .iter()
                    .filter(|v| !claimed.contains(text(v, "name")))
                    .cloned(),
            );
            walk::put(pod, "volumes", Value::Array(volumes));
        }
    }
    template
}

fn update_strategy(update: &Node, errors: &mut Errors) {
    let rolling = update.field("rollingUpdate");
    match update.field("type").str() {
        "" => errors.required(update, ""),
        "OnDelete" => {
            if rolling.is_set() {
                errors.invalid(&rolling, "only allowed for updateStrategy 'RollingUpdate'");
            }
        }
        "RollingUpdate" => {
            errors.non_negative(&rolling.field("partition"));
            let unavailable = rolling.field("maxUnavailable");
            if unavailable.is_set() {
                int_or_percent(&unavailable, errors);
                if amount(unavailable.value) == 0 {
                    errors.invalid(&unavailable, "cannot be 0");
                }
                at_most_100_percent(&unavailable, errors);
            }
        }
        _ => errors.invalid(update, "must be 'RollingUpdate' or 'OnDelete'"),
    }
}

const CHANGEABLE: [&str; 7] = [
    "replicas",
    "template",
    "updateStrategy",
    "minReadySeconds",
    "ordinals",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
];

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    let spec = root.field("spec");
    rules(&spec, false, &mut errors);
    let mut after = at(new, "spec").clone();
    for name in CHANGEABLE {
        walk::copy(&mut after, at(old, "spec"), name);
    }
    if !internal::equal("apps.StatefulSetSpec", &after, at(old, "spec")) {
        errors.forbidden(&spec, "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden");
    }
    errors.into_vec()
}
