//! The embedded store when a caller that is alone commits by itself: what stalls, what panics, and what order there is.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use skiff_store::embedded::Options;
use skiff_store::{Embedded, Expect, Outcome, Store};

use crate::suite::{events_until, put, write};

/// A clock by which a write can be held up as a disk would, and seen where it is made.
#[derive(Default)]
struct Gate {
    held: parking_lot::Mutex<bool>,
    opened: parking_lot::Condvar,
    by_callers: AtomicU64,
}

impl Gate {
    fn clock(self: &Arc<Gate>) -> skiff_store::embedded::Clock {
        let gate = self.clone();
        Arc::new(move || {
            if std::thread::current().name() != Some("store-writer") {
                gate.by_callers.fetch_add(1, Ordering::SeqCst);
                let mut held = gate.held.lock();
                gate.opened.wait_while(&mut held, |held| *held);
            }
            100
        })
    }

    fn hold(&self, held: bool) {
        *self.held.lock() = held;
        self.opened.notify_all();
    }

    fn open(self: &Arc<Gate>, dir: &std::path::Path) -> Arc<Embedded> {
        let options = Options {
            clock: self.clock(),
            quick: Duration::MAX,
            ..Options::new(dir)
        };
        let store = Arc::new(Embedded::open_with(options).unwrap());
        self.by_callers.store(0, Ordering::SeqCst);
        store
    }
}

/// Ends a runtime whose threads the gate may hold.
struct OpenAtEnd(Arc<Gate>);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.hold(false);
    }
}

/// Answers each byte that comes; before it answers a `w`, it writes.
async fn serve(listener: TcpListener, store: Arc<Embedded>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let store = store.clone();
        tokio::spawn(async move {
            while let Ok(byte) = stream.read_u8().await {
                if byte == b'w' {
                    write(&*store, "/registry/a", "1").await;
                }
                stream.write_u8(byte).await.unwrap();
            }
        });
    }
}

#[test]
fn a_commit_that_stalls_holds_up_its_caller_only() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let store = gate.open(dir.path());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let server = runtime.spawn(serve(listener, store.clone()));
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    };
    let say = |mut stream: &TcpStream, byte: u8| stream.write_all(&[byte]).unwrap();
    let hear = |mut stream: &TcpStream| {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        byte[0]
    };
    let (first, second) = (connect(), connect());
    let _open = OpenAtEnd(gate.clone());
    for _ in 0..10 {
        for stream in [&first, &second] {
            say(stream, b'p');
            assert_eq!(hear(stream), b'p');
        }
        // The thread makes the first write, and learns from it how long one takes; soon the caller makes its own.
        let before = gate.by_callers.load(Ordering::SeqCst);
        gate.hold(true);
        first.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut answer = [0];
        say(&first, b'w');
        while gate.by_callers.load(Ordering::SeqCst) == before {
            if (&first).read_exact(&mut answer).is_ok() {
                say(&first, b'w');
            }
        }
        first.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        for _ in 0..10 {
            say(&second, b'p');
            assert_eq!(hear(&second), b'p');
        }
        // Another writer waits for the first, and nobody for the other.
        say(&second, b'w');
        let third = connect();
        say(&third, b'p');
        assert_eq!(hear(&third), b'p');
        gate.hold(false);
        assert_eq!((hear(&first), hear(&second)), (b'w', b'w'));
    }
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writes_by_callers_and_by_the_thread_keep_one_order() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let store = gate.open(dir.path());
    let mut watch = store.watch("/registry/", 2).await.unwrap();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4 {
        let store = store.clone();
        writers.spawn(async move {
            for number in 0..100 {
                write(&*store, &format!("/registry/{writer}-{number}"), "1").await;
                // Now alone, now together.
                tokio::time::sleep(Duration::from_micros(number * writer * 100)).await;
            }
        });
    }
    writers.join_all().await;
    let revisions: Vec<i64> = events_until(&mut watch, 401)
        .await
        .iter()
        .map(|event| event.revision)
        .collect();
    assert_eq!(revisions, (2..=401).collect::<Vec<_>>());
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(
        store
            .range("/registry/", None, 0, None)
            .await
            .unwrap()
            .items
            .len(),
        400
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_a_callers_commit_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let trigger = armed.clone();
    let options = Options {
        clock: Arc::new(move || {
            let by_thread = std::thread::current().name() == Some("store-writer");
            assert!(
                by_thread || !trigger.load(Ordering::SeqCst),
                "the clock is broken"
            );
            100
        }),
        quick: Duration::MAX,
        ..Options::new(dir.path())
    };
    let store = Arc::new(Embedded::open_with(options).unwrap());
    armed.store(true, Ordering::SeqCst);
    // The thread makes the first write, and those that find it at work.
    let mut revision = 1;
    loop {
        let own = store.clone();
        let write = async move { own.write("/registry/a", Expect::Any, put("1"), None).await };
        match tokio::spawn(write).await {
            Ok(written) => {
                written.unwrap();
                revision += 1;
            }
            Err(ended) => break assert!(ended.is_panic()),
        }
    }
    // The next writer finds what the panic left between disk and memory, and goes on from there.
    armed.store(false, Ordering::SeqCst);
    let mut watch = store.watch("/registry/", revision + 1).await.unwrap();
    let written = store
        .write("/registry/a", Expect::Any, put("2"), None)
        .await
        .unwrap();
    let Outcome::Done { revision: now, .. } = written else {
        panic!("{written:?}");
    };
    assert!(now == revision + 1 || now == revision + 2, "{now}");
    let events = events_until(&mut watch, now).await;
    let seen: Vec<i64> = events.iter().map(|event| event.revision).collect();
    assert_eq!(seen, (revision + 1..=now).collect::<Vec<_>>());
    drop(watch);
    let store = Arc::into_inner(store).unwrap();
    drop(store);
    let store = Embedded::open(dir.path()).unwrap();
    assert_eq!(store.get("/registry/a").await.unwrap().1, now);
}

/// Futures that one task polls in turn never meet: without the hint each would be a commit of its caller.
#[test]
fn writes_of_one_task_are_committed_together() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let store = gate.open(dir.path());
    let writes = |round: &'static str| {
        let store = store.clone();
        async move {
            let one = async |n: u32| {
                let key = format!("/{round}/{n}");
                let outcome = store
                    .write(&key, Expect::Any, skiff_store::Op::Put("v".into()), None)
                    .await;
                assert!(matches!(outcome, Ok(Outcome::Done { .. })), "{outcome:?}");
            };
            tokio::join!(one(0), one(1), one(2), one(3));
        }
    };
    runtime.block_on(async {
        tokio::spawn(skiff_store::together(writes("together")))
            .await
            .unwrap()
    });
    assert_eq!(gate.by_callers.load(Ordering::SeqCst), 0);
    runtime.block_on(async { tokio::spawn(writes("alone")).await.unwrap() });
    assert!(
        gate.by_callers.load(Ordering::SeqCst) > 0,
        "the hint makes the difference"
    );
}
