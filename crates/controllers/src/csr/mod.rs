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
pub(crate) use serving::run as run_serving_approver;
pub(crate) use sign::run as run_signing;

use std::net::IpAddr;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

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
