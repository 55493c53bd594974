//! The Container Network Interface, both of its sides: [`Network`] runs whatever plugins a
//! configuration names, as processes, by the CNI protocol (spec 0.2 to 1.1); [`plugin_main`] is skiff's
//! own plugin, `skiff-bridge`.
//!
//! The two sides meet in the protocol only: `Network` must never know that a plugin is ours.

mod cache;
mod conf;
mod invoke;
mod plugin;
mod result;

pub use conf::{Network, SUPPORTED_VERSIONS};
pub use invoke::{Attachment, PodArgs};
pub use plugin::{
    BridgeConf, PLUGIN_NAME, POLICY_IN_FORCE, PolicyRequest, ensure_bridge, host_ports_table, mac_of,
    plugin_main, remove_bridge, remove_host_ports, restore_guards, restore_host_ports,
};
pub use result::{AddResult, CniError, Dns, Interface, IpConfig, Route};

/// What can go wrong between the runtime and a network.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no network config found in {0}: cni plugin not initialized")]
    NoConfig(std::path::PathBuf),
    #[error("network config {path}: {reason}")]
    Config {
        path: std::path::PathBuf,
        reason: String,
    },
    #[error("{0}")]
    Invalid(String),
    #[error("failed to find plugin {plugin:?} in path {path:?}")]
    PluginNotFound {
        plugin: String,
        path: Vec<std::path::PathBuf>,
    },
    #[error("plugin type={plugin:?} failed ({command}): {error}")]
    Plugin {
        plugin: String,
        command: &'static str,
        error: CniError,
    },
    #[error("plugin type={plugin:?} ({command}): {source}")]
    Exec {
        plugin: String,
        command: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("netlink: {0}")]
    Netlink(#[from] nlink::Error),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}

pub type Result<T> = std::result::Result<T, Error>;
