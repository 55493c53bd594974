//! The API server: its store, its listeners, and what must exist before others use it.

use super::{Access, Machine, Prepared};
use crate::certificates::Certificates;
use crate::cli::{Component, ServerArgs};
use crate::cluster::{Cluster, host_address};
use crate::server_state::ServerState;
use crate::{VERSION, addons, backup, joining};
use anyhow::{Context, Result};
use futures::FutureExt;
use skiff_auth::UserInfo;
use skiff_encryption::Encrypted;
use skiff_server::{AuditConfig, AuditMode, AuditPolicy, AuditWebhookOptions, LogOptions};
use skiff_server::{ClientCertificates, KubeletClient, Server, ServerConfig, ServiceAccountKey, Version};
use skiff_store::Store;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

/// A server that ends waits no longer for this: the others notice by themselves.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(3);

/// What a machine with an API server has besides.
pub struct ControlPlane {
    pub certificates: Arc<Certificates>,
    /// Where pods and other machines reach the API server.
    pub advertise: IpAddr,
    /// What it has in common with the other servers of its cluster.
    pub state: ServerState,
}

/// Where pods and other machines reach the API server: an address that it listens on.
pub fn advertise_address(args: &ServerArgs, cluster: &Cluster, gateway: IpAddr) -> IpAddr {
    let default = match cluster.bind.ip() {
        ip if ip.is_unspecified() => host_address().unwrap_or(gateway),
        // A pod's loopback is its own: pods reach this machine by the address of their bridge.
        ip if ip.is_loopback() && args.components.contains(&Component::Node) => gateway,
        ip => ip,
    };
    args.advertise_address.unwrap_or(default)
}

/// Starts the API server and makes what every cluster has; what then runs are its listeners.
pub(super) async fn prepare(machine: &Machine) -> Result<Prepared> {
    let (args, cluster) = (&*machine.args, &machine.cluster);
    let control = machine.control_plane()?;
    let store = machine
        .reporter
        .step(
            "store",
            cluster.open_store(args.etcd_of(cluster), &control.certificates.service_account.1),
        )
        .await?;
    control.state.write(cluster)?;
    let addresses = listen_addresses(machine, control.advertise);
    let (server, listeners) = machine
        .reporter
        .step("API server", async {
            let server = start(machine, control, store).await?;
            // The first listeners are bound before anything else counts on them.
            anyhow::Ok((server, listen(&addresses).await?))
        })
        .await?;
    let merge = !args.no_kubeconfig_merge;
    let certificates = &control.certificates;
    certificates.write_kubeconfig(cluster, merge, true)?;
    certificates.follow(cluster, merge, &server, machine.supervisor.shutdown.clone())?;
    let access = Access::Here(server.clone());
    let admin = UserInfo::new("kubernetes-admin", ["system:masters"]);
    let admin = access.client(admin, "skiff", None);
    let _ = machine.access.set(access);
    let serving = serve(server, addresses, listeners);
    machine
        .reporter
        .step("cluster add-ons", async {
            let (domain, ca) = (&args.cluster_domain, certificates.current_ca.borrow().clone());
            let (server, shared) = (control.state.reached_at()?, args.etcd_of(cluster).is_some());
            let once = joining::configurations(cluster, domain, &args.node.cluster_dns, &server)?;
            let reached = joining::Reached {
                at: server,
                is_own: !control.state.has_endpoint(),
            };
            let joining = joining::objects(cluster, domain, args.pod_network, &reached, shared, &ca)?;
            let parts = addons::Parts {
                // Nodes that join run it too: it is left out only where another DNS server takes its place.
                dns: machine.runs(Component::Dns) || args.node.cluster_dns.is_empty(),
                metrics: machine.runs(Component::Metrics),
                ingress: machine.runs(Component::Ingress),
                gateway_api: args.ingress.gateway_api,
                load_balancer: machine.runs(Component::LoadBalancer),
            };
            addons::install(&admin, cluster, parts, joining, once).await
        })
        .await?;
    Ok(serving)
}

fn serve(server: Server, addresses: Vec<SocketAddr>, listeners: Vec<TcpListener>) -> Prepared {
    let mut bound = Some(listeners);
    Prepared::alone(move |stop| {
        let (server, bound, addresses) = (server.clone(), bound.take(), addresses.clone());
        async move {
            let listeners = match bound {
                Some(listeners) => listeners,
                None => listen(&addresses).await.map_err(|e| format!("{e:#}"))?,
            };
            let serving = listeners
                .into_iter()
                .map(|listener| server.serve(listener, stop.clone()));
            let serving = futures::future::join_all(serving);
            futures::join!(serving, withdraw(&server, &stop));
            Ok(())
        }
        .boxed()
    })
}

/// When the server ends, pods and agents are sent to the others at once.
async fn withdraw(server: &Server, stop: &CancellationToken) {
    stop.cancelled().await;
    let why = match tokio::time::timeout(WITHDRAWAL_TIMEOUT, server.withdraw()).await {
        Ok(Ok(())) => return,
        Ok(Err(status)) => status.message,
        Err(_) => "the store does not answer".to_owned(),
    };
    tracing::warn!(
        why,
        "cannot leave the endpoints of the service kubernetes; the other servers remove this one soon"
    );
}

/// Where the API server listens: at `--bind`, and where pods are told to find it if that is another address
/// of this machine.
fn listen_addresses(machine: &Machine, advertise: IpAddr) -> Vec<SocketAddr> {
    let bind = machine.cluster.bind;
    let mut addresses = vec![bind];
    if !bind.ip().is_unspecified() && bind.ip() != advertise {
        let other = SocketAddr::new(advertise, bind.port());
        // The pods' bridge gets its address when there is a server to learn it from.
        let gateway = machine.cluster.pod_gateway();
        let later = machine.runs(Component::Node) && gateway.is_ok_and(|ip| ip == advertise);
        match std::net::TcpListener::bind(other) {
            Ok(_) => addresses.push(other),
            Err(_) if later => addresses.push(other),
            // A load balancer's, perhaps.
            Err(error) => tracing::warn!(
                %error, advertised = %other,
                "the API server cannot listen on its advertised address; pods reach it only if something else passes connections on"
            ),
        }
    }
    addresses
}

async fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    let mut listeners = Vec::with_capacity(addresses.len());
    for address in addresses {
        listeners.push(listen_on(*address).with_context(|| format!("cannot listen on {address}"))?);
    }
    Ok(listeners)
}

/// Also on an address that this machine does not have yet, such as that of the pods' bridge.
fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    rustix::net::sockopt::set_ip_freebind(&socket, true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Whether the etcd that a server is to use can be used from this machine.
pub async fn check_etcd(state: &ServerState, cluster: &Cluster, token_key: &str) -> Result<()> {
    let etcd = state.etcd().context("the cluster has no etcd")?;
    cluster.open_store(Some(&etcd), token_key).await.map(drop)
}

async fn start(machine: &Machine, control: &ControlPlane, store: Arc<dyn Store>) -> Result<Server> {
    let (args, cluster, certificates) = (&*machine.args, &machine.cluster, &*control.certificates);
    let etcd = args.etcd_of(cluster);
    let encryption = args.encryption.open(cluster, etcd, &store).await?;
    backup::answer(
        cluster,
        etcd.is_some(),
        &store,
        encryption.as_ref(),
        &machine.supervisor.shutdown,
    );
    let store = match &encryption {
        Some(encryption) => Arc::new(Encrypted::new(store, encryption.clone())),
        None => store,
    };
    let kubelet_client = certificates.kubelet_client.identity();
    let mut kubelet_tls = skiff_pki::client_config(&certificates.ca, Some(&kubelet_client))?;
    kubelet_tls.client_auth_cert_resolver = certificates.kubelet_client.clone();
    let mut tls = skiff_pki::asking_server_config(
        &certificates.api_server.identity(),
        &[certificates.ca.as_str(), certificates.front_proxy.ca.as_str()],
    )?;
    tls.cert_resolver = certificates.api_server.clone();
    let shutdown = machine.supervisor.shutdown.clone();
    let issuer = format!("https://kubernetes.default.svc.{}", args.cluster_domain);
    let authentication = args.access.authentication(&issuer)?;
    let jwt = authentication.jwt.clone();
    let runtime_config = args.apis.runtime_config()?;
    if !runtime_config.missing().is_empty() {
        let missing = runtime_config.missing().join(", ");
        tracing::warn!(%missing, "--runtime-config asks for APIs that skiff does not serve");
    }
    let server = Server::start(ServerConfig {
        store,
        service_cidr: cluster.service_cidr.clone(),
        node_ports: args.service_node_port_range.clone(),
        runtime_config,
        advertise_address: control.advertise,
        advertise_port: cluster.bind.port(),
        tls: Arc::new(tls),
        client_certificates: Some(ClientCertificates {
            client_ca: certificates.ca.clone(),
            front_proxy: Some(certificates.front_proxy.clone()),
        }),
        service_account: Some(ServiceAccountKey {
            private_key: certificates.service_account.0.clone(),
            public_key: certificates.service_account.1.clone(),
            issuer: issuer.clone(),
            audiences: args.access.api_audiences.clone(),
        }),
        authentication,
        authorization: args.access.authorization()?,
        admission: args.access.admission()?,
        kubelet: Some(KubeletClient {
            tls: Arc::new(kubelet_tls),
        }),
        recorder: Arc::default(),
        audit: audit(args)?,
        version: Version {
            git_version: VERSION.to_owned(),
            ..Version::default()
        },
        instance: machine.server_id.clone(),
        kms_health: args.encryption.health(encryption.as_ref()),
        shutdown: shutdown.clone(),
    })
    .await?;
    args.access.follow(&server, jwt, &issuer, &shutdown)?;
    if let Some(encryption) = encryption {
        args.encryption.follow(encryption, &server, &shutdown);
    }
    Ok(server)
}

/// What the flags say about the audit log. Without a policy, or without a place for it, nothing is recorded.
fn audit(args: &ServerArgs) -> Result<Option<AuditConfig>> {
    let Some(file) = &args.audit_policy_file else {
        return Ok(None);
    };
    let text = fs::read_to_string(file)
        .with_context(|| format!("the audit policy {} cannot be read", file.display()))?;
    let policy = AuditPolicy::parse(&text)
        .map_err(|why| anyhow::anyhow!("the audit policy {} is invalid: {why}", file.display()))?;
    let mode = |text: &str| match text {
        "batch" => AuditMode::Batch,
        "blocking-strict" => AuditMode::BlockingStrict,
        _ => AuditMode::Blocking,
    };
    if args.audit_log_path.is_none() && args.audit_webhook_config_file.is_none() {
        return Ok(None);
    }
    Ok(Some(AuditConfig {
        policy,
        webhook: args
            .audit_webhook_config_file
            .as_ref()
            .map(|file| AuditWebhookOptions {
                file: file.clone(),
                mode: mode(&args.audit_webhook_mode),
                initial_backoff: args.audit_webhook_initial_backoff,
                buffer_size: args.audit_webhook_batch_buffer_size,
                max_size: args.audit_webhook_batch_max_size,
                max_wait: args.audit_webhook_batch_max_wait,
                throttle: args.audit_webhook_batch_throttle_enable.then_some((
                    args.audit_webhook_batch_throttle_qps,
                    args.audit_webhook_batch_throttle_burst,
                )),
            }),
        log: args.audit_log_path.as_ref().map(|path| LogOptions {
            path: path.clone(),
            max_size_megabytes: args.audit_log_maxsize,
            max_backups: args.audit_log_maxbackup,
            max_age_days: args.audit_log_maxage,
            compress: args.audit_log_compress,
            mode: mode(&args.audit_log_mode),
        }),
    }))
}
