//! The pod network of this node: the CNI plugin here, `skiff_network::pods` for the bridge and the other nodes, and
//! `skiff_network::policy` for who may talk with whom.

use super::{Machine, Prepared, foreign_runtime};
use crate::cli::Component;
use crate::cluster::Cluster;
use anyhow::Result;
use futures::FutureExt;
use std::fs;

/// Installs the CNI plugin; the rest follows from what the Node says is ours.
pub(super) async fn prepare(machine: &Machine) -> Result<Prepared> {
    let cluster = &machine.cluster;
    machine
        .reporter
        .step("pod network", async {
            install_plugin(cluster)?;
            publish(machine).await
        })
        .await?;
    let mode = machine.args.pod_network;
    let dns = machine.runs(Component::Dns);
    let mut config = cluster.pod_network_config(&machine.node_name, mode.unwrap_or_default(), dns)?;
    config.connection_limit = machine.args.node.pod_connection_limit;
    if mode.is_none() {
        // Another CNI plugin's configuration goes to the same directory.
        skiff_network::pods::remove_cni_configuration(&config)?;
        return Ok(Prepared::idle());
    }
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_network::pods::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

/// Puts the pod network where a runtime that is not ours looks for it.
async fn publish(machine: &Machine) -> Result<()> {
    let (cluster, flags) = (&machine.cluster, &machine.args.node);
    let published = match &flags.container_runtime_endpoint {
        Some(endpoint) if machine.args.pod_network.is_some() => {
            let (conf_dir, bin_dir) = (flags.cni_conf_dir.as_deref(), flags.cni_bin_dir.as_deref());
            foreign_runtime::find(cluster, endpoint, conf_dir, bin_dir).await?
        }
        _ => None,
    };
    cluster.note_published(published.as_ref())?;
    match published {
        Some(published) => foreign_runtime::link_plugin(&published, &std::env::current_exe()?),
        None => Ok(()),
    }
}

/// The network policies of this node's pods. Another CNI plugin brings its own.
pub(super) async fn prepare_policy(machine: &Machine) -> Result<Prepared> {
    if machine.args.pod_network.is_none() {
        return Ok(Prepared::idle());
    }
    let config = machine.cluster.policy_config(&machine.node_name);
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_network::policy::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

/// What became of administrators' policies, for all nodes.
pub(super) async fn prepare_policy_status(machine: &Machine) -> Result<Prepared> {
    if machine.args.pod_network.is_none() {
        return Ok(Prepared::idle());
    }
    Ok(Prepared::new(|client, stop| {
        async move {
            skiff_network::policy::run_status(client, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

/// Puts the CNI plugin where the runtime looks for it: it is this binary under another name.
fn install_plugin(cluster: &Cluster) -> Result<()> {
    let bin = cluster.data_dir.join("cni/bin");
    fs::create_dir_all(&bin)?;
    fs::create_dir_all(cluster.cni_conf_dir())?;
    let plugin = bin.join(skiff_cni::PLUGIN_NAME);
    let beside = bin.join(".new");
    let _ = fs::remove_file(&beside);
    std::os::unix::fs::symlink(std::env::current_exe()?, &beside)?;
    fs::rename(&beside, &plugin)?;
    Ok(())
}
