//! The faults: whom each befalls, how it is made, and how it is healed.

use crate::agent;
use crate::house::House;
use anyhow::{Context, Result};
use skiff_testkit::{Random, ShiftedClock};
use std::process::{Child, Command, Stdio};

pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) victim: Victim,
    pub(crate) inject: fn(&House, usize) -> Result<Option<Injury>>,
    pub(crate) heal: fn(&House, usize) -> Result<()>,
    /// Whether writes have to be acknowledged during the fault.
    pub(crate) writes_go_on: bool,
    /// Whether it is among those that every run of the tests makes.
    pub(crate) is_short: bool,
}

/// Which machine it is: all three are a server and a member of etcd.
pub(crate) enum Victim {
    Any,
    EtcdLeader,
    EtcdFollower,
}

impl Victim {
    pub(crate) fn choose(&self, house: &House, random: &mut Random) -> Result<usize> {
        let leader = house.etcd.leader(&house.servers)?;
        let step = 1 + random.below(2) as usize;
        Ok(match self {
            Victim::Any => random.below(3) as usize,
            Victim::EtcdLeader => leader,
            Victim::EtcdFollower => (leader + step) % 3,
        })
    }
}

/// What makes a fault for as long as it is kept, also if the test fails meanwhile.
pub(crate) enum Injury {
    /// A process that hangs.
    Stopped(u32),
    /// A tracer, which delays another process.
    Traced(Child),
    /// Processes with another time of day.
    Shifted { _clocks: Vec<ShiftedClock> },
}

impl Injury {
    pub(crate) fn stop(pid: u32) -> Result<Injury> {
        signal("STOP", pid).map(|()| Injury::Stopped(pid))
    }
}

impl Drop for Injury {
    fn drop(&mut self) {
        match self {
            Injury::Stopped(pid) => {
                let _ = signal("CONT", *pid);
            }
            // It lets its process go when it is asked to end.
            Injury::Traced(tracer) => {
                let _ = signal("TERM", tracer.id());
                let _ = tracer.wait();
            }
            Injury::Shifted { .. } => {}
        }
    }
}

fn signal(signal: &str, pid: u32) -> Result<()> {
    let sent = Command::new("kill")
        .args([&format!("-{signal}"), &pid.to_string()])
        .status()?;
    anyhow::ensure!(sent.success(), "kill -{signal} {pid}: {sent}");
    Ok(())
}

pub(crate) fn server(house: &House, victim: usize) -> Result<u32> {
    Ok(u32::try_from(house.servers[victim].pid()?)?)
}

fn member(house: &House, victim: usize) -> Result<u32> {
    house.etcd.pid(victim).context("the member runs")
}

fn restart_member(house: &House, victim: usize) -> Result<()> {
    house.etcd.restart(victim, &house.servers[victim])
}

/// What is injured heals when the injury is dropped.
fn nothing_more(_: &House, _: usize) -> Result<()> {
    Ok(())
}

fn heal_networks(house: &House, _: usize) -> Result<()> {
    house.servers.iter().try_for_each(|server| server.heal_network())
}

pub(crate) const FAULTS: &[Fault] = &[
    Fault {
        name: "a server is killed",
        victim: Victim::Any,
        inject: |house, victim| {
            signal("KILL", server(house, victim)?)?;
            Ok(None)
        },
        heal: House::restart,
        writes_go_on: true,
        is_short: true,
    },
    Fault {
        name: "a server hangs",
        victim: Victim::Any,
        inject: |house, victim| {
            agent::change_over(house)?;
            server(house, victim).and_then(Injury::stop).map(Some)
        },
        heal: nothing_more,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "the etcd leader is killed",
        victim: Victim::EtcdLeader,
        inject: |house, victim| {
            house.etcd.kill(victim);
            Ok(None)
        },
        heal: restart_member,
        writes_go_on: true,
        is_short: true,
    },
    Fault {
        name: "the etcd leader hangs",
        victim: Victim::EtcdLeader,
        inject: |house, victim| member(house, victim).and_then(Injury::stop).map(Some),
        heal: nothing_more,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "two members of etcd are killed",
        victim: Victim::EtcdLeader,
        inject: |house, victim| {
            house.etcd.kill(victim);
            house.etcd.kill((victim + 1) % 3);
            Ok(None)
        },
        heal: |house, victim| {
            restart_member(house, victim)?;
            restart_member(house, (victim + 1) % 3)
        },
        writes_go_on: false,
        is_short: false,
    },
    Fault {
        name: "a member of etcd is cut off from the others",
        victim: Victim::EtcdFollower,
        inject: |house, victim| house.servers[victim].close_port(2380).map(|()| None),
        heal: heal_networks,
        writes_go_on: true,
        is_short: true,
    },
    Fault {
        name: "the etcd leader is cut off from the others",
        victim: Victim::EtcdLeader,
        inject: |house, victim| house.servers[victim].close_port(2380).map(|()| None),
        heal: heal_networks,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "a machine is cut off",
        victim: Victim::EtcdFollower,
        inject: |house, victim| house.servers[victim].connect(false).map(|()| None),
        heal: |house, victim| house.servers[victim].connect(true),
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "the machine of the etcd leader is cut off",
        victim: Victim::EtcdLeader,
        inject: |house, victim| house.servers[victim].connect(false).map(|()| None),
        heal: |house, victim| house.servers[victim].connect(true),
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "the machine of the etcd leader hears no other, and is heard",
        victim: Victim::EtcdLeader,
        inject: |house, victim| {
            let others = house.others(victim);
            house.servers[victim].stop_hearing(&others).map(|()| None)
        },
        heal: heal_networks,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "one machine does not hear another, which hears it",
        victim: Victim::EtcdFollower,
        inject: |house, victim| {
            let leader = house.etcd.leader(&house.servers)?;
            let leader = &house.servers[leader];
            house.servers[victim].stop_hearing(&[leader]).map(|()| None)
        },
        heal: heal_networks,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "every machine loses 20 % of its packets",
        victim: Victim::Any,
        inject: |house, _| {
            house
                .servers
                .iter()
                .try_for_each(|server| server.lose_packets(20))?;
            Ok(None)
        },
        heal: heal_networks,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        name: "clocks are an hour apart",
        victim: Victim::Any,
        inject: |house, victim| {
            // One server with its etcd is an hour ahead of another, and that one of the third; so are two members of etcd.
            let (second, hour) = ((victim + 1) % 3, 3600);
            let _clocks = vec![
                ShiftedClock::new(server(house, victim)?, 2 * hour)?,
                ShiftedClock::new(server(house, second)?, hour)?,
                ShiftedClock::new(member(house, victim)?, 2 * hour)?,
                ShiftedClock::new(member(house, second)?, hour)?,
            ];
            Ok(Some(Injury::Shifted { _clocks }))
        },
        heal: nothing_more,
        writes_go_on: true,
        is_short: false,
    },
    Fault {
        // Every fdatasync, which is what a commit waits for, takes 300 ms longer.
        name: "the etcd leader has a slow disk",
        victim: Victim::EtcdLeader,
        inject: |house, victim| {
            let mut strace = Command::new("strace");
            strace
                .args(["-f", "-q", "-e", "trace=fdatasync"])
                .args(["-e", "inject=fdatasync:delay_enter=300ms"])
                .args(["-o", "/dev/null", "-p", &member(house, victim)?.to_string()])
                .stdin(Stdio::null())
                .stderr(Stdio::null());
            let strace = strace.spawn().context("strace: install Debian's strace")?;
            Ok(Some(Injury::Traced(strace)))
        },
        heal: nothing_more,
        writes_go_on: true,
        is_short: false,
    },
];
