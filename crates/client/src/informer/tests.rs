//! Informers against a scripted server.

use super::*;
use crate::fake::{self, Reply};
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};
use tokio::sync::mpsc::{self, UnboundedSender};

fn config_map(name: &str, version: &str, label: &str) -> Value {
    json!({"metadata": {"namespace": "default", "name": name, "resourceVersion": version,
        "labels": {"app": label}, "managedFields": [{"manager": "m"}]}})
}

fn event(kind: &str, object: Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

fn by_app(object: &ConfigMap) -> Vec<String> {
    object
        .metadata
        .labels
        .iter()
        .flatten()
        .filter(|(k, _)| *k == "app")
        .map(|(_, v)| v.clone())
        .collect()
}

fn names(objects: Vec<Arc<ConfigMap>>) -> Vec<String> {
    objects
        .iter()
        .map(|object| object.metadata.name.clone().unwrap_or_default())
        .collect()
}

/// Collects changes as `+name@version` and `-name`.
fn record(informer: &Informer<ConfigMap>) -> mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = mpsc::unbounded_channel();
    informer.subscribe(move |change| {
        let meta = &change.object().metadata;
        let name = meta.name.clone().unwrap_or_default();
        let _ = sender.send(match change {
            Change::Applied { .. } => {
                format!("+{name}@{}", meta.resource_version.clone().unwrap_or_default())
            }
            Change::Deleted { .. } => format!("-{name}"),
        });
    });
    receiver
}

#[tokio::test(start_paused = true)]
async fn lists_in_pages_then_follows_the_watch_and_survives_its_ends() {
    let feeds: Arc<Mutex<Vec<UnboundedSender<String>>>> = Arc::default();
    let (started, mut watches) = mpsc::unbounded_channel();
    let lists = Arc::new(Mutex::new(vec![
        // The list after the 410, then the second and first page of the first one.
        json!({"metadata": {"resourceVersion": "50"}, "items": [config_map("a", "3", "x"), config_map("d", "40", "x"),
            {"metadata": {"namespace": "default", "name": "f", "resourceVersion": "45"}, "data": 5}]}),
        json!({"metadata": {"resourceVersion": "9"}, "items": [config_map("b", "4", "y"), {"metadata": {"name": 7}}]}),
        json!({"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [config_map("a", "3", "x")]}),
    ]));
    let kept = feeds.clone();
    let (client, seen) = fake::client(move |request| {
        if !request.query.contains("watch=true") {
            return match lists.lock().pop() {
                Some(list) => Reply::Json(200, list),
                None => fake::status(500, "InternalError"),
            };
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        kept.lock().push(sender);
        let _ = started.send(request.query.clone());
        Reply::Stream(receiver)
    });
    let shutdown = CancellationToken::new();
    let factory = InformerFactory::new(client, shutdown.clone());
    let informer = factory.informer::<ConfigMap>();
    informer.add_index("app", by_app);
    informer.synced().await;
    assert_eq!(names(informer.list()), vec!["a", "b"]);
    assert_eq!(names(informer.by_index("app", "y")), vec!["b"]);
    assert!(
        informer
            .get("default", "a")
            .unwrap()
            .metadata
            .managed_fields
            .is_none()
    );
    let mut changes = record(&informer);
    assert_eq!(changes.recv().await.unwrap(), "+a@3");
    assert_eq!(changes.recv().await.unwrap(), "+b@4");

    assert!(watches.recv().await.unwrap().contains("resourceVersion=9"));
    let send = |line: String| feeds.lock().last().unwrap().send(line).unwrap();
    send(event("MODIFIED", config_map("b", "12", "x")));
    assert_eq!(changes.recv().await.unwrap(), "+b@12");
    assert_eq!(names(informer.by_index("app", "x")), vec!["a", "b"]);
    assert!(informer.by_index("app", "y").is_empty());
    // An object that cannot be decoded is skipped, but its version counts.
    send(event(
        "ADDED",
        json!({"metadata": {"name": "c", "resourceVersion": "13"}, "data": 5}),
    ));
    send(event("DELETED", config_map("b", "14", "x")));
    assert_eq!(changes.recv().await.unwrap(), "-b");
    // Nor does one that cannot be read any more stay for ever.
    send(event("ADDED", config_map("e", "15", "x")));
    assert_eq!(changes.recv().await.unwrap(), "+e@15");
    let mut unreadable = config_map("e", "16", "x");
    unreadable["data"] = json!(5);
    send(event("DELETED", unreadable));
    assert_eq!(changes.recv().await.unwrap(), "-e");
    send(event("ADDED", config_map("f", "17", "x")));
    assert_eq!(changes.recv().await.unwrap(), "+f@17");
    send(event("BOOKMARK", json!({"metadata": {"resourceVersion": "20"}})));
    // The stream ends: it is resumed from the bookmark.
    feeds.lock().clear();
    assert!(watches.recv().await.unwrap().contains("resourceVersion=20"));
    // The version is too old: a new list shows what was missed.
    send(event(
        "ERROR",
        json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}),
    ));
    assert_eq!(changes.recv().await.unwrap(), "+d@40");
    assert!(watches.recv().await.unwrap().contains("resourceVersion=50"));
    assert!(
        changes.try_recv().is_err(),
        "an unchanged object is no change, one that cannot be decoded is not gone"
    );
    assert_eq!(names(informer.list()), vec!["a", "d", "f"]);

    let queries: Vec<String> = seen
        .lock()
        .iter()
        .filter(|r| !r.query.contains("watch"))
        .map(|r| r.query.clone())
        .collect();
    assert!(queries[0].contains("resourceVersion=0"), "{queries:?}");
    assert!(
        queries[1].contains("continue=more") && !queries[1].contains("resourceVersion"),
        "{queries:?}"
    );
    assert!(!queries[2].contains("resourceVersion"), "{queries:?}");
    shutdown.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_refused_list_is_tried_again_and_informers_are_shared() {
    let refused = Arc::new(Mutex::new(3));
    let (client, seen) = fake::client(move |request| {
        if request.query.contains("watch=true") {
            // Held open for good.
            let (sender, receiver) = mpsc::unbounded_channel();
            std::mem::forget(sender);
            return Reply::Stream(receiver);
        }
        let mut refused = refused.lock();
        if *refused > 0 {
            *refused -= 1;
            return fake::status(403, "Forbidden");
        }
        Reply::Json(
            200,
            json!({"metadata": {"resourceVersion": "5"}, "items": [config_map("a", "3", "x")]}),
        )
    });
    let factory = InformerFactory::new(client, CancellationToken::new());
    let first = factory.informer::<ConfigMap>();
    let second = factory.informer::<ConfigMap>();
    second.synced().await;
    assert_eq!(first.len(), 1);
    assert_eq!(
        seen.lock().iter().filter(|r| !r.query.contains("watch")).count(),
        4
    );
    let filtered = factory.filtered::<ConfigMap>(Some("app=x"), Some("metadata.name=a"));
    filtered.synced().await;
    let query = seen
        .lock()
        .iter()
        .rfind(|r| !r.query.contains("watch"))
        .unwrap()
        .query
        .clone();
    assert!(
        query.contains("labelSelector=app%3Dx") && query.contains("fieldSelector=metadata.name%3Da"),
        "{query}"
    );
    assert_eq!(
        names(factory.namespaced::<ConfigMap>("default", None).list()).len(),
        0
    );
}

#[tokio::test(start_paused = true)]
async fn two_lives_under_one_name_are_told_apart_and_a_storm_of_410_is_slowed_down() {
    let lists = Arc::new(Mutex::new(0));
    let counted = lists.clone();
    let (client, seen) = fake::client(move |request| {
        if request.query.contains("watch=true") {
            return fake::status(410, "Expired");
        }
        let mut count = counted.lock();
        *count += 1;
        let (uid, version) = if *count == 1 {
            ("first", "3")
        } else {
            ("second", "7")
        };
        let mut object = config_map("a", version, "x");
        object["metadata"]["uid"] = json!(uid);
        Reply::Json(
            200,
            json!({"metadata": {"resourceVersion": "9"}, "items": [object]}),
        )
    });
    let shutdown = CancellationToken::new();
    let factory = InformerFactory::new(client, shutdown.clone());
    let mut changes = record(&factory.informer::<ConfigMap>());
    for expected in ["+a@3", "-a", "+a@7"] {
        assert_eq!(changes.recv().await.unwrap(), expected);
    }
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    shutdown.cancel();
    let asked = seen.lock().len();
    assert!(asked < 40, "{asked} requests in a minute");
}

/// A server with one list, and a watch that the returned sender feeds.
fn scripted(list: Value) -> (Client, UnboundedSender<String>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let receiver = Mutex::new(Some(receiver));
    let (client, _) = fake::client(move |request| {
        if !request.query.contains("watch=true") {
            return Reply::Json(200, list.clone());
        }
        match receiver.lock().take() {
            Some(receiver) => Reply::Stream(receiver),
            None => fake::status(500, "InternalError"),
        }
    });
    (client, sender)
}

#[tokio::test(start_paused = true)]
async fn of_many_objects_few_are_kept_decoded_and_all_are_found() {
    let object = |nth: usize, version: usize| {
        let label = if nth.is_multiple_of(2) { "even" } else { "odd" };
        config_map(&format!("{nth:04}"), &version.to_string(), label)
    };
    let many = DECODED * 2;
    let items: Vec<Value> = (0..many).map(|nth| object(nth, nth + 1)).collect();
    let (client, feed) = scripted(json!({"metadata": {"resourceVersion": many.to_string()}, "items": items}));
    let informer = InformerFactory::new(client, CancellationToken::new()).informer::<ConfigMap>();
    informer.synced().await;
    informer.add_index("app", by_app);
    let mut changes = record(&informer);
    for nth in 0..many {
        assert_eq!(changes.recv().await.unwrap(), format!("+{nth:04}@{}", nth + 1));
    }
    let decoded = || {
        let kept = informer.shared.store.read().list();
        kept.iter()
            .filter(|kept| matches!(kept, Kept::Decoded(_)))
            .count()
    };
    assert!(decoded() <= DECODED * 2 && informer.len() == many);
    // Every object changes once: what the list brought gives way to what is shared.
    for nth in 0..many {
        feed.send(event("MODIFIED", object(nth, many + nth))).unwrap();
    }
    for nth in 0..many {
        assert_eq!(changes.recv().await.unwrap(), format!("+{nth:04}@{}", many + nth));
    }
    assert_eq!(decoded(), DECODED);
    assert_eq!(informer.by_index("app", "odd").len(), many / 2);
    assert_eq!(informer.index_values("app").len(), 2);
    let labelled = informer.list_labelled("default", |labels| {
        labels
            .and_then(|labels| labels.get("app"))
            .is_some_and(|app| app == "even")
    });
    assert_eq!(labelled.len(), many / 2);
    assert!(informer.list_labelled("other", |_| true).is_empty());
    let cold = informer.get("default", "0000").unwrap();
    assert_eq!(cold.metadata.resource_version, Some(many.to_string()));
    assert!(cold.metadata.managed_fields.is_none());
    assert_eq!(informer.list().len(), many);
}

#[tokio::test(start_paused = true)]
async fn of_metadata_only_the_identity_is_kept() {
    let object = |version: &str| {
        json!({"metadata": {"namespace": "ns", "name": "a", "uid": "u", "resourceVersion": version,
            "finalizers": ["f"], "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "o", "uid": "o"}]}})
    };
    let (client, feed) = scripted(json!({"metadata": {"resourceVersion": "5"}, "items": [object("3")]}));
    let factory = InformerFactory::new(client, CancellationToken::new());
    let resource = ApiResource::erase::<ConfigMap>(&());
    let (sender, mut changes) = mpsc::unbounded_channel();
    let informer = factory.metadata(&resource, CancellationToken::new(), move |change| {
        let brief = |object: &PartialObject| {
            let meta = &object.metadata;
            let owners = meta.owner_references.as_ref().map_or(0, Vec::len);
            let version = meta.resource_version.clone().unwrap_or_default();
            format!("{}@{version} {owners}", meta.uid.clone().unwrap_or_default())
        };
        let _ = sender.send(match change {
            Change::Applied { old, new } => (old.as_deref().map(brief), brief(new)),
            Change::Deleted { last } => (None, brief(last)),
        });
    });
    assert_eq!(changes.recv().await.unwrap(), (None, "u@3 1".to_owned()));
    feed.send(event("MODIFIED", object("7"))).unwrap();
    let both = (Some("u@3 0".to_owned()), "u@7 1".to_owned());
    assert_eq!(changes.recv().await.unwrap(), both);
    feed.send(event("DELETED", object("8"))).unwrap();
    assert_eq!(changes.recv().await.unwrap(), (None, "u@8 1".to_owned()));
    assert!(informer.is_empty());
}

#[test]
fn what_was_before_is_decoded_once_and_only_if_it_is_looked_at() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static DECODED: AtomicUsize = AtomicUsize::new(0);
    let form = Form::<ConfigMap> {
        decode: |raw| {
            DECODED.fetch_add(1, Ordering::SeqCst);
            serde_json::from_slice(raw)
        },
        transform: without_managed_fields,
        identity_only: false,
        is_part: false,
    };
    let shared = Arc::new(Shared {
        handlers: Mutex::default(),
        store: RwLock::new(Store::new(0)),
        synced: watch::Sender::new(false),
        progress: watch::Sender::new(0),
        complete: None,
        form,
        decodes: None,
    });
    let informer = Informer {
        shared: shared.clone(),
        scope: CancellationToken::new(),
    };
    let seen: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
    let apply = |version: &str, uid: &str| {
        let object =
            json!({"metadata": {"namespace": "d", "name": "a", "uid": uid, "resourceVersion": version}});
        let raw = Bytes::from(object.to_string());
        let new = shared.decode(&raw).unwrap();
        let before = DECODED.load(Ordering::SeqCst);
        shared.apply(new, raw);
        DECODED.load(Ordering::SeqCst) - before
    };
    assert_eq!(apply("1", "u"), 0);
    assert_eq!(apply("2", "u"), 0, "nobody looks");
    for _ in 0..2 {
        let seen = seen.clone();
        informer.subscribe(move |change| {
            if let Change::Applied { old, .. } = change {
                let version = old
                    .as_deref()
                    .and_then(|old| old.metadata.resource_version.clone());
                seen.lock().push(version);
            }
        });
    }
    seen.lock().clear();
    assert_eq!(apply("3", "u"), 1, "once for both");
    assert_eq!(*seen.lock(), [Some("2".to_owned()), Some("2".to_owned())]);
    // Another object of the same name is no change of the first.
    seen.lock().clear();
    apply("4", "v");
    assert_eq!(*seen.lock(), [None, None]);
}

#[tokio::test(start_paused = true)]
async fn a_part_is_made_once_and_kept_fresh() {
    let (feed, stream) = mpsc::unbounded_channel();
    let stream = Mutex::new(Some(stream));
    let count = 4 * DECODED;
    let items: Vec<Value> = (0..count)
        .map(|n| {
            config_map(
                &format!("m{n}"),
                &(n + 1).to_string(),
                if n % 2 == 0 { "even" } else { "odd" },
            )
        })
        .collect();
    let (client, _) = fake::client(move |request| {
        if request.query.contains("watch=true") {
            return match stream.lock().take() {
                Some(stream) => Reply::Stream(stream),
                None => fake::status(500, "InternalError"),
            };
        }
        Reply::Json(
            200,
            json!({"metadata": {"resourceVersion": "5000"}, "items": items}),
        )
    });
    let metrics = Arc::new(ComponentMetrics::default());
    let factory = InformerFactory::new(client, CancellationToken::new()).measured(metrics.clone());
    let informer = factory.informer::<ConfigMap>();
    informer.synced().await;
    let decodes = || {
        let text = metrics.registry.text();
        let mut lines = text.lines();
        let line = lines
            .find_map(|line| line.strip_prefix("skiff_informer_decodes_total{resource=\"configmaps\"} "));
        line.unwrap().parse::<usize>().unwrap()
    };
    let parts: Parts<ConfigMap, String> = informer.parts(|map| {
        format!(
            "{}@{}",
            map.metadata.name.as_deref().unwrap(),
            map.metadata.resource_version.as_deref().unwrap()
        )
    });
    assert_eq!(parts.len(), 0, "nothing is made before it is asked for");
    let even =
        |labels: Option<&BTreeMap<String, String>>| labels.is_some_and(|labels| labels["app"] == "even");
    let before = decodes();
    assert_eq!(parts.list_labelled("default", even).len(), count / 2);
    let first = decodes() - before;
    assert!(first > 0 && first <= count / 2, "{first}");
    let before = decodes();
    assert_eq!(parts.list_labelled("default", even).len(), count / 2);
    assert_eq!(decodes(), before, "the second look decodes nothing");
    assert_eq!(*parts.get("default", "m0").unwrap(), "m0@1");
    // A change is decoded once, by its event.
    let mut changes = record(&informer);
    while changes.try_recv().is_ok() {}
    let before = decodes();
    feed.send(event("MODIFIED", config_map("m0", "5001", "even")))
        .unwrap();
    assert_eq!(changes.recv().await.unwrap(), "+m0@5001");
    assert_eq!(*parts.get("default", "m0").unwrap(), "m0@5001");
    assert_eq!(parts.list_labelled("default", even).len(), count / 2);
    assert_eq!(decodes(), before + 1);
    feed.send(event("DELETED", config_map("m0", "5002", "even")))
        .unwrap();
    assert_eq!(changes.recv().await.unwrap(), "-m0");
    assert_eq!(parts.get("default", "m0"), None);
    assert_eq!(parts.len(), count / 2 - 1);
}
