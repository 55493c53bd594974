//! Whether an extension API server can be reached, as a condition of its APIService. Reasons and messages are
//! upstream's: people and dashboards know them.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::object;

use super::{Remote, fetch, resolve};
use crate::hooks::loopback::Loopback;
use crate::server::Inner;

const ATTEMPTS: usize = 5;
const LIMIT: Duration = Duration::from_secs(5);

struct Verdict {
    status: &'static str,
    reason: &'static str,
    message: String,
}

/// Checks once and writes down what came out. False: worth another look soon.
pub async fn check(inner: &Arc<Inner>, remote: &Arc<Remote>) -> bool {
    let verdict = examine(inner, remote).await;
    let look_again = verdict.reason == "FailedDiscoveryCheck";
    match write(inner, &remote.name, &verdict).await {
        Ok(was_available) => {
            let available = verdict.status == "True";
            let lost = (was_available && !available).then_some(verdict.reason);
            inner.metrics.api_service(&remote.name, available, lost);
            !look_again
        }
        Err(status) if status.code == 404 => {
            inner.aggregator.take(&remote.name);
            inner.metrics.forget_api_service(&remote.name);
            true
        }
        Err(status) => {
            tracing::warn!(%status, name = remote.name, "the availability of an APIService cannot be written");
            false
        }
    }
}

async fn examine(inner: &Arc<Inner>, remote: &Arc<Remote>) -> Verdict {
    let (name, namespace, port) = (&remote.service, &remote.namespace, remote.port);
    let verdict = |status, reason, message| Verdict {
        status,
        reason,
        message,
    };
    if remote.local.is_some() {
        let message = "Local APIServices are always available".to_string();
        return verdict("True", "Local", message);
    }
    let unsure = |reason, error: Status| {
        let message = format!(
            "service/{name} in {namespace:?} cannot be checked due to: {}",
            error.message
        );
        verdict("Unknown", reason, message)
    };
    let service = match resolve::service(&inner.registry, namespace, name).await {
        Ok(Some(service)) => service,
        Ok(None) => {
            let message = format!("service/{name} in {namespace:?} is not present");
            return verdict("False", "ServiceNotFound", message);
        }
        Err(error) => return unsure("ServiceAccessError", error),
    };
    if matches!(object::at_str(&service, &["spec", "type"]), "" | "ClusterIP") {
        let Some(port_name) = resolve::port_name(&service, port) else {
            let message = format!("service/{name} in {namespace:?} is not listening on port {port}");
            return verdict("False", "ServicePortError", message);
        };
        let slices = match resolve::endpoint_slices(&inner.registry, namespace, name).await {
            Ok(slices) => slices,
            Err(error) => return unsure("EndpointsAccessError", error),
        };
        if slices.is_empty() {
            let message = format!("cannot find endpointslices for service/{name} in {namespace:?}");
            return verdict("False", "EndpointsNotFound", message);
        }
        if resolve::ready_addresses(&slices, port_name).is_empty() {
            let message = format!(
                "endpointslices for service/{name} in {namespace:?} have no addresses with port name {port_name:?}"
            );
            return verdict("False", "MissingEndpoints", message);
        }
    }
    match discovery_answers(inner, remote).await {
        Ok(()) => verdict("True", "Passed", "all checks passed".to_string()),
        Err(why) => verdict("False", "FailedDiscoveryCheck", why),
    }
}

/// Asks for the one document that it must have. Several attempts at once: there may be several servers behind the
/// service, and one that answers is enough.
async fn discovery_answers(inner: &Arc<Inner>, remote: &Arc<Remote>) -> Result<(), String> {
    let attempts = (0..ATTEMPTS).map(|_| Box::pin(attempt(inner, remote)));
    match futures::future::select_ok(attempts).await {
        Ok(_) => Ok(()),
        Err(why) => Err(why),
    }
}

async fn attempt(inner: &Arc<Inner>, remote: &Arc<Remote>) -> Result<(), String> {
    let target = fetch::target(inner, remote).await?;
    let url = format!("https://{}{}", target.authority(), remote.path());
    let path = remote.path();
    let asked = fetch::get(&target, &path, &[]);
    let failing = |why: String| format!("failing or missing response from {url}: {why}");
    match tokio::time::timeout(LIMIT, asked).await {
        Ok(Ok(answer)) if answer.code.is_success() || answer.code == StatusCode::NOT_MODIFIED => Ok(()),
        Ok(Ok(answer)) => Err(failing(format!(
            "bad status from {url}: {}",
            answer.code.as_u16()
        ))),
        Ok(Err(why)) => Err(failing(format!("Get \"{url}\": {why}"))),
        Err(_) => Err(failing(format!(
            "Get \"{url}\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        ))),
    }
}

/// Writes the condition, if it is news. True: the APIService was available before.
async fn write(inner: &Arc<Inner>, name: &str, verdict: &Verdict) -> Result<bool, Status> {
    let mut was_available = false;
    let now = skiff_meta::time::format_seconds(inner.registry.now());
    let set = |mut current: Value| {
        was_available = is_available(&current);
        let before = current.clone();
        set_condition(&mut current, verdict, &now);
        Ok((current != before).then_some(current))
    };
    let path = format!("/apis/{}/v1/apiservices/{name}", super::GROUP);
    Loopback::new(inner).update(&path, "status", set).await?;
    Ok(was_available)
}

fn is_available(object: &Value) -> bool {
    let conditions = object::at(object, &["status", "conditions"]).and_then(Value::as_array);
    conditions.is_some_and(|all| {
        all.iter()
            .any(|condition| condition["type"] == "Available" && condition["status"] == "True")
    })
}

/// Sets the condition; the time of the last transition moves only with the status.
fn set_condition(object: &mut Value, verdict: &Verdict, now: &str) {
    let mut conditions: Vec<Value> = object::at(object, &["status", "conditions"])
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut wanted = json!({"type": "Available", "status": verdict.status, "lastTransitionTime": now,
        "reason": verdict.reason, "message": verdict.message});
    match conditions
        .iter_mut()
        .find(|condition| condition["type"] == "Available")
    {
        Some(present) => {
            if present["status"] == wanted["status"] {
                wanted["lastTransitionTime"] = present["lastTransitionTime"].clone();
            }
            *present = wanted;
        }
        None => conditions.push(wanted),
    }
    object::put(object, &["status", "conditions"], Value::Array(conditions));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitions_are_of_the_status() {
        let verdict = |status, reason| Verdict {
            status,
            reason,
            message: String::new(),
        };
        let mut object = json!({});
        set_condition(&mut object, &verdict("False", "ServiceNotFound"), "1");
        set_condition(&mut object, &verdict("False", "MissingEndpoints"), "2");
        let condition = |object: &Value| object["status"]["conditions"][0].clone();
        assert_eq!(condition(&object)["lastTransitionTime"], "1");
        assert_eq!(condition(&object)["reason"], "MissingEndpoints");
        set_condition(&mut object, &verdict("True", "Passed"), "3");
        assert_eq!(condition(&object)["lastTransitionTime"], "3");
    }
}
