//! A signer of pod certificates: an authority that signs what PodCertificateRequests ask for.

use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::{CertificateParams, CertificateSigningRequestParams, Issuer, KeyPair, SanType, date_time_ymd};
use rustls::pki_types::CertificateSigningRequestDer;
use serde_json::{Value, json};

/// How long its certificates are valid; the shortest time that the API allows.
const LIFE: Duration = Duration::from_secs(3600);

pub struct PodSigner {
    issuer: Issuer<'static, KeyPair>,
}

impl PodSigner {
    pub fn new() -> Result<PodSigner> {
        let parameters = CertificateParams::new(Vec::<String>::new())?;
        Ok(PodSigner {
            issuer: Issuer::new(parameters, KeyPair::generate()?),
        })
    }

    /// The status that issues what a request asks for. It is to be renewed so long after now, at least ten minutes. The
    /// certificate is for the name of the pod.
    pub fn issued(&self, request: &Value, renew_after: Duration) -> Result<Value> {
        let spec = &request["spec"];
        let stub = spec["stubPKCS10Request"]
            .as_str()
            .context("a request without a key")?;
        let stub = CertificateSigningRequestDer::from(STANDARD.decode(stub)?);
        let mut wanted = CertificateSigningRequestParams::from_der(&stub)?;
        let now = Timestamp::from_second(Timestamp::now().as_second())?;
        let end = now.checked_add(SignedDuration::try_from(LIFE)?)?;
        let date = |at: Timestamp| -> Result<_> {
            Ok(date_time_ymd(1970, 1, 1) + Duration::from_secs(u64::try_from(at.as_second())?))
        };
        wanted.params.not_before = date(now)?;
        wanted.params.not_after = date(end)?;
        let pod = spec["podName"].as_str().context("a request without a pod")?;
        let names = &mut wanted.params.subject_alt_names;
        names.push(SanType::DnsName(pod.try_into()?));
        let chain = wanted.signed_by(&self.issuer)?.pem();
        let refresh = now.checked_add(SignedDuration::try_from(renew_after)?)?;
        Ok(
            json!({"conditions": [condition("Issued", "Issued", "")], "certificateChain": chain,
            "notBefore": now.to_string(), "notAfter": end.to_string(), "beginRefreshAt": refresh.to_string()}),
        )
    }

    /// The status that refuses a request: `kind` is `Denied` or `Failed`.
    pub fn refused(kind: &str, reason: &str, message: &str) -> Value {
        json!({"conditions": [condition(kind, reason, message)]})
    }
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    json!({"type": kind, "status": "True", "reason": reason, "message": message,
        "lastTransitionTime": now.to_string()})
}
