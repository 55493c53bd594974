//! The cleaner of legacy service-account tokens: a Secret that was made for an account automatically, and whose token
//! nobody used for a year, is first marked invalid, and deleted when nobody minded for another year.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::{Value, json};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use super::{ACCOUNT_NAME, ACCOUNT_TOKEN, ACCOUNT_UID, annotation};
use crate::{Context, Error};

const INTERVAL: Duration = Duration::from_secs(24 * 3600);
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const TRACKING: &str = "kube-apiserver-legacy-service-account-token-tracking";

fn is_date(text: &str) -> bool {
    text.parse::<jiff::civil::Date>().is_ok()
}

fn date(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d").to_string()
}

#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Keep,
    MarkInvalid(String),
    Delete,
}

/// What becomes of a Secret that an account names and no pod mounts.
fn plan(secret: &Secret, unused: SignedDuration, now: Timestamp) -> Plan {
    let Ok(limit) = now.checked_sub(unused) else {
        return Plan::Keep;
    };
    let meta = &secret.metadata;
    let label = |key: &str| {
        meta.labels
            .as_ref()
            .and_then(|labels| labels.get(key))
            .map(String::as_str)
    };
    let is_young = meta
        .creation_timestamp
        .as_ref()
        .is_none_or(|created| created.0 >= limit);
    if is_young || meta.deletion_timestamp.is_some() {
        return Plan::Keep;
    }
    let limit = date(limit);
    // A date that cannot be read may be a recent one.
    if label(LAST_USED).is_some_and(|used| !is_date(used) || used >= limit.as_str()) {
        return Plan::Keep;
    }
    match label(INVALID_SINCE) {
        Some(since) if is_date(since) && since < limit.as_str() => Plan::Delete,
        Some(since) if is_date(since) => Plan::Keep,
        _ => Plan::MarkInvalid(date(now)),
    }
}

/// Whether uses are recorded for long enough to know that a token was not used. The first day may be half a day.
fn is_tracked(since: Option<&str>, unused: SignedDuration, now: Timestamp) -> Result<bool, String> {
    let since = since.ok_or("configMap does not have since label")?;
    let day: jiff::civil::Date = since
        .parse()
        .map_err(|error| format!("error parsing trackedSince time: {error}"))?;
    let start = day
        .tomorrow()
        .and_then(|day| day.to_zoned(jiff::tz::TimeZone::UTC))
        .and_then(|start| start.timestamp().checked_add(unused))
        .map_err(|error| error.to_string())?;
    Ok(now >= start)
}

/// The names of all Secrets in a pod, wherever they are referred to.
fn secret_names(value: &Value, names: &mut HashSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let name = match key.as_str() {
                    "secretName" => value.as_str(),
                    "secret" | "secretRef" | "secretKeyRef" | "nodePublishSecretRef" => {
                        value["name"].as_str()
                    }
                    "imagePullSecrets" => {
                        let all = value.as_array().into_iter().flatten();
                        names.extend(all.filter_map(|one| one["name"].as_str()).map(str::to_owned));
                        None
                    }
                    _ => None,
                };
                names.extend(name.map(str::to_owned));
                secret_names(value, names);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| secret_names(value, names)),
        _ => {}
    }
}

struct Cleaner {
    context: Context,
    secrets: Informer<Secret>,
    accounts: Informer<ServiceAccount>,
    pods: Informer<Pod>,
}

pub(crate) async fn run(context: Context) {
    let field = format!("type={ACCOUNT_TOKEN}");
    let reconciler = Arc::new(Cleaner {
        secrets: context.informers.filtered(None, Some(&field)),
        accounts: context.informers.informer(),
        pods: context.informers.informer(),
        context: context.clone(),
    });
    // One key a namespace: its pods are looked through once for all of its Secrets.
    context
        .controller("legacy_service_account_token_cleaner", reconciler)
        .reads(|r| &r.secrets)
        .reads(|r| &r.accounts)
        .reads(|r| &r.pods)
        .every(INTERVAL, Cleaner::namespaces)
        .run()
        .await;
}

impl Cleaner {
    fn namespaces(&self) -> Vec<Key> {
        let secrets = self.secrets.list();
        let namespaces: HashSet<String> = secrets
            .iter()
            .filter_map(|secret| secret.metadata.namespace.clone())
            .collect();
        namespaces
            .into_iter()
            .map(|namespace| Key::new("", namespace))
            .collect()
    }

    fn is_automatic(&self, secret: &Secret) -> bool {
        let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
        let account = self.accounts.get(namespace, annotation(secret, ACCOUNT_NAME));
        account.is_some_and(|account| {
            let uid = annotation(secret, ACCOUNT_UID);
            let mut named = account.secrets.iter().flatten();
            (uid.is_empty() || account.metadata.uid.as_deref() == Some(uid))
                && named.any(|one| one.name == secret.metadata.name)
        })
    }

    fn mounted(&self, namespace: &str) -> HashSet<String> {
        let mut names = HashSet::new();
        for pod in self.pods.list_namespaced(namespace) {
            if let Ok(spec) = serde_json::to_value(&pod.spec) {
                secret_names(&spec, &mut names);
            }
        }
        names
    }

    async fn write(&self, secret: &Secret, plan: Plan) -> Result<(), Error> {
        let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), namespace);
        let outcome = match plan {
            Plan::Keep => return Ok(()),
            Plan::MarkInvalid(since) => {
                tracing::info!(
                    namespace,
                    name,
                    since,
                    "Mark the auto-generated service account token as invalid"
                );
                let patch =
                    json!({"metadata": {"uid": secret.metadata.uid, "labels": {INVALID_SINCE: since}}});
                let patched = api
                    .patch(name, &PatchParams::default(), &Patch::Merge(patch))
                    .await;
                patched.map(drop)
            }
            Plan::Delete => {
                tracing::info!(namespace, name, "Delete auto-generated service account token");
                let preconditions = Preconditions {
                    uid: None,
                    resource_version: secret.metadata.resource_version.clone(),
                };
                let params = DeleteParams::default().preconditions(preconditions);
                api.delete(name, &params).await.map(drop)
            }
        };
        match outcome {
            Err(error) if !error.is_conflict() && !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Reconcile for Cleaner {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let unused = SignedDuration::try_from(self.context.config.legacy_token_clean_up_period)
            .map_err(|error| Error::Other(error.to_string()))?;
        let now = Timestamp::now();
        let maps: Api<ConfigMap> = Api::namespaced(self.context.client.clone(), "kube-system");
        let map = maps.get(TRACKING).await?;
        let since = map.data.as_ref().and_then(|data| data.get("since"));
        if !is_tracked(since.map(String::as_str), unused, now).map_err(Error::Other)? {
            return Ok(Action::Done);
        }
        let mut mounted = None;
        for secret in self.secrets.list_namespaced(&key.name) {
            let plan = plan(&secret, unused, now);
            if plan == Plan::Keep || !self.is_automatic(&secret) {
                continue;
            }
            let mounted = mounted.get_or_insert_with(|| self.mounted(&key.name));
            if !secret
                .metadata
                .name
                .as_ref()
                .is_some_and(|name| mounted.contains(name))
            {
                self.write(&secret, plan).await?;
            }
        }
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: SignedDuration = SignedDuration::from_hours(365 * 24);

    #[test]
    fn a_year_unused_and_a_year_invalid() {
        let now: Timestamp = "2026-06-15T10:00:00Z".parse().unwrap();
        let check = |created: &str, labels: Value, expected: Plan| {
            let secret = json!({"metadata": {"name": "s", "creationTimestamp": created, "labels": labels}});
            assert_eq!(
                plan(&serde_json::from_value(secret).unwrap(), YEAR, now),
                expected,
                "{labels}"
            );
        };
        let (old, young) = ("2020-01-01T00:00:00Z", "2026-01-01T00:00:00Z");
        let mark = || Plan::MarkInvalid("2026-06-15".into());
        check(young, json!({}), Plan::Keep);
        check(old, json!({}), mark());
        check(old, json!({LAST_USED: "2025-06-16"}), Plan::Keep);
        check(old, json!({LAST_USED: "2025-06-14"}), mark());
        check(old, json!({LAST_USED: "yesterday"}), Plan::Keep);
        check(old, json!({INVALID_SINCE: "2025-06-14"}), Plan::Delete);
        check(old, json!({INVALID_SINCE: "2025-06-16"}), Plan::Keep);
        check(old, json!({INVALID_SINCE: "x"}), mark());
        check(
            old,
            json!({INVALID_SINCE: "2024-01-01", LAST_USED: "2026-06-01"}),
            Plan::Keep,
        );
    }

    #[test]
    fn tracking_must_be_old_enough() {
        let check = |since: Option<&str>, now: &str, expected: Option<bool>| {
            assert_eq!(is_tracked(since, YEAR, now.parse().unwrap()).ok(), expected);
        };
        check(Some("2025-01-01"), "2026-01-01T12:00:00Z", Some(false));
        check(Some("2025-01-01"), "2026-01-02T00:00:00Z", Some(true));
        check(Some("soon"), "2026-01-02T00:00:00Z", None);
        check(None, "2026-01-02T00:00:00Z", None);
    }

    #[test]
    fn all_secrets_of_a_pod() {
        let spec = json!({"imagePullSecrets": [{"name": "pull"}],
            "containers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}], "envFrom": [{"secretRef": {"name": "from"}}]}],
            "volumes": [{"secret": {"secretName": "volume"}}, {"projected": {"sources": [{"secret": {"name": "projected"}}]}},
                {"configMap": {"name": "other"}}]});
        let mut names = HashSet::new();
        secret_names(&spec, &mut names);
        let mut names: Vec<String> = names.into_iter().collect();
        names.sort();
        assert_eq!(names, ["from", "key", "projected", "pull", "volume"]);
    }
}
