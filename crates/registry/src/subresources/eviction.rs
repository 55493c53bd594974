//! Eviction: a delete of a pod that asks its disruption budget first, and says in the pod's conditions what it is.

use serde_json::{Value, json};
use skiff_cache::{ListOptions, ReadAt};
use skiff_meta::selector::LabelSelector;
use skiff_meta::status::Cause;
use skiff_meta::{GroupResource, Status};

use crate::{Context, DeleteOptions, Deleted, Open, Registry, Resource, Write, WriteScope, object};

/// How often an eviction is tried again when the pod changes meanwhile.
const ATTEMPTS: usize = 20;

/// More evictions than this that the disruption controller has not confirmed are not granted.
const MAX_DISRUPTED_PODS: usize = 2000;

/// What an eviction found out about the pod's budget.
enum Claim {
    /// There is none, or it has one disruption less.
    Granted,
    /// The pod does not count in its budget because it is not ready, which must still be so when it goes.
    Unhealthy { budget: String },
}

impl Registry {
    /// Deletes the pod if its disruption budget has room for that, and marks it before as disrupted, so that its
    /// owner does not take the end of it for a failure.
    pub async fn evict(
        &self,
        context: &Context,
        resource: &Resource,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Deleted, Status> {
        for attempt in 1.. {
            let found = self.get(resource, namespace, name, ReadAt::Latest).await?;
            let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, name))?;
            let mut options = options.clone();
            let was_given = options.resource_version.is_some();
            let mut bind = || {
                if !was_given {
                    options.resource_version = Some(object::resource_version(&pod).to_owned());
                }
            };
            let mut unhealthy_in = None;
            let has_ended = matches!(object::at_str(&pod, &["status", "phase"]), "Succeeded" | "Failed");
            let is_free = if has_ended || object::deleting(&pod) {
                true
            } else if object::at_str(&pod, &["status", "phase"]) == "Pending" {
                // It may become ready meanwhile, and count.
                bind();
                true
            } else {
                if let Claim::Unhealthy { budget } = self.claim_disruption(context, &pod).await? {
                    bind();
                    unhealthy_in = Some(budget);
                }
                false
            };
            let result = self.disrupt(context, resource, namespace, name, options).await;
            match (result, unhealthy_in) {
                (Err(status), Some(budget)) if status.code == 409 && !was_given => {
                    return Err(still_processed(&budget));
                }
                (Err(status), _) if status.code == 409 && is_free && !was_given && attempt < ATTEMPTS => {}
                (result, _) => return result,
            }
        }
        Err(Status::modified(&resource.group_resource, name))
    }

    /// Adds the condition DisruptionTarget and deletes the pod.
    async fn disrupt(
        &self,
        context: &Context,
        resource: &Resource,
        namespace: &str,
        name: &str,
        mut options: DeleteOptions,
    ) -> Result<Deleted, Status> {
        if !context.dry_run {
            let now = self.now_text();
            let mut mark = |current: Option<&Value>| {
                let Some(pod) = current else {
                    return Err(Status::not_found(&resource.group_resource, name));
                };
                check_preconditions(&options, pod, name)?;
                let mut pod = pod.clone();
                add_disruption_target(&mut pod, &now);
                Ok(pod)
            };
            // COMPAT: nobody becomes the manager of the condition.
            let untracked = Context::default();
            let marked = self
                .update(
                    &Write {
                        context: &untracked,
                        resource,
                        namespace,
                        gate: &Open,
                    },
                    name,
                    WriteScope::Status,
                    false,
                    &mut mark,
                )
                .await?;
            if options.resource_version.is_some() {
                options.resource_version = Some(object::resource_version(&marked.object).to_owned());
            }
        }
        self.delete(context, resource, namespace, name, &options, &Open)
            .await
    }

    /// Takes one disruption out of the budget that covers the pod, or refuses with 429.
    async fn claim_disruption(&self, context: &Context, pod: &Value) -> Result<Claim, Status> {
        let Some(budgets) = self.resources.get("policy", "v1", "poddisruptionbudgets") else {
            return Ok(Claim::Granted);
        };
        let namespace = object::namespace(pod);
        let options = ListOptions {
            namespace: Some(namespace.to_string()),
            at: ReadAt::Latest,
            ..ListOptions::default()
        };
        let mut covering = Vec::new();
        for entry in self.list(budgets, options).await?.items {
            let budget = crate::encode::decode(&entry.bytes)?;
            if covers(&budget, pod) {
                covering.push(budget);
            }
        }
        let budget = match covering.as_slice() {
            [] => return Ok(Claim::Granted),
            [budget] => budget,
            _ => {
                return Err(Status::failure(
                    500,
                    "",
                    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
                ));
            }
        };
        if !ready(pod) && unhealthy_may_go(budget) {
            return Ok(Claim::Unhealthy {
                budget: object::name(budget).to_owned(),
            });
        }
        let pod_name = object::name(pod).to_string();
        let now = self.now_text();
        let mut claim = |current: Option<&Value>| {
            let Some(budget) = current else {
                return Err(Status::not_found(
                    &GroupResource::new("policy", "poddisruptionbudgets"),
                    "",
                ));
            };
            take_one(budget, &pod_name, &now)
        };
        let name = object::name(budget).to_string();
        self.update(
            &Write {
                context,
                resource: budgets,
                namespace,
                gate: &Open,
            },
            &name,
            WriteScope::Status,
            false,
            &mut claim,
        )
        .await?;
        Ok(Claim::Granted)
    }
}

fn check_preconditions(options: &DeleteOptions, pod: &Value, name: &str) -> Result<(), Status> {
    let kind = GroupResource::new("", "Pod");
    let (uid, version) = (object::uid(pod), object::resource_version(pod));
    if let Some(wanted) = options.uid.as_deref().filter(|wanted| *wanted != uid) {
        return Err(Status::conflict(
            &kind,
            name,
            format_args!(
                "the UID in the precondition ({wanted}) does not match the UID in record ({uid}). The object might have been deleted and then recreated"
            ),
        ));
    }
    let given = options.resource_version.as_deref();
    if let Some(wanted) = given.filter(|wanted| !wanted.is_empty() && *wanted != version) {
        return Err(Status::conflict(
            &kind,
            name,
            format_args!(
                "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record ({version}). The object might have been modified"
            ),
        ));
    }
    Ok(())
}

fn add_disruption_target(pod: &mut Value, now: &str) {
    let conditions = object::at(pod, &["status", "conditions"]).and_then(Value::as_array);
    let mut conditions = conditions.cloned().unwrap_or_default();
    let mut target = json!({
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
        "lastProbeTime": null,
        "lastTransitionTime": now,
    });
    match conditions.iter_mut().find(|c| c["type"] == "DisruptionTarget") {
        Some(existing) => {
            if existing["status"] == "True" {
                target["lastTransitionTime"] = existing["lastTransitionTime"].clone();
            }
            *existing = target;
        }
        None => conditions.push(target),
    }
    object::put(pod, &["status", "conditions"], Value::Array(conditions));
}

fn covers(budget: &Value, pod: &Value) -> bool {
    let selector = object::at(budget, &["spec", "selector"])
        .cloned()
        .unwrap_or(Value::Null);
    let empty = json!({});
    let labels = object::metadata(pod, "labels").unwrap_or(&empty);
    LabelSelector::from_value(&selector).is_ok_and(|selector| selector.matches_value(labels))
}

fn ready(pod: &Value) -> bool {
    let conditions = object::at(pod, &["status", "conditions"]).and_then(Value::as_array);
    conditions
        .into_iter()
        .flatten()
        .any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// A pod that is not ready does not count; by default it may go while the budget itself is met.
fn unhealthy_may_go(budget: &Value) -> bool {
    if object::at_str(budget, &["spec", "unhealthyPodEvictionPolicy"]) == "AlwaysAllow" {
        return true;
    }
    let number = |field: &str| {
        object::at(budget, &["status", field])
            .and_then(Value::as_i64)
            .unwrap_or(0)
    };
    number("currentHealthy") >= number("desiredHealthy") && number("desiredHealthy") > 0
}

fn take_one(budget: &Value, pod: &str, now: &str) -> Result<Value, Status> {
    let number = |field: &str| {
        object::at(budget, &["status", field])
            .and_then(Value::as_i64)
            .unwrap_or(0)
    };
    if number("observedGeneration") < object::generation(budget) {
        return Err(still_processed(object::name(budget)));
    }
    let refused = |why: &str| {
        let resource = GroupResource::new("policy", "poddisruptionbudget");
        Err(Status::forbidden(&resource, object::name(budget), why))
    };
    let allowed = number("disruptionsAllowed");
    if allowed < 0 {
        return refused("pdb disruptions allowed is negative");
    }
    let disrupted = object::at(budget, &["status", "disruptedPods"]).and_then(Value::as_object);
    if disrupted.is_some_and(|disrupted| disrupted.len() > MAX_DISRUPTED_PODS) {
        return refused("DisruptedPods map too big - too many evictions not confirmed by PDB controller");
    }
    if allowed == 0 {
        let mut status = Status::too_many_requests(
            "Cannot evict pod as it would violate the pod's disruption budget.",
            0,
        );
        add_cause(&mut status, why_not_allowed(budget));
        return Err(status);
    }
    let mut budget = budget.clone();
    object::put(&mut budget, &["status", "disruptionsAllowed"], json!(allowed - 1));
    object::put(&mut budget, &["status", "disruptedPods", pod], json!(now));
    if allowed == 1 {
        set_not_allowed(&mut budget, now);
    }
    Ok(budget)
}

fn allowed_condition(budget: &Value) -> Option<&Value> {
    let conditions = object::at(budget, &["status", "conditions"]).and_then(Value::as_array);
    conditions?.iter().find(|c| c["type"] == "DisruptionAllowed")
}

/// Why a budget without a disruption left has none.
fn why_not_allowed(budget: &Value) -> String {
    let name = object::name(budget);
    let number = |field: &str| {
        object::at(budget, &["status", field])
            .and_then(Value::as_i64)
            .unwrap_or(0)
    };
    let (desired, current) = (number("desiredHealthy"), number("currentHealthy"));
    let told = allowed_condition(budget).filter(|c| c["status"] == "False");
    let told = told.map(|c| {
        let text = |field: &str| c[field].as_str().unwrap_or_default();
        (text("reason"), text("message"))
    });
    match told.filter(|(_, message)| !message.is_empty()) {
        // The numbers are not to be trusted after a sync that failed.
        Some(("SyncFailed", message)) => format!(
            "The disruption budget {name} does not allow evicting pods currently because it failed sync: {message}"
        ),
        _ if current <= desired => {
            format!("The disruption budget {name} needs {desired} healthy pods and has {current} currently")
        }
        Some((reason, message)) => {
            format!(
                "The disruption budget {name} does not allow evicting pods currently ({reason}): {message}"
            )
        }
        None => format!("The disruption budget {name} does not allow evicting pods currently"),
    }
}

/// The last disruption is taken: the condition says so before the disruption controller does.
fn set_not_allowed(budget: &mut Value, now: &str) {
    let conditions = object::at(budget, &["status", "conditions"]).and_then(Value::as_array);
    let mut conditions = conditions.cloned().unwrap_or_default();
    let generation = object::at(budget, &["status", "observedGeneration"]).cloned();
    let mut wanted = json!({
        "type": "DisruptionAllowed",
        "status": "False",
        "reason": "InsufficientPods",
        "message": "",
        "lastTransitionTime": now,
    });
    if let Some(generation) = generation {
        wanted["observedGeneration"] = generation;
    }
    match conditions.iter_mut().find(|c| c["type"] == "DisruptionAllowed") {
        Some(existing) => {
            if existing["status"] == "False" {
                wanted["lastTransitionTime"] = existing["lastTransitionTime"].clone();
            }
            *existing = wanted;
        }
        None => conditions.push(wanted),
    }
    object::put(budget, &["status", "conditions"], Value::Array(conditions));
}

fn still_processed(budget: &str) -> Status {
    let mut status = Status::too_many_requests(
        "Cannot evict pod as it would violate the pod's disruption budget.",
        10,
    );
    let message = format!("The disruption budget {budget} is still being processed by the server.");
    add_cause(&mut status, message);
    status
}

fn add_cause(status: &mut Status, message: String) {
    let cause = Cause {
        reason: "DisruptionBudget".to_string(),
        message,
        field: String::new(),
    };
    status.details.get_or_insert_default().causes.push(cause);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_gives_what_it_has() {
        let budget = json!({"metadata": {"name": "b", "generation": 1}, "spec": {"selector": {"matchLabels": {"a": "b"}}},
            "status": {"observedGeneration": 1, "disruptionsAllowed": 1, "desiredHealthy": 2, "currentHealthy": 3}});
        assert!(covers(&budget, &json!({"metadata": {"labels": {"a": "b"}}})));
        assert!(!covers(&budget, &json!({"metadata": {}})));
        let after = take_one(&budget, "p", "now").expect("one left");
        assert_eq!(after["status"]["disruptedPods"]["p"], "now");
        assert_eq!(after["status"]["conditions"][0]["reason"], "InsufficientPods");
        let refused = take_one(&after, "q", "now").expect_err("none left");
        assert_eq!((refused.code, refused.http_code()), (429, 429));
        assert_eq!(
            refused.details.expect("details").causes[0].message,
            "The disruption budget b does not allow evicting pods currently"
        );
    }

    #[test]
    fn a_refusal_says_why() {
        let check = |status: Value, code: u16, expected: &str| {
            let mut status = status;
            status["observedGeneration"] = json!(1);
            let budget = json!({"metadata": {"name": "b", "generation": 1}, "status": status});
            let refused = take_one(&budget, "p", "now").expect_err("refused");
            assert_eq!(refused.code, code);
            let causes = refused.details.map(|details| details.causes).unwrap_or_default();
            let told = causes
                .first()
                .map_or(refused.message, |cause| cause.message.clone());
            assert_eq!(told, expected);
        };
        let condition = |reason: &str| json!([{"type": "DisruptionAllowed", "status": "False", "reason": reason, "message": "m"}]);
        check(
            json!({"desiredHealthy": 2, "currentHealthy": 2}),
            429,
            "The disruption budget b needs 2 healthy pods and has 2 currently",
        );
        check(
            json!({"desiredHealthy": 2, "currentHealthy": 2, "conditions": condition("SyncFailed")}),
            429,
            "The disruption budget b does not allow evicting pods currently because it failed sync: m",
        );
        check(
            json!({"desiredHealthy": 1, "currentHealthy": 2, "conditions": condition("Other")}),
            429,
            "The disruption budget b does not allow evicting pods currently (Other): m",
        );
        check(
            json!({"disruptionsAllowed": -1}),
            403,
            "poddisruptionbudget.policy \"b\" is forbidden: pdb disruptions allowed is negative",
        );
        let many: serde_json::Map<String, Value> = (0..=MAX_DISRUPTED_PODS)
            .map(|number| (number.to_string(), json!("now")))
            .collect();
        check(
            json!({"disruptionsAllowed": 1, "disruptedPods": many}),
            403,
            "poddisruptionbudget.policy \"b\" is forbidden: DisruptedPods map too big - too many evictions not confirmed by PDB controller",
        );
    }
}
