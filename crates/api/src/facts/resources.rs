//! The resource table: names, scope, verbs, subresources and storage of every served resource.

use skiff_schema::{Schema, TypeId};

#[derive(Debug)]
pub struct Resource {
    pub group: &'static str,
    pub version: &'static str,
    pub plural: &'static str,
    pub singular: &'static str,
    pub kind: &'static str,
    /// Whether its group version is served without a word of `--runtime-config`.
    pub on_by_default: bool,
    pub namespaced: bool,
    /// A delete answers with the deleted object; otherwise with a `Status`.
    pub returns_deleted_object: bool,
    pub verbs: Box<[&'static str]>,
    pub short_names: Box<[&'static str]>,
    pub categories: Box<[&'static str]>,
    /// `None` for what is answered but never stored, such as reviews.
    pub storage: Option<Storage>,
    pub subresources: Box<[Subresource]>,
    pub type_id: TypeId,
    pub list_type_id: Option<TypeId>,
}

#[derive(Debug)]
pub struct Storage {
    /// The key below `/registry/`.
    pub key: &'static str,
    /// The group version in which objects are stored; several served versions may share it.
    pub group: &'static str,
    pub version: &'static str,
    /// As discovery shows it.
    pub version_hash: &'static str,
}

#[derive(Debug)]
pub struct Subresource {
    pub name: &'static str,
    /// The kind that is exchanged, which may be of another group (`autoscaling/v1` Scale).
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
    pub verbs: Box<[&'static str]>,
    pub type_id: TypeId,
}

impl Resource {
    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|s| s.name == name)
    }

    pub fn can(&self, verb: &str) -> bool {
        self.verbs.contains(&verb)
    }

    /// `v1` or `apps/v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_string()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }
}

fn group_version(text: &'static str) -> (&'static str, &'static str) {
    text.rsplit_once('/').unwrap_or(("", text))
}

fn list(text: &'static str) -> Box<[&'static str]> {
    if text == "-" {
        Box::default()
    } else {
        text.split(',').collect()
    }
}

pub(super) fn parse(text: &'static str, schema: &Schema) -> Result<Vec<Resource>, String> {
    let mut resources: Vec<Resource> = Vec::new();
    let mut subresources = Vec::new();
    let mut current = ("", "");
    let mut on_by_default = true;
    let type_of = |group: &str, version: &str, kind: &str| {
        schema
            .by_gvk(group, version, kind)
            .ok_or_else(|| format!("no type for {group}/{version} {kind}"))
    };
    for line in text.lines() {
        let words: Vec<&'static str> = line.split(' ').collect();
        if words[0] != "S"
            && let Some(last) = resources.last_mut()
            && !subresources.is_empty()
        {
            last.subresources = std::mem::take(&mut subresources).into();
        }
        match words[..] {
            ["V", gv] => (current, on_by_default) = (group_version(gv), true),
            ["V", gv, "off"] => (current, on_by_default) = (group_version(gv), false),
            [
                "R",
                plural,
                singular,
                kind,
                scope,
                verbs,
                short_names,
                categories,
                key,
                storage,
                hash,
            ] => {
                let (group, version) = current;
                let storage = (key != "-").then(|| {
                    let (group, version) = group_version(storage);
                    Storage {
                        key,
                        group,
                        version,
                        version_hash: hash,
                    }
                });
                let verbs = list(verbs);
                let list_kind = format!("{kind}List");
                resources.push(Resource {
                    group,
                    version,
                    plural,
                    singular: if singular == "-" { "" } else { singular },
                    kind,
                    on_by_default,
                    namespaced: scope.starts_with('N'),
                    returns_deleted_object: scope.ends_with('d'),
                    list_type_id: if verbs.contains(&"list") {
                        Some(type_of(group, version, &list_kind)?)
                    } else {
                        None
                    },
                    verbs,
                    short_names: list(short_names),
                    categories: list(categories),
                    storage,
                    subresources: Box::default(),
                    type_id: type_of(group, version, kind)?,
                });
            }
            ["S", name, gv, kind, verbs] => {
                let (group, version) = group_version(gv);
                let type_id = type_of(group, version, kind)?;
                subresources.push(Subresource {
                    name,
                    group,
                    version,
                    kind,
                    verbs: list(verbs),
                    type_id,
                });
            }
            _ if line.starts_with('#') => {}
            _ => return Err(format!("resource table: {line}")),
        }
    }
    if let Some(last) = resources.last_mut() {
        last.subresources = subresources.into();
    }
    Ok(resources)
}
