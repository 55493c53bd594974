//! The objects a pod refers to, fetched through the API one by one: the node may read only what its own
//! pods name, so there is nothing to list.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};

/// All ClusterTrustBundles, and the version that they were listed or changed in.
#[derive(Clone, Default)]
pub struct TrustBundles {
    pub version: String,
    pub all: Arc<Vec<ClusterTrustBundle>>,
}

/// `Ok(None)` is "there is no such object"; the error is a sentence for the user.
#[async_trait]
pub trait Objects: Send + Sync {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<Arc<ConfigMap>>, String>;
    async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, String>;
    /// All of them.
    async fn trust_bundles(&self) -> Result<TrustBundles, String>;
    /// A missing claim is an error too: the user is told what the API said.
    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, String>;
    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String>;
    async fn token(
        &self,
        namespace: &str,
        service_account: &str,
        request: TokenRequest,
    ) -> Result<TokenRequest, String>;
    /// Keeps what is in the pod's volumes at hand, until it is forgotten. Safe to repeat.
    fn follow(&self, _pod: &Pod) {}
    fn forget(&self, _uid: &str) {}
}

pub struct ApiObjects {
    client: Client,
}

impl ApiObjects {
    pub fn new(client: Client) -> Self {
        ApiObjects { client }
    }
}

/// The API's own sentence where there is one.
pub fn error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

fn found<T>(result: Result<Option<T>, kube::Error>) -> Result<Option<Arc<T>>, String> {
    result
        .map(|object| object.map(Arc::new))
        .map_err(|error| error_message(&error))
}

#[async_trait]
impl Objects for ApiObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        found(
            Api::namespaced(self.client.clone(), namespace)
                .get_opt(name)
                .await,
        )
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, String> {
        found(
            Api::namespaced(self.client.clone(), namespace)
                .get_opt(name)
                .await,
        )
    }

    async fn trust_bundles(&self) -> Result<TrustBundles, String> {
        let api: Api<ClusterTrustBundle> = Api::all(self.client.clone());
        match api.list(&ListParams::default()).await {
            Ok(list) => Ok(TrustBundles {
                version: list.metadata.resource_version.unwrap_or_default(),
                all: Arc::new(list.items),
            }),
            Err(kube::Error::Api(status)) if status.code == 404 => Err(
                "ClusterTrustBundle projection is not supported: the API server does not serve certificates.k8s.io/v1beta1 clustertrustbundles".to_owned(),
            ),
            Err(error) => Err(error_message(&error)),
        }
    }

    async fn claim(&self, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        api.get(name).await.map_err(|e| error_message(&e))
    }

    async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, String> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        api.get(name).await.map_err(|e| error_message(&e))
    }

    async fn token(
        &self,
        namespace: &str,
        service_account: &str,
        request: TokenRequest,
    ) -> Result<TokenRequest, String> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        api.create_subresource("token", service_account, &PostParams::default(), &request)
            .await
            .map_err(|e| error_message(&e))
    }
}
