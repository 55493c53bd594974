//! ResourceQuota: what is created must fit into the quotas of its namespace, and is charged to them before it exists.
//! Charging is a compare-and-swap on the quota's status, so that two requests never share the last free place.

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use skiff_api::core::quota_usage::{Amounts, amounts, concerned, in_scope, unsaid, usage};
use skiff_api::node::{at, text};
use skiff_meta::Status;

use crate::{Attributes, Lister, Operation, Plugin};

/// How often a charge is tried again after somebody else's.
const ATTEMPTS: usize = 10;

pub struct ResourceQuota;

/// Whether a request may change what is used. Deletion is seen to by the controller.
fn concerns(a: &Attributes<'_>) -> bool {
    if a.namespace.is_empty() {
        return false;
    }
    match (a.operation, a.group, a.resource, a.subresource) {
        (Operation::Create, _, _, "") => true,
        (Operation::Update, "", "services" | "persistentvolumeclaims", "") => true,
        (Operation::Update, "", "pods", "resize") => true,
        (Operation::Update, "", "pods", "") => {
            let deadline =
                |pod: Option<&Value>| pod.is_some_and(|pod| !at(pod, "spec.activeDeadlineSeconds").is_null());
            deadline(a.object.as_deref()) != deadline(a.old_object)
        }
        _ => false,
    }
}

#[async_trait]
impl Plugin for ResourceQuota {
    fn name(&self) -> &'static str {
        "ResourceQuota"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, a: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        if !concerns(a) {
            return Ok(());
        }
        for quota in lister.list("", "resourcequotas", a.namespace).await? {
            let mut quota = quota;
            for attempt in 1.. {
                let Some(charged) = charge(a, &quota)? else { break };
                if a.dry_run {
                    break;
                }
                let name = text(&quota, "metadata.name").to_owned();
                match lister.write_status("", "resourcequotas", charged).await {
                    Ok(()) => break,
                    Err(status) if status.code == 404 => break,
                    Err(status) if status.code == 409 && attempt < ATTEMPTS => {
                        match lister
                            .get_latest("", "resourcequotas", a.namespace, &name)
                            .await?
                        {
                            Some(latest) => quota = latest,
                            None => break,
                        }
                    }
                    Err(status) => return Err(status),
                }
            }
        }
        Ok(())
    }
}

/// The quota with the request charged to it; `None` if it is none of its business.
fn charge(a: &Attributes<'_>, quota: &Value) -> Result<Option<Value>, Status> {
    let Some(object) = a.object.as_deref() else {
        return Ok(None);
    };
    let (hard, used) = (
        amounts(at(quota, "status.hard")),
        amounts(at(quota, "status.used")),
    );
    let entries = concerned(a.group, a.resource, &hard);
    if entries.is_empty() || !in_scope(quota, a.resource, object) {
        return Ok(None);
    }
    let name = text(quota, "metadata.name");
    if a.group.is_empty()
        && a.resource == "pods"
        && let Some(complaint) = unsaid(object, &entries)
    {
        return Err(a.forbidden(format_args!("failed quota: {name}: {complaint}")));
    }
    if entries.iter().any(|entry| !used.contains_key(entry)) {
        let names: Vec<&str> = entries.iter().map(String::as_str).collect();
        return Err(a.forbidden(format_args!(
            "status unknown for quota: {name}, resources: {}",
            names.join(",")
        )));
    }
    let mut asked = usage(a.group, a.resource, object);
    if let Some(old) = a.old_object.filter(|old| in_scope(quota, a.resource, old)) {
        for (entry, before) in usage(a.group, a.resource, old) {
            if let Some(amount) = asked.get_mut(&entry) {
                *amount = amount.minus(&before);
            }
        }
    }
    asked.retain(|entry, amount| entries.contains(entry) && !amount.is_zero() && !amount.is_negative());
    if asked.is_empty() {
        return Ok(None);
    }
    let after: Amounts = asked
        .iter()
        .map(|(entry, amount)| {
            (
                entry.clone(),
                used.get(entry).map_or(*amount, |used| used.plus(amount)),
            )
        })
        .collect();
    let over: Vec<&String> = after
        .iter()
        .filter(|(entry, amount)| hard.get(*entry).is_some_and(|most| *amount > most))
        .map(|(entry, _)| entry)
        .collect();
    if !over.is_empty() {
        let show = |of: &Amounts| -> String {
            let each: Vec<String> = over
                .iter()
                .filter_map(|entry| Some(format!("{entry}={}", of.get(*entry)?)))
                .collect();
            each.join(",")
        };
        return Err(a.forbidden(format_args!(
            "exceeded quota: {name}, requested: {}, used: {}, limited: {}",
            show(&asked),
            show(&used),
            show(&hard)
        )));
    }
    let mut charged = quota.clone();
    let mut all: Map<String, Value> = at(quota, "status.used").as_object().cloned().unwrap_or_default();
    for (entry, amount) in after {
        all.insert(entry, json!(amount.to_string()));
    }
    charged["status"]["used"] = Value::Object(all);
    Ok(Some(charged))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::fake::create;

    fn check(quota: Value, mut pod: Value, expected: Result<Option<Value>, &str>) {
        let got = charge(&create("", "pods", "Pod", &mut pod), &quota);
        let got = got
            .map(|charged| charged.map(|quota| quota["status"]["used"].clone()))
            .map_err(|status| status.message);
        assert_eq!(got, expected.map_err(str::to_owned));
    }

    #[test]
    fn charging() {
        let quota = |used: Value| json!({"metadata": {"name": "q"}, "status": {"hard": {"pods": "2", "cpu": "1"}, "used": used}});
        let pod = |cpu: &str| json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}});
        check(
            quota(json!({"pods": "1", "cpu": "500m"})),
            pod("300m"),
            Ok(Some(json!({"pods": "2", "cpu": "800m"}))),
        );
        check(
            quota(json!({"pods": "1", "cpu": "500m"})),
            pod("600m"),
            Err(
                "pods \"p\" is forbidden: exceeded quota: q, requested: cpu=600m, used: cpu=500m, limited: cpu=1",
            ),
        );
        check(
            quota(json!({"pods": "1"})),
            pod("1m"),
            Err("pods \"p\" is forbidden: status unknown for quota: q, resources: cpu,pods"),
        );
        check(
            quota(json!({})),
            json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}}),
            Err("pods \"p\" is forbidden: failed quota: q: must specify cpu for: c"),
        );
        let other = json!({"metadata": {"name": "q"}, "status": {"hard": {"secrets": "1"}}});
        check(other, pod("1"), Ok(None));
    }
}
