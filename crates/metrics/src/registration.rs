//! The APIService `v1beta1.metrics.k8s.io`. Ours names no service; one that does is somebody else's, and is left
//! alone. When theirs is deleted, ours comes back.
//!
//! Helm with client-side apply (Helm 3) takes our APIService into its release and leaves it as it is, so that
//! metrics-server would run and never be asked. Where its release is installed, we point the APIService to it.

use kube::Client;
use serde_json::{Value, json};

use crate::{COMPONENT_LABEL, GROUP, VERSION};

const COLLECTION: &str = "/apis/apiregistration.k8s.io/v1/apiservices";
/// The Service of metrics-server's chart, as release `metrics-server` in `kube-system`: the only one that Helm lets have
/// our APIService. Whoever may create it there is an administrator.
const THEIR_SERVICE: &str = "/api/v1/namespaces/kube-system/services/metrics-server";
const RELEASE: &str = "meta.helm.sh/release-name";

pub(crate) struct Registration {
    client: Client,
    /// It was missing the last time: somebody may be about to replace it.
    missing: bool,
    /// There has been one since the start.
    seen: bool,
}

fn api_service() -> Value {
    json!({
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {
            "name": format!("{VERSION}.{GROUP}"),
            // COMPAT: Helm takes over what carries these three, and refuses to touch what does not: with them its
            // chart installs under its usual name.
            "labels": {COMPONENT_LABEL: "metrics", "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {
                RELEASE: "metrics-server",
                "meta.helm.sh/release-namespace": "kube-system",
            },
        },
        "spec": {"group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100},
    })
}

/// The change that lets metrics-server's Service have our APIService; none if the APIService is not ours (any more), or
/// the Service is not of Helm's release.
fn handover(api_service: &Value, service: &Value) -> Option<Value> {
    let ours = api_service["metadata"]["labels"][COMPONENT_LABEL].is_string()
        && api_service["spec"]["service"].is_null()
        && api_service["metadata"]["annotations"][RELEASE] == "metrics-server";
    let theirs = service["metadata"]["annotations"][RELEASE] == "metrics-server";
    let port = service["spec"]["ports"][0]["port"].as_u64()?;
    (ours && theirs).then(|| {
        json!({
            "metadata": {"resourceVersion": api_service["metadata"]["resourceVersion"]},
            // The chart's default; its own certificate is self-signed.
            "spec": {"insecureSkipTLSVerify": true,
                "service": {"namespace": "kube-system", "name": "metrics-server", "port": port}},
        })
    })
}

impl Registration {
    pub(crate) fn new(client: Client) -> Registration {
        Registration {
            client,
            missing: false,
            seen: false,
        }
    }

    /// Creates the APIService unless there is one. One that was deleted is missing twice before it comes back, so that
    /// whoever replaces it by deleting and creating is not in a race with us.
    pub(crate) async fn ensure(&mut self) {
        if let Err(error) = self.try_ensure().await {
            tracing::warn!(%error, "cannot create the APIService of the Metrics API");
        }
    }

    async fn try_ensure(&mut self) -> Result<(), kube::Error> {
        let path = format!("{COLLECTION}/{VERSION}.{GROUP}");
        let request = http::Request::get(path)
            .body(Vec::new())
            .map_err(kube::Error::HttpError)?;
        match self.client.request::<Value>(request).await {
            Ok(present) => {
                (self.missing, self.seen) = (false, true);
                return self.hand_over(&present).await;
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
        if self.seen && !self.missing {
            self.missing = true;
            return Ok(());
        }
        let request = http::Request::post(COLLECTION)
            .header("content-type", "application/json")
            .body(api_service().to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        match self.client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            other => drop(other?),
        }
        (self.missing, self.seen) = (false, true);
        Ok(())
    }

    async fn hand_over(&self, present: &Value) -> Result<(), kube::Error> {
        if !present["spec"]["service"].is_null() {
            return Ok(());
        }
        let request = http::Request::get(THEIR_SERVICE)
            .body(Vec::new())
            .map_err(kube::Error::HttpError)?;
        let service = match self.client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            found => found?,
        };
        let Some(patch) = handover(present, &service) else {
            return Ok(());
        };
        let request = http::Request::patch(format!("{COLLECTION}/{VERSION}.{GROUP}"))
            .header("content-type", "application/merge-patch+json")
            .body(patch.to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        self.client.request::<Value>(request).await?;
        tracing::info!("metrics-server was installed by Helm: its Service has the Metrics API now");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_helms_release_gets_the_api() {
        let helm = json!({"metadata": {"annotations": {RELEASE: "metrics-server"}}, "spec": {"ports": [{"port": 8443}]}});
        let other = json!({"metadata": {}, "spec": {"ports": [{"port": 443}]}});
        let patch = handover(&api_service(), &helm).unwrap();
        assert_eq!(patch["spec"]["service"]["port"], 8443);
        assert_eq!(handover(&api_service(), &other), None);
        let mut theirs = api_service();
        theirs["spec"]["service"] = json!({"name": "x", "namespace": "y"});
        assert_eq!(handover(&theirs, &helm), None);
        let mut unlabelled = api_service();
        unlabelled["metadata"]["labels"] = json!({});
        assert_eq!(handover(&unlabelled, &helm), None);
    }
}
