//! `skiff leave`: takes this machine out of its cluster: no new pods, the present ones evicted, the Node deleted, and
//! everything removed that `skiff down --delete` removes. An agent does all of this as the node itself, a server as the
//! administrator, and at the end by the servers that stay.

use crate::agent::{AgentKeys, AgentState};
use crate::cli::LeaveArgs;
use crate::cluster::Cluster;
use crate::joining::CLUSTER_INFO;
use crate::progress::Steps;
use crate::server_state::ServerState;
use crate::status::{INSTANCE, SERVER_LEASES};
use crate::{cleanup, daemon, preflight};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Endpoints, Node, Pod};
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use skiff_client::{ErrorExt, Remote, ServerAddress};
use skiff_controllers::SERVER_ADDRESS;
use skiff_pki::Pki;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(200);
/// A budget that allows no eviction is asked again so often, as kubectl does.
const BUDGET_POLL: Duration = Duration::from_secs(5);
/// How long the cluster may take to delete the Node.
const DELETION_PATIENCE: Duration = Duration::from_secs(15);

pub fn run(args: &LeaveArgs) -> Result<()> {
    preflight::check_root()?;
    let cluster = daemon::existing(&args.cluster)?;
    let role = match cluster.agent {
        true => Role::Agent,
        false => match crate::block_on(server_role(&cluster))? {
            Ok(role) => role,
            Err(error) if !args.force => return Err(error),
            Err(error) => {
                say!(
                    "The cluster is not told ({error:#}); remove the node there with `kubectl delete node`."
                );
                return remove(&cluster);
            }
        },
    };
    if let Err(error) = crate::block_on(depart(args, &cluster, &role))? {
        if !args.force {
            return Err(error).context(
                "this machine is still a node; try again, or remove it without the cluster's consent with --force",
            );
        }
        say!("The cluster is not told ({error:#}); remove the node there with `kubectl delete node`.");
    }
    // Also after a departure that failed: the kubelet must not register again.
    if let Some(pid) = cluster.running()? {
        daemon::stop(&cluster, pid)?;
    }
    match crate::block_on(unregister(&cluster, &role))? {
        Ok(true) => {}
        Ok(false) => say!(
            "The cluster keeps the Node, because of its taints or labels, or because its controllers are not skiff's; remove it with `kubectl delete node`."
        ),
        Err(error) if !args.force => {
            return Err(error).context(
                "it is stopped, but the cluster still has the Node; run the command again, or add --force",
            );
        }
        Err(error) => say!("The Node stays ({error:#}); remove it with `kubectl delete node`."),
    }
    remove(&cluster)
}

fn remove(cluster: &Cluster) -> Result<()> {
    if let Some(pid) = cluster.running()? {
        daemon::stop(cluster, pid)?;
    }
    cleanup::delete(cluster)?;
    say!("This machine has left the cluster.");
    Ok(())
}

/// What this machine is in its cluster.
enum Role {
    Agent,
    Server {
        /// This one first, then those that stay.
        servers: Vec<ServerAddress>,
        node_name: String,
        /// Where other machines reach this one.
        own: Option<ServerAddress>,
    },
}

fn connect(cluster: &Cluster, role: &Role) -> Result<(Client, String)> {
    let Role::Server {
        servers, node_name, ..
    } = role
    else {
        let state = AgentState::read(cluster)?;
        let keys = AgentKeys::open(cluster, &state)?;
        return Ok((keys.remote.client("skiff-leave"), state.node.node_name()?));
    };
    let pki = Pki::open(&cluster.pki_dir())?;
    let admin = pki.client("admin", "kubernetes-admin", Some("system:masters"))?;
    let tls = skiff_pki::api_client_config(pki.ca_certificate(), Some(&admin))?;
    let remote = Remote::new(servers.clone(), tls);
    Ok((remote.client("skiff-leave"), node_name.clone()))
}

/// A server may leave if another one stays.
async fn server_role(cluster: &Cluster) -> Result<Role> {
    let alone = || {
        format!(
            "this machine runs cluster {:?} itself; remove it with `skiff down --delete{}`",
            cluster.name,
            cluster.name_flag()
        )
    };
    let state = ServerState::find(cluster)?.filter(|state| !state.settings.etcd_servers.is_empty());
    let state = state.with_context(alone)?;
    if cluster.running()?.is_none() {
        bail!(
            "this server is not running, so nobody would end its pods; start it with `skiff up{}`",
            cluster.name_flag()
        );
    }
    let endpoints: Api<Endpoints> = Api::namespaced(daemon::client(cluster).await?, "default");
    let endpoints = endpoints
        .get("kubernetes")
        .await
        .context("the servers of the cluster cannot be listed")?;
    let mut servers = vec![cluster.endpoint().parse::<ServerAddress>()?];
    for subset in endpoints.subsets.iter().flatten() {
        let addresses = subset.addresses.iter().flatten();
        let addresses = addresses.filter_map(|address| address.ip.parse::<IpAddr>().ok());
        let others = addresses.filter(|ip| Some(*ip) != state.advertise);
        servers.extend(others.map(|ip| ServerAddress::from(SocketAddr::new(ip, state.settings.port))));
    }
    if servers.len() < 2 {
        bail!("no other server runs, and the cluster needs one; {}", alone());
    }
    let node_name = match &state.node_name {
        Some(name) => name.clone(),
        None => state.node.node_name()?,
    };
    Ok(Role::Server {
        own: state
            .advertise
            .map(|ip| SocketAddr::new(ip, state.settings.port).into()),
        servers,
        node_name,
    })
}

/// Cordons the node and evicts its pods.
async fn depart(args: &LeaveArgs, cluster: &Cluster, role: &Role) -> Result<()> {
    let (client, name) = connect(cluster, role)?;
    let steps = Steps;
    let nodes: Api<Node> = Api::all(client.clone());
    let cordon = Patch::Merge(json!({"spec": {"unschedulable": true}}));
    let cordoning = async {
        match nodes.patch(&name, &PatchParams::default(), &cordon).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error).context("the node cannot be cordoned"),
        }
    };
    // A Node that somebody deleted has nothing to drain.
    if !steps.step("cordon", cordoning).await? {
        return Ok(());
    }
    if cluster.running()?.is_none() && !is_drained(&client, &name).await? {
        bail!(
            "the agent is not running, so nobody would end its pods; start it with `skiff up{}`",
            cluster.name_flag()
        );
    }
    let draining = drain(&client, &name, args.force);
    let draining = async {
        match tokio::time::timeout(args.timeout, draining).await {
            Ok(drained) => drained,
            Err(_) => bail!(
                "pods are left after {} s; look at `kubectl get pods -A --field-selector spec.nodeName={name}` and at their budgets (`kubectl get pdb -A`)",
                args.timeout.as_secs()
            ),
        }
    };
    steps.step("drain", draining).await
}

/// What becomes of a pod when its node is drained.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// It goes with the node: a DaemonSet's, or a static one.
    Stays,
    Evict,
    /// Nobody would make it again elsewhere.
    Lost,
}

fn fate(pod: &Pod) -> Fate {
    let controller = pod
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true));
    let finished = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase));
    if pod.annotations().contains_key("kubernetes.io/config.mirror") {
        return Fate::Stays;
    }
    match controller {
        Some(owner) if owner.kind == "DaemonSet" && !finished => Fate::Stays,
        Some(_) => Fate::Evict,
        None if finished => Fate::Evict,
        None => Fate::Lost,
    }
}

/// Whether nothing is left to evict, as after a departure that was cut off.
async fn is_drained(client: &Client, name: &str) -> Result<bool> {
    let all: Api<Pod> = Api::all(client.clone());
    let here = ListParams::default().fields(&format!("spec.nodeName={name}"));
    let pods = all
        .list(&here)
        .await
        .context("the pods of this node cannot be listed")?;
    Ok(pods.iter().all(|pod| fate(pod) == Fate::Stays))
}

async fn drain(client: &Client, name: &str, force: bool) -> Result<()> {
    let all: Api<Pod> = Api::all(client.clone());
    let here = ListParams::default().fields(&format!("spec.nodeName={name}"));
    loop {
        let pods = all
            .list(&here)
            .await
            .context("the pods of this node cannot be listed")?;
        let (mut leaving, mut lost) = (Vec::new(), Vec::new());
        for pod in pods {
            match fate(&pod) {
                Fate::Stays => {}
                Fate::Lost if !force && pod.metadata.deletion_timestamp.is_none() => {
                    lost.push(format!(
                        "{}/{}",
                        pod.namespace().unwrap_or_default(),
                        pod.name_any()
                    ));
                }
                _ => leaving.push(pod),
            }
        }
        if !lost.is_empty() {
            bail!(
                "no controller would make these pods again: {}; delete them, or evict them with --force",
                lost.join(", ")
            );
        }
        if leaving.is_empty() {
            return Ok(());
        }
        let mut pause = POLL;
        for pod in leaving
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        {
            let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
            match pods.evict(&pod.name_any(), &EvictParams::default()).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                // Its budget allows none now.
                Err(kube::Error::Api(status)) if status.code == 429 => pause = BUDGET_POLL,
                Err(error) => {
                    return Err(error).with_context(|| format!("pod {} cannot be evicted", pod.name_any()));
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Says that the node leaves, and waits until the cluster has deleted it. `false`: an administrator must.
async fn unregister(cluster: &Cluster, role: &Role) -> Result<bool> {
    let (client, name) = connect(cluster, role)?;
    let nodes: Api<Node> = Api::all(client.clone());
    if let Role::Server { servers, own, .. } = role {
        if let (Some(own), Some(heir)) = (own, servers.get(1)) {
            hand_over(&client, &own.to_string(), &heir.to_string()).await?;
        }
        let gone = |error: &kube::Error| error.is_not_found();
        match nodes.delete(&name, &DeleteParams::default()).await {
            Err(error) if !gone(&error) => return Err(error).context("the Node cannot be deleted"),
            _ => {}
        }
        let (leases, own) = (
            Api::<Lease>::namespaced(client, "kube-system"),
            cluster.server_id()?,
        );
        for lease in leases.list(&ListParams::default().labels(SERVER_LEASES)).await? {
            if lease.annotations().get(INSTANCE) == Some(&own) {
                match leases.delete(&lease.name_any(), &DeleteParams::default()).await {
                    Err(error) if !gone(&error) => return Err(error).context("the lease cannot be deleted"),
                    _ => {}
                }
            }
        }
        return Ok(true);
    }
    let mark = Patch::Merge(json!({"metadata": {"annotations": {skiff_controllers::LEAVING: ""}}}));
    match nodes.patch(&name, &PatchParams::default(), &mark).await {
        Err(error) if error.is_not_found() => return Ok(true),
        marked => marked.with_context(|| format!("the Node {name:?} cannot be marked"))?,
    };
    let began = Instant::now();
    while began.elapsed() < DELETION_PATIENCE {
        if nodes.get_opt(&name).await?.is_none() {
            return Ok(true);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(false)
}

/// Lets `cluster-info` name a server that stays, if it names this one: machines that join are sent there, and no node gets a
/// certificate for its address. The controllers sign it anew.
async fn hand_over(client: &Client, own: &str, heir: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-public");
    let Some(map) = maps.get_opt(CLUSTER_INFO).await? else {
        return Ok(());
    };
    let was_own = map.annotations().get(SERVER_ADDRESS).is_some_and(|at| at == own);
    let Some(text) = map.data.and_then(|mut data| data.remove("kubeconfig")) else {
        return Ok(());
    };
    if crate::token::read_cluster_info(&text)?.0 != own {
        return Ok(());
    }
    let mut handed = json!({"data": {"kubeconfig": text.replace(own, heir)}});
    if was_own {
        handed["metadata"]["annotations"] = json!({SERVER_ADDRESS: heir});
    }
    maps.patch(CLUSTER_INFO, &PatchParams::default(), &Patch::Merge(handed))
        .await
        .context("cluster-info cannot be handed over")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn who_is_evicted() {
        let check = |owner: Value, phase: &str, annotations: Value, expected: Fate| {
            let pod = json!({"metadata": {"name": "p", "ownerReferences": owner, "annotations": annotations},
                "status": {"phase": phase}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(fate(&pod), expected, "{pod:?}");
        };
        let owner = |kind: &str, controller: bool| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": controller}]);
        check(owner("ReplicaSet", true), "Running", json!({}), Fate::Evict);
        check(owner("DaemonSet", true), "Running", json!({}), Fate::Stays);
        check(owner("DaemonSet", true), "Failed", json!({}), Fate::Evict);
        check(owner("ReplicaSet", false), "Running", json!({}), Fate::Lost);
        check(json!([]), "Running", json!({}), Fate::Lost);
        check(json!([]), "Succeeded", json!({}), Fate::Evict);
        let mirror = json!({"kubernetes.io/config.mirror": "x"});
        check(owner("Node", true), "Running", mirror, Fate::Stays);
    }
}
