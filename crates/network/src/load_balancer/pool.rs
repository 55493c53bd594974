//! The addresses that Services of type LoadBalancer may get, and which one each gets. Pure: objects in, addresses and
//! refusals out.
//!
//! A Service keeps what its status shows, as long as it may have it; so what was given needs no other record.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use skiff_meta::net::Cidr;

use super::plan::{Planned, Source};
use super::shown;

/// The `loadBalancerClass` of Services that get an address of the pool, as those without a class do where there is one.
pub const POOL_CLASS: &str = "skiff.io/pool";
/// The condition of a Service by which nodes know that its addresses are the pool's, and theirs to announce.
pub const POOL_CONDITION: &str = "skiff.io/PoolAddress";

/// A network or a range of addresses of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    first: IpAddr,
    last: IpAddr,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a network (192.0.2.0/24) or a range of addresses (192.0.2.10-192.0.2.20)")]
pub struct RangeError(String);

impl FromStr for Range {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Range, RangeError> {
        let failed = || RangeError(text.to_owned());
        if let Some((first, last)) = text.split_once('-') {
            let parse = |text: &str| text.trim().parse::<IpAddr>().map_err(|_| failed());
            let (first, last) = (parse(first)?, parse(last)?);
            if first.is_ipv4() != last.is_ipv4() || last < first {
                return Err(failed());
            }
            return Ok(Range { first, last });
        }
        let network: Cidr = text.trim().parse().map_err(|_| failed())?;
        Ok(Range {
            first: network.address(),
            last: network.last(),
        })
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl Range {
    pub fn first(&self) -> IpAddr {
        self.first
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4() && self.first <= address && address <= self.last
    }

    pub fn overlaps(&self, network: Cidr) -> bool {
        network.is_ipv4() == self.first.is_ipv4()
            && self.first <= network.last()
            && network.address() <= self.last
    }

    /// All addresses, in order; there may be very many.
    fn addresses(self) -> impl Iterator<Item = IpAddr> {
        let last = self.last;
        std::iter::successors(Some(self.first), move |address| match address {
            _ if *address >= last => None,
            IpAddr::V4(address) => Some(Ipv4Addr::from_bits(address.to_bits().checked_add(1)?).into()),
            IpAddr::V6(address) => Some(Ipv6Addr::from_bits(address.to_bits().checked_add(1)?).into()),
        })
    }
}

/// The addresses of the Service that come from the pool, as its status says.
pub fn pool_addresses(service: &Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let is_balancer = spec.is_some_and(|spec| spec.type_.as_deref() == Some("LoadBalancer"));
    let deleted = service.metadata.deletion_timestamp.is_some();
    let status = service.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let has_condition = conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == POOL_CONDITION && condition.status == "True");
    if is_balancer && has_condition && !deleted {
        shown(service)
    } else {
        Vec::new()
    }
}

struct Family {
    ipv4: bool,
    name: &'static str,
}

/// The families that the Service wants an address of.
fn families_of(spec: &ServiceSpec) -> Vec<Family> {
    let wanted = spec.ip_families.as_deref().unwrap_or_default();
    let family = |ipv4: bool| Family {
        ipv4,
        name: if ipv4 { "IPv4" } else { "IPv6" },
    };
    let found: Vec<Family> = wanted.iter().map(|name| family(name == "IPv4")).collect();
    if found.is_empty() {
        return vec![family(true)];
    }
    found
}

/// `services`: those that want an address of the pool, the oldest first. `nodes` are addresses of nodes, which no Service
/// gets.
pub fn allocate(services: Vec<Arc<Service>>, pool: &[Range], nodes: &BTreeSet<IpAddr>) -> Vec<Planned> {
    let in_pool = |address: IpAddr| pool.iter().any(|range| range.contains(address));
    let mut taken: BTreeMap<IpAddr, String> = nodes
        .iter()
        .map(|address| (*address, "a node".to_owned()))
        .collect();
    // What Services have comes before what others want.
    let mut kept: Vec<Vec<IpAddr>> = Vec::with_capacity(services.len());
    for service in &services {
        let spec = service.spec.clone().unwrap_or_default();
        let asked = asked_address(&spec);
        let mut own: Vec<IpAddr> = Vec::new();
        for address in pool_addresses(service) {
            let families = families_of(&spec);
            let fits = families.iter().any(|family| family.ipv4 == address.is_ipv4())
                && !own.iter().any(|own| own.is_ipv4() == address.is_ipv4())
                && match asked {
                    Some(Ok(asked)) => asked.is_ipv4() != address.is_ipv4() || asked == address,
                    _ => true,
                };
            if fits && in_pool(address) && !taken.contains_key(&address) {
                taken.insert(address, name_of(service));
                own.push(address);
            }
        }
        kept.push(own);
    }
    let mut planned = Vec::with_capacity(services.len());
    for (service, kept) in services.into_iter().zip(kept) {
        let found = complete(&service, &kept, pool, &mut taken);
        let (addresses, refusal) = match found {
            Ok(addresses) => (addresses, None),
            Err(refusal) => {
                for address in kept {
                    taken.remove(&address);
                }
                (Vec::new(), Some(refusal))
            }
        };
        planned.push(Planned {
            service,
            addresses,
            refusal,
            source: Source::Pool,
        });
    }
    planned
}

fn asked_address(spec: &ServiceSpec) -> Option<Result<IpAddr, String>> {
    let text = spec.load_balancer_ip.as_deref().filter(|text| !text.is_empty())?;
    Some(
        text.parse()
            .map_err(|_| format!("spec.loadBalancerIP {text} is not an address")),
    )
}

/// What a Service gets in all its families, of which it has some already.
fn complete(
    service: &Service,
    kept: &[IpAddr],
    pool: &[Range],
    taken: &mut BTreeMap<IpAddr, String>,
) -> Result<Vec<IpAddr>, String> {
    let spec = service.spec.clone().unwrap_or_default();
    let families = families_of(&spec);
    let asked = asked_address(&spec).transpose()?;
    if let Some(asked) = asked {
        if !families.iter().any(|family| family.ipv4 == asked.is_ipv4()) {
            return Err(format!(
                "spec.loadBalancerIP {asked} is in no family of the Service"
            ));
        }
        if !pool.iter().any(|range| range.contains(asked)) {
            return Err(format!(
                "spec.loadBalancerIP {asked} is not in the pool of addresses"
            ));
        }
        if let Some(owner) = taken.get(&asked).filter(|_| !kept.contains(&asked)) {
            return Err(format!("spec.loadBalancerIP {asked} belongs to {owner}"));
        }
    }
    let (mut found, mut added, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for family in &families {
        let of_family = |address: &&IpAddr| address.is_ipv4() == family.ipv4;
        let own = kept.iter().find(of_family).copied();
        let free = || {
            let ranges = pool.iter().filter(|range| range.first.is_ipv4() == family.ipv4);
            let mut addresses = ranges.flat_map(|range| range.addresses());
            addresses.find(|address| !taken.contains_key(address) && !added.contains(address))
        };
        let chosen = own
            .or(asked.filter(|asked| asked.is_ipv4() == family.ipv4))
            .or_else(free);
        match chosen {
            Some(address) => {
                found.push(address);
                added.push(address);
            }
            None => missing.push(family),
        }
    }
    let both = spec.ip_family_policy.as_deref() == Some("RequireDualStack");
    if let Some(family) = missing.first().filter(|_| both || found.is_empty()) {
        let has_some = pool.iter().any(|range| range.first.is_ipv4() == family.ipv4);
        return Err(match has_some {
            true => format!("all {} addresses of the pool are taken", family.name),
            false => format!("the pool has no {} addresses", family.name),
        });
    }
    taken.extend(added.into_iter().map(|address| (address, name_of(service))));
    Ok(found)
}

fn name_of(service: &Service) -> String {
    let meta = &service.metadata;
    format!(
        "Service {}/{}",
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(name: &str, spec: Value, shown: &[&str]) -> Arc<Service> {
        let mut object =
            json!({"metadata": {"name": name, "namespace": "d"}, "spec": {"type": "LoadBalancer"}});
        if let (Some(all), Some(spec)) = (object["spec"].as_object_mut(), spec.as_object()) {
            all.extend(spec.clone());
        }
        let entries: Vec<Value> = shown.iter().map(|ip| json!({"ip": ip})).collect();
        object["status"] = json!({"loadBalancer": {"ingress": entries}, "conditions": [{"type": POOL_CONDITION,
            "status": "True", "reason": "Allocated", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn check(services: &[Arc<Service>], expected: &[Result<&[&str], &str>]) {
        let pool: Vec<Range> = ["192.0.2.10-192.0.2.12", "2001:db8::/64"]
            .map(|text| text.parse().unwrap())
            .to_vec();
        let nodes = BTreeSet::from(["192.0.2.11".parse().unwrap()]);
        let planned = allocate(services.to_vec(), &pool, &nodes);
        assert_eq!(planned.len(), expected.len());
        for (planned, expected) in planned.iter().zip(expected) {
            let found: Vec<String> = planned.addresses.iter().map(ToString::to_string).collect();
            match expected {
                Ok(expected) => assert_eq!(
                    (found, &planned.refusal),
                    (expected.iter().map(|s| s.to_string()).collect(), &None)
                ),
                Err(expected) => {
                    let refusal = planned.refusal.clone().unwrap_or_default();
                    assert!(
                        refusal.contains(expected) && found.is_empty(),
                        "{refusal} {found:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn addresses_are_given_once_and_kept() {
        let plain = |name: &str, shown: &[&str]| service(name, json!({"ipFamilies": ["IPv4"]}), shown);
        check(
            &[plain("a", &[]), plain("b", &[]), plain("c", &[])],
            &[
                Ok(&["192.0.2.10"]),
                Ok(&["192.0.2.12"]),
                Err("all IPv4 addresses of the pool are taken"),
            ],
        );
        check(
            &[plain("a", &[]), plain("b", &["192.0.2.10"])],
            &[Ok(&["192.0.2.12"]), Ok(&["192.0.2.10"])],
        );
        // Two leaders wrote at once: the older Service keeps it. What is not in the pool any more is replaced.
        check(
            &[
                plain("a", &["192.0.2.10"]),
                plain("b", &["192.0.2.10"]),
                plain("c", &["203.0.113.1"]),
            ],
            &[Ok(&["192.0.2.10"]), Ok(&["192.0.2.12"]), Err("taken")],
        );
    }

    #[test]
    fn wishes_and_families() {
        let asks = |name: &str, address: &str| {
            service(
                name,
                json!({"ipFamilies": ["IPv4"], "loadBalancerIP": address}),
                &["192.0.2.10"],
            )
        };
        check(&[asks("a", "192.0.2.12")], &[Ok(&["192.0.2.12"])]);
        check(
            &[asks("a", "192.0.2.12"), asks("b", "192.0.2.12")],
            &[Ok(&["192.0.2.12"]), Err("belongs to Service d/a")],
        );
        check(&[asks("a", "192.0.2.11")], &[Err("belongs to a node")]);
        check(&[asks("a", "203.0.113.1")], &[Err("not in the pool")]);
        check(&[asks("a", "2001:db8::1")], &[Err("in no family")]);
        let both = json!({"ipFamilies": ["IPv6", "IPv4"], "ipFamilyPolicy": "RequireDualStack"});
        check(
            &[service("a", both.clone(), &[])],
            &[Ok(&["2001:db8::", "192.0.2.10"])],
        );
        check(
            &[service("a", both, &["192.0.2.12"])],
            &[Ok(&["2001:db8::", "192.0.2.12"])],
        );
    }

    #[test]
    fn what_is_a_range() {
        for (text, expected) in [
            ("192.0.2.0/30", Some(("192.0.2.0", "192.0.2.3"))),
            ("192.0.2.1 - 192.0.2.2", Some(("192.0.2.1", "192.0.2.2"))),
            ("2001:db8::1-2001:db8::f", Some(("2001:db8::1", "2001:db8::f"))),
            ("192.0.2.2-192.0.2.1", None),
            ("192.0.2.2-2001:db8::", None),
            ("nonsense", None),
        ] {
            let found = text.parse::<Range>().ok();
            let found = found.map(|range| (range.first.to_string(), range.last.to_string()));
            let expected = expected.map(|(a, b): (&str, &str)| (a.to_owned(), b.to_owned()));
            assert_eq!(found, expected, "{text}");
        }
        let all: Range = "255.255.255.254/31".parse().unwrap();
        assert_eq!(all.addresses().count(), 2);
    }
}
