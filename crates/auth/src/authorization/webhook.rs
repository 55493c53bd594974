//! An authorizer that asks another server: it is posted a SubjectAccessReview. What it says is kept for a while.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use skiff_https::{Backoff, BadKubeconfig, Endpoint};
use skiff_meta::selector::{FieldSelector, LabelSelector, Operator};

use super::Decision;
use super::matching::Conditions;
use crate::expiring::{Expiring, Weight, key};
use crate::{Attributes, UserInfo};

/// Upstream's size of the cache, and what it does not keep: who asks could fill the memory with it.
const KEPT: usize = 8192;
const LARGEST: usize = 10_000;

/// What follows if the webhook cannot be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    NoOpinion,
    Deny,
}

pub struct WebhookOptions {
    /// Of the review: `v1` or `v1beta1`.
    pub version: String,
    pub timeout: Duration,
    /// Zero: not kept.
    pub authorized_ttl: Duration,
    pub unauthorized_ttl: Duration,
    pub on_error: OnError,
}

impl Default for WebhookOptions {
    fn default() -> WebhookOptions {
        WebhookOptions {
            version: "v1beta1".to_owned(),
            timeout: Duration::from_secs(30),
            authorized_ttl: Duration::from_secs(300),
            unauthorized_ttl: Duration::from_secs(30),
            on_error: OnError::NoOpinion,
        }
    }
}

pub struct AuthorizationWebhook {
    endpoint: Endpoint,
    options: WebhookOptions,
    conditions: Conditions,
    backoff: Backoff,
    verdicts: Expiring<Status>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Review {
    status: Status,
}

#[derive(Deserialize, Default, Clone)]
#[serde(default)]
struct Status {
    allowed: bool,
    denied: bool,
    reason: String,
}

impl Weight for Status {
    fn weight(&self) -> usize {
        self.reason.len()
    }
}

impl AuthorizationWebhook {
    pub fn load(file: &Path, options: WebhookOptions) -> Result<AuthorizationWebhook, BadKubeconfig> {
        let none = Conditions::compile(&[]).unwrap_or_else(|_| unreachable!("nothing to compile"));
        AuthorizationWebhook::with_conditions(file, options, none)
    }

    pub(super) fn with_conditions(
        file: &Path,
        options: WebhookOptions,
        conditions: Conditions,
    ) -> Result<AuthorizationWebhook, BadKubeconfig> {
        Ok(AuthorizationWebhook {
            endpoint: Endpoint::load(file, options.timeout)?,
            options,
            conditions,
            backoff: Backoff::default(),
            verdicts: Expiring::new(KEPT),
        })
    }

    pub async fn authorize(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Decision {
        let failed = |why: String| Decision {
            denied: self.options.on_error == OnError::Deny,
            error: Some(why),
            ..Decision::default()
        };
        match self.conditions.hold(&full_spec(user, attributes)) {
            Ok(true) => {}
            Ok(false) => return Decision::default(),
            Err(why) => return failed(why),
        }
        let spec = self.spec(user, attributes);
        let text = spec.to_string();
        let key = key(&[text.as_bytes()]);
        let status = match self.verdicts.get(&key, Instant::now()) {
            Some(status) => status,
            None => {
                let asked = self.ask(spec).await;
                let status = match asked {
                    Ok(status) => status,
                    Err(why) => {
                        tracing::error!(why, "the authorization webhook cannot be reached");
                        return failed(why);
                    }
                };
                if size(attributes) < LARGEST {
                    let ttl = match status.allowed {
                        true => self.options.authorized_ttl,
                        false => self.options.unauthorized_ttl,
                    };
                    self.verdicts.keep(key, status.clone(), Instant::now(), ttl);
                }
                status
            }
        };
        let both = status.allowed && status.denied;
        Decision {
            allowed: status.allowed && !status.denied,
            denied: status.denied,
            reason: status.reason,
            error: both
                .then(|| "webhook subject access review returned both allow and deny response".to_owned()),
        }
    }

    async fn ask(&self, spec: Value) -> Result<Status, String> {
        let review = json!({
            "apiVersion": format!("authorization.k8s.io/{}", self.options.version),
            "kind": "SubjectAccessReview", "metadata": {}, "spec": spec, "status": {"allowed": false},
        });
        let body = Bytes::from(review.to_string());
        let answer = self.backoff.run(|| self.endpoint.post(body.clone())).await;
        let document = match answer {
            Ok(answer) => answer.document_of("SubjectAccessReview")?,
            Err(failure) => return Err(self.endpoint.explain(&failure)),
        };
        let review: Review = serde_json::from_value(document).map_err(|error| error.to_string())?;
        Ok(review.status)
    }

    /// As it goes over the wire: without what is empty.
    fn spec(&self, user: &UserInfo, attributes: &Attributes<'_>) -> Value {
        let mut spec = full_spec(user, attributes);
        let strip = |value: &mut Value| {
            if let Some(fields) = value.as_object_mut() {
                fields.retain(|_, field| match field {
                    Value::String(text) => !text.is_empty(),
                    Value::Array(list) => !list.is_empty(),
                    Value::Object(entries) => !entries.is_empty(),
                    _ => true,
                });
            }
        };
        strip(&mut spec);
        for of in ["resourceAttributes", "nonResourceAttributes"] {
            if let Some(of) = spec.get_mut(of) {
                strip(of);
            }
        }
        // COMPAT: an old version calls groups by another name.
        if self.options.version == "v1beta1"
            && let Some(fields) = spec.as_object_mut()
            && let Some(groups) = fields.remove("groups")
        {
            fields.insert("group".to_owned(), groups);
        }
        spec
    }
}

fn size(a: &Attributes<'_>) -> usize {
    let parts = [
        a.namespace,
        a.verb,
        a.group,
        a.version,
        a.resource,
        a.subresource,
        a.name,
        a.path,
    ];
    parts.iter().map(|part| part.len()).sum()
}

/// Everything that is asked, also what is empty: conditions may look at it.
fn full_spec(user: &UserInfo, a: &Attributes<'_>) -> Value {
    let mut spec = json!({"user": user.name, "uid": user.uid, "groups": user.groups, "extra": user.extra});
    if !a.is_resource {
        spec["nonResourceAttributes"] = json!({"path": a.path, "verb": a.verb});
        return spec;
    }
    let mut resource = json!({
        "namespace": a.namespace, "verb": a.verb, "group": a.group, "version": a.version,
        "resource": a.resource, "subresource": a.subresource, "name": a.name,
    });
    // What cannot be read narrows nothing.
    let fields = FieldSelector::parse(a.field_selector).unwrap_or_default();
    let fields: Vec<Value> = fields
        .terms
        .iter()
        .map(|term| {
            let operator = if term.equal { "In" } else { "NotIn" };
            json!({"key": term.field, "operator": operator, "values": [term.value]})
        })
        .collect();
    if !fields.is_empty() {
        resource["fieldSelector"] = json!({"requirements": fields});
    }
    let labels = LabelSelector::parse(a.label_selector).unwrap_or_default();
    let labels: Vec<Value> = labels
        .requirements
        .iter()
        .filter_map(|requirement| {
            let operator = match requirement.operator {
                Operator::In => "In",
                Operator::NotIn => "NotIn",
                Operator::Exists => "Exists",
                Operator::DoesNotExist => "DoesNotExist",
                // Left out, it only asks for more.
                _ => return None,
            };
            let mut one = json!({"key": requirement.key, "operator": operator});
            if !requirement.values.is_empty() {
                one["values"] = json!(requirement.values);
            }
            Some(one)
        })
        .collect();
    if !labels.is_empty() {
        resource["labelSelector"] = json!({"requirements": labels});
    }
    spec["resourceAttributes"] = resource;
    spec
}
