//! `skiff backup`, `restore` and `store`, with real clusters, a real etcd, and a database as k3s has it.

use anyhow::{Context, Result, bail, ensure};
use rusqlite::params;
use serde_json::Value;
use skiff_testkit::whole_path::{self, PATIENCE};
use skiff_testkit::{Cluster, Etcd, Kubectl, eventually, expect_eq};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");
const PASSPHRASE: &str = "SKIFF_BACKUP_PASSPHRASE";
/// What `skiff restore` adds to revisions.
const AHEAD: i64 = 1_000_000_000;

/// Networks that no other test has, so that they are free when a cluster of theirs comes back.
fn start(networks: [&str; 2], flags: &[&str]) -> Result<Cluster> {
    let networks = [
        "--cluster-cidr",
        networks[0],
        "--service-cluster-ip-range",
        networks[1],
    ];
    Cluster::start(SKIFF, &[&networks[..], flags].concat())
}

/// Runs skiff with a passphrase, if there is one, and returns whether it succeeded and what it printed.
fn skiff(args: &[&str], passphrase: Option<&str>) -> Result<(bool, String)> {
    let mut command = Command::new(SKIFF);
    command.args(args).stdin(Stdio::null()).env_remove(PASSPHRASE);
    if let Some(passphrase) = passphrase {
        command.env(PASSPHRASE, passphrase);
    }
    let output = command.output()?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

fn succeeds(args: &[&str], passphrase: Option<&str>) -> Result<String> {
    match skiff(args, passphrase)? {
        (true, said) => Ok(said),
        (false, said) => bail!("skiff {args:?}: {said}"),
    }
}

fn fails(args: &[&str], passphrase: Option<&str>, because: &str) -> Result<()> {
    match skiff(args, passphrase)? {
        (true, said) => bail!("skiff {args:?} succeeded: {said}"),
        (false, said) if said.contains(because) => Ok(()),
        (false, said) => bail!("skiff {args:?} failed with {said:?}, not because {because:?}"),
    }
}

const OBJECTS: &str = r#"
apiVersion: v1
kind: Secret
metadata: {name: one}
stringData: {word: swordfish and more}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: one}
data: {a: b}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: robot}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: none}
spec:
  replicas: 0
  selector: {matchLabels: {app: none}}
  template:
    metadata: {labels: {app: none}}
    spec: {containers: [{name: c, image: nothing}]}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: boats, singular: boat, kind: Boat}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"#;
const BOAT: &str = r#"{"apiVersion":"example.com/v1","kind":"Boat","metadata":{"name":"one"},"oars":2}"#;
const KINDS: &str =
    "secrets,configmaps,serviceaccounts,deployments,customresourcedefinitions,boats.example.com";

fn make_objects(kubectl: &Kubectl) -> Result<()> {
    kubectl.apply(OBJECTS)?;
    eventually("the definition is served", PATIENCE, || kubectl.apply(BOAT))?;
    Ok(())
}

/// Uid and resourceVersion of everything that the test made.
fn identities(kubectl: &Kubectl) -> Result<BTreeMap<String, (String, i64)>> {
    let mut found = BTreeMap::new();
    for (kind, name) in [
        ("secret", "one"),
        ("configmap", "one"),
        ("serviceaccount", "robot"),
        ("deployment", "none"),
        ("customresourcedefinition", "boats.example.com"),
        ("boats.example.com", "one"),
    ] {
        let object = kubectl.json(&["get", kind, name])?;
        let metadata = &object["metadata"];
        let uid = metadata["uid"].as_str().context("a uid")?.to_owned();
        found.insert(kind.to_owned(), (uid, revision_of(&object)?));
    }
    let boat = kubectl.json(&["get", "boats.example.com", "one"])?;
    expect_eq(&boat["oars"], &Value::from(2))?;
    let secret = kubectl.json(&["get", "secret", "one"])?;
    expect_eq(secret["data"]["word"].as_str(), Some("c3dvcmRmaXNoIGFuZCBtb3Jl"))?;
    Ok(found)
}

fn uids(found: &BTreeMap<String, (String, i64)>) -> Vec<&str> {
    found.values().map(|(uid, _)| uid.as_str()).collect()
}

/// What nobody writes but the test.
fn unwritten(found: &BTreeMap<String, (String, i64)>) -> Vec<&(String, i64)> {
    ["secret", "configmap", "boats.example.com"]
        .iter()
        .filter_map(|kind| found.get(*kind))
        .collect()
}

fn revision_of(object: &Value) -> Result<i64> {
    let text = object["metadata"]["resourceVersion"].as_str();
    Ok(text.context("a resourceVersion")?.parse()?)
}

/// The newest revision of a cluster, as clients see it.
fn revision(kubectl: &Kubectl) -> Result<i64> {
    revision_of(&serde_json::from_str(&kubectl.run(&[
        "get",
        "--raw",
        "/api/v1/namespaces/default/configmaps?limit=1",
    ])?)?)
}

fn contains(file: &Path, word: &[u8]) -> Result<bool> {
    Ok(fs::read(file)?.windows(word.len()).any(|part| part == word))
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

/// Nothing on the machine tells of a cluster of this name.
fn nothing_is_left(name: &str) -> Result<()> {
    for path in [
        Cluster::data_dir(name),
        PathBuf::from(format!("/var/lib/skiff/clusters/{name}.json")),
    ] {
        ensure!(!path.exists(), "{} is left", path.display());
    }
    Ok(())
}

#[test]
fn a_cluster_comes_back() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let networks = ["10.61.0.0/16", "10.71.0.0/16"];
    let cluster = start(networks, &["--components", "api,controllers"])?;
    let kubectl = cluster.kubectl();
    make_objects(&kubectl)?;
    let token = kubectl.run(&["create", "token", "robot"])?;
    let (with_keys, plain) = (path(folder.path(), "keys"), path(folder.path(), "plain"));
    let name = ["--name", cluster.name()];
    let backup = |file: &str, flags: &[&str], passphrase: Option<&str>| {
        skiff(&[&["backup", file], &name[..], flags].concat(), passphrase)
    };

    // Secrets are encrypted in the store, so not without a passphrase, and not without being asked in plain text.
    let (done, said) = backup(&plain, &[], None)?;
    ensure!(!done && said.contains("--secrets-in-plain-text"), "{said}");
    let (done, said) = backup(&plain, &["--with-keys"], None)?;
    ensure!(
        !done && said.contains("a backup with keys is encrypted"),
        "{said}"
    );
    let (done, said) = backup(&plain, &[], Some("short"))?;
    ensure!(!done && said.contains("too short"), "{said}");
    expect_eq(fs::read_dir(folder.path())?.count(), 0)?;

    // Under load: every object that was there before is in it, and those that came are there up to one of them.
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (kubectl, stop, written) = (kubectl.clone(), stop.clone(), written.clone());
        std::thread::spawn(move || -> Result<()> {
            for number in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let name = format!("load-{number:04}");
                kubectl.run(&["create", "configmap", &name, "--from-literal=k=v"])?;
                written.store(number + 1, Ordering::Relaxed);
            }
            Ok(())
        })
    };
    eventually("some are written", PATIENCE, || {
        ensure!(written.load(Ordering::Relaxed) > 3);
        Ok(())
    })?;
    let before = written.load(Ordering::Relaxed);
    let (done, said) = backup(&with_keys, &["--with-keys"], Some("open sesame"))?;
    ensure!(
        done && said.contains("encrypted, with the cluster's keys"),
        "{said}"
    );
    let after = written.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    writer
        .join()
        .map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    let identities_before = identities(&kubectl)?;
    let seen = revision(&kubectl)?;
    expect_eq(fs::metadata(&with_keys)?.permissions().mode() & 0o777, 0o600)?;
    for word in [&b"swordfish"[..], b"load-0000", b"PRIVATE KEY"] {
        ensure!(!contains(Path::new(&with_keys), word)?, "it is not encrypted");
    }
    let (done, said) = backup(&with_keys, &["--with-keys"], Some("open sesame"))?;
    ensure!(!done && said.contains("is there already"), "{said}");

    // A stopped one is backed up too.
    fails(
        &["restore", &with_keys, name[0], name[1]],
        None,
        "does not overwrite",
    )?;
    cluster.skiff(&["down"])?;
    let (done, said) = backup(&plain, &["--secrets-in-plain-text"], None)?;
    ensure!(
        done && said.contains("Secrets in plain text, unlike in the store"),
        "{said}"
    );
    ensure!(contains(Path::new(&plain), b"swordfish")?);
    let ca = fs::read(Cluster::data_dir(cluster.name()).join("pki/ca.crt"))?;
    drop(cluster);

    // Wrong passphrases and none leave nothing behind.
    let fresh = Cluster::new_name();
    let restore = |file: &str| ["restore", file, "--name", &fresh].map(str::to_owned);
    let args = restore(&with_keys);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    fails(&args, None, "--passphrase-file")?;
    fails(&args, Some("open barley"), "the passphrase is wrong")?;
    nothing_is_left(&fresh)?;

    // With its keys it is the same cluster to everybody.
    let said = succeeds(&args, Some("open sesame"))?;
    ensure!(said.contains("is restored in"), "{said}");
    let data = Cluster::data_dir(&fresh);
    expect_eq(&fs::read(data.join("pki/ca.crt"))?, &ca)?;
    for key in ["pki/ca.key", "pki/sa.key", "encryption/config.yaml"] {
        expect_eq(fs::metadata(data.join(key))?.permissions().mode() & 0o777, 0o600)?;
    }
    ensure!(!contains(&data.join("store/store.db"), b"swordfish")?);
    let restored = Cluster::start_named(SKIFF, fresh, &["--components", "api,controllers"])?;
    let kubectl = restored.kubectl();
    let identities_after = identities(&kubectl)?;
    expect_eq(uids(&identities_after), uids(&identities_before))?;
    for (kind, (_, revision)) in &identities_after {
        ensure!(
            *revision <= identities_before[kind].1 || *revision > seen + AHEAD / 2,
            "{kind}"
        );
    }
    ensure!(revision(&kubectl)? > seen, "revisions go on");
    // A client that was away hears that it must list again.
    let old =
        format!("/api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=2&resourceVersion={seen}");
    let (_, answer) = kubectl.try_run(&["get", "--raw", &old])?;
    ensure!(
        answer.contains("410") || answer.contains("too old resource version"),
        "{answer}"
    );
    let list = kubectl.json(&["get", "configmaps"])?;
    let names: Vec<&str> = list["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter_map(|item| item["metadata"]["name"].as_str())
        .filter(|name| name.starts_with("load-"))
        .collect();
    let count = names.len() as u64;
    ensure!(
        (before..=after + 1).contains(&count),
        "{before} <= {count} <= {after}"
    );
    for (number, name) in names.iter().enumerate() {
        expect_eq(*name, format!("load-{number:04}").as_str())?;
    }
    let review = format!(
        r#"{{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{{"token":"{}"}}}}"#,
        token.trim()
    );
    let answer: Value = serde_json::from_str(&kubectl.create(&review)?)?;
    expect_eq(&answer["status"]["authenticated"], &Value::from(true))?;
    drop(restored);

    // Without keys it has new ones: Secrets are read, old tokens are not.
    let fresh = Cluster::new_name();
    let said = succeeds(&["restore", &plain, "--name", &fresh], None)?;
    ensure!(said.contains("new ones are made"), "{said}");
    let restored = Cluster::start_named(SKIFF, fresh, &["--components", "api,controllers"])?;
    let kubectl = restored.kubectl();
    expect_eq(uids(&identities(&kubectl)?), uids(&identities_before))?;
    let answer: Value = serde_json::from_str(&kubectl.create(&review)?)?;
    ensure!(answer["status"]["authenticated"] != true, "{answer}");
    kubectl.run(&["get", KINDS])?;
    Ok(())
}

#[test]
fn damaged_files_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cluster = start(["10.62.0.0/16", "10.72.0.0/16"], &["--components", "api"])?;
    cluster.kubectl().apply(OBJECTS)?;
    let name = ["--name", cluster.name()];
    let (sealed, plain) = (path(folder.path(), "sealed"), path(folder.path(), "plain"));
    succeeds(
        &[&["backup", &sealed, "--with-keys"], &name[..]].concat(),
        Some("open sesame"),
    )?;
    succeeds(
        &[&["backup", &plain, "--secrets-in-plain-text"], &name[..]].concat(),
        None,
    )?;
    drop(cluster);
    let fresh = Cluster::new_name();
    let damaged = path(folder.path(), "damaged");
    let refused = |bytes: &[u8], what: &str| -> Result<()> {
        fs::write(&damaged, bytes)?;
        let (done, said) = skiff(&["restore", &damaged, "--name", &fresh], Some("open sesame"))?;
        ensure!(!done, "{what} was restored: {said}");
        let clear = [
            "is damaged",
            "file is damaged",
            "not a backup",
            "newer skiff",
            "its head",
        ];
        ensure!(
            said.contains("cannot be restored") && clear.iter().any(|word| said.contains(word)),
            "{what}: {said}"
        );
        nothing_is_left(&fresh).context(what.to_owned())
    };
    for file in [&sealed, &plain] {
        let good = fs::read(file)?;
        let length = good.len();
        // Each bit of a small file is tried by unit tests of the format.
        for at in [
            0,
            10,
            16,
            19,
            20,
            30,
            length / 3,
            length / 2,
            length - 40,
            length - 1,
        ] {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            refused(&bytes, &format!("{file} with a changed byte {at}"))?;
            refused(&good[..at], &format!("{file} cut at {at}"))?;
        }
        refused(&[&good[..], b"x"].concat(), "a longer file")?;
        let middle = [&good[..length / 3], &good[length / 2..]].concat();
        refused(&middle, "a file without its middle")?;
    }
    refused(b"SQLite format 3\0", "another program's file")?;
    // A killed restore is in nobody's way.
    let staged = Cluster::data_dir(&fresh).join("staged");
    fs::create_dir_all(staged.join("store"))?;
    succeeds(&["restore", &plain, "--name", &fresh], None)?;
    ensure!(!staged.exists());
    fails(&["restore", &plain, "--name", &fresh], None, "does not overwrite")?;
    succeeds(&["down", "--delete", "--name", &fresh], None)?;
    nothing_is_left(&fresh)
}

/// Container ids and restarts of the example's pods.
fn containers(kubectl: &Kubectl) -> Result<BTreeMap<String, (String, i64)>> {
    let pods = whole_path::pods(kubectl, "app=web")?;
    let mut found = BTreeMap::new();
    for pod in &pods {
        let status = &pod["status"]["containerStatuses"][0];
        let id = status["containerID"].as_str().context("a container")?;
        let restarts = status["restartCount"].as_i64().context("restarts")?;
        let name = pod["metadata"]["name"].as_str().context("a name")?;
        found.insert(name.to_owned(), (id.to_owned(), restarts));
    }
    Ok(found)
}

#[test]
fn to_etcd_and_back_while_pods_run() -> Result<()> {
    let etcd = Etcd::start()?;
    let folder = tempfile::tempdir()?;
    let cluster = Cluster::start(SKIFF, &[])?;
    let kubectl = cluster.kubectl();
    make_objects(&kubectl)?;
    whole_path::apply_the_example(&kubectl)?;
    let (running, before) = (containers(&kubectl)?, identities(&kubectl)?);
    let data = Cluster::data_dir(cluster.name());
    let seen = revision(&kubectl)?;

    // What cannot work changes nothing.
    let nobody = "http://127.0.0.1:1";
    let refused = cluster.skiff(&["store", "migrate", "--to", "etcd", "--etcd-servers", nobody]);
    ensure!(refused.is_err());
    let pid = cluster.pid()?;
    let refused = cluster.skiff(&["store", "migrate", "--to", "embedded"]);
    ensure!(format!("{:#}", refused.err().context("refused")?).contains("embedded store already"));
    expect_eq(cluster.pid()?, pid)?;

    // What fails in the middle leads back: with another key Secrets cannot be read.
    let wrong = path(folder.path(), "wrong.yaml");
    let own = fs::read_to_string(data.join("encryption/config.yaml"))?;
    let (_, secret) = own.split_once("secret: ").context("a key")?;
    let secret = secret.split('}').next().context("its end")?;
    fs::write(
        &wrong,
        own.replace(secret, "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="),
    )?;
    let refused = cluster.skiff(&[
        "store",
        "migrate",
        "--to",
        "etcd",
        "--etcd-servers",
        etcd.endpoint(),
        "--encryption-provider-config",
        &wrong,
    ]);
    let refused = format!("{:#}", refused.err().context("refused")?);
    ensure!(
        refused.contains("the cluster goes on with its embedded store"),
        "{refused}"
    );
    expect_eq(uids(&identities(&kubectl)?), uids(&before))?;
    expect_eq(&containers(&kubectl)?, &running)?;
    expect_eq(objects_in(&etcd)?.len(), 0)?;

    let to_etcd = [
        "store",
        "migrate",
        "--to",
        "etcd",
        "--etcd-servers",
        etcd.endpoint(),
    ];
    let said = cluster.skiff(&to_etcd)?;
    ensure!(said.contains("is running again"), "{said}");
    ensure!(!data.join("store").exists() && data.join("store.migrated").exists());
    let in_etcd = identities(&kubectl)?;
    expect_eq(uids(&in_etcd), uids(&before))?;
    expect_eq(&containers(&kubectl)?, &running)?;
    let seen_in_etcd = revision(&kubectl)?;
    ensure!(seen_in_etcd > seen, "{seen_in_etcd} after {seen}");
    for (kind, (_, revision)) in &in_etcd {
        ensure!(
            *revision > seen,
            "{kind} is at {revision}, and {seen} was seen before"
        );
    }
    // Its record knows where its store is; Secrets are still encrypted.
    cluster.skiff(&["down"])?;
    cluster.up()?;
    expect_eq(uids(&identities(&kubectl)?), uids(&before))?;
    kubectl.run(&["create", "configmap", "in-etcd"])?;
    let file = path(folder.path(), "backup");
    let said = succeeds(&["backup", &file, "--name", cluster.name()], Some("open sesame"))?;
    ensure!(said.contains("encrypted"), "{said}");
    let refused = cluster.skiff(&to_etcd);
    ensure!(format!("{:#}", refused.err().context("refused")?).contains("already"));

    let said = cluster.skiff(&["store", "migrate", "--to", "embedded"])?;
    ensure!(said.contains("is running again"), "{said}");
    expect_eq(uids(&identities(&kubectl)?), uids(&before))?;
    kubectl.run(&["get", "configmap", "in-etcd"])?;
    ensure!(revision(&kubectl)? > seen_in_etcd);
    expect_eq(&containers(&kubectl)?, &running)?;
    ensure!(!contains(&data.join("store/store.db"), b"swordfish")?);
    // Nobody starts on what was left in etcd by mistake, and nobody moves into it.
    let refused = cluster.skiff(&to_etcd);
    ensure!(format!("{:#}", refused.err().context("refused")?).contains("keys below"));
    cluster.skiff(&["down"])?;
    let (done, said) = skiff(
        &[
            "up",
            "--name",
            cluster.name(),
            "--no-kubeconfig-merge",
            "--etcd-servers",
            etcd.endpoint(),
        ],
        None,
    )?;
    ensure!(!done && said.contains("moved to its embedded store"), "{said}");
    cluster.up()?;
    expect_eq(&containers(&kubectl)?, &running)?;
    kubectl.run(&["delete", "-f", whole_path::EXAMPLE, "--timeout=60s"])?;
    Ok(())
}

/// A database as k3s has it, with these keys and values; some were changed or deleted since.
fn make_kine(file: &Path, objects: &[(String, Vec<u8>)]) -> Result<i64> {
    let kine = rusqlite::Connection::open(file)?;
    kine.execute_batch(
        "CREATE TABLE kine (id INTEGER PRIMARY KEY AUTOINCREMENT, name INTEGER, created INTEGER, deleted INTEGER,
           create_revision INTEGER, prev_revision INTEGER, lease INTEGER, value BLOB, old_value BLOB);
         CREATE INDEX kine_name_index ON kine (name);
         CREATE UNIQUE INDEX kine_name_prev_revision_uindex ON kine (name, prev_revision);",
    )?;
    let insert = |name: &str, created: bool, deleted: bool, create: i64, previous: i64, value: &[u8]| {
        let sql = "INSERT INTO kine (name, created, deleted, create_revision, prev_revision, lease, value, old_value)
                   VALUES (?, ?, ?, ?, ?, 0, ?, NULL)";
        kine.execute(sql, params![name, created, deleted, create, previous, value])?;
        anyhow::Ok(kine.last_insert_rowid())
    };
    insert("compact_rev_key", true, false, 0, 0, b"")?;
    for (key, value) in objects {
        let first = insert(key, true, false, 0, 0, b"an older value")?;
        insert(key, false, false, first, first, value)?;
    }
    let gone = insert("/registry/configmaps/default/gone", true, false, 0, 0, b"x")?;
    insert("/registry/configmaps/default/gone", false, true, gone, gone, b"x")?;
    insert("/registry/masterleases/10.0.0.1", true, false, 0, 0, b"x")?;
    insert("gap-77", true, true, 0, 0, b"")
}

#[test]
fn clusters_of_kubeadm_and_k3s_are_taken_over() -> Result<()> {
    // What upstream stores is what skiff stores: an etcd without skiff's notes is kubeadm's.
    let etcd = Etcd::start()?;
    let (pods, services) = ("10.63.0.0/16", "10.73.0.0/16");
    let flags = [
        "--components",
        "api,controllers",
        "--etcd-servers",
        etcd.endpoint(),
    ];
    let origin = start([pods, services], &flags)?;
    make_objects(&origin.kubectl())?;
    let before = identities(&origin.kubectl())?;
    let seen = revision(&origin.kubectl())?;
    let keys = tempfile::tempdir()?;
    for key in ["ca.crt", "ca.key", "sa.key"] {
        fs::copy(
            Cluster::data_dir(origin.name()).join("pki").join(key),
            keys.path().join(key),
        )?;
    }
    let token = origin.kubectl().run(&["create", "token", "robot"])?;
    drop(origin);
    let networks = ["--cluster-cidr", pods, "--service-cluster-ip-range", services];

    let fresh = Cluster::new_name();
    let name = ["--name", fresh.as_str()];
    let pki = keys.path().display().to_string();
    let from_etcd = [
        "store",
        "import",
        "--from-etcd",
        "--etcd-servers",
        etcd.endpoint(),
        "--pki-dir",
        &pki,
    ];
    let said = succeeds(&[&from_etcd[..], &networks, &name].concat(), None)?;
    ensure!(said.contains("is made in"), "{said}");
    fails(
        &[&from_etcd[..], &networks, &name].concat(),
        None,
        "there is a cluster",
    )?;
    let imported = Cluster::start_named(SKIFF, fresh, &["--components", "api,controllers"])?;
    let kubectl = imported.kubectl();
    let after = identities(&kubectl)?;
    expect_eq(uids(&after), uids(&before))?;
    expect_eq(unwritten(&after), unwritten(&before))?;
    ensure!(revision(&kubectl)? > seen);
    let review = format!(
        r#"{{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{{"token":"{}"}}}}"#,
        token.trim()
    );
    let answer: Value = serde_json::from_str(&kubectl.create(&review)?)?;
    expect_eq(&answer["status"]["authenticated"], &Value::from(true))?;
    drop(imported);

    // The same objects in k3s' database.
    let folder = tempfile::tempdir()?;
    let database = folder.path().join("state.db");
    let revision = make_kine(&database, &objects_in(&etcd)?)?;
    let fresh = Cluster::new_name();
    let name = ["--name", fresh.as_str()];
    let file = database.display().to_string();
    succeeds(
        &[&["store", "import", "--from-kine", &file][..], &networks, &name].concat(),
        None,
    )?;
    let imported = Cluster::start_named(SKIFF, fresh, &["--components", "api,controllers"])?;
    let kubectl = imported.kubectl();
    let after = identities(&kubectl)?;
    expect_eq(uids(&after), uids(&before))?;
    ensure!(
        unwritten(&after).iter().all(|(_, at)| *at <= revision),
        "{after:?}"
    );
    let (_, gone) = kubectl.try_run(&["get", "configmap", "gone"])?;
    ensure!(gone.contains("NotFound"), "{gone}");

    let other = path(folder.path(), "other.db");
    rusqlite::Connection::open(&other)?.execute_batch("CREATE TABLE x (y)")?;
    let fresh = Cluster::new_name();
    fails(
        &["store", "import", "--from-kine", &other, "--name", &fresh],
        None,
        "not the database of k3s",
    )?;
    nothing_is_left(&fresh)
}

/// All keys and values below `/registry/` in etcd.
fn objects_in(etcd: &Etcd) -> Result<Vec<(String, Vec<u8>)>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        use skiff_store::Store;
        let options = skiff_store::etcd::Options::new([etcd.endpoint()]);
        let store = skiff_store::Etcd::open_to_read(options).await?;
        let found = store.range("/registry/", None, 0, None).await?;
        let items = found.items.into_iter();
        Ok(items.map(|kv| (kv.key.to_string(), kv.value.to_vec())).collect())
    })
}
