//! Certificates by the API: a node makes a key, asks for its certificate, and waits until somebody approves and signs it.

use anyhow::{Context, Result, bail};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use skiff_client::ErrorExt;
use skiff_pki::{Identity, KeyRequest};
use std::time::Duration;

const FIRST_POLL: Duration = Duration::from_millis(20);
const LAST_POLL: Duration = Duration::from_secs(1);

/// What a node asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be known by the API server.
    Client,
    /// To serve the kubelet's API.
    Serving,
}

impl Purpose {
    fn signer(self) -> &'static str {
        match self {
            Purpose::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Purpose::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    fn usage(self) -> &'static str {
        match self {
            Purpose::Client => "client auth",
            Purpose::Serving => "server auth",
        }
    }
}

/// Asks for a certificate of a new key and waits for it. `hosts` are the names and addresses of a server.
pub async fn request(
    client: &Client,
    purpose: Purpose,
    node_name: &str,
    hosts: &[String],
    patience: Duration,
) -> Result<Identity> {
    let key = KeyRequest::new(&format!("system:node:{node_name}"), "system:nodes", hosts)?;
    let name = format!("node-csr-{}", &key.digest()[..43]);
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let mut object = CertificateSigningRequest {
        spec: CertificateSigningRequestSpec {
            request: ByteString(key.request.clone().into_bytes()),
            signer_name: purpose.signer().to_owned(),
            usages: Some(vec!["digital signature".to_owned(), purpose.usage().to_owned()]),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    };
    object.metadata.name = Some(name.clone());
    match api.create(&PostParams::default(), &object).await {
        // An answer that was lost; nobody else has this key.
        Err(error) if error.is_already_exists() => {}
        created => {
            created.context("the request for a certificate is refused")?;
        }
    }
    let waiting = issued(&api, &name);
    let Ok(issued) = tokio::time::timeout(patience, waiting).await else {
        bail!(
            "nobody signed the certificate {name} within {} s; look at it with `kubectl describe csr {name}`, and approve it with `kubectl certificate approve {name}`",
            patience.as_secs()
        );
    };
    Ok(key.signed(issued?)?)
}

async fn issued(api: &Api<CertificateSigningRequest>, name: &str) -> Result<String> {
    let mut pause = FIRST_POLL;
    loop {
        let found = match api.get_opt(name).await {
            Ok(Some(found)) => found,
            Ok(None) => bail!("the request for the certificate {name} was deleted"),
            Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => {
                return Err(kube::Error::Api(status).into());
            }
            // The connection or the server's state; the next try may work.
            Err(_) => CertificateSigningRequest::default(),
        };
        let status = found.status.unwrap_or_default();
        for condition in status.conditions.iter().flatten() {
            if ["Denied", "Failed"].contains(&condition.type_.as_str()) {
                bail!(
                    "the certificate {name} is refused ({}): {}",
                    condition.reason.as_deref().unwrap_or(&condition.type_),
                    condition.message.as_deref().unwrap_or("without a reason")
                );
            }
        }
        if let Some(certificate) = status.certificate.filter(|c| !c.0.is_empty()) {
            return Ok(String::from_utf8(certificate.0)?);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_POLL);
    }
}
