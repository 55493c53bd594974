//! A whole API server in this process, over a store in a temporary folder: for tests of its clients. It listens on no
//! port; [`ApiServer::client`] goes through the same chain as a request from outside.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::{Api, Client};
use skiff_api::facts::RuntimeConfig;
use skiff_auth::UserInfo;
use skiff_server::{Server, ServerConfig, ServiceAccountKey};
use skiff_store::{Embedded, Store};
use tokio_util::sync::CancellationToken;

/// Ends with its value.
pub struct ApiServer {
    pub server: Server,
    pub pki: skiff_pki::Pki,
    /// Private and public, PEM.
    pub service_account_keys: (String, String),
    pub stop: CancellationToken,
    dir: tempfile::TempDir,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl ApiServer {
    pub async fn start() -> Result<ApiServer> {
        ApiServer::over(|store| Arc::new(store)).await
    }

    /// Serves what is off by default, too, in the words of `--runtime-config`.
    pub async fn serving(runtime_config: &[&str]) -> Result<ApiServer> {
        ApiServer::started(runtime_config, |store| Arc::new(store)).await
    }

    /// Over whatever `wrap` makes of the store.
    pub async fn over(wrap: impl FnOnce(Embedded) -> Arc<dyn Store>) -> Result<ApiServer> {
        ApiServer::started(&[], wrap).await
    }

    /// Over whatever `wrap` makes of the store, with what `--runtime-config` says.
    pub async fn started(
        runtime_config: &[&str],
        wrap: impl FnOnce(Embedded) -> Arc<dyn Store>,
    ) -> Result<ApiServer> {
        let dir = tempfile::tempdir()?;
        let store = Embedded::open(dir.path().join("store")).context("opening the store")?;
        let pki = skiff_pki::Pki::open(&dir.path().join("pki"))?;
        let (private_key, public_key) = pki.service_account_keys()?;
        let service_account_keys = (private_key.clone(), public_key.clone());
        let identity = pki.serving("apiserver", "kube-apiserver", &["localhost".to_owned()])?;
        let stop = CancellationToken::new();
        let server = Server::start(ServerConfig {
            store: wrap(store),
            service_cidr: "10.96.0.0/16".into(),
            node_ports: 30000..=32767,
            runtime_config: RuntimeConfig::parse(runtime_config)?,
            advertise_address: "192.0.2.1".parse()?,
            advertise_port: 6443,
            tls: Arc::new(skiff_pki::asking_server_config(&identity, &[])?),
            client_certificates: None,
            service_account: Some(ServiceAccountKey {
                private_key,
                public_key,
                issuer: "https://kubernetes.default.svc.cluster.local".into(),
                audiences: Vec::new(),
            }),
            authentication: Default::default(),
            authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
            admission: skiff_admission::Chain::recommended(),
            kubelet: None,
            recorder: Arc::default(),
            audit: None,
            instance: String::new(),
            kms_health: None,
            version: Default::default(),
            shutdown: stop.clone(),
        })
        .await
        .context("starting the API server")?;
        Ok(ApiServer {
            server,
            pki,
            service_account_keys,
            stop,
            dir,
        })
    }

    /// A folder that goes with the server.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    pub fn client(&self, user: UserInfo) -> Client {
        skiff_client::in_process(self.server.service(user), "default")
    }

    pub fn admin(&self) -> Client {
        self.client(UserInfo::new("admin", ["system:masters", "system:authenticated"]))
    }

    /// Creates the service account that pods of the namespace `default` need. Without controllers nobody else does.
    pub async fn create_service_account(&self) -> Result<()> {
        let mut account = ServiceAccount::default();
        account.metadata.name = Some("default".to_owned());
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin(), "default");
        accounts.create(&PostParams::default(), &account).await?;
        Ok(())
    }
}
