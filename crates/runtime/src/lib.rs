//! The embedded container runtime: images, snapshots, sandboxes, containers and the shim, behind CRI.
//! It is used through its CRI socket; the Rust API is for wiring and for the command line. It must not
//! know the Kubernetes API, and several runtimes run side by side on one machine.

mod cgroup;
mod daemon;
mod disk;
pub mod image;
mod init;
mod open_files;
mod seccomp;
mod shim;

pub use daemon::{Error, Runtime, cleanup};
pub use image::ImageStore;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Where a runtime keeps its things. Everything that is global on a machine comes from here, so that
/// several run side by side.
#[derive(Debug, Clone)]
pub struct Config {
    /// Images, snapshots and the state of containers; must survive restarts of the daemon.
    pub root: PathBuf,
    /// Sockets and namespaces; may be empty after a reboot. Keep it short: socket paths have 107 bytes.
    pub run_dir: PathBuf,
    /// The cgroup under which shims live, and pods for which the kubelet names none.
    pub cgroup_parent: String,
    pub cni_conf_dir: PathBuf,
    pub cni_bin_dirs: Vec<PathBuf>,
    /// The binary that is executed again as shim and as container helper; its main must call
    /// [`internal_main`] first.
    pub exe: PathBuf,
    /// Where exec, attach and port-forward are served; loopback, port 0 for any.
    pub stream_bind: SocketAddr,
    /// Never set oom_score_adj below the daemon's own; `None`: found out by CAP_SYS_RESOURCE.
    pub restrict_oom_score_adj: Option<bool>,
    /// Where vendors put the specs of their devices (CDI); the later one wins.
    pub cdi_spec_dirs: Vec<PathBuf>,
    /// CRIU, which takes checkpoints: a path, or a name in PATH.
    pub criu: PathBuf,
    /// Folders with the configuration of registries: `<host>/hosts.toml`. The first that has a registry counts.
    pub registry_config_paths: Vec<PathBuf>,
}

impl Config {
    /// A configuration with all directories below two, and the running binary as helper.
    pub fn new(
        root: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
        cgroup_parent: impl Into<String>,
    ) -> Config {
        let (root, run_dir) = (root.into(), run_dir.into());
        Config {
            cni_conf_dir: root.join("cni/net.d"),
            cni_bin_dirs: vec![root.join("cni/bin"), "/opt/cni/bin".into(), "/usr/lib/cni".into()],
            root,
            run_dir,
            cgroup_parent: cgroup_parent.into(),
            exe: std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into()),
            stream_bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            restrict_oom_score_adj: None,
            cdi_spec_dirs: vec!["/etc/cdi".into(), "/var/run/cdi".into()],
            criu: "criu".into(),
            registry_config_paths: image::DEFAULT_REGISTRY_CONFIG_PATHS.map(PathBuf::from).into(),
        }
    }

    /// The CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("cri.sock")
    }

    /// Where the image store is, for use without a running runtime.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    pub(crate) fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    /// Checkpoints that are being taken; those that are done are elsewhere.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }
}

pub(crate) const INTERNAL_SHIM: &str = "internal-shim";
pub(crate) const INTERNAL_INIT: &str = "internal-init";

/// Lets this process open as many files as it may; shims, and with them containers, keep the limit that was.
pub fn raise_open_files() {
    open_files::raise();
}

/// The first thing the binary's main calls, before any thread: when the arguments (without the
/// program's name) ask for one of the runtime's own processes, becomes it and returns its exit code.
pub fn internal_main(arguments: &[OsString]) -> Option<i32> {
    let (first, rest) = arguments.split_first()?;
    if first == INTERNAL_SHIM || first == INTERNAL_INIT {
        open_files::lower();
    }
    if first == INTERNAL_INIT {
        // The daemon may do without huge pages, and so do shims: one would be most of a shim's memory. That is inherited, and
        // containers shall not.
        let _ = rustix::thread::disable_transparent_huge_pages(false);
    }
    if first == INTERNAL_SHIM {
        Some(shim::main(rest))
    } else if first == INTERNAL_INIT {
        Some(init::main())
    } else {
        None
    }
}
