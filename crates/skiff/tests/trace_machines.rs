//! `skiff trace` over machines whose clocks are apart: two servers and an agent, as namespaces of this host.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, EtcdMembers, Machine, ShiftedClock, Switch, busybox_archive, eventually};
use std::time::{Duration, Instant};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PATIENCE: Duration = Duration::from_secs(60);
const HOUR: i32 = 3600;

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().skip(1).collect()
}

#[test]
fn the_marks_of_all_machines_are_one_path() -> Result<()> {
    let began = Instant::now();
    let step = |what: &str| eprintln!("{:6.1} s  {what}", began.elapsed().as_secs_f64());
    let dir = tempfile::tempdir()?;
    let archive = busybox_archive(dir.path())?.display().to_string();
    let switch = Switch::new()?;
    let [one, two, agent] = ["one", "two", "three"].map(|name| Machine::new(&switch, name, SKIFF));
    let (agent, servers) = (agent?, [one?, two?]);
    // One member, so that the other machine can be missed.
    let etcd = EtcdMembers::start(&servers[..1])?;
    let [one, two] = &servers;
    one.skiff(&["up", "--no-kubeconfig-merge", "--etcd-servers", &etcd.endpoints()])?;
    two.skiff(&words(&one.skiff(&["token", "create", "--server"])?))?;
    agent.skiff(&words(&one.skiff(&["token", "create"])?))?;
    for machine in [two, &agent] {
        machine.skiff(&["image", "import", &archive])?;
    }
    step("two servers and an agent");
    let shifted = [
        ShiftedClock::new(two.pid()?.try_into()?, HOUR)?,
        ShiftedClock::new(agent.pid()?.try_into()?, 2 * HOUR)?,
    ];
    for node in ["two", "three"] {
        let trace = trace_of_a_pod_on(one, node)?;
        step(&format!("traced a pod on {node}"));
        let total = trace["totalUs"].as_i64().context("totalUs")?;
        ensure!(
            (0..600_000_000).contains(&total),
            "clocks an hour apart must not show: {trace:#}"
        );
        let steps = trace["steps"].as_array().context("steps")?;
        let starts: Vec<i64> = steps.iter().filter_map(|step| step["startUs"].as_i64()).collect();
        ensure!(starts.is_sorted(), "{trace:#}");
        let user = format!("system:node:{node}");
        let of_node = |step: &&Value| step["actor"] == user.as_str();
        ensure!(steps.iter().any(|step| step["server"] == "one"), "{trace:#}");
        // The container was started on that machine: what it says of its own work is in the order of the whole.
        let container = steps
            .iter()
            .filter(of_node)
            .find(|step| step["what"] == "start c")
            .with_context(|| format!("the node tells of its work: {trace:#}"))?;
        let bound = steps
            .iter()
            .find(|step| {
                step["what"]
                    .as_str()
                    .is_some_and(|what| what.contains("pods/binding"))
            })
            .with_context(|| format!("the pod is bound: {trace:#}"))?;
        ensure!(
            bound["startUs"].as_i64() < container["startUs"].as_i64(),
            "{trace:#}"
        );
        let ahead = |name: &str| {
            let machines = trace["machines"].as_array().into_iter().flatten();
            let machine = machines.into_iter().find(|machine| machine["name"] == name);
            machine.and_then(|machine| machine["aheadUs"].as_i64())
        };
        let is_about = |found: Option<i64>, seconds: i32| {
            found.is_some_and(|us| (us - i64::from(seconds) * 1_000_000).abs() < 30_000_000)
        };
        ensure!(
            is_about(ahead("one"), 0) && is_about(ahead("two"), HOUR),
            "{trace:#}"
        );
        if node == "three" {
            ensure!(is_about(ahead("three"), 2 * HOUR), "{trace:#}");
        }
    }
    let drawn = one.skiff(&["trace", "deployment/on-three"])?;
    eprintln!("{drawn}");
    ensure!(
        drawn.contains("[one]") && drawn.contains(" s ahead, ±"),
        "{drawn}"
    );
    drop(shifted);

    // A machine that gives no answer is named, and the rest is shown.
    two.connect(false)?;
    let drawn = one.skiff(&["trace", "deployment/on-three"])?;
    ensure!(drawn.contains("gives no answer, its part is missing"), "{drawn}");
    two.connect(true)?;
    step("without one server");
    Ok(())
}

/// Makes a Deployment on that node and traces it when it is complete.
fn trace_of_a_pod_on(server: &Machine, node: &str) -> Result<Value> {
    let name = format!("on-{node}");
    let labels = json!({"app": name});
    let pod = json!({"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}});
    server.kubectl_feed(&["apply", "-f", "-"], &deployment.to_string())?;
    server.kubectl(&[
        "rollout",
        "status",
        &format!("deployment/{name}"),
        "--timeout=60s",
    ])?;
    eventually("the trace is complete", PATIENCE, || {
        let trace = server.skiff(&["trace", &format!("deployment/{name}"), "-o", "json"])?;
        let trace: Value = serde_json::from_str(&trace)?;
        ensure!(trace["complete"] == true, "{trace:#}");
        Ok(trace)
    })
}
