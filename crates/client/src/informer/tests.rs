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
        json!({"metadata": {"resourceVersion": "50"}, "items": [config_map("a", "3", "x"), config_map("d", "40", "x")]}),
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
    assert!(changes.try_recv().is_err(), "an unchanged object is no change");

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
