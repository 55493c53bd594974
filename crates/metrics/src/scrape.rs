//! Reads `/metrics/resource` of every node, as any client would: at the node's address and port, with the token of
//! its own service account, and only if the node proves its name.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use http::{HeaderMap, HeaderValue, Method, header};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_https::{Call, CallTarget};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::points::Batch;
use crate::{NAMESPACE, SERVICE_ACCOUNT, text};

const PATH: &str = "/metrics/resource";
/// Upstream's annotation for a node that has it elsewhere.
const PATH_ANNOTATION: &str = "metrics.k8s.io/resource-metrics-path";
/// metrics-server's `--kubelet-request-timeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Thousands of containers have room in it.
const PAGE_LIMIT: usize = 16 << 20;
/// Nodes that are read at once.
const PARALLEL: usize = 64;
/// A node that failed so often is tried every fourth time only.
const PATIENCE: u32 = 3;
const SELDOM: u64 = 4;
const TOKEN_SECONDS: i64 = 3600;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot get a token: {0}")]
    Token(#[from] kube::Error),
    #[error("no address matched types [InternalIP ExternalIP Hostname]")]
    NoAddress,
    #[error("{0}")]
    Call(#[from] skiff_https::Failure),
    #[error("request failed, status: {0}")]
    Refused(u16),
    #[error("{0}")]
    Target(String),
    #[error(transparent)]
    Text(#[from] text::BadText),
}

pub(crate) struct Scraper {
    client: Client,
    ca: watch::Receiver<String>,
    /// The client that trusts the present authority. Leaf lock.
    https: Mutex<Option<(String, Arc<skiff_https::Client>)>>,
    /// The token, and when to get another one. Leaf lock.
    token: Mutex<Option<(HeaderValue, Instant)>>,
    /// Failures in a row, by node. Leaf lock.
    failures: Mutex<HashMap<String, u32>>,
    rounds: Mutex<u64>,
}

impl Scraper {
    pub(crate) fn new(client: Client, ca: watch::Receiver<String>) -> Scraper {
        Scraper {
            client,
            ca,
            https: Mutex::default(),
            token: Mutex::default(),
            failures: Mutex::default(),
            rounds: Mutex::default(),
        }
    }

    /// Everything that could be read within the time.
    pub(crate) async fn scrape(&self, nodes: Vec<Arc<Node>>, within: Duration) -> Batch {
        let round = {
            let mut rounds = self.rounds.lock();
            *rounds += 1;
            *rounds
        };
        self.failures
            .lock()
            .retain(|name, _| nodes.iter().any(|node| node.metadata.name.as_ref() == Some(name)));
        let due: Vec<Arc<Node>> = nodes
            .into_iter()
            .filter(|node| port(node).is_some() && self.is_due(node, round))
            .collect();
        let read = futures::stream::iter(due).map(|node| async move {
            let result = self.read(&node).await;
            (node, result)
        });
        let deadline = pin!(tokio::time::sleep(within));
        let mut results = read.buffer_unordered(PARALLEL).take_until(deadline);
        let mut batch = Batch::default();
        while let Some((node, result)) = results.next().await {
            let name = node.metadata.name.clone().unwrap_or_default();
            match result {
                Ok(found) => {
                    self.failures.lock().remove(&name);
                    batch.nodes.extend(found.nodes);
                    batch.pods.extend(found.pods);
                }
                Err(error) => {
                    *self.failures.lock().entry(name.clone()).or_default() += 1;
                    if is_ready(&node) {
                        tracing::warn!(%error, node = name, "cannot read the resource metrics of a node");
                    } else {
                        tracing::debug!(%error, node = name, "cannot read the resource metrics of a node that is not ready");
                    }
                }
            }
        }
        batch
    }

    fn is_due(&self, node: &Node, round: u64) -> bool {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let failures = self.failures.lock().get(name).copied().unwrap_or_default();
        failures < PATIENCE || round.is_multiple_of(SELDOM)
    }

    async fn read(&self, node: &Node) -> Result<Batch, Error> {
        let target = target(node)?;
        let now = i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX);
        let mut answer = self.get(&target).await?;
        if answer.code == 401 {
            // The token may have been revoked, with its account or the key.
            *self.token.lock() = None;
            answer = self.get(&target).await?;
        }
        if answer.code != 200 {
            return Err(Error::Refused(answer.code));
        }
        let page = String::from_utf8_lossy(&answer.body);
        let name = node.metadata.name.as_deref().unwrap_or_default();
        Ok(text::parse(&page, name, now)?)
    }

    async fn get(&self, target: &CallTarget) -> Result<skiff_https::Answer, Error> {
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, self.token().await?)]);
        let call = Call {
            method: Method::GET,
            place: target,
            headers: &headers,
            body: bytes::Bytes::new(),
            timeout: REQUEST_TIMEOUT,
            limit: PAGE_LIMIT,
        };
        Ok(self.https().call(call).await?)
    }

    fn https(&self) -> Arc<skiff_https::Client> {
        let ca = self.ca.borrow().clone();
        let mut https = self.https.lock();
        match &*https {
            Some((trusted, client)) if *trusted == ca => client.clone(),
            _ => {
                let client = Arc::new(skiff_https::Client::new(skiff_https::trusting(Some(&ca))));
                *https = Some((ca, client.clone()));
                client
            }
        }
    }

    async fn token(&self) -> Result<HeaderValue, Error> {
        if let Some((token, renew)) = &*self.token.lock()
            && Instant::now() < *renew
        {
            return Ok(token.clone());
        }
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), NAMESPACE);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                expiration_seconds: Some(TOKEN_SECONDS),
                ..Default::default()
            }),
            ..Default::default()
        };
        let asked = Instant::now();
        let answered = accounts
            .create_token_request(SERVICE_ACCOUNT, &PostParams::default(), &request)
            .await?;
        let token = answered
            .status
            .and_then(|status| status.token)
            .unwrap_or_default();
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|error| Error::Target(error.to_string()))?;
        value.set_sensitive(true);
        let renew = asked + Duration::from_secs(TOKEN_SECONDS.unsigned_abs() * 4 / 5);
        *self.token.lock() = Some((value.clone(), renew));
        Ok(value)
    }
}

/// The kubelet's port; a node without one has no kubelet.
fn port(node: &Node) -> Option<u16> {
    let endpoints = node.status.as_ref()?.daemon_endpoints.as_ref()?;
    let port = endpoints.kubelet_endpoint.as_ref()?.port;
    u16::try_from(port).ok().filter(|port| *port > 0)
}

fn target(node: &Node) -> Result<CallTarget, Error> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
    let of_type = |wanted: &str| {
        let mut all = addresses.into_iter().flatten();
        all.find(|address| address.type_ == wanted)
    };
    let address = ["InternalIP", "ExternalIP", "Hostname"]
        .into_iter()
        .find_map(of_type)
        .ok_or(Error::NoAddress)?;
    let host = if address.address.contains(':') {
        format!("[{}]", address.address)
    } else {
        address.address.clone()
    };
    let empty = BTreeMap::new();
    let annotations = node.metadata.annotations.as_ref().unwrap_or(&empty);
    let path = annotations
        .get(PATH_ANNOTATION)
        .filter(|path| path.starts_with('/'));
    let path = path.map_or(PATH, String::as_str);
    let port = port(node).ok_or(Error::NoAddress)?;
    CallTarget::of(&format!("https://{host}:{port}{path}")).map_err(Error::Target)
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn where_a_node_is_read() {
        let check = |node: serde_json::Value, expected: Option<&str>| {
            let node: Node = serde_json::from_value(node).unwrap();
            let found = target(&node)
                .ok()
                .map(|target| format!("{}{}", target.address, target.path));
            assert_eq!(found.as_deref(), expected);
        };
        let port = json!({"kubeletEndpoint": {"Port": 10250}});
        let hostname = json!({"type": "Hostname", "address": "n"});
        let address = |ip: &str| json!([hostname, {"type": "InternalIP", "address": ip}]);
        check(
            json!({"status": {"daemonEndpoints": port, "addresses": address("10.0.0.1")}}),
            Some("10.0.0.1:10250/metrics/resource"),
        );
        check(
            json!({"status": {"daemonEndpoints": port, "addresses": address("fd00::1")}}),
            Some("[fd00::1]:10250/metrics/resource"),
        );
        check(
            json!({"metadata": {"annotations": {PATH_ANNOTATION: "/other"}},
                "status": {"daemonEndpoints": port, "addresses": [hostname]}}),
            Some("n:10250/other"),
        );
        check(json!({"status": {"addresses": address("10.0.0.1")}}), None);
        check(json!({"status": {"daemonEndpoints": port}}), None);
    }
}
