//! kube-rs against the cluster of KUBECONFIG: it ends with a panic that names what was wrong.

use std::collections::BTreeMap;

use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Error, ResourceExt};
use serde_json::json;

fn config_map(name: &str, labels: &[(&str, &str)]) -> ConfigMap {
    let labels: BTreeMap<String, String> = labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.into()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        data: Some([("a".to_string(), "1".to_string())].into()),
        ..ConfigMap::default()
    }
}

/// The reason of a refusal.
fn reason<T: std::fmt::Debug>(result: kube::Result<T>) -> String {
    match result {
        Err(Error::Api(status)) => status.reason.clone(),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::try_default().await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = Namespace {
        metadata: ObjectMeta {
            generate_name: Some("rust-".into()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    let namespace = namespaces.create(&PostParams::default(), &namespace).await?.name_any();
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let outcome = async {
        crud(&maps).await?;
        lists(&maps).await?;
        watches(&maps).await?;
        apply(&maps).await
    }
    .await;
    namespaces.delete(&namespace, &DeleteParams::default()).await?;
    outcome
}

async fn crud(maps: &Api<ConfigMap>) -> Result<()> {
    let made = maps.create(&PostParams::default(), &config_map("one", &[])).await?;
    assert!(made.uid().is_some());
    assert_eq!(reason(maps.create(&PostParams::default(), &config_map("one", &[])).await), "AlreadyExists");
    assert_eq!(reason(maps.create(&PostParams::default(), &config_map("No_Name", &[])).await), "Invalid");
    let mut newer = made.clone();
    newer.data.get_or_insert_default().insert("a".into(), "2".into());
    let newer = maps.replace("one", &PostParams::default(), &newer).await?;
    assert_eq!(newer.data.as_ref().unwrap()["a"], "2");
    assert_eq!(reason(maps.replace("one", &PostParams::default(), &made).await), "Conflict");
    let merged = maps
        .patch("one", &PatchParams::default(), &Patch::Merge(json!({"data": {"b": "1"}})))
        .await?;
    assert_eq!(merged.data.unwrap().len(), 2);
    maps.delete("one", &DeleteParams::default()).await?;
    assert_eq!(maps.get_opt("one").await?.map(|map| map.name_any()), None);
    println!("create, read, replace, patch, delete");
    Ok(())
}

async fn lists(maps: &Api<ConfigMap>) -> Result<()> {
    for i in 0..5 {
        let even = if i % 2 == 0 { "true" } else { "false" };
        maps.create(&PostParams::default(), &config_map(&format!("m{i}"), &[("even", even)])).await?;
    }
    assert_eq!(maps.list(&ListParams::default().labels("even=true")).await?.items.len(), 3);
    let mut options = ListParams::default().labels("even").limit(2);
    let mut names = Vec::new();
    loop {
        let page = maps.list(&options).await?;
        names.extend(page.items.iter().map(ResourceExt::name_any));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => options = options.continue_token(&token),
            None => break,
        }
    }
    assert_eq!(names, ["m0", "m1", "m2", "m3", "m4"]);
    println!("lists by selector and by page");
    Ok(())
}

async fn watches(maps: &Api<ConfigMap>) -> Result<()> {
    let version = maps.list(&ListParams::default()).await?.metadata.resource_version.unwrap_or_default();
    let options = WatchParams::default().labels("w=1");
    let mut events = maps.watch(&options, &version).await?.boxed();
    maps.create(&PostParams::default(), &config_map("w", &[("w", "1")])).await?;
    maps.delete("w", &DeleteParams::default()).await?;
    let mut seen = Vec::new();
    while let Some(event) = events.try_next().await? {
        match event {
            WatchEvent::Added(_) => seen.push("added"),
            WatchEvent::Deleted(_) => {
                seen.push("deleted");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, ["added", "deleted"]);

    // Once by list and watch, once by streaming list.
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut objects = watcher(maps.clone(), config.labels("even=true")).applied_objects().boxed();
        let mut names = Vec::new();
        while names.len() < 3 {
            names.extend(objects.try_next().await?.map(|map| map.name_any()));
        }
        names.sort();
        assert_eq!(names, ["m0", "m2", "m4"]);
    }
    println!("watch, and a watcher by list and by stream");
    Ok(())
}

async fn apply(maps: &Api<ConfigMap>) -> Result<()> {
    let body = |data: serde_json::Value| {
        Patch::Apply(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ssa"}, "data": data}))
    };
    maps.patch("ssa", &PatchParams::apply("one"), &body(json!({"a": "1"}))).await?;
    let both = maps.patch("ssa", &PatchParams::apply("two"), &body(json!({"c": "1"}))).await?;
    assert_eq!(both.data.map(|data| data.len()), Some(2));
    let taking = body(json!({"a": "2"}));
    assert_eq!(reason(maps.patch("ssa", &PatchParams::apply("two"), &taking).await), "Conflict");
    let taken = maps.patch("ssa", &PatchParams::apply("two").force(), &taking).await?;
    assert_eq!(taken.data, Some([("a".to_string(), "2".to_string())].into()));
    println!("server-side apply");
    Ok(())
}
