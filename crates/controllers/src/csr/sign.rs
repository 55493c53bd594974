//! The signing controller: signs what was approved for the four signers that every cluster has.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use skiff_client::{Action, Informer, Key, Reconcile};

use super::request::{Request, check_client_usages, check_kubelet_client, check_kubelet_serving};
use super::{
    CertificateOrder, CertificateSigner, KUBELET_CLIENT, add_condition, condition, is_issued, write,
};
use crate::{Context, Error};

/// How much earlier than now a certificate begins to be valid.
const BACKDATE_SECONDS: i64 = 5 * 60;
/// The end of a certificate that lives shorter than this is not backdated.
const SHORT_SECONDS: i64 = 8 * 3600;
const MIN_SECONDS: i64 = 10 * 60;

/// Whether a signer of ours may sign the request: `None` if the signer is another one.
fn check(signer: &str, request: &Request, usages: &[String]) -> Option<Result<(), String>> {
    match signer {
        "kubernetes.io/kubelet-serving" => Some(check_kubelet_serving(request, usages)),
        KUBELET_CLIENT => Some(check_kubelet_client(request, usages)),
        "kubernetes.io/kube-apiserver-client" => Some(check_client_usages(usages)),
        "kubernetes.io/legacy-unknown" => Some(Ok(())),
        _ => None,
    }
}

fn is_ours(signer: &str) -> bool {
    check(signer, &Request::default(), &[]).is_some()
}

/// From when until when the certificate is valid.
fn validity(requested: Option<i32>, max_seconds: i64, now: i64) -> (i64, i64) {
    let seconds = match requested.map(i64::from) {
        None => max_seconds,
        Some(seconds) if seconds > max_seconds => max_seconds,
        Some(seconds) => seconds.max(MIN_SECONDS),
    };
    let end = if seconds < SHORT_SECONDS {
        now + seconds
    } else {
        now + seconds - BACKDATE_SECONDS
    };
    (now - BACKDATE_SECONDS, end)
}

#[derive(Debug)]
enum Plan {
    Nothing,
    Fail(String),
    Sign(Box<CertificateOrder>),
}

fn plan(object: &CertificateSigningRequest, max_seconds: i64, now: i64) -> Result<Plan, Error> {
    let approved = condition(object, "Approved").is_some() && condition(object, "Denied").is_none();
    let spec = &object.spec;
    if is_issued(object)
        || !approved
        || condition(object, "Failed") == Some(true)
        || !is_ours(&spec.signer_name)
    {
        return Ok(Plan::Nothing);
    }
    let request = Request::parse(&spec.request.0).map_err(|error| {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        Error::Other(format!("unable to parse csr {name:?}: {error}"))
    })?;
    let usages = spec.usages.clone().unwrap_or_default();
    match check(&spec.signer_name, &request, &usages) {
        None => Ok(Plan::Nothing),
        Some(Err(why)) => Ok(Plan::Fail(why)),
        Some(Ok(())) => {
            let (not_before, not_after) = validity(spec.expiration_seconds, max_seconds, now);
            Ok(Plan::Sign(Box::new(CertificateOrder {
                subject: request.subject,
                dns_names: request.dns_names,
                addresses: request.addresses,
                emails: request.emails,
                uris: request.uris,
                public_key: request.public_key,
                usages,
                not_before,
                not_after,
            })))
        }
    }
}

struct Signing {
    context: Context,
    signer: Arc<dyn CertificateSigner>,
    requests: Informer<CertificateSigningRequest>,
}

pub(crate) async fn run(context: Context) {
    let Some(signer) = context.config.certificate_signer.clone() else {
        tracing::info!("Skipping CSR signer controller because no csr cert/key was specified");
        context.shutdown.cancelled().await;
        return;
    };
    let reconciler = Arc::new(Signing {
        signer,
        requests: context.informers.informer(),
        context: context.clone(),
    });
    super::run(&context, reconciler, |r| &r.requests).await;
}

impl Reconcile for Signing {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(object) = self.requests.get("", &key.name) else {
            return Ok(Action::Done);
        };
        let now = Timestamp::now();
        let max = i64::try_from(self.context.config.cluster_signing_duration.as_secs()).unwrap_or(i64::MAX);
        let mut updated = (*object).clone();
        match plan(&object, max, now.as_second())? {
            Plan::Nothing => return Ok(Action::Done),
            Plan::Fail(message) => {
                let failed = add_condition(&mut updated, "Failed", "SignerValidationFailure", &message);
                failed.last_update_time = Some(Time(now));
            }
            Plan::Sign(order) => {
                let signed = self.signer.sign(&order, now.as_second());
                let certificate =
                    signed.map_err(|error| Error::Other(format!("error auto signing csr: {error}")))?;
                updated.status.get_or_insert_default().certificate =
                    Some(ByteString(certificate.into_bytes()));
            }
        }
        write(&self.context, "status", &updated).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn durations() {
        const YEAR: i64 = 365 * 24 * 3600;
        let check = |requested: Option<i32>, expected: i64| {
            let (from, until) = validity(requested, YEAR, 1_000_000);
            assert_eq!(from, 1_000_000 - 300);
            assert_eq!(until - 1_000_000, expected, "{requested:?}");
        };
        check(None, YEAR - 300);
        check(Some(i32::MAX), YEAR - 300);
        check(Some(1), 600);
        check(Some(3600), 3600);
        check(Some(8 * 3600 - 1), 8 * 3600 - 1);
        check(Some(8 * 3600), 8 * 3600 - 300);
    }

    #[test]
    fn who_signs_what() {
        let usages = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let request = Request::default();
        let seen = |signer: &str, names: &[&str]| super::check(signer, &request, &usages(names));
        assert_eq!(seen("example.com/own", &["client auth"]), None);
        assert_eq!(seen("kubernetes.io/legacy-unknown", &["cert sign"]), Some(Ok(())));
        assert_eq!(
            seen("kubernetes.io/kube-apiserver-client", &["client auth"]),
            Some(Ok(()))
        );
        assert!(matches!(
            seen("kubernetes.io/kube-apiserver-client", &["cert sign"]),
            Some(Err(_))
        ));
        assert!(matches!(
            seen("kubernetes.io/kubelet-serving", &["server auth"]),
            Some(Err(_))
        ));
    }

    #[test]
    fn only_approved_requests() {
        let check = |signer: &str, status: Value, nothing: bool| {
            let object = json!({"metadata": {"name": "r"}, "spec": {"signerName": signer, "request": ""}, "status": status});
            let object: CertificateSigningRequest = serde_json::from_value(object).unwrap();
            // What gets past the conditions fails on the empty request.
            let planned = plan(&object, 1, 0);
            assert_eq!(matches!(planned, Ok(Plan::Nothing)), nothing, "{planned:?}");
        };
        let condition = |types: &[&str]| {
            let conditions: Vec<Value> = types
                .iter()
                .map(|type_| json!({"type": type_, "status": "True"}))
                .collect();
            json!({"conditions": conditions})
        };
        check(KUBELET_CLIENT, json!({}), true);
        check(KUBELET_CLIENT, condition(&["Approved"]), false);
        check(KUBELET_CLIENT, condition(&["Approved", "Failed"]), true);
        check(KUBELET_CLIENT, condition(&["Approved", "Denied"]), true);
        check("example.com/own", condition(&["Approved"]), true);
    }
}
