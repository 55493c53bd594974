//! A rough measure of store and cache together, to be read beside a run before a change:
//! `cargo run --release -p skiff-cache --example bench`.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;
use skiff_cache::{Cache, Config, Field, ListOptions, ReadAt, WatchOptions};
use skiff_meta::selector::FieldSelector;
use skiff_store::{Embedded, Expect, Op, Store};

const PODS: usize = 10_000;
const CLIENTS: usize = 16;
const NODES: usize = 100;

fn pod(n: usize, round: usize) -> (String, Op) {
    let object = json!({
        "metadata": {"namespace": "ns", "name": format!("pod-{n}"), "labels": {"app": "web", "round": round.to_string()}},
        "spec": {"nodeName": format!("node-{}", n % NODES)},
        "status": {"phase": "Running", "padding": "x".repeat(1800)},
    });
    (
        format!("/registry/pods/ns/pod-{n}"),
        Op::Put(Bytes::from(object.to_string())),
    )
}

async fn write_all(store: &Arc<dyn Store>, round: usize) -> Duration {
    let start = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let store = store.clone();
        clients.spawn(async move {
            for n in (client..PODS).step_by(CLIENTS) {
                let (key, op) = pod(n, round);
                store.write(&key, Expect::Any, op, None).await.unwrap();
            }
        });
    }
    clients.join_all().await;
    start.elapsed()
}

#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path()).unwrap());
    let fields = [Field::new("spec.nodeName").indexed(), Field::new("status.phase")];
    let cache = Cache::start(
        store.clone(),
        Config::new("/registry/pods/", "v1", "Pod").fields(fields),
    );
    cache.ready().await;

    let took = write_all(&store, 0).await;
    println!(
        "{PODS} durable creates, {CLIENTS} clients: {:.0}/s",
        PODS as f64 / took.as_secs_f64()
    );

    let start = Instant::now();
    let list = cache.list(ListOptions::default()).await.unwrap();
    println!("list of {}: {:?}", list.items.len(), start.elapsed());
    let bytes: usize = list.items.iter().map(|entry| entry.bytes.len()).sum();
    println!("  {} MiB of JSON", bytes >> 20);
    let fields = FieldSelector::parse("spec.nodeName=node-7").unwrap();
    let start = Instant::now();
    let list = cache
        .list(ListOptions {
            fields: fields.clone(),
            ..Default::default()
        })
        .await
        .unwrap();
    println!("list of one node's {}: {:?}", list.items.len(), start.elapsed());
    let start = Instant::now();
    for _ in 0..1000 {
        cache
            .get("/registry/pods/ns/pod-1", ReadAt::Latest)
            .await
            .unwrap()
            .unwrap();
    }
    println!("consistent get: {:?}", start.elapsed() / 1000);

    for (what, count, selected) in [("nobody", 0, false), ("1,000 watchers of one node", 1000, true)] {
        let mut watchers = tokio::task::JoinSet::new();
        for n in 0..count {
            let text = if selected {
                format!("spec.nodeName=node-{}", n % NODES)
            } else {
                String::new()
            };
            let fields = FieldSelector::parse(&text).unwrap();
            let mut watcher = cache
                .watch(WatchOptions {
                    fields,
                    ..Default::default()
                })
                .await
                .unwrap();
            watchers.spawn(async move { while watcher.next().await.is_some() {} });
        }
        let took = write_all(&store, 1).await;
        println!(
            "durable updates with {what}: {:.0}/s",
            PODS as f64 / took.as_secs_f64()
        );
    }

    // One event at a thousand watchers of everything: how long until the last one has it.
    let (seen, mut sightings) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..1000 {
        let mut watcher = cache.watch(WatchOptions::default()).await.unwrap();
        let seen = seen.clone();
        tokio::spawn(async move {
            while let Some(event) = watcher.next().await {
                std::hint::black_box(event.json());
                let _ = seen.send(Instant::now());
            }
        });
    }
    let mut worst = Vec::new();
    for round in 0..50 {
        let (key, op) = pod(1, round);
        store.write(&key, Expect::Any, op, None).await.unwrap();
        let written = Instant::now();
        let mut last = written;
        for _ in 0..1000 {
            last = last.max(sightings.recv().await.unwrap());
        }
        worst.push(last - written);
    }
    worst.sort();
    println!(
        "an event at all of 1,000 watchers after its write: median {:?}, worst {:?}",
        worst[25], worst[49]
    );
}
