//! `skiff-bridge`: skiff's own CNI plugin. Here is the protocol of the plugin side: environment and
//! configuration in, result or error object out. Addresses are `ipam`'s business, devices `bridge`'s.

mod bridge;
mod guard;
mod host_port_rules;
mod host_ports;
mod ipam;
mod policy;
mod subnet;

use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use skiff_meta::net::Cidr;

use crate::result::CniError;
use host_ports::HostPorts;
use subnet::Subnets;

pub use bridge::{ensure_bridge, mac_of, remove_bridge, restore_guards};
pub use policy::{POLICY_IN_FORCE, PolicyRequest};

/// The name the binary must be called by to act as the plugin.
pub const PLUGIN_NAME: &str = "skiff-bridge";

/// Result layouts the plugin can write.
const PLUGIN_VERSIONS: &[&str] = &["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A configuration is small; more than this is not one.
const MAX_CONF: u64 = 1 << 20;

/// The plugin's configuration, as it stands in a `.conflist`.
#[derive(Debug, Clone, Deserialize)]
pub struct BridgeConf {
    #[serde(rename = "cniVersion", default)]
    pub cni_version: String,
    /// The network's name; keeps the allocations of several networks apart.
    #[serde(default)]
    pub name: String,
    /// The bridge device.
    pub bridge: String,
    /// The node's pod networks, at most one of each address family; the first address of each is the gateway's.
    #[serde(default)]
    pub subnets: Vec<Cidr>,
    /// COMPAT: the only network, in configurations that the runtime has kept from an earlier version.
    #[serde(default)]
    subnet: Option<Cidr>,
    /// The largest packet that reaches a pod of any node; the kernel's default without it.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Where allocations are kept.
    #[serde(rename = "dataDir", default = "default_data_dir")]
    pub data_dir: PathBuf,
    /// The socket where the plugin asks for a pod's network policies to be in force; without it there are none.
    #[serde(rename = "policySocket", default)]
    pub policy_socket: Option<PathBuf>,
    #[serde(rename = "prevResult", default)]
    prev_result: Option<Value>,
    #[serde(rename = "runtimeConfig", default)]
    runtime_config: RuntimeConfig,
    #[serde(rename = "cni.dev/valid-attachments", default)]
    valid_attachments: Vec<ValidAttachment>,
}

/// What the runtime says of the sandbox, by the capabilities that the configuration declares.
#[derive(Debug, Clone, Default, Deserialize)]
struct RuntimeConfig {
    #[serde(rename = "portMappings", default)]
    port_mappings: Vec<host_ports::PortMapping>,
}

#[derive(Debug, Clone, Deserialize)]
struct ValidAttachment {
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
}

fn default_data_dir() -> PathBuf {
    "/var/lib/cni/networks".into()
}

impl BridgeConf {
    pub fn new(
        bridge: impl Into<String>,
        subnets: impl Into<Vec<Cidr>>,
        data_dir: impl Into<PathBuf>,
    ) -> BridgeConf {
        BridgeConf {
            cni_version: String::new(),
            name: String::new(),
            bridge: bridge.into(),
            subnets: subnets.into(),
            subnet: None,
            mtu: None,
            data_dir: data_dir.into(),
            policy_socket: None,
            prev_result: None,
            runtime_config: RuntimeConfig::default(),
            valid_attachments: Vec::new(),
        }
    }

    fn networks(&self) -> Vec<Cidr> {
        if self.subnets.is_empty() {
            return self.subnet.into_iter().collect();
        }
        self.subnets.clone()
    }

    fn validate(&self) -> Result<Subnets, CniError> {
        let name_ok = !self.bridge.is_empty()
            && self.bridge.len() <= 15
            && !self
                .bridge
                .contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
        if !name_ok || self.bridge == "." || self.bridge == ".." {
            return Err(CniError::new(
                CniError::INVALID_CONFIG,
                format!(
                    "bridge {:?}: not the name of an interface (1 to 15 characters)",
                    self.bridge
                ),
            ));
        }
        Subnets::new(&self.networks())
    }
}

/// What the runtime passes in the environment.
struct Environment {
    container_id: String,
    netns: PathBuf,
    ifname: String,
}

/// Acts as the plugin and returns its exit code, if that is what this process was started for. Must be
/// called before any thread is started, because ADD moves the process into the sandbox's namespace.
pub fn plugin_main() -> Option<i32> {
    let command = std::env::var("CNI_COMMAND").ok()?;
    let program = std::env::args_os().next()?;
    if Path::new(&program).file_name()? != PLUGIN_NAME {
        return None;
    }
    let mut version = "1.0.0".to_string();
    let (output, code) = match act(&command, &mut version) {
        Ok(output) => (output, 0),
        Err(mut error) => {
            error.cni_version = version;
            (Some(json!(error)), 1)
        }
    };
    if let Some(output) = output {
        println!("{output}");
    }
    Some(code)
}

fn act(command: &str, version: &mut String) -> Result<Option<Value>, CniError> {
    if command == "VERSION" {
        return Ok(Some(
            json!({"cniVersion": "1.1.0", "supportedVersions": PLUGIN_VERSIONS}),
        ));
    }
    let mut input = Vec::new();
    std::io::stdin()
        .take(MAX_CONF)
        .read_to_end(&mut input)
        .map_err(|error| CniError::new(CniError::IO_FAILURE, format!("read the network config: {error}")))?;
    let conf: BridgeConf = serde_json::from_slice(&input)
        .map_err(|error| CniError::new(CniError::DECODING_FAILURE, format!("network config: {error}")))?;
    if !PLUGIN_VERSIONS.contains(&conf.cni_version.as_str()) {
        return Err(CniError::new(
            CniError::INCOMPATIBLE_VERSION,
            format!(
                "incompatible CNI versions; config is {:?}, plugin supports {PLUGIN_VERSIONS:?}",
                conf.cni_version
            ),
        ));
    }
    version.clone_from(&conf.cni_version);
    let subnets = conf.validate()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CniError::new(CniError::IO_FAILURE, format!("start the event loop: {error}")))?;
    let addresses = ipam::Addresses::new(&conf, subnets.clone());
    match command {
        "ADD" => runtime
            .block_on(add(&conf, &subnets, &addresses, &environment(true)?))
            .map(Some),
        "DEL" => runtime
            .block_on(del(&conf, &addresses, &environment(false)?))
            .map(|()| None),
        "CHECK" => runtime
            .block_on(check(&conf, &addresses, &environment(true)?))
            .map(|()| None),
        "GC" => runtime.block_on(gc(&conf, &addresses)).map(|()| None),
        "STATUS" => Ok(None),
        other => Err(CniError::new(
            CniError::INVALID_ENVIRONMENT,
            format!("unknown CNI_COMMAND: {other}"),
        )),
    }
}

fn environment(needs_netns: bool) -> Result<Environment, CniError> {
    let get = |key: &str| std::env::var(key).ok().filter(|value| !value.is_empty());
    let missing = |key: &str| {
        CniError::new(
            CniError::INVALID_ENVIRONMENT,
            format!("required env variable {key} missing"),
        )
    };
    let netns = get("CNI_NETNS");
    if needs_netns && netns.is_none() {
        return Err(missing("CNI_NETNS"));
    }
    let container_id = get("CNI_CONTAINERID").ok_or_else(|| missing("CNI_CONTAINERID"))?;
    let ifname = get("CNI_IFNAME").ok_or_else(|| missing("CNI_IFNAME"))?;
    // Both become parts of file names.
    if !crate::conf::is_identifier(&container_id) || ifname.contains('/') || ifname.len() > 15 {
        return Err(CniError::new(
            CniError::INVALID_ENVIRONMENT,
            "invalid CNI_CONTAINERID or CNI_IFNAME",
        ));
    }
    Ok(Environment {
        container_id,
        netns: netns.unwrap_or_default().into(),
        ifname,
    })
}

/// The nftables table of a network's host ports, in each address family.
pub fn host_ports_table(network: &str) -> String {
    host_ports::table_of(network)
}

/// Makes the rules of host ports anew if they are not what they should be. Returns whether that was so.
pub async fn restore_host_ports(conf: &BridgeConf) -> crate::Result<bool> {
    let invalid = |error: CniError| crate::Error::Invalid(error.to_string());
    HostPorts::new(conf).restore().await.map_err(invalid)
}

/// Closes all host ports of the network.
pub async fn remove_host_ports(conf: &BridgeConf) -> crate::Result<()> {
    let invalid = |error: CniError| crate::Error::Invalid(error.to_string());
    HostPorts::new(conf).remove().await.map_err(invalid)
}

async fn add(
    conf: &BridgeConf,
    subnets: &Subnets,
    addresses: &ipam::Addresses,
    env: &Environment,
) -> Result<Value, CniError> {
    let pod = addresses.allocate(&env.container_id, &env.ifname)?;
    // A pod that is attached can send and be reached: its policies come first.
    if let Some(socket) = &conf.policy_socket
        && let Err(error) = policy::wait_in_force(socket, &pod).await
    {
        let _ = addresses.release(&env.container_id, &env.ifname);
        return Err(error);
    }
    // Before the sandbox is attached, which ends in its namespace. If that fails, DEL closes them.
    open_host_ports(conf, env, &pod).await?;
    let host_ifname = bridge::host_ifname(&conf.name, &env.container_id, &env.ifname);
    let attached = bridge::attach(conf, subnets, &env.netns, &env.ifname, &host_ifname, &pod).await;
    if let Err(error) = attached {
        // The error is the answer; a failing release would only hide it, and DEL comes in any case.
        let _ = addresses.release(&env.container_id, &env.ifname);
        return Err(error);
    }
    let with_version = conf.cni_version.starts_with("0.");
    let (mut ips, mut routes) = (Vec::new(), Vec::new());
    for (address, subnet) in pod.iter().zip(subnets.iter()) {
        let gateway = subnet.gateway();
        let mut ip = json!({
            "address": Cidr::host(*address),
            "gateway": gateway,
            "interface": 2,
        });
        if with_version {
            ip["version"] = if address.is_ipv4() { "4" } else { "6" }.into();
        }
        ips.push(ip);
        let all = if address.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
        routes.push(json!({"dst": all, "gw": gateway}));
    }
    Ok(json!({
        "cniVersion": conf.cni_version,
        "interfaces": [
            {"name": conf.bridge, "mac": bridge::format_mac(mac_of(subnets.first_gateway()))},
            {"name": host_ifname},
            {
                "name": env.ifname,
                "mac": bridge::format_mac(bridge::mac_of_pod(&pod)),
                "sandbox": env.netns.to_string_lossy(),
            },
        ],
        "ips": ips,
        "routes": routes,
    }))
}

async fn open_host_ports(conf: &BridgeConf, env: &Environment, addresses: &[IpAddr]) -> Result<(), CniError> {
    let ports = &conf.runtime_config.port_mappings;
    if ports.is_empty() {
        return Ok(());
    }
    if !Path::new("/proc/sys/net/ipv4/conf").join(&conf.bridge).exists() {
        ensure_bridge(conf)
            .await
            .map_err(|error| CniError::new(CniError::IO_FAILURE, error.to_string()))?;
    }
    HostPorts::new(conf)
        .open(&env.container_id, &env.ifname, addresses, ports)
        .await
}

/// The device goes first: an address must not be given out again while its last owner can still send.
async fn del(conf: &BridgeConf, addresses: &ipam::Addresses, env: &Environment) -> Result<(), CniError> {
    HostPorts::new(conf).close(&env.container_id, &env.ifname).await?;
    let host_ifname = bridge::host_ifname(&conf.name, &env.container_id, &env.ifname);
    let held = addresses.find(&env.container_id, &env.ifname)?;
    bridge::detach(conf, &host_ifname, &held.unwrap_or_default()).await?;
    addresses.release(&env.container_id, &env.ifname)
}

async fn check(conf: &BridgeConf, addresses: &ipam::Addresses, env: &Environment) -> Result<(), CniError> {
    if conf.prev_result.is_none() {
        return Err(CniError::new(
            CniError::INVALID_CONFIG,
            "prevResult is required for CHECK",
        ));
    }
    let pod = addresses.find(&env.container_id, &env.ifname)?.ok_or_else(|| {
        CniError::new(
            CniError::UNKNOWN_CONTAINER,
            format!("container {} has no address", env.container_id),
        )
    })?;
    // In the host's namespace; what follows ends in the sandbox's.
    let ports = &conf.runtime_config.port_mappings;
    HostPorts::new(conf)
        .check(&env.container_id, &env.ifname, ports)
        .await?;
    let host_ifname = bridge::host_ifname(&conf.name, &env.container_id, &env.ifname);
    bridge::check(conf, &env.netns, &env.ifname, &host_ifname, &pod).await
}

async fn gc(conf: &BridgeConf, addresses: &ipam::Addresses) -> Result<(), CniError> {
    let attachments = conf.valid_attachments.iter();
    let valid: Vec<(&str, &str)> = attachments
        .map(|v| (v.container_id.as_str(), v.ifname.as_str()))
        .collect();
    HostPorts::new(conf).retain(&valid).await?;
    for ipam::Held {
        container_id,
        ifname,
        addresses: held,
    } in addresses.held()?
    {
        let valid = conf
            .valid_attachments
            .iter()
            .any(|v| v.container_id == container_id && v.ifname == ifname);
        if !valid {
            let host_ifname = bridge::host_ifname(&conf.name, &container_id, &ifname);
            bridge::detach(conf, &host_ifname, &held).await?;
            addresses.release(&container_id, &ifname)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations() {
        let parse = |extra: Value| -> Result<Subnets, CniError> {
            let mut conf = json!({"cniVersion": "1.0.0", "name": "n", "bridge": "br0"});
            conf.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            serde_json::from_value::<BridgeConf>(conf).unwrap().validate()
        };
        let gateways = |extra: Value| -> Vec<String> {
            let subnets = parse(extra).unwrap();
            subnets.iter().map(|s| s.gateway().to_string()).collect()
        };
        assert_eq!(gateways(json!({"subnet": "10.244.0.0/24"})), ["10.244.0.1"]);
        assert_eq!(
            gateways(json!({"subnets": ["10.244.0.0/24", "fd00::/64"]})),
            ["10.244.0.1", "fd00::1"]
        );
        assert!(parse(json!({})).is_err());
        assert!(parse(json!({"bridge": "a-name-much-too-long", "subnet": "10.0.0.0/24"})).is_err());
    }
}
