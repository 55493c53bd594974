//! The store on a real etcd: the shared suite, and what only matters there: TLS, members that die,
//! an etcd that goes away and comes back, foreign writers, leases.

#![allow(clippy::unwrap_used)]

#[path = "suite/cluster.rs"]
mod cluster;
mod suite;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::{Cluster, Tls, free_port, until};
use skiff_store::etcd::Options;
use skiff_store::{Error, Etcd, Expect, Op, Outcome, Store};
use suite::{events_until, put, write};

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_suite() {
    let cluster = Cluster::new(1, None);
    drop(cluster.open().await);
    run_suite(&cluster).await;
}

/// Where etcd's revisions are not skiff's.
#[tokio::test(flavor = "multi_thread")]
async fn the_shared_suite_on_a_copy() {
    const ORIGIN: i64 = 5_000_000;
    let cluster = Cluster::new(1, None);
    drop(cluster.open().await);
    let options = cluster.options();
    let loader = skiff_store::etcd::Loader::create(&options, ORIGIN).await.unwrap();
    loader.finish().await.unwrap();
    assert!(cluster.open().await.revision().await.unwrap() > ORIGIN);
    run_suite(&cluster).await;
}

/// The parts of the suite want an empty store each. One etcd serves them all, emptied in between.
async fn run_suite(cluster: &Cluster) {
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
        "data in etcd at http://127.0.0.1:{} was written by a newer skiff (format 7, this one knows up to 2); use that version, or another --etcd-servers",
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
    // A sound etcd is asked; to an older one a fence is written.
    let (fence, _) = store.get("/registry/skiff.io/fence").await.unwrap();
    assert_eq!(fence.is_some(), cluster::etcd_version().starts_with("3.4."));
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

/// One of them is the leader, and one the member that is used: neither may hold anything up for long.
#[tokio::test(flavor = "multi_thread")]
async fn any_one_of_three_members_may_be_silent() {
    /// Far more than it takes, and less than the time limit of a call, which is how long a silent member was waited for.
    const LONGEST: Duration = Duration::from_secs(9);
    let cluster = Cluster::new(3, None);
    let store = cluster.open().await;
    let base = write(&store, "/registry/counter", "0").await;
    let mut watch = store.watch("/registry/", base + 1).await.unwrap();
    let (mut acknowledged, mut unknown) = (Vec::new(), 0);
    // Members are used in this order: each is silenced while it is the one.
    for at in 0..3 {
        count_up(&store, &mut acknowledged, &mut unknown).await;
        cluster.signal(at, "STOP");
        let mut longest = Duration::ZERO;
        for _ in 0..50 {
            let one = Instant::now();
            count_up(&store, &mut acknowledged, &mut unknown).await;
            until(async || store.revision().await).await;
            let last = *acknowledged.last().unwrap();
            events_until(&mut watch, last).await;
            longest = longest.max(one.elapsed());
        }
        println!("member {at} is silent: the longest pause was {longest:?}, {unknown} unknown writes");
        assert!(longest < LONGEST, "{longest:?}");
        cluster.signal(at, "CONT");
        until(async || store.revision().await).await;
    }
    // What a silent member was sent is carried out late, or never, but never twice.
    let (found, _) = store.get("/registry/counter").await.unwrap();
    let counted: usize = String::from_utf8(found.unwrap().value.to_vec())
        .unwrap()
        .parse()
        .unwrap();
    let all = acknowledged.len()..=acknowledged.len() + unknown;
    assert!(all.contains(&counted), "{counted}, not in {all:?}");
}

/// Adds one to the counter, again until it is acknowledged.
async fn count_up(store: &Etcd, acknowledged: &mut Vec<i64>, unknown: &mut usize) {
    loop {
        let key = "/registry/counter";
        let (found, _) = until(async || store.get(key).await).await;
        let found = found.unwrap();
        let count: usize = String::from_utf8(found.value.to_vec()).unwrap().parse().unwrap();
        let expect = Expect::Revision(found.mod_revision);
        match store
            .write(key, expect, put(&(count + 1).to_string()), None)
            .await
        {
            Ok(Outcome::Done { revision, .. }) => return acknowledged.push(revision),
            // A former one was carried out after all.
            Ok(_) => {}
            Err(Error::Unavailable(_)) => *unknown += 1,
            Err(error) => panic!("{error}"),
        }
    }
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

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Waits until the store answers again, and gives its revision.
async fn back(store: &Etcd) -> i64 {
    until(async || store.revision().await).await
}

/// The watch is told to start over.
async fn ended(watch: &mut skiff_store::Watch) {
    let next = tokio::time::timeout(std::time::Duration::from_secs(60), watch.next()).await;
    let error = next.expect("the watch ends").unwrap_err();
    assert!(matches!(error, Error::Compacted { .. }), "{error}");
}

/// Emptied, and then set back to a former state: both times the store starts over with what is there.
#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_was_replaced_is_noticed() {
    let mut cluster = Cluster::new(1, None);
    let store = cluster.open().await;
    let mut last = 0;
    for n in 0..40 {
        last = write(&store, &format!("/registry/pods/{n}"), "v").await;
    }
    let mut watch = store.watch("/registry/pods/", 0).await.unwrap();
    let position = watch.position();
    cluster.kill(0);
    std::fs::remove_dir_all(cluster.data(0)).unwrap();
    cluster.start(0);
    ended(&mut watch).await;
    assert_eq!(
        position.sync_point().1,
        i64::MAX,
        "nothing vouches for what was read"
    );
    let now = back(&store).await;
    assert!(now < last, "{now} {last}");
    let left = store.range("/registry/pods/", None, 0, None).await.unwrap();
    assert!(left.items.is_empty());
    // It goes on as if it were new.
    let mut watch = store.watch("/registry/pods/", 0).await.unwrap();
    let first = write(&store, "/registry/pods/a", "1").await;
    assert_eq!(events_until(&mut watch, first).await.len(), 1);

    // A backup, two more writes, and the backup again.
    cluster.kill(0);
    let saved = tempfile::tempdir().unwrap();
    copy(&cluster.data(0), saved.path());
    cluster.start(0);
    back(&store).await;
    write(&store, "/registry/pods/a", "2").await;
    let lost = write(&store, "/registry/pods/lost", "1").await;
    assert_eq!(events_until(&mut watch, lost).await.len(), 2);
    cluster.kill(0);
    std::fs::remove_dir_all(cluster.data(0)).unwrap();
    copy(saved.path(), &cluster.data(0));
    cluster.start(0);
    ended(&mut watch).await;
    assert!(back(&store).await < lost);
    let left = store.range("/registry/pods/", None, 0, None).await.unwrap();
    assert_eq!(left.items.len(), 1);
    assert_eq!(&left.items[0].value[..], b"1");
    // An etcd that only was away for a while is the same.
    let mut watch = store.watch("/registry/pods/", 0).await.unwrap();
    cluster.kill(0);
    cluster.start(0);
    back(&store).await;
    let next = write(&store, "/registry/pods/b", "1").await;
    assert_eq!(events_until(&mut watch, next).await.len(), 1);
}

/// Two clusters on one etcd: below one prefix only one, with prefixes of their own they do not see each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_has_one_owner() {
    let cluster = Cluster::new(1, None);
    let as_owner = |id: &str, prefix: &str| {
        let mut options = cluster.options();
        prefix.clone_into(&mut options.prefix);
        options.owner = Some(skiff_store::etcd::Owner {
            id: id.to_owned(),
            name: format!("the {id}"),
        });
        options
    };
    // What was there before, as of an upstream API server, is taken over.
    let nobodys = cluster.open().await;
    write(&nobodys, "/registry/pods/a", "1").await;
    let first = Etcd::open(as_owner("first", "/registry")).await.unwrap();
    let again = Etcd::open(as_owner("first", "registry/")).await;
    assert!(
        again.is_ok(),
        "after a restart, or another API server of the same cluster"
    );
    let refused = Etcd::open(as_owner("second", "/registry"))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!(
            "the keys below \"/registry\" in etcd at http://127.0.0.1:{} belong to another cluster (\"the first\"): use another --etcd-prefix, or, if that cluster is gone and this one is to have its objects, delete the key /registry/skiff.io/owner",
            cluster.members[0].client
        )
    );
    let second = Etcd::open(as_owner("second", "/second")).await.unwrap();
    let mut watch = second.watch("/registry/pods/", 0).await.unwrap();
    write(&first, "/registry/pods/b", "1").await;
    write(&second, "/registry/pods/c", "1").await;
    let last = write(&second, "/registry/pods/d", "1").await;
    let keys = |range: skiff_store::RangeResult| -> Vec<String> {
        range.items.into_iter().map(|kv| kv.key.to_string()).collect()
    };
    let of =
        async |store: &Etcd, limit| keys(store.range("/registry/pods/", None, limit, None).await.unwrap());
    assert_eq!(of(&first, 0).await, ["/registry/pods/a", "/registry/pods/b"]);
    assert_eq!(of(&second, 0).await, ["/registry/pods/c", "/registry/pods/d"]);
    let rest = second
        .range("/registry/pods/", Some("/registry/pods/c"), 0, None)
        .await;
    assert_eq!(keys(rest.unwrap()), ["/registry/pods/d"]);
    let (found, _) = second.get("/registry/pods/c").await.unwrap();
    assert_eq!(&*found.unwrap().key, "/registry/pods/c");
    let events = events_until(&mut watch, last).await;
    let seen: Vec<&str> = events.iter().map(|event| &*event.key).collect();
    assert_eq!(seen, ["/registry/pods/c", "/registry/pods/d"]);
    let (there, _) = nobodys.get("/second/pods/d").await.unwrap();
    assert!(there.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_goes_on_with_the_revisions_of_its_origin() {
    use skiff_store::etcd::{Loader, Owner, hand_over};
    const ORIGIN: i64 = 5_000_000;
    let cluster = Cluster::new(1, None);
    drop(cluster.open().await);
    let owner = |id: &str| {
        Some(Owner {
            id: id.to_owned(),
            name: "one".to_owned(),
        })
    };
    let options = Options {
        owner: owner("a"),
        ..cluster.options()
    };
    let loader = Loader::create(&options, ORIGIN).await.unwrap();
    loader.put("/registry/pods/a", "1".into(), None).await.unwrap();
    let refused = Etcd::open(options.clone()).await.map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("was not finished"), "{refused}");
    loader.finish().await.unwrap();
    let refused = Loader::check(&options).await.unwrap_err();
    assert!(
        refused.to_string().contains("there are 2 keys below"),
        "{refused}"
    );

    let store = Etcd::open(options.clone()).await.unwrap();
    let first = store.get("/registry/pods/a").await.unwrap().0.unwrap();
    assert!(first.mod_revision > ORIGIN && first.create_revision == first.mod_revision);
    let revision = store.revision().await.unwrap();
    assert!(revision >= first.mod_revision);
    let past = store
        .watch("/registry/pods/", ORIGIN)
        .await
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(past, Error::Compacted { .. }), "{past}");
    // Compare and swap, watch and reads of the past are by the same numbers.
    let mut watch = store.watch("/registry/pods/", revision + 1).await.unwrap();
    let stale = store
        .write("/registry/pods/a", Expect::Revision(ORIGIN), put("2"), None)
        .await
        .unwrap();
    assert!(matches!(stale, Outcome::Conflict { .. }), "{stale:?}");
    let absent = store
        .write(
            "/registry/pods/b",
            Expect::Revision(first.mod_revision - 4),
            put("2"),
            None,
        )
        .await
        .unwrap();
    assert!(matches!(absent, Outcome::Conflict { .. }), "{absent:?}");
    let written = store
        .write(
            "/registry/pods/a",
            Expect::Revision(first.mod_revision),
            put("2"),
            None,
        )
        .await
        .unwrap();
    let Outcome::Done {
        revision: second,
        previous,
    } = written
    else {
        panic!("{written:?}")
    };
    assert_eq!(previous.unwrap().mod_revision, first.mod_revision);
    assert!(second > revision);
    let events = events_until(&mut watch, second).await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].create_revision, first.create_revision);
    let before = store
        .range("/registry/pods/", None, 0, Some(revision))
        .await
        .unwrap();
    assert_eq!(before.items[0].mod_revision, first.mod_revision);
    let old = store
        .range("/registry/pods/", None, 0, Some(ORIGIN - 1))
        .await
        .unwrap_err();
    assert!(matches!(old, Error::Compacted { .. }), "{old}");
    store.compact(revision).await.unwrap();
    drop(store);

    // Whoever opens it again counts alike; a reader leaves no trace.
    let reader = Etcd::open_to_read(cluster.options()).await.unwrap();
    let again = reader.get("/registry/pods/a").await.unwrap().0.unwrap();
    assert_eq!(again.mod_revision, second);
    drop(reader);
    hand_over(&cluster.options(), &owner("nobody").unwrap())
        .await
        .unwrap();
    let refused = Etcd::open(options.clone()).await.map(|_| ()).unwrap_err();
    assert!(
        refused.to_string().contains("belong to another cluster"),
        "{refused}"
    );
    loader.undo().await.unwrap();
    Loader::check(&options).await.unwrap();
    let store = Etcd::open(options).await.unwrap();
    assert!(store.revision().await.unwrap() < ORIGIN, "nothing is left of it");
}
