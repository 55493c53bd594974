//! Fields of a pod spec whose feature is off by default in this release. A write drops them, unless the object had
//! them before: then whoever turned the feature on may go on using them.

use serde_json::Value;

use crate::node::{at, list};
use crate::walk;

/// The features that are off by default and can be turned on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// Projections of ClusterTrustBundles.
    pub cluster_trust_bundles: bool,
    /// Projections of certificates that are issued to the pod.
    pub pod_certificates: bool,
    /// Pods that belong to a PodGroup.
    pub pod_groups: bool,
}

const CONTAINERS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];

/// Drops what is off from the spec at this path of an object.
pub fn drop_disabled(object: &mut Value, old: Option<&Value>, path: &str, on: Features) {
    let before = old.map_or(&Value::Null, |old| at(old, path));
    walk::each(object, path, &mut |spec| spec_fields(spec, before, on));
}

/// Drops what is off from a status.
pub fn drop_disabled_status(status: &mut Value, old: &Value) {
    if list(old, "nodeAllocatableResourceClaimStatuses").is_empty() {
        walk::remove(status, "nodeAllocatableResourceClaimStatuses");
    }
    const STATUSES: [&str; 3] = [
        "containerStatuses",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ];
    let in_use = STATUSES
        .iter()
        .flat_map(|name| list(old, name))
        .flat_map(|status| list(status, "volumeMounts"))
        .any(|mount| !at(mount, "volumeStatus").is_null());
    if !in_use {
        for name in STATUSES {
            walk::each(status, &format!("{name}[].volumeMounts[]"), &mut |mount| {
                walk::remove(mount, "volumeStatus");
            });
        }
    }
}

fn spec_fields(spec: &mut Value, old: &Value, on: Features) {
    for (source, is_on) in [
        ("clusterTrustBundle", on.cluster_trust_bundles),
        ("podCertificate", on.pod_certificates),
    ] {
        if !is_on && uses_source(spec, source) && !uses_source(old, source) {
            walk::each(spec, "volumes[].projected.sources[]", &mut |projection| {
                walk::remove(projection, source);
            });
        }
    }
    if !on.pod_groups && at(old, "schedulingGroup").is_null() {
        walk::remove(spec, "schedulingGroup");
    }
    if uses_stop_signal(spec) && !uses_stop_signal(old) {
        for containers in CONTAINERS {
            walk::each(spec, &format!("{containers}[]"), &mut drop_stop_signal);
        }
    }
}

fn uses_source(spec: &Value, source: &str) -> bool {
    list(spec, "volumes")
        .iter()
        .flat_map(|volume| list(volume, "projected.sources"))
        .any(|projection| !at(projection, source).is_null())
}

fn uses_stop_signal(spec: &Value) -> bool {
    CONTAINERS
        .iter()
        .flat_map(|name| list(spec, name))
        .any(|container| !at(container, "lifecycle.stopSignal").is_null())
}

fn drop_stop_signal(container: &mut Value) {
    let Some(lifecycle) = container.get_mut("lifecycle") else {
        return;
    };
    if at(lifecycle, "stopSignal").is_null() {
        return;
    }
    walk::remove(lifecycle, "stopSignal");
    if at(lifecycle, "postStart").is_null() && at(lifecycle, "preStop").is_null() {
        walk::remove(container, "lifecycle");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_of_features_that_are_off_are_dropped() {
        let with = |on: Features, new: Value, old: Option<Value>, expected: Value| {
            let mut object = json!({ "spec": new });
            let old = old.map(|spec| json!({ "spec": spec }));
            drop_disabled(&mut object, old.as_ref(), "spec", on);
            assert_eq!(object["spec"], expected);
        };
        let check = |new: Value, old: Option<Value>, expected: Value| {
            with(Features::default(), new, old, expected);
        };
        let stop = json!({"containers": [{"name": "c", "lifecycle": {"stopSignal": "SIGTERM"}}]});
        check(stop.clone(), None, json!({"containers": [{"name": "c"}]}));
        check(stop.clone(), Some(stop.clone()), stop);
        check(
            json!({"schedulingGroup": {"podGroupName": "g"}, "volumes": [{"projected": {"sources": [{"podCertificate": {}}]}}]}),
            None,
            json!({"volumes": [{"projected": {"sources": [{}]}}]}),
        );
        let sources = |sources: Value| json!({"volumes": [{"projected": {"sources": sources}}]});
        let both = sources(json!([{"clusterTrustBundle": {"name": "a"}}, {"podCertificate": {}}]));
        check(both.clone(), None, sources(json!([{}, {}])));
        check(both.clone(), Some(both.clone()), both.clone());
        let bundles = Features {
            cluster_trust_bundles: true,
            ..Features::default()
        };
        let only = sources(json!([{"clusterTrustBundle": {"name": "a"}}, {}]));
        with(bundles, both.clone(), None, only);
        let certificates = Features {
            pod_certificates: true,
            ..Features::default()
        };
        with(
            certificates,
            both,
            None,
            sources(json!([{}, {"podCertificate": {}}])),
        );
        let grouped = json!({"schedulingGroup": {"podGroupName": "g"}});
        check(grouped.clone(), Some(grouped.clone()), grouped.clone());
        let on = Features {
            pod_groups: true,
            ..Features::default()
        };
        with(on, grouped.clone(), None, grouped);
    }
}
