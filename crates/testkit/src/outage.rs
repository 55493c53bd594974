//! A store that goes away and comes back, as an etcd whose network is cut: while it is away every request fails, and
//! nothing of what it was asked to write is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use skiff_store::{
    Embedded, Error, Expect, KeyValue, Op, Outcome, RangeResult, Result, Store, Transacted, Watch, Write,
};

/// Turns a store off and on.
#[derive(Clone, Default)]
pub struct StoreSwitch {
    is_off: Arc<AtomicBool>,
}

impl StoreSwitch {
    pub fn off(&self) {
        self.is_off.store(true, Ordering::SeqCst);
    }

    pub fn on(&self) {
        self.is_off.store(false, Ordering::SeqCst);
    }

    /// The store, behind this switch.
    pub fn over(&self, inner: Embedded) -> Arc<dyn Store> {
        Arc::new(Switched {
            inner,
            switch: self.clone(),
        })
    }
}

struct Switched {
    inner: Embedded,
    switch: StoreSwitch,
}

impl Switched {
    fn inner(&self) -> Result<&Embedded> {
        if self.switch.is_off.load(Ordering::SeqCst) {
            return Err(Error::Unavailable("the store was turned off by a test".into()));
        }
        Ok(&self.inner)
    }
}

#[async_trait]
impl Store for Switched {
    async fn get(&self, key: &str) -> Result<(Option<KeyValue>, i64)> {
        self.inner()?.get(key).await
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<RangeResult> {
        self.inner()?.range(prefix, start_after, limit, at).await
    }

    async fn write(&self, key: &str, expect: Expect, op: Op, lease_seconds: Option<i64>) -> Result<Outcome> {
        self.inner()?.write(key, expect, op, lease_seconds).await
    }

    async fn transact(&self, writes: Vec<Write>) -> Result<Transacted> {
        self.inner()?.transact(writes).await
    }

    async fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        self.inner()?.watch(prefix, from).await
    }

    async fn compact(&self, revision: i64) -> Result<()> {
        self.inner()?.compact(revision).await
    }

    fn compacted(&self) -> i64 {
        self.inner.compacted()
    }

    async fn revision(&self) -> Result<i64> {
        self.inner()?.revision().await
    }

    async fn health(&self) -> Result<()> {
        self.inner()?.health().await
    }

    async fn size(&self) -> Result<u64> {
        self.inner()?.size().await
    }

    async fn is_stale(&self, key: &str) -> Result<bool> {
        self.inner()?.is_stale(key).await
    }
}
