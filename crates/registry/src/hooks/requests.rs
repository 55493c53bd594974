//! CertificateSigningRequests: when a condition came and changed. PodCertificateRequests: a certificate begins about now.

use serde_json::{Value, json};
use skiff_meta::field;

use super::Hook;
use crate::object;
use crate::update::WriteScope;

pub struct Requests;

fn conditions(request: &Value) -> &[Value] {
    object::at(request, &["status", "conditions"])
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

impl Hook for Requests {
    /// Conditions are stamped where the client did not; they are written through subresources only.
    fn stamp(&self, new: &mut Value, old: &Value, part: WriteScope, now: &dyn Fn() -> String) {
        if !matches!(part, WriteScope::Other { .. }) {
            return;
        }
        let now = json!(now());
        let before = conditions(old);
        let list = new
            .get_mut("status")
            .and_then(|status| status.get_mut("conditions"))
            .and_then(Value::as_array_mut);
        for condition in list.into_iter().flatten() {
            if condition["lastUpdateTime"].is_null() {
                condition["lastUpdateTime"] = now.clone();
            }
            if condition["lastTransitionTime"].is_null() {
                let same = before.iter().find(|old| {
                    old["type"] == condition["type"]
                        && old["status"] == condition["status"]
                        && !old["lastTransitionTime"].is_null()
                });
                condition["lastTransitionTime"] =
                    same.map_or_else(|| now.clone(), |old| old["lastTransitionTime"].clone());
            }
        }
    }
}

pub struct PodRequests;

impl Hook for PodRequests {
    fn check_update(&self, new: &Value, old: &Value, part: WriteScope, now: i64) -> Vec<field::Error> {
        match part {
            WriteScope::Status => skiff_api::certificates::begins_now(new, old, now),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_stamped() {
        let part = WriteScope::Other {
            prepare: |_, _| {},
            validate: |_, _| Vec::new(),
        };
        let check = |part: WriteScope, old: Value, expected: Value| {
            let mut new = json!({"status": {"conditions": [{"type": "Approved", "status": "True"}]}});
            Requests.stamp(&mut new, &old, part, &|| "now".to_owned());
            assert_eq!(new["status"]["conditions"][0], expected);
        };
        let stamped = |since: &str| json!({"type": "Approved", "status": "True", "lastUpdateTime": "now", "lastTransitionTime": since});
        check(part, json!({}), stamped("now"));
        let old = json!({"status": {"conditions": [stamped("then")]}});
        check(part, old, stamped("then"));
        let plain = json!({"type": "Approved", "status": "True"});
        check(WriteScope::Main, json!({}), plain);
    }
}
