//! The ClusterRole aggregation controller: a ClusterRole with an `aggregationRule` has the rules of the roles that
//! its selectors match, each once, and no others.

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use skiff_client::{Action, Informer, Key, Reconcile};

use crate::{Context, Error, selector};

/// The index of roles with an aggregation rule; it has one value.
const AGGREGATING: &str = "cluster-role-aggregation";
const MANAGER: &str = "clusterrole-aggregation-controller";

/// The rules that the role should have; `None` if it aggregates nothing. Within one selector roles come by name.
fn aggregated(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Option<Vec<PolicyRule>> {
    let rule = role.aggregation_rule.as_ref()?;
    let mut sorted: Vec<&Arc<ClusterRole>> = all.iter().collect();
    sorted.sort_by(|left, right| left.metadata.name.cmp(&right.metadata.name));
    let mut rules: Vec<PolicyRule> = Vec::new();
    for selector in rule.cluster_role_selectors.iter().flatten() {
        let selected = sorted.iter().filter(|other| {
            other.metadata.name != role.metadata.name
                && selector::matches(selector, other.metadata.labels.as_ref())
        });
        for rule in selected.flat_map(|other| other.rules.iter().flatten()) {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    Some(rules)
}

/// What is applied so that the role has `rules`; `None` if it has them.
fn plan(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Option<Value> {
    let rules = aggregated(role, all)?;
    if role.rules.as_deref().unwrap_or_default() == rules {
        return None;
    }
    let mut apply = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": role.metadata.name},
    });
    // Without rules the field is left out, and the ones that this manager owned go.
    if !rules.is_empty() {
        apply["rules"] = json!(rules);
    }
    Some(apply)
}

struct Aggregator {
    context: Context,
    roles: Informer<ClusterRole>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(Aggregator {
        roles: context.informers.informer(),
        context: context.clone(),
    });
    reconciler.roles.add_index(AGGREGATING, |role| {
        let found = role.aggregation_rule.as_ref();
        found.map(|_| String::new()).into_iter().collect()
    });
    context
        .controller("ClusterRoleAggregator", reconciler)
        .workers(5)
        .watches(|r| &r.roles, |r, _| r.aggregating())
        .run()
        .await;
}

impl Aggregator {
    /// Any role may be part of any aggregation, so a change of one concerns them all.
    fn aggregating(&self) -> Vec<Key> {
        let roles = self.roles.by_index(AGGREGATING, "");
        roles.iter().map(|role| Key::of(&**role)).collect()
    }
}

impl Reconcile for Aggregator {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, key: Key) -> Result<Action, Error> {
        let Some(role) = self.roles.get("", &key.name) else {
            return Ok(Action::Done);
        };
        if let Some(apply) = plan(&role, &self.roles.list()) {
            let api: Api<ClusterRole> = Api::all(self.context.client.clone());
            let params = PatchParams::apply(MANAGER).force();
            api.patch(&key.name, &params, &Patch::Apply(apply)).await?;
        }
        Ok(Action::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(value: Value) -> Arc<ClusterRole> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn rules_come_from_the_selected_roles() {
        let rule = |resource: &str| json!({"apiGroups": [""], "resources": [resource], "verbs": ["get"]});
        let part = |name: &str, label: &str, rules: Value| {
            role(json!({"metadata": {"name": name, "labels": {label: "true"}}, "rules": rules}))
        };
        let all = |present: Value| {
            vec![
                part("b", "one", json!([rule("pods"), rule("secrets")])),
                part("a", "one", json!([rule("pods")])),
                part("c", "two", json!([rule("nodes")])),
                part("d", "other", json!([rule("events")])),
                role(
                    json!({"metadata": {"name": "sum", "labels": {"one": "true"}}, "rules": present,
                    "aggregationRule": {"clusterRoleSelectors": [
                        {"matchLabels": {"two": "true"}}, {"matchLabels": {"one": "true"}}]}}),
                ),
            ]
        };
        let check = |present: Value, expected: Option<Value>| {
            let all = all(present);
            let planned = plan(&all[4], &all).map(|apply| apply["rules"].clone());
            assert_eq!(planned, expected);
        };
        let whole = json!([rule("nodes"), rule("pods"), rule("secrets")]);
        check(json!([]), Some(whole.clone()));
        check(json!([rule("events")]), Some(whole.clone()));
        check(whole, None);
        let plain = role(json!({"metadata": {"name": "plain"}, "rules": []}));
        assert_eq!(plan(&plain, &all(json!([]))), None);
        let none = role(json!({"metadata": {"name": "none"}, "rules": [rule("pods")],
            "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"x": "y"}}]}}));
        assert_eq!(plan(&none, &all(json!([]))).unwrap().get("rules"), None);
    }
}
