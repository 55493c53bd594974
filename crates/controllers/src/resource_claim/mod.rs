//! The resource claim controller: makes the ResourceClaims that pods ask for by template, reserves allocated claims for
//! pods that came past the scheduler, and frees claims whose pods are done. Claims of PodGroups are alpha and not here.

mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, reference};

use crate::{Context, Error, error_message};
use plan::Named;

const FIELD_MANAGER: &str = "ResourceClaimController";
/// Pods by the claims that they use.
const PODS_BY_CLAIM: &str = "resource-claim/claim";
const PODS_BY_TEMPLATE: &str = "resource-claim/template";
/// Claims by the uid of the pod that they were made for.
const CLAIMS_BY_POD: &str = "resource-claim/pod";

fn pods_by_claim(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let names = plan::claim_names(pod).into_iter();
    names.map(|name| format!("{namespace}/{name}")).collect()
}

fn pods_by_template(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let templates = plan::entries(pod).filter_map(|entry| entry.resource_claim_template_name.as_ref());
    templates.map(|name| format!("{namespace}/{name}")).collect()
}

fn claims_by_pod(claim: &ResourceClaim) -> Vec<String> {
    let owner = plan::owning_pod(claim);
    owner.map(|(_, uid)| uid.to_owned()).into_iter().collect()
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Item {
    Pod(Key),
    Claim(Key),
}

struct ResourceClaims {
    context: Context,
    pods: Informer<Pod>,
    claims: Informer<ResourceClaim>,
    templates: Informer<ResourceClaimTemplate>,
}

pub(crate) async fn run(context: Context) {
    let controller = Arc::new(ResourceClaims {
        pods: context.informers.informer(),
        claims: context.informers.informer(),
        templates: context.informers.informer(),
        context: context.clone(),
    });
    controller.pods.add_index(PODS_BY_CLAIM, pods_by_claim);
    controller.pods.add_index(PODS_BY_TEMPLATE, pods_by_template);
    controller.claims.add_index(CLAIMS_BY_POD, claims_by_pod);
    context
        .controller("resource_claim", controller)
        .workers(context.workers())
        .watches(|c| &c.pods, |_, change| woken_by_pod(change))
        .watches(|c| &c.claims, ResourceClaims::woken_by_claim)
        .watches(|c| &c.templates, ResourceClaims::woken_by_template)
        .run()
        .await;
}

fn woken_by_pod(change: &Change<Pod>) -> Vec<Item> {
    let pod = change.object();
    let namespace = pod.namespace().unwrap_or_default();
    let mut items = Vec::new();
    if matches!(change, Change::Deleted { .. }) || plan::is_done(pod) {
        let names = plan::claim_names(pod).into_iter();
        items.extend(names.map(|name| Item::Claim(Key::new(namespace.clone(), name))));
    }
    let lives = matches!(change, Change::Applied { .. }) && pod.metadata.deletion_timestamp.is_none();
    if lives && plan::entries(pod).next().is_some() {
        items.push(Item::Pod(Key::of(&**pod)));
    }
    items
}

impl ResourceClaims {
    fn woken_by_claim(&self, change: &Change<ResourceClaim>) -> Vec<Item> {
        let key = Key::of(&**change.object());
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key.to_string());
        let mut items: Vec<Item> = pods.iter().map(|pod| Item::Pod(Key::of(&**pod))).collect();
        if matches!(change, Change::Applied { .. }) {
            items.push(Item::Claim(key));
        }
        items
    }

    fn woken_by_template(&self, change: &Change<ResourceClaimTemplate>) -> Vec<Item> {
        let key = Key::of(&**change.object()).to_string();
        let pods = self.pods.by_index(PODS_BY_TEMPLATE, &key);
        pods.iter().map(|pod| Item::Pod(Key::of(&**pod))).collect()
    }

    fn api(&self, namespace: &str) -> Api<ResourceClaim> {
        Api::namespaced(self.context.client.clone(), namespace)
    }

    async fn sync_pod(&self, key: &Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(Action::Done);
        }
        let mut made = Vec::new();
        for entry in plan::entries(&pod) {
            match self.make(&pod, entry).await {
                Ok(Some(name)) => made.push(json!({"name": entry.name, "resourceClaimName": name})),
                Ok(None) => {}
                Err(message) => {
                    let message = format!("PodResourceClaim {}: {message}", entry.name);
                    let events = &self.context.events;
                    events.event(
                        &reference(&*pod),
                        "Warning",
                        "FailedResourceClaimCreation",
                        message.clone(),
                    );
                    return Err(Error::Other(message));
                }
            }
        }
        if !made.is_empty() {
            let status = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": key.name},
                "status": {"resourceClaimStatuses": made}});
            let pods: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            pods.patch_status(&key.name, &parameters, &Patch::Apply(&status))
                .await?;
            // Its event brings the pod back for the rest.
            return Ok(Action::Done);
        }
        self.reserve(&pod).await
    }

    /// Makes the claim of an entry, or finds it; its name, if the pod's status does not have it yet.
    async fn make(&self, pod: &Pod, entry: &PodResourceClaim) -> Result<Option<String>, String> {
        let namespace = pod.namespace().unwrap_or_default();
        match plan::name(pod, entry) {
            Named::ByUser(_) | Named::NotNeeded => return Ok(None),
            Named::Made(name) => {
                let present = self.claims.get(&namespace, name);
                if present.is_some_and(|claim| plan::is_owned_by(&claim, pod)) {
                    return Ok(None);
                }
            }
            Named::NotMadeYet => {}
        }
        let Some(template) = &entry.resource_claim_template_name else {
            return Ok(None);
        };
        let of_pod = self
            .claims
            .by_index(CLAIMS_BY_POD, &pod.uid().unwrap_or_default());
        let is_for =
            |claim: &&Arc<ResourceClaim>| claim.annotations().get(plan::POD_CLAIM) == Some(&entry.name);
        if let Some(claim) = of_pod.iter().find(is_for) {
            return Ok(Some(claim.name_any()));
        }
        let template = self.templates.get(&namespace, template).ok_or_else(|| {
            format!(
                "resource claim template {template:?}: resourceclaimtemplate.resource.k8s.io {template:?} not found"
            )
        })?;
        let claim = plan::claim_from(pod, entry, &template);
        match self.api(&namespace).create(&PostParams::default(), &claim).await {
            Ok(made) => Ok(Some(made.name_any())),
            Err(error) => Err(format!("create ResourceClaim : {}", error_message(&error))),
        }
    }

    /// The scheduler reserves claims before it binds; a pod that was bound by others has to be helped.
    async fn reserve(&self, pod: &Pod) -> Result<Action, Error> {
        if skiff_pods::state::node_name(pod).is_empty() || plan::is_done(pod) {
            return Ok(Action::Done);
        }
        let namespace = pod.namespace().unwrap_or_default();
        for entry in plan::entries(pod) {
            let (name, of_pod) = match plan::name(pod, entry) {
                Named::ByUser(name) => (name, false),
                Named::Made(name) => (name, true),
                Named::NotNeeded | Named::NotMadeYet => continue,
            };
            let Some(claim) = self.claims.get(&namespace, name) else {
                return Ok(Action::Done);
            };
            if of_pod && !plan::is_owned_by(&claim, pod) {
                return Err(Error::Other(format!(
                    "ResourceClaim {namespace}/{name} was not created for Pod {namespace}/{} (Pod is not owner)",
                    pod.name_any()
                )));
            }
            if let Some(wanted) = plan::reserve(&claim, pod) {
                self.api(&namespace)
                    .replace_status(name, &PostParams::default(), &wanted)
                    .await?;
            }
        }
        Ok(Action::Done)
    }

    async fn sync_claim(&self, key: &Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let mut gone = Vec::new();
        for consumer in plan::reserved(&claim)
            .iter()
            .filter(|consumer| plan::is_pod(consumer))
        {
            if self.is_gone(&key.namespace, consumer).await? {
                gone.push(consumer.uid.clone());
            }
        }
        let remaining = plan::remaining(&claim, |consumer| gone.contains(&consumer.uid));
        let unused = remaining.is_empty();
        let release = plan::release(&claim, remaining);
        let api = self.api(&key.namespace);
        let mut latest = (*claim).clone();
        if let Some(wanted) = &release.status {
            latest = api
                .replace_status(&key.name, &PostParams::default(), wanted)
                .await?;
        }
        if release.remove_finalizer {
            latest
                .finalizers_mut()
                .retain(|finalizer| finalizer != plan::FINALIZER);
            api.replace(&key.name, &PostParams::default(), &latest).await?;
        }
        // The garbage collector deletes it with its pod; a pod that is done may stay for long.
        if unused
            && claim.metadata.deletion_timestamp.is_none()
            && let Some((name, uid)) = plan::owning_pod(&claim)
            && let Some(pod) = self.pods.get(&key.namespace, name)
            && (pod.uid().as_deref() != Some(uid) || plan::is_done(&pod))
        {
            match api.delete(&key.name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(Action::Done)
    }

    /// Whether a pod does not use its claim any more. One that the copy does not show is asked for: the scheduler may
    /// have reserved the claim for a pod that is new.
    async fn is_gone(
        &self,
        namespace: &str,
        consumer: &ResourceClaimConsumerReference,
    ) -> Result<bool, Error> {
        if let Some(pod) = self.pods.get(namespace, &consumer.name) {
            return Ok(pod.uid().as_ref() != Some(&consumer.uid) || plan::is_done(&pod));
        }
        let pods: Api<Pod> = Api::namespaced(self.context.client.clone(), namespace);
        let live = pods.get_opt(&consumer.name).await?;
        Ok(live.is_none_or(|pod| pod.uid().as_ref() != Some(&consumer.uid)))
    }
}

impl Reconcile for ResourceClaims {
    type Key = Item;
    type Error = Error;

    async fn reconcile(&self, item: Item) -> Result<Action, Error> {
        let done = match &item {
            Item::Pod(key) => self.sync_pod(key).await,
            Item::Claim(key) => self.sync_claim(key).await,
        };
        match done {
            Err(Error::Api(error)) if error.is_not_found() => Ok(Action::Done),
            other => other,
        }
    }
}
