//! A structural schema as CEL sees it: the parts of an OpenAPI v3 schema that give values their types, sizes and
//! rules. It is parsed once from JSON; it does not check that the schema is valid.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use serde_json::Value as Json;

/// One rule of `x-kubernetes-validations`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rule {
    pub rule: String,
    pub message: String,
    pub message_expression: String,
    pub reason: Option<String>,
    pub field_path: String,
    pub optional_old_self: Option<bool>,
}

impl Rule {
    fn parse(json: &Json) -> Self {
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        Self {
            rule: text("rule"),
            message: text("message"),
            message_expression: text("messageExpression"),
            reason: json["reason"].as_str().map(str::to_owned),
            field_path: text("fieldPath"),
            optional_old_self: json["optionalOldSelf"].as_bool(),
        }
    }
}

/// What `additionalProperties` holds.
#[derive(Debug, Clone)]
pub enum AdditionalProperties {
    Allowed(bool),
    Schema(Arc<Schema>),
}

/// One node of a structural schema.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    pub kind: String,
    pub format: String,
    pub nullable: bool,
    pub int_or_string: bool,
    pub embedded_resource: bool,
    pub preserve_unknown_fields: bool,
    pub items: Option<Arc<Schema>>,
    /// `None` when there are no properties: an empty map means the same in a structural schema.
    pub properties: Option<BTreeMap<String, Arc<Schema>>>,
    pub additional_properties: Option<AdditionalProperties>,
    pub max_items: Option<i64>,
    pub max_length: Option<i64>,
    pub max_properties: Option<i64>,
    pub required: Vec<String>,
    pub enumeration: Vec<Json>,
    pub has_default: bool,
    pub list_type: Option<String>,
    pub list_map_keys: Vec<String>,
    pub map_type: Option<String>,
    pub rules: Vec<Rule>,
    /// Only rules inside `allOf` matter here: they apply to this very value.
    pub all_of: Vec<Arc<Schema>>,
    /// The same schema with `apiVersion`, `kind` and `metadata`, made when first asked for; `None` inside where
    /// the schema has them already.
    resource: OnceLock<Option<Arc<Schema>>>,
}

impl Schema {
    /// Reads an OpenAPI v3 schema as a CustomResourceDefinition holds it.
    pub fn parse(json: &Json) -> Self {
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        let flag = |name: &str| json[name].as_bool().unwrap_or_default();
        let number = |name: &str| json[name].as_i64();
        let strings = |name: &str| -> Vec<String> {
            let items = json[name].as_array().map(Vec::as_slice).unwrap_or_default();
            items.iter().filter_map(Json::as_str).map(str::to_owned).collect()
        };
        let children = |json: &Json| -> BTreeMap<String, Arc<Schema>> {
            let object = json.as_object().into_iter().flatten();
            object
                .map(|(name, child)| (name.clone(), Arc::new(Self::parse(child))))
                .collect()
        };
        let properties = children(&json["properties"]);
        Self {
            kind: text("type"),
            format: text("format"),
            nullable: flag("nullable"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            embedded_resource: flag("x-kubernetes-embedded-resource"),
            preserve_unknown_fields: flag("x-kubernetes-preserve-unknown-fields"),
            items: json["items"]
                .is_object()
                .then(|| Arc::new(Self::parse(&json["items"]))),
            properties: (!properties.is_empty()).then_some(properties),
            additional_properties: match &json["additionalProperties"] {
                Json::Bool(allowed) => Some(AdditionalProperties::Allowed(*allowed)),
                object @ Json::Object(_) => Some(AdditionalProperties::Schema(Arc::new(Self::parse(object)))),
                _ => None,
            },
            max_items: number("maxItems"),
            max_length: number("maxLength"),
            max_properties: number("maxProperties"),
            required: strings("required"),
            enumeration: json["enum"].as_array().cloned().unwrap_or_default(),
            has_default: !json["default"].is_null(),
            list_type: json["x-kubernetes-list-type"].as_str().map(str::to_owned),
            list_map_keys: strings("x-kubernetes-list-map-keys"),
            map_type: json["x-kubernetes-map-type"].as_str().map(str::to_owned),
            rules: json["x-kubernetes-validations"]
                .as_array()
                .map(|rules| rules.iter().map(Rule::parse).collect())
                .unwrap_or_default(),
            all_of: json["allOf"]
                .as_array()
                .map(|schemas| {
                    schemas
                        .iter()
                        .map(|schema| Arc::new(Self::parse(schema)))
                        .collect()
                })
                .unwrap_or_default(),
            resource: OnceLock::new(),
        }
    }

    /// The schema of additional properties, where there is one.
    pub fn additional_schema(&self) -> Option<&Arc<Schema>> {
        match &self.additional_properties {
            Some(AdditionalProperties::Schema(schema)) => Some(schema),
            _ => None,
        }
    }

    pub(crate) fn property(&self, name: &str) -> Option<&Arc<Schema>> {
        self.properties.as_ref()?.get(name)
    }

    /// The schema as it holds at the root of a resource: with `apiVersion`, `kind`, `metadata.name` and
    /// `metadata.generateName`, which rules may always read.
    pub fn as_resource(&self) -> &Schema {
        let resource = self.resource.get_or_init(|| {
            let is =
                |schema: Option<&Arc<Schema>>, kind: &str| schema.is_some_and(|schema| schema.kind == kind);
            let metadata = self.property("metadata");
            if is(self.property("kind"), "string")
                && is(self.property("apiVersion"), "string")
                && is(metadata, "object")
                && metadata.is_some_and(|schema| {
                    is(schema.property("name"), "string") && is(schema.property("generateName"), "string")
                })
            {
                return None;
            }
            let string = Arc::new(Self {
                kind: "string".to_owned(),
                ..Self::default()
            });
            let names = ["name", "generateName"];
            let metadata = Self {
                kind: "object".to_owned(),
                properties: Some(names.map(|name| (name.to_owned(), string.clone())).into()),
                ..Self::default()
            };
            let mut properties = self.properties.clone().unwrap_or_default();
            properties.insert("kind".to_owned(), string.clone());
            properties.insert("apiVersion".to_owned(), string);
            properties.insert("metadata".to_owned(), Arc::new(metadata));
            Some(Arc::new(Self {
                properties: Some(properties),
                resource: OnceLock::from(None),
                ..self.clone()
            }))
        });
        resource.as_deref().unwrap_or(self)
    }

    /// True when this schema or one below it has rules.
    pub fn has_rules(&self) -> bool {
        !self.rules.is_empty()
            || self.items.as_ref().is_some_and(|schema| schema.has_rules())
            || self.additional_schema().is_some_and(|schema| schema.has_rules())
            || self
                .properties
                .iter()
                .flat_map(BTreeMap::values)
                .any(|schema| schema.has_rules())
    }
}
