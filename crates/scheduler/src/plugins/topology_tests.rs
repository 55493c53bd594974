//! PodTopologySpread and InterPodAffinity over small clusters, by the plain algorithm.

use crate::cache::Cache;
use crate::cycle::{Outcome, schedule, total_scores};
use crate::fixtures::{info, labelled, node_meta, object};
use crate::framework::{CycleState, Profile};
use crate::listers::Listers;
use crate::node::NodeInfo;
use crate::plugins::testing::profile_with;
use crate::pod::PodInfo;
use serde_json::{Value, json};
use skiff_client::Key;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Nodes `a1`, `a2` in zone a and `b1`, `b2` in zone b.
fn cluster() -> Cache {
    let mut cache = Cache::default();
    for name in ["a1", "a2", "b1", "b2"] {
        let labels = json!({"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": name[..1]});
        let allocatable = json!({"allocatable": {"cpu": "8", "memory": "8Gi", "pods": "20"}});
        cache.set_node(name, node_meta(name, json!({}), labels, allocatable));
    }
    cache
}

fn web(name: &str, spec: Value) -> Arc<PodInfo> {
    labelled(name, json!({"app": "web"}), spec)
}

fn feasible(profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>) -> BTreeSet<String> {
    let mut state = CycleState::default();
    let prepared = crate::cycle::pre_filter(profile, cache, pod, &mut state, |_| true);
    assert!(matches!(prepared, crate::cycle::Prepared::Ready { .. }));
    let fits = cache
        .nodes()
        .filter(|node| profile.run_filters(&state, pod, node).is_ok());
    fits.map(|node| node.name.to_string()).collect()
}

fn scores(profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>) -> Vec<(String, i64)> {
    let mut state = CycleState::default();
    crate::cycle::pre_filter(profile, cache, pod, &mut state, |_| true);
    let nodes: Vec<&NodeInfo> = cache.nodes().collect();
    let totals = total_scores(profile, cache, pod, &mut state, &nodes);
    nodes
        .iter()
        .map(|node| node.name.to_string())
        .zip(totals)
        .collect()
}

fn names(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn profile() -> Profile {
    profile_with(Arc::default())
}

fn spread(key: &str, max_skew: i32, when: &str) -> Value {
    json!({"topologySpreadConstraints": [{"topologyKey": key, "maxSkew": max_skew, "whenUnsatisfiable": when,
        "labelSelector": {"matchLabels": {"app": "web"}}}]})
}

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

#[tokio::test]
async fn hard_constraints_keep_the_skew() {
    let mut cache = cluster();
    let pod = web("p", spread(ZONE, 1, "DoNotSchedule"));
    assert_eq!(feasible(&profile(), &cache, &pod).len(), 4);
    cache.place(web("x", json!({})), "a1");
    assert_eq!(feasible(&profile(), &cache, &pod), names(&["b1", "b2"]));
    cache.place(web("y", json!({})), "b1");
    assert_eq!(feasible(&profile(), &cache, &pod).len(), 4);
    let by_host = web("p", spread(HOST, 1, "DoNotSchedule"));
    assert_eq!(feasible(&profile(), &cache, &by_host), names(&["a2", "b2"]));
    // A pod that is being deleted, of another namespace or with other labels does not count.
    let mut other = object("z", json!({"app": "web"}), json!({}));
    other.metadata.namespace = Some("other".into());
    cache.place(info(&other), "a1");
    cache.place(labelled("w", json!({"app": "db"}), json!({})), "a2");
    assert_eq!(feasible(&profile(), &cache, &by_host), names(&["a2", "b2"]));
}

#[tokio::test]
async fn min_domains_and_missing_labels_and_policies() {
    let mut cache = cluster();
    let mut min = spread(ZONE, 1, "DoNotSchedule");
    min["topologySpreadConstraints"][0]["minDomains"] = json!(3);
    cache.place(web("x", json!({})), "a1");
    cache.place(web("y", json!({})), "b1");
    assert!(
        feasible(&profile(), &cache, &web("p", min)).is_empty(),
        "the third domain counts as empty"
    );
    cache.set_node(
        "c",
        node_meta(
            "c",
            json!({}),
            json!({}),
            json!({"allocatable": {"cpu": "8", "pods": "9"}}),
        ),
    );
    let pod = web("p", spread(ZONE, 1, "DoNotSchedule"));
    assert!(!feasible(&profile(), &cache, &pod).contains("c"));
    let Outcome::Nowhere(diagnosis) = schedule(
        &profile(),
        &cache,
        &web(
            "p",
            json!({
        "nodeSelector": {"x": "y"}, "topologySpreadConstraints": spread(ZONE, 1, "DoNotSchedule")["topologySpreadConstraints"]}),
        ),
        &mut 0,
    ) else {
        panic!()
    };
    assert!(
        diagnosis
            .message
            .contains("5 node(s) didn't match Pod's node affinity/selector"),
        "{}",
        diagnosis.message
    );
    // Nodes that the pod does not select are not counted, unless the policy says so.
    let mut cache = cluster();
    cache.place(web("x", json!({})), "b1");
    cache.place(web("y", json!({})), "b1");
    let mut only_a = spread(ZONE, 1, "DoNotSchedule");
    only_a["nodeSelector"] = json!({ZONE: "b"});
    assert_eq!(
        feasible(&profile(), &cache, &web("p", only_a.clone())),
        names(&["b1", "b2"]),
        "b is the only domain"
    );
    only_a["topologySpreadConstraints"][0]["nodeAffinityPolicy"] = json!("Ignore");
    assert!(feasible(&profile(), &cache, &web("p", only_a)).is_empty());
}

#[tokio::test]
async fn match_label_keys_narrow_what_is_counted() {
    let mut cache = cluster();
    let mut keyed = spread(ZONE, 1, "DoNotSchedule");
    keyed["topologySpreadConstraints"][0]["matchLabelKeys"] = json!(["hash"]);
    cache.place(labelled("x", json!({"app": "web", "hash": "1"}), json!({})), "a1");
    let pod = |hash: &str| labelled("p", json!({"app": "web", "hash": hash}), keyed.clone());
    assert_eq!(feasible(&profile(), &cache, &pod("1")), names(&["b1", "b2"]));
    assert_eq!(feasible(&profile(), &cache, &pod("2")).len(), 4);
}

#[tokio::test]
async fn soft_constraints_and_system_defaults_score() {
    let mut cache = cluster();
    cache.place(web("x", json!({"containers": [{"name": "c"}]})), "a1");
    cache.place(labelled("balance", json!({}), json!({})), "b1");
    let soft = scores(&profile(), &cache, &web("p", spread(ZONE, 1, "ScheduleAnyway")));
    let of = |scores: &[(String, i64)], name: &str| scores.iter().find(|(one, _)| one == name).unwrap().1;
    assert!(of(&soft, "b2") > of(&soft, "a2"));
    // Without constraints, pods that a service selects are spread all the same.
    let plain = scores(&profile(), &cache, &web("p", json!({})));
    assert_eq!(of(&plain, "b2"), of(&plain, "a2"));
    let listers = Arc::new(Listers::default());
    listers.set_service(
        &Key::new("default", "s"),
        Some([("app".to_owned(), "web".to_owned())].into_iter().collect()),
    );
    let spread = scores(&profile_with(listers), &cache, &web("p", json!({})));
    assert!(of(&spread, "b2") > of(&spread, "a2") && of(&spread, "a2") > of(&spread, "a1"));
}

fn towards(kind: &str, key: &str, app: &str) -> Value {
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}}]}}})
}

#[tokio::test]
async fn required_affinity_and_anti_affinity() {
    let mut cache = cluster();
    let first = web("p", towards("podAffinity", ZONE, "web"));
    assert_eq!(
        feasible(&profile(), &cache, &first).len(),
        4,
        "the first of its kind goes anywhere"
    );
    let lonely = web("p", towards("podAffinity", ZONE, "db"));
    assert!(feasible(&profile(), &cache, &lonely).is_empty());
    cache.place(labelled("db", json!({"app": "db"}), json!({})), "a1");
    assert_eq!(feasible(&profile(), &cache, &lonely), names(&["a1", "a2"]));
    let apart = web("p", towards("podAntiAffinity", HOST, "db"));
    assert_eq!(feasible(&profile(), &cache, &apart), names(&["a2", "b1", "b2"]));
    // Those that are there may not want the newcomer either.
    cache.place(
        labelled(
            "shy",
            json!({"app": "shy"}),
            towards("podAntiAffinity", ZONE, "web"),
        ),
        "b1",
    );
    assert_eq!(
        feasible(&profile(), &cache, &web("p", json!({}))),
        names(&["a1", "a2"])
    );
    assert_eq!(
        feasible(
            &profile(),
            &cache,
            &labelled("q", json!({"app": "db"}), json!({}))
        )
        .len(),
        4
    );
}

#[tokio::test]
async fn namespaces_of_terms() {
    let mut cache = cluster();
    let mut other = object("db", json!({"app": "db"}), json!({}));
    other.metadata.namespace = Some("prod".into());
    cache.place(info(&other), "a1");
    let listers = Arc::new(Listers::default());
    listers.set_namespace(
        "prod",
        Some([("env".to_owned(), "prod".to_owned())].into_iter().collect()),
    );
    let check = |term: Value, expected: usize| {
        let mut spec = towards("podAffinity", ZONE, "db");
        let required =
            &mut spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
        for (key, value) in term.as_object().unwrap() {
            required[key] = value.clone();
        }
        let profile = profile_with(Arc::clone(&listers));
        assert_eq!(
            feasible(&profile, &cache, &web("p", spec)).len(),
            expected,
            "{term}"
        );
    };
    check(json!({}), 0);
    check(json!({"namespaces": ["prod"]}), 2);
    check(json!({"namespaceSelector": {}}), 2);
    check(json!({"namespaceSelector": {"matchLabels": {"env": "prod"}}}), 2);
    check(json!({"namespaceSelector": {"matchLabels": {"env": "test"}}}), 0);
}

#[tokio::test]
async fn preferred_terms_of_both_sides_score() {
    let mut cache = cluster();
    let preferred = |kind: &str| {
        json!({"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 50, "podAffinityTerm": {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "db"}}}}]}}})
    };
    cache.place(labelled("db", json!({"app": "db"}), json!({})), "a1");
    let of = |scores: &[(String, i64)], name: &str| scores.iter().find(|(one, _)| one == name).unwrap().1;
    let near = scores(&profile(), &cache, &web("p", preferred("podAffinity")));
    assert_eq!(
        of(&near, "a2") - of(&near, "b2"),
        200,
        "all of the score, with weight 2"
    );
    let far = scores(&profile(), &cache, &web("p", preferred("podAntiAffinity")));
    assert_eq!(of(&far, "b2") - of(&far, "a2"), 200);
    // The pod that is there wants pods of the app db near it.
    cache.place(
        labelled("fan", json!({"app": "fan"}), preferred("podAffinity")),
        "b1",
    );
    let wanted = scores(
        &profile(),
        &cache,
        &labelled("q", json!({"app": "db"}), json!({})),
    );
    assert_eq!(of(&wanted, "b2") - of(&wanted, "a2"), 200);
}

#[tokio::test]
async fn preemption_follows_affinity() {
    let mut cache = cluster();
    for (name, node) in [("x", "a1"), ("y", "a2"), ("z", "b1"), ("w", "b2")] {
        cache.place(labelled(name, json!({"app": "db"}), json!({"priority": 1})), node);
    }
    let mut spec = towards("podAntiAffinity", HOST, "db");
    spec["priority"] = json!(5);
    let Outcome::Nowhere(diagnosis) = schedule(&profile(), &cache, &web("p", spec), &mut 0) else {
        panic!()
    };
    assert_eq!(diagnosis.post_filter.victims.len(), 1, "{}", diagnosis.message);
    let mut spec = spread(HOST, 1, "DoNotSchedule");
    spec["priority"] = json!(5);
    let mut cache = cluster();
    for (name, node) in [("x", "a1"), ("y", "a2"), ("z", "b1")] {
        cache.place(web(name, json!({"priority": 1})), node);
    }
    cache.set_node(
        "b2",
        node_meta(
            "b2",
            json!({"unschedulable": true}),
            json!({HOST: "b2", ZONE: "b"}),
            json!({}),
        ),
    );
    let Outcome::Nowhere(diagnosis) = schedule(&profile(), &cache, &web("p", spec), &mut 0) else {
        panic!()
    };
    assert_eq!(diagnosis.post_filter.victims.len(), 1, "{}", diagnosis.message);
}
