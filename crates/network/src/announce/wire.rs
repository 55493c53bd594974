//! ARP and neighbour discovery packets: questions who has an address, announcements of an address, and what packets of
//! others say. Pure: bytes in, bytes out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A hardware address of an Ethernet device.
pub(super) type Hardware = [u8; 6];

pub(super) const ETHERTYPE_ARP: u16 = 0x0806;
pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;

const BROADCAST: Hardware = [0xff; 6];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

const ARP_LENGTH: usize = 28;
const ARP_REQUEST: u8 = 1;
const ARP_REPLY: u8 = 2;

const ICMPV6: u8 = 58;
const IPV6_HEADER: usize = 40;
/// Neighbour discovery packets that passed a router are no neighbour's.
const HOP_LIMIT: u8 = 255;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const OVERRIDE_FLAG: u8 = 0x20;
const SOURCE_HARDWARE_OPTION: u8 = 1;
const TARGET_HARDWARE_OPTION: u8 = 2;

/// What is sent on a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) ethertype: u16,
    pub(super) to: Hardware,
    pub(super) payload: Vec<u8>,
}

/// Asks who has the address: everybody, or the one who had it last. `source` is an address of the asker on the link, if it
/// has one of that family.
pub(super) fn question(
    address: IpAddr,
    own: Hardware,
    source: Option<Ipv6Addr>,
    to: Option<Hardware>,
) -> Frame {
    match address {
        // Without a sender address, as RFC 5227 has it: nobody learns anything from the question.
        IpAddr::V4(address) => Frame {
            ethertype: ETHERTYPE_ARP,
            to: to.unwrap_or(BROADCAST),
            payload: arp(ARP_REQUEST, own, Ipv4Addr::UNSPECIFIED, [0; 6], address),
        },
        IpAddr::V6(address) => {
            let group = solicited_node(address);
            let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
            message.extend(address.octets());
            if source.is_some() {
                message.extend([SOURCE_HARDWARE_OPTION, 1]);
                message.extend(own);
            }
            Frame {
                ethertype: ETHERTYPE_IPV6,
                to: to.unwrap_or(multicast(group)),
                payload: icmpv6(source.unwrap_or(Ipv6Addr::UNSPECIFIED), group, message),
            }
        }
    }
}

/// Tells everybody on the link that the address is here: a gratuitous ARP request and reply, since hosts heed the one or
/// the other, or an unsolicited neighbour advertisement.
pub(super) fn announcement(address: IpAddr, own: Hardware, source: Option<Ipv6Addr>) -> Vec<Frame> {
    match address {
        IpAddr::V4(address) => [(ARP_REQUEST, [0; 6]), (ARP_REPLY, own)]
            .map(|(operation, target)| Frame {
                ethertype: ETHERTYPE_ARP,
                to: BROADCAST,
                payload: arp(operation, own, address, target, address),
            })
            .to_vec(),
        IpAddr::V6(address) => {
            let mut message = vec![ADVERTISEMENT, 0, 0, 0, OVERRIDE_FLAG, 0, 0, 0];
            message.extend(address.octets());
            message.extend([TARGET_HARDWARE_OPTION, 1]);
            message.extend(own);
            vec![Frame {
                ethertype: ETHERTYPE_IPV6,
                to: multicast(ALL_NODES),
                payload: icmpv6(source.unwrap_or(address), ALL_NODES, message),
            }]
        }
    }
}

/// Who says that it has which address, if the packet says that.
pub(super) fn claim(ethertype: u16, payload: &[u8], from: Hardware) -> Option<(IpAddr, Hardware)> {
    match ethertype {
        ETHERTYPE_ARP => {
            let packet = payload.get(..ARP_LENGTH)?;
            if packet[..6] != [0, 1, 8, 0, 6, 4] {
                return None;
            }
            let hardware: Hardware = packet[8..14].try_into().ok()?;
            let octets: [u8; 4] = packet[14..18].try_into().ok()?;
            let target: [u8; 4] = packet[24..28].try_into().ok()?;
            // A request whose sender asks for another address is no announcement, but its sender has its own.
            let said = Ipv4Addr::from(octets);
            let counts = packet[7] == ARP_REPLY || octets == target;
            (counts && !said.is_unspecified()).then_some((said.into(), hardware))
        }
        ETHERTYPE_IPV6 => {
            let header = payload.get(..IPV6_HEADER)?;
            let message = payload.get(IPV6_HEADER..IPV6_HEADER + 24)?;
            if header[6] != ICMPV6 || header[7] != HOP_LIMIT || message[0] != ADVERTISEMENT || message[1] != 0
            {
                return None;
            }
            let target: [u8; 16] = message[8..24].try_into().ok()?;
            let option = payload.get(IPV6_HEADER + 24..IPV6_HEADER + 32);
            let hardware = option
                .filter(|option| option[..2] == [TARGET_HARDWARE_OPTION, 1])
                .and_then(|option| option[2..].try_into().ok());
            Some((Ipv6Addr::from(target).into(), hardware.unwrap_or(from)))
        }
        _ => None,
    }
}

fn arp(
    operation: u8,
    own: Hardware,
    sender: Ipv4Addr,
    target_hardware: Hardware,
    target: Ipv4Addr,
) -> Vec<u8> {
    // Ethernet, IPv4, and the lengths of their addresses.
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, operation];
    packet.extend(own);
    packet.extend(sender.octets());
    packet.extend(target_hardware);
    packet.extend(target.octets());
    packet
}

fn icmpv6(source: Ipv6Addr, destination: Ipv6Addr, mut message: Vec<u8>) -> Vec<u8> {
    let length = u16::try_from(message.len()).unwrap_or(u16::MAX);
    let pseudo = source.octets().into_iter().chain(destination.octets());
    let pseudo = pseudo
        .chain([0, 0])
        .chain(length.to_be_bytes())
        .chain([0, 0, 0, ICMPV6]);
    let sum = checksum(pseudo.chain(message.iter().copied()));
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([ICMPV6, HOP_LIMIT]);
    packet.extend(source.octets());
    packet.extend(destination.octets());
    packet.extend(message);
    packet
}

fn checksum(bytes: impl Iterator<Item = u8>) -> u16 {
    let mut sum: u32 = 0;
    for (place, byte) in bytes.enumerate() {
        sum += if place % 2 == 0 {
            u32::from(byte) << 8
        } else {
            byte.into()
        };
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let octets = address.octets();
    let last = [octets[13], octets[14], octets[15]];
    Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(last[0]),
        u16::from_be_bytes([last[1], last[2]]),
    )
}

fn multicast(group: Ipv6Addr) -> Hardware {
    let octets = group.octets();
    [0x33, 0x33, octets[12], octets[13], octets[14], octets[15]]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Hardware = [2, 0, 0, 0, 0, 7];

    #[test]
    fn announcements_are_claims_and_questions_are_not() {
        let link_local: Ipv6Addr = "fe80::7".parse().unwrap();
        for address in ["192.0.2.9", "2001:db8::9"] {
            let address: IpAddr = address.parse().unwrap();
            let frames = announcement(address, OWN, Some(link_local));
            assert!(!frames.is_empty());
            for frame in frames {
                let told = claim(frame.ethertype, &frame.payload, OWN);
                assert_eq!(told, Some((address, OWN)));
            }
            for to in [None, Some([2, 0, 0, 0, 0, 8])] {
                let asked = question(address, OWN, Some(link_local), to);
                assert_eq!(claim(asked.ethertype, &asked.payload, OWN), None, "{address}");
            }
        }
    }

    #[test]
    fn packets_are_as_the_standards_have_them() {
        let frame = question("192.0.2.9".parse().unwrap(), OWN, None, None);
        assert_eq!(frame.to, [0xff; 6]);
        let expected = [
            0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 192, 0, 2, 9,
        ];
        assert_eq!(frame.payload, expected);
        let frame = question("2001:db8::1:2".parse().unwrap(), OWN, None, None);
        assert_eq!(frame.to, [0x33, 0x33, 0xff, 1, 0, 2]);
        let group: Ipv6Addr = "ff02::1:ff01:2".parse().unwrap();
        assert_eq!(frame.payload[24..40], group.octets());
        // A sum over what a checksum covers, with itself, has all bits.
        let (header, message) = frame.payload.split_at(IPV6_HEADER);
        let pseudo = header[8..40].iter().chain(&[0, 0]).chain(&header[4..6]);
        let pseudo = pseudo.chain(&[0, 0, 0, ICMPV6]).chain(message);
        assert_eq!(checksum(pseudo.copied()), 0);
    }

    #[test]
    fn what_is_forged_or_cut_off_says_nothing() {
        let frame = &announcement("2001:db8::9".parse().unwrap(), OWN, None)[0];
        let mut routed = frame.payload.clone();
        routed[7] = 254;
        assert_eq!(claim(ETHERTYPE_IPV6, &routed, OWN), None);
        for length in 0..frame.payload.len() - 8 {
            assert_eq!(claim(ETHERTYPE_IPV6, &frame.payload[..length], OWN), None);
        }
        assert_eq!(claim(ETHERTYPE_ARP, &[0; 27], OWN), None);
        assert_eq!(claim(ETHERTYPE_ARP, &[0; 28], OWN), None);
        // A host's question for another address.
        let asks = arp(
            ARP_REQUEST,
            OWN,
            [192, 0, 2, 1].into(),
            [0; 6],
            [192, 0, 2, 9].into(),
        );
        assert_eq!(claim(ETHERTYPE_ARP, &asks, OWN), None);
    }
}
