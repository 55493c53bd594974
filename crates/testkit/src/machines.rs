//! Machines for tests: network, mount and host-name namespaces of this one, joined by a switch in a namespace of its own.
//! Nothing of it is visible on the host but processes and cgroups, and both go when the values are dropped.
//!
//! Each machine has its own address, host name, `/var/lib/skiff` and `/run/skiff`. Cgroups are the host's, so clusters on
//! different machines need different `--name`s.

use crate::Cluster;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use skiff_client::ServerAddress;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// The interface of a machine towards the switch.
const LINK: &str = "eth0";
/// The machines' network; it exists in their namespaces only.
const NETWORK: [u8; 3] = [172, 31, 77];
/// The switch's own address, so that machines have a default route.
const GATEWAY: u8 = 254;

/// Keeps namespaces alive: a process that sleeps in them.
struct Holder(Child);

impl Holder {
    fn new(namespaces: &[&str]) -> Result<Holder> {
        let mut command = Command::new("unshare");
        command.args(namespaces).args(["sleep", "infinity"]);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("unshare")?;
        let holder = Holder(child);
        // It is in its namespaces as soon as it sleeps.
        crate::eventually("namespaces", Duration::from_secs(20), || {
            let name = std::fs::read_to_string(format!("/proc/{}/comm", holder.pid()))?;
            ensure!(name.trim() == "sleep", "{name}");
            Ok(())
        })?;
        Ok(holder)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A switch that machines are connected to.
pub struct Switch {
    holder: Holder,
    next: AtomicU8,
}

impl Switch {
    pub fn new() -> Result<Arc<Switch>> {
        let holder = Holder::new(&["--net"])?;
        let inside = |args: &str| {
            let mut command = Command::new("nsenter");
            command
                .args(["-t", &holder.pid(), "--net", "ip"])
                .args(args.split(' '));
            run(&mut command)
        };
        let [a, b, c] = NETWORK;
        inside("link add switch type bridge")?;
        inside(&format!("addr add {a}.{b}.{c}.{GATEWAY}/24 dev switch"))?;
        inside("link set switch up")?;
        Ok(Arc::new(Switch {
            holder,
            next: AtomicU8::new(1),
        }))
    }
}

impl Switch {
    /// Its own address on the link, which no machine has.
    pub fn address(&self) -> Ipv4Addr {
        let [a, b, c] = NETWORK;
        Ipv4Addr::new(a, b, c, GATEWAY)
    }

    /// For a thread of a test that is to be on the machines' link and on no machine.
    pub fn network_namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.pid()).into()
    }

    /// A program that is on the machines' link and on no machine.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.holder.pid(), "--net", "--"])
            .arg(program);
        command
    }
}

/// One machine.
pub struct Machine {
    host_name: String,
    address: Ipv4Addr,
    cluster: String,
    binary: PathBuf,
    holder: Holder,
    /// Behind `/var/lib/skiff` and `/run/skiff`.
    files: TempDir,
    switch: Arc<Switch>,
    number: u8,
}

impl Machine {
    /// Connects a new machine. `binary` is the skiff under test; its cluster gets a name that no other test has.
    pub fn new(switch: &Arc<Switch>, host_name: &str, binary: &str) -> Result<Machine> {
        let number = switch.next.fetch_add(1, Ordering::Relaxed);
        ensure!(number < GATEWAY, "the switch has no port left");
        let [a, b, c] = NETWORK;
        let machine = Machine {
            host_name: host_name.to_owned(),
            address: Ipv4Addr::new(a, b, c, number),
            cluster: Cluster::new_name(),
            binary: binary.into(),
            holder: Holder::new(&["--net", "--mount", "--uts"])?,
            files: tempfile::tempdir()?,
            switch: switch.clone(),
            number,
        };
        machine.set_up()?;
        Ok(machine)
    }

    fn set_up(&self) -> Result<()> {
        let port = format!("port{}", self.number);
        let (own, switch) = (self.holder.pid(), self.switch.holder.pid());
        run(Command::new("ip")
            .args(["link", "add", LINK, "netns", &own, "type", "veth"])
            .args(["peer", "name", &port, "netns", &switch]))?;
        run(Command::new("nsenter")
            .args(["-t", &switch, "--net", "ip", "link", "set", &port])
            .args(["master", "switch", "up"]))?;
        for folder in ["/var/lib/skiff", "/run/skiff"] {
            std::fs::create_dir_all(folder)?;
        }
        let (lib, temporary) = (self.files.path().join("lib"), self.files.path().join("run"));
        std::fs::create_dir(&lib)?;
        std::fs::create_dir(&temporary)?;
        let [a, b, c] = NETWORK;
        self.shell(&format!(
            "set -e
             echo {name} > /proc/sys/kernel/hostname
             mount --bind {lib} /var/lib/skiff
             mount --bind {run} /run/skiff
             ip link set lo up
             ip addr add {address}/24 dev {LINK}
             ip link set {LINK} up
             ip route add default via {a}.{b}.{c}.{GATEWAY}",
            name = self.host_name,
            lib = lib.display(),
            run = temporary.display(),
            address = self.address,
        ))
        .map(drop)
    }

    pub fn host_name(&self) -> &str {
        &self.host_name
    }

    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The name of the cluster on this machine.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// A file below this machine's `/var/lib/skiff/NAME`.
    pub fn data(&self, path: &str) -> PathBuf {
        self.files.path().join("lib").join(&self.cluster).join(path)
    }

    /// Everything that skiff left on this machine's disk.
    pub fn left_behind(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for folder in ["lib", "lib/clusters", "run"] {
            for entry in std::fs::read_dir(self.files.path().join(folder))
                .into_iter()
                .flatten()
            {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if !["clusters", ".lock"].contains(&name.as_str()) {
                    found.push(format!("{folder}/{name}"));
                }
            }
        }
        Ok(found)
    }

    /// The network namespace, for a thread of a test that is to speak from this machine.
    pub fn network_namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.pid()).into()
    }

    /// A program on this machine.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.holder.pid(), "--net", "--mount", "--uts", "--"])
            .arg(program);
        command
    }

    pub fn shell(&self, script: &str) -> Result<String> {
        run(self.command("sh").args(["-c", script]))
    }

    /// A skiff command about the cluster of this machine; what it printed.
    pub fn skiff(&self, args: &[&str]) -> Result<String> {
        run(self
            .command(&self.binary)
            .args(args)
            .args(["--name", &self.cluster]))
    }

    /// The same where a failure is expected: everything it printed.
    pub fn skiff_fails(&self, args: &[&str]) -> Result<String> {
        let mut command = self.command(&self.binary);
        let output = command.args(args).args(["--name", &self.cluster]).output()?;
        ensure!(
            !output.status.success(),
            "{command:?} succeeded: {}",
            text(&output)
        );
        Ok(text(&output))
    }

    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.skiff(&["status", "-o", "json"])?)?)
    }

    /// The process of the server or the agent.
    pub fn pid(&self) -> Result<i32> {
        let pid = self.status()?["pid"].as_i64().context("it is not running")?;
        Ok(i32::try_from(pid)?)
    }

    /// Where others reach the API server of this machine.
    pub fn api_server(&self) -> Result<ServerAddress> {
        let state: Value = serde_json::from_slice(&std::fs::read(self.data("server.json"))?)?;
        let port = state["settings"]["port"].as_u64().context("a port")?;
        Ok(format!("https://{}:{port}", self.address).parse()?)
    }

    /// What the administrator of the server on this machine speaks TLS with.
    pub fn admin_tls(&self) -> Result<rustls::ClientConfig> {
        let read = |name: &str| std::fs::read_to_string(self.data("pki").join(name));
        let admin = skiff_pki::Identity {
            certificate: read("admin.crt")?,
            key: read("admin.key")?,
        };
        Ok(skiff_pki::api_client_config(&read("ca.crt")?, Some(&admin))?)
    }

    /// The real kubectl with the administrator's kubeconfig of this machine.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        run(&mut self.kubectl_command(args))
    }

    pub fn kubectl_command(&self, args: &[&str]) -> Command {
        let kubectl = std::env::var_os("SKIFF_TEST_KUBECTL").unwrap_or_else(|| "kubectl".into());
        let mut command = self.command(kubectl);
        command
            .arg("--kubeconfig")
            .arg(format!("/var/lib/skiff/{}/admin.kubeconfig", self.cluster))
            .arg("--cache-dir")
            .arg(self.files.path().join("kubectl"))
            .args(args);
        command
    }

    pub fn kubectl_json(&self, args: &[&str]) -> Result<Value> {
        let args: Vec<&str> = args.iter().copied().chain(["-o", "json"]).collect();
        Ok(serde_json::from_str(&self.kubectl(&args)?)?)
    }

    /// kubectl with something on its standard input, such as `["apply", "-f", "-"]`.
    pub fn kubectl_feed(&self, args: &[&str], input: &str) -> Result<String> {
        let mut child = self
            .kubectl_command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("stdin")?.write_all(input.as_bytes())?;
        checked(&format!("kubectl {args:?}"), &child.wait_with_output()?)
    }

    /// Pulls the cable, or puts it back. A machine that is cut off still reaches itself.
    pub fn connect(&self, on: bool) -> Result<()> {
        let (port, switch) = (format!("port{}", self.number), self.switch.holder.pid());
        let state = if on { "up" } else { "down" };
        run(Command::new("nsenter").args(["-t", &switch, "--net", "ip", "link", "set", &port, state]))
            .map(drop)
    }

    /// Packets from these machines no longer arrive here; what this one sends still leaves.
    pub fn stop_hearing(&self, others: &[&Machine]) -> Result<()> {
        for other in others {
            self.drop_packets(&format!("ip saddr {}", other.address))?;
        }
        Ok(())
    }

    /// TCP of this port neither arrives nor leaves, except on this machine itself.
    pub fn close_port(&self, port: u16) -> Result<()> {
        self.drop_packets(&format!("iifname {LINK} tcp dport {port}"))?;
        self.drop_packets(&format!("iifname {LINK} tcp sport {port}"))
    }

    /// So many of a hundred packets get lost on their way to this machine.
    pub fn lose_packets(&self, percent: u8) -> Result<()> {
        self.drop_packets(&format!("iifname {LINK} numgen random mod 100 < {percent}"))
    }

    fn drop_packets(&self, matching: &str) -> Result<()> {
        self.shell(&format!(
            "set -e
             nft add table inet faults
             nft 'add chain inet faults input {{ type filter hook input priority -400; }}'
             nft 'add rule inet faults input {matching} drop'"
        ))
        .map(drop)
    }

    /// Undoes all of these.
    pub fn heal_network(&self) -> Result<()> {
        self.shell("nft add table inet faults; nft delete table inet faults")
            .map(drop)
    }

    /// The processes in this machine's mount namespace, which are all that were started here.
    fn processes(&self) -> Vec<i32> {
        let namespace = |pid: &str| std::fs::metadata(format!("/proc/{pid}/ns/mnt")).map(|found| found.ino());
        let Ok(own) = namespace(&self.holder.pid()) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_holder = name == self.holder.pid();
            if let (false, Ok(pid)) = (is_holder, name.parse())
                && namespace(&name).is_ok_and(|theirs| theirs == own)
            {
                found.push(pid);
            }
        }
        found
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.data("skiff.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(60)..].join("\n");
            eprintln!("--- the end of skiff.log on {}\n{tail}", self.host_name);
        }
        let removed = self.skiff(&["down", "--delete"]);
        for pid in self.processes() {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        if let Err(error) = removed {
            if std::thread::panicking() {
                eprintln!("{error:#}");
            } else {
                panic!("the machine {} cannot be cleaned: {error:#}", self.host_name);
            }
        }
    }
}

fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    checked(&format!("{command:?}"), &output)
}

fn checked(what: &str, output: &Output) -> Result<String> {
    if !output.status.success() {
        bail!("{what}: {}\n{}", output.status, text(output));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}
