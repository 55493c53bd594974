//! The cluster IPs of a service: which families it has, and the addresses it takes of them.

use std::net::IpAddr;

use serde_json::{Value, json};
use skiff_meta::{Status, field};

use super::{NONE, Services, Taken, cluster_ips, family_name, invalid, strings};
use crate::object;

impl Services {
    /// Fills in ipFamilyPolicy and ipFamilies from what the cluster and the service have.
    pub(super) fn families(&self, service: &mut Value, old: Option<&Value>) -> Result<(), Status> {
        let headless = cluster_ips(service).first().is_some_and(|ip| ip == NONE);
        let selectorless = object::at(service, &["spec", "selector"])
            .and_then(Value::as_object)
            .is_none_or(|s| s.is_empty());
        let mut policy = object::at_str(service, &["spec", "ipFamilyPolicy"]).to_string();
        if policy.is_empty() {
            policy = match old
                .map(|old| object::at_str(old, &["spec", "ipFamilyPolicy"]))
                .filter(|policy| !policy.is_empty())
            {
                Some(policy) => policy.to_string(),
                None if headless && selectorless => "RequireDualStack".to_string(),
                None => "SingleStack".to_string(),
            };
        }
        object::put(service, &["spec", "ipFamilyPolicy"], json!(policy));
        let mut families = strings(service, "ipFamilies");
        let mut addresses = cluster_ips(service);
        if let Some(old) = old
            && policy == "SingleStack"
        {
            if addresses.len() > 1 && addresses == cluster_ips(old) {
                addresses.truncate(1);
                object::put(service, &["spec", "clusterIPs"], json!(addresses));
            }
            if families.len() > 1 && families == strings(old, "ipFamilies") {
                families.truncate(1);
            }
        }
        let policy_path = field::Path::new("spec.ipFamilyPolicy");
        let mut found = Vec::new();
        if policy == "SingleStack" {
            for (many, what) in [
                (addresses.len() == 2, "cluster IPs"),
                (families.len() == 2, "IP families"),
            ] {
                if many {
                    let detail = format!(
                        "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
                    );
                    found.push(field::Error::invalid(&policy_path, policy.as_str(), detail));
                }
            }
        }
        for (index, text) in addresses.iter().enumerate() {
            let Ok(address) = text.parse::<IpAddr>() else {
                break;
            };
            let family = family_name(address.is_ipv4());
            if index >= families.len() {
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
        }
        invalid(service, found)?;
        let default = self
            .shared
            .ranges
            .first()
            .map(|range| family_name(range.cidr().is_ipv4()))
            .unwrap_or("IPv4");
        if families.is_empty() {
            families.push(default.to_string());
        }
        let other = |family: &str| if family == "IPv4" { "IPv6" } else { "IPv4" };
        if headless && selectorless {
            if families.len() < 2 && policy != "SingleStack" {
                families.push(other(&families[0]).to_string());
            }
            object::put(service, &["spec", "ipFamilies"], json!(families));
            return Ok(());
        }
        let mut found = Vec::new();
        if policy == "RequireDualStack" && self.shared.ranges.len() < 2 {
            found.push(field::Error::invalid(
                &policy_path,
                policy.as_str(),
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
        if policy != "SingleStack" && families.len() == 1 && self.shared.ranges.len() == 2 {
            families.push(other(&families[0]).to_string());
        }
        object::put(service, &["spec", "ipFamilies"], json!(families));
        Ok(())
    }

    /// Takes the addresses asked for, and draws those that are missing.
    pub(super) fn addresses(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        taken: &mut Taken,
    ) -> Result<(), Status> {
        let mut addresses = cluster_ips(service);
        if addresses.first().is_some_and(|ip| ip == NONE) {
            object::put(service, &["spec", "clusterIP"], json!(NONE));
            object::put(service, &["spec", "clusterIPs"], json!([NONE]));
            return Ok(());
        }
        let held = old.map(cluster_ips).unwrap_or_default();
        let asked = json!(addresses);
        for (index, family) in strings(service, "ipFamilies").iter().enumerate() {
            let Some(range) = self.shared.family(family) else {
                continue;
            };
            match addresses.get(index).cloned().filter(|text| !text.is_empty()) {
                Some(text) if held.contains(&text) => {}
                Some(text) => {
                    // An address that cannot be read is validation's to refuse.
                    let Ok(address) = text.parse::<IpAddr>() else {
                        continue;
                    };
                    if let Err(error) = range.allocate(address) {
                        let detail = format!("failed to allocate IP {address}: {error}");
                        return invalid(
                            service,
                            vec![field::Error::invalid(
                                &field::Path::new("spec.clusterIPs"),
                                asked,
                                detail,
                            )],
                        );
                    }
                    taken.addresses.push(address);
                }
                None => {
                    let address = range.allocate_next().map_err(|error| {
                        Status::internal(format_args!(
                            "failed to allocate a serviceIP for Service \"{}\": {error}",
                            object::name(service)
                        ))
                    })?;
                    taken.addresses.push(address);
                    if index < addresses.len() {
                        addresses[index] = address.to_string();
                    } else {
                        addresses.push(address.to_string());
                    }
                }
            }
        }
        object::put(
            service,
            &["spec", "clusterIP"],
            json!(addresses.first().cloned().unwrap_or_default()),
        );
        object::put(service, &["spec", "clusterIPs"], json!(addresses));
        Ok(())
    }
}

/// clusterIP is the older name of clusterIPs[0]: whichever the client changed leads.
pub(super) fn normalise_cluster_ips(service: &mut Value, old: Option<&Value>) {
    let one = object::at_str(service, &["spec", "clusterIP"]).to_string();
    let many = cluster_ips(service);
    match old {
        None => {
            if !one.is_empty() && many.is_empty() {
                object::put(service, &["spec", "clusterIPs"], json!([one]));
            } else if one.is_empty()
                && let Some(first) = many.first()
            {
                object::put(service, &["spec", "clusterIP"], json!(first));
            }
        }
        Some(old) => {
            let (old_one, old_many) = (object::at_str(old, &["spec", "clusterIP"]), cluster_ips(old));
            if one != old_one && many == old_many {
                let list = if one.is_empty() { json!([]) } else { json!([one]) };
                object::put(service, &["spec", "clusterIPs"], list);
            } else if one == old_one
                && many != old_many
                && let Some(first) = many.first()
            {
                object::put(service, &["spec", "clusterIP"], json!(first));
            } else if many.is_empty() && !one.is_empty() {
                object::put(service, &["spec", "clusterIPs"], json!([one]));
            }
        }
    }
}
