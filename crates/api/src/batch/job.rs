//! Jobs.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::selector::LabelSelector;
use skiff_meta::{field, names, time};

use super::{job_status, job_update};
use crate::core::{pod_defaults, pod_spec};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, Orphan, When, text as column, wide};
use crate::node::{Node, at, list, number, text};
use crate::object_meta::{domain_prefixed_path, label_selector, selector_is_bad};
use crate::{object_meta, row, strategy, walk};

/// Upstream's limit on the text of a success rule.
const SUCCEEDED_INDEXES_MAX: usize = 64 * 1024;

const JOB_NAME: &str = "batch.kubernetes.io/job-name";
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";

pub static JOB: Kind = Kind {
    group: "batch",
    kind: "Job",
    pod_spec: "spec.template.spec",
    default: |_, object| {
        if let Some(spec) = walk::object(object, "spec") {
            spec_defaults(spec);
        }
        // A new job waits for its generated labels (see `prepare_create`).
        if !text(object, "metadata.uid").is_empty() {
            labels_of_template(object);
        }
    },
    tracked: |object| {
        let mut labelled = object.clone();
        labels_of_template(&mut labelled).then_some(labelled)
    },
    prepare_create: |object| {
        generate_selector(object);
        // COMPAT: upstream's job shares one map of labels with its template from defaulting on, so that
        // what is generated for the pods shows up on the job too.
        labels_of_template(object);
        strategy::create_with_generation(object);
    },
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        errors.extend(object_meta::validate(&as_sent(object), true, JOB.name_rule));
        errors.extend(object_meta::qualified_finalizers(object));
        let root = Node::root(object);
        object_rules(&root, true, &mut errors);
        errors.into_vec()
    },
    metadata: When::Otherwise,
    validate_update,
    validate_status_update: job_status::validate,
    selectable: |object| {
        vec![(
            "status.successful",
            number(object, "status.succeeded").to_string(),
        )]
    },
    columns: &[
        NAME,
        column("Status"),
        column("Completions"),
        column("Duration"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: job_row,
    has_status: true,
    warnings: |new, old| job_update::warnings(new, old, "spec", "spec.template"),
    update_again: Again::ObjectFirst,
    orphan: Orphan::ByDefault,
    orphan_warning: Some(
        "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning",
    ),
    unknown_field: |_, label| format!("field label {} not supported for Job", field::quote(label)),
    ..BASE
};

/// The metadata without labels that were all generated: upstream puts them there only when the job is read again.
fn as_sent(object: &Value) -> Value {
    let mut metadata = at(object, "metadata").clone();
    let generated = ["job-name", JOB_NAME, "controller-uid", CONTROLLER_UID];
    let labels = at(&metadata, "labels").as_object();
    if labels.is_some_and(|labels| labels.keys().all(|key| generated.contains(&key.as_str()))) {
        walk::remove(&mut metadata, "labels");
    }
    json!({ "metadata": metadata })
}

/// A job without labels gets those of its pods.
fn labels_of_template(object: &mut Value) -> bool {
    let labels = at(object, "spec.template.metadata.labels")
        .as_object()
        .filter(|map| !map.is_empty())
        .cloned();
    if let (Some(labels), Some(metadata)) = (labels, walk::object(object, "metadata"))
        && at(metadata, "labels")
            .as_object()
            .is_none_or(serde_json::Map::is_empty)
    {
        walk::put(metadata, "labels", Value::Object(labels));
        return true;
    }
    false
}

/// Defaults of a job spec, also in the template of a cron job.
pub(super) fn spec_defaults(spec: &mut Value) {
    if at(spec, "completions").is_null() && at(spec, "parallelism").is_null() {
        walk::put(spec, "completions", json!(1));
    }
    walk::pointer(spec, "parallelism", 1);
    let limit = if at(spec, "backoffLimitPerIndex").is_null() {
        6
    } else {
        i64::from(i32::MAX)
    };
    walk::pointer(spec, "backoffLimit", limit);
    walk::pointer(spec, "completionMode", "NonIndexed");
    walk::pointer(spec, "suspend", false);
    let replacement = if at(spec, "podFailurePolicy").is_null() {
        "TerminatingOrFailed"
    } else {
        "Failed"
    };
    walk::pointer(spec, "podReplacementPolicy", replacement);
    walk::pointer(spec, "manualSelector", false);
    template_defaults(spec);
}

/// What a job template in a cron job gets: upstream defaults only the nested types there.
pub(super) fn template_defaults(spec: &mut Value) {
    walk::made(spec, "template.spec", &mut pod_defaults::pod_spec);
    walk::each(
        spec,
        "podFailurePolicy.rules[].onPodConditions[]",
        &mut |pattern| {
            walk::string(pattern, "status", "True");
        },
    );
}

/// The labels by which a job knows its pods, from its uid. The uid must be set by now.
fn generate_selector(object: &mut Value) {
    if at(object, "spec.manualSelector").as_bool() == Some(true) {
        return;
    }
    let (name, uid) = (
        text(object, "metadata.name").to_owned(),
        text(object, "metadata.uid").to_owned(),
    );
    let Some(spec) = walk::object(object, "spec") else {
        return;
    };
    let labels = walk::object(spec, "template")
        .and_then(|t| walk::object(t, "metadata"))
        .and_then(|m| walk::object(m, "labels"));
    if let Some(labels) = labels {
        for (key, value) in [
            ("job-name", &name),
            (JOB_NAME, &name),
            ("controller-uid", &uid),
            (CONTROLLER_UID, &uid),
        ] {
            walk::pointer(labels, key, value.as_str());
        }
    }
    if let Some(chosen) = walk::object(spec, "selector").and_then(|s| walk::object(s, "matchLabels")) {
        walk::pointer(chosen, CONTROLLER_UID, uid);
    }
}

/// The rules of the whole job. `prefixed`: that its generated labels have names with a domain too.
fn object_rules(root: &Node, prefixed: bool, errors: &mut Errors) {
    generated_selector(root, prefixed, errors);
    spec(&root.field("spec"), errors);
    let (mode, completions) = (
        text(root.value, "spec.completionMode"),
        number(root.value, "spec.completions"),
    );
    if mode == "Indexed" && completions > 0 {
        let name = root.field("metadata.name");
        let host = format!("{}-{}", name.str(), completions - 1);
        if !names::dns1123_label(&host).is_empty() {
            errors.invalid(
                &name,
                format!("will not able to create pod with invalid DNS label: {host}"),
            );
        }
    }
}

fn generated_selector(root: &Node, prefixed: bool, errors: &mut Errors) {
    if root.field("spec.manualSelector").bool() {
        return;
    }
    let selector = root.field("spec.selector");
    if !selector.is_set() {
        return;
    }
    let (uid, name) = (root.field("metadata.uid"), root.field("metadata.name"));
    let labels = root.field("spec.template.metadata.labels");
    let wanted = [
        ("controller-uid", uid.str()),
        ("job-name", name.str()),
        (CONTROLLER_UID, uid.str()),
        (JOB_NAME, name.str()),
    ];
    let wanted = if prefixed { &wanted[..] } else { &wanted[..2] };
    for (key, value) in wanted {
        let label = labels.key(key);
        if !label.is_set() {
            errors.required(&label, format!("must be '{value}'"));
        } else if label.str() != *value {
            errors.invalid_text(&label, &labels.value.to_string(), format!("must be '{value}'"));
        }
    }
    let expected = wanted
        .iter()
        .map(|(key, value)| ((*key).to_owned(), json!(value)));
    let expected = Value::Object(expected.collect());
    let chosen = LabelSelector::from_value(selector.value).map(|s| s.matches_value(&expected));
    if !selector_is_bad(selector.value) && chosen == Ok(false) {
        errors.invalid(&selector, "`selector` not auto-generated");
    }
}

fn spec(spec: &Node, errors: &mut Errors) {
    job_spec(spec, errors);
    let selector = spec.field("selector");
    if selector.is_set() {
        label_selector(&selector, errors);
    } else {
        errors.required(&selector, "");
    }
    let labels = spec.field("template.metadata.labels");
    if !selector_is_bad(selector.value)
        && LabelSelector::from_value(selector.value).is_ok_and(|s| !s.matches_value(labels.value))
    {
        let shown = labels.value.clone();
        errors.invalid_value(&labels, shown, "`selector` does not match template `labels`");
    }
}

/// The rules of a job spec but for its selector, which templates do not have yet.
pub(super) fn job_spec(spec: &Node, errors: &mut Errors) {
    for name in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        errors.non_negative(&spec.field(name));
    }
    let (per_index, failed) = (spec.field("backoffLimitPerIndex"), spec.field("maxFailedIndexes"));
    if failed.is_set() && !per_index.is_set() {
        errors.required(&per_index, "when maxFailedIndexes is specified");
    }
    let managed_by = spec.field("managedBy");
    if managed_by.is_set() {
        domain_prefixed_path(&managed_by, errors);
        if managed_by.len() > 63 {
            errors.too_long(&managed_by, 63);
        }
    }
    let mode = spec.field("completionMode");
    errors.one_of_if_set(&mode, &["NonIndexed", "Indexed"]);
    if mode.str() == "Indexed" {
        let (completions, parallelism) = (spec.field("completions"), spec.field("parallelism"));
        if !completions.is_set() {
            errors.required(&completions, "when completion mode is Indexed");
        }
        if parallelism.int().is_some_and(|n| n > 100_000) {
            errors.invalid(
                &parallelism,
                "must be less than or equal to 100000 when completion mode is Indexed",
            );
        }
        if let (Some(failed_at_most), Some(wanted)) = (failed.int(), completions.int())
            && failed_at_most > wanted
        {
            errors.invalid(&failed, "must be less than or equal to completions");
        }
        if failed.int().is_some_and(|n| n > 100_000) {
            errors.invalid(&failed, "must be less than or equal to 100000");
        }
        if completions.int().is_some_and(|n| n > 100_000) && per_index.is_set() {
            let detail = "must be less than or equal to 10000 when completions are above 100000 and used with backoff limit per index";
            if !failed.is_set() {
                errors.required(&failed, "must be specified when completions is above 100000");
            }
            for at in [&parallelism, &failed] {
                if at.int().is_some_and(|n| n > 10_000) {
                    errors.invalid(at, detail);
                }
            }
        }
    } else if mode.str() == "NonIndexed" || !mode.is_set() {
        for at in [&per_index, &failed] {
            if at.is_set() {
                errors.invalid(at, "requires indexed completion mode");
            }
        }
    }
    let failure = spec.field("podFailurePolicy");
    if failure.is_set() {
        pod_failure_policy(spec, &failure, errors);
    }
    let success = spec.field("successPolicy");
    if success.is_set() {
        if mode.str() == "Indexed" {
            let rules = success.field("rules");
            if rules.is_empty() {
                errors.required(
                    &rules,
                    "at least one rules must be specified when the successPolicy is specified",
                );
            }
            if rules.len() > 20 {
                errors.too_many(&rules, 20);
            }
            let completions = spec.field("completions").int().unwrap_or(0);
            for rule in rules.items() {
                success_rule(&rule, completions, errors);
            }
        } else {
            errors.invalid(&success, "requires indexed completion mode");
        }
    }
    let replacement = spec.field("podReplacementPolicy");
    if failure.is_set() {
        errors.one_of_if_set(&replacement, &["Failed"]);
    } else {
        errors.one_of_if_set(&replacement, &["Failed", "TerminatingOrFailed"]);
    }
    let template = spec.field("template");
    pod_spec::template(&template, errors);
    let policy = template.field("spec.restartPolicy");
    match policy.str() {
        "Always" | "" => errors.required(&policy, "valid values: \"OnFailure\", \"Never\""),
        "Never" => {}
        "OnFailure" if failure.is_set() => {
            errors.invalid(
                &policy,
                "only \"Never\" is supported when podFailurePolicy is specified",
            );
        }
        _ => errors.one_of(&policy, &["OnFailure", "Never"]),
    }
}

fn success_rule(rule: &Node, completions: i64, errors: &mut Errors) {
    let (indexes, count) = (rule.field("succeededIndexes"), rule.field("succeededCount"));
    if !indexes.is_set() && !count.is_set() {
        errors.required(
            rule,
            "at least one of succeededCount or succeededIndexes must be specified",
        );
    }
    let mut total = 0;
    if indexes.is_set() {
        if indexes.len() > SUCCEEDED_INDEXES_MAX {
            errors.too_long(&indexes, SUCCEEDED_INDEXES_MAX);
        }
        match job_status::indexes(indexes.str(), completions) {
            Ok(found) => total = found,
            Err(why) => errors.invalid(&indexes, format!("error parsing succeededIndexes: {why}")),
        }
    }
    errors.non_negative(&count);
    let Some(wanted) = count.int() else { return };
    if wanted > completions {
        errors.invalid(
            &count,
            format!("must be less than or equal to {completions} (the number of specified completions)"),
        );
    }
    if indexes.is_set() && wanted > total {
        errors.invalid(
            &count,
            format!("must be less than or equal to {total} (the number of indexes in the specified succeededIndexes field)"),
        );
    }
}

fn pod_failure_policy(spec: &Node, policy: &Node, errors: &mut Errors) {
    let names: BTreeSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|n| list(at(spec.value, "template.spec"), n))
        .map(|c| text(c, "name"))
        .collect();
    let rules = policy.field("rules");
    if rules.len() > 20 {
        errors.too_many(&rules, 20);
    }
    for rule in rules.items() {
        let action = rule.field("action");
        match action.str() {
            "" => errors.required(
                &action,
                "valid values: [\"Count\" \"FailIndex\" \"FailJob\" \"Ignore\"]",
            ),
            "FailIndex" if !spec.field("backoffLimitPerIndex").is_set() => {
                errors.invalid(&action, "requires the backoffLimitPerIndex to be set");
            }
            _ => errors.one_of(&action, &["Count", "FailIndex", "FailJob", "Ignore"]),
        }
        let (codes, conditions) = (rule.field("onExitCodes"), rule.field("onPodConditions"));
        if codes.is_set() {
            let operator = codes.field("operator");
            if operator.is_empty() {
                errors.required(&operator, "valid values: [\"In\" \"NotIn\"]");
            } else {
                errors.one_of(&operator, &["In", "NotIn"]);
            }
            let name = codes.field("containerName");
            if name.is_set() && !names.contains(name.str()) {
                errors.invalid(
                    &name,
                    "must be one of the container or initContainer names in the pod template",
                );
            }
            let values = codes.field("values");
            if values.is_empty() {
                let shown = values.value.clone();
                errors.invalid_value(&values, shown, "at least one value is required");
            } else if values.len() > 255 {
                errors.too_many(&values, 255);
            }
            let mut seen = BTreeSet::new();
            for value in values.items() {
                if operator.str() == "In" && value.int() == Some(0) {
                    errors.invalid(&value, "must not be 0 for the In operator");
                }
                if !seen.insert(value.int()) {
                    errors.duplicate(&value);
                }
            }
            let numbers: Vec<Option<i64>> = values.items().map(|value| value.int()).collect();
            if !numbers.is_sorted() {
                errors.invalid(&values, "must be ordered");
            }
        }
        if conditions.len() > 20 {
            errors.too_many(&conditions, 20);
        }
        for condition in conditions.items() {
            let kind = condition.field("type");
            errors.rule(&kind, names::qualified_name(kind.str()));
            errors.one_of(&condition.field("status"), &["False", "True", "Unknown"]);
        }
        let complaint = match (codes.is_set(), !conditions.is_empty()) {
            (true, true) => "specifying both OnExitCodes and OnPodConditions is not supported",
            (false, false) => "specifying one of OnExitCodes and OnPodConditions is required",
            _ => continue,
        };
        errors.push(field::ErrorType::Invalid, &rule, None, complaint);
    }
}

fn validate_update(new: &Value, old: &Value) -> Vec<field::Error> {
    let mut errors = Errors::new();
    let root = Node::root(new);
    let now = root.field("spec");
    // COMPAT: upstream checks the new job by itself first, and then its spec once more.
    let labels = at(old, "spec.template.metadata.labels");
    let prefixed = [JOB_NAME, CONTROLLER_UID]
        .iter()
        .all(|key| labels.get(key).is_some());
    object_rules(&root, prefixed, &mut errors);
    spec(&now, &mut errors);
    let before = at(old, "spec");
    let completions = now.field("completions");
    // An indexed job may grow or shrink as long as both numbers move together.
    if now.field("completionMode").str() != "Indexed" {
        errors.immutable(&completions, at(before, "completions"));
    } else if completions.is_set()
        && completions.value != at(before, "completions")
        && completions.int() != now.field("parallelism").int()
    {
        errors.invalid(
            &completions,
            "can only be modified in tandem with spec.parallelism",
        );
    }
    errors.immutable(&now.field("selector"), at(before, "selector"));
    job_update::template(&now, old, &mut errors);
    for (name, internal) in [
        ("completionMode", ""),
        ("podFailurePolicy", "batch.PodFailurePolicy"),
        ("backoffLimitPerIndex", ""),
        ("managedBy", ""),
        ("successPolicy", "batch.SuccessPolicy"),
    ] {
        errors.immutable_as(internal, &now.field(name), at(before, name));
    }
    errors.into_vec()
}

fn job_row(job: &Value, now: i64) -> Vec<Value> {
    let succeeded = number(job, "status.succeeded");
    let completions = match (
        at(job, "spec.completions").as_i64(),
        number(job, "spec.parallelism"),
    ) {
        (Some(wanted), _) => format!("{succeeded}/{wanted}"),
        (None, parallel) if parallel > 1 => format!("{succeeded}/1 of {parallel}"),
        _ => format!("{succeeded}/1"),
    };
    let moment = |path: &str| time::parse(text(job, path)).map(|t| t.as_second());
    let duration = match (moment("status.startTime"), moment("status.completionTime")) {
        (None, _) => String::new(),
        (Some(start), end) => time::human_duration(end.unwrap_or(now) - start),
    };
    let has = |kind: &str| {
        list(job, "status.conditions")
            .iter()
            .any(|c| text(c, "type") == kind && text(c, "status") == "True")
    };
    let status = if has("Complete") {
        "Complete"
    } else if has("Failed") {
        "Failed"
    } else if !at(job, "metadata.deletionTimestamp").is_null() {
        "Terminating"
    } else {
        ["Suspended", "FailureTarget", "SuccessCriteriaMet"]
            .into_iter()
            .find(|k| has(k))
            .unwrap_or("Running")
    };
    let [names, images] = row::containers(job, "spec.template.spec");
    vec![
        row::name(job),
        json!(status),
        json!(completions),
        json!(duration),
        row::age(job, now),
        names,
        images,
        row::selector(job, "spec.selector"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_selects_its_pods_by_its_uid() {
        let mut job = json!({"metadata": {"name": "j", "namespace": "d", "uid": "u"}, "spec": {"template": {
            "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}});
        (JOB.default)("v1", &mut job);
        JOB.begin_create(&mut job);
        assert_eq!(
            job["spec"]["selector"]["matchLabels"],
            json!({"batch.kubernetes.io/controller-uid": "u"})
        );
        assert_eq!(JOB.check_create(&job, true), vec![]);
        job["spec"]["template"]["spec"]["restartPolicy"] = json!("Always");
        let found: Vec<String> = JOB
            .check_create(&job, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            ["spec.template.spec.restartPolicy: Required value: valid values: \"OnFailure\", \"Never\""]
        );
    }

    #[test]
    fn exit_codes_are_listed_once_and_in_order() {
        let mut job = json!({"metadata": {"name": "j", "namespace": "d", "uid": "u"}, "spec": {
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 1, 2]}}]},
            "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}});
        (JOB.default)("v1", &mut job);
        JOB.begin_create(&mut job);
        let found: Vec<String> = JOB
            .check_create(&job, true)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            [
                "spec.podFailurePolicy.rules[0].onExitCodes.values[2]: Duplicate value: 2",
                "spec.podFailurePolicy.rules[0].onExitCodes.values: Invalid value: [2,1,2]: must be ordered",
            ]
        );
    }
}
