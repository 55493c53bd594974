//! Claims, devices and extended resources in the plugin's steps.

use super::*;
use crate::config::BINDING_TIMEOUT;
use crate::fixtures::{node, pod};
use crate::plugins::testing::unreachable_client;
use serde_json::{Value, json};
use skiff_client::Key;

/// Two GPUs on node a (one tainted), one on node b, and a class for them.
fn plugin() -> DynamicResources {
    let listers = Arc::new(Listers::default());
    let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}]}});
    listers.device_classes.set(
        Key::new("", "gpu"),
        Arc::new(serde_json::from_value(class).unwrap()),
    );
    let device = |name: &str, model: &str, taints: Value| json!({"name": name, "attributes": {"model": {"string": model}}, "taints": taints});
    let taint = json!([{"key": "broken", "effect": "NoSchedule"}]);
    for (node, devices) in [
        (
            "a",
            vec![
                device("g0", "big", json!([])),
                device("g1", "big", taint),
                device("g2", "small", json!([])),
            ],
        ),
        ("b", vec![device("g0", "small", json!([]))]),
    ] {
        let slice = json!({"metadata": {"name": node}, "spec": {"driver": "gpu.example.com", "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}});
        listers.slices.set(
            Key::new("", node),
            Arc::new(serde_json::from_value(slice).unwrap()),
        );
    }
    DynamicResources::new(unreachable_client(), listers, BINDING_TIMEOUT)
}

fn add_claim(plugin: &DynamicResources, name: &str, devices: Value, status: Value) {
    let claim = json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": {"devices": devices}, "status": status});
    plugin.listers.resource_claims.set(
        Key::new("default", name),
        Arc::new(serde_json::from_value(claim).unwrap()),
    );
}

fn using(names: &[&str]) -> Arc<PodInfo> {
    let claims: Vec<Value> = names
        .iter()
        .map(|name| json!({"name": name, "resourceClaimName": name}))
        .collect();
    pod(&names.join("-"), json!({"resourceClaims": claims}))
}

fn exactly(more: Value) -> Value {
    let mut exact = json!({"deviceClassName": "gpu"});
    exact
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!({"requests": [{"name": "r", "exactly": exact}]})
}

/// On which of the nodes the pod fits, and the state.
fn feasible(plugin: &DynamicResources, pod: &PodInfo) -> (Vec<&'static str>, CycleState) {
    let mut state = CycleState::default();
    plugin.pre_filter(&mut state, pod, &Cache::default()).unwrap();
    let fits = |name: &&str| {
        plugin
            .filter(&state, pod, &node(name, json!({}), json!({}), json!({})))
            .is_ok()
    };
    (["a", "b", "c"].into_iter().filter(fits).collect(), state)
}

#[tokio::test]
async fn requests_are_matched_with_devices() {
    let check = |devices: Value, expected: &[&str]| {
        let plugin = plugin();
        add_claim(&plugin, "c", devices.clone(), json!({}));
        assert_eq!(feasible(&plugin, &using(&["c"])).0, expected, "{devices}");
    };
    check(exactly(json!({})), &["a", "b"]);
    check(exactly(json!({"count": 2})), &["a"]);
    check(exactly(json!({"count": 3})), &[]);
    check(
        exactly(json!({"count": 3, "tolerations": [{"key": "broken", "operator": "Exists"}]})),
        &["a"],
    );
    check(exactly(json!({"allocationMode": "All"})), &["b"]);
    let model = |model: &str| json!([{"cel": {"expression": format!("device.attributes['gpu.example.com'].model == '{model}'")}}]);
    check(exactly(json!({"selectors": model("big")})), &["a"]);
    check(exactly(json!({"selectors": model("none")})), &[]);
    let sub = |name: &str, model_name: &str| json!({"name": name, "deviceClassName": "gpu", "selectors": model(model_name)});
    check(
        json!({"requests": [{"name": "r", "firstAvailable": [sub("x", "big"), sub("y", "small")]}]}),
        &["a", "b"],
    );
    let mut same = exactly(json!({"count": 2}));
    same["constraints"] = json!([{"matchAttribute": "gpu.example.com/model"}]);
    check(same, &[]);
}

#[tokio::test]
async fn what_is_taken_is_not_given_again() {
    let plugin = plugin();
    for name in ["c", "d"] {
        add_claim(&plugin, name, exactly(json!({})), json!({}));
    }
    let pod = using(&["c"]);
    let (nodes, mut state) = feasible(&plugin, &pod);
    assert_eq!(nodes, ["a", "b"]);
    let b = node("b", json!({}), json!({}), json!({}));
    plugin.reserve(&mut state, &pod, &b).unwrap();
    let claims = state.read::<Claims>(NAME).unwrap();
    let allocation = &claims.allocations[0];
    let result = &allocation.devices.as_ref().unwrap().results.as_ref().unwrap()[0];
    assert_eq!(
        (
            result.pool.as_str(),
            result.device.as_str(),
            result.request.as_str()
        ),
        ("b", "g0", "r")
    );
    let fields = &allocation.node_selector.as_ref().unwrap().node_selector_terms[0].match_fields;
    assert_eq!(fields.as_ref().unwrap()[0].values, Some(vec!["b".to_owned()]));
    assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a"], "in flight");
    let mut again = CycleState::default();
    let busy = plugin
        .pre_filter(&mut again, &using(&["c"]), &Cache::default())
        .unwrap_err();
    assert_eq!(
        busy.message(),
        "resource claim default/c is in the process of being allocated"
    );
    plugin.unreserve(&state, &pod, "b");
    assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a", "b"]);
    // Once it is written, it is where its devices are.
    add_claim(
        &plugin,
        "c",
        exactly(json!({})),
        json!({"allocation": serde_json::to_value(allocation).unwrap()}),
    );
    assert_eq!(feasible(&plugin, &using(&["c"])).0, ["b"]);
    assert_eq!(feasible(&plugin, &using(&["d"])).0, ["a"]);
}

#[tokio::test]
async fn a_device_is_shared_until_its_capacity_is_used_up() {
    let plugin = plugin();
    let device = json!({"name": "g9", "allowMultipleAllocations": true, "attributes": {"model": {"string": "shared"}},
        "capacity": {"memory": {"value": "10Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}}}});
    let slice = json!({"metadata": {"name": "z"}, "spec": {"driver": "gpu.example.com", "nodeName": "c",
        "pool": {"name": "z", "generation": 1, "resourceSliceCount": 1}, "devices": [device]}});
    let slice = Arc::new(serde_json::from_value(slice).unwrap());
    plugin.listers.slices.set(Key::new("", "z"), slice);
    let memory = |amount: &str, count: i64| {
        exactly(json!({"capacity": {"requests": {"memory": amount}}, "count": count}))
    };
    let c = node("c", json!({}), json!({}), json!({}));
    let results = |devices: Value| {
        add_claim(&plugin, "c", devices, json!({}));
        let pod = using(&["c"]);
        let (nodes, mut state) = feasible(&plugin, &pod);
        if nodes != ["c"] {
            return None;
        }
        plugin.reserve(&mut state, &pod, &c).unwrap();
        plugin.unreserve(&state, &pod, "c");
        let allocation = &state.read::<Claims>(NAME).unwrap().allocations[0];
        Some(serde_json::to_value(allocation).unwrap()["devices"]["results"].clone())
    };
    assert_eq!(results(memory("11Gi", 1)), None);
    assert_eq!(results(memory("6Gi", 2)), None);
    let two = results(memory("2500Mi", 2)).unwrap();
    for share in [&two[0], &two[1]] {
        assert_eq!(
            (&share["device"], &share["consumedCapacity"]),
            (&json!("g9"), &json!({"memory": "3Gi"}))
        );
    }
    assert!(two[0]["shareID"].is_string() && two[0]["shareID"] != two[1]["shareID"]);

    // Once they are written, the rest is left.
    add_claim(
        &plugin,
        "other",
        memory("2500Mi", 2),
        json!({"allocation": {"devices": {"results": two}}}),
    );
    assert_eq!(results(memory("5Gi", 1)), None);
    let rest = results(memory("4Gi", 1)).unwrap();
    assert_eq!(rest[0]["consumedCapacity"], json!({"memory": "4Gi"}));
    // A capacity that no device has, and one that a device of its own does not have enough of.
    assert_eq!(
        results(exactly(json!({"capacity": {"requests": {"cores": "1"}}}))),
        None
    );
    // Different devices are asked for, and there is one.
    let mut distinct = memory("1Gi", 2);
    distinct["constraints"] = json!([{"distinctAttribute": "gpu.example.com/model"}]);
    assert_eq!(results(distinct), None);
}

#[tokio::test]
async fn a_better_alternative_scores_higher() {
    let plugin = plugin();
    let model = |model: &str| json!([{"cel": {"expression": format!("device.attributes['gpu.example.com'].model == '{model}'")}}]);
    let sub = |name: &str, model_name: &str| json!({"name": name, "deviceClassName": "gpu", "selectors": model(model_name)});
    let listed = json!({"requests": [{"name": "r", "firstAvailable": [sub("x", "big"), sub("y", "small")]}]});
    add_claim(&plugin, "c", listed, json!({}));
    add_claim(&plugin, "d", exactly(json!({})), json!({}));
    let pod = using(&["c"]);
    let (nodes, mut state) = feasible(&plugin, &pod);
    assert_eq!(nodes, ["a", "b"]);
    assert!(plugin.pre_score(&mut state, &pod, &[], &Cache::default()));
    let score = |name: &str| plugin.score(&state, &pod, &node(name, json!({}), json!({}), json!({})));
    assert_eq!((score("a"), score("b")), (8, 7));
    assert_eq!(plugin.scope(&pod), Scope::Opaque);
    let plain = using(&["d"]);
    let (_, mut state) = feasible(&plugin, &plain);
    assert!(!plugin.pre_score(&mut state, &plain, &[], &Cache::default()));
    assert_eq!(plugin.scope(&plain), Scope::PerPod);
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_for_the_binding_conditions_of_its_devices() {
    let plugin = plugin();
    let device = json!({"name": "g9", "bindsToNode": true, "bindingConditions": ["Attached"],
        "bindingFailureConditions": ["Broken"]});
    let slice = json!({"metadata": {"name": "z"}, "spec": {"driver": "gpu.example.com", "allNodes": true,
        "pool": {"name": "z", "generation": 1, "resourceSliceCount": 1}, "devices": [device]}});
    let slice = Arc::new(serde_json::from_value(slice).unwrap());
    plugin.listers.slices.set(Key::new("", "z"), slice);
    add_claim(&plugin, "c", exactly(json!({})), json!({}));
    let pod = using(&["c"]);
    let (nodes, mut state) = feasible(&plugin, &pod);
    assert_eq!(nodes, ["a", "b", "c"], "the device reaches every node");
    plugin
        .reserve(&mut state, &pod, &node("c", json!({}), json!({}), json!({})))
        .unwrap();
    let claims = state.read::<Claims>(NAME).unwrap().clone();
    let allocation = serde_json::to_value(&claims.allocations[0]).unwrap();
    assert_eq!(
        allocation["devices"]["results"][0]["bindingConditions"],
        json!(["Attached"])
    );
    let field = &allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0];
    assert_eq!(field["values"], json!(["c"]), "it binds to the node");
    let told = |name: &str| {
        let condition = json!({"type": name, "status": "True", "reason": "R", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        json!({"allocation": allocation, "devices": [
            {"driver": "gpu.example.com", "pool": "z", "device": "g9", "conditions": [condition]}]})
    };
    add_claim(&plugin, "c", exactly(json!({})), told("Other"));
    let waits = tokio::time::timeout(BINDING_TIMEOUT / 2, plugin.until_ready(&claims, &pod, "c")).await;
    assert!(waits.is_err(), "it is not attached yet");
    let late = plugin.until_ready(&claims, &pod, "c").await.unwrap_err();
    assert_eq!(late.message(), "device binding timeout: claim=c");
    add_claim(&plugin, "c", exactly(json!({})), told("Broken"));
    let failed = plugin.until_ready(&claims, &pod, "c").await.unwrap_err();
    assert!(
        failed.message().starts_with("device binding failed: claim=c"),
        "{}",
        failed.message()
    );
    add_claim(&plugin, "c", exactly(json!({})), told("Attached"));
    assert_eq!(plugin.until_ready(&claims, &pod, "c").await, Ok(()));
}

#[tokio::test]
async fn pods_wait_for_their_claims() {
    let plugin = plugin();
    let check = |pod: &PodInfo, expected: &str| {
        let rejection = plugin.pre_enqueue(pod).unwrap_err();
        assert!(rejection.message().contains(expected), "{}", rejection.message());
    };
    check(
        &using(&["none"]),
        "resourceclaim.resource.k8s.io \"none\" not found",
    );
    let template = pod(
        "t",
        json!({"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "y"}]}),
    );
    check(
        &template,
        "waiting for dynamic resource controller to create the resourceclaim",
    );
    add_claim(
        &plugin,
        "c",
        exactly(json!({"deviceClassName": "none"})),
        json!({}),
    );
    assert_eq!(plugin.pre_enqueue(&using(&["c"])), Ok(()));
    let (nodes, state) = feasible(&plugin, &using(&["c"]));
    assert!(nodes.is_empty());
    let rejection = plugin.filter(
        &state,
        &using(&["c"]),
        &node("a", json!({}), json!({}), json!({})),
    );
    assert_eq!(
        rejection.unwrap_err().message(),
        "request r: device class none does not exist"
    );
}

fn asking(resource: &str, amount: &str) -> Arc<PodInfo> {
    let container =
        json!({"name": "c", "resources": {"requests": {resource: amount}, "limits": {resource: amount}}});
    pod("p", json!({"containers": [container]}))
}

fn back(plugin: &DynamicResources, resource: &str) {
    let class = json!({"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": resource,
        "selectors": [{"cel": {"expression": "device.driver == 'gpu.example.com'"}}]}});
    let class = Arc::new(serde_json::from_value(class).unwrap());
    plugin.listers.device_classes.set(Key::new("", "gpu"), class);
}

#[tokio::test]
async fn extended_resources_are_devices_of_their_class() {
    let plugin = plugin();
    let implicit = "deviceclass.resource.kubernetes.io/gpu";
    let skipped = |pod: &PodInfo| {
        let mut state = CycleState::default();
        plugin.pre_filter(&mut state, pod, &Cache::default()).unwrap() == PreFilter::Skip
    };
    let explicit = asking("example.com/gpu", "2");
    assert!(skipped(&explicit), "no class backs it");
    assert_eq!(plugin.scope(&explicit), Scope::None);
    back(&plugin, "example.com/gpu");
    assert_eq!(plugin.scope(&explicit), Scope::Opaque);
    assert_eq!(feasible(&plugin, &explicit).0, ["a"]);
    assert_eq!(feasible(&plugin, &asking(implicit, "1")).0, ["a", "b"]);
    assert_eq!(feasible(&plugin, &asking("example.com/gpu", "3")).0, [""; 0]);
    assert!(skipped(&asking("example.com/other", "1")));

    let (_, mut state) = feasible(&plugin, &explicit);
    let a = node("a", json!({}), json!({}), json!({}));
    plugin.reserve(&mut state, &explicit, &a).unwrap();
    let claims = state.read::<Claims>(NAME).unwrap();
    let special = claims.special.as_ref().unwrap();
    let results = special
        .allocation
        .devices
        .as_ref()
        .unwrap()
        .results
        .as_ref()
        .unwrap();
    let devices: Vec<&str> = results.iter().map(|one| one.device.as_str()).collect();
    assert_eq!(devices, ["g0", "g2"]);
    assert_eq!(results[0].request, "container-0-request-0");
    assert_eq!(special.mappings[0].request_name, "container-0-request-0");
    let metadata = &special.claim.metadata;
    assert_eq!(metadata.generate_name.as_deref(), Some("p-extended-resources-"));
    assert!(extended::is_claim_of(&special.claim, &explicit));
    assert!(plugin.pre_bind_waits(&state, &explicit, "a"));
    // What is in flight is not given to the next pod.
    assert_eq!(feasible(&plugin, &asking(implicit, "1")).0, ["b"]);
    plugin.unreserve(&state, &explicit, "a");
    assert_eq!(feasible(&plugin, &asking(implicit, "1")).0, ["a", "b"]);

    // On a node with a device plugin there is nothing to allocate.
    let (_, mut state) = feasible(&plugin, &explicit);
    let with_plugin = node("c", json!({}), json!({}), json!({"example.com/gpu": "2"}));
    assert_eq!(plugin.filter(&state, &explicit, &with_plugin), Ok(()));
    plugin.reserve(&mut state, &explicit, &with_plugin).unwrap();
    assert!(state.read::<Claims>(NAME).unwrap().special.is_none());

    // What an earlier attempt left is in the way.
    let mut left = special.claim.clone();
    left.metadata.name = Some("left".to_owned());
    plugin
        .listers
        .resource_claims
        .set(Key::new("default", "left"), Arc::new(left.clone()));
    let (nodes, state) = feasible(&plugin, &explicit);
    assert!(nodes.is_empty());
    let rejection = plugin.filter(&state, &explicit, &a).unwrap_err();
    assert_eq!(rejection.message(), "cannot schedule extended resource claim");
    let gone = ClusterEvent::ResourceClaimChanged {
        old: Some(Arc::new(left)),
        new: None,
    };
    assert!(plugin.hint(&explicit, &gone));
}

#[tokio::test]
async fn the_newest_class_backs_a_resource() {
    let plugin = plugin();
    let add = |name: &str, created: &str| {
        let class = json!({"metadata": {"name": name, "creationTimestamp": created},
            "spec": {"extendedResourceName": "example.com/gpu"}});
        let class = Arc::new(serde_json::from_value(class).unwrap());
        plugin.listers.device_classes.set(Key::new("", name), class);
    };
    let backing = || {
        plugin
            .listers
            .class_backing("example.com/gpu")
            .and_then(|class| class.metadata.name.clone())
    };
    assert_eq!(backing(), None);
    add("old", "2026-01-01T00:00:00Z");
    assert_eq!(backing().as_deref(), Some("old"));
    add("new", "2026-02-01T00:00:00Z");
    assert_eq!(backing().as_deref(), Some("new"));
    add("also-new", "2026-02-01T00:00:00Z");
    assert_eq!(backing().as_deref(), Some("also-new"));
    plugin.listers.device_classes.remove(&Key::new("", "also-new"));
    assert_eq!(backing().as_deref(), Some("new"));
}
