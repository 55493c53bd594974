//! Nodes that are cut off, one or all, and one that is gone for good. One server, whose machine is no node, and two agents.

use crate::house::join;
use crate::{ALONE, PATIENCE, SKIFF, is_long};
use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};
use skiff_testkit::{BUSYBOX, Machine, Switch, busybox_archive, eventually, expect_eq};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Kubelets report every ten seconds.
const GRACE: &str = "--node-monitor-grace-period=20s";
/// How long pods stay on a node that is lost: longer than two nodes may differ in when they are given up.
const TOLERATED: i64 = 12;

struct House {
    agents: Vec<Machine>,
    server: Machine,
    _switch: Arc<Switch>,
}

impl House {
    fn new() -> Result<House> {
        let switch = Switch::new()?;
        let house = House {
            server: Machine::new(&switch, "server", SKIFF)?,
            agents: vec![
                Machine::new(&switch, "first", SKIFF)?,
                Machine::new(&switch, "second", SKIFF)?,
            ],
            _switch: switch,
        };
        house.server.skiff(&[
            "up",
            "--no-kubeconfig-merge",
            "--components=api,controllers,scheduler",
            "--node-monitor-period=1s",
            GRACE,
        ])?;
        let dir = tempfile::tempdir()?;
        let archive = busybox_archive(dir.path())?.display().to_string();
        for agent in &house.agents {
            join(agent, &house.server, &[])?;
            agent.skiff(&["image", "import", &archive])?;
        }
        for agent in &house.agents {
            house.is_ready(agent, "True")?;
        }
        Ok(house)
    }

    fn is_ready(&self, agent: &Machine, status: &str) -> Result<()> {
        let name = agent.host_name();
        eventually(&format!("{name} is Ready: {status}"), PATIENCE, || {
            let path =
                "--template={{range .status.conditions}}{{if eq .type \"Ready\"}}{{.status}}{{end}}{{end}}";
            expect_eq(
                self.server.kubectl(&["get", "node", name, path])?.as_str(),
                status,
            )
        })
    }

    fn no_execute_taint(&self, agent: &Machine) -> Result<Option<Value>> {
        let node = self.server.kubectl_json(&["get", "node", agent.host_name()])?;
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        Ok(taints.into_iter().find(|taint| taint["effect"] == "NoExecute"))
    }

    /// A Deployment of one pod, which runs on this agent now and may run on any.
    fn deploy(&self, name: &str, on: &Machine) -> Result<Pod> {
        let others = self
            .agents
            .iter()
            .filter(|other| other.host_name() != on.host_name());
        let others: Vec<&str> = others.map(Machine::host_name).collect();
        for other in &others {
            self.server.kubectl(&["cordon", other])?;
        }
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec(Some(TOLERATED))}}});
        self.server
            .kubectl_feed(&["apply", "-f", "-"], &deployment.to_string())?;
        let pod = self.one_runs(name, on)?;
        for other in &others {
            self.server.kubectl(&["uncordon", other])?;
        }
        Ok(pod)
    }

    /// A pod of its own on this agent, which stays there however long the node is lost.
    fn place(&self, name: &str, on: &Machine) -> Result<Pod> {
        let mut spec = spec(None);
        spec["nodeName"] = on.host_name().into();
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec});
        self.server
            .kubectl_feed(&["apply", "-f", "-"], &pod.to_string())?;
        self.one_runs(name, on)
    }

    fn pods(&self, app: &str) -> Result<Vec<Pod>> {
        let pods = self
            .server
            .kubectl_json(&["get", "pods", "-l", &format!("app={app}")])?;
        let pods = pods["items"].as_array().context("a list")?;
        Ok(pods.iter().cloned().map(Pod).collect())
    }

    /// Exactly one pod of this name is there, and it is ready on this agent.
    fn one_runs(&self, app: &str, on: &Machine) -> Result<Pod> {
        eventually(&format!("{app} runs on {}", on.host_name()), PATIENCE, || {
            let mut pods = self.pods(app)?;
            expect_eq(pods.len(), 1)?;
            let pod = pods.remove(0);
            ensure!(pod.is_ready_on(on), "{}", pod.0["status"]);
            Ok(pod)
        })
    }
}

/// A container that writes without pause.
fn spec(tolerated: Option<i64>) -> Value {
    let unreachable = json!({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute",
        "tolerationSeconds": tolerated});
    json!({"terminationGracePeriodSeconds": 1, "tolerations": [unreachable], "volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": BUSYBOX, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do echo x >> /v/ticks; sleep 0.1; done"]}]})
}

#[derive(Clone)]
struct Pod(Value);

impl Pod {
    fn uid(&self) -> &str {
        self.0["metadata"]["uid"].as_str().unwrap_or_default()
    }

    /// Its container, and how often that was started again.
    fn container(&self) -> (String, i64) {
        let status = &self.0["status"]["containerStatuses"][0];
        (
            status["containerID"].as_str().unwrap_or_default().to_owned(),
            status["restartCount"].as_i64().unwrap_or(-1),
        )
    }

    fn is_ready_on(&self, agent: &Machine) -> bool {
        let conditions = self.0["status"]["conditions"].as_array();
        let ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
        self.0["spec"]["nodeName"] == agent.host_name() && conditions.is_some_and(|all| all.iter().any(ready))
    }

    /// When somebody asked to delete it.
    fn deleted_at(&self) -> Result<Option<Timestamp>> {
        let metadata = &self.0["metadata"];
        let Some(end) = metadata["deletionTimestamp"].as_str() else {
            return Ok(None);
        };
        let grace = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
        let end: Timestamp = end.parse()?;
        Ok(Some(end - jiff::SignedDuration::from_secs(grace)))
    }

    /// What its container has written on the agent's disk; none when the pod's folder is gone.
    fn written(&self, agent: &Machine) -> Option<u64> {
        let file = format!(
            "kubelet/pods/{}/volumes/kubernetes.io~empty-dir/v/ticks",
            self.uid()
        );
        std::fs::metadata(agent.data(&file)).ok().map(|file| file.len())
    }

    /// It goes on, whatever the cluster knows of it.
    fn is_at_work(&self, agent: &Machine) -> Result<()> {
        let before = self.written(agent).context("it has written nothing")?;
        eventually("the container writes", PATIENCE, || {
            let now = self.written(agent).context("its folder is gone")?;
            ensure!(now > before, "{now} bytes");
            Ok(())
        })
    }
}

#[test]
fn nodes_that_are_cut_off_and_gone() -> Result<()> {
    if !is_long()? {
        println!("left out: `make faults` runs it");
        return Ok(());
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let began = Instant::now();
    let step = |what: &str| println!("{:6.1} s  {what}", began.elapsed().as_secs_f64());
    let mut house = House::new()?;
    step("one server, two agents");
    let (mover, stayer) = {
        let first = &house.agents[0];
        (house.deploy("mover", first)?, house.place("stayer", first)?)
    };
    step("pods run");
    a_node_is_cut_off(&house, &mover, &stayer, &step)?;
    all_nodes_are_cut_off(&house, &stayer, &step)?;
    a_machine_is_gone(&mut house, &step)
}

fn a_node_is_cut_off(house: &House, mover: &Pod, stayer: &Pod, step: &dyn Fn(&str)) -> Result<()> {
    let (first, second) = (&house.agents[0], &house.agents[1]);
    first.connect(false)?;
    house.is_ready(first, "Unknown")?;
    step("the node is lost");
    let taint = eventually("the node gets its taint", PATIENCE, || {
        house.no_execute_taint(first)?.context("it has none")
    })?;
    expect_eq(taint["key"].as_str(), Some("node.kubernetes.io/unreachable"))?;
    let tainted: Timestamp = taint["timeAdded"].as_str().context("timeAdded")?.parse()?;
    let replaced = eventually("another pod runs on the other node", PATIENCE, || {
        let pods = house.pods("mover")?;
        pods.into_iter()
            .find(|pod| pod.is_ready_on(second))
            .context("none does")
    })?;
    ensure!(replaced.uid() != mover.uid());
    let old = house
        .pods("mover")?
        .into_iter()
        .find(|pod| pod.uid() == mover.uid());
    let old = old.context("the pod is there as long as its kubelet has not stopped it")?;
    let deleted = old.deleted_at()?.context("it is deleted")?;
    let after = deleted.duration_since(tainted).as_secs();
    step(&format!(
        "its pod was deleted {after} s after the taint; {TOLERATED} s were tolerated"
    ));
    ensure!(after >= TOLERATED, "too early");
    // On the lost node everything goes on.
    mover.is_at_work(first)?;
    stayer.is_at_work(first)?;
    let kept = house.pods("stayer")?;
    ensure!(
        kept.len() == 1 && kept[0].deleted_at()?.is_none(),
        "it tolerates everything"
    );

    first.connect(true)?;
    house.is_ready(first, "True")?;
    eventually("the taint goes", PATIENCE, || {
        expect_eq(house.no_execute_taint(first)?.is_none(), true)
    })?;
    let left = house.one_runs("mover", second)?;
    expect_eq(left.uid(), replaced.uid())?;
    expect_eq(left.container(), replaced.container())?;
    eventually("nothing is left of the old pod", PATIENCE, || {
        expect_eq(mover.written(first), None)
    })?;
    let same = house.one_runs("stayer", first)?;
    expect_eq(same.uid(), stayer.uid())?;
    expect_eq(same.container(), stayer.container())?;
    stayer.is_at_work(first)?;
    step("it is back: no doubles, and the same container");
    Ok(())
}

fn all_nodes_are_cut_off(house: &House, stayer: &Pod, step: &dyn Fn(&str)) -> Result<()> {
    let (first, second) = (&house.agents[0], &house.agents[1]);
    let mover = house.one_runs("mover", second)?;
    for agent in &house.agents {
        agent.connect(false)?;
    }
    for agent in &house.agents {
        house.is_ready(agent, "Unknown")?;
    }
    step("all nodes are lost");
    for agent in &house.agents {
        eventually("no taint evicts pods", PATIENCE, || {
            let taint = house.no_execute_taint(agent)?;
            ensure!(taint.is_none(), "{taint:?}");
            Ok(())
        })?;
    }
    // Longer than is tolerated: evictions would show.
    std::thread::sleep(Duration::from_secs(TOLERATED.unsigned_abs() + 5));
    for app in ["mover", "stayer"] {
        let pods = house.pods(app)?;
        expect_eq(pods.len(), 1)?;
        ensure!(pods[0].deleted_at()?.is_none(), "{app} was evicted");
    }
    mover.is_at_work(second)?;
    for agent in &house.agents {
        agent.connect(true)?;
    }
    for agent in &house.agents {
        house.is_ready(agent, "True")?;
    }
    for (app, before, agent) in [("mover", &mover, second), ("stayer", stayer, first)] {
        let now = house.one_runs(app, agent)?;
        expect_eq(now.uid(), before.uid())?;
        expect_eq(now.container(), before.container())?;
    }
    step("all are back, and nothing was evicted");
    Ok(())
}

fn a_machine_is_gone(house: &mut House, step: &dyn Fn(&str)) -> Result<()> {
    let gone = house.agents.remove(1);
    let name = gone.host_name().to_owned();
    let lonely = house.place("lonely", &gone)?;
    gone.connect(false)?;
    drop(gone);
    let first = &house.agents[0];
    eventually("the pod moves", PATIENCE, || {
        let pods = house.pods("mover")?;
        ensure!(pods.iter().any(|pod| pod.is_ready_on(first)), "it does not run");
        Ok(())
    })?;
    step("a machine is gone, and its pod moved");
    expect_eq(house.pods("lonely")?.len(), 1)?;
    house.server.kubectl(&["delete", "node", &name])?;
    eventually("its pods go with the Node", Duration::from_secs(180), || {
        for app in ["mover", "lonely"] {
            let there = house.pods(app)?;
            let on = there
                .iter()
                .filter(|pod| pod.0["spec"]["nodeName"] == name.as_str());
            expect_eq(on.count(), 0).with_context(|| app.to_owned())?;
        }
        Ok(())
    })?;
    let kept = house.one_runs("mover", first)?;
    ensure!(kept.uid() != lonely.uid());
    step("the Node is deleted, and its pods are gone");
    Ok(())
}
