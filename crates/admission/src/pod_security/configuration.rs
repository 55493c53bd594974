//! What the file of the plugin says: the levels of namespaces without labels, and who is not looked at.

use serde::Deserialize;

use super::{Level, LevelVersion, Policy, Version};

/// As the file has them; what is absent is `privileged` in its latest version.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Defaults {
    enforce: String,
    enforce_version: String,
    audit: String,
    audit_version: String,
    warn: String,
    warn_version: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Exemptions {
    usernames: Vec<String>,
    namespaces: Vec<String>,
    runtime_classes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    pub defaults: Policy,
    exemptions: Exemptions,
}

impl Default for Configuration {
    fn default() -> Configuration {
        Configuration {
            defaults: Policy::PRIVILEGED,
            exemptions: Exemptions::default(),
        }
    }
}

impl Configuration {
    pub fn new(defaults: &Defaults, exemptions: Exemptions) -> Result<Configuration, String> {
        let read = |name: &str, level: &str, version: &str| -> Result<LevelVersion, String> {
            let invalid = |field: &str, value: &str, why: &str| {
                format!("defaults.{field}: Invalid value: {value:?}: {why}")
            };
            let level = match level {
                "" => Level::Privileged,
                text => Level::read(text)
                    .ok_or_else(|| invalid(name, text, "must be one of privileged, baseline, restricted"))?,
            };
            let version = match version {
                "" => Version::Latest,
                text => Version::read(text).ok_or_else(|| {
                    invalid(&format!("{name}-version"), text, "must be \"latest\" or \"v1.x\"")
                })?,
            };
            Ok(LevelVersion { level, version })
        };
        Ok(Configuration {
            defaults: Policy {
                enforce: read("enforce", &defaults.enforce, &defaults.enforce_version)?,
                audit: read("audit", &defaults.audit, &defaults.audit_version)?,
                warn: read("warn", &defaults.warn, &defaults.warn_version)?,
            },
            exemptions,
        })
    }

    pub fn exempts_namespace(&self, name: &str) -> bool {
        !name.is_empty() && self.exemptions.namespaces.iter().any(|known| known == name)
    }

    pub fn exempts_user(&self, name: &str) -> bool {
        !name.is_empty() && self.exemptions.usernames.iter().any(|known| known == name)
    }

    pub fn exempts_runtime_class(&self, name: &str) -> bool {
        !name.is_empty() && self.exemptions.runtime_classes.iter().any(|known| known == name)
    }
}
