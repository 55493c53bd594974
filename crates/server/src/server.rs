//! The API server: what it is started with, what it holds, and its two doors, HTTPS and in-process.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use skiff_admission::Chain;
use skiff_api::facts::RuntimeConfig;
use skiff_auth::{
    Anonymous, Authenticator, Authorizer, BootstrapTokens, Impersonations, JwtAuthenticators, LegacyTokens,
    Mode, RequestHeader, TokenAuthenticator, TokenFile, TokenIssuer, TokenVerifier, TokenWebhook, Tokens,
    UserInfo,
};
use skiff_meta::Status;
use skiff_registry::hooks::bootstrap::Advertise;
use skiff_registry::{BadCidr, Cidr, Registry, RegistryConfig};
use skiff_schema::openapi::OpenApi;
use skiff_trace::Recorder;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::aggregation::{self, Aggregator};
use crate::audit::{AuditConfig, AuditError, Auditor};
use crate::connections::Limits;
use crate::dynamic::{self, Dynamic};
use crate::flow::{self, FlowControl};
use crate::health::HealthCheck;
use crate::hooks::{
    bootstrap_secrets, endpoints, identity, ip_addresses, legacy_tokens, node_graph, rbac_source, repair,
    store_history,
};
use crate::listen::{self, Authorities};
use crate::metrics::Metrics;
use crate::proxy::LocalApi;
use crate::service::InProcess;
use crate::subresources::KubeletClient;
use crate::verbs::open_watches::OpenWatches;
use crate::version::Version;

/// The key of service-account tokens.
#[derive(Clone)]
pub struct ServiceAccountKey {
    /// PEM, PKCS#8, P-256.
    pub private_key: String,
    /// PEM, SPKI.
    pub public_key: String,
    /// `https://kubernetes.default.svc.cluster.local`.
    pub issuer: String,
    /// Empty: the issuer is the only audience.
    pub audiences: Vec<String>,
}

/// The authorities of client certificates, and what this server shows when it is the client.
#[derive(Clone)]
pub struct ClientCertificates {
    /// PEM: who is signed by it is who the certificate says.
    pub client_ca: String,
    /// Who is signed by its authority speaks for the user that it names. Its certificate is shown to extension
    /// API servers.
    pub front_proxy: Option<skiff_pki::FrontProxy>,
}

/// Who is known besides certificates and service accounts.
pub struct Authentication {
    pub anonymous: Anonymous,
    /// Tokens that an administrator gave.
    pub token_file: Option<TokenFile>,
    /// Tokens by which machines join.
    pub bootstrap_tokens: bool,
    /// Identity providers.
    pub jwt: Option<Arc<JwtAuthenticators>>,
    /// Asked last.
    pub webhook: Option<TokenWebhook>,
}

impl Default for Authentication {
    fn default() -> Authentication {
        Authentication {
            anonymous: Anonymous::everywhere(true),
            token_file: None,
            bootstrap_tokens: true,
            jwt: None,
            webhook: None,
        }
    }
}

/// What the server is started with.
pub struct ServerConfig {
    /// Other servers of the cluster may use the same one.
    pub store: Arc<dyn skiff_registry::Store>,
    /// `10.96.0.0/12`, or two of different families separated by a comma.
    pub service_cidr: String,
    /// Upstream's default is 30000-32767.
    pub node_ports: RangeInclusive<u16>,
    /// Which APIs are served beside those that are on by default.
    pub runtime_config: RuntimeConfig,
    /// Where pods and nodes reach this server: the endpoints of the `kubernetes` service.
    pub advertise_address: IpAddr,
    pub advertise_port: u16,
    /// TLS of the listener. It asks for client certificates and takes any (`skiff_pki::asking_server_config`):
    /// whose they are is checked here.
    pub tls: Arc<rustls::ServerConfig>,
    /// None: certificates mean nothing.
    pub client_certificates: Option<ClientCertificates>,
    pub service_account: Option<ServiceAccountKey>,
    pub authentication: Authentication,
    /// Who says what is allowed, in this order; `system:masters` may do everything in any case.
    pub authorization: Vec<Mode>,
    pub admission: Chain,
    /// How to reach kubelets for logs, exec and the like.
    pub kubelet: Option<KubeletClient>,
    pub recorder: Arc<Recorder>,
    /// What is recorded of requests; none: nothing.
    pub audit: Option<AuditConfig>,
    pub version: Version,
    /// What tells this server from the others of the cluster; the same after a restart.
    pub instance: String,
    /// Whether the KMS plugins are well; none: there are none to look after.
    pub kms_health: Option<Arc<dyn HealthCheck>>,
    /// Ends watches and the listener.
    pub shutdown: CancellationToken,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("--service-cluster-ip-range: {0}")]
    ServiceCidr(#[from] BadCidr),
    #[error("service-account key: {0}")]
    ServiceAccountKey(#[from] skiff_auth::AuthError),
    #[error("client certificates: {0}")]
    ClientCertificates(#[from] skiff_pki::Error),
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error("the first objects cannot be made: {0}")]
    Bootstrap(Status),
}

/// A running API server. Clones share it.
#[derive(Clone)]
pub struct Server {
    inner: Arc<Inner>,
}

pub struct Inner {
    pub registry: Arc<Registry>,
    pub aggregator: Aggregator,
    pub authorities: Authorities,
    pub chain: Chain,
    pub dynamic: Arc<Dynamic>,
    pub authorizer: Arc<Authorizer>,
    pub authenticator: Authenticator,
    pub impersonations: Impersonations,
    pub issuer: Option<TokenIssuer>,
    pub recorder: Arc<Recorder>,
    pub audit: Option<Arc<Auditor>>,
    pub metrics: Metrics,
    /// Of the components that share this process, by name. Leaf lock.
    component_metrics: Mutex<BTreeMap<&'static str, Arc<skiff_prometheus::Registry>>>,
    pub flow: FlowControl,
    pub watches: Arc<OpenWatches>,
    pub version: Version,
    pub kubelet: Option<KubeletClient>,
    pub anonymous: Arc<UserInfo>,
    /// The OpenAPI documents of the built-in kinds that are served.
    pub documents: &'static OpenApi<'static>,
    pub custom_documents: crate::crd::openapi::Documents,
    pub document_times: crate::content::Times,
    /// `host:port`, as discovery and OpenID show it.
    pub server_address: String,
    pub advertise: Advertise,
    pub instance: String,
    pub own_lease: endpoints::OwnLease,
    /// The authorities of clients and of front proxies. Leaf lock.
    pub published: parking_lot::Mutex<Option<(String, Option<String>)>>,
    pub kms_health: Option<Arc<dyn HealthCheck>>,
    pub ready: AtomicBool,
    pub started: jiff::Timestamp,
    pub shutdown: CancellationToken,
    tls: Arc<rustls::ServerConfig>,
}

impl Inner {
    /// The metrics of a component in this process; without a name, of the API server.
    pub fn component_metrics(&self, name: &str) -> Option<Arc<skiff_prometheus::Registry>> {
        match name {
            "" | "kube-apiserver" => Some(self.metrics.registry.clone()),
            name => self.component_metrics.lock().get(name).cloned(),
        }
    }
}

impl Server {
    /// Opens the store's objects, makes the first ones, and is ready for requests when this returns.
    pub async fn start(config: ServerConfig) -> Result<Server, StartError> {
        let service_cidrs: Result<Vec<Cidr>, BadCidr> = config
            .service_cidr
            .split(',')
            .map(|text| Cidr::parse(text.trim()))
            .collect();
        let registry = Registry::start(RegistryConfig {
            store: config.store,
            service_cidrs: service_cidrs?,
            node_ports: config.node_ports,
            runtime_config: config.runtime_config.clone(),
        })
        .await
        .map_err(StartError::Bootstrap)?;
        let audiences = config
            .service_account
            .as_ref()
            .map(|key| {
                if key.audiences.is_empty() {
                    vec![key.issuer.clone()]
                } else {
                    key.audiences.clone()
                }
            })
            .unwrap_or_default();
        let (mut service_accounts, mut issuer, mut legacy) = (None, None, None);
        if let Some(key) = config.service_account {
            let lookup = Arc::new(rbac_source::UidLookup(registry.clone()));
            let secrets = Arc::new(legacy_tokens::TokenSecrets(registry.clone()));
            legacy = Some(LegacyTokens::new(&key.public_key, secrets, lookup.clone())?);
            service_accounts = Some(TokenVerifier::new(
                &key.public_key,
                key.issuer.clone(),
                audiences.clone(),
                lookup,
            )?);
            issuer = Some(TokenIssuer::new(
                &key.private_key,
                &key.public_key,
                key.issuer,
                audiences.clone(),
            )?);
        }
        let authentication = config.authentication;
        let mut others: Vec<Box<dyn TokenAuthenticator>> = Vec::new();
        if let Some(file) = authentication.token_file {
            others.push(Box::new(file));
        }
        if authentication.bootstrap_tokens {
            others.push(Box::new(BootstrapTokens {
                secrets: Arc::new(bootstrap_secrets::Cached(registry.clone())),
            }));
        }
        if let Some(jwt) = authentication.jwt {
            others.push(Box::new(jwt));
        }
        if let Some(webhook) = authentication.webhook {
            others.push(Box::new(webhook));
        }
        let tokens = Tokens {
            service_accounts,
            legacy,
            others,
            audiences,
        };
        let certificates = config.client_certificates.as_ref();
        let front_proxy = certificates.and_then(|certificates| certificates.front_proxy.as_ref());
        let resources = &registry.resources;
        let serves =
            |group: &str, version: &str, plural: &str| resources.get(group, version, plural).is_some();
        let authorizer = Arc::new(Authorizer::serving(serves));
        authorizer.set_modes(config.authorization);
        let mut chain = config.admission;
        let dynamic = Dynamic::new(registry.clone(), authorizer.clone(), &mut chain);
        let audit = config.audit.map(Auditor::open).transpose()?;
        let metrics = Metrics::new(&config.version.git_version, audit.clone());
        let inner = Arc::new(Inner {
            aggregator: Aggregator::new(front_proxy.map(|proxy| proxy.live.clone())),
            authorities: Authorities::new(certificates)?,
            metrics,
            component_metrics: Mutex::default(),
            chain,
            dynamic,
            authorizer,
            impersonations: Impersonations::default(),
            authenticator: Authenticator {
                tokens,
                request_header: front_proxy.map(|_| RequestHeader {
                    allowed_names: vec![skiff_pki::FRONT_PROXY_CLIENT.to_string()],
                }),
                anonymous: authentication.anonymous,
            },
            issuer,
            recorder: config.recorder,
            audit,
            flow: FlowControl::default(),
            watches: Arc::default(),
            version: config.version,
            kubelet: config.kubelet,
            anonymous: Arc::new(UserInfo::anonymous()),
            document_times: Default::default(),
            documents: skiff_api::facts::openapi_of(&config.runtime_config),
            custom_documents: crate::crd::openapi::Documents::default(),
            advertise: Advertise {
                address: config.advertise_address,
                port: config.advertise_port,
            },
            instance: config.instance,
            own_lease: endpoints::OwnLease::default(),
            published: parking_lot::Mutex::new(certificates.map(|certificates| {
                let proxy = certificates.front_proxy.as_ref();
                (
                    certificates.client_ca.clone(),
                    proxy.map(|proxy| proxy.ca.clone()),
                )
            })),
            server_address: SocketAddr::new(config.advertise_address, config.advertise_port).to_string(),
            kms_health: config.kms_health,
            ready: AtomicBool::new(false),
            started: jiff::Timestamp::now(),
            shutdown: config.shutdown,
            tls: config.tls,
            registry,
        });
        // Concurrently: each write waits for the disk, and the store commits together what waits for it.
        skiff_registry::together(async {
            futures::try_join!(
                inner.registry.bootstrap(inner.advertise),
                rbac_source::ensure(&inner),
                repair::publish(&inner),
                endpoints::publish(&inner),
                flow::ensure(&inner),
                legacy_tokens::start_tracking(&inner.registry),
            )
        })
        .await
        .map_err(StartError::Bootstrap)?;
        rbac_source::start(&inner).await.map_err(StartError::Bootstrap)?;
        crate::crd::start(&inner).await.map_err(StartError::Bootstrap)?;
        node_graph::start(&inner).await.map_err(StartError::Bootstrap)?;
        dynamic::start(&inner).await.map_err(StartError::Bootstrap)?;
        flow::start(&inner).await.map_err(StartError::Bootstrap)?;
        ip_addresses::start(&inner).await.map_err(StartError::Bootstrap)?;
        store_history::start(&inner)
            .await
            .map_err(StartError::Bootstrap)?;
        identity::start(&inner);
        endpoints::start(&inner);
        repair::start(&inner);
        aggregation::start(&inner);
        crate::crd::api_services::remove_unserved(&inner).await;
        inner.ready.store(true, Ordering::Release);
        Ok(Server { inner })
    }

    /// The in-process door: the same chain, without TLS, for a client of known identity. Works as the
    /// transport of `kube::Client::new`.
    pub fn service(&self, user: UserInfo) -> InProcess {
        InProcess::new(self.inner.clone(), Arc::new(user))
    }

    /// Takes this server out of the endpoints of the service `kubernetes`: it is about to stop.
    pub async fn withdraw(&self) -> Result<(), Status> {
        endpoints::withdraw(&self.inner).await
    }

    /// Makes again what every cluster has, as happens every few seconds.
    pub async fn repair(&self) -> Result<(), Status> {
        repair::repair(&self.inner).await?;
        endpoints::publish(&self.inner).await
    }

    /// Compares the allocated cluster IPs and node ports with the services, as happens every few minutes. `now` decides
    /// about IPAddresses whose service may still be on its way.
    pub async fn repair_allocations(&self, now: jiff::Timestamp) -> Result<(), Status> {
        ip_addresses::repair(&self.inner, now).await?;
        repair::repair_node_ports(&self.inner).await
    }

    /// Serves HTTPS on the listener until `shutdown`, then waits a little for open requests.
    pub async fn serve(&self, listener: TcpListener, shutdown: CancellationToken) {
        self.serve_within(listener, Limits::default(), shutdown).await;
    }

    /// The same with other limits.
    pub async fn serve_within(&self, listener: TcpListener, limits: Limits, shutdown: CancellationToken) {
        let (inner, tls) = (self.inner.clone(), self.inner.tls.clone());
        listen::serve(inner, tls, listener, limits, shutdown).await;
        if let Some(audit) = &self.inner.audit {
            audit.flush().await;
        }
    }

    /// Says from now on that client certificates are checked against these certificates of the same authorities. Keys
    /// and names stay, so nothing changes in how they are checked.
    pub async fn publish_authorities(
        &self,
        client: String,
        front_proxy: Option<String>,
    ) -> Result<(), Status> {
        *self.inner.published.lock() = Some((client, front_proxy));
        repair::publish(&self.inner).await
    }

    /// Reads again what is below these prefixes of the store, whose values could not be read before.
    pub fn read_again(&self, prefixes: &[String]) {
        self.inner.registry.restart_caches(prefixes);
    }

    /// Who is asked what is allowed, from now on.
    pub fn change_authorization(&self, modes: Vec<Mode>) -> Result<(), skiff_auth::BadConfiguration> {
        self.inner.authorizer.change_modes(modes)
    }

    /// Serves a group version by another API server of this process, unless its APIService names a service. Requests
    /// pass the whole chain before they get there.
    pub async fn serve_locally(&self, group: &str, version: &str, api: LocalApi) -> Result<(), Status> {
        aggregation::serve_locally(&self.inner, group, version, api).await
    }

    /// Shows the metrics of a component in this process at `/metrics?component=NAME`.
    pub fn show_metrics(&self, component: &'static str, metrics: Arc<skiff_prometheus::Registry>) {
        self.inner.component_metrics.lock().insert(component, metrics);
    }

    pub fn ready(&self) -> bool {
        self.inner.ready.load(Ordering::Acquire) && !self.inner.shutdown.is_cancelled()
    }

    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.inner.recorder
    }
}
