//! The status of a ValidatingAdmissionPolicy: its expressions are checked against the types of the objects that it is
//! for, as the server describes them, and what does not fit is told. Nothing depends on it: the policy works all the
//! same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::admissionregistration::v1::{
    NamedRuleWithOperations, ValidatingAdmissionPolicy, ValidatingAdmissionPolicySpec,
};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Map, Value, json};
use skiff_cel::admission::Environment;
use skiff_cel::{DeclType, Schema};
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

const FIELD_MANAGER: &str = "validatingadmissionpolicy-status";
/// No more types than this are looked at for one policy.
const MOST_TYPES: usize = 10;

/// Group, version, resource or kind: in the order in which types are looked at.
type Named = (String, String, String);

/// The resources that a policy names. A rule that is for all groups or all versions names none.
fn resources(rules: &[NamedRuleWithOperations]) -> Vec<Named> {
    let mut found = Vec::new();
    for rule in rules {
        let list = |list: &Option<Vec<String>>| {
            let mut list = list.clone().unwrap_or_default();
            list.sort();
            list
        };
        let (groups, versions) = (list(&rule.api_groups), list(&rule.api_versions));
        if groups.iter().chain(&versions).any(|name| name.contains('*')) {
            continue;
        }
        let resources = list(&rule.resources);
        let whole = |name: &&String| !name.contains(['*', '/']);
        for group in &groups {
            for version in &versions {
                for resource in resources.iter().filter(whole) {
                    found.push((group.clone(), version.clone(), resource.clone()));
                }
            }
        }
    }
    found
}

fn path(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("api/{version}")
    } else {
        format!("apis/{group}/{version}")
    }
}

/// What the server says of its types, asked for once a group and version.
struct Types<'a> {
    client: &'a Client,
    documents: BTreeMap<String, Value>,
}

impl Types<'_> {
    async fn get(&self, path: &str) -> Result<Value, Error> {
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| Error::Other(error.to_string()))?;
        match self.client.request(request).await {
            Ok(value) => Ok(value),
            // A group or version that is not there has no types.
            Err(error) if error.is_not_found() => Ok(Value::Null),
            Err(error) => Err(error.into()),
        }
    }

    /// The kinds behind resources, sorted.
    async fn kinds(&self, resources: Vec<Named>) -> Result<BTreeSet<Named>, Error> {
        let mut lists: BTreeMap<String, Value> = BTreeMap::new();
        let mut kinds = BTreeSet::new();
        let mut count = 0;
        for (group, version, resource) in resources {
            let path = format!("/{}", path(&group, &version));
            if !lists.contains_key(&path) {
                let list = self.get(&path).await?;
                lists.insert(path.clone(), list);
            }
            let served = lists[&path]["resources"].as_array().into_iter().flatten();
            for served in served.filter(|served| served["name"] == *resource) {
                let kind = served["kind"].as_str().unwrap_or_default();
                kinds.insert((group.clone(), version.clone(), kind.to_owned()));
                count += 1;
                if count == MOST_TYPES {
                    return Ok(kinds);
                }
            }
        }
        Ok(kinds)
    }

    /// The type of a kind; `None` if the server has no schema of it.
    async fn of(&mut self, (group, version, kind): &Named) -> Result<Option<Arc<DeclType>>, Error> {
        let path = path(group, version);
        if !self.documents.contains_key(&path) {
            let document = self.get(&format!("/openapi/v3/{path}")).await?;
            self.documents.insert(path.clone(), document);
        }
        let schemas = &self.documents[&path]["components"]["schemas"];
        let wanted = json!({"group": group, "version": version, "kind": kind});
        let is = |schema: &Value| {
            let kinds = schema["x-kubernetes-group-version-kind"].as_array();
            kinds.is_some_and(|kinds| kinds.contains(&wanted))
        };
        let found = schemas.as_object().into_iter().flatten();
        let Some((name, _)) = found.into_iter().find(|(_, schema)| is(schema)) else {
            return Ok(None);
        };
        let whole = inlined(schemas, &schemas[name], &mut vec![name.clone()]);
        Ok(DeclType::of(&Schema::parse(&whole), true, kind).map(Arc::new))
    }
}

/// The name that a schema refers to. A reference may be wrapped, to have a description of its own.
fn reference(schema: &Value) -> Option<&str> {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next();
    }
    schema["allOf"].as_array()?.iter().find_map(reference)
}

/// A schema with all that it refers to in place, but for prose. What refers to itself ends in an empty object.
fn inlined(schemas: &Value, schema: &Value, above: &mut Vec<String>) -> Value {
    if let Some(name) = reference(schema) {
        let name = name.to_owned();
        if above.contains(&name) {
            return json!({"type": "object"});
        }
        above.push(name);
        let name = above[above.len() - 1].as_str();
        let referred = &schemas[name];
        let whole = inlined(schemas, referred, above);
        above.pop();
        return whole;
    }
    let mut out = Map::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        let value = match key.as_str() {
            "description" | "default" | "example" => continue,
            "properties" => {
                let fields = value.as_object().into_iter().flatten();
                fields
                    .map(|(name, field)| (name.clone(), inlined(schemas, field, above)))
                    .collect()
            }
            "items" | "additionalProperties" if value.is_object() => inlined(schemas, value, above),
            _ => value.clone(),
        };
        out.insert(key.clone(), value);
    }
    // Built-in types say it by their format, custom ones by a word of their own.
    if out.get("format").and_then(Value::as_str) == Some("int-or-string") {
        out.insert("x-kubernetes-int-or-string".into(), json!(true));
    }
    Value::Object(out)
}

/// A type that a policy is checked against.
type Known = (Named, Option<Arc<DeclType>>);

/// What does not fit in the expressions of a policy, as its status tells it. `params` is none for a policy without.
fn warnings(
    spec: &ValidatingAdmissionPolicySpec,
    objects: &[Known],
    params: Option<Option<&Arc<DeclType>>>,
) -> Vec<Value> {
    let environments: Vec<(String, Environment)> = objects
        .iter()
        .map(|((group, version, kind), object)| {
            let mut environment = Environment::typed(object.as_ref(), params).with_variables();
            for variable in spec.variables.iter().flatten() {
                // What does not compile may be anything.
                let _ = environment.add_variable(&variable.name, &variable.expression);
            }
            let group_version = if group.is_empty() {
                version.clone()
            } else {
                format!("{group}/{version}")
            };
            (format!("{group_version}, Kind={kind}"), environment)
        })
        .collect();
    let check = |expression: &str| {
        let problems = environments.iter().filter_map(|(kind, environment)| {
            let problem = environment.check(expression).err()?;
            Some(format!("{kind}: {problem}\n"))
        });
        problems.collect::<Vec<_>>().join("\n")
    };
    let mut found = Vec::new();
    for (index, validation) in spec.validations.iter().flatten().enumerate() {
        let message = validation.message_expression.as_deref().unwrap_or("");
        for (field, expression) in [
            ("expression", validation.expression.as_str()),
            ("messageExpression", message),
        ] {
            if expression.is_empty() && field == "messageExpression" {
                continue;
            }
            let warning = check(expression);
            if !warning.is_empty() {
                found.push(json!({
                    "fieldRef": format!("spec.validations[{index}].{field}"), "warning": warning}));
            }
        }
    }
    found
}

async fn check_types(client: &Client, policy: &ValidatingAdmissionPolicy) -> Result<Action, Error> {
    let (name, spec) = (
        policy.metadata.name.clone().unwrap_or_default(),
        policy.spec.as_ref(),
    );
    let generation = policy.metadata.generation.unwrap_or(0);
    let observed = policy
        .status
        .as_ref()
        .and_then(|status| status.observed_generation);
    let Some(spec) = spec.filter(|_| generation > observed.unwrap_or(0)) else {
        return Ok(Action::Done);
    };
    let mut types = Types {
        client,
        documents: BTreeMap::new(),
    };
    let constraints = spec.match_constraints.as_ref();
    let rules = constraints.and_then(|constraints| constraints.resource_rules.as_deref());
    let mut objects = Vec::new();
    for kind in types.kinds(resources(rules.unwrap_or(&[]))).await? {
        if let Some(found) = types.of(&kind).await? {
            objects.push((kind, Some(found)));
        }
    }
    let mut params = None;
    if let Some(kind) = &spec.param_kind {
        let api_version = kind.api_version.clone().unwrap_or_default();
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let named = (
            group.to_owned(),
            version.to_owned(),
            kind.kind.clone().unwrap_or_default(),
        );
        params = Some(types.of(&named).await?);
    }
    let found = warnings(spec, &objects, params.as_ref().map(Option::as_ref));
    let mut checked = Map::new();
    if !found.is_empty() {
        checked.insert("expressionWarnings".into(), Value::Array(found));
    }
    let status = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
        "status": {"observedGeneration": generation, "typeChecking": checked}});
    let api: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_status(&name, &params, &Patch::Apply(status)).await {
        Ok(_) => Ok(Action::Done),
        Err(error) if error.is_not_found() => Ok(Action::Done),
        Err(error) => Err(error.into()),
    }
}

struct Policies {
    client: Client,
    policies: Informer<ValidatingAdmissionPolicy>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Policies {
        client: context.client.clone(),
        policies: context.informers.informer(),
    });
    context
        .controller("validatingadmissionpolicy-status", reconciler)
        .workers(context.workers())
        .owns(|r| &r.policies)
        .run()
        .await;
}

impl Reconcile for Policies {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        match self.policies.get("", &key.name) {
            Some(policy) => check_types(&self.client, &policy).await,
            None => Ok(Action::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_resources_a_policy_names() {
        let check = |rules: Value, expected: &[&str]| {
            let rules: Vec<NamedRuleWithOperations> = serde_json::from_value(rules).unwrap();
            let found = resources(&rules);
            let found: Vec<String> = found.iter().map(|(g, v, r)| format!("{g}/{v}/{r}")).collect();
            assert_eq!(found, expected);
        };
        check(
            json!([{"apiGroups": ["apps", ""], "apiVersions": ["v1"], "resources": ["pods", "pods/*", "*", "jobs"]}]),
            &["/v1/jobs", "/v1/pods", "apps/v1/jobs", "apps/v1/pods"],
        );
        check(
            json!([{"apiGroups": ["*"], "apiVersions": ["v1"], "resources": ["pods"]},
                {"apiGroups": [""], "apiVersions": ["*"], "resources": ["pods"]}]),
            &[],
        );
    }

    #[test]
    fn references_are_put_in_place() {
        let schemas = json!({
            "A": {"type": "object", "description": "prose", "properties": {
                "b": {"allOf": [{"$ref": "#/components/schemas/B"}], "description": "prose", "default": {}},
                "list": {"type": "array", "items": {"$ref": "#/components/schemas/B"}},
                "map": {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/A"}}}},
            "B": {"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string"}});
        let b = json!({"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string", "x-kubernetes-int-or-string": true});
        let expected = json!({"type": "object", "properties": {"b": b, "list": {"type": "array", "items": b},
            "map": {"type": "object", "additionalProperties": {"type": "object"}}}});
        assert_eq!(inlined(&schemas, &schemas["A"], &mut vec!["A".into()]), expected);
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "replicas": {"type": "integer", "format": "int32"}}}}});
        let object = DeclType::of(&Schema::parse(&schema), true, "Deployment").map(Arc::new);
        let kind = |kind: &str| ("apps".to_owned(), "v1".to_owned(), kind.to_owned());
        let objects = [(kind("Deployment"), object.clone()), (kind("ReplicaSet"), object)];
        let spec = json!({"variables": [{"name": "n", "expression": "object.spec.replicas"}], "validations": [
            {"expression": "object.spec.replicas > '1'", "messageExpression": "'wants more than ' + object.spec.replicas"},
            {"expression": "variables.n > 1 && authorizer.group('').resource('pods').check('get').allowed()"},
            {"expression": "object.spec.nope == 1"},
            {"expression": "params.anything == 1"}]});
        let spec: ValidatingAdmissionPolicySpec = serde_json::from_value(spec).unwrap();
        let check = |objects: &[Known], params: Option<Option<&Arc<DeclType>>>, expected: &[(&str, &str)]| {
            let found = warnings(&spec, objects, params);
            let found: Vec<(&str, &str)> = found
                .iter()
                .map(|found| {
                    (
                        found["fieldRef"].as_str().unwrap(),
                        found["warning"].as_str().unwrap(),
                    )
                })
                .collect();
            assert_eq!(found, expected);
        };
        let overload = "apps/v1, Kind=Deployment: ERROR: <input>:1:22: found no matching overload for '_>_' applied to '(int, string)'\n | object.spec.replicas > '1'\n | .....................^\n";
        let both = format!("{overload}\n{}", overload.replace("Deployment", "ReplicaSet"));
        let message = "apps/v1, Kind=Deployment: ERROR: <input>:1:20: found no matching overload for '_+_' applied to '(string, int)'\n | 'wants more than ' + object.spec.replicas\n | ...................^\n";
        let field = "apps/v1, Kind=Deployment: ERROR: <input>:1:12: undefined field 'nope'\n | object.spec.nope == 1\n | ...........^\n";
        check(
            &objects[..1],
            Some(None),
            &[
                ("spec.validations[0].expression", overload),
                ("spec.validations[0].messageExpression", message),
                ("spec.validations[2].expression", field),
            ],
        );
        let found = warnings(&spec, &objects, Some(None));
        assert_eq!(found[0]["warning"], *both);
        let params = "apps/v1, Kind=Deployment: ERROR: <input>:1:1: undeclared reference to 'params' (in container '')\n | params.anything == 1\n | ^\n";
        let found = warnings(&spec, &objects[..1], None);
        assert_eq!(
            found[3],
            json!({"fieldRef": "spec.validations[3].expression", "warning": params})
        );
        check(&[], Some(None), &[]);
    }
}
