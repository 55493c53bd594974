//! Claims, volumes and nodes without an API server.

use super::*;
use crate::fixtures::{node, pod};
use crate::plugins::testing::unreachable_client;
use serde_json::{Value, json};

fn plugin() -> VolumeBinding {
    measured_plugin(&skiff_prometheus::Registry::default())
}

fn measured_plugin(registry: &skiff_prometheus::Registry) -> VolumeBinding {
    let metrics = VolumeMetrics::new(registry);
    let plugin = VolumeBinding::new(
        unreachable_client(),
        Arc::default(),
        Duration::from_secs(1),
        metrics,
    );
    for (name, mode, provisioner) in [
        ("late", "WaitForFirstConsumer", "csi.example.com"),
        ("local", "WaitForFirstConsumer", NO_PROVISIONER),
        ("now", "Immediate", "csi.example.com"),
    ] {
        let class = json!({"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode,
            "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["a", "b"]}]}]});
        let class = Arc::new(serde_json::from_value(class).unwrap());
        plugin.listers.classes.set(Key::new("", name), class);
    }
    plugin
}

fn add_claim(plugin: &VolumeBinding, name: &str, class: &str, more: Value) {
    let mut claim = json!({"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"},
        "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    for (pointer, value) in more.as_object().unwrap() {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        claim.pointer_mut(parent).unwrap()[field] = value.clone();
    }
    let claim = Arc::new(serde_json::from_value(claim).unwrap());
    plugin.listers.claims.set(Key::new("default", name), claim);
}

fn add_volume(plugin: &VolumeBinding, name: &str, size: &str, zone: &str) {
    let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]);
    let volume = json!({"metadata": {"name": name, "resourceVersion": "1"}, "status": {"phase": "Available"},
        "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": size},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
    let volume = Arc::new(serde_json::from_value(volume).unwrap());
    plugin.listers.volumes.set(Key::new("", name), volume);
}

fn in_zone(zone: &str) -> NodeInfo {
    node(zone, json!({}), json!({"zone": zone}), json!({}))
}

fn using(claims: &[&str]) -> Arc<PodInfo> {
    let volumes: Vec<Value> = claims
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}))
        .collect();
    pod(&claims.join("-"), json!({"volumes": volumes}))
}

/// The state after PreFilter, or why there is none.
fn prepare(plugin: &VolumeBinding, pod: &PodInfo) -> Result<CycleState, String> {
    let mut state = CycleState::default();
    let prepared = plugin.pre_filter(&mut state, pod, &Cache::default());
    prepared.map(|_| state).map_err(|rejection| rejection.message())
}

fn verdict(plugin: &VolumeBinding, claims: &[&str], zone: &str) -> String {
    let pod = using(claims);
    match prepare(plugin, &pod) {
        Err(message) => message,
        Ok(state) => match plugin.filter(&state, &pod, &in_zone(zone)) {
            Ok(()) => String::new(),
            Err(rejection) => rejection.message(),
        },
    }
}

#[tokio::test]
async fn claims_that_cannot_be_waited_for() {
    let plugin = plugin();
    add_claim(&plugin, "unbound", "now", json!({}));
    add_claim(
        &plugin,
        "lost",
        "now",
        json!({"/status": {"phase": "Lost"}, "/spec/volumeName": "v"}),
    );
    add_claim(
        &plugin,
        "going",
        "now",
        json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"}),
    );
    let check = |claim: &str, expected: &str| assert_eq!(verdict(&plugin, &[claim], "a"), expected);
    check("none", "persistentvolumeclaim \"none\" not found");
    check("unbound", "pod has unbound immediate PersistentVolumeClaims");
    check(
        "lost",
        "persistentvolumeclaim \"lost\" bound to non-existent persistentvolume \"v\"",
    );
    check("going", "persistentvolumeclaim \"going\" is being deleted");
}

#[tokio::test]
async fn a_bound_claim_ties_to_its_volume() {
    let plugin = plugin();
    let bound = json!({"/spec/volumeName": "v", "/metadata/annotations": {BIND_COMPLETED: "yes"}});
    add_claim(&plugin, "c", "local", bound);
    assert_eq!(
        verdict(&plugin, &["c"], "a"),
        "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
    );
    add_volume(&plugin, "v", "1Gi", "a");
    assert_eq!(verdict(&plugin, &["c"], "a"), "");
    assert_eq!(
        verdict(&plugin, &["c"], "b"),
        "node(s) didn't match PersistentVolume's node affinity"
    );
}

#[tokio::test]
async fn the_smallest_volume_is_taken_and_no_volume_twice() {
    let plugin = plugin();
    add_claim(&plugin, "c", "local", json!({}));
    add_claim(&plugin, "d", "local", json!({}));
    add_volume(&plugin, "large", "9Gi", "a");
    add_volume(&plugin, "small", "2Gi", "a");
    add_volume(&plugin, "tiny", "1Mi", "b");
    let none = "node(s) didn't find available persistent volumes to bind";
    assert_eq!(
        (
            verdict(&plugin, &["c"], "a").as_str(),
            verdict(&plugin, &["c"], "b").as_str()
        ),
        ("", none)
    );
    assert_eq!(verdict(&plugin, &["c", "d"], "a"), "", "one each");
    let pod = using(&["c"]);
    let mut state = prepare(&plugin, &pod).unwrap();
    plugin.reserve(&mut state, &pod, &in_zone("a")).unwrap();
    let chosen = &state.read::<BindingState>(NAME).unwrap().decision.volumes[0].0;
    assert_eq!(chosen.metadata.name.as_deref(), Some("small"));
    assert!(plugin.pre_bind_waits(&state, &pod, "a"));
    // What is promised is not there for others, until the promise is taken back.
    let other = using(&["d"]);
    let mut theirs = prepare(&plugin, &other).unwrap();
    plugin.reserve(&mut theirs, &other, &in_zone("a")).unwrap();
    let chosen = &theirs.read::<BindingState>(NAME).unwrap().decision.volumes[0].0;
    assert_eq!(chosen.metadata.name.as_deref(), Some("large"));
    plugin.unreserve(&state, &pod, "a");
    plugin.unreserve(&theirs, &other, "a");
    assert!(plugin.assumed.lock().volumes.is_empty());
}

#[tokio::test]
async fn provisioning_looks_at_topology_and_capacity() {
    let plugin = plugin();
    add_claim(&plugin, "c", "late", json!({}));
    let none = "node(s) didn't find available persistent volumes to bind";
    assert_eq!(
        (
            verdict(&plugin, &["c"], "a").as_str(),
            verdict(&plugin, &["c"], "z").as_str()
        ),
        ("", none)
    );
    let driver = json!({"metadata": {"name": "csi.example.com"}, "spec": {"storageCapacity": true}});
    let driver = Arc::new(serde_json::from_value(driver).unwrap());
    plugin
        .listers
        .csi_drivers
        .set(Key::new("", "csi.example.com"), driver);
    assert_eq!(
        verdict(&plugin, &["c"], "a"),
        "node(s) did not have enough free storage"
    );
    let capacity = json!({"metadata": {"name": "x"}, "storageClassName": "late", "capacity": "5Gi",
        "nodeTopology": {"matchLabels": {"zone": "b"}}});
    let capacity = Arc::new(serde_json::from_value(capacity).unwrap());
    plugin.listers.csi_capacities.set(Key::new("", "x"), capacity);
    assert_eq!(verdict(&plugin, &["c"], "b"), "");
    // Once a node is chosen, it is that one.
    let pod = using(&["c"]);
    let mut state = prepare(&plugin, &pod).unwrap();
    plugin.reserve(&mut state, &pod, &in_zone("b")).unwrap();
    assert_eq!(verdict(&plugin, &["c"], "a"), none);
    assert_eq!(verdict(&plugin, &["c"], "b"), "");
}

#[tokio::test(start_paused = true)]
async fn what_was_written_must_come_to_pass() {
    let plugin = plugin();
    add_claim(&plugin, "c", "late", json!({}));
    let claim = plugin.listers.claims.get("default", "c").unwrap();
    let decision = Decision {
        volumes: Vec::new(),
        provision: vec![claim],
    };
    plugin
        .assumed
        .lock()
        .claims
        .insert(Key::new("default", "c"), ("1".into(), "n".into()));
    assert_eq!(plugin.check(&decision, "n"), Ok(false), "the informer is behind");
    let selected = |node: &str| json!({"/metadata/resourceVersion": "2", "/metadata/annotations": {SELECTED_NODE: node}});
    add_claim(&plugin, "c", "late", selected("n"));
    assert_eq!(plugin.check(&decision, "n"), Ok(false), "not provisioned yet");
    add_claim(&plugin, "c", "late", selected(""));
    assert_eq!(
        plugin.check(&decision, "n"),
        Err("provisioning failed for PVC \"c\"".to_owned())
    );
    let mut bound = selected("n");
    bound["/spec/volumeName"] = json!("v");
    bound["/metadata/annotations"][BIND_COMPLETED] = json!("yes");
    add_claim(&plugin, "c", "late", bound);
    assert_eq!(
        plugin.check(&decision, "n"),
        Ok(false),
        "the volume is not shown yet"
    );
    add_volume(&plugin, "v", "1Gi", "a");
    assert_eq!(plugin.check(&decision, "n"), Ok(true));
}

#[tokio::test]
async fn the_stages_are_measured_and_their_errors_counted() {
    let registry = skiff_prometheus::Registry::default();
    let plugin = measured_plugin(&registry);
    add_claim(&plugin, "c", "late", json!({}));
    let pod = using(&["c"]);
    let mut state = prepare(&plugin, &pod).unwrap();
    plugin.filter(&state, &pod, &in_zone("a")).unwrap();
    plugin.filter(&state, &pod, &in_zone("elsewhere")).unwrap_err();
    plugin.reserve(&mut state, &pod, &in_zone("a")).unwrap();
    // The server cannot be reached.
    plugin.pre_bind(&state, &pod, "n").await.unwrap_err();
    let text = registry.text();
    for line in [
        "scheduler_volume_scheduling_duration_seconds_count{operation=\"predicate\"} 2",
        "scheduler_volume_scheduling_duration_seconds_count{operation=\"assume\"} 1",
        "scheduler_volume_scheduling_duration_seconds_count{operation=\"bind\"} 1",
        "scheduler_volume_scheduling_duration_seconds_bucket{operation=\"assume\",le=\"16.384\"} 1",
        "scheduler_volume_scheduling_stage_error_total{operation=\"bind\"} 1",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
    assert!(
        !text.contains("error_total{operation=\"predicate\"}"),
        "a node without the volume is no error\n{text}"
    );
}
