//! What `--gateway-api` installs: the definitions of Gateway API, and the GatewayClass of the ingress proxy. Definitions
//! that somebody else installed are left alone, of whatever version they are.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kube::Client;
use serde_json::{Value, json};

use crate::addons::{is_made, note_made};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const CLASSES: &str = "/apis/gateway.networking.k8s.io/v1/gatewayclasses";
/// In the ConfigMap of what was made.
const ENTRY: &str = "gatewayclass-skiff";
/// A new definition is served within this time.
const PATIENCE: Duration = Duration::from_secs(30);

pub async fn install(client: &Client) -> Result<()> {
    for definition in skiff_ingress::gateway_definitions()? {
        let name = definition["metadata"]["name"].as_str().unwrap_or_default();
        define(client, name, &definition)
            .await
            .with_context(|| format!("CustomResourceDefinition {name}"))?;
    }
    make_class(client).await.context("GatewayClass skiff")
}

async fn define(client: &Client, name: &str, definition: &Value) -> Result<()> {
    let path = format!("{DEFINITIONS}/{name}");
    let found = client
        .request::<Value>(http::Request::get(&path).body(Vec::new())?)
        .await;
    let found = match found {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let request = http::Request::post(DEFINITIONS).header("content-type", "application/json");
            let request = request.body(serde_json::to_vec(definition)?)?;
            return match client.request::<Value>(request).await {
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                made => Ok(made.map(drop)?),
            };
        }
        found => found?,
    };
    let (label, ours) = skiff_ingress::DEFINITIONS_MANAGED_BY;
    let meta = &found["metadata"];
    if meta["labels"][label] != ours || meta["annotations"] == definition["metadata"]["annotations"] {
        return Ok(());
    }
    let patch = json!({"metadata": {"annotations": definition["metadata"]["annotations"]}, "spec": definition["spec"]});
    let request = http::Request::patch(path).header("content-type", "application/merge-patch+json");
    let request = request.body(serde_json::to_vec(&patch)?)?;
    client.request::<Value>(request).await?;
    Ok(())
}

/// Once: not again after a user deleted it.
async fn make_class(client: &Client) -> Result<()> {
    if is_made(client, ENTRY).await? {
        return Ok(());
    }
    let class = json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "GatewayClass", "metadata": {"name": "skiff"},
        "spec": {"controllerName": skiff_ingress::GATEWAY_CONTROLLER},
    });
    let until = Instant::now() + PATIENCE;
    loop {
        let request = http::Request::post(CLASSES).header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(&class)?)?;
        match client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 409 => break,
            Err(kube::Error::Api(status)) if status.code == 404 && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                bail!(
                    "its definition is not served after {} seconds",
                    PATIENCE.as_secs()
                );
            }
            made => {
                made?;
                break;
            }
        }
    }
    note_made(client, ENTRY).await
}
