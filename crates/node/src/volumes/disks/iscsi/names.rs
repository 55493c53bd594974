//! What a volume says about its target, checked before any tool or path sees it: what comes from here has no slashes, no leading dashes
//! or dots, and no characters that `iscsiadm`'s records are divided by.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::ISCSIPersistentVolumeSource;
use serde::{Deserialize, Serialize};

const PORT: u16 = 3260;
/// RFC 3720.
const MAX_NAME: usize = 223;
/// Of open-iscsi: 65 with the zero at the end.
const MAX_IFACE: usize = 64;
/// Likewise.
const MAX_SECRET: usize = 255;
/// More paths to one disk than anybody has.
const MAX_PORTALS: usize = 32;

const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// One LUN of a target, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Target {
    /// With ports; at least one.
    pub portals: Vec<String>,
    pub iqn: String,
    pub lun: u32,
    /// The iface that the sessions use.
    pub iface: String,
    /// The iface that the volume names: another one if the volume has a name for the initiator, which takes an iface of its own.
    pub template: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
}

impl Target {
    pub fn new(source: &ISCSIPersistentVolumeSource, volume: &str) -> Result<Self, String> {
        let more = source.portals.iter().flatten();
        let mut portals = Vec::new();
        for text in std::iter::once(&source.target_portal).chain(more) {
            let one = portal(text)?;
            if !portals.contains(&one) {
                portals.push(one);
            }
        }
        if portals.len() > MAX_PORTALS {
            return Err(format!("iscsi: more than {MAX_PORTALS} portals"));
        }
        check_name("iqn", &source.iqn)?;
        let lun = u32::try_from(source.lun)
            .ok()
            .filter(|lun| *lun <= 255)
            .ok_or_else(|| format!("iscsi: invalid lun {}", source.lun))?;
        let template = source.iscsi_interface.clone().unwrap_or_default();
        let template = if template.is_empty() {
            "default".to_owned()
        } else {
            template
        };
        check_iface(&template)?;
        let initiator = source.initiator_name.clone().filter(|name| !name.is_empty());
        let mut iface = template.clone();
        if let Some(initiator) = &initiator {
            check_name("initiatorName", initiator)?;
            iface = format!("{}:{volume}", portals[0]);
            check_iface(&iface)?;
            if iface == template {
                return Err(format!("iscsi: cannot clone iface with same name: {iface}"));
            }
        }
        Ok(Target {
            portals,
            iqn: source.iqn.clone(),
            lun,
            iface,
            template,
            initiator,
        })
    }

    /// Its folder, below that of its type.
    pub fn folder(&self) -> String {
        format!(
            "iface-{}/{}-{}-lun-{}",
            self.iface, self.portals[0], self.iqn, self.lun
        )
    }

    pub fn has_own_iface(&self) -> bool {
        self.initiator.is_some()
    }
}

/// An address or a name, with a port.
fn portal(text: &str) -> Result<String, String> {
    let invalid = || format!("iscsi: invalid target portal {text:?}");
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address.to_string());
    }
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if let Ok(address) = bare.unwrap_or(text).parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, PORT).to_string());
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => {
            let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
            let port = if digits { port.parse().ok() } else { None };
            (host, port.ok_or_else(invalid)?)
        }
        None => (text, PORT),
    };
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    match host.len() <= 253 && host.split('.').all(is_label) && port != 0 {
        true => Ok(format!("{host}:{port}")),
        false => Err(invalid()),
    }
}

/// `iqn.`, `eui.` or `naa.`, and what goes into a file name.
fn check_name(field: &str, name: &str) -> Result<(), String> {
    let begins = ["iqn.", "eui.", "naa."]
        .iter()
        .any(|start| name.starts_with(start));
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b':' | b'_');
    match begins && (5..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain) {
        true => Ok(()),
        false => Err(format!("iscsi: invalid {field} {name:?}")),
    }
}

fn check_iface(name: &str) -> Result<(), String> {
    let plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b':' | b'_' | b'@' | b'[' | b']')
    };
    let good =
        (1..=MAX_IFACE).contains(&name.len()) && !name.starts_with(['-', '.']) && name.bytes().all(plain);
    match good {
        true => Ok(()),
        false => Err(format!(
            "iscsi: invalid iscsiInterface {name:?}: up to {MAX_IFACE} letters, digits and -_.:@[]"
        )),
    }
}

/// Names and passwords of CHAP, by the names of `iscsiadm`'s settings. Never written to the disk by us, nor shown.
#[derive(Clone, Default)]
pub struct Chap {
    /// `Some` if discovery is authenticated, with what the secret has of it.
    pub discovery: Option<Vec<(&'static str, String)>>,
    pub session: Option<Vec<(&'static str, String)>>,
}

impl std::fmt::Debug for Chap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Chap(..)")
    }
}

impl Chap {
    pub fn new(discovery: bool, session: bool, secret: &BTreeMap<String, Vec<u8>>) -> Result<Self, String> {
        let settings = |wanted: bool, keys: [&'static str; 4]| {
            let present = keys.into_iter().filter_map(|key| Some((key, secret.get(key)?)));
            let texts = present
                .filter(|(_, value)| !value.is_empty())
                .map(|(key, value)| {
                    let text = std::str::from_utf8(value).ok();
                    // A line break would begin another setting.
                    let text =
                        text.filter(|text| text.len() <= MAX_SECRET && !text.contains(char::is_control));
                    let text = text.ok_or_else(|| {
                        format!(
                            "iscsi: the secret's {key} is not up to {MAX_SECRET} bytes of text in one line"
                        )
                    })?;
                    Ok((key, text.to_owned()))
                });
            let texts: Result<Vec<_>, String> = texts.collect();
            if wanted { texts.map(Some) } else { Ok(None) }
        };
        Ok(Chap {
            discovery: settings(discovery, DISCOVERY_KEYS)?,
            session: settings(session, SESSION_KEYS)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(portal: &str, iqn: &str) -> ISCSIPersistentVolumeSource {
        ISCSIPersistentVolumeSource {
            target_portal: portal.to_owned(),
            iqn: iqn.to_owned(),
            lun: 1,
            ..Default::default()
        }
    }

    const IQN: &str = "iqn.2026-01.example.com:disk_1";

    #[test]
    fn portals_have_ports() {
        let check = |text: &str, expected: &str| {
            assert_eq!(portal(text).as_deref(), Ok(expected), "{text:?}");
        };
        check("10.0.0.1", "10.0.0.1:3260");
        check("10.0.0.1:860", "10.0.0.1:860");
        check("fd00::1", "[fd00::1]:3260");
        check("[fd00::1]", "[fd00::1]:3260");
        check("[fd00:0::1]:9", "[fd00::1]:9");
        check("san-1.example", "san-1.example:3260");
        check("san:3261", "san:3261");
    }

    #[test]
    fn hostile_values_are_refused() {
        for bad in [
            "",
            "-p",
            "--help",
            "../x",
            "/etc/passwd",
            ".",
            "..",
            "a..b",
            ".a",
            "a.",
            "a b",
            "a\nb",
            "a:b",
            "a:",
            "a:0",
            "a:99999",
            "a:+1",
            "10.0.0.1:3260\n",
            "a/b:1",
            "[fd00::1",
            "a,1",
            "$(x)",
            "é",
            "-a.b",
            "a;b:1",
        ] {
            assert!(portal(bad).is_err(), "{bad:?}");
            assert!(Target::new(&source(bad, IQN), "v").is_err(), "{bad:?}");
        }
        let long = format!("iqn.{}", "a".repeat(MAX_NAME));
        for bad in [
            "",
            "-T",
            "iqn.",
            "../iqn.x",
            "iqn./etc",
            "iqn.a/../../b",
            "iqn.2026-01.a:b\nx",
            "iqn.a b",
            "xiqn.a",
            "iqn.2026-01.a:b/c",
            "iqn.a\0b",
            "iqn.a*",
            "iqn.a;b",
            "iqn.é",
            long.as_str(),
        ] {
            assert!(Target::new(&source("10.0.0.1", bad), "v").is_err(), "{bad:?}");
            let mut named = source("10.0.0.1", IQN);
            named.initiator_name = Some(bad.to_owned());
            assert_eq!(Target::new(&named, "v").is_err(), !bad.is_empty(), "{bad:?}");
        }
        let long = "i".repeat(65);
        for bad in ["-I", ".", "..", "../x", "a/b", "a\nb", "a b", "a*", long.as_str()] {
            let mut named = source("10.0.0.1", IQN);
            named.iscsi_interface = Some(bad.to_owned());
            assert!(Target::new(&named, "v").is_err(), "{bad:?}");
        }
        for lun in [-1, 256] {
            let mut numbered = source("10.0.0.1", IQN);
            numbered.lun = lun;
            assert!(Target::new(&numbered, "v").is_err(), "{lun}");
        }
        let mut many = source("10.0.0.1", IQN);
        many.portals = Some((0..40).map(|n| format!("10.0.1.{n}")).collect());
        assert!(Target::new(&many, "v").is_err());
        many.portals = Some(vec!["10.0.0.2".to_owned(), "-x".to_owned()]);
        assert!(Target::new(&many, "v").is_err());
    }

    #[test]
    fn folders_and_ifaces_are_upstreams() {
        let mut plain = source("10.0.0.1", IQN);
        plain.portals = Some(vec!["10.0.0.2".to_owned(), "10.0.0.1:3260".to_owned()]);
        let target = Target::new(&plain, "v").unwrap();
        assert_eq!(target.portals, ["10.0.0.1:3260", "10.0.0.2:3260"]);
        assert_eq!(
            target.folder(),
            "iface-default/10.0.0.1:3260-iqn.2026-01.example.com:disk_1-lun-1"
        );
        assert!(!target.has_own_iface());
        plain.initiator_name = Some("iqn.2026-01.example:host".to_owned());
        let target = Target::new(&plain, "pv1").unwrap();
        assert_eq!(target.iface, "10.0.0.1:3260:pv1");
        assert_eq!(target.template, "default");
        assert!(target.has_own_iface());
        // The iface would have a name that open-iscsi does not take.
        assert!(Target::new(&plain, &"v".repeat(60)).is_err());
    }

    #[test]
    fn secrets_are_one_line_each() {
        let secret = |value: &str| {
            BTreeMap::from([
                ("node.session.auth.username".to_owned(), b"me".to_vec()),
                ("node.session.auth.password".to_owned(), value.as_bytes().to_vec()),
                ("discovery.sendtargets.auth.username".to_owned(), b"d".to_vec()),
                ("other".to_owned(), b"x\n".to_vec()),
            ])
        };
        let chap = Chap::new(false, true, &secret("-pw d")).unwrap();
        assert_eq!(chap.discovery, None);
        assert_eq!(
            chap.session.as_deref(),
            Some(
                [
                    ("node.session.auth.username", "me".to_owned()),
                    ("node.session.auth.password", "-pw d".to_owned())
                ]
                .as_slice()
            )
        );
        let error = Chap::new(true, true, &secret("hush\nnode.startup = automatic")).unwrap_err();
        assert!(!error.contains("hush"), "{error}");
        assert_eq!(format!("{chap:?}"), "Chap(..)");
    }
}
