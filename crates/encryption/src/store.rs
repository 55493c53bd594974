//! The store that encrypts: it hands everything to another one, and changes nothing but values.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use skiff_store::{
    Error, Expect, KeyValue, Merge, Merged, Op, OpenValues, Opened, Outcome, RangeResult, Result, Store,
    Transacted, Watch, Write,
};

use crate::Encryption;

/// A merge that keeps losing the race this often gives up.
const MERGE_ATTEMPTS: usize = 64;

pub struct Encrypted {
    store: Arc<dyn Store>,
    encryption: Arc<Encryption>,
}

impl Encrypted {
    pub fn new(store: Arc<dyn Store>, encryption: Arc<Encryption>) -> Encrypted {
        Encrypted { store, encryption }
    }

    fn seal(&self, key: &str, plain: Bytes) -> Result<Bytes> {
        self.encryption.seal(key, plain).map_err(Error::Encryption)
    }

    /// A write as the store within gets it; what is there, if the write is refused for it. A merge of an encrypted value
    /// is made here, where the value is plain, and becomes a compare-and-swap.
    async fn sealed(&self, write: &Write) -> Result<std::result::Result<Write, Option<KeyValue>>> {
        let (expect, op) = match &write.op {
            Op::Put(plain) => (write.expect, Op::Put(self.seal(&write.key, plain.clone())?)),
            Op::Delete => (write.expect, Op::Delete),
            Op::Merge(_) if !self.merges(write) => (write.expect, write.op.clone()),
            Op::Merge(merge) => {
                let (current, _) = self.get(&write.key).await?;
                let found = current.as_ref().map(|found| found.mod_revision);
                if !write.expect.holds(found) {
                    return Ok(Err(current));
                }
                let op = match merge.apply(current.as_ref().map(|found| &*found.value)) {
                    Merged::Put(plain) => Op::Put(self.seal(&write.key, plain)?),
                    // What is there is compared, and not written.
                    Merged::Keep => Op::Merge(Merge::new(|_| Merged::Keep)),
                    Merged::Refuse => return Ok(Err(current)),
                };
                (found.map_or(Expect::Absent, Expect::Revision), op)
            }
        };
        Ok(Ok(Write {
            expect,
            op,
            ..write.clone()
        }))
    }

    /// Whether a merge is made here.
    fn merges(&self, write: &Write) -> bool {
        matches!(write.op, Op::Merge(_)) && self.encryption.encrypts(&write.key)
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
            Op::Put(plain) => Op::Put(self.seal(key, plain)?),
            Op::Delete => Op::Delete,
            Op::Merge(_) => {
                return Err(Error::Invalid("a merge is written by a transaction".to_owned()));
            }
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

    async fn transact(&self, writes: Vec<Write>) -> Result<Transacted> {
        for _ in 0..MERGE_ATTEMPTS {
            let mut sealed = Vec::with_capacity(writes.len());
            for (at, write) in writes.iter().enumerate() {
                match self.sealed(write).await? {
                    Ok(write) => sealed.push(write),
                    Err(current) => {
                        let revision = current.as_ref().map_or(0, |found| found.mod_revision);
                        return Ok(Transacted::Conflict {
                            at,
                            current,
                            revision,
                        });
                    }
                }
            }
            match self.store.transact(sealed).await? {
                // Somebody else changed the value in between.
                Transacted::Conflict { at, .. } if self.merges(&writes[at]) => {}
                mut transacted => {
                    match &mut transacted {
                        Transacted::Done(written) => {
                            for found in written.iter_mut().filter_map(|one| one.previous.as_mut()) {
                                self.open(found).await;
                            }
                        }
                        Transacted::Conflict { current, .. } => {
                            if let Some(found) = current {
                                self.open(found).await;
                            }
                        }
                    }
                    return Ok(transacted);
                }
            }
        }
        Err(Error::Unavailable(
            "a record that several servers share changes all the time".to_owned(),
        ))
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
