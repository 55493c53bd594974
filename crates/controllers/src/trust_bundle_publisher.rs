//! The ClusterTrustBundle publisher: one bundle holds the certificate by which the API server is verified. It is named after its
//! content, and bundles of the same signer with another content go.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, ClusterTrustBundleSpec};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use sha2::{Digest, Sha256};
use skiff_client::{Action, Client, ErrorExt, Informer, Key, Reconcile};

use crate::{Context, Error};

const SIGNER: &str = "kubernetes.io/kube-apiserver-serving";
/// Every change of a bundle wakes the controller; the first look does not wait for one.
const PERIOD: Duration = Duration::from_secs(600);

/// What to write, in this order.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    create: Option<ClusterTrustBundle>,
    update: Option<ClusterTrustBundle>,
    delete: Vec<String>,
}

/// The name of the bundle with this content.
fn bundle_name(root_ca: &str) -> String {
    let hash = Sha256::digest(root_ca.as_bytes());
    let hash: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("{}:{hash}", SIGNER.replace('/', ":"))
}

fn plan(bundles: &[Arc<ClusterTrustBundle>], root_ca: &str) -> Plan {
    let name = bundle_name(root_ca);
    let has_name = |bundle: &ClusterTrustBundle| bundle.metadata.name.as_deref() == Some(&*name);
    let mut plan = Plan::default();
    match bundles.iter().find(|bundle| has_name(bundle)) {
        None => {
            let mut wanted = ClusterTrustBundle {
                spec: ClusterTrustBundleSpec {
                    signer_name: Some(SIGNER.to_owned()),
                    trust_bundle: root_ca.to_owned(),
                },
                ..Default::default()
            };
            wanted.metadata.name = Some(name.clone());
            plan.create = Some(wanted);
        }
        Some(present) if present.spec.trust_bundle != root_ca => {
            let mut wanted = (**present).clone();
            wanted.spec.trust_bundle = root_ca.to_owned();
            plan.update = Some(wanted);
        }
        Some(_) => {}
    }
    let others = bundles.iter().filter(|bundle| !has_name(bundle));
    plan.delete = others.filter_map(|bundle| bundle.metadata.name.clone()).collect();
    plan.delete.sort_unstable();
    plan
}

struct Publisher {
    client: Client,
    root_ca: String,
    bundles: Informer<ClusterTrustBundle>,
}

pub(crate) async fn run(context: Context) {
    if context.config.root_ca_pem.is_empty() {
        return;
    }
    let field = format!("spec.signerName={SIGNER}");
    let reconciler = Arc::new(Publisher {
        client: context.client.clone(),
        root_ca: context.config.root_ca_pem.clone(),
        bundles: context.informers.filtered(None, Some(&field)),
    });
    context
        .controller("ca_cert_publisher_cluster_trust_bundles", reconciler)
        .watches_own(|r| &r.bundles, |_, _| [Key::new("", "")])
        .every(PERIOD, |_| vec![Key::new("", "")])
        .run()
        .await;
}

impl Reconcile for Publisher {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, _: Key) -> Result<Action, Error> {
        let plan = plan(&self.bundles.list(), &self.root_ca);
        let api: Api<ClusterTrustBundle> = Api::all(self.client.clone());
        if let Some(bundle) = plan.create {
            match api.create(&PostParams::default(), &bundle).await {
                Err(error) if !error.is_already_exists() => return Err(error.into()),
                _ => {}
            }
        }
        if let Some(bundle) = plan.update {
            let name = bundle.metadata.name.clone().unwrap_or_default();
            api.replace(&name, &PostParams::default(), &bundle).await?;
        }
        let mut failed = None;
        for name in plan.delete {
            if let Err(error) = api.delete(&name, &DeleteParams::default()).await
                && !error.is_not_found()
            {
                failed = Some(error);
            }
        }
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(Action::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bundle_is_kept() {
        let made = plan(&[], "PEM").create.unwrap();
        // The first 12 bytes of the content's SHA-256.
        assert_eq!(
            made.metadata.name.as_deref(),
            Some("kubernetes.io:kube-apiserver-serving:384fb9a44fabe158be2757b9")
        );
        let made = Arc::new(made);
        assert_eq!(plan(std::slice::from_ref(&made), "PEM"), Plan::default());
        let renewed = plan(std::slice::from_ref(&made), "NEW");
        assert_eq!(renewed.create.unwrap().spec.trust_bundle, "NEW");
        assert_eq!(renewed.delete, [made.metadata.name.clone().unwrap()]);
        let mut changed = (*made).clone();
        changed.spec.trust_bundle = "by someone".to_owned();
        let restored = plan(&[Arc::new(changed)], "PEM");
        assert_eq!(restored.update.unwrap().spec.trust_bundle, "PEM");
        assert!(restored.create.is_none() && restored.delete.is_empty());
    }
}
