//! Cases of `generate`, written as pod, runtime state and the parts of the status that matter.

use super::*;
use crate::observed::{ObservedContainer, ObservedSandbox};
use serde_json::{Value, json};

#[derive(Default)]
struct Probes {
    startup: HashMap<String, bool>,
    readiness: HashMap<String, bool>,
}

impl Readiness for Probes {
    fn startup(&self, id: &str) -> Option<bool> {
        self.startup.get(id).copied()
    }
    fn readiness(&self, id: &str) -> Option<bool> {
        self.readiness.get(id).copied()
    }
}

struct Case {
    pod: Pod,
    observed: ObservedPod,
    previous: PodStatus,
    reasons: HashMap<String, WaitingReason>,
    probes: Probes,
    terminal: bool,
}

fn case(spec: Value, containers: Vec<ObservedContainer>) -> Case {
    let sandbox = ObservedSandbox {
        id: "s".into(),
        ready: true,
        ips: vec!["10.0.0.5".into()],
        ..Default::default()
    };
    Case {
        pod: serde_json::from_value(json!({"metadata": {"name": "p", "generation": 1}, "spec": spec}))
            .unwrap(),
        observed: ObservedPod {
            sandboxes: vec![sandbox],
            containers,
        },
        previous: PodStatus::default(),
        reasons: HashMap::new(),
        probes: Probes::default(),
        terminal: false,
    }
}

fn run(case: &Case) -> PodStatus {
    generate(&StatusInput {
        pod: &case.pod,
        resize: &Resize::default(),
        is_considered: true,
        pod_config: None,
        previous: &case.previous,
        observed: &case.observed,
        runtime_name: "skiff",
        reasons: &case.reasons,
        readiness: &case.probes,
        host_ips: &["192.168.0.1".to_owned()],
        terminal: case.terminal,
        failed: None,
        now: Timestamp::from_second(1_000_000).unwrap(),
    })
}

fn running(name: &str) -> ObservedContainer {
    ObservedContainer {
        id: format!("{name}-id"),
        name: name.into(),
        state: ContainerState::Running,
        started_at: 5_000_000_000,
        ..Default::default()
    }
}

fn exited(name: &str, exit_code: i32) -> ObservedContainer {
    ObservedContainer {
        state: ContainerState::Exited,
        exit_code,
        finished_at: 9_000_000_000,
        reason: if exit_code == 0 { "Completed" } else { "Error" }.into(),
        ..running(name)
    }
}

fn ready(status: &PodStatus) -> &str {
    &condition(status, "Ready").unwrap().status
}

#[test]
fn a_pod_that_is_being_made() {
    let mut case = case(json!({"containers": [{"name": "a", "image": "i"}]}), vec![]);
    case.observed.sandboxes.clear();
    let status = run(&case);
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(
        container
            .state
            .as_ref()
            .unwrap()
            .waiting
            .as_ref()
            .unwrap()
            .reason
            .as_deref(),
        Some("ContainerCreating")
    );
    assert_eq!((container.ready, container.started), (false, Some(false)));
    assert_eq!(
        condition(&status, "PodReadyToStartContainers").unwrap().status,
        "False"
    );
    assert_eq!(condition(&status, "Initialized").unwrap().status, "True");
    let ready = condition(&status, "Ready").unwrap();
    assert_eq!(
        (ready.reason.as_deref(), ready.message.as_deref()),
        (
            Some("ContainersNotReady"),
            Some("containers with unready status: [a]")
        )
    );
    assert_eq!(condition(&status, "PodScheduled").unwrap().status, "True");
    assert_eq!(
        status.start_time,
        Some(Time(Timestamp::from_second(1_000_000).unwrap()))
    );
}

#[test]
fn running_and_ready() {
    let status = run(&case(
        json!({"containers": [{"name": "a"}, {"name": "b"}]}),
        vec![running("a"), running("b")],
    ));
    assert_eq!(
        (status.phase.as_deref(), ready(&status)),
        (Some("Running"), "True")
    );
    assert_eq!(status.pod_ip.as_deref(), Some("10.0.0.5"));
    assert_eq!(status.host_ip.as_deref(), Some("192.168.0.1"));
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(container.container_id.as_deref(), Some("skiff://a-id"));
    assert!(container.ready);
}

#[test]
fn readiness_waits_for_the_probe() {
    let spec = json!({"containers": [{"name": "a", "readinessProbe": {"tcpSocket": {"port": 1}}}]});
    let mut case = case(spec, vec![running("a")]);
    assert_eq!(ready(&run(&case)), "False");
    case.probes.readiness.insert("a-id".into(), true);
    assert_eq!(ready(&run(&case)), "True");
    // After a restart of the kubelet what was ready stays so until the probe speaks.
    case.previous = run(&case);
    case.probes.readiness.clear();
    assert_eq!(ready(&run(&case)), "True");
    case.probes.readiness.insert("a-id".into(), false);
    assert_eq!(ready(&run(&case)), "False");
}

#[test]
fn startup_probe_holds_the_rest() {
    let spec = json!({"containers": [{"name": "a", "startupProbe": {"tcpSocket": {"port": 1}}}]});
    let mut case = case(spec, vec![running("a")]);
    let status = run(&case);
    assert_eq!(
        (
            status.container_statuses.as_ref().unwrap()[0].started,
            ready(&status)
        ),
        (Some(false), "False")
    );
    case.probes.startup.insert("a-id".into(), true);
    let status = run(&case);
    assert_eq!(
        (
            status.container_statuses.as_ref().unwrap()[0].started,
            ready(&status)
        ),
        (Some(true), "True")
    );
}

#[test]
fn phases() {
    let check = |policy: &str, containers: Vec<ObservedContainer>, terminal: bool, expected: &str| {
        let mut case = case(
            json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]}),
            containers,
        );
        case.terminal = terminal;
        assert_eq!(run(&case).phase.as_deref(), Some(expected), "{policy} {terminal}");
    };
    check("Always", vec![running("a")], false, "Pending");
    check("Always", vec![running("a"), exited("b", 1)], false, "Running");
    check("Always", vec![exited("a", 0), exited("b", 0)], false, "Running");
    check("Always", vec![exited("a", 0), exited("b", 0)], true, "Succeeded");
    check("Always", vec![exited("a", 0), exited("b", 1)], true, "Failed");
    check(
        "OnFailure",
        vec![exited("a", 0), exited("b", 1)],
        false,
        "Running",
    );
    check(
        "OnFailure",
        vec![exited("a", 0), exited("b", 0)],
        false,
        "Succeeded",
    );
    check("Never", vec![exited("a", 0), exited("b", 1)], false, "Failed");
    check("Never", vec![exited("a", 0), running("b")], false, "Running");
}

#[test]
fn init_phases() {
    let check = |policy: &str, containers: Vec<ObservedContainer>, phase: &str, initialized: &str| {
        let case = case(
            json!({"restartPolicy": policy, "initContainers": [{"name": "i"}], "containers": [{"name": "a"}]}),
            containers,
        );
        let status = run(&case);
        assert_eq!(
            (
                status.phase.as_deref(),
                condition(&status, "Initialized").unwrap().status.as_str()
            ),
            (Some(phase), initialized)
        );
    };
    check("Always", vec![], "Pending", "False");
    check("Always", vec![running("i")], "Pending", "False");
    check("Always", vec![exited("i", 0)], "Pending", "True");
    check("Always", vec![running("a"), exited("i", 0)], "Running", "True");
    check("Never", vec![exited("i", 1)], "Failed", "False");
    check("Always", vec![exited("i", 1)], "Pending", "False");
}

#[test]
fn crash_loops_wait_with_a_last_state() {
    let mut case = case(json!({"containers": [{"name": "a"}]}), vec![exited("a", 1)]);
    case.reasons.insert(
        "a".into(),
        WaitingReason {
            reason: "CrashLoopBackOff".into(),
            message: "back-off 10s restarting failed container=a pod=p_default(u)".into(),
        },
    );
    let status = run(&case);
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(
        container
            .state
            .as_ref()
            .unwrap()
            .waiting
            .as_ref()
            .unwrap()
            .reason
            .as_deref(),
        Some("CrashLoopBackOff")
    );
    assert_eq!(
        container
            .last_state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        1
    );
    assert_eq!(status.phase.as_deref(), Some("Running"));
}

#[test]
fn restarts_keep_the_previous_instance() {
    let old = ObservedContainer {
        id: "old".into(),
        ..exited("a", 3)
    };
    let new = ObservedContainer {
        restart_count: 1,
        ..running("a")
    };
    let status = run(&case(json!({"containers": [{"name": "a"}]}), vec![new, old]));
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(container.restart_count, 1);
    assert_eq!(
        container
            .last_state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        3
    );
}

#[test]
fn transition_times_move_only_with_the_status() {
    let mut case = case(json!({"containers": [{"name": "a"}]}), vec![running("a")]);
    let earlier: PodStatus = serde_json::from_value(json!({"conditions": [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2000-01-01T00:00:00Z"},
        {"type": "ContainersReady", "status": "False", "lastTransitionTime": "2000-01-01T00:00:00Z"}]}))
    .unwrap();
    case.previous = earlier;
    let status = run(&case);
    let at = |type_: &str| {
        condition(&status, type_)
            .unwrap()
            .last_transition_time
            .as_ref()
            .unwrap()
            .0
            .as_second()
    };
    assert_eq!(at("Ready"), 946_684_800);
    assert_eq!(at("ContainersReady"), 1_000_000);
}

#[test]
fn an_end_waits_for_the_last_container() {
    let mut case = case(
        json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}),
        vec![running("a")],
    );
    case.previous = run(&case);
    let reason = WaitingReason {
        reason: "DeadlineExceeded".into(),
        message: "m".into(),
    };
    let status = generate(&StatusInput {
        pod: &case.pod,
        resize: &Resize::default(),
        is_considered: true,
        pod_config: None,
        previous: &case.previous,
        observed: &case.observed,
        runtime_name: "skiff",
        reasons: &case.reasons,
        readiness: &case.probes,
        host_ips: &[],
        terminal: true,
        failed: Some(&reason),
        now: Timestamp::from_second(1_000_001).unwrap(),
    });
    assert_eq!(
        (status.phase.as_deref(), ready(&status)),
        (Some("Running"), "False")
    );
    case.observed = ObservedPod {
        sandboxes: case.observed.sandboxes.clone(),
        containers: vec![exited("a", 137)],
    };
    let status = generate(&StatusInput {
        pod: &case.pod,
        resize: &Resize::default(),
        is_considered: true,
        pod_config: None,
        previous: &case.previous,
        observed: &case.observed,
        runtime_name: "skiff",
        reasons: &case.reasons,
        readiness: &case.probes,
        host_ips: &[],
        terminal: true,
        failed: Some(&reason),
        now: Timestamp::from_second(1_000_001).unwrap(),
    });
    assert_eq!(
        (status.phase.as_deref(), status.reason.as_deref()),
        (Some("Failed"), Some("DeadlineExceeded"))
    );
}

#[test]
fn conditions_of_others_stay() {
    let mut case = case(
        json!({"containers": [{"name": "a"}], "readinessGates": [{"conditionType": "lb"}]}),
        vec![running("a")],
    );
    assert_eq!(
        condition(&run(&case), "Ready").unwrap().reason.as_deref(),
        Some("ReadinessGatesNotReady")
    );
    case.pod.status =
        Some(serde_json::from_value(json!({"conditions": [{"type": "lb", "status": "True"}]})).unwrap());
    let status = run(&case);
    assert_eq!(ready(&status), "True");
    assert!(condition(&status, "lb").is_some());
}
