//! A container runtime that is not ours (containerd, CRI-O) looks for its network where its own configuration says. The
//! pod network's configuration and plugin are put there, and taken away with the cluster.

use crate::cluster::{Cluster, remove_if_there};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skiff_cri::{RuntimeServiceClient, v1};
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the runtime may take to tell about itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// Where runtimes look if they do not say it, as upstream's kubelet once assumed.
const CONF_DIR: &str = "/etc/cni/net.d";
const BIN_DIR: &str = "/opt/cni/bin";
/// Runtimes take the first configuration in the order of names.
const FIRST: &str = "00-skiff-";

/// What was put into folders that are not ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The CNI configuration.
    pub configuration: PathBuf,
    /// The CNI plugin, a link to this binary.
    pub plugin: PathBuf,
}

/// What a runtime says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    conf_dir: Option<PathBuf>,
    bin_dir: Option<PathBuf>,
    sandbox_image: Option<String>,
}

/// Reads what containerd adds to its status; other runtimes tell less.
fn told(info: &HashMap<String, String>) -> Told {
    let config = info
        .get("config")
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    let config = config.unwrap_or_default();
    let text = |pointer: &str| {
        let found = config.pointer(pointer).and_then(Value::as_str);
        found.filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let bin_dir = text("/cni/binDir").or_else(|| text("/cni/binDirs/0"));
    Told {
        conf_dir: text("/cni/confDir").map(PathBuf::from),
        bin_dir: bin_dir.map(PathBuf::from),
        sandbox_image: text("/sandboxImage"),
    }
}

async fn ask(endpoint: &str) -> Result<Told> {
    let asking = async {
        let channel = skiff_cri::connect(endpoint).await?;
        let request = v1::StatusRequest { verbose: true };
        let answer = RuntimeServiceClient::new(channel).status(request).await?;
        anyhow::Ok(told(&answer.into_inner().info))
    };
    let failed = || format!("the container runtime at {endpoint} does not answer; is it running?");
    match tokio::time::timeout(PATIENCE, asking).await {
        Ok(told) => told.with_context(failed),
        Err(_) => bail!("{}", failed()),
    }
}

/// Where the pod network belongs; `None` if the runtime looks into our own folder. The folders are those of the flags,
/// else what the runtime says, else the usual ones.
pub async fn find(
    cluster: &Cluster,
    endpoint: &str,
    conf_dir: Option<&Path>,
    bin_dir: Option<&Path>,
) -> Result<Option<Published>> {
    let told = ask(endpoint).await?;
    let choose = |flag: Option<&Path>, told: Option<PathBuf>, usual: &str| {
        flag.map(Path::to_path_buf)
            .or(told)
            .unwrap_or_else(|| PathBuf::from(usual))
    };
    let conf_dir = choose(conf_dir, told.conf_dir, CONF_DIR);
    let bin_dir = choose(bin_dir, told.bin_dir, BIN_DIR);
    let own = fs::canonicalize(cluster.cni_conf_dir()).ok();
    if own.is_some() && own == fs::canonicalize(&conf_dir).ok() {
        return Ok(None);
    }
    if let Some(image) = told.sandbox_image {
        tracing::info!(
            image,
            "the runtime makes sandboxes of this image; it must be there, or in reach"
        );
    }
    if !bin_dir.join("loopback").exists() {
        bail!(
            "the container runtime looks for CNI plugins in {}, and the plugin `loopback` is not there; install the CNI plugins (Debian: containernetworking-plugins)",
            bin_dir.display()
        );
    }
    refuse_others(&cluster.name, &conf_dir)?;
    Ok(Some(Published {
        configuration: conf_dir.join(format!("{FIRST}{}.conflist", cluster.name)),
        plugin: bin_dir.join(skiff_cni::PLUGIN_NAME),
    }))
}

/// Looks for configurations that are in the way.
fn refuse_others(cluster: &str, conf_dir: &Path) -> Result<()> {
    fs::create_dir_all(conf_dir).with_context(|| conf_dir.display().to_string())?;
    for entry in fs::read_dir(conf_dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let other = name
            .strip_prefix(FIRST)
            .and_then(|rest| rest.strip_suffix(".conflist"));
        if let Some(other) = other.filter(|other| *other != cluster) {
            bail!(
                "the container runtime serves the cluster {other:?} ({}); it has one pod network at a time",
                conf_dir.join(&name).display()
            );
        }
        if other.is_none()
            && [".conf", ".conflist", ".json"]
                .iter()
                .any(|end| name.ends_with(end))
        {
            tracing::warn!(file = name, folder = %conf_dir.display(), "a CNI configuration beside ours: the runtime takes the first by name");
        }
    }
    Ok(())
}

/// Links the plugin to where the runtime looks for it; the configuration follows when the network stands.
pub fn link_plugin(published: &Published, exe: &Path) -> Result<()> {
    match fs::symlink_metadata(&published.plugin) {
        Ok(found) if !found.is_symlink() => bail!(
            "{} is there and is not skiff's; remove it first",
            published.plugin.display()
        ),
        // The same binary, by whatever name it was started.
        Ok(_) if fs::canonicalize(&published.plugin).ok() == fs::canonicalize(exe).ok() => {}
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {
            let beside = published.plugin.with_extension("new");
            remove_if_there(&beside)?;
            std::os::unix::fs::symlink(exe, &beside).with_context(|| beside.display().to_string())?;
            fs::rename(&beside, &published.plugin)?;
        }
    }
    Ok(())
}

impl Cluster {
    fn published_note(&self) -> PathBuf {
        self.data_dir.join("cni/published.json")
    }

    /// What this cluster has in folders of a runtime that is not ours.
    pub fn published(&self) -> Option<Published> {
        serde_json::from_slice(&fs::read(self.published_note()).ok()?).ok()
    }

    /// Notes it before it is made, so that its removal finds it; what was elsewhere before is taken away.
    pub fn note_published(&self, published: Option<&Published>) -> Result<()> {
        if self.published().as_ref() == published {
            return Ok(());
        }
        self.remove_published()?;
        match published {
            Some(published) => Ok(skiff_fs::write_durably(
                &self.published_note(),
                &serde_json::to_vec(published)?,
                0o644,
            )?),
            None => Ok(()),
        }
    }

    /// Takes the configuration away, and the plugin unless another cluster uses it.
    pub fn remove_published(&self) -> Result<()> {
        let Some(published) = self.published() else {
            return Ok(());
        };
        remove_if_there(&published.configuration)?;
        let shared = Cluster::all()?.iter().any(|other| {
            other.name != self.name
                && other
                    .published()
                    .is_some_and(|one| one.plugin == published.plugin)
        });
        let is_link = fs::symlink_metadata(&published.plugin).is_ok_and(|found| found.is_symlink());
        if is_link && !shared {
            remove_if_there(&published.plugin)?;
        }
        remove_if_there(&self.published_note())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerd_tells_where_it_looks() {
        let info = |config: &str| HashMap::from([("config".to_owned(), config.to_owned())]);
        let first = told(&info(
            r#"{"cni":{"binDir":"/usr/lib/cni","confDir":"/etc/cni/net.d"},"sandboxImage":"registry.k8s.io/pause:3.6"}"#,
        ));
        assert_eq!(
            first,
            Told {
                conf_dir: Some("/etc/cni/net.d".into()),
                bin_dir: Some("/usr/lib/cni".into()),
                sandbox_image: Some("registry.k8s.io/pause:3.6".to_owned()),
            }
        );
        let second = told(&info(r#"{"cni":{"binDirs":["/opt/cni/bin","/x"],"confDir":""}}"#));
        assert_eq!(
            (second.conf_dir, second.bin_dir),
            (None, Some("/opt/cni/bin".into()))
        );
        assert_eq!(told(&info("[runtime]\n")), Told::default());
        assert_eq!(told(&HashMap::new()), Told::default());
    }

    #[test]
    fn what_others_put_there_stays() {
        let root = tempfile::tempdir().unwrap();
        let (conf, bin, exe) = (
            root.path().join("conf"),
            root.path().join("bin"),
            root.path().join("skiff"),
        );
        fs::create_dir(&bin).unwrap();
        fs::write(&exe, "").unwrap();
        let published = Published {
            configuration: conf.join("00-skiff-one.conflist"),
            plugin: bin.join(skiff_cni::PLUGIN_NAME),
        };
        for _ in 0..2 {
            refuse_others("one", &conf).unwrap();
            fs::write(&published.configuration, "{}").unwrap();
            link_plugin(&published, &exe).unwrap();
            assert_eq!(fs::read_link(&published.plugin).unwrap(), exe);
        }
        let error = refuse_others("two", &conf).unwrap_err().to_string();
        assert!(error.contains("serves the cluster \"one\""), "{error}");
        fs::remove_file(&published.plugin).unwrap();
        fs::write(&published.plugin, "another's").unwrap();
        let error = link_plugin(&published, &exe).unwrap_err().to_string();
        assert!(error.contains("is not skiff's"), "{error}");
        assert_eq!(fs::read_to_string(&published.plugin).unwrap(), "another's");
    }
}
