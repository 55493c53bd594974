//! A disk that fails under the store, and comes back: nothing acknowledged is lost, nothing refused appears, and the
//! store goes on without a restart.

#![allow(clippy::unwrap_used)]

mod vfs;

use std::time::Duration;

use bytes::Bytes;
use rusqlite::ffi;
use skiff_store::{Embedded, Error, Expect, Op, Outcome, Store};

async fn write(store: &Embedded, key: &str, value: &'static str) -> Result<i64, Error> {
    let op = Op::Put(Bytes::from_static(value.as_bytes()));
    match store.write(key, Expect::Any, op, None).await? {
        Outcome::Done { revision, .. } => Ok(revision),
        conflict => panic!("{conflict:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_heals_when_the_disk_does() {
    vfs::install();
    let dir = tempfile::tempdir().unwrap();
    vfs::record(dir.path());
    let store = Embedded::open(dir.path()).unwrap();
    let mut revision = write(&store, "/r/a", "first").await.unwrap();
    for (code, full) in [
        (ffi::SQLITE_IOERR_WRITE, false),
        (ffi::SQLITE_IOERR_FSYNC, false),
        (ffi::SQLITE_READONLY, false),
        (ffi::SQLITE_FULL, true),
    ] {
        assert!(store.health().await.is_ok());
        let mut watch = store.watch("/r/", revision + 1).await.unwrap();
        vfs::fail_with(code);
        for _ in 0..3 {
            let refused = write(&store, "/r/b", "refused, and far too long to pass for an update")
                .await
                .unwrap_err();
            assert_eq!(matches!(refused, Error::DiskFull(_)), full, "{refused}");
            assert_eq!(matches!(refused, Error::Io(_)), !full, "{refused}");
            assert!(store.health().await.is_err());
        }
        // Reads go on.
        let (found, at) = store.get("/r/a").await.unwrap();
        assert_eq!((&found.unwrap().value[..], at), (&b"first"[..], revision));
        // Long enough for it to open its files anew, in vain.
        tokio::time::sleep(Duration::from_millis(1200)).await;
        assert!(store.health().await.is_err());

        vfs::fail_with(ffi::SQLITE_OK);
        let healed = async {
            while store.health().await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), healed)
            .await
            .unwrap();
        let next = write(&store, "/r/a", "first").await.unwrap();
        assert_eq!(next, revision + 1, "no revision was used up");
        revision = next;
        let events = watch.next().await.unwrap().events;
        assert_eq!(events[0].revision, revision);
    }
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    let found = store.range("/r/", None, 0, None).await.unwrap();
    assert_eq!((found.items.len(), found.revision), (1, revision));
}
