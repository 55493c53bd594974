//! Rot on disk: a row that is not as it was written makes its key unreadable. It is never taken for a deletion, and
//! never keeps the other keys from being read.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use bytes::Bytes;
use skiff_store::{Embedded, Expect, Op, Outcome, Store, unreadable};

async fn write(store: &Embedded, key: &str, value: &str) -> i64 {
    let op = Op::Put(Bytes::copy_from_slice(value.as_bytes()));
    match store.write(key, Expect::Any, op, None).await.unwrap() {
        Outcome::Done { revision, .. } => revision,
        conflict => panic!("{conflict:?}"),
    }
}

fn edit(dir: &Path, sql: &str) {
    let database = rusqlite::Connection::open(dir.join("store.db")).unwrap();
    database.execute_batch(sql).unwrap();
}

#[tokio::test]
async fn a_damaged_row_makes_its_key_unreadable_and_nothing_else() {
    // Revision 3 is the victim. What looks like a deletion, an expired lease or another type is rot as well.
    for rot in [
        "UPDATE kv SET value = x'00ff' WHERE revision = 3",
        "UPDATE kv SET value = 'text' WHERE revision = 3",
        "UPDATE kv SET value = 7 WHERE revision = 3",
        "UPDATE kv SET value = NULL WHERE revision = 3",
        "UPDATE kv SET value = NULL, create_revision = 0 WHERE revision = 3",
        "UPDATE kv SET create_revision = 'x' WHERE revision = 3",
        "UPDATE kv SET expires = 1 WHERE revision = 3",
        "UPDATE kv SET checksum = checksum + 1 WHERE revision = 3",
        "UPDATE kv SET checksum = 'x' WHERE revision = 3",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(dir.path()).unwrap();
        for key in ["/r/a", "/r/b", "/r/c"] {
            write(&store, key, "good").await;
        }
        drop(store);
        edit(dir.path(), rot);
        let store = Embedded::open(dir.path()).unwrap();
        store.tick().await.unwrap();
        let found = store.range("/r/", None, 0, None).await.unwrap();
        let damaged: Vec<(&str, bool)> = found
            .items
            .iter()
            .map(|kv| (&*kv.key, unreadable(&kv.value).is_some()))
            .collect();
        assert_eq!(
            damaged,
            [("/r/a", false), ("/r/b", true), ("/r/c", false)],
            "{rot}"
        );
        assert_eq!((found.revision, found.items[1].mod_revision), (4, 3), "{rot}");
        let mut watch = store.watch("/r/", 2).await.unwrap();
        let events = watch.next().await.unwrap().events;
        assert!(
            events.iter().all(|event| event.value.is_some()),
            "{rot}: {events:?}"
        );

        // It can be replaced, or deleted at the revision that a reader was told.
        let gone = store
            .write("/r/b", Expect::Revision(3), Op::Delete, None)
            .await
            .unwrap();
        assert!(
            matches!(gone, Outcome::Done { revision: 5, .. }),
            "{rot}: {gone:?}"
        );
        drop(store);
        let store = Embedded::open(dir.path()).unwrap();
        assert_eq!(store.get("/r/b").await.unwrap(), (None, 5), "{rot}");
    }
}

#[tokio::test]
async fn old_values_are_checked_when_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path()).unwrap();
    for value in ["1", "2", "3"] {
        write(&store, "/r/a", value).await;
    }
    drop(store);
    edit(dir.path(), "UPDATE kv SET value = x'31ff' WHERE revision = 3");
    let store = Embedded::open(dir.path()).unwrap();
    let at = async |revision| {
        let found = store.range("/r/", None, 0, Some(revision)).await.unwrap();
        found.items[0].value.clone()
    };
    assert_eq!(at(2).await, "1");
    assert!(unreadable(&at(3).await).is_some());
    assert_eq!(at(4).await, "3");
}

#[tokio::test]
async fn rows_of_before_checksums_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path()).unwrap();
    write(&store, "/r/a", "old").await;
    drop(store);
    edit(
        dir.path(),
        "ALTER TABLE kv DROP COLUMN checksum; PRAGMA user_version = 1;",
    );
    let store = Embedded::open(dir.path()).unwrap();
    write(&store, "/r/b", "new").await;
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    for (key, value) in [("/r/a", "old"), ("/r/b", "new")] {
        assert_eq!(store.get(key).await.unwrap().0.unwrap().value, value);
    }
    drop(store);
    edit(dir.path(), "UPDATE kv SET value = x'00' WHERE key = '/r/b'");
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(store.get("/r/a").await.unwrap().0.unwrap().value, "old");
    assert!(unreadable(&store.get("/r/b").await.unwrap().0.unwrap().value).is_some());
}
