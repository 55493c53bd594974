//! exec, attach, port-forward and proxy: connections that leave HTTP or leave the API server. They are
//! passed to the kubelet or the pod byte for byte.

use std::sync::Arc;

use http::{HeaderValue, Request, Uri, header};
use skiff_meta::Status;
use skiff_registry::{ReadAt, Resource, object};
use tokio::net::TcpStream;

use super::kubelet;
use super::logs::container_of;
use crate::body::{Answer, Body};
use crate::chain::Exchange;
use crate::gate::Admission;
use crate::server::Inner;

/// exec, attach and portforward of a pod.
pub async fn pod_stream(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let info = &exchange.info;
    let found = inner
        .registry
        .get(resource, &info.namespace, &info.name, ReadAt::Latest)
        .await?;
    let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
    Admission::new(inner, exchange, resource, None).connect().await?;
    let node = object::at_str(&pod, &["spec", "nodeName"]);
    let mut query = Vec::new();
    let path = if info.subresource == "portforward" {
        for port in exchange.query.all("ports").chain(exchange.query.all("port")) {
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

/// `nodes/proxy`, `pods/proxy` and `services/proxy`.
pub async fn proxy(
    inner: &Arc<Inner>,
    exchange: &Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    Admission::new(inner, exchange, resource, None).connect().await?;
    let info = &exchange.info;
    let mut path = format!("/{}", info.parts.get(3..).unwrap_or_default().join("/"));
    if info.path.ends_with('/') && !path.ends_with('/') {
        path.push('/');
    }
    let mut target: String = path.split('/').map(escape).collect::<Vec<_>>().join("/");
    if let Some(query) = exchange.parts.uri.query() {
        target = format!("{target}?{query}");
    }
    // The name may carry a scheme and a port: `https:web:8443`.
    let (scheme, name, port) = split_name(&info.name);
    if resource.plural == "nodes" {
        return to_kubelet(inner, exchange, name, &target, body).await;
    }
    if resource.plural == "services"
        && inner
            .registry
            .get_entry(resource, &info.namespace, name, ReadAt::Latest)
            .await?
            .is_none()
    {
        return Err(Status::not_found(&resource.group_resource, name));
    }
    if resource.plural != "pods" || scheme == "https" {
        return Err(Status::not_built(format_args!(
            "{}/proxy to {}",
            resource.plural, info.name
        )));
    }
    let found = inner
        .registry
        .get(resource, &info.namespace, name, ReadAt::Latest)
        .await?;
    let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, name))?;
    let address = object::at_str(&pod, &["status", "podIP"]);
    if address.is_empty() {
        return Err(Status::internal("address not allowed"));
    }
    let first_port = object::at(&pod, &["spec", "containers"])
        .and_then(serde_json::Value::as_array)
        .into_iter()
        .flatten()
        .find_map(|container| container["ports"][0]["containerPort"].as_u64());
    let port = if port.is_empty() {
        first_port.unwrap_or(80).to_string()
    } else {
        port.to_string()
    };
    let port: u16 = port
        .parse()
        .map_err(|_| Status::bad_request(format!("invalid port {port}")))?;
    let authority = if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    };
    let request = forward(exchange, &authority, &target, body)?;
    let address = address.to_string();
    Ok(skiff_streaming::proxy_upgrade(request, || TcpStream::connect((address, port))).await)
}

fn split_name(name: &str) -> (&str, &str, &str) {
    match name.split(':').collect::<Vec<_>>()[..] {
        [name, port] => ("", name, port),
        [scheme, name, port] => (scheme, name, port),
        _ => ("", name, ""),
    }
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
    let address = kubelet::address_of(inner, node).await?;
    let request = forward(exchange, &address.authority(), path, body)?;
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
