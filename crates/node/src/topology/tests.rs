//! The managers together: what is admitted, why not, and what a restart finds.

use super::machine::made_up::{machine, write};
use super::*;
use serde_json::json;

struct Node {
    directory: tempfile::TempDir,
    config: ManagersConfig,
}

impl Node {
    /// Two nodes with two CPUs and a GiB each; CPU 0 and 24 MiB of the first are reserved.
    fn new(flags: ManagerFlags) -> Self {
        let directory = tempfile::tempdir().unwrap();
        write(&machine(2, 1, 2, 1), &directory.path().join("sys"));
        let mut config = ManagersConfig::default();
        let flags = ManagerFlags {
            reserved_cpus: Some("0".to_owned()),
            reserved_memory: parse_reserved_memory("0:memory=24Mi").unwrap(),
            ..flags
        };
        flags.apply(&mut config).unwrap();
        Node { directory, config }
    }

    fn start(&self) -> Result<Managers, String> {
        let root = self.directory.path();
        let paths = (root, &*root.join("sys"));
        Managers::restored(paths, &self.config, 1000, 24 << 20, &Registry::new())
            .map_err(|error| error.to_string())
    }
}

fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn pod(uid: &str, cpus: &[&str], memory: &str) -> Pod {
    let containers: Vec<_> = { cpus.iter().enumerate() }
        .map(|(place, cpu)| {
            let amounts = json!({"cpu": cpu, "memory": memory});
            json!({"name": format!("c{place}"), "resources": {"requests": amounts, "limits": amounts}})
        })
        .collect();
    serde_json::from_value(json!({"metadata": {"uid": uid}, "spec": {"containers": containers}})).unwrap()
}

async fn refused(managers: &Managers, pod: &Pod) -> (String, String) {
    let refusal = managers.admit(pod, None).await.unwrap_err();
    (refusal.reason.into_owned(), refusal.message)
}

#[tokio::test]
async fn cpus_are_kept_over_a_restart() {
    let node = Node::new(ManagerFlags {
        cpu_policy: text("static"),
        ..ManagerFlags::default()
    });
    let managers = node.start().unwrap();
    managers.admit(&pod("u1", &["2"], "1Mi"), None).await.unwrap();
    let check = |managers: &Managers| {
        let mut own = v1::LinuxContainerResources {
            cpu_quota: 7,
            ..Default::default()
        };
        let mut shared = own.clone();
        managers.apply("u1", "c0", &mut own);
        managers.apply("u2", "c0", &mut shared);
        assert_eq!((own.cpuset_cpus.as_str(), own.cpu_quota), ("2-3", -1));
        assert_eq!((shared.cpuset_cpus.as_str(), shared.cpu_quota), ("0-1", 7));
        assert!(managers.cpus.has_exclusive("u1") && !managers.cpus.has_exclusive("u2"));
    };
    check(&managers);
    let (reason, message) = refused(&managers, &pod("u3", &["2"], "1Mi")).await;
    assert_eq!(reason, "UnexpectedAdmissionError");
    assert_eq!(
        message,
        "Allocate failed due to not enough cpus available to satisfy request: requested=2, available=1, which is unexpected"
    );
    assert_eq!(managers.metrics.cpu_requests.get(), 2);
    assert_eq!(managers.metrics.cpu_errors.get(), 1);
    assert_eq!(managers.refuses_resize(true, false, true), None);
    assert_eq!(
        managers.refuses_resize(true, true, false).unwrap(),
        "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\""
    );
    assert_eq!(managers.refuses_resize(false, true, true), None);
    let managers = node.start().unwrap();
    check(&managers);
    managers.admit(&pod("u1", &["2"], "1Mi"), None).await.unwrap();
    check(&managers);
    // Its end frees them, also for the next kubelet.
    managers.release("u1");
    let managers = node.start().unwrap();
    assert_eq!(managers.cpus.affinity("u1", "c0").to_string(), "0-3");
}

#[tokio::test]
async fn another_policy_needs_a_drain() {
    let mut node = Node::new(ManagerFlags {
        cpu_policy: text("static"),
        memory_policy: text("Static"),
        ..ManagerFlags::default()
    });
    node.start().unwrap();
    node.config.cpu_policy = Pinning::None;
    let error = node.start().err().unwrap();
    assert!(
        error.starts_with(
            "the CPU manager: could not restore state from checkpoint: configured policy \"none\" differs from state checkpoint policy \"static\", please drain this node and delete the CPU manager checkpoint file"
        ),
        "{error}"
    );
    std::fs::remove_file(node.directory.path().join("cpu_manager_state")).unwrap();
    node.start().unwrap();
    node.config.memory_policy = Pinning::None;
    let error = node.start().err().unwrap();
    assert!(
        error.contains("configured policy \"None\" differs from state checkpoint policy \"Static\""),
        "{error}"
    );
}

#[tokio::test]
async fn one_numa_node() {
    let node = Node::new(ManagerFlags {
        cpu_policy: text("static"),
        memory_policy: text("Static"),
        topology_policy: text("single-numa-node"),
        ..ManagerFlags::default()
    });
    let managers = node.start().unwrap();
    // Two CPUs are on node 1 only, and so the memory comes from there.
    managers.admit(&pod("u1", &["2"], "10Mi"), None).await.unwrap();
    let mut own = v1::LinuxContainerResources::default();
    managers.apply("u1", "c0", &mut own);
    assert_eq!((own.cpuset_cpus.as_str(), own.cpuset_mems.as_str()), ("2-3", "1"));
    assert_eq!(managers.memory.blocks("u1", "c0")[0].size, 10 << 20);
    // There is a CPU on node 0, and so much memory on node 1 alone.
    let (reason, message) = refused(&managers, &pod("u2", &["1"], "1010Mi")).await;
    assert_eq!(reason, "TopologyAffinityError");
    assert_eq!(message, "Resources cannot be allocated with Topology locality");
    assert_eq!(managers.metrics.topology_requests.get(), 2);
    assert_eq!(managers.metrics.topology_errors.get(), 1);
    // Two containers of one CPU each fit two nodes, but not one.
    managers.release("u1");
    managers.admit(&pod("u3", &["1"], "1Mi"), None).await.unwrap();
    managers
        .admit(&pod("u4", &["1", "1"], "1Mi"), None)
        .await
        .unwrap();
    managers.release("u4");
    managers.retain(|uid| uid != "u3");
    assert_eq!(managers.cpus.affinity("", "").to_string(), "0-3");
    let mut node = node;
    node.config.scope = Scope::Pod;
    let managers = node.start().unwrap();
    managers.admit(&pod("u5", &["1"], "1Mi"), None).await.unwrap();
    let managers_of_pod = pod("u6", &["1", "1", "1"], "1Mi");
    assert_eq!(
        refused(&managers, &managers_of_pod).await.0,
        "TopologyAffinityError"
    );
    managers
        .admit(&pod("u7", &["1", "1"], "1Mi"), None)
        .await
        .unwrap();
    // Pods without such wishes are all admitted.
    let burstable: Pod = serde_json::from_value(json!({"metadata": {"uid": "b"}, "spec": {"containers": [
        {"name": "c", "resources": {"requests": {"cpu": "9"}}}]}}))
    .unwrap();
    managers.admit(&burstable, None).await.unwrap();
}

#[tokio::test]
async fn whole_cores_or_none() {
    let mut node = Node::new(ManagerFlags {
        cpu_policy: text("static"),
        cpu_options: [("full-pcpus-only".to_owned(), "true".to_owned())].into(),
        ..ManagerFlags::default()
    });
    write(&machine(1, 1, 2, 2), &node.directory.path().join("smt"));
    let system = node.directory.path().join("smt");
    node.config.reserved_memory.clear();
    let managers = Managers::restored(
        (node.directory.path(), &system),
        &node.config,
        1000,
        0,
        &Registry::new(),
    )
    .unwrap();
    let (reason, message) = refused(&managers, &pod("u", &["1"], "1Mi")).await;
    assert_eq!(reason, "SMTAlignmentError");
    assert_eq!(
        message,
        "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2"
    );
}

#[test]
fn without_policies_no_file_of_the_machine_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let paths = (directory.path(), Path::new("/nonexistent"));
    let managers = Managers::restored(paths, &ManagersConfig::default(), 0, 0, &Registry::new()).unwrap();
    let mut resources = v1::LinuxContainerResources::default();
    managers.apply("u", "c", &mut resources);
    assert_eq!(resources, v1::LinuxContainerResources::default());
}
