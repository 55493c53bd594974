//! The resource table, out of upstream's discovery documents.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{SERVED_ON_REQUEST, served_by_default};

pub struct Group {
    pub name: String,
    /// Preferred first.
    pub versions: Vec<(String, Vec<Resource>)>,
}

pub struct Resource {
    pub plural: String,
    pub singular: String,
    pub kind: String,
    pub namespaced: bool,
    /// A delete answers with the object, not with a Status.
    pub returns_deleted: bool,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub verbs: Vec<String>,
    pub storage: Option<Storage>,
    pub subresources: Vec<Subresource>,
}

pub struct Storage {
    pub key: String,
    pub group: String,
    pub version: String,
    pub hash: String,
}

pub struct Subresource {
    pub name: String,
    pub group: String,
    pub version: String,
    pub kind: String,
    pub verbs: Vec<String>,
}

pub fn read(dir: &Path, paths: &BTreeMap<String, Value>) -> Result<Vec<Group>> {
    let mut groups = vec![Group {
        name: String::new(),
        versions: vec![("v1".into(), read_version(dir, "", "v1", paths)?)],
    }];
    let list = load(&dir.join("apis.json"))?;
    for group in list["groups"].as_array().context("apis.json has no groups")? {
        let name = text(group, "name");
        let mut versions = Vec::new();
        for version in group["versions"].as_array().context("a group has no versions")? {
            let version = text(version, "version");
            if served_by_default(&version) || SERVED_ON_REQUEST.contains(&(&name, &version)) {
                let resources = read_version(dir, &name, &version, paths)?;
                versions.push((version, resources));
            }
        }
        if !versions.is_empty() {
            groups.push(Group { name, versions });
        }
    }
    Ok(groups)
}

fn load(path: &Path) -> Result<Value> {
    Ok(serde_json::from_str(
        &fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?,
    )?)
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_string()
}

fn texts(value: &Value, key: &str) -> Vec<String> {
    value[key]
        .as_array()
        .map(|list| list.iter().filter_map(|v| v.as_str().map(String::from)).collect())
        .unwrap_or_default()
}

fn read_version(
    dir: &Path,
    group: &str,
    version: &str,
    paths: &BTreeMap<String, Value>,
) -> Result<Vec<Resource>> {
    let file = if group.is_empty() {
        format!("api__{version}.json")
    } else {
        format!("apis__{group}__{version}.json")
    };
    let list = load(&dir.join(file))?;
    let mut resources: BTreeMap<String, Resource> = BTreeMap::new();
    let entries = list["resources"].as_array().context("no resources")?;
    for entry in entries.iter().filter(|entry| !text(entry, "name").contains('/')) {
        let plural = text(entry, "name");
        let kind = text(entry, "kind");
        // Only what is stored has a hash of its storage version.
        let storage = entry["storageVersionHash"]
            .as_str()
            .map(|hash| storage(group, version, &plural, hash));
        let namespaced = entry["namespaced"] == true;
        resources.insert(
            plural.clone(),
            Resource {
                returns_deleted: returns_deleted(group, version, &plural, namespaced, paths),
                plural,
                singular: text(entry, "singularName"),
                kind,
                namespaced,
                short_names: texts(entry, "shortNames"),
                categories: texts(entry, "categories"),
                verbs: texts(entry, "verbs"),
                storage,
                subresources: Vec::new(),
            },
        );
    }
    for entry in entries {
        let name = text(entry, "name");
        let Some((parent, sub)) = name.split_once('/') else {
            continue;
        };
        let or = |key: &str, fallback: &str| entry[key].as_str().unwrap_or(fallback).to_string();
        // A subresource without a group of its own is of its parent's group version.
        let (sub_group, sub_version) = if entry["version"].is_string() {
            (or("group", ""), or("version", version))
        } else {
            (group.into(), version.into())
        };
        resources
            .get_mut(parent)
            .with_context(|| format!("{name} has no parent"))?
            .subresources
            .push(Subresource {
                name: sub.to_string(),
                group: sub_group,
                version: sub_version,
                kind: text(entry, "kind"),
                verbs: texts(entry, "verbs"),
            });
    }
    Ok(resources.into_values().collect())
}

fn returns_deleted(
    group: &str,
    version: &str,
    plural: &str,
    namespaced: bool,
    paths: &BTreeMap<String, Value>,
) -> bool {
    let root = if group.is_empty() {
        format!("/api/{version}")
    } else {
        format!("/apis/{group}/{version}")
    };
    let namespace = if namespaced { "/namespaces/{namespace}" } else { "" };
    let answer = paths
        .get(&format!("{root}{namespace}/{plural}/{{name}}"))
        .and_then(|path| path.pointer("/delete/responses/200/content/application~1json/schema/$ref"));
    answer
        .and_then(Value::as_str)
        .is_some_and(|reference| !reference.ends_with(".Status"))
}

/// Where upstream keeps a resource under `/registry/`, and in which version.
fn storage(group: &str, version: &str, plural: &str, hash: &str) -> Storage {
    let key = match (group, plural) {
        ("", "replicationcontrollers") => "controllers".to_string(),
        ("", "endpoints") => "services/endpoints".to_string(),
        ("", "nodes") => "minions".to_string(),
        ("", "services") => "services/specs".to_string(),
        ("networking.k8s.io", "ingresses") => "ingress".to_string(),
        // These two are served by API servers of their own inside upstream's, with group prefixes.
        ("apiextensions.k8s.io" | "apiregistration.k8s.io", _) => format!("{group}/{plural}"),
        _ => plural.to_string(),
    };
    let (group, version) = match (group, plural) {
        ("events.k8s.io", "events") => ("", "v1"),
        ("autoscaling", _) => ("autoscaling", "v2"),
        _ => (group, version),
    };
    Storage {
        key,
        group: group.into(),
        version: version.into(),
        hash: hash.into(),
    }
}

fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_string()
    } else {
        format!("{group}/{version}")
    }
}

pub fn render(groups: &[Group]) -> String {
    let mut out = String::from(
        "# Made by `cargo xtask facts`; not edited by hand.\n\
         # V group-version [off: it is served when --runtime-config asks for it]\n\
         # R plural singular Kind N|C[d] verbs short-names categories storage-key storage-group-version storage-hash\n\
         #   (C cluster-wide, N namespaced, d: a delete answers with the object)\n\
         # S subresource group-version Kind verbs\n",
    );
    let dash = |list: &[String]| {
        if list.is_empty() {
            "-".to_string()
        } else {
            list.join(",")
        }
    };
    for group in groups {
        for (version, resources) in &group.versions {
            let off = if served_by_default(version) { "" } else { " off" };
            let _ = writeln!(out, "V {}{off}", group_version(&group.name, version));
            for r in resources {
                let storage = r.storage.as_ref().map_or("- - -".to_string(), |s| {
                    format!("{} {} {}", s.key, group_version(&s.group, &s.version), s.hash)
                });
                let scope = format!(
                    "{}{}",
                    if r.namespaced { "N" } else { "C" },
                    if r.returns_deleted { "d" } else { "" }
                );
                let singular = if r.singular.is_empty() { "-" } else { &r.singular };
                let _ = writeln!(
                    out,
                    "R {} {singular} {} {scope} {} {} {} {storage}",
                    r.plural,
                    r.kind,
                    dash(&r.verbs),
                    dash(&r.short_names),
                    dash(&r.categories)
                );
                for s in &r.subresources {
                    let gv = group_version(&s.group, &s.version);
                    let _ = writeln!(out, "S {} {gv} {} {}", s.name, s.kind, dash(&s.verbs));
                }
            }
        }
    }
    out
}
