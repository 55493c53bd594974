//! The controllers of CertificateSigningRequests: kubelets' client certificates are approved if their requesters may
//! have them, their serving certificates if they are for the node's own name and addresses, approved requests of the four built-in signers are signed by the cluster's authority, and old requests
//! are deleted.

mod approve;
mod clean;
mod request;
mod serving;
mod sign;

pub(crate) use approve::run as run_approving;
pub(crate) use clean::run as run_cleaner;
pub(crate) use serving::{run as run_serving_approver, server_hosts};
pub(crate) use sign::run as run_signing;

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

/// What a certificate shall say: the request's subject, names and key, and what the signer makes of the rest.
#[derive(Clone, Debug)]
pub struct CertificateOrder {
    /// Attributes of the subject in their order: the last number of the type below 2.5.4 and the value.
    pub subject: Vec<(u8, String)>,
    pub dns_names: Vec<String>,
    pub addresses: Vec<IpAddr>,
    pub emails: Vec<String>,
    pub uris: Vec<String>,
    /// DER of a SubjectPublicKeyInfo.
    pub public_key: Vec<u8>,
    /// By the names of the certificates API.
    pub usages: Vec<String>,
    /// Unix seconds; the signer shortens it to the end of its own certificate.
    pub not_before: i64,
    pub not_after: i64,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SignError(pub String);

/// Holds the key of the cluster's authority.
pub trait CertificateSigner: Send + Sync {
    /// The certificate, PEM.
    fn sign(&self, order: &CertificateOrder, now: i64) -> Result<String, SignError>;
}

const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";

/// Whether a condition of the type is there, and whether it is true. One without a status counts as true, as it did
/// before conditions had one.
fn condition(request: &CertificateSigningRequest, type_: &str) -> Option<bool> {
    let conditions = request.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    Some(found.status.is_empty() || found.status == "True")
}

fn is_issued(request: &CertificateSigningRequest) -> bool {
    let certificate = request
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref());
    certificate.is_some_and(|certificate| !certificate.0.is_empty())
}

/// Runs a controller of requests, with upstream's queue and number of workers.
async fn run<R: Reconcile<Key = Key>>(
    context: &Context,
    reconciler: Arc<R>,
    requests: fn(&R) -> &Informer<CertificateSigningRequest>,
) {
    let controller = context.controller("certificate", reconciler).workers(5);
    controller.owns(requests).run().await;
}

/// Adds a condition that is true.
fn add_condition<'a>(
    request: &'a mut CertificateSigningRequest,
    type_: &str,
    reason: &str,
    message: &str,
) -> &'a mut CertificateSigningRequestCondition {
    let conditions = request
        .status
        .get_or_insert_default()
        .conditions
        .get_or_insert_default();
    conditions.push_mut(CertificateSigningRequestCondition {
        type_: type_.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        ..Default::default()
    })
}

/// Writes a subresource of the request. One that is gone needs nothing more.
async fn write(
    context: &Context,
    subresource: &str,
    request: &CertificateSigningRequest,
) -> Result<Action, Error> {
    let api: Api<CertificateSigningRequest> = Api::all(context.client.clone());
    let name = request.metadata.name.as_deref().unwrap_or_default();
    let written = api
        .replace_subresource(subresource, name, &PostParams::default(), request)
        .await;
    match written {
        Err(error) if !error.is_not_found() => Err(error.into()),
        _ => Ok(Action::Done),
    }
}
