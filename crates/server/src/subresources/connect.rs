//! exec, attach and port-forward: connections that leave HTTP or leave the API server. They are
//! passed to the kubelet byte for byte.

use std::sync::Arc;

use http::{HeaderValue, Request, Uri, header};
use skiff_meta::{GroupResource, Status};
use skiff_registry::{ReadAt, Resource, object};

use super::kubelet;
use super::logs::container_of;
use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::server::Inner;

/// The ports to forward, one or several in a parameter.
fn ports(exchange: &Exchange) -> impl Iterator<Item = &str> {
    exchange.query.all("ports").flat_map(|text| text.split(','))
}

/// Ports come as text.
fn check_ports(exchange: &Exchange) -> Result<(), Status> {
    for text in ports(exchange) {
        if text.parse::<u16>().is_ok() {
            continue;
        }
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let why = if digits {
            "value out of range"
        } else {
            "invalid syntax"
        };
        return Err(Status::bad_request(format!(
            "cannot convert to []int32: strconv.ParseUint: parsing {}: {why}",
            skiff_meta::field::quote(text)
        )));
    }
    Ok(())
}

/// exec, attach and portforward of a pod.
pub async fn pod_stream(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    check_ports(exchange)?;
    // A WebSocket is opened with GET. What it does is no less than what a POST does, so it takes no less.
    inner.ensure_verb(exchange, "create").await?;
    Admission::new(inner, exchange, resource, None)
        .connect(&exchange.query)
        .await?;
    let info = &exchange.info;
    let found = inner
        .registry
        .get(resource, &info.namespace, &info.name, ReadAt::Latest)
        .await?;
    let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
    let node = object::at_str(&pod, &["spec", "nodeName"]);
    let mut query = Vec::new();
    let path = if info.subresource == "portforward" {
        for port in ports(exchange).chain(exchange.query.all("port")) {
            query.push(format!("port={}", escape(port)));
        }
        format!("/portForward/{}/{}", info.namespace, info.name)
    } else {
        if matches!(object::at_str(&pod, &["status", "phase"]), "Succeeded" | "Failed") {
            let phase = object::at_str(&pod, &["status", "phase"]);
            return Err(Status::bad_request(format!(
                "cannot exec into a container in a completed pod; current phase is {phase}"
            )));
        }
        let container = container_of(&pod, exchange.query.text("container"))?;
        for (ours, theirs) in [
            ("stdin", "input"),
            ("stdout", "output"),
            ("stderr", "error"),
            ("tty", "tty"),
        ] {
            if exchange.query.flag(ours) == Some(true) {
                query.push(format!("{theirs}=1"));
            }
        }
        for command in exchange.query.all("command") {
            query.push(format!("command={}", escape(command)));
        }
        let verb = &info.subresource;
        format!("/{verb}/{}/{}/{container}", info.namespace, info.name)
    };
    if node.is_empty() {
        return Err(Status::bad_request(format!(
            "pod {} does not have a host assigned",
            info.name
        )));
    }
    to_kubelet(
        inner,
        exchange,
        node,
        &format!("{path}?{}", query.join("&")),
        body,
    )
    .await
}

/// Sends the request to the kubelet of a node and passes back what it says.
pub async fn to_kubelet(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    node: &str,
    path: &str,
    body: Body,
) -> Result<Answer, Status> {
    let Some(client) = inner.kubelet.clone() else {
        return Err(Status::not_built(
            "connections to kubelets without a kubelet client certificate",
        ));
    };
    // COMPAT: a missing node is reported as a missing object of the resource that was asked for.
    let address = kubelet::address_of(inner, node).await.map_err(|status| {
        let asked = GroupResource::new(exchange.info.group.as_str(), exchange.info.resource.as_str());
        if status.code == 404 {
            Status::not_found(&asked, node)
        } else {
            status
        }
    })?;
    let request = forward(exchange, &address.authority(), path, body)?;
    Ok(skiff_streaming::proxy_upgrade(request, || async move { client.connect(&address).await }).await)
}

/// The same for a client that asked for an upgrade which ends here.
pub async fn to_kubelet_plain(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    node: &str,
    path: &str,
) -> Result<Answer, Status> {
    let Some(client) = inner.kubelet.clone() else {
        return Err(Status::not_built(
            "connections to kubelets without a kubelet client certificate",
        ));
    };
    let address = kubelet::address_of(inner, node).await?;
    let mut request = forward(exchange, &address.authority(), path, body::full(""))?;
    request.extensions_mut().clear();
    let headers = request.headers_mut();
    headers.remove(header::CONNECTION);
    headers.remove(header::UPGRADE);
    for name in ["key", "version", "protocol", "extensions"] {
        headers.remove(format!("sec-websocket-{name}"));
    }
    Ok(skiff_streaming::proxy_upgrade(request, || async move { client.connect(&address).await }).await)
}

/// The request as the other side shall see it: same method and headers, without our credentials.
fn forward(exchange: &Exchange, authority: &str, path: &str, body: Body) -> Result<Request<Body>, Status> {
    let mut request = Request::new(body);
    *request.method_mut() = exchange.parts.method.clone();
    *request.uri_mut() = path
        .parse::<Uri>()
        .map_err(|error| Status::bad_request(format!("invalid path: {error}")))?;
    let headers = request.headers_mut();
    for (name, value) in &exchange.parts.headers {
        let own = *name == header::AUTHORIZATION
            || *name == header::HOST
            || name.as_str().starts_with("impersonate-");
        if !own {
            headers.append(name.clone(), value.clone());
        }
    }
    headers.insert(
        header::HOST,
        HeaderValue::from_str(authority).map_err(Status::internal)?,
    );
    // The upgrade of the client's connection travels in the extensions.
    *request.extensions_mut() = exchange.parts.extensions.clone();
    Ok(request)
}

/// Percent-encodes one value of a query or one segment of a path.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
