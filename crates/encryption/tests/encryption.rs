//! Encryption at rest over a real embedded store: what upstream wrote is read, keys rotate, and what cannot be
//! decrypted is an error of that value alone.

mod plugin;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use skiff_encryption::{Encrypted, Encryption, generate, is_encrypted};
use skiff_store::{Embedded, Expect, Op, Outcome, Store, unreadable};

const KEY: &str = "/registry/secrets/default/one";
const A: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
const B: &str = "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=";

fn config(resources: &str, providers: &[String]) -> String {
    let providers: String = providers.iter().map(|text| format!("  - {text}\n")).collect();
    format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [{resources}]\n  providers:\n{providers}"
    )
}

fn keys(provider: &str, keys: &[(&str, &str)]) -> String {
    let keys: Vec<String> = keys
        .iter()
        .map(|(name, key)| format!("{{name: {name}, secret: {key}}}"))
        .collect();
    format!("{provider}: {{keys: [{}]}}", keys.join(", "))
}

fn identity() -> String {
    "identity: {}".to_owned()
}

struct Stores {
    plain: Arc<dyn Store>,
    folder: tempfile::TempDir,
}

impl Stores {
    fn new() -> Stores {
        let folder = tempfile::tempdir().expect("a folder");
        let plain = Arc::new(Embedded::open(folder.path().join("store")).expect("a store"));
        Stores { plain, folder }
    }

    async fn under(&self, config: &str) -> Encrypted {
        let encryption = Encryption::new(config, "test").await.expect("a configuration");
        Encrypted::new(self.plain.clone(), encryption)
    }
}

async fn put(store: &dyn Store, key: &str, value: &str) {
    let written = store
        .write(key, Expect::Any, Op::Put(Bytes::from(value.to_owned())), None)
        .await;
    assert!(matches!(written, Ok(Outcome::Done { .. })), "{written:?}");
}

async fn get(store: &dyn Store, key: &str) -> Bytes {
    store.get(key).await.expect("a read").0.expect("the key").value
}

/// The vectors of upstream: provider, its configuration, the stored bytes.
fn vectors(socket: &Path) -> Vec<(String, Bytes)> {
    let text = include_str!("data/upstream.txt");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    { lines.chunks(2) }
        .map(|pair| {
            let (provider, options) = pair[0].split_once(' ').expect("a provider");
            let options = options.replace("SOCKET", &socket.display().to_string());
            let stored = STANDARD.decode(pair[1]).expect("base64");
            (format!("{provider}: {options}"), Bytes::from(stored))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_upstream_encrypted_is_read() {
    let stores = Stores::new();
    let socket = stores.folder.path().join("kms");
    let _plugin = plugin::serve(&socket, "key-1");
    let vectors = vectors(&socket);
    assert_eq!(vectors.len(), 10);
    let plain = vectors[0].1.clone();
    assert!(plain.starts_with(br#"{"kind":"Secret""#));
    for (provider, stored) in &vectors {
        let under = stores
            .under(&config("secrets", std::slice::from_ref(provider)))
            .await;
        stores
            .plain
            .write(KEY, Expect::Any, Op::Put(stored.clone()), None)
            .await
            .expect("a write");
        assert_eq!(get(&under, KEY).await, plain, "{provider}");
        // What upstream wrote last is not written again, but for a key where a seed is wanted.
        assert_eq!(
            under.is_stale(KEY).await.expect("a read"),
            provider.contains("name: old"),
            "{provider}"
        );
        // The other way round: the same prefix as upstream's, and readable.
        put(&under, KEY, "changed").await;
        let written = get(stores.plain.as_ref(), KEY).await;
        let prefix = |bytes: &Bytes| {
            String::from_utf8_lossy(bytes)
                .splitn(6, ':')
                .take(5)
                .collect::<Vec<_>>()
                .join(":")
        };
        if is_encrypted(stored) {
            assert_eq!(prefix(&written), prefix(stored));
            assert!(!written.windows(7).any(|part| part == b"changed"));
        }
        assert_eq!(get(&under, KEY).await, "changed");
    }
}

#[tokio::test]
async fn keys_and_providers_rotate() {
    let stores = Stores::new();
    let old = stores
        .under(&config("secrets", &[keys("aescbc", &[("a", A)])]))
        .await;
    put(&old, KEY, "one").await;
    let both = stores
        .under(&config("secrets", &[keys("aescbc", &[("b", B), ("a", A)])]))
        .await;
    assert_eq!(get(&both, KEY).await, "one");
    assert!(both.is_stale(KEY).await.expect("a read"), "an old key");
    put(&both, KEY, "one").await;
    assert!(!both.is_stale(KEY).await.expect("a read"));
    let box_first = [
        keys("secretbox", &[("a", A)]),
        keys("aescbc", &[("b", B)]),
        identity(),
    ];
    let moved = stores.under(&config("secrets", &box_first)).await;
    assert_eq!(get(&moved, KEY).await, "one");
    assert!(moved.is_stale(KEY).await.expect("a read"), "an old provider");
    put(&moved, KEY, "one").await;
    assert!(
        get(stores.plain.as_ref(), KEY)
            .await
            .starts_with(b"k8s:enc:secretbox:v1:a:")
    );
    // Away from encryption.
    let away = [identity(), keys("secretbox", &[("a", A)])];
    let away = stores.under(&config("secrets", &away)).await;
    assert_eq!(get(&away, KEY).await, "one");
    assert!(away.is_stale(KEY).await.expect("a read"));
    put(&away, KEY, "one").await;
    assert_eq!(get(stores.plain.as_ref(), KEY).await, "one");
    // One name for two keys: each is tried.
    let named = [
        keys("aesgcm", &[("k", B)]),
        keys("aesgcm", &[("k", A)]),
        identity(),
    ];
    let first = stores
        .under(&config("secrets", &[keys("aesgcm", &[("k", A)])]))
        .await;
    put(&first, KEY, "two").await;
    let named = stores.under(&config("secrets", &named)).await;
    assert_eq!(get(&named, KEY).await, "two");
}

#[tokio::test]
async fn resources_are_named_as_upstream_names_them() {
    let stores = Stores::new();
    let of = |key: &'static str, resources: &'static str| {
        let stores = &stores;
        async move {
            let under = stores
                .under(&config(resources, &[keys("secretbox", &[("a", A)]), identity()]))
                .await;
            put(&under, key, "x").await;
            is_encrypted(&get(stores.plain.as_ref(), key).await)
        }
    };
    let deployment = "/registry/deployments/default/a";
    let custom = "/registry/example.com/foos/default/a";
    for (key, resources, expected) in [
        (KEY, "secrets", true),
        (KEY, "'*.'", true),
        (KEY, "'*.*'", true),
        (KEY, "'*.apps'", false),
        (KEY, "secrets.example.com", false),
        (deployment, "deployments.apps", true),
        (deployment, "'*.apps'", true),
        (deployment, "'*.'", false),
        (deployment, "deployments", false),
        (custom, "foos.example.com", true),
        (custom, "'*.example.com'", true),
        (custom, "'*.*'", true),
        (custom, "foos", false),
        ("/skiff/release", "'*.*'", false),
    ] {
        assert_eq!(of(key, resources).await, expected, "{key} by {resources}");
    }
    // The more exact rule wins; a rule behind a wider one is refused.
    let rules = |first: &str, second: &str| {
        let a = keys("aescbc", &[("a", A)]);
        let b = keys("aesgcm", &[("b", B)]);
        config(first, &[a]) + &format!("- resources: [{second}]\n  providers:\n  - {b}\n")
    };
    let under = stores.under(&rules("secrets", "'*.'")).await;
    put(&under, KEY, "x").await;
    assert!(
        get(stores.plain.as_ref(), KEY)
            .await
            .starts_with(b"k8s:enc:aescbc:v1:a:")
    );
    let refused = Encryption::new(&rules("'*.'", "secrets"), "test")
        .await
        .err()
        .expect("masked")
        .to_string();
    assert!(
        refused.contains("resource \"secrets\" is masked by earlier rule \"*.\""),
        "{refused}"
    );
}

#[tokio::test]
async fn what_cannot_be_decrypted_is_an_error_of_its_own() {
    let stores = Stores::new();
    let first = stores
        .under(&config("secrets", &[keys("aesgcm", &[("a", A)])]))
        .await;
    put(&first, KEY, "one").await;
    let other = "/registry/secrets/default/two";
    let sealed = get(stores.plain.as_ref(), KEY).await;
    stores
        .plain
        .write(other, Expect::Any, Op::Put(sealed), None)
        .await
        .expect("a write");
    let why = |value: Bytes| unreadable(&value).expect("unreadable");
    let copied = why(get(&first, other).await);
    assert!(
        copied.contains(other) && copied.contains("authentication failed"),
        "{copied}"
    );
    assert_eq!(get(&first, KEY).await, "one", "the neighbour is well");
    let found = first
        .range("/registry/secrets/", None, 0, None)
        .await
        .expect("a range");
    let read: Vec<bool> = found
        .items
        .iter()
        .map(|item| unreadable(&item.value).is_none())
        .collect();
    assert_eq!(read, [true, false]);
    let without = stores
        .under(&config("secrets", &[keys("aesgcm", &[("b", B)]), identity()]))
        .await;
    assert!(why(get(&without, KEY).await).contains("no matching prefix found"));
    let nothing = stores.under(&config("configmaps", &[identity()])).await;
    assert!(why(get(&nothing, KEY).await).contains("identity transformer tried to read encrypted data"));
    // Without identity, what is not encrypted is not taken either.
    put(stores.plain.as_ref(), KEY, "plain").await;
    assert!(why(get(&first, KEY).await).contains("no matching prefix found"));
}

#[tokio::test]
async fn watches_are_decrypted_and_reload_is_taken() {
    let stores = Stores::new();
    let file = stores.folder.path().join("config.yaml");
    std::fs::write(&file, config("secrets", &[keys("secretbox", &[("a", A)])])).expect("a file");
    let encryption = Encryption::load(&file).await.expect("a configuration");
    let under = Encrypted::new(stores.plain.clone(), encryption.clone());
    let mut watch = under.watch("/registry/secrets/", 0).await.expect("a watch");
    put(&under, KEY, "one").await;
    let batch = watch.next().await.expect("a batch");
    assert_eq!(batch.events[0].value.as_deref(), Some(&b"one"[..]));
    // A key that is gone, then back.
    std::fs::write(&file, config("secrets", &[keys("secretbox", &[("b", B)])])).expect("a file");
    encryption.reload(&file).await.expect("a reload");
    assert!(unreadable(&get(&under, KEY).await).is_some());
    std::fs::write(&file, "nonsense").expect("a file");
    encryption.reload(&file).await.expect_err("a wrong file");
    assert!(unreadable(&get(&under, KEY).await).is_some(), "the old one stays");
    let both = [keys("secretbox", &[("b", B), ("a", A)])];
    std::fs::write(&file, config("secrets", &both)).expect("a file");
    encryption.reload(&file).await.expect("a reload");
    assert_eq!(get(&under, KEY).await, "one");
    assert!(under.is_stale(KEY).await.expect("a read"));
    let written = under
        .write(KEY, Expect::Absent, Op::Delete, None)
        .await
        .expect("an answer");
    let Outcome::Conflict {
        current: Some(current),
        ..
    } = written
    else {
        panic!("{written:?}")
    };
    assert_eq!(current.value, "one");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kms_plugin_is_asked_once_per_seed() {
    let stores = Stores::new();
    let socket = stores.folder.path().join("kms");
    let plugin = plugin::serve(&socket, "key-1");
    let kms = format!(
        "kms: {{apiVersion: v2, name: k, endpoint: 'unix://{}'}}",
        socket.display()
    );
    let text = config("secrets", &[kms, identity()]);
    let under = stores.under(&text).await;
    let name = |number: usize| format!("/registry/secrets/default/{number}");
    for number in 0..20 {
        put(&under, &name(number), "value").await;
        assert_eq!(get(&under, &name(number)).await, "value");
    }
    assert_eq!(plugin.encrypts.load(Ordering::SeqCst), 1);
    assert_eq!(plugin.decrypts.load(Ordering::SeqCst), 0);
    // Another server, or this one after a restart.
    let again = stores.under(&text).await;
    let mut watch = again.watch("/registry/secrets/", 2).await.expect("a watch");
    let mut seen = 0;
    while seen < 20 {
        let batch = tokio::time::timeout(Duration::from_secs(60), watch.next())
            .await
            .expect("in time")
            .expect("a batch");
        assert!(
            batch
                .events
                .iter()
                .all(|event| event.value.as_deref() == Some(&b"value"[..]))
        );
        seen += batch.events.len();
    }
    assert_eq!(plugin.decrypts.load(Ordering::SeqCst), 1);
    // Its key changed: what the old one wrote is stale.
    *plugin.key_id.lock() = "key-2".to_owned();
    let encryption = Encryption::new(&text, "test").await.expect("a configuration");
    encryption.check().await.expect("it is well");
    let under = Encrypted::new(stores.plain.clone(), encryption);
    assert!(under.is_stale(&name(3)).await.expect("a read"));
    put(&under, &name(3), "value").await;
    assert!(!under.is_stale(&name(3)).await.expect("a read"));
    // A plugin that is not well: no write, no read of what it must be asked for, and health says so.
    plugin.unhealthy.store(true, Ordering::SeqCst);
    let encryption = Encryption::new(&text, "test").await.expect("a configuration");
    let why = encryption.check().await.expect_err("not well");
    assert!(
        why.contains("kms-provider-0: kmsv2 Provider k is not healthy") && why.contains("not well"),
        "{why}"
    );
    let under = Encrypted::new(stores.plain.clone(), encryption.clone());
    let why = unreadable(&get(&under, &name(5)).await).expect("unreadable");
    assert!(why.contains("failed to decrypt DEK"), "{why}");
    // When it is well again, what could not be read is read again.
    let (told, mut again) = tokio::sync::mpsc::unbounded_channel();
    let following = tokio::spawn(async move {
        let tell = |prefixes: &[String]| told.send(prefixes.to_vec()).expect("somebody listens");
        encryption.follow(None, Duration::from_millis(20), tell).await;
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    plugin.unhealthy.store(false, Ordering::SeqCst);
    let prefixes = tokio::time::timeout(Duration::from_secs(60), again.recv())
        .await
        .expect("in time");
    assert_eq!(prefixes.expect("prefixes"), ["/registry/secrets/"]);
    assert_eq!(get(&under, &name(5)).await, "value");
    following.abort();
}

/// With `--etcd-prefix` the key that a value is bound to is the one that etcd has.
#[tokio::test]
async fn another_prefix_is_part_of_what_is_authenticated() {
    let stores = Stores::new();
    let file = stores.folder.path().join("config.yaml");
    std::fs::write(&file, config("secrets", &[keys("aesgcm", &[("a", A)])])).expect("a file");
    let usual = Encrypted::new(
        stores.plain.clone(),
        Encryption::load(&file).await.expect("usual"),
    );
    let same = Encryption::load_below("registry", &file).await.expect("the same");
    let same = Encrypted::new(stores.plain.clone(), same);
    let other = Encryption::load_below("/other", &file).await.expect("another");
    let other = Encrypted::new(stores.plain.clone(), other);
    put(&other, KEY, "one").await;
    assert_eq!(get(&other, KEY).await, "one");
    assert!(unreadable(&get(&usual, KEY).await).is_some());
    put(&usual, KEY, "one").await;
    assert_eq!(get(&same, KEY).await, "one");
    assert!(unreadable(&get(&other, KEY).await).is_some());
}

#[tokio::test]
async fn a_changed_file_is_taken_over() {
    let stores = Stores::new();
    let file = stores.folder.path().join("config.yaml");
    let first = stores
        .under(&config("secrets", &[keys("secretbox", &[("a", A)])]))
        .await;
    put(&first, KEY, "one").await;
    std::fs::write(&file, config("secrets", &[keys("secretbox", &[("b", B)])])).expect("a file");
    let encryption = Encryption::load(&file).await.expect("a configuration");
    let under = Encrypted::new(stores.plain.clone(), encryption.clone());
    assert!(unreadable(&get(&under, KEY).await).is_some());
    let (told, mut again) = tokio::sync::mpsc::unbounded_channel();
    let followed = file.clone();
    let following = tokio::spawn(async move {
        let tell = |prefixes: &[String]| told.send(prefixes.to_vec()).expect("somebody listens");
        encryption
            .follow(Some(&followed), Duration::from_millis(20), tell)
            .await;
    });
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert!(again.try_recv().is_err(), "nothing changed");
    std::fs::write(
        &file,
        config("secrets", &[keys("secretbox", &[("b", B), ("a", A)])]),
    )
    .expect("a file");
    let prefixes = tokio::time::timeout(Duration::from_secs(60), again.recv())
        .await
        .expect("in time");
    assert_eq!(prefixes.expect("prefixes"), ["/registry/secrets/"]);
    assert_eq!(get(&under, KEY).await, "one");
    following.abort();
}

#[tokio::test]
async fn kms_v1_is_refused_and_a_missing_plugin_is_told() {
    let text = config(
        "secrets",
        &["kms: {name: k, endpoint: 'unix:///nowhere'}".to_owned()],
    );
    let why = Encryption::new(&text, "test")
        .await
        .err()
        .expect("refused")
        .to_string();
    assert!(why.contains("KMSv1 is deprecated"), "{why}");
    let text = config(
        "secrets",
        &["kms: {apiVersion: v2, name: k, endpoint: 'unix:///nowhere'}".to_owned()],
    );
    let stores = Stores::new();
    let encryption = Encryption::new(&text, "test").await.expect("it may come later");
    assert!(encryption.uses_kms());
    encryption.check().await.expect_err("nobody listens");
    let under = Encrypted::new(stores.plain.clone(), encryption);
    let refused = under
        .write(KEY, Expect::Any, Op::Put(Bytes::from_static(b"x")), None)
        .await;
    assert!(
        matches!(refused, Err(skiff_store::Error::Encryption(_))),
        "{refused:?}"
    );
    assert!(
        stores.plain.get(KEY).await.expect("a read").0.is_none(),
        "nothing is written in the clear"
    );
}

#[tokio::test]
async fn a_generated_configuration_encrypts_secrets_and_reads_old_ones() {
    let stores = Stores::new();
    put(stores.plain.as_ref(), KEY, "old").await;
    let text = generate().expect("a configuration");
    assert_ne!(text, generate().expect("another"));
    let under = stores.under(&text).await;
    assert_eq!(get(&under, KEY).await, "old");
    assert!(under.is_stale(KEY).await.expect("a read"));
    put(&under, KEY, "old").await;
    assert!(
        get(stores.plain.as_ref(), KEY)
            .await
            .starts_with(b"k8s:enc:secretbox:v1:key1:")
    );
    put(&under, "/registry/configmaps/default/a", "x").await;
    assert_eq!(
        get(stores.plain.as_ref(), "/registry/configmaps/default/a").await,
        "x"
    );
}
