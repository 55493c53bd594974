//! Endpoints for people and tools that look into a node: `/run`, `/checkpoint`, `/statusz` and `/flagz`.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use skiff_streaming::Body;

use super::{find, json as answer, text};
use crate::configuration::effective;
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::pod_state::PodState;
use crate::pods;

/// As the API server's pages: upstream promises no format.
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
    guarantees and is for debugging purposes only.";

fn page(title: &str, lines: &str) -> Response<Body> {
    text(StatusCode::OK, format!("\nkubelet {title}\n{WARNING}\n{lines}"))
}

pub fn statusz(kubelet: &Kubelet) -> Response<Body> {
    let up = kubelet.started.elapsed();
    let started = Timestamp::now() - k8s_openapi::jiff::SignedDuration::try_from(up).unwrap_or_default();
    let version = kubelet.config.kubelet_version.trim_start_matches('v');
    let emulated: Vec<&str> = version.split('.').take(2).collect();
    let seconds = up.as_secs();
    let lines = format!(
        "\nStarted:  {}\nUp:  {} hr {:02} min {:02} sec\nBinary version:  {version}\nEmulation version:  {}\n\
         Paths:  /checkpoint /configz /flagz /healthz /metrics /pods /runningpods /stats /statusz\n",
        started.strftime("%a %b %d %H:%M:%S UTC %Y"),
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        emulated.join("."),
    );
    page("statusz", &lines)
}

/// Flags that say what the configuration says; what may be secret is masked there.
pub fn flagz(kubelet: &Kubelet) -> Response<Body> {
    let config = effective(&kubelet.config, kubelet.server_port);
    let shown = |field: &str| match &config[field] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let flags = [
        ("container-runtime-endpoint", "containerRuntimeEndpoint"),
        ("eviction-hard", "evictionHard"),
        ("image-gc-high-threshold", "imageGCHighThresholdPercent"),
        ("image-gc-low-threshold", "imageGCLowThresholdPercent"),
        ("kube-reserved", "kubeReserved"),
        ("manifest-url", "staticPodURL"),
        ("max-pods", "maxPods"),
        ("pod-manifest-path", "staticPodPath"),
        ("pod-max-pids", "podPidsLimit"),
    ];
    let mut lines: Vec<String> = flags
        .iter()
        .map(|(flag, field)| format!("{flag}={}", shown(field)))
        .collect();
    lines.push(format!("hostname-override={}", kubelet.config.node_name));
    lines.sort();
    page("flagz", &format!("{}\n", lines.join("\n")))
}

type PodName<'a> = (&'a str, &'a str, Option<&'a str>);

fn container_of(state: &PodState, name: &str) -> Option<String> {
    let observed = state.observed();
    let container = observed.running().find(|container| container.name == name);
    container.map(|container| container.id.clone())
}

/// Runs a command to its end and answers with what it wrote.
pub async fn run(
    kubelet: &Kubelet,
    (namespace, pod, uid): PodName<'_>,
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let Some(state) = find(kubelet, namespace, pod, uid) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist");
    };
    let Some(id) = container_of(&state, container) else {
        return text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("container not found ({container:?})"),
        );
    };
    let command = query
        .iter()
        .find(|(name, _)| name == "cmd")
        .map_or("", |(_, value)| value);
    let words = command.split(' ').map(str::to_owned).collect();
    match kubelet.runtime.exec_sync(&id, words, 0).await {
        Ok(done) => {
            // COMPAT: both streams, one after the other, and a failure of the command is one of the request.
            let output = [done.stdout, done.stderr].concat();
            match done.exit_code {
                0 => text(StatusCode::OK, output),
                code => text(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    format!(
                        "command '{command}' exited with {code}: {}",
                        String::from_utf8_lossy(&output)
                    ),
                ),
            }
        }
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

/// Has the runtime write the state of a container into a file.
pub async fn checkpoint(
    kubelet: &Arc<Kubelet>,
    (namespace, pod): (&str, &str),
    container: &str,
    query: &[(String, String)],
) -> Response<Body> {
    let Some(state) = find(kubelet, namespace, pod, None) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist");
    };
    let object = state.pod();
    if pods::container(&object, container).is_none() {
        return text(
            StatusCode::NOT_FOUND,
            format!("container {container} does not exist"),
        );
    }
    let mut timeout = 0;
    if let Some((_, value)) = query.iter().rev().find(|(name, _)| name == "timeout") {
        match value.parse() {
            Ok(seconds) => timeout = seconds,
            Err(_) => return text(StatusCode::NOT_FOUND, "cannot parse value of timeout parameter"),
        }
    }
    let failed = |why: &str| {
        let message = format!("checkpointing of {namespace}/{pod}/{container} failed ({why})");
        text(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let Some(id) = container_of(&state, container) else {
        return failed(&format!("container {container} not found"));
    };
    let folder = kubelet.config.data_dir.join("checkpoints");
    if let Err(error) = private_folder(&folder) {
        return failed(&error.to_string());
    }
    let stamp = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let name = format!(
        "checkpoint-{}_{namespace}-{container}-{stamp}.tar",
        pods::name(&object)
    );
    let file = folder.join(name).display().to_string();
    let patience = Duration::from_secs(u64::try_from(timeout).unwrap_or(0));
    match kubelet.runtime.checkpoint(&id, &file, timeout, patience).await {
        Ok(()) => answer(&json!({"items": [file]})),
        Err(status) => failed(&describe(&status)),
    }
}

/// The memory of a container is in there.
fn private_folder(folder: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}
