//! What an agent does while a server hangs: it notices the silence and goes on at another one.

use crate::PATIENCE;
use crate::house::House;
use crate::table::{Injury, server};
use anyhow::{Result, ensure};
use serde_json::json;
use skiff_testkit::{BUSYBOX, eventually};
use std::time::Instant;

/// Stops the server that the agent is connected to, and waits until a pod that is bound to the agent runs. The server
/// goes on afterwards.
pub(crate) fn changes_over(house: &House) -> Result<()> {
    let Some(agent) = &house.agent else {
        return Ok(());
    };
    eventually("the agent knows all servers", PATIENCE, || {
        let state = std::fs::read_to_string(agent.data("agent.json"))?;
        for server in &house.servers {
            ensure!(state.contains(&server.api_server()?.to_string()), "{state}");
        }
        Ok(())
    })?;
    let used = eventually("the agent is connected", PATIENCE, || house.server_of(agent))?;
    let other = house.others(used)[0];
    let _injury = Injury::stop(server(house, used)?)?;
    let began = Instant::now();
    let now = eventually("the agent is connected to another server", PATIENCE, || {
        let now = house.server_of(agent)?;
        ensure!(now != used, "it is connected to {used}");
        Ok(now)
    })?;
    let seconds = began.elapsed().as_secs_f64();
    println!("{seconds:5.1} s  the agent left the server {used} for {now}");
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bound"}, "spec": {"nodeName": "four",
        "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": BUSYBOX, "command": ["sleep", "3600"]}]}});
    other.kubectl_feed(&["create", "-f", "-"], &pod.to_string())?;
    other.kubectl(&["wait", "--for=condition=Ready", "pod/bound", "--timeout=60s"])?;
    other.kubectl(&["delete", "pod", "bound", "--timeout=60s"])?;
    Ok(())
}
