//! A cluster for one test, made by `skiff up` and removed by `skiff down --delete`.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tempfile::TempDir;

static COUNTER: AtomicU32 = AtomicU32::new(0);

pub struct Cluster {
    binary: PathBuf,
    name: String,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    kubeconfig: PathBuf,
    /// What kubectl remembers of the API.
    cache: Arc<TempDir>,
}

impl Cluster {
    /// A name that no other test has.
    pub fn new_name() -> String {
        format!(
            "t{}-{}",
            std::process::id(),
            COUNTER.fetch_add(1, Ordering::Relaxed)
        )
    }

    /// Where a cluster of this name keeps its files.
    pub fn data_dir(name: &str) -> PathBuf {
        Path::new("/var/lib/skiff").join(name)
    }

    /// Starts a cluster. `binary` is the skiff under test.
    pub fn start(binary: &str, flags: &[&str]) -> Result<Self> {
        Self::start_named(binary, Self::new_name(), flags)
    }

    pub fn start_named(binary: &str, name: String, flags: &[&str]) -> Result<Self> {
        Self::start_in(binary, name, flags, &[])
    }

    /// Starts a cluster with more variables in its environment.
    pub fn start_in(
        binary: &str,
        name: String,
        flags: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let flags = flags.iter().map(|f| (*f).to_owned()).collect();
        let mut cluster = Self {
            binary: binary.into(),
            name,
            flags,
            environment: environment
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            kubeconfig: PathBuf::new(),
            cache: Arc::new(tempfile::tempdir()?),
        };
        let shown = cluster.up()?;
        cluster.kubeconfig = cluster.status()?["kubeconfig"].as_str().context(shown)?.into();
        Ok(cluster)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// `skiff up` with the flags of this cluster; what it printed.
    pub fn up(&self) -> Result<String> {
        let mut command = Command::new(&self.binary);
        command
            .args(["up", "--name", &self.name, "--no-kubeconfig-merge"])
            .args(&self.flags)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        run(&mut command)
    }

    /// Another skiff command about this cluster, such as `["status"]`.
    pub fn skiff(&self, args: &[&str]) -> Result<String> {
        run(Command::new(&self.binary)
            .args(args)
            .args(["--name", &self.name])
            .envs(self.environment.iter().map(|(name, value)| (name, value))))
    }

    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.skiff(&["status", "-o", "json"])?)?)
    }

    pub fn pid(&self) -> Result<u32> {
        let pid = self.status()?["pid"]
            .as_u64()
            .context("the cluster is not running")?;
        Ok(u32::try_from(pid)?)
    }

    pub fn import(&self, archive: &Path) -> Result<()> {
        run(Command::new(&self.binary)
            .args(["image", "--name", &self.name, "import"])
            .arg(archive))
        .map(|_| ())
    }

    pub fn kubectl(&self) -> Kubectl {
        Kubectl {
            kubeconfig: self.kubeconfig.clone(),
            cache: Arc::clone(&self.cache),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = Self::data_dir(&self.name).join("skiff.log");
            if let Ok(text) = std::fs::read_to_string(&log) {
                let lines: Vec<&str> = text.lines().collect();
                eprintln!(
                    "--- the end of {}\n{}",
                    log.display(),
                    lines[lines.len().saturating_sub(60)..].join("\n")
                );
            }
        }
        let data_dir = Self::data_dir(&self.name);
        match self.skiff(&["down", "--delete"]) {
            // Nothing that skiff makes may be forgotten by the list of what it removes.
            Ok(said) if !std::thread::panicking() => {
                assert!(!data_dir.exists(), "{} is left: {said}", data_dir.display());
            }
            Ok(_) => {}
            Err(error) if std::thread::panicking() => eprintln!("{error:#}"),
            Err(error) => panic!("the cluster cannot be removed: {error:#}"),
        }
    }
}

/// The real kubectl, pointed at one cluster.
#[derive(Clone)]
pub struct Kubectl {
    kubeconfig: PathBuf,
    cache: Arc<TempDir>,
}

impl Kubectl {
    pub fn command(&self, args: &[&str]) -> Command {
        let kubectl = std::env::var_os("SKIFF_TEST_KUBECTL").unwrap_or_else(|| "kubectl".into());
        let mut command = Command::new(kubectl);
        // A cache of its own: clusters come and go on the same address.
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--cache-dir")
            .arg(self.cache.path());
        command.args(args);
        command
    }

    /// Runs kubectl and returns its standard output; a failure has its standard error.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        run(&mut self.command(args))
    }

    /// Runs kubectl where a failure is expected: the exit code and everything it printed.
    pub fn try_run(&self, args: &[&str]) -> Result<(i32, String)> {
        let output = self
            .command(args)
            .stdin(Stdio::null())
            .output()
            .context("kubectl")?;
        Ok((output.status.code().unwrap_or(-1), text(&output)))
    }

    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let args: Vec<&str> = args.iter().copied().chain(["-o", "json"]).collect();
        Ok(serde_json::from_str(&self.run(&args)?)?)
    }

    /// `kubectl apply -f -`
    pub fn apply(&self, manifest: &str) -> Result<String> {
        self.feed(&["apply", "-f", "-"], manifest)
    }

    /// `kubectl create -f -`; the answer as JSON.
    pub fn create(&self, manifest: &str) -> Result<String> {
        self.feed(&["create", "-o", "json", "-f", "-"], manifest)
    }

    fn feed(&self, args: &[&str], manifest: &str) -> Result<String> {
        let mut command = self.command(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("kubectl")?;
        child
            .stdin
            .take()
            .context("stdin")?
            .write_all(manifest.as_bytes())?;
        checked(&format!("kubectl {args:?}"), &child.wait_with_output()?)
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
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
