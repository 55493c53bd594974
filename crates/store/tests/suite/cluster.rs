//! A real etcd for tests, of one member or several, gone when the test is.

#![allow(clippy::unwrap_used, dead_code)]

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use skiff_store::etcd::Options;
use skiff_store::{Error, Etcd};

/// Members of one etcd cluster on free loopback ports. They are killed when this is dropped.
pub struct Cluster {
    dir: tempfile::TempDir,
    pub members: Vec<Member>,
    tls: Option<Tls>,
}

pub struct Member {
    pub client: u16,
    peer: u16,
    child: Option<Child>,
}

pub struct Tls {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Another version of etcd than the machine's can be tested with: older ones are followed in another way.
fn binary() -> std::ffi::OsString {
    std::env::var_os("SKIFF_TEST_ETCD").unwrap_or_else(|| "etcd".into())
}

/// Such as `3.4.23`.
pub fn etcd_version() -> String {
    let told = Command::new(binary()).arg("--version").output().unwrap();
    let text = String::from_utf8(told.stdout).unwrap();
    let version = text.lines().find_map(|line| line.strip_prefix("etcd Version: "));
    version.unwrap().trim().to_owned()
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

impl Cluster {
    pub fn new(members: usize, tls: Option<Tls>) -> Cluster {
        let members = (0..members).map(|_| Member {
            client: free_port(),
            peer: free_port(),
            child: None,
        });
        let mut cluster = Cluster {
            dir: tempfile::tempdir().unwrap(),
            members: members.collect(),
            tls,
        };
        for at in 0..cluster.members.len() {
            cluster.start(at);
        }
        cluster
    }

    pub fn start(&mut self, at: usize) {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let peers: Vec<String> = self
            .members
            .iter()
            .enumerate()
            .map(|(n, member)| format!("m{n}=http://127.0.0.1:{}", member.peer))
            .collect();
        let member = &self.members[at];
        let client = format!("{scheme}://127.0.0.1:{}", member.client);
        let peer = format!("http://127.0.0.1:{}", member.peer);
        let mut command = Command::new(binary());
        command
            .arg(format!("--name=m{at}"))
            .arg(format!(
                "--data-dir={}",
                self.dir.path().join(format!("m{at}")).display()
            ))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster={}", peers.join(",")))
            .args(["--initial-cluster-state=new", "--log-level=error"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(tls) = &self.tls {
            command
                .arg(format!("--trusted-ca-file={}", tls.ca.display()))
                .arg(format!("--cert-file={}", tls.cert.display()))
                .arg(format!("--key-file={}", tls.key.display()))
                .arg("--client-cert-auth");
        }
        let child = command
            .spawn()
            .expect("cannot run etcd: install the package etcd-server");
        self.members[at].child = Some(child);
    }

    pub fn kill(&mut self, at: usize) {
        let mut child = self.members[at].child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends a signal: a member that got `STOP` is silent until `CONT`.
    pub fn signal(&self, at: usize, signal: &str) {
        let pid = self.members[at].child.as_ref().unwrap().id();
        let sent = Command::new("kill")
            .args([format!("-{signal}"), pid.to_string()])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Where a member that does not run has its data.
    pub fn data(&self, at: usize) -> PathBuf {
        self.dir.path().join(format!("m{at}"))
    }

    pub fn options(&self) -> Options {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoints = self
            .members
            .iter()
            .map(|member| format!("{scheme}://127.0.0.1:{}", member.client));
        let mut options = Options::new(endpoints);
        if let Some(tls) = &self.tls {
            options.ca_file = Some(tls.ca.clone());
            options.cert_file = Some(tls.cert.clone());
            options.key_file = Some(tls.key.clone());
        }
        options
    }

    /// A store on it, as soon as the cluster answers.
    pub async fn open(&self) -> Etcd {
        open(self.options()).await
    }
}

async fn open(options: Options) -> Etcd {
    until(async || Etcd::open(options.clone()).await).await
}

/// Tries until etcd is there; up to a minute, for a slow machine.
pub async fn until<T>(mut attempt: impl AsyncFnMut() -> Result<T, Error>) -> T {
    let mut tries = 0;
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(Error::Unavailable(why)) if tries > 600 => panic!("etcd does not answer: {why}"),
            Err(Error::Unavailable(_)) => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}
