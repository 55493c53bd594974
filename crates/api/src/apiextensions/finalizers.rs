//! Warnings about finalizers of custom objects whose names may clash.

use serde_json::Value;
use skiff_meta::{field, names};

use crate::node::list;

const STANDARD: [&str; 3] = ["orphan", "foregroundDeletion", "kubernetes"];

/// What is told of finalizers that a write adds.
pub fn warnings(new: &Value, old: Option<&Value>) -> Vec<String> {
    let of = |object: &Value| -> Vec<String> {
        let all = list(object, "metadata.finalizers").iter();
        all.filter_map(|f| f.as_str().map(str::to_owned)).collect()
    };
    let known = old.map(of).unwrap_or_default();
    let mut added: Vec<String> = of(new).into_iter().filter(|f| !known.contains(f)).collect();
    added.sort_unstable();
    added.dedup();
    let mut warnings = Vec::new();
    for finalizer in added {
        let shown = field::quote(&finalizer);
        for message in names::qualified_name(&finalizer) {
            warnings.push(format!("metadata.finalizers: {shown}: {message}"));
        }
        if finalizer.contains('/') || STANDARD.contains(&finalizer.as_str()) {
            continue;
        }
        let path = if finalizer.contains('.') {
            " including a path (/)"
        } else {
            ""
        };
        warnings.push(format!(
            "metadata.finalizers: {shown}: prefer a domain-qualified finalizer name{path} to avoid accidental conflicts with other finalizer writers"
        ));
    }
    warnings
}
