//! `skiff join --server`: this machine becomes another server of the cluster. The token buys a sealed bundle of the
//! cluster's keys, which the certificate key of the printed line opens; everything else a server makes itself.

use super::discovery::{self, Found};
use super::problems::OLDER_SERVER_MINORS;
use super::{Networking, examine};
use crate::bundle::{self, Bundle, CertificateKey, Purpose};
use crate::cli::JoinArgs;
use crate::cluster::{Cluster, Wishes};
use crate::progress::Steps;
use crate::server_state::ServerState;
use crate::{cleanup, components, token};
use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use skiff_client::Remote;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Everything up to the keys; the server then starts like any other.
pub(super) async fn bootstrap(args: &JoinArgs, key: &CertificateKey) -> Result<Cluster> {
    let steps = Steps;
    let name = args.node.node_name()?;
    if Cluster::find(&args.cluster.name)?.is_some() {
        bail!(
            "this machine is a node already; take it out of its cluster first with `skiff leave{}`",
            crate::cluster::name_flag(&args.cluster.name)
        );
    }
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
        .step("cluster", examine(&remote, &client, &name, OLDER_SERVER_MINORS))
        .await?;
    let bundle = steps.step("keys", fetch(args, &client, &networking, key)).await?;
    let settings = &bundle.settings;
    let bind = args
        .bind
        .unwrap_or_else(|| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), settings.port));
    if bind.port() != settings.port {
        bail!(
            "the servers of this cluster listen on port {}, because the service `kubernetes` has one; choose --bind IP:{}",
            settings.port,
            settings.port
        );
    }
    let cluster = Cluster::find_or_make(
        &args.cluster.name,
        &Wishes {
            data_dir: args.cluster.data_dir.clone(),
            bind: Some(bind),
            pod_cidr: Some(settings.pod_cidr.clone()),
            service_cidr: Some(settings.service_cidr.clone()),
            agent: false,
        },
    )?;
    let settled = steps
        .step("etcd", settle(args, &cluster, &found, &bundle, name))
        .await;
    if let Err(error) = settled {
        // Nothing was started: a machine that did not join keeps no key.
        if let Err(left) = cleanup::forget_unstarted(&cluster) {
            say!("{left:#}");
        }
        return Err(error);
    }
    Ok(cluster)
}

/// Fetches the sealed keys and opens them.
async fn fetch(
    args: &JoinArgs,
    client: &Client,
    networking: &Networking,
    key: &CertificateKey,
) -> Result<Bundle> {
    if networking.shared_store == Some(false) {
        bail!(
            "the cluster keeps its state in the embedded store of its server, which no other server can reach; several servers need an etcd: move the cluster to one there with `skiff store migrate --to etcd --etcd-servers URL,URL,URL`, or join as a node, without --server"
        );
    }
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "kube-system");
    let secret = match secrets.get(&token::keys_secret(&args.token)).await {
        Ok(secret) => secret,
        Err(kube::Error::Api(status)) if [403, 404].contains(&status.code) => bail!(
            "this token is for nodes: make one for servers with `skiff token create --server`, or join as a node, without --server"
        ),
        Err(error) => return Err(error).context("the cluster's keys cannot be fetched"),
    };
    let data = secret.data.unwrap_or_default();
    let field = |name: &str| data.get(name).map(|value| value.0.as_slice()).unwrap_or_default();
    let expires = String::from_utf8_lossy(field(bundle::EXPIRES)).into_owned();
    let purpose = Purpose {
        token_id: &args.token.id,
        ca_hash: &args.ca_hash,
        expires: &expires,
    };
    Bundle::open(field(bundle::SEALED), key, purpose, Timestamp::now())
}

/// Writes down what the server needs, and makes sure that it reaches etcd from here.
async fn settle(
    args: &JoinArgs,
    cluster: &Cluster,
    found: &Found,
    bundle: &Bundle,
    name: String,
) -> Result<()> {
    let files = bundle.unpack(cluster)?;
    // The authority that was pinned by its hash is the one of the bundle.
    let pki = skiff_pki::Pki::open(&cluster.pki_dir())?;
    let hash = skiff_pki::authority_hash(pki.ca_certificate())?;
    if hash != skiff_pki::authority_hash(&found.ca)? {
        bail!("the keys are of another cluster: their authority is {hash}");
    }
    let mut node = args.node.clone();
    // The Node's name stays, whatever the host is called later.
    node.hostname_override = Some(name);
    let state = ServerState {
        joined: true,
        advertise: None,
        advertise_flag: args.advertise_address,
        settings: bundle.settings.clone(),
        files,
        node,
        node_name: None,
    };
    state.write(cluster)?;
    let (_, public_key) = pki.service_account_keys()?;
    components::check_etcd(&state, cluster, &public_key).await
}
