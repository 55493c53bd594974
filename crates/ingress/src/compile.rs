//! From objects of the API to a route table and certificates. It reads no clock and writes nothing: whatever cannot be
//! acted on is returned as a problem of its Ingress.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressBackend, IngressClass, ServiceBackendPort};
use rustls::sign::CertifiedKey;
use skiff_client::Key;

use crate::annotations;
use crate::backend::{Backend, BackendKey, Backends, Protocol};
use crate::endpoints::{self, AddressPolicy};
use crate::table::{HostMatch, PathMatch, Route, RouteOptions, RouteTable};
use crate::tls::Certificates;

/// The controller that an IngressClass names.
pub const CONTROLLER: &str = "skiff.io/ingress";
/// How Ingresses named their class before there was a field for it.
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";

/// Where objects are looked up.
pub trait Objects {
    fn ingresses(&self) -> Vec<Arc<Ingress>>;
    fn classes(&self) -> Vec<Arc<IngressClass>>;
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>>;
    /// Of type `kubernetes.io/tls`.
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>>;
}

/// Something of an Ingress that is not acted on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Problem {
    /// Of the event.
    pub reason: &'static str,
    pub message: String,
}

#[derive(Default)]
pub struct Compiled {
    pub table: RouteTable,
    pub certificates: Certificates,
    /// The Ingresses that are served here, with their problems.
    pub ingresses: Vec<(Arc<Ingress>, Vec<Problem>)>,
}

/// Certificates that were read before, by their Secret and its version.
#[derive(Default)]
pub struct CertificateCache(HashMap<Key, CachedCertificate>);

struct CachedCertificate {
    version: String,
    read: Result<Arc<CertifiedKey>, String>,
    used: bool,
}

impl CertificateCache {
    pub fn read(&mut self, key: Key, secret: &Secret) -> Result<Arc<CertifiedKey>, String> {
        let version = secret.metadata.resource_version.clone().unwrap_or_default();
        let cached = self.0.entry(key).or_insert_with(|| CachedCertificate {
            version: version.clone(),
            read: read_certificate(secret),
            used: true,
        });
        if cached.version != version {
            cached.read = read_certificate(secret);
            cached.version = version;
        }
        cached.used = true;
        cached.read.clone()
    }

    /// What nobody read since the last time.
    pub fn forget_unused(&mut self) {
        self.0.retain(|_, cached| std::mem::take(&mut cached.used));
    }
}

fn read_certificate(secret: &Secret) -> Result<Arc<CertifiedKey>, String> {
    let text = |name: &str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name));
        let text = bytes.and_then(|bytes| String::from_utf8(bytes.0.clone()).ok());
        text.ok_or_else(|| format!("it has no {name}"))
    };
    let identity = skiff_pki::Identity {
        certificate: text("tls.crt")?,
        key: text("tls.key")?,
    };
    let certified = skiff_pki::certified(&identity).map_err(|error| error.to_string())?;
    match certified.cert.is_empty() {
        true => Err("tls.crt has no certificate".to_owned()),
        false => Ok(Arc::new(certified)),
    }
}

/// One run of the compiler.
pub struct Compiler<'a> {
    pub objects: &'a dyn Objects,
    pub policy: &'a AddressPolicy,
    pub backends: &'a mut Backends,
    pub cache: &'a mut CertificateCache,
    pub now: Instant,
}

impl Compiler<'_> {
    pub fn run(mut self) -> Compiled {
        let classes = self.objects.classes();
        let ours: Vec<&str> = classes
            .iter()
            .filter(|class| {
                class.spec.as_ref().and_then(|spec| spec.controller.as_deref()) == Some(CONTROLLER)
            })
            .filter_map(|class| class.metadata.name.as_deref())
            .collect();
        let mut ingresses = self.objects.ingresses();
        ingresses.retain(|ingress| class_of(ingress).is_some_and(|class| ours.contains(&class)));
        // Where two want the same, the older one has it.
        ingresses.sort_by_cached_key(|ingress| {
            let meta = &ingress.metadata;
            let created = meta.creation_timestamp.as_ref().map(|time| time.0);
            (created, meta.namespace.clone(), meta.name.clone())
        });
        let mut compiled = Compiled::default();
        let mut problems: Vec<Vec<Problem>> = ingresses
            .iter()
            .map(|ingress| self.certificates(ingress, &mut compiled.certificates))
            .collect();
        for (ingress, problems) in ingresses.iter().zip(&mut problems) {
            self.routes(ingress, &mut compiled, problems);
        }
        for problems in &mut problems {
            problems.sort();
            problems.dedup();
        }
        compiled.ingresses = ingresses.into_iter().zip(problems).collect();
        compiled
    }

    fn certificates(&mut self, ingress: &Ingress, certificates: &mut Certificates) -> Vec<Problem> {
        let mut problems = Vec::new();
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let spec = ingress.spec.as_ref();
        for tls in spec.and_then(|spec| spec.tls.as_ref()).into_iter().flatten() {
            let Some(name) = tls.secret_name.as_deref().filter(|name| !name.is_empty()) else {
                continue;
            };
            let Some(secret) = self.objects.secret(namespace, name) else {
                problems.push(Problem {
                    reason: "CertificateNotFound",
                    message: format!("there is no Secret {name} of type kubernetes.io/tls; clients see the default certificate"),
                });
                continue;
            };
            let certificate = match self.cache.read(Key::new(namespace, name), &secret) {
                Ok(certificate) => certificate,
                Err(why) => {
                    problems.push(Problem {
                        reason: "BadCertificate",
                        message: format!(
                            "Secret {name} is not used: {why}; clients see the default certificate"
                        ),
                    });
                    continue;
                }
            };
            let hosts: Vec<HostMatch> = match tls.hosts.as_deref() {
                Some(hosts) if !hosts.is_empty() => hosts.iter().map(|host| HostMatch::parse(host)).collect(),
                _ => rule_hosts(ingress),
            };
            for host in hosts {
                // A second certificate of one host is no error: several Ingresses of a host name the same Secret.
                certificates.add(host, certificate.clone());
            }
        }
        problems
    }

    fn routes(&mut self, ingress: &Ingress, compiled: &mut Compiled, problems: &mut Vec<Problem>) {
        let Some(spec) = &ingress.spec else { return };
        let options = annotations::read(ingress, problems);
        let rules = spec.rules.as_deref().unwrap_or_default();
        let default = spec.default_backend.as_ref();
        let default = default.map(|backend| self.backend(ingress, backend, &options, problems));
        let route = |path: PathMatch,
                     backend: Option<Arc<Backend>>,
                     host: &HostMatch,
                     certificates: &Certificates| {
            let has_tls = certificates.cover(host);
            Route {
                path,
                backend,
                options: RouteOptions {
                    redirect_to_https: options.force_redirect || (has_tls && options.redirect),
                    max_body: options.max_body,
                    response_timeout: Some(options.read_timeout),
                    ..RouteOptions::default()
                },
            }
        };
        for rule in rules {
            let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
            compiled.table.add_host(host.clone());
            let paths = rule.http.iter().flat_map(|http| &http.paths);
            for path in paths {
                let text = path
                    .path
                    .as_deref()
                    .filter(|text| !text.is_empty())
                    .unwrap_or("/");
                // Without a type of its own, `ImplementationSpecific` is a prefix here.
                let matched = match path.path_type.as_str() {
                    "Exact" => PathMatch::exact(text),
                    _ => PathMatch::prefix(text),
                };
                let backend = self.backend(ingress, &path.backend, &options, problems);
                let route = route(matched, backend, &host, &compiled.certificates);
                if !compiled.table.add(host.clone(), route) {
                    let host = rule.host.as_deref().unwrap_or("*");
                    problems.push(Problem {
                        reason: "RouteTaken",
                        message: format!("an older Ingress has the path {text} of host {host}"),
                    });
                }
            }
        }
        let Some(default) = default else { return };
        for rule in rules {
            let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
            let route = route(
                PathMatch::prefix("/"),
                default.clone(),
                &host,
                &compiled.certificates,
            );
            // If there is a route for `/`, nothing is left for the default backend.
            compiled.table.add(host, route);
        }
        let fallback = route(
            PathMatch::prefix("/"),
            default,
            &HostMatch::Any,
            &compiled.certificates,
        );
        if rules.is_empty() && !compiled.table.set_fallback(fallback) {
            problems.push(Problem {
                reason: "RouteTaken",
                message: "an older Ingress without rules has the default backend".to_owned(),
            });
        }
    }

    /// The backend that a route names; `None`, with a problem, if it cannot be one.
    fn backend(
        &mut self,
        ingress: &Ingress,
        backend: &IngressBackend,
        options: &annotations::Options,
        problems: &mut Vec<Problem>,
    ) -> Option<Arc<Backend>> {
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let found = self.find_backend(namespace, backend, options, problems);
        found.map_err(|problem| problems.push(problem)).ok()
    }

    fn find_backend(
        &mut self,
        namespace: &str,
        backend: &IngressBackend,
        options: &annotations::Options,
        problems: &mut Vec<Problem>,
    ) -> Result<Arc<Backend>, Problem> {
        let problem = |reason: &'static str, message: String| Problem { reason, message };
        let Some(named) = &backend.service else {
            let message = "a backend that is not a Service is not supported".to_owned();
            return Err(problem("UnsupportedBackend", message));
        };
        let name = &named.name;
        let Some(service) = self.objects.service(namespace, name) else {
            return Err(problem("ServiceNotFound", format!("there is no Service {name}")));
        };
        let spec = service.spec.clone().unwrap_or_default();
        if spec.type_.as_deref() == Some("ExternalName") {
            let message = format!("Service {name} is of type ExternalName, which is not a backend here");
            return Err(problem("UnsupportedBackend", message));
        }
        let wanted = named.port.clone().unwrap_or_default();
        let mut ports = spec.ports.unwrap_or_default().into_iter();
        let is_wanted = |port: &k8s_openapi::api::core::v1::ServicePort| match &wanted {
            ServiceBackendPort { name: Some(name), .. } if !name.is_empty() => {
                port.name.as_ref() == Some(name)
            }
            ServiceBackendPort { number, .. } => Some(port.port) == *number,
        };
        let is_tcp = |protocol: Option<&str>| protocol.is_none_or(|protocol| protocol == "TCP");
        let Some(port) = ports.find(|port| is_wanted(port) && is_tcp(port.protocol.as_deref())) else {
            let number = wanted.number.unwrap_or_default();
            let wanted = wanted.name.unwrap_or_else(|| number.to_string());
            let message = format!("Service {name} has no TCP port {wanted}");
            return Err(problem("ServicePortNotFound", message));
        };
        let protocol = match (options.protocol, port.app_protocol.as_deref()) {
            (Some(protocol), _) => protocol,
            (None, Some("kubernetes.io/h2c" | "h2c" | "grpc")) => Protocol::Http2,
            (None, Some(tls @ ("https" | "HTTPS" | "kubernetes.io/wss" | "grpcs"))) => {
                let message = format!(
                    "Service {name} has a port of appProtocol {tls}: TLS to backends is not supported"
                );
                return Err(problem("UnsupportedBackend", message));
            }
            (None, _) => Protocol::Http1,
        };
        let port = port.name.unwrap_or_default();
        let slices = self.objects.slices(namespace, name);
        let (addresses, refused) = endpoints::addresses(&slices, &port, self.policy);
        if let Some(refused) = refused {
            let message = format!(
                "endpoint {refused} of Service {name} is not used: it is an address of the machine or of the cluster itself"
            );
            problems.push(problem("EndpointRefused", message));
        }
        let key = BackendKey {
            namespace: namespace.to_owned(),
            service: name.clone(),
            port,
        };
        Ok(self.backends.put(key, protocol, &addresses, self.now))
    }
}

/// The class that an Ingress names.
fn class_of(ingress: &Ingress) -> Option<&str> {
    let by_field = ingress
        .spec
        .as_ref()
        .and_then(|spec| spec.ingress_class_name.as_deref());
    let annotations = ingress.metadata.annotations.as_ref();
    by_field.or_else(|| annotations?.get(CLASS_ANNOTATION).map(String::as_str))
}

fn rule_hosts(ingress: &Ingress) -> Vec<HostMatch> {
    let rules = ingress.spec.iter().flat_map(|spec| spec.rules.iter().flatten());
    let hosts: Vec<HostMatch> = rules
        .map(|rule| HostMatch::parse(rule.host.as_deref().unwrap_or_default()))
        .collect();
    match hosts.is_empty() {
        true => vec![HostMatch::Any],
        false => hosts,
    }
}

/// Brings the backends of a Service up to date with its EndpointSlices, without a new table.
pub fn refresh(
    backends: &mut Backends,
    namespace: &str,
    service: &str,
    slices: &[Arc<EndpointSlice>],
    policy: &AddressPolicy,
    now: Instant,
) {
    for backend in backends.of_service(namespace, service) {
        let (addresses, _): (Vec<SocketAddr>, _) = endpoints::addresses(slices, &backend.key.port, policy);
        backends.put(backend.key.clone(), backend.protocol, &addresses, now);
    }
}

/// Without an annotation.
pub const READ_TIMEOUT: Duration = Duration::from_secs(60);
