//! Removes the tracking finalizer from pods that no Job will count: their Job is gone or over, or they have none.
//! Without this such pods could never be deleted.

use std::sync::Arc;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use super::facts;
use crate::ownership::{self, BY_CONTROLLER};
use crate::{Context, Error};

struct Orphans {
    context: Context,
    jobs: Informer<Job>,
    pods: Informer<Pod>,
}

pub(super) async fn run(context: Context) {
    let reconciler = Arc::new(Orphans {
        jobs: context.informers.informer(),
        pods: context.informers.informer(),
        context: context.clone(),
    });
    context
        .controller("job_orphan_pod", reconciler)
        .workers(context.workers())
        .watches(|r| &r.pods, Orphans::woken_by_pod)
        .watches(|r| &r.jobs, Orphans::woken_by_job)
        .run()
        .await;
}

/// Who will count a pod.
#[derive(Debug, PartialEq, Eq)]
enum Counted {
    /// Its Job, or somebody else.
    Elsewhere,
    Nobody,
    /// Nobody, if this Job is really gone.
    NobodyWithout(String),
}

/// `job` answers the Job of a name in the pod's namespace.
fn counted_by(pod: &Pod, job: impl FnOnce(&str) -> Option<Arc<Job>>) -> Counted {
    let Some(controller) = ownership::controller_of(&pod.metadata) else {
        return Counted::Nobody;
    };
    let Some(key) = ownership::controlled_by::<Job>(&pod.metadata) else {
        return Counted::Elsewhere;
    };
    match job(&key.name).filter(|job| job.metadata.uid.as_deref() == Some(controller.uid.as_str())) {
        None => Counted::NobodyWithout(key.name),
        Some(job) if facts::is_managed_elsewhere(&job) => Counted::Elsewhere,
        Some(job) if facts::finished(&job).is_some() => Counted::Nobody,
        Some(_) => Counted::Elsewhere,
    }
}

impl Orphans {
    fn counted_by(&self, pod: &Pod) -> Counted {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        counted_by(pod, |name| self.jobs.get(namespace, name))
    }

    fn woken_by_pod(&self, change: &Change<Pod>) -> Option<Key> {
        let Change::Applied { new, .. } = change else {
            return None;
        };
        let orphan = facts::is_tracked(new) && self.counted_by(new) != Counted::Elsewhere;
        orphan.then(|| Key::of(&**new))
    }

    fn woken_by_job(&self, change: &Change<Job>) -> Vec<Key> {
        let job = match change {
            Change::Deleted { last } => last,
            Change::Applied { new, .. } if facts::finished(new).is_some() => new,
            Change::Applied { .. } => return Vec::new(),
        };
        let pods = self
            .pods
            .by_index(BY_CONTROLLER, job.metadata.uid.as_deref().unwrap_or_default());
        let tracked = pods.iter().filter(|pod| facts::is_tracked(pod));
        tracked.map(|pod| Key::of(&**pod)).collect()
    }
}

impl Reconcile for Orphans {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let pod = self.pods.get(&key.namespace, &key.name);
        let Some(pod) = pod.filter(|pod| facts::is_tracked(pod)) else {
            return Ok(Action::Done);
        };
        match self.counted_by(&pod) {
            Counted::Elsewhere => return Ok(Action::Done),
            Counted::Nobody => {}
            Counted::NobodyWithout(name) => {
                // The copy of the Jobs may be older than the one of the pods.
                let api: Api<Job> = Api::namespaced(self.context.client.clone(), &key.namespace);
                let live = api.get_opt(&name).await?.map(Arc::new);
                if counted_by(&pod, |_| live) == Counted::Elsewhere {
                    return Ok(Action::Done);
                }
            }
        }
        // A Job may have adopted the pod meanwhile: the version lets that one win.
        let patch = json!({"metadata": {"resourceVersion": pod.metadata.resource_version,
            "$deleteFromPrimitiveList/finalizers": [facts::TRACKING]}});
        let api: Api<Pod> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let params = PatchParams::default();
        match api
            .patch_metadata(&pod.name_any(), &params, &Patch::Strategic(patch))
            .await
        {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(Action::Done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn whose_pod() {
        let check = |controller: Value, job: Option<Value>, expected: Counted| {
            let references = if controller.is_null() {
                json!([])
            } else {
                json!([controller])
            };
            let pod = json!({"metadata": {"name": "p", "namespace": "ns", "ownerReferences": references}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let job = job.map(|job| Arc::new(serde_json::from_value::<Job>(job).unwrap()));
            assert_eq!(counted_by(&pod, |_| job), expected, "{controller}");
        };
        let owner = |kind: &str, version: &str| json!({"apiVersion": version, "kind": kind, "name": "j", "uid": "u", "controller": true});
        let job = |uid: &str, manager: Value, condition: &str| {
            json!({"metadata": {"uid": uid}, "spec": {"template": {}, "managedBy": manager},
                "status": {"conditions": [{"type": condition, "status": "True"}]}})
        };
        let ours = || owner("Job", "batch/v1");
        check(Value::Null, None, Counted::Nobody);
        check(owner("ReplicaSet", "apps/v1"), None, Counted::Elsewhere);
        check(owner("Job", "example.com/v1"), None, Counted::Elsewhere);
        check(ours(), None, Counted::NobodyWithout("j".into()));
        check(
            ours(),
            Some(job("other", Value::Null, "Suspended")),
            Counted::NobodyWithout("j".into()),
        );
        check(
            ours(),
            Some(job("u", Value::Null, "Suspended")),
            Counted::Elsewhere,
        );
        check(ours(), Some(job("u", Value::Null, "Failed")), Counted::Nobody);
        check(
            ours(),
            Some(job("u", json!("example.com/other"), "Failed")),
            Counted::Elsewhere,
        );
        check(
            ours(),
            Some(job("u", json!("kubernetes.io/job-controller"), "Complete")),
            Counted::Nobody,
        );
    }
}
