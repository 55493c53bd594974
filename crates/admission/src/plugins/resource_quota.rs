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

    /// Quotas that others charge too: so many writes are too late.
    struct Ledger {
        quota: Value,
        conflicts: std::sync::atomic::AtomicUsize,
        written: parking_lot::Mutex<Vec<Value>>,
    }

    impl Ledger {
        fn new(quota: Value, conflicts: usize) -> Ledger {
            Ledger {
                quota,
                conflicts: conflicts.into(),
                written: parking_lot::Mutex::default(),
            }
        }
    }

    #[async_trait]
    impl Lister for Ledger {
        async fn get(&self, _: &str, _: &str, _: &str, _: &str) -> Result<Option<Value>, Status> {
            Ok(Some(self.quota.clone()))
        }

        async fn list(&self, _: &str, _: &str, _: &str) -> Result<Vec<Value>, Status> {
            Ok(vec![self.quota.clone()])
        }

        async fn write_status(&self, _: &str, _: &str, object: Value) -> Result<(), Status> {
            use std::sync::atomic::Ordering::Relaxed;
            let before = self
                .conflicts
                .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            if before.is_ok() {
                return Err(Status::modified(
                    &skiff_meta::GroupResource::new("", "resourcequotas"),
                    "q",
                ));
            }
            self.written.lock().push(object["status"]["used"].clone());
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_charge_is_tried_again_and_a_dry_run_charges_nothing() {
        let quota =
            json!({"metadata": {"name": "q"}, "status": {"hard": {"pods": "2"}, "used": {"pods": "1"}}});
        let outcome = async |conflicts: usize, dry_run: bool| {
            let ledger = Ledger::new(quota.clone(), conflicts);
            let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
            let mut a = create("", "pods", "Pod", &mut pod);
            a.dry_run = dry_run;
            let code = ResourceQuota
                .validate(&a, &ledger)
                .await
                .err()
                .map(|status| status.code);
            (code, ledger.written.into_inner())
        };
        let charged = vec![json!({"pods": "2"})];
        assert_eq!(outcome(0, false).await, (None, charged.clone()));
        assert_eq!(outcome(ATTEMPTS - 1, false).await, (None, charged));
        assert_eq!(outcome(ATTEMPTS, false).await, (Some(409), Vec::new()));
        assert_eq!(outcome(0, true).await, (None, Vec::new()));
    }

    #[tokio::test]
    async fn an_update_is_charged_what_it_adds() {
        let quota = json!({"metadata": {"name": "q"}, "status": {"hard": {"requests.storage": "10Gi", "persistentvolumeclaims": "1"},
            "used": {"requests.storage": "4Gi", "persistentvolumeclaims": "1"}}});
        let claim = |size: &str| json!({"metadata": {"name": "c"}, "spec": {"resources": {"requests": {"storage": size}}}});
        let outcome = async |from: &str, to: &str| {
            let ledger = Ledger::new(quota.clone(), 0);
            let (old, mut new) = (claim(from), claim(to));
            let mut a = create("", "persistentvolumeclaims", "PersistentVolumeClaim", &mut new);
            (a.operation, a.old_object) = (Operation::Update, Some(&old));
            let refused = ResourceQuota.validate(&a, &ledger).await.is_err();
            let written = ledger.written.into_inner().pop().unwrap_or_default();
            (
                refused,
                written["requests.storage"].as_str().unwrap_or("").to_owned(),
            )
        };
        assert_eq!(outcome("4Gi", "6Gi").await, (false, "6Gi".to_owned()));
        assert_eq!(outcome("4Gi", "12Gi").await, (true, String::new()));
        assert_eq!(outcome("4Gi", "4Gi").await, (false, String::new()));
        assert_eq!(outcome("4Gi", "1Gi").await, (false, String::new()));
    }

    #[test]
    fn a_quota_is_for_what_is_in_its_scopes() {
        let quota = json!({"metadata": {"name": "q"}, "spec": {"scopes": ["Terminating"]},
            "status": {"hard": {"pods": "1"}, "used": {"pods": "1"}}});
        let pod = |deadline: Value| json!({"metadata": {"name": "p"}, "spec": {"activeDeadlineSeconds": deadline, "containers": []}});
        check(quota.clone(), pod(Value::Null), Ok(None));
        check(
            quota,
            pod(json!(5)),
            Err(
                "pods \"p\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1",
            ),
        );
    }
}
