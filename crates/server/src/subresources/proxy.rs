//! `nodes/proxy`, `pods/proxy` and `services/proxy`: a request that something in the cluster answers.

use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::Value;
use skiff_meta::Status;
use skiff_registry::{ReadAt, Resource, object};

use super::connect::escape;
use super::kubelet;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::proxy::{Forwarded, ProxyError, Target, Tls, address, forward, is_upgrade};
use crate::server::Inner;

pub async fn proxy(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    Admission::new(inner, exchange, resource, None)
        .connect(&exchange.query)
        .await?;
    let info = &exchange.info;
    let invalid = || {
        let kind = resource.plural.trim_end_matches('s');
        Status::bad_request(format!("invalid {kind} request {:?}", info.name))
    };
    let id = Id::parse(&info.name).ok_or_else(invalid)?;
    let target = match resource.plural.as_str() {
        "nodes" => node(inner, &id).await?,
        "pods" => pod(inner, resource, &info.namespace, &id).await?,
        _ => service(inner, resource, &info.namespace, &id).await?,
    };
    // The path as the client wrote it, after `/proxy`.
    let whole = exchange.parts.uri.path();
    let decoded: Vec<&str> = info
        .parts
        .get(3..)
        .unwrap_or_default()
        .iter()
        .map(String::as_str)
        .collect();
    let mut path = String::new();
    for part in &decoded {
        path.push('/');
        path.push_str(&escape(part));
    }
    if whole.ends_with('/') && !path.ends_with('/') {
        path.push('/');
    }
    let query = exchange
        .parts
        .uri
        .query()
        .map(|query| format!("?{query}"))
        .unwrap_or_default();
    if path.is_empty()
        && !is_upgrade(&exchange.parts.headers)
        && matches!(exchange.parts.method, Method::GET | Method::HEAD)
    {
        // COMPAT: relative links of the page at the root need the slash.
        let mut answer = body::empty(StatusCode::MOVED_PERMANENTLY);
        if let Ok(location) = HeaderValue::from_str(&format!("{whole}/{query}")) {
            answer.headers_mut().insert(header::LOCATION, location);
        }
        return Ok(answer);
    }
    let prefix = whole.strip_suffix(path.as_str()).unwrap_or(whole);
    let sent = if path.is_empty() {
        format!("/{query}")
    } else {
        format!("{path}{query}")
    };
    let forwarded = Forwarded {
        target: &target,
        path: &sent,
        prefix,
        keep_host: true,
        headers: HeaderMap::new(),
    };
    forward(exchange, body, forwarded)
        .await
        .map_err(|error| match error {
            ProxyError::Reach(_) => Status::service_unavailable(error.to_string()),
            ProxyError::BadPath(why) => Status::bad_request(why),
            ProxyError::Dial(_) | ProxyError::NotUpgraded(_) => Status::internal(error),
        })
}

/// `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq, Eq)]
struct Id<'a> {
    https: bool,
    name: &'a str,
    port: &'a str,
}

impl<'a> Id<'a> {
    fn parse(text: &'a str) -> Option<Id<'a>> {
        let (https, name, port) = match text.split(':').collect::<Vec<_>>()[..] {
            [name] => (false, name, ""),
            [name, port] => (false, name, port),
            ["http" | "", name, port] => (false, name, port),
            ["https", name, port] => (true, name, port),
            _ => return None,
        };
        (!name.is_empty()).then_some(Id { https, name, port })
    }

    /// The port by its number; the scheme's own without one.
    fn number(&self) -> Result<u16, Status> {
        match self.port {
            "" if self.https => Ok(443),
            "" => Ok(80),
            port => port.parse().map_err(|_| {
                Status::service_unavailable(format!(
                    "error trying to reach service: dial tcp: lookup tcp/{port}: unknown port"
                ))
            }),
        }
    }
}

/// Pods and services may have any certificate: nobody could know their names.
fn tls_to(https: bool, host: &str) -> Result<Option<Tls>, Status> {
    if !https {
        return Ok(None);
    }
    let config = skiff_pki::insecure_client_config(None).map_err(Status::internal)?;
    Ok(Some(Tls {
        config: Arc::new(config),
        server_name: host.to_string(),
    }))
}

/// The address that an object names, if requests may go there.
fn allowed(address: &str) -> Result<Vec<IpAddr>, Status> {
    let address: Option<IpAddr> = address.parse().ok();
    match address.filter(|address| address::is_allowed(*address)) {
        Some(address) => Ok(vec![address]),
        None => Err(Status::bad_request("address not allowed")),
    }
}

async fn node(inner: &Arc<Inner>, id: &Id<'_>) -> Result<Target, Status> {
    let address = kubelet::address_of(inner, id.name).await?;
    let resolved = address::resolve(&address.host).await;
    let addresses = resolved.map_err(|error| Status::bad_request(error.to_string()))?;
    if address.is_meant_by(id.port) {
        let client = inner.kubelet.clone().ok_or_else(|| {
            Status::not_built("connections to kubelets without a kubelet client certificate")
        })?;
        return Ok(Target {
            addresses,
            port: address.port,
            tls: Some(Tls {
                config: client.tls,
                server_name: address.host.clone(),
            }),
            host: address.host,
            local: None,
        });
    }
    Ok(Target {
        addresses,
        port: id.number()?,
        tls: tls_to(id.https, &address.host)?,
        host: address.host,
        local: None,
    })
}

async fn pod(
    inner: &Arc<Inner>,
    resource: &Resource,
    namespace: &str,
    id: &Id<'_>,
) -> Result<Target, Status> {
    let found = inner
        .registry
        .get(resource, namespace, id.name, ReadAt::Latest)
        .await?;
    let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, id.name))?;
    let first_port = object::at(&pod, &["spec", "containers"])
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .find_map(|container| container["ports"][0]["containerPort"].as_u64())
        .map(|port| port.to_string())
        .unwrap_or_default();
    let address = object::at_str(&pod, &["status", "podIP"]);
    let addresses = allowed(address)?;
    let port = if id.port.is_empty() {
        first_port.as_str()
    } else {
        id.port
    };
    Ok(Target {
        host: address.to_string(),
        addresses,
        port: Id { port, ..*id }.number()?,
        tls: tls_to(id.https, address)?,
        local: None,
    })
}

async fn service(
    inner: &Arc<Inner>,
    resource: &Resource,
    namespace: &str,
    id: &Id<'_>,
) -> Result<Target, Status> {
    let registry = &inner.registry;
    let mut port_name = id.port.to_string();
    if let Ok(number) = id.port.parse::<i64>() {
        let found = registry.get(resource, namespace, id.name, ReadAt::Latest).await?;
        let service = found.ok_or_else(|| Status::not_found(&resource.group_resource, id.name))?;
        let ports = object::at(&service, &["spec", "ports"]).and_then(Value::as_array);
        let Some(port) = ports.into_iter().flatten().find(|port| port["port"] == number) else {
            return Err(Status::service_unavailable(format!(
                "no service port {number} found for service {:?}",
                id.name
            )));
        };
        port_name = port["name"].as_str().unwrap_or("").to_string();
    }
    let none =
        |name: &str| Status::service_unavailable(format!("no endpoints available for service {name:?}"));
    let endpoints = match registry.resources.get("", "v1", "endpoints") {
        Some(endpoints) => {
            registry
                .get(endpoints, namespace, id.name, ReadAt::Latest)
                .await?
        }
        None => None,
    };
    // COMPAT: what is missing are the endpoints; the service is what is named.
    let endpoints = endpoints.ok_or_else(|| Status::not_found(&resource.group_resource, id.name))?;
    let subsets = endpoints["subsets"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if subsets.is_empty() {
        return Err(none(id.name));
    }
    let mut ready = Vec::new();
    for subset in subsets {
        let ports = subset["ports"].as_array().into_iter().flatten();
        let named = ports.filter(|port| port["name"].as_str().unwrap_or("") == port_name);
        for port in named.filter_map(|port| u16::try_from(port["port"].as_u64()?).ok()) {
            for address in subset["addresses"].as_array().into_iter().flatten() {
                ready.push((address, port));
            }
        }
    }
    while !ready.is_empty() {
        let (address, port) = ready.swap_remove(rand::random_range(0..ready.len()));
        if is_pod(inner, namespace, address).await? {
            let host = address["ip"].as_str().unwrap_or("").to_string();
            return Ok(Target {
                addresses: allowed(&host)?,
                port,
                tls: tls_to(id.https, &host)?,
                host,
                local: None,
            });
        }
    }
    Err(none(&inner_id(id)))
}

/// COMPAT: the last message has the name as the client gave it.
fn inner_id(id: &Id<'_>) -> String {
    match (id.https, id.port) {
        (true, port) => format!("https:{}:{port}", id.name),
        (false, "") => id.name.to_string(),
        (false, port) => format!("{}:{port}", id.name),
    }
}

/// Whether an address is really that of a pod: endpoints are written by users too.
async fn is_pod(inner: &Arc<Inner>, namespace: &str, address: &Value) -> Result<bool, Status> {
    let target = &address["targetRef"];
    if target["namespace"].as_str() != Some(namespace) {
        return Ok(false);
    }
    let (Some(name), Some(pods)) = (
        target["name"].as_str(),
        inner.registry.resources.get("", "v1", "pods"),
    ) else {
        return Ok(false);
    };
    let Some(pod) = inner.registry.get(pods, namespace, name, ReadAt::Latest).await? else {
        return Ok(false);
    };
    let addresses = object::at(&pod, &["status", "podIPs"]).and_then(Value::as_array);
    Ok(addresses
        .into_iter()
        .flatten()
        .any(|entry| entry["ip"] == address["ip"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        let check = |text: &str, expected: Option<(bool, &str, &str)>| {
            let got = Id::parse(text);
            assert_eq!(
                got,
                expected.map(|(https, name, port)| Id { https, name, port }),
                "{text}"
            );
        };
        check("web", Some((false, "web", "")));
        check("web:80", Some((false, "web", "80")));
        check("https:web:https", Some((true, "web", "https")));
        check("http:web:", Some((false, "web", "")));
        check("ftp:web:21", None);
        check("a:b:c:d", None);
        check(":80", None);
    }
}
