//! What the kernel would say to one connection: for `skiff net check`, which follows the maps as a packet does.

use std::net::IpAddr;

use nlink::netlink::nftables::{SetElement, SetElementData, Verdict};
use nlink::netlink::{Connection, Nftables};

use super::table::{FAMILY, SetKind, octets};
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

/// Whether `pod`, an address of this node, may talk with `peer`.
pub async fn look_up(
    table: &str,
    direction: Direction,
    pod: IpAddr,
    peer: IpAddr,
    protocol: Protocol,
    port: u16,
) -> Result<KernelVerdict, Error> {
    let connection = Connection::<Nftables>::new()?;
    let list = async |name: String| match connection.list_set_elements(table, &name, FAMILY).await {
        Err(error) if error.is_not_found() => Ok(None),
        listed => listed.map(Some),
    };
    let ipv4 = pod.is_ipv4();
    let Some(isolated) = list(SetKind::Isolated(direction, ipv4).name()).await? else {
        return Ok(KernelVerdict::NoTable);
    };
    let chain = match verdict_of(&isolated, pod) {
        None => return Ok(KernelVerdict::UnknownPod),
        Some(Verdict::GotoTo(chain)) => chain.as_ref().to_owned(),
        Some(Verdict::Accept) => return Ok(KernelVerdict::Open),
        Some(_) => return Ok(KernelVerdict::UnknownPod),
    };
    let family = if ipv4 { "ipv4" } else { "ipv6" };
    let pods = list(format!("{chain}-pods-{family}")).await?.unwrap_or_default();
    let port_key = [(vec![protocol.number()], 4), (port.to_be_bytes().to_vec(), 4)];
    match verdict_of(&pods, peer) {
        Some(Verdict::Accept) => return Ok(KernelVerdict::Allowed(chain)),
        Some(Verdict::JumpTo(ports)) => {
            let ports = list(ports.as_ref().to_owned()).await?.unwrap_or_default();
            if ports.iter().any(|element| covers(element, &port_key)) {
                return Ok(KernelVerdict::Allowed(chain));
            }
        }
        _ => {}
    }
    let blocks = list(format!("{chain}-blocks-{family}"))
        .await?
        .unwrap_or_default();
    let bytes = octets(peer);
    let width = bytes.len();
    let key: Vec<(Vec<u8>, usize)> = [(bytes, width)].into_iter().chain(port_key).collect();
    Ok(match blocks.iter().any(|element| covers(element, &key)) {
        true => KernelVerdict::Allowed(chain),
        false => KernelVerdict::Denied(chain),
    })
}

fn verdict_of(elements: &[SetElement], address: IpAddr) -> Option<&Verdict> {
    let key = octets(address);
    let found = elements.iter().find(|element| element.key() == key)?;
    match found.data() {
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
