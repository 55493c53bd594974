//! Eviction: a delete of a pod that asks its disruption budget first.

use serde_json::{Value, json};
use skiff_cache::{ListOptions, ReadAt};
use skiff_meta::selector::LabelSelector;
use skiff_meta::status::Cause;
use skiff_meta::{GroupResource, Status};

use crate::{Context, Open, Part, Registry, object};

impl Registry {
    /// Takes one disruption out of the budget that covers the pod, or refuses with 429. Pods that no
    /// longer serve may always go.
    pub async fn claim_disruption(&self, context: &Context, pod: &Value) -> Result<(), Status> {
        let phase = object::at_str(pod, &["status", "phase"]);
        if matches!(phase, "Succeeded" | "Failed" | "Pending") || object::deleting(pod) {
            return Ok(());
        }
        let Some(budgets) = self.resources.get("policy", "v1", "poddisruptionbudgets") else {
            return Ok(());
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
            [] => return Ok(()),
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
            return Ok(());
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
            context,
            budgets,
            namespace,
            &name,
            Part::Status,
            false,
            &mut claim,
            &Open,
        )
        .await?;
        Ok(())
    }
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
        let mut status = Status::too_many_requests(
            "Cannot evict pod as it would violate the pod's disruption budget.",
            10,
        );
        add_cause(
            &mut status,
            format!(
                "The disruption budget {} is still being processed by the server.",
                object::name(budget)
            ),
        );
        return Err(status);
    }
    let allowed = number("disruptionsAllowed");
    if allowed <= 0 {
        let mut status = Status::too_many_requests(
            "Cannot evict pod as it would violate the pod's disruption budget.",
            0,
        );
        add_cause(
            &mut status,
            format!(
                "The disruption budget {} needs {} healthy pods and has {} currently",
                object::name(budget),
                number("desiredHealthy"),
                number("currentHealthy")
            ),
        );
        return Err(status);
    }
    let mut budget = budget.clone();
    object::put(&mut budget, &["status", "disruptionsAllowed"], json!(allowed - 1));
    object::put(&mut budget, &["status", "disruptedPods", pod], json!(now));
    Ok(budget)
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
        let refused = take_one(&after, "q", "now").expect_err("none left");
        assert_eq!(refused.code, 429);
        assert_eq!(
            refused.details.expect("details").causes[0].message,
            "The disruption budget b needs 2 healthy pods and has 3 currently"
        );
    }
}
