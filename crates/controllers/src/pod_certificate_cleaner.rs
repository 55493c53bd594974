//! The cleaner of PodCertificateRequests: a request is settled within minutes, whatever becomes of it, and is deleted after that.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use skiff_client::{Action, Client, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

struct Cleaner {
    client: Client,
    threshold: Duration,
    requests: Informer<PodCertificateRequest>,
}

/// Whether a request was created so long ago, or longer.
fn is_over(request: &PodCertificateRequest, threshold: Duration, now: Timestamp) -> bool {
    let created = request.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| {
        let age = Duration::try_from(now.duration_since(created.0));
        // An age below zero is none: clocks differ.
        age.is_ok_and(|age| age >= threshold)
    })
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Cleaner {
        client: context.client.clone(),
        threshold: context.config.pod_certificate_request_threshold,
        requests: context.informers.informer(),
    });
    let period = context.config.pod_certificate_request_sync_period;
    context
        .controller("podcertificaterequestcleaner", reconciler)
        .reads(|r| &r.requests)
        .every(period, |r| {
            let (all, now) = (r.requests.list(), Timestamp::now());
            let over = all.iter().filter(|request| is_over(request, r.threshold, now));
            over.map(|request| Key::of(&**request)).collect()
        })
        .run()
        .await;
}

impl Reconcile for Cleaner {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(request) = self.requests.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if !is_over(&request, self.threshold, Timestamp::now()) {
            return Ok(Action::Done);
        }
        let api: Api<PodCertificateRequest> = Api::namespaced(self.client.clone(), &key.namespace);
        // Another one of the same name is not the one that was looked at.
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: request.metadata.uid.clone(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match api.delete(&key.name, &parameters).await {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn requests_grow_old() {
        let check = |created: &str, expected: bool| {
            let now: Timestamp = "2026-01-02T12:00:00Z".parse().unwrap();
            let request = json!({"metadata": {"name": "r", "creationTimestamp": created}, "spec": {
                "signerName": "s", "podName": "", "podUID": "", "serviceAccountName": "", "serviceAccountUID": "",
                "nodeName": "", "nodeUID": "", "stubPKCS10Request": ""}});
            let request = serde_json::from_value(request).unwrap();
            let threshold = Duration::from_secs(15 * 60);
            assert_eq!(is_over(&request, threshold, now), expected, "{created}");
        };
        check("2026-01-02T11:44:59Z", true);
        check("2026-01-02T11:45:00Z", true);
        check("2026-01-02T11:45:01Z", false);
        check("2026-01-02T12:30:00Z", false);
    }
}
