//! A binding: which policy it puts in force, for which requests, with which parameters, and what a violation does.

use serde_json::Value;
use skiff_admission::Attributes;
use skiff_meta::selector::LabelSelector;
use skiff_meta::{GroupVersionKind, Status};
use skiff_registry::{ListOptions, ReadAt, Registry, Resource, encode, object};

use super::matching::Matching;

pub struct Binding {
    pub name: String,
    pub policy: String,
    matching: Option<Matching>,
    pub denies: bool,
    pub warns: bool,
    pub audits: bool,
    /// What a violation does, as it was written.
    pub actions: Vec<String>,
    params: Option<ParamRef>,
}

struct ParamRef {
    name: String,
    namespace: String,
    selector: Option<Value>,
    denies_missing: bool,
}

impl Binding {
    pub fn read(value: &Value) -> Binding {
        let text = |path: &[&str]| object::at_str(value, path).to_owned();
        let actions = object::at(value, &["spec", "validationActions"]).and_then(Value::as_array);
        let does = |action: &str| actions.is_some_and(|list| list.iter().any(|a| a == action));
        let reference = object::at(value, &["spec", "paramRef"]);
        Binding {
            name: text(&["metadata", "name"]),
            policy: text(&["spec", "policyName"]),
            matching: object::at(value, &["spec", "matchResources"]).map(Matching::read_binding),
            denies: does("Deny"),
            warns: does("Warn"),
            audits: does("Audit"),
            actions: actions
                .into_iter()
                .flatten()
                .filter_map(|action| action.as_str().map(str::to_owned))
                .collect(),
            params: reference.map(|reference| ParamRef {
                name: object::at_str(reference, &["name"]).to_owned(),
                namespace: object::at_str(reference, &["namespace"]).to_owned(),
                selector: object::at(reference, &["selector"]).cloned(),
                denies_missing: object::at_str(reference, &["parameterNotFoundAction"]) == "Deny",
            }),
        }
    }

    /// What to ask the policy with for a request: nothing if the binding is not for it.
    pub async fn params_for(
        &self,
        registry: &Registry,
        attributes: &Attributes<'_>,
        kind: Option<&GroupVersionKind>,
    ) -> Result<Vec<Option<Value>>, String> {
        match self.matches(registry, attributes).await {
            Ok(false) => Ok(Vec::new()),
            Ok(true) => self.params(registry, kind, attributes.namespace).await,
            Err(status) => Err(status.message),
        }
    }

    async fn matches(&self, registry: &Registry, attributes: &Attributes<'_>) -> Result<bool, Status> {
        match &self.matching {
            None => Ok(true),
            Some(matching) => Ok(matching.find(registry, attributes).await?.is_some()),
        }
    }

    /// The parameters to ask the policy with, one after the other; `None` is to ask it without.
    async fn params(
        &self,
        registry: &Registry,
        kind: Option<&GroupVersionKind>,
        namespace: &str,
    ) -> Result<Vec<Option<Value>>, String> {
        let (Some(kind), Some(wanted)) = (kind, &self.params) else {
            return Ok(vec![None]);
        };
        let resource = param_resource(registry, kind).ok_or_else(|| {
            format!(
                "paramKind kind `{}, Kind={}` not known",
                kind.api_version(),
                kind.kind
            )
        })?;
        let namespace = match (resource.namespaced, wanted.namespace.as_str(), namespace) {
            (false, "", _) => "",
            (false, _, _) => {
                return Err(
                    "paramRef.namespace must not be provided for a cluster-scoped `paramKind`".to_owned(),
                );
            }
            (true, "", "") => {
                return Err(
                    "cannot use namespaced paramRef in policy binding that matches cluster-scoped resources"
                        .to_owned(),
                );
            }
            (true, "", of_request) => of_request,
            (true, given, _) => given,
        };
        let found = if wanted.name.is_empty() {
            selected(registry, &resource, namespace, wanted.selector.as_ref()).await
        } else {
            let found = registry
                .get(&resource, namespace, &wanted.name, ReadAt::Any)
                .await;
            found.map(|found| found.into_iter().collect())
        };
        let mut params = Vec::new();
        for mut value in found.map_err(|status| status.message)? {
            resource
                .strategy
                .serve_one(&mut value)
                .await
                .map_err(|status| status.message)?;
            params.push(Some(resource.served(&value).into_owned()));
        }
        if params.is_empty() && wanted.denies_missing {
            return Err("no params found for policy binding with `Deny` parameterNotFoundAction".to_owned());
        }
        Ok(params)
    }
}

/// A policy whose parameters are of a kind that nobody serves is wrong, whatever its bindings say.
pub fn params_known(registry: &Registry, kind: Option<&GroupVersionKind>) -> Result<(), String> {
    match kind {
        Some(kind) if param_resource(registry, kind).is_none() => Err(format!(
            "failed to find resource referenced by paramKind: '{}, Kind={}'",
            kind.api_version(),
            kind.kind
        )),
        _ => Ok(()),
    }
}

/// The resource of a kind that parametrises policies.
pub fn param_resource(registry: &Registry, kind: &GroupVersionKind) -> Option<std::sync::Arc<Resource>> {
    let is = |resource: &&std::sync::Arc<Resource>| {
        resource.is_stored()
            && resource.facts.group == kind.group
            && resource.facts.version == kind.version
            && resource.kind == kind.kind
    };
    let built_in = registry.resources.all().iter().find(is).cloned();
    built_in.or_else(|| registry.resources.customs().all.iter().find(is).cloned())
}

async fn selected(
    registry: &Registry,
    resource: &Resource,
    namespace: &str,
    selector: Option<&Value>,
) -> Result<Vec<Value>, Status> {
    let labels = selector.map_or_else(|| Ok(LabelSelector::default()), LabelSelector::from_value);
    let options = ListOptions {
        namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
        labels: labels.map_err(Status::bad_request)?,
        at: ReadAt::Any,
        ..ListOptions::default()
    };
    let listed = registry.list(resource, options).await?;
    listed
        .items
        .iter()
        .map(|entry| encode::decode(&entry.bytes))
        .collect()
}
