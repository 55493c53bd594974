//! Admission webhooks: mutating ones one after the other, each seeing what the one before left; validating ones all at
//! once. A webhook that cannot be reached refuses the request or is passed over, as its failure policy says.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use skiff_admission::{Attributes, Lister, Operation, Plugin};
use skiff_cel::admission::{Input, MatchCondition, MatchConditions, MatchResult};
use skiff_meta::Status;
use skiff_meta::field::quote;
use skiff_registry::{Resource, object};
use skiff_schema::patch::{self, PatchError, PatchType};

use super::access::Access;
use super::matching::Matching;
use super::request::{self, Versioned};
use super::review::{self, Answer, Version};
use super::{Dynamic, exempt};
use crate::webhook_client::WebhookClient;

/// Upstream's default.
const TIMEOUT_SECONDS: u64 = 10;

/// One webhook of a configuration.
pub struct Hook {
    /// Of this webhook alone: of its configuration, its name and its place.
    id: String,
    name: String,
    client: WebhookClient,
    matching: Matching,
    conditions: Option<MatchConditions>,
    ignores_failure: bool,
    timeout: Duration,
    /// May be called for what will not happen.
    dry_runs: bool,
    review_version: Option<Version>,
    reinvocable: bool,
}

/// What became of a call.
enum Failure {
    /// The webhook could not be asked, or gave no sensible answer: its failure policy decides.
    Call(String),
    /// The request ends, whatever the policy.
    Final(Status),
}

impl Hook {
    /// The webhooks of a configuration, in order.
    pub fn read_all(dynamic: &Dynamic, configuration: &Value) -> Vec<Arc<Hook>> {
        let of = object::name(configuration);
        let webhooks = configuration.get("webhooks").and_then(Value::as_array);
        let mut hooks = Vec::new();
        for (at, webhook) in webhooks.into_iter().flatten().enumerate() {
            let name = object::at_str(webhook, &["name"]).to_owned();
            let id = format!("{of}/{name}/{at}");
            hooks.push(Arc::new(Hook::read(dynamic, webhook, name, id)));
        }
        hooks
    }

    fn read(dynamic: &Dynamic, webhook: &Value, name: String, id: String) -> Hook {
        let text = |key: &str| object::at_str(webhook, &[key]);
        let seconds = webhook.get("timeoutSeconds").and_then(Value::as_u64);
        let client = webhook.get("clientConfig").unwrap_or(&Value::Null);
        Hook {
            id,
            name,
            client: WebhookClient::new(dynamic.registry.clone(), client),
            matching: Matching::read(webhook),
            conditions: conditions(webhook, false),
            ignores_failure: text("failurePolicy") == "Ignore",
            timeout: Duration::from_secs(seconds.unwrap_or(TIMEOUT_SECONDS)),
            dry_runs: matches!(text("sideEffects"), "None" | "NoneOnDryRun"),
            review_version: webhook.get("admissionReviewVersions").and_then(Version::choose),
            reinvocable: text("reinvocationPolicy") == "IfNeeded",
        }
    }

    /// The resource in whose version the webhook wants the request, with the objects in it; `None`: it does not.
    async fn wants(
        &self,
        dynamic: &Dynamic,
        attributes: &Attributes<'_>,
    ) -> Result<Option<(Arc<Resource>, Versioned)>, Status> {
        let Some(resource) = self.matching.find(&dynamic.registry, attributes).await? else {
            return Ok(None);
        };
        let versioned = Versioned::new(attributes, &resource)
            .await
            .map_err(Status::internal)?;
        if let Some(conditions) = &self.conditions {
            let request = request::value(attributes, &resource);
            let input = Input {
                object: versioned.object.as_ref(),
                old_object: versioned.old.as_ref(),
                request: Some(&request),
                authorizer: Some(Access::of(&dynamic.authorizer, attributes)),
                ..Input::default()
            };
            match conditions.matches(input) {
                MatchResult::Matches => {}
                MatchResult::DoesNotMatch(_) => return Ok(None),
                MatchResult::Failed(_) if self.ignores_failure => return Ok(None),
                MatchResult::Failed(why) => {
                    return Err(Status::forbidden(
                        &attributes.group_resource(),
                        attributes.name,
                        why,
                    ));
                }
            }
        }
        Ok(Some((resource, versioned)))
    }

    /// Asks the webhook, and returns its consent.
    async fn call(
        &self,
        attributes: &Attributes<'_>,
        resource: &Resource,
        versioned: &Versioned,
        mutating: bool,
    ) -> Result<Answer, Failure> {
        if attributes.dry_run && !self.dry_runs {
            return Err(Failure::Final(Status::bad_request(format!(
                "admission webhook {} does not support dry run",
                quote(&self.name)
            ))));
        }
        let Some(version) = self.review_version else {
            return Err(Failure::Call(
                "could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)"
                    .to_owned(),
            ));
        };
        let uid = uuid::Uuid::new_v4().to_string();
        let question = review::question(version, &uid, &request::value(attributes, resource), versioned);
        let answered = self.client.call(&question, self.timeout).await;
        let answered = answered.and_then(|answered| match review::foreign(version, &answered) {
            Some(why) => Err(why),
            None => Ok(answered),
        });
        let answered = answered.map_err(|why| Failure::Call(format!("failed to call webhook: {why}")))?;
        let answer = review::answer(version, &uid, mutating, &answered)
            .map_err(|why| Failure::Call(format!("received invalid webhook response: {why}")))?;
        for warning in &answer.warnings {
            attributes.recorder.warn(warning.clone());
        }
        for (key, value) in &answer.audit_annotations {
            let key = format!("{}/{key}", self.name);
            attributes.recorder.annotate(&key, value.clone());
        }
        if answer.allowed {
            Ok(answer)
        } else {
            Err(Failure::Final(review::refusal(&self.name, &answer.result)))
        }
    }

    /// What a failure means for the request.
    fn judge(
        &self,
        attributes: &Attributes<'_>,
        place: &WebhookPosition,
        failure: Failure,
    ) -> Result<(), Status> {
        match failure {
            Failure::Final(status) => Err(status),
            Failure::Call(why) if self.ignores_failure => {
                attributes
                    .recorder
                    .annotate(&format!("failed-open.{}", place.key()), self.name.clone());
                tracing::warn!(
                    webhook = self.name,
                    why,
                    "the webhook failed and its failurePolicy is Ignore"
                );
                Ok(())
            }
            Failure::Call(why) => Err(Status::internal(format_args!(
                "failed calling webhook {}: {why}",
                quote(&self.name)
            ))),
        }
    }

    /// The object after the patch of an answer; `None` if there is no patch.
    fn patched(&self, versioned: &Versioned, answer: &Answer) -> Result<Option<Value>, Failure> {
        if answer.patch.is_empty() {
            return Ok(None);
        }
        let decoded = patch::decode_patch(PatchType::Json, &answer.patch, false).map_err(|error| {
            let why = told(error);
            Failure::Call(format!("received undecodable patch in webhook response: {why}"))
        })?;
        if decoded.value.as_array().is_some_and(Vec::is_empty) {
            return Ok(None);
        }
        let Some(object) = &versioned.object else {
            return Err(Failure::Final(Status::internal(format_args!(
                "admission webhook {} attempted to modify the object, which is not supported for this operation",
                quote(&self.name)
            ))));
        };
        if answer.patch_type != "JSONPatch" {
            return Err(Failure::Call(format!(
                "unsupported patch type {}",
                quote(&answer.patch_type)
            )));
        }
        let patched = patch::json_patch(object, &decoded.value);
        patched
            .map(Some)
            .map_err(|error| Failure::Final(Status::internal(told(error))))
    }
}

/// Where in admission a webhook was asked: what its annotations are called by.
struct WebhookPosition {
    sort: &'static str,
    round: usize,
    index: usize,
}

impl WebhookPosition {
    fn key(&self) -> String {
        format!(
            "{}.webhook.admission.k8s.io/round_{}_index_{}",
            self.sort, self.round, self.index
        )
    }

    /// Tells the audit log what a webhook did to the object, by which patch; without one there was none to apply.
    fn annotate(&self, attributes: &Attributes<'_>, hook: &Hook, patch: Option<&[u8]>, mutated: bool) {
        /// In upstream's order.
        #[derive(serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Done<'a> {
            configuration: &'a str,
            webhook: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            mutated: Option<bool>,
            #[serde(skip_serializing_if = "Option::is_none")]
            patch: Option<Value>,
            #[serde(skip_serializing_if = "Option::is_none")]
            patch_type: Option<&'static str>,
        }
        if !attributes.recorder.audited() {
            return;
        }
        let mut done = Done {
            configuration: hook.id.split('/').next().unwrap_or_default(),
            webhook: &hook.name,
            mutated: Some(mutated),
            patch: None,
            patch_type: None,
        };
        let text = serde_json::to_string(&done).unwrap_or_default();
        attributes.recorder.annotate(&self.key(), text);
        if let Some(patch) = patch
            && attributes.recorder.audits_objects()
        {
            done.mutated = None;
            done.patch = serde_json::from_slice(patch).ok();
            done.patch_type = Some("JSONPatch");
            let patched = WebhookPosition {
                sort: "patch",
                ..*self
            };
            let text = serde_json::to_string(&done).unwrap_or_default();
            attributes.recorder.annotate(&patched.key(), text);
        }
    }
}

fn told(error: PatchError) -> String {
    match error {
        PatchError::BadRequest(text)
        | PatchError::TooLarge(text)
        | PatchError::Unprocessable(text)
        | PatchError::Internal(text) => text,
    }
}

/// The `matchConditions` of a webhook or policy, compiled; `None` if it has none.
pub fn conditions(of: &Value, has_params: bool) -> Option<MatchConditions> {
    let written = of.get("matchConditions").and_then(Value::as_array)?;
    let conditions: Vec<MatchCondition> = written
        .iter()
        .map(|condition| MatchCondition {
            name: object::at_str(condition, &["name"]).to_owned(),
            expression: object::at_str(condition, &["expression"]).to_owned(),
        })
        .collect();
    (!conditions.is_empty()).then(|| MatchConditions::new(&conditions, has_params))
}

pub struct Mutating(pub Arc<Dynamic>);

#[async_trait]
impl Plugin for Mutating {
    fn name(&self) -> &'static str {
        "MutatingAdmissionWebhook"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn admit(&self, attributes: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let hooks = self.0.mutating_webhooks.load();
        if hooks.is_empty() || exempt(attributes) {
            return Ok(());
        }
        if attributes.reinvocation.again
            && attributes.reinvocation.last_output.as_ref() != attributes.object.as_deref()
        {
            // The built-in plugins changed what the webhooks had left.
            attributes.reinvocation.require();
        }
        for (index, hook) in hooks.iter().enumerate() {
            let place = WebhookPosition {
                sort: "mutation",
                round: usize::from(attributes.reinvocation.again),
                index,
            };
            let Some((resource, versioned)) = hook.wants(&self.0, attributes).await? else {
                continue;
            };
            if attributes.reinvocation.again && !attributes.reinvocation.due.contains(&hook.id) {
                continue;
            }
            let began = Instant::now();
            let answered = hook.call(attributes, &resource, &versioned, true).await;
            attributes.recorder.webhook_took(began.elapsed());
            let patched = answered.and_then(|answer| Ok((hook.patched(&versioned, &answer)?, answer.patch)));
            let changed = match patched {
                Ok((None, _)) => {
                    place.annotate(attributes, hook, None, false);
                    None
                }
                Ok((Some(patched), patch)) => {
                    let mutated = Some(&patched) != versioned.object.as_ref();
                    place.annotate(attributes, hook, Some(&patch), mutated);
                    mutated.then_some(patched)
                }
                Err(failure) => {
                    place.annotate(attributes, hook, None, false);
                    hook.judge(attributes, &place, failure)?;
                    None
                }
            };
            if let Some(patched) = changed {
                let back = request::taken_back(attributes, &resource, patched).await?;
                if let Some(object) = attributes.object.as_deref_mut() {
                    *object = back;
                }
                attributes.reinvocation.require();
                attributes.reinvocation.wanted = true;
            }
            if hook.reinvocable {
                attributes.reinvocation.ran.push(hook.id.clone());
            }
        }
        if attributes.reinvocation.wanted {
            attributes.reinvocation.last_output = attributes.object.as_deref().cloned();
        }
        Ok(())
    }
}

pub struct Validating(pub Arc<Dynamic>);

#[async_trait]
impl Plugin for Validating {
    fn name(&self) -> &'static str {
        "ValidatingAdmissionWebhook"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn validate(&self, attributes: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let hooks = self.0.validating_webhooks.load();
        if hooks.is_empty() || exempt(attributes) {
            return Ok(());
        }
        let mut asked = Vec::new();
        for (index, hook) in hooks.iter().enumerate() {
            if let Some((resource, versioned)) = hook.wants(&self.0, attributes).await? {
                let place = WebhookPosition {
                    sort: "validating",
                    round: 0,
                    index,
                };
                asked.push((hook, resource, versioned, place));
            }
        }
        let began = Instant::now();
        let mut running: FuturesUnordered<_> = asked
            .iter()
            .map(|(hook, resource, versioned, place)| async move {
                match hook.call(attributes, resource, versioned, false).await {
                    Ok(_) => Ok(()),
                    Err(failure) => hook.judge(attributes, place, failure),
                }
            })
            .collect();
        // All are heard, though the first refusal decides: upstream's webhooks count on being called.
        let mut outcome = Ok(());
        while let Some(judged) = running.next().await {
            if outcome.is_ok() {
                outcome = judged;
            }
        }
        attributes.recorder.webhook_took(began.elapsed());
        outcome
    }
}
