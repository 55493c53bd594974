//! The file that says who authorizes: an AuthorizationConfiguration, with several webhooks if wanted, each with its
//! conditions. What is wrong with it is told in upstream's words.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use skiff_meta::field::quote;
use skiff_meta::names;
use thiserror::Error;

use super::matching::{self, Conditions};
use super::webhook::{AuthorizationWebhook, OnError, WebhookOptions};
use super::{Abac, Mode};

#[derive(Debug, Error)]
#[error("{0}")]
pub struct BadConfiguration(pub String);

/// The longest that a webhook may take.
const LONGEST: Duration = Duration::from_secs(30);
/// The types in the order in which they are told.
const TYPES: [&str; 6] = ["ABAC", "AlwaysAllow", "AlwaysDeny", "Node", "RBAC", "Webhook"];
const API_VERSIONS: [&str; 3] = [
    "apiserver.config.k8s.io/v1",
    "apiserver.config.k8s.io/v1beta1",
    "apiserver.config.k8s.io/v1alpha1",
];

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AuthorizationConfiguration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    authorizers: Vec<Authorizer>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Authorizer {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    name: String,
    webhook: Option<Webhook>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Webhook {
    #[serde(default, rename = "authorizedTTL")]
    authorized_ttl: Option<String>,
    cache_authorized_requests: Option<bool>,
    #[serde(default, rename = "unauthorizedTTL")]
    unauthorized_ttl: Option<String>,
    cache_unauthorized_requests: Option<bool>,
    timeout: Option<String>,
    #[serde(default)]
    subject_access_review_version: String,
    #[serde(default)]
    match_condition_subject_access_review_version: String,
    #[serde(default)]
    failure_policy: String,
    #[serde(default)]
    connection_info: ConnectionInfo,
    #[serde(default)]
    match_conditions: Vec<MatchCondition>,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ConnectionInfo {
    #[serde(rename = "type")]
    kind: String,
    kube_config_file: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MatchCondition {
    #[serde(default)]
    expression: String,
}

/// What is wrong, each with its place.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, path: &str, what: impl AsRef<str>) {
        self.0.push(format!("{path}: {}", what.as_ref()));
    }

    fn unsupported(&mut self, path: &str, value: &str, known: &[&str]) {
        let known: Vec<String> = known.iter().map(|name| quote(name)).collect();
        let (value, known) = (quote(value), known.join(", "));
        self.add(
            path,
            format!("Unsupported value: {value}: supported values: {known}"),
        );
    }

    fn end(self) -> Result<(), BadConfiguration> {
        match self.0.as_slice() {
            [] => Ok(()),
            [one] => Err(BadConfiguration(one.clone())),
            several => Err(BadConfiguration(format!("[{}]", several.join(", ")))),
        }
    }
}

impl AuthorizationConfiguration {
    /// Reads a file and makes the authorizers that it names. `abac` is the policy, if there is one.
    pub fn load(path: &Path, abac: Option<Arc<Abac>>) -> Result<Vec<Mode>, BadConfiguration> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| BadConfiguration(format!("{}: {error}", path.display())))?;
        AuthorizationConfiguration::parse(&text)?.modes(abac)
    }

    pub fn parse(text: &str) -> Result<AuthorizationConfiguration, BadConfiguration> {
        let bad = |why: String| {
            BadConfiguration(format!(
                "failed to load AuthorizationConfiguration from file: {why}"
            ))
        };
        if text.trim().is_empty() {
            return Err(bad("empty config data".to_owned()));
        }
        let config: AuthorizationConfiguration =
            serde_saphyr::from_str(text).map_err(|error| bad(error.to_string()))?;
        if config.kind != "AuthorizationConfiguration" || !API_VERSIONS.contains(&config.api_version.as_str())
        {
            let (kind, version) = (quote(&config.kind), quote(&config.api_version));
            return Err(bad(format!("no kind {kind} is registered for version {version}")));
        }
        Ok(config)
    }

    fn modes(&self, abac: Option<Arc<Abac>>) -> Result<Vec<Mode>, BadConfiguration> {
        let mut problems = Problems::default();
        let mut modes = Vec::new();
        if self.authorizers.is_empty() {
            problems.add(
                "authorizers",
                "Required value: at least one authorization mode must be defined",
            );
        }
        let (mut types, mut seen_names) = (Vec::new(), Vec::new());
        for (at, authorizer) in self.authorizers.iter().enumerate() {
            let path = format!("authorizers[{at}]");
            let (kind, name) = (authorizer.kind.as_str(), authorizer.name.as_str());
            if kind.is_empty() {
                problems.add(&format!("{path}.type"), "Required value");
                continue;
            }
            if !TYPES.contains(&kind) {
                problems.unsupported(&format!("{path}.type"), kind, &TYPES);
                continue;
            }
            if types.contains(&kind) && kind != "Webhook" {
                problems.add(
                    &format!("{path}.type"),
                    format!("Duplicate value: {}", quote(kind)),
                );
                continue;
            }
            types.push(kind);
            let of_name = format!("{path}.name");
            let wrong = names::dns1123_subdomain(name);
            if name.is_empty() {
                problems.add(&of_name, "Required value");
            } else if seen_names.contains(&name) {
                problems.add(&of_name, format!("Duplicate value: {}", quote(name)));
            } else if !wrong.is_empty() {
                let (name, wrong) = (quote(name), wrong.join(", "));
                problems.add(
                    &of_name,
                    format!("Invalid value: {name}: authorizer name is invalid: {wrong}"),
                );
            } else if kind != "Webhook" && name != kind.to_lowercase() {
                problems.0.push(format!(
                    "expected name {} for authorizer {kind} instead of {}",
                    kind.to_lowercase(),
                    name
                ));
            }
            seen_names.push(name);
            match (&authorizer.webhook, kind) {
                (None, "Webhook") => {
                    problems.add(
                        &format!("{path}.webhook"),
                        "Required value: required when type=Webhook",
                    );
                }
                (Some(webhook), "Webhook") => modes.extend(webhook.mode(&path, &mut problems)),
                (Some(_), _) => problems.add(
                    &format!("{path}.webhook"),
                    "Invalid value: \"non-null\": may only be specified when type=Webhook",
                ),
                (None, "Node") => modes.push(Mode::Node),
                (None, "RBAC") => modes.push(Mode::Rbac),
                (None, "AlwaysAllow") => modes.push(Mode::AlwaysAllow),
                (None, "AlwaysDeny") => modes.push(Mode::AlwaysDeny),
                (None, _) => match &abac {
                    Some(policy) => modes.push(Mode::Abac(policy.clone())),
                    None => problems.add(&format!("{path}.type"), "ABAC needs --authorization-policy-file"),
                },
            }
        }
        problems.end()?;
        Ok(modes)
    }
}

impl Webhook {
    fn mode(&self, path: &str, problems: &mut Problems) -> Option<Mode> {
        let before = problems.0.len();
        let timeout = self.duration(path, "timeout", &self.timeout, None, problems);
        if timeout.is_some_and(|timeout| timeout > LONGEST) {
            let shown = quote(self.timeout.as_deref().unwrap_or(""));
            problems.add(
                &format!("{path}.timeout"),
                format!("Invalid value: {shown}: must be > 0s and <= 30s"),
            );
        }
        let five_minutes = Some(Duration::from_secs(300));
        let half_minute = Some(Duration::from_secs(30));
        let authorized = self.duration(
            path,
            "authorizedTTL",
            &self.authorized_ttl,
            five_minutes,
            problems,
        );
        let unauthorized = self.duration(
            path,
            "unauthorizedTTL",
            &self.unauthorized_ttl,
            half_minute,
            problems,
        );
        let version = &self.subject_access_review_version;
        let required = |problems: &mut Problems, field: &str, known: &[&str], found: &str| {
            let path = format!("{path}.{field}");
            if found.is_empty() {
                problems.add(&path, "Required value");
            } else if !known.contains(&found) {
                problems.unsupported(&path, found, known);
            }
        };
        required(
            problems,
            "subjectAccessReviewVersion",
            &["v1", "v1beta1"],
            version,
        );
        match self.match_condition_subject_access_review_version.as_str() {
            "" if !self.match_conditions.is_empty() => problems.add(
                &format!("{path}.matchConditionSubjectAccessReviewVersion"),
                "Required value: required if match conditions are specified",
            ),
            "" | "v1" => {}
            other => problems.unsupported(
                &format!("{path}.matchConditionSubjectAccessReviewVersion"),
                other,
                &["v1"],
            ),
        }
        required(
            problems,
            "failurePolicy",
            &["NoOpinion", "Deny"],
            &self.failure_policy,
        );
        let file = self.file(path, problems);
        let conditions = self.conditions(path, problems);
        if problems.0.len() > before {
            return None;
        }
        let kept = |ttl: Option<Duration>, wanted: Option<bool>| match wanted {
            Some(false) => Duration::ZERO,
            _ => ttl.unwrap_or_default(),
        };
        let options = WebhookOptions {
            version: version.clone(),
            timeout: timeout?,
            authorized_ttl: kept(authorized, self.cache_authorized_requests),
            unauthorized_ttl: kept(unauthorized, self.cache_unauthorized_requests),
            on_error: match self.failure_policy.as_str() {
                "Deny" => OnError::Deny,
                _ => OnError::NoOpinion,
            },
        };
        match AuthorizationWebhook::with_conditions(Path::new(file?), options, conditions?) {
            Ok(webhook) => Some(Mode::Webhook(Arc::new(webhook))),
            Err(error) => {
                problems.add(
                    &format!("{path}.connectionInfo.kubeConfigFile"),
                    error.to_string(),
                );
                None
            }
        }
    }

    fn duration(
        &self,
        path: &str,
        field: &str,
        text: &Option<String>,
        default: Option<Duration>,
        problems: &mut Problems,
    ) -> Option<Duration> {
        let path = format!("{path}.{field}");
        let nanoseconds = match text {
            None => 0,
            Some(text) => match skiff_meta::duration::parse(text) {
                Ok(nanoseconds) => nanoseconds,
                Err(why) => {
                    problems.add(&path, why);
                    return None;
                }
            },
        };
        match u64::try_from(nanoseconds) {
            Ok(0) if default.is_none() => {
                problems.add(&path, "Required value");
                None
            }
            Ok(0) => default,
            Ok(nanoseconds) => Some(Duration::from_nanos(nanoseconds)),
            Err(_) => {
                let bound = if field == "timeout" {
                    "must be > 0s and <= 30s"
                } else {
                    "must be > 0s"
                };
                let shown = quote(text.as_deref().unwrap_or(""));
                problems.add(&path, format!("Invalid value: {shown}: {bound}"));
                None
            }
        }
    }

    fn file(&self, path: &str, problems: &mut Problems) -> Option<&str> {
        let of_type = format!("{path}.connectionInfo.type");
        let of_file = format!("{path}.connectionInfo.kubeConfigFile");
        match self.connection_info.kind.as_str() {
            "KubeConfigFile" => {}
            "" => {
                problems.add(&of_type, "Required value");
                return None;
            }
            "InClusterConfig" => {
                problems.add(&of_type, "InClusterConfig is not built: name a KubeConfigFile");
                return None;
            }
            other => {
                problems.unsupported(&of_type, other, &["InClusterConfig", "KubeConfigFile"]);
                return None;
            }
        }
        let file = self.connection_info.kube_config_file.as_deref().unwrap_or("");
        let shown = quote(file);
        if file.is_empty() {
            problems.add(&of_file, "Required value");
        } else if !Path::new(file).is_absolute() {
            problems.add(
                &of_file,
                format!("Invalid value: {shown}: must be an absolute path"),
            );
        } else {
            return Some(file);
        }
        None
    }

    fn conditions(&self, path: &str, problems: &mut Problems) -> Option<Conditions> {
        let of = format!("{path}.matchConditions");
        if self.match_conditions.len() > matching::MOST {
            let (count, most) = (self.match_conditions.len(), matching::MOST);
            problems.add(&of, format!("Too many: {count}: must have at most {most} items"));
            return None;
        }
        let expressions: Vec<String> = self
            .match_conditions
            .iter()
            .map(|condition| condition.expression.clone())
            .collect();
        match Conditions::compile(&expressions) {
            Ok(conditions) => Some(conditions),
            Err((at, why)) => {
                problems.add(&format!("{of}[{at}].expression"), why);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modes(text: &str) -> Result<String, String> {
        let head = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\n";
        let config = AuthorizationConfiguration::parse(&format!("{head}{text}"));
        let modes = config
            .and_then(|config| config.modes(None))
            .map_err(|error| error.0)?;
        let names = modes.iter().map(|mode| match mode {
            Mode::Node => "node",
            Mode::Rbac => "rbac",
            Mode::Webhook(_) => "webhook",
            _ => "other",
        });
        Ok(names.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn files_are_read_as_upstream_does() {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        let config = "clusters: [{name: c, cluster: {server: 'http://localhost:1/'}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x\n";
        std::fs::write(&kubeconfig, config).unwrap();
        let webhook = |more: &str| {
            format!(
                "authorizers:\n- {{type: Node, name: node}}\n- type: Webhook\n  name: w\n  webhook:\n    timeout: 3s\n    subjectAccessReviewVersion: v1\n    failurePolicy: Deny\n    connectionInfo: {{type: KubeConfigFile, kubeConfigFile: {}}}\n{more}",
                kubeconfig.display()
            )
        };
        assert_eq!(modes(&webhook("")).as_deref(), Ok("node webhook"));
        let conditions = "    matchConditionSubjectAccessReviewVersion: v1\n    matchConditions: [{expression: request.user == 'a'}]\n- {type: RBAC, name: rbac}\n";
        assert_eq!(modes(&webhook(conditions)).as_deref(), Ok("node webhook rbac"));
        let check = |text: &str, expected: &str| assert_eq!(modes(text).unwrap_err(), expected);
        check(
            "",
            "authorizers: Required value: at least one authorization mode must be defined",
        );
        check(
            "authorizers: [{type: Foo, name: foo}]",
            "authorizers[0].type: Unsupported value: \"Foo\": supported values: \"ABAC\", \"AlwaysAllow\", \"AlwaysDeny\", \"Node\", \"RBAC\", \"Webhook\"",
        );
        check(
            "authorizers: [{type: Node, name: node}, {type: Node, name: node}]",
            "authorizers[1].type: Duplicate value: \"Node\"",
        );
        check(
            "authorizers: [{type: Webhook, name: w}]",
            "authorizers[0].webhook: Required value: required when type=Webhook",
        );
        check(
            &webhook("    matchConditions: [{expression: 'true'}]\n"),
            "authorizers[1].matchConditionSubjectAccessReviewVersion: Required value: required if match conditions are specified",
        );
        check(
            &webhook("").replace("3s", "31s"),
            "authorizers[1].timeout: Invalid value: \"31s\": must be > 0s and <= 30s",
        );
        check(
            &webhook("").replace("Deny", "Fail"),
            "authorizers[1].failurePolicy: Unsupported value: \"Fail\": supported values: \"NoOpinion\", \"Deny\"",
        );
        assert!(
            modes("authorizers: []\nfoo: 1")
                .unwrap_err()
                .starts_with("failed to load")
        );
    }
}
