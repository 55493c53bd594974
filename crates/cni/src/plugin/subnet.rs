//! The pod networks of one node as the plugin hands them out: which address is the gateway's, and which are pods'.
//! No I/O.

use std::net::IpAddr;

use skiff_meta::net::Cidr;

use crate::result::CniError;

/// An IPv6 network has more addresses than can ever be looked through; pods get the first ones.
const MOST_PODS: u128 = 1 << 20;

/// One network: its first address is the gateway's, and the last one of IPv4 is broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subnet(Cidr);

impl Subnet {
    fn new(network: Cidr) -> Result<Subnet, CniError> {
        let longest = network.bits() - 2;
        if (8..=longest).contains(&network.prefix()) {
            return Ok(Subnet(network));
        }
        Err(CniError::new(
            CniError::INVALID_CONFIG,
            format!("subnet {network}: the prefix length must be from 8 to {longest}"),
        ))
    }

    pub(super) fn gateway(self) -> IpAddr {
        self.0.nth(1).unwrap_or(self.0.address())
    }

    pub(super) fn prefix(self) -> u8 {
        self.0.prefix()
    }

    pub(super) fn is_ipv4(self) -> bool {
        self.0.is_ipv4()
    }

    /// How many addresses pods can have.
    pub(super) fn len(self) -> u128 {
        let reserved = if self.0.is_ipv4() { 3 } else { 2 };
        (self.0.size() - reserved).min(MOST_PODS)
    }

    /// The pod address with this index, from zero.
    pub(super) fn pod(self, index: u128) -> IpAddr {
        self.0.nth(index + 2).unwrap_or(self.0.last())
    }

    pub(super) fn index(self, address: IpAddr) -> Option<u128> {
        let index = self.0.index_of(address)?.checked_sub(2)?;
        (index < self.len()).then_some(index)
    }
}

/// The networks of one node: at most one of each family, in the order of the addresses that pods get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subnets(Vec<Subnet>);

impl Subnets {
    pub(super) fn new(networks: &[Cidr]) -> Result<Subnets, CniError> {
        let subnets: Vec<Subnet> = networks
            .iter()
            .map(|network| Subnet::new(*network))
            .collect::<Result<_, _>>()?;
        let invalid = |why: &str| Err(CniError::new(CniError::INVALID_CONFIG, why));
        match subnets.as_slice() {
            [] => invalid("subnets: at least one network is required"),
            [_] => Ok(Subnets(subnets)),
            [a, b] if a.is_ipv4() != b.is_ipv4() => Ok(Subnets(subnets)),
            _ => invalid("subnets: at most one network of each address family"),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Subnet> {
        self.0.iter().copied()
    }

    /// The gateway that the bridge has its hardware address of.
    pub(super) fn first_gateway(&self) -> IpAddr {
        self.0[0].gateway()
    }

    pub(super) fn has_ipv4(&self) -> bool {
        self.iter().any(Subnet::is_ipv4)
    }

    pub(super) fn has_ipv6(&self) -> bool {
        !self.iter().all(Subnet::is_ipv4)
    }

    /// The gateway of an address: that of its family.
    pub(super) fn gateway_of(&self, address: IpAddr) -> Option<IpAddr> {
        let gateways = self.iter().map(Subnet::gateway);
        gateways
            .into_iter()
            .find(|gateway| gateway.is_ipv4() == address.is_ipv4())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnets(networks: &[&str]) -> Result<Subnets, CniError> {
        let networks: Vec<Cidr> = networks.iter().map(|text| text.parse().unwrap()).collect();
        Subnets::new(&networks)
    }

    #[test]
    fn what_pods_can_have() {
        fn check(network: &str, expected: Result<(&str, &str, &str), &str>) {
            match (subnets(&[network]), expected) {
                (Ok(got), Ok((gateway, first, last))) => {
                    let got = got.0[0];
                    assert_eq!(got.gateway().to_string(), gateway);
                    assert_eq!(got.pod(0).to_string(), first);
                    assert_eq!(got.pod(got.len() - 1).to_string(), last);
                    assert_eq!(got.index(got.pod(0)), Some(0));
                    assert_eq!(got.index(got.gateway()), None);
                }
                (Err(error), Err(why)) => assert!(error.msg.contains(why), "{error}"),
                (got, expected) => panic!("{network}: got {got:?}, expected {expected:?}"),
            }
        }
        check("10.244.0.0/24", Ok(("10.244.0.1", "10.244.0.2", "10.244.0.254")));
        check("10.244.3.77/24", Ok(("10.244.3.1", "10.244.3.2", "10.244.3.254")));
        check("10.0.0.0/30", Ok(("10.0.0.1", "10.0.0.2", "10.0.0.2")));
        check("10.0.0.0/31", Err("prefix length must be"));
        check("fd00::/64", Ok(("fd00::1", "fd00::2", "fd00::10:1")));
        check("fd00::/126", Ok(("fd00::1", "fd00::2", "fd00::3")));
        check("fd00::/127", Err("prefix length must be"));
    }

    #[test]
    fn one_of_each_family() {
        let both = subnets(&["10.244.0.0/24", "fd00::/64"]).unwrap();
        let gateway = |address: &str| both.gateway_of(address.parse().unwrap()).unwrap().to_string();
        assert_eq!(gateway("10.244.0.9"), "10.244.0.1");
        assert_eq!(gateway("fd00::9"), "fd00::1");
        assert!(subnets(&[]).is_err());
        assert!(subnets(&["10.0.0.0/24", "10.0.1.0/24"]).is_err());
    }
}
