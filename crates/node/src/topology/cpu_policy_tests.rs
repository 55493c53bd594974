//! Who gets which CPUs.

use super::super::machine::made_up::machine;
use super::*;
use serde_json::{Value, json};

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// A Guaranteed pod; of each container the name and its CPUs.
fn pod(uid: &str, init: &[(&str, &str)], containers: &[(&str, &str)]) -> Pod {
    let all = |list: &[(&str, &str)]| -> Vec<Value> {
        let list = list.iter();
        list.map(|(name, cpu)| {
            let amounts = json!({"cpu": cpu, "memory": "1Mi"});
            json!({"name": name, "resources": {"requests": amounts, "limits": amounts}})
        })
        .collect()
    };
    serde_json::from_value(json!({"metadata": {"uid": uid},
        "spec": {"initContainers": all(init), "containers": all(containers)}}))
    .unwrap()
}

fn policy(topology: Topology, options: CpuOptions, reserved: &str) -> StaticPolicy {
    StaticPolicy::new(Arc::new(topology), options, 0, &set(reserved)).unwrap()
}

fn state(policy: &StaticPolicy) -> State {
    let mut state = State::default();
    policy.check(&mut state).unwrap();
    state
}

fn allocate(
    policy: &StaticPolicy,
    state: &mut State,
    pod: &Pod,
    nodes: Option<Mask>,
) -> Result<(), AllocateError> {
    let mut reusable = CpuSet::default();
    containers(pod).try_for_each(|container| policy.allocate(state, pod, container, nodes, &mut reusable))
}

fn of(state: &State, uid: &str, container: &str) -> String {
    state
        .of(uid, container)
        .map(CpuSet::to_string)
        .unwrap_or_default()
}

#[test]
fn reserved_cpus() {
    let new = |milli: i64, named: &str| {
        let policy = StaticPolicy::new(
            Arc::new(machine(1, 1, 4, 2)),
            CpuOptions::default(),
            milli,
            &set(named),
        );
        policy
            .map(|policy| policy.reserved.to_string())
            .map_err(|error| error.to_string())
    };
    assert_eq!(new(1000, "").unwrap(), "0");
    assert_eq!(new(1001, "").unwrap(), "0,4");
    assert_eq!(new(5000, "3,7").unwrap(), "3,7");
    assert!(new(0, "").unwrap_err().contains("to be greater than zero"));
    assert!(
        new(9000, "")
            .unwrap_err()
            .contains("unable to reserve the required amount of CPUs")
    );
    assert_eq!(
        new(0, "7-8").unwrap_err(),
        "reserved-cpus: 7-8 is not a subset of online-cpus: 0-7"
    );
}

#[test]
fn exclusive_and_shared() {
    // Cores 0 to 3; their second threads are 4 to 7.
    let policy = policy(machine(1, 1, 4, 2), CpuOptions::default(), "0,4");
    let mut state = state(&policy);
    assert_eq!(
        (state.pool.to_string().as_str(), policy.allocatable()),
        ("0-7", set("1-3,5-7"))
    );
    let first = pod("u1", &[], &[("a", "2"), ("b", "500m"), ("c", "1")]);
    allocate(&policy, &mut state, &first, None).unwrap();
    assert_eq!(
        (
            of(&state, "u1", "a"),
            of(&state, "u1", "b"),
            of(&state, "u1", "c")
        ),
        ("1,5".into(), String::new(), "2".into())
    );
    assert_eq!(state.pool, set("0,3-4,6-7"));
    assert_eq!(policy.by_node(&state.exclusive()), [(0, 3)]);
    // What it has it keeps.
    let before = state.clone();
    allocate(&policy, &mut state, &first, None).unwrap();
    assert_eq!(state, before);
    // Reserved CPUs are nobody's own.
    let error = allocate(&policy, &mut state, &pod("u2", &[], &[("a", "4")]), None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "not enough cpus available to satisfy request: requested=4, available=3"
    );
    assert_eq!(state, before);
    // A restart finds the same; another machine or another reservation does not.
    policy.check(&mut state).unwrap();
    let other = |topology, options, reserved: &str| {
        let policy = super::tests::policy(topology, options, reserved);
        policy.check(&mut state.clone()).unwrap_err().to_string()
    };
    let none = CpuOptions::default();
    assert_eq!(
        other(machine(1, 1, 8, 2), none, "0,4"),
        "current set of available CPUs \"0-15\" doesn't match with CPUs in state \"0-7\""
    );
    assert_eq!(
        other(machine(1, 1, 4, 2), none, "1"),
        "not all reserved cpus: \"1\" are present in defaultCpuSet: \"0,3-4,6-7\""
    );
    let strict = CpuOptions {
        strict_reservation: true,
        ..none
    };
    assert_eq!(
        other(machine(1, 1, 4, 2), strict, "0"),
        "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0,3-4,6-7\""
    );
    assert!(state.release("u1") && !state.release("u1"));
    assert_eq!(state.pool, set("0-7"));
}

#[test]
fn strictly_reserved_cpus_run_no_pods() {
    let options = CpuOptions {
        strict_reservation: true,
        ..CpuOptions::default()
    };
    let policy = policy(machine(1, 1, 4, 1), options, "0");
    let mut state = state(&policy);
    assert_eq!(state.pool, set("1-3"));
    allocate(&policy, &mut state, &pod("u", &[], &[("a", "1")]), None).unwrap();
    assert_eq!(
        (of(&state, "u", "a").as_str(), state.pool.clone()),
        ("1", set("2-3"))
    );
    policy.check(&mut state).unwrap();
}

#[test]
fn whole_cores_only() {
    let options = CpuOptions {
        full_cores: true,
        ..CpuOptions::default()
    };
    let policy = policy(machine(1, 1, 4, 2), options, "0");
    let mut state = state(&policy);
    let mut refused = |cpu: &str| {
        let refused = allocate(&policy, &mut state, &pod("u", &[], &[("a", cpu)]), None);
        refused.unwrap_err().to_string()
    };
    assert_eq!(
        refused("3"),
        "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2"
    );
    // The other thread of the reserved CPU is no whole core.
    assert_eq!(
        refused("8"),
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 6, requested CPUs = 8, CPUs per core = 2"
    );
    allocate(&policy, &mut state, &pod("u", &[], &[("a", "2")]), None).unwrap();
    assert_eq!(of(&state, "u", "a"), "1,5");
}

#[test]
fn init_containers_lend_their_cpus() {
    let policy = policy(machine(1, 1, 4, 1), CpuOptions::default(), "0");
    let mut state = state(&policy);
    let lends = pod("u", &[("i", "3")], &[("a", "1"), ("b", "2")]);
    allocate(&policy, &mut state, &lends, None).unwrap();
    assert_eq!(
        (of(&state, "u", "i"), of(&state, "u", "a"), of(&state, "u", "b")),
        ("1-3".into(), "1".into(), "2-3".into())
    );
    policy.check(&mut state).unwrap();
    assert_eq!(state.pool, set("0"));
    state.release("u");
    assert_eq!(state.pool, set("0-3"));
}

#[test]
fn near_the_given_nodes() {
    // Two nodes of three cores with two threads: 0-2 and 6-8, 3-5 and 9-11.
    let policy = policy(machine(2, 1, 3, 2), CpuOptions::default(), "0");
    let mut state = state(&policy);
    let wants = |cpu: &str| pod("u", &[], &[("a", cpu)]);
    let hints = |state: &State, cpu: &str| -> Vec<(Vec<u32>, bool)> {
        let pod = wants(cpu);
        let all = policy.container_hints(
            state,
            &pod,
            &pod.spec.as_ref().unwrap().containers[0],
            &CpuSet::default(),
        );
        assert_eq!(all, policy.pod_hints(state, &pod));
        let hints = all[CPU].clone().unwrap().into_iter();
        hints
            .map(|hint| (hint.nodes.unwrap().nodes(), hint.preferred))
            .collect()
    };
    assert_eq!(
        hints(&state, "2"),
        [(vec![0], true), (vec![1], true), (vec![0, 1], false)]
    );
    // Node 0 could have six if none were reserved.
    assert_eq!(hints(&state, "6"), [(vec![1], true), (vec![0, 1], false)]);
    assert_eq!(hints(&state, "8"), [(vec![0, 1], true)]);
    assert_eq!(hints(&state, "12"), []);
    let one = |node| Some(Mask::from_iter([node]));
    allocate(&policy, &mut state, &wants("8"), one(1)).unwrap();
    assert_eq!(of(&state, "u", "a"), "1,3-5,7,9-11");
    // It has them: there they are.
    assert_eq!(hints(&state, "8"), [(vec![0, 1], true)]);
    assert_eq!(hints(&state, "2"), []);
    let burstable: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c"}]}})).unwrap();
    assert!(policy.pod_hints(&state, &burstable).is_empty());
}
