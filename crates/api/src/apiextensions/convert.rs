//! CustomResourceDefinitions as upstream keeps them: in v1beta1, which holds what all versions have in
//! common once, above the list of versions, and has other names for a few fields.

use serde_json::{Map, Value, json};

use crate::walk::rename;

/// What stands above the list of versions, and its name inside of it.
const COMMON: [(&str, &str); 4] = [
    ("validation", "schema"),
    ("subresources", "subresources"),
    ("additionalPrinterColumns", "additionalPrinterColumns"),
    ("selectableFields", "selectableFields"),
];

pub fn to_v1(definition: &mut Value) {
    let Some(spec) = definition.get_mut("spec").and_then(Value::as_object_mut) else {
        return;
    };
    let version = spec.remove("version");
    let common: Vec<(&str, Value)> = COMMON
        .into_iter()
        .filter_map(|(above, inside)| Some((inside, spec.remove(above)?)))
        .collect();
    let versions = spec.entry("versions").or_insert_with(|| match version {
        Some(name) => json!([{"name": name, "served": true, "storage": true}]),
        None => json!([]),
    });
    for version in versions.as_array_mut().into_iter().flatten() {
        let Some(version) = version.as_object_mut() else {
            continue;
        };
        for (name, value) in &common {
            version.entry(*name).or_insert_with(|| value.clone());
        }
        let columns = version.get_mut("additionalPrinterColumns");
        for column in columns.and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(column) = column.as_object_mut() {
                rename(column, "JSONPath", "jsonPath");
            }
        }
    }
    if let Some(conversion) = spec.get_mut("conversion").and_then(Value::as_object_mut) {
        let mut webhook = Map::new();
        for (old, new) in [
            ("webhookClientConfig", "clientConfig"),
            ("conversionReviewVersions", "conversionReviewVersions"),
        ] {
            if let Some(value) = conversion.remove(old) {
                webhook.insert(new.to_owned(), value);
            }
        }
        if !webhook.is_empty() {
            conversion.insert("webhook".to_owned(), Value::Object(webhook));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_versions_share_goes_into_each() {
        let mut definition = json!({"spec": {"group": "g", "version": "v1", "preserveUnknownFields": true,
            "validation": {"openAPIV3Schema": {"type": "object"}},
            "subresources": {"status": {}},
            "additionalPrinterColumns": [{"name": "a", "type": "string", "JSONPath": ".spec.a"}],
            "versions": [{"name": "v1"}, {"name": "v2", "subresources": {"scale": {}}}],
            "conversion": {"strategy": "Webhook", "webhookClientConfig": {"url": "u"},
                "conversionReviewVersions": ["v1"]}}});
        to_v1(&mut definition);
        let columns = json!([{"name": "a", "type": "string", "jsonPath": ".spec.a"}]);
        let schema = json!({"openAPIV3Schema": {"type": "object"}});
        assert_eq!(
            definition["spec"],
            json!({"group": "g", "preserveUnknownFields": true,
                "versions": [
                    {"name": "v1", "schema": schema, "subresources": {"status": {}}, "additionalPrinterColumns": columns},
                    {"name": "v2", "schema": schema, "subresources": {"scale": {}}, "additionalPrinterColumns": columns}],
                "conversion": {"strategy": "Webhook",
                    "webhook": {"clientConfig": {"url": "u"}, "conversionReviewVersions": ["v1"]}}})
        );
        let mut definition = json!({"spec": {"version": "v1"}});
        to_v1(&mut definition);
        assert_eq!(
            definition["spec"],
            json!({"versions": [{"name": "v1", "served": true, "storage": true}]})
        );
    }
}
