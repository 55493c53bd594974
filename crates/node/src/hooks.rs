//! Lifecycle hooks: postStart and preStop, by exec, HTTP or sleep.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};

use crate::images::describe;
use crate::pods;
use crate::probes::http::{self, HttpTarget};
use crate::runtime::Runtime;

/// A hook that hangs is cut off by the grace period; a postStart hook has none, so it gets a long one.
const HTTP_TIMEOUT: Duration = Duration::from_secs(30);

/// The error is told in the container's status.
pub async fn run(
    runtime: &Runtime,
    pod: &Pod,
    container: &Container,
    container_id: &str,
    pod_ip: &str,
    handler: &LifecycleHandler,
) -> Result<(), String> {
    if let Some(exec) = &handler.exec {
        let command = exec.command.clone().unwrap_or_default();
        let shown = format!("[{}]", command.join(" "));
        let failed = |error: String, output: String| {
            format!(
                "Exec lifecycle hook ({shown}) for Container {:?} in Pod {:?} failed - error: {error}, message: {output:?}",
                container.name,
                pods::full_name(pod)
            )
        };
        return match runtime.exec_sync(container_id, command, 0).await {
            Ok(response) if response.exit_code == 0 => Ok(()),
            Ok(response) => {
                let mut output = response.stdout;
                output.extend(response.stderr);
                let shown_command = handler
                    .exec
                    .as_ref()
                    .and_then(|e| e.command.as_ref())
                    .map(|c| c.join(" "))
                    .unwrap_or_default();
                Err(failed(
                    format!(
                        "command '{shown_command}' exited with {}: {}",
                        response.exit_code,
                        String::from_utf8_lossy(&output)
                    ),
                    String::from_utf8_lossy(&output).into_owned(),
                ))
            }
            Err(status) => Err(failed(describe(&status), String::new())),
        };
    }
    if let Some(action) = &handler.http_get {
        let path = action.path.clone().unwrap_or_default();
        let failed = |error: String| {
            format!(
                "HTTP lifecycle hook ({path}) for Container {:?} in Pod {:?} failed - error: {error}",
                container.name,
                pods::full_name(pod)
            )
        };
        let mut target = HttpTarget::new(action, container, pod_ip, "kube-lifecycle").map_err(&failed)?;
        return run_http(&mut target).await.map_err(failed);
    }
    if let Some(sleep) = &handler.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
        return Ok(());
    }
    Err("Cannot run handler: invalid handler".to_owned())
}

async fn run_http(target: &mut HttpTarget) -> Result<(), String> {
    match http::get(target, HTTP_TIMEOUT).await {
        // COMPAT: old hooks say HTTPS of a server that speaks HTTP. Only then, and without what was meant for a
        // connection that nobody listens in on.
        Err(error) if target.tls && is_plain_http(&error) => {
            target.tls = false;
            target
                .headers
                .retain(|(name, _)| !name.eq_ignore_ascii_case("authorization"));
            http::get(target, HTTP_TIMEOUT).await.map(|_| ())
        }
        result => result.map(|_| ()),
    }
}

/// Whether the other side answered TLS's hello with something that is no TLS.
fn is_plain_http(error: &str) -> bool {
    error.contains("InvalidContentType")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// A server that knows no TLS: what it was sent in plain words, if anything.
    #[tokio::test]
    async fn a_secret_does_not_fall_back_to_plain_http() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut buffer = vec![0; 4096];
                let length = stream.read(&mut buffer).await.unwrap();
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let _ = stream
                    .write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    .await;
                if text.starts_with("GET ") {
                    return text;
                }
            }
        });
        let handler: LifecycleHandler = serde_json::from_value(json!({"httpGet": {"scheme": "HTTPS", "port": port,
            "host": "127.0.0.1", "httpHeaders": [{"name": "Authorization", "value": "secret"}, {"name": "X-A", "value": "1"}]}}))
        .unwrap();
        let action = handler.http_get.as_ref().unwrap();
        let container = Container::default();
        let mut target = HttpTarget::new(action, &container, "", "kube-lifecycle").unwrap();
        run_http(&mut target).await.unwrap();
        let seen = server.await.unwrap().to_lowercase();
        assert!(seen.contains("x-a: 1") && !seen.contains("secret"), "{seen}");
        // Nobody there: that is no reason to speak in the clear.
        let error = run_http(&mut HttpTarget::new(action, &container, "", "kube-lifecycle").unwrap())
            .await
            .unwrap_err();
        assert!(error.starts_with("Get \"https://"), "{error}");
    }
}
