//! Encryption at rest: the flags, and the key that an embedded cluster makes for itself.
//!
//! That key lies in `<data-dir>/encryption/config.yaml`, apart from the store: whoever gets hold of the store's folder
//! alone, or of a copy of it, reads no Secret.

use crate::cli::file;
use crate::cluster::Cluster;
use crate::etcd_args::EtcdArgs;
use crate::server_state::ServerState;
use anyhow::{Context, Result, bail};
use clap::{ArgAction, Args};
use futures::FutureExt;
use skiff_encryption::Encryption;
use skiff_server::{HealthCheck, Server};
use skiff_store::Store;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often the file of configuration is looked at, and KMS plugins are asked how they are.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(10);
/// What a cluster without a configuration encrypts.
const ENCRYPTED_BY_DEFAULT: &str = "/registry/secrets/";

#[derive(Debug, Clone, Args)]
pub struct EncryptionArgs {
    /// EncryptionConfiguration: what is encrypted in the store, and how [default: Secrets, if the store is embedded]
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub encryption_provider_config: Option<PathBuf>,
    /// Reload the encryption configuration when its file changes
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = false, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", requires = "encryption_provider_config")]
    pub encryption_provider_config_automatic_reload: bool,
}

impl EncryptionArgs {
    /// What is encrypted at rest; `None`: nothing is.
    pub async fn open(
        &self,
        cluster: &Cluster,
        etcd: Option<&EtcdArgs>,
        store: &Arc<dyn Store>,
    ) -> Result<Option<Arc<Encryption>>> {
        let path = cluster.encryption_config();
        if self.encryption_provider_config.is_none() && etcd.is_none() && !is_there(&path)? {
            let stored = store.range(ENCRYPTED_BY_DEFAULT, None, 0, None).await?;
            if stored
                .items
                .iter()
                .any(|item| skiff_encryption::is_encrypted(&item.value))
            {
                bail!(
                    "the Secrets of cluster {:?} are encrypted and their key is not there: restore {}, or name the configuration that encrypted them by --encryption-provider-config",
                    cluster.name,
                    path.display()
                );
            }
        }
        self.prepare(cluster, etcd).await
    }

    /// The same for a store that has nothing in it yet. The embedded one gets a key if there is none.
    pub async fn prepare(
        &self,
        cluster: &Cluster,
        etcd: Option<&EtcdArgs>,
    ) -> Result<Option<Arc<Encryption>>> {
        if let Some(path) = &self.encryption_provider_config {
            let loaded = load(etcd, path).await;
            return Ok(Some(loaded.context("--encryption-provider-config")?));
        }
        if etcd.is_some() && self.shared_config(cluster, etcd)?.is_none() {
            return Ok(None);
        }
        let path = cluster.encryption_config();
        if !is_there(&path)? {
            write_private(&path, &skiff_encryption::generate()?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Some(load(etcd, &path).await?))
    }

    /// The configuration that other servers need to read the same store. Without a flag, what is in etcd is not
    /// encrypted, unless the cluster came from the embedded store: then it goes on encrypting.
    pub fn shared_config(&self, cluster: &Cluster, etcd: Option<&EtcdArgs>) -> Result<Option<PathBuf>> {
        if let Some(path) = &self.encryption_provider_config {
            return Ok(Some(path.clone()));
        }
        let path = cluster.encryption_config();
        let moved = etcd.is_some() && cluster.etcd.is_some() && is_there(&path)?;
        Ok(moved.then_some(path))
    }

    /// With what a server that joined was told; for commands that are not the server.
    pub fn completed(&self, cluster: &Cluster) -> Result<EncryptionArgs> {
        let mut completed = self.clone();
        if completed.encryption_provider_config.is_none() {
            let joined = ServerState::joined(cluster)?;
            completed.encryption_provider_config = joined.and_then(|joined| joined.files.encryption_config);
        }
        Ok(completed)
    }

    /// The health check of KMS plugins. As upstream, it is there with automatic reload even if there are none yet.
    pub fn health(&self, encryption: Option<&Arc<Encryption>>) -> Option<Arc<dyn HealthCheck>> {
        let encryption = encryption?;
        let wanted = self.encryption_provider_config_automatic_reload || encryption.uses_kms();
        wanted.then(|| Arc::new(KmsHealth(encryption.clone())) as Arc<dyn HealthCheck>)
    }

    /// Follows the file and the KMS plugins for as long as the server runs.
    pub fn follow(&self, encryption: Arc<Encryption>, server: &Server, shutdown: &CancellationToken) {
        let reload = self.encryption_provider_config_automatic_reload;
        let file = self.encryption_provider_config.clone().filter(|_| reload);
        if file.is_none() && !encryption.uses_kms() {
            return;
        }
        let (server, shutdown) = (server.clone(), shutdown.clone());
        tokio::spawn(async move {
            while !shutdown.is_cancelled() {
                let read_again = |prefixes: &[String]| server.read_again(prefixes);
                let following = encryption.follow(file.as_deref(), FOLLOW_INTERVAL, read_again);
                tokio::select! {
                    ended = AssertUnwindSafe(following).catch_unwind() => {
                        if ended.is_err() {
                            tracing::error!("following the encryption configuration panicked, starting it again");
                        }
                        tokio::time::sleep(FOLLOW_INTERVAL).await;
                    }
                    () = shutdown.cancelled() => {}
                }
            }
        });
    }
}

struct KmsHealth(Arc<Encryption>);

#[async_trait::async_trait]
impl HealthCheck for KmsHealth {
    async fn check(&self) -> Result<(), String> {
        self.0.check().await
    }
}

impl Cluster {
    /// The encryption configuration that the cluster made for itself.
    pub fn encryption_config(&self) -> PathBuf {
        self.data_dir.join("encryption/config.yaml")
    }
}

/// What is authenticated is the key as the store has it, and the embedded one has no other prefix.
async fn load(etcd: Option<&EtcdArgs>, path: &Path) -> Result<Arc<Encryption>, skiff_encryption::Error> {
    match etcd {
        None => Encryption::load(path).await,
        Some(etcd) => Encryption::load_below(&etcd.etcd_prefix, path).await,
    }
}

fn is_there(path: &Path) -> Result<bool> {
    path.try_exists()
        .with_context(|| format!("cannot look for {}", path.display()))
}

/// Writes a private file so that after a power cut it is whole or not there: a key that is lost when Secrets were
/// already written by it takes them along.
pub fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    skiff_fs::create_folders_durably(folder, 0o700)?;
    skiff_fs::write_durably(path, text.as_bytes(), 0o600)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("encryption/config.yaml");
        write_private(&path, "secret").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret");
    }

    #[test]
    fn reload_needs_a_file() {
        use crate::cli::Cli;
        use clap::Parser;
        let parse = |flags: &[&str]| Cli::try_parse_from(["skiff", "server"].iter().chain(flags)).is_ok();
        assert!(!parse(&["--encryption-provider-config-automatic-reload"]));
        assert!(parse(&[
            "--encryption-provider-config",
            "x",
            "--encryption-provider-config-automatic-reload=true"
        ]));
    }
}
