//! The TTL-after-finished controller: deletes a finished Job, and its pods with it, when its
//! `ttlSecondsAfterFinished` are over.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile};

use crate::job::finished;
use crate::metrics::JobDeletions;
use crate::{Context, Error, seconds_until};

struct FinishedJobs {
    context: Context,
    jobs: Informer<Job>,
    deletions: JobDeletions,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(FinishedJobs {
        jobs: context.informers.informer(),
        deletions: JobDeletions::new(context.metrics()),
        context: context.clone(),
    });
    let woken = |_: &FinishedJobs, change: &Change<Job>| match change {
        Change::Applied { new, .. } if expiry(new).is_some() => Some(Key::of(&**new)),
        _ => None,
    };
    context
        .controller("ttl_jobs_to_delete", reconciler)
        .workers(context.workers())
        .watches(|r| &r.jobs, woken)
        .run()
        .await;
}

/// When a Job is to be deleted; `None` if it is not over, has no TTL, or goes already.
fn expiry(job: &Job) -> Option<Timestamp> {
    let ttl = job.spec.as_ref()?.ttl_seconds_after_finished?;
    if job.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let finished = finished(job)?.last_transition_time.as_ref()?.0;
    finished.checked_add(SignedDuration::from_secs(ttl.into())).ok()
}

impl Reconcile for FinishedJobs {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let wait = |job: &Job| expiry(job).map(|at| seconds_until(at, Timestamp::now()));
        let due_in = self.jobs.get(&key.namespace, &key.name).as_deref().and_then(wait);
        match due_in {
            None => return Ok(Action::Done),
            Some(left) if left > Duration::ZERO => return Ok(Action::RequeueAfter(left)),
            Some(_) => {}
        }
        // The TTL may have been changed since: the API decides, not the copy.
        let api: Api<Job> = Api::namespaced(self.context.client.clone(), &key.namespace);
        let Some(live) = api.get_opt(&key.name).await? else {
            return Ok(Action::Done);
        };
        match wait(&live) {
            None => return Ok(Action::Done),
            Some(left) if left > Duration::ZERO => return Ok(Action::RequeueAfter(left)),
            Some(_) => {}
        }
        let expired = expiry(&live);
        let params = DeleteParams::foreground().preconditions(Preconditions {
            uid: live.metadata.uid,
            resource_version: None,
        });
        match api.delete(&key.name, &params).await {
            Ok(_) => {
                expired.into_iter().for_each(|at| self.deletions.deleted(at));
                Ok(Action::Done)
            }
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn expiries() {
        let check = |ttl: Value, condition: Value, deleted: Value, expected: Option<&str>| {
            let job: Job = serde_json::from_value(json!({"metadata": {"deletionTimestamp": deleted},
                "spec": {"template": {}, "ttlSecondsAfterFinished": ttl}, "status": {"conditions": [condition]}}))
            .unwrap();
            assert_eq!(
                expiry(&job).map(|at| at.to_string()).as_deref(),
                expected,
                "{ttl} {condition}"
            );
        };
        let ended = |type_: &str, status: &str| json!({"type": type_, "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        check(
            json!(60),
            ended("Complete", "True"),
            Value::Null,
            Some("2026-01-01T00:01:00Z"),
        );
        check(
            json!(0),
            ended("Failed", "True"),
            Value::Null,
            Some("2026-01-01T00:00:00Z"),
        );
        check(json!(60), ended("Failed", "False"), Value::Null, None);
        check(json!(60), ended("FailureTarget", "True"), Value::Null, None);
        check(
            json!(60),
            ended("Complete", "True"),
            json!("2026-01-01T00:00:00Z"),
            None,
        );
        check(Value::Null, ended("Complete", "True"), Value::Null, None);
        check(
            json!(60),
            json!({"type": "Complete", "status": "True"}),
            Value::Null,
            None,
        );
    }
}
