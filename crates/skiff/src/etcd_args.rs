//! The flags of etcd, and which store a cluster uses: what the flags say, or else what a server that joined was told, or
//! else what the cluster's record says, or else the embedded one.

use crate::cli::{ServerArgs, file};
use crate::cluster::Cluster;
use crate::server_state::ServerState;
use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use skiff_store::Store;
use skiff_store::etcd::{Options, Owner};
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EtcdArgs {
    /// Keep state in this etcd instead of the embedded store
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub etcd_servers: Vec<String>,
    /// Keep all keys below this prefix in etcd; two clusters on one etcd need two
    #[arg(long, value_name = "PREFIX", default_value = "/registry")]
    pub etcd_prefix: String,
    /// CA of the etcd servers
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub etcd_cafile: Option<PathBuf>,
    /// Client certificate for etcd
    #[arg(long, value_name = "FILE", value_parser = file, requires = "etcd_keyfile")]
    pub etcd_certfile: Option<PathBuf>,
    /// Key of the client certificate for etcd
    #[arg(long, value_name = "FILE", value_parser = file, requires = "etcd_certfile")]
    pub etcd_keyfile: Option<PathBuf>,
}

impl EtcdArgs {
    /// `None`: no etcd is named.
    pub fn given(&self) -> Option<&EtcdArgs> {
        (!self.etcd_servers.is_empty()).then_some(self)
    }

    pub fn options(&self, owner: Option<Owner>) -> Options {
        let mut options = Options::new(&self.etcd_servers);
        options.prefix.clone_from(&self.etcd_prefix);
        options.owner = owner;
        options.ca_file.clone_from(&self.etcd_cafile);
        options.cert_file.clone_from(&self.etcd_certfile);
        options.key_file.clone_from(&self.etcd_keyfile);
        options
    }

    pub fn place(&self) -> String {
        format!("etcd at {}", self.etcd_servers.join(", "))
    }
}

impl ServerArgs {
    /// The etcd that a server with these flags is to use; `None`: the embedded store. A server that joined has completed
    /// them by [`ServerState::complete`].
    pub fn etcd_of<'a>(&'a self, cluster: &'a Cluster) -> Option<&'a EtcdArgs> {
        self.etcd.given().or(cluster.etcd.as_ref())
    }
}

impl Cluster {
    /// The etcd that a server with these flags would use, or `None`; for commands that are not the server.
    pub fn etcd_with(&self, flags: Option<&EtcdArgs>) -> Result<Option<EtcdArgs>> {
        let flags = flags.and_then(EtcdArgs::given);
        let joined = ServerState::joined(self)?;
        let etcd = match (joined, flags) {
            (Some(joined), Some(flags)) => Some(joined.complete_etcd(flags)),
            (Some(joined), None) => joined.etcd(),
            (None, flags) => flags.cloned(),
        };
        Ok(etcd.or_else(|| self.etcd.clone()))
    }

    pub fn store_dir(&self) -> PathBuf {
        self.data_dir.join("store")
    }

    /// Whose keys in etcd are this cluster's: whoever has the key of service accounts is of the same cluster.
    pub fn owner(&self, service_account_key: &str) -> Owner {
        let id = Sha256::digest(service_account_key.as_bytes());
        Owner {
            id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            name: self.name.clone(),
        }
    }

    /// Opens the store as it is, without encryption. `service_account_key` is the public one.
    pub async fn open_store(
        &self,
        etcd: Option<&EtcdArgs>,
        service_account_key: &str,
    ) -> Result<Arc<dyn Store>> {
        let Some(etcd) = etcd else {
            let dir = self.store_dir();
            let store = tokio::task::spawn_blocking(move || skiff_store::Embedded::open(dir)).await??;
            return Ok(Arc::new(store));
        };
        let store = skiff_store::Etcd::open(etcd.options(Some(self.owner(service_account_key)))).await;
        Ok(Arc::new(
            store.with_context(|| format!("{} cannot be used", etcd.place()))?,
        ))
    }
}
