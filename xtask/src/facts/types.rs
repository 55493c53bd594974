//! The type table: every type reachable from a served resource, with what Go, OpenAPI and protobuf
//! each know about its fields.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::go::{Body, GoField, Loader};
use super::resources::Group;

const META: &str = "k8s.io/apimachinery/pkg/apis/meta/v1";
const APIEXTENSIONS: &str = "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1";

/// Types that no resource reaches but clients and servers exchange all the same.
const EXTRA: &[(&str, &str, &str)] = &[
    (META, "Status", "v1"),
    (META, "DeleteOptions", "v1"),
    (META, "CreateOptions", "v1"),
    (META, "UpdateOptions", "v1"),
    (META, "PatchOptions", "v1"),
    (META, "GetOptions", "v1"),
    (META, "ListOptions", "v1"),
    (META, "WatchEvent", "v1"),
    (META, "APIVersions", "v1"),
    (META, "APIGroup", "v1"),
    (META, "APIGroupList", "v1"),
    (META, "APIResourceList", "v1"),
    (META, "List", "v1"),
    (META, "Table", "meta.k8s.io/v1"),
    (META, "PartialObjectMetadata", "meta.k8s.io/v1"),
    (META, "PartialObjectMetadataList", "meta.k8s.io/v1"),
    ("k8s.io/api/core/v1", "PodLogOptions", "v1"),
    ("k8s.io/api/core/v1", "RangeAllocation", "v1"),
    ("k8s.io/api/core/v1", "SerializedReference", "v1"),
    (
        "k8s.io/api/admission/v1",
        "AdmissionReview",
        "admission.k8s.io/v1",
    ),
    (
        "k8s.io/api/apidiscovery/v2",
        "APIGroupDiscoveryList",
        "apidiscovery.k8s.io/v2",
    ),
    (
        "k8s.io/api/apidiscovery/v2",
        "APIGroupDiscovery",
        "apidiscovery.k8s.io/v2",
    ),
    ("k8s.io/apimachinery/pkg/version", "Info", ""),
];

type Name = (String, String);

struct Table<'a> {
    loader: &'a mut Loader,
    definitions: &'a BTreeMap<String, Value>,
    queue: VecDeque<Name>,
    seen: BTreeSet<Name>,
}

pub fn collect(
    loader: &mut Loader,
    definitions: &BTreeMap<String, Value>,
    groups: &[Group],
) -> Result<String> {
    let mut table = Table {
        loader,
        definitions,
        queue: VecDeque::new(),
        seen: BTreeSet::new(),
    };
    let mut hidden_kinds: BTreeMap<Name, String> = BTreeMap::new();
    for (import, name, group_version) in EXTRA {
        let name = (import.to_string(), name.to_string());
        if !group_version.is_empty() {
            hidden_kinds.insert(name.clone(), group_version.to_string());
        }
        table.reach(name);
    }
    let served: BTreeSet<String> = groups
        .iter()
        .flat_map(|g| {
            g.versions.iter().map(|(v, _)| {
                if g.name.is_empty() {
                    v.clone()
                } else {
                    format!("{}/{v}", g.name)
                }
            })
        })
        .collect();
    for group in groups {
        for (version, resources) in &group.versions {
            for resource in resources {
                let own = (group.name.as_str(), version.as_str(), resource.kind.as_str());
                let list = format!("{}List", resource.kind);
                let subs = resource
                    .subresources
                    .iter()
                    .map(|s| (s.group.as_str(), s.version.as_str(), s.kind.as_str()));
                for (group, version, kind) in [own, (own.0, own.1, list.as_str())].into_iter().chain(subs) {
                    let import = import_of(group, version);
                    if !table.loader.package(&import)?.types.contains_key(kind) {
                        if kind.ends_with("List") {
                            continue; // what cannot be listed has no list
                        }
                        bail!("{import} has no {kind}");
                    }
                    let name = (import, kind.to_string());
                    let gv = if group.is_empty() {
                        version.to_string()
                    } else {
                        format!("{group}/{version}")
                    };
                    hidden_kinds.insert(name.clone(), gv);
                    table.reach(name);
                }
            }
        }
    }
    let mut lines: BTreeMap<Name, String> = BTreeMap::new();
    while let Some(name) = table.queue.pop_front() {
        let line = table
            .render(&name, &hidden_kinds, &served)
            .with_context(|| format!("{}.{}", name.0, name.1))?;
        lines.insert(name, line);
    }
    let mut out = String::from(
        "# Made by `cargo xtask facts`; not edited by hand. The grammar is in skiff-schema's types/table.rs.\n",
    );
    let mut last = "";
    for ((import, _), text) in &lines {
        if import != last {
            let _ = writeln!(out, "P {} {}", short(import), openapi_prefix(import));
            last = import;
        }
        out.push_str(text);
    }
    Ok(out)
}

/// The Go package of an API group version.
fn import_of(group: &str, version: &str) -> String {
    match group {
        "" => format!("k8s.io/api/core/{version}"),
        "apiextensions.k8s.io" => APIEXTENSIONS.to_string(),
        "apiregistration.k8s.io" => "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1".to_string(),
        _ => format!(
            "k8s.io/api/{}/{version}",
            group.split('.').next().unwrap_or(group)
        ),
    }
}

/// The last two path elements name a package well enough inside the table.
fn short(import: &str) -> String {
    let mut parts: Vec<_> = import.rsplit('/').take(2).collect();
    parts.reverse();
    parts.join("/")
}

fn openapi_prefix(import: &str) -> String {
    format!(
        "io.k8s.{}",
        import.trim_start_matches("k8s.io/").replace('/', ".")
    )
}

fn special(import: &str, name: &str) -> Option<char> {
    Some(match (import, name) {
        (META, "Time") => 'T',
        (META, "MicroTime") => 'M',
        (META, "Duration") => 'D',
        (META, "FieldsV1") => 'V',
        ("k8s.io/apimachinery/pkg/api/resource", "Quantity") => 'Q',
        ("k8s.io/apimachinery/pkg/util/intstr", "IntOrString") => 'I',
        ("k8s.io/apimachinery/pkg/runtime", "RawExtension") => 'R',
        (APIEXTENSIONS, "JSON") => 'J',
        (APIEXTENSIONS, "JSONSchemaPropsOrArray") => 'P',
        (APIEXTENSIONS, "JSONSchemaPropsOrBool") => 'W',
        (APIEXTENSIONS, "JSONSchemaPropsOrStringArray") => 'X',
        _ => return None,
    })
}

fn builtin(name: &str) -> Option<char> {
    Some(match name {
        "string" => 's',
        "bool" => 'b',
        "int32" => 'i',
        "int64" => 'l',
        "int" => 'n',
        "float64" => 'd',
        "interface{}" | "any" => 'A',
        _ => return None,
    })
}

struct Flat {
    number: String,
    json: String,
    shape: String,
    flags: String,
    default: Option<Value>,
}

impl Table<'_> {
    fn reach(&mut self, name: Name) {
        if self.seen.insert(name.clone()) {
            self.queue.push_back(name);
        }
    }

    /// Go source text of a type, as the table's shape text.
    fn shape(&mut self, text: &str, import: &str, imports: &BTreeMap<String, String>) -> Result<String> {
        if let Some(rest) = text.strip_prefix('*') {
            return Ok(format!("*{}", self.shape(rest, import, imports)?));
        }
        if text == "[]byte" {
            return Ok("y".into());
        }
        if let Some(rest) = text.strip_prefix("[]") {
            return Ok(format!("[]{}", self.shape(rest, import, imports)?));
        }
        if let Some(rest) = text.strip_prefix("map[") {
            let (key, value) = rest.split_once(']').context("map without a key")?;
            let key = if key == "string" {
                String::new()
            } else {
                self.go_name(key, import, imports)?
            };
            return Ok(format!("{{{key}}}{}", self.shape(value, import, imports)?));
        }
        if let Some(letter) = builtin(text) {
            return Ok(letter.to_string());
        }
        let (package, name) = match text.split_once('.') {
            Some((alias, name)) => (
                imports
                    .get(alias)
                    .with_context(|| format!("no import {alias}"))?
                    .clone(),
                name.to_string(),
            ),
            None => (import.to_string(), text.to_string()),
        };
        if let Some(letter) = special(&package, &name) {
            if "PWX".contains(letter) {
                self.reach((APIEXTENSIONS.to_string(), "JSONSchemaProps".to_string()));
            }
            return Ok(letter.to_string());
        }
        let declared = self.loader.package(&package)?;
        let go_name = format!("{}.{name}", declared.name);
        let declared = declared
            .types
            .get(&name)
            .with_context(|| format!("{package} has no {name}"))?
            .clone();
        match declared.body {
            Body::Struct(_) => {
                let reference = format!("@{}.{name}", short(&package));
                self.reach((package, name));
                Ok(reference)
            }
            Body::Named(under) => {
                let shape = self.shape(&under, &package, &declared.imports)?;
                // Upstream wraps such a list in a protobuf message of its own.
                let wrap = if declared.markers.iter().any(|m| m == "protobuf.nullable=true") {
                    "~"
                } else {
                    ""
                };
                Ok(if let Some(rest) = shape.strip_prefix("[]") {
                    format!("{wrap}[{go_name}]{rest}")
                } else if let Some(rest) = shape.strip_prefix('{') {
                    let (key, value) = rest.split_once('}').context("map shape")?;
                    format!("{{{key},{go_name}}}{value}")
                } else if shape.len() == 1 {
                    format!("{shape}:{go_name}")
                } else {
                    shape // a name for a named type keeps the inner one
                })
            }
        }
    }

    fn go_name(&mut self, text: &str, import: &str, imports: &BTreeMap<String, String>) -> Result<String> {
        let (package, name) = match text.split_once('.') {
            Some((alias, name)) => (imports.get(alias).context("import")?.clone(), name),
            None => (import.to_string(), text),
        };
        Ok(format!("{}.{name}", self.loader.package(&package)?.name))
    }

    /// `embed` has the Go names and protobuf numbers of the structs that are inlined here. A number is
    /// 0 where protobuf knows nothing of it (`TypeMeta`), so that its fields have no number either.
    fn flatten(
        &mut self,
        name: &Name,
        embed: Option<(String, String)>,
        out: &mut Vec<Flat>,
        definition: Option<&Value>,
    ) -> Result<()> {
        let declared = self
            .loader
            .package(&name.0)?
            .types
            .get(&name.1)
            .context("not declared")?
            .clone();
        let Body::Struct(fields) = declared.body else {
            bail!("not a struct")
        };
        for field in fields {
            let tag = field.tags.get("json").cloned().unwrap_or_default();
            let mut parts = tag.split(',');
            let json = parts.next().unwrap_or("").to_string();
            let options: Vec<&str> = parts.collect();
            let number: u32 = field
                .tags
                .get("protobuf")
                .and_then(|tag| tag.split(',').nth(1))
                .and_then(|n| n.parse().ok())
                .unwrap_or(0);
            if json == "-" {
                continue;
            }
            if json.is_empty() && field.name.is_empty() {
                let (package, inner) = match field.type_text.split_once('.') {
                    Some((alias, inner)) => (
                        declared.imports.get(alias).context("import")?.clone(),
                        inner.to_string(),
                    ),
                    None => (name.0.clone(), field.type_text.clone()),
                };
                let path = match &embed {
                    None => (inner.clone(), number.to_string()),
                    Some((names, numbers)) => (format!("{names}.{inner}"), format!("{numbers}/{number}")),
                };
                self.flatten(&(package, inner), Some(path), out, definition)?;
                continue;
            }
            if json.is_empty() {
                bail!("{} has no json name", field.name);
            }
            let shape = self.shape(&field.type_text, &name.0, &declared.imports)?;
            let (flags, default) = field_facts(&field, &json, &shape, &options, definition)?;
            let number = match &embed {
                None => number.to_string(),
                Some((names, numbers)) if numbers == "0" => format!("{names}=0/0"),
                Some((names, numbers)) => format!("{names}={numbers}/{number}"),
            };
            out.push(Flat {
                number,
                json,
                shape,
                flags,
                default,
            });
        }
        Ok(())
    }

    fn render(
        &mut self,
        name: &Name,
        kinds: &BTreeMap<Name, String>,
        served: &BTreeSet<String>,
    ) -> Result<String> {
        let openapi_name = format!("{}.{}", openapi_prefix(&name.0), name.1);
        let definition = self.definitions.get(&openapi_name);
        let mut fields = Vec::new();
        self.flatten(name, None, &mut fields, definition)?;
        let mut line = format!("T {}", name.1);
        if definition.is_none() {
            line.push_str(" hidden");
        }
        let gvks = definition.and_then(|d| d["x-kubernetes-group-version-kind"].as_array());
        if let Some(gvks) = gvks {
            let of = |gvk: &Value| {
                let (group, version) = (
                    gvk["group"].as_str().unwrap_or(""),
                    gvk["version"].as_str().unwrap_or(""),
                );
                if group.is_empty() {
                    version.to_string()
                } else {
                    format!("{group}/{version}")
                }
            };
            let list: Vec<String> = gvks.iter().map(of).collect();
            if list.len() == 1 && !served.contains(&list[0]) {
                bail!("{} is not served", list[0]);
            }
            let _ = write!(line, " gvk={}", list.join(","));
        } else if let Some(gv) = kinds.get(name) {
            let _ = write!(line, " gvk={gv}");
        }
        if let Some(definition) = definition {
            match definition["x-kubernetes-map-type"].as_str() {
                Some("atomic") => line.push_str(" atomic"),
                Some(other) => bail!("map type {other}"),
                None => {}
            }
            if let Some(unions) = definition.get("x-kubernetes-unions") {
                let _ = write!(line, " unions={unions}");
            }
            let properties = definition["properties"].as_object();
            let theirs: BTreeSet<&str> = properties
                .map(|p| p.keys().map(String::as_str).collect())
                .unwrap_or_default();
            let ours: BTreeSet<&str> = fields.iter().map(|f| f.json.as_str()).collect();
            if theirs != ours {
                bail!("fields differ: OpenAPI {theirs:?}, Go {ours:?}");
            }
        }
        line.push('\n');
        for field in fields {
            let _ = write!(
                line,
                " {} {} {}{}",
                field.json, field.shape, field.number, field.flags
            );
            if let Some(default) = field.default {
                let _ = write!(line, " d={default}");
            }
            line.push('\n');
        }
        Ok(line)
    }
}

fn marker<'a>(field: &'a GoField, key: &str) -> Vec<&'a str> {
    field
        .markers
        .iter()
        .filter_map(|m| m.strip_prefix(key)?.strip_prefix('='))
        .collect()
}

fn field_facts(
    field: &GoField,
    json: &str,
    shape: &str,
    options: &[&str],
    definition: Option<&Value>,
) -> Result<(String, Option<Value>)> {
    let mut flags = String::new();
    let property = definition.map(|d| &d["properties"][json]);
    let required = match definition {
        Some(d) => d["required"]
            .as_array()
            .is_some_and(|list| list.iter().any(|v| v == json)),
        None => !options.contains(&"omitempty") && !field.markers.iter().any(|m| m == "optional"),
    };
    if required {
        flags.push_str(" r");
    }
    if options.contains(&"omitempty") {
        flags.push_str(" o");
    }
    if options.contains(&"omitzero") {
        flags.push_str(" z");
    }
    let text = |key: &str| property.and_then(|p| p[key].as_str());
    let (list, keys): (Option<&str>, Vec<&str>) = match property {
        Some(p) => (
            p["x-kubernetes-list-type"].as_str(),
            p["x-kubernetes-list-map-keys"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect(),
        ),
        None => (
            marker(field, "listType").first().copied(),
            marker(field, "listMapKey"),
        ),
    };
    match list {
        Some("map") => drop(write!(flags, " lm={}", keys.join(","))),
        Some("set") => flags.push_str(" ls"),
        Some("atomic") => flags.push_str(" la"),
        Some(other) => bail!("{json}: list type {other}"),
        None => {}
    }
    match text("x-kubernetes-map-type") {
        Some("atomic") => flags.push_str(" ma"),
        Some("granular") => flags.push_str(" mg"),
        Some(other) => bail!("{json}: map type {other}"),
        None => {}
    }
    // The Go tags are what upstream's strategic merge reads; OpenAPI only repeats most of them.
    let strategy = field.tags.get("patchStrategy").map(String::as_str);
    let merge_key = field.tags.get("patchMergeKey").map(String::as_str);
    if let Some(strategy) = strategy {
        let _ = write!(flags, " ps={strategy}");
    }
    if let Some(key) = merge_key {
        let _ = write!(flags, " pk={key}");
    }
    if let Some(property) = property {
        let (theirs, theirs_key) = (
            text("x-kubernetes-patch-strategy"),
            text("x-kubernetes-patch-merge-key"),
        );
        if theirs != strategy || theirs_key != merge_key {
            // Published and effective differ; the published one is only for OpenAPI.
            let _ = write!(
                flags,
                " xps={} xpk={}",
                theirs.unwrap_or("-"),
                theirs_key.unwrap_or("-")
            );
        }
        let format = property["format"].as_str();
        let implied = match shape.trim_start_matches('*').chars().next() {
            Some('i') => Some("int32"),
            Some('l') => Some("int64"),
            Some('n') => Some("int32"),
            Some('d') => Some("double"),
            Some('y') => Some("byte"),
            _ => None,
        };
        if format != implied {
            let _ = write!(flags, " f={}", format.unwrap_or("-"));
        }
        let published = property.get("default");
        let implied = implied_default(shape, options.contains(&"omitempty"));
        if published != implied.as_ref() {
            return Ok((flags, Some(published.cloned().unwrap_or(Value::Null))));
        }
        return Ok((flags, None));
    }
    Ok((flags, None))
}

/// The default that upstream's generator publishes for a field that is not a pointer.
fn implied_default(shape: &str, omitempty: bool) -> Option<Value> {
    match shape.chars().next()? {
        '@' => Some(Value::Object(Default::default())),
        _ if omitempty => None,
        's' => Some("".into()),
        'b' => Some(false.into()),
        'i' | 'l' | 'n' | 'd' => Some(0.into()),
        _ => None,
    }
}
