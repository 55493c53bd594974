//! CheckpointContainer: has the host's CRIU write the memory and the state of a container's processes, and puts that with
//! the container's changed files into one archive. The container runs on, whatever becomes of the checkpoint. It must
//! not lock the pod's network: a killed CRIU would leave it locked.

mod archive;
mod diff;
mod mounts;

use super::record::{Container, ContainerRecord};
use super::{Daemon, internal};
use crate::cgroup::Cgroup;
use crate::init::spec::{InitSpec, PidNamespace};
use archive::{Destination, Summary};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use skiff_cri::v1 as cri;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::process::Command;
use tonic::Status;

/// Where CRI leaves the choice to the runtime. Less than the kubelet waits, so that it hears why.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(100);
/// What is read of CRIU's log for an error, and how many errors are shown.
const MAX_LOG: u64 = 16 * 1024 * 1024;
const SHOWN_ERRORS: usize = 3;
pub(super) const DUMP_LOG: &str = "dump.log";
const STDERR: &str = "stderr";
const IMAGES: &str = "images";

/// The folder of one checkpoint under way; goes when dropped.
struct Workspace(PathBuf);

impl Workspace {
    fn make(parent: &Path, id: &str) -> io::Result<Workspace> {
        let directory = parent.join(id);
        // Of a checkpoint that a daemon before this one began.
        skiff_fs::remove_tree(&directory)?;
        use std::os::unix::fs::DirBuilderExt;
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(directory.join(IMAGES))?;
        Ok(Workspace(directory))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Err(error) = skiff_fs::remove_tree(&self.0) {
            tracing::warn!(%error, directory = %self.0.display(), "cannot remove the files of a checkpoint");
        }
    }
}

/// The first process of a container. While its handle says that it lives, its pid means no other process.
struct FirstProcess {
    pid: i32,
    handle: OwnedFd,
}

impl FirstProcess {
    fn of(container: &Container, record: &ContainerRecord) -> Result<FirstProcess, Status> {
        let gone = || Status::failed_precondition("the container is not running");
        let pid = container.current().pid;
        let number = Pid::from_raw(pid)
            .filter(|_| container.is_running())
            .ok_or_else(gone)?;
        let handle = pidfd_open(number, PidfdFlags::empty()).map_err(|_| gone())?;
        let cgroup = Cgroup::new(&record.cgroup).map_err(internal("cgroup"))?;
        if !cgroup.processes().contains(&pid) {
            return Err(gone());
        }
        let process = FirstProcess { pid, handle };
        process.must_live()?;
        Ok(process)
    }

    fn must_live(&self) -> Result<(), Status> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut handle = [PollFd::new(&self.handle, PollFlags::IN)];
        // It is readable when the process has ended.
        match poll(&mut handle, Some(&Timespec::default())) {
            Ok(0) => Ok(()),
            _ => Err(Status::failed_precondition(
                "the container ended while its checkpoint was taken",
            )),
        }
    }
}

/// CRIU writes all memory to the disk, and takes no limit.
fn must_fit(directory: &Path, record: &ContainerRecord) -> Result<(), Status> {
    let disk = rustix::fs::statvfs(directory)
        .map_err(|error| internal("look at the checkpoint's disk")(error.into()))?;
    let share = disk.f_bavail.saturating_mul(disk.f_frsize) / archive::DISK_SHARE;
    let cgroup = Cgroup::new(&record.cgroup).map_err(internal("cgroup"))?;
    let used = cgroup
        .memory()
        .map_or(0, |memory| memory.rss.saturating_add(memory.swap));
    match used > share {
        true => Err(Status::failed_precondition(format!(
            "the container has {used} bytes of memory, and a checkpoint may take {share} bytes of the disk"
        ))),
        false => Ok(()),
    }
}

impl Daemon {
    pub(super) async fn checkpoint_container(
        self: &Arc<Self>,
        request: cri::CheckpointContainerRequest,
    ) -> Result<(), Status> {
        let timeout = match u64::try_from(request.timeout) {
            Ok(0) => DEFAULT_TIMEOUT,
            Ok(seconds) => Duration::from_secs(seconds),
            Err(_) => return Err(Status::invalid_argument("the timeout must not be negative")),
        };
        let deadline = Instant::now()
            .checked_add(timeout)
            .ok_or_else(|| Status::invalid_argument("the timeout is too long"))?;
        let container = self.container(&request.container_id)?;
        let record = container.get();
        let specification = super::containers::specification(&container)?;
        if specification.process.terminal {
            return Err(Status::failed_precondition(
                "a container with a terminal (tty: true) has no checkpoint: its other side is not in the container",
            ));
        }
        let destination = Destination::open(Path::new(&request.location))
            .map_err(|error| Status::invalid_argument(format!("{:?}: {error}", request.location)))?;
        let criu = find_program(&self.config.criu).ok_or_else(|| {
            Status::failed_precondition(format!(
                "checkpoints need CRIU, and there is no {} on this node: install the package criu",
                self.config.criu.display()
            ))
        })?;
        // One at a time: each stops a container and writes all its memory to the disk.
        let turn = tokio::time::timeout_at(deadline.into(), self.checkpoints.acquire()).await;
        let _turn = turn
            .map_err(|_| timed_out(timeout, "other checkpoints are being taken"))?
            .map_err(|error| Status::internal(error.to_string()))?;
        let process = FirstProcess::of(&container, &record)?;
        let workspace = Workspace::make(&self.config.checkpoints(), &record.id)
            .map_err(internal("make the checkpoint's directory"))?;
        must_fit(&workspace.0, &record)?;
        dump(&criu, &workspace.0, &process, &specification, deadline, timeout).await?;
        process.must_live()?;

        let summary = Summary::new(&record, &specification, self.sandbox(&record.sandbox_id)?.get());
        let upper = container.directory.join("upper");
        let written = tokio::task::spawn_blocking(move || {
            let images = workspace.0.join(IMAGES);
            let archive = destination.write(&images, &workspace.0, &upper, &summary, deadline)?;
            Ok::<_, io::Error>((archive, destination, workspace))
        });
        let (archive, destination, _workspace) = written
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => timed_out(timeout, "the archive is being written"),
                _ => internal("write the checkpoint's archive")(error),
            })?;
        // The files are those of this container only if it was there all the time.
        process.must_live()?;
        destination
            .publish(&archive)
            .map_err(internal("write the checkpoint's archive"))
    }
}

fn timed_out(timeout: Duration, while_what: &str) -> Status {
    Status::deadline_exceeded(format!(
        "the checkpoint was not complete after {} s: {while_what}",
        timeout.as_secs()
    ))
}

/// A program by its path, or by its name in PATH.
fn find_program(program: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable = |path: &PathBuf| {
        std::fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if program.components().count() > 1 {
        return Some(program.to_owned()).filter(executable);
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|directory| directory.join(program))
        .find(executable)
}

/// Runs `criu dump`. CRIU lets the processes go on when it is done and when it fails; if it is killed, the kernel does, and
/// the code that CRIU has put into a process returns to where that was.
async fn dump(
    criu: &Path,
    directory: &Path,
    process: &FirstProcess,
    specification: &InitSpec,
    deadline: Instant,
    timeout: Duration,
) -> Result<(), Status> {
    let pid = process.pid;
    let mut command = Command::new(criu);
    command
        .args(["dump", "--leave-running", "-v4", "--log-file", DUMP_LOG, "--tree"])
        .arg(pid.to_string())
        .arg("--images-dir")
        .arg(directory.join(IMAGES))
        .arg("--work-dir")
        .arg(directory)
        .arg("--root")
        .arg(format!("/proc/{pid}/root"))
        .args(["--manage-cgroups=ignore", "--network-lock", "skip"])
        .arg("--file-locks");
    let externals = mounts::external(pid, specification)
        .map_err(|error| Status::internal(format!("read the container's mounts: {error}")))?;
    for mount in externals {
        command.arg("--external").arg(format!("mnt[{mount}]:{mount}"));
    }
    // Of the pod and not of the container.
    let joined = [
        ("net", specification.namespaces.net.is_some()),
        (
            "pid",
            matches!(specification.namespaces.pid, PidNamespace::Join(_)),
        ),
    ];
    for (kind, _) in joined.iter().filter(|(_, joined)| *joined) {
        use std::os::unix::fs::MetadataExt;
        let namespace = std::fs::metadata(format!("/proc/{pid}/ns/{kind}"))
            .map_err(internal("read the container's namespaces"))?;
        // COMPAT: the labels of runc.
        let label = if *kind == "net" {
            "extRootNetNS"
        } else {
            "extRootPidNS"
        };
        command
            .arg("--external")
            .arg(format!("{kind}[{}]:{label}", namespace.ino()));
    }
    let stderr =
        std::fs::File::create(directory.join(STDERR)).map_err(internal("make the checkpoint's directory"))?;
    command
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .current_dir(directory)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(stderr)
        .process_group(0)
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(internal("run criu"))?;
    match tokio::time::timeout_at(deadline.into(), child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(Status::unknown(format!(
            "criu dump failed ({status}): {}",
            reason(directory)
        ))),
        Ok(Err(error)) => Err(internal("wait for criu")(error)),
        Err(_) => {
            // With what it started: tar, for files of a tmpfs.
            if let Some(group) = child
                .id()
                .and_then(|id| Pid::from_raw(i32::try_from(id).unwrap_or(0)))
            {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            let _ = child.wait().await;
            Err(timed_out(timeout, "criu was stopped"))
        }
    }
}

/// Why CRIU failed, in its own words, and what to do about it where that is known.
fn reason(directory: &Path) -> String {
    use std::io::Read;
    let mut text = String::new();
    for name in [STDERR, DUMP_LOG] {
        let mut bytes = Vec::new();
        if let Ok(file) = std::fs::File::open(directory.join(name)) {
            let _ = file.take(MAX_LOG).read_to_end(&mut bytes);
        }
        text.push_str(&String::from_utf8_lossy(&bytes));
        text.push('\n');
    }
    describe(&text)
}

fn describe(log: &str) -> String {
    let mut errors = Vec::new();
    for line in log.lines() {
        let Some((_, message)) = line
            .split_once("Error (")
            .and_then(|(_, rest)| rest.split_once("): "))
        else {
            continue;
        };
        // The limit of open files: CRIU goes on without.
        if message.starts_with("rlimit:") || message == "Dumping FAILED." || errors.contains(&message) {
            continue;
        }
        errors.push(message);
        if errors.len() == SHOWN_ERRORS {
            break;
        }
    }
    if errors.is_empty() {
        // Before CRIU has a log it speaks in other forms.
        errors.extend(log.lines().find(|line| !line.trim().is_empty()));
    }
    if errors.is_empty() {
        return "it gave no reason".into();
    }
    let errors = errors.join("; ");
    let hint = if errors.contains("--network-lock") || errors.contains("vDSO area bounds") {
        " (this criu is too old: 3.19 or newer is needed, with Linux 6.13 or newer it is 4.1)"
    } else if errors.contains("--tcp-established") {
        " (as an option in /etc/criu/default.conf: tcp-established)"
    } else {
        ""
    };
    errors + hint
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons() {
        let log = "(00.1) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n\
                   (00.2) Warn  (criu/x.c:1): nothing\n\
                   (00.3) Error (criu/files-reg.c:1790): Can't lookup mount=24 for fd=0 path=/dev/null\n\
                   (00.4) Error (criu/cr-dump.c:2128): Dumping FAILED.\n";
        assert_eq!(describe(log), "Can't lookup mount=24 for fd=0 path=/dev/null");
        assert!(describe("Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds\n").contains("4.1"));
        assert_eq!(describe("\n"), "it gave no reason");
    }

    #[test]
    fn programs() {
        assert!(find_program(Path::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(find_program(Path::new("no-such-program")), None);
        assert_eq!(find_program(Path::new("/etc/passwd")), None);
    }
}
