//! The APIService `v1beta1.metrics.k8s.io`. Ours names no service; one that does is somebody else's, and is left
//! alone. When theirs is deleted, ours comes back.

use kube::Client;
use serde_json::{Value, json};

use crate::{COMPONENT_LABEL, GROUP, VERSION};

const COLLECTION: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

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
                "meta.helm.sh/release-name": "metrics-server",
                "meta.helm.sh/release-namespace": "kube-system",
            },
        },
        "spec": {"group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100},
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
            Ok(_) => {
                (self.missing, self.seen) = (false, true);
                return Ok(());
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
}
