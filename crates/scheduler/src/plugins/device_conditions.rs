//! Binding conditions of allocated devices: a pod is bound only when its devices' drivers say that they are ready for it.

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim};

/// How far the devices of a claim are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    Waiting,
    /// One of them never will be.
    Failed(String),
}

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten())
}

fn conditions(result: &DeviceRequestAllocationResult) -> &[String] {
    result.binding_conditions.as_deref().unwrap_or_default()
}

/// True if a device of the claim has conditions at all.
pub(crate) fn has_conditions(claim: &ResourceClaim) -> bool {
    results(claim).any(|result| !conditions(result).is_empty())
}

fn status_of<'a>(
    claim: &'a ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> Option<&'a AllocatedDeviceStatus> {
    let devices = claim.status.as_ref()?.devices.as_ref()?;
    devices.iter().find(|one| {
        one.driver == result.driver
            && one.pool == result.pool
            && one.device == result.device
            && one.share_id == result.share_id
    })
}

pub(crate) fn readiness(claim: &ResourceClaim) -> Readiness {
    for result in results(claim).filter(|result| !conditions(result).is_empty()) {
        let Some(status) = status_of(claim, result) else {
            return Readiness::Waiting;
        };
        let held = |name: &String| {
            let mut known = status.conditions.iter().flatten();
            known.find(|one| one.type_ == *name && one.status == "True")
        };
        if let Some(failed) = result.binding_failure_conditions.iter().flatten().find_map(held) {
            return Readiness::Failed(format!(
                "device binding failed: claim={}, reason={}, message={:?}",
                claim.metadata.name.as_deref().unwrap_or_default(),
                failed.reason,
                failed.message
            ));
        }
        if !conditions(result).iter().all(|name| held(name).is_some()) {
            return Readiness::Waiting;
        }
    }
    Readiness::Ready
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn claim(conditions: Value) -> ResourceClaim {
        let result = json!({"request": "r", "driver": "d", "pool": "p", "device": "x",
            "bindingConditions": ["Attached", "Warm"], "bindingFailureConditions": ["Broken"]});
        let other = json!({"request": "r", "driver": "d", "pool": "p", "device": "y"});
        let mut claim = json!({"metadata": {"name": "c"}, "spec": {}, "status": {"allocation": {"devices": {"results": [other, result]}}}});
        if !conditions.is_null() {
            claim["status"]["devices"] =
                json!([{"driver": "d", "pool": "p", "device": "x", "conditions": conditions}]);
        }
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn all_conditions_must_hold_and_no_failure() {
        let condition = |name: &str, status: &str| {
            json!({"type": name, "status": status, "reason": "R", "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let check = |conditions: Value, expected: Readiness| {
            assert_eq!(readiness(&claim(conditions.clone())), expected, "{conditions}");
        };
        check(Value::Null, Readiness::Waiting);
        check(json!([condition("Attached", "True")]), Readiness::Waiting);
        check(
            json!([condition("Attached", "True"), condition("Warm", "False")]),
            Readiness::Waiting,
        );
        let both = [condition("Attached", "True"), condition("Warm", "True")];
        check(json!(both), Readiness::Ready);
        let failed = "device binding failed: claim=c, reason=R, message=\"m\"";
        check(
            json!([both[0], both[1], condition("Broken", "True")]),
            Readiness::Failed(failed.to_owned()),
        );
        assert!(has_conditions(&claim(Value::Null)));
        let none: ResourceClaim = serde_json::from_value(json!({"metadata": {}, "spec": {}})).unwrap();
        assert_eq!(
            (has_conditions(&none), readiness(&none)),
            (false, Readiness::Ready)
        );
    }
}
