//! Ingresses and IngressClasses.

use serde_json::{Value, json};
use skiff_meta::names;

use crate::errors::Errors;
use crate::kind::{AGE, BASE, Kind, NAME, text as column};
use crate::node::{Node, at, list, text};
use crate::object_meta::domain_prefixed_path;
use crate::row::{self, or_none};
use crate::{object_meta, strategy, walk};

/// What named the class before there was a field for it.
const CLASS: &str = "kubernetes.io/ingress.class";

pub static INGRESS: Kind = Kind {
    group: "networking.k8s.io",
    kind: "Ingress",
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        spec(&root.field("spec"), false, &mut errors);
        let class = root.field("spec.ingressClassName");
        let annotation = at(object, "metadata.annotations")
            .get(CLASS)
            .and_then(Value::as_str);
        if let Some(given) = annotation.filter(|given| class.is_set() && *given != class.str()) {
            // COMPAT: upstream's path is without `metadata`.
            let annotations = root.field("annotations");
            errors.invalid_value(
                &annotations.field(CLASS),
                given,
                "must match `ingressClassName` when both are specified",
            );
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        spec(&root.field("spec"), secret_names_are_bad(old), &mut errors);
        errors.into_vec()
    },
    validate_status_update: |new, old| {
        let mut errors = Errors::new();
        load_balancer(&Node::root(new).field("status"), old, &mut errors);
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Class"),
        column("Hosts"),
        column("Address"),
        column("Ports"),
        AGE,
    ],
    row: |object, now| {
        let hosts: Vec<&str> = list(object, "spec.rules")
            .iter()
            .map(|r| text(r, "host"))
            .filter(|h| !h.is_empty())
            .collect();
        let hosts = match &hosts[..] {
            [] => "*".to_owned(),
            [first, second, third, rest @ ..] if !rest.is_empty() => {
                format!("{first},{second},{third} + {} more...", rest.len())
            }
            all => all.join(","),
        };
        let mut addresses: Vec<&str> = list(object, "status.loadBalancer.ingress")
            .iter()
            .map(|i| {
                if text(i, "ip").is_empty() {
                    text(i, "hostname")
                } else {
                    text(i, "ip")
                }
            })
            .filter(|a| !a.is_empty())
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let ports = if list(object, "spec.tls").is_empty() {
            "80"
        } else {
            "80, 443"
        };
        vec![
            row::name(object),
            or_none(text(object, "spec.ingressClassName")),
            json!(hosts),
            json!(addresses.join(",")),
            json!(ports),
            row::age(object, now),
        ]
    },
    has_status: true,
    warnings: |new, old| {
        let annotated = at(new, "metadata.annotations").get(CLASS).is_some();
        if old.is_some() || !annotated || !at(new, "spec.ingressClassName").is_null() {
            return Vec::new();
        }
        vec!["annotation \"kubernetes.io/ingress.class\" is deprecated, please use 'spec.ingressClassName' instead".to_owned()]
    },
    ..BASE
};

fn spec(spec: &Node, any_secret: bool, errors: &mut Errors) {
    let (rules, backend) = (spec.field("rules"), spec.field("defaultBackend"));
    if rules.is_empty() && !backend.is_set() {
        errors.invalid_value(
            spec,
            match rules.value {
                Value::Array(_) => Value::Array(Vec::new()),
                _ => Value::Null,
            },
            "either `defaultBackend` or `rules` must be specified",
        );
    }
    if backend.is_set() {
        self::backend(&backend, errors);
    }
    for rule in rules.items() {
        let host = rule.field("host");
        if !host.is_empty() {
            if crate::net::sloppy_ip(host.str()).is_some() {
                errors.invalid(&host, "must be a DNS name, not an IP address");
            }
            if host.str().contains('*') {
                errors.rule(&host, names::wildcard_dns1123_subdomain(host.str()));
            } else {
                errors.rule(&host, names::dns1123_subdomain(host.str()));
            }
        }
        let http = rule.field("http");
        if http.is_set() {
            paths(&http.field("paths"), errors);
        }
    }
    let tls = spec.field("tls");
    for entry in tls.items() {
        let hosts = entry.field("hosts");
        for host in hosts.items() {
            if host.str().contains('*') {
                errors.rule(&host, names::wildcard_dns1123_subdomain(host.str()));
            } else {
                errors.rule(&host, names::dns1123_subdomain(host.str()));
            }
        }
        let secret = entry.field("secretName");
        if !any_secret && !secret.is_empty() {
            errors.rule(&secret, names::dns1123_subdomain(secret.str()));
        }
    }
    let class = spec.field("ingressClassName");
    if class.is_set() {
        errors.rule(&class, object_meta::dns_subdomain(class.str(), false));
    }
}

fn paths(paths: &Node, errors: &mut Errors) {
    if paths.is_empty() {
        errors.required(paths, "");
    }
    for path in paths.items() {
        let (kind, value) = (path.field("pathType"), path.field("path"));
        if !kind.is_set() {
            errors.required(&kind, "pathType must be specified");
            continue;
        }
        {
            match kind.str() {
                "Exact" | "Prefix" => {
                    if !value.str().starts_with('/') {
                        errors.invalid(&value, "must be an absolute path");
                    }
                    for bad in ["//", "/./", "/../", "%2f", "%2F"] {
                        if value.str().contains(bad) {
                            errors.invalid(&value, format!("must not contain '{bad}'"));
                        }
                    }
                    for bad in ["/..", "/."] {
                        if value.str().ends_with(bad) {
                            errors.invalid(&value, format!("cannot end with '{bad}'"));
                        }
                    }
                }
                "ImplementationSpecific" => {
                    if !value.is_empty() && !value.str().starts_with('/') {
                        errors.invalid(&value, "must be an absolute path");
                    }
                }
                _ => errors.not_supported(&kind, &["Exact", "ImplementationSpecific", "Prefix"]),
            }
        }
        backend(&path.field("backend"), errors);
    }
}

fn backend(backend: &Node, errors: &mut Errors) {
    let (service, resource) = (backend.field("service"), backend.field("resource"));
    match (service.is_set(), resource.is_set()) {
        (true, true) => errors.invalid_value(backend, "", "cannot set both resource and service backends"),
        (false, false) => errors.invalid_value(backend, "", "resource or service backend is required"),
        (false, true) => typed_reference(&resource, errors),
        (true, false) => {
            let name = service.field("name");
            if errors.require(&name) {
                errors.rule(&name, names::dns1123_label(name.str()));
            }
            let port = service.field("port");
            let (number, port_name) = (port.field("number"), port.field("name"));
            match (number.int().unwrap_or(0) != 0, !port_name.is_empty()) {
                (true, true) => errors.invalid_value(backend, "", "cannot set both port name & port number"),
                (false, false) => errors.required(backend, "port name or number is required"),
                (true, false) => errors.rule(&number, names::port_number(number.int().unwrap_or(0))),
                (false, true) => errors.rule(&port_name, names::port_name(port_name.str())),
            }
        }
    }
}

/// An object that a backend or a class points at.
fn typed_reference(reference: &Node, errors: &mut Errors) {
    let group = reference.field("apiGroup");
    if group.is_set() {
        errors.rule(&group, names::dns1123_subdomain(group.str()));
    }
    for name in ["kind", "name"] {
        let part = reference.field(name);
        if errors.require(&part) {
            errors.rule(&part, names::path_segment(part.str(), false));
        }
    }
}

fn secret_names_are_bad(object: &Value) -> bool {
    list(object, "spec.tls").iter().any(|tls| {
        let name = text(tls, "secretName");
        !name.is_empty() && !names::dns1123_subdomain(name).is_empty()
    })
}

/// Where an ingress is reachable; addresses that were there before may stay in any spelling.
fn load_balancer(status: &Node, old: &Value, errors: &mut Errors) {
    let before = list(old, "status.loadBalancer.ingress");
    let points = status.field("loadBalancer.ingress");
    for point in points.items() {
        let ip = point.field("ip");
        if !ip.is_empty() && !before.iter().any(|b| text(b, "ip") == ip.str()) {
            crate::net::ip(&ip, errors);
        }
        let host = point.field("hostname");
        if !host.is_empty() {
            errors.rule(&host, names::dns1123_subdomain(host.str()));
            if crate::net::sloppy_ip(host.str()).is_some() {
                errors.invalid(&host, "must be a DNS name, not an IP address");
            }
        }
    }
}

pub static INGRESS_CLASS: Kind = Kind {
    group: "networking.k8s.io",
    kind: "IngressClass",
    default: |_, object| {
        walk::each(object, "spec.parameters", &mut |parameters| {
            walk::pointer(parameters, "scope", "Cluster")
        });
    },
    prepare_create: strategy::create_generation_only,
    prepare_update: strategy::update_generation,
    validate: |object| {
        let mut errors = Errors::new();
        class_spec(&Node::root(object).field("spec"), &mut errors);
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        errors.immutable(&root.field("spec.controller"), at(old, "spec.controller"));
        class_spec(&root.field("spec"), &mut errors);
        errors.into_vec()
    },
    columns: &[NAME, column("Controller"), column("Parameters"), AGE],
    row: |object, now| {
        let mut name = text(object, "metadata.name").to_owned();
        let mark = at(object, "metadata.annotations").get("ingressclass.kubernetes.io/is-default-class");
        if mark.and_then(Value::as_str) == Some("true") {
            name.push_str(" (default)");
        }
        let parameters = match at(object, "spec.parameters") {
            Value::Null => row::NONE.to_owned(),
            p if text(p, "apiGroup").is_empty() => format!("{}/{}", text(p, "kind"), text(p, "name")),
            p => format!("{}.{}/{}", text(p, "kind"), text(p, "apiGroup"), text(p, "name")),
        };
        vec![
            json!(name),
            json!(text(object, "spec.controller")),
            json!(parameters),
            row::age(object, now),
        ]
    },
    ..BASE
};

fn class_spec(spec: &Node, errors: &mut Errors) {
    let controller = spec.field("controller");
    if errors.require(&controller) {
        if controller.len() > 250 {
            errors.too_long(&controller, 250);
        }
        domain_prefixed_path(&controller, errors);
    }
    let parameters = spec.field("parameters");
    if parameters.is_set() {
        typed_reference(&parameters, errors);
        let (scope, namespace) = (parameters.field("scope"), parameters.field("namespace"));
        if !scope.is_set() {
            errors.required(&scope, "");
            return;
        }
        match scope.str() {
            "Namespace" if !namespace.is_set() => {
                errors.required(&namespace, "`parameters.scope` is set to 'Namespace'");
            }
            "Namespace" => errors.rule(&namespace, names::dns1123_label(namespace.str())),
            "Cluster" if namespace.is_set() => {
                errors.forbidden(&namespace, "`parameters.scope` is set to 'Cluster'");
            }
            "Cluster" => {}
            _ => errors.not_supported(&scope, &["Cluster", "Namespace"]),
        }
    }
}
