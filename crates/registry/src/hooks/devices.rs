//! Devices: who may ask for more than a user of one, and since when a device is tainted.

use serde_json::Value;
use skiff_meta::field;

use super::{Hook, Needed};
use crate::object::at;
use crate::update::WriteScope;

/// Namespaces in which claims may ask for access to devices that are in use.
const ADMIN_LABEL: &str = "resource.kubernetes.io/admin-access";

/// ResourceClaims and their templates.
pub struct Claims;

impl Hook for Claims {
    fn needs(&self, new: &Value, old: Option<&Value>, part: WriteScope) -> Option<Needed> {
        let asks = |entry: &Value, way: &[&str]| at(entry, way).and_then(Value::as_bool) == Some(true);
        let granted = |object: &Value| {
            let results = at(object, &["status", "allocation", "devices", "results"])?;
            results
                .as_array()?
                .iter()
                .position(|result| asks(result, &["adminAccess"]))
        };
        let path = match (old, part) {
            (None, _) => {
                let claim = at(new, &["spec", "spec"]).unwrap_or(new.get("spec")?);
                let requests = at(claim, &["devices", "requests"])?.as_array()?;
                let index = requests
                    .iter()
                    .position(|request| asks(request, &["exactly", "adminAccess"]))?;
                // COMPAT: upstream's path has neither `exactly` nor a template's second `spec`.
                format!("spec.devices.requests[{index}].adminAccess")
            }
            (Some(old), WriteScope::Status) => {
                if granted(old).is_some() {
                    return None;
                }
                let index = granted(new)?;
                format!("status.allocation.devices.results[{index}].adminAccess")
            }
            // What a claim asks for never changes.
            _ => return None,
        };
        let detail = format!(
            "admin access to devices requires the `{ADMIN_LABEL}: true` label on the containing namespace"
        );
        Some(Needed {
            label: ADMIN_LABEL,
            value: "true",
            otherwise: field::Error::forbidden(&field::Path::new(&path), detail),
        })
    }
}

/// ResourceSlices.
pub struct Slices;

impl Hook for Slices {
    fn stamp(&self, new: &mut Value, _old: &Value, part: WriteScope, now: &dyn Fn() -> String) {
        if !matches!(part, WriteScope::Main) {
            return;
        }
        let devices = new.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
        for device in devices.into_iter().flatten() {
            let taints = device.get_mut("taints").and_then(Value::as_array_mut);
            for taint in taints.into_iter().flatten().filter_map(Value::as_object_mut) {
                if taint.get("timeAdded").is_none_or(Value::is_null) {
                    taint.insert("timeAdded".to_owned(), now().into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(new: &Value, old: Option<&Value>, part: WriteScope, expected: Option<&str>) {
        let found = Claims.needs(new, old, part).map(|needed| needed.otherwise.path);
        assert_eq!(found.as_deref(), expected, "{new}");
    }

    #[test]
    fn admin_access_is_asked_for_once() {
        let claim = |asks: bool| json!({"devices": {"requests": [{"exactly": {}}, {"exactly": {"adminAccess": asks}}]}});
        let path = "spec.devices.requests[1].adminAccess";
        check(&json!({"spec": claim(true)}), None, WriteScope::Main, Some(path));
        check(&json!({"spec": claim(false)}), None, WriteScope::Main, None);
        check(
            &json!({"spec": {"spec": claim(true)}}),
            None,
            WriteScope::Main,
            Some(path),
        );
        let status =
            |asks: bool| json!({"status": {"allocation": {"devices": {"results": [{"adminAccess": asks}]}}}});
        let path = "status.allocation.devices.results[0].adminAccess";
        check(
            &status(true),
            Some(&status(false)),
            WriteScope::Status,
            Some(path),
        );
        check(&status(true), Some(&status(true)), WriteScope::Status, None);
        check(&status(true), Some(&status(false)), WriteScope::Main, None);
    }
}
