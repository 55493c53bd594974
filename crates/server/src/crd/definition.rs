//! A CustomResourceDefinition, read once: everything that serving its objects needs.

use std::sync::OnceLock;

use serde_json::Value;
use skiff_registry::object;
use skiff_schema::structural::Structural;

use super::columns::Column;

/// A definition as it is served.
#[derive(Debug)]
pub struct Definition {
    pub group: String,
    pub names: Names,
    pub namespaced: bool,
    pub versions: Vec<Version>,
    /// The name of the version that objects are stored in.
    pub stored: String,
    /// The `conversion` of the spec, if a webhook converts.
    pub webhook: Option<Value>,
    pub terminating: bool,
}

/// Names that were accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    pub plural: String,
    pub singular: String,
    pub kind: String,
    pub list_kind: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
}

#[derive(Debug)]
pub struct Version {
    pub name: String,
    pub served: bool,
    /// The schema as it was given, to be published. What else is made of it is made when it is first needed: of
    /// hundreds of definitions, most are for nobody but their controllers, and a start must not wait for them.
    pub published: Value,
    schema: OnceLock<Structural>,
    pub status: bool,
    pub scale: Option<ScalePaths>,
    pub columns: Vec<Column>,
    /// Dotted paths, without a leading dot.
    pub selectable: Vec<String>,
    pub deprecation: Option<String>,
    apply: OnceLock<skiff_schema::apply::Definition>,
    rules: OnceLock<Option<skiff_cel::rules::Validator>>,
}

/// Where the numbers of the scale subresource are: map keys.
#[derive(Debug, Clone)]
pub struct ScalePaths {
    pub spec_replicas: String,
    pub status_replicas: String,
    pub label_selector: Option<String>,
}

fn texts(value: &Value, path: &[&str]) -> Vec<String> {
    object::at(value, path)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|text| text.as_str().map(str::to_owned))
        .collect()
}

impl Names {
    pub fn read(value: &Value) -> Names {
        let text = |key: &str| object::at_str(value, &[key]).to_owned();
        Names {
            plural: text("plural"),
            singular: text("singular"),
            kind: text("kind"),
            list_kind: text("listKind"),
            short_names: texts(value, &["shortNames"]),
            categories: texts(value, &["categories"]),
        }
    }
}

/// Whether a condition of a definition is true.
pub fn condition(definition: &Value, kind: &str) -> bool {
    super::names::find(definition, kind).is_some_and(|c| c["status"] == "True")
}

impl Definition {
    pub fn read(value: &Value) -> Definition {
        let spec = value.get("spec").unwrap_or(&Value::Null);
        let group = object::at_str(spec, &["group"]).to_owned();
        let accepted = object::at(value, &["status", "acceptedNames"]).unwrap_or(&Value::Null);
        let names = Names::read(accepted);
        let all: &[Value] = spec
            .get("versions")
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice);
        let named = |version: &Value| object::at_str(version, &["name"]).to_owned();
        let stored = all
            .iter()
            .find(|v| v["storage"] == true)
            .map(named)
            .unwrap_or_default();
        let webhook = object::at(spec, &["conversion"])
            .filter(|conversion| conversion["strategy"] == "Webhook")
            .cloned();
        Definition {
            namespaced: object::at_str(spec, &["scope"]) == "Namespaced",
            versions: all
                .iter()
                .map(|v| Version::read(v, all, &group, &names.kind))
                .collect(),
            stored,
            webhook,
            terminating: condition(value, "Terminating"),
            group,
            names,
        }
    }

    pub fn version(&self, name: &str) -> Option<&Version> {
        self.versions.iter().find(|version| version.name == name)
    }

    /// The version that an `apiVersion` of this group names.
    pub fn by_api_version(&self, api_version: &str) -> Option<&Version> {
        let (group, version) = api_version.rsplit_once('/')?;
        (group == self.group).then(|| self.version(version))?
    }
}

impl Version {
    fn read(value: &Value, all: &[Value], group: &str, kind: &str) -> Version {
        let text = |path: &[&str]| object::at_str(value, path).to_owned();
        let empty = Value::Object(serde_json::Map::new());
        let published = object::at(value, &["schema", "openAPIV3Schema"])
            .unwrap_or(&empty)
            .clone();
        let name = text(&["name"]);
        Version {
            apply: OnceLock::new(),
            served: value["served"] == true,
            schema: OnceLock::new(),
            rules: OnceLock::new(),
            published,
            status: object::at(value, &["subresources", "status"]).is_some(),
            scale: object::at(value, &["subresources", "scale"]).map(|scale| ScalePaths {
                spec_replicas: object::at_str(scale, &["specReplicasPath"]).to_owned(),
                status_replicas: object::at_str(scale, &["statusReplicasPath"]).to_owned(),
                label_selector: Some(object::at_str(scale, &["labelSelectorPath"]).to_owned())
                    .filter(|path| !path.is_empty()),
            }),
            columns: Column::all(value.get("additionalPrinterColumns")),
            selectable: object::at(value, &["selectableFields"])
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .map(|field| {
                    object::at_str(field, &["jsonPath"])
                        .trim_start_matches('.')
                        .to_owned()
                })
                .collect(),
            deprecation: (value["deprecated"] == true).then(|| {
                match value.get("deprecationWarning").and_then(Value::as_str) {
                    Some(warning) => warning.to_owned(),
                    None => deprecation(&name, all, group, kind),
                }
            }),
            name,
        }
    }

    /// The schema, prepared to prune, complete and check objects.
    pub fn schema(&self) -> &Structural {
        self.schema.get_or_init(|| Structural::parse(&self.published))
    }

    /// The schema as server-side apply sees it.
    pub fn apply(&self) -> &skiff_schema::apply::Definition {
        self.apply.get_or_init(|| apply_definition(&self.published))
    }

    /// The compiled rules of the schema, if it has any.
    pub fn rules(&self) -> Option<&skiff_cel::rules::Validator> {
        let compile = || skiff_cel::rules::Validator::new(&skiff_cel::Schema::parse(&self.published));
        self.rules.get_or_init(compile).as_ref()
    }
}

fn apply_definition(published: &Value) -> skiff_schema::apply::Definition {
    let built_in = skiff_api::facts::schema();
    let metadata = built_in
        .by_name("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
        .expect("the built-in tables have ObjectMeta");
    let given = published.as_object().is_some_and(|schema| !schema.is_empty());
    skiff_schema::apply::Definition::of_custom_resource(given.then_some(published), (built_in, metadata))
}

/// The warning of a deprecated version: it names the newest one that is better.
fn deprecation(name: &str, all: &[Value], group: &str, kind: &str) -> String {
    let mut better: Vec<&str> = all
        .iter()
        .filter(|v| v["served"] == true && v["deprecated"] != true)
        .map(|v| object::at_str(v, &["name"]))
        .filter(|other| super::names::version_order(name, other).is_lt())
        .collect();
    better.sort_by(|a, b| super::names::version_order(b, a));
    match better.first() {
        None => format!("{group}/{name} {kind} is deprecated"),
        Some(better) => format!("{group}/{name} {kind} is deprecated; use {group}/{better} {kind}"),
    }
}
