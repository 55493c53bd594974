//! The API server by itself, for comparing it with others: no controllers, no nodes.
//! `serve DIR PORT [ETCD|-] [POLICY LOG]` keeps its state and an `admin.kubeconfig` in DIR and ends on SIGTERM or SIGINT. With
//! the address of an etcd the objects are there; with an audit policy and a file, requests are recorded.
//! `WITHOUT_ADMISSION=ServiceAccount,…` in the environment leaves plugins out, for suites that were written so.

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use skiff_server::{ClientCertificates, KubeletClient, Server, ServerConfig, ServiceAccountKey, Version};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(dir), Some(port)) = (arguments.next().map(PathBuf::from), arguments.next()) else {
        return Err("usage: serve DIR PORT [ETCD]".into());
    };
    let etcd = arguments.next().filter(|address| address != "-");
    let audit = match (arguments.next(), arguments.next()) {
        (Some(policy), Some(log)) => Some(skiff_server::AuditConfig {
            policy: skiff_server::AuditPolicy::parse(&std::fs::read_to_string(policy)?)?,
            webhook: None,
            log: Some(skiff_server::LogOptions {
                path: log.into(),
                max_size_megabytes: 100,
                max_backups: 1,
                max_age_days: 0,
                compress: false,
                mode: skiff_server::AuditMode::Blocking,
            }),
        }),
        _ => None,
    };
    let port: u16 = port.parse()?;
    let began = std::time::Instant::now();
    let pki = skiff_pki::Pki::open(&dir.join("pki"))?;
    let names = ["localhost".to_string(), "127.0.0.1".to_string()];
    let identity = pki.serving("apiserver", "kube-apiserver", &names)?;
    let (private_key, public_key) = pki.service_account_keys()?;
    let front_proxy = pki.front_proxy()?;
    let admin = pki.client("admin", "kubernetes-admin", Some("system:masters"))?;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "serve",
        "clusters": [{"name": "serve", "cluster": {"server": format!("https://127.0.0.1:{port}"), "certificate-authority-data": encode(pki.ca_certificate())}}],
        "users": [{"name": "admin", "user": {"client-certificate-data": encode(&admin.certificate), "client-key-data": encode(&admin.key)}}],
        "contexts": [{"name": "serve", "context": {"cluster": "serve", "user": "admin"}}],
    });
    std::fs::write(dir.join("admin.kubeconfig"), kubeconfig.to_string())?;
    let shutdown = CancellationToken::new();
    let keys_done = began.elapsed();
    let store: Arc<dyn skiff_store::Store> = match etcd {
        None => Arc::new(skiff_store::Embedded::open(dir.join("store"))?),
        Some(address) => {
            let options = skiff_store::etcd::Options::new([address]);
            Arc::new(skiff_store::Etcd::open(options).await?)
        }
    };
    let server = Server::start(ServerConfig {
        store,
        service_cidr: "10.96.0.0/12".to_string(),
        node_ports: 30000..=32767,
        runtime_config: Default::default(),
        advertise_address: "192.0.2.2".parse()?,
        advertise_port: port,
        tls: Arc::new(skiff_pki::asking_server_config(
            &identity,
            &[pki.ca_certificate(), &front_proxy.ca],
        )?),
        client_certificates: Some(ClientCertificates {
            client_ca: pki.ca_certificate().to_string(),
            front_proxy: Some(front_proxy.clone()),
        }),
        service_account: Some(ServiceAccountKey {
            private_key,
            public_key,
            issuer: "https://kubernetes.default.svc.cluster.local".to_string(),
            audiences: Vec::new(),
        }),
        authentication: Default::default(),
        authorization: vec![skiff_auth::Mode::Node, skiff_auth::Mode::Rbac],
        admission: admission(),
        kubelet: Some(KubeletClient {
            tls: Arc::new(skiff_pki::client_config(pki.ca_certificate(), Some(&admin))?),
        }),
        recorder: Arc::default(),
        audit,
        instance: String::new(),
        kms_health: None,
        version: Version::default(),
        shutdown: shutdown.clone(),
    })
    .await?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!(
        "ready after {:?} ({keys_done:?} for keys): {}",
        began.elapsed(),
        dir.join("admin.kubeconfig").display()
    );
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let ending = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        ending.cancel();
    });
    server.serve(listener, shutdown).await;
    Ok(())
}

fn admission() -> skiff_admission::Chain {
    let without = std::env::var("WITHOUT_ADMISSION").unwrap_or_default();
    let mut plugins = skiff_admission::plugins::recommended();
    plugins.retain(|plugin| !without.split(',').any(|name| name == plugin.name()));
    skiff_admission::Chain::new(plugins)
}
