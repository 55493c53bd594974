//! Real programs beside skiff: etcd, containerd, a registry. Each runs in a temporary folder on free ports and
//! is killed, by its process id, when dropped.

use crate::{Machine, eventually};
use anyhow::{Context, Result, bail};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(20);

/// A port that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A child process that ends with its value.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(program: &str, package: &str, command: &mut Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn();
        Ok(Self(child.with_context(|| {
            format!("{program}: install Debian's {package}")
        })?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A real etcd with one member.
pub struct Etcd {
    process: Option<Process>,
    dir: TempDir,
    client: String,
    peer: String,
}

impl Etcd {
    pub fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let client = format!("http://127.0.0.1:{}", free_port()?);
        let peer = format!("http://127.0.0.1:{}", free_port()?);
        let mut etcd = Self {
            process: None,
            dir,
            client,
            peer,
        };
        etcd.restart()?;
        Ok(etcd)
    }

    pub fn endpoint(&self) -> &str {
        &self.client
    }

    /// Ends it at once, as `kill -9` does.
    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn restart(&mut self) -> Result<()> {
        self.process = None;
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(self.dir.path().join("data"))
            .args([
                "--listen-client-urls",
                &self.client,
                "--advertise-client-urls",
                &self.client,
            ])
            .args([
                "--listen-peer-urls",
                &self.peer,
                "--initial-advertise-peer-urls",
                &self.peer,
            ])
            .args(["--initial-cluster", &format!("default={}", self.peer)])
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.dir.path().join("etcd.log"))?);
        self.process = Some(Process::start("etcd", "etcd-server", &mut command)?);
        let address = self.client.trim_start_matches("http://").to_owned();
        eventually("etcd listens", PATIENCE, || {
            Ok(TcpStream::connect(&address).map(|_| ())?)
        })
    }
}

/// A real etcd with a member on each of some machines, reached by their addresses.
pub struct EtcdMembers {
    /// In the order of the machines; `None`: it was killed.
    processes: Mutex<Vec<Option<Process>>>,
    dir: TempDir,
    endpoints: Vec<String>,
    /// As `--initial-cluster` takes them.
    members: String,
}

impl EtcdMembers {
    pub fn start(machines: &[Machine]) -> Result<Self> {
        let members: Vec<String> = machines
            .iter()
            .map(|machine| format!("{}={}", machine.host_name(), member_url(machine, 2380)))
            .collect();
        let etcd = Self {
            processes: Mutex::new(machines.iter().map(|_| None).collect()),
            dir: tempfile::tempdir()?,
            endpoints: machines.iter().map(|machine| member_url(machine, 2379)).collect(),
            members: members.join(","),
        };
        for (member, machine) in machines.iter().enumerate() {
            etcd.restart(member, machine)?;
        }
        if let Some(machine) = machines.first() {
            eventually("etcd has a leader", PATIENCE, || {
                machine
                    .shell(&format!("curl -sf {}/health", etcd.endpoints[0]))
                    .map(drop)
            })?;
        }
        Ok(etcd)
    }

    /// Starts a member, again if it was killed, with the data that it has.
    pub fn restart(&self, member: usize, machine: &Machine) -> Result<()> {
        let (name, dir) = (machine.host_name(), self.dir.path());
        let (client, peer) = (member_url(machine, 2379), member_url(machine, 2380));
        let log = dir.join(format!("{name}.log"));
        let log = fs::File::options().append(true).create(true).open(log)?;
        let mut command = machine.command("etcd");
        command
            .args(["--name", name, "--initial-cluster", &self.members])
            .arg("--data-dir")
            .arg(dir.join(name))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .stdout(Stdio::null())
            .stderr(log);
        let process = Process::start("etcd", "etcd-server", &mut command)?;
        self.processes()[member] = Some(process);
        Ok(())
    }

    fn processes(&self) -> MutexGuard<'_, Vec<Option<Process>>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a member at once, as `kill -9` does.
    pub fn kill(&self, member: usize) {
        self.processes()[member] = None;
    }

    /// The process of a member; none while it is killed.
    pub fn pid(&self, member: usize) -> Option<u32> {
        self.processes()[member].as_ref().map(|process| process.0.id())
    }

    /// Which member leads, as the members say that answer on their own machines.
    pub fn leader(&self, machines: &[Machine]) -> Result<usize> {
        let says = |member: usize| -> Result<bool> {
            let url = &self.endpoints[member];
            let status = machines[member].shell(&format!(
                "curl -s -m 1 -X POST -d '{{}}' {url}/v3/maintenance/status"
            ))?;
            let status: serde_json::Value = serde_json::from_str(&status)?;
            let leader = status["leader"].as_str().filter(|leader| *leader != "0");
            Ok(leader.is_some() && leader == status["header"]["member_id"].as_str())
        };
        eventually("a member leads", PATIENCE, || {
            let found = (0..machines.len()).find(|member| says(*member).unwrap_or_default());
            found.context("none does")
        })
    }

    /// As `--etcd-servers` takes them.
    pub fn endpoints(&self) -> String {
        self.endpoints.join(",")
    }
}

/// A port of a member.
fn member_url(machine: &Machine, port: u16) -> String {
    format!("http://{}:{port}", machine.address())
}

/// Debian's containerd with its own state, sockets and CNI configuration.
pub struct Containerd {
    _process: Process,
    dir: TempDir,
}

impl Containerd {
    pub fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        // One folder of plugins, with Debian's loopback, which containerd needs itself.
        let cni_bin_dir = dir.path().join("cni");
        fs::create_dir(&cni_bin_dir)?;
        symlink("/usr/lib/cni/loopback", cni_bin_dir.join("loopback"))?;
        let at = |name: &str| dir.path().join(name).display().to_string();
        // CAP_SYS_RESOURCE may be missing: then oom_score_adj can only be raised.
        let config = format!(
            r#"version = 2
root = "{root}"
state = "{state}"
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{pause}"
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{bin}"
    conf_dir = "{conf}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"#,
            pause = crate::PAUSE,
            bin = at("cni"),
            conf = at("net.d"),
            root = at("root"),
            state = at("state"),
            socket = at("containerd.sock"),
        );
        fs::write(dir.path().join("config.toml"), config)?;
        let mut command = Command::new("containerd");
        command
            .arg("--config")
            .arg(dir.path().join("config.toml"))
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("containerd.log"))?);
        let process = Process::start("containerd", "containerd", &mut command)?;
        let containerd = Self {
            _process: process,
            dir,
        };
        let socket = containerd.socket();
        eventually("containerd listens", PATIENCE, || {
            Ok(UnixStream::connect(&socket).map(|_| ())?)
        })?;
        Ok(containerd)
    }

    /// With every image that the suites need.
    pub fn with_images(skiff: &str) -> Result<Self> {
        let containerd = Self::start()?;
        let dir = tempfile::tempdir()?;
        let demo = dir.path().join("demo.tar");
        let saved = Command::new(skiff)
            .args(["image", "save-demo"])
            .arg(&demo)
            .stdout(Stdio::null())
            .status()?;
        if !saved.success() {
            bail!("the demo image cannot be saved");
        }
        for archive in [
            crate::busybox_archive(dir.path())?,
            crate::pause_archive(dir.path())?,
            demo,
        ] {
            containerd.ctr(&["image", "import", &archive.display().to_string()])?;
        }
        Ok(containerd)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("containerd.sock")
    }

    /// What of a pod network is in containerd's folders.
    pub fn network_files(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for folder in ["cni", "net.d"] {
            for entry in fs::read_dir(self.dir.path().join(folder)).into_iter().flatten() {
                names.push(entry?.file_name().to_string_lossy().into_owned());
            }
        }
        names.retain(|name| name != "loopback");
        names.sort();
        Ok(names)
    }

    /// What `--container-runtime-endpoint` takes.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("containerd.log")).unwrap_or_default()
    }

    /// `ctr -n k8s.io …`
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        let output = Command::new("ctr")
            .arg("--address")
            .arg(self.socket())
            .args(["--namespace", "k8s.io"])
            .args(args)
            .output()
            .context("ctr: install Debian's containerd")?;
        if !output.status.success() {
            bail!("ctr {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Debian's docker-registry on loopback.
pub struct Registry {
    _process: Process,
    _dir: TempDir,
    address: String,
}

impl Registry {
    pub fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let address = format!("127.0.0.1:{}", free_port()?);
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\nhttp: {{addr: '{address}'}}\n",
            dir.path().join("data").display()
        );
        let path = dir.path().join("config.yml");
        fs::write(&path, config)?;
        let mut command = Command::new("docker-registry");
        command
            .arg("serve")
            .arg(&path)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = Process::start("docker-registry", "docker-registry", &mut command)?;
        eventually("the registry listens", PATIENCE, || {
            Ok(TcpStream::connect(&address).map(|_| ())?)
        })?;
        Ok(Self {
            _process: process,
            _dir: dir,
            address,
        })
    }

    /// `host:port`, the first part of its images' names.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Pushes a docker archive under `name`; returns the full reference.
    pub fn push(&self, archive: &std::path::Path, name: &str) -> Result<String> {
        let reference = format!("{}/{name}", self.address);
        let output = Command::new("skopeo")
            .args(["copy", "--insecure-policy", "--dest-tls-verify=false"])
            .arg(format!("docker-archive:{}", archive.display()))
            .arg(format!("docker://{reference}"))
            .output()
            .context("skopeo: install Debian's skopeo")?;
        if !output.status.success() {
            bail!("skopeo: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(reference)
    }
}
