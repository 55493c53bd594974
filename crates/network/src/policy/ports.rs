//! Sets of ports of several protocols, in one canonical form: equal sets are equal values. No I/O.

use crate::proxy::Protocol;

/// Ports of one protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PortRange {
    pub(super) protocol: Protocol,
    pub(super) first: u16,
    pub(super) last: u16,
}

impl PortRange {
    pub(super) fn one(protocol: Protocol, port: u16) -> PortRange {
        PortRange {
            protocol,
            first: port,
            last: port,
        }
    }
}

/// What a rule lets pass: everything of every protocol, or these ports.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum PortSet {
    All,
    /// Sorted, and with a gap between any two of a protocol.
    Ranges(Vec<PortRange>),
}

impl Default for PortSet {
    fn default() -> Self {
        PortSet::Ranges(Vec::new())
    }
}

impl FromIterator<PortRange> for PortSet {
    fn from_iter<I: IntoIterator<Item = PortRange>>(ranges: I) -> Self {
        let mut ranges: Vec<PortRange> = ranges.into_iter().collect();
        ranges.sort();
        let mut merged: Vec<PortRange> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last)
                    if last.protocol == range.protocol
                        && u32::from(range.first) <= u32::from(last.last) + 1 =>
                {
                    last.last = last.last.max(range.last);
                }
                _ => merged.push(range),
            }
        }
        PortSet::Ranges(merged)
    }
}

impl PortSet {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, PortSet::Ranges(ranges) if ranges.is_empty())
    }

    pub(super) fn add(&mut self, other: &PortSet) {
        *self = match (std::mem::take(self), other) {
            (PortSet::All, _) | (_, PortSet::All) => PortSet::All,
            (PortSet::Ranges(own), PortSet::Ranges(other)) => {
                own.into_iter().chain(other.iter().copied()).collect()
            }
        };
    }

    /// What both have.
    pub(super) fn within(&self, limits: &[PortRange]) -> PortSet {
        let PortSet::Ranges(ranges) = self else {
            return limits.iter().copied().collect();
        };
        let overlap = |range: &PortRange| {
            let range = *range;
            let limits = limits
                .iter()
                .filter(move |limit| limit.protocol == range.protocol);
            limits.filter_map(move |limit| {
                let (first, last) = (range.first.max(limit.first), range.last.min(limit.last));
                (first <= last).then_some(PortRange { first, last, ..range })
            })
        };
        ranges.iter().flat_map(overlap).collect()
    }

    /// The set as the kernel's look-ups have it: no two overlap.
    pub(super) fn boxes(&self) -> Vec<PortBox> {
        match self {
            PortSet::All => vec![PortBox::ALL],
            PortSet::Ranges(ranges) => ranges
                .iter()
                .map(|range| PortBox {
                    protocols: (range.protocol.number(), range.protocol.number()),
                    ports: (range.first, range.last),
                })
                .collect(),
        }
    }
}

/// A range of protocols and of ports, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortBox {
    pub(super) protocols: (u8, u8),
    pub(super) ports: (u16, u16),
}

impl PortBox {
    /// Everything, also what has no ports.
    pub(super) const ALL: PortBox = PortBox {
        protocols: (0, u8::MAX),
        ports: (0, u16::MAX),
    };
    /// Before and after all others in their order.
    pub(super) const LEAST: PortBox = PortBox {
        protocols: (0, 0),
        ports: (0, 0),
    };
    pub(super) const GREATEST: PortBox = PortBox {
        protocols: (u8::MAX, u8::MAX),
        ports: (u16::MAX, u16::MAX),
    };

    #[cfg(test)]
    pub(super) fn contains(self, protocol: u8, port: u16) -> bool {
        (self.protocols.0..=self.protocols.1).contains(&protocol)
            && (self.ports.0..=self.ports.1).contains(&port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(first: u16, last: u16) -> PortRange {
        PortRange {
            protocol: Protocol::Tcp,
            first,
            last,
        }
    }

    #[test]
    fn equal_sets_are_equal_values() {
        let set = |ranges: &[PortRange]| ranges.iter().copied().collect::<PortSet>();
        assert_eq!(set(&[tcp(5, 9), tcp(1, 4)]), set(&[tcp(1, 9)]));
        assert_eq!(set(&[tcp(1, 9), tcp(3, 4)]), set(&[tcp(1, 9)]));
        assert_eq!(
            set(&[tcp(0, u16::MAX), tcp(u16::MAX, u16::MAX)]),
            set(&[tcp(0, u16::MAX)])
        );
        assert_ne!(set(&[tcp(1, 4), tcp(6, 9)]), set(&[tcp(1, 9)]));
        let udp = PortRange::one(Protocol::Udp, 5);
        let mut all = set(&[tcp(1, 4), udp]);
        assert_eq!(all.boxes().len(), 2);
        all.add(&PortSet::All);
        assert_eq!(all, PortSet::All);
        assert!(PortSet::default().is_empty());
    }

    #[test]
    fn limits_cut() {
        let limits = [
            PortRange::one(Protocol::Tcp, 53),
            PortRange::one(Protocol::Udp, 53),
        ];
        let within = |set: PortSet| set.within(&limits).boxes().len();
        assert_eq!(within(PortSet::All), 2);
        assert_eq!(within([tcp(1, 100)].into_iter().collect()), 1);
        assert_eq!(within([tcp(80, 80)].into_iter().collect()), 0);
    }
}
