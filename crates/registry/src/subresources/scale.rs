//! `autoscaling/v1` Scale: the replica count of a workload, by itself.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::{Value, json};
use skiff_api::facts;
use skiff_meta::selector::LabelSelector;
use skiff_meta::{GroupKind, Status, field};
use skiff_schema::TypeId;
use skiff_schema::apply::{Managed, ManagerId, Operation, Set};

const API_VERSION: &str = "autoscaling/v1";
const SUBRESOURCE: &str = "scale";

use crate::fields::{self, FieldManager, OneVersion};
use crate::{Registry, Resource, object};

/// The Scale of a workload.
pub(crate) fn scale_of(workload: &Value) -> Value {
    let mut metadata = serde_json::Map::new();
    for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = object::metadata(workload, field) {
            metadata.insert(field.to_string(), value.clone());
        }
    }
    let replicas = |path: [&str; 2]| object::at(workload, &path).and_then(Value::as_i64).unwrap_or(0);
    let mut spec = json!({});
    let wanted = replicas(["spec", "replicas"]);
    if wanted != 0 {
        spec["replicas"] = json!(wanted);
    }
    let mut status = json!({"replicas": replicas(["status", "replicas"])});
    let selector = selector_text(object::at(workload, &["spec", "selector"]));
    if !selector.is_empty() {
        status["selector"] = json!(selector);
    }
    json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status})
}

/// Puts a Scale into its workload.
pub(crate) fn apply_scale(workload: &Value, scale: &Value) -> Result<Value, Status> {
    let replicas = object::at(scale, &["spec", "replicas"])
        .and_then(Value::as_i64)
        .unwrap_or(0);
    if replicas < 0 {
        let path = field::Path::new("spec.replicas");
        let error = field::Error::invalid(&path, replicas, "must be greater than or equal to 0");
        return Err(Status::invalid(
            &GroupKind::new("autoscaling", "Scale"),
            object::name(workload),
            &[error],
        ));
    }
    let mut workload = workload.clone();
    object::put(&mut workload, &["spec", "replicas"], json!(replicas));
    for field in ["resourceVersion", "uid"] {
        match object::text(scale, field) {
            "" if field == "resourceVersion" => object::set(&mut workload, field, ""),
            "" => {}
            text => object::set(&mut workload, field, text),
        }
    }
    Ok(workload)
}

/// The type of a Scale.
pub fn scale_type() -> Result<TypeId, Status> {
    facts::schema()
        .by_gvk("autoscaling", "v1", "Scale")
        .ok_or_else(|| Status::internal("no type Scale"))
}

/// The columns of built-in kinds.
pub(crate) fn columns() -> Value {
    let column = |name: &str, kind: &str| {
        let description = skiff_api::column_description("Scale", name);
        json!({"name": name, "type": kind, "format": "", "description": description, "priority": 0})
    };
    json!([
        column("Name", "string"),
        column("Desired", "integer"),
        column("Available", "integer"),
        column("Age", "string")
    ])
}

/// Who writes a Scale, and how.
pub enum ScaleWrite<'a> {
    /// The Scale as it shall be.
    Update { scale: Value, manager: &'a str },
    Apply {
        config: &'a Value,
        manager: &'a str,
        force: bool,
    },
}

/// The Scale of a stored workload with who owns it, as a patch finds it.
pub fn owned_scale(resource: &Resource, workload: &Value) -> Result<Value, Status> {
    let owners = Managed::decode(object::metadata(workload, "managedFields"))
        .map_err(|error| Status::failure(500, "", error))?;
    let mut scale = resource.strategy.scale(workload)?;
    let path = Set::of_fields(&[&resource.strategy.replicas()]);
    fields::put(&mut scale, owners_of_scale(&owners, &path).encode());
    Ok(scale)
}

/// COMPAT: a patch may name the object by its uid, and is refused in the name of the subresource.
pub fn check_uid(resource: &Resource, workload: &Value, scale: &Value) -> Result<(), Status> {
    let (given, own) = (object::uid(scale), object::uid(workload));
    if given.is_empty() || given == own {
        return Ok(());
    }
    let mut of_scale = resource.group_resource.clone();
    of_scale.resource.push_str("/scale");
    let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {own}");
    Err(Status::conflict(&of_scale, object::name(workload), why))
}

impl Registry {
    /// Writes the Scale of a stored workload. Owners of `spec.replicas` are the same in both.
    pub fn write_scale(
        &self,
        resource: &Resource,
        workload: &Value,
        write: ScaleWrite<'_>,
    ) -> Result<Value, Status> {
        static EMPTY: OnceLock<Value> = OnceLock::new();
        static UNOWNED: OnceLock<Set> = OnceLock::new();
        let id = scale_type()?;
        let empty = EMPTY.get_or_init(|| {
            let mut empty = json!({"kind": "Scale", "apiVersion": API_VERSION});
            skiff_schema::normalise(facts::schema(), id, &mut empty);
            empty
        });
        let versions = OneVersion {
            api_version: API_VERSION,
            id,
        };
        let manager = FieldManager {
            versions: &versions,
            api_version: API_VERSION,
            kind: "Scale",
            subresource: SUBRESOURCE,
            empty,
            ignored: UNOWNED.get_or_init(|| fields::unowned(&Set::default())),
            now: self.now_text(),
        };
        let owners = Managed::decode(object::metadata(workload, "managedFields"))
            .map_err(|error| Status::failure(500, "", error))?;
        let path = Set::of_fields(&[&resource.strategy.replicas()]);
        let live = owned_scale(resource, workload)?;
        let (scale, managed) = match write {
            ScaleWrite::Update {
                mut scale,
                manager: name,
            } => {
                let claimed = fields::take(&mut scale);
                skiff_schema::normalise(facts::schema(), id, &mut scale);
                let managed = manager.update(Some(&live), &scale, claimed, name);
                (scale, managed)
            }
            ScaleWrite::Apply {
                config,
                manager: name,
                force,
            } => {
                let outcome = manager.apply(Some(&live), config, name, force)?;
                (outcome.object.unwrap_or(live), outcome.managed)
            }
        };
        let mut written = resource.strategy.put_scale(workload, &scale)?;
        let scaled = Managed::decode(Some(&managed)).map_err(|error| Status::failure(500, "", error))?;
        let owners = owners_of_workload(owners, scaled, &path, &resource.api_version);
        fields::put(&mut written, owners.encode());
        Ok(written)
    }
}

/// Who owns the replicas of a workload owns those of its Scale.
fn owners_of_scale(owners: &Managed, path: &Set) -> Managed {
    let mut scale = Managed::default();
    for (id, manager) in &owners.0 {
        if !manager.set.intersection(path).is_empty() {
            let mut manager = manager.clone();
            manager.set = Set::of_fields(&[&["spec", "replicas"]]);
            manager.api_version = API_VERSION.to_string();
            let mut id = id.clone();
            if id.operation == Operation::Update {
                id.api_version = API_VERSION.to_string();
            }
            scale.0.insert(id, manager);
        }
    }
    scale
}

/// The owners of a workload after its Scale was written.
///
/// COMPAT: upstream tells updaters apart by their version, so that one who owned the replicas gets an entry
/// of its own for them, and entries that come from a Scale have no time.
fn owners_of_workload(owners: Managed, mut scaled: Managed, path: &Set, api_version: &str) -> Managed {
    let in_scale = Set::of_fields(&[&["spec", "replicas"]]);
    let mut out = Managed::default();
    let times: BTreeMap<ManagerId, Option<String>> = owners
        .0
        .iter()
        .map(|(id, manager)| (id.clone(), manager.time.clone()))
        .collect();
    for (id, mut manager) in owners.0 {
        if !manager.set.intersection(path).is_empty() && scaled.0.remove(&id).is_none() {
            // Taken by the writer of the Scale.
            manager.set = manager.set.difference(path);
        }
        if !manager.set.is_empty() {
            out.0.insert(id, manager);
        }
    }
    for (id, mut manager) in scaled.0 {
        if !manager.set.intersection(&in_scale).is_empty() {
            manager.set = path.clone();
            manager.api_version = api_version.to_string();
            manager.time = times.get(&id).cloned().flatten();
            out.0.insert(id, manager);
        }
    }
    out
}

/// A selector in its query form; a plain map is a ReplicationController's.
fn selector_text(selector: Option<&Value>) -> String {
    let Some(selector) = selector.and_then(Value::as_object) else {
        return String::new();
    };
    let is_map = !selector.is_empty() && selector.values().all(Value::is_string);
    let mut terms = Vec::new();
    let labels = if is_map {
        Some(selector)
    } else {
        selector.get("matchLabels").and_then(Value::as_object)
    };
    for (key, value) in labels.into_iter().flatten() {
        terms.push((key.clone(), format!("{key}={}", value.as_str().unwrap_or(""))));
    }
    for expression in selector
        .get("matchExpressions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let key = expression
            .get("key")
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_string();
        let mut values: Vec<&str> = expression
            .get("values")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        values.sort_unstable();
        let text = match expression.get("operator").and_then(Value::as_str).unwrap_or("") {
            "In" => format!("{key} in ({})", values.join(",")),
            "NotIn" => format!("{key} notin ({})", values.join(",")),
            "Exists" => key.clone(),
            "DoesNotExist" => format!("!{key}"),
            _ => continue,
        };
        terms.push((key, text));
    }
    terms.sort_by(|a, b| a.0.cmp(&b.0));
    let text = terms
        .into_iter()
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join(",");
    debug_assert!(LabelSelector::parse(&text).is_ok(), "{text}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales() {
        let workload = json!({"metadata": {"name": "web", "uid": "u", "resourceVersion": "5", "labels": {"a": "b"}},
            "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "In", "values": ["b", "a"]}]}},
            "status": {"replicas": 2}});
        let scale = scale_of(&workload);
        assert_eq!(scale["spec"]["replicas"], 3);
        assert_eq!(
            scale["status"],
            json!({"replicas": 2, "selector": "app=web,tier in (a,b)"})
        );
        assert!(scale["metadata"].get("labels").is_none());
        let changed = apply_scale(
            &workload,
            &json!({"metadata": {"resourceVersion": "4"}, "spec": {"replicas": 7}}),
        )
        .expect("applies");
        assert_eq!(
            (
                changed["spec"]["replicas"].as_i64(),
                object::resource_version(&changed)
            ),
            (Some(7), "4")
        );
        assert!(apply_scale(&workload, &json!({"spec": {"replicas": -1}})).is_err());
    }
}
