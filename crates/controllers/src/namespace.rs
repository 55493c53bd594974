//! The namespace controller: empties a namespace that is being deleted, then lets it go.
//!
//! Pods go first, so that nothing they need is pulled away while they end. What cannot be removed is told
//! in the namespace's conditions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceCondition, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::core::{DynamicObject, PartialObjectMeta};
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use crate::discovery::{Discovery, Served};
use crate::{Context, Error, error_message};

const FINALIZER: &str = "kubernetes";
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(15);

struct Namespaces {
    client: Client,
    namespaces: Informer<Namespace>,
    pods: Informer<Pod>,
    /// How long to wait before the next look at a namespace that is not empty yet.
    waits: Mutex<BTreeMap<String, Duration>>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Namespaces {
        client: context.client.clone(),
        namespaces: context.informers.informer(),
        pods: context.informers.informer(),
        waits: Mutex::default(),
    });
    context
        .controller("namespace", reconciler)
        .workers(context.workers())
        .watches(|r| &r.namespaces, |_, change| woken_by_namespace(change))
        .watches(|r| &r.pods, Namespaces::woken_by_pod)
        .every(context.config.namespace_sync_period, |r| {
            let namespaces = r.namespaces.list();
            let deleting = namespaces
                .iter()
                .filter(|namespace| namespace.metadata.deletion_timestamp.is_some());
            deleting.map(|namespace| Key::of(&**namespace)).collect()
        })
        .run()
        .await;
}

fn woken_by_namespace(change: &Change<Namespace>) -> Option<Key> {
    let deleting = change.object().metadata.deletion_timestamp.is_some();
    (deleting && matches!(change, Change::Applied { .. })).then(|| Key::of(&**change.object()))
}

/// What a pass over the content found.
#[derive(Debug, Default)]
struct Pass {
    discovery_failures: Vec<(String, String)>,
    /// Versions that a server told and that are none.
    parsing_failures: Vec<String>,
    deletion_failures: Vec<String>,
    /// Instances that are still there, by resource.
    remaining: BTreeMap<String, usize>,
    /// Instances that wait for a finalizer, by finalizer.
    finalizers: BTreeMap<String, usize>,
}

impl Pass {
    fn is_clean(&self) -> bool {
        self.discovery_failures.is_empty()
            && self.parsing_failures.is_empty()
            && self.deletion_failures.is_empty()
            && self.remaining.is_empty()
            && self.finalizers.is_empty()
    }
}

/// The conditions that tell of a pass, as `(type, status, reason, message)`.
fn findings(pass: &Pass) -> Vec<(&'static str, bool, &'static str, String)> {
    let counted = |counts: &BTreeMap<String, usize>, verb: &str| {
        let all: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{name} {verb} {count} resource instances"))
            .collect();
        all.join(", ")
    };
    let mut findings = Vec::new();
    findings.push(if pass.discovery_failures.is_empty() {
        (
            "NamespaceDeletionDiscoveryFailure",
            false,
            "ResourcesDiscovered",
            "All resources successfully discovered".into(),
        )
    } else {
        let all: Vec<String> =
            pass.discovery_failures.iter().map(|(group, why)| format!("{group}: {why}")).collect();
        let message = format!(
            "Discovery failed for some groups, {} failing: unable to retrieve the complete list of server APIs: {}",
            all.len(),
            all.join(", ")
        );
        ("NamespaceDeletionDiscoveryFailure", true, "DiscoveryFailed", message)
    });
    findings.push(if pass.parsing_failures.is_empty() {
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            false,
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed".into(),
        )
    } else {
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            true,
            "GroupVersionParsingFailed",
            pass.parsing_failures.join(", "),
        )
    });
    findings.push(if pass.deletion_failures.is_empty() {
        (
            "NamespaceDeletionContentFailure",
            false,
            "ContentDeleted",
            "All content successfully deleted, may be waiting on finalization".into(),
        )
    } else {
        let message = format!(
            "Failed to delete all resource types, {} remaining: {}",
            pass.deletion_failures.len(),
            pass.deletion_failures.join(", ")
        );
        (
            "NamespaceDeletionContentFailure",
            true,
            "ContentDeletionFailed",
            message,
        )
    });
    findings.push(if pass.remaining.is_empty() {
        (
            "NamespaceContentRemaining",
            false,
            "ContentRemoved",
            "All content successfully removed".into(),
        )
    } else {
        let message = format!(
            "Some resources are remaining: {}",
            counted(&pass.remaining, "has")
        );
        ("NamespaceContentRemaining", true, "SomeResourcesRemain", message)
    });
    findings.push(if pass.finalizers.is_empty() {
        (
            "NamespaceFinalizersRemaining",
            false,
            "ContentHasNoFinalizers",
            "All content-preserving finalizers finished".into(),
        )
    } else {
        let message = format!(
            "Some content in the namespace has finalizers remaining: {}",
            counted(&pass.finalizers, "in")
        );
        (
            "NamespaceFinalizersRemaining",
            true,
            "SomeFinalizersRemain",
            message,
        )
    });
    findings
}

/// Merges the findings into the conditions; true if anything changed.
fn set_conditions(conditions: &mut Vec<NamespaceCondition>, pass: &Pass, now: Timestamp) -> bool {
    let mut changed = false;
    for (type_, status, reason, message) in findings(pass) {
        let status = if status { "True" } else { "False" };
        let mut wanted = NamespaceCondition {
            type_: type_.into(),
            status: status.into(),
            reason: Some(reason.into()),
            message: Some(message),
            last_transition_time: Some(Time(now)),
        };
        match conditions.iter_mut().find(|condition| condition.type_ == type_) {
            Some(present) => {
                if present.status == wanted.status {
                    wanted.last_transition_time = present.last_transition_time.clone();
                }
                if *present != wanted {
                    *present = wanted;
                    changed = true;
                }
            }
            None => {
                conditions.push(wanted);
                changed = true;
            }
        }
    }
    changed
}

impl Reconcile for Namespaces {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        // Asked of the server: the copy may still show the end of a namespace whose name is taken again, and
        // what is in the new one is none of its business.
        let api: Api<Namespace> = Api::all(self.client.clone());
        let Some(namespace) = api.get_opt(&key.name).await? else {
            self.waits.lock().remove(&key.name);
            return Ok(Action::Done);
        };
        let finalizers = namespace
            .spec
            .as_ref()
            .and_then(|spec| spec.finalizers.clone())
            .unwrap_or_default();
        if namespace.metadata.deletion_timestamp.is_none() || !finalizers.iter().any(|one| one == FINALIZER) {
            return Ok(Action::Done);
        }
        let pass = self.delete_content(&key.name).await?;
        let Some(mut live) = api.get_opt(&key.name).await? else {
            return Ok(Action::Done);
        };
        if live.metadata.uid != namespace.metadata.uid {
            return Ok(Action::Done);
        }
        let status = live.status.get_or_insert_default();
        let mut changed = status.phase.as_deref() != Some("Terminating");
        status.phase = Some("Terminating".into());
        let never_told = status.conditions.as_ref().is_none_or(Vec::is_empty);
        // A namespace that goes at once needs no story.
        if !(pass.is_clean() && never_told) {
            changed |= set_conditions(status.conditions.get_or_insert_default(), &pass, Timestamp::now());
        }
        if changed {
            live = api
                .replace_status(&key.name, &PostParams::default(), &live)
                .await?;
        }
        if !pass.is_clean() {
            let mut waits = self.waits.lock();
            let wait = waits.entry(key.name.clone()).or_insert(FIRST_WAIT);
            let this = *wait;
            *wait = (*wait * 2).min(LONGEST_WAIT);
            return Ok(Action::RequeueAfter(this));
        }
        self.waits.lock().remove(&key.name);
        if let Some(finalizers) = live.spec.as_mut().and_then(|spec| spec.finalizers.as_mut()) {
            finalizers.retain(|one| one != FINALIZER);
        }
        match api
            .replace_subresource("finalize", &key.name, &PostParams::default(), &live)
            .await
        {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

impl Namespaces {
    /// Pods are what a namespace waits for most; their end is known at once.
    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        let Change::Deleted { last } = change else {
            return None;
        };
        let name = last.metadata.namespace.as_deref().unwrap_or_default();
        let namespace = self.namespaces.get("", name)?;
        namespace
            .metadata
            .deletion_timestamp
            .is_some()
            .then(|| Key::new("", name))
    }

    async fn delete_content(&self, namespace: &str) -> Result<Pass, Error> {
        let discovery = Discovery::read(&self.client).await?;
        let mut pass = Pass {
            discovery_failures: discovery.failures.clone(),
            parsing_failures: discovery.unparsed.clone(),
            ..Default::default()
        };
        let mut served: Vec<&Served> = discovery
            .served
            .iter()
            .filter(|served| served.namespaced && served.can("delete") && served.can("list"))
            .collect();
        let is_pods = |served: &Served| served.resource.group.is_empty() && served.resource.plural == "pods";
        served.sort_by_key(|served| !is_pods(served));
        for served in served {
            if let Err(error) = self.delete_all(namespace, served, &mut pass).await {
                pass.deletion_failures.push(error_message(&error));
            }
            // A group that cannot be discovered does not hold up the others: only pods do.
            if is_pods(served) && !pass.remaining.is_empty() {
                break;
            }
        }
        Ok(pass)
    }

    /// Deletes all of a resource, and counts what is left after.
    async fn delete_all(&self, namespace: &str, served: &Served, pass: &mut Pass) -> Result<(), kube::Error> {
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &served.resource);
        let params = DeleteParams::background();
        let everything = ListParams::default();
        let mut left: Vec<PartialObjectMeta<DynamicObject>> = list(&api, &everything).await?;
        if left.is_empty() {
            return Ok(());
        }
        if served.can("deletecollection") {
            ignore_absent(api.delete_collection(&params, &everything).await.map(|_| ()))?;
        } else {
            for object in &left {
                let name = object.metadata.name.as_deref().unwrap_or_default();
                ignore_absent(api.delete(name, &params).await.map(|_| ()))?;
            }
        }
        left = list(&api, &everything).await?;
        if left.is_empty() {
            return Ok(());
        }
        pass.remaining.insert(
            format!("{}.{}", served.resource.plural, served.resource.group),
            left.len(),
        );
        for finalizer in left
            .iter()
            .flat_map(|object| object.metadata.finalizers.iter().flatten())
        {
            *pass.finalizers.entry(finalizer.clone()).or_default() += 1;
        }
        Ok(())
    }
}

async fn list(
    api: &Api<DynamicObject>,
    params: &ListParams,
) -> Result<Vec<PartialObjectMeta<DynamicObject>>, kube::Error> {
    match api.list_metadata(params).await {
        Ok(list) => Ok(list.items),
        Err(error) if error.is_not_found() => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn ignore_absent(outcome: Result<(), kube::Error>) -> Result<(), kube::Error> {
    outcome.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_namespace_that_came_back_is_left_alone() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            log.lock()
                .push(format!("{} {}", request.method(), request.uri().path()));
            let live = serde_json::json!({"metadata": {"name": "x", "uid": "new"},
                "spec": {"finalizers": ["kubernetes"]}});
            let body = kube::client::Body::from(live.to_string().into_bytes());
            async { Ok::<_, std::convert::Infallible>(http::Response::new(body)) }
        });
        let client = skiff_client::in_process(service, "default");
        let stop = tokio_util::sync::CancellationToken::new();
        stop.cancel();
        let informers = skiff_client::InformerFactory::new(client.clone(), stop);
        let controller = Namespaces {
            namespaces: informers.informer(),
            pods: informers.informer(),
            client,
            waits: Mutex::default(),
        };
        let action = controller.reconcile(Key::new("", "x")).await.unwrap();
        assert_eq!(action, Action::Done);
        assert_eq!(*asked.lock(), vec!["GET /api/v1/namespaces/x"]);
    }

    #[test]
    fn conditions_tell_what_is_left() {
        let mut conditions = Vec::new();
        let now = Timestamp::from_second(10).unwrap();
        let pass = Pass {
            remaining: [("pods.".to_owned(), 2)].into(),
            finalizers: [("a/b".to_owned(), 1)].into(),
            ..Default::default()
        };
        assert!(set_conditions(&mut conditions, &pass, now));
        let text = |conditions: &[NamespaceCondition], type_: &str| {
            let condition = conditions
                .iter()
                .find(|condition| condition.type_ == type_)
                .unwrap();
            format!(
                "{} {}",
                condition.status,
                condition.message.clone().unwrap_or_default()
            )
        };
        assert_eq!(
            text(&conditions, "NamespaceContentRemaining"),
            "True Some resources are remaining: pods. has 2 resource instances"
        );
        assert_eq!(
            text(&conditions, "NamespaceFinalizersRemaining"),
            "True Some content in the namespace has finalizers remaining: a/b in 1 resource instances"
        );
        assert!(!set_conditions(&mut conditions, &pass, now));
        assert!(set_conditions(&mut conditions, &Pass::default(), now));
        assert_eq!(
            text(&conditions, "NamespaceContentRemaining"),
            "False All content successfully removed"
        );
    }
}
