//! Stored values that cannot be read: they are not absent, and nobody is told that they were deleted.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use skiff_cache::{Cache, Config, Error, EventKind, ListOptions, ReadAt, WatchFrom, WatchOptions, Watcher};
use skiff_meta::selector::FieldSelector;
use skiff_store::{Embedded, Expect, Op, Outcome, Store};

const PREFIX: &str = "/registry/pods/";

struct Setup {
    store: Arc<dyn Store>,
    cache: Arc<Cache>,
    /// Whether the key for values that begin with "locked" is there.
    unlocked: Arc<AtomicBool>,
    _dir: tempfile::TempDir,
}

fn pod(path: &str) -> Bytes {
    let (namespace, name) = path.split_once('/').unwrap();
    json!({"metadata": {"namespace": namespace, "name": name}})
        .to_string()
        .into()
}

impl Setup {
    async fn over(values: &[(&str, Bytes)]) -> Setup {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path()).unwrap());
        let unlocked = Arc::new(AtomicBool::new(false));
        let mut config = Config::new(PREFIX, "v1", "Pod");
        config.retry_unreadable = Duration::from_millis(20);
        let key = unlocked.clone();
        config.decode = Some(Arc::new(move |_, _, value| match value.strip_prefix(b"locked") {
            Some(_) if !key.load(Ordering::Relaxed) => Err("no matching key".to_owned()),
            Some(inner) => Ok(Bytes::copy_from_slice(inner)),
            None => Ok(value),
        }));
        for (path, value) in values {
            let op = Op::Put(value.clone());
            store
                .write(&format!("{PREFIX}{path}"), Expect::Any, op, None)
                .await
                .unwrap();
        }
        let cache = Cache::start(store.clone(), config);
        cache.ready().await;
        Setup {
            store,
            cache,
            unlocked,
            _dir: dir,
        }
    }

    async fn write(&self, path: &str, op: Op) -> i64 {
        let key = format!("{PREFIX}{path}");
        match self.store.write(&key, Expect::Any, op, None).await.unwrap() {
            Outcome::Done { revision, .. } => revision,
            conflict => panic!("{conflict:?}"),
        }
    }

    async fn put(&self, path: &str, value: impl Into<Bytes>) -> i64 {
        self.write(path, Op::Put(value.into())).await
    }

    /// Names, or how many cannot be read.
    async fn list(&self, options: ListOptions) -> Result<Vec<String>, usize> {
        match self.cache.list(options).await {
            Ok(list) => Ok(list.items.iter().map(|item| item.head.name.to_string()).collect()),
            Err(Error::UnreadableItems(items)) => Err(items.len()),
            Err(error) => panic!("{error}"),
        }
    }

    async fn get(&self, path: &str) -> Result<Option<String>, String> {
        let found = self
            .cache
            .get(&format!("{PREFIX}{path}"), ReadAt::Latest)
            .await
            .map_err(|error| error.to_string())?;
        Ok(found.map(|entry| entry.head.name.to_string()))
    }

    async fn watch(&self, from: WatchFrom) -> Result<Watcher, Error> {
        let options = WatchOptions {
            from,
            ..WatchOptions::default()
        };
        self.cache.watch(options).await
    }
}

async fn next(watcher: &mut Watcher) -> Option<(EventKind, String)> {
    let event = watcher.next().await?;
    let name = event.entry.as_ref().unwrap().head.name.to_string();
    Some((event.kind, name))
}

fn namespaced(namespace: &str) -> ListOptions {
    ListOptions {
        namespace: Some(namespace.to_owned()),
        ..ListOptions::default()
    }
}

#[tokio::test]
async fn a_value_that_becomes_unreadable_is_no_deletion() {
    let setup = Setup::over(&[
        ("ns/a", pod("ns/a")),
        ("ns/b", pod("ns/b")),
        ("other/c", pod("other/c")),
    ])
    .await;
    let before = setup.cache.list(ListOptions::default()).await.unwrap().revision;
    let mut watcher = setup.watch(WatchFrom::After(before)).await.unwrap();
    let revision = setup.put("ns/a", "garbage").await;
    assert_eq!(
        setup.get("ns/a").await.unwrap_err(),
        format!(
            "StorageError: corrupt object, Code: 7, Key: /registry/pods/ns/a, ResourceVersion: 0, AdditionalErrorMsg: object not decodable revision={revision}: expected value at line 1 column 1"
        )
    );
    assert_eq!(setup.get("ns/b").await, Ok(Some("b".to_owned())));
    assert_eq!(setup.list(ListOptions::default()).await, Err(1));
    assert_eq!(setup.list(namespaced("ns")).await, Err(1));
    assert_eq!(setup.list(namespaced("other")).await, Ok(vec!["c".to_owned()]));
    for (name, expected) in [("b", Ok(vec!["b".to_owned()])), ("a", Err(1)), ("x", Ok(vec![]))] {
        let options = ListOptions {
            fields: FieldSelector::parse(&format!("metadata.name={name}")).unwrap(),
            ..namespaced("ns")
        };
        assert_eq!(setup.list(options).await, expected, "{name}");
    }
    let at = |at| ListOptions {
        at,
        ..ListOptions::default()
    };
    assert_eq!(
        setup.list(at(ReadAt::Exact(before))).await.map(|all| all.len()),
        Ok(3)
    );
    assert_eq!(setup.list(at(ReadAt::Exact(revision))).await, Err(1));
    let skipping = ListOptions {
        skip_unreadable: true,
        ..ListOptions::default()
    };
    assert!(setup.list(skipping).await.is_ok());
    assert!(setup.watch(WatchFrom::State(ReadAt::Any)).await.is_err());
    // Other objects go on, and what comes after is told with the state from before.
    setup.put("ns/b", pod("ns/b")).await;
    assert_eq!(
        next(&mut watcher).await,
        Some((EventKind::Modified, "b".to_owned()))
    );
    setup.put("ns/a", pod("ns/a")).await;
    assert_eq!(
        next(&mut watcher).await,
        Some((EventKind::Modified, "a".to_owned()))
    );
    assert_eq!(
        setup.list(ListOptions::default()).await.map(|all| all.len()),
        Ok(3)
    );
    setup.put("ns/a", "garbage").await;
    setup.write("ns/a", Op::Delete).await;
    assert_eq!(
        next(&mut watcher).await,
        Some((EventKind::Deleted, "a".to_owned()))
    );
    assert_eq!(
        setup.list(ListOptions::default()).await.map(|all| all.len()),
        Ok(2)
    );
}

#[tokio::test]
async fn the_deletion_of_what_nobody_could_show_ends_the_watches() {
    let setup = Setup::over(&[("ns/a", "garbage".into()), ("ns/b", pod("ns/b"))]).await;
    let before = setup.store.revision().await.unwrap();
    assert_eq!(setup.list(ListOptions::default()).await, Err(1));
    let mut watcher = setup.watch(WatchFrom::After(before)).await.unwrap();
    let mut other = setup.watch(WatchFrom::After(before)).await.unwrap();
    setup.write("ns/a", Op::Delete).await;
    assert_eq!(next(&mut watcher).await, None);
    assert_eq!(next(&mut other).await, None);
    // Whoever had seen it has to list anew.
    assert!(matches!(
        setup.watch(WatchFrom::After(before)).await,
        Err(Error::TooOld { .. })
    ));
    assert_eq!(setup.list(ListOptions::default()).await, Ok(vec!["b".to_owned()]));
}

#[tokio::test]
async fn what_can_be_read_again_is_noticed() {
    let locked = |path| Bytes::from([b"locked", &pod(path)[..]].concat());
    let mut values = vec![("ns/z".to_owned(), locked("ns/z"))];
    // More than are tried at a time, before it in order.
    values.extend((0..40).map(|n| (format!("ns/g{n:02}"), Bytes::from_static(b"garbage"))));
    let values: Vec<(&str, Bytes)> = values
        .iter()
        .map(|(path, value)| (&**path, value.clone()))
        .collect();
    let setup = Setup::over(&values).await;
    assert_eq!(setup.list(ListOptions::default()).await, Err(41));
    setup.unlocked.store(true, Ordering::Relaxed);
    let readable = async {
        while setup.get("ns/z").await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), readable)
        .await
        .unwrap();
    assert_eq!(setup.list(ListOptions::default()).await, Err(40));
}
