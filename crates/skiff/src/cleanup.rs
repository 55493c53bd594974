//! `skiff down --delete`: everything that a cluster made on this machine, taken away again. Each step is tried
//! even if an earlier one failed, but that volumes are not taken from containers that are left; what could not be removed
//! is named at the end.

use crate::cluster::{Cluster, remove_if_there};
use anyhow::{Context, Result, bail};
use skiff_client::kubeconfig;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub fn delete(cluster: &Cluster) -> Result<()> {
    // The lock keeps a server from starting in the middle.
    let _lock = if cluster.data_dir.is_dir() {
        cluster.lock()?
    } else {
        None
    };
    let mut failures: Vec<String> = Vec::new();
    let mut attempt = |what: &str, result: Result<()>| {
        let succeeded = result.is_ok();
        if let Err(error) = result {
            failures.push(format!("{what}: {error:#}"));
        }
        succeeded
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut are_gone = true;
        if let Some(endpoint) = cluster.remembered_runtime() {
            are_gone &= attempt("pods", remove_foreign_pods(&endpoint, cluster).await);
        }
        are_gone &= attempt(
            "containers",
            async { Ok(skiff_runtime::cleanup(cluster.runtime_config()?).await?) }.await,
        );
        attempt(
            "nftables",
            async { Ok(skiff_network::proxy::remove(&cluster.proxy_config("")?).await?) }.await,
        );
        attempt(
            "addresses of the load balancer",
            async { Ok(skiff_network::announce::remove(&cluster.announce_config("")).await?) }.await,
        );
        attempt(
            "network policies",
            async { Ok(skiff_network::policy::remove(&cluster.policy_config("")).await?) }.await,
        );
        attempt(
            "pod network",
            async {
                let config = cluster.pod_network_config("", Default::default(), false)?;
                Ok(skiff_network::pods::remove(&config).await?)
            }
            .await,
        );
        if are_gone {
            attempt("volumes", remove_volumes(cluster).await);
        }
    });
    runtime.shutdown_background();
    attempt(
        "listening sockets",
        skiff_sockets::close(&cluster.listening_sockets()).map_err(Into::into),
    );
    attempt("CNI configuration", cluster.remove_published());
    attempt("cgroups", remove_cgroups(&cluster.cgroup()));
    for path in kubeconfig::paths() {
        if path.exists() {
            attempt(
                "kubeconfig",
                kubeconfig::remove(&path, &cluster.kubeconfig(), &cluster.name).map_err(Into::into),
            );
        }
    }
    if failures.is_empty() {
        // With something still mounted or running below them, the folders stay.
        for result in [
            skiff_fs::remove_tree(&cluster.run_dir()).map_err(Into::into),
            remove_data(&cluster.data_dir),
        ] {
            if let Err(error) = result {
                failures.push(format!("files: {error:#}"));
            }
        }
    }
    if !failures.is_empty() {
        bail!(
            "cluster {:?} is not wholly removed; run the command again\n  {}",
            cluster.name,
            failures.join("\n  ")
        );
    }
    cluster.forget()
}

/// Removes what a join left that ended before anything was started.
pub fn forget_unstarted(cluster: &Cluster) -> Result<()> {
    remove_data(&cluster.data_dir)?;
    cluster.forget()
}

/// Pods of this cluster in a runtime that is not ours: those that carry its mark.
async fn remove_foreign_pods(endpoint: &str, cluster: &Cluster) -> Result<()> {
    use skiff_cri::RuntimeServiceClient;
    use skiff_cri::v1::{ListPodSandboxRequest, RemovePodSandboxRequest, StopPodSandboxRequest};
    let channel = match skiff_cri::connect(endpoint).await {
        Ok(channel) => channel,
        Err(error) => {
            // A runtime that is gone for good must not keep the rest from being removed.
            say!(
                "The runtime at {endpoint} does not answer ({error}); pods that it still has are left to it."
            );
            return Ok(());
        }
    };
    let mut client = RuntimeServiceClient::new(channel);
    let listed = client
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await?
        .into_inner();
    for sandbox in listed.items {
        if sandbox.labels.get(skiff_node::OWNER_LABEL) == Some(&cluster.cgroup()) {
            client
                .stop_pod_sandbox(StopPodSandboxRequest {
                    pod_sandbox_id: sandbox.id.clone(),
                })
                .await?;
            client
                .remove_pod_sandbox(RemovePodSandboxRequest {
                    pod_sandbox_id: sandbox.id,
                })
                .await?;
        }
    }
    Ok(())
}

/// Volumes of pods, and the disks that came for them; the runtime has taken down its own mounts. The files go last: with a disk left,
/// they say what is to be done the next time.
async fn remove_volumes(cluster: &Cluster) -> Result<()> {
    let removed = skiff_node::remove_disks(&cluster.kubelet_root()).await;
    removed.map_err(anyhow::Error::msg)?;
    cluster.remove_kubelet_root()
}

/// Removes the cluster's cgroup in every hierarchy.
fn remove_cgroups(name: &str) -> Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    remove_cgroup(&root.join(name))?;
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        remove_cgroup(&entry.path().join(name))?;
    }
    Ok(())
}

/// A cgroup is a folder whose files go with it, and that must be empty of other cgroups.
fn remove_cgroup(path: &Path) -> Result<()> {
    if !path.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(path)?.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// What skiff makes in its data directory.
pub const OURS: &[&str] = &[
    "admin.kubeconfig",
    "agent.json",
    "cni",
    "encryption",
    "kubelet",
    "kubelet-root",
    "logs",
    "pki",
    "runtime",
    "runtime-endpoint",
    "server-id",
    "server.json",
    "skiff.log",
    "skiff.log.1",
    "skiff.pid",
    "store",
    "store.migrated",
    "store.new",
    "volumes",
];

/// The data directory may be one that the user had before, a link or a mount point: what is ours in it goes, and
/// the folder itself if that was all.
fn remove_data(dir: &Path) -> Result<()> {
    for name in OURS {
        let path = dir.join(name);
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Ok(found) if found.is_symlink() => bail!(
                "{} is a link that skiff did not make; remove it and what it leads to by hand",
                path.display()
            ),
            _ => skiff_fs::remove_tree(&path)?,
        }
    }
    let stays = |why: &str| {
        say!("{} {why}; it stays.", dir.display());
        Ok(())
    };
    match fs::remove_dir(dir) {
        Ok(()) => Ok(()),
        Err(e) => match e.kind() {
            ErrorKind::NotFound => Ok(()),
            ErrorKind::DirectoryNotEmpty => stays("holds files that are not skiff's"),
            ErrorKind::NotADirectory => stays("is a link"),
            ErrorKind::ResourceBusy => stays("is a mount point"),
            _ => Err(e).with_context(|| format!("cannot remove {}", dir.display())),
        },
    }
}

impl Cluster {
    fn runtime_note(&self) -> PathBuf {
        self.data_dir.join("runtime-endpoint")
    }

    /// Notes which runtime holds the pods, so that their removal finds them.
    pub fn remember_runtime(&self, endpoint: Option<&str>) -> Result<()> {
        match endpoint {
            Some(endpoint) if self.remembered_runtime().as_deref() == Some(endpoint) => Ok(()),
            Some(endpoint) => Ok(skiff_fs::write_durably(
                &self.runtime_note(),
                endpoint.as_bytes(),
                0o644,
            )?),
            None => remove_if_there(&self.runtime_note()),
        }
    }

    pub fn remembered_runtime(&self) -> Option<String> {
        fs::read_to_string(self.runtime_note()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_ours_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        fs::create_dir_all(dir.join("pki")).unwrap();
        fs::write(dir.join("pki/ca.key"), "x").unwrap();
        fs::write(dir.join("skiff.log"), "x").unwrap();
        fs::write(dir.join("mine.txt"), "x").unwrap();
        remove_data(&dir).unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_file(dir.join("mine.txt")).unwrap();
        remove_data(&dir).unwrap();
        assert!(!dir.exists());
        remove_data(&dir).unwrap();
    }

    #[test]
    fn links_and_mounts_of_the_user_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let (dir, elsewhere) = (root.path().join("data"), root.path().join("elsewhere"));
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(&elsewhere).unwrap();
        fs::write(elsewhere.join("precious"), "x").unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.join("store")).unwrap();
        let error = remove_data(&dir).unwrap_err().to_string();
        assert!(
            error.contains("store is a link that skiff did not make"),
            "{error}"
        );
        assert!(elsewhere.join("precious").exists());
        fs::remove_file(dir.join("store")).unwrap();

        // The data directory itself may be reached through a link.
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        fs::write(dir.join("skiff.log"), "x").unwrap();
        remove_data(&link).unwrap();
        assert!(dir.exists() && fs::read_dir(&dir).unwrap().count() == 0);
    }

    /// What is noted of disks goes with them. Of an earlier boot nothing else is left of them.
    #[tokio::test]
    async fn volumes_go_with_the_notes_of_their_disks() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster {
            name: "one".to_owned(),
            slot: 0,
            data_dir: dir.path().join("data"),
            bind: "127.0.0.1:0".parse().unwrap(),
            kubelet_port: 0,
            pod_cidr: String::new(),
            service_cidr: String::new(),
            agent: false,
            etcd: None,
        };
        fs::create_dir_all(&cluster.data_dir).unwrap();
        let root = dir.path().join("root");
        cluster.take_kubelet_root(Some(&root)).unwrap();
        let note = root.join("disks/x.json");
        fs::create_dir_all(root.join("disks")).unwrap();
        fs::create_dir_all(root.join("pods/u1")).unwrap();
        let text = r#"{"source":{"local":{"volume":"pv","device":"/dev/x"}},"block":true,"users":["u1"],"held":"/dev/x","boot":"earlier"}"#;
        fs::write(&note, text).unwrap();
        remove_volumes(&cluster).await.unwrap();
        assert!(!root.exists());
        // There may have been none.
        remove_volumes(&cluster).await.unwrap();
    }

    /// A data directory on a disk of its own is emptied, and neither unmounted nor taken for deleted.
    #[test]
    fn a_data_directory_that_is_a_mount_point_is_emptied() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let disk = root.path().join("disk");
        let dir = root.path().join("data");
        fs::create_dir_all(disk.join("pki")).unwrap();
        fs::write(disk.join("pki/ca.key"), "x").unwrap();
        fs::create_dir_all(&dir).unwrap();
        rustix::mount::mount_bind(&disk, &dir).unwrap();
        let result = remove_data(&dir);
        let left = skiff_fs::mounts_below(root.path());
        skiff_fs::unmount_below(root.path()).unwrap();
        result.unwrap();
        assert_eq!(left.unwrap().len(), 1, "the user's mount was taken down");
        assert_eq!(fs::read_dir(&disk).unwrap().count(), 0);
    }
}
