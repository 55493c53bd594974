//! An API server over an encrypted store: clients see nothing of it, the store sees nothing of their Secrets, and what
//! an old key wrote is written again by any update.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::json;
use skiff_encryption::{Encrypted, Encryption, generate};
use skiff_store::{Embedded, Expect, Op, Store};
use support::Cluster;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";
const KEY: &str = "/registry/secrets/default/one";

async fn raw(store: &Arc<Embedded>, key: &str) -> Bytes {
    store.get(key).await.unwrap().0.unwrap().value
}

fn contains(value: &[u8], part: &[u8]) -> bool {
    value.windows(part.len()).any(|window| window == part)
}

async fn start(store: &Arc<Embedded>, config: &str) -> Cluster {
    let encryption = Encryption::new(config, "test").await.unwrap();
    Cluster::on(Arc::new(Encrypted::new(store.clone(), encryption))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_sees_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let everything = generate()
        .unwrap()
        .replace("[secrets]", "[secrets, gadgets.example.com]");
    let cluster = start(&store, &everything).await;
    let mut watch = cluster.watch(&format!("{SECRETS}?watch=1")).await;
    let secret = json!({"metadata": {"name": "one"}, "stringData": {"word": "swordfish"}});
    let made = cluster.post(SECRETS, secret).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let stored = raw(&store, KEY).await;
    assert!(stored.starts_with(b"k8s:enc:secretbox:v1:key1:"));
    assert!(!contains(&stored, b"swordfish"));
    let word = STANDARD.encode("swordfish");
    let event = watch.next().await.unwrap();
    assert_eq!(event["object"]["data"]["word"], word);
    assert_eq!(
        cluster.get(&format!("{SECRETS}/one")).await.json["data"]["word"],
        word
    );
    assert_eq!(cluster.get(SECRETS).await.json["items"][0]["data"]["word"], word);
    let patched = json!({"metadata": {"labels": {"a": "b"}}});
    let patched = cluster
        .patch(&format!("{SECRETS}/one"), "merge-patch", patched)
        .await;
    assert_eq!((patched.code, &patched.json["data"]["word"]), (200, &word.into()));
    assert_eq!(
        cluster.delete(&format!("{SECRETS}/one"), json!({})).await.code,
        200
    );
    let map = json!({"metadata": {"name": "m"}, "data": {"word": "swordfish"}});
    let maps = "/api/v1/namespaces/default/configmaps";
    assert_eq!(cluster.post(maps, map).await.code, 201);
    assert!(contains(
        &raw(&store, "/registry/configmaps/default/m").await,
        b"swordfish"
    ));

    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "gadgets.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "gadgets", "kind": "Gadget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "x-kubernetes-preserve-unknown-fields": true}}}]}});
    let made = cluster
        .post(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            definition,
        )
        .await;
    assert_eq!(made.code, 201, "{}", made.text);
    let gadgets = "/apis/example.com/v1/namespaces/default/gadgets";
    let gadget = json!({"apiVersion": "example.com/v1", "kind": "Gadget", "metadata": {"name": "g"}, "word": "swordfish"});
    for _ in 0..600 {
        if cluster.get(gadgets).await.code == 200 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let made = cluster.post(gadgets, gadget).await;
    assert_eq!(made.code, 201, "{}", made.text);
    let stored = raw(&store, "/registry/example.com/gadgets/default/g").await;
    assert!(skiff_encryption::is_encrypted(&stored) && !contains(&stored, b"swordfish"));
    assert_eq!(
        cluster.get(&format!("{gadgets}/g")).await.json["word"],
        "swordfish"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_changes_nothing_writes_again_what_is_stale() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let plain = Cluster::on(store.clone()).await;
    let secret = json!({"metadata": {"name": "one"}, "stringData": {"word": "swordfish"}});
    assert_eq!(plain.post(SECRETS, secret).await.code, 201);
    assert!(contains(&raw(&store, KEY).await, b"swordfish"));
    drop(plain);
    let cluster = start(&store, &generate().unwrap()).await;
    let one = format!("{SECRETS}/one");
    let before = cluster.get(&one).await.json;
    // A dry run writes nothing.
    assert_eq!(
        cluster
            .put(&format!("{one}?dryRun=All"), before.clone())
            .await
            .code,
        200
    );
    assert!(contains(&raw(&store, KEY).await, b"swordfish"));
    let after = cluster.put(&one, before.clone()).await;
    assert_eq!(after.code, 200, "{}", after.text);
    assert!(raw(&store, KEY).await.starts_with(b"k8s:enc:secretbox:"));
    assert_ne!(
        after.json["metadata"]["resourceVersion"],
        before["metadata"]["resourceVersion"]
    );
    assert_eq!(after.json["data"], before["data"]);
    let again = cluster.put(&one, after.json.clone()).await.json;
    assert_eq!(
        again["metadata"]["resourceVersion"],
        after.json["metadata"]["resourceVersion"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_upstream_encrypted_is_served() {
    let vectors = include_str!("../../encryption/tests/data/upstream.txt");
    let mut lines = vectors.lines().skip_while(|line| !line.starts_with("aesgcm"));
    let (provider, options) = lines.next().unwrap().split_once(' ').unwrap();
    let stored = STANDARD.decode(lines.next().unwrap()).unwrap();
    let config = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets]\n  providers:\n  - {provider}: {options}\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    store
        .write(KEY, Expect::Absent, Op::Put(stored.into()), None)
        .await
        .unwrap();
    let cluster = start(&store, &config).await;
    let read = cluster.get(&format!("{SECRETS}/one")).await;
    assert_eq!(
        read.json["data"]["answer"],
        STANDARD.encode("42"),
        "{}",
        read.text
    );
}

struct Unwell;

#[async_trait::async_trait]
impl skiff_server::HealthCheck for Unwell {
    async fn check(&self) -> Result<(), String> {
        Err("kms-provider-0: it is away".to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_tells_of_kms_plugins() {
    let cluster = Cluster::adjusted(|config, _, _| config.kms_health = Some(Arc::new(Unwell))).await;
    for path in ["/healthz", "/livez", "/readyz"] {
        let all = cluster.get(path).await;
        assert_eq!(all.code, 500);
        assert!(
            all.text.contains("[-]kms-providers failed: reason withheld\n"),
            "{}",
            all.text
        );
        let one = cluster.get(&format!("{path}/kms-providers")).await;
        assert_eq!(
            (one.code, one.text.as_str()),
            (500, "internal server error: kms-provider-0: it is away\n")
        );
        assert_eq!(
            cluster.get(&format!("{path}?exclude=kms-providers")).await.code,
            200
        );
    }
    let without = Cluster::start().await;
    assert_eq!(without.get("/healthz/kms-providers").await.code, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_whose_key_is_missing_is_an_error_and_not_gone() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path().join("store")).unwrap());
    let file = folder.path().join("config.yaml");
    let right = generate().unwrap();
    let first = start(&store, &right).await;
    let secret = json!({"metadata": {"name": "one"}, "stringData": {"word": "swordfish"}});
    assert_eq!(first.post(SECRETS, secret).await.code, 201);
    drop(first);
    std::fs::write(&file, generate().unwrap()).unwrap();
    let encryption = Encryption::load(&file).await.unwrap();
    let cluster = Cluster::on(Arc::new(Encrypted::new(store.clone(), encryption.clone()))).await;
    let one = format!("{SECRETS}/one");
    let read = cluster.get(&one).await;
    assert_eq!(read.code, 500, "{}", read.text);
    assert_eq!(cluster.get(SECRETS).await.code, 500);
    let replaced = json!({"metadata": {"name": "one"}, "stringData": {"word": "other"}});
    assert_eq!(cluster.put(&one, replaced).await.code, 500);
    assert!(
        skiff_encryption::is_encrypted(&raw(&store, KEY).await),
        "it is still there"
    );
    // The right key comes back.
    std::fs::write(&file, right).unwrap();
    encryption.reload(&file).await.unwrap();
    cluster.server.read_again(&["/registry/secrets/".to_owned()]);
    let read = cluster.get(&one).await;
    assert_eq!(
        read.json["data"]["word"],
        STANDARD.encode("swordfish"),
        "{}",
        read.text
    );
}
