//! The machine that disks are on: where its devices and its kernel's files are, and how its tools are run. All of it can be another
//! folder, so that tests need no storage network.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// Where a machine keeps such tools, whatever the process' own path is.
const FOLDERS: [&str; 6] = [
    "/sbin",
    "/usr/sbin",
    "/usr/local/sbin",
    "/bin",
    "/usr/bin",
    "/usr/local/bin",
];
/// The most of what a tool says that is read: a storage target may say as much as it likes.
const MAX_OUTPUT: u64 = 64 * 1024;
/// The most of it that a user is shown.
const MAX_SHOWN: usize = 1024;
/// A login gives up by itself after two minutes.
const TIMEOUT: Duration = Duration::from_secs(150);
/// Of tools that read or write a whole disk.
pub const DISK_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long devices are waited for, and how often they are looked for. The first two are upstream's.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub device: Duration,
    pub multipath: Duration,
    pub poll: Duration,
}

#[derive(Debug)]
pub struct Host {
    /// `/dev`.
    pub dev: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// Where tools are looked for, in this order.
    pub folders: Vec<PathBuf>,
    /// Differs after each boot: what was done to the kernel before is gone.
    pub boot: String,
    pub patience: Patience,
}

impl Default for Host {
    fn default() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Host {
            dev: PathBuf::from("/dev"),
            sys: PathBuf::from("/sys"),
            folders: FOLDERS.iter().map(PathBuf::from).collect(),
            boot: boot.trim().to_owned(),
            patience: Patience {
                device: Duration::from_secs(30),
                multipath: Duration::from_secs(10),
                poll: Duration::from_millis(250),
            },
        }
    }
}

/// A tool that did not come to an end.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("this node has no {tool}{}", install(.tool))]
    Missing { tool: String },
    #[error("cannot run {tool}: {error}")]
    Failed { tool: String, error: std::io::Error },
    #[error("{tool} gave no answer within {} s", .limit.as_secs())]
    TimedOut { tool: String, limit: Duration },
}

/// Which package of Debian has the tool.
fn install(tool: &str) -> String {
    let package = match tool {
        "iscsiadm" => "open-iscsi",
        "multipath" => "multipath-tools",
        "mkfs.ext2" | "mkfs.ext3" | "mkfs.ext4" => "e2fsprogs",
        "mkfs.xfs" => "xfsprogs",
        "mkfs.btrfs" => "btrfs-progs",
        "mkfs.vfat" => "dosfstools",
        "mkfs.ntfs" => "ntfs-3g",
        "mkfs.f2fs" => "f2fs-tools",
        "mount" | "losetup" => "mount",
        "blkid" | "blockdev" => "util-linux",
        _ => return String::new(),
    };
    format!(": install {package} (Debian)")
}

/// What a tool that ended has said.
#[derive(Debug)]
pub struct Output {
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn succeeded(&self) -> bool {
        self.code == Some(0)
    }

    /// How it failed, for the user.
    pub fn failure(&self) -> String {
        let said = [self.stdout.trim(), self.stderr.trim()];
        let said: Vec<&str> = said.into_iter().filter(|text| !text.is_empty()).collect();
        let said: String = said.join("\n").chars().take(MAX_SHOWN).collect();
        match self.code {
            Some(code) => format!("exit status {code}, output: {said}"),
            None => format!("ended by a signal, output: {said}"),
        }
    }
}

impl Host {
    pub async fn run(&self, tool: &str, arguments: &[&str]) -> Result<Output, ToolError> {
        self.run_for(TIMEOUT, tool, arguments).await
    }

    /// Where a tool is, if the machine has it.
    pub fn program(&self, tool: &str) -> Option<PathBuf> {
        let mut places = self.folders.iter().map(|folder| folder.join(tool));
        places.find(|place| place.is_file())
    }

    /// Runs a tool to its end. A caller that gives up ends it.
    pub async fn run_for(
        &self,
        limit: Duration,
        tool: &str,
        arguments: &[&str],
    ) -> Result<Output, ToolError> {
        let Some(program) = self.program(tool) else {
            return Err(ToolError::Missing {
                tool: tool.to_owned(),
            });
        };
        let failed = |error| ToolError::Failed {
            tool: tool.to_owned(),
            error,
        };
        let path =
            std::env::join_paths(&self.folders).map_err(|error| failed(std::io::Error::other(error)))?;
        let mut command = Command::new(program);
        command.args(arguments).env("PATH", path).env("LC_ALL", "C");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let finished = async {
            let (stdout, stderr) = tokio::join!(beginning(stdout), beginning(stderr));
            let status = child.wait().await?;
            std::io::Result::Ok(Output {
                code: status.code(),
                stdout,
                stderr,
            })
        };
        match tokio::time::timeout(limit, finished).await {
            Ok(finished) => finished.map_err(failed),
            Err(_) => Err(ToolError::TimedOut {
                tool: tool.to_owned(),
                limit,
            }),
        }
    }

    /// The device that a link leads to; `None` if it is not there, or leads out of the folder of devices.
    pub fn resolve(&self, link: &Path) -> Option<PathBuf> {
        let device = link.canonicalize().ok()?;
        let folder = self.dev.canonicalize().ok()?;
        (device.parent() == Some(folder.as_path())).then_some(device)
    }
}

/// The beginning of what comes through the pipe. The rest is read and dropped, so that the tool is not held up.
async fn beginning(pipe: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let Some(mut pipe) = pipe else {
        return String::new();
    };
    let mut text = Vec::new();
    let _ = (&mut pipe).take(MAX_OUTPUT).read_to_end(&mut text).await;
    let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&text).into_owned()
}

/// Reads a small file of the kernel; `None` if it cannot be read.
pub fn read_small(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(4096).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// The names in a folder, in order; none if there is no such folder.
pub fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn host(folder: &Path) -> Host {
        Host {
            folders: vec![folder.to_path_buf()],
            ..Host::default()
        }
    }

    fn script(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[tokio::test]
    async fn tools_end_and_are_told_of() {
        let dir = tempfile::tempdir().unwrap();
        let host = host(dir.path());
        script(dir.path(), "both", "echo said; echo complained >&2; exit 7");
        let output = host.run("both", &[]).await.unwrap();
        assert_eq!(output.failure(), "exit status 7, output: said\ncomplained");
        assert!(!output.succeeded());
        // A tool that says too much is heard to the end, but not remembered.
        script(
            dir.path(),
            "chatty",
            "i=0; while [ $i -lt 3000 ]; do printf '%0100d' 0; i=$((i+1)); done",
        );
        let output = host.run("chatty", &[]).await.unwrap();
        assert!(output.succeeded());
        assert_eq!(output.stdout.len() as u64, MAX_OUTPUT);
        script(dir.path(), "slow", "exec /bin/sleep 60");
        let slow = host.run_for(Duration::from_millis(100), "slow", &[]).await;
        assert!(matches!(slow, Err(ToolError::TimedOut { .. })), "{slow:?}");
    }

    #[tokio::test]
    async fn missing_tools_are_named_with_their_package() {
        let dir = tempfile::tempdir().unwrap();
        let check = async |tool: &str, expected: &str| {
            let error = host(dir.path()).run(tool, &[]).await.unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check(
            "iscsiadm",
            "this node has no iscsiadm: install open-iscsi (Debian)",
        )
        .await;
        check("mkfs.xfs", "this node has no mkfs.xfs: install xfsprogs (Debian)").await;
        check("mkfs.odd", "this node has no mkfs.odd").await;
    }
}
