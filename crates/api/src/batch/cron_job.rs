//! CronJobs.

use serde_json::{Value, json};

use super::{cron, job, job_update};
use crate::errors::Errors;
use crate::kind::{AGE, Again, BASE, Kind, NAME, boolean, integer, text as column, wide};
use crate::node::{Node, at, list, text};
use crate::{row, strategy, walk};

pub static CRON_JOB: Kind = Kind {
    group: "batch",
    kind: "CronJob",
    pod_spec: "spec.jobTemplate.spec.template.spec",
    default: |_, object| {
        let Some(spec) = walk::object(object, "spec") else {
            return;
        };
        walk::string(spec, "concurrencyPolicy", "Allow");
        walk::pointer(spec, "suspend", false);
        walk::pointer(spec, "successfulJobsHistoryLimit", 3);
        walk::pointer(spec, "failedJobsHistoryLimit", 1);
        walk::made(spec, "jobTemplate.spec", &mut job::template_defaults);
    },
    prepare_create: strategy::create_with_generation,
    prepare_update: strategy::update_spec,
    validate: |object| {
        let mut errors = Errors::new();
        let root = Node::root(object);
        spec(&root.field("spec"), None, &mut errors);
        let name = root.field("metadata.name");
        // Eleven characters are added to name the jobs.
        if name.len() > 52 {
            errors.invalid(&name, "must be no more than 52 characters");
        }
        errors.into_vec()
    },
    validate_update: |new, old| {
        let mut errors = Errors::new();
        let root = Node::root(new);
        spec(&root.field("spec"), Some(at(old, "spec")), &mut errors);
        errors.into_vec()
    },
    columns: &[
        NAME,
        column("Schedule"),
        column("Timezone"),
        boolean("Suspend"),
        integer("Active"),
        column("Last Schedule"),
        AGE,
        wide("Containers"),
        wide("Images"),
        wide("Selector"),
    ],
    row: |object, now| {
        let [names, images] = row::containers(object, "spec.jobTemplate.spec.template.spec");
        let last = text(object, "status.lastScheduleTime");
        let last = if last.is_empty() {
            row::NONE.to_owned()
        } else {
            row::since(last, now)
        };
        let suspend = match at(object, "spec.suspend").as_bool() {
            Some(true) => "True",
            Some(false) => "False",
            None => "<unset>",
        };
        vec![
            row::name(object),
            json!(text(object, "spec.schedule")),
            row::or_none(text(object, "spec.timeZone")),
            json!(suspend),
            json!(list(object, "status.active").len()),
            json!(last),
            row::age(object, now),
            names,
            images,
            row::selector(object, "spec.jobTemplate.spec.selector"),
        ]
    },
    has_status: true,
    warnings: |new, old| {
        let (path, template) = ("spec.jobTemplate.spec", "spec.jobTemplate.spec.template");
        let mut warnings = job_update::warnings(new, old, path, template);
        if old.is_some() && text(new, "spec.schedule").contains("TZ") {
            warnings.push("cannot use TZ or CRON_TZ in spec.spec.schedule, use timeZone instead, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details".to_owned());
        }
        warnings
    },
    update_again: Again::Change,
    status_again: Again::None,
    ..BASE
};

fn spec(spec: &Node, old: Option<&Value>, errors: &mut Errors) {
    let schedule = spec.field("schedule");
    let zone = spec.field("timeZone");
    if errors.require(&schedule) {
        if let Err(complaint) = cron::Schedule::parse(schedule.str()) {
            errors.invalid(&schedule, complaint);
        }
        let tolerated = old.is_some_and(|o| text(o, "schedule").contains("TZ"));
        if schedule.str().contains("TZ") {
            if !tolerated {
                errors.invalid(
                    &schedule,
                    "cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
                );
            } else if zone.is_set() {
                errors.invalid(
                    &schedule,
                    "cannot use both timeZone field and TZ or CRON_TZ in schedule",
                );
            }
        }
    }
    errors.non_negative(&spec.field("startingDeadlineSeconds"));
    if zone.is_set() && old.is_none_or(|o| at(o, "timeZone") != zone.value) {
        time_zone(&zone, errors);
    }
    errors.required_one_of(&spec.field("concurrencyPolicy"), &["Allow", "Forbid", "Replace"]);
    let template = spec.field("jobTemplate.spec");
    job::job_spec(&template, errors);
    let selector = template.field("selector");
    if selector.is_set() {
        errors.invalid(&selector, "`selector` will be auto-generated");
    }
    if template.field("manualSelector").bool() {
        errors.one_of(&template.field("manualSelector"), &["nil", "false"]);
    }
    errors.non_negative(&spec.field("successfulJobsHistoryLimit"));
    errors.non_negative(&spec.field("failedJobsHistoryLimit"));
}

/// The names that Go's own copy of the IANA database has.
const TIME_ZONES: &str = include_str!("../../data/time_zones.txt");

fn time_zone(zone: &Node, errors: &mut Errors) {
    let name = zone.str();
    let odd = |part: &str| {
        part == "."
            || part == ".."
            || part.starts_with('-')
            || part.is_empty()
            || !part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._+-".contains(&b))
    };
    if name.is_empty() {
        errors.invalid(zone, "timeZone must be nil or non-empty string");
    } else if name.split('/').any(odd) {
        errors.invalid(zone, format!("unknown time zone {name}"));
    } else if name.eq_ignore_ascii_case("Local") {
        errors.invalid(
            zone,
            "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones",
        );
    } else if !TIME_ZONES.lines().any(|known| known == name) {
        errors.invalid(zone, format!("unknown time zone {name}"));
    }
}
