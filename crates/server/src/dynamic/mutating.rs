//! The plugin of MutatingAdmissionPolicy: every policy that is bound and matches changes the object in turn. Which ones
//! are asked is settled before the first of them changes anything.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use skiff_admission::{Attributes, Lister, Operation, Plugin};
use skiff_cel::admission::Input;
use skiff_meta::Status;
use skiff_meta::status::Cause;
use skiff_registry::Resource;

use super::access::Access;
use super::binding::{Binding, params_known};
use super::mutation::Policy;
use super::policies::{asks_about_access, namespace_object};
use super::request::{self, Versioned, taken_back};
use super::{Dynamic, exempt};

pub struct Mutating(pub Arc<Dynamic>);

/// A policy that is asked about a request, under a binding, with one of its parameters.
struct Invocation<'a> {
    policy: &'a Policy,
    binding: &'a Binding,
    resource: Arc<Resource>,
    params: Option<Value>,
    id: String,
}

/// Something that went wrong and is not ignored.
struct Refusal {
    message: String,
    /// Empty if the configuration is wrong.
    reason: &'static str,
}

#[async_trait]
impl Plugin for Mutating {
    fn name(&self) -> &'static str {
        "MutatingAdmissionPolicy"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Delete
    }

    async fn admit(&self, attributes: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        let bindings = self.0.mutating_bindings.load();
        if bindings.is_empty() || exempt(attributes) || asks_about_access(attributes) {
            return Ok(());
        }
        let policies = self.0.mutating_policies.load();
        let mut refusals = Vec::new();
        let mut invocations = Vec::new();
        for policy in policies.iter() {
            let bound: Vec<&Binding> = bindings
                .iter()
                .map(|binding| &**binding)
                .filter(|binding| binding.policy == policy.name)
                .collect();
            if !bound.is_empty() {
                self.collect(attributes, policy, &bound, &mut invocations, &mut refusals)
                    .await;
            }
        }
        if !invocations.is_empty() {
            self.invoke(attributes, &invocations, &mut refusals).await?;
        }
        refused(attributes, refusals)
    }
}

impl Mutating {
    /// Finds out with what a policy is asked.
    async fn collect<'a>(
        &self,
        attributes: &Attributes<'_>,
        policy: &'a Policy,
        bindings: &[&'a Binding],
        invocations: &mut Vec<Invocation<'a>>,
        refusals: &mut Vec<Refusal>,
    ) {
        let registry = &self.0.registry;
        let mut refuse = |binding: Option<&Binding>, why: String| {
            let of = if binding.is_some() { "binding" } else { "policy" };
            let why = format!("failed to configure {of}: {why}");
            refusals.extend(refusal(policy, binding, &why, ""));
        };
        let resource = match policy.matching.find(registry, attributes).await {
            Ok(Some(resource)) => resource,
            Ok(None) => return,
            Err(status) => return refuse(None, status.message),
        };
        if let Err(why) = params_known(registry, policy.param_kind.as_ref()) {
            return refuse(None, why);
        }
        for binding in bindings {
            let found = binding.params_for(registry, attributes, policy.param_kind.as_ref());
            match found.await {
                Err(why) => refuse(Some(binding), why),
                Ok(params) => {
                    invocations.extend(params.into_iter().enumerate().map(|(at, params)| Invocation {
                        policy,
                        binding,
                        resource: resource.clone(),
                        params,
                        id: format!("policy {}/{}/{at}", policy.name, binding.name),
                    }))
                }
            }
        }
    }

    /// Lets the policies change the object, one after the other.
    async fn invoke(
        &self,
        attributes: &mut Attributes<'_>,
        invocations: &[Invocation<'_>],
        refusals: &mut Vec<Refusal>,
    ) -> Result<(), Status> {
        let space = namespace_object(&self.0.registry, attributes).await?;
        let mut ran = false;
        for invocation in invocations {
            let (policy, binding, resource) = (invocation.policy, invocation.binding, &invocation.resource);
            let mut objects = Versioned::new(attributes, resource).await?;
            let request = request::value(attributes, resource);
            let with = Input {
                request: Some(&request),
                params: invocation.params.as_ref(),
                namespace_object: space.as_ref(),
                authorizer: Some(Access::of(&self.0.authorizer, attributes)),
                ..Input::default()
            };
            match policy.wants(objects.shown_to(&with)) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(why) => {
                    refusals.extend(refusal(policy, Some(binding), &why, "Invalid"));
                    continue;
                }
            }
            let again = attributes.reinvocation.again;
            if again && !attributes.reinvocation.due.contains(&invocation.id) {
                continue;
            }
            for mutation in &policy.mutations {
                let Some(current) = &objects.object else {
                    continue;
                };
                let changed = match policy.mutated(mutation, resource, objects.shown_to(&with)) {
                    Ok(changed) => changed,
                    // The later ones are asked nevertheless.
                    Err(why) => {
                        refusals.extend(refusal(policy, Some(binding), &why, "Invalid"));
                        continue;
                    }
                };
                ran = true;
                if changed != *current {
                    request::unknown_fields(attributes, resource, &changed)?;
                    let back = taken_back(attributes, resource, changed).await?;
                    if let Some(object) = attributes.object.as_deref_mut() {
                        *object = back;
                    }
                    objects = Versioned::new(attributes, resource).await?;
                }
            }
            if policy.reinvocable {
                attributes.reinvocation.ran.push(invocation.id.clone());
            }
        }
        // COMPAT: whether anything is different now does not matter.
        if ran {
            attributes.reinvocation.require();
            attributes.reinvocation.wanted = true;
        }
        Ok(())
    }
}

fn refusal(policy: &Policy, binding: Option<&Binding>, why: &str, reason: &'static str) -> Option<Refusal> {
    let by = match binding {
        Some(binding) => format!("policy '{}' with binding '{}'", policy.name, binding.name),
        None => format!("policy {}", skiff_meta::field::quote(&policy.name)),
    };
    (!policy.ignores_failure).then(|| Refusal {
        message: format!("{by} denied request: {why}"),
        reason,
    })
}

/// One answer for all that went wrong, in the words of the first.
fn refused(attributes: &Attributes<'_>, refusals: Vec<Refusal>) -> Result<(), Status> {
    let Some(first) = refusals.first() else {
        return Ok(());
    };
    let mut status = attributes.forbidden("");
    status.message = first.message.clone();
    if !first.reason.is_empty() {
        status.reason = first.reason.into();
    }
    let causes = refusals.into_iter().map(|refusal| Cause {
        message: refusal.message,
        ..Cause::default()
    });
    status.details.get_or_insert_default().causes.extend(causes);
    Err(status)
}
