//! Networks of both address families: the one type for `10.244.0.0/16` and `fd00:10::/48`.
//!
//! It knows nothing of interfaces or routes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A network in CIDR notation. The address is the network's first: host bits are cleared when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// Why a text is no network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a network in CIDR notation: {why}")]
pub struct CidrError {
    text: String,
    why: &'static str,
}

/// The bits of an address of this family.
fn bits_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn number_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

impl Cidr {
    /// The network that `address` lies in; `None` if the prefix is longer than the address.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Cidr> {
        let bits = bits_of(address);
        let host_bits = u32::from(bits.checked_sub(prefix)?);
        let kept = number_of(address).checked_shr(host_bits).unwrap_or(0);
        let base = kept.checked_shl(host_bits).unwrap_or(0);
        let address = match address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(base as u32)),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(base)),
        };
        Some(Cidr { address, prefix })
    }

    /// The network of this address alone.
    pub const fn host(address: IpAddr) -> Cidr {
        let prefix = match address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        };
        Cidr { address, prefix }
    }

    /// The network's first address.
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// The length of the prefix.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The bits of an address: 32 or 128.
    pub fn bits(self) -> u8 {
        bits_of(self.address)
    }

    pub fn is_ipv4(self) -> bool {
        self.address.is_ipv4()
    }

    pub fn is_ipv6(self) -> bool {
        self.address.is_ipv6()
    }

    pub fn same_family(self, other: Cidr) -> bool {
        self.is_ipv4() == other.is_ipv4()
    }

    fn host_bits(self) -> u32 {
        u32::from(self.bits() - self.prefix)
    }

    /// How many addresses there are; `u128::MAX` stands for the one more that all of IPv6 has.
    pub fn size(self) -> u128 {
        1u128.checked_shl(self.host_bits()).unwrap_or(u128::MAX)
    }

    pub fn contains(self, address: IpAddr) -> bool {
        bits_of(address) == self.bits()
            && (number_of(address) ^ number_of(self.address))
                .checked_shr(self.host_bits())
                .unwrap_or(0)
                == 0
    }

    /// Whether all of `other` lies in this network.
    pub fn covers(self, other: Cidr) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }

    pub fn overlaps(self, other: Cidr) -> bool {
        self.covers(other) || other.covers(self)
    }

    /// The n-th address, counted from zero, which is the network's own.
    pub fn nth(self, n: u128) -> Option<IpAddr> {
        if n.checked_shr(self.host_bits()).unwrap_or(0) != 0 {
            return None;
        }
        // The host bits are zero, so nothing is carried out of them.
        Some(match self.address {
            IpAddr::V4(base) => IpAddr::V4(Ipv4Addr::from_bits(base.to_bits() | n as u32)),
            IpAddr::V6(base) => IpAddr::V6(Ipv6Addr::from_bits(base.to_bits() | n)),
        })
    }

    /// Which address of the network this is, counted from zero.
    pub fn index_of(self, address: IpAddr) -> Option<u128> {
        self.contains(address)
            .then(|| number_of(address) ^ number_of(self.address))
    }

    pub fn last(self) -> IpAddr {
        let host_mask = u128::MAX.checked_shr(128 - self.host_bits()).unwrap_or(0);
        self.nth(host_mask).unwrap_or(self.address)
    }

    /// All addresses, in order.
    pub fn addresses(self) -> impl Iterator<Item = IpAddr> {
        (0..self.size()).map_while(move |n| self.nth(n))
    }

    /// The n-th part of the network when it is cut into networks with this prefix.
    pub fn part(self, prefix: u8, n: u128) -> Option<Cidr> {
        let step = u32::from(self.bits().checked_sub(prefix)?);
        let parts = u32::from(prefix.checked_sub(self.prefix)?);
        if n.checked_shr(parts).unwrap_or(0) != 0 {
            return None;
        }
        let first = self.nth(n.checked_shl(step).unwrap_or(0))?;
        Cidr::new(first, prefix)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Cidr, CidrError> {
        let bad = |why| CidrError {
            text: text.to_owned(),
            why,
        };
        let (address, prefix) = text
            .split_once('/')
            .ok_or_else(|| bad("there is no prefix length"))?;
        let address: IpAddr = address.parse().map_err(|_| bad("the address is invalid"))?;
        // `u8::from_str` takes a plus sign and leading zeros; networks do not.
        let plain = prefix.bytes().all(|byte| byte.is_ascii_digit())
            && (prefix.len() == 1 || !prefix.starts_with('0'));
        let prefix = prefix.parse().ok().filter(|_| plain);
        prefix
            .and_then(|prefix| Cidr::new(address, prefix))
            .ok_or_else(|| bad("the prefix length is invalid"))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Cidr, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Networks separated by commas, as flags and dual-stack fields have them.
pub fn parse_list(text: &str) -> Result<Vec<Cidr>, CidrError> {
    text.split(',').map(|part| part.trim().parse()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_a_network() {
        for (text, expected) in [
            ("10.244.3.9/16", "10.244.0.0/16"),
            ("10.0.0.1/32", "10.0.0.1/32"),
            ("10.0.0.1/0", "0.0.0.0/0"),
            ("fd00:10::5/48", "fd00:10::/48"),
            ("::1/0", "::/0"),
            ("fd00::1/128", "fd00::1/128"),
        ] {
            assert_eq!(cidr(text).to_string(), expected);
        }
        for (text, why) in [
            ("10.0.0.0", "no prefix"),
            ("10.0.0/8", "address"),
            ("10.0.0.0/33", "prefix length is invalid"),
            ("10.0.0.0/+8", "prefix length is invalid"),
            ("10.0.0.0/08", "prefix length is invalid"),
            ("10.0.0.0/", "prefix length is invalid"),
            ("fd00::/129", "prefix length is invalid"),
            ("", "no prefix"),
        ] {
            let error = text.parse::<Cidr>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn what_lies_in_what() {
        let check = |outer: &str, inner: &str, covers: bool, overlaps: bool| {
            assert_eq!(cidr(outer).covers(cidr(inner)), covers, "{outer} {inner}");
            assert_eq!(cidr(outer).overlaps(cidr(inner)), overlaps, "{outer} {inner}");
            assert_eq!(cidr(inner).overlaps(cidr(outer)), overlaps, "{inner} {outer}");
        };
        check("10.0.0.0/8", "10.244.0.0/16", true, true);
        check("10.244.0.0/16", "10.0.0.0/8", false, true);
        check("10.244.0.0/16", "10.245.0.0/16", false, false);
        check("0.0.0.0/0", "::/0", false, false);
        check("::/0", "fd00::/64", true, true);
        check("fd00::/64", "fd00:0:0:1::/64", false, false);
        assert!(cidr("0.0.0.0/0").contains("255.255.255.255".parse().unwrap()));
        assert!(!cidr("::/0").contains("10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn addresses_by_number() {
        let network = cidr("10.0.0.248/29");
        let all: Vec<IpAddr> = network.addresses().collect();
        assert_eq!((all.len(), network.size()), (8, 8));
        assert_eq!(all[7], network.last());
        assert_eq!(network.nth(8), None);
        for (n, address) in all.into_iter().enumerate() {
            assert_eq!(network.index_of(address), Some(n as u128));
        }
        let wide = cidr("fd00::/64");
        assert_eq!(wide.nth(1).unwrap().to_string(), "fd00::1");
        assert_eq!(wide.last().to_string(), "fd00::ffff:ffff:ffff:ffff");
        assert_eq!(cidr("::/0").last(), IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)));
        assert_eq!(cidr("10.0.0.7/32").last(), cidr("10.0.0.7/32").address());
        assert_eq!(cidr("10.9.9.9/32").addresses().count(), 1);
        assert_eq!(cidr("10.244.0.0/16").part(24, 255), Some(cidr("10.244.255.0/24")));
        assert_eq!(cidr("10.244.0.0/16").part(24, 256), None);
        assert_eq!(cidr("10.244.0.0/16").part(8, 0), None);
        assert_eq!(cidr("fd00:10::/48").part(64, 1), Some(cidr("fd00:10:0:1::/64")));
    }

    #[test]
    fn as_json() {
        let list: Vec<Cidr> = serde_json::from_str(r#"["10.0.0.0/8","fd00::/64"]"#).unwrap();
        assert_eq!(
            serde_json::to_string(&list).unwrap(),
            r#"["10.0.0.0/8","fd00::/64"]"#
        );
        assert!(serde_json::from_str::<Cidr>(r#""10.0.0.0""#).is_err());
        assert_eq!(parse_list("10.0.0.0/8, fd00::/64").unwrap(), list);
        assert!(parse_list("10.0.0.0/8,").is_err());
    }
}
