//! Pods of manifests: they run before there is an API, are mirrored in it, and follow their files.

use super::ends::eventually;
use super::{NODE, World, is_ready};
use kube::api::DeleteParams;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::Ordering;

fn manifest(image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - {{name: c, image: '{image}'}}\n"
    )
}

fn annotation<'a>(pod: &'a Value, name: &str) -> &'a str {
    pod["metadata"]["annotations"][format!("kubernetes.io/config.{name}")]
        .as_str()
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_pods_run_without_the_api_and_are_mirrored() {
    let world = World::new().await;
    let folder = world.dir.path().join("manifests");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("web.yaml"), manifest("app:1")).unwrap();
    std::fs::write(folder.join("bad.yaml"), "kind: [").unwrap();
    let start = || world.start_with(|config| config.static_pods.path = Some(folder.clone()));

    world.api_reachable.store(false, Ordering::SeqCst);
    let life = start();
    eventually("the static pod runs", || world.runtime.running().len() == 1).await;
    let first = world.runtime.running();

    // The API comes, the node registers, and the pod is shown.
    world.api_reachable.store(true, Ordering::SeqCst);
    let mirror = world.until("web-node-a", "mirrored and ready", is_ready).await;
    let uid = mirror["metadata"]["uid"].clone();
    let hash = annotation(&mirror, "hash").to_owned();
    assert_eq!(hash.len(), 32);
    assert_eq!(annotation(&mirror, "mirror"), hash);
    assert_eq!(annotation(&mirror, "source"), "file");
    assert!(annotation(&mirror, "seen").contains('T'), "{mirror}");
    assert_ne!(uid, json!(hash));
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["name"], NODE);
    assert_eq!(mirror["status"]["hostIP"], "192.0.2.7");

    // Whoever deletes the mirror deletes an image.
    world
        .pods()
        .delete("web-node-a", &DeleteParams::default())
        .await
        .unwrap();
    let another = |pod: &Value| pod["metadata"]["uid"] != uid && is_ready(pod);
    world.until("web-node-a", "mirrored again", another).await;
    assert_eq!(world.runtime.running(), first);

    // Another life finds what runs, also if the API is away.
    life.end().await;
    world.api_reachable.store(false, Ordering::SeqCst);
    let life = start();
    world.api_reachable.store(true, Ordering::SeqCst);
    let usual = json!({"containers": [{"name": "c", "image": "app:1"}]});
    world.create("usual", usual).await;
    world.until("usual", "ready", is_ready).await;
    assert!(world.runtime.running().contains(&first[0]));

    // Another manifest is another pod, after the end of the first.
    std::fs::write(folder.join("web.yaml"), manifest("app:2")).unwrap();
    let replaced = |pod: &Value| annotation(pod, "mirror") != hash && is_ready(pod);
    let mirror = world.until("web-node-a", "replaced", replaced).await;
    assert_eq!(mirror["spec"]["containers"][0]["image"], "app:2");
    assert!(!world.runtime.running().contains(&first[0]));

    std::fs::remove_file(folder.join("web.yaml")).unwrap();
    world.until_gone("web-node-a").await;
    eventually("the static pod has ended", || world.runtime.running().len() == 1).await;
    life.end().await;
    assert!(Path::exists(&folder.join("bad.yaml")));
}

/// A mirror of a static pod that went while no kubelet ran is removed, and so is one that somebody made up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirrors_without_a_pod_are_removed() {
    let world = World::new().await;
    let made_up = json!({"metadata": {"name": "made-up", "annotations": {"kubernetes.io/config.mirror": "x"}},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "app:1"}]}});
    let made_up = serde_json::from_value(made_up).unwrap();
    world.pods().create(&Default::default(), &made_up).await.unwrap();
    let life = world.start();
    world.until_gone("made-up").await;
    assert!(world.runtime.running().is_empty());
    life.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_pods_of_a_url() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/pods", listener.local_addr().unwrap());
    let pod = json!({"metadata": {"name": "far"}, "spec": {"containers": [{"name": "c", "image": "app:1"}]}});
    let list = json!({"apiVersion": "v1", "kind": "PodList", "items": [pod]}).to_string();
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap();
            let request = String::from_utf8_lossy(&request[..read]).to_lowercase();
            let answer = match request.contains("metadata-flavor: google") {
                true => format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{list}", list.len()),
                false => "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n".to_owned(),
            };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let life = world.start_with(|config| {
        config.static_pods.url = Some(url);
        let headers = &mut config.static_pods.url_headers;
        headers.insert("metadata-flavor", "Google".parse().unwrap());
    });
    let mirror = world.until("far-node-a", "mirrored and ready", is_ready).await;
    assert_eq!(annotation(&mirror, "source"), "http");
    life.end().await;
    server.abort();
}
