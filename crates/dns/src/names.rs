//! Zones as a Corefile writes them, and which names are below them. No I/O.

use hickory_proto::rr::Name;
use skiff_meta::net::Cidr;
use std::net::{IpAddr, Ipv4Addr};

/// A name in lower case and absolute: `Example.org` is `example.org.`
pub fn absolute(text: &str) -> Option<Name> {
    if text == "." {
        return Some(Name::root());
    }
    let mut name = Name::from_ascii(text.to_lowercase()).ok()?;
    if text.is_empty() || name.is_root() {
        return None;
    }
    name.set_fqdn(true);
    Some(name)
}

/// A zone: a name, or a network in CIDR notation, which is its reverse zone. A network whose prefix ends inside of a label
/// has none.
pub fn zone(text: &str) -> Option<Name> {
    let Ok(network) = text.parse::<Cidr>() else {
        return absolute(text);
    };
    let labels = match network.address() {
        IpAddr::V4(v4) if network.prefix() % 8 == 0 => {
            let labels = v4.octets().map(|octet| octet.to_string());
            labels[..usize::from(network.prefix() / 8)].to_vec()
        }
        IpAddr::V6(v6) if network.prefix() % 4 == 0 => {
            let nibbles = format!("{:032x}", v6.to_bits());
            let labels = nibbles.chars().take(usize::from(network.prefix() / 4));
            labels.map(String::from).collect()
        }
        _ => return None,
    };
    let suffix = if network.is_ipv4() {
        "in-addr.arpa"
    } else {
        "ip6.arpa"
    };
    let labels: Vec<String> = labels.into_iter().rev().chain([suffix.to_owned()]).collect();
    absolute(&labels.join("."))
}

/// The longest of `zones` that a name in lower case is in.
pub fn longest<'z>(zones: &'z [Name], lower: &Name) -> Option<&'z Name> {
    zones
        .iter()
        .filter(|zone| zone.zone_of_case(lower))
        .max_by_key(|zone| zone.num_labels())
}

/// The address that a name in lower case under `in-addr.arpa.` or `ip6.arpa.` stands for.
pub fn reverse_address(lower: &Name) -> Option<IpAddr> {
    let text = lower.to_ascii();
    let text = text.trim_end_matches('.');
    if let Some(v4) = text.strip_suffix(".in-addr.arpa") {
        let parts: Vec<&str> = v4.rsplit('.').collect();
        return parts.join(".").parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    }
    let v6 = text.strip_suffix(".ip6.arpa")?;
    let nibbles: Vec<&str> = v6.rsplit('.').collect();
    let whole = nibbles.len() == 32 && nibbles.iter().all(|nibble| nibble.len() == 1);
    whole
        .then(|| u128::from_str_radix(&nibbles.concat(), 16).ok())
        .flatten()
        .map(|bits| IpAddr::V6(bits.into()))
}

/// Names for which the next plugin may answer what this one does not know.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fall(pub Vec<Name>);

impl Fall {
    pub fn through(&self, lower: &Name) -> bool {
        longest(&self.0, lower).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_read() {
        for (text, expected) in [
            (".", Some(".")),
            ("Example.ORG", Some("example.org.")),
            ("example.org.", Some("example.org.")),
            ("10.0.0.0/24", Some("0.0.10.in-addr.arpa.")),
            ("10.0.0.0/8", Some("10.in-addr.arpa.")),
            ("fd00::/16", Some("0.0.d.f.ip6.arpa.")),
            ("10.0.0.0/23", None),
            ("", None),
            ("..", None),
            ("a..b", None),
        ] {
            let found = zone(text).map(|name| name.to_ascii());
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn reverse_names_are_addresses() {
        let v6 = format!("1.{}d.f.ip6.arpa.", "0.".repeat(29));
        for (name, expected) in [
            ("7.0.96.10.in-addr.arpa.", Some("10.96.0.7")),
            (v6.as_str(), Some("fd00::1")),
            ("96.10.in-addr.arpa.", None),
            ("in-addr.arpa.", None),
            ("00.d.f.ip6.arpa.", None),
            ("example.org.", None),
        ] {
            let found = reverse_address(&absolute(name).unwrap()).map(|ip| ip.to_string());
            assert_eq!(found.as_deref(), expected, "{name}");
        }
    }
}
