//! ServiceAccount: every pod runs as a service account that exists, with its token mounted.

use std::time::Duration;

use async_trait::async_trait;
use rand::RngExt;
use serde_json::{Value, json};
use skiff_api::node::{at, list, text};
use skiff_api::walk;
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const VOLUME_PREFIX: &str = "kube-api-access-";
/// Seven seconds more than the hour that clients may ask for: the issuer tells such tokens by it.
const TOKEN_SECONDS: i64 = 3607;
/// The letters of generated names, without those that could spell something.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const ENFORCE: &str = "kubernetes.io/enforce-mountable-secrets";

pub struct ServiceAccount {
    /// How long a pod waits for the `default` account of a namespace that has just been made.
    patience: Duration,
    interval: Duration,
}

impl Default for ServiceAccount {
    fn default() -> Self {
        ServiceAccount {
            patience: Duration::from_secs(1),
            interval: Duration::from_millis(20),
        }
    }
}

impl ServiceAccount {
    async fn account(&self, a: &Attributes<'_>, lister: &dyn Lister, name: &str) -> Result<Value, Status> {
        if let Some(account) = lister.get("", "serviceaccounts", a.namespace, name).await? {
            return Ok(account);
        }
        let mut waited = Duration::ZERO;
        loop {
            if let Some(account) = lister
                .get_latest("", "serviceaccounts", a.namespace, name)
                .await?
            {
                return Ok(account);
            }
            // A new namespace gets its default account from a controller, a moment after its birth.
            if name != "default" || waited >= self.patience {
                let namespace = a.namespace;
                let complaints = skiff_meta::names::path_segment(name, false);
                if !complaints.is_empty() {
                    return Err(a.forbidden(format_args!(
                        "error looking up service account {namespace}/{name}: invalid resource name \"{name}\": [{}]",
                        complaints.join(" ")
                    )));
                }
                return Err(a.forbidden(format_args!(
                    "error looking up service account {namespace}/{name}: serviceaccount {} not found",
                    skiff_meta::field::quote(name)
                )));
            }
            tokio::time::sleep(self.interval).await;
            waited += self.interval;
        }
    }

    async fn check(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let Some(pod) = a.object.as_deref() else {
            return Ok(());
        };
        if a.is_mirror_pod() {
            return mirror_pod(a, pod);
        }
        let name = text(pod, "spec.serviceAccountName");
        if name.is_empty() {
            let pod = text(pod, "metadata.name");
            return Err(a.forbidden(format_args!(
                "no service account specified for pod {}/{pod}",
                a.namespace
            )));
        }
        let account = self.account(a, lister, name).await?;
        let enforced = at(&account, "metadata.annotations")
            .get(ENFORCE)
            .and_then(Value::as_str);
        if enforced.is_some_and(|v| ["1", "t", "T", "true", "TRUE", "True"].contains(&v)) {
            limit_secrets(&account, pod).map_err(|why| a.forbidden(why))?;
        }
        Ok(())
    }
}

#[async_trait]
impl Plugin for ServiceAccount {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !a.is("", "pods") || a.object.is_none() {
            return Ok(());
        }
        if a.is_mirror_pod() {
            return self.check(a, lister).await;
        }
        let name = match a.text("spec.serviceAccountName") {
            "" => "default".to_owned(),
            name => name.to_owned(),
        };
        let account = self.account(a, lister, &name).await?;
        let Some(spec) = a.object.as_deref_mut().and_then(|o| walk::object(o, "spec")) else {
            return Ok(());
        };
        walk::put(spec, "serviceAccountName", json!(name));
        walk::put(spec, "serviceAccount", json!(name));
        let automount = at(spec, "automountServiceAccountToken")
            .as_bool()
            .or_else(|| at(&account, "automountServiceAccountToken").as_bool())
            .unwrap_or(true);
        if automount {
            mount_token(spec);
        }
        let secrets = list(&account, "imagePullSecrets");
        if list(spec, "imagePullSecrets").is_empty() && !secrets.is_empty() {
            let names: Vec<Value> = secrets.iter().map(|s| json!({"name": text(s, "name")})).collect();
            walk::put(spec, "imagePullSecrets", Value::Array(names));
        }
        Ok(())
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if a.is("", "pods") {
            self.check(a, lister).await
        } else {
            Ok(())
        }
    }
}

fn mirror_pod(a: &Attributes<'_>, pod: &Value) -> Result<(), Status> {
    if !text(pod, "spec.serviceAccountName").is_empty() {
        return Err(a.forbidden("a mirror pod may not reference service accounts"));
    }
    let volumes = list(pod, "spec.volumes");
    let env_secret = |c: &Value| {
        list(c, "env")
            .iter()
            .any(|e| !at(e, "valueFrom.secretKeyRef").is_null())
            || list(c, "envFrom").iter().any(|e| !at(e, "secretRef").is_null())
    };
    let secrets = volumes.iter().any(|v| !at(v, "secret").is_null())
        || list(pod, "spec.containers")
            .iter()
            .chain(list(pod, "spec.initContainers"))
            .any(env_secret)
        || !list(pod, "spec.imagePullSecrets").is_empty();
    if secrets {
        return Err(a.forbidden("a mirror pod may not reference secrets"));
    }
    let token = |v: &Value| {
        list(v, "projected.sources")
            .iter()
            .any(|s| !at(s, "serviceAccountToken").is_null())
    };
    if volumes.iter().any(token) {
        return Err(a.forbidden("a mirror pod may not use ServiceAccountToken volume projections"));
    }
    Ok(())
}

/// Only the secrets that the account itself names.
fn limit_secrets(account: &Value, pod: &Value) -> Result<(), String> {
    let owner = text(account, "metadata.name");
    let known = |name: &str| list(account, "secrets").iter().any(|s| text(s, "name") == name);
    for volume in list(pod, "spec.volumes") {
        let name = text(volume, "secret.secretName");
        if !name.is_empty() && !known(name) {
            return Err(format!(
                "volume with secret.secretName=\"{name}\" is not allowed because service account {owner} does not reference that secret"
            ));
        }
    }
    for (field, word) in [
        ("spec.initContainers", "init container"),
        ("spec.containers", "container"),
    ] {
        for container in list(pod, field) {
            let this = text(container, "name");
            for env in list(container, "env") {
                let name = text(env, "valueFrom.secretKeyRef.name");
                if !name.is_empty() && !known(name) {
                    let var = text(env, "name");
                    return Err(format!(
                        "{word} {this} with envVar {var} referencing secret.secretName=\"{name}\" is not allowed because service account {owner} does not reference that secret"
                    ));
                }
            }
            for env in list(container, "envFrom") {
                let name = text(env, "secretRef.name");
                if !name.is_empty() && !known(name) {
                    return Err(format!(
                        "{word} {this} with envFrom referencing secret.secretName=\"{name}\" is not allowed because service account {owner} does not reference that secret"
                    ));
                }
            }
        }
    }
    for (i, secret) in list(pod, "spec.imagePullSecrets").iter().enumerate() {
        let name = text(secret, "name");
        if !list(account, "imagePullSecrets")
            .iter()
            .any(|s| text(s, "name") == name)
        {
            return Err(format!(
                "imagePullSecrets[{i}].name=\"{name}\" is not allowed because service account {owner} does not reference that imagePullSecret"
            ));
        }
    }
    Ok(())
}

fn mount_token(spec: &mut Value) {
    let existing = list(spec, "volumes")
        .iter()
        .map(|v| text(v, "name"))
        .find(|name| name.starts_with(VOLUME_PREFIX))
        .map(str::to_owned);
    let has_volume = existing.is_some();
    let name = existing.unwrap_or_else(|| format!("{VOLUME_PREFIX}{}", suffix()));
    let mut mounted = false;
    for field in ["initContainers[]", "containers[]"] {
        walk::each(spec, field, &mut |container| {
            if list(container, "volumeMounts")
                .iter()
                .any(|m| text(m, "mountPath") == MOUNT_PATH)
            {
                return;
            }
            push(
                container,
                "volumeMounts",
                json!({"name": name, "readOnly": true, "mountPath": MOUNT_PATH}),
            );
            mounted = true;
        });
    }
    if mounted && !has_volume {
        push(
            spec,
            "volumes",
            json!({"name": name, "projected": token_volume()}),
        );
    }
}

fn push(object: &mut Value, field: &str, value: Value) {
    walk::pointer(object, field, json!([]));
    if let Some(Value::Array(list)) = object.get_mut(field) {
        list.push(value);
    }
}

fn suffix() -> String {
    let mut rng = rand::rng();
    (0..5)
        .map(|_| ALPHABET[rng.random_range(0..ALPHABET.len())] as char)
        .collect()
}

/// Token, CA certificate and namespace, as pods find them.
fn token_volume() -> Value {
    json!({
        "defaultMode": 0o644,
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [
                {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
            ]}}
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::{Objects, create};

    fn plugin() -> ServiceAccount {
        ServiceAccount {
            patience: Duration::ZERO,
            interval: Duration::ZERO,
        }
    }

    fn account() -> Objects {
        Objects(vec![(
            "serviceaccounts",
            json!({"metadata": {"name": "default", "namespace": "ns"}, "imagePullSecrets": [{"name": "s"}]}),
        )])
    }

    #[tokio::test]
    async fn a_plain_pod_gets_account_and_token() {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}});
        plugin()
            .admit(&mut create("", "pods", "Pod", &mut pod), &account())
            .await
            .unwrap();
        let volume = pod["spec"]["volumes"][0]["name"].as_str().unwrap().to_owned();
        assert!(
            volume.starts_with("kube-api-access-") && volume.len() == 21,
            "{volume}"
        );
        assert_eq!(
            pod["spec"],
            json!({
                "serviceAccountName": "default", "serviceAccount": "default", "imagePullSecrets": [{"name": "s"}],
                "containers": [{"name": "c", "volumeMounts": [{"name": volume, "readOnly": true,
                    "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]}],
                "volumes": [{"name": volume, "projected": token_volume()}]
            })
        );
    }

    #[tokio::test]
    async fn no_token_where_none_is_wanted() {
        let mut pod = json!({"spec": {"containers": [{"name": "c"}], "automountServiceAccountToken": false}});
        plugin()
            .admit(&mut create("", "pods", "Pod", &mut pod), &account())
            .await
            .unwrap();
        assert_eq!(pod["spec"].get("volumes"), None);
    }

    #[tokio::test]
    async fn a_missing_account_is_refused() {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"serviceAccountName": "x"}});
        let error = plugin()
            .admit(&mut create("", "pods", "Pod", &mut pod), &Objects::default())
            .await
            .unwrap_err();
        assert_eq!(
            error.message,
            "pods \"p\" is forbidden: error looking up service account ns/x: serviceaccount \"x\" not found"
        );
        assert_eq!(error.code, 403);
    }
}
