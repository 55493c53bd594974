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
        return match http::get(&target, HTTP_TIMEOUT).await {
            Ok(_) => Ok(()),
            // A server that speaks plain HTTP on the port it was called by HTTPS.
            Err(_) if target.tls => {
                target.tls = false;
                http::get(&target, HTTP_TIMEOUT).await.map(|_| ()).map_err(failed)
            }
            Err(error) => Err(failed(error)),
        };
    }
    if let Some(sleep) = &handler.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
        return Ok(());
    }
    Err("Cannot run handler: invalid handler".to_owned())
}
