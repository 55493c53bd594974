//! The listeners of a Gateway: which are valid, which routes they take, and which certificate they show.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use rustls::ServerConfig;
use serde_json::{Value, json};
use skiff_client::Key;
use skiff_meta::selector::LabelSelector;

use super::GROUP;
use super::certificates::ConfigCache;
use super::hosts::Host;
use super::objects::{Gateway, Listener, ObjectRef, ReferenceGrant};
use super::rules::is_granted;
use super::table::ListenAddress;
use crate::compile::{CertificateCache, Objects, Problem};

/// Ports that all Gateways together may open.
pub const MAX_PORTS: usize = 64;
/// The ports of listeners that are the proxy's own, wherever these are.
const HTTP: u16 = 80;
const HTTPS: u16 = 443;

/// What a listener does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    Http,
    Https,
    /// TLSRoutes, with TLS ended here.
    TlsTerminate,
    TlsPassthrough,
}

/// A listener and what was found out about it.
#[derive(Debug)]
pub struct PlannedListener<'a> {
    pub spec: &'a Listener,
    pub host: Host,
    pub kind: Option<ListenerKind>,
    /// Kinds of routes that it takes.
    pub routes: Vec<&'static str>,
    pub refused: Option<Problem>,
    pub unresolved: Option<Problem>,
    pub conflict: Option<Problem>,
    pub overlaps: bool,
    pub config: Option<Arc<ServerConfig>>,
    pub attached: usize,
}

impl PlannedListener<'_> {
    pub fn is_valid(&self) -> bool {
        self.refused.is_none() && self.conflict.is_none()
    }

    /// Whether connections are served.
    pub fn is_programmed(&self) -> bool {
        let needs_certificate = matches!(self.kind, Some(ListenerKind::Https | ListenerKind::TlsTerminate));
        self.is_valid() && (!needs_certificate || self.config.is_some())
    }

    pub fn supported_kinds(&self) -> Value {
        let kinds = self.routes.iter();
        kinds.map(|kind| json!({"group": GROUP, "kind": kind})).collect()
    }
}

/// Which ports there are to have.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    pub http: Option<u16>,
    pub https: Option<u16>,
    /// The cluster's own.
    pub reserved: BTreeSet<u16>,
    /// Ports that could not be opened, and why.
    pub failed: BTreeMap<u16, String>,
}

impl Ports {
    /// The port of the machine for a listener's.
    pub fn actual(&self, port: u16) -> Result<u16, String> {
        let own = |port: Option<u16>, flag: &str| {
            port.ok_or_else(|| format!("port {flag} of the ingress proxy is off in this cluster"))
        };
        match port {
            HTTP => own(self.http, "80 (--ingress-http-port)"),
            HTTPS => own(self.https, "443 (--ingress-https-port)"),
            port if [self.http, self.https].contains(&Some(port)) => Err(format!(
                "port {port} is the ingress proxy's: listeners on 80 and 443 use it"
            )),
            port => Ok(port),
        }
    }

    /// The port of a listener for one of the machine.
    pub fn logical(&self, actual: u16) -> u16 {
        match Some(actual) {
            port if port == self.http => HTTP,
            port if port == self.https => HTTPS,
            _ => actual,
        }
    }
}

/// What listeners of all Gateways share.
pub struct ListenerPlanner<'a> {
    pub objects: &'a dyn Objects,
    pub grants: &'a [Arc<ReferenceGrant>],
    pub ports: &'a Ports,
    pub certificates: &'a mut CertificateCache,
    pub configs: &'a mut ConfigCache,
    /// The hosts of sockets that older listeners have.
    pub taken: HashMap<(ListenAddress, bool, Host), ListenerKind>,
    /// The machine's ports that are open.
    pub open: BTreeSet<u16>,
}

fn problem(reason: &'static str, message: impl Into<String>) -> Problem {
    Problem {
        reason,
        message: message.into(),
    }
}

impl ListenerPlanner<'_> {
    /// `is_served`: the Gateway takes ports.
    pub fn plan<'g>(
        &mut self,
        gateway: &'g Gateway,
        is_served: bool,
        socket: impl Fn(u16) -> ListenAddress,
    ) -> Vec<PlannedListener<'g>> {
        let mut planned: Vec<PlannedListener<'g>> = gateway
            .spec
            .listeners
            .iter()
            .map(|listener| self.one(gateway, listener))
            .collect();
        find_conflicts(&mut planned);
        for listener in planned
            .iter_mut()
            .filter(|listener| is_served && listener.is_valid())
        {
            self.take(listener, &socket);
        }
        // What another program has is tried again and again.
        let wanted = gateway.spec.listeners.iter().filter(|_| is_served);
        let failed = wanted.filter_map(|listener| self.ports.actual(listener.port).ok());
        let failed = failed.filter(|port| self.ports.failed.contains_key(port));
        self.open.extend(failed.take(MAX_PORTS));
        planned
    }

    fn one<'g>(&mut self, gateway: &'g Gateway, spec: &'g Listener) -> PlannedListener<'g> {
        let mode = spec.tls.as_ref().and_then(|tls| tls.mode.as_deref());
        let kind = match (spec.protocol.as_str(), mode) {
            ("HTTP", _) => Some(ListenerKind::Http),
            ("HTTPS", None | Some("Terminate")) => Some(ListenerKind::Https),
            ("TLS", Some("Passthrough")) => Some(ListenerKind::TlsPassthrough),
            ("TLS", None | Some("Terminate")) => Some(ListenerKind::TlsTerminate),
            _ => None,
        };
        let mut listener = PlannedListener {
            spec,
            host: Host::parse(spec.hostname.as_deref()),
            kind,
            routes: Vec::new(),
            refused: None,
            unresolved: None,
            conflict: None,
            overlaps: false,
            config: None,
            attached: 0,
        };
        let Some(kind) = kind else {
            let message = format!("the protocol {} is not supported", spec.protocol);
            listener.refused = Some(problem("UnsupportedProtocol", message));
            return listener;
        };
        (listener.routes, listener.unresolved) = route_kinds(spec, kind);
        if matches!(kind, ListenerKind::Https | ListenerKind::TlsTerminate) {
            match self.config(gateway, spec, kind) {
                Ok(config) => listener.config = Some(config),
                Err(why) => listener.unresolved = Some(why),
            }
        }
        listener.refused = self.refusal(gateway, spec, kind);
        listener
    }

    fn refusal(&self, gateway: &Gateway, spec: &Listener, kind: ListenerKind) -> Option<Problem> {
        let frontend = gateway.spec.tls.as_ref().and_then(|tls| tls.frontend.as_ref());
        if kind == ListenerKind::Https && frontend.is_some_and(|frontend| validates(frontend, spec.port)) {
            let message = "the validation of clients' certificates (spec.tls.frontend) is not supported";
            return Some(problem("UnsupportedValue", message));
        }
        let options = spec.tls.iter().flat_map(|tls| tls.options.keys());
        if let Some(option) = options.into_iter().next() {
            let message = format!("the TLS option {option} is not supported");
            return Some(problem("UnsupportedValue", message));
        }
        let unavailable = |message: String| Some(problem("PortUnavailable", message));
        let actual = match self.ports.actual(spec.port) {
            Ok(actual) => actual,
            Err(message) => return unavailable(message),
        };
        if self.ports.reserved.contains(&actual) {
            return unavailable(format!("port {actual} is the cluster's own"));
        }
        if let Some(why) = self.ports.failed.get(&actual) {
            return unavailable(why.clone());
        }
        None
    }

    /// Takes port and host, unless an older Gateway on the same address has them for something else.
    fn take(&mut self, listener: &mut PlannedListener<'_>, socket: &impl Fn(u16) -> ListenAddress) {
        let (Some(kind), Ok(actual)) = (listener.kind, self.ports.actual(listener.spec.port)) else {
            return;
        };
        // Connections with TLS are told from those without by their first byte.
        let key = (
            socket(listener.spec.port),
            kind != ListenerKind::Http,
            listener.host.clone(),
        );
        if !self.open.contains(&actual) && self.open.len() >= MAX_PORTS {
            let message = format!("all Gateways together may open {MAX_PORTS} ports");
            listener.refused = Some(problem("PortUnavailable", message));
            return;
        }
        let owner = *self.taken.entry(key).or_insert(kind);
        if owner == kind {
            self.open.insert(actual);
        } else {
            let message =
                "a listener of an older Gateway on the same address has the hostname for another protocol";
            listener.conflict = Some(problem("ProtocolConflict", message));
        }
    }

    /// The first certificate that can be used.
    fn config(
        &mut self,
        gateway: &Gateway,
        spec: &Listener,
        kind: ListenerKind,
    ) -> Result<Arc<ServerConfig>, Problem> {
        let references = spec.tls.iter().flat_map(|tls| &tls.certificate_refs);
        let mut found = Err(problem("InvalidCertificateRef", "there is no certificateRef"));
        let mut first_problem = None;
        for reference in references {
            match self.certificate(gateway, reference, kind) {
                Ok(config) if found.is_err() => found = Ok(config),
                Ok(_) => {}
                Err(why) => {
                    first_problem.get_or_insert(why);
                }
            }
        }
        match (found, first_problem) {
            (Err(_), Some(why)) => Err(why),
            (found, _) => found,
        }
    }

    fn certificate(
        &mut self,
        gateway: &Gateway,
        reference: &ObjectRef,
        kind: ListenerKind,
    ) -> Result<Arc<ServerConfig>, Problem> {
        let invalid = |message: String| problem("InvalidCertificateRef", message);
        let own = gateway.metadata.namespace.as_deref().unwrap_or_default();
        let namespace = reference.namespace.as_deref().unwrap_or(own);
        let name = reference.name.as_str();
        let is_secret = reference.group.as_deref().unwrap_or_default().is_empty()
            && reference.kind.as_deref().unwrap_or("Secret") == "Secret";
        if !is_secret {
            return Err(invalid(format!("certificate {name} is not a Secret")));
        }
        if namespace != own && !is_granted(self.grants, ("Gateway", own), "Secret", (namespace, name)) {
            let message =
                format!("no ReferenceGrant of namespace {namespace} permits the reference to Secret {name}");
            return Err(problem("RefNotPermitted", message));
        }
        let Some(secret) = self.objects.secret(namespace, name) else {
            return Err(invalid(format!(
                "there is no Secret {namespace}/{name} of type kubernetes.io/tls"
            )));
        };
        let key = Key::new(namespace, name);
        let read = self.certificates.read(key.clone(), &secret);
        let certificate =
            read.map_err(|why| invalid(format!("Secret {namespace}/{name} cannot be used: {why}")))?;
        let config = self.configs.get(key, &certificate, kind == ListenerKind::Https);
        config.map_err(|error| invalid(format!("Secret {namespace}/{name} cannot be used: {error}")))
    }
}

/// Whether clients of a port must show certificates.
fn validates(frontend: &Value, port: u16) -> bool {
    let per_port = frontend["perPort"].as_array().into_iter().flatten();
    let mut of_port = per_port.filter(|each| each["port"] == port);
    match of_port.next() {
        Some(each) => !each["tls"]["validation"].is_null(),
        None => !frontend["default"]["validation"].is_null(),
    }
}

/// The kinds of routes that a listener takes, and whether it asks for others.
fn route_kinds(spec: &Listener, kind: ListenerKind) -> (Vec<&'static str>, Option<Problem>) {
    let possible: &[&'static str] = match kind {
        ListenerKind::Http | ListenerKind::Https => &["HTTPRoute", "GRPCRoute"],
        ListenerKind::TlsTerminate | ListenerKind::TlsPassthrough => &["TLSRoute"],
    };
    let asked = spec
        .allowed_routes
        .as_ref()
        .map(|allowed| allowed.kinds.as_slice());
    let Some(asked) = asked.filter(|asked| !asked.is_empty()) else {
        return (possible.to_vec(), None);
    };
    let (mut kinds, mut wrong) = (Vec::new(), None);
    for each in asked {
        let known = possible.iter().find(|kind| **kind == each.kind);
        match known.filter(|_| each.group.as_deref().unwrap_or(GROUP) == GROUP) {
            Some(kind) if !kinds.contains(kind) => kinds.push(*kind),
            Some(_) => {}
            None => {
                let message = format!("routes of kind {} cannot be attached to this listener", each.kind);
                wrong.get_or_insert(problem("InvalidRouteKinds", message));
            }
        }
    }
    (kinds, wrong)
}

/// Conflicts between the listeners of one Gateway: all that conflict are told so.
fn find_conflicts(listeners: &mut [PlannedListener<'_>]) {
    let plain = |listener: &PlannedListener<'_>| listener.kind == Some(ListenerKind::Http);
    for at in 0..listeners.len() {
        let this = &listeners[at];
        if this.kind.is_none() {
            continue;
        }
        let mut others = listeners
            .iter()
            .enumerate()
            .filter(|(other, listener)| {
                *other != at && listener.kind.is_some() && listener.spec.port == this.spec.port
            })
            .map(|(_, listener)| listener);
        let conflict = others.clone().find_map(|other| {
            if plain(other) != plain(this) {
                let message = format!(
                    "listener {} has another protocol on the same port",
                    other.spec.name
                );
                return Some(problem("ProtocolConflict", message));
            }
            (other.host == this.host).then(|| {
                let message = format!(
                    "listener {} has the same hostname on the same port",
                    other.spec.name
                );
                problem("HostnameConflict", message)
            })
        });
        let is_https = |listener: &PlannedListener<'_>| listener.kind == Some(ListenerKind::Https);
        let overlaps = is_https(this)
            && others.any(|other| is_https(other) && other.host.intersect(&this.host).is_some());
        listeners[at].conflict = conflict;
        listeners[at].overlaps = overlaps;
    }
}

/// Whether routes of a namespace may attach.
pub fn allows_namespace(
    spec: &Listener,
    own: &str,
    namespace: &str,
    labels: &BTreeMap<String, String>,
) -> bool {
    let namespaces = spec
        .allowed_routes
        .as_ref()
        .and_then(|allowed| allowed.namespaces.as_ref());
    let from = namespaces.and_then(|namespaces| namespaces.from.as_deref());
    match from.unwrap_or("Same") {
        "All" => true,
        "Same" => own == namespace,
        "Selector" => namespaces
            .and_then(|namespaces| LabelSelector::from_value(namespaces.selector.as_ref()?).ok())
            .is_some_and(|selector| selector.matches(|key| labels.get(key).map(String::as_str))),
        _ => false,
    }
}
