//! The providers of one resource in the order of the configuration. The first one writes; each value is read by
//! those whose prefix it has.

use std::sync::Arc;

use bytes::Bytes;

use crate::Error;
use crate::cipher::{Cipher, Result};
use crate::config::{Keys, ProviderConfiguration, ResourceConfiguration};
use crate::kms::Kms;

/// What every encrypted value starts with.
pub(crate) const ENCRYPTED: &[u8] = b"k8s:enc:";
const NO_MATCH: &str = "no matching prefix found";
const READ_ENCRYPTED: &str = "identity transformer tried to read encrypted data";
/// Upstream's words; without its feature gate nobody can turn it on.
const KMS_V1: &str =
    "KMSv1 is deprecated and will only receive security updates going forward. Use KMSv2 instead.";

/// A value as it was before it was encrypted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plain {
    pub value: Bytes,
    /// It was not written by the key that writes now, and should be written again.
    pub stale: bool,
}

enum Provider {
    Identity,
    Local {
        prefix: String,
        /// The name with its colon, as it follows the prefix, and the cipher.
        keys: Vec<(String, Cipher)>,
    },
    Kms {
        prefix: String,
        kms: Arc<Kms>,
    },
}

/// The providers of a resource.
pub(crate) struct Providers(Vec<Arc<Provider>>);

impl Providers {
    /// A resource that two entries of the configuration name has the providers of both.
    pub fn joined(first: &Providers, second: &Providers) -> Providers {
        Providers(first.0.iter().chain(&second.0).cloned().collect())
    }

    pub fn new(
        config: &ResourceConfiguration,
        kms: &mut Vec<Arc<Kms>>,
    ) -> std::result::Result<Providers, Error> {
        let mut list = Vec::new();
        for provider in &config.providers {
            let made = Provider::new(provider, kms)
                .map_err(|why| Error::Configuration(format!("error while building transformers: {why}")))?;
            list.push(Arc::new(made));
        }
        Ok(Providers(list))
    }

    /// Decrypts without waiting for anybody; `None`: a KMS plugin must be asked.
    pub fn open_now(&self, key: &str, stored: &Bytes) -> Option<Result<Plain>> {
        let mut errors = Vec::new();
        for (at, provider) in self.0.iter().enumerate() {
            match provider.open_now(key, stored)? {
                Ok(None) => {}
                Ok(Some(plain)) => return Some(Ok(plain.or_stale(at != 0))),
                Err(why) => errors.push(why),
            }
        }
        Some(Err(unreadable(errors)))
    }

    pub async fn open(&self, key: &str, stored: &Bytes) -> Result<Plain> {
        let mut errors = Vec::new();
        for (at, provider) in self.0.iter().enumerate() {
            let opened = match (provider.open_now(key, stored), provider.as_ref()) {
                (Some(opened), _) => opened,
                (None, Provider::Kms { prefix, kms }) => {
                    kms.open(key, &stored[prefix.len()..]).await.map(Some)
                }
                (None, _) => Ok(None),
            };
            match opened {
                Ok(None) => {}
                Ok(Some(plain)) => return Ok(plain.or_stale(at != 0)),
                Err(why) => errors.push(why),
            }
        }
        Err(unreadable(errors))
    }

    pub fn seal(&self, key: &str, plain: Bytes) -> Result<Bytes> {
        let Some(first) = self.0.first() else {
            return Ok(plain);
        };
        let (prefix, name, sealed) = match first.as_ref() {
            Provider::Identity => return Ok(plain),
            Provider::Local { prefix, keys } => {
                let (name, cipher) = keys.first().ok_or(NO_MATCH)?;
                (prefix, name.as_str(), cipher.seal(key.as_bytes(), &plain)?)
            }
            Provider::Kms { prefix, kms } => (prefix, "", kms.seal(key, &plain)?),
        };
        Ok(Bytes::from(
            [prefix.as_bytes(), name.as_bytes(), &sealed].concat(),
        ))
    }
}

impl Plain {
    fn or_stale(mut self, stale: bool) -> Plain {
        self.stale |= stale;
        self
    }
}

fn unreadable(errors: Vec<String>) -> String {
    match errors.as_slice() {
        [] => NO_MATCH.to_owned(),
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

impl Provider {
    fn new(config: &ProviderConfiguration, kms: &mut Vec<Arc<Kms>>) -> Result<Provider> {
        let local = |name: &str, keys: &Keys, make: fn(&[u8]) -> Result<Cipher>| {
            let mut ciphers = Vec::new();
            for key in &keys.keys {
                let bytes = key.bytes().unwrap_or_default();
                ciphers.push((format!("{}:", key.name), make(&bytes)?));
            }
            Ok(Provider::Local {
                prefix: format!("k8s:enc:{name}:v1:"),
                keys: ciphers,
            })
        };
        if let Some(keys) = &config.aescbc {
            return local("aescbc", keys, Cipher::aes_cbc);
        }
        if let Some(keys) = &config.aesgcm {
            return local("aesgcm", keys, Cipher::aes_gcm);
        }
        if let Some(keys) = &config.secretbox {
            return local("secretbox", keys, Cipher::secretbox);
        }
        let Some(config) = &config.kms else {
            return Ok(Provider::Identity);
        };
        if config.api_version == "v1" {
            return Err(KMS_V1.to_owned());
        }
        let plugin = Arc::new(Kms::new(config)?);
        kms.push(plugin.clone());
        Ok(Provider::Kms {
            prefix: format!("k8s:enc:kms:v2:{}:", config.name),
            kms: plugin,
        })
    }

    /// `Some(Ok(None))`: it is not this provider's.
    fn open_now(&self, key: &str, stored: &Bytes) -> Option<Result<Option<Plain>>> {
        match self {
            Provider::Identity if stored.starts_with(ENCRYPTED) => Some(Ok(None)),
            Provider::Identity => Some(Ok(Some(Plain {
                value: stored.clone(),
                stale: false,
            }))),
            Provider::Local { prefix, keys } => {
                let Some(data) = stored.strip_prefix(prefix.as_bytes()) else {
                    return Some(Ok(None));
                };
                Some(open_local(keys, key, data).map(Some))
            }
            Provider::Kms { prefix, kms } => match stored.strip_prefix(prefix.as_bytes()) {
                None => Some(Ok(None)),
                Some(data) => kms.open_now(key, data).map(|opened| opened.map(Some)),
            },
        }
    }
}

fn open_local(keys: &[(String, Cipher)], key: &str, data: &[u8]) -> Result<Plain> {
    let mut errors = Vec::new();
    for (at, (name, cipher)) in keys.iter().enumerate() {
        let Some(data) = data.strip_prefix(name.as_bytes()) else {
            continue;
        };
        match cipher.open(key.as_bytes(), data) {
            Ok(value) => {
                return Ok(Plain {
                    value: value.into(),
                    stale: at != 0,
                });
            }
            // Two keys may have one name, and one name may start another.
            Err(why) => errors.push(why),
        }
    }
    Err(unreadable(errors))
}

/// A value of a resource that the configuration does not name.
pub(crate) fn read_plain(stored: &Bytes) -> Result<Plain> {
    if stored.starts_with(ENCRYPTED) {
        return Err(READ_ENCRYPTED.to_owned());
    }
    Ok(Plain {
        value: stored.clone(),
        stale: false,
    })
}
