//! Attribute-based access control: a file with a policy a line. It is read at the start only.

use serde::Deserialize;
use thiserror::Error;

use super::Decision;
use crate::{AUTHENTICATED_GROUP, Attributes, UserInfo};

const API_VERSION: &str = "abac.authorization.kubernetes.io/v1beta1";

#[derive(Debug, Error)]
#[error("line {line}: {why}")]
pub struct BadPolicy {
    line: usize,
    why: String,
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "apiVersion", default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    spec: Policy,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Policy {
    user: String,
    group: String,
    readonly: bool,
    api_group: String,
    resource: String,
    namespace: String,
    non_resource_path: String,
}

#[derive(Debug)]
pub struct Abac(Vec<Policy>);

impl Abac {
    pub fn parse(text: &str) -> Result<Abac, BadPolicy> {
        let mut policies = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let trimmed = line.trim();
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue;
            }
            let bad = |why: String| BadPolicy { line: at + 1, why };
            let line: Line = serde_json::from_str(trimmed).map_err(|error| bad(error.to_string()))?;
            if (line.api_version.as_str(), line.kind.as_str()) != (API_VERSION, "Policy") {
                return Err(bad(format!("it is no Policy of {API_VERSION}")));
            }
            let mut policy = line.spec;
            // COMPAT: everybody is everybody who is known.
            if policy.user == "*" || policy.group == "*" {
                policy.user.clear();
                AUTHENTICATED_GROUP.clone_into(&mut policy.group);
            }
            policies.push(policy);
        }
        Ok(Abac(policies))
    }

    pub fn authorize(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        if self.0.iter().any(|policy| policy.allows(user, attributes)) {
            Decision::allow()
        } else {
            Decision::no_opinion("No policy matched.")
        }
    }
}

impl Policy {
    fn allows(&self, user: &UserInfo, a: &Attributes<'_>) -> bool {
        let is = |wanted: &str, found: &str| wanted == "*" || wanted == found;
        // A policy is for the user and the group that it names, and for nobody if it names none.
        let for_user = self.user.is_empty() || self.user == user.name;
        let for_group = self.group.is_empty() || user.in_group(&self.group);
        let named = !self.user.is_empty() || !self.group.is_empty();
        let reads = matches!(a.verb, "get" | "list" | "watch");
        if !(named && for_user && for_group && (reads || !self.readonly)) {
            return false;
        }
        if a.is_resource {
            return is(&self.namespace, a.namespace)
                && is(&self.resource, a.resource)
                && is(&self.api_group, a.group);
        }
        match self.non_resource_path.strip_suffix('*') {
            Some(start) => a.path.starts_with(start),
            None => self.non_resource_path == a.path,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_a_line() {
        let lines = [
            r#"{"user": "alice", "namespace": "*", "resource": "*", "apiGroup": "*"}"#,
            r#"{"group": "devs", "readonly": true, "namespace": "a", "resource": "pods", "apiGroup": ""}"#,
            r#"{"user": "bob", "group": "ops", "nonResourcePath": "/logs*"}"#,
            r#"{"namespace": "*", "resource": "*", "apiGroup": "*"}"#,
            r#"{"user": "*", "namespace": "shared", "resource": "*", "apiGroup": "*"}"#,
            r#"{"group": "*", "nonResourcePath": "/shared"}"#,
        ];
        let lines = lines
            .map(|spec| format!(r#"{{"apiVersion": "{API_VERSION}", "kind": "Policy", "spec": {spec}}}"#));
        let policy = Abac::parse(&format!("# of the house\n\n{}\n", lines.join("\n"))).unwrap();
        let check = |user: &str, groups: &[&str], verb: &str, what: &str, expected: bool| {
            let user = UserInfo::new(user, groups.iter().copied());
            let (namespace, resource) = what.split_once(':').unwrap_or(("", what));
            let attributes = Attributes {
                verb,
                is_resource: !what.starts_with('/'),
                namespace,
                resource,
                path: what,
                ..Attributes::default()
            };
            let decision = policy.authorize(&user, &attributes);
            assert_eq!(decision.allowed, expected, "{user:?} {verb} {what}");
        };
        check("alice", &[], "delete", "x:secrets", true);
        check("alice", &[], "get", "/logs", false);
        check("carl", &["devs"], "list", "a:pods", true);
        check("carl", &["devs"], "create", "a:pods", false);
        check("carl", &["devs"], "list", "b:pods", false);
        check("bob", &["ops"], "get", "/logs/x", true);
        check("bob", &[], "get", "/logs/x", false);
        check("dora", &[], "get", "a:pods", false);
        check("dora", &[], "get", "shared:pods", true);
        check("dora", &[], "get", "/shared", true);
        check(
            "system:anonymous",
            &["system:unauthenticated"],
            "get",
            "shared:pods",
            false,
        );
        check(
            "system:anonymous",
            &["system:unauthenticated"],
            "get",
            "/shared",
            false,
        );
        assert!(Abac::parse(r#"{"user": "alice"}"#).is_err());
        assert!(Abac::parse("nonsense").is_err());
    }
}
