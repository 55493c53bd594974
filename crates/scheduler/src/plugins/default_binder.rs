//! Binds through the binding subresource: the only write that places a pod.

use crate::framework::{CycleState, Plugin, Scope};
use crate::pod::PodInfo;
use async_trait::async_trait;
use serde_json::{Value, json};

pub(crate) struct DefaultBinder {
    pub(crate) client: kube::Client,
}

#[async_trait]
impl Plugin for DefaultBinder {
    fn name(&self) -> &'static str {
        "DefaultBinder"
    }

    async fn bind(&self, _state: &CycleState, pod: &PodInfo, node: &str) -> Option<Result<(), kube::Error>> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"namespace": pod.key.namespace, "name": pod.key.name, "uid": pod.uid},
            "target": {"kind": "Node", "name": node},
        });
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/binding",
            pod.key.namespace, pod.key.name
        );
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(binding.to_string().into_bytes())
            .map_err(kube::Error::HttpError);
        Some(match request {
            Ok(request) => self.client.request::<Value>(request).await.map(|_| ()),
            Err(error) => Err(error),
        })
    }

    fn scope(&self, _pod: &PodInfo) -> Scope {
        Scope::None
    }
}
