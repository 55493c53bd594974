//! From one service and its endpoints to what the kernel must have of it, as a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use skiff_meta::net::Cidr;

use super::elements::{Element, Entry, Front, How, MAX_ENDPOINTS, Steer};
use super::endpoints::{Target, Targets};
use super::objects::{ExternalIp, Origin, PortFacts, Protocol, ServiceFacts};

/// What a service wants to have in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Where traffic comes in. Another service may want the same, and then one of them gets it.
    pub claims: Vec<Claim>,
    /// Elements that several services may have together.
    pub shared: Vec<Element>,
    /// The port where load balancers ask, and how many endpoints they are told of.
    pub health: Option<(u16, usize)>,
    /// What is asked for in vain, and why.
    pub refusals: Vec<String>,
    pub endpoints: usize,
    /// Ports that must stay on this node, which has no endpoint of them: internal and external, of IPv4 and of IPv6.
    pub no_local_endpoints: [(usize, usize); 2],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub at: Front,
    pub right: Right,
    pub steer: Steer,
    /// The endpoints of both slots, in the order of their numbers.
    pub targets: [Vec<Target>; 2],
    /// Who may use it, if not all.
    pub sources: Vec<Cidr>,
    /// For UDP: the endpoints whose flows may go on.
    pub serving: Option<Vec<Target>>,
}

/// Why a service may have an address and port; the first one has it of those who want the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    Own,
    External(Origin),
}

/// What a plan depends on beside the service.
pub struct Around<'a> {
    /// What was planned for the service before: endpoints keep their numbers as far as they can.
    pub before: &'a [Claim],
    /// The endpoints of a port in a family.
    pub targets: &'a dyn Fn(&PortFacts, bool) -> Targets,
    /// Why the service may not have an external address on a port.
    pub refused: &'a dyn Fn(&ExternalIp, u16) -> Option<String>,
    /// The families that the node serves; true for IPv4.
    pub families: &'a [bool],
}

pub fn plan(service: &ServiceFacts, around: &Around<'_>) -> Plan {
    let mut plan = Plan::default();
    let of_family = |ipv4: &bool| service.cluster_ips.iter().find(|ip| ip.is_ipv4() == *ipv4);
    if !service.served {
        return plan;
    }
    let mut local_ready: Vec<IpAddr> = Vec::new();
    for &ipv4 in around.families {
        let Some(cluster_ip) = of_family(&ipv4) else {
            continue;
        };
        plan.shared.push(Element::ClusterIp(*cluster_ip));
        for port in &service.ports {
            let targets = (around.targets)(port, ipv4);
            local_ready.extend(&targets.local_ready);
            plan.port(service, *cluster_ip, port, targets, around);
        }
    }
    plan.shared.sort();
    plan.shared.dedup();
    // A service may name an address twice, or as two things.
    plan.claims.sort_by_key(|claim| (claim.at, claim.right));
    plan.claims.dedup_by_key(|claim| claim.at);
    if let Some(port) = service.health_port {
        local_ready.sort();
        local_ready.dedup();
        // A pod with addresses of both families is one endpoint.
        let of = |ipv4: bool| local_ready.iter().filter(|ip| ip.is_ipv4() == ipv4).count();
        plan.health = Some((port, of(true).max(of(false))));
    }
    plan
}

impl Plan {
    fn port(
        &mut self,
        service: &ServiceFacts,
        cluster_ip: IpAddr,
        port: &PortFacts,
        targets: Targets,
        around: &Around<'_>,
    ) {
        let (ipv4, protocol) = (cluster_ip.is_ipv4(), port.protocol);
        let outside: Vec<&ExternalIp> = service
            .external_ips
            .iter()
            .filter(|external| external.address.is_ipv4() == ipv4)
            .collect();
        let is_outside = !outside.is_empty() || port.node_port.is_some();
        self.shared.extend(targets.own.iter().map(|ip| Element::Own(*ip)));
        self.endpoints += targets.cluster.len();
        if targets.any && targets.local.is_empty() {
            let count = &mut self.no_local_endpoints[usize::from(!ipv4)];
            count.0 += usize::from(service.internal_local);
            count.1 += usize::from(service.external_local && is_outside);
        }

        let affinity = service.affinity.unwrap_or(0);
        let (cluster, local): (&[Target], &[Target]) = (&targets.cluster, &targets.local);
        let serving = (protocol == Protocol::Udp).then_some(&targets.serving);
        let mut claim = |at: Front, right: Right, entry: Entry, targets: [&[Target]; 2], sources: &[Cidr]| {
            let before = around.before.iter().find(|claim| claim.at == at);
            let numbered = |slot: usize| {
                let before = before.map_or(&[][..], |claim| &claim.targets[slot]);
                match affinity {
                    0 => arrange(before, targets[slot]),
                    _ => arrange_sticky(before, targets[slot]),
                }
            };
            let targets = [numbered(0), numbered(1)];
            let how = |slot: usize| How {
                count: u32::try_from(targets[slot].len()).unwrap_or(u32::MAX),
                affinity: if targets[slot].is_empty() { 0 } else { affinity },
            };
            self.claims.push(Claim {
                at,
                right,
                steer: Steer {
                    entry,
                    first: how(0),
                    second: how(1),
                },
                targets,
                sources: sources.to_vec(),
                serving: serving.cloned(),
            });
        };
        // No endpoint at all is refused; none on this node, when it must be on this node, is
        // dropped, because another node might still answer.
        let none: &[Target] = &[];
        let internal = match (targets.any, service.internal_local) {
            (false, _) => (Entry::Reject, none),
            (true, true) if local.is_empty() => (Entry::Drop, none),
            (true, true) => (Entry::Inside, local),
            (true, false) => (Entry::Inside, cluster),
        };
        let external = match (targets.any, service.external_local) {
            (false, _) => (Entry::Reject, [none, none]),
            (true, true) => (Entry::Local, [local, cluster]),
            (true, false) => (Entry::Outside, [cluster, none]),
        };
        let at = |address| Front::Service(address, protocol, port.number);
        claim(at(cluster_ip), Right::Own, internal.0, [internal.1, none], &[]);
        if let Some(number) = port.node_port {
            let at = Front::NodePort(ipv4, protocol, number);
            claim(at, Right::Own, external.0, external.1, &[]);
        }
        for wanted in outside {
            if let Some(why) = (around.refused)(wanted, port.number) {
                let refusal = refusal(wanted.origin, at(wanted.address), &why);
                self.refusals.extend(refusal);
                continue;
            }
            if service.pool_ips.contains(&wanted.address) {
                self.shared.push(Element::PoolIp(wanted.address));
            }
            let right = Right::External(wanted.origin);
            let (entry, targets) = external;
            match &wanted.sources {
                Some(sources) => {
                    let sources = without_covered(sources);
                    claim(at(wanted.address), right, limited(entry), targets, &sources);
                }
                None => claim(at(wanted.address), right, entry, targets, &[]),
            }
        }
    }
}

/// The kernel takes no ranges that overlap.
fn without_covered(ranges: &[Cidr]) -> Vec<Cidr> {
    let mut kept: Vec<Cidr> = Vec::new();
    for range in ranges {
        if !kept.iter().any(|kept| kept.covers(*range)) {
            kept.retain(|kept| !range.covers(*kept));
            kept.push(*range);
        }
    }
    kept
}

fn limited(entry: Entry) -> Entry {
    match entry {
        Entry::Outside => Entry::LimitedOutside,
        Entry::Local => Entry::LimitedLocal,
        other => other,
    }
}

/// What a service is told of an address and port that it does not get.
pub fn refusal(origin: Origin, at: Front, why: &str) -> Option<String> {
    let Front::Service(address, protocol, port) = at else {
        return None;
    };
    let field = match origin {
        Origin::Spec => "spec.externalIPs",
        Origin::LoadBalancer => "status.loadBalancer.ingress",
    };
    let socket = std::net::SocketAddr::new(address, port);
    Some(format!(
        "{field}: {socket}/{} is not served: {why}",
        protocol.name()
    ))
}

/// The targets in an order that moves as few of them as can be: numbers must have no gaps, and each one that changes
/// is an element in the kernel.
fn arrange(before: &[Target], wanted: &[Target]) -> Vec<Target> {
    let wanted = &wanted[..wanted.len().min(MAX_ENDPOINTS)];
    if before.is_empty() {
        return wanted.to_vec();
    }
    let mut missing: BTreeSet<Target> = wanted.iter().copied().collect();
    let kept: Vec<Option<Target>> = (0..wanted.len())
        .map(|index| before.get(index).copied().filter(|target| missing.remove(target)))
        .collect();
    let mut missing = missing.into_iter();
    kept.into_iter()
        .filter_map(|kept| kept.or_else(|| missing.next()))
        .collect()
}

/// As `arrange`, where clients are remembered with the number of their endpoint: that keeps its number, new ones get new
/// numbers, and the numbers of those that are gone lead to others in turn, so that all have nearly as many. If there are
/// too many numbers, all begin anew, and clients may change over.
fn arrange_sticky(before: &[Target], wanted: &[Target]) -> Vec<Target> {
    let wanted = &wanted[..wanted.len().min(MAX_ENDPOINTS)];
    let mut shares: BTreeMap<Target, usize> = wanted.iter().map(|target| (*target, 0)).collect();
    let known: BTreeSet<Target> = before.iter().copied().collect();
    let new = wanted.iter().copied().filter(|target| !known.contains(target));
    let mut numbered: Vec<Target> = before.iter().copied().chain(new).collect();
    if wanted.is_empty() || numbered.len() > (4 * wanted.len() + 8).min(MAX_ENDPOINTS) {
        return wanted.to_vec();
    }
    for target in &numbered {
        if let Some(share) = shares.get_mut(target) {
            *share += 1;
        }
    }
    // Those of who is gone first; then, from the end, those of who has more than its part.
    let part = numbered.len().div_ceil(wanted.len());
    for rest in [false, true] {
        for number in (0..numbered.len()).rev() {
            let now = numbered[number];
            let give = match shares.get(&now) {
                None => true,
                Some(share) => rest && *share > part,
            };
            let Some((least, share)) = shares.iter().min_by_key(|(_, share)| **share) else {
                continue;
            };
            let (least, share) = (*least, *share);
            if give && (shares.get(&now).is_none_or(|now| *now > share)) {
                numbered[number] = least;
                *shares.entry(least).or_default() += 1;
                if let Some(share) = shares.get_mut(&now) {
                    *share -= 1;
                }
            }
        }
    }
    numbered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(numbers: &[u8]) -> Vec<Target> {
        numbers
            .iter()
            .map(|n| (IpAddr::from([10, 0, 0, *n]), 80))
            .collect()
    }

    #[test]
    fn few_endpoints_move() {
        let check = |before: &[u8], wanted: &[u8], expected: &[u8]| {
            let got = arrange(&targets(before), &targets(wanted));
            assert_eq!(got, targets(expected), "{before:?} {wanted:?}");
        };
        check(&[], &[1, 2, 3], &[1, 2, 3]);
        check(&[1, 2, 3], &[2, 3], &[3, 2]);
        check(&[1, 2, 3], &[1, 2], &[1, 2]);
        check(&[1, 2, 3], &[1, 2, 3, 4], &[1, 2, 3, 4]);
        check(&[1, 2, 3], &[1, 4, 3], &[1, 4, 3]);
        check(&[1, 2], &[], &[]);
    }

    #[test]
    fn clients_that_stay_keep_the_number_of_their_endpoint() {
        let check = |before: &[u8], wanted: &[u8], expected: &[u8]| {
            let got = arrange_sticky(&targets(before), &targets(wanted));
            assert_eq!(got, targets(expected), "{before:?} {wanted:?}");
        };
        check(&[], &[1, 2], &[1, 2]);
        check(&[1, 2], &[1, 2, 3], &[1, 2, 3]);
        check(&[1, 2, 3], &[1, 3], &[1, 1, 3]);
        check(&[1, 1, 3], &[1, 2, 3], &[1, 1, 3, 2]);
        check(&[1, 2], &[2], &[2, 2]);
        check(&[2, 2], &[1, 2], &[2, 2, 1]);
        // Who came back again and again does not get less than the others.
        let mut numbers = targets(&[1, 2]);
        for _ in 0..20 {
            numbers = arrange_sticky(&numbers, &targets(&[2]));
            numbers = arrange_sticky(&numbers, &targets(&[1, 2]));
            let ones = numbers
                .iter()
                .filter(|target| **target == targets(&[1])[0])
                .count();
            assert!(ones.abs_diff(numbers.len() - ones) <= 1, "{numbers:?}");
            assert!(numbers.len() <= 16);
        }
        check(&[1, 2], &[], &[]);
    }
}
