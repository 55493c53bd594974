//! Events between events.k8s.io/v1 and the core version, which is stored.

use serde_json::Value;

use crate::walk::rename;

const EVENT_FIELDS: [(&str, &str); 4] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
];

pub(super) fn to_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, new, old);
    }
    rename(map, "deprecatedSource", "source");
    rename(map, "deprecatedCount", "count");
    rename(map, "reportingController", "reportingComponent");
}

pub(super) fn from_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, old, new);
    }
    rename(map, "source", "deprecatedSource");
    rename(map, "count", "deprecatedCount");
    rename(map, "reportingComponent", "reportingController");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn there_and_back() {
        let event = json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod"}, "note": "n", "deprecatedCount": 2, "reportingController": "c"});
        let mut other = event.clone();
        to_core(&mut other);
        assert_eq!(
            other,
            json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod"}, "message": "n", "count": 2, "reportingComponent": "c"})
        );
        from_core(&mut other);
        assert_eq!(other, event);
    }
}
