//! A reader of Go type declarations: just enough of the language for gofmt-ed API types. It reads
//! struct fields with their tags and markers and resolves names across packages; it keeps no prose.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// What a declared Go type is made of.
#[derive(Debug, Clone)]
pub enum Body {
    Struct(Vec<GoField>),
    /// The source text of the underlying type, for example `map[ResourceName]resource.Quantity`.
    Named(String),
}

#[derive(Debug, Clone)]
pub struct GoField {
    /// Empty for an embedded field.
    pub name: String,
    pub type_text: String,
    pub tags: BTreeMap<String, String>,
    pub markers: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct GoType {
    pub body: Body,
    pub markers: Vec<String>,
    /// Import names visible in the declaring file.
    pub imports: BTreeMap<String, String>,
}

/// One Go package, by import path.
#[derive(Debug, Default)]
pub struct Package {
    pub name: String,
    pub types: BTreeMap<String, GoType>,
}

/// The packages read so far, and the folders of the modules they come from.
pub struct Loader {
    modules: Vec<(String, PathBuf)>,
    packages: BTreeMap<String, Package>,
}

impl Loader {
    /// `dir` holds the modules as folders named `api`, `apimachinery`, … or `api@v0.36.0`, ….
    pub fn new(dir: &Path) -> Result<Loader> {
        let mut modules = Vec::new();
        for module in [
            "api",
            "apimachinery",
            "apiextensions-apiserver",
            "kube-aggregator",
            "kubernetes",
        ] {
            let mut found = None;
            for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if name == module || name.split_once('@').is_some_and(|(base, _)| base == module) {
                    // Folders sort by version, so the newest one wins.
                    found = found.max(Some(entry.path()));
                }
            }
            let Some(path) = found else {
                bail!("no module {module} in {}", dir.display())
            };
            modules.push((format!("k8s.io/{module}"), path));
        }
        Ok(Loader {
            modules,
            packages: BTreeMap::new(),
        })
    }

    pub fn package(&mut self, import: &str) -> Result<&Package> {
        if !self.packages.contains_key(import) {
            let package = self.read(import).with_context(|| format!("package {import}"))?;
            self.packages.insert(import.to_string(), package);
        }
        Ok(&self.packages[import])
    }

    /// What a type of a package is made of.
    pub fn body(&mut self, import: &str, name: &str) -> Result<Body> {
        let package = self.package(import)?;
        let found = package
            .types
            .get(name)
            .with_context(|| format!("no type {import}.{name}"))?;
        Ok(found.body.clone())
    }

    /// The package that `alias` stands for in the file that declares this type.
    pub fn import(&mut self, import: &str, name: &str, alias: &str) -> Result<String> {
        let package = self.package(import)?;
        let found = package.types.get(name).and_then(|t| t.imports.get(alias));
        Ok(found
            .with_context(|| format!("no import {alias} for {import}.{name}"))?
            .clone())
    }

    fn read(&self, import: &str) -> Result<Package> {
        let Some((module, root)) = self.modules.iter().find(|(module, _)| {
            import
                .strip_prefix(module.as_str())
                .is_some_and(|rest| rest.starts_with('/'))
        }) else {
            bail!("not in a known module");
        };
        let dir = root.join(&import[module.len() + 1..]);
        let mut package = Package::default();
        let mut files: Vec<_> = fs::read_dir(&dir)
            .with_context(|| format!("read {}", dir.display()))?
            .collect::<std::io::Result<Vec<_>>>()?
            .into_iter()
            .map(|entry| entry.path())
            .collect();
        files.sort();
        for file in files {
            let name = file
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if name.ends_with(".go") && !name.ends_with("_test.go") && !name.contains("generated") {
                parse_file(&fs::read_to_string(&file)?, &mut package)
                    .with_context(|| format!("file {}", file.display()))?;
            }
        }
        Ok(package)
    }
}

fn parse_file(text: &str, package: &mut Package) -> Result<()> {
    let mut imports = BTreeMap::new();
    let mut markers: Vec<String> = Vec::new();
    let mut gap = 0;
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let trimmed = line.trim();
        if let Some(name) = line.strip_prefix("package ") {
            package.name = name.trim().to_string();
        } else if line.starts_with("/*") && !trimmed.contains("*/") {
            for rest in lines.by_ref() {
                if rest.contains("*/") {
                    break;
                }
            }
        } else if line == "import (" {
            for rest in lines.by_ref() {
                let rest = rest.trim();
                if rest == ")" {
                    break;
                }
                add_import(rest, &mut imports);
            }
        } else if let Some(rest) = line.strip_prefix("import ") {
            add_import(rest, &mut imports);
        } else if let Some(comment) = trimmed.strip_prefix("//") {
            if gap > 1 {
                markers.clear();
            }
            gap = 0;
            if let Some(marker) = comment.trim_start().strip_prefix('+') {
                markers.push(marker.trim().to_string());
            }
        } else if trimmed.is_empty() {
            gap += 1;
        } else if let Some(rest) = line.strip_prefix("type ") {
            let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
            let rest = rest.trim_start_matches("= ").trim();
            let body = if rest == "struct {" {
                let mut depth_lines = Vec::new();
                for rest in lines.by_ref() {
                    if rest == "}" {
                        break;
                    }
                    depth_lines.push(rest);
                }
                Some(Body::Struct(parse_fields(&depth_lines)?))
            } else if rest == "struct{}" {
                Some(Body::Struct(Vec::new()))
            } else if rest.starts_with("interface") || rest.starts_with("func") || name == "(" {
                None
            } else {
                Some(Body::Named(strip_comment(rest).to_string()))
            };
            if let Some(body) = body {
                let declared = GoType {
                    body,
                    markers: std::mem::take(&mut markers),
                    imports: imports.clone(),
                };
                package.types.insert(name.to_string(), declared);
            }
            markers.clear();
        } else {
            markers.clear();
        }
        if !trimmed.is_empty() {
            gap = 0;
        }
    }
    Ok(())
}

fn add_import(text: &str, imports: &mut BTreeMap<String, String>) {
    let Some(start) = text.find('"') else { return };
    let path = text[start + 1..].trim_end_matches('"').to_string();
    let alias = text[..start].trim();
    let name = if alias.is_empty() {
        path.rsplit('/').next().unwrap_or(&path).to_string()
    } else {
        alias.to_string()
    };
    imports.insert(name, path);
}

fn strip_comment(text: &str) -> &str {
    text.split("//").next().unwrap_or(text).trim()
}

fn parse_fields(lines: &[&str]) -> Result<Vec<GoField>> {
    let mut fields = Vec::new();
    let mut markers = Vec::new();
    let mut in_comment = false;
    for line in lines {
        let line = line.trim();
        if line.starts_with("/*") || in_comment {
            in_comment = !line.contains("*/");
            continue;
        }
        if line.is_empty() {
            continue;
        }
        if let Some(comment) = line.strip_prefix("//") {
            if let Some(marker) = comment.trim_start().strip_prefix('+') {
                markers.push(marker.trim().to_string());
            }
            continue;
        }
        let (declaration, tag) = match line.split_once('`') {
            Some((declaration, rest)) => (declaration.trim(), rest.split('`').next().unwrap_or("")),
            None => (strip_comment(line), ""),
        };
        let mut words = declaration.splitn(2, char::is_whitespace);
        let first = words.next().unwrap_or("");
        let (name, type_text) = match words.next() {
            Some(rest) => (first.to_string(), rest.trim().to_string()),
            None => (String::new(), first.to_string()),
        };
        fields.push(GoField {
            name,
            type_text,
            tags: parse_tags(tag)?,
            markers: std::mem::take(&mut markers),
        });
    }
    Ok(fields)
}

/// Reads a struct tag: space separated `key:"value"` pairs.
fn parse_tags(mut text: &str) -> Result<BTreeMap<String, String>> {
    let mut tags = BTreeMap::new();
    loop {
        text = text.trim_start();
        if text.is_empty() {
            return Ok(tags);
        }
        let (key, rest) = text.split_once(":\"").with_context(|| format!("tag {text}"))?;
        let (value, rest) = rest.split_once('"').with_context(|| format!("tag {text}"))?;
        tags.insert(key.to_string(), value.to_string());
        text = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_fields_tags_and_markers() {
        let mut package = Package::default();
        let text = "package v1\nimport (\n\tmetav1 \"k8s.io/x/meta/v1\"\n)\n// Doc.\n// +structType=atomic\ntype A struct {\n\tmetav1.TypeMeta `json:\",inline\"`\n\t// Words.\n\t// +listType=map\n\tItems []B `json:\"items,omitempty\" protobuf:\"bytes,2,rep,name=items\"`\n}\n\ntype B string\n";
        parse_file(text, &mut package).expect("parses");
        let a = &package.types["A"];
        assert_eq!(a.markers, ["structType=atomic"]);
        let Body::Struct(fields) = &a.body else {
            panic!("a struct")
        };
        assert_eq!(fields[0].type_text, "metav1.TypeMeta");
        assert_eq!(fields[1].markers, ["listType=map"]);
        assert_eq!(fields[1].tags["protobuf"], "bytes,2,rep,name=items");
        assert!(matches!(&package.types["B"].body, Body::Named(text) if text == "string"));
    }
}
