//! The plugin of ValidatingAdmissionPolicy: every policy that is bound and matches is asked, and the first refusal is
//! the answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_admission::{Attributes, Lister, Operation, Plugin};
use skiff_cel::admission::Input;
use skiff_meta::Status;
use skiff_meta::status::Cause;
use skiff_registry::Registry;

use super::access::Access;
use super::binding::{Binding, params_known};
use super::matching::namespace;
use super::policy::{Policy, Violation};
use super::request::{self, Versioned};
use super::{Dynamic, exempt};

pub struct Validating(pub Arc<Dynamic>);

#[async_trait]
impl Plugin for Validating {
    fn name(&self) -> &'static str {
        "ValidatingAdmissionPolicy"
    }

    fn handles(&self, _: Operation) -> bool {
        true
    }

    async fn validate(&self, attributes: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let bindings = self.0.validating_bindings.load();
        if bindings.is_empty() || exempt(attributes) || asks_about_access(attributes) {
            return Ok(());
        }
        let mut refusal = None;
        for policy in self.0.validating_policies.load().iter() {
            let bound: Vec<&Binding> = bindings
                .iter()
                .map(|binding| &**binding)
                .filter(|binding| binding.policy == policy.name)
                .collect();
            if !bound.is_empty()
                && let Some(first) = self.ask(attributes, policy, &bound).await?
            {
                refusal.get_or_insert(first);
            }
        }
        refusal.map_or(Ok(()), Err)
    }
}

/// Policies see no reviews: who asks whether something is allowed changes nothing.
pub fn asks_about_access(attributes: &Attributes<'_>) -> bool {
    matches!(attributes.group, "authentication.k8s.io" | "authorization.k8s.io")
}

impl Validating {
    /// Asks one policy under its bindings: the first refusal, if there is one.
    async fn ask(
        &self,
        attributes: &Attributes<'_>,
        policy: &Policy,
        bindings: &[&Binding],
    ) -> Result<Option<Status>, Status> {
        let registry = &self.0.registry;
        let misconfigured = |binding: Option<&Binding>, why: String| {
            let of = if binding.is_some() { "binding" } else { "policy" };
            let violation = Violation {
                index: 0,
                message: format!("failed to configure {of}: {why}"),
                reason: String::new(),
            };
            (!policy.ignores_failure).then(|| refused(attributes, policy, binding, &violation))
        };
        let resource = match policy.matching.find(registry, attributes).await {
            Ok(Some(resource)) => resource,
            Ok(None) => return Ok(None),
            Err(status) => return Ok(misconfigured(None, status.message)),
        };
        if let Err(why) = params_known(registry, policy.param_kind.as_ref()) {
            return Ok(misconfigured(None, why));
        }
        let mut refusal: Option<Status> = None;
        let mut versioned: Option<(Versioned, Value, Option<Value>)> = None;
        let mut annotations: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for binding in bindings {
            let found = binding.params_for(registry, attributes, policy.param_kind.as_ref());
            let params = match found.await {
                Ok(params) => params,
                Err(why) => {
                    if let Some(status) = misconfigured(Some(binding), why) {
                        refusal.get_or_insert(status);
                    }
                    continue;
                }
            };
            if versioned.is_none() && !params.is_empty() {
                let objects = Versioned::new(attributes, &resource).await?;
                let space = namespace_object(registry, attributes).await?;
                versioned = Some((objects, request::value(attributes, &resource), space));
            }
            let Some((objects, request, space)) = &versioned else {
                continue;
            };
            for params in &params {
                let input = Input {
                    object: objects.object.as_ref(),
                    old_object: objects.old.as_ref(),
                    request: Some(request),
                    params: params.as_ref(),
                    namespace_object: space.as_ref(),
                    authorizer: Some(Access::of(&self.0.authorizer, attributes)),
                };
                let mut annotate = |key: &str, value: &str| {
                    let values = annotations.entry(key.to_owned()).or_default();
                    if !values.iter().any(|known| known == value) {
                        values.push(cut(value).to_owned());
                    }
                };
                for violation in policy.violations(&input, &mut annotate) {
                    if binding.audits && attributes.recorder.audited() {
                        let key = "validation.policy.admission.k8s.io/validation_failure";
                        attributes
                            .recorder
                            .annotate(key, failure(policy, binding, &violation));
                    }
                    if binding.warns {
                        attributes.recorder.warn(format!(
                            "Validation failed for ValidatingAdmissionPolicy '{}' with binding '{}': {}",
                            policy.name, binding.name, violation.message
                        ));
                    }
                    if binding.denies && refusal.is_none() {
                        refusal = Some(refused(attributes, policy, Some(binding), &violation));
                    }
                }
            }
        }
        for (key, values) in annotations {
            let key = format!("{}/{key}", policy.name);
            attributes.recorder.annotate(&key, values.join(", "));
        }
        Ok(refusal)
    }
}

/// Longer annotations are cut off.
const ANNOTATION_MAX: usize = 10 * 1024;

fn cut(value: &str) -> &str {
    let mut end = value.len().min(ANNOTATION_MAX);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    &value[..end]
}

/// A violation as the audit log has it.
fn failure(policy: &Policy, binding: &Binding, violation: &Violation) -> String {
    /// In upstream's order.
    #[derive(serde::Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Failure<'a> {
        message: &'a str,
        policy: &'a str,
        binding: &'a str,
        expression_index: usize,
        validation_actions: &'a [String],
    }
    let failure = Failure {
        message: &violation.message,
        policy: &policy.name,
        binding: &binding.name,
        expression_index: violation.index,
        validation_actions: &binding.actions,
    };
    serde_json::to_string(&[failure]).unwrap_or_default()
}

/// The namespace of a request as expressions see it: without what only machines read. A request for a namespace is in
/// none.
pub async fn namespace_object(
    registry: &Registry,
    attributes: &Attributes<'_>,
) -> Result<Option<Value>, Status> {
    let of_namespace = attributes.kind == "Namespace" && attributes.kind_group.is_empty();
    if attributes.namespace.is_empty() || of_namespace {
        return Ok(None);
    }
    let mut namespace = namespace(registry, attributes.namespace).await?;
    if let Some(metadata) = namespace.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
        metadata.remove("ownerReferences");
    }
    Ok(Some(namespace))
}

fn refused(
    attributes: &Attributes<'_>,
    policy: &Policy,
    binding: Option<&Binding>,
    violation: &Violation,
) -> Status {
    let by = match binding {
        Some(binding) => format!(" with binding '{}'", binding.name),
        None => String::new(),
    };
    let message = format!(
        "ValidatingAdmissionPolicy '{}'{by} denied request: {}",
        policy.name, violation.message
    );
    let mut status = attributes.forbidden(&message);
    (status.reason, status.code) = match violation.reason.as_str() {
        "Forbidden" => ("Forbidden".into(), 403),
        "Unauthorized" => ("Unauthorized".into(), 401),
        "RequestEntityTooLarge" => ("RequestEntityTooLarge".into(), 413),
        _ => ("Invalid".into(), 422),
    };
    status.details.get_or_insert_default().causes.push(Cause {
        message,
        ..Cause::default()
    });
    status
}
