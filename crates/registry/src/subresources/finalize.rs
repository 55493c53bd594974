//! `namespaces/finalize`: the namespace controller's last word. Only `spec.finalizers` may change.

use serde_json::Value;
use skiff_meta::field;

use crate::object;

pub fn prepare(new: &mut Value, old: &Value) {
    let finalizers = object::at(new, &["spec", "finalizers"]).cloned();
    let version = object::metadata(new, "resourceVersion").cloned();
    *new = old.clone();
    match finalizers {
        Some(list) => object::put(new, &["spec", "finalizers"], list),
        None => {
            if let Some(spec) = new.get_mut("spec").and_then(Value::as_object_mut) {
                spec.remove("finalizers");
            }
        }
    }
    if let Some(version) = version {
        object::set(new, "resourceVersion", version);
    }
}

pub fn validate(_: &Value, _: &Value) -> Vec<field::Error> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_finalizers_change() {
        let old = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Terminating"}});
        let mut new = json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}, "status": {"phase": "Active"}});
        prepare(&mut new, &old);
        assert_eq!(
            new,
            json!({"metadata": {"name": "n"}, "spec": {}, "status": {"phase": "Terminating"}})
        );
    }
}
