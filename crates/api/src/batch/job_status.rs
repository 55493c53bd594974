//! Rules of a job's status. A rule is asked only when what it speaks of changed, so that a job that broke it
//! before can still be updated.

use std::collections::BTreeSet;

use serde_json::Value;
use skiff_meta::field::{self, Error, ErrorType};

use crate::errors::Errors;
use crate::node::{Node, at, list, number, same, text};

/// COMPAT: upstream leaves out the value here.
fn no_value(errors: &mut Vec<Error>, at: &Node, detail: &str) {
    errors.push(Error {
        kind: ErrorType::Invalid,
        path: at.path(),
        value: None,
        shown: None,
        detail: detail.to_owned(),
    });
}

fn is_true(job: &Value, kind: &str) -> bool {
    list(job, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == kind && text(c, "status") == "True")
}

fn is_false(job: &Value, kind: &str) -> bool {
    list(job, "status.conditions")
        .iter()
        .any(|c| text(c, "type") == kind && text(c, "status") == "False")
}

fn is_finished(job: &Value) -> bool {
    is_true(job, "Complete") || is_true(job, "Failed")
}

/// `0-3,5`: how many indexes, all below `completions` and rising.
pub fn indexes(text: &str, completions: i64) -> Result<i64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    let parse = |part: &str| -> Result<i64, String> {
        let number = part.parse::<i64>().map_err(|_| {
            format!(
                "cannot convert string to integer for index: {}",
                field::quote(part)
            )
        })?;
        if number >= completions {
            return Err(format!("too large index: {}", field::quote(part)));
        }
        Ok(number)
    };
    let (mut last, mut total) = (None, 0);
    for interval in text.split(',') {
        let parts: Vec<&str> = interval.split('-').collect();
        if parts.len() > 2 {
            return Err(format!(
                "the fragment {} violates the requirement that an index interval can have at most two parts separated by '-'",
                field::quote(interval)
            ));
        }
        let first = parse(parts[0])?;
        let mut end = first;
        if let Some(part) = parts.get(1) {
            end = parse(part)?;
            if first >= end {
                return Err(format!("non-increasing order, previous: {first}, current: {end}"));
            }
        }
        if let Some(last) = last.filter(|last| *last >= first) {
            return Err(format!(
                "non-increasing order, previous: {last}, current: {first}"
            ));
        }
        total += end - first + 1;
        last = Some(end);
    }
    Ok(total)
}

pub fn validate(new: &Value, old: &Value) -> Vec<Error> {
    let root = Node::root(new);
    let status = root.field("status");
    let conditions = status.field("conditions");
    let mut errors = Errors::new();
    for name in ["active", "succeeded", "failed", "ready", "terminating"] {
        errors.non_negative(&status.field(name));
    }
    uncounted(&status, &mut errors);
    let mut errors = errors.into_vec();
    let changed = |path: &str| !same(at(at(new, "status"), path), at(at(old, "status"), path));
    let flipped = |kind: &str| is_true(new, kind) != is_true(old, kind);
    let finished_flipped = is_finished(new) != is_finished(old);
    let (complete, failed) = (is_true(new, "Complete"), is_true(new, "Failed"));
    let (target, criteria) = (is_true(new, "FailureTarget"), is_true(new, "SuccessCriteriaMet"));
    let finished = is_finished(new);
    if (flipped("Complete") || flipped("Failed")) && complete && failed {
        no_value(
            &mut errors,
            &conditions,
            "cannot set Complete=True and Failed=true conditions",
        );
    }
    if (flipped("Complete") || flipped("FailureTarget")) && complete && target {
        no_value(
            &mut errors,
            &conditions,
            "cannot set Complete=True and FailureTarget=true conditions",
        );
    }
    errors.extend(times(&status, new, old));
    if (flipped("Failed") || changed("failedIndexes")) && failed && !target {
        no_value(
            &mut errors,
            &conditions,
            "cannot set Failed=True condition without the FailureTarget=true condition",
        );
    }
    if (flipped("Complete") || flipped("SuccessCriteriaMet")) && complete && !criteria {
        no_value(
            &mut errors,
            &conditions,
            "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
        );
    }
    let mut more = Errors::new();
    if (finished_flipped || changed("active")) && finished && number(new, "status.active") > 0 {
        more.invalid(&status.field("active"), "active>0 is invalid for finished job");
    }
    let nothing_to_do =
        at(new, "spec.suspend").as_bool() == Some(true) && at(new, "spec.completions").as_i64() == Some(0);
    let start = status.field("startTime");
    if (finished_flipped || changed("startTime")) && !nothing_to_do && finished && !start.is_set() {
        more.required(&start, "startTime is required for finished job");
    }
    let left = status.field("uncountedTerminatedPods");
    if (finished_flipped || changed("uncountedTerminatedPods"))
        && finished
        && !(left.field("failed").is_empty() && left.field("succeeded").is_empty())
    {
        more.invalid(&left, "must be empty for finished job");
    }
    index_lists(&status, new, old, &mut more);
    let terminating = status.field("terminating");
    if (finished_flipped || changed("terminating")) && finished && terminating.int().unwrap_or(0) > 0 {
        more.invalid(&terminating, "terminating>0 is invalid for finished job");
    }
    let ready = status.field("ready");
    if (changed("ready") || changed("active"))
        && ready
            .int()
            .is_some_and(|ready| ready > number(new, "status.active"))
    {
        more.invalid(&ready, "cannot set more ready pods than active");
    }
    errors.extend(more.into_vec());
    for (wrong, detail) in [
        (
            criteria && failed,
            "cannot set SuccessCriteriaMet=True and Failed=true conditions",
        ),
        (
            criteria && target,
            "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions",
        ),
        (
            !at(new, "spec.successPolicy").is_null() && !criteria && complete,
            "cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True",
        ),
    ] {
        if wrong {
            no_value(&mut errors, &conditions, detail);
        }
    }
    errors.extend(transitions(&status, new, old));
    errors
}

fn uncounted(status: &Node, errors: &mut Errors) {
    let pods = status.field("uncountedTerminatedPods");
    let mut seen = BTreeSet::new();
    for name in ["succeeded", "failed"] {
        let uids = pods.field(name);
        for uid in uids.items() {
            if uid.is_empty() {
                errors.invalid(&uid, "must not be empty");
            } else if !seen.insert(uid.str()) {
                errors.duplicate(&uid);
            }
        }
    }
}

fn times(status: &Node, new: &Value, old: &Value) -> Vec<Error> {
    let mut errors = Errors::new();
    let complete = is_true(new, "Complete");
    let changed = |path: &str| !same(at(new, path), at(old, path));
    let flipped = complete != is_true(old, "Complete");
    let (start, end) = (status.field("startTime"), status.field("completionTime"));
    if (flipped || changed("status.completionTime")) && end.is_set() && !complete {
        errors.invalid(
            &end,
            "cannot set completionTime when there is no Complete=True condition",
        );
    }
    if (flipped || changed("status.completionTime")) && !end.is_set() && complete {
        errors.required(&end, "completionTime is required for Complete jobs");
    }
    if (changed("status.startTime") || changed("status.completionTime"))
        && start.is_set()
        && end.is_set()
        && end.str() < start.str()
    {
        errors.invalid(&end, "must be equal to or after `startTime`");
    }
    errors.into_vec()
}

fn index_lists(status: &Node, new: &Value, old: &Value, errors: &mut Errors) {
    let completions = at(new, "spec.completions").as_i64();
    let (done, failed) = (status.field("completedIndexes"), status.field("failedIndexes"));
    let done_changed = text(new, "status.completedIndexes") != text(old, "status.completedIndexes");
    let failed_changed = at(new, "status.failedIndexes") != at(old, "status.failedIndexes");
    let per_index = !at(new, "spec.backoffLimitPerIndex").is_null();
    if let Some(count) = completions {
        if done_changed && let Err(why) = indexes(done.str(), count) {
            errors.invalid(&done, format!("error parsing completedIndexes: {why}"));
        }
        if failed_changed
            && per_index
            && failed.is_set()
            && let Err(why) = indexes(failed.str(), count)
        {
            errors.invalid(&failed, format!("error parsing failedIndexes: {why}"));
        }
    }
    if done_changed && !done.is_empty() && text(new, "spec.completionMode") != "Indexed" {
        errors.invalid(
            &done,
            "cannot set non-empty completedIndexes when non-indexed completion mode",
        );
    }
    if failed_changed && !per_index && failed.is_set() {
        errors.invalid(
            &failed,
            "cannot set non-null failedIndexes when backoffLimitPerIndex is null",
        );
    }
}

/// What was reached is not taken back.
fn transitions(status: &Node, new: &Value, old: &Value) -> Vec<Error> {
    let conditions = status.field("conditions");
    let mut errors = Vec::new();
    for kind in ["Failed", "Complete", "FailureTarget"] {
        if is_true(old, kind) && !is_true(new, kind) {
            let detail = format!("cannot disable the terminal {kind}=True condition");
            no_value(&mut errors, &conditions, &detail);
        }
    }
    let mut more = Errors::new();
    let indexed = text(new, "spec.completionMode") == "Indexed";
    let elastic = indexed && at(new, "spec.completions") == at(new, "spec.parallelism");
    let fewer = |name: &str| number(at(new, "status"), name) < number(at(old, "status"), name);
    if fewer("failed") {
        let shown = number(new, "status.failed");
        more.invalid_value(
            &status.field("failed"),
            shown,
            "cannot decrease the failed counter",
        );
    }
    if !elastic && fewer("succeeded") {
        let shown = number(new, "status.succeeded");
        more.invalid_value(
            &status.field("succeeded"),
            shown,
            "cannot decrease the succeeded counter",
        );
    }
    let (end, before) = (at(new, "status.completionTime"), at(old, "status.completionTime"));
    if !before.is_null() && !end.is_null() && end != before {
        more.invalid(&status.field("completionTime"), crate::errors::IMMUTABLE);
    }
    let resuming = is_true(old, "Suspended") && is_false(new, "Suspended");
    let (start, before) = (at(new, "status.startTime"), at(old, "status.startTime"));
    if start != before && !before.is_null() && at(new, "spec.suspend").as_bool() != Some(true) && !resuming {
        more.push(
            ErrorType::Invalid,
            &status.field("startTime"),
            Some(start.clone()),
            "field is immutable for unsuspended job once set",
        );
    }
    errors.extend(more.into_vec());
    let criteria = |job| is_true(job, "SuccessCriteriaMet");
    if criteria(old) && !criteria(new) {
        no_value(
            &mut errors,
            &conditions,
            "cannot disable the SuccessCriteriaMet=True condition",
        );
    }
    if is_true(old, "Complete") && !criteria(old) && criteria(new) {
        no_value(
            &mut errors,
            &conditions,
            "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions",
        );
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(old: Value, new: Value, expected: &[&str]) {
        let job = |status: Value| json!({"spec": {"completions": 3, "completionMode": "Indexed"}, "status": status});
        let found: Vec<String> = validate(&job(new), &job(old))
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn statuses() {
        let done = json!({"startTime": "2020-01-01T00:00:00Z", "completionTime": "2020-01-02T00:00:00Z",
            "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}]});
        check(json!({}), done.clone(), &[]);
        check(
            done,
            json!({}),
            &[
                "status.conditions: Invalid value: cannot disable the terminal Complete=True condition",
                "status.startTime: Invalid value: null: field is immutable for unsuspended job once set",
                "status.conditions: Invalid value: cannot disable the SuccessCriteriaMet=True condition",
            ],
        );
        check(
            json!({}),
            json!({"active": 1, "ready": 2, "completedIndexes": "0,9"}),
            &[
                "status.completedIndexes: Invalid value: \"0,9\": error parsing completedIndexes: too large index: \"9\"",
                "status.ready: Invalid value: 2: cannot set more ready pods than active",
            ],
        );
    }

    #[test]
    fn index_texts() {
        assert_eq!(indexes("0-1,3", 4), Ok(3));
        assert!(indexes("3,1", 4).is_err());
        assert!(indexes("1-0", 4).is_err());
        assert!(indexes("x", 4).is_err());
    }
}
