//! Cluster IPs of one range: which are taken, and which to give next. In memory; the services
//! themselves are the record, and the allocator is filled from them at start.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Instant;

use parking_lot::Mutex;

use super::ledger::Ledger;

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

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IpError {
    #[error("provided IP is already allocated")]
    Allocated,
    #[error("the provided IP ({0}) is not in the valid range. The range of valid IPs is {1}")]
    NotInRange(IpAddr, Cidr),
    #[error("range is full")]
    Full,
}

pub struct IpAllocator {
    cidr: Cidr,
    /// Leaf lock. Numbers counted from 1.
    taken: Mutex<Ledger<u128>>,
}

impl IpAllocator {
    pub fn new(cidr: Cidr) -> IpAllocator {
        IpAllocator {
            cidr,
            taken: Mutex::default(),
        }
    }

    pub fn cidr(&self) -> Cidr {
        self.cidr
    }

    pub fn allocate(&self, address: IpAddr) -> Result<(), IpError> {
        let n = self
            .number(address)
            .ok_or(IpError::NotInRange(address, self.cidr))?;
        if self.taken.lock().take(n) {
            Ok(())
        } else {
            Err(IpError::Allocated)
        }
    }

    /// Draws a free address, from the upper part of the range first: the lower part is left to those
    /// who choose their address themselves.
    pub fn allocate_next(&self) -> Result<IpAddr, IpError> {
        let usable = self.cidr.usable();
        let lower = (usable / 16).clamp(16.min(usable), 256);
        let mut taken = self.taken.lock();
        for (from, to) in [(lower + 1, usable), (1, lower)] {
            if from > to {
                continue;
            }
            let size = to - from + 1;
            let start = rand::random_range(0..size);
            // Every number once at most: with k taken, k + 1 steps are enough.
            for step in 0..size.min(taken.len() as u128 + 1) {
                let n = from + (start + step) % size;
                if taken.take(n) {
                    return Ok(self.cidr.address(n));
                }
            }
        }
        Err(IpError::Full)
    }

    pub fn release(&self, address: IpAddr) {
        if let Some(n) = self.number(address) {
            self.taken.lock().release(n);
        }
    }

    /// The write that took the address is in the store.
    pub(super) fn hold(&self, address: IpAddr) {
        if let Some(n) = self.number(address) {
            self.taken.lock().hold(n);
        }
    }

    /// Whether the write that took the address is in the store is unknown.
    pub(super) fn doubt(&self, address: IpAddr, now: Instant) {
        if let Some(n) = self.number(address) {
            self.taken.lock().doubt(n, now);
        }
    }

    pub(super) fn has_overdue(&self, now: Instant) -> bool {
        self.taken.lock().has_overdue(now)
    }

    pub(super) fn settled(&self, now: Instant) -> Vec<(u128, u64)> {
        self.taken.lock().settled(now)
    }

    /// Frees those of `settled` that are not `held`; how many.
    pub(super) fn free_unheld(&self, settled: Vec<(u128, u64)>, held: &HashSet<IpAddr>) -> usize {
        let is_held = |n| held.contains(&self.cidr.address(n));
        self.taken.lock().free_unheld(settled, is_held)
    }

    fn number(&self, address: IpAddr) -> Option<u128> {
        let n = self
            .cidr
            .contains(address)
            .then(|| number_of(address) - number_of(self.cidr.base))?;
        (1..=self.cidr.usable()).contains(&n).then_some(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_is_given_once() {
        let allocator = IpAllocator::new(Cidr::parse("10.0.0.0/27").expect("a CIDR"));
        let mut seen = HashSet::new();
        for _ in 0..30 {
            let address = allocator.allocate_next().expect("room");
            assert!(allocator.cidr().contains(address));
            assert!(seen.insert(address));
        }
        assert_eq!(allocator.allocate_next(), Err(IpError::Full));
        let one = *seen.iter().next().expect("some");
        allocator.release(one);
        assert_eq!(allocator.allocate_next(), Ok(one));
        assert_eq!(allocator.allocate(one), Err(IpError::Allocated));
    }

    #[test]
    fn bounds() {
        let cidr = Cidr::parse("10.96.0.1/12").expect("a CIDR");
        assert_eq!(cidr.to_string(), "10.96.0.0/12");
        let allocator = IpAllocator::new(cidr);
        for (address, fits) in [
            ("10.96.0.0", false),
            ("10.96.0.1", true),
            ("10.111.255.255", false),
            ("10.112.0.1", false),
            ("fd00::1", false),
        ] {
            assert_eq!(
                allocator.allocate(address.parse().expect("an address")).is_ok(),
                fits,
                "{address}"
            );
        }
        assert!(Cidr::parse("10.0.0.0/33").is_err());
        let v6 = IpAllocator::new(Cidr::parse("fd00::/108").expect("a CIDR"));
        assert!(v6.allocate_next().expect("room").is_ipv6());
    }
}
