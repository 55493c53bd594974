//! The file of `--encryption-provider-config`: an `EncryptionConfiguration` as upstream reads it, with upstream's
//! validation and messages.

use std::collections::HashSet;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use skiff_meta::field::{self, Path};

use crate::Error;

const API_VERSION: &str = "apiserver.config.k8s.io/v1";
const KIND: &str = "EncryptionConfiguration";
const AES_KEY_SIZES: &[usize] = &[16, 24, 32];
const SECRETBOX_KEY_SIZES: &[usize] = &[32];
const DEFAULT_KMS_TIMEOUT: &str = "3s";
const NO_PROVIDER: &str =
    "provider does not contain any of the expected providers: KMS, AESGCM, AESCBC, Secretbox, Identity";
const SEVERAL_PROVIDERS: &str =
    "more than one provider specified in a single element, should split into different list elements";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Configuration {
    api_version: String,
    kind: String,
    #[serde(default)]
    pub resources: Vec<ResourceConfiguration>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResourceConfiguration {
    #[serde(default)]
    pub resources: Vec<String>,
    #[serde(default)]
    pub providers: Vec<ProviderConfiguration>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProviderConfiguration {
    pub aesgcm: Option<Keys>,
    pub aescbc: Option<Keys>,
    pub secretbox: Option<Keys>,
    pub identity: Option<IdentityConfiguration>,
    pub kms: Option<KmsConfiguration>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IdentityConfiguration {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Keys {
    #[serde(default)]
    pub keys: Vec<Key>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Key {
    #[serde(default)]
    pub name: String,
    /// Base64.
    #[serde(default)]
    pub secret: String,
}

/// Without the secret: what is printed ends up in logs.
impl std::fmt::Debug for Key {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Key")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct KmsConfiguration {
    #[serde(default = "v1")]
    pub api_version: String,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub endpoint: String,
    #[serde(default = "default_kms_timeout")]
    timeout: String,
    #[serde(rename = "cachesize")]
    cache_size: Option<i32>,
}

/// COMPAT: upstream's default is the version that it refuses.
fn v1() -> String {
    "v1".to_owned()
}

fn default_kms_timeout() -> String {
    DEFAULT_KMS_TIMEOUT.to_owned()
}

impl Key {
    pub fn bytes(&self) -> Option<Vec<u8>> {
        STANDARD.decode(&self.secret).ok()
    }
}

impl KmsConfiguration {
    pub fn timeout(&self) -> Option<Duration> {
        let nanoseconds = u64::try_from(skiff_meta::duration::parse(&self.timeout).ok()?).ok()?;
        (nanoseconds > 0).then(|| Duration::from_nanos(nanoseconds))
    }

    /// The socket's path; a leading `@` is the abstract namespace's.
    pub fn socket(&self) -> Option<&str> {
        let path = self.endpoint.strip_prefix("unix://")?;
        match path.strip_prefix("/@") {
            Some(_) => Some(&path[1..]),
            None => path.starts_with('/').then_some(path),
        }
    }
}

impl Configuration {
    /// `name` is how errors call the file.
    pub fn parse(text: &str, name: &str) -> Result<Configuration, Error> {
        if text.is_empty() {
            return Err(Error::Configuration(format!(
                "error while parsing file: error while loading file: encryption provider configuration file {name:?} is empty"
            )));
        }
        let decoding = |why: String| {
            Error::Configuration(format!(
                "error while parsing file: error decoding encryption provider configuration file {name:?}: {why}"
            ))
        };
        // Its own message shows the lines around an error, and these may hold keys.
        let config: Configuration =
            serde_saphyr::from_str(text).map_err(|error| decoding(error.without_snippet().to_string()))?;
        if config.api_version != API_VERSION || config.kind != KIND {
            let (version, kind) = (&config.api_version, &config.kind);
            return Err(decoding(format!(
                "no kind {kind:?} is registered for version {version:?}, expected {KIND} of {API_VERSION}"
            )));
        }
        let found = config.validate();
        if found.is_empty() {
            return Ok(config);
        }
        let mut list: Vec<String> = found.iter().map(ToString::to_string).collect();
        list.dedup();
        let why = match list.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        Err(Error::Configuration(format!("error while parsing file: {why}")))
    }

    fn validate(&self) -> Vec<field::Error> {
        let root = Path::new("resources");
        if self.resources.is_empty() {
            return vec![field::Error::required(
                &root,
                "at least one resources is required",
            )];
        }
        let mut errors = Vec::new();
        let mut kms_names = HashSet::new();
        for (at, resource) in self.resources.iter().enumerate() {
            let names = root.index(at).child("resources");
            let providers = root.index(at).child("providers");
            if resource.resources.is_empty() {
                errors.push(field::Error::required(
                    &names,
                    format!("at least one {names} is required"),
                ));
            }
            check_overlap(&resource.resources, &names, &mut errors);
            check_names(&resource.resources, &names, &mut errors);
            if resource.providers.is_empty() {
                let why = format!("at least one {providers} is required");
                errors.push(field::Error::required(&providers, why));
            }
            for (at, provider) in resource.providers.iter().enumerate() {
                provider.validate(&providers.index(at), &mut kms_names, &mut errors);
            }
        }
        errors
    }
}

impl ProviderConfiguration {
    fn validate<'a>(&'a self, path: &Path, kms_names: &mut HashSet<&'a str>, errors: &mut Vec<field::Error>) {
        let given: Vec<&str> = [
            ("aesgcm", self.aesgcm.is_some()),
            ("aescbc", self.aescbc.is_some()),
            ("secretbox", self.secretbox.is_some()),
            ("identity", self.identity.is_some()),
            ("kms", self.kms.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
        .collect();
        match given.len() {
            // Upstream prints the whole provider here, with its keys.
            0 => errors.push(field::Error::invalid(path, "{}", NO_PROVIDER)),
            1 => {}
            _ => errors.push(field::Error::invalid(path, given.join(","), SEVERAL_PROVIDERS)),
        }
        if let Some(kms) = &self.kms {
            kms.validate(&path.child("kms"), kms_names, errors);
            kms_names.insert(&kms.name);
        } else if let Some(keys) = &self.aesgcm {
            keys.validate(&path.child("aesgcm").child("keys"), AES_KEY_SIZES, errors);
        } else if let Some(keys) = &self.aescbc {
            keys.validate(&path.child("aescbc").child("keys"), AES_KEY_SIZES, errors);
        } else if let Some(keys) = &self.secretbox {
            keys.validate(
                &path.child("secretbox").child("keys"),
                SECRETBOX_KEY_SIZES,
                errors,
            );
        }
    }
}

impl Keys {
    fn validate(&self, path: &Path, sizes: &[usize], errors: &mut Vec<field::Error>) {
        if self.keys.is_empty() {
            errors.push(field::Error::required(path, "at least one keys is required"));
        }
        for (at, key) in self.keys.iter().enumerate() {
            let path = path.index(at);
            if key.name.is_empty() {
                let why = "name is a mandatory field for a key";
                errors.push(field::Error::required(&path.child("name"), why));
            }
            let path = path.child("secret");
            if key.secret.is_empty() {
                errors.push(field::Error::required(
                    &path,
                    "secret is a mandatory field for a key",
                ));
                continue;
            }
            let Some(bytes) = key.bytes() else {
                let why = "secrets must be base64 encoded";
                errors.push(field::Error::invalid(&path, "REDACTED", why));
                continue;
            };
            if !sizes.contains(&bytes.len()) {
                let expected: Vec<String> = sizes.iter().map(ToString::to_string).collect();
                let why = format!(
                    "secret is not of the expected length, got {}, expected one of [{}]",
                    bytes.len(),
                    expected.join(" ")
                );
                errors.push(field::Error::invalid(&path, "REDACTED", why));
            }
        }
    }
}

impl KmsConfiguration {
    fn validate(&self, path: &Path, others: &HashSet<&str>, errors: &mut Vec<field::Error>) {
        let name = path.child("name");
        if self.name.is_empty() {
            errors.push(field::Error::required(
                &name,
                "name is a mandatory field for a provider",
            ));
        }
        let old = self.api_version == "v1";
        if !old && self.name.contains(':') {
            let why = format!("invalid KMS provider name {}, must not contain ':'", self.name);
            errors.push(field::Error::invalid(&name, self.name.as_str(), why));
        }
        if !old && others.contains(self.name.as_str()) {
            let why = format!("duplicate KMS provider name {}, names must be unique", self.name);
            errors.push(field::Error::invalid(&name, self.name.as_str(), why));
        }
        if self.timeout().is_none() {
            let why = "timeout should be a positive value";
            errors.push(field::Error::invalid(
                &path.child("timeout"),
                self.timeout.as_str(),
                why,
            ));
        }
        let endpoint = path.child("endpoint");
        if self.endpoint.is_empty() {
            let why = "endpoint is a mandatory field for a kms";
            errors.push(field::Error::invalid(&endpoint, "", why));
        } else if self.socket().is_none() {
            let scheme = self.endpoint.split_once("://").map_or("", |(scheme, _)| scheme);
            let why = match scheme {
                "unix" => "invalid endpoint for kms provider, error: the path must be absolute".to_owned(),
                _ => format!("unsupported scheme {scheme:?} for KMS provider, only unix is supported"),
            };
            errors.push(field::Error::invalid(&endpoint, self.endpoint.as_str(), why));
        }
        if let (false, Some(size)) = (old, self.cache_size) {
            let why = "cachesize is not supported in v2";
            errors.push(field::Error::invalid(&path.child("cachesize"), size, why));
        }
        if !old && self.api_version != "v2" {
            let why = "unsupported apiVersion apiVersion for KMS provider, only v1 and v2 are supported";
            errors.push(field::Error::invalid(
                &path.child("apiVersion"),
                self.api_version.as_str(),
                why,
            ));
        }
    }
}

/// `secrets`, `deployments.apps`, `*.apps`, `*.` or `*.*` as resource and group.
pub(crate) fn group_resource(text: &str) -> (&str, &str) {
    let (resource, group) = text.split_once('.').unwrap_or((text, ""));
    (group, resource)
}

fn check_overlap(resources: &[String], path: &Path, errors: &mut Vec<field::Error>) {
    let parsed: Vec<(&str, &str)> = resources.iter().map(|text| group_resource(text)).collect();
    let (mut duplicate, mut overlap) = (false, false);
    for (i, one) in parsed.iter().enumerate() {
        for (j, other) in parsed.iter().enumerate() {
            if i == j {
                continue;
            }
            if one == other && !duplicate {
                duplicate = true;
            } else {
                overlap |= *one == ("*", "*") || (one.0 == other.0 && (one.1 == "*" || other.1 == "*"));
            }
        }
    }
    let mut refuse = |why: &str| errors.push(field::Error::invalid(path, resources.to_vec(), why));
    if duplicate {
        refuse("the same resource cannot be specified multiple times");
    }
    if overlap {
        refuse(
            "using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked",
        );
    }
}

fn check_names(resources: &[String], path: &Path, errors: &mut Vec<field::Error>) {
    for (at, text) in resources.iter().enumerate() {
        let (group, resource) = group_resource(text);
        let why = if text.to_lowercase() != *text {
            "resource name should not contain capital letters"
        } else if text == "*" {
            "use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources"
        } else if [
            "apiserveripinfo",
            "serviceipallocations",
            "servicenodeportallocations",
        ]
        .contains(&text.as_str())
        {
            "resources which do not have REST API/s cannot be encrypted"
        } else if group == "events.k8s.io" {
            "'*.events.k8s.io' objects are stored using the 'events' API group in etcd. Use 'events' instead in the config file"
        } else if group == "extensions" {
            "'extensions' group has been removed and cannot be used for encryption"
        } else if group == "*" && resource != "*" {
            "encrypting the same resource across groups is not supported"
        } else {
            continue;
        };
        errors.push(field::Error::invalid(&path.index(at), text.as_str(), why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn parse(resources: &str) -> Result<(), String> {
        let text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\nresources: {resources}\n");
        Configuration::parse(&text, "f")
            .map(drop)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_upstream_takes_is_taken() {
        for providers in [
            format!("[{{aescbc: {{keys: [{{name: a, secret: {KEY}}}]}}}}, {{identity: {{}}}}]"),
            "[{kms: {apiVersion: v2, name: a, endpoint: 'unix:///@a', timeout: 1s}}]".to_owned(),
        ] {
            for names in [
                "[secrets]",
                "['*.']",
                "['*.*']",
                "['*.apps', secrets]",
                "[foos.example.com]",
            ] {
                parse(&format!("[{{resources: {names}, providers: {providers}}}]")).unwrap();
            }
        }
    }

    #[test]
    fn what_upstream_refuses_is_refused_in_its_words() {
        let refused = |resources: &str, why: &str| {
            let error = parse(resources).expect_err(resources);
            assert!(error.contains(why), "{error}");
            assert!(!error.contains(KEY), "{error}");
        };
        refused(
            "[]",
            "resources: Required value: at least one resources is required",
        );
        refused(
            "[{}]",
            "resources[0].resources: Required value: at least one resources[0].resources is required",
        );
        refused(
            "[{resources: [secrets]}]",
            "resources[0].providers: Required value",
        );
        refused(
            "[{resources: [secrets], providers: [{}]}]",
            "does not contain any of the expected providers",
        );
        refused(
            "[{resources: [secrets], providers: [{nonsense: {}}]}]",
            "nonsense",
        );
        let named = |name: &str| format!("[{{resources: [{name}], providers: [{{identity: {{}}}}]}}]");
        for (name, why) in [
            ("Secrets", "should not contain capital letters"),
            ("'*'", "use '*.' to encrypt all the resources"),
            ("events.events.k8s.io", "Use 'events' instead"),
            ("ingresses.extensions", "'extensions' group has been removed"),
            ("'secrets.*'", "encrypting the same resource across groups"),
            ("serviceipallocations", "do not have REST API/s"),
            (
                "secrets, secrets",
                "the same resource cannot be specified multiple times",
            ),
            ("secrets, '*.'", "using overlapping resources"),
            ("secrets, '*.*'", "using overlapping resources"),
        ] {
            refused(&named(name), why);
        }
        let keys =
            |keys: &str| format!("[{{resources: [secrets], providers: [{{secretbox: {{keys: {keys}}}}}]}}]");
        refused(&keys("[]"), "at least one keys is required");
        refused(&keys("[{name: a}]"), "secret is a mandatory field for a key");
        refused(
            &keys("[{name: a, secret: '%'}]"),
            "\"REDACTED\": secrets must be base64 encoded",
        );
        refused(
            &keys("[{name: a, secret: MDEyMzQ1Njc4OWFiY2RlZg==}]"),
            "secret is not of the expected length, got 16, expected one of [32]",
        );
        refused(
            &keys(&format!("[{{secret: {KEY}}}]")),
            "name is a mandatory field for a key",
        );
        refused(&keys(&format!("[{{name: a, secret: {KEY}, x: 1}}]")), "x");
        let kms = |kms: &str| format!("[{{resources: [secrets], providers: [{{kms: {kms}}}]}}]");
        refused(
            &kms("{apiVersion: v2, name: 'a:b', endpoint: 'unix:///a'}"),
            "must not contain ':'",
        );
        refused(
            &kms("{apiVersion: v2, name: a, endpoint: 'http://a'}"),
            "unsupported scheme \"http\"",
        );
        refused(
            &kms("{apiVersion: v2, name: a, endpoint: 'unix:///a', timeout: 0s}"),
            "positive value",
        );
        refused(
            &kms("{apiVersion: v2, name: a, endpoint: 'unix:///a', cachesize: 1}"),
            "cachesize is not supported",
        );
        refused(
            &kms("{apiVersion: v3, name: a, endpoint: 'unix:///a'}"),
            "only v1 and v2 are supported",
        );
        assert!(
            Configuration::parse("", "f")
                .unwrap_err()
                .to_string()
                .contains("is empty")
        );
        let other = format!("apiVersion: v1\nkind: {KIND}\nresources: []\n");
        assert!(Configuration::parse(&other, "f").is_err());
    }
}
