//! The request as webhooks and expressions see it, with its objects in the version that they ask for, and the way
//! back of an object that was changed.

use serde_json::{Value, json};
use skiff_admission::{Attributes, Operation};
use skiff_api::facts;
use skiff_cel::admission::Input;
use skiff_meta::Status;
use skiff_registry::{Resource, object};
use skiff_schema::decode;

/// The objects of a request in one version.
pub struct Versioned {
    pub object: Option<Value>,
    pub old: Option<Value>,
}

/// Whether the request is about something else than an object of the resource: a Scale, an Eviction, ...
fn of_other_kind(attributes: &Attributes<'_>, resource: &Resource) -> bool {
    attributes.kind != resource.kind
}

impl Versioned {
    /// `resource` is one of those that show the object of the request.
    pub async fn new(attributes: &Attributes<'_>, resource: &Resource) -> Result<Versioned, Status> {
        let mut versioned = Versioned {
            object: None,
            old: None,
        };
        if let Some(value) = attributes.object.as_deref() {
            versioned.object = Some(shown(attributes, resource, value).await?);
        }
        if let Some(value) = attributes.old_object {
            versioned.old = Some(shown(attributes, resource, value).await?);
        }
        Ok(versioned)
    }

    /// The objects, for an expression that sees all of `with` besides.
    pub fn shown_to<'a>(&'a self, with: &Input<'a>) -> Input<'a> {
        Input {
            object: self.object.as_ref(),
            old_object: self.old.as_ref(),
            ..with.clone()
        }
    }
}

async fn shown(attributes: &Attributes<'_>, resource: &Resource, value: &Value) -> Result<Value, Status> {
    if of_other_kind(attributes, resource) {
        return Ok(value.clone());
    }
    resource.strategy.shown(value).await
}

/// An object that was changed in the version of `resource`, as it goes on through the chain: of the fields that its
/// type knows, defaulted, and in the form that the request came in.
pub async fn taken_back(
    attributes: &Attributes<'_>,
    resource: &Resource,
    value: Value,
) -> Result<Value, Status> {
    if of_other_kind(attributes, resource) {
        let subresource = resource.facts.subresource(attributes.subresource);
        let id = subresource.map_or(resource.facts.type_id, |s| s.type_id);
        return checked(id, value);
    }
    let current = attributes.object.as_deref();
    resource.strategy.taken_back(value, current).await
}

/// Refuses fields that a mutation must not bring.
pub fn unknown_fields(attributes: &Attributes<'_>, resource: &Resource, value: &Value) -> Result<(), Status> {
    if of_other_kind(attributes, resource) {
        return Ok(());
    }
    resource.strategy.check_mutated(value)
}

fn checked(id: skiff_schema::TypeId, value: Value) -> Result<Value, Status> {
    decode::check(facts::schema(), id, value)
        .map(|checked| checked.value)
        .map_err(Status::internal)
}

/// The `request` of an AdmissionReview and of expressions, without its objects.
pub fn value(attributes: &Attributes<'_>, resource: &Resource) -> Value {
    let subresource = resource.facts.subresource(attributes.subresource);
    let (group, version, kind) = match subresource {
        Some(found) => (found.group, found.version, found.kind),
        None => (resource.facts.group, resource.facts.version, resource.facts.kind),
    };
    let user = attributes.user;
    let mut info = json!({"groups": user.groups, "username": user.name});
    if !user.uid.is_empty() {
        info["uid"] = json!(user.uid);
    }
    if !user.extra.is_empty() {
        info["extra"] = json!(user.extra);
    }
    let mut request = json!({
        "kind": {"group": group, "version": version, "kind": kind},
        "resource": {"group": resource.facts.group, "version": resource.facts.version, "resource": resource.facts.plural},
        "requestKind": {"group": attributes.kind_group, "version": attributes.kind_version, "kind": attributes.kind},
        "requestResource": {"group": attributes.group, "version": attributes.version, "resource": attributes.resource},
        "operation": attributes.operation.as_str(),
        "userInfo": info,
        "dryRun": attributes.dry_run,
        "options": options(attributes),
    });
    // COMPAT: a namespace is in itself.
    let namespace = if attributes.group.is_empty() && attributes.resource == "namespaces" {
        attributes.name
    } else {
        attributes.namespace
    };
    for (key, text) in [
        ("subResource", attributes.subresource),
        ("requestSubResource", attributes.subresource),
        ("name", attributes.name),
        ("namespace", namespace),
    ] {
        if !text.is_empty() {
            request[key] = json!(text);
        }
    }
    request
}

fn options(attributes: &Attributes<'_>) -> Value {
    let Some(options) = attributes.options else {
        return Value::Null;
    };
    // COMPAT: a patch is an update, or a create.
    let kind = match attributes.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
        Operation::Connect => return Value::Null,
    };
    let mut options = options.clone();
    object::put(&mut options, &["kind"], json!(kind));
    object::put(&mut options, &["apiVersion"], json!("meta.k8s.io/v1"));
    options
}
