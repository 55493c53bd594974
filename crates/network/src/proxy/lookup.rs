//! What the kernel has of one service address and port: for `skiff net check`, which asks the kernel and not the plan.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nlink::netlink::nftables::{Family, SetElement, SetElementData};
use nlink::netlink::{Connection, Nftables};

use super::Error;
use super::elements::{Element, Front, Slot};
use super::objects::Protocol;
use super::sets::{DROP_CODE, Origin, REJECT_CODE, SetKind, nft_element};

/// What happens to packets for a service address and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelService {
    /// The table is not there.
    NoTable,
    /// The address and port are in no map.
    Missing,
    /// Refused: there is no endpoint.
    Reject,
    /// Dropped: none on this node, where it must be.
    Drop,
    /// Translated to one of these.
    Endpoints(Vec<SocketAddr>),
}

/// Looks an address and port up as a packet does.
pub async fn look_up(
    table: &str,
    address: IpAddr,
    protocol: Protocol,
    port: u16,
) -> Result<KernelService, Error> {
    let connection = Connection::<Nftables>::new()?;
    let family = if address.is_ipv4() {
        Family::Ip
    } else {
        Family::Ip6
    };
    let list = async |kind: SetKind| match connection.list_set_elements(table, &kind.name(), family).await {
        Err(error) if error.is_not_found() => Ok(None),
        listed => listed.map(Some),
    };
    let front = Front::Service(address, protocol, port);
    let (_, wanted) = nft_element(Element::Front(front), None, |_| 0);
    let Some(fronts) = list(SetKind::Fronts(Origin::Services)).await? else {
        return Ok(KernelService::NoTable);
    };
    let Some(found) = fronts.iter().find(|element| element.key() == wanted.key()) else {
        return Ok(KernelService::Missing);
    };
    for (code, answer) in [
        (REJECT_CODE, KernelService::Reject),
        (DROP_CODE, KernelService::Drop),
    ] {
        if value(found) == Some(SetElement::mark(code).key()) {
            return Ok(answer);
        }
    }
    let endpoints = list(SetKind::Endpoints(Origin::Services, Slot::First)).await?;
    let endpoints = endpoints.unwrap_or_default();
    let of_front = endpoints
        .iter()
        .filter(|element| element.key().starts_with(wanted.key()));
    let mut targets: Vec<SocketAddr> = of_front
        .filter_map(|element| target(value(element)?, address.is_ipv4()))
        .collect();
    targets.sort();
    targets.dedup();
    Ok(KernelService::Endpoints(targets))
}

fn value(element: &SetElement) -> Option<&[u8]> {
    match element.data() {
        Some(SetElementData::Value(value)) => Some(value),
        _ => None,
    }
}

fn target(value: &[u8], ipv4: bool) -> Option<SocketAddr> {
    let (address, rest): (IpAddr, &[u8]) = match ipv4 {
        true => {
            let (address, rest) = value.split_first_chunk::<4>()?;
            (Ipv4Addr::from(*address).into(), rest)
        }
        false => {
            let (address, rest) = value.split_first_chunk::<16>()?;
            (Ipv6Addr::from(*address).into(), rest)
        }
    };
    let port = u16::from_be_bytes(*rest.first_chunk::<2>()?);
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read() {
        let expected: SocketAddr = "10.244.0.7:8080".parse().unwrap();
        assert_eq!(target(&[10, 244, 0, 7, 0x1f, 0x90, 0, 0], true), Some(expected));
        assert_eq!(target(&[10, 244, 0], true), None);
        assert_eq!(target(&[0; 17], false), None);
    }
}
