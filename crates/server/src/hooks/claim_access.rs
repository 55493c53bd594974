//! Who may write which part of a ResourceClaim's status. `resourceclaims/status` alone is not enough: an allocation
//! needs `resourceclaims/binding`, and the status of a device `resourceclaims/driver` for its driver, where a driver
//! that runs on the claim's own node needs the lesser verb.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use skiff_auth::{Attributes, UserInfo};
use skiff_meta::{GroupKind, Status, field};
use skiff_registry::{Resource, object};

use crate::chain::forbidden;
use crate::server::Inner;

const GROUP: &str = "resource.k8s.io";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Checks a write of the status `new` over `old`. Other kinds pass.
pub async fn check(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    verb: &str,
    new: &Value,
    old: Option<&Value>,
) -> Result<(), Status> {
    if resource.facts.group != GROUP || resource.facts.plural != "resourceclaims" {
        return Ok(());
    }
    let Some(old) = old else { return Ok(()) };
    let asked = |subresource, verb, namespace, name| Attributes {
        verb,
        is_resource: true,
        group: GROUP,
        version: resource.facts.version,
        resource: "resourceclaims",
        subresource,
        namespace,
        name,
        ..Attributes::default()
    };
    let mut errors = Vec::new();
    if ["allocation", "reservedFor"]
        .iter()
        .any(|part| of_status(new, part) != of_status(old, part))
    {
        let asked = asked("binding", verb, "", "");
        if let Some(why) = refused(inner, user, &asked).await {
            let detail = format!(
                "changing status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\", verb=\"{verb}\" permission: {why}"
            );
            errors.push(field::Error::forbidden(
                &field::Path::new("status.allocation"),
                detail,
            ));
        }
    }
    // Without an allocation there are no devices to tell of: they are dropped.
    if let Some(allocation) = of_status(new, "allocation") {
        let mut verbs = vec![format!("arbitrary-node:{verb}")];
        if runs_on(user, allocation) {
            verbs.insert(0, format!("associated-node:{verb}"));
        }
        for driver in changed_drivers(new, old) {
            let mut first = None;
            for verb in &verbs {
                let asked = asked("driver", verb, object::namespace(old), driver);
                match refused(inner, user, &asked).await {
                    None => {
                        first = None;
                        break;
                    }
                    why => first = first.or(why),
                }
            }
            if let Some(why) = first {
                let detail = format!(
                    "changing status.devices requires resource=\"resourceclaims/driver\", verb=\"[{}]\" permission: {why}",
                    verbs.join(" ")
                );
                errors.push(field::Error::forbidden(
                    &field::Path::new("status.devices"),
                    detail,
                ));
            }
        }
    }
    if errors.is_empty() {
        return Ok(());
    }
    let kind = GroupKind::new(GROUP, resource.facts.kind);
    Err(Status::invalid(&kind, object::name(old), &errors))
}

/// A part of the status; an empty one is none.
fn of_status<'a>(claim: &'a Value, part: &str) -> Option<&'a Value> {
    let found = object::at(claim, &["status", part])?;
    let is_empty = found.is_null() || found.as_array().is_some_and(Vec::is_empty);
    (!is_empty).then_some(found)
}

async fn refused(inner: &Inner, user: &UserInfo, asked: &Attributes<'_>) -> Option<String> {
    let decided = inner.authorizer.decide(user, asked, false).await;
    (!decided.allowed).then(|| forbidden(user, asked, &decided.reason).message)
}

/// The drivers whose devices were added, changed or removed.
fn changed_drivers<'a>(new: &'a Value, old: &'a Value) -> BTreeSet<&'a str> {
    let devices = |claim: &'a Value| -> BTreeMap<[&'a str; 4], &'a Value> {
        let list = of_status(claim, "devices").and_then(Value::as_array);
        let text = |device: &'a Value, name: &str| device[name].as_str().unwrap_or_default();
        let key = |device| ["driver", "pool", "device", "shareID"].map(|name| text(device, name));
        list.into_iter()
            .flatten()
            .map(|device| (key(device), device))
            .collect()
    };
    let (new, old) = (devices(new), devices(old));
    let differs = |key: &&[&'a str; 4]| new.get(*key) != old.get(*key);
    new.keys()
        .chain(old.keys())
        .filter(differs)
        .map(|key| key[0])
        .collect()
}

/// Whether the user is a service account whose token was issued for a pod on the node of the allocation.
fn runs_on(user: &UserInfo, allocation: &Value) -> bool {
    let terms = allocation["nodeSelector"]["nodeSelectorTerms"].as_array();
    let [term] = terms.map(Vec::as_slice).unwrap_or_default() else {
        return false;
    };
    let list = |name: &str| term[name].as_array().map(Vec::as_slice).unwrap_or_default();
    let ([], [by_field]) = (list("matchExpressions"), list("matchFields")) else {
        return false;
    };
    let values = by_field["values"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let ([node], true) = (
        values,
        by_field["key"] == "metadata.name" && by_field["operator"] == "In",
    ) else {
        return false;
    };
    let named = user.extra.get(NODE_NAME).map(Vec::as_slice).unwrap_or_default();
    user.name.starts_with("system:serviceaccount:")
        && matches!(named, [name] if !name.is_empty() && node == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn drivers_and_nodes() {
        let claim = |devices: Value| json!({"status": {"devices": devices}});
        let device =
            |driver: &str, ready: bool| json!({"driver": driver, "pool": "p", "device": "d", "ready": ready});
        let old = claim(json!([
            device("same", true),
            device("gone", true),
            device("changed", true)
        ]));
        let new = claim(json!([
            device("same", true),
            device("changed", false),
            device("new", true)
        ]));
        let changed: Vec<&str> = changed_drivers(&new, &old).into_iter().collect();
        assert_eq!(changed, ["changed", "gone", "new"]);
        assert!(changed_drivers(&old, &old).is_empty());

        let mut user = UserInfo::service_account("ns", "driver");
        let allocation = json!({"nodeSelector": {"nodeSelectorTerms": [{"matchFields":
            [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}});
        assert!(!runs_on(&user, &allocation));
        user.extra.insert(NODE_NAME.to_owned(), vec!["n1".to_owned()]);
        assert!(runs_on(&user, &allocation));
        assert!(!runs_on(&user, &json!({})));
        user.name = "somebody".to_owned();
        assert!(!runs_on(&user, &allocation));
    }
}
