//! One RBAC policy rule, and whether it allows a request.

use crate::Attributes;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rule {
    pub verbs: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub api_groups: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resource_names: Vec<String>,
    #[serde(rename = "nonResourceURLs", skip_serializing_if = "Vec::is_empty")]
    pub non_resource_urls: Vec<String>,
}

fn listed(list: &[String], wanted: &str) -> bool {
    list.iter().any(|item| item == "*" || item == wanted)
}

impl Rule {
    pub fn allows(&self, wanted: &Attributes<'_>) -> bool {
        if !listed(&self.verbs, wanted.verb) {
            return false;
        }
        if !wanted.is_resource {
            return self
                .non_resource_urls
                .iter()
                .any(|url| url_matches(url, wanted.path));
        }
        listed(&self.api_groups, wanted.group)
            && self
                .resources
                .iter()
                .any(|r| resource_matches(r, wanted.resource, wanted.subresource))
            && (self.resource_names.is_empty() || self.resource_names.iter().any(|n| n == wanted.name))
    }
}

/// `*` is everything, `pods/log` one subresource, `*/scale` a subresource of anything.
fn resource_matches(pattern: &str, resource: &str, subresource: &str) -> bool {
    match pattern.split_once('/') {
        _ if pattern == "*" => true,
        Some(("*", sub)) => !subresource.is_empty() && sub == subresource,
        Some((base, sub)) => base == resource && sub == subresource,
        None => subresource.is_empty() && pattern == resource,
    }
}

/// A trailing `*` matches any rest.
pub(crate) fn url_matches(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => pattern == path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_match_as_upstream() {
        let rule = |resources: &[&str], names: &[&str]| Rule {
            verbs: vec!["get".into()],
            api_groups: vec![String::new()],
            resources: resources.iter().map(|r| (*r).to_owned()).collect(),
            resource_names: names.iter().map(|r| (*r).to_owned()).collect(),
            non_resource_urls: vec![],
        };
        let get = |resource, subresource, name| Attributes {
            verb: "get",
            is_resource: true,
            resource,
            subresource,
            name,
            ..Attributes::default()
        };
        for (rule, wanted, expected) in [
            (rule(&["pods"], &[]), get("pods", "", "a"), true),
            (rule(&["pods"], &[]), get("pods", "log", "a"), false),
            (rule(&["pods/log"], &[]), get("pods", "log", "a"), true),
            (rule(&["*/scale"], &[]), get("deployments", "scale", "a"), true),
            (rule(&["*/scale"], &[]), get("deployments", "", "a"), false),
            (rule(&["*"], &[]), get("pods", "log", "a"), true),
            (rule(&["pods"], &["b"]), get("pods", "", "a"), false),
            (rule(&["pods"], &["a"]), get("pods", "", "a"), true),
        ] {
            assert_eq!(rule.allows(&wanted), expected, "{rule:?} {wanted:?}");
        }
        assert!(url_matches("/healthz/*", "/healthz/x") && !url_matches("/healthz", "/healthz/x"));
    }
}
