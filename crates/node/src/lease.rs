//! The node's heartbeat: a Lease in `kube-node-lease`, renewed every ten seconds.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use skiff_client::ErrorExt;

use crate::kubelet::Kubelet;
use crate::objects::error_message;

const NAMESPACE: &str = "kube-node-lease";
const DURATION_SECONDS: i32 = 40;
const RENEW_PERIOD: Duration = Duration::from_secs(10);
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(7);

impl Kubelet {
    pub async fn run_lease(self: Arc<Self>) {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let mut held: Option<Lease> = None;
        let mut retry = FIRST_RETRY;
        loop {
            let pause = match self.renew(&api, held.take()).await {
                Ok(Some(lease)) => {
                    held = Some(lease);
                    retry = FIRST_RETRY;
                    RENEW_PERIOD
                }
                Ok(None) => FIRST_RETRY,
                Err(error) => {
                    tracing::debug!(
                        error = error_message(&error),
                        "cannot renew the node's lease; trying again"
                    );
                    let pause = retry;
                    retry = (retry * 2).min(LAST_RETRY);
                    pause
                }
            };
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// `None`: the node is not registered yet, and without it the lease would have no owner.
    async fn renew(&self, api: &Api<Lease>, held: Option<Lease>) -> Result<Option<Lease>, kube::Error> {
        let name = &self.config.node_name;
        let current = match held {
            Some(lease) => Some(lease),
            None => api.get_opt(name).await?,
        };
        let now = Some(MicroTime(Timestamp::now()));
        match current {
            Some(mut lease) => {
                // It may have been made before the node was.
                let owners = lease.metadata.owner_references.get_or_insert_default();
                if owners.is_empty() {
                    owners.extend(self.node_owner().await?);
                }
                let spec = lease.spec.get_or_insert_default();
                spec.holder_identity = Some(name.clone());
                spec.lease_duration_seconds = Some(DURATION_SECONDS);
                spec.renew_time = now;
                api.replace(name, &PostParams::default(), &lease).await.map(Some)
            }
            None => {
                let Some(owner) = self.node_owner().await? else {
                    return Ok(None);
                };
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        namespace: Some(NAMESPACE.to_owned()),
                        owner_references: Some(vec![owner]),
                        ..Default::default()
                    },
                    spec: Some(LeaseSpec {
                        holder_identity: Some(name.clone()),
                        lease_duration_seconds: Some(DURATION_SECONDS),
                        renew_time: now,
                        ..Default::default()
                    }),
                };
                match api.create(&PostParams::default(), &lease).await {
                    Err(error) if error.is_already_exists() => api.get(name).await.map(Some),
                    other => other.map(Some),
                }
            }
        }
    }

    /// The node as owner, so that the lease goes with it. `None` while the node is not registered.
    async fn node_owner(&self) -> Result<Option<OwnerReference>, kube::Error> {
        let name = &self.config.node_name;
        let known = self
            .node
            .list()
            .first()
            .and_then(|node| node.metadata.uid.clone());
        let uid = match known {
            Some(uid) => Some(uid),
            None => {
                let node = Api::<Node>::all(self.client.clone()).get_opt(name).await?;
                node.and_then(|node| node.metadata.uid)
            }
        };
        Ok(uid.map(|uid| OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: name.clone(),
            uid,
            ..Default::default()
        }))
    }
}
