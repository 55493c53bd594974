//! Which requests are recorded, and how much of them: the audit policy of a file. Pure.

use serde::Deserialize;
use skiff_auth::{Attributes, UserInfo};
use skiff_meta::{field, names};

/// How much of a request is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Level {
    #[default]
    None,
    Metadata,
    Request,
    RequestResponse,
}

impl Level {
    pub fn as_str(self) -> &'static str {
        match self {
            Level::None => "None",
            Level::Metadata => "Metadata",
            Level::Request => "Request",
            Level::RequestResponse => "RequestResponse",
        }
    }

    fn read(text: &str) -> Option<Level> {
        [
            Level::None,
            Level::Metadata,
            Level::Request,
            Level::RequestResponse,
        ]
        .into_iter()
        .find(|level| level.as_str() == text)
    }
}

/// When in the life of a request something is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    RequestReceived,
    ResponseStarted,
    ResponseComplete,
    Panic,
}

impl Stage {
    const ALL: [Stage; 4] = [
        Stage::RequestReceived,
        Stage::ResponseStarted,
        Stage::ResponseComplete,
        Stage::Panic,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Stage::RequestReceived => "RequestReceived",
            Stage::ResponseStarted => "ResponseStarted",
            Stage::ResponseComplete => "ResponseComplete",
            Stage::Panic => "Panic",
        }
    }
}

/// What the policy says about one request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decided {
    pub level: Level,
    pub omit_stages: Vec<Stage>,
    pub omit_managed_fields: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct File {
    api_version: String,
    kind: String,
    rules: Vec<RuleText>,
    omit_stages: Vec<String>,
    omit_managed_fields: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RuleText {
    level: String,
    users: Vec<String>,
    user_groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<GroupResources>,
    namespaces: Vec<String>,
    #[serde(rename = "nonResourceURLs")]
    non_resource_urls: Vec<String>,
    omit_stages: Vec<String>,
    omit_managed_fields: Option<bool>,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct GroupResources {
    group: String,
    resources: Vec<String>,
    resource_names: Vec<String>,
}

#[derive(Debug)]
struct Rule {
    decided: Decided,
    users: Vec<String>,
    user_groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<GroupResources>,
    namespaces: Vec<String>,
    non_resource_urls: Vec<String>,
}

#[derive(Debug)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// Reads a policy from YAML or JSON.
    pub fn parse(text: &str) -> Result<Policy, String> {
        let file: File = serde_saphyr::from_str(text).map_err(|error| format!("failed decoding: {error}"))?;
        if file.api_version != "audit.k8s.io/v1" || file.kind != "Policy" {
            return Err(format!(
                "unknown group version field {}, Kind={} in policy",
                file.api_version, file.kind
            ));
        }
        let mut errors = Vec::new();
        let root = field::Path::new("omitStages");
        let everywhere = stages(&file.omit_stages, &root, &mut errors);
        let rules: Vec<Rule> = file
            .rules
            .into_iter()
            .enumerate()
            .map(|(index, rule)| {
                let path = field::Path::new("rules").index(index);
                rule.read(&path, &everywhere, file.omit_managed_fields, &mut errors)
            })
            .collect();
        match errors.as_slice() {
            [] => {}
            [one] => return Err(one.to_string()),
            all => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                return Err(format!("[{}]", all.join(", ")));
            }
        }
        if rules.is_empty() {
            return Err("loaded illegal policy with 0 rules".to_owned());
        }
        Ok(Policy { rules })
    }

    /// The first rule that matches decides; without one nothing is recorded.
    pub fn decide(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Option<&Decided> {
        let rule = self.rules.iter().find(|rule| rule.matches(user, attributes))?;
        (rule.decided.level != Level::None).then_some(&rule.decided)
    }
}

fn stages(texts: &[String], path: &field::Path, errors: &mut Vec<field::Error>) -> Vec<Stage> {
    let mut read = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        match Stage::ALL.into_iter().find(|stage| stage.as_str() == text) {
            Some(stage) => read.push(stage),
            None => errors.push(field::Error::invalid(
                &path.index(index),
                text.as_str(),
                "allowed stages are RequestReceived,ResponseStarted,ResponseComplete,Panic",
            )),
        }
    }
    read
}

impl RuleText {
    fn read(
        self,
        path: &field::Path,
        everywhere: &[Stage],
        omit_managed_fields: bool,
        errors: &mut Vec<field::Error>,
    ) -> Rule {
        let level_path = path.child("level");
        let level = match (self.level.as_str(), Level::read(&self.level)) {
            (_, Some(level)) => level,
            ("", None) => {
                errors.push(field::Error::required(&level_path, ""));
                Level::None
            }
            (text, None) => {
                let known = ["None", "Metadata", "Request", "RequestResponse"];
                errors.push(field::Error::not_supported(&level_path, text, &known));
                Level::None
            }
        };
        let urls_path = path.child("nonResourceURLs");
        for (index, url) in self.non_resource_urls.iter().enumerate() {
            let mut complain =
                |why: &str| errors.push(field::Error::invalid(&urls_path.index(index), url.as_str(), why));
            if url == "*" {
                continue;
            }
            if !url.starts_with('/') {
                complain("non-resource URL rules must begin with a '/' character");
            }
            if url.trim_end_matches('*').contains('*') || url.ends_with("**") {
                complain("non-resource URL wildcards '*' must be the final character of the rule");
            }
        }
        let resources_path = path.child("resources");
        for resources in &self.resources {
            if !matches!(resources.group.as_str(), "" | "*") {
                let complaints = names::dns1123_subdomain(&resources.group);
                if !complaints.is_empty() {
                    let path = resources_path.child("group");
                    let why = complaints.join(",");
                    errors.push(field::Error::invalid(&path, resources.group.as_str(), why));
                }
            }
            if !resources.resource_names.is_empty() && resources.resources.is_empty() {
                errors.push(field::Error::invalid(
                    &resources_path.child("resourceNames"),
                    resources.resource_names.clone(),
                    "using resourceNames requires at least one resource",
                ));
            }
        }
        let mut omit_stages = stages(&self.omit_stages, &path.child("omitStages"), errors);
        omit_stages.extend_from_slice(everywhere);
        let of_resources = !self.resources.is_empty() || !self.namespaces.is_empty();
        if of_resources && !self.non_resource_urls.is_empty() {
            errors.push(field::Error::invalid(
                &urls_path,
                self.non_resource_urls.clone(),
                "rules cannot apply to both regular resources and non-resource URLs",
            ));
        }
        Rule {
            decided: Decided {
                level,
                omit_stages,
                omit_managed_fields: self.omit_managed_fields.unwrap_or(omit_managed_fields),
            },
            users: self.users,
            user_groups: self.user_groups,
            verbs: self.verbs,
            resources: self.resources,
            namespaces: self.namespaces,
            non_resource_urls: self.non_resource_urls,
        }
    }
}

fn has(list: &[String], text: &str) -> bool {
    list.iter().any(|known| known == text)
}

impl Rule {
    fn matches(&self, user: &UserInfo, a: &Attributes<'_>) -> bool {
        if !self.users.is_empty() && !has(&self.users, &user.name) {
            return false;
        }
        if !self.user_groups.is_empty() && !user.groups.iter().any(|group| has(&self.user_groups, group)) {
            return false;
        }
        if !self.verbs.is_empty() && !has(&self.verbs, a.verb) {
            return false;
        }
        if !self.namespaces.is_empty() || !self.resources.is_empty() {
            return a.is_resource
                && (self.namespaces.is_empty() || has(&self.namespaces, a.namespace))
                && (self.resources.is_empty() || self.resources.iter().any(|group| group.matches(a)));
        }
        if !self.non_resource_urls.is_empty() {
            let matches = |spec: &String| {
                spec == a.path
                    || spec
                        .strip_suffix('*')
                        .is_some_and(|prefix| a.path.starts_with(prefix))
            };
            return !a.is_resource && self.non_resource_urls.iter().any(matches);
        }
        true
    }
}

impl GroupResources {
    fn matches(&self, a: &Attributes<'_>) -> bool {
        if self.group != a.group && self.group != "*" {
            return false;
        }
        if self.resources.is_empty() {
            return true;
        }
        if !self.resource_names.is_empty() && !has(&self.resource_names, a.name) {
            return false;
        }
        self.resources.iter().any(|text| match text.split_once('/') {
            None => text == "*" || (a.subresource.is_empty() && text == a.resource),
            Some(("*", subresource)) => !a.subresource.is_empty() && subresource == a.subresource,
            Some((resource, "*")) => resource == a.resource,
            Some((resource, subresource)) => resource == a.resource && subresource == a.subresource,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- level: None
  nonResourceURLs: ['/healthz*', '/version']
- level: None
  users: ['system:kube-proxy']
  verbs: [watch]
- level: Request
  userGroups: [dev]
  resources:
  - group: ''
    resources: [pods, 'pods/log', '*/scale', 'nodes/*']
  - group: apps
- level: RequestResponse
  namespaces: [kube-system]
  resources: [{group: '*', resources: [configmaps], resourceNames: [one]}]
  omitManagedFields: false
  omitStages: [Panic]
- level: Metadata
  resources: [{group: ''}]
";

    fn level(user: &str, verb: &str, what: &str) -> &'static str {
        let policy = Policy::parse(POLICY).unwrap();
        let user = UserInfo::new(user, ["dev"]);
        let decided = if let Some(path) = what.strip_prefix('/') {
            let path = format!("/{path}");
            let attributes = Attributes {
                verb,
                path: &path,
                ..Attributes::default()
            };
            policy.decide(&user, &attributes).cloned()
        } else {
            let words: Vec<&str> = what.split(' ').collect();
            let at = |index: usize| words.get(index).copied().unwrap_or("");
            let (resource, subresource) = at(1).split_once('/').unwrap_or((at(1), ""));
            let attributes = Attributes {
                verb,
                is_resource: true,
                group: if at(0) == "core" { "" } else { at(0) },
                resource,
                subresource,
                namespace: at(2),
                name: at(3),
                ..Attributes::default()
            };
            policy.decide(&user, &attributes).cloned()
        };
        decided.unwrap_or_default().level.as_str()
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        assert_eq!(level("a", "get", "/healthz/ping"), "None");
        assert_eq!(level("a", "get", "/version"), "None");
        assert_eq!(level("system:kube-proxy", "watch", "core services"), "None");
        assert_eq!(level("a", "get", "core pods x"), "Request");
        assert_eq!(level("a", "get", "core pods/log x"), "Request");
        assert_eq!(level("a", "get", "core pods/exec x"), "Metadata");
        assert_eq!(level("a", "get", "core things/scale x"), "Request");
        assert_eq!(level("a", "get", "core nodes/proxy x"), "Request");
        assert_eq!(level("a", "get", "core nodes x"), "Request");
        assert_eq!(level("a", "get", "apps deployments/scale x"), "Request");
        assert_eq!(
            level("a", "get", "core configmaps kube-system one"),
            "RequestResponse"
        );
        assert_eq!(level("a", "get", "core configmaps kube-system two"), "Metadata");
        assert_eq!(level("a", "get", "batch jobs x"), "None");
        assert_eq!(level("a", "get", "/apis"), "None");
    }

    #[test]
    fn a_rule_says_what_is_left_out() {
        let policy = Policy::parse(POLICY).unwrap();
        let rule = &policy.rules[3].decided;
        assert_eq!(rule.omit_stages, [Stage::Panic, Stage::RequestReceived]);
        assert!(!rule.omit_managed_fields && policy.rules[4].decided.omit_managed_fields);
    }

    #[test]
    fn a_policy_that_makes_no_sense_is_refused() {
        let check = |rules: &str, expected: &str| {
            let text = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n{rules}");
            assert_eq!(Policy::parse(&text).unwrap_err(), expected);
        };
        check("  []", "loaded illegal policy with 0 rules");
        check("- {}", "rules[0].level: Required value");
        check(
            "- {level: All}",
            "rules[0].level: Unsupported value: \"All\": supported values: \"None\", \"Metadata\", \"Request\", \"RequestResponse\"",
        );
        check(
            "- {level: None, omitStages: [x]}",
            "rules[0].omitStages[0]: Invalid value: \"x\": allowed stages are RequestReceived,ResponseStarted,ResponseComplete,Panic",
        );
        check(
            "- {level: None, nonResourceURLs: [/a*b]}",
            "rules[0].nonResourceURLs[0]: Invalid value: \"/a*b\": non-resource URL wildcards '*' must be the final character of the rule",
        );
        assert_eq!(
            Policy::parse("kind: Policy\nrules: []").unwrap_err(),
            "unknown group version field , Kind=Policy in policy"
        );
        assert!(Policy::parse(": [").is_err());
    }
}
