//! From which addresses an Ingress may be reached. Pure.

use std::net::IpAddr;

use skiff_meta::net::Cidr;

use super::values::Values;

/// Networks of one annotation.
const MAX_NETWORKS: usize = 4096;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceRanges {
    /// Only these, if there are some.
    allowed: Vec<Cidr>,
    /// Never these.
    denied: Vec<Cidr>,
}

impl SourceRanges {
    pub fn read(values: &mut Values<'_>) -> Option<SourceRanges> {
        let mut allowed = Vec::new();
        for name in ["whitelist-source-range", "allowlist-source-range"] {
            allowed.extend(values.strict(name, networks).into_iter().flatten());
        }
        let denied = values
            .strict("denylist-source-range", networks)
            .unwrap_or_default();
        let ranges = SourceRanges { allowed, denied };
        (ranges != SourceRanges::default()).then_some(ranges)
    }

    pub fn allows(&self, address: IpAddr) -> bool {
        (self.allowed.is_empty() || any_contains(&self.allowed, address))
            && !any_contains(&self.denied, address)
    }
}

pub fn any_contains(networks: &[Cidr], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(address))
}

/// Networks and addresses between commas; at least one.
pub fn networks(text: &str) -> Result<Vec<Cidr>, String> {
    let networks: Vec<Cidr> = text
        .split(',')
        .map(|each| network(each.trim()))
        .collect::<Result<_, _>>()?;
    match networks.len() > MAX_NETWORKS {
        true => Err(format!("it names more than {MAX_NETWORKS} networks")),
        false => Ok(networks),
    }
}

fn network(text: &str) -> Result<Cidr, String> {
    let expected = || format!("{text:?} is not an address or a network such as 10.0.0.0/8");
    if let Ok(address) = text.parse::<IpAddr>() {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        return Cidr::new(address, bits).ok_or_else(expected);
    }
    let (address, prefix) = text.split_once('/').ok_or_else(expected)?;
    let address: IpAddr = address.parse().map_err(|_| expected())?;
    let is_number = prefix.len() <= 3 && prefix.bytes().all(|byte| byte.is_ascii_digit());
    let prefix = prefix
        .parse::<u8>()
        .ok()
        .filter(|_| is_number)
        .ok_or_else(expected)?;
    Cidr::new(address, prefix).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn read(pairs: &[(&str, &str)]) -> (Option<SourceRanges>, bool) {
        let map: BTreeMap<String, String> = pairs
            .iter()
            .map(|(name, value)| (format!("nginx.ingress.kubernetes.io/{name}"), (*value).to_owned()))
            .collect();
        let mut problems = Vec::new();
        let mut values = Values::new(map.iter(), &mut problems);
        let ranges = SourceRanges::read(&mut values);
        (ranges, values.finish())
    }

    #[test]
    fn addresses_are_in_ranges() {
        let ranges = read(&[
            ("whitelist-source-range", "10.0.0.0/8, fd00::/16,192.0.2.7"),
            ("denylist-source-range", "10.6.0.0/16"),
        ]);
        let ranges = ranges.0.expect("ranges");
        for (address, expected) in [
            ("10.1.2.3", true),
            ("::ffff:10.1.2.3", true),
            ("10.6.2.3", false),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
            ("fd00::1", true),
            ("fd01::1", false),
        ] {
            assert_eq!(
                ranges.allows(address.parse().expect("an address")),
                expected,
                "{address}"
            );
        }
        let denied = read(&[("denylist-source-range", "10.6.0.0/16")])
            .0
            .expect("ranges");
        assert!(denied.allows([10, 1, 2, 3].into()) && !denied.allows([10, 6, 2, 3].into()));
    }

    #[test]
    fn what_cannot_be_read_closes() {
        for text in [
            "",
            ",",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0/8",
            "any",
            "10.0.0.0/8;1.1.1.1",
            "10.0.0.0/8,",
        ] {
            for name in [
                "whitelist-source-range",
                "allowlist-source-range",
                "denylist-source-range",
            ] {
                assert!(read(&[(name, text)]).1, "{name} {text:?}");
            }
        }
        // As cert-manager writes it.
        assert!(!read(&[("whitelist-source-range", "0.0.0.0/0,::/0")]).1);
    }
}
