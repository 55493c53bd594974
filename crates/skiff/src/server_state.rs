//! What a server remembers of its cluster in `<data-dir>/server.json`: the settings that all servers of the cluster have in
//! common, and the flags of `skiff join --server`. `skiff token create --server` hands the settings on to the next one.

use crate::cli::{self, ServerArgs};
use crate::cluster::{Cluster, needs_root};
use crate::etcd_args::EtcdArgs;
use crate::node_args::NodeArgs;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use skiff_client::ServerAddress;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// What all servers of a cluster must agree on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// All listen on one port: the `kubernetes` service has one.
    pub port: u16,
    pub pod_cidr: String,
    pub service_cidr: String,
    pub cluster_domain: String,
    /// As `--pod-network`.
    pub pod_network: String,
    pub node_cidr_mask_size: u8,
    /// As `--service-node-port-range`.
    pub node_ports: (u16, u16),
    /// As `--control-plane-endpoint`.
    pub control_plane_endpoint: Option<String>,
    pub api_audiences: Vec<String>,
    /// As `--load-balancer-pool`.
    #[serde(default)]
    pub load_balancer_pool: Vec<String>,
    /// As `--runtime-config`.
    #[serde(default)]
    pub runtime_config: Vec<String>,
    /// Empty: the store is the embedded one.
    pub etcd_servers: Vec<String>,
    pub etcd_prefix: String,
}

/// The files that a server reads beside its own keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SettingsFiles {
    pub etcd_ca: Option<PathBuf>,
    pub etcd_certificate: Option<PathBuf>,
    pub etcd_key: Option<PathBuf>,
    pub encryption_config: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerState {
    /// This machine joined a cluster that another one had made.
    pub joined: bool,
    /// Where pods and other machines reach this server; known when it was started.
    #[serde(default)]
    pub advertise: Option<IpAddr>,
    /// The same as a flag.
    #[serde(default)]
    pub advertise_flag: Option<IpAddr>,
    pub settings: Settings,
    pub files: SettingsFiles,
    /// The node's flags of `skiff join`.
    pub node: NodeArgs,
    /// What the node was called at the last start.
    #[serde(default)]
    pub node_name: Option<String>,
}

impl ServerState {
    fn path(cluster: &Cluster) -> PathBuf {
        cluster.data_dir.join("server.json")
    }

    /// `None`: no server was started here yet.
    pub fn find(cluster: &Cluster) -> Result<Option<ServerState>> {
        let path = Self::path(cluster);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(
                serde_json::from_slice(&bytes).with_context(|| format!("{} is damaged", path.display()))?,
            )),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| needs_root(&path)),
        }
    }

    /// The state of a machine that joined as a server.
    pub fn joined(cluster: &Cluster) -> Result<Option<ServerState>> {
        Ok(Self::find(cluster)?.filter(|state| state.joined))
    }

    pub fn write(&self, cluster: &Cluster) -> Result<()> {
        // A start on a full disk must not need room for what is there already.
        if Self::find(cluster).ok().flatten().as_ref() == Some(self) {
            return Ok(());
        }
        let path = Self::path(cluster);
        let bytes = serde_json::to_vec_pretty(self)?;
        skiff_fs::write_durably(&path, &bytes, 0o600).with_context(|| needs_root(&path))
    }

    /// What a server with these flags is.
    pub fn of(
        args: &ServerArgs,
        cluster: &Cluster,
        advertise: IpAddr,
        node_name: &str,
    ) -> Result<ServerState> {
        let before = Self::joined(cluster)?;
        let etcd = args.etcd_of(cluster);
        let ports = &args.service_node_port_range;
        let mut state = ServerState {
            joined: before.is_some(),
            advertise: Some(advertise),
            advertise_flag: args.advertise_address,
            settings: Settings {
                port: cluster.bind.port(),
                pod_cidr: cluster.pod_cidr.clone(),
                service_cidr: cluster.service_cidr.clone(),
                cluster_domain: args.cluster_domain.clone(),
                pod_network: cli::pod_network_name(args.pod_network).to_owned(),
                node_cidr_mask_size: args.node_cidr_mask_size,
                node_ports: (*ports.start(), *ports.end()),
                control_plane_endpoint: args.control_plane_endpoint.as_ref().map(ToString::to_string),
                api_audiences: args.access.api_audiences.clone(),
                load_balancer_pool: args.load_balancer_pool.iter().map(ToString::to_string).collect(),
                runtime_config: args.apis.runtime_config.clone(),
                etcd_servers: Vec::new(),
                etcd_prefix: args.etcd.etcd_prefix.clone(),
            },
            files: SettingsFiles {
                encryption_config: args.encryption.shared_config(cluster, etcd)?,
                ..SettingsFiles::default()
            },
            node: before.map(|state| state.node).unwrap_or_default(),
            node_name: Some(node_name.to_owned()),
        };
        state.set_etcd(etcd);
        Ok(state)
    }

    /// The etcd that the server uses; `None`: its store is the embedded one.
    pub fn etcd(&self) -> Option<EtcdArgs> {
        let (settings, files) = (&self.settings, &self.files);
        let etcd = EtcdArgs {
            etcd_servers: settings.etcd_servers.clone(),
            etcd_prefix: settings.etcd_prefix.clone(),
            etcd_cafile: files.etcd_ca.clone(),
            etcd_certfile: files.etcd_certificate.clone(),
            etcd_keyfile: files.etcd_key.clone(),
        };
        etcd.given().cloned()
    }

    pub fn set_etcd(&mut self, etcd: Option<&EtcdArgs>) {
        let (settings, files) = (&mut self.settings, &mut self.files);
        settings.etcd_servers = etcd.map(|etcd| etcd.etcd_servers.clone()).unwrap_or_default();
        if let Some(etcd) = etcd {
            settings.etcd_prefix.clone_from(&etcd.etcd_prefix);
        }
        files.etcd_ca = etcd.and_then(|etcd| etcd.etcd_cafile.clone());
        files.etcd_certificate = etcd.and_then(|etcd| etcd.etcd_certfile.clone());
        files.etcd_key = etcd.and_then(|etcd| etcd.etcd_keyfile.clone());
    }

    /// The flags of etcd of a server that joined.
    pub fn complete_etcd(&self, given: &EtcdArgs) -> EtcdArgs {
        let Some(remembered) = self.etcd() else {
            return given.clone();
        };
        let servers = match given.given() {
            // Members of etcd come and go.
            Some(given) => &given.etcd_servers,
            None => &remembered.etcd_servers,
        };
        EtcdArgs {
            etcd_servers: servers.clone(),
            etcd_prefix: remembered.etcd_prefix,
            etcd_cafile: given.etcd_cafile.clone().or(remembered.etcd_cafile),
            etcd_certfile: given.etcd_certfile.clone().or(remembered.etcd_certfile),
            etcd_keyfile: given.etcd_keyfile.clone().or(remembered.etcd_keyfile),
        }
    }

    /// The flags of a server that joined: what is the cluster's comes from here, and what was given to `skiff join`.
    pub fn complete(&self, args: &ServerArgs) -> Result<ServerArgs> {
        let (settings, files) = (&self.settings, &self.files);
        let mut args = ServerArgs {
            cluster_domain: settings.cluster_domain.clone(),
            pod_network: cli::pod_network(&settings.pod_network).map_err(anyhow::Error::msg)?,
            node_cidr_mask_size: settings.node_cidr_mask_size,
            service_node_port_range: settings.node_ports.0..=settings.node_ports.1,
            etcd: self.complete_etcd(&args.etcd),
            advertise_address: self.advertise_flag,
            node: self.node.clone(),
            ..args.clone()
        };
        if args.encryption.encryption_provider_config.is_none() {
            let remembered = &files.encryption_config;
            args.encryption.encryption_provider_config.clone_from(remembered);
        }
        if args.access.api_audiences.is_empty() {
            args.access.api_audiences.clone_from(&settings.api_audiences);
        }
        if args.apis.runtime_config.is_empty() {
            args.apis.runtime_config.clone_from(&settings.runtime_config);
        }
        if args.load_balancer_pool.is_empty() {
            let ranges = settings.load_balancer_pool.iter().map(|range| range.parse());
            args.load_balancer_pool = ranges.collect::<Result<_, _>>()?;
        }
        if let (None, Some(endpoint)) = (&args.control_plane_endpoint, &settings.control_plane_endpoint) {
            args.control_plane_endpoint = Some(endpoint.parse()?);
        }
        Ok(args)
    }

    /// Whether there is an endpoint in front of the servers.
    pub fn has_endpoint(&self) -> bool {
        self.settings.control_plane_endpoint.is_some()
    }

    /// Where other machines reach the cluster: at the endpoint in front of its servers, or at this one.
    pub fn reached_at(&self) -> Result<ServerAddress> {
        if let Some(endpoint) = &self.settings.control_plane_endpoint {
            return Ok(endpoint.parse()?);
        }
        let own = self.advertise.context("the server was not started yet")?;
        Ok(SocketAddr::new(own, self.settings.port).into())
    }
}

impl Cluster {
    /// What tells this server from the others of its cluster, whatever their host names are. Made once, so that a
    /// server that was killed gets its leases back at once.
    pub fn server_id(&self) -> Result<String> {
        let path = self.data_dir.join("server-id");
        match std::fs::read_to_string(&path) {
            Ok(id) if !id.trim().is_empty() => return Ok(id.trim().to_owned()),
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| needs_root(&path));
            }
            _ => {}
        }
        let id = crate::token::random(16)?;
        skiff_fs::write_durably(&path, id.as_bytes(), 0o600).with_context(|| needs_root(&path))?;
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::cluster::Wishes;
    use clap::Parser;

    fn args(flags: &[&str]) -> ServerArgs {
        match Cli::try_parse_from(["skiff", "server"].iter().chain(flags))
            .unwrap()
            .command
        {
            Command::Server(args) => *args,
            _ => panic!("server"),
        }
    }

    #[test]
    fn a_joined_server_has_the_clusters_settings() {
        let root = tempfile::tempdir().unwrap();
        let cluster = Cluster::find_or_make_in(root.path(), "skiff", &Wishes::default()).unwrap();
        assert_eq!(ServerState::find(&cluster).unwrap(), None);
        let first = args(&[
            "--etcd-servers",
            "http://192.0.2.1:2379",
            "--cluster-domain",
            "example.org",
            "--service-node-port-range",
            "30000-30100",
            "--control-plane-endpoint",
            "api.example:6443",
            "--load-balancer-pool",
            "192.0.2.128/25,2001:db8::1-2001:db8::9",
            "--runtime-config",
            "api/beta=true",
        ]);
        let mut state = ServerState::of(&first, &cluster, "192.0.2.1".parse().unwrap(), "first").unwrap();
        assert!(!state.joined);
        assert_eq!(
            state.reached_at().unwrap().to_string(),
            "https://api.example:6443"
        );
        state.joined = true;
        state.node.hostname_override = Some("second".into());
        state.write(&cluster).unwrap();
        let state = ServerState::joined(&cluster).unwrap().unwrap();
        let completed = state.complete(&args(&[])).unwrap();
        assert_eq!(completed.etcd, first.etcd);
        assert_eq!(completed.cluster_domain, "example.org");
        assert_eq!(completed.service_node_port_range, 30000..=30100);
        assert_eq!(completed.control_plane_endpoint, first.control_plane_endpoint);
        assert_eq!(completed.load_balancer_pool, first.load_balancer_pool);
        assert_eq!(completed.apis.runtime_config, ["api/beta=true"]);
        assert_eq!(completed.node.hostname_override.as_deref(), Some("second"));
        // Members of etcd come and go.
        let moved = state
            .complete(&args(&["--etcd-servers", "http://192.0.2.9:2379"]))
            .unwrap();
        assert_eq!(moved.etcd.etcd_servers, ["http://192.0.2.9:2379"]);
    }

    #[test]
    fn a_server_keeps_its_id() {
        let root = tempfile::tempdir().unwrap();
        let cluster = |name: &str| Cluster::find_or_make_in(root.path(), name, &Wishes::default()).unwrap();
        let (one, two) = (cluster("one"), cluster("two"));
        assert_eq!(one.server_id().unwrap(), one.server_id().unwrap());
        assert_ne!(one.server_id().unwrap(), two.server_id().unwrap());
    }
}
