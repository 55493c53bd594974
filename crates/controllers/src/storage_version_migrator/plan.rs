//! What is next for the migrations of one resource. One runs at a time, the oldest first. No I/O.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

pub(super) const RUNNING: &str = "Running";
pub(super) const SUCCEEDED: &str = "Succeeded";
pub(super) const FAILED: &str = "Failed";

pub(super) type Migration = StorageVersionMigration;

#[derive(Debug)]
pub(super) enum Step<'a> {
    Rest,
    /// It has ended: say that it no longer runs.
    Finish(&'a Migration),
    /// None runs: start this one.
    Start(&'a Migration),
    /// Note the resourceVersion up to which objects are to be written.
    Note(&'a Migration),
    /// Write the objects.
    Write(&'a Migration, &'a str),
}

pub(super) fn step(all: &[Arc<Migration>]) -> Step<'_> {
    let ended = |migration: &Migration| is_true(migration, SUCCEEDED) || is_true(migration, FAILED);
    let running = |migration: &&Arc<Migration>| is_true(migration, RUNNING);
    if let Some(migration) = all.iter().filter(running).find(|migration| ended(migration)) {
        return Step::Finish(migration);
    }
    if let Some(migration) = all.iter().find(running) {
        let noted = migration
            .status
            .as_ref()
            .and_then(|status| status.resource_version.as_deref());
        return match noted.filter(|noted| !noted.is_empty()) {
            Some(noted) => Step::Write(migration, noted),
            None => Step::Note(migration),
        };
    }
    let waiting = all.iter().filter(|migration| !ended(migration));
    match waiting.min_by_key(|migration| age(migration)) {
        Some(migration) => Step::Start(migration),
        None => Step::Rest,
    }
}

fn age(migration: &Migration) -> (Option<Timestamp>, Option<&str>) {
    let created = migration.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (created, migration.metadata.name.as_deref())
}

pub(super) fn is_true(migration: &Migration, kind: &str) -> bool {
    condition(migration, kind).is_some_and(|condition| condition.status == "True")
}

fn condition<'a>(migration: &'a Migration, kind: &str) -> Option<&'a Condition> {
    let conditions = migration.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// The migration with a condition that is true. One that has the condition already keeps it as it is.
pub(super) fn with_condition(
    migration: &Migration,
    kind: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) -> Migration {
    let mut changed = migration.clone();
    if condition(migration, kind).is_none() {
        let conditions = &mut changed.status.get_or_insert_default().conditions;
        conditions.get_or_insert_default().push(Condition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            last_transition_time: Time(now),
            reason: reason.to_owned(),
            message,
            observed_generation: None,
        });
    }
    changed
}

/// The migration with `Running` set to false.
pub(super) fn finished(migration: &Migration, now: Timestamp) -> Migration {
    let mut changed = migration.clone();
    let conditions = changed
        .status
        .iter_mut()
        .filter_map(|status| status.conditions.as_mut());
    for condition in conditions
        .flatten()
        .filter(|condition| condition.type_ == RUNNING)
    {
        condition.status = "False".to_owned();
        condition.last_transition_time = Time(now);
        condition.reason = "MigrationCompleted".to_owned();
        condition.message = "Migration completed".to_owned();
        condition.observed_generation = migration.metadata.generation;
    }
    changed
}

/// Compares resourceVersions as upstream does: numbers without leading zeros, of any length. `None`: one is no such number.
pub(super) fn is_later(version: &str, than: &str) -> Option<bool> {
    let well_formed = |text: &str| {
        !text.is_empty() && !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    (well_formed(version) && well_formed(than)).then(|| (version.len(), version) > (than.len(), than))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn migration(name: &str, created: u8, status: Value) -> Arc<Migration> {
        let object = json!({"metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:00:{created:02}Z")},
            "spec": {"resource": {"group": "", "resource": "secrets"}}, "status": status});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn with(conditions: &[(&str, &str)], version: &str) -> Value {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(kind, status)| {
                json!({"type": kind, "status": status, "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"})
            })
            .collect();
        json!({"conditions": conditions, "resourceVersion": version})
    }

    #[test]
    fn one_runs_at_a_time() {
        let check = |all: &[Arc<Migration>], expected: &str| {
            let found = match step(all) {
                Step::Rest => "rest".to_owned(),
                Step::Finish(migration) => format!("finish {}", migration.metadata.name.as_deref().unwrap()),
                Step::Start(migration) => format!("start {}", migration.metadata.name.as_deref().unwrap()),
                Step::Note(migration) => format!("note {}", migration.metadata.name.as_deref().unwrap()),
                Step::Write(migration, version) => {
                    format!("write {} {version}", migration.metadata.name.as_deref().unwrap())
                }
            };
            assert_eq!(found, expected);
        };
        let none = || with(&[], "");
        check(&[], "rest");
        check(
            &[
                migration("b", 2, none()),
                migration("a", 2, none()),
                migration("c", 1, none()),
            ],
            "start c",
        );
        check(&[migration("b", 2, none()), migration("a", 2, none())], "start a");
        let running = with(&[(RUNNING, "True")], "");
        check(&[migration("a", 1, none()), migration("b", 2, running)], "note b");
        let noted = with(&[(RUNNING, "True")], "7");
        check(
            &[migration("a", 1, none()), migration("b", 2, noted)],
            "write b 7",
        );
        let succeeded = with(&[(RUNNING, "True"), (SUCCEEDED, "True")], "7");
        check(
            &[migration("a", 1, none()), migration("b", 2, succeeded)],
            "finish b",
        );
        let failed = with(&[(RUNNING, "False"), (FAILED, "True")], "");
        check(
            &[migration("a", 1, failed.clone()), migration("b", 2, none())],
            "start b",
        );
        check(&[migration("a", 1, failed)], "rest");
    }

    #[test]
    fn conditions_are_upstreams() {
        let now = "2026-02-02T00:00:00Z".parse().unwrap();
        let waiting = migration("a", 1, json!({}));
        let running = with_condition(
            &waiting,
            RUNNING,
            "MigrationRunning",
            "The migration is running".into(),
            now,
        );
        assert!(is_true(&running, RUNNING));
        let again = with_condition(&running, RUNNING, "Other", String::new(), now);
        assert_eq!(again, running);
        let done = finished(&running, now);
        assert!(!is_true(&done, RUNNING));
        assert_eq!(condition(&done, RUNNING).unwrap().reason, "MigrationCompleted");
    }

    #[test]
    fn versions_are_numbers() {
        for (a, b, expected) in [
            ("7", "7", Some(false)),
            ("8", "7", Some(true)),
            ("10", "9", Some(true)),
            ("9", "10", Some(false)),
            ("x", "7", None),
            ("07", "7", None),
            ("", "7", None),
        ] {
            assert_eq!(is_later(a, b), expected, "{a} {b}");
        }
    }
}
