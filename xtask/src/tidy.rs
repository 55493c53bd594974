//! `cargo xtask tidy`: the rules of the house that a program can check. It reads sources as text and asks cargo for
//! features; it builds nothing and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Which crates of ours each crate may use, directly or through one that it may use. `*` is the wiring.
const MAY_USE: &[(&str, &[&str])] = &[
    ("features", &[]),
    ("fs", &[]),
    ("meta", &[]),
    ("supervise", &[]),
    ("sockets", &[]),
    ("schema", &["meta"]),
    ("cel", &["meta", "schema"]),
    ("descriptions", &[]),
    ("api", &["schema", "cel", "descriptions"]),
    ("store", &["fs", "supervise"]),
    ("encryption", &["api", "store"]),
    ("cache", &["store", "schema"]),
    ("registry", &["api", "cache", "store"]),
    ("https", &["pki"]),
    ("auth", &["api", "pki", "https", "supervise"]),
    ("admission", &["api", "cel"]),
    (
        "server",
        &[
            "registry",
            "auth",
            "admission",
            "pki",
            "streaming",
            "supervise",
            "trace",
            "prometheus",
        ],
    ),
    ("client", &["api", "pki", "supervise", "trace", "prometheus"]),
    ("pods", &["meta"]),
    ("controllers", &["client", "pods"]),
    ("scheduler", &["client", "cel", "https", "pods", "prometheus"]),
    ("cri", &[]),
    ("csi", &[]),
    ("dbus", &[]),
    ("devices", &[]),
    ("cni", &["meta"]),
    ("streaming", &[]),
    ("pki", &["fs"]),
    ("trace", &["meta"]),
    ("prometheus", &[]),
    ("runtime", &["fs", "cri", "cni", "streaming"]),
    (
        "node",
        &[
            "fs",
            "client",
            "https",
            "cri",
            "csi",
            "dbus",
            "devices",
            "pods",
            "prometheus",
            "streaming",
        ],
    ),
    ("network", &["client", "cni", "fs"]),
    ("dns", &["client", "https"]),
    ("ingress", &["client", "pki", "prometheus", "sockets"]),
    ("metrics", &["client", "https"]),
    ("sim", &["client"]),
    ("kubectl", &["client"]),
    ("skiff", &["*"]),
    ("testkit", &["*"]),
    ("fuzz-targets", &["*"]),
];

/// Nobody else may name the store, not even through another crate.
const LINKS_STORE: &[&str] = &[
    "encryption",
    "cache",
    "registry",
    "skiff",
    "testkit",
    "fuzz-targets",
];

/// No I/O and no clock here.
const PURE: &[&str] = &["meta", "schema", "cel", "api", "pods"];
const IMPURE: &[&str] = &[
    "std::fs",
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "ToSocketAddrs",
    "UnixStream",
    "SystemTime",
    "Instant::now",
    "Timestamp::now",
    "std::process",
    "tokio::",
];

/// Homes in examples and tests, which are nobody's.
const EXAMPLE_HOMES: &[&str] = &["nonroot", "u", "user"];

const MAX_LINES: usize = 800;

pub fn run(root: &Path) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let mut crates: BTreeMap<String, PathBuf> = BTreeMap::new();
    let folder = root.join("crates");
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.join("Cargo.toml").is_file() {
            crates.insert(
                path.file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
                path,
            );
        }
    }
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    if architecture.is_empty() {
        findings.push("ARCHITECTURE.md: missing".to_string());
    }
    for (name, path) in &crates {
        let manifest = fs::read_to_string(path.join("Cargo.toml"))?;
        check_dependencies(name, &manifest, &mut findings);
        if !architecture.is_empty() && !architecture.contains(&format!("`{name}`")) {
            findings.push(format!("ARCHITECTURE.md: does not name `{name}`"));
        }
    }
    for file in rust_files(root)? {
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let shown = file
            .strip_prefix(root)
            .unwrap_or(&file)
            .to_string_lossy()
            .into_owned();
        check_file(&shown, &text, &mut findings);
    }
    check_paths(root, &mut findings)?;
    check_features(root, crates.keys(), &mut findings)?;
    findings.sort();
    Ok(findings)
}

/// Everything a crate may reach: what it may use, and what that may use. The store is not passed on.
fn allowed(name: &str) -> Option<BTreeSet<&'static str>> {
    let (_, direct) = MAY_USE.iter().find(|(krate, _)| *krate == name)?;
    if direct.contains(&"*") {
        return Some(MAY_USE.iter().map(|(krate, _)| *krate).collect());
    }
    let mut reached: BTreeSet<&'static str> = direct.iter().copied().collect();
    let mut open: Vec<&str> = direct.to_vec();
    while let Some(next) = open.pop() {
        let (_, uses) = MAY_USE.iter().find(|(krate, _)| *krate == next)?;
        for used in *uses {
            if *used != "store" && reached.insert(used) {
                open.push(used);
            }
        }
    }
    Some(reached)
}

/// The crates of ours that a manifest names as dependencies, those for tests left out.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut section = String::new();
    let mut found = Vec::new();
    for line in manifest.lines() {
        let line = line.trim();
        if let Some(title) = line.strip_prefix('[') {
            section = title.trim_end_matches(']').to_string();
        } else if section == "dependencies" || section.ends_with(".dependencies") {
            let name = line.split(['=', '.', ' ']).next().unwrap_or("").trim_matches('"');
            if let Some(name) = name.strip_prefix("skiff-") {
                found.push(name.to_string());
            }
        }
    }
    found
}

/// Whatever is built, an outside crate has the features that the whole workspace asks for: otherwise it and all that
/// uses it is built again for each command. `crates/features` sees to that.
fn check_features<'a>(
    root: &Path,
    crates: impl Iterator<Item = &'a String>,
    findings: &mut Vec<String>,
) -> Result<()> {
    let whole = outside_crates(root, &["--workspace"])?;
    for name in crates {
        let package = if name == "skiff" {
            name.clone()
        } else {
            format!("skiff-{name}")
        };
        for line in outside_crates(root, &["--package", &package])?.difference(&whole) {
            findings.push(format!(
                "crates/features: `{package}` alone builds {line}, unlike the workspace"
            ));
        }
    }
    Ok(())
}

/// Each outside crate that a choice of packages is built with, and its features.
fn outside_crates(root: &Path, packages: &[&str]) -> Result<BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["tree", "--locked", "--edges", "normal,build,dev"])
        .args(["--prefix", "none", "--format", "{p} with {f}"])
        .args(packages)
        .output()
        .context("run cargo tree")?;
    ensure!(
        output.status.success(),
        "cargo tree: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| line.trim_end_matches(" (*)").trim().to_string())
        .filter(|line| !line.is_empty() && !line.contains(&*root.to_string_lossy()))
        .collect())
}

fn check_dependencies(name: &str, manifest: &str, findings: &mut Vec<String>) {
    let Some(allowed) = allowed(name) else {
        findings.push(format!("crates/{name}: not in the table of xtask/src/tidy.rs"));
        return;
    };
    for used in dependencies(manifest) {
        if used == "store" && !LINKS_STORE.contains(&name) {
            findings.push(format!(
                "crates/{name}/Cargo.toml: only {} may link store",
                LINKS_STORE.join(", ")
            ));
        } else if used != "features" && !allowed.contains(used.as_str()) {
            findings.push(format!("crates/{name}/Cargo.toml: may not use {used}"));
        }
    }
}

fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut open = vec![root.join("crates"), root.join("xtask"), root.join("tests")];
    while let Some(folder) = open.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                open.push(path);
            } else if name.ends_with(".rs") {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// The lines before the tests of a file.
fn without_tests(text: &str) -> &str {
    text.find("#[cfg(test)]").map_or(text, |at| &text[..at])
}

fn check_file(shown: &str, text: &str, findings: &mut Vec<String>) {
    if !text.starts_with("//!") {
        findings.push(format!("{shown}:1: does not open with //!"));
    }
    let code = without_tests(text);
    let generated = text.lines().take(3).any(|line| line.contains("@generated"));
    let length = code.lines().count();
    let is_test = shown.contains("/tests/");
    if length > MAX_LINES && !generated && !is_test {
        findings.push(format!(
            "{shown}: {length} lines without its tests, more than {MAX_LINES}"
        ));
    }
    let krate = shown
        .strip_prefix("crates/")
        .and_then(|rest| rest.split('/').next())
        .unwrap_or("");
    let pure = PURE.contains(&krate) && !is_test;
    // This file names what it looks for.
    let is_this = shown == "xtask/src/tidy.rs";
    for (index, line) in text.lines().enumerate() {
        let place = format!("{shown}:{}", index + 1);
        let comment = line.trim_start().starts_with("//");
        if !is_this && !comment {
            for macro_name in ["todo!(", "unimplemented!("] {
                if line.contains(macro_name) {
                    findings.push(format!("{place}: {macro_name}…)"));
                }
            }
        }
        if pure && !comment && index < length {
            for word in IMPURE {
                if line.contains(word) {
                    findings.push(format!(
                        "{place}: {word} in a crate that does no I/O and reads no clock"
                    ));
                }
            }
        }
    }
}

/// Looks for paths of somebody's machine in everything that is text.
fn check_paths(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let mut open = vec![root.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if path.is_dir() {
                if name != "target" && name != ".git" {
                    open.push(path);
                }
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else {
                continue;
            };
            let shown = path
                .strip_prefix(root)
                .unwrap_or(&path)
                .to_string_lossy()
                .into_owned();
            if shown == "xtask/src/tidy.rs" || name == "Cargo.lock" {
                continue;
            }
            for (index, line) in text.lines().enumerate() {
                if let Some(found) = machine_path(line) {
                    findings.push(format!("{shown}:{}: the path of a machine: {found}", index + 1));
                }
            }
        }
    }
    Ok(())
}

/// `/home/somebody/…`, `/Users/somebody/…` and the own folder of root. Words that follow a letter
/// are parts of other paths, such as an API's.
fn machine_path(line: &str) -> Option<&str> {
    for prefix in ["/home/", "/Users/", concat!("/root", "/")] {
        for (at, _) in line.match_indices(prefix) {
            let before = line[..at].chars().next_back();
            let rest = &line[at + prefix.len()..];
            let starts_name = rest
                .chars()
                .next()
                .is_some_and(|c| c.is_ascii_alphanumeric() || c == '.');
            let standing = before.is_none_or(|c| !c.is_ascii_alphanumeric() && !"./_-}*$".contains(c));
            let owner = rest
                .split(|c: char| !c.is_ascii_alphanumeric())
                .next()
                .unwrap_or("");
            let example = prefix == "/home/" && EXAMPLE_HOMES.contains(&owner);
            if standing && starts_name && !example {
                let end = line[at..]
                    .find([' ', '"', '\'', '`', ')'])
                    .map_or(line.len(), |end| at + end);
                return Some(&line[at..end]);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_point_up_the_table() {
        let check = |name: &str, manifest: &str, expected: &[&str]| {
            let mut findings = Vec::new();
            check_dependencies(name, manifest, &mut findings);
            assert_eq!(findings, expected, "{name}: {manifest}");
        };
        check(
            "api",
            "[dependencies]\nskiff-meta.workspace = true\nskiff-schema = { workspace = true }\n",
            &[],
        );
        check("controllers", "[dependencies]\nskiff-api.workspace = true\n", &[]);
        check(
            "schema",
            "[dependencies]\nskiff-api.workspace = true\n",
            &["crates/schema/Cargo.toml: may not use api"],
        );
        check("schema", "[dev-dependencies]\nskiff-api.workspace = true\n", &[]);
        check(
            "server",
            "[dependencies]\nskiff-store.workspace = true\n",
            &[
                "crates/server/Cargo.toml: only encryption, cache, registry, skiff, testkit, fuzz-targets may link store",
            ],
        );
        check(
            "skiff",
            "[dependencies]\nskiff-store.workspace = true\nskiff-runtime.workspace = true\n",
            &[],
        );
        check(
            "other",
            "",
            &["crates/other: not in the table of xtask/src/tidy.rs"],
        );
    }

    #[test]
    fn files_open_with_what_they_are_and_pure_crates_are_pure() {
        let check = |shown: &str, text: &str, expected: usize| {
            let mut findings = Vec::new();
            check_file(shown, text, &mut findings);
            assert_eq!(findings.len(), expected, "{findings:?}");
        };
        check("crates/node/src/a.rs", "//! Words.\nuse std::fs;\n", 0);
        check("crates/meta/src/a.rs", "//! Words.\nuse std::fs;\n", 1);
        check(
            "crates/meta/src/a.rs",
            "//! Words.\n#[cfg(test)]\nmod tests { use std::fs; }\n",
            0,
        );
        check("crates/node/src/a.rs", "use std::fs;\nfn f() { todo!() }\n", 2);
        check(
            "crates/node/src/a.rs",
            &format!("//! Words.\n{}", "x\n".repeat(801)),
            1,
        );
        check(
            "crates/node/src/a.rs",
            &format!("//! @generated\n{}", "x\n".repeat(801)),
            0,
        );
    }

    #[test]
    fn paths_of_machines_are_found() {
        assert_eq!(machine_path("let a = \"/home/me/x\";"), Some("/home/me/x"));
        assert_eq!(
            machine_path(concat!("mount -t tmpfs /root", "/x y")),
            Some(concat!("/root", "/x"))
        );
        assert_eq!(machine_path("the folder /home of users"), None);
        assert_eq!(machine_path("https://example.com/home/page"), None);
    }
}
