//! `up` and `down`: starting the server in the background, and ending it.

use crate::cli::{self, ClusterArgs, DownArgs, ServerArgs};
use crate::cluster::{Cluster, Wishes, name_flag, needs_root};
use crate::progress::{self, Times};
use crate::{cleanup, preflight};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A server that is told to end gets this long before it is killed.
const PATIENCE: Duration = Duration::from_secs(30);
/// Marks a server that was started in the background.
pub const BACKGROUND: &str = "SKIFF_BACKGROUND";

impl ServerArgs {
    pub fn wishes(&self) -> Wishes {
        Wishes {
            data_dir: self.cluster.data_dir.clone(),
            bind: self.bind,
            pod_cidr: self.cluster_cidr.clone(),
            service_cidr: self.service_cluster_ip_range.clone(),
            agent: false,
        }
    }
}

pub fn up(args: &ServerArgs) -> Result<()> {
    preflight::check_root()?;
    if args.audit_log_path.as_deref() == Some(Path::new("-")) {
        bail!("--audit-log-path - needs a standard output, which `skiff server` has and `skiff up` has not");
    }
    let cluster = Cluster::find_or_make(&args.cluster.name, &args.wishes())?;
    cli::refuse_server_flags(&cluster, std::env::args_os())?;
    let began = Instant::now();
    while let Some(pid) = cluster.running()? {
        // One that was killed holds its lock until the kernel has taken it apart.
        if ending(pid) && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        say!("Cluster {:?} is already running (pid {pid}).", cluster.name);
        print_usage(&cluster, args);
        return Ok(());
    }
    say!(
        "Starting cluster {:?} in {}",
        cluster.name,
        cluster.data_dir.display()
    );
    // The same flags again, so that a flag has one definition.
    let flags: Vec<OsString> = std::env::args_os().skip(2).collect();
    start(&cluster, &flags, began, |times| {
        say!("\n{times}\n");
        print_usage(&cluster, args);
    })
}

/// Starts the server process of a cluster in the background, shows its progress since `began`, and calls `done` when it
/// is up.
pub fn start(cluster: &Cluster, flags: &[OsString], began: Instant, done: impl FnOnce(Times)) -> Result<()> {
    let log_path = cluster.log_file();
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path);
    let log = log.with_context(|| format!("cannot write {}", log_path.display()))?;
    let log_start = log.metadata()?.len();
    let before = began.elapsed();
    let mut command = Command::new(std::env::current_exe()?);
    // The parent's own words come first.
    command.arg("server").arg("--report-progress").args(flags);
    if flags.is_empty() {
        command.args(["--name", &cluster.name]);
    }
    let mut server = command
        .env(BACKGROUND, "1")
        .env(cli::CALLED_IN, std::env::current_dir()?)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("cannot start the server")?;
    let reports = server.stdout.take().context("the server has no output")?;
    match progress::show(reports) {
        Ok(Some(times)) => {
            done(times.after(before));
            Ok(())
        }
        Ok(None) => {
            let status = server.wait()?;
            let tail = log_tail(&log_path, log_start).unwrap_or_default();
            bail!(
                "the server ended ({status}) before it was ready:\n{tail}see {}",
                log_path.display()
            )
        }
        Err(message) => {
            // An agent goes on without its cluster; any other server ends.
            if !cluster.agent {
                let _ = server.wait();
            }
            bail!("{message}\n(log: {})", log_path.display())
        }
    }
}

fn print_usage(cluster: &Cluster, args: &ServerArgs) {
    let named = cluster.name_flag();
    if cluster.agent {
        say!("  skiff status{named}");
        say!("  skiff leave{named}");
        return;
    }
    say!("  API server   {}", cluster.endpoint());
    say!("  kubeconfig   {}", cluster.kubeconfig().display());
    if args.no_kubeconfig_merge {
        say!("\n  export KUBECONFIG={}", cluster.kubeconfig().display());
    } else {
        say!("\n  kubectl config use-context {}", cluster.name);
    }
    say!("  kubectl get nodes");
    say!("  skiff status{named}");
    say!("  skiff down{named}");
}

/// The last lines that the server wrote since `from`.
fn log_tail(path: &Path, from: u64) -> Result<String> {
    let mut file = fs::File::open(path)?;
    file.seek(SeekFrom::Start(from))?;
    let mut text = String::new();
    file.take(1 << 20).read_to_string(&mut text)?;
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(15)..]
        .iter()
        .map(|l| format!("  {l}\n"))
        .collect())
}

/// The cluster that a command is about, or a sentence that says how to make it.
pub fn existing(args: &ClusterArgs) -> Result<Cluster> {
    let Some(cluster) = Cluster::find(&args.name)? else {
        bail!(
            "there is no cluster {:?} on this machine; start one with `skiff up{}`",
            args.name,
            name_flag(&args.name)
        );
    };
    if let Some(dir) = &args.data_dir
        && std::path::absolute(dir)? != cluster.data_dir
    {
        bail!(
            "cluster {:?} is in {}, not in {}",
            cluster.name,
            cluster.data_dir.display(),
            dir.display()
        );
    }
    Ok(cluster)
}

/// A client of a running cluster, as its administrator.
pub async fn client(cluster: &Cluster) -> Result<kube::Client> {
    if cluster.agent {
        bail!(
            "this machine is a node and has no administrator's access; run the command where the API server runs"
        );
    }
    let path = cluster.kubeconfig();
    fs::File::open(&path).with_context(|| needs_root(&path))?;
    Ok(skiff_client::remote(&path, None).await?)
}

pub fn down(args: &DownArgs) -> Result<()> {
    preflight::check_root()?;
    let cluster = match Cluster::find(&args.cluster.name)? {
        Some(_) => existing(&args.cluster)?,
        // Gone is what was asked for.
        None if args.delete => {
            say!("There is no cluster {:?}.", args.cluster.name);
            return Ok(());
        }
        None => existing(&args.cluster)?,
    };
    match cluster.running()? {
        Some(pid) => stop(&cluster, pid)?,
        None if !args.delete => say!("Cluster {:?} is not running.", cluster.name),
        None => {}
    }
    if args.delete {
        if cluster.agent {
            say!(
                "The cluster still has the Node of this machine; remove it there with `kubectl delete node`."
            );
        }
        cleanup::delete(&cluster)?;
        say!("Cluster {:?} is deleted.", cluster.name);
        return Ok(());
    }
    // Whoever comes from now on is refused, and does not wait for a server that was stopped.
    let closed = skiff_sockets::close(&cluster.listening_sockets());
    closed.context("cannot close the ports of the ingress proxy")
}

/// Whether a process has ended, or has been killed and will.
fn ending(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    status.map_or(true, |status| is_ending(&status))
}

/// The same of what `/proc/PID/status` says: it is dead, or SIGKILL is on its way.
fn is_ending(status: &str) -> bool {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("", str::trim)
    };
    let killed = |name: &str| {
        let signals = u64::from_str_radix(field(name), 16).unwrap_or(0);
        signals & (1 << (Signal::KILL.as_raw() - 1)) != 0
    };
    field("State:").starts_with(['Z', 'X']) || killed("SigPnd:") || killed("ShdPnd:")
}

pub fn stop(cluster: &Cluster, pid: u32) -> Result<()> {
    let target = Pid::from_raw(i32::try_from(pid)?).context("the pid file holds no process id")?;
    let signal = |signal| match kill_process(target, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot signal process {pid}")),
    };
    signal(Signal::TERM)?;
    let began = Instant::now();
    while cluster.running()? == Some(pid) {
        if began.elapsed() > PATIENCE {
            say!(
                "The server did not end within {} s; killing it.",
                PATIENCE.as_secs()
            );
            signal(Signal::KILL)?;
            while cluster.running()? == Some(pid) {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    say!(
        "Cluster {:?} is stopped ({:.0} ms).",
        cluster.name,
        began.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_killed_is_ending() {
        let check = |status: &str, expected: bool| assert_eq!(is_ending(status), expected, "{status}");
        check(
            "State:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n",
            false,
        );
        check(
            "State:\tD (disk sleep)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n",
            true,
        );
        check(
            "State:\tR (running)\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n",
            true,
        );
        check("State:\tZ (zombie)\n", true);
        check(
            "State:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000004000\n",
            false,
        );
        assert!(!ending(std::process::id()));
    }
}
