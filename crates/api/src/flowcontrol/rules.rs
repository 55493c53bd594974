//! Rules of FlowSchemas and PriorityLevelConfigurations.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::field::ErrorType;
use skiff_meta::names;

use crate::errors::Errors;
use crate::node::{Node, text};

const PRECEDENCE_MAX: i64 = 10_000;
const QUEUES_MAX: i64 = 10_000_000;
const HASH_BITS_MAX: i64 = 60;
const VERBS: [&str; 9] = [
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "proxy",
    "update",
    "watch",
];
const SHARES_KEY: &str = "flowcontrol.k8s.io/v1beta3-preserve-zero-concurrency-shares";

pub fn flow_schema(object: &Value, errors: &mut Errors) {
    let root = Node::root(object);
    let spec = root.field("spec");
    let precedence = spec.field("matchingPrecedence");
    let number = precedence.int().unwrap_or(0);
    if number <= 0 {
        errors.invalid_value(&precedence, number, "must be a positive value");
    }
    if number > PRECEDENCE_MAX {
        errors.invalid(&precedence, format!("must not be greater than {PRECEDENCE_MAX}"));
    }
    if number == 1 && text(object, "metadata.name") != "exempt" {
        errors.invalid(
            &precedence,
            "only the schema named 'exempt' may have matchingPrecedence 1",
        );
    }
    let method = spec.field("distinguisherMethod");
    let kind = method.field("type");
    if method.is_set() && !["ByNamespace", "ByUser"].contains(&kind.str()) {
        // COMPAT: upstream shows the whole method.
        errors.push(
            ErrorType::NotSupported,
            &kind,
            Some(serde_json::json!({"Type": kind.str()})),
            "supported values: \"ByNamespace\", \"ByUser\"",
        );
    }
    let level = spec.field("priorityLevelConfiguration.name");
    if level.is_empty() {
        errors.required(&level, "must reference a priority level");
    } else {
        errors.rule(&level, names::dns1123_subdomain(level.str()));
    }
    let rules = spec.field("rules");
    for rule in rules.items() {
        policy_rules(&rule, errors);
    }
    conditions(&root.field("status.conditions"), errors);
}

fn policy_rules(rule: &Node, errors: &mut Errors) {
    let subjects = rule.field("subjects");
    if subjects.is_empty() {
        errors.required(&subjects, "subjects must contain at least one value");
    }
    for one in subjects.items() {
        subject(&one, errors);
    }
    let (resources, others) = (rule.field("resourceRules"), rule.field("nonResourceRules"));
    if resources.is_empty() && others.is_empty() {
        errors.required(
            rule,
            "at least one of resourceRules and nonResourceRules has to be non-empty",
        );
    }
    for rule in resources.items() {
        resource_rule(&rule, errors);
    }
    for rule in others.items() {
        non_resource_rule(&rule, errors);
    }
}

fn subject(subject: &Node, errors: &mut Errors) {
    const KINDS: [(&str, &str); 3] = [
        ("ServiceAccount", "serviceAccount"),
        ("User", "user"),
        ("Group", "group"),
    ];
    let kind = subject.field("kind");
    let Some((_, own)) = KINDS.iter().find(|(name, _)| *name == kind.str()) else {
        errors.not_supported(&kind, &["Group", "ServiceAccount", "User"]);
        return;
    };
    let value = subject.field(own);
    if value.is_set() {
        let name = value.field("name");
        errors.require(&name);
        if *own == "serviceAccount" {
            if !name.is_empty() && name.str() != "*" {
                errors.rule(&name, names::dns1123_subdomain(name.str()));
            }
            let namespace = value.field("namespace");
            if namespace.is_empty() {
                errors.required(&namespace, "must specify namespace for service account");
            } else {
                errors.rule(&namespace, names::dns1123_label(namespace.str()));
            }
        }
    } else {
        let detail = format!("{own} is required when subject kind is '{}'", kind.str());
        errors.required(&value, detail);
    }
    let order: [&str; 2] = match *own {
        "serviceAccount" => ["user", "group"],
        "user" => ["serviceAccount", "group"],
        _ => ["serviceAccount", "user"],
    };
    for other in order {
        let value = subject.field(other);
        if value.is_set() {
            let name = KINDS
                .iter()
                .find(|(_, field)| *field == other)
                .map_or("", |(kind, _)| kind);
            errors.forbidden(
                &value,
                format!("{other} is forbidden when subject kind is not '{name}'"),
            );
        }
    }
}

fn has_star(list: &Node) -> bool {
    list.items().any(|entry| entry.str() == "*")
}

fn alone(list: &Node, what: &str, errors: &mut Errors) {
    if list.len() > 1 && has_star(list) {
        errors.invalid(list, format!("if '*' is present, must not specify other {what}"));
    }
}

fn verbs(verbs: &Node, errors: &mut Errors) {
    if verbs.is_empty() {
        errors.required(verbs, "verbs must contain at least one value");
    } else if has_star(verbs) {
        alone(verbs, "verbs", errors);
    } else if verbs.items().any(|verb| !VERBS.contains(&verb.str())) {
        errors.not_supported(verbs, &VERBS);
    }
}

fn resource_rule(rule: &Node, errors: &mut Errors) {
    verbs(&rule.field("verbs"), errors);
    for (name, one, what) in [
        ("apiGroups", "api group", "api groups"),
        ("resources", "resource", "resources"),
    ] {
        let list = rule.field(name);
        if list.is_empty() {
            errors.required(&list, format!("resource rules must supply at least one {one}"));
        }
        alone(&list, what, errors);
    }
    let namespaces = rule.field("namespaces");
    if namespaces.is_empty() && !rule.field("clusterScope").bool() {
        errors.required(
            &namespaces,
            "resource rules that are not cluster scoped must supply at least one namespace",
        );
    } else if has_star(&namespaces) {
        alone(&namespaces, "namespaces", errors);
    } else {
        for namespace in namespaces.items() {
            for complaint in names::dns1123_label(namespace.str()) {
                let detail = format!("each member of this list must be '*' or a DNS-1123 label; {complaint}");
                errors.invalid(&namespace, detail);
            }
        }
    }
}

fn non_resource_rule(rule: &Node, errors: &mut Errors) {
    verbs(&rule.field("verbs"), errors);
    let urls = rule.field("nonResourceURLs");
    if urls.is_empty() {
        errors.required(&urls, "nonResourceURLs must contain at least one value");
    } else if has_star(&urls) {
        alone(&urls, "non-resource URLs", errors);
    } else {
        for url in urls.items() {
            if let Some(complaint) = url_complaint(url.str()) {
                errors.invalid(&url, complaint);
            }
        }
    }
}

fn url_complaint(path: &str) -> Option<&'static str> {
    let stars = path.matches('*').count();
    if path.is_empty() {
        Some("must not be empty")
    } else if path == "/" {
        None
    } else if !path.starts_with('/') {
        Some("must start with slash")
    } else if path.contains(' ') {
        Some("must not contain white-space")
    } else if path.contains("//") {
        Some("must not contain double slash")
    } else if stars > 1 || (stars == 1 && !path.ends_with("/*")) {
        Some("wildcard can only do suffix matching")
    } else {
        None
    }
}

pub fn priority_level(object: &Value, errors: &mut Errors) {
    let root = Node::root(object);
    let annotations = root.field("metadata.annotations");
    if annotations.key(SHARES_KEY).is_set() {
        errors.forbidden(&annotations, format!("annotation '{SHARES_KEY}' is forbidden"));
    }
    let spec = root.field("spec");
    let kind = spec.field("type");
    if (text(object, "metadata.name") == "exempt") != (kind.str() == "Exempt") {
        errors.invalid(&kind, "must be 'Exempt' if and only if `name` is 'exempt'");
    }
    let (limited, exempt) = (spec.field("limited"), spec.field("exempt"));
    match kind.str() {
        "Exempt" => {
            if limited.is_set() {
                errors.forbidden(&limited, "must be nil if the type is not Limited");
            }
            shares(&exempt, errors);
            lendable(&exempt, errors);
        }
        "Limited" => {
            if exempt.is_set() {
                errors.forbidden(&exempt, "must be nil if the type is Limited");
            }
            if limited.is_set() {
                limits(&limited, errors);
            } else {
                errors.required(&limited, "must not be empty when type is Limited");
            }
        }
        "" => errors.required(&kind, ""),
        _ => errors.not_supported(&kind, &["Exempt", "Limited"]),
    }
    conditions(&root.field("status.conditions"), errors);
}

fn shares(level: &Node, errors: &mut Errors) {
    let shares = level.field("nominalConcurrencyShares");
    if shares.int().is_some_and(|n| n < 0) {
        errors.invalid(&shares, "must be a non-negative integer");
    }
}

fn lendable(level: &Node, errors: &mut Errors) {
    let percent = level.field("lendablePercent");
    if percent.int().is_some_and(|n| !(0..=100).contains(&n)) {
        errors.invalid(&percent, "must be between 0 and 100, inclusive");
    }
}

fn limits(limited: &Node, errors: &mut Errors) {
    shares(limited, errors);
    let response = limited.field("limitResponse");
    let (kind, queuing) = (response.field("type"), response.field("queuing"));
    match kind.str() {
        "Reject" => {
            if queuing.is_set() {
                errors.forbidden(
                    &queuing,
                    "must be nil if limited.limitResponse.type is not Limited",
                );
            }
        }
        "Queue" => {
            if queuing.is_set() {
                queues(&queuing, errors);
            } else {
                errors.required(
                    &queuing,
                    "must not be empty if limited.limitResponse.type is Limited",
                );
            }
        }
        "" => errors.required(&kind, ""),
        _ => errors.not_supported(&kind, &["Queue", "Reject"]),
    }
    lendable(limited, errors);
    let borrowing = limited.field("borrowingLimitPercent");
    if borrowing.int().is_some_and(|n| n < 0) {
        errors.invalid(&borrowing, "if specified, must be a non-negative integer");
    }
}

fn queues(queuing: &Node, errors: &mut Errors) {
    let value = |name| queuing.field(name).int().unwrap_or(0);
    let (length, count, hand) = (value("queueLengthLimit"), value("queues"), value("handSize"));
    if length <= 0 {
        errors.invalid_value(&queuing.field("queueLengthLimit"), length, "must be positive");
    }
    let at = queuing.field("queues");
    if count <= 0 {
        errors.invalid_value(&at, count, "must be positive");
    } else if count > QUEUES_MAX {
        errors.invalid_value(&at, count, format!("must not be greater than {QUEUES_MAX}"));
    }
    let at = queuing.field("handSize");
    // Both are 32 bits wide, so the product is exact enough.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let entropy = || ((count as f64).log2() * hand as f64).ceil() as i64;
    if hand <= 0 {
        errors.invalid_value(&at, hand, "must be positive");
    } else if hand > count {
        errors.invalid_value(&at, hand, format!("should not be greater than queues ({count})"));
    } else if entropy() > HASH_BITS_MAX {
        errors.invalid_value(
            &at,
            hand,
            format!(
                "required entropy bits of deckSize {count} and handSize {hand} should not be greater than {HASH_BITS_MAX}"
            ),
        );
    }
}

pub fn conditions(conditions: &Node, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for condition in conditions.items() {
        let kind = condition.field("type");
        if !seen.insert(kind.str()) {
            errors.duplicate(&kind);
        }
        errors.require(&kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(rule: fn(&Value, &mut Errors), spec: Value, expected: &[&str]) {
        let object = json!({"metadata": {"name": "x"}, "spec": spec});
        let mut errors = Errors::new();
        rule(&object, &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{object}");
    }

    #[test]
    fn flow_schemas() {
        let level = json!({"name": "p"});
        check(
            flow_schema,
            json!({"matchingPrecedence": 1, "priorityLevelConfiguration": level, "distinguisherMethod": {"type": "X"}}),
            &[
                "spec.matchingPrecedence: Invalid value: 1: only the schema named 'exempt' may have matchingPrecedence 1",
                "spec.distinguisherMethod.type: Unsupported value: {\"Type\":\"X\"}: supported values: \"ByNamespace\", \"ByUser\"",
            ],
        );
        check(
            flow_schema,
            json!({"matchingPrecedence": 2, "priorityLevelConfiguration": level, "rules": [
                {"subjects": [{"kind": "User", "group": {"name": "g"}}], "nonResourceRules": [{"verbs": ["x"], "nonResourceURLs": ["/a*b"]}]}]}),
            &[
                "spec.rules[0].subjects[0].user: Required value: user is required when subject kind is 'User'",
                "spec.rules[0].subjects[0].group: Forbidden: group is forbidden when subject kind is not 'Group'",
                "spec.rules[0].nonResourceRules[0].verbs: Unsupported value: [\"x\"]: supported values: \"create\", \"delete\", \"deletecollection\", \"get\", \"list\", \"patch\", \"proxy\", \"update\", \"watch\"",
                "spec.rules[0].nonResourceRules[0].nonResourceURLs[0]: Invalid value: \"/a*b\": wildcard can only do suffix matching",
            ],
        );
    }

    #[test]
    fn priority_levels() {
        let queue = |queues: i64, hand: i64| {
            json!({"type": "Limited", "limited": {"limitResponse": {"type": "Queue",
                "queuing": {"queues": queues, "handSize": hand, "queueLengthLimit": 1}}}})
        };
        check(priority_level, queue(64, 8), &[]);
        check(
            priority_level,
            queue(4, 8),
            &[
                "spec.limited.limitResponse.queuing.handSize: Invalid value: 8: should not be greater than queues (4)",
            ],
        );
        check(
            priority_level,
            queue(1_000_000, 8),
            &[
                "spec.limited.limitResponse.queuing.handSize: Invalid value: 8: required entropy bits of deckSize 1000000 and handSize 8 should not be greater than 60",
            ],
        );
        check(
            priority_level,
            json!({"type": "Exempt"}),
            &["spec.type: Invalid value: \"Exempt\": must be 'Exempt' if and only if `name` is 'exempt'"],
        );
    }
}
