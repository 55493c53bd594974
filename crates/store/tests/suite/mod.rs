//! The suite that every store must pass. It knows the trait only, takes a fresh store for each part,
//! and keeps below `/registry/` as skiff does.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use skiff_store::{
    Batch, Error, Event, Expect, KeyValue, Merge, Merged, Op, Outcome, Store, Transacted, Watch, Write,
};

pub fn put(value: &str) -> Op {
    Op::Put(Bytes::copy_from_slice(value.as_bytes()))
}

fn text(kv: &KeyValue) -> String {
    format!("{}={}", kv.key, String::from_utf8_lossy(&kv.value))
}

/// A write that must go through; its revision.
pub async fn write(store: &dyn Store, key: &str, value: &str) -> i64 {
    done(store.write(key, Expect::Any, put(value), None).await.unwrap()).0
}

pub async fn delete(store: &dyn Store, key: &str) -> i64 {
    done(store.write(key, Expect::Any, Op::Delete, None).await.unwrap()).0
}

fn done(outcome: Outcome) -> (i64, Option<KeyValue>) {
    match outcome {
        Outcome::Done { revision, previous } => (revision, previous),
        conflict => panic!("{conflict:?}"),
    }
}

fn conflict(outcome: Outcome) -> (Option<KeyValue>, i64) {
    match outcome {
        Outcome::Conflict { current, revision } => (current, revision),
        done => panic!("{done:?}"),
    }
}

/// Reads batches until one reaches `revision`; all events seen.
pub async fn events_until(watch: &mut Watch, revision: i64) -> Vec<Event> {
    let mut seen = Vec::new();
    while seen.last().is_none_or(|event: &Event| event.revision < revision) {
        let Batch { events, .. } = watch.next().await.unwrap();
        seen.extend(events);
    }
    seen
}

fn brief(events: &[Event], base: i64) -> Vec<String> {
    let show = |event: &Event| match &event.value {
        Some(value) if event.is_create() => {
            format!(
                "+{} {}={}",
                event.revision - base,
                event.key,
                String::from_utf8_lossy(value)
            )
        }
        Some(value) => format!(
            "~{} {}={}",
            event.revision - base,
            event.key,
            String::from_utf8_lossy(value)
        ),
        None => format!("-{} {}", event.revision - base, event.key),
    };
    events.iter().map(show).collect()
}

/// Everything that needs no restart. `fresh` gives an empty store each time.
pub async fn all(fresh: impl AsyncFn() -> Arc<dyn Store>) {
    compare_and_swap(&*fresh().await).await;
    revisions(&*fresh().await).await;
    ranges(&*fresh().await).await;
    watches(&*fresh().await).await;
    compaction(&*fresh().await).await;
    concurrent_writers(fresh().await).await;
    consistent_revision(fresh().await).await;
    odd_values(&*fresh().await).await;
    transactions(&*fresh().await).await;
    concurrent_merges(fresh().await).await;
}

async fn compare_and_swap(store: &dyn Store) {
    let key = "/registry/pods/default/a";
    let (none, base) = store.get(key).await.unwrap();
    assert_eq!(none, None);

    let (current, revision) = conflict(
        store
            .write(key, Expect::Revision(7), put("x"), None)
            .await
            .unwrap(),
    );
    assert_eq!((current, revision), (None, base));
    let (current, _) = conflict(
        store
            .write(key, Expect::Revision(7), Op::Delete, None)
            .await
            .unwrap(),
    );
    assert_eq!(current, None);

    let (first, previous) = done(store.write(key, Expect::Absent, put("1"), None).await.unwrap());
    assert_eq!((first, previous), (base + 1, None));
    let (current, revision) = conflict(store.write(key, Expect::Absent, put("x"), None).await.unwrap());
    let current = current.unwrap();
    assert_eq!(
        (text(&current), current.mod_revision, revision),
        (format!("{key}=1"), first, first)
    );

    let (second, previous) = done(
        store
            .write(key, Expect::Revision(first), put("2"), None)
            .await
            .unwrap(),
    );
    assert_eq!(
        (second, previous.map(|kv| kv.mod_revision)),
        (first + 1, Some(first))
    );
    let (current, _) = conflict(
        store
            .write(key, Expect::Revision(first), Op::Delete, None)
            .await
            .unwrap(),
    );
    assert_eq!(
        current.map(|kv| (kv.create_revision, kv.mod_revision)),
        Some((first, second))
    );

    let (third, previous) = done(
        store
            .write(key, Expect::Revision(second), Op::Delete, None)
            .await
            .unwrap(),
    );
    assert_eq!(previous.map(|kv| text(&kv)), Some(format!("{key}=2")));
    assert_eq!(store.get(key).await.unwrap(), (None, third));

    // Deleting what is not there changes nothing.
    assert_eq!(
        done(store.write(key, Expect::Any, Op::Delete, None).await.unwrap()),
        (third, None)
    );
    assert_eq!(
        done(store.write(key, Expect::Absent, Op::Delete, None).await.unwrap()),
        (third, None)
    );
}

async fn revisions(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    for n in 1..=5 {
        assert_eq!(
            write(store, &format!("/registry/x/{}", n % 2), "v").await,
            base + n
        );
        assert_eq!(store.revision().await.unwrap(), base + n);
    }
    let (kv, revision) = store.get("/registry/x/1").await.unwrap();
    let kv = kv.unwrap();
    assert_eq!(
        (kv.create_revision, kv.mod_revision, revision),
        (base + 1, base + 5, base + 5)
    );
    // A key that comes back is a new one.
    delete(store, "/registry/x/1").await;
    let again = write(store, "/registry/x/1", "v").await;
    let kv = store.get("/registry/x/1").await.unwrap().0.unwrap();
    assert_eq!((again, kv.create_revision), (base + 7, base + 7));
    assert!(store.size().await.unwrap() > 0);
}

async fn ranges(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    for name in ["b", "a", "d", "c"] {
        write(store, &format!("/registry/pods/ns/{name}"), name).await;
    }
    write(store, "/registry/pods/other/e", "e").await;
    write(store, "/registry/podtemplates/ns/a", "x").await;
    write(store, "/registry/pods/ns/b", "B").await;
    delete(store, "/registry/pods/ns/c").await;

    let check =
        async |prefix: &str, after: Option<&str>, limit, at: Option<i64>, expected: &str, more, count| {
            let range = store
                .range(prefix, after, limit, at.map(|n| base + n))
                .await
                .unwrap();
            let values: Vec<_> = range
                .items
                .iter()
                .map(|kv| String::from_utf8_lossy(&kv.value).into_owned())
                .collect();
            assert_eq!(values.join(""), expected, "{prefix} {after:?} {limit} {at:?}");
            assert_eq!((range.more, range.count, range.revision), (more, count, base + 8));
            assert!(range.items.windows(2).all(|pair| pair[0].key < pair[1].key));
        };
    check("/registry/pods/", None, 0, None, "aBde", false, 4).await;
    check("/registry/pods/ns/", None, 0, None, "aBd", false, 3).await;
    check("/registry/pods/", None, 2, None, "aB", true, 4).await;
    check(
        "/registry/pods/",
        Some("/registry/pods/ns/b"),
        2,
        None,
        "de",
        false,
        2,
    )
    .await;
    check(
        "/registry/pods/",
        Some("/registry/pods/ns/b"),
        1,
        None,
        "d",
        true,
        2,
    )
    .await;
    check(
        "/registry/pods/",
        Some("/registry/pods/zz"),
        0,
        None,
        "",
        false,
        0,
    )
    .await;
    check("/registry/pods/", None, 0, Some(4), "abcd", false, 4).await;
    check("/registry/pods/", None, 0, Some(7), "aBcde", false, 5).await;
    check(
        "/registry/pods/",
        Some("/registry/pods/ns/b"),
        2,
        Some(7),
        "cd",
        true,
        3,
    )
    .await;
    check("/registry/pods/", None, 0, Some(0), "", false, 0).await;
    check("/registry/none/", None, 0, None, "", false, 0).await;

    match store.range("/registry/pods/", None, 0, Some(base + 100)).await {
        Err(Error::FutureRevision { .. }) => {}
        other => panic!("{other:?}"),
    }
}

async fn watches(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    write(store, "/registry/pods/ns/a", "1").await;
    write(store, "/registry/nodes/n", "1").await;
    write(store, "/registry/pods/ns/a", "2").await;
    let mut from_start = store.watch("/registry/pods/", base + 1).await.unwrap();
    let mut from_third = store.watch("/registry/pods/", base + 3).await.unwrap();
    let mut from_now = store.watch("/registry/pods/", 0).await.unwrap();
    let mut from_future = store.watch("/registry/pods/", base + 6).await.unwrap();
    write(store, "/registry/pods/ns/b", "1").await;
    delete(store, "/registry/pods/ns/a").await;
    write(store, "/registry/pods/ns/a", "3").await;
    let last = base + 6;
    let all = [
        "+1 /registry/pods/ns/a=1",
        "~3 /registry/pods/ns/a=2",
        "+4 /registry/pods/ns/b=1",
        "-5 /registry/pods/ns/a",
        "+6 /registry/pods/ns/a=3",
    ];
    assert_eq!(brief(&events_until(&mut from_start, last).await, base), all);
    assert_eq!(brief(&events_until(&mut from_third, last).await, base), all[1..]);
    assert_eq!(brief(&events_until(&mut from_now, last).await, base), all[2..]);
    assert_eq!(brief(&events_until(&mut from_future, last).await, base), all[4..]);
}

async fn compaction(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    write(store, "/registry/a/1", "1").await;
    write(store, "/registry/b/1", "1").await;
    write(store, "/registry/a/1", "2").await;
    write(store, "/registry/b/2", "1").await;
    delete(store, "/registry/b/1").await;
    // A store that has not heard of its newest writes when history goes must start over, which is not asked for here.
    store.revision().await.unwrap();
    store.compact(base + 3).await.unwrap();

    let compacted = |error: &Error| matches!(error, Error::Compacted { revision } if *revision == base + 3);
    let error = store
        .range("/registry/", None, 0, Some(base + 2))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Compacted { .. }), "{error:?}");
    // The error of a watch may come with it or as its first message.
    let error = match store.watch("/registry/", base + 2).await {
        Err(error) => error,
        Ok(mut watch) => watch.next().await.unwrap_err(),
    };
    assert!(compacted(&error), "{error:?}");
    let error = store.compact(base + 3).await.unwrap_err();
    assert!(matches!(error, Error::Compacted { .. }), "{error:?}");
    let error = store.compact(base + 100).await.unwrap_err();
    assert!(matches!(error, Error::FutureRevision { .. }), "{error:?}");

    let range = store.range("/registry/", None, 0, Some(base + 3)).await.unwrap();
    let items: Vec<String> = range.items.iter().map(text).collect();
    assert_eq!(items, ["/registry/a/1=2", "/registry/b/1=1"]);
    let mut watch = store.watch("/registry/", base + 4).await.unwrap();
    let seen = brief(&events_until(&mut watch, base + 5).await, base);
    assert_eq!(seen, ["+4 /registry/b/2=1", "-5 /registry/b/1"]);
    let range = store.range("/registry/", None, 0, None).await.unwrap();
    assert_eq!((range.items.len(), range.revision), (2, base + 5));
}

/// Many writers count one key up by compare and swap: nothing is lost, and a watch of it all sees
/// every revision once, in order.
async fn concurrent_writers(store: Arc<dyn Store>) {
    const WRITERS: usize = 8;
    const EACH: usize = 25;
    let base = store.revision().await.unwrap();
    let mut watch = store.watch("/registry/", base + 1).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        tasks.spawn(async move {
            for n in 0..EACH {
                write(&*store, &format!("/registry/own/{writer}-{n}"), "v").await;
                loop {
                    let (current, _) = store.get("/registry/counter").await.unwrap();
                    let (expect, value) = match &current {
                        None => (Expect::Absent, 1),
                        Some(kv) => {
                            let value: usize = String::from_utf8_lossy(&kv.value).parse().unwrap();
                            (Expect::Revision(kv.mod_revision), value + 1)
                        }
                    };
                    let outcome = store
                        .write("/registry/counter", expect, put(&value.to_string()), None)
                        .await;
                    if let Outcome::Done { .. } = outcome.unwrap() {
                        break;
                    }
                }
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    let (kv, revision) = store.get("/registry/counter").await.unwrap();
    assert_eq!(&kv.unwrap().value[..], (WRITERS * EACH).to_string().as_bytes());
    assert_eq!(
        revision,
        base + 2 * (WRITERS * EACH) as i64,
        "every write took one revision, no other did"
    );
    let events = events_until(&mut watch, revision).await;
    let expected: Vec<i64> = (base + 1..=revision).collect();
    assert_eq!(
        events.iter().map(|event| event.revision).collect::<Vec<_>>(),
        expected
    );
    // The events put together are the state.
    let mut state = BTreeMap::new();
    for event in events {
        match event.value {
            Some(value) => state.insert(event.key.to_string(), value),
            None => state.remove(&*event.key),
        };
    }
    let range = store.range("/registry/", None, 0, None).await.unwrap();
    let stored: BTreeMap<_, _> = range
        .items
        .into_iter()
        .map(|kv| (kv.key.to_string(), kv.value))
        .collect();
    assert_eq!(state, stored);
}

/// After `revision()` the position of a watch counts everything up to it, and a quiet one knows as much.
async fn consistent_revision(store: Arc<dyn Store>) {
    let mut busy = store.watch("/registry/busy/", 0).await.unwrap();
    let quiet = store.watch("/registry/quiet/", 0).await.unwrap();
    for n in 0..20 {
        let written = write(&*store, "/registry/busy/a", &n.to_string()).await;
        let revision = store.revision().await.unwrap();
        assert!(revision >= written);
        let (known, queued) = quiet.position().sync_point();
        assert!(
            known >= revision && queued < written,
            "{known} {queued} {written}"
        );
        let (known, queued) = busy.position().sync_point();
        assert!(
            known >= revision && queued >= written,
            "{known} {queued} {written}"
        );
        assert_eq!(busy.next().await.unwrap().events[0].revision, written);
    }
}

async fn odd_values(store: &dyn Store) {
    let mut watch = store.watch("/registry/odd/", 0).await.unwrap();
    let large = vec![0x5a_u8; 1 << 20];
    for (n, value) in [&b""[..], b"\0\xff\xfe", &large].into_iter().enumerate() {
        let key = format!("/registry/odd/ns/name-{n}.é");
        let op = Op::Put(Bytes::copy_from_slice(value));
        let (revision, _) = done(store.write(&key, Expect::Absent, op, None).await.unwrap());
        assert_eq!(store.get(&key).await.unwrap().0.unwrap().value, value);
        let events = events_until(&mut watch, revision).await;
        assert_eq!(events[0].value.as_deref(), Some(value));
    }
}

async fn value_of(store: &dyn Store, key: &str) -> Option<String> {
    let (found, _) = store.get(key).await.unwrap();
    found.map(|found| String::from_utf8_lossy(&found.value).into_owned())
}

async fn transactions(store: &dyn Store) {
    let (service, address) = ("/registry/services/a", "/registry/addresses/a");
    let create = |key: &str| Write::new(key, Expect::Absent, put("1"));
    let transacted = store.transact(vec![create(address), create(service)]).await;
    let Transacted::Done(written) = transacted.unwrap() else {
        panic!("nothing was there");
    };
    let revisions: Vec<i64> = written.iter().map(|written| written.revision).collect();
    let (found, now) = store.get(service).await.unwrap();
    assert_eq!(found.unwrap().mod_revision, revisions[1]);
    assert_eq!(now, revisions[1]);
    // Nothing of it, if one expectation does not hold.
    let other = "/registry/addresses/b";
    let transacted = store
        .transact(vec![create(other), create(service)])
        .await
        .unwrap();
    let Transacted::Conflict {
        at,
        current,
        revision,
    } = transacted
    else {
        panic!("the service is there");
    };
    assert_eq!((at, revision), (1, now));
    assert_eq!(current.as_ref().map(text), Some(format!("{service}=1")));
    assert_eq!(value_of(store, other).await, None);
    let transacted = store
        .transact(vec![create(address), create(service)])
        .await
        .unwrap();
    assert!(matches!(transacted, Transacted::Conflict { at: 0, .. }));
    // A merge sees the present value, and may refuse.
    let more = || Write::new("/registry/ranges/a", Expect::Any, Op::Merge(append("x")));
    for expected in ["x", "xx"] {
        let change = Write::new(service, Expect::Any, put(expected));
        let transacted = store.transact(vec![more(), change]).await.unwrap();
        assert!(matches!(transacted, Transacted::Done(_)));
        assert_eq!(
            value_of(store, "/registry/ranges/a").await.as_deref(),
            Some(expected)
        );
        assert_eq!(value_of(store, service).await.as_deref(), Some(expected));
    }
    let refused = Write::new(
        "/registry/ranges/a",
        Expect::Any,
        Op::Merge(Merge::new(|_| Merged::Refuse)),
    );
    let removal = Write::new(service, Expect::Any, Op::Delete);
    let transacted = store.transact(vec![removal.clone(), refused]).await.unwrap();
    assert!(matches!(transacted, Transacted::Conflict { at: 1, .. }));
    assert_eq!(value_of(store, service).await.as_deref(), Some("xx"));
    // One that changes nothing is no event.
    let kept = Write::new(
        "/registry/ranges/a",
        Expect::Any,
        Op::Merge(Merge::new(|_| Merged::Keep)),
    );
    let mut watch = store.watch("/registry/", 0).await.unwrap();
    let transacted = store.transact(vec![kept, removal]).await.unwrap();
    let Transacted::Done(written) = transacted else {
        panic!("nothing speaks against it");
    };
    let seen = events_until(&mut watch, written[1].revision).await;
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(value_of(store, service).await, None);
}

fn append(text: &'static str) -> Merge {
    Merge::new(move |current| {
        let mut value = current.unwrap_or_default().to_vec();
        value.extend_from_slice(text.as_bytes());
        Merged::Put(value.into())
    })
}

/// No merge is lost, whoever else merges or writes.
async fn concurrent_merges(store: Arc<dyn Store>) {
    const WRITERS: usize = 8;
    const WRITES: usize = 20;
    let key = "/registry/ranges/a";
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        tasks.spawn(async move {
            for n in 0..WRITES {
                let merge = Write::new(key, Expect::Any, Op::Merge(append("x")));
                let own = format!("/registry/services/{writer}-{n}");
                let create = Write::new(own, Expect::Absent, put("1"));
                let transacted = store.transact(vec![merge, create]).await.unwrap();
                assert!(matches!(transacted, Transacted::Done(_)));
                // Another server, which knows nothing of merges.
                if n % 5 == 0 {
                    let (found, _) = store.get(key).await.unwrap();
                    let found = found.unwrap();
                    let expect = Expect::Revision(found.mod_revision);
                    let same = Op::Put(found.value);
                    let _ = store.write(key, expect, same, None).await.unwrap();
                }
            }
        });
    }
    tasks.join_all().await;
    let merged = value_of(&*store, key).await.unwrap();
    assert_eq!(merged.len(), WRITERS * WRITES);
}
