//! PersistentVolumes: since when one is in its phase.

use serde_json::Value;

use super::Hook;
use crate::object::at_str;
use crate::update::WriteScope;

pub struct Volumes;

impl Hook for Volumes {
    fn stamp(&self, new: &mut Value, old: &Value, part: WriteScope, now: &dyn Fn() -> String) {
        const TIME: &str = "lastPhaseTransitionTime";
        if !matches!(part, WriteScope::Status)
            || at_str(new, &["status", "phase"]) == at_str(old, &["status", "phase"])
        {
            return;
        }
        let untouched = match at_str(new, &["status", TIME]) {
            "" => true,
            time => time == at_str(old, &["status", TIME]),
        };
        if let Some(status) = new.get_mut("status").and_then(Value::as_object_mut)
            && untouched
        {
            status.insert(TIME.to_owned(), now().into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_phase_has_its_time() {
        let volume =
            |phase: &str, time: &str| json!({"status": {"phase": phase, "lastPhaseTransitionTime": time}});
        let check = |mut new: Value, expected: &str| {
            Volumes.stamp(&mut new, &volume("Pending", "1"), WriteScope::Status, &|| {
                "3".to_owned()
            });
            assert_eq!(new["status"]["lastPhaseTransitionTime"], expected);
        };
        check(volume("Bound", "1"), "3");
        check(volume("Bound", ""), "3");
        check(volume("Bound", "2"), "2");
        check(volume("Pending", "1"), "1");
    }
}
