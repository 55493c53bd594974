//! Checks the networks of a cluster before anything is recorded: each must be one that the cluster can work with,
//! and none may contain an address that belongs to something else on this machine.

use crate::cluster::Cluster;
use anyhow::{Result, bail};
use skiff_meta::net::{Cidr, parse_list};
use std::net::IpAddr;

/// The pod network holds at least one node's pods.
const LARGEST_POD_PREFIX: u8 = 24;
const LARGEST_POD_PREFIX_V6: u8 = 64;
/// Upstream's limit: no more than 65,536 nodes' parts.
const SMALLEST_POD_PREFIX_V6: u8 = 48;
/// DNS has the tenth address of the service network.
const LARGEST_SERVICE_PREFIX: u8 = 28;
/// Upstream's limit: the allocator keeps at most a million addresses.
const SMALLEST_SERVICE_PREFIX: u8 = 12;
const LARGEST_SERVICE_PREFIX_V6: u8 = 124;
/// Upstream's limit.
const SMALLEST_SERVICE_PREFIX_V6: u8 = 64;

/// `others` are the clusters that exist on this machine, `host` is the address that others reach it by.
pub fn check(cluster: &Cluster, others: &[Cluster], host: Option<IpAddr>) -> Result<()> {
    let pods = parse("--cluster-cidr", &cluster.pod_cidr)?;
    check_pods(&pods)?;
    let services = parse("--service-cluster-ip-range", &cluster.service_cidr)?;
    check_services(&services, &pods)?;
    let pods = pods.into_iter().map(|network| ("--cluster-cidr", network));
    let services = services
        .into_iter()
        .map(|network| ("--service-cluster-ip-range", network));
    for (flag, network) in pods.chain(services) {
        if let Some(host) = host.filter(|host| network.contains(*host)) {
            bail!("{flag} {network} contains this machine's own address {host}; choose another network");
        }
        for other in others.iter().filter(|other| other.name != cluster.name) {
            for theirs in [&other.pod_cidr, &other.service_cidr] {
                let theirs = parse_list(theirs).unwrap_or_default();
                if let Some(theirs) = theirs.iter().find(|theirs| theirs.overlaps(network)) {
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

fn check_pods(pods: &[Cidr]) -> Result<()> {
    match pods {
        [_] => {}
        [a, b] if !a.same_family(*b) => {}
        _ => bail!("--cluster-cidr: write one network, or one of each address family with a comma between"),
    }
    for network in pods {
        let (largest, node) = match network.is_ipv4() {
            true => (LARGEST_POD_PREFIX, "256 addresses"),
            false => (LARGEST_POD_PREFIX_V6, "a /64"),
        };
        if network.prefix() > largest {
            bail!(
                "--cluster-cidr {network} is too small: a node takes {node}, so use a /{largest} or larger"
            );
        }
        if network.is_ipv6() && network.prefix() < SMALLEST_POD_PREFIX_V6 {
            bail!("--cluster-cidr {network} is too large: use a /{SMALLEST_POD_PREFIX_V6} or smaller");
        }
    }
    if pods[0].is_ipv6() {
        bail!(
            "--cluster-cidr {}: the first network must be an IPv4 one",
            pods[0]
        );
    }
    Ok(())
}

fn check_services(services: &[Cidr], pods: &[Cidr]) -> Result<()> {
    match services {
        [_] => {}
        [a, b] if !a.same_family(*b) => {}
        _ => bail!(
            "--service-cluster-ip-range: write one network, or one of each address family with a comma between"
        ),
    }
    if services[0].is_ipv6() {
        bail!(
            "--service-cluster-ip-range {}: the first network must be an IPv4 one",
            services[0]
        );
    }
    for network in services {
        let (smallest, largest) = match network.is_ipv4() {
            true => (SMALLEST_SERVICE_PREFIX, LARGEST_SERVICE_PREFIX),
            false => (SMALLEST_SERVICE_PREFIX_V6, LARGEST_SERVICE_PREFIX_V6),
        };
        if !(smallest..=largest).contains(&network.prefix()) {
            bail!("--service-cluster-ip-range {network} must be between a /{smallest} and a /{largest}");
        }
        if !pods.iter().any(|pods| pods.same_family(*network)) {
            bail!(
                "--service-cluster-ip-range {network}: pods have no addresses of this family; give --cluster-cidr a second network"
            );
        }
        if let Some(pods) = pods.iter().find(|pods| pods.overlaps(*network)) {
            bail!(
                "--cluster-cidr {pods} and --service-cluster-ip-range {network} overlap; choose networks apart"
            );
        }
    }
    Ok(())
}

fn parse(flag: &str, text: &str) -> Result<Vec<Cidr>> {
    let networks = parse_list(text).map_err(|why| anyhow::anyhow!("{flag}: {why}"))?;
    for network in &networks {
        let address = network.address();
        let link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
        if address.is_loopback() || address.is_multicast() || address.is_unspecified() || link_local {
            bail!("{flag} {network} is not a network for hosts");
        }
    }
    Ok(networks)
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
        assert_eq!(tried("10.9.0.0/16,fd00:9::/48", "10.8.0.0/16"), Ok(()));
        assert_eq!(
            tried("10.9.0.0/16,fd00:9::/48", "10.8.0.0/16,fd00:8::/112"),
            Ok(())
        );
        assert_eq!(tried(&one.pod_cidr, &one.service_cidr), Ok(()), "its own");
        for (pods, services, why) in [
            ("nonsense", "10.8.0.0/16", "not a network in CIDR notation"),
            ("fd00::/48", "10.8.0.0/16", "first network must be an IPv4 one"),
            (
                "10.9.0.0/16,10.10.0.0/16",
                "10.8.0.0/16",
                "one of each address family",
            ),
            ("10.9.0.0/16,fd00::/80", "10.8.0.0/16", "a node takes a /64"),
            ("10.9.0.0/16,fd00::/40", "10.8.0.0/16", "too large"),
            ("10.9.0.0/16,fe80::/64", "10.8.0.0/16", "not a network for hosts"),
            ("10.9.0.0/16", "fd00::/112", "first network must be an IPv4 one"),
            (
                "10.9.0.0/16",
                "10.8.0.0/16,fd00::/112",
                "pods have no addresses of this family",
            ),
            (
                "10.9.0.0/16",
                "10.8.0.0/16,10.7.0.0/16",
                "one of each address family",
            ),
            (
                "10.9.0.0/16,fd00::/48",
                "10.8.0.0/16,fd00:1::/48",
                "between a /64 and a /124",
            ),
            ("10.9.0.0/16,fd00::/48", "10.8.0.0/16,fd00::/112", "overlap"),
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
