//! `cargo xtask facts`: writes the compact tables of `crates/api/data` from upstream's published
//! OpenAPI and discovery documents and its Go API types. No prose of upstream ends up in the tables.

mod go;
mod internal;
mod resources;
mod types;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

pub struct Options {
    pub openapi: PathBuf,
    pub discovery: PathBuf,
    pub go: PathBuf,
    pub out: PathBuf,
}

/// Group versions that a default v1.36 server serves: everything stable, and no alpha or beta.
pub fn served_by_default(version: &str) -> bool {
    !version.contains("alpha") && !version.contains("beta")
}

/// Group versions that are served when `--runtime-config` asks for them. Adding one is a line here, and the kinds'
/// own files.
pub const SERVED_ON_REQUEST: &[(&str, &str)] = &[
    ("certificates.k8s.io", "v1beta1"),
    ("scheduling.k8s.io", "v1alpha2"),
    ("storagemigration.k8s.io", "v1beta1"),
];

pub fn run(options: &Options) -> Result<()> {
    let (definitions, paths) = read_openapi(&options.openapi)?;
    let resources = resources::read(&options.discovery, &paths)?;
    let mut loader = go::Loader::new(&options.go)?;
    let types = types::collect(&mut loader, &definitions, &resources)?;
    let internal = internal::collect(&mut loader, &resources)?;
    fs::create_dir_all(&options.out)?;
    write(&options.out.join("internal.txt"), &internal)?;
    write(&options.out.join("resources.txt"), &resources::render(&resources))?;
    write(&options.out.join("types.txt"), &types)?;
    Ok(())
}

/// The schemas and the paths of all v3 documents.
fn read_openapi(dir: &Path) -> Result<(BTreeMap<String, Value>, BTreeMap<String, Value>)> {
    let mut definitions = BTreeMap::new();
    let mut paths = BTreeMap::new();
    let v3 = dir.join("v3");
    let mut files: Vec<_> = fs::read_dir(&v3)
        .with_context(|| format!("read {}", v3.display()))?
        .collect::<std::io::Result<Vec<_>>>()?;
    files.sort_by_key(|entry| entry.file_name());
    for entry in files {
        let mut document: Value = serde_json::from_str(&fs::read_to_string(entry.path())?)?;
        if let Some(Value::Object(schemas)) = document.pointer_mut("/components/schemas").map(Value::take) {
            definitions.extend(schemas);
        }
        if let Some(Value::Object(found)) = document.pointer_mut("/paths").map(Value::take) {
            paths.extend(found);
        }
    }
    // A version 3 document names only its own group version where a type is a kind in many.
    let v2: Value = serde_json::from_str(&fs::read_to_string(dir.join("swagger.json"))?)?;
    const KINDS: &str = "x-kubernetes-group-version-kind";
    for (name, definition) in &mut definitions {
        let kinds = &v2["definitions"][name][KINDS];
        if kinds.is_array() {
            definition[KINDS] = kinds.clone();
        }
    }
    Ok((definitions, paths))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    println!("{} {} bytes", path.display(), text.len());
    Ok(())
}
