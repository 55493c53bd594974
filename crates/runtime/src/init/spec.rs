//! What the container's first process is told: plain data, made by the daemon, stored beside the
//! container, and read in the re-executed helper. No CRI or image type appears here.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything needed to turn the helper into the container's first process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InitSpec {
    pub rootfs: Rootfs,
    pub namespaces: Namespaces,
    /// The runtime's own mounts are made first, volumes after them, both in this order.
    pub mounts: Vec<Mount>,
    pub devices: Vec<Device>,
    pub masked_paths: Vec<String>,
    pub readonly_paths: Vec<String>,
    /// The host's directories of the container's cgroup, by name of the mount under /sys/fs/cgroup
    /// (an empty name: the unified hierarchy itself).
    pub cgroup_mounts: Vec<(String, PathBuf)>,
    pub cgroup_readonly: bool,
    pub process: ProcessSpec,
}

/// The root file system: an overlay that exists only in the container's mount namespace, so that it
/// cannot outlive the container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rootfs {
    /// The directory that `lower` is relative to.
    pub layers_dir: PathBuf,
    /// Topmost layer first.
    pub lower: Vec<String>,
    pub upper: PathBuf,
    pub work: PathBuf,
    pub mountpoint: PathBuf,
    pub readonly: bool,
}

/// Which namespaces to join by path; `None` is the host's.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Namespaces {
    pub net: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    pub pid: PidNamespace,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidNamespace {
    #[default]
    New,
    Host,
    /// `/proc/<pid>/ns/pid` of the pod's first process, or of the target container.
    Join(PathBuf),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Mount {
    pub target: String,
    pub kind: MountKind,
    /// Asked for by the pod. The runtime's own mounts come first and follow no link of the image.
    #[serde(default)]
    pub volume: bool,
    pub readonly: bool,
    pub nosuid: bool,
    pub nodev: bool,
    pub noexec: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum MountKind {
    /// A new instance of a file system with its options (`key=value` or flags).
    Filesystem { fstype: String, options: Vec<String> },
    Bind {
        source: PathBuf,
        propagation: Propagation,
        recursive_readonly: bool,
        /// Files that belong to id N of the source belong to id N of the container's user namespace.
        #[serde(default)]
        idmapped: bool,
    },
    /// The files of an image, which nobody can change.
    Image(ImageTree),
    /// The container's own cgroups, made out of `InitSpec::cgroup_mounts`.
    Cgroup,
}

/// An image, or a part of it, that is mounted as a volume.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageTree {
    /// The directory that `lower` is relative to.
    pub layers_dir: PathBuf,
    /// Topmost layer first.
    pub lower: Vec<String>,
    /// An empty directory, and one to mount on.
    pub empty: PathBuf,
    pub mountpoint: PathBuf,
    /// Below the image's root; empty is all of it.
    pub sub_path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    Private,
    HostToContainer,
    Bidirectional,
}

/// A device node in /dev.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Device {
    pub path: String,
    pub block: bool,
    pub major: u32,
    pub minor: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// What is run: for the container's first process and for exec alike.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ProcessSpec {
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    pub user: UserSpec,
    pub capabilities: Capabilities,
    pub no_new_privileges: bool,
    pub oom_score_adj: Option<i32>,
    /// `cgroup.procs` files the process is written to.
    pub cgroup_procs: Vec<PathBuf>,
    /// The compiled seccomp filter, one kernel instruction an element.
    pub seccomp: Option<Vec<u64>>,
    pub terminal: bool,
    /// `None` is the host's.
    #[serde(default)]
    pub user_namespace: Option<UserNamespace>,
}

/// The user namespace of the pod, which all its containers share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespace {
    /// The file that it is bound to.
    pub path: PathBuf,
    /// What the namespace's root is on the host.
    pub root_uid: u32,
    pub root_gid: u32,
}

/// The user as asked for; names are looked up in the container's own /etc/passwd and /etc/group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserSpec {
    /// A number or a name; empty is root.
    pub user: String,
    /// A number or a name; empty is the user's own group (root's where it has none).
    pub group: String,
    pub supplemental_groups: Vec<u32>,
    /// Leave out the groups /etc/group gives the user (supplementalGroupsPolicy: Strict).
    pub strict_groups: bool,
}

/// Capability sets as the kernel's bit masks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    pub bounding: u64,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub ambient: u64,
}

/// What the helper is asked to become.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Task {
    /// The first process of a container.
    Init(Box<InitSpec>),
    /// A further process in the namespaces of the one behind `TARGET_FD`.
    Exec { process: Box<ProcessSpec> },
    /// The process that holds a pod's shared pid namespace and reaps in it.
    Pause {
        cgroup_procs: Vec<PathBuf>,
        /// The user namespace that owns it, by path.
        #[serde(default)]
        user_namespace: Option<PathBuf>,
    },
}

/// What the helper says on its control socket; after `Ready` comes either an end of file (the program
/// runs) or `Failed`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Report {
    Pid(i32),
    /// The terminal's master side rides along as a file descriptor.
    Console,
    Ready {
        uid: u32,
        gid: u32,
        groups: Vec<u32>,
    },
    Failed(String),
}
