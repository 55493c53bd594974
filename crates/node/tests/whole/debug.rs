//! The endpoints of the node's server for people and tools.

use super::{World, get, is_ready, send};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_says_of_itself() {
    let world = World::new().await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let healthz = free.local_addr().unwrap();
    drop(free);
    let life = world.start_with(|config| {
        config.healthz_port = Some(healthz.port());
        config.max_pods = 17;
        config.reserved.memory = 64 << 20;
    });
    world
        .create("talker", json!({"containers": [{"name": "c", "image": "app:1"}]}))
        .await;
    world.until("talker", "ready", is_ready).await;
    let port = world.kubelet_port().await;
    let plain = async |path: &str| {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(healthz).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let answer = plain("/healthz").await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("\r\n\r\nok"),
        "{answer}"
    );
    // Nothing else is there without a key.
    assert!(plain("/pods").await.starts_with("HTTP/1.1 404 "));
    let admin = world
        .pki
        .client("admin", "somebody", Some("system:masters"))
        .unwrap();
    let (code, page) = get(&world, port, Some(&admin), "/configz").await;
    let config: Value = serde_json::from_str(&page).unwrap();
    assert_eq!((code, &config["kubeletconfig"]["maxPods"]), (200, &json!(17)));
    assert_eq!(config["kubeletconfig"]["port"], json!(port));
    let (code, page) = get(&world, port, Some(&admin), "/statusz").await;
    assert!(
        code == 200 && page.starts_with("\nkubelet statusz\n"),
        "{code} {page}"
    );
    let (code, page) = get(&world, port, Some(&admin), "/flagz").await;
    assert!(code == 200 && page.contains("\nmax-pods=17\n"), "{code} {page}");
    let (_, page) = get(&world, port, Some(&admin), "/stats/summary").await;
    let summary: Value = serde_json::from_str(&page).unwrap();
    assert!(summary["node"]["rlimit"]["maxpid"].as_i64() > Some(0), "{page}");
    assert!(summary["node"]["network"]["interfaces"].is_array(), "{page}");
    let post = async |path: &str| send(&world, port, Some(&admin), None, ("POST", path)).await;
    assert_eq!(
        post("/run/default/talker/c?cmd=say").await,
        (200, "said".to_owned())
    );
    assert_eq!(post("/run/default/nobody/c?cmd=say").await.0, 404);
    world.runtime.inner.lock().exec_exit_code = 3;
    let (code, page) = post("/run/default/talker/c?cmd=say").await;
    assert_eq!((code, page.as_str()), (500, "command 'say' exited with 3: said"));
    let (code, page) = post("/checkpoint/default/talker/c").await;
    let file = serde_json::from_str::<Value>(&page).unwrap()["items"][0].clone();
    assert_eq!(code, 200);
    let file = file.as_str().unwrap();
    assert!(
        file.contains("/checkpoints/checkpoint-talker_default-c-"),
        "{file}"
    );
    assert_eq!(std::fs::read_to_string(file).unwrap(), "state");
    assert_eq!(post("/checkpoint/default/talker/other").await.0, 404);
    life.end().await;
}
