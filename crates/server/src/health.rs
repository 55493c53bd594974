//! `/healthz`, `/livez`, `/readyz`: the checks, one by one or all at once, as upstream words them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::StatusCode;

use crate::body::{self, Answer, not_found};
use crate::chain::Exchange;
use crate::server::Inner;

/// The checks of each path. `etcd` stands for whichever store there is.
const HEALTHZ: [&str; 4] = ["ping", "log", "etcd", "poststarthook/rbac/bootstrap-roles"];
const LIVEZ: [&str; 3] = ["ping", "log", "etcd"];
const READYZ: [&str; 6] = [
    "ping",
    "log",
    "etcd",
    "informer-sync",
    "poststarthook/rbac/bootstrap-roles",
    "shutdown",
];

pub async fn check(inner: &Arc<Inner>, exchange: &Exchange, parts: &[&str]) -> Answer {
    let which = parts[0];
    let checks: &[&str] = match which {
        "healthz" => &HEALTHZ,
        "livez" => &LIVEZ,
        _ => &READYZ,
    };
    let single = parts[1..].join("/");
    if !single.is_empty() {
        return match checks.iter().find(|name| **name == single) {
            None => not_found(),
            Some(name) => match run(inner, name).await {
                Ok(()) => body::text(StatusCode::OK, "ok"),
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
    for name in checks {
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
        "etcd" => {
            let limit = std::time::Duration::from_secs(2);
            match tokio::time::timeout(limit, inner.registry.store().revision()).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the store did not answer in time".to_string()),
            }
        }
        "informer-sync" | "poststarthook/rbac/bootstrap-roles" if !inner.ready.load(Ordering::Acquire) => {
            Err("not finished".to_string())
        }
        "shutdown" if inner.shutdown.is_cancelled() => Err("process is shutting down".to_string()),
        _ => Ok(()),
    }
}
