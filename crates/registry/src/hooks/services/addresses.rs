//! The cluster IPs of a service: which families it has, and the addresses it takes of them.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use skiff_api::core::service::cluster_ip_errors;
use skiff_meta::{Status, field};

use super::{NONE, Services, Taken, cluster_ips, family_name, invalid, ip_addresses, strings, type_of};
use crate::hooks::Asked;
use crate::hooks::cidr::Cidr;
use crate::{ListOptions, ReadAt, Registry, encode, errors, object};

impl Services {
    /// Fills in ipFamilyPolicy and ipFamilies from what the cluster and the service have.
    pub(super) fn families(&self, service: &mut Value, old: Option<&Value>) -> Result<(), Status> {
        if type_of(service) == "ExternalName" || old.is_some_and(|old| prefers_both_as_before(service, old)) {
            return Ok(());
        }
        let headless = object::at_str(service, &["spec", "clusterIP"]) == NONE;
        let selectorless = object::at(service, &["spec", "selector"])
            .and_then(Value::as_object)
            .is_none_or(|s| s.is_empty());
        if !has_policy(service) {
            let policy = match old.filter(|old| has_policy(old)) {
                Some(old) => policy_of(old),
                None if headless && selectorless => "RequireDualStack",
                None => "SingleStack",
            };
            let policy = json!(policy);
            object::put(service, &["spec", "ipFamilyPolicy"], policy);
        }
        // The allocation below need not think of nonsense.
        invalid(service, cluster_ip_errors(service, old))?;
        let policy = policy_of(service).to_string();
        let policy_path = field::Path::new("spec.ipFamilyPolicy");
        let complaint = |detail: &str| field::Error::invalid(&policy_path, policy.as_str(), detail);
        let mut families = strings(service, "ipFamilies");
        let mut addresses = cluster_ips(service);
        let mut found = Vec::new();
        if let Some(old) = old {
            let (old_addresses, old_families) = (cluster_ips(old), strings(old, "ipFamilies"));
            if policy == "SingleStack" {
                if addresses.len() > 1 && same_cluster_ips(old, service) {
                    addresses.truncate(1);
                    object::put(service, &["spec", "clusterIPs"], json!(addresses));
                }
                if families.len() > 1 && families == old_families {
                    families.truncate(1);
                }
            } else {
                if !addresses.is_empty() && addresses.len() < old_addresses.len() {
                    found.push(complaint(
                        "must be 'SingleStack' to release the secondary cluster IP",
                    ));
                }
                if !families.is_empty() && families.len() < old_families.len() {
                    found.push(complaint(
                        "must be 'SingleStack' to release the secondary IP family",
                    ));
                }
            }
        }
        if policy == "SingleStack" {
            for (many, what) in [
                (addresses.len() == 2, "cluster IPs"),
                (families.len() == 2, "IP families"),
            ] {
                if many {
                    found.push(complaint(&format!(
                        "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
                    )));
                }
            }
        }
        for (index, text) in addresses.iter().enumerate().skip(families.len()) {
            let Ok(address) = text.parse::<IpAddr>() else {
                break;
            };
            let family = family_name(address.is_ipv4());
            if self.has_family(family) {
                families.push(family.to_string());
            } else {
                let path = field::Path::new("spec.clusterIPs").index(index);
                found.push(field::Error::invalid(
                    &path,
                    json!(addresses),
                    format!("{family} is not configured on this cluster"),
                ));
            }
        }
        invalid(service, found)?;
        let default = self
            .cidrs
            .first()
            .map(|cidr| family_name(cidr.is_ipv4()))
            .unwrap_or("IPv4");
        let other = |family: &str| if family == "IPv4" { "IPv6" } else { "IPv4" };
        if headless && selectorless {
            if families.is_empty() {
                families.push(default.to_string());
            }
            if families.len() < 2 && policy != "SingleStack" {
                families.push(other(&families[0]).to_string());
            }
            object::put(service, &["spec", "ipFamilies"], json!(families));
            return Ok(());
        }
        let mut found = Vec::new();
        if policy == "RequireDualStack" && self.cidrs.len() < 2 {
            found.push(complaint(
                "this cluster is not configured for dual-stack services",
            ));
        }
        for (index, family) in families.iter().enumerate() {
            if !self.has_family(family) {
                let path = field::Path::new("spec.ipFamilies").index(index);
                found.push(field::Error::invalid(
                    &path,
                    family.as_str(),
                    "not configured on this cluster",
                ));
            }
        }
        invalid(service, found)?;
        if families.is_empty() {
            families.push(default.to_string());
        }
        if policy != "SingleStack" && families.len() == 1 && self.cidrs.len() == 2 {
            families.push(other(&families[0]).to_string());
        }
        object::put(service, &["spec", "ipFamilies"], json!(families));
        Ok(())
    }

    /// Takes the addresses asked for, and draws those that are missing. An update takes a second address only:
    /// the first never changes.
    pub(super) async fn addresses(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        asked: &Asked<'_>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        if type_of(service) == "ExternalName" || old.is_some_and(|old| prefers_both_as_before(service, old)) {
            return Ok(());
        }
        let families = strings(service, "ipFamilies");
        let old = old.filter(|old| type_of(old) != "ExternalName");
        if let Some(old) = old {
            let headless = cluster_ips(old).first().is_some_and(|ip| ip == NONE);
            let second = strings(old, "ipFamilies").len() == 1 && families.len() == 2;
            if headless || !second {
                return Ok(());
            }
        }
        let mut addresses = cluster_ips(service);
        if addresses.first().is_some_and(|ip| ip == NONE) {
            return Ok(());
        }
        addresses.resize(addresses.len().max(families.len()), String::new());
        let wanted = json!(addresses);
        let refused = |service: &Value, detail: String| {
            let path = field::Path::new("spec.clusterIPs");
            invalid(
                service,
                vec![field::Error::invalid(&path, wanted.clone(), detail)],
            )
        };
        for (index, family) in families.iter().enumerate().skip(usize::from(old.is_some())) {
            let text = addresses[index].clone();
            if text.is_empty() {
                match self.draw_address(family, asked, taken).await? {
                    Ok(address) => addresses[index] = address.to_string(),
                    Err(error @ IpError::Full) => {
                        return Err(Status::internal(format_args!(
                            "failed to allocate a serviceIP for Service \"{}\": {error}",
                            object::name(service)
                        )));
                    }
                    Err(error) => return refused(service, format!("failed to allocate IP: {error}")),
                }
                continue;
            }
            // An address that cannot be read is validation's to refuse.
            let Ok(address) = text.parse::<IpAddr>() else {
                continue;
            };
            if let Err(error) = self.reserve_address(address, asked, taken).await? {
                return refused(service, format!("failed to allocate IP {address}: {error}"));
            }
        }
        if old.is_none() {
            let first = json!(addresses.first().cloned().unwrap_or_default());
            object::put(service, &["spec", "clusterIP"], first);
        }
        object::put(service, &["spec", "clusterIPs"], json!(addresses));
        Ok(())
    }

    /// Takes the address that the service asks for.
    async fn reserve_address(
        &self,
        address: IpAddr,
        asked: &Asked<'_>,
        taken: &mut Taken,
    ) -> Result<Result<(), IpError>, Status> {
        let mut ranges = ready_ranges(asked.registry, address.is_ipv4(), asked.again).await?;
        let has = |ranges: &[Cidr]| ranges.iter().any(|range| range.hands_out(address));
        if !has(&ranges) && !asked.again {
            ranges = ready_ranges(asked.registry, address.is_ipv4(), true).await?;
        }
        if taken.dry_run {
            // COMPAT: a dry run does not ask whether somebody has the address.
            return Ok(match ranges.first() {
                _ if has(&ranges) => Ok(()),
                Some(range) => Err(IpError::NotInRange(address, *range)),
                None => Err(IpError::NotReady),
            });
        }
        if !has(&ranges) {
            return Ok(Err(IpError::Mismatched));
        }
        let key = ip_addresses::key(asked.registry, address)?;
        if asked.registry.read_stored(&key).await?.is_some() {
            return Ok(Err(IpError::Allocated));
        }
        taken.hold.address(address);
        taken.addresses.push(address);
        Ok(Ok(()))
    }

    /// Takes a free address of the family.
    async fn draw_address(
        &self,
        family: &str,
        asked: &Asked<'_>,
        taken: &mut Taken,
    ) -> Result<Result<IpAddr, IpError>, Status> {
        let v4 = family == family_name(true);
        if taken.dry_run {
            // COMPAT: what a dry run shows is the address of the network, which no service gets.
            let ranges = ready_ranges(asked.registry, v4, false).await?;
            let range = ranges.first().ok_or(IpError::NotReady);
            return Ok(range.map(Cidr::network));
        }
        let source = if asked.again { Source::Store } else { Source::Cache };
        let ranges = ready_ranges(asked.registry, v4, asked.again).await?;
        let mut found = find_free(asked.registry, &ranges, source, taken).await?;
        if found.is_none() {
            // The cache may not have seen what was given back a moment ago.
            let ranges = ready_ranges(asked.registry, v4, true).await?;
            let names = allocated_names(asked.registry).await?;
            found = find_free(asked.registry, &ranges, Source::Listed(names), taken).await?;
        }
        Ok(found
            .ok_or(IpError::Full)
            .inspect(|address| taken.addresses.push(*address)))
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
enum IpError {
    #[error("provided IP is already allocated")]
    Allocated,
    #[error("the provided IP ({0}) is not in the valid range. The range of valid IPs is {1}")]
    NotInRange(IpAddr, Cidr),
    #[error("the provided network does not match the current range")]
    Mismatched,
    #[error("range is full")]
    Full,
    #[error("allocator not ready")]
    NotReady,
}

/// Who says whether an address is taken. Each may be behind; the transaction that takes it decides.
enum Source {
    Cache,
    /// The cache, and the store about what is not in it.
    Store,
    /// The keys that are in the store.
    Listed(HashSet<Arc<str>>),
}

/// A look at this many addresses in a row lets others have their turn.
const STRIDE: usize = 4096;

async fn find_free(
    registry: &Registry,
    ranges: &[Cidr],
    source: Source,
    taken: &mut Taken,
) -> Result<Option<IpAddr>, Status> {
    let cache = registry.cache(ip_addresses::resource(registry)?);
    for range in ranges {
        for (nth, address) in range.candidates().enumerate() {
            if nth % STRIDE == STRIDE - 1 {
                tokio::task::yield_now().await;
            }
            let key = ip_addresses::key(registry, address)?;
            let is_taken = match &source {
                Source::Listed(keys) => keys.contains(&*key),
                // What cannot be read is taken.
                Source::Cache | Source::Store => match cache.get(&key, ReadAt::Any).await {
                    Ok(found) => found.is_some(),
                    Err(skiff_cache::Error::Unreadable(_)) => true,
                    Err(error) => return Err(crate::cache_error(error)),
                },
            };
            if is_taken || !taken.hold.address(address) {
                continue;
            }
            if matches!(source, Source::Store) && registry.read_stored(&key).await?.is_some() {
                taken.hold.drop_last_address();
                continue;
            }
            return Ok(Some(address));
        }
    }
    Ok(None)
}

async fn allocated_names(registry: &Registry) -> Result<HashSet<Arc<str>>, Status> {
    let prefix = &ip_addresses::resource(registry)?.prefix;
    let found = registry.store.range(prefix, None, 0, None).await;
    let items = found.map_err(errors::store)?.items;
    Ok(items.into_iter().map(|item| item.key).collect())
}

/// The ranges of a family that services get addresses of: those of the ServiceCIDRs that are ready and stay. In an order
/// of chance, as upstream's.
async fn ready_ranges(registry: &Registry, v4: bool, from_store: bool) -> Result<Vec<Cidr>, Status> {
    let resource = registry.resources.get("networking.k8s.io", "v1", "servicecidrs");
    let resource = resource.ok_or_else(|| Status::internal("no resource servicecidrs"))?;
    let mut ranges = Vec::new();
    let mut add = |object: &Value| {
        if !object::deleting(object) && is_ready(object) {
            let cidrs = strings(object, "cidrs");
            let parsed = cidrs.iter().filter_map(|text| Cidr::parse(text).ok());
            ranges.extend(parsed.filter(|cidr| cidr.is_ipv4() == v4));
        }
    };
    if from_store {
        let found = registry.store.range(&resource.prefix, None, 0, None).await;
        for item in found.map_err(errors::store)?.items {
            if let Ok(object) = resource.read(&item) {
                add(&object);
            }
        }
    } else {
        let options = ListOptions {
            at: ReadAt::Any,
            skip_unreadable: true,
            ..ListOptions::default()
        };
        for entry in registry.list(resource, options).await?.items {
            add(&encode::decode(&entry.bytes)?);
        }
    }
    if ranges.len() > 1 {
        let first = rand::random_range(0..ranges.len());
        ranges.rotate_left(first);
    }
    Ok(ranges)
}

/// Without a condition it is ready, as upstream has it: its controller may not be running.
fn is_ready(service_cidr: &Value) -> bool {
    let conditions = object::at(service_cidr, &["status", "conditions"]).and_then(Value::as_array);
    conditions
        .into_iter()
        .flatten()
        .find(|condition| condition["type"] == "Ready")
        .is_none_or(|condition| condition["status"] == "True")
}

fn policy_of(service: &Value) -> &str {
    object::at_str(service, &["spec", "ipFamilyPolicy"])
}

/// Set to something, be it nonsense.
fn has_policy(service: &Value) -> bool {
    object::at(service, &["spec", "ipFamilyPolicy"]).is_some_and(|policy| !policy.is_null())
}

fn same_cluster_ips(old: &Value, new: &Value) -> bool {
    cluster_ips(old) == cluster_ips(new)
}

/// A service that takes both families where it can get them does not change when the cluster does.
fn prefers_both_as_before(new: &Value, old: &Value) -> bool {
    const PREFER: &str = "PreferDualStack";
    policy_of(new) == PREFER
        && (policy_of(old) == PREFER || !has_policy(old))
        && type_of(new) == type_of(old)
        && matches!(type_of(new), "ClusterIP" | "NodePort" | "LoadBalancer")
        && same_cluster_ips(old, new)
        && strings(old, "ipFamilies") == strings(new, "ipFamilies")
}
