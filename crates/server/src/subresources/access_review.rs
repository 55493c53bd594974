//! The SubjectAccessReview family: may someone do something? Answered by the server's own authorizer.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_api::authorization;
use skiff_auth::{Attributes, Mode, UserInfo};
use skiff_meta::selector::{FieldSelector, LabelSelector};
use skiff_meta::{GroupKind, Status, names};
use skiff_registry::{Resource, object};

use super::{gvk_of, read_body};
use crate::body::{Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::respond;
use crate::server::Inner;

pub async fn create(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let (mut review, options) = read_body(exchange, &gvk_of(resource), body).await?;
    if resource.kind != "SelfSubjectRulesReview" {
        skiff_registry::ensure_namespace(resource, &exchange.info.namespace, &mut review)?;
        super::attribute(inner, exchange, resource, &options, &mut review);
    }
    Admission::new(inner, exchange, resource, Some(&options.value))
        .action(&mut review)
        .await?;
    let status = match resource.kind.as_str() {
        "SelfSubjectRulesReview" => rules(inner, exchange, &review)?,
        kind => decide(inner, exchange, &review, kind).await?,
    };
    object::put(&mut review, &["status"], status);
    super::show_metadata(&mut review);
    if resource.kind == "SelfSubjectRulesReview" {
        // COMPAT: the answer forgets what was asked.
        object::put(&mut review, &["spec"], json!({}));
    }
    respond::raw(exchange, &exchange.output(false)?, StatusCode::CREATED, &review)
}

async fn decide(inner: &Inner, exchange: &Exchange, review: &Value, kind: &str) -> Result<Value, Status> {
    let spec = review.get("spec").cloned().unwrap_or_else(|| json!({}));
    let resource = spec.get("resourceAttributes").filter(|value| value.is_object());
    let path = spec
        .get("nonResourceAttributes")
        .filter(|value| value.is_object());
    let own;
    let user = if kind == "SelfSubjectAccessReview" {
        &*exchange.user
    } else {
        own = subject(&spec);
        &own
    };
    let errors = authorization::validate(review, kind, &exchange.info.namespace);
    if !errors.is_empty() {
        // COMPAT: reviews are refused without their kind.
        return Err(Status::invalid(
            &GroupKind::new("authorization.k8s.io", ""),
            "",
            &errors,
        ));
    }
    let text = |value: Option<&Value>, field: &str| {
        value
            .and_then(|value| value.get(field))
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_string()
    };
    let mut namespace = text(resource, "namespace");
    if kind == "LocalSubjectAccessReview" {
        namespace.clone_from(&exchange.info.namespace);
    }
    let given = resource.or(path);
    let asked = Attributes {
        verb: &text(given, "verb"),
        is_resource: resource.is_some(),
        group: &text(resource, "group"),
        version: &text(resource, "version"),
        resource: &text(resource, "resource"),
        subresource: &text(resource, "subresource"),
        namespace: &namespace,
        name: &text(resource, "name"),
        path: &text(path, "path"),
        field_selector: &field_selector(resource),
        label_selector: &label_selector(resource),
    }
    .to_owned();
    let decision = inner.authorizer.decide(user, &asked.view(), true).await;
    let mut status = json!({"allowed": decision.allowed});
    if decision.denied {
        status["denied"] = json!(true);
    }
    if !decision.reason.is_empty() {
        status["reason"] = json!(decision.reason);
    }
    let mut ignored = resource.map(ignored_selectors).unwrap_or_default();
    ignored.splice(0..0, decision.error);
    if !ignored.is_empty() {
        status["evaluationError"] = json!(ignored.join("; "));
    }
    Ok(status)
}

/// The field selector of a review as a list would have it; what is no plain equality is left out, which allows less.
fn field_selector(resource: Option<&Value>) -> String {
    let Some(selector) = resource.and_then(|resource| resource.get("fieldSelector")) else {
        return String::new();
    };
    let raw = object::at_str(selector, &["rawSelector"]);
    if !raw.is_empty() {
        return raw.to_string();
    }
    let requirements = object::at(selector, &["requirements"]).and_then(Value::as_array);
    let terms = requirements.into_iter().flatten().filter_map(|requirement| {
        let values = requirement.get("values")?.as_array()?;
        let [value] = values.as_slice() else { return None };
        let equal = object::at_str(requirement, &["operator"]) == "In";
        let key = object::at_str(requirement, &["key"]);
        equal.then(|| {
            format!(
                "{key}={}",
                skiff_meta::selector::escape(value.as_str().unwrap_or(""))
            )
        })
    });
    terms.collect::<Vec<_>>().join(",")
}

/// The label selector of a review as a list would have it; what cannot be read is left out, which allows less.
fn label_selector(resource: Option<&Value>) -> String {
    let Some(selector) = resource.and_then(|resource| resource.get("labelSelector")) else {
        return String::new();
    };
    let raw = object::at_str(selector, &["rawSelector"]);
    if !raw.is_empty() {
        return raw.to_string();
    }
    let requirements = object::at(selector, &["requirements"]).and_then(Value::as_array);
    let readable = requirements.into_iter().flatten().filter(|one| reads_label(one));
    let terms = readable.map(|requirement| {
        let key = object::at_str(requirement, &["key"]);
        let values = values_of(requirement).join(",");
        match object::at_str(requirement, &["operator"]) {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "Exists" => key.to_owned(),
            _ => format!("!{key}"),
        }
    });
    terms.collect::<Vec<_>>().join(",")
}

/// The name of a selector, and whether it can be read as a text and as a requirement.
type Selector = (&'static str, fn(&str) -> bool, fn(&Value) -> bool);

/// What is said of selectors that cannot be read: without them, more is asked for.
fn ignored_selectors(resource: &Value) -> Vec<String> {
    let mut told = Vec::new();
    let selectors: [Selector; 2] = [
        (
            "fieldSelector",
            |raw| FieldSelector::parse(raw).is_ok(),
            reads_field,
        ),
        (
            "labelSelector",
            |raw| LabelSelector::parse(raw).is_ok(),
            reads_label,
        ),
    ];
    for (name, reads_raw, reads) in selectors {
        let raw = object::at_str(resource, &[name, "rawSelector"]);
        let requirements = object::at(resource, &[name, "requirements"])
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let good = requirements
            .iter()
            .filter(|requirement| reads(requirement))
            .count();
        if good < requirements.len() || (requirements.is_empty() && !raw.is_empty() && !reads_raw(raw)) {
            let partially = if good > 0 { "partially " } else { "" };
            told.push(format!(
                "spec.resourceAttributes.{name} {partially}ignored due to parse error"
            ));
        }
    }
    told
}

fn values_of(requirement: &Value) -> Vec<&str> {
    let values = requirement.get("values").and_then(Value::as_array);
    values.into_iter().flatten().filter_map(Value::as_str).collect()
}

fn reads_field(requirement: &Value) -> bool {
    let operator = object::at_str(requirement, &["operator"]);
    matches!(operator, "In" | "NotIn") && values_of(requirement).len() == 1
}

fn reads_label(requirement: &Value) -> bool {
    let values = values_of(requirement);
    let fits = match object::at_str(requirement, &["operator"]) {
        "In" | "NotIn" => !values.is_empty(),
        "Exists" | "DoesNotExist" => values.is_empty(),
        _ => false,
    };
    fits && names::qualified_name(object::at_str(requirement, &["key"])).is_empty()
        && values.iter().all(|value| names::label_value(value).is_empty())
}

fn subject(spec: &Value) -> UserInfo {
    let text = |field: &str| spec.get(field).and_then(Value::as_str).unwrap_or("").to_string();
    let list = |value: Option<&Value>| -> Vec<String> {
        value
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|v| v.as_str().map(str::to_string))
            .collect()
    };
    UserInfo {
        name: text("user"),
        uid: text("uid"),
        groups: list(spec.get("groups")),
        extra: spec
            .get("extra")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .map(|(key, value)| (key.clone(), list(Some(value))))
            .collect(),
    }
}

/// What the caller may do in a namespace: `kubectl auth can-i --list`.
fn rules(inner: &Inner, exchange: &Exchange, review: &Value) -> Result<Value, Status> {
    let namespace = object::at_str(review, &["spec", "namespace"]);
    if namespace.is_empty() {
        return Err(Status::bad_request("no namespace on request"));
    }
    let mut resource_rules = Vec::new();
    let mut path_rules = Vec::new();
    let modes = inner.authorizer.modes();
    let by_rbac = modes.iter().any(|mode| matches!(mode, Mode::Rbac));
    let found = by_rbac.then(|| inner.authorizer.rbac.rules_for(&exchange.user, namespace));
    for rule in found.into_iter().flatten() {
        if rule.non_resource_urls.is_empty() {
            let mut value =
                json!({"verbs": rule.verbs, "apiGroups": rule.api_groups, "resources": rule.resources});
            if !rule.resource_names.is_empty() {
                value["resourceNames"] = json!(rule.resource_names);
            }
            resource_rules.push(value);
        } else {
            path_rules.push(json!({"verbs": rule.verbs, "nonResourceURLs": rule.non_resource_urls}));
        }
    }
    let mut untold = Vec::new();
    for mode in modes.iter() {
        match mode {
            Mode::Node if skiff_auth::node::node_name(&exchange.user).is_some() => untold.push("node"),
            Mode::Webhook(_) => untold.push("webhook"),
            Mode::Abac(_) => untold.push("ABAC"),
            Mode::AlwaysAllow => {
                resource_rules.push(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
                path_rules.push(json!({"verbs": ["*"], "nonResourceURLs": ["*"]}));
            }
            _ => {}
        }
    }
    untold.dedup();
    let mut status = json!({"resourceRules": resource_rules, "nonResourceRules": path_rules, "incomplete": !untold.is_empty()});
    let untold: Vec<String> = untold
        .iter()
        .map(|who| format!("{who} authorizer does not support user rule resolution"))
        .collect();
    match untold.as_slice() {
        [] => {}
        [one] => status["evaluationError"] = json!(one),
        several => status["evaluationError"] = json!(format!("[{}]", several.join(", "))),
    }
    Ok(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_that_cannot_be_read_are_told() {
        let check = |resource: Value, expected: &[&str]| {
            assert_eq!(ignored_selectors(&resource), expected, "{resource}");
        };
        let good = json!({"key": "a", "operator": "In", "values": ["b"]});
        let bad = json!({"key": "a", "operator": "Foo"});
        check(json!({"labelSelector": {"requirements": [good]}}), &[]);
        check(
            json!({"labelSelector": {"requirements": [bad]}, "fieldSelector": {"requirements": [good, bad]}}),
            &[
                "spec.resourceAttributes.fieldSelector partially ignored due to parse error",
                "spec.resourceAttributes.labelSelector ignored due to parse error",
            ],
        );
        check(
            json!({"labelSelector": {"rawSelector": "a in ("}}),
            &["spec.resourceAttributes.labelSelector ignored due to parse error"],
        );
    }
}
