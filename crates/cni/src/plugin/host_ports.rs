//! Host ports: a port of the node that leads to a port of a sandbox, by nftables. The capability `portMappings`.
//!
//! Each sandbox with such ports has a file; the rules are made of all files, in one transaction, in a table that is
//! named after the network and has nothing else in it. So the rules can be restored whenever somebody flushed them.
//! The table must not know services: what is a node port is another table's business, which comes first.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use nlink::netlink::netfilter::{ConntrackFilter, IpProtocol};
use nlink::netlink::nftables::{Family, NFT_MSG_NEWTABLE, RawMessage};
use nlink::netlink::{Connection, Netfilter, Nftables};
use serde::{Deserialize, Serialize};

use super::{BridgeConf, host_port_rules as rules};
use crate::result::CniError;

const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;

const FAMILIES: [Family; 2] = [Family::Ip, Family::Ip6];

/// One entry of `portMappings`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PortMapping {
    host_port: u16,
    container_port: u16,
    #[serde(default = "tcp")]
    protocol: String,
    /// Empty, or an address of zeroes: every address of the node.
    #[serde(default, rename = "hostIP")]
    host_ip: String,
}

fn tcp() -> String {
    "tcp".to_owned()
}

impl PortMapping {
    fn protocol(&self) -> Option<u8> {
        match self.protocol.to_ascii_lowercase().as_str() {
            "tcp" => Some(6),
            "udp" => Some(17),
            "sctp" => Some(132),
            _ => None,
        }
    }

    /// The address of the node that the port is open on; `None` is every one. COMPAT: an address of zeroes is every
    /// address of its own family only.
    fn address(&self, family: Family) -> Result<Option<IpAddr>, NotHere> {
        if self.host_ip.is_empty() {
            return Ok(None);
        }
        match self.host_ip.parse::<IpAddr>() {
            Ok(address) if family_of(address) != family => Err(NotHere),
            Ok(address) if address.is_unspecified() => Ok(None),
            Ok(address) => Ok(Some(address)),
            Err(_) => Err(NotHere),
        }
    }

    fn check(&self) -> Result<(), CniError> {
        let invalid = |what: String| Err(CniError::new(CniError::INVALID_CONFIG, what));
        if self.host_port == 0 || self.container_port == 0 {
            return invalid("portMappings: a port must be from 1 to 65535".into());
        }
        if self.protocol().is_none() {
            return invalid(format!("portMappings: unknown protocol {:?}", self.protocol));
        }
        if !self.host_ip.is_empty() && self.host_ip.parse::<IpAddr>().is_err() {
            return invalid(format!(
                "portMappings: hostIP {:?} is not an address",
                self.host_ip
            ));
        }
        Ok(())
    }
}

/// The mapping is not for this family.
struct NotHere;

fn family_of(address: IpAddr) -> Family {
    if address.is_ipv4() {
        Family::Ip
    } else {
        Family::Ip6
    }
}

/// The ports of one sandbox, as on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Mapped {
    /// The sandbox's own.
    addresses: Vec<IpAddr>,
    ports: Vec<PortMapping>,
}

impl Mapped {
    /// What UDP flows end at the sandbox.
    fn udp(&self) -> impl Iterator<Item = (IpAddr, &PortMapping)> {
        let ports = self.ports.iter().filter(|port| port.protocol() == Some(17));
        ports.flat_map(|port| self.addresses.iter().map(move |address| (*address, port)))
    }
}

/// What a rule asks of a packet, and where it then goes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Forward {
    /// Those for one address come before those for all.
    for_all: bool,
    pub(super) host: Option<IpAddr>,
    pub(super) protocol: u8,
    pub(super) host_port: u16,
    pub(super) target: IpAddr,
    pub(super) target_port: u16,
}

#[cfg(test)]
impl Forward {
    /// From port 80 to 8080.
    pub(super) fn new(host: Option<IpAddr>, protocol: u8, target: IpAddr) -> Forward {
        Forward {
            for_all: host.is_none(),
            host,
            protocol,
            host_port: 80,
            target,
            target_port: 8080,
        }
    }
}

fn forwards(all: &[Mapped], family: Family) -> Vec<Forward> {
    let mut list = BTreeSet::new();
    for mapped in all {
        let targets = mapped
            .addresses
            .iter()
            .filter(|address| family_of(**address) == family);
        for target in targets {
            for port in &mapped.ports {
                let (Ok(host), Some(protocol)) = (port.address(family), port.protocol()) else {
                    continue;
                };
                list.insert(Forward {
                    for_all: host.is_none(),
                    host,
                    protocol,
                    host_port: port.host_port,
                    target: *target,
                    target_port: port.container_port,
                });
            }
        }
    }
    list.into_iter().collect()
}

/// The table of a network, in each family.
pub(super) fn table_of(network: &str) -> String {
    format!("{network}-hostports")
}

/// The host ports of one network.
pub(super) struct HostPorts<'a> {
    conf: &'a BridgeConf,
    directory: PathBuf,
    table: String,
}

/// Held while files and rules are changed; the kernel lets go of it if the process dies.
struct Lock(#[expect(dead_code, reason = "its drop unlocks")] File);

fn failed<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> CniError {
    move |error| CniError::new(CniError::IO_FAILURE, format!("host ports: {what}: {error}"))
}

impl<'a> HostPorts<'a> {
    pub(super) fn new(conf: &'a BridgeConf) -> HostPorts<'a> {
        HostPorts {
            conf,
            directory: conf.data_dir.join("host-ports").join(&conf.name),
            table: table_of(&conf.name),
        }
    }

    fn lock(&self) -> Result<Lock, CniError> {
        std::fs::create_dir_all(&self.directory).map_err(failed("make the directory"))?;
        let open = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.directory.join(".lock"));
        let file = open.map_err(failed("open the lock"))?;
        file.lock().map_err(failed("lock"))?;
        Ok(Lock(file))
    }

    fn file(&self, container_id: &str, ifname: &str) -> PathBuf {
        self.directory.join(format!("{container_id}-{ifname}.json"))
    }

    fn read(&self, container_id: &str, ifname: &str) -> Option<Mapped> {
        let bytes = std::fs::read(self.file(container_id, ifname)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    fn all(&self) -> io::Result<Vec<Mapped>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let files = entries.flatten().map(|entry| entry.path());
        let ours = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
        // One that cannot be read opens nothing: half a file is of an ADD that was cut off, whose DEL is still to come.
        Ok(ours
            .filter_map(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok())
            .collect())
    }

    /// Opens the ports of a sandbox. Safe to repeat.
    pub(super) async fn open(
        &self,
        container_id: &str,
        ifname: &str,
        addresses: &[IpAddr],
        ports: &[PortMapping],
    ) -> Result<(), CniError> {
        if ports.is_empty() {
            return Ok(());
        }
        ports.iter().try_for_each(PortMapping::check)?;
        let mapped = Mapped {
            addresses: addresses.to_vec(),
            ports: ports.to_vec(),
        };
        let _lock = self.lock()?;
        let bytes = serde_json::to_vec(&mapped).map_err(failed("record the ports"))?;
        let path = self.file(container_id, ifname);
        let temporary = path.with_extension("tmp");
        std::fs::write(&temporary, bytes)
            .and_then(|()| std::fs::rename(&temporary, &path))
            .map_err(failed("record the ports"))?;
        self.allow_loopback(addresses);
        self.apply().await.map_err(failed("set the rules"))?;
        // A client that sent before the port was open would go on getting nothing.
        for (_, port) in mapped.udp() {
            forget_udp(ConntrackFilter::new().orig_dst_port(port.host_port)).await;
        }
        Ok(())
    }

    /// Closes the ports of a sandbox; one without any is fine.
    pub(super) async fn close(&self, container_id: &str, ifname: &str) -> Result<(), CniError> {
        let path = self.file(container_id, ifname);
        if !path.exists() {
            return Ok(());
        }
        let _lock = self.lock()?;
        let mapped = self.read(container_id, ifname).unwrap_or_default();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("forget the ports")(error));
            }
            _ => {}
        }
        self.apply().await.map_err(failed("set the rules"))?;
        // UDP knows no end of a connection: who keeps sending would keep reaching whoever gets the address next.
        for (address, port) in mapped.udp() {
            let filter = ConntrackFilter::new()
                .reply_src(address)
                .reply_src_port(port.container_port);
            forget_udp(filter).await;
        }
        Ok(())
    }

    /// Whether the ports are open as they were asked for.
    pub(super) async fn check(
        &self,
        container_id: &str,
        ifname: &str,
        ports: &[PortMapping],
    ) -> Result<(), CniError> {
        if ports.is_empty() {
            return Ok(());
        }
        let unlike = |what: String| CniError::new(CniError::IO_FAILURE, what);
        let mapped = self.read(container_id, ifname);
        let mapped =
            mapped.ok_or_else(|| unlike(format!("the host ports of {container_id} are not recorded")))?;
        if mapped.ports != ports {
            return Err(unlike(format!(
                "the host ports of {container_id} are not those asked for"
            )));
        }
        let stands = self.stands().await.map_err(failed("read the rules"))?;
        if !stands {
            return Err(unlike("the rules of host ports are gone or changed".into()));
        }
        Ok(())
    }

    /// Forgets the sandboxes that are not among these.
    pub(super) async fn retain(&self, valid: &[(&str, &str)]) -> Result<(), CniError> {
        let names: BTreeSet<String> = valid
            .iter()
            .map(|(container_id, ifname)| format!("{container_id}-{ifname}.json"))
            .collect();
        let Ok(entries) = std::fs::read_dir(&self.directory) else {
            return Ok(());
        };
        for name in entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
        {
            let Some((container_id, ifname)) = name
                .strip_suffix(".json")
                .filter(|_| !names.contains(&name))
                .and_then(|owner| owner.rsplit_once('-'))
            else {
                continue;
            };
            self.close(container_id, ifname).await?;
        }
        Ok(())
    }

    /// Makes the rules again where they are not what they should be. Returns whether that was so.
    pub(super) async fn restore(&self) -> Result<bool, CniError> {
        if !self.directory.exists() {
            return Ok(false);
        }
        // A plugin that has recorded a port and not yet opened it is not in the way.
        let _lock = self.lock()?;
        if self.stands().await.map_err(failed("read the rules"))? {
            return Ok(false);
        }
        self.apply().await.map_err(failed("set the rules"))?;
        Ok(true)
    }

    /// Takes away the rules and the record of them.
    pub(super) async fn remove(&self) -> Result<(), CniError> {
        let remove = async {
            let connection = Connection::<Nftables>::new()?;
            for family in FAMILIES {
                connection
                    .del_table_if_exists(self.table.as_str(), family)
                    .await?;
            }
            Ok::<(), nlink::Error>(())
        };
        remove.await.map_err(failed("remove the rules"))?;
        let forget = || {
            for entry in std::fs::read_dir(&self.directory)? {
                std::fs::remove_file(entry?.path())?;
            }
            std::fs::remove_dir(&self.directory)
        };
        match forget() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("forget the ports")(error)),
            _ => Ok(()),
        }
    }

    /// Whether the kernel has all rules as they are recorded.
    async fn stands(&self) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
        let all = self.all()?;
        let connection = Connection::<Nftables>::new()?;
        for family in FAMILIES {
            let forwards = forwards(&all, family);
            if !forwards.is_empty() && !rules::stand(&connection, &self.table, family, &forwards).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn apply(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let all = self.all()?;
        let connection = Connection::<Nftables>::new()?;
        for family in FAMILIES {
            let forwards = forwards(&all, family);
            if forwards.is_empty() {
                connection
                    .del_table_if_exists(self.table.as_str(), family)
                    .await?;
                continue;
            }
            // Deleting needs a table that exists, and creating first makes sure of it.
            let fresh = connection
                .transaction()
                .raw(table_message(&self.table, family))
                .del_table(&self.table, family)
                .add_table(&self.table, family);
            let transaction = rules::add_to(fresh, &self.table, family, &forwards)?;
            transaction.commit(&connection).await?;
        }
        Ok(())
    }

    /// Lets packets from 127.0.0.1 leave by the bridge once they are translated; sandboxes' guards keep them off the
    /// node's loopback.
    fn allow_loopback(&self, addresses: &[IpAddr]) {
        if !addresses.iter().any(IpAddr::is_ipv4) {
            return;
        }
        let path = format!("/proc/sys/net/ipv4/conf/{}/route_localnet", self.conf.bridge);
        if let Err(error) = std::fs::write(&path, "1") {
            eprintln!("skiff-bridge: {path}: {error}; host ports are not open on 127.0.0.1");
        }
    }
}

/// Creates the table or leaves it as it is.
fn table_message(table: &str, family: Family) -> RawMessage {
    let length = 4 + table.len() + 1;
    let mut name = (length as u16).to_ne_bytes().to_vec();
    name.extend(NFTA_TABLE_NAME.to_ne_bytes());
    name.extend(table.as_bytes());
    name.resize(length.next_multiple_of(4), 0);
    RawMessage::new(NFT_MSG_NEWTABLE, family)
        .flags(NLM_F_CREATE)
        .attrs(name)
}

/// The ports work without it, for new flows.
async fn forget_udp(filter: ConntrackFilter) {
    let removed = match Connection::<Netfilter>::new() {
        Ok(conntrack) => {
            conntrack
                .del_conntrack_matching(&filter.proto(IpProtocol::Udp))
                .await
        }
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        eprintln!("skiff-bridge: cannot forget UDP flows: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn mapped(address: &str, ports: serde_json::Value) -> Mapped {
        Mapped {
            addresses: vec![address.parse().unwrap()],
            ports: serde_json::from_value(ports).unwrap(),
        }
    }

    #[test]
    fn one_address_comes_before_all() {
        let all = [
            mapped(
                "10.0.0.2",
                json!([{"hostPort": 80, "containerPort": 8080, "protocol": "tcp", "hostIP": "0.0.0.0"}]),
            ),
            mapped(
                "10.0.0.3",
                json!([{"hostPort": 80, "containerPort": 81, "protocol": "TCP", "hostIP": "192.0.2.1"}]),
            ),
            mapped(
                "10.0.0.4",
                json!([{"hostPort": 80, "containerPort": 82, "protocol": "udp"}]),
            ),
            mapped(
                "10.0.0.5",
                json!([{"hostPort": 80, "containerPort": 83, "hostIP": "::"}]),
            ),
            mapped("fd00::5", json!([{"hostPort": 80, "containerPort": 84}])),
        ];
        let show = |family: Family| -> Vec<String> {
            let list = forwards(&all, family);
            list.iter()
                .map(|f| {
                    format!(
                        "{:?} {} {} {}:{}",
                        f.host, f.protocol, f.host_port, f.target, f.target_port
                    )
                })
                .collect()
        };
        let expected = [
            "Some(192.0.2.1) 6 80 10.0.0.3:81",
            "None 6 80 10.0.0.2:8080",
            "None 17 80 10.0.0.4:82",
        ];
        assert_eq!(show(Family::Ip), expected);
        assert_eq!(show(Family::Ip6), ["None 6 80 fd00::5:84"]);
    }

    #[test]
    fn bad_mappings_are_refused() {
        let check = |port: serde_json::Value, expected: Option<&str>| {
            let port: PortMapping = serde_json::from_value(port).unwrap();
            let found = port.check().err().map(|error| error.msg);
            match (found, expected) {
                (None, None) => {}
                (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
                other => panic!("{other:?}"),
            }
        };
        check(
            json!({"hostPort": 1, "containerPort": 2, "protocol": "sctp"}),
            None,
        );
        check(json!({"hostPort": 1, "containerPort": 0}), Some("1 to 65535"));
        check(
            json!({"hostPort": 1, "containerPort": 2, "protocol": "icmp"}),
            Some("unknown protocol"),
        );
        check(
            json!({"hostPort": 1, "containerPort": 2, "hostIP": "here"}),
            Some("not an address"),
        );
    }
}
