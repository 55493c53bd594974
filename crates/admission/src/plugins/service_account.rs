//! ServiceAccount: every pod runs as a service account that exists, with its token mounted.

use std::time::Duration;

use async_trait::async_trait;
use rand::RngExt;
use serde_json::{Value, json};
use skiff_api::core::references;
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

    /// The account that a pod runs as, which must exist.
    async fn named(&self, a: &Attributes<'_>, lister: &dyn Lister, pod: &Value) -> Result<Value, Status> {
        let name = text(pod, "spec.serviceAccountName");
        if name.is_empty() {
            let pod = text(pod, "metadata.name");
            return Err(a.forbidden(format_args!(
                "no service account specified for pod {}/{pod}",
                a.namespace
            )));
        }
        self.account(a, lister, name).await
    }
}

#[async_trait]
impl Plugin for ServiceAccount {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    fn concerns(&self, a: &Attributes<'_>) -> bool {
        match a.operation {
            Operation::Create => a.is("", "pods"),
            _ => a.subresource == "ephemeralcontainers" && a.resource == "pods" && a.group.is_empty(),
        }
    }

    async fn admit(&self, a: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if a.operation != Operation::Create {
            return Ok(());
        }
        if a.is_mirror_pod() {
            return mirror_pod(a);
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
        match a.object.as_deref() {
            Some(pod) => limit_secrets(&account, pod).map_err(|why| a.forbidden(why)),
            None => Ok(()),
        }
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        let Some(pod) = a.object.as_deref() else {
            return Ok(());
        };
        if a.operation == Operation::Create {
            if a.is_mirror_pod() {
                return mirror_pod(a);
            }
            let account = self.named(a, lister, pod).await?;
            return limit_secrets(&account, pod).map_err(|why| a.forbidden(why));
        }
        let account = self.named(a, lister, pod).await?;
        if !enforced(&account) {
            return Ok(());
        }
        // COMPAT: upstream wraps this refusal in no status, so it goes out as a 500 without a reason.
        limit_environments(&account, pod, "spec.ephemeralContainers", "ephemeral container")
            .map_err(|why| Status::failure(500, "", why))
    }
}

fn mirror_pod(a: &Attributes<'_>) -> Result<(), Status> {
    let Some(pod) = a.object.as_deref() else {
        return Ok(());
    };
    if !text(pod, "spec.serviceAccountName").is_empty() {
        return Err(a.forbidden("a mirror pod may not reference service accounts"));
    }
    if !references::secrets(pod).is_empty() {
        return Err(a.forbidden("a mirror pod may not reference secrets"));
    }
    let token = |v: &Value| {
        list(v, "projected.sources")
            .iter()
            .any(|s| !at(s, "serviceAccountToken").is_null())
    };
    if list(pod, "spec.volumes").iter().any(token) {
        return Err(a.forbidden("a mirror pod may not use ServiceAccountToken volume projections"));
    }
    Ok(())
}

/// Whether the pods of an account may use its own secrets only.
fn enforced(account: &Value) -> bool {
    let wanted = at(account, "metadata.annotations")
        .get(ENFORCE)
        .and_then(Value::as_str);
    wanted.is_some_and(|v| ["1", "t", "T", "true", "TRUE", "True"].contains(&v))
}

fn names(account: &Value, field: &str, name: &str) -> bool {
    list(account, field).iter().any(|s| text(s, "name") == name)
}

/// Where that is enforced: only the secrets that the account itself names. `api::core::references` finds more (those of
/// projections and drivers), about which upstream does not complain here, and has no words for where they stand.
fn limit_secrets(account: &Value, pod: &Value) -> Result<(), String> {
    if !enforced(account) {
        return Ok(());
    }
    let owner = text(account, "metadata.name");
    for secret in list(pod, "spec.volumes").iter().map(|v| at(v, "secret")) {
        let name = text(secret, "secretName");
        if !secret.is_null() && !names(account, "secrets", name) {
            return Err(format!(
                "volume with secret.secretName=\"{name}\" is not allowed because service account {owner} does not reference that secret"
            ));
        }
    }
    limit_environments(account, pod, "spec.initContainers", "init container")?;
    limit_environments(account, pod, "spec.containers", "container")?;
    for (i, secret) in list(pod, "spec.imagePullSecrets").iter().enumerate() {
        let name = text(secret, "name");
        if !names(account, "imagePullSecrets", name) {
            return Err(format!(
                "imagePullSecrets[{i}].name=\"{name}\" is not allowed because service account {owner} does not reference that imagePullSecret"
            ));
        }
    }
    Ok(())
}

fn limit_environments(account: &Value, pod: &Value, containers: &str, word: &str) -> Result<(), String> {
    let refused =
        |reference: &Value| !reference.is_null() && !names(account, "secrets", text(reference, "name"));
    let why = |container: &Value, by: &str, reference: &Value| {
        let (this, name, owner) = (
            text(container, "name"),
            text(reference, "name"),
            text(account, "metadata.name"),
        );
        format!(
            "{word} {this} with {by} referencing secret.secretName=\"{name}\" is not allowed because service account {owner} does not reference that secret"
        )
    };
    for container in list(pod, containers) {
        for variable in list(container, "env") {
            let reference = at(variable, "valueFrom.secretKeyRef");
            if refused(reference) {
                let by = format!("envVar {}", text(variable, "name"));
                return Err(why(container, &by, reference));
            }
        }
        for from in list(container, "envFrom") {
            let reference = at(from, "secretRef");
            if refused(reference) {
                return Err(why(container, "envFrom", reference));
            }
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

    /// An account whose pods may use the secret `ok` only, and pull with `pull` only.
    fn strict() -> Objects {
        Objects(vec![(
            "serviceaccounts",
            json!({"metadata": {"name": "default", "namespace": "ns", "annotations": {ENFORCE: "true"}},
                "secrets": [{"name": "ok"}], "imagePullSecrets": [{"name": "pull"}]}),
        )])
    }

    async fn refusal(objects: &Objects, mut pod: Value, phase: &str) -> Option<(String, u16)> {
        let mut attributes = create("", "pods", "Pod", &mut pod);
        let result = match phase {
            "admit" => plugin().admit(&mut attributes, objects).await,
            "validate" => plugin().validate(&attributes, objects).await,
            _ => {
                attributes.operation = Operation::Update;
                attributes.subresource = "ephemeralcontainers";
                assert!(plugin().handles(Operation::Update) && plugin().concerns(&attributes));
                plugin().validate(&attributes, objects).await
            }
        };
        result
            .err()
            .map(|status| (status.message.clone(), status.http_code()))
    }

    #[tokio::test]
    async fn only_the_secrets_of_the_account_are_used_where_that_is_enforced() {
        let check = async |part: Value, expected: &str| {
            let mut pod = json!({"metadata": {"name": "p"}, "spec": {"serviceAccountName": "default",
                "containers": [{"name": "c", "volumeMounts": [{"mountPath": MOUNT_PATH}]}], "imagePullSecrets": [{"name": "pull"}]}});
            for (key, value) in part.as_object().unwrap() {
                pod["spec"][key] = value.clone();
            }
            for phase in ["admit", "validate"] {
                let found = refusal(&strict(), pod.clone(), phase).await;
                let expected =
                    (!expected.is_empty()).then(|| (format!("pods \"p\" is forbidden: {expected}"), 403));
                assert_eq!(found, expected, "{phase} {pod}");
                assert_eq!(refusal(&account(), pod.clone(), phase).await, None);
            }
        };
        let tail = "is not allowed because service account default does not reference that secret";
        let with = |what: Value| json!({"containers": [{"name": "c", "env": [what]}]});
        check(json!({}), "").await;
        check(json!({"volumes": [{"name": "v", "secret": {"secretName": "ok"}}, {"name": "w", "emptyDir": {}}]}), "").await;
        check(
            json!({"volumes": [{"name": "v", "secret": {"secretName": "no"}}]}),
            &format!("volume with secret.secretName=\"no\" {tail}"),
        )
        .await;
        check(
            with(json!({"name": "E", "valueFrom": {"secretKeyRef": {"name": "ok"}}})),
            "",
        )
        .await;
        check(with(json!({"name": "E", "value": "x"})), "").await;
        check(
            with(json!({"name": "E", "valueFrom": {"secretKeyRef": {"name": ""}}})),
            &format!("container c with envVar E referencing secret.secretName=\"\" {tail}"),
        )
        .await;
        check(
            json!({"initContainers": [{"name": "i", "envFrom": [{"configMapRef": {}}, {"secretRef": {"name": "no"}}]}]}),
            &format!("init container i with envFrom referencing secret.secretName=\"no\" {tail}"),
        )
        .await;
        check(
            json!({"imagePullSecrets": [{"name": "pull"}, {"name": "ok"}]}),
            "imagePullSecrets[1].name=\"ok\" is not allowed because service account default does not reference that imagePullSecret",
        )
        .await;
    }

    #[tokio::test]
    async fn ephemeral_containers_use_the_secrets_of_the_account_too() {
        let pod = |name: &str| {
            json!({"metadata": {"name": "p"}, "spec": {"serviceAccountName": "default",
                "containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "before"}}]}],
                "ephemeralContainers": [{"name": "e", "envFrom": [{"secretRef": {"name": name}}]}]}})
        };
        let why = "ephemeral container e with envFrom referencing secret.secretName=\"no\" is not allowed because service account default does not reference that secret";
        let phase = "ephemeralcontainers";
        assert_eq!(
            refusal(&strict(), pod("no"), phase).await,
            Some((why.to_owned(), 500))
        );
        assert_eq!(refusal(&strict(), pod("ok"), phase).await, None);
        assert_eq!(refusal(&account(), pod("no"), phase).await, None);
        let gone = "pods \"p\" is forbidden: error looking up service account ns/default: serviceaccount \"default\" not found";
        assert_eq!(
            refusal(&Objects::default(), pod("ok"), phase).await,
            Some((gone.to_owned(), 403))
        );
    }

    #[tokio::test]
    async fn a_mirror_pod_has_no_account_and_no_secrets() {
        let check = async |spec: Value, expected: &str| {
            let annotations = json!({"kubernetes.io/config.mirror": "x"});
            let pod = json!({"metadata": {"name": "m", "annotations": annotations}, "spec": spec});
            for phase in ["admit", "validate"] {
                let found = refusal(&strict(), pod.clone(), phase).await;
                let expected = (!expected.is_empty()).then(|| {
                    (
                        format!("pods \"m\" is forbidden: a mirror pod may not {expected}"),
                        403,
                    )
                });
                assert_eq!(found, expected, "{phase} {pod}");
            }
        };
        let volume = |source: Value| json!({"volumes": [{"name": "v", "projected": {"sources": [source]}}]});
        check(json!({"imagePullSecrets": [{}]}), "").await;
        check(json!({"serviceAccountName": "x"}), "reference service accounts").await;
        check(volume(json!({"secret": {"name": "s"}})), "reference secrets").await;
        check(volume(json!({"configMap": {"name": "s"}})), "").await;
        check(
            volume(json!({"serviceAccountToken": {"path": "t"}})),
            "use ServiceAccountToken volume projections",
        )
        .await;
    }

    #[tokio::test]
    async fn an_account_may_want_no_token_and_a_container_may_have_its_own() {
        let lister = Objects(vec![(
            "serviceaccounts",
            json!({"metadata": {"name": "default", "namespace": "ns"}, "automountServiceAccountToken": false}),
        )]);
        let admitted = async |mut pod: Value, lister: &Objects| {
            let mut a = create("", "pods", "Pod", &mut pod);
            plugin().admit(&mut a, lister).await.unwrap();
            pod
        };
        let pod = json!({"spec": {"containers": [{"name": "c"}]}});
        assert_eq!(admitted(pod.clone(), &lister).await["spec"].get("volumes"), None);
        let mut wants = pod;
        wants["spec"]["automountServiceAccountToken"] = json!(true);
        assert!(admitted(wants, &lister).await["spec"].get("volumes").is_some());
        let mounts = json!([{"name": "own", "mountPath": MOUNT_PATH}]);
        let own = json!({"spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}});
        let own = admitted(own, &account()).await;
        assert_eq!(own["spec"]["containers"][0]["volumeMounts"], mounts);
        assert_eq!(own["spec"].get("volumes"), None);
    }
}
