//! The group `apiregistration.k8s.io`: APIServices.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::core::config::decode;
use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, STATUS_ALONE, text as column};
use crate::node::{Node, at, list, text};
use crate::{row, strategy, walk};

pub static API_SERVICE: Kind = Kind {
    group: "apiregistration.k8s.io",
    kind: "APIService",
    default: |_, object| {
        walk::each(object, "spec.service", &mut |service| {
            walk::pointer(service, "port", 443)
        });
    },
    prepare_create: |object| {
        strategy::create_without_status(object);
        if at(object, "spec.service").is_null() {
            let now = at(object, "metadata.creationTimestamp").clone();
            let available = json!({"type": "Available", "status": "True", "lastTransitionTime": now,
                "reason": "Local", "message": "Local APIServices are always available"});
            walk::put(object, "status", json!({"conditions": [available]}));
        }
    },
    prepare_update: strategy::update_keep_status,
    prepare_status_update: strategy::status_only_keep_metadata,
    validate: |object| {
        let mut errors = Errors::new();
        rules(object, &mut errors);
        errors.into_vec()
    },
    validate_update: |new, _| (API_SERVICE.validate)(new),
    validate_status_update: |new, _| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        let conditions = root.field("status.conditions");
        for condition in conditions.items() {
            errors.one_of(&condition.field("status"), &["True", "False", "Unknown"]);
        }
        errors.into_vec()
    },
    columns: &[NAME, column("Service"), column("Available"), AGE],
    row: |object, now| {
        let service = match at(object, "spec.service") {
            Value::Null => "Local".to_owned(),
            s => format!("{}/{}", text(s, "namespace"), text(s, "name")),
        };
        let condition = list(object, "status.conditions")
            .iter()
            .find(|c| text(c, "type") == "Available");
        let status = match condition.map(|c| (text(c, "status"), text(c, "reason"))) {
            Some(("True", _)) => "True".to_owned(),
            Some((status, reason)) => format!("{status} ({reason})"),
            None => "Unknown".to_owned(),
        };
        vec![
            row::name(object),
            json!(service),
            json!(status),
            row::age(object, now),
        ]
    },
    has_status: true,
    // The core group is `v1.`, which is no DNS name.
    name_rule: names::path_segment,
    allow_unconditional_update: false,
    qualified_finalizers: false,
    // COMPAT: upstream's aggregator keeps its kind as JSON.
    stored_as_json: true,
    reset_fields: STATUS_ALONE,
    // COMPAT: upstream forgot it.
    status_table: false,
    ..BASE
};

fn rules(object: &Value, errors: &mut Errors) {
    let root = Node::root(object);
    let spec = root.field("spec");
    let (group, version) = (spec.field("group"), spec.field("version"));
    let wanted = format!("{}.{}", version.str(), group.str());
    for name in ["metadata.generateName", "metadata.name"].map(|name| root.field(name)) {
        // A name that is missing or no name has been told by now.
        if !name.is_empty() && names::path_segment(name.str(), false).is_empty() && name.str() != wanted {
            errors.invalid(
                &name,
                format!(
                    "must be `spec.version+\".\"+spec.group`: {}",
                    skiff_meta::field::quote(&wanted)
                ),
            );
        }
    }
    if group.is_empty() && version.str() != "v1" {
        errors.required(
            &group,
            "only v1 may have an empty group and it better be legacy kube",
        );
    }
    if !group.is_empty() {
        let complaints = names::dns1123_subdomain(group.str());
        if !complaints.is_empty() {
            errors.invalid(&group, complaints.join(","));
        }
    }
    let complaints = names::dns1035_label(version.str());
    if !complaints.is_empty() {
        errors.invalid_value(&version, version.str(), complaints.join(","));
    }
    for (field, most) in [("groupPriorityMinimum", 20_000), ("versionPriority", 1000)] {
        let at = spec.field(field);
        let value = at.int().unwrap_or(0);
        if value <= 0 || value > most {
            errors.invalid_value(&at, value, format!("must be positive and less than {most}"));
        }
    }
    let service = spec.field("service");
    if !service.is_set() {
        if !spec.field("caBundle").is_empty() {
            errors.invalid_value(
                &spec.field("caBundle"),
                format!("{} bytes", decode(spec.field("caBundle").str()).len()),
                "local APIServices may not have a caBundle",
            );
        }
        if spec.field("insecureSkipTLSVerify").bool() {
            errors.invalid(
                &spec.field("insecureSkipTLSVerify"),
                "local APIServices may not have insecureSkipTLSVerify",
            );
        }
        return;
    }
    errors.require(&service.field("namespace"));
    errors.require(&service.field("name"));
    let port = service.field("port");
    let number = port.int().unwrap_or(0);
    let complaints = names::port_number(number);
    if !complaints.is_empty() {
        errors.invalid_value(
            &port,
            number,
            format!("port is not valid: {}", complaints.join(", ")),
        );
    }
    if spec.field("insecureSkipTLSVerify").bool() && !spec.field("caBundle").is_empty() {
        errors.invalid(
            &spec.field("insecureSkipTLSVerify"),
            "may not be true if caBundle is present",
        );
    }
}
