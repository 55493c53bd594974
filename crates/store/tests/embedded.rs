//! The embedded store: the shared suite, and what only it promises: reopening, kill -9, a full disk,
//! leases, its own compaction, refusal of data that is not its own.

#![allow(clippy::unwrap_used)]

mod alone;
mod suite;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use skiff_store::embedded::{Limits, Options};
use skiff_store::{Embedded, Error, Expect, Op, Outcome, Store};
use suite::{delete, events_until, put, write};

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_suite() {
    let dir = tempfile::tempdir().unwrap();
    let count = AtomicU64::new(0);
    suite::all(async || {
        let dir = dir.path().join(count.fetch_add(1, Ordering::Relaxed).to_string());
        Arc::new(Embedded::open(dir).unwrap()) as Arc<dyn Store>
    })
    .await;
}

#[tokio::test]
async fn the_first_write_is_revision_2() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(store.revision().await.unwrap(), 1);
    assert_eq!(write(&store, "/registry/a", "1").await, 2);
}

#[tokio::test]
async fn reopening_keeps_state_revision_and_history() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path()).unwrap();
    write(&store, "/registry/a", "1").await;
    write(&store, "/registry/b", "1").await;
    write(&store, "/registry/a", "2").await;
    delete(&store, "/registry/b").await;
    let before = store.range("/registry/", None, 0, None).await.unwrap();
    drop(store);

    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(store.range("/registry/", None, 0, None).await.unwrap(), before);
    assert_eq!(store.revision().await.unwrap(), 5);
    let old = store.range("/registry/", None, 0, Some(3)).await.unwrap();
    assert_eq!(old.items.len(), 2);
    let mut watch = store.watch("/registry/", 2).await.unwrap();
    assert_eq!(events_until(&mut watch, 5).await.len(), 4);

    // The newest revision survives even when the compaction removed its row.
    store.compact(5).await.unwrap();
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(store.revision().await.unwrap(), 5);
    assert_eq!(store.range("/registry/", None, 0, None).await.unwrap(), before);
    assert_eq!(
        store.watch("/registry/", 5).await.unwrap_err(),
        Error::Compacted { revision: 5 }
    );
    assert_eq!(write(&store, "/registry/c", "1").await, 6);
}

#[tokio::test]
async fn only_its_owner_can_read_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("new").join("data");
    let store = Embedded::open(&data).unwrap();
    write(&store, "/registry/secrets/a", "x").await;
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    for entry in std::fs::read_dir(&data).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
}

#[tokio::test]
async fn two_stores_do_not_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Embedded::open(dir.path()).unwrap();
    let error = Embedded::open(dir.path()).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::InUse(_)), "{error}");
}

#[tokio::test]
async fn data_of_others_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    drop(Embedded::open(dir.path()).unwrap());
    let file = dir.path().join("store.db");
    let newer = rusqlite::Connection::open(&file).unwrap();
    newer.pragma_update(None, "user_version", 7).unwrap();
    drop(newer);
    let error = Embedded::open(dir.path()).map(|_| ()).unwrap_err();
    let expected = format!(
        "data in {} was written by a newer skiff (format 7, this one knows up to 2); use that version, or another --data-dir",
        dir.path().display()
    );
    assert_eq!(error.to_string(), expected);

    for content in [
        &b"this is not a database at all, only some text that is long enough"[..],
        &[0xff; 9000],
    ] {
        std::fs::write(&file, content).unwrap();
        let error = Embedded::open(dir.path()).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Corrupt(_)), "{error}");
        assert_eq!(std::fs::read(&file).unwrap(), content);
    }
}

#[tokio::test]
async fn a_full_disk_fails_the_write_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        max_bytes: Some(512 << 10),
        ..Options::new(dir.path())
    };
    let store = Embedded::open_with(options).unwrap();
    let first = write(&store, "/registry/a", "1").await;
    let mut watch = store.watch("/registry/", first + 1).await.unwrap();
    let large = || Op::Put(Bytes::from(vec![7; 1 << 20]));
    for _ in 0..3 {
        let error = store
            .write("/registry/a", Expect::Any, large(), None)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::DiskFull(_)), "{error}");
        let (kv, revision) = store.get("/registry/a").await.unwrap();
        assert_eq!((&kv.unwrap().value[..], revision), (&b"1"[..], first));
    }
    // Of writes that arrive together, those that fit are stored.
    let (large, small) = tokio::join!(
        store.write("/registry/big", Expect::Absent, large(), None),
        store.write("/registry/b", Expect::Absent, put("2"), None)
    );
    assert!(matches!(large, Err(Error::DiskFull(_))), "{large:?}");
    assert_eq!(
        small.unwrap(),
        Outcome::Done {
            revision: first + 1,
            previous: None
        }
    );
    assert_eq!(events_until(&mut watch, first + 1).await.len(), 1);
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(
        store
            .range("/registry/", None, 0, None)
            .await
            .unwrap()
            .items
            .len(),
        2
    );
    assert_eq!(store.revision().await.unwrap(), first + 1);
}

fn with_clock(dir: &std::path::Path, limits: Limits) -> (Options, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(1_000_000));
    let clock = time.clone();
    let clock = Arc::new(move || clock.load(Ordering::Relaxed));
    (
        Options {
            limits,
            clock,
            ..Options::new(dir)
        },
        time,
    )
}

#[tokio::test]
async fn leases_end_in_ordinary_deletes() {
    let dir = tempfile::tempdir().unwrap();
    let (options, time) = with_clock(dir.path(), Limits::default());
    let store = Embedded::open_with(options.clone()).unwrap();
    for name in ["short", "renewed", "kept"] {
        store
            .write(
                &format!("/registry/events/{name}"),
                Expect::Absent,
                put("1"),
                Some(60),
            )
            .await
            .unwrap();
    }
    time.fetch_add(30, Ordering::Relaxed);
    store
        .write("/registry/events/renewed", Expect::Any, put("2"), Some(60))
        .await
        .unwrap();
    store
        .write("/registry/events/kept", Expect::Any, put("2"), None)
        .await
        .unwrap();
    let names = async |store: &Embedded| -> Vec<String> {
        let range = store.range("/registry/events/", None, 0, None).await.unwrap();
        range
            .items
            .iter()
            .map(|kv| kv.key.rsplit('/').next().unwrap().to_owned())
            .collect()
    };
    let mut watch = store.watch("/registry/events/", 0).await.unwrap();
    time.fetch_add(31, Ordering::Relaxed);
    store.tick().await.unwrap();
    assert_eq!(names(&store).await, ["kept", "renewed"]);
    let events = watch.next().await.unwrap().events;
    assert_eq!(
        (&*events[0].key, &events[0].value),
        ("/registry/events/short", &None)
    );
    // Leases survive a restart.
    drop(store);
    let store = Embedded::open_with(options).unwrap();
    time.fetch_add(31, Ordering::Relaxed);
    store.tick().await.unwrap();
    assert_eq!(names(&store).await, ["kept"]);
}

#[tokio::test]
async fn history_is_bounded_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        age: Duration::from_secs(300),
        events: 100,
        bytes: 1 << 20,
    };
    let (options, time) = with_clock(dir.path(), limits);
    let store = Embedded::open_with(options).unwrap();
    for n in 0..300 {
        write(&store, "/registry/a", &n.to_string()).await;
    }
    store.tick().await.unwrap();
    let revision = store.revision().await.unwrap();
    let floor = revision - 100;
    assert_eq!(
        store
            .range("/registry/", None, 0, Some(floor - 1))
            .await
            .unwrap_err(),
        Error::Compacted { revision: floor }
    );
    time.fetch_add(301, Ordering::Relaxed);
    store.tick().await.unwrap();
    assert_eq!(
        store.watch("/registry/", revision).await.unwrap_err(),
        Error::Compacted { revision }
    );
    assert_eq!(store.get("/registry/a").await.unwrap().1, revision);
    drop(store);
    let rows = rusqlite::Connection::open(dir.path().join("store.db")).unwrap();
    let count: i64 = rows
        .query_row("SELECT count(*) FROM kv", [], |row| row.get(0))
        .unwrap();
    assert_eq!(count, 1);
}

/// Not a test of its own: the process that [`kill_9_loses_no_acknowledged_write`] starts and kills.
#[tokio::test(flavor = "multi_thread")]
async fn child_that_writes_until_killed() {
    let Ok(dir) = std::env::var("SKIFF_STORE_TEST_DIR") else {
        return;
    };
    let store = Arc::new(Embedded::open(&dir).unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    let writers = std::env::var("SKIFF_STORE_TEST_WRITERS").unwrap();
    for writer in 0..writers.parse().unwrap() {
        let store = store.clone();
        tasks.spawn(async move {
            let key = format!("/registry/w/{writer}");
            for n in 0_u64.. {
                let value = format!("{n} {}", "x".repeat((n as usize * 37) % 3000));
                let revision = write(&*store, &key, &value).await;
                // One write call a line, so that a kill does not leave half an acknowledgement.
                let line = format!("ack {key} {n} {revision}\n");
                // SAFETY: a plain write(2) of a live buffer to standard output.
                unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
                if n % 50 == 49 {
                    let _ = store.compact(revision - 10).await;
                }
            }
        });
    }
    tasks.join_all().await;
}

struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn kill_9_loses_no_acknowledged_write() {
    let dir = tempfile::tempdir().unwrap();
    let mut highest = 0;
    for round in 0..4_usize {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_killed", "--nocapture"])
            .env("SKIFF_STORE_TEST_DIR", dir.path())
            // Together they write by the thread, alone by itself.
            .env("SKIFF_STORE_TEST_WRITERS", if round % 2 == 0 { "8" } else { "1" })
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut child = Child(child);
        let mut acknowledged = std::collections::BTreeMap::new();
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        let mut count = 0;
        let mut record = |line: String| {
            let mut words = line.split(' ').skip_while(|word| !word.ends_with("ack")).skip(1);
            if let (Some(key), Some(n), Some(revision)) = (words.next(), words.next(), words.next()) {
                let (n, revision): (u64, i64) = (n.parse().unwrap(), revision.parse().unwrap());
                acknowledged.insert(key.to_owned(), (n, revision));
                count += 1;
            }
            count
        };
        while record(lines.next().expect("the child ended by itself").unwrap()) < 200 + round * 333 {}
        child.0.kill().unwrap();
        for line in lines {
            record(line.unwrap());
        }
        drop(child);

        let store = Embedded::open(dir.path()).unwrap();
        let now = store.revision().await.unwrap();
        for (key, (n, revision)) in acknowledged {
            let kv = store
                .get(&key)
                .await
                .unwrap()
                .0
                .expect("an acknowledged key is there");
            let stored: u64 = String::from_utf8_lossy(&kv.value)
                .split(' ')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            // A write that was stored but not yet acknowledged may follow; one at most, each writer waits.
            assert!(
                stored == n || stored == n + 1,
                "{key}: acknowledged {n}, stored {stored}"
            );
            assert!(kv.mod_revision >= revision && now >= revision);
            highest = highest.max(revision);
        }
        assert!(now >= highest, "the revision never goes back");
    }
}

/// Not a test of its own: runs on the small file system that [`a_file_system_without_space`] mounts.
#[tokio::test]
async fn child_on_a_small_file_system() {
    let Ok(dir) = std::env::var("SKIFF_STORE_TEST_SMALL") else {
        return;
    };
    let dir = std::path::Path::new(&dir);
    let store = Embedded::open(dir.join("data")).unwrap();
    let ballast = fill(&dir.join("ballast"));
    ballast
        .set_len(ballast.metadata().unwrap().len() - (6 << 20))
        .unwrap();
    let small = |n: i64| format!("/registry/small-{n}");
    for n in 0..600 {
        write(&store, &small(n), &"s".repeat(2000)).await;
    }
    let mut stored = 600;
    let error = loop {
        let op = Op::Put(Bytes::from(vec![7; 64 << 10]));
        match store
            .write(&format!("/registry/{stored}"), Expect::Absent, op, None)
            .await
        {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::DiskFull(_)), "{error}");
    let revision = store.revision().await.unwrap();
    assert_eq!(revision, 1 + stored);
    // To the last byte, so that nothing fits by chance.
    let rest = fill(&dir.join("rest"));
    let put_new = async |store: &Embedded| {
        let op = Op::Put(Bytes::from(vec![7; 64 << 10]));
        store.write("/registry/new", Expect::Absent, op, None).await
    };
    assert!(matches!(put_new(&store).await, Err(Error::DiskFull(_))));
    assert!(matches!(store.health().await, Err(Error::DiskFull(_))));
    // What frees room passes, and so does what marks an object as being deleted; also after a restart.
    for n in 0..300 {
        write(&store, &small(n), &"m".repeat(2100)).await;
        delete(&store, &small(n)).await;
    }
    assert!(matches!(put_new(&store).await, Err(Error::DiskFull(_))));
    assert!(store.health().await.is_err());
    drop(store);
    let store = Embedded::open(dir.join("data")).unwrap();
    for n in 300..600 {
        delete(&store, &small(n)).await;
    }
    assert!(matches!(put_new(&store).await, Err(Error::DiskFull(_))));
    stored -= 600;
    let revision = store.revision().await.unwrap();
    assert_eq!(
        revision,
        1 + stored + 600 + 900,
        "nothing that was refused is there"
    );
    // Space comes back: writes work again, without a restart and without a gap.
    std::fs::remove_file(dir.join("ballast")).unwrap();
    std::fs::remove_file(dir.join("rest")).unwrap();
    drop((ballast, rest));
    let healed = async {
        while store.health().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), healed)
        .await
        .unwrap();
    for n in 0..4 {
        assert_eq!(
            write(&store, &format!("/registry/late-{n}"), &"x".repeat(64 << 10)).await,
            revision + 1 + n
        );
    }
    drop(store);
    let store = Embedded::open(dir.join("data")).unwrap();
    assert_eq!(store.revision().await.unwrap(), revision + 4);
    assert_eq!(
        store
            .range("/registry/", None, 0, None)
            .await
            .unwrap()
            .items
            .len() as i64,
        stored + 4
    );
    println!("survived a full disk");
}

/// A file that takes all the room there is.
fn fill(path: &std::path::Path) -> std::fs::File {
    let mut file = std::fs::File::create(path).unwrap();
    while std::io::Write::write(&mut file, &[7; 4096]).is_ok_and(|count| count > 0) {}
    file
}

#[test]
fn a_file_system_without_space() {
    let dir = tempfile::tempdir().unwrap();
    // In a mount namespace of its own: the mount goes when the process does.
    let script = "mount -t tmpfs -o size=128m none \"$0\" 2>/dev/null || { echo no mounts here; exit 0; }
        exec \"$1\" --exact child_on_a_small_file_system --nocapture";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .env("SKIFF_STORE_TEST_SMALL", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let refused = text.contains("no mounts here")
        || String::from_utf8_lossy(&output.stderr).contains("Operation not permitted");
    if refused {
        eprintln!("skipped: mounting needs root");
        return;
    }
    assert!(
        output.status.success() && text.contains("survived a full disk"),
        "{output:?}"
    );
}
