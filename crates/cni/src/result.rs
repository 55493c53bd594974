//! The JSON a plugin answers with: a result of any spec version, or an error object. No I/O.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The error object of the CNI protocol.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniError {
    #[serde(rename = "cniVersion", default, skip_serializing_if = "String::is_empty")]
    pub cni_version: String,
    pub code: u32,
    #[serde(default)]
    pub msg: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl CniError {
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    pub const UNKNOWN_CONTAINER: u32 = 3;
    pub const INVALID_ENVIRONMENT: u32 = 4;
    pub const IO_FAILURE: u32 = 5;
    pub const DECODING_FAILURE: u32 = 6;
    pub const INVALID_CONFIG: u32 = 7;
    pub const TRY_AGAIN_LATER: u32 = 11;
    /// The spec's "plugin not available", the answer to STATUS.
    pub const NOT_AVAILABLE: u32 = 50;
    /// Codes from 100 up belong to the plugin.
    pub const INTERNAL: u32 = 100;

    pub fn new(code: u32, msg: impl Into<String>) -> CniError {
        CniError {
            cni_version: String::new(),
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }
}

impl std::fmt::Display for CniError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.msg)?;
        if !self.details.is_empty() {
            write!(f, "; {}", self.details)?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// In CIDR notation.
    pub address: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// "4" or "6", in results before 1.0 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    pub dst: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl Dns {
    fn is_empty(&self) -> bool {
        *self == Dns::default()
    }
}

/// The result of ADD in the newest layout; older layouts are converted as they are read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddResult {
    #[serde(rename = "cniVersion", default)]
    pub cni_version: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<IpConfig>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    #[serde(default, skip_serializing_if = "Dns::is_empty")]
    pub dns: Dns,
}

impl AddResult {
    /// Reads a result of any version. 0.1 and 0.2 have `ip4` and `ip6` objects instead of lists.
    pub fn parse(value: &Value) -> std::result::Result<AddResult, serde_json::Error> {
        #[derive(Deserialize)]
        struct OldIp {
            ip: String,
            gateway: Option<String>,
            #[serde(default)]
            routes: Vec<Route>,
        }
        let mut result = AddResult::deserialize(value)?;
        for key in ["ip4", "ip6"] {
            if let Some(old) = value.get(key).filter(|old| !old.is_null()) {
                let old = OldIp::deserialize(old)?;
                result.ips.push(IpConfig {
                    address: old.ip,
                    gateway: old.gateway,
                    ..IpConfig::default()
                });
                result.routes.extend(old.routes);
            }
        }
        Ok(result)
    }

    /// The addresses a pod's status reports: those of interfaces inside the sandbox, without prefix.
    /// Addresses that name no interface count, because plugins before 1.0 often leave it out.
    pub fn pod_ips(&self) -> Vec<std::net::IpAddr> {
        self.ips
            .iter()
            .filter(|ip| {
                ip.interface
                    .and_then(|index| self.interfaces.get(index))
                    .is_none_or(|i| !i.sandbox.is_empty())
            })
            .filter_map(|ip| ip.address.split('/').next()?.parse().ok())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_ips_of_every_version() {
        fn check(result: Value, expected: &[&str]) {
            let parsed = AddResult::parse(&result).unwrap();
            let ips: Vec<String> = parsed.pod_ips().iter().map(|ip| ip.to_string()).collect();
            assert_eq!(ips, expected, "{result}");
        }
        check(
            json!({"cniVersion":"0.2.0","ip4":{"ip":"10.1.2.3/24","gateway":"10.1.2.1","routes":[{"dst":"0.0.0.0/0"}]}}),
            &["10.1.2.3"],
        );
        check(
            json!({"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.2.3/24"},{"version":"6","address":"fd00::3/64"}]}),
            &["10.1.2.3", "fd00::3"],
        );
        check(
            json!({"cniVersion":"1.0.0",
                "interfaces":[{"name":"br0"},{"name":"eth0","sandbox":"/run/netns/x"}],
                "ips":[{"address":"10.9.9.1/24","interface":0},{"address":"10.1.2.3/24","interface":1}]}),
            &["10.1.2.3"],
        );
        check(json!({"cniVersion":"1.0.0"}), &[]);
    }
}
