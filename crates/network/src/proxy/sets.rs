//! The maps and sets of the table, what their elements look like to the kernel, and the ways that packets take.

use std::net::IpAddr;

use nlink::netlink::nftables::SetElement;

use super::elements::{Element, Entry, Front, Slot, Steer, Value};

/// Numbers of ours in a packet's priority have this first byte.
pub(super) const OURS: u32 = 0x7e00_0000;
pub(super) const OURS_MASK: u32 = 0xff00_0000;
/// What has no chain to pick endpoints.
pub(super) const REJECT_CODE: u32 = OURS | 1;
pub(super) const DROP_CODE: u32 = OURS | 2;
const FIRST_CODE: u32 = OURS | 16;

/// The maps and sets of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKind {
    ClusterIps,
    PoolIps,
    Own,
    Sources,
    HostPorts,
    NodePortAddresses,
    Fronts(Origin),
    Entries(Origin),
    Checks,
    Endpoints(Origin, Slot),
    Affinity(Origin, Slot),
}

/// The map that a packet was found in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    Services,
    NodePorts,
}

pub(super) const ORIGINS: [Origin; 2] = [Origin::Services, Origin::NodePorts];

/// A chain that steers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Way {
    pub ipv4: bool,
    pub origin: Origin,
    pub steer: Steer,
}

impl Origin {
    fn of(front: &Front) -> Origin {
        match front {
            Front::Service(..) => Origin::Services,
            Front::NodePort(..) => Origin::NodePorts,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Origin::Services => "services",
            Origin::NodePorts => "node-ports",
        }
    }
}

fn slot_name(slot: Slot) -> &'static str {
    match slot {
        Slot::First => "",
        Slot::Second => "-for-inside",
    }
}

impl SetKind {
    /// The kernel adds and removes elements itself.
    pub fn is_dynamic(self) -> bool {
        matches!(self, SetKind::Affinity(..))
    }

    pub fn name(self) -> String {
        match self {
            SetKind::ClusterIps => "cluster-ips".to_owned(),
            SetKind::PoolIps => "pool-ips".to_owned(),
            SetKind::Own => "own".to_owned(),
            SetKind::Sources => "sources".to_owned(),
            SetKind::HostPorts => "host-ports".to_owned(),
            SetKind::NodePortAddresses => "node-port-addresses".to_owned(),
            SetKind::Checks => "checks".to_owned(),
            SetKind::Fronts(origin) => origin.name().to_owned(),
            SetKind::Entries(origin) => format!("{}-entries", origin.name()),
            SetKind::Endpoints(origin, slot) => format!("{}-endpoints{}", origin.name(), slot_name(slot)),
            SetKind::Affinity(origin, slot) => format!("{}-affinity{}", origin.name(), slot_name(slot)),
        }
    }
}

impl Way {
    /// The way of an element's packets, if it has a chain.
    pub fn of(element: Element, value: Value) -> Option<Way> {
        let (Element::Front(front), Value::Steer(steer)) = (element, value) else {
            return None;
        };
        let way = Way {
            ipv4: front.is_ipv4(),
            origin: Origin::of(&front),
            steer,
        };
        way.fixed_code().is_none().then_some(way)
    }

    /// The number of what needs no chain.
    fn fixed_code(&self) -> Option<u32> {
        match self.steer.entry {
            Entry::Reject => Some(REJECT_CODE),
            Entry::Drop => Some(DROP_CODE),
            _ => None,
        }
    }

    /// The number of the n-th chain.
    pub fn code(n: usize) -> u32 {
        FIRST_CODE + n as u32
    }

    pub fn name(&self) -> String {
        let entry = match self.steer.entry {
            Entry::Inside => "inside",
            Entry::Outside => "outside",
            Entry::Local => "local",
            Entry::LimitedOutside => "limited-outside",
            Entry::LimitedLocal => "limited-local",
            Entry::Reject => "reject",
            Entry::Drop => "drop",
        };
        let mut name = format!("{}-{entry}-{}", self.origin.name(), self.steer.first.count);
        if self.steer.second.count > 0 {
            name += &format!("-or-{}", self.steer.second.count);
        }
        let affinity = self.steer.first.affinity.max(self.steer.second.affinity);
        if affinity > 0 {
            name += &format!("-{affinity}s");
        }
        name
    }
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

pub(super) fn one_address(address: IpAddr) -> SetElement {
    SetElement::new(octets(address))
}

fn front_key(front: Front) -> Vec<SetElement> {
    match front {
        Front::Service(address, protocol, port) => vec![
            one_address(address),
            SetElement::inet_proto(protocol.number()),
            SetElement::port(port),
        ],
        Front::NodePort(_, protocol, port) => {
            vec![SetElement::inet_proto(protocol.number()), SetElement::port(port)]
        }
    }
}

/// The element and its set, with its value if that is given. `code` has the numbers of ways.
pub fn nft_element(
    element: Element,
    value: Option<Value>,
    code: impl Fn(&Way) -> u32,
) -> (SetKind, SetElement) {
    let (kind, nft) = match element {
        Element::ClusterIp(address) => (SetKind::ClusterIps, one_address(address)),
        Element::PoolIp(address) => (SetKind::PoolIps, one_address(address)),
        Element::Front(front) => (
            SetKind::Fronts(Origin::of(&front)),
            SetElement::concat(front_key(front)),
        ),
        Element::Endpoint(front, slot, number) => {
            let key = front_key(front)
                .into_iter()
                .chain([SetElement::mark(OURS + number)]);
            (
                SetKind::Endpoints(Origin::of(&front), slot),
                SetElement::concat(key),
            )
        }
        Element::Own(address) => (
            SetKind::Own,
            SetElement::concat([one_address(address), one_address(address)]),
        ),
        Element::Source(address, protocol, port, range) => {
            let range = SetElement::range(octets(range.address()), octets(range.last()));
            let key = front_key(Front::Service(address, protocol, port));
            (
                SetKind::Sources,
                SetElement::concat(key.into_iter().chain([range])),
            )
        }
    };
    let nft = match value {
        None | Some(Value::Member) => nft,
        Some(Value::Steer(steer)) => {
            let origin = match kind {
                SetKind::Fronts(origin) => origin,
                _ => Origin::Services,
            };
            let way = Way {
                ipv4: element.is_ipv4(),
                origin,
                steer,
            };
            nft.value(SetElement::mark(way.fixed_code().unwrap_or_else(|| code(&way))))
        }
        Some(Value::Target((address, port))) => {
            nft.value(SetElement::concat([one_address(address), SetElement::port(port)]))
        }
    };
    (kind, nft)
}
