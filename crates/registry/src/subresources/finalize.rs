//! `namespaces/finalize`: the namespace controller's last word. All but the status may change.

use serde_json::Value;
use skiff_meta::field;

pub fn prepare(new: &mut Value, old: &Value) {
    let Some(new) = new.as_object_mut() else { return };
    match old.get("status") {
        Some(status) => new.insert("status".to_string(), status.clone()),
        None => new.remove("status"),
    };
}

pub fn validate(new: &Value, old: &Value) -> Vec<field::Error> {
    skiff_api::core::namespace::validate_finalize_update(new, old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_status_stays() {
        let old = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Terminating"}});
        let mut new = json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}, "status": {"phase": "Active"}});
        prepare(&mut new, &old);
        assert_eq!(
            new,
            json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}, "status": {"phase": "Terminating"}})
        );
    }
}
