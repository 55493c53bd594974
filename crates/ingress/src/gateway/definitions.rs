//! The CustomResourceDefinitions of Gateway API's standard channel, made from a table of facts
//! (`data/gateway-api.txt`). It holds no prose, so the definitions have no descriptions.
//!
//! A line of the table is a word and what belongs to it, and belongs itself to the next line above that is indented less:
//!
//! ```text
//! annotation NAME VALUE                   of all definitions
//! definition KIND PLURAL SINGULAR SCOPE categories=[…] shortNames=[…]
//!  version NAME [storage] [status]        status: the subresource
//!   column JSON                           of a table
//!   schema …                              as a field
//! type NAME                               a schema that several fields share
//!  schema …
//!
//! FIELD[!] TYPE NAME=JSON…                `!`: required; of a schema: maxLength, enum, default, …
//! FIELD[!] @NAME                          the type NAME
//! []  or {} instead of a field's name     the items of an array, the values of a map
//! ? RULE MESSAGE                          a CEL rule, both as JSON strings
//! ```

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::GROUP;

const FACTS: &str = include_str!("../../data/gateway-api.txt");

/// Set on definitions that skiff made: others are left alone.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "skiff");
/// Tells the release of Gateway API that a definition comes from.
pub const BUNDLE_VERSION: &str = "gateway.networking.k8s.io/bundle-version";

/// A line and those that belong to it.
#[derive(Debug)]
struct Fact<'a> {
    text: &'a str,
    parts: Vec<Fact<'a>>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the facts of Gateway API are malformed at: {0}")]
pub struct Malformed(String);

fn malformed(text: &str) -> Malformed {
    Malformed(text.chars().take(80).collect())
}

/// All definitions, ready to be created.
pub fn definitions() -> Result<Vec<Value>, Malformed> {
    let mut lines = FACTS
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let text = line.trim_start_matches(' ');
            (line.len() - text.len(), text)
        })
        .peekable();
    let facts = tree(&mut lines, 0);
    let (mut annotations, mut types) = (Map::new(), HashMap::new());
    for fact in &facts {
        let mut words = fact.text.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("annotation"), Some(name), Some(value)) => {
                annotations.insert(name.to_owned(), value.into());
            }
            (Some("type"), Some(name), None) => {
                types.insert(name, fact.parts.first().ok_or_else(|| malformed(fact.text))?);
            }
            _ => {}
        }
    }
    let found = facts.iter().filter(|fact| fact.text.starts_with("definition "));
    found.map(|fact| definition(fact, &annotations, &types)).collect()
}

fn tree<'a>(
    lines: &mut std::iter::Peekable<impl Iterator<Item = (usize, &'a str)>>,
    depth: usize,
) -> Vec<Fact<'a>> {
    let mut facts = Vec::new();
    while let Some((_, text)) = lines.next_if(|(indent, _)| *indent >= depth) {
        let parts = tree(lines, depth + 1);
        facts.push(Fact { text, parts });
    }
    facts
}

fn definition(
    fact: &Fact<'_>,
    annotations: &Map<String, Value>,
    types: &HashMap<&str, &Fact<'_>>,
) -> Result<Value, Malformed> {
    let words: Vec<&str> = fact.text.splitn(6, ' ').collect();
    let [_, kind, plural, singular, scope, rest] = words[..] else {
        return Err(malformed(fact.text));
    };
    let mut names = attributes(rest)?;
    names.retain(|_, list| list.as_array().is_none_or(|list| !list.is_empty()));
    for (name, value) in [
        ("kind", kind.to_owned()),
        ("listKind", format!("{kind}List")),
        ("plural", plural.to_owned()),
        ("singular", singular.to_owned()),
    ] {
        names.insert(name.to_owned(), value.into());
    }
    let versions: Result<Vec<Value>, Malformed> =
        fact.parts.iter().map(|part| version(part, types)).collect();
    Ok(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{GROUP}"), "annotations": annotations, "labels": {MANAGED_BY.0: MANAGED_BY.1}},
        "spec": {"group": GROUP, "names": names, "scope": scope, "versions": versions?},
    }))
}

fn version(fact: &Fact<'_>, types: &HashMap<&str, &Fact<'_>>) -> Result<Value, Malformed> {
    let words: Vec<&str> = fact.text.split(' ').collect();
    let ["version", name, flags @ ..] = &words[..] else {
        return Err(malformed(fact.text));
    };
    let mut columns = Vec::new();
    let mut schema = None;
    for part in &fact.parts {
        match part.text.split_once(' ') {
            Some(("column", column)) => {
                columns.push(serde_json::from_str::<Value>(column).map_err(|_| malformed(part.text))?);
            }
            Some(("schema", _)) => schema = Some(field(part, types)?),
            _ => return Err(malformed(part.text)),
        }
    }
    let mut version = json!({
        "name": name, "served": true, "storage": flags.contains(&"storage"),
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema.ok_or_else(|| malformed(fact.text))?},
    });
    if flags.contains(&"status") {
        version["subresources"] = json!({"status": {}});
    }
    Ok(version)
}

/// The schema of a field's line.
fn field(fact: &Fact<'_>, types: &HashMap<&str, &Fact<'_>>) -> Result<Value, Malformed> {
    let (_, rest) = fact.text.split_once(' ').ok_or_else(|| malformed(fact.text))?;
    if let Some(name) = rest.strip_prefix('@') {
        let shared = types.get(name).ok_or_else(|| malformed(fact.text))?;
        return field(shared, types);
    }
    let (kind, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let mut schema = attributes(rest)?;
    schema.insert("type".to_owned(), kind.into());
    let (mut properties, mut required, mut rules) = (Map::new(), Vec::new(), Vec::new());
    for part in &fact.parts {
        let (name, rest) = part.text.split_once(' ').ok_or_else(|| malformed(part.text))?;
        match name {
            "?" => rules.push(rule(rest).ok_or_else(|| malformed(part.text))?),
            "[]" => {
                schema.insert("items".to_owned(), field(part, types)?);
            }
            "{}" => {
                schema.insert("additionalProperties".to_owned(), field(part, types)?);
            }
            name => {
                let bare = name.strip_suffix('!');
                required.extend(bare.map(Value::from));
                properties.insert(bare.unwrap_or(name).to_owned(), field(part, types)?);
            }
        }
    }
    for (name, is_empty, value) in [
        ("properties", properties.is_empty(), Value::Object(properties)),
        ("required", required.is_empty(), Value::Array(required)),
        ("x-kubernetes-validations", rules.is_empty(), Value::Array(rules)),
    ] {
        if !is_empty {
            schema.insert(name.to_owned(), value);
        }
    }
    Ok(Value::Object(schema))
}

fn rule(text: &str) -> Option<Value> {
    let mut strings = serde_json::Deserializer::from_str(text).into_iter::<String>();
    let (rule, message) = (strings.next()?.ok()?, strings.next()?.ok()?);
    Some(json!({"rule": rule, "message": message}))
}

/// `NAME=JSON NAME=JSON…`
fn attributes(mut text: &str) -> Result<Map<String, Value>, Malformed> {
    let mut found = Map::new();
    while let Some((name, rest)) = text.split_once('=') {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = values
            .next()
            .and_then(Result::ok)
            .ok_or_else(|| malformed(text))?;
        let name = match name {
            "list" => "x-kubernetes-list-type",
            "keys" => "x-kubernetes-list-map-keys",
            "map" => "x-kubernetes-map-type",
            other => other,
        };
        found.insert(name.to_owned(), value);
        text = rest[values.byte_offset()..].trim_start();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_have_definitions() {
        let definitions = definitions().expect("sound facts");
        let kinds: Vec<&str> = definitions
            .iter()
            .filter_map(|one| one["spec"]["names"]["kind"].as_str())
            .collect();
        let expected = [
            "GatewayClass",
            "Gateway",
            "HTTPRoute",
            "GRPCRoute",
            "TLSRoute",
            "ReferenceGrant",
        ];
        assert_eq!(kinds, expected);
        for one in &definitions {
            let versions = one["spec"]["versions"].as_array().expect("versions");
            let stored = versions.iter().filter(|version| version["storage"] == true);
            assert_eq!(stored.count(), 1, "{}", one["metadata"]["name"]);
        }
    }

    #[test]
    fn facts_become_schemas() {
        let definitions = definitions().expect("sound facts");
        let route = &definitions[2];
        assert_eq!(route["metadata"]["name"], "httproutes.gateway.networking.k8s.io");
        let schema = &route["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        assert_eq!(schema["required"], json!(["spec"]));
        let rules = &schema["properties"]["spec"]["properties"]["rules"];
        assert_eq!(rules["x-kubernetes-list-type"], "atomic");
        let rule = &rules["items"]["properties"];
        assert_eq!(rule["matches"]["default"][0]["path"]["type"], "PathPrefix");
        let headers = &rule["matches"]["items"]["properties"]["headers"];
        assert_eq!(headers["x-kubernetes-list-map-keys"], json!(["name"]));
        let parents = &schema["properties"]["spec"]["properties"]["parentRefs"];
        assert_eq!(parents["items"]["properties"]["kind"]["default"], "Gateway");
        assert!(parents["x-kubernetes-validations"][0]["rule"].is_string());
    }

    #[test]
    fn malformed_facts_are_told() {
        assert_eq!(attributes("a=1 b=[2,"), Err(malformed("b=[2,")));
        assert_eq!(attributes("a=1 b=\"x y\"").map(|found| found.len()), Ok(2));
    }
}
