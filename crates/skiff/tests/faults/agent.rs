//! What agents do while a server hangs: they notice the silence and go on at another one.

use crate::PATIENCE;
use crate::house::House;
use crate::table::{Injury, server};
use anyhow::{Result, ensure};
use serde_json::json;
use skiff_testkit::{BUSYBOX, eventually};
use std::time::Instant;

/// Stops the server that the first agent is connected to, and waits until no agent is, and pods that are bound to the agents
/// run. The server goes on afterwards.
pub(crate) fn change_over(house: &House) -> Result<()> {
    let Some(first) = house.agents.first() else {
        return Ok(());
    };
    for agent in &house.agents {
        eventually("the agent knows all servers", PATIENCE, || {
            let state = std::fs::read_to_string(agent.data("agent.json"))?;
            for server in &house.servers {
                ensure!(state.contains(&server.api_server()?.to_string()), "{state}");
            }
            Ok(())
        })?;
    }
    let used = eventually("the agent is connected", PATIENCE, || house.server_of(first))?;
    let other = house.others(used)[0];
    let _injury = Injury::stop(server(house, used)?)?;
    let began = Instant::now();
    for agent in &house.agents {
        let now = eventually("the agent is connected to another server", PATIENCE, || {
            let now = house.server_of(agent)?;
            ensure!(now != used, "it is connected to {used}");
            Ok(now)
        })?;
        let (seconds, name) = (began.elapsed().as_secs_f64(), agent.host_name());
        println!("{seconds:5.1} s  the agent {name} is not at the server {used}, but at {now}");
    }
    for agent in &house.agents {
        let name = agent.host_name();
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": name,
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}});
        other.kubectl_feed(&["create", "-f", "-"], &pod.to_string())?;
    }
    for agent in &house.agents {
        let pod = format!("pod/{}", agent.host_name());
        other.kubectl(&["wait", "--for=condition=Ready", &pod, "--timeout=60s"])?;
        other.kubectl(&["delete", &pod, "--timeout=60s"])?;
    }
    Ok(())
}
