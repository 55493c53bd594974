//! The store on a real etcd: the shared suite, and what only matters there: TLS, members that die,
//! an etcd that goes away and comes back, foreign writers, leases.

#![allow(clippy::unwrap_used)]

mod suite;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use skiff_store::etcd::Options;
use skiff_store::{Error, Etcd, Expect, Op, Outcome, Store};
use suite::{events_until, put, write};

/// Members of one etcd cluster on free loopback ports. They are killed when this is dropped.
struct Cluster {
    dir: tempfile::TempDir,
    members: Vec<Member>,
    tls: Option<Tls>,
}

struct Member {
    client: u16,
    peer: u16,
    child: Option<Child>,
}

struct Tls {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

impl Cluster {
    fn new(members: usize, tls: Option<Tls>) -> Cluster {
        let members = (0..members).map(|_| Member {
            client: free_port(),
            peer: free_port(),
            child: None,
        });
        let mut cluster = Cluster {
            dir: tempfile::tempdir().unwrap(),
            members: members.collect(),
            tls,
        };
        for at in 0..cluster.members.len() {
            cluster.start(at);
        }
        cluster
    }

    fn start(&mut self, at: usize) {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let peers: Vec<String> = self
            .members
            .iter()
            .enumerate()
            .map(|(n, member)| format!("m{n}=http://127.0.0.1:{}", member.peer))
            .collect();
        let member = &self.members[at];
        let client = format!("{scheme}://127.0.0.1:{}", member.client);
        let peer = format!("http://127.0.0.1:{}", member.peer);
        let mut command = Command::new("etcd");
        command
            .arg(format!("--name=m{at}"))
            .arg(format!(
                "--data-dir={}",
                self.dir.path().join(format!("m{at}")).display()
            ))
            .arg(format!("--listen-client-urls={client}"))
            .arg(format!("--advertise-client-urls={client}"))
            .arg(format!("--listen-peer-urls={peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer}"))
            .arg(format!("--initial-cluster={}", peers.join(",")))
            .args([
                "--initial-cluster-state=new",
                "--log-level=error",
                "--unsafe-no-fsync",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(tls) = &self.tls {
            command
                .arg(format!("--trusted-ca-file={}", tls.ca.display()))
                .arg(format!("--cert-file={}", tls.cert.display()))
                .arg(format!("--key-file={}", tls.key.display()))
                .arg("--client-cert-auth");
        }
        // 3.4 of some distributions knows no --unsafe-no-fsync; it is only for speed.
        let help = Command::new("etcd").arg("--help").output();
        let Ok(help) = help else {
            panic!("cannot run etcd: install the package etcd-server")
        };
        let help = [help.stdout, help.stderr].concat();
        if !String::from_utf8_lossy(&help).contains("unsafe-no-fsync") {
            let args: Vec<_> = command
                .get_args()
                .filter(|arg| *arg != "--unsafe-no-fsync")
                .map(ToOwned::to_owned)
                .collect();
            let mut plain = Command::new("etcd");
            plain.args(args).stdout(Stdio::null()).stderr(Stdio::null());
            command = plain;
        }
        let child = command
            .spawn()
            .expect("cannot run etcd: install the package etcd-server");
        self.members[at].child = Some(child);
    }

    fn kill(&mut self, at: usize) {
        let mut child = self.members[at].child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn options(&self) -> Options {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoints = self
            .members
            .iter()
            .map(|member| format!("{scheme}://127.0.0.1:{}", member.client));
        let mut options = Options::new(endpoints);
        if let Some(tls) = &self.tls {
            options.ca_file = Some(tls.ca.clone());
            options.cert_file = Some(tls.cert.clone());
            options.key_file = Some(tls.key.clone());
        }
        options
    }

    /// A store on it, as soon as the cluster answers.
    async fn open(&self) -> Etcd {
        open(self.options()).await
    }
}

async fn open(options: Options) -> Etcd {
    until(async || Etcd::open(options.clone()).await).await
}

/// Tries until etcd is there; up to a minute, for a slow machine.
async fn until<T>(mut attempt: impl AsyncFnMut() -> Result<T, Error>) -> T {
    let mut tries = 0;
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(Error::Unavailable(why)) if tries > 600 => panic!("etcd does not answer: {why}"),
            Err(Error::Unavailable(_)) => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_suite() {
    // The parts of the suite want an empty store each. One etcd serves them all, emptied in between.
    let cluster = Cluster::new(1, None);
    drop(cluster.open().await);
    suite::all(async || {
        let store = cluster.open().await;
        for kv in store.range("/registry/", None, 0, None).await.unwrap().items {
            store.write(&kv.key, Expect::Any, Op::Delete, None).await.unwrap();
        }
        // Opened again: history starts here.
        drop(store);
        Arc::new(cluster.open().await) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_keys_than_one_answer_holds() {
    let cluster = Cluster::new(1, None);
    let store = Arc::new(cluster.open().await);
    let mut tasks = tokio::task::JoinSet::new();
    for part in 0..25 {
        let store = store.clone();
        tasks.spawn(async move {
            for n in 0..100 {
                write(&*store, &format!("/registry/many/{part:02}-{n:02}"), "v").await;
            }
        });
    }
    tasks.join_all().await;
    let range = store.range("/registry/many/", None, 0, None).await.unwrap();
    assert_eq!((range.items.len(), range.count, range.more), (2500, 2500, false));
    let range = store
        .range("/registry/many/", Some("/registry/many/01-99"), 1500, None)
        .await
        .unwrap();
    assert_eq!((range.items.len(), range.count, range.more), (1500, 2300, true));
    assert_eq!(&*range.items[0].key, "/registry/many/02-00");
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_data_is_refused() {
    let cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    store
        .write("/skiff/format", Expect::Any, put("7"), None)
        .await
        .unwrap();
    drop(store);
    let error = Etcd::open(cluster.options()).await.map(|_| ()).unwrap_err();
    let expected = format!(
        "data in etcd at http://127.0.0.1:{} was written by a newer skiff (format 7, this one knows up to 1); use that version, or another --etcd-servers",
        cluster.members[0].client
    );
    assert_eq!(error.to_string(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_writes_do_not_hold_up_consistent_reads() {
    let cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    let mut watch = store.watch("/registry/pods/", 0).await.unwrap();
    for n in 0..20 {
        let Outcome::Done { revision, .. } = store
            .write("/elsewhere/x", Expect::Any, put(&n.to_string()), None)
            .await
            .unwrap()
        else {
            panic!()
        };
        assert!(store.revision().await.unwrap() >= revision);
        assert!(watch.position().sync_point().0 >= revision);
    }
    let last = write(&store, "/registry/pods/a", "1").await;
    assert_eq!(
        events_until(&mut watch, last).await.len(),
        1,
        "fences are not the subscribers' business"
    );
    let error = store.watch("/elsewhere/", 0).await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_end_in_ordinary_deletes() {
    let cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    let mut watch = store.watch("/registry/events/", 0).await.unwrap();
    for name in ["a", "b"] {
        let key = format!("/registry/events/{name}");
        store
            .write(&key, Expect::Absent, put("1"), Some(1))
            .await
            .unwrap();
    }
    store
        .write("/registry/events/b", Expect::Any, put("2"), None)
        .await
        .unwrap();
    let mut deleted = Vec::new();
    while deleted.is_empty() {
        let events = watch.next().await.unwrap().events;
        deleted.extend(events.into_iter().filter(|event| event.value.is_none()));
    }
    assert_eq!((deleted.len(), &*deleted[0].key), (1, "/registry/events/a"));
    assert!(store.get("/registry/events/b").await.unwrap().0.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_goes_away_and_comes_back() {
    let mut cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    let first = write(&store, "/registry/a/1", "1").await;
    let mut watch = store.watch("/registry/a/", first).await.unwrap();
    assert_eq!(events_until(&mut watch, first).await.len(), 1);

    cluster.kill(0);
    let error = store
        .write("/registry/a/2", Expect::Any, put("1"), None)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");
    let error = store.revision().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");
    let error = Etcd::open(cluster.options()).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");

    cluster.start(0);
    until(async || store.revision().await).await;
    let second = write(&store, "/registry/a/3", "1").await;
    let events = events_until(&mut watch, second).await;
    assert_eq!(
        events.last().map(|event| &*event.key),
        Some("/registry/a/3"),
        "the watch goes on"
    );
    assert_eq!(
        &store.get("/registry/a/1").await.unwrap().0.unwrap().value[..],
        b"1"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_missed_history_says_so() {
    let mut cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    let first = write(&store, "/registry/a/1", "1").await;
    let mut watch = store.watch("/registry/a/", first + 1).await.unwrap();
    cluster.kill(0);
    // While this store cannot look, the other one writes and compacts: etcd restarts on another port.
    let known = cluster.members[0].client;
    cluster.members[0].client = free_port();
    cluster.start(0);
    let other = cluster.open().await;
    for n in 0..10 {
        write(&other, "/registry/a/1", &n.to_string()).await;
    }
    let last = other.revision().await.unwrap();
    other.compact(last).await.unwrap();
    drop(other);
    cluster.kill(0);
    cluster.members[0].client = known;
    cluster.start(0);
    let error = loop {
        if let Err(error) = watch.next().await {
            break error;
        }
    };
    assert!(
        matches!(error, Error::Compacted { revision } if revision >= last),
        "{error:?}"
    );
    let range = until(async || store.range("/registry/a/", None, 0, None).await).await;
    let mut watch = store.watch("/registry/a/", range.revision + 1).await.unwrap();
    let next = write(&store, "/registry/a/1", "new").await;
    assert_eq!(events_until(&mut watch, next).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_one_of_three_members_may_die() {
    let mut cluster = Cluster::new(3, None);
    let store = cluster.open().await;
    let base = write(&store, "/registry/a", "start").await;
    let mut watch = store.watch("/registry/", base + 1).await.unwrap();
    let mut acknowledged = Vec::new();
    for at in 0..3 {
        cluster.kill(at);
        // A write whose answer was lost may have happened; it is not counted.
        for n in 0..5 {
            let key = format!("/registry/{at}-{n}");
            let revision = until(
                async || match store.write(&key, Expect::Any, put("v"), None).await? {
                    Outcome::Done { revision, .. } => Ok(revision),
                    conflict => panic!("{conflict:?}"),
                },
            )
            .await;
            acknowledged.push(revision);
        }
        cluster.start(at);
        until(async || store.revision().await).await;
    }
    let last = *acknowledged.last().unwrap();
    let seen: Vec<i64> = events_until(&mut watch, last)
        .await
        .iter()
        .map(|event| event.revision)
        .collect();
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
    assert!(
        acknowledged.iter().all(|revision| seen.contains(revision)),
        "{seen:?} {acknowledged:?}"
    );
}

fn certificates(dir: &Path) -> Tls {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::<String>::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_cert = ca.self_signed(&ca_key).unwrap();
    let issuer = Issuer::new(ca, ca_key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let cert = params.signed_by(&key, &issuer).unwrap();
    let write = |name: &str, pem: String| {
        let path = dir.join(name);
        std::fs::write(&path, pem).unwrap();
        path
    };
    Tls {
        ca: write("ca.crt", ca_cert.pem()),
        cert: write("etcd.crt", cert.pem()),
        key: write("etcd.key", key.serialize_pem()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_client_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::new(1, Some(certificates(dir.path())));
    let store = cluster.open().await;
    let revision = write(&store, "/registry/a", "1").await;
    assert_eq!(store.revision().await.unwrap(), revision);

    let options = Options {
        cert_file: None,
        key_file: None,
        ..cluster.options()
    };
    let error = Etcd::open(options).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");
    let check = async |options: Options, expected: &str| {
        let error = Etcd::open(options).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let none = Options {
        ca_file: None,
        cert_file: None,
        key_file: None,
        ..cluster.options()
    };
    check(none, "https needs --etcd-cafile").await;
    check(
        Options {
            key_file: None,
            ..cluster.options()
        },
        "go together",
    )
    .await;
    check(
        Options {
            ca_file: Some(dir.path().join("none")),
            ..cluster.options()
        },
        "none: No such file",
    )
    .await;
    check(Options::new(Vec::<String>::new()), "names no server").await;
    check(Options::new(["http://a b"]), "etcd server \"http://a b\"").await;
}
