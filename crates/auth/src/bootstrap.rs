//! Upstream's bootstrap roles and bindings, read from a table of facts.

use crate::Rule;
use serde_json::{Map, Value, json};

const TABLE: &str = include_str!("../data/bootstrap.txt");

/// What there is besides where a resource is served that is off by default: group, version, plural name, table.
const ON_REQUEST: &[(&str, &str, &str, &str)] = &[
    (
        "certificates.k8s.io",
        "v1beta1",
        "clustertrustbundles",
        include_str!("../data/clustertrustbundles.txt"),
    ),
    (
        "certificates.k8s.io",
        "v1beta1",
        "podcertificaterequests",
        include_str!("../data/podcertificaterequests.txt"),
    ),
    (
        "scheduling.k8s.io",
        "v1alpha2",
        "podgroups",
        include_str!("../data/podgroups.txt"),
    ),
    (
        "storagemigration.k8s.io",
        "v1beta1",
        "storageversionmigrations",
        include_str!("../data/storagemigration.txt"),
    ),
];

const GROUP: &str = "rbac.authorization.k8s.io";

/// What a kubelet may do: the rules of ClusterRole `system:node`. `serves` is that of [`bootstrap_objects`].
pub(crate) fn node_rules(serves: impl Fn(&str, &str, &str) -> bool) -> Vec<Rule> {
    let objects = bootstrap_objects(serves);
    let role = objects
        .iter()
        .find(|o| o["kind"] == "ClusterRole" && o["metadata"]["name"] == "system:node");
    role.and_then(|r| serde_json::from_value(r["rules"].clone()).ok())
        .unwrap_or_default()
}

/// All roles and bindings to have at start. `serves` answers for resources that are off by default, by group, version and
/// plural name.
pub fn bootstrap_objects(serves: impl Fn(&str, &str, &str) -> bool) -> Vec<Value> {
    let mut objects: Vec<Value> = Vec::new();
    // The role that rules are of.
    let mut current = 0;
    let asked = ON_REQUEST
        .iter()
        .filter(|(group, version, plural, _)| serves(group, version, plural));
    let tables = std::iter::once(TABLE).chain(asked.map(|(_, _, _, table)| *table));
    for line in tables.flat_map(str::lines) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["role", namespace, name, ref rest @ ..] => {
                current = objects.len();
                objects.push(role(namespace, name, rest));
            }
            ["more", name] => {
                let of_name = |o: &Value| o["kind"] == "ClusterRole" && o["metadata"]["name"] == name;
                current = objects.iter().position(of_name).unwrap_or(objects.len());
            }
            ["binding", namespace, name, role, ref subjects @ ..] => {
                objects.push(binding(namespace, name, role, subjects));
            }
            ["rule", groups, resources, names, verbs] => {
                let groups = groups
                    .split(',')
                    .map(|g| if g == "core" { "" } else { g })
                    .collect::<Vec<_>>();
                let mut rule =
                    json!({"apiGroups": groups, "resources": list(resources), "verbs": list(verbs)});
                if names != "-" {
                    rule["resourceNames"] = list(names);
                }
                push_rule(objects.get_mut(current), rule);
            }
            ["url", paths, verbs] => {
                push_rule(
                    objects.get_mut(current),
                    json!({"nonResourceURLs": list(paths), "verbs": list(verbs)}),
                );
            }
            _ => {}
        }
    }
    fill_aggregated(&mut objects);
    objects
}

fn list(words: &str) -> Value {
    words.split(',').collect::<Vec<_>>().into()
}

fn push_rule(role: Option<&mut Value>, rule: Value) {
    if let Some(rules) = role.and_then(|o| o["rules"].as_array_mut()) {
        rules.push(rule);
    }
}

fn metadata(namespace: &str, name: &str, labels: &[&str]) -> Value {
    let mut label_map = Map::from_iter([("kubernetes.io/bootstrapping".to_owned(), json!("rbac-defaults"))]);
    label_map.extend(
        labels
            .iter()
            .filter_map(|l| l.split_once('='))
            .map(|(k, v)| (k.to_owned(), json!(v))),
    );
    let mut metadata = json!({
        "name": name,
        "labels": label_map,
        "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"},
    });
    if namespace != "-" {
        metadata["namespace"] = namespace.into();
    }
    metadata
}

fn role(namespace: &str, name: &str, rest: &[&str]) -> Value {
    let (aggregates, labels): (Vec<&str>, Vec<&str>) =
        rest.iter().partition(|w| w.starts_with("aggregates="));
    let kind = if namespace == "-" { "ClusterRole" } else { "Role" };
    let mut object = json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": kind,
        "metadata": metadata(namespace, name, &labels), "rules": [],
    });
    if let Some(label) = aggregates.first().and_then(|a| a.strip_prefix("aggregates=")) {
        object["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {label: "true"}}]});
    }
    object
}

fn binding(namespace: &str, name: &str, role: &str, subjects: &[&str]) -> Value {
    let kind = if namespace == "-" {
        "ClusterRoleBinding"
    } else {
        "RoleBinding"
    };
    let (role_kind, role_name) = role.split_once('/').unwrap_or(("ClusterRole", role));
    let subjects: Vec<Value> = subjects.iter().filter_map(|s| subject(s)).collect();
    let mut object = json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": kind, "metadata": metadata(namespace, name, &[]),
        "roleRef": {"apiGroup": GROUP, "kind": role_kind, "name": role_name},
    });
    if !subjects.is_empty() {
        object["subjects"] = subjects.into();
    }
    object
}

fn subject(text: &str) -> Option<Value> {
    let (kind, name) = text.split_once(':')?;
    Some(if kind == "ServiceAccount" {
        let (namespace, name) = name.split_once(':')?;
        json!({"kind": kind, "namespace": namespace, "name": name})
    } else {
        json!({"kind": kind, "apiGroup": GROUP, "name": name})
    })
}

/// Gives each aggregating ClusterRole the rules of the roles that it selects, as the aggregation controller does.
pub fn fill_aggregated(objects: &mut [Value]) {
    // `edit` aggregates into `admin` and is itself aggregated: view, edit, admin need one round each.
    for _ in 0..3 {
        let snapshot = objects.to_vec();
        for object in objects.iter_mut() {
            let Some(selectors) = object
                .pointer("/aggregationRule/clusterRoleSelectors")
                .and_then(Value::as_array)
            else {
                continue;
            };
            let selectors: Vec<skiff_meta::selector::LabelSelector> = selectors
                .iter()
                .filter_map(|s| skiff_meta::selector::LabelSelector::from_value(s).ok())
                .collect();
            let own = object["metadata"]["name"].clone();
            let mut rules: Vec<Value> = Vec::new();
            let selected = snapshot.iter().filter(|other| {
                other["kind"] == "ClusterRole"
                    && other["metadata"]["name"] != own
                    && selectors
                        .iter()
                        .any(|s| s.matches_value(&other["metadata"]["labels"]))
            });
            for rule in selected.filter_map(|other| other["rules"].as_array()).flatten() {
                if !rules.contains(rule) {
                    rules.push(rule.clone());
                }
            }
            object["rules"] = rules.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_reads_whole() {
        let objects = bootstrap_objects(|_, _, _| true);
        let lines = std::iter::once(TABLE)
            .chain(ON_REQUEST.iter().map(|(_, _, _, table)| *table))
            .flat_map(str::lines)
            .filter(|l| l.starts_with("role ") || l.starts_with("binding "))
            .count();
        assert_eq!(objects.len(), lines);
        assert!(objects.iter().all(|o| o["metadata"]["name"].is_string()));
        let find = |name: &str| {
            objects
                .iter()
                .find(|o| o["kind"] == "ClusterRole" && o["metadata"]["name"] == name)
        };
        assert_eq!(find("cluster-admin").unwrap()["rules"][0]["verbs"], json!(["*"]));
        for aggregated in ["admin", "edit", "view"] {
            assert!(
                find(aggregated).unwrap()["rules"].as_array().unwrap().len() > 5,
                "{aggregated}"
            );
        }
        let (usual, more) = (node_rules(|_, _, _| false), node_rules(|_, _, _| true));
        assert!(!usual.is_empty());
        assert_eq!(more.len(), usual.len() + 2);
        let bundles = node_rules(|_, _, plural| plural == "clustertrustbundles");
        assert_eq!(bundles.len(), usual.len() + 1);
        let publisher =
            find("system:controller:kube-apiserver-serving-clustertrustbundle-publisher").unwrap();
        assert_eq!(publisher["rules"].as_array().unwrap().len(), 3);
        let may_write = |name: &str| find(name).unwrap()["rules"].to_string().contains("podgroups");
        assert!(
            ["admin", "edit", "view", "system:kube-scheduler"]
                .iter()
                .all(|name| may_write(name))
        );
        let by_default = bootstrap_objects(|_, _, _| false);
        assert!(
            by_default
                .iter()
                .all(|o| !o["metadata"]["name"].to_string().contains("migrator"))
        );
    }
}
