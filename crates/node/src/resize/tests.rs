//! Cases of allocation, updates and what is shown.

use serde_json::{Value, json};

use super::update::{ContainerUpdate, is_in_progress};
use super::*;
use crate::observed::{ContainerState, ObservedContainer, ObservedPod};

fn pod(resources: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u", "generation": 2},
        "spec": {"containers": [{"name": "c", "resources": resources}]}}))
    .unwrap()
}

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

fn running(name: &str) -> ObservedContainer {
    ObservedContainer {
        id: format!("{name}-id"),
        name: name.into(),
        state: ContainerState::Running,
        ..Default::default()
    }
}

#[test]
fn allocations_are_kept_and_compared_by_value() {
    let old = pod(resources("1", "1Gi"));
    let record = Record::new(&old);
    let spec = |pod: &Pod| pod.spec.clone().unwrap();
    assert!(record.allocated.is_of(&spec(&pod(resources("1000m", "1024Mi")))));
    let new = pod(resources("2", "1Gi"));
    assert!(!record.allocated.is_of(&spec(&new)));
    assert_eq!(record.allocated.applied(&new), old);
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("pod");
    assert_eq!(Record::load(&at), None);
    record.save(&at).unwrap();
    assert_eq!(Record::load(&at).as_ref(), Some(&record));
    std::fs::write(at.join("resources.json"), "{").unwrap();
    assert_eq!(Record::load(&at), None);
}

#[test]
fn a_version_is_observed_when_it_was_considered() {
    let mut resize = Resize {
        record: Some(Record::new(&pod(resources("1", "1Gi")))),
        ..Default::default()
    };
    let wanted = pod(resources("2", "1Gi"));
    assert!(resize.is_wanted(&wanted) && !resize.is_considered(&wanted));
    resize.pending = Some(Condition {
        reason: Some(DEFERRED.into()),
        message: None,
        generation: 1,
        since: Timestamp::UNIX_EPOCH,
    });
    assert!(!resize.is_considered(&wanted), "that was another version");
    resize.pending.as_mut().unwrap().generation = 2;
    assert!(resize.is_considered(&wanted) && !resize.is_infeasible(&wanted));
    resize.pending.as_mut().unwrap().reason = Some(INFEASIBLE.into());
    assert!(resize.is_infeasible(&wanted));
    let shown = resize.conditions();
    assert_eq!(
        (shown[0].type_.as_str(), shown[0].observed_generation),
        ("PodResizePending", Some(2))
    );
}

#[test]
fn updates_shrink_first_and_policies_restart() {
    let check = |old: [&str; 3],
                 new: [&str; 3],
                 policy: Value,
                 memory: &[&str],
                 cpu: &[&str],
                 restarted: &[&str]| {
        let make = |sizes: [&str; 3]| -> Pod {
            let containers: Vec<Value> = sizes
                .iter()
                .enumerate()
                .map(|(n, size)| {
                    let (cpu, memory) = size.split_once('/').unwrap();
                    json!({"name": format!("c{n}"), "resources": resources(cpu, memory), "resizePolicy": policy})
                })
                .collect();
            serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
        };
        let record = Record::new(&make(old));
        let pod = make(new);
        let mut updates = Updates::default();
        let mut restarts = Vec::new();
        for container in &pod.spec.as_ref().unwrap().containers {
            if container_update(&pod, container, &running(&container.name), &record, &mut updates) {
                restarts.push(container.name.clone());
            }
        }
        let names = |list: &[ContainerUpdate]| list.iter().map(|u| u.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&updates.memory), memory);
        assert_eq!(names(&updates.cpu), cpu);
        assert_eq!(restarts, restarted);
    };
    let old = ["1/10Mi", "1/10Mi", "1/10Mi"];
    check(old, old, json!([]), &[], &[], &[]);
    check(
        old,
        ["2/20Mi", "2/5Mi", "500m/10Mi"],
        json!([]),
        &["c1", "c0"],
        &["c2", "c0", "c1"],
        &[],
    );
    let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    check(
        old,
        ["2/10Mi", "1/20Mi", "1/10Mi"],
        restart,
        &[],
        &["c0"],
        &["c1"],
    );
}

#[test]
fn progress_is_that_of_what_runs() {
    let record = Record::new(&pod(resources("1", "1Gi")));
    let wanted = pod(resources("2", "1Gi"));
    let mut observed = ObservedPod {
        containers: vec![running("c")],
        ..Default::default()
    };
    assert!(!is_in_progress(&pod(resources("1", "1Gi")), &observed, &record));
    assert!(is_in_progress(&wanted, &observed, &record));
    observed.containers[0].state = ContainerState::Exited;
    assert!(
        !is_in_progress(&wanted, &observed, &record),
        "it is sized when it starts"
    );
}

#[test]
fn limits_of_the_pod_bound_its_containers() {
    let make = |limit: &str| -> Pod {
        serde_json::from_value(
            json!({"spec": {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": limit}},
            "containers": [{"name": "c"}]}}),
        )
        .unwrap()
    };
    let record = Record::new(&make("1"));
    assert_eq!(record.actuated["c"].cpu_limit, 1000);
    let wanted = make("2");
    let mut updates = Updates::default();
    let container = &wanted.spec.as_ref().unwrap().containers[0];
    assert!(!container_update(
        &wanted,
        container,
        &running("c"),
        &record,
        &mut updates
    ));
    assert_eq!(updates.cpu[0].wanted.cpu_limit, 2000);
    assert!(is_in_progress(&wanted, &ObservedPod::default(), &record));
}

#[test]
fn what_is_in_effect_is_shown() {
    let check = |allocated: Value, told: Option<(i64, i64, i64)>, expected: Value| {
        let pod = pod(allocated);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let mut observed = running("c");
        observed.resources = told.map(|(quota, shares, memory)| skiff_cri::v1::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: quota,
            cpu_shares: shares,
            memory_limit_in_bytes: memory,
            ..Default::default()
        });
        let actuated = Amounts::of_container(&pod, container);
        let shown = container_resources(container, &observed, Some(actuated));
        assert_eq!(serde_json::to_value(shown).unwrap(), expected);
    };
    let mi = 1 << 20;
    check(
        resources("500m", "64Mi"),
        Some((50_000, 512, 64 * mi)),
        resources("500m", "64Mi"),
    );
    check(resources("500m", "64Mi"), None, resources("500m", "64Mi"));
    check(
        resources("500m", "64Mi"),
        Some((25_000, 256, 32 * mi)),
        json!({"limits": {"cpu": "250m", "memory": "32Mi"}, "requests": {"cpu": "250m", "memory": "64Mi"}}),
    );
    // Below what the kernel can count, what was asked for is shown.
    check(
        json!({"requests": {"cpu": "1m"}, "limits": {"cpu": "5m"}}),
        Some((1000, 2, 0)),
        json!({"requests": {"cpu": "1m"}, "limits": {"cpu": "5m"}}),
    );
    check(
        json!({"requests": {"memory": "64Mi"}}),
        Some((0, 2, 0)),
        json!({"requests": {"memory": "64Mi"}}),
    );
}

#[test]
fn events_name_every_container() {
    let message = event_message(
        "Pod resize started",
        &pod(json!({"requests": {"cpu": "1"}})),
        2,
        "",
    );
    assert_eq!(
        message,
        r#"Pod resize started: {"containers":[{"name":"c","resources":{"requests":{"cpu":"1"}}}],"generation":2}"#
    );
    let message = event_message("Pod resize OutOfcpu", &pod(json!({})), 2, "no room");
    assert!(
        message.ends_with(r#""generation":2,"error":"no room"}"#),
        "{message}"
    );
}
