//! Writes the layouts of upstream's internal types. Some messages show a part of an object as Go prints that type:
//! fields in the order of the declaration, under their Go names, with the empty ones. Only names and types are
//! taken over.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;

use anyhow::{Result, bail};

use super::go::{Body, GoField, Loader};
use super::resources::Group;

const META: &str = "k8s.io/apimachinery/pkg/apis/meta/v1";

/// The internal package of a group and the public ones that have its names in JSON.
fn packages(group: &str) -> (String, Vec<String>) {
    let short = match group {
        "" => "core",
        "flowcontrol.apiserver.k8s.io" => "flowcontrol",
        other => other.split('.').next().unwrap_or(other),
    };
    let short = short.strip_prefix("rbac.").unwrap_or(short);
    match short {
        "apiextensions" => (
            "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions".into(),
            vec!["k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1".into()],
        ),
        "apiregistration" => (
            "k8s.io/kube-aggregator/pkg/apis/apiregistration".into(),
            vec!["k8s.io/kube-aggregator/pkg/apis/apiregistration/v1".into()],
        ),
        _ => {
            let versions: &[&str] = match short {
                "autoscaling" => &["v2"],
                // Some kinds of stable groups have no stable version yet.
                "certificates" => &["v1", "v1beta1"],
                "scheduling" => &["v1", "v1alpha2"],
                "storagemigration" => &["v1beta1"],
                _ => &["v1"],
            };
            let public = versions
                .iter()
                .map(|version| format!("k8s.io/api/{short}/{version}"));
            (format!("k8s.io/kubernetes/pkg/apis/{short}"), public.collect())
        }
    }
}

pub fn collect(loader: &mut Loader, groups: &[Group]) -> Result<String> {
    let mut wanted = VecDeque::new();
    let mut public = BTreeMap::new();
    for group in groups {
        // Events have one internal type.
        if group.name == "events.k8s.io" {
            continue;
        }
        let (internal, versions) = packages(&group.name);
        for resource in group.versions.iter().flat_map(|(_, resources)| resources) {
            // Reviews are never shown.
            if resource.storage.is_some() {
                public.insert(internal.clone(), versions.clone());
                wanted.push_back((internal.clone(), resource.kind.clone()));
            }
        }
    }
    public.insert(META.to_owned(), vec![META.to_owned()]);
    let mut seen = BTreeSet::new();
    let mut blocks = BTreeMap::new();
    while let Some((import, name)) = wanted.pop_front() {
        if !seen.insert((import.clone(), name.clone())) {
            continue;
        }
        let Body::Struct(fields) = loader.body(&import, &name)? else {
            bail!("{import}.{name} is no struct");
        };
        let mut text = format!("T {}\n", label(&import, &name));
        for field in &fields {
            let Some(kind) = kind_of(loader, &import, &name, &field.type_text, &mut wanted)? else {
                continue;
            };
            let tag = field.tags.get("json").map_or("", String::as_str);
            let (tag_name, tag_flags) = tag.split_once(',').unwrap_or((tag, ""));
            let own = public.get(&import).filter(|_| import != META);
            let json = match own {
                Some(versions) => json_name(loader, versions, &name, field)?,
                None => tag_name.to_owned(),
            };
            let embedded = field.name.is_empty() && (tag_name.is_empty() || import == META);
            let shown = match (embedded, tag_name) {
                (true, _) => "-".to_owned(),
                (false, "") => field.name.clone(),
                (false, tag) => tag.to_owned(),
            };
            let json = if json.is_empty() { "-".to_owned() } else { json };
            let omit = if tag_flags.contains("omit") { " o" } else { "" };
            writeln!(text, " {shown} {json} {kind}{omit}")?;
        }
        blocks.insert(label(&import, &name), text);
    }
    let mut out = String::from(
        "# Made by `cargo xtask facts`; not edited by hand. Upstream's internal types as Go's JSON prints them:\n\
         # T type, then a line a field: name shown (- for an embedded type), name in the API (- for none), type,\n\
         # and o where an empty value is left out. The grammar of types is in internal.rs of skiff-api.\n",
    );
    for block in blocks.values() {
        out.push_str(block);
    }
    Ok(out)
}

/// `core.Pod`, `meta.LabelSelector`: the folder of the package without its version.
fn label(import: &str, name: &str) -> String {
    let package = match import {
        META => "meta",
        other => other.rsplit('/').next().unwrap_or(other),
    };
    format!("{package}.{name}")
}

/// The name that the public type of the same name gives to this field.
fn json_name(loader: &mut Loader, public: &[String], owner: &str, field: &GoField) -> Result<String> {
    if field.name.is_empty() {
        return Ok(if field.type_text.ends_with("ObjectMeta") {
            "metadata"
        } else {
            ""
        }
        .to_owned());
    }
    for package in public {
        if let Ok(Body::Struct(fields)) = loader.body(package, owner)
            && let Some(same) = fields.iter().find(|f| f.name == field.name)
            && let Some(tag) = same.tags.get("json")
        {
            return Ok(tag.split(',').next().unwrap_or("").to_owned());
        }
    }
    let mut letters = field.name.chars();
    Ok(letters
        .next()
        .map(|first| first.to_lowercase().chain(letters).collect())
        .unwrap_or_default())
}

/// The compact name of a type, and the structs it leads to.
fn kind_of(
    loader: &mut Loader,
    import: &str,
    owner: &str,
    text: &str,
    wanted: &mut VecDeque<(String, String)>,
) -> Result<Option<String>> {
    let text = text.trim();
    for (prefix, short) in [("*", "*"), ("[]", "[]")] {
        if let Some(rest) = text.strip_prefix(prefix) {
            if text == "[]byte" {
                return Ok(Some("y".into()));
            }
            let inner = kind_of(loader, import, owner, rest, wanted)?;
            return Ok(inner.map(|inner| format!("{short}{inner}")));
        }
    }
    if let Some(rest) = text.strip_prefix("map[") {
        let value = rest.split_once(']').map_or("", |(_, value)| value);
        let inner = kind_of(loader, import, owner, value, wanted)?;
        return Ok(inner.map(|inner| format!("{{}}{inner}")));
    }
    Ok(Some(
        match text {
            "string" => "s",
            "bool" => "b",
            "int" | "int32" | "int64" | "uint8" | "uint16" | "float64" | "uint64" => "i",
            _ => {
                let (package, name) = match text.split_once('.') {
                    Some((alias, name)) => (loader.import(import, owner, alias)?, name),
                    None => (import.to_owned(), text),
                };
                let known = match name {
                    "Time" | "MicroTime" => "t",
                    "Quantity" => "q",
                    "IntOrString" => "n",
                    "Duration" => "d",
                    "UID" if text.contains('.') => "s",
                    "RawExtension" | "Object" | "Unknown" | "FieldsV1" | "JSON" => "R",
                    _ => "",
                };
                if !known.is_empty() {
                    return Ok(Some(known.into()));
                }
                return match loader.body(&package, name)? {
                    Body::Struct(_) => {
                        wanted.push_back((package.clone(), name.to_owned()));
                        Ok(Some(format!("@{}", label(&package, name))))
                    }
                    Body::Named(text) => kind_of(loader, &package, name, &text, wanted),
                };
            }
        }
        .into(),
    ))
}
