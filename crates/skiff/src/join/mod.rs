//! `skiff join`: makes this machine a node of a cluster that runs elsewhere. It finds the cluster and makes sure that it is
//! the right one, trades the token for a certificate, and starts the agent. The token is needed for this alone: it is
//! neither kept nor handed to the agent.

mod discovery;
mod problems;
mod server;

use crate::agent::AgentState;
use crate::cli::JoinArgs;
use crate::cluster::{Cluster, Wishes};
use crate::csr::{self, Purpose};
use crate::progress::Steps;
use crate::{VERSION, cleanup, daemon, preflight};
use anyhow::{Context, Result, bail};
use discovery::Found;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::PostParams;
use kube::{Api, Client};
use problems::{OLDER_MINORS, Problem};
use serde::Deserialize;
use skiff_client::{Remote, ServerAddress};
use skiff_pki::{NODE_CLIENT, NodePki};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long the cluster may take to sign the certificate.
const CERTIFICATE_PATIENCE: Duration = Duration::from_secs(60);

/// What the cluster says of itself to who has a token (ConfigMap kubeadm-config).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClusterConfiguration {
    #[serde(default)]
    networking: Networking,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Networking {
    dns_domain: String,
    pod_subnet: String,
    service_subnet: String,
    /// Beside kubeadm's document.
    #[serde(skip)]
    pod_network: String,
    /// Whether the cluster's state is where other servers can reach it; `None`: it does not say.
    #[serde(skip)]
    shared_store: Option<bool>,
    #[serde(skip)]
    kubelet: KubeletConfiguration,
}

/// What the cluster says to its kubelets (ConfigMap kubelet-config): the part that an agent follows.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeletConfiguration {
    #[serde(rename = "clusterDNS")]
    cluster_dns: Vec<IpAddr>,
    cluster_domain: String,
    #[serde(rename = "serverTLSBootstrap")]
    server_tls_bootstrap: bool,
}

pub fn run(args: &JoinArgs) -> Result<()> {
    preflight::check_root()?;
    if let Some(found) = Cluster::find(&args.cluster.name)? {
        refuse_existing(&found)?;
    }
    args.node.check()?;
    let began = Instant::now();
    let role = if args.as_server { "server" } else { "node" };
    say!("Joining {} as {role} {:?}", args.server, args.node.node_name()?);
    let cluster = match &args.certificate_key {
        Some(key) => crate::block_on(server::bootstrap(args, key))??,
        None => crate::block_on(bootstrap(args))??,
    };
    daemon::start(&cluster, &[], began, |times| {
        say!("\n{times}\n");
        match args.as_server {
            true => say!("  kubeconfig   {}\n", cluster.kubeconfig().display()),
            false => say!("  kubectl get nodes          (where the API server runs)"),
        }
        say!("  skiff status{}", cluster.name_flag());
        say!("  skiff leave{}", cluster.name_flag());
    })
}

/// Joining again is fine for a node that is stopped: its certificate may have ended.
fn refuse_existing(found: &Cluster) -> Result<()> {
    if !found.agent {
        bail!(
            "there is a cluster {:?} on this machine; join under another --name, or remove it with `skiff down --delete{}`",
            found.name,
            found.name_flag()
        );
    }
    if let Some(pid) = found.running()? {
        bail!(
            "this machine is a node of {} already (pid {pid}); to join another cluster, first run `skiff leave{}`",
            AgentState::read(found)?.servers.join(", "),
            found.name_flag()
        );
    }
    Ok(())
}

/// Everything up to the node's certificate.
async fn bootstrap(args: &JoinArgs) -> Result<Cluster> {
    let steps = Steps;
    let name = args.node.node_name()?;
    let found = steps
        .step(
            "discovery",
            discovery::discover(&args.server, &args.token, &args.ca_hash),
        )
        .await?;
    let tls = skiff_pki::api_client_config(&found.ca, None)?;
    let remote = Remote::with_token(found.servers.clone(), tls, &args.token.to_string())?;
    let client = remote.client("skiff-join");
    let networking = steps
        .step("cluster", examine(&remote, &client, &name, OLDER_MINORS))
        .await?;
    let known = Cluster::find(&args.cluster.name)?.is_some();
    let cluster = Cluster::find_or_make(
        &args.cluster.name,
        &Wishes {
            data_dir: args.cluster.data_dir.clone(),
            pod_cidr: Some(networking.pod_subnet.clone()),
            service_cidr: Some(networking.service_subnet.clone()),
            agent: true,
            ..Wishes::default()
        },
    )?;
    let certified = steps.step(
        "certificate",
        certify(args, &cluster, &found, &client, &name, &networking),
    );
    if let Err(error) = certified.await {
        // Nothing was started: a machine that did not join keeps no trace of it.
        if !known && let Err(left) = cleanup::forget_unstarted(&cluster) {
            say!("{left:#}");
        }
        return Err(error);
    }
    Ok(cluster)
}

/// Asks the cluster, over a connection that is trusted now, whether this machine fits.
///
/// `older`: how many minor versions it may be behind.
async fn examine(remote: &Remote, client: &Client, name: &str, older: u32) -> Result<Networking> {
    if let Err(error) = remote.check().await {
        bail!(problems::connect(&error));
    }
    let refused = |error: kube::Error| match &error {
        kube::Error::Api(status) if status.code == 401 => anyhow::Error::new(Problem::UnknownToken),
        _ => error.into(),
    };
    let version = client.apiserver_version().await.map_err(refused)?;
    if let Some(problem) = problems::version(&version.git_version, VERSION, older) {
        bail!(problem);
    }
    let node = Api::<Node>::all(client.clone())
        .get_opt(name)
        .await
        .map_err(refused)?;
    if node.is_some_and(|node| is_ready(&node)) {
        bail!(Problem::NameTaken(name.to_owned()));
    }
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    let map = maps.get(crate::joining::CLUSTER_CONFIG).await.map_err(refused);
    let map = map.context("the cluster's networks (ConfigMap kubeadm-config) cannot be read")?;
    let text = map
        .data
        .as_ref()
        .and_then(|data| data.get("ClusterConfiguration"));
    let text = text.context("the ConfigMap kubeadm-config has no ClusterConfiguration")?;
    let config: ClusterConfiguration =
        serde_saphyr::from_str(text).context("the ClusterConfiguration in the ConfigMap kubeadm-config")?;
    let mut networking = config.networking;
    let mode = map
        .data
        .as_ref()
        .and_then(|data| data.get(crate::joining::POD_NETWORK));
    networking.pod_network = mode.map_or("auto", String::as_str).to_owned();
    let store = map.data.as_ref().and_then(|data| data.get(crate::joining::STORE));
    networking.shared_store = store.map(|store| store == crate::joining::SHARED_STORE);
    crate::cli::pod_network(&networking.pod_network).map_err(|why| {
        anyhow::anyhow!("the cluster's pod network: {why}; install the server's version here")
    })?;
    if networking.pod_subnet.is_empty() || networking.service_subnet.is_empty() {
        bail!(
            "the cluster does not say which networks its pods and services have; add networking.podSubnet and networking.serviceSubnet to the ClusterConfiguration in the ConfigMap kubeadm-config of kube-system"
        );
    }
    networking.kubelet = kubelet_configuration(&maps).await?;
    // skiff's API server talks to no kubelet that the cluster did not sign, also where kubeadm wrote kubelet-config
    // before skiff took the cluster over.
    networking.kubelet.server_tls_bootstrap |= mode.is_some();
    Ok(networking)
}

async fn kubelet_configuration(maps: &Api<ConfigMap>) -> Result<KubeletConfiguration> {
    let name = crate::joining::KUBELET_CONFIG;
    let map = maps
        .get(name)
        .await
        .with_context(|| format!("the configuration of kubelets (ConfigMap {name}) cannot be read"))?;
    let text = map.data.as_ref().and_then(|data| data.get("kubelet"));
    let text = text.with_context(|| format!("the ConfigMap {name} has no entry kubelet"))?;
    serde_saphyr::from_str(text).with_context(|| format!("the KubeletConfiguration in the ConfigMap {name}"))
}

/// What the network of an agent reads as the node, and upstream's kubelets may not: group and resource.
const READS: [(&str, &str); 6] = [
    ("", "services"),
    ("", "nodes"),
    ("", "pods"),
    ("", "namespaces"),
    ("discovery.k8s.io", "endpointslices"),
    ("networking.k8s.io", "networkpolicies"),
];

/// A cluster that is not skiff's gives nodes what kubelets need: its administrator has to allow the rest.
async fn check_roles(client: &Client) -> Result<()> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let mut denied = Vec::new();
    for (group, resource) in READS {
        let mut review = SelfSubjectAccessReview::default();
        review.spec.resource_attributes = Some(ResourceAttributes {
            group: Some(group.to_owned()),
            resource: Some(resource.to_owned()),
            verb: Some("list".to_owned()),
            ..ResourceAttributes::default()
        });
        let answer = reviews.create(&PostParams::default(), &review).await?;
        if !answer.status.is_some_and(|status| status.allowed) {
            denied.push(resource);
        }
    }
    if !denied.is_empty() {
        bail!(Problem::NoRoles(denied.join(", ")));
    }
    Ok(())
}

pub fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Gets the node's certificate and writes down what the agent needs.
async fn certify(
    args: &JoinArgs,
    cluster: &Cluster,
    found: &Found,
    client: &Client,
    name: &str,
    networking: &Networking,
) -> Result<()> {
    let identity = csr::request(client, Purpose::Client, name, &[], CERTIFICATE_PATIENCE).await?;
    let tls = skiff_pki::api_client_config(&found.ca, Some(&identity))?;
    check_roles(&Remote::new(found.servers.clone(), tls).client("skiff-join")).await?;
    let pki = NodePki::open(&cluster.pki_dir())?;
    pki.save_authority(&found.ca)?;
    pki.save(NODE_CLIENT, &identity)?;
    let mut node = args.node.clone();
    // The certificate is for this name, whatever the host is called later.
    node.hostname_override = Some(name.to_owned());
    let kubelet = &networking.kubelet;
    let domains = [kubelet.cluster_domain.as_str(), networking.dns_domain.as_str()];
    let domain = domains.into_iter().find(|domain| !domain.is_empty());
    AgentState {
        servers: found.servers.iter().map(ServerAddress::to_string).collect(),
        cluster_domain: domain.unwrap_or("cluster.local").to_owned(),
        cluster_dns: kubelet.cluster_dns.clone(),
        server_tls_bootstrap: kubelet.server_tls_bootstrap,
        pod_network: networking.pod_network.clone(),
        node,
    }
    .write(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What kubeadm uploads has more fields, and leaves out what is upstream's default.
    #[test]
    fn the_configuration_of_upstreams_kubelets_is_read() {
        let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
            authentication: {webhook: {cacheTTL: 0s}}\nclusterDNS:\n- 10.96.0.10\nclusterDomain: cluster.local\n";
        let read: KubeletConfiguration = serde_saphyr::from_str(text).unwrap();
        let mut expected = KubeletConfiguration {
            cluster_dns: vec!["10.96.0.10".parse().unwrap()],
            cluster_domain: "cluster.local".to_owned(),
            server_tls_bootstrap: false,
        };
        assert_eq!(read, expected);
        let text = format!("{text}serverTLSBootstrap: true\n");
        expected.server_tls_bootstrap = true;
        assert_eq!(
            serde_saphyr::from_str::<KubeletConfiguration>(&text).unwrap(),
            expected
        );
        let bad: Result<KubeletConfiguration, _> = serde_saphyr::from_str("clusterDNS: [nonsense]");
        assert!(bad.is_err());
    }
}
