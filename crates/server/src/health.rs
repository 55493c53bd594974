//! `/healthz`, `/livez`, `/readyz`: the checks, one by one or all at once, as upstream words them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::StatusCode;

use crate::body::{self, Answer, not_found};
use crate::chain::Exchange;
use crate::server::Inner;

/// The checks of each path. `etcd` stands for whichever store there is.
const ALIVE: [&str; 4] = ["ping", "log", "loopback-serving-certificate", "etcd"];
const READY: [&str; 5] = ["ping", "log", "etcd", "etcd-readiness", "informer-sync"];
/// What is done once at start. Monitors look for these names; here all of it is done before the first request.
const AT_START: [&str; 31] = [
    "poststarthook/start-apiserver-admission-initializer",
    "poststarthook/generic-apiserver-start-informers",
    "poststarthook/priority-and-fairness-config-consumer",
    "poststarthook/priority-and-fairness-filter",
    "poststarthook/storage-object-count-tracker-hook",
    "poststarthook/start-apiextensions-informers",
    "poststarthook/start-apiextensions-controllers",
    "poststarthook/crd-informer-synced",
    "poststarthook/start-system-namespaces-controller",
    "poststarthook/peer-endpoint-reconciler-controller",
    "poststarthook/start-cluster-authentication-info-controller",
    "poststarthook/start-kube-apiserver-identity-lease-controller",
    "poststarthook/start-kube-apiserver-identity-lease-garbage-collector",
    "poststarthook/storage-readiness",
    "poststarthook/start-legacy-token-tracking-controller",
    "poststarthook/start-service-ip-repair-controllers",
    "poststarthook/rbac/bootstrap-roles",
    "poststarthook/scheduling/bootstrap-system-priority-classes",
    "poststarthook/priority-and-fairness-config-producer",
    "poststarthook/bootstrap-controller",
    "poststarthook/start-kubernetes-service-cidr-controller",
    "poststarthook/aggregator-reload-proxy-client-cert",
    "poststarthook/start-kube-aggregator-informers",
    "poststarthook/apiservice-status-local-available-controller",
    "poststarthook/apiservice-status-remote-available-controller",
    "poststarthook/apiservice-registration-controller",
    "poststarthook/apiservice-discovery-controller",
    "poststarthook/kube-apiserver-autoregistration",
    "autoregister-completion",
    "poststarthook/apiservice-openapi-controller",
    "poststarthook/apiservice-openapiv3-controller",
];

/// A part of the server that is well or not.
#[async_trait::async_trait]
pub trait HealthCheck: Send + Sync {
    async fn check(&self) -> Result<(), String>;
}

const KMS: &str = "kms-providers";

/// The names of the checks of `healthz`, `livez` or `readyz`, in order.
pub fn names(inner: &Inner, which: &str) -> impl Iterator<Item = &'static str> + use<> {
    let ready = which == "readyz";
    let first: &[&str] = if ready { &READY } else { &ALIVE };
    let kms: &[&str] = if inner.kms_health.is_some() { &[KMS] } else { &[] };
    let last: &[&str] = if ready { &["shutdown"] } else { &[] };
    first.iter().chain(kms).chain(&AT_START).chain(last).copied()
}

/// `/metrics/slis`: the same checks as a gauge each.
pub async fn slis(inner: &Arc<Inner>) -> String {
    let mut text = String::from(
        "# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.\n\
         # TYPE kubernetes_healthcheck gauge\n",
    );
    let mut checks: Vec<(&str, &str)> = ["healthz", "livez", "readyz"]
        .into_iter()
        .flat_map(|which| names(inner, which).map(move |name| (name, which)))
        .collect();
    checks.sort_unstable();
    for (name, which) in checks {
        let value = u8::from(run(inner, name).await.is_ok());
        text.push_str(&format!(
            "kubernetes_healthcheck{{name=\"{name}\",type=\"{which}\"}} {value}\n"
        ));
    }
    text
}

pub async fn check(inner: &Arc<Inner>, exchange: &Exchange, parts: &[&str]) -> Answer {
    let which = parts[0];
    let checks: Vec<&str> = names(inner, which).collect();
    let single = parts[1..].join("/");
    if !single.is_empty() {
        return match checks.iter().find(|name| **name == single) {
            None => not_found(),
            Some(name) => match run(inner, name).await {
                // COMPAT: a single check says it without the header that all others have.
                Ok(()) => body::answer(StatusCode::OK, "text/plain; charset=utf-8", "ok"),
                Err(why) => body::text(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    format!("internal server error: {why}\n"),
                ),
            },
        };
    }
    let excluded: Vec<&str> = exchange.query.all("exclude").collect();
    let mut lines = String::new();
    let mut failed = Vec::new();
    let mut unknown: Vec<String> = excluded
        .iter()
        .filter(|name| !checks.contains(name))
        .map(|name| format!("\"{name}\""))
        .collect();
    unknown.sort();
    unknown.dedup();
    for name in &checks {
        if excluded.contains(name) {
            lines.push_str(&format!("[+]{name} excluded: ok\n"));
        } else if run(inner, name).await.is_ok() {
            lines.push_str(&format!("[+]{name} ok\n"));
        } else {
            // COMPAT: why it failed is for the log; the path of the single check shows it to who may ask.
            lines.push_str(&format!("[-]{name} failed: reason withheld\n"));
            failed.push(*name);
        }
    }
    if !unknown.is_empty() {
        let unknown = unknown.join(",");
        lines.push_str(&format!(
            "warn: some health checks cannot be excluded: no matches for {unknown}\n"
        ));
    }
    if !failed.is_empty() {
        tracing::info!(checks = ?failed, "{which} check failed");
        lines.push_str(&format!("{which} check failed\n"));
        return body::text(StatusCode::INTERNAL_SERVER_ERROR, lines);
    }
    if exchange.query.get("verbose").is_some() {
        lines.push_str(&format!("{which} check passed\n"));
        return body::text(StatusCode::OK, lines);
    }
    body::text(StatusCode::OK, "ok")
}

async fn run(inner: &Inner, name: &str) -> Result<(), String> {
    match name {
        "etcd" | "etcd-readiness" => {
            let limit = std::time::Duration::from_secs(2);
            match tokio::time::timeout(limit, inner.registry.store().health()).await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the store did not answer in time".to_string()),
            }
        }
        KMS => match &inner.kms_health {
            Some(kms) => kms.check().await,
            None => Ok(()),
        },
        "informer-sync" if !inner.ready.load(Ordering::Acquire) => Err("not finished".to_string()),
        name if AT_START.contains(&name) && !inner.ready.load(Ordering::Acquire) => {
            Err("not finished".to_string())
        }
        "shutdown" if inner.shutdown.is_cancelled() => Err("process is shutting down".to_string()),
        _ => Ok(()),
    }
}
