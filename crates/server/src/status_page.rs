//! `/statusz` and `/flagz`: what this server is, for people. Upstream promises no format; the first lines are its.

use std::time::Duration;

use http::StatusCode;

use crate::body::{self, Answer};
use crate::server::Inner;

const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
    guarantees and is for debugging purposes only.";

fn page(title: &str, lines: &str) -> Answer {
    body::answer(
        StatusCode::OK,
        "text/plain; charset=utf-8",
        format!("\napiserver {title}\n{WARNING}\n{lines}"),
    )
}

pub fn statusz(inner: &Inner) -> Answer {
    let now = jiff::Timestamp::now();
    let up = Duration::try_from(now.duration_since(inner.started))
        .unwrap_or_default()
        .as_secs();
    let version = inner.version.git_version.trim_start_matches('v');
    let emulated: Vec<&str> = version.split('.').take(2).collect();
    let lines = format!(
        "\nStarted:  {}\nUp:  {} hr {:02} min {:02} sec\nBinary version:  {version}\nEmulation version:  {}\n\
         Paths:  /flagz /healthz /livez /metrics /readyz /statusz /version\n",
        inner.started.strftime("%a %b %d %H:%M:%S UTC %Y"),
        up / 3600,
        up / 60 % 60,
        up % 60,
        emulated.join("."),
    );
    page("statusz", &lines)
}

pub fn flagz(inner: &Inner) -> Answer {
    let cidrs = inner.registry.services.cidrs().join(",");
    let lines = format!(
        "advertise-address: {}\nanonymous-auth: {}\nauthorization-mode: [Node,RBAC]\nservice-cluster-ip-range: {cidrs}\n",
        inner.server_address, inner.authenticator.anonymous.enabled,
    );
    page("flagz", &lines)
}
