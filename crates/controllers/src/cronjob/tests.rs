//! Tests of the plans of CronJobs.

use std::collections::HashSet;
use std::sync::Arc;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use serde_json::{Value, json};

use super::plan::{self, Decision, Timing};

fn cron(spec: Value, status: Value) -> CronJob {
    let mut whole = json!({"schedule": "0 * * * *", "jobTemplate": {"metadata": {"labels": {"a": "b"}}}});
    whole
        .as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({"spec": whole, "status": status,
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-01-01T09:30:00Z"}}))
    .unwrap()
}

/// Berlin without a time zone database.
fn zone_of(name: &str) -> Option<TimeZone> {
    (name == "Europe/Berlin").then(|| TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap())
}

fn timing(cron: &CronJob) -> Result<Timing, plan::Event> {
    Timing::of(&cron.spec, zone_of, TimeZone::UTC)
}

fn at(text: &str) -> Timestamp {
    format!("2026-01-01T{text}Z").parse().unwrap()
}

#[test]
fn decisions() {
    let check = |spec: Value, status: Value, now: Timestamp, expected: &str, reasons: &[&str]| {
        let cron = cron(spec.clone(), status);
        let (decision, events) = plan::decide(&cron, &timing(&cron).unwrap(), now);
        let shown = match decision {
            Decision::Wait => "wait".to_owned(),
            Decision::Stop => "stop".to_owned(),
            Decision::Start { at, replace } => format!("start {at}{}", if replace { " replace" } else { "" }),
        };
        assert_eq!(shown, expected, "{spec} {now}");
        let got: Vec<&str> = events.iter().map(|(_, reason, _)| *reason).collect();
        assert_eq!(got, reasons, "{spec} {now}");
    };
    let none = || json!({});
    check(none(), none(), at("09:59:59"), "wait", &[]);
    check(none(), none(), at("10:00:00"), "start 2026-01-01T10:00:00Z", &[]);
    // Several were missed: only the last one is made up for.
    check(none(), none(), at("12:10:00"), "start 2026-01-01T12:00:00Z", &[]);
    let many = "2026-01-06T12:10:00Z".parse().unwrap();
    check(
        none(),
        none(),
        many,
        "start 2026-01-06T12:00:00Z",
        &["TooManyMissedTimes"],
    );
    let deadline = json!({"startingDeadlineSeconds": 300});
    check(
        deadline.clone(),
        none(),
        at("12:04:00"),
        "start 2026-01-01T12:00:00Z",
        &[],
    );
    check(deadline.clone(), none(), at("12:10:00"), "wait", &[]);
    check(deadline, none(), many, "wait", &[]);
    check(
        json!({"startingDeadlineSeconds": i64::MAX}),
        none(),
        at("10:30:00"),
        "start 2026-01-01T10:00:00Z",
        &[],
    );
    let done = json!({"lastScheduleTime": "2026-01-01T10:00:00Z"});
    check(none(), done.clone(), at("10:30:00"), "wait", &[]);
    check(none(), done, at("11:00:00"), "start 2026-01-01T11:00:00Z", &[]);
    let runs =
        json!({"lastScheduleTime": "2026-01-01T10:00:00Z", "active": [{"name": "c-29454360", "uid": "x"}]});
    check(
        none(),
        runs.clone(),
        at("11:00:00"),
        "start 2026-01-01T11:00:00Z",
        &[],
    );
    let policy = |policy: &str| json!({"concurrencyPolicy": policy});
    check(
        policy("Allow"),
        runs.clone(),
        at("11:00:00"),
        "start 2026-01-01T11:00:00Z",
        &[],
    );
    check(
        policy("Forbid"),
        runs.clone(),
        at("11:00:00"),
        "wait",
        &["JobAlreadyActive"],
    );
    check(
        policy("Forbid"),
        none(),
        at("11:00:00"),
        "start 2026-01-01T11:00:00Z",
        &[],
    );
    check(
        policy("Replace"),
        runs,
        at("11:00:00"),
        "start 2026-01-01T11:00:00Z replace",
        &[],
    );
    // The Job of this start is known by its name, though the status lacks its time.
    let minutes = at("10:00:00").as_second() / 60;
    let unnoted = json!({"active": [{"name": format!("c-{minutes}"), "uid": "x"}]});
    check(none(), unnoted, at("10:30:00"), "wait", &[]);
    check(
        json!({"schedule": "0 0 31 2 *"}),
        none(),
        at("10:30:00"),
        "stop",
        &["InvalidSchedule"],
    );
    let berlin = json!({"schedule": "0 12 * * *", "timeZone": "Europe/Berlin"});
    check(berlin, none(), at("11:00:00"), "start 2026-01-01T11:00:00Z", &[]);
    // A year of seconds is bounded work.
    let year = "2027-01-01T09:30:00Z".parse().unwrap();
    check(
        json!({"schedule": "@every 1s"}),
        none(),
        year,
        "start 2027-01-01T09:30:00Z",
        &["TooManyMissedTimes"],
    );
}

#[test]
fn the_next_look() {
    let check = |spec: Value, status: Value, now: &str, seconds: u64| {
        let cron = cron(spec, status);
        let wait = plan::until_next(&cron, &timing(&cron).unwrap(), at(now)).unwrap();
        assert_eq!(wait.as_millis(), u128::from(seconds) * 1000 + 100, "{now}");
    };
    check(json!({}), json!({}), "09:59:00", 60);
    check(json!({}), json!({}), "10:10:00", 3000);
    check(
        json!({}),
        json!({"lastScheduleTime": "2026-01-01T10:00:00Z"}),
        "10:10:00",
        3000,
    );
    check(
        json!({"schedule": "@every 90s"}),
        json!({"lastScheduleTime": "2026-01-01T10:00:00Z"}),
        "10:00:30",
        60,
    );
}

#[test]
fn schedules_that_cannot_be_followed() {
    let check = |spec: Value, reason: &str, message: &str| {
        let Err((type_, got, text)) = timing(&cron(spec, json!({}))) else {
            panic!("{reason}")
        };
        assert_eq!((type_, got, text.as_str()), ("Warning", reason, message));
    };
    check(
        json!({"timeZone": "Nowhere/City"}),
        "UnknownTimeZone",
        "invalid timeZone: \"Nowhere/City\": unknown time zone Nowhere/City",
    );
    check(
        json!({"schedule": "x"}),
        "UnparseableSchedule",
        "unparseable schedule: \"x\" : expected exactly 5 fields, found 1: [x]",
    );
    check(
        json!({"schedule": "TZ=Nowhere/City * * * * *"}),
        "UnparseableSchedule",
        "unparseable schedule: \"TZ=Nowhere/City * * * * *\" : provided bad location Nowhere/City: unknown time zone Nowhere/City",
    );
    assert!(
        timing(&cron(
            json!({"schedule": "TZ=Europe/Berlin * * * * *"}),
            json!({})
        ))
        .is_ok()
    );
}

#[test]
fn the_job_of_a_start() {
    let cron = cron(json!({}), json!({}));
    let make = |zone| {
        let job = plan::new_job(&cron, at("10:00:00"), zone);
        serde_json::to_value(job).unwrap()
    };
    let job = make(None);
    assert_eq!(
        job["metadata"]["name"],
        format!("c-{}", at("10:00:00").as_second() / 60)
    );
    assert_eq!(job["metadata"]["labels"], json!({"a": "b"}));
    assert_eq!(job["metadata"]["ownerReferences"][0]["uid"], "u");
    let stamp = |job: &Value| {
        job["metadata"]["annotations"]["batch.kubernetes.io/cronjob-scheduled-timestamp"].clone()
    };
    assert_eq!(stamp(&job), "2026-01-01T10:00:00Z");
    assert_eq!(
        stamp(&make(zone_of("Europe/Berlin"))),
        "2026-01-01T11:00:00+01:00"
    );
}

fn job(name: &str, end: &str, start: Option<&str>, completed: Option<&str>) -> Arc<Job> {
    let conditions = if end.is_empty() {
        json!([])
    } else {
        json!([{"type": end, "status": "True"}])
    };
    let time = |text: Option<&str>| text.map(|text| at(text).to_string());
    let status =
        json!({"conditions": conditions, "startTime": time(start), "completionTime": time(completed)});
    Arc::new(
        serde_json::from_value(json!({"metadata": {"name": name, "uid": name}, "status": status})).unwrap(),
    )
}

#[test]
fn the_status_follows_the_jobs() {
    let mut status = cron(
        json!({}),
        json!({"active": [{"name": "ok", "uid": "ok"}, {"name": "bad", "uid": "bad"}, {"name": "runs", "uid": "runs"},
            {"name": "gone", "uid": "gone"}]}),
    )
    .status
    .unwrap();
    let jobs = [
        job("ok", "Complete", None, Some("10:05:00")),
        job("older", "Complete", None, Some("09:05:00")),
        job("bad", "Failed", None, None),
        job("runs", "", None, None),
        job("strange", "", None, None),
    ];
    assert!(plan::has_unknown(&status, &jobs));
    assert!(!plan::has_unknown(&status, &jobs[..4]));
    let events = plan::update_status(&mut status, &jobs, &HashSet::from(["gone".to_owned()]));
    let told: Vec<&str> = events.iter().map(|(_, _, message)| message.as_str()).collect();
    assert_eq!(
        told,
        [
            "Saw completed job: ok, condition: Complete",
            "Saw completed job: bad, condition: Failed",
            "Saw a job that the controller did not create or forgot: strange",
            "Active job went missing: gone",
        ]
    );
    let active: Vec<_> = status
        .active
        .iter()
        .flatten()
        .filter_map(|active| active.name.clone())
        .collect();
    assert_eq!(active, ["runs"]);
    assert_eq!(status.last_successful_time.unwrap().0, at("10:05:00"));
}

#[test]
fn the_oldest_of_the_history_go() {
    let jobs = [
        job("c3", "Complete", Some("10:03:00"), None),
        job("c1", "Complete", Some("10:01:00"), None),
        job("c2", "Complete", Some("10:02:00"), None),
        job("f", "Failed", None, None),
        job("f1", "Failed", Some("10:01:00"), None),
        job("runs", "", Some("09:00:00"), None),
    ];
    let check = |spec: Value, expected: &[&str]| {
        let cron = cron(spec.clone(), json!({}));
        let gone = plan::beyond_history(&cron.spec, &jobs);
        let names: Vec<_> = gone.iter().filter_map(|job| job.metadata.name.clone()).collect();
        assert_eq!(names, expected, "{spec}");
    };
    check(json!({}), &[]);
    check(
        json!({"successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 1}),
        &["c1", "c2", "f1"],
    );
    check(json!({"successfulJobsHistoryLimit": 0}), &["c1", "c2", "c3"]);
    check(
        json!({"successfulJobsHistoryLimit": 9, "failedJobsHistoryLimit": 0}),
        &["f1", "f"],
    );
}
