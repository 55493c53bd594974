//! Conversion between the served versions of one stored resource. Where two versions have the same
//! shape only apiVersion differs, and nothing here is needed.

mod autoscaler;
mod definition;

use serde_json::{Map, Value};

/// How to get from a served version to the stored one and back.
pub struct Converter {
    pub to_stored: fn(&mut Value),
    pub from_stored: fn(&mut Value),
}

/// The converter of `kind` served as `group`/`version`, where its shape differs from the stored one.
pub fn converter(group: &str, version: &str, kind: &str) -> Option<Converter> {
    match (group, version, kind) {
        ("events.k8s.io", "v1", "Event") => Some(Converter {
            to_stored: event_to_core,
            from_stored: event_from_core,
        }),
        ("autoscaling", "v1", "HorizontalPodAutoscaler") => Some(Converter {
            to_stored: autoscaler::to_v2,
            from_stored: autoscaler::from_v2,
        }),
        // Never served; read from stores of upstream.
        ("apiextensions.k8s.io", "v1beta1", "CustomResourceDefinition") => Some(Converter {
            to_stored: definition::to_v1,
            from_stored: |_| {},
        }),
        _ => None,
    }
}

const EVENT_FIELDS: [(&str, &str); 4] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
];

fn event_to_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, new, old);
    }
    rename(map, "deprecatedSource", "source");
    rename(map, "deprecatedCount", "count");
    rename(map, "reportingController", "reportingComponent");
}

fn event_from_core(event: &mut Value) {
    let Some(map) = event.as_object_mut() else { return };
    for (new, old) in EVENT_FIELDS {
        rename(map, old, new);
    }
    rename(map, "source", "deprecatedSource");
    rename(map, "count", "deprecatedCount");
    rename(map, "reportingComponent", "reportingController");
}

fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.to_string(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn there_and_back() {
        let event = json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod"}, "note": "n", "deprecatedCount": 2, "reportingController": "c"});
        let mut other = event.clone();
        event_to_core(&mut other);
        assert_eq!(
            other,
            json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod"}, "message": "n", "count": 2, "reportingComponent": "c"})
        );
        event_from_core(&mut other);
        assert_eq!(other, event);
    }
}
