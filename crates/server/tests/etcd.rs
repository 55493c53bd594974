//! API servers over etcd. Two over one: each sees at once what the other acknowledged, and all watchers see all events
//! in the same order. And what etcd refuses for its size.

#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/suite/cluster.rs"]
mod etcd;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use support::{Cluster, Frames};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Kind, name, value and version of all events until the one that ends the test.
async fn follow(mut frames: Frames) -> Vec<(String, String, Value, i64)> {
    let mut seen = Vec::new();
    loop {
        let event = frames.next().await.expect("the watch goes on");
        let object = &event["object"];
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if name == "the-end" {
            return seen;
        }
        if name == "kube-root-ca.crt" {
            continue;
        }
        let version = object["metadata"]["resourceVersion"].as_str().unwrap();
        seen.push((
            event["type"].as_str().unwrap().to_owned(),
            name,
            object["data"]["n"].clone(),
            version.parse().unwrap(),
        ));
    }
}

async fn write(cluster: &Cluster, name: &str, n: usize) -> i64 {
    let map = json!({"metadata": {"name": name}, "data": {"n": n.to_string()}});
    let reply = match n {
        0 => cluster.post(MAPS, map).await,
        _ => cluster.patch(&format!("{MAPS}/{name}"), "merge-patch", map).await,
    };
    assert!(reply.code < 300, "{}", reply.text);
    reply.json["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_see_the_same() {
    let members = etcd::Cluster::new(1, None);
    let one = Arc::new(Cluster::on(Arc::new(members.open().await)).await);
    let two = Arc::new(Cluster::on(Arc::new(members.open().await)).await);

    // What one acknowledged, the other's next read has, whichever way it reads.
    for n in 0..20 {
        let (writer, reader) = if n % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let version = write(writer, "turns", n).await;
        let got = reader.get(&format!("{MAPS}/turns")).await;
        assert_eq!(got.json["data"]["n"], n.to_string(), "{}", got.text);
        let listed = reader.get(MAPS).await.json;
        let listed_at: i64 = listed["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!(listed_at >= version, "{listed_at} {version}");
    }

    // Both write at once. Every watcher, on either server, sees the same history.
    let since = one.get(MAPS).await.json["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    let uri = format!("{MAPS}?watch=1&resourceVersion={since}");
    let watchers = [
        tokio::spawn(follow(one.watch(&uri).await)),
        tokio::spawn(follow(two.watch(&uri).await)),
    ];
    let mut writers = tokio::task::JoinSet::new();
    for (cluster, names) in [(&one, ["a", "b"]), (&two, ["c", "d"])] {
        for name in names {
            let cluster = cluster.clone();
            writers.spawn(async move {
                for n in 0..25 {
                    write(&cluster, name, n).await;
                }
            });
        }
    }
    writers.join_all().await;
    assert!(
        two.post(MAPS, json!({"metadata": {"name": "the-end"}}))
            .await
            .code
            < 300
    );
    let mut histories = Vec::new();
    for watcher in watchers {
        histories.push(watcher.await.unwrap());
    }
    assert_eq!(histories[0], histories[1]);
    let versions: Vec<i64> = histories[0].iter().map(|event| event.3).collect();
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
    let mut by_name: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for (_, name, n, _) in &histories[0] {
        by_name.entry(name).or_default().push(n);
    }
    let expected: Vec<Value> = (0..25).map(|n| json!(n.to_string())).collect();
    for name in ["a", "b", "c", "d"] {
        assert!(
            by_name[name].iter().copied().eq(expected.iter()),
            "{name}: {:?}",
            by_name[name]
        );
    }
    assert_eq!(
        one.get(MAPS).await.json["items"],
        two.get(MAPS).await.json["items"]
    );
}

/// etcd takes a request of 1.5 MiB. The record of who set 20,000 keys makes the difference here.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_too_large_goes_without_its_managed_fields() {
    let members = etcd::Cluster::new(1, None);
    let cluster = Cluster::on(Arc::new(members.open().await)).await;
    let keys = |count: usize| -> serde_json::Map<String, Value> {
        let long = "k".repeat(40);
        (0..count)
            .map(|n| (format!("{long}-{n:06}"), json!("v")))
            .collect()
    };
    let of = |count: usize| json!({"metadata": {"name": "large"}, "data": keys(count)});
    let made = cluster.post(MAPS, of(20_000)).await;
    assert_eq!(made.code, 201, "{:.300}", made.text);
    assert!(made.json["metadata"].get("managedFields").is_none());
    assert_eq!(
        made.json["data"].as_object().map(serde_json::Map::len),
        Some(20_000)
    );
    let one = format!("{MAPS}/large");
    let fewer = cluster.put(&one, of(100)).await;
    assert_eq!(fewer.code, 200, "{:.300}", fewer.text);
    let more = cluster.put(&one, of(20_001)).await;
    assert_eq!(more.code, 200, "{:.300}", more.text);
    assert!(more.json["metadata"].get("managedFields").is_none());
    // An apply is all about them.
    let mut config = of(20_000);
    config["apiVersion"] = json!("v1");
    config["kind"] = json!("ConfigMap");
    config["metadata"]["name"] = json!("applied");
    let uri = format!("{MAPS}/applied?fieldManager=m");
    let refused = cluster
        .send("PATCH", &uri, "application/apply-patch+yaml", config.to_string())
        .await;
    assert_eq!(refused.code, 500, "{:.300}", refused.text);
    let told = refused.json["message"].as_str().unwrap();
    assert!(told.contains("trying to send message larger than max"), "{told}");
}

/// An etcd that was emptied: the server starts over with what every cluster has, and all clients are told.
#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_etcd_is_a_new_start() {
    let mut members = etcd::Cluster::new(1, None);
    let cluster = Cluster::on(Arc::new(members.open().await)).await;
    for n in 0..300 {
        write(&cluster, &format!("m{n}"), 0).await;
    }
    let service =
        json!({"metadata": {"name": "s"}, "spec": {"clusterIP": "10.96.7.7", "ports": [{"port": 80}]}});
    let services = "/api/v1/namespaces/default/services";
    assert_eq!(cluster.post(services, service.clone()).await.code, 201);
    let version = cluster.get(MAPS).await.json["metadata"]["resourceVersion"].clone();
    let version: i64 = version.as_str().unwrap().parse().unwrap();
    let mut watch = cluster
        .watch(&format!("{MAPS}?watch=1&resourceVersion={version}"))
        .await;
    members.kill(0);
    std::fs::remove_dir_all(members.data(0)).unwrap();
    members.start(0);
    // The watch ends; whoever comes back with its version is sent to list again.
    let ended = tokio::time::timeout(Duration::from_secs(60), watch.next()).await;
    assert!(ended.expect("the watch ends").is_none());
    let wait = async {
        loop {
            let ready = cluster.get("/readyz").await.code == 200;
            let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/view";
            if ready && cluster.get(role).await.code == 200 && cluster.get(services).await.code == 200 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
    waited.expect("the server starts over");
    assert_eq!(cluster.get(&format!("{MAPS}/m1")).await.code, 404);
    let listed = cluster.get(MAPS).await.json;
    let now: i64 = listed["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!(now < version, "{now} {version}");
    let again = cluster
        .get(&format!("{MAPS}?watch=1&resourceVersion={version}"))
        .await;
    // As an event, as upstream's cache does.
    let told = (&again.json["type"], &again.json["object"]["reason"]);
    assert_eq!(told, (&json!("ERROR"), &json!("Expired")), "{}", again.text);
    // Namespaces are back, and what was allocated is free.
    let made = async {
        loop {
            let reply = cluster.post(services, service.clone()).await;
            if reply.code == 201 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let made = tokio::time::timeout(Duration::from_secs(60), made).await;
    made.expect("the address is free again");
    assert!(write(&cluster, "new", 0).await > now);
}
