//! The cache over a real etcd, where others write too and the store can go away.

#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/suite/cluster.rs"]
mod cluster;

use std::sync::Arc;

use bytes::Bytes;
use cluster::{Cluster, until};
use serde_json::json;
use skiff_cache::{Cache, Config, Error, EventKind, ListOptions, ReadAt, WatchOptions};
use skiff_store::{Expect, Op, Outcome, Store};

const PREFIX: &str = "/registry/configmaps/";

async fn put(store: &dyn Store, name: &str, data: usize) -> Result<i64, skiff_store::Error> {
    let object = json!({"metadata": {"namespace": "ns", "name": name}, "data": {"n": data.to_string()}});
    let op = Op::Put(Bytes::from(serde_json::to_vec(&object).unwrap()));
    match store
        .write(&format!("{PREFIX}ns/{name}"), Expect::Any, op, None)
        .await?
    {
        Outcome::Done { revision, .. } => Ok(revision),
        conflict => panic!("{conflict:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_server_wrote_is_seen() {
    let cluster = Cluster::new(1, None);
    let ours: Arc<dyn Store> = Arc::new(cluster.open().await);
    let theirs = cluster.open().await;
    let cache = Cache::start(ours, Config::new(PREFIX, "v1", "ConfigMap"));
    let mut watcher = cache.watch(WatchOptions::default()).await.unwrap();
    for n in 0..100 {
        let revision = put(&theirs, "a", n).await.unwrap();
        let entry = cache
            .get("/registry/configmaps/ns/a", ReadAt::Latest)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(entry.revision, revision);
        assert_eq!(
            cache.list(ListOptions::default()).await.unwrap().revision,
            revision
        );
        assert_eq!(watcher.next().await.unwrap().revision, revision);
        // A version from the other server is not from the future.
        let at = ReadAt::NotOlderThan(put(&theirs, "b", n).await.unwrap());
        assert!(
            cache
                .get("/registry/configmaps/ns/b", at)
                .await
                .unwrap()
                .is_some()
        );
        let event = watcher.next().await.unwrap();
        assert_eq!(event.entry.as_ref().map(|entry| &*entry.head.name), Some("b"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_while_the_store_is_away() {
    let mut cluster = Cluster::new(1, None);
    let store: Arc<dyn Store> = Arc::new(cluster.open().await);
    let cache = Cache::start(store.clone(), Config::new(PREFIX, "v1", "ConfigMap"));
    let first = put(&*store, "a", 1).await.unwrap();
    let mut watcher = cache.watch(WatchOptions::default()).await.unwrap();

    cluster.kill(0);
    let stale = cache
        .list(ListOptions {
            at: ReadAt::Any,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!((stale.items.len(), stale.revision), (1, first));
    let error = cache.list(ListOptions::default()).await.unwrap_err();
    assert!(
        matches!(error, Error::Store(skiff_store::Error::Unavailable(_))),
        "{error}"
    );

    cluster.start(0);
    let second = until(async || put(&*store, "b", 1).await).await;
    let list = cache.list(ListOptions::default()).await.unwrap();
    assert_eq!((list.items.len(), list.revision), (2, second));
    let event = watcher.next().await.unwrap();
    assert_eq!(
        (event.kind, event.revision),
        (EventKind::Added, second),
        "the same watch goes on"
    );
}
