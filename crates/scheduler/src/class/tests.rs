//! The class cache against the plain algorithm, over random clusters.

use super::*;
use crate::cycle::total_scores;
use crate::fixtures::{info, node_meta, object};
use crate::listers::Listers;
use crate::plugins::testing::profile_with;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use skiff_client::Key;

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "kubernetes.io/hostname";

/// The nodes that fit and their scores by the plain algorithm over all nodes.
fn oracle(profile: &Profile, cache: &Cache, pod: &Arc<PodInfo>) -> HashMap<NodeId, i64> {
    let mut state = CycleState::default();
    match pre_filter(profile, cache, pod, &mut state, |_| true) {
        Prepared::Ready { names: None, .. } => {}
        _ => panic!("no such pods here"),
    }
    let fits = |node: &&NodeInfo| {
        profile
            .run_filters_with_nominated(&state, pod, node, cache)
            .is_ok()
    };
    let fitting: Vec<&NodeInfo> = cache.nodes().filter(fits).collect();
    if fitting.is_empty() {
        return HashMap::new();
    }
    let scores = total_scores(profile, cache, pod, &mut state, &fitting);
    fitting.iter().map(|node| node.id).zip(scores).collect()
}

fn random_node(rng: &mut StdRng, name: &str) -> crate::node::NodeMeta {
    let disk = ["ssd", "hdd"].choose(rng).unwrap();
    let mut labels = json!({ "disk": disk });
    if rng.random_bool(0.9) {
        labels[HOST] = json!(if rng.random_bool(0.05) { "shared" } else { name });
    }
    if rng.random_bool(0.9) {
        let zone = ["a", "b", "c"].choose(rng).unwrap();
        labels[ZONE] = json!(zone);
    }
    let taints = match rng.random_range(0..6) {
        0 => json!([{"key": "k", "effect": "NoSchedule"}]),
        1 => json!([{"key": "s", "effect": "PreferNoSchedule"}]),
        2 => json!([{"key": "s", "effect": "PreferNoSchedule"}, {"key": "t", "effect": "PreferNoSchedule"}]),
        _ => json!([]),
    };
    let images = if rng.random_bool(0.3) {
        json!([{"names": ["web:1"], "sizeBytes": 500_000_000}])
    } else {
        json!([])
    };
    let cpu = ["2", "4"].choose(rng).unwrap();
    let status = json!({"allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "12"}, "images": images});
    node_meta(
        name,
        json!({"taints": taints, "unschedulable": rng.random_bool(0.05)}),
        labels,
        status,
    )
}

fn term(key: &str, app: &str) -> Value {
    json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}})
}

/// Templates that pods are made from: labels and spec.
fn templates() -> Vec<(Value, Value)> {
    let container = |cpu: &str| json!([{"name": "c", "image": "web:1", "resources": {"requests": {"cpu": cpu, "memory": "200Mi"}}}]);
    let with = |cpu: &str, more: Value| {
        let mut spec = json!({"containers": container(cpu)});
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        spec
    };
    let spread = |key: &str, skew: i32, when: &str| {
        json!({"topologySpreadConstraints": [{"topologyKey": key, "maxSkew": skew, "whenUnsatisfiable": when,
            "labelSelector": {"matchLabels": {"app": "spread"}}}]})
    };
    let both = json!({"topologySpreadConstraints": [
        {"topologyKey": ZONE, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "spread"}},
            "nodeTaintsPolicy": "Honor"},
        {"topologyKey": HOST, "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"app": "spread"}}}]});
    let required = |kind: &str, key: &str, app: &str| json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term(key, app)]}}});
    let preferred = |kind: &str, key: &str, app: &str| {
        json!({"affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 30, "podAffinityTerm": term(key, app)}]}}})
    };
    vec![
        (json!({"app": "plain"}), with("100m", json!({}))),
        (
            json!({"app": "plain"}),
            with(
                "900m",
                json!({"tolerations": [{"key": "k", "operator": "Exists"}]}),
            ),
        ),
        (json!({"app": "served"}), with("100m", json!({}))),
        (
            json!({"app": "picky"}),
            with("200m", json!({"nodeSelector": {"disk": "ssd"}})),
        ),
        (
            json!({"app": "wishes"}),
            with(
                "200m",
                json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 5, "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}}]}}}),
            ),
        ),
        (
            json!({"app": "ports"}),
            json!({"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}]}]}),
        ),
        (
            json!({"app": "spread"}),
            with("100m", spread(ZONE, 1, "DoNotSchedule")),
        ),
        (
            json!({"app": "spread"}),
            with("100m", spread(HOST, 1, "DoNotSchedule")),
        ),
        (
            json!({"app": "spread"}),
            with("100m", spread(ZONE, 1, "ScheduleAnyway")),
        ),
        (
            json!({"app": "spread"}),
            with("100m", spread(HOST, 1, "ScheduleAnyway")),
        ),
        (json!({"app": "spread"}), with("100m", both)),
        (
            json!({"app": "near"}),
            with("100m", required("podAffinity", ZONE, "near")),
        ),
        (
            json!({"app": "apart"}),
            with("100m", required("podAntiAffinity", HOST, "apart")),
        ),
        (
            json!({"app": "shy"}),
            with("100m", required("podAntiAffinity", ZONE, "plain")),
        ),
        (
            json!({"app": "likes"}),
            with("100m", preferred("podAffinity", ZONE, "plain")),
        ),
        (
            json!({"app": "plain"}),
            with("100m", preferred("podAntiAffinity", HOST, "plain")),
        ),
    ]
}

#[tokio::test]
async fn it_chooses_as_the_plain_algorithm_does() {
    for seed in 0..60 {
        let mut rng = StdRng::seed_from_u64(seed);
        let listers = Arc::new(Listers::default());
        let labels = [("app".to_owned(), "served".to_owned())].into_iter().collect();
        listers.set_service(&Key::new("default", "served"), Some(labels));
        let profile = profile_with(Arc::clone(&listers));
        let (mut cache, mut classes) = (Cache::default(), Classes::default());
        let templates = templates();
        let mut names: Vec<String> = (0..rng.random_range(1..14)).map(|n| format!("n{n}")).collect();
        for name in &names {
            cache.set_node(name, random_node(&mut rng, name));
        }
        let (mut placed, mut from_cache) = (Vec::new(), 0);
        for step in 0..220 {
            match rng.random_range(0..20) {
                0 if names.len() < 16 => {
                    let name = format!("m{step}");
                    cache.set_node(&name, random_node(&mut rng, &name));
                    names.push(name);
                }
                1 if names.len() > 1 => {
                    let gone = names.swap_remove(rng.random_range(0..names.len()));
                    cache.remove_node(&gone);
                }
                2 => {
                    let name = names.choose(&mut rng).unwrap();
                    cache.set_node(name, random_node(&mut rng, name));
                }
                3 | 4 if !placed.is_empty() => {
                    let uid: Arc<str> = placed.swap_remove(rng.random_range(0..placed.len()));
                    cache.remove_pod(&uid);
                }
                5 => {
                    let waiting = info(&object(&format!("w{step}"), json!({}), json!({"priority": 5})));
                    cache.nominate(&waiting, names.choose(&mut rng).unwrap());
                    if rng.random_bool(0.7) {
                        cache.forget_nomination(&waiting.uid);
                    }
                }
                _ => {}
            }
            let (labels, spec) = templates.choose(&mut rng).unwrap();
            let pod = info(&object(&format!("p{step}"), labels.clone(), spec.clone()));
            let expected = oracle(&profile, &cache, &pod);
            let Some(outcome) = classes.schedule(&profile, &mut cache, &pod) else {
                if let Some(id) = expected.keys().next() {
                    let name = cache.get(*id).unwrap().name.clone();
                    placed.push(Arc::clone(&pod.uid));
                    cache.assume(pod, &name);
                }
                continue;
            };
            from_cache += 1;
            match outcome {
                Outcome::Node { id, .. } => {
                    let best = expected.values().max();
                    assert_eq!(
                        expected.get(&id),
                        best,
                        "seed {seed} step {step} {labels} {spec}\n{expected:?}"
                    );
                    let name = cache.get(id).unwrap().name.clone();
                    placed.push(Arc::clone(&pod.uid));
                    cache.assume(pod, &name);
                }
                Outcome::Nowhere(diagnosis) => {
                    assert!(
                        expected.is_empty(),
                        "seed {seed} step {step} {labels} {spec}\n{expected:?}"
                    );
                    // The reasons are those of the plain algorithm too.
                    let Outcome::Nowhere(plain) = schedule(&profile, &cache, &pod, &mut 0) else {
                        panic!("it fits nowhere")
                    };
                    assert_eq!(
                        diagnosis.message, plain.message,
                        "seed {seed} step {step} {labels} {spec}"
                    );
                    assert_eq!(diagnosis.rejected_by, plain.rejected_by);
                }
            }
        }
        assert!(from_cache > 40, "the cache was asked {from_cache} times");
    }
}

#[tokio::test]
async fn preemption_costs_as_little_as_by_the_plain_algorithm() {
    for seed in 0..20 {
        let mut rng = StdRng::seed_from_u64(seed);
        let profile = profile_with(Arc::default());
        let (mut cache, mut classes) = (Cache::default(), Classes::default());
        for n in 0..6 {
            let name = format!("n{n}");
            let status = json!({"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"}});
            cache.set_node(&name, node_meta(&name, json!({}), json!({}), status));
            for m in 0..4 {
                let container = json!({"name": "c", "resources": {"requests": {"cpu": "1"}}});
                let spec = json!({"priority": rng.random_range(0..4), "containers": [container]});
                cache.place(info(&object(&format!("low{n}-{m}"), json!({}), spec)), &name);
            }
        }
        for step in 0..12 {
            let cpu = ["1", "2"].choose(&mut rng).unwrap();
            let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
            let spec = json!({"priority": rng.random_range(2..9), "containers": [container]});
            let pod = info(&object(&format!("p{step}"), json!({}), spec));
            pod.shape.attempts.store(9, std::sync::atomic::Ordering::Relaxed);
            let plain = schedule(&profile, &cache, &pod, &mut 0);
            let fast = classes.schedule(&profile, &mut cache, &pod).unwrap();
            let (Outcome::Nowhere(plain), Outcome::Nowhere(fast)) = (plain, fast) else {
                continue;
            };
            let sum = |diagnosis: &Diagnosis| {
                let victims = &diagnosis.post_filter.victims;
                let highest = victims.iter().map(|one| one.priority()).max();
                (
                    highest,
                    victims.iter().map(|one| one.priority()).sum::<i32>(),
                    victims.len(),
                )
            };
            assert_eq!(sum(&fast), sum(&plain), "seed {seed} step {step}");
            assert_eq!(fast.message, plain.message, "seed {seed} step {step}");
            let node = fast.post_filter.nominate.clone().unwrap_or_default();
            if node.is_empty() {
                continue;
            }
            cache.nominate(&pod, &node);
            for victim in &fast.post_filter.victims {
                cache.remove_pod(&victim.uid);
            }
            let Some(Outcome::Node { id, .. }) = classes.schedule(&profile, &mut cache, &pod) else {
                panic!("the room was made for it")
            };
            assert_eq!(*cache.get(id).unwrap().name, *node);
            cache.assume(pod, &node);
        }
    }
}

#[tokio::test]
async fn volumes_are_asked_for_the_nodes_that_come_into_question() {
    let listers = Arc::new(Listers::default());
    let profile = profile_with(Arc::clone(&listers));
    let (mut cache, mut classes) = (Cache::default(), Classes::default());
    for n in 0..5 {
        let name = format!("n{n}");
        let status = json!({"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "20"}});
        cache.set_node(&name, node_meta(&name, json!({}), json!({HOST: name}), status));
    }
    for n in 0..5 {
        let annotations = json!({"pv.kubernetes.io/bind-completed": "yes"});
        let claim = json!({"metadata": {"name": format!("c{n}"), "namespace": "default", "annotations": annotations},
            "spec": {"volumeName": format!("v{n}")}});
        let selector = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": HOST, "operator": "In", "values": [format!("n{n}")]}]}]});
        let volume =
            json!({"metadata": {"name": format!("v{n}")}, "spec": {"nodeAffinity": {"required": selector}}});
        let claim = Arc::new(serde_json::from_value(claim).unwrap());
        listers.claims.set(Key::new("default", format!("c{n}")), claim);
        listers.volumes.set(
            Key::new("", format!("v{n}")),
            Arc::new(serde_json::from_value(volume).unwrap()),
        );
    }
    for n in 0..5 {
        let spec =
            json!({"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": format!("c{n}")}}]});
        let pod = info(&object(&format!("p{n}"), json!({}), spec));
        pod.shape.attempts.store(9, std::sync::atomic::Ordering::Relaxed);
        let Some(Outcome::Node { id, .. }) = classes.schedule(&profile, &mut cache, &pod) else {
            panic!("{n}")
        };
        assert_eq!(*cache.get(id).unwrap().name, *format!("n{n}"));
        cache.assume(pod, &format!("n{n}"));
    }
}
