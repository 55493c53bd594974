//! What services are in the kernel: elements of a fixed number of maps and sets. A service that comes, goes or
//! changes is some elements, never a chain, so that a change costs what has changed: the kernel looks at all chains
//! of a table again when a rule or a verdict is added, and at nothing else for an element of other sorts.

use std::fmt;
use std::net::IpAddr;

use skiff_meta::net::Cidr;

use super::endpoints::Target;
use super::objects::Protocol;

/// The number of endpoints that one service port uses at most.
pub const MAX_ENDPOINTS: usize = 1 << 15;

/// Where traffic comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Front {
    Service(IpAddr, Protocol, u16),
    /// All addresses of the machine; true for IPv4.
    NodePort(bool, Protocol, u16),
}

impl Front {
    pub fn is_ipv4(&self) -> bool {
        match self {
            Front::Service(address, ..) => address.is_ipv4(),
            Front::NodePort(ipv4, ..) => *ipv4,
        }
    }
}

/// Which endpoints of a front: the usual ones, or those for who is inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Slot {
    First,
    Second,
}

pub const SLOTS: [Slot; 2] = [Slot::First, Slot::Second];

/// An element of a map or set, which also says which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// An address that belongs to a service.
    ClusterIp(IpAddr),
    /// An address of the load balancer's pool, which is not the machine's even if it is announced here.
    PoolIp(IpAddr),
    /// With a [`Steer`].
    Front(Front),
    /// An endpoint by its number.
    Endpoint(Front, Slot, u32),
    /// An address of this node's pods, which may reach itself by a service.
    Own(IpAddr),
    /// Who may use the address and port of a load balancer.
    Source(IpAddr, Protocol, u16, Cidr),
}

impl Element {
    pub fn is_ipv4(&self) -> bool {
        match self {
            Element::Front(front) | Element::Endpoint(front, ..) => front.is_ipv4(),
            Element::ClusterIp(address)
            | Element::PoolIp(address)
            | Element::Own(address)
            | Element::Source(address, ..) => address.is_ipv4(),
        }
    }
}

/// What an element leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// It is in a set.
    Member,
    Steer(Steer),
    Target(Target),
}

/// What happens to the packets of a front. Fronts that need the same share a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Steer {
    pub entry: Entry,
    pub first: How,
    /// For [`Entry::Local`]: for who is inside.
    pub second: How,
}

/// What happens to a packet before an endpoint is picked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// It goes to an endpoint.
    Inside,
    /// It comes from outside, and the answer must come back this way.
    Outside,
    /// It comes from outside, goes to endpoints of this node alone and keeps its source. Pods and the node itself
    /// may go anywhere.
    Local,
    /// As `Outside` and `Local`, from certain sources only.
    LimitedOutside,
    LimitedLocal,
    /// There is no endpoint: refused.
    Reject,
    /// There is none on this node, and another node might still answer.
    Drop,
}

/// How an endpoint is picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct How {
    /// Of how many; 0: there are none.
    pub count: u32,
    /// For how many seconds a client stays with its endpoint; 0: not at all.
    pub affinity: u32,
}

impl Steer {
    pub fn to(entry: Entry, first: How) -> Steer {
        Steer {
            entry,
            first,
            second: How::default(),
        }
    }

    pub fn none(entry: Entry) -> Steer {
        Steer::to(entry, How::default())
    }
}

impl fmt::Display for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Front::Service(address, protocol, port) => {
                write!(f, "{address} . {} . {port}", protocol.name())
            }
            Front::NodePort(ipv4, protocol, port) => {
                let family = if *ipv4 { "ip" } else { "ip6" };
                write!(f, "{family} . {} . {port}", protocol.name())
            }
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::ClusterIp(address) => write!(f, "cluster-ip {address}"),
            Element::PoolIp(address) => write!(f, "pool-ip {address}"),
            Element::Front(front) => write!(f, "front {front}"),
            Element::Endpoint(front, Slot::First, index) => write!(f, "endpoint {front} . {index}"),
            Element::Endpoint(front, Slot::Second, index) => {
                write!(f, "endpoint for inside {front} . {index}")
            }
            Element::Own(address) => write!(f, "own {address}"),
            Element::Source(address, protocol, port, range) => {
                write!(f, "source {address} . {} . {port} . {range}", protocol.name())
            }
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Member => Ok(()),
            Value::Target((address, port)) => write!(f, " : {address} . {port}"),
            Value::Steer(steer) => {
                write!(f, " : {:?}", steer.entry)?;
                for how in [steer.first, steer.second] {
                    if how.count > 0 {
                        write!(f, " {}", how.count)?;
                    }
                    if how.affinity > 0 {
                        write!(f, " for {}s", how.affinity)?;
                    }
                }
                Ok(())
            }
        }
    }
}
