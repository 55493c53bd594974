//! Events, in the shape of the core group and in that of `events.k8s.io`.

use serde_json::{Value, json};
use skiff_meta::names;

use super::event_convert;
use crate::errors::Errors;
use crate::kind::{
    Again, BASE, Converter, Kind, NAME, Orphan, When, text as column, unsupported_field, wide,
};
use crate::node::{Node, at, is_empty, number, same, text};
use crate::{object_meta, row};

/// Events are kept for an hour, as upstream's `--event-ttl` has it.
const TTL_SECONDS: i64 = 3600;

pub static EVENT: Kind = Kind {
    kind: "Event",
    validate: |object| {
        let mut errors = Errors::new();
        legacy(object, "reportingComponent", &mut errors);
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
    name_rule: object_meta::path_segment,
    update_again: Again::None,
    status_again: Again::None,
    qualified_finalizers: false,
    metadata: When::Otherwise,
    ttl_seconds: Some(TTL_SECONDS),
    orphan: Orphan::Unsupported,
    // Who describes an object asks for its events.
    indexed_fields: &["involvedObject.name", "involvedObject.uid"],
    field_paths: &[("source", &["source.component", "reportingComponent"])],
    unknown_field: unsupported_field,
    ..BASE
};

pub static EVENTS_EVENT: Kind = Kind {
    group: "events.k8s.io",
    kind: "Event",
    validate: |object| {
        let mut errors = Errors::new();
        legacy(object, "reportingController", &mut errors);
        errors.extend(object_meta::validate(object, true, EVENTS_EVENT.name_rule));
        errors.extend(object_meta::qualified_finalizers(object));
        strict(object, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        legacy(new, "reportingController", &mut errors);
        unchanged(new, old, &mut errors);
        errors.into_vec()
    },
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
    update_again: Again::Change,
    metadata: When::Otherwise,
    converters: &[Converter {
        version: "v1",
        to_stored: event_convert::to_core,
        from_stored: event_convert::from_core,
    }],
    ttl_seconds: Some(TTL_SECONDS),
    orphan: Orphan::Unsupported,
    hidden_fields: &[
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "involvedObject.apiVersion",
        "involvedObject.resourceVersion",
        "involvedObject.fieldPath",
        "reportingComponent",
        "source",
    ],
    stored_fields: &[
        ("regarding.kind", "involvedObject.kind"),
        ("regarding.namespace", "involvedObject.namespace"),
        ("regarding.name", "involvedObject.name"),
        ("regarding.uid", "involvedObject.uid"),
        ("regarding.apiVersion", "involvedObject.apiVersion"),
        ("regarding.resourceVersion", "involvedObject.resourceVersion"),
        ("regarding.fieldPath", "involvedObject.fieldPath"),
        ("reportingController", "reportingComponent"),
    ],
    unknown_field: unsupported_field,
    ..BASE
};

/// What a field is called in the shape that is stored, and in the newer one.
fn either<'a>(event: &'a Value, stored: &str, newer: &str) -> &'a Value {
    match at(event, stored) {
        Value::Null => at(event, newer),
        value => value,
    }
}

/// The rules of both APIs: where the event is, and who reports it.
fn legacy(event: &Value, reporter: &str, errors: &mut Errors) {
    let root = Node::root(event);
    let (own, about) = (
        text(event, "metadata.namespace"),
        event_object(event, "namespace"),
    );
    let dated = !at(event, "eventTime").is_null();
    let matches = match (dated, about.is_empty()) {
        (false, true) => ["", "default"].contains(&own),
        (false, false) => about == own,
        (true, true) => ["default", "kube-system"].contains(&own),
        (true, false) => true,
    };
    if !matches {
        let at = root.field("involvedObject.namespace");
        errors.invalid_value(&at, about, "does not match event.namespace");
    }
    if dated {
        let controller = either(event, "reportingComponent", "reportingController");
        let place = root.field(reporter);
        let at = place.with(controller);
        errors.require(&at);
        for complaint in names::qualified_name(at.str()) {
            errors.invalid_value(&at, at.str(), complaint);
        }
        for (name, most, required) in [
            ("reportingInstance", 128, true),
            ("action", 128, true),
            ("reason", 128, true),
        ] {
            let at = root.field(name);
            if required {
                errors.require(&at);
            }
            if at.len() > most {
                errors.invalid_value(&at, "", format!("can have at most {most} characters"));
            }
        }
        let message = either(event, "message", "note").as_str().unwrap_or("");
        if message.len() > 1024 {
            errors.invalid_value(&root.field("message"), "", "can have at most 1024 characters");
        }
    }
    for complaint in names::dns1123_subdomain(own) {
        errors.invalid_value(&root.field("namespace"), own, complaint);
    }
}

/// What only the newer API asks of a new event.
fn strict(event: &Value, errors: &mut Errors) {
    let root = Node::root(event);
    series(&root, errors);
    if at(event, "eventTime").is_null() {
        errors.required(&root.field("eventTime"), "");
    }
    let kind = text(event, "type");
    if !["Normal", "Warning"].contains(&kind) {
        errors.invalid_value(&root.field("type"), "", format!("has invalid value: {kind}"));
    }
    for (stored, newer) in [
        ("firstTimestamp", "deprecatedFirstTimestamp"),
        ("lastTimestamp", "deprecatedLastTimestamp"),
        ("count", "deprecatedCount"),
        ("source", "deprecatedSource"),
    ] {
        let value = either(event, stored, newer);
        if !is_empty(value) && value.as_i64() != Some(0) {
            errors.invalid_value(&root.field(stored), "", "needs to be unset");
        }
    }
}

fn series(root: &Node, errors: &mut Errors) {
    let series = root.field("series");
    if series.is_set() {
        if series.field("count").int().unwrap_or(0) < 2 {
            errors.invalid_value(&series.field("count"), "", "should be at least 2");
        }
        if !series.field("lastObservedTime").is_set() {
            errors.required(&series.field("lastObservedTime"), "");
        }
    }
}

/// An event of the newer API only ever changes in its series.
fn unchanged(new: &Value, old: &Value, errors: &mut Errors) {
    let root = Node::root(new);
    if !same(at(new, "series"), at(old, "series")) {
        series(&root, errors);
    }
    for (stored, newer) in [
        ("involvedObject", "regarding"),
        // COMPAT: upstream looks at the reason twice.
        ("reason", "reason"),
        ("reason", "reason"),
        ("message", "note"),
        ("source", "deprecatedSource"),
        ("firstTimestamp", "deprecatedFirstTimestamp"),
        ("lastTimestamp", "deprecatedLastTimestamp"),
        ("count", "deprecatedCount"),
        ("type", "type"),
        ("eventTime", "eventTime"),
        ("action", "action"),
        ("related", "related"),
        ("reportingController", "reportingComponent"),
        ("reportingInstance", "reportingInstance"),
    ] {
        let at = root.field(stored);
        let (now, before) = (either(new, stored, newer), either(old, stored, newer));
        if stored.ends_with("Time") || stored.ends_with("Timestamp") {
            errors.immutable_as("", &at.with(now), before);
        } else {
            errors.immutable(&at.with(now), before);
        }
    }
}

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
