//! Keeps the tasks alive that live as long as the process: one that panics or ends before its time is logged, counted
//! and started again, with a growing pause. What was counted is shown by `/metrics` and `skiff status`.
//!
//! Names come from a closed set (one per loop in the source), because they are labels of a metric. The counts are the
//! process's: several clusters in one process, as in tests, share them.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::AssertUnwindSafe;
use std::sync::LazyLock;
use std::time::Duration;

use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A task that ran this long failed for another reason than the last time.
const GOOD_RUN: Duration = Duration::from_secs(60);
/// The most of a failure's text that is kept.
const MESSAGE_BYTES: usize = 500;

/// The tasks of one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tasks {
    pub running: usize,
    /// Those that failed and wait for their next start.
    pub waiting: usize,
    /// How often one of them failed, or one item of its work.
    pub failures: u64,
    pub last_failure: String,
}

struct All {
    /// Leaf lock.
    tasks: Mutex<BTreeMap<&'static str, Tasks>>,
    /// How often there was a failure or a recovery.
    changes: watch::Sender<u64>,
}

static ALL: LazyLock<All> = LazyLock::new(|| All {
    tasks: Mutex::default(),
    changes: watch::Sender::new(0),
});

fn update(name: &'static str, change: impl FnOnce(&mut Tasks)) {
    change(ALL.tasks.lock().entry(name).or_default());
}

/// All tasks by name.
pub fn tasks() -> BTreeMap<&'static str, Tasks> {
    ALL.tasks.lock().clone()
}

/// Changes whenever a task fails or is started again.
pub fn changes() -> watch::Receiver<u64> {
    ALL.changes.subscribe()
}

/// Counts a failure of a task that goes on by itself, such as one bad item of its work.
pub fn failed(name: &'static str, why: &str) {
    let end = (0..=MESSAGE_BYTES.min(why.len()))
        .rev()
        .find(|end| why.is_char_boundary(*end));
    update(name, |tasks| {
        tasks.failures += 1;
        why[..end.unwrap_or(0)].clone_into(&mut tasks.last_failure);
    });
    ALL.changes.send_modify(|count| *count += 1);
}

/// Runs what `start` makes in a task of its own until `shutdown`, again and again if it ends before. At the shutdown it
/// is dropped where it stands.
pub fn keep<F>(
    name: &'static str,
    shutdown: &CancellationToken,
    start: impl FnMut() -> F + Send + 'static,
) -> tokio::task::AbortHandle
where
    F: Future<Output = ()> + Send + 'static,
{
    let shutdown = shutdown.clone();
    let task = tokio::spawn(async move {
        let until = shutdown.clone();
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = kept(name, until, start) => {}
        }
    });
    task.abort_handle()
}

/// The same in the task of the caller, and at the shutdown it may end by itself.
pub async fn kept<F>(name: &'static str, shutdown: CancellationToken, mut start: impl FnMut() -> F + Send)
where
    F: Future<Output = ()> + Send,
{
    let mut pause = FIRST_PAUSE;
    while !shutdown.is_cancelled() {
        let began = Instant::now();
        let ended = {
            let _running = Counted::new(name, |tasks| &mut tasks.running);
            let work = AssertUnwindSafe(async { start().await }).catch_unwind();
            injection::or_panic(name, work).await
        };
        if shutdown.is_cancelled() {
            return;
        }
        let why = match ended {
            Ok(()) => "ended".to_owned(),
            Err(panic) => format!("panicked: {}", panic_text(&*panic)),
        };
        if began.elapsed() >= GOOD_RUN {
            pause = FIRST_PAUSE;
        }
        tracing::error!(
            task = name,
            why,
            pause_ms = pause.as_millis(),
            "a task failed, starting it again"
        );
        let _waiting = Counted::new(name, |tasks| &mut tasks.waiting);
        failed(name, &why);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        ALL.changes.send_modify(|count| *count += 1);
    }
}

/// Runs what `start` makes to its end, again if it panics: for a task that is meant to end one day.
pub async fn finished<F>(name: &'static str, mut start: impl FnMut() -> F + Send)
where
    F: Future<Output = ()> + Send,
{
    let mut pause = FIRST_PAUSE;
    loop {
        let ended = {
            let _running = Counted::new(name, |tasks| &mut tasks.running);
            let work = AssertUnwindSafe(async { start().await }).catch_unwind();
            injection::or_panic(name, work).await
        };
        let Err(panic) = ended else { return };
        let why = format!("panicked: {}", panic_text(&*panic));
        tracing::error!(task = name, why, "a task failed, starting it again");
        failed(name, &why);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Counted while it lives.
struct Counted {
    name: &'static str,
    place: fn(&mut Tasks) -> &mut usize,
}

impl Counted {
    fn new(name: &'static str, place: fn(&mut Tasks) -> &mut usize) -> Counted {
        update(name, |tasks| *place(tasks) += 1);
        Counted { name, place }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        update(self.name, |tasks| {
            let count = (self.place)(tasks);
            *count = count.saturating_sub(1);
        });
    }
}

/// What a panic says.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// The counts in Prometheus' text form.
pub fn metrics() -> String {
    let all = tasks();
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, help: &str, value: fn(&Tasks) -> u64| {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (task, counts) in &all {
            let _ = writeln!(out, "{name}{{task=\"{task}\"}} {}", value(counts));
        }
    };
    family(
        "skiff_tasks",
        "gauge",
        "Supervised tasks that run now.",
        |tasks| tasks.running as u64,
    );
    family(
        "skiff_task_failures_total",
        "counter",
        "How often a supervised task, or one item of its work, failed and was tried again.",
        |tasks| tasks.failures,
    );
    out
}

/// Lets a test make a task panic wherever it waits. There is nothing of this in a release build.
#[cfg(debug_assertions)]
mod injection {
    use super::{AssertUnwindSafe, BTreeMap, FutureExt, LazyLock, Mutex};
    use std::sync::Arc;
    use tokio::sync::Notify;

    static TOLD: LazyLock<Mutex<BTreeMap<&'static str, Arc<Notify>>>> = LazyLock::new(Mutex::default);

    fn told(name: &'static str) -> Arc<Notify> {
        TOLD.lock().entry(name).or_default().clone()
    }

    pub fn panic_in(name: &'static str) {
        told(name).notify_waiters();
    }

    pub async fn or_panic<T>(
        name: &'static str,
        work: impl Future<Output = std::thread::Result<T>>,
    ) -> std::thread::Result<T> {
        let told = told(name);
        let panic = AssertUnwindSafe(async {
            told.notified().await;
            panic!("a test said so");
        });
        tokio::select! {
            ended = work => ended,
            ended = panic.catch_unwind() => ended,
        }
    }
}

#[cfg(not(debug_assertions))]
mod injection {
    pub async fn or_panic<T>(
        _: &'static str,
        work: impl Future<Output = std::thread::Result<T>>,
    ) -> std::thread::Result<T> {
        work.await
    }
}

/// Makes the tasks of this name panic where they wait. For tests.
#[cfg(debug_assertions)]
pub fn panic_in(name: &'static str) {
    injection::panic_in(name);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_or_ends_comes_back_and_is_counted() {
        let (shutdown, starts) = (CancellationToken::new(), Arc::new(AtomicU32::new(0)));
        let (alive, mut lives) = tokio::sync::mpsc::channel(1);
        let mut changed = changes();
        let counter = starts.clone();
        keep("test", &shutdown, move || {
            let (nth, alive) = (counter.fetch_add(1, Ordering::SeqCst), alive.clone());
            async move {
                assert!(nth > 0, "the first start fails");
                if nth == 1 {
                    return;
                }
                let _ = alive.send(()).await;
                std::future::pending().await
            }
        });
        lives.recv().await;
        assert_eq!(starts.load(Ordering::SeqCst), 3);
        let found = tasks().remove("test");
        let found = found.expect("it is known");
        assert_eq!((found.running, found.waiting, found.failures), (1, 0, 2));
        assert_eq!(found.last_failure, "ended");
        assert!(changed.has_changed().is_ok_and(|changed| changed));
        changed.mark_unchanged();
        let text = metrics();
        assert!(
            text.contains("skiff_task_failures_total{task=\"test\"} 2"),
            "{text}"
        );
        panic_in("test");
        lives.recv().await;
        assert_eq!(tasks()["test"].last_failure, "panicked: a test said so");
        shutdown.cancel();
        while tasks()["test"].running > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        failed("cut", &"é".repeat(MESSAGE_BYTES));
        assert_eq!(tasks()["cut"].last_failure.len(), MESSAGE_BYTES);
    }
}
