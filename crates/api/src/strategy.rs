//! The strategies most kinds share: what a create clears, what an update may not touch, when the
//! generation moves. A kind combines these; nothing here knows a kind.

use serde_json::Value;

use crate::equality::{Empty, same_at};
use crate::node::number;
use crate::walk;

/// Create: no status, generation 1.
pub fn create_with_generation(object: &mut Value) {
    walk::remove(object, "status");
    set_generation(object, 1);
}

/// Create: no status.
pub fn create_without_status(object: &mut Value) {
    walk::remove(object, "status");
}

/// Create: generation 1, everything else as given.
pub fn create_generation_only(object: &mut Value) {
    set_generation(object, 1);
}

/// Update: the status stays, the generation moves when the spec changed.
pub fn update_spec(new: &mut Value, old: &Value) {
    walk::copy(new, old, "status");
    bump_generation_if(new, old, &["spec"]);
}

/// Update: the status stays.
pub fn update_keep_status(new: &mut Value, old: &Value) {
    walk::copy(new, old, "status");
}

/// Update: the generation moves when the spec changed; there is no status to keep.
pub fn update_generation(new: &mut Value, old: &Value) {
    bump_generation_if(new, old, &["spec"]);
}

/// Status update: all but the status and the metadata stays.
pub fn status_only(new: &mut Value, old: &Value) {
    keep_all_but(new, old, &["status", "metadata", "apiVersion", "kind"]);
}

/// Status update of kinds whose status writer may not touch labels either.
pub fn status_only_keep_labels(new: &mut Value, old: &Value) {
    status_only(new, old);
    if let (Some(n), Some(o)) = (new.get_mut("metadata"), old.get("metadata")) {
        walk::copy(n, o, "labels");
    }
}

/// Status update of kinds whose status writer may not touch metadata at all.
pub fn status_only_keep_metadata(new: &mut Value, old: &Value) {
    status_only(new, old);
    if let (Some(n), Some(o)) = (new.get_mut("metadata"), old.get("metadata")) {
        for name in ["labels", "annotations", "finalizers", "ownerReferences"] {
            walk::copy(n, o, name);
        }
    }
}

/// Takes every top-level field from `old` except the named ones.
pub fn keep_all_but(new: &mut Value, old: &Value, mine: &[&str]) {
    let (Some(n), Some(o)) = (new.as_object_mut(), old.as_object()) else {
        return;
    };
    n.retain(|k, _| mine.contains(&k.as_str()));
    for (k, v) in o {
        if !mine.contains(&k.as_str()) {
            n.insert(k.clone(), v.clone());
        }
    }
}

pub fn set_generation(object: &mut Value, generation: i64) {
    if let Some(metadata) = object.get_mut("metadata") {
        walk::put(metadata, "generation", generation.into());
    }
}

/// Moves the generation on when one of the dotted paths differs.
pub fn bump_generation_if(new: &mut Value, old: &Value, paths: &[&str]) {
    bump_generation(new, old, paths, Empty::IsAbsent);
}

/// The same of kinds for which an empty list is not no list.
pub fn bump_generation_if_at_all(new: &mut Value, old: &Value, paths: &[&str]) {
    bump_generation(new, old, paths, Empty::IsThere);
}

fn bump_generation(new: &mut Value, old: &Value, paths: &[&str], empty: Empty) {
    if paths.iter().any(|path| !same_at(new, old, path, empty)) {
        set_generation(new, number(old, "metadata.generation") + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn spec_update_keeps_status_and_moves_generation() {
        let old = json!({"metadata": {"generation": 3}, "spec": {"a": 1}, "status": {"ok": true}});
        let mut new = json!({"metadata": {"generation": 3}, "spec": {"a": 2}, "status": {"ok": false}});
        update_spec(&mut new, &old);
        assert_eq!(
            new,
            json!({"metadata": {"generation": 4}, "spec": {"a": 2}, "status": {"ok": true}})
        );
        let mut unchanged = old.clone();
        update_spec(&mut unchanged, &old);
        assert_eq!(unchanged, old);
    }

    #[test]
    fn status_update_keeps_spec() {
        let old = json!({"metadata": {}, "spec": {"a": 1}, "status": {"ok": true}});
        let mut new = json!({"metadata": {}, "status": {"ok": false}, "extra": 1});
        status_only(&mut new, &old);
        assert_eq!(
            new,
            json!({"metadata": {}, "spec": {"a": 1}, "status": {"ok": false}})
        );
    }
}
