//! The files of `--config` and `--config-dir`, as one object: each file of the folder is merged over what came before it.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{API_VERSION, Error, KIND, KubeletConfiguration, MAX_FILE};

/// Files in a folder, with those below it.
const MAX_FILES: usize = 1000;

impl KubeletConfiguration {
    /// What the file says, and over it what the `.conf` files of the folder say, in the order of their names.
    pub fn read(file: Option<&Path>, folder: Option<&Path>) -> Result<Self, Error> {
        let mut all = Map::new();
        for path in file.map(Path::to_owned).into_iter().chain(drop_ins(folder)?) {
            let fields = decode(&contents(&path)?).map_err(|why| Error::In {
                path: path.clone(),
                why: Box::new(why),
            })?;
            merge(&mut all, fields);
        }
        Self::from_fields(all)
    }

    pub fn parse(data: &[u8]) -> Result<Self, Error> {
        Self::from_fields(decode(data)?)
    }
}

fn contents(path: &Path) -> Result<Vec<u8>, Error> {
    use std::io::Read;
    let read = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let mut data = Vec::new();
    let file = std::fs::File::open(path).map_err(read)?;
    file.take(MAX_FILE + 1).read_to_end(&mut data).map_err(read)?;
    if data.len() as u64 > MAX_FILE {
        return Err(Error::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(data)
}

/// The `.conf` files in a folder and in those below it.
fn drop_ins(folder: Option<&Path>) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    if let Some(folder) = folder {
        walk(folder, &mut found)?;
    }
    Ok(found)
}

/// In the order of names, each folder where its name belongs.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<(), Error> {
    let read = |source| Error::Read {
        path: folder.to_owned(),
        source,
    };
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let entry = entry.map_err(read)?;
        entries.push((entry.path(), entry.file_type().map_err(read)?.is_dir()));
        if entries.len() > MAX_FILES {
            return Err(Error::TooMany {
                path: folder.to_owned(),
            });
        }
    }
    entries.sort();
    for (path, is_folder) in entries {
        if is_folder {
            walk(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "conf") {
            found.push(path);
        }
        if found.len() > MAX_FILES {
            return Err(Error::TooMany {
                path: folder.to_owned(),
            });
        }
    }
    Ok(())
}

/// The fields of a file, without its kind.
fn decode(data: &[u8]) -> Result<Map<String, Value>, Error> {
    let decoded = skiff_schema::decode::from_yaml(data).map_err(|error| Error::Syntax(error.to_string()))?;
    let Value::Object(mut all) = decoded.value else {
        return Err(Error::Syntax("it is no object".to_owned()));
    };
    let mut text = |name: &str| match all.remove(name) {
        Some(Value::String(text)) => text,
        _ => String::new(),
    };
    let (kind, version) = (text("kind"), text("apiVersion"));
    if (kind.as_str(), version.as_str()) != (KIND, API_VERSION) {
        return Err(Error::Kind { kind, version });
    }
    if !decoded.duplicate_fields.is_empty() {
        return Err(Error::Strict(decoded.duplicate_fields.join(", ")));
    }
    Ok(all)
}

/// COMPAT: as a merge patch. Objects are merged, null takes away, all else replaces.
fn merge(into: &mut Map<String, Value>, from: Map<String, Value>) {
    for (name, value) in from {
        match value {
            Value::Null => {
                into.remove(&name);
            }
            Value::Object(fields) => {
                let known = into.entry(name).or_insert(Value::Null);
                if !known.is_object() {
                    *known = Value::Object(Map::new());
                }
                if let Value::Object(known) = known {
                    merge(known, fields);
                }
            }
            other => {
                into.insert(name, other);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_ins_are_merged_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let head = format!("apiVersion: {API_VERSION}\nkind: {KIND}\n");
            std::fs::write(&path, head + text).unwrap();
            path
        };
        let main = write(
            "main.yaml",
            "maxPods: 1\nkubeReserved: {cpu: 100m, memory: 1Gi}\nclusterDNS: [10.0.0.1]\n",
        );
        write(
            "d/20-b.conf",
            "maxPods: 3\nkubeReserved: {memory: null, pid: '9'}\n",
        );
        write("d/10-a.conf", "maxPods: 2\nclusterDNS: [10.0.0.2, 10.0.0.3]\n");
        write("d/15/x.conf", "podPidsLimit: 7\n");
        write("d/30-not.yaml", "maxPods: 4\n");
        let folder = dir.path().join("d");
        let read = KubeletConfiguration::read(Some(&main), Some(&folder)).unwrap();
        assert_eq!((read.max_pods, read.pod_pids_limit), (Some(3), Some(7)));
        assert_eq!(read.cluster_dns.len(), 2);
        let kept: Vec<(&str, &str)> = { read.kube_reserved.iter() }
            .map(|(name, amount)| (name.as_str(), amount.as_str()))
            .collect();
        assert_eq!(kept, [("cpu", "100m"), ("pid", "9")]);
        assert_eq!(
            KubeletConfiguration::read(None, Some(&folder)).unwrap().max_pods,
            Some(3)
        );
        write("d/40.conf", "maxCats: 3\n");
        let error = KubeletConfiguration::read(Some(&main), Some(&folder)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "strict decoding error: unknown field \"maxCats\""
        );
        std::fs::write(dir.path().join("d/40.conf"), "maxPods: 3\n").unwrap();
        let error = KubeletConfiguration::read(Some(&main), Some(&folder)).unwrap_err();
        assert!(error.to_string().contains("40.conf: no kind \"\""), "{error}");
        assert!(KubeletConfiguration::read(None, Some(&dir.path().join("none"))).is_err());
    }
}
