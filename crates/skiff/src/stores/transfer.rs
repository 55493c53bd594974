//! Objects on their way from one store to another, one at a time: nothing is in memory whole that was not so before.
//! Between the two, values are in the clear; each side has its own encryption.

use anyhow::{Result, bail};
use futures::stream::{FuturesUnordered, StreamExt};
use sha2::{Digest, Sha256};
use skiff_encryption::Encryption;
use skiff_store::{KeyValue, Kine, OpenValues, Opened, Store, embedded, etcd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where all objects are, in every store.
const OBJECTS: &str = "/registry/";
/// What skiff notes about a store stays with it.
const OWN_NOTES: &str = "/registry/skiff.io/";
/// Of the API servers of a cluster that is taken over: their addresses, and their bookkeeping of addresses and ports,
/// which skiff does from the Services.
const FOREIGN_NOTES: [&str; 2] = ["/registry/masterleases/", "/registry/ranges/"];
const EVENTS: &str = "/registry/events/";
/// Events live for an hour. How much of it is left is not known, so they get it all.
const EVENT_SECONDS: i64 = 3600;
/// Keys that are asked of etcd at once: values have up to 1.5 MiB.
const ETCD_PAGE: usize = 100;
/// Writes to etcd that are under way at once.
const ETCD_WRITES: usize = 64;

/// A store, at one revision.
pub struct Source {
    from: Origin,
    encryption: Option<Arc<Encryption>>,
    page: VecDeque<KeyValue>,
    revision: i64,
    foreign: bool,
}

enum Origin {
    Store {
        store: Arc<dyn Store>,
        /// How many keys at once; 0: all, which the embedded store has in memory anyway.
        limit: usize,
        after: Option<Arc<str>>,
        more: bool,
    },
    Kine(Kine),
}

impl Source {
    /// All objects of a store as they are now.
    pub async fn of_store(
        store: Arc<dyn Store>,
        in_etcd: bool,
        encryption: Option<Arc<Encryption>>,
    ) -> Result<Source> {
        let limit = if in_etcd { ETCD_PAGE } else { 0 };
        let first = store.range(OBJECTS, None, limit, None).await?;
        Ok(Source {
            revision: first.revision,
            encryption,
            foreign: false,
            from: Origin::Store {
                store,
                limit,
                after: first.items.last().map(|item| item.key.clone()),
                more: first.more,
            },
            page: first.items.into(),
        })
    }

    pub fn of_kine(kine: Kine, encryption: Option<Arc<Encryption>>) -> Source {
        Source {
            revision: kine.revision(),
            encryption,
            foreign: true,
            page: VecDeque::new(),
            from: Origin::Kine(kine),
        }
    }

    /// The same, of a cluster that skiff did not run.
    pub fn foreign(self) -> Source {
        Source {
            foreign: true,
            ..self
        }
    }

    pub fn revision(&self) -> i64 {
        self.revision
    }

    pub fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
    }

    /// The next object in the order of keys, in the clear.
    pub async fn next(&mut self) -> Result<Option<KeyValue>> {
        loop {
            let Some(mut item) = self.page.pop_front() else {
                self.page = self.next_page().await?.into();
                if self.page.is_empty() {
                    return Ok(None);
                }
                continue;
            };
            let left_out = item.key.starts_with(OWN_NOTES)
                || (self.foreign && FOREIGN_NOTES.iter().any(|notes| item.key.starts_with(notes)));
            if left_out {
                continue;
            }
            if let Some(encryption) = &self.encryption {
                item.value = match encryption.open_value(&item.key, item.value) {
                    Opened::Ready(value) => value,
                    Opened::Later(value) => value.await,
                };
            }
            let key = &item.key;
            if let Some(why) = skiff_store::unreadable(&item.value) {
                bail!(
                    "the stored value of {key} cannot be read: {why}; repair it or delete the object first (docs/storage.md)"
                );
            }
            if skiff_encryption::is_encrypted(&item.value) {
                bail!(
                    "the stored value of {key} is encrypted; name the EncryptionConfiguration that it was written with by --encryption-provider-config"
                );
            }
            return Ok(Some(item));
        }
    }

    async fn next_page(&mut self) -> Result<Vec<KeyValue>> {
        match &mut self.from {
            Origin::Kine(kine) => Ok(kine.next_page()?),
            Origin::Store { more: false, .. } => Ok(Vec::new()),
            Origin::Store {
                store,
                limit,
                after,
                more,
            } => {
                let page = store
                    .range(OBJECTS, after.as_deref(), *limit, Some(self.revision))
                    .await?;
                *more = page.more && !page.items.is_empty();
                *after = page.items.last().map(|item| item.key.clone());
                Ok(page.items)
            }
        }
    }
}

/// What was copied, to compare two stores by.
#[derive(Default, Clone)]
pub struct Checksum {
    pub count: u64,
    digest: Sha256,
}

impl Checksum {
    pub fn add(&mut self, item: &KeyValue) {
        self.count += 1;
        for part in [item.key.as_bytes(), &item.value] {
            self.digest.update((part.len() as u64).to_be_bytes());
            self.digest.update(part);
        }
    }

    pub async fn of(mut source: Source) -> Result<Checksum> {
        let mut sum = Checksum::default();
        while let Some(item) = source.next().await? {
            sum.add(&item);
        }
        Ok(sum)
    }

    /// Fails unless `copy` is the same.
    pub fn compare(self, copy: Checksum) -> Result<()> {
        if self.count != copy.count {
            bail!("{} objects were copied and {} arrived", self.count, copy.count);
        }
        if self.digest.finalize() != copy.digest.finalize() {
            bail!("the copy of the objects differs from what was copied");
        }
        Ok(())
    }
}

/// A store that is being filled.
pub struct Sink {
    to: Target,
    encryption: Option<Arc<Encryption>>,
    /// When Events expire, in Unix time.
    events_end: u64,
}

enum Target {
    Embedded(Box<embedded::Loader>),
    Etcd(Arc<etcd::Loader>),
}

impl Sink {
    pub fn embedded(loader: embedded::Loader, encryption: Option<Arc<Encryption>>) -> Sink {
        Sink::new(Target::Embedded(Box::new(loader)), encryption)
    }

    pub fn etcd(loader: Arc<etcd::Loader>, encryption: Option<Arc<Encryption>>) -> Sink {
        Sink::new(Target::Etcd(loader), encryption)
    }

    fn new(to: Target, encryption: Option<Arc<Encryption>>) -> Sink {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs());
        Sink {
            to,
            encryption,
            events_end: now + EVENT_SECONDS.unsigned_abs(),
        }
    }

    fn seal(&self, mut item: KeyValue) -> Result<KeyValue> {
        if let Some(encryption) = &self.encryption {
            item.value = encryption
                .seal(&item.key, item.value)
                .map_err(anyhow::Error::msg)?;
        }
        Ok(item)
    }

    /// Writes one object into an embedded store.
    pub fn put(&mut self, item: KeyValue) -> Result<()> {
        let item = self.seal(item)?;
        let Target::Embedded(loader) = &mut self.to else {
            bail!("etcd is filled by `copy`");
        };
        let expires = if item.key.starts_with(EVENTS) {
            self.events_end
        } else {
            0
        };
        Ok(loader.put(item, expires)?)
    }

    /// Copies everything and makes the store ready to be used.
    pub async fn copy(mut self, mut source: Source) -> Result<Checksum> {
        let mut sum = Checksum::default();
        let mut writes = FuturesUnordered::new();
        let copied = async {
            while let Some(item) = source.next().await? {
                sum.add(&item);
                let Target::Etcd(loader) = &self.to else {
                    self.put(item)?;
                    continue;
                };
                let (loader, item) = (loader.clone(), self.seal(item)?);
                writes.push(async move {
                    let lease = item.key.starts_with(EVENTS).then_some(EVENT_SECONDS);
                    loader.put(&item.key, item.value, lease).await
                });
                if writes.len() >= ETCD_WRITES
                    && let Some(done) = writes.next().await
                {
                    done?;
                }
            }
            anyhow::Ok(())
        };
        let mut copied = copied.await;
        // Also after a failure: a write that was given up may still arrive, after what was written is deleted.
        while let Some(done) = writes.next().await {
            copied = copied.and(done.map_err(Into::into));
        }
        drop(writes);
        copied?;
        self.finish().await?;
        Ok(sum)
    }

    pub async fn finish(self) -> Result<()> {
        match self.to {
            Target::Embedded(loader) => loader.finish().map(drop)?,
            Target::Etcd(loader) => loader.finish().await?,
        }
        Ok(())
    }
}
