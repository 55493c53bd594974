//! A machine that is a node of a cluster elsewhere: what it remembers of it, and the certificates that it keeps fresh.

use crate::certificates::RENEWAL_INTERVAL;
use crate::cluster::{Cluster, host_address, needs_root};
use crate::csr::{self, Purpose};
use crate::node_args::NodeArgs;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use serde::{Deserialize, Serialize};
use skiff_client::{Informer, InformerFactory, Remote, ServerAddress};
use skiff_pki::{
    CertificateFacts, Identity, LiveIdentity, NODE_CLIENT, NODE_SERVER, NodePki, ServingIdentity,
};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How long a certificate may take to be approved before it is asked for anew.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
const POLL: Duration = Duration::from_millis(10);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(5 * 60);

/// What an agent remembers of its cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentState {
    /// `https://HOST:PORT`, each.
    pub servers: Vec<String>,
    pub cluster_domain: String,
    /// Where pods ask for names, if the cluster says so; else the tenth address of the service network.
    #[serde(default)]
    pub cluster_dns: Vec<IpAddr>,
    /// Whether the cluster signs the certificate of the kubelet's server. Otherwise it is self-signed, as upstream's
    /// kubelet does it without `serverTLSBootstrap`.
    #[serde(default = "signed_by_cluster")]
    pub server_tls_bootstrap: bool,
    /// As `--pod-network` of the server.
    pub pod_network: String,
    /// The flags of `skiff join`.
    pub node: NodeArgs,
}

fn signed_by_cluster() -> bool {
    true
}

impl AgentState {
    fn path(cluster: &Cluster) -> PathBuf {
        cluster.data_dir.join("agent.json")
    }

    pub fn read(cluster: &Cluster) -> Result<AgentState> {
        let path = Self::path(cluster);
        let bytes = std::fs::read(&path).with_context(|| needs_root(&path))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", path.display()))
    }

    pub fn write(&self, cluster: &Cluster) -> Result<()> {
        let path = Self::path(cluster);
        let bytes = serde_json::to_vec_pretty(self)?;
        skiff_fs::write_durably(&path, &bytes, 0o600).with_context(|| needs_root(&path))
    }

    pub fn addresses(&self) -> Result<Vec<ServerAddress>> {
        let parse = |server: &String| -> Result<ServerAddress> { Ok(server.parse()?) };
        self.servers.iter().map(parse).collect()
    }

    /// The address of this machine that the cluster reaches it by: the flag's, or that by which it reaches the cluster.
    pub fn node_address(&self) -> Result<IpAddr> {
        if let Some(address) = self.node.node_ip {
            return Ok(address);
        }
        let servers = self.addresses()?;
        let found = servers.iter().find_map(|server| source_towards(server.host()));
        let Some(address) = found.or_else(host_address) else {
            bail!(
                "this machine has no route to {}; choose its address with --node-ip",
                self.servers.join(", ")
            );
        };
        Ok(address)
    }
}

/// The address that packets to this host have as their source. No packet is sent.
fn source_towards(host: &str) -> Option<IpAddr> {
    let target: IpAddr = host.parse().ok()?;
    let any: IpAddr = match target {
        IpAddr::V4(_) => [0, 0, 0, 0].into(),
        IpAddr::V6(_) => [0u16; 8].into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((target, 9)).ok()?;
    let found = socket.local_addr().ok()?.ip();
    (!found.is_loopback() && !found.is_unspecified()).then_some(found)
}

/// The keys of an agent, and the way to its cluster.
pub struct AgentKeys {
    pub ca: String,
    pub serving: Arc<ServingIdentity>,
    pub remote: Remote,
    /// As of the [`AgentState`].
    pub cluster_dns: Vec<IpAddr>,
    pki: NodePki,
    client: Arc<LiveIdentity>,
    node_name: String,
    /// What the serving certificate is for.
    hosts: Vec<String>,
    /// Whether the cluster signs it.
    server_tls_bootstrap: bool,
}

impl AgentKeys {
    pub fn open(cluster: &Cluster, state: &AgentState) -> Result<AgentKeys> {
        let pki = NodePki::open(&cluster.pki_dir())?;
        let ca = pki.authority()?;
        let again = || {
            format!(
                "make a token where the API server runs (`skiff token create`) and run its line here again, with{}",
                match cluster.name_flag() {
                    flag if flag.is_empty() => "out --name".to_owned(),
                    flag => flag,
                }
            )
        };
        let Some(identity) = pki.recover(NODE_CLIENT)? else {
            bail!("this node has no certificate; {}", again());
        };
        let facts = CertificateFacts::parse(&identity.certificate)?;
        if jiff::Timestamp::now().as_second() > facts.not_after {
            let end = jiff::Timestamp::from_second(facts.not_after)?;
            bail!(
                "the certificate of this node ended at {end}, and without it there is no way to renew it; {}",
                again()
            );
        }
        let client = LiveIdentity::new(NODE_CLIENT, identity)?;
        let mut tls = skiff_pki::api_client_config(&ca, Some(&client.identity()))?;
        tls.client_auth_cert_resolver = client.clone();
        let serving = Arc::new(ServingIdentity::default());
        let node_name = state.node.node_name()?;
        let hosts = vec![node_name.clone(), state.node_address()?.to_string()];
        if let Some(identity) = pki.recover(NODE_SERVER)? {
            serving.set(&identity)?;
        }
        Ok(AgentKeys {
            remote: Remote::new(state.addresses()?, tls),
            ca,
            serving,
            pki,
            client,
            node_name,
            hosts,
            server_tls_bootstrap: state.server_tls_bootstrap,
            cluster_dns: state.cluster_dns.clone(),
        })
    }

    /// Waits until the kubelet has a certificate to serve with.
    pub async fn serving_certificate(&self) {
        while !self.serving.is_set() {
            tokio::time::sleep(POLL).await;
        }
    }

    /// Renews what is due, until `stop`.
    pub async fn keep_fresh(&self, client: Client, stop: CancellationToken) {
        let mut retry = FIRST_RETRY;
        loop {
            let renewed = stop.run_until_cancelled(self.renew(&client)).await;
            let pause = match renewed {
                None => return,
                Some(Ok(())) => {
                    retry = FIRST_RETRY;
                    RENEWAL_INTERVAL
                }
                Some(Err(error)) => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        again_in = ?retry,
                        "cannot renew a certificate of this node"
                    );
                    let pause = retry;
                    retry = (retry * 2).min(LAST_RETRY);
                    pause
                }
            };
            if stop
                .run_until_cancelled(tokio::time::sleep(pause))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    async fn renew(&self, api: &Client) -> Result<()> {
        let now = jiff::Timestamp::now().as_second();
        let due = |identity: &Identity| -> Result<bool> {
            Ok(CertificateFacts::parse(&identity.certificate)?.is_due(now))
        };
        if due(&self.client.identity())? {
            let identity = csr::request(api, Purpose::Client, &self.node_name, &[], PATIENCE).await?;
            self.pki.save(NODE_CLIENT, &identity)?;
            self.client.replace(identity)?;
            // Connections that are open show the old one; what is new goes over new ones.
            self.remote.reconnect();
            tracing::info!("the client certificate of this node was renewed");
        }
        let serving = self.pki.load(NODE_SERVER)?;
        let fits = match &serving {
            Some(identity) => !due(identity)? && self.is_for_us(identity)?,
            None => false,
        };
        if !fits {
            let identity = match self.server_tls_bootstrap {
                true => csr::request(api, Purpose::Serving, &self.node_name, &self.hosts, PATIENCE).await?,
                false => skiff_pki::self_signed(&self.node_name, &self.hosts)?,
            };
            self.pki.save(NODE_SERVER, &identity)?;
            self.serving.set(&identity)?;
            tracing::info!("the serving certificate of this node was renewed");
        }
        Ok(())
    }

    fn is_for_us(&self, identity: &Identity) -> Result<bool> {
        let mut hosts = self.hosts.clone();
        hosts.sort();
        Ok(CertificateFacts::parse(&identity.certificate)?.hosts == hosts)
    }
}

/// An agent knows at most so many servers.
const MAX_SERVERS: usize = 16;

/// The server that was joined first, then those that the cluster has now, then those that it had: when all that are
/// known are gone, one of them may be back.
fn merged_servers(known: &[String], endpoints: &[Arc<EndpointSlice>]) -> Vec<String> {
    let mut servers: Vec<String> = known.first().cloned().into_iter().collect();
    let ours = endpoints
        .iter()
        .filter(|slice| slice.metadata.namespace.as_deref() == Some("default"));
    for slice in ours {
        let ports = slice.ports.iter().flatten();
        let port = ports
            .into_iter()
            .find(|port| port.name.as_deref() == Some("https"));
        let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else {
            continue;
        };
        let addresses = slice
            .endpoints
            .iter()
            .flatten()
            .flat_map(|endpoint| &endpoint.addresses);
        for address in addresses.filter_map(|address| address.parse::<IpAddr>().ok()) {
            servers.push(ServerAddress::from(SocketAddr::new(address, port)).to_string());
        }
    }
    servers.extend(known.iter().cloned());
    let mut seen = std::collections::HashSet::new();
    servers.retain(|server| seen.insert(server.clone()));
    servers.truncate(MAX_SERVERS);
    servers
}

/// Follows which API servers the cluster has, so that the agent finds another one when its own is gone. What it
/// learns is kept for the next start.
pub async fn follow_servers(
    cluster: Cluster,
    remote: Remote,
    client: Client,
    stop: CancellationToken,
) -> Result<()> {
    let informers = InformerFactory::new(client, stop.clone());
    let selector = "kubernetes.io/service-name=kubernetes";
    let slices: Informer<EndpointSlice> = informers.filtered(Some(selector), None);
    let changed = Arc::new(Notify::new());
    let notify = changed.clone();
    slices.subscribe(move |_| notify.notify_one());
    if stop.run_until_cancelled(slices.synced()).await.is_none() {
        return Ok(());
    }
    loop {
        let mut state = AgentState::read(&cluster)?;
        let servers = merged_servers(&state.servers, &slices.list());
        if servers != state.servers {
            tracing::info!(?servers, "the API servers of the cluster");
            state.servers = servers;
            state.write(&cluster)?;
            remote.set_servers(state.addresses()?);
        }
        if stop.run_until_cancelled(changed.notified()).await.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
    use x509_parser::prelude::FromDer;

    #[test]
    fn the_state_is_found_again() {
        let root = tempfile::tempdir().unwrap();
        let wishes = crate::cluster::Wishes {
            agent: true,
            ..Default::default()
        };
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &wishes).unwrap();
        let state = AgentState {
            servers: vec!["https://192.0.2.1:6443".into()],
            cluster_domain: "cluster.local".into(),
            cluster_dns: Vec::new(),
            server_tls_bootstrap: true,
            pod_network: "auto".into(),
            node: NodeArgs {
                hostname_override: Some("n".into()),
                node_ip: Some("192.0.2.7".parse().unwrap()),
                node_labels: vec![("a".into(), "b".into())],
                ..NodeArgs::default()
            },
        };
        state.write(&cluster).unwrap();
        assert_eq!(AgentState::read(&cluster).unwrap(), state);
        assert_eq!(state.node_address().unwrap().to_string(), "192.0.2.7");
        std::fs::write(cluster.data_dir.join("agent.json"), "{").unwrap();
        let error = AgentState::read(&cluster).unwrap_err().to_string();
        assert!(error.contains("is damaged"), "{error}");
    }

    #[test]
    fn a_node_without_a_certificate_is_told_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let wishes = crate::cluster::Wishes {
            agent: true,
            ..Default::default()
        };
        let cluster = Cluster::find_or_make_in(root.path(), "other", &wishes).unwrap();
        let state = AgentState {
            servers: vec!["https://192.0.2.1:6443".into()],
            cluster_domain: "cluster.local".into(),
            cluster_dns: Vec::new(),
            server_tls_bootstrap: true,
            pod_network: "auto".into(),
            node: NodeArgs::default(),
        };
        let pki = skiff_pki::Pki::open(&root.path().join("ca")).unwrap();
        let node = NodePki::open(&cluster.pki_dir()).unwrap();
        node.save_authority(pki.ca_certificate()).unwrap();
        let error = AgentKeys::open(&cluster, &state).err().unwrap().to_string();
        assert!(
            error.contains("no certificate") && error.contains("--name other"),
            "{error}"
        );
    }

    /// The authority's certificate for the key of a request, from now on for so many seconds.
    fn sign(folder: &std::path::Path, request: &[u8], usage: &str, seconds: i64) -> String {
        let (_, pem) = x509_parser::pem::parse_x509_pem(request).unwrap();
        let csr = x509_parser::certification_request::X509CertificationRequest::from_der(&pem.contents);
        let info = csr.unwrap().1.certification_request_info;
        let now = jiff::Timestamp::now().as_second();
        let order = skiff_pki::CertificateOrder {
            subject: vec![(10, "system:nodes".into()), (3, "system:node:n".into())],
            dns_names: vec!["n".to_owned()],
            addresses: vec!["192.0.2.7".parse().unwrap()],
            public_key: info.subject_pki.raw.to_vec(),
            usages: vec![usage.to_owned()],
            not_before: now - 1000,
            not_after: now + seconds,
            ..Default::default()
        };
        skiff_pki::SigningAuthority::new(folder)
            .sign(&order, now)
            .unwrap()
    }

    /// An API server that signs every request, in the order in which a node asks.
    fn signing_api(folder: PathBuf) -> Client {
        let issued = Arc::new(parking_lot::Mutex::new(serde_json::Value::Null));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (issued, folder) = (issued.clone(), folder.clone());
            async move {
                let posted = request.method() == http::Method::POST;
                let body = request.into_body().collect().await.unwrap().to_bytes();
                if posted {
                    let mut object: serde_json::Value = serde_json::from_slice(&body).unwrap();
                    let spec: CertificateSigningRequestSpec =
                        serde_json::from_value(object["spec"].clone()).unwrap();
                    let usage = spec.usages.unwrap().remove(1);
                    let pem = sign(&folder, &spec.request.0, &usage, 100_000);
                    object["status"]["certificate"] = crate::joining::base64(pem.as_bytes()).into();
                    *issued.lock() = object;
                }
                let answer = issued.lock().to_string();
                Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                    answer.into_bytes(),
                )))
            }
        });
        skiff_client::in_process(service, "default")
    }

    #[tokio::test]
    async fn certificates_are_renewed_before_they_end() {
        let root = tempfile::tempdir().unwrap();
        let wishes = crate::cluster::Wishes {
            agent: true,
            ..Default::default()
        };
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &wishes).unwrap();
        let folder = root.path().join("ca");
        let authority = skiff_pki::Pki::open(&folder).unwrap();
        let node = NodePki::open(&cluster.pki_dir()).unwrap();
        node.save_authority(authority.ca_certificate()).unwrap();
        let request = skiff_pki::KeyRequest::new("system:node:n", "system:nodes", &[]).unwrap();
        // Nearly over.
        let certificate = sign(&folder, request.request.as_bytes(), "client auth", 60);
        let old = request.signed(certificate).unwrap();
        node.save(NODE_CLIENT, &old).unwrap();
        let state = AgentState {
            servers: vec!["https://192.0.2.1:6443".into()],
            cluster_domain: "cluster.local".into(),
            cluster_dns: Vec::new(),
            server_tls_bootstrap: true,
            pod_network: "auto".into(),
            node: NodeArgs {
                hostname_override: Some("n".into()),
                node_ip: Some("192.0.2.7".parse().unwrap()),
                ..NodeArgs::default()
            },
        };
        let keys = AgentKeys::open(&cluster, &state).unwrap();
        assert!(!keys.serving.is_set(), "nobody has issued one yet");
        let api = signing_api(folder);
        keys.renew(&api).await.unwrap();
        let renewed = node.load(NODE_CLIENT).unwrap().unwrap();
        assert_ne!(renewed, old);
        assert_eq!(*keys.client.identity(), renewed, "new connections show it");
        assert!(keys.serving.is_set());
        let serving = node.load(NODE_SERVER).unwrap().unwrap();
        keys.renew(&api).await.unwrap();
        assert_eq!(node.load(NODE_CLIENT).unwrap(), Some(renewed), "it lasts");
        assert_eq!(node.load(NODE_SERVER).unwrap().as_ref(), Some(&serving));
        // Another address needs another certificate.
        let moved = AgentState {
            node: NodeArgs {
                node_ip: Some("192.0.2.8".parse().unwrap()),
                ..state.node.clone()
            },
            ..state
        };
        let keys = AgentKeys::open(&cluster, &moved).unwrap();
        keys.renew(&api).await.unwrap();
        assert_ne!(node.load(NODE_SERVER).unwrap(), Some(serving));
    }

    #[test]
    fn servers_are_learned_and_the_first_stays() {
        let slice = |namespace: &str, addresses: &[&str], port: u16| {
            let slice = serde_json::json!({"metadata": {"name": "kubernetes", "namespace": namespace}, "addressType": "IPv4",
                "endpoints": [{"addresses": addresses}], "ports": [{"name": "https", "port": port}]});
            Arc::new(serde_json::from_value::<EndpointSlice>(slice).unwrap())
        };
        let joined = "https://api.example:6443";
        let check = |slices: &[Arc<EndpointSlice>], expected: &[&str]| {
            assert_eq!(merged_servers(&[joined.to_owned()], slices), expected);
        };
        // One that died is kept, behind those that live.
        let known: Vec<String> = [joined, "https://192.0.2.1:6443", "https://192.0.2.2:6443"]
            .map(str::to_owned)
            .into();
        assert_eq!(
            merged_servers(&known, &[slice("default", &["192.0.2.2", "192.0.2.3"], 6443)]),
            [
                joined,
                "https://192.0.2.2:6443",
                "https://192.0.2.3:6443",
                "https://192.0.2.1:6443"
            ]
        );
        check(&[], &[joined]);
        check(
            &[slice("default", &["192.0.2.1", "192.0.2.2"], 6443)],
            &[joined, "https://192.0.2.1:6443", "https://192.0.2.2:6443"],
        );
        check(&[slice("other", &["192.0.2.9"], 6443)], &[joined]);
        check(&[slice("default", &["nonsense"], 6443)], &[joined]);
        let many: Vec<String> = (1..=40).map(|n| format!("192.0.2.{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(
            merged_servers(&[joined.to_owned()], &[slice("default", &many, 1)]).len(),
            MAX_SERVERS
        );
    }
}
