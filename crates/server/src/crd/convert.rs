//! Conversion by a webhook: objects go out as a ConversionReview and come back in another version, with
//! the same identity and the metadata they had, but for labels and annotations.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use skiff_meta::Status;
use skiff_registry::{Registry, object};

use super::definition::Definition;
use crate::webhook_client::WebhookClient;

/// Upstream's timeout of a conversion.
const TIMEOUT: Duration = Duration::from_secs(30);

pub struct Webhook {
    client: WebhookClient,
    review_version: Option<String>,
}

impl Webhook {
    /// Reads the `conversion` of a definition.
    pub fn new(registry: Arc<Registry>, conversion: &Value) -> Webhook {
        let webhook = conversion.get("webhook").unwrap_or(&Value::Null);
        let client = webhook.get("clientConfig").unwrap_or(&Value::Null);
        let review_version = webhook
            .get("conversionReviewVersions")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .find(|version| matches!(*version, "v1" | "v1beta1"))
            .map(str::to_owned);
        Webhook {
            client: WebhookClient::new(registry, client),
            review_version,
        }
    }

    /// Converts objects, all of which are in another version.
    pub async fn convert(
        &self,
        definition: &Definition,
        objects: Vec<Value>,
        api_version: &str,
    ) -> Result<Vec<Value>, Status> {
        let from = objects
            .first()
            .map_or("", |value| object::at_str(value, &["apiVersion"]));
        let kind = &definition.names.kind;
        let what = format!("{from}, Kind={kind}");
        let failed = |why: String| Status::failure(500, "", why);
        let Some(version) = &self.review_version else {
            return Err(failed("no supported conversion review versions".to_owned()));
        };
        let uid = uuid::Uuid::new_v4().to_string();
        let review = json!({"kind": "ConversionReview", "apiVersion": format!("apiextensions.k8s.io/{version}"),
            "request": {"uid": uid, "desiredAPIVersion": api_version, "objects": objects}});
        let answer = self.client.call(&review, TIMEOUT).await;
        let failure = |why: String| failed(format!("conversion webhook for {what} failed: {why}"));
        let answer = answer.map_err(failure)?;
        let converted = response(&answer, version, &uid).map_err(failure)?;
        if converted.len() != objects.len() {
            return Err(failed(format!(
                "conversion webhook for {what} returned {} objects, expected {}",
                converted.len(),
                objects.len()
            )));
        }
        let single = objects.len() == 1;
        let mut out = Vec::with_capacity(objects.len());
        for (index, (original, converted)) in objects.iter().zip(converted).enumerate() {
            let restored = restored(original, converted, api_version, single).map_err(|why| {
                failed(if single {
                    format!("conversion webhook for {what} returned invalid {why}")
                } else {
                    format!("conversion webhook for {what} returned invalid converted object at index {index}: {why}")
                })
            })?;
            out.push(restored);
        }
        Ok(out)
    }
}

/// The converted objects of an answer.
fn response(answer: &Value, version: &str, uid: &str) -> Result<Vec<Value>, String> {
    if version == "v1" {
        let (group_version, kind) = (
            object::at_str(answer, &["apiVersion"]),
            object::at_str(answer, &["kind"]),
        );
        if group_version != "apiextensions.k8s.io/v1" || kind != "ConversionReview" {
            return Err(format!(
                "expected webhook response of apiextensions.k8s.io/v1, Kind=ConversionReview, got {group_version}, Kind={kind}"
            ));
        }
    }
    let response = object::at(answer, &["response"]).ok_or("no response provided")?;
    let given = object::at_str(response, &["uid"]);
    if version == "v1" && given != uid {
        return Err(format!("expected response.uid=\"{uid}\", got \"{given}\""));
    }
    let status = object::at_str(response, &["result", "status"]);
    if status != "Success" {
        let message = object::at_str(response, &["result", "message"]);
        return Err(if message.is_empty() {
            format!("response.result.status was '{status}', not 'Success'")
        } else {
            message.to_owned()
        });
    }
    Ok(object::at(response, &["convertedObjects"])
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default())
}

/// Checks that the object is still the same one, and gives it back the metadata that is not the
/// webhook's to change.
fn restored(
    original: &Value,
    mut converted: Value,
    api_version: &str,
    single: bool,
) -> Result<Value, String> {
    let subject = if single { "object at index 0: " } else { "" };
    let given = object::at_str(&converted, &["apiVersion"]);
    if given != api_version {
        return Err(format!(
            "{subject}invalid groupVersion (expected {api_version}, received {given})"
        ));
    }
    let (expected, kind) = (
        object::at_str(original, &["kind"]),
        object::at_str(&converted, &["kind"]),
    );
    if expected != kind {
        return Err(format!(
            "{subject}invalid kind (expected {expected}, received {kind})"
        ));
    }
    let subject = if single { "object: " } else { "" };
    for (field, what) in [("name", "name"), ("namespace", "namespace"), ("uid", "UID")] {
        let (expected, found) = (object::text(original, field), object::text(&converted, field));
        if expected != found {
            return Err(format!(
                "{subject}must have the same {what}: {expected} != {found}"
            ));
        }
    }
    let subject = if single { "metadata: " } else { "" };
    let Some(metadata) = converted.get("metadata").and_then(Value::as_object).cloned() else {
        return Err(format!("{subject}missing metadata in converted object"));
    };
    let kept = original.get("metadata").cloned().unwrap_or_else(|| json!({}));
    object::put(&mut converted, &["metadata"], kept);
    for field in ["labels", "annotations"] {
        let value = metadata.get(field).cloned().unwrap_or(Value::Null);
        let texts = |map: &serde_json::Map<String, Value>| map.values().all(Value::is_string);
        match value.as_object() {
            None if value.is_null() => object::set(&mut converted, field, Value::Null),
            Some(map) if texts(map) => object::set(&mut converted, field, value),
            _ => return Err(format!("{subject}invalid metadata.{field} in converted object")),
        }
    }
    Ok(converted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_checked() {
        let check = |answer: Value, expected: Result<usize, &str>| {
            let found = response(&answer, "v1", "u").map(|objects| objects.len());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        let review = |response: Value| json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "response": response});
        check(
            review(json!({"uid": "u", "result": {"status": "Success"}, "convertedObjects": [{}]})),
            Ok(1),
        );
        check(
            review(json!({"uid": "x"})),
            Err("expected response.uid=\"u\", got \"x\""),
        );
        check(
            review(json!({"uid": "u", "result": {"status": "Failed", "message": "no"}})),
            Err("no"),
        );
        check(
            review(json!({"uid": "u"})),
            Err("response.result.status was '', not 'Success'"),
        );
        check(
            json!({}),
            Err("expected webhook response of apiextensions.k8s.io/v1, Kind=ConversionReview, got , Kind="),
        );
    }

    #[test]
    fn metadata_is_not_the_webhooks() {
        let original = json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "n", "uid": "u", "finalizers": ["f"], "labels": {"a": "b"}}});
        let converted = json!({"apiVersion": "g/v2", "kind": "K", "metadata": {"name": "n", "uid": "u", "labels": {"c": "d"}}, "spec": 1});
        assert_eq!(
            restored(&original, converted, "g/v2", true),
            Ok(
                json!({"apiVersion": "g/v2", "kind": "K", "metadata": {"name": "n", "uid": "u", "finalizers": ["f"], "labels": {"c": "d"}}, "spec": 1})
            )
        );
        let other = json!({"apiVersion": "g/v2", "kind": "K", "metadata": {"name": "m", "uid": "u"}});
        assert_eq!(
            restored(&original, other, "g/v2", true),
            Err("object: must have the same name: n != m".to_owned())
        );
    }
}
