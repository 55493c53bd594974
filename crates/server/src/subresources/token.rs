//! `serviceaccounts/token`: signs a token for a service account, bound to an object if asked.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};
use skiff_auth::{BoundObject, TokenRequest};
use skiff_meta::{GroupKind, GroupResource, GroupVersionKind, Status, field, time};
use skiff_registry::{ReadAt, Resource, object};

use super::read_body;
use crate::body::{Answer, Body};
use crate::chain::Exchange;
use crate::decode;
use crate::gate::Admission;
use crate::respond;
use crate::server::Inner;

const DEFAULT_SECONDS: i64 = 3600;
const MIN_SECONDS: i64 = 600;
const MAX_SECONDS: i64 = 1 << 32;

pub async fn create(
    inner: &Arc<Inner>,
    exchange: &mut Exchange,
    resource: &Resource,
    body: Body,
) -> Result<Answer, Status> {
    let gvk = GroupVersionKind::new("authentication.k8s.io", "v1", "TokenRequest");
    let (mut request, options) = read_body(exchange, &gvk, body).await?;
    let (namespace, name) = (exchange.info.namespace.clone(), exchange.info.name.clone());
    skiff_registry::ensure_namespace(resource, &namespace, &mut request)?;
    if object::at(&request, &["spec", "expirationSeconds"]).is_none() {
        object::put(
            &mut request,
            &["spec", "expirationSeconds"],
            json!(DEFAULT_SECONDS),
        );
        // COMPAT: the audit log has the request with what it means when it says nothing.
        decode::record_as(exchange, &gvk, &request);
    }
    if let Some(id) = skiff_api::facts::schema().by_gvk(&gvk.group, &gvk.version, &gvk.kind) {
        let manager = exchange.manager(&options);
        inner
            .registry
            .attribute(&gvk, id, "token", &manager, &mut request);
    }
    Admission::new(inner, exchange, resource, Some(&options.value))
        .action(&mut request)
        .await?;
    let given = object::name(&request);
    if !given.is_empty() && given != name {
        let why = "must match the service account name if specified";
        let error = field::Error::invalid(&field::Path::new("metadata.name"), given, why);
        let kind = GroupKind::new(gvk.group.as_str(), gvk.kind.as_str());
        return Err(Status::invalid(&kind, &name, &[error]));
    }
    let seconds = object::at(&request, &["spec", "expirationSeconds"])
        .and_then(Value::as_i64)
        .unwrap_or(DEFAULT_SECONDS);
    check_seconds(seconds)?;
    let Some(issuer) = &inner.issuer else {
        return Err(Status::not_built("tokens without a service-account key"));
    };
    let account = inner
        .registry
        .get(resource, &namespace, &name, ReadAt::Latest)
        .await?;
    let account = account.ok_or_else(|| Status::not_found(&resource.group_resource, &name))?;
    let (given, found) = (object::uid(&request), object::uid(&account));
    if !given.is_empty() && given != found {
        return Err(Status::conflict(
            &GroupResource::new(gvk.group.as_str(), gvk.kind.as_str()),
            &name,
            format_args!(
                "the UID in the token request ({given}) does not match the UID of the service account ({found})"
            ),
        ));
    }
    let mut token = TokenRequest {
        namespace: namespace.clone(),
        service_account: BoundObject {
            name: name.clone(),
            uid: object::uid(&account).to_string(),
        },
        pod: None,
        secret: None,
        node: None,
        audiences: object::at(&request, &["spec", "audiences"])
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|value| value.as_str().map(str::to_string))
            .collect(),
        issued_at: inner.registry.now().as_second(),
        expires_at: inner.registry.now().as_second() + seconds,
        id: uuid::Uuid::new_v4().to_string(),
    };
    bind(inner, &request, &namespace, &name, &mut token).await?;
    let expires = jiff::Timestamp::from_second(token.expires_at).map_err(Status::internal)?;
    let credential = format!("JTI={}", token.id);
    let signed = issuer.issue(token).map_err(Status::internal)?;
    exchange
        .context
        .annotate("authentication.kubernetes.io/issued-credential-id", credential);
    object::put(&mut request, &["spec", "expirationSeconds"], json!(seconds));
    object::put(&mut request, &["spec", "audiences"], json!(signed.audiences));
    object::put(
        &mut request,
        &["status"],
        json!({"token": signed.token, "expirationTimestamp": time::format_seconds(expires)}),
    );
    // COMPAT: absent is said in so many words.
    if object::at(&request, &["spec", "boundObjectRef"]).is_none() {
        object::put(&mut request, &["spec", "boundObjectRef"], Value::Null);
    }
    object::set(&mut request, "uid", object::uid(&account).to_string());
    object::set(&mut request, "name", name);
    object::set(&mut request, "namespace", namespace);
    object::set(
        &mut request,
        "creationTimestamp",
        time::format_seconds(inner.registry.now()),
    );
    respond::raw(exchange, &exchange.output(false)?, StatusCode::CREATED, &request)
}

fn check_seconds(seconds: i64) -> Result<(), Status> {
    let path = field::Path::new("spec.expirationSeconds");
    let detail = if seconds < MIN_SECONDS {
        "may not specify a duration less than 10 minutes"
    } else if seconds > MAX_SECONDS {
        "may not specify a duration larger than 2^32 seconds"
    } else {
        return Ok(());
    };
    let error = field::Error::invalid(&path, seconds, detail);
    Err(Status::invalid(
        &GroupKind::new("authentication.k8s.io", "TokenRequest"),
        "",
        &[error],
    ))
}

/// Binds the token to the pod, secret or node that the request names.
async fn bind(
    inner: &Arc<Inner>,
    request: &Value,
    namespace: &str,
    account: &str,
    token: &mut TokenRequest,
) -> Result<(), Status> {
    let Some(reference) = object::at(request, &["spec", "boundObjectRef"]) else {
        return Ok(());
    };
    let text = |field: &str| reference.get(field).and_then(Value::as_str).unwrap_or("");
    let (kind, version, name, uid) = (text("kind"), text("apiVersion"), text("name"), text("uid"));
    // The version may be any.
    let (plural, namespace) = match (version.contains('/'), kind) {
        (false, "Pod") => ("pods", namespace),
        (false, "Secret") => ("secrets", namespace),
        (false, "Node") => ("nodes", ""),
        _ => {
            return Err(Status::bad_request(format!(
                "cannot bind token to object of type {}/{}, Kind={kind}",
                version.split_once('/').map_or("", |(group, _)| group),
                version.rsplit('/').next().unwrap_or("")
            )));
        }
    };
    let resource = inner
        .registry
        .resources
        .get("", "v1", plural)
        .ok_or_else(|| Status::internal("no such resource"))?;
    let found = inner
        .registry
        .get(resource, namespace, name, ReadAt::Latest)
        .await?;
    let found = found.ok_or_else(|| Status::not_found(&resource.group_resource, name))?;
    if !uid.is_empty() && uid != object::uid(&found) {
        // COMPAT: upstream names the kind where the resource belongs.
        return Err(Status::conflict(
            &GroupResource::new("", kind),
            name,
            format_args!(
                "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
            ),
        ));
    }
    let bound = BoundObject {
        name: name.to_string(),
        uid: object::uid(&found).to_string(),
    };
    match kind {
        "Secret" => token.secret = Some(bound),
        "Node" => token.node = Some(bound),
        _ => {
            let runs_as = object::at_str(&found, &["spec", "serviceAccountName"]);
            if runs_as != account {
                return Err(Status::bad_request(format!(
                    "cannot bind token for serviceaccount {} to pod running with different serviceaccount name.",
                    field::quote(account)
                )));
            }
            token.pod = Some(bound);
            let node = object::at_str(&found, &["spec", "nodeName"]);
            if !node.is_empty() {
                let nodes = inner
                    .registry
                    .resources
                    .get("", "v1", "nodes")
                    .ok_or_else(|| Status::internal("no such resource"))?;
                let uid = inner
                    .registry
                    .get(nodes, "", node, ReadAt::Any)
                    .await?
                    .map(|node| object::uid(&node).to_string());
                token.node = Some(BoundObject {
                    name: node.to_string(),
                    uid: uid.unwrap_or_default(),
                });
            }
        }
    }
    Ok(())
}
