//! `extenders`: what the file says of each, checked as upstream checks it.

use super::election::duration;
use super::{ConfigError, invalid};
use crate::plugins::is_extended;
use serde::Deserialize;
use std::collections::HashSet;
use std::time::Duration;

/// Upstream's `DefaultExtenderTimeout`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct ExtenderFile {
    pub(crate) url_prefix: String,
    pub(crate) filter_verb: String,
    pub(crate) preempt_verb: String,
    pub(crate) prioritize_verb: String,
    pub(crate) weight: i64,
    pub(crate) bind_verb: String,
    #[serde(rename = "enableHTTPS")]
    pub(crate) enable_https: bool,
    pub(crate) tls_config: Option<TlsFile>,
    http_timeout: Option<String>,
    pub(crate) node_cache_capable: bool,
    pub(crate) managed_resources: Vec<ManagedResource>,
    pub(crate) ignorable: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct ManagedResource {
    pub(crate) name: String,
    pub(crate) ignored_by_scheduler: bool,
}

/// Data wins over the file of the same thing; data is base64.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct TlsFile {
    pub(crate) insecure: bool,
    pub(crate) server_name: Option<String>,
    pub(crate) cert_file: Option<String>,
    pub(crate) key_file: Option<String>,
    pub(crate) ca_file: Option<String>,
    pub(crate) cert_data: Option<String>,
    pub(crate) key_data: Option<String>,
    pub(crate) ca_data: Option<String>,
}

impl ExtenderFile {
    /// 0 is the default too.
    pub(crate) fn timeout(&self) -> Result<Duration, ConfigError> {
        let given = duration("httpTimeout", self.http_timeout.as_ref(), DEFAULT_TIMEOUT)?;
        Ok(if given.is_zero() { DEFAULT_TIMEOUT } else { given })
    }
}

pub(super) fn check(extenders: &[ExtenderFile]) -> Result<(), ConfigError> {
    let mut managed = HashSet::new();
    for (index, one) in extenders.iter().enumerate() {
        let field = |name: &str| format!("extenders[{index}].{name}");
        if one.url_prefix.is_empty() {
            return invalid(field("urlPrefix"), "must be set");
        }
        if !one.prioritize_verb.is_empty() && one.weight <= 0 {
            return invalid(field("weight"), "must have a positive weight applied to it");
        }
        for (place, resource) in one.managed_resources.iter().enumerate() {
            let field = field(&format!("managedResources[{place}].name"));
            if !is_extended(&resource.name) {
                return invalid(
                    field,
                    format!("{:?} is an invalid extended resource name", resource.name),
                );
            }
            if !managed.insert(&resource.name) {
                return invalid(field, "duplicate extender managed resource name");
            }
        }
    }
    let binders = extenders.iter().filter(|one| !one.bind_verb.is_empty()).count();
    if binders > 1 {
        return invalid(
            "extenders",
            format!("found {binders} extenders implementing bind, only one extender can implement bind"),
        );
    }
    Ok(())
}
