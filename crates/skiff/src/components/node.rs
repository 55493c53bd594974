//! What makes a machine a node: the container runtime and the kubelet.

use super::{Machine, Prepared};
use crate::VERSION;
use crate::agent;
use crate::cluster::{Cluster, host_address_v6};
use anyhow::{Context, Result};
use futures::FutureExt;
use skiff_node::NodeConfig;
use skiff_runtime::Runtime;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The embedded runtime, or nothing to run if another one serves.
pub(super) async fn prepare_runtime(machine: &Machine) -> Result<Prepared> {
    if let Some(endpoint) = &machine.args.node.container_runtime_endpoint {
        let _ = machine.runtime_endpoint.set(endpoint.clone());
        return Ok(Prepared::idle());
    }
    let mut config = machine.cluster.runtime_config()?;
    if !machine.args.node.registry_config_path.is_empty() {
        config
            .registry_config_paths
            .clone_from(&machine.args.node.registry_config_path);
    }
    let starting = async { Runtime::start(config.clone()).await };
    let runtime = machine.reporter.step("container runtime", starting).await;
    let runtime = runtime.context("the container runtime cannot start")?;
    let _ = machine.runtime_endpoint.set(runtime.endpoint());
    machine.images.send_replace(Some(Some(runtime.images())));
    let mut started = Some(runtime);
    Ok(Prepared::alone(move |stop| {
        let (started, config) = (started.take(), config.clone());
        async move {
            let mut running = match started {
                Some(running) => running,
                None => Runtime::start(config).await.map_err(|e| e.to_string())?,
            };
            let ended = tokio::select! {
                () = stop.cancelled() => Ok(()),
                why = running.ended() => Err(why),
            };
            running.stop().await;
            ended
        }
        .boxed()
    }))
}

pub(super) async fn prepare(machine: &Machine) -> Result<Prepared> {
    let (args, cluster) = (&machine.args, &machine.cluster);
    let endpoint = machine.runtime_endpoint.get().context("no container runtime")?;
    let mut config = NodeConfig::new(&machine.node_name, cluster.kubelet_root(), endpoint);
    config.node_ips = vec![machine.node_address];
    if cluster.is_dual_stack() && machine.node_address.is_ipv4() {
        config.node_ips.extend(host_address_v6());
    }
    config.log_dir = cluster.data_dir.join("logs");
    config.server_bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), cluster.kubelet_port);
    config.tls_resolver = Some(machine.node_keys.serving.clone());
    config.client_ca_pem = machine.node_keys.ca.clone().into_bytes();
    config.cluster_dns = match &machine.agent {
        _ if !args.node.cluster_dns.is_empty() => args.node.cluster_dns.clone(),
        Some(keys) if !keys.cluster_dns.is_empty() => keys.cluster_dns.clone(),
        _ => vec![cluster.service_ip(10)?],
    };
    config.cluster_domain.clone_from(&args.cluster_domain);
    config.cgroup_root = cluster.cgroup();
    if machine.control_plane.is_some() && !machine.runs(crate::cli::Component::Controllers) {
        // Nobody assigns one.
        config.pod_cidrs = cluster
            .node_pod_cidrs()?
            .iter()
            .map(ToString::to_string)
            .collect();
    }
    if machine.control_plane.is_some() {
        // In the process a watch is no more than a queue.
        config.max_watched_objects = 4096;
    }
    config.local_volumes = Some(cluster.data_dir.join("volumes"));
    config.kubelet_version = VERSION.to_owned();
    args.node.apply(&mut config)?;
    Ok(Prepared::new(move |client, stop| {
        let config = config.clone();
        async move {
            let ended = skiff_node::run(config, client, stop).await;
            ended.map_err(|e| e.to_string())
        }
        .boxed()
    }))
}

/// Keeps the certificates of an agent fresh. On a machine with an authority of its own, that is done beside it.
pub(super) async fn prepare_certificates(machine: &Machine) -> Result<Prepared> {
    let keys = machine
        .agent
        .clone()
        .context("only an agent gets its certificates by the API")?;
    Ok(Prepared::new(move |client, stop| {
        let keys = keys.clone();
        async move {
            keys.keep_fresh(client, stop).await;
            Ok(())
        }
        .boxed()
    }))
}

/// Keeps the list of API servers that an agent may turn to.
pub(super) async fn prepare_servers(machine: &Machine) -> Result<Prepared> {
    let keys = machine
        .agent
        .clone()
        .context("only an agent has its API server elsewhere")?;
    let cluster = machine.cluster.clone();
    Ok(Prepared::new(move |client, stop| {
        let (cluster, remote) = (cluster.clone(), keys.remote.clone());
        async move {
            let followed = agent::follow_servers(cluster, remote, client, stop).await;
            followed.map_err(|e| format!("{e:#}"))
        }
        .boxed()
    }))
}

/// Where the embedded runtime keeps what, for the server and for `skiff image`.
impl Cluster {
    pub fn runtime_config(&self) -> Result<skiff_runtime::Config> {
        let mut config =
            skiff_runtime::Config::new(self.data_dir.join("runtime"), self.run_dir(), self.cgroup());
        config.cni_conf_dir = self.cni_conf_dir();
        config.cni_bin_dirs = vec![
            self.data_dir.join("cni/bin"),
            PathBuf::from("/opt/cni/bin"),
            PathBuf::from("/usr/lib/cni"),
        ];
        config.exe = std::env::current_exe()?;
        Ok(config)
    }
}
