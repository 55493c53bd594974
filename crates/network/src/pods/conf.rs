//! The CNI configuration of the node: written when the network stands, which is what the runtime's readiness waits
//! for, and read at a start, to look after the pods of before until the API is there.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use skiff_cni::BridgeConf;

use super::plan::Plan;
use super::{Error, PodNetworkConfig};

const FILE: &str = "10-skiff.conflist";

fn path(config: &PodNetworkConfig) -> PathBuf {
    config.cni_conf_dir.join(FILE)
}

fn plugin(config: &PodNetworkConfig, plan: &Plan) -> Value {
    let mut plugin = json!({
        "type": skiff_cni::PLUGIN_NAME,
        "bridge": config.bridge,
        "subnets": plan.cidrs,
        "dataDir": config.addresses_dir,
        "capabilities": {"portMappings": true},
    });
    if let Some(mtu) = plan.mtu {
        plugin["mtu"] = mtu.into();
    }
    if let Some(socket) = &config.policy_socket {
        plugin["policySocket"] = json!(socket);
    }
    plugin
}

pub(super) fn bridge_conf(config: &PodNetworkConfig, plan: &Plan) -> BridgeConf {
    let mut conf = BridgeConf::new(&config.bridge, plan.cidrs.clone(), &config.addresses_dir);
    conf.name.clone_from(&config.network);
    conf.mtu = plan.mtu;
    conf
}

/// Whether two say the same of the bridge.
pub(super) fn same(a: Option<&BridgeConf>, b: &BridgeConf) -> bool {
    a.is_some_and(|a| (&a.subnets, a.mtu, &a.name) == (&b.subnets, b.mtu, &b.name))
}

/// The bridge of the configuration that is there, if it is ours.
pub(super) fn remembered(config: &PodNetworkConfig) -> Option<BridgeConf> {
    let text = std::fs::read(path(config)).ok()?;
    let list: Value = serde_json::from_slice(&text).ok()?;
    let mut conf: BridgeConf = serde_json::from_value(list["plugins"][0].clone()).ok()?;
    conf.name = list["name"].as_str()?.to_owned();
    (conf.name == config.network && conf.bridge == config.bridge && !conf.subnets.is_empty()).then_some(conf)
}

pub(super) fn write(config: &PodNetworkConfig, plan: &Plan) -> Result<(), Error> {
    let list = json!({
        "cniVersion": "1.0.0",
        "name": config.network,
        "plugins": [plugin(config, plan)],
    })
    .to_string();
    // The runtime's own copy comes last: with it the node is ready.
    for path in std::iter::once(path(config)).chain(config.published.clone()) {
        replace(&path, &list).map_err(Error::io(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// A reader finds the old text or the new one. Runtimes watch the folder, so what is the same is left alone.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    std::fs::create_dir_all(folder)?;
    let beside = folder.join(format!(".{}.tmp", name.to_string_lossy()));
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, path)
}

pub(super) fn remove(config: &PodNetworkConfig) -> Result<(), Error> {
    for path in std::iter::once(path(config)).chain(config.published.clone()) {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", path.display()))(error));
            }
            _ => {}
        }
    }
    Ok(())
}
