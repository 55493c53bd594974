//! The canonical form of the subsets of Endpoints, and how they are cut to what one object may hold. No I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset};

/// More addresses than this do not go into one Endpoints object.
pub(crate) const MAX_ADDRESSES: usize = 1000;

/// Address and uid of its target: what makes an address the same.
type AddressKey = (String, String);
/// Name, number, protocol and application protocol; `None` for an address without ports.
type PortKey = Option<(String, i32, String, String)>;

/// Ports that the same addresses have share a subset, and each address is in it once. An address that is somewhere
/// not ready for a port is not ready for it.
pub(crate) fn repack(subsets: &[EndpointSubset]) -> Vec<EndpointSubset> {
    let mut addresses: BTreeMap<AddressKey, &EndpointAddress> = BTreeMap::new();
    let mut ports: BTreeMap<PortKey, Option<&EndpointPort>> = BTreeMap::new();
    let mut by_port: BTreeMap<PortKey, BTreeMap<AddressKey, bool>> = BTreeMap::new();
    for subset in subsets {
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset
            .not_ready_addresses
            .iter()
            .flatten()
            .map(|address| (address, false));
        let all: Vec<(&EndpointAddress, bool)> = ready.chain(not_ready).collect();
        let mut subset_ports: Vec<Option<&EndpointPort>> = subset.ports.iter().flatten().map(Some).collect();
        if subset_ports.is_empty() {
            subset_ports.push(None);
        }
        for port in subset_ports {
            let port_key = port.map(port_key);
            ports.entry(port_key.clone()).or_insert(port);
            let offered = by_port.entry(port_key).or_default();
            for (address, ready) in &all {
                let key = address_key(address);
                addresses.entry(key.clone()).or_insert(address);
                *offered.entry(key).or_insert(true) &= *ready;
            }
        }
    }
    let mut by_addresses: BTreeMap<BTreeMap<AddressKey, bool>, Vec<EndpointPort>> = BTreeMap::new();
    for (port, offered) in by_port {
        let shared = by_addresses.entry(offered).or_default();
        shared.extend(ports.get(&port).copied().flatten().cloned());
    }
    let mut packed: Vec<EndpointSubset> = by_addresses
        .into_iter()
        .map(|(offered, ports)| {
            let of = |wanted: bool| -> Option<Vec<EndpointAddress>> {
                let keys = offered.iter().filter(|(_, ready)| **ready == wanted);
                let all: Vec<_> = keys
                    .filter_map(|(key, _)| addresses.get(key).map(|found| (*found).clone()))
                    .collect();
                (!all.is_empty()).then_some(all)
            };
            EndpointSubset {
                addresses: of(true),
                not_ready_addresses: of(false),
                ports: (!ports.is_empty()).then_some(ports),
            }
        })
        .collect();
    packed.retain(|subset| subset.addresses.is_some() || subset.not_ready_addresses.is_some());
    packed
}

fn address_key(address: &EndpointAddress) -> AddressKey {
    let target = address.target_ref.as_ref();
    let uid = target.and_then(|target| target.uid.clone()).unwrap_or_default();
    (address.ip.clone(), uid)
}

fn port_key(port: &EndpointPort) -> (String, i32, String, String) {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    (
        text(&port.name),
        port.port,
        text(&port.protocol),
        text(&port.app_protocol),
    )
}

/// Cuts the subsets to what an object may hold, each in proportion; ready addresses stay longer. True if something
/// was left out.
pub(crate) fn truncate(subsets: &mut [EndpointSubset]) -> bool {
    let count = |list: &Option<Vec<EndpointAddress>>| list.as_ref().map_or(0, Vec::len);
    let ready: usize = subsets.iter().map(|subset| count(&subset.addresses)).sum();
    let not_ready: usize = subsets
        .iter()
        .map(|subset| count(&subset.not_ready_addresses))
        .sum();
    if ready + not_ready <= MAX_ADDRESSES {
        return false;
    }
    let cut_ready = ready > MAX_ADDRESSES;
    let (room, total) = if cut_ready {
        (MAX_ADDRESSES, ready)
    } else {
        (MAX_ADDRESSES - ready, not_ready)
    };
    let mut left = room;
    for subset in subsets {
        if cut_ready {
            subset.not_ready_addresses = None;
        }
        let list = if cut_ready {
            &mut subset.addresses
        } else {
            &mut subset.not_ready_addresses
        };
        let share = (count(list) * room).div_ceil(total.max(1)).min(left);
        if let Some(list) = list {
            list.truncate(share);
            left -= list.len();
        }
        if list.as_ref().is_some_and(Vec::is_empty) {
            *list = None;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn subset(ready: &[&str], not_ready: &[&str], ports: &[i32]) -> EndpointSubset {
        let addresses = |ips: &[&str]| -> Value { ips.iter().map(|ip| json!({"ip": ip})).collect() };
        let ports: Value = ports.iter().map(|port| json!({"port": port})).collect();
        serde_json::from_value(
            json!({"addresses": addresses(ready), "notReadyAddresses": addresses(not_ready), "ports": ports}),
        )
        .unwrap()
    }

    /// `a,b|c:80,81`: ready, not ready, ports.
    fn show(subsets: &[EndpointSubset]) -> Vec<String> {
        let ips = |list: &Option<Vec<EndpointAddress>>| {
            let ips: Vec<String> = list.iter().flatten().map(|address| address.ip.clone()).collect();
            ips.join(",")
        };
        let mut all: Vec<String> = subsets
            .iter()
            .map(|subset| {
                let ports: Vec<String> = subset
                    .ports
                    .iter()
                    .flatten()
                    .map(|port| port.port.to_string())
                    .collect();
                format!(
                    "{}|{}:{}",
                    ips(&subset.addresses),
                    ips(&subset.not_ready_addresses),
                    ports.join(",")
                )
            })
            .collect();
        all.sort();
        all
    }

    #[test]
    fn ports_with_the_same_addresses_share_a_subset() {
        let check =
            |subsets: &[EndpointSubset], expected: &[&str]| assert_eq!(show(&repack(subsets)), expected);
        check(&[], &[]);
        check(&[subset(&[], &[], &[80])], &[]);
        check(
            &[subset(&["b"], &[], &[80]), subset(&["a"], &[], &[80])],
            &["a,b|:80"],
        );
        check(
            &[subset(&["a", "b"], &[], &[80]), subset(&["a"], &[], &[81])],
            &["a,b|:80", "a|:81"],
        );
        check(
            &[subset(&["a"], &[], &[81]), subset(&["a"], &[], &[80])],
            &["a|:80,81"],
        );
        check(&[subset(&["a"], &["a"], &[80])], &["|a:80"]);
        check(
            &[subset(&["a"], &[], &[]), subset(&["a"], &[], &[80])],
            &["a|:80"],
        );
        check(&[subset(&["a"], &["b"], &[])], &["a|b:"]);
    }

    #[test]
    fn ready_addresses_stay() {
        let many = |count: usize, prefix: &str| -> Vec<String> {
            (0..count).map(|number| format!("{prefix}{number}")).collect()
        };
        let check = |sizes: &[(usize, usize)], expected: &[(usize, usize)]| {
            let mut subsets: Vec<EndpointSubset> = sizes
                .iter()
                .map(|(ready, not_ready)| {
                    let (ready, not_ready) = (many(*ready, "r"), many(*not_ready, "n"));
                    let ready: Vec<&str> = ready.iter().map(String::as_str).collect();
                    let not_ready: Vec<&str> = not_ready.iter().map(String::as_str).collect();
                    subset(&ready, &not_ready, &[80])
                })
                .collect();
            let cut = truncate(&mut subsets);
            let left: Vec<(usize, usize)> = subsets
                .iter()
                .map(|subset| {
                    let count = |list: &Option<Vec<EndpointAddress>>| list.as_ref().map_or(0, Vec::len);
                    (count(&subset.addresses), count(&subset.not_ready_addresses))
                })
                .collect();
            assert_eq!(left, expected);
            assert_eq!(cut, sizes != expected);
        };
        check(&[(600, 400)], &[(600, 400)]);
        check(&[(600, 401)], &[(600, 400)]);
        check(&[(800, 300), (100, 100)], &[(800, 75), (100, 25)]);
        check(&[(1500, 10), (500, 10)], &[(750, 0), (250, 0)]);
    }
}
