//! Encryption at rest: what `--encryption-provider-config` says, between the registry and the store.
//!
//! [`Encrypted`] is a store that encrypts what is written to another one and decrypts what is read from it, in the
//! form that upstream stores (`k8s:enc:<provider>:v1:<key>:…`). Everything above it, the watch cache included, holds
//! plain objects in memory. A value that no provider can decrypt is an error of that one object
//! (see `skiff_store::unreadable`), never a missing one.

mod cipher;
mod config;
mod kms;
mod provider;
mod resources;
mod store;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use base64::Engine;
use bytes::Bytes;
use parking_lot::Mutex;

use config::{Configuration, group_resource};
use kms::Kms;
use provider::{Plain, Providers};
pub use store::Encrypted;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// In upstream's words.
    #[error("{0}")]
    Configuration(String),
    #[error(
        "error while parsing file: error while loading file: error reading encryption provider configuration file {path:?}: {source}"
    )]
    File {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
}

/// The providers of every resource, as one configuration has them.
struct Transformers {
    /// By group and resource; either may be `*`.
    by_resource: HashMap<(String, String), Arc<Providers>>,
    kms: Vec<Arc<Kms>>,
}

/// What is encrypted, and how. Its configuration may change while it is in use.
pub struct Encryption {
    transformers: ArcSwap<Transformers>,
    /// What keys of objects begin with where they are stored (`--etcd-prefix`): the authenticated data is the whole key.
    root: String,
    /// Keys of which values could not be read since the last change, cut to their resource. Leaf lock.
    unread: Mutex<BTreeSet<String>>,
}

impl Encryption {
    /// Encrypts as a configuration says. `name` is how errors call it. Must be called within a tokio runtime, in which
    /// KMS plugins are followed.
    pub async fn new(configuration: &str, name: &str) -> Result<Arc<Encryption>, Error> {
        Encryption::below(resources::ROOT, configuration, name).await
    }

    pub async fn load(path: &Path) -> Result<Arc<Encryption>, Error> {
        Encryption::load_below(resources::ROOT, path).await
    }

    /// The same for a store that keeps the keys `/registry/…` below another prefix, as `--etcd-prefix` says.
    pub async fn load_below(prefix: &str, path: &Path) -> Result<Arc<Encryption>, Error> {
        Encryption::below(prefix, &read(path).await?, &path.display().to_string()).await
    }

    async fn below(prefix: &str, configuration: &str, name: &str) -> Result<Arc<Encryption>, Error> {
        let transformers = Transformers::new(configuration, name)?;
        transformers.start().await;
        let root = match prefix.trim_matches('/') {
            "" => "/".to_owned(),
            path => format!("/{path}/"),
        };
        Ok(Arc::new(Encryption {
            transformers: ArcSwap::from_pointee(transformers),
            root,
            unread: Mutex::default(),
        }))
    }

    /// A key as the store below has it.
    fn stored_key<'a>(&self, key: &'a str) -> Cow<'a, str> {
        match key.strip_prefix(resources::ROOT) {
            Some(rest) if self.root != resources::ROOT => Cow::Owned(format!("{}{rest}", self.root)),
            _ => Cow::Borrowed(key),
        }
    }

    /// Takes another configuration. One that is wrong, or whose KMS plugins are not well, changes nothing.
    pub async fn reload(&self, path: &Path) -> Result<(), Error> {
        let transformers = Transformers::new(&read(path).await?, &path.display().to_string())?;
        for kms in &transformers.kms {
            kms.check().await.map_err(Error::Configuration)?;
        }
        transformers.start().await;
        self.transformers.store(Arc::new(transformers));
        Ok(())
    }

    /// Takes over a file whenever it changes (`None`: the configuration stays), and looks after KMS plugins, until the
    /// future is dropped. When what could not be read is worth another try, because the configuration changed or a
    /// plugin is well again, `read_again` is called with the prefixes of such values.
    pub async fn follow(&self, file: Option<&Path>, every: Duration, read_again: impl Fn(&[String])) {
        let mut known = match file {
            Some(path) => tokio::fs::read(path).await.ok(),
            None => None,
        };
        let mut was_unwell = false;
        loop {
            tokio::time::sleep(every).await;
            let mut again = false;
            if let Some(path) = file {
                let now = tokio::fs::read(path).await.ok();
                if now.is_some() && now != known {
                    match self.reload(path).await {
                        Ok(()) => {
                            tracing::info!(path = %path.display(), "the encryption configuration was reloaded");
                            (known, again) = (now, true);
                        }
                        // It is tried again: a plugin may come, and a file be mended.
                        Err(error) => {
                            tracing::error!(%error, path = %path.display(), "the encryption configuration cannot be reloaded");
                        }
                    }
                }
            }
            if self.uses_kms() {
                let well = self.check().await.is_ok();
                let transformers = self.transformers.load_full();
                let was_away = well && transformers.kms.iter().any(|kms| kms.take_was_away());
                again |= well && (was_unwell || was_away);
                was_unwell = !well;
            }
            if again {
                let unread: Vec<String> = std::mem::take(&mut *self.unread.lock()).into_iter().collect();
                read_again(&unread);
            }
        }
    }

    /// Whether there are KMS plugins to look after.
    pub fn uses_kms(&self) -> bool {
        !self.transformers.load().kms.is_empty()
    }

    /// Whether all KMS plugins are well.
    pub async fn check(&self) -> Result<(), String> {
        let transformers = self.transformers.load_full();
        let mut errors = Vec::new();
        for (at, kms) in transformers.kms.iter().enumerate() {
            if let Err(why) = kms.check().await {
                errors.push(format!("kms-provider-{at}: {why}"));
            }
        }
        match errors.as_slice() {
            [] => Ok(()),
            [one] => Err(one.clone()),
            several => Err(format!("[{}]", several.join(", "))),
        }
    }

    /// `None`: its resource is not named, and its values are not encrypted.
    fn providers(&self, key: &str) -> Option<Arc<Providers>> {
        let (group, resource) = resources::of_key(key)?;
        let transformers = self.transformers.load();
        let find = |group: &str, resource: &str| {
            let wanted = (group.to_owned(), resource.to_owned());
            transformers.by_resource.get(&wanted).cloned()
        };
        find(group, resource)
            .or_else(|| find(group, "*"))
            .or_else(|| find("*", "*"))
    }

    /// Decrypts a value without waiting; `None`: a KMS plugin must be asked, by [`Encryption::open`].
    fn open_now(&self, key: &str, stored: &Bytes) -> Option<Result<Plain, String>> {
        match self.providers(key) {
            None => Some(provider::read_plain(stored)),
            Some(providers) => providers.open_now(&self.stored_key(key), stored),
        }
    }

    async fn open(&self, key: &str, stored: &Bytes) -> Result<Plain, String> {
        match self.providers(key) {
            None => provider::read_plain(stored),
            Some(providers) => providers.open(&self.stored_key(key), stored).await,
        }
    }

    fn encrypts(&self, key: &str) -> bool {
        self.providers(key).is_some()
    }

    /// A value as it is stored below a key.
    pub fn seal(&self, key: &str, plain: Bytes) -> Result<Bytes, String> {
        match self.providers(key) {
            None => Ok(plain),
            Some(providers) => providers.seal(&self.stored_key(key), plain),
        }
    }

    /// What stands for a value that cannot be decrypted.
    fn unreadable(&self, key: &str, why: &str) -> Bytes {
        let first = self.unread.lock().insert(resources::prefix_of(key));
        if first {
            tracing::error!(
                key,
                why,
                "a stored value cannot be decrypted; others below its prefix may follow"
            );
        }
        skiff_store::unreadable_value(&format!("unable to transform key {key:?}: {why}"))
    }
}

async fn read(path: &Path) -> Result<String, Error> {
    tokio::fs::read_to_string(path)
        .await
        .map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })
}

impl Transformers {
    fn new(text: &str, name: &str) -> Result<Transformers, Error> {
        let config = Configuration::parse(text, name)?;
        let mut by_resource: HashMap<(String, String), Arc<Providers>> = HashMap::new();
        let mut kms = Vec::new();
        for entry in &config.resources {
            let providers = Arc::new(Providers::new(entry, &mut kms)?);
            for text in &entry.resources {
                let (group, resource) = group_resource(text);
                for masking in [(group, "*"), ("*", "*")] {
                    let earlier = by_resource.get(&(masking.0.to_owned(), masking.1.to_owned()));
                    if earlier.is_some() {
                        return Err(Error::Configuration(format!(
                            "error while building transformers: resource {text:?} is masked by earlier rule {:?}",
                            format!("*.{}", masking.0)
                        )));
                    }
                }
                let key = (group.to_owned(), resource.to_owned());
                let all = match by_resource.get(&key) {
                    Some(earlier) => Arc::new(Providers::joined(earlier, &providers)),
                    None => providers.clone(),
                };
                by_resource.insert(key, all);
            }
        }
        Ok(Transformers { by_resource, kms })
    }

    /// Asks KMS plugins for their keys, and goes on asking. One that is away now may come later.
    async fn start(&self) {
        for kms in &self.kms {
            let _ = kms.check().await;
            kms.follow();
        }
    }
}

/// A configuration that encrypts Secrets by a new random key and reads those that are not encrypted yet.
pub fn generate() -> Result<String, Error> {
    let key: [u8; 32] = cipher::random().map_err(Error::Configuration)?;
    let secret = base64::engine::general_purpose::STANDARD.encode(key);
    Ok(format!(
        "apiVersion: apiserver.config.k8s.io/v1\n\
         kind: EncryptionConfiguration\n\
         resources:\n\
         - resources: [secrets]\n\
         \x20 providers:\n\
         \x20 - secretbox: {{keys: [{{name: key1, secret: {secret}}}]}}\n\
         \x20 - identity: {{}}\n"
    ))
}

/// Whether a stored value is an encrypted one.
pub fn is_encrypted(stored: &[u8]) -> bool {
    stored.starts_with(provider::ENCRYPTED)
}
