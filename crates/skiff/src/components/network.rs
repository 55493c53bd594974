//! The pod network of this node: the CNI plugin, the bridge, and the guards of the pods' interfaces.

use super::{Machine, Prepared};
use crate::cluster::Cluster;
use anyhow::{Context, Result};
use futures::FutureExt;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use skiff_cni::BridgeConf;
use std::fs;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often pod interfaces are checked for their guards.
const GUARD_PERIOD: Duration = Duration::from_secs(10);
/// How often the Node is read until it has a pod network.
const POLL: Duration = Duration::from_millis(100);

/// Installs the CNI plugin. The bridge is made here too if its network is known before the API is there.
pub(super) async fn prepare(machine: &Machine) -> Result<Prepared> {
    let cluster = machine.cluster.clone();
    if machine.control_plane.is_some() {
        let making = async {
            install_plugin(&cluster)?;
            let bridge = cluster.bridge_conf(&cluster.node_pod_cidr()?)?;
            let made = skiff_cni::ensure_bridge(&bridge).await;
            made.context("the pod bridge cannot be made")
        };
        machine.reporter.step("pod network", making).await?;
    } else {
        install_plugin(&cluster)?;
    }
    let node_name = machine.node_name.clone();
    Ok(Prepared::new(move |client, stop| {
        let (cluster, node_name) = (cluster.clone(), node_name.clone());
        async move {
            let Some(cidr) = stop.run_until_cancelled(pod_cidr(client, &node_name)).await else {
                return Ok(());
            };
            let bridge = cluster.bridge_conf(&cidr).map_err(|e| e.to_string())?;
            skiff_cni::ensure_bridge(&bridge)
                .await
                .map_err(|e| e.to_string())?;
            guard(&bridge, stop).await
        }
        .boxed()
    }))
}

/// The CNI plugin is this binary under another name.
fn install_plugin(cluster: &Cluster) -> Result<()> {
    let bin = cluster.data_dir.join("cni/bin");
    fs::create_dir_all(&bin)?;
    fs::create_dir_all(cluster.data_dir.join("cni/conf"))?;
    let plugin = bin.join(skiff_cni::PLUGIN_NAME);
    let beside = bin.join(".new");
    let _ = fs::remove_file(&beside);
    std::os::unix::fs::symlink(std::env::current_exe()?, &beside)?;
    fs::rename(&beside, &plugin)?;
    Ok(())
}

/// What the Node says is ours.
async fn pod_cidr(client: Client, node_name: &str) -> String {
    let nodes: Api<Node> = Api::all(client);
    loop {
        let found = nodes.get_opt(node_name).await.ok().flatten();
        if let Some(cidr) = found.and_then(|node| node.spec?.pod_cidr) {
            return cidr;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Keeps the guards of the pods' interfaces and the host ports: whoever reloads the host's firewall may flush them.
async fn guard(conf: &BridgeConf, stop: CancellationToken) -> Result<(), String> {
    while stop
        .run_until_cancelled(tokio::time::sleep(GUARD_PERIOD))
        .await
        .is_some()
    {
        let host_ports = skiff_cni::restore_host_ports(conf).await;
        if host_ports.map_err(|e| e.to_string())? {
            tracing::warn!("somebody removed the rules of host ports; restored them");
        }
        let restored = skiff_cni::restore_guards(conf).await.map_err(|e| e.to_string())?;
        if restored > 0 {
            tracing::warn!(
                restored,
                "somebody removed the guards of pod interfaces; restored them"
            );
        }
    }
    Ok(())
}
