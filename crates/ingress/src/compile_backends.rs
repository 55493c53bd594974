//! The compiler's part that finds the backends which Ingresses name, and how their endpoints are spoken to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressBackend, IngressServiceBackend, ServiceBackendPort};

use crate::backend::{Backend, BackendKey, Backends, Protocol, Transport};
use crate::compile::{Compiler, Problem};
use crate::endpoints::{self, AddressPolicy};
use crate::features::Annotations;
use crate::features::backend_tls::TlsSpec;
use crate::features::external::{ExternalSpec, ServiceAddress};

/// Of a Service: whose Ingresses may ask it about their clients, beside those of its own namespace.
const AUTH_ANNOTATION: &str = "ingress.skiff.io/allow-auth-from";

impl Compiler<'_> {
    /// The Service that is asked about clients. One of another namespace must allow it.
    pub fn auth_backend(
        &mut self,
        ingress: &Ingress,
        spec: &ExternalSpec,
        problems: &mut Vec<Problem>,
    ) -> Result<Arc<Backend>, Problem> {
        let ServiceAddress {
            namespace,
            service,
            port,
            tls,
        } = &spec.service;
        let own = ingress.metadata.namespace.as_deref().unwrap_or_default();
        if own != namespace {
            let found = self.objects.service(namespace, service);
            let annotations = found
                .as_ref()
                .and_then(|found| found.metadata.annotations.as_ref());
            let allowed = annotations.and_then(|all| all.get(AUTH_ANNOTATION));
            let is_allowed = |list: &String| list.split(',').any(|each| [own, "*"].contains(&each.trim()));
            if !allowed.is_some_and(is_allowed) {
                return Err(Problem {
                    reason: "BadAuthService",
                    message: format!(
                        "Service {service} of namespace {namespace} does not allow it: its annotation {AUTH_ANNOTATION} must list the namespace {own}, or *"
                    ),
                });
            }
        }
        let named = IngressServiceBackend {
            name: service.clone(),
            port: Some(ServiceBackendPort {
                number: Some(i32::from(*port)),
                name: None,
            }),
        };
        let speech = (Some((Protocol::Http1, *tls)), &TlsSpec::of_address());
        self.find_backend(namespace, &named, speech, problems)
    }

    /// The backend that a route names; `None`, with a problem, if it cannot be one.
    pub fn backend(
        &mut self,
        ingress: &Ingress,
        backend: &IngressBackend,
        asked: &Annotations,
        problems: &mut Vec<Problem>,
    ) -> Option<Arc<Backend>> {
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let found = match &backend.service {
            Some(named) => self.find_backend(namespace, named, (asked.protocol, &asked.tls), problems),
            None => Err(Problem {
                reason: "UnsupportedBackend",
                message: "a backend that is not a Service is not supported".to_owned(),
            }),
        };
        found.map_err(|problem| problems.push(problem)).ok()
    }

    /// `protocol` and whether it is in TLS, if something else than the Service decides it.
    fn find_backend(
        &mut self,
        namespace: &str,
        named: &IngressServiceBackend,
        (protocol, tls): (Option<(Protocol, bool)>, &TlsSpec),
        problems: &mut Vec<Problem>,
    ) -> Result<Arc<Backend>, Problem> {
        let problem = |reason: &'static str, message: String| Problem { reason, message };
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
        let (protocol, has_tls) = protocol.unwrap_or(match port.app_protocol.as_deref() {
            Some("kubernetes.io/h2c" | "h2c" | "grpc") => (Protocol::Http2, false),
            Some("https" | "HTTPS" | "kubernetes.io/wss") => (Protocol::Http1, true),
            Some("grpcs") => (Protocol::Http2, true),
            _ => (Protocol::Http1, false),
        });
        let mut transport = Transport::from(protocol);
        if has_tls {
            let tls = self.features.tls(self.objects, namespace, name, tls, protocol);
            transport.tls = Some(tls.map_err(|why| problem("BadBackendTLS", why))?);
        }
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
        Ok(self.backends.put(key, transport, &addresses, self.now))
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
        backends.put(backend.key.clone(), backend.transport(), &addresses, now);
    }
}
