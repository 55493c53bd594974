//! The store on a real etcd (3.4 or newer), spoken to in its gRPC API. Reads and writes go straight to
//! the cluster; what changes comes through one watch ([`feed`]) into a hub like the embedded store's.
//!
//! `revision()` is a linearizable read that then waits for the watch to arrive there. Should the newest
//! revision be a write outside of our prefix, which our watch will never show, etcd is asked how far the
//! watch is ([`progress`]). Before 3.4.31 and 3.5.13 its answer cannot be trusted; there a write of our own
//! is the fence: when the watch shows that one, everything before it has been shown.

mod client;
mod current;
mod feed;
mod history;
mod key_prefix;
mod lease;
mod load;
mod members;
mod progress;
mod proto;
mod transact;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::hub::{Hub, Limits};
use crate::{Error, Expect, KeyValue, Op, Outcome, RangeResult, Result, Store, Transacted, Watch, Write};
use client::{Again, Client, STATUS, translate};
use current::Current;
use history::{History, Seen};
use key_prefix::KeyPrefix;
pub use key_prefix::Owner;
use lease::Leases;
pub use load::{Loader, hand_over};
use progress::{Progress, ProgressRequest};
use proto::{
    CompactionRequest, CompactionResponse, RangeRequest, RangeResponse, StatusRequest, StatusResponse,
};

/// Keys asked for at once, so that no answer gets too large.
const PAGE: i64 = 1000;
/// How long `revision()` waits for the watch before it writes a fence: long while etcd is ours alone
/// (then the event is surely on its way), short once somebody else was seen to write to it.
const FENCE_AFTER_ALONE: u64 = 500;
const FENCE_AFTER_SHARED: u64 = 5;
/// How long it waits before it asks for progress, which costs no write.
const ASK_AFTER: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(10);

/// What is written to see the watch arrive.
const FENCE: &str = "/registry/skiff.io/fence";

const RANGE: &str = "/etcdserverpb.KV/Range";

#[derive(Debug, Clone)]
pub struct Options {
    /// `--etcd-servers`.
    pub endpoints: Vec<String>,
    /// `--etcd-cafile`, `--etcd-certfile`, `--etcd-keyfile`.
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// `--etcd-prefix`: all keys are below it.
    pub prefix: String,
    /// The cluster whose keys they are; none: nobody asks.
    pub owner: Option<Owner>,
    pub limits: Limits,
    /// `--etcd-compaction-interval`; `None`: etcd compacts itself, or somebody else sees to it.
    pub compact_every: Option<Duration>,
}

impl Options {
    pub fn new(endpoints: impl IntoIterator<Item = impl Into<String>>) -> Options {
        Options {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            prefix: "/registry".to_owned(),
            owner: None,
            limits: Limits::default(),
            compact_every: Some(Duration::from_secs(300)),
        }
    }
}

pub struct Etcd {
    shared: Arc<Shared>,
    leases: Leases,
    /// What the last merge of a key left there, so that the next one need not ask. Held over a transaction: of two merges
    /// at once one would have to be made again.
    merged: tokio::sync::Mutex<HashMap<Arc<str>, KeyValue>>,
    /// Ends the tasks that follow and compact etcd.
    _tasks: DropGuard,
}

struct Shared {
    client: Arc<Client>,
    hub: Hub,
    place: KeyPrefix,
    history: Arc<History>,
    limits: Limits,
    /// Milliseconds; see [`FENCE_AFTER_ALONE`].
    fence_after: AtomicU64,
    progress: Progress,
    current: Arc<Current>,
    /// The newest revision that this process compacted to.
    compacted: AtomicI64,
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// The first key after all that start with `prefix`.
fn prefix_end(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return Bytes::from(end);
        }
    }
    // All keys from the start on, in etcd's notation.
    Bytes::from_static(&[0])
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn key_value(place: &KeyPrefix, kv: proto::KeyValue) -> Result<KeyValue> {
    let key = std::str::from_utf8(&kv.key)
        .map_err(|_| Error::Corrupt(format!("a key in etcd is not text: {:?}", kv.key)))?;
    Ok(KeyValue {
        key: place.inner(key),
        value: feed::detach(kv.value),
        create_revision: place.inner_revision(kv.create_revision),
        mod_revision: place.inner_revision(kv.mod_revision),
    })
}

fn range_of(key: &str) -> RangeRequest {
    RangeRequest {
        key: bytes(key),
        ..RangeRequest::default()
    }
}

impl Shared {
    fn error(&self, status: tonic::Status) -> Error {
        translate(status, 0, self.hub.revision())
    }

    /// What is known before a call, unless etcd is no longer what it was.
    fn before_call(&self) -> Result<Seen> {
        match self.history.broken() {
            Some(why) => Err(self.replaced(&why)),
            None => Ok(self.history.seen()),
        }
    }

    /// The revision of a consistent answer, if it is of the same etcd as before.
    fn after_call(&self, before: &Seen, header: Option<proto::ResponseHeader>) -> Result<i64> {
        let header = header.unwrap_or_default();
        let same = self.history.check(before, &header);
        same.map_err(|why| self.replaced(&why))
            .map(|()| self.place.inner_revision(header.revision))
    }

    fn replaced(&self, why: &str) -> Error {
        Error::Unavailable(format!("{} was replaced: {why}", self.client.place))
    }

    /// The cluster's revision, read consistently.
    async fn current(&self) -> Result<i64> {
        let revision = self.current.read().await.map_err(|status| self.error(status))?;
        Ok(self.place.inner_revision(revision))
    }

    /// Whether the watch arrives at `revision` within that time.
    async fn arrives(&self, revision: i64, within: Duration) -> bool {
        tokio::time::timeout(within, self.hub.reached(revision))
            .await
            .is_ok()
    }
}

impl Etcd {
    /// Connects, checks that the data is of a format that this skiff knows, and starts to follow it.
    pub async fn open(options: Options) -> Result<Etcd> {
        let client = Arc::new(Client::new(&options)?);
        let place = KeyPrefix::new(&options.prefix, options.owner.clone());
        let header = place.claim(&client).await?;
        Ok(Etcd::start(options, client, place, header))
    }

    /// Opens somebody else's keys, to read them: nothing is written, and nothing compacted.
    pub async fn open_to_read(options: Options) -> Result<Etcd> {
        let options = Options {
            compact_every: None,
            ..options
        };
        let client = Arc::new(Client::new(&options)?);
        let place = KeyPrefix::new(&options.prefix, None);
        let header = place.look(&client).await?;
        Ok(Etcd::start(options, client, place, header))
    }

    fn start(options: Options, client: Arc<Client>, place: KeyPrefix, header: proto::ResponseHeader) -> Etcd {
        let (history, revision) = (
            Arc::new(History::default()),
            place.inner_revision(header.revision),
        );
        history.begin(header);
        let current = Current::new(client.clone(), history.clone(), place.format_key().into_owned());
        let current = Arc::new(current);
        let hub = Hub::new(revision, revision, Vec::new(), now());
        let shared = Arc::new(Shared {
            client,
            hub,
            place,
            history,
            limits: options.limits,
            fence_after: AtomicU64::new(FENCE_AFTER_ALONE),
            progress: Progress::default(),
            current,
            compacted: AtomicI64::new(0),
        });
        let stop = CancellationToken::new();
        let fed = Arc::downgrade(&shared);
        skiff_supervise::keep("etcd-watch", &stop, move || feed::run(fed.clone()));
        if let Some(every) = options.compact_every {
            let compacted = Arc::downgrade(&shared);
            skiff_supervise::keep("etcd-compaction", &stop, move || {
                keep_compact(compacted.clone(), every)
            });
        }
        Etcd {
            shared,
            leases: Leases::default(),
            merged: tokio::sync::Mutex::default(),
            _tasks: stop.drop_guard(),
        }
    }

    async fn range_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: i64,
        at: Option<i64>,
    ) -> Result<(RangeResponse, i64)> {
        let prefix = &*self.shared.place.outer(prefix);
        let key = match after.map(|after| self.shared.place.outer(after)) {
            Some(after) if *after >= *prefix => format!("{after}\0"),
            _ => prefix.to_owned(),
        };
        let revision = match at {
            // Before etcd began, which to it would be "now", or before it had everything.
            Some(at) if at < self.shared.place.floor() || self.shared.place.outer_revision(at) <= 0 => {
                return Err(Error::Compacted {
                    revision: self.shared.place.floor(),
                });
            }
            Some(at) => self.shared.place.outer_revision(at),
            None => 0,
        };
        let request = RangeRequest {
            key: bytes(&key),
            range_end: prefix_end(prefix),
            limit,
            revision,
            count_only: false,
        };
        let before = self.shared.before_call()?;
        let answer = self.shared.client.call(RANGE, request, Again::Yes).await;
        let answer: RangeResponse =
            answer.map_err(|status| translate(status, at.unwrap_or(0), self.shared.hub.revision()))?;
        let revision = self.shared.after_call(&before, answer.header)?;
        Ok((answer, revision))
    }

    /// Waits until the watch has shown everything up to `revision`, and sees to it that it will.
    async fn follow_up_to(&self, revision: i64) -> Result<()> {
        let shared = &self.shared;
        if shared.arrives(revision, ASK_AFTER).await {
            return Ok(());
        }
        while shared.progress.ask() != ProgressRequest::Unsound {
            if shared.arrives(revision, progress::AGAIN).await {
                return Ok(());
            }
        }
        let fence_after = Duration::from_millis(shared.fence_after.load(Ordering::Relaxed));
        if shared.arrives(revision, fence_after).await {
            return Ok(());
        }
        self.write(FENCE, Expect::Any, Op::Put(Bytes::new()), None)
            .await?;
        shared.hub.reached(revision).await;
        if !shared.hub.has_event(revision) {
            shared.fence_after.store(FENCE_AFTER_SHARED, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Compacts to where the store was one interval ago, as upstream's API server does. Several servers may
/// do so at once; the later one is told that it is done already.
async fn keep_compact(shared: std::sync::Weak<Shared>, every: Duration) {
    let mut before = None;
    loop {
        tokio::time::sleep(every).await;
        let Some(shared) = shared.upgrade() else { return };
        let era = shared.history.seen().era;
        if let Some((_, revision)) = before.filter(|(then, _)| *then == era) {
            let request = CompactionRequest {
                revision: shared.place.outer_revision(revision),
            };
            let done: Result<CompactionResponse, _> = shared
                .client
                .call("/etcdserverpb.KV/Compact", request, Again::Yes)
                .await;
            match done {
                Ok(_) => shared.compacted.fetch_max(revision, Ordering::Relaxed),
                Err(status) => {
                    tracing::debug!(revision, %status, "etcd did not compact");
                    0
                }
            };
        }
        before = shared.current().await.ok().map(|revision| (era, revision));
    }
}

#[async_trait]
impl Store for Etcd {
    async fn get(&self, key: &str) -> Result<(Option<KeyValue>, i64)> {
        let shared = &self.shared;
        let before = shared.before_call()?;
        let answer: RangeResponse = shared
            .client
            .call(RANGE, range_of(&shared.place.outer(key)), Again::Yes)
            .await
            .map_err(|status| shared.error(status))?;
        let revision = shared.after_call(&before, answer.header)?;
        let found = answer.kvs.into_iter().next();
        let found = found.map(|kv| key_value(&shared.place, kv)).transpose()?;
        Ok((found, revision))
    }

    async fn range(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        at: Option<i64>,
    ) -> Result<RangeResult> {
        let limit = if limit == 0 {
            i64::MAX
        } else {
            i64::try_from(limit).unwrap_or(i64::MAX)
        };
        let (first, revision) = self.range_page(prefix, start_after, limit.min(PAGE), at).await?;
        let at = at.unwrap_or(revision);
        let (count, mut more) = (first.count, first.more);
        let place = &self.shared.place;
        let items = first.kvs.into_iter().map(|kv| key_value(place, kv));
        let mut items = items.collect::<Result<Vec<_>>>()?;
        while more && (items.len() as i64) < limit {
            let left = limit - items.len() as i64;
            let after = items.last().map(|kv| kv.key.clone());
            let (page, _) = self
                .range_page(prefix, after.as_deref(), left.min(PAGE), Some(at))
                .await?;
            more = page.more && !page.kvs.is_empty();
            for kv in page.kvs {
                items.push(key_value(place, kv)?);
            }
        }
        Ok(RangeResult {
            items,
            revision,
            more,
            count,
        })
    }

    async fn write(&self, key: &str, expect: Expect, op: Op, lease_seconds: Option<i64>) -> Result<Outcome> {
        let write = Write {
            key: key.into(),
            expect,
            op,
            lease_seconds,
        };
        let transacted = self.transact(vec![write]).await?;
        let nothing = || Error::Unavailable("etcd answered a transaction with nothing".to_owned());
        transacted.single().ok_or_else(nothing)
    }

    async fn transact(&self, writes: Vec<Write>) -> Result<Transacted> {
        if writes.iter().any(|write| matches!(write.op, Op::Merge(_))) {
            self.merge(&writes).await
        } else {
            self.swap(&writes).await
        }
    }

    async fn watch(&self, prefix: &str, from: i64) -> Result<Watch> {
        if !prefix.starts_with("/registry/") {
            return Err(Error::Invalid(format!(
                "cannot watch {prefix}: it is not below /registry/"
            )));
        }
        let from = if from <= 0 {
            self.shared.current().await? + 1
        } else {
            from
        };
        self.shared.hub.watch(prefix, from)
    }

    async fn compact(&self, revision: i64) -> Result<()> {
        let request = CompactionRequest {
            revision: self.shared.place.outer_revision(revision),
        };
        let done: Result<CompactionResponse, _> = self
            .shared
            .client
            .call("/etcdserverpb.KV/Compact", request, Again::Unsent)
            .await;
        done.map_err(|status| translate(status, revision, self.shared.hub.revision()))?;
        self.shared.compacted.fetch_max(revision, Ordering::Relaxed);
        // What is compacted here may still be on its way to the hub; it must not forget the future.
        self.revision().await?;
        self.shared.hub.forget(revision);
        Ok(())
    }

    fn compacted(&self) -> i64 {
        self.shared.compacted.load(Ordering::Relaxed)
    }

    async fn revision(&self) -> Result<i64> {
        let revision = self.shared.current().await?;
        let reached = tokio::time::timeout(PATIENCE, self.follow_up_to(revision)).await;
        match reached {
            Ok(done) => done.map(|()| revision),
            Err(_) => {
                let place = &self.shared.client.place;
                Err(Error::Unavailable(format!("the watch on {place} is behind")))
            }
        }
    }

    async fn health(&self) -> Result<()> {
        self.revision().await.map(drop)
    }

    async fn is_stale(&self, _key: &str) -> Result<bool> {
        Ok(false)
    }

    async fn size(&self) -> Result<u64> {
        let answer: StatusResponse = self
            .shared
            .client
            .call(STATUS, StatusRequest {}, Again::Yes)
            .await
            .map_err(|status| self.shared.error(status))?;
        Ok(answer.db_size.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_prefixes() {
        assert_eq!(&prefix_end("/registry/")[..], b"/registry0");
        assert_eq!(&prefix_end("a")[..], b"b");
        assert_eq!(&prefix_end("")[..], b"\0");
    }
}
