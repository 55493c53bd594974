//! The FlowSchemas and PriorityLevelConfigurations that every cluster has: the mandatory ones, which are always as
//! here, and the suggested ones, which an administrator may take over by clearing an annotation.

use serde_json::{Value, json};

const API_VERSION: &str = "flowcontrol.apiserver.k8s.io/v1";
pub const AUTO_UPDATE: &str = "apf.kubernetes.io/autoupdate-spec";

/// Name, shares, lendable percentage, and queues, hand size, length of a queue.
type LevelRow = (&'static str, u32, u32, Option<(u32, u32, u32)>);

const LEVELS: [LevelRow; 7] = [
    ("catch-all", 5, 0, None),
    ("system", 30, 33, Some((64, 6, 50))),
    ("node-high", 40, 25, Some((64, 6, 50))),
    ("leader-election", 10, 0, Some((16, 4, 50))),
    ("workload-high", 40, 50, Some((128, 6, 50))),
    ("workload-low", 100, 90, Some((128, 6, 50))),
    ("global-default", 20, 50, Some((128, 6, 50))),
];

/// Whether an object is kept as it is here whatever anybody writes.
pub fn mandatory(name: &str) -> bool {
    matches!(name, "exempt" | "catch-all")
}

/// Priority levels first: a FlowSchema names one.
pub fn all() -> Vec<Value> {
    let mut objects = vec![object(
        "PriorityLevelConfiguration",
        "exempt",
        json!({"type": "Exempt", "exempt": {"nominalConcurrencyShares": 0, "lendablePercent": 0}}),
    )];
    for (name, shares, lendable, queuing) in LEVELS {
        let response = match queuing {
            None => json!({"type": "Reject"}),
            Some((queues, hand, length)) => json!({"type": "Queue", "queuing":
                {"queues": queues, "handSize": hand, "queueLengthLimit": length}}),
        };
        let spec = json!({"type": "Limited", "limited": {"nominalConcurrencyShares": shares,
            "lendablePercent": lendable, "limitResponse": response}});
        objects.push(object("PriorityLevelConfiguration", name, spec));
    }
    objects.extend(schemas());
    objects
}

fn schemas() -> Vec<Value> {
    let group = |name: &str| json!({"kind": "Group", "group": {"name": name}});
    let user = |name: &str| json!({"kind": "User", "user": {"name": name}});
    let kube_system =
        || json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "kube-system", "name": "*"}});
    let everyone = || vec![group("system:unauthenticated"), group("system:authenticated")];
    let everything = |subjects: Vec<Value>| {
        json!([{"subjects": subjects,
            "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true, "namespaces": ["*"]}],
            "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]}])
    };
    let leases = |verbs: Value| json!({"verbs": verbs, "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "namespaces": ["*"]});
    vec![
        schema(
            "exempt",
            1,
            "exempt",
            "",
            everything(vec![group("system:masters")]),
        ),
        schema("catch-all", 10_000, "catch-all", "ByUser", everything(everyone())),
        schema(
            "system-nodes",
            500,
            "system",
            "ByUser",
            everything(vec![group("system:nodes")]),
        ),
        schema(
            "system-node-high",
            400,
            "node-high",
            "ByUser",
            json!([{"subjects": [group("system:nodes")], "resourceRules": [
                {"verbs": ["*"], "apiGroups": [""], "resources": ["nodes", "nodes/status"], "clusterScope": true, "namespaces": ["*"]},
                leases(json!(["*"]))]}]),
        ),
        schema(
            "probes",
            2,
            "exempt",
            "",
            json!([{"subjects": everyone(), "nonResourceRules":
                [{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/readyz", "/livez"]}]}]),
        ),
        schema(
            "system-leader-election",
            100,
            "leader-election",
            "ByUser",
            json!([{"subjects": [user("system:kube-controller-manager"), user("system:kube-scheduler"), kube_system()],
                "resourceRules": [leases(json!(["get", "create", "update"]))]}]),
        ),
        schema(
            "kube-controller-manager",
            800,
            "workload-high",
            "ByNamespace",
            everything(vec![user("system:kube-controller-manager")]),
        ),
        schema(
            "kube-scheduler",
            800,
            "workload-high",
            "ByNamespace",
            everything(vec![user("system:kube-scheduler")]),
        ),
        schema(
            "kube-system-service-accounts",
            900,
            "workload-high",
            "ByNamespace",
            everything(vec![kube_system()]),
        ),
        schema(
            "service-accounts",
            9000,
            "workload-low",
            "ByUser",
            everything(vec![group("system:serviceaccounts")]),
        ),
        schema(
            "global-default",
            9900,
            "global-default",
            "ByUser",
            everything(everyone()),
        ),
    ]
}

fn schema(name: &str, precedence: u32, level: &str, by: &str, rules: Value) -> Value {
    let mut spec = json!({"priorityLevelConfiguration": {"name": level}, "matchingPrecedence": precedence,
        "rules": rules});
    if !by.is_empty() {
        spec["distinguisherMethod"] = json!({"type": by});
    }
    object("FlowSchema", name, spec)
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": API_VERSION, "kind": kind, "spec": spec,
        "metadata": {"name": name, "annotations": {AUTO_UPDATE: "true"}}})
}

/// What a present object must become: its specification, where it is ours to keep.
pub fn reconcile(present: &Value, wanted: &Value) -> Option<Value> {
    let name = wanted["metadata"]["name"].as_str().unwrap_or("");
    let ours = mandatory(name) || present["metadata"]["annotations"][AUTO_UPDATE] == "true";
    if !ours || present["spec"] == wanted["spec"] {
        return None;
    }
    let mut next = present.clone();
    next["spec"] = wanted["spec"].clone();
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schema_names_a_level_that_is_made_before_it() {
        let mut levels = Vec::new();
        for object in all() {
            let name = object["metadata"]["name"].as_str().expect("a name").to_string();
            match object["spec"]["priorityLevelConfiguration"]["name"].as_str() {
                Some(level) => assert!(levels.iter().any(|known| known == level), "{name}"),
                None => levels.push(name),
            }
        }
        assert_eq!(levels.len(), 8);
    }

    #[test]
    fn what_was_taken_over_is_left_alone() {
        let wanted = schema("service-accounts", 9000, "workload-low", "ByUser", json!([]));
        let mut present = wanted.clone();
        assert_eq!(reconcile(&present, &wanted), None);
        present["spec"]["matchingPrecedence"] = json!(1);
        assert_eq!(
            reconcile(&present, &wanted).expect("brought back")["spec"],
            wanted["spec"]
        );
        present["metadata"]["annotations"][AUTO_UPDATE] = json!("false");
        assert_eq!(reconcile(&present, &wanted), None);
        present["metadata"]["name"] = json!("exempt");
        let mut wanted = wanted;
        wanted["metadata"]["name"] = json!("exempt");
        assert!(
            reconcile(&present, &wanted).is_some(),
            "mandatory ones are not to be taken over"
        );
    }
}
