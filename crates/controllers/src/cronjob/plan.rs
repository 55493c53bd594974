//! When a CronJob is due, which Jobs it starts and removes, and the status it shows. No I/O.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job};
use skiff_api::batch::cron::Schedule;

use crate::job::finished;
use crate::ownership::controller_reference;
use crate::seconds_until;

const SCHEDULED_AT: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// So that the clock has surely passed the time when the CronJob is looked at again.
const CLOCK_SKEW: Duration = Duration::from_millis(100);
/// More missed starts than this are worth a warning.
const MANY: i64 = 100;

/// Type, reason and message.
pub(crate) type Event = (&'static str, &'static str, String);

/// A schedule and the time zone in which it counts.
pub(crate) struct Timing {
    schedule: Schedule,
    zone: TimeZone,
}

impl Timing {
    /// The timing, or the event that says why there is none. `zone_of` looks a time zone up by its name; without a
    /// name the process's own serves.
    pub(crate) fn of(
        spec: &CronJobSpec,
        zone_of: impl Fn(&str) -> Option<TimeZone>,
        own: TimeZone,
    ) -> Result<Timing, Event> {
        let zone = match &spec.time_zone {
            Some(name) => zone_of(name).ok_or_else(|| {
                let message = format!("invalid timeZone: {name:?}: unknown time zone {name}");
                ("Warning", "UnknownTimeZone", message)
            })?,
            None => own,
        };
        let text = &spec.schedule;
        let unparseable = |why: String| {
            let message = format!("unparseable schedule: {text:?} : {why}");
            ("Warning", "UnparseableSchedule", message)
        };
        let schedule = Schedule::parse(text).map_err(unparseable)?;
        let zone = match &schedule.zone {
            Some(name) => zone_of(name).ok_or_else(|| {
                unparseable(format!("provided bad location {name}: unknown time zone {name}"))
            })?,
            None => zone,
        };
        Ok(Timing { schedule, zone })
    }

    fn next(&self, after: Timestamp) -> Option<Timestamp> {
        self.schedule.next(after, &self.zone)
    }
}

/// A warning for a time zone within the schedule, which only old CronJobs have.
pub(crate) fn zone_in_schedule(spec: &CronJobSpec) -> Option<Event> {
    let text = &spec.schedule;
    text.contains("TZ").then(|| {
        let message = format!(
            "CRON_TZ or TZ used in schedule {text:?} is not officially supported, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
        );
        ("Warning", "UnsupportedSchedule", message)
    })
}

/// The starts of a CronJob up to now.
#[derive(Debug, PartialEq)]
struct Starts {
    /// From when on starts are looked for.
    since: Timestamp,
    /// The last one that is due.
    latest: Option<Timestamp>,
    /// About how many there were.
    missed: i64,
}

/// The schedule is well formed, but its times do not follow one another, such as the 31st of February.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("time difference between two schedules is less than 1 second")]
struct Impossible;

fn starts(cron: &CronJob, timing: &Timing, deadline: bool, now: Timestamp) -> Result<Starts, Impossible> {
    let status = cron.status.as_ref();
    let last = status.and_then(|status| status.last_schedule_time.as_ref());
    let created = cron.metadata.creation_timestamp.as_ref();
    let mut since = last.or(created).map_or(now, |time| time.0);
    if let Some(seconds) = cron.spec.starting_deadline_seconds.filter(|_| deadline) {
        // Nothing is started that is due before this.
        let oldest = now.checked_sub(SignedDuration::from_secs(seconds));
        since = since.max(oldest.unwrap_or(Timestamp::MIN));
    }
    let starts = |latest, missed| Starts {
        since,
        latest,
        missed,
    };
    let first = timing.next(since).ok_or(Impossible)?;
    if now < first {
        return Ok(starts(None, 0));
    }
    let second = timing.next(first).ok_or(Impossible)?;
    if now < second {
        return Ok(starts(Some(first), 0));
    }
    let between = second.duration_since(first).as_secs();
    if between < 1 {
        return Err(Impossible);
    }
    // An estimate that takes all starts to be as far apart as the first two: it says where to look for the last one,
    // so that the work does not grow with the time that has passed.
    let missed = now.duration_since(first).as_secs() / between + 1;
    let skipped = SignedDuration::from_secs((missed - 2).max(0).saturating_mul(between));
    let from = first.checked_add(skipped).unwrap_or(first);
    Ok(starts(timing.schedule.latest(from, now, &timing.zone), missed))
}

/// How long until the next start.
pub(crate) fn until_next(cron: &CronJob, timing: &Timing, now: Timestamp) -> Option<Duration> {
    let from = match starts(cron, timing, false, now) {
        Ok(starts) => match starts.latest {
            Some(latest) => latest,
            None if starts.missed == 0 => starts.since,
            None => now,
        },
        Err(Impossible) => now,
    };
    Some(seconds_until(timing.next(from)?, now) + CLOCK_SKEW)
}

#[derive(Debug, PartialEq)]
pub(crate) enum Decision {
    /// Nothing is to be started now.
    Wait,
    /// Nothing will ever be started unless the CronJob changes.
    Stop,
    Start {
        at: Timestamp,
        /// The Jobs that still run are deleted before.
        replace: bool,
    },
}

/// Whether a Job is to be started, for a CronJob whose status is up to date.
pub(crate) fn decide(cron: &CronJob, timing: &Timing, now: Timestamp) -> (Decision, Vec<Event>) {
    let spec = &cron.spec;
    let found = match starts(cron, timing, true, now) {
        Ok(found) => found,
        Err(why) => {
            let message = format!("invalid schedule: {} : {why}", spec.schedule);
            return (Decision::Stop, vec![("Warning", "InvalidSchedule", message)]);
        }
    };
    let Some(at) = found.latest else {
        return (Decision::Wait, Vec::new());
    };
    let mut events = Vec::new();
    if found.missed > MANY {
        let message =
            "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        events.push(("Warning", "TooManyMissedTimes", message.to_owned()));
    }
    let deadline = spec.starting_deadline_seconds.map(SignedDuration::from_secs);
    if deadline.is_some_and(|deadline| at.checked_add(deadline).is_ok_and(|latest| latest < now)) {
        let shown = at.to_zoned(TimeZone::UTC).strftime("%a, %d %b %Y %H:%M:%S %z");
        let message = format!("Missed scheduled time to start a job: {shown}");
        events.push(("Warning", "MissSchedule", message));
        return (Decision::Wait, events);
    }
    let status = cron.status.clone().unwrap_or_default();
    let active = status.active.unwrap_or_default();
    let name = job_name(cron, at);
    let started = status.last_schedule_time.is_some_and(|last| last.0 == at);
    if started
        || active
            .iter()
            .any(|job| job.name.as_deref() == Some(name.as_str()))
    {
        return (Decision::Wait, events);
    }
    let policy = spec.concurrency_policy.as_deref();
    if policy == Some("Forbid") && !active.is_empty() {
        let message = "Not starting job because prior execution is running and concurrency policy is Forbid";
        events.push(("Normal", "JobAlreadyActive", message.to_owned()));
        return (Decision::Wait, events);
    }
    let replace = policy == Some("Replace");
    (Decision::Start { at, replace }, events)
}

/// The same start always has the same name, so that it cannot be made twice.
fn job_name(cron: &CronJob, at: Timestamp) -> String {
    let name = cron.metadata.name.as_deref().unwrap_or_default();
    format!("{name}-{}", at.as_second() / 60)
}

/// The Job of one start; its time is noted in the CronJob's time zone.
pub(crate) fn new_job(cron: &CronJob, at: Timestamp, zone: Option<TimeZone>) -> Job {
    let spec = &cron.spec;
    let template = spec.job_template.metadata.clone().unwrap_or_default();
    let local = at.to_zoned(zone.unwrap_or(TimeZone::UTC));
    let format = if local.offset().is_zero() {
        "%Y-%m-%dT%H:%M:%SZ"
    } else {
        "%Y-%m-%dT%H:%M:%S%:z"
    };
    let mut job = Job {
        spec: spec.job_template.spec.clone(),
        ..Default::default()
    };
    let mut annotations = template.annotations.unwrap_or_default();
    annotations.insert(SCHEDULED_AT.to_owned(), local.strftime(format).to_string());
    job.metadata.name = Some(job_name(cron, at));
    job.metadata.namespace = cron.metadata.namespace.clone();
    job.metadata.labels = template.labels;
    job.metadata.annotations = Some(annotations);
    job.metadata.owner_references = Some(vec![controller_reference(cron)]);
    job
}

fn is_active(status: &CronJobStatus, job: &Job) -> bool {
    let mut active = status.active.iter().flatten();
    active.any(|reference| reference.uid == job.metadata.uid)
}

pub(crate) fn forget(status: &mut CronJobStatus, uid: Option<&str>) {
    if let Some(active) = &mut status.active {
        active.retain(|reference| reference.uid.as_deref() != uid);
    }
    status.active = status.active.take().filter(|active| !active.is_empty());
}

/// True if a Job runs that the status does not know of.
pub(crate) fn has_unknown(status: &CronJobStatus, jobs: &[Arc<Job>]) -> bool {
    jobs.iter()
        .any(|job| finished(job).is_none() && !is_active(status, job))
}

/// Takes the Jobs that have finished, and those that are `gone`, out of the status.
pub(crate) fn update_status(
    status: &mut CronJobStatus,
    jobs: &[Arc<Job>],
    gone: &HashSet<String>,
) -> Vec<Event> {
    let mut events = Vec::new();
    for job in jobs {
        let name = job.metadata.name.as_deref().unwrap_or_default();
        let Some(end) = finished(job) else {
            if !is_active(status, job) {
                let message = format!("Saw a job that the controller did not create or forgot: {name}");
                events.push(("Warning", "UnexpectedJob", message));
            }
            continue;
        };
        if is_active(status, job) {
            forget(status, job.metadata.uid.as_deref());
            let message = format!("Saw completed job: {name}, condition: {}", end.type_);
            events.push(("Normal", "SawCompletedJob", message));
        }
        let completed = job
            .status
            .as_ref()
            .and_then(|status| status.completion_time.clone());
        if end.type_ == "Complete" && completed > status.last_successful_time {
            status.last_successful_time = completed;
        }
    }
    for reference in status.active.clone().unwrap_or_default() {
        if reference.uid.as_ref().is_some_and(|uid| gone.contains(uid)) {
            forget(status, reference.uid.as_deref());
            let name = reference.name.unwrap_or_default();
            events.push(("Normal", "MissingJob", format!("Active job went missing: {name}")));
        }
    }
    events
}

/// The finished Jobs that the history has no room for, oldest first.
pub(crate) fn beyond_history(spec: &CronJobSpec, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let limits = [
        ("Complete", spec.successful_jobs_history_limit),
        ("Failed", spec.failed_jobs_history_limit),
    ];
    let mut surplus = Vec::new();
    for (type_, limit) in limits {
        let Some(limit) = limit else { continue };
        let ended = |job: &&Arc<Job>| finished(job).is_some_and(|end| end.type_ == type_);
        let mut ended: Vec<&Arc<Job>> = jobs.iter().filter(ended).collect();
        ended.sort_by_key(|job| {
            let start = job.status.as_ref().and_then(|status| status.start_time.as_ref());
            (
                start.is_none(),
                start.map(|time| time.0),
                job.metadata.name.clone(),
            )
        });
        let count = ended.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        surplus.extend(ended.into_iter().take(count).cloned());
    }
    surplus
}
