//! The CronJob controller: starts a Job at each time of a schedule, keeps the last finished ones, and removes the rest.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use skiff_client::{Action, Change, ErrorExt, Informer, Key, Reconcile, WorkQueue, reference};

use crate::metrics::JobCreationSkew;
use crate::ownership::{self, BY_CONTROLLER};
use crate::{Context, Error, error_message, is_namespace_terminating};
use plan::{Decision, Event, Timing};

/// A CronJob that waits is looked at this often at least: no delay is longer than a clock can hold.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

struct CronJobs {
    context: Context,
    crons: Informer<CronJob>,
    jobs: Informer<Job>,
    queue: Arc<WorkQueue<Key>>,
    skew: JobCreationSkew,
}

pub(crate) async fn run(context: Context) {
    let queue = context.queue("cronjob");
    let reconciler = Arc::new(CronJobs {
        crons: context.informers.informer(),
        jobs: context.informers.informer(),
        queue: queue.clone(),
        skew: JobCreationSkew::new(context.metrics()),
        context: context.clone(),
    });
    reconciler.jobs.add_index(BY_CONTROLLER, ownership::by_controller);
    context
        .controller_over(queue, reconciler)
        .workers(context.workers())
        .watches(|r| &r.crons, CronJobs::woken_by_cron_job)
        .watches(
            |r| &r.jobs,
            |_, change| ownership::owners_of_change::<CronJob, Job>(change, |_| Vec::new()),
        )
        .run()
        .await;
}

fn timing(spec: &CronJobSpec) -> Result<Timing, Event> {
    Timing::of(spec, zone_of, TimeZone::system())
}

fn zone_of(name: &str) -> Option<TimeZone> {
    TimeZone::get(name).ok()
}

impl Reconcile for CronJobs {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(cron) = self.crons.get(&key.namespace, &key.name) else {
            return Ok(Action::Done);
        };
        let jobs = self.jobs.by_index(BY_CONTROLLER, &cron.uid().unwrap_or_default());
        let mut cron = (*cron).clone();
        let mut status = cron.status.clone().unwrap_or_default();
        if plan::has_unknown(&status, &jobs) {
            // Somebody else may have noted the Job already: the API knows.
            let api: Api<CronJob> = Api::namespaced(self.context.client.clone(), &key.namespace);
            match api.get_opt(&key.name).await? {
                Some(live) if live.metadata.uid == cron.metadata.uid => cron = live,
                _ => return Ok(Action::Done),
            }
            status = cron.status.clone().unwrap_or_default();
        }
        let before = status.clone();
        let result = self.sync(&cron, &jobs, &mut status).await;
        if status != before {
            let mut updated = cron.clone();
            updated.status = Some(status);
            let api: Api<CronJob> = Api::namespaced(self.context.client.clone(), &key.namespace);
            api.replace_status(&key.name, &PostParams::default(), &updated)
                .await?;
        }
        result
    }
}

impl CronJobs {
    /// A new schedule or time zone waits for its next time; other changes are looked at now.
    fn woken_by_cron_job(&self, change: &Change<CronJob>) -> Option<Key> {
        let key = Key::of(&**change.object());
        if let Change::Applied { old: Some(old), new } = change
            && (&old.spec.schedule, &old.spec.time_zone) != (&new.spec.schedule, &new.spec.time_zone)
        {
            let timing = timing(&new.spec).ok();
            let wait = timing.and_then(|timing| plan::until_next(new, &timing, Timestamp::now()));
            // Without a next time something is wrong with the schedule: the reconcile says what.
            let Some(wait) = wait else {
                return Some(key);
            };
            self.queue.add_after(key, wait.min(MAX_WAIT), None);
            return None;
        }
        Some(key)
    }

    fn tell(&self, cron: &CronJob, events: impl IntoIterator<Item = Event>) {
        let about = reference(cron);
        for (type_, reason, message) in events {
            self.context.events.event(&about, type_, reason, message);
        }
    }

    fn job_api(&self, cron: &CronJob) -> Api<Job> {
        Api::namespaced(self.context.client.clone(), &cron.namespace().unwrap_or_default())
    }

    /// Brings `status` up to date, also where it ends with an error.
    async fn sync(
        &self,
        cron: &CronJob,
        jobs: &[Arc<Job>],
        status: &mut CronJobStatus,
    ) -> Result<Action, Error> {
        let spec = &cron.spec;
        for job in plan::beyond_history(spec, jobs) {
            // One that cannot be deleted is tried again with the next change.
            let _ = self.delete(cron, status, &job).await;
        }
        let gone = self.gone(cron, jobs, status).await?;
        self.tell(cron, plan::update_status(status, jobs, &gone));
        if cron.metadata.deletion_timestamp.is_some() {
            return Ok(Action::Done);
        }
        let timing = match timing(spec) {
            Ok(timing) => timing,
            Err(event) => {
                self.tell(cron, [event]);
                return Ok(Action::Done);
            }
        };
        if spec.suspend == Some(true) {
            return Ok(Action::Done);
        }
        self.tell(cron, plan::zone_in_schedule(spec));
        let now = Timestamp::now();
        let with_status = |status: &CronJobStatus| CronJob {
            status: Some(status.clone()),
            ..cron.clone()
        };
        let (decision, events) = plan::decide(&with_status(status), &timing, now);
        self.tell(cron, events);
        match decision {
            Decision::Stop => return Ok(Action::Done),
            Decision::Wait => {}
            Decision::Start { at, replace } => {
                if replace {
                    self.delete_active(cron, status).await?;
                }
                self.start(cron, status, at).await?;
            }
        }
        let wait = plan::until_next(&with_status(status), &timing, now);
        Ok(wait.map_or(Action::Done, |wait| Action::RequeueAfter(wait.min(MAX_WAIT))))
    }

    /// The uids of the Jobs in the status that do not exist any more.
    async fn gone(
        &self,
        cron: &CronJob,
        jobs: &[Arc<Job>],
        status: &CronJobStatus,
    ) -> Result<HashSet<String>, Error> {
        let api = self.job_api(cron);
        let mut gone = HashSet::new();
        for active in status.active.iter().flatten() {
            if jobs.iter().any(|job| job.metadata.uid == active.uid) {
                continue;
            }
            // The copy may be behind the status.
            let name = active.name.as_deref().unwrap_or_default();
            if api
                .get_opt(name)
                .await?
                .is_none_or(|live| live.metadata.uid != active.uid)
            {
                gone.extend(active.uid.clone());
            }
        }
        Ok(gone)
    }

    async fn delete(&self, cron: &CronJob, status: &mut CronJobStatus, job: &Job) -> Result<(), Error> {
        let name = job.name_any();
        match self
            .job_api(cron)
            .delete(&name, &DeleteParams::background())
            .await
        {
            Err(error) if !error.is_not_found() => {
                let message = format!("Deleted job: {}", error_message(&error));
                self.tell(cron, [("Warning", "FailedDelete", message)]);
                Err(error.into())
            }
            _ => {
                plan::forget(status, job.metadata.uid.as_deref());
                self.tell(
                    cron,
                    [("Normal", "SuccessfulDelete", format!("Deleted job {name}"))],
                );
                Ok(())
            }
        }
    }

    /// Deletes the Jobs that a new one replaces.
    async fn delete_active(&self, cron: &CronJob, status: &mut CronJobStatus) -> Result<(), Error> {
        for active in status.active.clone().unwrap_or_default() {
            match self
                .job_api(cron)
                .get(active.name.as_deref().unwrap_or_default())
                .await
            {
                Ok(job) => self.delete(cron, status, &job).await?,
                Err(error) => {
                    let message = format!("Get job: {}", error_message(&error));
                    self.tell(cron, [("Warning", "FailedGet", message)]);
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    async fn start(&self, cron: &CronJob, status: &mut CronJobStatus, at: Timestamp) -> Result<(), Error> {
        let api = self.job_api(cron);
        let job = plan::new_job(cron, at, cron.spec.time_zone.as_deref().and_then(zone_of));
        let started = match api.create(&PostParams::default(), &job).await {
            Ok(created) => {
                if let Some(time) = &created.metadata.creation_timestamp {
                    self.skew.created(at, time.0);
                }
                let message = format!("Created job {}", created.name_any());
                self.tell(cron, [("Normal", "SuccessfulCreate", message)]);
                created
            }
            Err(error) if is_namespace_terminating(&error) => return Ok(()),
            Err(error) if error.is_already_exists() => {
                // Made before, perhaps by us just before we were interrupted: then only the status lacks it.
                let Some(present) = api.get_opt(&job.name_any()).await? else {
                    return Err(error.into());
                };
                let owner = ownership::controller_of(&present.metadata).map(|owner| owner.uid.as_str());
                let known = status
                    .active
                    .iter()
                    .flatten()
                    .any(|active| active.uid == present.metadata.uid);
                if owner != cron.metadata.uid.as_deref() || known {
                    return Ok(());
                }
                present
            }
            Err(error) => {
                let message = format!("Error creating job: {}", error_message(&error));
                self.tell(cron, [("Warning", "FailedCreate", message)]);
                return Err(error.into());
            }
        };
        status.active.get_or_insert_default().push(reference(&started));
        status.last_schedule_time = Some(Time(at));
        Ok(())
    }
}
