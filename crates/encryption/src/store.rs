//! The store that encrypts: it hands everything to another one, and changes nothing but values.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use skiff_store::{
    Error, Expect, KeyValue, Op, OpenValues, Opened, Outcome, RangeResult, Result, Store, Watch,
};

use crate::Encryption;

pub struct Encrypted {
    store: Arc<dyn Store>,
    encryption: Arc<Encryption>,
}

impl Encrypted {
    pub fn new(store: Arc<dyn Store>, encryption: Arc<Encryption>) -> Encrypted {
        Encrypted { store, encryption }
    }

    async fn open(&self, found: &mut KeyValue) {
        found.value = match self.encryption.open_value(&found.key, found.value.clone()) {
            Opened::Ready(value) => value,
            Opened::Later(value) => value.await,
        };
    }
}

impl OpenValues for Encryption {
    fn open_value<'a>(&'a self, key: &'a str, stored: Bytes) -> Opened<'a> {
        if skiff_store::unreadable(&stored).is_some() {
            // The store below says why.
            return Opened::Ready(stored);
        }
        if let Some(opened) = self.open_now(key, &stored) {
            return Opened::Ready(match opened {
                Ok(plain) => plain.value,
                Err(why) => self.unreadable(key, &why),
            });
        }
        Opened::Later(Box::pin(async move {
            match self.open(key, &stored).await {
                Ok(plain) => plain.value,
                Err(why) => self.unreadable(key, &why),
            }
        }))
    }
}

#[async_trait]
impl Store for Encrypted {
    async fn get(&self, key: &str) -> Result<(Option<KeyValue>, i64)> {
        let (mut found, revision) = self.store.get(key).await?;
        if let Some(found) = &mut found {
            self.open(found).await;
        }
        Ok((found, revision))
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<RangeResult> {
        let mut found = self.store.range(prefix, start_after, limit, at).await?;
        for item in &mut found.items {
            self.open(item).await;
        }
        Ok(found)
    }

    async fn write(&self, key: &str, expect: Expect, op: Op, lease_seconds: Option<i64>) -> Result<Outcome> {
        let op = match op {
            Op::Put(plain) => Op::Put(self.encryption.seal(key, plain).map_err(Error::Encryption)?),
            Op::Delete => Op::Delete,
        };
        let mut outcome = self.store.write(key, expect, op, lease_seconds).await?;
        if let Outcome::Done {
            previous: Some(found),
            ..
        }
        | Outcome::Conflict {
            current: Some(found), ..
        } = &mut outcome
        {
            self.open(found).await;
        }
        Ok(outcome)
    }

    async fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        let watch = self.store.watch(prefix, from).await?;
        Ok(watch.opened_by(self.encryption.clone()))
    }

    async fn compact(&self, revision: i64) -> Result<()> {
        self.store.compact(revision).await
    }

    fn compacted(&self) -> i64 {
        self.store.compacted()
    }

    async fn revision(&self) -> Result<i64> {
        self.store.revision().await
    }

    async fn health(&self) -> Result<()> {
        self.store.health().await
    }

    async fn size(&self) -> Result<u64> {
        self.store.size().await
    }

    async fn is_stale(&self, key: &str) -> Result<bool> {
        let (Some(found), _) = self.store.get(key).await? else {
            return Ok(false);
        };
        let opened = match self.encryption.open_now(key, &found.value) {
            Some(opened) => opened,
            None => self.encryption.open(key, &found.value).await,
        };
        Ok(opened.is_ok_and(|plain| plain.stale))
    }
}
