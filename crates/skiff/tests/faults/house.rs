//! Three servers, each beside a member of etcd, three agents, and a machine for clients that no fault touches.

use crate::SKIFF;
use anyhow::{Result, ensure};
use skiff_client::ServerAddress;
use skiff_testkit::registers::Registers;
use skiff_testkit::{EtcdMembers, Machine, Switch, busybox_archive};
use std::sync::Arc;
use std::time::Instant;

/// Dropped in this order: a server that ends says so in etcd.
pub(crate) struct House {
    /// None in the short form.
    pub(crate) agents: Vec<Machine>,
    pub(crate) servers: Vec<Machine>,
    pub(crate) etcd: EtcdMembers,
    clients: Machine,
    addresses: Vec<ServerAddress>,
    _switch: Arc<Switch>,
}

impl House {
    pub(crate) fn new(with_agents: bool) -> Result<House> {
        let began = Instant::now();
        let switch = Switch::new()?;
        let machines: Result<Vec<Machine>> = ["one", "two", "three"]
            .iter()
            .map(|name| Machine::new(&switch, name, SKIFF))
            .collect();
        let servers = machines?;
        let etcd = EtcdMembers::start(&servers)?;
        let flags = ["--no-kubeconfig-merge", "--etcd-servers", &etcd.endpoints()];
        servers[0].skiff(&[&["up"], &flags[..]].concat())?;
        let mut house = House {
            agents: Vec::new(),
            addresses: Vec::new(),
            clients: Machine::new(&switch, "clients", SKIFF)?,
            servers,
            etcd,
            _switch: switch.clone(),
        };
        for server in &house.servers[1..] {
            join(server, &house.servers[0], &["--server"])?;
        }
        for server in &house.servers {
            house.addresses.push(server.api_server()?);
        }
        if with_agents {
            let dir = tempfile::tempdir()?;
            let archive = busybox_archive(dir.path())?.display().to_string();
            for (name, server) in ["four", "five", "six"].iter().zip(&house.servers) {
                let agent = Machine::new(&switch, name, SKIFF)?;
                join(&agent, server, &[])?;
                agent.skiff(&["image", "import", &archive])?;
                house.agents.push(agent);
            }
        }
        println!("{:5.1} s  the house stands", began.elapsed().as_secs_f64());
        Ok(house)
    }

    pub(crate) fn registers(&self, id: &str, seed: u64) -> Result<Registers> {
        let tls = self.servers[0].admin_tls()?;
        Registers::start(id, &self.clients, self.addresses.clone(), &tls, seed)
    }

    /// Starts a server again that was killed.
    pub(crate) fn restart(&self, server: usize) -> Result<()> {
        let endpoints = self.etcd.endpoints();
        // Those that joined remember it.
        let flags: &[&str] = match server {
            0 => &["up", "--no-kubeconfig-merge", "--etcd-servers", &endpoints],
            _ => &["up"],
        };
        self.servers[server].skiff(flags).map(drop)
    }

    pub(crate) fn others(&self, server: usize) -> Vec<&Machine> {
        let all = self.servers.iter().enumerate();
        all.filter(|(number, _)| *number != server)
            .map(|(_, machine)| machine)
            .collect()
    }

    pub(crate) fn all_serve(&self) -> Result<()> {
        for server in &self.servers {
            let told = server.kubectl(&["--request-timeout=5s", "get", "--raw", "/readyz"])?;
            ensure!(told.trim() == "ok", "{}: {told}", server.host_name());
        }
        Ok(())
    }

    /// The server that the agent is connected to.
    pub(crate) fn server_of(&self, agent: &Machine) -> Result<usize> {
        let open = agent.shell("ss -Htn state established")?;
        let found = self
            .addresses
            .iter()
            .position(|address| open.contains(&address.authority()));
        found.ok_or_else(|| anyhow::anyhow!("the agent is connected to no server:\n{open}"))
    }
}

/// Runs the line of `skiff token create` on a machine.
pub(crate) fn join(machine: &Machine, server: &Machine, flags: &[&str]) -> Result<()> {
    let line = server.skiff(&[&["token", "create"], flags].concat())?;
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    machine.skiff(&words).map(drop)
}
