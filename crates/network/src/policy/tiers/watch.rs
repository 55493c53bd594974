//! The policies of both tiers, watched while their definitions are installed. Of definitions only the three are watched:
//! a cluster may have many, and they are large.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use skiff_client::{Client, DefinedKind, Definition, Informer, InformerFactory, Noted};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy, TierObject, TierPolicy};

/// An API server that has just started refuses what its roles allow until it has read them.
const ROLES_PATIENCE: Duration = Duration::from_secs(30);

/// All objects of the three kinds.
#[derive(Default)]
pub(super) struct TierObjects {
    pub(super) cluster: Vec<Arc<ClusterNetworkPolicy>>,
    pub(super) admin: Vec<Arc<AdminNetworkPolicy>>,
    pub(super) baseline: Vec<Arc<BaselineAdminNetworkPolicy>>,
}

pub(in crate::policy) struct Watch {
    client: Client,
    stop: CancellationToken,
    changed: Arc<Notify>,
    noted: Noted,
    definitions: [Informer<Definition>; 3],
    cluster: DefinedKind<ClusterNetworkPolicy>,
    admin: DefinedKind<AdminNetworkPolicy>,
    baseline: DefinedKind<BaselineAdminNetworkPolicy>,
    /// Problems that the log has.
    logged: BTreeSet<String>,
    /// Definitions that the log says are not served.
    unserved: BTreeSet<String>,
}

impl Watch {
    /// Watches until `stop`.
    pub(in crate::policy) fn new(
        client: Client,
        factory: &InformerFactory,
        stop: &CancellationToken,
    ) -> Watch {
        let changed = Arc::new(Notify::new());
        let news = changed.clone();
        let noted: Noted = Arc::new(move || news.notify_one());
        let definitions = definition_names().map(|name| {
            let informer: Informer<Definition> =
                factory.partial(None, Some(&format!("metadata.name={name}")));
            let news = noted.clone();
            informer.subscribe(move |_| news());
            informer
        });
        Watch {
            client,
            stop: stop.clone(),
            changed,
            noted,
            definitions,
            cluster: DefinedKind::default(),
            admin: DefinedKind::default(),
            baseline: DefinedKind::default(),
            logged: BTreeSet::new(),
            unserved: BTreeSet::new(),
        }
    }

    pub(in crate::policy) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns when all policies that there are are known. Who may not read definitions does not wait: a cluster whose
    /// API server is another's may have roles of an earlier release.
    pub(in crate::policy) async fn known(&mut self) -> Vec<TierPolicy> {
        let definitions: Api<Definition> = Api::all(self.client.clone());
        let [name, ..] = definition_names();
        let one = ListParams::default().fields(&format!("metadata.name={name}"));
        let synced = async {
            for informer in &self.definitions {
                informer.synced().await;
            }
        };
        match definitions.list(&one).await {
            // Also the answer of a server that has not read its roles yet.
            Err(error) if is_code(&error, 403) => {
                if tokio::time::timeout(ROLES_PATIENCE, synced).await.is_err() {
                    tracing::warn!(
                        "the node may not read CustomResourceDefinitions: ClusterNetworkPolicies and AdminNetworkPolicies are not enforced until `skiff node-roles` is applied again"
                    );
                }
            }
            _ => synced.await,
        }
        loop {
            if let Some(policies) = self.policies() {
                return policies;
            }
            self.changed().await;
        }
    }

    /// All policies; `None` while those of an installed kind are not yet known.
    pub(in crate::policy) fn policies(&mut self) -> Option<Vec<TierPolicy>> {
        let objects = self.objects()?;
        let cluster = objects.cluster.iter().map(|object| object.read());
        let admin = objects.admin.iter().map(|object| object.read());
        let baseline = objects.baseline.iter().map(|object| object.read());
        let policies: Vec<TierPolicy> = cluster.chain(admin).chain(baseline).collect();
        self.log_problems(&policies);
        Some(policies)
    }

    /// Also where nobody writes the status: on nodes of another's API server.
    fn log_problems(&mut self, policies: &[TierPolicy]) {
        let of_policy = |policy: &TierPolicy| {
            let shown = policy.shown();
            let problems = policy.problems.iter();
            problems
                .map(move |problem| format!("{shown}: {problem}"))
                .collect::<Vec<_>>()
        };
        let present: BTreeSet<String> = policies.iter().flat_map(of_policy).collect();
        for problem in present.difference(&self.logged) {
            tracing::warn!("{problem}");
        }
        self.logged = present;
    }

    pub(super) fn objects(&mut self) -> Option<TierObjects> {
        let definitions: Vec<Arc<Definition>> = self.definitions.iter().flat_map(Informer::list).collect();
        let (client, stop, noted) = (&self.client, &self.stop, &self.noted);
        self.cluster.follow(&definitions, client, stop, noted);
        self.admin.follow(&definitions, client, stop, noted);
        self.baseline.follow(&definitions, client, stop, noted);
        let unserved: BTreeSet<String> = definitions
            .iter()
            .filter(|each| !is_served(each))
            .filter_map(|each| each.metadata.name.clone())
            .collect();
        for name in unserved.difference(&self.unserved) {
            tracing::warn!(
                "{name} are not served in the version that skiff knows: such policies are not enforced"
            );
        }
        self.unserved = unserved;
        Some(TierObjects {
            cluster: self.cluster.list()?,
            admin: self.admin.list()?,
            baseline: self.baseline.list()?,
        })
    }
}

fn is_served(definition: &Definition) -> bool {
    definition.serves::<ClusterNetworkPolicy>()
        || definition.serves::<AdminNetworkPolicy>()
        || definition.serves::<BaselineAdminNetworkPolicy>()
}

fn definition_names() -> [String; 3] {
    [
        Definition::name_of::<ClusterNetworkPolicy>(),
        Definition::name_of::<AdminNetworkPolicy>(),
        Definition::name_of::<BaselineAdminNetworkPolicy>(),
    ]
}

/// All policies as they are now, for who does not follow them.
pub async fn list(client: &Client) -> Result<Vec<TierPolicy>, kube::Error> {
    let mut policies = list_kind::<ClusterNetworkPolicy>(client).await?;
    policies.extend(list_kind::<AdminNetworkPolicy>(client).await?);
    policies.extend(list_kind::<BaselineAdminNetworkPolicy>(client).await?);
    Ok(policies)
}

fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// None of a kind that is not installed.
async fn list_kind<K>(client: &Client) -> Result<Vec<TierPolicy>, kube::Error>
where
    K: TierObject
        + Resource<Scope = k8s_openapi::ClusterResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api: Api<K> = Api::all(client.clone());
    match api.list(&ListParams::default()).await {
        Ok(listed) => Ok(listed.items.iter().map(TierObject::read).collect()),
        Err(error) if is_code(&error, 404) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
