//! Which NUMA nodes memory comes from.

use super::super::machine::made_up::machine;
use super::*;
use serde_json::json;

const MIB: u64 = 1 << 20;

fn pod(uid: &str, init: &[(&str, u64)], containers: &[(&str, u64)]) -> Pod {
    let all = |list: &[(&str, u64)]| -> Vec<serde_json::Value> {
        let list = list.iter();
        list.map(|(name, mib)| {
            let amounts = json!({"cpu": "100m", "memory": format!("{mib}Mi")});
            json!({"name": name, "resources": {"requests": amounts, "limits": amounts}})
        })
        .collect()
    };
    serde_json::from_value(json!({"metadata": {"uid": uid},
        "spec": {"initContainers": all(init), "containers": all(containers)}}))
    .unwrap()
}

/// Two nodes of a GiB, of which 24 MiB of the first are reserved.
fn two_nodes() -> (StaticPolicy, State) {
    let reserved = [(0, [(MEMORY.to_owned(), 24 * MIB)].into())].into();
    let policy = StaticPolicy::new(Arc::new(machine(2, 1, 2, 1)), &reserved, 24 * MIB).unwrap();
    let mut state = State::default();
    policy.check(&mut state).unwrap();
    (policy, state)
}

fn allocate(policy: &StaticPolicy, state: &mut State, pod: &Pod, hint: Hint) -> Result<(), AllocateError> {
    let mut reusable = Reusable::default();
    containers(pod).try_for_each(|container| policy.allocate(state, pod, container, hint, &mut reusable))
}

fn nodes_of(state: &State, uid: &str, container: &str) -> Vec<u32> {
    state.of(uid, container).unwrap()[0].numa_affinity.clone()
}

fn free(state: &State, node: u32) -> u64 {
    state.machine[&node].memory_map[MEMORY].free / MIB
}

#[test]
fn what_is_reserved_must_add_up() {
    let new = |node: u32, mib: u64, kept: u64| {
        let reserved = match mib {
            0 => BTreeMap::new(),
            mib => [(node, [(MEMORY.to_owned(), mib * MIB)].into())].into(),
        };
        let policy = StaticPolicy::new(Arc::new(machine(1, 1, 2, 1)), &reserved, kept * MIB);
        policy.map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(new(0, 100, 100), Ok(()));
    assert_eq!(
        new(0, 100, 200).unwrap_err(),
        "the total amount \"100Mi\" of type \"memory\" is not equal to the value \"200Mi\" determined by Node Allocatable feature"
    );
    assert!(
        new(3, 100, 100)
            .unwrap_err()
            .contains("NUMA node 3 that does not exist")
    );
    assert!(
        new(0, 0, 0)
            .unwrap_err()
            .contains("you should specify the system reserved memory")
    );
}

#[test]
fn one_node_then_groups() {
    let (policy, mut state) = two_nodes();
    assert_eq!((free(&state, 0), free(&state, 1)), (1000, 1024));
    let none = Hint::default();
    allocate(&policy, &mut state, &pod("u1", &[], &[("a", 600)]), none).unwrap();
    assert_eq!((nodes_of(&state, "u1", "a"), free(&state, 0)), (vec![0], 400));
    allocate(&policy, &mut state, &pod("u2", &[], &[("a", 600)]), none).unwrap();
    assert_eq!((nodes_of(&state, "u2", "a"), free(&state, 1)), (vec![1], 424));
    // Both have as much together, but serve single containers.
    let wide = pod("u3", &[], &[("a", 700)]);
    let before = state.clone();
    assert_eq!(
        allocate(&policy, &mut state, &wide, none),
        Err(AllocateError::NotEnough)
    );
    assert_eq!(state, before);
    // What it has it keeps; a restart finds the same.
    allocate(&policy, &mut state, &pod("u1", &[], &[("a", 600)]), none).unwrap();
    assert_eq!(state, before);
    policy.check(&mut state).unwrap();
    state.release("u1", "a");
    state.release("u2", "a");
    let large = pod("u4", &[], &[("a", 1500)]);
    allocate(&policy, &mut state, &large, none).unwrap();
    assert_eq!(nodes_of(&state, "u4", "a"), [0, 1]);
    assert_eq!((free(&state, 0), free(&state, 1)), (0, 524));
    // A node of a group serves no container alone.
    let hint = Hint::new(Mask::from_iter([1]), false);
    allocate(&policy, &mut state, &pod("u5", &[], &[("a", 100)]), hint).unwrap();
    assert_eq!(nodes_of(&state, "u5", "a"), [0, 1]);
    policy.check(&mut state).unwrap();
    state.release("u5", "a");
    state.release("u4", "a");
    assert_eq!(state.machine, policy.empty_machine());
}

#[test]
fn hints_and_other_pods() {
    let (policy, mut state) = two_nodes();
    let wants = |mib: u64| pod("u", &[], &[("a", mib)]);
    let hints = |state: &State, mib: u64| -> Vec<(Vec<u32>, bool)> {
        let pod = wants(mib);
        let mut all = policy.container_hints(
            state,
            &pod,
            &pod.spec.as_ref().unwrap().containers[0],
            &Reusable::default(),
        );
        assert_eq!(all, policy.pod_hints(state, &pod));
        let hints = all.remove(MEMORY).flatten().unwrap_or_default().into_iter();
        hints
            .map(|hint| (hint.nodes.unwrap().nodes(), hint.preferred))
            .collect()
    };
    assert_eq!(
        hints(&state, 100),
        [(vec![0], true), (vec![1], true), (vec![0, 1], false)]
    );
    assert_eq!(hints(&state, 1010), [(vec![1], true), (vec![0, 1], false)]);
    assert_eq!(hints(&state, 1500), [(vec![0, 1], true)]);
    assert_eq!(hints(&state, 5000), []);
    allocate(
        &policy,
        &mut state,
        &wants(100),
        Hint::new(Mask::from_iter([1]), true),
    )
    .unwrap();
    assert_eq!(hints(&state, 100), [(vec![1], true)]);
    let burstable: Pod = serde_json::from_value(json!({"metadata": {"uid": "b"}, "spec": {"containers": [
        {"name": "c", "resources": {"requests": {"memory": "1Mi"}}}]}}))
    .unwrap();
    allocate(&policy, &mut state, &burstable, Hint::default()).unwrap();
    assert!(state.of("b", "c").is_none());
}

#[test]
fn init_containers_lend_their_memory() {
    let (policy, mut state) = two_nodes();
    let lends = pod("u", &[("i", 800)], &[("a", 500), ("b", 300)]);
    let hint = Hint::new(Mask::from_iter([0]), true);
    allocate(&policy, &mut state, &lends, hint).unwrap();
    assert_eq!(free(&state, 0), 200);
    assert_eq!(state.of("u", "i").unwrap()[0].size, 0);
    policy.check(&mut state).unwrap();
    // It has ended. A kubelet that starts again gives it nothing.
    state.release("u", "i");
    let before = state.clone();
    allocate(&policy, &mut state, &lends, hint).unwrap();
    assert_eq!(state, before);
    let init = &lends.spec.as_ref().unwrap().init_containers.as_ref().unwrap()[0];
    assert!(
        policy
            .container_hints(&state, &lends, init, &Reusable::default())
            .is_empty()
    );
    for container in ["a", "b"] {
        state.release("u", container);
    }
    assert_eq!(state.machine, policy.empty_machine());
}
