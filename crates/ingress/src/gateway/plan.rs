//! From all objects of Gateway API to a table, the ports that it needs, and what each object is told. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use skiff_client::Key;

use super::certificates::ConfigCache;
use super::listeners::{ListenerPlanner, PlannedListener, Ports};
use super::objects::{Gateway, GatewayClass, GrpcRoute, HttpRoute, ReferenceGrant, TlsRoute};
use super::routes::{Attached, RouteView};
use super::rules::RuleCompiler;
use super::status::{Condition, GatewayAddresses, ListenerStatus, Told};
use super::table::{GatewayTable, ListenAddress};
use super::{CONTROLLER, routes};
use crate::backend::Backends;
use crate::compile::{CertificateCache, Objects};
use crate::endpoints::AddressPolicy;

/// All objects at one time.
#[derive(Clone, Default)]
pub struct Snapshot {
    pub classes: Vec<Arc<GatewayClass>>,
    pub gateways: Vec<Arc<Gateway>>,
    pub http: Vec<Arc<HttpRoute>>,
    pub grpc: Vec<Arc<GrpcRoute>>,
    pub tls: Vec<Arc<TlsRoute>>,
    pub grants: Vec<Arc<ReferenceGrant>>,
    /// The labels of namespaces.
    pub namespaces: HashMap<String, BTreeMap<String, String>>,
    /// Whether the definitions are of a release that is known.
    pub is_known_version: bool,
}

/// An object by its resource.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    pub resource: &'static str,
    pub key: Key,
}

/// What an object is told, and what it says now.
#[derive(Clone, Debug)]
pub struct Report {
    pub id: ObjectId,
    pub told: Told,
    pub meta: ObjectMeta,
    pub status: Option<Value>,
}

#[derive(Clone, Default)]
pub struct Planned {
    pub table: GatewayTable,
    /// Ports of the machine.
    pub ports: BTreeSet<u16>,
    pub reports: Vec<Report>,
}

/// One run.
pub struct Planner<'a> {
    pub objects: &'a dyn Objects,
    pub snapshot: &'a Snapshot,
    pub policy: &'a AddressPolicy,
    pub ports: &'a Ports,
    /// Addresses that are given to one Gateway each.
    pub pool: &'a [IpAddr],
    pub backends: &'a mut Backends,
    pub certificates: &'a mut CertificateCache,
    pub configs: &'a mut ConfigCache,
    pub now: Instant,
}

/// A Gateway that is served here.
pub struct PlannedGateway<'a> {
    pub gateway: &'a Gateway,
    pub key: Key,
    pub address: GatewayAddresses,
    /// Why the whole Gateway is not served.
    pub refused: Option<Condition>,
    /// Why it has no address.
    pub no_address: Option<Condition>,
    pub listeners: Vec<PlannedListener<'a>>,
}

impl PlannedGateway<'_> {
    pub fn socket(&self, port: u16) -> ListenAddress {
        let address = match &self.address {
            GatewayAddresses::Own(address) => Some(*address),
            _ => None,
        };
        ListenAddress { address, port }
    }

    pub fn is_served(&self) -> bool {
        self.refused.is_none() && self.no_address.is_none()
    }
}

/// Older objects first, then by name.
pub fn age(meta: &ObjectMeta) -> (Option<jiff::Timestamp>, String) {
    let created = meta.creation_timestamp.as_ref().map(|time| time.0);
    let name = meta.name.as_deref().unwrap_or_default();
    let name = format!("{}/{name}", meta.namespace.as_deref().unwrap_or_default());
    (created, name)
}

fn key_of(meta: &ObjectMeta) -> Key {
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    Key::new(namespace, meta.name.as_deref().unwrap_or_default())
}

impl Planner<'_> {
    pub fn run(self) -> Planned {
        let mut planned = Planned::default();
        let snapshot = self.snapshot;
        let ours = classes(snapshot, &mut planned.reports);
        let mut gateways: Vec<&Gateway> = snapshot.gateways.iter().map(Arc::as_ref).collect();
        gateways.retain(|gateway| ours.contains(&gateway.spec.gateway_class_name.as_str()));
        gateways.sort_by_cached_key(|gateway| age(&gateway.metadata));
        let addresses = assign(&gateways, self.pool, &self.policy.nodes.iter().copied().collect());
        let mut listeners = ListenerPlanner {
            objects: self.objects,
            grants: &snapshot.grants,
            ports: self.ports,
            certificates: self.certificates,
            configs: self.configs,
            taken: HashMap::new(),
            open: BTreeSet::new(),
        };
        let mut gateways: Vec<PlannedGateway<'_>> = gateways
            .into_iter()
            .zip(addresses)
            .map(|(gateway, address)| {
                let (address, no_address) = match address {
                    Ok(address) => (address, None),
                    Err(why) => (GatewayAddresses::None, Some(why)),
                };
                let mut made = PlannedGateway {
                    gateway,
                    key: key_of(&gateway.metadata),
                    address,
                    refused: refusal(gateway),
                    no_address,
                    listeners: Vec::new(),
                };
                let found = listeners.plan(gateway, made.is_served(), |port| made.socket(port));
                made.listeners = found;
                made
            })
            .collect();
        planned.ports = listeners.open;
        for gateway in &gateways {
            if let GatewayAddresses::Own(address) = gateway.address {
                planned.table.add_address(address);
            }
            routes::open(gateway, &mut planned.table);
        }
        let mut compiler = RuleCompiler {
            objects: self.objects,
            grants: &snapshot.grants,
            policy: self.policy,
            backends: self.backends,
            now: self.now,
        };
        let views = snapshot.http.iter().map(|route| RouteView::http(route));
        let views = views.chain(snapshot.grpc.iter().map(|route| RouteView::grpc(route)));
        let views = views.chain(snapshot.tls.iter().map(|route| RouteView::tls(route)));
        // The oldest TLSRoute of a host has it.
        let mut views: Vec<RouteView<'_>> = views.collect();
        views.sort_by_cached_key(|view| age(view.meta));
        for view in views {
            let attached: Vec<Attached> =
                routes::attach(&view, &mut gateways, snapshot, &mut compiler, &mut planned.table);
            let has_ours = view.status.as_ref().is_some_and(|status| {
                let mut parents = status["parents"].as_array().into_iter().flatten();
                parents.any(|parent| parent["controllerName"] == CONTROLLER)
            });
            if attached.is_empty() && !has_ours {
                continue;
            }
            let parents = attached
                .into_iter()
                .map(|attached| (attached.parent, attached.conditions));
            planned.reports.push(Report {
                id: ObjectId {
                    resource: view.resource,
                    key: key_of(view.meta),
                },
                told: Told::Route(parents.collect()),
                meta: view.meta.clone(),
                status: view.status.clone(),
            });
        }
        planned.table.sort();
        planned.reports.extend(gateways.iter().map(report));
        planned
    }
}

/// The names of the classes that are ours and accepted.
fn classes<'a>(snapshot: &'a Snapshot, reports: &mut Vec<Report>) -> Vec<&'a str> {
    let mut names = Vec::new();
    let ours = snapshot
        .classes
        .iter()
        .filter(|class| class.spec.controller_name == CONTROLLER);
    for class in ours {
        let accepted = match class.spec.parameters_ref {
            None => Condition::yes("Accepted", "Accepted"),
            Some(_) => Condition::no(
                "Accepted",
                "InvalidParameters",
                "this controller takes no parameters",
            ),
        };
        if accepted.status {
            names.extend(class.metadata.name.as_deref());
        }
        let version = match snapshot.is_known_version {
            true => Condition::yes("SupportedVersion", "SupportedVersion"),
            false => Condition::no(
                "SupportedVersion",
                "UnsupportedVersion",
                "the definitions are not of a release v1 of Gateway API's standard channel; what is known of them is served",
            ),
        };
        reports.push(Report {
            id: ObjectId {
                resource: "gatewayclasses",
                key: key_of(&class.metadata),
            },
            told: Told::Class(vec![accepted, version]),
            meta: class.metadata.clone(),
            status: class.status.clone(),
        });
    }
    names
}

/// Why a Gateway cannot be served at all.
fn refusal(gateway: &Gateway) -> Option<Condition> {
    let spec = &gateway.spec;
    let parameters = spec
        .infrastructure
        .as_ref()
        .and_then(|each| each.parameters_ref.as_ref());
    if parameters.is_some() {
        let message = "this controller takes no parameters (spec.infrastructure.parametersRef)";
        return Some(Condition::no("Accepted", "InvalidParameters", message));
    }
    if spec.tls.as_ref().is_some_and(|tls| tls.backend.is_some()) {
        let message = "TLS to backends (spec.tls.backend) is not supported";
        return Some(Condition::no("Accepted", "Invalid", message));
    }
    let is_address = |type_: Option<&str>| type_.is_none_or(|type_| type_ == "IPAddress");
    if spec.addresses.len() > 1
        || !spec
            .addresses
            .iter()
            .all(|each| is_address(each.type_.as_deref()))
    {
        let message = "a Gateway has one address, of type IPAddress";
        return Some(Condition::no("Accepted", "UnsupportedAddress", message));
    }
    None
}

/// The addresses of the Gateways: those that they ask for, those that they have, then what is left of the pool; and
/// those of the nodes when nothing is left.
fn assign(
    gateways: &[&Gateway],
    pool: &[IpAddr],
    nodes: &BTreeSet<IpAddr>,
) -> Vec<Result<GatewayAddresses, Condition>> {
    let mut free: Vec<IpAddr> = pool.to_vec();
    let mut take = |address: IpAddr| {
        let at = free.iter().position(|each| *each == address)?;
        Some(free.remove(at))
    };
    let mut found: Vec<Option<Result<GatewayAddresses, Condition>>> = Vec::new();
    for gateway in gateways {
        let asked = gateway.spec.addresses.first();
        let asked = asked
            .and_then(|each| each.value.as_deref())
            .filter(|value| !value.is_empty());
        let unusable = |message: String| Err(Condition::no("Programmed", "AddressNotUsable", message));
        found.push(asked.map(|value| match value.parse::<IpAddr>() {
            Ok(address) if pool.contains(&address) => match take(address) {
                Some(address) => Ok(GatewayAddresses::Own(address)),
                None => unusable(format!("the address {address} is an older Gateway's")),
            },
            Ok(address) if nodes.contains(&address) => Ok(GatewayAddresses::Shared),
            _ => unusable(format!(
                "{value} is neither an address of a node nor of --gateway-addresses"
            )),
        }));
    }
    for (gateway, found) in gateways.iter().zip(&mut found) {
        let shown = gateway
            .status
            .as_ref()
            .map(|status| &status["addresses"][0]["value"]);
        let shown = shown.and_then(Value::as_str).and_then(|text| text.parse().ok());
        if found.is_none() {
            *found = shown
                .and_then(&mut take)
                .map(|address| Ok(GatewayAddresses::Own(address)));
        }
    }
    let mut left = free.into_iter();
    found
        .into_iter()
        .map(|found| {
            found.unwrap_or_else(|| {
                Ok(left
                    .next()
                    .map_or(GatewayAddresses::Shared, GatewayAddresses::Own))
            })
        })
        .collect()
}

/// What a Gateway is told.
fn report(gateway: &PlannedGateway<'_>) -> Report {
    let served = gateway.is_served();
    let listeners: Vec<ListenerStatus> = gateway
        .listeners
        .iter()
        .map(|listener| listener_status(listener, served))
        .collect();
    let valid = gateway
        .listeners
        .iter()
        .filter(|listener| listener.is_valid())
        .count();
    let all = gateway.listeners.len();
    let programmed = gateway.listeners.iter().any(PlannedListener::is_programmed);
    let accepted = match &gateway.refused {
        Some(refused) => refused.clone(),
        None if valid == all => Condition::yes("Accepted", "Accepted"),
        None => Condition {
            type_: "Accepted",
            status: valid > 0,
            reason: "ListenersNotValid",
            message: format!("{} of {all} listeners are not valid", all - valid),
        },
    };
    let programmed = match (&gateway.no_address, &gateway.refused) {
        (Some(why), _) => why.clone(),
        (None, None) if programmed => Condition::yes("Programmed", "Programmed"),
        _ => Condition::no("Programmed", "Invalid", "no listener can be served"),
    };
    let unresolved = gateway
        .listeners
        .iter()
        .any(|listener| listener.unresolved.is_some());
    let resolved = match unresolved {
        false => Condition::yes("ResolvedRefs", "ResolvedRefs"),
        true => Condition::no(
            "ResolvedRefs",
            "ListenersNotResolved",
            "a listener has references that cannot be resolved",
        ),
    };
    Report {
        id: ObjectId {
            resource: "gateways",
            key: gateway.key.clone(),
        },
        told: Told::Gateway {
            conditions: vec![accepted, programmed, resolved],
            listeners,
            address: gateway.address.clone(),
        },
        meta: gateway.gateway.metadata.clone(),
        status: gateway.gateway.status.clone(),
    }
}

fn listener_status(listener: &PlannedListener<'_>, is_served: bool) -> ListenerStatus {
    let conflict = listener.conflict.as_ref();
    let mut conditions = vec![
        Condition::of("Accepted", "Accepted", listener.refused.as_ref().or(conflict)),
        Condition::of("ResolvedRefs", "ResolvedRefs", listener.unresolved.as_ref()),
        match listener.is_programmed() && is_served {
            true => Condition::yes("Programmed", "Programmed"),
            false => Condition::no("Programmed", "Invalid", "the listener is not served"),
        },
        match conflict {
            None => Condition::no("Conflicted", "NoConflicts", ""),
            Some(why) => Condition {
                type_: "Conflicted",
                status: true,
                reason: why.reason,
                message: why.message.clone(),
            },
        },
    ];
    if listener.overlaps {
        conditions.push(Condition {
            type_: "OverlappingTLSConfig",
            status: true,
            reason: "OverlappingHostnames",
            message: "another listener of this port has a hostname that overlaps".to_owned(),
        });
    }
    ListenerStatus {
        name: listener.spec.name.clone(),
        supported_kinds: listener.supported_kinds(),
        attached: listener.attached,
        conditions,
    }
}
