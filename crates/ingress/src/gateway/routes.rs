//! Routes and the listeners that they attach to.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::GROUP;
use super::hosts::{Host, Hosts};
use super::listeners::{ListenerKind, PlannedListener, allows_namespace};
use super::objects::{GrpcRoute, HttpRoute, ParentRef, TlsRoute};
use super::plan::{PlannedGateway, Snapshot, age};
use super::rules::{CompiledRule, RuleCompiler};
use super::status::Condition;
use super::table::{Entry, GatewayTable, HttpRoutes, Rule, SecureListener};
use crate::compile::Problem;

/// A route of any kind.
pub struct RouteView<'a> {
    pub kind: &'static str,
    pub resource: &'static str,
    pub meta: &'a ObjectMeta,
    pub status: &'a Option<Value>,
    parents: &'a [Value],
    hostnames: &'a [String],
    rules: Rules<'a>,
}

enum Rules<'a> {
    Http(&'a HttpRoute),
    Grpc(&'a GrpcRoute),
    Tls(&'a TlsRoute),
}

impl<'a> RouteView<'a> {
    pub fn http(route: &'a HttpRoute) -> RouteView<'a> {
        RouteView {
            kind: "HTTPRoute",
            resource: "httproutes",
            meta: &route.metadata,
            status: &route.status,
            parents: &route.spec.parent_refs,
            hostnames: &route.spec.hostnames,
            rules: Rules::Http(route),
        }
    }

    pub fn grpc(route: &'a GrpcRoute) -> RouteView<'a> {
        RouteView {
            kind: "GRPCRoute",
            resource: "grpcroutes",
            meta: &route.metadata,
            status: &route.status,
            parents: &route.spec.parent_refs,
            hostnames: &route.spec.hostnames,
            rules: Rules::Grpc(route),
        }
    }

    pub fn tls(route: &'a TlsRoute) -> RouteView<'a> {
        RouteView {
            kind: "TLSRoute",
            resource: "tlsroutes",
            meta: &route.metadata,
            status: &route.status,
            parents: &route.spec.parent_refs,
            hostnames: &route.spec.hostnames,
            rules: Rules::Tls(route),
        }
    }

    fn compile(&self, compiler: &mut RuleCompiler<'_>) -> CompiledRoute {
        let namespace = self.meta.namespace.as_deref().unwrap_or_default();
        let rules: Vec<Result<CompiledRule, Problem>> = match self.rules {
            Rules::Http(route) => {
                let rules = route.spec.rules.iter();
                rules.map(|rule| compiler.http(namespace, rule)).collect()
            }
            Rules::Grpc(route) => {
                let rules = route.spec.rules.iter();
                rules.map(|rule| compiler.grpc(namespace, rule)).collect()
            }
            Rules::Tls(route) => {
                let rules = route.spec.rules.iter();
                rules.map(|rule| compiler.tls(namespace, rule)).collect()
            }
        };
        let (created, name) = age(self.meta);
        let mut compiled = CompiledRoute::default();
        let count = rules.len();
        for (number, rule) in rules.into_iter().enumerate() {
            let CompiledRule {
                rule,
                matches,
                unresolved,
            } = match rule {
                Ok(rule) => rule,
                Err(why) => {
                    compiled.dropped.push((number, why));
                    continue;
                }
            };
            if let Some(why) = unresolved {
                compiled.unresolved.get_or_insert(why);
            }
            let rule = Arc::new(rule);
            for (at, matched) in matches.into_iter().enumerate() {
                compiled.entries.push(Entry {
                    matched,
                    age: (created, name.clone(), number, at),
                    rule: rule.clone(),
                });
            }
            compiled.first.get_or_insert(rule);
        }
        compiled.is_void = count > 0 && compiled.dropped.len() == count;
        compiled
    }
}

/// The rules of a route.
#[derive(Default)]
struct CompiledRoute {
    entries: Vec<Entry>,
    /// All that a TLSRoute has.
    first: Option<Arc<Rule>>,
    unresolved: Option<Problem>,
    /// Rules that are left out, by their numbers.
    dropped: Vec<(usize, Problem)>,
    /// All are.
    is_void: bool,
}

/// What a route is told of one of its parents.
pub struct Attached {
    pub parent: Value,
    pub conditions: Vec<Condition>,
}

/// Makes the listeners of a Gateway known to the table, with or without routes.
pub fn open(gateway: &PlannedGateway<'_>, table: &mut GatewayTable) {
    if !gateway.is_served() {
        return;
    }
    for listener in gateway
        .listeners
        .iter()
        .filter(|listener| listener.is_programmed())
    {
        routes_of(gateway, listener, table);
    }
}

enum ListenerRoutes<'t> {
    Http(&'t mut HttpRoutes),
    Tcp(&'t mut Hosts<Arc<Rule>>),
}

/// The place of a listener in the table.
fn routes_of<'t>(
    gateway: &PlannedGateway<'_>,
    listener: &PlannedListener<'_>,
    table: &'t mut GatewayTable,
) -> Option<ListenerRoutes<'t>> {
    let port = table.port_mut(gateway.socket(listener.spec.port));
    let host = listener.host.clone();
    let secure = match (listener.kind?, &listener.config) {
        (ListenerKind::Http, _) => {
            let routes = port.plain.entry(host, HttpRoutes::default);
            return Some(ListenerRoutes::Http(routes));
        }
        (ListenerKind::Https, Some(config)) => SecureListener::Http {
            config: config.clone(),
            routes: HttpRoutes::default(),
        },
        (ListenerKind::TlsTerminate, Some(config)) => SecureListener::Tcp {
            config: Some(config.clone()),
            routes: Hosts::default(),
        },
        (ListenerKind::TlsPassthrough, _) => SecureListener::Tcp {
            config: None,
            routes: Hosts::default(),
        },
        _ => return None,
    };
    Some(match port.secure.entry(host, || secure) {
        SecureListener::Http { routes, .. } => ListenerRoutes::Http(routes),
        SecureListener::Tcp { routes, .. } => ListenerRoutes::Tcp(routes),
    })
}

/// Attaches a route to the listeners of its parents that are ours. Parents of others are not told of.
pub fn attach(
    view: &RouteView<'_>,
    gateways: &mut [PlannedGateway<'_>],
    snapshot: &Snapshot,
    compiler: &mut RuleCompiler<'_>,
    table: &mut GatewayTable,
) -> Vec<Attached> {
    let mut compiled = None;
    let mut attached = Vec::new();
    for parent in view.parents {
        let Ok(reference) = serde_json::from_value::<ParentRef>(parent.clone()) else {
            continue;
        };
        let namespace = view.meta.namespace.as_deref().unwrap_or_default();
        let is_gateway = reference.group.as_deref().unwrap_or(GROUP) == GROUP
            && reference.kind.as_deref().unwrap_or("Gateway") == "Gateway";
        let of = reference.namespace.as_deref().unwrap_or(namespace);
        let mut ours = gateways
            .iter_mut()
            .filter(|gateway| gateway.key.namespace == of && gateway.key.name == reference.name);
        let Some(gateway) = ours.next().filter(|_| is_gateway) else {
            continue;
        };
        let compiled = compiled.get_or_insert_with(|| view.compile(compiler));
        let found = match compiled.is_void {
            true => Err(void(compiled)),
            false => choose(view, &reference, gateway, snapshot),
        };
        let mut conditions = vec![
            match &found {
                Ok(_) => Condition::yes("Accepted", "Accepted"),
                Err(why) => Condition::no("Accepted", why.reason, why.message.clone()),
            },
            Condition::of("ResolvedRefs", "ResolvedRefs", compiled.unresolved.as_ref()),
        ];
        if let Ok(places) = found {
            for (at, hosts) in places {
                gateway.listeners[at].attached += 1;
                let listener = &gateway.listeners[at];
                if gateway.is_served() && listener.is_programmed() {
                    insert(gateway, listener, hosts, compiled, table);
                }
            }
            conditions.extend(partially_invalid(compiled));
        }
        attached.push(Attached {
            parent: parent.clone(),
            conditions,
        });
    }
    attached
}

fn void(compiled: &CompiledRoute) -> Problem {
    let why = compiled.dropped.first();
    Problem {
        reason: "UnsupportedValue",
        message: why.map_or_else(String::new, |(_, why)| why.message.clone()),
    }
}

fn partially_invalid(compiled: &CompiledRoute) -> Option<Condition> {
    let list: Vec<String> = compiled
        .dropped
        .iter()
        .map(|(number, why)| format!("{number} ({})", why.message))
        .collect();
    (!list.is_empty()).then(|| Condition {
        type_: "PartiallyInvalid",
        status: true,
        reason: "UnsupportedValue",
        message: format!("Dropped Rule {}", list.join(", ")),
    })
}

/// The listeners that take the route, and for which hosts.
fn choose(
    view: &RouteView<'_>,
    reference: &ParentRef,
    gateway: &PlannedGateway<'_>,
    snapshot: &Snapshot,
) -> Result<Vec<(usize, Vec<Host>)>, Problem> {
    let refused = |reason: &'static str, message: &str| Problem {
        reason,
        message: message.to_owned(),
    };
    let named: Vec<(usize, &PlannedListener<'_>)> = gateway
        .listeners
        .iter()
        .enumerate()
        .filter(|(_, listener)| {
            let section = reference.section_name.as_deref();
            section.is_none_or(|name| name == listener.spec.name)
                && reference.port.is_none_or(|port| port == listener.spec.port)
        })
        .collect();
    if named.is_empty() {
        let message = "the Gateway has no listener of this sectionName and port";
        return Err(refused("NoMatchingParent", message));
    }
    let namespace = view.meta.namespace.as_deref().unwrap_or_default();
    let none = Default::default();
    let labels = snapshot.namespaces.get(namespace).unwrap_or(&none);
    let mut allowed = named
        .iter()
        .filter(|(_, listener)| {
            listener.routes.contains(&view.kind)
                && allows_namespace(listener.spec, &gateway.key.namespace, namespace, labels)
        })
        .peekable();
    if allowed.peek().is_none() {
        let message = "no listener allows routes of this kind and namespace";
        return Err(refused("NotAllowedByListeners", message));
    }
    let wanted: Vec<Host> = match view.hostnames.is_empty() {
        true => vec![Host::Any],
        false => view
            .hostnames
            .iter()
            .map(|name| Host::parse(Some(name)))
            .collect(),
    };
    let places: Vec<(usize, Vec<Host>)> = allowed
        .filter_map(|(at, listener)| {
            let common = wanted.iter().filter_map(|host| listener.host.intersect(host));
            let mut hosts: Vec<Host> = common.collect();
            hosts.sort();
            hosts.dedup();
            (!hosts.is_empty()).then_some((*at, hosts))
        })
        .collect();
    match places.is_empty() {
        true => Err(refused(
            "NoMatchingListenerHostname",
            "no listener has a hostname of the route",
        )),
        false => Ok(places),
    }
}

fn insert(
    gateway: &PlannedGateway<'_>,
    listener: &PlannedListener<'_>,
    hosts: Vec<Host>,
    compiled: &CompiledRoute,
    table: &mut GatewayTable,
) {
    match routes_of(gateway, listener, table) {
        Some(ListenerRoutes::Http(routes)) => {
            for host in hosts {
                for entry in &compiled.entries {
                    routes.add(host.clone(), entry.clone());
                }
            }
        }
        Some(ListenerRoutes::Tcp(routes)) => {
            let Some(rule) = &compiled.first else { return };
            for host in hosts {
                routes.entry(host, || rule.clone());
            }
        }
        None => {}
    }
}
