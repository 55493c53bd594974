//! The cache over a real embedded store: freshness, paging, watching, and what happens to the slow.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use skiff_cache::{
    Cache, Config, Error, EventKind, Field, Limits, ListOptions, ListResult, ReadAt, WatchEvent, WatchFrom,
    WatchOptions, Watcher,
};
use skiff_meta::selector::{FieldSelector, LabelSelector};
use skiff_store::{Embedded, Expect, Op, Outcome, Store};

const PREFIX: &str = "/registry/pods/";

struct Setup {
    store: Arc<dyn Store>,
    cache: Arc<Cache>,
    _dir: tempfile::TempDir,
}

fn config() -> Config {
    Config::new(PREFIX, "v1", "Pod")
        .fields([Field::new("spec.nodeName").indexed(), Field::new("status.phase")])
}

async fn setup_with(config: Config) -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path()).unwrap());
    let cache = Cache::start(store.clone(), config);
    cache.ready().await;
    Setup {
        store,
        cache,
        _dir: dir,
    }
}

async fn setup() -> Setup {
    setup_with(config()).await
}

fn pod(path: &str, labels: Value, node: &str) -> Bytes {
    let (namespace, name) = path.split_once('/').unwrap();
    let pod = json!({"kind": "Pod", "apiVersion": "v1", "spec": {"nodeName": node},
        "metadata": {"namespace": namespace, "name": name, "labels": labels}});
    Bytes::from(serde_json::to_vec(&pod).unwrap())
}

impl Setup {
    async fn put(&self, path: &str, labels: Value, node: &str) -> i64 {
        self.write(path, Op::Put(pod(path, labels, node))).await
    }

    async fn delete(&self, path: &str) -> i64 {
        self.write(path, Op::Delete).await
    }

    async fn write(&self, path: &str, op: Op) -> i64 {
        match self
            .store
            .write(&format!("{PREFIX}{path}"), Expect::Any, op, None)
            .await
            .unwrap()
        {
            Outcome::Done { revision, .. } => revision,
            conflict => panic!("{conflict:?}"),
        }
    }

    async fn list(&self, options: ListOptions) -> ListResult {
        self.cache.list(options).await.unwrap()
    }

    async fn watch(&self, options: WatchOptions) -> Watcher {
        self.cache.watch(options).await.unwrap()
    }
}

fn names(list: &ListResult) -> Vec<String> {
    list.items
        .iter()
        .map(|entry| format!("{}/{}", entry.head.namespace, entry.head.name))
        .collect()
}

fn labels(text: &str) -> LabelSelector {
    LabelSelector::parse(text).unwrap()
}

fn fields(text: &str) -> FieldSelector {
    FieldSelector::parse(text).unwrap()
}

/// `ADDED ns/name@version`, checked against what is on the wire.
fn brief(event: &WatchEvent) -> String {
    let wire: Value = serde_json::from_slice(&event.json()).unwrap();
    assert_eq!(wire["type"], event.kind.as_str());
    let metadata = &wire["object"]["metadata"];
    assert_eq!(metadata["resourceVersion"], event.revision.to_string());
    match event.kind {
        EventKind::Bookmark => format!("BOOKMARK @{}", event.revision),
        kind => {
            let (namespace, name) = (metadata["namespace"].as_str(), metadata["name"].as_str());
            format!(
                "{} {}/{}@{}",
                kind.as_str(),
                namespace.unwrap(),
                name.unwrap(),
                event.revision
            )
        }
    }
}

async fn next(watcher: &mut Watcher) -> String {
    brief(&watcher.next().await.expect("the watch goes on"))
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_see_what_was_written_before() {
    let setup = setup().await;
    for n in 0..200 {
        let revision = setup.put("ns/a", json!({"n": n.to_string()}), "").await;
        let entry = setup
            .cache
            .get("/registry/pods/ns/a", ReadAt::Latest)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(entry.revision, revision);
        let value: Value = serde_json::from_slice(&entry.bytes).unwrap();
        assert_eq!(value["metadata"]["resourceVersion"], revision.to_string());
        let list = setup.list(ListOptions::default()).await;
        assert!(list.revision >= revision);
    }
    let revision = setup.delete("ns/a").await;
    let at = ReadAt::NotOlderThan(revision);
    assert!(
        setup
            .cache
            .get("/registry/pods/ns/a", at)
            .await
            .unwrap()
            .is_none()
    );
    // What happens elsewhere moves the version of this list too, as every list of one moment has the same.
    let foreign = setup
        .store
        .write("/registry/nodes/n", Expect::Any, Op::Put("{}".into()), None)
        .await
        .unwrap();
    let Outcome::Done { revision, .. } = foreign else {
        panic!()
    };
    assert_eq!(setup.list(ListOptions::default()).await.revision, revision);
    assert_eq!(
        setup
            .list(ListOptions {
                at: ReadAt::Any,
                ..Default::default()
            })
            .await
            .revision,
        revision
    );
    let at = ReadAt::NotOlderThan(revision + 7);
    assert_eq!(
        setup
            .cache
            .list(ListOptions {
                at,
                ..Default::default()
            })
            .await
            .unwrap_err(),
        Error::TooLarge {
            requested: revision + 7,
            current: revision
        }
    );
}

#[tokio::test]
async fn lists_select() {
    let setup = setup().await;
    setup.put("a/1", json!({"app": "x"}), "n1").await;
    setup.put("a/2", json!({"app": "y"}), "n2").await;
    setup.put("b/1", json!({"app": "x"}), "n2").await;
    setup.put("b-b/1", json!({}), "").await;
    let check = async |namespace: &str, label: &str, field: &str, expected: &[&str]| {
        let namespace = (!namespace.is_empty()).then(|| namespace.to_owned());
        let options = ListOptions {
            namespace,
            labels: labels(label),
            fields: fields(field),
            ..Default::default()
        };
        assert_eq!(names(&setup.list(options).await), expected, "{label} {field}");
    };
    check("", "", "", &["a/1", "a/2", "b-b/1", "b/1"]).await;
    check("b", "", "", &["b/1"]).await;
    check("none", "", "", &[]).await;
    check("", "app=x", "", &["a/1", "b/1"]).await;
    check("", "!app", "", &["b-b/1"]).await;
    check("", "", "spec.nodeName=n2", &["a/2", "b/1"]).await;
    check("b", "", "spec.nodeName=n2", &["b/1"]).await;
    check("", "app=y", "spec.nodeName=n2", &["a/2"]).await;
    check("", "", "spec.nodeName=", &["b-b/1"]).await;
    check("", "", "spec.nodeName!=n2", &["a/1", "b-b/1"]).await;
    check("", "", "spec.nodeName=none", &[]).await;
    check("", "", "metadata.name=1", &["a/1", "b-b/1", "b/1"]).await;
    check("a", "", "metadata.name=1", &["a/1"]).await;
    check("a", "app=y", "metadata.name=1", &[]).await;
    check("", "", "metadata.namespace=b", &["b/1"]).await;
    check("", "", "status.phase=", &["a/1", "a/2", "b-b/1", "b/1"]).await;
    // The index follows a change.
    setup.put("a/1", json!({"app": "x"}), "n2").await;
    check("", "", "spec.nodeName=n1", &[]).await;
    check("", "", "spec.nodeName=n2", &["a/1", "a/2", "b/1"]).await;
    setup.delete("a/2").await;
    check("", "", "spec.nodeName=n2", &["a/1", "b/1"]).await;
}

#[tokio::test]
async fn pages_stay_on_one_snapshot() {
    for changes in [1000, 3] {
        // With few remembered changes, later pages come from the store's history.
        let limits = Limits {
            changes,
            ..Limits::default()
        };
        let setup = setup_with(Config { limits, ..config() }).await;
        for n in 0..10 {
            setup.put(&format!("ns/{n}"), json!({}), "n1").await;
        }
        for selector in ["", "spec.nodeName=n1"] {
            let first = setup
                .list(ListOptions {
                    limit: 4,
                    fields: fields(selector),
                    ..Default::default()
                })
                .await;
            assert_eq!(names(&first), ["ns/0", "ns/1", "ns/2", "ns/3"]);
            assert_eq!(first.remaining, selector.is_empty().then_some(6));
            // Changes before, in and after the place of the page.
            setup.delete("ns/0").await;
            setup.delete("ns/5").await;
            setup.put("ns/6", json!({"changed": "yes"}), "n2").await;
            setup.put("ns/6", json!({"changed": "twice"}), "n2").await;
            setup.put("ns/4a", json!({}), "n1").await;
            setup.put("ns/99", json!({}), "n1").await;
            let mut options = ListOptions {
                limit: 4,
                fields: fields(selector),
                ..Default::default()
            };
            options.continue_token = first.continue_token;
            let second = setup.list(options.clone()).await;
            assert_eq!(names(&second), ["ns/4", "ns/5", "ns/6", "ns/7"]);
            assert!(second.items[2].head.label("changed").is_none());
            assert_eq!(
                (second.revision, second.remaining),
                (first.revision, selector.is_empty().then_some(2))
            );
            options.continue_token = second.continue_token;
            let third = setup.list(options).await;
            assert_eq!(
                (names(&third), third.continue_token),
                (vec!["ns/8".into(), "ns/9".into()], None)
            );
            // The same by resourceVersionMatch=Exact.
            let at = ReadAt::Exact(first.revision);
            let exact = setup
                .list(ListOptions {
                    at,
                    ..Default::default()
                })
                .await;
            assert_eq!((names(&exact).len(), exact.revision), (10, first.revision));
            // Back to the start for the next round.
            for path in ["ns/4a", "ns/99"] {
                setup.delete(path).await;
            }
            for path in ["ns/0", "ns/5", "ns/6"] {
                setup.put(path, json!({}), "n1").await;
            }
        }
    }
}

#[tokio::test]
async fn pages_of_a_quiet_resource_expire_with_the_stores_history() {
    let setup = setup_with(config()).await;
    for n in 0..3 {
        setup.put(&format!("ns/{n}"), json!({}), "").await;
    }
    let page = |continue_token| ListOptions {
        limit: 1,
        continue_token,
        ..Default::default()
    };
    let first = setup.list(page(None)).await;
    let second = setup.list(page(first.continue_token.clone())).await;
    assert_eq!((names(&second), second.remaining), (vec!["ns/1".into()], Some(1)));
    // Something else is written, and history is forgotten up to there.
    let revision = setup
        .store
        .write("/elsewhere", Expect::Any, Op::Put(b"{}".to_vec().into()), None)
        .await;
    assert!(matches!(revision, Ok(Outcome::Done { .. })), "{revision:?}");
    let revision = setup.store.revision().await.unwrap();
    setup.store.compact(revision).await.unwrap();
    let Err(Error::ExpiredContinue { token }) = setup.cache.list(page(first.continue_token)).await else {
        panic!("the token outlived the history")
    };
    let second = setup.list(page(Some(token))).await;
    assert_eq!((names(&second), second.remaining), (vec!["ns/1".into()], Some(1)));
}

#[tokio::test]
async fn old_pages_expire_and_can_go_on_inconsistently() {
    let setup = setup_with(Config {
        limits: Limits {
            changes: 2,
            ..Limits::default()
        },
        ..config()
    })
    .await;
    for n in 0..6 {
        setup.put(&format!("ns/{n}"), json!({}), "").await;
    }
    let first = setup
        .list(ListOptions {
            limit: 2,
            ..Default::default()
        })
        .await;
    for n in 6..9 {
        setup.put(&format!("ns/{n}"), json!({}), "").await;
    }
    let revision = setup.delete("ns/3").await;
    setup.store.compact(revision).await.unwrap();
    let options = ListOptions {
        limit: 2,
        continue_token: first.continue_token,
        ..Default::default()
    };
    let Err(Error::ExpiredContinue { token }) = setup.cache.list(options).await else {
        panic!()
    };
    let options = ListOptions {
        limit: 2,
        continue_token: Some(token),
        ..Default::default()
    };
    let second = setup.list(options).await;
    assert_eq!(
        (names(&second), second.revision),
        (vec!["ns/2".into(), "ns/4".into()], revision)
    );
    let at = ReadAt::Exact(first.revision);
    let error = setup
        .cache
        .list(ListOptions {
            at,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(error, Error::Expired);
    let bad = ListOptions {
        continue_token: Some("!".to_owned()),
        ..Default::default()
    };
    assert!(matches!(
        setup.cache.list(bad).await.unwrap_err(),
        Error::InvalidContinue(_)
    ));
}

#[tokio::test]
async fn watches_replay_and_go_on() {
    let setup = setup().await;
    let start = setup.put("ns/a", json!({}), "").await;
    setup.put("ns/a", json!({"x": "1"}), "").await;
    setup.put("other/b", json!({}), "").await;
    let mut all = setup
        .watch(WatchOptions {
            from: WatchFrom::After(start),
            ..Default::default()
        })
        .await;
    let namespace = Some("ns".to_owned());
    let from = WatchFrom::State(ReadAt::Latest);
    let mut state = setup
        .watch(WatchOptions {
            namespace,
            from,
            ..Default::default()
        })
        .await;
    let mut now = setup.watch(WatchOptions::default()).await;
    setup.delete("ns/a").await;
    setup.put("ns/a", json!({}), "").await;
    for expected in [
        "MODIFIED ns/a@3",
        "ADDED other/b@4",
        "DELETED ns/a@5",
        "ADDED ns/a@6",
    ] {
        assert_eq!(next(&mut all).await, expected);
    }
    for expected in ["ADDED ns/a@3", "DELETED ns/a@5", "ADDED ns/a@6"] {
        assert_eq!(next(&mut state).await, expected);
    }
    for expected in ["DELETED ns/a@5", "ADDED ns/a@6"] {
        assert_eq!(next(&mut now).await, expected);
    }
    // A version that is yet to come is one of another store, that was here before.
    let future = WatchOptions {
        from: WatchFrom::After(8),
        ..Default::default()
    };
    let refused = setup.cache.watch(future).await.map(drop);
    let expected = Error::TooOld {
        requested: 8,
        oldest: 6,
    };
    assert_eq!(refused.unwrap_err(), expected);
}

#[tokio::test]
async fn selectors_turn_changes_into_comings_and_goings() {
    let setup = setup().await;
    let mut by_label = setup
        .watch(WatchOptions {
            labels: labels("app=x"),
            ..Default::default()
        })
        .await;
    let mut by_node = setup
        .watch(WatchOptions {
            fields: fields("spec.nodeName=n1"),
            ..Default::default()
        })
        .await;
    let mut by_name = setup
        .watch(WatchOptions {
            fields: fields("metadata.name=a"),
            ..Default::default()
        })
        .await;
    setup.put("ns/a", json!({"app": "x"}), "").await; // 2
    setup.put("ns/b", json!({"app": "y"}), "n1").await; // 3
    setup.put("ns/a", json!({"app": "x"}), "n1").await; // 4
    setup.put("ns/a", json!({"app": "y", "v": "new"}), "n2").await; // 5: leaves both
    setup.put("ns/a", json!({"app": "x"}), "n1").await; // 6
    setup.delete("ns/b").await; // 7
    setup.delete("ns/a").await; // 8
    let check = async |watcher: &mut Watcher, expected: &[&str]| {
        for expected in expected {
            assert_eq!(next(watcher).await, *expected);
        }
    };
    check(
        &mut by_label,
        &[
            "ADDED ns/a@2",
            "MODIFIED ns/a@4",
            "DELETED ns/a@5",
            "ADDED ns/a@6",
            "DELETED ns/a@8",
        ],
    )
    .await;
    let by_node_all = [
        "ADDED ns/b@3",
        "ADDED ns/a@4",
        "DELETED ns/a@5",
        "ADDED ns/a@6",
        "DELETED ns/b@7",
        "DELETED ns/a@8",
    ];
    check(&mut by_node, &by_node_all).await;
    check(
        &mut by_name,
        &[
            "ADDED ns/a@2",
            "MODIFIED ns/a@4",
            "MODIFIED ns/a@5",
            "MODIFIED ns/a@6",
        ],
    )
    .await;
    // Leaving shows the last state that was selected, under the version that left.
    let from = WatchFrom::After(4);
    let mut replay = setup
        .watch(WatchOptions {
            labels: labels("app=x"),
            from,
            ..Default::default()
        })
        .await;
    let left = replay.next().await.unwrap();
    assert_eq!((left.kind, left.revision), (EventKind::Deleted, 5));
    let wire: Value = serde_json::from_slice(&left.json()).unwrap();
    assert_eq!(wire["object"]["metadata"]["labels"], json!({"app": "x"}));
    assert_eq!(wire["object"]["spec"]["nodeName"], "n1");
}

#[tokio::test]
async fn watchers_share_one_frame() {
    let setup = setup().await;
    let mut first = setup.watch(WatchOptions::default()).await;
    let namespace = Some("ns".to_owned());
    let mut second = setup
        .watch(WatchOptions {
            namespace,
            ..Default::default()
        })
        .await;
    // Both must be past catching up, where each makes its own events.
    let fence = setup.put("ns/fence", json!({}), "").await;
    for watcher in [&mut first, &mut second] {
        assert_eq!(watcher.next().await.unwrap().revision, fence);
    }
    setup.put("ns/a", json!({}), "").await;
    let (one, two) = (first.next().await.unwrap(), second.next().await.unwrap());
    assert_eq!(one.json().as_ptr(), two.json().as_ptr());
    let entry = setup
        .cache
        .get("/registry/pods/ns/a", ReadAt::Any)
        .await
        .unwrap()
        .unwrap();
    let frame = one.json().as_ptr_range();
    assert!(
        frame.contains(&entry.bytes.as_ptr()),
        "the object is a part of its frame"
    );
}

#[tokio::test]
async fn a_version_that_is_forgotten_is_too_old() {
    let setup = setup_with(Config {
        limits: Limits {
            changes: 3,
            ..Limits::default()
        },
        ..config()
    })
    .await;
    for n in 0..5 {
        setup.put("ns/a", json!({"n": n.to_string()}), "").await;
    }
    setup.cache.get("x", ReadAt::Latest).await.unwrap();
    let watch = async |after| {
        let from = WatchFrom::After(after);
        setup
            .cache
            .watch(WatchOptions {
                from,
                ..Default::default()
            })
            .await
            .map(|_| ())
    };
    // Revisions 2 to 6; the last three changes are kept.
    assert_eq!(
        watch(2).await,
        Err(Error::TooOld {
            requested: 2,
            oldest: 3
        })
    );
    assert_eq!(
        watch(2).await.unwrap_err().to_string(),
        "too old resource version: 2 (3)"
    );
    assert_eq!(watch(3).await, Ok(()));
}

#[tokio::test]
async fn what_a_burst_left_behind_goes_though_nothing_follows() {
    let limits = Limits {
        age: Duration::ZERO,
        at_least: 0,
        ..Limits::default()
    };
    let setup = setup_with(Config { limits, ..config() }).await;
    let before = setup.cache.revision();
    setup.put("a/1", json!({}), "").await;
    setup.list(ListOptions::default()).await;
    loop {
        let from = WatchFrom::After(before);
        let options = WatchOptions {
            from,
            ..WatchOptions::default()
        };
        match setup.cache.watch(options).await {
            Err(Error::TooOld { .. }) => break,
            Err(error) => panic!("{error}"),
            Ok(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    assert_eq!(setup.cache.len(), 1);
}

#[tokio::test]
async fn a_burst_does_not_end_a_watcher_but_never_reading_does() {
    let limits = Limits {
        changes: 1000,
        queue: 8,
        ..Limits::default()
    };
    let setup = setup_with(Config { limits, ..config() }).await;
    let mut reader = setup.watch(WatchOptions::default()).await;
    let mut sleeper = setup.watch(WatchOptions::default()).await;
    let first = setup.put("ns/a", json!({}), "").await;
    assert_eq!(reader.next().await.unwrap().revision, first);
    assert_eq!(sleeper.next().await.unwrap().revision, first);
    for n in 0..500 {
        setup.put(&format!("ns/{n}"), json!({}), "").await;
    }
    // Far more than its queue holds, and nothing is missing.
    for n in 1..=500 {
        assert_eq!(reader.next().await.unwrap().revision, first + n);
    }
    for n in 0..1500 {
        setup.put(&format!("ns/{n}"), json!({}), "").await;
    }
    setup.cache.get("x", ReadAt::Latest).await.unwrap();
    assert!(sleeper.next().await.is_none());
    drop((reader, sleeper));
    assert_eq!(setup.cache.watchers(), 0);
}

#[tokio::test]
async fn the_state_as_events_ends_with_a_bookmark() {
    let setup = setup().await;
    setup.put("ns/a", json!({}), "").await;
    setup.put("ns/b", json!({}), "").await;
    let from = WatchFrom::State(ReadAt::Latest);
    let options = WatchOptions {
        from,
        initial_events_end: true,
        bookmarks: true,
        ..Default::default()
    };
    let mut watcher = setup.watch(options).await;
    assert_eq!(next(&mut watcher).await, "ADDED ns/a@2");
    assert_eq!(next(&mut watcher).await, "ADDED ns/b@3");
    let end = watcher.next().await.unwrap();
    assert_eq!((end.kind, end.initial_events_end), (EventKind::Bookmark, true));
    assert_eq!(
        &end.json()[..],
        b"{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"annotations\":{\"k8s.io/initial-events-end\":\"true\"},\"resourceVersion\":\"3\"}}}\n"
    );
    setup.put("ns/c", json!({}), "").await;
    assert_eq!(next(&mut watcher).await, "ADDED ns/c@4");
}

#[tokio::test]
async fn bookmarks_follow_a_busy_store_on_a_quiet_resource() {
    let config = Config {
        bookmark_every: Duration::from_millis(1),
        ..config()
    };
    let setup = setup_with(config).await;
    let mut watcher = setup
        .watch(WatchOptions {
            bookmarks: true,
            ..Default::default()
        })
        .await;
    for _ in 0..5 {
        setup
            .store
            .write("/registry/nodes/n", Expect::Any, Op::Put("{}".into()), None)
            .await
            .unwrap();
    }
    while next(&mut watcher).await != "BOOKMARK @6" {}
    // And a watch resumed from there misses nothing.
    let mut resumed = setup
        .watch(WatchOptions {
            from: WatchFrom::After(6),
            ..Default::default()
        })
        .await;
    setup.put("ns/a", json!({}), "").await;
    assert_eq!(next(&mut resumed).await, "ADDED ns/a@7");
}

#[tokio::test]
async fn values_in_another_form_are_decoded() {
    let decode = |key: &str, _: i64, value: Bytes| match key.rsplit('/').next() {
        Some("panics") => panic!("as a bug would"),
        Some("fails") => Err("no such key".to_owned()),
        _ => Ok(value.slice(4..)),
    };
    let setup = setup_with(Config {
        decode: Some(Arc::new(decode)),
        ..config()
    })
    .await;
    for name in ["a", "fails", "panics", "z"] {
        let value = [b"enc:", &pod(&format!("ns/{name}"), json!({}), "")[..]].concat();
        setup
            .write(&format!("ns/{name}"), Op::Put(Bytes::from(value)))
            .await;
    }
    let readable = ListOptions {
        skip_unreadable: true,
        ..ListOptions::default()
    };
    assert_eq!(names(&setup.list(readable).await), ["ns/a", "ns/z"]);
    let refused = setup.cache.list(ListOptions::default()).await.unwrap_err();
    assert!(matches!(refused, Error::UnreadableItems(items) if items.len() == 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cache_that_fell_behind_the_store_catches_up() {
    // While this is locked for writing the cache stands still.
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let decode = {
        let gate = gate.clone();
        move |_: &str, _: i64, value: Bytes| {
            drop(gate.read());
            Ok(value)
        }
    };
    let setup = Arc::new(
        setup_with(Config {
            decode: Some(Arc::new(decode)),
            ..config()
        })
        .await,
    );
    let mut watcher = setup.watch(WatchOptions::default()).await;
    // More batches than the store keeps for a subscriber that does not read.
    let writes = 1100;
    let writer = setup.clone();
    let runtime = tokio::runtime::Handle::current();
    let blocked = tokio::task::spawn_blocking(move || {
        let _closed = gate.write();
        runtime.block_on(async {
            for n in 0..writes {
                writer.put(&format!("ns/{n}"), json!({}), "").await;
            }
        });
    });
    blocked.await.unwrap();
    let list = setup.list(ListOptions::default()).await;
    assert_eq!((list.items.len(), list.revision), (writes, 1 + writes as i64));
    for n in 0..writes as i64 {
        assert_eq!(watcher.next().await.unwrap().revision, 2 + n);
    }
}

#[tokio::test]
async fn a_dropped_cache_ends_its_watchers() {
    let setup = setup().await;
    let mut watcher = setup.watch(WatchOptions::default()).await;
    let Setup {
        cache,
        store: _store,
        _dir,
    } = setup;
    drop(cache);
    assert!(watcher.next().await.is_none());
}

/// Many writers, many watchers with different filters that come and go and resume: each puts its
/// events together, and must end with exactly what a list with its filter shows.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_watcher_mirrors_the_state() {
    let limits = Limits {
        queue: 4,
        ..Limits::default()
    };
    let config = Config {
        limits,
        bookmark_every: Duration::from_millis(1),
        ..config()
    };
    let setup = Arc::new(setup_with(config).await);
    // Set when the writers are done: a bookmark of this version says that a watcher has seen it all.
    let (done, end) = tokio::sync::watch::channel(i64::MAX);
    let filters = [
        (None, "", ""),
        (Some("a"), "", ""),
        (None, "app=x", ""),
        (None, "", "spec.nodeName=n1"),
        (Some("b"), "app!=x", "spec.nodeName=n2"),
        (None, "", "metadata.name=3"),
        (None, "", "spec.nodeName!=n1"),
    ];
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0_u64..4 {
        let setup = setup.clone();
        writers.spawn(async move {
            // A small generator is enough for variety, and gives the same run every time.
            let mut seed = writer * 7919 + 1;
            let mut draw = |below: u64| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (seed >> 33) % below
            };
            for _ in 0..150 {
                let path = format!("{}/{}", ["a", "b"][draw(2) as usize], draw(8));
                if draw(4) == 0 {
                    setup.delete(&path).await;
                } else {
                    let node = ["", "n1", "n2"][draw(3) as usize];
                    setup
                        .put(&path, json!({"app": (["x", "y"][draw(2) as usize])}), node)
                        .await;
                }
            }
        });
    }
    let mut mirrors = tokio::task::JoinSet::new();
    for (namespace, label, field) in filters {
        for resume_every in [7, 1000] {
            let (setup, end) = (setup.clone(), end.clone());
            mirrors.spawn(async move {
                let options = WatchOptions {
                    namespace: namespace.map(str::to_owned),
                    labels: labels(label),
                    fields: fields(field),
                    from: WatchFrom::State(ReadAt::Latest),
                    bookmarks: true,
                    ..Default::default()
                };
                let mut watcher = setup.watch(options.clone()).await;
                let mut mirror: BTreeMap<String, i64> = BTreeMap::new();
                let mut last = 0;
                let mut seen = 0;
                loop {
                    let event = watcher.next().await.expect("nothing is forgotten here");
                    let Some(entry) = event.entry.clone() else {
                        assert!(event.revision >= last, "a bookmark does not go back");
                        last = event.revision;
                        if event.revision >= *end.borrow() {
                            break;
                        }
                        continue;
                    };
                    let path = format!("{}/{}", entry.head.namespace, entry.head.name);
                    match event.kind {
                        EventKind::Added => assert!(mirror.insert(path, event.revision).is_none()),
                        EventKind::Modified => assert!(mirror.insert(path, event.revision).is_some()),
                        EventKind::Deleted => assert!(mirror.remove(&path).is_some()),
                        EventKind::Bookmark => {}
                    }
                    // The initial events come in the order of keys, all others in that of versions.
                    if event.kind != EventKind::Added || event.revision > last {
                        assert!(event.revision > last);
                    }
                    last = last.max(event.revision).max(watcher.revision());
                    seen += 1;
                    if seen % resume_every == 0 && watcher.revision() == event.revision {
                        let from = WatchFrom::After(last);
                        watcher = setup
                            .watch(WatchOptions {
                                from,
                                ..options.clone()
                            })
                            .await;
                    }
                }
                let options = ListOptions {
                    namespace: namespace.map(str::to_owned),
                    labels: labels(label),
                    fields: fields(field),
                    ..Default::default()
                };
                let list = setup.list(options).await;
                let listed: BTreeMap<String, i64> = list
                    .items
                    .iter()
                    .map(|entry| {
                        (
                            format!("{}/{}", entry.head.namespace, entry.head.name),
                            entry.revision,
                        )
                    })
                    .collect();
                assert_eq!(mirror, listed, "{namespace:?} {label} {field}");
            });
        }
    }
    writers.join_all().await;
    done.send_replace(setup.store.revision().await.unwrap());
    while let Some(result) = mirrors.join_next().await {
        result.unwrap();
    }
}
