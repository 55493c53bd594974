//! The cluster IPs of a service: which families it has, and the addresses it takes of them.

use std::net::IpAddr;

use serde_json::{Value, json};
use skiff_api::core::service::cluster_ip_errors;
use skiff_meta::{Status, field};

use super::{NONE, Services, Taken, cluster_ips, family_name, invalid, strings, type_of};
use crate::hooks::ip_allocator::IpError;
use crate::object;

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
            if self.shared.family(family).is_some() {
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
            .shared
            .ranges
            .first()
            .map(|range| family_name(range.cidr().is_ipv4()))
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
        if policy == "RequireDualStack" && self.shared.ranges.len() < 2 {
            found.push(complaint(
                "this cluster is not configured for dual-stack services",
            ));
        }
        for (index, family) in families.iter().enumerate() {
            if self.shared.family(family).is_none() {
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
        if policy != "SingleStack" && families.len() == 1 && self.shared.ranges.len() == 2 {
            families.push(other(&families[0]).to_string());
        }
        object::put(service, &["spec", "ipFamilies"], json!(families));
        Ok(())
    }

    /// Takes the addresses asked for, and draws those that are missing. An update takes a second address only:
    /// the first never changes.
    pub(super) fn addresses(
        &self,
        service: &mut Value,
        old: Option<&Value>,
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
        let asked = json!(addresses);
        for (index, family) in families.iter().enumerate().skip(usize::from(old.is_some())) {
            let Some(range) = self.shared.family(family) else {
                continue;
            };
            let text = addresses[index].clone();
            if text.is_empty() {
                let address = range.allocate_next().map_err(|error| {
                    Status::internal(format_args!(
                        "failed to allocate a serviceIP for Service \"{}\": {error}",
                        object::name(service)
                    ))
                })?;
                taken.addresses.push(address);
                addresses[index] = address.to_string();
                continue;
            }
            // An address that cannot be read is validation's to refuse.
            let Ok(address) = text.parse::<IpAddr>() else {
                continue;
            };
            let allocated = range.allocate(address);
            // COMPAT: a dry run does not ask whether somebody has the address.
            if taken.dry_run && allocated == Err(IpError::Allocated) {
                continue;
            }
            if let Err(error) = allocated {
                let detail = format!("failed to allocate IP {address}: {error}");
                let path = field::Path::new("spec.clusterIPs");
                return invalid(service, vec![field::Error::invalid(&path, asked, detail)]);
            }
            taken.addresses.push(address);
        }
        if old.is_none() {
            let first = json!(addresses.first().cloned().unwrap_or_default());
            object::put(service, &["spec", "clusterIP"], first);
        }
        object::put(service, &["spec", "clusterIPs"], json!(addresses));
        Ok(())
    }
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
