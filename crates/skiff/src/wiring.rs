//! Every component wired to the API, in the order in which they need each other.
//!
//! The API server comes first. All others are its clients, each with its own identity, over an in-process
//! service: no component gets anything but its configuration and a client.

use crate::certificates::Certificates;
use crate::cli::{Component, ServerArgs};
use crate::cluster::{Cluster, host_address, host_address_v6};
use crate::progress::{NODE_READY, Reporter};
use crate::supervise::Supervisor;
use crate::{VERSION, addons, image, preflight};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::Api;
use sha2::{Digest, Sha256};
use skiff_auth::UserInfo;
use skiff_client::ComponentMetrics;
use skiff_encryption::Encrypted;
use skiff_runtime::ImageStore;
use skiff_server::{AuditConfig, AuditMode, AuditPolicy, AuditWebhookOptions, LogOptions};
use skiff_server::{
    ClientCertificates, KubeletClient, LocalApi, Server, ServerConfig, ServiceAccountKey, Version,
};
use skiff_store::Store;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

pub struct Wiring<'a> {
    pub args: &'a ServerArgs,
    pub cluster: &'a Cluster,
    pub reporter: &'a Reporter,
    pub supervisor: &'a Arc<Supervisor>,
}

impl Wiring<'_> {
    /// Starts what the flags ask for; returns when the node, if there is one, is Ready.
    pub async fn start(&self) -> Result<()> {
        let (args, cluster) = (self.args, self.cluster);
        let node_name = match &args.hostname_override {
            Some(name) => name.clone(),
            None => host_name()?,
        };
        let gateway = cluster.pod_gateway()?;
        let advertise = self.advertise_address(gateway);
        self.reporter
            .step("checks", async {
                preflight::check(cluster, self.runs(Component::Node))
            })
            .await?;
        let certificates = self
            .reporter
            .step("certificates", async {
                let node = (node_name.as_str(), self.node_address(gateway));
                Certificates::open(cluster, &args.cluster_domain, advertise, node).map(Arc::new)
            })
            .await?;
        // The demo image is made beside the rest: nothing waits for it but the end of the start.
        let (endpoint, images) = self.prepare_node().await?;
        let rest = self.start_components(advertise, gateway, &node_name, &certificates, endpoint);
        match images {
            Some(images) => {
                tokio::try_join!(rest, self.reporter.step("demo image", self.pack_demo(images))).map(|_| ())
            }
            None => rest.await,
        }
    }

    /// The pod network and the runtime, if this machine is a node: its endpoint, and the images of our own one.
    async fn prepare_node(&self) -> Result<(Option<String>, Option<Arc<ImageStore>>)> {
        if !self.runs(Component::Node) {
            return Ok((None, None));
        }
        self.reporter
            .step("pod network", async { self.prepare_network() })
            .await?;
        if let Some(endpoint) = &self.args.container_runtime_endpoint {
            return Ok((Some(endpoint.clone()), None));
        }
        let (endpoint, images) = self
            .reporter
            .step("container runtime", self.start_runtime())
            .await?;
        Ok((Some(endpoint), Some(images)))
    }

    /// Where pods and other machines reach the API server: an address that it listens on.
    fn advertise_address(&self, gateway: IpAddr) -> IpAddr {
        let default = match self.cluster.bind.ip() {
            ip if ip.is_unspecified() => host_address().unwrap_or(gateway),
            // A pod's loopback is its own: pods reach this machine by the address of their bridge.
            ip if ip.is_loopback() && self.runs(Component::Node) => gateway,
            ip => ip,
        };
        self.args.advertise_address.unwrap_or(default)
    }

    /// Where this machine is reached as a node.
    fn node_address(&self, gateway: IpAddr) -> IpAddr {
        self.args
            .advertise_address
            .or_else(host_address)
            .unwrap_or(gateway)
    }

    /// Where the API server listens: at `--bind`, and where pods are told to find it if that is another address
    /// of this machine.
    fn listen_addresses(&self, advertise: IpAddr) -> Vec<SocketAddr> {
        let bind = self.cluster.bind;
        let mut addresses = vec![bind];
        if !bind.ip().is_unspecified() && bind.ip() != advertise {
            let other = SocketAddr::new(advertise, bind.port());
            // The pods' bridge gets its address when there is a server to learn it from.
            let later =
                self.runs(Component::Node) && self.cluster.pod_gateway().is_ok_and(|ip| ip == advertise);
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

    fn runs(&self, component: Component) -> bool {
        self.args.components.contains(&component)
    }

    async fn start_components(
        &self,
        advertise: IpAddr,
        gateway: IpAddr,
        node_name: &str,
        certificates: &Arc<Certificates>,
        endpoint: Option<String>,
    ) -> Result<()> {
        let cluster = self.cluster;
        let store = self.reporter.step("store", self.open_store(certificates)).await?;
        let server = self
            .reporter
            .step("API server", self.start_api(store, advertise, certificates))
            .await?;
        let client = |user: UserInfo, agent: &'static str| {
            skiff_client::in_process_as(server.service(user), "default", agent)
        };
        let merge = !self.args.no_kubeconfig_merge;
        certificates.write_kubeconfig(cluster, merge, true)?;
        certificates.follow(cluster, merge, &server, self.supervisor.shutdown.clone())?;
        let admin = client(UserInfo::new("kubernetes-admin", ["system:masters"]), "skiff");
        self.reporter
            .step(
                "cluster add-ons",
                addons::install(&admin, cluster, self.runs(Component::Metrics)),
            )
            .await?;
        if self.runs(Component::Controllers) {
            self.start_controllers(&server, certificates, node_name)?;
        }
        if self.runs(Component::Controllers) || self.runs(Component::Dns) {
            let account = UserInfo::service_account("kube-system", addons::DNS_ENDPOINTS);
            self.start_dns_endpoints(client(account, "cluster-dns-controller"));
        }
        if self.runs(Component::Scheduler) {
            let metrics = ComponentMetrics::new(VERSION);
            server.show_metrics("kube-scheduler", metrics.registry.clone());
            let user = UserInfo::new("system:kube-scheduler", [] as [&str; 0]);
            let client = skiff_client::in_process_measured(
                server.service(user),
                "default",
                "kube-scheduler",
                metrics.clone(),
            );
            let configuration = match &self.args.config {
                Some(path) => {
                    let text =
                        std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
                    skiff_scheduler::Configuration::parse(&text)
                        .with_context(|| path.display().to_string())?
                }
                None => skiff_scheduler::Configuration::default(),
            };
            let config = skiff_scheduler::SchedulerConfig {
                configuration,
                leader_elect: Some(self.identity(node_name)),
                metrics,
            };
            self.supervisor.run("scheduler", move |stop| {
                let (config, client) = (config.clone(), client.clone());
                async move {
                    skiff_scheduler::run(config, client, stop).await;
                    Ok(())
                }
            });
        }
        if self.runs(Component::Proxy) {
            self.start_proxy(
                client(UserInfo::new("system:kube-proxy", [] as [&str; 0]), "kube-proxy"),
                node_name,
            )?;
        }
        if let Some(endpoint) = endpoint {
            let identity = UserInfo::new(format!("system:node:{node_name}"), ["system:nodes"]);
            self.start_pod_network(client(identity.clone(), "skiff-network"), node_name)?;
            self.start_node(
                client(identity, "kubelet"),
                node_name,
                self.node_address(gateway),
                endpoint,
                certificates,
            )?;
            let provisioner = UserInfo::service_account("kube-system", addons::LOCAL_VOLUMES);
            self.start_local_volumes(client(provisioner, "local-volumes"), node_name);
        }
        if self.runs(Component::Dns) {
            self.start_dns(
                client(UserInfo::service_account("kube-system", "coredns"), "coredns"),
                node_name,
            )?;
        }
        if self.runs(Component::Metrics) {
            self.start_metrics(&server, certificates.current_ca.subscribe())
                .await?;
        }
        if self.runs(Component::Node) {
            self.reporter
                .step(NODE_READY, node_ready(admin, node_name))
                .await?;
        }
        Ok(())
    }

    /// Who holds a leader's lease. The same after a restart, so that a killed skiff gets its leases back at once.
    fn identity(&self, node_name: &str) -> String {
        format!("{node_name}_{}", self.cluster.name)
    }

    async fn open_store(&self, certificates: &Certificates) -> Result<Arc<dyn Store>> {
        let args = self.args;
        if args.etcd_servers.is_empty() {
            let dir = self.cluster.data_dir.join("store");
            let store = tokio::task::spawn_blocking(move || skiff_store::Embedded::open(dir)).await??;
            return Ok(Arc::new(store));
        }
        let mut options = skiff_store::etcd::Options::new(&args.etcd_servers);
        options.prefix.clone_from(&args.etcd_prefix);
        // Whoever has the key of service accounts is of the same cluster.
        let id = Sha256::digest(certificates.service_account.1.as_bytes());
        options.owner = Some(skiff_store::etcd::Owner {
            id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            name: self.cluster.name.clone(),
        });
        options.ca_file.clone_from(&args.etcd_cafile);
        options.cert_file.clone_from(&args.etcd_certfile);
        options.key_file.clone_from(&args.etcd_keyfile);
        let store = skiff_store::Etcd::open(options).await;
        Ok(Arc::new(store.with_context(|| {
            format!("etcd at {} cannot be used", args.etcd_servers.join(", "))
        })?))
    }

    async fn start_api(
        &self,
        store: Arc<dyn Store>,
        advertise: IpAddr,
        certificates: &Certificates,
    ) -> Result<Server> {
        let cluster = self.cluster;
        let encryption = self.args.encryption.open(cluster, self.args, &store).await?;
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
        let shutdown = self.supervisor.shutdown.clone();
        let issuer = format!("https://kubernetes.default.svc.{}", self.args.cluster_domain);
        let authentication = self.args.access.authentication(&issuer)?;
        let jwt = authentication.jwt.clone();
        let server = Server::start(ServerConfig {
            store,
            service_cidr: cluster.service_cidr.clone(),
            node_ports: self.args.service_node_port_range.clone(),
            advertise_address: advertise,
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
                audiences: self.args.access.api_audiences.clone(),
            }),
            authentication,
            authorization: self.args.access.authorization()?,
            admission: self.args.access.admission()?,
            kubelet: Some(KubeletClient {
                tls: Arc::new(kubelet_tls),
            }),
            recorder: Arc::default(),
            audit: audit(self.args)?,
            version: Version {
                git_version: VERSION.to_owned(),
                ..Version::default()
            },
            kms_health: self.args.encryption.health(encryption.as_ref()),
            shutdown: shutdown.clone(),
        })
        .await?;
        self.args.access.follow(&server, jwt, &issuer, &shutdown)?;
        if let Some(encryption) = encryption {
            self.args.encryption.follow(encryption, &server, &shutdown);
        }
        let addresses = self.listen_addresses(advertise);
        // The first listeners are bound before anything else counts on them.
        let listeners = Arc::new(parking_lot::Mutex::new(Some(listen(&addresses).await?)));
        let door = server.clone();
        self.supervisor.run("api", move |stop| {
            let (door, bound, addresses) = (door.clone(), listeners.lock().take(), addresses.clone());
            async move {
                let listeners = match bound {
                    Some(listeners) => listeners,
                    None => listen(&addresses).await.map_err(|e| format!("{e:#}"))?,
                };
                let serving = listeners
                    .into_iter()
                    .map(|listener| door.serve(listener, stop.clone()));
                futures::future::join_all(serving).await;
                Ok(())
            }
        });
        Ok(server)
    }

    fn start_controllers(&self, server: &Server, certificates: &Certificates, node_name: &str) -> Result<()> {
        let mut ca = certificates.current_ca.subscribe();
        let metrics = ComponentMetrics::new(VERSION);
        server.show_metrics("kube-controller-manager", metrics.registry.clone());
        let (server, measured) = (server.clone(), metrics.clone());
        let client_for = Arc::new(move |name: &str| {
            let user = if name == skiff_controllers::MANAGER {
                UserInfo::new(name, [] as [&str; 0])
            } else {
                UserInfo::service_account("kube-system", name)
            };
            let service = server.service(user);
            skiff_client::in_process_measured(service, "default", "kube-controller-manager", measured.clone())
        });
        let current = ca.borrow_and_update().clone();
        let mut config =
            skiff_controllers::ControllersConfig::new(client_for, current, self.identity(node_name));
        config.cluster_cidrs = self
            .cluster
            .pod_cidrs()?
            .iter()
            .map(ToString::to_string)
            .collect();
        config.service_cidrs = vec![self.cluster.service_cidr.clone()];
        config.metrics = metrics;
        config.certificate_signer = Some(Arc::new(crate::certificates::Signer::new(self.cluster)));
        config.token_signer = Some(certificates.token_signer()?);
        config.controllers = skiff_controllers::ControllerSelection::parse(&self.args.controllers)?;
        self.supervisor.run("controllers", move |stop| {
            let (mut config, mut ca) = (config.clone(), ca.clone());
            config.root_ca_pem = ca.borrow_and_update().clone();
            async move {
                let mut running = std::pin::pin!(skiff_controllers::run(config, stop.clone()));
                let renewed = async {
                    if ca.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    () = running.as_mut() => Ok(()),
                    () = renewed => {
                        stop.cancel();
                        running.await;
                        Err("the certificate authority was renewed".to_owned())
                    }
                }
            }
        });
        Ok(())
    }

    /// Puts the CNI plugin where the runtime looks for it: it is this binary under another name.
    fn prepare_network(&self) -> Result<()> {
        let cluster = self.cluster;
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

    /// Bridge, routes to other nodes and the CNI configuration: from what the Node says is ours.
    fn start_pod_network(&self, client: Client, node_name: &str) -> Result<()> {
        let mode = self.args.pod_network;
        let dns = self.runs(Component::Dns);
        let config = self
            .cluster
            .pod_network_config(node_name, mode.unwrap_or_default(), dns)?;
        if mode.is_none() {
            // Another CNI plugin's configuration goes to the same directory.
            return Ok(skiff_network::pods::remove_cni_configuration(&config)?);
        }
        self.supervisor.run("network", move |stop| {
            let (config, client) = (config.clone(), client.clone());
            async move {
                skiff_network::pods::run(config, client, stop)
                    .await
                    .map_err(|e| e.to_string())
            }
        });
        Ok(())
    }

    /// The EndpointSlices of cluster DNS, one of every node that runs it.
    fn start_dns_endpoints(&self, client: Client) {
        self.supervisor.run("dns-endpoints", move |stop| {
            let client = client.clone();
            async move {
                skiff_network::dns_endpoints::run(client, stop)
                    .await
                    .map_err(|e| e.to_string())
            }
        });
    }

    async fn start_runtime(&self) -> Result<(String, Arc<ImageStore>)> {
        let config = self.cluster.runtime_config()?;
        let runtime = skiff_runtime::Runtime::start(config.clone()).await;
        let runtime = runtime.context("the container runtime cannot start")?;
        let (endpoint, images) = (runtime.endpoint(), runtime.images());
        let runtime = Arc::new(parking_lot::Mutex::new(Some(runtime)));
        self.supervisor.run("runtime", move |stop| {
            let (running, config) = (runtime.lock().take(), config.clone());
            async move {
                let mut running = match running {
                    Some(running) => running,
                    None => skiff_runtime::Runtime::start(config)
                        .await
                        .map_err(|e| e.to_string())?,
                };
                let ended = tokio::select! {
                    () = stop.cancelled() => Ok(()),
                    why = running.ended() => Err(why),
                };
                running.stop().await;
                ended
            }
        });
        Ok((endpoint, images))
    }

    /// Makes the demo image of this binary, unless it is there. A cluster works without it: on a full disk it must start.
    async fn pack_demo(&self, images: Arc<ImageStore>) -> Result<()> {
        let exe = std::env::current_exe()?;
        let packed =
            tokio::task::spawn_blocking(move || images.add_binary_image(image::DEMO, &exe, &image::demo()))
                .await?;
        if let Err(error) = packed {
            tracing::warn!(%error, "the demo image cannot be made");
        }
        Ok(())
    }

    fn start_node(
        &self,
        client: Client,
        node_name: &str,
        address: IpAddr,
        endpoint: String,
        certificates: &Certificates,
    ) -> Result<()> {
        let cluster = self.cluster.clone();
        let mut config = skiff_node::NodeConfig::new(node_name, cluster.data_dir.join("kubelet"), endpoint);
        config.node_ips = vec![address];
        if cluster.is_dual_stack() && address.is_ipv4() {
            config.node_ips.extend(host_address_v6());
        }
        config.log_dir = cluster.data_dir.join("logs");
        config.server_bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), cluster.kubelet_port);
        let identity = certificates.kubelet.identity();
        config.tls_cert_pem = identity.certificate.clone().into_bytes();
        config.tls_key_pem = identity.key.clone().into_bytes();
        config.tls_resolver = Some(certificates.kubelet.clone());
        config.client_ca_pem = certificates.ca.clone().into_bytes();
        config.cluster_dns = vec![cluster.service_ip(10)?];
        config.cluster_domain.clone_from(&self.args.cluster_domain);
        config.cgroup_root = cluster.cgroup();
        if !self.runs(Component::Controllers) {
            // Nobody assigns one.
            config.pod_cidrs = cluster
                .node_pod_cidrs()?
                .iter()
                .map(ToString::to_string)
                .collect();
        }
        if self.args.pod_network.is_some() {
            // The pod network writes its configuration itself; this only says that it is skiff's own.
            config.cni_config = Some(Arc::new(|_| String::new()));
        }
        config.kubelet_version = VERSION.to_owned();
        config.allowed_sysctls = skiff_node::AllowedSysctls::with_unsafe(&self.args.allowed_unsafe_sysctls)
            .context("--allowed-unsafe-sysctls")?;
        self.supervisor.run("node", move |stop| {
            let (config, client) = (config.clone(), client.clone());
            async move {
                skiff_node::run(config, client, stop)
                    .await
                    .map_err(|e| e.to_string())
            }
        });
        Ok(())
    }

    fn start_local_volumes(&self, client: Client, node_name: &str) {
        let data_dir = &self.cluster.data_dir;
        let config = skiff_node::LocalVolumesConfig {
            node_name: node_name.to_owned(),
            root: data_dir.join("volumes"),
            pods: data_dir.join("kubelet/pods"),
        };
        self.supervisor.run("local-volumes", move |stop| {
            let (config, client) = (config.clone(), client.clone());
            async move {
                skiff_node::run_local_volumes(config, client, stop).await;
                Ok(())
            }
        });
    }

    fn start_proxy(&self, client: Client, node_name: &str) -> Result<()> {
        let config = self.cluster.proxy_config(node_name)?;
        self.supervisor.run("proxy", move |stop| {
            let (config, client) = (config.clone(), client.clone());
            async move {
                skiff_network::proxy::run(config, client, stop)
                    .await
                    .map_err(|e| e.to_string())
            }
        });
        Ok(())
    }

    /// The Metrics API: behind the API server like an aggregated one, and a client of it like any component.
    async fn start_metrics(&self, server: &Server, ca: watch::Receiver<String>) -> Result<()> {
        let api = skiff_metrics::MetricsApi::default();
        let handler = api.clone();
        let local = LocalApi::new(move |request| {
            let api = handler.clone();
            async move { api.answer(&request.into_parts().0) }
        });
        server
            .serve_locally(skiff_metrics::GROUP, skiff_metrics::VERSION, local)
            .await?;
        let user = UserInfo::service_account(skiff_metrics::NAMESPACE, skiff_metrics::SERVICE_ACCOUNT);
        let config = skiff_metrics::MetricsConfig {
            client: skiff_client::in_process_as(server.service(user), "default", "skiff-metrics"),
            ca,
        };
        self.supervisor.run("metrics", move |stop| {
            let (config, api) = (config.clone(), api.clone());
            async move {
                skiff_metrics::run(config, api, stop).await;
                Ok(())
            }
        });
        Ok(())
    }

    fn start_dns(&self, client: Client, node_name: &str) -> Result<()> {
        let own = [self.cluster.pod_gateway()?, self.cluster.service_ip(10)?];
        let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let config = skiff_dns::DnsConfig {
            listen: match self.runs(Component::Node) {
                true => skiff_dns::Listen::Gateways {
                    node: node_name.to_owned(),
                },
                false => skiff_dns::Listen::On(vec![SocketAddr::new(own[0], 53)]),
            },
            pods: self.cluster.pod_cidrs()?,
            domain: self.args.cluster_domain.clone(),
            resolvers: skiff_dns::host_resolvers(&resolv_conf, &own),
        };
        self.supervisor.run("dns", move |stop| {
            let (config, client) = (config.clone(), client.clone());
            async move {
                skiff_dns::run(config, client, stop)
                    .await
                    .map_err(|e| e.to_string())
            }
        });
        Ok(())
    }
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

async fn node_ready(client: Client, name: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client);
    loop {
        let node = nodes.get_opt(name).await?;
        let conditions = node
            .as_ref()
            .and_then(|n| n.status.as_ref())
            .and_then(|s| s.conditions.as_ref());
        if conditions
            .into_iter()
            .flatten()
            .any(|c| c.type_ == "Ready" && c.status == "True")
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn host_name() -> Result<String> {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .to_lowercase();
    if name.is_empty() || name == "(none)" {
        bail!("this machine has no host name; set one, or choose a node name with --hostname-override NAME");
    }
    Ok(name)
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

    pub fn proxy_config(&self, node_name: &str) -> Result<skiff_network::proxy::ProxyConfig> {
        Ok(skiff_network::proxy::ProxyConfig {
            table: self.nft_table(),
            node_name: node_name.to_owned(),
            pod_cidrs: self.pod_cidrs()?,
            service_cidrs: vec![self.service_cidr.parse()?],
            host_ports: vec![self.bind.port(), self.kubelet_port],
            bridge: Some(self.bridge()),
        })
    }
}
