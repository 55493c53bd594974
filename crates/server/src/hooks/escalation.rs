//! Nobody may grant what they do not hold: checked on every write of a role or a role binding, unless
//! the user has the verb `escalate` on the role, or `bind` on the role that a binding names.

use serde_json::Value;
use skiff_auth::{Attributes, Rule, UserInfo, missing_rules};
use skiff_meta::{Status, field};
use skiff_registry::{ReadAt, Resource, object};

use crate::server::Inner;

const GROUP: &str = "rbac.authorization.k8s.io";

/// Checks a write of `new` over `old`. Other kinds pass.
pub async fn check(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    namespace: &str,
    new: &Value,
    old: Option<&Value>,
) -> Result<(), Status> {
    if resource.facts.group != GROUP || user.in_group(skiff_auth::MASTERS_GROUP) {
        return Ok(());
    }
    if old.is_some_and(|old| grants_the_same(new, old)) {
        return Ok(());
    }
    let name = object::name(new);
    if matches!(resource.facts.plural, "roles" | "clusterroles") {
        if allowed(inner, user, "escalate", resource.facts.plural, namespace, name).await {
            return Ok(());
        }
        let aggregates = |role: &Value| object::at(role, &["aggregationRule"]).is_some();
        confirm(inner, user, resource, namespace, name, &rules_of(new))?;
        if aggregates(new) || old.is_some_and(aggregates) {
            let all = |resources: bool| Rule {
                verbs: vec!["*".into()],
                api_groups: if resources { vec!["*".into()] } else { Vec::new() },
                resources: if resources { vec!["*".into()] } else { Vec::new() },
                non_resource_urls: if resources { Vec::new() } else { vec!["*".into()] },
                ..Rule::default()
            };
            let held = inner.authorizer.rbac.rules_for(user, namespace);
            if !missing_rules(&held, &[all(true), all(false)]).is_empty() {
                let why = "must have cluster-admin privileges to use the aggregationRule";
                return Err(Status::forbidden(&resource.group_resource, name, why));
            }
        }
        return Ok(());
    }
    let reference = |field: &str| object::at_str(new, &["roleRef", field]);
    let (plural, role_namespace) = match reference("kind") {
        "Role" => ("roles", namespace),
        "ClusterRole" => ("clusterroles", ""),
        other => {
            let text = format!("unsupported role reference kind: {}", field::quote(other));
            return Err(Status::failure(500, "", text));
        }
    };
    if allowed(inner, user, "bind", plural, namespace, reference("name")).await {
        return Ok(());
    }
    let Some(roles) = inner.registry.resources.get(GROUP, "v1", plural) else {
        return Ok(());
    };
    let role = inner
        .registry
        .get(roles, role_namespace, reference("name"), ReadAt::Latest)
        .await?;
    // COMPAT: upstream names the resource of the request.
    let role = role.ok_or_else(|| Status::not_found(&resource.group_resource, reference("name")))?;
    confirm(inner, user, resource, namespace, name, &rules_of(&role))
}

async fn allowed(
    inner: &Inner,
    user: &UserInfo,
    verb: &str,
    plural: &str,
    namespace: &str,
    name: &str,
) -> bool {
    let attributes = Attributes {
        verb,
        is_resource: true,
        group: GROUP,
        version: "v1",
        resource: plural,
        namespace,
        name,
        ..Attributes::default()
    };
    inner.authorizer.decide(user, &attributes, false).await.allowed
}

fn confirm(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    namespace: &str,
    name: &str,
    wanted: &[Rule],
) -> Result<(), Status> {
    let missing = missing_rules(&inner.authorizer.rbac.rules_for(user, namespace), wanted);
    if missing.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<String> = compact(missing).iter().map(describe).collect();
    lines.sort();
    lines.dedup();
    let groups: Vec<String> = user.groups.iter().map(|group| field::quote(group)).collect();
    let why = format!(
        "user {} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
        field::quote(&user.name),
        groups.join(" "),
        lines.join("\n")
    );
    Err(Status::forbidden(&resource.group_resource, name, why))
}

fn rules_of(role: &Value) -> Vec<Rule> {
    role.get("rules")
        .and_then(|rules| serde_json::from_value(rules.clone()).ok())
        .unwrap_or_default()
}

/// Joins rules that differ in their verb only.
fn compact(rules: Vec<Rule>) -> Vec<Rule> {
    let mut out: Vec<Rule> = Vec::new();
    for rule in rules {
        let same = |other: &&mut Rule| {
            other.api_groups == rule.api_groups
                && other.resources == rule.resources
                && other.resource_names == rule.resource_names
                && other.non_resource_urls == rule.non_resource_urls
        };
        match out.iter_mut().find(same) {
            Some(other) => other.verbs.extend(rule.verbs),
            None => out.push(rule),
        }
    }
    out
}

/// A rule in upstream's short form: `{APIGroups:[""], Resources:["pods"], Verbs:["get"]}`.
fn describe(rule: &Rule) -> String {
    let mut parts = Vec::new();
    let lists = [
        ("APIGroups", &rule.api_groups),
        ("Resources", &rule.resources),
        ("NonResourceURLs", &rule.non_resource_urls),
        ("ResourceNames", &rule.resource_names),
        ("Verbs", &rule.verbs),
    ];
    for (name, list) in lists {
        if !list.is_empty() {
            let quoted: Vec<String> = list.iter().map(|text| field::quote(text)).collect();
            parts.push(format!("{name}:[{}]", quoted.join(" ")));
        }
    }
    format!("{{{}}}", parts.join(", "))
}

/// Whether at most owner references and finalizers differ: the garbage collector may release any role, and the storage
/// version migrator may write it again.
fn grants_the_same(new: &Value, old: &Value) -> bool {
    let strip = |value: &Value| {
        let mut value = value.clone();
        let metadata = object::metadata_mut(&mut value);
        for field in [
            "ownerReferences",
            "finalizers",
            "resourceVersion",
            "managedFields",
        ] {
            metadata.remove(field);
        }
        value
    };
    strip(new) == strip(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_described_as_upstream_does() {
        let rule = |verb: &str| Rule {
            verbs: vec![verb.into()],
            api_groups: vec![String::new()],
            resources: vec!["pods".into()],
            ..Rule::default()
        };
        let lines: Vec<String> = compact(vec![rule("get"), rule("list")])
            .iter()
            .map(describe)
            .collect();
        assert_eq!(
            lines,
            [r#"{APIGroups:[""], Resources:["pods"], Verbs:["get" "list"]}"#]
        );
    }
}
