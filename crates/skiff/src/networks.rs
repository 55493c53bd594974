//! Checks the networks of a cluster before anything is recorded: each must be one that the cluster can work with,
//! and none may contain an address that belongs to something else on this machine.

use crate::cluster::Cluster;
use anyhow::{Result, bail};
use skiff_network::proxy::Cidr;
use std::net::IpAddr;

/// The pod network holds at least one node's pods.
const LARGEST_POD_PREFIX: u8 = 24;
/// DNS has the tenth address of the service network.
const LARGEST_SERVICE_PREFIX: u8 = 28;
/// Upstream's limit: the allocator keeps at most a million addresses.
const SMALLEST_SERVICE_PREFIX: u8 = 12;

/// `others` are the clusters that exist on this machine, `host` is the address that others reach it by.
pub fn check(cluster: &Cluster, others: &[Cluster], host: Option<IpAddr>) -> Result<()> {
    let pods = parse("--cluster-cidr", &cluster.pod_cidr)?;
    if pods.prefix > LARGEST_POD_PREFIX {
        bail!(
            "--cluster-cidr {pods} is too small: a node takes 256 addresses, so use a /{LARGEST_POD_PREFIX} or larger"
        );
    }
    let services = parse("--service-cluster-ip-range", &cluster.service_cidr)?;
    if !(SMALLEST_SERVICE_PREFIX..=LARGEST_SERVICE_PREFIX).contains(&services.prefix) {
        bail!(
            "--service-cluster-ip-range {services} must be between a /{SMALLEST_SERVICE_PREFIX} and a /{LARGEST_SERVICE_PREFIX}"
        );
    }
    if overlap(pods, services) {
        bail!(
            "--cluster-cidr {pods} and --service-cluster-ip-range {services} overlap; choose networks apart"
        );
    }
    for (flag, network) in [("--cluster-cidr", pods), ("--service-cluster-ip-range", services)] {
        if let Some(host @ IpAddr::V4(address)) = host
            && overlap(network, Cidr { address, prefix: 32 })
        {
            bail!("{flag} {network} contains this machine's own address {host}; choose another network");
        }
        for other in others.iter().filter(|other| other.name != cluster.name) {
            for theirs in [&other.pod_cidr, &other.service_cidr] {
                if theirs.parse().is_ok_and(|theirs| overlap(network, theirs)) {
                    bail!(
                        "{flag} {network} overlaps {theirs} of cluster {:?} on this machine; choose another network",
                        other.name
                    );
                }
            }
        }
    }
    Ok(())
}

fn parse(flag: &str, text: &str) -> Result<Cidr> {
    let network: Cidr = text.parse().map_err(|why| anyhow::anyhow!("{flag}: {why}"))?;
    if network.address.is_loopback() || network.address.is_multicast() || network.address.is_unspecified() {
        bail!("{flag} {network} is not a network for hosts");
    }
    Ok(network)
}

fn overlap(a: Cidr, b: Cidr) -> bool {
    let prefix = u32::from(a.prefix.min(b.prefix));
    let shift = 32 - prefix;
    (u32::from(a.address) ^ u32::from(b.address))
        .checked_shr(shift)
        .unwrap_or(0)
        == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Wishes;

    #[test]
    fn networks_that_cannot_work_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let cluster = |name: &str| Cluster::find_or_make_in(root.path(), name, &Wishes::default()).unwrap();
        let (one, two) = (cluster("one"), cluster("two"));
        let host = Some("192.0.2.7".parse().unwrap());
        let tried = |pods: &str, services: &str| {
            let tried = Cluster {
                pod_cidr: pods.into(),
                service_cidr: services.into(),
                ..one.clone()
            };
            check(&tried, &[one.clone(), two.clone()], host).map_err(|error| error.to_string())
        };
        assert_eq!(tried("10.9.0.0/16", "10.8.0.0/16"), Ok(()));
        assert_eq!(tried(&one.pod_cidr, &one.service_cidr), Ok(()), "its own");
        for (pods, services, why) in [
            ("nonsense", "10.8.0.0/16", "not an IPv4 network"),
            ("fd00::/48", "10.8.0.0/16", "not an IPv4 network"),
            ("10.9.0.0/25", "10.8.0.0/16", "too small"),
            ("127.0.0.0/16", "10.8.0.0/16", "not a network for hosts"),
            ("10.9.0.0/16", "10.8.0.0/29", "between a /12 and a /28"),
            ("10.9.0.0/16", "10.0.0.0/8", "between a /12 and a /28"),
            ("10.9.0.0/16", "10.9.128.0/20", "overlap"),
            ("192.0.0.0/16", "10.8.0.0/16", "own address 192.0.2.7"),
            (&two.service_cidr, "10.8.0.0/16", "of cluster \"two\""),
        ] {
            let error = tried(pods, services).unwrap_err();
            assert!(error.contains(why), "{pods} {services}: {error}");
        }
    }
}
