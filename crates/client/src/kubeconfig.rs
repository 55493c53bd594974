//! kubeconfig files: one context a cluster, merged into whatever the user's file already holds.
//!
//! Files are changed as plain documents, so that what skiff does not know stays as it is; they are
//! replaced whole, with a mode that keeps the key to the user.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::config::{Kubeconfig, KubeconfigError};
use serde_json::{Map, Value, json};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a kubeconfig: {message}")]
    Format { path: PathBuf, message: String },
    #[error(transparent)]
    Read(#[from] KubeconfigError),
}

/// Everything a context needs; cluster, user and context all get `name`.
#[derive(Clone, Debug)]
pub struct ClusterEntry {
    pub name: String,
    /// `https://host:port`
    pub server: String,
    pub ca_pem: String,
    pub client_certificate_pem: String,
    pub client_key_pem: String,
}

impl ClusterEntry {
    /// A kubeconfig with this cluster alone.
    pub fn document(&self) -> Value {
        let mut document = empty_document();
        self.merge_into(&mut document, true);
        document
    }

    fn merge_into(&self, document: &mut Value, make_current: bool) {
        let name = &self.name;
        put(
            document,
            "clusters",
            name,
            "cluster",
            json!({
                "server": self.server,
                "certificate-authority-data": STANDARD.encode(&self.ca_pem),
            }),
        );
        put(
            document,
            "users",
            name,
            "user",
            json!({
                "client-certificate-data": STANDARD.encode(&self.client_certificate_pem),
                "client-key-data": STANDARD.encode(&self.client_key_pem),
            }),
        );
        put(
            document,
            "contexts",
            name,
            "context",
            json!({"cluster": name, "user": name}),
        );
        if make_current {
            document["current-context"] = json!(name);
        }
    }
}

/// The files kubectl reads: those of `KUBECONFIG`, otherwise `.kube/config` of the home directory.
pub fn paths() -> Vec<PathBuf> {
    paths_from(
        std::env::var_os("KUBECONFIG").as_deref(),
        std::env::var_os("HOME").as_deref(),
    )
}

fn paths_from(kubeconfig: Option<&std::ffi::OsStr>, home: Option<&std::ffi::OsStr>) -> Vec<PathBuf> {
    let listed: Vec<PathBuf> = kubeconfig
        .map(|value| {
            std::env::split_paths(value)
                .filter(|path| !path.as_os_str().is_empty())
                .collect()
        })
        .unwrap_or_default();
    if !listed.is_empty() {
        return listed;
    }
    home.map(|home| vec![Path::new(home).join(".kube/config")])
        .unwrap_or_default()
}

/// The merge of all files that exist; the first one to set a value wins.
pub fn load(paths: &[PathBuf]) -> Result<Kubeconfig, Error> {
    let mut merged = Kubeconfig::default();
    for path in paths.iter().filter(|path| path.exists()) {
        merged = merged.merge(Kubeconfig::read_from(path)?)?;
    }
    Ok(merged)
}

/// Writes a kubeconfig with this cluster alone.
pub fn write(path: &Path, entry: &ClusterEntry) -> Result<(), Error> {
    write_document(path, &entry.document())
}

/// Adds the cluster to the file, or replaces it there. It becomes the current context if `make_current`
/// or if there is none.
pub fn merge(path: &Path, entry: &ClusterEntry, make_current: bool) -> Result<(), Error> {
    let _lock = Lock::take(path)?;
    let mut document = read_document(path)?;
    let no_current = document["current-context"].as_str().is_none_or(str::is_empty);
    entry.merge_into(&mut document, make_current || no_current);
    write_document(path, &document)
}

/// Removes the cluster from the file, if the file's cluster of that name is the one in `own`, the cluster's
/// admin kubeconfig. A file without it is not touched.
pub fn remove(path: &Path, own: &Path, name: &str) -> Result<(), Error> {
    if !path.exists() || !own.exists() {
        return Ok(());
    }
    let _lock = Lock::take(path)?;
    let mut document = read_document(path)?;
    let authority = certificate_authority(&document, name);
    if authority.is_none() || authority != certificate_authority(&read_document(own)?, name) {
        return Ok(());
    }
    for list in ["clusters", "users", "contexts"] {
        if let Some(entries) = document[list].as_array_mut() {
            entries.retain(|entry| entry["name"] != name);
        }
    }
    if document["current-context"] == name {
        document["current-context"] = json!("");
    }
    write_document(path, &document)
}

/// What tells one cluster from another of the same name.
fn certificate_authority(document: &Value, name: &str) -> Option<Value> {
    let clusters = document["clusters"].as_array()?;
    let entry = clusters.iter().find(|entry| entry["name"] == name)?;
    entry["cluster"].get("certificate-authority-data").cloned()
}

fn empty_document() -> Value {
    json!({"apiVersion": "v1", "kind": "Config", "preferences": {}, "clusters": [], "users": [], "contexts": [], "current-context": ""})
}

fn put(document: &mut Value, list: &str, name: &str, field: &str, content: Value) {
    if !document[list].is_array() {
        document[list] = json!([]);
    }
    let Some(entries) = document[list].as_array_mut() else {
        return;
    };
    let mut entry = Map::new();
    entry.insert("name".into(), json!(name));
    entry.insert(field.into(), content);
    match entries.iter_mut().find(|entry| entry["name"] == name) {
        Some(present) => *present = Value::Object(entry),
        None => entries.push(Value::Object(entry)),
    }
}

fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::Io {
        path: path.to_owned(),
        source,
    }
}

fn read_document(path: &Path) -> Result<Value, Error> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(empty_document()),
        Err(error) => return Err(io_error(path)(error)),
    };
    if text.trim().is_empty() {
        return Ok(empty_document());
    }
    let format = |message: String| Error::Format {
        path: path.to_owned(),
        message,
    };
    let document: Value = serde_saphyr::from_str(&text).map_err(|error| format(error.to_string()))?;
    if !document.is_object() {
        return Err(format("it is not a map".into()));
    }
    Ok(document)
}

fn write_document(path: &Path, document: &Value) -> Result<(), Error> {
    let text = serde_saphyr::to_string(document).map_err(|error| Error::Format {
        path: path.to_owned(),
        message: error.to_string(),
    })?;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(io_error(parent))?;
    }
    // A link stays a link: its target is replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    // What is there already needs no room on a full disk.
    if fs::read(&target).is_ok_and(|present| present == text.as_bytes()) {
        return Ok(());
    }
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = target.with_file_name(name);
    let result = (|| {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &target)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.map_err(io_error(&target))
}

/// Keeps two skiffs from losing each other's context. The kernel frees the lock with the process.
struct Lock {
    _file: fs::File,
}

impl Lock {
    fn take(path: &Path) -> Result<Lock, Error> {
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        fs::create_dir_all(directory).map_err(io_error(directory))?;
        let file = fs::File::open(directory).map_err(io_error(directory))?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|errno| io_error(directory)(errno.into()))?;
        Ok(Lock { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn entry(name: &str) -> ClusterEntry {
        ClusterEntry {
            name: name.into(),
            server: "https://127.0.0.1:6443".into(),
            ca_pem: "ca".into(),
            client_certificate_pem: "certificate".into(),
            client_key_pem: "key".into(),
        }
    }

    #[test]
    fn merging_keeps_what_others_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/config");
        merge(&path, &entry("one"), false).unwrap();
        let mut document = read_document(&path).unwrap();
        document["users"]
            .as_array_mut()
            .unwrap()
            .push(json!({"name": "x", "user": {"exec": {"unknown": 1}}}));
        write_document(&path, &document).unwrap();
        merge(&path, &entry("two"), false).unwrap();
        merge(&path, &entry("two"), false).unwrap();
        let config = load(&[path.clone(), dir.path().join("missing")]).unwrap();
        assert_eq!(config.current_context.as_deref(), Some("one"));
        assert_eq!(config.contexts.len(), 2);
        merge(&path, &entry("two"), true).unwrap();
        assert_eq!(read_document(&path).unwrap()["current-context"], "two");
        let own = dir.path().join("admin.kubeconfig");
        remove(&path, &own, "two").unwrap();
        let other = ClusterEntry {
            ca_pem: "another cluster's".into(),
            ..entry("two")
        };
        write(&own, &other).unwrap();
        let before = fs::read_to_string(&path).unwrap();
        remove(&path, &own, "two").unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            before,
            "it is not that cluster"
        );
        write(&own, &entry("two")).unwrap();
        remove(&path, &own, "two").unwrap();
        let document = read_document(&path).unwrap();
        assert_eq!(document["clusters"].as_array().unwrap().len(), 1);
        assert_eq!(document["users"][1]["user"]["exec"]["unknown"], 1);
        assert_eq!(document["current-context"], "");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        remove(&dir.path().join("missing"), &own, "two").unwrap();
    }

    #[test]
    fn what_is_no_kubeconfig_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        fs::write(&path, "- a\n- b\n").unwrap();
        assert!(matches!(
            merge(&path, &entry("one"), true),
            Err(Error::Format { .. })
        ));
        assert_eq!(fs::read_to_string(&path).unwrap(), "- a\n- b\n");
    }

    #[test]
    fn the_environment_comes_before_the_home() {
        let check = |env: Option<&str>, expected: &[&str]| {
            let got = paths_from(
                env.map(std::ffi::OsStr::new),
                Some(std::ffi::OsStr::new("/home/u")),
            );
            assert_eq!(got, expected.iter().map(PathBuf::from).collect::<Vec<_>>());
        };
        check(None, &["/home/u/.kube/config"]);
        check(Some(""), &["/home/u/.kube/config"]);
        check(Some("/a:/b"), &["/a", "/b"]);
        check(Some(":/b"), &["/b"]);
    }
}
