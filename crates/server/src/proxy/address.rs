//! Which addresses requests may be sent on to. What clients name must not lead to this machine's own loopback or
//! to its neighbours on the link (such as a cloud's metadata service): what listens there trusts who can reach it.

use std::net::{IpAddr, Ipv6Addr};

/// Why a host is not connected to, in upstream's words.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("address not allowed")]
    NotAllowed,
    #[error("no addresses for hostname")]
    None,
    #[error("lookup {0}: {1}")]
    Lookup(String, std::io::Error),
}

/// The addresses of a host, all of which must be allowed. Whoever connects must use these and not look the name up
/// again: the second answer may be another.
pub async fn resolve(host: &str) -> Result<Vec<IpAddr>, AddressError> {
    let addresses: Vec<IpAddr> = match host.parse() {
        Ok(address) => vec![address],
        Err(_) => {
            let found = tokio::net::lookup_host((host, 0)).await;
            let found = found.map_err(|error| AddressError::Lookup(host.to_string(), error))?;
            found.map(|address| address.ip()).collect()
        }
    };
    if addresses.is_empty() {
        return Err(AddressError::None);
    }
    if !addresses.iter().all(|address| is_allowed(*address)) {
        return Err(AddressError::NotAllowed);
    }
    Ok(addresses)
}

/// Whether an address is one host's on a network that is routed (Go's `IsGlobalUnicast`), also when it is an IPv4
/// address in the clothes of IPv6.
pub fn is_allowed(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(ip) => {
            // Linux takes 0.0.0.0 for this machine; the rest of its network is no host's either.
            let this_network = ip.octets()[0] == 0;
            !(ip.is_loopback()
                || this_network
                || ip.is_link_local()
                || ip.is_multicast()
                || ip.is_broadcast())
        }
        IpAddr::V6(ip) => {
            !(ip.is_loopback()
                || ip.is_unspecified()
                || ip.is_unicast_link_local()
                || ip.is_multicast()
                || is_ipv4_compatible(ip))
        }
    }
}

/// `::a.b.c.d`: nobody uses it any more, and readers disagree on what it means.
fn is_ipv4_compatible(ip: Ipv6Addr) -> bool {
    ip.segments()[..6] == [0; 6]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_refused() {
        for (address, allowed) in [
            ("10.0.0.1", true),
            ("192.0.2.1", true),
            ("fd00::1", true),
            ("2001:db8::1", true),
            ("::ffff:10.0.0.1", true),
            ("127.0.0.1", false),
            ("127.1.2.3", false),
            ("0.0.0.0", false),
            ("0.1.2.3", false),
            ("169.254.169.254", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("::", false),
            ("::1", false),
            ("::127.0.0.1", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:0.0.0.0", false),
            ("::ffff:169.254.169.254", false),
            ("::ffff:7f00:1", false),
            ("fe80::1", false),
            ("ff02::1", false),
        ] {
            assert_eq!(is_allowed(address.parse().unwrap()), allowed, "{address}");
        }
    }

    #[tokio::test]
    async fn names_are_refused_for_what_they_resolve_to() {
        assert!(matches!(
            resolve("localhost").await,
            Err(AddressError::NotAllowed)
        ));
        assert!(resolve("fe80::1%lo").await.is_err());
        assert_eq!(resolve("10.0.0.1").await.unwrap(), [IpAddr::from([10, 0, 0, 1])]);
    }
}
