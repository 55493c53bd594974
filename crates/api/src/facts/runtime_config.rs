//! Which group versions are served: upstream's `--runtime-config`. What is on by default stays on, because skiff's own
//! components use it; what is off by default is served when it is asked for and the fact tables have it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Resource, resources};
use crate::core::pod_gates::Features;

/// The group versions of v1.36 that are off by default, whether the tables have them or not.
const OFF_BY_DEFAULT: &[(&str, &str)] = &[
    ("admissionregistration.k8s.io", "v1alpha1"),
    ("admissionregistration.k8s.io", "v1beta1"),
    ("authentication.k8s.io", "v1alpha1"),
    ("authentication.k8s.io", "v1beta1"),
    ("certificates.k8s.io", "v1alpha1"),
    ("certificates.k8s.io", "v1beta1"),
    ("coordination.k8s.io", "v1alpha2"),
    ("coordination.k8s.io", "v1beta1"),
    ("flowcontrol.apiserver.k8s.io", "v1beta1"),
    ("flowcontrol.apiserver.k8s.io", "v1beta2"),
    ("flowcontrol.apiserver.k8s.io", "v1beta3"),
    ("internal.apiserver.k8s.io", "v1alpha1"),
    ("networking.k8s.io", "v1beta1"),
    ("resource.k8s.io", "v1alpha3"),
    ("resource.k8s.io", "v1beta1"),
    ("resource.k8s.io", "v1beta2"),
    ("scheduling.k8s.io", "v1alpha2"),
    ("storage.k8s.io", "v1alpha1"),
    ("storage.k8s.io", "v1beta1"),
    ("storagemigration.k8s.io", "v1beta1"),
];

/// A key, and which versions it speaks of.
type Level = (&'static str, fn(&str) -> bool);

/// The keys that speak of many group versions, in the order in which they are applied.
const LEVELS: &[Level] = &[
    ("api/all", |_| true),
    ("api/ga", |version| !is_beta(version) && !is_alpha(version)),
    ("api/beta", is_beta),
    ("api/alpha", is_alpha),
];

fn is_alpha(version: &str) -> bool {
    version.contains("alpha")
}

fn is_beta(version: &str) -> bool {
    version.contains("beta")
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuntimeConfigError {
    #[error(
        "invalid key {0:?}: write group/version, group/version/resource, api/all, api/ga, api/beta or api/alpha"
    )]
    Key(String),
    #[error("invalid value {0}={1}: write true or false")]
    Value(String, String),
    #[error("unknown api group {0:?}")]
    Group(String),
    #[error("Kubernetes v1.36 has no API {0:?}")]
    Version(String),
    #[error("{0} has no resource {1:?}")]
    Resource(String, String),
    #[error("skiff does not serve {0}; of the APIs that are off by default it serves: {1}")]
    NotBuilt(String, String),
    #[error("{0} cannot be turned off: skiff's own components use it")]
    Needed(String),
}

/// What is served beside the APIs that are on by default.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuntimeConfig {
    /// Group, version and plural name.
    on: BTreeSet<(&'static str, &'static str, &'static str)>,
    /// Group versions that `api/all`, `api/beta` or `api/alpha` ask for, which the tables do not have.
    missing: Vec<String>,
}

impl RuntimeConfig {
    /// Reads `key=value` pairs. As upstream has it, a key without a value is `true`, the keys for many group versions come
    /// first, then those of group versions, then those of resources; of equal keys the last one counts.
    pub fn parse<S: AsRef<str>>(pairs: &[S]) -> Result<RuntimeConfig, RuntimeConfigError> {
        let mut values: BTreeMap<&str, bool> = BTreeMap::new();
        for pair in pairs {
            let (key, value) = pair.as_ref().split_once('=').unwrap_or((pair.as_ref(), "true"));
            let value = match value {
                "true" | "True" | "TRUE" | "t" | "T" | "1" => true,
                "false" | "False" | "FALSE" | "f" | "F" | "0" => false,
                _ => return Err(RuntimeConfigError::Value(key.to_owned(), value.to_owned())),
            };
            values.insert(key, value);
        }
        let mut versions: BTreeMap<(&str, &str), bool> =
            OFF_BY_DEFAULT.iter().map(|gv| (*gv, false)).collect();
        versions.extend(
            resources()
                .iter()
                .filter(|r| r.on_by_default)
                .map(|r| ((r.group, r.version), true)),
        );
        for (level, includes) in LEVELS {
            if let Some(value) = values.remove(level) {
                let of_level = versions.iter_mut().filter(|((_, version), _)| includes(version));
                of_level.for_each(|(_, on)| *on = value);
            }
        }
        let mut config = RuntimeConfig::default();
        let built = |group: &str, version: &str| {
            resources()
                .iter()
                .any(|r| r.group == group && r.version == version)
        };
        let asked = versions
            .iter()
            .filter(|((group, version), on)| **on && !built(group, version));
        config.missing = asked
            .map(|((group, version), _)| format!("{group}/{version}"))
            .collect();
        let mut of_resources = Vec::new();
        for (key, value) in values {
            let (group, version, plural) = match key.split('/').collect::<Vec<_>>()[..] {
                [group, version] => (group, version, None),
                [group, version, plural] => (group, version, Some(plural)),
                _ => return Err(RuntimeConfigError::Key(key.to_owned())),
            };
            let api = format!("{group}/{version}");
            if !versions.keys().any(|(known, _)| *known == group) {
                return Err(RuntimeConfigError::Group(group.to_owned()));
            }
            let Some(on) = versions.get_mut(&(group, version)) else {
                return Err(RuntimeConfigError::Version(api));
            };
            if !built(group, version) {
                match value {
                    true => return Err(RuntimeConfigError::NotBuilt(api, on_request().join(", "))),
                    false => config.missing.retain(|missing| *missing != api),
                }
                continue;
            }
            match plural {
                None => *on = value,
                Some(plural) => match super::resource(group, version, plural) {
                    Some(resource) => of_resources.push((resource, value)),
                    None => return Err(RuntimeConfigError::Resource(api, plural.to_owned())),
                },
            }
        }
        for resource in resources() {
            let own = of_resources.iter().find(|(of, _)| std::ptr::eq(*of, resource));
            let on = match own {
                Some((_, value)) => *value,
                None => versions
                    .get(&(resource.group, resource.version))
                    .copied()
                    .unwrap_or(true),
            };
            match (resource.on_by_default, on) {
                (true, false) => return Err(RuntimeConfigError::Needed(resource.api_version())),
                (false, true) => {
                    config
                        .on
                        .insert((resource.group, resource.version, resource.plural));
                }
                _ => {}
            }
        }
        Ok(config)
    }

    pub fn serves(&self, resource: &Resource) -> bool {
        resource.on_by_default
            || self
                .on
                .contains(&(resource.group, resource.version, resource.plural))
    }

    /// Whether a resource of a group version that is off by default is served.
    pub fn serves_on_request(&self, group: &str, version: &str, plural: &str) -> bool {
        self.on
            .iter()
            .any(|(g, v, p)| *g == group && *v == version && *p == plural)
    }

    /// What was asked for as part of more, and is not served.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// The features of pods that go with the APIs.
    ///
    /// COMPAT: upstream has a feature gate of its own for these, which takes effect only where the API is served.
    pub fn pod_features(&self) -> Features {
        let certificates = |plural: &str| self.serves_on_request("certificates.k8s.io", "v1beta1", plural);
        Features {
            cluster_trust_bundles: certificates("clustertrustbundles"),
            pod_certificates: certificates("podcertificaterequests"),
            pod_groups: self.serves_on_request("scheduling.k8s.io", "v1alpha2", "podgroups"),
        }
    }

    pub fn is_default(&self) -> bool {
        self.on.is_empty()
    }
}

/// The group versions that are served when they are asked for.
fn on_request() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for resource in resources().iter().filter(|resource| !resource.on_by_default) {
        let api = resource.api_version();
        if !found.contains(&api) {
            found.push(api);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIGRATION: &str = "storagemigration.k8s.io/v1beta1";

    fn served(pairs: &[&str]) -> bool {
        RuntimeConfig::parse(pairs).unwrap().serves_on_request(
            "storagemigration.k8s.io",
            "v1beta1",
            "storageversionmigrations",
        )
    }

    #[test]
    fn every_api_that_is_off_is_known() {
        for resource in resources() {
            let gv = (resource.group, resource.version);
            assert_eq!(resource.on_by_default, !OFF_BY_DEFAULT.contains(&gv), "{gv:?}");
        }
    }

    #[test]
    fn what_is_asked_for_is_served() {
        let pair = |rest: &str| format!("{MIGRATION}{rest}");
        for (pairs, expected) in [
            (vec![], false),
            (vec![pair("=true")], true),
            (vec![pair("")], true),
            (vec![pair("=false")], false),
            (vec![pair("=false"), pair("=1")], true),
            (vec![pair("/storageversionmigrations=true")], true),
            (
                vec![pair("=true"), pair("/storageversionmigrations=false")],
                false,
            ),
            (vec!["api/beta=true".to_owned()], true),
            (vec!["api/alpha=true".to_owned()], false),
            (
                vec!["api/all=true".to_owned(), "api/beta=false".to_owned()],
                false,
            ),
            (vec!["api/beta=true".to_owned(), pair("=false")], false),
            (vec!["api/all=false".to_owned(), "api/ga=true".to_owned()], false),
            (vec!["apps/v1=true".to_owned()], false),
        ] {
            let pairs: Vec<&str> = pairs.iter().map(String::as_str).collect();
            assert_eq!(served(&pairs), expected, "{pairs:?}");
        }
        let config = RuntimeConfig::parse(&["api/alpha=true", "storage.k8s.io/v1alpha1=false"]).unwrap();
        assert!(config.missing().contains(&"resource.k8s.io/v1alpha3".to_owned()));
        assert!(!config.missing().contains(&"storage.k8s.io/v1alpha1".to_owned()));
        assert!(config.pod_features().pod_groups);
        let workloads = RuntimeConfig::parse(&["scheduling.k8s.io/v1alpha2/workloads=true"]).unwrap();
        assert!(!workloads.pod_features().pod_groups && !workloads.is_default());
        assert!(!RuntimeConfig::default().pod_features().pod_groups);
        let version = "certificates.k8s.io/v1beta1";
        for (pairs, bundles, pods) in [
            (vec![], false, false),
            (vec![version.to_owned()], true, true),
            (vec![format!("{version}/clustertrustbundles=true")], true, false),
            (
                vec![format!("{version}/podcertificaterequests=true")],
                false,
                true,
            ),
            (
                vec![
                    version.to_owned(),
                    format!("{version}/podcertificaterequests=false"),
                ],
                true,
                false,
            ),
        ] {
            let config = RuntimeConfig::parse(&pairs).unwrap();
            assert!(config.missing().is_empty());
            let expected = Features {
                cluster_trust_bundles: bundles,
                pod_certificates: pods,
                ..Features::default()
            };
            assert_eq!(config.pod_features(), expected, "{pairs:?}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        for (pair, expected) in [
            (
                "v1=true",
                "invalid key \"v1\": write group/version, group/version/resource, api/all, api/ga, api/beta or api/alpha",
            ),
            (
                "apps/v1=maybe",
                "invalid value apps/v1=maybe: write true or false",
            ),
            ("example.com/v1=true", "unknown api group \"example.com\""),
            ("apps/v2=true", "Kubernetes v1.36 has no API \"apps/v2\""),
            (
                "storagemigration.k8s.io/v1beta1/pods=true",
                "storagemigration.k8s.io/v1beta1 has no resource \"pods\"",
            ),
            (
                "resource.k8s.io/v1beta1=true",
                "skiff does not serve resource.k8s.io/v1beta1; of the APIs that are off by default it serves: certificates.k8s.io/v1beta1, scheduling.k8s.io/v1alpha2, storagemigration.k8s.io/v1beta1",
            ),
            (
                "apps/v1=false",
                "apps/v1 cannot be turned off: skiff's own components use it",
            ),
            (
                "apps/v1/deployments=false",
                "apps/v1 cannot be turned off: skiff's own components use it",
            ),
            (
                "api/ga=false",
                "v1 cannot be turned off: skiff's own components use it",
            ),
        ] {
            assert_eq!(RuntimeConfig::parse(&[pair]).unwrap_err().to_string(), expected);
        }
    }
}
