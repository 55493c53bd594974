//! Address blocks with their exceptions, of all rules that hold for a pod, cut into ranges that do not overlap: the
//! kernel's sets take no others. What holds for a range is what `combine` makes of the blocks that it lies in. No I/O.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use skiff_meta::net::Cidr;

use super::ports::PortSet;

/// A block of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) cidr: Cidr,
    pub(super) except: Vec<Cidr>,
    pub(super) ports: PortSet,
}

/// Addresses of one family, both ends included, and what holds for each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddressRange<T = PortSet> {
    pub(super) first: IpAddr,
    pub(super) last: IpAddr,
    pub(super) held: T,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(number: u128, ipv4: bool) -> IpAddr {
    if ipv4 {
        Ipv4Addr::from_bits(number as u32).into()
    } else {
        Ipv6Addr::from_bits(number).into()
    }
}

/// The addresses of a block without its exceptions, in order.
fn ranges_of(block: Cidr, except: &[Cidr]) -> Vec<(u128, u128)> {
    let inside = |cidr: &&Cidr| block.overlaps(**cidr);
    let mut except: Vec<Cidr> = except.iter().filter(inside).copied().collect();
    except.sort_by_key(|cidr| number(cidr.address()));
    let last = number(block.last());
    let mut ranges = Vec::new();
    let mut next = Some(number(block.address()));
    for cidr in except {
        let Some(first) = next else { break };
        let (start, end) = (number(cidr.address()), number(cidr.last()));
        if start > first {
            ranges.push((first, start - 1));
        }
        // Of networks that overlap, one lies in the other.
        next = if end < first {
            Some(first)
        } else {
            end.checked_add(1)
        };
    }
    if let Some(first) = next.filter(|first| *first <= last) {
        ranges.push((first, last));
    }
    ranges
}

/// What all blocks together let pass, by ranges of addresses that do not overlap.
pub(super) fn flatten(blocks: &[Block]) -> Vec<AddressRange> {
    let shapes: Vec<(Cidr, &[Cidr])> = blocks
        .iter()
        .map(|block| (block.cidr, block.except.as_slice()))
        .collect();
    flatten_with(&shapes, |active| {
        let mut ports = PortSet::default();
        for index in active {
            ports.add(&blocks[*index].ports);
        }
        (!ports.is_empty()).then_some(ports)
    })
}

/// Cuts networks, each without its exceptions, at their edges. `combine` gets the indexes of those that a range lies in, in
/// order; a range for which it has nothing is left out.
pub(super) fn flatten_with<T: PartialEq>(
    blocks: &[(Cidr, &[Cidr])],
    combine: impl Fn(&mut dyn Iterator<Item = &usize>) -> Option<T>,
) -> Vec<AddressRange<T>> {
    [true, false]
        .into_iter()
        .flat_map(|ipv4| flatten_family(blocks, ipv4, &combine))
        .collect()
}

fn flatten_family<T: PartialEq>(
    blocks: &[(Cidr, &[Cidr])],
    ipv4: bool,
    combine: &impl Fn(&mut dyn Iterator<Item = &usize>) -> Option<T>,
) -> Vec<AddressRange<T>> {
    // What begins and what ends before an address. The end of all addresses needs no entry.
    let mut edges: BTreeMap<u128, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    for (index, (block, except)) in blocks
        .iter()
        .enumerate()
        .filter(|(_, (block, _))| block.is_ipv4() == ipv4)
    {
        for (first, last) in ranges_of(*block, except) {
            edges.entry(first).or_default().0.push(index);
            if let Some(after) = last.checked_add(1) {
                edges.entry(after).or_default().1.push(index);
            }
        }
    }
    let end = if ipv4 { u128::from(u32::MAX) } else { u128::MAX };
    let mut active: BTreeMap<usize, u32> = BTreeMap::new();
    let mut flat: Vec<AddressRange<T>> = Vec::new();
    let mut edges = edges.into_iter().peekable();
    while let Some((first, (begun, ended))) = edges.next() {
        for index in begun {
            *active.entry(index).or_default() += 1;
        }
        for index in ended {
            if let Some(count) = active.get_mut(&index) {
                *count -= 1;
                if *count == 0 {
                    active.remove(&index);
                }
            }
        }
        let Some(held) = combine(&mut active.keys()) else {
            continue;
        };
        let last = edges.peek().map_or(end, |(next, _)| next - 1);
        let (first, last) = (address(first, ipv4), address(last, ipv4));
        match flat.last_mut() {
            Some(before) if before.held == held && number(before.last) + 1 == number(first) => {
                before.last = last
            }
            _ => flat.push(AddressRange { first, last, held }),
        }
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::super::ports::PortRange;
    use super::*;
    use crate::proxy::Protocol;

    fn block(cidr: &str, except: &[&str], port: Option<u16>) -> Block {
        Block {
            cidr: cidr.parse().unwrap(),
            except: except.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            ports: port.map_or(PortSet::All, |port| {
                [PortRange::one(Protocol::Tcp, port)].into_iter().collect()
            }),
        }
    }

    fn check(blocks: &[Block], expected: &[&str]) {
        let flat = flatten(blocks);
        let shown: Vec<String> = flat
            .iter()
            .map(|range| format!("{}-{} {}", range.first, range.last, range.held.boxes().len()))
            .collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn exceptions_are_cut_out() {
        check(&[block("0.0.0.0/0", &[], None)], &["0.0.0.0-255.255.255.255 1"]);
        check(
            &[block(
                "0.0.0.0/0",
                &["0.0.0.0/8", "10.0.0.0/8", "10.1.0.0/16", "255.0.0.0/8"],
                None,
            )],
            &["1.0.0.0-9.255.255.255 1", "11.0.0.0-254.255.255.255 1"],
        );
        check(&[block("10.0.0.0/24", &["10.0.0.0/24"], None)], &[]);
        check(&[block("10.0.0.0/24", &["10.0.0.0/8"], None)], &[]);
        check(
            &[block("::/0", &["ffff::/16"], None)],
            &["::-fffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff 1"],
        );
    }

    #[test]
    fn overlapping_blocks_are_cut_at_their_edges() {
        check(
            &[
                block("10.0.0.0/8", &[], Some(80)),
                block("10.1.0.0/16", &[], Some(443)),
                block("10.0.0.0/8", &["10.1.0.0/16"], Some(443)),
                block("fd00::/8", &[], None),
            ],
            &[
                "10.0.0.0-10.255.255.255 2",
                "fd00::-fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 1",
            ],
        );
        check(
            &[
                block("10.0.0.0/8", &[], Some(80)),
                block("10.1.0.0/16", &[], None),
            ],
            &[
                "10.0.0.0-10.0.255.255 1",
                "10.1.0.0-10.1.255.255 1",
                "10.2.0.0-10.255.255.255 1",
            ],
        );
    }
}
