//! What the kernel would say to one connection: for `skiff net check`, which follows the maps as a packet does.

use std::net::IpAddr;

use nlink::netlink::nftables::{SetElement, SetElementData, Verdict};
use nlink::netlink::{Connection, Nftables};

use super::table::{FAMILY, SetKind, is_class, octets};
use super::{Direction, Error};
use crate::proxy::Protocol;

/// The kernel's answer, with the chain that gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelVerdict {
    /// There is no table: nothing is enforced here.
    NoTable,
    /// No pod of this node is known to have the address: nothing passes.
    UnknownPod,
    /// No policy selects the pod.
    Open,
    Allowed(String),
    Denied(String),
}

/// A connection, as the maps see it.
#[derive(Debug, Clone, Copy)]
pub struct Packet {
    pub direction: Direction,
    /// An address of this node.
    pub pod: IpAddr,
    pub peer: IpAddr,
    pub protocol: Protocol,
    pub port: u16,
}

/// Whether the pod may talk with its peer.
pub async fn look_up(table: &str, packet: Packet) -> Result<KernelVerdict, Error> {
    let kernel = Kernel {
        table,
        connection: Connection::<Nftables>::new()?,
        packet,
    };
    let (direction, ipv4) = (packet.direction, packet.pod.is_ipv4());
    let Some(isolated) = kernel.list(SetKind::Isolated(direction, ipv4).name()).await? else {
        return Ok(KernelVerdict::NoTable);
    };
    // A table of an earlier release has no such map.
    let admin = kernel.list(SetKind::Admin(direction, ipv4).name()).await?;
    if let Some(Verdict::JumpTo(chain)) = verdict_of(&admin.unwrap_or_default(), packet.pod)
        && let Some(decided) = kernel.ask_class(chain.as_ref()).await?
    {
        return Ok(decided);
    }
    match verdict_of(&isolated, packet.pod) {
        Some(Verdict::GotoTo(chain)) if is_class(chain.as_ref()) => {
            let decided = kernel.ask_class(chain.as_ref()).await?;
            Ok(decided.unwrap_or(KernelVerdict::Open))
        }
        Some(Verdict::GotoTo(chain)) => kernel.ask_isolation(chain.as_ref()).await,
        Some(Verdict::Accept) => Ok(KernelVerdict::Open),
        _ => Ok(KernelVerdict::UnknownPod),
    }
}

struct Kernel<'a> {
    table: &'a str,
    connection: Connection<Nftables>,
    packet: Packet,
}

impl Kernel<'_> {
    /// `None` if there is no such set.
    async fn list(&self, name: String) -> Result<Option<Vec<SetElement>>, Error> {
        match self.connection.list_set_elements(self.table, &name, FAMILY).await {
            Err(error) if error.is_not_found() => Ok(None),
            listed => Ok(listed.map(Some)?),
        }
    }

    fn family(&self) -> &'static str {
        match self.packet.pod.is_ipv4() {
            true => "ipv4",
            false => "ipv6",
        }
    }

    fn port_key(&self) -> [(Vec<u8>, usize); 2] {
        let (protocol, port) = (self.packet.protocol, self.packet.port);
        [(vec![protocol.number()], 4), (port.to_be_bytes().to_vec(), 4)]
    }

    fn block_key(&self) -> Vec<(Vec<u8>, usize)> {
        let bytes = octets(self.packet.peer);
        let width = bytes.len();
        [(bytes, width)].into_iter().chain(self.port_key()).collect()
    }

    async fn ask_isolation(&self, chain: &str) -> Result<KernelVerdict, Error> {
        let (peer, family) = (self.packet.peer, self.family());
        let chain = chain.to_owned();
        let pods = self.list(format!("{chain}-pods-{family}")).await?;
        match verdict_of(&pods.unwrap_or_default(), peer) {
            Some(Verdict::Accept) => return Ok(KernelVerdict::Allowed(chain)),
            Some(Verdict::JumpTo(ports)) => {
                let ports = self.list(ports.as_ref().to_owned()).await?.unwrap_or_default();
                if ports.iter().any(|element| covers(element, &self.port_key())) {
                    return Ok(KernelVerdict::Allowed(chain));
                }
            }
            _ => {}
        }
        // By way of a service a pod may meet itself.
        if peer == self.packet.pod {
            return Ok(KernelVerdict::Allowed(chain));
        }
        let blocks = self.list(format!("{chain}-blocks-{family}")).await?;
        let key = self.block_key();
        let blocks = blocks.unwrap_or_default();
        Ok(match blocks.iter().any(|element| covers(element, &key)) {
            true => KernelVerdict::Allowed(chain),
            false => KernelVerdict::Denied(chain),
        })
    }

    /// `None` if the class does not decide.
    async fn ask_class(&self, chain: &str) -> Result<Option<KernelVerdict>, Error> {
        let family = self.family();
        let pods = self.list(format!("{chain}-pods-{family}")).await?;
        let decided = |verdict: Option<&Verdict>| match verdict {
            Some(Verdict::Accept) => Some(KernelVerdict::Allowed(chain.to_owned())),
            Some(Verdict::Drop) => Some(KernelVerdict::Denied(chain.to_owned())),
            _ => None,
        };
        let (set, key) = match verdict_of(&pods.unwrap_or_default(), self.packet.peer) {
            Some(Verdict::GotoTo(decisions)) => (decisions.as_ref().to_owned(), self.port_key().to_vec()),
            Some(verdict) => return Ok(decided(Some(&verdict))),
            None => (format!("{chain}-ranges-{family}"), self.block_key()),
        };
        let elements = self.list(set).await?.unwrap_or_default();
        let found = elements.iter().find(|element| covers(element, &key));
        Ok(decided(found.and_then(verdict_in)))
    }
}

fn verdict_of(elements: &[SetElement], address: IpAddr) -> Option<Verdict> {
    let key = octets(address);
    let found = elements.iter().find(|element| element.key() == key)?;
    verdict_in(found).cloned()
}

fn verdict_in(element: &SetElement) -> Option<&Verdict> {
    match element.data() {
        Some(SetElementData::Verdict(verdict)) => Some(verdict),
        _ => None,
    }
}

/// Whether each field is within the element's range. Fields lie in words of four bytes.
fn covers(element: &SetElement, fields: &[(Vec<u8>, usize)]) -> bool {
    let first = element.key();
    let last = element.key_end().unwrap_or(first);
    let mut at = 0;
    for (bytes, width) in fields {
        let range = at..at + bytes.len();
        let (Some(first), Some(last)) = (first.get(range.clone()), last.get(range)) else {
            return false;
        };
        if bytes.as_slice() < first || last < bytes.as_slice() {
            return false;
        }
        at += width.next_multiple_of(4);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_compared_field_by_field() {
        let element = SetElement::concat([
            SetElement::range(vec![10, 0, 0, 0], vec![10, 255, 255, 255]),
            SetElement::range(vec![6], vec![6]),
            SetElement::port_range(80, 90),
        ]);
        let check = |address: [u8; 4], protocol: u8, port: u16| {
            let fields = [
                (address.to_vec(), 4),
                (vec![protocol], 4),
                (port.to_be_bytes().to_vec(), 4),
            ];
            covers(&element, &fields)
        };
        assert!(check([10, 1, 2, 3], 6, 85));
        assert!(!check([11, 1, 2, 3], 6, 85));
        assert!(!check([10, 1, 2, 3], 17, 85));
        assert!(!check([10, 1, 2, 3], 6, 91));
    }
}
