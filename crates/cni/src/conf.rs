//! Network configurations on disk: which file of a directory counts, and whether it makes sense. It
//! starts no process.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The spec versions both sides speak, oldest first.
pub const SUPPORTED_VERSIONS: &[&str] = &["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A chain of plugins, as one `.conflist` (or a single `.conf`) describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    pub name: String,
    pub cni_version: String,
    pub disable_check: bool,
    pub disable_gc: bool,
    pub(crate) plugins: Vec<Map<String, Value>>,
}

impl Network {
    /// Reads the first usable configuration of a directory, by file name. Broken files are passed over,
    /// so that one bad drop-in does not take the node's network down; if all are broken, the first
    /// one's error is returned.
    pub fn load(conf_dir: &Path) -> Result<Network> {
        let mut files: Vec<PathBuf> = match std::fs::read_dir(conf_dir) {
            Ok(entries) => entries
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| {
                    path.extension()
                        .is_some_and(|ext| ext == "conf" || ext == "conflist" || ext == "json")
                })
                .collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io(format!("read {}", conf_dir.display()))(error)),
        };
        files.sort();
        let mut first_error = None;
        for path in files {
            match Network::load_file(&path) {
                Ok(network) => return Ok(network),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "skipping an invalid network configuration");
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| Error::NoConfig(conf_dir.to_path_buf())))
    }

    pub fn load_file(path: &Path) -> Result<Network> {
        let config = |reason: String| Error::Config {
            path: path.to_path_buf(),
            reason,
        };
        let bytes = std::fs::read(path).map_err(|error| config(error.to_string()))?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| config(error.to_string()))?;
        Network::from_value(value).map_err(config)
    }

    pub(crate) fn from_value(value: Value) -> std::result::Result<Network, String> {
        let Value::Object(mut object) = value else {
            return Err("not a JSON object".into());
        };
        let name = match object.get("name") {
            Some(Value::String(name)) => name.clone(),
            _ => return Err("missing 'name'".into()),
        };
        if !is_identifier(&name) {
            return Err(format!("invalid characters found in network name {name:?}"));
        }
        let cni_version = pick_version(&object)?;
        let flag = |key: &str| match object.get(key) {
            None => Ok(false),
            Some(Value::Bool(on)) => Ok(*on),
            Some(Value::String(text)) => text.parse::<bool>().map_err(|_| format!("invalid {key}")),
            Some(_) => Err(format!("invalid {key}")),
        };
        let (disable_check, disable_gc) = (flag("disableCheck")?, flag("disableGC")?);
        let plugins = match object.remove("plugins") {
            // A single plugin's configuration is a list of one.
            None if object.contains_key("type") => vec![object],
            None => return Err("missing 'plugins'".into()),
            Some(Value::Array(plugins)) => plugins
                .into_iter()
                .enumerate()
                .map(|(index, plugin)| match plugin {
                    Value::Object(plugin) => Ok(plugin),
                    _ => Err(format!("plugin config {index} is not an object")),
                })
                .collect::<std::result::Result<_, _>>()?,
            Some(_) => return Err("'plugins' is not a list".into()),
        };
        if plugins.is_empty() {
            return Err("no plugins in list".into());
        }
        for (index, plugin) in plugins.iter().enumerate() {
            match plugin.get("type").and_then(Value::as_str) {
                // The type names a file of the plugin directories and must not lead out of them.
                Some(kind) if !kind.is_empty() && !kind.contains('/') && kind != ".." && kind != "." => {}
                Some(kind) => return Err(format!("invalid plugin name {kind:?}")),
                None => return Err(format!("plugin config {index} is missing 'type'")),
            }
        }
        Ok(Network {
            name,
            cni_version,
            disable_check,
            disable_gc,
            plugins,
        })
    }

    pub(crate) fn to_value(&self) -> Value {
        serde_json::json!({
            "name": self.name,
            "cniVersion": self.cni_version,
            "disableCheck": self.disable_check,
            "disableGC": self.disable_gc,
            "plugins": self.plugins,
        })
    }

    pub(crate) fn at_least(&self, version: &str) -> bool {
        position(&self.cni_version) >= position(version)
    }
}

fn position(version: &str) -> Option<usize> {
    SUPPORTED_VERSIONS.iter().position(|known| *known == version)
}

/// The version to speak: the highest of `cniVersions` that we know, else `cniVersion`.
fn pick_version(object: &Map<String, Value>) -> std::result::Result<String, String> {
    let mut wanted: Vec<&str> = object
        .get("cniVersions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    match object.get("cniVersion") {
        Some(Value::String(version)) if !version.is_empty() => wanted.push(version),
        None | Some(Value::String(_)) => {
            if wanted.is_empty() {
                wanted.push("0.1.0")
            }
        }
        Some(_) => return Err("'cniVersion' is not a string".into()),
    }
    wanted
        .iter()
        .filter_map(|version| Some((position(version)?, *version)))
        .max()
        .map(|(_, version)| version.to_string())
        .ok_or_else(|| format!("unsupported cniVersion {}", wanted.join(", ")))
}

/// The characters the spec allows in network names and container ids.
pub(crate) fn is_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_config_must_have() {
        fn check(value: Value, expected: std::result::Result<(&str, usize), &str>) {
            let got = Network::from_value(value.clone());
            match expected {
                Ok((version, plugins)) => {
                    let network = got.unwrap_or_else(|error| panic!("{value}: {error}"));
                    assert_eq!(
                        (network.cni_version.as_str(), network.plugins.len()),
                        (version, plugins),
                        "{value}"
                    );
                }
                Err(reason) => assert!(got.clone().is_err_and(|e| e.contains(reason)), "{value}: {got:?}"),
            }
        }
        check(
            json!({"name":"n","cniVersion":"1.0.0","plugins":[{"type":"a"},{"type":"b"}]}),
            Ok(("1.0.0", 2)),
        );
        check(
            json!({"name":"n","cniVersion":"0.4.0","type":"bridge"}),
            Ok(("0.4.0", 1)),
        );
        check(json!({"name":"n","type":"bridge"}), Ok(("0.1.0", 1)));
        check(
            json!({"name":"n","cniVersions":["0.4.0","1.1.0","9.0.0"],"plugins":[{"type":"a"}]}),
            Ok(("1.1.0", 1)),
        );
        check(
            json!({"name":"n","cniVersion":"9.0.0","plugins":[{"type":"a"}]}),
            Err("unsupported cniVersion 9.0.0"),
        );
        check(
            json!({"cniVersion":"1.0.0","plugins":[{"type":"a"}]}),
            Err("missing 'name'"),
        );
        check(
            json!({"name":"a/b","plugins":[{"type":"a"}]}),
            Err("invalid characters"),
        );
        check(json!({"name":"n","plugins":[]}), Err("no plugins"));
        check(
            json!({"name":"n","plugins":[{"type":"../../bin/sh"}]}),
            Err("invalid plugin name"),
        );
        check(json!({"name":"n","plugins":[{}]}), Err("missing 'type'"));
        check(json!([1]), Err("not a JSON object"));
    }

    #[test]
    fn first_usable_file_by_name_wins() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Network::load(dir.path()), Err(Error::NoConfig(_))));
        assert!(matches!(
            Network::load(&dir.path().join("missing")),
            Err(Error::NoConfig(_))
        ));
        std::fs::write(dir.path().join("00-broken.conflist"), "{").unwrap();
        assert!(matches!(Network::load(dir.path()), Err(Error::Config { .. })));
        std::fs::write(dir.path().join("20-b.conf"), r#"{"name":"b","type":"x"}"#).unwrap();
        std::fs::write(
            dir.path().join("10-a.conflist"),
            r#"{"name":"a","plugins":[{"type":"x"}]}"#,
        )
        .unwrap();
        std::fs::write(dir.path().join("05-readme.txt"), "hello").unwrap();
        assert_eq!(Network::load(dir.path()).unwrap().name, "a");
    }
}
