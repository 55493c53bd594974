//! MutatingWebhookConfigurations and ValidatingWebhookConfigurations.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skiff_meta::{field, names};

use super::GROUP;
use super::matching::{match_conditions, rule_with_operations};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, integer};
use crate::node::{Node, at, list, same, text};
use crate::object_meta::label_selector;
use crate::{row, strategy, walk};

const REVIEW_VERSIONS: [&str; 2] = ["v1", "v1beta1"];
const NO_SIDE_EFFECTS: [&str; 2] = ["None", "NoneOnDryRun"];
const SIDE_EFFECTS: [&str; 4] = ["None", "NoneOnDryRun", "Some", "Unknown"];

const WEBHOOKS: Kind = Kind {
    group: GROUP,
    prepare_create: strategy::create_generation_only,
    prepare_update: |new, old| strategy::bump_generation_if_at_all(new, old, &["webhooks"]),
    validate: |object| webhooks(object, None),
    validate_update: |new, old| webhooks(new, Some(old)),
    columns: &[NAME, integer("Webhooks"), AGE],
    row: |object, now| {
        vec![
            row::name(object),
            json!(list(object, "webhooks").len()),
            row::age(object, now),
        ]
    },
    allow_unconditional_update: false,
    update_again: Again::Object,
    qualified_finalizers: false,
    ..BASE
};

pub static MUTATING_WEBHOOK_CONFIGURATION: Kind = Kind {
    kind: "MutatingWebhookConfiguration",
    default: |_, object| defaults(object, true),
    ..WEBHOOKS
};

pub static VALIDATING_WEBHOOK_CONFIGURATION: Kind = Kind {
    kind: "ValidatingWebhookConfiguration",
    default: |_, object| defaults(object, false),
    ..WEBHOOKS
};

fn defaults(object: &mut Value, mutating: bool) {
    walk::each(object, "webhooks[]", &mut |hook| {
        walk::pointer(hook, "failurePolicy", "Fail");
        walk::pointer(hook, "matchPolicy", "Equivalent");
        walk::pointer(hook, "namespaceSelector", json!({}));
        walk::pointer(hook, "objectSelector", json!({}));
        walk::pointer(hook, "timeoutSeconds", 10);
        if mutating {
            walk::pointer(hook, "reinvocationPolicy", "Never");
        }
        walk::each(hook, "rules[]", &mut |rule| walk::pointer(rule, "scope", "*"));
        walk::each(hook, "clientConfig.service", &mut |service| {
            walk::pointer(service, "port", 443)
        });
    });
}

/// What a configuration that was wrong before may stay wrong in.
struct Leniency {
    side_effects: bool,
    review_versions: bool,
    names: bool,
    conditions: bool,
}

impl Leniency {
    fn of(new: &Value, old: Option<&Value>) -> Self {
        let Some(old) = old else {
            return Leniency {
                side_effects: false,
                review_versions: false,
                names: false,
                conditions: false,
            };
        };
        let (hooks, before) = (list(new, "webhooks"), list(old, "webhooks"));
        let mut seen = BTreeSet::new();
        Leniency {
            side_effects: before
                .iter()
                .any(|hook| !NO_SIDE_EFFECTS.contains(&text(hook, "sideEffects"))),
            review_versions: before.iter().any(|hook| {
                let versions = list(hook, "admissionReviewVersions");
                !versions.is_empty()
                    && !versions
                        .iter()
                        .any(|v| REVIEW_VERSIONS.contains(&v.as_str().unwrap_or("")))
            }),
            names: before.iter().any(|hook| !seen.insert(text(hook, "name"))),
            conditions: hooks.len() == before.len()
                && hooks
                    .iter()
                    .zip(before)
                    .all(|(a, b)| same(at(a, "matchConditions"), at(b, "matchConditions"))),
        }
    }
}

fn webhooks(object: &Value, old: Option<&Value>) -> Vec<field::Error> {
    let lenient = Leniency::of(object, old);
    let mut errors = Errors::new();
    let root = Node::root(object);
    let hooks = root.field("webhooks");
    let mut seen = BTreeSet::new();
    for hook in hooks.items() {
        webhook(&hook, &lenient, &mut errors);
        review_versions(&hook.field("admissionReviewVersions"), &lenient, &mut errors);
        let name = hook.field("name");
        if !lenient.names && !name.is_empty() && !seen.insert(name.str()) {
            errors.duplicate(&name);
        }
    }
    errors.into_vec()
}

fn webhook(hook: &Node, lenient: &Leniency, errors: &mut Errors) {
    fully_qualified(&hook.field("name"), errors);
    let rules = hook.field("rules");
    for rule in rules.items() {
        rule_with_operations(&rule, errors);
    }
    errors.one_of_if_set(&hook.field("failurePolicy"), &["Fail", "Ignore"]);
    errors.one_of_if_set(&hook.field("matchPolicy"), &["Equivalent", "Exact"]);
    let effects = hook.field("sideEffects");
    let allowed: &[&str] = if lenient.side_effects {
        &SIDE_EFFECTS
    } else {
        &NO_SIDE_EFFECTS
    };
    if effects.is_set() {
        errors.one_of(&effects, allowed);
    } else {
        errors.required(&effects, format!("must specify one of {}", allowed.join(", ")));
    }
    let seconds = hook.field("timeoutSeconds");
    if seconds.int().is_some_and(|n| !(1..=30).contains(&n)) {
        errors.invalid(&seconds, "the timeout value must be between 1 and 30 seconds");
    }
    label_selector(&hook.field("namespaceSelector"), errors);
    label_selector(&hook.field("objectSelector"), errors);
    errors.one_of_if_set(&hook.field("reinvocationPolicy"), &["IfNeeded", "Never"]);
    client(&hook.field("clientConfig"), errors);
    if !lenient.conditions {
        match_conditions(&hook.field("matchConditions"), false, errors);
    }
}

fn fully_qualified(name: &Node, errors: &mut Errors) {
    if !errors.require(name) {
        return;
    }
    let complaints = names::dns1123_subdomain(name.str());
    if !complaints.is_empty() {
        errors.invalid(name, complaints.join(","));
    } else if name.str().split('.').count() < 3 {
        errors.invalid(
            name,
            "should be a domain with at least three segments separated by dots",
        );
    }
}

fn review_versions(versions: &Node, lenient: &Leniency, errors: &mut Errors) {
    let accepted = REVIEW_VERSIONS.join(", ");
    if versions.is_empty() {
        errors.required(versions, format!("must specify one of {accepted}"));
        return;
    }
    let mut seen = BTreeSet::new();
    for version in versions.items() {
        if !seen.insert(version.str()) {
            errors.invalid(&version, "duplicate version");
            continue;
        }
        errors.rule(&version, names::dns1035_label(version.str()));
    }
    if !lenient.review_versions && !REVIEW_VERSIONS.iter().any(|v| seen.contains(v)) {
        errors.invalid(versions, format!("must include at least one of {accepted}"));
    }
}

/// Where a webhook is.
fn client(config: &Node, errors: &mut Errors) {
    let (url, service) = (config.field("url"), config.field("service"));
    if url.is_set() == service.is_set() {
        errors.required(config, "exactly one of url or service is required");
    } else if url.is_set() {
        webhook_url(&url, errors);
    } else {
        webhook_service(&service, errors);
    }
}

/// An address of a webhook: https, a host, perhaps a path.
pub fn webhook_url(url: &Node, errors: &mut Errors) {
    const FORM: &str = "; desired format: https://host[/path]";
    let text = url.str();
    let mut unreadable = |why: &str| {
        let shown = field::quote(url.str());
        let message = format!("url must be a valid URL: parse {shown}: {why}{FORM}");
        errors.required(url, message);
    };
    let (text, fragment) = text.split_once('#').unwrap_or((text, ""));
    let (scheme, rest) = match text.split_once(':') {
        Some((scheme, rest))
            if scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) =>
        {
            (scheme.to_lowercase(), rest)
        }
        Some((before, _)) if !before.contains('/') => {
            let why = if before.is_empty() {
                "missing protocol scheme"
            } else {
                "first path segment in URL cannot contain colon"
            };
            return unreadable(why);
        }
        _ => (String::new(), text),
    };
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    if let Some(why) = super::url::problem(url.str(), rest, fragment) {
        return unreadable(&why);
    }
    let authority = rest
        .strip_prefix("//")
        .map_or("", |rest| rest.split('/').next().unwrap_or(""));
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    if scheme != "https" {
        errors.invalid_value(
            url,
            scheme,
            format!("'https' is the only allowed URL scheme{FORM}"),
        );
    }
    if host.is_empty() {
        errors.invalid_value(url, host, format!("host must be specified{FORM}"));
    }
    if let Some(user) = user {
        errors.invalid_value(url, user, "user information is not permitted in the URL");
    }
    if !fragment.is_empty() {
        errors.invalid_value(url, fragment, "fragments are not permitted in the URL");
    }
    if !query.is_empty() {
        errors.invalid_value(url, query, "query parameters are not permitted in the URL");
    }
}

/// A service that answers as a webhook.
pub fn webhook_service(service: &Node, errors: &mut Errors) {
    // COMPAT: upstream mixes up the two names.
    if service.field("namespace").is_empty() {
        errors.required(&service.field("name"), "");
    }
    if service.field("name").is_empty() {
        errors.required(&service.field("namespace"), "");
    }
    let port = service.field("port");
    let number = port.int().unwrap_or(0);
    if !(1..=65535).contains(&number) {
        errors.invalid_value(
            &port,
            number,
            "port is not valid: must be between 1 and 65535, inclusive",
        );
    }
    url_path(&service.field("path"), errors);
}

fn url_path(path: &Node, errors: &mut Errors) {
    let text = path.str();
    if text.is_empty() || text == "/" {
        return;
    }
    if text == "//" {
        errors.invalid(path, "segment[0] may not be empty");
        return;
    }
    if !text.starts_with('/') {
        errors.invalid(path, "must start with a '/'");
    }
    let rest = text.get(1..).unwrap_or("");
    for (i, step) in rest.strip_suffix('/').unwrap_or(rest).split('/').enumerate() {
        if step.is_empty() {
            errors.invalid(path, format!("segment[{i}] may not be empty"));
            continue;
        }
        for complaint in names::dns1123_subdomain(step) {
            errors.invalid(path, format!("segment[{i}]: {complaint}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: Value, expected: &[&str]) {
        let mut hook = json!({
            "name": "a.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "clientConfig": {"url": "https://example.com/x"},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        });
        for (name, value) in change.as_object().into_iter().flatten() {
            walk::put(&mut hook, name, value.clone());
        }
        let object = json!({"webhooks": [hook]});
        let found: Vec<String> = webhooks(&object, None).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected, "{change}");
    }

    #[test]
    fn hooks() {
        check(json!({}), &[]);
        check(
            json!({"name": "a.b"}),
            &[
                "webhooks[0].name: Invalid value: \"a.b\": should be a domain with at least three segments separated by dots",
            ],
        );
        check(
            json!({"sideEffects": null}),
            &["webhooks[0].sideEffects: Required value: must specify one of None, NoneOnDryRun"],
        );
        check(
            json!({"sideEffects": "Some"}),
            &[
                "webhooks[0].sideEffects: Unsupported value: \"Some\": supported values: \"None\", \"NoneOnDryRun\"",
            ],
        );
        check(
            json!({"admissionReviewVersions": ["v2", "v2"]}),
            &[
                "webhooks[0].admissionReviewVersions[1]: Invalid value: \"v2\": duplicate version",
                "webhooks[0].admissionReviewVersions: Invalid value: [\"v2\",\"v2\"]: must include at least one of v1, v1beta1",
            ],
        );
        check(
            json!({"clientConfig": {"url": "http://u@x?q#f"}}),
            &[
                "webhooks[0].clientConfig.url: Invalid value: \"http\": 'https' is the only allowed URL scheme; desired format: https://host[/path]",
                "webhooks[0].clientConfig.url: Invalid value: \"u\": user information is not permitted in the URL",
                "webhooks[0].clientConfig.url: Invalid value: \"f\": fragments are not permitted in the URL",
                "webhooks[0].clientConfig.url: Invalid value: \"q\": query parameters are not permitted in the URL",
            ],
        );
        check(
            json!({"clientConfig": {"service": {"name": "s", "port": 443, "path": "/a//b"}}}),
            &[
                "webhooks[0].clientConfig.service.name: Required value",
                "webhooks[0].clientConfig.service.path: Invalid value: \"/a//b\": segment[1] may not be empty",
            ],
        );
        check(
            json!({"rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*", "CREATE"], "resources": ["*/*", "pods/*", "pods/log"]}]}),
            &[
                "webhooks[0].rules[0].operations: Invalid value: [\"*\",\"CREATE\"]: if '*' is present, must not specify other operations",
                "webhooks[0].rules[0].resources[1]: Invalid value: \"pods/*\": if '*/*' is present, must not specify pods/*",
                "webhooks[0].rules[0].resources[2]: Invalid value: \"pods/log\": if 'pods/*' is present, must not specify pods/log",
                "webhooks[0].rules[0].resources: Invalid value: [\"*/*\",\"pods/*\",\"pods/log\"]: if '*/*' is present, must not specify other resources",
            ],
        );
    }

    #[test]
    fn what_was_wrong_may_stay() {
        let hook = json!({"name": "a.example.com", "sideEffects": "Some", "admissionReviewVersions": ["v9"],
            "clientConfig": {"url": "https://x"}, "matchConditions": [{"name": "", "expression": ""}]});
        let object = json!({"webhooks": [hook]});
        assert!(webhooks(&object, Some(&object)).is_empty());
        assert_eq!(webhooks(&object, None).len(), 4);
    }
}
