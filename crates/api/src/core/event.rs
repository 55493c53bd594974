//! Events, in the shape of the core group and in that of `events.k8s.io`.

use serde_json::{Value, json};

use crate::errors::Errors;
use crate::kind::{Again, BASE, Kind, NAME, text as column, wide};
use crate::node::{Node, at, number, text};
use crate::row;

pub static EVENT: Kind = Kind {
    kind: "Event",
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        let field = if at(object, "regarding").is_null() {
            "involvedObject"
        } else {
            "regarding"
        };
        let about = root.field(field);
        let (own, other) = (text(object, "metadata.namespace"), about.field("namespace"));
        // Cluster-scoped objects have their events in the default namespace.
        let matches = if other.is_empty() {
            ["", "default", "kube-system"].contains(&own)
        } else {
            other.str() == own
        };
        if !matches {
            let at = root.field("involvedObject.namespace");
            errors.invalid_value(&at, other.str(), "does not match event.namespace");
        }
        errors.into_vec()
    },
    validate_update: |new, _| (EVENT.validate)(new),
    selectable: |object| {
        let about = |field: &str| event_object(object, field).to_owned();
        let controller = match text(object, "reportingComponent") {
            "" => text(object, "reportingController"),
            component => component,
        };
        let source = match text(object, "source.component") {
            "" => controller,
            component => component,
        };
        vec![
            ("involvedObject.kind", about("kind")),
            ("involvedObject.namespace", about("namespace")),
            ("involvedObject.name", about("name")),
            ("involvedObject.uid", about("uid")),
            ("involvedObject.apiVersion", about("apiVersion")),
            ("involvedObject.resourceVersion", about("resourceVersion")),
            ("involvedObject.fieldPath", about("fieldPath")),
            ("reason", text(object, "reason").to_owned()),
            ("reportingComponent", controller.to_owned()),
            ("source", source.to_owned()),
            ("type", text(object, "type").to_owned()),
        ]
    },
    columns: EVENT_COLUMNS,
    row: event_row,
    allow_create_on_update: true,
    name_rule: |_, _| Vec::new(),
    update_again: Again::None,
    status_again: Again::None,
    qualified_finalizers: false,
    ..BASE
};

pub static EVENTS_EVENT: Kind = Kind {
    group: "events.k8s.io",
    kind: "Event",
    validate: |object| (EVENT.validate)(object),
    validate_update: |new, _| (EVENT.validate)(new),
    selectable: |object| {
        // The newer API calls the same field by another name.
        (EVENT.selectable)(object)
            .into_iter()
            .map(|(name, value)| match name {
                "involvedObject.kind" => ("regarding.kind", value),
                "involvedObject.namespace" => ("regarding.namespace", value),
                "involvedObject.name" => ("regarding.name", value),
                "involvedObject.uid" => ("regarding.uid", value),
                "involvedObject.apiVersion" => ("regarding.apiVersion", value),
                "involvedObject.resourceVersion" => ("regarding.resourceVersion", value),
                "involvedObject.fieldPath" => ("regarding.fieldPath", value),
                "reportingComponent" => ("reportingController", value),
                other => (other, value),
            })
            .collect()
    },
    columns: EVENT_COLUMNS,
    row: event_row,
    allow_create_on_update: true,
    name_rule: |_, _| Vec::new(),
    update_again: Again::Change,
    ..BASE
};

const EVENT_COLUMNS: &[crate::kind::Column] = &[
    column("Last Seen"),
    column("Type"),
    column("Reason"),
    column("Object"),
    wide("Subobject"),
    wide("Source"),
    column("Message"),
    wide("First Seen"),
    wide("Count"),
    crate::kind::Column { priority: 1, ..NAME },
];

/// A field of what the event is about, in either shape.
fn event_object<'a>(event: &'a Value, field: &str) -> &'a str {
    let about = match at(event, "involvedObject") {
        Value::Null => at(event, "regarding"),
        about => about,
    };
    text(about, field)
}

fn first_set<'a>(event: &'a Value, paths: &[&str]) -> &'a str {
    paths
        .iter()
        .map(|p| text(event, p))
        .find(|t| !t.is_empty())
        .unwrap_or("")
}

fn event_row(event: &Value, now: i64) -> Vec<Value> {
    let first = first_set(
        event,
        &["firstTimestamp", "deprecatedFirstTimestamp", "eventTime"],
    );
    let last = first_set(
        event,
        &[
            "series.lastObservedTime",
            "lastTimestamp",
            "deprecatedLastTimestamp",
            "firstTimestamp",
            "eventTime",
        ],
    );
    let count = [
        number(event, "series.count"),
        number(event, "count"),
        number(event, "deprecatedCount"),
    ]
    .into_iter()
    .find(|n| *n != 0)
    .unwrap_or(1);
    let (kind, name) = (
        event_object(event, "kind").to_lowercase(),
        event_object(event, "name"),
    );
    let target = if name.is_empty() {
        kind
    } else {
        format!("{kind}/{name}")
    };
    let component = first_set(
        event,
        &[
            "source.component",
            "deprecatedSource.component",
            "reportingComponent",
            "reportingController",
        ],
    );
    let host = first_set(
        event,
        &["source.host", "deprecatedSource.host", "reportingInstance"],
    );
    let source = if host.is_empty() {
        component.to_owned()
    } else {
        format!("{component}, {host}")
    };
    vec![
        json!(row::since(last, now)),
        json!(text(event, "type")),
        json!(text(event, "reason")),
        json!(target),
        json!(event_object(event, "fieldPath")),
        json!(source),
        json!(first_set(event, &["message", "note"]).trim()),
        json!(row::since(first, now)),
        json!(count),
        row::name(event),
    ]
}
