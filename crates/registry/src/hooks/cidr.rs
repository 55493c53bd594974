//! A range of service addresses, and which of them to try first.

use std::net::IpAddr;

/// A CIDR, as `10.96.0.0/12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    base: IpAddr,
    prefix: u8,
}

/// A CIDR that cannot be read, and why.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid CIDR address: {0}")]
pub struct BadCidr(pub String);

impl Cidr {
    pub fn parse(text: &str) -> Result<Cidr, BadCidr> {
        let bad = || BadCidr(text.to_string());
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let prefix: u8 = prefix.parse().map_err(|_| bad())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        if prefix > bits {
            return Err(bad());
        }
        let host_bits = u32::from(bits - prefix);
        let number = number_of(address);
        let masked = if host_bits >= 128 {
            0
        } else {
            number >> host_bits << host_bits
        };
        Ok(Cidr {
            base: address_of(masked, address.is_ipv4()),
            prefix,
        })
    }

    pub fn is_ipv4(&self) -> bool {
        self.base.is_ipv4()
    }

    /// How many addresses there are, without the network address, and without IPv4's broadcast.
    fn usable(&self) -> u128 {
        let host_bits = if self.is_ipv4() { 32 } else { 128 } - u32::from(self.prefix);
        // Upstream hands out at most 2^64 addresses of an IPv6 range.
        let size = 1u128 << host_bits.min(64);
        size.saturating_sub(if self.is_ipv4() { 2 } else { 1 })
    }

    /// How many addresses of the lower end are left to those who choose their address themselves, as long as there are
    /// others.
    fn reserved(&self) -> u128 {
        let host_bits = if self.is_ipv4() { 32 } else { 128 } - u32::from(self.prefix);
        let size = 1u128 << host_bits.min(64);
        // COMPAT: upstream's numbers.
        if size <= 16 { 0 } else { (size / 16).clamp(16, 256) }
    }

    /// The addresses in the order in which they are tried: the upper part first, each part from a random place on.
    pub fn candidates(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let (cidr, usable) = (*self, self.usable());
        let reserved = self.reserved().min(usable);
        [(reserved, usable - reserved), (0, reserved)]
            .into_iter()
            .filter(|(_, size)| *size > 0)
            .flat_map(move |(offset, size)| {
                let start = rand::random_range(0..size);
                (0..size).map(move |step| cidr.address(1 + offset + (start + step) % size))
            })
    }

    /// The address of the network itself.
    pub fn network(&self) -> IpAddr {
        self.base
    }

    /// Whether services may have the address.
    pub fn hands_out(&self, address: IpAddr) -> bool {
        self.contains(address) && (1..=self.usable()).contains(&(number_of(address) - number_of(self.base)))
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.is_ipv4() && {
            let host_bits = if self.is_ipv4() { 32 } else { 128 } - u32::from(self.prefix);
            host_bits >= 128 || number_of(address) >> host_bits == number_of(self.base) >> host_bits
        }
    }

    /// The n-th address, counted from 1.
    pub fn address(&self, n: u128) -> IpAddr {
        address_of(number_of(self.base) + n, self.is_ipv4())
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

fn number_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

fn address_of(number: u128, v4: bool) -> IpAddr {
    if v4 {
        IpAddr::V4((number as u32).into())
    } else {
        IpAddr::V6(number.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_address_is_tried_once_and_the_lower_ones_last() {
        let check = |cidr: &str, reserved: usize, usable: usize| {
            let cidr = Cidr::parse(cidr).expect("a CIDR");
            let tried: Vec<IpAddr> = cidr.candidates().collect();
            assert_eq!(tried.len(), usable);
            assert_eq!(tried.iter().collect::<HashSet<_>>().len(), usable);
            assert!(tried.iter().all(|address| cidr.hands_out(*address)));
            let lower: HashSet<IpAddr> = (1..=reserved as u128).map(|n| cidr.address(n)).collect();
            let last: HashSet<IpAddr> = tried[usable - reserved..].iter().copied().collect();
            assert_eq!(last, lower);
        };
        check("10.0.0.0/28", 0, 14);
        check("10.0.0.0/27", 16, 30);
        check("10.0.0.0/16", 256, 65534);
        check("fd00::/112", 256, 65535);
        let large = Cidr::parse("fd00::/64").expect("a CIDR");
        assert!(large.candidates().next().is_some_and(|address| address.is_ipv6()));
    }

    #[test]
    fn bounds() {
        let cidr = Cidr::parse("10.96.0.1/12").expect("a CIDR");
        assert_eq!(cidr.to_string(), "10.96.0.0/12");
        for (address, fits) in [
            ("10.96.0.0", false),
            ("10.96.0.1", true),
            ("10.111.255.255", false),
            ("10.112.0.1", false),
            ("fd00::1", false),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(cidr.hands_out(address), fits, "{address}");
        }
        assert!(Cidr::parse("10.0.0.0/33").is_err());
    }
}
