//! The cleaner of CertificateSigningRequests: those that were decided an hour ago, and those that nobody decided in a
//! day, are deleted.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::DeleteParams;
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use super::is_issued;
use crate::{Context, Error};

const INTERVAL: Duration = Duration::from_secs(3600);
const DECIDED: SignedDuration = SignedDuration::from_hours(1);
const PENDING: SignedDuration = SignedDuration::from_hours(24);

fn is_older(time: Option<&Time>, than: SignedDuration, now: Timestamp) -> bool {
    time.is_some_and(|time| now.duration_since(time.0) > than)
}

fn has_expired(request: &CertificateSigningRequest, now: Timestamp) -> bool {
    let certificate = request
        .status
        .as_ref()
        .and_then(|status| status.certificate.as_ref());
    let Some(Ok((_, pem))) = certificate.map(|certificate| x509_parser::pem::parse_x509_pem(&certificate.0))
    else {
        return false;
    };
    pem.parse_x509()
        .is_ok_and(|parsed| now.as_second() > parsed.validity().not_after.timestamp())
}

fn is_over(request: &CertificateSigningRequest, now: Timestamp) -> bool {
    let conditions = request
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    let conditions = conditions.unwrap_or_default();
    if conditions.is_empty() {
        return is_older(request.metadata.creation_timestamp.as_ref(), PENDING, now);
    }
    conditions.iter().any(|condition| {
        let updated = condition.last_update_time.as_ref();
        match condition.type_.as_str() {
            "Denied" | "Failed" => is_older(updated, DECIDED, now),
            "Approved" if is_issued(request) => is_older(updated, DECIDED, now) || has_expired(request, now),
            "Approved" => is_older(updated, PENDING, now),
            _ => false,
        }
    })
}

struct Cleaner {
    context: Context,
    requests: Informer<CertificateSigningRequest>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Cleaner {
        requests: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("csrcleaner", reconciler)
        .reads(|r| &r.requests)
        .every(INTERVAL, |r| {
            r.requests.list().iter().map(|one| Key::of(&**one)).collect()
        })
        .run()
        .await;
}

impl Reconcile for Cleaner {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(request) = self.requests.get("", &key.name) else {
            return Ok(Action::Done);
        };
        if !is_over(&request, Timestamp::now()) {
            return Ok(Action::Done);
        }
        let api: Api<CertificateSigningRequest> = Api::all(self.context.client.clone());
        match api.delete(&key.name, &DeleteParams::default()).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn what_is_over() {
        let now: Timestamp = "2026-01-02T12:00:00Z".parse().unwrap();
        let check = |created: &str, status: Value, expected: bool| {
            let object = json!({"metadata": {"name": "r", "creationTimestamp": created},
                "spec": {"signerName": "s", "request": ""}, "status": status});
            let object: CertificateSigningRequest = serde_json::from_value(object).unwrap();
            assert_eq!(is_over(&object, now), expected, "{status}");
        };
        let condition = |type_: &str, at: &str, certificate: &str| {
            json!({"certificate": certificate,
            "conditions": [{"type": type_, "status": "True", "lastUpdateTime": at}]})
        };
        let (young, hours, old) = (
            "2026-01-02T11:30:00Z",
            "2026-01-02T10:00:00Z",
            "2026-01-01T11:00:00Z",
        );
        check(hours, json!({}), false);
        check(old, json!({}), true);
        check(old, condition("Denied", young, ""), false);
        check(old, condition("Denied", hours, ""), true);
        check(old, condition("Failed", hours, ""), true);
        check(old, condition("Approved", hours, ""), false);
        check(old, condition("Approved", old, ""), true);
        check(old, condition("Approved", young, "AAAA"), false);
        check(old, condition("Approved", hours, "AAAA"), true);
    }
}
